//! The host's share by its own trace: the shim, the VMM, and the memory that was pinned and mapped.
//!
//! A step that lies in another one, the enabling of a GPU for example, is part of that step.

use super::draft::Draft;
use super::intervals::length;
use super::story::{Milestone, Step};
use crate::events::catalogue::{Form, row_of, traced};

/// Milestone of a traced boot: the shim's process began, or the VMM's where the shim is not known.
pub const PROCESSES_START: &str = "processes start";

/// Adds the steps of the trace, and a milestone where they begin. Call it after all others.
pub fn add(draft: &mut Draft) {
    let Some(host) = draft.boot.host.as_deref() else { return };
    let first = draft.story.steps.len();
    for (at, step) in host.steps.iter().enumerate() {
        let gpu = step.gpu.map(|address| draft.gpu_name(address));
        let parent = around(draft, step.begin_ns, step.end_ns(), step.error_ns);
        draft.story.steps.push(Step {
            name: step.traced.name.clone(),
            detail: step.traced.detail.clone(),
            gpu,
            begin_ns: step.begin_ns,
            end_ns: Some(step.end_ns()),
            parent,
            approximate: step.is_approximate(),
            traced: Some(at),
            ..Step::default()
        });
    }
    let started = |step: &&Step| [traced::SHIM, traced::VMM_START].contains(&step.name.as_str());
    let begin = draft.story.steps.iter().skip(first).filter(started).map(|step| step.begin_ns).min();
    let earliest = draft.story.milestones.iter().map(|m| m.at_ns).min();
    if let Some(at_ns) = begin.filter(|begin| earliest.is_none_or(|earliest| *begin < earliest)) {
        let approximate = host.steps.iter().any(|step| step.begin_ns == at_ns && step.is_approximate());
        draft.story.milestones.push(Milestone { name: PROCESSES_START.into(), at_ns, approximate, ..Milestone::default() });
    }
    draft.story.missing.extend(host.notes());
}

/// The shortest step that has this time in it, but for the error of the clocks. A step that only
/// waits has nothing in it.
fn around(draft: &Draft, begin_ns: i64, end_ns: i64, error_ns: u64) -> Option<usize> {
    let error = i64::try_from(error_ns).unwrap_or(i64::MAX);
    let is_around = |step: &&(usize, &Step)| {
        let (_, step) = **step;
        let row = row_of(&step.name);
        let end = step.end_ns.unwrap_or(i64::MAX);
        row.form == Form::Span && !row.waiting && step.begin_ns <= begin_ns && end.saturating_add(error) >= end_ns && end > begin_ns
    };
    let all: Vec<(usize, &Step)> = draft.story.steps.iter().enumerate().collect();
    all.iter().filter(is_around).min_by_key(|(_, step)| length(step.begin_ns, step.end_ns.unwrap_or(i64::MAX))).map(|(i, _)| *i)
}
