//! Events of a boot in the agent's lines.

use kata_gpu_wire::pci_address::PciAddress;

/// Event of the boot in the agent's lines. Containers have one name each: that in their pod, or the
/// start of their id.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AgentEvent {
    Start {
        version: String,
    },
    /// The agent's server listens.
    Ready,
    /// The runtime called the agent.
    Rpc {
        call: String,
    },
    /// The runtime asked for a container with these devices.
    ContainerAsked {
        container: String,
        devices: String,
        /// The container is the pod's pause container.
        pause: bool,
    },
    /// A try of the agent to resolve a container's devices failed; it tries again after a second.
    CdiTryFailed {
        container: String,
        attempt: u64,
        error: String,
    },
    /// A container's devices are in its spec.
    Injected {
        container: String,
    },
    ContainerCreated {
        container: String,
        devices: String,
        tries: Option<u64>,
        pause: bool,
    },
    /// The container's program runs.
    ContainerStarted {
        container: String,
    },
    ContainerFailed {
        container: String,
        devices: String,
        tries: Option<u64>,
        error: String,
    },
    /// A hook that runs in the agent's own namespaces failed; the agent goes on.
    HookFailed {
        error: String,
    },
    /// A uevent reported to the agent that a driver has this PCI function.
    Bound(PciAddress),
}

impl AgentEvent {
    pub fn text_bytes(&self) -> usize {
        match self {
            Self::Ready | Self::Bound(_) => 0,
            Self::Start { version: text }
            | Self::Rpc { call: text }
            | Self::HookFailed { error: text } => text.len(),
            Self::Injected { container } | Self::ContainerStarted { container } => container.len(),
            Self::CdiTryFailed {
                container, error, ..
            } => container.len() + error.len(),
            Self::ContainerAsked {
                container, devices, ..
            }
            | Self::ContainerCreated {
                container, devices, ..
            } => container.len() + devices.len(),
            Self::ContainerFailed {
                container,
                devices,
                error,
                ..
            } => container.len() + devices.len() + error.len(),
        }
    }
}
