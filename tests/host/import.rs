//! A failure means that `import` misreads a log of Kata's, contradicts the stream of the same boot,
//! takes the wrong boot of several, or loses good lines behind hostile ones.

use crate::{golden, project};
use kata_gpu_report::boot::model::{Boot, Container};
use kata_gpu_report::data::agent_log;
use kata_gpu_report::data::boot_file::BootFile;
use kata_gpu_report::data::compact_record::Record;
use kata_gpu_report::data::imported_record::{mark, of_record};
use kata_gpu_report::data::text::Screen;
use kata_gpu_report::import::{BootOfLogs, Logs};
use kata_gpu_report::views::boot_page;
use kata_gpu_report::views::boot_page::{Page, Steps};
use kata_gpu_tests::import_agreement::agreement;
use kata_gpu_wire::catalogue::logged as own;
use kata_gpu_wire::names;
use std::io::Cursor;

/// A fixture: one made-up boot of a guest with NVRC and three GPUs, of which one fails, as console,
/// journal and containerd's log; and one recorded boot of our init (`two-gpus`) as stream and as
/// console.
fn bytes(name: &str) -> Vec<u8> {
    crate::bytes(project().join("tests/fixtures/import").join(name))
}

fn chosen(files: &[(&str, Vec<u8>)], nth: Option<usize>) -> anyhow::Result<BootOfLogs> {
    let mut logs = Logs::default();
    for (name, bytes) in files {
        logs.add(name, Cursor::new(bytes.clone()))?;
    }
    let made = logs.boot(nth)?;
    let damage = (made.boot.damaged, made.boot.unfinished);
    assert_eq!(damage, (0, 0), "{:?}", made.boot.damage);
    Ok(made)
}

fn imported(files: &[(&str, Vec<u8>)]) -> anyhow::Result<BootOfLogs> {
    chosen(files, None)
}

fn of_fixtures(names: &[&str]) -> BootOfLogs {
    let files: Vec<_> = names.iter().map(|name| (*name, bytes(name))).collect();
    imported(&files).unwrap()
}

/// Output of the program.
fn printed(made: &BootOfLogs, verbose: bool) -> String {
    let boot = Boot::new(&made.boot, &[]);
    let page = Page {
        steps: if verbose { Steps::All } else { Steps::Main },
        report: &made.warnings,
        ..Page::new(&made.boot, &boot)
    };
    let mut out = Vec::new();
    boot_page::write(&page, Screen::PLAIN, &mut out).unwrap();
    String::from_utf8(out).unwrap()
}

/// Number of lines that the first file's report counts as recognised.
fn recognised(made: &BootOfLogs) -> u64 {
    made.boot.imported().unwrap().files[0].recognised
}

/// The verdict of every log of the field: what happened, why, what to do.
#[test]
fn the_first_three_lines_of_each_log_of_the_field_are_the_golden_ones() {
    let folder = project().join("tests/fixtures/field");
    let names = std::fs::read_dir(&folder).unwrap();
    let mut names: Vec<String> = names
        .map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned())
        .filter(|name| name != "README.md")
        .collect();
    names.sort();
    assert!(names.len() >= 10, "{names:?}");
    let mut all = String::new();
    for name in names {
        let log = crate::bytes(folder.join(&name));
        let made = imported(&[(name.as_str(), log)]).unwrap();
        let page = printed(&made, false);
        // The id of a boot of logs is a sum of its records.
        let first: Vec<&str> = page
            .lines()
            .take(3)
            .map(|line| line.split(" (boot ").next().unwrap_or(line))
            .collect();
        all += &format!("== {name}\n{}\n", first.join("\n"));
    }
    golden("host/field-verdicts.txt", &all);
}

#[test]
fn every_kind_of_log_has_its_golden_page() {
    let cases: &[(&str, &[&str])] = &[
        ("journal", &["containerd.log"]),
        ("journald-json", &["journal.json"]),
        ("console", &["console.log"]),
        ("our-console", &["two-gpus.console"]),
        (
            "cri",
            &[
                "../agent/containerd-1.7-kata-4.1.0-cri.log",
                "../agent/containerd-1.7-kata-4.1.0-cri.ndjson",
            ],
        ),
    ];
    for (name, files) in cases {
        let file = format!("host/import-{name}.txt");
        golden(&file, &printed(&of_fixtures(files), false));
    }
    let console = of_fixtures(&["console.log"]);
    golden("host/import-console-v.txt", &printed(&console, true));
}

/// Number of times that agree, and disagreements of an imported console and the boot's stream.
fn disagreements(stream: &BootFile, console: &[u8], import: &BootFile) -> (usize, Vec<String>) {
    let all = agreement(stream, &agent_log::read(console).unwrap(), import);
    (
        all.agreed,
        all.disagreements.iter().map(ToString::to_string).collect(),
    )
}

#[test]
fn console_and_stream_agree_on_milestones_within_the_error() {
    let stream = BootFile::read(bytes("two-gpus.ndjson").as_slice()).unwrap();
    let console = bytes("two-gpus.console");
    let import = of_fixtures(&["two-gpus.console"]).boot;
    let (compared, out) = disagreements(&stream, &console, &import);
    // A console has no beginnings of steps, and this one ends before the second GPU is usable.
    let missing = [
        "agent exec: Some(2652741940) and None, error 0",
        "settled: Some(6049475390) and None, error 0",
        "0001:00:00.0 usable: Some(6047963350) and None, error 0",
    ];
    assert_eq!(out, missing);
    assert!(compared > 30, "{compared}");
}

/// The console of kata-agent 4.1.0 itself, with lines that others have torn, and the stream of the
/// same boot.
#[test]
fn an_imported_console_gives_the_same_containers_as_the_stream() {
    let name = "../agent/kata-agent-4.1.0-info";
    let (stream, console) = (
        bytes(&format!("{name}.ndjson")),
        bytes(&format!("{name}.console")),
    );
    let stream = BootFile::read(stream.as_slice()).unwrap();
    let import = of_fixtures(&[&format!("{name}.ndjson"), &format!("{name}.console")]).boot;
    let (agreed, out) = disagreements(&stream, &console, &import);
    assert!(out.is_empty() && agreed > 20, "{agreed}: {out:?}");
    let [direct, imported] = [
        Boot::new(&stream, &agent_log::read(console.as_slice()).unwrap()),
        Boot::new(&import, &[]),
    ];
    let known = |boot: &Boot| -> Vec<_> {
        let one = |c: &Container| {
            (
                c.name.clone(),
                c.devices.clone(),
                c.tries,
                c.error.clone(),
                c.pause,
                c.pending,
            )
        };
        boot.containers.iter().map(one).collect()
    };
    assert_eq!(
        (known(&direct).len(), known(&direct)),
        (10, known(&imported))
    );
    // Moved lines are found out.
    let moved = String::from_utf8(console)
        .unwrap()
        .replace("06:50:02.31", "06:50:02.91")
        .into_bytes();
    let (_, out) = disagreements(&stream, &moved, &import);
    assert!(
        out.iter().any(|what| what.starts_with("agent ready: ")),
        "{out:?}"
    );
}

#[test]
fn a_milestone_that_is_moved_is_a_disagreement() {
    let stream = BootFile::read(bytes("two-gpus.ndjson").as_slice()).unwrap();
    let console = String::from_utf8(bytes("two-gpus.console")).unwrap();
    for (from, to) in [
        ("\"3049464180\"", "\"3049464181\""),
        ("[    2.525427]", "[    3.525427]"),
        ("11:38.832833500Z", "11:39.832833500Z"),
        ("[    2.514456]", "[    2.014456]"),
    ] {
        assert!(console.contains(from), "{from}");
        let moved = console.replace(from, to).into_bytes();
        let import = imported(&[("moved", moved)]).unwrap().boot;
        let (_, out) = disagreements(&stream, console.as_bytes(), &import);
        assert!(out.len() > 2, "{from}: {out:?}");
    }
}

#[test]
fn records_from_logs_are_marked_and_a_guests_own_unchanged() {
    let made = of_fixtures(&["console.log"]).boot;
    assert!(made.records.iter().all(|r| mark(r).is_some()));
    assert_eq!(made.imported().unwrap().files[0].format, "console log");
    let header = made.header.unwrap();
    assert_eq!(header.version, "none (imported from logs)");
    assert_eq!(&header.boot_id[14..15], "8");

    let guest = BootFile::read(bytes("two-gpus.ndjson").as_slice()).unwrap();
    let both = of_fixtures(&["two-gpus.ndjson", "two-gpus.console"]).boot;
    assert_eq!(both.records[..guest.records.len()], guest.records[..]);
    let added = &both.records[guest.records.len()..];
    let known = |r: &Record| {
        of_record(r).is_some() && mark(r).is_some()
            || [own::AGENT_CDI_WAIT, own::AGENT_RPC].contains(&r.name.as_str())
    };
    assert!(!added.is_empty() && added.iter().all(known));
    assert_eq!((both.seqs.missing(), &both.header), (0, &guest.header));
    assert!(both.imported().is_some());
    assert!(
        guest.records.iter().all(|r| of_record(r).is_none()),
        "the agent's events are not taken from an unmarked record"
    );
    // A mark of an earlier version names the format of its log.
    let line = "{\"schema\":1,\"seq\":0,\"boottime_ns\":1,\"kind\":\"event\",\
        \"name\":\"agent.ready\",\"fields\":{\"import\":{\"format\":\"pod\",\"line\":7,\
        \"error_ns\":5}}}";
    let earlier = BootFile::read(format!("{line}\n").as_bytes()).unwrap();
    let mark = mark(&earlier.records[0]).unwrap();
    assert_eq!((mark.line, mark.error_ns), (7, 5));
}

#[test]
fn the_same_logs_give_the_same_boot_and_a_copy_adds_nothing() {
    let log = || bytes("containerd.log");
    let records = |files: &[(&str, Vec<u8>)]| imported(files).unwrap().boot.records;
    let once = of_fixtures(&["containerd.log"]).boot;
    assert_eq!(once.header, of_fixtures(&["containerd.log"]).boot.header);
    let same = |other: Vec<Record>| {
        let shown = |records: &[Record]| -> Vec<_> {
            let one = |r: &Record| (r.boottime_ns, r.name.clone(), r.error.clone(), r.gpu);
            records.iter().map(one).collect()
        };
        assert_eq!(shown(&other), shown(&once.records));
    };
    // Journals have each line of the shim twice; logs may overlap; a journal has the console.
    let text = String::from_utf8(log()).unwrap();
    let twice: String = text
        .lines()
        .flat_map(|line| [line, "\n", line, "\n"])
        .collect();
    same(records(&[("twice", twice.into_bytes())]));
    same(records(&[("whole", [log(), log()].concat())]));
    same(records(&[("one", log()), ("other", log())]));
    let console = of_fixtures(&["containerd.log", "console.log"]).boot.records;
    let found = console.iter().filter(|r| r.name == names::GPU_FOUND);
    assert_eq!(found.count(), 3);
    // The control: a line of another time is another record.
    let line = text
        .lines()
        .find(|line| line.contains("Container is started"));
    let more = format!("{text}{}\n", line.unwrap().replace("04:33.55", "04:34.55"));
    let more = records(&[("more", more.into_bytes())]);
    assert_eq!(more.len(), once.records.len() + 1);
}

#[test]
fn of_several_boots_the_last_that_failed_is_taken_or_the_chosen_one() {
    let two = [bytes("console.log"), bytes("two-gpus.console")].concat();
    // A GPU of the first failed.
    for (nth, gpus) in [(None, 3), (Some(1), 3), (Some(2), 2)] {
        let made = chosen(&[("two.log", two.clone())], nth).unwrap();
        assert_eq!(Boot::new(&made.boot, &[]).gpus.len(), gpus);
        let warnings = made.warnings.join("\n");
        for part in [
            "two.log holds 2 boots; this is number ",
            "  1  failed, kernel 6.12.47-nvidia-gpu",
            "  2  kernel 6.1.0-56-cloud-amd64",
        ] {
            assert!(warnings.contains(part), "{part}: {warnings}");
        }
    }
    for nth in [0, 3] {
        let error = chosen(&[("two.log", two.clone())], Some(nth)).unwrap_err();
        let error = error.to_string();
        assert!(error.contains("holds 2 boots, and no boot"), "{error}");
    }
    let error = chosen(&[("one.log", bytes("console.log"))], Some(2)).unwrap_err();
    assert!(error.to_string().contains("there is no boot 2"), "{error}");
}

#[test]
fn the_sandbox_that_a_boots_file_names_is_taken_of_several() {
    let name = "../agent/containerd-1.7-kata-4.1.0-cri";
    let log = String::from_utf8(bytes(&format!("{name}.log"))).unwrap();
    let id = "2f0296ffaee7fcefbd63eaa3b5bfea43c4b6b91eb9a1a828b5f3ccb5ebd2b513";
    let other = log
        .replace(id, &id.replace('2', "3"))
        .replace("train-0", "other");
    let both = format!("{log}{other}").into_bytes();
    let file = bytes(&format!("{name}.ndjson"));
    let ready = |files: &[(&str, Vec<u8>)]| -> Vec<String> {
        let records = imported(files).unwrap().boot.records;
        let ready = records.iter().filter(|r| r.name == own::SANDBOX_READY);
        let pod = |r: &Record| r.fields.get("pod").unwrap().shown().to_string();
        ready.map(pod).collect()
    };
    assert_eq!(ready(&[("log", both.clone()), ("file", file)]), ["train-0"]);
    assert_eq!(ready(&[("log", both)]), ["other"]);
}

fn junk(length: u32) -> Vec<u8> {
    (0..length)
        .map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8)
        .collect()
}

#[test]
fn hostile_logs_cost_their_own_lines_and_reach_no_terminal() {
    let long = [vec![b'x'; 2_000_000], b"\n".to_vec()].concat();
    let evil = concat!(
        "\x1b[2J\x1b]0;title\x07[    9.000000] NVRM: \x1b[31mred\x1b[0m \u{202e}\u{9b}31m\n",
        "[99999999999999.000000] NVRM: later than all\n[18446744073709551615.999999] NVRM: x\n",
        "{\"msg\":\"announce\",\"ts\":\"9999-12-31T23:59:59Z\",\"name\":\"kata-agent\"}\n",
        "{\"msg\":\"announce\",\"ts\":\"1971-01-01T00:00:00Z\",\"name\":\"kata-agent\",\
         \"agent-version\":\"\\u001b[2J\\u202e\"}\n",
        "{\"boottime_ns\":\"99999999999999999\",\"msg\":\"gpu.bound\",\
         \"name\":\"kata-gpu-init\"}\n",
        "[    1.000000] nvidia ffffffff:ff:1f.7: enabling device (\n",
    );
    for name in ["console.log", "containerd.log", "two-gpus.ndjson"] {
        let whole = bytes(name);
        let parts = [
            whole.as_slice(),
            b"\n",
            &long,
            &junk(50_000),
            b"\n",
            evil.as_bytes(),
            &whole,
        ];
        let made = imported(&[("\u{1b}[2J", parts.concat())]);
        let made = made.unwrap_or_else(|e| panic!("{name}: {e:#}"));
        crate::assert_printable(&printed(&made, true));
        // Good lines behind the bad ones are read.
        let whole = imported(&[("whole", whole)]).unwrap();
        assert!(recognised(&made) > recognised(&whole), "{name}");
    }
}

#[test]
fn every_cut_of_every_kind_is_read_or_refused_in_three_lines() {
    for name in [
        "console.log",
        "containerd.log",
        "journal.json",
        "two-gpus.ndjson",
    ] {
        let whole = bytes(name);
        let mut imports = 0;
        for end in (0..whole.len()).step_by(whole.len() / 23) {
            match imported(&[(name, whole[..end].to_vec())]) {
                Ok(_) => imports += 1,
                Err(e) => assert_eq!(
                    format!("{e:#}").lines().count(),
                    3,
                    "{name} at {end}: {e:#}"
                ),
            }
        }
        assert!(imports > 10, "{name}: {imports}");
    }
}

#[test]
fn junk_is_refused_with_the_command_that_gives_a_log() {
    let error = imported(&[("junk", junk(200_000))]).unwrap_err();
    let error = format!("{error:#}");
    assert!(error.contains("journalctl -u containerd"), "{error}");
    assert_eq!(error.lines().count(), 3, "{error}");
    crate::assert_printable(&error);
}
