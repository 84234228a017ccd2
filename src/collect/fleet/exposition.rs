//! All metrics of the table in Prometheus' text format, version 0.0.4.
//!
//! OpenMetrics, which libraries write, does not fit: a counter `x_total` belongs to a family `x`
//! there, so that `connections` and `connections_total` would be one family of two types, which no
//! reader takes. `promtool check metrics` reads this format alone.

use super::metrics_table::{Metric, Snapshot, TABLE, Values};
use super::state::State;
use hyper::header::HeaderValue;
use std::fmt::{self, Write};

pub const CONTENT_TYPE: HeaderValue =
    HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");

/// All metrics with their values now.
pub fn write(state: &State) -> String {
    let now = Snapshot {
        counts: state.collector.store.stats.counts(),
        tally: state.tally().clone(),
        state,
    };
    let mut text = String::new();
    for metric in TABLE {
        // Writing into a String cannot fail.
        let _never = write_metric(&mut text, metric, (metric.values)(&now));
    }
    text
}

fn write_metric(text: &mut String, metric: &Metric, values: Values) -> fmt::Result {
    if matches!(values, Values::Nothing) {
        return Ok(());
    }
    writeln!(text, "# HELP {metric} {}", metric.help)?;
    writeln!(text, "# TYPE {metric} {}", metric.kind.name())?;
    let label = metric.labels.first().copied().unwrap_or_default();
    match values {
        Values::Nothing => {}
        Values::One(value) => writeln!(text, "{metric} {value}")?,
        Values::Each(values) => {
            for (of, value) in values {
                writeln!(text, "{metric}{{{label}=\"{of}\"}} {value}")?;
            }
        }
        Values::Labelled(values) => {
            for (of, value) in values {
                let pairs = metric.labels.iter().zip(of);
                let pairs: Vec<String> = pairs.map(|(l, of)| format!("{l}=\"{of}\"")).collect();
                writeln!(text, "{metric}{{{}}} {value}", pairs.join(","))?;
            }
        }
        Values::Histograms(histograms) => {
            for (of, histogram) in histograms {
                for (bound, count) in histogram.cumulative() {
                    let bound = bound.map_or("+Inf".to_string(), |bound| bound.to_string());
                    writeln!(
                        text,
                        "{metric}_bucket{{{label}=\"{of}\",le=\"{bound}\"}} {count}"
                    )?;
                }
                writeln!(text, "{metric}_sum{{{label}=\"{of}\"}} {}", histogram.sum)?;
                writeln!(
                    text,
                    "{metric}_count{{{label}=\"{of}\"}} {}",
                    histogram.count()
                )?;
            }
        }
    }
    Ok(())
}
