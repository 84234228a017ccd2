//! Lines of the agent and of kata-gpu-init as they stand in a guest's console: slog JSON, one
//! object per line, all values strings.
//!
//! [`crate::data::agent_log`] parses the agent's texts. Texts are cut here, and made harmless
//! by the code that shows them.

use super::item::{Fact, InitLine, Skip, Stamp, cut};
use crate::data::agent_log::AgentLog;
use crate::data::agent_log::line;
use crate::data::agent_log::line::{Nothing, realtime_ns};
use kata_gpu_wire::record::{Kind, Level};
use serde_json::{Map, Value};

/// Longest text that is kept of one value, in characters: the agent prints whole OCI specs.
const MAX_VALUE: usize = 600;
/// Keys that are not a line's own fields.
const FRAME: &[&str] = &[
    "msg",
    "level",
    "ts",
    "name",
    "version",
    "source",
    "subsystem",
    "pid",
    "boottime_ns",
    "gpu",
    "error",
];

/// Hands over the facts of a line, or returns a reason for skipping it. `log`: the lines before it.
pub fn parse(
    text: &str,
    log: &mut AgentLog,
    mut each: impl FnMut(Stamp, Fact),
) -> Result<(), Skip> {
    let object = line::object(text.as_bytes()).ok_or(Skip::OtherProgram)?;
    let get = |key: &str| object.get(key).and_then(Value::as_str);
    if get("name") == Some("kata-gpu-init") {
        let (stamp, fact) = init_line(&object)?;
        each(stamp, fact);
        return Ok(());
    }
    let unplaced = if get("ts").is_none() {
        Skip::NoStamp
    } else {
        Skip::AbsurdStamp
    };
    // A known line may be one of several that make an event.
    let mut said = Err(Skip::AgentDetail);
    let known = log.object(&object, |realtime_ns, event| {
        said = realtime_ns
            .ok_or(unplaced)
            .map(|realtime_ns| each(Stamp::Guest(realtime_ns), Fact::Agent(event)));
    });
    match known {
        Err(Nothing::OtherProgram) => Err(Skip::OtherProgram),
        Err(Nothing::Detail) => Err(Skip::AgentDetail),
        Ok(()) => said,
    }
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
    let boottime: i64 = get("boottime_ns")
        .ok_or(Skip::NoStamp)?
        .parse()
        .map_err(|_| Skip::AbsurdStamp)?;
    let msg = get("msg").ok_or(Skip::OtherProgram)?;
    let (name, kind) = match msg.split_once(' ') {
        None => (msg, Kind::Event),
        Some((name, "end")) => (name, Kind::End),
        Some((name, "begin")) => (name, Kind::Begin),
        Some(_) => return Err(Skip::AgentDetail),
    };
    if name.is_empty()
        || name.len() > kata_gpu_wire::record::MAX_NAME
        || !name.bytes().all(|b| b.is_ascii_graphic())
    {
        return Err(Skip::AgentDetail);
    }
    let fields = object
        .iter()
        .filter(|(key, _)| !FRAME.contains(&key.as_str()))
        .take(32)
        .map(|(key, value)| {
            let value = value.as_str().map_or(Value::Null, typed);
            (cut(key, MAX_VALUE), value)
        });
    let line = InitLine {
        name: name.to_string(),
        kind,
        level: level(get("level")),
        gpu: get("gpu").and_then(|g| g.parse().ok()),
        error: get("error").map(|error| cut(error, MAX_VALUE)),
        fields: fields.collect(),
        version: cut(get("version").unwrap_or("?"), MAX_VALUE),
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
            text.parse::<i64>()
                .ok()
                .filter(|_| plain)
                .map_or_else(|| Value::from(cut(text, MAX_VALUE)), Value::from)
        }
    }
}

/// Text that distinguishes a line from others of the same time.
pub fn fingerprint(fact: &Fact) -> String {
    match fact {
        Fact::Kernel(text) => text.clone(),
        Fact::Init(line) => format!(
            "{} {:?} {:?} {:?}",
            line.name,
            line.kind,
            line.gpu,
            line.fields.values().next()
        ),
        Fact::Agent(fact) => format!("{fact:?}"),
        Fact::Plain { name, .. } => (*name).to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(msg: &str, more: &str) -> String {
        format!(
            r#"{{"msg":"{msg}","level":"INFO","ts":"2026-01-02T03:04:05.5Z","name":"kata-agent","version":"0.1.0","source":"agent","pid":"1"{more}}}"#
        )
    }

    fn all(text: &str) -> Result<Vec<(Stamp, Fact)>, Skip> {
        let mut facts = Vec::new();
        parse(text, &mut AgentLog::default(), |stamp, fact| {
            facts.push((stamp, fact))
        })
        .map(|()| facts)
    }

    fn ours(text: &str) -> (Stamp, InitLine) {
        match all(text).unwrap().remove(0) {
            (stamp, Fact::Init(line)) => (stamp, line),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn our_own_lines_keep_their_types_and_their_clock() {
        let text = r#"{"boottime_ns":"3049464180","gpu":"0001:00:00.0","index":"0","level":"INFO","minor":"7","ok":"true","driver":"550.163.01","msg":"gpu.bound","name":"kata-gpu-init","pid":"87","source":"kata-gpu-init","subsystem":"gpu","ts":"2026-11-21T12:11:39.068788390Z","version":"0.1.0"}"#;
        let (stamp, line) = ours(text);
        assert_eq!(
            (stamp, line.kind, line.name.as_str()),
            (Stamp::Boot(3_049_464_180), Kind::Event, "gpu.bound")
        );
        assert_eq!(
            Value::Object(line.fields),
            serde_json::json!({"index": 0, "minor": 7, "ok": true, "driver": "550.163.01"})
        );
        let (_, line) = ours(&text.replace("gpu.bound", "gpu.init end"));
        assert_eq!((line.kind, line.name.as_str()), (Kind::End, "gpu.init"));
    }

    #[test]
    fn all_other_lines_have_a_reason_for_skipping() {
        assert_eq!(all("hardware: ready"), Err(Skip::OtherProgram));
        assert_eq!(all("}{"), Err(Skip::OtherProgram));
        assert_eq!(all(&line("something new", "")), Err(Skip::AgentDetail));
        assert_eq!(
            all(&line("announce", "").replace("2026-01", "2026-99")),
            Err(Skip::AbsurdStamp)
        );
        assert_eq!(
            all(&line("announce", "").replace("kata-agent", "other")),
            Err(Skip::OtherProgram)
        );
    }
}
