//! A failure means that an alert fires when it should not, or stays silent when it should fire.
//! Judge: promtool, on the series of alerts_test.yaml.

use super::{deployed, rules, tool};
use crate::collect::folder;
use serde_yaml::Value;
use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

/// Runs promtool in this folder. The error is promtool's output.
fn promtool(promtool: &Path, words: &[&str], folder: &Path) -> Result<(), String> {
    let output = Command::new(promtool)
        .args(words)
        .current_dir(folder)
        .output()
        .unwrap();
    if output.status.success() {
        Ok(())
    } else {
        Err(crate::stderr(&output))
    }
}

/// Cases of alerts_test.yaml: the alert, whether it fires, and the minute.
fn cases() -> Vec<(String, bool, u32)> {
    let file: Value = serde_yaml::from_str(&deployed("alerts_test.yaml")).unwrap();
    let tests = file["tests"].as_sequence().unwrap();
    let case = |test: &Value| {
        let test = &test["promql_expr_test"][0];
        let alert = test["expr"].as_str().unwrap().split('"').nth(1).unwrap();
        let minute = test["eval_time"].as_str().unwrap().trim_end_matches('m');
        let fires = !test["exp_samples"].as_sequence().unwrap().is_empty();
        (alert.to_string(), fires, minute.parse().unwrap())
    };
    tests.iter().map(case).collect()
}

#[test]
fn each_alert_fires_when_it_should_and_only_then() {
    let Some(tool) = tool("prometheus/usr/bin/promtool") else {
        return;
    };
    let all: BTreeSet<String> = rules()
        .iter()
        .map(|rule| rule["alert"].as_str().unwrap().to_string())
        .collect();
    for wanted in [true, false] {
        let of = cases().into_iter().filter(|(_, fires, _)| *fires == wanted);
        let named: BTreeSet<String> = of.map(|(alert, ..)| alert).collect();
        assert_eq!(named, all, "an alert without its cases");
    }
    let dir = folder();
    crate::write(dir.0.join("alerts.yaml"), deployed("alerts.yaml"));
    let tried = |cases: &str| {
        crate::write(dir.0.join("tests.yaml"), cases);
        promtool(&tool, &["test", "rules", "tests.yaml"], &dir.0)
    };
    let tests = deployed("alerts_test.yaml");
    assert_eq!(tried(&tests), Ok(()));
    // Negative control: each case the other way round fails, of the quick ones.
    let slow = |test: &&str| !test.contains("eval_time: 1530m");
    let quick: Vec<&str> = tests.split("  - interval: 1m\n").filter(slow).collect();
    let others = quick
        .join("  - interval: 1m\n")
        .replace("exp_samples: []", "exp_samples: [{labels: '{}', value: 2}]")
        .replace("value: 1}", "value: 3}");
    let said = tried(&others).unwrap_err();
    assert_eq!(
        said.matches("expr: \"count(ALERTS").count(),
        quick.len() - 1,
        "{said}"
    );
}
