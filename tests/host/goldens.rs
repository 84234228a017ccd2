//! A failure means that output which scripts and other programs read has changed, that two forms of
//! one boot disagree on its critical path, or that a hostile stream gets out as it is.

use crate::collect::program;
use crate::{TempDir, golden, project, stdout};
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

const BOOTS: [&str; 5] = [
    "recorded-8-gpus-fast-host",
    "recorded-8-gpus-slow-host",
    "made-8-gpus-one-failed",
    "made-8-gpus-one-hangs",
    "hostile",
];

/// Name of the golden file, and the words before the boot.
const FORMS: &[(&str, &[&str])] = &[
    ("show.txt", &["show"]),
    ("show.json", &["show", "--json"]),
    ("owner.json", &["show", "--by", "owner", "--json"]),
    ("path.json", &["show", "--by", "path", "--json"]),
    ("gap.json", &["show", "--by", "gap", "--json"]),
    ("otlp.json", &["show", "--otlp"]),
    ("html.json", &["show", "--html"]),
];

/// The forms of a boot that are golden files: two boots have all, the others what is special about
/// them. Pages of all five are golden files of src/host/account; a boot with a failed GPU is one in
/// each export of src/host/export; the tests below hold every form of every boot against its
/// critical path.
fn golden_forms(boot: &str) -> Vec<&'static str> {
    match boot {
        // Stalls of a slow host, and steps that never end.
        "recorded-8-gpus-slow-host" | "made-8-gpus-one-hangs" => {
            FORMS.iter().map(|(form, _)| *form).collect()
        }
        // A path through initialisations in place of the lane, and nothing unexplained.
        "recorded-8-gpus-fast-host" => vec!["path.json", "gap.json"],
        // A GPU with a reason.
        "made-8-gpus-one-failed" => vec!["show.txt", "path.json", "html.json"],
        // Names that are markup, control characters and separators, in each kind of quoting.
        "hostile" => vec!["show.txt", "show.json", "html.json"],
        other => panic!("{other} has no golden forms"),
    }
}

fn fixture(boot: &str) -> PathBuf {
    project().join(format!("tests/fixtures/boots/{boot}.ndjson"))
}

/// Runs it as on any machine.
fn run(words: &[&str], files: &[&Path]) -> Output {
    let mut command = Command::new(program());
    command
        .args(words)
        .args(files)
        .env_remove("OTEL_RESOURCE_ATTRIBUTES");
    command.output().unwrap()
}

fn printed(words: &[&str], file: &Path) -> String {
    let output = run(words, &[file]);
    // 1: something failed in the boot.
    assert!(
        matches!(output.status.code(), Some(0 | 1)),
        "{words:?} {}: {output:?}",
        file.display()
    );
    stdout(&output)
}

/// The data of a page: what it draws. Its words and its code are the page's own.
fn page_data(page: &str) -> &str {
    let (_, from) = page.split_once("id=\"boot\">").expect("the page has data");
    from.split_once("</script>").expect("its data has an end").0
}

/// The same for every version, and with a line for each step, so that a person can read a
/// difference.
fn readable(form: &str, text: &str) -> String {
    let text = if form == "html.json" {
        page_data(text)
    } else {
        text
    };
    let begins: &[&str] = match form {
        "otlp.json" => &["{\"attributes\":[{\"key\":\"boot.owner\""],
        "html.json" => &[
            "{\"after\":",
            "{\"approx\":",
            "{\"begin\":",
            "{\"address\":",
            "{\"gpu\":",
            "{\"at\":",
            "\"milestones\":",
        ],
        _ => &[],
    };
    let mut text = text.replace(env!("CARGO_PKG_VERSION"), "VERSION");
    for begin in begins {
        text = text.replace(begin, &format!("\n{begin}"));
    }
    if text.ends_with('\n') {
        text
    } else {
        text + "\n"
    }
}

fn forms(file: &Path) -> Vec<(&'static str, String)> {
    FORMS
        .iter()
        .map(|(form, words)| (*form, readable(form, &printed(words, file))))
        .collect()
}

/// The only form that a boot without any clock cannot have: its times are those of a wall clock.
fn needs_a_clock(boot: &str, form: &str) -> bool {
    boot == "hostile" && form == "otlp.json"
}

#[test]
fn the_forms_of_each_boot_are_the_golden_ones() {
    for boot in BOOTS {
        let forms = golden_forms(boot);
        for (form, words) in FORMS.iter().filter(|(form, _)| forms.contains(form)) {
            golden(
                &format!("boots/{boot}/{form}"),
                &readable(form, &printed(words, &fixture(boot))),
            );
        }
        // A file that no form writes is compared with nothing.
        let mut forms = golden_forms(boot);
        forms.sort_unstable();
        let folder = project().join("tests/golden/boots").join(boot);
        assert_eq!(crate::names(folder), forms, "{boot}");
    }
}

#[test]
fn a_step_that_takes_a_millisecond_longer_is_seen_in_every_form() {
    let boot = fixture("recorded-8-gpus-slow-host");
    let mut longer = false;
    let mut out = String::new();
    for line in crate::text(&boot).lines() {
        let mut record: serde_json::Value = serde_json::from_str(line).unwrap();
        // From the end of the first initialisation on.
        longer |= record["kind"] == "end" && record["name"] == "gpu.init";
        if let Some(at) = record["boottime_ns"]
            .as_u64()
            .filter(|_| longer && record["seq"].is_u64())
        {
            record["boottime_ns"] = (at + 1_000_000).into();
        }
        out += &format!("{record}\n");
    }
    let dir = TempDir::new("goldens-longer");
    let file = dir.0.join("boot.ndjson");
    crate::write(&file, out);
    fs::copy(boot.with_extension("console"), dir.0.join("boot.console")).unwrap();
    for ((form, is), (_, was)) in forms(&file).into_iter().zip(forms(&boot)) {
        assert_ne!(is, was, "{form}");
    }
}

#[test]
fn two_boots_compared_and_all_boots_together_are_golden() {
    let [fast, slow] = ["recorded-8-gpus-fast-host", "recorded-8-gpus-slow-host"].map(fixture);
    for (form, words) in [
        ("compare-fast-with-slow.txt", &["compare"][..]),
        ("compare-fast-with-slow.json", &["compare", "--json"]),
    ] {
        let output = run(words, &[&fast, &slow]);
        assert_eq!(
            output.status.code(),
            Some(1),
            "a slower boot is exit status 1: {output:?}"
        );
        golden(&format!("boots/{form}"), &stdout(&output));
    }
    assert_eq!(run(&["compare"], &[&slow, &fast]).status.code(), Some(0));
    let dir = TempDir::new("goldens-stats");
    // A directory's boots are named by their ids.
    for boot in BOOTS {
        let text = crate::text(fixture(boot));
        let id = &text.split_once("\"boot_id\":\"").unwrap().1[..36];
        for extension in ["ndjson", "console"] {
            let to = dir.0.join(format!("{id}.{extension}"));
            fs::copy(fixture(boot).with_extension(extension), to).unwrap();
        }
    }

    let output = run(&["list", "--stats", "--json", "--dir"], &[&dir.0]);
    assert!(output.status.success(), "{output:?}");
    golden("boots/stats.json", &stdout(&output));
}

/// Steps of the path, as `name` and number of the GPU.
fn reported(file: &Path) -> BTreeSet<(String, Option<u64>)> {
    let path: serde_json::Value =
        serde_json::from_str(&printed(&["show", "--by", "path", "--json"], file)).unwrap();
    let pieces = path["account"]["path"].as_array().unwrap().iter();
    pieces
        .filter_map(|piece| Some((piece["step"].as_str()?.to_string(), piece["gpu"].as_u64())))
        .collect()
}

#[test]
fn every_form_marks_the_path_that_critical_path_has() {
    for boot in BOOTS {
        let file = fixture(boot);
        let reported = reported(&file);
        let data: serde_json::Value =
            serde_json::from_str(page_data(&printed(&["show", "--html"], &file))).unwrap();
        let name = |step: &serde_json::Value| {
            let gpu = step["gpu"]
                .as_u64()
                .and_then(|gpu| data["gpus"][gpu as usize]["index"].as_u64());
            (step["label"].as_str().unwrap().to_string(), gpu)
        };
        let steps = data["steps"].as_array().unwrap();
        let marked: BTreeSet<_> = steps
            .iter()
            .filter(|step| step["critical"] == true)
            .map(name)
            .collect();
        let pieces: BTreeSet<_> = data["path"]
            .as_array()
            .unwrap()
            .iter()
            .filter_map(|p| Some(name(&steps[p["step"].as_u64()? as usize])))
            .collect();
        assert_eq!((&marked, &pieces), (&reported, &reported), "{boot}");
        // The path, with the gaps between steps, is as long as the window.
        let sum: u64 = data["path"]
            .as_array()
            .unwrap()
            .iter()
            .map(|p| p["took"].as_u64().unwrap())
            .sum();
        let path: serde_json::Value =
            serde_json::from_str(&printed(&["show", "--by", "path", "--json"], &file)).unwrap();
        assert_eq!(Some(sum), path["account"]["wall_ns"].as_u64(), "{boot}");
        assert!(
            boot == "hostile" || reported.len() > 8,
            "{boot}: {reported:?}"
        );
    }
}

#[test]
fn nothing_of_the_hostile_stream_gets_out_as_it_is() {
    for (form, words) in FORMS {
        let output = run(words, &[&fixture("hostile")]);
        assert_eq!(
            matches!(output.status.code(), Some(0 | 1)),
            !needs_a_clock("hostile", form),
            "{form}: {output:?}"
        );
        let text = String::from_utf8([output.stdout, output.stderr].concat()).unwrap();
        let bad = text.chars().find(|c| {
            c.is_control() && !"\r\n".contains(*c) || ['\u{202e}', '\u{9b}', '\u{2028}'].contains(c)
        });
        assert_eq!(bad, None, "{form}");
        let markup = *form == "html.json";
        assert!(
            !markup || !text.contains("<img") && !text.contains("<script>pwn"),
            "{form}"
        );
    }
}
