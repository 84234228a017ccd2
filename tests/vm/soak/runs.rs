//! The file of runs: a line of JSON for each boot, appended when the boot is over.

use super::judge::Kill;
use super::{Run, all_points};
use anyhow::{Context, Result};
use kata_gpu_wire::names;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs::OpenOptions;
use std::io::Write as _;
use std::path::Path;

/// Identity of what is booted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ids {
    /// SHA-256 of the init's program, its first 16 digits.
    pub init: String,
    /// Tree of the sources, by git.
    pub tree: String,
}

impl Run {
    pub fn holds(&self) -> bool {
        self.findings.is_empty()
    }

    /// Line of the file.
    pub fn line(&self, ids: &Ids) -> Value {
        let kill = self.kill.map(|kill| match kill {
            Kill::Done => "done",
            Kill::NoProcess => "no process",
            Kill::NotReached => "not reached",
        });
        let start = self
            .seen
            .records
            .iter()
            .find(|r| r.name == names::INIT_START);
        let mut line = json!({
            "seed": self.description.seed,
            "outcome": if self.holds() { "ok" } else { "failed" },
            "seconds": (self.seconds * 10.0).round() / 10.0,
            "init": ids.init,
            "tree": ids.tree,
            "build": start.and_then(|r| r.fields.get("build")),
            "boot": self.description.short(),
        });
        let findings: Vec<Value> = self
            .findings
            .iter()
            .map(|f| json!({ "kind": f.kind, "text": f.text }))
            .collect();
        let more = [
            (
                "point",
                self.description.point.map(|point| point.to_string().into()),
            ),
            ("kill", kill.map(Value::from)),
            ("repeated", self.repeated.then_some(true.into())),
            (
                "findings",
                (!findings.is_empty()).then_some(findings.into()),
            ),
        ];
        for (key, value) in more {
            if let Some(value) = value {
                line[key] = value;
            }
        }
        line
    }
}

/// Appends a line, in one piece and on a line of its own.
pub fn append(path: &Path, line: &Value) -> Result<()> {
    let at = || path.display().to_string();
    let torn =
        std::fs::read(path).is_ok_and(|bytes| bytes.last().is_some_and(|last| *last != b'\n'));
    let mut file = OpenOptions::new()
        .create(true)
        .append(true)
        .open(path)
        .with_context(at)?;
    let text = format!("{}{line}\n", if torn { "\n" } else { "" });
    file.write_all(text.as_bytes()).with_context(at)
}

/// Lines of a file; none where there is no file. A torn line is left out: its boot is done again.
pub fn read(path: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    text.lines()
        .filter_map(|line| serde_json::from_str(line).ok())
        .filter(|line: &Value| line["seed"].is_u64())
        .collect()
}

/// Seeds that are done for this init.
pub fn done(lines: &[Value], ids: &Ids) -> BTreeSet<u64> {
    lines
        .iter()
        .filter(|line| line["init"] == ids.init.as_str())
        .filter_map(|line| line["seed"].as_u64())
        .collect()
}

/// Counts of a file, for each init and tree.
pub fn summary(lines: &[Value]) -> String {
    let mut groups: BTreeMap<(&str, &str), Vec<&Value>> = BTreeMap::new();
    for line in lines {
        let id = |key: &str| line[key].as_str().unwrap_or("?");
        groups
            .entry((id("init"), id("tree")))
            .or_default()
            .push(line);
    }
    let points = all_points();
    let mut text = String::new();
    for ((init, tree), group) in groups {
        let seeds: BTreeSet<u64> = group
            .iter()
            .filter_map(|line| line["seed"].as_u64())
            .collect();
        let of = |key: &str, value: &str| group.iter().filter(|line| line[key] == value).count();
        let at = |kill: &str| {
            let named = group
                .iter()
                .filter(|line| line["kill"] == kill)
                .filter_map(|line| line["point"].as_str());
            named.collect::<BTreeSet<_>>()
        };
        let (killed, without) = (at("done"), at("no process"));
        let without = without.difference(&killed).count();
        let seconds: f64 = group
            .iter()
            .filter_map(|line| line["seconds"].as_f64())
            .sum();
        let mut kinds: BTreeMap<&str, BTreeSet<u64>> = BTreeMap::new();
        for line in &group {
            for finding in line["findings"].as_array().into_iter().flatten() {
                kinds
                    .entry(finding["kind"].as_str().unwrap_or("?"))
                    .or_default()
                    .extend(line["seed"].as_u64());
            }
        }
        let _infallible = writeln!(
            text,
            "init {init}, tree {tree}: {} boots of {} seeds, {} ok, {} failed, {:.0} s of guests",
            group.len(),
            seeds.len(),
            of("outcome", "ok"),
            of("outcome", "failed"),
            seconds
        );
        let _infallible = writeln!(
            text,
            "  kill points: {} of {}; at {without} of them that process is not there (any more)",
            killed.len() + without,
            points.len()
        );
        for (kind, seeds) in kinds {
            let _infallible = writeln!(text, "  failures of {kind}: seeds {seeds:?}");
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ids(init: &str) -> Ids {
        Ids {
            init: init.into(),
            tree: "t".into(),
        }
    }

    #[test]
    fn a_soak_goes_on_after_a_torn_line_and_for_another_init() {
        let folder = kata_gpu_test_support::temp_dir();
        let path = folder.path().join("soak.ndjson");
        for seed in [1, 2] {
            append(
                &path,
                &json!({ "seed": seed, "init": "a", "outcome": "ok" }),
            )
            .unwrap();
        }
        // Stopped amid the third line.
        OpenOptions::new()
            .append(true)
            .open(&path)
            .unwrap()
            .write_all(b"{\"seed\":3,\"ini")
            .unwrap();
        append(&path, &json!({ "seed": 4, "init": "b", "outcome": "ok" })).unwrap();
        let lines = read(&path);
        assert_eq!(
            (done(&lines, &ids("a")), done(&lines, &ids("b"))),
            (BTreeSet::from([1, 2]), BTreeSet::from([4]))
        );
    }

    #[test]
    fn a_summary_counts_boots_points_and_failures_by_kind() {
        let point = all_points()[0].to_string();
        let lines = [
            json!({ "seed": 1, "init": "a", "tree": "t", "outcome": "ok", "point": point,
                "kill": "done", "seconds": 2.0 }),
            json!({ "seed": 2, "init": "a", "tree": "t", "outcome": "ok", "point": "lane at \
                settled", "kill": "no process", "seconds": 2.0 }),
            json!({ "seed": 3, "init": "a", "tree": "t", "outcome": "failed", "seconds": 3.5,
                "findings": [{ "kind": "closed", "text": "x" }, { "kind": "closed",
                "text": "y" }] }),
        ];
        let text = summary(&lines);
        let count = all_points().len();
        assert!(
            text.starts_with("init a, tree t: 3 boots of 3 seeds, 2 ok, 1 failed, 8 s of guests\n"),
            "{text}"
        );
        assert!(
            text.contains(&format!("  kill points: 2 of {count}; at 1 of them")),
            "{text}"
        );
        assert!(
            text.ends_with("  failures of closed: seeds {3}\n"),
            "{text}"
        );
    }
}
