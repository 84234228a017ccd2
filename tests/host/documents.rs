//! A failure means that a link of a page leads nowhere, that a parameter stands in no page or with
//! other values, or that the front page begins with anything but its purpose and its installation.

use crate::{files, project};
use kata_gpu_init::config::parameter_table::{
    PARAMETERS, Parameter, parameters_markdown, weakening_markdown,
};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// Lines of the front page's first two screens: they show what this is, and how to install it.
const FIRST_SCREENS: usize = 80;

fn read(page: &str) -> String {
    crate::text(project().join(page))
}

/// The part of a page with this table, by the line that both begin with, if it is another.
fn differs(page: &str, table: &str) -> Option<(std::ops::Range<usize>, String)> {
    let (text, head) = (read(page), table.lines().next().unwrap());
    let start = text
        .find(head)
        .unwrap_or_else(|| panic!("{page} has no table {head}"));
    let end = text[start..]
        .find("\n\n")
        .map_or(text.len(), |length| start + length + 1);
    (text[start..end] != *table).then_some((start..end, text))
}

/// Fails unless a page has this table, in the place of the one that begins with the same line;
/// UPDATE_GOLDEN=1 writes it.
#[track_caller]
pub fn has_table(page: &str, table: &str) {
    let Some((place, mut text)) = differs(page, table) else {
        return;
    };
    if std::env::var_os("UPDATE_GOLDEN").is_some_and(|v| v == "1") {
        text.replace_range(place, table);
        return crate::write(project().join(page), text);
    }
    assert_eq!(
        &text[place], table,
        "{page}: UPDATE_GOLDEN=1 writes the table"
    );
}

#[test]
fn the_front_page_begins_with_how_to_install_and_has_true_parameters() {
    let page = read("README.md");
    let after_install = page.lines().position(|line| line == "## Read a boot");
    assert!(
        after_install.is_some_and(|line| line <= FIRST_SCREENS),
        "README.md: what this is and how to install it takes more than {FIRST_SCREENS} lines"
    );
    let rows = page.lines().filter(|line| line.starts_with("| `gpuinit."));
    let row = |p: &Parameter| format!("| `{}` | {} | {} |", p.name, p.values, p.default);
    let all: Vec<String> = PARAMETERS.iter().map(row).collect();
    let wrong: Vec<&str> = rows
        .clone()
        .filter(|r| !all.iter().any(|of| of == r))
        .collect();
    assert!(
        wrong.is_empty(),
        "README.md: not as in the table of parameters: {wrong:?}"
    );
    assert_eq!(
        rows.count(),
        10,
        "README.md has the ten that are set most often"
    );
}

#[test]
fn the_parameters_pages_have_every_parameter() {
    has_table("src/README.md", &parameters_markdown());
    has_table("src/README.md", &weakening_markdown());
    // Negative control.
    let other = parameters_markdown().replacen("auto", "never", 1);
    assert!(differs("src/README.md", &other).is_some());
}

/// Code words of a line of a table.
fn code_words(line: &str) -> impl Iterator<Item = &str> {
    line.split('`').skip(1).step_by(2)
}

#[test]
fn what_a_contributor_is_told_to_change_is_there() {
    let page = read(".github/CONTRIBUTING.md");
    let sources: String = ["src", "tests"]
        .into_iter()
        .flat_map(files)
        .map(|path| String::from_utf8_lossy(&crate::bytes(path)).into_owned())
        .collect();
    let missing = |line: &str| {
        let columns: Vec<&str> = line.split(" | ").collect();
        let [file, change, test] = columns[..] else {
            panic!("{line}")
        };
        let Some((_, path)) = file.split_once("](../") else {
            return vec![];
        };
        let text = read(path.trim_end_matches(')'));
        let word = code_words(change).next().into_iter();
        let gone = word.filter(|word| !text.contains(word)).map(str::to_string);
        let test = code_words(test).next().into_iter();
        let unknown = test.filter(|name| {
            let (function, of_vm) = (format!("fn {name}("), format!("name: \"{name}\""));
            !sources.contains(&function) && !sources.contains(&of_vm)
        });
        gone.chain(unknown.map(str::to_string)).collect()
    };
    let steps: Vec<&str> = page
        .lines()
        .filter(|line| line.starts_with("| ["))
        .collect();
    assert!(steps.len() > 12, "{steps:?}");
    for line in steps {
        assert_eq!(missing(line), Vec::<String>::new(), "{line}");
    }
    // Negative control.
    let line =
        "| [a](../src/init/config/values.rs) | a row of `NONE_SUCH` | `no_such_test_at_all` |";
    assert_eq!(missing(line), ["NONE_SUCH", "no_such_test_at_all"]);
}

#[test]
fn a_forge_runs_what_anybody_runs() {
    let steps = read(".github/workflows/ci.yml");
    let run: Vec<&str> = steps.lines().filter(|line| line.contains("run:")).collect();
    assert!(run.len() == 1 && run[0].ends_with("&& .ci/run"), "{run:?}");
}

/// Every page, from the project's folder.
fn pages() -> Vec<String> {
    let mut pages = files("");
    pages.retain(|path| path.extension().is_some_and(|extension| extension == "md"));
    assert!(pages.len() > 8, "{pages:?}");
    let of_project = |path: &PathBuf| path.strip_prefix(project()).unwrap().display().to_string();
    pages.iter().map(of_project).collect()
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
pub fn anchors(text: &str) -> BTreeSet<String> {
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
