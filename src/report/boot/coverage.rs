//! Explained part of a boot's time: at least one step was running that is no mere waiting.
//!
//! Invariant: explained and unexplained time add up to the window, to the nanosecond.

use super::intervals::percent;
use super::intervals::{Intervals, length};
use super::timeline::{Timeline, Window};
use serde::Serialize;

/// Time that no step explains, between the first and the last milestone (see [`super::coverage`]).
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CoverageSummary {
    pub from: String,
    pub to: String,
    pub wall_ns: u64,
    pub unexplained_ns: u64,
    /// Percentage.
    pub unexplained_share: f64,
}

/// Explained part of a window.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Coverage {
    pub from: String,
    pub to: String,
    pub from_ns: i64,
    pub to_ns: i64,
    pub wall_ns: u64,
    pub explained_ns: u64,
    pub unexplained_ns: u64,
    /// `unexplained_ns` of `wall_ns`, in percent.
    pub unexplained_share: f64,
    pub gaps: Vec<Gap>,
}

impl Coverage {
    pub fn summary(&self) -> CoverageSummary {
        CoverageSummary {
            from: self.from.clone(),
            to: self.to.clone(),
            wall_ns: self.wall_ns,
            unexplained_ns: self.unexplained_ns,
            unexplained_share: self.unexplained_share,
        }
    }
}

/// Time that no step explains.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Gap {
    pub begin_ns: i64,
    pub took_ns: u64,
    /// The step or milestone that ended last.
    pub before: String,
    /// The step or milestone that came next.
    pub after: String,
}

/// Accounts for a window.
pub fn coverage(timeline: &Timeline, window: &Window) -> Coverage {
    let steps = || timeline.steps.iter().filter(|s| !s.row.waiting);
    let covered = Intervals::union(steps().map(|s| window.clip(s.begin_ns, s.end_ns)).collect());
    let mut ends: Vec<(i64, String)> = Vec::new();
    let mut begins: Vec<(i64, String)> = Vec::new();
    let gaps = covered.missing_in(window.from.at_ns, window.to.at_ns);
    if !gaps.is_empty() {
        // A milestone only if no step ends there: milestones sort before steps of the same moment,
        // and are taken last.
        let points = || {
            timeline
                .milestones
                .iter()
                .map(|m| (m.at_ns, m.name.clone()))
        };
        ends = points()
            .chain(steps().map(|s| (s.end_ns, title(s))))
            .collect();
        begins = points()
            .chain(steps().map(|s| (s.begin_ns, title(s))))
            .collect();
        ends.sort_by_key(|(at, _)| *at);
        begins.sort_by_key(|(at, _)| *at);
    }
    let gaps: Vec<Gap> = gaps
        .into_iter()
        .map(|(begin, end)| {
            let before = ends
                .partition_point(|(at, _)| *at <= begin)
                .checked_sub(1)
                .and_then(|i| ends.get(i));
            let after = begins.get(begins.partition_point(|(at, _)| *at < end));
            let name = |found: Option<&(i64, String)>| {
                found.map_or("?".to_string(), |(_, name)| name.clone())
            };
            Gap {
                begin_ns: begin,
                took_ns: length(begin, end),
                before: name(before),
                after: name(after),
            }
        })
        .collect();
    let wall_ns = window.wall_ns();
    let unexplained_ns = gaps.iter().map(|g| g.took_ns).fold(0, u64::saturating_add);
    Coverage {
        from: window.from.name.clone(),
        to: window.to.name.clone(),
        from_ns: window.from.at_ns,
        to_ns: window.to.at_ns,
        wall_ns,
        explained_ns: covered.total_ns(),
        unexplained_ns,
        unexplained_share: percent(unexplained_ns, wall_ns),
        gaps,
    }
}

fn title(step: &super::timeline::Step) -> String {
    match step.gpu.and_then(|g| g.index) {
        Some(index) => format!("{} of GPU {index}", step.title()),
        None => step.title(),
    }
}
