//! Static files about the metrics (dashboard, alerts, METRICS.md) against the table of the metrics.

use super::{deployed, rules};
use crate::project;
use kata_gpu_collect::fleet::metrics_table::{Kind, TABLE};
use serde_json::Value;
use std::collections::BTreeSet;
use std::fmt::Write;
use std::fs;

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
fn no_two_panels_of_the_dashboard_overlap_or_share_an_id() {
    let dashboard: Value = serde_json::from_str(&deployed("dashboard.json")).unwrap();
    let (mut taken, mut ids) = (BTreeSet::new(), BTreeSet::new());
    for panel in dashboard["panels"].as_array().unwrap() {
        assert!(ids.insert(panel["id"].as_u64()), "{panel}");
        let of = |field: &str| panel["gridPos"][field].as_u64().unwrap();
        assert!(of("x") + of("w") <= 24, "{panel}");
        for y in of("y")..of("y") + of("h") {
            for x in of("x")..of("x") + of("w") {
                assert!(taken.insert((x, y)), "two panels at {x}, {y}: {panel}");
            }
        }
    }
}

#[test]
fn every_alert_names_a_command_to_run_next() {
    let rules = rules();
    assert!(rules.len() > 10);
    for rule in rules {
        let text = rule["annotations"]["description"].as_str().unwrap();
        assert!(text.contains("`kata-gpu-boot "), "{rule:?}");
    }
}

fn metrics() -> String {
    let mut table = String::from("| metric | type | label | help |\n|---|---|---|---|\n");
    for metric in TABLE {
        let label = metric.label.map(|label| format!("`{label}`"));
        writeln!(
            table,
            "| `{metric}` | {} | {} | {} |",
            metric.kind.name(),
            label.unwrap_or_default(),
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

/// The page with this table in the place of the one that begins with the same line.
fn with_table(page: &str, table: &str) -> String {
    let head = table.lines().next().unwrap();
    let start = page
        .find(head)
        .unwrap_or_else(|| panic!("the page has no table {head}"));
    let end = page[start..]
        .find("\n\n")
        .map_or(page.len(), |length| start + length + 1);
    format!("{}{table}{}", &page[..start], &page[end..])
}

#[test]
fn the_page_of_metrics_has_the_tables_of_code_and_alerts() {
    let path = project().join("src/collect/fleet/METRICS.md");
    let page = fs::read_to_string(&path).unwrap();
    let fresh = [metrics(), alerts()]
        .iter()
        .fold(page.clone(), |page, table| with_table(&page, table));
    if std::env::var_os("UPDATE_GOLDEN").is_some_and(|v| v == "1") {
        fs::write(&path, fresh).unwrap();
        return;
    }
    assert!(
        page == fresh,
        "{} differs: UPDATE_GOLDEN=1 refreshes it",
        path.display()
    );
    // Negative control.
    assert_ne!(page.replacen("| counter |", "| gauge |", 1), fresh);
}
