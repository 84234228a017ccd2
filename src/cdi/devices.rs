//! What a running driver has in a root: GPUs with their nodes, displays and MIG instances, the nodes they share, and devices of other kinds. Reads /proc, /sys
//! and /dev below that root and opens no device: nothing here initialises a GPU.

use super::schema::{Device as SpecDevice, Edits, Mount, Spec};
use super::spec::{Device, Entry, FILE, Instance, Ready, device, node};
use crate::device_nodes::Node;
use crate::driver_proc::{self, information};
use crate::pci::PciAddress;
use nix::sys::stat::{SFlag, lstat, major, minor};
use std::cell::OnceCell;
use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

/// Longest `mig-minors` that is read; the real one has about 60 kB.
const MAX_MIG_MINORS: u64 = 1 << 20;
/// Most entries of a directory.
const MAX_ENTRIES: usize = 4096;
/// Nodes that every container with a GPU gets, as far as they are there.
const COMMON: [&str; 4] = ["nvidia-modeset", "nvidia-uvm", "nvidia-uvm-tools", "nvidiactl"];
/// Without these no CUDA program starts.
const NEEDED: [&str; 2] = ["nvidia-uvm", "nvidiactl"];

/// Where to look.
#[derive(Clone, Debug)]
pub struct Places {
    /// Has /proc and /sys.
    pub root: PathBuf,
    /// Has /dev.
    pub dev_root: PathBuf,
}

/// What is there, and what is not, in whole sentences with the cure.
#[derive(Debug, Default)]
pub struct Found {
    pub gpus: Vec<Device>,
    pub common: Vec<Node>,
    pub problems: Vec<String>,
}

/// The minors of all capabilities: about a thousand lines, read once there is a MIG instance.
type Caps = OnceCell<Result<BTreeMap<String, u32>, String>>;

impl Places {
    fn dev(&self) -> PathBuf {
        self.dev_root.join("dev")
    }

    /// A character device below /dev. None where there is nothing of that name.
    fn node(&self, name: &str) -> Result<Option<Node>, String> {
        let path = self.dev().join(name);
        let status = match lstat(&path) {
            Ok(status) => status,
            Err(nix::errno::Errno::ENOENT) => return Ok(None),
            Err(errno) => return Err(format!("look at {}: {}", path.display(), errno.desc())),
        };
        if SFlag::from_bits_truncate(status.st_mode & SFlag::S_IFMT.bits()) != SFlag::S_IFCHR {
            return Err(format!("{} is no character device: remove it, and let the driver's tools make it again", path.display()));
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

    /// The character devices of a directory below /dev whose names begin so and end in a number, or have nothing after that beginning.
    fn nodes(&self, directory: &str, beginnings: &[&str]) -> Result<Vec<Node>, String> {
        let folder = self.dev().join(directory);
        let mut all = Vec::new();
        for name in names(&folder).map_err(|e| format!("list {}: {e}", folder.display()))? {
            let wanted = beginnings.iter().any(|b| name.strip_prefix(b).is_some_and(|rest| rest.bytes().all(|c| c.is_ascii_digit())));
            if wanted {
                all.extend(self.node(&if directory.is_empty() { name } else { format!("{directory}/{name}") })?);
            }
        }
        all.sort_by_key(|node| (node.major, node.minor));
        Ok(all)
    }

    /// Everything about the GPUs that the driver has.
    ///
    /// Error: the driver has none, or is not loaded.
    pub fn gpus(&self) -> Result<Found, String> {
        let proc = self.root.join("proc");
        let folder = proc.join("driver/nvidia/gpus");
        let listed = names(&folder).map_err(|e| format!("list {}: {e}: load the driver's module nvidia first", folder.display()))?;
        let mut addresses: Vec<PciAddress> = listed.iter().filter_map(|name| name.parse().ok()).collect();
        addresses.sort_unstable();
        if addresses.is_empty() {
            return Err(format!("{} is empty: the driver has bound no GPU; its words in the kernel's log say why", folder.display()));
        }
        let mut found = Found::default();
        let caps = OnceCell::new();
        for (index, address) in addresses.into_iter().enumerate() {
            match self.gpu(&proc, address, &caps) {
                Ok(ready) => found.gpus.push(Device { index, address, entry: Entry::Ready(ready) }),
                Err(problem) => {
                    found.problems.push(format!("GPU {index} ({address}) is left out: {problem}"));
                    found.gpus.push(Device { index, address, entry: Entry::Failed });
                }
            }
        }
        for name in COMMON {
            match self.node(name) {
                Ok(Some(node)) => found.common.push(node),
                Ok(None) if NEEDED.contains(&name) => found.problems.push(format!(
                    "{}/{name} is missing: no CUDA program will start; make it (nvidia-modprobe -u -c 0)",
                    self.dev().display()
                )),
                Ok(None) => {}
                Err(problem) => found.problems.push(problem),
            }
        }
        Ok(found)
    }

    fn gpu(&self, proc: &Path, address: PciAddress, caps: &Caps) -> Result<Ready, String> {
        let information = information(proc, address).map_err(|e| e.to_string())?;
        let name = format!("nvidia{}", information.minor);
        let own = self
            .node(&name)?
            .ok_or_else(|| format!("{}/{name} is missing: make it (nvidia-modprobe -c {})", self.dev().display(), information.minor))?;
        let mut nodes = vec![own];
        let drm = self.root.join("sys/bus/pci/devices").join(address.to_string()).join("drm");
        // No directory: no display driver.
        let mut displays = names_if_there(&drm)?;
        displays.sort();
        for name in displays.iter().filter(|n| n.starts_with("card") || n.starts_with("renderD")) {
            nodes.extend(self.node(&format!("dri/{name}"))?);
        }
        Ok(Ready { nodes, uuid: information.uuid, instances: self.instances(information.minor, caps)? })
    }

    fn mig_minors(&self) -> Result<BTreeMap<String, u32>, String> {
        let path = self.root.join("proc/driver/nvidia-caps/mig-minors");
        match driver_proc::read_bounded(&path, MAX_MIG_MINORS) {
            Ok(text) => Ok(driver_proc::parse_mig_minors(&text)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(BTreeMap::new()),
            Err(error) => Err(error.to_string()),
        }
    }

    /// The MIG instances of a GPU, in ascending order of GPU instance and compute instance.
    fn instances(&self, gpu: u32, caps: &Caps) -> Result<Vec<Instance>, String> {
        let mig = self.root.join(format!("proc/driver/nvidia/capabilities/gpu{gpu}/mig"));
        let mut all = Vec::new();
        for gi in numbered(&mig, "gi")? {
            for ci in numbered(&mig.join(format!("gi{gi}")), "ci")? {
                let caps = caps.get_or_init(|| self.mig_minors()).as_ref().map_err(String::clone)?;
                let nodes = [format!("gpu{gpu}/gi{gi}/access"), format!("gpu{gpu}/gi{gi}/ci{ci}/access")].map(|capability| {
                    let cap = caps.get(&capability).ok_or_else(|| format!("mig-minors has no {capability}"))?;
                    let name = format!("nvidia-caps/nvidia-cap{cap}");
                    self.node(&name)?
                        .ok_or_else(|| format!("{}/{name} is missing: make it (nvidia-modprobe -f {capability})", self.dev().display()))
                });
                all.push(Instance { nodes: nodes.into_iter().collect::<Result<_, _>>()? });
            }
        }
        Ok(all)
    }
}

/// The numbers after a beginning, among the names of a directory that may be missing.
fn numbered(folder: &Path, beginning: &str) -> Result<Vec<u32>, String> {
    let names = names_if_there(folder)?;
    let mut all: Vec<u32> = names.iter().filter_map(|name| name.strip_prefix(beginning)?.parse().ok()).collect();
    all.sort_unstable();
    Ok(all)
}

/// The names in a directory; none where it is not there.
fn names_if_there(folder: &Path) -> Result<Vec<String>, String> {
    match names(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        result => result.map_err(|e| format!("list {}: {e}", folder.display())),
    }
}

/// The names in a directory, as far as they are text.
fn names(folder: &Path) -> io::Result<Vec<String>> {
    let mut all = Vec::new();
    for (number, entry) in std::fs::read_dir(folder)?.enumerate() {
        if number == MAX_ENTRIES {
            return Err(io::Error::other(format!("it has more than {MAX_ENTRIES} entries")));
        }
        all.extend(entry?.file_name().into_string());
    }
    Ok(all)
}

/// A kind of devices beside GPUs.
pub struct Other {
    /// What `--mode` calls it.
    pub mode: &'static str,
    kind: &'static str,
    /// Directory below /dev, and the beginnings of the names there.
    nodes: &'static [(&'static str, &'static [&'static str])],
    /// Files that go with them, as far as they are there.
    files: &'static [&'static str],
    /// Each device by its number, and not only all of them.
    each: bool,
    /// What makes these devices.
    cure: &'static str,
}

/// Those of the incumbent's other modes.
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
            ("", &["nvidiactl", "nvidia-modeset", "nvidia-uvm", "nvidia-uvm-tools", "nvidia", "nvidia-nvswitchctl", "nvidia-nvswitch"]),
            ("nvidia-caps", &["nvidia-cap"]),
            ("nvidia-caps-imex-channels", &["channel"]),
        ],
        files: &[],
        each: false,
        cure: "load the driver's modules",
    },
];

impl Other {
    /// Its spec: `all`, and each device where that means something. `common` is what every container of it gets beside.
    ///
    /// Error: there is no such device.
    pub fn spec(&self, places: &Places, common: Edits) -> Result<Spec, String> {
        let mut nodes = Vec::new();
        for (directory, beginnings) in self.nodes {
            match places.nodes(directory, beginnings) {
                Ok(some) => nodes.extend(some),
                // Not each of them has to be there.
                Err(_) if !places.dev().join(directory).is_dir() => {}
                Err(problem) => return Err(problem),
            }
        }
        if nodes.is_empty() {
            let (directory, beginnings) = self.nodes.first().copied().unwrap_or_default();
            let folder = places.dev().join(directory);
            return Err(format!("{} has no {}*: {}", folder.display(), beginnings.first().unwrap_or(&""), self.cure));
        }
        let mut devices: Vec<SpecDevice> = Vec::new();
        if self.each {
            devices.extend(nodes.iter().map(|n| device(n.minor.to_string(), vec![node(n)])));
        }
        devices.push(device("all".into(), nodes.iter().map(node).collect()));
        let mut edits = common;
        let there = self.files.iter().filter(|path| places.root.join(path.trim_start_matches('/')).exists());
        edits.mounts.extend(there.map(|path| Mount { host_path: (*path).into(), container_path: (*path).into(), options: FILE }));
        Ok(Spec::new(self.kind, devices, edits))
    }
}
