//! The recorder's own part of the kernel's tracing: an instance of tracefs, probes in a group of
//! its own, a synthetic event. All carry the recorder's process id in their names.
//!
//! Invariants: nothing outside of these names is written, so that another user's tracing stays as
//! it is. Dropping a [`Session`] removes all of it; [`remove_leftovers`] does for recorders that
//! were killed, by the names whose process is gone. A write outside of an own instance never
//! truncates: that would remove the probes of others.

use super::probes::{
    At, Count, ECAM, EXEC, EXEC_FILTER, EXITS, FAULTS, PAGE_FAULTS, PORTS, PROBES, Probe, RUN,
};
use super::trace_line::{HistRow, histogram};
use anyhow::{Context, Result, bail};
use nix::unistd::{SysconfVar, sysconf};
use std::collections::BTreeSet;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// Name of an instance, before the process id.
const INSTANCE: &str = "kata-gpu-boot-";
/// Group of probes, and beginning of the synthetic event's name, before the process id.
const GROUP: &str = "kata_gpu_boot_";
/// Buffer of all processors, in KiB, which is memory of the kernel's; most and least of one.
const BUFFERS_KIB: i64 = 256 << 10;
const MOST_KIB: i64 = 8192;
const LEAST_KIB: i64 = 512;
/// Limit of a file of tracefs that is read whole.
const MAX_FILE: u64 = 4 << 20;

/// Seconds of exits by reason: the time from an exit until the thread enters the guest again.
pub const ANSWERS: &str = "answers";

/// Parts that are set up.
pub struct Session {
    root: PathBuf,
    instance: PathBuf,
    group: String,
    /// Sentences about what this kernel does not have.
    pub missing: Vec<String>,
    counts: Vec<(&'static str, PathBuf)>,
}

/// Writes to a file of tracefs. Never truncates, and never makes a file of tracefs.
fn put(path: &Path, text: &str) -> io::Result<()> {
    OpenOptions::new()
        .append(true)
        .open(path)?
        .write_all(text.as_bytes())
}

/// Removes all triggers of an event of an own instance: the meaning of a truncation there.
fn clear(trigger: &Path) -> io::Result<()> {
    OpenOptions::new()
        .write(true)
        .truncate(true)
        .open(trigger)
        .map(drop)
}

fn read(path: &Path) -> io::Result<String> {
    let mut bytes = Vec::new();
    File::open(path)?.take(MAX_FILE).read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// Definition of a probe: `p:GROUP/EVENT FUNCTION ARGS`. A return probe has room for as many calls
/// at once as a VMM has threads that map.
fn definition(group: &str, probe: &Probe) -> String {
    let kind = match probe.at {
        At::Entry => "p",
        At::Return => "r64",
    };
    format!(
        "{kind}:{group}/{} {} {}\n",
        probe.event, probe.function, probe.args
    )
}

impl Session {
    /// Sets up what has few events. `root` is a mounted tracefs.
    pub fn start(root: &Path, pid: u32) -> Result<Self> {
        let instance = root.join("instances").join(format!("{INSTANCE}{pid}"));
        fs::create_dir(&instance).with_context(|| {
            format!(
                "make {}: does this kernel have CONFIG_TRACING, and is this root?",
                instance.display()
            )
        })?;
        let mut session = Self {
            root: root.to_path_buf(),
            instance,
            group: format!("{GROUP}{pid}"),
            missing: Vec::new(),
            counts: Vec::new(),
        };
        session.set("trace_clock", "boot")?;
        let processors = sysconf(SysconfVar::_NPROCESSORS_CONF)
            .ok()
            .flatten()
            .unwrap_or(1)
            .max(1);
        session.set(
            "buffer_size_kb",
            &(BUFFERS_KIB / processors)
                .clamp(LEAST_KIB, MOST_KIB)
                .to_string(),
        )?;
        // Threads and children of a process that is traced are, too.
        session.set("options/event-fork", "1")?;
        for probe in PROBES {
            if session.add(probe) {
                session.enable(probe)?;
            }
        }
        session.set(&format!("events/{EXEC}/filter"), EXEC_FILTER)?;
        session.set(&format!("events/{EXEC}/enable"), "1")?;
        Ok(session)
    }

    /// Starts what has many events: the first run of a vCPU, and the counts. They cost each VM of
    /// the machine a little, and so only while one is recorded.
    fn start_counts(&mut self) -> Result<()> {
        if self.add(&RUN) {
            self.enable(&RUN)?;
        }
        if let Some(fault) = FAULTS.iter().find(|probe| self.add(probe)) {
            let event = format!("{}/{}", self.group, fault.event);
            self.count("faults", &event, "hist:keys=common_pid:size=4096", "");
        }
        for Count {
            name,
            event,
            trigger,
            without,
        } in [EXITS, PORTS, ECAM, PAGE_FAULTS]
        {
            self.count(name, event, trigger, without);
        }
        if self.answers().is_err() {
            self.missing.push(
                "this kernel has no histograms with variables: not known is how long the \
                 VMM took for exits"
                    .into(),
            );
        }
        Ok(())
    }

    fn set(&self, file: &str, text: &str) -> Result<()> {
        let path = self.instance.join(file);
        put(&path, text).with_context(|| format!("write {text:?} to {}", path.display()))
    }

    /// Defines a probe; false where this kernel has no such function.
    fn add(&mut self, probe: &Probe) -> bool {
        if put(
            &self.root.join("kprobe_events"),
            &definition(&self.group, probe),
        )
        .is_ok()
        {
            return true;
        }
        if !probe.without.is_empty() {
            self.missing.push(format!(
                "{} cannot be probed in this kernel: not seen is {}",
                probe.function, probe.without
            ));
        }
        false
    }

    fn enable(&self, probe: &Probe) -> Result<()> {
        let event = format!("events/{}/{}", self.group, probe.event);
        if !probe.filter.is_empty() {
            self.set(&format!("{event}/filter"), probe.filter)?;
        }
        self.set(&format!("{event}/enable"), "1")
    }

    fn count(&mut self, name: &'static str, event: &str, trigger: &str, without: &str) {
        let dir = format!("events/{event}");
        if self.set(&format!("{dir}/trigger"), trigger).is_ok() {
            self.counts
                .push((name, self.instance.join(dir).join("hist")));
        } else if !without.is_empty() {
            self.missing.push(format!(
                "{event} cannot be counted in this kernel: not known is {without}"
            ));
        }
    }

    /// Sums the time of the VMM's answers by reason: a variable of the exit, read at the next entry
    /// of the same thread, which forgets it.
    fn answers(&mut self) -> Result<()> {
        let event = format!("{}_{ANSWERS}", self.group);
        put(
            &self.root.join("synthetic_events"),
            &format!("{event} u32 reason; u64 us; pid_t tid\n"),
        )?;
        let exit = "hist:keys=common_pid:at=common_timestamp.usecs,why=reason:size=4096";
        self.set(&format!("events/{}/trigger", EXITS.event), exit)?;
        let entry = format!(
            "hist:keys=common_pid:took=common_timestamp.usecs-$at,r=$why,t=common_pid:\
             onmatch(kvm.kvm_userspace_exit).{event}($r,$took,$t):size=4096"
        );
        self.set("events/kvm/kvm_entry/trigger", &entry)?;
        self.set(
            &format!("events/synthetic/{event}/trigger"),
            "hist:keys=tid,reason:vals=us:size=4096",
        )?;
        self.counts.push((
            ANSWERS,
            self.instance.join(format!("events/synthetic/{event}/hist")),
        ));
        Ok(())
    }

    /// Limits events to these threads and to those that they start, and begins to count.
    pub fn follow(&mut self, threads: impl Fn() -> Vec<u32>) -> Result<()> {
        self.limit_to(&threads())?;
        // Threads that came before the filter had their parents.
        self.limit_to(&threads())?;
        self.start_counts()
    }

    fn limit_to(&self, tids: &[u32]) -> Result<()> {
        tids.iter()
            .try_for_each(|tid| match self.set("set_event_pid", &format!("{tid}\n")) {
                // The process has ended.
                Err(e)
                    if e.downcast_ref::<io::Error>()
                        .is_some_and(|e| e.raw_os_error() == Some(nix::libc::ESRCH)) =>
                {
                    Ok(())
                }
                done => done,
            })
    }

    /// Switches the probe of the first run off.
    pub fn has_run(&self) -> Result<()> {
        self.set(&format!("events/{}/{}/enable", self.group, RUN.event), "0")
    }

    /// Events as they come. Reading takes them out.
    pub fn pipe(&self) -> Result<File> {
        let path = self.instance.join("trace_pipe");
        let mut options = OpenOptions::new();
        options.read(true).custom_flags(nix::libc::O_NONBLOCK);
        options
            .open(&path)
            .with_context(|| format!("open {}", path.display()))
    }

    /// A count by its name: the kernel's rows, and how many hits had no room.
    pub fn rows(&self, name: &str) -> (Vec<HistRow>, u64) {
        let file = self.counts.iter().find(|(known, _)| *known == name);
        file.and_then(|(_, path)| read(path).ok())
            .map(|text| histogram(&text))
            .unwrap_or_default()
    }

    /// Events that the kernel dropped since the beginning.
    pub fn lost(&self) -> u64 {
        let stats = |entry: fs::DirEntry| read(&entry.path().join("stats")).ok();
        let number = |line: &str| match line.split_once(':') {
            Some(("overrun" | "dropped events", n)) => n.trim().parse::<u64>().ok(),
            _ => None,
        };
        let cpus = fs::read_dir(self.instance.join("per_cpu"))
            .into_iter()
            .flatten()
            .flatten();
        cpus.filter_map(stats)
            .map(|text| text.lines().filter_map(number).sum::<u64>())
            .sum()
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        let left = remove(&self.root, &self.instance, &self.group);
        if !left.is_empty() {
            eprintln!(
                "kata-gpu-boot: not removed from {}: {}",
                self.root.display(),
                left.join(", ")
            );
        }
    }
}

/// Removes an instance, and then what it used. Returns what could not be removed.
fn remove(root: &Path, instance: &Path, group: &str) -> Vec<String> {
    let mut left = Vec::new();
    let mut note = |what: String, done: io::Result<()>| match done {
        Err(e) if e.kind() != io::ErrorKind::NotFound => left.push(format!("{what} ({e})")),
        _ => {}
    };
    // Enabled events go with the instance. A histogram with a variable holds the instance, and one
    // that reads the variable holds the other: the readers go first.
    let answers = format!("synthetic/{group}_{ANSWERS}");
    for event in ["kvm/kvm_entry", &answers, EXITS.event] {
        note(
            format!("trigger of {event}"),
            clear(&instance.join(format!("events/{event}/trigger"))),
        );
    }
    note(instance.display().to_string(), fs::remove_dir(instance));
    let synthetic = root.join("synthetic_events");
    for name in synthetics(&read(&synthetic).unwrap_or_default())
        .filter(|name| group_of_synthetic(name) == Some(group))
    {
        note(name.to_string(), put(&synthetic, &format!("!{name}\n")));
    }
    let probes = root.join("kprobe_events");
    for (_, event) in probes_of(&read(&probes).unwrap_or_default()).filter(|(of, _)| *of == group) {
        note(
            format!("{group}/{event}"),
            put(&probes, &format!("-:{group}/{event}\n")),
        );
    }
    left
}

/// Group and event of each probe: `p:GROUP/EVENT PLACE ARGS`, `r64:..`.
fn probes_of(text: &str) -> impl Iterator<Item = (&str, &str)> {
    text.lines()
        .filter_map(|line| line.split_once(':')?.1.split(' ').next()?.split_once('/'))
}

/// Names of synthetic events: `NAME\tFIELDS`.
fn synthetics(text: &str) -> impl Iterator<Item = &str> {
    text.lines()
        .filter_map(|line| line.split([' ', '\t', ';']).next())
        .filter(|name| !name.is_empty())
}

fn group_of_synthetic(name: &str) -> Option<&str> {
    name.strip_suffix(ANSWERS)?.strip_suffix('_')
}

/// Removes what recorders left that are gone. Returns their process ids. A name whose process lives
/// stays, whoever that is now.
pub fn remove_leftovers(root: &Path, proc: &Path) -> Result<BTreeSet<u32>> {
    let mut gone = BTreeSet::new();
    let pid = |name: &str, prefix: &str| {
        name.strip_prefix(prefix)
            .and_then(|pid| pid.parse::<u32>().ok())
    };
    let instances = root.join("instances");
    for entry in fs::read_dir(&instances)
        .with_context(|| format!("read {}", instances.display()))?
        .flatten()
    {
        gone.extend(
            entry
                .file_name()
                .to_str()
                .and_then(|name| pid(name, INSTANCE)),
        );
    }
    let (probes, synthetic) = (
        read(&root.join("kprobe_events")).unwrap_or_default(),
        read(&root.join("synthetic_events")).unwrap_or_default(),
    );
    gone.extend(probes_of(&probes).filter_map(|(group, _)| pid(group, GROUP)));
    gone.extend(synthetics(&synthetic).filter_map(|name| pid(group_of_synthetic(name)?, GROUP)));
    gone.retain(|pid| !proc.join(pid.to_string()).exists());
    for pid in &gone {
        let left = remove(
            root,
            &instances.join(format!("{INSTANCE}{pid}")),
            &format!("{GROUP}{pid}"),
        );
        if !left.is_empty() {
            bail!(
                "left by the recorder {pid}, which is gone, and not removed: {}",
                left.join(", ")
            );
        }
    }
    Ok(gone)
}

/// The mounted tracefs: where the kernel mounts it, or the older place.
pub fn tracefs() -> Result<PathBuf> {
    for root in ["/sys/kernel/tracing", "/sys/kernel/debug/tracing"] {
        if Path::new(root).join("instances").is_dir() {
            return Ok(root.into());
        }
    }
    bail!(
        "no tracefs at /sys/kernel/tracing: mount -t tracefs tracefs \
             /sys/kernel/tracing (a container needs it from the host)"
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use kata_gpu_test_support::{TempDir, temp_dir};

    const OTHERS: &str = "p:kprobes/mine vfs_read\np:kata_gpu_bootstrap/x vfs_read\n";

    /// A tracefs as far as files go: an instance is an empty directory.
    fn tracefs(instances: &[&str], probes: &str, synthetic: &str) -> TempDir {
        let root = temp_dir();
        for name in instances {
            fs::create_dir_all(root.path().join("instances").join(name)).unwrap();
        }
        fs::write(root.path().join("kprobe_events"), probes).unwrap();
        fs::write(root.path().join("synthetic_events"), synthetic).unwrap();
        root
    }

    fn alive(pids: &[u32]) -> TempDir {
        let proc = temp_dir();
        pids.iter()
            .for_each(|pid| fs::create_dir(proc.path().join(pid.to_string())).unwrap());
        proc
    }

    #[test]
    fn leftovers_of_the_dead_go_and_nothing_else() {
        let instances = [
            "kata-gpu-boot-41",
            "kata-gpu-boot-42",
            "kata-gpu-boot-x",
            "mine",
        ];
        let probes = format!(
            "{OTHERS}p:kata_gpu_boot_41/map_in f a=$arg1\n\
                 r64:kata_gpu_boot_41/map_out f\np:kata_gpu_boot_42/pin g\n\
                 r64:kata_gpu_boot_43/pin g\n"
        );
        let root = tracefs(
            &instances,
            &probes,
            "kata_gpu_boot_41_answers\tu32 reason; u64 us\nmine\tu64 a\n",
        );
        let gone = remove_leftovers(root.path(), alive(&[42]).path()).unwrap();
        assert_eq!(gone, [41, 43].into());
        let mut left: Vec<String> = fs::read_dir(root.path().join("instances"))
            .unwrap()
            .map(|e| e.unwrap().file_name().into_string().unwrap())
            .collect();
        left.sort();
        assert_eq!(left, ["kata-gpu-boot-42", "kata-gpu-boot-x", "mine"]);
        let written = |file: &str, before: &str| {
            read(&root.path().join(file))
                .unwrap()
                .strip_prefix(before)
                .unwrap()
                .to_string()
        };
        let removed =
            "-:kata_gpu_boot_41/map_in\n-:kata_gpu_boot_41/map_out\n-:kata_gpu_boot_43/pin\n";
        assert_eq!(
            written("kprobe_events", &probes),
            removed,
            "appended, nothing truncated"
        );
        assert_eq!(
            written(
                "synthetic_events",
                "kata_gpu_boot_41_answers\tu32 reason; u64 us\nmine\tu64 a\n"
            ),
            "!kata_gpu_boot_41_answers\n"
        );
        let none =
            remove_leftovers(tracefs(&["mine"], OTHERS, "").path(), alive(&[]).path()).unwrap();
        assert_eq!(none, BTreeSet::new());
    }

    #[test]
    fn what_cannot_be_removed_is_named() {
        let root = tracefs(&["kata-gpu-boot-41"], "", "");
        // A directory with a file in it, as an instance that is in use, cannot be removed.
        fs::write(root.path().join("instances/kata-gpu-boot-41/used"), "").unwrap();
        let error = remove_leftovers(root.path(), alive(&[]).path())
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("41") && error.contains("not removed"),
            "{error}"
        );
    }

    #[test]
    fn each_probe_is_defined_by_one_line() {
        for probe in PROBES.iter().chain(FAULTS).chain([&RUN]) {
            let line = definition("g", probe);
            assert!(
                line.ends_with('\n') && line.trim_end().lines().count() == 1,
                "{line:?}"
            );
            assert_eq!(probes_of(&line).next(), Some(("g", probe.event)));
        }
    }
}
