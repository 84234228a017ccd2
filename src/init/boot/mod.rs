//! The boot of a guest, in three layers that import downwards only (checked by
//! tests/host/layers.rs):
//!
//! - [`processes`]: PID 1 until it is the agent, the keeper, the worker;
//! - [`bring_up`]: all GPUs, from the PCI scan to the spec: one schedule, one task a GPU;
//! - [`ipc`]: connections between the processes: sockets, descriptors, the hand-over to the agent.

pub mod agent_watch; // traces of the agent: looks for GPUs, containers, hooks
pub mod bring_up;
pub mod failure; // messages without a stream, and power-off
pub mod ipc;
pub mod processes;

/// Path of the agent in every Kata guest.
pub const AGENT: &std::ffi::CStr = c"/usr/bin/kata-agent";
