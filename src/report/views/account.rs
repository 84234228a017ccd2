//! The account of a boot's time by one of four groupings.

use super::by_phase::{ByPhase, cure_lines};
use super::grid::{Grid, Set, time};
use super::{by_gap, by_owner, by_path, by_phase};
use crate::analysis::blame::{Blame, By, blame};
use crate::analysis::critical_path::{CriticalPath, critical_path};
use crate::analysis::held_up::HeldUp;
use crate::boot::coverage::{Coverage, coverage};
use crate::boot::model::Boot;
use crate::boot::story::Milestone;
use crate::boot::timeline::Window;
use crate::data::clock_offset::Clock;
use crate::data::text::{Ink, Screen, error_bound, seconds, wall_clock};
use serde::Serialize;

/// Largest gains that are shown for each step of the critical path.
const GAINS: usize = 3;

/// Groupings of a boot's time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Grouping {
    Phase,
    Owner,
    /// Along the critical path.
    Path,
    /// Time that no step explains.
    Gap,
}

/// The account of a window by one grouping.
#[derive(Serialize)]
#[serde(tag = "by", rename_all = "lowercase")]
pub enum Account {
    Phase(ByPhase),
    Owner(Blame),
    Path(CriticalPath),
    Gap(Coverage),
}

impl Account {
    pub fn new(by: Grouping, boot: &Boot, window: &Window) -> Self {
        let timeline = &boot.timeline;
        match by {
            Grouping::Phase => Self::Phase(ByPhase::new(boot, window)),
            Grouping::Owner => Self::Owner(blame(timeline, window, By::Owner)),
            Grouping::Path => Self::Path(critical_path(timeline, window, GAINS)),
            Grouping::Gap => Self::Gap(coverage(timeline, window)),
        }
    }

    pub fn lines(&self, screen: &Screen) -> Vec<String> {
        let (mut out, held_up) = match self {
            Self::Phase(found) => (by_phase::lines(found, screen), found.held_up.as_slice()),
            Self::Owner(found) => (by_owner::lines(found, screen), found.held_up.as_slice()),
            Self::Path(found) => (by_path::lines(found, screen), found.held_up.as_slice()),
            Self::Gap(found) => (by_gap::lines(found, screen), [].as_slice()),
        };
        held_up_lines(held_up, screen, &mut out);
        if let Self::Phase(found) = self {
            out.extend(cure_lines(&found.cures, screen));
        }
        out
    }
}

/// `kernel start 0.000 (2026-.. +-0.9 ms) .. settled 22.340 (..)`: the window.
pub fn window_line(window: &Window, clock: &Clock) -> String {
    let milestone = |m: &Milestone| {
        let wall = clock.wall_around(m.at_ns, m.error_ns).map(|wall| {
            let (at, error) = (wall_clock(wall.realtime_ns), error_bound(wall.error_ns));
            format!(" ({at} {error})")
        });
        format!(
            "{} {}{}{}",
            m.name,
            if m.approximate { "~" } else { "" },
            time(m.at_ns),
            wall.unwrap_or_default()
        )
    };
    format!("{} .. {}", milestone(window.from), milestone(window.to))
}

/// Steps that enablings held up, below a page.
fn held_up_lines(steps: &[HeldUp], screen: &Screen, out: &mut Vec<String>) {
    if steps.is_empty() {
        return;
    }
    let head = "Enabling a GPU occupies a vCPU, and these steps wait for every vCPU:";
    out.extend([String::new(), head.to_string()]);
    let right = Set::Right;
    let mut grid = Grid::new(&[
        ("TOOK", right),
        ("OVERLAP", right),
        ("STEP", Set::Left),
        ("ENABLING OF", Set::Left),
    ]);
    for step in steps {
        let gpus = step
            .gpus
            .iter()
            .map(u64::to_string)
            .collect::<Vec<_>>()
            .join(", ");
        grid.row(
            Ink::Plain,
            vec![
                seconds(step.took_ns),
                seconds(step.overlap_ns),
                step.step.clone(),
                format!("GPU {gpus}"),
            ],
        );
    }
    out.extend(grid.lines(screen));
}
