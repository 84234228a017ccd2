//! Rules about the memory that guests get: page sizes, fragmentation, zeroing; and the host's CPUs.
//!
//! Figures: a guest of 1.2 TB was prepared in 253 s with transparent huge pages, in 476 s without,
//! and in 59 s with pages of 1 GiB.

use super::checked::{Checked, Gap, Problem, evidence, unknown};
use super::host_facts::{Files, Gpu, HostFacts};
use super::kernel_rules::{CONFIG, config, fine, found};
use std::collections::BTreeSet;

pub const THP: &str = "/sys/kernel/mm/transparent_hugepage";
pub const NODES: &str = "/sys/devices/system/node";
pub const BUDDY: &str = "/proc/buddyinfo";
pub const BLOCKS: &str = "/proc/pagetypeinfo";
pub const MOUNTS: &str = "/proc/mounts";
pub const CPUFREQ: &str = "/sys/devices/system/cpu/cpufreq";

/// Bytes of the guest that the figures are of.
const GUEST: f64 = 1.2e12;
pub const WITHOUT_THP: f64 = 476.0;
pub const WITH_THP: f64 = 253.0;
const WITH_GIB_PAGES: f64 = 59.0;
/// Bytes of a transparent huge page where pages have 4 KiB.
const HUGE: u64 = 2 << 20;

/// The word of a choice like `always [madvise] never` that is in effect.
fn chosen<'a>(files: &'a Files, path: &str) -> Result<&'a str, Gap> {
    let text = files.text(path)?;
    let word = text
        .split_once('[')
        .and_then(|(_, rest)| rest.split_once(']'));
    word.map(|(word, _)| word)
        .ok_or_else(|| Gap::unreadable(path, text))
}

/// Adds the model of a guest's preparation: the difference of two figures, for this many bytes.
pub fn of_bytes(problem: Problem, bytes: u64, seconds: f64, how: &str) -> Problem {
    let bytes = bytes as f64;
    problem.model(
        bytes / GUEST * seconds,
        format!(
            "1.2 TB of guest memory: {how}; for {:.0} GiB",
            bytes / (1u64 << 30) as f64
        ),
    )
}

/// The same for all memory of this host's guests, if its size is known.
fn of_guest(problem: Problem, facts: &HostFacts, seconds: f64, how: &str) -> Problem {
    match facts.guest_memory() {
        Some((bytes, _)) => of_bytes(problem, bytes, seconds, how),
        None => problem,
    }
}

/// Bytes of a page by those of a huge one: a table of as many entries of 8 bytes as fill a page
/// describes a huge page. 2 MiB are of pages of 4 KiB, 512 MiB of pages of 64 KiB (arm64).
fn page_of(huge: u64) -> u64 {
    1 << ((huge.ilog2() + 3) / 2)
}

/// Pages of hugetlbfs for guests, beside which other page sizes do not matter.
fn hugetlb(facts: &HostFacts) -> Option<(String, String)> {
    let configured = facts
        .kata()
        .ok()
        .filter(|kata| kata.is_on("enable_hugepages"))
        .map(|kata| {
            let file = kata
                .hypervisor("enable_hugepages")
                .map_or(String::new(), |(_, file)| file.clone());
            (file, "enable_hugepages = true".to_string())
        });
    let running = || {
        let vm = facts.vms.iter().find(|vm| {
            vm.options("-object")
                .any(|o| o.contains("hugetlb=on") || o.contains("mem-path=/dev/hugepages"))
        });
        vm.map(|vm| {
            (
                vm.proc("cmdline"),
                "memory-backend of hugetlbfs".to_string(),
            )
        })
    };
    configured.or_else(running)
}

pub fn thp(facts: &HostFacts) -> Checked {
    let path = format!("{THP}/enabled");
    let word = chosen(&facts.files, &path)?;
    let mut seen = vec![evidence(&path, word)];
    if let Some((from, value)) = hugetlb(facts) {
        seen.push(evidence(from, value));
        return fine(seen);
    }
    let problem = found(
        seen,
        format!(
            "echo madvise > {path} (transparent_hugepage=madvise on the kernel's \
                 command line), or enable_hugepages"
        ),
    );
    of_guest(
        problem,
        facts,
        WITHOUT_THP - WITH_THP,
        "253 s with, 476 s without",
    )
    .when(word == "never")
}

/// Memory that is shared with another process (virtio-fs) is shared memory to the kernel, which has
/// a switch of its own.
pub fn thp_shared(facts: &HostFacts) -> Checked {
    let objects = facts.vms.iter().flat_map(|vm| {
        vm.options("-object")
            .map(|object| (vm.proc("cmdline"), object.to_string()))
    });
    let mut shared: Vec<_> = objects
        .filter(|(_, object)| object.contains("share=on"))
        .collect();
    if let Ok(kata) = facts.kata() {
        let fs = kata
            .hypervisor("shared_fs")
            .filter(|(value, _)| value.starts_with("virtio-fs"));
        shared.extend(fs.map(|(value, file)| (file.clone(), format!("shared_fs = {value}"))));
    } else if shared.is_empty() {
        facts.some_vms()?;
    }
    let Some((from, value)) = shared.into_iter().next() else {
        return fine(vec![evidence("memory of guests", "not shared")]);
    };
    let path = format!("{THP}/shmem_enabled");
    let word = chosen(&facts.files, &path)?;
    let mut seen = vec![evidence(from, value), evidence(&path, word)];
    if let Some((from, value)) = hugetlb(facts) {
        seen.push(evidence(from, value));
        return fine(seen);
    }
    let mounts = facts.files.text(MOUNTS)?;
    let mount = mounts
        .lines()
        .find(|line| line.split(' ').nth(1) == Some("/dev/shm"))
        .unwrap_or_default();
    let mounted = mount
        .split([' ', ','])
        .find_map(|option| option.strip_prefix("huge="))
        .unwrap_or("never");
    seen.push(evidence(MOUNTS, format!("/dev/shm huge={mounted}")));
    // memfd follows the switch, a file in /dev/shm its mount.
    let cure = format!(
        "echo advise > {path} and mount -o remount,huge=advise /dev/shm, or \
             enable_hugepages, or a guest without shared_fs"
    );
    let problem = found(seen, cure).unsure();
    of_guest(
        problem,
        facts,
        WITHOUT_THP - WITH_THP,
        "253 s with huge pages, 476 s without",
    )
    .when(["never", "deny"].contains(&word) || mounted == "never")
}

pub fn thp_defrag(facts: &HostFacts) -> Checked {
    let path = format!("{THP}/defrag");
    let word = chosen(&facts.files, &path)?;
    let seen = vec![evidence(&path, word)];
    found(
        seen,
        format!(
            "echo madvise > {path}: QEMU asks for huge pages, and the kernel then makes room \
         for them"
        ),
    )
    .unsure()
    .when(["never", "defer"].contains(&word) && hugetlb(facts).is_none())
}

pub fn huge_pages(facts: &HostFacts) -> Checked {
    if let Some((from, value)) = hugetlb(facts) {
        return fine(vec![evidence(from, value)]);
    }
    let (bytes, from) = facts
        .guest_memory()
        .ok_or_else(|| Gap::Unknown("neither a configuration of Kata nor a running VM".into()))?;
    let seen = vec![evidence(
        from,
        format!("{} MiB without hugetlbfs", bytes >> 20),
    )];
    let cure = "reserve pages of 1 GiB (hugepagesz=1G hugepages=N, default_hugepagesz=1G) and set \
         enable_hugepages = true";
    of_bytes(
        found(seen, cure),
        bytes,
        WITH_THP - WITH_GIB_PAGES,
        "59 s with pages of 1 GiB, 253 s with transparent ones",
    )
    .checked()
}

/// NUMA nodes of the GPUs.
fn gpu_nodes(facts: &HostFacts) -> Result<BTreeSet<u64>, Gap> {
    let node = |gpu: Gpu| {
        let path = gpu.path("numa_node");
        // -1: the firmware names none.
        match facts.files.text(&path)? {
            "-1" => Ok(0),
            _ => facts.files.number(&path),
        }
    };
    facts.some_gpus()?.into_iter().map(node).collect()
}

pub fn huge_pages_free(facts: &HostFacts) -> Checked {
    if !facts.kata()?.is_on("enable_hugepages") {
        return fine(vec![evidence(
            &facts.kata()?.path,
            "enable_hugepages is off",
        )]);
    }
    let (wanted, from) = facts
        .guest_memory()
        .ok_or_else(|| Gap::Unknown("size of guests: no default_memory".into()))?;
    let mut seen = vec![evidence(from, format!("{} MiB", wanted >> 20))];
    let mut short = false;
    for node in gpu_nodes(facts)? {
        let dir = format!("{NODES}/node{node}/hugepages");
        let mut free = 0u64;
        let sizes: Vec<&str> = facts.files.entries(&dir).collect();
        if sizes.is_empty() {
            return unknown(format!("{dir}: not there"));
        }
        for size in sizes {
            let kib: u64 = size
                .trim_start_matches("hugepages-")
                .trim_end_matches("kB")
                .parse()
                .map_err(|_| Gap::unreadable(&dir, size))?;
            let path = format!("{dir}/{size}/free_hugepages");
            let pages = facts.files.number(&path)?;
            seen.push(evidence(path, pages.to_string()));
            free = free.saturating_add(pages.saturating_mul(kib << 10));
        }
        // A guest has pages of one node, which is the GPU's where it is fast.
        short |= free < wanted;
    }
    found(
        seen,
        "reserve as many on each GPU's node: echo N > \
             .../nodeX/hugepages/hugepages-1048576kB/nr_hugepages, soon after the host's \
             boot",
    )
    .when(short)
}

pub fn fragmentation(facts: &HostFacts) -> Checked {
    if let Some((from, value)) = hugetlb(facts) {
        return fine(vec![evidence(from, value)]);
    }
    let (wanted, from) = facts
        .guest_memory()
        .ok_or_else(|| Gap::Unknown("size of guests: no default_memory, no running VM".into()))?;
    let nodes = gpu_nodes(facts)?;
    let text = facts.files.text(BUDDY)?;
    let huge_page = facts
        .files
        .text(&format!("{THP}/hpage_pmd_size"))
        .ok()
        .and_then(|text| text.parse().ok());
    let huge_page = huge_page
        .filter(|bytes: &u64| bytes.is_power_of_two())
        .unwrap_or(HUGE);
    let page = page_of(huge_page);
    let mut seen = vec![evidence(from, format!("{} MiB", wanted >> 20))];
    let mut missing = 0u64;
    for node in nodes {
        let begin = format!("Node {node},");
        let (mut huge, mut all) = (0u64, 0u64);
        let mut is_there = false;
        for line in text.lines().filter(|line| line.starts_with(&begin)) {
            is_there = true;
            // Node 0, zone Normal: free blocks of 2^order pages.
            for (order, blocks) in (0u32..).zip(line.split_whitespace().skip(4)) {
                let blocks: u64 = blocks.parse().map_err(|_| Gap::unreadable(BUDDY, line))?;
                let block = page.checked_shl(order).unwrap_or(u64::MAX);
                let bytes = blocks.saturating_mul(block);
                all = all.saturating_add(bytes);
                huge = huge.saturating_add(if block >= huge_page { bytes } else { 0 });
            }
        }
        if !is_there {
            return unknown(format!("{BUDDY}: no node {node}"));
        }
        seen.push(evidence(
            BUDDY,
            format!(
                "node {node}: guests of up to {} MiB in huge pages now, of {} MiB free",
                huge >> 20,
                all >> 20
            ),
        ));
        missing = missing.max(wanted.saturating_sub(huge));
    }
    let problem = found(
        seen,
        "reserve huge pages soon after the host's boot, or echo 1 > \
             /proc/sys/vm/compact_memory before guests start",
    )
    .unsure();
    of_bytes(
        problem,
        missing,
        WITHOUT_THP - WITH_THP,
        "253 s in huge pages, 476 s in small ones",
    )
    .when(missing > 0)
}

pub fn unmovable(facts: &HostFacts) -> Checked {
    let text = facts.files.text(BLOCKS)?;
    let table = text
        .lines()
        .skip_while(|line| !line.starts_with("Number of blocks type"))
        .skip(1);
    let mut seen = Vec::new();
    let mut is_bad = false;
    // The zone DMA has a few MiB; a small machine has nothing above DMA32.
    for line in table.filter(|line| line.starts_with("Node ") && !line.contains(" DMA ")) {
        let counts: Vec<u64> = line
            .split_whitespace()
            .skip(4)
            .filter_map(|word| word.parse().ok())
            .collect();
        let [unmovable, movable, reclaimable, ..] = counts[..] else {
            return Err(Gap::unreadable(BLOCKS, line));
        };
        let fixed = unmovable.saturating_add(reclaimable);
        is_bad |= fixed > fixed.saturating_add(movable) / 4;
        let node = line.split(',').next().unwrap_or_default();
        seen.push(evidence(
            BLOCKS,
            format!("{node}: {fixed} block(s) that cannot be moved, {movable} that can"),
        ));
    }
    if seen.is_empty() {
        return unknown(format!("{BLOCKS}: no number of blocks"));
    }
    found(
        seen,
        "reserve huge pages on the kernel's command line: no compaction brings these together",
    )
    .unsure()
    .when(is_bad)
}

pub fn zeroing(facts: &HostFacts) -> Checked {
    let (is_on, seen) = match facts.kernel_word("init_on_alloc")? {
        Some(value) => (
            ["1", "y", "Y", "on"].contains(&value),
            evidence("/proc/cmdline", format!("init_on_alloc={value}")),
        ),
        None => {
            let value = config(facts, "CONFIG_INIT_ON_ALLOC_DEFAULT_ON")?.unwrap_or("n");
            (
                value == "y",
                evidence(CONFIG, format!("CONFIG_INIT_ON_ALLOC_DEFAULT_ON={value}")),
            )
        }
    };
    let problem = found(
        vec![seen],
        "init_on_alloc=0 on the host's command line, where its security rules allow it; \
             or enable_hugepages",
    )
    .unsure();
    of_guest(
        problem,
        facts,
        WITH_GIB_PAGES,
        "one more pass takes at most the 59 s that all took with pages of 1 GiB",
    )
    .when(is_on && hugetlb(facts).is_none())
}

pub fn governor(facts: &HostFacts) -> Checked {
    let mut seen = Vec::new();
    let mut slow = 0;
    for policy in facts
        .files
        .entries(CPUFREQ)
        .filter(|name| name.starts_with("policy"))
    {
        let file = |name: &str| format!("{CPUFREQ}/{policy}/{name}");
        let governor = facts.files.text(&file("scaling_governor"))?;
        let driver = facts
            .files
            .optional(&file("scaling_driver"))?
            .unwrap_or_default();
        let preference = facts
            .files
            .optional(&file("energy_performance_preference"))?
            .unwrap_or_default();
        // These drivers scale by themselves below `powersave`.
        let scales = ["intel_pstate", "amd-pstate-epp"].contains(&driver);
        let is_slow = governor == "conservative"
            || (governor == "powersave" && !scales)
            || preference == "power";
        slow += usize::from(is_slow);
        if is_slow && slow == 1 || seen.is_empty() {
            seen = vec![evidence(
                file("scaling_governor"),
                format!("{governor} ({driver} {preference})"),
            )];
        }
    }
    if seen.is_empty() {
        return unknown(format!("{CPUFREQ}: no policy"));
    }
    if slow == 0 {
        return fine(seen);
    }
    seen.push(evidence(CPUFREQ, format!("{slow} slow policies")));
    found(
        seen,
        "the governor `performance` while guests start: cpupower frequency-set -g performance",
    )
    .checked()
}

#[cfg(test)]
mod tests {
    use super::page_of;

    #[test]
    fn a_pages_size_follows_from_that_of_a_huge_one() {
        assert_eq!(
            [2, 32, 512].map(|mib| page_of(mib << 20)),
            [4096, 16_384, 65_536]
        );
    }
}
