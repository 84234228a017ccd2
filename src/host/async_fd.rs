//! Waiting for a file descriptor with tokio.
#![allow(
    unsafe_code,
    reason = "only a promise about the descriptor makes it tokio's"
)]

use std::io;
use std::os::fd::OwnedFd;
use tokio::io::unix::AsyncFd;

/// Wakes when the descriptor can be read or written. The descriptor must be non-blocking and
/// pollable (a socket, pipe or inotify instance).
pub fn watch(fd: impl Into<OwnedFd>) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: the AsyncFd owns the only handle to this descriptor, and an OwnedFd keeps one number,
    // open, until it is dropped.
    unsafe { AsyncFd::register(fd.into()) }.map_err(io::Error::from)
}
