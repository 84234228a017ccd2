//! Lines of containerd's log, of whichever form: its own text or JSON, or a journal with it
//! (`journalctl -o cat|short|json`). With `enable_debug` and containerd's log level debug, Kata's
//! Go shim writes the guest's console there, line by line. Its Rust shim writes to the journal
//! itself, as `kata`: the agent's lines if `enable_debug` of the agent is set, the console's if
//! that of the hypervisor is. Only the journal's fields show their owner (`-o json --all`: without
//! it, a message of more than 4 kB is null).

use super::line_prefix::{Clock, Line, Program, strip};
use super::logfmt;
use super::pod_errors;
use super::pod_errors::PodError;
use serde_json::{Map, Value};

/// Field with the error of a pod, in an entry that has only pod and sandbox besides.
pub const POD_ERROR: &str = "pod_error";
/// Field with the pod's name, in such an entry.
pub const POD: &str = "pod";

/// The fields of one line.
pub struct Entry {
    fields: Vec<(String, String)>,
    /// The journal's own time in ns, if known.
    pub journal_ns: Option<i64>,
}

impl Entry {
    pub fn get(&self, key: &str) -> Option<&str> {
        self.fields
            .iter()
            .find(|(k, _)| k == key)
            .map(|(_, v)| v.as_str())
    }

    pub fn fields(&self) -> &[(String, String)] {
        &self.fields
    }

    /// An error of the kubelet's or of an event. Without a time it is as early as can be.
    pub fn of_pod(found: PodError, journal_ns: Option<i64>) -> Self {
        let fields = [
            (POD_ERROR, Some(found.error)),
            (POD, found.pod),
            ("pod_sandbox", found.sandbox),
        ];
        let fields = fields
            .into_iter()
            .filter_map(|(key, value)| Some((key.to_string(), value?)));
        Self {
            fields: fields.collect(),
            journal_ns: journal_ns.or(Some(0)),
        }
    }

    /// A line of a guest's console: its sandbox, and the line.
    pub fn console(&self) -> Option<(&str, &str)> {
        Some((self.get("sandbox")?, self.get("vmconsole")?))
    }
}

/// Whether a line may hold one of a guest's console. Cheaper than parsing: consoles are long. A
/// journal in JSON gives a message with control characters as numbers.
pub fn may_have_console(line: &[u8]) -> bool {
    ["vmconsole", "__REALTIME_TIMESTAMP"]
        .iter()
        .any(|text| memchr::memmem::find(line, text.as_bytes()).is_some())
}

/// Message of the kernel in a journal as JSON, with its time: the journal's fields that begin with
/// `_` are the kernel's and journald's own words.
pub fn kernel_message(line: &str) -> Option<(Clock, String)> {
    if !line.starts_with('{') || !line.contains("\"_TRANSPORT\"") {
        return None;
    }
    let object: Map<String, Value> = serde_json::from_str(line).ok()?;
    let ns = |key: &str| {
        let micros: i64 = object.get(key)?.as_str()?.parse().ok()?;
        micros.checked_mul(1000)
    };
    if object.get("_TRANSPORT")? != "kernel" {
        return None;
    }
    let monotonic = ns("_SOURCE_MONOTONIC_TIMESTAMP").map(Clock::Kernel);
    let clock = monotonic.or_else(|| ns("__REALTIME_TIMESTAMP").map(Clock::Wall))?;
    Some((clock, journal_text(object.get("MESSAGE")?)?))
}

/// Entry in a line of text without its prefixes. None for a line of a guest's console: it has the
/// kernel's stamp.
pub fn text_entry(line: &Line) -> Option<Entry> {
    let is_kernels = match line.program {
        Some(program) => program == Program::Kernel,
        None => matches!(line.clock, Some(Clock::Kernel(_))),
    };
    if is_kernels {
        return None;
    }
    let journal_ns = match line.clock {
        Some(Clock::Wall(ns)) => Some(ns),
        _ => line.read_ns,
    };
    if let Some(Program::Named(program)) = line.program
        && let Some(pid) = program
            .strip_prefix("kata[")
            .and_then(|rest| rest.strip_suffix(']'))
        && !line.text.contains("level=")
    {
        // The Rust shim's; its process stands for the sandbox, which only the journal's fields
        // name.
        return Some(rust_entry(
            &format!("kata-{pid}"),
            line.text,
            false,
            journal_ns,
        ));
    }
    message(line.text, journal_ns)
}

/// Entry in a line; None if there is none.
pub fn entry(line: &str) -> Option<Entry> {
    if !line.starts_with('{') {
        return text_entry(&strip(line));
    }
    let object: Map<String, Value> = serde_json::from_str(line).ok()?;
    if let Some(text) = object.get("MESSAGE") {
        let text = journal_text(text)?;
        let micros = object
            .get("__REALTIME_TIMESTAMP")
            .and_then(Value::as_str)
            .and_then(|t| t.parse::<i64>().ok());
        let journal_ns = micros.and_then(|us| us.checked_mul(1000));
        // journald verifies only the user: containerd and Kata's shims are root's, and any user
        // can write to the journal under their names.
        if object.get("_UID").is_some_and(|uid| uid != "0") {
            return Some(Entry {
                fields: Vec::new(),
                journal_ns,
            });
        }
        return rust_shims(&object, &text, journal_ns).or_else(|| message(&text, journal_ns));
    }
    let fields = object
        .iter()
        .filter_map(|(key, value)| Some((key.clone(), value.as_str()?.to_string())));
    Some(Entry {
        fields: fields.collect(),
        journal_ns: None,
    })
}

/// Entry that Kata's Rust shim made of this message, as of 4.1.
fn rust_shims(object: &Map<String, Value>, text: &str, journal_ns: Option<i64>) -> Option<Entry> {
    let field = |name: &str| object.get(name).and_then(Value::as_str);
    let sandbox = field("SOURCE").filter(|_| field("SYSLOG_IDENTIFIER") == Some("kata"))?;
    let is_agents = field("SUBSYSTEM") == Some("agent");
    let mut entry = rust_entry(sandbox, text, is_agents, journal_ns);
    // Priority of syslog: 3 and below are errors.
    if field("PRIORITY").is_some_and(|priority| ["0", "1", "2", "3"].contains(&priority)) {
        entry.fields.push(("level".into(), "error".into()));
    }
    Some(entry)
}

fn rust_entry(sandbox: &str, text: &str, is_agents: bool, journal_ns: Option<i64>) -> Entry {
    let console = match text.strip_prefix("vm console: ") {
        // Quoted by Rust, which equals JSON for all but odd characters.
        Some(quoted) => serde_json::from_str(quoted).ok(),
        None => is_agents.then(|| text.to_string()),
    };
    let (key, value) =
        console.map_or_else(|| ("msg", text.to_string()), |line| ("vmconsole", line));
    Entry {
        fields: vec![("sandbox".into(), sandbox.into()), (key.into(), value)],
        journal_ns,
    }
}

/// journald gives a message that is not UTF-8, or holds control characters, as an array of bytes.
fn journal_text(value: &Value) -> Option<String> {
    match value {
        Value::String(text) => Some(text.clone()),
        Value::Array(bytes) => {
            let bytes: Option<Vec<u8>> = bytes
                .iter()
                .map(|b| u8::try_from(b.as_u64()?).ok())
                .collect();
            Some(String::from_utf8_lossy(&bytes?).into_owned())
        }
        _ => None,
    }
}

fn message(text: &str, journal_ns: Option<i64>) -> Option<Entry> {
    // A prefix that is not known may stand before the message.
    let start = text.find("time=\"").or_else(|| text.find("level="));
    if start.is_none()
        && let Some(found) = pod_errors::of(text)
    {
        return Some(Entry::of_pod(found, journal_ns));
    }
    let start = start.unwrap_or(0);
    let fields: Vec<(String, String)> = logfmt::pairs(text.get(start..)?)
        .into_iter()
        .map(|(k, v)| (k.to_string(), v))
        .collect();
    (!fields.is_empty()).then_some(Entry { fields, journal_ns })
}

#[cfg(test)]
mod tests {
    use super::*;

    const LINE: &str = "time=\"2026-11-23T11:17:14Z\" level=debug msg=\"reading guest console\" \
        sandbox=train-0 vmconsole=\"{\\\"msg\\\":\\\"a sandbox=other\\\"}\"";

    #[test]
    fn a_console_lines_sandbox_is_the_shims_not_the_guests() {
        let text = r#"{"msg":"a sandbox=other"}"#;
        let json =
            serde_json::json!({"time": "x", "sandbox": "train-0", "vmconsole": text}).to_string();
        let journal = serde_json::json!({"__REALTIME_TIMESTAMP": "1", "MESSAGE": LINE.as_bytes()})
            .to_string();
        for line in [
            LINE.to_string(),
            format!("Nov 23 11:17:14 node containerd[7]: {LINE}"),
            json,
            journal,
        ] {
            assert!(may_have_console(line.as_bytes()), "{line}");
            assert_eq!(
                entry(&line).unwrap().console(),
                Some(("train-0", text)),
                "{line}"
            );
        }
        let of_rust = |subsystem: &str, message: &str| {
            let fields = serde_json::json!({
                "__REALTIME_TIMESTAMP": "1",
                "SYSLOG_IDENTIFIER": "kata",
                "SOURCE": "train-0",
                "SUBSYSTEM": subsystem,
                "MESSAGE": message,
            });
            entry(&fields.to_string()).unwrap()
        };
        assert_eq!(of_rust("agent", text).console(), Some(("train-0", text)));
        assert_eq!(
            of_rust("hypervisor", &format!("vm console: {text:?}")).console(),
            Some(("train-0", text))
        );
        let other = of_rust("hypervisor", LINE);
        assert_eq!(
            (other.console(), other.get("msg")),
            (None, Some(LINE)),
            "a field of the shim's own text"
        );
        // The same lines, written to the journal by another user.
        for (uid, is_taken) in [("0", true), ("1000", false)] {
            let text = format!("vm console: {text:?}");
            let rust = serde_json::json!({
                "_UID": uid,
                "MESSAGE": text,
                "SYSLOG_IDENTIFIER": "kata",
                "SOURCE": "train-0",
                "SUBSYSTEM": "x",
            });
            for entry in [
                entry(&rust.to_string()),
                entry(&serde_json::json!({"_UID": uid, "MESSAGE": LINE}).to_string()),
            ] {
                assert_eq!(entry.unwrap().console().is_some(), is_taken, "{uid}");
            }
        }
        for other in [
            "",
            "{\"msg\":\" vmconsole=\"}",
            "time=\"x\" level=info msg=y",
            "time=\"x\" vmconsole=\"without a sandbox\"",
        ] {
            assert_eq!(
                entry(other).as_ref().and_then(Entry::console),
                None,
                "{other}"
            );
        }
    }
}
