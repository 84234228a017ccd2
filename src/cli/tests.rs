//! A failure means that a page of the program differs from its golden file, leaves more than one
//! per cent of a recorded boot without an owner, is cut on a terminal, or passes on what a guest
//! wrote as it is.

use super::{compare, list, show};
use clap::{Args, FromArgMatches};
use kata_gpu_report::analysis::blame::{By, blame};
use kata_gpu_report::analysis::loaded::load;
use kata_gpu_report::boot::coverage::coverage;
use kata_gpu_report::boot::intervals::length;
use kata_gpu_report::data::boot_file::{HostEvent, HostLine};
use kata_gpu_report::data::text::Screen;
use kata_gpu_report::data::trace_file::Traced;
use kata_gpu_report::import::Logs;
use kata_gpu_test_support::{TempDir, golden, temp_dir, tests_dir};
use kata_gpu_wire::catalogue::traced;
use kata_gpu_wire::record::is_boot_id;
use std::io::Cursor;
use std::path::Path;

/// All boots that tests have.
const BOOTS: [&str; 7] = [
    "recorded-8-gpus-fast-host",
    "recorded-8-gpus-slow-host",
    "recorded-8-gpus-serial",
    "made-8-gpus-one-failed",
    "made-8-gpus-one-hangs",
    "hand-made-3-gpus-one-fails",
    "hostile",
];

fn parse<T: Args + FromArgMatches>(words: &[&str]) -> T {
    let command = T::augment_args(clap::Command::new("kata-gpu-boot").no_binary_name(true));
    T::from_arg_matches(&command.try_get_matches_from(words).unwrap()).unwrap()
}

fn path(boot: &str) -> String {
    tests_dir(&format!("fixtures/boots/{boot}.ndjson"))
        .display()
        .to_string()
}

fn shown(words: &[&str], screen: &Screen) -> anyhow::Result<String> {
    show::text(&parse(words), *screen)
}

/// The page of `list --stats`, or its JSON form.
fn stats(dir: &TempDir, more: &[&str]) -> anyhow::Result<String> {
    let name = dir.path().display().to_string();
    let words = [&["--stats", "--dir", &name], more].concat();
    list::text(&parse(&words), &Screen::PLAIN)
}

fn width(columns: usize) -> Screen {
    Screen {
        width: Some(columns),
        ..Screen::PLAIN
    }
}

fn is_plain(text: &str) -> bool {
    text.bytes()
        .all(|b| b == b'\n' || (b' '..=b'~').contains(&b))
}

/// All accounts of one boot.
fn pages(boot: &str, screen: &Screen, more: &[&str]) -> String {
    pages_of(&path(boot), screen, more)
}

fn pages_of(path: &str, screen: &Screen, more: &[&str]) -> String {
    let page = |by: &str| {
        let page = shown(&[&[path, "--by", by], more].concat(), screen).unwrap();
        format!("$ kata-gpu-boot show --by {by} {}\n{page}", more.join(" "))
    };
    ["phase", "owner", "path", "gap"].map(page).join("\n")
}

/// Part of a boot that no step explains, in percent.
fn unexplained(path: &str, from: Option<&str>, to: Option<&str>) -> anyhow::Result<f64> {
    let loaded = load(Path::new(path), None)?;
    let timeline = &loaded.boot.timeline;
    let window = timeline.window(from, to)?;
    Ok(coverage(timeline, &window).unexplained_share)
}

#[test]
fn every_boots_account_is_the_golden_one() {
    for boot in BOOTS {
        golden(
            &format!("account/{boot}.txt"),
            &pages(boot, &Screen::PLAIN, &[]),
        );
    }
    golden(
        "account/recorded-8-gpus-slow-host.json",
        &pages("recorded-8-gpus-slow-host", &Screen::PLAIN, &["--json"]),
    );
    let to_container = pages(
        "recorded-8-gpus-slow-host",
        &Screen {
            width: Some(100),
            colour: true,
        },
        &["--to", "last container"],
    );
    golden(
        "account/recorded-8-gpus-slow-host.to-last-container-100-columns-colour",
        &to_container,
    );
}

#[test]
fn less_than_one_percent_of_the_recorded_boots_is_unexplained() {
    for boot in BOOTS.iter().filter(|b| b.starts_with("recorded")) {
        let share = unexplained(&path(boot), None, None).unwrap();
        assert!(share < 1.0, "{boot}: {share} %");
    }
    // Negative control: a boot with a gap.
    let share = unexplained(&path("made-8-gpus-one-hangs"), None, None).unwrap();
    assert!(share > 0.0, "{share} %");
}

/// A boot through containerd's CRI, as its log and the stream have it; `edit` changes the log.
fn of_a_cri(dir: &TempDir, edit: impl Fn(&str) -> bool) -> String {
    let fixture = |of: &str| {
        std::fs::read_to_string(tests_dir(&format!(
            "fixtures/agent/containerd-1.7-kata-4.1.0-cri.{of}"
        )))
        .unwrap()
    };
    let log: String = fixture("log")
        .lines()
        .filter(|line| edit(line))
        .map(|line| format!("{line}\n"))
        .collect();
    let mut logs = Logs::default();
    for (name, text) in [("log", log), ("ndjson", fixture("ndjson"))] {
        logs.add(name, Cursor::new(text)).unwrap();
    }
    let text = logs.boot(None).unwrap().text;
    let path = dir.path().join("boot.ndjson");
    std::fs::write(&path, text).unwrap();
    path.display().to_string()
}

#[test]
fn all_time_from_run_pod_sandbox_to_a_container_has_an_owner() {
    let dir = temp_dir();
    let (from, to) = ("RunPodSandbox", "first container started");
    let path = of_a_cri(&dir, |_| true);
    golden(
        "account/containerd-1.7-kata-4.1.0-cri.txt",
        &pages_of(&path, &Screen::PLAIN, &["--from", from, "--to", to]),
    );
    let share = || unexplained(&path, Some(from), Some(to));
    assert!(share().unwrap() < 1.0);
    // Guest time without a record is not the shim's, though the shim waits for the guest meanwhile.
    of_a_cri(&dir, |line| !line.contains("created container!"));
    assert!(share().unwrap() > 1.0);
    // Without containerd's own lines, the time of the request is unknown.
    of_a_cri(&dir, |line| {
        !["RunPodSandbox", "CreateContainer", "StartContainer"]
            .iter()
            .any(|call| line.contains(&format!("msg=\"{call} ")))
    });
    let error = share().unwrap_err().to_string();
    assert!(error.contains("this boot has none of that name"), "{error}");
}

#[test]
fn what_a_trace_saw_stands_below_its_step() {
    let dir = temp_dir();
    let boot = dir.path().join("boot.ndjson");
    std::fs::copy(path("recorded-8-gpus-slow-host"), &boot).unwrap();
    let words = [boot.to_str().unwrap()];
    let untraced = shown(&words, &Screen::PLAIN).unwrap();
    let loaded = load(&boot, None).unwrap();
    let enabling = loaded
        .boot
        .timeline
        .steps
        .iter()
        .find(|step| step.name == "gpu.enable")
        .unwrap();
    let at_ns = u64::try_from(enabling.begin_ns).unwrap() + 100_000_000;
    let mapped = Traced {
        name: traced::VMM_MAP_BAR.into(),
        began_realtime_ns: loaded.file.clock().wall_at(at_ns).unwrap().realtime_ns,
        took_ns: 1_900_000_000,
        function: Some("0000:41:00.0".parse().unwrap()),
        bytes: Some(128 << 30),
        calls: Some(64),
        pages_a_call: [(1, 2), (100_000, 62)].into(),
        tid: Some(7),
        thread: "CPU 0/KVM\u{1b}[2J".into(),
        ..Traced::default()
    };
    let events = [
        HostEvent::Recording(Box::default()),
        HostEvent::Traced(Box::new(mapped)),
    ];
    let text: String = events.map(|event| HostLine::now(event).to_line()).concat();
    std::fs::write(boot.with_extension("trace"), text).unwrap();
    let seen = shown(&words, &Screen::PLAIN).unwrap();
    let new: Vec<&str> = seen
        .lines()
        .filter(|line| !untraced.lines().any(|old| old == *line))
        .map(str::trim)
        .collect();
    let wanted = [
        "host: vmm.map-bar of 0000:41:00.0 (GPU 0) 1.900, 128 GiB, 64 calls,",
        "pages a call 1-9: 2, 100000-999999: 62, by CPU 0/KVM\\x1b[2J",
    ];
    assert_eq!(new, wanted, "{seen}");
}

#[test]
fn on_a_terminal_of_eighty_columns_no_line_of_a_table_is_cut() {
    for boot in BOOTS.iter().filter(|b| **b != "hostile") {
        let text = pages(boot, &width(80), &[]);
        assert!(!text.lines().any(|line| line.ends_with("...")), "{text}");
        // Notes may wrap.
        let long = text.lines().find(|l| {
            l.len() > 80
                && !l.starts_with("note: ")
                && !l.starts_with("the record")
                && !l.starts_with("clock: ")
                && !l.starts_with("not settled")
        });
        assert_eq!(long, None);
    }
}

#[test]
fn without_agent_lines_the_account_names_the_missing_part() {
    let path = path("recorded-8-gpus-slow-host");
    let words = [&path, "--by", "owner", "--console", "/dev/null"];
    let text = shown(&words, &Screen::PLAIN).unwrap();
    assert!(
        text.contains("note: no lines of the agent (--console)"),
        "{text}"
    );
    assert!(
        !text.contains("agent.start") && !text.contains("waiting"),
        "{text}"
    );
    assert!(
        shown(&[&path, "--to", "lunch"], &Screen::PLAIN)
            .unwrap_err()
            .to_string()
            .contains("one of kernel start")
    );
}

#[test]
fn nothing_that_a_guest_wrote_reaches_the_terminal_as_it_is() {
    for more in [&[][..], &["--json"]] {
        for screen in [Screen::PLAIN, width(80)] {
            let text = pages("hostile", &screen, more);
            assert!(is_plain(&text), "{text:?}");
        }
    }
    let text = stats(&directory(&["hostile"]), &[]).unwrap();
    assert!(is_plain(&text), "{text:?}");
}

#[test]
fn a_probe_in_a_module_load_is_the_hosts_unless_it_sleeps() {
    let text = std::fs::read_to_string(path("recorded-8-gpus-serial")).unwrap();
    for (device, name, owner) in [
        ("10de:2330", "gpu.map", "host"),
        ("10de:2901", "gpu.probe", "driver"),
    ] {
        let dir = temp_dir();
        let file = dir.path().join("boot.ndjson");
        std::fs::write(&file, text.replace("10de:2330", device)).unwrap();
        let loaded = load(&file, None).unwrap();
        let probes: Vec<_> = loaded
            .boot
            .timeline
            .steps
            .iter()
            .filter(|s| s.name == name)
            .collect();
        assert_eq!(probes.len(), 8, "{device}");
        assert!(
            probes.iter().all(|s| s.row.owner.name() == owner
                && s.took_ns() > 2_000_000_000
                && s.parent.is_some()),
            "{device}"
        );
        // The rest of the load is the time that no probe took.
        let window = loaded.boot.timeline.window(None, None).unwrap();
        let groups = blame(&loaded.boot.timeline, &window, By::Phase).groups;
        let load = groups
            .iter()
            .flat_map(|g| &g.steps)
            .find(|s| s.name == "module.load nvidia")
            .unwrap();
        assert!(load.time.sum_ns < 100_000_000, "{load:?}");
    }
}

#[test]
fn the_second_between_tries_is_the_agents_the_wait_is_not() {
    let loaded = load(Path::new(&path("recorded-8-gpus-slow-host")), None).unwrap();
    let of = |name: &str| {
        loaded
            .boot
            .timeline
            .steps
            .iter()
            .find(|s| s.name == name && s.detail == "all")
            .unwrap()
    };
    let (wait, pause, create) = (of("agent.wait"), of("agent.pause"), of("container.create"));
    let published = loaded
        .boot
        .gpus
        .iter()
        .filter_map(|g| g.published)
        .map(|p| p.at_ns as i64)
        .max()
        .unwrap();
    assert_eq!(
        (wait.end_ns, pause.begin_ns),
        (published, published),
        "until the last GPU is published it waits for that"
    );
    assert_eq!(
        (pause.end_ns, create.end_ns),
        (
            create.begin_ns,
            loaded
                .boot
                .timeline
                .milestones
                .iter()
                .find(|m| m.name == "last container")
                .unwrap()
                .at_ns
        )
    );
    assert!(wait.row.waiting && !pause.row.waiting && pause.took_ns() < 1_100_000_000);
    let publication = pause
        .after
        .iter()
        .filter_map(|(i, _)| loaded.boot.timeline.steps.get(*i))
        .find(|s| s.name == "cdi.publish")
        .unwrap();
    assert!(
        publication.end_ns <= published,
        "it had to wait for the publication that brought the last GPU"
    );
}

/// Boots as a collector leaves them: named by their ids.
fn directory(boots: &[&str]) -> TempDir {
    let dir = temp_dir();
    for boot in boots {
        let from = path(boot);
        let text = std::fs::read_to_string(&from).unwrap();
        let id = text
            .split("\"boot_id\":\"")
            .nth(1)
            .unwrap()
            .get(..36)
            .unwrap();
        assert!(is_boot_id(id), "{id}");
        std::fs::copy(&from, dir.path().join(format!("{id}.ndjson"))).unwrap();
        std::fs::copy(
            from.replace(".ndjson", ".console"),
            dir.path().join(format!("{id}.console")),
        )
        .unwrap();
    }
    dir
}

#[test]
fn the_statistics_of_all_boots_are_the_golden_ones() {
    let dir = directory(&BOOTS);
    std::fs::write(
        dir.path()
            .join("0f7a1f8e-0000-4000-8000-00000000dead.ndjson"),
        "hello\n",
    )
    .unwrap();
    std::fs::write(dir.path().join("notes.txt"), "not a boot").unwrap();
    let all = stats(&dir, &[]).unwrap();
    let name = dir.path().display().to_string();
    golden("account/stats.txt", &all.replace(&name, "DIR"));
    let json = stats(&dir, &["--json"]).unwrap();
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!(
        (json["boots"].as_u64(), json["settled"].as_u64()),
        (Some(7), Some(5))
    );
    assert_eq!(json["implausible"], 1, "the hostile guest's");
    assert!(
        json["unread"][0]
            .as_str()
            .unwrap()
            .contains("no event stream in it"),
        "{}",
        json["unread"]
    );
    let error = stats(&temp_dir(), &[]).unwrap_err();
    assert!(error.to_string().contains("no boot in"), "{error}");
    // A node on which no collector has run yet.
    let words = ["--dir", "/nonexistent/boots"];
    let listed = list::text(&parse(&words), &Screen::PLAIN).unwrap_err();
    let newest = shown(&words, &Screen::PLAIN).unwrap_err();
    for error in [listed, newest].map(|error| format!("{error:#}")) {
        assert!(
            error.contains("/nonexistent/boots: start the collector") && error.contains("--dir"),
            "{error}"
        );
    }
}

fn compared(words: &[&str]) -> (String, u8) {
    match compare::compared(&parse(words), &Screen::PLAIN) {
        Ok((text, worse)) => (text, u8::from(worse)),
        // As main does.
        Err(error) => (format!("{error:#}"), 2),
    }
}

#[test]
fn two_boots_are_compared_and_the_exit_status_is_the_result() {
    let (serial, slow) = (
        path("recorded-8-gpus-serial"),
        path("recorded-8-gpus-slow-host"),
    );
    let (text, status) = compared(&[&slow, &serial]);
    golden("account/compare-slow-host-with-serial.txt", &text);
    assert_eq!(status, 1);
    assert_eq!(compared(&[&slow, &slow]).1, 0);
    assert_eq!(
        compared(&[&slow, &serial, "--gate", "last container"]).1,
        0,
        "that one came earlier"
    );
    assert_eq!(
        compared(&[&slow, &serial, "--gate", "settled", "--threshold", "20s"]).1,
        0
    );
    let hung = compared(&[
        &path("made-8-gpus-one-failed"),
        &path("made-8-gpus-one-hangs"),
    ]);
    assert!(
        hung.1 == 1 && hung.0.contains("settled is reached by fewer boots"),
        "{}",
        hung.0
    );
    for cannot in [
        &[slow.as_str(), "/no/such"][..],
        &[&slow, &slow, "--gate", "lunch"],
    ] {
        assert_eq!(compared(cannot).1, 2, "{cannot:?}");
    }
}

/// Many boots of one kind: those of a recorded one, each a little later than the one before it.
fn runs(boot: &str, later_ns: u64) -> TempDir {
    let text = std::fs::read_to_string(path(boot)).unwrap();
    let dir = temp_dir();
    for run in 0..8u64 {
        let shift = later_ns + run * 3_000_000;
        let mut out = String::new();
        for line in text.lines() {
            let mut value: serde_json::Value = serde_json::from_str(line).unwrap();
            if let Some(at) = value["boottime_ns"]
                .as_u64()
                .filter(|at| *at > 0 && value["kind"] != "host")
            {
                value["boottime_ns"] = (at + shift).into();
            }
            if value["stream"].is_object() {
                value["stream"]["boot_id"] = format!("0f7a1f8e-0000-4000-8000-{run:012}").into();
            }
            out.push_str(&format!("{value}\n"));
        }
        std::fs::write(
            dir.path()
                .join(format!("0f7a1f8e-0000-4000-8000-{run:012}.ndjson")),
            out,
        )
        .unwrap();
    }
    dir
}

#[test]
fn sets_are_compared_with_intervals_and_one_seed_gives_one_page() {
    let (before, later) = (
        runs("recorded-8-gpus-serial", 0),
        runs("recorded-8-gpus-serial", 400_000_000),
    );
    let (a, b) = (
        before.path().display().to_string(),
        later.path().display().to_string(),
    );
    let (text, status) = compared(&["--runs", &a, &b]);
    golden("account/compare-runs.txt", &text);
    assert_eq!(status, 1);
    assert_eq!(compared(&["--runs", &a, &b]), (text.clone(), 1));
    assert_eq!(compared(&["--runs", &b, &a]).1, 0);
    assert_eq!(compared(&["--runs", &a, &a]).1, 0);
    assert_eq!(compared(&["--runs", &a, &b, "--threshold", "30%"]).1, 0);
    let json = compared(&["--runs", &a, &b, "--json"]).0;
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!(json["boots_b"], 8);
    assert!(
        json["milestones"]
            .as_array()
            .unwrap()
            .iter()
            .any(|m| m["verdict"] == "slower" && m["interval_ns"][0].as_i64() > Some(0))
    );
}

#[test]
fn a_boot_without_a_step_has_no_account_but_a_reason() {
    let dir = temp_dir();
    let file = dir.path().join("boot.ndjson");
    let header = r#"{"schema":1,"stream":{"boot_id":"0f7a1f8e-0000-4000-8000-00000000beef","version":"0.1.0","kernel":"6.1","first_seq":0}}"#;
    std::fs::write(&file, format!("{header}\n")).unwrap();
    let name = file.display().to_string();
    for by in ["phase", "owner", "path", "gap"] {
        let page = shown(&[&name, "--by", by], &Screen::PLAIN).unwrap();
        assert!(page.contains("fewer than two milestones"), "{page}");
        let error = shown(&[&name, "--by", by, "--to", "settled"], &Screen::PLAIN).unwrap_err();
        assert!(error.to_string().contains("no milestone"), "{error}");
    }
    assert_eq!(length(3, 3), 0);
}
