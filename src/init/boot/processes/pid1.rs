//! Stage 0: PID 1 from its first instruction until it becomes the agent. One thread, no waiting.
//!
//! Requirements of the agent:
//! - no setsid and no setpgid in PID 1: the agent powers off silently when it is a leader already;
//! - descriptors 0 to 2 on the console, or the agent's log is lost;
//! - every other descriptor close-on-exec;
//! - signals as a new program expects them.

use super::stamps::Boot;
use super::{agent_child, keeper};
use crate::boot::AGENT;
use crate::boot::failure;
use crate::boot::failure::PowerOffRight;
use crate::boot::ipc::handover;
use crate::boot::ipc::handover::Handover;
use crate::cdi;
use crate::config::{Agent, Config};
use crate::extensions::{self, Extension};
use crate::machine::{mounts, tsc};
use crate::stream::stamps::{Stamp, What, timed};
use nix::fcntl::{OFlag, open};
use nix::sys::stat::Mode;
use std::path::Path;

/// Runs the guest from PID 1's first instruction, which was at `started_ns` (CLOCK_BOOTTIME) and
/// `tsc`.
pub fn run(started_ns: u64, tsc: Option<tsc::Reading>) -> ! {
    std::panic::set_hook(Box::new(|panicked| {
        failure::report(&format!("a bug: {panicked}"))
    }));
    // PID 1 must not die of a panic: a panic before the hand-over costs the GPUs, not the guest.
    let next = std::panic::catch_unwind(|| prepare(started_ns, tsc)).unwrap_or_else(|_| {
        failure::report("a bug in stage 0: no GPU will be brought up, the agent starts without");
        Next::Start(Agent::Exec, Handover::alone())
    });
    match next {
        Next::Start(Agent::Child, handover) => agent_child::run(handover),
        Next::Start(Agent::Exec, handover) => handover.exec(AGENT),
        Next::Refuse(error, handover) => {
            // Report to the host as well, through the worker.
            handover.report(&error);
            failure::power_off(&error)
        }
    }
}

/// Continuation of PID 1 after stage 0.
enum Next {
    Start(Agent, Handover),
    /// No agent: the guest's image is not what the command line vouches for.
    Refuse(String, Handover),
}

/// Prepares the hand-over and starts the keeper.
fn prepare(started_ns: u64, tsc: Option<tsc::Reading>) -> Next {
    let mut steps = Vec::with_capacity(8);
    // Order: /proc before the command line, /dev before the console, /run before the CDI directory.
    // A failure is reported, and the boot goes on: the agent makes these mounts itself.
    let _reported = timed(&mut steps, What::Mounts, |_| {
        let mut errors = mounts::make(mounts::EARLY);
        errors.extend(mounts::link_var_run(Path::new("/"), mounts::bind).err());
        // The publisher reports a directory that cannot be made.
        let _unused = std::fs::create_dir(cdi::publish::DIRECTORY);
        if errors.is_empty() {
            Ok(())
        } else {
            Err(errors.join("; "))
        }
    });
    let _reported = timed(&mut steps, What::Console, |_| console());
    let command_line = timed(&mut steps, What::Config, |_| {
        std::fs::read("/proc/cmdline")
            .map_err(|e| format!("read /proc/cmdline: {e}: every parameter has its default"))
    });
    let command_line = command_line.unwrap_or_default();
    let (config, notes) = Config::parse(&command_line);
    let agent = config.agent;
    let gpu_extension = config
        .extensions
        .iter()
        .flatten()
        .any(|extension| extension.name.is_gpu());
    let refused = match &config.extensions {
        Err(error) => Some(error.clone()),
        Ok(declared) if extensions::before_agent(declared) => mount(declared, &mut steps).err(),
        // The worker mounts what only the driver needs.
        Ok(_) => None,
    };
    let next = |mut handover: Handover, refused: Option<String>| match refused {
        Some(error) => Next::Refuse(error, handover),
        None => {
            handover.gpu_extension = gpu_extension;
            Next::Start(agent, handover)
        }
    };
    let no_worker = |error: &str, refused: Option<String>| {
        match refused {
            Some(_) => failure::report(&format!("{error}: the host is not notified")),
            // No process would mount the driver's extension, or notice a fault in it.
            None if gpu_extension => {
                return Next::Refuse(
                    format!("{error}: extension gpu cannot be mounted"),
                    Handover::alone(),
                );
            }
            None => failure::report(&format!(
                "{error}: no GPU will be brought up, the agent starts without"
            )),
        }
        next(Handover::alone(), refused)
    };
    // The keeper gets the socket's other end, whose end of file shows that PID 1 is the agent.
    let (ours, theirs) = match handover::pair() {
        Ok(pair) => pair,
        Err(errno) => return no_worker(&format!("make a socket pair: {errno}"), refused),
    };
    let boot = Boot {
        config,
        notes,
        command_line,
        started_ns,
        tsc,
        steps,
        refused: refused.clone(),
        power_off_right: PowerOffRight::of_pid_1(),
    };
    let forked = crate::machine::sys::fork_single_threaded((ours, theirs), |(ours, theirs)| {
        drop(ours);
        keeper::run(boot, theirs)
    });
    match forked {
        Ok((_keeper, (ours, _theirs))) => next(ours, refused),
        Err((errno, _)) => no_worker(&format!("fork: {errno}"), refused),
    }
}

/// Mounts all extensions before the agent starts. Error: why the guest must not go on.
fn mount(declared: &[Extension], steps: &mut Vec<Stamp>) -> Result<(), String> {
    timed(steps, What::Extensions, |inside| {
        // A bug must not start the agent without what it needs.
        let mounted = std::panic::catch_unwind(|| {
            let (mut steps, result) = extensions::mount_all(declared);
            if result.is_ok() {
                steps.extend(extensions::add_libraries(declared));
            }
            (steps, result)
        });
        let (taken, result) = mounted.unwrap_or_else(|_| {
            (
                Vec::new(),
                Err("extensions: a bug while mounting them".into()),
            )
        });
        *inside = taken;
        result
    })
}

/// Points descriptors 0 to 2 at the console: in an initrd the kernel opened them before /dev was
/// mounted.
fn console() -> Result<(), String> {
    let at = |path: &str| {
        open(
            path,
            OFlag::O_RDWR | OFlag::O_NOCTTY | OFlag::O_CLOEXEC,
            Mode::empty(),
        )
    };
    let (console, result) = match at("/dev/console") {
        Ok(console) => (console, Ok(())),
        // /dev/null is better than closed descriptors, whose numbers the agent's first files would
        // get.
        Err(errno) => match at("/dev/null") {
            Ok(null) => (
                null,
                Err(format!(
                    "open /dev/console: {errno}: the agent's log goes nowhere; add console=.. to \
                        the kernel's command line"
                )),
            ),
            Err(null) => {
                return Err(format!(
                    "open /dev/console: {errno}; open /dev/null: {null}"
                ));
            }
        },
    };
    // The copies are not close-on-exec.
    nix::unistd::dup2_stdin(&console)
        .and_then(|()| nix::unistd::dup2_stdout(&console))
        .and_then(|()| nix::unistd::dup2_stderr(&console))
        .map_err(|errno| format!("put the console on descriptors 0 to 2: {errno}"))?;
    result
}
