//! Settings of a boot, as values.

use crate::extensions::Extension;
use crate::gpu::topology::{NvLink, Topology};
use kata_gpu_wire::record::{DEFAULT_PORT, Level};

/// A way to name GPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Naming {
    /// `0`, `0:1`: the names Kata requests.
    Index,
    /// `GPU-..`, `MIG-..`.
    Uuid,
    /// `gpu0`, `mig0:1`.
    TypeIndex,
}

/// Ways to do the work that needs a container's root.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hooks {
    /// Links as mounts, and one hook for the rest.
    One,
    /// The incumbent's six.
    Compat,
    /// Links as mounts, and no hook: the container must set its own library path.
    None,
}

/// Method of binding GPUs to the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bind {
    /// Decided at boot; see `boot::gpus::strategy`.
    Auto,
    /// The driver probes all GPUs in its module init, one after another.
    Insmod,
    /// The module is loaded with one GPU; the others are bound one by one as the host has mapped
    /// their BARs.
    Pipelined,
    /// Like [`Bind::Pipelined`], with one thread per GPU.
    Concurrent,
}

impl std::fmt::Display for Bind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Auto => "auto",
            Self::Insmod => "insmod",
            Self::Pipelined => "pipelined",
            Self::Concurrent => "concurrent",
        })
    }
}

/// Order of adapter initialisation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Init {
    /// GPUs in parallel, as many at once as the driver allows.
    Parallel,
    /// GPUs in turn.
    Serial,
}

impl std::fmt::Display for Init {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Parallel => "parallel",
            Self::Serial => "serial",
        })
    }
}

/// Reset of a GPU that was left half initialised.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reset {
    /// Once, except in a confidential guest.
    Auto,
    /// Once.
    On,
    Off,
}

/// Condition for a GPU's CDI entry to become resolvable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ready {
    /// When the driver has bound the GPU; in a topology with a fabric, when the fabric is complete.
    Auto,
    /// When the driver has bound the GPU.
    Bound,
    /// When the adapter is initialised as well.
    Usable,
}

/// Setter of the ready state of confidential GPUs. CUDA fails on them until it is on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReadyState {
    /// The container or another program that attests the GPUs.
    Leave,
    /// Same setter as `Leave`, and no container gets a GPU before.
    Wait,
    /// The init, once all GPUs are settled; no container gets a GPU before.
    Boot,
}

/// Time of the CDI spec's publication.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cdi {
    /// From the PCI scan on.
    Live,
    /// Once all GPUs are usable or failed.
    Complete,
}

/// Process of the agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Agent {
    /// PID 1 becomes the agent.
    Exec,
    /// PID 1 stays the init and supervises the agent.
    Child,
}

/// Whether events go to the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ToHost {
    /// On, except in a confidential guest, whose host is not trusted.
    Auto,
    On,
    Off,
}

/// Switch; `Auto` leaves the choice to the boot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Wish {
    #[default]
    Auto,
    On,
    Off,
}

/// Order in which fabric manager gives NVLink rails to partitions (`PARTITION_RAIL_POLICY`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RailPolicy {
    Greedy,
    Symmetric,
}

/// Choices about NVIDIA's services.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Services {
    pub nvlsm: Wish,
    pub fabric_manager: Wish,
    pub persistenced: Wish,
    /// Start of persistenced with `--uvm-persistence-mode`.
    pub uvm_persistence: Wish,
    pub host_engine: Wish,
    pub dcgm_exporter: Wish,
    pub imex_daemon: Wish,
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
    /// The driver may release its global lock while a GPU's own processor boots.
    pub relaxed: bool,
    pub ready: Ready,
    /// Whether a GPU without a good fabric is kept from containers.
    pub fabric_required: Wish,
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
    pub reset: Reset,
    pub lockdown: bool,
    pub events_to_host: ToHost,
    pub events_port: u32,
    pub console: ToConsole,
    /// Extension disks; error: reason why the guest must stop.
    pub extensions: Result<Vec<Extension>, String>,
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

impl Default for Config {
    fn default() -> Self {
        Self {
            agent: Agent::Exec,
            bind: Bind::Auto,
            init: Init::Parallel,
            relaxed: true,
            ready: Ready::Auto,
            fabric_required: Wish::Auto,
            ready_state: ReadyState::Leave,
            cdi: Cdi::Live,
            cdi_names: vec![Naming::Index],
            cdi_hooks: Hooks::One,
            imex_channels: 0,
            expected_gpus: None,
            topology: None,
            nvlink: NvLink::Auto,
            reset: Reset::Auto,
            lockdown: true,
            events_to_host: ToHost::Auto,
            events_port: DEFAULT_PORT,
            console: ToConsole::Auto,
            extensions: Ok(Vec::new()),
            services: Services::default(),
            graphics_mhz: None,
            memory_mhz: None,
            power_w: None,
        }
    }
}
