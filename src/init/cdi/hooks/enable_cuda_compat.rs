//! `enable-cuda-compat`: decides whether the image's own, newer CUDA user space is used with the
//! loaded driver, and writes the file in `/etc/ld.so.conf.d` that puts it first.
//!
//! A note in the library lists the drivers it works with; without a note, the newer major version
//! counts. The rules are the incumbent's.

use super::arguments::Arguments;
use super::container_root::ContainerRoot;
use super::edits::Edit;
use super::update_ldcache::{Plan, include_all};
use crate::formats::{bytes_at, elf};
use nix::dir::Type;
use serde_json::Value;
use std::fs::File;
use std::io;
use std::path::Path;

/// Usual folder of the compatibility libraries in CUDA's images.
const COMPAT: &str = "/usr/local/cuda/compat";
/// The incumbent's prefix: sorts before the driver's folders and all folders of the image.
pub const COMPAT_CONF: &str = "/etc/ld.so.conf.d/00-compat-kata-gpu-init.conf";
const LIBRARY: &str = "libcuda.so.";
const NOTE_SECTION: &[u8] = b".note.cuda.fwd_compatibility";
const NOTE_OWNER: &[u8] = b"NVIDIA Corporation";
/// Limit of a note's description: the known ones have 106 bytes.
const MAX_DESCRIPTION: usize = 64 * 1024;

/// Note of a compatibility library about itself.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Note {
    pub cuda_version: Option<Version>,
    /// Major versions of the drivers that the library works with.
    pub drivers: Vec<u64>,
}

/// Version of one to three numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version([u64; 3]);

impl Version {
    /// Parses `550.163.01`; None for anything but one to three numbers with dots.
    pub fn parse(text: &str) -> Option<Self> {
        let mut numbers = [0; 3];
        let mut places = numbers.iter_mut();
        for part in text.split('.') {
            *places.next()? = Some(part)
                .filter(|p| p.bytes().all(|b| b.is_ascii_digit()))?
                .parse()
                .ok()?;
        }
        Some(Self(numbers))
    }

    fn major(self) -> u64 {
        self.0[0]
    }
}

/// Plans the file that puts the libraries first, or the removal of an earlier one.
pub fn plan(root: &ContainerRoot, host: &Arguments, plan: &mut Plan) {
    if host.host_driver_version.is_empty() && host.host_cuda_version.is_empty() {
        return;
    }
    let folder = host.cuda_compat_container_root.as_deref();
    let folder = folder.unwrap_or(COMPAT);
    // If the folder cannot be read, the image has the driver's own libraries at least.
    let wanted = is_wanted(root, folder, host, &mut plan.notes).unwrap_or_else(|e| {
        plan.notes.push(format!("leave {folder} alone: {e}"));
        false
    });
    let edit = match wanted {
        true => Edit::File {
            path: COMPAT_CONF.into(),
            content: format!("{folder}\n").into_bytes(),
            mode: 0o644,
        },
        // Left by an earlier start with another driver.
        false => Edit::Absent {
            path: COMPAT_CONF.into(),
        },
    };
    plan.edits.push(edit);
    include_all(root, plan);
}

fn is_wanted(
    root: &ContainerRoot,
    folder: &str,
    host: &Arguments,
    notes: &mut Vec<String>,
) -> io::Result<bool> {
    let Some(directory) = root.directory(Path::new(folder))? else {
        return Ok(false);
    };
    let names = directory
        .names()
        .map_err(|e| io::Error::other(format!("list {folder}: {e}")))?;
    let version = |name: &str| {
        name.strip_prefix(LIBRARY)
            .filter(|v| v.contains('.'))
            .map(str::to_string)
    };
    let mut found = names
        .iter()
        .filter(|n| matches!(n.kind, None | Some(Type::File)))
        .filter_map(|n| Some((&n.name, version(&n.name)?)));
    let (name, version) = match (found.next(), found.next()) {
        (Some(only), None) => only,
        (None, _) => return Ok(false),
        (Some((a, _)), Some((b, _))) => {
            notes.push(format!("leave {folder} alone: it has both {a} and {b}"));
            return Ok(false);
        }
    };
    let Some((file, _)) = root
        .file_in(&directory, name, None)
        .map_err(|e| io::Error::other(format!("read {folder}/{name}: {e}")))?
    else {
        return Ok(false);
    };
    let note = note_of(&file).unwrap_or_else(|e| {
        notes.push(format!(
            "{folder}/{name} names no compatible drivers, so its version counts: {e}"
        ));
        None
    });
    Ok(decide(
        note.as_ref(),
        &version,
        &host.host_driver_version,
        &host.host_cuda_version,
    ))
}

/// Whether the compatibility libraries are used. `compat`: the version in their file names.
pub fn decide(note: Option<&Note>, compat: &str, driver_version: &str, cuda_version: &str) -> bool {
    let versions = Version::parse(compat).zip(Version::parse(driver_version));
    match (note, versions) {
        (Some(note), Some((compat, driver))) => {
            note.drivers.contains(&driver.major()) && compat > driver
        }
        (Some(note), None) => note
            .cuda_version
            .zip(Version::parse(cuda_version))
            .is_some_and(|(theirs, ours)| theirs > ours),
        // If only the CUDA version is known, the note is needed.
        (None, Some((compat, driver))) => {
            cuda_version.is_empty() && compat.major() > driver.major()
        }
        (None, None) => false,
    }
}

/// Reads the note of a library. None if there is none.
fn note_of(file: &File) -> io::Result<Option<Note>> {
    match elf::section(file, NOTE_SECTION)? {
        Some(section) => parse_note(&section).map_err(io::Error::other),
        None => Ok(None),
    }
}

/// Parses the section: an ELF note whose description is JSON.
pub fn parse_note(section: &[u8]) -> Result<Option<Note>, String> {
    let size = |at| Some(u32::from_le_bytes(bytes_at(section, at)?) as usize);
    let (Some(name_size), Some(size)) = (size(0), size(4)) else {
        return Err("its note ends in its header".into());
    };
    if name_size == 0 || size == 0 {
        return Ok(None);
    }
    if name_size > NOTE_OWNER.len() + 1 || size > MAX_DESCRIPTION {
        return Err(format!(
            "its note has a name of {name_size} and a description of {size} bytes"
        ));
    }
    let name = section
        .get(12..)
        .and_then(|rest| rest.get(..name_size))
        .unwrap_or_default();
    if name.strip_suffix(b"\0").unwrap_or(name) != NOTE_OWNER {
        return Ok(None);
    }
    let description = section
        .get(12 + name_size.next_multiple_of(4)..)
        .and_then(|rest| rest.get(..size))
        .ok_or("its note is cut off")?;
    let text = description.split(|b| *b == 0).next().unwrap_or_default();
    let value: Value =
        serde_json::from_slice(text).map_err(|e| format!("its note is no JSON: {e}"))?;
    let object = value.as_object().ok_or("its note is no JSON object")?;
    // Notes have either "CUDA version" or "CUDA Version".
    let field = |name: &str| {
        object
            .iter()
            .find(|(key, _)| key.eq_ignore_ascii_case(name))
            .map(|(_, value)| value)
    };
    let drivers = field("driver")
        .and_then(Value::as_array)
        .map(|all| all.iter().filter_map(Value::as_u64).collect());
    let cuda_version = field("CUDA version")
        .and_then(Value::as_str)
        .and_then(Version::parse);
    Ok(Some(Note {
        cuda_version,
        drivers: drivers.unwrap_or_default(),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn section(owner: &[u8], description: &str) -> Vec<u8> {
        let head = [owner.len() as u32 + 1, description.len() as u32 + 1, 0]
            .map(u32::to_le_bytes)
            .concat();
        let mut section = [&head, owner, b"\0"].concat();
        section.resize(section.len().next_multiple_of(4), 0);
        [section, description.as_bytes().to_vec(), vec![0]].concat()
    }

    const TEXT: &str =
        r#"{"format":1,"CUDA version":"12.9","driver":[535,550,560,565,570,575],"device":[1,2,7]}"#;

    #[test]
    fn the_note_names_drivers_and_cuda_version() {
        let note = parse_note(&section(NOTE_OWNER, TEXT)).unwrap().unwrap();
        assert_eq!(
            note,
            Note {
                cuda_version: Version::parse("12.9"),
                drivers: vec![535, 550, 560, 565, 570, 575]
            }
        );
        let orin = parse_note(&section(
            NOTE_OWNER,
            r#"{"format":1,"CUDA Version":"13.2"}"#,
        ))
        .unwrap()
        .unwrap();
        assert_eq!(
            orin,
            Note {
                cuda_version: Version::parse("13.2"),
                drivers: vec![]
            }
        );
        assert_eq!(parse_note(&section(b"GNU", TEXT)), Ok(None));
        assert!(parse_note(&section(NOTE_OWNER, r#"{"format":1,}"#)).is_err());
        assert!(parse_note(&[0xff; 64]).unwrap_err().contains("4294967295"));
        assert!(
            parse_note(&section(NOTE_OWNER, TEXT)[..60])
                .unwrap_err()
                .contains("cut off")
        );
        assert!(parse_note(b"").is_err());
    }

    #[test]
    fn versions_are_numbers_with_dots() {
        assert!(Version::parse("550.163.01") > Version::parse("550.54.15"));
        assert!(
            Version::parse("575.57.08") == Version::parse("575.57.8")
                && Version::parse("13") == Version::parse("13.0")
        );
        for text in [
            "",
            "1.2.3.4",
            "1..2",
            "v1",
            "1.2-rc1",
            "+1",
            "99999999999999999999",
        ] {
            assert_eq!(Version::parse(text), None, "{text}");
        }
    }

    #[test]
    fn the_decision_is_the_incumbents() {
        let note = parse_note(&section(NOTE_OWNER, TEXT)).unwrap();
        let with = |compat, driver, cuda| decide(note.as_ref(), compat, driver, cuda);
        // By the note: the driver's branch must be listed, and the library newer.
        assert!(with("575.57.08", "570.211.01", ""));
        assert!(with("575.57.08", "575.10.10", ""));
        assert!(!with("575.57.08", "575.57.08", ""));
        assert!(!with("575.57.08", "575.99.99", ""));
        assert!(!with("575.57.08", "590.44.01", ""));
        assert!(
            !with("575.57.08", "555.42.02", ""),
            "a branch that the note does not list"
        );
        // By the CUDA version, if the driver's version is unknown.
        assert!(with("575.57.08", "", "12.8"));
        assert!(!with("575.57.08", "", "12.9"));
        assert!(!with("575.57.08", "", "12.10"));
        // By the major version, without a note.
        let without = |compat, driver, cuda| decide(None, compat, driver, cuda);
        assert!(without("333.88.99", "222.55.66", ""));
        assert!(without("222.88.99", "99.55.66", ""));
        assert!(!without("222.88.99", "222.55.66", ""));
        assert!(!without("111.88.99", "222.55.66", ""));
        assert!(!without("333.88.99", "222.55.66", "12.8"));
        assert!(!without("x.y", "222.55.66", ""));
        assert!(!without("333.88.99", "", ""));
    }
}
