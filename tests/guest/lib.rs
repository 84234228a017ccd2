//! The guest's programs of the VM tests: the agent that stands for kata-agent, the pre-init that
//! stands for a Kata kernel's built-in drivers, the yardstick of the benchmarks and the incumbent's
//! order, an init that does what the agent punishes, and the guest halves of tests. All are one
//! static binary; the name it is started under selects the part.

pub mod agent;
pub mod dm_init;
pub mod driver_script;
pub mod halves;
pub mod hardware;
pub mod minimal_init;
pub mod own_mounts;
pub mod protobuf;
pub mod serial_init;
pub mod serial_services;
pub mod services;
pub mod stamped;
pub mod start;
pub mod sys;
pub mod trap_init;
pub mod ttrpc;
