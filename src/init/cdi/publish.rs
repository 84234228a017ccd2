//! Publication of a spec for the agent: written whole under a name the agent does not read, then
//! renamed over the old one.
//!
//! A guest has one publisher. A reader sees either the old text or the new one, never none, unless
//! the old one is [withdrawn](Publisher::withdraw).

use super::schema::Spec;
use crate::machine::files::failed;
use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Directory the agent reads, and no other (through `/var/run`, a link to `/run`).
pub const DIRECTORY: &str = "/run/cdi";
/// Name of the GPUs' file, the same as the incumbent's.
pub const FILE: &str = "nvidia.yaml";

/// The same as the agent names it.
const AGENTS: &str = "/var/run/cdi";

/// Whether the agent finds what is published; otherwise no container gets a GPU.
///
/// Error: the text has the cure.
pub fn is_found() -> Result<(), String> {
    let identity =
        |path: &str| std::fs::metadata(path).map(|directory| (directory.dev(), directory.ino()));
    // Without a GPU there is no directory.
    match identity(DIRECTORY) {
        Ok(ours) if identity(AGENTS).ok() != Some(ours) => Err(format!(
            "{AGENTS} is not {DIRECTORY}: kata-agent finds no CDI spec, and no container gets a \
             GPU; make it a link in the image: ln -s ../run var/run"
        )),
        _ => Ok(()),
    }
}

/// Writes specs into one directory.
pub struct Publisher {
    directory: PathBuf,
}

impl Publisher {
    /// Publishes into `directory`; makes it if missing.
    pub fn new(directory: &Path) -> io::Result<Self> {
        std::fs::create_dir_all(directory).map_err(failed("make", directory))?;
        Ok(Self {
            directory: directory.to_path_buf(),
        })
    }

    /// Whether a spec is published.
    pub fn is_published(&self) -> bool {
        self.directory.join(FILE).exists()
    }

    /// Replaces the published spec; returns its size in bytes. After an error the old one is still
    /// there.
    pub fn publish(&self, spec: &Spec) -> io::Result<usize> {
        self.publish_as(FILE, spec)
    }

    /// Removes the published spec, if any.
    pub fn withdraw(&self) -> io::Result<()> {
        match std::fs::remove_file(self.directory.join(FILE)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    /// Like [`Publisher::publish`], for the spec of another kind in its own file.
    pub fn publish_as(&self, file: &str, spec: &Spec) -> io::Result<usize> {
        let text = spec.to_json();
        if text.is_empty() {
            return Err(io::Error::other(
                "the spec has no text: nothing is published",
            ));
        }
        // No sync: this is a tmpfs, and a guest that loses its memory has no containers to start.
        replace(&self.directory.join(file), &text)?;
        Ok(text.len())
    }
}

/// Replaces a whole file, or leaves it as it is. The new text is written to the same directory,
/// under a name that agents do not read.
pub fn replace(path: &Path, text: &[u8]) -> io::Result<()> {
    let at = failed("write", path);
    let mut temporary = path.as_os_str().to_owned();
    temporary.push(".tmp");
    File::create(&temporary)
        .and_then(|mut f| f.write_all(text))
        .and_then(|()| std::fs::rename(&temporary, path))
        .map_err(at)
}
