//! CDI specs before the parsers of the agents that will read them: which agents refuse the files,
//! and what a container gets.
//!
//! Files and everything in them are hostile: reads are bounded, and output is printable ASCII.

pub mod agents;
pub mod check;
pub mod container;
pub mod page;
pub mod spec_files;
