//! A story made sound: steps in order of time, in phases, with the steps that each had to wait for.
//!
//! Invariants for any story: every step ends no earlier than it begins; a parent stands before its
//! children and a chain of parents has an end; a step is after another one only if that one had
//! ended when it began; texts are printable ASCII and bounded. Contradictions are left out and
//! counted.

use super::gpu_name::GpuName;
use super::intervals::length;
use super::story::{self, Milestone, Story};
use crate::data::text::{printable, printable_start};
use anyhow::{Result, bail};
use kata_gpu_wire::catalogue::{Row, row_of};
use kata_gpu_wire::names;
use serde::Serialize;
use std::collections::{BTreeMap, HashMap};

/// Limit of a boot's orders (`after`). A boot with 16 GPUs has some hundred.
const MAX_EDGES: usize = 1_000_000;
/// Limit of name and detail, in bytes: the format's limit for names, which suffices for module
/// names and container ids.
const MAX_NAME: usize = 64;

/// Evidence that a step had to wait for another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Known {
    /// Named by the record.
    After,
    /// Part of the other step.
    Within,
    /// Known order of the program.
    Order,
    /// No evidence: the other step is the last one that ended before.
    Assumed,
}

impl Known {
    pub fn name(self) -> &'static str {
        match self {
            Self::After => "after",
            Self::Within => "within",
            Self::Order => "order",
            Self::Assumed => "assumed",
        }
    }
}

/// A step.
#[derive(Clone, Debug)]
pub struct Step {
    /// Id of the step's span, if there is one.
    pub span: Option<u64>,
    pub name: String,
    pub detail: String,
    pub gpu: Option<GpuName>,
    pub row: Row,
    pub begin_ns: i64,
    /// End of the step, or of the record for an open step.
    pub end_ns: i64,
    /// Whether the step had not ended.
    pub open: bool,
    pub parent: Option<usize>,
    /// Steps that had to end first.
    pub after: Vec<(usize, Known)>,
    pub derived: bool,
    pub approximate: bool,
    pub failed: bool,
    /// Index in the host's trace of a step that it has.
    pub traced: Option<usize>,
}

impl Step {
    pub fn took_ns(&self) -> u64 {
        length(self.begin_ns, self.end_ns)
    }

    /// Name and detail: `module.load nvidia`.
    pub fn title(&self) -> String {
        if self.detail.is_empty() {
            self.name.clone()
        } else {
            format!("{} {}", self.name, self.detail)
        }
    }

    /// Name in accounts: modules are different things under one name, containers and GPUs are not.
    pub fn kind(&self) -> String {
        if self.name == names::MODULE_LOAD {
            self.title()
        } else {
            self.name.clone()
        }
    }
}

/// The part of a boot that is accounted for.
#[derive(Clone, Copy, Debug)]
pub struct Window<'a> {
    pub from: &'a Milestone,
    pub to: &'a Milestone,
}

impl Window<'_> {
    pub fn wall_ns(&self) -> u64 {
        length(self.from.at_ns, self.to.at_ns)
    }

    /// Part of an interval inside the window.
    pub fn clip(&self, begin_ns: i64, end_ns: i64) -> (i64, i64) {
        (begin_ns.max(self.from.at_ns), end_ns.min(self.to.at_ns))
    }
}

/// A boot, ready for accounting.
#[derive(Clone, Debug, Default)]
pub struct Timeline {
    /// Steps by beginning; of those that begin at once, the longest first.
    pub steps: Vec<Step>,
    /// Milestones by time.
    pub milestones: Vec<Milestone>,
    /// Missing parts of the source, and its contradictions.
    pub notes: Vec<String>,
}

impl Timeline {
    pub fn new(story: Story) -> Self {
        let mut notes: Vec<String> = story.missing.iter().map(|m| printable(m)).collect();
        let given = story.steps;
        let last_ns = story.last_ns;
        let end_of = |step: &story::RawStep| step.end_ns.unwrap_or(last_ns.max(step.begin_ns));
        let mut order: Vec<usize> = (0..given.len())
            .filter(|i| given.get(*i).is_some_and(|s| end_of(s) >= s.begin_ns))
            .collect();
        if order.len() < given.len() {
            notes.push(format!(
                "{} step(s) end before they begin and are left out",
                given.len() - order.len()
            ));
        }
        order.sort_by_key(|i| {
            given
                .get(*i)
                .map(|s| (s.begin_ns, std::cmp::Reverse(end_of(s)), *i))
        });
        let place: HashMap<usize, usize> = order
            .iter()
            .enumerate()
            .map(|(to, from)| (*from, to))
            .collect();

        let mut steps: Vec<Step> = Vec::with_capacity(order.len());
        for (at, step) in order.iter().filter_map(|i| given.get(*i)).enumerate() {
            let end_ns = end_of(step);
            // A step that stands before this one in the order and is still going on when this one
            // begins can be around it.
            let around = |parent: &usize| {
                *parent < at
                    && steps
                        .get(*parent)
                        .is_some_and(|p: &Step| p.end_ns >= step.begin_ns)
            };
            let name = printable_start(&step.name, MAX_NAME);
            steps.push(Step {
                span: step.span,
                row: row_of(&name),
                name,
                detail: printable_start(&step.detail, MAX_NAME),
                gpu: step.gpu,
                begin_ns: step.begin_ns,
                end_ns,
                open: step.end_ns.is_none(),
                parent: step
                    .parent
                    .and_then(|p| place.get(&p).copied())
                    .filter(around),
                after: Vec::new(),
                derived: step.derived,
                approximate: step.approximate,
                failed: step.failed,
                traced: step.traced,
            });
        }
        let edges = edges(&order, &given, &steps, &place, &mut notes);
        for (step, after) in steps.iter_mut().zip(edges) {
            step.after = after;
        }
        let mut milestones: Vec<Milestone> = story
            .milestones
            .into_iter()
            .map(|m| milestone(m, &place, &steps))
            .collect();
        milestones.sort_by_key(|m| m.at_ns);
        Self {
            steps,
            milestones,
            notes,
        }
    }

    /// Window between two milestones; by default the first and the last one.
    pub fn window(&self, from: Option<&str>, to: Option<&str>) -> Result<Window<'_>> {
        let find = |name: &str| match self.milestones.iter().find(|m| m.name == name) {
            Some(found) => Ok(found),
            None => {
                let known: Vec<&str> = self.milestones.iter().map(|m| m.name.as_str()).collect();
                bail!(
                    "milestone {}: this boot has none of that name: one of {}",
                    printable(name),
                    known.join(", ")
                )
            }
        };
        let from = from.map_or_else(
            || {
                self.milestones
                    .first()
                    .ok_or_else(|| anyhow::anyhow!("the boot has no milestone"))
            },
            find,
        )?;
        let to = to.map_or_else(
            || {
                self.milestones
                    .last()
                    .ok_or_else(|| anyhow::anyhow!("the boot has no milestone"))
            },
            find,
        )?;
        if to.at_ns <= from.at_ns {
            bail!(
                "nothing to account for: no time passes from {} to {}",
                from.name,
                to.name
            );
        }
        Ok(Window { from, to })
    }
}

fn milestone(given: Milestone, place: &HashMap<usize, usize>, steps: &[Step]) -> Milestone {
    let ended = |i: &usize| steps.get(*i).is_some_and(|s| s.end_ns <= given.at_ns);
    Milestone {
        after: given
            .after
            .iter()
            .filter_map(|i| place.get(i).copied())
            .filter(ended)
            .take(MAX_EDGES)
            .collect(),
        name: printable_start(&given.name, MAX_NAME),
        ..given
    }
}

/// For each step, in the order of `steps`, the steps that it had to wait for.
fn edges(
    order: &[usize],
    given: &[story::RawStep],
    steps: &[Step],
    place: &HashMap<usize, usize>,
    notes: &mut Vec<String>,
) -> Vec<Vec<(usize, Known)>> {
    let ended = Ended::new(steps);
    let mut used = 0usize;
    let mut dropped = 0usize;
    let mut out = Vec::with_capacity(steps.len());
    for (at, (step, from)) in steps.iter().zip(order).enumerate() {
        let mut after: Vec<(usize, Known)> = Vec::new();
        let Some(source) = given.get(*from) else {
            continue;
        };
        let named = source
            .after
            .iter()
            .map(|i| (i, Known::After))
            .chain(source.follows.iter().map(|i| (i, Known::Order)));
        for (i, known) in named {
            let target = place
                .get(i)
                .copied()
                .filter(|t| *t != at && steps.get(*t).is_some_and(|s| s.end_ns <= step.begin_ns));
            match target {
                Some(target) if used < MAX_EDGES => {
                    after.push((target, known));
                    used += 1;
                }
                _ => dropped += 1,
            }
        }
        let recorded = after.iter().any(|(_, known)| *known == Known::After);
        if step.row.serial {
            after.extend(
                ended
                    .before(&step.name, step.begin_ns, at)
                    .map(|i| (i, Known::Order)),
            );
        }
        if !recorded && after.is_empty() {
            after.extend(
                step.row
                    .follows
                    .iter()
                    .filter_map(|name| ended.before(name, step.begin_ns, at))
                    .map(|i| (i, Known::Order)),
            );
        }
        if after.is_empty() && step.parent.is_none() && !step.row.waiting {
            after.extend(ended.last(step.begin_ns, at).map(|i| (i, Known::Assumed)));
        }
        after.sort_unstable();
        after.dedup_by_key(|(i, _)| *i);
        out.push(after);
    }
    if dropped > 0 {
        notes.push(format!(
            "{dropped} order(s) between steps contradict their times, or name no \
                            step, and are not used"
        ));
    }
    out
}

/// Steps by the time of their end.
struct Ended<'a> {
    by_name: BTreeMap<&'a str, Vec<(i64, usize)>>,
    all: Vec<(i64, usize)>,
}

impl<'a> Ended<'a> {
    fn new(steps: &'a [Step]) -> Self {
        let mut by_name: BTreeMap<&str, Vec<(i64, usize)>> = BTreeMap::new();
        let mut all = Vec::new();
        for (i, step) in steps
            .iter()
            .enumerate()
            .filter(|(_, s)| !s.row.waiting && !s.open)
        {
            by_name
                .entry(&step.name)
                .or_default()
                .push((step.end_ns, i));
            all.push((step.end_ns, i));
        }
        by_name.values_mut().for_each(|ends| ends.sort_unstable());
        all.sort_unstable();
        Self { by_name, all }
    }

    /// The last step of that name that had ended by then.
    fn before(&self, name: &str, at_ns: i64, not: usize) -> Option<usize> {
        last_of(self.by_name.get(name)?, at_ns, not)
    }

    fn last(&self, at_ns: i64, not: usize) -> Option<usize> {
        last_of(&self.all, at_ns, not)
    }
}

/// The last one that stands before `not` in the order, so that steps without length cannot wait for
/// each other.
fn last_of(ends: &[(i64, usize)], at_ns: i64, not: usize) -> Option<usize> {
    let upto = ends.partition_point(|end| *end < (at_ns, not));
    ends.get(upto.checked_sub(1)?).map(|(_, i)| *i)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::for_tests::{step, timeline};

    #[test]
    fn a_record_outranks_the_program_which_outranks_an_assumption() {
        let story = Story {
            steps: vec![
                step("kernel", 0, 10),
                step("stage0", 12, 20),
                step("what", 21, 22),
                step("pci.scan", 23, 24),
                story::RawStep {
                    after: vec![0],
                    ..step("gpu.enable", 25, 26)
                },
                step("imported", 30, 31),
            ],
            ..Story::default()
        };
        let timeline = Timeline::new(story);
        let after: Vec<_> = timeline.steps.iter().map(|s| s.after.clone()).collect();
        let (order, assumed) = (Known::Order, Known::Assumed);
        assert_eq!(
            after,
            [
                vec![],
                vec![(0, order)],
                vec![(1, assumed)],
                vec![(1, order)],
                vec![(0, Known::After)],
                vec![(4, assumed)],
            ]
        );
        assert_eq!(timeline.notes, [] as [String; 0]);
    }

    #[test]
    fn what_contradicts_itself_is_left_out_and_counted() {
        let story = Story {
            steps: vec![
                story::RawStep {
                    after: vec![1, 7],
                    parent: Some(1),
                    ..step("a\u{1b}[2J", 5, 9)
                },
                story::RawStep {
                    after: vec![0],
                    parent: Some(0),
                    ..step("b", 5, 9)
                },
                step("backwards", 9, 5),
                story::RawStep {
                    end_ns: None,
                    ..step("open", 6, 0)
                },
            ],
            last_ns: 20,
            ..Story::default()
        };
        let timeline = Timeline::new(story);
        assert_eq!(timeline.steps.len(), 3);
        assert_eq!(timeline.steps[0].name, "a\\x1b[2J");
        assert_eq!(
            (timeline.steps[0].parent, timeline.steps[1].parent),
            (None, Some(0)),
            "one of two that are each other's"
        );
        assert!(timeline.steps[2].open && timeline.steps[2].end_ns == 20);
        assert_eq!(timeline.notes.len(), 2, "{:?}", timeline.notes);
        assert!(
            timeline.notes[1].starts_with("3 order(s)"),
            "{:?}",
            timeline.notes
        );
    }

    #[test]
    fn a_window_has_two_ends_and_some_time_between() {
        let timeline = timeline(Vec::new(), -2, 7, &[]);
        assert_eq!(timeline.window(None, None).unwrap().wall_ns(), 9);
        assert!(
            timeline
                .window(Some("b"), Some("a"))
                .unwrap_err()
                .to_string()
                .contains("no time passes")
        );
        assert!(
            timeline
                .window(None, Some("c"))
                .unwrap_err()
                .to_string()
                .contains("one of a, b")
        );
        assert!(Timeline::default().window(None, None).is_err());
    }
}
