//! Stage 0: PID 1 from its first instruction until it becomes the agent. One thread, no waiting.
//!
//! Traps kept here: no setsid and no setpgid in PID 1 (the agent powers off silently when it finds itself a leader already); descriptors 0 to 2 lead to
//! the console, or the agent's log is lost; every other descriptor is close-on-exec; signals are as a new program expects them.

use super::handover::{self, Handover};
use super::{Boot, keeper, supervise};
use crate::config::{Agent, Config};
use crate::events::{self, kmsg, names};
use crate::failure::{self, Failure};
use crate::{cdi, mounts, step};
use nix::fcntl::{OFlag, open};
use nix::sys::stat::Mode;
use nix::unistd::ForkResult;
use std::path::Path;

/// Where the agent is in every Kata guest.
pub const AGENT: &std::ffi::CStr = c"/usr/bin/kata-agent";

/// Runs the guest from PID 1's first instruction, which was at `started_ns` (CLOCK_BOOTTIME).
pub fn run(started_ns: u64) -> ! {
    // PID 1 must not die of a bug of ours: a panic before the hand-over costs the GPUs, not the guest.
    let forked = std::panic::catch_unwind(|| prepare(started_ns)).unwrap_or_else(|_| {
        failure::tell("a bug in stage 0: no GPU will be brought up, the agent starts without");
        None
    });
    match forked {
        Some((boot, handover)) if boot.config.agent == Agent::Child => supervise::run(handover),
        Some((_, handover)) => handover.exec(AGENT),
        None => Handover::alone().exec(AGENT),
    }
}

/// Everything before the hand-over. None when no worker could be started.
fn prepare(started_ns: u64) -> Option<(Boot, Handover)> {
    let ring = events::install();
    tracing::info!(name: names::INIT_START, at_ns = started_ns, pid = std::process::id(), version = env!("CARGO_PKG_VERSION"));
    let stage0 = step!(names::STAGE0);
    let prepared: Result<_, String> = stage0.run(|| {
        // /proc before the command line, /dev before the console, /run before the CDI directory.
        let mounting = step!(names::STAGE0_MOUNTS);
        for error in mounts::make(mounts::EARLY) {
            mounting.fail(&error);
            report(Failure::Mount, &error.to_string());
        }
        drop(mounting);
        if let Err(error) = mounts::link_var_run(Path::new("/")) {
            report(Failure::VarRun, &error);
        }
        // A failure here is the publisher's to report, which needs the directory.
        let _unused = std::fs::create_dir_all(cdi::publish::DIRECTORY);
        if let Err(error) = step!(names::STAGE0_CONSOLE).run(console) {
            report(Failure::Sink, &error);
        }
        // From this line the difference of the two clocks is known; without /dev/kmsg there are no lines to place either.
        let _unused = kmsg::write_marker();
        Ok(configure())
    });
    let (config, command_line) = prepared.unwrap_or_default();
    let boot = Boot { config, command_line, ring };
    // The worker gets the socket's other end: through it it learns when PID 1 has become the agent.
    let (ours, theirs) = match handover::pair() {
        Ok(pair) => pair,
        Err(errno) => return no_worker(&format!("make a socket pair: {errno}")),
    };
    match crate::sys::fork_single_threaded() {
        Ok(ForkResult::Parent { .. }) => Some((boot, ours)),
        Ok(ForkResult::Child) => {
            drop(ours);
            keeper::run(&boot, theirs)
        }
        Err(errno) => no_worker(&format!("fork: {errno}")),
    }
}

fn no_worker(error: &str) -> Option<(Boot, Handover)> {
    report(Failure::Fork, error);
    failure::tell(&format!("{error}: no GPU will be brought up, the agent starts without"));
    None
}

/// Tells a failure that stage 0 goes on from.
fn report(failure: Failure, error: &str) {
    debug_assert_eq!(failure::consequence(failure), failure::Consequence::GoOn);
    tracing::error!(name: names::STAGE0, error, failure = ?failure);
}

/// Points descriptors 0 to 2 at the console: in an initrd the kernel opened them before there was a /dev.
fn console() -> Result<(), String> {
    let at = |path: &str| open(path, OFlag::O_RDWR | OFlag::O_NOCTTY | OFlag::O_CLOEXEC, Mode::empty());
    let (console, result) = match at("/dev/console") {
        Ok(console) => (console, Ok(())),
        // Descriptors that lead nowhere are better than closed ones, whose numbers the agent's first files would get.
        Err(errno) => match at("/dev/null") {
            Ok(null) => (
                null,
                Err(format!("open /dev/console: {errno}: the agent's log goes nowhere; add console=.. to the kernel's command line")),
            ),
            Err(null) => return Err(format!("open /dev/console: {errno}; open /dev/null: {null}")),
        },
    };
    // The copies are not close-on-exec.
    nix::unistd::dup2_stdin(&console)
        .and_then(|()| nix::unistd::dup2_stdout(&console))
        .and_then(|()| nix::unistd::dup2_stderr(&console))
        .map_err(|errno| format!("put the console on descriptors 0 to 2: {errno}"))?;
    result
}

/// Reads the command line, and tells what became of every word that is ours.
fn configure() -> (Config, Vec<u8>) {
    let step = step!(names::STAGE0_CONFIG);
    let read = step.run(|| std::fs::read("/proc/cmdline").map_err(|e| format!("read /proc/cmdline: {e}: every parameter has its default")));
    let command_line = read.unwrap_or_default();
    let (config, notes) = Config::parse(&command_line);
    for note in notes {
        match note.problem {
            None => tracing::info!(name: names::CONFIG, parameter = note.parameter, value = note.value),
            Some(problem) => {
                let error = format!("{}={}: {problem}", note.parameter, note.value);
                tracing::warn!(name: names::CONFIG, parameter = note.parameter, value = note.value, error);
            }
        }
    }
    (config, command_line)
}
