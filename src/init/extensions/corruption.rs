//! Data of a mounted extension that fails its check when read: the reader gets EIO, the kernel
//! marks the device and sends a uevent. The mark is the truth, the uevent a reason to look.

use super::parameters::Extension;
use super::verity;
use crate::machine::uevents::{Any, DeviceMapperUevents, hear};
use tokio::sync::watch as flag;

/// Data that does not match its hash tree.
pub struct Corrupted {
    pub reason: String,
    /// Data may have been read in the bring-up: no look has found it sound since all GPUs were
    /// settled.
    pub in_bring_up: bool,
}

/// Waits until a device is marked. Never returns for sound data. `settled`: all GPUs are; where
/// they were at the start, an earlier worker has looked. Error: why changed data would not be
/// noticed from here on.
pub async fn corrupted(
    declared: &[Extension],
    mut settled: flag::Receiver<bool>,
) -> Result<Corrupted, String> {
    let mut was_sound = *settled.borrow();
    let mut uevents = None;
    loop {
        // Subscribed before the look: a mark that is set in between is seen.
        if uevents.is_none() {
            match Any::subscribe().and_then(Any::into_async) {
                Ok(subscription) => uevents = Some(subscription),
                Err(error) => return Err(format!("extensions: subscribe to uevents: {error}")),
            }
        }
        // Before the look: a GPU may fail by a block, and all be settled, before its mark is seen.
        let is_settled = *settled.borrow_and_update();
        for Extension { name, .. } in declared {
            match verity::is_intact(name) {
                Ok(true) => {}
                Ok(false) => {
                    let reason = format!(
                        "extension {name}: data of the disk {} does not match its hash tree: it \
                            was changed or is damaged \
                         (the kernel's log has the block); take the image from its build again",
                        name.serial()
                    );
                    return Ok(Corrupted {
                        reason,
                        in_bring_up: !was_sound,
                    });
                }
                Err(errno) => {
                    return Err(format!(
                        "extension {name}: read the state of {}: {errno}",
                        name.serial()
                    ));
                }
            }
        }
        was_sound |= is_settled;
        tokio::select! {
            // An error is a reason to look as well.
            _ = hear(&mut uevents, DeviceMapperUevents::next) => {}
            // The sender lives as long as the worker.
            Ok(()) = settled.changed(), if !was_sound => {}
        }
    }
}
