//! Files found by name: programs, configurations, X modules, firmware, sockets. Tables list the
//! names and the directories to search.

use super::files::{Kind, Link, Mount, Problems, Roots};
use super::tree::{Found, NOT_PLAIN, Places, below, plain_name, plain_path};
use nix::sys::stat::SFlag;
use std::collections::HashSet;
use std::path::{Path, PathBuf};

/// Programs for containers.
const PROGRAMS: &[&str] = &[
    "nvidia-smi",
    "nvidia-debugdump",
    "nvidia-persistenced",
    "nvidia-cuda-mps-control",
    "nvidia-cuda-mps-server",
    "nvidia-imex",
    "nvidia-imex-ctl",
    "nvidia-xconfig",
];
/// Directories of programs; the first that has one counts.
const PROGRAM_DIRECTORIES: &[&str] = &[
    "/usr/local/sbin",
    "/usr/local/bin",
    "/usr/sbin",
    "/usr/bin",
    "/sbin",
    "/bin",
];

/// Configurations: path in the directories below, and the directory in which a container's loaders
/// read them.
const CONFIGS: &[(&str, &str)] = &[
    ("glvnd/egl_vendor.d/10_nvidia.json", "/usr/share"),
    (
        "egl/egl_external_platform.d/09_nvidia_wayland2.json",
        "/usr/share",
    ),
    (
        "egl/egl_external_platform.d/10_nvidia_wayland.json",
        "/usr/share",
    ),
    (
        "egl/egl_external_platform.d/15_nvidia_gbm.json",
        "/usr/share",
    ),
    (
        "egl/egl_external_platform.d/20_nvidia_xcb.json",
        "/usr/share",
    ),
    (
        "egl/egl_external_platform.d/20_nvidia_xlib.json",
        "/usr/share",
    ),
    ("nvidia/nvoptix.bin", "/usr/share"),
    ("X11/xorg.conf.d/10-nvidia.conf", "/usr/share"),
    ("X11/xorg.conf.d/nvidia-drm-outputclass.conf", "/usr/share"),
    ("OpenCL/vendors/nvidia.icd", "/etc"),
    ("vulkan/icd.d/nvidia_icd.json", "/etc"),
    // RPM packages: one per architecture.
    ("vulkan/icd.d/nvidia_icd.x86_64.json", "/etc"),
    ("vulkan/icd.d/nvidia_icd.aarch64.json", "/etc"),
    ("vulkan/icd.d/nvidia_layers.json", "/etc"),
    ("vulkan/implicit_layer.d/nvidia_layers.json", "/etc"),
];
/// Directories of configurations; the last is for drivers installed into a directory of their own.
const CONFIG_DIRECTORIES: &[&str] = &["/etc", "/usr/local/share", "/usr/share", "/"];

/// Directories of X modules.
const X_DIRECTORIES: &[&str] = &[
    "/usr/lib/x86_64-linux-gnu/nvidia/xorg",
    "/usr/lib/aarch64-linux-gnu/nvidia/xorg",
    "/usr/lib64/nvidia/xorg",
    "/usr/lib/xorg/modules/drivers",
    "/usr/lib/xorg/modules/extensions",
    "/usr/lib/xorg/modules/updates/drivers",
    "/usr/lib/xorg/modules/updates/extensions",
    "/usr/lib64/xorg/modules/drivers",
    "/usr/lib64/xorg/modules/extensions",
    "/usr/lib64/xorg/modules/updates/drivers",
    "/usr/lib64/xorg/modules/updates/extensions",
    // Debian
    "/usr/lib/nvidia",
    "/usr/X11R6/lib64/modules/drivers",
    "/usr/X11R6/lib64/modules/extensions",
    "/usr/X11R6/lib/modules/drivers",
    "/usr/X11R6/lib/modules/extensions",
];

/// The kernel's own search path for firmware (drivers/base/firmware_loader), without the additions
/// of a running kernel, and the directory of a driver installed into one of its own (Google's COS).
const FIRMWARE_DIRECTORIES: [&str; 3] = ["/lib/firmware/updates", FIRMWARE_DIRECTORY, "/firmware"];
/// Directory of firmware in containers, and the kernel's own.
pub const FIRMWARE_DIRECTORY: &str = "/lib/firmware";
/// File with one more firmware directory of the running kernel.
pub const FIRMWARE_PARAMETER: &str = "/sys/module/firmware_class/parameters/path";
/// Limit of kernels in one image whose own firmware directories are searched.
const MAX_KERNELS: usize = 32;
/// Limit of firmware files of one version; there are two to four.
const MAX_FIRMWARE: usize = 32;

/// Sockets of services in the guest, relative to the directories below, and the pipes of the
/// Multi-Process Service.
const SOCKETS: &[(&str, SFlag)] = &[
    ("/run/nvidia-persistenced/socket", SFlag::S_IFSOCK),
    ("/run/nvidia-fabricmanager/socket", SFlag::S_IFSOCK),
    ("/tmp/nvidia-mps", SFlag::S_IFDIR),
];

/// Gathers mounts of files below the driver root.
pub struct Named<'a> {
    places: &'a Places,
    version: &'a str,
    pub mounts: Vec<Mount>,
    pub links: Vec<Link>,
    problems: &'a mut Problems,
}

impl<'a> Named<'a> {
    /// Collects all named files except sockets.
    pub fn collect(places: &'a Places, version: &'a str, problems: &'a mut Problems) -> Self {
        let mut named = Self {
            places,
            version,
            mounts: Vec::new(),
            links: Vec::new(),
            problems,
        };
        named.programs();
        named.configs();
        named.x_modules();
        named.firmware();
        named
    }

    /// Finds a path of the driver root. Paths that cannot be examined, or written into a spec, are
    /// recorded as problems and skipped.
    fn look(&mut self, path: &Path) -> Option<Found> {
        match self.places.driver(path) {
            Ok(Some(found)) if plain_path(&found.path) => Some(found),
            Ok(Some(_)) => {
                self.problems.add(path, NOT_PLAIN);
                None
            }
            Ok(None) => None,
            Err(error) => {
                self.problems
                    .add(&below(&self.places.driver_root, path), error);
                None
            }
        }
    }

    /// The existing ones of these directories, without duplicates under several names.
    fn there(&mut self, directories: &[&'static str]) -> Vec<&'static str> {
        let mut seen = HashSet::new();
        let mut there = |directory: &&'static str| match self.places.driver(Path::new(directory)) {
            Ok(found) => found.is_some_and(|found| seen.insert(found.path)),
            // The problem is recorded when a file in the directory is searched for.
            Err(_) => true,
        };
        directories
            .iter()
            .copied()
            .filter(|directory| there(directory))
            .collect()
    }

    /// The first file of that name in these directories, with the path it was found at.
    fn first(
        &mut self,
        directories: &[&str],
        name: &str,
        fits: impl Fn(&Found) -> bool,
    ) -> Option<(PathBuf, Found)> {
        directories.iter().find_map(|directory| {
            let path = Path::new(directory).join(name);
            self.look(&path).filter(&fits).map(|found| (path, found))
        })
    }

    fn mount(&mut self, found: Found, container_path: PathBuf) {
        self.mounts.push(Mount {
            host_path: found.path,
            container_path,
            kind: Kind::File,
        });
    }

    fn programs(&mut self) {
        let directories = self.there(PROGRAM_DIRECTORIES);
        for name in PROGRAMS {
            if let Some((path, found)) = self.first(&directories, name, Found::is_executable) {
                self.mount(found, path);
            }
        }
    }

    fn configs(&mut self) {
        // The same file under two names is mounted once.
        let mut seen = HashSet::new();
        let profile = format!("nvidia/nvidia-application-profiles-{}-rc", self.version);
        for (name, container_directory) in CONFIGS
            .iter()
            .copied()
            .chain([(profile.as_str(), "/usr/share")])
        {
            let found = self.first(CONFIG_DIRECTORIES, name, |f| f.is(SFlag::S_IFREG));
            if let Some((_, found)) = found.filter(|(_, found)| seen.insert(found.path.clone())) {
                self.mount(found, Path::new(container_directory).join(name));
            }
        }
    }

    fn x_modules(&mut self) {
        let regular = |f: &Found| f.is(SFlag::S_IFREG);
        let directories = self.there(X_DIRECTORIES);
        if let Some((path, found)) = self.first(&directories, "nvidia_drv.so", regular) {
            self.mount(found, path);
        }
        // The X server opens the bare name; Fedora's packages have only this one.
        let bare = "libglxserver_nvidia.so";
        let with_version = format!("{bare}.{}", self.version);
        if let Some((path, found)) = self.first(&directories, &with_version, regular) {
            let file = found.path.clone();
            self.links.push(Link {
                link: path.with_file_name(bare),
                target: with_version,
                file,
            });
            self.mount(found, path);
        } else if let Some((path, found)) = self.first(&directories, bare, regular) {
            self.mount(found, path);
        }
    }

    /// GSP firmware of this version, each file from the first directory that has it, as in the
    /// kernel.
    fn firmware(&mut self) {
        let directories = self.firmware_directories();
        directories
            .iter()
            .for_each(|directory| self.firmware_in(directory));
    }

    fn firmware_in(&mut self, directory: &Path) {
        let directory = directory.join("nvidia").join(self.version);
        let Some(found) = self.look(&directory).filter(|f| f.is(SFlag::S_IFDIR)) else {
            return;
        };
        let entries =
            match found.entries(|name| name.starts_with(b"gsp") && name.ends_with(b".bin")) {
                Ok(entries) => entries,
                Err(error) => return self.problems.add(&found.path, error),
            };
        if entries.len() > MAX_FIRMWARE {
            self.problems.add(
                &found.path,
                format!("more than {MAX_FIRMWARE} firmware files: the rest is left out"),
            );
        }
        for entry in entries.iter().take(MAX_FIRMWARE) {
            let Some(name) = plain_name(&entry.name) else {
                continue;
            };
            let container_path = Path::new(FIRMWARE_DIRECTORY)
                .join("nvidia")
                .join(self.version)
                .join(name);
            if self
                .mounts
                .iter()
                .any(|m| m.container_path == container_path)
            {
                continue;
            }
            if let Some(file) = self
                .look(&directory.join(name))
                .filter(|f| f.is(SFlag::S_IFREG))
            {
                self.mount(file, container_path);
            }
        }
    }

    /// Firmware directories in the driver root. The kernel also searches a subdirectory with its
    /// release, and an image may hold several kernels.
    fn firmware_directories(&mut self) -> Vec<PathBuf> {
        let mut directories = Vec::new();
        match self.places.text(Path::new(FIRMWARE_PARAMETER)) {
            Ok(Some(path)) if !path.is_empty() => {
                let path = PathBuf::from(path);
                let path = self.places.in_container(&path).unwrap_or(path);
                if plain_path(&path) {
                    directories.push(path);
                } else {
                    self.problems.add(
                        Path::new(FIRMWARE_PARAMETER),
                        format!("{:?} is no absolute path", path.display()),
                    );
                }
            }
            Ok(_) => {}
            Err(error) => self.problems.add(Path::new(FIRMWARE_PARAMETER), error),
        }
        let kernels = self
            .look(Path::new("/lib/modules"))
            .filter(|f| f.is(SFlag::S_IFDIR))
            .map(|f| f.entries(|_| true));
        let kernels: Vec<PathBuf> = match kernels {
            Some(Ok(entries)) => entries
                .iter()
                .take(MAX_KERNELS)
                .filter_map(|e| plain_name(&e.name))
                .map(PathBuf::from)
                .collect(),
            Some(Err(error)) => {
                self.problems.add(Path::new("/lib/modules"), error);
                Vec::new()
            }
            None => Vec::new(),
        };
        for directory in FIRMWARE_DIRECTORIES.map(Path::new) {
            directories.extend(kernels.iter().map(|kernel| directory.join(kernel)));
            directories.push(directory.to_path_buf());
        }
        directories
    }
}

/// Current sockets: below the root for devices, the guest's own root, or the driver root, whose
/// services may run in it.
pub fn sockets(places: &Places, roots: &Roots, problems: &mut Problems) -> Vec<Mount> {
    let mut roots_tried: Vec<&Path> = vec![&roots.dev_root];
    for root in [Path::new("/"), &places.driver_root] {
        if !roots_tried.contains(&root) {
            roots_tried.push(root);
        }
    }
    let mut mounts = Vec::new();
    for (path, kind) in SOCKETS {
        for root in &roots_tried {
            let at = below(root, Path::new(path));
            match places.guest().find(&at) {
                Ok(Some(found)) if found.is(*kind) && plain_path(&found.path) => {
                    mounts.push(Mount {
                        host_path: found.path,
                        container_path: path.into(),
                        kind: Kind::Socket,
                    });
                    break;
                }
                Ok(_) => {}
                Err(error) => problems.add(&at, error),
            }
        }
    }
    mounts
}
