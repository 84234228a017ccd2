//! Files and directories, mostly small ones of the kernel: reads within a limit, and errors that
//! name the path.

use nix::errno::Errno;
use std::fs::{DirEntry, File};
use std::io::{self, Read};
use std::path::Path;

/// Makes an I/O error `VERB PATH: ERROR`, of the same kind.
pub fn failed<'a>(verb: &'a str, path: &'a Path) -> impl Fn(io::Error) -> io::Error + 'a {
    move |e| io::Error::new(e.kind(), format!("{verb} {}: {e}", path.display()))
}

/// The errno of an I/O error; EIO if it has none.
pub fn errno(error: &io::Error) -> Errno {
    error.raw_os_error().map_or(Errno::EIO, Errno::from_raw)
}

/// Reads at most `limit` bytes. The kernel's own files have no size.
pub fn read(path: &Path, limit: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    File::open(path)?.take(limit).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Entries of a directory; none where it cannot be read.
pub fn entries(directory: &Path) -> impl Iterator<Item = DirEntry> + use<> {
    std::fs::read_dir(directory).into_iter().flatten().flatten()
}

/// The numeric names in a directory: processes, threads, interrupts.
pub fn numbers(directory: &Path) -> impl Iterator<Item = i32> + use<> {
    entries(directory).filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}
