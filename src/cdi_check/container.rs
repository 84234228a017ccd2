//! Edits that a container gets: the OCI spec after injection into an empty container.

use super::judge::UNKNOWN;
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// Edits that an injection adds to a container.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Container {
    pub device_nodes: Vec<Node>,
    pub cgroup_rules: Vec<Rule>,
    pub mounts: Vec<Mount>,
    pub env: Vec<String>,
    pub hooks: Vec<Hook>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub additional_gids: Vec<u32>,
    #[serde(skip_serializing_if = "Value::is_null")]
    pub net_devices: Value,
    #[serde(skip_serializing_if = "Value::is_null")]
    pub intel_rdt: Value,
}

/// A device node in the container.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Node {
    pub path: String,
    #[serde(rename = "type")]
    pub kind: String,
    /// Major number; `None` where the guest's node decides, and nobody looked at it.
    pub major: Option<i64>,
    pub minor: Option<i64>,
    /// File mode; `None` where the guest's node decides.
    #[serde(default)]
    pub file_mode: Option<u32>,
    #[serde(default)]
    pub uid: Option<u32>,
    #[serde(default)]
    pub gid: Option<u32>,
}

/// A rule of the devices cgroup.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rule {
    pub allow: bool,
    #[serde(rename = "type", default)]
    pub kind: Option<String>,
    #[serde(default)]
    pub major: Option<i64>,
    #[serde(default)]
    pub minor: Option<i64>,
    #[serde(default)]
    pub access: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mount {
    #[serde(default)]
    pub source: String,
    pub destination: String,
    #[serde(rename = "type", default, skip_serializing_if = "Option::is_none")]
    pub kind: Option<String>,
    #[serde(default)]
    pub options: Vec<String>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hook {
    /// Phase in which the hook runs; not part of the hook itself.
    #[serde(default)]
    pub name: String,
    pub path: String,
    #[serde(default)]
    pub args: Vec<String>,
    #[serde(default)]
    pub env: Vec<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout: Option<i64>,
}

/// Names of hooks, in the order in which they would run.
const HOOKS: [&str; 6] = [
    "prestart",
    "createRuntime",
    "createContainer",
    "startContainer",
    "poststart",
    "poststop",
];

impl Container {
    /// Takes the edits out of an OCI spec.
    pub fn of(oci: &Value) -> Result<Container, String> {
        let mut container = Container {
            device_nodes: list(oci, "/linux/devices")?,
            cgroup_rules: list(oci, "/linux/resources/devices")?,
            mounts: list(oci, "/mounts")?,
            env: list(oci, "/process/env")?,
            hooks: Vec::new(),
            additional_gids: list(oci, "/process/user/additionalGids")?,
            net_devices: oci
                .pointer("/linux/netDevices")
                .cloned()
                .unwrap_or_default(),
            intel_rdt: oci.pointer("/linux/intelRdt").cloned().unwrap_or_default(),
        };
        for name in HOOKS {
            let hooks: Vec<Hook> = list(oci, &format!("/hooks/{name}"))?;
            container.hooks.extend(hooks.into_iter().map(|hook| Hook {
                name: name.to_string(),
                ..hook
            }));
        }
        for node in &mut container.device_nodes {
            forget(&mut node.major, &mut node.minor);
        }
        for rule in &mut container.cgroup_rules {
            forget(&mut rule.major, &mut rule.minor);
        }
        Ok(container)
    }
}

/// Removes the numbers of a stand-in.
fn forget(major: &mut Option<i64>, minor: &mut Option<i64>) {
    if *major == Some(UNKNOWN) {
        (*major, *minor) = (None, None);
    }
}

fn list<T: serde::de::DeserializeOwned>(oci: &Value, pointer: &str) -> Result<Vec<T>, String> {
    match oci.pointer(pointer) {
        None | Some(Value::Null) => Ok(Vec::new()),
        Some(list) => serde_json::from_value(list.clone())
            .map_err(|e| format!("read {pointer} of the container: {e}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn all_edits_are_there_in_the_order_in_which_they_work() {
        let oci = json!({
            "linux": {
                "devices": [{"path": "/dev/a", "type": "c", "major": UNKNOWN, "minor": UNKNOWN}, {"path": "/dev/b", "type": "c", "major": 1, "minor": 2, "fileMode": 438}],
                "resources": {"devices": [{"allow": true, "type": "c", "major": 1, "minor": 2, "access": "rwm"}]},
            },
            "mounts": [{"source": "/a", "destination": "/b", "options": ["ro"]}],
            "process": {"env": ["A=1"], "user": {"uid": 0, "gid": 0, "additionalGids": [5]}},
            "hooks": {"poststop": [{"path": "/z"}], "createContainer": [{"path": "/y", "args": ["y"]}]},
        });
        let container = Container::of(&oci).unwrap();
        assert_eq!(
            (
                container.device_nodes[0].major,
                container.device_nodes[0].minor
            ),
            (None, None)
        );
        assert_eq!(
            (
                container.device_nodes[1].minor,
                container.device_nodes[1].file_mode
            ),
            (Some(2), Some(0o666))
        );
        assert_eq!(
            container
                .hooks
                .iter()
                .map(|h| h.name.as_str())
                .collect::<Vec<_>>(),
            ["createContainer", "poststop"]
        );
        assert_eq!(
            (
                container.mounts.len(),
                container.env.len(),
                container.additional_gids.as_slice()
            ),
            (1, 1, &[5][..])
        );
        assert_eq!(Container::of(&json!({})).unwrap(), Container::default());
        assert!(
            Container::of(&json!({"mounts": [1]}))
                .unwrap_err()
                .contains("/mounts")
        );
    }
}
