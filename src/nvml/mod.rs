//! NVML, asked by a helper process: `kata-gpu-nvml`, a program of glibc that loads
//! `libnvidia-ml.so.1`. A hang or a crash of that closed library costs the answer, never the init.
//!
//! Wire: the helper's standard input and output are one socket. A request is a line of words
//! ([`Request`]), its answer a line of JSON ([`Answer`]). One request at a time.

#[cfg(feature = "nvml")]
pub mod library;

use crate::driver_caps::MigInstance;
use crate::driver_proc::is_uuid;
use crate::pci::PciAddress;
use crate::threads;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::str::FromStr;
use std::time::Duration;

/// Name of the helper's program.
pub const PROGRAM: &str = "kata-gpu-nvml";
/// Name of the library that it loads; a development package's link without the number is not
/// needed.
pub const LIBRARY: &str = "libnvidia-ml.so.1";
/// Directories that may hold the helper, in this order.
const DIRECTORIES: [&str; 3] = ["/usr/bin", "/usr/local/bin", "/usr/libexec"];
/// OOM score of the helper: chosen before every process of the init.
const OOM_SCORE: &str = "500";
/// Longest wait for an answer. NVML asks each GPU some thirty things, each in milliseconds.
pub const ANSWER: Duration = Duration::from_secs(60);
/// Longest answer, in bytes: some kB a GPU.
const MAX_ANSWER: u64 = 1024 * 1024;

/// A request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Request {
    /// Facts of these GPUs, or of all if the list is empty: NVML initialises a GPU that is queried.
    Facts(Vec<PciAddress>),
    /// The facts that decide whether CUDA works: fabric and ready state.
    State(Vec<PciAddress>),
    /// Locks a GPU's clocks between two frequencies, in MHz.
    Clocks { gpu: PciAddress, clock: Clock, min: u32, max: u32 },
    /// Sets a GPU's power limit, in mW.
    Power { gpu: PciAddress, milliwatts: u32 },
    /// Sets the ready state of all confidential GPUs.
    Ready(bool),
}

/// Clock domain that can be locked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Clock {
    Graphics,
    Memory,
}

impl fmt::Display for Clock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Graphics => "graphics",
            Self::Memory => "memory",
        })
    }
}

impl fmt::Display for Request {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Facts(gpus) => write_list(f, "facts", gpus),
            Self::State(gpus) => write_list(f, "state", gpus),
            Self::Clocks { gpu, clock, min, max } => write!(f, "clocks {gpu} {clock} {min} {max}"),
            Self::Power { gpu, milliwatts } => write!(f, "power {gpu} {milliwatts}"),
            Self::Ready(on) => write!(f, "ready {}", if *on { "on" } else { "off" }),
        }
    }
}

fn write_list(f: &mut fmt::Formatter<'_>, word: &str, gpus: &[PciAddress]) -> fmt::Result {
    f.write_str(word)?;
    gpus.iter().try_for_each(|gpu| write!(f, " {gpu}"))
}

impl FromStr for Request {
    type Err = String;

    fn from_str(line: &str) -> Result<Self, String> {
        let words: Vec<&str> = line.split_whitespace().collect();
        let number = |text: &str| text.parse::<u32>().map_err(|e| format!("{text:?}: {e}"));
        let address = |text: &str| text.parse::<PciAddress>().map_err(|e| e.to_string());
        let addresses = |texts: &[&str]| texts.iter().map(|text| address(text)).collect::<Result<Vec<_>, _>>();
        match words[..] {
            ["facts", ref gpus @ ..] => Ok(Self::Facts(addresses(gpus)?)),
            ["state", ref gpus @ ..] => Ok(Self::State(addresses(gpus)?)),
            ["clocks", gpu, clock, min, max] => {
                let clock = match clock {
                    "graphics" => Clock::Graphics,
                    "memory" => Clock::Memory,
                    other => return Err(format!("{other:?} is no clock: want graphics or memory")),
                };
                Ok(Self::Clocks { gpu: address(gpu)?, clock, min: number(min)?, max: number(max)? })
            }
            ["power", gpu, milliwatts] => Ok(Self::Power { gpu: address(gpu)?, milliwatts: number(milliwatts)? }),
            ["ready", "on"] => Ok(Self::Ready(true)),
            ["ready", "off"] => Ok(Self::Ready(false)),
            _ => Err(format!(
                "{line:?} is no request: want facts or state with GPUs, clocks GPU graphics|memory MIN MAX (MHz), power GPU LIMIT (mW) or ready on|off"
            )),
        }
    }
}

/// An answer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Answer {
    Facts(Box<Facts>),
    Done,
    Error(String),
}

/// NVML's view of the guest.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Facts {
    pub driver: Option<String>,
    pub nvml: Option<String>,
    /// GPUs that NVML counts.
    pub count: Option<u32>,
    /// None: a driver without it, or an error.
    pub confidential: Option<Confidential>,
    pub confidential_error: Option<String>,
    pub devices: Vec<Device>,
}

/// Confidential-computing state of the system.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Confidential {
    /// GPUs keep their memory from the host, in either way: each for itself, or by protected PCIe.
    pub enabled: bool,
    pub environment: Environment,
    pub devtools: bool,
    /// Protected PCIe: several GPUs and their switches in one guest.
    pub protected_pcie: bool,
    /// Whether GPUs take work of clients.
    pub ready: bool,
}

/// NVML_CC_SYSTEM_ENVIRONMENT_*.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Environment {
    #[default]
    Unavailable,
    /// A simulation without protection.
    Simulated,
    Production,
}

impl Environment {
    /// Environment of NVML's number.
    pub fn of(number: u32) -> Self {
        match number {
            1 => Self::Simulated,
            2 => Self::Production,
            _ => Self::Unavailable,
        }
    }
}

impl fmt::Display for Environment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Unavailable => "unavailable",
            Self::Simulated => "simulated",
            Self::Production => "production",
        })
    }
}

/// A GPU, as NVML reports it. A value is None where driver or GPU do not have it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Device {
    /// PCI address, in sysfs' form; None with the reason among the errors.
    pub address: Option<PciAddress>,
    pub minor: Option<u32>,
    pub uuid: Option<String>,
    pub name: Option<String>,
    pub mig: Vec<MigDevice>,
    pub persistence: Option<bool>,
    pub graphics_mhz: Option<u32>,
    pub memory_mhz: Option<u32>,
    pub power_mw: Option<u32>,
    pub power_limit_mw: Option<u32>,
    pub ecc: Option<bool>,
    /// Uncorrected errors since the driver was loaded.
    pub ecc_uncorrected: Option<u64>,
    pub remapped: Option<Remapped>,
    /// Reasons that hold the clocks down, in NVML's terms.
    pub throttle: Vec<String>,
    /// Memory of the GPU is protected: confidential computing is on.
    pub protected: Option<bool>,
    pub fabric: Option<Fabric>,
    pub nvlinks_active: Option<u32>,
    pub nvlinks: Option<u32>,
    /// Errors of single questions; what a driver or a GPU does not have is none.
    pub errors: Vec<String>,
}

/// A MIG instance, by the numbers that the driver's capabilities have.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MigDevice {
    pub uuid: String,
    pub gpu_instance: u32,
    pub compute_instance: u32,
}

impl fmt::Display for MigDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}={}", self.gpu_instance, self.compute_instance, self.uuid)
    }
}

impl FromStr for MigDevice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = text.split_once('=').and_then(|(numbers, uuid)| {
            let (gi, ci) = numbers.split_once('/')?;
            Some(Self { uuid: uuid.to_string(), gpu_instance: gi.parse().ok()?, compute_instance: ci.parse().ok()? })
        });
        found.ok_or_else(|| format!("{text:?} is no MIG instance: want GPU-INSTANCE/COMPUTE-INSTANCE=UUID"))
    }
}

/// Separator of a list's members in a field.
pub const LIST: &str = ", ";

/// UUIDs of a GPU's MIG instances, and what is wrong with others: a name that CDI does not take, or
/// one that is there twice, makes the whole spec unreadable.
pub fn instance_uuids(minor: u32, instances: &[MigDevice]) -> (BTreeMap<MigInstance, String>, Vec<String>) {
    let (mut uuids, mut problems) = (BTreeMap::new(), Vec::new());
    for MigDevice { uuid, gpu_instance: gi, compute_instance: ci } in instances {
        let id = MigInstance { gpu: minor, gi: *gi, ci: *ci };
        if is_uuid("MIG-", uuid) && !uuids.values().any(|known| known == uuid) && !uuids.contains_key(&id) {
            uuids.insert(id, uuid.clone());
        } else {
            problems.push(format!("MIG instance {gi}/{ci} has UUID {uuid:?}, which names no device: ask for it by index"));
        }
    }
    (uuids, problems)
}

/// Rows of memory that are replaced by spare ones.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Remapped {
    pub correctable: u32,
    pub uncorrectable: u32,
    /// Takes effect at the next reset of the GPU.
    pub pending: bool,
    pub failed: bool,
}

/// A GPU's part of the NVLink fabric.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Fabric {
    pub state: FabricState,
    /// NVML's return code; 0 is success. Counts only in state `Completed`.
    pub status: u32,
    pub clique: u32,
    pub cluster: String,
    /// None: a driver without it.
    pub health: Option<u32>,
}

/// NVML_GPU_FABRIC_STATE_*.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FabricState {
    #[default]
    NotSupported,
    NotStarted,
    InProgress,
    Completed,
    Unknown,
}

impl FabricState {
    /// State of NVML's number.
    pub fn of(number: u32) -> Self {
        match number {
            0 => Self::NotSupported,
            1 => Self::NotStarted,
            2 => Self::InProgress,
            3 => Self::Completed,
            _ => Self::Unknown,
        }
    }
}

impl fmt::Display for FabricState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NotSupported => "not supported",
            Self::NotStarted => "not started",
            Self::InProgress => "in progress",
            Self::Completed => "completed",
            Self::Unknown => "unknown",
        })
    }
}

/// Parts of the fabric's health mask: shift of each two bits, and the problem where they are 1
/// (NVML_GPU_FABRIC_HEALTH_MASK_*: 0 not supported, 1 true, 2 false).
const HEALTH: [(u32, &str); 4] = [
    (0, "bandwidth is degraded"),
    (2, "a route is being recovered"),
    (ROUTE, "a route is unhealthy"),
    (6, "an access timeout is being recovered"),
];
/// Shift of the part for unhealthy routes.
const ROUTE: u32 = 4;
/// Shift of the four bits of the configuration, and the problem for each number from 2 on; 1 is
/// none.
const CONFIGURATION: u32 = 8;
const MISCONFIGURED: [&str; 6] = [
    "the system's GUID is wrong",
    "the chassis' serial number is wrong",
    "the GPU is in no partition",
    "too few NVLinks are up",
    "the GPU's firmware does not fit",
    "the GPU's place is not valid",
];

impl Fabric {
    /// Whether the GPU is in a fabric that is not complete yet: CUDA fails on it.
    pub fn is_incomplete(&self) -> bool {
        matches!(self.state, FabricState::NotStarted | FabricState::InProgress)
    }

    /// A fabric that could not be asked for.
    pub fn unknown() -> Self {
        Self { state: FabricState::Unknown, ..Self::default() }
    }

    /// Problem of a fabric that is complete; None: its GPUs reach each other over NVLink, or the
    /// fabric is not complete yet.
    pub fn problem(&self) -> Option<String> {
        if self.state != FabricState::Completed {
            return None;
        }
        if self.status != 0 {
            return Some(format!("the fabric is complete with NVML's error {}", self.status));
        }
        let mask = self.health.unwrap_or_default();
        let mut parts: Vec<&str> = HEALTH.iter().filter(|(shift, _)| mask >> shift & 3 == 1).map(|(_, problem)| *problem).collect();
        parts.extend(self.misconfigured());
        (!parts.is_empty()).then(|| parts.join(", "))
    }

    /// The problem with what it costs, in a sentence for people.
    pub fn effect(&self) -> Option<String> {
        self.problem().map(|problem| match self.is_broken() {
            true => format!("NVLink is not usable between GPUs: {problem}; collectives go over PCIe"),
            false => format!("NVLink is slower for now: {problem}"),
        })
    }

    /// Whether the problem keeps GPUs from reaching each other over NVLink.
    pub fn is_broken(&self) -> bool {
        let mask = self.health.unwrap_or_default();
        self.state == FabricState::Completed && (self.status != 0 || mask >> ROUTE & 3 == 1 || self.misconfigured().is_some())
    }

    fn misconfigured(&self) -> Option<&'static str> {
        let number = (self.health.unwrap_or_default() >> CONFIGURATION & 0xf) as usize;
        let problem = number.checked_sub(2).map(|at| MISCONFIGURED.get(at).copied());
        problem.map(|known| known.unwrap_or("the configuration is wrong"))
    }
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
    /// A line that is no answer.
    Malformed(String),
    Refused(String),
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Missing => {
                write!(f, "{PROGRAM} is not in {}: put it there to know what only NVML knows", DIRECTORIES.join(", "))
            }
            Self::Start(path, error) => write!(f, "start {}: {error}", path.display()),
            Self::Ended(how) => write!(f, "{PROGRAM} has ended: {how}"),
            Self::Late(after) => write!(f, "{PROGRAM} has not answered within {after:?}: it is left alone"),
            Self::Malformed(error) => write!(f, "{PROGRAM}'s answer is not readable: {error}"),
            Self::Refused(error) => write!(f, "NVML: {error}"),
        }
    }
}

/// Program of the helper below `root` (`/` in a guest).
pub fn find(root: &Path) -> Option<PathBuf> {
    let paths = DIRECTORIES.iter().map(|directory| root.join(directory.trim_start_matches('/')).join(PROGRAM));
    paths.into_iter().find(|path| path.is_file())
}

/// Sends all of `requests` to one helper, one after another; any failure but a refusal ends the
/// row. Runs on a separate thread, so that a hanging helper delays nothing else.
pub async fn ask(program: PathBuf, requests: Vec<Request>) -> Vec<(Request, Result<Answer, Failure>)> {
    ask_within(ANSWER, program, requests).await
}

async fn ask_within(deadline: Duration, program: PathBuf, requests: Vec<Request>) -> Vec<(Request, Result<Answer, Failure>)> {
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
            let lost = is_lost(&answer);
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
        let lost = is_lost(&answer);
        asked.push((request, answer));
        if lost {
            break;
        }
    }
    asked
}

/// Whether no further answer can come: a refusal is an answer.
fn is_lost(answer: &Result<Answer, Failure>) -> bool {
    !matches!(answer, Ok(_) | Err(Failure::Refused(_)))
}

struct Helper {
    child: std::process::Child,
    socket: BufReader<UnixStream>,
}

impl Helper {
    fn start(program: &Path) -> io::Result<Self> {
        let (ours, theirs) = UnixStream::pair()?;
        let ends = (OwnedFd::from(theirs.try_clone()?), OwnedFd::from(theirs));
        let child = Command::new(program).stdin(Stdio::from(ends.0)).stdout(Stdio::from(ends.1)).stderr(Stdio::piped()).spawn()?;
        // Fails only for a helper that has ended already, which the first request shows.
        let _unused = std::fs::write(format!("/proc/{}/oom_score_adj", child.id()), OOM_SCORE);
        Ok(Self { child, socket: BufReader::new(ours) })
    }

    fn ask(&mut self, request: &Request) -> Result<Answer, Failure> {
        if let Err(error) = writeln!(self.socket.get_mut(), "{request}") {
            return Err(self.ended(&error.to_string()));
        }
        let mut line = String::new();
        match self.socket.by_ref().take(MAX_ANSWER).read_line(&mut line) {
            Ok(read) if read > 0 && line.ends_with('\n') => match serde_json::from_str(&line) {
                Ok(Answer::Error(error)) => Err(Failure::Refused(error)),
                Ok(answer) => Ok(answer),
                Err(error) => Err(Failure::Malformed(error.to_string())),
            },
            Ok(read) if read as u64 == MAX_ANSWER => Err(Failure::Malformed(format!("longer than {MAX_ANSWER} bytes"))),
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
        let how = self.child.wait().map_or_else(|e| e.to_string(), |status| status.to_string());
        let last: String = String::from_utf8_lossy(&last).chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
        let last = last.trim();
        Failure::Ended(if last.is_empty() { format!("{how} ({seen})") } else { format!("{how}: {last}") })
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
