//! Owners of a boot's time: by owner or phase, and by step.
//!
//! A step's own time is its interval without the steps inside it, cut to the window. For
//! overlapping steps, `sum_ns` counts each and `wall_ns` their union, which never exceeds the
//! window. Waiting is listed apart: the awaited work is accounted for where it happened.

use super::held_up::{HeldUp, held_up};
use crate::boot::intervals::percent;
use crate::boot::intervals::{Intervals, sum};
use crate::boot::timeline::{Step, Timeline, Window};
use crate::data::units::is_zero;
use serde::Serialize;
use std::cmp::Reverse;
use std::collections::BTreeMap;

/// Meaning of the first column.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum By {
    Owner,
    Phase,
}

/// Steps of one owner or phase.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Group {
    pub name: &'static str,
    #[serde(flatten)]
    pub time: Time,
    /// Steps, the longest first.
    pub steps: Vec<StepRow>,
}

/// All steps of one name (and module).
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct StepRow {
    pub name: String,
    pub phase: &'static str,
    #[serde(flatten)]
    pub time: Time,
    /// Number of steps that had not ended.
    #[serde(skip_serializing_if = "is_zero")]
    pub open: u64,
    #[serde(skip_serializing_if = "is_zero")]
    pub failed: u64,
    /// Whether the step is computed: no record has this name.
    pub derived: bool,
}

/// Time of some steps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Time {
    pub count: u64,
    pub sum_ns: u64,
    /// Time of the longest single step.
    pub longest_ns: u64,
    /// Time in which at least one of the steps was running.
    pub wall_ns: u64,
    /// Share of `wall_ns` in the window, in percent.
    pub share: f64,
}

/// The account of one window.
#[derive(Clone, Debug, Serialize)]
pub struct Blame {
    pub wall_ns: u64,
    pub groups: Vec<Group>,
    /// Waiting, which is explained by the steps waited for.
    pub waiting: Vec<StepRow>,
    /// Steps that the enabling of GPUs held up.
    pub held_up: Vec<HeldUp>,
}

#[derive(Default)]
pub struct Sum {
    pieces: Vec<(i64, i64)>,
    time: Time,
    open: u64,
    failed: u64,
    derived: bool,
    phase: &'static str,
}

/// Sums by step name.
type Sums = BTreeMap<String, Sum>;

impl Sum {
    pub fn add(&mut self, step: &Step, own: &[(i64, i64)]) {
        let took = sum(own);
        self.time.count += 1;
        self.time.sum_ns = self.time.sum_ns.saturating_add(took);
        self.time.longest_ns = self.time.longest_ns.max(took);
        self.pieces.extend_from_slice(own);
        self.open += u64::from(step.open);
        self.failed += u64::from(step.failed);
        self.derived |= step.derived;
        self.phase = step.row.phase.name();
    }

    pub fn time(&mut self, wall_ns: u64) -> Time {
        let union = Intervals::union(std::mem::take(&mut self.pieces)).total_ns();
        Time {
            wall_ns: union,
            share: percent(union, wall_ns),
            ..self.time
        }
    }

    fn row(mut self, name: String, wall_ns: u64) -> StepRow {
        StepRow {
            name,
            phase: self.phase,
            time: self.time(wall_ns),
            open: self.open,
            failed: self.failed,
            derived: self.derived,
        }
    }
}

/// Own time of every step inside the window: its interval without its children's.
pub fn own_times(timeline: &Timeline, window: &Window) -> Vec<Vec<(i64, i64)>> {
    let mut inside: Vec<Vec<(i64, i64)>> = vec![Vec::new(); timeline.steps.len()];
    for step in timeline.steps.iter().filter(|s| !s.row.waiting) {
        if let Some(children) = step.parent.and_then(|p| inside.get_mut(p)) {
            children.push((step.begin_ns, step.end_ns));
        }
    }
    let own = timeline.steps.iter().zip(inside).map(|(step, children)| {
        let (begin, end) = window.clip(step.begin_ns, step.end_ns);
        if begin < end {
            Intervals::union(children).missing_in(begin, end)
        } else {
            Vec::new()
        }
    });
    own.collect()
}

/// Sums all steps of a window.
pub fn blame(timeline: &Timeline, window: &Window, by: By) -> Blame {
    let wall_ns = window.wall_ns();
    // Keyed by place in the order of owners or phases.
    let mut groups: BTreeMap<(usize, &'static str), (Sum, Sums)> = BTreeMap::new();
    let mut waiting = Sums::new();
    for (step, own) in timeline.steps.iter().zip(own_times(timeline, window)) {
        let (begin, end) = window.clip(step.begin_ns, step.end_ns);
        // Outside of the window.
        if end < begin {
            continue;
        }
        if step.row.waiting {
            waiting.entry(step.title()).or_default().add(step, &own);
            continue;
        }
        let key = match by {
            By::Owner => (step.row.owner as usize, step.row.owner.name()),
            By::Phase => (step.row.phase as usize, step.row.phase.name()),
        };
        let (sum, steps) = groups.entry(key).or_default();
        sum.add(step, &own);
        steps.entry(step.kind()).or_default().add(step, &own);
    }
    let rows = |sums: Sums| {
        let mut rows: Vec<StepRow> = sums
            .into_iter()
            .map(|(name, sum)| sum.row(name, wall_ns))
            .collect();
        rows.sort_by(|a, b| (b.time.wall_ns, &a.name).cmp(&(a.time.wall_ns, &b.name)));
        rows
    };
    let mut groups: Vec<Group> = groups
        .into_iter()
        .map(|((_, name), (mut sum, steps))| Group {
            name,
            time: sum.time(wall_ns),
            steps: rows(steps),
        })
        .collect();
    // Phases stay in the order of a boot.
    if by == By::Owner {
        groups.sort_by_key(|group| (Reverse(group.time.wall_ns), group.name));
    }
    Blame {
        wall_ns,
        groups,
        waiting: rows(waiting),
        held_up: held_up(timeline, window),
    }
}
