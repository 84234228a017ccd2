//! Stage 0: PID 1 from its first instruction until it becomes the agent. One thread, no waiting.
//!
//! Requirements of the agent:
//! - no setsid and no setpgid in PID 1: the agent powers off silently when it is a leader already;
//! - descriptors 0 to 2 on the console, or the agent's log is lost;
//! - every other descriptor close-on-exec;
//! - signals as a new program expects them.

use super::stamps::{Boot, Stamps, What};
use super::{agent_child, keeper};
use crate::boot::AGENT;
use crate::boot::wire::handover::{self, Handover};
use crate::config::{Agent, Config};
use crate::{cdi, failure, mounts, tsc};
use nix::fcntl::{OFlag, open};
use nix::sys::stat::Mode;
use std::path::Path;

/// Runs the guest from PID 1's first instruction, which was at `started_ns` (CLOCK_BOOTTIME) and
/// `tsc`.
pub fn run(started_ns: u64, tsc: Option<tsc::Reading>) -> ! {
    std::panic::set_hook(Box::new(|panicked| failure::tell(&format!("a bug: {panicked}"))));
    // PID 1 must not die of a panic: a panic before the hand-over costs the GPUs, not the guest.
    let forked = std::panic::catch_unwind(|| prepare(started_ns, tsc)).unwrap_or_else(|_| {
        failure::tell("a bug in stage 0: no GPU will be brought up, the agent starts without");
        None
    });
    match forked {
        Some((Agent::Child, handover)) => agent_child::run(handover),
        Some((Agent::Exec, handover)) => handover.exec(AGENT),
        None => Handover::alone().exec(AGENT),
    }
}

/// Prepares the hand-over and starts the keeper. None when no worker could be started.
fn prepare(started_ns: u64, tsc: Option<tsc::Reading>) -> Option<(Agent, Handover)> {
    let mut stamps = Stamps { started_ns, tsc, steps: Vec::with_capacity(8) };
    // Order: /proc before the command line, /dev before the console, /run before the CDI directory.
    // A failure is reported, and the boot goes on: the agent makes these mounts itself.
    stamps.step(What::Mounts, || {
        let mut errors: Vec<String> = mounts::make(mounts::EARLY).iter().map(ToString::to_string).collect();
        errors.extend(mounts::link_var_run(Path::new("/")).err());
        // The publisher reports a directory that cannot be made.
        let _unused = std::fs::create_dir(cdi::publish::DIRECTORY);
        if errors.is_empty() { Ok(()) } else { Err(errors.join("; ")) }
    });
    stamps.step(What::Console, console);
    let command_line = stamps.step(What::Config, || {
        std::fs::read("/proc/cmdline").map_err(|e| format!("read /proc/cmdline: {e}: every parameter has its default"))
    });
    let command_line = command_line.unwrap_or_default();
    let (config, notes) = Config::parse(&command_line);
    let agent = config.agent;
    // The keeper gets the socket's other end, whose end of file shows that PID 1 is the agent.
    let (ours, theirs) = match handover::pair() {
        Ok(pair) => pair,
        Err(errno) => return no_worker(&format!("make a socket pair: {errno}")),
    };
    let forked = crate::sys::fork_single_threaded((ours, theirs), |(ours, theirs)| {
        drop(ours);
        keeper::run(Boot { config, notes, command_line, stamps }, theirs)
    });
    match forked {
        Ok((_keeper, (ours, _theirs))) => Some((agent, ours)),
        Err((errno, _)) => no_worker(&format!("fork: {errno}")),
    }
}

fn no_worker(error: &str) -> Option<(Agent, Handover)> {
    failure::tell(&format!("{error}: no GPU will be brought up, the agent starts without"));
    None
}

/// Points descriptors 0 to 2 at the console: in an initrd the kernel opened them before /dev was
/// mounted.
fn console() -> Result<(), String> {
    let at = |path: &str| open(path, OFlag::O_RDWR | OFlag::O_NOCTTY | OFlag::O_CLOEXEC, Mode::empty());
    let (console, result) = match at("/dev/console") {
        Ok(console) => (console, Ok(())),
        // /dev/null is better than closed descriptors, whose numbers the agent's first files would
        // get.
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
