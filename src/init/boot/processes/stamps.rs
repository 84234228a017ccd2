//! Results of stage 0 for the later processes. PID 1 only stamps its steps: setting up a recorder
//! would delay the agent.

use crate::boot::failure::PowerOffRight;
use crate::config::{Config, Note};
use crate::extensions;
use crate::machine::clock::boottime_ns;
use crate::machine::tsc;
use std::fmt::Display;

/// Data that PID 1 leaves to the keeper and its workers.
pub struct Boot {
    pub config: Config,
    /// Results of parsing this init's parameters on the command line.
    pub notes: Vec<Note>,
    /// Kernel command line, unparsed.
    pub command_line: Vec<u8>,
    pub stamps: Stamps,
    /// Extensions that PID 1 has mounted.
    pub extensions: Vec<extensions::Stamp>,
    /// Reason why the guest powers off instead of starting the agent.
    pub refused: Option<String>,
    /// `None` only where PID 1 is another process: such a process never boots a guest.
    pub power_off_right: Option<PowerOffRight>,
}

/// The steps of stage 0.
#[derive(Clone, Copy)]
pub enum What {
    Mounts,
    Console,
    Config,
    /// Only where the agent needs one.
    Extensions,
}

/// A step of stage 0, for the worker to put into the stream.
pub struct Stamp {
    pub what: What,
    pub begin_ns: u64,
    pub end_ns: u64,
    pub error: Option<String>,
}

/// All steps of stage 0, with their times.
pub struct Stamps {
    /// First instruction of PID 1.
    pub started_ns: u64,
    /// TSC at that time; None without a TSC.
    pub tsc: Option<tsc::Reading>,
    pub steps: Vec<Stamp>,
}

impl Stamps {
    /// Stamps a step; its error is only reported.
    pub fn step<T, E: Display>(
        &mut self,
        what: What,
        work: impl FnOnce() -> Result<T, E>,
    ) -> Option<T> {
        self.step_with_error(what, || work().map_err(|e| e.to_string()))
            .ok()
    }

    /// Stamps a step whose error counts.
    pub fn step_with_error<T>(
        &mut self,
        what: What,
        work: impl FnOnce() -> Result<T, String>,
    ) -> Result<T, String> {
        let begin_ns = boottime_ns();
        let result = work();
        self.steps.push(Stamp {
            what,
            begin_ns,
            end_ns: boottime_ns(),
            error: result.as_ref().err().cloned(),
        });
        result
    }
}
