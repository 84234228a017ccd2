//! The socket of a VMM in one of Kata's directories: its owner, and whether its name still leads to
//! it.
//!
//! Names in those directories can come to mean something else at any time: a sandbox's directory is
//! renamed, a jailed VMM replaces its socket. The directory is therefore opened once, without
//! following a link, and held; later looks are compared with the inodes of then.

use super::vm_dirs::Pattern;
use nix::errno::Errno;
use nix::fcntl::{AtFlags, OFlag};
use nix::sys::stat::{FileStat, SFlag, fstat, fstatat};
use std::ffi::OsStr;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

/// Identity of a file, whatever its name is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileId {
    device: u64,
    inode: u64,
}

impl From<&FileStat> for FileId {
    fn from(stat: &FileStat) -> Self {
        Self {
            device: stat.st_dev,
            inode: stat.st_ino,
        }
    }
}

/// Metadata of the socket of that name in a directory; None for anything else, also a link.
pub fn socket_at(dir: impl AsFd, name: &OsStr) -> nix::Result<Option<FileStat>> {
    match fstatat(dir, name, AtFlags::AT_SYMLINK_NOFOLLOW) {
        Ok(stat) => {
            Ok((stat.st_mode & SFlag::S_IFMT.bits() == SFlag::S_IFSOCK.bits()).then_some(stat))
        }
        Err(Errno::ENOENT) => Ok(None),
        Err(e) => Err(e),
    }
}

/// A VMM's socket that was found.
#[derive(Debug)]
pub struct Vmm {
    pattern: Pattern,
    path: PathBuf,
    dir: OwnedFd,
    dir_id: FileId,
    socket: FileId,
    uid: u32,
}

impl Vmm {
    /// The socket at a path of that pattern; None where there is none.
    pub fn find(pattern: &Pattern, path: &Path) -> nix::Result<Option<Self>> {
        let parent = path.parent().unwrap_or(path);
        let dir = match pattern.open(parent, OFlag::O_PATH | OFlag::O_DIRECTORY) {
            // Gone meanwhile, or a link.
            Err(Errno::ENOENT | Errno::ENOTDIR | Errno::ELOOP) => return Ok(None),
            dir => dir?,
        };
        let dir_id = FileId::from(&fstat(&dir)?);
        let socket = socket_at(&dir, path.file_name().unwrap_or_default())?;
        Ok(socket.map(|stat| Self {
            pattern: pattern.clone(),
            path: path.to_path_buf(),
            dir,
            dir_id,
            socket: FileId::from(&stat),
            uid: stat.st_uid,
        }))
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Owner of the socket when it was found.
    pub fn uid(&self) -> u32 {
        self.uid
    }

    /// The held directory, whatever its name is by now.
    pub fn dir(&self) -> &OwnedFd {
        &self.dir
    }

    /// Whether both are the same socket in the same directory.
    pub fn is(&self, other: &Self) -> bool {
        (self.dir_id, self.socket) == (other.dir_id, other.socket)
    }

    /// Owner of the socket: the VMM's user, because bind(2) makes the file as the caller's. None if
    /// the path does not lead to this socket any more.
    pub fn owner(&self) -> Option<u32> {
        let now = Self::find(&self.pattern, &self.path).ok()??;
        now.is(self).then_some(now.uid)
    }
}

#[cfg(test)]
mod tests {
    use super::super::syscalls;
    use super::*;
    use kata_gpu_test_support::{TempDir, temp_dir};
    use std::os::unix::net::UnixListener;

    fn vmm(dir: &TempDir, id: &str) -> Option<Vmm> {
        let pattern: Pattern = format!("{}/*/root/kata.hvsock", dir.path().display())
            .parse()
            .unwrap();
        Vmm::find(&pattern, &pattern.path(id)).unwrap()
    }

    #[test]
    fn a_socket_is_whose_file_it_is_until_its_name_leads_elsewhere() {
        let dir = temp_dir();
        let at = |path: &str| dir.path().join(path);
        assert!(vmm(&dir, "one").is_none());
        for id in ["one", "two"] {
            std::fs::create_dir_all(at(id).join("root")).unwrap();
            drop(UnixListener::bind(at(id).join("root/kata.hvsock")).unwrap());
        }
        let one = vmm(&dir, "one").unwrap();
        assert_eq!(one.owner(), Some(nix::unistd::geteuid().as_raw()));
        assert!(one.is(&vmm(&dir, "one").unwrap()) && !one.is(&vmm(&dir, "two").unwrap()));
        // Rename the directory, and give its name to another.
        std::fs::rename(at("one"), at("three")).unwrap();
        assert_eq!(one.owner(), None);
        std::fs::rename(at("two"), at("one")).unwrap();
        assert_eq!(one.owner(), None);
        std::fs::rename(at("one"), at("two")).unwrap();
        std::fs::rename(at("three"), at("one")).unwrap();
        assert!(one.owner().is_some());
        // Replace the socket alone.
        std::fs::rename(at("two/root/kata.hvsock"), at("one/root/kata.hvsock")).unwrap();
        assert_eq!(one.owner(), None);
    }

    #[test]
    fn a_vmms_socket_is_found_without_openat2() {
        let dir = temp_dir();
        std::fs::create_dir_all(dir.path().join("one/root")).unwrap();
        let _vmm = UnixListener::bind(dir.path().join("one/root/kata.hvsock")).unwrap();
        // A thread of its own: the filter stays.
        let found = std::thread::scope(|scope| {
            let thread = scope.spawn(|| {
                syscalls::answer_unknown(nix::libc::SYS_openat2).unwrap();
                let how = nix::fcntl::OpenHow::new().flags(OFlag::O_PATH);
                assert_eq!(
                    nix::fcntl::openat2(nix::fcntl::AT_FDCWD, dir.path(), how).err(),
                    Some(Errno::ENOSYS)
                );
                vmm(&dir, "one").is_some()
            });
            thread.join().unwrap()
        });
        assert!(found);
    }

    #[test]
    fn a_link_or_a_file_is_no_vmms_socket() {
        let dir = temp_dir();
        let at = |path: &str| dir.path().join(path);
        for id in ["real", "links", "file"] {
            std::fs::create_dir_all(at(id)).unwrap();
        }
        std::fs::create_dir_all(at("file/root")).unwrap();
        std::fs::create_dir_all(at("real/root")).unwrap();
        drop(UnixListener::bind(at("real/root/kata.hvsock")).unwrap());
        std::os::unix::fs::symlink(at("real/root"), at("links/root")).unwrap();
        std::os::unix::fs::symlink(at("real"), at("linked")).unwrap();
        std::fs::write(at("file/root/kata.hvsock"), "").unwrap();
        let found = ["real", "links", "linked", "file", "none"].map(|id| vmm(&dir, id).is_some());
        assert_eq!(found, [true, false, false, false, false]);
    }
}
