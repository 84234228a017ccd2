//! Stands for kata-agent 4.1.0 in tests: does as PID 1 what it does, resolves devices with the same
//! crate in the same loop, powers off silently where it does, and logs in its words and shape
//! ([`words`]), beside what tests want to know ([`log`]).
//!
//! Containers come from the kernel command line (`testagent.containers=one:0;all:all@debian`) or
//! from a host's ttRPC requests. A container of the command line is a directory with the device
//! nodes it would get, or, with one of the guest's roots, a real one that runs its program. A
//! container of a request is made as the real agent makes it ([`pod`]); so are all with
//! `testagent.cost=real`, where starting costs what it costs the real one, too; with
//! `testagent.reads=FILE` it reads that file first. This agent does not listen for uevents, which
//! the real one logs.

pub mod cdi;
pub mod cdi_json;
pub mod children;
pub mod config;
pub mod container;
mod container_hooks;
pub mod container_root;
pub mod container_run;
pub mod log;
mod mount_options;
mod pid1;
pub mod pod;
mod server;
pub mod words;

use crate::halves::guest::GUEST_HALVES;
use config::Config;
use pod::Pod;
use std::sync::Arc;
use std::thread;

/// The agent's life.
pub fn run() -> ! {
    let as_pid1 = std::process::id() == 1;
    if as_pid1 {
        pid1::mount_all();
    }
    let command_line = std::fs::read_to_string("/proc/cmdline")
        .unwrap_or_else(|e| panic!("read /proc/cmdline: {e}"));
    // A bad value of a known parameter panics, as it does in the real one: as PID 1 that is a
    // kernel panic.
    let config = Config::parse(&command_line).unwrap_or_else(|error| panic!("{error}"));
    words::set_level(config.log);
    if as_pid1 {
        pid1::become_init(config.unified_cgroups);
    }
    if let Err(error) = pid1::root_type() {
        pid1::give_up(as_pid1, &error);
    }
    if as_pid1 && let Err(errno) = kata_gpu_init::machine::sys::loopback_up() {
        pid1::give_up(as_pid1, &errno);
    }
    let children = children::listen().unwrap_or_else(|errno| pid1::give_up(as_pid1, &errno));
    words::announce(&format!("{config:?}")).write();
    if config.real_cost {
        pod::start_up();
    }
    if let Some(file) = &config.reads
        && let Err(error) = std::fs::read(file)
    {
        log::error("reads", &[("file", file), ("error", &error.to_string())]);
    }
    let server = server::listen_on_vsock();
    // The real one ends without vsock.
    match &server {
        Some(_) => words::server_started().write(),
        None => log::info("no server", &[]),
    }
    let pod = Arc::new(Pod::new(config.clone()));
    if let Some(listener) = server {
        let pod = Arc::clone(&pod);
        thread::spawn(move || server::serve(&listener, &pod));
    }

    let mut threads = Vec::new();
    if config.real_cost && !config.containers.is_empty() {
        threads.extend(container::create_in_pod(&config.containers, &pod));
    } else {
        for wanted in config.containers.clone() {
            let config = config.clone();
            threads.push(thread::spawn(move || container::create(&wanted, &config)));
        }
    }
    if let Some(name) = &config.guest_half {
        match GUEST_HALVES.iter().find(|(n, _)| n == name) {
            Some((_, half)) => threads.push(thread::spawn(*half)),
            None => log::error(
                "no such guest half",
                &[
                    ("name", name),
                    ("cure", "one of GUEST_HALVES in tests/guest/halves/guest.rs"),
                ],
            ),
        }
    }
    let poweroff = config.poweroff;
    thread::spawn(move || {
        for t in threads {
            let _unused = t.join(); // a container's panic is on the console; the others go on
        }
        if poweroff {
            log::info("all done, powering off", &[]);
            // PID 1 powers off, as after the runtime's DestroySandbox; a child ends well and leaves
            // that to its init.
            if as_pid1 {
                pid1::power_off_silently()
            } else {
                std::process::exit(0)
            }
        }
    });
    children.reap()
}
