//! The disk around a root: the partition table stays if the new root fits. Otherwise the first
//! partition is enlarged.

use super::erofs::{exact, number};
use crate::guest_disk::{Disk, Table};
use crate::images::image::Content;
use anyhow::{Context, Result, ensure};
use kata_gpu_init::formats::elf::ReadAt;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

const SECTOR: u64 = 512;
/// Partitions grow by whole MiB, and a GPT keeps one for its second copy.
const UNIT: u64 = 1 << 20;
/// MBR: offset of the first partition's number of sectors, and range of the other entries.
const MBR_SECTORS: u64 = 446 + 12;
const MBR_OTHERS: std::ops::Range<u64> = 446 + 16..510;
/// Mark of Kata's nvdimm header, which the image builder writes with a table of its own.
const NVDIMM: (u64, [u8; 2]) = ((2 << 20) + 510, [0x55, 0xaa]);

/// Number of a GPT's entries, in its first copy; their size follows.
const GPT_COUNT: usize = 512 + 80;
const GPT_ENTRY: u64 = 128;
const MAX_ENTRIES: u64 = 1024;

/// The disk around its root.
#[derive(Debug)]
pub struct Around {
    /// Bytes before the partition, and after it.
    pub head: Content,
    pub tail: Content,
    /// Bytes of the partition.
    pub partition: u64,
    /// Whether the partition was enlarged.
    pub grown: bool,
}

fn put(head: &mut [u8], at: u64, bytes: &[u8]) {
    if let Some(place) = head.get_mut(at as usize..at as usize + bytes.len()) {
        place.copy_from_slice(bytes);
    }
}

/// The disk for a root of `root_bytes`. `scratch`: path of a file that may be made.
pub fn around(image: &Content, disk: &Disk, root_bytes: u64, scratch: &Path) -> Result<Around> {
    if disk.table == Table::None || root_bytes <= disk.root_bytes {
        return Ok(Around {
            head: image.part(0..disk.root_at),
            tail: image.part(disk.root_at + disk.root_bytes..image.length),
            partition: if disk.table == Table::None {
                root_bytes
            } else {
                disk.root_bytes
            },
            grown: false,
        });
    }
    let partition = root_bytes.next_multiple_of(UNIT);
    let mut mark = [0; 2];
    let has_header = disk.root_at > NVDIMM.0
        && image.read_at(&mut mark, NVDIMM.0)? == mark.len()
        && mark == NVDIMM.1;
    ensure!(
        !has_header,
        "the new root needs {} MiB, the partition has {}, and Kata's nvdimm header holds that \
         size, too: make the image with a larger partition",
        partition >> 20,
        disk.root_bytes >> 20
    );
    let mut head =
        vec![0; usize::try_from(disk.root_at).context("a partition that begins too far behind")?];
    exact(image, 0, &mut head).context("read the bytes before the partition")?;
    let bytes = disk.root_at + partition + UNIT;
    let sectors = u32::try_from(partition / SECTOR).context("a partition of more than 2 TiB")?;
    let mut tail = vec![0; UNIT as usize];
    match disk.table {
        Table::None => {}
        Table::Mbr => {
            put(&mut head, MBR_SECTORS, &sectors.to_le_bytes());
            put(
                &mut head,
                MBR_OTHERS.start,
                &[0; (MBR_OTHERS.end - MBR_OTHERS.start) as usize],
            );
        }
        Table::Gpt => {
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
            let (first, mut entry) = old
                .take_partitions()
                .into_iter()
                .next()
                .context("a GPT without a partition")?;
            entry.first_lba = disk.root_at / SECTOR;
            entry.last_lba = entry.first_lba + u64::from(sectors) - 1;
            // Make a new header: the old one ends at the old disk's end.
            let new = gpt::GptConfig::new()
                .writable(true)
                .create_from_device(old.take_device(), Some(guid));
            let mut table = new.context("make the GPT")?;
            table
                .update_partitions([(first, entry)].into())
                .context("change the GPT")?;
            let file = table.write().context("write the GPT")?;
            exact(&file, 0, &mut head)
                .and_then(|()| exact(&file, bytes - UNIT, &mut tail))
                .context("read the new GPT")?;
            // The protective entry of the MBR covers the disk.
            let covered = u32::try_from(bytes / SECTOR - 1).unwrap_or(u32::MAX);
            put(&mut head, MBR_SECTORS, &covered.to_le_bytes());
        }
    }
    Ok(Around {
        head: Content::of_bytes(head),
        tail: Content::of_bytes(tail),
        partition,
        grown: true,
    })
}
