//! The catalogue of failures against the sources and its page: each row of a GPU is reached, no
//! other text repeats a row, and the page has the rows with the fixtures that show them.

use crate::collect::program;
use crate::documents::has_table;
use crate::layers::source::{self, Kind, Source};
use crate::{TempDir, project, stdout};
use kata_gpu_wire::failure::reason::Subject;
use kata_gpu_wire::failure::{Reason, xid};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::process::Command;

/// Folder of the catalogue.
const CATALOGUE: &str = "src/wire/failure/";
/// Fixtures below tests/fixtures, each with a row that it shows. A row without one is in the
/// catalogue by the source or the report that its comment names.
const SHOWN: &[(&str, Reason)] = &[
    ("boots/made-8-gpus-one-failed.ndjson", Reason::FirmwareBoot),
    ("boots/made-16-gpus.ndjson", Reason::NeedsReset),
    ("import/console.log", Reason::FirmwareBoot),
    ("import/containerd.log", Reason::FirmwareBoot),
    ("import/journal.json", Reason::FirmwareBoot),
    ("field/bounce-buffer.dmesg", Reason::NoBounceBuffer),
    ("field/ctr.txt", Reason::AgentNoAnswer),
    ("field/dma-limit.journal", Reason::DmaLimit),
    ("field/failed-then-healthy.journal", Reason::NeedsReset),
    ("field/host-cdi.describe.txt", Reason::HostCdiUnknown),
    ("field/iommufd.journal", Reason::VfioGroup),
    ("field/no-gpu.journal", Reason::NoGpu),
    ("field/no-huge-pages.journal", Reason::VmmOutOfMemory),
    ("field/no-module.console", Reason::DriverMissing),
    ("field/no-network.describe.txt", Reason::NoNetwork),
    ("field/no-port.describe.txt", Reason::NoPort),
    ("field/no-runtime.describe.txt", Reason::NoRuntime),
    ("field/nvrc-panic-old.console", Reason::NvrcPanic),
    ("field/nvrc-panic.console", Reason::NvrcPanic),
    (
        "field/other-kernels-module.console",
        Reason::DriverLoadFailed,
    ),
    ("field/cc-no-crypto.console", Reason::CcNoCrypto),
    ("field/cc-on-plain.console", Reason::CcModeOn),
    ("field/cc-on-plain.console", Reason::CtkFailed),
    ("field/cc-on-plain.console", Reason::NvrcPanic),
    ("field/cc-on-plain.console", Reason::PoweredOff),
    (
        "field/crio-guest-out-of-memory.journal",
        Reason::OutOfMemory,
    ),
    ("field/fsp-timeout.dmesg-T", Reason::FspTimeout),
    ("field/hotplug-no-space-6.18.console", Reason::BarUnassigned),
    ("field/hotplug-no-space.console", Reason::BarUnassigned),
    ("field/failed-gpu.describe.txt", Reason::FirmwareBoot),
    ("field/journal-k.export.txt", Reason::FirmwareBoot),
    ("field/journal-k.txt", Reason::FirmwareBoot),
    ("field/journal-k.verbose.txt", Reason::FirmwareBoot),
    ("field/legacy-595.console", Reason::LegacyBranch),
    ("field/open-no-gsp.console", Reason::NeedsProprietary),
    ("field/open-no-gsp.dmesg", Reason::NeedsProprietary),
    ("field/open-refused.monotonic.txt", Reason::OpenRefused),
    ("field/vsock-timeout.journal", Reason::AgentNoAnswer),
    ("field/vsock-timeout.journal", Reason::NoGpu),
    ("field/vsock-timeout.kubelet.journal", Reason::AgentNoAnswer),
];

#[test]
fn the_page_of_the_catalogue_has_its_rows_and_their_fixtures() {
    let mut table = String::from(
        "| reason | what happened | whose | cure | sure | shown by |\n|---|---|---|---|---|---|\n",
    );
    for reason in Reason::ALL {
        let shown = SHOWN.iter().filter(|(_, shown)| *shown == reason);
        let shown: Vec<String> = shown.map(|(file, _)| format!("`{file}`")).collect();
        writeln!(
            table,
            "| `{reason}` | {} | {} | {} | {} | {} |",
            reason.what(),
            reason.whose(),
            reason.cure().replace('<', "&lt;"),
            reason.sure(),
            if shown.is_empty() {
                "by source".into()
            } else {
                shown.join(", ")
            }
        )
        .unwrap();
    }
    has_table("src/wire/failure/README.md", &table);
}

#[test]
fn each_fixture_shows_its_row() {
    // A guest's records name the row; what a log shows is the reader's answer.
    let shown = |file: &str, reason: Reason| {
        let path = project().join("tests/fixtures").join(file);
        let text = if file.ends_with(".ndjson") {
            crate::text(path)
        } else {
            let output = Command::new(program()).arg("show").arg(path).output();
            stdout(&output.unwrap())
        };
        text.contains(reason.name())
    };
    for (file, reason) in SHOWN {
        assert!(shown(file, *reason), "{file} does not show {reason}");
    }
    // Negative control.
    assert!(!shown(SHOWN[0].0, Reason::NeedsReset));
}

/// Every form of `show`, and `list`, of every failed GPU: somebody reads only one of them.
#[test]
fn the_cure_of_a_failed_gpu_is_in_every_view() {
    let forms: &[&[&str]] = &[
        &[],
        &["--by", "owner"],
        &["--by", "path"],
        &["--by", "gap"],
        &["-vv"],
        &["--json"],
        &["--html"],
    ];
    let run = |args: &[&str]| {
        let output = Command::new(program()).args(args).output().unwrap();
        stdout(&output).replace("&#39;", "'")
    };
    for (file, reason) in [
        ("boots/made-8-gpus-one-failed.ndjson", Reason::FirmwareBoot),
        ("boots/made-16-gpus.ndjson", Reason::NeedsReset),
        ("field/cc-on-plain.console", Reason::CcModeOn),
        ("field/journal-k.txt", Reason::FirmwareBoot),
    ] {
        let path = project().join("tests/fixtures").join(file);
        let path = path.to_str().unwrap();
        for form in forms {
            let view = run(&[&["show", path], *form].concat());
            assert!(view.contains(reason.cure()), "{file} {form:?}:\n{view}");
        }
        // `list` reads boots; one of logs is kept as such.
        let dir = TempDir::new("failures-list");
        let kept = dir.0.join("0f7a1f8e-0000-4000-8000-000000000001.ndjson");
        run(&["show", path, "-o", kept.to_str().unwrap()]);
        let list = run(&["list", "--dir", dir.0.to_str().unwrap()]);
        assert!(list.contains(reason.cure()), "{file}:\n{list}");
    }
}

/// Words of a text, without case and punctuation; a literal over several lines is one text.
fn words(text: &str) -> Vec<String> {
    text.replace("\\\n", " ")
        .split(|c: char| !c.is_ascii_alphanumeric() && !"_-<>".contains(c))
        .filter(|word| !word.is_empty())
        .map(str::to_lowercase)
        .collect()
}

/// Words in a row that two texts have only if one was copied from the other.
const COPIED: usize = 7;

/// Runs of words of all cures.
fn runs() -> BTreeSet<Vec<String>> {
    let numbers = 0..1000;
    let cures = Reason::ALL
        .iter()
        .map(|reason| reason.cure())
        .chain(numbers.filter_map(|n| Some(xid::meaning(n)?.cure)));
    let mut runs = BTreeSet::new();
    for cure in cures {
        let words = words(cure);
        let length = words.len().min(COPIED);
        runs.extend(words.windows(length).map(<[String]>::to_vec));
    }
    runs
}

/// Literals that have words of a cure, with their places.
fn copies(sources: &[Source], runs: &BTreeSet<Vec<String>>) -> Vec<String> {
    let mut copies = Vec::new();
    for source in sources.iter().filter(|s| !s.file.starts_with(CATALOGUE)) {
        for (text, line) in source.texts() {
            let words = words(text);
            let is_copy = runs
                .iter()
                .any(|run| words.windows(run.len()).any(|part| part == run.as_slice()));
            if is_copy {
                copies.push(format!("{}:{line}: {text}", source.file));
            }
        }
    }
    copies
}

#[test]
fn a_cure_is_written_once() {
    let runs = runs();
    assert_eq!(copies(&source::read("src"), &runs), <[&str; 0]>::default());
    // Negative control: a rule with the row's words, over two lines.
    let rule = "const CURE: &str = \"stuck: reset it on the host before \\\n    the next guest\";";
    let other = source::of(&[("src/doctor/x.rs".into(), rule.into())]);
    assert_eq!(copies(&other, &runs).len(), 1);
    // Within the catalogue one thing has one description.
    let mut known = BTreeMap::new();
    for reason in Reason::ALL {
        let before = known.insert(reason.what(), reason);
        assert_eq!(before, None, "{reason} says the same");
    }
}

/// Ways to the rows of GPUs: words of a message, a code of RmInitAdapter, the step that failed, and
/// a place of the init that knows the reason itself.
const WAYS: &[(Reason, &[&str])] = &[
    (Reason::DriverMissing, &["init", "words"]),
    (Reason::DriverLoadFailed, &["step", "init", "words"]),
    (Reason::DriverFindsNoGpu, &["words"]),
    (Reason::DriverProbedNothing, &["words"]),
    (Reason::NoProbeSucceeded, &["words"]),
    (Reason::EnableFailed, &["words", "step"]),
    (Reason::ProbeFailed, &["step"]),
    (Reason::BarUnassigned, &["words"]),
    (Reason::BarFirewall, &["words"]),
    (Reason::OffTheBus, &["words", "step", "init"]),
    (Reason::NoInterrupt, &["words"]),
    (Reason::UnsupportedGpu, &["words"]),
    (Reason::LegacyBranch, &["words"]),
    (Reason::NeedsProprietary, &["words"]),
    (Reason::OpenRefused, &["words"]),
    (Reason::RegistersGarbled, &["words"]),
    (Reason::VgpuDriver, &["words"]),
    (Reason::NoMinor, &["init"]),
    (Reason::NoDeviceNode, &["step"]),
    (Reason::OpenFailed, &["step"]),
    (Reason::FirmwareMissing, &["words", "code"]),
    (Reason::FirmwareBoot, &["code"]),
    (Reason::FspTimeout, &["words"]),
    (Reason::NeedsReset, &["words", "code", "init"]),
    (Reason::FabricNotReady, &["code"]),
    (Reason::FabricOrMode, &["code"]),
    (Reason::CcModeOn, &["words"]),
    (Reason::CcModeOff, &["words"]),
    (Reason::CcNoCrypto, &["words"]),
    (Reason::CcRefused, &["code"]),
    (Reason::AttachFailed, &["code"]),
    (Reason::StateLoadFailed, &["code"]),
    (Reason::NoBounceBuffer, &["words"]),
    (Reason::MemoryNotMovable, &["words"]),
    (Reason::InitFailed, &["code", "step"]),
    (Reason::StepHangs, &["verdict"]),
    (Reason::Internal, &["step", "init"]),
];

/// Ways to each row, as the sources have them.
fn ways() -> BTreeMap<String, BTreeSet<&'static str>> {
    let mut ways: BTreeMap<String, BTreeSet<&str>> = BTreeMap::new();
    for source in source::read("src/wire/failure")
        .iter()
        .chain(&source::read("src/init"))
        .chain(&source::read("src/report/analysis"))
    {
        let named = match source.file.strip_prefix(CATALOGUE) {
            Some("signatures.rs") => "code",
            Some("reason.rs") => "step",
            Some(_) => continue,
            None if source.file.ends_with("/verdict.rs") => "verdict",
            None if source.file.starts_with("src/report") => continue,
            None => "init",
        };
        for at in 0..source.tokens.len() {
            let word = |at| source.word(at);
            let is_sure = |word: &str| ["Certain", "Likely", "Unsure"].contains(&word);
            if word(at + 1).is_some_and(is_sure) && source.is_sign(at + 2, '[') {
                let row = word(at).unwrap_or_default().to_string();
                ways.entry(row).or_default().insert("words");
            }
            let colons = source.tokens.get(at + 1).map(|token| &token.kind);
            if word(at) == Some("Reason") && colons == Some(&Kind::Colons) {
                let row = word(at + 2).unwrap_or_default().to_string();
                ways.entry(row).or_default().insert(named);
            }
        }
    }
    ways
}

#[test]
fn every_row_of_a_gpu_is_reached_in_the_ways_of_the_list() {
    let mut ways = ways();
    for reason in Reason::ALL {
        let found = ways.remove(&format!("{reason:?}")).unwrap_or_default();
        if reason.subject() != Subject::Gpu {
            continue;
        }
        let listed = WAYS.iter().find(|(listed, _)| *listed == reason);
        let listed: BTreeSet<&str> = listed.iter().flat_map(|(_, ways)| *ways).copied().collect();
        assert!(!found.is_empty(), "nothing leads to {reason}");
        assert_eq!(found, listed, "{reason:?}");
    }
    // Other words behind `Reason::` are its functions.
    ways.retain(|row, _| row.starts_with(char::is_uppercase));
    let others: Vec<&String> = ways.keys().filter(|row| *row != "ALL").collect();
    assert_eq!(others, <[&String; 0]>::default());
}
