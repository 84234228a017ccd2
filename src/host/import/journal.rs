//! Format `journal`: the journal or log of containerd (or CRI-O) with the lines of Kata's shim, which carry the guest's console as `vmconsole=`
//! and name the sandbox. As text (any `journalctl -o`, or a log file), as `journalctl -o json`, or as containerd's own JSON lines.
//!
//! Each line has two times: containerd's `time=` (RFC 3339, the host's clock: when the shim read it) and the console line's own. Sandboxes are
//! told apart by `sandbox=`; what has none and is about a sandbox by its text (containerd's own lines) goes where the text says.

use super::console::Console;
use super::input::{Input, Text};
use super::item::{Count, Fact, Format, Item, Log, MAX_ITEMS, Skip, Stamp};
use super::names;
use crate::events::record::Level;
use crate::host::agent_log::line::realtime_ns;
use crate::host::containerd_log::{self, Entry};
use anyhow::Result;
use serde_json::{Map, Value};
use std::collections::BTreeMap;

/// Sandboxes of one journal that are told apart.
const MAX_SANDBOXES: usize = 1000;
/// Longest text of one field.
const MAX_VALUE: usize = 300;

/// What the shim says about a VM, and the name of it here.
const SHIM: &[(&str, &str)] = &[
    ("Starting VM", names::SANDBOX_VM_STARTING),
    ("VM started", names::SANDBOX_VM_STARTED),
    ("Agent started in the sandbox", names::SANDBOX_AGENT_STARTED),
    ("Sandbox is started", names::SANDBOX_STARTED),
];

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
    count: Count,
    kept: usize,
}

/// When containerd wrote it, or else when the journal took it.
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
            let console = sandbox.console.get_or_insert_with(|| Console::new(Format::Journal));
            return console.line(number, text, Some(at), &mut self.count);
        }
        self.count.lines += 1;
        let Some((id, name, level, error, fields)) = host_fact(&entry) else {
            return self.count.skip(Skip::OtherProgram);
        };
        match sandbox_of(&mut self.sandboxes, &id) {
            Some(sandbox) if self.kept < MAX_ITEMS => {
                self.kept += 1;
                self.count.recognised += 1;
                sandbox.host.push(Item::new(Stamp::Host(at), Format::Journal, number, Fact::Plain { name, level, error, fields }));
            }
            _ => self.count.skip(Skip::LimitReached),
        }
    }

    fn finish(self) -> (Vec<Log>, Count) {
        let mut logs = Vec::new();
        for (id, sandbox) in self.sandboxes {
            let mut boots = sandbox.console.map(|c| c.finish(Some(&id))).unwrap_or_default();
            match boots.as_mut_slice() {
                [] => boots.push(Log { sandbox: Some(id), items: sandbox.host }),
                [first, ..] => first.items.extend(sandbox.host),
            }
            logs.extend(boots);
        }
        (logs, self.count)
    }
}

fn sandbox_of<'a>(sandboxes: &'a mut BTreeMap<String, Sandbox>, id: &str) -> Option<&'a mut Sandbox> {
    // An id is what the runtime made of hexadecimal digits, or a name that an operator gave.
    let plausible = !id.is_empty() && id.len() <= 128 && id.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.'));
    if !plausible || (sandboxes.len() >= MAX_SANDBOXES && !sandboxes.contains_key(id)) {
        return None;
    }
    Some(sandboxes.entry(id.to_string()).or_default())
}

type HostFact = (String, &'static str, Level, Option<String>, Map<String, Value>);

/// What the runtime says about a sandbox: its id, and the record.
fn host_fact(entry: &Entry) -> Option<HostFact> {
    let msg = entry.get("msg")?;
    let cut = |text: &str| text.chars().take(MAX_VALUE).collect::<String>();
    let fields = |pairs: &[(&str, &str)]| pairs.iter().map(|(k, v)| (k.to_string(), Value::from(cut(v)))).collect::<Map<_, _>>();
    if let Some(sandbox) = entry.get("sandbox") {
        let sandbox = sandbox.to_string();
        if let Some((_, name)) = SHIM.iter().find(|(text, _)| *text == msg) {
            return Some((sandbox, name, Level::Info, None, Map::new()));
        }
        if msg == "Container is started" {
            let container = fields(&[("container", short(entry.get("container")?))]);
            return Some((sandbox, names::SANDBOX_CONTAINER_STARTED, Level::Info, None, container));
        }
        let error = entry.get("error").filter(|e| e.contains("failed to inject devices after CDI timeout"))?;
        return Some((sandbox, names::SANDBOX_FAILED, Level::Error, Some(cut(error)), Map::new()));
    }
    // containerd's own: the sandbox's id is known when it returns.
    if msg.starts_with("RunPodSandbox for ")
        && let Some((_, id)) = msg.split_once("returns sandbox id ")
    {
        return Some((
            id.trim_matches('"').to_string(),
            names::SANDBOX_READY,
            Level::Info,
            None,
            fields(&[("pod", pod_name(msg).unwrap_or("?"))]),
        ));
    }
    let within = msg.strip_prefix("CreateContainer within sandbox \"")?;
    let (id, rest) = within.split_once('"')?;
    let container = rest.split_once("Name:").and_then(|(_, name)| name.split(',').next()).unwrap_or("?");
    if let Some((_, returned)) = rest.split_once("returns container id ") {
        let named = fields(&[("container", container), ("id", short(returned.trim_matches('"'))), ("call", "CreateContainer returned")]);
        return Some((id.to_string(), names::SANDBOX_RUN, Level::Info, None, named));
    }
    Some((id.to_string(), names::SANDBOX_RUN, Level::Info, None, fields(&[("container", container), ("call", "CreateContainer")])))
}

/// `&PodSandboxMetadata{Name:nginx,Uid:..}`.
fn pod_name(msg: &str) -> Option<&str> {
    msg.split_once("Name:")?.1.split([',', '}']).next()
}

fn short(id: &str) -> &str {
    id.get(..12).unwrap_or(id)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read_text(text: &str) -> (Vec<Log>, Count) {
        read(Input::new("x", Box::new(std::io::Cursor::new(text.as_bytes().to_vec()))).unwrap()).unwrap()
    }

    const LINE: &str = r#"time="2026-01-02T03:04:05.000000001Z" level=debug msg="reading guest console" console-protocol=unix sandbox=abc source=virtcontainers vmconsole="[    0.000000] Linux version 6.12""#;

    #[test]
    fn text_journald_json_and_containerds_json_say_the_same() {
        let message = Value::from(LINE).to_string();
        let bytes = Value::from(LINE.bytes().map(u64::from).collect::<Vec<_>>()).to_string();
        let own = r#"{"time":"2026-01-02T03:04:05.000000001Z","level":"debug","msg":"reading guest console","sandbox":"abc","vmconsole":"[    0.000000] Linux version 6.12"}"#;
        let forms = [
            LINE.to_string(),
            format!("Jan 02 03:04:05 node containerd[77]: {LINE}"),
            format!(r#"{{"__REALTIME_TIMESTAMP":"1767323045000000","MESSAGE":{message},"_PID":"7"}}"#),
            format!(r#"{{"MESSAGE":{bytes}}}"#),
            own.to_string(),
        ];
        for form in forms {
            let (logs, count) = read_text(&form);
            assert_eq!((count.lines, count.recognised), (1, 1), "{form}");
            assert_eq!(logs[0].sandbox.as_deref(), Some("abc"));
            assert_eq!(logs[0].items[0].read_ns, Some(1_767_323_045_000_000_001), "{form}");
        }
    }

    #[test]
    fn sandboxes_are_kept_apart() {
        let other = LINE.replace("sandbox=abc", "sandbox=def");
        let (logs, _) = read_text(&format!("{LINE}\n{other}\n{LINE}\n"));
        let found: Vec<_> = logs.iter().map(|l| (l.sandbox.clone().unwrap(), l.items.len())).collect();
        assert_eq!(found, [("abc".to_string(), 1), ("abc".to_string(), 1), ("def".to_string(), 1)]);
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
        let names: Vec<_> = logs[0].items.iter().map(|i| if let Fact::Plain { name, .. } = &i.fact { name } else { "?" }).collect();
        assert_eq!(names, [names::SANDBOX_VM_STARTED, names::SANDBOX_READY, names::SANDBOX_RUN]);
        assert_eq!(count.skipped, [(Skip::OtherProgram, 1)].into());
    }

    #[test]
    fn a_sandbox_cannot_be_named_by_anything_else_than_an_id() {
        let (logs, count) = read_text(&LINE.replace("sandbox=abc", "sandbox=../../x"));
        assert_eq!((logs.len(), count.skipped), (0, [(Skip::LimitReached, 1)].into()));
    }
}
