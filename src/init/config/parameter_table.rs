//! All parameters of the kernel command line: values, default, meaning, and how each is set.

use super::values::{
    Agent, Bind, Cdi, Config, Hooks, Init, Naming, RailPolicy, Range, Ready, ReadyState, Switch,
    ToConsole,
};
use crate::driver_files::{is_foreign, plain_path};
use crate::gpu::topology::{NvLink, Topology};
use kata_gpu_wire::record::Level;
use std::fmt::Write;
use std::path::{Path, PathBuf};

/// Ports of the agent: its interface, and its debug console. The agent powers off when another
/// program has its port.
pub const AGENT_PORTS: [u32; 2] = [1024, 1026];

/// The driver's default number (its parameter ImexChannelCount).
pub const MAX_IMEX_CHANNELS: u32 = 2048;

/// Beginnings of the names that the init reads: ours, and the incumbent's.
pub const PREFIXES: [&str; 2] = ["gpuinit.", "nvrc."];

/// A parameter of the kernel command line.
pub struct Parameter {
    pub name: &'static str,
    /// Values of the parameter, for the table.
    pub values: &'static str,
    pub default: &'static str,
    pub help: &'static str,
    pub set: fn(&mut Config, &str) -> Option<()>,
    /// Values that make a guest weaker than the default does.
    pub weakens: Option<Weakening>,
}

/// Values of a parameter that make a guest weaker. A verifier that accepts more than one command
/// line denies them, and other names of the same parameter ([`ALIASES`]).
pub struct Weakening {
    pub values: &'static [&'static str],
    pub effect: &'static str,
}

/// Sets a value that was parsed.
fn set<T>(place: &mut T, value: Option<T>) -> Option<()> {
    value.map(|value| *place = value)
}

fn on_off(value: &str) -> Option<bool> {
    match value {
        "on" | "true" | "1" => Some(true),
        "off" | "false" | "0" => Some(false),
        _ => None,
    }
}

/// Parses a value beside `auto`, which gives None.
fn or_auto<T>(value: &str, parse: fn(&str) -> Option<T>) -> Option<Option<T>> {
    match value {
        "auto" => Some(None),
        value => parse(value).map(Some),
    }
}

fn number<T: std::str::FromStr>(value: &str, is_valid: impl FnOnce(&T) -> bool) -> Option<T> {
    value.parse().ok().filter(is_valid)
}

/// Switch for an on/off value of the incumbent.
fn switched(value: &str) -> Option<Switch> {
    on_off(value).map(|on| if on { Switch::On } else { Switch::Off })
}

/// A parameter that is a switch.
const fn switch(
    name: &'static str,
    help: &'static str,
    set: fn(&mut Config, &str) -> Option<()>,
) -> Parameter {
    Parameter {
        name,
        values: "auto, on, off",
        default: "auto",
        help,
        set,
        weakens: None,
    }
}

impl Parameter {
    /// This parameter with values that weaken a guest.
    const fn weakened_by(self, values: &'static [&'static str], effect: &'static str) -> Self {
        let weakens = Some(Weakening { values, effect });
        Self { weakens, ..self }
    }
}

/// Parses `index,uuid`: each name once, at least one.
pub fn namings(value: &str) -> Option<Vec<Naming>> {
    let mut namings = Vec::new();
    for word in value.split(',') {
        let naming = Naming::named(word)?;
        if !namings.contains(&naming) {
            namings.push(naming);
        }
    }
    Some(namings)
}

/// Parses `210,1980`, or one number for both ends.
fn range(value: &str) -> Option<Range> {
    let (min, max) = value.split_once(',').unwrap_or((value, value));
    let range = Range {
        min: min.parse().ok()?,
        max: max.parse().ok()?,
    };
    (range.min <= range.max && range.max > 0).then_some(range)
}

/// A path that means the same everywhere, and below which only the image writes: a kernel module
/// may come from there.
fn driver_root(value: &str) -> Option<PathBuf> {
    let path = Path::new(value);
    (plain_path(path) && !is_foreign(path)).then(|| path.into())
}

fn to_console(value: &str) -> Option<ToConsole> {
    Some(match value {
        "auto" => ToConsole::Auto,
        "off" => ToConsole::Off,
        "error" => ToConsole::UpTo(Level::Error),
        "warn" => ToConsole::UpTo(Level::Warn),
        "info" => ToConsole::UpTo(Level::Info),
        "debug" => ToConsole::UpTo(Level::Debug),
        "trace" => ToConsole::UpTo(Level::Trace),
        _ => return None,
    })
}

/// All parameters.
pub const PARAMETERS: &[Parameter] = &[
    Parameter {
        name: "gpuinit.agent",
        values: "exec, child",
        default: "exec",
        help: "exec: PID 1 becomes kata-agent; child: the init stays PID 1, supervises the agent \
            and powers off when it ends",
        set: |c, v| set(&mut c.agent, Agent::named(v)),
        weakens: None,
    },
    Parameter {
        name: "gpuinit.bind",
        values: "auto, insmod, pipelined, concurrent",
        default: "auto",
        help: "way of binding GPUs: by the module load, one by one as the host maps their BARs, \
            or each on its own thread",
        set: |c, v| set(&mut c.bind, Bind::named(v)),
        weakens: None,
    },
    Parameter {
        name: "gpuinit.init",
        values: "parallel, serial",
        default: "parallel",
        help: "initialise adapters all at once, or one after another",
        set: |c, v| set(&mut c.init, Init::named(v)),
        weakens: None,
    },
    Parameter {
        name: "gpuinit.first",
        values: "0 to 1024",
        default: "0",
        help: "number of GPUs, in PCI order, that initialise before all others, with half a second \
            for programs of containers behind them: no program computes while a GPU initialises. \
            The others are usable later",
        set: |c, v| set(&mut c.first, number(v, |n| *n <= 1024)),
        weakens: None,
    },
    Parameter {
        name: "gpuinit.relaxed",
        values: "on, off",
        default: "on",
        help: "off: the driver keeps its global lock while a GPU's own processor boots (registry \
            key RmRelaxedGspInitLocking=0)",
        set: |c, v| set(&mut c.relaxed, on_off(v)),
        weakens: None,
    },
    Parameter {
        name: "gpuinit.ready",
        values: "auto, bound, usable",
        default: "auto",
        help: "time at which a GPU becomes resolvable in the CDI spec: bound to the driver, or \
            initialised as well; auto: bound, and with a fabric also when the fabric is complete",
        set: |c, v| set(&mut c.ready, Ready::named(v)),
        weakens: None,
    },
    switch(
        "gpuinit.fabric.required",
        "withhold a GPU from containers if its fabric is not complete 60 s after all GPUs \
            are settled; off: containers get it then; on: withhold it also if its fabric is \
            complete with an error; auto: see [NVLink \
            fabrics](init/services/README.md#nvlink-fabrics-and-confidential-gpus)",
        |c, v| set(&mut c.fabric_required, Switch::named(v)),
    )
    .weakened_by(
        &["off"],
        "containers get GPUs whose NVLink fabric is not complete, or not as it should be",
    ),
    Parameter {
        name: "gpuinit.cc.ready",
        values: "leave, wait, boot",
        default: "leave",
        help: "ready state of confidential GPUs, without which CUDA fails; leave: the attesting \
            program sets it; wait: the same, and containers get no GPU before; boot: the init \
            sets it once all GPUs are settled, before containers get one",
        set: |c, v| set(&mut c.ready_state, ReadyState::named(v)),
        weakens: Some(Weakening {
            values: &["boot"],
            effect: "confidential GPUs are ready for work before anybody has attested them",
        }),
    },
    Parameter {
        name: "gpuinit.cdi",
        values: "live, complete",
        default: "live",
        help: "publish the CDI spec from the PCI scan on, or only once all GPUs are settled",
        set: |c, v| set(&mut c.cdi, Cdi::named(v)),
        weakens: None,
    },
    Parameter {
        name: "gpuinit.cdi.names",
        values: "index, uuid, type-index, or several with commas",
        default: "index",
        help: "names of a GPU in the CDI spec: Kata requests by index; a uuid is known when the \
            GPU is initialised, an instance's after NVML's answer",
        set: |c, v| set(&mut c.cdi_names, namings(v)),
        weakens: None,
    },
    Parameter {
        name: "gpuinit.cdi.hooks",
        values: "one, none",
        default: "one",
        help: "links as mounts and one hook for the rest, or no hook",
        set: |c, v| set(&mut c.cdi_hooks, Hooks::named(v)),
        weakens: Some(Weakening {
            values: &["none"],
            effect: "programs in containers may change device nodes: nothing covers the driver's \
            parameters",
        }),
    },
    Parameter {
        name: "gpuinit.imex",
        values: "0 to 2048",
        default: "0",
        help: "IMEX channels to make, from 0 on; these, and those that the driver makes, are \
            published as nvidia.com/imex-channel",
        set: |c, v| set(&mut c.imex_channels, number(v, |n| *n <= MAX_IMEX_CHANNELS)),
        weakens: None,
    },
    Parameter {
        name: "gpuinit.driver-root",
        values: "auto, or a path",
        default: "auto",
        help: "directory with the driver's user space, modules and firmware, absolute and without \
            `..`; auto: the extension `gpu`, else where `cdi manifest` has [left its \
            list](init/cdi/README.md#a-driver-in-a-root-of-its-own), else /",
        set: |c, v| set(&mut c.driver_root, or_auto(v, driver_root)),
        weakens: None,
    },
    Parameter {
        name: "gpuinit.gpus",
        values: "0 to 1024",
        default: "any",
        help: "required number of GPUs; fewer is an error event; 0: no GPU is expected, so the \
            loading of modules is forbidden at once",
        set: |c, v| set(&mut c.expected_gpus, number(v, |n| *n <= 1024).map(Some)),
        weakens: None,
    },
    Parameter {
        name: "gpuinit.topology",
        values: "auto, none, gpus, hopper-fabric, protected-pcie, blackwell-fabric, service-vm, \
            shared-fabric",
        default: "auto",
        help: "kind of guest, which decides the services that start; auto: by its GPUs, \
            NVSwitches and the network functions that manage NVSwitches",
        set: |c, v| set(&mut c.topology, or_auto(v, Topology::named)),
        weakens: None,
    },
    switch(
        "gpuinit.nvlink",
        "off: the driver is loaded with NVreg_NvLinkDisable=1; auto: so for one GPU alone, \
            unless the driver's options set it; on: never",
        |c, v| set(&mut c.nvlink, NvLink::named(v)),
    ),
    switch(
        "gpuinit.reset",
        "reset a GPU once whose initialisation fails because an earlier guest left it half \
            initialised; auto: not in a confidential guest",
        |c, v| set(&mut c.reset, Switch::named(v)),
    )
    .weakened_by(
        &["on"],
        "a GPU that failed is reset once, and comes up again: its earlier attestation is \
            void",
    ),
    Parameter {
        name: "gpuinit.gpu.graphics-clock",
        values: "MHz, or MIN,MAX",
        default: "any",
        help: "lock all GPUs' graphics clocks once all are settled, as nvidia-smi -lgc does",
        set: |c, v| set(&mut c.graphics_mhz, range(v).map(Some)),
        weakens: None,
    },
    Parameter {
        name: "gpuinit.gpu.memory-clock",
        values: "MHz, or MIN,MAX",
        default: "any",
        help: "lock all GPUs' memory clocks once all are settled, as nvidia-smi -lmc does",
        set: |c, v| set(&mut c.memory_mhz, range(v).map(Some)),
        weakens: None,
    },
    Parameter {
        name: "gpuinit.gpu.power",
        values: "1 to 4294967 W",
        default: "any",
        help: "each GPU's power limit, set once all are settled, as nvidia-smi -pl does",
        // NVML takes milliwatts.
        set: |c, v| {
            set(
                &mut c.power_w,
                number(v, |w| (1..=u32::MAX / 1000).contains(w)).map(Some),
            )
        },
        weakens: None,
    },
    Parameter {
        name: "gpuinit.lockdown",
        values: "on, off",
        default: "on",
        help: "forbid loading kernel modules once the driver is loaded and all GPUs are settled, \
            or 60 s after the load; without a load, only where no GPU is expected",
        set: |c, v| set(&mut c.lockdown, on_off(v)),
        weakens: Some(Weakening {
            values: &["off", "false", "0"],
            effect: "kernel modules can be loaded for as long as the guest lives",
        }),
    },
    switch(
        "gpuinit.events.vsock",
        "stream events to the host; auto: on, except in a confidential guest",
        |c, v| set(&mut c.events_to_host, Switch::named(v)),
    )
    .weakened_by(
        &["on"],
        "the host reads every event, and may connect to the guest's port",
    ),
    Parameter {
        name: "gpuinit.events.port",
        values: "1 to 4294967294, not 1024 or 1026",
        default: "10241",
        help: "vsock port of the collector on the host, and of the listener in the guest",
        set: |c, v| {
            set(
                &mut c.events_port,
                number(v, |p| (1..u32::MAX).contains(p) && !AGENT_PORTS.contains(p)),
            )
        },
        weakens: None,
    },
    Parameter {
        name: "gpuinit.log",
        values: "auto, off, error, warn, info, debug, trace",
        default: "auto",
        help: "level of events on the console, in the agent's log format; auto: info, in a \
            confidential guest error",
        set: |c, v| set(&mut c.console, to_console(v)),
        weakens: Some(Weakening {
            values: &["warn", "info", "debug", "trace"],
            effect: "the host reads those events on the console",
        }),
    },
    switch(
        "gpuinit.nvlsm",
        "start the subnet manager of the NVLink switches; auto: see \
            [Services](init/services/README.md#services)",
        |c, v| set(&mut c.services.nvlsm, Switch::named(v)),
    ),
    switch(
        "gpuinit.fabricmanager",
        "start fabric manager; auto: see [Services](init/services/README.md#services)",
        |c, v| set(&mut c.services.fabric_manager, Switch::named(v)),
    ),
    Parameter {
        name: "gpuinit.fabricmanager.rail",
        values: "auto, greedy, symmetric",
        default: "auto",
        help: "fabric manager's PARTITION_RAIL_POLICY; auto: as in the package's configuration, \
            symmetric in a confidential guest with a Blackwell fabric",
        set: |c, v| set(&mut c.services.rail_policy, or_auto(v, RailPolicy::named)),
        weakens: None,
    },
    switch(
        "gpuinit.persistenced",
        "start nvidia-persistenced; auto: see [Services](init/services/README.md#services)",
        |c, v| set(&mut c.services.persistenced, Switch::named(v)),
    ),
    switch(
        "gpuinit.persistenced.uvm",
        "persistenced's --uvm-persistence-mode; auto: without a fabric, and once the fabric \
            is complete; on: the same, and persistenced starts; off: never",
        |c, v| set(&mut c.services.uvm_persistence, Switch::named(v)),
    ),
    switch(
        "gpuinit.hostengine",
        "start DCGM's nv-hostengine; auto: see [Services](init/services/README.md#services)",
        |c, v| set(&mut c.services.host_engine, Switch::named(v)),
    ),
    switch(
        "gpuinit.dcgm-exporter",
        "start dcgm-exporter; auto: see [Services](init/services/README.md#services)",
        |c, v| set(&mut c.services.dcgm_exporter, Switch::named(v)),
    ),
    switch(
        "gpuinit.imex-daemon",
        "start nvidia-imex, which connects the IMEX channels of several machines; auto: see \
            [Services](init/services/README.md#services)",
        |c, v| set(&mut c.services.imex_daemon, Switch::named(v)),
    ),
];

/// Incumbent's parameters that are more than another name of one of ours.
pub const INCUMBENTS: &[Parameter] = &[
    Parameter {
        name: "nvrc.dcgm",
        values: "on, off",
        default: "off",
        help: "gpuinit.hostengine and gpuinit.dcgm-exporter",
        set: |c, v| {
            switched(v).map(|w| (c.services.host_engine, c.services.dcgm_exporter) = (w, w))
        },
        weakens: None,
    },
    Parameter {
        name: "nvrc.uvm.persistence.mode",
        values: "on, off",
        default: "on",
        help: "gpuinit.persistenced.uvm",
        set: |c, v| set(&mut c.services.uvm_persistence, switched(v)),
        weakens: None,
    },
    Parameter {
        name: "nvrc.smi.srs",
        values: "0, 1",
        default: "0",
        help: "gpuinit.cc.ready=boot",
        set: |c, v| {
            on_off(v).map(|on| {
                c.ready_state = if on {
                    ReadyState::Boot
                } else {
                    ReadyState::Leave
                }
            })
        },
        weakens: Some(Weakening {
            values: &["1", "on", "true"],
            effect: "the same as gpuinit.cc.ready=boot",
        }),
    },
    Parameter {
        name: "nvrc.fm.rail.policy",
        values: "greedy, symmetric",
        default: "greedy",
        help: "gpuinit.fabricmanager.rail",
        set: |c, v| set(&mut c.services.rail_policy, RailPolicy::named(v).map(Some)),
        weakens: None,
    },
];

/// Incumbent's names that still have an effect, and our names for them.
pub const ALIASES: &[(&str, &str)] = &[
    ("nvrc.log", "gpuinit.log"),
    ("nvrc.smi.lgc", "gpuinit.gpu.graphics-clock"),
    ("nvrc.smi.lmc", "gpuinit.gpu.memory-clock"),
    ("nvrc.smi.pl", "gpuinit.gpu.power"),
];

/// Incumbent's names that need nothing here or are not built yet, with a hint.
pub const FOREIGN: &[(&str, &str)] = &[
    (
        "nvrc.mode",
        "ignored: what to start follows from the topology; gpuinit.topology= overrides it",
    ),
    (
        "nvrc.fm.mode",
        "ignored: fabric manager's mode follows from the topology; gpuinit.topology= overrides it",
    ),
];

/// Table of the words that weaken a guest in Markdown, as in src/README.md.
pub fn weakening_markdown() -> String {
    let mut table = String::from("| word | effect |\n|---|---|\n");
    for parameter in PARAMETERS.iter().chain(INCUMBENTS) {
        let Some(Weakening { values, effect }) = parameter.weakens else {
            continue;
        };
        let others = ALIASES.iter().filter(|(_, of)| *of == parameter.name);
        for name in std::iter::once(parameter.name).chain(others.map(|(alias, _)| *alias)) {
            let words: Vec<String> = values.iter().map(|v| format!("`{name}={v}`")).collect();
            let _unused = writeln!(table, "| {} | {effect} |", words.join(", "));
        }
    }
    table
}

/// Table of parameters in Markdown, as in src/README.md.
pub fn parameters_markdown() -> String {
    let mut table = String::from("| parameter | values | default | meaning |\n|---|---|---|---|\n");
    for p in PARAMETERS {
        let _unused = writeln!(
            table,
            "| `{}` | {} | {} | {} |",
            p.name, p.values, p.default, p.help
        ); // writing to a String cannot fail
    }
    table
}
