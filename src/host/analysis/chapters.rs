//! A boot as chapters: the phases of a window by their beginning, the steps of each, and how much
//! sooner the window would end without them.
//!
//! Steps of one GPU are one line, other steps of one name are one line.

use super::blame::{Time, own_times};
use super::critical_path::gain;
use crate::events::catalogue::Phase;
use crate::host::boot::intervals::{Intervals, length, percent};
use crate::host::boot::timeline::{Step, Timeline, Window};
use serde::Serialize;
use std::collections::BTreeMap;

/// A phase.
#[derive(Clone, Debug, Serialize)]
pub struct Chapter {
    pub phase: &'static str,
    /// Beginning of the first step, in the window.
    pub at_ns: i64,
    #[serde(flatten)]
    pub time: Time,
    /// How much sooner the window would end, had these steps taken no time; by known orders.
    pub sooner_ns: u64,
    /// Lines of GPUs in PCI order, then of other steps, the longest first.
    pub lines: Vec<Line>,
}

/// The steps of one GPU, or those of one name.
#[derive(Clone, Debug, Serialize)]
pub struct Line {
    /// Names of the steps, the longest first.
    pub steps: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gpu: Option<u64>,
    pub count: u64,
    /// Time in which at least one of the steps was running.
    pub took_ns: u64,
    pub failed: bool,
    /// Whether a step had not ended.
    pub open: bool,
    /// Waits for what other steps do.
    pub waiting: bool,
}

/// Key of a line: GPUs first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Of<'a> {
    Gpu(u64),
    Name(&'a str, &'a str),
}

#[derive(Default)]
struct Draft<'a> {
    pieces: Vec<(i64, i64)>,
    by_name: BTreeMap<&'a str, u64>,
    count: u64,
    failed: bool,
    open: bool,
    waiting: bool,
}

/// The chapters of a window.
pub fn chapters(timeline: &Timeline, window: &Window) -> Vec<Chapter> {
    let mut phases: BTreeMap<usize, (Phase, Vec<(usize, &Step, Vec<(i64, i64)>)>)> = BTreeMap::new();
    for (i, (step, own)) in timeline.steps.iter().zip(own_times(timeline, window)).enumerate() {
        let (begin, end) = window.clip(step.begin_ns, step.end_ns);
        if begin < end {
            phases.entry(step.row.phase as usize).or_insert_with(|| (step.row.phase, Vec::new())).1.push((i, step, own));
        }
    }
    let chapter = |(phase, steps): (Phase, Vec<(usize, &Step, Vec<(i64, i64)>)>)| {
        let working = || steps.iter().filter(|(_, step, _)| !step.row.waiting);
        let own: Vec<(i64, i64)> = working().flat_map(|(_, _, own)| own.iter().copied()).collect();
        let took = |own: &[(i64, i64)]| own.iter().map(|(b, e)| length(*b, *e)).fold(0, u64::saturating_add);
        let sum_ns = took(&own);
        let wall_ns = Intervals::union(own).total_ns();
        let indices: Vec<usize> = working().map(|(i, _, _)| *i).collect();
        Chapter {
            phase: phase.name(),
            at_ns: steps.iter().map(|(_, step, _)| window.clip(step.begin_ns, step.end_ns).0).min().unwrap_or_default(),
            time: Time {
                count: indices.len() as u64,
                sum_ns,
                longest_ns: working().map(|(_, _, own)| took(own)).max().unwrap_or(0),
                wall_ns,
                share: percent(wall_ns, window.wall_ns()),
            },
            sooner_ns: gain(timeline, window, &indices).0,
            lines: lines(steps.iter().map(|(_, step, own)| (*step, own.as_slice()))),
        }
    };
    let mut chapters: Vec<Chapter> = phases.into_values().map(chapter).collect();
    // Stable: phases that begin at once stay in the order of a boot.
    chapters.sort_by_key(|chapter| chapter.at_ns);
    chapters
}

fn lines<'a>(steps: impl Iterator<Item = (&'a Step, &'a [(i64, i64)])>) -> Vec<Line> {
    let mut drafts: BTreeMap<Of, Draft> = BTreeMap::new();
    for (step, own) in steps {
        let of = match step.gpu.and_then(|gpu| gpu.index) {
            Some(index) => Of::Gpu(index),
            None => Of::Name(&step.name, &step.detail),
        };
        let draft = drafts.entry(of).or_default();
        draft.pieces.extend_from_slice(own);
        let took = own.iter().map(|(b, e)| length(*b, *e)).fold(0, u64::saturating_add);
        let of_name = draft.by_name.entry(&step.name).or_default();
        *of_name = of_name.saturating_add(took);
        draft.count += 1;
        draft.failed |= step.failed;
        draft.open |= step.open;
        draft.waiting |= step.row.waiting;
    }
    let mut lines: Vec<Line> = drafts.into_iter().map(|(of, draft)| line(of, draft)).collect();
    lines.sort_by_key(|line| (line.gpu.is_none(), line.gpu, std::cmp::Reverse(line.took_ns)));
    lines
}

fn line(of: Of, draft: Draft) -> Line {
    let mut names: Vec<(&str, u64)> = draft.by_name.into_iter().collect();
    names.sort_by_key(|(name, took)| (std::cmp::Reverse(*took), *name));
    let (gpu, steps) = match of {
        Of::Gpu(index) => (Some(index), names.into_iter().map(|(name, _)| name.to_string()).collect()),
        Of::Name(name, "") => (None, vec![name.to_string()]),
        Of::Name(name, detail) => (None, vec![format!("{name} {detail}")]),
    };
    Line {
        steps,
        gpu,
        count: draft.count,
        took_ns: Intervals::union(draft.pieces).total_ns(),
        failed: draft.failed,
        open: draft.open,
        waiting: draft.waiting,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::events::names;
    use crate::host::boot::gpu_name::GpuName;
    use crate::host::boot::story::{self, Milestone, Story};

    fn step(name: &str, begin_ns: i64, end_ns: i64) -> story::Step {
        story::Step { name: name.into(), begin_ns, end_ns: Some(end_ns), ..story::Step::default() }
    }

    fn of_gpu(index: u64, name: &str, begin_ns: i64, end_ns: i64) -> story::Step {
        let address = format!("0001:00:{index:02x}.0").parse().unwrap();
        story::Step { gpu: Some(GpuName { index: Some(index), address }), ..step(name, begin_ns, end_ns) }
    }

    #[test]
    fn phases_stand_in_order_with_a_line_a_gpu() {
        let steps = vec![
            step("kernel", 0, 20),
            step(names::STAGE0, 20, 30),
            of_gpu(1, names::GPU_ENABLE, 50, 70),
            of_gpu(0, names::GPU_ENABLE, 30, 50),
            of_gpu(0, names::GPU_INIT, 55, 85),
            of_gpu(1, names::GPU_INIT, 70, 100),
        ];
        let at = |name: &str, at_ns, after: &[usize]| Milestone { name: name.into(), at_ns, after: after.to_vec(), ..Milestone::default() };
        let story = Story { steps, milestones: vec![at("a", 10, &[]), at("b", 100, &[5])], ..Story::default() };
        let timeline = Timeline::new(story);
        let found = chapters(&timeline, &timeline.window(None, None).unwrap());
        let phases: Vec<_> = found.iter().map(|c| (c.phase, c.at_ns, c.time.sum_ns, c.time.wall_ns)).collect();
        assert_eq!(
            phases,
            [("kernel", 10, 10, 10), ("init", 20, 10, 10), ("host BAR mapping", 30, 40, 40), ("adapter initialisation", 55, 60, 45)]
        );
        let lines: Vec<_> = found.iter().flat_map(|c| &c.lines).map(|l| (l.gpu, l.steps.join(" "), l.took_ns)).collect();
        let enable = |gpu, took| (Some(gpu), names::GPU_ENABLE.to_string(), took);
        let init = |gpu, took| (Some(gpu), names::GPU_INIT.to_string(), took);
        let (kernel, stage0) = ((None, "kernel".to_string(), 10), (None, names::STAGE0.to_string(), 10));
        assert_eq!(lines, [kernel, stage0, enable(0, 20), enable(1, 20), init(0, 30), init(1, 30)]);
    }

    #[test]
    fn a_phase_beside_the_longest_chain_gains_nothing() {
        let mut fast = of_gpu(1, names::GPU_INIT, 0, 10);
        fast.name = "gpu.nodes".into();
        let steps = vec![of_gpu(0, names::GPU_INIT, 0, 100), fast];
        let at = |name: &str, at_ns, after: &[usize]| Milestone { name: name.into(), at_ns, after: after.to_vec(), ..Milestone::default() };
        let story = Story { steps, milestones: vec![at("a", 0, &[]), at("b", 100, &[0])], ..Story::default() };
        let timeline = Timeline::new(story);
        let found = chapters(&timeline, &timeline.window(None, None).unwrap());
        let gains: Vec<_> = found.iter().map(|c| (c.phase, c.sooner_ns)).collect();
        assert_eq!(gains, [("adapter initialisation", 100), ("CDI publication", 0)]);
    }
}
