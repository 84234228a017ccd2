//! Rules about QEMU: its version, and what running VMs hold.

use super::checked::{Checked, Gap, Look, unknown};
use super::host_facts::{DEVICES, HostFacts, MajorMinor, Vm, bytes_of};
use super::kernel_rules::{maps_small_pages, of_bars};
use super::memory_rules::{NODES, WITH_THP, WITHOUT_THP, of_bytes};
use std::collections::{BTreeMap, BTreeSet};

/// First QEMU whose BARs lie at addresses that huge pages fit.
const ALIGNS: MajorMinor = MajorMinor(9, 2);
/// Share of memory in huge pages from which a VM is fine.
const HUGE: f64 = 0.9;
/// Share of memory that may be on another node than the GPUs.
const REMOTE: f64 = 0.1;

pub fn qemu_version(facts: &HostFacts) -> Checked {
    let Some(qemu) = &facts.qemu else {
        return unknown(
            "no program of QEMU was found: --kata-config names a configuration that has it",
        );
    };
    let Some(version) = qemu.version else {
        return unknown(format!(
            "{}: no machine type in it has a version",
            qemu.path
        ));
    };
    let mut look = Look::of(
        &qemu.path,
        format!("machine types up to {}.{}", version.0, version.1),
    );
    if version >= ALIGNS {
        return Ok(look);
    }
    if maps_small_pages(facts).unwrap_or(true) {
        look.add("kernel", "has no huge pfnmaps either: see there");
    }
    let cure = "QEMU 9.2 or later, with a kernel that has huge pfnmaps";
    of_bars(look.cure(cure).unsure(), facts.bar_bytes()).when(true)
}

pub fn iommufd_used(facts: &HostFacts) -> Checked {
    let mut look = Look::default();
    for vm in facts.some_vms()? {
        let path = vm.proc("fd");
        let held: Vec<&str> = facts
            .files
            .text(&path)?
            .lines()
            .filter(|target| ["/dev/iommu", "/dev/vfio/vfio"].contains(target))
            .collect();
        look.is_bad |= held.contains(&"/dev/vfio/vfio");
        if held.is_empty() {
            return unknown(format!(
                "{path}: holds neither /dev/iommu nor /dev/vfio/vfio"
            ));
        }
        look.add(path, held.join(" "));
    }
    Ok(look
        .cure(
            "a runtime that gives QEMU an iommufd object and /dev/vfio/devices/vfioN (QEMU 8.2, \
         Linux 6.6 and later)",
        )
        .unsure())
}

pub fn huge_page_use(facts: &HostFacts) -> Checked {
    let mut look = Look::default();
    let mut small_bytes = 0u64;
    for vm in facts.some_vms()? {
        let path = vm.proc("smaps_rollup");
        let text = facts.files.text(&path)?;
        let rss = bytes_of(text, "Rss").ok_or_else(|| Gap::unreadable(&path, "no Rss"))?;
        let sum = |names: &[&str]| {
            names
                .iter()
                .filter_map(|name| bytes_of(text, name))
                .fold(0u64, u64::saturating_add)
        };
        let (transparent, hugetlb) = (
            sum(&["AnonHugePages", "ShmemPmdMapped", "FilePmdMapped"]),
            sum(&["Shared_Hugetlb", "Private_Hugetlb"]),
        );
        // Rss does not count pages of hugetlbfs.
        let all = rss.saturating_add(hugetlb);
        let small = rss.saturating_sub(transparent);
        let status = vm.proc("status");
        let tables = bytes_of(facts.files.text(&status)?, "VmPTE")
            .ok_or_else(|| Gap::unreadable(&status, "no VmPTE"))?;
        let huge_share = if all == 0 {
            1.0
        } else {
            1.0 - small as f64 / all as f64
        };
        if huge_share < HUGE {
            look.is_bad = true;
            small_bytes = small_bytes.max(small);
        }
        look.add(
            path,
            format!(
                "{:.0} % of {} MiB in huge pages; page tables {} MiB",
                huge_share * 100.0,
                all >> 20,
                tables >> 20
            ),
        );
    }
    let cure = "the cure of the rule above that applies: thp, thp-shared, thp-defrag, \
         fragmentation, or enable_hugepages";
    let how = "253 s with huge pages, 476 s without";
    Ok(of_bytes(
        look.cure(cure),
        small_bytes,
        WITHOUT_THP - WITH_THP,
        how,
    ))
}

/// NUMA nodes of the devices that a VM has, as far as its options name them.
fn device_nodes(facts: &HostFacts, vm: &Vm) -> Result<BTreeSet<u64>, Gap> {
    let mut nodes = BTreeSet::new();
    for device in vm.passed_through() {
        let option = |name: &str| {
            device
                .split(',')
                .find_map(|option| option.strip_prefix(name))
        };
        let Some(address) = option("host=").or_else(|| option("sysfsdev=")?.rsplit('/').next())
        else {
            continue;
        };
        let address = if address.matches(':').count() == 1 {
            format!("0000:{address}")
        } else {
            address.to_string()
        };
        let path = format!("{DEVICES}/{address}/numa_node");
        if facts.files.text(&path)? != "-1" {
            nodes.insert(facts.files.number(&path)?);
        }
    }
    if nodes.is_empty() {
        return unknown(format!(
            "{}: no option names a device whose NUMA node is known",
            vm.proc("cmdline")
        ));
    }
    Ok(nodes)
}

pub fn memory_node(facts: &HostFacts) -> Checked {
    let mut look = Look::default();
    for vm in facts.some_vms()? {
        let near = device_nodes(facts, vm)?;
        let path = vm.proc("numa_maps");
        let mut bytes: BTreeMap<u64, u64> = BTreeMap::new();
        for line in facts.files.text(&path)?.lines() {
            let size = line
                .split(' ')
                .find_map(|word| word.strip_prefix("kernelpagesize_kB=")?.parse::<u64>().ok())
                .unwrap_or(4)
                << 10;
            for word in line.split(' ').filter_map(|word| word.strip_prefix('N')) {
                if let Some((Ok(node), Ok(pages))) = word
                    .split_once('=')
                    .map(|(node, pages)| (node.parse(), pages.parse::<u64>()))
                {
                    let sum = bytes.entry(node).or_default();
                    *sum = sum.saturating_add(pages.saturating_mul(size));
                }
            }
        }
        let all = bytes.values().fold(0u64, |sum, n| sum.saturating_add(*n));
        if all == 0 {
            return Err(Gap::unreadable(&path, "no pages of any node"));
        }
        let far = bytes
            .iter()
            .filter(|(node, _)| !near.contains(node))
            .fold(0u64, |sum, (_, n)| sum.saturating_add(*n));
        look.is_bad |= far as f64 > all as f64 * REMOTE;
        look.add(
            path,
            format!(
                "{} of {} MiB on other nodes than its devices' ({near:?})",
                far >> 20,
                all >> 20
            ),
        );
    }
    Ok(look.cure(
        "huge pages on the GPU's node, and CPUs of that node for the VMM (kubelet's \
         Topology Manager)",
    ))
}

pub fn no_mmap(facts: &HostFacts) -> Checked {
    let mut look = Look::default();
    for vm in facts.some_vms()? {
        for device in vm.passed_through() {
            let is_off = device
                .split(',')
                .any(|option| ["x-no-mmap=on", "x-no-mmap=true"].contains(&option));
            look.is_bad |= is_off;
            if is_off || look.evidence.is_empty() {
                look.add(vm.proc("cmdline"), device);
            }
        }
    }
    Ok(look.cure("remove x-no-mmap: each access of the driver to a BAR leaves the guest"))
}

pub fn prealloc(facts: &HostFacts) -> Checked {
    let mut look = Look::default();
    for vm in facts.some_vms()? {
        let cpus = vm
            .options("-smp")
            .last()
            .unwrap_or("1")
            .split(',')
            .next()
            .unwrap_or_default();
        let objects = vm.options("-object");
        for object in objects.filter(|object| object.starts_with("memory-backend")) {
            let has = |option: &str| object.split(',').any(|given| given.starts_with(option));
            look.is_bad |=
                has("prealloc=on") && !has("prealloc-threads=") && ["1", "cpus=1"].contains(&cpus);
            look.add(vm.proc("cmdline"), format!("-smp {cpus}, {object}"));
        }
    }
    if look.evidence.is_empty() {
        return unknown("no VM has a memory-backend on its command line");
    }
    Ok(look
        .cure(
            "prealloc-threads=N, or default_vcpus above 1 (as many threads by default), or no \
         prealloc: VFIO pins all memory anyway",
        )
        .unsure())
}

/// CPUs of a list like `0-3,8`; of at most 2^16.
fn cpus(list: &str) -> Option<BTreeSet<u32>> {
    const MAX_CPU: u32 = 1 << 16;
    let mut all = BTreeSet::new();
    for part in list.trim().split(',').filter(|part| !part.is_empty()) {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (u32, u32) = (first.parse().ok()?, last.parse().ok()?);
        all.extend((last < MAX_CPU).then_some(first..=last)?);
    }
    Some(all)
}

pub fn pinning(facts: &HostFacts) -> Checked {
    let nodes = facts
        .files
        .entries(NODES)
        .filter(|name| name.starts_with("node") && name.ends_with(|c: char| c.is_ascii_digit()))
        .count();
    if nodes < 2 {
        return if nodes == 1 {
            Ok(Look::of(NODES, "one node"))
        } else {
            unknown(format!("{NODES}: no node"))
        };
    }
    let mut look = Look::default();
    for vm in facts.some_vms()? {
        let mut near = BTreeSet::new();
        for node in device_nodes(facts, vm)? {
            let path = format!("{NODES}/node{node}/cpulist");
            let text = facts.files.text(&path)?;
            near.extend(cpus(text).ok_or_else(|| Gap::unreadable(&path, text))?);
        }
        let path = vm.proc("vcpus");
        let lists = facts.files.text(&path)?;
        for line in lists.lines() {
            let list = line.rsplit(' ').next().unwrap_or_default();
            let allowed = cpus(list).ok_or_else(|| Gap::unreadable(&path, line))?;
            look.is_bad |= !allowed.is_subset(&near);
        }
        if lists.is_empty() {
            return unknown(format!("{}: no thread of a vCPU", vm.proc("task")));
        }
        look.add(vm.proc("task"), lists.replace('\n', "; "));
    }
    Ok(look
        .cure(
            "CPUs of the GPU's node alone for the pod (kubelet's static CPU manager with \
         Topology Manager), or enable_vcpus_pinning",
        )
        .unsure())
}
