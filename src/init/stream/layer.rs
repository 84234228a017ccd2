//! The one place where `tracing` becomes records: a span's creation is a begin record, its close an
//! end record, an event an event record.
//!
//! Field names with a meaning of their own: `gpu` (a PCI address), `error`, `step_id` and `after`
//! (see [`RunningStep`]), `at_ns` (CLOCK_BOOTTIME when it happened, where that was earlier). All
//! others go to `fields`. Values recorded on a span after its begin appear on its end record.

use super::ring::Ring;
use crate::machine::clock::boottime_ns;
use kata_gpu_wire::pci_address::PciAddress;
use kata_gpu_wire::record::{Kind, Level, Record, SCHEMA};
use serde_json::{Map, Value};
use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id};
use tracing::{Event, Subscriber};
use tracing_subscriber::Layer;
use tracing_subscriber::layer::Context;
use tracing_subscriber::registry::LookupSpan;

/// Id of a step: unique in this boot, and valid after the step has ended, so that a later step can
/// name it in `after`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepId(pub u64);

static NEXT: AtomicU64 = AtomicU64::new(1);

impl StepId {
    /// A fresh id.
    pub fn next() -> Self {
        Self(NEXT.fetch_add(1, Ordering::Relaxed))
    }

    /// Makes all later ids greater than `last`, for a worker that continues a stream.
    pub fn continue_after(last: u64) {
        NEXT.fetch_max(last.saturating_add(1), Ordering::Relaxed);
    }
}

/// Steps that a step had to wait for. Debug prints the format of the `after` field.
#[derive(Clone, Default)]
pub struct After(pub Vec<StepId>);

impl fmt::Debug for After {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list()
            .entries(self.0.iter().map(|id| id.0))
            .finish()
    }
}

impl From<&[Option<StepId>]> for After {
    fn from(ids: &[Option<StepId>]) -> Self {
        Self(ids.iter().flatten().copied().collect())
    }
}

/// A running step of the boot: begins when made (by [`crate::step!`]), ends when dropped.
#[must_use = "a step ends when it is dropped"]
pub struct RunningStep {
    span: tracing::Span,
    id: StepId,
}

impl RunningStep {
    pub fn new(id: StepId, span: tracing::Span) -> Self {
        Self { span, id }
    }

    pub fn id(&self) -> StepId {
        self.id
    }

    /// Adds a value that is known late; it appears on the end record. The field must be declared in
    /// the `step!` as `tracing::field::Empty`.
    pub fn note(&self, field: &str, value: impl tracing::Value) {
        self.span.record(field, value);
    }

    /// Marks the step as failed.
    pub fn fail(&self, error: &dyn fmt::Display) {
        self.span.record("error", tracing::field::display(error));
    }

    /// Runs `work` as this step and ends it, failed if `work` failed. Events inside get this step
    /// as their parent.
    pub fn run<T, E: fmt::Display>(self, work: impl FnOnce() -> Result<T, E>) -> Result<T, E> {
        let result = self.span.in_scope(work);
        if let Err(error) = &result {
            self.fail(error);
        }
        result
    }

    /// Like [`RunningStep::run`], for asynchronous work.
    pub async fn run_async<T, E: fmt::Display>(
        self,
        work: impl Future<Output = Result<T, E>>,
    ) -> Result<T, E> {
        let result = work.await;
        if let Err(error) = &result {
            self.fail(error);
        }
        result
    }
}

/// Begins a [`RunningStep`]: `step!(names::GPU_BIND, gpu = %address, after = ?after)`.
#[macro_export]
macro_rules! step {
    ($name:expr $(, $($field:tt)*)?) => {{
        let id = $crate::stream::layer::StepId::next();
        $crate::stream::layer::RunningStep::new(id, tracing::info_span!(
            $name, step_id = id.0, error = tracing::field::Empty $(, $($field)*)?),
        )
    }};
}

/// Data that the layer keeps with each open span.
struct Open {
    id: u64,
    gpu: Option<PciAddress>,
    late: Fields,
}

#[derive(Default)]
struct Fields {
    gpu: Option<PciAddress>,
    error: Option<String>,
    step_id: Option<u64>,
    after: Vec<u64>,
    at_ns: Option<u64>,
    others: Map<String, Value>,
}

impl Fields {
    fn text(&mut self, field: &Field, text: String) {
        match field.name() {
            // Written by Display of PciAddress; anything else is a bug that a golden file shows.
            "gpu" => self.gpu = text.parse().ok(),
            "error" => self.error = Some(text),
            // Written by Debug of After, which is JSON.
            "after" => self.after = serde_json::from_str(&text).unwrap_or_default(),
            name => {
                self.others.insert(name.to_string(), Value::from(text));
            }
        }
    }
}

impl Visit for Fields {
    fn record_u64(&mut self, field: &Field, value: u64) {
        match field.name() {
            "step_id" => self.step_id = Some(value),
            "at_ns" => self.at_ns = Some(value),
            name => {
                self.others.insert(name.to_string(), Value::from(value));
            }
        }
    }
    fn record_i64(&mut self, field: &Field, value: i64) {
        self.others
            .insert(field.name().to_string(), Value::from(value));
    }
    fn record_bool(&mut self, field: &Field, value: bool) {
        self.others
            .insert(field.name().to_string(), Value::from(value));
    }
    fn record_str(&mut self, field: &Field, value: &str) {
        self.text(field, value.to_string());
    }
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.text(field, format!("{value:?}"));
    }
}

/// Writes records into a ring.
pub struct RecordLayer {
    ring: Arc<Ring>,
}

impl RecordLayer {
    pub fn new(ring: Arc<Ring>) -> Self {
        Self { ring }
    }

    fn push(
        &self,
        kind: Kind,
        name: &str,
        level: &tracing::Level,
        span: Option<u64>,
        parent: Option<u64>,
        fields: Fields,
    ) {
        let level = match *level {
            tracing::Level::ERROR => Level::Error,
            tracing::Level::WARN => Level::Warn,
            tracing::Level::INFO => Level::Info,
            tracing::Level::DEBUG => Level::Debug,
            tracing::Level::TRACE => Level::Trace,
        };
        self.ring.push(Record {
            schema: SCHEMA,
            seq: 0, // the ring's to give
            boottime_ns: fields.at_ns.unwrap_or_else(boottime_ns),
            kind,
            name: name.to_string(),
            // A failed step matters more than a successful one.
            level: if kind == Kind::End && fields.error.is_some() {
                Level::Error
            } else {
                level
            },
            gpu: fields.gpu,
            span,
            parent,
            after: fields.after,
            error: fields.error,
            fields: fields.others,
        });
    }
}

fn id_of<'a, S: Subscriber + LookupSpan<'a>>(
    span: &tracing_subscriber::registry::SpanRef<'a, S>,
) -> Option<u64> {
    span.extensions().get::<Open>().map(|open| open.id)
}

impl<S: Subscriber + for<'a> LookupSpan<'a>> Layer<S> for RecordLayer {
    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, S>) {
        let Some(span) = context.span(id) else { return };
        let mut fields = Fields::default();
        attributes.record(&mut fields);
        let own = fields.step_id.unwrap_or_else(|| StepId::next().0);
        let parent = span.parent().and_then(|p| id_of(&p));
        span.extensions_mut().insert(Open {
            id: own,
            gpu: fields.gpu,
            late: Fields::default(),
        });
        self.push(
            Kind::Begin,
            span.name(),
            span.metadata().level(),
            Some(own),
            parent,
            fields,
        );
    }

    fn on_record(&self, id: &Id, values: &tracing::span::Record<'_>, context: Context<'_, S>) {
        let Some(span) = context.span(id) else { return };
        if let Some(open) = span.extensions_mut().get_mut::<Open>() {
            values.record(&mut open.late);
        }
    }

    fn on_event(&self, event: &Event<'_>, context: Context<'_, S>) {
        let mut fields = Fields::default();
        event.record(&mut fields);
        let parent = context.event_span(event).and_then(|span| id_of(&span));
        self.push(
            Kind::Event,
            event.metadata().name(),
            event.metadata().level(),
            None,
            parent,
            fields,
        );
    }

    fn on_close(&self, id: Id, context: Context<'_, S>) {
        let Some(span) = context.span(&id) else {
            return;
        };
        let Some(open) = span.extensions_mut().remove::<Open>() else {
            return;
        };
        let parent = span.parent().and_then(|p| id_of(&p));
        let fields = Fields {
            gpu: open.gpu,
            ..open.late
        };
        self.push(
            Kind::End,
            span.name(),
            span.metadata().level(),
            Some(open.id),
            parent,
            fields,
        );
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use crate::stream::ring::Reader;
    use kata_gpu_wire::decode::decode;
    use kata_gpu_wire::names;
    use kata_gpu_wire::record::Line;
    use tracing_subscriber::layer::SubscriberExt;

    /// Records that work on this thread makes.
    pub fn records(work: impl FnOnce()) -> Vec<Record> {
        let ring = Arc::new(Ring::default());
        let subscriber = tracing_subscriber::registry().with(RecordLayer::new(Arc::clone(&ring)));
        tracing::subscriber::with_default(subscriber, work);
        let lines = Reader::new(ring, "test", 0).read(1000);
        lines
            .iter()
            .map(|l| {
                if let Ok(Line::Record(r)) = decode(l.as_bytes()) {
                    *r
                } else {
                    panic!("{l}")
                }
            })
            .collect()
    }

    #[test]
    fn a_step_is_two_records_with_one_id_and_its_edges() {
        let all = records(|| {
            let first = step!(names::GPU_ENABLE, gpu = %"0001:00:03.0");
            let edge = first.id();
            drop(first);
            let second = step!(names::GPU_BIND, gpu = %"0001:00:03.0", after = ?After(vec![edge]));
            let outcome: Result<(), &str> = second.run(|| {
                tracing::info!(name: names::GPU_BOUND, minor = 3_u64);
                Err("no such device")
            });
            assert!(outcome.is_err());
        });
        let kinds: Vec<(Kind, &str)> = all.iter().map(|r| (r.kind, r.name.as_str())).collect();
        assert_eq!(
            kinds,
            [
                (Kind::Begin, "gpu.enable"),
                (Kind::End, "gpu.enable"),
                (Kind::Begin, "gpu.bind"),
                (Kind::Event, "gpu.bound"),
                (Kind::End, "gpu.bind")
            ]
        );
        assert_eq!(all[0].span, all[1].span);
        assert_eq!(all[2].after, [all[0].span.unwrap()]);
        assert_eq!(all[3].parent, all[2].span);
        assert_eq!(all[3].fields["minor"], 3);
        assert_eq!(all[4].error.as_deref(), Some("no such device"));
        assert_eq!(all[4].level, Level::Error);
        assert!(
            all.iter()
                .filter(|r| r.kind != Kind::Event)
                .all(|r| r.gpu.is_some())
        );
        assert_eq!(
            all.iter().map(|r| r.seq).collect::<Vec<_>>(),
            [0, 1, 2, 3, 4]
        );
    }

    #[test]
    fn an_event_can_say_when_it_really_happened() {
        let all = records(|| tracing::info!(name: names::INIT_START, at_ns = 42_u64, pid = 1_u64));
        assert_eq!(
            (all[0].boottime_ns, &all[0].fields["pid"]),
            (42, &Value::from(1))
        );
        assert!(!all[0].fields.contains_key("at_ns"));
    }
}
