//! `gpuinit.agent=child`: PID 1 stays the init. PID 1 makes the mounts and links that an agent
//! which is not PID 1 leaves to its init, starts the agent, reaps every orphan, and powers off in
//! order when the agent has ended.

use crate::boot::AGENT;
use crate::boot::failure;
use crate::boot::ipc::handover::Handover;
use crate::machine::{mounts, sys};
use crate::services::end;
use nix::errno::Errno;
use nix::sys::signal::kill;
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::{Pid, setsid};

/// Runs PID 1 with the agent as its child. Never returns.
pub fn run(handover: Handover) -> ! {
    let command_line = std::fs::read_to_string("/proc/cmdline").unwrap_or_default();
    for error in mounts::make(mounts::FOR_AGENT_AS_CHILD)
        .into_iter()
        .chain(mounts::make_cgroups(&command_line))
    {
        failure::report(&format!("{error}: the agent will miss it"));
    }
    if let Err(errno) = sys::loopback_up() {
        failure::report(&format!(
            "bring lo up: {errno}: connections inside a container's own network will fail"
        ));
    }
    let forked = sys::fork_single_threaded(handover, |handover| {
        // A session of its own keeps signals for the agent from other processes. A fresh child is
        // no leader, so this does not fail.
        let _unused = setsid();
        let error = handover.exec_or_error(AGENT);
        handover.report(&error);
        127
    });
    match forked {
        Ok((agent, handover)) => {
            drop(handover);
            let status = reap_until(agent);
            end::end_all()
                .iter()
                .for_each(|sentence| failure::report(sentence));
            failure::power_off(&format!("kata-agent has ended ({status})"))
        }
        Err((errno, _)) => failure::power_off(&format!("fork for kata-agent: {errno}")),
    }
}

/// Reaps children until `agent` is among them; returns how the agent ended.
fn reap_until(agent: Pid) -> String {
    loop {
        match waitpid(None, None) {
            Ok(WaitStatus::Exited(pid, code)) if pid == agent => {
                return format!("exit status {code}");
            }
            Ok(WaitStatus::Signaled(pid, signal, _)) if pid == agent => {
                return format!("killed by {signal}");
            }
            Ok(_orphan) => {}
            Err(Errno::EINTR) => {}
            // A child died of a real-time signal, for which nix has no name; the agent still
            // exists.
            Err(Errno::EINVAL) if kill(agent, None).is_ok() => {}
            Err(Errno::EINVAL) => return "killed by a real-time signal".into(),
            Err(errno) => return format!("wait: {errno}"),
        }
    }
}
