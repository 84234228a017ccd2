//! The sequence. Nothing else in this crate knows what comes before what.
//!
//! [`stage0`] is PID 1 until it becomes the agent; [`keeper`] holds the GPUs' descriptors and starts the worker; [`worker`] brings the sinks up
//! and runs [`bring_up`], the pipeline of all GPUs; [`supervise`] is PID 1's life when the agent is its child.

mod bring_up;
mod driver;
mod handover;
mod keeper;
mod publication;
pub mod stage0;
mod supervise;
mod worker;

use crate::config::Config;
use crate::events::ring::Ring;
use std::sync::Arc;

/// What stage 0 found out, and every later part works with.
struct Boot {
    config: Config,
    /// The kernel command line as the kernel gave it.
    command_line: Vec<u8>,
    ring: Arc<Ring>,
}
