//! Names of records and steps, one row each: what it is, whose time it takes, what it follows.
//!
//! A new kind of record is added here and where it is emitted: views, accounts and the description
//! of the format (src/wire/README.md) come from these rows. tests/host/catalogue.rs compares the
//! rows with what the sources emit.

use serde::Serialize;

named! {
    /// Party that could have made a step shorter.
    #[derive(PartialOrd, Ord, Serialize)]
    #[serde(rename_all = "lowercase")]
    pub enum Owner {
        /// The host's kernel and VFIO: mapping and pinning.
        Host = "host",
        Vmm = "vmm",
        Kernel = "kernel",
        Driver = "driver",
        Init = "init",
        Agent = "agent",
        /// Callers of the agent: the shim, containerd, Kubernetes.
        Runtime = "runtime",
        /// Client of containerd's CRI: the kubelet, for one.
        Client = "client",
        Unknown = "?",
    }
}

named! {
    /// Part of a boot, in the order in which they begin.
    #[derive(PartialOrd, Ord, Serialize)]
    #[serde(into = "&'static str")]
    pub enum Phase {
        Runtime = "runtime on the host",
        Vmm = "VMM and firmware",
        Kernel = "kernel",
        PciEnumeration = "PCI enumeration",
        Init = "init",
        AgentStart = "agent start",
        ModuleLoad = "module load",
        BarMapping = "host BAR mapping",
        Probe = "probe",
        AdapterInit = "adapter initialisation",
        CdiPublication = "CDI publication",
        AgentWaiting = "waiting of the agent",
        Container = "container",
        Other = "other",
    }
}

impl From<Phase> for &'static str {
    fn from(phase: Phase) -> Self {
        phase.name()
    }
}

/// Number of records of a name, and of which kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// Begin and end. An event of the same name reports trouble on the way.
    Span,
    /// A point in time.
    Event,
}

/// Place of a record in views.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rank {
    Shown,
    /// Shown with `-v`, or where a step was slow.
    Quick,
    /// Shown with `-v`.
    Detail,
}

/// Facts about one name.
#[derive(Clone, Copy, Debug)]
pub struct Row {
    pub name: &'static str,
    /// Sentences for people; a blank in front of each line.
    pub text: &'static str,
    pub form: Form,
    pub owner: Owner,
    pub phase: Phase,
    pub rank: Rank,
    /// Keys of `fields`, with their meaning; empty where the name says it.
    pub fields: &'static [(&'static str, &'static str)],
    /// Names of steps that end before this one can begin, by the order of the program; used only
    /// where the record has no `after`.
    pub follows: &'static [&'static str],
    /// Steps of this name run one after another, by the order of the program.
    pub serial: bool,
    /// Waits for what other steps do, or has nobody waiting for it: shown, and neither anybody's
    /// fault nor an explanation.
    pub waiting: bool,
}

/// Row of a name that stands in no table: a newer init, a foreign log.
const UNKNOWN: Row = Row {
    name: "",
    text: "",
    form: Form::Event,
    owner: Owner::Unknown,
    phase: Phase::Other,
    rank: Rank::Shown,
    fields: &[],
    follows: &[],
    serial: false,
    waiting: false,
};

/// Fields that a record of any name can have.
pub const COMMON_FIELDS: &[(&str, &str)] = &[
    ("index", "name of the GPU in CDI, with `gpu`"),
    (
        "generation",
        "how many times a GPU came to this address before; absent: never",
    ),
    (
        "cut_bytes",
        "length of the line whose fields were left out because it was too long",
    ),
];

/// Declares a module of names, and a table with a row for each:
/// `NAME = "name", FORM, OWNER, PHASE <- [FOLLOWS] { FIELD: "MEANING" }, KEY = VALUE;`, its text in
/// front as a comment.
macro_rules! rows {
    (
        $(#[doc = $about:literal])+ $module:ident, $(#[doc = $all:literal])+ $table:ident;
        $(
            $(#[doc = $text:literal])+
            $constant:ident = $name:literal, $form:ident, $owner:ident, $phase:ident
            $(<- [$($before:ident::$step:ident),+ $(,)?])?
            $({ $($field:ident: $meaning:literal),+ $(,)? })?
            $(, $key:ident = $value:expr)*;
        )+
    ) => {
        $(#[doc = $about])+
        pub mod $module {
            $($(#[doc = $text])+ pub const $constant: &str = $name;)+
        }

        $(#[doc = $all])+
        pub const $table: &[Row] = &[$(
            Row {
                name: $name,
                text: concat!($($text),+),
                form: Form::$form,
                owner: Owner::$owner,
                phase: Phase::$phase,
                $(follows: &[$($before::$step),+],)?
                $(fields: &[$((stringify!($field), $meaning)),+],)?
                $($key: $value,)*
                ..UNKNOWN
            }
        ),+];
    };
}

rows! {
    /// Names of the records of a guest's stream.
    names,
    /// Every record that the init emits, but `kmsg`.
    RECORDS;

    /// First instruction of PID 1.
    INIT_START = "init.start", Event, Init, Init
        { pid: "", version: "", build: "id of the program: that of `kata-gpu-init --version` and \
            of its release; absent where the linker made none" };
    /// Everything PID 1 does before it becomes the agent; the steps are its children.
    STAGE0 = "stage0", Span, Init, Init <- [derived::KERNEL_EXEC, derived::KERNEL];
    /// Mounting /proc, /sys, /dev and /run.
    STAGE0_MOUNTS = "stage0.mounts", Span, Init, Init, rank = Rank::Quick;
    /// Opening the console.
    STAGE0_CONSOLE = "stage0.console", Span, Init, Init
        <- [names::STAGE0_MOUNTS], rank = Rank::Quick;
    /// Reading the parameters.
    STAGE0_CONFIG = "stage0.config", Span, Init, Init
        <- [names::STAGE0_CONSOLE], rank = Rank::Quick;
    /// Extension disks mounted before the agent; the steps of `extension` are its children.
    STAGE0_EXTENSIONS = "stage0.extensions", Span, Init, Init <- [names::STAGE0_CONFIG];
    /// Finding the disks of all declared extensions, and matching them one to one.
    EXTENSION_DISKS = "extension.disks", Span, Init, Init
        <- [names::AGENT_EXEC, names::STAGE0_CONFIG]
        { declared: "how many" }, rank = Rank::Quick;
    /// One extension, from its verity table to its mount. As an event: data that failed its check
    /// after the boot.
    EXTENSION = "extension", Span, Init, Init <- [names::EXTENSION_DISKS]
        { extension: "its name", device: "", bytes: "of data", verity: "true" },
        serial = true;
    /// Opening the dm-verity device.
    EXTENSION_VERITY = "extension.verity", Span, Init, Init
        <- [names::EXTENSION_DISKS], rank = Rank::Quick;
    /// Mounting it: the first reads, and so the check of the root hash.
    EXTENSION_MOUNT = "extension.mount", Span, Init, Init
        <- [names::EXTENSION_VERITY], rank = Rank::Quick;
    /// Binding the driver's firmware over the kernel's directory.
    EXTENSION_FIRMWARE = "extension.firmware", Span, Init, Init
        <- [names::EXTENSION_MOUNT], rank = Rank::Quick;
    /// Adding the driver's libraries to the cache of the guest's loader.
    EXTENSION_LIBRARIES = "extension.libraries", Span, Init, Init
        <- [names::EXTENSION], rank = Rank::Quick;
    /// A parameter that was set, accepted under another name, or refused.
    CONFIG = "config", Event, Init, Init { parameter: "", value: "" };
    /// From just before execve until the kernel has replaced PID 1's program; failed: it could not.
    AGENT_EXEC = "agent.exec", Span, Init, AgentStart <- [derived::HANDOVER, names::STAGE0];
    /// The agent opened the CDI spec, or its directory.
    AGENT_LOOK = "agent.look", Event, Agent, Container { what: "" }, rank = Rank::Detail;
    /// A trace of the agent making or removing a container.
    AGENT_CONTAINER = "agent.container", Event, Agent, Container
        {
            what: "made, init began, program began, removed",
            container: "its id, with made and removed",
        },
        rank = Rank::Detail;
    /// A CDI hook of the init was started by the agent, or has ended; hooks at once may be one
    /// event.
    AGENT_HOOK = "agent.hook", Event, Agent, Container { what: "" }, rank = Rank::Detail;
    /// CLOCK_REALTIME beside CLOCK_BOOTTIME, to place log lines that carry wall time.
    CLOCK = "clock", Event, Init, Init { realtime_ns: "" }, rank = Rank::Detail;
    /// TSC when CLOCK_BOOTTIME was 0: the time since the VM's first vCPU was made, or since the end
    /// of QEMU's reset of the VM where that took over 1 s (src/init/machine/tsc.rs), if the TSC
    /// began with it. On arm64, of the virtual counter, which begins with the VM.
    CLOCK_TSC = "clock.tsc", Event, Init, Init
        { before_kernel_ns: "", error_ns: "", hz: "of the TSC", clocksource: "" },
        rank = Rank::Detail;
    /// CLOCK_BOOTTIME minus the clock of the kernel's log.
    CLOCK_PRINTK = "clock.printk", Event, Init, Init
        { offset_ns: "", error_ns: "absent: not bounded from above" }, rank = Rank::Detail;
    /// The host's CLOCK_REALTIME at this time, from the hypervisor.
    CLOCK_HOST = "clock.host", Event, Init, Init
        { source: "", realtime_ns: "", error_ns: "" }, rank = Rank::Detail;
    /// The worker, from its first instruction until it looks for GPUs: its helpers, its runtime,
    /// what it listens to.
    WORKER_START = "worker.start", Span, Init, Init
        <- [derived::WORKER, names::AGENT_EXEC], rank = Rank::Quick;
    /// Reading the GPUs from sysfs.
    PCI_SCAN = "pci.scan", Span, Init, Init
        <- [names::WORKER_START, derived::WORKER, names::AGENT_EXEC, names::STAGE0]
        { gpus: "how many" };
    /// Reading the VPD of Mellanox functions, before any GPU is enabled; not where the topology
    /// does not depend on it. As an event: one that cannot be read.
    PCI_VPD = "pci.vpd", Span, Init, Init <- [names::PCI_SCAN]
        {
            functions: "read",
            management: "how many of them manage NVSwitches",
            function: "address of one that cannot be read",
        };
    /// Kind of this guest, and why; another one after the first where GPUs came before the driver's
    /// load.
    TOPOLOGY = "topology", Event, Init, Init
        {
            topology: "a value of the parameter `topology`",
            gpus: "how many",
            switches: "how many",
            management: "how many functions manage switches",
            functions: "their addresses",
            reason: "",
            decided_by: "scan, parameter, nvml",
            nvlink: "disabled (the driver is loaded with NVreg_NvLinkDisable=1), unchanged",
            nvlink_reason: "",
        };
    /// GPUs came after the driver was loaded, and the topology it was loaded with does not fit
    /// them.
    TOPOLOGY_OUTGROWN = "topology.outgrown", Event, Init, Init { gpus: "how many" };
    /// A GPU was found, or has another name since others came or went.
    GPU_FOUND = "gpu.found", Event, Init, Init
        {
            device: "PCI device id",
            inode: "of its directory in sysfs",
            hot_plugged: "true where it was not in the boot scan",
        },
        rank = Rank::Detail;
    /// Looking for the driver in the image: its version, its options. The strategy depends on it.
    DRIVER_LOOK = "driver.look", Span, Init, Init <- [names::PCI_SCAN], rank = Rank::Quick;
    /// Reading the driver's module and the GPUs' firmware from the disk into memory, parallel to
    /// everything else, before they are asked for; not where they lie in RAM, as in an initrd.
    /// Nothing waits for this.
    READAHEAD = "readahead", Span, Init, Init <- [names::PCI_SCAN]
        { files: "their names", bytes: "of all" }, rank = Rank::Quick, waiting = true;
    /// How this boot binds and initialises, and why.
    STRATEGY = "strategy", Event, Init, Init
        {
            bind: "",
            init: "",
            reason: "",
            gpus: "how many",
            driver: "its version",
            confidential: "",
            vcpus: "how many",
            first_enable_ms: "",
        };
    /// Writing sysfs `enable`: returns when the host has mapped the BARs. One thread enables.
    GPU_ENABLE = "gpu.enable", Span, Host, BarMapping <- [names::PCI_SCAN], serial = true;
    /// The next GPU is not enabled yet: this one is probed and goes through the first part of its
    /// initialisation undisturbed.
    LANE_WAIT = "lane.wait", Span, Init, Init <- [names::GPU_ENABLE]
        { held_by: "GPU that is probed" }, rank = Rank::Quick;
    /// The enable lane has a vCPU to itself.
    LANE_CPU = "lane.cpu", Event, Init, Init
        {
            cpu: "",
            moved: "interrupts moved off it",
            late: "interrupts moved when they arrive the next time",
            stay: "interrupts that stay",
        };
    /// Loading one module, in the order of their dependencies.
    MODULE_LOAD = "module.load", Span, Driver, ModuleLoad
        <- [derived::PREPARE, names::PCI_SCAN]
        {
            module: "",
            already: "at the end: the kernel had it",
            unpacked: "at the end: format, where the init decompressed it",
        },
        serial = true;
    /// Memory of coherent GPUs (Grace), which the driver adds to the guest's: the kernel's policy
    /// for it was set to online_movable before the driver's load. Only where ACPI describes such
    /// GPUs. With `error` where the driver will refuse it, or where managing it takes more RAM than
    /// there is.
    MEMORY_COHERENT = "memory.coherent", Event, Init, Init
        {
            policy: "auto_online_blocks as it was found",
            gpu_memory_mib: "",
            page_structs_mib: "RAM to manage it",
            available_mib: "RAM",
        };
    /// The nodes that every container needs, from the end of the driver's load on; the load of
    /// nvidia-uvm is its child.
    DRIVER_NODES = "driver.nodes", Span, Init, CdiPublication
        <- [names::MODULE_LOAD], rank = Rank::Quick;
    /// A line of modprobe.d that is not followed, or a soft dependency that is left out; with
    /// `error` when it may be missed.
    MODULE_CONFIG = "module.config", Event, Init, Init { module: "", note: "" };
    /// From the first try to bind until the driver has it.
    GPU_BIND = "gpu.bind", Span, Driver, Probe <- [names::MODULE_LOAD], rank = Rank::Detail;
    /// Asking the driver for the minor of a GPU that it has bound; the driver looks at the GPU for
    /// that.
    GPU_INFORMATION = "gpu.information", Span, Driver, Probe
        <- [names::GPU_BIND, names::MODULE_LOAD], rank = Rank::Quick;
    /// The driver has the GPU.
    GPU_BOUND = "gpu.bound", Event, Driver, Probe
        { minor: "", bind_inode: "of its link to the driver in sysfs" };
    /// Making device nodes.
    GPU_NODES = "gpu.nodes", Span, Init, CdiPublication
        <- [names::MODULE_LOAD], rank = Rank::Quick;
    /// Adapter initialisation, from open() until the driver says how it ended.
    GPU_INIT = "gpu.init", Span, Driver, AdapterInit <- [names::MODULE_LOAD]
        {
            attach_ms: "from its begin to the end of its first part, where that is seen; at the \
                end",
            rc: "at the end",
            status: "at the end",
        }, rank = Rank::Detail;
    /// Reset of a GPU that an earlier guest left half initialised: unbind, reset, bind; once per
    /// device, after its initialisation has failed. The GPU then comes again: another generation.
    GPU_RESET = "gpu.reset", Span, Driver, Probe <- [names::GPU_INIT]
        { method: "flr, bus", inode: "of its directory in sysfs", reason: "" };
    /// Looking for the driver's user space. As an event: what could not be looked at, or why the
    /// manifest was not used.
    DRIVER_FILES = "driver.files", Span, Init, Init <- [derived::PREPARE, names::PCI_SCAN]
        {
            version: "at the end",
            mounts: "at the end",
            links: "at the end",
            manifest: "at the end: whether that spared a scan",
            absent: "at the end: files that containers usually get, and lack here",
        };
    /// Writing the CDI spec.
    CDI_PUBLISH = "cdi.publish", Span, Init, CdiPublication <- [names::PCI_SCAN]
        { ready: "indices", pending: "indices", failed: "indices", bytes: "" },
        rank = Rank::Quick;
    /// The GPU's CDI entry is resolvable from now on.
    GPU_PUBLISHED = "gpu.published", Event, Init, CdiPublication;
    /// Devices that containers can get besides GPUs' own nodes: of a GPU, or of another kind whose
    /// spec is published; with `error` when it is missing.
    CDI_EXTRA_DEVICES = "cdi.extra-devices", Event, Init, CdiPublication
        {
            displays: "of the GPU",
            instances: "how many the GPU has now",
            kind: "",
            devices: "how many",
            bytes: "of the spec",
        };
    /// Adapter initialisation is done.
    GPU_USABLE = "gpu.usable", Event, Driver, AdapterInit
        { uuid: "where that is a name of GPUs" };
    /// The GPU will not be usable, or no longer is; `error` is the sentence for people.
    GPU_FAILED = "gpu.failed", Event, Init, Other
        {
            step: "",
            reason: "a code: src/wire/failure/reason.rs",
            whose: "where the cure is applied",
            sure: "certain, likely or unsure",
            words: "the driver's message that decides",
            cure: "",
            nearby: "what the driver logged at that time without an address, of whichever GPU",
            bind_inode: "where the driver has it",
        };
    /// The GPU has left the bus or its driver, or is about to: it is no longer in the spec, and its
    /// descriptors are given up.
    GPU_REMOVED = "gpu.removed", Event, Init, Other;
    /// The driver reported an error of a GPU.
    GPU_XID = "gpu.xid", Event, Driver, Other
        { xid: "", answers: "of Xid 79: whether the GPU's config space does" };
    /// A GPU is still in a step after a deadline; nothing is killed.
    GPU_LATE = "gpu.late", Event, Init, Other
        {
            step: "",
            waited_ms: "",
            stack: "of the task in the kernel, innermost first, where readable",
        };
    /// A PCI uevent of a GPU.
    UEVENT = "uevent", Event, Kernel, Other { action: "", driver: "" }, rank = Rank::Detail;
    /// All GPUs are usable or failed.
    SETTLED = "settled", Event, Init, Other { usable: "how many", failed: "how many" };
    /// Asking NVML, once all GPUs are settled, in a helper process. As an event: why it was not
    /// asked, or its trouble.
    NVML = "nvml", Span, Driver, Other
        {
            devices: "at the end: how many",
            driver: "at the end: its version",
            nvml: "at the end: its version",
            reason: "of an event",
        };
    /// Conditions that a GPU must meet before containers get it.
    READINESS = "readiness", Event, Init, Init
        { waits_for: "bind, initialisation, fabric, ready state, or several", reason: "" };
    /// A usable GPU is kept from containers, from the first answer of NVML until it is given: by a
    /// fabric, or by whoever attests.
    GPU_HELD = "gpu.held", Span, Driver, CdiPublication <- [names::GPU_INIT]
        { waits_for: "state by NVML", deadline_ms: "", state: "at the end" };
    /// A GPU that containers could get is kept from them again (`reason`), or has been kept for too
    /// long (`waits_for`, `waited_ms`; `error` with the cure).
    GPU_WITHHELD = "gpu.withheld", Event, Init, CdiPublication
        { reason: "", waits_for: "", waited_ms: "" };
    /// Containers get a GPU that does not work as it should.
    GPU_DEGRADED = "gpu.degraded", Event, Init, CdiPublication
        { state: "of its fabric, or the ready state", reason: "" };
    /// NVML's facts of a GPU, as far as driver and GPU have them. With `error` alone: what of it is
    /// wrong, or differs from what PCI and the driver's /proc say.
    GPU_HEALTH = "gpu.health", Event, Init, Other
        {
            uuid: "",
            model: "",
            mig: "instances, as GPU-INSTANCE/COMPUTE-INSTANCE=UUID",
            persistence: "",
            graphics_mhz: "",
            memory_mhz: "",
            power_mw: "",
            power_limit_mw: "",
            ecc: "",
            ecc_uncorrected: "",
            rows_remapped: "",
            remap_pending: "",
            remap_failed: "",
            throttle: "",
            fabric: "",
            fabric_status: "",
            fabric_health: "",
            clique: "",
            cluster: "",
            nvlinks: "",
            nvlinks_active: "",
        },
        rank = Rank::Detail;
    /// A clock range or a power limit of a GPU; with `error` where it was refused.
    GPU_SETTING = "gpu.setting", Event, Init, Other { what: "", min: "", max: "" };
    /// Confidential-computing state of the GPUs.
    CONFIDENTIAL = "confidential", Event, Init, Other
        {
            enabled: "",
            environment: "production, simulated, unavailable",
            devtools: "",
            protected_pcie: "",
            ready: "",
        };
    /// No more modules can be loaded from here on.
    LOCKDOWN = "lockdown", Event, Init, Init { modules_disabled: "" };
    /// Records that a reader will never see.
    STREAM_LOST = "stream.lost", Event, Init, Other
        { lost: "how many", at: "which reader or source" };
    /// A sink got its peer, or lost it; a source of records cannot be had.
    SINK = "sink", Event, Init, Other
        { sink: "", state: "", reason: "", errno: "", service: "" },
        rank = Rank::Detail;
    /// The machine is about to power off; `error` says why.
    POWER_OFF = "power-off", Event, Init, Other;
    /// The kernel gave no thread; it is asked again until it does.
    THREAD_LATE = "thread.late", Event, Init, Other;
    /// Decision about a service of NVIDIA's; with `error` when the image lacks what the guest
    /// needs.
    SERVICE_PLAN = "service.plan", Event, Init, Other
        { service: "", starts: "", reason: "", waits_for: "services" };
    /// From the start of a service until it is ready; failed with its last lines where it ended
    /// instead.
    SERVICE_START = "service.start", Span, Driver, Other
        {
            service: "",
            program: "",
            found: "it runs since an earlier worker",
            port_guid: "of the management function that the fabric manager uses",
            main_pid: "at the end",
            uvm: "at the end: why persistenced has UVM persistence mode or not",
        };
    /// A service is not ready after a deadline; nothing is killed.
    SERVICE_LATE = "service.late", Event, Init, Other
        { service: "", waited_ms: "", waits_for: "" };
    /// A service that was ready has ended.
    SERVICE_ENDED = "service.ended", Event, Init, Other
        {
            service: "",
            status: "",
            lines: "its last ones",
            restart_ms: "pause before the next start; absent: it stays off",
        };
    /// A line that a service wrote, within bounds.
    SERVICE_LOG = "service.log", Event, Init, Other
        {
            service: "",
            from: "output, syslog",
            text: "",
            dropped: "lines before it that are not here",
        };
    /// A process of the init died.
    PROCESS_DIED = "process.died", Event, Init, Other
        { process: "", status: "", number: "of a worker, since the boot; each is reported once" };
}

rows! {
    /// Names of steps that no record carries: worked out from others, or imported.
    derived,
    /// Every step that a boot's timeline has beside those of the guest's stream.
    STEPS;

    /// containerd's own time between RunPodSandbox of the CRI and its answer: images, snapshots,
    /// the network namespace, and the start of the shim's process.
    RUN_POD_SANDBOX = "containerd.run-pod-sandbox", Span, Runtime, Runtime;
    /// From containerd's call of CNI until its answer.
    CNI = "cni.setup", Span, Runtime, Runtime;
    /// The shim's own time between containerd's call to create and its answer: the VMM's process,
    /// virtiofsd, mounts, connecting to the agent.
    SHIM_CREATE = "shim.create", Span, Runtime, Runtime;
    /// The shim's own time between containerd's call to start and its answer.
    SHIM_START = "shim.start", Span, Runtime, Runtime;
    /// containerd's own time between CreateContainer of the CRI and its answer.
    CREATE_CONTAINER = "containerd.create-container", Span, Runtime, Runtime;
    /// containerd's own time between StartContainer of the CRI and its answer.
    START_CONTAINER = "containerd.start-container", Span, Runtime, Runtime;
    /// From an answer of containerd until the next request for the same pod.
    NOBODY_ASKED = "nobody-asked", Span, Client, Runtime;
    /// From the start of the VMM's process until the firmware or the kernel runs.
    VMM = "vmm", Span, Vmm, Vmm;
    /// The guest's firmware.
    FIRMWARE = "firmware", Span, Vmm, Vmm <- [derived::VMM];
    /// VMM and firmware as one, by the guest's TSC: from the VM's first CPU, or from the end of
    /// QEMU's reset where that took over 1 s (src/init/machine/tsc.rs), until the kernel's clock
    /// begins, its own first steps included.
    VMM_FIRMWARE = "vmm+firmware", Span, Vmm, Vmm;
    /// From the kernel's start until it starts the first program.
    KERNEL = "kernel", Span, Kernel, Kernel
        <- [derived::VMM_FIRMWARE, derived::FIRMWARE, derived::VMM];
    /// From the kernel's `Trying to unpack rootfs image as initramfs...` until it has freed the
    /// archive: longer for a larger image.
    KERNEL_INITRD = "kernel.initrd", Span, Kernel, Kernel;
    /// From the first to the last line of one round of PCI enumeration.
    KERNEL_PCI = "kernel.pci", Span, Kernel, PciEnumeration;
    /// From the kernel's `Run ... as init process` to the first instruction of the init.
    KERNEL_EXEC = "kernel.exec-init", Span, Kernel, Kernel <- [derived::KERNEL];
    /// PID 1 between the end of stage 0 and the exec of the agent.
    HANDOVER = "init.handover", Span, Init, Init <- [names::STAGE0];
    /// From the exec of the agent until the worker begins its first step.
    WORKER = "init.worker", Span, Init, Init <- [names::AGENT_EXEC];
    /// From the look at the image to the first module load: the strategy, which may wait until the
    /// first enabling is measured.
    PREPARE = "init.prepare", Span, Init, Init <- [names::DRIVER_LOOK, names::PCI_SCAN];
    /// From the end of the last GPU's last step until the worker has heard of it and says that all
    /// are usable or failed.
    SETTLE = "init.settle", Span, Init, Init;
    /// A GPU's probe inside a module load, from the kernel's `enabling device`: the host maps its
    /// BARs, and 2 to 4 ms of probe.
    GPU_MAP = "gpu.map", Span, Host, BarMapping, serial = true;
    /// The same for a GPU whose probe may sleep for seconds until its BAR firewall is down: the
    /// driver's.
    GPU_PROBE = "gpu.probe", Span, Driver, Probe, serial = true;
    /// From the exec of the agent until it says that it is ready.
    AGENT_START = "agent.start", Span, Agent, AgentStart
        <- [names::AGENT_EXEC, derived::HANDOVER, names::STAGE0];
    /// From the shim's request for the sandbox until the agent has answered.
    SANDBOX_CREATE = "sandbox.create", Span, Agent, AgentStart <- [derived::AGENT_START];
    /// From the agent's readiness until somebody asked it for a container; with a pause container,
    /// from its creation, too.
    CONTAINER_REQUEST = "container.request", Span, Runtime, Container
        <- [derived::AGENT_START];
    /// From the request for a container until the agent tried to resolve its devices for the first
    /// time.
    CONTAINER_RESOLVE = "container.resolve", Span, Agent, Container
        <- [derived::CONTAINER_REQUEST, derived::AGENT_START];
    /// From a container's first failed try until the devices it asked for were published.
    AGENT_WAIT = "agent.wait", Span, Agent, AgentWaiting, waiting = true;
    /// From the publication of a container's last device until the agent looked again: it tries
    /// once a second.
    AGENT_PAUSE = "agent.pause", Span, Agent, AgentWaiting <- [derived::CONTAINER_REQUEST];
    /// From the agent's last look at the spec, or from the request where there is nothing to
    /// resolve, until the container was created.
    CONTAINER_CREATE = "container.create", Span, Agent, Container
        <- [derived::CONTAINER_REQUEST, derived::AGENT_START];
    /// From the request to start a container until its program runs.
    CONTAINER_START = "container.start", Span, Agent, Container
        <- [derived::CONTAINER_CREATE];
}

rows! {
    /// Names of records that only other programs' logs give; where a log says what the guest's
    /// stream says, the name is that of [`names`].
    logged,
    /// Every record of an imported boot beside those of the guest's stream.
    LOGGED;

    /// The agent announced itself.
    AGENT_START = "agent.start", Event, Agent, Other { version: "" };
    /// The agent's server listens.
    AGENT_READY = "agent.ready", Event, Agent, Other;
    /// The runtime called the agent.
    AGENT_RPC = "agent.rpc", Event, Agent, Other { call: "" };
    /// One try of the agent to resolve a container's devices failed; `error` is the agent's.
    AGENT_CDI_TRY = "agent.cdi-try", Event, Agent, Other { container: "", try: "" };
    /// From the agent's first failed try until it had the devices, or gave up.
    AGENT_CDI_WAIT = "agent.cdi-wait", Span, Agent, AgentWaiting
        { container: "", failed_tries: "" }, waiting = true;
    /// The runtime asked the agent for a container.
    CONTAINER_ASKED = "container.asked", Event, Agent, Other
        { container: "", devices: "", pause: "true: of the pod's pause container" };
    /// The agent has created a container.
    CONTAINER_CREATED = "container.created", Event, Agent, Other
        { container: "", devices: "", tries: "", pause: "" };
    /// The agent could not create a container; `error` says why.
    CONTAINER_FAILED = "container.failed", Event, Agent, Other
        { container: "", devices: "", tries: "" };
    /// A container's program runs.
    CONTAINER_STARTED = "container.started", Event, Agent, Other { container: "" };
    /// A hook in the agent's own namespaces failed; `error` is the agent's.
    AGENT_HOOK_FAILED = "agent.hook-failed", Event, Agent, Other;
    /// A message of NVRC.
    NVRC = "nvrc", Event, Init, Other { text: "" };
    /// All BARs of a GPU have their place.
    GPU_BARS = "gpu.bars", Event, Kernel, Other { bars: "" };
    /// The guest, or what ran in it, came to its end; `error` has the words.
    GUEST_ENDED = "guest.ended", Event, Init, Other
        { reason: "", whose: "", sure: "", cure: "" };
    /// From the driver's line about the probe of an NVSwitch until the next step of its load.
    SWITCH_PROBE = "switch.probe", Span, Driver, Probe { function: "" };
    /// The driver cleared an interrupt that it finds when an initialisation starts; it does not say
    /// of which GPU.
    GPU_INIT_MARK = "driver.init-mark", Event, Driver, Other { nth: "" };
    /// containerd was asked for something by its CRI, or has answered.
    SANDBOX_RUN = "sandbox.run", Event, Runtime, Other { call: "", container: "", pod: "" };
    /// containerd called CNI, or CNI has answered.
    SANDBOX_CNI = "sandbox.cni", Event, Runtime, Other { call: "" };
    /// containerd called the shim, or the shim has answered.
    SANDBOX_SHIM = "sandbox.shim", Event, Runtime, Other { call: "", container: "" };
    /// The runtime starts the VM.
    SANDBOX_VM_STARTING = "sandbox.vm-starting", Event, Runtime, Other;
    /// The VM was started.
    SANDBOX_VM_STARTED = "sandbox.vm-started", Event, Runtime, Other;
    /// The runtime has reached the agent.
    SANDBOX_AGENT_STARTED = "sandbox.agent-started", Event, Runtime, Other;
    /// The sandbox was started.
    SANDBOX_STARTED = "sandbox.started", Event, Runtime, Other;
    /// The sandbox is ready.
    SANDBOX_READY = "sandbox.ready", Event, Runtime, Other;
    /// The runtime gave the sandbox or one of its containers up; `error` is its innermost error.
    SANDBOX_FAILED = "sandbox.failed", Event, Runtime, Other
        { reason: "", whose: "", sure: "", cure: "", waited_ms: "" };
    /// Another line of the runtime about the sandbox, at the level of errors.
    SANDBOX_LOG = "sandbox.log", Event, Runtime, Other { text: "" };
    /// A container was started, by the runtime.
    SANDBOX_CONTAINER_STARTED = "sandbox.container-started", Event, Runtime, Other;
    /// Creation of the pod, by its object.
    POD_CREATED = "pod.created", Event, Client, Other { pod: "" };
    /// Start of the pod, by its object.
    POD_STARTED = "pod.started", Event, Client, Other { pod: "" };
    /// A condition of the pod, by its object.
    POD_CONDITION = "pod.condition", Event, Client, Other { pod: "" };
    /// Start of a container, by the pod's object.
    POD_CONTAINER_STARTED = "pod.container-started", Event, Client, Other { container: "" };
    /// End of a container, by the pod's object.
    POD_CONTAINER_ENDED = "pod.container-ended", Event, Client, Other { container: "" };
}

rows! {
    /// Names that `kata-gpu-boot doctor --record` gives to what it records on the host.
    traced,
    /// Everything that the host's trace of a boot has: spans are steps, events are counts over the
    /// whole recording.
    TRACED;

    /// From the start of the shim's process until the VMM's program begins.
    SHIM = "vm.shim", Span, Runtime, Runtime { pid: "" };
    /// From the exec of the VMM's program until a vCPU runs for the first time.
    VMM_START = "vmm.start", Span, Vmm, Vmm <- [traced::SHIM] { pid: "" };
    /// VFIO or IOMMUFD pins and maps guest memory: one call of the VMM.
    VMM_PIN = "vmm.pin", Span, Host, Vmm
        {
            bytes: "",
            calls: "of the function that pins pages",
            pages_a_call: "by powers of ten",
            guest_address: "",
            tid: "of the VMM's thread",
            thread: "its name",
        },
        rank = Rank::Quick;
    /// VFIO or IOMMUFD pins and maps a BAR of a function, so that other devices reach it: one call
    /// of the VMM.
    VMM_MAP_BAR = "vmm.map-bar", Span, Host, BarMapping
        {
            function: "the host's address",
            bar: "",
            bytes: "",
            calls: "of the function that pins pages",
            pages_a_call: "by powers of ten",
            guest_address: "",
            tid: "of the VMM's thread",
            thread: "its name",
        },
        rank = Rank::Quick;
    /// VFIO takes mappings of guest memory or of a BAR back: one call of the VMM.
    VMM_UNMAP = "vmm.unmap", Span, Host, BarMapping
        { bytes: "", guest_address: "", tid: "of the VMM's thread" }, rank = Rank::Quick;
    /// The VMM opens a function for itself: enabling, power state, reset where there is one.
    VFIO_OPEN = "vfio.open", Span, Host, Vmm { function: "the host's address" };
    /// The kernel resets a function.
    VFIO_RESET = "vfio.reset", Span, Host, Vmm
        { function: "the host's address" }, rank = Rank::Quick;
    /// Exits of the guest that the VMM's process answered, and accesses that are PCI configuration
    /// or the serial console.
    KVM_EXITS = "kvm.exits", Event, Vmm, Other { calls: "exits", kinds: "by reason" };
    /// First accesses to mapped BARs, which the kernel answers with page tables; those of pinning
    /// are among them.
    VMM_MMAP_FAULT = "vmm.mmap-fault", Event, Host, Other { calls: "faults" };
    /// Page faults of the VMM's process.
    VMM_PAGE_FAULTS = "vmm.page-faults", Event, Vmm, Other { calls: "faults" };
    /// Memory of the VMM's process at one moment: bytes of each kind.
    VMM_MEMORY = "vmm.memory", Event, Vmm, Other
        { bytes: "resident", kinds: "by kind" }, rank = Rank::Detail;
}

/// Former names of records, with the present ones: streams of released inits have them.
pub const RENAMED: &[(&str, &str)] = &[("cdi.beside", names::CDI_EXTRA_DEVICES)];

/// Row of a step or record. Of `agent.start`, which is a step's name and a record's, the step's.
pub fn row_of(name: &str) -> Row {
    let mut all = [RECORDS, STEPS, LOGGED, TRACED].into_iter().flatten();
    all.find(|row| row.name == name).copied().unwrap_or(UNKNOWN)
}

/// Rows of everything that takes time in a guest's boot.
pub fn steps() -> impl Iterator<Item = &'static Row> {
    RECORDS
        .iter()
        .filter(|row| row.form == Form::Span)
        .chain(STEPS)
}

/// Fields of a record that the catalogue does not have for its name.
pub fn undocumented<'a>(
    name: &str,
    fields: impl IntoIterator<Item = &'a str>,
) -> impl Iterator<Item = &'a str> {
    let documented = row_of(name).fields;
    let is_known = move |field: &&str| {
        documented
            .iter()
            .chain(COMMON_FIELDS)
            .any(|(known, _)| known == field)
    };
    fields.into_iter().filter(move |field| !is_known(field))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_follow_steps_that_are_in_the_tables() {
        let names: Vec<&str> = [RECORDS, STEPS, LOGGED, TRACED]
            .into_iter()
            .flatten()
            .map(|r| r.name)
            .collect();
        for (at, name) in names.iter().enumerate() {
            let first = names.iter().position(|other| other == name);
            // A record that gives its name to a step.
            assert!(
                first == Some(at) || *name == logged::AGENT_START,
                "{name} stands twice"
            );
        }
        for (old, new) in RENAMED {
            assert!(!names.contains(old) && names.contains(new), "{old}");
        }
        for row in steps() {
            let known =
                |before: &str| before != row.name && steps().any(|step| step.name == before);
            assert!(
                row.follows.iter().all(|before| known(before)),
                "{}",
                row.name
            );
            assert_ne!(row.owner, Owner::Unknown, "{}", row.name);
        }
        let unknown = row_of("new.step");
        assert_eq!(
            (unknown.owner, unknown.phase),
            (Owner::Unknown, Phase::Other)
        );
    }

    #[test]
    fn each_phase_has_a_name_of_its_own() {
        for phase in Phase::ALL {
            assert_eq!(Phase::named(phase.name()), Some(phase));
        }
        assert_eq!(Phase::named("new"), None);
    }
}
