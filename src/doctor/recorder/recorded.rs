//! Content of one recording, with times of the wall clock.

use kata_gpu_report::data::trace_file::{Recording, Traced};
use std::path::PathBuf;

/// Content of a recording.
#[derive(Clone, Debug, Default)]
pub struct Recorded {
    pub recording: Recording,
    /// In order of their beginning.
    pub traced: Vec<Traced>,
    /// File of the boot, if the collector has it.
    pub boot: Option<PathBuf>,
}
