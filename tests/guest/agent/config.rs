//! Parameters of the kernel command line for the test agent. A bad value of a known parameter is an
//! error, which ends the agent as it ends the real one.

/// The release this agent behaves like, unless `testagent.version` says otherwise.
pub const AGENT_VERSION: &str = "4.1.0";
/// First release that fails at once on a device that a present kind does not list.
const FAIL_FAST: (u32, u32) = (3, 32);
/// Tries once a second for so long, unless `agent.cdi_timeout` says otherwise.
const CDI_TIMEOUT_S: u64 = 100;

/// Levels of the agent's log, the most urgent first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum Level {
    Critical,
    Error,
    Warning,
    Info,
    Debug,
    Trace,
}

impl Level {
    /// The level of that parameter.
    fn of(text: &str) -> Option<Self> {
        Some(match text {
            "fatal" | "panic" | "critical" => Self::Critical,
            "error" => Self::Error,
            "warn" | "warning" => Self::Warning,
            "info" => Self::Info,
            "debug" => Self::Debug,
            "trace" => Self::Trace,
            _ => return None,
        })
    }

    /// The word of a line.
    pub fn word(self) -> &'static str {
        match self {
            Self::Critical => "CRIT",
            Self::Error => "ERRO",
            Self::Warning => "WARN",
            Self::Info => "INFO",
            Self::Debug => "DEBG",
            Self::Trace => "TRCE",
        }
    }
}

/// A container to create.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wanted {
    pub name: String,
    /// Names of devices of kind nvidia.com/gpu, or with a kind of their own.
    pub devices: Vec<String>,
    /// Which of the guest's roots it runs on; none: only its device nodes are made.
    pub root: Option<String>,
    /// Whether its hooks are run.
    pub hooks: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    pub containers: Vec<Wanted>,
    pub cdi_timeout_s: u64,
    /// Whether unlisted devices fail at once.
    pub fail_fast: bool,
    /// Whether cgroup2 is mounted, rather than the controllers of version 1.
    pub unified_cgroups: bool,
    pub guest_half: Option<String>,
    pub poweroff: bool,
    /// Whether everything costs what it costs the real agent, and containers of the command line
    /// are made in a pod.
    pub real_cost: bool,
    /// A file that is read whole before the server listens, as the pages of a large agent are.
    pub reads: Option<String>,
    pub log: Level,
}

/// Form of a parameter's value without which the agent does not start.
#[derive(Clone, Copy)]
enum Value {
    /// Seconds; one `=` only.
    Seconds,
    Level,
    Port,
    PipeSize,
    /// Anything but nothing.
    Text,
    Url,
    OneOf(&'static [&'static str]),
    Bool,
    U8,
    U64,
    I64,
}

/// Parameters with a value that can be bad. Those with a free bool (`agent.trace=`,
/// `agent.visible_cdi_devices=`) take any text.
const PARAMETERS: &[(&str, Value)] = &[
    ("agent.log", Value::Level),
    ("agent.server_addr", Value::Text),
    ("agent.hotplug_timeout", Value::Seconds),
    ("agent.cdh_api_timeout", Value::Seconds),
    ("agent.image_pull_timeout", Value::Seconds),
    ("agent.cdi_timeout", Value::Seconds),
    ("agent.launch_process_timeout", Value::Seconds),
    ("agent.debug_console_vport", Value::Port),
    ("agent.log_vport", Value::Port),
    ("agent.passfd_listener_port", Value::Port),
    ("agent.container_pipe_size", Value::PipeSize),
    ("cgroup_no_v1", Value::Text),
    ("agent.https_proxy", Value::Url),
    ("agent.no_proxy", Value::Text),
    (
        "agent.guest_components_rest_api",
        Value::OneOf(&["all", "attestation", "resource"]),
    ),
    (
        "agent.guest_components_procs",
        Value::OneOf(&[
            "none",
            "api-server-rest",
            "attestation-agent",
            "confidential-data-hub",
        ]),
    ),
];

/// Looked at only after `agent.mem_agent_enable` was switched on further left.
const MEM_AGENT: &[(&str, Value)] = &[
    ("agent.mem_agent_memcg_disable", Value::Bool),
    ("agent.mem_agent_memcg_swap", Value::Bool),
    ("agent.mem_agent_memcg_swappiness_max", Value::U8),
    ("agent.mem_agent_memcg_period_secs", Value::U64),
    ("agent.mem_agent_memcg_period_psi_percent_limit", Value::U8),
    (
        "agent.mem_agent_memcg_eviction_psi_percent_limit",
        Value::U8,
    ),
    (
        "agent.mem_agent_memcg_eviction_run_aging_count_min",
        Value::U64,
    ),
    ("agent.mem_agent_compact_disable", Value::Bool),
    ("agent.mem_agent_compact_period_secs", Value::U64),
    (
        "agent.mem_agent_compact_period_psi_percent_limit",
        Value::U8,
    ),
    ("agent.mem_agent_compact_psi_percent_limit", Value::U8),
    ("agent.mem_agent_compact_sec_max", Value::I64),
    ("agent.mem_agent_compact_order", Value::U8),
    ("agent.mem_agent_compact_threshold", Value::U64),
    ("agent.mem_agent_compact_force_times", Value::U64),
];

impl Value {
    /// Why the agent would not start with this text.
    fn complaint(self, text: &str) -> Option<&'static str> {
        let (good, complaint) = match self {
            Self::Seconds => (text.parse::<u64>().is_ok(), "unable to parse timeout"),
            Self::Level => (Level::of(text).is_some(), "invalid log level"),
            // Not more than a number: one that is no port is ignored, not refused.
            Self::Port => (text.parse::<i32>().is_ok(), "not a number"),
            Self::PipeSize => (text.parse::<i32>().is_ok_and(|n| n >= 0), "not a pipe size"),
            Self::Text => (!text.is_empty(), "value is missing"),
            // The real one has a whole parser of URLs; what it refuses first is a text without a
            // scheme.
            Self::Url => (
                text.split_once(':')
                    .is_some_and(|(scheme, _)| is_scheme(scheme)),
                "not a URL",
            ),
            Self::OneOf(words) => (words.contains(&text), "not one of its words"),
            Self::Bool => (text.parse::<bool>().is_ok(), "not true or false"),
            Self::U8 => (text.parse::<u8>().is_ok(), "not a number up to 255"),
            Self::U64 => (text.parse::<u64>().is_ok(), "not a number"),
            Self::I64 => (text.parse::<i64>().is_ok(), "not a number"),
        };
        (!good).then_some(complaint)
    }
}

fn is_scheme(text: &str) -> bool {
    text.starts_with(|c: char| c.is_ascii_alphabetic())
        && text
            .bytes()
            .all(|b| b.is_ascii_alphanumeric() || b"+-.".contains(&b))
}

/// The agent's idea of a switch: `true`, or a number other than 0; everything else is off.
fn switch(text: &str) -> bool {
    text.parse::<bool>()
        .unwrap_or_else(|_| text.parse::<u64>().is_ok_and(|n| n != 0))
}

impl Config {
    pub fn parse(command_line: &str) -> Result<Self, String> {
        let mut config = Self {
            containers: vec![],
            cdi_timeout_s: CDI_TIMEOUT_S,
            fail_fast: true,
            unified_cgroups: false,
            guest_half: None,
            poweroff: false,
            real_cost: false,
            reads: None,
            log: Level::Info,
        };
        let (mut systemd_unified, mut no_v1, mut mem_agent) = (false, false, false);
        let mut without_hooks = vec![];
        for word in command_line.split_ascii_whitespace() {
            let Some((name, value)) = word.split_once('=') else {
                continue;
            };
            let bad = |what: &str| format!("{name}={value}: {what}");
            let known = PARAMETERS
                .iter()
                .chain(if mem_agent { MEM_AGENT } else { &[] })
                .find(|(n, _)| *n == name);
            if let Some(complaint) = known.and_then(|(_, kind)| kind.complaint(value)) {
                return Err(bad(complaint));
            }
            match name {
                // A timeout of 0 is ignored. Whether it is a number has been seen above.
                "agent.cdi_timeout" => {
                    config.cdi_timeout_s = value
                        .parse()
                        .ok()
                        .filter(|s| *s > 0)
                        .unwrap_or(config.cdi_timeout_s)
                }
                "agent.log" => config.log = Level::of(value).unwrap_or(config.log),
                // The real one reads all its parameters from that file, and fails without it.
                "agent.config_file" => {
                    return Err(bad(
                        "the test agent takes no configuration file: put the parameters on the \
                        command line",
                    ));
                }
                "cgroup_no_v1" => no_v1 |= value == "all",
                "systemd.unified_cgroup_hierarchy" => systemd_unified = switch(value),
                "agent.mem_agent_enable" => mem_agent = switch(value),
                "testagent.version" => {
                    let mut parts = value.split('.').map(str::parse::<u32>);
                    let (Some(Ok(major)), Some(Ok(minor))) = (parts.next(), parts.next()) else {
                        return Err(bad("not a version"));
                    };
                    config.fail_fast = (major, minor) >= FAIL_FAST;
                }
                "testagent.containers" => {
                    for one in value.split(';').filter(|c| !c.is_empty()) {
                        let (name, devices) = one
                            .split_once(':')
                            .ok_or_else(|| bad("want NAME:DEVICE[,DEVICE..][@ROOT][;..]"))?;
                        let (devices, root) = devices
                            .split_once('@')
                            .map_or((devices, None), |(d, root)| (d, Some(root.to_string())));
                        let devices = devices.split(',').map(str::to_string).collect();
                        config.containers.push(Wanted {
                            name: name.into(),
                            devices,
                            root,
                            hooks: true,
                        });
                    }
                }
                "testagent.without_hooks" => without_hooks = value.split(',').collect(),
                "testagent.cost" => config.real_cost = value == "real",
                "testagent.reads" => config.reads = Some(value.into()),
                "testagent.guest" => config.guest_half = Some(value.into()),
                "testagent.poweroff" => config.poweroff = value == "on",
                _ => {}
            }
        }
        config.unified_cgroups = systemd_unified || no_v1;
        config
            .containers
            .iter_mut()
            .for_each(|c| c.hooks = !without_hooks.contains(&c.name.as_str()));
        Ok(config)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_words_are_ignored_and_bad_values_are_not() {
        assert!(
            Config::parse(
                "gpuinit.bind=fast nvrc.log=x agent.unknown=1 agent.logx=foo agent.trace=maybe"
            )
            .is_ok()
        );
        for word in [
            "agent.cdi_timeout=x",
            "agent.cdi_timeout=",
            "agent.cdi_timeout=5=6",
            "agent.cdi_timeout=-1",
            "agent.log=foo",
            "agent.log=",
            "agent.log_vport=high",
            "agent.container_pipe_size=-1",
            "agent.server_addr=",
            "agent.https_proxy=nowhere",
            "agent.guest_components_procs=all",
            "agent.config_file=/etc/agent.toml",
            "cgroup_no_v1=",
        ] {
            assert!(
                Config::parse(word).is_err_and(|e| e.starts_with(word)),
                "{word} was taken"
            );
        }
        for word in [
            "agent.log=panic",
            "agent.log_vport=-1",
            "agent.https_proxy=http://a:1/?b=c",
            "agent.guest_components_procs=none",
        ] {
            assert!(Config::parse(word).is_ok(), "{word} was refused");
        }
    }

    #[test]
    fn mem_agent_parameters_count_only_after_its_switch() {
        assert!(Config::parse("agent.mem_agent_memcg_swap=x agent.mem_agent_enable=1").is_ok());
        assert!(Config::parse("agent.mem_agent_enable=no agent.mem_agent_memcg_swap=x").is_ok());
        assert!(Config::parse("agent.mem_agent_enable=1 agent.mem_agent_memcg_swap=x").is_err());
    }

    #[test]
    fn a_timeout_of_zero_leaves_the_default() {
        assert_eq!(
            Config::parse("agent.cdi_timeout=0").unwrap().cdi_timeout_s,
            CDI_TIMEOUT_S
        );
        assert_eq!(
            Config::parse("agent.cdi_timeout=3 agent.cdi_timeout=0")
                .unwrap()
                .cdi_timeout_s,
            3
        );
    }

    #[test]
    fn cgroup2_is_asked_for_in_two_ways() {
        for (words, unified) in [
            ("", false),
            ("cgroup_no_v1=all", true),
            ("cgroup_no_v1=memory", false),
            ("systemd.unified_cgroup_hierarchy=1", true),
            (
                "systemd.unified_cgroup_hierarchy=1 systemd.unified_cgroup_hierarchy=0",
                false,
            ),
        ] {
            assert_eq!(
                Config::parse(words).unwrap().unified_cgroups,
                unified,
                "{words}"
            );
        }
    }
}
