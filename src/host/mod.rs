//! The host's half: collects the streams of guests and shows their boots. Behind the feature
//! `host`; the guest links none of it.
//!
//! Each folder imports those above it and never one below; tests/host/layers.rs checks it.

pub mod data; // boot files, the agent's lines, clocks
pub mod system; // questions to this machine
pub mod boot; // the model of one boot, and its timeline
pub mod analysis; // blame, critical path, comparisons
pub mod views; // tables, the live view, pages, pictures, traces
pub mod otlp; // a boot as an OTLP request, and pushing it
pub mod collect; // accepts guests, one connection each, and keeps what they send
pub mod tools; // images, installation, CDI specs, others' logs
pub mod cli; // the subcommands, a file each

#[cfg(test)]
pub(crate) mod testing;
