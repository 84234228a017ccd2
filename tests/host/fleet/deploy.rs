//! A failure means that the dashboard or an alert asks for a series that the collector does not
//! give, or that a metric is on no dashboard or not in METRICS.md.

use super::{deployed, rules};
use crate::collect::program;
use crate::documents::{anchors, has_table};
use kata_gpu_collect::fleet::metrics_table::{Kind, TABLE};

use std::collections::BTreeSet;
use std::fmt::Write;
use std::process::Command;

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
    has_table("src/collect/fleet/METRICS.md", &metrics());
    has_table("src/collect/fleet/ALERTS.md", &alerts());
}

#[test]
fn every_alerts_runbook_is_its_section_and_every_section_an_alerts() {
    const PAGE: &str = "src/collect/fleet/ALERTS.md";
    let page = crate::text(crate::project().join(PAGE));
    let sections: BTreeSet<&str> = page
        .lines()
        .filter_map(|l| l.strip_prefix("### "))
        .collect();
    let rules = rules();
    let names = rules.iter().map(|rule| rule["alert"].as_str().unwrap());
    assert_eq!(names.collect::<BTreeSet<_>>(), sections);
    for rule in &rules {
        let name = rule["alert"].as_str().unwrap();
        let url = rule["annotations"]["runbook_url"].as_str();
        assert_eq!(url, Some(&*format!("{PAGE}#{}", name.to_lowercase())));
        assert!(anchors(&page).contains(&name.to_lowercase()), "{name}");
    }
}

/// Commands between backticks of a text whose lines may be wrapped.
fn commands(text: &str) -> Vec<String> {
    let one_line = text.split_whitespace().collect::<Vec<_>>().join(" ");
    let quoted = one_line.split('`').skip(1).step_by(2);
    quoted.map(str::to_string).collect()
}

/// The words of kata-gpu-boot in a command, if it has some.
fn words(command: &str) -> Option<Vec<&str>> {
    let own = match command.strip_prefix("kubectl exec -n NAMESPACE ") {
        Some(rest) => {
            let (pod, own) = rest.split_once(" -- ")?;
            assert!(["POD", "ds/kata-gpu-collector"].contains(&pod), "{command}");
            own
        }
        None => command,
    };
    Some(own.strip_prefix("kata-gpu-boot ")?.split(' ').collect())
}

#[test]
fn commands_of_alerts_and_their_page_are_taken() {
    let page = crate::text(crate::project().join("src/collect/fleet/ALERTS.md"));
    let mut texts: Vec<String> = page.split("\n\n").map(str::to_string).collect();
    for rule in rules() {
        let text = rule["annotations"]["description"]
            .as_str()
            .unwrap()
            .to_string();
        let exec = commands(&text)
            .iter()
            .any(|command| command.starts_with("kubectl "));
        assert!(exec, "no command for a cluster: {text}");
        texts.push(text);
    }
    let mut tried = 0;
    for command in texts.iter().flat_map(|text| commands(text)) {
        let Some(words) = words(&command) else {
            continue;
        };
        let output = Command::new(program()).args(words).arg("--help").output();
        assert!(output.unwrap().status.success(), "{command}");
        tried += 1;
    }
    assert!(tried > 25, "{tried}");
    // Negative control.
    let bad = words("kubectl exec -n NAMESPACE POD -- kata-gpu-boot list --faild").unwrap();
    let output = Command::new(program()).args(bad).arg("--help").output();
    assert!(!output.unwrap().status.success());
}

#[test]
fn the_operator_and_a_plain_prometheus_have_the_same_rules() {
    let rules = deployed("alerts.yaml");
    let (_, groups) = rules.split_once("\ngroups:\n").unwrap();
    let mut text = String::from(
        "# The rules of ../alerts.yaml for the Prometheus operator: UPDATE_GOLDEN=1 and the test\n\
         # the_operator_and_a_plain_prometheus_have_the_same_rules write this file.\n\
         apiVersion: monitoring.coreos.com/v1\nkind: PrometheusRule\nmetadata:\n  \
         name: kata-gpu-collector\n  labels: {app.kubernetes.io/name: kata-gpu-collector}\n\
         spec:\n  groups:\n",
    );
    groups
        .lines()
        .for_each(|line| text += &format!("  {line}\n"));
    let path = crate::project().join("src/collect/deploy/alerts/prometheus-rule.yaml");
    if std::env::var_os("UPDATE_GOLDEN").is_some_and(|v| v == "1") {
        crate::write(&path, &text);
    }
    assert_eq!(crate::text(path), text, "UPDATE_GOLDEN=1 writes it");
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
