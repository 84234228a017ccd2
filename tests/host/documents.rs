//! A failure means that a link of a page leads nowhere, that a parameter is not on the front page,
//! or that this page has grown too long to be read in five minutes.

use crate::{files, project};
use kata_gpu_init::config::parameter_table::{PARAMETERS, parameters_markdown, weakening_markdown};
use std::collections::BTreeSet;
use std::fmt::Write;
use std::path::{Path, PathBuf};

/// Longest front page, in bytes: what is read in five minutes.
const FRONT_PAGE_BYTES: usize = 12_000;

fn read(page: &str) -> String {
    crate::text(project().join(page))
}

/// Fails unless a page has this table, in the place of the one that begins with the same line;
/// UPDATE_GOLDEN=1 writes it.
#[track_caller]
pub fn has_table(page: &str, table: &str) {
    let (text, head) = (read(page), table.lines().next().unwrap());
    let start = text
        .find(head)
        .unwrap_or_else(|| panic!("{page} has no table {head}"));
    let end = text[start..]
        .find("\n\n")
        .map_or(text.len(), |length| start + length + 1);
    if text[start..end] != *table && std::env::var_os("UPDATE_GOLDEN").is_some_and(|v| v == "1") {
        let fresh = format!("{}{table}{}", &text[..start], &text[end..]);
        return crate::write(project().join(page), fresh);
    }
    assert_eq!(
        &text[start..end],
        table,
        "{page}: UPDATE_GOLDEN=1 writes the table"
    );
}

#[test]
fn the_front_page_is_short_and_has_every_parameter() {
    let bytes = read("README.md").len();
    assert!(
        bytes <= FRONT_PAGE_BYTES,
        "README.md has {bytes} bytes of {FRONT_PAGE_BYTES}"
    );
    let mut table = String::from("| parameter | values | default |\n|---|---|---|\n");
    for p in PARAMETERS {
        writeln!(table, "| `{}` | {} | {} |", p.name, p.values, p.default).unwrap();
    }
    has_table("README.md", &table);
    has_table("src/README.md", &parameters_markdown());
    has_table("src/README.md", &weakening_markdown());
    // Negative control.
    let other = table.replacen("auto", "never", 1);
    assert!(std::panic::catch_unwind(|| has_table("README.md", &other)).is_err());
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
