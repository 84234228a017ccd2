//! Counts of boots that are over: histograms of phases, steps and milestones, failures by reason.
//!
//! Labels come from this program's own tables, never from a guest (exception: [`Builds`]): a name
//! or reason that the tables lack is counted as [`OTHER`], so the number of series has a bound for
//! any guests. A boot with a number that no machine can have ([`Metrics::is_implausible`]) counts
//! as [`Outcome::Implausible`] and in nothing else: one such number would dominate a sum until the
//! next restart. What is left is too small for a counter to overflow.

use super::builds::Builds;
use kata_gpu_report::analysis::metrics::{Metrics, OTHER, failure_label, failure_labels};
use kata_gpu_wire::catalogue::{Phase, steps};
use kata_gpu_wire::failure::Reason;
use std::collections::BTreeMap;

/// Upper bounds in seconds: from the milliseconds of a step of the init to the minutes of a boot
/// that maps BARs of 256 GB.
pub const BOUNDS: [f64; 18] = [
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 45.0, 60.0, 120.0,
    300.0, 600.0,
];
/// Points that people compare boots by, as `show` names them.
const MILESTONES: [&str; 6] = [
    "init start",
    "agent exec",
    "agent ready",
    "first container",
    "last container",
    "settled",
];
/// Histogram: for each bound, the values between the bound before it and this one.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Histogram {
    /// A count for each bound, and one for values above all bounds. Not cumulative.
    buckets: [u64; BOUNDS.len() + 1],
    pub sum: f64,
}

impl Histogram {
    fn add(&mut self, ns: i64) {
        let seconds = ns as f64 / 1e9;
        let at = BOUNDS
            .iter()
            .position(|bound| seconds <= *bound)
            .unwrap_or(BOUNDS.len());
        self.buckets[at] += 1;
        self.sum += seconds;
    }

    /// Each bound with the number of values that are not above it; the last has no bound.
    pub fn cumulative(&self) -> impl Iterator<Item = (Option<f64>, u64)> + '_ {
        let bounds = BOUNDS.iter().copied().map(Some).chain([None]);
        bounds.zip(&self.buckets).scan(0, |sum, (bound, count)| {
            *sum += count;
            Some((bound, *sum))
        })
    }

    pub fn count(&self) -> u64 {
        self.buckets.iter().sum()
    }
}

/// Outcome of a boot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Outcome {
    Settled,
    PoweredOff,
    /// The VM ended without a last record.
    Unfinished,
    /// The file has an impossible number; nothing else of it is counted.
    Implausible,
    /// The file could not be read.
    Unread,
}

impl Outcome {
    pub const ALL: [Self; 5] = [
        Self::Settled,
        Self::PoweredOff,
        Self::Unfinished,
        Self::Implausible,
        Self::Unread,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Self::Settled => "settled",
            Self::PoweredOff => "powered-off",
            Self::Unfinished => "unfinished",
            Self::Implausible => "implausible",
            Self::Unread => "unread",
        }
    }
}

/// Histograms by the value of a label.
pub type Histograms = BTreeMap<&'static str, Histogram>;

/// All boots that were over since the start.
#[derive(Clone, Debug)]
pub struct Tally {
    pub outcomes: BTreeMap<Outcome, u64>,
    pub milestones: Histograms,
    pub phases: Histograms,
    pub steps: Histograms,
    /// Failures by reason, with all reasons from the start: the first failure is then a change.
    pub failures: BTreeMap<&'static str, u64>,
    pub usable_gpus: u64,
    pub failed_gpus: u64,
    pub other_gpus: u64,
    pub lost: u64,
    pub builds: Builds,
}

impl Default for Tally {
    fn default() -> Self {
        Self {
            outcomes: Outcome::ALL.map(|outcome| (outcome, 0)).into(),
            milestones: Histograms::new(),
            phases: Histograms::new(),
            steps: Histograms::new(),
            failures: failure_labels().map(|label| (label, 0)).collect(),
            usable_gpus: 0,
            failed_gpus: 0,
            other_gpus: 0,
            lost: 0,
            builds: Builds::default(),
        }
    }
}

impl Tally {
    pub fn add(&mut self, boot: &Metrics) {
        if boot.is_implausible() {
            return self.count(Outcome::Implausible);
        }
        let outcome = match (boot.powered_off, boot.settled) {
            (true, _) => Outcome::PoweredOff,
            (false, true) => Outcome::Settled,
            (false, false) => Outcome::Unfinished,
        };
        self.count(outcome);
        for (name, at_ns) in &boot.milestones {
            if let Some(name) = MILESTONES.iter().find(|known| *known == name) {
                self.milestones.entry(name).or_default().add(*at_ns);
            }
        }
        for (phase, took_ns) in &boot.phases {
            self.phases
                .entry(Phase::named(phase).unwrap_or(Phase::Other).name())
                .or_default()
                .add(*took_ns);
        }
        for (title, each_ns) in &boot.durations {
            let histogram = self.steps.entry(step_label(title)).or_default();
            each_ns.iter().for_each(|took_ns| histogram.add(*took_ns));
        }
        for failure in &boot.failures {
            *self.failures.entry(failure_label(failure)).or_default() += 1;
        }
        let (failed, usable) = (boot.failed_gpus, boot.usable_gpus);
        self.failed_gpus += failed as u64;
        self.usable_gpus += usable as u64;
        self.other_gpus += boot.gpus.saturating_sub(failed + usable) as u64;
        self.lost += boot.lost;
        self.builds.add(boot);
    }

    /// Boots with an outcome.
    pub fn outcome(&self, outcome: Outcome) -> u64 {
        self.outcomes.get(&outcome).copied().unwrap_or(0)
    }

    pub fn add_unread(&mut self) {
        self.count(Outcome::Unread);
    }

    fn count(&mut self, outcome: Outcome) {
        *self.outcomes.entry(outcome).or_default() += 1;
    }
}

/// Name of a step by the catalogue, without the module's name, which is a guest's text.
fn step_label(title: &str) -> &'static str {
    let name = title.split(' ').next().unwrap_or_default();
    steps()
        .map(|row| row.name)
        .find(|known| *known == name)
        .unwrap_or(OTHER)
}

/// Owner of a failure by its label.
pub fn whose_label(reason: &str) -> &'static str {
    Reason::named(reason).map_or(OTHER, |reason| reason.whose().name())
}

#[cfg(test)]
mod tests {
    use super::*;
    use kata_gpu_report::analysis::metrics::{MAX_GPUS, MAX_NS};

    #[test]
    fn every_row_of_the_catalogue_is_counted_under_its_name() {
        for (step, reason) in [
            ("init", Reason::NeedsReset),
            ("power-off", Reason::OutOfMemory),
            ("container", Reason::CdiTimeout),
        ] {
            assert_eq!(failure_label(&format!("{step}: {reason}")), reason.name());
        }
        let tally = Tally::default();
        assert!(
            Reason::ALL
                .iter()
                .all(|reason| tally.failures[reason.name()] == 0)
        );
        let owners = ["needs-reset", "no-gpu", "container", OTHER].map(whose_label);
        assert_eq!(owners, ["host", "Kata's configuration", OTHER, OTHER]);
    }

    #[test]
    fn a_value_falls_into_the_first_bucket_not_below_it() {
        let mut histogram = Histogram::default();
        for ns in [
            0,
            5_000_000,
            5_000_001,
            600_000_000_000,
            600_000_000_001,
            i64::MAX,
        ] {
            histogram.add(ns);
        }
        let counts: Vec<u64> = histogram.cumulative().map(|(_, count)| count).collect();
        assert_eq!(
            (
                counts[0],
                counts[1],
                counts[BOUNDS.len() - 1],
                counts[BOUNDS.len()]
            ),
            (2, 3, 4, 6)
        );
        assert_eq!(histogram.count(), 6);
        assert!(BOUNDS.is_sorted());
    }

    #[test]
    fn no_text_of_a_guest_becomes_a_label() {
        let mut tally = Tally::default();
        let before = tally.failures.len();
        for n in 0..1000 {
            let boot = Metrics {
                milestones: [(format!("m{n}"), 1)].into(),
                durations: [(format!("step{n} \"}}\n"), vec![1])].into(),
                failures: vec![
                    format!("init: reason{n}"),
                    format!("x{n}"),
                    "container: \u{1b}[2J".into(),
                    "init: needs-reset".into(),
                ],
                ..Metrics::default()
            };
            tally.add(&boot);
        }
        assert_eq!(
            (
                tally.milestones.len(),
                tally.steps.len(),
                tally.failures.len()
            ),
            (0, 1, before)
        );
        assert_eq!(
            (tally.steps[OTHER].count(), tally.failures[OTHER]),
            (1000, 2000)
        );
        assert_eq!(
            (tally.failures["container"], tally.failures["needs-reset"]),
            (1000, 1000)
        );
        assert_eq!(tally.outcomes[&Outcome::Unfinished], 1000);
    }

    #[test]
    fn an_implausible_boot_changes_no_other_number() {
        let step = |ns| ("gpu.init".to_string(), vec![1, ns]);
        let plain = || Metrics {
            settled: true,
            ..Metrics::default()
        };
        let boots = [
            Metrics {
                milestones: [("settled".into(), i64::MAX)].into(),
                ..plain()
            },
            Metrics {
                milestones: [("settled".into(), i64::MIN)].into(),
                ..plain()
            },
            Metrics {
                phases: [("probe".into(), MAX_NS + 1)].into(),
                ..plain()
            },
            Metrics {
                durations: [step(MAX_NS + 1)].into(),
                ..plain()
            },
            Metrics {
                gpus: 20_000,
                failed_gpus: 20_000,
                failures: vec!["init: needs-reset".into(); 64],
                ..plain()
            },
            Metrics {
                lost: u64::MAX,
                ..plain()
            },
            Metrics {
                too_large: true,
                ..plain()
            },
        ];
        let mut tally = Tally::default();
        boots.iter().for_each(|boot| tally.add(boot));
        let untouched = Tally {
            outcomes: tally.outcomes.clone(),
            ..Tally::default()
        };
        assert_eq!(format!("{tally:?}"), format!("{untouched:?}"));
        assert_eq!(tally.outcomes[&Outcome::Implausible], boots.len() as u64);
        tally.add(&Metrics {
            gpus: MAX_GPUS,
            milestones: [("settled".into(), MAX_NS)].into(),
            ..plain()
        });
        assert_eq!(
            (tally.outcomes[&Outcome::Settled], tally.other_gpus),
            (1, MAX_GPUS as u64),
            "the limits themselves are plausible"
        );
    }

    #[test]
    fn a_module_load_is_one_step_whatever_the_module() {
        assert_eq!(
            [
                step_label("module.load nvidia"),
                step_label("gpu.init"),
                step_label("")
            ],
            ["module.load", "gpu.init", OTHER]
        );
    }
}
