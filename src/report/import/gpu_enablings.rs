//! Steps of GPUs as kernel lines show them: the GPUs, their BARs, and the times at which the host
//! mapped the BARs.
//!
//! `enabling device` is printed just before the write that makes the host map the BARs; nothing is
//! printed when the write returns. The end is the first sign of the return, and is stored with it:
//! the next kernel line of that GPU, the agent's uevent of its binding, the next GPU's enabling
//! (the driver probes one after another), or the driver's line at the end of its load.

use super::clocks::Placed;
use super::item::{Fact, Item, Stamp};
use super::kernel_lines;
use super::kernel_lines::Meaning;
use crate::data::agent_log::AgentEvent;
use kata_gpu_wire::driver_log;
use kata_gpu_wire::pci_address::PciAddress;
use std::collections::{BTreeMap, HashMap};

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
        let mut steps = Self {
            gpus: more.map(|gpu| (gpu, None)).collect(),
            ..Self::default()
        };
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
                && let Some(Meaning::Enabling {
                    function,
                    driver: true,
                }) = kernel_lines::meaning(text)
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
        self.gpus
            .keys()
            .position(|known| *known == gpu)
            .map(|at| at as u64)
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
            Some(Meaning::Bar {
                function,
                bar,
                bytes,
            }) if self.gpus.contains_key(&function) => {
                self.bars.entry(function).or_default().insert(bar, bytes);
            }
            Some(Meaning::Enabling { function, driver }) if self.gpus.contains_key(&function) => {
                end(function, "next line of this GPU", open);
                if driver {
                    let others: Vec<PciAddress> = open.keys().copied().collect();
                    others
                        .into_iter()
                        .for_each(|other| end(other, "next GPU's enabling", open));
                }
                open.insert(function, self.enablings.len());
                self.enablings.push(Enabling {
                    gpu: function,
                    begin: placed,
                    begin_line: item.line,
                    end: None,
                });
                return;
            }
            Some(Meaning::ModuleLoaded) => {
                let all: Vec<PciAddress> = open.keys().copied().collect();
                all.into_iter()
                    .for_each(|gpu| end(gpu, "end of the module's load", open));
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
    use crate::data::imported_record::Format;

    const MS: i64 = 1_000_000;

    fn steps(lines: &[(i64, Fact)]) -> Steps {
        let items: Vec<Item> = lines
            .iter()
            .map(|(ms, fact)| Item::new(Stamp::Kernel(ms * MS), Format::Console, 1, fact.clone()))
            .collect();
        let placed = items
            .iter()
            .map(|i| {
                (
                    Placed {
                        at_ns: if let Stamp::Kernel(ns) = i.stamp {
                            ns
                        } else {
                            0
                        },
                        error_ns: 0,
                    },
                    i,
                )
            })
            .collect();
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
        lines.push(kernel(
            1000,
            "nvidia 0000:02:00.0: enabling device (0140 -> 0142)",
        ));
        lines.push((
            4200,
            Fact::Agent(AgentEvent::Bound("0000:02:00.0".parse().unwrap())),
        ));
        lines.push(kernel(
            4400,
            "nvidia 0000:04:00.0: enabling device (0140 -> 0142)",
        ));
        lines.push(kernel(
            7700,
            "nvidia 0000:03:00.0: enabling device (0140 -> 0142)",
        ));
        lines.push(kernel(
            11_000,
            "NVRM: loading NVIDIA UNIX x86_64 Kernel Module",
        ));
        steps(&lines)
    }

    #[test]
    fn the_mapping_of_a_gpus_bars_ends_with_the_first_sign_of_it() {
        let steps = three();
        let ends: Vec<_> = steps
            .enablings
            .iter()
            .map(|e| {
                (
                    e.gpu.to_string(),
                    e.begin.at_ns / MS,
                    e.end.map(|(p, by)| (p.at_ns / MS, by)),
                )
            })
            .collect();
        let want = [
            (
                "0000:02:00.0".to_string(),
                1000,
                Some((4200, "bind uevent")),
            ),
            (
                "0000:04:00.0".to_string(),
                4400,
                Some((7700, "next GPU's enabling")),
            ),
            (
                "0000:03:00.0".to_string(),
                7700,
                Some((11_000, "end of the module's load")),
            ),
        ];
        assert_eq!(ends, want);
        assert_eq!(steps.index("0000:04:00.0".parse().unwrap()), Some(2));
    }
}
