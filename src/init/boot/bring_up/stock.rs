//! Comparison of the bus with the known state: when a worker begins, and whenever something may
//! have changed. Unreadable is not absent: names are given once every look has succeeded, or keep
//! the place of a GPU that stays unreadable.

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
use crate::gpu::pci::Gpu;
use kata_gpu_wire::names;
use kata_gpu_wire::pci_address::PciAddress;
use std::collections::BTreeSet;
use std::io;
use std::time::Duration;

/// Looks at sysfs before a failure counts, and the pause between two: a second in all.
const MOST_LOOKS: u32 = 20;
const LOOK_AGAIN: Duration = Duration::from_millis(50);

/// Releases descriptors of former binds: releases requested from an earlier worker, and not done.
pub fn release_stale(descriptors: &Descriptors, sysfs: &PciSysfs) {
    for bound in descriptors.held() {
        if sysfs.is_over(bound) {
            descriptors.release(&bound);
        }
    }
}

/// Looks again while a look is not whole; returns the last one.
pub async fn look_again<T>(mut look: impl FnMut() -> T, is_whole: impl Fn(&T) -> bool) -> T {
    let mut seen = look();
    for _ in 1..MOST_LOOKS {
        if is_whole(&seen) {
            break;
        }
        // Only after a failure: no event reports that sysfs can be read again.
        tokio::time::sleep(LOOK_AGAIN).await;
        seen = look();
    }
    seen
}

/// Result of a look at an address: the device, and the PCI device id of a GPU.
type Look = (Sight, Option<u16>);

/// Compares the scan with what an earlier worker knew; returns the GPUs that it did not know, and
/// the error of a GPU that cannot be looked at.
pub async fn take_stock(
    roster: &Roster,
    sysfs: &PciSysfs,
    gpus: &[Gpu],
) -> (Vec<GpuId>, Option<io::Error>) {
    let known = roster.all().into_iter().map(|slot| slot.gpu.address);
    let addresses: BTreeSet<PciAddress> = known.chain(gpus.iter().map(|gpu| gpu.address)).collect();
    let look_at_all = || -> Vec<(PciAddress, io::Result<Look>)> {
        let addresses = addresses.iter();
        addresses.map(|gpu| (*gpu, look(sysfs, *gpu))).collect()
    };
    let looks = look_again(look_at_all, |looks| {
        looks.iter().all(|(_, look)| look.is_ok())
    })
    .await;
    let (mut arrived, mut unreadable) = (Vec::new(), None);
    for (address, look) in looks {
        let changes = match look {
            Ok(seen) => observe(roster, address, seen),
            Err(error) => {
                tracing::error!(name: names::PCI_SCAN, gpu = %address, error = %error);
                roster.reserve(address);
                unreadable = Some(error);
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
    (arrived, unreadable)
}

/// Looks at an address.
pub fn look(sysfs: &PciSysfs, address: PciAddress) -> io::Result<Look> {
    Ok((sysfs.sight(address)?, pci::device(&sysfs.device(address))?))
}

/// Takes a look at an address into the roster.
pub fn observe(roster: &Roster, address: PciAddress, (seen, device): Look) -> Vec<Change> {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::pci::tests::make_gpu;
    use kata_gpu_test_support::{TempDir, temp_dir};
    use std::path::PathBuf;

    /// A sysfs with the GPUs 3, 4 and 5, and GPU 4's directory.
    fn three() -> (TempDir, PciSysfs, Vec<Gpu>, PathBuf) {
        let folder = temp_dir();
        let sysfs = PciSysfs::at(folder.path());
        let address = |slot| format!("0001:00:{slot:02}.0").parse().unwrap();
        let gpus: Vec<Gpu> = (3..6)
            .map(|slot| Gpu {
                address: address(slot),
                device: 0x2330,
            })
            .collect();
        for gpu in &gpus {
            make_gpu(folder.path(), &gpu.address.to_string());
        }
        let middle = sysfs.device(address(4));
        (folder, sysfs, gpus, middle)
    }

    fn names(roster: &Roster) -> Vec<(String, usize, bool)> {
        let slots = roster.all().into_iter();
        slots
            .map(|slot| (slot.gpu.address.to_string(), slot.index, slot.here))
            .collect()
    }

    fn named(middle_is_here: bool) -> Vec<(String, usize, bool)> {
        let here = [true, middle_is_here, true];
        let address = |index| format!("0001:00:{:02}.0", index + 3);
        (0..3)
            .map(|index| (address(index), index, here[index]))
            .collect()
    }

    #[tokio::test]
    async fn a_look_that_fails_for_a_moment_moves_no_name() {
        // Its device, and what it is.
        for what in ["", "vendor"] {
            let (_folder, sysfs, gpus, middle) = three();
            let of = if what.is_empty() {
                middle.clone()
            } else {
                middle.join(what)
            };
            let kept = middle.with_extension("kept");
            std::fs::rename(&of, &kept).unwrap();
            std::os::unix::fs::symlink(&of, &of).unwrap(); // ELOOP
            look(&sysfs, gpus[1].address).unwrap_err();
            let roster = Roster::default();
            let heals = async {
                std::fs::remove_file(&of).unwrap();
                std::fs::rename(&kept, &of).unwrap();
            };
            let taking = take_stock(&roster, &sysfs, &gpus);
            let ((arrived, unreadable), ()) = tokio::join!(biased; taking, heals);
            assert_eq!((arrived.len(), unreadable.is_none()), (3, true));
            assert_eq!(names(&roster), named(true));
        }
    }

    #[tokio::test]
    async fn the_name_of_a_gpu_that_stays_unreadable_is_kept_for_it() {
        let (_folder, sysfs, gpus, middle) = three();
        let vendor = std::fs::read(middle.join("vendor")).unwrap();
        std::fs::write(middle.join("vendor"), "garbage").unwrap();
        let roster = Roster::default();
        let (arrived, unreadable) = take_stock(&roster, &sysfs, &gpus).await;
        assert_eq!((arrived.len(), unreadable.is_some()), (2, true));
        assert_eq!(names(&roster), named(false));
        std::fs::write(middle.join("vendor"), vendor).unwrap();
        let address = gpus[1].address;
        let seen = observe(&roster, address, look(&sysfs, address).unwrap());
        let arrived = roster.at(address).map(Change::Arrived);
        assert_eq!(seen, Vec::from_iter(arrived));
        assert_eq!(names(&roster), named(true));
    }
}
