//! `kata-gpu-boot import`, all formats: golden pages of the fixtures in tests/fixtures/import,
//! imports beside the stream of the same boot, and hostile logs.
//!
//! The fixtures are one made-up boot of a guest with NVRC and three GPUs, of which one fails, in
//! every format, and one recorded boot of our init (`two-gpus`) as stream and as console.

use crate::initrd::gzip;
use crate::{golden, project};
use kata_gpu_report::boot::model::{Boot, Container};
use kata_gpu_report::data::agent_log;
use kata_gpu_report::data::boot_file::BootFile;
use kata_gpu_report::data::compact_record::Record;
use kata_gpu_report::data::imported_record::{Format, mark, of_record};
use kata_gpu_report::data::text::Screen;
use kata_gpu_report::import::assemble::{import, read};
use kata_gpu_report::import::choose::Source;
use kata_gpu_report::import::import_report;
use kata_gpu_report::import::import_report::Report;
use kata_gpu_report::import::item::Skip;
use kata_gpu_report::import::log_files::Input;
use kata_gpu_report::views::boot_page;
use kata_gpu_report::views::boot_page::{Page, Steps};
use kata_gpu_tests::import_agreement::agreement;
use kata_gpu_wire::catalogue::logged as own;
use kata_gpu_wire::names;
use std::io::Cursor;

fn bytes(name: &str) -> Vec<u8> {
    std::fs::read(project().join("tests/fixtures/import").join(name)).unwrap()
}

fn source(name: &str, bytes: Vec<u8>) -> anyhow::Result<Source> {
    read(name, Input::new(name, Box::new(Cursor::new(bytes)))?, None)
}

fn imported(files: &[(&str, Vec<u8>)]) -> anyhow::Result<(Report, BootFile)> {
    let sources = files
        .iter()
        .map(|(name, bytes)| source(name, bytes.clone()))
        .collect::<anyhow::Result<Vec<_>>>()?;
    let (report, text) = import(sources, None)?;
    let file = BootFile::read(text.as_bytes())?;
    assert_eq!((file.damaged, file.unfinished), (0, 0), "{:?}", file.damage);
    Ok((report, file))
}

fn of_fixtures(names: &[&str]) -> (Report, BootFile) {
    imported(
        &names
            .iter()
            .map(|name| (*name, bytes(name)))
            .collect::<Vec<_>>(),
    )
    .unwrap()
}

/// Output of the program.
fn printed(report: &Report, file: &BootFile, verbose: bool) -> String {
    let boot = Boot::new(file, &[]);
    let page = Page {
        steps: if verbose { Steps::All } else { Steps::Main },
        ..Page::new(file, &[], &boot)
    };
    let mut out = Vec::new();
    boot_page::write(&page, Screen::PLAIN, &mut out).unwrap();
    let shown = String::from_utf8(out).unwrap();
    format!(
        "{}\n\n{}",
        import_report::lines(report, &Screen::PLAIN).join("\n"),
        shown
    )
}

#[test]
fn every_format_has_its_golden_page() {
    let cases: &[(&str, &[&str])] = &[
        ("journal", &["containerd.log"]),
        ("journald-json", &["journal.json"]),
        ("console", &["console.log"]),
        ("pod", &["pod.json"]),
        ("stream", &["two-gpus.ndjson"]),
        ("our-console", &["two-gpus.console"]),
        (
            "cri",
            &[
                "../agent/containerd-1.7-kata-4.1.0-cri.log",
                "../agent/containerd-1.7-kata-4.1.0-cri.ndjson",
            ],
        ),
        ("journal-pod", &["containerd.log", "pod.json"]),
    ];
    for (name, files) in cases {
        let (report, file) = of_fixtures(files);
        golden(
            &format!("host/import-{name}.txt"),
            &printed(&report, &file, false),
        );
    }
    let (report, file) = of_fixtures(&["console.log"]);
    golden("host/import-console-v.txt", &printed(&report, &file, true));
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
    let (_, import) = of_fixtures(&["two-gpus.console"]);
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
    let (_, import) = of_fixtures(&[&format!("{name}.ndjson"), &format!("{name}.console")]);
    let (agreed, mut out) = disagreements(&stream, &console, &import);
    // A message of the driver in several lines is one record in the stream.
    out.retain(|what| !what.starts_with("NVRM: "));
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
        let (_, import) = imported(&[("moved", moved)]).unwrap();
        let (_, out) = disagreements(&stream, console.as_bytes(), &import);
        assert!(out.len() > 2, "{from}: {out:?}");
    }
}

#[test]
fn driver_lines_are_initialisations_and_an_enabling_counts_once() {
    let (_, import) = of_fixtures(&["console.log"]);
    let boot = Boot::new(&import, &[]);
    let steps = |name: &str| {
        let steps = boot.timeline.steps.iter().filter(|step| step.name == name);
        steps
            .map(|step| (step.title(), (step.end_ns - step.begin_ns) / 1_000_000))
            .collect::<Vec<_>>()
    };
    let unknown = |ms| ("gpu.init GPU unknown".to_string(), ms);
    assert_eq!(steps("gpu.init"), [unknown(2100), unknown(6600)]);
    assert_eq!((steps("gpu.enable").len(), steps("gpu.map").len()), (3, 0));
}

#[test]
fn records_from_logs_are_marked_and_a_guests_own_unchanged() {
    let (_, alone) = of_fixtures(&["console.log"]);
    assert!(alone.records.iter().all(|r| mark(r).is_some()));
    assert_eq!(alone.imported().unwrap().files[0].format, "console");
    let header = alone.header.unwrap();
    assert_eq!(
        (header.version.as_str(), &header.boot_id[14..15]),
        ("none (imported from logs)", "8")
    );

    let guest = BootFile::read(bytes("two-gpus.ndjson").as_slice()).unwrap();
    let (_, both) = of_fixtures(&["two-gpus.ndjson", "two-gpus.console"]);
    assert_eq!(both.records[..guest.records.len()], guest.records[..]);
    let added = &both.records[guest.records.len()..];
    let known = |r: &Record| {
        of_record(r).is_some() && mark(r).is_some()
            || [own::AGENT_CDI_WAIT, own::AGENT_RPC].contains(&r.name.as_str())
    };
    assert!(!added.is_empty() && added.iter().all(known));
    assert_eq!(
        (both.seqs.missing(), both.header.as_ref()),
        (0, guest.header.as_ref())
    );
    assert!(both.imported().is_some());
    assert!(
        guest.records.iter().all(|r| of_record(r).is_none()),
        "the agent's events are not taken from an unmarked record"
    );
}

#[test]
fn the_same_logs_give_the_same_boot() {
    let once = of_fixtures(&["containerd.log", "pod.json"]);
    let again = of_fixtures(&["containerd.log", "pod.json"]);
    assert_eq!(
        (once.0.boot_id, once.1.records),
        (again.0.boot_id, again.1.records)
    );
    // A repeated fact is counted, and makes no second record.
    let (report, file) = of_fixtures(&["containerd.log", "console.log"]);
    assert!(report.files[1].count.skipped[&Skip::AlreadyThere] > 50);
    assert_eq!(
        file.records
            .iter()
            .filter(|r| r.name == names::GPU_FOUND)
            .count(),
        3
    );
}

#[test]
fn of_several_boots_one_has_to_be_chosen() {
    let two = [bytes("console.log"), bytes("two-gpus.console")].concat();
    let error = imported(&[("two.log", two.clone())])
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("two.log holds 2 boots: choose one with --boot N"),
        "{error}"
    );
    assert!(
        error.contains("  1  kernel 6.12.47-nvidia-gpu")
            && error.contains("  2  kernel 6.1.0-56-cloud-amd64"),
        "{error}"
    );
    for (n, gpus) in [(1, 3), (2, 2)] {
        let (report, text) =
            import(vec![source("two.log", two.clone()).unwrap()], Some(n)).unwrap();
        assert!(report.files[0].count.skipped[&Skip::OtherBoot] > 20);
        assert_eq!(
            Boot::new(&BootFile::read(text.as_bytes()).unwrap(), &[])
                .gpus
                .len(),
            gpus
        );
    }
    for n in [0, 3] {
        let error = import(vec![source("two.log", two.clone()).unwrap()], Some(n))
            .unwrap_err()
            .to_string();
        assert!(error.contains(&format!("has no boot {n}")), "{error}");
    }
    assert!(
        import(
            vec![source("one.log", bytes("console.log")).unwrap()],
            Some(2)
        )
        .is_err()
    );
}

#[test]
fn gzip_and_a_truncated_one_are_read() {
    let packed = gzip(&bytes("containerd.log"));
    let (report, whole) = imported(&[("containerd.log.gz", packed.clone())]).unwrap();
    assert_eq!(whole.records, of_fixtures(&["containerd.log"]).1.records);
    assert_eq!(report.files[0].count.cut, None);
    let (report, half) =
        imported(&[("containerd.log.gz", packed[..packed.len() * 2 / 3].to_vec())]).unwrap();
    assert!(half.records.len() > 5 && half.records.len() < whole.records.len());
    assert!(
        import_report::lines(&report, &Screen::PLAIN)
            .iter()
            .any(|line| line.contains("not read to its end"))
    );
}

#[test]
fn hostile_logs_cost_their_own_lines_and_reach_no_terminal() {
    let long = [vec![b'x'; 2_000_000], b"\n".to_vec()].concat();
    let evil = concat!(
        "\x1b[2J\x1b]0;title\x07[    9.000000] NVRM: \x1b[31mred\x1b[0m \u{202e}\u{9b}31m\n",
        "[99999999999999.000000] NVRM: later than all\n[18446744073709551615.999999] NVRM: x\n",
        "{\"msg\":\"announce\",\"ts\":\"9999-12-31T23:59:59Z\",\"name\":\"kata-agent\"}\n",
        "{\"msg\":\"announce\",\"ts\":\"1971-01-01T00:00:00Z\",\"name\":\"kata-agent\",\"agent-version\":\"\\u001b[2J\\u202e\"}\n",
        "{\"boottime_ns\":\"99999999999999999\",\"msg\":\"gpu.bound\",\"name\":\"kata-gpu-init\"}\n",
        "[    1.000000] nvidia ffffffff:ff:1f.7: enabling device (\n",
    );
    let junk: Vec<u8> = (0..50_000u32)
        .map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8)
        .collect();
    for name in ["console.log", "containerd.log", "two-gpus.ndjson"] {
        let whole = bytes(name);
        let hostile = [
            whole.clone(),
            b"\n".to_vec(),
            long.clone(),
            junk.clone(),
            b"\n".to_vec(),
            evil.as_bytes().to_vec(),
            whole,
        ]
        .concat();
        let mut one = source(name, hostile).unwrap_or_else(|e| panic!("{name}: {e:#}"));
        let boots = one.logs.len();
        one.name = "\u{1b}[2J".into();
        let (report, text) =
            import(vec![one], (boots > 1).then_some(1)).unwrap_or_else(|e| panic!("{name}: {e:#}"));
        let file = BootFile::read(text.as_bytes()).unwrap();
        let page = printed(&report, &file, true);
        assert!(
            page.bytes()
                .all(|b| b == b'\n' || (b' '..=b'~').contains(&b)),
            "{name}"
        );
        if name != "two-gpus.ndjson" {
            assert_eq!(report.files[0].count.skipped[&Skip::TooLong], 1, "{name}");
        }
    }
}

#[test]
fn every_cut_of_every_format_is_read_or_refused_in_one_line() {
    for name in [
        "console.log",
        "containerd.log",
        "journal.json",
        "pod.json",
        "two-gpus.ndjson",
    ] {
        let whole = bytes(name);
        let mut imports = 0;
        for end in (0..whole.len()).step_by(whole.len() / 23) {
            match source(name, whole[..end].to_vec()).and_then(|source| import(vec![source], None))
            {
                Ok((report, text)) => {
                    imports += 1;
                    assert_eq!(BootFile::read(text.as_bytes()).unwrap().damaged, 0);
                    assert_eq!(report.files.len(), 1);
                }
                Err(e) => assert!(!format!("{e:#}").contains('\n'), "{name} at {end}: {e:#}"),
            }
        }
        assert!(imports > 10 || name == "pod.json", "{name}: {imports}");
    }
}

#[test]
fn junk_is_of_no_format_and_of_any_format_gives_nothing() {
    let junk: Vec<u8> = (0..200_000u32)
        .map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8)
        .collect();
    assert!(
        source("junk", junk.clone())
            .unwrap_err()
            .to_string()
            .contains("--format")
    );
    for format in [
        Format::Journal,
        Format::Console,
        Format::Pod,
        Format::Stream,
    ] {
        let input = Input::new("junk", Box::new(Cursor::new(junk.clone()))).unwrap();
        let error = read("junk", input, Some(format))
            .map(|s| s.count)
            .unwrap_err();
        assert!(!format!("{error:#}").contains('\n'), "{error:#}");
    }
}
