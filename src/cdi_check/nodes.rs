//! The device nodes of a spec that an agent looks at in the guest, and the files there.
//!
//! An agent takes a node with type and major as it is written. For any other node the agent looks
//! at the path when it injects the device, and tries again later if nothing is there. A GPU that is
//! not ready is published as such a node, with a path that never comes into being.

use super::look::{Found, Look};
use super::shape::as_text;
use anyhow::Result;
use kata_gpu_init::cdi::spec::PENDING;
use serde_json::Value;

/// A node that the agent looks at.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeLook {
    /// Index of the node's device; None for nodes next to `devices`.
    pub device: Option<usize>,
    pub pointer: String,
    /// Path that the agent looks at.
    pub path: String,
    pub found: Found,
    /// The node is the stand-in of a GPU that is not ready.
    pub pending: bool,
    /// The type that the spec gives.
    pub typed: Option<String>,
}

impl NodeLook {
    pub fn is_missing(&self) -> bool {
        self.found == Found::Missing
    }
}

/// An object or list of edits, and its place in the spec.
pub struct Scope<'a> {
    /// Index of the device; None for edits next to `devices`.
    pub device: Option<usize>,
    pub pointer: String,
    pub edits: &'a Value,
}

/// All edits of a spec in an agent's order: first the edits next to `devices`.
pub fn scopes(document: &Value) -> impl Iterator<Item = Scope<'_>> {
    let beside = document.get("containerEdits").map(|edits| Scope {
        device: None,
        pointer: "/containerEdits".into(),
        edits,
    });
    let devices = document
        .get("devices")
        .and_then(Value::as_array)
        .into_iter()
        .flatten()
        .enumerate();
    let own = devices.filter_map(|(index, device)| {
        let edits = device.get("containerEdits")?;
        Some(Scope {
            device: Some(index),
            pointer: format!("/devices/{index}/containerEdits"),
            edits,
        })
    });
    beside.into_iter().chain(own)
}

/// The entries of one list of edits, with their pointers.
pub fn entries<'a>(
    scope: &Scope<'a>,
    list: &str,
) -> impl Iterator<Item = (String, &'a Value)> + use<'a> {
    let base = format!("{}/{list}", scope.pointer);
    let all = scope
        .edits
        .get(list)
        .and_then(Value::as_array)
        .into_iter()
        .flatten()
        .enumerate();
    all.map(move |(index, entry)| (format!("{base}/{index}"), entry))
}

/// A text of an object, as the agent takes it.
pub fn text(object: &Value, field: &str) -> Option<String> {
    object.get(field).and_then(as_text)
}

/// The nodes that the agent looks at.
pub fn looks(document: &Value, look: &Look) -> Result<Vec<NodeLook>> {
    let mut found = Vec::new();
    for scope in scopes(document) {
        for (pointer, node) in entries(&scope, "deviceNodes") {
            let typed = text(node, "type").filter(|t| !t.is_empty());
            let major = node.get("major").is_some_and(|m| !m.is_null());
            let Some(path) = text(node, "hostPath").or_else(|| text(node, "path")) else {
                continue;
            };
            if typed.as_deref() == Some("p") || typed.is_some() && major {
                continue;
            }
            let pending = path
                .strip_prefix(PENDING)
                .is_some_and(|rest| rest.starts_with('/'));
            let there = if pending {
                Found::Missing
            } else {
                look.at(&path)?
            };
            found.push(NodeLook {
                device: scope.device,
                pointer,
                path,
                found: there,
                pending,
                typed,
            });
        }
    }
    Ok(found)
}
