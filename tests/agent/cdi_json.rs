//! CDI specs without the agent's crate: what the demo's test agent resolves devices with. That
//! crate and those below it take as long to build as the rest of the demo.
//!
//! Only as much as kata-gpu-init's own specs need: JSON in one directory, with device nodes,
//! mounts, environment and hooks. The crate judges: a test compares what both inject.

use anyhow::{Context, Result, bail};
use nix::sys::stat::{SFlag, major, minor, stat};
use oci_spec::runtime::Spec;
use serde_json::Value;
use std::io::ErrorKind;
use std::path::PathBuf;
use std::sync::Mutex;

/// The specs of a directory, as they were when it was read.
pub struct Cache {
    directory: PathBuf,
    specs: Vec<Value>,
}

/// A cache that is empty until it is refreshed.
pub fn new_cache(directory: &str) -> Mutex<Cache> {
    Mutex::new(Cache { directory: directory.into(), specs: Vec::new() })
}

impl Cache {
    /// Reads the directory, which may be missing.
    pub fn refresh(&mut self) -> Result<()> {
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
                self.specs.push(spec.with_context(|| format!("parse {shown} as JSON"))?);
            }
        }
        Ok(())
    }

    /// Whole names of all devices.
    pub fn list_devices(&self) -> Vec<String> {
        let names = |spec| devices(spec).map(move |device| name(spec, device));
        self.specs.iter().flat_map(names).collect()
    }

    /// Applies the edits of devices, and once those of their specs. Fails, and changes nothing,
    /// where a name is not listed or a device node is not there.
    pub fn inject_devices(&mut self, spec: Option<&mut Spec>, asked: Vec<String>) -> Result<()> {
        let Some(spec) = spec else { bail!("no OCI spec") };
        let of_spec = |spec| devices(spec).map(move |device| (spec, device));
        let all = || self.specs.iter().flat_map(of_spec);
        let mut edits: Vec<&Value> = Vec::new();
        for wanted in asked {
            let Some((of, device)) = all().find(|(of, device)| name(of, device) == wanted) else {
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
    Value::Object(present.map(|(old, new)| (new.to_string(), from[old].clone())).collect())
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
        let mut rule = renamed(&device, &["type", "major", "minor"].map(|name| (name, name)));
        rule["allow"] = true.into();
        rule["access"] = access.into();
        put(&mut spec["linux"]["resources"]["devices"], "", rule);
        put(&mut spec["linux"]["devices"], "path", device);
    }
    for mount in list(edit, "mounts") {
        let paths = [("hostPath", "source"), ("containerPath", "destination")];
        let others = ["type", "options"].map(|name| (name, name));
        put(&mut spec["mounts"], "destination", renamed(mount, &[paths, others].concat()));
    }
    for hook in list(edit, "hooks") {
        let when = hook["hookName"].as_str().context("a hook without hookName")?;
        let names = ["path", "args", "env", "timeout"].map(|name| (name, name));
        put(&mut spec["hooks"][when], "", renamed(hook, &names));
    }
    Ok(())
}

/// Type and number of a node that the spec names by its path alone. A pending device has none.
fn fill(node: &Value, device: &mut Value) -> Result<()> {
    let path = node["hostPath"].as_str().or(node["path"].as_str()).context("a node without path")?;
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

#[cfg(all(test, feature = "cdi"))]
mod tests {
    use super::*;
    use container_device_interface::cache::{new_cache as crates_cache, with_auto_refresh};
    use container_device_interface::spec_dirs::with_spec_dirs;

    const SPEC: &str = r#"{"cdiVersion":"0.5.0","kind":"nvidia.com/gpu","containerEdits":{
        "env":["A=b"],
        "deviceNodes":[{"path":"/dev/shared","hostPath":"/dev/zero"}],
        "mounts":[{"hostPath":"/usr/lib/a","containerPath":"/usr/lib/a","options":["ro","bind"]}],
        "hooks":[{"hookName":"createContainer","path":"/bin/hook","args":["hook","one"]}]},
        "devices":[
        {"name":"0","containerEdits":{"deviceNodes":[
            {"path":"/dev/n0","type":"c","major":195,"minor":0,"fileMode":438}]}},
        {"name":"1","containerEdits":{"deviceNodes":[{"path":"/dev/null"}],"env":["B=c"]}},
        {"name":"2","containerEdits":{"deviceNodes":[{"path":"/run/none/0001:00:00.0"}]}}]}"#;

    /// Injects the same names with both implementations. Each returns the spec, or `None` on
    /// failure.
    fn both(asked: &[&str]) -> [Option<Spec>; 2] {
        let name = format!("kata-gpu-tests-cdi-json-{}-{}", asked.concat(), std::process::id());
        let directory = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&directory).unwrap();
        std::fs::write(directory.join("nvidia.yaml"), SPEC).unwrap();
        let whole = |name: &&str| format!("nvidia.com/gpu={name}");
        let asked: Vec<String> = asked.iter().map(whole).collect();
        let (mut by_crate, mut by_us) = (Spec::default(), Spec::default());
        let path = directory.to_str().unwrap();
        let theirs = crates_cache(vec![with_auto_refresh(false), with_spec_dirs(&[path])]);
        let mut theirs = theirs.lock().unwrap();
        theirs.refresh().unwrap();
        let mut ours = new_cache(path).into_inner().unwrap();
        ours.refresh().unwrap();
        let (mut their_list, mut our_list) = (theirs.list_devices(), ours.list_devices());
        their_list.sort();
        our_list.sort();
        assert_eq!(their_list, our_list);
        let done = [
            theirs.inject_devices(Some(&mut by_crate), asked.clone()).is_ok().then_some(by_crate),
            ours.inject_devices(Some(&mut by_us), asked).is_ok().then_some(by_us),
        ];
        std::fs::remove_dir_all(&directory).unwrap();
        done
    }

    #[test]
    fn what_is_injected_is_what_the_agents_crate_injects() {
        for asked in [&["0"][..], &["1"], &["0", "1"]] {
            let [by_crate, by_us] = both(asked);
            assert!(by_crate.is_some(), "{asked:?}");
            assert_eq!(by_crate, by_us, "{asked:?}");
        }
    }

    #[test]
    fn a_pending_device_and_an_unknown_one_are_errors_to_both() {
        for asked in [["2"], ["3"]] {
            assert_eq!(both(&asked), [None, None], "{asked:?}");
        }
    }
}
