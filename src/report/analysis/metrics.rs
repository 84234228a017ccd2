//! A boot as comparable numbers: times of milestones, durations of phases and steps, failures.

use super::blame::{By, blame};
use crate::boot::cause::End;
use crate::boot::coverage::coverage;
use crate::boot::intervals::Intervals;
use crate::boot::model::Boot;
use crate::data::boot_file::BootFile;
use crate::data::text::{printable, printable_start};
use kata_gpu_wire::failure::{Diagnosis, Reason, of_guest, of_sandbox};
use kata_gpu_wire::names;
use std::collections::BTreeMap;

/// Limit of different step names in one boot; further ones count as one name. The format has some
/// twenty.
const MAX_NAMES: usize = 64;
/// Limit of a reason, in bytes: enough for every reason of the init.
const MAX_REASON: usize = 100;
/// Limit of failures kept of one boot.
const MAX_FAILURES: usize = 64;
/// Limit of single durations of one step name in one boot: several times the GPUs of the largest
/// machines.
const MAX_DURATIONS: usize = 1024;
/// Common name of all names after the first [`MAX_NAMES`].
const OTHERS: &str = "(others)";

/// Longest time of a milestone, a phase or a step: a week. The slowest known boots take ten
/// minutes; a hanging boot lasts until the end of its VM.
pub const MAX_NS: i64 = 7 * 86_400_000_000_000;
/// Most GPUs of a guest: four times as many as the largest machines have.
pub const MAX_GPUS: usize = 64;
/// Most lost records of a boot: fifty times as many as the collector stores.
const MAX_LOST: u64 = 10_000_000;

/// Comparable numbers of one boot.
#[derive(Clone, Debug, Default)]
pub struct Metrics {
    /// Boot clock, ns.
    pub milestones: BTreeMap<String, i64>,
    /// Time in which at least one step of the phase was running.
    pub phases: BTreeMap<String, i64>,
    /// Time in which at least one of the steps of a name was running, with the steps inside them.
    pub steps: BTreeMap<String, i64>,
    /// Durations of the steps of a name that ended.
    pub durations: BTreeMap<String, Vec<i64>>,
    pub unexplained_percent: f64,
    pub gpus: usize,
    pub usable_gpus: usize,
    pub failed_gpus: usize,
    pub settled: bool,
    pub powered_off: bool,
    /// Whether the agent's lines are known: a missing milestone of the agent was then not reached.
    pub agent_known: bool,
    /// Failures as `step: reason`: a reason of the catalogue, or words that it does not know.
    pub failures: Vec<String>,
    /// Records that were never received.
    pub lost: u64,
    /// Version and build id of the init, as reported by the guest.
    pub version: Option<String>,
    pub build: Option<String>,
    /// Whether the file exceeds a limit, and was read in part.
    pub too_large: bool,
}

impl Metrics {
    /// Whether the boot has a number that is impossible, or lacks so many records that its numbers
    /// are meaningless: one such number would dominate every sum.
    pub fn is_implausible(&self) -> bool {
        let times = self
            .milestones
            .values()
            .chain(self.phases.values())
            .chain(self.durations.values().flatten());
        self.too_large
            || self.lost > MAX_LOST
            || self.gpus > MAX_GPUS
            || !times.into_iter().all(|ns| (-MAX_NS..=MAX_NS).contains(ns))
    }
}

/// Label of failures that no table has.
pub const OTHER: &str = "other";
/// Failures without a row in the catalogue: the text before the failure's colon, and its label.
const WITHOUT_ROW: [(&str, &str); 3] = [
    ("container", "container"),
    ("power-off", "power-off"),
    ("not settled", "not-settled"),
];

/// All labels of failures.
pub fn failure_labels() -> impl Iterator<Item = &'static str> {
    let without_row = WITHOUT_ROW.iter().map(|(_, label)| *label);
    let rows = Reason::ALL.into_iter().map(Reason::name);
    rows.chain(without_row).chain([OTHER])
}

/// Label of one of [`Metrics::failures`], never a guest's text: `needs-reset` of `init:
/// needs-reset`.
pub fn failure_label(failure: &str) -> &'static str {
    let (step, reason) = failure.split_once(": ").unwrap_or(("", failure));
    let without_row = || WITHOUT_ROW.iter().find(|(known, _)| *known == step);
    Reason::named(reason)
        .map(Reason::name)
        .or_else(|| without_row().map(|(_, label)| *label))
        .unwrap_or(OTHER)
}

fn signed(ns: u64) -> i64 {
    i64::try_from(ns).unwrap_or(i64::MAX)
}

/// Numbers of a boot. A boot without two milestones has only failures.
pub fn metrics(boot: &Boot, file: &BootFile) -> Metrics {
    let timeline = &boot.timeline;
    let mut metrics = Metrics {
        milestones: timeline
            .milestones
            .iter()
            .map(|m| (m.name.clone(), m.at_ns))
            .collect(),
        gpus: boot.gpus.len(),
        usable_gpus: boot.usable_gpus(),
        failed_gpus: boot.failed_gpus().count(),
        settled: boot.settled_ns.is_some(),
        powered_off: boot.power_off.is_some(),
        lost: boot
            .lost
            .records
            .saturating_add(boot.lost.reported_by_guest),
        too_large: boot.too_large.is_some(),
        agent_known: !boot.agent.is_empty(),
        failures: failures(boot, file),
        version: boot.version.clone(),
        build: boot.build.clone(),
        ..Metrics::default()
    };
    // The end of the record is no moment of the boot.
    metrics.milestones.remove(crate::boot::draft::LAST_RECORD);
    let Ok(window) = timeline.window(None, None) else {
        return metrics;
    };
    metrics.unexplained_percent = coverage(timeline, &window).unexplained_share;
    for group in blame(timeline, &window, By::Phase).groups {
        metrics
            .phases
            .insert(group.name.to_string(), signed(group.time.wall_ns));
    }
    let mut whole: BTreeMap<String, Vec<(i64, i64)>> = BTreeMap::new();
    for step in timeline.steps.iter().filter(|s| !s.row.waiting) {
        let kind = step.kind();
        let is_known = whole.contains_key(&kind);
        let name = match is_known || whole.len() < MAX_NAMES {
            true => kind,
            false => OTHERS.to_string(),
        };
        let all = metrics.durations.entry(name.clone()).or_default();
        if !step.open && all.len() < MAX_DURATIONS {
            all.push(signed(step.took_ns()));
        }
        let (begin, end) = window.clip(step.begin_ns, step.end_ns);
        if begin < end {
            whole.entry(name).or_default().push((begin, end));
        }
    }
    let total = |pieces| signed(Intervals::union(pieces).total_ns());
    let steps = whole.into_iter();
    metrics.steps = steps.map(|(name, pieces)| (name, total(pieces))).collect();
    metrics
}

fn failures(boot: &Boot, file: &BootFile) -> Vec<String> {
    let text = |text: &str| printable_start(&text, MAX_REASON);
    let mut out = Vec::new();
    for record in file
        .records
        .iter()
        .filter(|r| r.name == names::GPU_FAILED)
        .take(MAX_FAILURES)
    {
        let field = |key: &str| record.fields.text(key);
        let reason = field("reason")
            .or(record.error.as_deref())
            .unwrap_or("no reason given");
        out.push(format!(
            "{}: {}",
            text(field("step").unwrap_or("?")),
            text(reason)
        ));
    }
    let row_or_words = |found: Option<Diagnosis>, words: &str| {
        found.map_or_else(|| text(words), |found| found.reason.name().to_string())
    };
    for container in boot.containers.iter().take(MAX_FAILURES) {
        let error = container.error.as_deref();
        out.extend(
            error.map(|error| format!("container: {}", row_or_words(of_sandbox(error), error))),
        );
        if container.pending {
            let devices = text(&container.devices);
            out.push(format!("container: still waits for {devices}"));
        }
    }
    // As the first lines of `show`; of a power-off by the init, its own words say more.
    let is_warning = |end: &End| end.cause.code.as_deref() == Some(Reason::NoDriverFiles.name());
    let is_said = |end: &&End| end.of_sandbox || (boot.power_off.is_none() && !is_warning(end));
    for end in boot.ends.iter().filter(is_said).take(MAX_FAILURES) {
        let who = if end.of_sandbox { "sandbox" } else { "guest" };
        let code = end.cause.code.as_deref().unwrap_or("no reason given");
        out.push(format!("{who}: {}", text(code)));
    }
    let ended = boot.power_off.as_deref();
    out.extend(ended.map(|why| format!("power-off: {}", row_or_words(of_guest(why), why))));
    out.extend(
        boot.too_large
            .map(|_| "too large: it was read in part".to_string()),
    );
    if boot.settled_ns.is_none() && !boot.gpus.is_empty() {
        // The boot hangs in the innermost open step.
        let open = boot
            .timeline
            .steps
            .iter()
            .rev()
            .find(|s| s.open && !s.row.waiting);
        out.push(format!(
            "not settled: {}",
            open.map_or("no step was open".to_string(), |s| format!(
                "still in {}",
                printable(&s.name)
            ))
        ));
    }
    out.truncate(MAX_FAILURES);
    out
}
