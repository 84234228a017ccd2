//! Rules about the host's kernel: VFIO, IOMMUFD, the IOMMU.

use super::finding::{Answer, Basis, Checked, Cost, Evidence, Gap, Problem, Sure, evidence};
use super::host_facts::{DEVICES, HostFacts, MajorMinor};

pub const RELEASE: &str = "/proc/sys/kernel/osrelease";
/// Lines of /proc/kallsyms about functions that rules ask for.
pub const SYMBOLS: &str = "/proc/kallsyms";
/// The kernel's configuration, from /boot or /proc/config.gz.
pub const CONFIG: &str = "/proc/config.gz";
/// Fault handler of VFIO for huge pages, since 6.12.
pub const HUGE_FAULT: &str = "vfio_pci_mmap_huge_fault";
/// Ordinary fault handler, in every kernel: VFIO is loaded.
pub const FAULT: &str = "vfio_pci_mmap_fault";
pub const TYPE1: &str = "/sys/module/vfio_iommu_type1/parameters";
/// Seconds for each byte of BAR in pages of 4 KiB: 33,554,432 pages, 3.27 s per 128 GiB.
const BAR_SECONDS_PER_BYTE: f64 = 3.27 / (128u64 << 30) as f64;

pub fn fine(items: Vec<Evidence>) -> Checked {
    Ok(Answer::Fine(items))
}

/// Something found without a figure for its cost.
pub fn found(evidence: Vec<Evidence>, cure: impl Into<String>) -> Problem {
    Problem { evidence, cost: None, cure: cure.into(), sure: Sure::Sure }
}

impl Problem {
    pub fn unsure(self) -> Self {
        Self { sure: Sure::Unsure, ..self }
    }

    pub fn model(self, seconds: f64, of: impl Into<String>) -> Self {
        Self { cost: Some(Cost { seconds, basis: Basis::Model(of.into()) }), ..self }
    }

    pub fn measured(self, seconds: f64, of: impl Into<String>) -> Self {
        Self { cost: Some(Cost { seconds, basis: Basis::Measured(of.into()) }), ..self }
    }

    pub fn checked(self) -> Checked {
        Ok(Answer::Found(self))
    }
}

/// Version of the running kernel, and its text.
pub fn release(facts: &HostFacts) -> Result<(MajorMinor, &str), Gap> {
    let text = facts.files.text(RELEASE)?;
    MajorMinor::parse(text).map(|version| (version, text)).ok_or_else(|| Gap::unreadable(RELEASE, text))
}

/// Value of a line of the kernel's configuration; None: not set.
pub fn config<'a>(facts: &'a HostFacts, key: &str) -> Result<Option<&'a str>, Gap> {
    let lines = facts.files.text(CONFIG)?.lines();
    Ok(lines.filter_map(|line| line.strip_prefix(key)?.strip_prefix('=')).next_back())
}

/// How VFIO's BARs reach the page tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Pfnmaps {
    Huge,
    /// Huge pages, and each of 4 KiB is still looked up by itself.
    HugeWithoutBatches,
    Small,
}

/// By the function that faults huge pages in, where VFIO is loaded; by version for the rest.
fn pfnmaps(facts: &HostFacts) -> Result<(Pfnmaps, Vec<Evidence>, Sure), Gap> {
    let (version, text) = release(facts)?;
    let mut seen = vec![evidence(RELEASE, text)];
    let symbols = facts.files.text(SYMBOLS).unwrap_or_default();
    let has = |name: &str| symbols.lines().any(|line| line.split_whitespace().nth(2) == Some(name));
    let (huge, sure) = if has(HUGE_FAULT) {
        seen.push(evidence(SYMBOLS, HUGE_FAULT));
        (true, Sure::Sure)
    } else if has(FAULT) {
        seen.push(evidence(SYMBOLS, format!("{FAULT}, no {HUGE_FAULT}")));
        (false, Sure::Sure)
    } else if let Ok(value) = config(facts, "CONFIG_ARCH_SUPPORTS_HUGE_PFNMAP") {
        seen.push(evidence(CONFIG, format!("CONFIG_ARCH_SUPPORTS_HUGE_PFNMAP={}", value.unwrap_or("n"))));
        (value == Some("y"), Sure::Sure)
    } else {
        (version >= MajorMinor(6, 12), Sure::Unsure)
    };
    Ok(match huge {
        false => (Pfnmaps::Small, seen, sure),
        // A distribution may have the fix of 6.15 in an older kernel.
        true if version < MajorMinor(6, 15) => (Pfnmaps::HugeWithoutBatches, seen, Sure::Unsure),
        true => (Pfnmaps::Huge, seen, sure),
    })
}

/// Whether BARs are mapped page by page of 4 KiB.
pub fn maps_small_pages(facts: &HostFacts) -> Result<bool, Gap> {
    Ok(pfnmaps(facts)?.0 == Pfnmaps::Small)
}

pub fn huge_pfnmaps(facts: &HostFacts) -> Checked {
    let (pfnmaps, mut seen, sure) = pfnmaps(facts)?;
    if pfnmaps == Pfnmaps::Huge {
        return fine(seen);
    }
    let gpus = facts.gpus();
    let bytes = gpus.iter().fold(0u64, |sum, gpu| sum.saturating_add(gpu.bytes()));
    seen.push(evidence(DEVICES, format!("{} GPU(s), BARs of {} GiB in all", gpus.len(), bytes >> 30)));
    let cure = match pfnmaps {
        Pfnmaps::HugeWithoutBatches => {
            "a kernel from 6.15 on, or one whose distribution has \"vfio/type1: Use mapping page mask for pfnmaps\""
        }
        _ => "a kernel from 6.15 on (huge pfnmaps came with 6.12), with QEMU 9.2 or later; until then a smaller BAR (resourceN_resize)",
    };
    let mut problem = found(seen, cure);
    if bytes > 0 {
        problem = problem.model(bytes as f64 * BAR_SECONDS_PER_BYTE, "3.27 s per 128 GiB of BAR in pages of 4 KiB");
    }
    Problem { sure, ..problem }.checked()
}
