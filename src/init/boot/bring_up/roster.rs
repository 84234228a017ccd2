//! GPUs of the guest, shared by all tasks: the [`Slots`], and the reports of their names.

use super::previous::Previous;
use super::schedule_messages::GpuId;
use super::slots::{Change, Listed, Slots};
use crate::gpu::bind::{Bound, Sight};
use crate::machine::threads;
use kata_gpu_wire::names;
use kata_gpu_wire::pci_address::{NVIDIA, PciAddress};
use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard};

#[derive(Default)]
pub struct Roster(Mutex<State>);

#[derive(Default)]
struct State {
    slots: Slots,
    /// PCI device ids.
    devices: HashMap<PciAddress, u16>,
    /// Addresses of GPUs that have left for a reset, and come back.
    returning: Vec<PciAddress>,
    /// The arrival and the name that were reported last for each address.
    reported: HashMap<PciAddress, (GpuId, usize)>,
}

impl Roster {
    /// A roster that goes on where an earlier worker's has ended.
    pub fn restored(previous: &Previous) -> Self {
        let mut state = State::default();
        for (address, known) in &previous.gpus {
            state.slots.restore(*address, &known.slot);
        }
        state.reported = state
            .slots
            .all()
            .into_iter()
            .map(|slot| (slot.gpu.address, (slot.gpu, slot.index)))
            .collect();
        if previous.is_scanned() {
            state.slots.scanned();
        }
        Self(Mutex::new(state))
    }

    /// The boot scan is over: later arrivals are hot-plugged ones.
    pub fn scanned(&self) {
        self.lock().slots.scanned();
    }

    /// Keeps a name of the boot scan for an address that cannot be looked at.
    pub fn reserve(&self, address: PciAddress) {
        self.lock().slots.reserve(address);
    }

    /// Records the current device at an address, with the PCI device id of a GPU.
    pub fn observe(&self, address: PciAddress, sight: Sight, device: Option<u16>) -> Vec<Change> {
        let mut state = self.lock();
        if let Some(device) = device {
            state.devices.insert(address, device);
        }
        let changes = state.slots.observe(address, sight);
        let is_back = |change: &Change| matches!(change, Change::Arrived(_));
        if sight.device.is_none() || changes.iter().any(is_back) {
            state.returning.retain(|other| *other != address);
        }
        changes
    }

    /// Notes that the GPU at an address leaves for a reset and comes back: containers wait for it.
    pub fn returns(&self, address: PciAddress) {
        self.lock().returning.push(address);
    }

    /// Notes that the GPU at an address does not come back from its reset.
    pub fn stays_away(&self, address: PciAddress) {
        self.lock().returning.retain(|other| *other != address);
    }

    pub fn is_returning(&self, address: PciAddress) -> bool {
        self.lock().returning.contains(&address)
    }

    /// Reports every name that is new, that has moved, or that another GPU has now.
    pub fn report_names(&self) {
        let mut state = self.lock();
        let State {
            slots,
            devices,
            reported,
            ..
        } = &mut *state;
        for Listed { gpu, index, .. } in slots.all().into_iter().filter(|slot| slot.here) {
            if reported.insert(gpu.address, (gpu, index)) != Some((gpu, index)) {
                let device = devices.get(&gpu.address).copied().unwrap_or_default();
                let hot_plugged = (!slots.is_of_boot(gpu.address)).then_some(true);
                let (inode, generation) = (slots.device(gpu.address), gpu.again());
                tracing::info!(
                    name: names::GPU_FOUND, gpu = %gpu.address, index = index as u64,
                    device = %format!("{NVIDIA:04x}:{device:04x}"), inode, hot_plugged, generation,
                );
            }
        }
    }

    /// Notes the bind that a GPU's task has seen; returns whether it is that GPU's.
    pub fn bound(&self, gpu: GpuId, bound: Bound) -> bool {
        self.lock().slots.bound(gpu, bound)
    }

    /// Notes that a GPU has failed in the bind that its task has seen, if any; returns whether it
    /// was on its way, or usable.
    pub fn failed(&self, gpu: GpuId) -> bool {
        self.lock().slots.failed(gpu)
    }

    /// The bind of a GPU that its task has seen.
    pub fn bind_of(&self, gpu: GpuId) -> Option<Bound> {
        self.lock().slots.bind_of(gpu)
    }

    /// The name at an address. A GPU that has just gone has the name that it would have.
    pub fn index(&self, address: PciAddress) -> usize {
        self.lock().slots.index(address)
    }

    /// GPU that is at an address now.
    pub fn at(&self, address: PciAddress) -> Option<GpuId> {
        self.lock().slots.at(address)
    }

    /// Whether this GPU, of this generation, is present.
    pub fn contains(&self, gpu: GpuId) -> bool {
        self.lock().slots.contains(gpu)
    }

    /// PCI device id of the GPU at an address.
    pub fn device_id(&self, address: PciAddress) -> Option<u16> {
        self.lock().devices.get(&address).copied()
    }

    /// Inode of the device at an address, if it was seen.
    pub fn device(&self, address: PciAddress) -> Option<u64> {
        self.lock().slots.device(address)
    }

    /// All slots, in the order of their names.
    pub fn all(&self) -> Vec<Listed> {
        self.lock().slots.all()
    }

    /// GPUs that are on the bus, in the order of their names.
    pub fn present(&self) -> Vec<GpuId> {
        self.all()
            .into_iter()
            .filter(|slot| slot.here)
            .map(|slot| slot.gpu)
            .collect()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        threads::lock(&self.0)
    }
}
