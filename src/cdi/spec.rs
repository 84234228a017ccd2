//! The spec as data: which GPU is in which state -> exactly the JSON the agent's CDI crate reads. No I/O.

use crate::device_nodes::Node;
use crate::pci::PciAddress;
use serde::Serialize;

/// The kind under which the agent looks for GPUs.
pub const KIND: &str = "nvidia.com/gpu";
/// Directory that is never made: paths in it stand for GPUs that are not ready.
pub const PENDING: &str = "/run/kata-gpu-init/pending";

/// What the spec says of one GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Entry {
    /// Known, and not resolvable yet.
    Pending,
    /// Resolvable.
    Ready(Vec<Node>),
    /// Gone from the spec: whoever asks for it gets an error at once instead of waiting.
    Failed,
}

/// One GPU of the scan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Device {
    pub index: usize,
    pub address: PciAddress,
    pub entry: Entry,
}

#[derive(Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Spec {
    cdi_version: &'static str,
    kind: &'static str,
    devices: Vec<SpecDevice>,
    #[serde(skip_serializing_if = "Edits::is_empty")]
    container_edits: Edits,
}

#[derive(Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
struct SpecDevice {
    name: String,
    container_edits: Edits,
}

#[derive(Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
struct Edits {
    #[serde(skip_serializing_if = "Vec::is_empty")]
    env: Vec<&'static str>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    device_nodes: Vec<SpecNode>,
}

impl Edits {
    fn is_empty(&self) -> bool {
        self.env.is_empty() && self.device_nodes.is_empty()
    }
}

#[derive(Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
struct SpecNode {
    /// No type beside it: agents up to 3.32 refuse every spec in which a node has one. So the agent looks at the path, which is there.
    path: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    major: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    minor: Option<u32>,
    /// Without it a container's node gets the guest node's mode, or 0 where there is none.
    #[serde(skip_serializing_if = "Option::is_none")]
    file_mode: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    permissions: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    gid: Option<u32>,
}

fn node(node: &Node) -> SpecNode {
    SpecNode {
        path: node.path.display().to_string(),
        major: Some(node.major),
        minor: Some(node.minor),
        file_mode: Some(node.mode),
        permissions: Some("rwm"),
        gid: (node.gid != 0).then_some(node.gid),
    }
}

/// A node that makes the agent try again: it looks at the path, and the path is not there.
fn pending(address: PciAddress) -> SpecNode {
    SpecNode { path: format!("{PENDING}/{address}"), major: None, minor: None, file_mode: None, permissions: None, gid: None }
}

fn nodes_of(device: &Device) -> Vec<SpecNode> {
    match &device.entry {
        Entry::Pending => vec![pending(device.address)],
        Entry::Ready(nodes) => nodes.iter().map(node).collect(),
        Entry::Failed => vec![],
    }
}

/// Lowest spec version that allows device names which start with a digit; agents with the 0.1 crate know nothing above 0.7.0.
const CDI_VERSION: &str = "0.5.0";

/// The spec for these GPUs, in ascending order of address. `common` are the nodes that every container with a GPU gets.
///
/// Names are the indices, and `all`, which holds every GPU that has not failed: it becomes resolvable with the last of them. When every GPU has
/// failed, the spec lists one device `none`, because a spec without devices is invalid and an absent kind makes the agent wait for it.
pub fn generate(devices: &[Device], common: &[Node]) -> Spec {
    let alive = || devices.iter().filter(|d| d.entry != Entry::Failed);
    let mut list: Vec<SpecDevice> = alive()
        .map(|d| SpecDevice { name: d.index.to_string(), container_edits: Edits { env: vec![], device_nodes: nodes_of(d) } })
        .collect();
    if list.is_empty() {
        list.push(SpecDevice {
            name: "none".into(),
            container_edits: Edits { env: vec!["NVIDIA_VISIBLE_DEVICES=void"], device_nodes: vec![] },
        });
    } else {
        let device_nodes = alive().flat_map(nodes_of).collect();
        list.push(SpecDevice { name: "all".into(), container_edits: Edits { env: vec![], device_nodes } });
    }
    let container_edits = if common.is_empty() {
        Edits::default()
    } else {
        // `void`: this container has its GPUs already, whatever a hook for this variable thinks.
        Edits { env: vec!["NVIDIA_VISIBLE_DEVICES=void"], device_nodes: common.iter().map(node).collect() }
    };
    Spec { cdi_version: CDI_VERSION, kind: KIND, devices: list, container_edits }
}

impl Spec {
    /// The file's text: JSON, which is YAML too, in as few bytes as possible, because the agent parses it again at every try.
    pub fn to_json(&self) -> Vec<u8> {
        // Structs of strings and numbers: cannot fail. An empty text would be refused by `publish`, not written.
        serde_json::to_vec(self).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(index: usize, entry: Entry) -> Device {
        Device { index, address: format!("0001:00:{index:02x}.0").parse().unwrap(), entry }
    }

    fn gpu_node(minor: u32) -> Node {
        Node { path: format!("/dev/nvidia{minor}").into(), major: 195, minor, mode: 0o666, gid: 0 }
    }

    fn text(devices: &[Device], common: &[Node]) -> String {
        String::from_utf8(generate(devices, common).to_json()).unwrap()
    }

    #[test]
    fn a_pending_gpu_is_listed_with_a_path_that_does_not_exist() {
        assert_eq!(
            text(&[device(0, Entry::Pending)], &[]),
            concat!(
                r#"{"cdiVersion":"0.5.0","kind":"nvidia.com/gpu","devices":["#,
                r#"{"name":"0","containerEdits":{"deviceNodes":[{"path":"/run/kata-gpu-init/pending/0001:00:00.0"}]}},"#,
                r#"{"name":"all","containerEdits":{"deviceNodes":[{"path":"/run/kata-gpu-init/pending/0001:00:00.0"}]}}]}"#
            )
        );
    }

    #[test]
    fn names_follow_pci_order_and_paths_the_minors() {
        let spec = generate(&[device(0, Entry::Ready(vec![gpu_node(3)])), device(1, Entry::Ready(vec![gpu_node(0)]))], &[gpu_node(255)]);
        let nodes: Vec<(&str, Vec<&str>)> = spec
            .devices
            .iter()
            .map(|d| (d.name.as_str(), d.container_edits.device_nodes.iter().map(|n| n.path.as_str()).collect()))
            .collect();
        assert_eq!(nodes, [("0", vec!["/dev/nvidia3"]), ("1", vec!["/dev/nvidia0"]), ("all", vec!["/dev/nvidia3", "/dev/nvidia0"])]);
    }

    #[test]
    fn a_failed_gpu_leaves_and_takes_nobody_with_it() {
        let spec = text(&[device(0, Entry::Ready(vec![gpu_node(0)])), device(1, Entry::Failed), device(2, Entry::Pending)], &[]);
        assert!(!spec.contains("\"1\"") && !spec.contains("0001:00:01.0"), "{spec}");
        assert!(spec.contains("\"2\"") && spec.contains("0001:00:02.0"), "{spec}");
    }

    #[test]
    fn when_all_have_failed_the_kind_stays_and_no_gpu_is_in_it() {
        let spec = text(&[device(0, Entry::Failed)], &[gpu_node(255)]);
        assert!(spec.contains(r#""devices":[{"name":"none","#), "{spec}");
    }
}
