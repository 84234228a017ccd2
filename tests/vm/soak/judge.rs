//! Promises that hold after any boot, whatever befell it. Reads what came out of the guest (stream,
//! console, reports of the script) and uses none of the init's own conclusions; published specs are
//! judged by the crate that kata-agent resolves devices with.

use super::description::{Answer, Container, Description, Fate, Image};
use super::points::Process;
use crate::vm::harness::{AgentLine, complete};
use kata_gpu_test_guest::agent::cdi;
use kata_gpu_wire::catalogue::RECORDS;
use kata_gpu_wire::names;
use kata_gpu_wire::record::{Kind, Record};
use oci_spec::runtime::Spec;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// Most open files of a process of the init. A worker with 16 GPUs, all sinks and a reader has 60.
const MOST_FILES: usize = 96;

/// Everything that came out of a guest.
#[derive(Clone, Default)]
pub struct Observed {
    /// In order of seq.
    pub records: Vec<Record>,
    /// Lines of the stream that are none of the format, and contradictions in it.
    pub garbage: Vec<String>,
    pub console: String,
    /// Lines of the agent on the console.
    pub lines: Vec<AgentLine>,
    /// Status of the VMM, where the guest has ended.
    pub ended: Option<String>,
}

/// A property that does not hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// One word: failures are counted by it.
    pub kind: &'static str,
    pub text: String,
}

/// Outcome of a kill.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kill {
    Done,
    /// There was no such process at that record.
    NoProcess,
    NotReached,
}

type Rule = fn(&Description, &Observed) -> Vec<String>;

/// Rules of every boot.
const ALWAYS: [(&str, Rule); 6] = [
    ("guest", guest),
    ("hand-over", hand_over),
    ("stream", stream),
    ("unknown-event", unknown),
    ("bug", bugs),
    ("kill", kill),
];
/// Rules of a guest that is alive in the end.
const ALIVE: [(&str, Rule); 8] = [
    ("script", script),
    ("fate", fates),
    ("reason", reasons),
    ("death", deaths),
    ("leak", leaks),
    ("closed", closed),
    ("cdi", published),
    ("container", containers),
];

/// Everything that is wrong with a boot.
pub fn judge(boot: &Description, seen: &Observed) -> Vec<Finding> {
    let alive: &[(&str, Rule)] = if boot.ends() { &[] } else { &ALIVE };
    let rules = ALWAYS.iter().chain(alive);
    rules
        .flat_map(|(kind, rule)| {
            rule(boot, seen)
                .into_iter()
                .map(move |text| Finding { kind, text })
        })
        .collect()
}

impl Observed {
    fn events<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a Record> {
        self.records
            .iter()
            .filter(move |r| r.kind == Kind::Event && r.name == name)
    }

    /// Lines of a script's report.
    fn notes<'a>(&'a self, message: &'a str) -> impl Iterator<Item = &'a AgentLine> {
        self.lines
            .iter()
            .filter(move |line| line.get("msg") == message)
    }

    /// Minor of a GPU, by its newest bind.
    fn minor(&self, index: u64) -> Option<u64> {
        self.events(names::GPU_BOUND)
            .filter(|r| number(r, "index") == Some(index))
            .last()
            .and_then(|r| number(r, "minor"))
    }
}

/// Last word about each GPU, by index, and its reason.
fn last_words<'a>(
    records: impl IntoIterator<Item = &'a Record>,
) -> BTreeMap<u64, (&'a str, &'a str)> {
    let is_last = |r: &&Record| {
        [names::GPU_USABLE, names::GPU_FAILED, names::GPU_REMOVED].contains(&r.name.as_str())
    };
    let events = records
        .into_iter()
        .filter(|r| r.kind == Kind::Event)
        .filter(is_last);
    events
        .filter_map(|r| Some((number(r, "index")?, (r.name.as_str(), text(r, "reason")))))
        .collect()
}

/// Last word that a GPU must have; none where it has none.
fn planned(fate: Fate) -> Option<&'static str> {
    match fate {
        Fate::Usable | Fate::Again => Some(names::GPU_USABLE),
        Fate::Fails(_) => Some(names::GPU_FAILED),
        Fate::Removed => Some(names::GPU_REMOVED),
        Fate::Hangs => None,
    }
}

/// Whether the records have the planned end of every GPU and every planned death: a host that hung
/// up gets them late.
pub fn is_complete(boot: &Description, records: &[&Record]) -> bool {
    let last = last_words(records.iter().copied());
    let deaths = |process: Process| {
        let died =
            |r: &&&Record| r.name == names::PROCESS_DIED && text(r, "process") == process.name();
        records.iter().filter(died).count()
    };
    (0..)
        .zip(&boot.gpus)
        .all(|(index, fate)| last.get(&index).map(|(name, _)| *name) == planned(*fate))
        && [Process::Worker, Process::Keeper]
            .iter()
            .all(|process| deaths(*process) >= boot.deaths(*process))
}

fn number(record: &Record, key: &str) -> Option<u64> {
    record.fields.get(key)?.as_u64()
}

fn text<'a>(record: &'a Record, key: &str) -> &'a str {
    record
        .fields
        .get(key)
        .and_then(|value| value.as_str())
        .unwrap_or_default()
}

/// Whether the planned kill has happened.
pub fn kill_of(boot: &Description, seen: &Observed) -> Option<Kill> {
    let (process, when) = boot.kill.as_ref()?;
    let by_name = seen
        .notes("end")
        .find(|line| line.get("process") == process.name());
    let done = seen
        .notes("script")
        .any(|line| line.get("did") == process.kill() && line.get("when") == when);
    Some(match (process, by_name) {
        (Process::Worker, _) if done => Kill::Done,
        (Process::Worker, _) | (_, None) => Kill::NotReached,
        (_, Some(line)) if line.get("killed") == "0" => Kill::NoProcess,
        (_, Some(_)) => Kill::Done,
    })
}

fn kill(boot: &Description, seen: &Observed) -> Vec<String> {
    let missed = kill_of(boot, seen) == Some(Kill::NotReached);
    missed
        .then(|| format!("the record of the kill never came: {:?}", boot.kill))
        .into_iter()
        .collect()
}

/// The kernel has not panicked; the guest runs, or has ended as it must.
fn guest(boot: &Description, seen: &Observed) -> Vec<String> {
    let mut found = Vec::new();
    for words in [
        "Kernel panic",
        "Attempted to kill init",
        "Oops:",
        "BUG: unable to handle",
    ] {
        found.extend(
            seen.console
                .contains(words)
                .then(|| format!("the console says {words:?}")),
        );
    }
    match (&seen.ended, boot.ends()) {
        (Some(status), false) => found.push(format!("the guest has ended ({status})")),
        (None, true) => found.push("the guest runs on without its agent".into()),
        (Some(_), true)
            if !seen
                .console
                .contains("kata-agent has ended (killed by SIGKILL): powering off") =>
        {
            found.push("the console does not have the reason of the power-off".into());
        }
        _ => {}
    }
    found
}

/// The agent was started, and PID 1 became it unless it is a child.
fn hand_over(boot: &Description, seen: &Observed) -> Vec<String> {
    let mut found = Vec::new();
    let child = boot.ends()
        || boot
            .words
            .iter()
            .any(|word| word.contains("gpuinit.agent=child"));
    match seen.lines.first() {
        None => found.push("the agent never started".into()),
        Some(line) if (line.get("pid") == "1") == child => {
            found.push(format!("the agent is process {}", line.get("pid")))
        }
        Some(_) => {}
    }
    let failed = seen
        .records
        .iter()
        .find(|r| r.name == names::AGENT_EXEC && r.error.is_some());
    found.extend(failed.map(|r| format!("agent.exec: {:?}", r.error)));
    found
}

/// The stream has every record once, and every span at most one begin and one end.
fn stream(boot: &Description, seen: &Observed) -> Vec<String> {
    let mut found = seen.garbage.clone();
    // Lost records are reported by the stream itself.
    let lost = seen
        .events(names::STREAM_LOST)
        .any(|r| text(r, "at") != "uevents" && text(r, "at") != "kmsg");
    if let (Err(error), false) = (complete(&seen.records), lost) {
        found.push(error.to_string());
    }
    let mut edges = BTreeSet::new();
    for record in seen
        .records
        .iter()
        .filter(|r| [Kind::Begin, Kind::End].contains(&r.kind))
    {
        if !edges.insert((record.span, record.kind == Kind::Begin)) {
            found.push(format!(
                "span {:?} of {} has a second {:?}",
                record.span, record.name, record.kind
            ));
        }
    }
    // A guest that ends with its agent may be gone before its first connection.
    if seen.records.is_empty() && !boot.ends() {
        found.push("no record came".into());
    }
    found
}

fn unknown(_: &Description, seen: &Observed) -> Vec<String> {
    let is_known =
        |r: &&Record| r.kind == Kind::Kmsg || RECORDS.iter().any(|row| row.name == r.name);
    let unknown: BTreeSet<&str> = seen
        .records
        .iter()
        .filter(|r| !is_known(r))
        .map(|r| r.name.as_str())
        .collect();
    unknown
        .into_iter()
        .map(|name| format!("{name} is not in the catalogue"))
        .collect()
}

/// The init reports its own panics by these words.
fn bugs(_: &Description, seen: &Observed) -> Vec<String> {
    seen.console
        .lines()
        .filter(|line| line.contains("kata-gpu-init: a bug"))
        .map(str::to_string)
        .collect()
}

/// Every action of the script was possible, and the last one came.
fn script(_: &Description, seen: &Observed) -> Vec<String> {
    let failed = seen
        .notes("script")
        .filter(|line| !line.get("error").is_empty());
    let mut found: Vec<String> = failed
        .map(|line| format!("{}: {}", line.get("did"), line.get("error")))
        .collect();
    found.extend((seen.notes("counters").count() == 0).then(|| "the script has not ended".into()));
    found
}

/// Each GPU has exactly one end, and it is the planned one.
fn fates(boot: &Description, seen: &Observed) -> Vec<String> {
    let mut found = Vec::new();
    let last = last_words(&seen.records);
    for (index, fate) in (0..).zip(&boot.gpus) {
        let wanted = planned(*fate);
        let is = last.get(&index).map(|(name, _)| *name);
        if is != wanted {
            found.push(format!("GPU {index} ended as {is:?}, planned: {fate:?}"));
        }
        let of = |name| {
            let events = seen
                .events(name)
                .filter(move |r| number(r, "index") == Some(index));
            events
                .map(|r| number(r, "generation").unwrap_or(0))
                .collect::<BTreeSet<u64>>()
        };
        for generation in of(names::GPU_USABLE).intersection(&of(names::GPU_FAILED)) {
            found.push(format!(
                "GPU {index} is usable and failed as well, generation {generation}"
            ));
        }
    }
    let stray: Vec<&u64> = last
        .keys()
        .filter(|index| **index >= boot.gpus.len() as u64)
        .collect();
    found.extend((!stray.is_empty()).then(|| format!("there are no GPUs {stray:?}")));
    if !boot.hangs() && !boot.gpus.contains(&Fate::Removed) {
        let usable = boot.gpus.iter().filter(|fate| fate.is_usable()).count() as u64;
        let wanted = (Some(usable), Some(boot.gpus.len() as u64 - usable));
        let settled = seen
            .events(names::SETTLED)
            .last()
            .map(|r| (number(r, "usable"), number(r, "failed")));
        if settled != Some(wanted) {
            found.push(format!(
                "settled with (usable, failed) {settled:?}, planned {wanted:?}"
            ));
        }
    }
    found
}

/// Each failure has its reason, a sentence with the GPU's address, and a cure.
fn reasons(boot: &Description, seen: &Observed) -> Vec<String> {
    let mut found = Vec::new();
    let last = last_words(&seen.records);
    for (index, fate) in (0..).zip(&boot.gpus) {
        if let (Fate::Fails(reason), Some((names::GPU_FAILED, is))) = (fate, last.get(&index))
            && !reason.is_empty()
            && reason != is
            // A load whose GPUs all fail fails itself, with its own reason.
            && !(*reason == "probe-failed" && *is == "no-probe-succeeded")
        {
            found.push(format!("GPU {index} failed for {is}, planned: {reason}"));
        }
    }
    for failed in seen.events(names::GPU_FAILED) {
        let (error, gpu) = (
            failed.error.as_deref().unwrap_or_default(),
            failed.gpu.map(|gpu| gpu.to_string()).unwrap_or_default(),
        );
        if gpu.is_empty() || !error.contains(&gpu) || text(failed, "cure").is_empty() {
            found.push(format!(
                "a failure without GPU, sentence or cure: {failed:?}"
            ));
        }
    }
    found
}

/// The planned deaths are reported, and no other process has died.
fn deaths(boot: &Description, seen: &Observed) -> Vec<String> {
    let mut found = Vec::new();
    for process in [Process::Worker, Process::Keeper] {
        let of = |r: &&Record| text(r, "process") == process.name();
        let (is, wanted) = (
            seen.events(names::PROCESS_DIED).filter(of).count(),
            boot.deaths(process),
        );
        if is != wanted {
            found.push(format!(
                "{is} deaths of the {} are reported, planned: {wanted}",
                process.name()
            ));
        }
    }
    let odd =
        |r: &&Record| text(r, "process") == "worker" && text(r, "status") != "killed by SIGKILL";
    found.extend(
        seen.events(names::PROCESS_DIED)
            .filter(odd)
            .map(|r| format!("a worker has ended by itself: {:?}", r.error)),
    );
    found
}

/// Each process of the init is there as often as it must be, with few files and each GPU once; no
/// file is left half written.
fn leaks(boot: &Description, seen: &Observed) -> Vec<String> {
    let mut found = Vec::new();
    let killed = |process| matches!(&boot.kill, Some((killed, _)) if *killed == process);
    let usual = |process| usize::from(!killed(process));
    let hanging = usize::from(boot.hangs());
    for (name, least, most) in [
        ("worker", 1, 1),
        ("keeper", usual(Process::Keeper), usual(Process::Keeper)),
        (
            "opener",
            usual(Process::Opener),
            usual(Process::Opener) + hanging,
        ),
        ("lane", 0, 1),
    ] {
        let alive = |line: &&AgentLine| line.get("process") == name && line.get("state") != "Z";
        let count = seen.notes("process").filter(alive).count();
        if !(least..=most).contains(&count) {
            found.push(format!("{count} processes {name}, not {least} to {most}"));
        }
    }
    for line in seen.notes("process") {
        let (name, files) = (
            line.get("process"),
            line.get("files").parse::<usize>().unwrap_or(usize::MAX),
        );
        if line.get("state") == "Z" || files > MOST_FILES {
            found.push(format!(
                "process {name} in state {} has {files} files",
                line.get("state")
            ));
        }
        let nodes: Vec<&str> = line.get("nodes").split_ascii_whitespace().collect();
        if nodes.iter().collect::<BTreeSet<_>>().len() < nodes.len() {
            found.push(format!("process {name} has a GPU open twice: {nodes:?}"));
        }
        let is_usable =
            |(index, fate): &(u64, &Fate)| fate.is_usable() && seen.minor(*index).is_some();
        let is_keeper = name == "keeper" && line.get("state") != "Z";
        for (index, _) in (0..)
            .zip(&boot.gpus)
            .filter(is_usable)
            .filter(|_| is_keeper)
        {
            let node = format!("/dev/nvidia{}", seen.minor(index).unwrap_or_default());
            found.extend(
                (!nodes.contains(&node.as_str()))
                    .then(|| format!("the keeper does not have GPU {index} open: {nodes:?}")),
            );
        }
    }
    let temporary = seen
        .notes("files")
        .flat_map(|line| line.get("names").split(' '))
        .filter(|name| name.ends_with(".tmp"));
    found.extend(temporary.map(|name| format!("{name} is left")));
    found
}

/// Opens that were killed: an opener's children are killed with it, and for a moment one of them
/// has the only descriptor of its GPU. The worker opens such a GPU again.
fn killed_opens(seen: &Observed) -> usize {
    let of_opener = seen
        .notes("end")
        .filter(|line| line.get("process") == Process::Opener.name());
    of_opener
        .filter_map(|line| line.get("killed").parse::<usize>().ok())
        .map(|killed| killed.saturating_sub(1))
        .sum()
}

/// No GPU was closed, or initialised twice, by anybody: the driver's own counters.
fn closed(boot: &Description, seen: &Observed) -> Vec<String> {
    let mut found = Vec::new();
    let mut killed = killed_opens(seen);
    let counters = seen
        .notes("counters")
        .last()
        .map(|line| line.get("all"))
        .unwrap_or_default();
    for gpu in counters.split("; ").filter(|gpu| !gpu.is_empty()) {
        let words: Vec<&str> = gpu.split(' ').collect();
        let of = |key: &str| {
            words
                .windows(2)
                .find(|pair| pair[0] == key)
                .map_or("", |pair| pair[1])
        };
        let slot = words[0]
            .get(8..10)
            .and_then(|slot| usize::from_str_radix(slot, 16).ok());
        let Some(fate) = slot.and_then(|slot| boot.gpus.get(slot)) else {
            found.push(format!("no such GPU: {gpu}"));
            continue;
        };
        let again = [
            ("closes:", "1"),
            ("teardowns:", "1"),
            ("inits:", "2"),
            ("adapter:", "up"),
        ];
        if killed > 0 && again.iter().all(|(key, value)| of(key) == *value) {
            killed -= 1;
            continue;
        }
        let (undisturbed, up) = (
            !matches!(fate, Fate::Again | Fate::Removed),
            fate.is_usable(),
        );
        // NVML's helper opens and closes GPUs, too, beside what the keeper has open.
        let has_helper = matches!(boot.image, Image::Nvml(_));
        let is_open = has_helper && of("use_count:") != "0" || of("closes:") == "0";
        if undisturbed && (!is_open || of("teardowns:") != "0") {
            found.push(format!("{fate:?} and closed: {gpu}"));
        }
        if up && (of("adapter:") != "up" || undisturbed && of("inits:") != "1") {
            found.push(format!("{fate:?} and not initialised once: {gpu}"));
        }
    }
    found
}

/// The same spec with a node of this machine behind every node below /dev: the crate looks at them.
/// A pending GPU's node lies elsewhere, and stays missing.
fn with_nodes_of_this_machine(spec: &str) -> Result<String, serde_json::Error> {
    let mut spec: serde_json::Value = serde_json::from_str(spec)?;
    let in_devices = spec["devices"]
        .as_array_mut()
        .into_iter()
        .flatten()
        .map(|device| &mut device["containerEdits"]);
    for edits in in_devices {
        for node in edits["deviceNodes"].as_array_mut().into_iter().flatten() {
            if node["path"]
                .as_str()
                .is_some_and(|path| path.starts_with("/dev/"))
            {
                node["hostPath"] = "/dev/null".into();
            }
        }
    }
    for node in spec["containerEdits"]["deviceNodes"]
        .as_array_mut()
        .into_iter()
        .flatten()
    {
        node["hostPath"] = "/dev/null".into();
    }
    Ok(spec.to_string())
}

/// Device nodes that the agent's crate makes of the published spec for one name.
fn resolved(directory: &Path, name: &str) -> Result<BTreeSet<String>, String> {
    let (mut spec, asked) = (Spec::default(), [format!("nvidia.com/gpu={name}")]);
    let directory = directory.to_str().ok_or("the folder's name is not UTF-8")?;
    cdi::inject(
        kata_gpu_test_agent::specs,
        &mut spec,
        directory,
        &asked,
        0,
        true,
        &|_| {},
        &mut |_, _| {},
    )
    .map_err(|(_, error)| error)?;
    // The agent refuses a container by the verdict that a failed GPU's entry has in place of nodes.
    let mounts = spec.mounts().iter().flatten();
    let verdict = mounts
        .map(|mount| mount.destination().display().to_string())
        .find(|path| path.contains(".."));
    if let Some(verdict) = verdict {
        return Err(verdict);
    }
    let devices = spec
        .linux()
        .as_ref()
        .and_then(|linux| linux.devices().clone())
        .unwrap_or_default();
    Ok(devices
        .iter()
        .map(|device| device.path().display().to_string())
        .filter(|path| is_gpu(path))
        .collect())
}

/// Whether a node is a GPU's own: `/dev/nvidia` and a number.
fn is_gpu(path: &str) -> bool {
    path.strip_prefix("/dev/nvidia")
        .is_some_and(|number| !number.is_empty() && number.bytes().all(|b| b.is_ascii_digit()))
}

/// The published spec gives each usable GPU by its name, and no other one.
fn published(boot: &Description, seen: &Observed) -> Vec<String> {
    let Some(spec) = seen
        .notes("file")
        .last()
        .map(|line| line.get("text"))
        .filter(|spec| !spec.starts_with("error: "))
    else {
        return if boot.given().is_empty() {
            vec![]
        } else {
            vec!["there is no spec".into()]
        };
    };
    let spec = match with_nodes_of_this_machine(spec) {
        Ok(spec) => spec,
        Err(error) => return vec![format!("the spec is no JSON: {error}")],
    };
    let folder = kata_gpu_test_support::temp_dir();
    let directory = folder.path();
    let written = std::fs::write(directory.join("nvidia.yaml"), spec);
    let mut found: Vec<String> = written
        .err()
        .map(|e| format!("write {}: {e}", directory.display()))
        .into_iter()
        .collect();
    for (index, fate) in (0..).zip(&boot.gpus) {
        let wanted = seen
            .minor(index)
            .filter(|_| fate.is_given())
            .map(|minor| BTreeSet::from([format!("/dev/nvidia{minor}")]));
        let is = resolved(directory, &index.to_string());
        if is.as_ref().ok() != wanted.as_ref() {
            found.push(format!(
                "GPU {index} ({fate:?}) resolves to {is:?}, not to {wanted:?}"
            ));
        }
    }
    found
}

/// Every container has an answer, which is clear, and the GPUs it asked for.
fn containers(boot: &Description, seen: &Observed) -> Vec<String> {
    boot.containers
        .iter()
        .filter_map(|container| of_container(boot, seen, container).err())
        .collect()
}

fn of_container(boot: &Description, seen: &Observed, container: &Container) -> Result<(), String> {
    let name = container.name;
    let ends = ["container created", "container failed"];
    let of = |line: &&AgentLine| line.get("container") == name && ends.contains(&line.get("msg"));
    let line = seen
        .lines
        .iter()
        .find(of)
        .ok_or_else(|| format!("container {name} has no answer"))?;
    let created = line.get("msg") == "container created";
    if (container.answer, created) == (Answer::Created, false)
        || (container.answer, created) == (Answer::Refused, true)
    {
        return Err(format!(
            "container {name}: {}, planned: {:?}: {}{}",
            line.get("msg"),
            container.answer,
            line.get("error"),
            line.get("nodes")
        ));
    }
    if !created {
        let clear = [
            "do not exist",
            "unresolvable",
            "CDI timeout",
            " has failed (",
        ];
        let clear = clear.iter().any(|words| line.get("error").contains(words));
        return if clear {
            Ok(())
        } else {
            Err(format!(
                "container {name} has an unclear error: {}",
                line.get("error")
            ))
        };
    }
    let nodes: BTreeSet<&str> = line
        .get("nodes")
        .split(',')
        .filter_map(|node| node.split(' ').next())
        .filter(|path| is_gpu(path))
        .collect();
    let asked =
        (0..boot.gpus.len() as u64).filter(|index| container.gpu.is_none_or(|gpu| gpu == *index));
    let wanted: BTreeSet<String> = asked
        .filter_map(|index| seen.minor(index))
        .map(|minor| format!("/dev/nvidia{minor}"))
        .collect();
    let is_asked = nodes.iter().all(|node| wanted.contains(*node));
    // In a boot with failures, `all` are those at the time of the question.
    let is_all = container.answer != Answer::Created || nodes.len() == wanted.len();
    if is_asked && is_all {
        Ok(())
    } else {
        Err(format!(
            "container {name} has {nodes:?}, asked for {wanted:?}"
        ))
    }
}

#[cfg(test)]
mod tests;
