//! Limits of the entries read from one image.

use anyhow::{Result, ensure};

/// Limits of entries (a whole distribution has some ten thousand), and of the bytes of all names
/// and targets of links.
pub const MAX_ENTRIES: usize = 300_000;
pub const MAX_NAMES: usize = 64 << 20;
/// No process can name a deeper path.
pub const MAX_DEPTH: usize = 2048;

/// Entries and bytes of names read so far from one image.
#[derive(Debug, Default)]
pub struct Limits {
    entries: usize,
    names: usize,
}

impl Limits {
    /// Counts a name that is queued for reading.
    pub fn wait(&mut self, bytes: usize) -> Result<()> {
        self.entries += 1;
        ensure!(
            self.entries <= MAX_ENTRIES,
            "more than {MAX_ENTRIES} entries: no guest has so many"
        );
        self.count(bytes)
    }

    pub fn count(&mut self, bytes: usize) -> Result<()> {
        self.names += bytes;
        ensure!(
            self.names <= MAX_NAMES,
            "names of more than {MAX_NAMES} bytes: no guest has so many"
        );
        Ok(())
    }
}

pub fn limit_depth(depth: usize) -> Result<()> {
    ensure!(
        depth <= MAX_DEPTH,
        "directories lie more than {MAX_DEPTH} deep: no guest has such"
    );
    Ok(())
}
