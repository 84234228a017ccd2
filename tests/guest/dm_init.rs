//! `dm-mod.create=` of the kernel command line: the device that a Kata kernel makes by itself
//! before it mounts its root (CONFIG_DM_INIT, see the kernel's
//! admin-guide/device-mapper/dm-init.rst). The test kernel has the device mapper as a module, which
//! ignores that parameter.
//!
//! The requests are built here, and not by the init's code for its extension disks: a fault there
//! must not hide itself. One device with a table of one line, as Kata writes it.

use kata_gpu_init::machine::sys::{self, DeviceMapper};
use std::fs::OpenOptions;
use std::os::fd::OwnedFd;

const CONTROL: &str = "/dev/mapper/control";
/// `struct dm_ioctl` of the kernel's public dm-ioctl.h, 64-bit; then offsets of its fields.
const HEADER: usize = 312;
const DATA_START: usize = 16;
const TARGETS: usize = 20;
const FLAGS: usize = 28;
const NAME: usize = 48;
/// DM_NAME_LEN, with the terminating zero.
const MAX_NAME: usize = 128;
/// `struct dm_target_spec`, and its type, with the terminating zero.
const TARGET: usize = 40;
const MAX_TYPE: usize = 16;
const READ_ONLY: u32 = 1;
/// Major number of the interface's version.
const VERSION: u32 = 4;

/// A device, and the line of its table.
#[derive(Debug, PartialEq, Eq)]
struct Device<'a> {
    name: &'a str,
    sectors: u64,
    target: &'a str,
    parameters: &'a str,
}

impl<'a> Device<'a> {
    /// Takes `NAME,,,ro,0 SECTORS TARGET PARAMETERS..`: a minor number and a UUID are the kernel's
    /// choice.
    fn parse(text: &'a str) -> Option<Self> {
        let (name, line) = text.split_once(",,,ro,0 ")?;
        let mut words = line.splitn(3, ' ');
        let device = Self {
            name,
            sectors: words.next()?.parse().ok()?,
            target: words.next()?,
            parameters: words.next()?,
        };
        (name.len() < MAX_NAME && device.target.len() < MAX_TYPE).then_some(device)
    }

    fn request(&self, with_table: bool) -> Vec<u8> {
        let mut bytes = vec![0; HEADER];
        let mut put = |at: usize, value: &[u8]| bytes[at..at + value.len()].copy_from_slice(value);
        put(0, &VERSION.to_ne_bytes());
        put(DATA_START, &(HEADER as u32).to_ne_bytes());
        put(NAME, self.name.as_bytes());
        if with_table {
            put(FLAGS, &READ_ONLY.to_ne_bytes());
            put(TARGETS, &1_u32.to_ne_bytes());
            // First sector, length, a status and an offset that the kernel does not read.
            bytes.extend([0; 8]);
            bytes.extend(self.sectors.to_ne_bytes());
            bytes.extend([0; 8]);
            bytes.extend(self.target.as_bytes());
            bytes.resize(HEADER + TARGET, 0);
            bytes.extend(self.parameters.as_bytes());
            // The line ends with a zero; a target with the next multiple of eight.
            bytes.resize((bytes.len() + 1).next_multiple_of(8), 0);
        }
        bytes
    }
}

/// Makes the device of this value. The kernel's /dev has to be mounted.
pub fn create(value: &str) -> Result<(), String> {
    let device =
        Device::parse(value).ok_or("want one device: NAME,,,ro,0 SECTORS TARGET PARAMETERS")?;
    let control: OwnedFd = OpenOptions::new()
        .read(true)
        .write(true)
        .open(CONTROL)
        .map_err(|error| format!("open {CONTROL}: {error}"))?
        .into();
    for (command, with_table) in [
        (DeviceMapper::Create, false),
        (DeviceMapper::LoadTable, true),
        (DeviceMapper::Suspend, false),
    ] {
        sys::device_mapper(&control, command, &mut device.request(with_table))
            .map_err(|errno| format!("{command:?}: {errno}"))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_words_of_katas_runtimes_are_a_device_and_its_table() {
        let line = "1 /dev/vda1 /dev/vda2 4096 4096 92041 0 sha256 f2 06";
        let text = format!("dm-verity,,,ro,0 736328 verity {line}");
        let device = Device::parse(&text).unwrap();
        let wanted = Device {
            name: "dm-verity",
            sectors: 736_328,
            target: "verity",
            parameters: line,
        };
        assert_eq!(device, wanted);
        let bytes = device.request(true);
        assert_eq!(&bytes[HEADER + TARGET..][..line.len()], line.as_bytes());
        assert_eq!(bytes.len() % 8, 0);
        for other in [
            "dm-verity,,,rw,0 8 verity 1 a b",
            "dm-verity,,,ro,0 8 verity",
            "dm-verity,,,ro,0 x verity 1",
        ] {
            assert_eq!(Device::parse(other), None, "{other}");
        }
    }
}
