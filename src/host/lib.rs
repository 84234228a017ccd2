//! This machine, as the programs of the host see it.

pub mod async_fd; // waiting for a descriptor
pub mod kernel_file; // a kernel's file: its architecture, its unpacked bytes
pub mod processes; // processes by their command lines
pub mod qemu; // CID of each VM, by QEMU's command line
pub mod qemu_machine; // words of QEMU's command line for an architecture
pub mod sleep;
pub mod tail; // following the console log
pub mod vm; // QEMU and vhost-device-vsock, for the demo and the tests
