//! An inotify instance that tokio waits on.

use anyhow::{Context, Result};
use kata_gpu_host::async_fd::watch;
use nix::errno::Errno;
use nix::sys::inotify::{AddWatchFlags, InitFlags, InotifyEvent, WatchDescriptor};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use tokio::io::unix::AsyncFd;

pub struct Inotify {
    inotify: nix::sys::inotify::Inotify,
    ready: AsyncFd<OwnedFd>,
}

impl Inotify {
    pub fn new() -> Result<Self> {
        let flags = InitFlags::IN_NONBLOCK | InitFlags::IN_CLOEXEC;
        let inotify = nix::sys::inotify::Inotify::init(flags).context("inotify_init")?;
        let copy = inotify.as_fd().try_clone_to_owned();
        let ready = copy.and_then(watch).context("watch inotify")?;
        Ok(Self { inotify, ready })
    }

    pub fn add(&self, dir: &Path, events: AddWatchFlags) -> nix::Result<WatchDescriptor> {
        self.inotify.add_watch(dir, events)
    }

    /// Ends a watch. The kernel has already removed that of a removed directory.
    pub fn remove(&self, watch: WatchDescriptor) {
        let _gone = self.inotify.rm_watch(watch);
    }

    /// Waits for events. Safe to cancel.
    pub async fn events(&self) -> Result<Vec<InotifyEvent>> {
        loop {
            let mut ready = self.ready.readable().await.context("wait for inotify")?;
            match self.inotify.read_events() {
                Err(Errno::EAGAIN) => ready.clear_ready(),
                Err(Errno::EINTR) => {}
                events => return events.context("read inotify events"),
            }
        }
    }
}
