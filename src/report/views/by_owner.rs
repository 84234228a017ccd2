//! `show --by owner`: a boot's time by who could have made it shorter, and by step.

use super::grid::{Grid, Set, share};
use crate::analysis::blame::{Blame, StepRow, Time};
use crate::data::text::{Ink, Screen, seconds};

/// Most steps of one owner that are printed; the JSON form has all.
const MAX_STEPS: usize = 40;

/// A table: each owner, and the steps of each below it.
pub fn lines(account: &Blame, screen: &Screen) -> Vec<String> {
    let right = Set::Right;
    let mut grid = Grid::new(&[
        ("OWNER, STEP", Set::Left),
        ("COUNT", right),
        ("SUM", right),
        ("LONGEST", right),
        ("WALL", right),
        ("SHARE", right),
    ]);
    for group in &account.groups {
        grid.row(Ink::Bold, cells(group.name.to_string(), &group.time));
        steps(&mut grid, &group.steps);
    }
    if !account.waiting.is_empty() {
        grid.row(Ink::Bold, vec!["waiting for these".to_string()]);
        steps(&mut grid, &account.waiting);
    }
    let mut out = grid.lines(screen);
    let owned = account.groups.iter().flat_map(|group| &group.steps);
    if owned.chain(&account.waiting).any(|step| step.derived) {
        out.push(screen.paint(Ink::Dim, "* worked out from other records"));
    }
    out
}

fn steps(grid: &mut Grid, steps: &[StepRow]) {
    for step in steps.iter().take(MAX_STEPS) {
        let ink = match (step.failed, step.open) {
            (0, 0) => Ink::Plain,
            (0, _) => Ink::Warning,
            _ => Ink::Error,
        };
        let mut name = format!("  {}{}", step.name, if step.derived { " *" } else { "" });
        if step.failed > 0 {
            name.push_str(&format!(" ({} failed)", step.failed));
        }
        if step.open > 0 {
            name.push_str(&format!(" ({} still going on)", step.open));
        }
        grid.row(ink, cells(name, &step.time));
    }
    if steps.len() > MAX_STEPS {
        grid.row(
            Ink::Dim,
            vec![format!(
                "  and {} more: --json has all",
                steps.len() - MAX_STEPS
            )],
        );
    }
}

fn cells(name: String, time: &Time) -> Vec<String> {
    let count = time.count.to_string();
    vec![
        name,
        count,
        seconds(time.sum_ns),
        seconds(time.longest_ns),
        seconds(time.wall_ns),
        share(time.share),
    ]
}
