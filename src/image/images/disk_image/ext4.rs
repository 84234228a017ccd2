//! Reader of ext4 file systems with the crate `ext4-view`, and a comparison of inodes and their
//! extended attributes, which the crate does not show.
//!
//! Images are untrusted: superblock fields that the crate does not bound are checked first.

use super::erofs::{MAX_DIRECTORY, exact, number};
use super::reading_limits::{Limits, limit_depth};
use crate::images::entry_text::escaped;
use crate::images::image::{Content, Entry, Image};
use crate::images::newc::{Header, Kind};
use anyhow::{Context, Result, ensure};
use ext4_view::{Ext4, Ext4Read, File, FileType, PathBuf};
use kata_gpu_init::formats::elf::ReadAt;
use std::cell::RefCell;
use std::collections::BTreeSet;
use std::error::Error;
use std::io;
use std::rc::Rc;

const SUPERBLOCK: u64 = 1024;
const MAGIC: u64 = 0xef53;
/// The journal contains changes that are not yet in place.
const NEEDS_RECOVERY: u64 = 0x4;
/// Unsupported: group descriptors in other places, and extended attributes in their own inodes.
const UNSUPPORTED: [(u64, &str); 2] = [(0x10, "meta_bg"), (0x400, "ea_inode")];
const IS_64_BIT: u64 = 0x80;
/// Minimum of `mke2fs -g`.
const MIN_PER_GROUP: u64 = 256;
const ROOT_INODE: u64 = 2;
/// Bytes of an inode before `i_extra_isize`.
const OLD_INODE: usize = 128;
/// Largest accepted inode: all inodes of a group are read together.
const MAX_INODE: usize = 1024;
const MAX_TARGET: u64 = 4096;
/// Limits of inodes that a change may touch: parent directories of init, link, helper and list;
/// inodes that these four replace; new inodes.
const MAX_DIRECTORIES: usize = 6;
const MAX_REPLACED: usize = 4;
const MAX_NEW: usize = 6;
/// Fields of a shared attribute block that change with the number of its users.
const COUNTS: [std::ops::Range<usize>; 2] = [4..8, 16..20];

struct Source(Content);

impl Ext4Read for Source {
    fn read(
        &mut self,
        at: u64,
        bytes: &mut [u8],
    ) -> Result<(), Box<dyn Error + Send + Sync + 'static>> {
        Ok(exact(&self.0, at, bytes)?)
    }
}

/// Numbers of the superblock and the groups.
struct Layout {
    block: u64,
    inode_bytes: usize,
    inodes_per_group: u64,
    first_inode: u64,
    /// First bytes of the groups' inode tables.
    tables: Vec<u64>,
}

impl Layout {
    /// Errors: the file system is damaged, or has features that cannot be compared.
    fn read(source: &Content) -> Result<Self> {
        let mut bytes = [0; 1024];
        exact(source, SUPERBLOCK, &mut bytes).context("read the superblock")?;
        ensure!(number::<2>(&bytes, 0x38) == MAGIC, "no ext4 superblock");
        let log_block = number::<4>(&bytes, 0x18);
        ensure!(
            log_block <= 6,
            "blocks of 2^{} bytes: ext4 has up to 2^16",
            log_block + 10
        );
        let block = 1024 << log_block;
        let incompatible = number::<4>(&bytes, 0x60);
        ensure!(
            incompatible & NEEDS_RECOVERY == 0,
            "its journal has changes that are not in their places: run e2fsck -p on it"
        );
        for (flag, name) in UNSUPPORTED {
            ensure!(
                incompatible & flag == 0,
                "feature {name}: make the image with mke2fs -O ^{name}"
            );
        }
        let is_64_bit = incompatible & IS_64_BIT != 0;
        let high = if is_64_bit {
            number::<4>(&bytes, 0x150) << 32
        } else {
            0
        };
        let (blocks, first) = (number::<4>(&bytes, 4) | high, number::<4>(&bytes, 0x14));
        let (per_group, inodes_per_group) = (number::<4>(&bytes, 0x20), number::<4>(&bytes, 0x28));
        let is_whole = blocks
            .checked_mul(block)
            .is_some_and(|bytes| bytes <= source.length);
        ensure!(
            is_whole,
            "{blocks} blocks of {block} bytes, and the file system has {}: it is cut",
            source.length
        );
        let groups_fit = per_group >= MIN_PER_GROUP
            && per_group <= block * 8
            && inodes_per_group > 0
            && inodes_per_group <= block * 8;
        ensure!(
            groups_fit,
            "groups of {per_group} blocks with {inodes_per_group} inodes: ext4 has up to {} of either",
            block * 8
        );
        let is_old = number::<4>(&bytes, 0x4c) == 0;
        let inode_bytes = if is_old {
            OLD_INODE
        } else {
            number::<2>(&bytes, 0x58) as usize
        };
        let is_known =
            (OLD_INODE..=MAX_INODE).contains(&inode_bytes) && inode_bytes.is_power_of_two();
        ensure!(
            is_known,
            "inodes of {inode_bytes} bytes: this takes up to {MAX_INODE} (mke2fs -I)"
        );
        let first_inode = if is_old {
            11
        } else {
            number::<4>(&bytes, 0x54)
        };
        let descriptor = if is_64_bit {
            number::<2>(&bytes, 0xfe)
        } else {
            32
        };
        ensure!(
            (32..=1024).contains(&descriptor),
            "group descriptors of {descriptor} bytes"
        );
        let groups = blocks.saturating_sub(first).div_ceil(per_group);
        let mut tables = Vec::new();
        for group in 0..groups {
            let mut entry = [0; 64];
            let length = descriptor.min(64) as usize;
            exact(
                source,
                (first + 1) * block + group * descriptor,
                &mut entry[..length],
            )
            .with_context(|| format!("read group {group}"))?;
            let high = if length >= 64 {
                number::<4>(&entry, 0x28) << 32
            } else {
                0
            };
            let table = (number::<4>(&entry, 8) | high)
                .checked_mul(block)
                .filter(|at| *at < source.length);
            tables.push(
                table.with_context(|| format!("group {group}: its inodes lie behind the end"))?,
            );
        }
        Ok(Self {
            block,
            inode_bytes,
            inodes_per_group,
            first_inode,
            tables,
        })
    }
}

/// A file's content. The file stays open: the crate looks up the path at every open.
struct Data {
    fs: Ext4,
    path: PathBuf,
    open: RefCell<Option<File>>,
}

fn io_error(error: ext4_view::Ext4Error) -> io::Error {
    io::Error::other(error.to_string())
}

impl ReadAt for Data {
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        let mut open = self.open.borrow_mut();
        let file = match open.as_mut() {
            Some(file) => file,
            None => open.insert(self.fs.open(&self.path).map_err(io_error)?),
        };
        if file.position() != offset {
            file.seek_to(offset).map_err(io_error)?;
        }
        let read = file.read_bytes(buffer).map_err(io_error)?;
        // Close the file at its end: thousands of open files would take memory.
        if read == 0 || file.position() >= file.metadata().len() {
            *open = None;
        }
        Ok(read)
    }
}

fn kind_of(kind: FileType) -> Kind {
    match kind {
        FileType::Regular => Kind::File,
        FileType::Directory => Kind::Directory,
        FileType::Symlink => Kind::Link,
        FileType::CharacterDevice => Kind::Char,
        FileType::BlockDevice => Kind::Block,
        FileType::Fifo => Kind::Fifo,
        FileType::Socket => Kind::Socket,
    }
}

/// Reads names, modes, owners and times.
pub fn read(source: &Content) -> Result<Image> {
    Layout::read(source)?;
    let fs = Ext4::load(Box::new(Source(source.clone())))?;
    let mut image = Image {
        bytes: source.length,
        parts: Vec::new(),
        entries: Vec::new(),
    };
    let mut limits = Limits::default();
    let root = fs.symlink_metadata("/")?;
    let mut todo = vec![(root, b".".to_vec(), 0)];
    while let Some((meta, name, depth)) = todo.pop() {
        limit_depth(depth)?;
        let shown = || escaped(&name);
        let path = PathBuf::try_from([b"/", name.as_slice()].concat())
            .map_err(|e| anyhow::anyhow!("{}: {e}", shown()))?;
        let kind = kind_of(meta.file_type());
        let mode = u32::from(meta.mode()) | kind.bits();
        let size = if kind == Kind::File { meta.len() } else { 0 };
        let size = u32::try_from(size)
            .ok()
            .with_context(|| format!("{}: {size} bytes: this takes up to 4 GiB", shown()))?;
        let mut target = Vec::new();
        if kind == Kind::Link {
            ensure!(
                meta.len() <= MAX_TARGET,
                "{}: a link of {} bytes",
                shown(),
                meta.len()
            );
            target = fs.read_link(&path).with_context(shown)?.as_ref().to_vec();
        }
        limits.count(name.len() + target.len())?;
        if kind == Kind::Directory {
            ensure!(
                meta.len() <= MAX_DIRECTORY,
                "{}: a directory of {} bytes",
                shown(),
                meta.len()
            );
            for entry in fs.read_dir(&path).with_context(shown)? {
                let entry = entry.with_context(shown)?;
                let own = entry.file_name().as_ref().to_vec();
                ensure!(
                    !own.contains(&b'/') && !own.contains(&0),
                    "{}: {} is no name",
                    shown(),
                    escaped(&own)
                );
                if own == b"." || own == b".." {
                    continue;
                }
                let below = if name == b"." {
                    own
                } else {
                    [name.as_slice(), b"/", &own].concat()
                };
                limits.wait(below.len())?;
                todo.push((
                    entry.metadata().with_context(|| escaped(&below))?,
                    below,
                    depth + 1,
                ));
            }
        }
        let mtime = meta.modified().seconds() as u32;
        let header = Header {
            mode,
            uid: meta.uid(),
            gid: meta.gid(),
            nlink: 1,
            mtime,
            size,
            ..Header::default()
        };
        let data = match kind {
            Kind::File => Content::of(
                Rc::new(Data {
                    fs: fs.clone(),
                    path,
                    open: RefCell::new(None),
                }),
                u64::from(size),
            ),
            _ => source.part(0..0),
        };
        image.entries.push(Entry {
            header,
            name,
            target,
            part: 0,
            archive: 0,
            range: 0..0,
            data,
            too_long: false,
        });
    }
    Ok(image)
}

/// Numbers of inodes that differ.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Changed {
    pub directories: usize,
    pub replaced: usize,
    pub new: usize,
}

/// Compares every inode with its extended attributes. Errors: more inodes differ than an init, a
/// link, a helper and a list explain.
pub fn compare_inodes(before: &Content, after: &Content) -> Result<Changed> {
    let (layout, new_layout) = (Layout::read(before)?, Layout::read(after)?);
    ensure!(
        layout.tables == new_layout.tables && layout.inode_bytes == new_layout.inode_bytes,
        "inodes lie elsewhere"
    );
    let mut changed = Changed::default();
    let mut attributes = BTreeSet::new();
    let bytes = layout.inodes_per_group as usize * layout.inode_bytes;
    let (mut old, mut new) = (vec![0; bytes], vec![0; bytes]);
    for (group, table) in layout.tables.iter().enumerate() {
        exact(before, *table, &mut old)
            .with_context(|| format!("read the inodes of group {group}"))?;
        exact(after, *table, &mut new)
            .with_context(|| format!("read the inodes of group {group}"))?;
        for (index, (old, new)) in old
            .chunks(layout.inode_bytes)
            .zip(new.chunks(layout.inode_bytes))
            .enumerate()
        {
            let inode = group as u64 * layout.inodes_per_group + index as u64 + 1;
            if is_used(old) && is_used(new) && attribute_block(old) != 0 {
                attributes.insert(attribute_block(old));
            }
            if old != new {
                compare(inode, old, new, layout.first_inode, &mut changed)?;
            }
        }
    }
    for number in attributes {
        let read = |source: &Content| -> Result<Vec<u8>> {
            let mut bytes = vec![0; layout.block as usize];
            exact(source, number.saturating_mul(layout.block), &mut bytes)
                .context("read extended attributes")?;
            COUNTS.into_iter().for_each(|range| bytes[range].fill(0));
            Ok(bytes)
        };
        ensure!(
            read(before)? == read(after)?,
            "extended attributes in block {number} would change"
        );
    }
    let Changed {
        directories,
        replaced,
        new,
    } = changed;
    let few = directories <= MAX_DIRECTORIES && replaced <= MAX_REPLACED && new <= MAX_NEW;
    ensure!(
        few,
        "inodes would change: {directories} directories, {replaced} others, {new} new"
    );
    Ok(changed)
}

/// Whether an inode has links.
fn is_used(inode: &[u8]) -> bool {
    number::<2>(inode, 26) != 0
}

fn attribute_block(inode: &[u8]) -> u64 {
    number::<4>(inode, 104) | number::<2>(inode, 118) << 32
}

/// Attributes stored in the inode itself.
fn own_attributes(inode: &[u8]) -> &[u8] {
    let extra = if inode.len() > OLD_INODE {
        number::<2>(inode, OLD_INODE) as usize
    } else {
        0
    };
    inode.get(OLD_INODE + extra..).unwrap_or_default()
}

fn compare(inode: u64, old: &[u8], new: &[u8], first: u64, changed: &mut Changed) -> Result<()> {
    let kind = |inode: &[u8]| Kind::of(number::<2>(inode, 0) as u32);
    ensure!(
        inode >= first || inode == ROOT_INODE,
        "inode {inode} of the file system itself would change"
    );
    match (is_used(old), is_used(new)) {
        (false, false) => {}
        (false, true) => {
            ensure!(
                attribute_block(new) == 0,
                "inode {inode}: a new file has extended attributes"
            );
            changed.new += 1;
        }
        (true, true) if kind(old) == Kind::Directory => {
            // Mode, owner and modification time must stay; the number of links and the place of the
            // data may change.
            let same = [0..4, 16..20, 24..26, 120..124]
                .into_iter()
                .all(|range| old.get(range.clone()) == new.get(range));
            let attributes = own_attributes(old) == own_attributes(new)
                && attribute_block(old) == attribute_block(new);
            ensure!(
                same && attributes,
                "inode {inode}: mode, owner or extended attributes of a directory would change"
            );
            changed.directories += 1;
        }
        (true, _) => {
            ensure!(
                kind(old) != Kind::Directory,
                "inode {inode}: a directory would be gone"
            );
            changed.replaced += 1;
        }
    }
    Ok(())
}
