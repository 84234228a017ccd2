//! The console sink: the stream's events as lines in kata-agent's own log shape (slog JSON, all values strings), so that whatever already
//! collects the agent's lines (containerd's `vmconsole=`, kata-log-parser) carries ours with nothing installed.
//!
//! A console can be slow (a serial port is, and QEMU can stop reading it), so this is a thread of its own that nobody waits for. Kernel lines
//! are not repeated: the kernel has printed them already.

use crate::clock::{boottime_ns, realtime_ns};
use crate::events::names;
use crate::events::record::{Kind, Level, Line, Record, decode};
use crate::events::ring::Ring;
use serde_json::{Map, Value};
use std::fs::OpenOptions;
use std::io::{self, Write};
use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};

const CONSOLE: &str = "/dev/console";
/// The thread looks at its ring at least this often; it is woken by every record anyway.
const WAKE: Duration = Duration::from_secs(3600);

/// Starts the thread. Records above `level` (less urgent) are left out, and, `only_new`, those that are there already.
pub fn start(ring: Arc<Ring>, level: Level, only_new: bool) -> io::Result<()> {
    let mut console = OpenOptions::new().write(true).open(CONSOLE)?;
    std::thread::Builder::new().name("console".into()).stack_size(128 * 1024).spawn(move || {
        let mut next = if only_new { ring.next_seq() } else { ring.first_seq() };
        loop {
            let batch = ring.read(&mut next, 16);
            if batch.lost > 0 {
                tracing::warn!(name: names::STREAM_LOST, lost = batch.lost, at = "console");
            }
            if batch.lines.is_empty() {
                ring.wait_blocking(next, WAKE);
                continue;
            }
            for line in &batch.lines {
                let Ok(Line::Record(record)) = decode(line.as_bytes()) else { continue };
                if let Some(text) = log_line(&record, level, realtime_ns().saturating_sub(boottime_ns()))
                    && console.write_all(text.as_bytes()).is_err()
                {
                    return; // a console that refuses writes will not come back, and there is nobody to tell but the other sinks
                }
            }
        }
    })?;
    Ok(())
}

/// One line as the agent would write it, or None for what does not go to the console. `offset_ns` is REALTIME minus BOOTTIME.
pub fn log_line(record: &Record, level: Level, offset_ns: u64) -> Option<String> {
    // Begins matter to somebody who waits for a step that hangs, not on a console that is read afterwards.
    let own_level = if record.kind == Kind::Begin { record.level.max(Level::Debug) } else { record.level };
    if record.kind == Kind::Kmsg || own_level > level {
        return None;
    }
    let mut line = Map::new();
    let mut put = |key: &str, value: String| line.insert(key.to_string(), Value::from(value));
    put(
        "msg",
        match record.kind {
            Kind::Begin => format!("{} begin", record.name),
            Kind::End => format!("{} end", record.name),
            Kind::Event | Kind::Kmsg => record.name.clone(),
        },
    );
    put(
        "level",
        match own_level {
            Level::Error => "ERRO",
            Level::Warn => "WARN",
            Level::Info => "INFO",
            Level::Debug => "DEBG",
            Level::Trace => "TRCE",
        }
        .into(),
    );
    put("ts", humantime::format_rfc3339_nanos(UNIX_EPOCH + Duration::from_nanos(record.boottime_ns.saturating_add(offset_ns))).to_string());
    put("name", "kata-gpu-init".into());
    put("version", env!("CARGO_PKG_VERSION").into());
    put("source", "kata-gpu-init".into());
    put("subsystem", record.name.split('.').next().unwrap_or_default().into());
    put("pid", std::process::id().to_string());
    put("boottime_ns", record.boottime_ns.to_string());
    if let Some(gpu) = record.gpu {
        put("gpu", gpu.to_string());
    }
    if let Some(error) = &record.error {
        put("error", error.clone());
    }
    for (key, value) in &record.fields {
        put(key, value.as_str().map_or_else(|| value.to_string(), str::to_string));
    }
    Some(Value::Object(line).to_string() + "\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_has_the_agents_shape_and_only_strings() {
        let record = Record {
            schema: 1,
            seq: 3,
            boottime_ns: 1_000_000_000,
            kind: Kind::Event,
            name: names::GPU_BOUND.into(),
            level: Level::Info,
            gpu: Some("0001:00:03.0".parse().unwrap()),
            span: None,
            parent: None,
            after: vec![],
            error: None,
            fields: Map::from_iter([("minor".to_string(), Value::from(3))]),
        };
        let line = log_line(&record, Level::Info, 0).unwrap();
        let read: Map<String, Value> = serde_json::from_str(&line).unwrap();
        for key in ["msg", "level", "ts", "name", "version", "source", "subsystem", "pid"] {
            assert!(read.contains_key(key), "{key} is missing");
        }
        assert!(read.values().all(Value::is_string));
        assert_eq!((read["minor"].as_str(), read["subsystem"].as_str()), (Some("3"), Some("gpu")));
        assert_eq!(log_line(&Record { kind: Kind::Begin, ..record.clone() }, Level::Info, 0), None);
        assert_eq!(log_line(&Record { kind: Kind::Kmsg, ..record }, Level::Trace, 0), None);
    }
}
