//! A boot as chapters: the phases of a window by their beginning, the steps of each, and how much
//! sooner the window would end without them.
//!
//! Steps of one GPU are one line, other steps of one name are one line. What the host's trace saw
//! inside a step stands under the step's line, as its cause.

use super::blame::{Sum, Time, own_times};
use super::critical_path::gain;
use super::graph::Graph;
use crate::boot::host_trace::HostTrace;
use crate::boot::intervals::{Intervals, sum};
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
    /// The same if assumed orders hold as well: at most so much.
    pub sooner_at_most_ns: u64,
    /// Lines of GPUs in PCI order, then of other steps, the longest first.
    pub lines: Vec<Line>,
}

/// The steps of one GPU, or those of one name.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Line {
    /// Names of the steps, the longest first.
    pub steps: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gpu: Option<u64>,
    pub count: u64,
    /// Time in the window in which at least one of the steps was running, without the steps inside
    /// them.
    pub took_ns: u64,
    /// Time in which at least one of the steps was running at all.
    pub whole_ns: u64,
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
    whole: Vec<(i64, i64)>,
    by_name: BTreeMap<&'a str, u64>,
    line: Line,
}

/// A step of a phase, with its own time.
type Timed<'a> = (usize, &'a Step, Vec<(i64, i64)>);

/// The chapters of a window.
pub fn chapters(boot: &Boot, window: &Window) -> Vec<Chapter> {
    let timeline = &boot.timeline;
    let graph = Graph::new(timeline, window);
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
        let mut sum = Sum::default();
        working().for_each(|(_, step, own)| sum.add(step, own));
        let indices: Vec<usize> = working().map(|(i, _, _)| *i).collect();
        let (sooner_ns, sooner_at_most_ns) = gain(window, &graph, &indices);
        Chapter {
            phase: phase.name(),
            at_ns: steps
                .iter()
                .map(|(_, step, _)| window.clip(step.begin_ns, step.end_ns).0)
                .min()
                .unwrap_or_default(),
            time: sum.time(window.wall_ns()),
            sooner_ns,
            sooner_at_most_ns: sooner_at_most_ns.max(sooner_ns),
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
        draft.whole.push((step.begin_ns, step.end_ns));
        let of_name = draft.by_name.entry(&main.name).or_default();
        *of_name = of_name.saturating_add(sum(own));
        draft.line.count += u64::from(std::ptr::eq(main, *step));
        draft.line.failed |= step.failed;
        draft.line.open |= step.open;
        draft.line.waiting |= step.row.waiting;
        if let Some(seen) = step.traced.and_then(|at| host?.steps.get(at)) {
            add_cause(&mut draft.line.causes, step.title(), &seen.traced);
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

fn line(of: Of, draft: Draft) -> Line {
    let mut line = draft.line;
    line.causes
        .sort_by_key(|cause| std::cmp::Reverse(cause.took_ns));
    line.causes.truncate(MAX_CAUSES);
    let mut names: Vec<(&str, u64)> = draft.by_name.into_iter().collect();
    names.sort_by_key(|(name, took)| (std::cmp::Reverse(*took), *name));
    (line.gpu, line.steps) = match of {
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
    line.took_ns = Intervals::union(draft.pieces).total_ns();
    line.whole_ns = Intervals::union(draft.whole).total_ns();
    line
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::boot::host_trace::HostStep;
    use crate::boot::story::RawStep;
    use crate::for_tests::{of_gpu, step, timeline};
    use kata_gpu_wire::catalogue::traced;
    use kata_gpu_wire::names;

    fn found(timeline: Timeline, host: Option<HostTrace>) -> Vec<Chapter> {
        let boot = Boot {
            timeline,
            host: host.map(Box::new),
            ..Boot::default()
        };
        chapters(&boot, &boot.timeline.window(None, None).unwrap())
    }

    #[test]
    fn phases_stand_in_order_with_a_line_a_gpu() {
        let steps = vec![
            step("kernel", 0, 20),
            step(names::STAGE0, 20, 30),
            of_gpu(1, step(names::GPU_ENABLE, 50, 70)),
            of_gpu(0, step(names::GPU_ENABLE, 30, 50)),
            of_gpu(0, step(names::GPU_INIT, 55, 85)),
            of_gpu(1, step(names::GPU_INIT, 70, 100)),
        ];
        let found = found(timeline(steps, 10, 100, &[5]), None);
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
        let traced = |at, name: &str, begin_ns, end_ns| RawStep {
            traced: Some(at),
            parent: Some(0),
            ..step(name, begin_ns, end_ns)
        };
        let steps = vec![
            of_gpu(0, step(names::GPU_ENABLE, 0, 100)),
            traced(0, traced::VMM_MAP_BAR, 10, 40),
            traced(1, traced::VMM_MAP_BAR, 40, 90),
            // A step of another phase has a line of its own.
            traced(2, traced::VMM_PIN, 90, 95),
        ];
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
        let found = found(timeline(steps, 0, 100, &[]), Some(host));
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
        let steps = vec![
            of_gpu(0, step(names::GPU_INIT, 0, 100)),
            of_gpu(1, step("gpu.nodes", 0, 10)),
        ];
        let found = found(timeline(steps, 0, 100, &[0]), None);
        let gains: Vec<_> = found.iter().map(|c| (c.phase, c.sooner_ns)).collect();
        assert_eq!(
            gains,
            [("adapter initialisation", 100), ("CDI publication", 0)]
        );
    }
}
