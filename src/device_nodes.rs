//! Device nodes: the driver's modules make none, so the init does, as the driver's parameters say, with the links in /dev/char.

use crate::driver_proc::NodeRules;
use nix::sys::stat::{Mode, SFlag, makedev, mknod};
use nix::unistd::{Gid, Uid};
use std::fmt;
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// Minor of the control device.
pub const CONTROL_MINOR: u32 = 255;

/// A character device node, as it is in the guest and as containers get it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Node {
    pub path: PathBuf,
    pub major: u32,
    pub minor: u32,
    /// Permission bits.
    pub mode: u32,
    pub gid: u32,
}

/// A node that could not be made.
#[derive(Debug)]
pub struct NodeError {
    path: PathBuf,
    step: &'static str,
    error: io::Error,
}

impl fmt::Display for NodeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "device node: {} {}: {}", self.step, self.path.display(), self.error)
    }
}

impl std::error::Error for NodeError {}

/// Where nodes go, and how.
#[derive(Clone, Debug)]
pub struct DeviceNodes {
    dev: PathBuf,
    rules: NodeRules,
}

impl DeviceNodes {
    /// Nodes below `dev` (`/dev` in a guest).
    pub fn at(dev: &Path, rules: NodeRules) -> Self {
        Self { dev: dev.to_path_buf(), rules }
    }

    /// `/dev/nvidia<minor>`.
    pub fn gpu(&self, major: u32, minor: u32) -> Result<Node, NodeError> {
        self.make(&format!("nvidia{minor}"), major, minor)
    }

    /// `/dev/nvidiactl`.
    pub fn control(&self, major: u32) -> Result<Node, NodeError> {
        self.make("nvidiactl", major, CONTROL_MINOR)
    }

    /// `/dev/nvidia-uvm` and `/dev/nvidia-uvm-tools`.
    pub fn uvm(&self, major: u32) -> Result<[Node; 2], NodeError> {
        Ok([self.make("nvidia-uvm", major, 0)?, self.make("nvidia-uvm-tools", major, 1)?])
    }

    /// Makes one node and its link. A node of the right number is left as it is; a wrong one (a stale major) is replaced.
    fn make(&self, name: &str, major: u32, minor: u32) -> Result<Node, NodeError> {
        let path = self.dev.join(name);
        let failed = |step, error: io::Error| NodeError { path: path.clone(), step, error };
        let number = makedev(u64::from(major), u64::from(minor));
        match std::fs::symlink_metadata(&path) {
            Ok(meta) if meta.rdev() == number && meta.mode() & nix::libc::S_IFMT == nix::libc::S_IFCHR => {}
            Ok(_) => {
                std::fs::remove_file(&path).map_err(|e| failed("replace", e))?;
                self.create(&path, number).map_err(|e| failed("make", e))?;
            }
            Err(e) if e.kind() == io::ErrorKind::NotFound => self.create(&path, number).map_err(|e| failed("make", e))?,
            Err(e) => return Err(failed("look at", e)),
        }
        self.link(name, major, minor).map_err(|e| failed("link in /dev/char to", e))?;
        Ok(Node { path: Path::new("/dev").join(name), major, minor, mode: self.rules.mode, gid: self.rules.gid })
    }

    fn create(&self, path: &Path, number: u64) -> io::Result<()> {
        mknod(path, SFlag::S_IFCHR, Mode::from_bits_truncate(self.rules.mode), number)?;
        // mknod's mode went through the umask.
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(self.rules.mode))?;
        if (self.rules.uid, self.rules.gid) != (0, 0) {
            nix::unistd::chown(path, Some(Uid::from_raw(self.rules.uid)), Some(Gid::from_raw(self.rules.gid)))?;
        }
        Ok(())
    }

    /// `/dev/char/<major>:<minor>`, by which container runtimes look up a device's name.
    fn link(&self, name: &str, major: u32, minor: u32) -> io::Result<()> {
        let directory = self.dev.join("char");
        std::fs::create_dir_all(&directory)?;
        match std::os::unix::fs::symlink(Path::new("..").join(name), directory.join(format!("{major}:{minor}"))) {
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => Ok(()),
            result => result,
        }
    }
}
