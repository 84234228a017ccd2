//! Comparison of the bus with the known state: when a worker begins, and whenever something may
//! have changed.

use super::driver::{self, Image};
use super::extras;
use super::find_driver_files;
use super::previous::Previous;
use super::publication::{Common, Published};
use super::roster::Roster;
use super::schedule_messages::GpuId;
use super::slots::Change;
use crate::boot::ipc::descriptors::Descriptors;
use crate::cdi::spec::{Entry, Extras, Ready};
use crate::gpu::bind::{PciSysfs, Sight};
use crate::gpu::pci;
use crate::gpu::pci::{Gpu, SYS};
use kata_gpu_wire::names;
use kata_gpu_wire::pci_address::PciAddress;
use std::collections::BTreeSet;
use std::path::Path;

/// Releases descriptors of former binds: releases requested from an earlier worker, and not done.
pub fn release_stale(descriptors: &Descriptors, sysfs: &PciSysfs) {
    for bound in descriptors.held() {
        if sysfs.is_over(bound) {
            descriptors.release(&bound);
        }
    }
}

/// Compares the scan with what an earlier worker knew; returns the GPUs that it did not know.
pub fn take_stock(roster: &Roster, sysfs: &PciSysfs, gpus: &[Gpu]) -> Vec<GpuId> {
    let known = roster.all().into_iter().map(|slot| slot.gpu.address);
    let addresses: BTreeSet<PciAddress> = known.chain(gpus.iter().map(|gpu| gpu.address)).collect();
    let mut arrived = Vec::new();
    for address in addresses {
        let changes = match sysfs.sight(address) {
            Ok(seen) => observe(roster, address, seen),
            Err(error) => {
                tracing::error!(name: names::PCI_SCAN, gpu = %address, error = %error);
                continue;
            }
        };
        for change in changes {
            match change {
                Change::Left(gpu, index) => report_left(gpu, index),
                Change::Arrived(gpu) => arrived.push(gpu),
                Change::Freed => {}
            }
        }
    }
    roster.scanned();
    roster.report_names();
    arrived
}

/// Takes a look at an address into the roster.
pub fn observe(roster: &Roster, address: PciAddress, seen: Sight) -> Vec<Change> {
    let device = pci::read(Path::new(SYS), address).map(|gpu| gpu.device);
    // Another device than the known one, and no GPU: as good as none.
    let foreign = device.is_none() && seen.device != roster.device(address);
    roster.observe(
        address,
        if foreign { Sight::default() } else { seen },
        device,
    )
}

pub fn report_left(gpu: GpuId, index: usize) {
    tracing::info!(
        name: names::GPU_REMOVED, gpu = %gpu.address, index = index as u64,
        generation = gpu.again(),
    );
}

/// Entries that an earlier worker had published for these GPUs, as far as they still hold.
pub fn published(previous: &Previous, roster: &Roster, gpus: &[GpuId], image: &Image) -> Published {
    let nodes = driver::nodes_now();
    let listed = previous.gpus.iter().filter(|(_, known)| known.published);
    let listed = listed.map(|(address, known)| GpuId {
        address: *address,
        generation: known.slot.generation,
    });
    let mut published = Published {
        listed: listed.collect(),
        ..Published::default()
    };
    if let Some(nodes) = &nodes {
        published.common = Common {
            nodes: nodes.common_now(),
            files: find_driver_files::find(image.version.as_deref()),
        };
    }
    for gpu in gpus {
        let known = previous.gpu(*gpu);
        if known.slot.failed {
            published.entries.insert(*gpu, Entry::Failed(known.reason));
        } else if known.published
            // The current bind is the one whose minor was reported, or the GPU would have left.
            && roster.bind_of(*gpu).is_some()
            && let Some(minor) = known.minor
                    && let Some(node) = nodes.as_ref().and_then(|n| n.gpu_now(minor))
        {
            let extras = if known.usable {
                extras::read(gpu.address, minor)
            } else {
                Extras::default()
            };
            published.entries.insert(
                *gpu,
                Entry::Ready(Ready {
                    nodes: vec![node],
                    uuid: known.uuid,
                    extras,
                    instance_uuids: known.instance_uuids,
                }),
            );
        }
    }
    published
}
