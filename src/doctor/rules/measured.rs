//! Measurements of this host's boots, and the part of the median boot that no finding explains.
//!
//! A finding explains the time that its cure would take off the steps that it shortens. Where steps
//! of several findings run at once, the largest share counts, so that no time is explained twice.

use super::finding::{Finding, Verdict};
use super::own_boots::OwnBoots;
use kata_gpu_report::analysis::rules::{RULES, Shortens};
use kata_gpu_report::analysis::statistics::Summary;
use kata_gpu_report::boot::model::SETTLED;
use kata_gpu_report::boot::timeline::Timeline;
use kata_gpu_wire::catalogue::Phase;
use serde::Serialize;
use std::cmp::Reverse;
use std::collections::BTreeMap;

/// Phases that are named.
const LONGEST: usize = 3;
/// Most steps of a boot that are compared with findings: several times those of the largest
/// machines.
const MAX_STEPS: usize = 1024;

/// A boot from its first milestone until its GPUs were settled.
#[derive(Clone, Debug, Default)]
pub struct SettledBoot {
    /// Name of its file, which is its id.
    pub id: String,
    from_ns: i64,
    to_ns: i64,
    /// Steps that some rule shortens.
    steps: Vec<(&'static str, i64, i64)>,
}

impl SettledBoot {
    /// `None` for a boot whose GPUs never settled.
    pub fn of(id: &str, timeline: &Timeline) -> Option<Self> {
        let window = timeline.window(None, Some(SETTLED)).ok()?;
        let shortened = || RULES.iter().flat_map(|rule| rule.shortens);
        let steps = timeline
            .steps
            .iter()
            .filter(|step| !step.open && !step.row.waiting);
        let steps = steps.filter_map(|step| {
            let known = shortened().find(|shortens| shortens.step == step.name)?;
            let (begin, end) = window.clip(step.begin_ns, step.end_ns);
            (begin < end).then_some((known.step, begin, end))
        });
        Some(Self {
            id: id.to_string(),
            from_ns: window.from.at_ns,
            to_ns: window.to.at_ns,
            steps: steps.take(MAX_STEPS).collect(),
        })
    }

    pub fn took_ns(&self) -> i64 {
        self.to_ns.saturating_sub(self.from_ns)
    }

    /// Time that the cures of these findings would not take off.
    fn rest_ns(&self, cures: &[Shortens]) -> i64 {
        // Share of each step's time that its best cure leaves.
        let left = |step: &str| {
            let of_step = cures.iter().filter(|cure| cure.step == step);
            of_step.map(|cure| cure.to).reduce(f64::min)
        };
        let steps: Vec<(f64, i64, i64)> = self
            .steps
            .iter()
            .filter_map(|(step, begin, end)| Some((left(step)?, *begin, *end)))
            .collect();
        let mut cuts: Vec<i64> = steps
            .iter()
            .flat_map(|(_, begin, end)| [*begin, *end])
            .collect();
        cuts.sort_unstable();
        cuts.dedup();
        let explained: f64 = cuts
            .windows(2)
            .filter_map(|cut| {
                let [from, to] = *cut else { return None };
                let around = steps.iter().filter(|(_, b, e)| *b <= from && to <= *e);
                let left = around.map(|(left, ..)| *left).reduce(f64::min)?;
                Some((1.0 - left) * (to - from) as f64)
            })
            .sum();
        self.took_ns().saturating_sub(explained as i64)
    }
}

/// Measurements of the boots of a directory.
#[derive(Clone, Debug, Serialize)]
pub struct Measured {
    /// Boots that are in the numbers.
    pub boots: usize,
    /// Boots with impossible numbers, which are in no other number.
    pub implausible: usize,
    /// From a boot's first milestone until its GPUs were settled.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub settled: Option<Summary>,
    /// From a boot's first milestone until its first container was created.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub first_container: Option<Summary>,
    /// The longest phases, the longest first.
    pub longest: Vec<PhaseTime>,
    /// Boots in which something failed.
    pub failed: usize,
    /// Boots by a failure's reason, the most frequent first; a boot can have several.
    pub failures: Vec<Failure>,
    /// Time of a boot that no finding explains; none where no boot settled.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unexplained: Option<Unexplained>,
}

/// A phase of all boots; a boot without the phase counts as 0.
#[derive(Clone, Debug, Serialize)]
pub struct PhaseTime {
    pub phase: String,
    pub median_ns: i64,
    /// Share of the median time until the GPUs were settled, in percent; phases overlap.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub share: Option<f64>,
}

#[derive(Clone, Debug, Serialize)]
pub struct Failure {
    /// A reason of the catalogue, or `container`, `power-off`, `not-settled`, `other`.
    pub reason: &'static str,
    pub boots: usize,
}

/// Time of one boot that no finding explains.
#[derive(Clone, Debug, Serialize)]
pub struct Unexplained {
    /// The boot whose time until its GPUs were settled is nearest to the median.
    pub boot: String,
    pub by_no_finding_ns: i64,
    pub of_ns: i64,
}

impl Measured {
    pub fn of(boots: &OwnBoots, findings: &[Finding]) -> Self {
        let took: Vec<i64> = boots.settled.iter().map(SettledBoot::took_ns).collect();
        let settled = Summary::of(&took);
        Self {
            boots: boots.count,
            implausible: boots.implausible,
            settled,
            first_container: Summary::of(&boots.first_container),
            longest: longest(boots, settled),
            failed: boots.failed.len(),
            failures: failures(&boots.failed),
            unexplained: settled.and_then(|s| unexplained(boots, s.median_ns, findings)),
        }
    }
}

fn longest(boots: &OwnBoots, settled: Option<Summary>) -> Vec<PhaseTime> {
    // The awaited work is in other phases.
    let working = |(phase, _): &(&String, _)| *phase != Phase::AgentWaiting.name();
    let phases = boots
        .phases
        .iter()
        .filter(working)
        .filter_map(|(phase, took)| {
            let mut took = took.clone();
            took.resize(boots.count.max(took.len()), 0);
            let median_ns = Summary::of(&took)?.median_ns;
            let whole = settled.filter(|whole| whole.median_ns > 0);
            let share = whole.map(|whole| median_ns as f64 * 100.0 / whole.median_ns as f64);
            (median_ns > 0).then(|| PhaseTime {
                phase: phase.clone(),
                median_ns,
                share,
            })
        });
    let mut phases: Vec<PhaseTime> = phases.collect();
    phases.sort_by_key(|phase| Reverse(phase.median_ns));
    phases.truncate(LONGEST);
    phases
}

fn failures(failed: &[Vec<&'static str>]) -> Vec<Failure> {
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    for label in failed.iter().flatten() {
        *counts.entry(label).or_default() += 1;
    }
    let counts = counts.into_iter();
    let mut all: Vec<Failure> = counts
        .map(|(reason, boots)| Failure { reason, boots })
        .collect();
    all.sort_by_key(|failure| Reverse(failure.boots));
    all
}

fn unexplained(boots: &OwnBoots, median_ns: i64, findings: &[Finding]) -> Option<Unexplained> {
    // The slower of two boots around the median has more to explain.
    let distance = |boot: &&SettledBoot| {
        let took_ns = boot.took_ns();
        (took_ns.abs_diff(median_ns), Reverse(took_ns))
    };
    let boot = boots.settled.iter().min_by_key(distance)?;
    let found = findings.iter().filter(|f| f.verdict == Verdict::Found);
    let cures: Vec<Shortens> = found.flat_map(|f| f.rule.shortens).copied().collect();
    Some(Unexplained {
        boot: boot.id.clone(),
        by_no_finding_ns: boot.rest_ns(&cures),
        of_ns: boot.took_ns(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_of_steps_that_run_at_once_is_explained_once() {
        let boot = SettledBoot {
            to_ns: 1000,
            steps: vec![("a", 0, 400), ("a", 200, 500), ("b", 400, 600)],
            ..SettledBoot::default()
        };
        let cure = |step, to| Shortens { step, to };
        assert_eq!(boot.rest_ns(&[]), 1000);
        assert_eq!(boot.rest_ns(&[cure("a", 0.0)]), 500);
        assert_eq!(boot.rest_ns(&[cure("a", 0.5)]), 750);
        // The better cure of a step, and of steps that overlap.
        assert_eq!(boot.rest_ns(&[cure("a", 0.5), cure("a", 0.0)]), 500);
        assert_eq!(boot.rest_ns(&[cure("a", 0.5), cure("b", 0.0)]), 600);
        assert_eq!(boot.rest_ns(&[cure("c", 0.0)]), 1000);
    }

    #[test]
    fn a_phase_of_few_boots_is_not_among_the_longest() {
        let boots = OwnBoots {
            count: 3,
            phases: [
                ("rare".into(), vec![1_000_000]),
                ("each".into(), vec![10, 20, 30]),
            ]
            .into(),
            failed: vec![vec!["cdi-timeout", "other"], vec!["cdi-timeout"]],
            ..OwnBoots::default()
        };
        let measured = Measured::of(&boots, &[]);
        let names: Vec<&str> = measured.longest.iter().map(|p| p.phase.as_str()).collect();
        assert_eq!(names, ["each"]);
        let failures: Vec<_> = measured
            .failures
            .iter()
            .map(|f| (f.reason, f.boots))
            .collect();
        assert_eq!(failures, [("cdi-timeout", 2), ("other", 1)]);
        assert!(measured.unexplained.is_none());
    }
}
