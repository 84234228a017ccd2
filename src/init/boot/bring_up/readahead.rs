//! Readahead: from the scan on, the driver's module and the firmware of the guest's GPUs come from
//! the disk into the page cache. A slow host maps BARs before the module is loaded, and the driver
//! reads firmware in the first part of an initialisation, with its global lock held.
//!
//! Nothing waits for this or depends on it, and the driver reports a file that cannot be read.

use super::driver::Image;
use crate::driver_files::{FIRMWARE_DIRECTORY, FIRMWARE_PARAMETER};
use crate::gpu::pci::Gpu;
use crate::machine::{files, memory, sys, threads};
use crate::step;
use crate::stream::{After, StepId};
use kata_gpu_wire::names;
use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};
use std::fs::File;
use std::ops::RangeInclusive;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Firmware of releases since 535, with the PCI device ids of the GPUs that it is for: Turing and
/// GA100; all later ones (nv-firmware.h of NVIDIA's open modules). Older GPUs have none.
const FIRMWARE: [(&str, RangeInclusive<u16>); 2] = [
    ("gsp_tu10x.bin", 0x1e00..=0x21ff),
    ("gsp_ga10x.bin", 0x2200..=u16::MAX),
];
/// Part of the available memory that these files may take: a quarter.
const SHARE: u64 = 4;
/// Kinds of file system that lie in RAM: tmpfs, and ramfs (linux/magic.h).
const IN_RAM: [u32; 2] = [files::TMPFS, 0x8584_58f6];
/// Bytes of one request to the disk, from which the agent starts, too. The kernel takes no more
/// from one call than the disk's readahead window, often as much as this.
const WINDOW: u64 = 128 << 10;
/// Longest path of a directory that the kernel takes.
const MAX_PATH: u64 = 4096;

/// Starts to read what the driver needs for the GPUs of the scan, on a thread of its own.
pub fn start(image: &Image, gpus: &[Gpu], scanned: StepId) {
    let (module, version, firmware) = (image.file.clone(), image.version.clone(), firmware(gpus));
    if firmware.is_empty() {
        return;
    }
    threads::detach(move || {
        // Without it the thread takes its share of the CPUs.
        let _unused = sys::run_when_idle();
        // One more directory, which comes first; a kernel without the file has none.
        let added = files::read(Path::new(FIRMWARE_PARAMETER), MAX_PATH).unwrap_or_default();
        let added = String::from_utf8_lossy(&added);
        let open_firmware = |name: &&str| {
            let version = version.as_deref()?;
            let mut directories = [added.trim(), FIRMWARE_DIRECTORY].into_iter();
            directories.find_map(|directory| {
                open(Path::new(&format!("{directory}/nvidia/{version}/{name}")))
            })
        };
        let module = module.iter().filter_map(|path| open(path));
        let mut room = memory::available(Path::new("/")) / SHARE;
        let files: Vec<OnDisk> = module
            .chain(firmware.iter().filter_map(open_firmware))
            .filter(|file| {
                let fits = file.bytes <= room;
                room -= if fits { file.bytes } else { 0 };
                fits
            })
            .collect();
        if files.is_empty() {
            return;
        }
        let names: Vec<&str> = files.iter().map(|file| &*file.name).collect();
        let bytes: u64 = files.iter().map(|file| file.bytes).sum();
        let (after, names) = (After(vec![scanned]), names.join(" "));
        let _step = step!(names::READAHEAD, after = ?after, files = &*names, bytes);
        for file in &files {
            read_ahead(&file.file, file.bytes);
        }
    });
}

/// A file that a disk has.
struct OnDisk {
    file: File,
    name: String,
    bytes: u64,
}

/// Opens a file. None: it is not there, lies in RAM, as in an initrd, or that is not known.
fn open(path: &Path) -> Option<OnDisk> {
    let file = files::open(path).ok()?;
    let bytes = bytes_on_disk(&file)?;
    let name = path.file_name()?.to_string_lossy().into_owned();
    Some(OnDisk { file, name, bytes })
}

/// Reads a file into the page cache: the disk works at one window while this waits for the end of
/// the window before. Stops where a byte cannot be read.
fn read_ahead(file: &File, bytes: u64) {
    let ask = |at: u64| {
        let [at, window] = [at, WINDOW].map(|n| nix::libc::off_t::try_from(n).unwrap_or(0));
        // Without it the read is what asks.
        let _unused = posix_fadvise(file, at, window, PosixFadviseAdvice::POSIX_FADV_WILLNEED);
    };
    ask(0);
    let mut at = 0;
    while at < bytes {
        let next = at.saturating_add(WINDOW);
        if next < bytes {
            ask(next);
        }
        if file.read_at(&mut [0], next.min(bytes) - 1).is_err() {
            return;
        }
        at = next;
    }
}

/// Names of the firmware that the initialisations of these GPUs ask for.
fn firmware(gpus: &[Gpu]) -> Vec<&'static str> {
    FIRMWARE
        .iter()
        .filter(|(_, ids)| gpus.iter().any(|gpu| ids.contains(&gpu.device)))
        .map(|(name, _)| *name)
        .collect()
}

/// Size of a file that a disk has. None: it lies in RAM, as in an initrd, or that is not known.
fn bytes_on_disk(file: &File) -> Option<u64> {
    let kind = files::kind_of_file_system(file).ok()?;
    let size = file.metadata().ok()?.len();
    (!IN_RAM.contains(&kind)).then_some(size)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_firmware_is_that_of_the_guests_gpus() {
        let (turing, later) = ("gsp_tu10x.bin", "gsp_ga10x.bin");
        let rows: [(&str, &[u16], &[&str]); 6] = [
            ("no GPU", &[], &[]),
            ("V100", &[0x1db6], &[]),
            ("T4 and A100", &[0x1eb8, 0x20b2], &[turing]),
            ("A10", &[0x2236], &[later]),
            ("H100 and B300", &[0x2330, 0x3182], &[later]),
            (
                "H100, V100 and A100",
                &[0x2330, 0x1db6, 0x20b2],
                &[turing, later],
            ),
        ];
        let address = "0001:00:01.0".parse().unwrap();
        for (name, devices, wanted) in rows {
            let gpus: Vec<Gpu> = devices
                .iter()
                .map(|&device| Gpu { address, device })
                .collect();
            assert_eq!(firmware(&gpus), wanted, "{name}");
        }
    }

    #[test]
    fn a_file_in_ram_is_not_on_a_disk() {
        let bytes = |path: &str| bytes_on_disk(&File::open(path).unwrap());
        assert!(bytes("/proc/self/exe").is_some_and(|bytes| bytes > 0));
        // A system without this tmpfs proves nothing here.
        assert!(!Path::new("/dev/shm").is_dir() || bytes("/dev/shm").is_none());
    }
}
