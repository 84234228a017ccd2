//! Configuration: the kernel command line, read once into a [`Config`]. No other module knows a
//! parameter's name.
//!
//! [`PARAMETERS`] is the whole list; `kata-gpu-init parameters` prints it, and src/README.md has
//! it. A bad value never stops a boot: the default stays, and the [`Note`] names the fault, the
//! value used and the valid values.

mod command_line; // words of the kernel command line
pub mod parameter_table; // parameters and their setters

pub use command_line::{module_blacklist, module_parameters, parameter_value, with_registry_key, words};

use self::parameter_table::{ALIASES, FOREIGN, INCUMBENTS, PARAMETERS};
use crate::cdi::spec::{Hooks, Naming};
use crate::events::record::{DEFAULT_PORT, Level};
use crate::extensions::{Extension, Name, Verity};
use crate::topology::{NvLink, Topology};

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

#[cfg(test)]
mod tests;
