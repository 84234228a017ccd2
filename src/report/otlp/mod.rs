//! `--otlp`: one ExportTraceServiceRequest, as OpenTelemetry's receivers take it.
//! Sending it is the collector's.
//!
//! Each boot is one trace. The collector drew its id and keeps it in the boot's file, so that every
//! export has the same id. A boot id would not do: the guest chooses it, and a guest with another's
//! boot id would get its spans into the other's trace. The root span is the boot; a span of the
//! stream without a parent is the root's child. `after` edges are links; marks are events of the
//! step they happened in. A step that never ended ends where the stream does and has `boot.open`.
//! Times are wall-clock times, for the whole boot by one clock sample of the host, or by the
//! guest's `clock` event where there is no sample; `boot.clock_error_ns` is the bound of their
//! error.

pub mod messages; // OpenTelemetry's, in both forms
mod request;
mod resource;

pub use request::Request;
pub use resource::{Resource, encoded_pairs, environment, of_this_machine};

use crate::boot::gpu_name::GpuName;
use crate::data::boot_file::TraceId;
use crate::data::text::printable;
use crate::views::waterfall::{Bar, Mark, Waterfall, level};
use anyhow::{Context, Result, bail};
use messages::{
    Event, InstrumentationScope, KIND_INTERNAL, KeyValue, Link, STATUS_ERROR, Span, Status, flag,
    integer, text,
};
use std::borrow::Borrow;
use std::collections::{HashMap, HashSet};
use std::io::Write;

const SCOPE: &str = "kata-gpu-boot";
/// Limit of events of one span; a guest can send any number of marks.
const MAX_EVENTS: usize = 1024;

/// Writes a boot as one line of OTLP/JSON: the file receiver takes one request per line.
pub fn write(timeline: &Waterfall, resource: &Resource, out: &mut dyn Write) -> Result<()> {
    request(timeline, resource)?
        .write_json(out)
        .context("write")
}

/// Makes a request of all spans of a boot. Fails where nothing places the boot on a wall clock:
/// OTLP knows no other times.
pub fn request<'a>(
    of: impl Borrow<Waterfall> + Send + 'a,
    resource: &Resource,
) -> Result<Request<'a>> {
    let timeline = of.borrow();
    let Some(clock) = WallClock::of(timeline) else {
        bail!(
            "boot {}: no clock sample and no clock event, so its wall-clock time is not known, \
             which OTLP needs: \
             export what the collector wrote, or use --perfetto",
            timeline.boot_id()
        );
    };
    let ids = Ids::new(timeline);
    let mut events = events(timeline, &ids);
    let resource = messages::Resource {
        attributes: attributes(timeline, resource, &clock),
    };
    let scope = InstrumentationScope {
        name: SCOPE.into(),
        version: env!("CARGO_PKG_VERSION").into(),
    };
    let mut next = 0usize;
    // The root, and then the steps: each is made when its turn comes.
    let spans = std::iter::from_fn(move || {
        let timeline = of.borrow();
        let (id, made) = match next.checked_sub(1) {
            None => (ids.root, root(timeline, &clock)),
            Some(at) => {
                let step = timeline.steps.get(at)?;
                (ids.of(at, step), span(timeline, step, &ids, &clock))
            }
        };
        next += 1;
        let (marks, dropped_events_count) = events.remove(&id).unwrap_or_default();
        let events = marks
            .into_iter()
            .filter_map(|mark| timeline.marks.get(mark))
            .map(|mark| event(mark, &clock))
            .collect();
        let (trace_id, span_id) = (ids.trace.to_vec(), bytes(id));
        Some(Span {
            trace_id,
            span_id,
            kind: KIND_INTERNAL,
            events,
            dropped_events_count,
            ..made
        })
    });
    Ok(Request {
        resource,
        scope,
        spans: Box::new(spans),
    })
}

/// Attributes of the resource: the guest, its owner as the host knows it, and the given attributes,
/// which take precedence.
fn attributes(timeline: &Waterfall, resource: &Resource, clock: &WallClock) -> Vec<KeyValue> {
    let boot = &timeline.boot;
    let mut attributes = vec![
        text("service.name", "kata-gpu-init"),
        text("service.instance.id", timeline.boot_id()),
    ];
    attributes.extend(
        boot.version
            .as_deref()
            .map(|v| text("service.version", &printable(v))),
    );
    attributes.push(text("os.type", "linux"));
    attributes.extend(
        boot.kernel
            .as_deref()
            .map(|k| text("os.version", &printable(k))),
    );
    attributes.push(text("boot.clock", clock.source));
    if let Some(sandbox) = &boot.sandbox {
        attributes.push(text("kata.sandbox.id", &printable(&sandbox.id)));
        let names = [
            ("k8s.pod.name", &sandbox.pod),
            ("k8s.namespace.name", &sandbox.namespace),
            ("k8s.pod.uid", &sandbox.uid),
        ];
        attributes.extend(
            names
                .into_iter()
                .filter_map(|(key, value)| Some(text(key, &printable(value.as_deref()?)))),
        );
    }
    attributes.retain(|attribute| !resource.contains_key(&attribute.key));
    attributes.extend(resource.iter().map(|(key, value)| text(key, value)));
    attributes
}

/// Boot clock to wall clock.
struct WallClock {
    offset_ns: i64,
    source: &'static str,
}

impl WallClock {
    fn of(timeline: &Waterfall) -> Option<Self> {
        match (timeline.sample(), timeline.guest_offset_ns) {
            (Some(sample), _) => Some(Self {
                offset_ns: sample.offset_ns,
                source: "host",
            }),
            (None, Some(offset_ns)) => Some(Self {
                offset_ns,
                source: "guest",
            }),
            (None, None) => None,
        }
    }

    /// Unix time in ns.
    fn at(&self, at_ns: i64) -> u64 {
        let ns = i128::from(self.offset_ns) + i128::from(at_ns);
        u64::try_from(ns.max(0)).unwrap_or(u64::MAX)
    }
}

/// Trace and span ids.
struct Ids {
    trace: [u8; 16],
    root: u64,
    spans: HashSet<u64>,
}

impl Ids {
    fn new(timeline: &Waterfall) -> Self {
        // No collector began the file: somebody exports it by hand, and knows where it is from. A
        // boot id has as many digits as a trace id.
        let by_boot = || {
            let digits: String = timeline
                .boot_id()
                .chars()
                .filter(char::is_ascii_hexdigit)
                .collect();
            u128::from_str_radix(&digits, 16).unwrap_or_default()
        };
        let trace = timeline.trace.map_or_else(by_boot, TraceId::get);
        // 0 is no id.
        let root = (trace as u64).max(1);
        let trace = trace.to_be_bytes();
        Self {
            trace,
            root,
            spans: timeline.boot.spans.iter().map(|s| s.id).collect(),
        }
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

    /// Span id of the step with this number.
    fn of(&self, at: usize, step: &Bar) -> u64 {
        // A step without an id in the stream gets one from the upper half, which a guest that
        // counts from 1 does not reach.
        self.span(step.id.unwrap_or(1 << 63 | at as u64))
    }

    /// Span id of the parent; the root's where there is no such span.
    fn parent(&self, parent: Option<u64>) -> u64 {
        parent
            .filter(|id| self.spans.contains(id))
            .map_or(self.root, |id| self.span(id))
    }
}

/// Marks that become events, by span, and the number of those beyond the limit.
fn events(timeline: &Waterfall, ids: &Ids) -> HashMap<u64, (Vec<usize>, u32)> {
    let mut events: HashMap<u64, (Vec<usize>, u32)> = HashMap::new();
    // Details are for somebody who looks at this one boot, with the file at hand.
    for (at, mark) in timeline
        .marks
        .iter()
        .enumerate()
        .filter(|(_, mark)| !mark.detail || mark.is_report())
    {
        let (marks, dropped) = events.entry(ids.parent(mark.parent)).or_default();
        if marks.len() < MAX_EVENTS {
            marks.push(at);
        } else {
            *dropped = dropped.saturating_add(1);
        }
    }
    events
}

/// An id as it is sent.
fn bytes(id: u64) -> Vec<u8> {
    id.to_be_bytes().to_vec()
}

fn error_status(message: String) -> Status {
    Status {
        message,
        code: STATUS_ERROR,
    }
}

fn of_gpu(gpu: Option<GpuName>) -> impl Iterator<Item = KeyValue> {
    let address = gpu.map(|gpu| text("gpu.address", &gpu.address.to_string()));
    let index = gpu.and_then(|gpu| Some(integer("gpu.index", gpu.index?)));
    address.into_iter().chain(index)
}

fn event(mark: &Mark, clock: &WallClock) -> Event {
    let mut attributes = vec![
        text("text", &mark.text),
        text("boot.owner", mark.owner.name()),
        text("level", level(mark)),
    ];
    attributes.extend(of_gpu(mark.gpu));
    attributes.extend(
        mark.facts()
            .map(|(key, value)| text(&format!("boot.field.{key}"), &value)),
    );
    Event {
        time_unix_nano: clock.at(mark.at_ns),
        name: mark.name.clone(),
        attributes,
    }
}

/// The boot: all of its span that is not every span's.
fn root(timeline: &Waterfall, clock: &WallClock) -> Span {
    let boot = &timeline.boot;
    let mut attributes = vec![
        integer("boot.gpus", boot.gpus.len() as u64),
        integer("boot.gpus_usable", boot.usable_gpus() as u64),
        integer("boot.records_lost", boot.lost.records),
        flag("boot.open", boot.settled_ns.is_none()),
    ];
    attributes.extend(
        boot.too_large
            .map(|too_large| text("boot.too_large", &too_large.sentence())),
    );
    attributes.extend(error_bound(timeline, timeline.begin_ns));
    let failed = boot.failed_gpus().count();
    let error = boot
        .power_off
        .as_deref()
        .map(printable)
        .or_else(|| (failed > 0).then(|| format!("{failed} GPU(s) failed")));
    Span {
        name: "gpu guest boot".into(),
        start_time_unix_nano: clock.at(timeline.begin_ns),
        end_time_unix_nano: clock.at(timeline.boot_end_ns),
        attributes,
        status: error.map(error_status),
        ..Span::default()
    }
}

fn error_bound(timeline: &Waterfall, at_ns: i64) -> Option<KeyValue> {
    Some(integer(
        "boot.clock_error_ns",
        timeline.wall_at(at_ns)?.error_ns,
    ))
}

fn span(timeline: &Waterfall, step: &Bar, ids: &Ids, clock: &WallClock) -> Span {
    let mut attributes = vec![text("boot.owner", step.owner.name())];
    attributes.extend(of_gpu(step.gpu));
    let flags = [
        ("boot.critical", step.critical),
        ("boot.open", step.end_ns.is_none()),
        ("boot.begin_lost", step.begin_lost),
        ("boot.approximate", step.approximate),
    ];
    attributes.extend(
        flags
            .into_iter()
            .filter(|(_, set)| *set)
            .map(|(key, set)| flag(key, set)),
    );
    attributes.extend(
        step.fields
            .iter()
            .map(|(key, value)| text(&format!("boot.field.{key}"), value)),
    );
    attributes.extend(error_bound(timeline, step.begin_ns));
    let known = step.after.iter().filter(|after| ids.spans.contains(after));
    let link = |after: &u64| Link {
        trace_id: ids.trace.to_vec(),
        span_id: bytes(ids.span(*after)),
        attributes: vec![text("boot.relation", "after")],
    };
    Span {
        parent_span_id: bytes(ids.parent(step.parent)),
        name: step.name.clone(),
        start_time_unix_nano: clock.at(step.begin_ns),
        end_time_unix_nano: clock.at(step.end_ns.unwrap_or(timeline.end_ns.max(step.begin_ns))),
        attributes,
        links: known.map(link).collect(),
        status: step.error.clone().map(error_status),
        ..Span::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::boot::model::Boot;
    use crate::data::boot_file::{BootFile, HostEvent, HostLine};
    use crate::data::text::hex;
    use kata_gpu_test_support::tests_dir;

    fn of_text(text: &str) -> Waterfall {
        let file = BootFile::read(text.as_bytes()).unwrap();
        let boot = Boot::new(&file, &[]);
        Waterfall::new(&file, boot)
    }

    #[test]
    fn the_trace_id_is_the_collectors_else_the_boot_id() {
        let text = std::fs::read_to_string(tests_dir(
            "fixtures/boots/hand-made-3-gpus-one-fails.ndjson",
        ))
        .unwrap();
        let trace = |text: &str| {
            let timeline = of_text(text);
            let boot_id = timeline.boot_id().replace('-', "");
            let span = request(timeline, &Resource::new())
                .unwrap()
                .spans
                .next()
                .unwrap();
            (hex(&span.trace_id), boot_id)
        };
        let (by_hand, boot_id) = trace(&text);
        assert_eq!(by_hand, boot_id);
        let id = TraceId::random().unwrap();
        let (header, rest) = text.split_once('\n').unwrap();
        let (collected, boot_id) = trace(&format!(
            "{header}\n{}{rest}",
            HostLine::now(HostEvent::Trace { id }).to_line()
        ));
        assert_eq!(collected, String::from(id));
        assert_ne!(collected, boot_id);
        for wrong in ["", "0", &"0".repeat(32), &"+".repeat(32), &"f".repeat(33)] {
            assert!(TraceId::try_from(wrong.to_string()).is_err(), "{wrong}");
        }
    }

    #[test]
    fn no_id_is_zero_or_the_roots() {
        for root in [1, 2, u64::MAX, 0x8000_0000_0000_beef] {
            let ids = Ids {
                trace: [0; 16],
                root,
                spans: HashSet::new(),
            };
            for id in [0, 1, root, root.wrapping_sub(1), u64::MAX] {
                assert!(![0, root].contains(&ids.span(id)), "{root:x} {id:x}");
            }
        }
    }
}
