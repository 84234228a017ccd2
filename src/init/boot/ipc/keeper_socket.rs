//! Connection from the worker to the keeper: descriptors that are to outlive the worker, requests
//! to release them, and the notice that deaths of earlier workers are in the stream.

use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};
use std::io::IoSlice;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};

/// Longest message: a letter and an address.
pub const MAX_MESSAGE: usize = 64;
/// Letter of a message with a descriptor to hold.
const KEEP: u8 = b'k';
/// Letter of a message with a GPU whose descriptors are to be closed.
pub const RELEASE: u8 = b'r';
/// Letter of the message that every death passed to this worker has been reported.
pub const REPORTED: u8 = b'd';

/// A GPU's descriptor, with the address that the worker gave. A raw number on purpose: no drop
/// closes the descriptor.
#[derive(Clone, Debug)]
pub struct Held {
    pub gpu: String,
    pub descriptor: RawFd,
}

/// The worker's end.
pub struct KeeperSocket(pub OwnedFd);

impl KeeperSocket {
    /// Sends a copy of a GPU's descriptor to the keeper; the worker's own one stays open.
    pub fn keep(&self, gpu: &str, descriptor: &OwnedFd) -> nix::Result<()> {
        let descriptors = [descriptor.as_raw_fd()];
        self.send(KEEP, gpu, &[ControlMessage::ScmRights(&descriptors)])
    }

    /// Requests that the keeper close a GPU's descriptors.
    pub fn release(&self, gpu: &str) -> nix::Result<()> {
        self.send(RELEASE, gpu, &[])
    }

    /// Notifies the keeper that the stream has the deaths of all earlier workers.
    pub fn reported_deaths(&self) -> nix::Result<()> {
        self.send(REPORTED, "", &[])
    }

    fn send(&self, what: u8, gpu: &str, control: &[ControlMessage<'_>]) -> nix::Result<()> {
        let what = [what];
        let parts = [IoSlice::new(&what), IoSlice::new(gpu.as_bytes())];
        sendmsg::<()>(
            self.0.as_raw_fd(),
            &parts,
            control,
            MsgFlags::MSG_NOSIGNAL,
            None,
        )
        .map(drop)
    }
}
