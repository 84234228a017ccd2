//! Format `pod`: `kubectl get pod NAME -o json`, or a list of pods.
//!
//! Kubernetes gives times in whole seconds, cut, of the clocks of the API server and of the node: a
//! stamp is the beginning of the second in which something was noticed. The stamp is placed in the
//! middle of that second, with half a second as its error.

use super::item::{Count, Fact, Item, Log, Skip, Stamp, cut};
use super::log_files::Input;
use crate::data::agent_log::line::realtime_ns;
use crate::data::imported_record::Format;
use anyhow::{Context, Result, bail};
use kata_gpu_wire::catalogue::logged as names;
use kata_gpu_wire::record::Level;
use serde_json::{Map, Value};

const HALF_SECOND_NS: i64 = 500_000_000;
/// Longest text of one field.
const MAX_VALUE: usize = 300;
/// Pods of one list, and containers and conditions of one pod.
const MAX_PODS: usize = 1000;
const MAX_PARTS: usize = 100;

/// Reads a document: one entry per pod.
pub fn read(input: Input) -> Result<(Vec<Log>, Count)> {
    let (bytes, cut) = input.document()?;
    let document: Value = serde_json::from_slice(&bytes)
        .context("not one JSON document: give what `kubectl get pod NAME -o json` prints")?;
    let mut count = Count {
        lines: bytes.iter().filter(|b| **b == b'\n').count() as u64 + 1,
        cut,
        ..Count::default()
    };
    let pods: Vec<&Value> = match document.get("items").and_then(Value::as_array) {
        Some(items) => items.iter().take(MAX_PODS).collect(),
        None => vec![&document],
    };
    let logs: Vec<Log> = pods
        .into_iter()
        .filter_map(|pod| one(pod, &mut count))
        .collect();
    if logs.is_empty() {
        bail!("no pod with a time in it: give what `kubectl get pod NAME -o json` prints");
    }
    Ok((logs, count))
}

fn one(pod: &Value, count: &mut Count) -> Option<Log> {
    if pod
        .get("kind")
        .and_then(Value::as_str)
        .is_some_and(|kind| kind != "Pod")
    {
        count.skip(Skip::NotOfTheFormat);
        return None;
    }
    let metadata = pod.get("metadata")?;
    let name = text(metadata, "name")?;
    let status = pod.get("status").unwrap_or(&Value::Null);
    let mut out = Vec::new();
    let mut add = |time: Option<&str>,
                   record: &'static str,
                   level,
                   error: Option<String>,
                   fields: &[(&str, &str)]| {
        let Some(at) = time.and_then(realtime_ns) else {
            return count.skip(Skip::NoStamp);
        };
        let fields: Map<String, Value> = fields
            .iter()
            .map(|(k, v)| (k.to_string(), Value::from(cut(v, MAX_VALUE))))
            .collect();
        let fact = Fact::Plain {
            name: record,
            level,
            error,
            fields,
        };
        let item = Item::new(
            Stamp::Host(at.saturating_add(HALF_SECOND_NS)),
            Format::Pod,
            1,
            fact,
        );
        count.recognised += 1;
        out.push(Item {
            error_ns: HALF_SECOND_NS.unsigned_abs(),
            ..item
        });
    };
    add(
        text(metadata, "creationTimestamp"),
        names::POD_CREATED,
        Level::Info,
        None,
        &[("pod", name)],
    );
    add(
        text(status, "startTime"),
        names::POD_STARTED,
        Level::Info,
        None,
        &[("pod", name)],
    );
    for condition in parts(status, "conditions") {
        let kind = text(condition, "type").unwrap_or("?");
        let fulfilled = text(condition, "status") == Some("True");
        let reason = text(condition, "reason").unwrap_or("");
        let fields: Vec<(&str, &str)> = if reason.is_empty() {
            vec![("condition", kind)]
        } else {
            vec![("condition", kind), ("reason", reason)]
        };
        if fulfilled {
            add(
                text(condition, "lastTransitionTime"),
                names::POD_CONDITION,
                Level::Info,
                None,
                &fields,
            );
        } else {
            let error = text(condition, "message")
                .map(|m| format!("not yet: {}", cut(m, MAX_VALUE)))
                .or(Some("not yet".into()));
            add(
                text(condition, "lastTransitionTime"),
                names::POD_CONDITION,
                Level::Warn,
                error,
                &fields,
            );
        }
    }
    for list in ["initContainerStatuses", "containerStatuses"] {
        for container in parts(status, list) {
            let name = text(container, "name").unwrap_or("?");
            for state in [container.get("state"), container.get("lastState")]
                .into_iter()
                .flatten()
            {
                let started = state
                    .get("running")
                    .or(state.get("terminated"))
                    .and_then(|s| text(s, "startedAt"));
                if started.is_some() {
                    add(
                        started,
                        names::POD_CONTAINER_STARTED,
                        Level::Info,
                        None,
                        &[("container", name)],
                    );
                }
                if let Some(ended) = state.get("terminated") {
                    let reason = text(ended, "reason").unwrap_or("?");
                    let failed = ended.get("exitCode").and_then(Value::as_i64) != Some(0);
                    let error = failed.then(|| {
                        format!(
                            "{reason}: {}",
                            cut(text(ended, "message").unwrap_or(""), MAX_VALUE)
                        )
                    });
                    let level = if failed { Level::Error } else { Level::Info };
                    add(
                        text(ended, "finishedAt"),
                        names::POD_CONTAINER_ENDED,
                        level,
                        error,
                        &[("container", name), ("reason", reason)],
                    );
                }
            }
        }
    }
    (!out.is_empty()).then_some(Log {
        sandbox: None,
        items: out,
    })
}

fn text<'a>(value: &'a Value, key: &str) -> Option<&'a str> {
    value.get(key).and_then(Value::as_str)
}

fn parts<'a>(value: &'a Value, key: &str) -> impl Iterator<Item = &'a Value> {
    value
        .get(key)
        .and_then(Value::as_array)
        .into_iter()
        .flatten()
        .take(MAX_PARTS)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read_text(text: &str) -> Result<(Vec<Log>, Count)> {
        read(
            Input::new(
                "x",
                Box::new(std::io::Cursor::new(text.as_bytes().to_vec())),
            )
            .unwrap(),
        )
    }

    #[test]
    fn a_pods_times_become_milestones_with_half_a_second_of_error() {
        let pod = r#"{"apiVersion":"v1","kind":"Pod","metadata":{"name":"train","creationTimestamp":"2026-01-02T03:04:05Z"},
            "status":{"startTime":"2026-01-02T03:04:06Z","conditions":[{"type":"Ready","status":"True","lastTransitionTime":"2026-01-02T03:05:00Z"},
            {"type":"X","status":"False","reason":"Why","message":"because","lastTransitionTime":null}],
            "containerStatuses":[{"name":"cuda","state":{"terminated":{"startedAt":"2026-01-02T03:05:00Z","finishedAt":"2026-01-02T03:06:00Z","exitCode":2,"reason":"Error"}}}]}}"#;
        let (logs, count) = read_text(pod).unwrap();
        let names: Vec<_> = logs[0]
            .items
            .iter()
            .map(|i| {
                if let Fact::Plain { name, .. } = &i.fact {
                    *name
                } else {
                    "?"
                }
            })
            .collect();
        assert_eq!(
            names,
            [
                names::POD_CREATED,
                names::POD_STARTED,
                names::POD_CONDITION,
                names::POD_CONTAINER_STARTED,
                names::POD_CONTAINER_ENDED
            ]
        );
        assert_eq!(
            (logs[0].items[0].stamp, logs[0].items[0].error_ns),
            (Stamp::Host(1_767_323_045_500_000_000), 500_000_000)
        );
        assert_eq!(count.skipped, [(Skip::NoStamp, 1)].into());
        let list = format!(
            r#"{{"apiVersion":"v1","kind":"List","items":[{pod},{pod},{{"kind":"Node"}}]}}"#
        );
        assert_eq!(read_text(&list).unwrap().0.len(), 2);
    }

    #[test]
    fn what_is_no_pod_is_refused_with_what_to_do() {
        for text in [
            "",
            "{}",
            "[]",
            "{\"kind\":\"Pod\"}",
            "{\"kind\":\"Pod\",\"metadata\":{\"name\":\"x\",\"creationTimestamp\":\"soon\"}}",
            "{\"items\":7}",
        ] {
            assert!(
                format!("{:#}", read_text(text).unwrap_err()).contains("kubectl get pod"),
                "{text}"
            );
        }
    }
}
