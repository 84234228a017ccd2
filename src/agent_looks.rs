//! Every look of the agent at the CDI spec, as an event: this is how waiting for a GPU becomes visible without touching the agent.
//!
//! inotify on the directory tells opens of the spec, and of the directory itself, without blocking whoever opens. It cannot tell who that was:
//! anything in the guest that reads the spec counts as a look (nothing else does; this init never reads it back).

use crate::cdi::publish::FILE;
use crate::events::names;
use nix::errno::Errno;
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

/// Watches `directory` (which must be there) and reports looks for ever; must be called inside the runtime.
pub fn watch(directory: &Path) -> io::Result<()> {
    let inotify = Inotify::init(InitFlags::IN_CLOEXEC | InitFlags::IN_NONBLOCK)?;
    inotify.add_watch(directory, AddWatchFlags::IN_OPEN)?;
    let readiness: OwnedFd = inotify.as_fd().try_clone_to_owned()?;
    let readiness = crate::sys::async_fd(readiness)?;
    let spec = directory.join(FILE);
    tokio::spawn(async move {
        while let Ok(mut guard) = readiness.readable().await {
            match inotify.read_events() {
                Ok(events) => {
                    for event in events {
                        let name = event.name.as_deref().and_then(|n| n.to_str());
                        if let Some(what) = what(event.mask, name, spec.exists()) {
                            tracing::info!(name: names::AGENT_LOOK, what);
                        }
                    }
                }
                Err(Errno::EAGAIN) => guard.clear_ready(),
                Err(_) => return, // inotify fails for good only when its descriptor is gone
            }
        }
    });
    Ok(())
}

/// What an open was of; None for our own temporary file, and for the directory on the way to a spec that is there.
fn what(mask: AddWatchFlags, name: Option<&str>, published: bool) -> Option<&'static str> {
    match name {
        Some(FILE) => Some("spec"),
        // While there is no spec this is all there is to see.
        None if mask.contains(AddWatchFlags::IN_ISDIR) && !published => Some("directory"),
        Some(_) | None => None,
    }
}
