//! The report as text: files, agents, the edits of each device, all edits of the first device or of
//! the devices asked for, findings.

use super::check_report::{Asked, Outcome, Question, Report};
use super::container::{Container, Node};
use super::rules::parse_ms;
use super::spec_rules::{Agent, Finding, Rule};
use kata_gpu_report::data::text::{Ink, Screen, clipped, printable, wrap};
use kata_gpu_report::severity::Severity;
use kata_gpu_report::views::grid::aligned;

/// Findings of one rule that are shown in full; the others are counted.
const SHOWN_OF_A_RULE: usize = 3;
/// Width of the column of heads.
const HEAD: usize = 8;
/// Indentation of lines that belong to the line above.
const INDENT: &str = "    ";

/// The whole page.
pub fn page(report: &Report, question: &Question, screen: &Screen) -> String {
    let mut out = Page {
        screen,
        lines: Vec::new(),
    };
    out.files(report);
    out.agents(report);
    if question.devices.is_empty() {
        out.devices(report);
    }
    // Show the first device that gives something, where no device was asked for.
    let gets = |asked: &&Asked| {
        asked
            .outcomes
            .iter()
            .any(|(_, outcome)| matches!(outcome, Outcome::Gets(_)))
    };
    if let Some(asked) = report.asked.iter().find(gets).or(report
        .asked
        .first()
        .filter(|_| !question.devices.is_empty()))
    {
        out.container(asked, report);
    }
    out.findings(report);
    out.lines.join("\n") + "\n"
}

/// A line for each rule.
pub fn rules(rules: &[&Rule], screen: &Screen) -> String {
    let mut rows = vec![
        ["RULE", "SEVERITY", "KATA", "EFFECT"]
            .map(str::to_string)
            .to_vec(),
    ];
    rows.extend(rules.iter().map(|r| {
        [r.name, r.severity.name(), r.agents.names(), r.breaks]
            .map(str::to_string)
            .to_vec()
    }));
    let mut out = Page {
        screen,
        lines: Vec::new(),
    };
    out.table(&rows, &[]);
    out.lines.join("\n") + "\n"
}

struct Page<'a> {
    screen: &'a Screen,
    lines: Vec<String>,
}

impl Page<'_> {
    fn line(&mut self, ink: Ink, text: &str) {
        let cut = match self.screen.width {
            Some(width) if text.len() > width => format!(
                "{}...",
                text.get(..width.saturating_sub(3)).unwrap_or_default()
            ),
            _ => text.trim_end().to_string(),
        };
        self.lines.push(self.screen.paint(ink, &cut));
    }

    fn gap(&mut self) {
        self.lines.push(String::new());
    }

    /// A table under its head, the first row. `right`: columns aligned to the right.
    fn table(&mut self, rows: &[Vec<String>], right: &[usize]) {
        for (index, line) in aligned(rows, right).iter().enumerate() {
            self.line(if index == 0 { Ink::Bold } else { Ink::Plain }, line);
        }
    }

    fn files(&mut self, report: &Report) {
        let mut rows = vec![
            [
                "FILE",
                "KIND",
                "CDIVERSION",
                "NEEDS",
                "DEVICES",
                "BYTES",
                "AGENT PARSES",
            ]
            .map(str::to_string)
            .to_vec(),
        ];
        for file in &report.files {
            let or = |text: Option<&str>| text.map_or("-".to_string(), clipped);
            rows.push(vec![
                clipped(&file.name),
                or(file.kind.as_deref()),
                or(file.declared.as_deref()),
                file.minimum.map_or("-".to_string(), |v| v.to_string()),
                file.devices.to_string(),
                file.bytes.to_string(),
                format!("~{} ms a try", parse_ms(file.bytes)),
            ]);
        }
        if report.files.is_empty() {
            self.line(Ink::Plain, "no spec");
        } else {
            self.table(&rows, &[4, 5]);
        }
        if report.ignored > 0 {
            self.line(
                Ink::Dim,
                &format!(
                    "{} more that agents pass over: they read *.json and *.yaml",
                    report.ignored
                ),
            );
        }
    }

    fn agents(&mut self, report: &Report) {
        self.gap();
        for verdict in &report.verdicts {
            match &verdict.refused {
                None => self.line(Ink::Good, &format!("{:<12}  loads", verdict.agent.name())),
                Some(error) => self.wrapped(
                    Ink::Error,
                    "",
                    &format!("{:<12}  refuses: {}", verdict.agent.name(), clipped(error)),
                ),
            }
        }
    }

    fn devices(&mut self, report: &Report) {
        if report.asked.iter().all(|asked| asked.outcomes.is_empty()) {
            return;
        }
        self.gap();
        let mut rows = vec![
            [
                "DEVICE", "STATE", "NODES", "RULES", "MOUNTS", "ENV", "HOOKS",
            ]
            .map(str::to_string)
            .to_vec(),
        ];
        for asked in &report.asked {
            let name = asked
                .devices
                .iter()
                .map(|d| clipped(d))
                .collect::<Vec<_>>()
                .join(", ");
            // Agents that agree share a line.
            let outcomes = match asked.outcomes.as_slice() {
                [(_, first), (_, second)] if first == second => vec![(None, first)],
                outcomes => outcomes
                    .iter()
                    .map(|(agent, outcome)| (Some(*agent), outcome))
                    .collect(),
            };
            for (agent, outcome) in outcomes {
                let with = agent
                    .filter(|_| report.verdicts.len() > 1)
                    .map(|a| format!(" ({})", a.name()))
                    .unwrap_or_default();
                rows.push(
                    [
                        vec![format!("{name}{with}"), state(outcome).to_string()],
                        counts(outcome),
                    ]
                    .concat(),
                );
            }
        }
        self.table(&rows, &[2, 3, 4, 5, 6]);
        if report.not_tried > 0 {
            self.line(
                Ink::Dim,
                &format!("{} more devices, not tried: name them", report.not_tried),
            );
        }
    }

    fn container(&mut self, asked: &Asked, report: &Report) {
        if asked.outcomes.is_empty() {
            return;
        }
        self.gap();
        let names = asked
            .devices
            .iter()
            .map(|d| clipped(d))
            .collect::<Vec<_>>()
            .join(", ");
        let mut shown: Vec<(Vec<Agent>, &Outcome)> = Vec::new();
        for (agent, outcome) in &asked.outcomes {
            match shown.iter_mut().find(|(_, same)| *same == outcome) {
                Some((agents, _)) => agents.push(*agent),
                None => shown.push((vec![*agent], outcome)),
            }
        }
        let several = shown.len() > 1 || asked.outcomes.len() < report.verdicts.len();
        for (agents, outcome) in shown {
            let with = if several {
                format!(
                    " with {}",
                    agents
                        .iter()
                        .map(|a| a.name())
                        .collect::<Vec<_>>()
                        .join(" and ")
                )
            } else {
                String::new()
            };
            match outcome {
                Outcome::Gets(container) => {
                    self.line(Ink::Bold, &format!("A container with {names}{with} gets"));
                    self.edits(container);
                    if report.assumed > 0 {
                        self.line(
                            Ink::Dim,
                            "Device nodes were taken to exist; ? marks facts that only the guest's node shows (--here, --root)",
                        );
                    }
                }
                Outcome::Waits(paths) => {
                    self.line(
                        Ink::Warning,
                        &format!(
                            "A container with {names}{with} waits, tried again every second, for"
                        ),
                    );
                    paths
                        .iter()
                        .for_each(|p| self.line(Ink::Plain, &format!("  {}", printable(p))));
                }
                Outcome::Fails(error) => {
                    self.line(
                        Ink::Error,
                        &format!("A container with {names}{with} fails: {}", clipped(error)),
                    );
                }
            }
        }
    }

    fn edits(&mut self, container: &Container) {
        let nodes: Vec<Vec<String>> = container.device_nodes.iter().map(node_cells).collect();
        self.block("nodes", aligned(&nodes, &[]));
        let rule = |r: &super::container::Rule| {
            let number = |n: Option<i64>| n.map_or("?".to_string(), |n| n.to_string());
            let (kind, access) = (
                r.kind.as_deref().unwrap_or("a"),
                r.access.as_deref().unwrap_or(""),
            );
            vec![
                if r.allow { "allow" } else { "deny" }.to_string(),
                printable(kind),
                format!("{}:{}", number(r.major), number(r.minor)),
                printable(access),
            ]
        };
        self.block(
            "cgroup",
            aligned(
                &container.cgroup_rules.iter().map(rule).collect::<Vec<_>>(),
                &[],
            ),
        );
        let mount = |m: &super::container::Mount| {
            let source = if m.source == m.destination {
                "same path".to_string()
            } else {
                format!("from {}", printable(&m.source))
            };
            vec![
                printable(&m.destination),
                source,
                printable(&m.options.join(",")),
            ]
        };
        self.block(
            "mounts",
            aligned(&container.mounts.iter().map(mount).collect::<Vec<_>>(), &[]),
        );
        self.block("env", container.env.iter().map(|e| printable(e)).collect());
        for hook in &container.hooks {
            let args = if hook.args.is_empty() {
                String::new()
            } else {
                format!(" as {}", hook.args.join(" "))
            };
            let mut lines = vec![format!(
                "{}: {}{}",
                printable(&hook.name),
                printable(&hook.path),
                printable(&args)
            )];
            if !hook.env.is_empty() {
                lines.push(format!("  env {}", printable(&hook.env.join(" "))));
            }
            self.block("hook", lines);
        }
        let gids: Vec<String> = container
            .additional_gids
            .iter()
            .map(u32::to_string)
            .collect();
        self.block(
            "groups",
            if gids.is_empty() {
                Vec::new()
            } else {
                vec![gids.join(" ")]
            },
        );
        for (head, value) in [
            ("net", &container.net_devices),
            ("rdt", &container.intel_rdt),
        ] {
            self.block(
                head,
                if value.is_null() {
                    Vec::new()
                } else {
                    vec![clipped(&value.to_string())]
                },
            );
        }
    }

    /// Lines with a head before the first.
    fn block(&mut self, head: &str, lines: Vec<String>) {
        for (index, line) in lines.iter().enumerate() {
            let head = if index == 0 { head } else { "" };
            self.line(Ink::Plain, &format!("  {head:<HEAD$}{line}"));
        }
    }

    fn findings(&mut self, report: &Report) {
        self.gap();
        let mut shown: Vec<(&'static str, usize)> = Vec::new();
        for finding in &report.findings {
            let count = match shown
                .iter_mut()
                .find(|(name, _)| *name == finding.rule.name)
            {
                Some((_, count)) => {
                    *count += 1;
                    *count
                }
                None => {
                    shown.push((finding.rule.name, 1));
                    1
                }
            };
            if count <= SHOWN_OF_A_RULE || self.screen.width.is_none() {
                self.finding(finding, count == 1);
            }
        }
        let hidden: usize = shown
            .iter()
            .map(|(_, count)| count.saturating_sub(SHOWN_OF_A_RULE))
            .sum();
        if hidden > 0 && self.screen.width.is_some() {
            self.line(
                Ink::Dim,
                &format!(
                    "{hidden} more of the same rules (all of them in a pipe, and with --json)"
                ),
            );
        }
        let of = |severity| {
            report
                .findings
                .iter()
                .filter(|f| f.rule.severity == severity)
                .count()
        };
        let plural = |n: usize, word: &str| format!("{n} {word}{}", if n == 1 { "" } else { "s" });
        let (errors, warnings, notes) = (
            of(Severity::Error),
            of(Severity::Warning),
            of(Severity::Note),
        );
        let waiting = report
            .asked
            .iter()
            .filter(|a| {
                a.outcomes
                    .iter()
                    .any(|(_, o)| matches!(o, Outcome::Waits(_)))
            })
            .count();
        let mut sum = format!(
            "{}, {}, {}",
            plural(errors, "error"),
            plural(warnings, "warning"),
            plural(notes, "note")
        );
        if waiting > 0 {
            sum.push_str(&format!(
                "; {waiting} of {} waiting",
                plural(report.asked.len(), "device")
            ));
        }
        let ink = match (errors, warnings) {
            (0, 0) => Ink::Good,
            (0, _) => Ink::Warning,
            _ => Ink::Error,
        };
        self.line(ink, &sum);
    }

    /// Shows effect and cure with the first finding of a rule.
    fn finding(&mut self, finding: &Finding, first: bool) {
        let ink = match finding.rule.severity {
            Severity::Error => Ink::Error,
            Severity::Warning => Ink::Warning,
            Severity::Note => Ink::Plain,
        };
        let place = match (finding.file.as_str(), finding.pointer.as_str()) {
            ("", _) => String::new(),
            (file, "") => format!(" {}", clipped(file)),
            (file, pointer) => format!(" {}#{}", clipped(file), clipped(pointer)),
        };
        let value = finding
            .shown_value()
            .map(|v| format!(": {v}"))
            .unwrap_or_default();
        self.wrapped(
            ink,
            "",
            &format!(
                "{}[{}]{place}{value}",
                finding.rule.severity.name(),
                finding.rule.name
            ),
        );
        if first {
            self.wrapped(
                Ink::Plain,
                INDENT,
                &format!("{}: {}", finding.agents.names(), finding.rule.breaks),
            );
        }
        if first || finding.cure != finding.rule.cure {
            self.wrapped(
                Ink::Plain,
                INDENT,
                &format!("cure: {}", printable(&finding.cure)),
            );
        }
    }

    /// Wraps the text to the terminal's width, with INDENT before all lines but the first.
    fn wrapped(&mut self, ink: Ink, indent: &str, text: &str) {
        let width = self.screen.width.unwrap_or(usize::MAX);
        wrap(indent, INDENT, text, width)
            .iter()
            .for_each(|line| self.line(ink, line));
    }
}

fn state(outcome: &Outcome) -> &'static str {
    match outcome {
        Outcome::Gets(_) => "resolvable",
        Outcome::Waits(_) => "waiting",
        Outcome::Fails(_) => "fails",
    }
}

fn counts(outcome: &Outcome) -> Vec<String> {
    match outcome {
        Outcome::Gets(c) => [
            c.device_nodes.len(),
            c.cgroup_rules.len(),
            c.mounts.len(),
            c.env.len(),
            c.hooks.len(),
        ]
        .map(|n| n.to_string())
        .to_vec(),
        Outcome::Waits(_) | Outcome::Fails(_) => vec!["-".to_string(); 5],
    }
}

fn node_cells(node: &Node) -> Vec<String> {
    let number = |n: Option<i64>| n.map_or("?".to_string(), |n| n.to_string());
    let mut owner = Vec::new();
    owner.extend(node.uid.map(|uid| format!("uid {uid}")));
    owner.extend(node.gid.map(|gid| format!("gid {gid}")));
    vec![
        printable(&node.path),
        printable(&node.kind),
        format!("{}:{}", number(node.major), number(node.minor)),
        node.file_mode
            .map_or("the guest node's mode".to_string(), |mode| {
                format!("{mode:04o}")
            }),
        owner.join(" "),
    ]
}

#[cfg(test)]
mod tests {
    use super::super::check_report::check;
    use super::super::look::Look;
    use super::super::spec_files;
    use super::super::spec_rules::{Agents, RULES};
    use super::*;
    use kata_gpu_test_support::{TempDir, golden, temp_dir, tests_dir};
    use std::path::Path;

    const NARROW: Screen = Screen {
        width: Some(100),
        colour: true,
    };

    fn shown(path: &Path, devices: &[&str], screen: &Screen) -> String {
        let devices = devices.iter().map(|d| d.to_string()).collect();
        let question = Question {
            look: Look::Nowhere,
            agents: Agents::BOTH,
            devices,
            require_resolvable: false,
        };
        page(
            &check(spec_files::read(path).unwrap(), &question).unwrap(),
            &question,
            screen,
        )
    }

    /// Two GPUs, one of which is not ready, as `wrong` makes it.
    fn two_gpus(wrong: impl Fn(String) -> String) -> TempDir {
        let dir = temp_dir();
        let text = concat!(
            r#"{"cdiVersion":"0.5.0","kind":"nvidia.com/gpu","devices":["#,
            r#"{"name":"0","containerEdits":{"deviceNodes":[{"path":"/dev/nvidia1","major":195,"minor":1,"fileMode":438}]}},"#,
            r#"{"name":"1","containerEdits":{"deviceNodes":[{"path":"/run/kata-gpu-init/pending/0001:00:01.0"}]}}],"#,
            r#""containerEdits":{"deviceNodes":[{"path":"/dev/nvidiactl","major":195,"minor":255,"fileMode":438},"#,
            r#"{"path":"/dev/nvidia-uvm","major":240,"minor":0,"fileMode":438}],"#,
            r#""hooks":[{"hookName":"createContainer","path":"/init","args":["init","hook"],"env":["A=1"]}]}}"#,
        );
        std::fs::write(dir.path().join("nvidia.yaml"), wrong(text.to_string())).unwrap();
        dir
    }

    #[test]
    fn the_page_of_the_reference_spec_is_the_golden_one() {
        let reference = tests_dir("fixtures/cdi/kata-8gpu-550.json");
        golden(
            "cdi-check-reference.txt",
            &shown(&reference, &[], &Screen::PLAIN),
        );
        golden(
            "cdi-check-reference-100-columns-colour.txt",
            &shown(&reference, &["0", "1"], &NARROW),
        );
    }

    #[test]
    fn a_gpu_that_is_not_ready_waits_and_is_no_error() {
        let dir = two_gpus(|text| text);
        let text = shown(dir.path(), &[], &Screen::PLAIN);
        assert!(
            text.contains("0 errors, 0 warnings, 1 note; 1 of 2 devices waiting"),
            "{text}"
        );
        golden("cdi-check-waiting.txt", &text);
        golden(
            "cdi-check-waiting-asked.txt",
            &shown(dir.path(), &["1"], &Screen::PLAIN),
        );
    }

    #[test]
    fn findings_name_place_agents_and_cure() {
        let dir = two_gpus(|text| {
            text.replace(r#""major""#, r#""type":"c","major""#)
                .replace("0.5.0", "0.4.0")
                .replace(r#","env":["A=1"]"#, "")
        });
        std::fs::write(dir.path().join("torn.json"), r#"{"cdiVersion":"#).unwrap();
        golden(
            "cdi-check-wrong.txt",
            &shown(dir.path(), &[], &Screen::PLAIN),
        );
        let narrow = shown(dir.path(), &[], &NARROW);
        golden("cdi-check-wrong-100-columns-colour.txt", &narrow);
    }

    #[test]
    fn no_line_is_wider_than_the_terminal() {
        let dir =
            two_gpus(|text| text.replace("hook\"]", &format!("hook\",\"{}\"]", "x".repeat(500))));
        for width in [40, 80, 132] {
            let text = shown(
                dir.path(),
                &[],
                &Screen {
                    width: Some(width),
                    colour: false,
                },
            );
            assert!(
                text.lines().all(|line| line.len() <= width),
                "{width}:\n{text}"
            );
        }
        let wide = shown(dir.path(), &[], &Screen::PLAIN);
        assert!(wide.contains(&"x".repeat(500)), "a pipe gets everything");
    }

    #[test]
    fn the_list_of_rules_has_every_rule() {
        let text = rules(RULES, &Screen::PLAIN);
        assert_eq!(text.lines().count(), RULES.len() + 1);
    }
}
