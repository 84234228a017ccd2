//! Progress of the GPUs that services wait for, and the files that outlive a worker.

use crate::gpu::topology::{Functions, Topology};

/// Directory of the init's runtime files.
pub const RUN: &str = "/run/kata-gpu-init";
/// File there that keeps the worker from starting services again.
pub const ENDING: &str = "services.ending";

/// Progress of the GPUs' bring-up.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Milestones {
    /// Decided when the PCI scan is over.
    pub topology: Option<Topology>,
    /// Functions of the guest, known with the topology.
    pub functions: Functions,
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
