//! Files of the driver for a container, where they are looked for, and what could not be looked at.

use serde::{Deserialize, Serialize};
use std::fmt::Display;
use std::path::{Path, PathBuf};

/// Limit of problems that are kept.
const MAX_PROBLEMS: usize = 32;

/// Roots of a scan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Roots {
    /// The guest's root, as this process sees it. Nothing outside is read: links in it are followed
    /// as if it were `/`.
    pub root: PathBuf,
    /// The root that the driver's user space was installed into, as the guest sees it: `/`,
    /// `/run/kata-extensions/gpu`, `/run/nvidia/driver`.
    pub driver_root: PathBuf,
    /// The root with the sockets of services, as the guest sees it. The guest's own root is
    /// searched, too.
    pub dev_root: PathBuf,
}

impl Default for Roots {
    /// The roots of this machine.
    fn default() -> Self {
        Self {
            root: "/".into(),
            driver_root: "/".into(),
            dev_root: "/".into(),
        }
    }
}

/// Files for a container. Paths hold no link, no `..` and nothing that a spec or a hook's argument
/// would have to quote.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DriverFiles {
    /// Version that module and libraries agree on. The choice of CUDA's compatibility libraries in
    /// a container depends on it.
    pub version: String,
    /// Path in a container.
    pub libcuda_directory: Option<PathBuf>,
    /// Paths in a container for its ld.so.cache; 64-bit ones come first.
    pub library_directories: Vec<PathBuf>,
    /// In ascending order of container path, so that parents come first.
    pub mounts: Vec<Mount>,
    /// In ascending order of path. No link has a mount's path.
    pub links: Vec<Link>,
    /// Paths left out because they could not be examined, in whole sentences; empty for a sound
    /// root.
    #[serde(skip)]
    pub problems: Vec<String>,
}

/// A file of the guest in a container.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Mount {
    /// Path in the guest, with the driver root.
    pub host_path: PathBuf,
    /// Path in the container, without the driver root.
    pub container_path: PathBuf,
    pub kind: Kind,
}

/// Kind of a mount.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// A regular file.
    File,
    /// A service's socket, or the directory of the Multi-Process Service's pipes.
    Socket,
}

/// A link that a container needs.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Link {
    /// Path of the link in the container.
    pub link: PathBuf,
    /// Target, relative to the link's directory.
    pub target: String,
    /// File at the end of the link, as the guest sees it; mounting it at the link's path works as
    /// well.
    pub file: PathBuf,
}

/// Paths that could not be examined.
#[derive(Default)]
pub struct Problems(pub Vec<String>);

impl Problems {
    pub fn add(&mut self, path: &Path, what: impl Display) {
        if self.0.len() < MAX_PROBLEMS {
            self.0.push(format!(
                "{}: {what}",
                path.display().to_string().escape_debug()
            ));
        }
    }
}

/// Files that nearly every container with a GPU uses: names, or their beginnings before a dot.
const EXPECTED: [&str; 3] = ["nvidia-smi", "libcuda.so", "libnvidia-ml.so"];

impl DriverFiles {
    /// Expected files that containers do not get: no fault, but seldom intended.
    pub fn absent(&self) -> Vec<&'static str> {
        let is = |path: &Path, expected: &str| {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            let rest = name.strip_prefix(expected);
            rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
        };
        let there = |name: &&str| self.mounts.iter().any(|m| is(&m.container_path, name));
        EXPECTED.into_iter().filter(|name| !there(name)).collect()
    }

    /// The driver's libraries, as the guest sees them.
    pub fn libraries(&self) -> Vec<PathBuf> {
        let directories = &self.library_directories;
        let is_library = |m: &&Mount| {
            directories
                .iter()
                .any(|d| m.container_path.parent() == Some(d))
        };
        let libraries = self.mounts.iter().filter(is_library);
        libraries.map(|m| m.host_path.clone()).collect()
    }

    /// Replaces the sockets.
    pub fn set_sockets(&mut self, sockets: Vec<Mount>) {
        self.mounts.retain(|mount| mount.kind == Kind::File);
        self.mounts.extend(sockets);
        self.order();
    }

    pub fn order(&mut self) {
        self.mounts
            .sort_by(|a, b| a.container_path.cmp(&b.container_path));
        self.mounts
            .dedup_by(|b, a| a.container_path == b.container_path);
        self.links.retain(|link| {
            self.mounts
                .binary_search_by(|m| m.container_path.cmp(&link.link))
                .is_err()
        });
    }
}
