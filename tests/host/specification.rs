//! A failure means that a promise of src/SPECIFICATION.md has no test and no reason, that a bound
//! there is not the code's, or that a run of everything passes without a named test's result.

use crate::documents::has_table;
use crate::{TempDir, files, project};
use kata_gpu_collect::limits::Limits;
use kata_gpu_init::boot::bring_up::deadlines::TABLE;
use std::collections::BTreeSet;
use std::fmt::Write;
use std::fs;
use std::process::Command;

fn read(page: &str) -> String {
    fs::read_to_string(project().join(page)).unwrap_or_else(|e| panic!("{page}: {e}"))
}

/// Cells of the rows of a page's tables, without heads.
fn rows(page: &str) -> Vec<Vec<&str>> {
    page.lines()
        .filter_map(|line| line.strip_prefix("| ")?.strip_suffix(" |"))
        .map(|line| line.split(" | ").collect::<Vec<_>>())
        .filter(|cells| !cells[0].is_empty() && !cells[0].starts_with('|'))
        .collect()
}

/// Rows with a number: guarantees, and what others can do.
fn numbered(page: &str) -> Vec<Vec<&str>> {
    rows(page)
        .into_iter()
        .filter(|cells| cells[0].bytes().all(|b| b.is_ascii_digit() || b == b'.'))
        .collect()
}

/// Faults of the numbered rows.
fn wrong_rows(page: &str, readme: &str, sources: &str) -> Vec<String> {
    let mut wrong = Vec::new();
    let rows = numbered(page);
    let ids: Vec<&str> = rows.iter().map(|cells| cells[0]).collect();
    let unique: BTreeSet<&str> = ids.iter().copied().collect();
    if unique.len() != ids.len() {
        wrong.push("a number stands twice".to_string());
    }
    for cells in numbered(readme) {
        match rows.iter().find(|row| row[0] == cells[0]) {
            None => wrong.push(format!("promise {} is not specified", cells[0])),
            Some(row) if row[1] != cells[1] => wrong.push(format!(
                "promise {}: {:?} is {:?} in README.md",
                cells[0], row[1], cells[1]
            )),
            Some(row) if !row[2].contains(cells[2].trim_matches('`')) => wrong.push(format!(
                "promise {}: README.md names {}",
                cells[0], cells[2]
            )),
            Some(_) => {}
        }
    }
    for row in &rows {
        let last = row.last().unwrap();
        let names: Vec<&str> = last.split('`').skip(1).step_by(2).collect();
        if names.is_empty() && !last.starts_with("not tested: ") {
            wrong.push(format!(
                "{} has neither a test nor the reason why not",
                row[0]
            ));
        }
        wrong.extend(
            names
                .iter()
                .filter(|name| !is_there(sources, name))
                .map(|name| format!("{}: no such test: {name}", row[0])),
        );
    }
    wrong
}

/// Whether the sources have a test of this name.
fn is_there(sources: &str, name: &str) -> bool {
    match name.strip_prefix("fuzz_") {
        Some(target) => {
            let path = format!("tests/fuzz/targets/{target}.rs");
            project().join(path).exists()
        }
        // Tests under Kata have their runtime's name before their own; scripts only theirs.
        None => {
            let own = name.trim_start_matches("under_kata_");
            sources.contains(&format!("fn {name}()"))
                || sources.contains(&format!("\"{own}\""))
                || sources.contains(&format!("name={name}\n"))
        }
    }
}

/// Rows of bounds that the code does not have.
fn wrong_bounds(page: &str) -> Vec<String> {
    let bounds: Vec<_> = rows(page)
        .into_iter()
        .filter(|cells| cells[0].starts_with('B') && cells.len() == 4)
        .collect();
    assert!(bounds.len() >= 20, "{bounds:?}");
    let is_wrong = |cells: &&Vec<&str>| {
        let (file, constant) = cells[3]
            .split_once(' ')
            .unwrap_or_else(|| panic!("{cells:?}"));
        let text = read(file);
        let declared = text
            .lines()
            .filter(|line| line.contains(&format!("const {constant}: ")));
        !declared
            .into_iter()
            .any(|line| line.ends_with(&format!(" = {};", cells[2])))
    };
    bounds
        .iter()
        .filter(is_wrong)
        .map(|cells| cells.join(" | "))
        .collect()
}

/// The waits of the bring-up, as the page has them.
fn waits() -> String {
    let mut table = String::from("| wait | ms | why |\n|---|---|---|\n");
    for row in TABLE {
        writeln!(
            table,
            "| {:?} | {} | {} |",
            row.limit,
            row.after.as_millis(),
            row.reason.trim()
        )
        .unwrap();
    }
    table
}

#[test]
fn each_guarantee_has_a_number_and_its_tests_or_a_reason() {
    let (page, readme) = (read("src/SPECIFICATION.md"), read("README.md"));
    let promises = readme
        .split("## What it promises")
        .nth(1)
        .unwrap()
        .split("\n## ")
        .next()
        .unwrap();
    let mut sources = String::new();
    for path in ["src", "tests"]
        .into_iter()
        .flat_map(files)
        .filter(|path| path.extension().is_none_or(|e| e == "rs"))
    {
        sources.push_str(&fs::read_to_string(path).unwrap_or_default());
    }
    assert!(numbered(promises).len() >= 14 && numbered(&page).len() > 45);
    assert_eq!(wrong_rows(&page, promises, &sources), Vec::<String>::new());
    // The threats to the host's program.
    let threats = read("src/cli/README.md");
    let mut named = 0;
    for line in threats.lines().filter_map(|line| line.strip_suffix(" |")) {
        let last = line.rsplit(" | ").next().unwrap();
        for name in last
            .split('`')
            .skip(1)
            .step_by(2)
            .filter(|name| name.contains('_'))
        {
            assert!(
                is_there(&sources, name),
                "src/cli/README.md: no such test: {name}"
            );
            named += 1;
        }
    }
    assert!(named > 20, "{named} tests are named");
    // Negative control.
    let no_test = ["a_test", "of_no_file"].join("_");
    let wrong = page
        .replacen("| 2.1 |", "| 3 |", 1)
        .replacen("| 5 | A GPU", "| 5 | No GPU", 1)
        .replacen(
            "`names_follow_pci",
            &format!("`{no_test}`, `names_follow_pci"),
            1,
        )
        + "| 99 | All is well |  |\n";
    let found = wrong_rows(&wrong, promises, &sources);
    for part in ["stands twice", "promise 5: ", &no_test, "99 has neither"] {
        assert!(
            found.iter().any(|line| line.contains(part)),
            "{part}: {found:#?}"
        );
    }
}

#[test]
fn every_bound_is_the_codes() {
    let page = read("src/SPECIFICATION.md");
    assert_eq!(wrong_bounds(&page), Vec::<String>::new());
    has_table("src/SPECIFICATION.md", &waits());
    assert!(
        page.contains(&Limits::help()),
        "src/SPECIFICATION.md has other limits of the collector than:\n{}",
        Limits::help()
    );
    // Negative control.
    assert_eq!(
        wrong_bounds(&page.replacen("| 1024 * 1024 |", "| 1024 * 1025 |", 1)).len(),
        1
    );
}

#[test]
fn a_named_test_without_a_result_fails_a_run_of_everything() {
    let dir = TempDir::new("specification-results");
    let results = dir.0.join("results");
    let page = project().join("src/SPECIFICATION.md");
    let named: BTreeSet<String> = {
        let text = read("src/SPECIFICATION.md");
        let cells = numbered(&text)
            .into_iter()
            .map(|row| row.last().unwrap().to_string())
            .collect::<Vec<_>>();
        cells
            .iter()
            .flat_map(|cell| cell.split('`').skip(1).step_by(2).map(str::to_string))
            .collect()
    };
    let others = dir.0.join("others");
    crate::write(&others, "some::module::fuzz_vpd: test\nanother: test\n");
    let run = |left_out: Option<&str>| {
        let mut text = String::new();
        for (at, name) in named
            .iter()
            .filter(|name| Some(name.as_str()) != left_out)
            .enumerate()
        {
            let result = ["ok", "FAILED", "ignored, not root"][at % 3];
            writeln!(text, "test some::module::{name} ... {result}").unwrap();
        }
        crate::write(&results, text);
        let output = Command::new(project().join("tests/not_run"))
            .args([&results, &page, &others])
            .output()
            .unwrap();
        let errors = String::from_utf8(output.stderr.clone()).unwrap();
        (output.status.code(), crate::stdout(&output), errors)
    };
    let page = page.display();
    let count = named.len();
    let all = format!("{page} names {count} tests of this run\n");
    assert_eq!(run(None), (Some(0), all, String::new()));
    let one_less = format!("{page} names {} tests of this run", count - 1);
    for name in ["fuzz_kmsg", "the_init_is_small"] {
        let wanted = (Some(1), format!("{one_less}\n"), format!("{name}\n"));
        assert_eq!(run(Some(name)), wanted);
    }
    let in_all = format!("{one_less}, and of tests/run all: fuzz_vpd\n");
    assert_eq!(run(Some("fuzz_vpd")), (Some(0), in_all, String::new()));
    assert!(
        read("tests/run").contains("./tests/not_run \"$results\" src/SPECIFICATION.md"),
        "tests/run does not ask"
    );
}
