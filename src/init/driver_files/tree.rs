//! Path lookup below a root, as for a process whose `/` it is: no link leads out of it (openat2,
//! RESOLVE_IN_ROOT).
//!
//! Returned paths hold no link, and begin at the guest's root. Needs /proc for the paths of
//! descriptors.

use super::files::Roots;
use super::refused;
use nix::dir::{Dir, Type};
use nix::errno::Errno;
use nix::fcntl::{AT_FDCWD, AtFlags, OFlag, OpenHow, ResolveFlag, openat, openat2, renameat};
use nix::sys::stat::{FileStat, Mode, SFlag, fstat, fstatat, mkdirat};
use nix::unistd::{UnlinkatFlags, unlinkat};
use std::cell::RefCell;
use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Component, Path, PathBuf};

/// Tries of a lookup that the kernel aborts because of a concurrent rename.
const TRIES: usize = 8;
/// Limit of entries read from one directory; a distribution's library directory has some thousand.
const MAX_ENTRIES: usize = 200_000;
/// Options that name the driver's root, of a boot and of the command `cdi`.
pub const OPTIONS: &str = "gpuinit.driver-root=DIR, or --driver-root DIR";
/// Limit of a small file (a version, a path).
const MAX_TEXT: u64 = 4096;

/// A file that exists.
pub struct Found {
    /// Opened with O_PATH: no effect on a device or a pipe.
    fd: OwnedFd,
    /// Path in the guest, without links.
    pub path: PathBuf,
    stat: FileStat,
}

impl Found {
    pub fn is(&self, kind: SFlag) -> bool {
        SFlag::from_bits_truncate(self.stat.st_mode & SFlag::S_IFMT.bits()) == kind
    }

    pub fn is_executable(&self) -> bool {
        self.is(SFlag::S_IFREG) && self.stat.st_mode & 0o111 != 0
    }

    pub fn size(&self) -> u64 {
        u64::try_from(self.stat.st_size).unwrap_or(0)
    }

    /// Modification time in seconds, which every archive and every file system keeps.
    pub fn modified_s(&self) -> i64 {
        self.stat.st_mtime
    }

    /// Opens a regular file for reading; anything else is refused, because an open could block or
    /// have effects.
    pub fn open(&self) -> io::Result<File> {
        if !self.is(SFlag::S_IFREG) {
            return Err(io::Error::other("not a regular file"));
        }
        let path = format!("/proc/self/fd/{}", self.fd.as_raw_fd());
        Ok(File::from(openat(
            AT_FDCWD,
            path.as_str(),
            OFlag::O_RDONLY | OFlag::O_CLOEXEC,
            Mode::empty(),
        )?))
    }

    /// Reads a regular file, at most `most` bytes.
    pub fn read(&self, most: u64) -> io::Result<Vec<u8>> {
        /// Room for the read that returns end of file.
        const PROBE: u64 = 32;
        let mut bytes =
            Vec::with_capacity(usize::try_from(self.size().min(most) + PROBE).unwrap_or(0));
        self.open()?.take(most).read_to_end(&mut bytes)?;
        Ok(bytes)
    }

    /// Wanted entries of a directory, sorted. Fails if there are more than such a directory has.
    pub fn entries(&self, mut wanted: impl FnMut(&[u8]) -> bool) -> io::Result<Vec<Entry>> {
        let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
        let mut directory = Dir::from_fd(openat(&self.fd, ".", flags, Mode::empty())?)?;
        let mut entries = Vec::new();
        for (count, entry) in directory.iter().enumerate() {
            let entry = entry?;
            if count >= MAX_ENTRIES {
                return Err(io::Error::other(format!("more than {MAX_ENTRIES} entries")));
            }
            let name = entry.file_name().to_bytes();
            if matches!(name, b"." | b"..") || !wanted(name) {
                continue;
            }
            let is_link = match entry.file_type() {
                Some(kind) => kind == Type::Symlink,
                None => {
                    let stat = fstatat(&self.fd, entry.file_name(), AtFlags::AT_SYMLINK_NOFOLLOW)?;
                    stat.st_mode & SFlag::S_IFMT.bits() == SFlag::S_IFLNK.bits()
                }
            };
            entries.push(Entry {
                name: name.to_vec(),
                is_link,
            });
        }
        entries.sort();
        Ok(entries)
    }

    /// Whether a directory has a link of this name.
    pub fn has_link(&self, name: &str) -> bool {
        // A failed stat counts as no link: at worst the container lacks one more link.
        fstatat(&self.fd, name, AtFlags::AT_SYMLINK_NOFOLLOW)
            .is_ok_and(|stat| stat.st_mode & SFlag::S_IFMT.bits() == SFlag::S_IFLNK.bits())
    }

    /// Replaces a file in this directory by rename: a reader sees the old file or the new one.
    pub fn write(&self, name: &str, bytes: &[u8]) -> io::Result<()> {
        let temporary = format!("{name}.tmp");
        match unlinkat(&self.fd, temporary.as_str(), UnlinkatFlags::NoRemoveDir) {
            Ok(()) | Err(Errno::ENOENT) => {}
            Err(errno) => return Err(errno.into()),
        }
        let flags =
            OFlag::O_WRONLY | OFlag::O_CREAT | OFlag::O_EXCL | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        let mut file = File::from(openat(
            &self.fd,
            temporary.as_str(),
            flags,
            Mode::from_bits_truncate(0o644),
        )?);
        file.write_all(bytes)?;
        Ok(renameat(&self.fd, temporary.as_str(), &self.fd, name)?)
    }
}

/// A name in a directory.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Entry {
    pub name: Vec<u8>,
    pub is_link: bool,
}

/// A root, below which paths are looked up.
pub struct Tree {
    root: OwnedFd,
    /// Path of the root, as the guest sees it.
    path: PathBuf,
    /// Kernel's path of the guest's root: the prefix of descriptors' paths.
    above: PathBuf,
    /// Top-level directories of paths that had a link on the way: `/lib` on most systems.
    linked: RefCell<HashSet<PathBuf>>,
}

impl Tree {
    fn open(root: &Path) -> io::Result<Self> {
        let fd = nix::fcntl::open(
            root,
            OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC,
            Mode::empty(),
        )?;
        let above = kernel_path(&fd)?;
        Ok(Self {
            root: fd,
            path: "/".into(),
            above,
            linked: RefCell::default(),
        })
    }

    /// Finds a path; None if nothing is there.
    pub fn find(&self, path: &Path) -> io::Result<Option<Found>> {
        let first: PathBuf = path.components().take(2).collect();
        let linked = self.linked.borrow().contains(&first);
        // Most paths have no link on the way and equal the kernel's path.
        let no_links = if linked || !plain_path(path) {
            Err(Errno::ELOOP)
        } else {
            self.look_up(path, ResolveFlag::RESOLVE_NO_SYMLINKS)
        };
        let found = match no_links {
            Err(Errno::ELOOP) => {
                self.linked.borrow_mut().insert(first);
                self.look_up(path, ResolveFlag::empty())
                    .map(|fd| (fd, None))
            }
            result => result.map(|fd| (fd, Some(below(&self.path, path).components().collect()))),
        };
        let (fd, path) = match found {
            Ok((fd, Some(path))) => (fd, path),
            Ok((fd, None)) => self.with_kernel_path(fd)?,
            Err(Errno::ENOENT | Errno::ENOTDIR) => return Ok(None),
            Err(errno) => return Err(errno.into()),
        };
        let stat = fstat(&fd)?;
        Ok(Some(Found { path, fd, stat }))
    }

    fn look_up(&self, path: &Path, more: ResolveFlag) -> nix::Result<OwnedFd> {
        let resolve = ResolveFlag::RESOLVE_IN_ROOT | ResolveFlag::RESOLVE_NO_MAGICLINKS | more;
        let how = OpenHow::new()
            .flags(OFlag::O_PATH | OFlag::O_CLOEXEC)
            .resolve(resolve);
        let mut result = Err(Errno::EAGAIN);
        for _ in 0..TRIES {
            result = openat2(&self.root, path, how);
            if result.as_ref().err() != Some(&Errno::EAGAIN) {
                break;
            }
        }
        result
    }

    fn with_kernel_path(&self, fd: OwnedFd) -> io::Result<(OwnedFd, PathBuf)> {
        let kernel_path = kernel_path(&fd)?;
        let path = kernel_path
            .strip_prefix(&self.above)
            .map_err(|_| io::Error::other("it lies outside the root"))?;
        Ok((fd, Path::new("/").join(path)))
    }
}

fn kernel_path(fd: &OwnedFd) -> io::Result<PathBuf> {
    let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
    std::fs::read_link(&path)
        .map_err(|e| io::Error::other(format!("read {path}: {e} (is /proc mounted?)")))
}

/// The guest's root, and the driver root in it.
pub struct Places {
    guest: Tree,
    driver: Tree,
    /// Path of the driver root as the guest sees it, without links.
    pub driver_root: PathBuf,
    /// Paths at which nothing was found, and their parents: whether they exist. Nothing is searched
    /// for below a missing directory.
    known: RefCell<HashMap<PathBuf, bool>>,
}

impl Places {
    pub fn open(roots: &Roots) -> Result<Self, String> {
        let no_root = |path: &Path, why: String| {
            refused(format!(
                "open the root {}: {why}; name the directory that the driver's user space was \
                 installed into ({OPTIONS})",
                path.display()
            ))
        };
        let guest = Tree::open(&roots.root).map_err(|e| no_root(&roots.root, e.to_string()))?;
        let found = guest
            .find(&roots.driver_root)
            .map_err(|e| no_root(&roots.driver_root, e.to_string()))?;
        let found = found
            .filter(|f| f.is(SFlag::S_IFDIR))
            .ok_or_else(|| no_root(&roots.driver_root, "no such directory".into()))?;
        let (path, above) = (found.path.clone(), guest.above.clone());
        let driver = Tree {
            root: found.fd,
            path,
            above,
            linked: RefCell::default(),
        };
        Ok(Self {
            guest,
            driver,
            driver_root: found.path,
            known: RefCell::default(),
        })
    }

    pub fn guest(&self) -> &Tree {
        &self.guest
    }

    /// Finds a path below the driver root.
    ///
    /// An absolute link there means the driver root, as in packages. If that leads to nothing, it
    /// means the guest's root, as for a driver that was installed into a directory of a running
    /// system.
    pub fn driver(&self, path: &Path) -> io::Result<Option<Found>> {
        if path
            .ancestors()
            .any(|part| self.known.borrow().get(part) == Some(&false))
        {
            return Ok(None);
        }
        let found = self.driver_now(path)?;
        if found.is_none() {
            self.learn(path);
        }
        Ok(found)
    }

    fn driver_now(&self, path: &Path) -> io::Result<Option<Found>> {
        match self.driver.find(path)? {
            None if self.driver_root != Path::new("/") => {
                self.guest.find(&below(&self.driver_root, path))
            }
            found => Ok(found),
        }
    }

    /// Records the first missing directory on the way to a missing path.
    fn learn(&self, path: &Path) {
        self.known.borrow_mut().insert(path.to_path_buf(), false);
        let mut above: Vec<&Path> = path.ancestors().skip(1).collect();
        above.reverse();
        for directory in above {
            let known = self.known.borrow().get(directory).copied();
            // Errors are left to the lookup that needs this directory.
            let there = known.unwrap_or_else(|| !matches!(self.driver_now(directory), Ok(None)));
            self.known
                .borrow_mut()
                .insert(directory.to_path_buf(), there);
            if !there {
                return;
            }
        }
    }

    /// Opens a directory of the driver root; makes it and its parents if missing.
    pub fn make_directory(&self, path: &Path) -> io::Result<Found> {
        let missing = || io::Error::from(io::ErrorKind::NotFound);
        let mut found = self.driver.find(Path::new("/"))?.ok_or_else(missing)?;
        let mut at = PathBuf::from("/");
        for name in path
            .components()
            .filter(|c| matches!(c, Component::Normal(_)))
        {
            at.push(name);
            found = match self.driver.find(&at)? {
                Some(found) => found,
                None => {
                    mkdirat(&found.fd, name.as_os_str(), Mode::from_bits_truncate(0o755))?;
                    self.driver.find(&at)?.ok_or_else(missing)?
                }
            };
        }
        Ok(found)
    }

    /// Path in a container of a file in the driver root; None for files outside it.
    pub fn in_container(&self, guest_path: &Path) -> Option<PathBuf> {
        guest_path
            .strip_prefix(&self.driver_root)
            .ok()
            .map(|rest| Path::new("/").join(rest))
    }

    /// Trimmed content of a small text file below the guest's root; None if the file is missing.
    pub fn text(&self, path: &Path) -> io::Result<Option<String>> {
        let Some(found) = self.guest.find(path)? else {
            return Ok(None);
        };
        let text = String::from_utf8(found.read(MAX_TEXT)?)
            .map_err(|e| io::Error::new(io::ErrorKind::InvalidData, e))?;
        Ok(Some(text.trim().to_string()))
    }
}

/// `path`, absolute or not, below `root`.
pub fn below(root: &Path, path: &Path) -> PathBuf {
    root.join(path.strip_prefix("/").unwrap_or(path))
}

/// Checks a file name for use in specs, hook arguments and links without quotes: letters, digits
/// and `._+-`.
pub fn plain_name(name: &[u8]) -> Option<&str> {
    let plain = |b: &u8| b.is_ascii_alphanumeric() || b"._+-".contains(b);
    let name = name
        .iter()
        .all(plain)
        .then(|| std::str::from_utf8(name).ok())
        .flatten()?;
    (!name.is_empty() && !name.starts_with('.') && name.len() <= 255).then_some(name)
}

/// Problem of a path that does not pass [`plain_path`].
pub const NOT_PLAIN: &str =
    "leads to a path with a colon or control characters, which cannot be written into a spec";

/// Checks a path for use without quotes: absolute, UTF-8, without `..`, control characters and the
/// colons that separate lists of paths.
pub fn plain_path(path: &Path) -> bool {
    let plain_text = path.to_str().is_some_and(|text| {
        text.len() <= 4095 && !text.contains(|c: char| c.is_control() || c == ':')
    });
    let mut components = path.components();
    plain_text
        && components.next() == Some(Component::RootDir)
        && components.all(|c| matches!(c, Component::Normal(_)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_paths_that_could_mean_something_else_are_not_plain() {
        for name in ["libcuda.so.1", "libstdc++.so.6", "nvidia-drm_gbm.so"] {
            assert_eq!(plain_name(name.as_bytes()), Some(name));
        }
        for name in [
            "", ".", "..", ".hidden", "a/b", "a:b", "a b", "a\n", "\u{e4}",
        ] {
            assert_eq!(plain_name(name.as_bytes()), None, "{name:?}");
        }
        for path in ["/", "/usr/lib64", "/with space"] {
            assert!(plain_path(Path::new(path)), "{path:?}");
        }
        for path in ["", "usr", "/usr/../etc", "/a:b", "/a\nb"] {
            assert!(!plain_path(Path::new(path)), "{path:?}");
        }
    }
}
