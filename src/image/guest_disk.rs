//! A guest's image as a disk: file system of its root, and where in the file the root begins. Both
//! are read from a partition table and from magic numbers.
//!
//! The file system is searched for bytes, not parsed. Images are untrusted: every number is checked
//! against the file's length.

use kata_gpu_init::formats::elf::ReadAt;
use memchr::memmem;
use std::io;
use std::ops::Range;

/// Sector size of Kata's image builder's partition tables, and of disks under QEMU and Cloud
/// Hypervisor.
const SECTOR: u64 = 512;
/// Offset and bytes of the mark that ends an MBR.
const MBR_MARK: (u64, [u8; 2]) = (510, [0x55, 0xaa]);
/// MBR: offset of the entries, length of an entry, and the partition type that marks a GPT.
const MBR_ENTRIES: u64 = 446;
const MBR_ENTRY: u64 = 16;
const MBR_OF_GPT: u8 = 0xee;
const GPT_MARK: &[u8; 8] = b"EFI PART";
/// Sizes of a GPT entry: UEFI allows 128 times a power of two.
const GPT_ENTRY: std::ops::RangeInclusive<u64> = 128..=4096;
/// Bytes searched at once.
const SEARCHED: usize = 1 << 20;
/// Magic numbers from the beginning of a file system.
const EROFS: (u64, [u8; 4]) = (1024, [0xe2, 0xe1, 0xf5, 0xe0]);
const EXT: (u64, [u8; 2]) = (1024 + 0x38, [0x53, 0xef]);
/// Formats that are neither an initrd nor a disk with erofs or ext4: offset, magic number, name,
/// and whether the format is a disk.
const OTHERS: &[(u64, &[u8], &str, bool)] = &[
    (0, b"hsqs", "a squashfs file system", true),
    (0, b"XFSB", "an xfs file system", true),
    (0, b"QFI\xfb", "a qcow2 disk", false),
    (0, b"KDMV", "a vmdk disk", false),
    (257, b"ustar", "a tar archive", false),
    (0, b"PK\x03\x04", "a zip archive", false),
    (0, b"\x7fELF", "a program", false),
    (0x202, b"HdrS", "a kernel", false),
];
/// First bytes of initrds, plain and compressed.
const INITRDS: &[&[u8]] = &[
    b"07070",
    &[0x1f, 0x8b],
    b"\xfd7zXZ",
    &[0x28, 0xb5, 0x2f, 0xfd],
];

/// File system of the root: Kata's `rootfs_type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileSystem {
    Erofs,
    /// Includes ext2 and ext3: the same kernel code mounts them.
    Ext4,
}

impl FileSystem {
    pub fn name(self) -> &'static str {
        match self {
            Self::Erofs => "erofs",
            Self::Ext4 => "ext4",
        }
    }
}

/// Partition table of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Table {
    /// No table: the file system is the disk.
    None,
    Mbr,
    Gpt,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Disk {
    pub table: Table,
    pub root: FileSystem,
    /// First byte of the root's file system.
    pub root_at: u64,
    /// Length of the root's partition, or of the file.
    pub root_bytes: u64,
    /// Bytes of the second partition, wherever its table puts it; Kata keeps the dm-verity hash
    /// tree there.
    pub second: Option<Range<u64>>,
}

/// Recognizes an image of `length` bytes. The inner error is the reason why Kata cannot use it.
pub fn look(file: &(impl ReadAt + ?Sized), length: u64) -> io::Result<Result<Disk, String>> {
    let (table, root, second) = match partition(file)? {
        None => (Table::None, 0..length, None),
        Some(found) => found,
    };
    let (start, root_bytes) = (root.start, root.end - root.start);
    if root.end > length {
        return Ok(Err(format!(
            "its first partition has {root_bytes} bytes from byte {start} on, and the file \
             {length}: it is cut"
        )));
    }
    let Some(root) = file_system(file, start)? else {
        let is_initrd = INITRDS.iter().try_fold(false, |found, magic| {
            Ok::<_, io::Error>(found || has(file, 0, magic)?)
        })?;
        return Ok(Err(match table {
            _ if is_initrd => "it is an initrd, or compressed".into(),
            Table::None => {
                format!(
                    "it is {}, and no disk with erofs or ext4",
                    known(file)?.map_or("nothing that is known", |known| known.name)
                )
            }
            Table::Mbr | Table::Gpt => "its first partition is neither erofs nor ext4".into(),
        }));
    };
    Ok(Ok(Disk {
        table,
        root,
        root_at: start,
        root_bytes,
        second,
    }))
}

/// A file that is no initrd.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Known {
    pub name: &'static str,
    /// A disk, or a file system that could be one.
    pub is_disk: bool,
}

/// Format of a file that is no initrd; None if the format is unknown.
pub fn known(file: &(impl ReadAt + ?Sized)) -> io::Result<Option<Known>> {
    let has_partitions = partition(file)?.is_some();
    let disk = |name| {
        Ok(Some(Known {
            name,
            is_disk: true,
        }))
    };
    match file_system(file, 0)? {
        _ if has_partitions => return disk("a disk with partitions"),
        Some(FileSystem::Erofs) => return disk("an erofs file system"),
        Some(FileSystem::Ext4) => return disk("an ext4 file system"),
        None => {}
    }
    for &(at, magic, name, is_disk) in OTHERS {
        if has(file, at, magic)? {
            return Ok(Some(Known { name, is_disk }));
        }
    }
    Ok(None)
}

/// Whether these bytes are anywhere in the file, which is read once, from its beginning.
pub fn contains(mut file: impl io::Read, what: &[u8]) -> io::Result<bool> {
    let mut buffer = vec![0; SEARCHED + what.len()];
    let mut kept = 0;
    loop {
        let read = match file.read(buffer.get_mut(kept..).unwrap_or_default()) {
            Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
            read => read?,
        };
        let filled = kept + read;
        if memmem::find(buffer.get(..filled).unwrap_or_default(), what).is_some() {
            return Ok(true);
        }
        if read == 0 {
            return Ok(false);
        }
        // Keep the tail: a match may begin there.
        let from = filled - filled.min(what.len());
        buffer.copy_within(from..filled, 0);
        kept = filled - from;
    }
}

fn has(file: &(impl ReadAt + ?Sized), at: u64, magic: &[u8]) -> io::Result<bool> {
    let mut bytes = [0; 8];
    let Some(bytes) = bytes.get_mut(..magic.len()) else {
        return Ok(false);
    };
    read(file, at, bytes)?;
    Ok(bytes == magic)
}

/// Bytes beyond the file's end read as zeros.
fn read(file: &(impl ReadAt + ?Sized), at: u64, mut bytes: &mut [u8]) -> io::Result<()> {
    let mut offset = at;
    while !bytes.is_empty() {
        let count = file.read_at(bytes, offset)?;
        if count == 0 {
            break;
        }
        offset = offset.saturating_add(count as u64);
        bytes = bytes.get_mut(count..).unwrap_or_default();
    }
    Ok(())
}

fn number<const N: usize>(file: &(impl ReadAt + ?Sized), at: u64) -> io::Result<u64> {
    let mut bytes = [0; N];
    read(file, at, &mut bytes)?;
    Ok(bytes
        .iter()
        .rev()
        .fold(0, |number, byte| number << 8 | u64::from(*byte)))
}

fn file_system(file: &(impl ReadAt + ?Sized), start: u64) -> io::Result<Option<FileSystem>> {
    Ok(if has(file, start.saturating_add(EROFS.0), &EROFS.1)? {
        Some(FileSystem::Erofs)
    } else if has(file, start.saturating_add(EXT.0), &EXT.1)? {
        Some(FileSystem::Ext4)
    } else {
        None
    })
}

/// The table, and the bytes of the first partition and of the second if it exists.
type Partitions = (Table, Range<u64>, Option<Range<u64>>);

fn partition(file: &(impl ReadAt + ?Sized)) -> io::Result<Option<Partitions>> {
    if !has(file, MBR_MARK.0, &MBR_MARK.1)? {
        return Ok(None);
    }
    let entry = |index: u64| -> io::Result<(u8, Range<u64>)> {
        let at = MBR_ENTRIES + index * MBR_ENTRY;
        let start = number::<4>(file, at + 8)? * SECTOR;
        let bytes = number::<4>(file, at + 12)? * SECTOR;
        Ok((number::<1>(file, at + 4)? as u8, start..start + bytes))
    };
    let (kind, first) = entry(0)?;
    if kind == MBR_OF_GPT && has(file, SECTOR, GPT_MARK)? {
        let (entries, size) = (
            number::<8>(file, SECTOR + 72)?.saturating_mul(SECTOR),
            number::<4>(file, SECTOR + 84)?,
        );
        if !GPT_ENTRY.contains(&size) {
            return Ok(None);
        }
        // An entry whose type is all zeros is unused.
        let entry = |at: u64| -> io::Result<Option<Range<u64>>> {
            let part = |offset| number::<8>(file, at.saturating_add(offset));
            let (first, last) = (part(32)?, part(40)?);
            let bytes = |sectors: u64| sectors.saturating_mul(SECTOR);
            let range = bytes(first)..bytes(last.max(first).saturating_add(1));
            Ok((part(0)? != 0 || part(8)? != 0).then_some(range))
        };
        let second = entry(entries.saturating_add(size))?;
        return Ok(entry(entries)?.map(|first| (Table::Gpt, first, second)));
    }
    if kind == 0 || first.start == 0 || first.is_empty() {
        return Ok(None);
    }
    let (kind, second) = entry(1)?;
    Ok(Some((Table::Mbr, first, (kind != 0).then_some(second))))
}

/// Disks for tests, made of the numbers that count.
#[cfg(test)]
pub mod stand_in {
    use super::*;

    /// A file system that contains `what`.
    pub fn file_system_with(kind: FileSystem, what: &str) -> Vec<u8> {
        let mut bytes = file_system(kind);
        bytes[5000..5000 + what.len()].copy_from_slice(what.as_bytes());
        bytes
    }

    pub fn file_system(kind: FileSystem) -> Vec<u8> {
        let mut bytes = vec![0; 8192];
        let (at, magic): (u64, &[u8]) = match kind {
            FileSystem::Erofs => (EROFS.0, &EROFS.1),
            FileSystem::Ext4 => (EXT.0, &EXT.1),
        };
        bytes[at as usize..at as usize + magic.len()].copy_from_slice(magic);
        bytes
    }

    /// The first partition begins at byte 4096, and a second one, of one block, behind it.
    pub fn disk(table: Table, root: &[u8], has_second: bool) -> Vec<u8> {
        if table == Table::None {
            return root.to_vec();
        }
        let mut bytes = vec![0; 4096];
        bytes.extend(root);
        let (first, sectors) = (8, root.len() as u64 / SECTOR);
        let mut put =
            |at: usize, number: &[u8]| bytes[at..at + number.len()].copy_from_slice(number);
        put(510, &[0x55, 0xaa]);
        if table == Table::Gpt {
            put(450, &[MBR_OF_GPT]);
            put(512, GPT_MARK);
            put(512 + 72, &2_u64.to_le_bytes());
            put(512 + 84, &128_u32.to_le_bytes());
            put(1024, &[1]);
            put(1024 + 32, &u64::to_le_bytes(first));
            put(1024 + 40, &(first + sectors - 1).to_le_bytes());
            put(1024 + 128, &[u8::from(has_second)]);
            put(1024 + 128 + 32, &u64::to_le_bytes(first + sectors));
            put(1024 + 128 + 40, &u64::to_le_bytes(first + sectors + 7));
        } else {
            put(450, &[0x83]);
            put(454, &(first as u32).to_le_bytes());
            put(458, &(sectors as u32).to_le_bytes());
            put(466, &[if has_second { 0x83 } else { 0 }]);
            put(470, &(first as u32 + sectors as u32).to_le_bytes());
            put(474, &8_u32.to_le_bytes());
        }
        if has_second {
            bytes.extend([0; 4096]);
        }
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use super::{stand_in::disk, stand_in::file_system};

    fn of(bytes: &[u8]) -> Result<Disk, String> {
        look(bytes, bytes.len() as u64).unwrap()
    }

    #[test]
    fn the_root_is_found_in_either_table_and_without_one() {
        for table in [Table::None, Table::Mbr, Table::Gpt] {
            for root in [FileSystem::Erofs, FileSystem::Ext4] {
                for has_second in [false, true]
                    .into_iter()
                    .filter(|second| table != Table::None || !second)
                {
                    let found = of(&disk(table, &file_system(root), has_second));
                    let root_at = if table == Table::None { 0 } else { 4096 };
                    assert_eq!(
                        found,
                        Ok(Disk {
                            table,
                            root,
                            root_at,
                            root_bytes: 8192,
                            second: has_second.then_some(12288..16384),
                        }),
                        "{table:?} {root:?}"
                    );
                }
            }
        }
    }

    #[test]
    fn an_image_without_such_a_root_is_named_by_its_content() {
        let root = file_system(FileSystem::Erofs);
        for (bytes, why) in [
            (b"070701".to_vec(), "it is an initrd, or compressed"),
            (vec![0x1f, 0x8b, 8, 0], "it is an initrd, or compressed"),
            (
                b"QFI\xfb".to_vec(),
                "it is a qcow2 disk, and no disk with erofs or ext4",
            ),
            (vec![0; 9000], "nothing that is known"),
            (Vec::new(), "nothing that is known"),
            (
                disk(Table::Mbr, &[0; 4096], false),
                "its first partition is neither erofs nor ext4",
            ),
            (
                disk(Table::Gpt, &[0; 4096], false),
                "its first partition is neither erofs nor ext4",
            ),
            (disk(Table::Mbr, &root, false)[..8192].to_vec(), "it is cut"),
            (disk(Table::Gpt, &root, false)[..8192].to_vec(), "it is cut"),
        ] {
            let found = of(&bytes).unwrap_err();
            assert!(found.contains(why), "{why}: {found}");
        }
        // Numbers that overflow are refused.
        for at in [1024 + 32, 512 + 72] {
            let mut bytes = disk(Table::Gpt, &root, false);
            bytes[at..at + 8].fill(0xff);
            assert!(of(&bytes).is_err(), "{at}");
        }
    }

    #[test]
    fn bytes_are_found_wherever_they_are_read_in_two() {
        let what = b"/run/something";
        for at in [
            0,
            1,
            SEARCHED - 1,
            SEARCHED,
            SEARCHED + 7,
            SEARCHED + what.len(),
            2 * SEARCHED,
        ] {
            let mut bytes = vec![b'/'; 2 * SEARCHED + 100];
            assert!(!contains(bytes.as_slice(), what).unwrap());
            bytes[at..at + what.len()].copy_from_slice(what);
            assert!(contains(bytes.as_slice(), what).unwrap(), "{at}");
        }
        let ends = [vec![0; 5000], what[..what.len() - 1].to_vec()].concat();
        assert!(!contains(ends.as_slice(), what).unwrap());
        assert!(!contains(&b""[..], what).unwrap());
    }

    #[test]
    fn a_disk_is_known_to_those_who_wanted_an_initrd() {
        let root = file_system(FileSystem::Ext4);
        assert_eq!(
            known(disk(Table::Mbr, &root, false).as_slice()).unwrap(),
            Some(Known {
                name: "a disk with partitions",
                is_disk: true
            })
        );
        assert_eq!(
            known(root.as_slice()).unwrap(),
            Some(Known {
                name: "an ext4 file system",
                is_disk: true
            })
        );
        assert_eq!(known(b"070701".as_slice()).unwrap(), None);
    }
}
