//! The terminal or pipe that a program writes to.

pub mod stdout; // standard output, which its reader may close
pub mod progress_line; // progress on a terminal's standard error
