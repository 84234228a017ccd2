//! A failure means that a receiver which refuses, is busy or is not there holds a guest up, loses a
//! boot that could still be pushed, or goes unreported. The receivers are fakes: no real one fails
//! when it should.

use super::{ONE_FAILS, RECORDED, boot, free_port};
use crate::collect::{Collector, DEADLINE, folder, program, read, until, until_settled};
use kata_gpu_report::data::boot_file::HostEvent;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::path::Path;
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Answers each POST with the next answer, the last one again and again, and keeps it. An empty
/// answer hangs.
pub struct Fake {
    pub port: u16,
    asked: Arc<Mutex<Vec<Asked>>>,
}

/// A POST: when it came, its head in small letters, and its body.
#[derive(Clone)]
pub struct Asked {
    pub at: Instant,
    pub head: String,
    pub body: Vec<u8>,
}

impl Fake {
    pub fn start(answers: &[&str]) -> Self {
        Self::on(TcpListener::bind("127.0.0.1:0").unwrap(), answers)
    }

    fn on(listener: TcpListener, answers: &[&str]) -> Self {
        let fake = Self {
            port: listener.local_addr().unwrap().port(),
            asked: Arc::default(),
        };
        let (asked, answers): (_, Vec<String>) = (
            fake.asked.clone(),
            answers.iter().map(|a| a.to_string()).collect(),
        );
        std::thread::spawn(move || {
            let mut hanging = Vec::new();
            for stream in listener.incoming().map_while(Result::ok) {
                stream.set_read_timeout(Some(DEADLINE)).unwrap();
                let mut reader = BufReader::new(stream);
                let (mut head, mut line) = (String::new(), String::new());
                while reader.read_line(&mut line).is_ok_and(|n| n > 2) {
                    head += &std::mem::take(&mut line).to_ascii_lowercase();
                }
                let length = head
                    .lines()
                    .find_map(|l| l.strip_prefix("content-length: ")?.trim().parse().ok())
                    .unwrap_or(0);
                let mut body = vec![0; length];
                if length == 0 || reader.read_exact(&mut body).is_err() {
                    continue;
                }
                let mut asked = asked.lock().unwrap();
                let answer = answers.get(asked.len()).unwrap_or(answers.last().unwrap());
                let at = Instant::now();
                asked.push(Asked { at, head, body });
                let mut stream = reader.into_inner();
                if answer.is_empty() {
                    hanging.push(stream);
                    continue;
                }
                let _gone = stream.write_all(format!("HTTP/1.1 {answer}\r\n\r\n").as_bytes());
            }
        });
        fake
    }

    pub fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    pub fn asked(&self) -> Vec<Asked> {
        self.asked.lock().unwrap().clone()
    }
}

const TAKEN: &str = "200 OK\r\nContent-Length: 0";

/// A collector that pushes to this receiver.
fn pushing_to(dir: &Path, url: &str) -> Collector {
    Collector::start(dir, &["--otlp", url])
}

#[test]
fn a_busy_receiver_is_retried_when_it_asked_with_the_headers() {
    let fake = Fake::start(&[
        "503 Service Unavailable\r\nRetry-After: 2\r\nContent-Length: 0",
        TAKEN,
    ]);
    let dir = folder();
    let mut command = Collector::command(&dir.0, &["--otlp", &fake.url()]);
    let collector = Collector::of(command.env("OTEL_EXPORTER_OTLP_HEADERS", "X-Tenant=gpu"));
    boot(&dir.0, RECORDED, 1);
    collector.wait_for("HTTP 503");
    collector.wait_for("it takes boots again");
    let asked = fake.asked();
    assert_eq!(asked.len(), 2);
    assert!(asked[1].at - asked[0].at >= Duration::from_secs(2));
    for part in [
        "post /v1/traces http/1.1",
        "content-type: application/x-protobuf",
        "x-tenant: gpu",
    ] {
        assert!(asked[0].head.contains(part), "{part}: {}", asked[0].head);
    }
}

#[test]
fn refused_is_final_and_logged_and_counted() {
    // google.rpc.Status with the message "no\x1b[2J".
    let fake = Fake::start(&["400 Bad Request\r\nContent-Length: 8\r\n\r\n\x12\x06no\x1b[2J"]);
    let dir = folder();
    let collector = pushing_to(&dir.0, &fake.url());
    boot(&dir.0, RECORDED, 1);
    let line = collector.wait_for("not pushed");
    assert!(
        line.contains("HTTP 400 Bad Request: no\\x1b[2J"),
        "{line:?}"
    );
    let said = collector.stop();
    assert!(
        said.last().unwrap().ends_with("; 0 boots pushed, 1 not"),
        "{said:#?}"
    );
    assert_eq!(fake.asked().len(), 1, "it was tried again");
    assert!(
        !read(&dir.0, 1)
            .host
            .iter()
            .any(|l| matches!(l.event, HostEvent::Exported { .. }))
    );
}

#[test]
fn rejected_spans_are_said() {
    // ExportTraceServiceResponse with a partial success: 3 spans, "full".
    let fake = Fake::start(&["200 OK\r\nContent-Length: 10\r\n\r\n\x0a\x08\x08\x03\x12\x04full"]);
    let dir = folder();
    let collector = pushing_to(&dir.0, &fake.url());
    boot(&dir.0, ONE_FAILS, 1);
    let line = collector.wait_for("span(s) rejected: full");
    assert!(line.contains(": 3 of "), "{line}");
}

#[test]
fn an_absent_receiver_costs_no_guest_and_drops_the_oldest_boots() {
    let port = free_port();
    let dir = folder();
    let url = format!("http://127.0.0.1:{port}");
    let words = ["--otlp", &url, "--limit", "push-queue=2", "--metrics", "0"];
    let collector = Collector::start(&dir.0, &words);
    let address = super::metrics_address(&collector);
    for n in 1..=5 {
        boot(&dir.0, RECORDED, n);
        // One peer may have few connections at once: the next comes when this one has been read.
        until_settled(&dir.0, n);
    }
    collector.wait_for("connect: Connection refused");
    let text = |series: &str| {
        super::value(
            &super::get(address, "/metrics"),
            &format!("kata_gpu_boot_otlp_{series}"),
        )
    };
    until("three are let go", || text("dropped_boots_total") == 3.0);
    assert_eq!(
        (
            text("queue_boots"),
            text("queue_capacity_boots"),
            text("pushed_boots_total")
        ),
        (2.0, 2.0, 0.0)
    );
    assert!(text("failures_total") >= 1.0);
    assert!(
        collector
            .wait_for("(limit push-queue)")
            .contains("its file stays")
    );
    // The receiver comes back: boots that wait are pushed.
    let fake = Fake::on(TcpListener::bind(("127.0.0.1", port)).unwrap(), &[TAKEN]);
    collector.wait_for("it takes boots again");
    until("both are pushed", || text("pushed_boots_total") == 2.0);
    let said = collector.stop();
    assert!(
        said.last().unwrap().ends_with("; 2 boots pushed, 3 not"),
        "{said:#?}"
    );
    assert_eq!(fake.asked().len(), 2);
}

#[test]
fn what_waits_at_the_stop_is_named() {
    let dir = folder();
    let url = format!("http://127.0.0.1:{}", free_port());
    let collector = pushing_to(&dir.0, &url);
    boot(&dir.0, RECORDED, 1);
    collector.wait_for("connect: Connection refused");
    let said = collector.stop();
    let line = said
        .iter()
        .find(|line| line.contains("1 boot(s) not pushed"))
        .unwrap();
    assert!(
        line.contains("before the stop") && line.contains(&crate::collect::boot_id(1)),
        "{line}"
    );
    assert!(
        said.last().unwrap().ends_with("; 0 boots pushed, 1 not"),
        "{said:#?}"
    );
}

#[test]
fn wrong_words_are_refused_with_the_cure() {
    let dir = folder();
    for (url, headers, cure) in [
        ("https://x", "", "let it do that"),
        ("x", "", "want http://HOST:4318"),
        ("grpc://x:4317", "", "use the receiver's http://HOST:4318"),
        ("http://x", "host=x", "the protocol sets it: omit it"),
    ] {
        let output = Command::new(program())
            .args(["collect", "--no-vsock", "--otlp", url, "--dir"])
            .arg(&dir.0)
            .env("OTEL_EXPORTER_OTLP_HEADERS", headers)
            .output()
            .unwrap();
        let said = crate::stderr(&output);
        assert!(
            !output.status.success() && said.contains(cure),
            "{url}: {said}"
        );
    }
}
