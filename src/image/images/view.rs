//! An image's tree as a temporary directory, for code that reads a guest's root.
//!
//! Names come from the tree, where no name has a slash or is `..`, and parents are directories made
//! here: no image can cause a write elsewhere. Files without readers have their size and no
//! content.

use super::entry_text::escaped;
use super::image::copy;
use super::newc::Kind;
use super::unpacked_root::{Id, ROOT, Tree, What};
use crate::doing::Doing;
use anyhow::{Context, Result};
use kata_gpu_init::driver_files::Roots;
use std::ffi::OsStr;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{OpenOptionsExt, symlink};
use std::path::{Path, PathBuf};
use std::time::{Duration, UNIX_EPOCH};

/// A directory with a tree in it.
pub struct View(PathBuf);

impl View {
    /// `wanted`: whether the content of a file is copied, by name.
    pub fn new(tree: &Tree, wanted: impl Fn(&[u8]) -> bool) -> Result<Self> {
        let template = std::env::temp_dir().join("kata-gpu-boot-initrd-XXXXXX");
        let made = nix::unistd::mkdtemp(&template).with_context(|| {
            format!(
                "make directory {} (TMPDIR names another place)",
                template.display()
            )
        });
        let view = Self(made?);
        let mut directories = Vec::new();
        // Parents come before their entries.
        for id in tree.below(ROOT) {
            let path = tree.path(id);
            let to = view
                .0
                .join(OsStr::from_bytes(path.strip_prefix(b"/").unwrap_or(&path)));
            let done = match &tree.node(id).what {
                What::Directory(_) => std::fs::create_dir(&to),
                What::Link(target) => symlink(OsStr::from_bytes(target), &to),
                What::File(_) => file(tree, id, &to, wanted(tree.name(id))),
                What::Special => Ok(()),
            };
            done.with_context(|| {
                format!(
                    "write {} below {} (TMPDIR names another place)",
                    escaped(&path),
                    view.0.display()
                )
            })?;
            if tree.kind(id) == Kind::Directory {
                directories.push((to, tree.meta(id).mtime));
            }
        }
        // Set times last: a new entry changes its directory's time.
        for (path, mtime) in directories {
            let mtime = UNIX_EPOCH + Duration::from_secs(mtime.into());
            File::open(&path)
                .and_then(|directory| directory.set_modified(mtime))
                .doing("set the time of", &path)?;
        }
        Ok(view)
    }

    pub fn roots(&self) -> Roots {
        Roots {
            root: self.0.clone(),
            ..Roots::default()
        }
    }
}

/// Writes a file; without its content, the file is a hole of its length.
fn file(tree: &Tree, id: Id, to: &Path, with_content: bool) -> io::Result<()> {
    let is_executable = tree.meta(id).mode & 0o111 != 0;
    let mut out = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(if is_executable { 0o700 } else { 0o600 })
        .open(to)?;
    match tree.content(id) {
        Some(content) if with_content => copy(content, &mut out),
        content => out.set_len(content.map_or(0, |c| c.length)),
    }
}

impl Drop for View {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_dir_all(&self.0) {
            eprintln!(
                "kata-gpu-boot: remove {}: {error}: remove it by hand",
                self.0.display()
            );
        }
    }
}
