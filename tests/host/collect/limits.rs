//! A failure means that a hostile guest gets past a limit of the collector, speaks for another's
//! boot, or costs another guest a record.

use super::*;
use crate::assert_printable;

/// A collector for guests v (well-behaved) and w (not).
struct Two {
    dir: TempDir,
    collector: Collector,
    good: Guest,
}

/// Records of the well-behaved guest, half before and half after what the other one does.
const GOOD: u64 = 600;
const GOOD_BOOT: u64 = 1;

impl Two {
    fn new(limits: &[&str]) -> Self {
        let dir = folder();
        let uds = [dir.0.join("v"), dir.0.join("w")].map(|p| p.to_str().unwrap().to_string());
        let mut words = vec!["--uds", &uds[0], "--uds", &uds[1]];
        for limit in limits {
            words.extend(["--limit", limit]);
        }
        let collector = Collector::start(&dir.0, &words);
        let good = Guest::start(GOOD_BOOT, socket(&dir.0, "v"));
        good.push(GOOD / 2);
        until_stored(&dir.0, GOOD_BOOT, GOOD as usize / 2);
        Self {
            dir,
            collector,
            good,
        }
    }

    fn evil(&self) -> Raw {
        Raw::connect(&socket(&self.dir.0, "w"))
    }

    /// Number of boots' files.
    fn files(&self) -> usize {
        let names = crate::names(self.dir.0.join("boots"));
        names
            .iter()
            .filter(|name| Path::new(name).extension().is_some())
            .count()
    }

    /// Ends the scene after the attack: the other guest goes on, and both files are read.
    fn end(self, evil_boot: u64) -> (BootFile, Vec<String>) {
        self.good.push(GOOD / 2);
        until_stored(&self.dir.0, GOOD_BOOT, GOOD as usize);
        let said = self.collector.stop();
        drop(self.good);
        assert_whole(&read(&self.dir.0, GOOD_BOOT), GOOD);
        // Nothing that a guest wrote reached this log as it was.
        assert_printable(&said.join("\n"));
        (read(&self.dir.0, evil_boot), said)
    }
}

#[test]
fn bytes_over_the_limit_are_dropped_and_the_file_is_no_larger() {
    let two = Two::new(&["bytes=100000"]);
    let mut evil = two.evil();
    evil.say(header(2));
    for seq in 0..100 {
        let padding = "p".repeat(10_000);
        evil.say(format!(
            "{{\"schema\":1,\"seq\":{seq},\"boottime_ns\":1,\"kind\":\"event\",\"name\":\"x\",\
             \"fields\":{{\"a\":\"{padding}\"}}}}\n"
        ));
    }
    until("the limit", || {
        read(&two.dir.0, 2)
            .host
            .iter()
            .any(|l| matches!(l.event, HostEvent::Capped { .. }))
    });
    let (file, _) = two.end(2);
    assert!(
        file.bytes < 110_000 && file.records.len() == 9,
        "{} bytes, {} records",
        file.bytes,
        file.records.len()
    );
}

#[test]
fn malformed_lines_are_counted_and_cost_no_memory() {
    let two = Two::new(&["burst=1073741824"]);
    let mut evil = two.evil();
    evil.say(header(2) + &event(0));
    let megabyte = vec![b'x'; 1 << 20];
    for _ in 0..100 {
        evil.say(&megabyte);
    }
    evil.say(b"\n\x1b[2J\xff\n{\"schema\":1,\"kind\":\"host\",\"realtime_ns\":4,");
    evil.say(b"\"event\":\"lost\",\"count\":7,\"gaps\":[]}\n");
    evil.say(event(1));
    until_stored(&two.dir.0, 2, 2);
    let status = crate::text(format!("/proc/{}/status", two.collector.pid()));
    let peak: u64 = status
        .lines()
        .find_map(|l| l.strip_prefix("VmHWM:"))
        .unwrap()
        .trim()
        .trim_end_matches(" kB")
        .parse()
        .unwrap();
    drop(evil);
    let (file, _) = two.end(2);
    assert_eq!(
        (file.records.len(), file.damaged, garbage(&file)),
        (2, 0, 3)
    );
    assert!(peak < 64 << 10, "{peak} kB at most");
    assert!(file.bytes < 10_000, "none of it is in the file");
}

#[test]
fn more_boots_than_a_vm_may_begin_are_refused_and_make_no_file() {
    let two = Two::new(&["boots=3"]);
    for n in 2..12 {
        let mut evil = two.evil();
        evil.header(n);
        if n >= 5 {
            evil.until_closed();
        } else {
            until("a file", || boot_path(&two.dir.0, n).exists());
        }
    }
    let line = two.collector.wait_for("limit boots");
    assert!(line.contains("began 3 boots within an hour"), "{line}");
    assert_eq!(two.files(), 4);
    two.end(2);
}

#[test]
fn a_guest_that_connects_endlessly_is_refused_alone() {
    let two = Two::new(&["connects=5"]);
    let connects = 300;
    for _ in 0..connects {
        drop(two.evil());
    }
    two.collector.wait_for("limit connects");
    let (_, said) = two.end(2);
    let (_, refused) = said.last().unwrap().rsplit_once(", ").unwrap();
    let refused: u64 = refused.trim_end_matches(" refused").parse().unwrap();
    assert!(
        (connects - 5..=connects).contains(&refused),
        "{refused} of {connects}"
    );
}

#[test]
fn a_guest_that_sends_too_fast_is_slowed_and_loses_nothing() {
    let two = Two::new(&["burst=20000", "rate=20000"]);
    let mut evil = two.evil();
    let text: String = (0..1000).map(event).collect();
    let start = Instant::now();
    let sender = std::thread::spawn(move || {
        evil.say(header(2) + &text);
        evil
    });
    until_stored(&two.dir.0, 2, 1000);
    let took = start.elapsed();
    drop(sender.join().unwrap());
    let (file, _) = two.end(2);
    assert_whole(&file, 1000);
    // About 62 kB: 20 at once, a turn of 16 in debt, the rest at 20 a second. A slow machine only
    // takes longer.
    assert!(took > Duration::from_millis(700), "{took:?}");
}

#[test]
fn a_connection_that_does_not_say_who_it_is_is_closed() {
    let two = Two::new(&["header=1"]);
    let mut evil = two.evil();
    evil.say("{");
    evil.until_closed();
    two.collector.wait_for("no header within 1 s");
    two.end(2);
}

#[test]
fn a_guest_cannot_speak_for_anothers_boot() {
    let two = Two::new(&[]);
    let mut evil = two.evil();
    evil.say(header(GOOD_BOOT) + &event(GOOD));
    evil.until_closed();
    let line = two.collector.wait_for("belongs to");
    assert!(
        line.contains("v_10241") && line.contains("w_10241"),
        "{line}"
    );
    let dir = two.dir.0.clone();
    let (file, _) = two.end(GOOD_BOOT);
    assert_eq!(
        file.owner().map(String::from),
        Some(format!("socket {}", socket(&dir, "v").display()))
    );
}

#[test]
fn a_guests_text_is_no_file_name_and_drives_no_terminal() {
    let two = Two::new(&[]);
    let evil_text = "\\u001b[2J\\u202e\\u0000";
    for id in [
        "../../../../../../../tmp/evil-evil-ev",
        "/tmp/evil-evil-evil-evil-evil-evil-ev",
    ] {
        let mut evil = two.evil();
        evil.say(format!(
            "{{\"schema\":1,\"stream\":{{\"boot_id\":\"{id}\",\"version\":\"{evil_text}\",\
             \"kernel\":\"x\",\"first_seq\":0}}}}\n"
        ));
        evil.say("\x1b[2J\n");
    }
    let mut evil = two.evil();
    evil.say(header(2).replace("0.1.0", evil_text) + &event(0).replace("\"x\"", "\"\\u001b[31m\""));
    two.collector.wait_for("kata-gpu-init \\x1b[2J");
    drop(evil);
    until("the end of it", || garbage(&read(&two.dir.0, 2)) == 1);
    assert_printable(&shown(&two.dir.0, 2, &["-v"]));
    assert_eq!(two.files(), 2);
    two.end(2);
}

#[test]
fn a_wrong_limit_is_an_error_that_names_the_right_ones() {
    let refused = |words: [&str; 2]| {
        let command = ["collect", "--dir", "/nonexistent/x"];
        let output = Command::new(program())
            .args(command)
            .args(words)
            .output()
            .unwrap();
        assert!(!output.status.success(), "{output:?}");
        crate::stderr(&output)
    };
    let why = refused(["--limit", "speed=1"]);
    assert!(why.contains("--limit speed=1: no such limit"), "{why}");
    assert!(
        why.contains(&kata_gpu_collect::limits::Limits::help()),
        "{why}"
    );
    // Ports that no guest can name.
    for port in ["0", "4294967295"] {
        let why = refused(["--port", port]);
        assert!(why.contains("is not in 1..4294967295"), "{why}");
    }
}
