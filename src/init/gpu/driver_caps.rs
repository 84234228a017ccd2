//! The driver's /proc files about its finer-grained devices: MIG instances, the capabilities that
//! open them, and switches.
//!
//! A capability is a file (`gpu0/gi1/access`) with the minor and the mode of its node,
//! `/dev/nvidia-caps/nvidia-cap<minor>`; `mig-minors` lists the minors of all possible ones.
//! Nothing here opens a device or queries a GPU.

use crate::gpu::driver_proc::read_bounded;
use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

/// Longest `mig-minors` that is read; the real one has 109 kB.
const MAX_MIG_MINORS: u64 = 1 << 20;
/// Longest other file; the real ones have three lines.
const MAX_ACCESS: u64 = 4096;
/// Limit of entries in a directory.
pub const MAX_ENTRIES: usize = 4096;
/// Limit of instances on a GPU: the driver has numbers for 15 GPU instances with 8 compute
/// instances each.
const MAX_INSTANCES: usize = 15 * 8;

/// A compute instance of a GPU instance of a GPU, by the driver's numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct MigInstance {
    /// Minor of the GPU.
    pub gpu: u32,
    pub gi: u32,
    pub ci: u32,
}

/// Right to use a device, represented by a file of the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Capability {
    GpuInstance(MigInstance),
    ComputeInstance(MigInstance),
}

impl fmt::Display for Capability {
    /// Name of the capability in `mig-minors`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::GpuInstance(of) => write!(f, "gpu{}/gi{}/access", of.gpu, of.gi),
            Self::ComputeInstance(of) => write!(f, "gpu{}/gi{}/ci{}/access", of.gpu, of.gi, of.ci),
        }
    }
}

impl Capability {
    fn path(self, proc: &Path) -> PathBuf {
        let path = match self {
            Self::GpuInstance(of) => format!("gpu{}/mig/gi{}/access", of.gpu, of.gi),
            Self::ComputeInstance(of) => {
                format!("gpu{}/mig/gi{}/ci{}/access", of.gpu, of.gi, of.ci)
            }
        };
        proc.join("driver/nvidia/capabilities").join(path)
    }
}

impl MigInstance {
    /// Capabilities that a container needs for the instance, besides the GPU's own node.
    pub fn capabilities(self) -> [Capability; 2] {
        [
            Capability::GpuInstance(self),
            Capability::ComputeInstance(self),
        ]
    }
}

/// MIG instances of a GPU below `proc`, in ascending order of GPU instance and compute instance;
/// empty if the GPU is not in MIG mode.
pub fn instances(proc: &Path, gpu: u32) -> Result<Vec<MigInstance>, String> {
    let mig = proc.join(format!("driver/nvidia/capabilities/gpu{gpu}/mig"));
    let mut all = Vec::new();
    for gi in numbered(&mig, "gi")? {
        all.extend(
            numbered(&mig.join(format!("gi{gi}")), "ci")?
                .into_iter()
                .map(|ci| MigInstance { gpu, gi, ci }),
        );
        if all.len() > MAX_INSTANCES {
            return Err(format!(
                "{} has more than {MAX_INSTANCES} instances: this driver's way to list them is \
                    not known",
                mig.display()
            ));
        }
    }
    Ok(all)
}

/// Numbers after a prefix, in ascending order, among the names of a directory that may be missing.
fn numbered(folder: &Path, beginning: &str) -> Result<Vec<u32>, String> {
    let names = names_if_there(folder)?;
    let mut all: Vec<u32> = names
        .iter()
        .filter_map(|name| name.strip_prefix(beginning)?.parse().ok())
        .collect();
    all.sort_unstable();
    Ok(all)
}

/// Names in a directory; empty if the directory is missing.
pub fn names_if_there(folder: &Path) -> Result<Vec<String>, String> {
    match names(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        result => result.map_err(|e| format!("list {}: {e}", folder.display())),
    }
}

/// UTF-8 names in a directory.
pub fn names(folder: &Path) -> io::Result<Vec<String>> {
    let mut all = Vec::new();
    for (number, entry) in std::fs::read_dir(folder)?.enumerate() {
        if number == MAX_ENTRIES {
            return Err(io::Error::other(format!(
                "it has more than {MAX_ENTRIES} entries"
            )));
        }
        all.extend(entry?.file_name().into_string());
    }
    Ok(all)
}

/// Minor and mode of a capability's node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Access {
    pub minor: u32,
    /// Permission bits.
    pub mode: u32,
}

/// Reads the file of a capability below `proc`.
pub fn access(proc: &Path, capability: Capability) -> Result<Access, String> {
    let path = capability.path(proc);
    let text = read_bounded(&path, MAX_ACCESS).map_err(|e| e.to_string())?;
    parse_access(&text).ok_or_else(|| {
        format!(
            "read {}: no \"DeviceFileMinor:\" and \"DeviceFileMode:\" with numbers; this \
            driver's format is not known",
            path.display()
        )
    })
}

/// Parses `Key: value` lines, values in decimal. None without a minor, or without a mode that has
/// permission bits only.
pub fn parse_access(text: &str) -> Option<Access> {
    let value = |key: &str| {
        text.lines()
            .filter_map(|l| l.split_once(':'))
            .find(|(k, _)| k.trim() == key)?
            .1
            .trim()
            .parse::<u32>()
            .ok()
    };
    Some(Access {
        minor: value("DeviceFileMinor")?,
        mode: value("DeviceFileMode").filter(|mode| *mode <= 0o777)?,
    })
}

/// Minors of all possible capabilities, by name; empty if the driver has no such file.
pub fn mig_minors(proc: &Path) -> Result<BTreeMap<String, u32>, String> {
    match read_bounded(&proc.join("driver/nvidia-caps/mig-minors"), MAX_MIG_MINORS) {
        Ok(text) => Ok(parse_mig_minors(&text)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(BTreeMap::new()),
        Err(error) => Err(error.to_string()),
    }
}

/// Parses `mig-minors`: lines of a capability (`gpu0/gi1/access`, `gpu0/gi1/ci0/access`, `config`,
/// `monitor`) and the minor of its node. Lines of another form are skipped.
pub fn parse_mig_minors(text: &str) -> BTreeMap<String, u32> {
    let pair = |line: &str| {
        let (capability, minor) = line.split_once(' ')?;
        Some((capability.to_string(), minor.trim().parse().ok()?))
    };
    text.lines().filter_map(pair).collect()
}

/// Number of the driver's NVSwitches. The driver reports no minors: each switch gets the lowest
/// free one.
pub fn switches(proc: &Path) -> Result<u32, String> {
    let names = names_if_there(&proc.join("driver/nvidia-nvswitch/devices"))?;
    let count = names
        .iter()
        .filter(|name| {
            name.parse::<kata_gpu_wire::pci_address::PciAddress>()
                .is_ok()
        })
        .count();
    Ok(u32::try_from(count).unwrap_or(u32::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn capabilities_are_found_by_their_whole_name() {
        let minors = parse_mig_minors(
            "config 1\nmonitor 2\ngpu0/gi0/access 3\ngpu0/gi0/ci0/access 4\n\ngpu0/gi1/access \
                x\ngpu1/gi0/access 138\n",
        );
        assert_eq!(minors.len(), 5);
        assert_eq!(
            (
                minors.get("gpu0/gi0/ci0/access"),
                minors.get("gpu1/gi0/access"),
                minors.get("gpu0/gi1/access")
            ),
            (Some(&4), Some(&138), None)
        );
    }

    #[test]
    fn access_files_give_a_node_or_nothing() {
        let instance = "DeviceFileMinor: 12\nDeviceFileMode: 292\nDeviceFileModify: 1\n";
        assert_eq!(
            parse_access(instance),
            Some(Access {
                minor: 12,
                mode: 0o444
            })
        );
        for text in [
            "",
            "DeviceFileMinor: 12\n",
            "DeviceFileMode: 292\n",
            "DeviceFileMinor: -1\nDeviceFileMode: 292\n",
            "DeviceFileMinor: 1\nDeviceFileMode: 4095\n",
        ] {
            assert_eq!(parse_access(text), None, "{text:?}");
        }
    }

    #[test]
    fn capabilities_have_the_drivers_names() {
        let [gi, ci] = MigInstance {
            gpu: 3,
            gi: 9,
            ci: 1,
        }
        .capabilities();
        assert_eq!(
            (gi.to_string(), ci.to_string()),
            ("gpu3/gi9/access".into(), "gpu3/gi9/ci1/access".into())
        );
        assert_eq!(
            ci.path(Path::new("/proc")),
            Path::new("/proc/driver/nvidia/capabilities/gpu3/mig/gi9/ci1/access")
        );
    }
}
