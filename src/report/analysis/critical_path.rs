//! The chain of steps that set the end of a boot, and the gain of shortening each.
//!
//! The path goes back from a milestone: each step to the one that it waited for last. The gain of a
//! step is found by computing the milestone's time anew with that step's duration set to 0 and
//! everything else unchanged: another chain then sets the end, so a step of 7 s can gain half a
//! second. Orders that are only assumed count for the possible gain (`at_most_ns`), never for the
//! promised one (`gain_ns`).

use super::graph::{Graph, step_of};
use super::held_up::{HeldUp, held_up};
use crate::boot::draft::LAST_RECORD;
use crate::boot::intervals::length;
use crate::boot::timeline::{Known, Timeline, Window};
use crate::data::units::is_zero;
use serde::Serialize;
use std::collections::BTreeMap;

/// Limit of steps, and kinds of steps, whose absence is computed. Each costs a walk over all
/// records of the boot; the longest are tried first, and none gains more than its time on the path.
const MAX_TRIED: usize = 64;

/// A piece of the path.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Piece {
    /// None: unexplained time between two steps.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub step: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gpu: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub owner: Option<&'static str>,
    pub begin_ns: i64,
    pub took_ns: u64,
    /// Evidence that this piece had to come after the one before it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub known: Option<Known>,
    /// Whether the step had not ended at the end of the record.
    #[serde(skip_serializing_if = "is_zero")]
    pub open: bool,
    /// Index of the step in the timeline.
    #[serde(skip)]
    pub index: Option<usize>,
}

/// Gain from omitting a step.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Gain {
    pub step: String,
    /// None: steps of all GPUs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gpu: Option<u64>,
    /// Number of these steps.
    pub count: u64,
    /// Their time on the path.
    pub on_path_ns: u64,
    /// Gain by the orders that the records name.
    pub gain_ns: u64,
    /// Gain if the assumed orders hold, too.
    pub at_most_ns: u64,
}

/// The path to a milestone.
#[derive(Clone, Debug, Serialize)]
pub struct CriticalPath {
    pub from: String,
    pub to: String,
    pub from_ns: i64,
    pub to_ns: i64,
    pub wall_ns: u64,
    /// Pieces in order of time; they fill the window without a gap.
    pub path: Vec<Piece>,
    /// Time on the path outside of steps.
    pub between_ns: u64,
    /// Orders between steps that contradict each other and were not used.
    pub cut: usize,
    /// Gains of all steps of a name, the largest first.
    pub without_kind: Vec<Gain>,
    /// Gains of single steps.
    pub without_step: Vec<Gain>,
    /// Steps that the enabling of GPUs held up.
    pub held_up: Vec<HeldUp>,
}

/// Computes the path to the window's end, and the `top` largest gains.
pub fn critical_path(timeline: &Timeline, window: &Window, top: usize) -> CriticalPath {
    let graph = Graph::new(timeline, window);
    let path = walk(timeline, window, &graph);
    let between_ns = path
        .iter()
        .filter(|p| p.step.is_none())
        .map(|p| p.took_ns)
        .fold(0, u64::saturating_add);
    let mut kinds: BTreeMap<String, (Vec<usize>, u64)> = BTreeMap::new();
    let mut singles: BTreeMap<usize, u64> = BTreeMap::new();
    for piece in &path {
        if let (Some(index), Some(step)) =
            (piece.index, piece.index.and_then(|i| timeline.steps.get(i)))
        {
            kinds.entry(step.kind()).or_default().1 += piece.took_ns;
            *singles.entry(index).or_default() += piece.took_ns;
        }
    }
    for (i, step) in timeline.steps.iter().enumerate() {
        if let Some((steps, _)) = kinds.get_mut(&step.kind()) {
            steps.push(i);
        }
    }
    // If the record ends before the boot does, no gain can be computed.
    let top = if window.to.name == LAST_RECORD {
        0
    } else {
        top
    };
    let kinds = kinds.into_iter().map(|(step, (steps, on_path_ns))| {
        let gain = Gain {
            step,
            on_path_ns,
            ..Gain::default()
        };
        (gain, steps)
    });
    let singles = singles.into_iter().filter_map(|(i, on_path_ns)| {
        let step = timeline.steps.get(i)?;
        let gain = Gain {
            step: step.title(),
            gpu: step.gpu.and_then(|g| g.index),
            on_path_ns,
            ..Gain::default()
        };
        Some((gain, vec![i]))
    });
    CriticalPath {
        from: window.from.name.clone(),
        to: window.to.name.clone(),
        from_ns: window.from.at_ns,
        to_ns: window.to.at_ns,
        wall_ns: window.wall_ns(),
        between_ns,
        cut: graph.cut,
        without_kind: gains(window, &graph, kinds.collect(), top),
        without_step: gains(window, &graph, singles.collect(), top),
        held_up: held_up(timeline, window),
        path,
    }
}

/// Gain of omitting these steps: by known orders, and by assumed ones.
pub fn gain(window: &Window, graph: &Graph, steps: &[usize]) -> (u64, u64) {
    let mut left = vec![1.0; graph.target / 2];
    for step in steps {
        if let Some(left) = left.get_mut(*step) {
            *left = 0.0;
        }
    }
    (
        sooner(window, graph, &left, false),
        sooner(window, graph, &left, true),
    )
}

/// How much sooner the window would end if this part of each step's time were left.
pub fn sooner(window: &Window, graph: &Graph, left: &[f64], trust_assumed: bool) -> u64 {
    let gain = i128::from(window.to.at_ns) - graph.with_parts(left, trust_assumed);
    u64::try_from(gain).unwrap_or(0).min(window.wall_ns())
}

/// The largest gains of some candidates, each with its steps.
fn gains(
    window: &Window,
    graph: &Graph,
    mut candidates: Vec<(Gain, Vec<usize>)>,
    top: usize,
) -> Vec<Gain> {
    if top == 0 {
        return Vec::new();
    }
    candidates.sort_by(|(a, a_steps), (b, b_steps)| {
        (b.on_path_ns, a_steps).cmp(&(a.on_path_ns, b_steps))
    });
    let mut found: Vec<Gain> = Vec::new();
    for (gain_of, steps) in candidates.into_iter().take(MAX_TRIED) {
        // No gain exceeds the time on the path: the rest cannot get into the list.
        if found.len() >= top
            && found
                .get(top.saturating_sub(1))
                .is_some_and(|g| g.gain_ns >= gain_of.on_path_ns)
        {
            break;
        }
        // A step that began before the window counts only with its part inside.
        let (gain_ns, at_most_ns) = gain(window, graph, &steps);
        let most = gain_of.on_path_ns;
        if at_most_ns.min(most) > 0 {
            found.push(Gain {
                count: steps.len() as u64,
                gain_ns: gain_ns.min(most),
                at_most_ns: at_most_ns.min(most),
                ..gain_of
            });
            found.sort_by(|a, b| {
                (b.gain_ns, b.at_most_ns, &a.step).cmp(&(a.gain_ns, a.at_most_ns, &b.step))
            });
        }
    }
    found.truncate(top);
    found
}

/// Walks from the milestone back to the window's beginning.
fn walk(timeline: &Timeline, window: &Window, graph: &Graph) -> Vec<Piece> {
    let mut pieces: Vec<Piece> = Vec::new();
    let mut node = graph.target;
    let mut at_ns = window.to.at_ns;
    // The order of the graph has no cycle, so each node comes once.
    for _ in 0..graph.nodes.len() {
        let last = graph.last_of(node);
        let since = last
            .and_then(|(d, _)| graph.nodes.get(d))
            .map_or(window.from.at_ns, |n| n.at_ns);
        let since = since.clamp(window.from.at_ns, at_ns);
        let owner = if last.is_some() {
            graph.step_of_lag(node)
        } else {
            None
        };
        // The evidence for a step's place is stored at its beginning.
        let known = match step_of(node, timeline.steps.len()) {
            Some((_, true)) => None,
            _ => last.map(|(_, known)| known),
        };
        add(timeline, &mut pieces, (owner, since, at_ns), known);
        at_ns = since;
        match last {
            Some((before, _)) if at_ns > window.from.at_ns => node = before,
            _ => break,
        }
    }
    if at_ns > window.from.at_ns {
        add(
            timeline,
            &mut pieces,
            (None, window.from.at_ns, at_ns),
            None,
        );
    }
    pieces.reverse();
    pieces
}

/// Adds a piece. `known` comes from a step's beginning and applies to the piece added before.
fn add(
    timeline: &Timeline,
    pieces: &mut Vec<Piece>,
    (owner, begin_ns, end_ns): (Option<usize>, i64, i64),
    known: Option<Known>,
) {
    if let Some(later) = pieces
        .last_mut()
        .filter(|p| p.known.is_none() && p.step.is_some())
    {
        later.known = known;
    }
    if begin_ns == end_ns {
        return;
    }
    match pieces.last_mut() {
        // Join two parts of one step with nothing between them.
        Some(later) if later.index == owner && owner.is_some() => {
            later.begin_ns = begin_ns;
            later.took_ns = later.took_ns.saturating_add(length(begin_ns, end_ns));
        }
        _ => {
            let step = owner.and_then(|i| timeline.steps.get(i));
            pieces.push(Piece {
                step: step.map(|s| s.title()),
                gpu: step.and_then(|s| s.gpu).and_then(|g| g.index),
                owner: step.map(|s| s.row.owner.name()),
                begin_ns,
                took_ns: length(begin_ns, end_ns),
                known: None,
                open: step.is_some_and(|s| s.open),
                index: owner,
            });
        }
    }
}
