//! Waiting for a file descriptor with tokio.

use std::io;
use std::os::fd::OwnedFd;
use tokio::io::unix::AsyncFd;

/// Wakes when the descriptor can be read or written. The descriptor must be non-blocking and
/// pollable (a socket, pipe or inotify instance).
pub fn watch(fd: impl Into<OwnedFd>) -> io::Result<AsyncFd<OwnedFd>> {
    crate::sys::async_fd(fd.into())
}
