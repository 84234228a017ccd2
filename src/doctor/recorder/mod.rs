//! `kata-gpu-boot doctor --record`: the host's share of one boot by the kernel's own tracing.
//!
//! Invariant: nothing of it is left on, whatever ends it, and another user's tracing is untouched
//! ([`session`]).

pub mod boot_of_vm; // the boot's file, and that of its trace
pub mod probes; // what is traced
pub mod recorded; // what one recording saw
pub mod recording; // one recording
pub mod report; // the table
pub mod session; // an instance of tracefs, and its removal
pub mod trace_line; // lines of the kernel's trace
pub mod traced_steps; // events into steps
pub mod vmm_process; // the VM's processes

#[cfg(test)]
mod tests; // a recorded trace of a real kernel
