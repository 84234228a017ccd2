//! Checks of the pages: links lead somewhere, tables are what the code prints,
//! tests that are named exist, and the front page is short.

use crate::{files, project};
use kata_gpu_init::config::parameter_table::{PARAMETERS, parameters_markdown};
use std::collections::BTreeSet;
use std::fmt::Write;
use std::path::{Path, PathBuf};

/// Longest front page, in bytes: what is read in five minutes.
const FRONT_PAGE_BYTES: usize = 12_000;

fn read(page: &str) -> String {
    std::fs::read_to_string(project().join(page)).unwrap_or_else(|e| panic!("{page}: {e}"))
}

/// Every page, from the project's folder.
fn pages() -> Vec<String> {
    let of_project = |path: &Path| {
        path.strip_prefix(project())
            .unwrap()
            .to_str()
            .unwrap()
            .to_string()
    };
    let is_page = |path: &&PathBuf| path.extension().is_some_and(|extension| extension == "md");
    let pages: Vec<String> = files("")
        .iter()
        .filter(is_page)
        .map(|path| of_project(path))
        .collect();
    assert!(pages.len() > 8, "{pages:?}");
    pages
}

/// A page's lines outside of its examples.
fn prose(text: &str) -> impl Iterator<Item = &str> {
    let mut example = false;
    text.lines().filter(move |line| {
        let fence = line.starts_with("```");
        example ^= fence;
        !example && !fence
    })
}

/// The anchors of a page's headings, as GitHub makes them.
fn anchors(text: &str) -> BTreeSet<String> {
    let headings = prose(text).filter(|line| line.starts_with('#'));
    let anchor = |heading: &str| {
        let kept = heading.trim_start_matches('#').trim().to_lowercase();
        kept.chars()
            .filter(|c| c.is_alphanumeric() || " -_".contains(*c))
            .map(|c| if c == ' ' { '-' } else { c })
            .collect()
    };
    headings.map(anchor).collect()
}

/// The links of a page that lead nowhere.
fn dead_links(page: &str, text: &str) -> Vec<String> {
    let folder = Path::new(page).parent().unwrap();
    let targets = prose(text).flat_map(|line| {
        line.split("](")
            .skip(1)
            .filter_map(|rest| rest.split_once(')'))
            .map(|(target, _)| target)
    });
    let dead = |target: &&str| {
        let (file, anchor) = target.split_once('#').unwrap_or((target, ""));
        let file: PathBuf = if file.is_empty() {
            project().join(page)
        } else {
            project().join(folder).join(file)
        };
        let there = file.exists()
            && (anchor.is_empty()
                || std::fs::read_to_string(file).is_ok_and(|text| anchors(&text).contains(anchor)));
        !target.starts_with("http") && !there
    };
    targets.filter(dead).map(str::to_string).collect()
}

#[test]
fn every_link_of_every_page_leads_somewhere() {
    for page in pages() {
        let dead = dead_links(&page, &read(&page));
        assert!(dead.is_empty(), "{page}: {dead:?}");
    }
    // Negative control.
    let wrong = "[a](src/nothing.rs) [b](README.md#nowhere) [c](README.md#parameters)";
    assert_eq!(
        dead_links("README.md", wrong),
        ["src/nothing.rs", "README.md#nowhere"]
    );
}

/// The tests that stand in the last column of a page's tables.
fn named_tests(page: &str) -> BTreeSet<&str> {
    let cells = page.lines().filter_map(|line| {
        line.strip_prefix('|')?
            .strip_suffix('|')?
            .rsplit('|')
            .next()
    });
    cells
        .flat_map(|cell| cell.split('`').skip(1).step_by(2))
        .filter(|name| name.contains('_'))
        .collect()
}

#[test]
fn every_test_that_a_promise_or_a_threat_names_is_there() {
    let mut text = String::new();
    for folder in ["src", "tests/host", "tests/vm"] {
        files(folder)
            .iter()
            .for_each(|path| text.push_str(&std::fs::read_to_string(path).unwrap_or_default()));
    }
    // Tests under Kata have their runtime's name before their own.
    let named = |name: &str| text.contains(&format!("\"{name}\""));
    let is_there = |name: &str| {
        text.contains(&format!("fn {name}()"))
            || named(name)
            || named(name.trim_start_matches("under_kata_"))
    };
    for (page, at_least) in [("README.md", 12), ("src/cli/README.md", 20)] {
        let page_text = read(page);
        let tests = named_tests(&page_text);
        assert!(tests.len() > at_least, "{page}: {tests:?}");
        let missing: Vec<_> = tests.into_iter().filter(|name| !is_there(name)).collect();
        assert!(missing.is_empty(), "{page}: no such test: {missing:?}");
    }
    // Negative control.
    assert!(!is_there(&["a_test", "of_no_file"].join("_")));
}

#[test]
fn the_front_page_is_short_and_has_every_parameter() {
    let page = read("README.md");
    assert!(
        page.len() <= FRONT_PAGE_BYTES,
        "README.md has {} bytes, the budget is {FRONT_PAGE_BYTES}",
        page.len()
    );
    let mut table = String::from("| parameter | values | default |\n|---|---|---|\n");
    for p in PARAMETERS {
        writeln!(table, "| `{}` | {} | {} |", p.name, p.values, p.default).unwrap();
    }
    assert!(
        page.contains(&table),
        "README.md's table of parameters is not:\n{table}"
    );
    let table = parameters_markdown();
    assert!(
        read("src/README.md").contains(&table),
        "src/README.md's table of parameters is not what `kata-gpu-init parameters` \
         prints:\n{table}"
    );
}

/// Words in the first column of a table of a file's `//!`, without their arguments, in order.
fn documented_words(source: &str) -> Vec<&str> {
    let rows = source
        .lines()
        .filter_map(|line| line.strip_prefix("//! | `")?.split(" |").next());
    rows.flat_map(|cell| cell.split('`').step_by(2))
        .filter_map(|word| word.split(':').next())
        .collect()
}

/// Words that the arms of a file's `match` take, in order: `"a" => ..`, `"a" | "b" => ..`.
fn matched_words(source: &str) -> Vec<&str> {
    let arms = source
        .lines()
        .filter(|line| line.starts_with("        \"") || line.starts_with("        | \""))
        .filter(|line| line.contains(" =>") || line.ends_with('"'))
        .filter_map(|line| line.split(" =>").next());
    arms.flat_map(|arm| arm.split('"').skip(1).step_by(2))
        .collect()
}

#[test]
fn each_word_of_a_guests_script_is_documented_once() {
    let source = read("tests/guest/halves/script.rs");
    let (mut documented, mut matched) = (documented_words(&source), matched_words(&source));
    documented.sort_unstable();
    matched.sort_unstable();
    assert!(matched.len() > 30, "{matched:?}");
    assert_eq!(documented, matched);
    // Negative control.
    assert_eq!(
        (
            documented_words("//! | `a:K`, `b` | c |"),
            matched_words("        \"a\" | \"b\" => c(\"d\"),")
        ),
        (vec!["a", "b"], vec!["a", "b"])
    );
    assert_ne!(documented_words("//! | `a` | c |\n//! | `a` | d |"), ["a"]);
}

#[test]
fn every_script_the_readme_names_is_there() {
    let pages = read("README.md") + &read("tests/README.md") + &read("initrd/README.md");
    for script in [
        "initrd/demo",
        "tests/run",
        "tests/bench/run",
        "initrd/setup",
        "initrd/pack",
    ] {
        assert!(pages.contains(script), "no page names {script}");
        let meta =
            std::fs::metadata(project().join(script)).unwrap_or_else(|e| panic!("{script}: {e}"));
        assert!(
            std::os::unix::fs::PermissionsExt::mode(&meta.permissions()) & 0o111 != 0,
            "{script} is not executable"
        );
    }
}
