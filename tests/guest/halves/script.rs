//! A guest half that acts on records of the init: `testagent.script=WHEN>DO[+DO..];WHEN>DO..`, each
//! step after the one before.
//!
//! WHEN is a record's name with `!begin` or `!end` for spans, and `/INDEX` for that of one GPU,
//! e.g. `gpu.init!begin/3`; DO one of:
//!
//! | action | what it does |
//! |---|---|
//! | `kill` | kills the init's worker (SIGKILL), and waits until it is gone |
//! | `stop`, `cont` | stops the worker and lets it go on; `stop:NAME`, `cont:NAME`: the init's processes of this name (as in `end`), and reports how many there were |
//! | `remove:K` | takes GPU K (by slot) off the bus through sysfs, which returns when the driver lets it |
//! | `unbind:K`, `bind:K` | takes GPU K from the driver, which returns when that lets it, or gives it back |
//! | `ask:K:ACTION` | asks the kernel for a uevent of GPU K of this action, with nothing behind it |
//! | `minors` | reports each bound GPU's minor: `ADDRESS=MINOR ..` |
//! | `rescan` | scans the bus again |
//! | `plug:K`, `unplug:K` | adds GPU K, or takes it away by surprise, on the hardware's side |
//! | `lose:K` | lets GPU K fall off the bus: from then on it reads all ones, and the kernel has not noticed |
//! | `load` | loads the module `nvidia` without options, as `insmod` would |
//! | `information` | reads every GPU's information file once |
//! | `open:MINOR` | makes that GPU's node if it is not there, opens it, waits for what comes of that, and keeps it open |
//! | `threads:N` | lets the kernel have at most N threads; 20, its least, is less than there are |
//! | `fill`, `empty` | fills /run to its last byte, and gives that back |
//! | `looks:N` | opens the CDI spec and its directory N times |
//! | `file:PATH` | reports the text of a file |
//! | `storm:N` | makes the kernel send N uevents |
//! | `skew:S` | sets the guest's wall clock S seconds ahead, or back |
//! | `sleep:MS` | lets a state last, or gives time to what nothing announces; for all else there is a wait with a deadline below |
//! | `counters` | reports the simulator's counters |
//! | `config` | reports the functions' config accesses |
//! | `driver` | reports every file that the driver has in /proc, one line each, and its devices |
//! | `nodes` | reports the names of the driver's nodes in /dev |
//! | `spec` | reports the text of every CDI spec, as it is at that moment |
//! | `spec-has:TEXT` | waits until a CDI spec has this text, for at most two and a half minutes; the script ends where it does not |
//! | `serves:NAME=COUNT` | waits until a service has this many processes, as long |
//! | `gone:K`, `there:K`, `bound:K`, `unbound:K` | waits until GPU K (by slot) is off or on the bus, or has the driver or none, as long |
//! | `reaped:NAME` | waits until no process of the init with this name (as in `end`) has ended and is not reaped, as long |
//! | `overrides` | reports every GPU's driver_override |
//! | `cpus` | reports on which CPUs each thread of the worker, of the process that opens, and of the driver's that open, may run |
//! | `held` | reports which GPU nodes the init's processes have open |
//! | `services` | reports the processes of NVIDIA's services: `NAME=PID ..` |
//! | `kill-service:NAME` | kills the processes of a service |
//! | `fabric:STATES` | gives the fabric of the simulated driver these states, as a manager elsewhere would: NVML's numbers, one for all or with commas |
//! | `nvml:REQUEST` | asks NVML's helper, with `_` for blanks, and reports its answer |
//! | `end:NAME` | kills the init's process of this name (keeper, lane, opener), or the agent, and reports how many there were |
//! | `census` | reports each process of the init with its open files, and the files that the init has made |
//! | `hook` | opens the init's program, as the start of a CDI hook does |
//! | `busy:N` | starts N threads that use a CPU each |
//! | `spec-gives:K,..` | waits until the spec gives containers these GPUs and no others, as long |
//! | `up:K,..` | waits until the simulated driver has these GPUs (by slot) initialised, as long |
//! | `xid:K:NUMBER` | has the simulated driver report this error of GPU K, which goes on |
//! | `print:TEXT` | prints TEXT into the kernel's log and onto the console, as a container can, with `_` for blanks |
//! | `forge:K` | starts a program without privileges whose name and file make an Xid 79 of GPU K when it dies, and waits until it has died |
//! | `run:PROGRAM` | starts a program of the guest without arguments; the agent, which reaps it, reports how it ended |
//!
//! WHEN may also be `now`, which is at once, and needs no record, or `rest`: the newest worker has
//! settled, and every GPU that was found is usable, failed or removed.

use super::census;
use super::forge;
use super::guest::{all_counters, connect};
use crate::agent::children::start_watched;
use crate::agent::{cdi, log};
use kata_gpu_init::gpu::device_nodes::DeviceNodes;
use kata_gpu_init::gpu::{adapter, driver_proc};
use kata_gpu_init::services::service_processes::mark_of;
use kata_gpu_wire::decode::decode;
use kata_gpu_wire::names;
use kata_gpu_wire::record::{Kind, Line, Record};
use nix::kmod::{ModuleInitFlags, finit_module};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::collections::{BTreeSet, HashMap};
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::time::{Duration, Instant};

pub fn run() {
    let Some(text) = super::parameter("testagent.script=") else {
        log::error(
            "script",
            &[("error", "no testagent.script=.. on the command line")],
        );
        return;
    };
    let mut stream = Stream::default();
    for step in text.split(';') {
        let Some((when, actions)) = step.split_once('>') else {
            log::error("script", &[("error", &format!("{step:?} is not WHEN>DO"))]);
            return;
        };
        if when != "now" {
            stream.wait(when);
        }
        for action in actions.split('+') {
            let error = act(action).err().unwrap_or_default();
            log::info(
                "script",
                &[("when", when), ("did", action), ("error", &error)],
            );
            // Stop: later steps rest on what was waited for. The test then misses their lines.
            if !error.is_empty() && WAITS.contains(&action.split(':').next().unwrap_or_default()) {
                return;
            }
        }
    }
}

/// The init's stream, across its workers' deaths.
#[derive(Default)]
struct Stream {
    lines: Option<std::io::Lines<BufReader<std::os::unix::net::UnixStream>>>,
    next_seq: u64,
    names: HashMap<String, u64>,
    rest: Rest,
}

/// Work that is still under way, by the stream.
#[derive(Default)]
struct Rest {
    settled: bool,
    /// Arrivals of GPUs, by address and generation: all, and those without an end.
    found: BTreeSet<(String, u64)>,
    pending: BTreeSet<(String, u64)>,
}

impl Rest {
    fn take(&mut self, record: &Record) {
        if record.kind != Kind::Event {
            return;
        }
        let number = |key: &str| record.fields.get(key).and_then(|n| n.as_u64()).unwrap_or(0);
        let arrival = record
            .gpu
            .map(|gpu| (gpu.to_string(), number("generation")));
        match (record.name.as_str(), arrival) {
            (names::SETTLED, _) => self.settled = true,
            (names::PROCESS_DIED, _)
                if record.fields.get("process").is_some_and(|p| p == "worker") =>
            {
                self.settled = false
            }
            (names::GPU_FOUND, Some(arrival)) => {
                self.pending
                    .extend(self.found.insert(arrival.clone()).then_some(arrival));
            }
            (names::GPU_USABLE | names::GPU_FAILED | names::GPU_REMOVED, Some(arrival)) => {
                self.pending.remove(&arrival);
            }
            _ => {}
        }
    }

    fn is_reached(&self) -> bool {
        self.settled && self.pending.is_empty()
    }
}

impl Stream {
    /// Reads on until this has happened.
    fn wait(&mut self, when: &str) {
        if when == "rest" {
            while !self.rest.is_reached() {
                self.next();
            }
            return;
        }
        loop {
            let Some(record) = self.next() else { continue };
            if let (Some(gpu), Some(index)) = (
                record.gpu,
                record.fields.get("index").and_then(|i| i.as_u64()),
            ) {
                self.names.insert(gpu.to_string(), index);
            }
            if self.matches(&record, when) {
                return;
            }
        }
    }

    fn next(&mut self) -> Option<Record> {
        if self.lines.is_none() {
            self.lines = Some(BufReader::new(connect()?).lines());
        }
        let Some(Ok(line)) = self.lines.as_mut().and_then(Iterator::next) else {
            self.lines = None;
            // The listener is gone with its worker; the next one makes a new one.
            std::thread::sleep(Duration::from_millis(20));
            return None;
        };
        let Ok(Line::Record(record)) = decode(line.as_bytes()) else {
            return None;
        };
        if record.seq < self.next_seq {
            return None;
        }
        self.next_seq = record.seq + 1;
        self.rest.take(&record);
        Some(*record)
    }

    fn matches(&self, record: &Record, when: &str) -> bool {
        let (when, index) = match when.split_once('/') {
            Some((when, index)) => (when, index.parse::<u64>().ok()),
            None => (when, None),
        };
        let (name, kind) = match when.split_once('!') {
            Some((name, "begin")) => (name, Kind::Begin),
            Some((name, _)) => (name, Kind::End),
            None => (when, Kind::Event),
        };
        let is = record
            .gpu
            .and_then(|gpu| self.names.get(&gpu.to_string()).copied());
        record.name == name && record.kind == kind && (index.is_none() || index == is)
    }
}

/// Actions that wait.
const WAITS: [&str; 10] = [
    "forge",
    "spec-gives",
    "up",
    "reaped",
    "spec-has",
    "serves",
    "gone",
    "there",
    "bound",
    "unbound",
];
/// Longest wait of an action for what its name says: ends a hang, on a busy machine, too.
const WAIT: Duration = Duration::from_secs(150);
/// Pause between two looks of such a wait: sysfs and the specs announce nothing to this process.
const LOOK: Duration = Duration::from_millis(20);

/// Waits until a condition holds; fails with its text after [`WAIT`].
fn until(text: &str, mut holds: impl FnMut() -> Result<bool, String>) -> Result<(), String> {
    let deadline = Instant::now() + WAIT;
    while !holds()? {
        if Instant::now() > deadline {
            return Err(format!("not {text:?} after {WAIT:?}"));
        }
        std::thread::sleep(LOOK);
    }
    Ok(())
}

/// Names and texts of the CDI specs that are published.
fn specs() -> Result<Vec<(String, String)>, String> {
    let mut all = Vec::new();
    for file in std::fs::read_dir(cdi::DIRECTORY)
        .map_err(|e| e.to_string())?
        .flatten()
    {
        let name = file.file_name().to_string_lossy().into_owned();
        if name.ends_with(".yaml") {
            all.push((
                name,
                std::fs::read_to_string(file.path()).map_err(|e| e.to_string())?,
            ));
        }
    }
    Ok(all)
}

pub(super) fn act(action: &str) -> Result<(), String> {
    let (what, argument) = action.split_once(':').unwrap_or((action, ""));
    let number = || {
        argument
            .parse::<u32>()
            .map_err(|e| format!("{action}: {e}"))
    };
    match what {
        "kill" => kill_worker(),
        "end" => census::end(argument),
        "census" => census::census(),
        "hook" => census::hook(),
        "busy" => {
            census::busy(number()?);
            Ok(())
        }
        "spec-gives" => until(action, || census::spec_gives(argument)),
        "reaped" => until(action, || census::is_reaped(argument)),
        "up" => until(action, || Ok(census::are_up(argument, &all_counters()))),
        "threads" => write(Path::new("/proc/sys/kernel/threads-max"), argument),
        "fill" => fill(),
        "empty" => std::fs::remove_file(FILLER).map_err(|e| format!("remove {FILLER}: {e}")),
        "stop" if argument.is_empty() => signal(Signal::SIGSTOP),
        "cont" if argument.is_empty() => signal(Signal::SIGCONT),
        "stop" => census::signal(argument, Signal::SIGSTOP),
        "cont" => census::signal(argument, Signal::SIGCONT),
        "remove" => {
            let path = format!("/sys/bus/pci/devices/{}/remove", gpu_in_slot(number()?));
            // The write returns once nobody has the GPU open.
            std::thread::spawn(move || {
                let result = write(Path::new(&path), "1");
                log::info(
                    "removed",
                    &[
                        ("path", &path),
                        ("error", &result.err().unwrap_or_default()),
                    ],
                );
            });
            Ok(())
        }
        "unbind" | "bind" => {
            let (path, gpu) = (
                format!("/sys/bus/pci/drivers/nvidia/{what}"),
                gpu_in_slot(number()?),
            );
            let what = what.to_string();
            std::thread::spawn(move || {
                let result = write(Path::new(&path), &gpu);
                log::info(
                    &what,
                    &[("gpu", &gpu), ("error", &result.err().unwrap_or_default())],
                );
            });
            Ok(())
        }
        "ask" => {
            let (gpu, action) = argument.split_once(':').ok_or("ask:K:ACTION")?;
            let gpu = gpu_in_slot(gpu.parse().map_err(|e| format!("{gpu}: {e}"))?);
            write(
                &Path::new("/sys/bus/pci/devices").join(gpu).join("uevent"),
                action,
            )
        }
        "minors" => {
            log::info("minors", &[("all", &minors()?.join(" "))]);
            Ok(())
        }
        "rescan" => write(Path::new("/sys/bus/pci/rescan"), "1"),
        "plug" => write(Path::new("/proc/fakepci"), &format!("add {}", number()?)),
        "unplug" => write(Path::new("/proc/fakepci"), &format!("remove {}", number()?)),
        "lose" => write(Path::new("/proc/fakepci"), &format!("lose {}", number()?)),
        "load" => load("nvidia"),
        "information" => {
            for gpu in std::fs::read_dir("/proc/driver/nvidia/gpus")
                .map_err(|e| e.to_string())?
                .flatten()
            {
                std::fs::read_to_string(gpu.path().join("information"))
                    .map_err(|e| e.to_string())?;
            }
            Ok(())
        }
        "open" => open(number()?),
        "looks" => {
            for _ in 0..number()? {
                // inotify merges an event with the one before it if they are the same: another one
                // goes in between.
                for path in [SPEC, cdi::DIRECTORY] {
                    std::fs::File::open(path).map_err(|e| format!("open {path}: {e}"))?;
                }
            }
            Ok(())
        }
        "file" => {
            log_file(Path::new(argument));
            Ok(())
        }
        "run" => {
            // PID 1 reaps every child, and logs how this one ended: waiting here would find none.
            let child = start_watched(&mut std::process::Command::new(argument));
            let child = child.map_err(|e| format!("run {argument}: {e}"))?;
            log::info(
                "started",
                &[("program", argument), ("child-pid", &child.to_string())],
            );
            Ok(())
        }
        "xid" => write(Path::new("/sys/module/nvidia/parameters/xid_now"), argument),
        "print" => forge::print(&argument.replace('_', " ")),
        "forge" => {
            let child = forge::start(&gpu_in_slot(number()?))?;
            let process = format!("/proc/{child}");
            until(action, || Ok(!Path::new(&process).exists()))
        }
        "fabric" => write(
            Path::new("/sys/module/nvidia/parameters/fabric_state"),
            argument,
        ),
        "nvml" => {
            let answer =
                ask_nvml(&argument.replace('_', " ")).map_err(|e| format!("{action}: {e}"))?;
            log::info("nvml", &[("request", argument), ("answer", answer.trim())]);
            Ok(())
        }
        "storm" => (0..number()?)
            .try_for_each(|_| write(Path::new("/sys/devices/virtual/mem/null/uevent"), "change")),
        "skew" => skew(argument.parse().map_err(|e| format!("{action}: {e}"))?),
        "sleep" => {
            std::thread::sleep(Duration::from_millis(u64::from(number()?)));
            Ok(())
        }
        "counters" => {
            log::info("counters", &[("all", &all_counters())]);
            Ok(())
        }
        "config" => {
            let text = std::fs::read_to_string("/proc/fakepci").map_err(|e| e.to_string())?;
            log::info(
                "config",
                &[("all", &text.lines().collect::<Vec<_>>().join("; "))],
            );
            Ok(())
        }
        "driver" => {
            driver_files(Path::new("/proc/driver/nvidia"));
            for file in ["/proc/devices", "/sys/module/nvidia/version"] {
                log_file(Path::new(file));
            }
            Ok(())
        }
        "nodes" => {
            let names = std::fs::read_dir("/dev")
                .map_err(|e| e.to_string())?
                .flatten()
                .map(|entry| entry.file_name());
            let mut names: Vec<String> = names
                .map(|n| n.to_string_lossy().into_owned())
                .filter(|n| n.starts_with("nvidia"))
                .collect();
            names.sort();
            log::info("nodes", &[("names", &names.join(" "))]);
            Ok(())
        }
        "spec" => {
            specs()?
                .iter()
                .for_each(|(file, text)| log::info("spec", &[("file", file), ("text", text)]));
            Ok(())
        }
        "spec-has" => until(action, || {
            Ok(specs()?.iter().any(|(_, text)| text.contains(argument)))
        }),
        "serves" => {
            let (service, count) = argument.split_once('=').ok_or("serves:NAME=COUNT")?;
            let count: usize = count.parse().map_err(|e| format!("{action}: {e}"))?;
            until(action, || {
                Ok(service_processes()?
                    .iter()
                    .filter(|(_, name)| name == service)
                    .count()
                    == count)
            })
        }
        "gone" | "there" | "bound" | "unbound" => {
            let device = Path::new("/sys/bus/pci/devices").join(gpu_in_slot(number()?));
            until(action, || {
                let (there, bound) = (device.exists(), device.join("driver").exists());
                Ok(match what {
                    "gone" => !there,
                    "there" => there,
                    "bound" => bound,
                    _ => there && !bound,
                })
            })
        }
        "overrides" => {
            let mut all = Vec::new();
            for function in std::fs::read_dir("/sys/bus/pci/devices")
                .map_err(|e| e.to_string())?
                .flatten()
            {
                let value = std::fs::read_to_string(function.path().join("driver_override"))
                    .map_err(|e| e.to_string())?;
                all.push(format!(
                    "{}={}",
                    function.file_name().to_string_lossy(),
                    value.trim()
                ));
            }
            all.sort();
            log::info("overrides", &[("all", &all.join("; "))]);
            Ok(())
        }
        "cpus" => {
            let mut processes = vec![
                process_named("gpuinit-worker")?,
                process_named("gpuinit-opener")?,
            ];
            processes.extend(processes_named("nv_open_q")?);
            let tasks = processes.iter().map(|pid| format!("/proc/{pid}/task"));
            for task in tasks.flat_map(std::fs::read_dir).flatten().flatten() {
                let status =
                    std::fs::read_to_string(task.path().join("status")).unwrap_or_default();
                let of = |key: &str| {
                    status
                        .lines()
                        .find_map(|l| l.strip_prefix(key))
                        .unwrap_or_default()
                        .trim()
                        .to_string()
                };
                log::info(
                    "cpus",
                    &[
                        ("thread", &of("Name:")),
                        ("allowed", &of("Cpus_allowed_list:")),
                    ],
                );
            }
            Ok(())
        }
        "services" => {
            let mut all: Vec<String> = service_processes()?
                .into_iter()
                .map(|(pid, name)| format!("{name}={pid}"))
                .collect();
            all.sort();
            log::info("services", &[("all", &all.join(" "))]);
            Ok(())
        }
        "kill-service" => {
            let of_service = service_processes()?
                .into_iter()
                .filter(|(_, name)| name == argument);
            of_service.map(|(pid, _)| pid).try_for_each(|pid| {
                kill(Pid::from_raw(pid), Signal::SIGKILL).map_err(|e| e.to_string())
            })
        }
        "held" => {
            for process in ["gpuinit-keeper", "gpuinit-worker"] {
                let mut nodes = Vec::new();
                for fd in std::fs::read_dir(format!("/proc/{}/fd", process_named(process)?))
                    .map_err(|e| e.to_string())?
                    .flatten()
                {
                    nodes.extend(
                        std::fs::read_link(fd.path())
                            .ok()
                            .map(|l| l.display().to_string())
                            .filter(|l| l.starts_with("/dev/nvidia")),
                    );
                }
                nodes.sort();
                log::info("held", &[("process", process), ("nodes", &nodes.join(" "))]);
            }
            Ok(())
        }
        other => Err(format!("{other:?} is no action")),
    }
}

pub(super) fn gpu_in_slot(slot: u32) -> String {
    format!("0001:00:{slot:02x}.0")
}

/// `ADDRESS=MINOR` of every bound GPU, by what the driver says.
pub(super) fn minors() -> Result<Vec<String>, String> {
    let mut all = Vec::new();
    for gpu in std::fs::read_dir("/proc/driver/nvidia/gpus")
        .map_err(|e| e.to_string())?
        .flatten()
    {
        let address = gpu.file_name().to_string_lossy().into_owned();
        let information = driver_proc::information(
            Path::new("/proc"),
            address.parse().map_err(|_| address.clone())?,
        );
        all.push(format!(
            "{address}={}",
            information.map_err(|e| e.to_string())?.minor
        ));
    }
    all.sort();
    Ok(all)
}

fn skew(seconds: i64) -> Result<(), String> {
    use nix::sys::time::TimeSpec;
    use nix::time::{ClockId, clock_gettime, clock_settime};
    let now = clock_gettime(ClockId::CLOCK_REALTIME).map_err(|e| e.to_string())?;
    clock_settime(ClockId::CLOCK_REALTIME, now + TimeSpec::new(seconds, 0))
        .map_err(|e| format!("set the clock by {seconds} s: {e}"))
}

fn write(path: &Path, value: &str) -> Result<(), String> {
    std::fs::write(path, value).map_err(|e| format!("write {value} to {}: {e}", path.display()))
}

/// Reports every file below a folder of /proc.
fn driver_files(folder: &Path) {
    let mut entries: Vec<_> = std::fs::read_dir(folder)
        .into_iter()
        .flatten()
        .flatten()
        .map(|e| e.path())
        .collect();
    entries.sort();
    for entry in entries {
        if entry.is_dir() {
            driver_files(&entry)
        } else {
            log_file(&entry)
        }
    }
}

fn log_file(path: &Path) {
    let text = std::fs::read(path).map_or_else(
        |e| format!("error: {e}"),
        |bytes| String::from_utf8_lossy(&bytes).into_owned(),
    );
    log::info(
        "file",
        &[("path", &path.display().to_string()), ("text", &text)],
    );
}

pub(super) fn processes_named(name: &str) -> Result<Vec<i32>, String> {
    let named = |entry: std::fs::DirEntry| {
        let pid = entry.file_name().to_str()?.parse().ok()?;
        std::fs::read_to_string(entry.path().join("comm"))
            .is_ok_and(|comm| comm.trim() == name)
            .then_some(pid)
    };
    Ok(std::fs::read_dir("/proc")
        .map_err(|e| e.to_string())?
        .flatten()
        .filter_map(named)
        .collect())
}

/// Processes of NVIDIA's services.
fn service_processes() -> Result<Vec<(i32, String)>, String> {
    let of = |entry: std::fs::DirEntry| {
        let pid = entry.file_name().to_str()?.parse().ok()?;
        Some((pid, mark_of(Path::new("/proc"), pid)?))
    };
    Ok(std::fs::read_dir("/proc")
        .map_err(|e| e.to_string())?
        .flatten()
        .filter_map(of)
        .collect())
}

/// The process of this name.
pub(crate) fn process_named(name: &str) -> Result<i32, String> {
    processes_named(name)?
        .first()
        .copied()
        .ok_or_else(|| format!("there is no process {name}"))
}

/// Sends a signal to the init's worker.
fn signal(signal: Signal) -> Result<(), String> {
    let worker = process_named("gpuinit-worker")?;
    kill(Pid::from_raw(worker), signal).map_err(|e| format!("signal {worker}: {e}"))
}

/// Kills the worker, or the one that is about to be started, and waits until it is gone: the next
/// kill is for another one.
fn kill_worker() -> Result<(), String> {
    let (start, pause) = (Instant::now(), Duration::from_millis(5));
    let worker = loop {
        match process_named("gpuinit-worker") {
            Err(error) if start.elapsed() > WAIT => return Err(error),
            Err(_) => std::thread::sleep(pause),
            Ok(worker) => break worker,
        }
    };
    kill(Pid::from_raw(worker), Signal::SIGKILL).map_err(|e| format!("kill {worker}: {e}"))?;
    while Path::new(&format!("/proc/{worker}")).exists() {
        if start.elapsed() > WAIT {
            return Err(format!("{worker} does not end"));
        }
        std::thread::sleep(pause);
    }
    Ok(())
}

/// File that fills /run.
const FILLER: &str = "/run/filler";

/// Makes /run small, then fills it to its last byte.
fn fill() -> Result<(), String> {
    use nix::mount::{MsFlags, mount};
    use std::io::Write;
    let none = None::<&str>;
    let flags = MsFlags::MS_REMOUNT | MsFlags::MS_NOSUID | MsFlags::MS_NODEV;
    mount(none, "/run", none, flags, Some("size=16m"))
        .map_err(|e| format!("make /run small: {e}"))?;
    let mut file = std::fs::OpenOptions::new()
        .create(true)
        .append(true)
        .open(FILLER)
        .map_err(|e| format!("open {FILLER}: {e}"))?;
    for size in [1 << 20, 4096, 1] {
        let part = vec![b'x'; size];
        while file.write_all(&part).is_ok() {}
    }
    Ok(())
}

/// One request to NVML's helper, and its answer. PID 1 reaps the helper.
fn ask_nvml(request: &str) -> Result<String, String> {
    use std::io::{Read, Write};
    use std::process::{Command, Stdio};
    let program = kata_gpu_init::nvml::find(Path::new("/")).ok_or("no helper in the image")?;
    let mut helper = Command::new(program)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .map_err(|e| e.to_string())?;
    let mut answer = String::new();
    // The helper ends with its input.
    helper
        .stdin
        .take()
        .map_or(Ok(()), |mut input| writeln!(input, "{request}"))
        .map_err(|e| e.to_string())?;
    helper
        .stdout
        .take()
        .map_or(Ok(0), |mut output| output.read_to_string(&mut answer))
        .map_err(|e| e.to_string())?;
    Ok(answer)
}

/// Loads a module of the running kernel, with no options.
fn load(name: &str) -> Result<(), String> {
    let release =
        std::fs::read_to_string("/proc/sys/kernel/osrelease").map_err(|e| e.to_string())?;
    let path = format!("/lib/modules/{}/{name}.ko", release.trim());
    let file = std::fs::File::open(&path).map_err(|e| format!("open {path}: {e}"))?;
    finit_module(&file, c"", ModuleInitFlags::empty()).map_err(|e| format!("load {path}: {e}"))
}

/// Spec that the init publishes.
pub(super) const SPEC: &str = "/var/run/cdi/nvidia.yaml";

/// The driver's major number, which is NVIDIA's by registration.
const NVIDIA_MAJOR: u32 = 195;

/// Opens the GPU of this minor as the init does, and reports what the driver says of it.
fn open(minor: u32) -> Result<(), String> {
    let rules = driver_proc::node_rules(Path::new("/proc"));
    let node = DeviceNodes::at(Path::new("/dev"), rules)
        .gpu(NVIDIA_MAJOR, minor)
        .map_err(|e| e.to_string())?;
    let descriptor = adapter::start(&node).map_err(|e| e.to_string())?;
    let said = adapter::wait(&descriptor, &node)
        .err()
        .map_or_else(String::new, |e| e.to_string());
    log::info(
        "opened",
        &[("path", &node.path.display().to_string()), ("said", &said)],
    );
    // Open for as long as the process lives.
    std::mem::forget(descriptor);
    Ok(())
}
