//! Tests on an emulated host: systemd, podman, and guests under KVM with AF_VSOCK.

pub mod clock;
pub mod diagnosis;
pub mod guests;
pub mod passthrough;
pub mod root;
pub mod service;
pub mod trace;
pub mod traced_boot;
