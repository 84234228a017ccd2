//! Logs that other programs wrote about one boot, into a boot as `collect` would have written it.
//!
//! Two kinds of logs are read: a guest's console or kernel log, and the log of containerd and
//! Kata's shims, with the guest's console in it or without. A boot's own file can be joined with
//! them. `source` turns a file's lines into `facts`, each with the clock of its stamp;
//! `clocks` relates the clocks and bounds the error; `derive` makes records; `boot_text`
//! makes the file.
//!
//! Invariants: lines are counted; a record from a log is marked (`fields.import`: file, line,
//! error), and so is the boot, in a line that no guest can send ([`HostEvent::Imported`]). Logs are
//! hostile input: bounded reads, no line can do harm.
//!
//! [`HostEvent::Imported`]: crate::data::boot_file::HostEvent::Imported

mod agent_lines; // lines of the agent and of our init
mod boot_text; // records into the file of a boot
mod clocks; // all clocks on one base
mod console_lines; // lines of a guest's console
mod derive; // facts into records
mod driver_said; // the driver's messages that can explain a failure
mod facts; // what lines state
#[cfg(test)]
mod field_tests;
mod guest_facts; // what the whole log states of the guest
mod kernel_lines; // lines of the guest's kernel
mod log_files; // files into lines
mod runtime_errors; // errors of these
mod runtime_lines; // lines of containerd and of Kata's shims
mod source; // one file into facts
mod unrecognised; // lines that mean nothing here

use crate::data::boot_file::{BootFile, Imported, ImportedFile};
use crate::data::text::{error_bound, printable, wall_clock};
use anyhow::{Context, Result, bail};
use clocks::{Clocks, Placed};
use facts::{Fact, Item, Log, MAX_STAMP_NS, Stamp, cut};
use kata_gpu_wire::catalogue::logged;
use kata_gpu_wire::failure::{Reason, of_guest};
use kata_gpu_wire::names;
use kernel_lines::Meaning;
use source::{CONTAINERD, Source};
use std::collections::HashSet;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

/// The earliest time before the guest's kernel that is believed: a pod may wait for a node for
/// long, but not for a month.
const MAX_BEFORE_NS: i64 = 30 * 24 * 3600 * 1_000_000_000;
/// Boots of one file that are listed.
const MAX_LISTED: usize = 40;
/// Most files and notes that the boot's file lists: its line has a limit.
const MAX_NAMED: usize = 12;
/// Longest name or note in the boot's file.
const MAX_NOTE: usize = 300;

/// One boot, made of logs.
#[derive(Debug)]
pub struct BootOfLogs {
    /// The boot, as if read from a collector's file.
    pub boot: BootFile,
    /// The text of that file, as the store keeps it.
    pub text: String,
    /// Printable lines: counts of each file's lines, relations of the clocks, omissions.
    pub warnings: Vec<String>,
}

/// Logs of one boot that have been read.
#[derive(Debug, Default)]
pub struct Logs(Vec<Source>);

impl Logs {
    /// Adds the file of this name; gzip is unpacked, and the kind of the file recognised.
    pub fn add(&mut self, name: &str, from: impl Read + 'static) -> Result<()> {
        let from = log_files::unpacked(Box::new(from))?;
        let mut source = Source::read(&printable(&cut(name, MAX_NOTE)), from)?;
        if source.recognised == 0 {
            bail!("{}", nothing(&source));
        }
        let items = source.logs.iter_mut().flat_map(|log| &mut log.items);
        items.for_each(|item| item.file = self.0.len());
        self.0.push(source);
        Ok(())
    }

    /// Makes the boot. `nth`: its number, from 1, in a file with several; else the one of the
    /// sandbox that a boot's file names, else the last that failed, else the last.
    pub fn boot(self, nth: Option<usize>) -> Result<BootOfLogs> {
        let Self(mut sources) = self;
        let boots = sources.iter().filter(|source| source.boot.is_some());
        if boots.count() > 1 {
            bail!("several files of boots: logs of one boot are read with one of them");
        }
        let boot = sources.iter_mut().find_map(|source| source.boot.take());
        let sandbox = boot.as_ref().and_then(|boot| boot.sandbox_id());
        let one_each = sources.iter().all(|source| source.logs.len() < 2);
        if let Some(nth) = nth.filter(|nth| one_each && *nth != 1) {
            bail!("there is no boot {nth}: each of these files holds one");
        }
        let mut notes = Vec::new();
        for source in &mut sources {
            notes.extend(choose(source, nth, sandbox)?);
        }
        let logs = without_copies(&mut sources, boot.as_ref());

        let clocks = Clocks::new(&logs, boot.as_ref());
        let items: Vec<&Item> = logs.iter().flat_map(|log| &log.items).collect();
        let placed = in_time(&items, &clocks);
        if placed.is_empty() && boot.is_none() {
            bail!("no line of these files has a possible time");
        }
        let version = items.iter().find_map(|item| match &item.fact {
            Fact::Init(line) => Some(line.version.clone()),
            _ => None,
        });
        let records = derive::derive(&placed, boot.is_some() || version.is_some());

        let too_large = boot.as_ref().and_then(|boot| boot.too_large.some());
        notes.extend(too_large.map(|too_large| too_large.sentence()));
        for source in &sources {
            let note = |why| format!("{}: not read to its end: {why}", source.name);
            notes.extend(source.ended_early.as_ref().map(note));
        }
        let imported = imported(&sources, &clocks, &notes);
        let warnings = warnings(&imported, notes);
        let facts = boot_text::Facts {
            version,
            release: items
                .iter()
                .find_map(|item| release(item))
                .map(str::to_string),
            imported,
            sample: clocks.sample(),
        };
        let text = boot_text::text(boot.as_ref(), records, facts);
        let boot = BootFile::read(text.as_bytes()).context("read what was made")?;
        Ok(BootOfLogs {
            boot,
            text,
            warnings,
        })
    }
}

/// Error for a file without a boot: what it has, what a boot's log has, the command that gives one.
fn nothing(source: &Source) -> String {
    let others = source.others.sentence();
    let read = match others.as_str() {
        "" => String::new(),
        others => format!(" ({others})"),
    };
    format!(
        "none of its {} line(s) is of a boot{read}\n\
         a boot has lines of the guest's kernel, NVIDIA's driver, kata-agent or an init \
         (`[ 1.234567] NVRM: ..`), or of containerd, CRI-O and Kata's shim \
         (`time=\"..\" level=.. msg=\"..\" sandbox=..`), or is a boot's file\n\
         on the node: journalctl -u containerd -o json --all --since -1h; \
         in the guest: journalctl -k or dmesg; or the guest's console; \
         without access to these: kubectl describe pod",
        source.lines
    )
}

/// The facts that can be placed, in order of time.
fn in_time<'a>(items: &[&'a Item], clocks: &Clocks) -> Vec<(Placed, &'a Item)> {
    let placed = items
        .iter()
        .filter_map(|item| Some((clocks.place(item.stamp)?, *item)));
    let is_possible = |at_ns: i64| (-MAX_BEFORE_NS..=MAX_STAMP_NS).contains(&at_ns);
    let placed = placed.filter(|(placed, _)| is_possible(placed.at_ns));
    let mut placed: Vec<(Placed, &Item)> = placed.collect();
    // Kernel lines first: a process logs an event after the kernel does.
    placed.sort_by_key(|(at, item)| (at.at_ns, !item.stamp.is_kernels()));
    placed
}

/// The sources of the boot, for its file.
fn imported(sources: &[Source], clocks: &Clocks, notes: &[String]) -> Imported {
    let file = |source: &Source| ImportedFile {
        file: source.name.clone(),
        format: source.kind.to_string(),
        lines: source.lines,
        recognised: source.recognised,
        skipped: source.lines.saturating_sub(source.recognised),
    };
    let notes = notes.iter().take(MAX_NAMED);
    Imported {
        zero: clocks.zero.to_string(),
        files: sources.iter().take(MAX_NAMED).map(file).collect(),
        clocks: clocks.evidence.clone(),
        notes: notes.map(|note| cut(note, MAX_NOTE)).collect(),
    }
}

/// Reads logs of one boot, `-` being standard input; `nth` as in [`Logs::boot`].
pub fn boot_of_logs(paths: &[PathBuf], nth: Option<usize>) -> Result<BootOfLogs> {
    let mut logs = Logs::default();
    for path in paths {
        let name = path
            .file_name()
            .unwrap_or(path.as_os_str())
            .to_string_lossy();
        let from: Box<dyn Read> = match path.as_path() == Path::new("-") {
            true => Box::new(io::stdin().lock()),
            false => Box::new(File::open(path).with_context(|| read_of(path))?),
        };
        logs.add(&name, from).with_context(|| read_of(path))?;
    }
    logs.boot(nth)
}

fn read_of(path: &Path) -> String {
    format!("read {}", printable(&path.display().to_string()))
}

/// Removes everything but one boot from a file; notes on the others.
fn choose(source: &mut Source, nth: Option<usize>, sandbox: Option<&str>) -> Result<Vec<String>> {
    let count = source.logs.len();
    if count < 2 {
        return Ok(vec![]);
    }
    let is_wanted = |log: &Log| sandbox.is_some() && log.sandbox.as_deref() == sandbox;
    let at = match nth {
        Some(nth) => nth.wrapping_sub(1),
        None => (source.logs.iter().position(is_wanted))
            .or_else(|| source.logs.iter().rposition(has_failure))
            .unwrap_or(count - 1),
    };
    let boots = source.logs.iter().take(MAX_LISTED).enumerate();
    let boots = boots.map(|(i, log)| format!("  {:>3}  {}", i + 1, describe(log)));
    let more = count.checked_sub(MAX_LISTED).filter(|more| *more > 0);
    let boots = boots.chain(more.map(|more| format!("  and {more} more")));
    let boots: Vec<String> = boots.collect();
    let holds = format!("{} holds {count} boots", source.name);
    if at >= count {
        bail!(
            "{holds}, and no boot {}:\n{}",
            at.wrapping_add(1),
            boots.join("\n")
        );
    }
    source.logs.swap(0, at);
    source.logs.truncate(1);
    let first = format!(
        "{holds}; this is number {}, --boot N takes another:",
        at + 1
    );
    Ok([vec![first], boots].concat())
}

fn describe(log: &Log) -> String {
    let short = |id: &String| printable(id.get(..12).unwrap_or(id));
    let sandbox = log
        .sandbox
        .as_ref()
        .map(|id| format!("sandbox {}", short(id)));
    let release = log.items.iter().find_map(release);
    let release = release.map(|release| format!("kernel {}", printable(release)));
    let wall = log.items.iter().find_map(|item| match item.stamp {
        Stamp::Guest(ns) => Some(item.read_ns.unwrap_or(ns)),
        _ => item.read_ns,
    });
    let lines = log.items.iter().map(|item| item.line);
    let lines = lines.clone().min().zip(lines.max());
    let lines = lines.map(|(first, last)| format!("lines {first}-{last}"));
    let failed = has_failure(log).then(|| "failed".to_string());
    let words = [failed, sandbox, release, wall.map(wall_clock), lines];
    words.into_iter().flatten().collect::<Vec<_>>().join(", ")
}

/// Whether something failed in a boot, by its lines: people keep logs for that.
fn has_failure(log: &Log) -> bool {
    let is_failure = |item: &Item| match &item.fact {
        Fact::Kernel { text, meaning } => match meaning {
            Meaning::InitFailed { .. } | Meaning::ProbeFailed { .. } | Meaning::NoGpuTaken => true,
            Meaning::Ended => {
                of_guest(text).is_some_and(|found| found.reason != Reason::PoweredOff)
            }
            _ => false,
        },
        Fact::Init(line) => line.name == names::GPU_FAILED,
        Fact::Runtime(event) => event.name == logged::SANDBOX_FAILED,
        Fact::Agent(_) => false,
    };
    log.items.iter().any(is_failure)
}

/// Release of the kernel that starts with this line.
fn release(item: &Item) -> Option<&str> {
    match &item.fact {
        Fact::Kernel {
            meaning: Meaning::Banner { release },
            ..
        } => Some(release),
        _ => None,
    }
}

/// The logs without facts that several files have (the journal carries the console) or that the
/// boot's file has.
fn without_copies(sources: &mut [Source], boot: Option<&BootFile>) -> Vec<Log> {
    let records = boot.into_iter().flat_map(|boot| &boot.records);
    let of_boot: HashSet<(i64, &str)> = records
        .filter_map(|record| {
            let printk_us = record.fields.signed("printk_us")?;
            Some((printk_us.checked_mul(1000)?, record.kmsg_text()))
        })
        .collect();
    let mut seen = HashSet::new();
    // First those that also state when the host read their lines.
    let mut order: Vec<&mut Source> = sources.iter_mut().collect();
    order.sort_by_key(|source| source.kind != CONTAINERD);
    let mut logs = Vec::new();
    for source in order {
        let mut seen_here = HashSet::new();
        let mut log = source.logs.pop().unwrap_or_default();
        log.items.retain(|item| {
            let key = (item.stamp, format!("{:?}", item.fact));
            let is_copy = seen.contains(&key)
                || match (&item.fact, item.stamp) {
                    (Fact::Init(_), _) => boot.is_some(),
                    (Fact::Kernel { text, .. }, Stamp::Kernel(ns)) => {
                        of_boot.contains(&(ns, text.as_str()))
                    }
                    _ => false,
                };
            seen_here.insert(key);
            !is_copy
        });
        seen.extend(seen_here);
        logs.push(log);
    }
    logs
}

/// The report for people.
fn warnings(imported: &Imported, notes: Vec<String>) -> Vec<String> {
    let file = |file: &ImportedFile| {
        let (name, kind) = (&file.file, &file.format);
        format!(
            "{name}: {kind}, {} of {} lines recognised",
            file.recognised, file.lines
        )
    };
    let mut all: Vec<String> = imported.files.iter().map(file).collect();
    all.extend(imported.clocks.iter().map(|clock| {
        let error = error_bound(clock.error_ns);
        format!("{} clock {error}: {}", clock.clock, clock.by)
    }));
    all.extend(notes);
    all
}
