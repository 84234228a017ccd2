//! `image pack`: packs directories and lists into an archive; the same files give the same bytes.
//!
//! Entries are sorted by path, owned by root, with times of SOURCE_DATE_EPOCH or 0, and numbered
//! from one. Properties of the source's file system (inode and device numbers, link counts of
//! directories, the order of names) are omitted. Names of one file stay names of one file. The list
//! of the driver's files is made anew here, because packing is the last step of a build.

use super::components;
use super::components::Sizes;
use super::driver_list;
use super::entry_list;
use super::entry_list::{Line, Wanted};
use super::entry_text::escaped;
use super::image::{CHUNK, Content, Entry, Image, open_regular};
use super::newc;
use super::newc::{Header, Kind, MAX_NAME};
use super::output_file::Output;
use super::unpacked_root::Tree;
use crate::doing::Doing;
use anyhow::{Context, Result, bail, ensure};
use kata_gpu_init::formats::elf::ReadAt;
use kata_gpu_report::terminal::progress_line::ByteProgress;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ffi::OsString;
use std::fs::Metadata;
use std::io::{self, BufReader, Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::rc::Rc;

/// Limit of nested directories: the most that a path has room for.
const MAX_DEPTH: usize = MAX_NAME as usize / 2;
/// Mode of the root, and of directories without a source.
const DIRECTORY: u32 = 0o755;
/// Environment variable: seconds since 1970 (reproducible-builds.org/specs/source-date-epoch).
const EPOCH: &str = "SOURCE_DATE_EPOCH";

/// An entry to be packed.
#[derive(Debug, Default)]
struct Item {
    mode: u32,
    rdev: (u32, u32),
    /// Target of a link.
    target: Vec<u8>,
    /// Content of a file or link.
    data: Content,
    /// Device and inode of a file that may have other names.
    same: Option<(u64, u64)>,
    /// Source, for messages.
    from: PathBuf,
}

impl Item {
    fn directory() -> Self {
        Self {
            mode: Kind::Directory.bits() | DIRECTORY,
            ..Self::default()
        }
    }

    fn is_directory(&self) -> bool {
        Kind::of(self.mode) == Kind::Directory
    }
}

/// A file that is opened for each read: a guest has more files than a process can have open.
struct Unopened {
    path: PathBuf,
    /// Device, inode and time of change: another file in its place is an error, not a mixture.
    is: (u64, u64, i64, i64),
}

fn identity(meta: &Metadata) -> (u64, u64, i64, i64) {
    (meta.dev(), meta.ino(), meta.ctime(), meta.ctime_nsec())
}

impl ReadAt for Unopened {
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        let file = open_regular(&self.path)?;
        if identity(&file.metadata()?) != self.is {
            return Err(io::Error::other(
                "the file was changed meanwhile: pack again",
            ));
        }
        file.read_at(buffer, offset)
    }
}

/// Options of packing.
#[derive(Clone, Copy, Debug)]
pub struct Packing {
    /// Time of all entries, in seconds since 1970.
    pub mtime: u32,
    /// Whether the list of the driver's files is made.
    pub manifest: bool,
}

/// List of the driver's files in the archive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum List {
    /// Number of files; the list is new, or equal to the one that was there.
    Of(usize),
    /// Number of files; the former list was replaced, for this reason.
    Replaced(usize, String),
    /// No list, for this reason.
    None(String),
}

/// Result of packing.
#[derive(Debug)]
pub struct Packed {
    pub entries: usize,
    pub sizes: Sizes,
    /// Omitted sockets: no process of a guest listens on them.
    pub left_out: Vec<PathBuf>,
    pub list: List,
}

/// Items by path; the root's path is empty.
#[derive(Default)]
struct Items {
    all: BTreeMap<Vec<u8>, Item>,
    left_out: Vec<PathBuf>,
}

/// Time of all entries, from the environment.
pub fn mtime() -> Result<u32> {
    mtime_of(std::env::var_os(EPOCH))
}

fn mtime_of(value: Option<OsString>) -> Result<u32> {
    match value {
        None => Ok(0),
        Some(value) => {
            let seconds = value.to_str().and_then(|v| v.trim().parse().ok());
            seconds.with_context(|| {
                format!(
                    "{EPOCH} {value:?}: give seconds since 1970, at most {}",
                    u32::MAX
                )
            })
        }
    }
}

/// Writes an archive of all sources: a directory's content, or a list's entries.
pub fn pack(sources: &[PathBuf], wish: Packing, out: &mut Output) -> Result<Packed> {
    let mut items = Items::default();
    for source in sources {
        let meta = std::fs::metadata(source).doing("pack", source)?;
        if meta.is_dir() {
            items.tree(b"", source, out)?;
        } else {
            not_output(&meta, source, out)?;
            entry_list::read(source)?
                .into_iter()
                .try_for_each(|line| items.line(line, source, out))?;
        }
    }
    items.complete()?;
    let mut image = items.image(wish.mtime);
    let mut tree = Tree::new(&image)?;
    let mut list = List::None("not asked for".into());
    if wish.manifest {
        list = items.list_driver(&tree)?;
        image = items.image(wish.mtime);
        tree = Tree::new(&image)?;
    }
    items.write(&image, out)?;
    Ok(Packed {
        entries: image.entries.len(),
        sizes: components::sizes(&tree),
        left_out: items.left_out,
        list,
    })
}

/// Refuses a source that is the output, or the file that the output replaces.
fn not_output(meta: &Metadata, source: &Path, out: &Output) -> Result<()> {
    ensure!(
        !out.is_of(meta),
        "{}: the new image would be, or replace, what it is made of: give --output another place",
        source.display()
    );
    Ok(())
}

/// A file's content. Errors: the file is the output.
fn content(meta: &Metadata, source: &Path, out: &Output) -> Result<Content> {
    not_output(meta, source, out)?;
    let file = Unopened {
        path: source.into(),
        is: identity(meta),
    };
    Ok(Content::of(Rc::new(file), meta.len()))
}

/// Paths of the directories above a path, without the root.
fn above(path: &[u8]) -> impl Iterator<Item = &[u8]> {
    let ends = path.iter().enumerate().filter(|(_, b)| **b == b'/');
    ends.filter_map(|(end, _)| path.get(..end))
}

impl Items {
    fn line(&mut self, line: Line, list: &Path, out: &Output) -> Result<()> {
        let look = |what: &str, source: &Path| {
            std::fs::metadata(source)
                .with_context(|| format!("{what} {} in list {}", source.display(), list.display()))
        };
        let mut item = Item {
            from: list.into(),
            ..Item::default()
        };
        match line.what {
            Wanted::Entry { mode, target, rdev } => {
                item.data = Content::of_bytes(target.clone());
                (item.mode, item.target, item.rdev) = (mode, target, rdev);
            }
            Wanted::Tree { source } => {
                ensure!(
                    look("tree", &source)?.is_dir(),
                    "tree {} in list {}: not a directory",
                    source.display(),
                    list.display()
                );
                return self.tree(&line.path, &source, out);
            }
            Wanted::File { mode, source } => {
                let meta = look("file", &source)?;
                ensure!(
                    meta.is_file(),
                    "file {} in list {}: not a regular file",
                    source.display(),
                    list.display()
                );
                item.mode = mode;
                item.data = content(&meta, &source, out)?;
            }
        }
        self.add(line.path, item)
    }

    /// Adds everything below a directory, at a path. The directory's own mode is ignored: a
    /// temporary directory has 0700.
    fn tree(&mut self, at: &[u8], source: &Path, out: &Output) -> Result<()> {
        let mut rest = vec![(source.to_path_buf(), at.to_vec(), 0)];
        while let Some((directory, path, depth)) = rest.pop() {
            let context = || format!("read directory {}", directory.display());
            ensure!(
                depth < MAX_DEPTH,
                "{}: deeper than any path can name",
                directory.display()
            );
            for entry in std::fs::read_dir(&directory).with_context(context)? {
                let entry = entry.with_context(context)?;
                let (from, name) = (entry.path(), entry.file_name());
                let mut path = path.clone();
                if !path.is_empty() {
                    path.push(b'/');
                }
                path.extend(name.as_bytes());
                // Metadata of a link itself.
                let meta = std::fs::symlink_metadata(&from).doing("look at", &from)?;
                let kind = meta.file_type();
                if kind.is_socket() {
                    self.left_out.push(from);
                    continue;
                }
                let mut item = Item {
                    mode: meta.mode(),
                    ..Item::default()
                };
                if kind.is_dir() {
                    rest.push((from.clone(), path.clone(), depth + 1));
                } else if kind.is_symlink() {
                    let target = std::fs::read_link(&from).doing("read link", &from)?;
                    item.target = target.into_os_string().into_encoded_bytes();
                    item.data = Content::of_bytes(item.target.clone());
                } else if kind.is_file() {
                    item.data = content(&meta, &from, out)?;
                    item.same = (meta.nlink() > 1).then(|| (meta.dev(), meta.ino()));
                } else if Kind::of(item.mode).is_device() {
                    let number = |part: fn(u64) -> u64| part(meta.rdev()) as u32;
                    item.rdev = (number(nix::sys::stat::major), number(nix::sys::stat::minor));
                }
                self.add(path, Item { from, ..item })?;
            }
        }
        Ok(())
    }

    fn add(&mut self, path: Vec<u8>, item: Item) -> Result<()> {
        let shown = || format!("/{}", escaped(&path));
        ensure!(
            (path.len() as u64) < MAX_NAME,
            "{}: a path of {} bytes, the kernel takes {}",
            shown(),
            path.len(),
            MAX_NAME - 1
        );
        ensure!(
            item.data.length <= u64::from(u32::MAX),
            "{}: {} bytes: the format has room for 4 GiB less one",
            shown(),
            item.data.length
        );
        ensure!(
            (item.target.len() as u64) < MAX_NAME,
            "{}: a link to {} bytes, the kernel takes {}",
            shown(),
            item.target.len(),
            MAX_NAME - 1
        );
        match self.all.get(&path) {
            // The last source gives the mode.
            Some(old) if old.is_directory() && item.is_directory() => {}
            Some(old) => bail!(
                "{} comes from {} and from {}: omit one",
                shown(),
                old.from.display(),
                item.from.display()
            ),
            None => {}
        }
        self.all.insert(path, item);
        Ok(())
    }

    /// Adds missing parent directories; refuses entries that the kernel would skip.
    fn complete(&mut self) -> Result<()> {
        let mut missing = BTreeSet::from([Vec::new()]);
        for (path, item) in &self.all {
            for above in above(path) {
                match self.all.get(above) {
                    None => drop(missing.insert(above.to_vec())),
                    Some(other) if other.is_directory() => {}
                    // For the kernel, a link to a directory would do only if its entry came first.
                    Some(other) => {
                        let (path, above) = (escaped(path), escaped(above));
                        bail!(
                            "/{path} (from {}) lies in /{above}, which is no directory ({}): name \
                             the directory that is meant",
                            item.from.display(),
                            other.from.display()
                        )
                    }
                }
            }
        }
        for path in missing {
            self.all.entry(path).or_insert_with(Item::directory);
        }
        Ok(())
    }

    /// The image that the items make, with an entry for each of them, in their order.
    fn image(&self, mtime: u32) -> Image {
        let mut names: HashMap<(u64, u64), u32> = HashMap::new();
        self.all
            .values()
            .filter_map(|item| item.same)
            .for_each(|same| *names.entry(same).or_default() += 1);
        // Files with several names: number, and names still to come.
        let mut numbers: HashMap<(u64, u64), (u32, u32)> = HashMap::new();
        let mut last_ino = 0;
        let mut next = || {
            last_ino += 1;
            last_ino
        };
        let entry = |(path, item): (&Vec<u8>, &Item)| {
            let nlink = item.same.and_then(|same| names.get(&same).copied());
            let nlink = nlink.unwrap_or(1);
            let (ino, to_come) = match item.same.filter(|_| nlink > 1) {
                Some(same) => {
                    let (ino, left) = numbers.entry(same).or_insert_with(|| (next(), nlink));
                    *left -= 1;
                    (*ino, *left)
                }
                None => (next(), 0),
            };
            // The last name carries the data, as in cpio's archives.
            let data = if to_come > 0 {
                Content::default()
            } else {
                item.data.clone()
            };
            Entry {
                header: Header {
                    ino,
                    mode: item.mode,
                    nlink,
                    mtime,
                    size: data.length as u32,
                    rdev: item.rdev,
                    ..Header::default()
                },
                // The root's name is `.`, as in find's output.
                name: if path.is_empty() {
                    b".".to_vec()
                } else {
                    path.clone()
                },
                target: item.target.clone(),
                data,
                ..Entry::default()
            }
        };
        Image {
            entries: self.all.iter().map(entry).collect(),
            ..Image::default()
        }
    }

    /// Adds the list of the driver's files, or returns the reason for no list.
    fn list_driver(&mut self, tree: &Tree) -> Result<List> {
        let path = driver_list::path();
        let at = path.trim_start_matches('/').as_bytes();
        for above in above(at) {
            if let Some(other) = self.all.get(above).filter(|other| !other.is_directory()) {
                return Ok(List::None(format!(
                    "/{} is no directory ({})",
                    escaped(above),
                    other.from.display()
                )));
            }
        }
        let is_there = self.all.contains_key(at);
        let (text, files) = match driver_list::of(tree, path.as_bytes())? {
            Ok(found) => found,
            Err(why) if is_there => {
                return Ok(List::None(format!(
                    "{why}; the one that was there is left as it is"
                )));
            }
            Err(why) => return Ok(List::None(why)),
        };
        let data = Content::of_bytes(text);
        let old = tree.find(&path).and_then(|id| tree.content(id));
        let is_same = old.is_some_and(|old| old.sha256().ok() == data.sha256().ok());
        let list = if !is_there || is_same {
            List::Of(files)
        } else {
            let version = driver_list::module_version(tree).ok().flatten();
            let why = match driver_list::load(tree, Path::new("/"), version.as_deref())? {
                Ok(_) => "it was written for other files".into(),
                Err(why) => why.reason().into(),
            };
            List::Replaced(files, why)
        };
        let item = Item {
            mode: Kind::File.bits() | 0o644,
            data,
            from: path.as_str().into(),
            ..Item::default()
        };
        self.all.insert(at.to_vec(), item);
        self.complete()?;
        Ok(list)
    }

    fn write(&self, image: &Image, out: &mut Output) -> Result<()> {
        let bytes = image.entries.iter().map(|entry| entry.data.length).sum();
        let mut progress = ByteProgress::new("packing", bytes);
        for (item, entry) in self.all.values().zip(&image.entries) {
            let mut data = Counted {
                data: BufReader::with_capacity(CHUNK, entry.data.reader()),
                progress: &mut progress,
            };
            newc::write_entry(out, &entry.header, &entry.name, &mut data)
                .doing("pack", &item.from)?;
        }
        newc::write_trailer(out).context("write the archive's end")?;
        out.flush().context("write the archive")
    }
}

struct Counted<'a, R> {
    data: R,
    progress: &'a mut ByteProgress,
}

impl<R: Read> Read for Counted<'_, R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.data.read(buffer)?;
        self.progress.add(read as u64);
        Ok(read)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_of_a_build_is_given_in_seconds() {
        let of = |text: &str| mtime_of(Some(text.into()));
        assert_eq!(
            (
                mtime_of(None).unwrap(),
                of("1700000000").unwrap(),
                of(" 7\n").unwrap()
            ),
            (0, 1_700_000_000, 7)
        );
        for wrong in ["", "-1", "4294967296", "yesterday"] {
            assert!(
                of(wrong)
                    .unwrap_err()
                    .to_string()
                    .contains("give seconds since 1970"),
                "{wrong:?}"
            );
        }
    }
}
