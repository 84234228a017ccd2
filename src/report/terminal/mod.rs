//! The terminal or pipe that a program writes to.

pub mod progress_line;
pub mod stdout; // standard output, which its reader may close // progress on a terminal's standard error
