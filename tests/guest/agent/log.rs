//! Lines of this agent for tests, beside the real one's ([`super::words`]): the same shape, one
//! write per line, under a name of their own.

use serde_json::{Map, Value};
use std::io::Write;
use std::time::SystemTime;

/// No reader of the agent's log takes these lines for its own.
pub const NAME: &str = "test-agent";

pub fn info(message: &str, fields: &[(&str, &str)]) {
    write("INFO", message, fields);
}

pub fn error(message: &str, fields: &[(&str, &str)]) {
    write("ERRO", message, fields);
}

fn write(level: &str, message: &str, fields: &[(&str, &str)]) {
    let line = line(level, message, fields);
    // A console that is gone is no reason to end.
    let _unused = std::io::stdout().lock().write_all(line.as_bytes());
}

fn line(level: &str, message: &str, fields: &[(&str, &str)]) -> String {
    let time = humantime::format_rfc3339_nanos(SystemTime::now()).to_string();
    let pid = std::process::id().to_string();
    let frame = [
        ("msg", message),
        ("level", level),
        ("ts", &time),
        ("name", NAME),
        ("version", super::config::AGENT_VERSION),
        ("source", "agent"),
        ("subsystem", "test"),
        ("pid", &pid),
    ];
    let map: Map<String, Value> = frame
        .iter()
        .chain(fields)
        .map(|(k, v)| ((*k).to_string(), Value::from(*v)))
        .collect();
    Value::Object(map).to_string() + "\n"
}
