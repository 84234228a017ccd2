//! Facts about files that are too large to be read as texts: QEMU's version, a guest's compression.

use super::bounded::HostRoot;
use crate::rules::host_facts::MajorMinor;
use memchr::memmem::Finder;
use std::io::Read;
use std::path::Path;

/// Limit of a program that is searched: a static QEMU has 40 MB.
const MAX_PROGRAM: u64 = 256 << 20;
/// Bytes read at once, and kept for names across the border.
const CHUNK: usize = 1 << 20;
const OVERLAP: usize = 64;
/// Beginnings of names of versioned machine types: each QEMU has one for itself.
const MACHINES: [&str; 2] = ["pc-q35-", "virt-"];

/// Version of a QEMU by the newest machine type whose name is in the program. The program is not
/// started: nobody vouches for it.
pub fn qemu_version(root: &HostRoot, path: &Path) -> Option<MajorMinor> {
    let mut file = root.regular(path).ok()?.take(MAX_PROGRAM);
    let finders = MACHINES.map(Finder::new);
    let mut text: Vec<u8> = Vec::new();
    let mut newest = None;
    loop {
        let kept = text.len().saturating_sub(OVERLAP);
        text.drain(..kept);
        let before = text.len();
        file.by_ref()
            .take(CHUNK as u64)
            .read_to_end(&mut text)
            .ok()?;
        for (finder, machine) in finders.iter().zip(MACHINES) {
            for at in finder.find_iter(&text) {
                let name = text.get(at + machine.len()..).unwrap_or_default();
                let name =
                    String::from_utf8_lossy(name.get(..name.len().min(8)).unwrap_or_default())
                        .into_owned();
                newest = newest.max(MajorMinor::parse(&name).filter(|version| version.0 < 100));
            }
        }
        if text.len() == before {
            return newest;
        }
    }
}

/// Compression by the first bytes of an archive; None: not compressed.
pub fn compression(root: &HostRoot, path: &Path) -> std::io::Result<Option<&'static str>> {
    const MAGICS: &[(&[u8], &str)] = &[
        (b"\x1f\x8b", "gzip"),
        (b"\x28\xb5\x2f\xfd", "zstd"),
        (b"\xfd7zXZ\0", "xz"),
        (b"\x02\x21\x4c\x18", "lz4"),
        (b"BZh", "bzip2"),
        (b"\x5d\0\0", "lzma"),
    ];
    let mut start = Vec::new();
    root.regular(path)?.take(8).read_to_end(&mut start)?;
    Ok(MAGICS
        .iter()
        .find(|(magic, _)| start.starts_with(magic))
        .map(|(_, name)| *name))
}
