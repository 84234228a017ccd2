//! Metrics of a collector, a row each: name, type, unit, label, help, values. The text that
//! Prometheus reads, METRICS.md, the dashboard and the alerts are made from these rows, so that
//! none of them names a metric that is not there.
//!
//! Names, labels and help need no escaping in any of these forms; a label's values are constants of
//! this program, never a guest's texts. Times are in seconds, sizes in bytes.

use super::snapshot::{Queue, Snapshot};
use super::tally::{Histograms, Outcome};
use std::fmt;
use std::fmt::Write;

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

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// A number of things, which the metric's name ends in.
    Number,
    Seconds,
    Bytes,
}

impl Unit {
    pub fn name(self) -> &'static str {
        match self {
            Self::Number => "number",
            Self::Seconds => "seconds",
            Self::Bytes => "bytes",
        }
    }
}

/// Values of a metric at one time.
pub enum Values<'a> {
    /// No value: the function that the metric counts is off.
    Nothing,
    One(u64),
    /// Values by the metric's label.
    Each(Vec<(&'static str, u64)>),
    /// Histograms by the metric's label.
    Histograms(&'a Histograms),
}

use Values::{Each, One};

/// A row. Its `Display` is the name in PromQL.
pub struct Metric {
    /// Name without the prefix.
    pub name: &'static str,
    pub kind: Kind,
    pub unit: Unit,
    pub label: Option<&'static str>,
    pub help: &'static str,
    pub values: fn(&Snapshot) -> Values<'_>,
}

impl fmt::Display for Metric {
    fn fmt(&self, out: &mut fmt::Formatter) -> fmt::Result {
        write!(out, "{PREFIX}{}", self.name)
    }
}

macro_rules! metrics {
    ($($id:ident $kind:ident $unit:ident $name:literal {$($label:ident)?} $help:literal $values:expr;)*) => {
        $(pub static $id: Metric = Metric {
            name: $name,
            kind: Kind::$kind,
            unit: Unit::$unit,
            // The row's label, else None.
            label: [$(Some(stringify!($label)),)? None][0],
            help: $help,
            values: $values,
        };)*
        /// All metrics, in the order of the text.
        pub static TABLE: &[&Metric] = &[$(&$id),*];
    };
}

metrics! {
    BUILD_INFO Gauge Number "build_info" {version}
        "Which version this is; always 1."
        |_| Each(vec![(env!("CARGO_PKG_VERSION"), 1)]);

    // Boots.
    BOOTS_BEGUN Counter Number "boots_begun_total" {}
        "Boots that began to be received."
        |now| One(now.counts.boots);
    BOOTS_IN_FLIGHT Gauge Number "boots_in_flight" {state}
        "Boots that are neither settled nor over."
        |now| Each(vec![(CONNECTED, now.in_flight.0), ("disconnected", now.in_flight.1)]);
    BOOTS_NOT_FOLLOWED Counter Number "boots_not_followed_total" {}
        "Boots that are in no other number here, because too many were in flight."
        |now| One(now.counts.not_followed);
    BOOTS Counter Number "boots_total" {outcome}
        "Boots that are over, by how they ended."
        |now| Each(Outcome::ALL.map(|outcome| (outcome.name(), now.tally.outcome(outcome))).into());
    GPUS Counter Number "gpus_total" {result}
        "GPUs of boots that are over, by outcome."
        |now| Each(vec![
            ("usable", now.tally.usable_gpus),
            (FAILED, now.tally.failed_gpus),
            ("unknown", now.tally.other_gpus),
        ]);
    FAILURES Counter Number "failures_total" {reason}
        "What failed in boots that are over, by reason."
        |now| Each(now.tally.failures.iter().map(|(reason, count)| (*reason, *count)).collect());
    MILESTONE_SECONDS Histogram Seconds "milestone_seconds" {milestone}
        "Time from the kernel's start to a milestone, per boot."
        |now| Values::Histograms(&now.tally.milestones);
    PHASE_SECONDS Histogram Seconds "phase_seconds" {phase}
        "Time in which at least one step of the phase was running, per boot."
        |now| Values::Histograms(&now.tally.phases);
    STEP_SECONDS Histogram Seconds "step_seconds" {step}
        "Duration of single steps that ended."
        |now| Values::Histograms(&now.tally.steps);
    RECORDS_LOST Counter Number "records_lost_total" {}
        "Records of boots that are over that never came."
        |now| One(now.tally.lost);

    // Streams and files.
    CONNECTIONS_OPEN Gauge Number "connections" {}
        "Connections of guests that are open."
        |now| One(now.connections);
    CONNECTIONS Counter Number "connections_total" {}
        "Connections of guests that were taken."
        |now| One(now.counts.connections);
    CONNECTIONS_REFUSED Counter Number "connections_refused_total" {}
        "Connections of guests that were over a limit."
        |now| One(now.counts.refused);
    CONNECTIONS_OF_STRANGERS Counter Number "connections_of_strangers_total" {}
        "Connections that were refused because they are no guest's."
        |now| One(now.counts.strangers);
    RECEIVED_BYTES Counter Bytes "received_bytes_total" {}
        "Bytes that guests sent."
        |now| One(now.counts.bytes);
    RECORDS Counter Number "records_total" {}
        "Records that were new and are kept."
        |now| One(now.counts.records);
    RECORDS_DUPLICATE Counter Number "records_duplicate_total" {}
        "Records that came again."
        |now| One(now.counts.duplicates);
    RECORDS_CAPPED Counter Number "records_capped_total" {}
        "Records over the limits of their boot."
        |now| One(now.counts.capped);
    RECORDS_DROPPED Counter Number "records_dropped_total" {}
        "Records that came while the disk took nothing; guests are asked for them again."
        |now| One(now.counts.dropped);
    GARBAGE_LINES Counter Number "garbage_lines_total" {}
        "Lines that are not of the format."
        |now| One(now.counts.garbage);
    WRITE_ERRORS Counter Number "write_errors_total" {}
        "Times that a file could not be written."
        |now| One(now.counts.write_errors);
    FILES_REMOVED Counter Number "files_removed_total" {}
        "Files that retention removed."
        |now| One(now.counts.removed);
    FILES_LOST Counter Number "files_lost_total" {}
        "Files that were removed while their boot was received."
        |now| One(now.counts.files_lost);
    KEPT_BYTES Gauge Bytes "kept_bytes" {}
        "Bytes of all boots' files, at retention's last look."
        |now| now.kept_bytes.map_or(Values::Nothing, One);
    KEEP_LIMIT_BYTES Gauge Bytes "keep_limit_bytes" {}
        "How many may be kept (--keep-size)."
        |now| now.keep_limit_bytes.map_or(Values::Nothing, One);

    // The host.
    DOCTOR_FINDING_SECONDS Gauge Seconds "doctor_finding_seconds" {rule}
        "What the host costs a boot, by rule of doctor --daemonset-check; 0 where nobody has a figure."
        |now| now.host_check.as_ref().map_or(Values::Nothing, |check| Each(check.clone()));

    // Answers to Prometheus.
    SCRAPES Counter Number "scrapes_total" {}
        "Answers like this one."
        |now| One(now.scrapes);
    SCRAPES_REFUSED Counter Number "scrapes_refused_total" {}
        "Connections to this endpoint that gave way to newer ones, over its limit."
        |now| One(now.scrapes_refused);
    SCRAPES_FAILED Counter Number "scrapes_failed_total" {}
        "Connections to this endpoint that broke or took too long."
        |now| One(now.scrapes_failed);

    // Pushes to the receiver of --otlp.
    OTLP_QUEUE Gauge Number "otlp_queue_boots" {}
        "Boots that wait for the receiver."
        |now| with_otlp(now, |queue| queue.waiting);
    OTLP_QUEUE_CAPACITY Gauge Number "otlp_queue_capacity_boots" {}
        "How many may."
        |now| with_otlp(now, |queue| queue.capacity);
    OTLP_PUSHED Counter Number "otlp_pushed_boots_total" {}
        "Boots that the receiver took."
        |now| with_otlp(now, |_| now.counts.pushed);
    OTLP_PUSHED_SPANS Counter Number "otlp_pushed_spans_total" {}
        "Spans that the receiver took."
        |now| with_otlp(now, |_| now.counts.pushed_spans);
    OTLP_REJECTED_SPANS Counter Number "otlp_rejected_spans_total" {}
        "Spans that the receiver rejected."
        |now| with_otlp(now, |_| now.counts.rejected_spans);
    OTLP_FAILURES Counter Number "otlp_failures_total" {}
        "Tries that the receiver did not answer, or with `later`."
        |now| with_otlp(now, |_| now.counts.push_failures);
    OTLP_DROPPED Counter Number "otlp_dropped_boots_total" {}
        "Boots that were not pushed: refused, or more than may wait."
        |now| with_otlp(now, |_| now.counts.push_dropped);
}

/// A value that exists only where boots are pushed.
fn with_otlp(now: &Snapshot, value: impl Fn(&Queue) -> u64) -> Values<'static> {
    now.queue
        .as_ref()
        .map_or(Values::Nothing, |queue| One(value(queue)))
}

/// Values of labels that queries name, in addition to [`Outcome`]'s.
pub const CONNECTED: &str = "connected";
pub const FAILED: &str = "failed";

/// The table for people.
pub fn markdown() -> String {
    let mut table =
        String::from("| metric | type | unit | label | help |\n|---|---|---|---|---|\n");
    for metric in TABLE {
        let label = metric
            .label
            .map(|label| format!("`{label}`"))
            .unwrap_or_default();
        let (kind, unit) = (metric.kind.name(), metric.unit.name());
        // Writing into a String cannot fail.
        let _never = writeln!(
            table,
            "| `{metric}` | {kind} | {unit} | {label} | {} |",
            metric.help
        );
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn every_name_is_unique_and_has_type_and_unit() {
        let names: BTreeSet<&str> = TABLE.iter().map(|metric| metric.name).collect();
        assert_eq!(names.len(), TABLE.len());
        for metric in TABLE {
            let total = metric.name.ends_with("_total");
            assert_eq!(total, metric.kind == Kind::Counter, "{metric}");
            let unit = ["seconds", "bytes"].into_iter().find(|unit| {
                metric
                    .name
                    .trim_end_matches("_total")
                    .ends_with(&format!("_{unit}"))
            });
            assert_eq!(unit.unwrap_or("number"), metric.unit.name(), "{metric}");
            let plain = |c: char| c.is_ascii_lowercase() || c == '_';
            assert!(
                metric
                    .name
                    .chars()
                    .chain(metric.label.unwrap_or_default().chars())
                    .all(plain)
            );
            assert!(
                metric.help.ends_with('.') && !metric.help.contains(['\n', '\\', '|']),
                "{metric}"
            );
        }
    }
}
