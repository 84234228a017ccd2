//! Spans of a boot, and the state of its GPUs by spans and events.

use super::gpu_health::Health;
use super::model::{Failure, Gpu, OpenStep, Span, Step};
use crate::events::names;
use crate::events::record::Kind;
use crate::host::data::budget::{MAX_GPUS, MAX_SPANS, TooLarge};
use crate::host::data::compact_record::{Field, Record, SpanFields};
use crate::host::data::text::start;
use crate::pci::PciAddress;
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
        let Some(span) = spans.get_mut(at) else { continue };
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

/// Times at which the steps of GPUs began, by step and GPU.
struct Beginnings(HashMap<(&'static str, PciAddress), Vec<u64>>);

impl Beginnings {
    /// `spans`: in order of their beginning.
    fn of(spans: &[Span], wanted: &[&'static str]) -> Self {
        let mut all: HashMap<_, Vec<u64>> = HashMap::new();
        for span in spans {
            if let (Some(name), Some(gpu), Some(begin_ns)) = (wanted.iter().find(|w| span.name == **w), span.gpu, span.begin_ns) {
                all.entry((*name, gpu)).or_default().push(begin_ns);
            }
        }
        // A span whose records are not in order of time is placed at its first one.
        all.values_mut().for_each(|times| times.sort_unstable());
        Self(all)
    }

    /// Duration until `at_ns` of the last such step that had begun by then.
    fn took_ns(&self, name: &'static str, gpu: PciAddress, at_ns: u64) -> Option<u64> {
        let times = self.0.get(&(name, gpu))?;
        let begun = |begin: &u64| {
            #[cfg(test)]
            super::fold::tests::LOOKED_AT.with(|n| n.set(n.get() + 1));
            *begin <= at_ns
        };
        let last = times.get(times.partition_point(begun).checked_sub(1)?)?;
        at_ns.checked_sub(*last)
    }
}

/// GPUs in PCI order.
pub fn gpus(records: &[&Record], spans: &[Span], too_large: &mut TooLarge) -> Vec<Gpu> {
    let mut gpus: BTreeMap<PciAddress, Gpu> = BTreeMap::new();
    let beginnings = Beginnings::of(spans, &[names::GPU_BIND, names::GPU_INIT]);
    for record in records {
        // The kernel's lines name all PCI functions.
        let Some(address) = record.gpu.filter(|_| record.kind != Kind::Kmsg) else { continue };
        if gpus.len() >= MAX_GPUS && !gpus.contains_key(&address) {
            too_large.gpu_records += 1;
            continue;
        }
        let gpu = gpus.entry(address).or_insert_with(|| Gpu {
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
        });
        if record.kind != Kind::Event {
            continue;
        }
        Health::take(&mut gpu.health, record);
        let at_ns = record.boottime_ns;
        let number = |key: &str| record.fields.get(key).and_then(Field::as_u64);
        let took = |name| beginnings.took_ns(name, address, at_ns);
        match record.name.as_str() {
            names::GPU_FOUND => {
                gpu.found_ns = gpu.found_ns.or(Some(at_ns));
                gpu.index = number("index").or(gpu.index);
            }
            names::GPU_BOUND => {
                gpu.bound = Some(Step { at_ns, took_ns: took(names::GPU_BIND) });
                gpu.minor = number("minor").or(gpu.minor);
            }
            names::GPU_PUBLISHED => {
                let took_ns = gpu.bound.and_then(|b| at_ns.checked_sub(b.at_ns));
                gpu.published = gpu.published.or(Some(Step { at_ns, took_ns }));
            }
            names::GPU_USABLE => gpu.usable = Some(Step { at_ns, took_ns: took(names::GPU_INIT) }),
            names::GPU_FAILED => {
                let field = |key: &str| record.fields.get(key).and_then(Field::as_str).unwrap_or("?");
                let reason = reason_text(record.error.as_deref().unwrap_or_else(|| field("reason")));
                gpu.failed = Some(Failure { at_ns, step: reason_text(field("step")), reason });
            }
            _ => {}
        }
    }
    for span in spans {
        let Some(gpu) = span.gpu.and_then(|address| gpus.get_mut(&address)) else { continue };
        match (span.begin_ns, span.end_ns) {
            (_, Some(at_ns)) if span.name == names::GPU_ENABLE && span.error.is_none() => {
                gpu.enabled = Some(Step { at_ns, took_ns: span.took_ns() });
            }
            // The open step that began last is the GPU's current one. Not the lane's wait: the lane
            // waits for the GPU.
            (Some(since_ns), None) if gpu.usable.is_none() && gpu.failed.is_none() && span.name != names::LANE_WAIT => {
                gpu.still = Some(OpenStep { step: span.name.to_string(), since_ns });
            }
            _ => {}
        }
    }
    gpus.into_values().collect()
}
