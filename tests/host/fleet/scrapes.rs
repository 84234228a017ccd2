//! A failure means that a client of the metrics endpoint can lock others out or get its request
//! echoed, or that a guest's text makes new series.

use super::{RECORDED, ask, boot, get, metrics_address, recorded, value};
use crate::collect::{
    Collector, DEADLINE, Raw, event, folder, header, program, socket, until, until_settled,
};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::Command;

fn start(dir: &std::path::Path) -> Collector {
    Collector::start(dir, &["--metrics", "0", "--limit", "goodbye=1"])
}

#[test]
fn only_metrics_are_answered_and_no_request_is_echoed() {
    let dir = folder();
    let collector = start(&dir.0);
    let address = metrics_address(&collector);
    let long = format!("A: {}\r\n", "a".repeat(20_000));
    let http = |line: &str, headers: &str| format!("{line} HTTP/1.1\r\nHost: x\r\n{headers}\r\n");
    for (request, status) in [
        (http("GET /metrics", ""), "200 OK"),
        (http("GET /script?script", ""), "404 Not Found"),
        (
            http("POST /metrics", "Content-Length: 99999999999\r\n"),
            "405 Method Not Allowed",
        ),
        (http("GET /metrics", &long), "431 "),
        (http("GET /metrics", &"A: b\r\n".repeat(100)), "431 "),
        (
            "\x16\x03\x01 no http at all\r\n\r\n".to_string(),
            "400 Bad Request",
        ),
    ] {
        let answer = ask(address, &request);
        assert!(
            answer.starts_with(&format!("HTTP/1.1 {status}")),
            "{:?}: {answer}",
            &request[..request.len().min(60)]
        );
        assert!(!answer.contains("script"), "{answer}");
    }
    collector.stop();
}

#[test]
fn a_silent_crowd_is_bounded_and_locks_nobody_out() {
    let dir = folder();
    let collector = start(&dir.0);
    let address = metrics_address(&collector);
    let slow = || {
        let mut stream = TcpStream::connect(address).unwrap();
        stream.write_all(b"GET /metrics HTTP/1.1\r\n").unwrap();
        stream
    };
    let mut crowd: Vec<TcpStream> = (0..200).map(|_| slow()).collect();
    // More come between any two scrapes; nobody who asks is locked out, and guests notice nothing.
    for _ in 0..42 {
        crowd.extend((0..5).map(|_| slow()));
        let answer = get(address, "/metrics");
        assert!(answer.contains("200 OK"), "{answer:?}");
    }
    boot(&dir.0, RECORDED, 1);
    until_settled(&dir.0, 1);
    // Each is hung up on when its time is over.
    for stream in &mut crowd {
        stream.set_read_timeout(Some(DEADLINE)).unwrap();
        let mut rest = Vec::new();
        let _reset = stream.read_to_end(&mut rest);
        assert!(!String::from_utf8_lossy(&rest).contains("kata_gpu_boot_boots"));
    }
    let text = get(address, "/metrics");
    assert!(
        value(&text, "kata_gpu_boot_scrapes_refused_total") >= 300.0,
        "{text}"
    );
    assert!(
        value(&text, "kata_gpu_boot_scrapes_failed_total") >= 32.0,
        "{text}"
    );
    collector.stop();
}

/// Samples of one metric.
fn samples(text: &str, metric: &str) -> Vec<String> {
    let of = |line: &&str| line.starts_with(&format!("{metric}{{"));
    text.lines().filter(of).map(str::to_string).collect()
}

#[test]
fn collector_and_two_inits_of_a_rollout_are_told_apart_by_their_builds() {
    const INIT: &str = "3dc317bdfe32c1b60eeee65d9858c58410d51804";
    const NEWER: &str = "4ec317bdfe32c1b60eeee65d9858c58410d51804";
    let dir = folder();
    let collector = start(&dir.0);
    let address = metrics_address(&collector);
    let guest = |n| recorded("real-h200-kata-agent", n);
    let failed = "{\"schema\":1,\"seq\":90000,\"boottime_ns\":90000000000,\"kind\":\"event\",\
         \"name\":\"gpu.failed\",\"gpu\":\"0000:01:00.0\",\"error\":\"x\"}\n";
    for text in [guest(1), guest(2).replace(INIT, NEWER) + failed] {
        Raw::connect(&socket(&dir.0, "v")).say(text);
    }
    let of = |build: &str, result: &str, n: u32| {
        format!(
            "kata_gpu_boot_guest_boots_total{{version=\"0.1.0\",build_id=\"{build}\",\
             result=\"{result}\"}} {n}"
        )
    };
    let mut seen = Vec::new();
    until("both boots", || {
        seen = samples(&get(address, "/metrics"), "kata_gpu_boot_guest_boots_total");
        seen.len() == 6
    });
    for line in [
        of(INIT, "well", 1),
        of(INIT, "failed", 0),
        of(NEWER, "failed", 1),
    ] {
        assert!(seen.contains(&line), "{line}: {seen:#?}");
    }
    let output = Command::new(program()).arg("--version").output().unwrap();
    let version = crate::stdout(&output);
    let build = version.lines().nth(1).unwrap().strip_prefix("build ");
    assert_eq!(
        samples(&get(address, "/metrics"), "kata_gpu_boot_build_info"),
        [format!(
            "kata_gpu_boot_build_info{{version=\"{}\",build_id=\"{}\"}} 1",
            env!("CARGO_PKG_VERSION"),
            build.unwrap()
        )]
    );
    collector.stop();
}

#[test]
fn no_text_of_a_guest_makes_more_series() {
    let dir = folder();
    let collector = start(&dir.0);
    let address = metrics_address(&collector);
    let series = |text: &str| {
        text.lines()
            .filter(|line| line.starts_with("kata_"))
            .count()
    };
    let before = series(&get(address, "/metrics"));
    let mut guest = Raw::connect(&socket(&dir.0, "v"));
    let started = event(0).replace("\"x\"", "\"init.start\",\"fields\":{\"build\":\"zzq\"}");
    guest.say(header(1) + &started + "rubbish\n");
    guest.say(
        "{\"schema\":1,\"seq\":900,\"boottime_ns\":900,\"kind\":\"event\",\"name\":\"gpu.failed\",\
         \"gpu\":\"0001:00:00.0\",\"fields\":{\"reason\":\"zzq\",\"step\":\"zzq\"}}\n",
    );
    for n in 0..200 {
        let (begin, end) = (2 * n + 1, 2 * n + 2);
        guest.say(format!(
            "{{\"schema\":1,\"seq\":{begin},\"boottime_ns\":{begin},\"kind\":\"begin\",\
             \"name\":\"zzq\\\"{n}\",\"span\":{begin}}}\n\
             {{\"schema\":1,\"seq\":{end},\"boottime_ns\":{end},\"kind\":\"end\",\
             \"name\":\"zzq\\\"{n}\",\"span\":{begin},\"error\":\"e{n}\"}}\n"
        ));
    }
    until("it is in flight", || {
        value(
            &get(address, "/metrics"),
            "kata_gpu_boot_boots_in_flight{state=\"connected\"}",
        ) == 1.0
    });
    drop(guest);
    let unfinished = "kata_gpu_boot_boots_total{outcome=\"unfinished\"}";
    until("it is over", || {
        value(&get(address, "/metrics"), unfinished) == 1.0
    });
    let text = get(address, "/metrics");
    assert!(
        series(&text) < before + 200 && !text.contains("zzq"),
        "{text}"
    );
    assert_eq!(value(&text, "kata_gpu_boot_garbage_lines_total"), 1.0);
    // Its 200 steps are one series, its reason is no label, and that records are missing is said.
    assert_eq!(
        value(&text, "kata_gpu_boot_step_seconds_count{step=\"other\"}"),
        200.0
    );
    assert!(
        value(
            &text,
            "kata_gpu_boot_failures_total{reason=\"other\",whose=\"other\"}"
        ) >= 1.0
    );
    assert_eq!(value(&text, "kata_gpu_boot_records_lost_total"), 499.0);
    assert_eq!(
        value(&text, "kata_gpu_boot_boots_in_flight{state=\"connected\"}"),
        0.0
    );
    collector.stop();
}
