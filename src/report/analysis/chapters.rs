//! A boot as chapters: the phases of a window by their beginning, the steps of each, and how much
//! sooner the window would end without them.
//!
//! Steps of one GPU are one line, other steps of one name are one line. What the host's trace saw
//! inside a step stands under the step's line, as its cause.

use super::blame::{Time, own_times};
use super::critical_path::gain;
use crate::boot::host_trace::HostTrace;
use crate::boot::intervals::{Intervals, percent, sum};
use crate::boot::model::Boot;
use crate::boot::timeline::{Step, Timeline, Window};
use crate::data::text::printable;
use crate::data::trace_file::Traced;
use crate::data::units::is_zero;
use kata_gpu_wire::catalogue::Phase;
use kata_gpu_wire::pci_address::PciAddress;
use serde::Serialize;
use std::collections::BTreeMap;

/// Limit of causes under one line, the longest.
const MAX_CAUSES: usize = 16;

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
    /// The host's steps meanwhile, the longest first.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub causes: Vec<Cause>,
}

/// Steps of one name in the host's trace, of one BAR where they map BARs.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Cause {
    pub step: String,
    /// The host's address of the passed-through function.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub function: Option<PciAddress>,
    /// Thread of the VMM that did it.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub thread: String,
    pub count: u64,
    pub took_ns: u64,
    #[serde(skip_serializing_if = "is_zero")]
    pub bytes: u64,
    /// Calls of the function that pins pages; faults.
    #[serde(skip_serializing_if = "is_zero")]
    pub calls: u64,
    /// Pages a call by powers of ten.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub pages_a_call: BTreeMap<u64, u64>,
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
    causes: Vec<Cause>,
}

/// A step of a phase, with its own time.
type Timed<'a> = (usize, &'a Step, Vec<(i64, i64)>);

/// The chapters of a window.
pub fn chapters(boot: &Boot, window: &Window) -> Vec<Chapter> {
    let timeline = &boot.timeline;
    let mut phases: BTreeMap<usize, (Phase, Vec<Timed>)> = BTreeMap::new();
    for (i, (step, own)) in timeline
        .steps
        .iter()
        .zip(own_times(timeline, window))
        .enumerate()
    {
        let (begin, end) = window.clip(step.begin_ns, step.end_ns);
        if begin < end {
            phases
                .entry(step.row.phase as usize)
                .or_insert_with(|| (step.row.phase, Vec::new()))
                .1
                .push((i, step, own));
        }
    }
    let chapter = |(phase, steps): (Phase, Vec<Timed>)| {
        let working = || steps.iter().filter(|(_, step, _)| !step.row.waiting);
        let own: Vec<(i64, i64)> = working()
            .flat_map(|(_, _, own)| own.iter().copied())
            .collect();
        let sum_ns = sum(&own);
        let wall_ns = Intervals::union(own).total_ns();
        let indices: Vec<usize> = working().map(|(i, _, _)| *i).collect();
        Chapter {
            phase: phase.name(),
            at_ns: steps
                .iter()
                .map(|(_, step, _)| window.clip(step.begin_ns, step.end_ns).0)
                .min()
                .unwrap_or_default(),
            time: Time {
                count: indices.len() as u64,
                sum_ns,
                longest_ns: working().map(|(_, _, own)| sum(own)).max().unwrap_or(0),
                wall_ns,
                share: percent(wall_ns, window.wall_ns()),
            },
            sooner_ns: gain(timeline, window, &indices).0,
            lines: lines(timeline, &steps, boot.host.as_deref()),
        }
    };
    let mut chapters: Vec<Chapter> = phases.into_values().map(chapter).collect();
    // Stable: phases that begin at once stay in the order of a boot.
    chapters.sort_by_key(|chapter| chapter.at_ns);
    chapters
}

/// The lines of a phase. A step of the trace inside a step of the same phase is part of that line.
fn lines(timeline: &Timeline, steps: &[Timed], host: Option<&HostTrace>) -> Vec<Line> {
    let mut drafts: BTreeMap<Of, Draft> = BTreeMap::new();
    for (_, step, own) in steps {
        let around = step
            .parent
            .filter(|_| step.traced.is_some())
            .and_then(|parent| timeline.steps.get(parent));
        let main = around
            .filter(|around| around.row.phase == step.row.phase)
            .unwrap_or(step);
        let of = match main.gpu.and_then(|gpu| gpu.index) {
            Some(index) => Of::Gpu(index),
            None => Of::Name(&main.name, &main.detail),
        };
        let draft = drafts.entry(of).or_default();
        draft.pieces.extend_from_slice(own);
        let of_name = draft.by_name.entry(&main.name).or_default();
        *of_name = of_name.saturating_add(sum(own));
        draft.count += u64::from(std::ptr::eq(main, *step));
        draft.failed |= step.failed;
        draft.open |= step.open;
        draft.waiting |= step.row.waiting;
        if let Some(seen) = step.traced.and_then(|at| host?.steps.get(at)) {
            add_cause(&mut draft.causes, step.title(), &seen.traced);
        }
    }
    let mut lines: Vec<Line> = drafts
        .into_iter()
        .map(|(of, draft)| line(of, draft))
        .collect();
    lines.sort_by_key(|line| {
        (
            line.gpu.is_none(),
            line.gpu,
            std::cmp::Reverse(line.took_ns),
        )
    });
    lines
}

fn add_cause(causes: &mut Vec<Cause>, step: String, traced: &Traced) {
    let new = Cause {
        step,
        function: traced.function,
        thread: printable(&traced.thread),
        ..Cause::default()
    };
    let same =
        |c: &Cause| (&c.step, c.function, &c.thread) == (&new.step, new.function, &new.thread);
    let at = causes.iter().position(same).unwrap_or_else(|| {
        causes.push(new);
        causes.len() - 1
    });
    let Some(cause) = causes.get_mut(at) else {
        return;
    };
    cause.count += 1;
    cause.took_ns = cause.took_ns.saturating_add(traced.took_ns);
    cause.bytes = cause.bytes.saturating_add(traced.bytes.unwrap_or(0));
    cause.calls = cause.calls.saturating_add(traced.calls.unwrap_or(0));
    for (class, calls) in &traced.pages_a_call {
        let sum = cause.pages_a_call.entry(*class).or_default();
        *sum = sum.saturating_add(*calls);
    }
}

fn line(of: Of, mut draft: Draft) -> Line {
    draft
        .causes
        .sort_by_key(|cause| std::cmp::Reverse(cause.took_ns));
    draft.causes.truncate(MAX_CAUSES);
    let mut names: Vec<(&str, u64)> = draft.by_name.into_iter().collect();
    names.sort_by_key(|(name, took)| (std::cmp::Reverse(*took), *name));
    let (gpu, steps) = match of {
        Of::Gpu(index) => (
            Some(index),
            names
                .into_iter()
                .map(|(name, _)| name.to_string())
                .collect(),
        ),
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
        causes: draft.causes,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::boot::gpu_name::GpuName;
    use crate::boot::host_trace::HostStep;
    use crate::boot::story;
    use crate::boot::story::{Milestone, Story};
    use kata_gpu_wire::catalogue::traced;
    use kata_gpu_wire::names;

    fn step(name: &str, begin_ns: i64, end_ns: i64) -> story::RawStep {
        story::RawStep {
            name: name.into(),
            begin_ns,
            end_ns: Some(end_ns),
            ..story::RawStep::default()
        }
    }

    fn of_gpu(index: u64, name: &str, begin_ns: i64, end_ns: i64) -> story::RawStep {
        let address = format!("0001:00:{index:02x}.0").parse().unwrap();
        story::RawStep {
            gpu: Some(GpuName {
                index: Some(index),
                address,
            }),
            ..step(name, begin_ns, end_ns)
        }
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
        let at = |name: &str, at_ns, after: &[usize]| Milestone {
            name: name.into(),
            at_ns,
            after: after.to_vec(),
            ..Milestone::default()
        };
        let story = Story {
            steps,
            milestones: vec![at("a", 10, &[]), at("b", 100, &[5])],
            ..Story::default()
        };
        let boot = Boot {
            timeline: Timeline::new(story),
            ..Boot::default()
        };
        let found = chapters(&boot, &boot.timeline.window(None, None).unwrap());
        let phases: Vec<_> = found
            .iter()
            .map(|c| (c.phase, c.at_ns, c.time.sum_ns, c.time.wall_ns))
            .collect();
        assert_eq!(
            phases,
            [
                ("kernel", 10, 10, 10),
                ("init", 20, 10, 10),
                ("host BAR mapping", 30, 40, 40),
                ("adapter initialisation", 55, 60, 45)
            ]
        );
        let lines: Vec<_> = found
            .iter()
            .flat_map(|c| &c.lines)
            .map(|l| (l.gpu, l.steps.join(" "), l.took_ns))
            .collect();
        let enable = |gpu, took| (Some(gpu), names::GPU_ENABLE.to_string(), took);
        let init = |gpu, took| (Some(gpu), names::GPU_INIT.to_string(), took);
        let (kernel, stage0) = (
            (None, "kernel".to_string(), 10),
            (None, names::STAGE0.to_string(), 10),
        );
        assert_eq!(
            lines,
            [
                kernel,
                stage0,
                enable(0, 20),
                enable(1, 20),
                init(0, 30),
                init(1, 30)
            ]
        );
    }

    #[test]
    fn what_the_trace_saw_inside_a_step_is_its_cause() {
        let traced = |at, name: &str, begin_ns, end_ns| story::RawStep {
            traced: Some(at),
            ..step(name, begin_ns, end_ns)
        };
        let steps = vec![
            of_gpu(0, names::GPU_ENABLE, 0, 100),
            story::RawStep {
                parent: Some(0),
                ..traced(0, traced::VMM_MAP_BAR, 10, 40)
            },
            story::RawStep {
                parent: Some(0),
                ..traced(1, traced::VMM_MAP_BAR, 40, 90)
            },
            // A step of another phase has a line of its own.
            story::RawStep {
                parent: Some(0),
                ..traced(2, traced::VMM_PIN, 90, 95)
            },
        ];
        let at = |name: &str, at_ns| Milestone {
            name: name.into(),
            at_ns,
            ..Milestone::default()
        };
        let story = Story {
            steps,
            milestones: vec![at("a", 0), at("b", 100)],
            ..Story::default()
        };
        let seen = |took_ns, pages| HostStep {
            traced: Traced {
                took_ns,
                bytes: Some(4096),
                calls: Some(2),
                pages_a_call: [(pages, 2)].into(),
                ..Traced::default()
            },
            ..HostStep::default()
        };
        let host = HostTrace {
            steps: vec![seen(30, 1), seen(50, 100), seen(5, 1)],
            ..HostTrace::default()
        };
        let boot = Boot {
            timeline: Timeline::new(story),
            host: Some(Box::new(host)),
            ..Boot::default()
        };
        let found = chapters(&boot, &boot.timeline.window(None, None).unwrap());
        let lines: Vec<_> = found
            .iter()
            .flat_map(|c| &c.lines)
            .map(|l| (l.steps.join(" "), l.count, l.took_ns, l.causes.len()))
            .collect();
        assert_eq!(
            lines,
            [
                (names::GPU_ENABLE.to_string(), 1, 95, 1),
                (traced::VMM_PIN.to_string(), 1, 5, 1)
            ]
        );
        let cause = &found[0].lines[0].causes[0];
        assert_eq!(
            (cause.count, cause.took_ns, cause.bytes, cause.calls),
            (2, 80, 8192, 4)
        );
        assert_eq!(cause.pages_a_call, [(1, 2), (100, 2)].into());
    }

    #[test]
    fn a_phase_beside_the_longest_chain_gains_nothing() {
        let mut fast = of_gpu(1, names::GPU_INIT, 0, 10);
        fast.name = "gpu.nodes".into();
        let steps = vec![of_gpu(0, names::GPU_INIT, 0, 100), fast];
        let at = |name: &str, at_ns, after: &[usize]| Milestone {
            name: name.into(),
            at_ns,
            after: after.to_vec(),
            ..Milestone::default()
        };
        let story = Story {
            steps,
            milestones: vec![at("a", 0, &[]), at("b", 100, &[0])],
            ..Story::default()
        };
        let boot = Boot {
            timeline: Timeline::new(story),
            ..Boot::default()
        };
        let found = chapters(&boot, &boot.timeline.window(None, None).unwrap());
        let gains: Vec<_> = found.iter().map(|c| (c.phase, c.sooner_ns)).collect();
        assert_eq!(
            gains,
            [("adapter initialisation", 100), ("CDI publication", 0)]
        );
    }
}
