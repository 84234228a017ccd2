//! The keeper: a process small enough not to fail. The keeper starts the worker, holds a copy of
//! every GPU descriptor that the worker hands over, and starts the worker again when that has died.
//! So adapters stay initialised when the worker dies. The OOM killer never chooses the keeper.
//!
//! The keeper never blocks on a GPU: a descriptor is released only for a GPU that is being removed,
//! and the close that tears the adapter down happens in a process of its own.

use super::stamps::Boot;
use super::worker;
use crate::boot::wire::handover::{Observer, Start};
use crate::boot::wire::keeper::{Held, KeeperSocket, MAX_MESSAGE, RELEASE};
use crate::boot::wire::{name_process, reply};
use crate::failure;
use nix::cmsg_space;
use nix::sys::socket::{ControlMessageOwned, MsgFlags, recvmsg};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::{Pid, close, pause, pipe, setsid};
use std::io::IoSliceMut;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::time::{Duration, Instant};

/// OOM score that the OOM killer never chooses: the keeper outlives every other process.
const OOM_SCORE: &str = "-1000";
/// Lifetime below which a worker has died young, and the pause before the next one doubles.
const YOUNG: Duration = Duration::from_secs(10);
/// Longest pause before the next worker.
const LONGEST_PAUSE: Duration = Duration::from_secs(64);

/// Runs the keeper, in the child that PID 1 forked. Never returns.
pub fn run(boot: Boot, observer: Observer) -> ! {
    // The agent starts first: on a small guest, two processes started at once take longer than one
    // after the other, and GPUs take seconds.
    let handed = observer.wait();
    // A session of its own keeps the signals of the agent's console from the keeper. Fails only for
    // a group leader, which a fresh child is not.
    let _unused = setsid();
    let _unused = std::fs::write("/proc/self/oom_score_adj", OOM_SCORE);
    name_process("gpuinit-keeper");
    // Without an agent the guest is about to power off: no worker follows the first one.
    let ending = handed.error.is_some();
    let (mut start, mut held, mut young) = (Start::First(handed), Vec::new(), 0_u32);
    loop {
        let sockets = match reply::pair() {
            Ok(pair) => pair,
            // Without a socket to a worker, this process does the work.
            Err(errno) => alone(&boot, start, held, &format!("socket pair: {errno}")),
        };
        let born = Instant::now();
        let forked = crate::sys::fork_single_threaded((sockets, start, held), |((ours, theirs), start, held)| {
            drop(ours);
            worker::run(&boot, start, Some(KeeperSocket(theirs)), held)
        });
        match forked {
            Ok((child, ((ours, theirs), begun, still_held))) => {
                // Close the worker's ends of the socket and of the hand-over: their closing by the
                // worker is seen only without these copies.
                drop((theirs, begun));
                held = still_held;
                serve(&ours, &mut held);
                let status = status_of(child);
                failure::tell(&format!("the worker has ended ({status}); {} GPU descriptors stay open", held.len()));
                if ending {
                    rest()
                }
                start = Start::Again { status };
            }
            Err((errno, (_, start, held))) => alone(&boot, start, held, &format!("fork: {errno}")),
        }
        young = if born.elapsed() < YOUNG { young + 1 } else { 0 };
        if young > 1 {
            // Not on the boot path. A worker that dies repeatedly must not use up the guest's CPUs.
            std::thread::sleep(Duration::from_secs(1 << (young - 2).min(16)).min(LONGEST_PAUSE));
        }
    }
}

/// Does the worker's work in the keeper's process, where no other process can be started.
fn alone(boot: &Boot, start: Start, held: Vec<Held>, why: &str) -> ! {
    failure::tell(&format!("keeper: {why}: GPUs are held by the worker alone"));
    worker::run(boot, start, None, held)
}

/// Holds the descriptors for ever.
fn rest() -> ! {
    loop {
        pause();
    }
}

/// Waits for the end of a child; returns its status as text.
fn status_of(child: Pid) -> String {
    loop {
        match waitpid(child, None) {
            Ok(WaitStatus::Exited(_, code)) => return format!("exit status {code}"),
            Ok(WaitStatus::Signaled(_, signal, _)) => return format!("killed by {signal}"),
            Ok(_) | Err(nix::errno::Errno::EINTR) => {}
            Err(errno) => return format!("wait: {errno}"),
        }
    }
}

/// Takes and releases descriptors until the worker's end of the socket is closed.
fn serve(socket: &OwnedFd, held: &mut Vec<Held>) {
    let mut closing = Vec::new();
    let mut text = [0_u8; MAX_MESSAGE];
    let mut space = cmsg_space!([RawFd; 8]);
    loop {
        let mut parts = [IoSliceMut::new(&mut text)];
        let received = recvmsg::<()>(socket.as_raw_fd(), &mut parts, Some(&mut space), MsgFlags::MSG_CMSG_CLOEXEC);
        let (bytes, descriptors) = match received {
            Ok(message) => {
                let mut descriptors = Vec::new();
                for part in message.cmsgs().into_iter().flatten() {
                    if let ControlMessageOwned::ScmRights(some) = part {
                        descriptors.extend(some);
                    }
                }
                (message.bytes, descriptors)
            }
            Err(nix::errno::Errno::EINTR) => continue,
            Err(_) => return,
        };
        // A message has at least its letter; an empty read is the end of the worker.
        let Some((what, gpu)) = text.get(..bytes).and_then(<[u8]>::split_first) else { return };
        let gpu = String::from_utf8_lossy(gpu).into_owned();
        if *what == RELEASE {
            closing.extend(give_up(held, &gpu));
        }
        held.extend(descriptors.into_iter().map(|descriptor| Held { gpu: gpu.clone(), descriptor }));
        // Collect the children that have ended; leave the others to a later message.
        closing.retain(|child| waitpid(*child, Some(WaitPidFlag::WNOHANG)) == Ok(WaitStatus::StillAlive));
    }
}

/// Closes the descriptors of one GPU; returns the child that does the last close, which tears the
/// adapter down and may take long.
fn give_up(held: &mut Vec<Held>, gpu: &str) -> Option<Pid> {
    let (gone, stay): (Vec<Held>, Vec<Held>) = std::mem::take(held).into_iter().partition(|h| h.gpu == gpu);
    *held = stay;
    if gone.is_empty() {
        return None;
    }
    let forked = pipe().and_then(|ends| {
        let child = crate::sys::fork_single_threaded(ends, |(read_end, write_end)| {
            drop(write_end);
            // Wait until the keeper has closed its copies, which the end of the pipe or an error
            // shows: the copies here are the last ones then.
            let _unused = nix::unistd::read(&read_end, &mut [0_u8; 1]);
            // Close copies of other GPUs first: a hang below must not keep them open.
            for other in held.iter().chain(&gone) {
                let _unused = close(other.descriptor);
            }
            0
        });
        child.map_err(|(errno, _)| errno)
    });
    match forked {
        Ok((child, _ends)) => {
            for own in &gone {
                let _unused = close(own.descriptor);
            }
            Some(child)
        }
        Err(errno) => {
            failure::tell(&format!("keeper: give GPU {gpu} up: {errno}: it stays open, and its removal waits"));
            held.extend(gone);
            None
        }
    }
}
