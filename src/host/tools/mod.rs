//! Programs beside the timeline: guest images, Kata's configuration, CDI specs, others' logs.

#[cfg(feature = "host")]
pub mod cdi_check; // specs before the agents' own parsers
pub mod guest_disk; // a guest's image as a disk: where its root is
pub mod import; // boots from other programs' logs
pub mod initrd; // guest images
pub mod install; // Kata's configuration
pub mod trace; // the host's share of a boot, by the kernel's tracing
pub mod severity; // how bad a finding is
pub mod doctor; // what makes boots slow on this host, for the rules of analysis
