//! Events of the kernel's trace into steps of the host. Pure: no file, no process.
//!
//! Calls inside another call of the same thread are part of it: `vfio_pin_pages_remote` of one
//! mapping, a reset of the opening of a function. A region of the VMM's memory is a BAR where VFIO
//! mapped one to it (`mmap`), and the guest's memory elsewhere.

use super::probes::{IOAS_MAP, IOAS_MAP_FILE, IOAS_UNMAP, MAP_DMA, UNMAP_DMA};
use super::trace_line::Event;
use kata_gpu_report::data::trace_file::Traced;
use kata_gpu_report::data::units::class;
use kata_gpu_wire::catalogue::traced as names;
use kata_gpu_wire::pci_address::PciAddress;
use std::collections::{BTreeMap, HashMap};
use std::hash::Hash;

/// Limit of steps; what comes later is counted.
pub const MAX_STEPS: usize = 2048;
/// Limit of calls that are open, of devices and of mappings.
const MAX_KNOWN: usize = 4096;

#[derive(Clone, Debug, Default)]
struct Mapping {
    at_ns: i64,
    unmaps: bool,
    vaddr: u64,
    iova: u64,
    size: u64,
    calls: u64,
    pages: BTreeMap<u64, u64>,
}

/// Time between two times of one clock.
pub fn duration_ns(from_ns: i64, to_ns: i64) -> u64 {
    u64::try_from(to_ns.saturating_sub(from_ns)).unwrap_or(0)
}

/// State of a trace.
#[derive(Debug, Default)]
pub struct Fold {
    /// Calls of the VMM; they begin by the trace's clock.
    pub steps: Vec<Traced>,
    /// Steps over the limit.
    pub left_out: u64,
    /// Times of the first run of a vCPU.
    pub first_run_ns: Option<i64>,
    /// Functions by their names below /dev/vfio/devices.
    pub vfio_devices: HashMap<String, PciAddress>,
    mappings: HashMap<u32, Mapping>,
    opens: HashMap<u32, (i64, Option<PciAddress>)>,
    resets: HashMap<u32, (i64, u64)>,
    /// The kernel's address of a device or of its PCI part, a number only, and its function.
    devices: HashMap<u64, PciAddress>,
    /// Beginning of a BAR's mapping in the VMM -> end, function.
    areas: BTreeMap<u64, (u64, PciAddress)>,
}

/// Inserts, unless too many are known.
fn keep<K: Eq + Hash, V>(known: &mut HashMap<K, V>, key: K, value: V) {
    if known.len() < MAX_KNOWN {
        known.insert(key, value);
    }
}

impl Fold {
    /// Takes an event. Those of one thread are in order.
    pub fn take(&mut self, event: &Event) {
        match event.name {
            "map_in" | "ioas_in" => self.map_in(event),
            "pin" | "pin_fast" => {
                let pages = event.unsigned("pages").unwrap_or(0);
                if let Some(mapping) = self.mappings.get_mut(&event.tid) {
                    mapping.calls += 1;
                    *mapping.pages.entry(class(pages)).or_default() += 1;
                }
            }
            "map_out" | "ioas_out" => self.map_out(event),
            "mmap" => {
                let area = event
                    .unsigned("dev")
                    .and_then(|dev| self.devices.get(&dev).copied());
                if let (Some(function), Some(start), Some(end)) =
                    (area, event.unsigned("start"), event.unsigned("end"))
                    && self.areas.len() < MAX_KNOWN
                {
                    // The same address can have been another function's before.
                    self.areas.insert(start, (end, function));
                }
            }
            // A file below /dev/vfio/devices, or the name of a function.
            "bind_in" | "open_in" => {
                let of = |name: &str| {
                    let device = self.vfio_devices.get(name).copied();
                    device.or_else(|| name.parse().ok())
                };
                let function = event.text("name").and_then(of);
                keep(&mut self.opens, event.tid, (event.at_ns, function));
            }
            "opened" => {
                if let (Some((_, Some(function))), Some(dev)) =
                    (self.opens.get(&event.tid), event.unsigned("dev"))
                {
                    keep(&mut self.devices, dev, *function);
                }
            }
            "open_out" | "bind_out" => {
                if let Some((at_ns, function)) = self.opens.remove(&event.tid) {
                    self.step(
                        event,
                        at_ns,
                        Traced {
                            name: names::VFIO_OPEN.into(),
                            function,
                            ..Traced::default()
                        },
                    );
                }
            }
            "reset_in" | "bus_reset_in" => {
                let pdev = event.unsigned("pdev").unwrap_or(0);
                keep(&mut self.resets, event.tid, (event.at_ns, pdev));
            }
            "reset_out" | "bus_reset_out" => {
                if let Some((at_ns, pdev)) = self.resets.remove(&event.tid) {
                    // The reset of the opening names the device for later ones.
                    let opening = self
                        .opens
                        .get(&event.tid)
                        .and_then(|(_, function)| *function);
                    if let Some(function) = opening {
                        keep(&mut self.devices, pdev, function);
                    }
                    let function = opening.or_else(|| self.devices.get(&pdev).copied());
                    let detail = if event.name == "bus_reset_out" {
                        "whole bus".into()
                    } else {
                        String::new()
                    };
                    self.step(
                        event,
                        at_ns,
                        Traced {
                            name: names::VFIO_RESET.into(),
                            function,
                            detail,
                            ..Traced::default()
                        },
                    );
                }
            }
            "run" => self.first_run_ns = self.first_run_ns.or(Some(event.at_ns)),
            _ => {}
        }
    }

    fn map_in(&mut self, event: &Event) {
        let number = |key| event.unsigned(key).unwrap_or(0);
        let (vaddr, iova, size) = (number("vaddr"), number("iova"), number("size"));
        let mapping = match event.unsigned("cmd") {
            // struct vfio_iommu_type1_dma_map: vaddr, iova, size; struct iommu_ioas_map by the
            // order of its probe.
            Some(MAP_DMA | IOAS_MAP | IOAS_MAP_FILE) => Mapping {
                vaddr,
                iova,
                size,
                ..Mapping::default()
            },
            // struct vfio_iommu_type1_dma_unmap has iova and size where the other one has vaddr and
            // iova.
            Some(UNMAP_DMA) => Mapping {
                unmaps: true,
                iova: vaddr,
                size: iova,
                ..Mapping::default()
            },
            // struct iommu_ioas_unmap: length where the other one has user_va.
            Some(IOAS_UNMAP) => Mapping {
                unmaps: true,
                size: vaddr,
                ..Mapping::default()
            },
            _ => return,
        };
        let at_ns = event.at_ns;
        keep(&mut self.mappings, event.tid, Mapping { at_ns, ..mapping });
    }

    fn map_out(&mut self, event: &Event) {
        let Some(mapping) = self.mappings.remove(&event.tid) else {
            return;
        };
        let function = self.owner(mapping.vaddr).filter(|_| !mapping.unmaps);
        let name = match (mapping.unmaps, function) {
            (true, _) => names::VMM_UNMAP,
            (false, Some(_)) => names::VMM_MAP_BAR,
            (false, None) => names::VMM_PIN,
        };
        let traced = Traced {
            name: name.into(),
            function,
            guest_address: Some(mapping.iova),
            bytes: Some(mapping.size),
            calls: (!mapping.unmaps).then_some(mapping.calls),
            pages_a_call: mapping.pages.into_iter().collect(),
            ..Traced::default()
        };
        self.step(event, mapping.at_ns, traced);
    }

    fn owner(&self, vaddr: u64) -> Option<PciAddress> {
        let (_, (end, function)) = self.areas.range(..=vaddr).next_back()?;
        (vaddr < *end).then_some(*function)
    }

    fn step(&mut self, event: &Event, at_ns: i64, traced: Traced) {
        if self.steps.len() >= MAX_STEPS {
            self.left_out += 1;
            return;
        }
        let failed = event.number("ret").filter(|ret| *ret < 0);
        let failed = failed.map(|errno| format!("failed: errno {}", errno.unsigned_abs()));
        self.steps.push(Traced {
            began_realtime_ns: at_ns,
            took_ns: duration_ns(at_ns, event.at_ns),
            tid: Some(event.tid),
            thread: String::from_utf8_lossy(event.comm).into_owned(),
            detail: failed.unwrap_or(traced.detail),
            ..traced
        });
    }

    /// Gives each mapped BAR its number, by its size: the smallest BAR that it fits into. VFIO maps
    /// a BAR with its table of interrupts in parts.
    pub fn number_bars(&mut self, bars: impl Fn(PciAddress) -> Vec<(u8, u64, u64)>) {
        let mut known = HashMap::new();
        for traced in &mut self.steps {
            let (Some(function), Some(bytes)) = (traced.function, traced.bytes) else {
                continue;
            };
            if traced.name != names::VMM_MAP_BAR {
                continue;
            }
            let bars = known.entry(function).or_insert_with(|| bars(function));
            let fits = bars.iter().filter(|(_, _, size)| *size >= bytes);
            let bar = fits.min_by_key(|(_, _, size)| *size);
            traced.bar = bar.map(|(bar, ..)| *bar);
            // A call that failed has its error there.
            if let (Some(bar), "") = (traced.bar, traced.detail.as_str()) {
                traced.detail = format!("BAR {bar}");
            }
        }
    }
}
