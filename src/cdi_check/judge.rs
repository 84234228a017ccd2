//! The judges: the crates that kata-agent itself reads specs with, in the versions that its
//! releases lock.
//!
//! The crates read private copies, so that they judge the bytes that were read. Where an agent
//! would look at a device node of the guest, the injected spec names a stand-in instead: /dev/null
//! for a node that is there, a name without a file for a missing node.

use super::look::Found;
use super::nodes::NodeLook;
use super::shape::{Version, released};
use super::spec_files::SpecText;
use super::spec_rules::Agent;
use anyhow::{Context, Result};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

/// Stands for the numbers of a device node that nobody has looked at.
pub const UNKNOWN: i64 = i64::MIN + 1;
/// The lowest version with hostPath, which stand-ins need.
const HOST_PATH_VERSION: Version = Version(0, 5, 0);
/// A character device of every machine.
const PRESENT: &str = "/dev/null";

/// OCI spec of a container with nothing of its own.
fn empty_container() -> Value {
    json!({
        "ociVersion": "1.0.2",
        "mounts": [],
        "process": {"user": {"uid": 0, "gid": 0}, "cwd": "/"},
        "linux": {},
    })
}

/// Injects devices, by their qualified names, into a container that has nothing; returns its OCI
/// spec.
pub type Inject = Box<dyn FnMut(&[String]) -> Result<Value, String>>;

macro_rules! judge {
    ($judge:ident, $krate:ident) => {
        mod $judge {
            use super::*;
            use $krate::cache::{Cache, new_cache, with_auto_refresh};
            use $krate::spec::{new_spec, parse_spec, read_spec};
            use $krate::spec_dirs::with_spec_dirs;
            use $krate::specs::config::Spec;

            pub fn load(path: &PathBuf) -> Result<(), String> {
                // Return the root cause alone: its context repeats whole lists of edits.
                read_spec(path, 0)
                    .map(drop)
                    .map_err(|e| e.root_cause().to_string())
            }

            pub fn refresh(dir: &str) -> Result<(), String> {
                let cache = new_cache(vec![with_auto_refresh(false), with_spec_dirs(&[dir])]);
                let mut cache = cache.lock().map_err(|e| e.to_string())?;
                cache.refresh().map_err(|e| e.to_string())
            }

            pub fn document(path: &PathBuf) -> Result<Value, String> {
                let spec: Spec = parse_spec(path).map_err(|e| format!("{e:#}"))?;
                serde_json::to_value(spec).map_err(|e| e.to_string())
            }

            pub fn injector(documents: Vec<(PathBuf, Value)>) -> Result<Inject, String> {
                let mut devices = std::collections::HashMap::new();
                for (path, document) in documents {
                    let spec: Spec = serde_json::from_value(document).map_err(|e| e.to_string())?;
                    let spec = new_spec(&spec, &path, 0).map_err(|e| format!("{e:#}"))?;
                    devices.extend(
                        spec.devices
                            .values()
                            .map(|d| (d.get_qualified_name(), d.clone())),
                    );
                }
                let mut cache = Cache::new(Vec::new(), std::collections::HashMap::new(), devices);
                Ok(Box::new(move |asked| {
                    let mut container =
                        serde_json::from_value(empty_container()).map_err(|e| e.to_string())?;
                    cache
                        .inject_devices(Some(&mut container), asked.to_vec())
                        .map_err(|e| e.to_string())?;
                    serde_json::to_value(container).map_err(|e| e.to_string())
                }))
            }
        }
    };
}

judge!(kata3, container_device_interface_0);
judge!(kata4, container_device_interface_1);

/// A document as the agents' YAML parser sees it, with every field that it has.
pub fn parse(text: &[u8]) -> Result<Value, String> {
    container_device_interface_1::schema::document_value(text).map_err(|e| format!("{e:#}"))
}

/// Copies of the specs, for the judges.
pub struct Court {
    dir: PathBuf,
    names: Vec<String>,
    paths: Vec<PathBuf>,
}

impl Drop for Court {
    fn drop(&mut self) {
        // The directory for temporary files is cleaned up by others, too.
        let _unused = std::fs::remove_dir_all(&self.dir);
    }
}

impl Court {
    pub fn new(files: &[&SpecText]) -> Result<Court> {
        let template = std::env::temp_dir().join("kata-gpu-boot-XXXXXX");
        let dir = nix::unistd::mkdtemp(&template)
            .with_context(|| format!("make a directory in {}", std::env::temp_dir().display()))?;
        let paths = (0..files.len())
            .map(|index| dir.join(format!("{index}.yaml")))
            .collect();
        let court = Court {
            dir,
            names: files.iter().map(|f| f.name.clone()).collect(),
            paths,
        };
        for (path, file) in court.paths.iter().zip(files) {
            std::fs::write(path, &file.text)
                .with_context(|| format!("write {}", path.display()))?;
        }
        Ok(court)
    }

    fn path(&self, index: usize) -> Result<&PathBuf, String> {
        self.paths
            .get(index)
            .ok_or_else(|| format!("there is no file {index}"))
    }

    /// A judge's text, with the names of the files instead of the copies' names.
    fn said(&self, text: String) -> String {
        let named = self
            .paths
            .iter()
            .zip(&self.names)
            .fold(text, |text, (path, name)| {
                text.replace(&path.display().to_string(), name)
            });
        named.replace(&self.dir.display().to_string(), "")
    }

    /// Whether the agent loads the file, if it were the only one.
    pub fn load(&self, agent: Agent, index: usize) -> Result<(), String> {
        let path = self.path(index)?;
        let load = match agent {
            Agent::Kata3 => kata3::load,
            Agent::Kata4 => kata4::load,
        };
        load(path).map_err(|e| self.said(e))
    }

    /// Whether the agent loads all files together.
    pub fn load_all(&self, agent: Agent) -> Result<(), String> {
        let dir = self.dir.display().to_string();
        let refresh = match agent {
            Agent::Kata3 => kata3::refresh,
            Agent::Kata4 => kata4::refresh,
        };
        refresh(&dir).map_err(|e| self.said(e))
    }

    /// Injector of the devices of all files. `nodes`: per file, the nodes that an agent looks at.
    pub fn injector(&self, agent: Agent, nodes: &[Vec<NodeLook>]) -> Result<Inject, String> {
        let mut documents = Vec::new();
        for (path, nodes) in self.paths.iter().zip(nodes) {
            let mut document = match agent {
                Agent::Kata3 => kata3::document(path)?,
                Agent::Kata4 => kata4::document(path)?,
            };
            stand_in(&mut document, nodes, agent, &self.dir)?;
            documents.push((path.clone(), document));
        }
        match agent {
            Agent::Kata3 => kata3::injector(documents),
            Agent::Kata4 => kata4::injector(documents),
        }
    }
}

/// Puts stand-ins where the agent would look at the guest.
fn stand_in(
    document: &mut Value,
    nodes: &[NodeLook],
    agent: Agent,
    dir: &Path,
) -> Result<(), String> {
    for look in nodes {
        let node = document
            .pointer_mut(&look.pointer)
            .and_then(Value::as_object_mut);
        let node =
            node.ok_or_else(|| format!("{}: the agent's parser sees no node there", look.pointer))?;
        let missing = |field: &str, node: &serde_json::Map<String, Value>| {
            node.get(field).is_none_or(Value::is_null)
        };
        let typed = node
            .get("type")
            .and_then(Value::as_str)
            .filter(|t| !t.is_empty())
            .map(str::to_string);
        let (there, numbers) = match &look.found {
            Found::Assumed => (PRESENT.to_string(), Some((UNKNOWN, UNKNOWN))),
            Found::Node { kind, .. } if typed.as_deref().is_some_and(|t| t != *kind) => {
                (dir.display().to_string(), None)
            }
            Found::Node { major, minor, .. } => (PRESENT.to_string(), Some((*major, *minor))),
            Found::Fifo if typed.is_some() => (dir.display().to_string(), None),
            Found::Fifo => (PRESENT.to_string(), Some((0, 0))),
            // A directory exists and is no device node.
            Found::File { .. } | Found::Other => (dir.display().to_string(), None),
            Found::Missing => (dir.join("absent").display().to_string(), None),
        };
        if let Some((major, minor)) = numbers {
            if missing("major", node) {
                node.insert("major".into(), major.into());
                node.insert("minor".into(), minor.into());
            }
            // Kata 3 agents refuse a type.
            match (&look.found, agent) {
                (Found::Node { kind, .. }, Agent::Kata4) => {
                    drop(node.insert("type".into(), (*kind).into()))
                }
                (Found::Fifo, Agent::Kata4) => drop(node.insert("type".into(), "p".into())),
                _ => {}
            }
        }
        node.insert("hostPath".into(), there.into());
    }
    if !nodes.is_empty() {
        let declared = document
            .get("cdiVersion")
            .and_then(Value::as_str)
            .and_then(released);
        if declared.is_some_and(|v| v < HOST_PATH_VERSION) {
            document["cdiVersion"] = HOST_PATH_VERSION.to_string().into();
        }
    }
    Ok(())
}
