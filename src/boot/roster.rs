//! The GPUs that are on the bus, and the names they have in the CDI spec: the k-th in ascending PCI address is `k`, as the runtimes count.
//!
//! A failed GPU keeps its name; a GPU that comes or goes moves those behind it, because the runtimes, too, count what there is.

use crate::events::names;
use crate::pci::{Gpu, NVIDIA, PciAddress};
use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

#[derive(Default)]
pub struct Roster {
    /// Device id, and the index last told.
    present: Mutex<BTreeMap<PciAddress, (u16, Option<usize>)>>,
}

impl Roster {
    /// Adds GPUs and tells every name that is new or another one.
    pub fn add(&self, gpus: &[Gpu]) {
        let mut present = self.lock();
        for gpu in gpus {
            present.entry(gpu.address).or_insert((gpu.device, None));
        }
        tell(&mut present);
    }

    /// Takes a GPU out; those behind it move up.
    pub fn remove(&self, gpu: PciAddress) {
        let mut present = self.lock();
        present.remove(&gpu);
        tell(&mut present);
    }

    /// Adds all GPUs, of which an earlier worker has told some names: tells the others.
    pub fn take_over(&self, gpus: &[Gpu], told: impl Fn(PciAddress) -> bool) {
        let mut present = self.lock();
        present.extend(gpus.iter().enumerate().map(|(index, gpu)| (gpu.address, (gpu.device, told(gpu.address).then_some(index)))));
        tell(&mut present);
    }

    /// The GPU's name. One that has just gone has the name it would have.
    pub fn index(&self, gpu: PciAddress) -> usize {
        self.lock().range(..gpu).count()
    }

    pub fn contains(&self, gpu: PciAddress) -> bool {
        self.lock().contains_key(&gpu)
    }

    pub fn len(&self) -> usize {
        self.lock().len()
    }

    /// All GPUs, in the order of their names.
    pub fn all(&self) -> Vec<PciAddress> {
        self.lock().keys().copied().collect()
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<PciAddress, (u16, Option<usize>)>> {
        self.present.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn tell(present: &mut BTreeMap<PciAddress, (u16, Option<usize>)>) {
    for (index, (gpu, (device, told))) in present.iter_mut().enumerate() {
        if *told != Some(index) {
            *told = Some(index);
            tracing::info!(name: names::GPU_FOUND, gpu = %gpu, index = index as u64, device = %format!("{NVIDIA:04x}:{device:04x}"));
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
        assert_eq!((roster.index(gpu(3).address), roster.index(gpu(4).address), roster.len()), (1, 2, 3));
        roster.remove(gpu(2).address);
        assert_eq!(roster.index(gpu(4).address), 1);
        assert!(!roster.contains(gpu(2).address));
        assert_eq!(roster.all(), [gpu(3).address, gpu(4).address]);
    }
}
