//! Settings of a boot, as values.

use crate::extensions::Extension;
use crate::gpu::topology::{NvLink, Topology};
use kata_gpu_wire::named;
use kata_gpu_wire::record::{DEFAULT_PORT, Level};
use std::path::PathBuf;

named! {
    /// A way to name GPUs.
    pub enum Naming {
        /// `0`, `0:1`: the names Kata requests.
        Index = "index",
        /// `GPU-..`, `MIG-..`.
        Uuid = "uuid",
        /// `gpu0`, `mig0:1`.
        TypeIndex = "type-index",
    }
}

named! {
    /// Ways to do the work that needs a container's root.
    pub enum Hooks {
        /// Links as mounts, and one hook for the rest.
        One = "one",
        /// Links as mounts, and no hook: the container must set its own library path.
        None = "none",
    }
}

named! {
    /// Method of binding GPUs to the driver.
    pub enum Bind {
        /// Decided at boot; see `boot::bring_up::strategy`.
        Auto = "auto",
        /// The driver probes all GPUs in its module init, one after another.
        Insmod = "insmod",
        /// The module is loaded with one GPU; the others are bound one by one as the host has
        /// mapped their BARs.
        Pipelined = "pipelined",
        /// Like `Pipelined`, with one thread per GPU.
        Concurrent = "concurrent",
    }
}

named! {
    /// Order of adapter initialisation.
    pub enum Init {
        /// GPUs in parallel, as many at once as the driver allows.
        Parallel = "parallel",
        /// GPUs in turn.
        Serial = "serial",
    }
}

named! {
    /// Condition for a GPU's CDI entry to become resolvable.
    pub enum Ready {
        /// When the driver has bound the GPU; in a topology with a fabric, when the fabric is
        /// complete.
        Auto = "auto",
        /// When the driver has bound the GPU.
        Bound = "bound",
        /// When the adapter is initialised as well.
        Usable = "usable",
    }
}

named! {
    /// Setter of the ready state of confidential GPUs. CUDA fails on them until it is on.
    pub enum ReadyState {
        /// The container or another program that attests the GPUs.
        Leave = "leave",
        /// Same setter as `Leave`, and no container gets a GPU before.
        Wait = "wait",
        /// The init, once all GPUs are settled; no container gets a GPU before.
        Boot = "boot",
    }
}

named! {
    /// Time of the CDI spec's publication.
    pub enum Cdi {
        /// From the PCI scan on.
        Live = "live",
        /// Once all GPUs are usable or failed.
        Complete = "complete",
    }
}

named! {
    /// Process of the agent.
    pub enum Agent {
        /// PID 1 becomes the agent.
        Exec = "exec",
        /// PID 1 stays the init and supervises the agent.
        Child = "child",
    }
}

named! {
    /// Switch; `Auto` leaves the choice to the boot.
    #[derive(Default)]
    pub enum Switch {
        #[default]
        Auto = "auto",
        On = "on",
        Off = "off",
    }
}

named! {
    /// Order in which fabric manager gives NVLink rails to partitions (`PARTITION_RAIL_POLICY`).
    pub enum RailPolicy {
        Greedy = "greedy",
        Symmetric = "symmetric",
    }
}

/// Choices about NVIDIA's services.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Services {
    pub nvlsm: Switch,
    pub fabric_manager: Switch,
    pub persistenced: Switch,
    /// Start of persistenced with `--uvm-persistence-mode`.
    pub uvm_persistence: Switch,
    pub host_engine: Switch,
    pub dcgm_exporter: Switch,
    pub imex_daemon: Switch,
    /// None: as in the package's configuration, or `symmetric` if NVIDIA requires that.
    pub rail_policy: Option<RailPolicy>,
}

/// Records for the console.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ToConsole {
    /// Up to info, except in a confidential guest, whose host reads the console: errors alone.
    Auto,
    /// Up to this level.
    UpTo(Level),
    Off,
}

impl ToConsole {
    /// The least urgent level for the console.
    pub fn level(self, confidential: impl FnOnce() -> bool) -> Option<Level> {
        match self {
            Self::Auto if confidential() => Some(Level::Error),
            Self::Auto => Some(Level::Info),
            Self::UpTo(level) => Some(level),
            Self::Off => None,
        }
    }
}

/// All settings of a boot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    pub agent: Agent,
    pub bind: Bind,
    pub init: Init,
    /// Number of GPUs that initialise before all others.
    pub first: usize,
    /// The driver may release its global lock while a GPU's own processor boots.
    pub relaxed: bool,
    pub ready: Ready,
    /// Whether a GPU without a good fabric is kept from containers.
    pub fabric_required: Switch,
    pub ready_state: ReadyState,
    pub cdi: Cdi,
    /// Names by which containers can request a GPU; never empty.
    pub cdi_names: Vec<Naming>,
    pub cdi_hooks: Hooks,
    /// IMEX channels to make.
    pub imex_channels: u32,
    /// GPUs that must exist; None: as many as are found.
    pub expected_gpus: Option<usize>,
    /// None: decided by the PCI scan.
    pub topology: Option<Topology>,
    pub nvlink: NvLink,
    /// One reset of a GPU that was left half initialised; `Auto`: not in a confidential guest.
    pub reset: Switch,
    pub lockdown: bool,
    /// `Auto`: not in a confidential guest, whose host is not trusted.
    pub events_to_host: Switch,
    pub events_port: u32,
    pub console: ToConsole,
    /// Extension disks; error: reason why the guest must stop.
    pub extensions: Result<Vec<Extension>, String>,
    /// Root of the driver's user space, modules and firmware; None: found.
    pub driver_root: Option<PathBuf>,
    pub services: Services,
    /// Range of all GPUs' graphics clocks, in MHz; None: the driver's.
    pub graphics_mhz: Option<Range>,
    /// Range of all GPUs' memory clocks, in MHz; None: the driver's.
    pub memory_mhz: Option<Range>,
    /// Power limit of each GPU, in W; None: the driver's.
    pub power_w: Option<u32>,
}

/// A range of frequencies, both ends in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    pub min: u32,
    pub max: u32,
}

impl Config {
    /// Whether events go to the host over vsock: a confidential guest must be asked for them.
    pub fn sends_events(&self, is_confidential: impl FnOnce() -> bool) -> bool {
        match self.events_to_host {
            Switch::On => true,
            Switch::Off => false,
            Switch::Auto => !is_confidential(),
        }
    }
}

impl Default for Config {
    fn default() -> Self {
        Self {
            agent: Agent::Exec,
            bind: Bind::Auto,
            init: Init::Parallel,
            first: 0,
            relaxed: true,
            ready: Ready::Auto,
            fabric_required: Switch::Auto,
            ready_state: ReadyState::Leave,
            cdi: Cdi::Live,
            cdi_names: vec![Naming::Index],
            cdi_hooks: Hooks::One,
            imex_channels: 0,
            expected_gpus: None,
            topology: None,
            nvlink: NvLink::Auto,
            reset: Switch::Auto,
            lockdown: true,
            events_to_host: Switch::Auto,
            events_port: DEFAULT_PORT,
            console: ToConsole::Auto,
            extensions: Ok(Vec::new()),
            driver_root: None,
            services: Services::default(),
            graphics_mhz: None,
            memory_mhz: None,
            power_w: None,
        }
    }
}
