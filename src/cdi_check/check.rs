//! The whole check: files in; agents' verdicts, containers and problems out. Prints nothing.

use super::agents::{Agent, Copies, Inject, is_pending, looked_at};
use super::container::Container;
use super::spec_files::SpecFile;
use anyhow::{Result, ensure};
use kata_gpu_init::cdi::spec::KIND;
use kata_gpu_wire::failure::VERDICT;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};

/// Most bytes times devices of a file that is tried: agents keep a copy of the whole spec for each
/// of its devices. The reference spec (8 GPUs under two names each) has 0.6 MB.
const MAX_COPIES: usize = 8 << 20;
/// Most device nodes and mounts of all files: agents search all of them for each that they add. The
/// reference spec has 51.
const MAX_EDITS: usize = 4000;
/// Most comparisons of nodes and mounts where no device was asked for; about 20 ns each.
const MAX_COMPARISONS: usize = 50_000_000;
/// Most devices that are injected one by one where no device was asked for.
const MAX_ASKED: usize = 256;

/// Nodes that open a MIG instance, one for its GPU instance and one for its compute instance.
const CAPABILITIES: &str = "/dev/nvidia-caps/nvidia-cap";

/// A spec file in the report.
#[derive(Debug)]
pub struct File {
    pub name: String,
    pub bytes: usize,
    pub kind: Option<String>,
    pub version: Option<String>,
    pub devices: usize,
}

/// Whether an agent loads the files together.
#[derive(Debug)]
pub struct Verdict {
    pub agent: Agent,
    /// Error for which the agent loads none; None if it loads them.
    pub refused: Option<String>,
}

/// Result of an injection into a container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    Gets(Container),
    /// Paths that stand for GPUs that are not ready, for which the agent waits.
    Waits(Vec<String>),
    Fails(String),
    /// The container fails by the verdict that the spec has for a failed GPU.
    HasFailedGpu(String),
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
    pub verdicts: Vec<Verdict>,
    pub asked: Vec<Asked>,
    /// Devices that are listed and were not tried.
    pub not_tried: usize,
    /// Faults that no agent reports.
    pub problems: Vec<String>,
}

/// Checks the files that were read. `devices`: those of one container; if empty, each listed device
/// in a container of its own.
pub fn check(files: &[SpecFile], devices: &[String]) -> Result<Report> {
    let copies = Copies::new(files)?;
    let mut report = Report {
        files: Vec::new(),
        verdicts: Vec::new(),
        asked: Vec::new(),
        not_tried: 0,
        problems: Vec::new(),
    };
    for agent in Agent::ALL {
        let documents = copies.documents(agent);
        let parsed: Vec<Value> = documents.iter().flatten().cloned().collect();
        for (file, document) in files.iter().zip(&documents) {
            let devices = document.as_ref().map_or(0, |d| names(d).len());
            ensure!(
                devices.saturating_mul(file.text.len()) <= MAX_COPIES,
                "{}: {devices} devices in {} bytes are too much to try",
                file.name,
                file.text.len()
            );
        }
        let edits: usize = parsed.iter().map(edits).sum();
        ensure!(
            edits <= MAX_EDITS,
            "{edits} device nodes and mounts are too much to try"
        );
        let refused = copies.load(agent).err();
        if report.files.is_empty() || refused.is_none() {
            report.files = files.iter().zip(&documents).map(about).collect();
            report.problems = vfio(&report.files, &documents);
        }
        if refused.is_none() {
            let listed: BTreeMap<String, Vec<String>> = parsed.iter().flat_map(waits).collect();
            let bare: Vec<String> = parsed.iter().flat_map(bare).collect();
            report.ask(&listed, devices, edits)?;
            let mut injector = copies.injector(agent, parsed);
            for asked in &mut report.asked {
                let outcome = match asked.devices.iter().find(|d| bare.contains(d)) {
                    Some(instance) => Outcome::Fails(format!(
                        "{instance} is a MIG instance without its two nodes \
                         {CAPABILITIES}<minor>: CUDA finds no device"
                    )),
                    None => outcome(&mut injector, &asked.devices, &listed),
                };
                asked.outcomes.push((agent, outcome));
            }
        }
        report.verdicts.push(Verdict { agent, refused });
    }
    Ok(report)
}

fn about((file, document): (&SpecFile, &Result<Value, String>)) -> File {
    let document = document.as_ref().ok();
    let text = |field| Some(document?.get(field)?.as_str()?.to_string());
    File {
        name: file.name.clone(),
        bytes: file.text.len(),
        kind: text("kind"),
        version: text("cdiVersion"),
        devices: document.map_or(0, |d| names(d).len()),
    }
}

/// The edits next to `devices`, then those of each device.
fn scopes(document: &Value) -> impl Iterator<Item = &Value> {
    let devices = document.get("devices").and_then(Value::as_array);
    let own = devices.into_iter().flatten();
    std::iter::once(document)
        .chain(own)
        .filter_map(|of| of.get("containerEdits"))
}

fn list<'a>(edits: &'a Value, name: &str) -> &'a [Value] {
    let list = edits.get(name).and_then(Value::as_array);
    list.map(Vec::as_slice).unwrap_or_default()
}

fn edits(document: &Value) -> usize {
    scopes(document)
        .map(|edits| list(edits, "deviceNodes").len() + list(edits, "mounts").len())
        .sum()
}

/// Qualified names of the devices.
fn names(document: &Value) -> Vec<String> {
    let kind = document.get("kind").and_then(Value::as_str);
    let named = |device: &Value| Some(format!("{}={}", kind?, device.get("name")?.as_str()?));
    list(document, "devices").iter().filter_map(named).collect()
}

/// Each device, with the paths of GPUs that are not ready among its nodes.
fn waits(document: &Value) -> Vec<(String, Vec<String>)> {
    let pending = |of: &Value| -> Vec<String> {
        let nodes = list(
            of.get("containerEdits").unwrap_or(&Value::Null),
            "deviceNodes",
        );
        let paths = nodes.iter().filter_map(|n| looked_at(n.as_object()?));
        paths
            .filter(|p| is_pending(p))
            .map(str::to_string)
            .collect()
    };
    let common = pending(document);
    let own = list(document, "devices").iter().map(pending);
    let all = own.map(|own| [common.clone(), own].concat());
    names(document).into_iter().zip(all).collect()
}

/// MIG instances (`0:1`, `mig0:1`, `MIG-..`) without the nodes of both their capabilities.
fn bare(document: &Value) -> Vec<String> {
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    let is_instance = |qualified: &str| {
        let name = qualified
            .strip_prefix(KIND)
            .and_then(|n| n.strip_prefix('='));
        name.is_some_and(|name| {
            let pair = name.strip_prefix("mig").unwrap_or(name).split_once(':');
            name.starts_with("MIG-") || pair.is_some_and(|(gpu, i)| is_number(gpu) && is_number(i))
        })
    };
    let capabilities = |of: &Value| {
        let edits = of.get("containerEdits").unwrap_or(&Value::Null);
        let nodes = list(edits, "deviceNodes").iter();
        let paths = nodes.filter_map(|node| node.get("path")?.as_str());
        paths.filter(|path| path.starts_with(CAPABILITIES)).count()
    };
    let common = capabilities(document);
    let own = list(document, "devices").iter().map(capabilities);
    let all = names(document).into_iter().zip(own);
    all.filter(|(name, own)| is_instance(name) && common + own < 2)
        .map(|(name, _)| name)
        .collect()
}

/// Specs with nodes of VFIO: a host's, for the passthrough of whole GPUs to guests.
fn vfio(files: &[File], documents: &[Result<Value, String>]) -> Vec<String> {
    let mut problems = Vec::new();
    for (file, document) in files.iter().zip(documents) {
        let Ok(document) = document else { continue };
        let nodes = scopes(document).flat_map(|edits| list(edits, "deviceNodes"));
        let mut paths = nodes.filter_map(|node| node.get("path")?.as_str());
        if let Some(path) = paths.find(|p| p.starts_with("/dev/vfio/") || *p == "/dev/iommu") {
            problems.push(format!(
                "{}: {path} is a node of VFIO: this is a host's spec, which passes whole GPUs to \
                 guests; a guest's spec lists /dev/nvidiactl and /dev/nvidia<minor>",
                file.name
            ));
        }
    }
    problems
}

fn outcome(
    injector: &mut Result<Inject, String>,
    devices: &[String],
    listed: &BTreeMap<String, Vec<String>>,
) -> Outcome {
    let waits = devices.iter().filter_map(|d| listed.get(d)).flatten();
    let waits: BTreeSet<String> = waits.cloned().collect();
    let inject = match injector {
        Ok(inject) => inject,
        Err(error) => return Outcome::Fails(error.clone()),
    };
    match inject(devices) {
        Ok(container) => match container.refused_mount() {
            None => Outcome::Gets(container),
            Some(words) if words.starts_with(VERDICT) => Outcome::HasFailedGpu(words.into()),
            Some(other) => Outcome::Fails(format!("the mount destination {other} is invalid")),
        },
        Err(error) if waits.is_empty() || error.contains("unresolvable") => Outcome::Fails(error),
        Err(_) => Outcome::Waits(waits.into_iter().collect()),
    }
}

impl Report {
    /// Fills in the containers to try, from the first agent that loads the files.
    fn ask(
        &mut self,
        listed: &BTreeMap<String, Vec<String>>,
        devices: &[String],
        edits: usize,
    ) -> Result<()> {
        if !self.asked.is_empty() {
            return Ok(());
        }
        let asked = |devices| Asked {
            devices,
            outcomes: Vec::new(),
        };
        if devices.is_empty() {
            let most = MAX_COMPARISONS / edits.pow(2).max(1);
            let tried = listed.keys().take(most.clamp(1, MAX_ASKED));
            self.asked = tried.map(|device| asked(vec![device.clone()])).collect();
            self.not_tried = listed.len() - self.asked.len();
            return Ok(());
        }
        // A bare name is of the only kind, else of the kind that Kata asks for.
        let kinds: BTreeSet<&String> = self.files.iter().flat_map(|f| &f.kind).collect();
        let kind = match kinds.first() {
            Some(only) if kinds.len() == 1 => only.as_str(),
            _ => KIND,
        };
        let qualified = |name: &String| match name.contains('=') {
            true => name.clone(),
            false => format!("{kind}={name}"),
        };
        let devices: Vec<String> = devices.iter().map(qualified).collect();
        ensure!(
            devices.iter().all(|d| !d.ends_with('=')),
            "a device needs a name, like {KIND}=0"
        );
        self.asked = vec![asked(devices)];
        Ok(())
    }

    /// Whether an agent refuses the files, a container fails, or there is another problem.
    pub fn has_errors(&self) -> bool {
        let mut outcomes = self.asked.iter().flat_map(|asked| &asked.outcomes);
        !self.problems.is_empty()
            || self.verdicts.iter().any(|v| v.refused.is_some())
            || outcomes.any(|(_, outcome)| matches!(outcome, Outcome::Fails(_)))
    }

    /// The report as JSON.
    pub fn json(&self) -> Value {
        let outcome = |(agent, outcome): &(Agent, Outcome)| {
            let kata = agent.name();
            match outcome {
                Outcome::Gets(gets) => json!({"kata": kata, "state": "resolvable", "gets": gets}),
                Outcome::Waits(paths) => json!({"kata": kata, "state": "waiting", "for": paths}),
                Outcome::Fails(error) => json!({"kata": kata, "state": "fails", "error": error}),
                Outcome::HasFailedGpu(verdict) => {
                    json!({"kata": kata, "state": "failed-gpu", "verdict": verdict})
                }
            }
        };
        let files = self.files.iter().map(|f| {
            json!({
                "name": f.name, "bytes": f.bytes, "kind": f.kind, "cdiVersion": f.version,
                "devices": f.devices,
            })
        });
        let agents = self.verdicts.iter().map(
            |v| json!({"kata": v.agent.name(), "loads": v.refused.is_none(), "error": v.refused}),
        );
        let containers = self.asked.iter().map(|a| {
            let outcomes: Vec<Value> = a.outcomes.iter().map(outcome).collect();
            json!({"devices": a.devices, "outcomes": outcomes})
        });
        json!({
            "files": files.collect::<Vec<_>>(),
            "agents": agents.collect::<Vec<_>>(),
            "containers": containers.collect::<Vec<_>>(),
            "notTried": self.not_tried,
            "problems": self.problems,
        })
    }
}
