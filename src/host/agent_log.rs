//! The agent's own log lines, as they stand in the guest's console: slog JSON, one object per line, all values strings.
//!
//! They carry the guest's wall-clock time and have no part in the event stream; [`ClockPoints`] places them on the guest's boot clock. The
//! console is as untrusted as the rest of the guest: lines are bounded, and every text is made printable before it leaves here.

use super::budget::{MAX_AGENT_LINES, MAX_AGENT_TEXT};
use super::clock::Clock;
use super::framing::{Lines, Piece};
use super::record::{Field, Record};
use super::text;
use crate::events::record::{Kind, names};
use anyhow::{Context, Result};
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read};
use std::path::Path;
use std::time::UNIX_EPOCH;

/// Longest console line that is looked at, in bytes.
pub const MAX_CONSOLE_LINE: usize = 64 * 1024;
/// Longest text kept of one value.
const MAX_VALUE: usize = 600;
/// `clock` events that are kept: the init sends one at its start and one for each step of the clock.
const MAX_POINTS: usize = 4096;

/// What a line says about the boot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AgentEvent {
    Ready,
    /// One of its tries to resolve a container's devices failed; it tries again after a second.
    CdiTryFailed {
        container: String,
        attempt: u64,
        error: String,
    },
    ContainerCreated {
        container: String,
        devices: String,
        tries: Option<u64>,
    },
    ContainerFailed {
        container: String,
        devices: String,
        tries: Option<u64>,
        error: String,
    },
}

/// One line of the agent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AgentLine {
    /// CLOCK_REALTIME of the guest.
    pub realtime_ns: i64,
    pub event: AgentEvent,
}

/// The agent's line in a line of console text; None for everything else. Kernel messages may stand before it on the same line.
pub fn parse(line: &[u8]) -> Option<AgentLine> {
    let start = line.iter().position(|b| *b == b'{')?;
    let end = line.iter().rposition(|b| *b == b'}')?;
    let object: Map<String, Value> = serde_json::from_slice(line.get(start..=end)?).ok()?;
    let get = |key: &str| object.get(key).and_then(Value::as_str);
    if get("name") != Some("kata-agent") {
        return None;
    }
    let text = |key: &str| text::printable_start(get(key).unwrap_or("").as_bytes(), MAX_VALUE);
    let number = |key: &str| get(key).and_then(|v| v.parse().ok());
    let event = match get("msg")? {
        "agent ready" => AgentEvent::Ready,
        "cdi try failed" => {
            AgentEvent::CdiTryFailed { container: text("container"), attempt: number("try").unwrap_or(0), error: text("error") }
        }
        "container created" => {
            AgentEvent::ContainerCreated { container: text("container"), devices: text("devices"), tries: number("tries") }
        }
        "container failed" => AgentEvent::ContainerFailed {
            container: text("container"),
            devices: text("devices"),
            tries: number("tries"),
            error: text("error"),
        },
        _ => return None,
    };
    let time = humantime::parse_rfc3339(get("ts")?).ok()?;
    let realtime_ns = i64::try_from(time.duration_since(UNIX_EPOCH).ok()?.as_nanos()).ok()?;
    Some(AgentLine { realtime_ns, event })
}

/// What a console log beside a boot's file ends in.
const EXTENSION: &str = "console";

/// The agent's lines of the boot with this file: from the console log that was named, or else from the one beside the file, if there is one.
pub fn of_boot(boot: &Path, console: Option<&Path>) -> Result<Vec<AgentLine>> {
    let beside = boot.with_extension(EXTENSION);
    let Some(console) = console.or_else(|| beside.is_file().then_some(beside.as_path())) else { return Ok(Vec::new()) };
    let file = File::open(console).with_context(|| format!("open console log {}", console.display()))?;
    read(file).with_context(|| format!("read {}", console.display()))
}

impl AgentEvent {
    fn text_bytes(&self) -> usize {
        match self {
            Self::Ready => 0,
            Self::CdiTryFailed { container, error, .. } => container.len() + error.len(),
            Self::ContainerCreated { container, devices, .. } => container.len() + devices.len(),
            Self::ContainerFailed { container, devices, error, .. } => container.len() + devices.len() + error.len(),
        }
    }
}

/// Whether there may be more lines than were kept.
pub fn is_full(lines: &[AgentLine]) -> bool {
    lines.len() >= MAX_AGENT_LINES || lines.iter().map(|line| line.event.text_bytes()).sum::<usize>() >= MAX_AGENT_TEXT
}

/// The lines of the agent in a console log, as many as fit.
pub fn read(mut from: impl Read) -> io::Result<Vec<AgentLine>> {
    let mut lines = Lines::new(MAX_CONSOLE_LINE);
    let mut found: Vec<AgentLine> = Vec::new();
    let mut text = 0;
    let mut chunk = vec![0; 64 * 1024];
    loop {
        match from.read(&mut chunk) {
            Ok(0) => return Ok(found),
            Ok(n) => lines.push(&chunk[..n], |piece| {
                if let Piece::Line(line) = piece
                    && found.len() < MAX_AGENT_LINES
                    && text < MAX_AGENT_TEXT
                    && let Some(line) = parse(line)
                {
                    text += line.event.text_bytes();
                    found.push(line);
                }
            }),
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
}

/// A time on the guest's boot clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placed {
    pub boottime_ns: u64,
    /// No `clock` event of the guest was there to place it by.
    pub approximate: bool,
}

/// Where the guest's wall clock stood beside its boot clock: its `clock` events.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClockPoints {
    /// (CLOCK_REALTIME, CLOCK_BOOTTIME) in ns, by the first.
    points: BTreeMap<i64, u64>,
}

impl ClockPoints {
    /// Takes what a `clock` event says; other records say nothing.
    pub fn add(&mut self, record: &Record) {
        if record.kind == Kind::Event
            && record.name == names::CLOCK
            && let Some(realtime_ns) = record.fields.get("realtime_ns").and_then(Field::as_i64)
            && (self.points.len() < MAX_POINTS || self.points.contains_key(&realtime_ns))
        {
            self.points.entry(realtime_ns).or_insert(record.boottime_ns);
        }
    }

    pub fn is_empty(&self) -> bool {
        self.points.is_empty()
    }

    /// By the nearest `clock` event (the guest's wall clock may be stepped between two). Without one: as if the guest's wall clock were the
    /// host's, which is approximate. None without either.
    pub fn place(&self, realtime_ns: i64, host: &Clock) -> Option<Placed> {
        let before = self.points.range(..=realtime_ns).next_back();
        let after = self.points.range(realtime_ns..).next();
        let nearest = before.into_iter().chain(after).min_by_key(|(realtime, _)| realtime.abs_diff(realtime_ns));
        if let Some((realtime, boottime)) = nearest {
            let at = i128::from(*boottime) + i128::from(realtime_ns) - i128::from(*realtime);
            return Some(Placed { boottime_ns: u64::try_from(at.max(0)).ok()?, approximate: false });
        }
        host.boottime_at(realtime_ns).map(|boottime_ns| Placed { boottime_ns, approximate: true })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::events::record;
    use crate::host::clock::Sample;

    fn line(msg: &str, more: &str) -> String {
        format!(
            r#"{{"msg":"{msg}","level":"INFO","ts":"2026-01-02T03:04:05.678901234Z","name":"kata-agent","version":"4.1.0","source":"agent","pid":"1"{more}}}"#
        )
    }

    #[test]
    fn the_agents_lines_are_found_in_console_text() {
        let ready = AgentLine { realtime_ns: 1_767_323_045_678_901_234, event: AgentEvent::Ready };
        let text = line("agent ready", "");
        assert_eq!(parse(text.as_bytes()), Some(ready.clone()));
        assert_eq!(parse(format!("[    1.2] nvidia: hello {text}\r").as_bytes()), Some(ready));
        let created = line("container created", r#","container":"all","devices":"nvidia.com/gpu=all","tries":"3","nodes":"x""#);
        let Some(AgentLine { event: AgentEvent::ContainerCreated { container, devices, tries }, .. }) = parse(created.as_bytes()) else {
            panic!("not found")
        };
        assert_eq!((container.as_str(), devices.as_str(), tries), ("all", "nvidia.com/gpu=all", Some(3)));
    }

    #[test]
    fn other_lines_and_other_programs_say_nothing() {
        for text in ["", "{", "}{", "[ 0.1] Linux version", "{\"msg\":1}", &line("child exited", ""), &line("agent ready", "")[..80]] {
            assert_eq!(parse(text.as_bytes()), None, "{text}");
        }
        assert_eq!(parse(line("agent ready", "").replace("kata-agent", "other").as_bytes()), None);
        assert_eq!(parse(line("agent ready", "").replace("2026-01", "2026-99").as_bytes()), None);
    }

    #[test]
    fn console_text_cannot_drive_a_terminal() {
        let hostile = line("container failed", r#","container":"a\u001b[2J\u202e","error":"ERR""#).replace("ERR", &"x".repeat(10_000));
        let Some(AgentLine { event: AgentEvent::ContainerFailed { container, error, .. }, .. }) = parse(hostile.as_bytes()) else {
            panic!("not found")
        };
        assert_eq!(container, "a\\x1b[2J\\u{202e}");
        assert!(error.len() < MAX_VALUE + 10);
    }

    #[test]
    fn lines_are_placed_by_the_nearest_clock_event_and_approximately_without_one() {
        let clock_event = |boottime_ns, realtime_ns: i64| {
            let fields = Map::from_iter([("realtime_ns".to_string(), realtime_ns.into())]);
            Record::from(record::Record { boottime_ns, fields, ..record::Record::new(Kind::Event, names::CLOCK) })
        };
        let mut points = ClockPoints::default();
        let mut host = Clock::default();
        assert_eq!(points.place(5, &host), None);
        host.add(Sample { boottime_ns: 0, offset_ns: 1000, error_ns: 0 });
        assert_eq!(points.place(1500, &host), Some(Placed { boottime_ns: 500, approximate: true }));
        points.add(&clock_event(100, 10_000));
        // The guest's wall clock was stepped by an hour between the two.
        points.add(&clock_event(200, 3_600_000_010_100));
        assert_eq!(points.place(10_050, &host), Some(Placed { boottime_ns: 150, approximate: false }));
        assert_eq!(points.place(3_600_000_010_110, &host), Some(Placed { boottime_ns: 210, approximate: false }));
        assert_eq!(points.place(0, &host), Some(Placed { boottime_ns: 0, approximate: false }), "not before the kernel's start");
    }
}
