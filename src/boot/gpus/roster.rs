//! GPUs on the bus, and their names in the CDI spec: the k-th in ascending PCI address is `k`, as
//! the runtimes count.
//!
//! A failed GPU keeps its name. A GPU that comes or goes renames the GPUs behind it, because the
//! runtimes, too, count the GPUs that are present. A GPU that comes back at an address is a new
//! one, with a generation of its own.

use super::messages::GpuId;
use crate::events::names;
use crate::pci::{Gpu, NVIDIA, PciAddress};
use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

#[derive(Default)]
pub struct Roster(Mutex<Present>);

#[derive(Default)]
struct Present {
    gpus: BTreeMap<PciAddress, Entry>,
    arrivals: u32,
}

struct Entry {
    generation: u32,
    /// PCI device id.
    device: u16,
    /// Name that was reported last.
    reported: Option<usize>,
}

impl Roster {
    /// Adds GPUs that are not in the roster yet; reports every name that is new or has changed.
    pub fn add(&self, gpus: &[Gpu]) -> Vec<GpuId> {
        self.add_known(gpus, |_| false)
    }

    /// Adds GPUs as [`Roster::add`]. `reported`: whether an earlier worker has reported the name.
    pub fn add_known(&self, gpus: &[Gpu], reported: impl Fn(PciAddress) -> bool) -> Vec<GpuId> {
        let mut present = self.lock();
        let mut added = Vec::new();
        for (index, gpu) in gpus.iter().enumerate().filter(|(_, gpu)| !present.gpus.contains_key(&gpu.address)).collect::<Vec<_>>() {
            let generation = present.arrivals;
            present.arrivals += 1;
            let entry = Entry { generation, device: gpu.device, reported: reported(gpu.address).then_some(index) };
            present.gpus.insert(gpu.address, entry);
            added.push(GpuId { address: gpu.address, generation });
        }
        report_names(&mut present.gpus);
        added
    }

    /// Removes the GPU at an address; the GPUs behind it move up.
    pub fn remove(&self, gpu: PciAddress) {
        let mut present = self.lock();
        present.gpus.remove(&gpu);
        report_names(&mut present.gpus);
    }

    /// Name of the GPU at an address; for an absent GPU, the name that it would have.
    pub fn index(&self, gpu: PciAddress) -> usize {
        self.lock().gpus.range(..gpu).count()
    }

    /// GPU that is at an address now.
    pub fn at(&self, address: PciAddress) -> Option<GpuId> {
        self.lock().gpus.get(&address).map(|entry| GpuId { address, generation: entry.generation })
    }

    /// Whether this GPU, of this generation, is present.
    pub fn contains(&self, gpu: GpuId) -> bool {
        self.at(gpu.address) == Some(gpu)
    }

    /// All GPUs, in the order of their names.
    pub fn all(&self) -> Vec<GpuId> {
        self.lock().gpus.iter().map(|(address, entry)| GpuId { address: *address, generation: entry.generation }).collect()
    }

    fn lock(&self) -> MutexGuard<'_, Present> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn report_names(present: &mut BTreeMap<PciAddress, Entry>) {
    for (index, (gpu, entry)) in present.iter_mut().enumerate() {
        if entry.reported != Some(index) {
            entry.reported = Some(index);
            tracing::info!(name: names::GPU_FOUND, gpu = %gpu, index = index as u64, device = %format!("{NVIDIA:04x}:{:04x}", entry.device));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gpu(slot: u8) -> Gpu {
        Gpu { address: format!("0001:00:{slot:02x}.0").parse().unwrap(), device: 0x2330 }
    }

    #[test]
    fn names_follow_pci_order_as_gpus_come_and_go() {
        let roster = Roster::default();
        roster.add(&[gpu(4), gpu(2)]);
        assert_eq!((roster.index(gpu(2).address), roster.index(gpu(4).address)), (0, 1));
        roster.add(&[gpu(3)]);
        assert_eq!((roster.index(gpu(3).address), roster.index(gpu(4).address), roster.all().len()), (1, 2, 3));
        roster.remove(gpu(2).address);
        assert_eq!(roster.index(gpu(4).address), 1);
        assert_eq!(roster.at(gpu(2).address), None);
        assert_eq!(roster.all().iter().map(|g| g.address).collect::<Vec<_>>(), [gpu(3).address, gpu(4).address]);
    }

    #[test]
    fn a_gpu_that_comes_back_is_another_one() {
        let roster = Roster::default();
        let first = roster.add(&[gpu(2)])[0];
        assert_eq!(roster.add(&[gpu(2)]), [], "it is there");
        roster.remove(first.address);
        let second = roster.add(&[gpu(2)])[0];
        assert!(first != second && first.address == second.address);
        assert!(roster.contains(second) && !roster.contains(first));
    }
}
