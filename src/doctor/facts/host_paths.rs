//! The files that rules read, as one table of patterns.

use super::bounded::{Depth, HostRoot, seen};
use crate::rules::host_facts::{DEVICES, Files, Seen};
use crate::rules::kernel_rules::IOMMU;
use crate::rules::memory_rules::BLOCKS;
use std::io::ErrorKind;

/// Limit of files that all patterns give: a host with 512 CPUs and 2000 functions has 8000.
const MAX_FILES: usize = 32_768;

/// Form in which a path is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Of {
    Text,
    Link,
    /// Names of its entries.
    Names,
}

/// Patterns with `*` for any name, in places where a component is one; a `*` may have a beginning.
const PATTERNS: &[(Of, &str)] = &[
    (Of::Text, "/proc/sys/kernel/osrelease"),
    (Of::Text, "/proc/cmdline"),
    (Of::Text, "/proc/mounts"),
    (Of::Text, "/proc/buddyinfo"),
    (Of::Text, "/proc/interrupts"),
    (Of::Text, "/sys/kernel/mm/transparent_hugepage/*"),
    (Of::Text, "/sys/module/vfio_iommu_type1/parameters/*"),
    (Of::Text, "/sys/devices/system/node/node*/cpulist"),
    (
        Of::Text,
        "/sys/devices/system/node/node*/hugepages/hugepages-*/free_hugepages",
    ),
    (
        Of::Text,
        "/sys/devices/system/cpu/cpufreq/policy*/scaling_governor",
    ),
    (
        Of::Text,
        "/sys/devices/system/cpu/cpufreq/policy*/scaling_driver",
    ),
    (
        Of::Text,
        "/sys/devices/system/cpu/cpufreq/policy*/energy_performance_preference",
    ),
    (Of::Names, "/sys/class/iommu"),
    (Of::Text, "/sys/kernel/iommu_groups/*/type"),
    (Of::Names, "/sys/kernel/iommu_groups/*/devices"),
];

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
    for (of, pattern) in PATTERNS {
        for path in matches(root, pattern) {
            look(root, *of, path, files, &mut left);
        }
    }
    // Reading it counts blocks below the locks of all zones.
    if let Some(seen) = seen(depth.costly(|| root.text(BLOCKS))) {
        files.insert(BLOCKS, seen);
    }
    for function in root.names(DEVICES).unwrap_or_default() {
        let file = |name: &str| format!("{DEVICES}/{function}/{name}");
        FUNCTION
            .iter()
            .for_each(|name| look(root, Of::Text, file(name), files, &mut left));
        if files
            .text(&file("vendor"))
            .is_ok_and(|vendor| vendor == "0x10de")
        {
            GPU.iter()
                .for_each(|name| look(root, Of::Text, file(name), files, &mut left));
            if !files.is_asleep(&function) {
                AWAKE
                    .iter()
                    .for_each(|name| look(root, Of::Text, file(name), files, &mut left));
            }
            look(root, Of::Link, file("iommu_group"), files, &mut left);
        }
    }
    // Opening it would make a context of IOMMUFD.
    if root.has(IOMMU) {
        files.insert(IOMMU, Seen::Text("there".into()));
    }
}

fn look(root: &HostRoot, of: Of, path: String, files: &mut Files, left: &mut usize) {
    let result = match of {
        _ if *left == 0 => Err(std::io::Error::new(
            ErrorKind::InvalidData,
            format!("more than {MAX_FILES} files"),
        )),
        Of::Text => root.text(&path),
        Of::Link => root.link(&path),
        Of::Names => root.names(&path).map(|names| names.join("\n")),
    };
    *left = left.saturating_sub(1);
    if let Some(seen) = seen(result) {
        files.insert(path, seen);
    }
}

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
