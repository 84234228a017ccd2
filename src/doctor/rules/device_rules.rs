//! Rules about the GPUs of a host: BARs, power, link, reset, and which is slower than the others.

use super::checked::{Basis, Checked, Gap, Look, unknown};
use super::host_facts::{Gpu, HostFacts};
use super::kernel_rules::maps_small_pages;
use kata_gpu_report::analysis::statistics::Summary;

/// BARs from here on are mapped in huge pages at all.
const LARGE: u64 = 1 << 30;
const HUGE_PAGE: u64 = 2 << 20;
/// Wait of the kernel for a function that leaves D3cold (PCI_PM_D3COLD_WAIT).
const D3COLD_SECONDS: f64 = 0.1;
/// A GPU is an outlier if its median enabling is this many times that of all, and 0.1 s longer.
const OUTLIER: f64 = 1.5;
const OUTLIER_SECONDS: f64 = 0.1;
/// Boots below which a GPU's median proves nothing.
const MIN_BOOTS: usize = 5;

/// Why the configuration space of a GPU was not read.
fn asleep(gpu: &Gpu) -> Gap {
    let path = gpu.path("power_state");
    Gap::unknown(format!(
        "{path}: the GPU sleeps: its link and BAR sizes cannot be read; look again \
             while a guest uses it"
    ))
}

pub fn bar_alignment(facts: &HostFacts) -> Checked {
    let mut look = Look::default();
    let mut gap = None;
    for gpu in facts.some_gpus()? {
        let path = gpu.path("resource");
        facts.files.text(&path)?;
        if !gpu.has_addresses() {
            gap = Some(gpu.without_addresses());
            continue;
        }
        let large: Vec<_> = gpu
            .bars
            .iter()
            .filter(|(_, _, bytes)| *bytes >= LARGE)
            .collect();
        let text = large
            .iter()
            .map(|(n, start, bytes)| format!("BAR {n} at {start:#x}, {} GiB", bytes >> 30))
            .collect::<Vec<_>>()
            .join("; ");
        look.is_bad |= large
            .iter()
            .any(|(_, start, _)| *start == 0 || start % HUGE_PAGE != 0);
        look.add(
            path,
            if text.is_empty() {
                "no BAR of 1 GiB or more".to_string()
            } else {
                text
            },
        );
    }
    if let Some(gap) = gap.filter(|_| !look.is_bad) {
        return Err(gap);
    }
    Ok(look.cure(
        "Above 4G Decoding and a larger MMIO window in the firmware's setup: a BAR without \
         an aligned address has no huge pages",
    ))
}

pub fn bar_size(facts: &HostFacts) -> Checked {
    let small_pages = maps_small_pages(facts)?;
    let mut look = Look::default();
    let mut gap = None;
    let mut has_sizes = false;
    for gpu in facts.some_gpus()? {
        if facts.files.is_asleep(&gpu.address.to_string()) {
            gap = Some(asleep(&gpu));
            continue;
        }
        for (bar, _, bytes) in &gpu.bars {
            let path = gpu.path(&format!("resource{bar}_resize"));
            let Some(text) = facts.files.optional(&path)? else {
                continue;
            };
            has_sizes = true;
            // Bit n: 2^n MiB.
            let sizes = u64::from_str_radix(text.trim_start_matches("0x"), 16)
                .map_err(|_| Gap::unreadable(&path, text))?;
            let smallest = 1u64
                .checked_shl(sizes.trailing_zeros() + 20)
                .unwrap_or(u64::MAX);
            if smallest < *bytes && *bytes >= LARGE {
                look.add(
                    path,
                    format!("{} GiB, could be {} MiB", bytes >> 30, smallest >> 20),
                );
            }
        }
    }
    let is_bad = small_pages && !look.evidence.is_empty();
    if !is_bad {
        if let Some(gap) = gap {
            return Err(gap);
        }
        if !has_sizes {
            return unknown(
                "no resourceN_resize of a GPU: no BAR can be resized, or the kernel \
                     does not show it",
            );
        }
        let size = match small_pages {
            true => "4 KiB, and no BAR can be smaller",
            false => "huge",
        };
        look.add("page size of BARs", size);
    }
    let cure = "where no peer needs all of it: unbind, write a smaller size to resourceN_resize, \
         bind to vfio-pci; a kernel with huge pfnmaps makes it needless";
    look.cure(cure).unsure().when(is_bad)
}

pub fn power_state(facts: &HostFacts) -> Checked {
    let mut look = Look::default();
    let mut cold = 0;
    for gpu in facts.some_gpus()? {
        let path = gpu.path("power_state");
        let state = facts.files.text(&path)?;
        cold += usize::from(state == "D3cold");
        look.add(path, state);
    }
    look.cure("echo 0 > .../d3cold_allowed, or vfio_pci disable_idle_d3=1")
        .model(
            cold as f64 * D3COLD_SECONDS,
            "100 ms for each function that leaves D3cold, and training of its link",
        )
        .when(cold > 0)
}

pub fn link(facts: &HostFacts) -> Checked {
    let mut look = Look::default();
    let (mut narrow, mut slow) = (false, false);
    let mut gap = None;
    for gpu in facts.some_gpus()? {
        if facts.files.is_asleep(&gpu.address.to_string()) {
            gap = Some(asleep(&gpu));
            continue;
        }
        let read = |name: &str| facts.files.text(&gpu.path(name));
        let (width, max_width) = (read("current_link_width")?, read("max_link_width")?);
        let (speed, max_speed) = (read("current_link_speed")?, read("max_link_speed")?);
        narrow |= width != max_width;
        slow |= speed != max_speed;
        look.add(
            gpu.path("current_link_speed"),
            format!("{speed} x{width} of {max_speed} x{max_width}"),
        );
    }
    let cure = "reseat GPU, riser or cable, and look for bifurcation in the firmware's setup: \
         firmware and data load over this link";
    if narrow {
        return look.cure(cure).when(true);
    }
    if let Some(gap) = gap.filter(|_| !slow) {
        return Err(gap);
    }
    // An idle link may be slow to save power.
    look.cure(format!(
        "look again while a guest uses it; if it stays: {cure}"
    ))
    .unsure()
    .when(slow)
}

pub fn reset_method(facts: &HostFacts) -> Checked {
    let mut look = Look::default();
    for gpu in facts.some_gpus()? {
        let path = gpu.path("reset_method");
        let methods = facts.files.text(&path)?;
        look.is_bad |= !methods.split_whitespace().any(|method| method == "flr");
        look.add(path, methods);
    }
    let cure = "echo flr > .../reset_method where the GPU has it: a reset of the bus waits for its \
         link and for all functions behind it";
    Ok(look.cure(cure).unsure())
}

pub fn outlier(facts: &HostFacts) -> Checked {
    let known = facts
        .boots
        .enablings
        .iter()
        .filter(|(_, took)| took.len() >= MIN_BOOTS);
    let medians: Vec<(&str, i64)> = known
        .filter_map(|(gpu, took)| Some((gpu.as_str(), Summary::of(took)?.median_ns)))
        .collect();
    if medians.len() < 3 {
        return unknown(format!(
            "enablings of 3 GPUs in {MIN_BOOTS} boots each: only {} GPU(s) have as many in --dir",
            medians.len()
        ));
    }
    let all: Vec<i64> = medians.iter().map(|(_, ns)| *ns).collect();
    let seconds = |ns: i64| ns as f64 / 1e9;
    let all = seconds(Summary::of(&all).map_or(0, |s| s.median_ns));
    let mut look = Look::of(
        "gpu.enable",
        format!("median {all:.3} s of {} GPUs", medians.len()),
    );
    let mut lost = 0.0;
    for (gpu, ns) in medians {
        let took = seconds(ns);
        if took > all * OUTLIER && took > all + OUTLIER_SECONDS {
            look.add(gpu, format!("median {took:.3} s"));
            lost += took - all;
        }
    }
    look.cure("compare its BARs, NUMA node and link with its neighbours' above; then its slot")
        .cost(
            lost,
            Basis::Measured("gpu.enable, beyond the median of all GPUs here".into()),
        )
        .when(lost > 0.0)
}
