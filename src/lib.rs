//! kata-gpu-init: starts a Kata Containers guest with NVIDIA GPUs. This page is the map, in boot order.
//!
//! Invariants, which tests/host/layers.rs reads from the sources:
//! - Only [`boot`] knows order: nothing but the programs imports it, and `host` only the agent's
//!   path.
//! - Hardware and CDI modules (every module here but `boot`, `events` and `host`) import neither
//!   `boot` nor `host` nor [`events::sinks`].
//! - Only [`config`] knows parameter names; texts for people that name one are listed there.
//! - Only [`failure`] powers off; its callers are listed there.
//! - Only [`sys`] is unsafe in the guest, apart from the attribute that puts a function before main.
//!
//! Read by people alone: code reports time through `tracing`.

pub mod clock; // when is it
pub mod tsc; // how long the VM was there before its kernel
pub mod ptp_kvm; // when it is on the host, as the hypervisor says
pub mod confidential; // whether the host is not to be trusted
pub mod config; // what was asked for: the kernel command line
pub mod mounts; // file systems, and /var/run
pub mod failure; // what follows when something fails
pub mod boot; // the sequence: PID 1, keeper, worker, and the bring-up of all GPUs
pub mod pci; // which GPUs are there
pub mod uevents; // which come and go
pub mod kernel_modules; // loading the driver
pub mod elf; // what is read of ELF files
pub mod modinfo; // what a module's file says of itself
pub mod bind; // enable, driver_override, bind
pub mod driver_log; // what the driver writes to the kernel's log
pub mod reason; // why a GPU is not usable
pub mod driver_proc; // what the driver says: minors, majors
pub mod driver_caps; // and: MIG instances and their capabilities, switches
pub mod driver_files; // which files of the driver a container needs
pub mod device_nodes; // /dev/nvidia*
pub mod adapter; // open: adapter initialisation
pub mod cdi; // the spec, and publishing it
pub mod interrupts; // keeping them off the vCPU that enables
pub mod kernel_console; // keeping the kernel quiet meanwhile
pub mod agent_watch; // seeing the agent wait, make containers and run hooks
pub mod events; // what everybody sees: records, their ring, the sinks
pub mod threads; // threads for calls that block, whenever the kernel has one
pub mod sys; // system calls that need unsafe
#[cfg(feature = "host-base")]
pub mod host; // the other side: the collector and kata-gpu-boot
