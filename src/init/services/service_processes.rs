//! Services among the guest's processes. Each process of a service carries a mark in its
//! environment, which daemons keep when they fork: so a worker finds services that an earlier
//! worker started, and a daemon that has left its parent. A pod can choose its containers'
//! environment; the mark counts only in the init's own mount namespace, which no container has.

use super::service_table::Name;
use crate::machine::files;
use nix::errno::Errno;
use nix::sys::wait::{Id, WaitPidFlag, WaitStatus, waitid};
use nix::unistd::Pid;
use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use tokio::io::unix::AsyncFd;

/// Variable of the mark; its value is the service's name.
pub const MARK: &str = "KATA_GPU_SERVICE";
/// Limit of an environment: the mark stands first.
const MAX_ENVIRONMENT: u64 = 4096;

/// Name of the service that a process belongs to, as its environment has it.
pub fn mark_of(proc: &Path, pid: i32) -> Option<String> {
    let mounts_of = |process: &str| std::fs::read_link(proc.join(process).join("ns/mnt")).ok();
    if mounts_of(&pid.to_string())? != mounts_of("self")? {
        return None;
    }
    let environment =
        files::read(&proc.join(pid.to_string()).join("environ"), MAX_ENVIRONMENT).ok()?;
    let value = environment
        .split(|byte| *byte == 0)
        .find_map(|entry| entry.strip_prefix(MARK.as_bytes())?.strip_prefix(b"="))?;
    String::from_utf8(value.to_vec()).ok()
}

/// The main process of a service, if it runs: among the marked processes, the one whose parent is
/// not marked. A zombie has no environment, and is not found.
pub fn find(proc: &Path, service: Name) -> Option<Pid> {
    let mut found = BTreeMap::new();
    for pid in files::numbers(proc) {
        if mark_of(proc, pid).as_deref() == Some(service.name())
            && let Some(parent) = parent_of(proc, pid)
        {
            found.insert(pid, parent);
        }
    }
    found
        .iter()
        .find(|(_, parent)| !found.contains_key(parent))
        .map(|(pid, _)| Pid::from_raw(*pid))
}

/// Parent of a process: the fourth field of its stat, behind a name that may contain anything.
fn parent_of(proc: &Path, pid: i32) -> Option<i32> {
    let stat = std::fs::read(proc.join(pid.to_string()).join("stat")).ok()?;
    let behind = stat.iter().rposition(|byte| *byte == b')')?;
    let text = std::str::from_utf8(stat.get(behind + 1..)?).ok()?;
    text.split_ascii_whitespace().nth(1)?.parse().ok()
}

/// A watched process, started by this worker or an earlier one.
pub struct Process {
    pub pid: Pid,
    watched: AsyncFd<OwnedFd>,
}

impl Process {
    pub fn watch(pid: Pid) -> std::io::Result<Self> {
        Ok(Self {
            pid,
            watched: crate::machine::sys::async_fd(crate::machine::sys::pidfd_open(pid)?)?,
        })
    }

    /// Returns how the process ended.
    pub async fn ended(&self) -> Ending {
        // Fails only when the runtime ends.
        let _unused = self
            .watched
            .readable()
            .await
            .map(|mut ready| ready.retain_ready());
        loop {
            match waitid(
                Id::PIDFd(self.watched.get_ref().as_fd()),
                WaitPidFlag::WEXITED | WaitPidFlag::WNOHANG,
            ) {
                Ok(WaitStatus::Exited(_, code)) => return Ending::Exited(code),
                Ok(WaitStatus::Signaled(_, signal, _)) => return Ending::Killed(signal.as_str()),
                Err(Errno::EINTR) => {}
                // Another process is the parent and gets the status.
                Ok(_) | Err(_) => return Ending::Unknown,
            }
        }
    }
}

/// End of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    Exited(i32),
    Killed(&'static str),
    /// The process was not this worker's child.
    Unknown,
}

impl std::fmt::Display for Ending {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Exited(code) => write!(f, "exit status {code}"),
            Self::Killed(signal) => write!(f, "killed by {signal}"),
            Self::Unknown => f.write_str("its status went to PID 1"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kata_gpu_test_support::temp_dir;
    use std::os::unix::fs::symlink;

    #[test]
    fn the_main_process_of_a_service_is_found_by_its_mark() {
        let folder = temp_dir();
        let proc = folder.path();
        let in_namespace = |mounts: u32, process: &str| {
            let folder = proc.join(process).join("ns");
            std::fs::create_dir_all(&folder).unwrap();
            symlink(format!("mnt:[{mounts}]"), folder.join("mnt")).unwrap();
        };
        let process = |pid: i32, parent: i32, environment: &str| {
            let folder = proc.join(pid.to_string());
            in_namespace(if pid == 38 { 2 } else { 1 }, &pid.to_string());
            std::fs::write(folder.join("stat"), format!("{pid} (a) b) S {parent} 1 1")).unwrap();
            std::fs::write(folder.join("environ"), environment).unwrap();
        };
        in_namespace(1, "self");
        // A container's process, whose pod chose the mark.
        process(38, 1, "KATA_GPU_SERVICE=persistenced\0");
        process(40, 1, "A=1\0KATA_GPU_SERVICE=persistenced\0");
        process(39, 40, "KATA_GPU_SERVICE=persistenced\0");
        process(41, 1, "KATA_GPU_SERVICE=persistencedx\0");
        process(42, 1, "X_KATA_GPU_SERVICE=nvlsm\0");
        process(43, 1, "");
        assert_eq!(find(proc, Name::Persistenced), Some(Pid::from_raw(40)));
        assert_eq!(find(proc, Name::Nvlsm), None);
    }

    #[test]
    #[expect(clippy::zombie_processes, reason = "Process::ended reaps it")]
    fn the_end_of_a_child_is_known_with_its_status() {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        runtime.block_on(async {
            for (script, ending) in [
                ("exit 3", Ending::Exited(3)),
                ("kill -9 $$", Ending::Killed("SIGKILL")),
            ] {
                let child = std::process::Command::new("sh")
                    .args(["-c", script])
                    .spawn()
                    .unwrap();
                let process =
                    Process::watch(Pid::from_raw(i32::try_from(child.id()).unwrap())).unwrap();
                assert_eq!(process.ended().await, ending);
            }
        });
    }
}
