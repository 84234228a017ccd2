//! Metadata of a module's file: `key=value` strings of its `.modinfo` section, read without reading
//! the whole file.
//!
//! Takes any bytes: anything but a 64-bit little-endian ELF file with such a section is an error.

use crate::formats::elf;
use crate::machine::files;
use std::io;
use std::path::Path;

/// Value of one key (`version`, `vermagic`); None if the file has none.
///
/// Errors name the path and the fault of the file.
pub fn value(path: &Path, key: &str) -> io::Result<Option<String>> {
    let at = |what: &dyn std::fmt::Display| {
        io::Error::other(format!("read modinfo of {}: {what}", path.display()))
    };
    let file = files::open(path).map_err(|e| at(&e))?;
    Ok(values(&section(&file).map_err(|e| at(&e))?, key).next())
}

/// The section of a module.
pub fn section(file: &dyn elf::ReadAt) -> io::Result<Vec<u8>> {
    elf::section(file, b".modinfo")?
        .ok_or_else(|| io::Error::other("it has no .modinfo section: not a kernel module"))
}

/// The values of a key in the section's NUL-separated strings.
pub fn values<'a>(section: &'a [u8], key: &'a str) -> impl Iterator<Item = String> + 'a {
    section.split(|b| *b == 0).filter_map(move |entry| {
        let text = std::str::from_utf8(entry).ok()?;
        text.strip_prefix(key)?
            .strip_prefix('=')
            .map(str::to_string)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use kata_gpu_test_support::elf_stand_in::module;
    use kata_gpu_test_support::temp_dir;

    fn of(bytes: &[u8], key: &str) -> io::Result<Option<String>> {
        let folder = temp_dir();
        let path = folder.path().join("module");
        std::fs::write(&path, bytes).unwrap();
        value(&path, key)
    }

    #[test]
    fn keys_are_found_whole() {
        let file = module(b"srcversion=ABC\0version=550.163.01\0vermagic=6.1 SMP\0");
        assert_eq!(of(&file, "version").unwrap().as_deref(), Some("550.163.01"));
        assert_eq!(of(&file, "firmware").unwrap(), None);
    }

    #[test]
    fn what_is_no_module_is_refused_with_its_path() {
        let good = module(b"version=1\0");
        for length in 0..good.len() {
            assert!(
                of(&good[..length], "version").is_err(),
                "{length} bytes of a module were read"
            );
        }
        let error = of(&[b'x'; 100], "version").unwrap_err().to_string();
        assert!(
            error.contains("/module: ") && error.contains("not a little-endian ELF"),
            "{error}"
        );
        let mut huge = good;
        let at = huge.len() - 64 + 0x20;
        huge[at..at + 8].copy_from_slice(&u64::MAX.to_le_bytes());
        assert!(
            of(&huge, "version")
                .unwrap_err()
                .to_string()
                .contains("more than any such file has")
        );
    }
}
