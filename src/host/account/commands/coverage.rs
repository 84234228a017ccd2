//! `kata-gpu-boot coverage`: time that no step explains.

use super::super::super::show::print;
use super::super::super::text::{Ink, Screen, seconds};
use super::super::coverage::{Coverage, coverage};
use super::super::grid::{Grid, Set, share, time};
use super::{BootArgs, Loaded, boot_json, head, notes};
use anyhow::{Result, ensure};

/// Gaps that are printed, the longest; the JSON form has all.
const MAX_GAPS: usize = 20;

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

/// Show how much of a boot's time no step explains, and where it is.
#[derive(clap::Args, Debug)]
#[command(after_help = HELP)]
pub struct Args {
    #[command(flatten)]
    boot: BootArgs,
    /// Fail when a larger part than this is unexplained.
    #[arg(long, value_name = "PERCENT")]
    at_most: Option<f64>,
}

/// Runs `coverage`.
pub fn run(args: &Args) -> Result<()> {
    let loaded = args.boot.load()?;
    print(&text(&loaded, &args.boot, &Screen::of_stdout())?)?;
    if let Some(limit) = args.at_most {
        let found = coverage(&loaded.timeline, &args.boot.window(&loaded)?);
        ensure!(found.unexplained_share <= limit, "{} is unexplained, allowed are {}", share(found.unexplained_share), share(limit));
    }
    Ok(())
}

/// What is printed.
pub fn text(loaded: &Loaded, args: &BootArgs, screen: &Screen) -> Result<String> {
    let window = args.window(loaded)?;
    let found = coverage(&loaded.timeline, &window);
    if args.json {
        return boot_json(loaded, &found);
    }
    let mut out = vec![head(loaded, &window), sentence(&found), String::new()];
    if !found.gaps.is_empty() {
        out.extend(table(&found).lines(screen));
        if found.gaps.len() > MAX_GAPS {
            out.push(format!("and {} shorter ones: --json has all", found.gaps.len() - MAX_GAPS));
        }
    }
    notes(&loaded.timeline.notes, screen, &mut out);
    Ok(out.join("\n") + "\n")
}

/// `unexplained: 0.136 s of 22.340 (0.6 %)`.
pub fn sentence(found: &Coverage) -> String {
    format!("unexplained: {} s of {} ({})", seconds(found.unexplained_ns), seconds(found.wall_ns), share(found.unexplained_share))
}

fn table(found: &Coverage) -> Grid {
    let mut grid = Grid::new(&[("TIME", Set::Right), ("TOOK", Set::Right), ("AFTER", Set::Left), ("BEFORE", Set::Left)]);
    let mut longest: Vec<_> = found.gaps.iter().collect();
    longest.sort_by_key(|g| std::cmp::Reverse(g.took_ns));
    longest.truncate(MAX_GAPS);
    longest.sort_by_key(|g| g.begin_ns);
    for gap in longest {
        grid.row(Ink::Plain, vec![time(gap.begin_ns), seconds(gap.took_ns), gap.before.clone(), gap.after.clone()]);
    }
    grid
}
