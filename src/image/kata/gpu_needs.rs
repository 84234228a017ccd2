//! Values of a configuration with which no pod gets its GPUs, or only on a fast host. `install` and
//! `doctor` ask the same questions.
//!
//! Not here: the configuration's form, which differs between both. Values come as numbers and
//! texts.

use super::merge::Runtime;

/// Value of a plug mode that plugs nothing.
const NO_PORT: &str = "no-port";
const ROOT_PORT: &str = "root-port";
/// The hypervisor that has ports of a configured number. Cloud Hypervisor adds them itself.
const WITH_PORTS: &str = "qemu";

/// Mapping the BARs of 8 GPUs takes up to 3.7 s each on hosts that pin them in 4 KiB pages, a
/// Blackwell GPU's probe up to 4 s more.
pub const LEAST_CDI_TIMEOUT_S: u64 = 40;
/// kata-agent's default, in seconds.
pub const CDI_TIMEOUT_S: u64 = 100;
/// The VMM pins a GPU guest's memory and maps its BARs before any program of the guest runs.
const LEAST_DEADLINE_S: f64 = 60.0;
/// Share of a deadline that boots may take before a slower one would be given up.
const NEAR: f64 = 0.8;

/// Keys of deadlines in seconds, and what each limits.
pub const DEADLINES: [(&str, Limits); 3] = [
    ("agent.kata.dial_timeout", Limits::Agent),
    ("runtime.create_container_timeout", Limits::Boot),
    ("agent.kata.create_container_timeout", Limits::Boot),
];

/// Part of a boot that a deadline limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Limits {
    /// Until the agent answers.
    Agent,
    /// Until all GPUs are settled.
    Boot,
    /// From the agent's answer until then.
    Gpus,
}

impl Limits {
    pub fn name(self) -> &'static str {
        match self {
            Self::Agent => "until the agent answered",
            Self::Boot => "until its GPUs were settled",
            Self::Gpus => "from the agent's answer until its GPUs were settled",
        }
    }
}

/// A deadline in seconds, and the longest time that it limited in boots of this host.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Deadline {
    pub limits: Limits,
    pub seconds: f64,
    pub longest: Option<f64>,
}

/// Values of the agent's own deadline on a command line, the one that counts first. The agent knows
/// no other spelling.
pub fn cdi_timeouts<'a>(
    words: impl DoubleEndedIterator<Item = &'a str>,
) -> impl Iterator<Item = &'a str> {
    let value = |word: &'a str| word.trim_matches('"').strip_prefix("agent.cdi_timeout=");
    words.rev().filter_map(value)
}

impl Deadline {
    /// Whether a boot is given up that would succeed. The runtimes take 0 for their default.
    pub fn is_short(&self) -> bool {
        let least = match self.limits {
            Limits::Agent | Limits::Boot => LEAST_DEADLINE_S,
            Limits::Gpus => LEAST_CDI_TIMEOUT_S as f64,
        };
        let is_near = |longest| longest > self.seconds * NEAR;
        self.seconds > 0.0 && (self.seconds < least || self.longest.is_some_and(is_near))
    }

    /// Longest time in boots of this host, as text.
    pub fn shown_longest(&self) -> String {
        self.longest.map_or(String::new(), |longest| {
            format!("; longest {} here: {longest:.1} s", self.limits.name())
        })
    }
}

/// How a configuration plugs GPUs into guests.
#[derive(Clone, Debug)]
pub struct Plugging<'a> {
    pub runtime: Runtime,
    /// Section of the hypervisor.
    pub section: &'a str,
    /// `cold_plug_vfio` and `hot_plug_vfio`; None: not written.
    pub cold: Option<&'a str>,
    pub hot: Option<&'a str>,
    /// `pcie_root_port`; 0 where it is not written.
    pub root_ports: u64,
}

impl Plugging<'_> {
    fn has_port(mode: Option<&str>) -> bool {
        mode.is_some_and(|mode| !["", NO_PORT].contains(&mode))
    }

    pub fn is_cold(&self) -> bool {
        Self::has_port(self.cold)
    }

    /// Whether the configuration forbids every GPU. Releases that know no such keys, whose
    /// configurations do not have them, plug GPUs without.
    pub fn is_closed(&self) -> bool {
        let is_written = self.cold.is_some() || self.hot.is_some();
        is_written && !self.is_cold() && !Self::has_port(self.hot)
    }

    /// Whether so many GPUs find too few root ports. The Go runtime adds a port for each GPU that
    /// is plugged before the start.
    pub fn lacks_ports(&self, gpus: usize) -> bool {
        let is_counted = self.hot == Some(ROOT_PORT)
            || self.runtime == Runtime::Rust && self.cold == Some(ROOT_PORT);
        self.section == WITH_PORTS && is_counted && self.root_ports < gpus as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mode_without_a_port_closes_only_a_configuration_that_has_modes() {
        let closed = |cold, hot| {
            Plugging {
                runtime: Runtime::Go,
                section: "qemu",
                cold,
                hot,
                root_ports: 0,
            }
            .is_closed()
        };
        let (no, root) = (Some(NO_PORT), Some(ROOT_PORT));
        for (cold, hot, is) in [
            (no, no, true),
            (no, None, true),
            (None, Some(""), true),
            (None, None, false),
            (root, no, false),
            (no, Some("switch-port"), false),
        ] {
            assert_eq!(closed(cold, hot), is, "{cold:?} {hot:?}");
        }
    }

    #[test]
    fn ports_are_counted_where_the_runtime_adds_none() {
        let lacks = |runtime, section, cold, hot, root_ports| {
            Plugging {
                runtime,
                section,
                cold,
                hot,
                root_ports,
            }
            .lacks_ports(8)
        };
        let (go, rust, root) = (Runtime::Go, Runtime::Rust, Some(ROOT_PORT));
        assert!(lacks(go, "qemu", None, root, 7));
        assert!(lacks(rust, "qemu", root, None, 0));
        assert!(!lacks(go, "qemu", None, root, 8));
        assert!(!lacks(go, "qemu", root, None, 0), "Go adds them");
        assert!(!lacks(go, "clh", None, root, 0));
        assert!(!lacks(rust, "qemu", Some(NO_PORT), Some("switch-port"), 0));
    }

    #[test]
    fn a_deadline_is_short_by_itself_or_by_the_hosts_boots() {
        let short = |limits, seconds, longest| {
            Deadline {
                limits,
                seconds,
                longest,
            }
            .is_short()
        };
        assert!(short(Limits::Agent, 59.0, None));
        assert!(!short(Limits::Agent, 60.0, None));
        assert!(!short(Limits::Boot, 0.0, Some(9.0)), "Kata's default");
        assert!(short(Limits::Boot, 100.0, Some(81.0)));
        assert!(!short(Limits::Boot, 100.0, Some(80.0)));
        assert!(short(Limits::Gpus, 39.0, None));
        assert!(!short(Limits::Gpus, 40.0, Some(5.0)));
    }
}
