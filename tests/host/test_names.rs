//! Length of the names of tests, in every file below src/ and tests/: a name is read in lists,
//! filters and tables.

use crate::files;

/// Longest name of a test, in characters; without the runtime's name before a test under Kata.
const LONGEST: usize = 60;

/// Names of a file's tests: functions, VM tests, and tests under Kata's runtimes.
fn names(text: &str) -> Vec<String> {
    let mut names = Vec::new();
    let mut attribute = false;
    for line in text.lines().map(str::trim) {
        let function = line
            .trim_start_matches("async ")
            .strip_prefix("fn ")
            .and_then(|rest| rest.split_once('('));
        let vm_test = line
            .split_once("name: \"")
            .filter(|(before, _)| before.is_empty() || before.ends_with("VmTest { "));
        let under_kata = line.strip_prefix('"').filter(|_| line.ends_with("\":"));
        attribute |= line.starts_with("#[test]") || line.starts_with("#[tokio::test");
        if let (true, Some((name, _))) = (attribute, function) {
            names.push(name.to_string());
            attribute = false;
        }
        if let Some(rest) = vm_test.map(|(_, rest)| rest).or(under_kata) {
            let name = rest.split('"').next().unwrap_or_default();
            names.extend(name.contains('_').then(|| name.to_string()));
        }
    }
    names
}

fn too_long(names: &[String]) -> Vec<&String> {
    names
        .iter()
        .filter(|name| name.chars().count() > LONGEST)
        .collect()
}

#[test]
fn the_name_of_a_test_has_at_most_60_characters() {
    let mut sources: Vec<_> = ["src", "tests"].into_iter().flat_map(files).collect();
    sources.retain(|path| path.extension().is_some_and(|extension| extension == "rs"));
    let all: Vec<String> = sources
        .iter()
        .flat_map(|path| names(&std::fs::read_to_string(path).unwrap()))
        .collect();
    assert!(all.len() > 1000, "{} names", all.len());
    for kind in [
        "the_scan_finds_gpus_switches_and_mellanox_in_pci_order",
        "a_spec_on_a_run_of_another_type_is_covered",
        "install_check_says_what_works_and_why_not",
    ] {
        assert!(all.iter().any(|name| name == kind), "{kind} is not found");
    }
    assert!(too_long(&all).is_empty(), "{:#?}", too_long(&all));
    // Negative control.
    let (just, long) = ("a_".repeat(LONGEST / 2), "a_".repeat(LONGEST / 2 + 1));
    let forms = |name: &str| {
        [
            format!("    #[test]\n    #[cfg(unix)]\n    fn {name}() {{"),
            format!("    VmTest {{ name: \"{name}\", run: f }},"),
            format!("        name: \"{name}\","),
            format!("    \"{name}\":\n"),
        ]
    };
    for (short, long) in forms(&just).iter().zip(&forms(&long)) {
        assert_eq!(
            (names(short).len(), too_long(&names(short)).len()),
            (1, 0),
            "{short}"
        );
        assert_eq!(too_long(&names(long)).len(), 1, "{long}");
    }
}
