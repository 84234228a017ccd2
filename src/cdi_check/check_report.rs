//! The whole check: files in, findings and containers out. Prints nothing.

use super::container::Container;
use super::judge::{Court, Inject, parse};
use super::look::Look;
use super::nodes::{NodeLook, Scope, entries, looks, scopes};
use super::rules;
use super::rules::{Document, names};
use super::shape;
use super::shape::{Shaped, as_text};
use super::spec_files;
use super::spec_files::{Input, SpecText};
use super::spec_rules::*;
use anyhow::{Result, ensure};
use kata_gpu_init::cdi::spec::KIND;
use kata_gpu_report::severity::Severity;
use serde_json::{Value, json};
use std::collections::{BTreeSet, HashMap};

/// Most bytes times devices of all files that are tried: agents keep a copy of the whole spec for
/// each of its devices. The reference spec (8 GPUs under two names each) has 0.6 MB; eight GPUs in
/// seven instances each, under two names each, have 6 MB with edits like its own.
const MAX_COPIES: usize = 8 << 20;
/// Fewest bytes that a device takes.
const LEAST_DEVICE: usize = 24;
const LEFT_OUT: &str = "not tried: a file was omitted";
/// Most opening brackets of a file that is YAML and no JSON: its parser takes time with the square
/// of their depth, which only a parser knows.
const MAX_BRACKETS: usize = 4000;
/// Most device nodes and mounts of all files: agents search all of them for each that they add. The
/// reference spec has 51.
const MAX_ENTRIES: usize = 4000;
/// Most comparisons of nodes and mounts where no device was asked for; about 20 ns each.
const MAX_COMPARISONS: usize = 50_000_000;
/// Most devices that are injected one by one where no device was asked for.
const MAX_ASKED: usize = 256;

/// Options of a check.
#[derive(Debug)]
pub struct Question {
    pub look: Look,
    pub agents: Agents,
    /// Devices of one container; if empty, each listed device in a container of its own.
    pub devices: Vec<String>,
    pub require_resolvable: bool,
}

/// A spec file in the report.
#[derive(Debug)]
pub struct File {
    pub name: String,
    pub bytes: usize,
    pub kind: Option<String>,
    pub declared: Option<String>,
    pub minimum: Option<shape::Version>,
    pub devices: usize,
}

/// Whether an agent loads the files together.
#[derive(Debug)]
pub struct Verdict {
    pub agent: Agent,
    /// Reason for which the agent loads none; None if it loads them.
    pub refused: Option<String>,
}

/// Result of an injection into a container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    Gets(Container),
    /// Paths without a device node, for which the agent waits.
    Waits(Vec<String>),
    Fails(String),
}

/// A container that asks for devices.
#[derive(Debug)]
pub struct Asked {
    pub devices: Vec<String>,
    /// Results of the agents that load the specs.
    pub outcomes: Vec<(Agent, Outcome)>,
}

#[derive(Debug)]
pub struct Report {
    pub files: Vec<File>,
    pub ignored: usize,
    pub verdicts: Vec<Verdict>,
    pub asked: Vec<Asked>,
    /// Devices that are listed and were not tried.
    pub not_tried: usize,
    pub findings: Vec<Finding>,
    /// Device nodes that were assumed to exist.
    pub assumed: usize,
}

/// A file that was parsed.
struct Parsed<'a> {
    text: &'a SpecText,
    value: Value,
    nodes: Vec<NodeLook>,
    shaped: Shaped,
}

impl Parsed<'_> {
    fn document(&self) -> Document<'_> {
        Document {
            file: &self.text.name,
            bytes: self.text.text.len(),
            value: &self.value,
            nodes: &self.nodes,
        }
    }
}

/// Checks the files that were read.
pub fn check(input: Input, question: &Question) -> Result<Report> {
    let Input {
        files,
        mut findings,
        ignored,
        ..
    } = input;
    let agents: Vec<Agent> = Agent::ALL
        .into_iter()
        .filter(|a| question.agents.has(*a))
        .collect();
    let mut about = Vec::new();
    let mut parsed = Vec::new();
    // Files that the agents judge: all but files that would take too much to try.
    let mut tried: Vec<&SpecText> = Vec::new();
    // Nodes of each tried file; none of a file that only an agent may be able to parse.
    let mut nodes: Vec<Vec<NodeLook>> = Vec::new();
    let mut budget = Budget::default();
    // Verdict of the agents where a file was left out.
    let mut left_out = if findings.iter().all(|f| f.rule == &NOT_READ) {
        None
    } else {
        Some(LEFT_OUT.to_string())
    };
    for text in &files {
        let mut file = File {
            name: text.name.clone(),
            bytes: text.text.len(),
            kind: None,
            declared: None,
            minimum: None,
            devices: 0,
        };
        match look_into(text, &question.look, &mut budget, &mut findings)? {
            Looked::TooMuch => left_out = left_out.or(Some(LEFT_OUT.to_string())),
            Looked::NotTried(error) => left_out = Some(format!("{}: {error}", text.name)),
            Looked::Unparsed => {
                tried.push(text);
                nodes.push(Vec::new());
            }
            Looked::Parsed(document) => {
                file.kind = document.value.get("kind").and_then(as_text);
                file.declared = document.value.get("cdiVersion").and_then(as_text);
                file.minimum = Some(document.shaped.minimum());
                file.devices = names(&document.value).count();
                tried.push(text);
                nodes.push(document.nodes.clone());
                parsed.push(document);
            }
        }
        about.push(file);
    }
    let documents: Vec<Document> = parsed.iter().map(Parsed::document).collect();
    findings.extend(rules::across(&documents));
    let court = Court::new(&tried)?;
    agree(&mut findings, &tried, &court, &agents);
    let mut report = Report {
        assumed: parsed
            .iter()
            .flat_map(|p| &p.nodes)
            .filter(|n| n.found == super::look::Found::Assumed)
            .count(),
        files: about,
        ignored,
        verdicts: agents
            .iter()
            .map(|agent| Verdict {
                agent: *agent,
                refused: refusal(*agent, &tried, &court, left_out.as_deref()),
            })
            .collect(),
        asked: Vec::new(),
        not_tried: 0,
        findings,
    };
    let loading = report
        .verdicts
        .iter()
        .filter(|v| v.refused.is_none())
        .map(|v| v.agent);
    let mut injectors: Vec<(Agent, Result<Inject, String>)> = loading
        .map(|agent| (agent, court.injector(agent, &nodes)))
        .collect();
    let (asked, not_tried) = asked(&parsed, &question.devices)?;
    report.not_tried = not_tried;
    for devices in asked {
        let waits = waits(&parsed, &devices);
        let outcomes = injectors
            .iter_mut()
            .map(|(agent, injector)| (*agent, outcome(injector, &devices, &waits)))
            .collect();
        report.asked.push(Asked { devices, outcomes });
    }
    report.judge_asked(&parsed, question);
    report
        .findings
        .retain(|f| f.agents.and(question.agents).any());
    let position = |f: &Finding| report.files.iter().position(|file| file.name == f.file);
    report
        .findings
        .sort_by_cached_key(|f| (f.rule.severity, position(f), f.file.clone()));
    Ok(report)
}

/// Cost of all files so far.
#[derive(Default)]
struct Budget {
    copies: usize,
    entries: usize,
}

/// Number of device nodes and mounts.
fn size(scope: &Scope) -> usize {
    ["deviceNodes", "mounts"]
        .iter()
        .map(|list| entries(scope, list).count())
        .sum()
}

enum Looked<'a> {
    Parsed(Parsed<'a>),
    /// Not parsed here, but small enough for the agents.
    Unparsed,
    NotTried(String),
    TooMuch,
}

fn look_into<'a>(
    text: &'a SpecText,
    look: &Look,
    budget: &mut Budget,
    findings: &mut Vec<Finding>,
) -> Result<Looked<'a>> {
    let file = text.name.as_str();
    if let Some(name) = spec_files::alias(&text.text) {
        findings.push(Finding::new(&ALIASES, file, "").value(format!("&{name}")));
        return Ok(Looked::TooMuch);
    }
    let too_much =
        |pointer: &str, value: String| Finding::new(&TOO_MUCH, file, pointer).value(value);
    let brackets = text
        .text
        .iter()
        .filter(|b| matches!(b, b'[' | b'{'))
        .count();
    // JSON that parses is not deep: the parser limits its depth.
    if brackets > MAX_BRACKETS
        && serde_json::from_slice::<serde::de::IgnoredAny>(&text.text).is_err()
    {
        findings.push(too_much(
            "",
            format!("{brackets} opening brackets, and no JSON"),
        ));
        return Ok(Looked::TooMuch);
    }
    let value = match parse(&text.text) {
        Ok(value) => value,
        Err(error) => {
            findings.push(Finding::new(&NOT_PARSED, file, "").value(&error));
            // An agent may parse this file, and find as many devices in it as there is room for.
            budget.copies = budget.copies.saturating_add(
                text.text
                    .len()
                    .saturating_mul(text.text.len() / LEAST_DEVICE),
            );
            return Ok(if budget.copies > MAX_COPIES {
                Looked::NotTried(error)
            } else {
                Looked::Unparsed
            });
        }
    };
    if ["cdiVersion", "kind", "devices"]
        .iter()
        .all(|field| value.get(field).is_none())
    {
        findings.push(Finding::new(&NOT_A_SPEC, file, ""));
        return Ok(Looked::Unparsed);
    }
    let devices = value
        .get("devices")
        .and_then(Value::as_array)
        .map_or(0, Vec::len);
    budget.copies = budget
        .copies
        .saturating_add(devices.saturating_mul(text.text.len()));
    if budget.copies > MAX_COPIES {
        findings.push(too_much(
            "/devices",
            format!("{devices} devices in {} bytes", text.text.len()),
        ));
        return Ok(Looked::TooMuch);
    }
    let entries: usize = scopes(&value).map(|scope| size(&scope)).sum();
    budget.entries += entries;
    if budget.entries > MAX_ENTRIES {
        findings.push(too_much("", format!("{entries} device nodes and mounts")));
        return Ok(Looked::TooMuch);
    }
    let mut shaped = shape::check(file, &value);
    findings.append(&mut shaped.findings);
    let parsed = Parsed {
        text,
        nodes: looks(&value, look)?,
        value,
        shaped,
    };
    findings.extend(rules::check(&parsed.document(), &parsed.shaped, look)?);
    Ok(Looked::Parsed(parsed))
}

/// Lets the agents' crates decide whether a file is loaded.
fn agree(findings: &mut Vec<Finding>, tried: &[&SpecText], court: &Court, agents: &[Agent]) {
    for (index, text) in tried.iter().enumerate() {
        let said: Vec<(Agent, Option<String>)> = agents
            .iter()
            .map(|agent| (*agent, court.load(*agent, index).err()))
            .collect();
        let refusing =
            Agents::which(|agent| said.iter().any(|(a, error)| *a == agent && error.is_some()));
        for finding in findings
            .iter_mut()
            .filter(|f| f.rule.refuses && f.file == text.name)
        {
            finding.agents = finding.agents.and(refusing);
        }
        findings.retain(|f| f.agents.any());
        let explained = |agent| {
            findings
                .iter()
                .any(|f| f.rule.refuses && f.file == text.name && f.agents.has(agent))
        };
        let unexplained: Vec<(Agent, String)> = said
            .into_iter()
            .filter_map(|(a, e)| Some((a, e?)))
            .filter(|(a, _)| !explained(*a))
            .collect();
        let which = Agents::which(|agent| unexplained.iter().any(|(a, _)| *a == agent));
        if let Some((_, error)) = unexplained.last() {
            findings.push(
                Finding::new(&REFUSED, &text.name, "")
                    .value(error)
                    .agents(which),
            );
        }
    }
}

fn refusal(
    agent: Agent,
    tried: &[&SpecText],
    court: &Court,
    left_out: Option<&str>,
) -> Option<String> {
    let first = tried.iter().enumerate().find_map(|(index, text)| {
        Some(format!(
            "{}: {}",
            text.name,
            court.load(agent, index).err()?
        ))
    });
    match court.load_all(agent) {
        Err(error) => Some(first.unwrap_or(error)),
        Ok(()) => left_out.map(str::to_string),
    }
}

/// Devices of each container to try; and how many devices were left out.
fn asked(parsed: &[Parsed], devices: &[String]) -> Result<(Vec<Vec<String>>, usize)> {
    let kinds: BTreeSet<String> = parsed
        .iter()
        .filter_map(|p| p.value.get("kind").and_then(as_text))
        .collect();
    if !devices.is_empty() {
        // A bare name is of the only kind, else of the kind that Kata asks for.
        let kind = if kinds.len() == 1 {
            kinds.first().cloned()
        } else {
            None
        }
        .unwrap_or_else(|| KIND.to_string());
        let qualified = |name: &String| {
            if name.contains('=') {
                name.clone()
            } else {
                format!("{kind}={name}")
            }
        };
        let devices: Vec<String> = devices.iter().map(qualified).collect();
        ensure!(
            devices.iter().all(|d| !d.ends_with('=')),
            "a device needs a name, like {KIND}=0"
        );
        return Ok((vec![devices], 0));
    }
    let mut all: Vec<Vec<String>> = Vec::new();
    let (mut listed, mut comparisons) = (BTreeSet::new(), 0);
    for one in parsed {
        let kind = one.value.get("kind").and_then(as_text).unwrap_or_default();
        let beside = scopes(&one.value)
            .find(|s| s.device.is_none())
            .map_or(0, |s| size(&s));
        let own: HashMap<usize, usize> = scopes(&one.value)
            .filter_map(|s| Some((s.device?, size(&s))))
            .collect();
        for (index, name) in names(&one.value) {
            let device = format!("{kind}={name}");
            if !listed.insert(device.clone()) {
                continue;
            }
            comparisons += (beside + own.get(&index).copied().unwrap_or_default()).pow(2);
            if all.is_empty() || all.len() < MAX_ASKED && comparisons <= MAX_COMPARISONS {
                all.push(vec![device]);
            }
        }
    }
    let not_tried = listed.len() - all.len();
    Ok((all, not_tried))
}

/// Paths without a device node that an injection of these devices looks at.
fn waits(parsed: &[Parsed], devices: &[String]) -> Vec<String> {
    let mut paths = BTreeSet::new();
    for one in parsed {
        let kind = one.value.get("kind").and_then(as_text).unwrap_or_default();
        let own: BTreeSet<usize> = names(&one.value)
            .filter(|(_, name)| devices.contains(&format!("{kind}={name}")))
            .map(|(index, _)| index)
            .collect();
        if own.is_empty() {
            continue;
        }
        let missing = one
            .nodes
            .iter()
            .filter(|n| n.is_missing() && n.device.is_none_or(|d| own.contains(&d)));
        paths.extend(missing.map(|n| n.path.clone()));
    }
    paths.into_iter().collect()
}

fn outcome(injector: &mut Result<Inject, String>, devices: &[String], waits: &[String]) -> Outcome {
    let inject = match injector {
        Ok(inject) => inject,
        Err(error) => return Outcome::Fails(error.clone()),
    };
    match inject(devices).and_then(|oci| Container::of(&oci)) {
        Ok(container) => Outcome::Gets(container),
        Err(error) if waits.is_empty() || error.contains("unresolvable") => Outcome::Fails(error),
        Err(_) => Outcome::Waits(waits.to_vec()),
    }
}

impl Report {
    /// Findings about the devices that are asked for.
    fn judge_asked(&mut self, parsed: &[Parsed], question: &Question) {
        let known: BTreeSet<String> = (parsed.iter())
            .flat_map(|p| {
                let kind = p.value.get("kind").and_then(as_text).unwrap_or_default();
                names(&p.value).map(move |(_, name)| format!("{kind}={name}"))
            })
            .collect();
        let by_name = if question.devices.is_empty() {
            &[]
        } else {
            self.asked.as_slice()
        };
        for device in by_name
            .iter()
            .flat_map(|a| &a.devices)
            .filter(|d| !known.is_empty() && !known.contains(*d))
        {
            self.findings
                .push(Finding::new(&UNRESOLVABLE, "", "").value(device));
        }
        for asked in &self.asked {
            let devices = asked.devices.join(", ");
            let failed = |agent: Agent| {
                asked
                    .outcomes
                    .iter()
                    .any(|(a, o)| *a == agent && matches!(o, Outcome::Fails(_)))
            };
            let explained = asked.devices.iter().any(|d| !known.contains(d))
                || self.findings.iter().any(|f| is_about_injection(f.rule));
            if let Some((_, Outcome::Fails(error))) =
                asked.outcomes.iter().find(|(a, _)| failed(*a))
                && !explained
            {
                let finding =
                    Finding::new(&NOT_INJECTED, "", "").value(format!("{devices}: {error}"));
                self.findings.push(finding.agents(Agents::which(failed)));
            }
            let waiting = asked
                .outcomes
                .iter()
                .any(|(_, o)| matches!(o, Outcome::Waits(_)));
            if question.require_resolvable && waiting {
                self.findings
                    .push(Finding::new(&NOT_RESOLVABLE, "", "").value(&devices));
            }
        }
    }

    /// Whether something is wrong enough for an exit status of 1.
    pub fn has_errors(&self) -> bool {
        self.findings
            .iter()
            .any(|f| f.rule.severity == Severity::Error)
    }

    /// The report as JSON.
    pub fn json(&self) -> Value {
        json!({
            "files": self.files.iter().map(|f| json!({
                "name": f.name, "bytes": f.bytes, "kind": f.kind, "cdiVersion": f.declared,
                "minimumVersion": f.minimum.map(|v| v.to_string()), "devices": f.devices,
            })).collect::<Vec<_>>(),
            "ignored": self.ignored,
            "agents": self.verdicts.iter().map(|v| json!({"kata": v.agent.name(), "loads": v.refused.is_none(), "error": v.refused})).collect::<Vec<_>>(),
            "containers": self.asked.iter().map(|a| json!({
                "devices": a.devices,
                "outcomes": a.outcomes.iter().map(|(agent, outcome)| match outcome {
                    Outcome::Gets(container) => json!({"kata": agent.name(), "state": "resolvable", "gets": container}),
                    Outcome::Waits(paths) => json!({"kata": agent.name(), "state": "waiting", "for": paths}),
                    Outcome::Fails(error) => json!({"kata": agent.name(), "state": "fails", "error": error}),
                }).collect::<Vec<_>>(),
            })).collect::<Vec<_>>(),
            "notTried": self.not_tried,
            "findings": self.findings.iter().map(Finding::json).collect::<Vec<_>>(),
        })
    }
}

fn is_about_injection(rule: &Rule) -> bool {
    [&NOT_A_NODE, &NODE_TYPE_DIFFERS].contains(&rule)
}
