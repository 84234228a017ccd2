//! `kata-gpu-boot blame`: a boot's time by owner, phase and step.

use super::boot_args::{BootArgs, boot_json, head, held_up, notes};
use anyhow::Result;
use kata_gpu_report::analysis::blame::{Blame, By, StepRow, Time, blame};
use kata_gpu_report::data::text::{Ink, Screen, seconds};
use kata_gpu_report::views::grid::{Grid, Set, share};

/// Most steps that are listed for an owner.
const MAX_STEPS: usize = 40;

const HELP: &str = "\
Owners: host (maps the GPUs' BARs), vmm, kernel, driver, init, agent, runtime (asks the agent). A step's time is its own: without the steps inside \
it. SUM adds up what several GPUs took, WALL is the time in which at least one was at it; SHARE is WALL of the whole. Owners overlap, so that shares \
need not make 100 %. Waiting for GPUs is listed apart: the GPUs' own steps explain it. What passes between the publication of the last GPU and the \
agent's next try (one a second) is the agent's: agent.pause. Steps with * stand in no record but follow from others: the kernel's by its log, \
gpu.map by the line `enabling device` inside a module load (the host maps the BARs, and 2 to 4 ms of probe).

Examples:
  # the newest boot in this directory
  kata-gpu-boot blame
  # until containers ran, whatever the GPUs did then
  kata-gpu-boot blame --to 'last container' 0f7a --dir /var/log/boots
  # by phase instead of owner
  kata-gpu-boot blame --phases
  kata-gpu-boot blame --json | jq '.groups[] | {name, wall_ns}'";

/// Show a boot's time by owner (host, kernel, driver, init, agent) and by step.
#[derive(clap::Args, Debug)]
#[command(after_help = HELP)]
pub struct Args {
    #[command(flatten)]
    boot: BootArgs,
    /// Show the time by phase, in the order of a boot.
    #[arg(long)]
    phases: bool,
}

/// The page, or its JSON form.
pub fn text(args: &Args, screen: &Screen) -> Result<String> {
    let loaded = args.boot.load()?;
    let window = args.boot.window(&loaded)?;
    let by = if args.phases { By::Phase } else { By::Owner };
    let account = blame(&loaded.boot.timeline, &window, by);
    if args.boot.json {
        return boot_json(&loaded, &account);
    }
    let mut out = vec![head(&loaded, &window), String::new()];
    out.extend(table(&account, by).lines(screen));
    if account
        .groups
        .iter()
        .flat_map(|g| &g.steps)
        .chain(&account.waiting)
        .any(|s| s.derived)
    {
        out.push(screen.paint(Ink::Dim, "* worked out from other records"));
    }
    held_up(&account.held_up, screen, &mut out);
    notes(&loaded.boot.timeline.notes, screen, &mut out);
    Ok(out.join("\n") + "\n")
}

fn table(account: &Blame, by: By) -> Grid {
    let right = Set::Right;
    let mut grid = Grid::new(&[
        (
            if by == By::Owner {
                "OWNER, STEP"
            } else {
                "PHASE, STEP"
            },
            Set::Left,
        ),
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
    grid
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
