//! `--otlp`: one ExportTraceServiceRequest as JSON, as OpenTelemetry's otlpjsonfile receiver and its HTTP endpoint take it.
//!
//! One trace per boot, whose ids are those of the boot id and so the same in every export. Its root is the boot; a span of the stream without
//! a parent is the root's child. `after` edges are links; marks are events of the step they happened in. A step that never ended ends where
//! the stream does and has `boot.open`. Times are the host's wall clock, by one clock sample for the whole boot; `boot.clock_error_ns` says how
//! wrong they may be.

use super::timeline::{Mark, Step, Timeline, level};
use crate::host::text::printable;
use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use std::collections::{BTreeMap, HashMap, HashSet};

/// SpanKind.INTERNAL, StatusCode.ERROR and the levels' SeverityNumber are enumerations, which OTLP/JSON writes as numbers.
const KIND_INTERNAL: u32 = 1;
const STATUS_ERROR: u32 = 2;
/// Where attributes of the resource come from, as every OpenTelemetry SDK reads it.
pub const RESOURCE_VARIABLE: &str = "OTEL_RESOURCE_ATTRIBUTES";
const SCOPE: &str = "kata-gpu-boot";

/// Attributes of the resource by name.
pub type Resource = BTreeMap<String, String>;

/// `key=value` pairs: first those of the environment (comma-separated, percent-encoded), then those asked for, which win.
pub fn resource(environment: Option<&str>, asked: &[String], host: Option<String>) -> Result<Resource> {
    let mut resource = Resource::new();
    resource.extend(host.map(|host| ("host.name".to_string(), host)));
    let pair = |pair: &str| match pair.split_once('=') {
        Some((key, value)) if !key.trim().is_empty() => Ok((key.trim().to_string(), value.trim().to_string())),
        _ => bail!("attribute {:?}: want KEY=VALUE, for example k8s.pod.name=trainer-0", printable(pair)),
    };
    for text in environment.unwrap_or("").split(',').filter(|text| !text.trim().is_empty()) {
        let (key, value) = pair(text).with_context(|| format!("read {RESOURCE_VARIABLE}"))?;
        resource.insert(key, percent_decoded(&value).with_context(|| format!("read {RESOURCE_VARIABLE}"))?);
    }
    for text in asked {
        resource.extend([pair(text)?]);
    }
    Ok(resource)
}

fn percent_decoded(text: &str) -> Result<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        if byte != b'%' {
            bytes.push(byte);
            continue;
        }
        let mut digit = || rest.next().and_then(|b| char::from(b).to_digit(16));
        match (digit(), digit()) {
            (Some(high), Some(low)) => bytes.push((high * 16 + low) as u8),
            _ => bail!("{:?}: % is not followed by two hexadecimal digits", printable(text)),
        }
    }
    String::from_utf8(bytes).with_context(|| format!("{:?} is not UTF-8", printable(text)))
}

/// The whole file. An error where nothing places the boot on a wall clock: OTLP knows no other times.
pub fn write(timeline: &Timeline, resource: &Resource) -> Result<String> {
    let Some(clock) = WallClock::of(timeline) else {
        bail!(
            "boot {}: no clock sample and no clock event, so its wall-clock time is not known, which OTLP needs: \
             export what the collector wrote, or use --chrome or --perfetto",
            timeline.boot_id()
        );
    };
    let ids = Ids::new(timeline);
    let mut events = events(timeline, &ids, &clock);
    let mut spans = vec![root(timeline, &ids, &clock, events.remove(&ids.root).unwrap_or_default())];
    for (at, step) in timeline.steps.iter().enumerate() {
        let id = ids.of(at, step);
        spans.push(span(timeline, step, id, &ids, &clock, events.remove(&id).unwrap_or_default()));
    }
    let boot = &timeline.boot;
    let mut attributes = vec![text("service.name", "kata-gpu-init"), text("service.instance.id", timeline.boot_id())];
    attributes.extend(boot.version.as_deref().map(|v| text("service.version", &printable(v))));
    attributes.push(text("os.type", "linux"));
    attributes.extend(boot.kernel.as_deref().map(|k| text("os.version", &printable(k))));
    attributes.push(text("boot.clock", clock.source));
    let given: HashSet<&str> = resource.keys().map(String::as_str).collect();
    attributes.retain(|attribute| !attribute["key"].as_str().is_some_and(|key| given.contains(key)));
    attributes.extend(resource.iter().map(|(key, value)| text(key, value)));
    let request = json!({ "resourceSpans": [{
        "resource": { "attributes": attributes },
        "scopeSpans": [{ "scope": { "name": SCOPE, "version": env!("CARGO_PKG_VERSION") }, "spans": spans }],
    }] });
    // One line: the file receiver takes one request per line.
    Ok(request.to_string() + "\n")
}

/// Boot clock to wall clock.
struct WallClock {
    offset_ns: i64,
    source: &'static str,
}

impl WallClock {
    fn of(timeline: &Timeline) -> Option<Self> {
        match (timeline.sample(), timeline.guest_offset_ns) {
            (Some(sample), _) => Some(Self { offset_ns: sample.offset_ns, source: "host" }),
            (None, Some(offset_ns)) => Some(Self { offset_ns, source: "guest" }),
            (None, None) => None,
        }
    }

    /// Unix time in ns, as the text that JSON's 64-bit numbers are.
    fn at(&self, boottime_ns: u64) -> String {
        let ns = i128::from(self.offset_ns) + i128::from(boottime_ns);
        ns.clamp(0, i128::from(u64::MAX)).to_string()
    }
}

/// Trace and span ids.
struct Ids {
    trace: String,
    root: u64,
    spans: HashSet<u64>,
}

impl Ids {
    fn new(timeline: &Timeline) -> Self {
        let trace: String = timeline.boot_id().chars().filter(char::is_ascii_hexdigit).collect();
        // 0 is no id.
        let root = trace.get(16..).and_then(|low| u64::from_str_radix(low, 16).ok()).unwrap_or(1).max(1);
        Self { trace, root, spans: timeline.boot.spans.iter().map(|s| s.id).collect() }
    }

    /// Different for different spans of a boot, and never the root's.
    fn span(&self, id: u64) -> u64 {
        match self.root ^ id.wrapping_add(1) {
            taken if taken == 0 || taken == self.root => self.last_resort(),
            id => id,
        }
    }

    /// An id that is neither 0 nor the root's.
    fn last_resort(&self) -> u64 {
        (!self.root).max(1)
    }

    /// Of the step with this number.
    fn of(&self, at: usize, step: &Step) -> u64 {
        // One that the stream has no id for gets one from the upper half, which a guest that counts from 1 does not reach.
        self.span(step.id.unwrap_or(1 << 63 | at as u64))
    }

    /// The root's where there is no such span.
    fn parent(&self, parent: Option<u64>) -> u64 {
        parent.filter(|id| self.spans.contains(id)).map_or(self.root, |id| self.span(id))
    }
}

fn hex(id: u64) -> String {
    format!("{id:016x}")
}

fn text(key: &str, value: &str) -> Value {
    json!({ "key": key, "value": { "stringValue": value } })
}

fn flag(key: &str, value: bool) -> Value {
    json!({ "key": key, "value": { "boolValue": value } })
}

/// 64-bit integers are texts in OTLP/JSON.
fn integer(key: &str, value: u64) -> Value {
    json!({ "key": key, "value": { "intValue": value.min(i64::MAX as u64).to_string() } })
}

fn events(timeline: &Timeline, ids: &Ids, clock: &WallClock) -> HashMap<u64, Vec<Value>> {
    let mut events: HashMap<u64, Vec<Value>> = HashMap::new();
    // Details are for somebody who looks at this one boot, with the file at hand.
    for mark in timeline.marks.iter().filter(|mark| !mark.detail) {
        events.entry(ids.parent(mark.parent)).or_default().push(event(mark, clock));
    }
    events
}

fn event(mark: &Mark, clock: &WallClock) -> Value {
    let level = serde_json::to_value(level(mark)).unwrap_or_default();
    let mut attributes =
        vec![text("text", &mark.text), text("boot.side", mark.side.name()), text("level", level.as_str().unwrap_or("info"))];
    if let Some(gpu) = mark.gpu {
        attributes.push(text("gpu.address", &gpu.address.to_string()));
        attributes.extend(gpu.index.map(|index| integer("gpu.index", index)));
    }
    json!({ "timeUnixNano": clock.at(mark.at_ns), "name": mark.name, "attributes": attributes })
}

fn root(timeline: &Timeline, ids: &Ids, clock: &WallClock, events: Vec<Value>) -> Value {
    let boot = &timeline.boot;
    let usable = boot.gpus.iter().filter(|gpu| gpu.usable.is_some() && gpu.failed.is_none()).count();
    let mut attributes = vec![
        integer("boot.gpus", boot.gpus.len() as u64),
        integer("boot.gpus_usable", usable as u64),
        integer("boot.records_lost", boot.lost.records),
        flag("boot.open", boot.settled_ns.is_none()),
    ];
    attributes.extend(error_bound(timeline, 0));
    let mut span = json!({
        "traceId": ids.trace, "spanId": hex(ids.root), "name": "gpu guest boot", "kind": KIND_INTERNAL,
        "startTimeUnixNano": clock.at(0), "endTimeUnixNano": clock.at(timeline.boot_end_ns), "attributes": attributes, "events": events,
    });
    if let Some(why) = &boot.power_off {
        span["status"] = json!({ "code": STATUS_ERROR, "message": printable(why) });
    } else if boot.failed_gpus().next().is_some() {
        span["status"] = json!({ "code": STATUS_ERROR, "message": format!("{} GPU(s) failed", boot.failed_gpus().count()) });
    }
    span
}

fn error_bound(timeline: &Timeline, at_ns: u64) -> Option<Value> {
    Some(integer("boot.clock_error_ns", timeline.wall_at(at_ns)?.error_ns))
}

fn span(timeline: &Timeline, step: &Step, id: u64, ids: &Ids, clock: &WallClock, events: Vec<Value>) -> Value {
    let mut attributes = vec![text("boot.side", step.side.name())];
    if let Some(gpu) = step.gpu {
        attributes.push(text("gpu.address", &gpu.address.to_string()));
        attributes.extend(gpu.index.map(|index| integer("gpu.index", index)));
    }
    let flags = [
        ("boot.critical", step.critical),
        ("boot.open", step.end_ns.is_none()),
        ("boot.begin_lost", step.begin_lost),
        ("boot.approximate", step.approximate),
    ];
    attributes.extend(flags.into_iter().filter(|(_, set)| *set).map(|(key, set)| flag(key, set)));
    attributes.extend(step.fields.iter().map(|(key, value)| text(&format!("boot.field.{key}"), value)));
    attributes.extend(error_bound(timeline, step.begin_ns));
    let known = step.after.iter().filter(|after| ids.spans.contains(after));
    let links: Vec<Value> = known
        .map(|after| json!({ "traceId": ids.trace, "spanId": hex(ids.span(*after)), "attributes": [text("boot.relation", "after")] }))
        .collect();
    let mut span = json!({
        "traceId": ids.trace, "spanId": hex(id), "parentSpanId": hex(ids.parent(step.parent)), "name": step.name, "kind": KIND_INTERNAL,
        "startTimeUnixNano": clock.at(step.begin_ns), "endTimeUnixNano": clock.at(step.end_ns.unwrap_or(timeline.end_ns.max(step.begin_ns))),
        "attributes": attributes, "events": events, "links": links,
    });
    if let Some(error) = &step.error {
        span["status"] = json!({ "code": STATUS_ERROR, "message": error });
    }
    span
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attributes_come_from_the_host_the_environment_and_the_command_line() {
        let asked = ["k8s.pod.name=b".to_string(), "x==".to_string()];
        let resource = resource(Some("k8s.pod.name=a,k8s.node.name=n%2C1,"), &asked, Some("h".into())).unwrap();
        let pairs: Vec<(&str, &str)> = resource.iter().map(|(k, v)| (k.as_str(), v.as_str())).collect();
        assert_eq!(pairs, [("host.name", "h"), ("k8s.node.name", "n,1"), ("k8s.pod.name", "b"), ("x", "=")]);
        for (environment, asked) in [(Some("novalue"), None), (Some("a=%2"), None), (Some("a=%ff"), None), (None, Some("=x"))] {
            let asked: Vec<String> = asked.into_iter().map(str::to_string).collect();
            assert!(super::resource(environment, &asked, None).is_err(), "{environment:?} {asked:?}");
        }
    }

    #[test]
    fn no_id_is_zero_or_the_roots() {
        for root in [1, 2, u64::MAX, 0x8000_0000_0000_beef] {
            let ids = Ids { trace: String::new(), root, spans: HashSet::new() };
            for id in [0, 1, root, root.wrapping_sub(1), u64::MAX] {
                assert!(![0, root].contains(&ids.span(id)), "{root:x} {id:x}");
            }
        }
    }
}
