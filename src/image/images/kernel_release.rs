//! Release of a kernel, from its file or as given.

use anyhow::{Context, Result, bail};
use kata_gpu_host::kernel_file;
use memchr::memmem;
use std::io::{self, Read};
use std::path::Path;

/// x86 boot image (Documentation/arch/x86/boot.rst): the mark, the field with the offset of the
/// version's text, and the number to add to that offset.
const BOOT_MARK: (usize, &[u8; 4]) = (0x202, b"HdrS");
const BOOT_VERSION: usize = 0x20e;
const BOOT_VERSION_BASE: usize = 0x200;
/// Banner of an uncompressed kernel.
const BANNER: &[u8] = b"Linux version ";
/// Longest release (__NEW_UTS_LEN).
const MAX_RELEASE: usize = 64;
/// Bytes searched in a kernel; Kata's vmlinux has 80 MB, one with all symbols more.
const MAX_KERNEL: u64 = 1 << 30;
const CHUNK: usize = 1 << 20;

/// A kernel's release, from its file (a bzImage, vmlinux, Image or Image.gz) or as given.
pub fn release(given: &str) -> Result<String> {
    let path = Path::new(given);
    if !path.exists() {
        let release = word(given.as_bytes()).filter(|release| release == given);
        return release.with_context(|| {
            format!("kernel {given:?}: neither a file nor a release as `uname -r` has it")
        });
    }
    match of(&mut *kernel_file::open(path)?).with_context(|| format!("read kernel {given}"))? {
        Some(release) => Ok(release),
        None => bail!(
            "kernel {given}: its release is not in it (is it compressed?): give the release \
             itself, as `uname -r` has it"
        ),
    }
}

fn of(kernel: &mut dyn Read) -> io::Result<Option<String>> {
    let mut kernel = kernel.take(MAX_KERNEL);
    // Bytes read last, with the end of those before, in which a banner may be cut.
    let mut bytes = Vec::new();
    let mut first = true;
    loop {
        let before = bytes.len();
        if Read::by_ref(&mut kernel)
            .take(CHUNK as u64)
            .read_to_end(&mut bytes)?
            == 0
        {
            return Ok(None);
        }
        if first
            && bytes
                .get(BOOT_MARK.0..)
                .is_some_and(|rest| rest.starts_with(BOOT_MARK.1))
        {
            let offset = bytes
                .get(BOOT_VERSION..)
                .and_then(|rest| rest.first_chunk::<2>())
                .map_or(0, |b| u16::from_le_bytes(*b));
            return Ok(bytes
                .get(usize::from(offset) + BOOT_VERSION_BASE..)
                .and_then(word));
        }
        first = false;
        let is_last = bytes.len() - before < CHUNK;
        for start in memmem::find_iter(&bytes, BANNER) {
            let release = bytes.get(start + BANNER.len()..).unwrap_or_default();
            // One that is cut is found whole in the next round.
            if !is_last && release.len() <= MAX_RELEASE {
                continue;
            }
            // Elsewhere in a kernel, the same text is a format: `Linux version %s`.
            if let Some(release) =
                word(release).filter(|r| r.starts_with(|c: char| c.is_ascii_digit()))
            {
                return Ok(Some(release));
            }
        }
        bytes.drain(..bytes.len().saturating_sub(BANNER.len() + MAX_RELEASE));
    }
}

/// First word, if it can be a release.
fn word(bytes: &[u8]) -> Option<String> {
    let end = bytes
        .iter()
        .position(|b| *b == b' ' || *b == 0)
        .unwrap_or(bytes.len());
    let text = std::str::from_utf8(bytes.get(..end)?).ok()?;
    let plain = |c: char| c.is_ascii_alphanumeric() || "._+-~".contains(c);
    let fits = (1..=MAX_RELEASE).contains(&text.len())
        && text.chars().all(plain)
        && !text.starts_with('.');
    fits.then(|| text.to_string())
}

/// Release of a `vermagic=`: its first word.
pub fn of_vermagic(magic: &str) -> &str {
    magic.split(' ').next().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use kata_gpu_test_support::temp_dir;
    use std::io::Write;

    #[test]
    fn a_release_is_read_from_any_kernel_and_no_other_file() {
        let dir = temp_dir();
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
        // arm64's Image.gz, with the banner at every place around the end of a piece.
        for before in CHUNK - BANNER.len() - MAX_RELEASE - 2..CHUNK + 2 {
            if before % 7 == 0 {
                plain.truncate(10);
                plain.resize(before, b'x');
                plain.extend(b"Linux version 6.18.5-arm (builder) #1");
                plain.resize(plain.len() + 100, 0);
                let mut packed =
                    flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
                packed.write_all(&plain).unwrap();
                assert_eq!(
                    of(&packed.finish().unwrap()).unwrap(),
                    "6.18.5-arm",
                    "{before}"
                );
            }
        }
        boot[0x1200] = 0x1b;
        for bytes in [boot.as_slice(), b"", b"Linux version ", &[b'x'; 100]] {
            assert!(
                of(bytes)
                    .unwrap_err()
                    .to_string()
                    .contains("give the release itself")
            );
        }
    }

    #[test]
    fn a_release_may_be_given_as_a_word() {
        assert_eq!(
            release("6.1.0-9-cloud-amd64").unwrap(),
            "6.1.0-9-cloud-amd64"
        );
        for wrong in ["", "no/such/file", "a b", "\x1b[2J"] {
            assert!(
                release(wrong)
                    .unwrap_err()
                    .to_string()
                    .contains("neither a file nor a release"),
                "{wrong:?}"
            );
        }
        assert!(
            release("..")
                .unwrap_err()
                .to_string()
                .contains("open kernel .."),
            "a directory is neither"
        );
    }
}
