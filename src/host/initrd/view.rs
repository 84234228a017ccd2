//! An image's tree as a directory: for code that reads a guest's root. Made in a directory of its own that is gone afterwards.
//!
//! Names come from the tree, where none has a slash or is `..`, and parents are directories made here: nothing is written elsewhere, whatever the
//! image says. Files that nobody reads have their size and no content.

use super::newc::Kind;
use super::text::escaped;
use super::tree::{ROOT, Tree, What};
use crate::driver_files::Roots;
use anyhow::{Context, Result};
use std::ffi::OsStr;
use std::fs::{File, OpenOptions};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{OpenOptionsExt, symlink};
use std::path::{Path, PathBuf};
use std::time::{Duration, UNIX_EPOCH};

/// A directory with a tree in it.
pub struct View(PathBuf);

impl View {
    /// `wanted`: which files, by name, are read.
    pub fn new(tree: &Tree, wanted: impl Fn(&[u8]) -> bool) -> Result<Self> {
        let template = std::env::temp_dir().join("kata-gpu-boot-initrd-XXXXXX");
        let made =
            nix::unistd::mkdtemp(&template).with_context(|| format!("make directory {} (TMPDIR names another place)", template.display()));
        let view = Self(made?);
        let mut directories = Vec::new();
        for id in tree.below(ROOT) {
            let path = tree.path(id);
            let to = view.0.join(OsStr::from_bytes(path.strip_prefix(b"/").unwrap_or(&path)));
            let mtime = UNIX_EPOCH + Duration::from_secs(tree.meta(id).mtime.into());
            let done = match &tree.node(id).what {
                What::Directory(_) => {
                    directories.push((to.clone(), mtime));
                    std::fs::create_dir(&to)
                }
                What::Link(target) => symlink(OsStr::from_bytes(target), &to),
                What::File(_) => file(tree, id, &to, wanted(tree.name(id))),
                What::Special => Ok(()),
            };
            done.with_context(|| format!("write {} below {} (TMPDIR names another place)", escaped(&path), view.0.display()))?;
        }
        // Last: what is put into a directory changes its time.
        for (path, mtime) in directories {
            let set = File::open(&path).and_then(|directory| directory.set_modified(mtime));
            set.with_context(|| format!("set the time of {}", path.display()))?;
        }
        Ok(view)
    }

    pub fn path(&self) -> &Path {
        &self.0
    }

    pub fn roots(&self) -> Roots {
        Roots { root: self.0.clone(), ..Roots::default() }
    }
}

fn file(tree: &Tree, id: super::tree::Id, to: &Path, whole: bool) -> std::io::Result<()> {
    let mode = if tree.kind(id) == Kind::File && tree.meta(id).mode & 0o111 != 0 { 0o700 } else { 0o600 };
    let mut out = OpenOptions::new().write(true).create_new(true).mode(mode).open(to)?;
    match tree.content(id) {
        Some(content) if whole => super::image::copy(content, &mut out),
        Some(content) => out.set_len(content.length),
        None => Ok(()),
    }
}

impl Drop for View {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_dir_all(&self.0) {
            eprintln!("kata-gpu-boot: remove {}: {error}: remove it by hand", self.0.display());
        }
    }
}
