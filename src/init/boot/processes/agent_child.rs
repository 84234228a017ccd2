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
use std::time::Duration;

/// Pause after a fork that failed: no event reports that processes can be made again.
const FORK_PAUSE: Duration = Duration::from_millis(100);
/// Most tries to fork, over five seconds: without its agent the guest runs no container.
const MOST_FORKS: u32 = 50;

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
    let fork = |handover| {
        sys::fork_single_threaded(handover, |handover: Handover| {
            // A session of its own keeps signals for the agent from other processes. A fresh child
            // is no leader, so this does not fail.
            let _unused = setsid();
            let error = handover.exec_or_error(AGENT);
            handover.report(&error);
            127
        })
    };
    let pause = |refused: Option<String>| {
        refused
            .iter()
            .for_each(|sentence| failure::report(sentence));
        std::thread::sleep(FORK_PAUSE); // see the constant
    };
    match fork_at_last(handover, fork, pause) {
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

/// Forks; tries again while the kernel is short of processes or memory. `pause` gets the first
/// refusal, as a sentence.
fn fork_at_last<T>(
    mut both: T,
    mut fork: impl FnMut(T) -> Result<(Pid, T), (Errno, T)>,
    mut pause: impl FnMut(Option<String>),
) -> Result<(Pid, T), (Errno, T)> {
    for tried in 1..MOST_FORKS {
        both = match fork(both) {
            Err((errno @ (Errno::EAGAIN | Errno::ENOMEM), both)) => {
                pause((tried == 1).then(|| {
                    format!(
                        "fork for kata-agent: {errno}: trying again every {FORK_PAUSE:?}, \
                            {MOST_FORKS} times at most"
                    )
                }));
                both
            }
            forked => return forked,
        };
    }
    fork(both)
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Forks, of which the first ones fail with this error; returns the result, the number of
    /// tries, and what was reported.
    fn tries(errno: Errno, failing: u32) -> (Result<Pid, Errno>, u32, Vec<String>) {
        let (mut tried, mut reported) = (0, Vec::new());
        let fork = |both| {
            tried += 1;
            match tried <= failing {
                true => Err((errno, both)),
                false => Ok((Pid::from_raw(7), both)),
            }
        };
        let forked = fork_at_last((), fork, |sentence| reported.extend(sentence));
        let result = forked.map(|(pid, ())| pid).map_err(|(errno, ())| errno);
        (result, tried, reported)
    }

    #[test]
    fn a_fork_for_the_agent_that_fails_for_a_moment_is_tried_again() {
        for errno in [Errno::EAGAIN, Errno::ENOMEM] {
            let (result, tried, reported) = tries(errno, 3);
            assert_eq!((result, tried), (Ok(Pid::from_raw(7)), 4));
            assert!(
                reported.len() == 1 && reported[0].contains("trying again every 100ms"),
                "{reported:?}"
            );
            // Not for ever.
            let (result, tried, reported) = tries(errno, u32::MAX);
            assert_eq!((result, tried), (Err(errno), MOST_FORKS));
            assert_eq!(reported.len(), 1);
        }
        // Lasts.
        assert_eq!(tries(Errno::ENOSYS, 1), (Err(Errno::ENOSYS), 1, Vec::new()));
        assert_eq!(
            tries(Errno::ENOSYS, 0),
            (Ok(Pid::from_raw(7)), 1, Vec::new())
        );
    }
}
