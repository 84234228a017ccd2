//! `kata-gpu-boot coverage`: time that no step explains.

use super::boot_args::{BootArgs, boot_json, head, notes};
use anyhow::{Result, ensure};
use kata_gpu_report::boot::coverage::{Coverage, Gap, coverage};
use kata_gpu_report::data::text::{Ink, Screen, seconds};
use kata_gpu_report::terminal::stdout::print;
use kata_gpu_report::views::grid::{Grid, Set, share, time};

/// Most gaps that are printed, the longest; the JSON form has all.
const MAX_GAPS: usize = 20;
/// Shortest gap that has a line of its own: all times are printed in ms.
const SHORT_NS: u64 = 1_000_000;

const HELP: &str = "\
Explained is time in which at least one step was running; an agent that only waits for GPUs explains nothing, its pause until the next try does. Notes \
below the table say which source is missing: without the agent's lines, or records that were lost, more is unexplained.

Exit status: 0, or 1 when more is unexplained than --at-most allows.

Examples:
  # the newest boot in this directory
  kata-gpu-boot coverage
  # between two milestones
  kata-gpu-boot coverage --from 'init start' --to 'last container'
  # as a check: fails when more than 1 % is unexplained
  kata-gpu-boot coverage --at-most 1";

/// Show the parts of a boot's time that no step explains.
#[derive(clap::Args, Debug)]
#[command(after_help = HELP)]
pub struct Args {
    #[command(flatten)]
    boot: BootArgs,
    /// Largest unexplained part, in percent, without an exit status of 1.
    #[arg(long, value_name = "PERCENT")]
    at_most: Option<f64>,
}

/// Runs `coverage`.
pub fn run(args: &Args) -> Result<()> {
    let (text, unexplained_share) = text(args, &Screen::of_stdout())?;
    print(&text)?;
    if let Some(limit) = args.at_most {
        ensure!(
            unexplained_share <= limit,
            "{unexplained_share:.2} % is unexplained, allowed are {limit} %"
        );
    }
    Ok(())
}

/// The page or its JSON form, and the unexplained part of the window in percent.
pub fn text(args: &Args, screen: &Screen) -> Result<(String, f64)> {
    let loaded = args.boot.load()?;
    let window = args.boot.window(&loaded)?;
    let found = coverage(&loaded.boot.timeline, &window);
    if args.boot.json {
        return Ok((boot_json(&loaded, &found)?, found.unexplained_share));
    }
    let mut out = vec![head(&loaded, &window), sentence(&found), String::new()];
    let mut longest: Vec<&Gap> = found
        .gaps
        .iter()
        .filter(|g| g.took_ns >= SHORT_NS)
        .collect();
    longest.sort_by_key(|g| std::cmp::Reverse(g.took_ns));
    longest.truncate(MAX_GAPS);
    if !longest.is_empty() {
        longest.sort_by_key(|g| g.begin_ns);
        out.extend(table(&longest).lines(screen));
    }
    if found.gaps.len() > longest.len() {
        let shown = longest
            .iter()
            .map(|g| g.took_ns)
            .fold(0, u64::saturating_add);
        let rest = seconds(found.unexplained_ns.saturating_sub(shown));
        out.push(screen.paint(
            Ink::Dim,
            &format!(
                "{} shorter gap(s), together {rest}: --json has all",
                found.gaps.len() - longest.len()
            ),
        ));
    }
    notes(&loaded.boot.timeline.notes, screen, &mut out);
    Ok((out.join("\n") + "\n", found.unexplained_share))
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
