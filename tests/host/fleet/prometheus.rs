//! A failure means that a real Prometheus cannot scrape the collector, or gets other numbers than
//! `stats --json` has for the same boots.

use super::{
    ONE_FAILS, RECORDED, Running, ask, boot, free_port, get, metrics_address, tool, value,
};
use crate::collect::{Collector, folder, program, until};
use serde_json::Value;
use std::io::Write;
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Command, Stdio};

/// A Prometheus that scrapes one target. Queries are about the moment of the last [`Server::wait`]:
/// on a busy machine a later scrape can fail, and its series are gone until the next one.
pub struct Server {
    _child: Running,
    address: SocketAddr,
    at: Option<Value>,
}

impl Server {
    /// Starts a server that scrapes the target, and waits until it has; `more` ends its
    /// configuration.
    pub fn start(prometheus: &Path, dir: &Path, target: SocketAddr, more: &str) -> Self {
        let address = SocketAddr::from(([127, 0, 0, 1], free_port()));
        let config = format!(
            "global: {{scrape_interval: 1s, scrape_timeout: 1s, evaluation_interval: 1s}}\n\
             scrape_configs: [{{job_name: boots, static_configs: [{{targets: ['{target}']}}]}}]\n\
             {more}"
        );
        crate::write(dir.join("prometheus.yml"), config);
        let child = Command::new(prometheus)
            .current_dir(dir)
            .args(["--config.file=prometheus.yml", "--storage.tsdb.path=data"])
            .arg(format!("--web.listen-address={address}"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut server = Self {
            _child: Running(child),
            address,
            at: None,
        };
        until("Prometheus listens", || {
            std::net::TcpStream::connect(address).is_ok()
        });
        server.wait("it has scraped", "up == 1");
        server
    }

    /// Answer below /api/v1. None where that is no JSON.
    pub fn api(&self, path: &str) -> Option<Value> {
        // With HTTP/1.0 a long answer is in one piece.
        let answer = ask(
            self.address,
            &format!("GET /api/v1/{path} HTTP/1.0\r\nHost: x\r\n\r\n"),
        );
        serde_json::from_str(answer.split_once("\r\n\r\n")?.1).ok()
    }

    /// Waits until a query has a result, whose time is that of later queries.
    pub fn wait(&mut self, what: &str, expression: &str) {
        self.at = None;
        let mut at = Value::Null;
        until(what, || {
            at = self
                .answer(expression)
                .map_or(Value::Null, |a| a["data"]["result"][0]["value"][0].clone());
            !at.is_null()
        });
        self.at = Some(at);
    }

    pub fn answer(&self, expression: &str) -> Option<Value> {
        let encoded: String = expression.bytes().map(|b| format!("%{b:02x}")).collect();
        let at = self.at.as_ref();
        let at = at.map_or(String::new(), |at| format!("&time={at}"));
        self.api(&format!("query?query={encoded}{at}"))
    }

    /// The one value of a query, if there is one.
    pub fn value(&self, expression: &str) -> Option<f64> {
        self.answer(expression)?["data"]["result"][0]["value"][1]
            .as_str()?
            .parse()
            .ok()
    }
}

#[test]
fn a_real_prometheus_scrapes_the_numbers_of_stats() {
    let Some(prometheus) = tool("prometheus/usr/bin/prometheus") else {
        return;
    };
    let dir = folder();
    let collector = Collector::start(&dir.0, &["--metrics", "0"]);
    let target = metrics_address(&collector);
    let mut server = Server::start(&prometheus, &dir.0, target, "");
    assert_eq!(
        server.value("kata_gpu_boot_failures_total{reason=\"needs-reset\"}"),
        Some(0.0),
        "the first failure has to be a change"
    );
    assert_eq!(server.value("kata_gpu_boot_nothing_of_that_name"), None);

    boot(&dir.0, RECORDED, 1);
    boot(&dir.0, ONE_FAILS, 2);
    server.wait("both boots are over", "sum(kata_gpu_boot_boots_total) == 2");
    let output = Command::new(program())
        .args(["list", "--stats", "--json", "--dir"])
        .arg(dir.0.join("boots"))
        .output()
        .unwrap();
    let stats: Value = serde_json::from_slice(&output.stdout).unwrap();
    let mut compared = 0;
    for (rows, metric, label) in [
        ("phases", "phase_seconds", "phase"),
        ("milestones", "milestone_seconds", "milestone"),
    ] {
        for row in stats[rows].as_array().unwrap() {
            let (name, n) = (row["name"].as_str().unwrap(), row["n"].as_f64().unwrap());
            let of = |what: &str| {
                server.value(&format!(
                    "kata_gpu_boot_{metric}_{what}{{{label}=\"{name}\"}}"
                ))
            };
            if name == "kernel start" {
                // 0 in every boot.
                assert_eq!(of("count"), None);
                continue;
            }
            assert_eq!(of("count"), Some(n), "{metric} {name}");
            // The median of one or two values is their mean.
            let sum = row["median_ns"].as_f64().unwrap() * n / 1e9;
            assert!(
                (of("sum").unwrap() - sum).abs() < 2e-9 + sum * 1e-9,
                "{metric} {name}: {:?} {sum}",
                of("sum")
            );
            compared += 1;
        }
    }
    // Module loads differ there by what a guest calls the module.
    for row in stats["steps"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|row| !row["name"].as_str().unwrap().contains(' '))
    {
        let name = row["name"].as_str().unwrap();
        let count = server.value(&format!(
            "kata_gpu_boot_step_seconds_count{{step=\"{name}\"}}"
        ));
        assert_eq!(count, row["n"].as_f64(), "{name}");
        compared += 1;
    }
    assert!(compared > 20, "{compared}");
    let failed = server.value("kata_gpu_boot_gpus_total{result=\"failed\"}");
    assert_eq!(failed, stats["failed_gpus"].as_f64());
    assert_eq!(
        server.value("sum(kata_gpu_boot_gpus_total)"),
        stats["gpus"].as_f64()
    );
    let failures: f64 = stats["failures"]
        .as_array()
        .unwrap()
        .iter()
        .map(|f| f["count"].as_f64().unwrap())
        .sum();
    assert_eq!(
        server.value("sum(kata_gpu_boot_failures_total)"),
        Some(failures)
    );
    assert!(failures >= 1.0 && failed == Some(1.0));
    let quantile = "histogram_quantile(0.95, sum by (le) \
                    (kata_gpu_boot_milestone_seconds_bucket{milestone=\"settled\"}))";
    assert!(server.value(quantile).unwrap() > 0.1);
    assert!(server.value("kata_gpu_boot_received_bytes_total").unwrap() > 10_000.0);
    collector.stop();
}

#[test]
fn promtool_has_nothing_to_say_about_the_metrics() {
    let Some(promtool) = tool("prometheus/usr/bin/promtool") else {
        return;
    };
    let dir = folder();
    let nobody = "http://127.0.0.1:1";
    let words = ["--metrics", "0", "--otlp", nobody, "--kubernetes", nobody];
    let collector = Collector::start(&dir.0, &words);
    let address = metrics_address(&collector);
    boot(&dir.0, RECORDED, 1);
    let over = "kata_gpu_boot_boots_total{outcome=\"settled\"}";
    until("the boot is over", || {
        value(&get(address, "/metrics"), over) == 1.0
    });
    let answer = get(address, "/metrics");
    let text = answer.split_once("\r\n\r\n").unwrap().1;
    let check = |text: &str| {
        let mut child = Command::new(&promtool)
            .args(["check", "metrics"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        child
            .stdin
            .take()
            .unwrap()
            .write_all(text.as_bytes())
            .unwrap();
        let output = child.wait_with_output().unwrap();
        (
            output.status.success(),
            crate::stdout(&output) + &crate::stderr(&output),
        )
    };
    assert_eq!(check(text), (true, String::new()));
    // Negative control: a text with a fault is refused.
    assert!(
        !check(&text.replace("# HELP kata_gpu_boot_records_total", "# HELP x"))
            .1
            .is_empty()
    );
    collector.stop();
}
