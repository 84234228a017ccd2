//! Release of a kernel, from its file or as given.

use crate::elf::ReadAt;
use anyhow::{Context, Result, bail};
use std::fs::File;
use std::io;
use std::path::Path;

/// x86 boot image (Documentation/arch/x86/boot.rst): the mark, the field with the offset of the
/// version's text, and the number to add to that offset.
const BOOT_MARK: (u64, &[u8; 4]) = (0x202, b"HdrS");
const BOOT_VERSION: u64 = 0x20e;
const BOOT_VERSION_BASE: u64 = 0x200;
/// Banner of an uncompressed kernel.
const BANNER: &[u8] = b"Linux version ";
/// Longest release (__NEW_UTS_LEN).
const MAX_RELEASE: usize = 64;
/// Bytes searched in a kernel; Kata's vmlinux has 80 MB, one with all symbols more.
const MAX_KERNEL: u64 = 1 << 30;
const CHUNK: usize = 1 << 20;

/// A kernel's release, from its file (a bzImage, or an uncompressed vmlinux or Image) or as given.
pub fn release(given: &str) -> Result<String> {
    let path = Path::new(given);
    if !path.exists() {
        let release = word(given.as_bytes()).filter(|release| release == given);
        return release.with_context(|| format!("kernel {given:?}: neither a file nor a release as `uname -r` has it"));
    }
    // Refuse a directory or a FIFO.
    let file = std::fs::metadata(path).and_then(|meta| if meta.is_file() { File::open(path) } else { Err(io::Error::other("not a file")) });
    let file = file.with_context(|| format!("open kernel {given}"))?;
    match of(&file).with_context(|| format!("read kernel {given}"))? {
        Some(release) => Ok(release),
        None => bail!("kernel {given}: its release is not in it (is it compressed?): give the release itself, as `uname -r` has it"),
    }
}

fn of(file: &File) -> io::Result<Option<String>> {
    let part = |at: u64, length: usize| {
        let mut bytes = vec![0; length];
        let read = ReadAt::read_at(file, &mut bytes, at)?;
        bytes.truncate(read);
        Ok::<_, io::Error>(bytes)
    };
    if part(BOOT_MARK.0, 4)? == BOOT_MARK.1 {
        let offset = part(BOOT_VERSION, 2)?;
        let offset = offset.first_chunk::<2>().map_or(0, |bytes| u16::from_le_bytes(*bytes));
        return Ok(word(&part(u64::from(offset) + BOOT_VERSION_BASE, MAX_RELEASE + 1)?));
    }
    let mut at = 0;
    while at < MAX_KERNEL {
        // The next read begins where a banner may have been cut.
        let bytes = part(at, CHUNK + BANNER.len() + MAX_RELEASE)?;
        let found = bytes.windows(BANNER.len()).enumerate().filter(|(_, w)| *w == BANNER);
        for (start, _) in found {
            // Elsewhere in a kernel, the same text is a format: `Linux version %s`.
            if let Some(release) = bytes.get(start + BANNER.len()..).and_then(word).filter(|r| r.starts_with(|c: char| c.is_ascii_digit()))
            {
                return Ok(Some(release));
            }
        }
        if bytes.len() < CHUNK {
            break;
        }
        at += CHUNK as u64;
    }
    Ok(None)
}

/// First word, if it can be a release.
fn word(bytes: &[u8]) -> Option<String> {
    let end = bytes.iter().position(|b| *b == b' ' || *b == 0).unwrap_or(bytes.len());
    let text = std::str::from_utf8(bytes.get(..end)?).ok()?;
    let plain = |c: char| c.is_ascii_alphanumeric() || "._+-~".contains(c);
    let fits = (1..=MAX_RELEASE).contains(&text.len()) && text.chars().all(plain) && !text.starts_with('.');
    fits.then(|| text.to_string())
}

/// Release of a `vermagic=`: its first word.
pub fn of_vermagic(magic: &str) -> &str {
    magic.split(' ').next().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::testing::TempDir;

    #[test]
    fn a_release_is_read_from_any_kernel_and_no_other_file() {
        let dir = TempDir::new();
        let path = dir.path().join("kernel");
        let of = |bytes: &[u8]| {
            std::fs::write(&path, bytes).unwrap();
            release(path.to_str().unwrap())
        };
        let mut boot = vec![0; 0x3000];
        boot[0x202..0x206].copy_from_slice(b"HdrS");
        boot[0x20e..0x210].copy_from_slice(&0x1000_u16.to_le_bytes());
        boot[0x1200..0x1200 + 20].copy_from_slice(b"6.18.5-nvidia (a@b) ");
        assert_eq!(of(&boot).unwrap(), "6.18.5-nvidia");
        let mut plain = vec![b'x'; CHUNK - 5];
        plain.extend(b"Linux version %s (%s)\0...Linux version 6.1.0-9-cloud (builder) #1");
        assert_eq!(of(&plain).unwrap(), "6.1.0-9-cloud");
        boot[0x1200] = 0x1b;
        for bytes in [boot.as_slice(), b"", b"Linux version ", &[b'x'; 100]] {
            assert!(of(bytes).unwrap_err().to_string().contains("give the release itself"));
        }
    }

    #[test]
    fn a_release_may_be_given_as_a_word() {
        assert_eq!(release("6.1.0-9-cloud-amd64").unwrap(), "6.1.0-9-cloud-amd64");
        for wrong in ["", "no/such/file", "a b", "\x1b[2J"] {
            assert!(release(wrong).unwrap_err().to_string().contains("neither a file nor a release"), "{wrong:?}");
        }
        assert!(release("..").unwrap_err().to_string().contains("open kernel .."), "a directory is neither");
    }
}
