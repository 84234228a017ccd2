//! Format `journal`: the journal or log of containerd (or CRI-O) with the lines of Kata's shim,
//! which carry the guest's console as `vmconsole=` and name the sandbox. As text (any `journalctl
//! -o`, or a log file), as `journalctl -o json`, or as containerd's own JSON lines.
//!
//! Each line has two times: containerd's `time=` (RFC 3339, the host's clock: when the shim read
//! it) and the console line's own. `sandbox=` names the sandbox of a line;
//! [`super::runtime_lines`] finds the sandbox of containerd's own lines.

use super::console_lines::Console;
use super::item::{Count, Fact, Item, Log, MAX_ITEMS, Skip, Stamp};
use super::log_files::{Input, Text};
use super::runtime_lines::{Runtime, Said};
use crate::data::agent_log::line::realtime_ns;
use crate::data::containerd_log;
use crate::data::containerd_log::Entry;
use crate::data::imported_record::Format;
use anyhow::Result;
use std::collections::BTreeMap;

/// Most sandboxes that are distinguished in one journal.
const MAX_SANDBOXES: usize = 1000;
/// Most lines between the two copies of a line: the Go shim writes its first lines twice.
const REPEATED: usize = 16;

#[derive(Default)]
struct Sandbox {
    console: Option<Console>,
    host: Vec<Item>,
}

/// Reads a journal: one entry per boot that is in it.
pub fn read(input: Input) -> Result<(Vec<Log>, Count)> {
    let mut journal = Journal::default();
    let cut = input.lines(|number, text| match text {
        Text::Line(line) => journal.line(number, line),
        Text::TooLong => {
            journal.count.lines += 1;
            journal.count.skip(Skip::TooLong);
        }
    })?;
    journal.count.cut = cut;
    Ok(journal.finish())
}

#[derive(Default)]
struct Journal {
    sandboxes: BTreeMap<String, Sandbox>,
    runtime: Runtime,
    count: Count,
    kept: usize,
}

/// Time at which containerd wrote the entry, or else at which the journal took it.
fn time(entry: &Entry) -> Option<i64> {
    entry.get("time").and_then(realtime_ns).or(entry.journal_ns)
}

impl Journal {
    fn line(&mut self, number: u64, line: &str) {
        let line = line.trim();
        if line.is_empty() {
            self.count.lines += 1;
            return self.count.skip(Skip::Empty);
        }
        let Some(entry) = containerd_log::entry(line) else {
            self.count.lines += 1;
            return self.count.skip(Skip::NotOfTheFormat);
        };
        let Some(at) = time(&entry) else {
            self.count.lines += 1;
            return self.count.skip(Skip::NoStamp);
        };
        if let Some((sandbox, text)) = entry.console() {
            let Some(sandbox) = sandbox_of(&mut self.sandboxes, sandbox) else {
                self.count.lines += 1;
                return self.count.skip(Skip::LimitReached);
            };
            let console = sandbox
                .console
                .get_or_insert_with(|| Console::new(Format::Journal));
            return console.line(number, text, Some(at), &mut self.count);
        }
        self.count.lines += 1;
        let Self {
            sandboxes,
            runtime,
            count,
            kept,
        } = self;
        let mut about_nothing = true;
        let waits = runtime.line(number, at, &entry, |said| {
            about_nothing = false;
            keep(sandboxes, count, kept, said);
        });
        if about_nothing && !waits {
            self.count.skip(Skip::OtherProgram);
        }
    }

    fn finish(mut self) -> (Vec<Log>, Count) {
        self.count
            .skip_many(Skip::OtherProgram, self.runtime.unanswered());
        let mut logs = Vec::new();
        for (id, sandbox) in self.sandboxes {
            let mut boots = sandbox
                .console
                .map(|c| c.finish(Some(&id)))
                .unwrap_or_default();
            match boots.as_mut_slice() {
                [] => boots.push(Log {
                    sandbox: Some(id),
                    items: sandbox.host,
                }),
                [first, ..] => first.items.extend(sandbox.host),
            }
            logs.extend(boots);
        }
        (logs, self.count)
    }
}

fn keep(
    sandboxes: &mut BTreeMap<String, Sandbox>,
    count: &mut Count,
    kept: &mut usize,
    said: Said,
) {
    let Said {
        sandbox,
        line,
        at,
        name,
        level,
        error,
        fields,
    } = said;
    match sandbox_of(sandboxes, &sandbox).filter(|_| *kept < MAX_ITEMS) {
        None => count.skip(Skip::LimitReached),
        Some(sandbox) => {
            let item = Item::new(
                Stamp::Host(at),
                Format::Journal,
                line,
                Fact::Plain {
                    name,
                    level,
                    error,
                    fields,
                },
            );
            if sandbox
                .host
                .iter()
                .rev()
                .take(REPEATED)
                .any(|other| other.stamp == item.stamp && other.fact == item.fact)
            {
                return count.skip(Skip::AlreadyThere);
            }
            *kept += 1;
            count.recognised += 1;
            sandbox.host.push(item);
        }
    }
}

fn sandbox_of<'a>(
    sandboxes: &'a mut BTreeMap<String, Sandbox>,
    id: &str,
) -> Option<&'a mut Sandbox> {
    // An id is hexadecimal digits from the runtime, or a name from an operator.
    let plausible = !id.is_empty()
        && id.len() <= 128
        && id
            .bytes()
            .all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.'));
    if !plausible || (sandboxes.len() >= MAX_SANDBOXES && !sandboxes.contains_key(id)) {
        return None;
    }
    Some(sandboxes.entry(id.to_string()).or_default())
}

#[cfg(test)]
mod tests {
    use super::*;
    use kata_gpu_wire::catalogue::logged as names;
    use serde_json::Value;

    fn read_text(text: &str) -> (Vec<Log>, Count) {
        read(
            Input::new(
                "x",
                Box::new(std::io::Cursor::new(text.as_bytes().to_vec())),
            )
            .unwrap(),
        )
        .unwrap()
    }

    const LINE: &str = r#"time="2026-01-02T03:04:05.000000001Z" level=debug msg="reading guest console" console-protocol=unix sandbox=abc source=virtcontainers vmconsole="[    0.000000] Linux version 6.12""#;

    #[test]
    fn text_journald_json_and_containerds_json_are_equal() {
        let message = Value::from(LINE).to_string();
        let bytes = Value::from(LINE.bytes().map(u64::from).collect::<Vec<_>>()).to_string();
        let own = r#"{"time":"2026-01-02T03:04:05.000000001Z","level":"debug","msg":"reading guest console","sandbox":"abc","vmconsole":"[    0.000000] Linux version 6.12"}"#;
        let forms = [
            LINE.to_string(),
            format!("Jan 02 03:04:05 node containerd[77]: {LINE}"),
            format!(
                r#"{{"__REALTIME_TIMESTAMP":"1767323045000000","MESSAGE":{message},"_PID":"7"}}"#
            ),
            format!(r#"{{"MESSAGE":{bytes}}}"#),
            own.to_string(),
        ];
        for form in forms {
            let (logs, count) = read_text(&form);
            assert_eq!((count.lines, count.recognised), (1, 1), "{form}");
            assert_eq!(logs[0].sandbox.as_deref(), Some("abc"));
            assert_eq!(
                logs[0].items[0].read_ns,
                Some(1_767_323_045_000_000_001),
                "{form}"
            );
        }
    }

    #[test]
    fn sandboxes_are_kept_apart() {
        let other = LINE.replace("sandbox=abc", "sandbox=def");
        let (logs, _) = read_text(&format!("{LINE}\n{other}\n{LINE}\n"));
        let found: Vec<_> = logs
            .iter()
            .map(|l| (l.sandbox.clone().unwrap(), l.items.len()))
            .collect();
        assert_eq!(
            found,
            [
                ("abc".to_string(), 1),
                ("abc".to_string(), 1),
                ("def".to_string(), 1)
            ]
        );
    }

    #[test]
    fn the_runtimes_own_milestones_find_their_sandbox() {
        let text = concat!(
            r#"time="2026-01-02T03:04:05Z" level=info msg="VM started" name=containerd-shim-v2 sandbox=abc source=virtcontainers subsystem=sandbox"#,
            "\n",
            r#"time="2026-01-02T03:04:06Z" level=info msg="RunPodSandbox for &PodSandboxMetadata{Name:train,Uid:1,Namespace:ml,Attempt:0,} returns sandbox id \"abc\"""#,
            "\n",
            r#"time="2026-01-02T03:04:07Z" level=info msg="CreateContainer within sandbox \"abc\" for container &ContainerMetadata{Name:cuda,Attempt:0,}""#,
            "\n",
            r#"time="2026-01-02T03:04:08Z" level=info msg="something else" sandbox=abc"#,
            "\n",
        );
        let (logs, count) = read_text(text);
        let names: Vec<_> = logs[0]
            .items
            .iter()
            .map(|i| {
                if let Fact::Plain { name, .. } = &i.fact {
                    name
                } else {
                    "?"
                }
            })
            .collect();
        assert_eq!(
            names,
            [
                names::SANDBOX_VM_STARTED,
                names::SANDBOX_READY,
                names::SANDBOX_RUN
            ]
        );
        assert_eq!(count.skipped, [(Skip::OtherProgram, 1)].into());
    }

    #[test]
    fn a_sandbox_cannot_be_named_by_anything_else_than_an_id() {
        let (logs, count) = read_text(&LINE.replace("sandbox=abc", "sandbox=../../x"));
        assert_eq!(
            (logs.len(), count.skipped),
            (0, [(Skip::LimitReached, 1)].into())
        );
    }
}
