//! A failure means that the dashboard or an alert asks for a series that the collector does not
//! give, or that a metric is on no dashboard or not in METRICS.md.

use super::{deployed, rules};
use crate::documents::has_table;
use kata_gpu_collect::fleet::metrics_table::{Kind, TABLE};

use std::collections::BTreeSet;
use std::fmt::Write;

/// Series that the collector gives: of a histogram three.
fn series() -> BTreeSet<String> {
    let of = |kind| match kind {
        Kind::Histogram => &["_bucket", "_sum", "_count"][..],
        Kind::Counter | Kind::Gauge => &[""],
    };
    TABLE
        .iter()
        .flat_map(|metric| {
            of(metric.kind)
                .iter()
                .map(move |part| format!("{metric}{part}"))
        })
        .collect()
}

/// Series that a text names.
fn named(text: &str) -> BTreeSet<String> {
    text.split(|c: char| !c.is_ascii_lowercase() && c != '_')
        .filter(|word| word.starts_with("kata_gpu_boot_"))
        .map(String::from)
        .collect()
}

fn unknown(text: &str) -> Vec<String> {
    named(text).difference(&series()).cloned().collect()
}

#[test]
fn dashboard_and_alerts_name_only_series_that_are_given() {
    for file in ["dashboard.json", "alerts.yaml"] {
        assert!(named(&deployed(file)).len() > 15, "{file}");
        assert_eq!(unknown(&deployed(file)), [""; 0], "{file}");
    }
    // Negative controls.
    assert_eq!(unknown("rate(kata_gpu_boot_nothing[1h])").len(), 1);
    assert_eq!(unknown("sum(kata_gpu_boot_phase_seconds)").len(), 1);
}

#[test]
fn every_metric_is_on_the_dashboard() {
    let text = named(&deployed("dashboard.json"));
    let is_there = |name: &str| text.iter().any(|series| series.starts_with(name));
    for metric in TABLE {
        assert!(is_there(&metric.to_string()), "{metric}");
    }
    assert!(!is_there("kata_gpu_boot_nothing"));
}

#[test]
fn the_page_of_metrics_has_the_tables_of_code_and_alerts() {
    for table in [metrics(), alerts()] {
        has_table("src/collect/fleet/METRICS.md", &table);
    }
}

fn metrics() -> String {
    let mut table = String::from("| metric | type | label | help |\n|---|---|---|---|\n");
    for metric in TABLE {
        let labels: Vec<String> = metric.labels.iter().map(|l| format!("`{l}`")).collect();
        writeln!(
            table,
            "| `{metric}` | {} | {} | {} |",
            metric.kind.name(),
            labels.join(", "),
            metric.help
        )
        .unwrap();
    }
    table
}

fn alerts() -> String {
    let mut table = String::from("| alert | severity | after | message |\n|---|---|---|---|\n");
    for rule in rules() {
        let text = |value: &serde_yaml::Value| value.as_str().unwrap().to_string();
        let summary = text(&rule["annotations"]["summary"])
            .replace("{{ $value | printf \"%.0f\" }}", "N")
            .replace("{{ $labels.instance }}", "NODE")
            .replace("{{ $labels.rule }}", "RULE");
        writeln!(
            table,
            "| `{}` | {} | {} | {summary} |",
            text(&rule["alert"]),
            text(&rule["labels"]["severity"]),
            text(&rule["for"])
        )
        .unwrap();
    }
    table
}
