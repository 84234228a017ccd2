//! NVML, asked by a helper process: `kata-gpu-nvml`, a program of glibc that loads
//! `libnvidia-ml.so.1`. A hang or a crash of that closed library costs the answer, never the init.

use crate::gpu::driver_caps::MigInstance;
use crate::gpu::driver_proc::is_uuid;
use crate::machine::threads;
use kata_gpu_wire::nvml_messages::{Answer, MigDevice, PROGRAM, Request};
use std::collections::BTreeMap;
use std::fmt;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

/// Directories that may hold the helper, in this order.
const DIRECTORIES: [&str; 3] = ["/usr/bin", "/usr/local/bin", "/usr/libexec"];
/// OOM score of the helper: chosen before every process of the init.
const OOM_SCORE: &str = "500";
/// Longest wait for an answer. NVML asks each GPU some thirty things, each in milliseconds.
pub const ANSWER: Duration = Duration::from_secs(60);
/// Longest answer, in bytes: some kB a GPU.
const MAX_ANSWER: u64 = 1024 * 1024;

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

/// Sends all of `requests` to one helper, one after another; a failure ends the row; a
/// refusal is an answer. Runs on a separate thread, so that a hanging helper delays nothing else.
pub async fn ask(
    program: PathBuf,
    requests: Vec<Request>,
) -> Vec<(Request, Result<Answer, Failure>)> {
    ask_within(ANSWER, program, requests).await
}

async fn ask_within(
    deadline: Duration,
    program: PathBuf,
    requests: Vec<Request>,
) -> Vec<(Request, Result<Answer, Failure>)> {
    let (send, mut answers) = tokio::sync::mpsc::unbounded_channel();
    let all = requests.clone();
    threads::detach(move || {
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
    socket: BufReader<UnixStream>,
}

impl Helper {
    fn start(program: &Path) -> io::Result<Self> {
        let (ours, theirs) = UnixStream::pair()?;
        let ends = (OwnedFd::from(theirs.try_clone()?), OwnedFd::from(theirs));
        let child = Command::new(program)
            .stdin(Stdio::from(ends.0))
            .stdout(Stdio::from(ends.1))
            .stderr(Stdio::piped())
            .spawn()?;
        // Fails only for a helper that has ended already, which the first request shows.
        let _unused = std::fs::write(format!("/proc/{}/oom_score_adj", child.id()), OOM_SCORE);
        Ok(Self {
            child,
            socket: BufReader::new(ours),
        })
    }

    fn ask(&mut self, request: &Request) -> Result<Answer, Failure> {
        if let Err(error) = writeln!(self.socket.get_mut(), "{request}") {
            return Err(self.ended(&error.to_string()));
        }
        let mut line = String::new();
        match self.socket.by_ref().take(MAX_ANSWER).read_line(&mut line) {
            Ok(read) if read > 0 && line.ends_with('\n') => {
                serde_json::from_str(&line).map_err(|e| Failure::Malformed(e.to_string()))
            }
            Ok(read) if read as u64 == MAX_ANSWER => Err(Failure::Malformed(format!(
                "longer than {MAX_ANSWER} bytes"
            ))),
            Ok(_) => Err(self.ended("no answer")),
            Err(error) => Err(self.ended(&error.to_string())),
        }
    }

    /// The end of the helper, with the last of what it wrote to standard error.
    fn ended(&mut self, seen: &str) -> Failure {
        let mut last = Vec::new();
        if let Some(stderr) = self.child.stderr.take() {
            // The read ends with the helper, whose socket is closed.
            let _unused = stderr.take(MAX_LAST).read_to_end(&mut last);
        }
        let how = self
            .child
            .wait()
            .map_or_else(|e| e.to_string(), |status| status.to_string());
        let last = String::from_utf8_lossy(&last).replace(char::is_control, " ");
        let last = last.trim();
        Failure::Ended(if last.is_empty() {
            format!("{how} ({seen})")
        } else {
            format!("{how}: {last}")
        })
    }
}

/// Limit of a helper's last output, in bytes.
const MAX_LAST: u64 = 1024;

impl Drop for Helper {
    fn drop(&mut self) {
        // The helper ends with its socket. Reaped here, on the thread of its own.
        let _unused = self.socket.get_ref().shutdown(std::net::Shutdown::Both);
        let _unused = self.child.wait();
    }
}

#[cfg(test)]
mod tests;
