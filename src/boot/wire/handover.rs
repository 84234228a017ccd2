//! Hand-over of PID 1 to the agent, and how the other processes learn of it.
//!
//! A socket pair, close-on-exec, connects the two. PID 1 writes the time just before execve; when
//! execve succeeds, the kernel closes PID 1's end and the keeper, which waits for that before it
//! starts the worker, reads the end of the file: the agent has started. When it fails, PID 1 writes
//! the reason, waits a bounded time for the worker to carry it to the host, and powers off.

use crate::clock::boottime_ns;
use crate::{failure, sys};
use nix::sys::resource::{Resource, setrlimit};
use nix::sys::socket::{AddressFamily, MsgFlags, SockFlag, SockType, send, socketpair};
use std::ffi::{CStr, CString};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

/// How long PID 1 waits for the worker to report to the host why the guest powers off.
const LAST_WORDS: Duration = Duration::from_secs(3);
/// The agent's limit of open files, as it has it under the incumbent.
const OPEN_FILES: u64 = 1_048_576;
/// The agent's OOM score, as under the incumbent: every container is chosen before it.
const OOM_SCORE: &str = "-997";
/// Mount of the GPU extension image, which the agent's attester needs to know.
const GPU_EXTENSION: &str = "/run/kata-extensions/gpu";

/// PID 1's end.
pub struct Handover {
    worker: Option<OwnedFd>,
}

/// The worker's end.
pub struct Observer(OwnedFd);

/// The hand-over, as the other processes saw it.
pub struct Handed {
    /// Just before execve.
    pub begin_ns: u64,
    pub end_ns: u64,
    /// Why PID 1 could not become the agent; [`Observer::done`] lets PID 1 go on to the power-off.
    pub error: Option<(String, Observer)>,
}

/// How a worker begins.
pub enum Start {
    /// First worker, with what became of the hand-over.
    First(Handed),
    /// Successor of a worker that has died, and how that one died.
    Again { status: String },
}

/// Makes the two ends.
pub fn pair() -> nix::Result<(Handover, Observer)> {
    let (ours, theirs) = socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC)?;
    Ok((Handover { worker: Some(ours) }, Observer(theirs)))
}

impl Handover {
    /// A hand-over that nobody observes.
    pub fn alone() -> Self {
        Self { worker: None }
    }

    /// Becomes the agent. Returns to nobody: when the agent cannot be executed, the guest ends with
    /// the reason.
    pub fn exec(self, agent: &CStr) -> ! {
        let error = self.exec_or_error(agent);
        self.tell(&error);
        failure::power_off(&error)
    }

    /// Becomes the agent; returns why that failed.
    pub fn exec_or_error(&self, agent: &CStr) -> String {
        prepare_process();
        self.send(boottime_ns().to_string().as_bytes());
        let environment = environment();
        let errno = sys::exec(agent, &[agent], &environment);
        let path = agent.to_string_lossy();
        let cure = match errno {
            nix::errno::Errno::ENOENT if !Path::new(path.as_ref()).exists() => "the image has no agent: put it there",
            nix::errno::Errno::ENOENT => "the file is there, its loader (ELF interpreter) is not: put it into the image",
            nix::errno::Errno::EACCES => "the file is not executable: chmod 755",
            nix::errno::Errno::ENOEXEC => "not a program for this machine",
            _ => "see the agent's file in the image",
        };
        format!("execute {path}: {errno} ({cure})")
    }

    /// Lets the worker report to the host, for a bounded time.
    pub fn tell(&self, error: &str) {
        failure::tell(error);
        self.send(format!("!{error}").as_bytes());
        if let Some(worker) = &self.worker {
            // The worker's answer, or its end, or the deadline: the guest powers off in any case.
            let _unused = nix::sys::socket::setsockopt(worker, nix::sys::socket::sockopt::ReceiveTimeout, &timeval(LAST_WORDS));
            let _unused = nix::unistd::read(worker, &mut [0_u8; 1]);
        }
    }

    fn send(&self, message: &[u8]) {
        if let Some(worker) = &self.worker {
            // A worker that is gone reads nothing more; PID 1 does not wait for it and does not die
            // of SIGPIPE.
            let _unused = send(worker.as_raw_fd(), message, MsgFlags::MSG_NOSIGNAL | MsgFlags::MSG_DONTWAIT);
        }
    }
}

fn timeval(duration: Duration) -> nix::sys::time::TimeVal {
    nix::sys::time::TimeVal::new(duration.as_secs() as i64, i64::from(duration.subsec_micros()))
}

/// Limits and OOM score of this process as the agent expects them.
fn prepare_process() {
    // Without permission to raise the limit, the agent runs with the limit that it has.
    let _unused = setrlimit(Resource::RLIMIT_NOFILE, OPEN_FILES, OPEN_FILES);
    let _unused = std::fs::write("/proc/self/oom_score_adj", OOM_SCORE);
}

/// The agent's environment: that of PID 1, and the attester's variant where the GPU extension is
/// mounted.
fn environment() -> Vec<CString> {
    use std::os::unix::ffi::OsStrExt;
    let mut list: Vec<CString> =
        std::env::vars_os().filter_map(|(key, value)| CString::new([key.as_bytes(), b"=", value.as_bytes()].concat()).ok()).collect();
    if Path::new(GPU_EXTENSION).is_dir() {
        list.push(c"KATA_ATTESTER_VARIANT=nvidia".to_owned());
    }
    list
}

impl Observer {
    /// Blocks until PID 1 has become the agent, or has reported why not: some milliseconds at most,
    /// in which the machine is PID 1's alone.
    pub fn wait(self) -> Handed {
        let mut begin_ns = boottime_ns();
        let mut buffer = [0_u8; 1024];
        loop {
            match nix::unistd::read(&self.0, &mut buffer) {
                Ok(0) => return Handed { begin_ns, end_ns: boottime_ns(), error: None },
                Ok(n) => {
                    let text = String::from_utf8_lossy(buffer.get(..n).unwrap_or_default()).into_owned();
                    match text.strip_prefix('!') {
                        Some(error) => return Handed { begin_ns, end_ns: boottime_ns(), error: Some((error.to_string(), self)) },
                        None => begin_ns = text.parse().unwrap_or(begin_ns),
                    }
                }
                Err(nix::errno::Errno::EINTR) => {}
                // An unreadable socket is as good as the end of the file.
                Err(_) => return Handed { begin_ns, end_ns: boottime_ns(), error: None },
            }
        }
    }

    /// Reports to PID 1 that everything that could be reported has been.
    pub fn done(self) {
        // PID 1 waits with a deadline of its own.
        let _unused = send(self.0.as_raw_fd(), b".", MsgFlags::MSG_NOSIGNAL | MsgFlags::MSG_DONTWAIT);
    }
}
