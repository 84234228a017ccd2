//! `disable-device-node-modification`: a container reads `ModifyDeviceFiles: 0` in the driver's
//! parameters, so its programs do not make or change device nodes. A changed copy is mounted over
//! the file, read-only.
//! kata-agent runs a createContainer hook in the container's mount namespace before pivot_root: the
//! guest's own files are still there, and only this container sees a mount made now. The copy is a
//! file in the guest's /run that loses its name once it is mounted; nothing is written in the
//! container's root.

use super::container_root::{ContainerRoot, FileId, cannot, is_proc, kind, name_of, proc_path};
use super::oci_state::read_regular;
use nix::errno::Errno;
use nix::fcntl::{OFlag, ResolveFlag};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sys::stat::{SFlag, fstat};
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// The driver's parameters, at the same path in the guest and in the container.
const PARAMS: &str = "/proc/driver/nvidia/params";
const MAX_PARAMS: u64 = 64 * 1024;
const FLAGS: MsFlags = MsFlags::MS_RDONLY
    .union(MsFlags::MS_NOSUID)
    .union(MsFlags::MS_NODEV)
    .union(MsFlags::MS_NOEXEC);

/// Mounts the copy; does nothing if no driver is loaded or the driver forbids changes already.
pub fn run(root: &ContainerRoot) -> io::Result<()> {
    if !Path::new(PARAMS).exists() {
        return Ok(());
    }
    let params = read_regular(Path::new(PARAMS), MAX_PARAMS)?;
    let Some(forbidding) = forbidding(&params) else {
        return Ok(());
    };
    let target = open(root, Path::new(PARAMS))?;
    if !is_proc(target.as_fd()) {
        return Err(cannot(
            "cover",
            Path::new(PARAMS),
            "it is not the kernel's; the container must have its /proc mounted",
        ));
    }
    cover(root, Path::new(PARAMS), &forbidding, Path::new("/run"))
}

/// The parameters with changes forbidden; None if they are forbidden already.
fn forbidding(params: &[u8]) -> Option<Vec<u8>> {
    const ALLOWED: &[u8] = b"ModifyDeviceFiles: 1";
    let lines = params.split(|b| *b == b'\n');
    lines.clone().any(|l| l == ALLOWED).then(|| {
        let lines = lines.map(|l| {
            if l == ALLOWED {
                b"ModifyDeviceFiles: 0"
            } else {
                l
            }
        });
        lines.collect::<Vec<_>>().join(&b'\n')
    })
}

/// Opens a regular file of the container to be mounted over; refuses links on the path.
fn open(root: &ContainerRoot, path: &Path) -> io::Result<OwnedFd> {
    let fd = root
        .resolve(
            path,
            OFlag::O_PATH | OFlag::O_NOFOLLOW,
            ResolveFlag::RESOLVE_NO_SYMLINKS,
        )
        .map_err(|e| cannot("open", path, e.desc()))?;
    match kind(&fstat(&fd)?) {
        SFlag::S_IFREG => Ok(fd),
        other => Err(cannot(
            "cover",
            path,
            format!("it is {}, not a regular file", name_of(other)),
        )),
    }
}

/// Mounts a file with this content over a regular file of the container, read-only. The file is
/// made in directory `scratch`.
pub fn cover(root: &ContainerRoot, path: &Path, content: &[u8], scratch: &Path) -> io::Result<()> {
    let copy = Copy::new(scratch, content)?;
    let step = |what: &str, e: Errno| cannot(what, path, e.desc());
    let target = open(root, path)?;
    let none = None::<&str>;
    mount(
        Some(&proc_path(copy.file.as_fd())),
        &proc_path(target.as_fd()),
        none,
        MsFlags::MS_BIND,
        none,
    )
    .map_err(|e| step("cover", e))?;
    // The descriptor is still on the file below. The same path must lead to the mount now, unless
    // something was moved.
    let covered = open(root, path)?;
    if FileId::of(&fstat(&covered)?) != FileId::of(&fstat(&copy.file)?) {
        return Err(cannot(
            "cover",
            path,
            "it is another file than a moment ago",
        ));
    }
    let covered = proc_path(covered.as_fd());
    // A bind mount takes its flags only with a remount.
    mount(
        none,
        &covered,
        none,
        FLAGS | MsFlags::MS_REMOUNT | MsFlags::MS_BIND,
        none,
    )
    .map_err(|e| {
        // A file that the container can write is worse than none.
        let undone = umount2(&covered, MntFlags::MNT_DETACH)
            .err()
            .map_or(String::new(), |e| {
                format!("; and it stays mounted: {}", e.desc())
            });
        cannot("make read-only", path, format!("{}{undone}", e.desc()))
    })
}

/// A file whose name is removed when dropped.
struct Copy {
    file: File,
    path: PathBuf,
}

impl Copy {
    fn new(scratch: &Path, content: &[u8]) -> io::Result<Self> {
        let path = scratch.join(format!(
            ".kata-gpu-init-params-{}-{}",
            std::process::id(),
            crate::machine::clock::boottime_ns()
        ));
        let at = |e: io::Error| cannot("write", &path, e);
        let flags = OFlag::O_NOFOLLOW.bits();
        let file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o444)
            .custom_flags(flags)
            .open(&path)
            .map_err(at)?;
        let mut copy = Self { file, path };
        copy.file
            .write_all(content)
            .map_err(|e| cannot("write", &copy.path, e))?;
        Ok(copy)
    }
}

impl Drop for Copy {
    fn drop(&mut self) {
        // A mounted file lives on without a name. If the removal fails, a few bytes stay in a
        // tmpfs.
        let _unused = std::fs::remove_file(&self.path);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_one_line_changes() {
        let params = b"ResmanDebugLevel: 4294967295\nModifyDeviceFiles: 1\nDeviceFileUID: 0\n";
        assert_eq!(
            forbidding(params).unwrap(),
            b"ResmanDebugLevel: 4294967295\nModifyDeviceFiles: 0\nDeviceFileUID: 0\n"
        );
        assert_eq!(forbidding(b"ModifyDeviceFiles: 0\n"), None);
        assert_eq!(forbidding(b"ModifyDeviceFiles: 12\n"), None);
    }
}
