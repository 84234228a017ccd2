//! Connections between the processes of the init: sockets, the descriptors that travel over them,
//! and the hand-over to the agent. Each file holds both ends of one connection. Order and timing
//! are decided elsewhere.

pub mod descriptors; // the worker's view of all opened GPUs
pub mod handover; // PID 1 becomes the agent
pub mod keeper_socket; // the worker and the keeper: descriptors that outlive the worker
pub mod lane_process; // enabling, on a vCPU of its own
pub mod opener; // opening, in processes that survive the worker
pub mod reply; // requests, each with a socket for its answers

use crate::machine::sys::fork_single_threaded;
use keeper_socket::Held;
use nix::unistd::{Pid, close};
use std::os::fd::OwnedFd;

/// Starts a process that serves requests from the socket that is returned; must be called while
/// this process has one thread. None where that fails.
///
/// Closes held GPUs in the child: a GPU is removed only when no process has it open.
fn start_helper(name: &str, held: &[Held], serve: impl FnOnce(&OwnedFd)) -> Option<(Pid, OwnedFd)> {
    let forked = fork_single_threaded(reply::pair().ok()?, |(ours, theirs)| {
        drop(ours);
        for gpu in held {
            let _unused = close(gpu.descriptor);
        }
        name_process(name);
        serve(&theirs);
        0
    });
    let (pid, (ours, _theirs)) = forked.ok()?;
    Some((pid, ours))
}

/// Sets the name of this process that `ps` shows.
pub fn name_process(name: &str) {
    // The name is only for `ps`.
    let _unused = std::fs::write("/proc/self/comm", name);
}
