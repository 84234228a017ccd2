//! Records made from log lines: their meaning, and their source.

use super::agent_log::AgentEvent;
use super::clock_points::Placed;
use super::compact_record::Record;
use super::text::printable;
use kata_gpu_wire::record::Kind;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// Name, error and fields of the record of an agent's event; None for an event that has none.
pub fn parts(event: &AgentEvent) -> Option<(String, Option<String>, Map<String, Value>)> {
    let Ok(Value::Object(mut fields)) = serde_json::to_value(event) else {
        return None;
    };
    let mut text = |key: &str| fields.remove(key)?.as_str().map(str::to_string);
    let (name, error) = (text("name")?, text("error"));
    Some((name, error, fields))
}

/// Agent event of a record that was made from the agent's lines, if views show it as such.
pub fn of_record(record: &Record) -> Option<AgentEvent> {
    mark(record).filter(|_| record.kind == Kind::Event)?;
    let fields = record.fields.iter().map(|(key, field)| {
        let text = field.as_str().map(|text| Value::from(printable(text)));
        (key.to_string(), text.unwrap_or_else(|| field.to_value()))
    });
    let mut event: Map<String, Value> = fields.collect();
    let error = record.error.as_deref().map(printable);
    event.insert("name".into(), record.name.as_str().into());
    event.extend(error.map(|error| ("error".into(), error.into())));
    let event = serde_json::from_value(event.into()).ok()?;
    let is_plain = matches!(
        event,
        AgentEvent::Start { .. } | AgentEvent::Rpc { .. } | AgentEvent::HookFailed { .. }
    );
    (!is_plain).then_some(event)
}

/// Key of the mark in a record from a log.
pub const MARK: &str = "import";

/// Source of a record from a log.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mark {
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

/// Time of a record.
pub fn placed(record: &Record) -> Placed {
    Placed {
        boottime_ns: record.boottime_ns,
        approximate: is_approximate(record),
    }
}

/// Whether a record's time is shown as approximate, because its error exceeds the shown digits.
pub fn is_approximate(record: &Record) -> bool {
    mark(record).is_some_and(|mark| mark.error_ns >= 1_000_000)
}

#[cfg(test)]
mod tests {
    use super::*;
    use kata_gpu_wire::catalogue::logged as names;
    use kata_gpu_wire::record;

    #[test]
    fn an_agents_event_comes_back_from_its_record() {
        let (container, devices, error) = (|| "a".into(), || "k/d=0".into(), || "e".into());
        let tries = Some(3);
        for (event, name) in [
            (AgentEvent::Ready, names::AGENT_READY),
            (
                AgentEvent::ContainerAsked {
                    container: container(),
                    devices: devices(),
                    pause: true,
                },
                names::CONTAINER_ASKED,
            ),
            (
                AgentEvent::CdiTryFailed {
                    container: container(),
                    attempt: 2,
                    error: error(),
                },
                names::AGENT_CDI_TRY,
            ),
            (
                AgentEvent::ContainerCreated {
                    container: container(),
                    devices: devices(),
                    tries,
                    pause: false,
                },
                names::CONTAINER_CREATED,
            ),
            (
                AgentEvent::ContainerStarted {
                    container: container(),
                },
                names::CONTAINER_STARTED,
            ),
            (
                AgentEvent::ContainerFailed {
                    container: container(),
                    devices: devices(),
                    tries: None,
                    error: error(),
                },
                names::CONTAINER_FAILED,
            ),
        ] {
            let (found, error, mut fields) = parts(&event).unwrap();
            assert_eq!(found, name);
            let record = |fields: &Map<String, Value>| {
                Record::from(record::Record {
                    error: error.clone(),
                    fields: fields.clone(),
                    ..record::Record::new(Kind::Event, name)
                })
            };
            assert_eq!(of_record(&record(&fields)), None, "a guest's own record");
            fields.insert(MARK.into(), serde_json::json!({"line": 1, "error_ns": 0}));
            assert_eq!(of_record(&record(&fields)), Some(event));
        }
        let start = AgentEvent::Start {
            version: "4".into(),
        };
        assert_eq!(parts(&start).unwrap().0, names::AGENT_START);
        let call = AgentEvent::Rpc { call: "c".into() };
        assert_eq!(parts(&call).unwrap().0, names::AGENT_RPC);
        let hook = AgentEvent::HookFailed { error: error() };
        assert_eq!(parts(&hook).unwrap().0, names::AGENT_HOOK_FAILED);
        assert_eq!(
            parts(&AgentEvent::Injected {
                container: container()
            }),
            None
        );
    }
}
