//! A failure means that some file of a boot makes a reader or the collector exceed its memory
//! limit. The limit is RLIMIT_DATA, which needs no privileges; control: one below what the program
//! needs ends it.

use crate::collect::{Collector, Raw, boot_id, folder, program, socket, until};
use crate::fleet::{get, metrics_address, value};
use kata_gpu_wire::record::{Header, header_line};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// Memory limit of a reader: 4 bytes for each byte that it reads, and 32 MB.
fn memory(bytes: usize) -> u64 {
    4 * bytes as u64 + (32 << 20)
}

/// As much as the limits of a reader are filled with.
const LARGE: usize = 8_000_000;
/// Size of a file that ended a collector with 256 MiB, when it kept trees.
const SMALL: usize = 2_000_000;
const COLLECTOR: u64 = 64 << 20;

/// Lines up to a size.
fn boot(size: usize, line: impl Fn(usize) -> String) -> String {
    let header = Header {
        boot_id: boot_id(1),
        version: "0.1.0".into(),
        kernel: "6.1".into(),
        first_seq: 0,
    };
    let clock = r#"{"schema":1,"kind":"host","realtime_ns":4,"event":"clock","boottime_ns":1,"offset_ns":1700000000000000000,"error_ns":3}"#;
    let mut text = header_line(&header) + clock + "\n";
    for seq in 0.. {
        let line = format!(
            "{{\"schema\":1,\"seq\":{seq},\"boottime_ns\":{seq},{}}}\n",
            line(seq)
        );
        if text.len() + line.len() > size {
            break;
        }
        text.push_str(&line);
    }
    text
}

/// Trees of values in every field: 189 bytes of memory a byte, where they were kept.
pub fn trees(seq: usize) -> String {
    format!(
        r#""kind":"begin","name":"x","span":{seq},"fields":{{"a":[{}]}}"#,
        vec![r#"{"":0}"#; 2300].join(",")
    )
}

/// Spans, orders, fields, errors, GPUs and events, each up to its limit.
pub fn everything(seq: usize) -> String {
    let text = "\u{7f}".repeat(100);
    let gpu = format!("{:04x}:00:00.0", seq / 4 % 256);
    match seq % 4 {
        0 => {
            let fields: Vec<String> = (0..8).map(|n| format!("\"{n}\":0")).collect();
            let after = [4, 8, 12]
                .map(|n| seq.saturating_sub(n).to_string())
                .join(",");
            format!(
                r#""kind":"begin","name":"gpu.init","span":{seq},"gpu":"{gpu}","after":[{after}],"fields":{{{}}}"#,
                fields.join(",")
            )
        }
        1 => format!(
            r#""kind":"end","name":"gpu.init","span":{},"level":"error","error":"{text}""#,
            seq - 1
        ),
        2 => format!(
            r#""kind":"event","name":"x","parent":{},"level":"error","error":"{text}""#,
            seq - 2
        ),
        _ => format!(
            r#""kind":"event","name":"gpu.failed","gpu":"{gpu}","error":"{text}","fields":{{"step":"init","reason":"needs-reset"}}"#
        ),
    }
}

/// The program with that much memory.
fn limited(bytes: u64) -> Command {
    let mut command = Command::new("sh");
    command
        .args([
            "-c",
            &format!("ulimit -d {} && exec \"$0\" \"$@\"", bytes >> 10),
        ])
        .arg(program());
    command
}

fn run(bytes: u64, words: &[&str], path: &Path) -> Output {
    limited(bytes).args(words).arg(path).output().unwrap()
}

fn write(dir: &Path, text: &str) -> PathBuf {
    let path = dir.join(format!("{}.ndjson", boot_id(1)));
    crate::write(&path, text);
    path
}

#[test]
fn every_reader_reads_the_worst_boots_in_bounded_memory() {
    let dir = folder();
    for (name, size, line) in [
        ("everything", SMALL, everything as fn(usize) -> String),
        ("trees", SMALL, trees),
        ("everything", LARGE, everything),
        ("trees", LARGE, trees),
    ] {
        let path = write(&dir.0, &boot(size, line));
        let of_directory = [&["list", "--dir"][..], &["list", "--stats", "--dir"]];
        let of_file = [
            &["show", "-vv"][..],
            &["show", "--json"],
            &["show", "--by", "owner"],
            &["show", "--by", "path", "--json"],
            &["show", "--by", "gap", "--json"],
            &["show", "--html"],
            &["show", "--perfetto"],
            &["show", "--otlp"],
            &["show", "--follow", "--timeout", "1"],
        ];
        // One of the two has no milestones, which is reported and no lack of memory.
        let reported = [
            "no milestone",
            "nothing to account for",
            "nothing new for",
            "no time passes",
        ];
        let files = of_file.into_iter().map(|words| (words, path.as_path()));
        for (words, path) in of_directory
            .into_iter()
            .map(|words| (words, dir.0.as_path()))
            .chain(files)
        {
            // The large ones take an unoptimised program seconds: before one reader of each kind.
            if size == LARGE
                && ![["list", "--dir"], ["show", "--json"], ["show", "--html"]]
                    .iter()
                    .any(|large| words == large)
            {
                continue;
            }
            let Output { status, stderr, .. } = run(memory(size), words, path);
            let why = String::from_utf8_lossy(&stderr);
            let fine = matches!(status.code(), Some(0 | 1))
                || (status.code().is_some()
                    && reported.iter().any(|t| why.to_lowercase().contains(t)));
            assert!(fine, "{words:?} of {size} bytes of {name}: {status}: {why}");
        }
        if size == LARGE {
            let shown =
                String::from_utf8(run(memory(size), &["show", "--json"], &path).stdout).unwrap();
            assert!(shown.contains("\"too_large\""), "{name} is no worst boot");
        }
    }
}

/// 7 bytes of memory a byte, where each boot had room for more of it.
#[test]
fn a_log_of_a_hundred_thousand_boots_is_read_in_bounded_memory() {
    let dir = folder();
    let line = |n: usize| {
        let stamp = format!(
            "2026-11-23T11:{:02}:{:02}.{:03}Z",
            n / 60_000 % 60,
            n / 1000 % 60,
            n % 1000
        );
        let banner = format!("[    0.000000] Linux version 6.{n}");
        format!(
            "time=\"{stamp}\" level=debug msg=\"reading guest console\" sandbox=s \
            vmconsole=\"{banner}\"\n"
        )
    };
    let log: String = (0..100_000).map(line).collect();
    let path = dir.0.join("containerd.log");
    crate::write(&path, &log);
    let Output { status, stderr, .. } = run(memory(log.len()), &["show", "-o", "/dev/null"], &path);
    let why = String::from_utf8_lossy(&stderr);
    assert!(
        status.success() && why.contains("kept as /dev/null"),
        "{status}: {why}"
    );
}

#[test]
fn too_little_memory_ends_the_program() {
    let dir = folder();
    let path = write(&dir.0, &boot(100_000, everything));
    let output = run(1 << 20, &["show", "--json"], &path);
    assert!(!output.status.success(), "the limit is none");
}

#[test]
fn the_collector_counts_the_worst_boots_in_64_mib() {
    let dir = folder();
    let words = ["--metrics", "0", "--limit", "goodbye=1"];
    let mut command = Collector::add_words(limited(COLLECTOR), &dir.0, &words);
    let collector = Collector::of(&mut command);
    let address = metrics_address(&collector);
    let count = |outcome: &str| {
        value(
            &get(address, "/metrics"),
            &format!("kata_gpu_boot_boots_total{{outcome=\"{outcome}\"}}"),
        )
    };
    for (n, line) in [(1, trees as fn(usize) -> String), (2, everything)] {
        let guest = boot(SMALL, line).replace(&boot_id(1), &boot_id(n));
        let mut raw = Raw::connect(&socket(&dir.0, "v"));
        // Its third line on: the second is the collector's own.
        let (header, rest) = guest.split_once('\n').unwrap();
        raw.say(format!("{header}\n{}", rest.split_once('\n').unwrap().1));
        drop(raw);
        until("it is over and counted", || {
            count("implausible") + count("unfinished") == n as f64
        });
    }
    // The first is strange, the second has more GPUs than any machine.
    assert_eq!((count("unfinished"), count("implausible")), (1.0, 1.0));
    assert_eq!(
        value(
            &get(address, "/metrics"),
            "kata_gpu_boot_gpus_total{result=\"failed\"}"
        ),
        0.0
    );
    collector.stop();
}
