//! kata-gpu-init: PID 1 of a Kata Containers guest with NVIDIA GPUs. A folder imports those above
//! it and never one below; tests/host/layers.rs checks it.
//!
//! Invariants, checked there as well:
//! - Only [`boot`] knows order: nothing but the program imports it.
//! - Only [`config`] knows parameter names; the check lists the texts that name one for a reader.
//! - Only [`boot::failure`] powers off; the check lists its callers.
//! - Only [`machine::sys`] is unsafe, except for the attribute that places a function before main.
//!
//! Invariant without a check: code reports times through `tracing`.

pub mod machine; // the kernel's services: clocks, threads, mounts, interrupts, uevents, its log
pub mod stream; // steps into records, their ring, the sinks
pub mod formats; // files of others: ELF, modules, the loader's cache
pub mod gpu; // what sysfs, /proc and /dev have of a GPU, and binding it
pub mod extensions; // extension disks of Kata 4: dm-verity, EROFS
pub mod driver_files; // files of the driver for containers
pub mod config; // kernel command line parameters
pub mod kernel_modules; // loading the driver
pub mod nvml; // facts that only NVML knows, from a helper process
pub mod cdi; // the spec, publishing it, the container's hooks
pub mod services; // NVIDIA's daemons: choice, start, supervision
pub mod boot; // the sequence: PID 1, keeper, worker, and the bring-up of all GPUs
