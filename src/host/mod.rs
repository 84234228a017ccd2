//! The host's half: collects the streams of guests and shows their boots. Behind the feature `host`; the guest links none of it.

pub mod boot_file; // the file of one boot: its lines, reading it
pub mod boot_log; // writing it: once, append only, limited
pub mod clock; // the guest's clock beside the host's
pub mod collector; // accepts guests, one connection each
pub mod connection; // one connection, without its socket
pub mod framing; // bytes into lines
pub mod listen; // AF_VSOCK and hybrid vsock sockets
pub mod vm; // a VM, for the demo and the tests
pub mod text; // what a guest wrote, made harmless; times; colour

#[cfg(test)]
pub(crate) mod testing;
