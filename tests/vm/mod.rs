//! The VM tests; see `main.rs` for the runner.

pub mod guest;
