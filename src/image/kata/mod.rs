//! Kata's configuration, read as its runtimes read it.

pub mod drop_in; // our drop-in: its text, and what is at its path
pub mod gpu_needs; // values with which pods get no GPU
pub mod kata_config; // the configuration and the files beside it
pub mod merge; // the effective values, and the file of each
pub mod refusal; // a reason against an installation
pub mod version; // runtime and version
