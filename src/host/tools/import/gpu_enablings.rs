//! Steps of GPUs as kernel lines show them: the GPUs, their BARs, the times at which the host
//! mapped the BARs, and the calls of a trace that did it.
//!
//! `enabling device` is printed just before the write that makes the host map the BARs; nothing is
//! printed when the write returns. The end is the first sign of the return, and is stored with it:
//! the next kernel line of that GPU, the agent's uevent of its binding, the next GPU's enabling
//! (the driver probes one after another), or the driver's line at the end of its load.

use super::clocks::{Offset, Placed};
use super::item::{Fact, Item, Stamp};
use super::kernel_lines;
use super::kernel_lines::Meaning;
use super::pins::Region;
use crate::driver_log;
use crate::host::data::agent_log::AgentEvent;
use crate::pci::PciAddress;
use std::collections::{BTreeMap, HashMap};

/// Calls and enablings match if their distances agree this well.
const MATCH_NS: u64 = 50_000_000;
/// Longest time from the print of `enabling device` to the write that the host sees, on a machine
/// that is not overloaded.
const PRINT_NS: u64 = 5_000_000;
/// Calls that are compared with the enabling of GPUs are at least this long, or of a BAR's size.
const LONG_NS: u64 = 100_000_000;

/// A GPU's enabling.
#[derive(Clone, Debug, PartialEq)]
pub struct Enabling {
    pub gpu: PciAddress,
    pub begin: Placed,
    pub begin_line: u64,
    pub end: Option<(Placed, &'static str)>,
}

/// Facts about the GPUs from kernel lines.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Steps {
    /// PCI ids of the GPUs, in PCI order, which is the order of the CDI names.
    pub gpus: BTreeMap<PciAddress, Option<String>>,
    pub bars: BTreeMap<PciAddress, BTreeMap<u8, u64>>,
    pub enablings: Vec<Enabling>,
}

impl Steps {
    /// Collects the steps from items in order of time. `more`: GPUs that other lines named.
    pub fn new(items: &[(Placed, &Item)], more: impl Iterator<Item = PciAddress>) -> Self {
        let mut steps = Self { gpus: more.map(|gpu| (gpu, None)).collect(), ..Self::default() };
        for (_, item) in items {
            if let Fact::Kernel(text) = &item.fact
                && let Some(Meaning::GpuFound { gpu, device }) = kernel_lines::meaning(text)
            {
                steps.gpus.insert(gpu, Some(device));
            }
        }
        // A console that begins late has no enumeration: every function nvidia.ko enables is a GPU.
        for (_, item) in items {
            if let Fact::Kernel(text) = &item.fact
                && let Some(Meaning::Enabling { function, driver: true }) = kernel_lines::meaning(text)
            {
                steps.gpus.entry(function).or_insert(None);
            }
        }
        let mut open: HashMap<PciAddress, usize> = HashMap::new();
        for (placed, item) in items {
            steps.take(*placed, item, &mut open);
        }
        steps
    }

    /// The CDI name.
    pub fn index(&self, gpu: PciAddress) -> Option<u64> {
        self.gpus.keys().position(|known| *known == gpu).map(|at| at as u64)
    }

    fn take(&mut self, placed: Placed, item: &Item, open: &mut HashMap<PciAddress, usize>) {
        let enablings = &mut self.enablings;
        let mut end = |gpu: PciAddress, by: &'static str, open: &mut HashMap<PciAddress, usize>| {
            if let Some(enabling) = open.remove(&gpu).and_then(|at| enablings.get_mut(at)) {
                enabling.end = Some((placed, by));
            }
        };
        let text = match &item.fact {
            Fact::Agent(AgentEvent::Bound(gpu)) => return end(*gpu, "bind uevent", open),
            Fact::Kernel(text) => text,
            Fact::Init(_) | Fact::Agent(_) | Fact::Plain { .. } => return,
        };
        match kernel_lines::meaning(text) {
            Some(Meaning::Bar { function, bar, bytes }) if self.gpus.contains_key(&function) => {
                self.bars.entry(function).or_default().insert(bar, bytes);
            }
            Some(Meaning::Enabling { function, driver }) if self.gpus.contains_key(&function) => {
                end(function, "next line of this GPU", open);
                if driver {
                    let others: Vec<PciAddress> = open.keys().copied().collect();
                    others.into_iter().for_each(|other| end(other, "next GPU's enabling", open));
                }
                open.insert(function, self.enablings.len());
                self.enablings.push(Enabling { gpu: function, begin: placed, begin_line: item.line, end: None });
                return;
            }
            Some(Meaning::ModuleLoaded) => {
                let all: Vec<PciAddress> = open.keys().copied().collect();
                all.into_iter().for_each(|gpu| end(gpu, "end of the module's load", open));
                return;
            }
            _ => {}
        }
        if let Some(gpu) = driver_log::address(text) {
            let by_slot = open.keys().copied().find(|known| *known == gpu);
            if let Some(gpu) = by_slot {
                end(gpu, "next line of this GPU", open);
            }
        }
    }

    /// GPU and BAR of a region: the region has the BAR's size, and was pinned while the GPU was
    /// being enabled. None if no GPU fits, or several do and the clocks are inexact.
    pub fn owner(&self, region: &Region, at: Placed) -> Option<(PciAddress, u8)> {
        let end_ns = at.at_ns.saturating_add_unsigned(region.took_ns);
        let overlap = |enabling: &&Enabling| {
            let slack = i64::try_from(at.error_ns.saturating_add(enabling.begin.error_ns).saturating_add(PRINT_NS)).unwrap_or(i64::MAX);
            let from = enabling.begin.at_ns.saturating_sub(slack).max(at.at_ns);
            let to = enabling.end.map_or(i64::MAX, |(end, _)| end.at_ns.saturating_add(slack)).min(end_ns);
            (to.saturating_sub(from), enabling.begin.at_ns.abs_diff(at.at_ns))
        };
        let bar = |gpu: PciAddress| {
            self.bars.get(&gpu).and_then(|bars| bars.iter().find(|(_, bytes)| **bytes == region.bytes)).map(|(bar, _)| *bar)
        };
        let candidates: Vec<(&Enabling, u8)> = self
            .enablings
            .iter()
            .filter(|e| overlap(e).0 >= 0 && overlap(e).0.unsigned_abs() >= region.took_ns / 2)
            .filter_map(|e| Some((e, bar(e.gpu)?)))
            .collect();
        // Exact clocks leave one candidate. Else the nearest beginning counts, if the region took
        // longer than twice the error.
        match candidates.as_slice() {
            [] => None,
            [(only, bar)] => Some((only.gpu, *bar)),
            several => {
                let (nearest, bar) = several.iter().min_by_key(|(e, _)| overlap(e).1)?;
                (region.took_ns > 2 * at.error_ns).then_some((nearest.gpu, *bar))
            }
        }
    }

    /// The guest's clock minus a trace's, by the calls that the enabling of the GPUs made: both
    /// follow each other at the same distances.
    pub fn offset_of(&self, regions: &[(i64, Region)]) -> Option<(Offset, usize)> {
        let sizes: std::collections::BTreeSet<u64> = self.bars.values().flat_map(BTreeMap::values).copied().collect();
        let largest = sizes.iter().max().copied();
        let known = regions.iter().any(|(_, r)| r.bytes > 0) && largest.is_some();
        let candidates: Vec<i64> = regions
            .iter()
            .filter(|(_, r)| if known { Some(r.bytes) == largest } else { r.took_ns >= LONG_NS })
            .map(|(at, _)| *at)
            .collect();
        let begins: Vec<i64> = self.enablings.iter().map(|e| e.begin.at_ns).collect();
        if begins.is_empty() {
            return None;
        }
        let spread = |window: &[i64]| {
            let offsets = window.iter().zip(&begins).map(|(call, begin)| begin.saturating_sub(*call));
            let (low, high) = (offsets.clone().min()?, offsets.max()?);
            Some((high.abs_diff(low), low))
        };
        let (spread, low) = candidates.windows(begins.len()).filter_map(spread).min()?;
        // A single GPU has no distances to compare: exactly one call must fit.
        if spread > MATCH_NS || (begins.len() == 1 && candidates.len() != 1) {
            return None;
        }
        let error_ns = (spread / 2).saturating_add(PRINT_NS);
        Some((Offset { ns: low.saturating_add_unsigned(spread / 2), error_ns }, begins.len()))
    }
}

/// Sorts items by time; items of one time keep the order of their files.
pub fn in_time(mut items: Vec<(Placed, &Item)>) -> Vec<(Placed, &Item)> {
    // Kernel lines first: a process logs an event after the kernel does.
    items.sort_by_key(|(placed, item)| (placed.at_ns, !matches!(item.stamp, Stamp::Kernel(_))));
    items
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::data::imported_record::Format;

    const MS: i64 = 1_000_000;

    fn steps(lines: &[(i64, Fact)]) -> Steps {
        let items: Vec<Item> = lines.iter().map(|(ms, fact)| Item::new(Stamp::Kernel(ms * MS), Format::Console, 1, fact.clone())).collect();
        let placed =
            items.iter().map(|i| (Placed { at_ns: if let Stamp::Kernel(ns) = i.stamp { ns } else { 0 }, error_ns: 0 }, i)).collect();
        Steps::new(&in_time(placed), std::iter::empty())
    }

    fn kernel(ms: i64, text: &str) -> (i64, Fact) {
        (ms, Fact::Kernel(text.into()))
    }

    fn three() -> Steps {
        let mut lines: Vec<(i64, Fact)> = (2..5)
            .flat_map(|n| {
                [
                    kernel(n, &format!("pci 0000:0{n}:00.0: [10de:2330] type 00 class 0x030200 PCIe Endpoint")),
                    kernel(n + 5, &format!("pci 0000:0{n}:00.0: BAR 2 [mem 0x{n}000000000-0x{}fffffffff 64bit pref]: assigned", n + 1)),
                ]
            })
            .collect();
        lines.push(kernel(1000, "nvidia 0000:02:00.0: enabling device (0140 -> 0142)"));
        lines.push((4200, Fact::Agent(AgentEvent::Bound("0000:02:00.0".parse().unwrap()))));
        lines.push(kernel(4400, "nvidia 0000:04:00.0: enabling device (0140 -> 0142)"));
        lines.push(kernel(7700, "nvidia 0000:03:00.0: enabling device (0140 -> 0142)"));
        lines.push(kernel(11_000, "NVRM: loading NVIDIA UNIX x86_64 Kernel Module"));
        steps(&lines)
    }

    #[test]
    fn the_mapping_of_a_gpus_bars_ends_with_the_first_sign_of_it() {
        let steps = three();
        let ends: Vec<_> =
            steps.enablings.iter().map(|e| (e.gpu.to_string(), e.begin.at_ns / MS, e.end.map(|(p, by)| (p.at_ns / MS, by)))).collect();
        let want = [
            ("0000:02:00.0".to_string(), 1000, Some((4200, "bind uevent"))),
            ("0000:04:00.0".to_string(), 4400, Some((7700, "next GPU's enabling"))),
            ("0000:03:00.0".to_string(), 7700, Some((11_000, "end of the module's load"))),
        ];
        assert_eq!(ends, want);
        assert_eq!(steps.index("0000:04:00.0".parse().unwrap()), Some(2));
    }

    #[test]
    fn a_traces_clock_is_found_by_its_effects_and_calls_get_gpus() {
        let steps = three();
        let bytes = steps.bars.values().next().unwrap()[&2];
        let region = |at_ms: i64, bytes, took_ms: u64| {
            let region = Region { pid: None, bytes, calls: 1, at_ns: None, took_ns: took_ms * 1_000_000, end_ns: None, line: 1 };
            (at_ms * MS, region)
        };
        // The host's clock is 700 s ahead; one region of another size stands between.
        let calls = [region(600_000, 4096, 5000), region(701_001, bytes, 3180), region(704_402, bytes, 3270), region(707_700, bytes, 3290)];
        let (offset, pairs) = steps.offset_of(&calls).unwrap();
        assert_eq!((offset.ns, offset.error_ns, pairs), (-700_001 * MS, 6_000_000, 3));
        let owner = |n: usize| {
            let (at, region) = &calls[n];
            steps.owner(region, Placed { at_ns: at + offset.ns, error_ns: offset.error_ns }).map(|(gpu, bar)| (gpu.to_string(), bar))
        };
        assert_eq!(owner(1), Some(("0000:02:00.0".into(), 2)));
        assert_eq!(owner(2), Some(("0000:04:00.0".into(), 2)));
        assert_eq!(owner(0), None);
        let moved = [region(701_001, bytes, 3180), region(704_902, bytes, 3270), region(707_700, bytes, 3290)];
        assert_eq!(steps.offset_of(&moved), None, "distances that do not agree are another boot's");
    }
}
