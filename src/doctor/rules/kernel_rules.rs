//! Rules about the host's kernel: VFIO, IOMMUFD, the IOMMU.

use super::checked::{Checked, Gap, Look, Sure, unknown};
use super::host_facts::{DEVICES, HostFacts, MajorMinor};

pub const RELEASE: &str = "/proc/sys/kernel/osrelease";
/// Lines of /proc/kallsyms about functions that rules ask for.
pub const SYMBOLS: &str = "/proc/kallsyms";
/// The kernel's configuration, /boot/config-RELEASE or /proc/config.gz.
pub const CONFIG: &str = "kernel configuration";
/// Fault handler of VFIO for huge pages, since 6.12.
pub const HUGE_FAULT: &str = "vfio_pci_mmap_huge_fault";
/// Ordinary fault handler, in every kernel: VFIO is loaded.
pub const FAULT: &str = "vfio_pci_mmap_fault";
pub const TYPE1: &str = "/sys/module/vfio_iommu_type1/parameters";
/// Seconds for each byte of BAR in pages of 4 KiB: 33,554,432 pages, 3.27 s per 128 GiB.
const BAR_SECONDS_PER_BYTE: f64 = 3.27 / (128u64 << 30) as f64;

/// Version of the running kernel, and its text.
pub fn release(facts: &HostFacts) -> Result<(MajorMinor, &str), Gap> {
    let text = facts.files.text(RELEASE)?;
    MajorMinor::parse(text)
        .map(|version| (version, text))
        .ok_or_else(|| Gap::unreadable(RELEASE, text))
}

/// Value of a line of the kernel's configuration; None: not set.
pub fn config<'a>(facts: &'a HostFacts, key: &str) -> Result<Option<&'a str>, Gap> {
    let lines = facts.files.text(CONFIG)?.lines();
    Ok(lines
        .filter_map(|line| line.strip_prefix(key)?.strip_prefix('='))
        .next_back())
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
fn pfnmaps(facts: &HostFacts) -> Result<(Pfnmaps, Look), Gap> {
    let (version, text) = release(facts)?;
    let mut look = Look::of(RELEASE, text);
    let symbols = facts.files.text(SYMBOLS).unwrap_or_default();
    let has = |name: &str| {
        symbols
            .lines()
            .any(|line| line.split_whitespace().nth(2) == Some(name))
    };
    let huge = if has(HUGE_FAULT) {
        look.add(SYMBOLS, HUGE_FAULT);
        true
    } else if has(FAULT) {
        look.add(SYMBOLS, format!("{FAULT}, no {HUGE_FAULT}"));
        false
    } else if let Ok(value) = config(facts, "CONFIG_ARCH_SUPPORTS_HUGE_PFNMAP") {
        look.add(
            CONFIG,
            format!("CONFIG_ARCH_SUPPORTS_HUGE_PFNMAP={}", value.unwrap_or("n")),
        );
        value == Some("y")
    } else {
        look.sure = Sure::Unsure;
        version >= MajorMinor(6, 12)
    };
    Ok(match huge {
        false => (Pfnmaps::Small, look),
        // A distribution may have the fix of 6.15 in an older kernel.
        true if version < MajorMinor(6, 15) => (Pfnmaps::HugeWithoutBatches, look.unsure()),
        true => (Pfnmaps::Huge, look),
    })
}

/// Whether BARs are mapped page by page of 4 KiB.
pub fn maps_small_pages(facts: &HostFacts) -> Result<bool, Gap> {
    Ok(pfnmaps(facts)?.0 == Pfnmaps::Small)
}

pub fn huge_pfnmaps(facts: &HostFacts) -> Checked {
    let (pfnmaps, mut look) = pfnmaps(facts)?;
    if pfnmaps == Pfnmaps::Huge {
        return Ok(look);
    }
    let gpus = facts.gpus();
    let bytes = facts.bar_bytes();
    if let Some(gpu) = gpus.first().filter(|_| bytes == 0) {
        return Err(gpu.without_addresses());
    }
    look.add(
        DEVICES,
        format!("{} GPU(s), BARs of {} GiB in all", gpus.len(), bytes >> 30),
    );
    let cure = match pfnmaps {
        Pfnmaps::HugeWithoutBatches => {
            "a kernel from 6.15 on, or one whose distribution has \"vfio/type1: Use \
                 mapping page mask for pfnmaps\""
        }
        _ => {
            "a kernel from 6.15 on (huge pfnmaps came with 6.12), with QEMU 9.2 or \
                 later; until then a smaller BAR (resourceN_resize)"
        }
    };
    of_bars(look.cure(cure), bytes).when(true)
}

/// Adds the model of BARs of so many bytes in small pages, if there are any.
pub fn of_bars(look: Look, bytes: u64) -> Look {
    if bytes == 0 {
        return look;
    }
    look.model(
        bytes as f64 * BAR_SECONDS_PER_BYTE,
        "3.27 s per 128 GiB of BAR in pages of 4 KiB",
    )
}

pub const IOMMU: &str = "/dev/iommu";
const IOMMUS: &str = "/sys/class/iommu";
pub const GROUPS: &str = "/sys/kernel/iommu_groups";
pub const INTERRUPTS: &str = "/proc/interrupts";
/// Mappings that a container of vfio_iommu_type1 may have by default.
const DMA_ENTRIES: u64 = 65_535;

pub fn iommufd(facts: &HostFacts) -> Checked {
    if let Some(kind) = facts.files.optional(IOMMU)? {
        return Ok(Look::of(IOMMU, kind));
    }
    let value = config(facts, "CONFIG_IOMMUFD")?.unwrap_or("n");
    let mut look = Look::of(IOMMU, "not there");
    look.add(CONFIG, format!("CONFIG_IOMMUFD={value}"));
    let cure = if value == "m" {
        "modprobe iommufd, and name it in /etc/modules-load.d"
    } else {
        "a kernel with IOMMUFD and VFIO_DEVICE_CDEV (6.6 and later)"
    };
    look.cure(cure).unsure().when(true)
}

pub fn dma_entries(facts: &HostFacts) -> Checked {
    let path = format!("{TYPE1}/dma_entry_limit");
    let limit = facts.files.number(&path)?;
    Look::of(&path, limit.to_string())
        .cure(format!(
            "echo {DMA_ENTRIES} > {path}: below its default, large or hot-plugged memory fails \
         to map with ENOSPC"
        ))
        .when(limit < DMA_ENTRIES)
}

pub fn type1_huge_pages(facts: &HostFacts) -> Checked {
    let path = format!("{TYPE1}/disable_hugepages");
    let value = facts.files.text(&path)?;
    Look::of(&path, value)
        .cure(
            "echo N > it, and remove disable_hugepages=1 of vfio_iommu_type1 from modprobe.d \
         and the kernel's command line",
        )
        .when(value == "Y")
}

pub fn iommu(facts: &HostFacts) -> Checked {
    let names = facts.files.text(IOMMUS)?;
    let shown = match names {
        "" => "empty".into(),
        names => names.replace('\n', " "),
    };
    Look::of(IOMMUS, shown)
        .cure(
            "switch VT-d or AMD-Vi on in the firmware's setup, with intel_iommu=on where the \
             kernel does not by itself: no GPU can be passed through",
        )
        .when(names.is_empty())
}

pub fn iommu_mode(facts: &HostFacts) -> Checked {
    let (mut strict, mut all) = (Vec::new(), 0);
    for group in facts.files.entries(GROUPS) {
        let path = format!("{GROUPS}/{group}/type");
        all += 1;
        if facts.files.text(&path)? == "DMA" {
            strict.push(path);
        }
    }
    let Some(first) = strict.first() else {
        if all == 0 {
            return unknown(format!("{GROUPS}: no group"));
        }
        return Ok(Look::of(GROUPS, format!("{all} group(s), none strict")));
    };
    let mut look = Look::of(first, "DMA");
    look.add(GROUPS, format!("{} of {all} group(s) strict", strict.len()));
    look.cure("iommu=pt, or iommu.strict=0, on the kernel's command line")
        .unsure()
        .when(true)
}

pub fn interrupt_remapping(facts: &HostFacts) -> Checked {
    let text = facts.files.text(INTERRUPTS)?;
    let chip = |begin| text.split_whitespace().find(|word| word.starts_with(begin));
    if let Some(chip) = chip("IR-").or_else(|| chip("ITS-")) {
        return Ok(Look::of(INTERRUPTS, chip));
    }
    let path = format!("{TYPE1}/allow_unsafe_interrupts");
    let unsafe_ones = facts.files.optional(&path)?.unwrap_or("not there");
    let mut look = Look::of(INTERRUPTS, "no chip with remapping (IR-)");
    look.add(path, unsafe_ones);
    look.cure(
        "switch interrupt remapping (x2APIC) on in the firmware's setup and remove \
         intremap=off: each interrupt of a GPU leaves the guest without it",
    )
    .when(true)
}

pub fn groups(facts: &HostFacts) -> Checked {
    let mut look = Look::default();
    for gpu in facts.some_gpus()? {
        let link = facts.files.text(&gpu.path("iommu_group"))?;
        let group = link.rsplit('/').next().unwrap_or_default();
        let path = format!("{GROUPS}/{group}/devices");
        let address = gpu.address.to_string();
        // Functions of the GPU's own slot and bridges above it go with it.
        let slot = address.split('.').next().unwrap_or_default();
        let is_other = |name: &&str| {
            !name.starts_with(slot)
                && facts
                    .files
                    .text(&format!("{DEVICES}/{name}/class"))
                    .is_ok_and(|c| !c.starts_with("0x0604"))
        };
        let others: Vec<&str> = facts.files.text(&path)?.lines().filter(is_other).collect();
        look.is_bad |= !others.is_empty();
        look.add(
            path,
            if others.is_empty() {
                address
            } else {
                format!("{address} with {}", others.join(" "))
            },
        );
    }
    Ok(look.cure(
        "switch ACS on in the firmware's setup, or move the GPU to another slot: a group \
         goes to one guest as a whole",
    ))
}
