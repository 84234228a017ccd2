//! Orderly end of the services, where PID 1 stays the init (`gpuinit.agent=child`) and its agent
//! has ended: in reverse start order, each before the next one.

use super::service_processes::find;
use super::service_table::SERVICES;
use super::state::{ENDING, RUN};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{Signal, kill};
use std::os::fd::AsFd;
use std::path::Path;

/// Longest wait for one service: the guest powers off after the last one in any case.
const LONGEST_MS: u16 = 2000;

/// Ends all services; returns the end of each, for people. Blocks until all have ended.
pub fn end_all() -> Vec<String> {
    let proc = Path::new("/proc");
    let running: Vec<_> = SERVICES
        .iter()
        .rev()
        .filter_map(|service| Some((service.name, find(proc, service.name)?)))
        .collect();
    if !running.is_empty() {
        // Without the file the worker starts a service again that has ended here.
        let _unused = std::fs::write(Path::new(RUN).join(ENDING), "");
    }
    let mut ended = Vec::new();
    for (name, pid) in running {
        // Opened first: the signal must not reach a later process of this number.
        let Ok(process) = crate::machine::sys::pidfd_open(pid) else {
            continue;
        };
        let outcome = match kill(pid, Signal::SIGTERM) {
            Ok(()) => match poll(
                &mut [PollFd::new(process.as_fd(), PollFlags::POLLIN)],
                PollTimeout::from(LONGEST_MS),
            ) {
                Ok(1..) => "has ended".into(),
                Ok(_) => format!("still runs {LONGEST_MS} ms after SIGTERM"),
                Err(errno) => format!("may still run: wait for it: {errno}"),
            },
            Err(errno) => format!("may still run: send SIGTERM: {errno}"),
        };
        ended.push(format!("service {name} {outcome}"));
    }
    ended
}
