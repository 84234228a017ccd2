//! Loads one module's file into the kernel.
//!
//! Uncompressed files go to finit_module byte for byte, so that the signature stays valid; so do
//! files that the kernel itself can decompress (`/sys/module/compression` names the one format).
//! Others are decompressed here and go to init_module: the signature is inside the compressed file,
//! so it stays valid, too. As in kmod, the first bytes decide the format, not the name.

use crate::machine::files::{self, errno};
use nix::errno::Errno;
use nix::kmod::{ModuleInitFlags, finit_module, init_module};
use std::ffi::CStr;
use std::fmt;
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::FileExt;
use std::path::Path;

/// MODULE_INIT_COMPRESSED_FILE (linux/module.h): the kernel decompresses; nix has no name for it.
const COMPRESSED_FILE: ModuleInitFlags = ModuleInitFlags::from_bits_retain(4);
/// Limit of an unpacked module: NVIDIA's largest has some 100 MB with all symbols.
pub const MAX_UNPACKED: u64 = 256 << 20;
/// Memory limit of the decoder: `xz -9` needs 65 MiB, and the kernel's build asks for 1.
const XZ_MEMORY_KIB: u32 = 128 << 10;
/// Limit of the version magic in messages.
const MAX_MAGIC: usize = 100;

/// Compression format of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    Gzip,
    Xz,
    Zstd,
}

impl Format {
    const ALL: [(Self, &'static str, &'static [u8]); 3] = [
        (Self::Gzip, "gzip", &[0x1f, 0x8b]),
        (Self::Xz, "xz", b"\xfd7zXZ\0"),
        (Self::Zstd, "zstd", &[0x28, 0xb5, 0x2f, 0xfd]),
    ];

    /// Format of the first bytes; None: not compressed, or unknown.
    pub fn of(first_bytes: &[u8]) -> Option<Self> {
        Self::ALL
            .iter()
            .find(|(_, _, magic)| first_bytes.starts_with(magic))
            .map(|(format, ..)| *format)
    }

    /// Format named in `/sys/module/compression`.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL
            .iter()
            .find(|(_, word, _)| *word == name.trim())
            .map(|(format, ..)| *format)
    }
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Self::ALL
            .iter()
            .find(|(format, ..)| format == self)
            .map_or(Ok(()), |(_, name, _)| f.write_str(name))
    }
}

/// Reason why a file was not loaded.
#[derive(Debug)]
pub enum Fault {
    Open(Errno),
    Read(Errno),
    /// The file is compressed, and decompression failed.
    Packed {
        format: Format,
        why: String,
    },
    Refused {
        errno: Errno,
        /// Version magic of the file, if it may be the reason.
        magic: Option<String>,
    },
}

/// Loads a module's file and blocks until its init has returned. Returns the format if it was
/// unpacked here. A module that is loaded already is success.
pub fn load(
    path: &Path,
    parameters: &CStr,
    kernel_unpacks: impl FnOnce() -> Option<Format>,
) -> Result<Option<Format>, Fault> {
    load_by(
        path,
        kernel_unpacks,
        |file, flags| finit_module(file, parameters, flags),
        |image| init_module(image, parameters),
    )
}

/// [`load`], with the kernel's two ways to take a module: as a file, or as its bytes.
fn load_by(
    path: &Path,
    kernel_unpacks: impl FnOnce() -> Option<Format>,
    take_file: impl FnOnce(&File, ModuleInitFlags) -> nix::Result<()>,
    take_bytes: impl FnOnce(&[u8]) -> nix::Result<()>,
) -> Result<Option<Format>, Fault> {
    let file = files::open(path).map_err(|e| Fault::Open(errno(&e)))?;
    let mut first = [0; 6];
    let read = file
        .read_at(&mut first, 0)
        .map_err(|e| Fault::Read(errno(&e)))?;
    let format = Format::of(first.get(..read).unwrap_or_default());
    let flags = match format {
        None => ModuleInitFlags::empty(),
        Some(format) if kernel_unpacks() == Some(format) => COMPRESSED_FILE,
        Some(format) => return unpack_and_load(&file, format, take_bytes),
    };
    match (take_file(&file, flags), format) {
        (Ok(()) | Err(Errno::EEXIST), _) => Ok(None),
        // Kernel advertises decompression but returns EOPNOTSUPP.
        (Err(Errno::EOPNOTSUPP), Some(format)) => unpack_and_load(&file, format, take_bytes),
        (Err(errno), None) if may_be_foreign(errno) => {
            let mut bytes = Vec::new();
            // Read for the message only: an unreadable file has no version magic.
            let _unused = (&file).take(MAX_UNPACKED).read_to_end(&mut bytes);
            Err(Fault::Refused {
                errno,
                magic: version_magic(&bytes),
            })
        }
        (Err(errno), _) => Err(Fault::Refused { errno, magic: None }),
    }
}

/// Whether the errno may be due to a module of another kernel: ENOEXEC for its magic or layout,
/// EINVAL for a symbol's checksum.
fn may_be_foreign(errno: Errno) -> bool {
    matches!(errno, Errno::ENOEXEC | Errno::EINVAL)
}

fn unpack_and_load(
    file: &File,
    format: Format,
    take_bytes: impl FnOnce(&[u8]) -> nix::Result<()>,
) -> Result<Option<Format>, Fault> {
    let image = unpack(BufReader::new(file), format, MAX_UNPACKED)
        .map_err(|why| Fault::Packed { format, why })?;
    match take_bytes(&image) {
        Ok(()) | Err(Errno::EEXIST) => Ok(Some(format)),
        Err(errno) => Err(Fault::Refused {
            errno,
            magic: may_be_foreign(errno)
                .then(|| version_magic(&image))
                .flatten(),
        }),
    }
}

/// Decompresses all frames of a file and verifies their checksums. Error: more than `limit` bytes.
pub fn unpack(file: impl BufRead, format: Format, limit: u64) -> Result<Vec<u8>, String> {
    let mut out = Vec::new();
    match format {
        Format::Gzip => read_all(
            &mut flate2::bufread::MultiGzDecoder::new(file),
            &mut out,
            limit,
        )?,
        Format::Xz => read_all(
            &mut lzma_rust2::XzReader::new_mem_limit(file, true, XZ_MEMORY_KIB),
            &mut out,
            limit,
        )?,
        Format::Zstd => unpack_zstd(file, &mut out, limit)?,
    }
    Ok(out)
}

fn unpack_zstd(mut file: impl BufRead, out: &mut Vec<u8>, limit: u64) -> Result<(), String> {
    loop {
        let mut frame =
            ruzstd::decoding::StreamingDecoder::new(&mut file).map_err(|e| e.to_string())?;
        read_all(&mut frame, out, limit)?;
        // The decoder only computes the checksum: compare it here.
        let (stated, found) = (
            frame.decoder.get_checksum_from_data(),
            frame.decoder.get_calculated_checksum(),
        );
        if stated.is_some() && stated != found {
            return Err(format!(
                "checksum {stated:08x?} in the file, {found:08x?} of what it holds"
            ));
        }
        if file.fill_buf().map_err(|e| e.to_string())?.is_empty() {
            return Ok(());
        }
    }
}

fn read_all(decoder: &mut impl Read, out: &mut Vec<u8>, limit: u64) -> Result<(), String> {
    let left = limit.saturating_sub(out.len() as u64);
    let read = decoder
        .take(left + 1)
        .read_to_end(out)
        .map_err(|e| e.to_string())?;
    if read as u64 > left {
        Err(format!("more than {limit} bytes come out"))
    } else {
        Ok(())
    }
}

/// The `vermagic=` of a module, truncated and printable.
pub fn version_magic(image: &[u8]) -> Option<String> {
    const KEY: &[u8] = b"vermagic=";
    // A NUL precedes every entry of .modinfo, also the first one.
    let at = (0..image.len())
        .find(|at| image[*at..].starts_with(KEY) && (*at == 0 || image[at - 1] == 0))?;
    let text = image.get(at + KEY.len()..)?.split(|b| *b == 0).next()?;
    let text = String::from_utf8_lossy(text.get(..MAX_MAGIC).unwrap_or(text));
    Some(
        text.trim()
            .chars()
            .map(|c| if c.is_control() { '?' } else { c })
            .collect(),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 4,000 bytes of repetitive text, packed by gzip, xz and zstd.
    const PACKED: [(Format, &[u8]); 3] = [
        (
            Format::Gzip,
            include_bytes!("../../../tests/fixtures/modules/text.gz"),
        ),
        (
            Format::Xz,
            include_bytes!("../../../tests/fixtures/modules/text.xz"),
        ),
        (
            Format::Zstd,
            include_bytes!("../../../tests/fixtures/modules/text.zst"),
        ),
    ];

    fn text() -> Vec<u8> {
        (0..1000)
            .flat_map(|n| format!("{n:03}\n").into_bytes())
            .collect()
    }

    /// Without this, a module that another process loads in the same moment fails the bring-up.
    #[test]
    fn a_module_that_the_kernel_has_already_is_success() {
        use kata_gpu_test_support::temp_dir;
        let folder = temp_dir();
        let path = folder.path().join("nvidia.ko");
        let load = |bytes: &[u8], kernel_unpacks, as_file: Errno, as_bytes: Errno| {
            std::fs::write(&path, bytes).unwrap();
            load_by(
                &path,
                || kernel_unpacks,
                |_, _| Err(as_file),
                |_| Err(as_bytes),
            )
        };
        let is = |result: &Result<Option<Format>, Fault>, wanted| {
            result.as_ref().is_ok_and(|format| *format == wanted)
        };
        let (plain, (xz, packed)) = (b"\x7fELF".as_slice(), PACKED[1]);
        let (there, never) = (Errno::EEXIST, Errno::EIO);
        let result = load(plain, None, there, never);
        assert!(is(&result, None), "{result:?}");
        let result = load(packed, Some(xz), there, never);
        assert!(is(&result, None), "{result:?}");
        let result = load(packed, None, never, there);
        assert!(is(&result, Some(xz)), "{result:?}");
        // A kernel that claims to decompress, and then does not.
        let result = load(packed, Some(xz), Errno::EOPNOTSUPP, there);
        assert!(is(&result, Some(xz)), "{result:?}");
        // Negative control: any other refusal is one.
        for result in [
            load(plain, None, Errno::EBUSY, never),
            load(packed, Some(xz), Errno::EBUSY, never),
            load(packed, None, never, Errno::EBUSY),
        ] {
            let refused = matches!(
                result,
                Err(Fault::Refused {
                    errno: Errno::EBUSY,
                    ..
                })
            );
            assert!(refused, "{result:?}");
        }
    }

    #[test]
    fn every_format_is_known_and_unpacked() {
        for (format, bytes) in PACKED {
            assert_eq!(Format::of(bytes), Some(format));
            assert_eq!(Format::named(&format!("{format}\n")), Some(format));
            assert_eq!(
                unpack(bytes, format, 4000).as_deref(),
                Ok(text().as_slice()),
                "{format}"
            );
            // Files may be concatenated from parts.
            let twice = [bytes, bytes].concat();
            assert_eq!(
                unpack(&twice[..], format, 8000).map(|b| b.len()),
                Ok(8000),
                "{format}"
            );
        }
        assert_eq!(
            (
                Format::of(b"\x7fELF"),
                Format::of(b""),
                Format::named("lzma")
            ),
            (None, None, None)
        );
    }

    #[test]
    fn no_file_takes_more_memory_than_allowed() {
        for (format, bytes) in PACKED {
            assert_eq!(
                unpack(bytes, format, 3999),
                Err("more than 3999 bytes come out".into()),
                "{format}"
            );
        }
    }

    #[test]
    fn a_damaged_file_is_an_error_wherever_it_is_cut_or_changed() {
        for (format, bytes) in PACKED {
            for end in 0..bytes.len() {
                assert!(
                    unpack(&bytes[..end], format, 10_000).is_err(),
                    "{format} cut at {end} of {}",
                    bytes.len()
                );
            }
            for at in 0..bytes.len() {
                let mut changed = bytes.to_vec();
                changed[at] ^= 0x10;
                // Some bits mean nothing (a time, a file system's name); no change may result in
                // other bytes.
                assert!(
                    unpack(&changed[..], format, 10_000).map_or(true, |out| out == text()),
                    "{format} changed at {at}"
                );
            }
        }
    }

    #[test]
    fn a_module_names_the_kernel_it_was_built_for() {
        let image =
            b"\x7fELF..novermagic=1\0license=GPL\0vermagic=6.1.0-9 SMP mod_unload \0name=x\0";
        assert_eq!(
            version_magic(image).as_deref(),
            Some("6.1.0-9 SMP mod_unload")
        );
        assert_eq!(version_magic(b"vermagic="), Some(String::new()));
        assert_eq!(version_magic(b"vermagi"), None);
        assert_eq!(
            version_magic(&[b"\0vermagic=".as_slice(), &[7; 1000]].concat()).map(|m| m.len()),
            Some(MAX_MAGIC)
        );
    }
}
