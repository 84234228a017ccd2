//! Live view of boots, from the collector's files as they grow.

pub mod bars; // a bar per GPU
pub mod files; // the lines of files that grow
pub mod progress; // the step that each GPU is in
pub mod sandbox; // the boot of one sandbox
