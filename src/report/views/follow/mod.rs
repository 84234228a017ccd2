//! Live view of boots, from the collector's files as they grow.

pub mod bars; // a bar per GPU
pub mod progress; // the step that each GPU is in
