//! Extension disks of Kata 4: parts of a guest image on disks of their own, each checked by
//! dm-verity against a root hash of the kernel's command line, and mounted read-only.
//!
//! Invariants:
//! - Disks and declarations match one to one, or nothing is mounted.
//! - Nothing of a disk is read but through dm-verity.
//! - [`mount_all`] reports what is wrong and never decides what follows: `boot` powers off.
//!
//! Not here: extensions without a hash tree, which the incumbent refuses as well.

pub mod corruption; // data that fails its check later
pub mod disks; // virtio-blk disks by their serial
pub mod loader; // the dynamic loader's cache of the guest
pub mod mount; // EROFS, firmware
pub mod parameters; // declarations of the command line
pub mod verity; // dm-verity

pub use parameters::{Extension, Name, Verity};

use crate::machine::mounts;
use crate::stream::stamps::{Stamp, What, timed};
use std::path::Path;
use std::time::Duration;

/// Longest wait for disks that are declared and not there yet. Kata plugs them before the start of
/// the VM, and a kernel with built-in drivers has probed them before PID 1.
pub const DISKS_DEADLINE: Duration = Duration::from_secs(5);

/// Whether the agent must not start before the extensions are mounted. The agent and what it starts
/// use every extension but `gpu`, and with `coco` the attester looks for the driver in `gpu`.
pub fn before_agent(declared: &[Extension]) -> bool {
    declared.iter().any(|extension| !extension.name.is_gpu())
}

/// Mounts every declared extension, in the order of the command line; blocks. Returns the steps
/// taken, and why the guest must not go on.
pub fn mount_all(declared: &[Extension]) -> (Vec<Stamp>, Result<(), String>) {
    let mut stamps = Vec::new();
    // A worker that follows another one finds them mounted, and perhaps not all.
    let mounts = mounts::text();
    if declared
        .iter()
        .all(|extension| mount::is_mounted(&mounts, &extension.name))
    {
        let has_gpu = declared.iter().any(|extension| extension.name.is_gpu());
        let bound = if has_gpu {
            mount::bind_firmware(Path::new(mount::GPU), &mounts)
        } else {
            Ok(())
        };
        return (stamps, bound);
    }
    let found = timed(
        &mut stamps,
        What::Disks {
            declared: declared.len() as u64,
        },
        |_| disks::wait(Path::new("/sys"), declared, DISKS_DEADLINE).map_err(|e| e.to_string()),
    );
    let result = found.and_then(|found| {
        found.iter().try_for_each(|disk| {
            let what = What::Extension {
                name: disk.extension.name.to_string(),
                device: disk.device.clone(),
                bytes: disk.extension.verity.data_bytes(),
            };
            timed(&mut stamps, what, |steps| mount_one(disk, steps))
        })
    });
    (stamps, result)
}

fn mount_one(disk: &disks::Matched, steps: &mut Vec<Stamp>) -> Result<(), String> {
    let name = &disk.extension.name;
    let node = timed(steps, What::Verity, |_| verity::open(disk))?;
    timed(steps, What::Mount, |_| {
        mount::erofs(name, &node).map_err(|error| match verity::is_intact(name) {
            Ok(false) => {
                let device = &disk.device;
                format!(
                    "{error}: the data of disk {device} does not match the root hash of the \
                        kernel's command line: \
                     give both from the same build of the image"
                )
            }
            Ok(true) | Err(_) => error,
        })
    })?;
    if name.is_gpu() {
        timed(steps, What::Firmware, |_| {
            mount::bind_firmware(Path::new(mount::GPU), &mounts::text())
        })?;
    }
    Ok(())
}

/// Makes the libraries of `gpu` known to the guest's own loader; blocks. A failure costs services
/// of the driver, no GPU and no check: the step reports it. Nothing is done twice.
pub fn add_libraries(declared: &[Extension]) -> Vec<Stamp> {
    let mut stamps = Vec::new();
    if declared.iter().any(|extension| extension.name.is_gpu())
        && !loader::is_added(&mounts::text())
    {
        // Reported by the step.
        let _unused = timed(&mut stamps, What::Libraries, |_| {
            loader::add(Path::new("/"), loader::libraries(Path::new(mount::GPU))?)
        });
    }
    stamps
}
