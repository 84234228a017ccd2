//! Configuration: the kernel command line, read once into a [`Config`]. No other module knows a
//! parameter's name.
//!
//! [`PARAMETERS`] is the whole list; `kata-gpu-init parameters` prints it, and src/README.md has
//! it. A bad value never stops a boot: the default stays, and the [`Note`] names the fault, the
//! value used and the valid values.

use crate::cdi::spec::{Hooks, Naming};
use crate::events::record::{DEFAULT_PORT, Level};
use crate::extensions::{Extension, Name, Verity};
use crate::topology::{NvLink, Topology};
use std::fmt::Write;

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
    /// As many at once as the driver allows.
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

/// Ports of the agent: its interface, and its debug console. The agent powers off when another
/// program has its port.
const AGENT_PORTS: [u32; 2] = [1024, 1026];

/// The driver's default number (its parameter ImexChannelCount).
const MAX_IMEX_CHANNELS: u32 = 2048;

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

/// A parameter of the kernel command line.
pub struct Parameter {
    pub name: &'static str,
    /// Values of the parameter, for the table.
    pub values: &'static str,
    pub default: &'static str,
    pub help: &'static str,
    set: fn(&mut Config, &str) -> Option<()>,
}

/// Setting of a word.
fn one_of<T: Copy>(value: &str, choices: &[(&str, T)]) -> Option<T> {
    choices.iter().find(|(word, _)| *word == value).map(|(_, setting)| *setting)
}

fn switch(value: &str) -> Option<bool> {
    one_of(value, &[("on", true), ("off", false), ("true", true), ("false", false), ("1", true), ("0", false)])
}

const WISHES: &str = "auto, on, off";

fn wish(value: &str) -> Option<Wish> {
    one_of(value, &[("auto", Wish::Auto), ("on", Wish::On), ("off", Wish::Off)])
}

fn rail_policy(value: &str) -> Option<Option<RailPolicy>> {
    one_of(value, &[("auto", None), ("greedy", Some(RailPolicy::Greedy)), ("symmetric", Some(RailPolicy::Symmetric))])
}

/// Wish for an on/off value of the incumbent.
fn switched(value: &str) -> Option<Wish> {
    switch(value).map(|on| if on { Wish::On } else { Wish::Off })
}

/// Parses `index,uuid`: each name once, at least one.
pub fn namings(value: &str) -> Option<Vec<Naming>> {
    let words = [("index", Naming::Index), ("uuid", Naming::Uuid), ("type-index", Naming::TypeIndex)];
    let mut namings = Vec::new();
    for word in value.split(',') {
        let naming = one_of(word, &words)?;
        if !namings.contains(&naming) {
            namings.push(naming);
        }
    }
    Some(namings)
}

/// Parses a topology; `auto` gives None.
fn topology(value: &str) -> Option<Option<Topology>> {
    if value == "auto" { Some(None) } else { Topology::named(value).map(Some) }
}

/// Parses `210,1980`, or one number for both ends.
fn range(value: &str) -> Option<Range> {
    let (min, max) = value.split_once(',').unwrap_or((value, value));
    let range = Range { min: min.parse().ok()?, max: max.parse().ok()? };
    (range.min <= range.max && range.max > 0).then_some(range)
}

/// Parses the method of hooks.
pub fn hooks(value: &str) -> Option<Hooks> {
    one_of(value, &[("one", Hooks::One), ("compat", Hooks::Compat), ("none", Hooks::None)])
}

const LEVELS: &[(&str, ToConsole)] = &[
    ("auto", ToConsole::Auto),
    ("off", ToConsole::Off),
    ("error", ToConsole::UpTo(Level::Error)),
    ("warn", ToConsole::UpTo(Level::Warn)),
    ("info", ToConsole::UpTo(Level::Info)),
    ("debug", ToConsole::UpTo(Level::Debug)),
    ("trace", ToConsole::UpTo(Level::Trace)),
];

/// All parameters.
pub const PARAMETERS: &[Parameter] = &[
    Parameter {
        name: "gpuinit.agent",
        values: "exec, child",
        default: "exec",
        help: "exec: PID 1 becomes kata-agent; child: the init stays PID 1, supervises the agent and powers off when it ends",
        set: |c, v| one_of(v, &[("exec", Agent::Exec), ("child", Agent::Child)]).map(|s| c.agent = s),
    },
    Parameter {
        name: "gpuinit.bind",
        values: "auto, insmod, pipelined, concurrent",
        default: "auto",
        help: "how GPUs are bound: by the module load, one by one as the host maps their BARs, or each on its own thread",
        set: |c, v| {
            let words = [("auto", Bind::Auto), ("insmod", Bind::Insmod), ("pipelined", Bind::Pipelined), ("concurrent", Bind::Concurrent)];
            one_of(v, &words).map(|s| c.bind = s)
        },
    },
    Parameter {
        name: "gpuinit.init",
        values: "parallel, serial",
        default: "parallel",
        help: "initialise adapters all at once, or one after another",
        set: |c, v| one_of(v, &[("parallel", Init::Parallel), ("serial", Init::Serial)]).map(|s| c.init = s),
    },
    Parameter {
        name: "gpuinit.relaxed",
        values: "on, off",
        default: "on",
        help: "off: the driver keeps its global lock while a GPU's own processor boots (registry key RmRelaxedGspInitLocking=0)",
        set: |c, v| switch(v).map(|s| c.relaxed = s),
    },
    Parameter {
        name: "gpuinit.ready",
        values: "auto, bound, usable",
        default: "auto",
        help: "when a GPU becomes resolvable in the CDI spec: bound to the driver, or initialised as well; auto: bound, and where there is a fabric, when the fabric is complete",
        set: |c, v| one_of(v, &[("auto", Ready::Auto), ("bound", Ready::Bound), ("usable", Ready::Usable)]).map(|s| c.ready = s),
    },
    Parameter {
        name: "gpuinit.fabric.required",
        values: WISHES,
        default: "auto",
        help: "whether containers are kept from a GPU whose fabric is not complete 60 s after all GPUs are settled; off: they get it then; on: also from one whose fabric is complete with an error; auto: see [NVLink fabrics](services/README.md#nvlink-fabrics-and-confidential-gpus)",
        set: |c, v| wish(v).map(|w| c.fabric_required = w),
    },
    Parameter {
        name: "gpuinit.cc.ready",
        values: "leave, wait, boot",
        default: "leave",
        help: "ready state of confidential GPUs, without which CUDA fails: leave it to whoever attests; wait: the same, and containers get no GPU before; boot: set it once all GPUs are settled, before containers get one",
        set: |c, v| {
            let words = [("leave", ReadyState::Leave), ("wait", ReadyState::Wait), ("boot", ReadyState::Boot)];
            one_of(v, &words).map(|s| c.ready_state = s)
        },
    },
    Parameter {
        name: "gpuinit.cdi",
        values: "live, complete",
        default: "live",
        help: "publish the CDI spec from the PCI scan on, or only once all GPUs are settled",
        set: |c, v| one_of(v, &[("live", Cdi::Live), ("complete", Cdi::Complete)]).map(|s| c.cdi = s),
    },
    Parameter {
        name: "gpuinit.cdi.names",
        values: "index, uuid, type-index, or several with commas",
        default: "index",
        help: "by what containers ask for a GPU: Kata asks by index; a uuid is known when the GPU is initialised, an instance's when NVML was asked",
        set: |c, v| namings(v).map(|n| c.cdi_names = n),
    },
    Parameter {
        name: "gpuinit.cdi.hooks",
        values: "one, compat, none",
        default: "one",
        help: "links as mounts and one hook for the rest, the incumbent's six hooks, or no hook",
        set: |c, v| hooks(v).map(|h| c.cdi_hooks = h),
    },
    Parameter {
        name: "gpuinit.imex",
        values: "0 to 2048",
        default: "0",
        help: "IMEX channels to make, from 0 on; these, and those that the driver makes, are published as nvidia.com/imex-channel",
        set: |c, v| v.parse().ok().filter(|n| *n <= MAX_IMEX_CHANNELS).map(|n| c.imex_channels = n),
    },
    Parameter {
        name: "gpuinit.gpus",
        values: "0 to 1024",
        default: "any",
        help: "GPUs that must be there; fewer is an error event; 0: none will come, so the loading of modules is forbidden at once",
        set: |c, v| v.parse().ok().filter(|n| *n <= 1024).map(|n| c.expected_gpus = Some(n)),
    },
    Parameter {
        name: "gpuinit.topology",
        values: "auto, none, gpus, hopper-fabric, protected-pcie, blackwell-fabric, service-vm, shared-fabric",
        default: "auto",
        help: "kind of guest, which decides what is started; auto: by its GPUs, NVSwitches and the network functions that manage NVSwitches",
        set: |c, v| topology(v).map(|t| c.topology = t),
    },
    Parameter {
        name: "gpuinit.nvlink",
        values: "auto, on, off",
        default: "auto",
        help: "off: the driver is loaded with NVreg_NvLinkDisable=1; auto: so for one GPU alone, unless the driver's options set it; on: never",
        set: |c, v| one_of(v, &[("auto", NvLink::Auto), ("on", NvLink::On), ("off", NvLink::Off)]).map(|s| c.nvlink = s),
    },
    Parameter {
        name: "gpuinit.reset",
        values: "auto, on, off",
        default: "auto",
        help: "reset a GPU once whose initialisation fails because an earlier guest left it half initialised; auto: not in a confidential guest",
        set: |c, v| one_of(v, &[("auto", Reset::Auto), ("on", Reset::On), ("off", Reset::Off)]).map(|s| c.reset = s),
    },
    Parameter {
        name: "gpuinit.gpu.graphics-clock",
        values: "MHz, or MIN,MAX",
        default: "any",
        help: "lock all GPUs' graphics clocks once all are settled, as nvidia-smi -lgc does",
        set: |c, v| range(v).map(|r| c.graphics_mhz = Some(r)),
    },
    Parameter {
        name: "gpuinit.gpu.memory-clock",
        values: "MHz, or MIN,MAX",
        default: "any",
        help: "lock all GPUs' memory clocks once all are settled, as nvidia-smi -lmc does",
        set: |c, v| range(v).map(|r| c.memory_mhz = Some(r)),
    },
    Parameter {
        name: "gpuinit.gpu.power",
        values: "1 to 4294967 W",
        default: "any",
        help: "each GPU's power limit, set once all are settled, as nvidia-smi -pl does",
        // NVML takes milliwatts.
        set: |c, v| v.parse().ok().filter(|w| (1..=u32::MAX / 1000).contains(w)).map(|w| c.power_w = Some(w)),
    },
    Parameter {
        name: "gpuinit.lockdown",
        values: "on, off",
        default: "on",
        help: "forbid loading kernel modules once the driver is loaded and all GPUs are settled, or 60 s after the load; without a load, only where no GPU will come",
        set: |c, v| switch(v).map(|s| c.lockdown = s),
    },
    Parameter {
        name: "gpuinit.events.vsock",
        values: "auto, on, off",
        default: "auto",
        help: "stream events to the host; auto: on, except in a confidential guest",
        set: |c, v| one_of(v, &[("auto", ToHost::Auto), ("on", ToHost::On), ("off", ToHost::Off)]).map(|s| c.events_to_host = s),
    },
    Parameter {
        name: "gpuinit.events.port",
        values: "1 to 4294967294, not 1024 or 1026",
        default: "10241",
        help: "vsock port of the collector on the host, and of the listener in the guest",
        set: |c, v| v.parse().ok().filter(|p| (1..u32::MAX).contains(p) && !AGENT_PORTS.contains(p)).map(|p| c.events_port = p),
    },
    Parameter {
        name: "gpuinit.log",
        values: "auto, off, error, warn, info, debug, trace",
        default: "auto",
        help: "which events go to the console, in the agent's log format; auto: info, in a confidential guest error",
        set: |c, v| one_of(v, LEVELS).map(|s| c.console = s),
    },
    Parameter {
        name: "gpuinit.nvlsm",
        values: WISHES,
        default: "auto",
        help: "start the subnet manager of the NVLink switches; auto: see [Services](services/README.md#services)",
        set: |c, v| wish(v).map(|w| c.services.nvlsm = w),
    },
    Parameter {
        name: "gpuinit.fabricmanager",
        values: WISHES,
        default: "auto",
        help: "start fabric manager; auto: see [Services](services/README.md#services)",
        set: |c, v| wish(v).map(|w| c.services.fabric_manager = w),
    },
    Parameter {
        name: "gpuinit.fabricmanager.rail",
        values: "auto, greedy, symmetric",
        default: "auto",
        help: "fabric manager's PARTITION_RAIL_POLICY; auto: as in the package's configuration, symmetric in a confidential guest with a Blackwell fabric",
        set: |c, v| rail_policy(v).map(|p| c.services.rail_policy = p),
    },
    Parameter {
        name: "gpuinit.persistenced",
        values: WISHES,
        default: "auto",
        help: "start nvidia-persistenced; auto: see [Services](services/README.md#services)",
        set: |c, v| wish(v).map(|w| c.services.persistenced = w),
    },
    Parameter {
        name: "gpuinit.persistenced.uvm",
        values: WISHES,
        default: "auto",
        help: "persistenced's --uvm-persistence-mode; auto: without a fabric, and once the fabric is complete; on: the same, and persistenced starts; off: never",
        set: |c, v| wish(v).map(|w| c.services.uvm_persistence = w),
    },
    Parameter {
        name: "gpuinit.hostengine",
        values: WISHES,
        default: "auto",
        help: "start DCGM's nv-hostengine; auto: see [Services](services/README.md#services)",
        set: |c, v| wish(v).map(|w| c.services.host_engine = w),
    },
    Parameter {
        name: "gpuinit.dcgm-exporter",
        values: WISHES,
        default: "auto",
        help: "start dcgm-exporter; auto: see [Services](services/README.md#services)",
        set: |c, v| wish(v).map(|w| c.services.dcgm_exporter = w),
    },
    Parameter {
        name: "gpuinit.imex-daemon",
        values: WISHES,
        default: "auto",
        help: "start nvidia-imex, which connects the IMEX channels of several machines; auto: see [Services](services/README.md#services)",
        set: |c, v| wish(v).map(|w| c.services.imex_daemon = w),
    },
];

/// Incumbent's parameters that are more than another name of one of ours.
const INCUMBENTS: &[Parameter] = &[
    Parameter {
        name: "nvrc.dcgm",
        values: "on, off",
        default: "off",
        help: "gpuinit.hostengine and gpuinit.dcgm-exporter",
        set: |c, v| switched(v).map(|w| (c.services.host_engine, c.services.dcgm_exporter) = (w, w)),
    },
    Parameter {
        name: "nvrc.uvm.persistence.mode",
        values: "on, off",
        default: "on",
        help: "gpuinit.persistenced.uvm",
        set: |c, v| switched(v).map(|w| c.services.uvm_persistence = w),
    },
    Parameter {
        name: "nvrc.smi.srs",
        values: "0, 1",
        default: "0",
        help: "gpuinit.cc.ready=boot",
        set: |c, v| switch(v).map(|on| c.ready_state = if on { ReadyState::Boot } else { ReadyState::Leave }),
    },
    Parameter {
        name: "nvrc.fm.rail.policy",
        values: "greedy, symmetric",
        default: "greedy",
        help: "gpuinit.fabricmanager.rail",
        set: |c, v| rail_policy(v).filter(Option::is_some).map(|p| c.services.rail_policy = p),
    },
];

/// Incumbent's names that still have an effect, and our names for them.
const ALIASES: &[(&str, &str)] = &[
    ("nvrc.log", "gpuinit.log"),
    ("nvrc.smi.lgc", "gpuinit.gpu.graphics-clock"),
    ("nvrc.smi.lmc", "gpuinit.gpu.memory-clock"),
    ("nvrc.smi.pl", "gpuinit.gpu.power"),
];

/// Incumbent's names that need nothing here or are not built yet, with a hint.
const FOREIGN: &[(&str, &str)] = &[
    ("nvrc.mode", "ignored: what to start follows from the topology; gpuinit.topology= overrides it"),
    ("nvrc.fm.mode", "ignored: fabric manager's mode follows from the topology; gpuinit.topology= overrides it"),
];

/// Kata's parameter for an extension disk, around the extension's name.
const EXTENSION: &str = "kata.extension.";
const VERITY_PARAMS: &str = ".verity_params";

/// Limit of notes; a command line has at most 4 kB, so more are noise.
const MAX_NOTES: usize = 32;
/// Limit of foreign text in a note, in characters.
const MAX_TEXT: usize = 64;

/// Result of one word of the command line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Note {
    pub parameter: String,
    pub value: String,
    /// None: valid. Else the fault and its consequence.
    pub problem: Option<String>,
}

/// Text from the command line, safe to print: cut, and control characters replaced.
fn printable(text: &str) -> String {
    text.chars().take(MAX_TEXT).map(|c| if c.is_control() || c == '\u{fffd}' { '?' } else { c }).collect()
}

/// Words of a kernel command line: separated by white space, which double quotes protect; the words
/// after ` -- ` are not for the kernel.
pub fn words(command_line: &[u8]) -> Vec<String> {
    let text = String::from_utf8_lossy(command_line);
    let mut words = Vec::new();
    let mut word = String::new();
    let mut quoted = false;
    for c in text.chars() {
        match c {
            '"' => quoted = !quoted,
            c if c.is_ascii_whitespace() && !quoted => {
                if word == "--" {
                    return words;
                }
                if !word.is_empty() {
                    words.push(std::mem::take(&mut word));
                }
            }
            c => word.push(c),
        }
    }
    if !word.is_empty() && word != "--" {
        words.push(word); // the last one, or an open quote, which runs to the end
    }
    words
}

impl Config {
    /// Parses `/proc/cmdline`. The last of several values counts, as in the kernel.
    pub fn parse(command_line: &[u8]) -> (Self, Vec<Note>) {
        let mut config = Self::default();
        let mut notes = Vec::new();
        let mut left_out = 0_usize;
        for word in words(command_line) {
            let (name, value) = word.split_once('=').unwrap_or((&word, ""));
            let extension = name.strip_prefix(EXTENSION).and_then(|rest| rest.strip_suffix(VERITY_PARAMS));
            let problem = match extension {
                Some(extension) => config.declare(extension, value).err(),
                None if name.starts_with("gpuinit.") || name.starts_with("nvrc.") => config.take(name, value),
                None => continue,
            };
            if notes.len() < MAX_NOTES {
                notes.push(Note { parameter: printable(name), value: printable(value), problem });
            } else {
                left_out += 1;
            }
        }
        if left_out > 0 {
            let problem = Some(format!("{left_out} more gpuinit.* and nvrc.* words are not listed here"));
            notes.push(Note { parameter: "gpuinit.*".into(), value: String::new(), problem });
        }
        (config, notes)
    }

    /// Adds an extension. Unlike other parameters, a bad one is fatal: without its check the guest
    /// would run unverified code.
    fn declare(&mut self, name: &str, parameters: &str) -> Result<(), String> {
        let declared = Name::parse(name).and_then(|name| match &self.extensions {
            Ok(all) if all.iter().any(|known| known.name == name) => Err("declared twice: declare each extension once".into()),
            _ if parameters.is_empty() => {
                Err("no verity parameters: give those of the image's build; an extension without them is not mounted".into())
            }
            _ => Ok(Extension { name, verity: Verity::parse(parameters)? }),
        });
        match (declared, &mut self.extensions) {
            (Ok(extension), Ok(all)) => all.push(extension),
            (Err(problem), all) => {
                // Keep the first error.
                if all.is_ok() {
                    *all = Err(format!("{EXTENSION}{}{VERITY_PARAMS}: {problem}", printable(name)));
                }
                return Err(format!("{problem}; the guest powers off"));
            }
            (Ok(_), Err(_)) => {}
        }
        Ok(())
    }

    /// Applies one parameter; returns its fault.
    fn take(&mut self, name: &str, value: &str) -> Option<String> {
        if let Some((_, hint)) = FOREIGN.iter().find(|(n, _)| *n == name) {
            return Some((*hint).to_string());
        }
        let own = ALIASES.iter().find(|(n, _)| *n == name).map_or(name, |(_, own)| own);
        let Some(parameter) = PARAMETERS.iter().chain(INCUMBENTS).find(|p| p.name == own) else {
            return Some("unknown parameter, ignored: `kata-gpu-init parameters` lists them".into());
        };
        (parameter.set)(self, value).is_none().then(|| format!("takes {}; ignored, default: {}", parameter.values, parameter.default))
    }
}

/// The words `module.parameter=value` for one module, in finit_module's format. `-` equals `_` in a
/// module's name.
pub fn module_parameters(command_line: &[u8], module: &str) -> String {
    let mut parameters = String::new();
    for word in words(command_line) {
        let Some((name, parameter)) = word.split_once('.') else { continue };
        if name.replace('-', "_") == module.replace('-', "_") {
            let space = if parameters.is_empty() { "" } else { " " };
            // The kernel's parser accepts quotes around white space, as on the command line.
            let _unused = match parameter.split_once('=') {
                Some((key, value)) if value.contains(char::is_whitespace) => write!(parameters, "{space}{key}=\"{value}\""),
                _ => write!(parameters, "{space}{parameter}"),
            }; // writing to a String cannot fail
        }
    }
    parameters
}

/// The driver's registry with one more key: `NVreg_RegistryDwords="A=1;B=2"` holds all keys, and a
/// second such parameter would replace the first.
pub fn with_registry_key(parameters: &str, key: &str) -> String {
    const NAME: &str = "NVreg_RegistryDwords";
    let asked = parameter_value(parameters, NAME).unwrap_or_default();
    let keys: Vec<&str> = asked.split(';').filter(|k| !k.trim().is_empty()).chain([key]).collect();
    format!("{NAME}=\"{}\"", keys.join(";"))
}

/// Value of one parameter among a module's parameters; the last one counts.
pub fn parameter_value(parameters: &str, name: &str) -> Option<String> {
    words(parameters.as_bytes()).into_iter().rev().find_map(|word| word.strip_prefix(name)?.strip_prefix('=').map(str::to_string))
}

/// Modules of all `modprobe.blacklist=a,b` words.
pub fn module_blacklist(command_line: &[u8]) -> Vec<String> {
    let words = words(command_line);
    let lists = words.iter().filter_map(|w| w.strip_prefix("modprobe.blacklist="));
    lists.flat_map(|l| l.split(',')).filter(|m| !m.is_empty()).map(|m| m.replace('-', "_")).collect()
}

/// Table of parameters in Markdown, as in src/README.md.
pub fn parameters_markdown() -> String {
    let mut table = String::from("| parameter | values | default | meaning |\n|---|---|---|---|\n");
    for p in PARAMETERS {
        let _unused = writeln!(table, "| `{}` | {} | {} | {} |", p.name, p.values, p.default, p.help); // writing to a String cannot fail
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_default_in_the_table_is_the_default() {
        for p in PARAMETERS.iter().filter(|p| p.default != "any") {
            let mut config = Config { expected_gpus: None, ..Config::default() };
            assert!((p.set)(&mut config, p.default).is_some(), "{} does not take its own default", p.name);
            assert_eq!(config, Config::default(), "{}={} changes the default configuration", p.name, p.default);
        }
    }

    #[test]
    fn a_confidential_guests_console_gets_errors_by_default() {
        let level = |line: &[u8], confidential| Config::parse(line).0.console.level(|| confidential);
        assert_eq!(level(b"", true), Some(Level::Error));
        assert_eq!(level(b"", false), Some(Level::Info));
        assert_eq!(level(b"gpuinit.log=debug", true), Some(Level::Debug));
        assert_eq!(level(b"gpuinit.log=off", false), None);
    }

    #[test]
    fn good_values_are_taken_and_the_last_one_counts() {
        let (config, notes) =
            Config::parse(b"console=ttyS0 gpuinit.bind=insmod gpuinit.init=serial gpuinit.bind=concurrent gpuinit.gpus=8 nvrc.log=debug\n");
        assert_eq!(
            config,
            Config {
                bind: Bind::Concurrent,
                init: Init::Serial,
                expected_gpus: Some(8),
                console: ToConsole::UpTo(Level::Debug),
                ..Config::default()
            }
        );
        assert!(notes.iter().all(|n| n.problem.is_none()), "{notes:?}");
    }

    #[test]
    fn every_topology_can_be_asked_for() {
        let parameter = PARAMETERS.iter().find(|p| p.name == "gpuinit.topology").unwrap();
        let words: Vec<&str> = parameter.values.split(", ").collect();
        let all: Vec<String> = ["auto".to_string()].into_iter().chain(Topology::ALL.map(|t| t.to_string())).collect();
        assert_eq!(words, all);
        let (config, _) = Config::parse(b"gpuinit.topology=shared-fabric gpuinit.nvlink=off");
        assert_eq!((config.topology, config.nvlink), (Some(Topology::SharedFabric), NvLink::Off));
    }

    #[test]
    fn bad_values_leave_the_default_and_say_what_to_write() {
        let (config, notes) =
            Config::parse(b"gpuinit.bind=fast gpuinit.gpus=-1 gpuinit.nosuch=1 nvrc.fm.mode=1 nvrc.dcgm=maybe gpuinit.log");
        assert_eq!(config, Config::default());
        let problems: Vec<&str> = notes.iter().map(|n| n.problem.as_deref().unwrap_or("none")).collect();
        assert_eq!(
            problems,
            [
                "takes auto, insmod, pipelined, concurrent; ignored, default: auto",
                "takes 0 to 1024; ignored, default: any",
                "unknown parameter, ignored: `kata-gpu-init parameters` lists them",
                "ignored: fabric manager's mode follows from the topology; gpuinit.topology= overrides it",
                "takes on, off; ignored, default: off",
                "takes auto, off, error, warn, info, debug, trace; ignored, default: auto",
            ]
        );
    }

    #[test]
    fn extensions_keep_their_order_and_a_bad_one_refuses_the_guest() {
        let verity = |root: char| {
            let root = root.to_string().repeat(64);
            format!("root_hash={root},salt=-,data_blocks=8,data_block_size=4096,hash_block_size=4096")
        };
        let parse = |line: &str| Config::parse(line.as_bytes());
        let (coco, gpu) = (verity('a'), verity('b'));
        let both =
            format!("quiet kata.extension.coco.verity_params={coco} kata.extension.gpu.verity_params={gpu} kata.extension.gpu.other=1");
        let (config, notes) = parse(&both);
        let declared: Vec<(String, String)> =
            config.extensions.unwrap().into_iter().map(|e| (e.name.to_string(), e.verity.root_hash)).collect();
        assert_eq!(declared, [("coco".into(), "a".repeat(64)), ("gpu".into(), "b".repeat(64))]);
        assert!(notes.len() == 2 && notes.iter().all(|note| note.problem.is_none()), "{notes:?}");

        for (line, wanted) in [
            (format!("{both} kata.extension.gpu.verity_params={coco}"), "kata.extension.gpu.verity_params: declared twice"),
            ("kata.extension.gpu.verity_params".into(), "kata.extension.gpu.verity_params: no verity parameters: give"),
            ("kata.extension.gpu.verity_params=".into(), "kata.extension.gpu.verity_params: no verity parameters: give"),
            (format!("kata.extension.../x.verity_params={gpu}"), "kata.extension.../x.verity_params: \"../x\" is no name"),
            (format!("kata.extension..verity_params={gpu}"), "kata.extension..verity_params: \"\" is no name"),
            (
                "kata.extension.a.verity_params=x kata.extension.b.verity_params=y".into(),
                "kata.extension.a.verity_params: root_hash is missing",
            ),
        ] {
            let (config, notes) = parse(&line);
            let error = config.extensions.unwrap_err();
            assert!(error.starts_with(wanted), "{line}: {error}");
            assert!(notes.last().unwrap().problem.as_ref().is_some_and(|problem| problem.ends_with("; the guest powers off")), "{notes:?}");
        }
        assert_eq!(parse("kata.extensionist.gpu.verity_params=x kata.extension.gpu=1").0.extensions, Ok(Vec::new()));
    }

    #[test]
    fn the_incumbents_words_for_services_mean_what_they_mean_there() {
        let services = |line: &[u8]| Config::parse(line).0.services;
        let asked = services(b"nvrc.dcgm=true nvrc.uvm.persistence.mode=off nvrc.fm.rail.policy=symmetric");
        assert_eq!((asked.host_engine, asked.dcgm_exporter), (Wish::On, Wish::On));
        assert_eq!((asked.uvm_persistence, asked.rail_policy), (Wish::Off, Some(RailPolicy::Symmetric)));
        assert_eq!(services(b"nvrc.mode=gpu nvrc.fm.mode=1 nvrc.fm.rail.policy=auto"), Services::default());
        let last = services(b"nvrc.dcgm=on gpuinit.hostengine=off");
        assert_eq!((last.host_engine, last.dcgm_exporter), (Wish::Off, Wish::On));
        assert_eq!(Config::parse(b"gpuinit.topology=hopper-fabric").0.topology, Some(Topology::HopperFabric));
    }

    #[test]
    fn a_registry_key_joins_those_that_were_asked_for() {
        assert_eq!(with_registry_key("", "R=0"), "NVreg_RegistryDwords=\"R=0\"");
        assert_eq!(with_registry_key("a=1 NVreg_RegistryDwords=\"X=1;Y=2;\" b=\"c d\"", "R=0"), "NVreg_RegistryDwords=\"X=1;Y=2;R=0\"");
        assert_eq!(parameter_value("a=1 NVreg_X=2 a=3", "a").as_deref(), Some("3"));
        assert_eq!(parameter_value("ab=1", "a"), None);
    }

    #[test]
    fn binary_junk_and_thousands_of_words_stay_small_and_printable() {
        let mut line = b"gpuinit.\xff\x1b[2J=\x07\xfe ".to_vec();
        line.extend(b"gpuinit.x=1 ".repeat(400));
        let (config, notes) = Config::parse(&line);
        assert_eq!(config, Config::default());
        assert_eq!(notes.len(), MAX_NOTES + 1);
        assert!(notes.iter().all(|n| !n.parameter.contains(char::is_control) && n.value.len() <= 4 * MAX_TEXT));
        assert!(notes[MAX_NOTES].problem.as_deref().unwrap().starts_with("369 more"));
    }

    #[test]
    fn words_follow_the_kernels_quotes_and_end_mark() {
        assert_eq!(words(b"a b=\"c d\" \te -- gpuinit.bind=insmod"), ["a", "b=c d", "e"]);
        assert_eq!(words(b"a=\"open quote"), ["a=open quote"]);
    }

    #[test]
    fn module_parameters_are_those_of_the_module() {
        let line = b"nvidia.probe_ms=5 nvidia-uvm.x=1 nvidia_uvm.y=2 nvidia.NVreg_RegistryDwords=\"a b\" quiet nvidia.flag";
        assert_eq!(module_parameters(line, "nvidia"), "probe_ms=5 NVreg_RegistryDwords=\"a b\" flag");
        assert_eq!(module_parameters(line, "nvidia-uvm"), "x=1 y=2");
        assert_eq!(module_parameters(line, "vsock"), "");
    }

    #[test]
    fn the_blacklist_is_that_of_all_its_words() {
        assert_eq!(module_blacklist(b"modprobe.blacklist=a-b,,c quiet modprobe.blacklist= modprobe.blacklist=d"), ["a_b", "c", "d"]);
    }
}
