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
use super::image::Content;
use super::newc;
use super::newc::{Header, Kind, MAX_NAME};
use super::output_file::Output;
use super::view::{Copy, Making, View};
use crate::images::verify::modules::information;
use anyhow::{Context, Result, anyhow, bail, ensure};
use kata_gpu_init::driver_files::manifest;
use kata_gpu_init::formats::modinfo;
use kata_gpu_report::terminal::progress_line::ByteProgress;
use nix::fcntl::OFlag;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ffi::OsString;
use std::fs::{File, Metadata, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// Limit of nested directories: the most that a path has room for.
const MAX_DEPTH: usize = MAX_NAME as usize / 2;
/// Mode of the root, and of directories without a source.
const DIRECTORY: u32 = 0o755;
/// Files of the driver's module, below a kernel's directory.
const MODULES: [&[u8]; 4] = [
    b"/nvidia.ko",
    b"/nvidia.ko.gz",
    b"/nvidia.ko.xz",
    b"/nvidia.ko.zst",
];
/// Environment variable: seconds since 1970 (reproducible-builds.org/specs/source-date-epoch).
const EPOCH: &str = "SOURCE_DATE_EPOCH";

/// An entry to be packed.
#[derive(Debug)]
struct Item {
    mode: u32,
    data: Data,
    rdev: (u32, u32),
    /// Device and inode of a file that may have other names.
    same: Option<(u64, u64)>,
    /// Source, for messages.
    from: PathBuf,
}

#[derive(Debug, PartialEq)]
enum Data {
    None,
    Link(Vec<u8>),
    File { path: PathBuf, size: u64 },
    Bytes(Vec<u8>),
}

impl Data {
    fn size(&self) -> u64 {
        match self {
            Self::File { size, .. } => *size,
            Self::Bytes(bytes) => bytes.len() as u64,
            Self::None | Self::Link(_) => 0,
        }
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
        let meta =
            std::fs::metadata(source).with_context(|| format!("pack {}", source.display()))?;
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
    let list = if wish.manifest {
        items.list_driver(wish.mtime)?
    } else {
        List::None("not asked for".into())
    };
    items.write(wish.mtime, list, out)
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

/// Opens a regular file. The open does not block if the file was replaced by a FIFO.
fn open(path: &Path) -> io::Result<File> {
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(OFlag::O_NONBLOCK.bits())
        .open(path)?;
    if file.metadata()?.is_file() {
        Ok(file)
    } else {
        Err(io::Error::other(
            "it was a file at first, and is none any more",
        ))
    }
}

impl Items {
    fn line(&mut self, line: Line, list: &Path, out: &Output) -> Result<()> {
        let item = |mode, data, rdev| Item {
            mode,
            data,
            rdev,
            same: None,
            from: list.into(),
        };
        match line.what {
            Wanted::Directory { mode } => self.add(
                line.path,
                item(Kind::Directory.bits() | mode, Data::None, (0, 0)),
            ),
            Wanted::Link { target } => self.add(
                line.path,
                item(Kind::Link.bits() | 0o777, Data::Link(target), (0, 0)),
            ),
            Wanted::Node {
                kind,
                mode,
                major,
                minor,
            } => self.add(
                line.path,
                item(kind.bits() | mode, Data::None, (major, minor)),
            ),
            Wanted::Tree { source } => {
                let meta = std::fs::metadata(&source).with_context(|| {
                    format!("tree {} in list {}", source.display(), list.display())
                })?;
                ensure!(
                    meta.is_dir(),
                    "tree {} in list {}: not a directory",
                    source.display(),
                    list.display()
                );
                self.tree(&line.path, &source, out)
            }
            Wanted::File { mode, source } => {
                let meta = std::fs::metadata(&source).with_context(|| {
                    format!("file {} in list {}", source.display(), list.display())
                })?;
                ensure!(
                    meta.is_file(),
                    "file {} in list {}: not a regular file",
                    source.display(),
                    list.display()
                );
                not_output(&meta, &source, out)?;
                let data = Data::File {
                    path: source,
                    size: meta.len(),
                };
                self.add(line.path, item(Kind::File.bits() | mode, data, (0, 0)))
            }
        }
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
                let meta = std::fs::symlink_metadata(&from)
                    .with_context(|| format!("look at {}", from.display()))?;
                let kind = meta.file_type();
                if kind.is_file() {
                    not_output(&meta, &from, out)?;
                }
                if kind.is_socket() {
                    self.left_out.push(from);
                    continue;
                }
                if kind.is_dir() {
                    rest.push((from.clone(), path.clone(), depth + 1));
                }
                let data = if kind.is_symlink() {
                    let target = std::fs::read_link(&from)
                        .with_context(|| format!("read link {}", from.display()))?;
                    Data::Link(target.as_os_str().as_bytes().to_vec())
                } else if kind.is_file() {
                    Data::File {
                        path: from.clone(),
                        size: meta.len(),
                    }
                } else {
                    Data::None
                };
                let device = kind.is_char_device() || kind.is_block_device();
                let number =
                    |part: fn(u64) -> u64| if device { part(meta.rdev()) as u32 } else { 0 };
                let rdev = (number(nix::sys::stat::major), number(nix::sys::stat::minor));
                let same = (kind.is_file() && meta.nlink() > 1).then(|| (meta.dev(), meta.ino()));
                self.add(
                    path,
                    Item {
                        mode: meta.mode(),
                        data,
                        rdev,
                        same,
                        from,
                    },
                )?;
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
        if let Data::File { size, .. } = &item.data {
            ensure!(
                *size <= u64::from(u32::MAX),
                "{}: {size} bytes: the format has room for 4 GiB less one",
                shown()
            );
        }
        if let Data::Link(target) = &item.data {
            ensure!(
                (target.len() as u64) < MAX_NAME,
                "{}: a link to {} bytes, the kernel takes {}",
                shown(),
                target.len(),
                MAX_NAME - 1
            );
        }
        match self.all.get(&path) {
            // The last source gives the mode.
            Some(old)
                if Kind::of(old.mode) == Kind::Directory
                    && Kind::of(item.mode) == Kind::Directory => {}
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
            for end in path
                .iter()
                .enumerate()
                .filter(|(_, b)| **b == b'/')
                .map(|(at, _)| at)
            {
                let above = path.get(..end).unwrap_or_default();
                match self.all.get(above) {
                    None => drop(missing.insert(above.to_vec())),
                    Some(other) if Kind::of(other.mode) == Kind::Directory => {}
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
            let mode = Kind::Directory.bits() | DIRECTORY;
            let item = || Item {
                mode,
                data: Data::None,
                rdev: (0, 0),
                same: None,
                from: PathBuf::new(),
            };
            self.all.entry(path).or_insert_with(item);
        }
        Ok(())
    }

    /// The packed items as a directory.
    fn view(&self, mtime: u32) -> Result<View> {
        let mut making = Making::begin()?;
        for (path, item) in self.all.iter().filter(|(path, _)| !path.is_empty()) {
            match &item.data {
                Data::Link(target) => making.link(path, target)?,
                Data::None if Kind::of(item.mode) == Kind::Directory => {
                    making.directory(path, mtime)?
                }
                Data::None => {}
                Data::File { path: from, size } => {
                    let copy = |out: &mut File| io::copy(&mut open(from)?, out).map(drop);
                    let name = path.rsplit(|b| *b == b'/').next().unwrap_or_default();
                    let copy: Option<Copy> = if driver_list::wanted(name) {
                        Some(&copy)
                    } else {
                        None
                    };
                    making.file(path, item.mode, *size, copy)?;
                }
                Data::Bytes(bytes) => making.file(
                    path,
                    item.mode,
                    bytes.len() as u64,
                    Some(&|out| out.write_all(bytes)),
                )?,
            }
        }
        making.end()
    }

    /// The driver's version from its module, if all modules of that name have the same one.
    fn module_version(&self) -> Option<String> {
        let is_module = |path: &[u8]| {
            let below = path
                .strip_prefix(b"usr/")
                .unwrap_or(path)
                .strip_prefix(b"lib/modules/");
            below.is_some_and(|below| MODULES.iter().any(|name| below.ends_with(name)))
        };
        let mut unpacked = 0;
        let mut versions = BTreeSet::new();
        for item in self
            .all
            .iter()
            .filter(|(path, _)| is_module(path))
            .map(|(_, item)| item)
        {
            let Data::File { path, .. } = &item.data else {
                continue;
            };
            // Ignore an unreadable module: `verify` reports the reason.
            let section = open(path)
                .and_then(Content::of_file)
                .ok()
                .and_then(|file| information(&file, &mut unpacked).ok());
            versions
                .extend(section.and_then(|section| modinfo::values(&section, "version").next()));
        }
        if versions.len() == 1 {
            versions.pop_first()
        } else {
            None
        }
    }

    /// Adds the list of the driver's files, or returns the reason for no list.
    fn list_driver(&mut self, mtime: u32) -> Result<List> {
        let at = driver_list::path()
            .trim_start_matches('/')
            .as_bytes()
            .to_vec();
        for end in at
            .iter()
            .enumerate()
            .filter(|(_, b)| **b == b'/')
            .map(|(end, _)| end)
        {
            let above = at.get(..end).unwrap_or_default();
            if let Some(other) = self
                .all
                .get(above)
                .filter(|other| Kind::of(other.mode) != Kind::Directory)
            {
                return Ok(List::None(format!(
                    "/{} is no directory ({})",
                    escaped(above),
                    other.from.display()
                )));
            }
        }
        let (version, view) = (self.module_version(), self.view(mtime)?);
        let old = self.all.contains_key(&at).then(|| {
            let text = std::fs::read(
                view.path()
                    .join(driver_list::path().trim_start_matches('/')),
            )
            .unwrap_or_default();
            (text, manifest::load(&view.roots(), version.as_deref()))
        });
        let (text, files) = match driver_list::of(&view, version.as_deref(), &at)? {
            Ok(found) => found,
            Err(why) if old.is_some() => {
                return Ok(List::None(format!(
                    "{why}; the one that was there is left as it is"
                )));
            }
            Err(why) => return Ok(List::None(why)),
        };
        let list = match old {
            None => List::Of(files),
            Some((old, _)) if old == text => List::Of(files),
            Some((_, Ok(_))) => List::Replaced(files, "it was written for other files".into()),
            Some((_, Err(why))) => List::Replaced(files, why.reason().into()),
        };
        let item = Item {
            mode: Kind::File.bits() | 0o644,
            data: Data::Bytes(text),
            rdev: (0, 0),
            same: None,
            from: driver_list::path().into(),
        };
        self.all.insert(at, item);
        self.complete()?;
        Ok(list)
    }

    fn write(self, mtime: u32, list: List, out: &mut Output) -> Result<Packed> {
        let mut names: HashMap<(u64, u64), u32> = HashMap::new();
        let size = |item: &Item| item.data.size();
        self.all
            .values()
            .filter_map(|item| item.same)
            .for_each(|same| *names.entry(same).or_default() += 1);
        let mut progress = ByteProgress::new("packing", self.all.values().map(size).sum());
        // Files with several names: number, and names still to come.
        let mut numbers: HashMap<(u64, u64), (u32, u32)> = HashMap::new();
        let mut sizes = Sizes::new();
        let mut last_ino = 0;
        for (path, item) in &self.all {
            let same = item
                .same
                .and_then(|same| Some((same, *names.get(&same)?)))
                .filter(|(_, count)| *count > 1);
            let (ino, to_come) = match same {
                Some((same, count)) => {
                    let (ino, left) = numbers.entry(same).or_insert_with(|| {
                        last_ino += 1;
                        (last_ino, count)
                    });
                    *left -= 1;
                    (*ino, *left)
                }
                None => {
                    last_ino += 1;
                    (last_ino, 0)
                }
            };
            let nlink = same.map_or(1, |(_, count)| count);
            // A file counts under its first name.
            if Kind::of(item.mode) == Kind::File && to_come + 1 == nlink {
                components::count(&mut sizes, path, item.data.size());
            }
            let header = Header {
                ino,
                mode: item.mode,
                nlink,
                mtime,
                rdev: item.rdev,
                ..Header::default()
            };
            // The root's name is `.`, as in find's output.
            let name = if path.is_empty() {
                b"."
            } else {
                path.as_slice()
            };
            let at = || format!("pack {}", item.from.display());
            match &item.data {
                // The last name carries the data, as in cpio's archives.
                Data::File { .. } if to_come > 0 => {
                    newc::write_entry(out, &header, name, &mut io::empty()).with_context(at)?
                }
                Data::File { path: from, size } => {
                    let file = open(from).with_context(|| format!("open {}", from.display()))?;
                    let header = Header {
                        size: u32::try_from(*size)
                            .map_err(|_| anyhow!("{}: too large", from.display()))?,
                        ..header
                    };
                    newc::write_entry(
                        out,
                        &header,
                        name,
                        &mut Counted {
                            file,
                            progress: &mut progress,
                        },
                    )
                    .with_context(at)?;
                }
                Data::Link(target) => {
                    let header = Header {
                        size: target.len() as u32,
                        ..header
                    };
                    newc::write_entry(out, &header, name, &mut target.as_slice())
                        .with_context(at)?;
                }
                Data::Bytes(bytes) => {
                    let header = Header {
                        size: u32::try_from(bytes.len())
                            .map_err(|_| anyhow!("{}: too large", escaped(path)))?,
                        ..header
                    };
                    newc::write_entry(out, &header, name, &mut bytes.as_slice())
                        .with_context(at)?;
                }
                Data::None => {
                    newc::write_entry(out, &header, name, &mut io::empty()).with_context(at)?
                }
            }
        }
        newc::write_trailer(out).context("write the archive's end")?;
        out.flush().context("write the archive")?;
        Ok(Packed {
            entries: self.all.len(),
            sizes,
            left_out: self.left_out,
            list,
        })
    }
}

struct Counted<'a> {
    file: File,
    progress: &'a mut ByteProgress,
}

impl Read for Counted<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.file.read(buffer)?;
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
