//! Edits that a container gets: the OCI spec after injection into an empty container.

use serde::Serialize;
use serde_json::{Map, Value};

/// Stands for the numbers of a device node that only the guest has.
pub const UNKNOWN: i64 = i64::MIN + 1;
/// Lists of edits, and their places in an OCI spec.
const LISTS: [(&str, &str); 5] = [
    ("deviceNodes", "/linux/devices"),
    ("cgroupRules", "/linux/resources/devices"),
    ("mounts", "/mounts"),
    ("env", "/process/env"),
    ("additionalGids", "/process/user/additionalGids"),
];
/// Hooks, in the order in which they would run.
const HOOKS: [&str; 6] = [
    "prestart",
    "createRuntime",
    "createContainer",
    "startContainer",
    "poststart",
    "poststop",
];

/// Edits that an injection adds to a container, as OCI writes them; each hook has its `name`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct Container(Map<String, Value>);

impl Container {
    /// Takes the edits out of an OCI spec.
    pub fn of(oci: &Value) -> Container {
        let list = |pointer: &str| {
            let list = oci.pointer(pointer).and_then(Value::as_array);
            list.cloned().unwrap_or_default()
        };
        let mut edits = Map::new();
        for (name, pointer) in LISTS {
            let mut entries = list(pointer);
            for entry in entries.iter_mut().filter(|e| e["major"] == UNKNOWN) {
                (entry["major"], entry["minor"]) = (Value::Null, Value::Null);
            }
            edits.insert(name.into(), entries.into());
        }
        let mut hooks = Vec::new();
        for name in HOOKS {
            for mut hook in list(&format!("/hooks/{name}")) {
                hook["name"] = name.into();
                hooks.push(hook);
            }
        }
        edits.insert("hooks".into(), hooks.into());
        for name in ["netDevices", "intelRdt"] {
            if let Some(value) = oci.pointer(&format!("/linux/{name}")) {
                edits.insert(name.into(), value.clone());
            }
        }
        Container(edits)
    }

    /// The entries of one list: deviceNodes, cgroupRules, mounts, env, hooks, additionalGids.
    pub fn list(&self, name: &str) -> &[Value] {
        let list = self.0.get(name).and_then(Value::as_array);
        list.map(Vec::as_slice).unwrap_or_default()
    }

    /// Destination of a mount with which kata-agent refuses the container, in all its releases.
    pub fn refused_mount(&self) -> Option<&str> {
        let mounts = self.list("mounts").iter();
        let mut destinations = mounts.filter_map(|mount| mount["destination"].as_str());
        destinations.find(|path| !path.starts_with('/') || path.contains(".."))
    }

    /// Numbers of device nodes, cgroup rules, mounts, variables and hooks.
    pub fn counts(&self) -> [usize; 5] {
        ["deviceNodes", "cgroupRules", "mounts", "env", "hooks"].map(|name| self.list(name).len())
    }

    /// An edit of the container that is no list.
    pub fn value(&self, name: &str) -> Option<&Value> {
        self.0.get(name).filter(|value| !value.is_null())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn all_edits_are_there_in_the_order_in_which_they_work() {
        let container = Container::of(&json!({
            "linux": {
                "devices": [
                    {"path": "/dev/a", "type": "c", "major": UNKNOWN, "minor": UNKNOWN},
                    {"path": "/dev/b", "type": "c", "major": 1, "minor": 2, "fileMode": 438},
                ],
                "resources": {"devices": [{"allow": true, "major": 1, "minor": 2}]},
            },
            "mounts": [{"source": "/a", "destination": "/b", "options": ["ro"]}],
            "process": {"env": ["A=1"], "user": {"uid": 0, "gid": 0, "additionalGids": [5]}},
            "hooks": {"poststop": [{"path": "/z"}], "createContainer": [{"path": "/y"}]},
        }));
        assert_eq!(container.list("deviceNodes")[0]["major"], Value::Null);
        assert_eq!(container.list("deviceNodes")[1]["minor"], 2);
        let hooks = container.list("hooks").iter().map(|h| &h["name"]);
        assert_eq!(
            hooks.collect::<Vec<_>>(),
            [&json!("createContainer"), &json!("poststop")]
        );
        assert_eq!(container.counts(), [2, 1, 1, 1, 2]);
        assert_eq!(container.list("additionalGids"), [json!(5)]);
        assert_eq!(Container::of(&json!({})).counts(), [0; 5]);
        assert_eq!(container.refused_mount(), None);
        for path in ["b", "/a/../b"] {
            let mount = json!({"mounts": [{"source": "/a", "destination": path}]});
            assert_eq!(Container::of(&mount).refused_mount(), Some(path));
        }
    }
}
