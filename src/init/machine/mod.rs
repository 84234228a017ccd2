//! The kernel's services, each for itself: no other folder of this crate is known here.

pub mod clock; // clock readings
pub mod confidential; // detection of confidential guests
pub mod files; // reads within a limit, and errors that name the path
pub mod interrupts; // interrupts kept off the vCPU that enables
pub mod kernel_console; // console level of the kernel during an enabling
pub mod kernel_log; // lines of the kernel's log
pub mod memory; // RAM that is available
pub mod mounts; // file systems, and /var/run
pub mod ptp_kvm; // the host's clock, by way of the hypervisor
pub mod sys; // system calls that need unsafe
pub mod threads; // threads for calls that block; a shortage of threads is waited out
pub mod tsc; // time between the VM's start and the kernel's clock
pub mod uevents; // devices that come and go
