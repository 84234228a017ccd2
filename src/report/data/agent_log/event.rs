//! Events of a boot in the agent's lines.

use crate::data::units::is_zero;
use kata_gpu_wire::pci_address::PciAddress;
use serde::{Deserialize, Serialize};

/// Placeholder for unknown devices of a container.
pub const UNKNOWN: &str = "unknown";
/// Placeholder for the devices of a container that requests none.
pub const NONE: &str = "none";

/// Event of the boot in the agent's lines. Containers have one name each: that in their pod, or the
/// start of their id. Serialised, an event is the name and the fields of its record
/// ([`crate::data::imported_record`]).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "name")]
pub enum AgentEvent {
    #[serde(rename = "agent.start")]
    Start { version: String },
    /// The agent's server listens.
    #[serde(rename = "agent.ready")]
    Ready,
    /// The runtime called the agent.
    #[serde(rename = "agent.rpc")]
    Rpc { call: String },
    /// The runtime asked for a container with these devices.
    #[serde(rename = "container.asked")]
    ContainerAsked {
        container: String,
        #[serde(default = "unknown")]
        devices: String,
        /// The container is the pod's pause container.
        #[serde(default, skip_serializing_if = "is_zero")]
        pause: bool,
    },
    /// A try of the agent to resolve a container's devices failed; it tries again after a second.
    #[serde(rename = "agent.cdi-try")]
    CdiTryFailed {
        container: String,
        #[serde(rename = "try")]
        attempt: u64,
        error: String,
    },
    /// A container's devices are in its spec.
    #[serde(skip)]
    Injected { container: String },
    #[serde(rename = "container.created")]
    ContainerCreated {
        container: String,
        #[serde(default = "unknown")]
        devices: String,
        #[serde(skip_serializing_if = "Option::is_none")]
        tries: Option<u64>,
        #[serde(default, skip_serializing_if = "is_zero")]
        pause: bool,
    },
    /// The container's program runs.
    #[serde(rename = "container.started")]
    ContainerStarted { container: String },
    #[serde(rename = "container.failed")]
    ContainerFailed {
        container: String,
        #[serde(default = "unknown")]
        devices: String,
        #[serde(skip_serializing_if = "Option::is_none")]
        tries: Option<u64>,
        error: String,
    },
    /// A hook that runs in the agent's own namespaces failed; the agent goes on.
    #[serde(rename = "agent.hook-failed")]
    HookFailed { error: String },
    /// A uevent reported to the agent that a driver has this PCI function.
    #[serde(skip)]
    Bound(PciAddress),
}

fn unknown() -> String {
    UNKNOWN.to_string()
}

impl AgentEvent {
    /// Bytes of its texts, more or less: those of its record.
    pub fn text_bytes(&self) -> usize {
        serde_json::to_string(self).map_or(0, |text| text.len())
    }
}
