//! The only way into a container: a descriptor of its root. The kernel resolves every path below it
//! (openat2 with RESOLVE_IN_ROOT and RESOLVE_NO_MAGICLINKS): no link in the image, absolute or
//! relative, leads out of the root, whenever it is changed.
//!
//! Read-only: edits go through [`super::edits`]. Only regular files of real file systems are
//! opened: nothing that blocks, counts readers or starts a device, and nothing in the kernel's own
//! file systems (/proc, /sys), where reading and making files have effects of their own.

use crate::machine::files::{TMPFS, kind_of_file_system};
use nix::dir::{Dir, Type};
use nix::errno::Errno;
use nix::fcntl::{OFlag, OpenHow, ResolveFlag, openat2};
use nix::libc;
use nix::sys::stat::{FileStat, SFlag, fstat};
use std::cell::RefCell;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Tries of one path: the kernel returns EAGAIN for a path with `..` if anything is renamed
/// meanwhile.
const TRIES: usize = 64;
/// Limit of names in a directory: the largest library directories have some thousand.
const MAX_NAMES: usize = 65_536;
/// Initial capacity of a list of names.
const USUAL_NAMES: usize = 512;
/// The kernel's own file systems (magic numbers of linux/magic.h): proc, sysfs, cgroup, cgroup2,
/// devpts, debugfs, tracefs, securityfs, configfs, bpf, pstore, efivarfs, selinux.
const KERNELS: &[u32] = &[
    PROC,
    0x6265_6572,
    0x0027_e0eb,
    0x6367_7270,
    0x1cd1,
    0x6462_6720,
    0x7472_6163,
    0x7363_6673,
    0x6265_6570,
    0xcafe_4a11,
    0x6165_676c,
    0xde5e_81e4,
    0xf97c_ff8c,
];
const PROC: u32 = 0x9fa0;

/// Flags that open a file for reading.
const READ: OFlag = OFlag::O_RDONLY
    .union(OFlag::O_NONBLOCK)
    .union(OFlag::O_NOCTTY);

/// Identity of a file, independent of its names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FileId {
    device: u64,
    inode: u64,
}

impl FileId {
    pub fn of(status: &FileStat) -> Self {
        Self {
            device: status.st_dev,
            inode: status.st_ino,
        }
    }
}

/// A container's root.
#[derive(Debug)]
pub struct ContainerRoot {
    root: OwnedFd,
    path: PathBuf,
    opened: Instant,
    /// Devices seen so far, and whether they are the kernel's own.
    devices: RefCell<Vec<(u64, bool)>>,
}

/// A directory in a container, open for reading.
pub struct Directory {
    fd: OwnedFd,
    pub id: FileId,
}

/// A name in a directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Name {
    pub name: String,
    /// Kind of the file; `None` if the file system does not report a kind.
    pub kind: Option<Type>,
}

/// Error with the text `VERB PATH: why`.
pub(super) fn cannot(verb: &str, path: &Path, why: impl std::fmt::Display) -> io::Error {
    io::Error::other(format!("{verb} {}: {why}", path.display()))
}

impl ContainerRoot {
    /// Opens a container's root; refuses this program's own root.
    pub fn open(path: &Path) -> io::Result<Self> {
        let refuse = |why: &str| cannot("open the container's root", path, why);
        if !path.is_absolute() {
            return Err(refuse(
                "it is not absolute; the runtime must give the whole path",
            ));
        }
        let how = OpenHow::new()
            .flags(OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC)
            .resolve(ResolveFlag::RESOLVE_NO_MAGICLINKS);
        let open = |path: &Path| openat2(nix::fcntl::AT_FDCWD, path, how);
        let root = open(path).map_err(|e| match e {
            Errno::ENOSYS => refuse("this kernel has no openat2; Linux 5.6 is the oldest that has"),
            e => refuse(e.desc()),
        })?;
        let id = FileId::of(&fstat(&root)?);
        if id == FileId::of(&fstat(open(Path::new("/"))?)?) {
            return Err(refuse(
                "this is the root of the guest itself, which no hook changes",
            ));
        }
        let root = Self {
            root,
            path: path.to_path_buf(),
            opened: Instant::now(),
            devices: RefCell::default(),
        };
        if root.is_kernels(root.root.as_fd(), id.device)? {
            return Err(refuse("this is a file system of the kernel's"));
        }
        Ok(root)
    }

    /// Path of the root, for messages.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Time since the root was opened, which is a hook's first step.
    pub fn elapsed(&self) -> Duration {
        self.opened.elapsed()
    }

    /// Resolves a path of the container.
    pub(super) fn resolve(
        &self,
        path: &Path,
        flags: OFlag,
        more: ResolveFlag,
    ) -> nix::Result<OwnedFd> {
        let resolve = ResolveFlag::RESOLVE_IN_ROOT | ResolveFlag::RESOLVE_NO_MAGICLINKS | more;
        retried(
            self.root.as_fd(),
            path,
            OpenHow::new()
                .flags(flags | OFlag::O_CLOEXEC)
                .resolve(resolve),
        )
    }

    /// Opens a directory to make something in. Volumes are refused, because other containers may
    /// share them: the directory is on the root's own mount, or below the tmpfs that every
    /// container has at /dev.
    pub(super) fn writable_directory(&self, path: &Path) -> nix::Result<OwnedFd> {
        let flags = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
        let below = match (
            self.resolve(path, flags, ResolveFlag::RESOLVE_NO_XDEV),
            path.strip_prefix("/dev"),
        ) {
            (Err(Errno::EXDEV), Ok(below)) => below,
            (result, _) => return result,
        };
        let dev = self.resolve(Path::new("/dev"), flags, ResolveFlag::RESOLVE_NO_SYMLINKS)?;
        if kind_of_file_system(dev.as_fd())? != TMPFS {
            return Err(Errno::EXDEV);
        }
        let resolve = ResolveFlag::RESOLVE_IN_ROOT
            | ResolveFlag::RESOLVE_NO_SYMLINKS
            | ResolveFlag::RESOLVE_NO_XDEV;
        retried(
            dev.as_fd(),
            below,
            OpenHow::new().flags(flags).resolve(resolve),
        )
    }

    /// Whether `fd` is on one of the kernel's own file systems. Checked once for each device.
    pub(super) fn is_kernels(&self, fd: BorrowedFd, device: u64) -> io::Result<bool> {
        let known = self
            .devices
            .borrow()
            .iter()
            .find(|(d, _)| *d == device)
            .map(|(_, kernels)| *kernels);
        if let Some(kernels) = known {
            return Ok(kernels);
        }
        let kernels = KERNELS.contains(&kind_of_file_system(fd)?);
        self.devices.borrow_mut().push((device, kernels));
        Ok(kernels)
    }

    /// File type at a path, links followed. None if nothing is there, or for a dangling link.
    pub fn kind(&self, path: &Path) -> Option<SFlag> {
        let fd = self
            .resolve(path, OFlag::O_PATH, ResolveFlag::empty())
            .ok()?;
        fstat(fd).ok().map(|s| kind(&s))
    }

    /// Identity of the regular file at a path, links followed; None if there is none.
    pub fn file_id(&self, path: &Path) -> Option<FileId> {
        let fd = self
            .resolve(path, OFlag::O_PATH, ResolveFlag::empty())
            .ok()?;
        fstat(fd)
            .ok()
            .filter(|s| kind(s) == SFlag::S_IFREG)
            .map(|s| FileId::of(&s))
    }

    /// Opens a regular file for reading, links followed. None if nothing is at the path.
    pub fn file(&self, path: &Path) -> io::Result<Option<File>> {
        Ok(self.opened(path)?.map(|(file, _)| file))
    }

    fn opened(&self, path: &Path) -> io::Result<Option<(File, FileStat)>> {
        match self.resolve(path, OFlag::O_PATH, ResolveFlag::empty()) {
            Ok(fd) => self
                .reopen(&fd)
                .map(Some)
                .map_err(|e| cannot("read", path, e)),
            Err(Errno::ENOENT) => Ok(None),
            Err(e) => Err(cannot("read", path, e.desc())),
        }
    }

    /// Reads a whole regular file. None if nothing is at the path. Errors: not a regular file, or
    /// larger than `limit` bytes.
    pub fn read(&self, path: &Path, limit: u64) -> io::Result<Option<Vec<u8>>> {
        let Some((file, status)) = self.opened(path)? else {
            return Ok(None);
        };
        let size = u64::try_from(status.st_size).unwrap_or(0);
        read_bounded(size, file, limit)
            .map(Some)
            .map_err(|e| cannot("read", path, e))
    }

    /// Turns an O_PATH descriptor into a readable one: /proc/self/fd leads to the same file,
    /// whatever its name leads to by now. Devices, FIFOs and sockets are never opened.
    fn reopen(&self, fd: &OwnedFd) -> io::Result<(File, FileStat)> {
        let status = fstat(fd)?;
        if kind(&status) != SFlag::S_IFREG {
            return Err(io::Error::other(format!(
                "it is {}, not a regular file",
                name_of(kind(&status))
            )));
        }
        if self.is_kernels(fd.as_fd(), status.st_dev)? {
            return Err(io::Error::other(
                "it is a file of the kernel's (/proc, /sys or the like)",
            ));
        }
        let reopened = openat2(
            nix::fcntl::AT_FDCWD,
            &proc_path(fd.as_fd()),
            OpenHow::new().flags(READ | OFlag::O_CLOEXEC),
        )?;
        Ok((File::from(reopened), status))
    }

    /// Opens a directory, links followed. None if there is none.
    pub fn directory(&self, path: &Path) -> io::Result<Option<Directory>> {
        let fd = match self.resolve(
            path,
            OFlag::O_RDONLY | OFlag::O_DIRECTORY,
            ResolveFlag::empty(),
        ) {
            Ok(fd) => fd,
            Err(Errno::ENOENT | Errno::ENOTDIR) => return Ok(None),
            Err(e) => return Err(cannot("open", path, e.desc())),
        };
        let id = FileId::of(&fstat(&fd)?);
        Ok(Some(Directory { fd, id }))
    }

    /// Opens a regular file by its name in a directory, links not followed. None if the name is
    /// absent or no regular file.
    ///
    /// If the directory has just listed a regular file, open it at once without blocking and check
    /// it afterwards.
    pub fn file_in(
        &self,
        directory: &Directory,
        name: &str,
        kind_given: Option<Type>,
    ) -> io::Result<Option<(File, FileId)>> {
        let direct = kind_given == Some(Type::File)
            && !self.is_kernels(directory.fd.as_fd(), directory.id.device)?;
        let flags = if direct { READ } else { OFlag::O_PATH };
        let how = OpenHow::new().flags(flags | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC);
        let resolve = ResolveFlag::RESOLVE_NO_SYMLINKS | ResolveFlag::RESOLVE_BENEATH;
        let fd = match retried(directory.fd.as_fd(), Path::new(name), how.resolve(resolve)) {
            Ok(fd) => fd,
            Err(Errno::ENOENT | Errno::ELOOP | Errno::ENXIO) => return Ok(None),
            Err(e) => return Err(e.into()),
        };
        let status = fstat(&fd)?;
        if kind(&status) != SFlag::S_IFREG {
            return Ok(None);
        }
        // A file mounted here has another device; so may every file of an overlay.
        if direct && !self.is_kernels(fd.as_fd(), status.st_dev)? {
            return Ok(Some((File::from(fd), FileId::of(&status))));
        }
        self.reopen(&fd)
            .map(|(file, status)| Some((file, FileId::of(&status))))
    }
}

impl Directory {
    /// Names in the directory, sorted; names that are not UTF-8 are left out. Error: more names
    /// than any library directory has.
    pub fn names(&self) -> io::Result<Vec<Name>> {
        // Open a separate descriptor: reading moves its position.
        let own = openat2(
            &self.fd,
            ".",
            OpenHow::new().flags(OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC),
        )?;
        let mut names = Vec::with_capacity(USUAL_NAMES);
        for (seen, entry) in Dir::from_fd(own)?.iter().enumerate() {
            let entry = entry?;
            if seen >= MAX_NAMES {
                return Err(io::Error::other(format!(
                    "more than {MAX_NAMES} names are in it"
                )));
            }
            match entry.file_name().to_str() {
                Err(_) | Ok("." | "..") => {}
                Ok(name) => names.push(Name {
                    name: name.to_string(),
                    kind: entry.file_type(),
                }),
            }
        }
        names.sort_unstable_by(|a, b| a.name.cmp(&b.name));
        Ok(names)
    }
}

impl AsFd for Directory {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Repeats openat2 until no rename interferes, or until the tries are used up.
fn retried(at: BorrowedFd, path: &Path, how: OpenHow) -> nix::Result<OwnedFd> {
    let below = path.strip_prefix("/").unwrap_or(path);
    let below = if below.as_os_str().is_empty() {
        Path::new(".")
    } else {
        below
    };
    let mut result = Err(Errno::EAGAIN);
    for _ in 0..TRIES {
        result = openat2(at, below, how);
        if !matches!(result, Err(Errno::EAGAIN | Errno::EINTR)) {
            break;
        }
    }
    result
}

/// Reads a whole file up to `limit` bytes, even if it is growing. A file of exactly `size` bytes
/// takes one read, and a second one that returns end of file.
pub(super) fn read_bounded(size: u64, file: impl Read, limit: u64) -> io::Result<Vec<u8>> {
    /// Smallest buffer space that `read_to_end` reads into.
    const PROBE: u64 = 32;
    let mut bytes = Vec::with_capacity(usize::try_from(size.min(limit) + PROBE).unwrap_or(0));
    file.take(limit + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > limit {
        return Err(io::Error::other(format!("it has more than {limit} bytes")));
    }
    Ok(bytes)
}

/// Path in /proc that leads to the open file of a descriptor.
pub(super) fn proc_path(fd: BorrowedFd) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", fd.as_raw_fd()))
}

/// Whether `fd` is on a proc file system.
pub(super) fn is_proc(fd: BorrowedFd) -> bool {
    kind_of_file_system(fd) == Ok(PROC)
}

pub(super) fn kind(status: &FileStat) -> SFlag {
    SFlag::from_bits_truncate(status.st_mode & libc::S_IFMT)
}

pub(super) fn name_of(kind: SFlag) -> &'static str {
    match kind {
        SFlag::S_IFREG => "a regular file",
        SFlag::S_IFDIR => "a directory",
        SFlag::S_IFLNK => "a link",
        SFlag::S_IFIFO => "a FIFO",
        SFlag::S_IFSOCK => "a socket",
        SFlag::S_IFCHR | SFlag::S_IFBLK => "a device",
        _ => "of no known kind",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kata_gpu_test_support::temp_dir;

    #[test]
    fn a_path_is_found_while_other_programs_rename() {
        const RENAMES: usize = 50_000;
        let folder = temp_dir();
        let at = |name: &str| folder.path().join(name);
        std::fs::create_dir_all(at("root/a")).unwrap();
        std::fs::write(at("root/file"), "").unwrap();
        std::fs::write(at("one"), "").unwrap();
        let root = ContainerRoot::open(&at("root")).unwrap();
        let path = Path::new("/a/../a/../a/../file");
        let find = || root.resolve(path, OFlag::O_PATH, ResolveFlag::empty());
        let missed: Vec<Errno> = std::thread::scope(|scope| {
            let renaming = scope.spawn(|| {
                for _ in 0..RENAMES {
                    std::fs::rename(at("one"), at("two")).unwrap();
                    std::fs::rename(at("two"), at("one")).unwrap();
                }
            });
            std::iter::repeat_with(|| find().err())
                .take_while(|_| !renaming.is_finished())
                .flatten()
                .collect()
        });
        assert_eq!(missed, []);
    }
}
