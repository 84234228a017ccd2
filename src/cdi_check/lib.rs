//! Checks CDI specs before a sandbox depends on them: agents' verdicts, and edits of a container.
//!
//! The agents' own crates judge; the rules explain. Files, and everything in them, are hostile:
//! bounded, and printed as printable ASCII only.

pub mod check_report;
pub mod check_text;
pub mod container;
pub mod judge;
pub mod look;
pub mod nodes;
mod rules;
pub mod shape;
pub mod spec_files;
pub mod spec_rules;
