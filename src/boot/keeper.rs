//! The keeper: a process so small that nothing in it can fail. It starts the worker and holds every GPU descriptor the worker hands over, so
//! that adapters stay initialised whatever becomes of the worker. It never closes one, and is never chosen by the OOM killer.
//!
//! A worker that dies is reported; starting it again (and its adopting of what it finds) is not built yet.

use super::handover::Observer;
use super::{Boot, worker};
use crate::failure;
use nix::cmsg_space;
use nix::sys::socket::{AddressFamily, ControlMessage, ControlMessageOwned, MsgFlags, SockFlag, SockType, recvmsg, sendmsg, socketpair};
use nix::sys::wait::waitpid;
use nix::unistd::{ForkResult, pause, setsid};
use std::io::{IoSlice, IoSliceMut};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};

/// Never chosen by the OOM killer: whoever holds the adapters outlives everybody.
const OOM_SCORE: &str = "-1000";

/// The worker's way to the keeper.
pub struct KeeperSocket(OwnedFd);

impl KeeperSocket {
    /// Hands a copy of a GPU's descriptor to the keeper; the worker's own one stays open.
    pub fn keep(&self, gpu: &OwnedFd) -> nix::Result<()> {
        let descriptors = [gpu.as_raw_fd()];
        let message = [ControlMessage::ScmRights(&descriptors)];
        sendmsg::<()>(self.0.as_raw_fd(), &[IoSlice::new(b"g")], &message, MsgFlags::MSG_NOSIGNAL, None).map(drop)
    }
}

/// The keeper's life, in the child that PID 1 forked. Never returns.
pub fn run(boot: Boot, observer: Observer) -> ! {
    // The agent first: on a small guest two processes that start at once take longer than one after the other, and GPUs take seconds.
    let handed = observer.wait();
    // An own session: what happens to the agent's console does not signal us. Fails only for a group leader, which a fresh child is not.
    let _unused = setsid();
    let _unused = std::fs::write("/proc/self/oom_score_adj", OOM_SCORE);
    let pair = socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC);
    let (ours, theirs) = match pair {
        Ok(pair) => pair,
        // Without a keeper's socket the work can still be done, in this process.
        Err(errno) => {
            failure::tell(&format!("keeper: socket pair: {errno}: GPUs are held by the worker alone"));
            worker::run(boot, handed, None)
        }
    };
    match crate::sys::fork_single_threaded() {
        Ok(ForkResult::Child) => {
            drop(ours);
            worker::run(boot, handed, Some(KeeperSocket(theirs)))
        }
        Ok(ForkResult::Parent { child }) => {
            drop((theirs, handed));
            let held = hold(&ours);
            let status = waitpid(child, None).map_or_else(|e| e.to_string(), |s| format!("{s:?}"));
            failure::tell(&format!("the worker has ended ({status}): no more events; {} GPU descriptors stay open", held.len()));
            // The list lives on, and with it the adapters.
            loop {
                pause();
            }
        }
        Err(errno) => {
            failure::tell(&format!("keeper: fork: {errno}: GPUs are held by the worker alone"));
            drop(ours);
            worker::run(boot, handed, None)
        }
    }
}

/// Takes descriptors until the worker's end of the socket is closed. Returns them, open.
fn hold(socket: &OwnedFd) -> Vec<RawFd> {
    let mut held = Vec::new();
    let mut byte = [0_u8; 1];
    let mut space = cmsg_space!([RawFd; 8]);
    loop {
        let mut parts = [IoSliceMut::new(&mut byte)];
        match recvmsg::<()>(socket.as_raw_fd(), &mut parts, Some(&mut space), MsgFlags::MSG_CMSG_CLOEXEC) {
            Ok(message) => {
                let Ok(control) = message.cmsgs() else { continue };
                let before = held.len();
                for part in control {
                    if let ControlMessageOwned::ScmRights(descriptors) = part {
                        // Raw numbers on purpose: nothing here can close one by being dropped.
                        held.extend(descriptors);
                    }
                }
                // A message always carries a descriptor; without one this is the end of the worker.
                if message.bytes == 0 && held.len() == before {
                    return held;
                }
            }
            Err(nix::errno::Errno::EINTR) => {}
            Err(_) => return held,
        }
    }
}
