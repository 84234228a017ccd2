//! Findings of stage 0, for the processes that come after it: a recorder is more than PID 1 should
//! set up before the agent runs.

use crate::clock::boottime_ns;
use crate::config::{Config, Note};
use crate::tsc;
use std::fmt::Display;

/// All that PID 1 leaves to the keeper and its workers.
pub struct Boot {
    pub config: Config,
    /// What became of every word of the command line that is ours.
    pub notes: Vec<Note>,
    /// The kernel command line as the kernel gave it.
    pub command_line: Vec<u8>,
    pub stamps: Stamps,
}

/// The steps of stage 0.
#[derive(Clone, Copy)]
pub enum What {
    Mounts,
    Console,
    Config,
}

/// One of them, for the worker to put into the stream.
pub struct Stamp {
    pub what: What,
    pub begin_ns: u64,
    pub end_ns: u64,
    pub error: Option<String>,
}

/// All of stage 0, stamped as it happened.
pub struct Stamps {
    /// First instruction of PID 1.
    pub started_ns: u64,
    /// The TSC then; None where there is none.
    pub tsc: Option<tsc::Reading>,
    pub steps: Vec<Stamp>,
}

impl Stamps {
    pub fn step<T, E: Display>(&mut self, what: What, work: impl FnOnce() -> Result<T, E>) -> Option<T> {
        let begin_ns = boottime_ns();
        let result = work().map_err(|e| e.to_string());
        let end_ns = boottime_ns();
        let (value, error) = match result {
            Ok(value) => (Some(value), None),
            Err(error) => (None, Some(error)),
        };
        self.steps.push(Stamp { what, begin_ns, end_ns, error });
        value
    }
}
