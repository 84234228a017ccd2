//! Lines of the agent and of kata-gpu-init as they stand in a guest's console: slog JSON, one
//! object per line, all values strings.
//!
//! [`crate::data::agent_log`] parses the agent's texts. Texts are cut here, and made harmless
//! by the code that shows them.

use super::facts::{Fact, InitLine, MAX_STAMP_NS, Stamp, cut};
use crate::data::agent_log::AgentLog;
use crate::data::agent_log::line;
use crate::data::agent_log::line::realtime_ns;
use kata_gpu_wire::record::{Kind, Level, MAX_NAME, TOOK_MS, ns_of_ms};
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
    TOOK_MS,
];

/// Passes on the facts of a line, if it has any. `log`: the lines before it.
pub fn parse(text: &str, log: &mut AgentLog, mut each: impl FnMut(Stamp, Fact)) {
    let Some(object) = line::object(text.as_bytes()) else {
        return;
    };
    if object.get("name").and_then(Value::as_str) == Some("kata-gpu-init") {
        if let Some((boottime_ns, line)) = init_line(&object) {
            each(Stamp::Boot(boottime_ns), Fact::Init(line));
        }
        return;
    }
    log.object(&object, |line| {
        each(Stamp::Guest(line.realtime_ns), Fact::Agent(line.event));
    });
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

fn init_line(object: &Map<String, Value>) -> Option<(i64, InitLine)> {
    let get = |key: &str| object.get(key).and_then(Value::as_str);
    let boottime_ns: i64 = get("boottime_ns")?.parse().ok()?;
    let (name, kind) = match get("msg")?.split_once(' ') {
        None => (get("msg")?, Kind::Event),
        Some((name, "end")) => (name, Kind::End),
        Some((name, "begin")) => (name, Kind::Begin),
        Some(_) => return None,
    };
    let is_name =
        (1..=MAX_NAME).contains(&name.len()) && name.bytes().all(|b| b.is_ascii_graphic());
    if !is_name || !(0..=MAX_STAMP_NS).contains(&boottime_ns) {
        return None;
    }
    let own = object
        .iter()
        .filter(|(key, _)| !FRAME.contains(&key.as_str()));
    let fields = own.take(32).map(|(key, value)| {
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
        took_ns: get(TOOK_MS).and_then(ns_of_ms),
        version: cut(get("version").unwrap_or("?"), MAX_VALUE),
        realtime_ns: get("ts").and_then(realtime_ns),
    };
    Some((boottime_ns, line))
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

#[cfg(test)]
mod tests {
    use super::*;

    fn ours(text: &str) -> (Stamp, InitLine) {
        let mut ours = None;
        parse(text, &mut AgentLog::default(), |stamp, fact| match fact {
            Fact::Init(line) => ours = Some((stamp, line)),
            other => panic!("{other:?}"),
        });
        ours.unwrap()
    }

    #[test]
    fn our_own_lines_keep_their_types_and_their_clock() {
        let text = "{\"boottime_ns\":\"3049464180\",\"gpu\":\"0001:00:00.0\",\"index\":\"0\",\
            \"level\":\"INFO\",\"minor\":\"7\",\"ok\":\"true\",\"driver\":\"550.163.01\",\
            \"msg\":\"gpu.bound\",\"name\":\"kata-gpu-init\",\"pid\":\"87\",\
            \"source\":\"kata-gpu-init\",\"subsystem\":\"gpu\",\
            \"ts\":\"2026-11-21T12:11:39.068788390Z\",\"version\":\"0.1.0\"}";
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
        assert_eq!(line.took_ns, None);
        let end = "gpu.init end\",\"took_ms\":\"2304.127513";
        let (_, line) = ours(&text.replace("gpu.bound", end));
        assert_eq!(line.took_ns, Some(2_304_127_513));
        assert!(!line.fields.contains_key(TOOK_MS));
    }
}
