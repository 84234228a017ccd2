//! Names of records that only logs give; those of [`crate::events::names`] are used where a log says the same thing. Not a part of a guest's
//! stream.

/// The agent announced itself. Fields: version.
pub const AGENT_START: &str = "agent.start";
/// The agent's server listens.
pub const AGENT_READY: &str = "agent.ready";
/// The runtime called the agent. Fields: call.
pub const AGENT_RPC: &str = "agent.rpc";
/// One try of the agent to resolve a container's devices failed. Fields: container, try; `error` is the agent's.
pub const AGENT_CDI_TRY: &str = "agent.cdi-try";
/// (span) From the agent's first failed try until it had the devices, or gave up. Fields: container, tries.
pub const AGENT_CDI_WAIT: &str = "agent.cdi-wait";
/// The runtime asked the agent for a container. Fields: container, devices, pause (of the pod's pause container).
pub const CONTAINER_ASKED: &str = "container.asked";
/// The agent has created a container. Fields: container, devices, tries, pause.
pub const CONTAINER_CREATED: &str = "container.created";
/// The agent could not create a container. Fields as above; `error` says why.
pub const CONTAINER_FAILED: &str = "container.failed";
/// A container's program runs. Fields: container.
pub const CONTAINER_STARTED: &str = "container.started";
/// A hook in the agent's own namespaces failed; `error` is the agent's.
pub const AGENT_HOOK_FAILED: &str = "agent.hook-failed";
/// A message of NVRC. Fields: text.
pub const NVRC: &str = "nvrc";
/// All BARs of a GPU have their place. Fields: bars.
pub const GPU_BARS: &str = "gpu.bars";
/// The driver cleared an interrupt that it finds when an initialisation starts; it does not say of which GPU. Fields: nth.
pub const GPU_INIT_MARK: &str = "driver.init-mark";
/// (span) VFIO pinned one region: all calls of `vfio_pin_pages_remote` for it. Fields: bytes, calls, pid.
pub const VFIO_PIN: &str = "vfio.pin";
/// All calls of `vfio_pin_pages_remote` in a trace. Fields: calls, bytes, took_ms, sizes (pages a call: how many), regions.
pub const VFIO_PINS: &str = "vfio.pins";
/// A histogram that bpftrace printed. Fields: map, buckets.
pub const VFIO_HISTOGRAM: &str = "vfio.histogram";
/// containerd was asked for something by its CRI, or has answered. Fields: call, container or pod.
pub const SANDBOX_RUN: &str = "sandbox.run";
/// containerd called CNI, or CNI has answered. Fields: call.
pub const SANDBOX_CNI: &str = "sandbox.cni";
/// containerd called the shim, or the shim has answered. Fields: call, container.
pub const SANDBOX_SHIM: &str = "sandbox.shim";
/// The runtime on the host. Fields differ.
pub const SANDBOX_VM_STARTING: &str = "sandbox.vm-starting";
pub const SANDBOX_VM_STARTED: &str = "sandbox.vm-started";
pub const SANDBOX_AGENT_STARTED: &str = "sandbox.agent-started";
pub const SANDBOX_STARTED: &str = "sandbox.started";
pub const SANDBOX_READY: &str = "sandbox.ready";
pub const SANDBOX_FAILED: &str = "sandbox.failed";
pub const SANDBOX_CONTAINER_STARTED: &str = "sandbox.container-started";
/// What the pod's object says. Fields: pod, or container.
pub const POD_CREATED: &str = "pod.created";
pub const POD_STARTED: &str = "pod.started";
pub const POD_CONDITION: &str = "pod.condition";
pub const POD_CONTAINER_STARTED: &str = "pod.container-started";
pub const POD_CONTAINER_ENDED: &str = "pod.container-ended";
