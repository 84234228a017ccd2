//! A kernel's file, by what is in it: x86's bzImage, an ELF vmlinux, arm64's Image; each of them
//! also packed by gzip, as arm64's `Image.gz` is.

use anyhow::{Context, Result, ensure};
use flate2::read::GzDecoder;
use kata_gpu_wire::arch::Arch;
use std::fs::File;
use std::io::{BufReader, Read, Seek, SeekFrom};
use std::path::Path;

const GZIP: &[u8] = b"\x1f\x8b";

/// Opens a kernel; what is read from it is unpacked. Refuses what is no regular file.
pub fn open(path: &Path) -> Result<Box<dyn Read>> {
    let context = || format!("open kernel {}", path.display());
    let meta = std::fs::metadata(path).with_context(context)?;
    ensure!(meta.is_file(), "{}: not a file", context());
    let mut file = BufReader::new(File::open(path).with_context(context)?);
    let mut magic = Vec::new();
    Read::by_ref(&mut file)
        .take(GZIP.len() as u64)
        .read_to_end(&mut magic)
        .with_context(context)?;
    file.seek(SeekFrom::Start(0)).with_context(context)?;
    Ok(if magic == GZIP {
        Box::new(GzDecoder::new(file))
    } else {
        Box::new(file)
    })
}

/// Architecture that a kernel is for.
pub fn arch(path: &Path) -> Result<Arch> {
    let mut head = Vec::new();
    open(path)?
        .take(Arch::HEAD as u64)
        .read_to_end(&mut head)
        .with_context(|| format!("read kernel {}", path.display()))?;
    Arch::of_head(&head).with_context(|| {
        format!(
            "kernel {}: neither a bzImage or vmlinux of x86-64 nor an Image, Image.gz \
                 or vmlinux of arm64: give the file of a kernel",
            path.display()
        )
    })
}
