//! Lines of the agent and of kata-gpu-init as they stand in a guest's console: slog JSON, one object per line, all values strings.
//!
//! The vocabulary is kata-agent's (`waiting for CDI spec(s) to be generated`, `ttRPC server started`, ..), beside the one that
//! [`agent_log`] knows. Texts are cut here; they are made harmless where they are shown.

use super::item::{AgentFact, Fact, Format, InitLine, Skip, Stamp};
use super::names;
use crate::events::record::{Kind, Level};
use crate::host::agent_log::{self, AgentEvent};
use crate::host::record::{Field, Record};
use crate::host::text;
use crate::pci::PciAddress;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::time::UNIX_EPOCH;

/// Longest text that is kept of one value, in characters: the agent prints whole OCI specs.
const MAX_VALUE: usize = 600;
/// What a line has beside its own fields.
const FRAME: &[&str] = &["msg", "level", "ts", "name", "version", "source", "subsystem", "pid", "boottime_ns", "gpu", "error"];

/// What a line says and when, or why it says nothing.
pub fn parse(line: &str) -> Result<(Stamp, Fact), Skip> {
    let start = line.find('{').ok_or(Skip::OtherProgram)?;
    let end = line.rfind('}').filter(|end| *end > start).ok_or(Skip::OtherProgram)?;
    let json = line.get(start..=end).ok_or(Skip::OtherProgram)?;
    let object: Map<String, Value> = serde_json::from_str(json).map_err(|_| Skip::OtherProgram)?;
    let get = |key: &str| object.get(key).and_then(Value::as_str);
    match get("name") {
        Some("kata-gpu-init") => init_line(&object),
        Some("kata-agent") => {
            let fact = agent_fact(&object, json).ok_or(Skip::AgentDetail)?;
            let realtime = realtime_ns(get("ts").ok_or(Skip::NoStamp)?).ok_or(Skip::AbsurdStamp)?;
            Ok((Stamp::Guest(realtime), Fact::Agent(fact)))
        }
        _ => Err(Skip::OtherProgram),
    }
}

/// RFC 3339 with any offset to ns since the epoch; None for what is no time, or none that fits.
pub fn realtime_ns(text: &str) -> Option<i64> {
    let text = text.trim();
    // humantime reads UTC only: the offset is taken off first.
    let (clock, offset_s) = match text.strip_suffix(['Z', 'z']) {
        Some(clock) => (clock, 0i64),
        None => {
            let at = text.len().checked_sub(6)?;
            let (clock, offset) = (text.get(..at)?, text.get(at..)?);
            let sign = match offset.as_bytes().first()? {
                b'+' => 1,
                b'-' => -1,
                _ => return None,
            };
            let (hours, minutes) = offset.get(1..)?.split_once(':')?;
            let number = |text: &str, max: i64| text.parse::<i64>().ok().filter(|n| (0..=max).contains(n));
            (clock, sign * (number(hours, 23)? * 3600 + number(minutes, 59)? * 60))
        }
    };
    let time = humantime::parse_rfc3339(&format!("{clock}Z")).ok()?;
    let ns = i64::try_from(time.duration_since(UNIX_EPOCH).ok()?.as_nanos()).ok()?;
    ns.checked_sub(offset_s * 1_000_000_000)
}

fn cut(text: &str) -> String {
    text.chars().take(MAX_VALUE).collect()
}

fn level(text: Option<&str>) -> Level {
    match text {
        Some("CRIT" | "ERRO") => Level::Error,
        Some("WARN") => Level::Warn,
        Some("DEBG") => Level::Debug,
        Some("TRCE") => Level::Trace,
        _ => Level::Info,
    }
}

fn init_line(object: &Map<String, Value>) -> Result<(Stamp, Fact), Skip> {
    let get = |key: &str| object.get(key).and_then(Value::as_str);
    let boottime: i64 = get("boottime_ns").ok_or(Skip::NoStamp)?.parse().map_err(|_| Skip::AbsurdStamp)?;
    let msg = get("msg").ok_or(Skip::OtherProgram)?;
    let (name, kind) = match msg.split_once(' ') {
        None => (msg, Kind::Event),
        Some((name, "end")) => (name, Kind::End),
        Some((name, "begin")) => (name, Kind::Begin),
        Some(_) => return Err(Skip::AgentDetail),
    };
    if name.is_empty() || name.len() > crate::events::record::MAX_NAME || !name.bytes().all(|b| b.is_ascii_graphic()) {
        return Err(Skip::AgentDetail);
    }
    let fields = object.iter().filter(|(key, _)| !FRAME.contains(&key.as_str())).take(32).map(|(key, value)| {
        let value = value.as_str().map_or(Value::Null, typed);
        (cut(key), value)
    });
    let line = InitLine {
        name: name.to_string(),
        kind,
        level: level(get("level")),
        gpu: get("gpu").and_then(|g| g.parse().ok()),
        error: get("error").map(cut),
        fields: fields.collect(),
        version: cut(get("version").unwrap_or("?")),
        realtime_ns: get("ts").and_then(realtime_ns),
    };
    Ok((Stamp::Boot(boottime), Fact::Init(line)))
}

/// The console's strings as the types that the stream has: numbers and truth values.
fn typed(text: &str) -> Value {
    match text {
        "true" => Value::Bool(true),
        "false" => Value::Bool(false),
        _ => {
            let plain = text == "0" || !text.starts_with(['0', '+']);
            text.parse::<i64>().ok().filter(|_| plain).map_or_else(|| Value::from(cut(text)), Value::from)
        }
    }
}

fn agent_fact(object: &Map<String, Value>, json: &str) -> Option<AgentFact> {
    let get = |key: &str| object.get(key).and_then(Value::as_str);
    let msg = get("msg")?;
    if let Some(line) = agent_log::parse(json.as_bytes()) {
        return Some(match line.event {
            AgentEvent::Ready => AgentFact::Ready,
            AgentEvent::CdiTryFailed { container, attempt, error } => AgentFact::TryFailed { container: Some(container), attempt, error },
            AgentEvent::ContainerCreated { container, devices, tries } => {
                AgentFact::Created { container: Some(container), devices: Some(devices), tries }
            }
            AgentEvent::ContainerFailed { container, devices, tries, error } => {
                AgentFact::Failed { container: Some(container), devices: Some(devices), tries, error }
            }
        });
    }
    if let Some(rest) = msg.strip_prefix("waiting for CDI spec(s) to be generated (") {
        let (attempt, rest) = rest.split_once(" of ")?;
        let error = rest.split_once("max tries) ").map_or("", |(_, error)| error);
        // It counts from 0; people, and the other vocabulary, from 1.
        let attempt = attempt.parse::<u64>().ok()?.checked_add(1)?;
        return Some(AgentFact::TryFailed { container: None, attempt, error: cut(error) });
    }
    if let Some(rest) = msg.strip_prefix("rpc call from shim to agent: ") {
        let call = rest.trim_matches('"');
        // The others come all the time, or say nothing about the start.
        const CALLS: &[&str] = &["create_sandbox", "create_container", "start_container", "online_cpu_mem"];
        return CALLS.contains(&call).then(|| AgentFact::Rpc { call: call.to_string() });
    }
    match msg {
        "announce" => Some(AgentFact::Start { version: cut(get("agent-version").or(get("version")).unwrap_or("?")) }),
        "ttRPC server started" => Some(AgentFact::Ready),
        "created container!" => Some(AgentFact::Created { container: None, devices: None, tries: None }),
        "got uevent message" => bound(get("event")?).map(AgentFact::Bound),
        _ if msg.starts_with("all devices injected successfully") => Some(AgentFact::Injected),
        _ if msg.contains("failed to inject devices after CDI timeout") || msg.starts_with("failed to start container: ") => {
            Some(AgentFact::Failed { container: None, devices: None, tries: None, error: cut(msg) })
        }
        _ => None,
    }
}

/// What tells a line from others of the same time.
pub fn fingerprint(fact: &Fact) -> String {
    match fact {
        Fact::Kernel(text) => text.clone(),
        Fact::Init(line) => format!("{} {:?} {:?} {:?}", line.name, line.kind, line.gpu, line.fields.values().next()),
        Fact::Agent(fact) => format!("{fact:?}"),
        Fact::Plain { name, .. } => (*name).to_string(),
    }
}

/// What a record that was made of the agent's lines says, for what shows and sums boots up.
pub fn of_record(record: &Record) -> Option<AgentEvent> {
    mark(record)?;
    let text = |key: &str| record.fields.get(key).and_then(Field::as_str).unwrap_or("?").to_string();
    let number = |key: &str| record.fields.get(key).and_then(Field::as_u64);
    let error = || text::printable(record.error.as_deref().unwrap_or("?"));
    let (container, devices) = (text::printable(&text("container")), text::printable(&text("devices")));
    Some(match (record.kind, record.name.as_str()) {
        (Kind::Event, names::AGENT_READY) => AgentEvent::Ready,
        (Kind::Event, names::AGENT_CDI_TRY) => AgentEvent::CdiTryFailed { container, attempt: number("try").unwrap_or(0), error: error() },
        (Kind::Event, names::CONTAINER_CREATED) => AgentEvent::ContainerCreated { container, devices, tries: number("tries") },
        (Kind::Event, names::CONTAINER_FAILED) => {
            AgentEvent::ContainerFailed { container, devices, tries: number("tries"), error: error() }
        }
        _ => return None,
    })
}

/// The key of what a record from a log says about itself.
pub const MARK: &str = "import";

/// Where a record from a log came from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mark {
    pub format: Format,
    pub line: u64,
    pub error_ns: u64,
}

/// The mark of a record that came from a log.
pub fn mark(record: &Record) -> Option<Mark> {
    record.fields.get(MARK).and_then(|value| serde_json::from_str(value.json()?).ok())
}

/// Times that are known worse than they are shown are shown as approximate.
pub fn is_approximate(record: &Record) -> bool {
    mark(record).is_some_and(|mark| mark.error_ns >= 1_000_000)
}

/// The function that a `bind` uevent is about: `Uevent { action: "bind", devpath: "/devices/../0000:02:00.0", .. subsystem: "pci", .. }`.
fn bound(event: &str) -> Option<PciAddress> {
    let value = |key: &str| event.split_once(&format!("{key}: \""))?.1.split('"').next();
    if value("action") != Some("bind") || value("subsystem") != Some("pci") {
        return None;
    }
    value("devpath")?.rsplit('/').next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(msg: &str, more: &str) -> String {
        format!(
            r#"{{"msg":"{msg}","level":"INFO","ts":"2026-01-02T03:04:05.5Z","name":"kata-agent","version":"0.1.0","source":"agent","pid":"1"{more}}}"#
        )
    }

    fn fact(text: &str) -> Option<AgentFact> {
        match parse(text) {
            Ok((Stamp::Guest(_), Fact::Agent(fact))) => Some(fact),
            _ => None,
        }
    }

    #[test]
    fn the_agents_milestones_are_recognised() {
        assert_eq!(fact(&line("announce", r#","agent-version":"4.1.0""#)), Some(AgentFact::Start { version: "4.1.0".into() }));
        assert_eq!(fact(&line("ttRPC server started", r#","address":"vsock://-1:1024""#)), Some(AgentFact::Ready));
        let wait =
            line(r#"waiting for CDI spec(s) to be generated (5 of 100 max tries) \"unresolvable CDI devices nvidia.com/gpu=2\""#, "");
        let error = "\"unresolvable CDI devices nvidia.com/gpu=2\"".to_string();
        assert_eq!(fact(&wait), Some(AgentFact::TryFailed { container: None, attempt: 6, error }));
        let call = line(r#"rpc call from shim to agent: \"create_sandbox\""#, "");
        assert_eq!(fact(&call), Some(AgentFact::Rpc { call: "create_sandbox".into() }));
        let uevent = r#","event":"Uevent { action: \"bind\", devpath: \"/devices/pci0000:00/0000:00:05.0/0000:02:00.0\", devname: \"\", subsystem: \"pci\", seqnum: \"1381\", interface: \"\" }""#;
        assert_eq!(fact(&line("got uevent message", uevent)), Some(AgentFact::Bound("0000:02:00.0".parse().unwrap())));
        assert_eq!(fact(&line("got uevent message", &uevent.replace("bind", "add"))), None);
        assert_eq!(fact(&line("got uevent message", &uevent.replace("pci\\\"", "memory\\\""))), None);
        assert_eq!(fact(&line("all devices injected successfully, modified CDI container spec: Spec {", "")), Some(AgentFact::Injected));
        assert_eq!(fact(&line("policy check: StatsContainerRequest", "")), None);
    }

    #[test]
    fn our_own_lines_keep_their_types_and_their_clock() {
        let text = r#"{"boottime_ns":"3049464180","gpu":"0001:00:00.0","index":"0","level":"INFO","minor":"7","ok":"true","driver":"550.163.01","msg":"gpu.bound","name":"kata-gpu-init","pid":"87","source":"kata-gpu-init","subsystem":"gpu","ts":"2026-11-21T12:11:39.068788390Z","version":"0.1.0"}"#;
        let Ok((stamp, Fact::Init(line))) = parse(text) else { panic!("not ours") };
        assert_eq!((stamp, line.kind, line.name.as_str()), (Stamp::Boot(3_049_464_180), Kind::Event, "gpu.bound"));
        assert_eq!(Value::Object(line.fields), serde_json::json!({"index": 0, "minor": 7, "ok": true, "driver": "550.163.01"}));
        let Ok((_, Fact::Init(line))) = parse(&text.replace("gpu.bound", "gpu.init end")) else { panic!("not ours") };
        assert_eq!((line.kind, line.name.as_str()), (Kind::End, "gpu.init"));
    }

    #[test]
    fn everything_else_is_told_apart() {
        assert_eq!(parse("hardware: ready"), Err(Skip::OtherProgram));
        assert_eq!(parse("}{"), Err(Skip::OtherProgram));
        assert_eq!(parse(&line("something new", "")), Err(Skip::AgentDetail));
        assert_eq!(parse(&line("announce", "").replace("2026-01", "2026-99")), Err(Skip::AbsurdStamp));
        assert_eq!(parse(&line("announce", "").replace("kata-agent", "other")), Err(Skip::OtherProgram));
    }

    #[test]
    fn times_are_read_with_any_offset() {
        let utc = realtime_ns("2026-01-02T03:04:05.678901234Z");
        assert_eq!(utc, Some(1_767_323_045_678_901_234));
        assert_eq!(realtime_ns("2026-01-02T04:34:05.678901234+01:30"), utc);
        assert_eq!(realtime_ns("2026-01-01T19:04:05.678901234-08:00"), utc);
        for text in [
            "",
            "Z",
            "+01:00",
            "2026-01-02",
            "9999-12-31T23:59:59Z",
            "1960-01-01T00:00:00Z",
            "2026-01-02T03:04:05+99:99",
            "\u{e9}\u{e9}\u{e9}",
        ] {
            assert_eq!(realtime_ns(text), None, "{text}");
        }
    }
}
