//! The files that rules read, as one table of patterns.

use super::bounded::{Depth, HostRoot, seen};
use crate::rules::host_facts::{DEVICES, Files, Seen};
use crate::rules::kernel_rules::IOMMU;
use crate::rules::memory_rules::BLOCKS;
use std::io::{self, Error, ErrorKind};

/// Limit of files that all patterns give: a host with 512 CPUs and 2000 functions has 8000.
const MAX_FILES: usize = 32_768;

/// Patterns of files, with `*` for any name, in places where a component is one; a `*` may have a
/// beginning.
const TEXTS: &[&str] = &[
    "/proc/sys/kernel/osrelease",
    "/proc/cmdline",
    "/proc/mounts",
    "/proc/buddyinfo",
    "/proc/interrupts",
    "/sys/kernel/mm/transparent_hugepage/*",
    "/sys/module/vfio_iommu_type1/parameters/*",
    "/sys/devices/system/node/node*/cpulist",
    "/sys/devices/system/node/node*/hugepages/hugepages-*/free_hugepages",
    "/sys/devices/system/cpu/cpufreq/policy*/scaling_governor",
    "/sys/devices/system/cpu/cpufreq/policy*/scaling_driver",
    "/sys/devices/system/cpu/cpufreq/policy*/energy_performance_preference",
    "/sys/kernel/iommu_groups/*/type",
];
/// Patterns of directories whose names of entries are read.
const NAMES: &[&str] = &["/sys/class/iommu", "/sys/kernel/iommu_groups/*/devices"];

/// Files of every function, those of a GPU, and those that wake it.
const FUNCTION: &[&str] = &["class", "vendor", "numa_node"];
const GPU: &[&str] = &["resource", "power_state", "reset_method"];
const AWAKE: &[&str] = &[
    "current_link_speed",
    "max_link_speed",
    "current_link_width",
    "max_link_width",
    "resource0_resize",
    "resource1_resize",
    "resource2_resize",
    "resource3_resize",
    "resource4_resize",
    "resource5_resize",
];

pub fn read(root: &HostRoot, depth: Depth, files: &mut Files) {
    let mut left = MAX_FILES;
    let mut look = |files: &mut Files, path: String, read: Read| {
        let result = match left {
            0 => Err(Error::new(
                ErrorKind::InvalidData,
                format!("more than {MAX_FILES} files"),
            )),
            _ => read(root, &path),
        };
        left = left.saturating_sub(1);
        if let Some(seen) = seen(result) {
            files.insert(path, seen);
        }
    };
    let names: Read = |root, dir| Ok(root.names(dir)?.join("\n"));
    let text: Read = |root, path| root.text(path);
    for (patterns, read) in [(TEXTS, text), (NAMES, names)] {
        for path in patterns.iter().flat_map(|pattern| matches(root, pattern)) {
            look(files, path, read);
        }
    }
    // Reading it counts blocks below the locks of all zones.
    if let Some(seen) = seen(depth.costly(|| root.text(BLOCKS))) {
        files.insert(BLOCKS, seen);
    }
    for function in root.names(DEVICES).unwrap_or_default() {
        let file = |name: &str| format!("{DEVICES}/{function}/{name}");
        let mut texts = |files: &mut Files, names: &[&str]| {
            names.iter().for_each(|name| look(files, file(name), text));
        };
        texts(files, FUNCTION);
        if files.text(&file("vendor")) != Ok("0x10de") {
            continue;
        }
        texts(files, GPU);
        if !files.is_asleep(&function) {
            texts(files, AWAKE);
        }
        look(files, file("iommu_group"), |root, path| root.link(path));
    }
    // Opening it would make a context of IOMMUFD.
    if root.has(IOMMU) {
        files.insert(IOMMU, Seen::Text("there".into()));
    }
}

/// Way of reading a path.
type Read = fn(&HostRoot, &str) -> io::Result<String>;

/// Paths that a pattern gives. Directories that cannot be listed give none.
fn matches(root: &HostRoot, pattern: &str) -> Vec<String> {
    let mut found = vec![String::new()];
    for part in pattern.split('/').skip(1) {
        let mut next = Vec::new();
        for dir in found {
            match part.split_once('*') {
                None => next.push(format!("{dir}/{part}")),
                Some((begin, _)) => {
                    let entries = root.names(&dir).unwrap_or_default();
                    next.extend(
                        entries
                            .into_iter()
                            .filter(|name| name.starts_with(begin))
                            .map(|name| format!("{dir}/{name}")),
                    );
                }
            }
        }
        found = next;
        found.truncate(MAX_FILES);
    }
    found
}
