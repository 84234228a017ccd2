//! Facts that the whole log states: the guest's GPUs, their ids, and the facts that decide what a
//! failure means. Pure.

use super::clocks::Placed;
use super::facts::{Fact, Item};
use super::kernel_lines::Meaning;
use kata_gpu_wire::driver_log;
use kata_gpu_wire::failure::Facts;
use kata_gpu_wire::pci_address::PciAddress;
use std::collections::{BTreeMap, BTreeSet};

/// Most GPUs that the driver's messages alone make known.
const MAX_NAMED: usize = 256;

#[derive(Default)]
pub struct GuestFacts {
    /// All GPUs, in PCI order, which is the order of the CDI names.
    pub gpus: BTreeSet<PciAddress>,
    /// PCI device ids, of NVIDIA's.
    devices: BTreeMap<PciAddress, u16>,
    facts: Facts,
    /// Whether the log has the PCI enumeration: a GPU that is not in it did not reach the guest.
    pub has_enumeration: bool,
    /// Whether NVRC is the init: it initialises one GPU after another.
    pub is_nvrcs: bool,
}

impl GuestFacts {
    pub fn of(items: &[(Placed, &Item)]) -> Self {
        let mut all = Self::default();
        let (mut named, mut has_banner) = (BTreeSet::new(), false);
        for (_, item) in items {
            match &item.fact {
                Fact::Init(line) => all.gpus.extend(line.gpu),
                Fact::Kernel { text, meaning } => {
                    all.facts.take_line(text);
                    has_banner |= matches!(meaning, Meaning::Banner { .. });
                    all.take(text, meaning);
                    if let Some(gpu) = named_gpu(text, meaning)
                        && named.len() < MAX_NAMED
                    {
                        named.insert(gpu);
                    }
                }
                Fact::Agent(_) | Fact::Runtime(_) => {}
            }
        }
        // A log that begins late has no enumeration: the driver's messages name the GPUs.
        if all.gpus.is_empty() && !all.has_enumeration {
            all.gpus = named;
        }
        // The line about encryption is of the level of the enumeration's.
        if has_banner && all.has_enumeration && all.facts.is_confidential.is_none() {
            all.facts.is_confidential = Some(false);
        }
        all.facts.gpus = all.gpus.len();
        all
    }

    fn take(&mut self, text: &str, meaning: &Meaning) {
        match meaning {
            Meaning::GpuFound { gpu, .. } => {
                self.has_enumeration = true;
                self.gpus.insert(*gpu);
                self.is_id(*gpu, text);
            }
            Meaning::Function => self.has_enumeration = true,
            // A console that begins late has no enumeration: every function that nvidia.ko enables
            // is a GPU.
            Meaning::Enabling {
                function,
                driver: true,
            } => {
                self.gpus.insert(*function);
            }
            Meaning::Nvrc { .. } | Meaning::CtkBegins => self.is_nvrcs = true,
            _ => {
                if let Some(gpu) = driver_log::address(text) {
                    self.is_id(gpu, text);
                }
            }
        }
    }

    fn is_id(&mut self, gpu: PciAddress, text: &str) {
        if let Some(id) = driver_log::device_id(text)
            && self.devices.len() < MAX_NAMED
        {
            self.devices.entry(gpu).or_insert(id);
        }
    }

    /// Facts of a GPU, or of the guest.
    pub fn of_gpu(&self, gpu: Option<PciAddress>) -> Facts {
        let device = gpu.and_then(|gpu| self.devices.get(&gpu).copied());
        Facts {
            device,
            ..self.facts.clone()
        }
    }

    /// Whether all GPUs are of one kind: a message without an address is about each of them.
    pub fn are_alike(&self) -> bool {
        let mut ids = self.gpus.iter().map(|gpu| self.devices.get(gpu));
        let first = ids.next().flatten();
        self.gpus.len() < 2 || first.is_some() && ids.all(|id| id == first)
    }
}

/// GPU that a message of the driver names.
fn named_gpu(text: &str, meaning: &Meaning) -> Option<PciAddress> {
    match meaning {
        Meaning::InitFailed { gpu } | Meaning::ProbeFailed { gpu } | Meaning::Xid { gpu, .. } => {
            Some(*gpu)
        }
        Meaning::Other if text.starts_with("NVRM: ") && !driver_log::is_of_switch(text) => {
            driver_log::address(text)
        }
        _ => None,
    }
}
