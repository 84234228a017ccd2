//! Actions of a script for the soak: each looks at all of the init at once, or acts on one of its
//! processes.

use super::script::{SPEC, processes_named};
use crate::agent::log;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::collections::BTreeSet;
use std::path::Path;

/// Beginning of the names of the init's processes.
const OURS: &str = "gpuinit-";
/// The agent's process, where it is not PID 1.
const AGENT: &str = "kata-agent";
/// Folders in which the init has files.
const FOLDERS: [&str; 2] = ["/run/kata-gpu-init", "/var/run/cdi"];

/// Kills each process of the init with this name, or the agent, and reports how many there were:
/// none where that process has done its work.
pub(super) fn end(name: &str) -> Result<(), String> {
    let full = if name == "agent" {
        AGENT.to_string()
    } else {
        format!("{OURS}{name}")
    };
    let all = processes_named(&full)?;
    log::info(
        "end",
        &[("process", name), ("killed", &all.len().to_string())],
    );
    for pid in all.into_iter().filter(|pid| *pid != 1) {
        // A process that ended meanwhile is as good as killed.
        let _unused = kill(Pid::from_raw(pid), Signal::SIGKILL);
    }
    Ok(())
}

/// Sends SIGSTOP or SIGCONT to each process of the init with this name, and reports to how many.
pub(super) fn signal(name: &str, signal: Signal) -> Result<(), String> {
    let all = processes_named(&format!("{OURS}{name}"))?;
    let count = all.len().to_string();
    for pid in all {
        // A process that ended meanwhile needs no signal.
        let _unused = kill(Pid::from_raw(pid), signal);
    }
    log::info(signal.as_str(), &[("process", name), ("count", &count)]);
    Ok(())
}

/// Opens the init's program, as the start of a CDI hook does.
pub(super) fn hook() -> Result<(), String> {
    std::fs::File::open("/init")
        .map(drop)
        .map_err(|e| format!("open /init: {e}"))
}

/// Starts threads that use a CPU each, for as long as the guest lives.
pub(super) fn busy(count: u32) {
    for _ in 0..count {
        std::thread::spawn(|| {
            loop {
                std::hint::black_box(0);
            }
        });
    }
}

/// A process of the init; also one that has ended and is not reaped.
pub(super) struct Process {
    /// Without [`OURS`].
    pub name: String,
    /// Letter of /proc.
    pub state: char,
    /// Targets of its descriptors.
    pub files: Vec<String>,
    pub threads: u64,
    /// Resident memory.
    pub kib: u64,
}

/// All processes of the init.
pub(super) fn processes() -> Vec<Process> {
    std::fs::read_dir("/proc")
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| process(&entry.path()))
        .collect()
}

/// The process of this folder, if the init has made it.
fn process(folder: &Path) -> Option<Process> {
    let comm = std::fs::read_to_string(folder.join("comm")).ok()?;
    let name = comm.trim().strip_prefix(OURS)?.to_string();
    let status = std::fs::read_to_string(folder.join("status")).unwrap_or_default();
    let of = |key: &str| {
        status
            .lines()
            .find_map(|line| line.strip_prefix(key))
            .unwrap_or_default()
            .trim()
    };
    // A zombie has no memory.
    let number = |key: &str| {
        let word = of(key).split(' ').next().unwrap_or_default();
        word.parse().unwrap_or_default()
    };
    let files = std::fs::read_dir(folder.join("fd"))
        .into_iter()
        .flatten()
        .flatten();
    Some(Process {
        name,
        state: of("State:").chars().next().unwrap_or('?'),
        files: files
            .filter_map(|fd| std::fs::read_link(fd.path()).ok())
            .map(|target| target.display().to_string())
            .collect(),
        threads: number("Threads:"),
        kib: number("VmRSS:"),
    })
}

/// Reports each process of the init (state, open files, GPU nodes among them), and the files that
/// the init has made.
pub(super) fn census() -> Result<(), String> {
    for Process {
        name, state, files, ..
    } in processes()
    {
        let mut nodes: Vec<&str> = files
            .iter()
            .map(String::as_str)
            .filter(|file| file.starts_with("/dev/nvidia"))
            .collect();
        nodes.sort_unstable();
        log::info(
            "process",
            &[
                ("process", &name),
                ("state", &state.to_string()),
                ("files", &files.len().to_string()),
                ("nodes", &nodes.join(" ")),
            ],
        );
    }
    let names = FOLDERS
        .iter()
        .flat_map(|folder| std::fs::read_dir(folder).into_iter().flatten().flatten());
    let mut names: Vec<String> = names
        .map(|file| file.path().display().to_string())
        .collect();
    names.sort();
    log::info("files", &[("names", &names.join(" "))]);
    Ok(())
}

/// Whether the spec gives containers these GPUs now, by index, and no others.
pub(super) fn spec_gives(wanted: &str) -> Result<bool, String> {
    let wanted: BTreeSet<&str> = wanted
        .split(',')
        .filter(|index| !index.is_empty())
        .collect();
    let Ok(text) = std::fs::read_to_string(SPEC) else {
        return Ok(wanted.is_empty());
    };
    let spec: serde_json::Value =
        serde_json::from_str(&text).map_err(|e| format!("{SPEC}: {e}"))?;
    let is_given = |device: &serde_json::Value| {
        let nodes = device["containerEdits"]["deviceNodes"].as_array();
        nodes
            .into_iter()
            .flatten()
            .filter_map(|node| node["path"].as_str())
            .any(|path| Path::new(path).exists())
    };
    let devices = spec["devices"].as_array().into_iter().flatten();
    let given = devices
        .filter(|device| is_given(device))
        .filter_map(|device| device["name"].as_str());
    Ok(given
        .filter(|name| name.bytes().all(|b| b.is_ascii_digit()))
        .collect::<BTreeSet<_>>()
        == wanted)
}

/// Whether the counters of the simulated driver have these GPUs, by slot, as initialised.
pub(super) fn are_up(wanted: &str, counters: &str) -> bool {
    let is_up = |slot: &str| {
        let address = format!(":{:02x}.0 ", slot.parse::<u8>().unwrap_or(u8::MAX));
        counters
            .split("; ")
            .any(|gpu| gpu.contains(&address) && gpu.contains("adapter: up"))
    };
    wanted.split(',').filter(|slot| !slot.is_empty()).all(is_up)
}

/// Whether no process of the init with this name is a zombie.
pub(super) fn is_reaped(name: &str) -> Result<bool, String> {
    let all = processes_named(&format!("{OURS}{name}"))?;
    // One that is gone by now is reaped.
    let status =
        |pid: i32| std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    Ok(!all.into_iter().any(|pid| status(pid).contains("State:\tZ")))
}
