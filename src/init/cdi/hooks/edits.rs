//! Changing a container: a list of edits, all of them or none.
//!
//! First everything (missing directories, files, links) is prepared under a temporary name in its
//! final directory. Whatever can fail (a read-only or full file system, a directory or a device in
//! the way) fails there. Then each is renamed into place in one step. After any error the former
//! files are back and the new ones are gone.

use super::container_root::{ContainerRoot, cannot, kind, name_of};
use nix::errno::Errno;
use nix::fcntl::{AtFlags, OFlag, ResolveFlag, readlinkat, renameat};
use nix::sys::stat::{Mode, SFlag, fchmod, fstat, fstatat, mkdirat};
use nix::unistd::{UnlinkatFlags, linkat, symlinkat, unlinkat};
use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Component, Path, PathBuf};

/// Limit of directories made for one path.
const MAX_DEPTH: usize = 64;

/// Desired state of a path. Paths are the container's, absolute or from its root.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Edit {
    /// File with this content; replaces a file or a link; missing directories are made.
    File {
        path: PathBuf,
        content: Vec<u8>,
        mode: u32,
    },
    /// Link; replaces a file or another link; missing directories are made. The target is not
    /// checked.
    Link { path: PathBuf, target: PathBuf },
    /// No file or link of this name.
    Absent { path: PathBuf },
}

impl Edit {
    pub fn path(&self) -> &Path {
        match self {
            Self::File { path, .. } | Self::Link { path, .. } | Self::Absent { path } => path,
        }
    }

    fn verb(&self) -> &'static str {
        match self {
            Self::File { .. } => "write",
            Self::Link { .. } => "link",
            Self::Absent { .. } => "remove",
        }
    }
}

/// A prepared edit.
struct Staged<'a> {
    edit: &'a Edit,
    parent: OwnedFd,
    name: &'a OsStr,
    temporary: String,
    state: State,
}

/// Progress of an edit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// The new file is under the temporary name.
    Prepared,
    /// The new file is in its place; there was none before.
    Made,
    /// The new file is in its place (or nothing, for [`Edit::Absent`]); the old one is at
    /// [`Staged::old_name`].
    Replaced,
    /// The new file is in its place and the old one gone: this file system has no hard links.
    Gone,
}

/// Edits done so far; undone when dropped before [`Changes::keep`].
struct Changes<'a> {
    staged: Vec<Staged<'a>>,
    /// Directories made, outer ones first: descriptor of the parent, and name.
    directories: Vec<(OwnedFd, PathBuf)>,
}

/// Makes all edits, or none; returns their number. Edits without effect are skipped, so a read-only
/// root in the desired state is no error.
pub fn apply(root: &ContainerRoot, edits: &[Edit]) -> io::Result<usize> {
    let needed: Vec<&Edit> = edits.iter().filter(|e| !is_so(root, e)).collect();
    let mut changes = Changes {
        staged: Vec::new(),
        directories: Vec::new(),
    };
    for edit in &needed {
        changes
            .prepare(root, edit)
            .map_err(|e| cannot(edit.verb(), edit.path(), e))?;
    }
    for staged in &mut changes.staged {
        staged
            .put_in_place()
            .map_err(|e| cannot(staged.edit.verb(), staged.edit.path(), e))?;
    }
    changes.keep();
    Ok(needed.len())
}

/// Whether the edit has no effect. False if the path cannot be examined.
fn is_so(root: &ContainerRoot, edit: &Edit) -> bool {
    let Ok((parent, name)) = split(edit.path()) else {
        return false;
    };
    let parent = root.resolve(
        parent,
        OFlag::O_PATH | OFlag::O_DIRECTORY,
        ResolveFlag::empty(),
    );
    let there = parent
        .as_ref()
        .ok()
        .and_then(|p| fstatat(p, name, AtFlags::AT_SYMLINK_NOFOLLOW).ok());
    match (edit, parent, there.as_ref().map(kind)) {
        (Edit::Absent { .. }, _, None) => true,
        (Edit::Link { path, target }, Ok(parent), Some(found)) => {
            let same = || {
                root.file_id(path)
                    .is_some_and(|id| root.file_id(&beside(path, target)) == Some(id))
            };
            // A file in the link's place may be the link's target, mounted there.
            if found == SFlag::S_IFLNK {
                readlinkat(&parent, name).is_ok_and(|to| to == *target)
            } else {
                found == SFlag::S_IFREG && same()
            }
        }
        (
            Edit::File {
                path,
                content,
                mode,
            },
            Ok(_),
            Some(SFlag::S_IFREG),
        ) => {
            there.is_some_and(|s| s.st_mode & 0o7777 == *mode)
                && root
                    .read(path, content.len() as u64)
                    .is_ok_and(|c| c.as_ref() == Some(content))
        }
        _ => false,
    }
}

/// Target of a link at `path`, as a path of the container.
fn beside(path: &Path, target: &Path) -> PathBuf {
    path.parent().unwrap_or(Path::new("/")).join(target)
}

fn said(error: Errno) -> io::Error {
    match error {
        Errno::EXDEV => io::Error::other(
            "the path leads into another mount, which may be a volume of other containers, too: \
                nothing is made there",
        ),
        other => io::Error::other(other.desc()),
    }
}

/// Splits a path into directory and name.
fn split(path: &Path) -> io::Result<(&Path, &OsStr)> {
    match (path.parent(), path.components().next_back()) {
        (Some(parent), Some(Component::Normal(name))) => Ok((parent, name)),
        _ => Err(io::Error::other("the path does not end in a name")),
    }
}

impl<'a> Changes<'a> {
    fn prepare(&mut self, root: &ContainerRoot, edit: &'a Edit) -> io::Result<()> {
        let (parent, name) = split(edit.path())?;
        let parent = self.make_directories(root, parent)?;
        if root.is_kernels(parent.as_fd(), fstat(&parent)?.st_dev)? {
            return Err(io::Error::other(
                "its directory is on a file system of the kernel's (/proc, /sys or the like)",
            ));
        }
        match there(&parent, name)? {
            None | Some(SFlag::S_IFREG | SFlag::S_IFLNK) => {}
            Some(other) => {
                return Err(io::Error::other(format!(
                    "{} is in its place; the image must not have one there",
                    name_of(other)
                )));
            }
        }
        let temporary = temporary_name(self.staged.len());
        let staged = Staged {
            edit,
            parent,
            name,
            temporary,
            state: State::Prepared,
        };
        let (parent, temporary) = (&staged.parent, staged.temporary.as_str());
        match edit {
            Edit::File { content, mode, .. } => {
                let flags = OFlag::O_WRONLY
                    | OFlag::O_CREAT
                    | OFlag::O_EXCL
                    | OFlag::O_NOFOLLOW
                    | OFlag::O_CLOEXEC;
                let mut file = File::from(nix::fcntl::openat(
                    parent,
                    temporary,
                    flags,
                    Mode::S_IRUSR | Mode::S_IWUSR,
                )?);
                let written = file
                    .write_all(content)
                    .and_then(|()| Ok(fchmod(&file, Mode::from_bits_truncate(*mode))?));
                self.staged.push(staged); // before the error: the file is there
                return written;
            }
            Edit::Link { target, .. } => symlinkat(target.as_path(), parent, temporary)?,
            Edit::Absent { .. } => {}
        }
        self.staged.push(staged);
        Ok(())
    }

    /// Opens the directory at a path and makes missing parts; every step is resolved from the root.
    fn make_directories(&mut self, root: &ContainerRoot, path: &Path) -> io::Result<OwnedFd> {
        let open = |path: &Path| root.writable_directory(path);
        match open(path) {
            Err(Errno::ENOENT) => {}
            result => return result.map_err(said),
        }
        if path.components().count() > MAX_DEPTH
            || path.components().any(|c| c == Component::ParentDir)
        {
            return Err(io::Error::other(format!(
                "{} is not there, and is not made: it is too deep or has \"..\" in it",
                path.display()
            )));
        }
        let mut step = PathBuf::from("/");
        let mut directory = open(&step)?;
        for part in path.components() {
            let Component::Normal(name) = part else {
                continue;
            };
            step.push(name);
            directory = match open(&step) {
                Err(Errno::ENOENT) => {
                    if root.is_kernels(directory.as_fd(), fstat(&directory)?.st_dev)? {
                        return Err(cannot(
                            "make",
                            &step,
                            "this is on a file system of the kernel's",
                        ));
                    }
                    match mkdirat(&directory, name, Mode::from_bits_truncate(0o755)) {
                        Ok(()) => self.directories.push((directory, PathBuf::from(name))),
                        // Made meanwhile, or a dangling link: the next line shows which.
                        Err(Errno::EEXIST) => {}
                        Err(e) => return Err(cannot("make", &step, e.desc())),
                    }
                    open(&step).map_err(|e| cannot("open", &step, said(e)))?
                }
                result => result.map_err(|e| cannot("open", &step, said(e)))?,
            };
        }
        Ok(directory)
    }

    /// Commits: removes the former files.
    fn keep(mut self) {
        for staged in self.staged.drain(..) {
            if staged.state == State::Replaced {
                // The edit is made; at worst an unused name stays behind.
                let _unused = unlinkat(
                    &staged.parent,
                    staged.old_name().as_str(),
                    UnlinkatFlags::NoRemoveDir,
                );
            }
        }
        self.directories.clear();
    }
}

impl Drop for Changes<'_> {
    /// Undoes everything, last first. Failures are ignored; the caller reports the first error.
    fn drop(&mut self) {
        for staged in self.staged.iter().rev() {
            staged.undo();
        }
        for (parent, name) in self.directories.iter().rev() {
            let _unused = unlinkat(parent, name.as_path(), UnlinkatFlags::RemoveDir);
        }
    }
}

impl Staged<'_> {
    fn old_name(&self) -> String {
        format!("{}-old", self.temporary)
    }

    fn put_in_place(&mut self) -> io::Result<()> {
        let (at, old) = (&self.parent, self.old_name());
        let busy = |e: Errno| {
            if e == Errno::EBUSY {
                io::Error::other("a mount is in its place")
            } else {
                e.into()
            }
        };
        if matches!(self.edit, Edit::Absent { .. }) {
            if there(at, self.name)?.is_some() {
                renameat(at, self.name, at, old.as_str()).map_err(busy)?;
                self.state = State::Replaced;
            }
            return Ok(());
        }
        let kept = match there(at, self.name)? {
            None => State::Made,
            Some(_) if linkat(at, self.name, at, old.as_str(), AtFlags::empty()).is_ok() => {
                State::Replaced
            }
            Some(_) => State::Gone,
        };
        // rename() never replaces a directory with a file, even a directory made since the check.
        if let Err(e) = renameat(at, self.temporary.as_str(), at, self.name) {
            // There if it was made a moment ago.
            let _unused = unlinkat(at, old.as_str(), UnlinkatFlags::NoRemoveDir);
            return Err(busy(e));
        }
        self.state = kept;
        Ok(())
    }

    fn undo(&self) {
        let at = &self.parent;
        let _unused = match self.state {
            State::Prepared if matches!(self.edit, Edit::Absent { .. }) => Ok(()),
            State::Prepared => unlinkat(at, self.temporary.as_str(), UnlinkatFlags::NoRemoveDir),
            State::Made => unlinkat(at, self.name, UnlinkatFlags::NoRemoveDir),
            State::Replaced => renameat(at, self.old_name().as_str(), at, self.name),
            State::Gone => Ok(()),
        };
    }
}

/// File type of a name, its own link not followed.
fn there(parent: &OwnedFd, name: &OsStr) -> io::Result<Option<SFlag>> {
    match fstatat(parent, name, AtFlags::AT_SYMLINK_NOFOLLOW) {
        Ok(status) => Ok(Some(kind(&status))),
        Err(Errno::ENOENT) => Ok(None),
        Err(e) => Err(e.into()),
    }
}

/// Unused name: the file is opened with O_EXCL, so a collision only fails.
fn temporary_name(index: usize) -> String {
    format!(
        ".kata-gpu-init-{}-{}-{index}",
        std::process::id(),
        crate::machine::clock::boottime_ns()
    )
}
