//! Records made from log lines: their meaning, and their source.

use super::agent_log::{self, AgentEvent};
use super::compact_record::{Field, Record};
use super::text;
use kata_gpu_wire::catalogue::logged as names;
use kata_gpu_wire::record::Kind;
use serde::{Deserialize, Serialize};
use std::fmt;

/// The formats, by the names that `--format` takes.
#[derive(
    Clone,
    Copy,
    Debug,
    PartialEq,
    Eq,
    Hash,
    PartialOrd,
    Ord,
    Serialize,
    Deserialize,
    clap::ValueEnum,
)]
#[serde(rename_all = "lowercase")]
pub enum Format {
    /// containerd's journal or log with the Kata shim's lines, as text or as `journalctl -o json`
    /// gives it
    Journal,
    /// A guest's console log
    Console,
    /// kubectl get pod -o json
    Pod,
    /// An event stream: what `collect` writes, or a guest's boot.ndjson
    Stream,
}

impl Format {
    pub fn name(self) -> &'static str {
        match self {
            Self::Journal => "journal",
            Self::Console => "console",
            Self::Pod => "pod",
            Self::Stream => "stream",
        }
    }
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Agent event of a record that was made from the agent's lines.
pub fn of_record(record: &Record) -> Option<AgentEvent> {
    mark(record)?;
    let text = |key: &str| {
        text::printable(
            record
                .fields
                .get(key)
                .and_then(Field::as_str)
                .unwrap_or("?"),
        )
    };
    let number = |key: &str| record.fields.get(key).and_then(Field::as_u64);
    let error = || text::printable(record.error.as_deref().unwrap_or("?"));
    let container = || text("container");
    let devices = || {
        record
            .fields
            .get("devices")
            .map_or_else(|| agent_log::UNKNOWN.to_string(), |_| text("devices"))
    };
    let pause = record.fields.get("pause").is_some();
    Some(match (record.kind, record.name.as_str()) {
        (Kind::Event, names::AGENT_READY) => AgentEvent::Ready,
        (Kind::Event, names::CONTAINER_ASKED) => AgentEvent::ContainerAsked {
            container: container(),
            devices: devices(),
            pause,
        },
        (Kind::Event, names::AGENT_CDI_TRY) => AgentEvent::CdiTryFailed {
            container: container(),
            attempt: number("try").unwrap_or(0),
            error: error(),
        },
        (Kind::Event, names::CONTAINER_CREATED) => AgentEvent::ContainerCreated {
            container: container(),
            devices: devices(),
            tries: number("tries"),
            pause,
        },
        (Kind::Event, names::CONTAINER_STARTED) => AgentEvent::ContainerStarted {
            container: container(),
        },
        (Kind::Event, names::CONTAINER_FAILED) => AgentEvent::ContainerFailed {
            container: container(),
            devices: devices(),
            tries: number("tries"),
            error: error(),
        },
        _ => return None,
    })
}

/// Key of the mark in a record from a log.
pub const MARK: &str = "import";

/// Source of a record from a log.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mark {
    pub format: Format,
    pub line: u64,
    pub error_ns: u64,
}

/// The mark of a record that came from a log.
pub fn mark(record: &Record) -> Option<Mark> {
    record
        .fields
        .get(MARK)
        .and_then(|value| serde_json::from_str(value.json()?).ok())
}

/// Whether a record's time is shown as approximate, because its error exceeds the shown digits.
pub fn is_approximate(record: &Record) -> bool {
    mark(record).is_some_and(|mark| mark.error_ns >= 1_000_000)
}
