//! Boots that are over, before the programs that fleets run: an OpenTelemetry Collector and
//! Prometheus, both real, and receivers that refuse.

mod alerts;
mod deploy;
mod events;
mod grafana;
mod images;
pub mod kustomize;
mod operator;
mod otel;
mod prometheus;
mod receivers;
mod scrapes;

use crate::collect::{DEADLINE, Raw, boot_id, shown, socket};
use kata_gpu_wire::decode::decode;
use kata_gpu_wire::record::Line;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Child;

pub const RECORDED: &str = "recorded-8-gpus-fast-host";
pub const ONE_FAILS: &str = "hand-made-3-gpus-one-fails";

/// Program that tests/setup installs. None, with the reason printed, where it is missing.
pub fn tool(path: &str) -> Option<PathBuf> {
    let tool = crate::project().join("target/tools").join(path);
    if !tool.exists() {
        eprintln!(
            "skipped: {} is not there: tests/setup gets it",
            tool.display()
        );
        return None;
    }
    Some(tool)
}

/// A program that is killed when dropped.
pub struct Running(pub Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ended_already = self.0.kill();
        let _ended_already = self.0.wait();
    }
}

/// The lines that the guest of a recorded boot sent, as boot `n`.
pub fn recorded(fixture: &str, n: u64) -> String {
    let path = crate::project().join(format!("tests/fixtures/boots/{fixture}.ndjson"));
    let text = crate::text(path);
    let guest: Vec<&str> = text
        .lines()
        .filter(|line| decode(line.as_bytes()).is_ok())
        .collect();
    let Ok(Line::Header(header)) = decode(guest[0].as_bytes()) else {
        panic!("{fixture} has no header")
    };
    (guest.join("\n") + "\n").replace(&header.boot_id, &boot_id(n))
}

/// A guest that sends that boot and hangs up.
pub fn boot(dir: &Path, fixture: &str, n: u64) {
    Raw::connect(&socket(dir, "v")).say(recorded(fixture, n));
}

/// A port that nobody listens on now.
pub fn free_port() -> u16 {
    std::net::TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap()
        .port()
}

/// One request, and everything that is answered.
pub fn ask(address: SocketAddr, request: &str) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(DEADLINE)).unwrap();
    // Hung up on before all of it was sent: the answer, or that there is none, is what counts.
    let _hung_up = stream.write_all(request.as_bytes());
    let mut answer = Vec::new();
    let _hung_up = stream.read_to_end(&mut answer);
    String::from_utf8_lossy(&answer).into_owned()
}

pub fn get(address: SocketAddr, path: &str) -> String {
    ask(
        address,
        &format!("GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"),
    )
}

/// The value of one series in a text of metrics.
pub fn value(text: &str, series: &str) -> f64 {
    let found = text
        .lines()
        .find_map(|line| line.strip_prefix(series)?.strip_prefix(' ')?.parse().ok());
    found.unwrap_or_else(|| panic!("no {series} in {text}"))
}

/// Address of metrics in the log of a collector.
pub fn metrics_address(collector: &crate::collect::Collector) -> SocketAddr {
    let line = collector.wait_for("metrics at http://");
    let address = line
        .split("http://")
        .nth(1)
        .and_then(|rest| rest.split('/').next())
        .unwrap();
    address.parse().unwrap()
}

/// A file of src/collect/deploy.
pub fn deployed(name: &str) -> String {
    let path = crate::project().join("src/collect/deploy").join(name);
    std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// Rules of the alerts, as Prometheus reads them.
pub fn rules() -> Vec<serde_yaml::Value> {
    let file: serde_yaml::Value = serde_yaml::from_str(&deployed("alerts.yaml")).unwrap();
    let groups = file["groups"].as_sequence().unwrap();
    groups
        .iter()
        .flat_map(|group| group["rules"].as_sequence().unwrap().clone())
        .collect()
}

/// A stored boot as an OTLP request in JSON.
pub fn exported(dir: &Path, n: u64) -> serde_json::Value {
    serde_json::from_str(&shown(dir, n, &["--otlp"])).unwrap()
}
