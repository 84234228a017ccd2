//! Connections between the processes of the init: sockets, the descriptors that travel over them,
//! and the hand-over to the agent. Each file holds both ends of one connection. Order and timing
//! are decided elsewhere.

pub mod descriptors; // the worker's view of all opened GPUs
pub mod handover; // PID 1 becomes the agent
pub mod keeper_socket; // the worker and the keeper: descriptors that outlive the worker
pub mod lane_process; // enabling, on a vCPU of its own
pub mod opener; // opening, in processes that survive the worker
pub mod reply; // requests, each with a socket for its answers

use crate::machine::sys;
use crate::machine::sys::fork_single_threaded;
use kata_gpu_wire::names;
use keeper_socket::Held;
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::{Pid, close};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};

/// Process id of a helper of the worker, until that is reaped: then another process may get the id.
#[derive(Clone)]
pub struct HelperPid {
    name: &'static str,
    /// 0: reaped.
    pid: Arc<AtomicI32>,
}

impl HelperPid {
    fn new(name: &'static str, pid: Pid) -> Self {
        let pid = Arc::new(AtomicI32::new(pid.as_raw()));
        Self { name, pid }
    }

    /// The id, unless the process is reaped.
    pub fn get(&self) -> Option<Pid> {
        let pid = self.pid.load(Ordering::Relaxed);
        (pid != 0).then_some(Pid::from_raw(pid))
    }

    /// Reaps the process when it has ended, and reports an end by a signal or an error. Waits for
    /// that as long as the process lives, and keeps no thread meanwhile.
    pub async fn reap(self) {
        let Some(pid) = self.get() else { return };
        let ended = async {
            let process = sys::async_fd(sys::pidfd_open(pid)?)?;
            process.readable().await.map(drop)
        };
        // Without a pidfd, the process stays a zombie until the worker's end.
        if ended.await.is_err() {
            return;
        }
        self.pid.store(0, Ordering::Relaxed);
        let status = match waitpid(pid, Some(WaitPidFlag::WNOHANG)) {
            Ok(WaitStatus::Exited(_, 0)) => return,
            Ok(WaitStatus::Exited(_, code)) => format!("exit status {code}"),
            Ok(WaitStatus::Signaled(_, signal, _)) => format!("killed by {signal}"),
            Ok(other) => format!("{other:?}"),
            Err(errno) => format!("wait: {errno}"),
        };
        let process = self.name;
        let error =
            format!("{process} has ended ({status}): the worker does its work from here on");
        tracing::warn!(name: names::PROCESS_DIED, process, status, error);
    }
}

/// Starts a process that serves requests from the socket that is returned; must be called while
/// this process has one thread. None where that fails.
///
/// Closes held GPUs in the child: a GPU is removed only when no process has it open.
fn start_helper(
    name: &'static str,
    held: &[Held],
    serve: impl FnOnce(&OwnedFd),
) -> Option<(HelperPid, OwnedFd)> {
    let forked = fork_single_threaded(reply::pair().ok()?, |(ours, theirs)| {
        drop(ours);
        for gpu in held {
            let _unused = close(gpu.descriptor);
        }
        name_process(&format!("gpuinit-{name}"));
        serve(&theirs);
        0
    });
    let (pid, (ours, _theirs)) = forked.ok()?;
    Some((HelperPid::new(name, pid), ours))
}

/// Sets the name of this process that `ps` shows.
pub fn name_process(name: &str) {
    // The name is only for `ps`.
    let _unused = std::fs::write("/proc/self/comm", name);
}

#[cfg(test)]
mod tests {
    use super::lane_process::LaneProcess;
    use super::*;
    use crate::stream::layer::tests::records;
    use nix::errno::Errno;
    use nix::sys::signal::{Signal, kill};
    use std::process::Command;

    #[expect(clippy::zombie_processes, reason = "HelperPid::reap reaps it")]
    fn started(name: &'static str, program: &str, argument: &str) -> (HelperPid, Pid) {
        let child = Command::new(program).arg(argument).spawn().unwrap();
        let pid = Pid::from_raw(child.id() as i32);
        (HelperPid::new(name, pid), pid)
    }

    fn reap(helper: HelperPid) {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build();
        runtime.unwrap().block_on(helper.reap());
    }

    #[test]
    fn a_helper_that_is_killed_is_reaped_and_its_death_reported() {
        let (helper, pid) = started("opener", "sleep", "600");
        assert_eq!(helper.get(), Some(pid));
        kill(pid, Signal::SIGKILL).unwrap();
        let all = records(|| reap(helper.clone()));
        assert_eq!(
            (helper.get(), waitpid(pid, None)),
            (None, Err(Errno::ECHILD))
        );
        assert_eq!((all.len(), all[0].name.as_str()), (1, names::PROCESS_DIED));
        assert_eq!(all[0].fields["process"], "opener");
        assert_eq!(all[0].fields["status"], "killed by SIGKILL");
        // One that ends as it should is no death.
        let (helper, pid) = started("lane", "true", "");
        assert!(records(|| reap(helper)).is_empty());
        assert_eq!(waitpid(pid, None), Err(Errno::ECHILD));
    }

    #[test]
    fn the_end_of_the_lane_waits_for_no_process_that_is_stopped() {
        let (helper, pid) = started("lane", "sleep", "600");
        kill(pid, Signal::SIGSTOP).unwrap();
        let lane = LaneProcess::of(reply::pair().unwrap().0, helper.clone());
        let (over, is_over) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            drop(lane);
            over.send(())
        });
        // Ends a hang.
        let ended = is_over.recv_timeout(std::time::Duration::from_secs(60));
        kill(pid, Signal::SIGKILL).unwrap();
        assert_eq!(ended, Ok(()));
        reap(helper);
    }
}
