//! Maps PCI addresses to GPUs and to names of the CDI spec. Pure: looks at sysfs go in, arrivals
//! and departures come out.
//!
//! - An event is a reason to look. The state of sysfs counts: the identity of a device and of its
//!   bind.
//! - Each arrival has a generation. A replaced device, or one bound again after an unbind, is
//!   another arrival.
//! - A name of the boot scan (the k-th address is `k`) never moves: a GPU that has left keeps it
//!   for the next GPU at its address. GPUs plugged in later have the names after these, in PCI
//!   order, and move up when one of them is gone.

use super::schedule_messages::GpuId;
use crate::gpu::bind::{Bound, Sight};
use kata_gpu_wire::pci_address::PciAddress;
use std::collections::{BTreeMap, HashMap};

/// Result of a look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// A GPU has left, which had this name.
    Left(GpuId, usize),
    Arrived(GpuId),
    /// A GPU that had left is gone from the bus, with its name: the names after it have moved up.
    Freed,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// On its way, or usable.
    Here,
    Failed,
    /// Gone, or unbound.
    Left,
}

#[derive(Clone, Debug)]
struct Slot {
    generation: u32,
    /// Identity as in [`Sight`]; None for a slot that an earlier worker did not know.
    device: Option<u64>,
    /// The bind that the GPU's task has seen.
    bind: Option<u64>,
    state: State,
    /// The name, where the boot scan gave it.
    boot: Option<usize>,
}

/// A GPU as an earlier worker knew it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Known {
    /// The name was reported.
    pub found: bool,
    pub generation: u32,
    /// The name that was reported last.
    pub index: usize,
    pub hot_plugged: bool,
    /// Identity as in [`Sight`].
    pub device: Option<u64>,
    pub bind: Option<u64>,
    pub left: bool,
    pub failed: bool,
}

/// A slot, as the spec lists it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Listed {
    pub gpu: GpuId,
    pub index: usize,
    /// Whether the GPU is there.
    pub here: bool,
}

/// All slots that have a name.
#[derive(Clone, Debug, Default)]
pub struct Slots {
    slots: BTreeMap<PciAddress, Slot>,
    /// Number of arrivals at each address.
    arrivals: HashMap<PciAddress, u32>,
    /// Number of names given by the boot scan.
    named: usize,
    /// Whether arrivals are hot-plugged ones.
    scanned: bool,
}

impl Slots {
    /// Takes over what an earlier worker knew of an address.
    pub fn restore(&mut self, address: PciAddress, known: &Known) {
        if !known.found {
            return;
        }
        let state = match known {
            Known { left: true, .. } => State::Left,
            Known { failed: true, .. } => State::Failed,
            Known { .. } => State::Here,
        };
        let boot = (!known.hot_plugged).then_some(known.index);
        self.named = self.named.max(boot.map_or(0, |index| index + 1));
        self.arrivals.insert(address, known.generation + 1);
        self.slots.insert(
            address,
            Slot {
                generation: known.generation,
                device: known.device,
                bind: known.bind,
                state,
                boot,
            },
        );
    }

    /// The boot scan is over: later arrivals are hot-plugged ones.
    pub fn scanned(&mut self) {
        self.scanned = true;
    }

    /// Keeps a name of the boot scan for an address that cannot be looked at: no later name moves.
    pub fn reserve(&mut self, address: PciAddress) {
        if self.scanned || self.slots.contains_key(&address) {
            return;
        }
        let slot = Slot {
            generation: 0,
            device: None,
            bind: None,
            state: State::Left,
            boot: Some(self.next_name()),
        };
        self.slots.insert(address, slot);
    }

    /// Takes the first free name of the boot scan: the next one, or one that an earlier worker has
    /// kept for a GPU that it could not look at.
    fn next_name(&mut self) -> usize {
        let is_free = |name: &usize| self.slots.values().all(|slot| slot.boot != Some(*name));
        let name = (0..self.named).find(is_free).unwrap_or(self.named);
        self.named = self.named.max(name + 1);
        name
    }

    /// Records the current device at an address.
    pub fn observe(&mut self, address: PciAddress, sight: Sight) -> Vec<Change> {
        let mut changes = Vec::new();
        let Some(slot) = self.slots.get(&address) else {
            changes.extend(sight.device.map(|_| self.arrive(address, sight)));
            return changes;
        };
        let same = sight.device.is_some() && sight.device == slot.device;
        let (leaves, arrives) = match (slot.state, slot.bind, sight.bind) {
            (State::Left, ..) if !same => (false, sight.device.is_some()),
            (State::Left, _, bind) => (false, bind.is_some()),
            _ if !same => (true, sight.device.is_some()),
            (_, Some(before), Some(now)) => (before != now, before != now),
            (_, Some(_), None) => (true, false),
            // A GPU that had failed without a bind was bound later.
            (State::Failed, None, Some(_)) => (true, true),
            (State::Here | State::Failed, None, _) => (false, false),
        };
        if leaves {
            changes.push(Change::Left(
                GpuId {
                    address,
                    generation: slot.generation,
                },
                self.index(address),
            ));
        }
        if arrives {
            changes.push(self.arrive(address, sight));
        } else if sight.device.is_none()
            && self
                .slots
                .get(&address)
                .is_some_and(|slot| slot.boot.is_none())
        {
            self.slots.remove(&address);
            if !leaves {
                changes.push(Change::Freed);
            }
        } else if let Some(slot) = self.slots.get_mut(&address).filter(|_| leaves) {
            (slot.state, slot.bind) = (State::Left, None);
        }
        changes
    }

    fn arrive(&mut self, address: PciAddress, sight: Sight) -> Change {
        let count = self.arrivals.entry(address).or_default();
        let generation = *count;
        *count += 1;
        let boot = match self.slots.get(&address) {
            Some(slot) => slot.boot,
            None if self.scanned => None,
            None => Some(self.next_name()),
        };
        // The GPU's task reads the bind.
        self.slots.insert(
            address,
            Slot {
                generation,
                device: sight.device,
                bind: None,
                state: State::Here,
                boot,
            },
        );
        Change::Arrived(GpuId {
            address,
            generation,
        })
    }

    /// Notes the bind that a GPU's task has seen; returns whether it is that GPU's.
    pub fn bound(&mut self, gpu: GpuId, bound: Bound) -> bool {
        let own = |slot: &&mut Slot| {
            slot.generation == gpu.generation
                && slot.state != State::Left
                && slot.device == Some(bound.device)
        };
        let slot = self
            .slots
            .get_mut(&gpu.address)
            .filter(|_| gpu.address == bound.address)
            .filter(own);
        slot.is_some_and(|slot| {
            slot.bind = Some(bound.bind);
            true
        })
    }

    /// Notes that a GPU has failed, in the bind that its task has seen; returns whether it was on
    /// its way, or usable. Another bind is another arrival.
    pub fn failed(&mut self, gpu: GpuId) -> bool {
        let slot = self
            .slots
            .get_mut(&gpu.address)
            .filter(|slot| slot.generation == gpu.generation && slot.state == State::Here);
        slot.map(|slot| slot.state = State::Failed).is_some()
    }

    /// The bind of a GPU that its task has seen.
    pub fn bind_of(&self, gpu: GpuId) -> Option<Bound> {
        let slot = self
            .slots
            .get(&gpu.address)
            .filter(|_| self.contains(gpu))?;
        Some(Bound {
            address: gpu.address,
            device: slot.device?,
            bind: slot.bind?,
        })
    }

    /// The name at an address. A GPU that has just gone has the name that it would have.
    pub fn index(&self, address: PciAddress) -> usize {
        let later = || {
            self.named
                + self
                    .slots
                    .range(..address)
                    .filter(|(_, slot)| slot.boot.is_none())
                    .count()
        };
        self.slots
            .get(&address)
            .and_then(|slot| slot.boot)
            .unwrap_or_else(later)
    }

    /// The GPU that is at an address now.
    pub fn at(&self, address: PciAddress) -> Option<GpuId> {
        let slot = self
            .slots
            .get(&address)
            .filter(|slot| slot.state != State::Left)?;
        Some(GpuId {
            address,
            generation: slot.generation,
        })
    }

    /// Whether this arrival of a GPU is present.
    pub fn contains(&self, gpu: GpuId) -> bool {
        self.at(gpu.address) == Some(gpu)
    }

    /// Whether the boot scan had a GPU at an address.
    pub fn is_of_boot(&self, address: PciAddress) -> bool {
        self.slots
            .get(&address)
            .is_some_and(|slot| slot.boot.is_some())
    }

    /// Inode of the device at an address, if it was seen.
    pub fn device(&self, address: PciAddress) -> Option<u64> {
        self.slots.get(&address)?.device
    }

    /// All slots, in the order of their names.
    pub fn all(&self) -> Vec<Listed> {
        let listed = |(address, slot): (&PciAddress, &Slot)| Listed {
            gpu: GpuId {
                address: *address,
                generation: slot.generation,
            },
            index: self.index(*address),
            here: slot.state != State::Left,
        };
        let mut all: Vec<Listed> = self.slots.iter().map(listed).collect();
        all.sort_by_key(|slot| slot.index);
        all
    }
}

#[cfg(test)]
mod tests;
