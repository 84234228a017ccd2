//! Limit of the files that are read here.

use anyhow::{Context, Result, ensure};
use kata_gpu_report::data::text::printable;
use std::path::Path;

/// Longest file of a boot that is read here: several times the file of a boot with 16 GPUs and a
/// chatty kernel. A longer file takes time that other boots need.
const MAX_FILE: u64 = 8 << 20;

/// Fails if the file of a boot is longer than [`MAX_FILE`].
pub fn check_size(path: &Path) -> Result<()> {
    let at = || printable(&path.to_string_lossy());
    let length = path.metadata().with_context(at)?.len();
    ensure!(
        length <= MAX_FILE,
        "{} has {length} bytes, more than the {MAX_FILE} that are read here",
        at()
    );
    Ok(())
}
