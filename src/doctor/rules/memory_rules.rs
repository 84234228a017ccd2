//! Rules about the memory that guests get: page sizes, fragmentation, zeroing; and the host's CPUs.
//!
//! Figures: a guest of 1.2 TB was prepared in 253 s with transparent huge pages, in 476 s without,
//! and in 59 s with pages of 1 GiB.

use super::checked::{Checked, Gap, Look, evidence, unknown};
use super::host_facts::{Files, Gpu, HostFacts};
use super::kernel_rules::{CONFIG, config};
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
pub fn of_bytes(look: Look, bytes: u64, seconds: f64, how: &str) -> Look {
    let bytes = bytes as f64;
    look.model(
        bytes / GUEST * seconds,
        format!(
            "1.2 TB of guest memory: {how}; for {:.0} GiB",
            bytes / (1u64 << 30) as f64
        ),
    )
}

/// The same for all memory of this host's guests, if its size is known.
fn of_guest(look: Look, facts: &HostFacts, seconds: f64, how: &str) -> Look {
    match facts.guest_memory() {
        Ok((bytes, _)) => of_bytes(look, bytes, seconds, how),
        Err(_) => look,
    }
}

/// Bytes of a page by those of a huge one: a table of as many entries of 8 bytes as fill a page
/// describes a huge page. 2 MiB are of pages of 4 KiB, 512 MiB of pages of 64 KiB (arm64).
fn page_of(huge: u64) -> u64 {
    1 << ((huge.ilog2() + 3) / 2)
}

pub fn thp(facts: &HostFacts) -> Checked {
    let path = format!("{THP}/enabled");
    let word = chosen(&facts.files, &path)?;
    let mut look = Look::of(&path, word);
    let hugetlb = facts.hugetlb();
    let is_bad = word == "never" && hugetlb.is_none();
    look.evidence.extend(hugetlb);
    let look = look.cure(format!(
        "echo madvise > {path} (transparent_hugepage=madvise on the kernel's \
                 command line), or enable_hugepages"
    ));
    let how = "253 s with, 476 s without";
    of_guest(look, facts, WITHOUT_THP - WITH_THP, how).when(is_bad)
}

/// Memory that is shared with another process (virtio-fs) is shared memory to the kernel, which has
/// a switch of its own.
pub fn thp_shared(facts: &HostFacts) -> Checked {
    let objects = facts.vms.iter().flat_map(|vm| {
        let shared = vm.options("-object").filter(|o| o.contains("share=on"));
        shared.map(|object| evidence(vm.proc("cmdline"), object))
    });
    let mut shared: Vec<_> = objects.collect();
    if let Ok(kata) = facts.kata() {
        let fs = kata.value("shared_fs").starts_with("virtio-fs");
        shared.extend(fs.then(|| kata.evidence("shared_fs")));
    } else if shared.is_empty() {
        facts.some_vms()?;
    }
    shared.truncate(1);
    let mut look = Look::from(shared);
    if look.evidence.is_empty() {
        return Ok(Look::of("memory of guests", "not shared"));
    }
    let path = format!("{THP}/shmem_enabled");
    let word = chosen(&facts.files, &path)?;
    look.add(&path, word);
    if let Some(hugetlb) = facts.hugetlb() {
        look.evidence.push(hugetlb);
        return Ok(look);
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
    look.add(MOUNTS, format!("/dev/shm huge={mounted}"));
    // memfd follows the switch, a file in /dev/shm its mount.
    let cure = format!(
        "echo advise > {path} and mount -o remount,huge=advise /dev/shm, or \
             enable_hugepages, or a guest without shared_fs"
    );
    let how = "253 s with huge pages, 476 s without";
    of_guest(look.cure(cure).unsure(), facts, WITHOUT_THP - WITH_THP, how)
        .when(["never", "deny"].contains(&word) || mounted == "never")
}

pub fn thp_defrag(facts: &HostFacts) -> Checked {
    let path = format!("{THP}/defrag");
    let word = chosen(&facts.files, &path)?;
    Look::of(&path, word)
        .cure(format!(
            "echo madvise > {path}: QEMU asks for huge pages, and the kernel then makes room \
         for them"
        ))
        .unsure()
        .when(["never", "defer"].contains(&word) && facts.hugetlb().is_none())
}

pub fn huge_pages(facts: &HostFacts) -> Checked {
    if let Some(hugetlb) = facts.hugetlb() {
        return Ok(vec![hugetlb].into());
    }
    let (bytes, from) = facts.guest_memory()?;
    let look = Look::of(from, format!("{} MiB without hugetlbfs", bytes >> 20));
    let cure = "reserve pages of 1 GiB (hugepagesz=1G hugepages=N, default_hugepagesz=1G) and set \
         enable_hugepages = true";
    of_bytes(
        look.cure(cure),
        bytes,
        WITH_THP - WITH_GIB_PAGES,
        "59 s with pages of 1 GiB, 253 s with transparent ones",
    )
    .when(true)
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
    let kata = facts.kata()?;
    if !kata.is_on("enable_hugepages") {
        return Ok(Look::of(&kata.path, "enable_hugepages is off"));
    }
    let (wanted, from) = facts.guest_memory()?;
    let mut look = Look::of(from, format!("{} MiB", wanted >> 20));
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
            look.add(path, pages.to_string());
            free = free.saturating_add(pages.saturating_mul(kib << 10));
        }
        // A guest has pages of one node, which is the GPU's where it is fast.
        look.is_bad |= free < wanted;
    }
    Ok(look.cure(
        "reserve as many on each GPU's node: echo N > \
             .../nodeX/hugepages/hugepages-1048576kB/nr_hugepages, soon after the host's \
             boot",
    ))
}

pub fn fragmentation(facts: &HostFacts) -> Checked {
    if let Some(hugetlb) = facts.hugetlb() {
        return Ok(vec![hugetlb].into());
    }
    let (wanted, from) = facts.guest_memory()?;
    let nodes = gpu_nodes(facts)?;
    let text = facts.files.text(BUDDY)?;
    let huge_page = facts.files.number(&format!("{THP}/hpage_pmd_size"));
    let huge_page = huge_page.ok().filter(|bytes| bytes.is_power_of_two());
    let huge_page = huge_page.unwrap_or(HUGE);
    let page = page_of(huge_page);
    let mut look = Look::of(from, format!("{} MiB", wanted >> 20));
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
        look.add(
            BUDDY,
            format!(
                "node {node}: guests of up to {} MiB in huge pages now, of {} MiB free",
                huge >> 20,
                all >> 20
            ),
        );
        missing = missing.max(wanted.saturating_sub(huge));
    }
    let look = look
        .cure(
            "reserve huge pages soon after the host's boot, or echo 1 > \
             /proc/sys/vm/compact_memory before guests start",
        )
        .unsure();
    of_bytes(
        look,
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
    let mut look = Look::default();
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
        look.is_bad |= fixed > fixed.saturating_add(movable) / 4;
        let node = line.split(',').next().unwrap_or_default();
        look.add(
            BLOCKS,
            format!("{node}: {fixed} block(s) that cannot be moved, {movable} that can"),
        );
    }
    if look.evidence.is_empty() {
        return unknown(format!("{BLOCKS}: no number of blocks"));
    }
    let cure =
        "reserve huge pages on the kernel's command line: no compaction brings these together";
    Ok(look.cure(cure).unsure())
}

pub fn zeroing(facts: &HostFacts) -> Checked {
    let (is_on, look) = match facts.kernel_word("init_on_alloc")? {
        Some(value) => (
            ["1", "y", "Y", "on"].contains(&value),
            Look::of("/proc/cmdline", format!("init_on_alloc={value}")),
        ),
        None => {
            const KEY: &str = "CONFIG_INIT_ON_ALLOC_DEFAULT_ON";
            let value = config(facts, KEY)?.unwrap_or("n");
            (value == "y", Look::of(CONFIG, format!("{KEY}={value}")))
        }
    };
    let look = look
        .cure(
            "init_on_alloc=0 on the host's command line, where its security rules allow it; \
             or enable_hugepages",
        )
        .unsure();
    of_guest(
        look,
        facts,
        WITH_GIB_PAGES,
        "one more pass takes at most the 59 s that all took with pages of 1 GiB",
    )
    .when(is_on && facts.hugetlb().is_none())
}

pub fn governor(facts: &HostFacts) -> Checked {
    let mut look = Look::default();
    let mut slow = 0;
    for policy in facts
        .files
        .entries(CPUFREQ)
        .filter(|name| name.starts_with("policy"))
    {
        let file = |name: &str| format!("{CPUFREQ}/{policy}/{name}");
        let governor = facts.files.text(&file("scaling_governor"))?;
        let optional = |name| facts.files.optional(&file(name));
        let driver = optional("scaling_driver")?.unwrap_or_default();
        let preference = optional("energy_performance_preference")?.unwrap_or_default();
        // These drivers scale by themselves below `powersave`.
        let scales = ["intel_pstate", "amd-pstate-epp"].contains(&driver);
        let is_slow = governor == "conservative"
            || (governor == "powersave" && !scales)
            || preference == "power";
        slow += usize::from(is_slow);
        if is_slow && slow == 1 || look.evidence.is_empty() {
            look = Look::of(
                file("scaling_governor"),
                format!("{governor} ({driver} {preference})"),
            );
        }
    }
    if look.evidence.is_empty() {
        return unknown(format!("{CPUFREQ}: no policy"));
    }
    if slow > 0 {
        look.add(CPUFREQ, format!("{slow} slow policies"));
    }
    let cure =
        "the governor `performance` while guests start: cpupower frequency-set -g performance";
    look.cure(cure).when(slow > 0)
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
