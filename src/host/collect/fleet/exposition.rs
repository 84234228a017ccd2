//! All counters in Prometheus' text format, version 0.0.4.
//!
//! Names and labels are this program's own and need no escaping; values are numbers. Times in seconds, sizes in bytes.

use super::shared::Shared;
use super::tally::{Histogram, Outcome};
use hyper::header::HeaderValue;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::atomic::Ordering;

pub const CONTENT_TYPE: HeaderValue = HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");
const PREFIX: &str = "kata_gpu_boot";

/// A label's name and its values with what they count.
type Series<'a> = (&'a str, Vec<(&'a str, u64)>);

#[derive(Default)]
struct Text(String);

impl Text {
    // Writing into a String cannot fail.
    fn line(&mut self, line: std::fmt::Arguments) {
        let _never = self.0.write_fmt(line);
        self.0.push('\n');
    }

    fn head(&mut self, name: &str, kind: &str, help: &str) {
        self.line(format_args!("# HELP {PREFIX}_{name} {help}"));
        self.line(format_args!("# TYPE {PREFIX}_{name} {kind}"));
    }

    fn one(&mut self, name: &str, kind: &str, help: &str, value: u64) {
        self.head(name, kind, help);
        self.line(format_args!("{PREFIX}_{name} {value}"));
    }

    fn counter(&mut self, name: &str, help: &str, value: u64) {
        self.one(name, "counter", help, value);
    }

    fn gauge(&mut self, name: &str, help: &str, value: u64) {
        self.one(name, "gauge", help, value);
    }

    fn labelled(&mut self, name: &str, kind: &str, help: &str, (label, values): Series) {
        self.head(name, kind, help);
        for (value, count) in values {
            self.line(format_args!("{PREFIX}_{name}{{{label}=\"{value}\"}} {count}"));
        }
    }

    fn histograms(&mut self, name: &str, label: &str, help: &str, histograms: &BTreeMap<&'static str, Histogram>) {
        self.head(name, "histogram", help);
        for (value, histogram) in histograms {
            for (bound, count) in histogram.cumulative() {
                let bound = bound.map_or("+Inf".to_string(), |bound| bound.to_string());
                self.line(format_args!("{PREFIX}_{name}_bucket{{{label}=\"{value}\",le=\"{bound}\"}} {count}"));
            }
            self.line(format_args!("{PREFIX}_{name}_sum{{{label}=\"{value}\"}} {}", histogram.sum));
            self.line(format_args!("{PREFIX}_{name}_count{{{label}=\"{value}\"}} {}", histogram.count()));
        }
    }
}

/// Everything, as it is now.
pub fn write(shared: &Shared) -> String {
    let mut text = Text::default();
    text.head("build_info", "gauge", "Which version this is; always 1.");
    text.line(format_args!("{PREFIX}_build_info{{version=\"{}\"}} 1", env!("CARGO_PKG_VERSION")));
    boots(&mut text, shared);
    streams(&mut text, shared);
    push(&mut text, shared);
    text.0
}

fn boots(text: &mut Text, shared: &Shared) {
    let counts = shared.from.stats.counts();
    let (connected, gone) = shared.from.store.ends.as_ref().map_or((0, 0), |ends| ends.in_flight());
    text.counter("boots_begun_total", "Boots that began to be received.", counts.boots);
    let states = vec![("connected", connected), ("disconnected", gone)];
    text.labelled("boots_in_flight", "gauge", "Boots that are neither settled nor over.", ("state", states));
    text.counter(
        "boots_not_followed_total",
        "Boots that are in no other number here, because too many were in flight.",
        counts.not_followed,
    );
    let tally = shared.tally().clone();
    let outcomes = Outcome::ALL.iter().map(|o| (o.name(), tally.outcomes.get(o).copied().unwrap_or(0))).collect();
    text.labelled("boots_total", "counter", "Boots that are over, by how they ended.", ("outcome", outcomes));
    let gpus = vec![("usable", tally.usable_gpus), ("failed", tally.failed_gpus), ("unknown", tally.other_gpus)];
    text.labelled("gpus_total", "counter", "GPUs of boots that are over, by what became of them.", ("result", gpus));
    let failures = tally.failures.iter().map(|(reason, count)| (*reason, *count)).collect();
    text.labelled("failures_total", "counter", "What failed in boots that are over, by reason.", ("reason", failures));
    text.histograms("milestone_seconds", "milestone", "Time from the kernel's start to a milestone, per boot.", &tally.milestones);
    let help = "Time in which at least one step of the phase was running, per boot.";
    text.histograms("phase_seconds", "phase", help, &tally.phases);
    text.histograms("step_seconds", "step", "Duration of single steps that ended.", &tally.steps);
    text.counter("records_lost_total", "Records of boots that are over that never came.", tally.lost);
}

fn streams(text: &mut Text, shared: &Shared) {
    let counts = shared.from.stats.counts();
    text.gauge("connections", "Connections of guests that are open.", shared.from.peers.open());
    for (name, help, value) in [
        ("connections_total", "Connections of guests that were taken.", counts.connections),
        ("connections_refused_total", "Connections of guests that were over a limit.", counts.refused),
        ("connections_of_strangers_total", "Connections that were refused because they are no guest's.", counts.strangers),
        ("received_bytes_total", "Bytes that guests sent.", counts.bytes),
        ("records_total", "Records that were new and are kept.", counts.records),
        ("records_duplicate_total", "Records that came again.", counts.duplicates),
        ("records_capped_total", "Records over the limits of their boot.", counts.capped),
        ("records_dropped_total", "Records that came while the disk took nothing; guests are asked for them again.", counts.dropped),
        ("garbage_lines_total", "Lines that are not of the format.", counts.garbage),
        ("write_errors_total", "Times that a file could not be written.", counts.write_errors),
        ("files_removed_total", "Files that retention removed.", counts.removed),
        ("files_lost_total", "Files that somebody removed while their boot was received.", counts.files_lost),
        ("scrapes_total", "Answers like this one.", shared.http.scrapes.load(Ordering::Relaxed)),
        (
            "scrapes_refused_total",
            "Connections to this endpoint that gave way to newer ones, over its limit.",
            shared.http.refused.load(Ordering::Relaxed),
        ),
        ("scrapes_failed_total", "Connections to this endpoint that broke or took too long.", shared.http.failed.load(Ordering::Relaxed)),
    ] {
        text.counter(name, help, value);
    }
}

fn push(text: &mut Text, shared: &Shared) {
    let Some(queue) = &shared.queue else { return };
    let counts = shared.from.stats.counts();
    text.gauge("otlp_queue_boots", "Boots that wait for the receiver.", queue.waiting());
    text.gauge("otlp_queue_capacity_boots", "How many may.", queue.capacity());
    for (name, help, value) in [
        ("otlp_pushed_boots_total", "Boots that the receiver took.", counts.pushed),
        ("otlp_pushed_spans_total", "Spans that the receiver took.", counts.pushed_spans),
        ("otlp_rejected_spans_total", "Spans that the receiver rejected.", counts.rejected_spans),
        ("otlp_failures_total", "Tries that the receiver did not answer, or with `later`.", counts.push_failures),
        ("otlp_dropped_boots_total", "Boots that were not pushed: refused, or more than may wait.", counts.push_dropped),
    ] {
        text.counter(name, help, value);
    }
}
