//! One recording: sets the kernel's tracing up, reads it until the boot is over, removes it, and
//! gives what was seen with times of the wall clock.

use super::boot_of_vm;
use super::probes::{ECAM, EXITS, PAGE_FAULTS, PORTS};
use super::recorded::Recorded;
use super::session::{ANSWERS, Session, remove_leftovers, tracefs};
use super::trace_line::{HistRow, Line, MAX_LINE, parse};
use super::traced_steps::{Fold, duration_ns};
use super::vmm_process::{Vmm, resource, vfio_devices};
use crate::rules::host_facts::bars;
use anyhow::{Context, Result, bail};
use kata_gpu_report::data::framing::{Lines, Piece};
use kata_gpu_report::data::text::printable;
use kata_gpu_report::data::trace_file::{Recording, Traced};
use kata_gpu_wire::catalogue::traced as names;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::time::{ClockId, clock_gettime};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::fs::File;
use std::io::{ErrorKind, Read};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Longest wait for events before process and boot are looked at.
const TICK: Duration = Duration::from_millis(500);
/// Limit of samples of the VMM's memory, and least change worth one: a sixteenth.
const MAX_SAMPLES: usize = 64;
const CHANGE: u64 = 16;
/// Limit of threads and of shims that are remembered.
const MAX_KNOWN: usize = 4096;
/// Pieces of the pipe that are read at once.
const MAX_CHUNKS: usize = 256;
/// Namespace of process ids in which a machine starts (<linux/proc_ns.h>).
const FIRST_PIDS: &str = "pid:[4026531836]";
/// Resolution of a time in the kernel's trace.
const RESOLUTION_NS: u64 = 1000;

/// The VM to record.
#[derive(Clone, Debug)]
pub enum Target {
    /// The next VM of Kata, or with functions of VFIO, that starts on this machine.
    Next,
    /// Kata's id of the sandbox, or its beginning.
    Vm(String),
    Pid(u32),
}

/// Orders for a recording.
#[derive(Clone, Debug)]
pub struct Wanted {
    pub target: Target,
    /// The collector's directory.
    pub dir: PathBuf,
    pub limit: Duration,
}

fn clock_ns(clock: ClockId) -> Result<i64> {
    let time = clock_gettime(clock).context("clock_gettime")?;
    Ok(time.tv_sec() * 1_000_000_000 + time.tv_nsec())
}

fn boottime_ns() -> Result<i64> {
    clock_ns(ClockId::CLOCK_BOOTTIME)
}

/// CLOCK_REALTIME minus CLOCK_BOOTTIME, with half the time that reading both took.
fn clock_offset() -> Result<(i64, u64)> {
    let before = boottime_ns()?;
    let real = clock_ns(ClockId::CLOCK_REALTIME)?;
    let half = boottime_ns()?.saturating_sub(before) / 2;
    Ok((real - before.saturating_add(half), half.unsigned_abs() + 1))
}

/// Reports progress to the operator.
fn log(text: &str) {
    eprintln!("kata-gpu-boot: {text}");
}

/// Records one boot, and reports the progress on standard error.
pub fn record(wanted: &Wanted) -> Result<Recorded> {
    if !nix::unistd::geteuid().is_root() {
        bail!("the kernel's tracing is root's: run kata-gpu-boot doctor --record as root");
    }
    let pids = std::fs::read_link("/proc/self/ns/pid").context("read /proc/self/ns/pid")?;
    if pids != Path::new(FIRST_PIDS) {
        // The trace has the machine's ids, and leftovers are told by processes that are gone.
        bail!(
            "this container has process ids of its own ({}): give its pod hostPID: true",
            pids.display()
        );
    }
    let (root, proc) = (tracefs()?, Path::new("/proc"));
    let gone = remove_leftovers(&root, proc)?;
    if !gone.is_empty() {
        let pids: Vec<String> = gone.iter().map(u32::to_string).collect();
        log(&format!(
            "removed what recorder {} left, which was killed",
            pids.join(", ")
        ));
    }
    let vmm = match &wanted.target {
        Target::Next => None,
        Target::Vm(sandbox) => Some(Vmm::of_sandbox(proc, sandbox)?),
        Target::Pid(pid) => Some(Vmm::of_pid(proc, *pid)?),
    };
    // Blocked before there is something to remove: a signal then ends the loop, not the process.
    let signals = [
        Signal::SIGINT,
        Signal::SIGTERM,
        Signal::SIGHUP,
        Signal::SIGQUIT,
    ];
    let blocked: SigSet = signals.into_iter().collect();
    blocked.thread_block().context("block signals")?;
    let signals = SignalFd::with_flags(&blocked, SfdFlags::SFD_NONBLOCK | SfdFlags::SFD_CLOEXEC)
        .context("signalfd")?;

    let session = Session::start(&root, std::process::id())?;
    session.missing.iter().for_each(|missing| log(missing));
    let mut recorder = Recorder::new(session, proc, wanted)?;
    match vmm {
        Some(vmm) => recorder.follow(vmm, None)?,
        None => log("waiting for the next VM; Ctrl-C ends"),
    }
    let ended = recorder.run(&signals)?;
    let recorded = recorder.finish(ended);
    // Nothing is left to remove: a signal ends a print that hangs.
    drop(signals);
    blocked.thread_unblock().context("unblock signals")?;
    recorded
}

struct Recorder<'a> {
    /// Before the session, which cannot be removed while its pipe is open.
    pipe: File,
    session: Session,
    lines: Lines,
    proc: &'a Path,
    wanted: &'a Wanted,
    fold: Fold,
    vmm: Option<Vmm>,
    /// A process that is called like a VMM was left out, and logged.
    warned: bool,
    began: Instant,
    offset: (i64, u64),
    /// Start of the VMM's program on CLOCK_BOOTTIME.
    exec_ns: Option<i64>,
    shim: Option<(u32, i64)>,
    /// Starts of shims' programs, by process.
    shims: HashMap<u32, i64>,
    /// Threads that were looked up: whether they are the VMM's.
    threads: HashMap<u32, bool>,
    memory: Vec<Traced>,
    /// Account of this recording; its time is that of CLOCK_BOOTTIME until the end.
    recording: Recording,
    boot: Option<PathBuf>,
    boot_bytes: u64,
    /// Bytes of the boot's file from before this recording: its end was that of the boot.
    boot_from: u64,
}

impl<'a> Recorder<'a> {
    fn new(session: Session, proc: &'a Path, wanted: &'a Wanted) -> Result<Self> {
        Ok(Self {
            pipe: session.pipe()?,
            session,
            lines: Lines::new(MAX_LINE),
            proc,
            wanted,
            fold: Fold::default(),
            vmm: None,
            warned: false,
            began: Instant::now(),
            offset: clock_offset()?,
            exec_ns: None,
            shim: None,
            shims: HashMap::new(),
            threads: HashMap::new(),
            memory: Vec::new(),
            recording: Recording {
                began_realtime_ns: boottime_ns()?,
                ..Recording::default()
            },
            boot: None,
            boot_bytes: 0,
            boot_from: 0,
        })
    }

    /// Takes a VM as the one that is recorded.
    fn follow(&mut self, vmm: Vmm, exec_ns: Option<i64>) -> Result<()> {
        self.session
            .follow(|| [&[vmm.pid][..], &vmm.threads()].concat())?;
        self.shim = exec_ns.and_then(|_| vmm.shim());
        self.exec_ns = exec_ns;
        log(&format!("recording the VM of process {}", vmm.pid));
        self.vmm = Some(vmm);
        Ok(())
    }

    /// Reads until the end, and gives its reason.
    fn run(&mut self, signals: &SignalFd) -> Result<String> {
        let mut looked = Instant::now();
        loop {
            let timeout = PollTimeout::try_from(TICK).unwrap_or(PollTimeout::MAX);
            let mut fds = [
                PollFd::new(self.pipe.as_fd(), PollFlags::POLLIN),
                PollFd::new(signals.as_fd(), PollFlags::POLLIN),
            ];
            match poll(&mut fds, timeout) {
                Ok(_) | Err(nix::errno::Errno::EINTR) => {}
                Err(e) => return Err(e).context("wait for events"),
            }
            let is_interrupted = fds.get(1).and_then(|fd| fd.any()).unwrap_or(false);
            self.read()?;
            if is_interrupted {
                return Ok("interrupted".into());
            }
            if looked.elapsed() < TICK {
                continue;
            }
            looked = Instant::now();
            if let Some(ended) = self.look()? {
                // Events up to that moment are still in the kernel's buffer.
                self.read()?;
                return Ok(ended);
            }
        }
    }

    /// Reads the events that there are; of endless ones a part, so that signals and limits count.
    fn read(&mut self) -> Result<()> {
        let mut chunk = vec![0; 64 * 1024];
        for _ in 0..MAX_CHUNKS {
            let n = match self.pipe.read(&mut chunk) {
                Ok(0) => return Ok(()),
                Ok(n) => n,
                Err(e) if e.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(e) if e.kind() == ErrorKind::Interrupted => continue,
                Err(e) => return Err(e).context("read trace_pipe"),
            };
            let mut lines = std::mem::replace(&mut self.lines, Lines::new(MAX_LINE));
            let mut done = Ok(());
            lines.push(chunk.get(..n).unwrap_or_default(), |piece| match piece {
                Piece::Line(line) if done.is_ok() => done = self.line(line),
                Piece::Line(_) => {}
                Piece::TooLong(_) => self.recording.unreadable += 1,
            });
            self.lines = lines;
            done?;
        }
        Ok(())
    }

    fn line(&mut self, line: &[u8]) -> Result<()> {
        let recording = &mut self.recording;
        let event = match parse(line) {
            Line::Event(event) => event,
            other => {
                match other {
                    Line::Lost(lost) => recording.lost = recording.lost.saturating_add(lost),
                    Line::Unreadable => recording.unreadable += 1,
                    Line::Comment | Line::Event(_) => {}
                }
                return Ok(());
            }
        };
        if event.name == "sched_process_exec" {
            if event.args.contains("shim-kata") && self.shims.len() < MAX_KNOWN {
                self.shims.insert(event.tid, event.at_ns);
            }
            if let (None, Target::Next, Some(vmm)) = (
                &self.vmm,
                &self.wanted.target,
                Vmm::at(self.proc, event.tid),
            ) {
                if !vmm.is_sure() {
                    // Any user can start any number of them.
                    if !std::mem::replace(&mut self.warned, true) {
                        log(&format!(
                            "left out process {}, which is called like a VMM: neither root nor a \
                             shim of Kata's started it; --pid takes it",
                            vmm.pid
                        ));
                    }
                } else if vmm.is_guest_of_gpus() {
                    self.follow(vmm, Some(event.at_ns))?;
                } else {
                    log(&format!(
                        "left out the VM of process {}: not Kata's, without functions \
                             of VFIO; --pid takes it",
                        vmm.pid
                    ));
                }
            }
            return Ok(());
        }
        if !self.is_vms(event.tid) {
            return Ok(());
        }
        self.recording.events += 1;
        if event.name == "bind_in" {
            self.fold.vfio_devices = vfio_devices(Path::new("/sys"));
        }
        let had_run = self.fold.first_run_ns.is_some();
        self.fold.take(&event);
        if !had_run && self.fold.first_run_ns.is_some() {
            self.session.has_run()?;
        }
        Ok(())
    }

    fn is_vms(&mut self, tid: u32) -> bool {
        let Some(vmm) = &self.vmm else { return false };
        if let Some(known) = self.threads.get(&tid) {
            return *known;
        }
        let is_vms = vmm.has(tid);
        if self.threads.len() < MAX_KNOWN {
            self.threads.insert(tid, is_vms);
        }
        is_vms
    }

    /// Looks at process and boot; gives the reason where the recording is over.
    fn look(&mut self) -> Result<Option<String>> {
        if self.began.elapsed() >= self.wanted.limit {
            return Ok(Some(format!("{} s were over", self.wanted.limit.as_secs())));
        }
        let Some(vmm) = &self.vmm else {
            return Ok(None);
        };
        let memory = vmm.memory();
        let resident = |memory: &BTreeMap<String, u64>| memory.values().copied().max().unwrap_or(0);
        let last = self.memory.last().map_or(0, |at| resident(&at.kinds));
        if resident(&memory).abs_diff(last) > last / CHANGE && self.memory.len() < MAX_SAMPLES {
            let now = boottime_ns()?;
            self.memory.push(Traced {
                bytes: memory.get("resident").copied(),
                kinds: memory,
                ..step(names::VMM_MEMORY, now, now)
            });
        }
        for tid in vmm.threads() {
            self.threads.insert(tid, true);
        }
        if !vmm.lives() {
            return Ok(Some("the VM ended".into()));
        }
        if self.boot.is_none() {
            // A VM that is already known may have connected long ago.
            let since_ns = self.exec_ns.map(|at| at.saturating_add(self.offset.0));
            self.boot = boot_of_vm::find(&self.wanted.dir, vmm, since_ns);
            if let (None, Some(boot)) = (self.exec_ns, &self.boot) {
                self.boot_from = boot_of_vm::length(boot);
                self.boot_bytes = self.boot_from;
            }
        }
        let Some(boot) = &self.boot else {
            return Ok(None);
        };
        let bytes = boot_of_vm::length(boot);
        let changed = bytes != self.boot_bytes;
        self.boot_bytes = bytes;
        Ok((changed && boot_of_vm::is_over(boot, self.boot_from))
            .then(|| "the guest's GPUs were settled".into()))
    }

    fn finish(mut self, ended: String) -> Result<Recorded> {
        let (end_offset, end_error) = clock_offset()?;
        let (offset, error) = self.offset;
        let clock_error_ns = end_offset
            .abs_diff(offset)
            .saturating_add(error.max(end_error))
            .saturating_add(RESOLUTION_NS);
        let end_ns = boottime_ns()?;
        let counts = self.counts(end_ns);
        let mut traced = Vec::new();
        let mut recording = self.recording;
        recording.lost = recording.lost.max(self.session.lost());
        recording.missing = std::mem::take(&mut self.session.missing);
        // From here on nothing is traced any more.
        drop(self.pipe);
        drop(self.session);

        self.fold
            .number_bars(|function| bars(&resource(Path::new("/sys"), function)));
        if let (Some(exec_ns), Some((shim, started_ns))) = (self.exec_ns, self.shim) {
            let at_ns = self.shims.get(&shim).copied().unwrap_or(started_ns);
            traced.push(Traced {
                pid: Some(shim),
                ..step(names::SHIM, at_ns.min(exec_ns), exec_ns)
            });
        }
        if let (Some(exec_ns), Some(run_ns)) = (self.exec_ns, self.fold.first_run_ns) {
            traced.push(step(names::VMM_START, exec_ns, run_ns));
        }
        traced.append(&mut self.fold.steps);
        traced.extend(counts);
        traced.extend(self.memory);
        traced.sort_by_key(|traced| traced.began_realtime_ns);
        let pid = self.vmm.map(|vmm| vmm.pid);
        for traced in &mut traced {
            traced.pid = traced.pid.or(pid);
            traced.began_realtime_ns = traced.began_realtime_ns.saturating_add(offset);
            traced.clock_error_ns = clock_error_ns;
        }
        if self.fold.left_out > 0 {
            recording.missing.push(format!(
                "{} step(s) over the limit are left out",
                self.fold.left_out
            ));
        }
        recording.kernel = nix::sys::utsname::uname()
            .map(|uts| printable(&uts.release().to_string_lossy()))
            .unwrap_or_default();
        recording.took_ns = duration_ns(recording.began_realtime_ns, end_ns);
        recording.began_realtime_ns = recording.began_realtime_ns.saturating_add(offset);
        recording.ended = ended;
        Ok(Recorded {
            recording,
            traced,
            boot: self.boot,
        })
    }

    /// The kernel's own counts, of the VMM's threads.
    fn counts(&mut self, end_ns: i64) -> Vec<Traced> {
        let Some(vmm) = &self.vmm else {
            return Vec::new();
        };
        let own: HashSet<u32> = self
            .threads
            .iter()
            .filter(|(_, own)| **own)
            .map(|(tid, _)| *tid)
            .chain([vmm.pid])
            .collect();
        let mut dropped = 0;
        let mut rows = |(rows, without_room): (Vec<HistRow>, u64)| {
            dropped += without_room;
            rows.into_iter()
                .filter(|row| own.contains(&row.tid))
                .collect::<Vec<_>>()
        };
        let from_ns = self.exec_ns.unwrap_or(self.recording.began_realtime_ns);
        let sum = |rows: &[HistRow]| rows.iter().map(|row| row.hits).fold(0, u64::saturating_add);
        let mut kinds: BTreeMap<String, u64> = BTreeMap::new();
        let mut add = |kind: String, n: u64| {
            if n > 0 {
                let known = kinds.entry(kind).or_default();
                *known = known.saturating_add(n);
            }
        };
        let mut exits = rows(self.session.rows(EXITS.name));
        // The file has a second histogram, for the times, whose rows have no reason.
        exits.retain(|row| row.kind.is_some());
        exits.iter().for_each(|row| add(reason(row.kind), row.hits));
        rows(self.session.rows(ANSWERS))
            .iter()
            .for_each(|row| add(format!("{}-us", reason(row.kind)), row.sum.unwrap_or(0)));
        for row in rows(self.session.rows(PORTS.name)) {
            match row.kind {
                Some(0xcf8..=0xcff) => add("pci-config".into(), row.hits),
                Some(0x3f8..=0x3ff) => add("serial".into(), row.hits),
                _ => {}
            }
        }
        add(
            "pci-config-by-memory".into(),
            sum(&rows(self.session.rows(ECAM.name))),
        );
        let faults = sum(&rows(self.session.rows("faults")));
        let page_faults = sum(&rows(self.session.rows(PAGE_FAULTS.name)));
        if dropped > 0 {
            self.session.missing.push(format!(
                "{dropped} count(s) had no room in the kernel's histograms"
            ));
        }
        let all = [
            (names::KVM_EXITS, sum(&exits), kinds),
            (names::VMM_MMAP_FAULT, faults, BTreeMap::new()),
            (names::VMM_PAGE_FAULTS, page_faults, BTreeMap::new()),
        ];
        all.into_iter()
            .filter(|(_, calls, _)| *calls > 0)
            .map(|(name, calls, kinds)| Traced {
                calls: Some(calls),
                kinds,
                ..step(name, from_ns, end_ns)
            })
            .collect()
    }
}

/// A step on CLOCK_BOOTTIME.
fn step(name: &str, from_ns: i64, to_ns: i64) -> Traced {
    Traced {
        name: name.into(),
        began_realtime_ns: from_ns,
        took_ns: duration_ns(from_ns, to_ns),
        ..Traced::default()
    }
}

/// Reasons of <linux/kvm.h> that a boot has.
fn reason(kind: Option<u64>) -> String {
    match kind {
        Some(2) => "pio".into(),
        Some(6) => "mmio".into(),
        Some(8) => "shutdown".into(),
        Some(10) => "interrupted".into(),
        Some(other) => format!("reason-{other}"),
        None => "unknown".into(),
    }
}
