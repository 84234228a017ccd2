//! Spans of a boot, and the state of its GPUs by spans and events.

use super::cause::Cause;
use super::gpu_health::Health;
use super::gpu_name::GpuName;
use super::model::{Failure, Gpu, GpuStep, Now, OpenStep, Span, State};
use crate::data::budget::{MAX_GPUS, MAX_SPANS, TooLarge};
use crate::data::compact_record::{Record, SpanFields};
use crate::data::text::start;
use kata_gpu_wire::names;
use kata_gpu_wire::pci_address::PciAddress;
use kata_gpu_wire::record::Kind;
use std::collections::{BTreeMap, HashMap};

/// Limit of a failure's text, in bytes.
const MAX_REASON: usize = 2000;

pub fn spans(records: &[&Record], too_large: &mut TooLarge) -> Vec<Span> {
    let mut spans: Vec<Span> = Vec::new();
    let mut by_id: HashMap<u64, usize> = HashMap::new();
    for record in records {
        let Some(id) = record.span else { continue };
        let at = match by_id.get(&id) {
            Some(at) => *at,
            None if spans.len() >= MAX_SPANS => {
                // Count both records of a span: recognising the second would take memory.
                too_large.spans += 1;
                continue;
            }
            None => {
                by_id.insert(id, spans.len());
                spans.push(Span {
                    id,
                    name: record.name.clone(),
                    gpu: record.gpu,
                    parent: record.parent,
                    after: record.after().to_vec(),
                    begin_ns: None,
                    end_ns: None,
                    error: None,
                    fields: SpanFields::default(),
                });
                spans.len() - 1
            }
        };
        let Some(span) = spans.get_mut(at) else {
            continue;
        };
        match record.kind {
            Kind::Begin => {
                span.begin_ns = Some(record.boottime_ns);
                span.fields.begin = record.fields.clone();
            }
            Kind::End => {
                span.end_ns = Some(record.boottime_ns);
                span.error.clone_from(&record.error);
                span.fields.end = record.fields.clone();
            }
            Kind::Event | Kind::Kmsg => {}
        }
        span.gpu = span.gpu.or(record.gpu);
    }
    spans
}

/// Text of a reason, cut to the limit.
fn reason_text(text: &str) -> String {
    start(text, MAX_REASON).to_string()
}

/// State that a GPU has left, and how long the GPU was in it.
pub struct Passed {
    pub state: State,
    pub took_ns: u64,
}

/// GPUs by the records of a boot in order of time: the whole boot's, or those that have come.
#[derive(Clone, Debug, Default)]
pub struct Gpus {
    pub all: BTreeMap<PciAddress, Gpu>,
    /// Last beginning of a step of a GPU.
    begun: HashMap<(PciAddress, &'static str), u64>,
    /// Number of records about GPUs beyond the limit.
    pub left_out: u64,
}

impl Gpus {
    /// Takes the next record. Returns the state that the record ended, if it shows how long its
    /// GPU was in it.
    pub fn take(&mut self, record: &Record) -> Option<Passed> {
        let address = record.gpu?;
        // The kernel's lines name all PCI functions: they count for known GPUs alone.
        if record.kind != Kind::Kmsg && !self.all.contains_key(&address) {
            if self.all.len() >= MAX_GPUS {
                self.left_out += 1;
                return None;
            }
            self.all.insert(address, found(address, record.boottime_ns));
        }
        let gpu = self.all.get_mut(&address)?;
        let at_ns = record.boottime_ns;
        let number = |key: &str| record.fields.number(key);
        if record.kind != Kind::Kmsg {
            gpu.index = number("index").or(gpu.index);
        }
        match (record.kind, record.name.as_str()) {
            (Kind::Begin, name) => {
                if let Some(name) = [names::GPU_BIND, names::GPU_INIT]
                    .into_iter()
                    .find(|timed| *timed == name)
                {
                    self.begun.insert((address, name), at_ns);
                }
            }
            (Kind::Event, name) => {
                let took_ns = |name| at_ns.checked_sub(*self.begun.get(&(address, name))?);
                match name {
                    names::GPU_FOUND => gpu.found_ns = gpu.found_ns.or(Some(at_ns)),
                    names::GPU_BOUND => {
                        gpu.bound = Some(GpuStep {
                            at_ns,
                            took_ns: took_ns(names::GPU_BIND),
                        });
                        gpu.minor = number("minor").or(gpu.minor);
                    }
                    names::GPU_PUBLISHED => {
                        gpu.published = gpu.published.or(Some(GpuStep {
                            at_ns,
                            took_ns: gpu.since_bound_ns(at_ns),
                        }));
                        gpu.now.is_published = true;
                    }
                    names::GPU_USABLE => {
                        gpu.usable = Some(GpuStep {
                            at_ns,
                            took_ns: took_ns(names::GPU_INIT),
                        })
                    }
                    names::GPU_FAILED => gpu.failed = Some(failure(record)),
                    _ => Health::take(&mut gpu.health, record),
                }
            }
            (Kind::End | Kind::Kmsg, _) => {}
        }
        gpu.now.go_on(next_state(record, gpu.now.state)?, at_ns)
    }
}

fn found(address: PciAddress, at_ns: u64) -> Gpu {
    Gpu {
        address,
        index: None,
        minor: None,
        found_ns: None,
        enabled: None,
        bound: None,
        published: None,
        usable: None,
        failed: None,
        still: None,
        health: None,
        now: Now {
            since_ns: at_ns,
            ..Now::default()
        },
    }
}

fn failure(record: &Record) -> Failure {
    let field = |key: &str| record.fields.text(key).unwrap_or("?");
    let reason = reason_text(record.error.as_deref().unwrap_or_else(|| field("reason")));
    Failure {
        at_ns: record.boottime_ns,
        step: reason_text(field("step")),
        reason,
        cause: Cause::of(&record.fields, record.error.as_deref()),
    }
}

/// State that a record shows of its GPU, which is in `state`.
fn next_state(record: &Record, state: State) -> Option<State> {
    Some(match (record.kind, record.name.as_str()) {
        // Found again because other GPUs came or went, or after a removal.
        (Kind::Event, names::GPU_FOUND) if matches!(state, State::Removed | State::Failed) => {
            State::Waiting
        }
        (Kind::Begin, names::GPU_ENABLE) => State::Enabling,
        (Kind::End, names::GPU_ENABLE) if record.error.is_none() => State::Enabled,
        // In a load that probes all GPUs, only this line shows a probe.
        (Kind::Kmsg, _)
            if state < State::Probing && record.kmsg_text().contains("enabling device") =>
        {
            State::Probing
        }
        (Kind::Begin, names::GPU_BIND) => State::Probing,
        (Kind::Event, names::GPU_BOUND) => State::Bound,
        (Kind::Begin, names::GPU_INIT) => State::Initialising,
        (Kind::Event, names::GPU_USABLE) => State::Ready,
        (Kind::Event, names::GPU_FAILED) => State::Failed,
        (Kind::Event, names::GPU_REMOVED) => State::Removed,
        _ => return None,
    })
}

impl Gpu {
    pub fn name(&self) -> GpuName {
        GpuName {
            index: self.index,
            address: self.address,
        }
    }

    /// Time since the bind, which is a publication's duration.
    pub fn since_bound_ns(&self, at_ns: u64) -> Option<u64> {
        at_ns.checked_sub(self.bound?.at_ns)
    }
}

impl Now {
    fn go_on(&mut self, next: State, at_ns: u64) -> Option<Passed> {
        // Late records do not reopen a finished state; only the init itself does.
        let reopens = matches!(next, State::Failed | State::Removed | State::Waiting);
        if next == self.state || (self.state.is_over() && !reopens) {
            return None;
        }
        let passed = Passed {
            state: self.state,
            took_ns: at_ns.saturating_sub(self.since_ns),
        };
        let is_progress =
            matches!(next, State::Enabled | State::Bound | State::Ready) && at_ns >= self.since_ns;
        if matches!(next, State::Failed | State::Removed) {
            self.is_published = false;
        } else {
            self.furthest = self.furthest.max(next);
        }
        (self.state, self.since_ns) = (next, at_ns);
        is_progress.then_some(passed)
    }
}

/// GPUs of a whole boot in PCI order.
pub fn gpus(records: &[&Record], spans: &[Span], too_large: &mut TooLarge) -> Vec<Gpu> {
    let mut gpus = Gpus::default();
    for record in records {
        gpus.take(record);
    }
    too_large.gpu_records += gpus.left_out;
    let mut gpus = gpus.all;
    for span in spans {
        let Some(gpu) = span.gpu.and_then(|address| gpus.get_mut(&address)) else {
            continue;
        };
        match (span.begin_ns, span.end_ns) {
            (_, Some(at_ns)) if span.name == names::GPU_ENABLE && span.error.is_none() => {
                gpu.enabled = Some(GpuStep {
                    at_ns,
                    took_ns: span.took_ns(),
                });
            }
            // The open step that began last is the GPU's current one. Not the lane's wait: the lane
            // waits for the GPU.
            (Some(since_ns), None)
                if gpu.usable.is_none()
                    && gpu.failed.is_none()
                    && span.name != names::LANE_WAIT =>
            {
                gpu.still = Some(OpenStep {
                    step: span.name.to_string(),
                    since_ns,
                });
            }
            _ => {}
        }
    }
    gpus.into_values().collect()
}
