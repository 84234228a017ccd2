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

// The kernel's services: clocks, threads, mounts, interrupts, uevents, its log.
pub mod machine;

// Steps into records, their ring, the sinks.
pub mod stream;

// Files of others: ELF, modules, the loader's cache.
pub mod formats;

// A GPU in sysfs, /proc and /dev, and binding it.
pub mod gpu;

// Extension disks of Kata 4: dm-verity, EROFS.
pub mod extensions;

// Files of the driver for containers.
pub mod driver_files;

// Kernel command line parameters.
pub mod config;

// Loading the driver.
pub mod kernel_modules;

// Facts that only NVML knows, from a helper process.
pub mod nvml;

// The spec, publishing it, the container's hooks.
pub mod cdi;

// NVIDIA's daemons: choice, start, supervision.
pub mod services;

// The sequence: PID 1, keeper, worker, and the bring-up of all GPUs.
pub mod boot;
