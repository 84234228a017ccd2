//! Hand-over of PID 1 to the agent, and its report to the other processes.
//!
//! A close-on-exec socket pair connects PID 1 and the keeper. PID 1 writes the time just before
//! execve. When execve succeeds, the kernel closes PID 1's end, and the keeper reads the end of the
//! file: the agent has started. The keeper waits for that before it starts the worker. When execve
//! fails, PID 1 writes the reason, waits a bounded time for the worker to deliver it to the host,
//! and powers off.

use crate::boot::failure;
use crate::extensions::mount::GPU;
use crate::machine::clock::boottime_ns;
use crate::machine::sys;
use nix::sys::resource::{Resource, setrlimit};
use nix::sys::socket::{MsgFlags, send};
use std::ffi::{CStr, CString};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

/// Longest wait of PID 1 until the worker has reported the reason of the power-off to the host.
const LAST_WORDS: Duration = Duration::from_secs(3);
/// The agent's limit of open files, as under the incumbent.
const OPEN_FILES: u64 = 1_048_576;
/// The agent's OOM score, as under the incumbent: every container is chosen before the agent.
const OOM_SCORE: &str = "-997";

/// PID 1's end.
pub struct Handover {
    worker: Option<OwnedFd>,
    /// Whether the GPU extension is declared, for which the agent's attester has a variant. The
    /// extension may be mounted later.
    pub gpu_extension: bool,
}

/// The keeper's end, passed on to the worker when the hand-over failed.
pub struct Observer(OwnedFd);

/// The hand-over, as observed by the keeper.
pub struct Handed {
    /// Time just before execve.
    pub begin_ns: u64,
    pub end_ns: u64,
    /// Error of execve; [`Observer::done`] lets PID 1 go on to the power-off.
    pub error: Option<(String, Observer)>,
}

/// Kind of a worker's start.
pub enum Start {
    /// First worker, with the result of the hand-over.
    First(Handed),
    /// Successor of workers that have died.
    Again {
        /// The result of the hand-over, which succeeded: the first worker may have died before it
        /// reported anything.
        handed: Handed,
        /// How many have died.
        number: u64,
        /// Those of which the keeper does not know that they are in the stream.
        deaths: Vec<Death>,
    },
}

/// Death of a worker.
#[derive(Clone, Debug)]
pub struct Death {
    /// 1 for the first worker.
    pub number: u64,
    pub status: String,
}

/// Makes the two ends.
pub fn pair() -> nix::Result<(Handover, Observer)> {
    let (ours, theirs) = super::reply::pair()?;
    Ok((
        Handover {
            worker: Some(ours),
            gpu_extension: false,
        },
        Observer(theirs),
    ))
}

impl Handover {
    /// Makes a hand-over without an observer.
    pub fn alone() -> Self {
        Self {
            worker: None,
            gpu_extension: false,
        }
    }

    /// Becomes the agent. Never returns: when the agent cannot be executed, powers off with the
    /// reason.
    pub fn exec(self, agent: &CStr) -> ! {
        let error = self.exec_or_error(agent);
        self.report(&error);
        failure::power_off(&error)
    }

    /// Becomes the agent; returns only the error of a failed execve.
    pub fn exec_or_error(&self, agent: &CStr) -> String {
        prepare_process();
        self.send(boottime_ns().to_string().as_bytes());
        let environment = environment(self.gpu_extension);
        let errno = sys::exec(agent, &[agent], &environment);
        let path = agent.to_string_lossy();
        let cure = match errno {
            nix::errno::Errno::ENOENT if !Path::new(path.as_ref()).exists() => {
                "the image has no agent: put it there"
            }
            nix::errno::Errno::ENOENT => {
                "the file is there, its loader (ELF interpreter) is not: put it into the image"
            }
            nix::errno::Errno::EACCES => "the file is not executable: chmod 755",
            nix::errno::Errno::ENOEXEC => "not a program for this machine",
            _ => "see the agent's file in the image",
        };
        format!("execute {path}: {errno} ({cure})")
    }

    /// Lets the worker report to the host, for a bounded time.
    pub fn report(&self, error: &str) {
        failure::report(error);
        self.send(format!("!{error}").as_bytes());
        if let Some(worker) = &self.worker {
            // Wait for the worker's response, its end or the deadline; the guest powers off in any
            // case.
            let _unused = nix::sys::socket::setsockopt(
                worker,
                nix::sys::socket::sockopt::ReceiveTimeout,
                &timeval(LAST_WORDS),
            );
            let _unused = nix::unistd::read(worker, &mut [0_u8; 1]);
        }
    }

    fn send(&self, message: &[u8]) {
        if let Some(worker) = &self.worker {
            // PID 1 neither waits for a worker that is gone nor dies of SIGPIPE.
            let _unused = send(
                worker.as_raw_fd(),
                message,
                MsgFlags::MSG_NOSIGNAL | MsgFlags::MSG_DONTWAIT,
            );
        }
    }
}

fn timeval(duration: Duration) -> nix::sys::time::TimeVal {
    nix::sys::time::TimeVal::new(
        duration.as_secs() as i64,
        i64::from(duration.subsec_micros()),
    )
}

/// Limits and OOM score of this process as the agent expects them.
fn prepare_process() {
    // Without permission to raise the limit, the agent runs with the current one.
    let _unused = setrlimit(Resource::RLIMIT_NOFILE, OPEN_FILES, OPEN_FILES);
    crate::machine::sys::set_oom_score(OOM_SCORE);
}

/// The agent's environment: PID 1's environment, plus the attester's variant where the GPU
/// extension is declared or mounted.
fn environment(gpu_extension: bool) -> Vec<CString> {
    use std::os::unix::ffi::OsStrExt;
    let mut list: Vec<CString> = std::env::vars_os()
        .filter_map(|(key, value)| {
            CString::new([key.as_bytes(), b"=", value.as_bytes()].concat()).ok()
        })
        .collect();
    if gpu_extension || Path::new(GPU).is_dir() {
        list.push(c"KATA_ATTESTER_VARIANT=nvidia".to_owned());
    }
    list
}

impl Observer {
    /// Blocks until PID 1 has become the agent, or has reported the error: some milliseconds at
    /// most, in which PID 1 has the machine to itself.
    pub fn wait(self) -> Handed {
        let mut begin_ns = boottime_ns();
        let mut buffer = [0_u8; 1024];
        let error = loop {
            match nix::unistd::read(&self.0, &mut buffer) {
                Err(nix::errno::Errno::EINTR) => {}
                // An unreadable socket counts as the end of the file.
                Ok(0) | Err(_) => break None,
                Ok(n) => {
                    let text = String::from_utf8_lossy(buffer.get(..n).unwrap_or_default());
                    match text.strip_prefix('!') {
                        Some(error) => break Some((error.to_string(), self)),
                        None => begin_ns = text.parse().unwrap_or(begin_ns),
                    }
                }
            }
        };
        Handed {
            begin_ns,
            end_ns: boottime_ns(),
            error,
        }
    }

    /// Reports to PID 1 that the delivery to the host is over.
    pub fn done(self) {
        // PID 1 waits with a deadline of its own.
        let _unused = send(
            self.0.as_raw_fd(),
            b".",
            MsgFlags::MSG_NOSIGNAL | MsgFlags::MSG_DONTWAIT,
        );
    }
}
