//! The disk around a root: the partition table stays if the new root and its hash tree fit.
//! Otherwise the first partition is enlarged, and the second follows it, or is dropped without a
//! hash tree.

use super::erofs::{exact, number};
use super::hash_tree::BLOCK;
use crate::guest_disk::{Disk, Table};
use crate::images::image::Content;
use anyhow::{Context, Result, ensure};
use gpt::partition::Partition;
use kata_gpu_init::formats::elf::ReadAt;
use std::collections::BTreeMap;
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;

const SECTOR: u64 = 512;
/// Partitions grow by whole MiB, and a GPT keeps one for its second copy.
const UNIT: u64 = 1 << 20;
/// Most bytes before the first partition: Kata's images have 3 MiB there.
const MAX_HEAD: u64 = 64 << 20;
/// MBR: offsets of the entries, bytes of an entry, and offset of its number of sectors.
const MBR_ENTRIES: Range<u64> = 446..510;
const MBR_ENTRY: u64 = 16;
const MBR_SECTORS: u64 = 12;
/// MBR: a partition of Linux, whose addresses by cylinder are not used.
const MBR_LINUX: [u8; 8] = [0, 0xfe, 0xff, 0xff, 0x83, 0xfe, 0xff, 0xff];
/// Mark of Kata's nvdimm header, which the image builder writes with a table of its own.
const NVDIMM: (u64, [u8; 2]) = ((2 << 20) + 510, [0x55, 0xaa]);

/// Number of a GPT's entries, in its first copy; their size follows.
const GPT_COUNT: usize = 512 + 80;
const GPT_ENTRY: u64 = 128;
const MAX_ENTRIES: u64 = 1024;

/// The disk around its root.
#[derive(Debug)]
pub struct Around {
    /// Bytes before the first partition.
    pub head: Content,
    /// Bytes of the first partition.
    pub partition: u64,
    /// Bytes between the partitions.
    pub between: Content,
    /// Bytes of the second partition, if the tree is to be written there; else 0.
    pub second: u64,
    /// Bytes after the partitions.
    pub tail: Content,
    /// Whether the first partition was enlarged, and whether the second is another one.
    pub grown: bool,
    pub moved: bool,
}

fn put(head: &mut [u8], at: u64, bytes: &[u8]) {
    if let Some(place) = head.get_mut(at as usize..at as usize + bytes.len()) {
        place.copy_from_slice(bytes);
    }
}

/// The second partition of the image, if it can hold the hash tree of the first as it is.
fn second_for(image: &Content, disk: &Disk, tree_bytes: u64) -> Option<Range<u64>> {
    disk.second.clone().filter(|second| {
        second.start >= disk.root_at + disk.root_bytes
            && second.end <= image.length
            && length(second) >= tree_bytes
    })
}

/// The disk for a root of `root_bytes`. `tree_bytes`: of the hash tree for a partition of so many
/// bytes, of a disk with partitions; none without a tree. `scratch`: path of a file that may be
/// made.
pub fn around(
    image: &Content,
    disk: &Disk,
    root_bytes: u64,
    tree_bytes: Option<&dyn Fn(u64) -> u64>,
    scratch: &Path,
) -> Result<Around> {
    let root_end = disk.root_at + disk.root_bytes;
    // A tree covers whole blocks.
    let fits = disk.table == Table::None
        || root_bytes <= disk.root_bytes
            && (tree_bytes.is_none() || disk.root_bytes % u64::from(BLOCK) == 0);
    let second = tree_bytes.and_then(|of| second_for(image, disk, of(disk.root_bytes)));
    if fits && (tree_bytes.is_none() || second.is_some()) {
        let second = second.unwrap_or(root_end..root_end);
        return Ok(Around {
            head: image.part(0..disk.root_at),
            partition: match disk.table {
                Table::None => root_bytes,
                Table::Mbr | Table::Gpt => disk.root_bytes,
            },
            between: image.part(root_end..second.start),
            second: length(&second),
            tail: image.part(second.end..image.length),
            grown: false,
            moved: false,
        });
    }
    let partition = if fits {
        disk.root_bytes
    } else {
        root_bytes.max(disk.root_bytes).next_multiple_of(UNIT)
    };
    let mut mark = [0; 2];
    let has_header = disk.root_at > NVDIMM.0
        && image.read_at(&mut mark, NVDIMM.0)? == mark.len()
        && mark == NVDIMM.1;
    ensure!(
        !has_header || !fits,
        "the second partition is missing, or too small for a hash tree, and Kata's nvdimm header \
         holds the partitions, too: make the image with MEASURED_ROOTFS=yes, or omit --verity"
    );
    ensure!(
        !has_header,
        "the new root needs {} MiB, the partition has {}, and Kata's nvdimm header holds that \
         size, too: make the image with a larger partition",
        partition >> 20,
        disk.root_bytes >> 20
    );
    let first = disk.root_at..disk.root_at + partition;
    let second = tree_bytes.map(|of| {
        let start = first.end.next_multiple_of(UNIT);
        start..start + of(partition).next_multiple_of(UNIT).max(UNIT)
    });
    let end = second.as_ref().map_or(first.end, |second| second.end);
    let (head, tail) = match disk.table {
        Table::Gpt => gpt(image, &first, second.as_ref(), end + UNIT, scratch)?,
        Table::Mbr | Table::None => (mbr(image, &first, second.as_ref())?, vec![0; UNIT as usize]),
    };
    let between = second.as_ref().map_or(0, |second| second.start - first.end);
    Ok(Around {
        head: Content::of_bytes(head),
        partition,
        between: Content::of_bytes(vec![0; between as usize]),
        second: second.as_ref().map_or(0, length),
        tail: Content::of_bytes(tail),
        grown: !fits,
        moved: tree_bytes.is_some(),
    })
}

fn head_of(image: &Content, bytes: u64) -> Result<Vec<u8>> {
    ensure!(
        bytes <= MAX_HEAD,
        "the first partition begins at {bytes}, behind {MAX_HEAD} bytes: no image of Kata's does"
    );
    let mut head = vec![0; bytes as usize];
    exact(image, 0, &mut head).context("read the bytes before the partition")?;
    Ok(head)
}

fn sectors(bytes: u64) -> Result<[u8; 4]> {
    let sectors = u32::try_from(bytes / SECTOR).context("a disk of more than 2 TiB")?;
    Ok(sectors.to_le_bytes())
}

fn length(range: &Range<u64>) -> u64 {
    range.end - range.start
}

/// The bytes before the first partition, with an MBR of these partitions and no others.
fn mbr(image: &Content, first: &Range<u64>, second: Option<&Range<u64>>) -> Result<Vec<u8>> {
    let mut head = head_of(image, first.start)?;
    let mut others = vec![0; (MBR_ENTRIES.end - MBR_ENTRIES.start - MBR_ENTRY) as usize];
    if let Some(second) = second {
        let entry = [
            MBR_LINUX.as_slice(),
            &sectors(second.start)?,
            &sectors(length(second))?,
        ];
        put(&mut others, 0, &entry.concat());
    }
    put(
        &mut head,
        MBR_ENTRIES.start + MBR_SECTORS,
        &sectors(length(first))?,
    );
    put(&mut head, MBR_ENTRIES.start + MBR_ENTRY, &others);
    Ok(head)
}

/// The bytes before the first partition, and the last [`UNIT`], of a disk of `bytes` with a GPT of
/// these partitions and no others.
fn gpt(
    image: &Content,
    first: &Range<u64>,
    second: Option<&Range<u64>>,
    bytes: u64,
    scratch: &Path,
) -> Result<(Vec<u8>, Vec<u8>)> {
    let mut head = head_of(image, first.start)?;
    let (count, size) = (
        number::<4>(&head, GPT_COUNT),
        number::<4>(&head, GPT_COUNT + 4),
    );
    ensure!(
        count <= MAX_ENTRIES && size == GPT_ENTRY,
        "a GPT of {count} entries of {size} bytes: this takes {MAX_ENTRIES} of {GPT_ENTRY}"
    );
    let file = File::options()
        .read(true)
        .write(true)
        .create_new(true)
        .open(scratch)
        .context("make a file for the table")?;
    file.set_len(bytes)
        .and_then(|()| file.write_all_at(&head, 0))
        .context("write a table")?;
    let mut old = gpt::GptConfig::new()
        .open_from_device(file)
        .context("read the GPT")?;
    let guid = *old.guid();
    let mut entries = old.take_partitions();
    let entry = entries.remove(&1).context("a GPT without a partition")?;
    let at = |range: &Range<u64>, entry: Partition| Partition {
        first_lba: range.start / SECTOR,
        last_lba: range.end / SECTOR - 1,
        ..entry
    };
    let mut new = BTreeMap::new();
    if let Some(second) = second {
        let mut other = entries.remove(&2).unwrap_or_else(|| entry.clone());
        if other.part_guid == entry.part_guid {
            // Another GUID than the first partition's, and the same one in each run.
            let guid = format!("{:032x}", entry.part_guid.as_u128() ^ 1);
            other.part_guid = guid.parse().context("make a GUID")?;
        }
        new.insert(2, at(second, other));
    }
    new.insert(1, at(first, entry));
    // Make a new header: the old one ends at the old disk's end.
    let mut table = gpt::GptConfig::new()
        .writable(true)
        .create_from_device(old.take_device(), Some(guid))
        .context("make the GPT")?;
    table.update_partitions(new).context("change the GPT")?;
    let file = table.write().context("write the GPT")?;
    let mut tail = vec![0; UNIT as usize];
    exact(&file, 0, &mut head)
        .and_then(|()| exact(&file, bytes - UNIT, &mut tail))
        .context("read the new GPT")?;
    // The protective entry of the MBR covers the disk.
    let covered = u32::try_from(bytes / SECTOR - 1).unwrap_or(u32::MAX);
    put(
        &mut head,
        MBR_ENTRIES.start + MBR_SECTORS,
        &covered.to_le_bytes(),
    );
    Ok((head, tail))
}
