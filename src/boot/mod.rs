//! The sequence. Nothing else in this crate knows what comes before what.
//!
//! [`stage0`] is PID 1 until it becomes the agent; [`keeper`] holds the GPUs' descriptors and starts the worker, again if need be; [`worker`] brings
//! the sinks up and runs [`bring_up`], which gives each GPU a task ([`gpu`]) after the [`strategy`] that fits; [`supervise`] is PID 1's life when the
//! agent is its child.

mod adopt; // what a worker that takes over knows
mod batch; // which initialisations go together
mod beside; // what there is besides GPUs' own nodes
mod bring_up; // all GPUs
mod busy; // counts
mod descriptors; // what holds adapters up
mod driver; // the driver's load
mod gpu; // one GPU
mod handover; // PID 1 becomes the agent
mod keeper;
mod lane; // enabling, one after another
mod lane_cpu; // and its vCPU
mod lane_process; // and what runs there
mod lateness; // reports
mod opener; // opening, where a killed worker takes nothing with it
mod publication; // the writer of the spec
mod roster; // which GPUs there are, and their names
pub mod stage0;
mod strategy;
mod supervise;
mod user_space; // the driver's files for containers
mod worker;

use crate::config::{Config, Note};

const SYS: &str = "/sys";

/// What stage 0 found out, and every later part works with.
struct Boot {
    config: Config,
    /// What became of every word that is ours.
    notes: Vec<Note>,
    /// The kernel command line as the kernel gave it.
    command_line: Vec<u8>,
    stamps: stage0::Stamps,
}
