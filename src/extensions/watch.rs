//! Data of a mounted extension that fails its check when read: the reader gets EIO, the kernel
//! marks the device and sends a uevent. The mark is the truth, the uevent a reason to look.

use super::parameters::Extension;
use super::verity;
use crate::uevents::Any;

/// Waits until a device is marked; returns the reason. Never returns for sound data. Error: why
/// changed data would not be noticed from here on.
pub async fn corrupted(declared: &[Extension]) -> Result<String, String> {
    let mut uevents = None;
    loop {
        // Subscribed before the look: a mark that is set in between is seen.
        if uevents.is_none() {
            match Any::subscribe().and_then(Any::into_async) {
                Ok(subscription) => uevents = Some(subscription),
                Err(error) => return Err(format!("extensions: subscribe to uevents: {error}")),
            }
        }
        for Extension { name, .. } in declared {
            match verity::is_intact(name) {
                Ok(true) => {}
                Ok(false) => {
                    return Ok(format!(
                        "extension {name}: data of the disk {} does not match its hash tree: it was changed or is damaged \
                         (the kernel's log has the block); take the image from its build again",
                        name.serial()
                    ));
                }
                Err(errno) => return Err(format!("extension {name}: read the state of {}: {errno}", name.serial())),
            }
        }
        if let Some(subscription) = &uevents
            && subscription.next().await.is_err()
        {
            uevents = None;
        }
    }
}
