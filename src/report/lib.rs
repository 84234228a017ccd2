//! A boot for people and programs: records and lines in, text and pages out. No socket, no code of
//! the guest. Each folder imports those above it and never one below.

pub mod data; // boot files, the agent's lines, clocks
pub mod terminal; // standard output, progress
pub mod severity; // how bad a finding is
pub mod boot; // the model of one boot, and its timeline
pub mod analysis; // blame, critical path, comparisons
pub mod views; // tables, the live view, pages, pictures, traces
pub mod otlp; // a boot as an OTLP request
pub mod import; // boots from other programs' logs
