//! The boot of a guest, in three layers that import downwards only (tests/host/layers.rs reads the imports):
//!
//! - [`processes`]: who runs: PID 1 until it is the agent, the keeper, the worker;
//! - [`gpus`]: all GPUs, from the PCI scan to the spec: one schedule, one task a GPU;
//! - [`wire`]: what connects the processes: sockets, descriptors, the hand-over to the agent.

pub mod processes;
pub mod gpus;
pub mod wire;

/// Where the agent is in every Kata guest.
pub const AGENT: &std::ffi::CStr = c"/usr/bin/kata-agent";
