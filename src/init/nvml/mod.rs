//! NVML, asked by a helper process: `kata-gpu-nvml`, a program of glibc that loads
//! `libnvidia-ml.so.1`. A hang or a crash of that closed library costs the answer, never the init.

use crate::gpu::driver_caps::MigInstance;
use crate::gpu::driver_proc::is_uuid;
use crate::machine::threads;
use kata_gpu_wire::nvml_messages::{Answer, MigDevice, PROGRAM, Request};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use std::collections::BTreeMap;
use std::fmt;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{ChildStderr, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Semaphore;

/// Directories that may hold the helper, in this order.
const DIRECTORIES: [&str; 3] = ["/usr/bin", "/usr/local/bin", "/usr/libexec"];
/// OOM score of the helper: chosen before every process of the init.
const OOM_SCORE: &str = "500";
/// Longest wait for an answer. NVML asks each GPU some thirty things, each in milliseconds.
pub const ANSWER: Duration = Duration::from_secs(60);
/// Longest answer, in bytes: some kB a GPU.
const MAX_ANSWER: usize = 1024 * 1024;
/// Most helpers at once. One hangs over a GPU that keeps the driver's lock; another one may get
/// through once that GPU has left. Each costs a process and a thread for as long as it hangs.
const HELPERS: usize = 2;

/// UUIDs of a GPU's MIG instances, and what is wrong with others: a name that CDI does not take, or
/// one that is there twice, makes the whole spec unreadable.
pub fn instance_uuids(
    minor: u32,
    instances: &[MigDevice],
) -> (BTreeMap<MigInstance, String>, Vec<String>) {
    let (mut uuids, mut problems) = (BTreeMap::new(), Vec::new());
    for MigDevice {
        uuid,
        gpu_instance: gi,
        compute_instance: ci,
    } in instances
    {
        let id = MigInstance {
            gpu: minor,
            gi: *gi,
            ci: *ci,
        };
        if is_uuid("MIG-", uuid)
            && !uuids.values().any(|known| known == uuid)
            && !uuids.contains_key(&id)
        {
            uuids.insert(id, uuid.clone());
        } else {
            problems.push(format!(
                "MIG instance {gi}/{ci} has UUID {uuid:?}, which names no \
                device: ask for it by index"
            ));
        }
    }
    (uuids, problems)
}

/// Reason for no answer.
#[derive(Debug)]
pub enum Failure {
    /// No program of that name in the image.
    Missing,
    Start(PathBuf, io::Error),
    /// The helper has ended: its exit, and its last lines.
    Ended(String),
    /// No answer in time. The helper is left alone: a process in the driver must not be killed.
    Late(Duration),
    /// So many helpers hang that no other one is started.
    Hang,
    /// A line that is not an answer.
    Malformed(String),
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Missing => {
                write!(
                    f,
                    "{PROGRAM} is not in {}: put it there to know what only NVML knows",
                    DIRECTORIES.join(", ")
                )
            }
            Self::Start(path, error) => write!(f, "start {}: {error}", path.display()),
            Self::Ended(how) => write!(f, "{PROGRAM} has ended: {how}"),
            Self::Late(after) => write!(
                f,
                "{PROGRAM} has not answered within {after:?}: it is left alone"
            ),
            Self::Hang => write!(
                f,
                "{HELPERS} {PROGRAM} have not ended: no other one is started until one of them ends"
            ),
            Self::Malformed(error) => write!(f, "{PROGRAM}'s answer is not readable: {error}"),
        }
    }
}

/// Program of the helper below `root` (`/` in a guest).
pub fn find(root: &Path) -> Option<PathBuf> {
    let paths = DIRECTORIES
        .iter()
        .map(|directory| root.join(directory.trim_start_matches('/')).join(PROGRAM));
    paths.into_iter().find(|path| path.is_file())
}

/// Helpers, and those of earlier requests that have not ended.
pub struct Helpers(Arc<Semaphore>);

impl Default for Helpers {
    fn default() -> Self {
        Self(Arc::new(Semaphore::new(HELPERS)))
    }
}

impl Helpers {
    /// Sends all of `requests` to one helper, one after another; a failure ends the row; a refusal
    /// is an answer. Runs on a separate thread, so that a hanging helper delays nothing else.
    pub async fn ask(
        &self,
        program: PathBuf,
        requests: Vec<Request>,
    ) -> Vec<(Request, Result<Answer, Failure>)> {
        ask_within(ANSWER, &self.0, program, requests).await
    }
}

async fn ask_within(
    deadline: Duration,
    places: &Arc<Semaphore>,
    program: PathBuf,
    requests: Vec<Request>,
) -> Vec<(Request, Result<Answer, Failure>)> {
    // The helper of the last answer may still be on its way out. The semaphore is never closed.
    let place = tokio::time::timeout(deadline, Arc::clone(places).acquire_owned());
    let Ok(Ok(place)) = place.await else {
        let unasked = |request| (request, Err(Failure::Hang));
        return requests.into_iter().take(1).map(unasked).collect();
    };
    let (send, mut answers) = tokio::sync::mpsc::unbounded_channel();
    let all = requests.clone();
    threads::detach(move || {
        let _until_its_end = place;
        let mut helper = match Helper::start(&program) {
            Ok(helper) => helper,
            Err(error) => {
                let _unused = send.send(Err(Failure::Start(program, error)));
                return;
            }
        };
        for request in all {
            let answer = helper.ask(&request);
            let lost = answer.is_err();
            if send.send(answer).is_err() || lost {
                return;
            }
        }
    });
    let mut asked = Vec::new();
    for request in requests {
        let answer = match tokio::time::timeout(deadline, answers.recv()).await {
            Ok(Some(answer)) => answer,
            // The thread ends early only after a failure that it has sent.
            Ok(None) => break,
            Err(_) => Err(Failure::Late(deadline)),
        };
        let lost = answer.is_err();
        asked.push((request, answer));
        if lost {
            break;
        }
    }
    asked
}

struct Helper {
    child: std::process::Child,
    socket: UnixStream,
    /// Received, and not yet taken as a line.
    received: Vec<u8>,
    /// None once at its end.
    stderr: Option<ChildStderr>,
    /// Last bytes of standard error.
    last: Vec<u8>,
}

impl Helper {
    fn start(program: &Path) -> io::Result<Self> {
        let (ours, theirs) = UnixStream::pair()?;
        let ends = (OwnedFd::from(theirs.try_clone()?), OwnedFd::from(theirs));
        let mut child = Command::new(program)
            .stdin(Stdio::from(ends.0))
            .stdout(Stdio::from(ends.1))
            .stderr(Stdio::piped())
            .spawn()?;
        // Fails only for a helper that has ended already, which the first request shows.
        let _unused = std::fs::write(format!("/proc/{}/oom_score_adj", child.id()), OOM_SCORE);
        Ok(Self {
            stderr: child.stderr.take(),
            child,
            socket: ours,
            received: Vec::new(),
            last: Vec::new(),
        })
    }

    fn ask(&mut self, request: &Request) -> Result<Answer, Failure> {
        if let Err(error) = writeln!(self.socket, "{request}") {
            return Err(self.ended(&error.to_string()));
        }
        match self.line() {
            Ok(Some(line)) => {
                serde_json::from_slice(&line).map_err(|e| Failure::Malformed(e.to_string()))
            }
            Ok(None) if self.received.len() >= MAX_ANSWER => Err(Failure::Malformed(format!(
                "longer than {MAX_ANSWER} bytes"
            ))),
            Ok(None) => Err(self.ended("no answer")),
            Err(error) => Err(self.ended(&error.to_string())),
        }
    }

    /// Next line from the helper. None at the end, or when the line is too long. Reads standard
    /// error meanwhile: a helper that writes there more than a pipe holds would wait for ever.
    fn line(&mut self) -> io::Result<Option<Vec<u8>>> {
        let mut buffer = [0; 4096];
        loop {
            if let Some(end) = self.received.iter().position(|byte| *byte == b'\n') {
                return Ok(Some(self.received.drain(..=end).collect()));
            }
            let watched = [
                Some(self.socket.as_fd()),
                self.stderr.as_ref().map(ChildStderr::as_fd),
            ];
            let mut watched: Vec<PollFd<'_>> = watched
                .into_iter()
                .flatten()
                .map(|end| PollFd::new(end, PollFlags::POLLIN))
                .collect();
            match poll(&mut watched, PollTimeout::NONE) {
                Ok(_) | Err(Errno::EINTR) => {}
                Err(errno) => return Err(errno.into()),
            }
            let is_ready = |watched: &PollFd<'_>| watched.any() == Some(true);
            let (has_line, has_words) = (
                watched.first().is_some_and(is_ready),
                watched.get(1).is_some_and(is_ready),
            );
            if has_words {
                self.hear();
            }
            if has_line {
                let read = self.socket.read(&mut buffer)?;
                self.received.extend(buffer.get(..read).unwrap_or_default());
                if read == 0 || self.received.len() >= MAX_ANSWER {
                    return Ok(None);
                }
            }
        }
    }

    /// Reads standard error once, and keeps the last of it.
    fn hear(&mut self) {
        let mut buffer = [0; 4096];
        let read = self.stderr.as_mut().map(|stderr| stderr.read(&mut buffer));
        let Some(Ok(read @ 1..)) = read else {
            self.stderr = None;
            return;
        };
        self.last.extend(buffer.get(..read).unwrap_or_default());
        let excess = self.last.len().saturating_sub(MAX_LAST);
        self.last.drain(..excess);
    }

    /// Reads standard error to its end, which comes with the helper's, whose socket is closed.
    fn hear_out(&mut self) {
        while self.stderr.is_some() {
            self.hear();
        }
    }

    /// The end of the helper, with the last of what it wrote to standard error.
    fn ended(&mut self, seen: &str) -> Failure {
        self.hear_out();
        let how = self
            .child
            .wait()
            .map_or_else(|e| e.to_string(), |status| status.to_string());
        let last = String::from_utf8_lossy(&self.last).replace(char::is_control, " ");
        let last = last.trim();
        Failure::Ended(if last.is_empty() {
            format!("{how} ({seen})")
        } else {
            format!("{how}: {last}")
        })
    }
}

/// Limit of a helper's last output, in bytes.
const MAX_LAST: usize = 1024;

impl Drop for Helper {
    fn drop(&mut self) {
        // The helper ends with its socket. Reaped here, on the thread of its own.
        let _unused = self.socket.shutdown(std::net::Shutdown::Both);
        // Nobody reads the rest, and another process may hold its end open.
        self.stderr = None;
        let _unused = self.child.wait();
    }
}

#[cfg(test)]
mod tests;
