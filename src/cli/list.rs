//! `kata-gpu-boot list`: the boots of a directory, the newest first, each with its VM, time and
//! outcome.
//!
//! Only as many files are read as lines are shown, so that a directory of 100 000 boots answers as
//! fast as one of twenty. With a filter, files are read until enough have passed it.

mod stats;

use super::boots::{BootDir, json, not_read};
use anyhow::Result;
use kata_gpu_report::analysis::loaded::{Loaded, load};
use kata_gpu_report::analysis::metrics::metrics;
use kata_gpu_report::analysis::verdict::Verdict;
use kata_gpu_report::boot::model::SETTLED;
use kata_gpu_report::data::boot_dir::dated;
use kata_gpu_report::data::boot_file::Sandbox;
use kata_gpu_report::data::text::{Ink, Screen, printable, printable_start, wall_clock, wrap};
use kata_gpu_report::terminal::progress_line::Progress;
use kata_gpu_report::views::grid::{Grid, Set, time};
use kata_gpu_report::views::verdict_lines;
use serde::Serialize;
use std::cmp::Reverse;
use std::collections::BTreeSet;
use std::path::PathBuf;

/// Characters of a boot id that are shown; more where two boots of the list would look alike.
const SHORT_ID: usize = 8;
/// Characters of a whole boot id.
const WHOLE_ID: usize = 36;
/// Longest name of a pod that is shown, in bytes; the end is kept: pods of one set differ there.
const MAX_POD: usize = 48;

/// List boots with VM and outcome, the newest first.
#[derive(clap::Args, Debug)]
#[command(after_help = include_str!("list/help.txt"))]
pub struct Args {
    #[command(flatten)]
    dir: BootDir,
    /// Show medians, percentiles and failures of all boots instead.
    #[arg(long, conflicts_with_all = ["last", "pod", "failed"])]
    stats: bool,
    /// Number of boots to show; 0: all.
    #[arg(long, value_name = "N", default_value_t = 20)]
    last: usize,
    /// Show only boots with this text in namespace/pod or in the sandbox's id.
    #[arg(long, value_name = "TEXT")]
    pod: Option<String>,
    /// Show only boots in which something failed or has not ended.
    #[arg(long)]
    failed: bool,
    /// Print one JSON object; times in ns since kernel start.
    #[arg(long)]
    json: bool,
}

/// A line of the list.
#[derive(Clone, Debug, Serialize)]
struct Entry {
    file: PathBuf,
    #[serde(skip_serializing_if = "Option::is_none")]
    boot_id: Option<String>,
    /// Host CLOCK_REALTIME at the kernel's start.
    #[serde(skip_serializing_if = "Option::is_none")]
    started_realtime_ns: Option<i64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pod: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    sandbox: Option<String>,
    gpus: usize,
    usable_gpus: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    last_container_ns: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    settled_ns: Option<u64>,
    /// Failures, as `--stats` counts them.
    failures: Vec<String>,
    verdict: Verdict,
}

#[derive(Serialize)]
struct Listed<'a> {
    boots: &'a [Entry],
    unread: &'a [String],
}

/// The page, or its JSON form.
pub fn text(args: &Args, screen: &Screen) -> Result<String> {
    if args.stats {
        return stats::text(&args.dir.dir, args.json, screen);
    }
    let paths = dated(&args.dir.dir)?;
    let (mut listed, mut unread) = (Vec::new(), Vec::new());
    let mut progress = Progress::start();
    for (at, path) in paths.iter().enumerate() {
        if args.last > 0 && listed.len() >= args.last {
            break;
        }
        progress.show(|| progress_text(args, at, paths.len(), listed.len()));
        match load(path, None) {
            Ok(loaded) => {
                listed.extend(Some(entry(path.clone(), &loaded)).filter(|entry| args.takes(entry)))
            }
            Err(error) => unread.push(printable(&format!("{error:#}"))),
        }
    }
    // By what the first column says; a boot without a known start comes last.
    listed.sort_by_key(|entry| Reverse(entry.started_realtime_ns));
    if args.json {
        json(&Listed {
            boots: &listed,
            unread: &unread,
        })
    } else {
        Ok(page(&listed, &unread, screen))
    }
}

/// Progress of a list that reads many boots, and what makes it end earlier.
fn progress_text(args: &Args, read: usize, all: usize, found: usize) -> String {
    let hint = match args.last {
        0 => "--last N ends with N".to_string(),
        1 => "ends with the first of that kind".to_string(),
        last => format!("{found} of that kind, ends with {last}: --last N for fewer"),
    };
    format!("read {read} of {all} boots ({hint})")
}

impl Args {
    fn takes(&self, entry: &Entry) -> bool {
        let named = |wanted: &String| {
            [&entry.pod, &entry.sandbox]
                .into_iter()
                .flatten()
                .any(|name| name.contains(wanted.as_str()))
        };
        (!self.failed || !entry.failures.is_empty()) && self.pod.as_ref().is_none_or(named)
    }
}

fn entry(file: PathBuf, loaded: &Loaded) -> Entry {
    let Loaded { file: read, boot } = loaded;
    let sandbox = boot.sandbox.as_ref();
    Entry {
        file,
        boot_id: boot.boot_id.clone(),
        started_realtime_ns: boot
            .milestones
            .first()
            .and_then(|m| Some(m.wall?.realtime_ns)),
        pod: sandbox.and_then(Sandbox::pod_name),
        sandbox: sandbox.map(|s| s.id.clone()),
        gpus: boot.gpus.len(),
        usable_gpus: boot.usable_gpus(),
        last_container_ns: boot.milestone("last container"),
        settled_ns: boot.milestone(SETTLED),
        failures: metrics(boot, read).failures,
        verdict: Verdict::of(boot),
    }
}

/// Start to the second: the line has no more room; --json has all digits.
fn started(realtime_ns: i64) -> String {
    let whole = wall_clock(realtime_ns);
    whole
        .split_once('.')
        .map_or(whole.clone(), |(seconds, _)| seconds.replace('T', " "))
}

fn page(listed: &[Entry], unread: &[String], screen: &Screen) -> String {
    let right = Set::Right;
    let columns = [
        ("STARTED (UTC)", Set::Left),
        ("BOOT", Set::Left),
        ("POD", Set::Left),
        ("GPUS", right),
        ("CONTAINER", right),
        ("SETTLED", right),
    ];
    let mut grid = Grid::new(&columns);
    let seconds = |ns: Option<u64>| {
        ns.map_or("-".to_string(), |ns| {
            time(i64::try_from(ns).unwrap_or(i64::MAX))
        })
    };
    // The file is named after its boot id.
    let id = |entry: &Entry| {
        entry
            .file
            .file_stem()
            .map(|id| id.to_string_lossy().into_owned())
            .unwrap_or_default()
    };
    let start = |id: &str, length: usize| id.chars().take(length).collect::<String>();
    let apart = |length: &usize| {
        listed
            .iter()
            .map(|entry| start(&id(entry), *length))
            .collect::<BTreeSet<_>>()
            .len()
            == listed.len()
    };
    let length = (SHORT_ID..WHOLE_ID).find(apart).unwrap_or(WHOLE_ID);
    for entry in listed {
        let ink = if entry.failures.is_empty() {
            Ink::Plain
        } else {
            Ink::Error
        };
        let sandbox = || {
            entry
                .sandbox
                .as_ref()
                .map(|id| printable(&start(id, SHORT_ID)))
        };
        let pod = entry
            .pod
            .as_ref()
            .map(|pod| printable_start(&pod, MAX_POD))
            .or_else(sandbox);
        grid.row(
            ink,
            vec![
                entry.started_realtime_ns.map_or("?".to_string(), started),
                start(&id(entry), length),
                pod.unwrap_or("-".to_string()),
                format!("{}/{}", entry.usable_gpus, entry.gpus),
                seconds(entry.last_container_ns),
                seconds(entry.settled_ns),
            ],
        );
    }
    let mut lines = grid.lines(screen).into_iter();
    let mut out: Vec<String> = lines.next().into_iter().collect();
    for (line, entry) in lines.zip(listed) {
        out.push(line);
        out.extend(failure_lines(entry, screen));
    }
    if listed.is_empty() {
        out = vec!["no boot of that kind".to_string()];
    }
    not_read(unread, screen, &mut out);
    out.join("\n") + "\n"
}

/// Lines below a boot's, never cut: the first failure, its cure, and the number of others.
fn failure_lines(entry: &Entry, screen: &Screen) -> Vec<String> {
    let mut failures = entry.verdict.failures();
    let Some(first) = failures.next() else {
        let other = entry.failures.first().map(|other| printable(other));
        let other = other
            .iter()
            .flat_map(|other| indented(Ink::Error, other, screen));
        return other.collect();
    };
    let mut out = indented(Ink::Error, &first.text, screen);
    let cure = verdict_lines::cure_text(first);
    out.extend(
        cure.iter()
            .flat_map(|cure| indented(Ink::Plain, cure, screen)),
    );
    let more = failures.count();
    let id = entry.boot_id.as_deref().unwrap_or_default();
    let id: String = id.chars().take(SHORT_ID).collect();
    let more = (more > 0).then(|| format!("and {more} more: kata-gpu-boot show {id}"));
    out.extend(
        more.iter()
            .flat_map(|more| indented(Ink::Dim, more, screen)),
    );
    out
}

fn indented(ink: Ink, text: &str, screen: &Screen) -> Vec<String> {
    let lines = wrap("    ", "      ", text, screen.width.unwrap_or(usize::MAX));
    lines.iter().map(|line| screen.paint(ink, line)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use kata_gpu_report::data::boot_dir::find;
    use kata_gpu_test_support::{TempDir, temp_dir, tests_dir};
    use std::time::{Duration, SystemTime};

    const FAST: &str = "recorded-8-gpus-fast-host";
    const FAILED: &str = "made-8-gpus-one-failed";

    /// Boots with fixed ids, the first the newest; the second is a pod's.
    fn directory() -> TempDir {
        let dir = temp_dir();
        for (n, boot) in [FAST, FAILED, FAST].into_iter().enumerate() {
            let path = dir
                .path()
                .join(format!("0f7a1f8e-0000-4000-8000-00000000000{n}.ndjson"));
            let mut text =
                std::fs::read_to_string(tests_dir(&format!("fixtures/boots/{boot}.ndjson")))
                    .unwrap();
            if n == 1 {
                text += r#"{"schema":1,"kind":"host","realtime_ns":1,"event":"sandbox","id":"5a5b","pod":"train\u001b[2J","namespace":"ml"}"#;
                text += "\n";
            }
            std::fs::write(&path, text).unwrap();
            let file = std::fs::File::options().append(true).open(&path).unwrap();
            file.set_modified(SystemTime::now() - Duration::from_secs(60 * n as u64))
                .unwrap();
        }
        std::fs::write(
            dir.path()
                .join("0f7a1f8e-0000-4000-8000-000000000009.ndjson"),
            "garbage\n",
        )
        .unwrap();
        dir
    }

    #[test]
    fn a_list_that_reads_many_boots_says_how_to_read_fewer() {
        let args = |last| Args {
            dir: BootDir { dir: "".into() },
            stats: false,
            last,
            pod: None,
            failed: true,
            json: false,
        };
        let texts = [0, 1, 20].map(|last| progress_text(&args(last), 5000, 100_000, 3));
        let read = "read 5000 of 100000 boots";
        assert_eq!(
            texts,
            [
                format!("{read} (--last N ends with N)"),
                format!("{read} (ends with the first of that kind)"),
                format!("{read} (3 of that kind, ends with 20: --last N for fewer)"),
            ]
        );
    }

    fn listed(dir: &TempDir, last: usize, pod: Option<&str>, failed: bool) -> (Vec<String>, usize) {
        let args = |json| Args {
            dir: BootDir {
                dir: dir.path().into(),
            },
            stats: false,
            last,
            pod: pod.map(String::from),
            failed,
            json,
        };
        let json: serde_json::Value =
            serde_json::from_str(&text(&args(true), &Screen::PLAIN).unwrap()).unwrap();
        let text = text(&args(false), &Screen::PLAIN).unwrap();
        let lines = text
            .lines()
            .filter(|l| !l.starts_with("note: "))
            .skip(1)
            .map(String::from)
            .collect();
        (lines, json["boots"].as_array().unwrap().len())
    }

    #[test]
    fn the_newest_come_first_and_failures_are_named() {
        let dir = directory();
        let (lines, count) = listed(&dir, 0, None, false);
        assert_eq!((lines.len(), count), (5, 3), "{lines:?}");
        let [failed, failure, cure, settled, _] = lines.as_slice() else {
            panic!("{lines:?}")
        };
        assert!(
            failed.contains("  ml/train\\x1b[2J  ") && failed.contains("7/8"),
            "{lines:?}"
        );
        assert!(
            failure.starts_with("    GPU 5 (") && failure.ends_with("(firmware-boot)"),
            "{lines:?}"
        );
        assert!(cure.starts_with("    cure: reset the GPU"), "{lines:?}");
        assert!(
            settled.starts_with("2026-11-21 03:17:57  ")
                && settled.contains("8/8")
                && settled.ends_with("8.264"),
            "{lines:?}"
        );
        assert_eq!(
            listed(&dir, 2, None, false).1,
            2,
            "what is not one of ours is said, and costs no line"
        );
    }

    #[test]
    fn a_pods_boots_and_failed_ones_are_found_among_others() {
        let dir = directory();
        for (pod, failed, count) in [
            (Some("ml/train"), false, 1),
            (Some("5a5b"), false, 1),
            (None, true, 1),
            (Some("other"), false, 0),
            (Some("ml"), true, 1),
        ] {
            assert_eq!(listed(&dir, 1, pod, failed).1, count, "{pod:?} {failed}");
        }
    }

    #[test]
    fn every_line_can_be_given_to_show() {
        let dir = directory();
        let (lines, _) = listed(&dir, 0, None, false);
        for line in lines.iter().filter(|line| !line.starts_with(' ')) {
            find(line.split_whitespace().nth(2), dir.path()).unwrap();
        }
        let (lines, _) = listed(&dir, 0, None, true);
        let id = lines[0].split_whitespace().nth(2).unwrap();
        let others = find(Some(id), dir.path()).unwrap_err().to_string();
        assert!(
            others.contains(&format!("start with {id}")),
            "in its own list it is as short as usual: {others}"
        );
        for n in [0, 2, 9] {
            std::fs::remove_file(
                dir.path()
                    .join(format!("0f7a1f8e-0000-4000-8000-00000000000{n}.ndjson")),
            )
            .unwrap();
        }
        assert!(
            find(Some(id), dir.path())
                .unwrap()
                .ends_with("0f7a1f8e-0000-4000-8000-000000000001.ndjson")
        );
    }
}
