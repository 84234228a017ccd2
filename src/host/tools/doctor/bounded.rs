//! One file or directory of a host whose content nobody vouches for.

use crate::host::analysis::doctor::host_facts::Seen;
use nix::errno::Errno;
use nix::fcntl::{OFlag, open};
use nix::sys::stat::{Mode, SFlag, fstat};
use std::fs::{self, File};
use std::io::{self, ErrorKind, Read};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

/// How much of a host is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Depth {
    Full,
    /// Leaves out files whose reading holds a lock of the kernel or of a running VM for long.
    Light,
}

impl Depth {
    /// Result of reading a file that holds such a lock.
    pub fn costly(self, read: impl FnOnce() -> io::Result<String>) -> io::Result<String> {
        match self {
            Self::Full => read(),
            Self::Light => Err(io::Error::other("left out by --daemonset-check, since reading it would hold up guests")),
        }
    }
}

/// Limit of an ordinary file: /proc/interrupts of 512 CPUs has 6 MB.
pub const MAX_FILE: u64 = 16 << 20;
/// Limit of entries of one directory.
pub const MAX_ENTRIES: usize = 65_536;

/// A host's path below the root.
pub fn below(root: &Path, path: &Path) -> PathBuf {
    root.join(path.strip_prefix("/").unwrap_or(path))
}

/// Opens a regular file. Opening anything else could block or do something: only its metadata is
/// looked at.
pub fn open_regular(path: &Path) -> io::Result<File> {
    let held = open(path, OFlag::O_PATH | OFlag::O_CLOEXEC, Mode::empty())?;
    if fstat(&held)?.st_mode & SFlag::S_IFMT.bits() != SFlag::S_IFREG.bits() {
        return Err(io::Error::new(ErrorKind::InvalidInput, "not a regular file"));
    }
    File::open(format!("/proc/self/fd/{}", held.as_raw_fd()))
}

/// Bytes of a regular file; longer than the limit is an error.
pub fn bytes(path: &Path, limit: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    open_regular(path)?.take(limit + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > limit {
        return Err(io::Error::new(ErrorKind::InvalidData, format!("longer than {limit} bytes")));
    }
    Ok(bytes)
}

/// Result of a look; None: not there.
pub fn seen(result: io::Result<String>) -> Option<Seen> {
    match result {
        Ok(text) => Some(Seen::Text(text)),
        Err(e) => match e.raw_os_error().map(Errno::from_raw) {
            // A process ends, a device leaves, and a file of an absent function says so.
            Some(Errno::ENOENT | Errno::ENOTDIR | Errno::ESRCH | Errno::ENODEV) => None,
            Some(Errno::EACCES | Errno::EPERM) => Some(Seen::Denied),
            _ => Some(Seen::Odd(e.to_string())),
        },
    }
}

/// Text of a file, without white space at its end.
pub fn text(path: &Path) -> io::Result<String> {
    let text = String::from_utf8(bytes(path, MAX_FILE)?).map_err(|_| io::Error::new(ErrorKind::InvalidData, "not UTF-8"))?;
    Ok(text.trim_end().to_string())
}

/// Sorted names in a directory; names that are no text are left out, and more than [`MAX_ENTRIES`]
/// are an error.
pub fn names(dir: &Path) -> io::Result<Vec<String>> {
    let mut names = Vec::new();
    for (nth, entry) in fs::read_dir(dir)?.enumerate() {
        if nth == MAX_ENTRIES {
            return Err(io::Error::new(ErrorKind::InvalidData, format!("more than {MAX_ENTRIES} entries")));
        }
        names.extend(entry?.file_name().into_string().ok());
    }
    names.sort();
    Ok(names)
}

pub fn link(path: &Path) -> io::Result<String> {
    Ok(fs::read_link(path)?.to_string_lossy().into_owned())
}
