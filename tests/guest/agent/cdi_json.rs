//! CDI specs without the agent's crate: what the demo's test agent resolves devices with. That
//! crate and those below it take as long to build as the rest of the demo.
//!
//! Only as much as kata-gpu-init's own specs need: JSON in one directory, with device nodes,
//! mounts, environment and hooks. The crate judges: a test compares what both inject.

use anyhow::{Context, bail};

type Result<T, E = anyhow::Error> = std::result::Result<T, E>;

use super::cdi::Specs;
use nix::sys::stat::{SFlag, major, minor, stat};
use oci_spec::runtime::Spec;
use serde_json::Value;
use std::io::ErrorKind;
use std::path::PathBuf;

/// The specs of a directory, as they were when it was read.
struct Cache {
    directory: PathBuf,
    specs: Vec<Value>,
}

/// The specs of a directory, empty until they are refreshed.
pub fn specs(directory: &str) -> Box<dyn Specs> {
    Box::new(Cache {
        directory: directory.into(),
        specs: Vec::new(),
    })
}

impl Specs for Cache {
    fn refresh(&mut self) -> Result<(), String> {
        Cache::refresh(self).map_err(|error| format!("{error:?}"))
    }

    fn list_devices(&self) -> Vec<String> {
        Cache::list_devices(self)
    }

    fn inject_devices(&mut self, spec: &mut Spec, asked: &[String]) -> Result<(), String> {
        Cache::inject_devices(self, spec, asked).map_err(|error| format!("{error:?}"))
    }
}

impl Cache {
    /// Reads the directory, which may be missing.
    fn refresh(&mut self) -> Result<()> {
        self.specs.clear();
        let entries = match std::fs::read_dir(&self.directory) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
            entries => entries.with_context(|| format!("read {}", self.directory.display()))?,
        };
        for entry in entries {
            let path = entry?.path();
            if path.extension().is_some_and(|e| e == "json" || e == "yaml") {
                let shown = path.display();
                let text = std::fs::read(&path).with_context(|| format!("read {shown}"))?;
                let spec = serde_json::from_slice(&text);
                self.specs
                    .push(spec.with_context(|| format!("parse {shown} as JSON"))?);
            }
        }
        Ok(())
    }

    /// Whole names of all devices.
    fn list_devices(&self) -> Vec<String> {
        let names = |spec| devices(spec).map(move |device| name(spec, device));
        self.specs.iter().flat_map(names).collect()
    }

    /// Applies the edits of devices, and once those of their specs. Fails, and changes nothing,
    /// where a name is not listed or a device node is not there.
    fn inject_devices(&mut self, spec: &mut Spec, asked: &[String]) -> Result<()> {
        let of_spec = |spec| devices(spec).map(move |device| (spec, device));
        let all = || self.specs.iter().flat_map(of_spec);
        let mut edits: Vec<&Value> = Vec::new();
        for wanted in asked {
            let Some((of, device)) = all().find(|(of, device)| name(of, device) == *wanted) else {
                bail!("unresolvable CDI devices {wanted}");
            };
            let for_all = &of["containerEdits"];
            if !edits.iter().any(|known| std::ptr::eq(*known, for_all)) {
                edits.push(for_all);
            }
            edits.push(&device["containerEdits"]);
        }
        let mut edited = serde_json::to_value(&*spec)?;
        for edit in edits {
            apply(edit, &mut edited).context("failed to inject devices")?;
        }
        *spec = serde_json::from_value(edited)?;
        Ok(())
    }
}

fn devices(spec: &Value) -> impl Iterator<Item = &Value> {
    list(spec, "devices")
}

fn name(spec: &Value, device: &Value) -> String {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_string();
    format!("{}={}", text(&spec["kind"]), text(&device["name"]))
}

/// The items of a list that may be absent.
fn list<'a>(value: &'a Value, key: &str) -> impl Iterator<Item = &'a Value> {
    value[key].as_array().into_iter().flatten()
}

/// Appends to a list that may be absent, in place of the item with the same value at `key`.
fn put(list: &mut Value, key: &str, item: Value) {
    let items = list.as_array().cloned().unwrap_or_default();
    let other = |old: &Value| key.is_empty() || old[key] != item[key];
    let mut items: Vec<Value> = items.into_iter().filter(other).collect();
    items.push(item);
    *list = items.into();
}

/// `from` under other names, without what it lacks.
fn renamed(from: &Value, names: &[(&str, &str)]) -> Value {
    let present = names.iter().filter(|(old, _)| !from[old].is_null());
    Value::Object(
        present
            .map(|(old, new)| (new.to_string(), from[old].clone()))
            .collect(),
    )
}

/// Applies a list of edits to an OCI spec in JSON.
fn apply(edit: &Value, spec: &mut Value) -> Result<()> {
    for variable in list(edit, "env") {
        put(&mut spec["process"]["env"], "", variable.clone());
    }
    for node in list(edit, "deviceNodes") {
        const NAMES: &[&str] = &["path", "type", "major", "minor", "fileMode", "uid", "gid"];
        let names: Vec<_> = NAMES.iter().map(|name| (*name, *name)).collect();
        let mut device = renamed(node, &names);
        if node["type"].is_null() || node["major"].is_null() {
            fill(node, &mut device)?;
        }
        let access = node["permissions"].as_str().unwrap_or("rwm");
        let mut rule = renamed(
            &device,
            &["type", "major", "minor"].map(|name| (name, name)),
        );
        rule["allow"] = true.into();
        rule["access"] = access.into();
        put(&mut spec["linux"]["resources"]["devices"], "", rule);
        put(&mut spec["linux"]["devices"], "path", device);
    }
    for mount in list(edit, "mounts") {
        let paths = [("hostPath", "source"), ("containerPath", "destination")];
        let others = ["type", "options"].map(|name| (name, name));
        put(
            &mut spec["mounts"],
            "destination",
            renamed(mount, &[paths, others].concat()),
        );
    }
    for hook in list(edit, "hooks") {
        let when = hook["hookName"]
            .as_str()
            .context("a hook without hookName")?;
        let names = ["path", "args", "env", "timeout"].map(|name| (name, name));
        put(&mut spec["hooks"][when], "", renamed(hook, &names));
    }
    Ok(())
}

/// Type and number of a node that the spec names by its path alone. A pending device has none.
fn fill(node: &Value, device: &mut Value) -> Result<()> {
    let path = node["hostPath"]
        .as_str()
        .or(node["path"].as_str())
        .context("a node without path")?;
    let found = stat(path).with_context(|| format!("failed to stat CDI host device {path}"))?;
    device["type"] = match SFlag::from_bits_truncate(found.st_mode) & SFlag::S_IFMT {
        SFlag::S_IFCHR => "c",
        SFlag::S_IFBLK => "b",
        _ => bail!("{path} is no device node"),
    }
    .into();
    device["major"] = major(found.st_rdev).into();
    device["minor"] = minor(found.st_rdev).into();
    Ok(())
}
