//! The alerting rules that are printed: promtool reads them, and says of made series when each of
//! them fires and when it does not.

use super::tool;
use crate::collect::{folder, program};
use kata_gpu_collect::fleet::alerts::groups;
use std::collections::BTreeSet;
use std::fmt::Write;
use std::fs;
use std::path::Path;
use std::process::Command;

/// Output of `--print-alerts`.
pub fn printed() -> String {
    let output = Command::new(program())
        .args(["collect", "--print-alerts"])
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// Made series, one value a minute in promtool's notation, and when to look.
struct Case {
    alert: &'static str,
    fires: bool,
    minute: u32,
    series: &'static [(&'static str, &'static str)],
}

const fn fires(
    alert: &'static str,
    minute: u32,
    series: &'static [(&'static str, &'static str)],
) -> Case {
    Case {
        alert,
        fires: true,
        minute,
        series,
    }
}

const fn silent(
    alert: &'static str,
    minute: u32,
    series: &'static [(&'static str, &'static str)],
) -> Case {
    Case {
        alert,
        fires: false,
        minute,
        series,
    }
}

const CASES: &[Case] = &[
    // 5 of 65 boots; 5 of 185; 2 of 2.
    fires(
        "KataGpuBootsFail",
        70,
        &[
            ("boots_total{outcome=\"settled\"}", "0+1x90"),
            ("boots_total{outcome=\"powered-off\"}", "0x59 5x30"),
        ],
    ),
    silent(
        "KataGpuBootsFail",
        70,
        &[
            ("boots_total{outcome=\"settled\"}", "0+3x90"),
            ("boots_total{outcome=\"powered-off\"}", "0x59 5x30"),
        ],
    ),
    silent(
        "KataGpuBootsFail",
        70,
        &[
            ("boots_total{outcome=\"settled\"}", "0x90"),
            ("boots_total{outcome=\"unfinished\"}", "0x59 2x30"),
        ],
    ),
    fires(
        "KataGpuNodeBootsFail",
        70,
        &[
            ("boots_total{outcome=\"settled\"}", "0x59 2x30"),
            ("boots_total{outcome=\"unfinished\"}", "0x59 3x30"),
        ],
    ),
    silent(
        "KataGpuNodeBootsFail",
        70,
        &[
            ("boots_total{outcome=\"settled\"}", "0x59 3x30"),
            ("boots_total{outcome=\"unfinished\"}", "0x59 3x30"),
        ],
    ),
    fires(
        "KataGpuGpusFail",
        65,
        &[("gpus_total{result=\"failed\"}", "7x59 8x30")],
    ),
    silent(
        "KataGpuGpusFail",
        65,
        &[
            ("gpus_total{result=\"failed\"}", "8x90"),
            ("gpus_total{result=\"usable\"}", "0+8x90"),
        ],
    ),
    // From 15 s to 40 s.
    fires(
        "KataGpuBootsSlower",
        1530,
        &[
            (
                "milestone_seconds_bucket{milestone=\"settled\",le=\"10\"}",
                "0x1560",
            ),
            (
                "milestone_seconds_bucket{milestone=\"settled\",le=\"20\"}",
                "0+1x1440 1440x120",
            ),
            (
                "milestone_seconds_bucket{milestone=\"settled\",le=\"30\"}",
                "0+1x1440 1440x120",
            ),
            (
                "milestone_seconds_bucket{milestone=\"settled\",le=\"45\"}",
                "0+1x1560",
            ),
            (
                "milestone_seconds_bucket{milestone=\"settled\",le=\"+Inf\"}",
                "0+1x1560",
            ),
            (
                "milestone_seconds_sum{milestone=\"settled\"}",
                "0+15x1440 21600+40x120",
            ),
            ("milestone_seconds_count{milestone=\"settled\"}", "0+1x1560"),
        ],
    ),
    // From 19 s to 21 s, over a bound: the percentile goes from 19 s to 29 s.
    silent(
        "KataGpuBootsSlower",
        1530,
        &[
            (
                "milestone_seconds_bucket{milestone=\"settled\",le=\"10\"}",
                "0x1560",
            ),
            (
                "milestone_seconds_bucket{milestone=\"settled\",le=\"20\"}",
                "0+1x1440 1440x120",
            ),
            (
                "milestone_seconds_bucket{milestone=\"settled\",le=\"30\"}",
                "0+1x1560",
            ),
            (
                "milestone_seconds_bucket{milestone=\"settled\",le=\"+Inf\"}",
                "0+1x1560",
            ),
            (
                "milestone_seconds_sum{milestone=\"settled\"}",
                "0+19x1440 27360+21x120",
            ),
            ("milestone_seconds_count{milestone=\"settled\"}", "0+1x1560"),
        ],
    ),
    // As much slower as the first, but 6 boots an hour.
    silent(
        "KataGpuBootsSlower",
        1530,
        &[
            (
                "milestone_seconds_bucket{milestone=\"settled\",le=\"10\"}",
                "0x1560",
            ),
            (
                "milestone_seconds_bucket{milestone=\"settled\",le=\"20\"}",
                "0+0.1x1440 144x120",
            ),
            (
                "milestone_seconds_bucket{milestone=\"settled\",le=\"30\"}",
                "0+0.1x1440 144x120",
            ),
            (
                "milestone_seconds_bucket{milestone=\"settled\",le=\"45\"}",
                "0+0.1x1560",
            ),
            (
                "milestone_seconds_bucket{milestone=\"settled\",le=\"+Inf\"}",
                "0+0.1x1560",
            ),
            (
                "milestone_seconds_sum{milestone=\"settled\"}",
                "0+1.5x1440 2160+4x120",
            ),
            (
                "milestone_seconds_count{milestone=\"settled\"}",
                "0+0.1x1560",
            ),
        ],
    ),
    // Boots of now, and no series a day ago.
    silent(
        "KataGpuBootsSlower",
        90,
        &[
            (
                "milestone_seconds_bucket{milestone=\"settled\",le=\"45\"}",
                "0+1x120",
            ),
            (
                "milestone_seconds_bucket{milestone=\"settled\",le=\"+Inf\"}",
                "0+1x120",
            ),
            ("milestone_seconds_sum{milestone=\"settled\"}", "0+40x120"),
            ("milestone_seconds_count{milestone=\"settled\"}", "0+1x120"),
        ],
    ),
    // Two of ten boots take longer; then one in ten and fewer.
    fires(
        "KataGpuBootsSlow",
        90,
        &[
            (
                "milestone_seconds_bucket{milestone=\"settled\",le=\"120\"}",
                "0+0.8x120",
            ),
            (
                "milestone_seconds_bucket{milestone=\"settled\",le=\"300\"}",
                "0+1x120",
            ),
            (
                "milestone_seconds_bucket{milestone=\"settled\",le=\"+Inf\"}",
                "0+1x120",
            ),
            ("milestone_seconds_count{milestone=\"settled\"}", "0+1x120"),
        ],
    ),
    silent(
        "KataGpuBootsSlow",
        90,
        &[
            (
                "milestone_seconds_bucket{milestone=\"settled\",le=\"120\"}",
                "0+0.95x120",
            ),
            (
                "milestone_seconds_bucket{milestone=\"settled\",le=\"300\"}",
                "0+1x120",
            ),
            (
                "milestone_seconds_bucket{milestone=\"settled\",le=\"+Inf\"}",
                "0+1x120",
            ),
            ("milestone_seconds_count{milestone=\"settled\"}", "0+1x120"),
        ],
    ),
    // All of 6 boots an hour.
    silent(
        "KataGpuBootsSlow",
        90,
        &[
            (
                "milestone_seconds_bucket{milestone=\"settled\",le=\"120\"}",
                "0x120",
            ),
            (
                "milestone_seconds_bucket{milestone=\"settled\",le=\"300\"}",
                "0+0.1x120",
            ),
            (
                "milestone_seconds_bucket{milestone=\"settled\",le=\"+Inf\"}",
                "0+0.1x120",
            ),
            (
                "milestone_seconds_count{milestone=\"settled\"}",
                "0+0.1x120",
            ),
        ],
    ),
    fires(
        "KataGpuHostSlow",
        60,
        &[(
            "doctor_finding_seconds{rule=\"huge-pfnmaps\"}",
            "0x9 24.8x80",
        )],
    ),
    silent(
        "KataGpuHostSlow",
        60,
        &[("doctor_finding_seconds{rule=\"huge-pfnmaps\"}", "8x80")],
    ),
    // An hour after the last check the metric is gone.
    silent(
        "KataGpuHostSlow",
        85,
        &[("doctor_finding_seconds{rule=\"huge-pfnmaps\"}", "24.8x60")],
    ),
    fires(
        "KataGpuBootHangs",
        45,
        &[
            ("boots_in_flight{state=\"connected\"}", "1x60"),
            ("boots_begun_total{}", "5x60"),
        ],
    ),
    silent(
        "KataGpuBootHangs",
        45,
        &[
            ("boots_in_flight{state=\"connected\"}", "1x60"),
            ("boots_begun_total{}", "0+1x60"),
        ],
    ),
    silent(
        "KataGpuBootHangs",
        45,
        &[
            ("boots_in_flight{state=\"connected\"}", "0x60"),
            ("boots_begun_total{}", "5x60"),
        ],
    ),
    // A collector's target; another one's.
    fires(
        "KataGpuBootCollectorDown",
        25,
        &[("up", "1x9 0x30"), ("build_info{version=\"1\"}", "1x9")],
    ),
    silent("KataGpuBootCollectorDown", 25, &[("up", "1x9 0x30")]),
    silent(
        "KataGpuBootCollectorDown",
        25,
        &[("up", "1x40"), ("build_info{version=\"1\"}", "1x40")],
    ),
    fires("KataGpuBootNoCollector", 20, &[("up", "1x40")]),
    silent(
        "KataGpuBootNoCollector",
        20,
        &[("build_info{version=\"1\"}", "1x40")],
    ),
    fires(
        "KataGpuBootCannotWrite",
        20,
        &[("write_errors_total{}", "0+1x30")],
    ),
    fires(
        "KataGpuBootCannotWrite",
        20,
        &[
            ("write_errors_total{}", "5x30"),
            ("records_dropped_total{}", "0+9x30"),
        ],
    ),
    silent(
        "KataGpuBootCannotWrite",
        20,
        &[
            ("write_errors_total{}", "5x30"),
            ("records_dropped_total{}", "9x30"),
        ],
    ),
    fires(
        "KataGpuBootDiskOverLimit",
        40,
        &[("kept_bytes{}", "11x60"), ("keep_limit_bytes{}", "10x60")],
    ),
    silent(
        "KataGpuBootDiskOverLimit",
        40,
        &[("kept_bytes{}", "9x60"), ("keep_limit_bytes{}", "10x60")],
    ),
    silent("KataGpuBootDiskOverLimit", 40, &[("kept_bytes{}", "11x60")]),
    fires(
        "KataGpuBootRecordsLost",
        50,
        &[("records_lost_total{}", "0x29 4x60")],
    ),
    fires(
        "KataGpuBootRecordsLost",
        50,
        &[
            ("records_lost_total{}", "4x90"),
            ("records_capped_total{}", "0+1x90"),
        ],
    ),
    silent(
        "KataGpuBootRecordsLost",
        50,
        &[
            ("records_lost_total{}", "4x90"),
            ("records_capped_total{}", "4x90"),
        ],
    ),
    fires(
        "KataGpuBootNotCounted",
        50,
        &[("boots_total{outcome=\"implausible\"}", "0x29 1x60")],
    ),
    fires(
        "KataGpuBootNotCounted",
        50,
        &[("boots_not_followed_total{}", "0x29 1x60")],
    ),
    silent(
        "KataGpuBootNotCounted",
        50,
        &[
            ("boots_total{outcome=\"settled\"}", "0+1x90"),
            ("boots_not_followed_total{}", "1x90"),
        ],
    ),
    fires(
        "KataGpuBootGuestsRefused",
        80,
        &[("connections_refused_total{}", "0+5x90")],
    ),
    silent(
        "KataGpuBootGuestsRefused",
        80,
        &[("connections_refused_total{}", "0+1x90")],
    ),
    // Waits and takes none; waits and takes some; nothing to take.
    fires(
        "KataGpuBootPushFails",
        40,
        &[
            ("otlp_queue_boots{}", "3x60"),
            ("otlp_pushed_boots_total{}", "7x60"),
        ],
    ),
    silent(
        "KataGpuBootPushFails",
        40,
        &[
            ("otlp_queue_boots{}", "3x60"),
            ("otlp_pushed_boots_total{}", "0+1x60"),
        ],
    ),
    silent(
        "KataGpuBootPushFails",
        40,
        &[
            ("otlp_queue_boots{}", "0x60"),
            ("otlp_pushed_boots_total{}", "7x60"),
        ],
    ),
    fires(
        "KataGpuBootPushDropped",
        50,
        &[("otlp_dropped_boots_total{}", "0x29 1x60")],
    ),
    silent(
        "KataGpuBootPushDropped",
        50,
        &[("otlp_dropped_boots_total{}", "1x90")],
    ),
];

/// A series as a collector's that is scraped as job `boots`.
fn scraped(series: &str) -> String {
    let target = "job=\"boots\",instance=\"node\"";
    match series.split_once('{') {
        Some((name, "}")) => format!("kata_gpu_boot_{name}{{{target}}}"),
        Some((name, labels)) => format!("kata_gpu_boot_{name}{{{target},{labels}"),
        None => format!("{series}{{{target}}}"),
    }
}

/// The cases in promtool's format.
fn unit_tests<'a>(cases: impl Iterator<Item = &'a Case>) -> String {
    let mut text = String::from("rule_files: [rules.yml]\nevaluation_interval: 1m\ntests:\n");
    for case in cases {
        text.push_str("  - interval: 1m\n    input_series:\n");
        for (series, values) in case.series {
            writeln!(
                text,
                "      - {{series: '{}', values: '{values}'}}",
                scraped(series)
            )
            .unwrap();
        }
        let samples = if case.fires {
            "[{labels: '{}', value: 1}]"
        } else {
            "[]"
        };
        writeln!(
            text,
            "    promql_expr_test:\n      - expr: 'count(ALERTS{{alertname=\"{}\",alertstate=\"firing\"}})'\n        \
             eval_time: {}m\n        exp_samples: {samples}",
            case.alert, case.minute
        )
        .unwrap();
    }
    text
}

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
        Err(String::from_utf8_lossy(&output.stderr).into_owned())
    }
}

#[test]
fn each_alert_fires_when_it_should_and_only_then() {
    let Some(tool) = tool("prometheus/usr/bin/promtool") else {
        return;
    };
    let groups = groups();
    let named = |fires: bool| {
        CASES
            .iter()
            .filter(move |case| case.fires == fires)
            .map(|case| case.alert)
            .collect::<BTreeSet<_>>()
    };
    let all: BTreeSet<_> = groups
        .iter()
        .flat_map(|(_, alerts)| alerts)
        .map(|alert| alert.name)
        .collect();
    assert_eq!(
        (&named(true), &named(false)),
        (&all, &all),
        "an alert without its cases"
    );

    let dir = folder();
    fs::write(dir.0.join("rules.yml"), printed()).unwrap();
    let tried = |cases: &str| {
        fs::write(dir.0.join("tests.yml"), cases).unwrap();
        promtool(&tool, &["test", "rules", "tests.yml"], &dir.0)
    };
    assert_eq!(tried(&unit_tests(CASES.iter())), Ok(()));
    // Negative control: each case the other way round fails, of the quick ones.
    let quick = CASES.iter().filter(|case| case.minute < 100);
    let others: Vec<Case> = quick
        .map(|case| Case {
            fires: !case.fires,
            ..*case
        })
        .collect();
    let said = tried(&unit_tests(others.iter())).unwrap_err();
    assert_eq!(
        said.matches("expr: \"count(ALERTS").count(),
        others.len(),
        "{said}"
    );
}

#[test]
fn promtool_accepts_the_rules_that_are_printed() {
    let Some(tool) = tool("prometheus/usr/bin/promtool") else {
        return;
    };
    let dir = folder();
    let check = |rules: &str| {
        fs::write(dir.0.join("rules.yml"), rules).unwrap();
        promtool(&tool, &["check", "rules", "rules.yml"], &dir.0)
    };
    let rules = printed();
    assert_eq!(check(&rules), Ok(()));
    for (good, bad) in [
        ("increase(", "increased("),
        ("for: 5m", "for: soon"),
        ("{{ $value", "{{ $valeu"),
        ("labels:", "label:"),
    ] {
        assert!(check(&rules.replacen(good, bad, 1)).is_err(), "{bad}");
    }
}
