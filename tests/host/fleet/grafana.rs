//! A failure means that a query of the dashboard or of an alert is an error in a real Prometheus,
//! or that Grafana's own types lose a part of the dashboard. No Grafana runs here.

use super::prometheus::Server;
use super::{ONE_FAILS, RECORDED, boot, deployed, get, metrics_address, rules, tool, value};
use crate::collect::{Collector, Raw, event, folder, header, socket, until};
use crate::export::{DEADLINE_S, Package, within};
use kata_gpu_report::data::host_check::HostCheck;
use serde_json::{Value, json};
use std::path::Path;

/// Generated from the schemas of Grafana 11.6.
const SDK: Package = Package {
    name: "grafana-foundation-sdk==1769699379!11.6.0",
    module: "grafana_foundation_sdk.models.dashboard",
};
/// Reads a dashboard and prints each path that is lost or changed on the way through its type.
const READER: &str = include_str!("grafana.py");

fn dashboard() -> Value {
    serde_json::from_str(&deployed("dashboard.json")).unwrap()
}

/// Expressions of all panels, as Grafana sends them.
fn expressions(dashboard: &Value) -> Vec<String> {
    let targets = dashboard["panels"]
        .as_array()
        .unwrap()
        .iter()
        .filter_map(|panel| panel["targets"].as_array())
        .flatten();
    let variables = [
        ("$job", ".+"),
        ("$instance", ".+"),
        ("$milestone", "settled"),
        ("$window", "1h"),
        ("$__range", "1h"),
        ("$__rate_interval", "1m"),
    ];
    let filled = |target: &Value| {
        let expr = target["expr"].as_str().unwrap().to_string();
        variables
            .iter()
            .fold(expr, |expr, (name, value)| expr.replace(name, value))
    };
    targets.map(filled).collect()
}

#[test]
fn every_query_of_dashboard_and_alerts_runs_in_prometheus() {
    let Some(prometheus) = tool("prometheus/usr/bin/prometheus") else {
        return;
    };
    let dir = folder();
    let words = [
        "--metrics",
        "0",
        "--otlp",
        "http://127.0.0.1:1",
        "--kubernetes",
        "http://127.0.0.1:1",
        "--limit",
        "goodbye=1",
    ];
    let collector = Collector::start(&dir.0, &words);
    let address = metrics_address(&collector);
    crate::write(dir.0.join("rules.yml"), deployed("alerts.yaml"));
    HostCheck::now([("thp".to_string(), 3.2), ("no-such-rule".to_string(), 1.0)].into())
        .write(&dir.0.join("boots"))
        .unwrap();
    let mut server = Server::start(&prometheus, &dir.0, address, "rule_files: [rules.yml]\n");

    // A series begins with its first boot, and grows with the next: another scrape lies between.
    boot(&dir.0, RECORDED, 1);
    boot(&dir.0, ONE_FAILS, 2);
    server.wait(
        "the first boots are scraped",
        "sum(kata_gpu_boot_boots_total) == 2",
    );
    boot(&dir.0, RECORDED, 3);
    boot(&dir.0, ONE_FAILS, 4);
    Raw::connect(&socket(&dir.0, "v")).say(header(5) + &event(0));
    server.wait(
        "all boots are scraped",
        "sum(kata_gpu_boot_boots_total) == 5",
    );

    let answer = get(address, "/metrics");
    assert_eq!(
        value(
            &answer,
            "kata_gpu_boot_doctor_finding_seconds{rule=\"thp\"}"
        ),
        3.0
    );
    assert!(!answer.contains("no-such-rule"), "{answer}");
    let dashboard = dashboard();
    assert_eq!(
        value(&answer, "kata_gpu_boot_boots_total{outcome=\"unfinished\"}"),
        1.0
    );

    let all = expressions(&dashboard);
    assert!(all.len() >= 50, "{} expressions", all.len());
    for expression in &all {
        assert!(!expression.contains('$'), "{expression}");
        let answer = server.answer(expression).unwrap();
        assert_eq!(answer["status"], "success", "{expression}: {answer}");
        assert_ne!(
            answer["data"]["result"],
            json!([]),
            "nothing to see: {expression}"
        );
        assert!(
            !answer.to_string().contains("NaN"),
            "{expression}: {answer}"
        );
    }
    let alerts: Vec<String> = rules()
        .iter()
        .map(|rule| rule["expr"].as_str().unwrap().to_string())
        .collect();
    for expression in &alerts {
        assert_eq!(
            server.answer(expression).unwrap()["status"],
            "success",
            "{expression}"
        );
    }
    assert_ne!(
        server.answer("sum by (job (up)").unwrap()["status"],
        "success"
    );
    until("every rule was evaluated", || {
        let groups = server.api("rules").unwrap()["data"]["groups"].clone();
        let rules: Vec<Value> = groups
            .as_array()
            .unwrap()
            .iter()
            .flat_map(|group| group["rules"].as_array().unwrap().clone())
            .collect();
        rules.len() == alerts.len() && rules.iter().all(|rule| rule["health"] == "ok")
    });
    collector.stop();
}

/// Paths that Grafana's types do not read.
fn lost(python: &Path, dashboard: &Value) -> Vec<String> {
    let dir = folder();
    let path = dir.0.join("dashboard.json");
    crate::write(&path, dashboard.to_string());
    let output = within(DEADLINE_S, python)
        .args(["-c", READER])
        .arg(&path)
        .output()
        .unwrap();
    let text = crate::stdout(&output) + &crate::stderr(&output);
    text.lines().map(String::from).collect()
}

#[test]
fn grafanas_own_types_read_all_of_the_dashboard() {
    let Some(python) = SDK.python() else { return };
    let good = dashboard();
    assert_eq!(lost(&python, &good), [""; 0]);
    // Negative controls: keys that no Grafana has.
    for (path, key) in [
        ("", "panelz"),
        ("/templating/list/0", "lable"),
        ("/panels/1", "titel"),
        ("/panels/1/fieldConfig", "default"),
        ("/panels/1/options", "colourMode"),
        ("/panels/1/targets/0", "exp"),
    ] {
        let mut bad = good.clone();
        bad.pointer_mut(path).unwrap()[key] = "x".into();
        assert_eq!(lost(&python, &bad).len(), 1, "{path} {key}");
    }
}

#[test]
fn the_dashboard_has_one_address_and_asks_for_its_data_source_at_import() {
    let dashboard = dashboard();
    // An import over it is an update, and links lead to it; the number is each Grafana's own.
    assert_eq!(dashboard["uid"], "kata-gpu-boot");
    assert!(dashboard.get("id").is_none());
    assert_eq!(dashboard["templating"]["list"][0]["type"], "datasource");
    let panels = dashboard["panels"].as_array().unwrap();
    assert!(
        panels
            .iter()
            .filter(|panel| panel["type"] != "row")
            .all(|panel| panel["datasource"]["uid"] == "${datasource}")
    );
    assert_eq!(
        dashboard.to_string().matches("\"uid\":").count(),
        1 + dashboard
            .to_string()
            .matches("\"uid\":\"${datasource}\"")
            .count()
    );
}
