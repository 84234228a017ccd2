//! kata-gpu-init: starts a Kata Containers guest with NVIDIA GPUs. Module map, in boot order.
//!
//! Invariants, checked against the sources by tests/host/layers.rs:
//! - Only [`boot`] knows order: nothing but the programs imports it, and `host` only the agent's
//!   path.
//! - Hardware and CDI modules (every module here but `boot`, `events` and `host`) import neither
//!   `boot` nor `host` nor [`events::sinks`].
//! - Only [`config`] knows parameter names; the check lists the texts that name one for a reader.
//! - Only [`failure`] powers off; the check lists its callers.
//! - Only [`sys`] is unsafe in the guest, except for the attribute that places a function before
//!   main.
//!
//! Invariant without a check: code reports times through `tracing`.

pub mod arch; // what differs between architectures
pub mod clock; // clock readings
pub mod tsc; // time between the VM's start and the kernel's clock
pub mod ptp_kvm; // the host's clock, by way of the hypervisor
pub mod confidential; // detection of confidential guests
pub mod config; // kernel command line parameters
pub mod mounts; // file systems, and /var/run
pub mod extensions; // extension disks of Kata 4: dm-verity, EROFS
pub mod failure; // messages without a stream, and power-off
pub mod boot; // the sequence: PID 1, keeper, worker, and the bring-up of all GPUs
pub mod pci; // scan for GPUs, switches and network functions
pub mod vpd; // which network functions manage switches
pub mod topology; // kind of guest, by its GPUs, switches and management functions
pub mod uevents; // GPUs that come and go
pub mod kernel_modules; // loading the driver
pub mod elf; // ELF parser
pub mod ld_so_cache; // cache of glibc's loader
pub mod modinfo; // metadata of a module's file
pub mod bind; // enable, driver_override, bind
pub mod driver_log; // the driver's lines in the kernel's log
pub mod coherent_memory; // memory of GPUs that is the guest's too (Grace)
pub mod reason; // reasons why a GPU is not usable
pub mod driver_proc; // the driver's /proc files: minors, majors
pub mod driver_caps; // the driver's /proc files: MIG instances, their capabilities, switches
pub mod driver_files; // files of the driver for containers
pub mod device_nodes; // /dev/nvidia*
pub mod adapter; // open: adapter initialisation
pub mod cdi; // the spec, and publishing it
pub mod services; // NVIDIA's daemons: choice, start, supervision
pub mod nvml; // facts that only NVML knows, from a helper process
pub mod interrupts; // interrupts kept off the vCPU that enables
pub mod kernel_console; // console level of the kernel during an enabling
pub mod agent_watch; // traces of the agent: looks for GPUs, containers, hooks
pub mod events; // records, their ring, the sinks
pub mod threads; // threads for calls that block; a shortage of threads is waited out
pub mod sys; // system calls that need unsafe
#[cfg(feature = "host-base")]
pub mod host; // the host's half: the collector and kata-gpu-boot
