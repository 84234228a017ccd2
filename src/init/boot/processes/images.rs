//! Extension disks, as far as the worker has to do with them: mounts the driver's while the agent
//! starts, notices data that fails its check, and ends the guest where it must not go on.

use super::stamps::Boot;
use crate::boot::failure;
use crate::boot::failure::PowerOffRight;
use crate::extensions::corruption::{self, Corrupted};
use crate::extensions::{self, Extension, disks};
use crate::gpu::pci::SYS;
use crate::machine::files::entries;
use crate::machine::threads;
use crate::stream::StepId;
use crate::stream::stamps::Stamp;
use kata_gpu_wire::names;
use std::future::Future;
use std::path::Path;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::sync::{oneshot, watch as flag};

/// Connections of the bring-up and the worker with the extensions.
pub struct Images {
    /// Sent when the driver's files are mounted, with that step; None: the files are the image's
    /// own, or PID 1 has mounted them.
    pub ready: Option<oneshot::Receiver<Option<StepId>>>,
    /// To be set when all GPUs are settled.
    pub settled: flag::Sender<bool>,
    /// Reasons why the guest must not go on.
    pub refusals: UnboundedReceiver<String>,
}

/// Starts what there is to do; must be called inside the runtime. `settled`: all GPUs were, when an
/// earlier worker died.
pub fn start(boot: &Boot, settled: bool) -> Images {
    let (settled, is_settled) = flag::channel(settled);
    let (refuse, refusals) = unbounded_channel();
    let declared = boot.config.extensions.clone().unwrap_or_default();
    let mut ready = None;
    if !declared.is_empty() {
        let (send, receive) = oneshot::channel();
        // PID 1 has mounted all of them where the agent needs one.
        let send = if extensions::before_agent(&declared) {
            None
        } else {
            Some(send)
        };
        ready = send.is_some().then_some(receive);
        tokio::spawn(follow(declared, send, is_settled, refuse));
    } else if has_disks() {
        // A command line without the disks' parameters may have been stripped of them. Nothing of
        // such a disk is ever mounted, so the boot does not wait for this check.
        threads::detach(move || {
            if let Some(error) = disks::surplus(Path::new(SYS)) {
                let _unused = refuse.send(error.to_string());
            }
        });
    }
    Images {
        ready,
        settled,
        refusals,
    }
}

/// Whether there is a virtio disk: only virtio disks have a serial in sysfs, and reading it queries
/// the host.
fn has_disks() -> bool {
    entries(&Path::new(SYS).join("block"))
        .any(|entry| entry.file_name().as_encoded_bytes().starts_with(b"vd"))
}

/// Mounts the extensions if there is `ready`, then watches them.
async fn follow(
    declared: Vec<Extension>,
    ready: Option<oneshot::Sender<Option<StepId>>>,
    settled: flag::Receiver<bool>,
    refuse: UnboundedSender<String>,
) {
    if let Some(ready) = ready {
        let list = declared.clone();
        let result = match threads::run(move || extensions::mount_all(&list)).await {
            Ok((stamps, result)) => result.map(|()| stamps.last().map(Stamp::id)),
            Err(panicked) => Err(format!("extensions: mount them: {panicked}")),
        };
        match result {
            Ok(step) => {
                // Sending fails only when the bring-up is gone, with the runtime.
                let _unused = ready.send(step);
                // No GPU waits for the libraries. An earlier worker may have died before them.
                let list = declared.clone();
                threads::detach(move || drop(extensions::add_libraries(&list)));
            }
            Err(error) => {
                let _unused = refuse.send(error);
                return;
            }
        }
    }
    match corruption::corrupted(&declared, settled).await {
        Ok(Corrupted {
            reason,
            in_bring_up: true,
        }) => {
            let _unused = refuse.send(reason);
        }
        // The readers of that block have an error, all else is sound: containers go on.
        Ok(Corrupted { reason: error, .. }) | Err(error) => {
            tracing::error!(name: names::EXTENSION, error)
        }
    }
}

/// Ends the guest for the first refusal, after its reason is on the console, in the kernel's log
/// and in the stream, whose delivery `last_words` waits for.
pub async fn end_guest(
    mut refusals: UnboundedReceiver<String>,
    power_off_right: Option<PowerOffRight>,
    last_words: impl Future<Output = ()>,
) {
    let Some(error) = refusals.recv().await else {
        return;
    };
    tracing::error!(name: names::POWER_OFF, error);
    failure::report(&format!("{error}: powering off"));
    last_words.await;
    if let Some(power_off_right) = power_off_right {
        power_off_right.power_off()
    }
}
