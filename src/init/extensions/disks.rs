//! Disks of extensions: found by serial, matched one to one with the declarations.
//!
//! The image has two partitions: 1 is the data, 2 the hash tree without a superblock.

use super::parameters::{Extension, Name, PREFIX, SECTOR};
use crate::machine::files::entries;
use crate::machine::uevents::Any;
use std::fmt;
use std::fs;
use std::io;
use std::path::Path;
use std::time::{Duration, Instant};

/// A partition of an extension's disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Partition {
    pub major: u32,
    pub minor: u32,
    pub bytes: u64,
}

/// A disk whose serial names an extension.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Disk {
    pub name: Name,
    /// Name in /sys/block.
    pub device: String,
    pub data: Option<Partition>,
    pub hash: Option<Partition>,
}

/// A declaration with its disk.
#[derive(Debug)]
pub struct Matched<'a> {
    pub extension: &'a Extension,
    /// Name in /sys/block.
    pub device: String,
    pub data: Partition,
    pub hash: Partition,
}

/// Reason why disks and declarations do not match, in a sentence. The guest must not go on.
#[derive(Debug, PartialEq, Eq)]
pub enum Error {
    /// Disks cannot be looked for.
    Unreadable(String),
    /// A disk or a partition has not come yet.
    Missing(String),
    Refused(String),
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (Self::Unreadable(text) | Self::Missing(text) | Self::Refused(text)) = self;
        f.write_str(text)
    }
}

fn unreadable(what: impl fmt::Display) -> impl FnOnce(io::Error) -> Error {
    move |e| Error::Unreadable(format!("extensions: {what}: {e}"))
}

/// Reads the disks whose serial begins as an extension's, by device name.
pub fn find(sys: &Path) -> Result<Vec<Disk>, Error> {
    let block = sys.join("block");
    let failed = |e| unreadable(format_args!("read {}", block.display()))(e);
    let mut disks = Vec::new();
    for entry in fs::read_dir(&block).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        // A disk without a readable serial is no extension's: a declared extension is then missing.
        let Ok(serial) = fs::read(path.join("serial")) else {
            continue;
        };
        let serial = String::from_utf8_lossy(&serial);
        let Some(name) = serial.trim_end_matches(['\n', '\0']).strip_prefix(PREFIX) else {
            continue;
        };
        let device = path
            .file_name()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned();
        let name = Name::parse(name).map_err(|problem| {
            Error::Refused(format!("extensions: serial of disk {device}: {problem}"))
        })?;
        let (data, hash) = partitions(&path);
        disks.push(Disk {
            name,
            device,
            data,
            hash,
        });
    }
    disks.sort_by(|a, b| a.device.cmp(&b.device));
    Ok(disks)
}

/// Partitions 1 and 2. An incomplete one counts as not there: it may be about to come.
fn partitions(disk: &Path) -> (Option<Partition>, Option<Partition>) {
    let (mut data, mut hash) = (None, None);
    for path in entries(disk).map(|entry| entry.path()) {
        let text = |file: &str| {
            fs::read_to_string(path.join(file))
                .ok()
                .map(|text| text.trim().to_string())
        };
        let Some(number) = text("partition") else {
            continue;
        };
        let partition = || {
            let numbers = text("dev")?;
            let (major, minor) = numbers.split_once(':')?;
            let bytes = text("size")?.parse::<u64>().ok()?.checked_mul(SECTOR)?;
            Some(Partition {
                major: major.parse().ok()?,
                minor: minor.parse().ok()?,
                bytes,
            })
        };
        match number.as_str() {
            "1" => data = partition(),
            "2" => hash = partition(),
            _ => {}
        }
    }
    (data, hash)
}

/// Matches declarations with disks, one to one, in the order of the declarations. `waited` is how
/// long a missing disk was waited for.
pub fn reconcile<'a>(
    declared: &'a [Extension],
    found: &[Disk],
    waited: Duration,
) -> Result<Vec<Matched<'a>>, Error> {
    for (at, disk) in found.iter().enumerate() {
        let Disk { name, device, .. } = disk;
        if !declared.iter().any(|extension| extension.name == *name) {
            return Err(Error::Refused(format!(
                "extension {name}: disk {device} has the serial {}, and the kernel's command line \
                 has no verity parameters for it: nothing unverified is mounted; declare the \
                 extension or remove the disk",
                name.serial()
            )));
        }
        if let Some(first) = found.iter().take(at).find(|other| other.name == *name) {
            return Err(Error::Refused(format!(
                "extension {name}: disks {} and {device} have the same serial {}: remove one of \
                 them",
                first.device,
                name.serial()
            )));
        }
    }
    let of = |extension: &'a Extension| {
        let name = &extension.name;
        let disk = found.iter().find(|disk| disk.name == *name);
        let disk = disk.ok_or_else(|| {
            Error::Missing(format!(
                "extension {name}: no disk with the serial {} within {waited:?}: give the VM its \
                 image as a virtio-blk disk (guest_extension_images in Kata's configuration), or \
                 remove the extension's parameters",
                name.serial()
            ))
        })?;
        let device = disk.device.clone();
        match (disk.data, disk.hash) {
            (Some(data), Some(hash)) => Ok(Matched {
                extension,
                device,
                data,
                hash,
            }),
            (data, _) => {
                let number = if data.is_none() { 1 } else { 2 };
                Err(Error::Missing(format!(
                    "extension {name}: disk {device} has no partition {number} within {waited:?}: \
                     the image needs its data in partition 1 and its hash tree in partition 2: \
                     build it with a measured root"
                )))
            }
        }
    };
    declared.iter().map(of).collect()
}

/// Matches declarations with disks; waits for what is missing until the deadline. Blocks, wakes on
/// uevents.
pub fn wait<'a>(
    sys: &Path,
    declared: &'a [Extension],
    deadline: Duration,
) -> Result<Vec<Matched<'a>>, Error> {
    let look = |waited| find(sys).and_then(|found| reconcile(declared, &found, waited));
    match look(Duration::ZERO) {
        Err(Error::Missing(_)) => {}
        result => return result,
    }
    // Subscribed before the next look: a disk that comes in between is seen.
    let uevents = Any::subscribe().map_err(unreadable("subscribe to uevents"))?;
    let began = Instant::now();
    loop {
        let waited = began.elapsed();
        match look(deadline) {
            Err(Error::Missing(_)) if waited < deadline => {}
            result => return result,
        }
        // Any uevent, or their loss, is a reason to look; an error of poll ends in the deadline.
        uevents
            .wait(deadline - waited)
            .map_err(unreadable("wait for uevents"))?;
    }
}

/// Names an extension's disk that no parameter declares, where none is declared.
pub fn surplus(sys: &Path) -> Option<Error> {
    find(sys)
        .and_then(|found| reconcile(&[], &found, Duration::ZERO))
        .err()
        .filter(|error| !matches!(error, Error::Unreadable(_)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::extensions::Verity;
    use kata_gpu_test_support::{TempDir, temp_dir};

    struct Sys(TempDir);

    impl Sys {
        fn new(disks: &[(&str, &str, u32)]) -> Self {
            let sys = Self(temp_dir());
            fs::create_dir_all(sys.0.path().join("block")).unwrap();
            for (device, serial, partitions) in disks {
                sys.add(device, serial, *partitions);
            }
            sys
        }

        fn add(&self, device: &str, serial: &str, partitions: u32) {
            let disk = self.0.path().join("block").join(device);
            for number in 1..=partitions {
                let partition = disk.join(format!("{device}{number}"));
                fs::create_dir_all(&partition).unwrap();
                fs::write(partition.join("partition"), format!("{number}\n")).unwrap();
                fs::write(partition.join("dev"), format!("254:{number}\n")).unwrap();
                fs::write(partition.join("size"), format!("{}\n", 16 * number)).unwrap();
            }
            fs::create_dir_all(&disk).unwrap();
            fs::write(disk.join("serial"), serial).unwrap();
        }
    }

    fn declared(names: &[&str]) -> Vec<Extension> {
        let verity = Verity {
            root_hash: "0".repeat(64),
            salt: String::new(),
            data_blocks: 1,
            data_block_size: 4096,
            hash_block_size: 4096,
        };
        names
            .iter()
            .map(|name| Extension {
                name: Name::parse(name).unwrap(),
                verity: verity.clone(),
            })
            .collect()
    }

    fn matched(sys: &Sys, names: &[&str]) -> Result<Vec<String>, String> {
        let declared = declared(names);
        let result = wait(sys.0.path(), &declared, Duration::ZERO).map_err(|e| e.to_string())?;
        Ok(result
            .iter()
            .map(|matched| format!("{} {}", matched.extension.name, matched.device))
            .collect())
    }

    #[test]
    fn disks_are_matched_by_serial_whatever_their_order() {
        // Serials as the kernel shows them: 20 bytes, without a newline if all of them are used.
        let sys = Sys::new(&[
            ("vda", "root", 1),
            ("vdb", "extension-coco\n", 2),
            ("vdc", "extension-gpu", 2),
            ("sda", "", 0),
        ]);
        fs::create_dir_all(sys.0.path().join("block/ram0")).unwrap();
        assert_eq!(
            matched(&sys, &["gpu", "coco"]),
            Ok(vec!["gpu vdc".into(), "coco vdb".into()])
        );
        let disk = find(sys.0.path()).unwrap().remove(0);
        assert_eq!(
            disk.data,
            Some(Partition {
                major: 254,
                minor: 1,
                bytes: 16 * 512
            })
        );
        assert_eq!(
            disk.hash,
            Some(Partition {
                major: 254,
                minor: 2,
                bytes: 32 * 512
            })
        );
        assert_eq!(surplus(Sys::new(&[("vda", "root", 1)]).0.path()), None);
    }

    #[test]
    fn every_mismatch_is_refused_with_its_disk_and_a_cure() {
        // Name, disks, declared names, error.
        type Case = (
            &'static str,
            &'static [(&'static str, &'static str, u32)],
            &'static [&'static str],
            &'static str,
        );
        let cases: &[Case] = &[
            (
                "missing",
                &[("vda", "root", 1)],
                &["gpu"],
                "extension gpu: no disk with the serial extension-gpu within 0ns: give the VM",
            ),
            (
                "surplus",
                &[("vda", "extension-gpu", 2), ("vdb", "extension-x", 2)],
                &["gpu"],
                "extension x: disk vdb has the serial extension-x, and the kernel's command line \
                    has no verity parameters",
            ),
            (
                "twice",
                &[("vda", "extension-gpu", 2), ("vdb", "extension-gpu", 2)],
                &["gpu"],
                "extension gpu: disks vda and vdb have the same serial",
            ),
            (
                "name",
                &[("vda", "extension-../x", 2)],
                &["gpu"],
                "extensions: serial of disk vda: \"../x\" is no name",
            ),
            (
                "empty",
                &[("vda", "extension-", 2)],
                &["gpu"],
                "extensions: serial of disk vda: \"\" is no name",
            ),
            (
                "whole",
                &[("vda", "extension-gpu", 0)],
                &["gpu"],
                "extension gpu: disk vda has no partition 1 within 0ns",
            ),
            (
                "no-hash",
                &[("vda", "extension-gpu", 1)],
                &["gpu"],
                "extension gpu: disk vda has no partition 2 within 0ns",
            ),
        ];
        for (test, disks, names, wanted) in cases {
            let error = matched(&Sys::new(disks), names).unwrap_err();
            assert!(error.starts_with(wanted), "{test}: {error}");
        }
        let stripped = Sys::new(&[("vda", "extension-coco", 2)]);
        assert!(
            surplus(stripped.0.path()).is_some_and(|error| error.to_string().contains("disk vda"))
        );
    }

    #[test]
    fn a_surplus_disk_is_not_waited_on() {
        let sys = Sys::new(&[("vda", "extension-x", 2)]);
        let declared = declared(&["gpu"]);
        // A wait of this length would end the test run.
        let error = wait(sys.0.path(), &declared, Duration::from_secs(100_000)).unwrap_err();
        assert!(matches!(error, Error::Refused(_)), "{error}");
    }
}
