//! Harness of the tests that need a kernel or the whole tree: guests and hosts in VMs, a client of
//! kata-agent, and what compares ours with NVIDIA's.

pub mod agent_client;
pub mod import_agreement;
pub mod nvidia_programs;
pub mod trials;
pub mod vm;
pub use kata_gpu_schedule as schedule;
