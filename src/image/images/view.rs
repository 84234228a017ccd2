//! An image's tree as a temporary directory, for code that reads a guest's root.
//!
//! Names come from the tree, where no name has a slash or is `..`, and parents are directories made
//! here: no image can cause a write elsewhere. Files without readers have their size and no
//! content.

use super::entry_text::escaped;
use super::image::copy;
use super::newc::Kind;
use super::scratch_dir::ScratchDir;
use super::unpacked_root::{Id, ROOT, Tree, What};
use crate::doing::Doing;
use anyhow::{Context, Result};
use kata_gpu_init::driver_files::Roots;
use nix::errno::Errno;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ffi::OsStr;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{OpenOptionsExt, symlink};
use std::path::{Path, PathBuf};
use std::time::{Duration, UNIX_EPOCH};

/// A directory with a tree in it.
pub struct View(ScratchDir);

/// First name under which a file was written, and whether that has its content.
struct FirstName {
    path: PathBuf,
    with_content: bool,
}

impl View {
    /// `wanted`: whether the content of a file is copied, by name. A file with several names is
    /// written once: no more is written than the unpacked image has.
    pub fn new(tree: &Tree, wanted: impl Fn(&[u8]) -> bool) -> Result<Self> {
        let view = Self(ScratchDir::new("initrd")?);
        let (mut directories, mut files) = (Vec::new(), HashMap::new());
        // Parents come before their entries.
        for id in tree.below(ROOT) {
            let path = tree.path(id);
            let to = view
                .0
                .path()
                .join(OsStr::from_bytes(path.strip_prefix(b"/").unwrap_or(&path)));
            let done = match &tree.node(id).what {
                What::Directory(_) => std::fs::create_dir(&to),
                What::Link(target) => symlink(OsStr::from_bytes(target), &to),
                What::File(data) => file(tree, id, &to, wanted(tree.name(id)), files.entry(*data)),
                What::Special => Ok(()),
            };
            done.with_context(|| {
                format!(
                    "write {} below {} (TMPDIR names another place)",
                    escaped(&path),
                    view.0.path().display()
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
            root: self.0.path().to_path_buf(),
            ..Roots::default()
        }
    }
}

/// Writes a file, or one more name of it; without its content, the file is a hole of its length.
fn file(
    tree: &Tree,
    id: Id,
    to: &Path,
    with_content: bool,
    first: Entry<usize, FirstName>,
) -> io::Result<()> {
    let mut options = OpenOptions::new();
    options.write(true);
    match first {
        Entry::Occupied(mut first) => match std::fs::hard_link(&first.get().path, to) {
            Ok(()) if first.get().with_content || !with_content => return Ok(()),
            Ok(()) => first.get_mut().with_content = true,
            // As many names as the file system takes: write the file once more.
            Err(e) if e.raw_os_error() == Some(Errno::EMLINK as i32) => {
                options.create_new(true);
                first.insert(FirstName {
                    path: to.to_path_buf(),
                    with_content,
                });
            }
            Err(e) => return Err(e),
        },
        Entry::Vacant(first) => {
            options.create_new(true);
            first.insert(FirstName {
                path: to.to_path_buf(),
                with_content,
            });
        }
    }
    let is_executable = tree.meta(id).mode & 0o111 != 0;
    let mode = if is_executable { 0o700 } else { 0o600 };
    let mut out = options.mode(mode).open(to)?;
    match tree.content(id) {
        Some(content) if with_content => copy(content, &mut out),
        content => out.set_len(content.map_or(0, |c| c.length)),
    }
}

#[cfg(test)]
mod tests {
    use super::super::image::Image;
    use super::super::newc::{Header, write_entry, write_trailer};
    use super::*;
    use kata_gpu_test_support::temp_dir;
    use std::os::unix::fs::MetadataExt;

    #[test]
    fn a_file_with_many_names_is_written_once() {
        const SIZE: usize = 1 << 20;
        let dir = temp_dir();
        let path = dir.path().join("image");
        let mut image = Vec::new();
        for n in 0..100 {
            // The data comes with one of the names alone, as tools write it.
            let data = vec![b'x'; if n == 40 { SIZE } else { 0 }];
            let header = Header {
                ino: 7,
                mode: Kind::File.bits() | 0o644,
                nlink: 100,
                size: data.len() as u32,
                ..Header::default()
            };
            let name = format!("name-{n}");
            write_entry(&mut image, &header, name.as_bytes(), &mut &data[..]).unwrap();
        }
        write_trailer(&mut image).unwrap();
        std::fs::write(&path, image).unwrap();
        let tree = Tree::new(&Image::open(&path).unwrap()).unwrap();
        // Only a later name is wanted with its content.
        let view = View::new(&tree, |name| name == b"name-9").unwrap();
        let root = view.roots().root;
        let metas: Vec<_> = (0..100)
            .map(|n| std::fs::metadata(root.join(format!("name-{n}"))).unwrap())
            .collect();
        assert!(metas.iter().all(|meta| meta.ino() == metas[0].ino()));
        let content = std::fs::read(root.join("name-0")).unwrap();
        assert!(content.len() == SIZE && content.iter().all(|byte| *byte == b'x'));
    }
}
