//! The report as text: files, agents, the edits of each device, all edits of the first device or of
//! the devices asked for, problems.

use super::check::{Asked, Outcome, Report};
use super::container::Container;
use kata_gpu_report::data::text::{clipped, printable};
use kata_gpu_report::views::grid::aligned;
use serde_json::Value;

/// The whole page. `asked`: devices were named.
pub fn page(report: &Report, asked: bool) -> String {
    let mut out = vec![row(["FILE", "KIND", "CDIVERSION", "DEVICES", "BYTES"])];
    for file in &report.files {
        out.push(vec![
            clipped(&file.name),
            clipped(file.kind.as_deref().unwrap_or("-")),
            clipped(file.version.as_deref().unwrap_or("-")),
            file.devices.to_string(),
            file.bytes.to_string(),
        ]);
    }
    let mut lines = aligned(&out, &[3, 4], "  ");
    lines.push(String::new());
    for verdict in &report.verdicts {
        let loads = match &verdict.refused {
            None => "loads".to_string(),
            Some(error) => format!("refuses: {}", printable(error)),
        };
        lines.push(format!("{:<12}  {loads}", verdict.agent.name()));
    }
    if !asked {
        devices(report, &mut lines);
    }
    // Show the first device that gives something, where no device was asked for.
    let gets = |asked: &&Asked| {
        let mut outcomes = asked.outcomes.iter();
        outcomes.any(|(_, outcome)| matches!(outcome, Outcome::Gets(_)))
    };
    if let Some(shown) = (report.asked.iter().find(gets)).or(report.asked.first()) {
        container(shown, &mut lines);
    }
    lines.push(String::new());
    for problem in &report.problems {
        lines.push(format!("error: {}", printable(problem)));
    }
    lines.push(match report.has_errors() {
        true => "An agent refuses this, or a container does not get what it needs".into(),
        false => "Both agents load this".into(),
    });
    lines.join("\n") + "\n"
}

fn row<const N: usize>(cells: [&str; N]) -> Vec<String> {
    cells.map(str::to_string).to_vec()
}

/// Outcomes, where agents that agree share one.
fn outcomes(asked: &Asked) -> Vec<(String, &Outcome)> {
    match asked.outcomes.as_slice() {
        [(_, first), (_, second)] if first == second => vec![(String::new(), first)],
        differ => (differ.iter())
            .map(|(agent, outcome)| (format!(" with {}", agent.name()), outcome))
            .collect(),
    }
}

fn names(asked: &Asked) -> String {
    let names: Vec<String> = asked.devices.iter().map(|d| clipped(d)).collect();
    names.join(", ")
}

fn devices(report: &Report, lines: &mut Vec<String>) {
    let head = [
        "DEVICE", "STATE", "NODES", "RULES", "MOUNTS", "ENV", "HOOKS",
    ];
    let mut rows = vec![row(head)];
    for asked in &report.asked {
        for (with, outcome) in outcomes(asked) {
            let (state, counts) = match outcome {
                Outcome::Gets(c) => ("resolvable", c.counts().map(|n| n.to_string())),
                Outcome::Waits(_) => ("waiting", [(); 5].map(|()| "-".into())),
                Outcome::Fails(_) => ("fails", [(); 5].map(|()| "-".into())),
                Outcome::HasFailedGpu(_) => ("failed GPU", [(); 5].map(|()| "-".into())),
            };
            let first = [format!("{}{with}", names(asked)), state.into()];
            rows.push([&first[..], &counts[..]].concat());
        }
    }
    if rows.len() > 1 {
        lines.push(String::new());
        lines.extend(aligned(&rows, &[2, 3, 4, 5, 6], "  "));
    }
    if report.not_tried > 0 {
        lines.push(format!("{} more devices, not tried", report.not_tried));
    }
}

fn container(asked: &Asked, lines: &mut Vec<String>) {
    for (with, outcome) in outcomes(asked) {
        lines.push(String::new());
        let head = format!("A container with {}{with}", names(asked));
        match outcome {
            Outcome::Gets(container) => {
                lines.push(format!("{head} gets"));
                edits(container, lines);
            }
            Outcome::Waits(paths) => {
                lines.push(format!("{head} waits, tried again every second, for"));
                lines.extend(paths.iter().map(|path| format!("  {}", printable(path))));
            }
            Outcome::Fails(error) | Outcome::HasFailedGpu(error) => {
                lines.push(format!("{head} fails: {}", printable(error)));
            }
        }
    }
}

/// A text or number of an edit; `?` if only the guest's node has it.
fn cell(of: &Value, field: &str) -> String {
    match &of[field] {
        Value::Null => "?".into(),
        value => plain(value),
    }
}

fn plain(value: &Value) -> String {
    match value {
        Value::String(text) => printable(text),
        Value::Array(all) => all.iter().map(plain).collect::<Vec<_>>().join(" "),
        other => printable(&other.to_string()),
    }
}

/// Cells of an edit's row.
type Cells<'a> = &'a dyn Fn(&Value) -> Vec<String>;

fn edits(container: &Container, lines: &mut Vec<String>) {
    let numbers = |of: &Value| format!("{}:{}", cell(of, "major"), cell(of, "minor"));
    let node = |n: &Value| {
        let mode = n["fileMode"].as_u64().map(|mode| format!("{mode:04o}"));
        let mode = mode.unwrap_or("the guest node's mode".into());
        vec![cell(n, "path"), cell(n, "type"), numbers(n), mode]
    };
    let rule = |r: &Value| vec![cell(r, "type"), numbers(r), cell(r, "access")];
    let mount = |m: &Value| {
        let source = match m["source"] == m["destination"] {
            true => "same path".into(),
            false => format!("from {}", cell(m, "source")),
        };
        vec![cell(m, "destination"), source, plain(&m["options"])]
    };
    let hook = |h: &Value| vec![cell(h, "name"), cell(h, "path"), plain(&h["args"])];
    let text = |value: &Value| vec![plain(value)];
    let lists: [(&str, &str, Cells); 6] = [
        ("nodes", "deviceNodes", &node),
        ("cgroup", "cgroupRules", &rule),
        ("mounts", "mounts", &mount),
        ("env", "env", &text),
        ("hooks", "hooks", &hook),
        ("groups", "additionalGids", &text),
    ];
    for (head, name, cells) in lists {
        let rows: Vec<Vec<String>> = container.list(name).iter().map(cells).collect();
        for (index, line) in aligned(&rows, &[], "  ").iter().enumerate() {
            let head = if index == 0 { head } else { "" };
            lines.push(format!("  {head:<8}{}", line.trim_end()));
        }
    }
    for name in ["netDevices", "intelRdt"] {
        if let Some(value) = container.value(name) {
            lines.push(format!("  {name} {}", plain(value)));
        }
    }
}
