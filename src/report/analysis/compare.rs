//! Comparison of two boots or two sets of boots: slower values, beyond noise or not.
//!
//! A value is slower when its median grew by more than the threshold and, with enough boots, when
//! the whole 95 % bootstrap interval of the difference is above zero. The gate checks milestones
//! and failures alone; phases and steps show the source of a change.

use super::metrics::Metrics;
use super::statistics::{Summary, difference_interval, seed_for};
use anyhow::{Context, Result, ensure};
use kata_gpu_wire::catalogue::Phase;
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};
use std::str::FromStr;

/// Smallest difference that counts: the resolution of printed times.
const FLOOR_NS: i64 = 1_000_000;

/// Limit above which a value is slower.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Threshold {
    Percent(f64),
    Absolute { ns: i64 },
}

impl FromStr for Threshold {
    type Err = anyhow::Error;

    /// Parses `5%`, `200ms`, `1.5s`.
    fn from_str(text: &str) -> Result<Self> {
        if let Some(percent) = text.strip_suffix('%') {
            let percent: f64 = percent
                .parse()
                .with_context(|| format!("{percent} is no number"))?;
            ensure!(
                percent.is_finite() && percent >= 0.0,
                "{percent} % is no threshold: 0% or more"
            );
            return Ok(Self::Percent(percent));
        }
        let duration = humantime::parse_duration(text)
            .with_context(|| format!("{text} is neither a part (5%) nor a duration (200ms)"))?;
        Ok(Self::Absolute {
            ns: i64::try_from(duration.as_nanos()).context("too long")?,
        })
    }
}

impl Threshold {
    fn exceeded(self, before: i64, difference: i64) -> bool {
        let limit = match self {
            Self::Percent(percent) => before.unsigned_abs() as f64 * percent / 100.0,
            Self::Absolute { ns } => ns as f64,
        };
        difference >= FLOOR_NS && difference as f64 > limit
    }
}

/// Result for a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    Same,
    Slower,
    Faster,
    /// Fewer boots of the second set have the value.
    Missing,
    /// Only one set has the value.
    Unknown,
}

/// A value of both sets.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Change {
    pub name: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub a: Option<Summary>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub b: Option<Summary>,
    /// Median of b minus median of a.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub difference_ns: Option<i64>,
    /// 95 % bootstrap interval of the difference.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub interval_ns: Option<(i64, i64)>,
    pub verdict: Verdict,
}

/// Comparison of two sets.
#[derive(Clone, Debug, Serialize)]
pub struct Comparison {
    pub boots_a: usize,
    pub boots_b: usize,
    /// Boots with a failure.
    pub failed_a: usize,
    pub failed_b: usize,
    pub milestones: Vec<Change>,
    pub phases: Vec<Change>,
    /// Steps, the largest change first.
    pub steps: Vec<Change>,
    pub notes: Vec<String>,
    /// Sentences of the gate; empty: no slower.
    pub worse: Vec<String>,
}

/// Settings of a comparison.
#[derive(Clone, Debug)]
pub struct Settings {
    pub threshold: Threshold,
    pub seed: u64,
    /// Milestones that count for the gate; empty: all.
    pub gate: Vec<String>,
}

/// Errors: no boot on one side, or no common milestone.
pub fn compare(a: &[Metrics], b: &[Metrics], settings: &Settings) -> Result<Comparison> {
    ensure!(
        !a.is_empty() && !b.is_empty(),
        "no boots on the {} side",
        if a.is_empty() { "first" } else { "second" }
    );
    let mut milestones = changes(a, b, settings, |m| &m.milestones);
    let mut phases = changes(a, b, settings, |m| &m.phases);
    let mut steps = changes(a, b, settings, |m| &m.steps);
    let known = milestones
        .iter()
        .any(|m| m.difference_ns.is_some() && m.name != "kernel start");
    ensure!(
        known,
        "no milestone after the kernel's start that both sides have: nothing to compare"
    );
    for gate in &settings.gate {
        let names: Vec<&str> = milestones.iter().map(|m| m.name.as_str()).collect();
        ensure!(
            names.contains(&gate.as_str()),
            "no milestone {gate}: one of {}",
            names.join(", ")
        );
    }
    milestones.sort_by_key(|m| m.a.or(m.b).map(|s| s.median_ns));
    phases.sort_by_key(|p| Phase::named(&p.name).unwrap_or(Phase::Other));
    steps.sort_by(|x, y| {
        let grown = |change: &Change| change.difference_ns.unwrap_or(0);
        (grown(y), &x.name).cmp(&(grown(x), &y.name))
    });
    let failed = |set: &[Metrics]| set.iter().filter(|m| !m.failures.is_empty()).count();
    let mut comparison = Comparison {
        boots_a: a.len(),
        boots_b: b.len(),
        failed_a: failed(a),
        failed_b: failed(b),
        milestones,
        phases,
        steps,
        notes: notes(a, b),
        worse: Vec::new(),
    };
    reached_less(a, b, &mut comparison.milestones);
    comparison.worse = worse(&comparison, settings);
    Ok(comparison)
}

fn changes(
    a: &[Metrics],
    b: &[Metrics],
    settings: &Settings,
    of: fn(&Metrics) -> &BTreeMap<String, i64>,
) -> Vec<Change> {
    let names: BTreeSet<&String> = a.iter().chain(b).flat_map(|m| of(m).keys()).collect();
    let change = |name: &String| {
        let values = |set: &[Metrics]| -> Vec<i64> {
            set.iter()
                .filter_map(|m| of(m).get(name).copied())
                .collect()
        };
        let (x, y) = (values(a), values(b));
        let (before, after) = (Summary::of(&x), Summary::of(&y));
        let difference_ns = before
            .zip(after)
            .map(|(x, y)| y.median_ns.saturating_sub(x.median_ns));
        let interval_ns = difference_interval(&x, &y, seed_for(name, settings.seed));
        let verdict = match (before, difference_ns) {
            (Some(before), Some(difference)) => {
                let significant = |above: bool| {
                    interval_ns.is_none_or(|(low, high)| if above { low > 0 } else { high < 0 })
                };
                if settings.threshold.exceeded(before.median_ns, difference) && significant(true) {
                    Verdict::Slower
                } else if settings
                    .threshold
                    .exceeded(before.median_ns, difference.saturating_neg())
                    && significant(false)
                {
                    Verdict::Faster
                } else {
                    Verdict::Same
                }
            }
            _ => Verdict::Unknown,
        };
        Change {
            name: name.clone(),
            a: before,
            b: after,
            difference_ns,
            interval_ns,
            verdict,
        }
    };
    names.into_iter().map(change).collect()
}

/// Whether a milestone is the agent's: it is known only from the agent's lines.
fn is_agents(milestone: &str) -> bool {
    matches!(
        milestone,
        "agent ready" | "first container" | "last container"
    )
}

/// A milestone that fewer boots of the second set reach is worse than a late one.
fn reached_less(a: &[Metrics], b: &[Metrics], milestones: &mut [Change]) {
    for change in milestones {
        let reached = |set: &[Metrics]| {
            let could: Vec<&Metrics> = set
                .iter()
                .filter(|m| m.agent_known || !is_agents(&change.name))
                .collect();
            (
                could
                    .iter()
                    .filter(|m| m.milestones.contains_key(&change.name))
                    .count(),
                could.len(),
            )
        };
        let ((reached_a, of_a), (reached_b, of_b)) = (reached(a), reached(b));
        if of_a > 0 && of_b > 0 && reached_b * of_a < reached_a * of_b {
            change.verdict = Verdict::Missing;
        }
    }
}

fn worse(comparison: &Comparison, settings: &Settings) -> Vec<String> {
    let gates = |m: &&Change| settings.gate.is_empty() || settings.gate.contains(&m.name);
    let mut worse = Vec::new();
    for change in comparison.milestones.iter().filter(gates) {
        match change.verdict {
            Verdict::Slower => worse.push(format!("{} is slower", change.name)),
            Verdict::Missing => worse.push(format!("{} is reached by fewer boots", change.name)),
            Verdict::Same | Verdict::Faster | Verdict::Unknown => {}
        }
    }
    if comparison.failed_b * comparison.boots_a > comparison.failed_a * comparison.boots_b {
        worse.push("more boots have failures".to_string());
    }
    worse
}

fn notes(a: &[Metrics], b: &[Metrics]) -> Vec<String> {
    let mut notes = Vec::new();
    let gpus = |set: &[Metrics]| set.iter().map(|m| m.gpus).collect::<BTreeSet<_>>();
    if gpus(a) != gpus(b) {
        let list = |set: &[Metrics]| {
            gpus(set)
                .iter()
                .map(usize::to_string)
                .collect::<Vec<_>>()
                .join(", ")
        };
        notes.push(format!(
            "the boots differ in their number of GPUs: {} before, {} now",
            list(a),
            list(b)
        ));
    }
    let agent = |set: &[Metrics]| set.iter().all(|m| m.agent_known);
    if agent(a) != agent(b) {
        notes.push(
            "the agent's lines are not known of all boots: its milestones are compared \
                    where they are"
                .to_string(),
        );
    }
    if a.len().min(b.len()) < super::statistics::MIN_FOR_INTERVAL {
        notes.push(format!(
            "fewer than {} boots on a side: no intervals, any difference beyond the threshold \
             counts",
            super::statistics::MIN_FOR_INTERVAL
        ));
    }
    notes
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: i64 = 1_000_000;

    fn boots(ready_ms: &[i64]) -> Vec<Metrics> {
        let boot = |ms: &i64| Metrics {
            milestones: BTreeMap::from([
                ("kernel start".to_string(), 0),
                ("agent ready".to_string(), ms * MS),
            ]),
            agent_known: true,
            ..Metrics::default()
        };
        ready_ms.iter().map(boot).collect()
    }

    fn settings(threshold: &str) -> Settings {
        Settings {
            threshold: threshold.parse().unwrap(),
            seed: 1,
            gate: Vec::new(),
        }
    }

    #[test]
    fn thresholds_are_parts_or_durations() {
        assert_eq!("5%".parse::<Threshold>().unwrap(), Threshold::Percent(5.0));
        assert_eq!(
            "200ms".parse::<Threshold>().unwrap(),
            Threshold::Absolute { ns: 200 * MS }
        );
        for wrong in ["", "5", "-5%", "NaN%", "x%", "ms"] {
            assert!(wrong.parse::<Threshold>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn the_gate_closes_on_slower_medians_and_not_on_noise() {
        let base: Vec<i64> = (0..20).map(|i| 1000 + (i * 7) % 40).collect();
        let slower: Vec<i64> = base.iter().map(|ms| ms + 100).collect();
        let noisy: Vec<i64> = base.iter().map(|ms| ms + 3).collect();
        let worse = |b: &[i64], threshold: &str| {
            compare(&boots(&base), &boots(b), &settings(threshold))
                .unwrap()
                .worse
        };
        assert_eq!(worse(&slower, "5%"), ["agent ready is slower"]);
        assert_eq!(
            worse(&slower, "15%"),
            [] as [&str; 0],
            "below the threshold"
        );
        assert_eq!(
            worse(&noisy, "0%"),
            [] as [&str; 0],
            "above a threshold of nothing, but noise"
        );
        assert_eq!(worse(&base, "0%"), [] as [&str; 0]);
        let faster = compare(&boots(&slower), &boots(&base), &settings("5%")).unwrap();
        assert!(
            faster.worse.is_empty()
                && faster
                    .milestones
                    .iter()
                    .any(|m| m.verdict == Verdict::Faster)
        );
    }

    #[test]
    fn not_to_arrive_is_worse_than_late_and_not_to_know_is_neither() {
        let a = boots(&[1000, 1000]);
        let mut b = boots(&[1000, 1000]);
        b[0].milestones.remove("agent ready");
        assert_eq!(
            compare(&a, &b, &settings("5%")).unwrap().worse,
            ["agent ready is reached by fewer boots"]
        );
        b[0].agent_known = false;
        let known = compare(&a, &b, &settings("5%")).unwrap();
        assert!(
            known.worse.is_empty() && known.notes.iter().any(|n| n.contains("not known of all")),
            "{known:?}"
        );
        b[1].failures.push("init: hang".into());
        assert_eq!(
            compare(&a, &b, &settings("5%")).unwrap().worse,
            ["more boots have failures"]
        );
    }

    #[test]
    fn what_cannot_be_compared_is_an_error() {
        let some = boots(&[1]);
        assert!(compare(&some, &[], &settings("5%")).is_err());
        let mut none = boots(&[1]);
        none[0].milestones.remove("agent ready");
        assert!(
            compare(&some, &none, &settings("5%"))
                .unwrap_err()
                .to_string()
                .contains("nothing to compare")
        );
        let unknown = Settings {
            gate: vec!["lunch".into()],
            ..settings("5%")
        };
        assert!(
            compare(&some, &some, &unknown)
                .unwrap_err()
                .to_string()
                .contains("one of")
        );
    }
}
