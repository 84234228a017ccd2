//! Device nodes: the driver's modules make none, so the init makes them by the driver's parameters,
//! with the links in /dev/char.

use crate::gpu::driver_caps;
use crate::gpu::driver_caps::Access;
use crate::gpu::driver_proc::{NodeRules, majors, node_rules};
use nix::sys::stat::{Mode, SFlag, makedev, mknod};
use nix::unistd::{Gid, Uid};
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// Minor of the control devices of GPUs and of switches.
pub const CONTROL_MINOR: u32 = 255;

/// A character device node, in the guest and in containers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Node {
    pub path: PathBuf,
    pub major: u32,
    pub minor: u32,
    /// Permission bits.
    pub mode: u32,
    pub gid: u32,
}

/// Directory of the nodes, and their owner and mode.
#[derive(Clone, Debug)]
pub struct DeviceNodes {
    dev: PathBuf,
    rules: NodeRules,
}

impl DeviceNodes {
    /// Nodes of this guest, by its driver's rules.
    pub fn of_guest() -> Self {
        Self::at(Path::new("/dev"), node_rules(Path::new("/proc")))
    }

    /// Nodes below `dev` (`/dev` in a guest).
    pub fn at(dev: &Path, rules: NodeRules) -> Self {
        Self {
            dev: dev.to_path_buf(),
            rules,
        }
    }

    /// `/dev/nvidia<minor>`.
    pub fn gpu(&self, major: u32, minor: u32) -> Result<Node, String> {
        self.make(&format!("nvidia{minor}"), major, minor)
    }

    /// `/dev/nvidiactl`.
    pub fn control(&self, major: u32) -> Result<Node, String> {
        self.make("nvidiactl", major, CONTROL_MINOR)
    }

    /// `/dev/nvidia-uvm` and `/dev/nvidia-uvm-tools`.
    pub fn uvm(&self, major: u32) -> Result<[Node; 2], String> {
        Ok([
            self.make("nvidia-uvm", major, 0)?,
            self.make("nvidia-uvm-tools", major, 1)?,
        ])
    }

    /// `/dev/nvidia-caps/nvidia-cap<minor>`, with the capability's mode.
    pub fn capability(&self, major: u32, access: Access) -> Result<Node, String> {
        let rules = NodeRules {
            mode: access.mode,
            ..self.rules
        };
        Self {
            dev: self.dev.clone(),
            rules,
        }
        .make(
            &format!("nvidia-caps/nvidia-cap{}", access.minor),
            major,
            access.minor,
        )
    }

    /// `/dev/nvidia-caps-imex-channels/channel<n>`.
    pub fn imex_channel(&self, major: u32, channel: u32) -> Result<Node, String> {
        self.make(
            &format!("nvidia-caps-imex-channels/channel{channel}"),
            major,
            channel,
        )
    }

    /// `/dev/nvidia-nvswitchctl` and `/dev/nvidia-nvswitch<n>` for `count` switches.
    pub fn switches(&self, major: u32, count: u32) -> Result<Vec<Node>, String> {
        let control = self.make("nvidia-nvswitchctl", major, CONTROL_MINOR);
        [control]
            .into_iter()
            .chain((0..count).map(|n| self.make(&format!("nvidia-nvswitch{n}"), major, n)))
            .collect()
    }

    /// `/dev/nvidia-nvlink`.
    pub fn nvlink(&self, major: u32) -> Result<Node, String> {
        self.make("nvidia-nvlink", major, 0)
    }

    /// Makes one node and its link. A node with the right number stays; a wrong one (a stale major)
    /// is replaced.
    fn make(&self, name: &str, major: u32, minor: u32) -> Result<Node, String> {
        let path = self.dev.join(name);
        let failed =
            |step, error: io::Error| format!("device node: {step} {}: {error}", path.display());
        let number = makedev(u64::from(major), u64::from(minor));
        if let Some(directory) = path.parent() {
            std::fs::create_dir_all(directory).map_err(|e| failed("make the directory of", e))?;
        }
        match std::fs::symlink_metadata(&path) {
            Ok(meta)
                if meta.rdev() == number
                    && meta.mode() & nix::libc::S_IFMT == nix::libc::S_IFCHR => {}
            Ok(_) => {
                std::fs::remove_file(&path).map_err(|e| failed("replace", e))?;
                self.create(&path, number).map_err(|e| failed("make", e))?;
            }
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                self.create(&path, number).map_err(|e| failed("make", e))?
            }
            Err(e) => return Err(failed("look at", e)),
        }
        self.link(name, major, minor)
            .map_err(|e| failed("link in /dev/char to", e))?;
        Ok(Node {
            path: Path::new("/dev").join(name),
            major,
            minor,
            mode: self.rules.mode,
            gid: self.rules.gid,
        })
    }

    fn create(&self, path: &Path, number: u64) -> io::Result<()> {
        mknod(
            path,
            SFlag::S_IFCHR,
            Mode::from_bits_truncate(self.rules.mode),
            number,
        )?;
        // mknod applied the umask to the mode.
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(self.rules.mode))?;
        if (self.rules.uid, self.rules.gid) != (0, 0) {
            nix::unistd::chown(
                path,
                Some(Uid::from_raw(self.rules.uid)),
                Some(Gid::from_raw(self.rules.gid)),
            )?;
        }
        Ok(())
    }

    /// `/dev/char/<major>:<minor>`, by which container runtimes look up a device's name.
    fn link(&self, name: &str, major: u32, minor: u32) -> io::Result<()> {
        let directory = self.dev.join("char");
        std::fs::create_dir_all(&directory)?;
        match std::os::unix::fs::symlink(
            Path::new("..").join(name),
            directory.join(format!("{major}:{minor}")),
        ) {
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => Ok(()),
            result => result,
        }
    }
}

/// Makes the nodes that fabric manager opens besides those of GPUs, if the driver has switches:
/// nodes of switches, of NVLink and of the control device.
pub fn make_for_switches(proc: &Path, dev: &Path) -> Result<(), String> {
    let count = driver_caps::switches(proc)?;
    if count == 0 {
        return Ok(());
    }
    let at = |why: String| format!("make the nodes of {count} switches: {why}");
    let majors = majors(proc).map_err(|e| at(e.to_string()))?;
    let switch = majors
        .nvswitch
        .ok_or_else(|| at("/proc/devices has no \"nvidia-nvswitch\"".into()))?;
    let nodes = DeviceNodes::at(dev, node_rules(proc));
    let others = [
        majors.nvidia.map(|major| nodes.control(major)),
        majors.nvlink.map(|major| nodes.nvlink(major)),
    ];
    let others: Result<Vec<Node>, String> = others.into_iter().flatten().collect();
    others
        .and_then(|_| nodes.switches(switch, count))
        .map(drop)
        .map_err(at)
}

#[cfg(test)]
mod tests {
    use super::*;
    use kata_gpu_test_support::temp_dir;
    use std::os::unix::fs::FileTypeExt;

    #[test]
    fn capabilities_channels_and_switches_get_their_nodes() {
        if !nix::unistd::geteuid().is_root() {
            return eprintln!("skipped: not root, which device nodes need");
        }
        let folder = temp_dir();
        let dev = folder.path();
        let nodes = DeviceNodes::at(
            dev,
            NodeRules {
                uid: 0,
                gid: 0,
                mode: 0o660,
            },
        );
        let cap = nodes
            .capability(
                235,
                Access {
                    minor: 12,
                    mode: 0o444,
                },
            )
            .unwrap();
        let channel = nodes.imex_channel(236, 3).unwrap();
        let switches = nodes.switches(237, 2).unwrap();
        for node in [&cap, &channel].into_iter().chain(&switches) {
            let meta = std::fs::symlink_metadata(dev.join(node.path.strip_prefix("/dev").unwrap()))
                .unwrap();
            let number = makedev(u64::from(node.major), u64::from(node.minor));
            assert!(
                meta.file_type().is_char_device()
                    && (meta.rdev(), meta.mode() & 0o777) == (number, node.mode),
                "{node:?}"
            );
            let link = dev.join(format!("char/{}:{}", node.major, node.minor));
            assert_eq!(std::fs::metadata(link).unwrap().rdev(), number);
        }
        let listed: Vec<(&str, u32, u32)> = [&cap, &channel]
            .into_iter()
            .chain(&switches)
            .map(|n| (n.path.to_str().unwrap(), n.minor, n.mode))
            .collect();
        assert_eq!(
            listed,
            [
                ("/dev/nvidia-caps/nvidia-cap12", 12, 0o444),
                ("/dev/nvidia-caps-imex-channels/channel3", 3, 0o660),
                ("/dev/nvidia-nvswitchctl", 255, 0o660),
                ("/dev/nvidia-nvswitch0", 0, 0o660),
                ("/dev/nvidia-nvswitch1", 1, 0o660)
            ]
        );
        // A stale major is replaced.
        assert_eq!(nodes.imex_channel(240, 3).unwrap().major, 240);
    }
}
