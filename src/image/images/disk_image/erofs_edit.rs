//! Replaces the init in an erofs file system: new inodes and changed directories are appended,
//! inodes of changed directories and the superblock are patched in place. Every other byte stays,
//! and so does every extended attribute, compressed file and hard link.
//!
//! The appended part begins with [`MARK`]. The next edit replaces that part, so an image does not
//! grow with every upgrade.

use super::erofs;
use super::erofs::{DIRENT, Dirent, Erofs, Inode, SLOT, SUPERBLOCK, Superblock, exact};
use super::wanted::{LIST_DIRECTORIES, Wanted};
use crate::images::driver_list;
use crate::images::entry_text::escaped;
use crate::images::newc::Kind;
use crate::images::unpacked_root::{Id, Tree};
use anyhow::{Context, Result, ensure};
use std::collections::{BTreeMap, BTreeSet};

/// First bytes of the appended part; the number of inodes before the edit follows.
const MARK: &[u8; 24] = b"kata-gpu-init root part\n";
/// Bytes of an added inode.
const INODE: u64 = 64;
/// Mask of the data layout in an inode's format; all clear: in blocks.
const LAYOUT: u16 = 0b1110;
const FILE: u8 = 1;
const DIRECTORY: u8 = 2;
const LINK: u8 = 7;

/// Changes from the old file system to the new one.
#[derive(Debug)]
pub struct Edit {
    /// Bytes replaced in place, by offset.
    pub patches: BTreeMap<u64, Vec<u8>>,
    /// Offset of `added`; the old file system's bytes from there on are dropped.
    pub at: u64,
    pub added: Vec<u8>,
}

impl Edit {
    /// Bytes of the new file system.
    pub fn bytes(&self) -> u64 {
        self.at + self.added.len() as u64
    }
}

/// A directory whose entries change.
enum Parent {
    /// Index in [`Erofs::inodes`].
    Old(usize),
    /// Index of an added inode.
    New(usize),
}

struct New {
    mode: u32,
    nlink: u32,
    data: Vec<u8>,
}

#[derive(Default)]
struct Plan {
    new: Vec<New>,
    /// Names added to directories, by the index of the directory's inode, old or new.
    in_old: BTreeMap<usize, Vec<(String, usize, u8)>>,
    in_new: BTreeMap<usize, Vec<(String, usize, u8)>>,
}

impl Plan {
    fn add(&mut self, parent: &Parent, name: &str, mode: u32, data: Vec<u8>) -> usize {
        let (index, is_directory) = (self.new.len(), Kind::of(mode) == Kind::Directory);
        let kind = match Kind::of(mode) {
            Kind::Directory => DIRECTORY,
            Kind::Link => LINK,
            _ => FILE,
        };
        self.new.push(New {
            mode,
            nlink: if is_directory { 2 } else { 1 },
            data,
        });
        let (names, at) = match parent {
            Parent::Old(at) => (&mut self.in_old, *at),
            Parent::New(at) => (&mut self.in_new, *at),
        };
        names
            .entry(at)
            .or_default()
            .push((name.into(), index, kind));
        if let (Parent::New(at), true) = (parent, is_directory)
            && let Some(parent) = self.new.get_mut(*at)
        {
            parent.nlink += 1;
        }
        index
    }
}

/// Computes the edit without changing the file system.
pub fn edit(fs: &Erofs, tree: &Tree, wanted: &Wanted) -> Result<Edit> {
    let superblock = &fs.superblock;
    let (at, inodes_before) =
        place_of_former(fs, tree, wanted)?.unwrap_or((superblock.bytes(), superblock.inodes));
    let old = |path: &str| {
        tree.node(tree.find_no_follow(path)?)
            .entry
            .filter(|index| fs.inodes.get(*index).is_some_and(|inode| inode.at < at))
    };
    let root = old("/").context("the root has no inode")?;
    let mut plan = Plan::default();
    for put in wanted.puts() {
        let (directory, name) = put.place();
        let mut parent = Parent::Old(root);
        let ends = directory.match_indices('/').map(|(end, _)| end).skip(1);
        for end in ends.chain([directory.len()]).filter(|end| *end > 0) {
            let path = &directory[..end];
            let (_, name) = path.rsplit_once('/').unwrap_or(("", path));
            let mode = Kind::Directory.bits() | 0o755;
            parent = match old(path) {
                Some(index) => Parent::Old(index),
                None => Parent::New(plan.add(&parent, name, mode, Vec::new())),
            };
        }
        plan.add(&parent, name, put.mode, put.data.to_vec());
    }
    lay_out(fs, plan, at, inodes_before)
}

/// Offset of the former edit and the number of inodes before it. None: no former edit, or other
/// data after that offset.
fn place_of_former(fs: &Erofs, tree: &Tree, wanted: &Wanted) -> Result<Option<(u64, u64)>> {
    let superblock = &fs.superblock;
    let Some(init) = tree
        .find_no_follow("/init")
        .and_then(|id| fs.inodes.get(tree.node(id).entry?))
    else {
        return Ok(None);
    };
    let at = init.at / superblock.block * superblock.block;
    let mut mark = [0; MARK.len() + 8];
    exact(&fs.source, at, &mut mark)?;
    if !mark.starts_with(MARK) || at <= superblock.meta {
        return Ok(None);
    }
    let (mut replaced, mut changed) = (BTreeSet::new(), BTreeSet::new());
    for put in wanted.puts() {
        let above = match put.place().0 {
            "" => "/",
            above => above,
        };
        changed.insert(above.as_bytes().to_vec());
        replaced.insert(put.path.into_bytes());
    }
    if wanted.list.is_some() {
        for path in LIST_DIRECTORIES {
            changed.insert(path.as_bytes().to_vec());
            // Replace a directory of the former edit if nothing else is in it.
            let is_lists = |name: &[u8]| {
                let list = driver_list::path();
                let mut all = LIST_DIRECTORIES.iter().copied().chain([list.as_str()]);
                all.any(|path| path.as_bytes().rsplit(|b| *b == b'/').next() == Some(name))
            };
            let only = |id: Id| tree.list(id).all(|(name, _)| is_lists(name));
            if tree.find_no_follow(path).is_some_and(only) {
                replaced.insert(path.as_bytes().to_vec());
            }
        }
    }
    let stays = |index: usize, path: &[u8]| {
        let Some(inode) = fs.inodes.get(index) else {
            return false;
        };
        let data = superblock.data_at(inode);
        inode.behind <= at && data.is_none_or(|data| data < at || changed.contains(path))
            || replaced.contains(path)
    };
    let all = std::iter::once(crate::images::unpacked_root::ROOT)
        .chain(tree.below(crate::images::unpacked_root::ROOT));
    let sound = all.into_iter().all(|id| {
        tree.node(id)
            .entry
            .is_some_and(|index| stays(index, &tree.path(id)))
    });
    Ok(sound.then(|| (at, erofs::number::<8>(&mark, MARK.len()))))
}

/// Numbers the new inodes and writes everything.
fn lay_out(fs: &Erofs, mut plan: Plan, at: u64, inodes_before: u64) -> Result<Edit> {
    let superblock = &fs.superblock;
    let block = superblock.block;
    let inode_at = |index: usize| at + INODE * (1 + index as u64);
    let nid = |index: usize| (inode_at(index) - superblock.meta) / SLOT;
    // A directory contains the inode numbers of itself and of its parent.
    let above: BTreeMap<usize, u64> = {
        let of_old = plan.in_old.iter().flat_map(|(at, names)| {
            names
                .iter()
                .map(move |name| (name.1, fs.inodes.get(*at).map(|i| i.nid)))
        });
        let of_new = plan
            .in_new
            .iter()
            .flat_map(|(at, names)| names.iter().map(move |name| (name.1, Some(nid(*at)))));
        of_old
            .chain(of_new)
            .filter_map(|(index, nid)| Some((index, nid?)))
            .collect()
    };
    for (index, names) in &plan.in_new {
        let own = |name: &[u8], nid| Dirent {
            nid,
            kind: DIRECTORY,
            name: name.to_vec(),
        };
        let mut all = vec![
            own(b".", nid(*index)),
            own(b"..", above.get(index).copied().unwrap_or(superblock.root)),
        ];
        all.extend(names.iter().map(|(name, index, kind)| Dirent {
            nid: nid(*index),
            kind: *kind,
            name: name.as_bytes().to_vec(),
        }));
        if let Some(new) = plan.new.get_mut(*index) {
            new.data = directory(all, block);
        }
    }
    let first = (INODE * (1 + plan.new.len() as u64)).next_multiple_of(block);
    let mut added = vec![0; first as usize];
    added[..MARK.len()].copy_from_slice(MARK);
    added[MARK.len()..MARK.len() + 8].copy_from_slice(&inodes_before.to_le_bytes());
    let put = |added: &mut Vec<u8>, data: &[u8]| -> Result<u32> {
        let start = (at + added.len() as u64) / block;
        added.extend(data);
        added.resize(added.len().next_multiple_of(block as usize), 0);
        u32::try_from(start).context("more blocks than an erofs file system can have")
    };
    for (index, new) in plan.new.iter().enumerate() {
        let start = if new.data.is_empty() {
            0
        } else {
            put(&mut added, &new.data)?
        };
        let bytes = inode(
            new,
            start,
            (inodes_before + 1 + index as u64) as u32,
            superblock.build_time,
        );
        let slot = (inode_at(index) - at) as usize;
        added[slot..slot + bytes.len()].copy_from_slice(&bytes);
    }
    let mut patches = BTreeMap::new();
    for (index, names) in &plan.in_old {
        let old = fs.inodes.get(*index).context("no such inode")?;
        let entry = fs.image.entries.get(*index).context("no such entry")?;
        let bytes = entry
            .data
            .bytes(u64::from(u32::MAX))
            .with_context(|| format!("read directory {}", escaped(&entry.name)))?;
        let mut all = erofs::dirents(&bytes, block)?;
        let new_directories = names.iter().filter(|(name, _, kind)| {
            *kind == DIRECTORY && all.iter().all(|d| d.name != name.as_bytes())
        });
        let nlink = old.nlink + new_directories.count() as u32;
        for (name, new, kind) in names {
            all.retain(|dirent| dirent.name != name.as_bytes());
            all.push(Dirent {
                nid: nid(*new),
                kind: *kind,
                name: name.as_bytes().to_vec(),
            });
        }
        let data = directory(all, block);
        let start = put(&mut added, &data)?;
        patches.extend(directory_inode(fs, old, nlink, data.len() as u64, start)?);
    }
    patch_superblock(
        fs,
        &mut patches,
        at + added.len() as u64,
        inodes_before + plan.new.len() as u64,
    )?;
    Ok(Edit { patches, at, added })
}

/// Bytes of a directory with these entries.
fn directory(mut all: Vec<Dirent>, block: u64) -> Vec<u8> {
    all.sort_by(|a, b| a.name.cmp(&b.name));
    let mut bytes = Vec::new();
    let mut rest = all.as_slice();
    while !rest.is_empty() {
        let mut used = 0;
        let fits = |dirent: &&Dirent| {
            used += DIRENT + dirent.name.len();
            used as u64 <= block
        };
        let count = rest.iter().take_while(fits).count();
        let (here, next) = rest.split_at(count.max(1));
        let mut name_at = here.len() * DIRENT;
        for dirent in here {
            bytes.extend(dirent.nid.to_le_bytes());
            bytes.extend((name_at as u16).to_le_bytes());
            bytes.extend([dirent.kind, 0]);
            name_at += dirent.name.len();
        }
        here.iter().for_each(|dirent| bytes.extend(&dirent.name));
        rest = next;
        if !rest.is_empty() {
            bytes.resize(bytes.len().next_multiple_of(block as usize), 0);
        }
    }
    bytes
}

/// An extended inode with its data in blocks, owned by root.
fn inode(new: &New, start: u32, number: u32, mtime: u64) -> [u8; INODE as usize] {
    let mut bytes = [0; INODE as usize];
    let mut put = |at: usize, number: &[u8]| bytes[at..at + number.len()].copy_from_slice(number);
    put(0, &1_u16.to_le_bytes());
    put(4, &(new.mode as u16).to_le_bytes());
    put(8, &(new.data.len() as u64).to_le_bytes());
    put(16, &start.to_le_bytes());
    put(20, &number.to_le_bytes());
    put(32, &mtime.to_le_bytes());
    put(44, &new.nlink.to_le_bytes());
    bytes
}

/// Patches of a changed directory's inode.
fn directory_inode(
    fs: &Erofs,
    old: &Inode,
    nlink: u32,
    size: u64,
    start: u32,
) -> Result<Vec<(u64, Vec<u8>)>> {
    let mut format = [0; 2];
    exact(&fs.source, old.at, &mut format)?;
    let format = u16::from_le_bytes(format) & !LAYOUT;
    let mut patches = vec![
        (old.at, format.to_le_bytes().to_vec()),
        (old.at + 16, start.to_le_bytes().to_vec()),
    ];
    if old.is_extended {
        patches.push((old.at + 8, size.to_le_bytes().to_vec()));
        patches.push((old.at + 44, nlink.to_le_bytes().to_vec()));
    } else {
        ensure!(
            u16::try_from(nlink).is_ok() && u32::try_from(size).is_ok(),
            "a directory of {nlink} links is too large for its inode"
        );
        patches.push((old.at + 8, (size as u32).to_le_bytes().to_vec()));
        patches.push((old.at + 6, (nlink as u16).to_le_bytes().to_vec()));
    }
    Ok(patches)
}

fn patch_superblock(
    fs: &Erofs,
    patches: &mut BTreeMap<u64, Vec<u8>>,
    bytes: u64,
    inodes: u64,
) -> Result<()> {
    let Superblock {
        block,
        has_checksum,
        ..
    } = fs.superblock;
    let blocks =
        u32::try_from(bytes / block).context("more blocks than an erofs file system can have")?;
    patches.insert(SUPERBLOCK + 16, inodes.to_le_bytes().to_vec());
    patches.insert(SUPERBLOCK + 36, blocks.to_le_bytes().to_vec());
    if has_checksum {
        // The checksum covers the block from the superblock's first byte on, inodes included.
        let mut sum_of = vec![0; (block - SUPERBLOCK) as usize];
        exact(&fs.source, SUPERBLOCK, &mut sum_of)?;
        sum_of[4..8].fill(0);
        for (at, bytes) in patches.range(SUPERBLOCK..block) {
            let begin = (at - SUPERBLOCK) as usize;
            let length = bytes.len().min(sum_of.len() - begin);
            sum_of[begin..begin + length].copy_from_slice(&bytes[..length]);
        }
        patches.insert(
            SUPERBLOCK + 4,
            erofs::checksum(&sum_of).to_le_bytes().to_vec(),
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_checksum_is_castagnolis_without_the_last_inversion() {
        assert_eq!(!erofs::checksum(b"123456789"), 0xe306_9283);
    }

    #[test]
    fn a_directory_is_sorted_and_its_blocks_are_read_again() {
        let name = |index: u32| Dirent {
            nid: u64::from(index) << 33,
            kind: FILE,
            name: format!("{:>0200}", index * 7 % 64).into_bytes(),
        };
        let mut all: Vec<Dirent> = (0..64).map(name).collect();
        let bytes = directory(all.clone(), 4096);
        all.sort_by(|a, b| a.name.cmp(&b.name));
        assert_eq!(erofs::dirents(&bytes, 4096).unwrap(), all);
        assert!(bytes.len() > 3 * 4096, "several blocks");
    }
}
