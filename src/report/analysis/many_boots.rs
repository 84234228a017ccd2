//! Statistics of many boots: durations of phases and steps, times of milestones, and frequency of
//! failures.

use super::metrics::Metrics;
use super::statistics::Summary;
use kata_gpu_wire::catalogue::Phase;
use serde::Serialize;
use std::collections::BTreeMap;

/// Limit of different names, and of different reasons, over all boots.
const MAX_NAMES: usize = 256;

/// Statistics of a set of boots.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Stats {
    pub boots: usize,
    /// Boots with a number that no machine can have: they are in no other sum.
    pub implausible: usize,
    pub settled: usize,
    /// Number of boots with a failure.
    pub failed: usize,
    pub gpus: usize,
    pub failed_gpus: usize,
    pub milestones: Vec<Row>,
    /// Time in which at least one step of the phase was running, per boot.
    pub phases: Vec<Row>,
    /// Durations of all single steps that ended.
    pub steps: Vec<Row>,
    /// Failures by reason, most frequent first.
    pub failures: Vec<Failures>,
    /// Largest unexplained share of a boot, in percent.
    pub most_unexplained_percent: f64,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Row {
    pub name: String,
    #[serde(flatten)]
    pub summary: Summary,
}

/// A reason of failures.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Failures {
    pub reason: String,
    pub count: u64,
    /// Number of boots with it.
    pub boots: u64,
}

/// Sums of boots, added one by one.
#[derive(Debug, Default)]
pub struct Collected {
    stats: Stats,
    milestones: BTreeMap<String, Vec<i64>>,
    phases: BTreeMap<String, Vec<i64>>,
    steps: BTreeMap<String, Vec<i64>>,
    failures: BTreeMap<String, (u64, u64)>,
}

impl Collected {
    pub fn add(&mut self, boot: &Metrics) {
        self.stats.boots += 1;
        if boot.is_implausible() {
            self.stats.implausible += 1;
            return;
        }
        self.stats.settled += usize::from(boot.settled);
        self.stats.failed += usize::from(!boot.failures.is_empty());
        self.stats.gpus += boot.gpus;
        self.stats.failed_gpus += boot.failed_gpus;
        self.stats.most_unexplained_percent = self
            .stats
            .most_unexplained_percent
            .max(boot.unexplained_percent);
        for (name, at) in &boot.milestones {
            extend(&mut self.milestones, name, &[*at]);
        }
        for (name, took) in &boot.phases {
            extend(&mut self.phases, name, &[*took]);
        }
        for (name, each_ns) in &boot.durations {
            extend(&mut self.steps, name, each_ns);
        }
        let mut reasons: BTreeMap<&str, u64> = BTreeMap::new();
        boot.failures
            .iter()
            .for_each(|reason| *reasons.entry(reason).or_default() += 1);
        for (reason, count) in reasons {
            let full = self.failures.len() >= MAX_NAMES && !self.failures.contains_key(reason);
            let sum = self
                .failures
                .entry(if full { "(other reasons)" } else { reason }.to_string())
                .or_default();
            sum.0 += count;
            sum.1 += 1;
        }
    }

    /// Statistics: phases in the order of a boot, milestones by median, steps by duration.
    pub fn stats(self) -> Stats {
        let rows = |values: BTreeMap<String, Vec<i64>>| -> Vec<Row> {
            values
                .into_iter()
                .filter_map(|(name, values)| {
                    Some(Row {
                        name,
                        summary: Summary::of(&values)?,
                    })
                })
                .collect()
        };
        let mut milestones = rows(self.milestones);
        milestones.sort_by_key(|r| r.summary.median_ns);
        let mut steps = rows(self.steps);
        steps.sort_by(|a, b| (b.summary.median_ns, &a.name).cmp(&(a.summary.median_ns, &b.name)));
        let mut phases = rows(self.phases);
        phases.sort_by_key(|r| Phase::named(&r.name).unwrap_or(Phase::Other));
        let mut failures: Vec<Failures> = self
            .failures
            .into_iter()
            .map(|(reason, (count, boots))| Failures {
                reason,
                count,
                boots,
            })
            .collect();
        failures.sort_by(|a, b| (b.boots, b.count, &a.reason).cmp(&(a.boots, a.count, &b.reason)));
        Stats {
            milestones,
            phases,
            steps,
            failures,
            ..self.stats
        }
    }
}

fn extend(values: &mut BTreeMap<String, Vec<i64>>, name: &str, more: &[i64]) {
    if values.len() < MAX_NAMES || values.contains_key(name) {
        values
            .entry(name.to_string())
            .or_default()
            .extend_from_slice(more);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_impossible_boot_is_counted_and_in_no_sum() {
        let boot = |at_ns: i64| Metrics {
            milestones: BTreeMap::from([("settled".to_string(), at_ns)]),
            gpus: 8,
            settled: true,
            ..Metrics::default()
        };
        let mut collected = Collected::default();
        collected.add(&boot(10_000_000_000));
        collected.add(&boot(i64::MAX));
        let stats = collected.stats();
        assert_eq!((stats.boots, stats.implausible, stats.gpus), (2, 1, 8));
        let p95_ns: Vec<i64> = stats
            .milestones
            .iter()
            .map(|row| row.summary.p95_ns)
            .collect();
        assert_eq!(p95_ns, [10_000_000_000]);
    }
}
