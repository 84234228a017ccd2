//! Putting a spec in front of the agent: written whole under a name the agent does not read, then
//! renamed over the old one.
//!
//! There is one publisher in a guest. A reader sees the old text or the new one, at any moment, and
//! never none.

use super::schema::Spec;
use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// Where the agent looks, and nowhere else (through `/var/run`, which leads here).
pub const DIRECTORY: &str = "/run/cdi";
/// The name of the GPUs' file, the incumbent's, so that whoever looks for it finds it.
pub const FILE: &str = "nvidia.yaml";

/// Writes specs into one directory.
pub struct Publisher {
    directory: PathBuf,
}

impl Publisher {
    /// Publishes into `directory`, which is made if it is not there.
    pub fn new(directory: &Path) -> io::Result<Self> {
        std::fs::create_dir_all(directory).map_err(|e| io::Error::new(e.kind(), format!("make {}: {e}", directory.display())))?;
        Ok(Self { directory: directory.to_path_buf() })
    }

    /// Whether there is a spec.
    pub fn is_published(&self) -> bool {
        self.directory.join(FILE).exists()
    }

    /// Replaces the published spec; gives its size in bytes. On an error the old one is still
    /// there.
    pub fn publish(&self, spec: &Spec) -> io::Result<usize> {
        self.publish_as(FILE, spec)
    }

    /// As [`Publisher::publish`], for the spec of another kind, which has a file of its own.
    pub fn publish_as(&self, file: &str, spec: &Spec) -> io::Result<usize> {
        let text = spec.to_json();
        if text.is_empty() {
            return Err(io::Error::other("the spec has no text: nothing is published"));
        }
        // No sync: this is a tmpfs, and a guest that loses its memory has no containers to start.
        replace(&self.directory.join(file), &text)?;
        Ok(text.len())
    }
}

/// Replaces a file as a whole, or leaves it as it is. The new text lies beside it meanwhile, under
/// a name that agents do not read.
pub fn replace(path: &Path, text: &[u8]) -> io::Result<()> {
    let at = |e: io::Error| io::Error::new(e.kind(), format!("write {}: {e}", path.display()));
    let mut temporary = path.as_os_str().to_owned();
    temporary.push(".tmp");
    File::create(&temporary).and_then(|mut f| f.write_all(text)).and_then(|()| std::fs::rename(&temporary, path)).map_err(at)
}
