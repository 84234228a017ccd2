//! Which step belongs to which phase, whose time it is, and what it follows: one table, by the name of the record.
//!
//! A name that the table lacks (a newer init, an imported log) is nobody's: [`Owner::Unknown`], [`Phase::Other`]. It still counts as explained time.

use crate::events::record::names;
use serde::Serialize;

/// Who could have made a step shorter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Owner {
    /// The host's kernel and VFIO: mapping and pinning.
    Host,
    Vmm,
    Kernel,
    Driver,
    Init,
    Agent,
    /// Whoever asks the agent: the shim, containerd, Kubernetes.
    Runtime,
    /// Client of containerd's CRI: the kubelet, for one.
    Client,
    Unknown,
}

impl Owner {
    pub fn name(self) -> &'static str {
        match self {
            Self::Host => "host",
            Self::Vmm => "vmm",
            Self::Kernel => "kernel",
            Self::Driver => "driver",
            Self::Init => "init",
            Self::Agent => "agent",
            Self::Runtime => "runtime",
            Self::Client => "client",
            Self::Unknown => "?",
        }
    }
}

/// Which part of a boot, in the order in which they begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub enum Phase {
    #[serde(rename = "runtime on the host")]
    Runtime,
    #[serde(rename = "VMM and firmware")]
    Vmm,
    #[serde(rename = "kernel")]
    Kernel,
    #[serde(rename = "PCI enumeration")]
    PciEnumeration,
    #[serde(rename = "init")]
    Init,
    #[serde(rename = "agent start")]
    AgentStart,
    #[serde(rename = "module load")]
    ModuleLoad,
    #[serde(rename = "host BAR mapping")]
    BarMapping,
    #[serde(rename = "probe")]
    Probe,
    #[serde(rename = "adapter initialisation")]
    AdapterInit,
    #[serde(rename = "CDI publication")]
    CdiPublication,
    #[serde(rename = "waiting of the agent")]
    AgentWaiting,
    #[serde(rename = "container")]
    Container,
    #[serde(rename = "other")]
    Other,
}

impl Phase {
    pub fn name(self) -> &'static str {
        match self {
            Self::Runtime => "runtime on the host",
            Self::Vmm => "VMM and firmware",
            Self::Kernel => "kernel",
            Self::PciEnumeration => "PCI enumeration",
            Self::Init => "init",
            Self::AgentStart => "agent start",
            Self::ModuleLoad => "module load",
            Self::BarMapping => "host BAR mapping",
            Self::Probe => "probe",
            Self::AdapterInit => "adapter initialisation",
            Self::CdiPublication => "CDI publication",
            Self::AgentWaiting => "waiting of the agent",
            Self::Container => "container",
            Self::Other => "other",
        }
    }
}

impl Phase {
    /// Where a phase of that name stands in a boot.
    pub fn order(name: &str) -> Self {
        TABLE.iter().map(|row| row.phase).find(|phase| phase.name() == name).unwrap_or(Self::Other)
    }
}

/// Steps that no record carries by this name: worked out from others, or imported. An importer uses these names.
pub mod derived {
    /// containerd's own time between a request of the CRI and its answer: images, snapshots, the network
    /// namespace, and the start of the shim's process.
    pub const RUN_POD_SANDBOX: &str = "containerd.run-pod-sandbox";
    pub const CREATE_CONTAINER: &str = "containerd.create-container";
    pub const START_CONTAINER: &str = "containerd.start-container";
    /// From containerd's call of CNI until its answer.
    pub const CNI: &str = "cni.setup";
    /// The shim's own time between a call of containerd and its answer: the VMM's process, virtiofsd, mounts,
    /// connecting to the agent.
    pub const SHIM_CREATE: &str = "shim.create";
    pub const SHIM_START: &str = "shim.start";
    /// From an answer of containerd until the next request for the same pod.
    pub const NOBODY_ASKED: &str = "nobody-asked";
    /// From the start of the VMM's process until the firmware or the kernel runs.
    pub const VMM: &str = "vmm";
    pub const FIRMWARE: &str = "firmware";
    /// Both as one, by the guest's TSC: from the VM's first CPU, or from the end of QEMU's reset
    /// where that took over 1 s (src/tsc.rs), until the kernel's clock begins, its own first steps
    /// included.
    pub const VMM_FIRMWARE: &str = "vmm+firmware";
    /// From the kernel's start until it starts the first program.
    pub const KERNEL: &str = "kernel";
    /// From the kernel's `Trying to unpack rootfs image as initramfs...` until it has freed the archive: longer for a larger image.
    pub const KERNEL_INITRD: &str = "kernel.initrd";
    /// From the first to the last line of one round of PCI enumeration.
    pub const KERNEL_PCI: &str = "kernel.pci";
    /// From the kernel's `Run ... as init process` to the first instruction of the init.
    pub const KERNEL_EXEC: &str = "kernel.exec-init";
    /// PID 1 between the end of stage 0 and the exec of the agent.
    pub const HANDOVER: &str = "init.handover";
    /// From the exec of the agent until the worker begins its first step.
    pub const WORKER: &str = "init.worker";
    /// From the look at the image to the first module load: the strategy, which may wait until the first enabling is measured.
    pub const PREPARE: &str = "init.prepare";
    /// From the end of the last GPU's last step until the worker has heard of it and says that all are usable or failed.
    pub const SETTLE: &str = "init.settle";
    /// A GPU's probe inside a module load, from the kernel's `enabling device`: the host maps its BARs, and 2 to 4 ms of probe.
    pub const GPU_MAP: &str = "gpu.map";
    /// The same for a GPU whose probe may sleep for seconds until its BAR firewall is down: the driver's.
    pub const GPU_PROBE: &str = "gpu.probe";
    /// From the exec of the agent until it says that it is ready.
    pub const AGENT_START: &str = "agent.start";
    /// From the request for a container until the agent tried to resolve its devices for the first time.
    pub const CONTAINER_RESOLVE: &str = "container.resolve";
    /// From a container's first failed try until the devices it asked for were published.
    pub const AGENT_WAIT: &str = "agent.wait";
    /// From the publication of a container's last device until the agent looked again: it tries once a second.
    pub const AGENT_PAUSE: &str = "agent.pause";
    /// From the agent's readiness until somebody asked it for a container; with a pause container, from its creation, too.
    pub const CONTAINER_REQUEST: &str = "container.request";
    /// From the shim's request for the sandbox until the agent has answered.
    pub const SANDBOX_CREATE: &str = "sandbox.create";
    /// From the request to start a container until its program runs.
    pub const CONTAINER_START: &str = "container.start";
    /// From the agent's last look at the spec, or from the request where there is nothing to resolve, until the container was created.
    pub const CONTAINER_CREATE: &str = "container.create";
}

/// What is known of the steps of one name.
#[derive(Clone, Copy, Debug)]
pub struct Row {
    pub name: &'static str,
    pub phase: Phase,
    pub owner: Owner,
    /// Names of steps that end before this one can begin, by the order of the program; asked only where the record has no `after`.
    pub follows: &'static [&'static str],
    /// Steps of this name run one after another, by the order of the program.
    pub serial: bool,
    /// Waits for what other steps do: shown, and neither anybody's fault nor an explanation.
    pub waiting: bool,
}

const fn row(name: &'static str, phase: Phase, owner: Owner, follows: &'static [&'static str]) -> Row {
    Row { name, phase, owner, follows, serial: false, waiting: false }
}

const fn serial(row: Row) -> Row {
    Row { serial: true, ..row }
}

const fn waiting(row: Row) -> Row {
    Row { waiting: true, ..row }
}

/// Every step that has an owner.
pub const TABLE: &[Row] = &[
    row(derived::RUN_POD_SANDBOX, Phase::Runtime, Owner::Runtime, &[]),
    row(derived::CNI, Phase::Runtime, Owner::Runtime, &[]),
    row(derived::SHIM_CREATE, Phase::Runtime, Owner::Runtime, &[]),
    row(derived::SHIM_START, Phase::Runtime, Owner::Runtime, &[]),
    row(derived::CREATE_CONTAINER, Phase::Runtime, Owner::Runtime, &[]),
    row(derived::START_CONTAINER, Phase::Runtime, Owner::Runtime, &[]),
    row(derived::NOBODY_ASKED, Phase::Runtime, Owner::Client, &[]),
    row(derived::VMM, Phase::Vmm, Owner::Vmm, &[]),
    row(derived::FIRMWARE, Phase::Vmm, Owner::Vmm, &[derived::VMM]),
    row(derived::VMM_FIRMWARE, Phase::Vmm, Owner::Vmm, &[]),
    row(derived::KERNEL, Phase::Kernel, Owner::Kernel, &[derived::VMM_FIRMWARE, derived::FIRMWARE, derived::VMM]),
    row(derived::KERNEL_INITRD, Phase::Kernel, Owner::Kernel, &[]),
    row(derived::KERNEL_PCI, Phase::PciEnumeration, Owner::Kernel, &[]),
    row(derived::KERNEL_EXEC, Phase::Kernel, Owner::Kernel, &[derived::KERNEL]),
    row(names::STAGE0, Phase::Init, Owner::Init, &[derived::KERNEL_EXEC, derived::KERNEL]),
    row(names::STAGE0_MOUNTS, Phase::Init, Owner::Init, &[]),
    row(names::STAGE0_CONSOLE, Phase::Init, Owner::Init, &[names::STAGE0_MOUNTS]),
    row(names::STAGE0_CONFIG, Phase::Init, Owner::Init, &[names::STAGE0_CONSOLE]),
    row(derived::HANDOVER, Phase::Init, Owner::Init, &[names::STAGE0]),
    row(names::AGENT_EXEC, Phase::AgentStart, Owner::Init, &[derived::HANDOVER, names::STAGE0]),
    row(derived::AGENT_START, Phase::AgentStart, Owner::Agent, &[names::AGENT_EXEC, derived::HANDOVER, names::STAGE0]),
    row(derived::WORKER, Phase::Init, Owner::Init, &[names::AGENT_EXEC]),
    row(names::WORKER_START, Phase::Init, Owner::Init, &[derived::WORKER, names::AGENT_EXEC]),
    row(names::STAGE0_EXTENSIONS, Phase::Init, Owner::Init, &[names::STAGE0_CONFIG]),
    row(names::EXTENSION_DISKS, Phase::Init, Owner::Init, &[names::AGENT_EXEC, names::STAGE0_CONFIG]),
    serial(row(names::EXTENSION, Phase::Init, Owner::Init, &[names::EXTENSION_DISKS])),
    row(names::EXTENSION_VERITY, Phase::Init, Owner::Init, &[names::EXTENSION_DISKS]),
    row(names::EXTENSION_MOUNT, Phase::Init, Owner::Init, &[names::EXTENSION_VERITY]),
    row(names::EXTENSION_FIRMWARE, Phase::Init, Owner::Init, &[names::EXTENSION_MOUNT]),
    row(names::EXTENSION_LIBRARIES, Phase::Init, Owner::Init, &[names::EXTENSION]),
    row(names::PCI_SCAN, Phase::Init, Owner::Init, &[names::WORKER_START, derived::WORKER, names::AGENT_EXEC, names::STAGE0]),
    row(names::PCI_VPD, Phase::Init, Owner::Init, &[names::PCI_SCAN]),
    row(names::DRIVER_LOOK, Phase::Init, Owner::Init, &[names::PCI_SCAN]),
    row(derived::PREPARE, Phase::Init, Owner::Init, &[names::DRIVER_LOOK, names::PCI_SCAN]),
    row(names::DRIVER_FILES, Phase::Init, Owner::Init, &[derived::PREPARE, names::PCI_SCAN]),
    // One thread enables, and modules are loaded in the order of their dependencies.
    serial(row(names::MODULE_LOAD, Phase::ModuleLoad, Owner::Driver, &[derived::PREPARE, names::PCI_SCAN])),
    // The write to sysfs `enable` returns when the host has mapped the BARs.
    serial(row(names::GPU_ENABLE, Phase::BarMapping, Owner::Host, &[names::PCI_SCAN])),
    row(names::LANE_WAIT, Phase::Init, Owner::Init, &[names::GPU_ENABLE]),
    serial(row(derived::GPU_MAP, Phase::BarMapping, Owner::Host, &[])),
    serial(row(derived::GPU_PROBE, Phase::Probe, Owner::Driver, &[])),
    row(names::GPU_BIND, Phase::Probe, Owner::Driver, &[names::MODULE_LOAD]),
    row(names::GPU_INFORMATION, Phase::Probe, Owner::Driver, &[names::GPU_BIND, names::MODULE_LOAD]),
    row(names::DRIVER_NODES, Phase::CdiPublication, Owner::Init, &[names::MODULE_LOAD]),
    row(names::GPU_NODES, Phase::CdiPublication, Owner::Init, &[names::MODULE_LOAD]),
    row(names::GPU_INIT, Phase::AdapterInit, Owner::Driver, &[names::MODULE_LOAD]),
    row(names::CDI_PUBLISH, Phase::CdiPublication, Owner::Init, &[names::PCI_SCAN]),
    row(derived::SETTLE, Phase::Init, Owner::Init, &[]),
    row(derived::CONTAINER_REQUEST, Phase::Container, Owner::Runtime, &[derived::AGENT_START]),
    row(derived::CONTAINER_RESOLVE, Phase::Container, Owner::Agent, &[derived::CONTAINER_REQUEST, derived::AGENT_START]),
    waiting(row(derived::AGENT_WAIT, Phase::AgentWaiting, Owner::Agent, &[])),
    row(derived::AGENT_PAUSE, Phase::AgentWaiting, Owner::Agent, &[derived::CONTAINER_REQUEST]),
    row(derived::CONTAINER_CREATE, Phase::Container, Owner::Agent, &[derived::CONTAINER_REQUEST, derived::AGENT_START]),
    row(derived::SANDBOX_CREATE, Phase::AgentStart, Owner::Agent, &[derived::AGENT_START]),
    row(derived::CONTAINER_START, Phase::Container, Owner::Agent, &[derived::CONTAINER_CREATE]),
    // A fabric, or whoever attests.
    row(names::GPU_HELD, Phase::CdiPublication, Owner::Driver, &[names::GPU_INIT]),
    row(names::GPU_RESET, Phase::Probe, Owner::Driver, &[names::GPU_INIT]),
    // NVIDIA's programs, which no GPU and no container waits for.
    row(names::NVML, Phase::Other, Owner::Driver, &[]),
    row(names::SERVICE_START, Phase::Other, Owner::Driver, &[]),
];

/// What a name that is not in the table gets.
const UNKNOWN: Row = row("", Phase::Other, Owner::Unknown, &[]);

/// The row of a name.
pub fn classify(name: &str) -> Row {
    TABLE.iter().find(|row| row.name == name).copied().unwrap_or(UNKNOWN)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_has_one_row_and_what_it_follows_has_one_too() {
        for (at, row) in TABLE.iter().enumerate() {
            assert_eq!(TABLE.iter().position(|r| r.name == row.name), Some(at), "{} stands twice", row.name);
            assert!(row.follows.iter().all(|f| *f != row.name && TABLE.iter().any(|r| r.name == *f)), "{}", row.name);
        }
        assert_eq!((classify("new.step").owner, classify("new.step").phase), (Owner::Unknown, Phase::Other));
    }

    #[test]
    fn every_span_of_the_format_has_an_owner() {
        // The names that record.rs marks as spans: the file itself is the list.
        let text = include_str!("../../events/record.rs");
        let mut spans = 0;
        for (line, next) in text.lines().zip(text.lines().skip(1)) {
            if line.trim_start().starts_with("/// (span)") {
                let name = text[text.find(next.trim()).unwrap()..].split('"').nth(1).unwrap();
                assert_ne!(classify(name).owner, Owner::Unknown, "{name} is not in the table");
                spans += 1;
            }
        }
        assert!(spans >= 8, "only {spans} spans found");
    }
}
