//! A container's cgroups, made as the real agent makes them (crate cgroups-rs 0.5): every level
//! anew for each container.

use anyhow::{Context, Result};
use oci_spec::runtime::{LinuxDeviceType, Spec};
use std::fs;
use std::path::{Path, PathBuf};

const ROOT: &str = "/sys/fs/cgroup";
/// Rules of every container in version 1, after everything was denied: default nodes, making nodes
/// of any kind, terminals.
const ALLOWED: [&str; 11] = [
    "c 1:3 rwm",
    "c 1:5 rwm",
    "c 1:7 rwm",
    "c 5:0 rwm",
    "c 1:9 rwm",
    "c 1:8 rwm",
    "c *:* m",
    "b *:* m",
    "c 5:1 rwm",
    "c 136:* rwm",
    "c 5:2 rwm",
];

/// Which of the two versions a guest has.
pub enum Cgroups {
    /// No device rules: version 2 has them as programs, and the real agent sets none.
    Unified,
    /// A hierarchy per controller, with device rules.
    Controllers(Vec<PathBuf>),
}

fn write(path: &Path, text: &str) -> Result<()> {
    fs::write(path, text).with_context(|| format!("write {text} to {}", path.display()))
}

impl Cgroups {
    pub fn of(unified: bool) -> Self {
        if unified {
            return Self::Unified;
        }
        let hierarchies = fs::read_dir(ROOT)
            .into_iter()
            .flatten()
            .flatten()
            .map(|e| e.path());
        Self::Controllers(
            hierarchies
                .filter(|path| path.join("cgroup.procs").exists())
                .collect(),
        )
    }

    /// Makes a cgroup, `/` first, with the levels above it.
    pub fn create(&self, path: &str) -> Result<()> {
        match self {
            Self::Unified => create_unified(path),
            Self::Controllers(all) => all
                .iter()
                .try_for_each(|hierarchy| create_in(hierarchy, path)),
        }
    }

    pub fn attach(&self, path: &str, pid: i32) -> Result<()> {
        for base in self.bases() {
            write(&at(&base, path).join("cgroup.procs"), &pid.to_string())?;
        }
        Ok(())
    }

    /// Sets what kubelet sets for a pod without limits.
    pub fn set(&self, path: &str) -> Result<()> {
        match self {
            Self::Unified => {
                let own = at(Path::new(ROOT), path);
                write(&own.join("cpu.weight"), "1")?;
                let _before = fs::read_to_string(own.join("cpu.max"))?;
                write(&own.join("cpu.max"), "max 100000")?;
                write(&own.join("pids.max"), "max")
            }
            Self::Controllers(hierarchies) => {
                let Some(cpu) = hierarchies.iter().find(|h| h.ends_with("cpu")) else {
                    return Ok(());
                };
                write(&at(cpu, path).join("cpu.shares"), "2")?;
                write(&at(cpu, path).join("cpu.cfs_period_us"), "100000")
            }
        }
    }

    /// Lets the pod and the container have the devices of the spec.
    pub fn allow(&self, paths: &[&str], spec: &Spec) -> Result<()> {
        let Self::Controllers(hierarchies) = self else {
            return Ok(());
        };
        let Some(devices) = hierarchies.iter().find(|h| h.ends_with("devices")) else {
            return Ok(());
        };
        for device in spec
            .linux()
            .as_ref()
            .and_then(|l| l.devices().clone())
            .unwrap_or_default()
        {
            let kind = if device.typ() == LinuxDeviceType::B {
                "b"
            } else {
                "c"
            };
            let rule = format!("{kind} {}:{} rwm", device.major(), device.minor());
            for path in paths.iter().filter(|p| !p.is_empty()) {
                write(&at(devices, path).join("devices.allow"), &rule)?;
            }
        }
        Ok(())
    }

    fn bases(&self) -> Vec<PathBuf> {
        match self {
            Self::Unified => vec![ROOT.into()],
            Self::Controllers(hierarchies) => hierarchies.clone(),
        }
    }
}

fn at(base: &Path, path: &str) -> PathBuf {
    base.join(path.trim_start_matches('/'))
}

/// Switches the controllers of each level on, from the root down, again for each container.
fn create_unified(path: &str) -> Result<()> {
    let controllers = fs::read_to_string(Path::new(ROOT).join("cgroup.controllers"))?;
    let mut level = PathBuf::from(ROOT);
    for name in path.split('/').filter(|n| !n.is_empty()) {
        for controller in controllers.split_whitespace() {
            // A controller that cannot be switched on there is passed over, as in the real one.
            let _unused = fs::write(
                level.join("cgroup.subtree_control"),
                format!("+{controller}"),
            );
        }
        level.push(name);
        if !level.exists() {
            fs::create_dir(&level).with_context(|| format!("make {}", level.display()))?;
        }
    }
    Ok(())
}

fn create_in(hierarchy: &Path, path: &str) -> Result<()> {
    let mut level = hierarchy.to_path_buf();
    for name in path.split('/').filter(|n| !n.is_empty()) {
        let above = level.clone();
        level.push(name);
        if !level.exists() {
            fs::create_dir(&level).with_context(|| format!("make {}", level.display()))?;
        }
        // A cpuset without CPUs takes no process.
        for file in ["cpuset.cpus", "cpuset.mems"] {
            if let Ok(text) = fs::read_to_string(above.join(file)) {
                write(&level.join(file), text.trim())?;
            }
        }
    }
    if hierarchy.ends_with("devices") {
        write(&level.join("devices.deny"), "a *:* rwm")?;
        for rule in ALLOWED {
            write(&level.join("devices.allow"), rule)?;
        }
    }
    Ok(())
}
