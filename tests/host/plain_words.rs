//! A failure means that a comment hides its subject behind a pronoun or is wider than 100 columns.

use crate::{files, project};
use std::path::Path;

/// Words that hide the subject of a sentence that begins with them.
const RIDDLES: [&str; 6] = ["It", "Of", "They", "What", "Where", "Who"];
/// Longest line of a comment that stands alone, in characters; rows of tables may be longer.
const COLUMNS: usize = 100;

/// Language of a file, as far as comments go; None: without comments, or of somebody else's format.
fn markers(path: &Path, text: &str) -> Option<&'static [&'static str]> {
    let extension = path.extension().unwrap_or_default().to_str()?;
    if ["tests/fixtures", "tests/golden", "tests/fuzz/seeds"]
        .iter()
        .any(|foreign| path.starts_with(foreign))
    {
        return None;
    }
    match extension {
        "rs" | "js" => Some(&["//"]),
        "c" | "h" => Some(&["/*", "*"]),
        "toml" | "in" => Some(&["#"]),
        _ => {
            let ours = ["initrd", "rootfs-builder"]
                .iter()
                .any(|dir| path.starts_with(dir));
            let name = path.file_stem().unwrap_or_default();
            (text.starts_with("#!") || ours && extension.is_empty() || name == "Dockerfile")
                .then_some(&["#"])
        }
    }
}

/// Lines of comments with a fault.
fn faults(text: &str, markers: &[&str]) -> Vec<String> {
    let mut found = Vec::new();
    let mut continues = false;
    for line in text.lines() {
        let comment = markers
            .iter()
            .find_map(|marker| line.trim_start().strip_prefix(marker));
        let Some(comment) = comment.filter(|_| !line.starts_with("#!")) else {
            continues = false;
            continue;
        };
        let comment = comment.trim_start_matches(['/', '!', '*']);
        let words = comment.trim_start();
        let riddle = !continues
            && words
                .split(' ')
                .next()
                .is_some_and(|first| RIDDLES.contains(&first));
        // Rows of tables and commands keep their length.
        let example = (2..10).contains(&(comment.len() - words.len()));
        let long = line.chars().count() > COLUMNS && !words.starts_with('|') && !example;
        found.extend((riddle || long).then(|| line.to_string()));
        continues = !words.is_empty();
    }
    found
}

#[test]
fn a_comment_names_its_subject_within_100_columns() {
    let mut all = Vec::new();
    let mut looked_at = 0;
    let alone = ["Cargo.toml", "Dockerfile.initrd"].map(|name| project().join(name));
    for path in ["src", "tests", "initrd", "rootfs-builder"]
        .into_iter()
        .flat_map(files)
        .chain(alone)
    {
        let Ok(text) = std::fs::read_to_string(&path) else {
            continue;
        };
        let path = path.strip_prefix(project()).unwrap();
        let Some(markers) = markers(path, &text) else {
            continue;
        };
        looked_at += 1;
        all.extend(
            faults(&text, markers)
                .iter()
                .map(|line| format!("{}: {line}", path.display())),
        );
    }
    assert!(looked_at > 350, "{looked_at} files");
    assert!(all.is_empty(), "{all:#?}");
    // Negative controls.
    let what = "What a line is.";
    let long = "x".repeat(COLUMNS);
    let rust = format!("/// {what}\nfn f() {{}}\n    // A line.\n    // {what}\n//\n// {what}");
    for (text, markers, found) in [
        (rust, &["//"][..], 2),
        (format!("// {long}\n//! | {long} |"), &["//"], 1),
        (format!("#!/bin/sh\n# {what}\n\n    # {what}\n"), &["#"], 2),
        (
            format!("/* {what} */\nint i;\n/*\n * {what}\n"),
            &["/*", "*"],
            2,
        ),
    ] {
        assert_eq!(faults(&text, markers).len(), found, "{text}");
    }
}
