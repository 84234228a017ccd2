//! CDI's data under the names of its schema, as far as our specs use it. No I/O.

use serde::Serialize;

/// A spec file: the devices of one kind.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Spec {
    cdi_version: &'static str,
    pub kind: String,
    pub devices: Vec<Device>,
    /// Edits for every container that gets at least one of the devices.
    #[serde(skip_serializing_if = "Edits::is_empty")]
    pub container_edits: Edits,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Device {
    pub name: String,
    pub container_edits: Edits,
}

/// Changes to a container.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Edits {
    /// `NAME=value`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub env: Vec<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub device_nodes: Vec<DeviceNode>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub mounts: Vec<Mount>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub hooks: Vec<Hook>,
}

impl Edits {
    fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// A device node. There is no `type`: agents with the CDI crate 0.1 (Kata up to 3.32) refuse every
/// node that has one. The agent reads the type from the guest's node, so a node is published after
/// it is made.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct DeviceNode {
    pub path: String,
    /// Path of the guest's node, if different.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub host_path: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub major: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub minor: Option<u32>,
    /// Permission bits. Without them a container's node gets the guest node's mode, or 0 if there
    /// is none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub file_mode: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub permissions: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gid: Option<u32>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Mount {
    pub host_path: String,
    pub container_path: String,
    pub options: &'static [&'static str],
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Hook {
    pub hook_name: &'static str,
    pub path: String,
    pub args: Vec<String>,
    pub env: Vec<String>,
}

impl Spec {
    /// Sets the lowest version that covers the content: agents with the CDI crate 0.1 know nothing
    /// above 0.7.0.
    pub fn new(kind: &str, devices: Vec<Device>, container_edits: Edits) -> Self {
        let cdi_version = minimum_version(kind, &devices, &container_edits);
        Self {
            cdi_version,
            kind: kind.to_string(),
            devices,
            container_edits,
        }
    }

    /// Sets the root of the guest's nodes: each `hostPath` is below it.
    pub fn set_host_root(&mut self, root: &str) {
        let edits = self
            .devices
            .iter_mut()
            .map(|d| &mut d.container_edits)
            .chain([&mut self.container_edits]);
        edits
            .flat_map(|e| &mut e.device_nodes)
            .for_each(|node| node.host_path = Some(format!("{root}{}", node.path)));
        self.cdi_version = minimum_version(&self.kind, &self.devices, &self.container_edits);
    }

    /// Text of the file: JSON, which is YAML too, in as few bytes as possible, because the agent
    /// parses it again at every try.
    pub fn to_json(&self) -> Vec<u8> {
        // Structs of strings and numbers cannot fail. `publish` would refuse an empty text and
        // write nothing.
        serde_json::to_vec(self).unwrap_or_default()
    }
}

/// Lowest version for these structs: 0.5.0 brought device names that start with a digit and a
/// node's `hostPath`, and 0.6.0 kinds with a dot in the class.
fn minimum_version(kind: &str, devices: &[Device], common: &Edits) -> &'static str {
    let class = kind.split_once('/').map_or("", |(_, class)| class);
    let mut nodes = devices
        .iter()
        .map(|d| &d.container_edits)
        .chain([common])
        .flat_map(|e| &e.device_nodes);
    if class.contains('.') {
        "0.6.0"
    } else if devices
        .iter()
        .any(|d| d.name.starts_with(|c: char| c.is_ascii_digit()))
        || nodes.any(|n| n.host_path.is_some())
    {
        "0.5.0"
    } else {
        "0.3.0"
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn version(kind: &str, name: &str, host_path: Option<&str>) -> &'static str {
        let node = DeviceNode {
            path: "/dev/x".into(),
            host_path: host_path.map(str::to_string),
            ..DeviceNode::default()
        };
        let edits = Edits {
            device_nodes: vec![node],
            ..Edits::default()
        };
        Spec::new(
            kind,
            vec![Device {
                name: name.into(),
                container_edits: edits,
            }],
            Edits::default(),
        )
        .cdi_version
    }

    #[test]
    fn the_version_is_the_lowest_that_has_it_all() {
        assert_eq!(version("nvidia.com/gds", "all", None), "0.3.0");
        assert_eq!(version("nvidia.com/gpu", "0", None), "0.5.0");
        assert_eq!(version("nvidia.com/gpu", "all", Some("/dev/y")), "0.5.0");
        assert_eq!(version("nvidia.com/gpu.shared", "all", None), "0.6.0");
    }
}
