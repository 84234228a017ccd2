//! Stands for kata-agent 4.1.0 in tests: does as PID 1 what it does, resolves devices with the same crate in the same loop, powers off silently
//! where it does, and logs in its shape.
//!
//! It is not a ttRPC server: which containers there are is said on the kernel command line (`testagent.containers=one:0;all:all`), and a container is
//! a directory with the device nodes it would get.

pub mod cdi;
pub mod config;
pub mod container;
pub mod log;
mod pid1;

use crate::vm::guest::GUEST_HALVES;
use config::Config;
use nix::sys::socket::{AddressFamily, Backlog, SockFlag, SockType, VsockAddr, bind, listen, socket};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use std::os::fd::{AsRawFd, OwnedFd};
use std::thread;

/// The port of the real agent's ttRPC server.
const SERVER_PORT: u32 = 1024;

/// The agent's life.
pub fn run() -> ! {
    // The real one sets SIGPIPE back to its default, and so the test binary's writes to a closed console end it likewise.
    let as_pid1 = std::process::id() == 1;
    if as_pid1 {
        pid1::mount_all();
    }
    let command_line = std::fs::read_to_string("/proc/cmdline").unwrap_or_default();
    // A bad value of a known parameter panics, as it does in the real one.
    let config = Config::parse(&command_line).unwrap_or_else(|error| panic!("{error}"));
    if as_pid1 {
        pid1::become_init(&command_line);
    }
    let server = serve();
    log::info("agent ready", &[("server", if server.is_some() { "vsock" } else { "none" })]);

    let mut threads = Vec::new();
    for wanted in config.containers.clone() {
        let config = config.clone();
        threads.push(thread::spawn(move || container::create(&wanted, &config)));
    }
    if let Some(name) = &config.guest_half {
        match GUEST_HALVES.iter().find(|(n, _)| n == name) {
            Some((_, half)) => threads.push(thread::spawn(*half)),
            None => log::error("no such guest half", &[("name", name)]),
        }
    }
    let poweroff = config.poweroff;
    thread::spawn(move || {
        for t in threads {
            let _unused = t.join(); // a container's panic is on the console; the others go on
        }
        if poweroff {
            log::info("all done, powering off", &[]);
            pid1::power_off_silently();
        }
    });
    reap(as_pid1)
}

/// Listens where the real agent listens. The real one fails without vsock; this one goes on, because tests take vsock away on purpose.
fn serve() -> Option<OwnedFd> {
    let listening = || -> nix::Result<OwnedFd> {
        let fd = socket(AddressFamily::Vsock, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)?;
        bind(fd.as_raw_fd(), &VsockAddr::new(nix::libc::VMADDR_CID_ANY, SERVER_PORT))?;
        listen(&fd, Backlog::new(16)?)?;
        Ok(fd)
    };
    listening().inspect_err(|errno| log::error("no server", &[("error", &format!("listen on vsock port {SERVER_PORT}: {errno}"))])).ok()
}

/// Reaps every child for ever, as the real agent does.
fn reap(as_pid1: bool) -> ! {
    loop {
        match waitpid(None, Some(WaitPidFlag::__WALL)) {
            Ok(WaitStatus::Exited(pid, status)) => {
                log::info("child exited unexpectedly", &[("child-pid", &pid.to_string()), ("status", &status.to_string())]);
            }
            Ok(WaitStatus::Signaled(pid, signal, _)) => {
                log::info("child exited unexpectedly", &[("child-pid", &pid.to_string()), ("status", signal.as_str())]);
            }
            Ok(_) => {}
            // No child at present: as PID 1 orphans may still come, with a SIGCHLD that ends the wait below.
            Err(_) if as_pid1 => {
                let mut signals = nix::sys::signal::SigSet::empty();
                signals.add(nix::sys::signal::Signal::SIGCHLD);
                let _unused = signals.thread_block();
                let _unused = signals.wait();
            }
            Err(_) => loop {
                thread::park();
            },
        }
    }
}
