//! `src/host/README.md` says what others can do to a node and names a test for each: they are there.

use std::collections::BTreeSet;
use std::path::Path;

fn sources(dir: &Path, text: &mut String) {
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, text);
        } else if path.extension().is_some_and(|e| e == "rs") {
            text.push_str(&std::fs::read_to_string(&path).unwrap());
        }
    }
}

/// The tests that stand in the last column of the tables.
fn named(readme: &str) -> BTreeSet<&str> {
    let cells = readme.lines().filter_map(|line| line.strip_prefix('|')?.strip_suffix('|')?.rsplit('|').next());
    cells.flat_map(|cell| cell.split('`').skip(1).step_by(2)).collect()
}

#[test]
fn every_test_that_the_table_of_threats_names_is_there() {
    let project = crate::project();
    let readme = std::fs::read_to_string(project.join("src/host/README.md")).unwrap();
    let mut text = String::new();
    ["src/host", "tests/host", "tests/vm"].iter().for_each(|dir| sources(&project.join(dir), &mut text));
    let named = named(&readme);
    assert!(named.len() > 20, "{named:?}");
    let is_there = |name: &str| text.contains(&format!("fn {name}()"));
    let missing: Vec<_> = named.into_iter().filter(|name| !is_there(name)).collect();
    assert!(missing.is_empty(), "no such test: {missing:?}");
    // Negative control.
    assert!(!is_there(&["a_test", "of_no_file"].join("_")));
}
