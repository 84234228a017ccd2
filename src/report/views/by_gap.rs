//! `show --by gap`: time that no step explains.

use super::grid::{Grid, SHORT_NS, Set, share, time};
use crate::boot::coverage::{Coverage, Gap};
use crate::data::text::{Ink, Screen, seconds};

/// Most gaps that are printed, the longest; the JSON form has all.
const MAX_GAPS: usize = 20;

/// The gaps in order of time; the shorter ones as a sum.
pub fn lines(found: &Coverage, screen: &Screen) -> Vec<String> {
    let mut longest: Vec<&Gap> = found
        .gaps
        .iter()
        .filter(|gap| gap.took_ns >= SHORT_NS)
        .collect();
    longest.sort_by_key(|gap| std::cmp::Reverse(gap.took_ns));
    longest.truncate(MAX_GAPS);
    longest.sort_by_key(|gap| gap.begin_ns);
    let mut out = Vec::new();
    if !longest.is_empty() {
        out.extend(table(&longest).lines(screen));
    }
    if found.gaps.len() > longest.len() {
        let shown = longest
            .iter()
            .map(|gap| gap.took_ns)
            .fold(0, u64::saturating_add);
        let rest = seconds(found.unexplained_ns.saturating_sub(shown));
        let shorter = found.gaps.len() - longest.len();
        let line = format!("{shorter} shorter gap(s), together {rest}: --json has all");
        out.push(screen.paint(Ink::Dim, &line));
    }
    out
}

/// `unexplained: 0.136 s of 22.340 (0.6 %)`.
pub fn sentence(found: &Coverage) -> String {
    format!(
        "unexplained: {} s of {} ({})",
        seconds(found.unexplained_ns),
        seconds(found.wall_ns),
        share(found.unexplained_share)
    )
}

fn table(gaps: &[&Gap]) -> Grid {
    let mut grid = Grid::new(&[
        ("TIME", Set::Right),
        ("TOOK", Set::Right),
        ("AFTER", Set::Left),
        ("BEFORE", Set::Left),
    ]);
    for gap in gaps {
        grid.row(
            Ink::Plain,
            vec![
                time(gap.begin_ns),
                seconds(gap.took_ns),
                gap.before.clone(),
                gap.after.clone(),
            ],
        );
    }
    grid
}
