//! NVIDIA's services in the guest: their choice, start, supervision and end.
//!
//! ```text
//! table, topology, configuration, programs -> plan -> supervisor: one task each -> launch
//!                                                         ^   ^
//!                                     milestones of the GPUs   output, syslog -> events
//! ```
//!
//! Invariants: nothing here delays a GPU or the agent; no deadline ends a service; a service
//! outlives the worker that started it, and no worker starts what still runs.

pub mod service_table; // one row per service
pub mod service_plan; // choice of services and their order
pub mod configuration; // configuration files of the daemons, made in /run
pub mod restart_backoff; // pauses before restarts
pub mod lines; // bounds of foreign log lines
mod service_output; // stdout and stderr of services
mod syslog; // /dev/log
pub mod service_processes; // services among the guest's processes
pub mod launch; // the last steps before a service's program
pub mod end; // orderly end
mod supervisor; // starts, watches and restarts services

pub use supervisor::{Inputs, run};

use crate::pci::PciAddress;
use crate::topology::Topology;

/// Directory of the init's runtime files.
const RUN: &str = "/run/kata-gpu-init";
/// File there that keeps the worker from starting services again.
const ENDING: &str = "services.ending";

/// Progress of the GPUs' bring-up.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Milestones {
    /// Decided when the PCI scan is over.
    pub topology: Option<Topology>,
    /// NVSwitches among the functions.
    pub switches: usize,
    /// Functions that manage NVLink switches.
    pub management: Vec<PciAddress>,
    /// The driver is loaded, and all nodes but those of GPUs are made.
    pub loaded: bool,
    /// All GPUs are usable or failed.
    pub settled: bool,
}

/// State of the NVLink fabric of all GPUs together, as NVML reports it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Fabric {
    /// NVML has not been asked yet.
    #[default]
    Unasked,
    /// NVML cannot be asked.
    Unknown,
    /// No GPU has one.
    Absent,
    Incomplete,
    /// Not complete in time; it may still complete.
    Late,
    Complete,
    /// Complete with an error.
    Failed,
}
