//! Reader of erofs file systems (fs/erofs/erofs_fs.h of Linux): names, modes, owners, times and
//! places of data. File contents are read on request.
//!
//! Images are untrusted: numbers are checked against the file's length. Invalid names, directories
//! with two parents and unordered directories are errors. Compressed contents are not read.

use super::reading_limits::{Limits, MAX_ENTRIES, limit_depth};
use crate::images::entry_text::escaped;
use crate::images::image::{Content, Entry, Image};
use crate::images::newc::{Header, Kind};
use anyhow::{Context, Result, bail, ensure};
use kata_gpu_init::formats::elf::ReadAt;
use std::collections::{HashMap, HashSet};
use std::io;
use std::rc::Rc;

/// First byte of the superblock, and its bytes.
pub const SUPERBLOCK: u64 = 1024;
const SUPERBLOCK_BYTES: usize = 128;
const MAGIC: u32 = 0xe0f5_e1e2;
/// The superblock has a checksum.
const COMPAT_CHECKSUM: u32 = 1;
/// Unsupported features, like 48-bit block numbers or metadata in an inode of its own, which change
/// the meaning of the superblock's fields.
const INCOMPAT_UNKNOWN: u32 = !0x7f;
/// Block sizes from 4 to 64 KiB, as powers of two.
const BLOCK_BITS: std::ops::RangeInclusive<u8> = 12..=16;
/// Unit of inode numbers.
pub const SLOT: u64 = 32;
/// Bytes of a directory entry without its name.
pub const DIRENT: usize = 12;
/// Largest directory that is read; one of 10,000 long names has 3 MB.
pub const MAX_DIRECTORY: u64 = 64 << 20;
/// `NAME_MAX` of Linux.
const MAX_NAME: usize = 255;
const MAX_TARGET: u64 = 4096;
/// Address of a chunk that is a hole.
const HOLE: u32 = u32::MAX;

/// Numbers of the superblock.
#[derive(Clone, Debug)]
pub struct Superblock {
    /// Bytes of a block.
    pub block: u64,
    /// Blocks of the file system.
    pub blocks: u64,
    /// First byte of inode number 0.
    pub meta: u64,
    pub root: u64,
    pub inodes: u64,
    /// Seconds since 1970; time of compact inodes.
    pub build_time: u64,
    pub has_checksum: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    Plain,
    /// The last block follows the inode.
    Inline,
    Compressed,
    Chunks,
}

/// An inode's numbers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Inode {
    pub nid: u64,
    /// First byte.
    pub at: u64,
    /// 64 bytes instead of 32.
    pub is_extended: bool,
    pub layout: Layout,
    /// First byte after inode and extended attributes.
    pub behind: u64,
    pub mode: u32,
    pub nlink: u32,
    pub size: u64,
    /// Block, device number or chunk format.
    pub start: u32,
    pub uid: u32,
    pub gid: u32,
    pub mtime: u64,
}

/// An entry of a directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Dirent {
    pub nid: u64,
    pub kind: u8,
    pub name: Vec<u8>,
}

/// A file system and its entries.
#[derive(Debug)]
pub struct Erofs {
    pub source: Content,
    pub superblock: Superblock,
    /// Inodes of the image's entries, in their order.
    pub inodes: Vec<Inode>,
    pub image: Image,
}

pub fn number<const N: usize>(bytes: &[u8], at: usize) -> u64 {
    bytes
        .get(at..at + N)
        .unwrap_or_default()
        .iter()
        .rev()
        .fold(0, |number, byte| number << 8 | u64::from(*byte))
}

/// Checksum of the superblock's block from the superblock on, with its own field zeroed: the
/// kernel's crc32c, which begins with ~0 and does not invert the end.
pub fn checksum(bytes: &[u8]) -> u32 {
    const POLYNOMIAL: u32 = 0x82f6_3b78;
    bytes.iter().fold(!0, |sum, byte| {
        (0..8).fold(sum ^ u32::from(*byte), |sum, _| {
            if sum & 1 != 0 {
                sum >> 1 ^ POLYNOMIAL
            } else {
                sum >> 1
            }
        })
    })
}

/// Fills a buffer or fails.
pub fn exact(source: &dyn ReadAt, at: u64, bytes: &mut [u8]) -> io::Result<()> {
    let mut done = 0;
    while let Some(rest) = bytes.get_mut(done..).filter(|rest| !rest.is_empty()) {
        match source.read_at(rest, at.saturating_add(done as u64))? {
            0 => {
                return Err(io::Error::new(
                    io::ErrorKind::UnexpectedEof,
                    format!("byte {at} lies behind the end of the file system"),
                ));
            }
            read => done += read,
        }
    }
    Ok(())
}

impl Superblock {
    pub fn read(source: &Content) -> Result<Self> {
        let mut bytes = [0; SUPERBLOCK_BYTES];
        exact(source, SUPERBLOCK, &mut bytes).context("read the superblock")?;
        ensure!(
            number::<4>(&bytes, 0) == u64::from(MAGIC),
            "no erofs superblock"
        );
        let bits = bytes[12];
        ensure!(
            BLOCK_BITS.contains(&bits),
            "blocks of 2^{bits} bytes: this takes 2^12 to 2^16"
        );
        let block = 1 << bits;
        let incompatible = number::<4>(&bytes, 80) as u32;
        let cure = "make the image without these features of mkfs.erofs";
        ensure!(
            incompatible & INCOMPAT_UNKNOWN == 0,
            "features {incompatible:#x}, of which this program knows 0x7f: {cure}"
        );
        ensure!(
            number::<2>(&bytes, 86) == 0,
            "data on other devices: {cure} (--blobdev)"
        );
        ensure!(bytes[90] == 0, "directory blocks of another size: {cure}");
        let found = Self {
            block,
            blocks: number::<4>(&bytes, 36),
            meta: number::<4>(&bytes, 40) * block,
            root: number::<2>(&bytes, 14),
            inodes: number::<8>(&bytes, 16),
            build_time: number::<8>(&bytes, 24),
            has_checksum: number::<4>(&bytes, 8) as u32 & COMPAT_CHECKSUM != 0,
        };
        let bytes = found.blocks * block;
        ensure!(
            bytes <= source.length,
            "{} blocks of {block} bytes, and the file system has {}: it is cut",
            found.blocks,
            source.length
        );
        ensure!(
            found.meta < bytes,
            "inodes begin at byte {}, behind the end",
            found.meta
        );
        if found.has_checksum {
            let mut whole = vec![0; (block - SUPERBLOCK) as usize];
            exact(source, SUPERBLOCK, &mut whole).context("read the superblock")?;
            let stored = number::<4>(&whole, 4) as u32;
            whole[4..8].fill(0);
            let sum = checksum(&whole);
            ensure!(
                sum == stored,
                "the superblock's checksum is {sum:#x}, and {stored:#x} is stored: the image is \
                 damaged"
            );
        }
        Ok(found)
    }

    pub fn bytes(&self) -> u64 {
        self.blocks * self.block
    }

    fn inode(&self, source: &Content, nid: u64) -> Result<Inode> {
        let at = nid
            .checked_mul(SLOT)
            .and_then(|offset| offset.checked_add(self.meta))
            .filter(|at| *at < self.bytes());
        let at = at.with_context(|| format!("inode {nid} lies behind the end"))?;
        let mut bytes = [0; 64];
        exact(source, at, &mut bytes[..32]).with_context(|| format!("read inode {nid}"))?;
        let format = number::<2>(&bytes, 0);
        ensure!(
            format & !0xf == 0,
            "inode {nid}: format {format:#x} is unknown"
        );
        let is_extended = format & 1 != 0;
        let layout = match format >> 1 & 7 {
            0 => Layout::Plain,
            2 => Layout::Inline,
            1 | 3 => Layout::Compressed,
            4 => Layout::Chunks,
            other => bail!("inode {nid}: data layout {other} is unknown"),
        };
        if is_extended {
            exact(source, at, &mut bytes).with_context(|| format!("read inode {nid}"))?;
        }
        let attributes = match number::<2>(&bytes, 2) {
            0 => 0,
            count => 12 + (count - 1) * 4,
        };
        let mode = number::<2>(&bytes, 4) as u32;
        let start = number::<4>(&bytes, 16) as u32;
        let (nlink, size, uid, gid, mtime) = if is_extended {
            (
                number::<4>(&bytes, 44),
                number::<8>(&bytes, 8),
                number::<4>(&bytes, 24),
                number::<4>(&bytes, 28),
                number::<8>(&bytes, 32),
            )
        } else {
            (
                number::<2>(&bytes, 6),
                number::<4>(&bytes, 8),
                number::<2>(&bytes, 24),
                number::<2>(&bytes, 26),
                self.build_time,
            )
        };
        Ok(Inode {
            nid,
            at,
            is_extended,
            layout,
            behind: at + if is_extended { 64 } else { 32 } + attributes,
            mode,
            nlink: nlink as u32,
            size,
            start,
            uid: uid as u32,
            gid: gid as u32,
            mtime,
        })
    }

    /// First byte of data in blocks, if the inode has such data.
    pub fn data_at(&self, inode: &Inode) -> Option<u64> {
        let in_blocks = match inode.layout {
            Layout::Plain => inode.size > 0,
            Layout::Inline => inode.size > self.block,
            Layout::Compressed | Layout::Chunks => false,
        };
        (in_blocks && has_data(inode)).then(|| u64::from(inode.start) * self.block)
    }

    fn content(&self, source: &Content, inode: &Inode) -> Result<Content> {
        let (block, size) = (self.block, inode.size);
        // Header::size has 32 bits.
        ensure!(
            size <= u64::from(u32::MAX),
            "a file of {size} bytes: this takes up to 4 GiB"
        );
        let within = |at: u64, length: u64| {
            at.checked_add(length)
                .is_some_and(|end| end <= self.bytes())
        };
        let start = u64::from(inode.start) * block;
        match inode.layout {
            Layout::Plain => {
                ensure!(
                    size == 0 || within(start, size),
                    "{size} bytes of data from byte {start} on end behind the file system"
                );
                return Ok(source.part(start..start + size));
            }
            Layout::Inline => {
                let tail = size.saturating_sub(1) / block * block;
                ensure!(
                    within(start, tail) || tail == 0,
                    "{tail} bytes of data from byte {start} on end behind the file system"
                );
                let in_block = inode.behind % block + (size - tail);
                ensure!(
                    in_block <= block && within(inode.behind, size - tail),
                    "data behind the inode leaves its block"
                );
            }
            Layout::Compressed | Layout::Chunks => {}
        }
        Ok(Content::of(
            Rc::new(Data {
                source: source.clone(),
                block,
                inode: inode.clone(),
            }),
            size,
        ))
    }
}

/// Whether an inode has data: a file, directory or link. A device's `start` is its number.
fn has_data(inode: &Inode) -> bool {
    matches!(
        Kind::of(inode.mode),
        Kind::File | Kind::Directory | Kind::Link
    )
}

/// Data that is not contiguous.
struct Data {
    source: Content,
    block: u64,
    inode: Inode,
}

impl Data {
    /// Offset of a byte of the file (None: a hole), and the number of bytes contiguous with it.
    fn place(&self, offset: u64) -> io::Result<(Option<u64>, u64)> {
        let Inode {
            size,
            behind,
            start,
            ..
        } = self.inode;
        let left = size.saturating_sub(offset);
        match self.inode.layout {
            Layout::Plain => Ok((Some(u64::from(start) * self.block + offset), left)),
            Layout::Inline => {
                let tail = size.saturating_sub(1) / self.block * self.block;
                Ok(match offset < tail {
                    true => (Some(u64::from(start) * self.block + offset), tail - offset),
                    false => (Some(behind + offset - tail), left),
                })
            }
            Layout::Compressed => Err(io::Error::new(
                io::ErrorKind::Unsupported,
                "its content is compressed, which is not read here",
            )),
            Layout::Chunks => {
                let chunk = self.block << (start & 31);
                let unit: u64 = if start & 32 != 0 { 8 } else { 4 };
                let at = behind.next_multiple_of(unit) + offset / chunk * unit;
                let mut entry = [0; 8];
                exact(&self.source, at, &mut entry[..unit as usize])?;
                let number = number::<4>(&entry, unit as usize - 4) as u32;
                let place =
                    (number != HOLE).then(|| u64::from(number) * self.block + offset % chunk);
                Ok((place, left.min(chunk - offset % chunk)))
            }
        }
    }
}

impl ReadAt for Data {
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        if offset >= self.inode.size {
            return Ok(0);
        }
        let (place, length) = self.place(offset)?;
        let length = usize::try_from(length)
            .unwrap_or(usize::MAX)
            .min(buffer.len());
        let buffer = buffer.get_mut(..length).unwrap_or_default();
        match place {
            Some(at) => self.source.read_at(buffer, at),
            None => {
                buffer.fill(0);
                Ok(length)
            }
        }
    }
}

/// Entries of a directory's bytes, in their order.
pub fn dirents(bytes: &[u8], block: u64) -> Result<Vec<Dirent>> {
    let mut all: Vec<Dirent> = Vec::new();
    for part in bytes.chunks(block as usize) {
        let names = number::<2>(part, 8) as usize;
        ensure!(
            names >= DIRENT && names % DIRENT == 0 && names <= part.len(),
            "its names begin at byte {names} of a block"
        );
        let count = names / DIRENT;
        let begin = |index: usize| {
            if index < count {
                number::<2>(part, index * DIRENT + 8) as usize
            } else {
                part.len()
            }
        };
        for index in 0..count {
            let name = part
                .get(begin(index)..begin(index + 1))
                .context("a name that ends before it begins")?;
            // The last name ends with a NUL or with the block.
            let end = if index + 1 == count {
                name.iter().position(|b| *b == 0).unwrap_or(name.len())
            } else {
                name.len()
            };
            let name = name.get(..end).unwrap_or_default();
            let is_name = !name.is_empty()
                && name.len() <= MAX_NAME
                && !name.contains(&0)
                && !name.contains(&b'/');
            ensure!(is_name, "{} is no name", escaped(name));
            // The kernel searches names by bisection.
            let in_order = all.last().is_none_or(|last| last.name.as_slice() < name);
            ensure!(in_order, "{} is out of order", escaped(name));
            ensure!(
                all.len() < MAX_ENTRIES,
                "more than {MAX_ENTRIES} entries: no guest has so many"
            );
            all.push(Dirent {
                nid: number::<8>(part, index * DIRENT),
                kind: part[index * DIRENT + 10],
                name: name.to_vec(),
            });
        }
    }
    Ok(all)
}

impl Erofs {
    /// Reads names and inodes. `same`: the file system that this one was made from, and a byte;
    /// contents below that byte are shared with it, not read again.
    pub fn read(source: Content, same: Option<(&Erofs, u64)>) -> Result<Self> {
        let superblock = Superblock::read(&source)?;
        let source = source.part(0..superblock.bytes());
        let image = Image {
            bytes: source.length,
            parts: Vec::new(),
            entries: Vec::new(),
        };
        let mut found = Self {
            source,
            superblock,
            inodes: Vec::new(),
            image,
        };
        let shared: HashMap<u64, (&Inode, &Content)> = match same {
            None => HashMap::new(),
            Some((old, below)) => {
                let untouched = |inode: &Inode| {
                    Kind::of(inode.mode) == Kind::File
                        && inode.behind <= below
                        && old.superblock.data_at(inode).is_none_or(|at| at < below)
                };
                let all = old.inodes.iter().zip(&old.image.entries);
                all.filter(|(inode, _)| untouched(inode))
                    .map(|(inode, entry)| (inode.nid, (inode, &entry.data)))
                    .collect()
            }
        };
        let (mut limits, mut directories) = (Limits::default(), HashSet::new());
        let mut todo = vec![(found.superblock.root, b".".to_vec(), 0)];
        while let Some((nid, path, depth)) = todo.pop() {
            limit_depth(depth)?;
            let shown = || escaped(&path);
            let inode = found
                .superblock
                .inode(&found.source, nid)
                .with_context(shown)?;
            let kind = Kind::of(inode.mode);
            ensure!(
                kind != Kind::Unknown,
                "{}: mode {:o} is none of Linux",
                shown(),
                inode.mode
            );
            let content = match shared.get(&nid) {
                Some((old, content)) if **old == inode => (*content).clone(),
                _ if has_data(&inode) => found
                    .superblock
                    .content(&found.source, &inode)
                    .with_context(shown)?,
                _ => found.source.part(0..0),
            };
            let mut target = Vec::new();
            if kind == Kind::Link {
                target = content.bytes(MAX_TARGET).with_context(shown)?;
            }
            limits.count(path.len() + target.len())?;
            if kind == Kind::Directory {
                ensure!(
                    directories.insert(nid),
                    "{}: the directory has another name, too",
                    shown()
                );
                let bytes = content.bytes(MAX_DIRECTORY).with_context(shown)?;
                let names = dirents(&bytes, found.superblock.block).with_context(shown)?;
                ensure!(
                    names.iter().any(|d| d.name == b"." && d.nid == nid),
                    "{}: the directory does not name itself",
                    shown()
                );
                for dirent in names
                    .into_iter()
                    .rev()
                    .filter(|d| d.name != b"." && d.name != b"..")
                {
                    let below = if path == b"." {
                        dirent.name
                    } else {
                        [path.as_slice(), b"/", &dirent.name].concat()
                    };
                    limits.wait(below.len())?;
                    todo.push((dirent.nid, below, depth + 1));
                }
            }
            found.push(inode, path, target, content);
        }
        Ok(found)
    }

    fn push(&mut self, inode: Inode, name: Vec<u8>, target: Vec<u8>, content: Content) {
        let kind = Kind::of(inode.mode);
        let size = if matches!(kind, Kind::File | Kind::Link) {
            inode.size as u32
        } else {
            0
        };
        // Decode as new_decode_dev of Linux.
        let rdev = if kind.is_device() {
            (
                inode.start >> 8 & 0xfff,
                inode.start & 0xff | inode.start >> 12 & 0xfff00,
            )
        } else {
            (0, 0)
        };
        let nlink = if kind == Kind::File { inode.nlink } else { 1 };
        // Split the inode number: names of the same inode are hard links.
        let (ino, dev) = (inode.nid as u32, (0, (inode.nid >> 32) as u32));
        let Inode {
            mode,
            uid,
            gid,
            mtime,
            ..
        } = inode;
        let header = Header {
            ino,
            mode,
            uid,
            gid,
            nlink,
            mtime: mtime as u32,
            size,
            dev,
            rdev,
            ..Header::default()
        };
        let data = if kind == Kind::Link {
            content.part(0..0)
        } else {
            content
        };
        self.image.entries.push(Entry {
            header,
            name,
            target,
            part: 0,
            archive: 0,
            range: 0..0,
            data,
            too_long: false,
        });
        self.inodes.push(inode);
    }
}
