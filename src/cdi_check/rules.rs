//! Rules for a spec of the right shape: names, paths, hooks, mounts, modes, and nodes that a GPU
//! needs.

use super::look::{Found, Look};
use super::nodes::{NodeLook, Scope, entries, scopes, text};
use super::shape::{HIGHEST_OF_KATA3, Shaped, released};
use super::spec_rules::*;
use anyhow::Result;
use kata_gpu_init::cdi::spec::KIND;
use serde_json::Value;
use std::collections::{BTreeMap, HashMap, HashSet};

/// Largest size of all files of a directory together that is no finding: the reference spec of 8
/// GPUs has half of it.
const SLOW_BYTES: usize = 64 << 10;
/// PATH_MAX: a longer path cannot be mounted on and is skipped.
const MAX_PATH: usize = 4096;
/// Hooks that an agent runs.
const RUN: [&str; 5] = [
    "prestart",
    "createContainer",
    "startContainer",
    "poststart",
    "poststop",
];
/// Hook that an agent does not run.
const NOT_RUN: &str = "createRuntime";
/// Variables that images set, and whose first value wins.
const SHADOWED: [&str; 3] = ["PATH", "LD_LIBRARY_PATH", "LD_PRELOAD"];
const CONTROL_NODE: &str = "/dev/nvidiactl";
const UVM_NODE: &str = "/dev/nvidia-uvm";

/// A file, parsed.
pub struct Document<'a> {
    pub file: &'a str,
    pub bytes: usize,
    pub value: &'a Value,
    pub nodes: &'a [NodeLook],
}

/// Findings about one file, apart from its shape.
pub fn check(document: &Document, shaped: &Shaped, look: &Look) -> Result<Vec<Finding>> {
    let mut out = Rules {
        document,
        look,
        findings: Vec::new(),
    };
    out.version(shaped);
    out.names();
    for scope in scopes(document.value) {
        out.edits(&scope)?;
    }
    out.nodes_looked_at();
    out.mount_order();
    out.gpu();
    Ok(out.findings)
}

/// Findings about the files together.
pub fn across(documents: &[Document]) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut by_name: BTreeMap<String, Vec<&Document>> = BTreeMap::new();
    let mut by_kind: BTreeMap<String, Vec<&Document>> = BTreeMap::new();
    for document in documents {
        let Some(kind) = text(document.value, "kind") else {
            continue;
        };
        // A name twice within a file is another rule's finding.
        let own: HashSet<String> = names(document.value)
            .map(|(_, name)| format!("{kind}={name}"))
            .collect();
        own.into_iter()
            .for_each(|name| by_name.entry(name).or_default().push(document));
        if scopes(document.value).any(|s| {
            s.device.is_none() && (filled(s.edits, "hooks") || filled(s.edits, "deviceNodes"))
        }) {
            by_kind.entry(kind).or_default().push(document);
        }
    }
    let files = |documents: &[&Document]| {
        documents
            .iter()
            .map(|d| d.file)
            .collect::<Vec<_>>()
            .join(", ")
    };
    for (name, documents) in by_name.iter().filter(|(_, d)| d.len() > 1) {
        findings.push(
            Finding::new(&IN_TWO_FILES, documents[0].file, "/devices")
                .value(format!("{name} in {}", files(documents))),
        );
    }
    for (kind, documents) in by_kind.iter().filter(|(_, d)| d.len() > 1) {
        findings.push(
            Finding::new(&EDITS_REPEATED, documents[0].file, "/containerEdits")
                .value(format!("{kind} in {}", files(documents))),
        );
    }
    let bytes: usize = documents.iter().map(|d| d.bytes).sum();
    if bytes > SLOW_BYTES
        && let Some(largest) = documents.iter().max_by_key(|d| d.bytes)
    {
        findings.push(Finding::new(&SLOW, largest.file, "").value(format!(
            "{bytes} bytes in all, about {} ms",
            parse_ms(bytes)
        )));
    }
    findings
}

/// Milliseconds that an agent takes to parse that many bytes, at every try.
pub fn parse_ms(bytes: usize) -> usize {
    (bytes * 10).div_ceil(32 << 10)
}

/// The devices' names with their indices, as the agent takes them.
pub fn names(document: &Value) -> impl Iterator<Item = (usize, String)> {
    let devices = document
        .get("devices")
        .and_then(Value::as_array)
        .into_iter()
        .flatten()
        .enumerate();
    devices.filter_map(|(index, device)| Some((index, text(device, "name")?)))
}

fn filled(object: &Value, list: &str) -> bool {
    object
        .get(list)
        .and_then(Value::as_array)
        .is_some_and(|l| !l.is_empty())
}

struct Rules<'a> {
    document: &'a Document<'a>,
    look: &'a Look,
    findings: Vec<Finding>,
}

impl Rules<'_> {
    fn found(&mut self, rule: &'static Rule, pointer: impl Into<String>, value: impl ToString) {
        self.findings
            .push(Finding::new(rule, self.document.file, pointer).value(value));
    }

    fn version(&mut self, shaped: &Shaped) {
        let Some(declared) = text(self.document.value, "cdiVersion") else {
            return;
        };
        let minimum = shaped.minimum();
        let at = |rule| Finding::new(rule, self.document.file, "/cdiVersion").value(&declared);
        let finding = match released(&declared) {
            None => at(&VERSION_UNKNOWN).cure(format!("declare {minimum}")),
            Some(version) if version < minimum => {
                let needs = shaped
                    .need
                    .as_ref()
                    .map(|n| format!("; {} needs it", n.pointer))
                    .unwrap_or_default();
                at(&VERSION_TOO_LOW).cure(format!("declare {minimum}{needs}"))
            }
            Some(version) if version > HIGHEST_OF_KATA3 => {
                at(&VERSION_TOO_NEW).cure(match &shaped.need {
                    Some(need) if need.version > HIGHEST_OF_KATA3 => {
                        format!("do without {}, and declare a lower version", need.pointer)
                    }
                    _ => format!("declare {minimum}, which suffices"),
                })
            }
            Some(_) => return,
        };
        self.findings.push(finding);
    }

    fn names(&mut self) {
        let value = self.document.value;
        if let Some(kind) = text(value, "kind") {
            let parts = kind.split_once('/').filter(|(vendor, class)| {
                !vendor.is_empty() && !class.is_empty() && !class.contains('/')
            });
            let good = |agent| {
                parts.is_some_and(|(vendor, class)| {
                    [vendor, class]
                        .iter()
                        .all(|p| is_name(agent, p, &['-', '_', '.'], true))
                })
            };
            self.refused_name(
                &KIND_INVALID,
                "/kind".into(),
                kind.clone(),
                Agents::which(|a| !good(a)),
            );
        }
        let Some(devices) = value.get("devices").and_then(Value::as_array) else {
            return;
        };
        if devices.is_empty() {
            self.findings
                .push(Finding::new(&NO_DEVICES, self.document.file, "/devices"));
        }
        let mut seen = HashSet::new();
        for (index, name) in names(value) {
            let pointer = format!("/devices/{index}/name");
            let bad = Agents::which(|agent| !is_name(agent, &name, &['-', '_', '.', ':'], false));
            self.refused_name(&NAME_INVALID, pointer.clone(), name.clone(), bad);
            if !seen.insert(name.clone()) {
                self.found(&NAME_TWICE, pointer, name);
            }
        }
        for (index, device) in devices.iter().enumerate() {
            let Some(edits) = device.get("containerEdits").and_then(Value::as_object) else {
                continue;
            };
            let used = edits.iter().any(|(name, edit)| match edit {
                Value::Array(list) => !list.is_empty(),
                Value::Null => false,
                _ => name == "intelRdt",
            });
            if !used {
                let name = text(device, "name").unwrap_or_default();
                self.found(
                    &WITHOUT_EDITS,
                    format!("/devices/{index}/containerEdits"),
                    name,
                );
            }
        }
    }

    fn refused_name(&mut self, rule: &'static Rule, pointer: String, name: String, agents: Agents) {
        if agents.any() {
            self.findings.push(
                Finding::new(rule, self.document.file, pointer)
                    .value(name)
                    .agents(agents),
            );
        }
    }

    fn edits(&mut self, scope: &Scope) -> Result<()> {
        self.env(scope.edits, &format!("{}/env", scope.pointer), true);
        for (pointer, node) in entries(scope, "deviceNodes") {
            self.node(&pointer, node);
        }
        for (pointer, hook) in entries(scope, "hooks") {
            self.hook(&pointer, hook)?;
        }
        for (pointer, mount) in entries(scope, "mounts") {
            for field in ["hostPath", "containerPath"] {
                if text(mount, field).is_some_and(|p| p.is_empty()) {
                    self.found(&EMPTY_PATH, format!("{pointer}/{field}"), "");
                }
            }
            let source = text(mount, "hostPath").filter(|p| !p.is_empty());
            if let Some(source) = source
                && self.look.at(&source)? == Found::Missing
            {
                self.found(&MOUNT_SOURCE, format!("{pointer}/hostPath"), source);
            }
        }
        Ok(())
    }

    fn env(&mut self, object: &Value, pointer: &str, of_container: bool) {
        let mut set: HashMap<String, String> = HashMap::new();
        for (index, variable) in object
            .get("env")
            .and_then(Value::as_array)
            .into_iter()
            .flatten()
            .enumerate()
        {
            let Some(variable) = super::shape::as_text(variable) else {
                continue;
            };
            let pointer = format!("{pointer}/{index}");
            let (name, value) = match variable.split_once('=') {
                None => {
                    self.found(&ENV_INVALID, pointer, variable);
                    continue;
                }
                // Agents of Kata 3 want the sign alone.
                Some(("", _)) => {
                    self.refused_name(&ENV_INVALID, pointer, variable.clone(), Agents::KATA4);
                    continue;
                }
                Some((name, value)) => (name.to_string(), value.to_string()),
            };
            if !of_container {
                continue;
            }
            if SHADOWED.contains(&name.as_str()) {
                self.found(&ENV_SHADOWED, pointer.clone(), &variable);
            }
            if set
                .insert(name, value.clone())
                .is_some_and(|before| before != value)
            {
                self.found(&ENV_TWICE, pointer, variable);
            }
        }
    }

    fn node(&mut self, pointer: &str, node: &Value) {
        let path = text(node, "path").unwrap_or_default();
        if node.get("path").is_some() && path.is_empty() {
            self.found(&EMPTY_PATH, format!("{pointer}/path"), "");
        }
        if let Some(typed) = text(node, "type") {
            let known = ["b", "c", "u", "p", ""].contains(&typed.as_str());
            self.found(
                if known {
                    &NODE_TYPE
                } else {
                    &NODE_TYPE_INVALID
                },
                format!("{pointer}/type"),
                typed,
            );
        }
        if let Some(permissions) = text(node, "permissions") {
            let letters = permissions.chars().all(|c| matches!(c, 'r' | 'w' | 'm'));
            let bad = Agents {
                kata3: !letters,
                kata4: !letters && permissions != "none",
            };
            self.refused_name(
                &PERMISSIONS,
                format!("{pointer}/permissions"),
                permissions,
                bad,
            );
        }
        // The stand-in of a GPU that is not ready never becomes a node.
        let pending = self
            .document
            .nodes
            .iter()
            .any(|n| n.pending && n.pointer == pointer);
        match node.get("fileMode").filter(|m| !m.is_null()) {
            None if !pending => self.found(&FILE_MODE_UNSET, pointer, path),
            None => {}
            // Modes beyond 0777, and decimal numbers whose digits are those of a common octal mode.
            Some(mode) => match mode.as_u64() {
                Some(mode) if mode > 0o777 || matches!(mode, 400 | 440 | 444) => {
                    self.found(
                        &FILE_MODE_ODD,
                        format!("{pointer}/fileMode"),
                        format!("{mode} is 0{mode:o}"),
                    );
                }
                _ => {}
            },
        }
    }

    fn hook(&mut self, pointer: &str, hook: &Value) -> Result<()> {
        match text(hook, "hookName") {
            Some(name) if name == NOT_RUN => {
                self.found(&HOOK_NOT_RUN, format!("{pointer}/hookName"), name)
            }
            Some(name) if !RUN.contains(&name.as_str()) => {
                self.found(&HOOK_NAME, format!("{pointer}/hookName"), name)
            }
            _ => {}
        }
        if let Some(path) = text(hook, "path") {
            if path.is_empty() {
                self.found(&EMPTY_PATH, format!("{pointer}/path"), "");
            } else if !matches!(
                self.look.at(&path)?,
                Found::Assumed | Found::File { executable: true }
            ) {
                self.found(&HOOK_MISSING, format!("{pointer}/path"), path);
            }
        }
        self.env(hook, &format!("{pointer}/env"), false);
        if !filled(hook, "env") {
            let args = hook.get("args").and_then(Value::as_array).map(|a| {
                a.iter()
                    .filter_map(Value::as_str)
                    .collect::<Vec<_>>()
                    .join(" ")
            });
            self.found(
                &HOOK_ENV_EMPTY,
                pointer,
                args.unwrap_or_else(|| text(hook, "path").unwrap_or_default()),
            );
        }
        Ok(())
    }

    fn nodes_looked_at(&mut self) {
        // A node stands in the entry of its device, in the entry of `all`, and perhaps under
        // another name: report it once.
        let mut said = HashSet::new();
        for node in self
            .document
            .nodes
            .iter()
            .filter(|n| said.insert((&n.path, &n.typed)))
        {
            let rule = match &node.found {
                Found::Missing if node.pending => &WAITING,
                Found::Missing => &NODE_MISSING,
                Found::File { .. } | Found::Other => &NOT_A_NODE,
                Found::Node { kind, .. } if node.typed.as_deref().is_some_and(|t| t != *kind) => {
                    &NODE_TYPE_DIFFERS
                }
                // Nodes that the spec declares as a fifo are not looked at.
                Found::Fifo if node.typed.is_some() => &NODE_TYPE_DIFFERS,
                Found::Node { .. } | Found::Fifo | Found::Assumed => continue,
            };
            self.found(rule, node.pointer.clone(), &node.path);
        }
    }

    /// Checks mounts in an agent's order: mounts next to `devices`, then those of each device.
    fn mount_order(&mut self) {
        let mut findings = Vec::new();
        let mut beside = Mounted::default();
        for scope in scopes(self.document.value) {
            let mut own = Mounted::default();
            for (pointer, mount) in entries(&scope, "mounts") {
                let Some(target) = text(mount, "containerPath").filter(|t| t.len() <= MAX_PATH)
                else {
                    continue;
                };
                let target = path(&target);
                let before = if scope.device.is_some() {
                    Some(&beside)
                } else {
                    None
                };
                if before.is_some_and(|b| b.targets.contains(&target))
                    || own.targets.contains(&target)
                {
                    findings.push((
                        &MOUNT_TWICE,
                        format!("{pointer}/containerPath"),
                        target.clone(),
                    ));
                } else if let Some(covered) = own
                    .above
                    .get(&target)
                    .or_else(|| before?.above.get(&target))
                {
                    findings.push((
                        &MOUNT_ORDER,
                        format!("{pointer}/containerPath"),
                        format!("{target} after {covered}"),
                    ));
                }
                own.add(target);
            }
            if scope.device.is_none() {
                beside = own;
            }
        }
        findings
            .into_iter()
            .for_each(|(rule, pointer, value)| self.found(rule, pointer, value));
    }

    fn gpu(&mut self) {
        let value = self.document.value;
        if text(value, "kind").as_deref() != Some(KIND) {
            return;
        }
        if !names(value).any(|(_, name)| name.parse::<u16>().is_ok())
            && names(value).next().is_some()
        {
            self.findings
                .push(Finding::new(&NOT_BY_INDEX, self.document.file, "/devices"));
        }
        let paths = |scope: &Scope| {
            entries(scope, "deviceNodes")
                .filter_map(|(_, n)| text(n, "path"))
                .collect::<HashSet<_>>()
        };
        let beside = scopes(value)
            .find(|s| s.device.is_none())
            .map(|s| paths(&s))
            .unwrap_or_default();
        for (rule, wanted) in [(&NO_CONTROL_NODE, CONTROL_NODE), (&NO_UVM_NODE, UVM_NODE)] {
            let without = |scope: &Scope| {
                let own = paths(scope);
                // A device without a node of a GPU is something else, or a GPU that is not ready.
                own.iter().any(|p| is_gpu_node(p))
                    && !own.contains(wanted)
                    && !beside.contains(wanted)
            };
            let without: Vec<usize> = scopes(value)
                .filter(|s| s.device.is_some() && without(s))
                .filter_map(|s| s.device)
                .collect();
            if let Some(first) = without.first() {
                let name = names(value)
                    .find(|(index, _)| index == first)
                    .map(|(_, name)| name)
                    .unwrap_or_default();
                let more = if without.len() > 1 {
                    format!(" and {} more", without.len() - 1)
                } else {
                    String::new()
                };
                self.found(
                    rule,
                    format!("/devices/{first}/containerEdits/deviceNodes"),
                    format!("{KIND}={name}{more}"),
                );
            }
        }
    }
}

/// Targets of the mounts so far.
#[derive(Default)]
struct Mounted {
    targets: HashSet<String>,
    /// Directories above the targets, each with its first target.
    above: HashMap<String, String>,
}

impl Mounted {
    fn add(&mut self, target: String) {
        let mut end = target.len();
        while let Some(slash) = target.get(..end).and_then(|t| t.rfind('/')) {
            end = slash;
            let above = if end == 0 {
                "/"
            } else {
                target.get(..end).unwrap_or_default()
            };
            // Directories above this one were entered with it.
            if self.above.contains_key(above) || above == target {
                break;
            }
            self.above.insert(above.to_string(), target.clone());
        }
        self.targets.insert(target);
    }
}

/// The path without doubled and final slashes, and without `.`.
fn path(text: &str) -> String {
    let parts: Vec<&str> = text
        .split('/')
        .filter(|p| !p.is_empty() && *p != ".")
        .collect();
    format!("/{}", parts.join("/"))
}

/// `/dev/nvidia<number>`.
fn is_gpu_node(path: &str) -> bool {
    path.strip_prefix("/dev/nvidia")
        .is_some_and(|n| !n.is_empty() && n.bytes().all(|b| b.is_ascii_digit()))
}

/// Whether the agent takes this for a name of a vendor or class (`letter_first`), or of a device.
fn is_name(agent: Agent, name: &str, between: &[char], letter_first: bool) -> bool {
    let (first, last) = (name.chars().next(), name.chars().next_back());
    match agent {
        // Letters of any script are valid; the ends of a device's name are not checked.
        Agent::Kata3 => {
            first.is_some_and(|c| !letter_first || c.is_alphabetic())
                && name
                    .chars()
                    .all(|c| c.is_alphanumeric() || between.contains(&c))
        }
        Agent::Kata4 => {
            first.is_some_and(|c| {
                if letter_first {
                    c.is_ascii_alphabetic()
                } else {
                    c.is_ascii_alphanumeric()
                }
            }) && last.is_some_and(|c| c.is_ascii_alphanumeric())
                && name
                    .chars()
                    .all(|c| c.is_ascii_alphanumeric() || between.contains(&c))
        }
    }
}
