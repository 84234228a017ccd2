//! Files and directories, mostly small ones of the kernel: reads within a limit, and errors that
//! name the path.

use nix::errno::Errno;
use nix::libc;
use nix::sys::statfs::fstatfs;
use std::fs::{DirEntry, File, OpenOptions};
use std::io::{self, Read};
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// Kind of a tmpfs (linux/magic.h).
pub const TMPFS: u32 = 0x0102_1994;

/// Kind of the file system that has this descriptor's file.
pub fn kind_of_file_system(file: impl AsFd) -> nix::Result<u32> {
    // 32 bits, in a type that differs between C libraries.
    fstatfs(file).map(|s| s.filesystem_type().0 as u32)
}

/// Makes an I/O error `VERB PATH: ERROR`, of the same kind.
pub fn failed<'a>(verb: &'a str, path: &'a Path) -> impl Fn(io::Error) -> io::Error + 'a {
    move |e| io::Error::new(e.kind(), format!("{verb} {}: {e}", path.display()))
}

/// The errno of an I/O error; EIO if it has none.
pub fn errno(error: &io::Error) -> Errno {
    error.raw_os_error().map_or(Errno::EIO, Errno::from_raw)
}

/// Opens a regular file for reading. Error: EINVAL for anything else; a FIFO would wait for its
/// writer, and a terminal or a device has no end.
pub fn open(path: &Path) -> io::Result<File> {
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY)
        .open(path)?;
    match file.metadata()?.is_file() {
        true => Ok(file),
        false => Err(Errno::EINVAL.into()),
    }
}

/// Reads at most `limit` bytes. The kernel's own files have no size.
pub fn read(path: &Path, limit: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    open(path)?.take(limit).read_to_end(&mut bytes)?;
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

#[cfg(test)]
mod tests {
    use super::*;
    use kata_gpu_test_support::temp_dir;
    use nix::sys::stat::Mode;

    #[test]
    fn what_is_no_regular_file_is_refused_at_once() {
        let folder = temp_dir();
        let fifo = folder.path().join("fifo");
        nix::unistd::mkfifo(&fifo, Mode::S_IRUSR).unwrap();
        for path in [&fifo, folder.path(), Path::new("/dev/zero")] {
            let error = read(path, 10).unwrap_err();
            assert_eq!(errno(&error), Errno::EINVAL, "{}", path.display());
        }
        assert!(!read(Path::new("/proc/self/comm"), 10).unwrap().is_empty());
    }
}
