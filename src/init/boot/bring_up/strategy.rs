//! Strategy of a boot to bind and initialise its GPUs, chosen from the configuration, the hardware
//! and the first measurement. Pure.
//!
//! Strategies and their costs, for N GPUs, each with E to enable, W of firewall wait, and
//! S1 + S2 + S3 to initialise:
//!
//! - `insmod`: the module's init probes all GPUs in turn, and no GPU can be opened before the last
//!   probe: N (E + W) passes first. Best where E is milliseconds: a probe takes the driver's global
//!   lock for a moment, and would wait for GPUs that initialise already.
//! - `pipelined`: the module is loaded with one GPU; the others are enabled and bound one by one.
//!   GPU k initialises while k+1 is enabled. Where E is shorter than an initialisation, GPUs that
//!   wait for their turn initialise together (see [`super::schedule`]).
//! - `concurrent`: as pipelined, but with all binds at once, for probes that sleep. Probes at once
//!   race on two unlocked counters of the driver, so this is used only where it saves time.
//!
//! If all initialisations take the driver's one lock anyway (confidential computing, drivers
//! before 550.40.07), opening all GPUs at once gains nothing. There, GPUs are opened one after
//! another, so that each step's time is its own.

use crate::config::{Bind, Init};
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// Time to map the first GPU's BARs from which on a host is slow. (An H100 takes milliseconds on a
/// host with huge pfnmaps, and seconds on one that pins 4 KiB pages.)
pub const SLOW_ENABLE: Duration = Duration::from_millis(100);
/// First version that boots GSP with the driver's global lock released: on Hopper and Ada; on every
/// generation since 550.142 and 555.
const RELAXED: Version = Version([550, 40, 7]);
/// First version in which NVreg_GpuInitOnProbe initialises in the probe.
const INIT_ON_PROBE: Version = Version([595, 44, 2]);

/// A driver version: `550.163.01`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version(pub [u32; 3]);

impl FromStr for Version {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let mut numbers = [0; 3];
        let parts: Vec<&str> = text.trim().split('.').collect();
        if !(2..=3).contains(&parts.len()) {
            return Err(());
        }
        for (number, part) in numbers.iter_mut().zip(&parts) {
            *number = part.parse().map_err(|_| ())?;
        }
        Ok(Self(numbers))
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [branch, minor, patch] = self.0;
        write!(f, "{branch}.{minor}.{patch:02}")
    }
}

/// Facts known before the first GPU is enabled.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Facts {
    pub gpus: usize,
    /// Whether a GPU waits in its probe until its BAR firewall is down.
    pub firewall: bool,
    /// Version of the module that will be loaded, if its file contains one.
    pub driver: Option<Version>,
    /// Whether the module's options have NVreg_GpuInitOnProbe=1.
    pub init_on_probe: bool,
    /// Whether the guest's memory is hidden from its host.
    pub confidential: bool,
    pub vcpus: usize,
}

/// Configuration, and facts known before the first GPU is enabled.
#[derive(Clone, Debug)]
pub struct Policy {
    pub bind: Bind,
    pub init: Init,
    /// Number of GPUs, in PCI order, that initialise before all others.
    pub first: usize,
    pub relaxed: bool,
    /// No GPU is expected, now or later.
    pub no_gpus: bool,
    /// An earlier worker began to load the driver: modules are locked although this one may have
    /// nothing to load.
    pub load_begun: bool,
    /// Time that an earlier worker's enabling of a GPU took.
    pub enable: Option<Duration>,
    pub facts: Facts,
}

impl Policy {
    /// Policy of a guest that configures nothing, in its first worker.
    pub fn unconfigured(facts: Facts) -> Self {
        Self {
            bind: Bind::Auto,
            init: Init::Parallel,
            first: 0,
            relaxed: true,
            no_gpus: false,
            load_begun: false,
            enable: None,
            facts,
        }
    }

    /// Reason for which the driver initialises one GPU at a time, its global lock held throughout.
    pub fn one_at_a_time(&self) -> Option<&'static str> {
        let old = |version: Version| version < RELAXED;
        if self.facts.confidential {
            Some("under confidential computing the driver does one at a time")
        } else if !self.relaxed {
            Some("gpuinit.relaxed=off makes the driver do one at a time")
        } else if self.facts.driver.is_some_and(old) {
            Some("this driver does one at a time")
        } else {
            None
        }
    }
}

/// A chosen strategy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Strategy {
    /// Never `Auto`.
    pub bind: Bind,
    pub init: Init,
    pub reason: String,
}

/// Chooses the strategy. `slow`: the first GPU's enabling took [`SLOW_ENABLE`] or longer.
pub fn choose(policy: &Policy, slow: bool) -> Strategy {
    let facts = &policy.facts;
    let (bind, why_bind) = match (policy.bind, facts.gpus) {
        (Bind::Auto, 0 | 1) => (Bind::Insmod, "with one GPU the module load does it all"),
        (Bind::Auto, _) if facts.firewall => (
            Bind::Concurrent,
            "probes of these GPUs sleep for seconds, so all at once",
        ),
        (Bind::Auto, _) if initialises_in_probe(facts) => (
            Bind::Concurrent,
            "the driver initialises in the probe, so all probes at once",
        ),
        (Bind::Auto, _) if slow => (
            Bind::Pipelined,
            "the host maps BARs slowly, so each GPU goes on as soon as its own are mapped",
        ),
        (Bind::Auto, _) => (
            Bind::Insmod,
            "the host maps BARs fast, so the module load probes all before the first one \
                initialises",
        ),
        (asked, _) => (asked, "asked for by gpuinit.bind"),
    };
    let (init, why_init) = if policy.init == Init::Serial {
        (Init::Serial, "asked for by gpuinit.init")
    } else if let Some(why) = policy.one_at_a_time() {
        (Init::Serial, why)
    } else {
        (Init::Parallel, "the driver boots several GPUs at once")
    };
    let reason = format!("bind: {why_bind}; init: {why_init}");
    Strategy { bind, init, reason }
}

fn initialises_in_probe(facts: &Facts) -> bool {
    facts.init_on_probe && facts.driver.is_none_or(|version| version >= INIT_ON_PROBE)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts() -> Facts {
        Facts {
            gpus: 8,
            firewall: false,
            driver: "550.163.01".parse().ok(),
            init_on_probe: false,
            confidential: false,
            vcpus: 2,
        }
    }

    fn policy() -> Policy {
        Policy::unconfigured(facts())
    }

    /// On a slow host.
    fn auto(facts: Facts) -> (Bind, Init) {
        let strategy = choose(&Policy { facts, ..policy() }, true);
        (strategy.bind, strategy.init)
    }

    #[test]
    fn versions_order_by_number() {
        let version = |text: &str| text.parse::<Version>();
        assert!(version("550.40.07").unwrap() < version("550.142").unwrap());
        assert!(version("595.44.02").unwrap() < version("595.45.04\n").unwrap());
        assert_eq!(version("550.163.01").unwrap().to_string(), "550.163.01");
        for text in ["", "550", "550.x.1", "1.2.3.4", "-1.2"] {
            assert_eq!(version(text), Err(()), "{text:?}");
        }
    }

    #[test]
    fn auto_goes_by_what_the_guest_has() {
        assert_eq!(auto(facts()), (Bind::Pipelined, Init::Parallel));
        assert_eq!(
            auto(Facts { gpus: 1, ..facts() }),
            (Bind::Insmod, Init::Parallel)
        );
        assert_eq!(
            auto(Facts {
                firewall: true,
                ..facts()
            }),
            (Bind::Concurrent, Init::Parallel)
        );
        assert_eq!(
            auto(Facts {
                confidential: true,
                ..facts()
            }),
            (Bind::Pipelined, Init::Serial)
        );
        assert_eq!(
            auto(Facts {
                driver: None,
                ..facts()
            }),
            (Bind::Pipelined, Init::Parallel)
        );
        assert_eq!(choose(&policy(), false).bind, Bind::Insmod);
    }

    #[test]
    fn old_drivers_do_one_at_a_time() {
        for (version, init) in [
            ("535.230.02", Init::Serial),
            ("550.40.06", Init::Serial),
            ("550.40.07", Init::Parallel),
            ("595.45.04", Init::Parallel),
        ] {
            assert_eq!(
                auto(Facts {
                    driver: version.parse().ok(),
                    ..facts()
                }),
                (Bind::Pipelined, init),
                "{version}"
            );
        }
    }

    #[test]
    fn init_in_the_probe_counts_only_where_the_driver_knows_it() {
        let asked = Facts {
            init_on_probe: true,
            ..facts()
        };
        assert_eq!(
            auto(Facts {
                driver: "595.44.02".parse().ok(),
                ..asked.clone()
            })
            .0,
            Bind::Concurrent
        );
        assert_eq!(auto(asked).0, Bind::Pipelined);
    }

    #[test]
    fn what_was_asked_for_is_done() {
        let asked = Policy {
            bind: Bind::Insmod,
            init: Init::Serial,
            facts: Facts {
                firewall: true,
                ..facts()
            },
            ..policy()
        };
        let strategy = choose(&asked, true);
        assert_eq!((strategy.bind, strategy.init), (Bind::Insmod, Init::Serial));
        assert_eq!(
            strategy.reason,
            "bind: asked for by gpuinit.bind; init: asked for by gpuinit.init"
        );
        assert_eq!(
            choose(
                &Policy {
                    relaxed: false,
                    ..policy()
                },
                true
            )
            .init,
            Init::Serial
        );
    }
}
