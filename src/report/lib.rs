//! A boot for people and programs: records and lines in, text and pages out. No socket, no code of
//! the guest. Each folder imports those above it and never one below.

// Boot files, the agent's lines, clocks.
pub mod data;

// Standard output, progress.
pub mod terminal;

// How bad a finding is.
pub mod severity;

// The model of one boot, and its timeline.
pub mod boot;

// Blame, critical path, comparisons.
pub mod analysis;

// Tables, the live view, pages, pictures, traces.
pub mod views;

// A boot as an OTLP request.
pub mod otlp;

// Boots from other programs' logs.
pub mod import;

#[cfg(test)]
mod for_tests;
