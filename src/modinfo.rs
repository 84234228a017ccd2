//! What a module's file says of itself: `key=value` strings of its `.modinfo` section, read without reading the whole file.
//!
//! Takes any bytes: what is not a 64-bit little-endian ELF file with such a section is an error that says so.

use crate::elf;
use std::fs::File;
use std::io;
use std::path::Path;

/// The value of one key (`version`, `vermagic`); None when the file has none.
///
/// Errors name the path and what is wrong with the file.
pub fn value(path: &Path, key: &str) -> io::Result<Option<String>> {
    let at = |what: &dyn std::fmt::Display| io::Error::other(format!("read modinfo of {}: {what}", path.display()));
    let file = File::open(path).map_err(|e| at(&e))?;
    let section = elf::section(&file, b".modinfo").map_err(|e| at(&e))?;
    let section = section.ok_or_else(|| at(&"it has no .modinfo section: not a kernel module"))?;
    Ok(find(&section, key))
}

/// The value of a key in the section's NUL-separated strings.
fn find(section: &[u8], key: &str) -> Option<String> {
    section.split(|b| *b == 0).find_map(|entry| {
        let text = std::str::from_utf8(entry).ok()?;
        text.strip_prefix(key)?.strip_prefix('=').map(str::to_string)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A file with a name table and a modinfo section.
    fn module(modinfo: &[u8]) -> Vec<u8> {
        let names = b"\0.shstrtab\0.modinfo\0";
        let (names_at, info_at) = (64_u64, 64 + names.len() as u64);
        let table_at = info_at + modinfo.len() as u64;
        let mut file = b"\x7fELF\x02\x01\x01".to_vec();
        file.resize(64, 0);
        file[0x28..0x30].copy_from_slice(&table_at.to_le_bytes());
        file[0x3a..0x40].copy_from_slice(&[64, 0, 3, 0, 1, 0]);
        file.extend_from_slice(names);
        file.extend_from_slice(modinfo);
        for (name, offset, size) in [(0_u32, 0, 0), (1, names_at, names.len() as u64), (11, info_at, modinfo.len() as u64)] {
            let mut header = [0_u8; 64];
            header[..4].copy_from_slice(&name.to_le_bytes());
            header[0x18..0x20].copy_from_slice(&offset.to_le_bytes());
            header[0x20..0x28].copy_from_slice(&size.to_le_bytes());
            file.extend_from_slice(&header);
        }
        file
    }

    fn of(name: &str, bytes: &[u8], key: &str) -> io::Result<Option<String>> {
        let path = std::env::temp_dir().join(format!("kata-gpu-init-modinfo-{name}-{}", std::process::id()));
        std::fs::write(&path, bytes).unwrap();
        let value = value(&path, key);
        std::fs::remove_file(path).unwrap();
        value
    }

    #[test]
    fn keys_are_found_whole() {
        let file = module(b"srcversion=ABC\0version=550.163.01\0vermagic=6.1 SMP\0");
        assert_eq!(of("whole", &file, "version").unwrap().as_deref(), Some("550.163.01"));
        assert_eq!(of("none", &file, "firmware").unwrap(), None);
    }

    #[test]
    fn what_is_no_module_is_refused_with_its_path() {
        let good = module(b"version=1\0");
        for length in 0..good.len() {
            assert!(of("cut", &good[..length], "version").is_err(), "{length} bytes of a module were read");
        }
        let error = of("text", &[b'x'; 100], "version").unwrap_err().to_string();
        assert!(error.contains("modinfo-text") && error.contains("not a little-endian ELF"), "{error}");
        let mut huge = good;
        let at = huge.len() - 64 + 0x20;
        huge[at..at + 8].copy_from_slice(&u64::MAX.to_le_bytes());
        assert!(of("huge", &huge, "version").unwrap_err().to_string().contains("more than any such file has"));
    }
}
