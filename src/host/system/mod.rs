//! Services of this machine that the host's half uses.

pub mod stdout; // standard output, which its reader may close
pub mod progress_line; // progress on a terminal's standard error
pub mod processes; // processes by their command lines
pub mod sleep; // sleeping until a deadline that may not be
pub mod tail; // following the console log
pub mod kernel_file; // a kernel's file: its architecture, its unpacked bytes
pub mod vm; // QEMU and vhost-device-vsock, for the demo and the tests
pub mod async_fd; // waiting for a descriptor
