//! Files and directories below a host's root, whose content nobody vouches for.

use crate::rules::host_facts::Seen;
use nix::errno::Errno;
use nix::fcntl::{OFlag, OpenHow, ResolveFlag, open, openat2, readlinkat};
use nix::sys::stat::{Mode, SFlag, fstat};
use std::fs::{self, File};
use std::io::{self, ErrorKind, Read};
use std::os::fd::{AsRawFd, OwnedFd};
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
            Self::Light => Err(io::Error::other(
                "left out by --daemonset-check, since reading it would hold up guests",
            )),
        }
    }
}

/// Limit of an ordinary file: /proc/interrupts of 512 CPUs has 6 MB.
pub const MAX_FILE: u64 = 16 << 20;
/// Limit of entries of one directory.
pub const MAX_ENTRIES: usize = 65_536;

/// Root of a host's files: that of this machine, or the directory of a container that has the
/// node's files. Links are resolved below it, absolute ones too (openat2 with RESOLVE_IN_ROOT).
pub struct HostRoot(OwnedFd);

impl HostRoot {
    /// Opens the root; a relative path is below the working directory.
    pub fn open(path: &Path) -> io::Result<Self> {
        Ok(Self(open(
            path,
            OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC,
            Mode::empty(),
        )?))
    }

    /// Resolves an absolute path of the host, and opens nothing that could block.
    fn resolve(&self, path: &Path, more: OFlag) -> io::Result<OwnedFd> {
        let flags = OFlag::O_PATH | OFlag::O_CLOEXEC | more;
        Ok(openat2(
            &self.0,
            path,
            OpenHow::new()
                .flags(flags)
                .resolve(ResolveFlag::RESOLVE_IN_ROOT),
        )?)
    }

    /// Path of a host's file on this machine, without links.
    pub fn place(&self, path: &Path) -> io::Result<PathBuf> {
        fs::read_link(through(&self.resolve(path, OFlag::empty())?))
    }

    /// Opens a regular file. Opening anything else could block or do something: only its metadata
    /// is looked at.
    pub fn regular(&self, path: &Path) -> io::Result<File> {
        let held = self.resolve(path, OFlag::empty())?;
        if fstat(&held)?.st_mode & SFlag::S_IFMT.bits() != SFlag::S_IFREG.bits() {
            return Err(io::Error::new(
                ErrorKind::InvalidInput,
                "not a regular file",
            ));
        }
        File::open(through(&held))
    }

    /// Bytes of a regular file; longer than the limit is an error.
    pub fn bytes(&self, path: &Path, limit: u64) -> io::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        self.regular(path)?
            .take(limit + 1)
            .read_to_end(&mut bytes)?;
        if bytes.len() as u64 > limit {
            return Err(io::Error::new(
                ErrorKind::InvalidData,
                format!("longer than {limit} bytes"),
            ));
        }
        Ok(bytes)
    }

    /// Text of a regular file, without white space at its end.
    pub fn text(&self, path: impl AsRef<Path>) -> io::Result<String> {
        let text = String::from_utf8(self.bytes(path.as_ref(), MAX_FILE)?);
        Ok(text
            .map_err(|_| io::Error::new(ErrorKind::InvalidData, "not UTF-8"))?
            .trim_end()
            .to_string())
    }

    /// Sorted names in a directory; names that are no text are left out, and more than
    /// [`MAX_ENTRIES`] are an error.
    pub fn names(&self, dir: impl AsRef<Path>) -> io::Result<Vec<String>> {
        let held = self.resolve(dir.as_ref(), OFlag::O_DIRECTORY)?;
        let mut names = Vec::new();
        for (nth, entry) in fs::read_dir(through(&held))?.enumerate() {
            if nth == MAX_ENTRIES {
                return Err(io::Error::new(
                    ErrorKind::InvalidData,
                    format!("more than {MAX_ENTRIES} entries"),
                ));
            }
            names.extend(entry?.file_name().into_string().ok());
        }
        names.sort();
        Ok(names)
    }

    /// Target of a link, as it is written.
    pub fn link(&self, path: impl AsRef<Path>) -> io::Result<String> {
        let held = self.resolve(path.as_ref(), OFlag::O_NOFOLLOW)?;
        Ok(readlinkat(&held, "")?.to_string_lossy().into_owned())
    }

    /// Whether something is there, of which nothing is opened.
    pub fn has(&self, path: impl AsRef<Path>) -> bool {
        self.resolve(path.as_ref(), OFlag::O_NOFOLLOW).is_ok()
    }
}

/// Path of what a descriptor holds.
fn through(held: &OwnedFd) -> PathBuf {
    format!("/proc/self/fd/{}", held.as_raw_fd()).into()
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

#[cfg(test)]
mod tests {
    use super::*;
    use kata_gpu_test_support::temp_dir;
    use std::os::unix::fs::symlink;

    #[test]
    fn links_of_a_host_lead_to_its_own_files() {
        let dir = temp_dir();
        let (host, outside) = (dir.path().join("host"), dir.path().join("outside"));
        fs::create_dir_all(host.join("etc/kata")).unwrap();
        fs::write(&outside, "of the container").unwrap();
        fs::write(host.join("outside"), "of the host").unwrap();
        symlink(&outside, host.join("absolute")).unwrap();
        symlink("/etc/../../../outside", host.join("etc/up")).unwrap();
        symlink("/etc", host.join("folder")).unwrap();
        symlink("/dev/null", host.join("device")).unwrap();
        let root = HostRoot::open(&host).unwrap();
        // The same path is outside the root, and would be read there.
        assert!(seen(root.text("/absolute")).is_none());
        assert_eq!(root.text("/etc/up").unwrap(), "of the host");
        assert_eq!(root.text("/folder/up").unwrap(), "of the host");
        assert_eq!(root.text("/../outside").unwrap(), "of the host");
        assert_eq!(root.names("/folder").unwrap(), ["kata", "up"]);
        assert_eq!(root.link("/folder").unwrap(), "/etc");
        assert_eq!(
            root.place(Path::new("/folder/kata")).unwrap(),
            host.canonicalize().unwrap().join("etc/kata")
        );
        assert!(root.has("/absolute") && !root.has("/nothing"));
        assert!(root.text("/device").is_err() && root.text("/folder").is_err());
    }
}
