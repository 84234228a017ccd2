//! Metrics of a collector, a row each: name, type, label, help, values. Prometheus' text is made
//! from these rows; a test compares METRICS.md, the dashboard and the alerts with them.
//!
//! Names, labels and help need no escaping; a label's values are constants of this program, never
//! a guest's texts (exception: [`builds`](super::builds)). Times are in seconds, sizes in bytes,
//! and a name ends in its unit.

use super::pushing::Queue;
use super::state::State;
use super::tally::{Histograms, Outcome, Tally, whose_label};
use crate::collector_counters::Counts;
use crate::ends::Ends;
use crate::lock::lock;
use crate::store::Store;
use kata_gpu_report::analysis::rules::RULES;
use kata_gpu_report::data::host_check::HostCheck;
use std::fmt;
use std::sync::Arc;

/// Prefix of every name.
const PREFIX: &str = "kata_gpu_boot_";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Counter,
    Gauge,
    Histogram,
}

impl Kind {
    /// The type by Prometheus' name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Counter => "counter",
            Self::Gauge => "gauge",
            Self::Histogram => "histogram",
        }
    }
}

/// Values of one scrape; counters and boots are read at one time.
pub struct Snapshot<'a> {
    pub counts: Counts,
    pub tally: Tally,
    pub state: &'a State,
}

impl Snapshot<'_> {
    fn store(&self) -> &Store {
        &self.state.collector.store
    }
}

/// Values of a metric at one time.
pub enum Values<'a> {
    /// No value: the function that the metric counts is off.
    Nothing,
    One(u64),
    /// Values by the metric's label.
    Each(Vec<(&'static str, u64)>),
    /// Values by the metric's labels.
    Labelled(Vec<(Vec<&'a str>, u64)>),
    /// Histograms by the metric's label.
    Histograms(&'a Histograms),
}

use Values::{Each, Labelled, One};

/// A row. Its `Display` is the name in PromQL.
pub struct Metric {
    /// Name without the prefix.
    pub name: &'static str,
    pub kind: Kind,
    pub labels: &'static [&'static str],
    pub help: &'static str,
    pub values: for<'a> fn(&'a Snapshot<'a>) -> Values<'a>,
}

impl fmt::Display for Metric {
    fn fmt(&self, out: &mut fmt::Formatter) -> fmt::Result {
        write!(out, "{PREFIX}{}", self.name)
    }
}

macro_rules! metrics {
    ($($kind:ident $name:literal {$($label:ident),*} $help:literal $values:expr;)*) => {
        /// All metrics, in the order of the text.
        pub static TABLE: &[Metric] = &[$(Metric {
            name: $name,
            kind: Kind::$kind,
            labels: &[$(stringify!($label)),*],
            help: $help,
            values: $values,
        }),*];
    };
}

metrics! {
    Gauge "build_info" {version, build_id}
        "Which version and build this is; always 1."
        |now| Labelled(vec![(vec![env!("CARGO_PKG_VERSION"), &now.state.build_id], 1)]);

    // Boots.
    Counter "boots_begun_total" {}
        "Boots that began to be received."
        |now| One(now.counts.boots);
    Gauge "boots_in_flight" {state}
        "Boots that are neither settled nor over."
        |now| {
            let (connected, not) = now.store().ends.as_ref().map_or((0, 0), Ends::in_flight);
            Each(vec![("connected", connected), ("disconnected", not)])
        };
    Counter "boots_not_followed_total" {}
        "Boots that are in no other number here, because too many were in flight."
        |now| One(now.counts.not_followed);
    Counter "boots_total" {outcome}
        "Boots that are over, by how they ended."
        |now| Each(Outcome::ALL.map(|outcome| (outcome.name(), now.tally.outcome(outcome))).into());
    Counter "gpus_total" {result}
        "GPUs of boots that are over, by outcome."
        |now| Each(vec![
            ("usable", now.tally.usable_gpus),
            ("failed", now.tally.failed_gpus),
            ("unknown", now.tally.other_gpus),
        ]);
    Counter "failures_total" {reason, whose}
        "What failed in boots that are over, by reason, and whose that is."
        |now| {
            let counts = now.tally.failures.iter();
            Labelled(
                counts.map(|(reason, count)| (vec![*reason, whose_label(reason)], *count)).collect()
            )
        };
    Counter "guest_boots_total" {version, build_id, result}
        "Boots that are over, by the guest's init, and by whether anything failed."
        |now| Labelled(now.tally.builds.all().flat_map(|build| {
            let of = |result, boots| (vec![&*build.version, &*build.id, result], boots);
            [of("well", build.well), of("failed", build.failed)]
        }).collect());
    Histogram "milestone_seconds" {milestone}
        "Time from the kernel's start to a milestone, per boot."
        |now| Values::Histograms(&now.tally.milestones);
    Histogram "phase_seconds" {phase}
        "Time in which at least one step of the phase was running, per boot."
        |now| Values::Histograms(&now.tally.phases);
    Histogram "step_seconds" {step}
        "Duration of single steps that ended."
        |now| Values::Histograms(&now.tally.steps);
    Counter "records_lost_total" {}
        "Records of boots that are over that never came."
        |now| One(now.tally.lost);

    // Streams and files.
    Gauge "connections" {}
        "Connections of guests that are open."
        |now| One(now.state.collector.peers.open());
    Counter "connections_total" {}
        "Connections of guests that were taken."
        |now| One(now.counts.connections);
    Counter "connections_refused_total" {}
        "Connections of guests that were over a limit."
        |now| One(now.counts.refused);
    Counter "connections_of_strangers_total" {}
        "Connections that were refused because they are no guest's."
        |now| One(now.counts.strangers);
    Counter "received_bytes_total" {}
        "Bytes that guests sent."
        |now| One(now.counts.bytes);
    Counter "records_total" {}
        "Records that were new and are kept."
        |now| One(now.counts.records);
    Counter "records_duplicate_total" {}
        "Records that came again."
        |now| One(now.counts.duplicates);
    Counter "records_capped_total" {}
        "Records over the limits of their boot."
        |now| One(now.counts.capped);
    Counter "records_dropped_total" {}
        "Records that came while the disk took nothing; guests are asked for them again."
        |now| One(now.counts.dropped);
    Counter "garbage_lines_total" {}
        "Lines that are not of the format."
        |now| One(now.counts.garbage);
    Counter "write_errors_total" {}
        "Times that a file could not be written."
        |now| One(now.counts.write_errors);
    Counter "files_removed_total" {}
        "Files that retention removed."
        |now| One(now.counts.removed);
    Counter "files_lost_total" {}
        "Files that were removed while their boot was received."
        |now| One(now.counts.files_lost);
    Gauge "kept_bytes" {}
        "Bytes of all boots' files, at retention's last look."
        |now| lock(&now.store().kept_bytes).map_or(Values::Nothing, One);
    Gauge "keep_limit_bytes" {}
        "How many may be kept (--keep-size)."
        |now| now.store().keep.bytes.map_or(Values::Nothing, One);

    // The host.
    Gauge "doctor_finding_seconds" {rule}
        "What the host costs a boot, by rule of doctor --daemonset-check; 0 without a figure."
        |now| HostCheck::read(now.store().dir()).map_or(Values::Nothing, |check| by_rule(&check));

    // Answers to Prometheus.
    Counter "scrapes_total" {}
        "Answers like this one."
        |now| One(now.counts.scrapes);
    Counter "scrapes_refused_total" {}
        "Connections to this endpoint that gave way to newer ones, over its limit."
        |now| One(now.counts.scrapes_refused);
    Counter "scrapes_failed_total" {}
        "Connections to this endpoint that broke or took too long."
        |now| One(now.counts.scrapes_failed);

    // Pushes to the receiver of --otlp.
    Gauge "otlp_queue_boots" {}
        "Boots that wait for the receiver."
        |now| with(&now.state.otlp, Queue::waiting);
    Gauge "otlp_queue_capacity_boots" {}
        "How many may."
        |now| with(&now.state.otlp, Queue::capacity);
    Counter "otlp_pushed_boots_total" {}
        "Boots that the receiver took."
        |now| with(&now.state.otlp, |_| now.counts.pushed);
    Counter "otlp_pushed_spans_total" {}
        "Spans that the receiver took."
        |now| with(&now.state.otlp, |_| now.counts.pushed_spans);
    Counter "otlp_rejected_spans_total" {}
        "Spans that the receiver rejected."
        |now| with(&now.state.otlp, |_| now.counts.rejected_spans);
    Counter "otlp_failures_total" {}
        "Tries that the receiver did not answer, or with `later`."
        |now| with(&now.state.otlp, |_| now.counts.push_failures);
    Counter "otlp_dropped_boots_total" {}
        "Boots that were not pushed: refused, or more than may wait."
        |now| with(&now.state.otlp, |_| now.counts.push_dropped);

    // Events to the API of --kubernetes.
    Gauge "kubernetes_events_queue_boots" {}
        "Failed boots that wait for Kubernetes to take their Event."
        |now| with(&now.state.events, Queue::waiting);
    Counter "kubernetes_events_total" {}
        "Events of failed boots that Kubernetes took."
        |now| with(&now.state.events, |_| now.counts.events);
    Counter "kubernetes_events_failures_total" {}
        "Tries that Kubernetes did not answer, or with `later`."
        |now| with(&now.state.events, |_| now.counts.events_failures);
    Counter "kubernetes_events_dropped_total" {}
        "Failed boots without an Event: refused, without a pod's name, or more than may wait."
        |now| with(&now.state.events, |_| now.counts.events_dropped);
}

/// A value that exists only where boots are pushed to this receiver.
fn with<'a>(queue: &Option<Arc<Queue>>, value: impl Fn(&Queue) -> u64) -> Values<'a> {
    queue
        .as_ref()
        .map_or(Values::Nothing, |queue| One(value(queue)))
}

/// Whole seconds of the rules that this program has.
fn by_rule<'a>(check: &HostCheck) -> Values<'a> {
    let of = |id| Some((id, check.findings.get(id)?.round() as u64));
    Each(RULES.iter().filter_map(|rule| of(rule.id)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn every_name_is_unique_and_fits_its_type() {
        let names: BTreeSet<&str> = TABLE.iter().map(|metric| metric.name).collect();
        assert_eq!(names.len(), TABLE.len());
        for metric in TABLE {
            let total = metric.name.ends_with("_total");
            assert_eq!(total, metric.kind == Kind::Counter, "{metric}");
            let seconds = metric.name.ends_with("_seconds");
            assert!(seconds || metric.kind != Kind::Histogram, "{metric}");
            let plain = |c: char| c.is_ascii_lowercase() || c == '_';
            let labels = metric.labels.concat();
            assert!(metric.name.chars().chain(labels.chars()).all(plain));
            let help = metric.help;
            assert!(
                help.ends_with('.') && !help.contains(['\n', '\\', '|']),
                "{metric}"
            );
        }
    }
}
