//! One boot as numbers that can be compared with those of others: when each milestone was, how long
//! each phase and step lasted, what failed.

use super::blame::{By, blame};
use crate::events::names;
use crate::host::boot::coverage::coverage;
use crate::host::boot::model::Boot;
use crate::host::boot::timeline::Timeline;
use crate::host::data::boot_file::BootFile;
use crate::host::data::record::Field;
use crate::host::data::text::{printable, printable_start};
use std::collections::BTreeMap;

/// Different step names of one boot that are told apart; the rest is one. The format has some
/// twenty.
const MAX_NAMES: usize = 64;
/// Longest reason, in bytes: enough for every reason that the init gives.
const MAX_REASON: usize = 100;
/// Failures of one boot that are kept.
const MAX_FAILURES: usize = 64;
/// Single durations of one step name that are kept of one boot: as many as GPUs in the largest
/// machines, several times over.
const MAX_DURATIONS: usize = 1024;
/// What all names after the first [`MAX_NAMES`] are counted as.
const OTHERS: &str = "(others)";

/// The numbers of one boot.
#[derive(Clone, Debug, Default)]
pub struct Metrics {
    /// Boot clock, ns.
    pub milestones: BTreeMap<String, i64>,
    /// Time in which at least one step of the phase was running.
    pub phases: BTreeMap<&'static str, i64>,
    pub steps: BTreeMap<String, StepMetrics>,
    pub unexplained_percent: f64,
    pub gpus: usize,
    pub failed_gpus: usize,
    pub settled: bool,
    /// The agent's lines were there: a milestone of the agent that is missing was not reached.
    pub agent_known: bool,
    /// What failed, as `step: reason`.
    pub failures: Vec<String>,
}

/// All steps of one name.
#[derive(Clone, Debug, Default)]
pub struct StepMetrics {
    /// At least one was running.
    pub wall_ns: i64,
    /// Of each that has ended.
    pub each_ns: Vec<i64>,
}

fn signed(ns: u64) -> i64 {
    i64::try_from(ns).unwrap_or(i64::MAX)
}

/// The numbers of a boot. One that has no two milestones has only what failed.
pub fn metrics(timeline: &Timeline, boot: &Boot, file: &BootFile, agent_known: bool) -> Metrics {
    let mut metrics = Metrics {
        milestones: timeline.milestones.iter().map(|m| (m.name.clone(), m.at_ns)).collect(),
        gpus: boot.gpus.len(),
        failed_gpus: boot.failed_gpus().count(),
        settled: boot.settled_ns.is_some(),
        agent_known,
        failures: failures(boot, file, timeline),
        ..Metrics::default()
    };
    // Where the record ends is no moment of the boot.
    metrics.milestones.remove(crate::host::boot::draft::LAST_RECORD);
    let Ok(window) = timeline.window(None, None) else { return metrics };
    metrics.unexplained_percent = coverage(timeline, &window).unexplained_share;
    for group in blame(timeline, &window, By::Phase).groups {
        metrics.phases.insert(group.name, signed(group.time.wall_ns));
        for row in group.steps {
            let name = bounded(&metrics.steps, row.name);
            let step = metrics.steps.entry(name).or_default();
            step.wall_ns = step.wall_ns.saturating_add(signed(row.time.wall_ns));
        }
    }
    for step in timeline.steps.iter().filter(|s| !s.open && !s.row.waiting) {
        let title = if step.name == names::MODULE_LOAD { step.title() } else { step.name.clone() };
        let name = if metrics.steps.contains_key(&title) { title } else { OTHERS.to_string() };
        if let Some(metric) = metrics.steps.get_mut(&name)
            && metric.each_ns.len() < MAX_DURATIONS
        {
            metric.each_ns.push(signed(step.took_ns()));
        }
    }
    metrics
}

fn bounded(steps: &BTreeMap<String, StepMetrics>, name: String) -> String {
    if steps.len() < MAX_NAMES || steps.contains_key(&name) { name } else { OTHERS.to_string() }
}

fn failures(boot: &Boot, file: &BootFile, timeline: &Timeline) -> Vec<String> {
    let text = |text: &str| printable_start(text.as_bytes(), MAX_REASON);
    let mut out = Vec::new();
    for record in file.records.iter().filter(|r| r.name == names::GPU_FAILED).take(MAX_FAILURES) {
        let field = |key: &str| record.fields.get(key).and_then(Field::as_str);
        let reason = field("reason").or(record.error.as_deref()).unwrap_or("no reason given");
        out.push(format!("{}: {}", text(field("step").unwrap_or("?")), text(reason)));
    }
    for container in boot.containers.iter().take(MAX_FAILURES) {
        out.extend(container.error.as_ref().map(|error| format!("container: {}", text(error))));
    }
    out.extend(boot.power_off.as_ref().map(|why| format!("power-off: {}", text(why))));
    out.extend(boot.too_large.map(|_| "too large: not all of it was looked at".to_string()));
    if boot.settled_ns.is_none() && !boot.gpus.is_empty() {
        // What it hangs in is the innermost step that has not ended.
        let open = timeline.steps.iter().rev().find(|s| s.open && !s.row.waiting);
        out.push(format!("not settled: {}", open.map_or("no step was open".to_string(), |s| format!("still in {}", printable(&s.name)))));
    }
    out.truncate(MAX_FAILURES);
    out
}
