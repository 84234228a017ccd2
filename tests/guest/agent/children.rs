//! Reaping, as the real agent does it: moved by SIGCHLD alone. A SIGCHLD that whoever executed the
//! agent left blocked therefore leaves every dead child a zombie: that is the trap of an init that
//! does not reset its signal mask.

use super::{log, words};
use nix::sys::signal::{SigSet, SigmaskHow, Signal};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use std::process::Command;
use std::sync::{Mutex, PoisonError};

/// Processes whose exit status is logged: the real agent logs none.
static WATCHED: Mutex<Vec<i32>> = Mutex::new(Vec::new());

/// Starts a program whose end is logged as `ended`, with its status. The pid is known before the
/// end can be seen.
pub fn start_watched(command: &mut Command) -> std::io::Result<u32> {
    let mut watched = WATCHED.lock().unwrap_or_else(PoisonError::into_inner);
    let child = command.spawn()?;
    watched.push(child.id() as i32);
    Ok(child.id())
}

fn log_if_watched(pid: i32, status: &str) {
    let mut watched = WATCHED.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(at) = watched.iter().position(|known| *known == pid) {
        watched.swap_remove(at);
        log::info(
            "ended",
            &[("child-pid", &pid.to_string()), ("status", status)],
        );
    }
}

/// SIGCHLD, held for [`Children::reap`].
pub struct Children {
    /// False when SIGCHLD was blocked before this program started: the real agent's handler would
    /// never run.
    heard: bool,
}

/// Starts to listen. Before any other thread is started, which would get the signal instead.
pub fn listen() -> nix::Result<Children> {
    // Orphans of this process's descendants come to it also when it is not PID 1.
    nix::sys::prctl::set_child_subreaper(true)?;
    let before = only_sigchld().thread_swap_mask(SigmaskHow::SIG_BLOCK)?;
    Ok(Children {
        heard: !before.contains(Signal::SIGCHLD),
    })
}

fn only_sigchld() -> SigSet {
    SigSet::from(Signal::SIGCHLD)
}

impl Children {
    /// Reaps every child for ever.
    pub fn reap(&self) -> ! {
        loop {
            if !self.heard {
                std::thread::park();
                continue;
            }
            // Fails only for a set without a signal.
            if only_sigchld().wait().is_ok() {
                reap_the_dead();
            }
        }
    }
}

/// Reaps every dead child: one signal may stand for several children.
fn reap_the_dead() {
    loop {
        let (pid, status) = match waitpid(None, Some(WaitPidFlag::WNOHANG | WaitPidFlag::__WALL)) {
            Ok(WaitStatus::Exited(pid, status)) => (pid, status.to_string()),
            Ok(WaitStatus::Signaled(pid, signal, _)) => (pid, signal.to_string()),
            // No child is left, or none is dead.
            Ok(WaitStatus::StillAlive) | Err(_) => return,
            Ok(_stopped) => continue,
        };
        log_if_watched(pid.as_raw(), &status);
        words::child_exited(pid.as_raw()).write();
    }
}
