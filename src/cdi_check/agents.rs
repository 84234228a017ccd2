//! The crates that kata-agent itself reads specs with, in the versions that its releases lock
//! (`src/agent/Cargo.lock`).
//!
//! The crates read private copies, so that they judge the bytes that were read. Where an agent
//! would look at a device node of the guest, the injected spec names a stand-in: /dev/null, or a
//! name without a file for a GPU that is not ready.

use super::container::{Container, UNKNOWN};
use super::spec_files::SpecFile;
use anyhow::{Context, Result};
use kata_gpu_init::cdi::spec::PENDING;
use serde_json::{Map, Value, json};
use std::path::PathBuf;

/// The agents, by the crate that they read specs with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Agent {
    /// container-device-interface 0.1.2: 3.25.0 to 3.32.0 (3.22.0 to 3.24.0 have 0.1.0, which is
    /// not tried).
    Kata3,
    /// container-device-interface 1.1.1: 4.0.0, 4.1.0.
    Kata4,
}

impl Agent {
    pub const ALL: [Agent; 2] = [Agent::Kata3, Agent::Kata4];

    pub fn name(self) -> &'static str {
        match self {
            Agent::Kata3 => "Kata <= 3.32",
            Agent::Kata4 => "Kata 4",
        }
    }
}

/// Injects devices, by their qualified names, into a container that has nothing.
pub type Inject = Box<dyn FnMut(&[String]) -> Result<Container, String>>;

macro_rules! agent {
    ($agent:ident, $krate:ident) => {
        mod $agent {
            use super::*;
            use $krate::cache::{Cache, new_cache, with_auto_refresh};
            use $krate::spec::{new_spec, parse_spec, read_spec};
            use $krate::spec_dirs::with_spec_dirs;
            use $krate::specs::config::Spec;

            pub fn load(path: &PathBuf) -> Result<(), String> {
                // Return the root cause alone: its context repeats whole lists of edits.
                let spec = read_spec(path, 0).map_err(|e| e.root_cause().to_string());
                spec.map(drop)
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
                    let all = spec.devices.values();
                    devices.extend(all.map(|d| (d.get_qualified_name(), d.clone())));
                }
                let mut cache = Cache::new(Vec::new(), std::collections::HashMap::new(), devices);
                Ok(Box::new(move |asked| {
                    let empty = json!({
                        "ociVersion": "1.0.2",
                        "mounts": [],
                        "process": {"user": {"uid": 0, "gid": 0}, "cwd": "/"},
                        "linux": {},
                    });
                    let mut oci = serde_json::from_value(empty).map_err(|e| e.to_string())?;
                    let injected = cache.inject_devices(Some(&mut oci), asked.to_vec());
                    injected.map_err(|e| e.to_string())?;
                    serde_json::to_value(oci)
                        .map(|oci| Container::of(&oci))
                        .map_err(|e| e.to_string())
                }))
            }
        }
    };
}

agent!(kata3, container_device_interface_0);
agent!(kata4, container_device_interface_1);

/// Copies of the files, in a directory of their own.
pub struct Copies {
    dir: PathBuf,
    /// Path of each copy, and the name of its file.
    files: Vec<(PathBuf, String)>,
}

impl Drop for Copies {
    fn drop(&mut self) {
        // The directory for temporary files is cleaned up by others, too.
        let _unused = std::fs::remove_dir_all(&self.dir);
    }
}

impl Copies {
    pub fn new(files: &[SpecFile]) -> Result<Copies> {
        let template = std::env::temp_dir().join("kata-gpu-cdi-check-XXXXXX");
        let dir = nix::unistd::mkdtemp(&template)
            .with_context(|| format!("make a directory in {}", std::env::temp_dir().display()))?;
        let named = |(index, file): (usize, &SpecFile)| {
            (dir.join(format!("{index}.yaml")), file.name.clone())
        };
        let named = files.iter().enumerate().map(named).collect();
        let copies = Copies { dir, files: named };
        for ((path, _), file) in copies.files.iter().zip(files) {
            std::fs::write(path, &file.text)
                .with_context(|| format!("write {}", path.display()))?;
        }
        Ok(copies)
    }

    /// An agent's error, with the names of the files instead of their copies' names.
    fn error(&self, text: String) -> String {
        let text = self.files.iter().fold(text, |text, (path, name)| {
            text.replace(&path.display().to_string(), name)
        });
        text.replace(&self.dir.display().to_string(), "")
    }

    /// Whether the agent loads all files: the first file that it refuses, or their conflict.
    pub fn load(&self, agent: Agent) -> Result<(), String> {
        for (path, name) in &self.files {
            let loaded = match agent {
                Agent::Kata3 => kata3::load(path),
                Agent::Kata4 => kata4::load(path),
            };
            loaded.map_err(|e| format!("{name}: {}", self.error(e)))?;
        }
        let dir = self.dir.display().to_string();
        let refreshed = match agent {
            Agent::Kata3 => kata3::refresh(&dir),
            Agent::Kata4 => kata4::refresh(&dir),
        };
        refreshed.map_err(|e| self.error(e))
    }

    /// Each file as the agent's parser takes it.
    pub fn documents(&self, agent: Agent) -> Vec<Result<Value, String>> {
        let document = match agent {
            Agent::Kata3 => kata3::document,
            Agent::Kata4 => kata4::document,
        };
        self.files.iter().map(|(path, _)| document(path)).collect()
    }

    /// Injector of the devices of all files.
    pub fn injector(&self, agent: Agent, documents: Vec<Value>) -> Result<Inject, String> {
        let paths = self.files.iter().map(|(path, _)| path.clone());
        let mut stood_in = Vec::new();
        for (path, mut document) in paths.zip(documents) {
            self.stand_in(&mut document);
            stood_in.push((path, document));
        }
        match agent {
            Agent::Kata3 => kata3::injector(stood_in),
            Agent::Kata4 => kata4::injector(stood_in),
        }
    }

    /// Puts stand-ins where the agent would look at the guest.
    fn stand_in(&self, document: &mut Value) {
        let mut edits: Vec<&mut Value> = Vec::new();
        let Some(document) = document.as_object_mut() else {
            return;
        };
        let mut changed = false;
        for (key, value) in document.iter_mut() {
            match key.as_str() {
                "containerEdits" => edits.push(value),
                "devices" => edits.extend(
                    (value.as_array_mut().into_iter().flatten())
                        .filter_map(|device| device.get_mut("containerEdits")),
                ),
                _ => {}
            }
        }
        let lists = edits.into_iter().filter_map(|e| e.get_mut("deviceNodes"));
        let nodes = lists.filter_map(Value::as_array_mut).flatten();
        for node in nodes.filter_map(Value::as_object_mut) {
            let Some(path) = looked_at(node) else {
                continue;
            };
            let stand_in = if is_pending(path) {
                self.dir.join("absent").display().to_string()
            } else {
                if node.get("major").is_none_or(Value::is_null) {
                    node.insert("major".into(), UNKNOWN.into());
                    node.insert("minor".into(), UNKNOWN.into());
                }
                "/dev/null".into()
            };
            node.insert("hostPath".into(), stand_in.into());
            changed = true;
        }
        // Versions before 0.5.0 have no hostPath.
        let declared = document.get("cdiVersion").and_then(Value::as_str);
        let lower = ["0.1.0", "0.2.0", "0.3.0", "0.4.0"];
        if changed && declared.is_some_and(|v| lower.contains(&v.trim_start_matches('v'))) {
            document.insert("cdiVersion".into(), "0.5.0".into());
        }
    }
}

/// Path of a device node that the agent looks at in the guest when it injects the device. A node
/// with type and major is taken as it is written.
pub fn looked_at(node: &Map<String, Value>) -> Option<&str> {
    let text = |field| node.get(field).and_then(Value::as_str);
    let typed = text("type").filter(|t| !t.is_empty());
    let has_major = node.get("major").is_some_and(|m| !m.is_null());
    if typed == Some("p") || typed.is_some() && has_major {
        return None;
    }
    text("hostPath").or_else(|| text("path"))
}

/// Whether this path stands for a GPU that is not ready: it never comes into being.
pub fn is_pending(path: &str) -> bool {
    let rest = path.strip_prefix(PENDING);
    rest.is_some_and(|rest| rest.starts_with('/'))
}
