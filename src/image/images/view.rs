//! An image's tree as a temporary directory, for code that reads a guest's root.
//!
//! Names come from the tree, where no name has a slash or is `..`, and parents are directories made
//! here: no image can cause a write elsewhere. Files without readers have their size and no
//! content.

use super::entry_text::escaped;
use super::unpacked_root::{ROOT, Tree, What};
use anyhow::{Context, Result};
use kata_gpu_init::driver_files::Roots;
use std::ffi::OsStr;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{OpenOptionsExt, symlink};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// A directory with a tree in it.
pub struct View(PathBuf);

/// Writes a file's content.
pub type Copy<'a> = &'a dyn Fn(&mut File) -> io::Result<()>;

/// A view under construction: parents come before their entries.
pub struct Making {
    view: View,
    directories: Vec<(PathBuf, SystemTime)>,
}

impl Making {
    pub fn begin() -> Result<Self> {
        let template = std::env::temp_dir().join("kata-gpu-boot-initrd-XXXXXX");
        let made = nix::unistd::mkdtemp(&template).with_context(|| {
            format!(
                "make directory {} (TMPDIR names another place)",
                template.display()
            )
        });
        Ok(Self {
            view: View(made?),
            directories: Vec::new(),
        })
    }

    /// Path in the view; `path` may have a leading slash.
    fn at(&self, path: &[u8]) -> PathBuf {
        self.view
            .0
            .join(OsStr::from_bytes(path.strip_prefix(b"/").unwrap_or(path)))
    }

    fn done(&self, path: &[u8], done: io::Result<()>) -> Result<()> {
        done.with_context(|| {
            format!(
                "write {} below {} (TMPDIR names another place)",
                escaped(path),
                self.view.0.display()
            )
        })
    }

    /// `mtime` in seconds since 1970.
    pub fn directory(&mut self, path: &[u8], mtime: u32) -> Result<()> {
        let to = self.at(path);
        self.done(path, std::fs::create_dir(&to))?;
        self.directories
            .push((to, UNIX_EPOCH + Duration::from_secs(mtime.into())));
        Ok(())
    }

    pub fn link(&mut self, path: &[u8], target: &[u8]) -> Result<()> {
        self.done(path, symlink(OsStr::from_bytes(target), self.at(path)))
    }

    /// `content` writes the file; without it, the file is a hole of its length.
    pub fn file(
        &mut self,
        path: &[u8],
        mode: u32,
        length: u64,
        content: Option<Copy>,
    ) -> Result<()> {
        let own = if mode & 0o111 != 0 { 0o700 } else { 0o600 };
        let write = || -> io::Result<()> {
            let mut out = OpenOptions::new()
                .write(true)
                .create_new(true)
                .mode(own)
                .open(self.at(path))?;
            match content {
                Some(content) => content(&mut out),
                None => out.set_len(length),
            }
        };
        self.done(path, write())
    }

    pub fn end(self) -> Result<View> {
        // Set times last: a new entry changes its directory's time.
        for (path, mtime) in self.directories {
            let set = File::open(&path).and_then(|directory| directory.set_modified(mtime));
            set.with_context(|| format!("set the time of {}", path.display()))?;
        }
        Ok(self.view)
    }
}

impl View {
    /// `wanted`: whether the content of a file is copied, by name.
    pub fn new(tree: &Tree, wanted: impl Fn(&[u8]) -> bool) -> Result<Self> {
        let mut making = Making::begin()?;
        for id in tree.below(ROOT) {
            let path = tree.path(id);
            match &tree.node(id).what {
                What::Directory(_) => making.directory(&path, tree.meta(id).mtime)?,
                What::Link(target) => making.link(&path, target)?,
                What::File(_) => {
                    let content = tree.content(id);
                    let copy = |out: &mut File| {
                        content.map_or(Ok(()), |content| super::image::copy(content, out))
                    };
                    let copy: Option<Copy> = if wanted(tree.name(id)) {
                        Some(&copy)
                    } else {
                        None
                    };
                    making.file(
                        &path,
                        tree.meta(id).mode,
                        content.map_or(0, |c| c.length),
                        copy,
                    )?;
                }
                What::Special => {}
            }
        }
        making.end()
    }

    pub fn path(&self) -> &Path {
        &self.0
    }

    pub fn roots(&self) -> Roots {
        Roots {
            root: self.0.clone(),
            ..Roots::default()
        }
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
