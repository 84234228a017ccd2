//! Parts of the VM tests: the agent that stands for kata-agent, the pre-init that stands for a Kata
//! kernel's built-in drivers, the yardstick of the benchmarks and the incumbent's order, an init
//! that does what the agent punishes, and the guest halves of tests. All are one static binary; the
//! name it is started under selects the part.

pub mod agent;
#[cfg(feature = "host")]
pub mod agent_client;
pub mod driver_script;
pub mod hardware;
#[cfg(feature = "host")]
pub mod import_agreement;
pub mod minimal_init;
#[cfg(feature = "host")]
pub mod nvidia_programs;
pub mod own_mounts;
pub mod protobuf;
pub mod serial_init;
pub mod serial_services;
pub mod services;
pub use kata_gpu_schedule as schedule;
pub mod sys;
pub mod trap_init;
#[cfg(feature = "host")]
pub mod trials;
pub mod ttrpc;
pub mod vm;
