//! dm-verity by ioctl: a device named `extension-<name>` whose every block is checked when read.
//!
//! The table line is `veritysetup open --no-superblock`'s: format 1, sha256, data in partition 1,
//! the tree from the first block of partition 2 on. Activation reads nothing: a wrong root hash
//! shows at the first read, which is the mount's.

use super::disks::{Matched, Partition};
use super::parameters::{Extension, Name, SECTOR, Verity};
use crate::formats::bytes_at;
use crate::machine::sys;
use crate::machine::sys::DeviceMapper;
use nix::errno::Errno;
use nix::fcntl::{OFlag, open as open_file};
use nix::sys::stat::Mode;
use std::path::PathBuf;

const CONTROL: &str = "/dev/mapper/control";
/// `struct dm_ioctl` of the kernel's public dm-ioctl.h, 64-bit; then offsets of its fields.
const HEADER: usize = 312;
const DATA_START: usize = 16;
const TARGETS: usize = 20;
const FLAGS: usize = 28;
const DEVICE: usize = 40;
const NAME: usize = 48;
/// With the terminating zero.
const MAX_NAME: usize = 128;
const UUID: usize = 176;
/// Type of the device for `veritysetup status` and `close`, before its name.
const UUID_PREFIX: &str = "CRYPT-VERITY-";
/// `struct dm_target_spec`; then the offset of its type.
const TARGET: usize = 40;
const TARGET_TYPE: usize = 24;
/// Interface version whose major number the kernel must have.
const VERSION: [u32; 3] = [4, 0, 0];
const READ_ONLY: u32 = 1;
const STATUS_TABLE: u32 = 1 << 4;
/// Room for the reply to a status: one target, one line.
const REPLY: usize = 4096;

/// The error of a step of opening a device.
fn refused(name: &Name, action: &str, table: &str, errno: Errno) -> String {
    let cure = match (action, errno) {
        ("open", Errno::ENOENT | Errno::ENODEV) => {
            "the kernel has no device mapper: build it with CONFIG_BLK_DEV_DM"
        }
        ("load the table of", Errno::EINVAL) => {
            "see the kernel's log; without a line there the kernel has no dm-verity: build it with \
             CONFIG_DM_VERITY"
        }
        ("create", Errno::EBUSY) => "a device of this name is in use",
        _ => "see the kernel's log",
    };
    format!(
        "extension {name}: device mapper: {action} {}{table}: {errno}: {cure}",
        name.serial()
    )
}

/// A table of one dm-verity target.
#[derive(Debug, PartialEq, Eq)]
pub struct Table {
    /// Length in sectors.
    pub sectors: u64,
    pub parameters: String,
}

/// The table for a data and a hash partition.
pub fn table(verity: &Verity, data: Partition, hash: Partition) -> Table {
    let Verity {
        root_hash,
        salt,
        data_blocks,
        data_block_size,
        hash_block_size,
    } = verity;
    let salt = if salt.is_empty() { "-" } else { salt };
    let (data, hash) = (
        format!("{}:{}", data.major, data.minor),
        format!("{}:{}", hash.major, hash.minor),
    );
    Table {
        sectors: verity.data_bytes() / SECTOR,
        parameters: format!(
            "1 {data} {hash} {data_block_size} {hash_block_size} {data_blocks} 0 sha256 \
                {root_hash} {salt}"
        ),
    }
}

/// Opens the device of an extension; returns its node. Reads nothing of the disk.
pub fn open(disk: &Matched) -> Result<PathBuf, String> {
    let Extension { name, verity } = disk.extension;
    let tree_bytes = verity.tree_bytes().unwrap_or(u64::MAX);
    for (number, Partition { bytes, .. }, wanted) in [
        (1, disk.data, verity.data_bytes()),
        (2, disk.hash, tree_bytes),
    ] {
        if bytes < wanted {
            return Err(format!(
                "extension {name}: partition {number} of disk {} has {bytes} bytes, the parameters \
                 need {wanted}: give parameters and disk from the same build of the image",
                disk.device
            ));
        }
    }
    let table = table(verity, disk.data, disk.hash);
    let refused = |action| move |errno| refused(name, action, "", errno);
    let control = control().map_err(refused("open"))?;
    let ask = |command, request: &mut Vec<u8>| sys::device_mapper(&control, command, request);
    let create = || {
        let mut new = request(name, 0, None);
        put(
            &mut new,
            UUID,
            format!("{UUID_PREFIX}{}", name.serial()).as_bytes(),
        );
        ask(DeviceMapper::Create, &mut new)
    };
    match create() {
        // Left by a worker that died in between; a mounted one cannot be removed.
        Err(Errno::EBUSY) => {
            ask(DeviceMapper::Remove, &mut request(name, 0, None)).and_then(|()| create())
        }
        result => result,
    }
    .map_err(refused("create"))?;
    let load = ask(
        DeviceMapper::LoadTable,
        &mut request(name, READ_ONLY, Some(&table)),
    );
    let load = load.map_err(|errno| {
        let table = format!(" ({})", table.parameters);
        self::refused(name, "load the table of", &table, errno)
    });
    let mut resume = request(name, 0, None);
    let resumed =
        load.and_then(|()| ask(DeviceMapper::Suspend, &mut resume).map_err(refused("resume")));
    if let Err(error) = resumed {
        // Nothing uses it; a device that stays is only a name.
        let _unused = ask(DeviceMapper::Remove, &mut request(name, 0, None));
        return Err(error);
    }
    let device = number(&resume);
    Ok(PathBuf::from(format!(
        "/dev/dm-{}",
        (device & 0xff) | ((device >> 12) & 0xf_ff00)
    )))
}

/// Whether no block of the device has failed its check so far.
pub fn is_intact(name: &Name) -> nix::Result<bool> {
    Ok(status(name, 0)?.trim_start().starts_with('V'))
}

/// The table that the kernel uses.
pub fn table_in_use(name: &Name) -> nix::Result<String> {
    status(name, STATUS_TABLE)
}

fn control() -> nix::Result<std::os::fd::OwnedFd> {
    open_file(CONTROL, OFlag::O_RDWR | OFlag::O_CLOEXEC, Mode::empty())
}

fn status(name: &Name, flags: u32) -> nix::Result<String> {
    let mut reply = request(name, flags, None);
    reply.resize(REPLY, 0);
    sys::device_mapper(&control()?, DeviceMapper::Status, &mut reply)?;
    let start = u32_at(&reply, DATA_START) as usize + TARGET;
    let line = reply
        .get(start..)
        .and_then(|rest| rest.split(|b| *b == 0).next())
        .unwrap_or_default();
    Ok(String::from_utf8_lossy(line).into_owned())
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    bytes_at(bytes, at).map_or(0, u32::from_ne_bytes)
}

/// Device number of a reply: `MMMmm` as the kernel's huge_encode_dev puts it.
fn number(reply: &[u8]) -> u64 {
    bytes_at(reply, DEVICE).map_or(0, u64::from_ne_bytes)
}

fn put(bytes: &mut [u8], at: usize, value: &[u8]) {
    if let Some(place) = bytes.get_mut(at..at + value.len()) {
        place.copy_from_slice(value);
    }
}

/// A request about an extension's device, with the table to load. The system call fills in the
/// size.
fn request(name: &Name, flags: u32, table: Option<&Table>) -> Vec<u8> {
    let mut bytes = vec![0; HEADER];
    VERSION
        .iter()
        .enumerate()
        .for_each(|(at, part)| put(&mut bytes, at * 4, &part.to_ne_bytes()));
    put(&mut bytes, DATA_START, &(HEADER as u32).to_ne_bytes());
    put(&mut bytes, FLAGS, &flags.to_ne_bytes());
    let device = name.serial();
    put(
        &mut bytes,
        NAME,
        &device.as_bytes()[..device.len().min(MAX_NAME - 1)],
    );
    if let Some(table) = table {
        put(&mut bytes, TARGETS, &1_u32.to_ne_bytes());
        let mut target = [0; TARGET];
        put(&mut target, 8, &table.sectors.to_ne_bytes());
        put(&mut target, TARGET_TYPE, b"verity");
        bytes.extend(target);
        bytes.extend(table.parameters.as_bytes());
        // The line ends with a zero; a target with the next multiple of eight.
        bytes.resize((bytes.len() + 1).next_multiple_of(8), 0);
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    fn verity() -> Verity {
        Verity {
            root_hash: "ab".repeat(32),
            salt: "0102".into(),
            data_blocks: 96512,
            data_block_size: 4096,
            hash_block_size: 1024,
        }
    }

    fn partition(minor: u32, bytes: u64) -> Partition {
        Partition {
            major: 254,
            minor,
            bytes,
        }
    }

    #[test]
    fn the_table_is_the_line_that_dm_verity_documents() {
        let (data, hash) = (partition(1, 1 << 30), partition(2, 1 << 30));
        let expected = format!(
            "1 254:1 254:2 4096 1024 96512 0 sha256 {} 0102",
            "ab".repeat(32)
        );
        assert_eq!(
            table(&verity(), data, hash),
            Table {
                sectors: 96512 * 8,
                parameters: expected
            }
        );
        let unsalted = Verity {
            salt: String::new(),
            ..verity()
        };
        assert!(table(&unsalted, data, hash).parameters.ends_with("abab -"));
    }

    #[test]
    fn a_request_has_the_kernels_layout() {
        let name = Name::parse("gpu").unwrap();
        let bytes = request(
            &name,
            READ_ONLY,
            Some(&Table {
                sectors: 8,
                parameters: "1 a b".into(),
            }),
        );
        assert_eq!(
            (
                u32_at(&bytes, 0),
                u32_at(&bytes, DATA_START),
                u32_at(&bytes, TARGETS),
                u32_at(&bytes, FLAGS)
            ),
            (4, 312, 1, 1)
        );
        assert_eq!(&bytes[NAME..NAME + 14], b"extension-gpu\0");
        assert_eq!(
            &bytes[HEADER..HEADER + 16],
            [0, 0, 0, 0, 0, 0, 0, 0, 8, 0, 0, 0, 0, 0, 0, 0]
        );
        assert_eq!(
            &bytes[HEADER + TARGET_TYPE..HEADER + TARGET],
            b"verity\0\0\0\0\0\0\0\0\0\0"
        );
        assert_eq!(
            (&bytes[HEADER + TARGET..], bytes.len()),
            (&b"1 a b\0\0\0"[..], HEADER + TARGET + 8)
        );
    }

    #[test]
    fn too_small_partitions_are_refused_before_the_kernel_is_asked() {
        let verity = verity();
        let (data, tree) = (verity.data_bytes(), verity.tree_bytes().unwrap());
        let name = Name::parse("gpu").unwrap();
        let extension = Extension { name, verity };
        for (data_bytes, tree_bytes, wanted) in [
            (
                data - 512,
                tree,
                "partition 1 of disk vdb has 395312640 bytes",
            ),
            (data, tree - 1, "partition 2 of disk vdb"),
        ] {
            let disk = Matched {
                extension: &extension,
                device: "vdb".into(),
                data: partition(1, data_bytes),
                hash: partition(2, tree_bytes),
            };
            let error = open(&disk).unwrap_err();
            assert!(
                error.contains(wanted) && error.contains("the same build"),
                "{error}"
            );
        }
    }
}
