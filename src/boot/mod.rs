//! The boot of a guest, in three layers that import downwards only (checked by
//! tests/host/layers.rs):
//!
//! - [`processes`]: PID 1 until it is the agent, the keeper, the worker;
//! - [`gpus`]: all GPUs, from the PCI scan to the spec: one schedule, one task a GPU;
//! - [`wire`]: connections between the processes: sockets, descriptors, the hand-over to the agent.

pub mod processes;
pub mod gpus;
pub mod wire;

/// Path of the agent in every Kata guest.
pub const AGENT: &std::ffi::CStr = c"/usr/bin/kata-agent";
