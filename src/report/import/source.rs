//! One file with logs, of whichever kind, into the facts of its boots.
//!
//! Each line is recognised by itself, without the stamps and names before it ([`line_prefix`]): a
//! console's or the kernel's, or an entry of the log of containerd (or CRI-O) and Kata's shims, as
//! text, as `journalctl -o json`, `-o export` or `-o verbose`, or as containerd's own JSON lines.
//! Such an entry has containerd's `time=` (the host's clock: when the shim read it); its
//! `vmconsole=` is a line of the console of the guest whose `sandbox=` it names. The kubelet's
//! lines and the events of a pod have the error of its sandbox, and no more. A file that begins
//! with a stream's header is a boot's own.
//!
//! Entries of the runtime are read in the order of their times: `journalctl` may give the shim's
//! and containerd's in blocks.
//!
//! [`line_prefix`]: crate::data::line_prefix

use super::console_lines::Console;
use super::facts::{Fact, Item, Log, MAX_FACTS, Stamp};
use super::kernel_lines;
use super::kernel_lines::Meaning;
use super::log_files::{MAX_BYTES, for_each_line};
use super::runtime_lines::Runtime;
use super::unrecognised::Unrecognised;
use crate::data::agent_log::line::realtime_ns;
use crate::data::boot_file::BootFile;
use crate::data::containerd_log;
use crate::data::containerd_log::{Entry, POD, POD_ERROR};
use crate::data::journal_blocks::Blocks;
use crate::data::line_prefix::{Line, Program, strip, strip_console, without_escapes};
use crate::data::pod_errors;
use anyhow::Result;
use kata_gpu_wire::catalogue::logged;
use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::hash::BuildHasher;
use std::io::BufRead;

/// Most sandboxes that are distinguished in one journal.
const MAX_SANDBOXES: usize = 1000;
/// Most entries that are remembered to find copies.
const MAX_SEEN: usize = 1 << 20;
/// Most seconds of one sandbox in which its console had lines.
const MAX_SECONDS: usize = 100_000;
/// Age of the last line of a console at which its guest still works.
const ALIVE_S: i64 = 5;

/// Kind of a log that also has the times at which the host read the guest's lines.
pub const CONTAINERD: &str = "containerd's log";

/// A file, read.
#[derive(Debug, Default)]
pub struct Source {
    pub name: String,
    /// Kind of the file, for people.
    pub kind: &'static str,
    /// In the order in which they begin.
    pub logs: Vec<Log>,
    pub boot: Option<BootFile>,
    /// Number of lines that are not empty.
    pub lines: u64,
    /// Number of those that state something.
    pub recognised: u64,
    /// Kinds of the others.
    pub others: Unrecognised,
    /// Reason for which reading stopped before the end of the file.
    pub ended_early: Option<String>,
}

impl Source {
    pub fn read(name: &str, mut from: impl BufRead) -> Result<Self> {
        let name = name.to_string();
        // A damaged gzip file is the line reader's to judge.
        let is_boot = |head: &[u8]| head.trim_ascii_start().starts_with(b"{\"schema\":");
        if from.fill_buf().is_ok_and(is_boot) {
            let boot = BootFile::read(from.take(MAX_BYTES))?;
            let known = boot.records.len() + boot.host.len() + usize::from(boot.header.is_some());
            return Ok(Self {
                name,
                kind: "boot file",
                lines: known as u64 + boot.damaged,
                recognised: known as u64,
                boot: Some(boot),
                ..Self::default()
            });
        }
        let mut reader = Reader::default();
        let (mut lines, mut recognised) = (0, 0);
        let ended_early = for_each_line(&name, from, |number, line| {
            lines += u64::from(line.is_none_or(|line| !line.trim().is_empty()));
            recognised += u64::from(line.is_some_and(|line| reader.line(number, line)));
        })?;
        let others = std::mem::take(&mut reader.others);
        let (logs, of_runtime) = reader.finish();
        let has_sandbox = logs.iter().any(|log| log.sandbox.is_some());
        Ok(Self {
            name,
            kind: if has_sandbox {
                CONTAINERD
            } else {
                "console log"
            },
            logs,
            boot: None,
            lines,
            recognised: recognised + of_runtime,
            others,
            ended_early,
        })
    }
}

#[derive(Default)]
struct Sandbox {
    console: Console,
    host: Vec<Item>,
    /// Seconds in which the console had lines, of whatever meaning.
    heard_s: BTreeSet<i64>,
    /// Time at which the console showed the guest's end.
    ended: Option<i64>,
}

impl Sandbox {
    fn is_alive(&self, at: i64) -> bool {
        let at_s = at.div_euclid(1_000_000_000);
        let recent = self.heard_s.range(at_s.saturating_sub(ALIVE_S)..=at_s);
        let has_ended = self.ended.is_some_and(|ended| ended <= at);
        recent.into_iter().next().is_some() && !has_ended
    }
}

#[derive(Default)]
struct Reader {
    /// The file's own lines of a console or kernel.
    console: Console,
    /// Whether these are of a journal.
    is_journals: bool,
    sandboxes: BTreeMap<String, Sandbox>,
    /// Entries of the runtime, with times and lines.
    entries: Vec<(i64, u64, Entry)>,
    /// Hashes of entries: journals have each line of the Go shim twice, as the shim's and as
    /// containerd's.
    seen: HashSet<u64>,
    others: Unrecognised,
    /// The entry of several lines that is being read.
    blocks: Blocks,
    /// Number of the last line.
    last: u64,
}

impl Reader {
    /// Takes a line; true if it states something by itself.
    fn line(&mut self, number: u64, raw: &str) -> bool {
        let mut blocks = std::mem::take(&mut self.blocks);
        let mut taken = false;
        let is_part = blocks.take(raw.trim_end_matches(['\r', '\n']), |entry| {
            taken = self.json(number, &entry);
        });
        (self.blocks, self.last) = (blocks, number);
        taken | (!is_part && self.single_line(number, raw))
    }

    /// Takes a line that is an entry by itself.
    fn single_line(&mut self, number: u64, raw: &str) -> bool {
        let clean = without_escapes(raw);
        let json = clean.trim_start();
        if json.starts_with('{') {
            return self.json(number, json);
        }
        let line = strip(&clean);
        let taken = match line.program {
            Some(Program::Named(_)) => self.text_entry(number, &line).unwrap_or(false),
            Some(Program::Kernel) => {
                self.is_journals = true;
                self.console.line(number, &line, None)
            }
            None => match self.text_entry(number, &line) {
                Some(taken) => taken,
                None => self.console.line(number, &line, None),
            },
        };
        if !taken {
            self.others.add(&line);
        }
        taken
    }

    fn json(&mut self, number: u64, json: &str) -> bool {
        if let Some((clock, text)) = containerd_log::kernel_message(json) {
            self.is_journals = true;
            let line = Line {
                clock: Some(clock),
                ..strip_console(&text)
            };
            return self.console.line(number, &line, None);
        }
        let keys = ["\"MESSAGE\":", "\"__REALTIME_TIMESTAMP\":", "\"time\":"];
        let is_entry = keys.iter().any(|key| json.contains(key));
        match is_entry.then(|| containerd_log::entry(json)).flatten() {
            Some(entry) => self.entry(number, entry),
            None => self.console.line(number, &strip_console(json), None),
        }
    }

    /// Takes an entry in text; None for a line that is none.
    fn text_entry(&mut self, number: u64, line: &Line) -> Option<bool> {
        let is_pods = || pod_errors::of(line.text).is_some();
        if !line.text.contains("time=\"") && line.program.is_none() && !is_pods() {
            return None;
        }
        let entry = containerd_log::text_entry(line)?;
        // A guest's tools log in the same format on its console.
        let is_runtimes = line.program.is_some() || Runtime::knows(&entry);
        is_runtimes.then(|| self.entry(number, entry))
    }

    /// Takes an entry; true if it is a console's line that states something.
    fn entry(&mut self, number: u64, entry: Entry) -> bool {
        // The time at which containerd wrote the entry, or else at which the journal took it.
        let time = entry.get("time").and_then(realtime_ns);
        let Some(at) = time.or(entry.journal_ns) else {
            return false;
        };
        if self.is_copy(at, &entry) {
            return false;
        }
        let Some((id, text)) = entry.console() else {
            if Runtime::knows(&entry) && self.entries.len() < MAX_FACTS {
                self.entries.push((at, number, entry));
            }
            return false;
        };
        let Some(sandbox) = sandbox_of(&mut self.sandboxes, id) else {
            return false;
        };
        if sandbox.heard_s.len() < MAX_SECONDS {
            sandbox.heard_s.insert(at.div_euclid(1_000_000_000));
        }
        let text = without_escapes(text);
        let line = strip_console(&text);
        if kernel_lines::meaning(line.text) == Some(Meaning::Ended) {
            sandbox.ended = sandbox.ended.or(Some(at));
        }
        sandbox.console.line(number, &line, Some(at))
    }

    fn is_copy(&mut self, at: i64, entry: &Entry) -> bool {
        if self.seen.len() >= MAX_SEEN {
            self.seen.clear();
        }
        let mut fields: Vec<_> = entry.fields().iter().collect();
        fields.sort_unstable();
        let hash = self.seen.hasher().hash_one((at, fields));
        !self.seen.insert(hash)
    }

    /// The boots, and the number of the runtime's lines that state something.
    fn finish(mut self) -> (Vec<Log>, u64) {
        std::mem::take(&mut self.blocks).finish(|entry| {
            self.json(self.last, &entry);
        });
        let stated = self.runtimes();
        let own = self.console.finish(None);
        let mut logs = Vec::new();
        for (id, sandbox) in self.sandboxes {
            let mut boots = sandbox.console.finish(Some(&id));
            match boots.first_mut() {
                Some(first) => first.items.extend(sandbox.host),
                None => boots.push(Log {
                    sandbox: Some(id),
                    items: sandbox.host,
                }),
            }
            logs.extend(boots);
        }
        // Sandboxes that never showed a console are other runtimes', or not Kata's GPU guests:
        // only their failures are worth a boot.
        let of_guest = |log: &Log| log.items.iter().any(|i| !matches!(i.stamp, Stamp::Host(_)));
        if logs.iter().chain(&own).any(of_guest) {
            logs.retain(|log| of_guest(log) || log.items.iter().any(is_failure));
        }
        logs.retain(|log| !log.items.is_empty());
        // In a journal with sandboxes, the kernel is the host's.
        if logs.is_empty() || !self.is_journals {
            logs.extend(own);
        }
        logs.sort_by_key(|log| log.items.iter().map(|item| item.line).min());
        (logs, stated)
    }

    /// Reads the runtime's entries.
    fn runtimes(&mut self) -> u64 {
        let mut entries = std::mem::take(&mut self.entries);
        // Errors of pods repeat a runtime's, and those without a name repeat others.
        let repeats = |entry: &Entry| {
            let is_pods = entry.get(POD_ERROR).is_some();
            (is_pods, is_pods && entry.get(POD).is_none())
        };
        entries.sort_by_key(|(at, _, entry)| (repeats(entry), *at));
        let mut runtime = Runtime::default();
        let mut stated = HashSet::new();
        for (at, number, entry) in &entries {
            let sandboxes = &self.sandboxes;
            let is_alive = |id: &str, at| {
                sandboxes
                    .get(id)
                    .is_some_and(|sandbox| sandbox.is_alive(at))
            };
            let mut events: Vec<(String, Item)> = Vec::new();
            runtime.line(*number, *at, entry, &is_alive, |id, item| {
                events.push((id.to_string(), item));
            });
            for (id, item) in events {
                if let Some(sandbox) = sandbox_of(&mut self.sandboxes, &id)
                    && sandbox.host.len() < MAX_FACTS
                {
                    stated.insert(item.line);
                    sandbox.host.push(item);
                }
            }
        }
        stated.len() as u64
    }
}

fn is_failure(item: &Item) -> bool {
    matches!(&item.fact, Fact::Runtime(event) if event.name == logged::SANDBOX_FAILED)
}

fn sandbox_of<'a>(
    sandboxes: &'a mut BTreeMap<String, Sandbox>,
    id: &str,
) -> Option<&'a mut Sandbox> {
    // An id is hexadecimal digits from the runtime, or a name from an operator.
    let is_id = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.');
    let plausible = (1..=128).contains(&id.len()) && id.bytes().all(is_id);
    if !plausible || (sandboxes.len() >= MAX_SANDBOXES && !sandboxes.contains_key(id)) {
        return None;
    }
    Some(sandboxes.entry(id.to_string()).or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Source {
        Source::read("x", text.as_bytes()).unwrap()
    }

    const LINE: &str = "time=\"2026-01-02T03:04:05.000000001Z\" level=debug msg=\"reading guest \
        console\" console-protocol=unix sandbox=abc source=virtcontainers vmconsole=\"[    \
        0.000000] Linux version 6.12\"";

    #[test]
    fn each_kind_of_file_is_recognised_by_its_lines() {
        let kind = |text: &str| {
            let source = read(text);
            (source.kind, source.recognised)
        };
        assert_eq!(
            kind("[    0.000000] Linux version 6.1\n"),
            ("console log", 1)
        );
        assert_eq!(kind(LINE), ("containerd's log", 1));
        let header = "{\"schema\":1,\"stream\":{\"boot_id\":\"c60fc8cf-9131-4483-823d-2c0f89d3de98\
            \",\"version\":\"1\",\"kernel\":\"6\",\"first_seq\":0}}";
        assert_eq!(kind(&format!("{header}\n")), ("boot file", 1));
        // A guest's console may hold lines of nvidia-ctk, which look like containerd's.
        let ctk = "[    1.000000] time=\"2026-01-02T03:04:05Z\" level=info msg=\"Generated CDI \
            spec with version 0.5.0\"";
        assert_eq!(kind(ctk), ("console log", 1));
        for junk in ["hello\nworld\n", "\u{fffd}\u{0}\u{1}", ""] {
            assert_eq!(read(junk).recognised, 0, "{junk:?}");
        }
    }

    #[test]
    fn sandboxes_are_kept_apart_and_copies_of_entries_dropped() {
        let later = LINE.replace("05.000000001Z", "06.000000001Z");
        let other = LINE.replace("sandbox=abc", "sandbox=0a");
        let lines = [LINE, &other, &later].map(|line| {
            ["kata[7]", "containerd[8]"].map(|by| format!("Jan 02 03:04:05 node {by}: {line}\n"))
        });
        let source = read(&lines.concat().concat());
        let found: Vec<_> = source
            .logs
            .iter()
            .map(|log| (log.sandbox.as_deref().unwrap(), log.items.len()))
            .collect();
        assert_eq!(found, [("abc", 1), ("0a", 1), ("abc", 1)]);
        assert_eq!((source.lines, source.recognised), (6, 3));
    }

    #[test]
    fn errors_of_pods_are_news_only_without_the_runtimes_own() {
        const WORDS: &str = "failed to create shim task: timed out connecting to vsock 7:1024";
        let of_kubelet = |pod: &str| {
            format!(
                "Feb 19 15:00:20 node kubelet[1]: E0219 15:00:20.1 1 log.go:32] \"RunPodSandbox from \
                 runtime service failed\" err=\"rpc error: code = Unknown desc = {WORDS}\"{pod}\n"
            )
        };
        let pods = [r#""#, r#" pod="ml/a""#, r#" pod="ml/a""#, r#" pod="ml/b""#].map(of_kubelet);
        let names = |text: &str| -> Vec<String> {
            let logs = read(text).logs.into_iter();
            logs.filter_map(|log| log.sandbox).collect()
        };
        assert_eq!(names(&pods.concat()), ["a", "b"]);
        assert_eq!(names(&pods[0]), ["pod"]);
        let shims = format!(
            "time=\"2026-02-19T15:00:21Z\" level=error msg=\"Cannot start VM\" sandbox=abc \
             error=\"{WORDS}\"\n"
        );
        assert_eq!(names(&(pods.concat() + &shims)), ["abc"]);
        let others = pods
            .concat()
            .replace("RunPodSandbox from", "PullImage from");
        assert!(read(&others).logs.is_empty());
    }

    #[test]
    fn a_sandbox_cannot_be_named_by_anything_else_than_an_id() {
        let source = read(&LINE.replace("sandbox=abc", "sandbox=../../x"));
        assert_eq!((source.logs.len(), source.recognised), (0, 0));
    }
}
