//! A guest's root after the kernel has unpacked an image: entries applied in their order, by the
//! kernel's own rules (init/initramfs.c).
//!
//! A later entry replaces an earlier one, except a directory that is not empty. Links on the way
//! are followed. An entry without a parent directory is omitted silently. `..` ends at the root.
//! Nothing is written to a disk.

use super::image::{Content, Image};
use super::newc::{Header, Kind, MAX_NAME};
use anyhow::{Result, bail};
use std::cell::Cell;
use std::collections::{BTreeMap, HashMap};

/// Limit of links followed for one path, as in the kernel.
const MAX_LINKS: usize = 40;
/// Limit of steps from name to name for the whole image; a real one takes some hundred thousand.
const MAX_STEPS: u64 = 200_000_000;

/// Index of a node.
pub type Id = usize;
pub const ROOT: Id = 0;

/// A named object in the root.
#[derive(Debug)]
pub struct Node {
    parent: Id,
    name: Vec<u8>,
    /// Bytes of the node's path from the root.
    path_length: u64,
    pub what: What,
    /// Index of the entry that made or last changed the node; None for a root without an entry.
    pub entry: Option<usize>,
    /// Mode, owner, device numbers. A file's are in its [`FileData`].
    meta: Header,
}

#[derive(Debug)]
pub enum What {
    Directory(BTreeMap<Vec<u8>, Id>),
    /// Index of the data, which several nodes may share.
    File(usize),
    Link(Vec<u8>),
    /// Devices, pipes, sockets.
    Special,
}

/// A regular file, under however many names.
#[derive(Debug)]
struct FileData {
    meta: Header,
    content: Option<Content>,
    names: u32,
}

/// Reason why the kernel omits an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LeftOut {
    NoDirectory,
    DirectoryNotEmpty,
    TooLong,
    DirectoryWithData,
    UnknownType,
    LinkToNothing,
}

impl LeftOut {
    pub fn name(self) -> &'static str {
        match self {
            Self::NoDirectory => "the directory it is in comes later, or not at all",
            Self::DirectoryNotEmpty => "a directory that is not empty has its name",
            Self::TooLong => "its name or target has more than 4095 bytes",
            Self::DirectoryWithData => "it is no file, and has data",
            Self::UnknownType => "its type is none that Linux has",
            Self::LinkToNothing => "the file that it is a hard link to is gone",
        }
    }
}

/// The root and everything below.
#[derive(Debug)]
pub struct Tree {
    nodes: Vec<Node>,
    files: Vec<FileData>,
    /// Entries that the kernel omits.
    pub left_out: Vec<(usize, LeftOut)>,
    /// Entries with the name of an earlier entry.
    pub again: Vec<usize>,
    steps: Cell<u64>,
    /// Bytes of the longest path.
    longest: u64,
}

/// End of a walk along a path.
enum Walk {
    Node(Id),
    /// The directory exists, and has nothing of this name.
    Missing(Id, Vec<u8>),
    Nowhere,
}

impl Walk {
    fn node(self) -> Option<Id> {
        match self {
            Self::Node(id) => Some(id),
            Self::Missing(..) | Self::Nowhere => None,
        }
    }
}

impl Tree {
    /// Errors: a path is too long, or the image takes too many steps.
    pub fn new(image: &Image) -> Result<Self> {
        let meta = Header {
            mode: Kind::Directory.bits() | 0o755,
            ..Header::default()
        };
        let root = Node {
            parent: ROOT,
            name: Vec::new(),
            path_length: 0,
            what: What::Directory(BTreeMap::new()),
            entry: None,
            meta,
        };
        let mut tree = Self {
            nodes: vec![root],
            files: Vec::new(),
            left_out: Vec::new(),
            again: Vec::new(),
            steps: Cell::new(0),
            longest: 0,
        };
        let mut links = HashMap::new();
        let mut archive = 0;
        for (index, entry) in image.entries.iter().enumerate() {
            if entry.archive != archive {
                archive = entry.archive;
                links.clear();
            }
            let made = if entry.too_long {
                Err(LeftOut::TooLong)
            } else {
                tree.apply(image, index, &mut links)
            };
            if let Err(why) = made {
                tree.left_out.push((index, why));
            }
            // Links can make paths that no process could name.
            if tree.longest >= MAX_NAME {
                bail!(
                    "entry {index} of {}: its path from the root has more than {} bytes",
                    image.entries.len(),
                    MAX_NAME - 1
                );
            }
            if tree.steps.get() > MAX_STEPS {
                bail!(
                    "entry {index} of {}: its paths and links take more steps than any real \
                     image's",
                    image.entries.len()
                );
            }
        }
        Ok(tree)
    }

    fn apply(
        &mut self,
        image: &Image,
        index: usize,
        links: &mut HashMap<(u32, u32, u32, Kind), Vec<u8>>,
    ) -> Result<(), LeftOut> {
        let Some(entry) = image.entries.get(index) else {
            return Ok(());
        };
        let (header, kind) = (entry.header, entry.header.kind());
        if !matches!(kind, Kind::File | Kind::Link) && header.size > 0 {
            return Err(LeftOut::DirectoryWithData);
        }
        let walk = self.walk(ROOT, &entry.name, false, &mut 0);
        let (mut old, parent, name) = match walk {
            Walk::Node(id) => (Some(id), self.nodes[id].parent, self.nodes[id].name.clone()),
            Walk::Missing(parent, name) => (None, parent, name),
            Walk::Nowhere => return Err(LeftOut::NoDirectory),
        };
        if let Some(id) = old {
            // Directories are repeated wherever archives follow each other.
            if kind != Kind::Directory || self.kind(id) != kind {
                self.again.push(index);
            }
            // Links are always made anew.
            if self.kind(id) != kind || kind == Kind::Link {
                self.remove(id)?;
                old = None;
            }
        }
        let meta = header;
        match (kind, old) {
            (Kind::Directory, Some(id)) => {
                self.nodes[id].meta = meta;
                self.nodes[id].entry = Some(index);
            }
            (Kind::Directory, None) => {
                self.add(parent, name, What::Directory(BTreeMap::new()), index, meta)
            }
            (Kind::Link, _) => {
                self.add(parent, name, What::Link(entry.target.clone()), index, meta)
            }
            (Kind::File, _) => {
                let key = (header.dev.0, header.dev.1, header.ino, kind);
                let shared = if header.nlink >= 2 {
                    links.get(&key).cloned()
                } else {
                    None
                };
                if let Some(first) = shared {
                    let Some((first, data)) = self
                        .find_no_follow(&first)
                        .and_then(|id| Some((id, self.file(id)?)))
                    else {
                        return Err(LeftOut::LinkToNothing);
                    };
                    if old != Some(first) {
                        if let Some(id) = old {
                            self.remove(id)?;
                        }
                        self.files[data].names += 1;
                        self.add(parent, name, What::File(data), index, meta);
                    }
                    let file = &mut self.files[data];
                    // The kernel truncates a file to the size of an entry with data, and keeps the
                    // content if the entry has no data.
                    if header.size > 0 {
                        file.content = Some(entry.data.clone());
                    }
                    file.meta = meta;
                    return Ok(());
                }
                if header.nlink >= 2 {
                    links.insert(key, entry.name.clone());
                }
                let content = Some(entry.data.clone());
                match old.and_then(|id| Some((id, self.file(id)?))) {
                    // The existing file is rewritten, under all of its names.
                    Some((id, data)) => {
                        let names = self.files[data].names;
                        self.files[data] = FileData {
                            meta,
                            content,
                            names,
                        };
                        self.nodes[id].entry = Some(index);
                    }
                    None => {
                        self.files.push(FileData {
                            meta,
                            content,
                            names: 1,
                        });
                        let data = self.files.len() - 1;
                        self.add(parent, name, What::File(data), index, meta);
                    }
                }
            }
            (Kind::Char | Kind::Block | Kind::Fifo | Kind::Socket, old) => match old {
                // An existing device keeps its number: the kernel changes only owner and mode.
                Some(id) => {
                    let rdev = self.nodes[id].meta.rdev;
                    self.nodes[id].meta = Header { rdev, ..meta };
                }
                None => self.add(parent, name, What::Special, index, meta),
            },
            (Kind::Unknown, _) => return Err(LeftOut::UnknownType),
        }
        Ok(())
    }

    fn add(&mut self, parent: Id, name: Vec<u8>, what: What, entry: usize, meta: Header) {
        let id = self.nodes.len();
        let path_length = self.nodes[parent].path_length + 1 + name.len() as u64;
        self.longest = self.longest.max(path_length);
        if let What::Directory(names) = &mut self.nodes[parent].what {
            names.insert(name.clone(), id);
        }
        self.nodes.push(Node {
            parent,
            name,
            path_length,
            what,
            entry: Some(entry),
            meta,
        });
    }

    fn remove(&mut self, id: Id) -> Result<(), LeftOut> {
        if id == ROOT || matches!(&self.nodes[id].what, What::Directory(names) if !names.is_empty())
        {
            return Err(LeftOut::DirectoryNotEmpty);
        }
        if let Some(data) = self.file(id) {
            self.files[data].names -= 1;
        }
        let (parent, name) = (self.nodes[id].parent, self.nodes[id].name.clone());
        if let What::Directory(names) = &mut self.nodes[parent].what {
            names.remove(&name);
        }
        Ok(())
    }

    /// Walks from a directory along a path. `follow`: also if the path itself is a link.
    fn walk(&self, from: Id, path: &[u8], follow: bool, links: &mut usize) -> Walk {
        let mut at = if path.starts_with(b"/") { ROOT } else { from };
        let names: Vec<&[u8]> = path
            .split(|b| *b == b'/')
            .filter(|n| !n.is_empty() && *n != b".")
            .collect();
        for (index, name) in names.iter().enumerate() {
            self.steps.set(self.steps.get() + 1);
            if self.steps.get() > MAX_STEPS {
                return Walk::Nowhere;
            }
            let What::Directory(entries) = &self.nodes[at].what else {
                return Walk::Nowhere;
            };
            if *name == b".." {
                at = self.nodes[at].parent;
                continue;
            }
            let last = index + 1 == names.len();
            match entries.get(*name) {
                Some(id) => match &self.nodes[*id].what {
                    What::Link(target) if !last || follow => {
                        *links += 1;
                        if *links > MAX_LINKS {
                            return Walk::Nowhere;
                        }
                        match self.walk(at, target, true, links) {
                            Walk::Node(id) => at = id,
                            _ => return Walk::Nowhere,
                        }
                    }
                    _ => at = *id,
                },
                None if last => return Walk::Missing(at, name.to_vec()),
                None => return Walk::Nowhere,
            }
        }
        Walk::Node(at)
    }

    /// Node at a path from the root, with all links followed.
    pub fn find(&self, path: impl AsRef<[u8]>) -> Option<Id> {
        self.find_in(ROOT, path)
    }

    /// Node at a path from the root; a link at its end is not followed.
    pub fn find_no_follow(&self, path: impl AsRef<[u8]>) -> Option<Id> {
        self.walk(ROOT, path.as_ref(), false, &mut 0).node()
    }

    /// Node at a path from a directory, with all links followed.
    pub fn find_in(&self, directory: Id, path: impl AsRef<[u8]>) -> Option<Id> {
        self.walk(directory, path.as_ref(), true, &mut 0).node()
    }

    pub fn node(&self, id: Id) -> &Node {
        &self.nodes[id]
    }

    /// Index of a file's data, which all of its names share.
    pub fn file(&self, id: Id) -> Option<usize> {
        if let What::File(data) = self.nodes[id].what {
            Some(data)
        } else {
            None
        }
    }

    pub fn kind(&self, id: Id) -> Kind {
        match &self.nodes[id].what {
            What::Directory(_) => Kind::Directory,
            What::File(_) => Kind::File,
            What::Link(_) => Kind::Link,
            What::Special => self.nodes[id].meta.kind(),
        }
    }

    /// Mode, owner, time, device numbers.
    pub fn meta(&self, id: Id) -> &Header {
        self.file(id)
            .and_then(|data| self.files.get(data))
            .map_or(&self.nodes[id].meta, |file| &file.meta)
    }

    /// Content of a regular file.
    pub fn content(&self, id: Id) -> Option<&Content> {
        self.files.get(self.file(id)?)?.content.as_ref()
    }

    /// Number of names of a regular file.
    pub fn names(&self, id: Id) -> u32 {
        self.file(id)
            .and_then(|data| self.files.get(data))
            .map_or(1, |file| file.names)
    }

    /// Path from the root, without links; the root is `/`.
    pub fn path(&self, mut id: Id) -> Vec<u8> {
        let mut names = Vec::new();
        while id != ROOT {
            names.push(self.nodes[id].name.as_slice());
            id = self.nodes[id].parent;
        }
        let path: Vec<u8> = names
            .iter()
            .rev()
            .flat_map(|name| [b"/".as_slice(), name].concat())
            .collect();
        if path.is_empty() { b"/".to_vec() } else { path }
    }

    pub fn name(&self, id: Id) -> &[u8] {
        &self.nodes[id].name
    }

    /// A directory's names.
    pub fn list(&self, directory: Id) -> impl Iterator<Item = (&[u8], Id)> {
        let names = match &self.nodes[directory].what {
            What::Directory(names) => Some(names),
            What::File(_) | What::Link(_) | What::Special => None,
        };
        names
            .into_iter()
            .flatten()
            .map(|(name, id)| (name.as_slice(), *id))
    }

    /// Everything below a directory, parents first, names in order; without the directory itself.
    pub fn below(&self, directory: Id) -> Vec<Id> {
        let mut all = Vec::new();
        let mut rest: Vec<Id> = self.list(directory).map(|(_, id)| id).collect();
        rest.reverse();
        while let Some(id) = rest.pop() {
            all.push(id);
            let start = rest.len();
            rest.extend(self.list(id).map(|(_, id)| id));
            if let Some(new) = rest.get_mut(start..) {
                new.reverse();
            }
        }
        all
    }
}
