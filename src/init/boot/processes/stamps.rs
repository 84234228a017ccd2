//! Data that PID 1 leaves to the keeper and its workers.

use crate::boot::failure::PowerOffRight;
use crate::config::{Config, Note};
use crate::machine::tsc;
use crate::stream::stamps::Stamp;

/// Results of stage 0.
pub struct Boot {
    pub config: Config,
    /// Results of parsing this init's parameters on the command line.
    pub notes: Vec<Note>,
    /// Kernel command line, unparsed.
    pub command_line: Vec<u8>,
    /// First instruction of PID 1.
    pub started_ns: u64,
    /// TSC at that time; None without a TSC.
    pub tsc: Option<tsc::Reading>,
    pub steps: Vec<Stamp>,
    /// Reason why the guest powers off instead of starting the agent.
    pub refused: Option<String>,
    /// `None` only where PID 1 is another process: such a process never boots a guest.
    pub power_off_right: Option<PowerOffRight>,
}
