//! One file with logs, of whichever kind, into the facts of its boots.
//!
//! Each line is recognised by itself: a console's, or an entry of the log of containerd (or CRI-O)
//! and Kata's shims, as text (any `journalctl -o`, or a log file), as `journalctl -o json`, or as
//! containerd's own JSON lines. An entry has containerd's `time=` (the host's clock: when the shim
//! read it); its `vmconsole=` is a line of the console of the guest whose `sandbox=` it names. A
//! file that begins with a stream's header is a boot's own.

use super::console_lines::{Console, kernel_line};
use super::facts::{Item, Log, MAX_FACTS, Stamp};
use super::log_files::{MAX_BYTES, for_each_line};
use super::runtime_lines::Runtime;
use crate::data::agent_log::line::realtime_ns;
use crate::data::boot_file::BootFile;
use crate::data::containerd_log;
use crate::data::containerd_log::Entry;
use anyhow::Result;
use std::collections::{BTreeMap, HashSet};
use std::hash::BuildHasher;
use std::io::BufRead;

/// Most sandboxes that are distinguished in one journal.
const MAX_SANDBOXES: usize = 1000;
/// Most entries that are remembered to find copies.
const MAX_SEEN: usize = 1 << 20;

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
            let line = line.map(str::trim);
            lines += u64::from(line != Some(""));
            recognised += u64::from(line.is_some_and(|line| reader.line(number, line)));
        })?;
        let logs = reader.finish();
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
            recognised,
            ended_early,
        })
    }
}

#[derive(Default)]
struct Sandbox {
    console: Console,
    host: Vec<Item>,
}

#[derive(Default)]
struct Reader {
    /// The file's own lines of a console.
    console: Console,
    sandboxes: BTreeMap<String, Sandbox>,
    runtime: Runtime,
    /// Hashes of entries: journals have each line of the Go shim twice, as the shim's and as
    /// containerd's.
    seen: HashSet<u64>,
}

impl Reader {
    /// Takes a line; true if it states something.
    fn line(&mut self, number: u64, line: &str) -> bool {
        let Some(entry) = is_entry(line)
            .then(|| containerd_log::entry(line))
            .flatten()
        else {
            return self.console.line(number, line, None);
        };
        // The time at which containerd wrote the entry, or else at which the journal took it.
        let time = entry.get("time").and_then(realtime_ns);
        let Some(at) = time.or(entry.journal_ns) else {
            return false;
        };
        if self.is_copy(at, &entry) {
            return false;
        }
        let sandboxes = &mut self.sandboxes;
        if let Some((id, text)) = entry.console() {
            let sandbox = sandbox_of(sandboxes, id);
            return sandbox.is_some_and(|sandbox| sandbox.console.line(number, text, Some(at)));
        }
        let mut recognised = false;
        self.runtime.line(number, at, &entry, |id, item| {
            if let Some(sandbox) = sandbox_of(sandboxes, id)
                && sandbox.host.len() < MAX_FACTS
            {
                recognised = true;
                sandbox.host.push(item);
            }
        });
        recognised
    }

    fn is_copy(&mut self, at: i64, entry: &Entry) -> bool {
        if self.seen.len() >= MAX_SEEN {
            self.seen.clear();
        }
        let hash = self.seen.hasher().hash_one((at, entry.fields()));
        !self.seen.insert(hash)
    }

    fn finish(self) -> Vec<Log> {
        let mut logs = self.console.finish(None);
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
        // Sandboxes that never showed a console are other runtimes', or not Kata's GPU guests.
        let of_guest = |log: &Log| log.items.iter().any(|i| !matches!(i.stamp, Stamp::Host(_)));
        if logs.iter().any(of_guest) {
            logs.retain(of_guest);
        }
        logs.retain(|log| !log.items.is_empty());
        logs.sort_by_key(|log| log.items.iter().map(|item| item.line).min());
        logs
    }
}

/// Whether a line is an entry of the journal or of containerd's log, and no console's.
fn is_entry(line: &str) -> bool {
    if line.starts_with('{') {
        let keys = ["\"MESSAGE\":", "\"__REALTIME_TIMESTAMP\":", "\"time\":"];
        return keys.iter().any(|key| line.contains(key));
    }
    line.contains("time=\"") && line.contains(" level=") && kernel_line(line).is_none()
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
    fn a_sandbox_cannot_be_named_by_anything_else_than_an_id() {
        let source = read(&LINE.replace("sandbox=abc", "sandbox=../../x"));
        assert_eq!((source.logs.len(), source.recognised), (0, 0));
    }
}
