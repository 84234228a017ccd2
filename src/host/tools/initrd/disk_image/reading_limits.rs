//! Bounds of what is read from one image.

use anyhow::{Result, ensure};

/// Entries and bytes of all names, as of an initrd.
pub const MAX_ENTRIES: usize = 300_000;
pub const MAX_NAMES: usize = 64 << 20;
/// No path of a process is deeper.
pub const MAX_DEPTH: usize = 2048;

/// Bounds of what is read from one image.
#[derive(Debug, Default)]
pub struct Limits {
    entries: usize,
    names: usize,
}

impl Limits {
    /// A name that waits for its turn.
    pub fn wait(&mut self, bytes: usize) -> Result<()> {
        self.entries += 1;
        ensure!(self.entries <= MAX_ENTRIES, "more than {MAX_ENTRIES} entries: no guest has so many");
        self.count(bytes)
    }

    pub fn count(&mut self, bytes: usize) -> Result<()> {
        self.names += bytes;
        ensure!(self.names <= MAX_NAMES, "names of more than {MAX_NAMES} bytes: no guest has so many");
        Ok(())
    }
}

pub fn limit_depth(depth: usize) -> Result<()> {
    ensure!(depth <= MAX_DEPTH, "directories lie more than {MAX_DEPTH} deep: no guest has such");
    Ok(())
}
