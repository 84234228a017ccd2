//! Devices of a running driver below a root: GPUs with their nodes, displays and MIG instances,
//! shared nodes, and devices of other kinds. Reads /proc, /sys and /dev below that root and opens
//! no device: nothing here initialises a GPU.

use super::schema::{Device as SpecDevice, Edits, Mount, Spec};
use super::spec::{Device, DisplayLink, Entry, Extras, FILE, Instance, Ready, device, node};
use crate::gpu::device_nodes::Node;
use crate::gpu::driver_caps;
use crate::gpu::driver_caps::{Capability, names, names_if_there};
use crate::gpu::driver_proc::{information, majors};
use crate::gpu::pci;
use kata_gpu_wire::pci_address::PciAddress;
use nix::sys::stat::{SFlag, lstat, major, minor};
use std::cell::OnceCell;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Prefixes of display names, and the suffixes of their udev links.
const DISPLAYS: [(&str, &str); 2] = [("card", "card"), ("renderD", "render")];
/// Nodes that every container with a GPU gets, if they exist.
const COMMON: [&str; 4] = [
    "nvidia-modeset",
    "nvidia-uvm",
    "nvidia-uvm-tools",
    "nvidiactl",
];
/// Nodes without which no CUDA program starts.
const NEEDED: [&str; 2] = ["nvidia-uvm", "nvidiactl"];

/// Roots to search.
#[derive(Clone, Debug)]
pub struct Places {
    /// Holds /proc and /sys.
    pub root: PathBuf,
    /// Holds /dev.
    pub dev_root: PathBuf,
}

/// Devices found, and problems in whole sentences with the cure.
#[derive(Debug, Default)]
pub struct Found {
    pub gpus: Vec<Device>,
    pub common: Vec<Node>,
    pub problems: Vec<String>,
}

/// Numbers of all capabilities' nodes.
struct Capabilities {
    minors: Result<BTreeMap<String, u32>, String>,
    /// None: /proc/devices is missing below the root; it may also list none.
    major: Option<Option<u32>>,
}

impl Capabilities {
    fn read(proc: &Path) -> Self {
        Self {
            minors: driver_caps::mig_minors(proc),
            major: majors(proc).ok().map(|majors| majors.caps),
        }
    }
}

/// About a thousand lines, read once there is a MIG instance.
type Caps = OnceCell<Capabilities>;

impl Default for Places {
    /// The root of this machine.
    fn default() -> Self {
        Self {
            root: "/".into(),
            dev_root: "/".into(),
        }
    }
}

impl Places {
    fn dev(&self) -> PathBuf {
        self.dev_root.join("dev")
    }

    /// A character device below /dev; None if the name does not exist.
    fn node(&self, name: &str) -> Result<Option<Node>, String> {
        let path = self.dev().join(name);
        let status = match lstat(&path) {
            Ok(status) => status,
            Err(nix::errno::Errno::ENOENT) => return Ok(None),
            Err(errno) => return Err(format!("look at {}: {}", path.display(), errno.desc())),
        };
        if SFlag::from_bits_truncate(status.st_mode & SFlag::S_IFMT.bits()) != SFlag::S_IFCHR {
            return Err(format!(
                "{} is no character device: remove it, and let the driver's tools make it again",
                path.display()
            ));
        }
        let number = |n: u64| u32::try_from(n).unwrap_or(u32::MAX);
        Ok(Some(Node {
            path: Path::new("/dev").join(name),
            major: number(major(status.st_rdev)),
            minor: number(minor(status.st_rdev)),
            mode: status.st_mode & 0o777,
            gid: status.st_gid,
        }))
    }

    /// Character devices of a directory below /dev, named by one of the beginnings and a number, or
    /// by the beginning alone.
    fn nodes(&self, directory: &str, beginnings: &[&str]) -> Result<Vec<Node>, String> {
        let folder = self.dev().join(directory);
        let mut all = Vec::new();
        for name in names(&folder).map_err(|e| format!("list {}: {e}", folder.display()))? {
            let wanted = beginnings.iter().any(|b| {
                name.strip_prefix(b)
                    .is_some_and(|rest| rest.bytes().all(|c| c.is_ascii_digit()))
            });
            if wanted {
                all.extend(self.node(&if directory.is_empty() {
                    name
                } else {
                    format!("{directory}/{name}")
                })?);
            }
        }
        all.sort_by_key(|node| (node.major, node.minor));
        Ok(all)
    }

    /// All GPUs of the driver, with everything found about them.
    ///
    /// Error: the driver has none, or is not loaded.
    pub fn gpus(&self) -> Result<Found, String> {
        let proc = self.root.join("proc");
        let folder = proc.join("driver/nvidia/gpus");
        let listed = names(&folder).map_err(|e| {
            format!(
                "list {}: {e}: load the driver's module nvidia first",
                folder.display()
            )
        })?;
        let mut addresses: Vec<PciAddress> =
            listed.iter().filter_map(|name| name.parse().ok()).collect();
        addresses.sort_unstable();
        if addresses.is_empty() {
            return Err(format!(
                "{} is empty: the driver has bound no GPU; see its lines in the kernel's log",
                folder.display()
            ));
        }
        let mut found = Found::default();
        let caps = OnceCell::new();
        for (index, address) in addresses.into_iter().enumerate() {
            match self.gpu(&proc, address, &caps, &mut found.problems) {
                Ok(ready) => found.gpus.push(Device {
                    index,
                    address,
                    entry: Entry::Ready(ready),
                }),
                Err(problem) => {
                    found
                        .problems
                        .push(format!("GPU {index} ({address}) is left out: {problem}"));
                    found.gpus.push(Device {
                        index,
                        address,
                        entry: Entry::Absent,
                    });
                }
            }
        }
        for name in COMMON {
            match self.node(name) {
                Ok(Some(node)) => found.common.push(node),
                Ok(None) if NEEDED.contains(&name) => found.problems.push(format!(
                    "{}/{name} is missing: no CUDA program will start; make it (nvidia-modprobe \
                        -u -c 0)",
                    self.dev().display()
                )),
                Ok(None) => {}
                Err(problem) => found.problems.push(problem),
            }
        }
        Ok(found)
    }

    fn gpu(
        &self,
        proc: &Path,
        address: PciAddress,
        caps: &Caps,
        problems: &mut Vec<String>,
    ) -> Result<Ready, String> {
        let information = information(proc, address).map_err(|e| e.to_string())?;
        let name = format!("nvidia{}", information.minor);
        let own = self.node(&name)?.ok_or_else(|| {
            format!(
                "{}/{name} is missing: make it (nvidia-modprobe -c {})",
                self.dev().display(),
                information.minor
            )
        })?;
        let extras = self.read_extras(address, information.minor, caps, problems)?;
        Ok(Ready {
            nodes: vec![own],
            uuid: information.uuid,
            extras,
            ..Ready::default()
        })
    }

    /// Extras of a GPU besides its own node, and the missing ones. The GPU itself is not queried.
    pub fn extras(&self, address: PciAddress, gpu: u32) -> Result<(Extras, Vec<String>), String> {
        let mut problems = Vec::new();
        let extras = self.read_extras(address, gpu, &OnceCell::new(), &mut problems)?;
        Ok((extras, problems))
    }

    fn read_extras(
        &self,
        address: PciAddress,
        gpu: u32,
        caps: &Caps,
        problems: &mut Vec<String>,
    ) -> Result<Extras, String> {
        let mut extras = Extras {
            instances: self.instances(gpu, caps, problems)?,
            ..Extras::default()
        };
        // No directory: no display driver.
        let function = pci::function(&self.root.join("sys"), address);
        let mut names = names_if_there(&function.join("drm"))?;
        names.sort();
        for (beginning, kind) in DISPLAYS {
            let numbered = |name: &&String| {
                name.strip_prefix(beginning)
                    .is_some_and(|n| !n.is_empty() && n.bytes().all(|c| c.is_ascii_digit()))
            };
            let mut linked = false;
            for name in names.iter().filter(numbered) {
                let Some(node) = self.node(&format!("dri/{name}"))? else {
                    let (dev, problem) = (
                        self.dev(),
                        "the kernel lists it: containers get this GPU without it",
                    );
                    problems.push(format!(
                        "{}/dri/{name} of GPU {address} is missing, and {problem}",
                        dev.display()
                    ));
                    continue;
                };
                extras.displays.push(node);
                // Link as udev names it; a function has one of each kind.
                if !std::mem::replace(&mut linked, true) {
                    let link = format!("/dev/dri/by-path/pci-{address}-{kind}");
                    extras.links.push(DisplayLink {
                        link,
                        target: format!("../{name}"),
                    });
                }
            }
        }
        Ok(extras)
    }

    /// The MIG instances of a GPU. One without its nodes costs no other one.
    fn instances(
        &self,
        gpu: u32,
        caps: &Caps,
        problems: &mut Vec<String>,
    ) -> Result<Vec<Instance>, String> {
        let proc = self.root.join("proc");
        let mut all = Vec::new();
        for id in driver_caps::instances(&proc, gpu)? {
            let caps = caps.get_or_init(|| Capabilities::read(&proc));
            let [gi, ci] = id.capabilities().map(|of| self.capability(of, caps));
            let nodes = gi.and_then(|gi| Ok([gi, ci?]));
            if let Err(problem) = &nodes {
                problems.push(format!(
                    "MIG instance {}/{} of GPU minor {gpu} is left out: {problem}",
                    id.gi, id.ci
                ));
            }
            let nodes = nodes.ok();
            all.push(Instance { id, nodes });
        }
        Ok(all)
    }

    /// The node of a capability: this driver's, not one that an earlier load has left.
    fn capability(&self, of: Capability, caps: &Capabilities) -> Result<Node, String> {
        let minors = caps.minors.as_ref().map_err(String::clone)?;
        let minor = minors
            .get(&of.to_string())
            .ok_or_else(|| format!("mig-minors has no {of}"))?;
        let name = format!("nvidia-caps/nvidia-cap{minor}");
        let wrong = |what: &str| {
            let path = self.dev().join(&name);
            format!(
                "{} {what}: make it (nvidia-modprobe -f {of})",
                path.display()
            )
        };
        match self.node(&name)? {
            None => Err(wrong("is missing")),
            Some(node)
                if node.minor != *minor
                    || caps.major.is_some_and(|major| major != Some(node.major)) =>
            {
                Err(wrong(&format!(
                    "is another device ({}:{})",
                    node.major, node.minor
                )))
            }
            Some(node) => Ok(node),
        }
    }
}

/// A kind of devices besides GPUs.
pub struct Other {
    /// Name in `--mode`.
    pub mode: &'static str,
    kind: &'static str,
    /// Directory below /dev, and the beginnings of the names there.
    nodes: &'static [(&'static str, &'static [&'static str])],
    /// Files mounted with the nodes, if they exist.
    files: &'static [&'static str],
    /// Lists each device by its number, besides `all`.
    each: bool,
    /// Action that creates these devices.
    cure: &'static str,
}

/// Devices of the incumbent's other modes.
pub const OTHERS: &[Other] = &[
    Other {
        mode: "gds",
        kind: "nvidia.com/gds",
        nodes: &[("", &["nvidia-fs"])],
        files: &["/etc/cufile.json", "/run/udev"],
        each: false,
        cure: "load the module nvidia-fs",
    },
    Other {
        mode: "mofed",
        kind: "nvidia.com/mofed",
        nodes: &[("infiniband", &["uverbs", "rdma_cm"])],
        files: &[],
        each: false,
        cure: "load the modules of the network driver",
    },
    Other {
        mode: "nvswitch",
        kind: "nvidia.com/nvswitch",
        nodes: &[("", &["nvidia-nvswitchctl", "nvidia-nvswitch"])],
        files: &[],
        each: false,
        cure: "are there switches in this guest, and has the driver made their nodes?",
    },
    Other {
        mode: "gdrcopy",
        kind: "nvidia.com/gdrcopy",
        nodes: &[("", &["gdrdrv"])],
        files: &[],
        each: false,
        cure: "load the module gdrdrv",
    },
    Other {
        mode: "imex",
        kind: "nvidia.com/imex-channel",
        nodes: &[("nvidia-caps-imex-channels", &["channel"])],
        files: &[],
        each: true,
        cure: "make them (the driver's NVreg_CreateImexChannel0=1, or nvidia-modprobe -i)",
    },
    Other {
        mode: "management",
        kind: "management.nvidia.com/gpu",
        nodes: &[
            (
                "",
                &[
                    "nvidiactl",
                    "nvidia-modeset",
                    "nvidia-uvm",
                    "nvidia-uvm-tools",
                    "nvidia",
                    "nvidia-nvswitchctl",
                    "nvidia-nvswitch",
                ],
            ),
            ("nvidia-caps", &["nvidia-cap"]),
            ("nvidia-caps-imex-channels", &["channel"]),
        ],
        files: &[],
        each: false,
        cure: "load the driver's modules",
    },
];

impl Other {
    /// Nodes of this kind; none if there is no such device.
    pub fn find(&self, places: &Places) -> Result<Vec<Node>, String> {
        let mut nodes = Vec::new();
        for (directory, beginnings) in self.nodes {
            match places.nodes(directory, beginnings) {
                Ok(some) => nodes.extend(some),
                // A missing directory is no error: not every one has to exist.
                Err(_) if !places.dev().join(directory).is_dir() => {}
                Err(problem) => return Err(problem),
            }
        }
        Ok(nodes)
    }

    /// Spec of this kind: `all`, and each device where numbers mean something. `common` holds
    /// further edits for every container that gets such a device.
    ///
    /// Error: there is no such device.
    pub fn spec(&self, places: &Places, common: Edits) -> Result<Spec, String> {
        let nodes = self.find(places)?;
        if nodes.is_empty() {
            let (directory, beginnings) = self.nodes.first().copied().unwrap_or_default();
            let folder = places.dev().join(directory);
            return Err(format!(
                "{} has no {}*: {}",
                folder.display(),
                beginnings.first().unwrap_or(&""),
                self.cure
            ));
        }
        Ok(self.spec_of(&nodes, places, common))
    }

    /// The spec for these nodes; there must be at least one.
    pub fn spec_of(&self, nodes: &[Node], places: &Places, common: Edits) -> Spec {
        let mut devices: Vec<SpecDevice> = Vec::new();
        if self.each {
            devices.extend(
                nodes
                    .iter()
                    .map(|n| device(n.minor.to_string(), vec![node(n)], vec![])),
            );
        }
        devices.push(device(
            "all".into(),
            nodes.iter().map(node).collect(),
            vec![],
        ));
        let mut edits = common;
        let there = self
            .files
            .iter()
            .filter(|path| places.root.join(path.trim_start_matches('/')).exists());
        edits.mounts.extend(there.map(|path| Mount {
            host_path: (*path).into(),
            container_path: (*path).into(),
            options: FILE,
        }));
        Spec::new(self.kind, devices, edits)
    }
}
