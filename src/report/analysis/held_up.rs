//! Steps that were long because a vCPU was gone: a vCPU that writes to a GPU's `enable` is in the
//! host until the host has mapped the BARs, and runs nothing.
//!
//! Any wait for every CPU includes that vCPU: making a container (its cgroup and its mounts wait
//! for an RCU grace period), a module's load (it changes the protection of memory on all CPUs), and
//! the agent's start if an interrupt of vsock went to that vCPU. The records cannot show that a
//! step waited; they show how much of it coincided with an enabling.

use crate::boot::intervals::{Intervals, length};
use crate::boot::timeline::{Step, Timeline, Window};
use kata_gpu_wire::catalogue::derived;
use kata_gpu_wire::names;
use serde::Serialize;

/// Steps that wait for every CPU.
const WAIT_FOR_EVERY_CPU: [&str; 3] = [
    derived::CONTAINER_CREATE,
    derived::AGENT_START,
    names::MODULE_LOAD,
];
/// Shortest enabling that counts: shorter ones have no visible effect.
const LEAST_NS: u64 = 100_000_000;
/// Bound of the error of the agent's lines: a held-up step ends after the enabling.
const SLACK_NS: i64 = 20_000_000;
/// Limit of steps reported, the longest first.
const MAX_STEPS: usize = 16;

/// A step of which at least half coincided with enablings that ended before it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct HeldUp {
    pub step: String,
    /// Time in the window.
    pub took_ns: u64,
    /// Time during which an enabling ran.
    pub overlap_ns: u64,
    /// Indices of the GPUs enabled meanwhile.
    pub gpus: Vec<u64>,
}

/// The steps of a window that enablings held up.
pub fn held_up(timeline: &Timeline, window: &Window) -> Vec<HeldUp> {
    let enablings: Vec<&Step> = timeline
        .steps
        .iter()
        .filter(|step| step.name == names::GPU_ENABLE)
        .collect();
    let candidates = timeline
        .steps
        .iter()
        .filter(|step| WAIT_FOR_EVERY_CPU.contains(&step.name.as_str()));
    let mut found: Vec<HeldUp> = candidates
        .filter_map(|step| overlapping(step, &enablings, window))
        .collect();
    found.sort_by(|a, b| (b.overlap_ns, &a.step).cmp(&(a.overlap_ns, &b.step)));
    found.truncate(MAX_STEPS);
    found
}

fn overlapping(step: &Step, enablings: &[&Step], window: &Window) -> Option<HeldUp> {
    let (begin, end) = window.clip(step.begin_ns, step.end_ns);
    let cut = |enabling: &&&Step| (enabling.begin_ns.max(begin), enabling.end_ns.min(end));
    // A step that ended while a vCPU was still gone did not wait for it.
    let waited_for = |enabling: &&&Step| enabling.end_ns <= step.end_ns.saturating_add(SLACK_NS);
    let overlaps = |enabling: &&&Step| length(cut(enabling).0, cut(enabling).1) > 0;
    let at_once: Vec<_> = enablings
        .iter()
        .filter(overlaps)
        .filter(waited_for)
        .collect();
    let overlap_ns = Intervals::union(at_once.iter().map(cut).collect()).total_ns();
    let took_ns = length(begin, end);
    let mut gpus: Vec<u64> = at_once
        .iter()
        .filter_map(|enabling| enabling.gpu?.index)
        .collect();
    gpus.sort_unstable();
    gpus.dedup();
    (overlap_ns >= LEAST_NS && overlap_ns >= took_ns / 2).then(|| HeldUp {
        step: step.title(),
        took_ns,
        overlap_ns,
        gpus,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::boot::story::RawStep;
    use crate::for_tests;

    const MS: i64 = 1_000_000;

    fn step(name: &str, detail: &str, begin_ms: i64, end_ms: i64) -> RawStep {
        RawStep {
            detail: detail.into(),
            ..for_tests::step(name, begin_ms * MS, end_ms * MS)
        }
    }

    fn enabling(index: u64, begin_ms: i64, end_ms: i64) -> RawStep {
        for_tests::of_gpu(index, step(names::GPU_ENABLE, "", begin_ms, end_ms))
    }

    fn found(steps: Vec<RawStep>) -> Vec<(String, u64, u64, Vec<u64>)> {
        let timeline = for_tests::timeline(steps, 0, 20_000 * MS, &[]);
        let ms = |ns: u64| ns / 1_000_000;
        let window = timeline.window(None, None).unwrap();
        held_up(&timeline, &window)
            .into_iter()
            .map(|h| (h.step, ms(h.took_ns), ms(h.overlap_ns), h.gpus))
            .collect()
    }

    #[test]
    fn a_container_that_took_as_long_as_an_enabling_names_its_gpu() {
        let steps = vec![
            enabling(2, 1000, 4300),
            enabling(3, 4350, 7600),
            step(derived::CONTAINER_CREATE, "all", 1100, 4400),
            // This container was made while GPU 3 was being enabled, so it waited for nothing.
            step(derived::CONTAINER_CREATE, "quick", 4400, 4600),
            // Not reported: a step that waits for no CPU, and one that an enabling only touched.
            step(names::CDI_PUBLISH, "", 1100, 4400),
            step(derived::CONTAINER_CREATE, "late", 7500, 9000),
        ];
        assert_eq!(
            found(steps),
            [("container.create all".to_string(), 3300, 3200, vec![2])]
        );
    }

    #[test]
    fn on_a_host_that_enables_in_no_time_nothing_is_held_up() {
        let steps = vec![
            enabling(0, 100, 103),
            enabling(1, 103, 106),
            step(derived::CONTAINER_CREATE, "all", 99, 108),
        ];
        assert_eq!(found(steps), []);
    }

    #[test]
    fn what_lies_outside_the_window_does_not_count() {
        let steps = vec![
            enabling(0, 19_000, 23_000),
            step(names::MODULE_LOAD, "nvidia", 19_000, 23_000),
        ];
        assert_eq!(
            found(steps),
            [("module.load nvidia".to_string(), 1000, 1000, vec![0])]
        );
    }
}
