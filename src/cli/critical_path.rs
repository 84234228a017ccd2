//! `kata-gpu-boot critical-path`: the chain of steps that set the end, and the gain of shortening
//! each.

use super::boot_args::{BootArgs, boot_json, head, held_up, notes};
use anyhow::Result;
use kata_gpu_report::analysis::critical_path::{CriticalPath, Gain, Piece, critical_path};
use kata_gpu_report::boot::draft::LAST_RECORD;
use kata_gpu_report::data::text::{Ink, Screen, seconds};
use kata_gpu_report::views::grid::{Grid, Set, time};

/// Most pieces of the path that are printed; the JSON form has all.
const MAX_PIECES: usize = 200;
/// Shortest piece that has a line of its own: all times are printed in ms.
const SHORT_NS: u64 = 1_000_000;

const HELP: &str = "\
The path goes back from the last milestone (--to names another): each step to the one it waited for last. KNOWN says how that is known: after (the \
record says so), within (it is part of what stands before), order (the program goes in this order), assumed (nobody says so; it is what ended last).

Below it: how much earlier the milestone would have come had a step taken no time and everything else had stayed as it was. GAIN is what the records \
hold; AT MOST, shown where it is more, also trusts what is only assumed. What the records cannot know is not in it: locks inside the driver, and the agent's next try, which comes once a \
second and would have fallen elsewhere.

Examples:
  # what set the end of the newest boot
  kata-gpu-boot critical-path
  # what the containers waited for
  kata-gpu-boot critical-path --to 'last container'
  # the five best, for programs
  kata-gpu-boot critical-path --top 5 --json | jq '.without_kind'";

/// Show the chain of steps that set the end of a boot, and the gain of shortening each.
#[derive(clap::Args, Debug)]
#[command(after_help = HELP)]
pub struct Args {
    #[command(flatten)]
    boot: BootArgs,
    /// Number of the largest gains that are shown.
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u8).range(1..=50))]
    top: u8,
}

/// The page, or its JSON form.
pub fn text(args: &Args, screen: &Screen) -> Result<String> {
    let loaded = args.boot.load()?;
    let window = args.boot.window(&loaded)?;
    let found = critical_path(&loaded.boot.timeline, &window, usize::from(args.top));
    if args.boot.json {
        return boot_json(&loaded, &found);
    }
    let mut out = vec![head(&loaded, &window), String::new()];
    let (shown, short): (Vec<&Piece>, Vec<&Piece>) =
        found.path.iter().partition(|p| p.took_ns >= SHORT_NS);
    out.extend(path(shown.get(..MAX_PIECES).unwrap_or(&shown)).lines(screen));
    if shown.len() > MAX_PIECES {
        out.push(format!(
            "and {} more: --json has all",
            shown.len() - MAX_PIECES
        ));
    }
    if !short.is_empty() {
        let together = short.iter().map(|p| p.took_ns).fold(0, u64::saturating_add);
        out.push(screen.paint(
            Ink::Dim,
            &format!(
                "{} piece(s) below 1 ms are not shown, together {}",
                short.len(),
                seconds(together)
            ),
        ));
    }
    out.push(String::new());
    if found.without_kind.is_empty() {
        out.push(match found.to.as_str() {
            LAST_RECORD => "the record ends there, and the boot had not: what would have made it shorter is not known".to_string(),
            to => format!("{to} comes at {}: no step would have made it come earlier", time(found.to_ns)),
        });
    } else {
        out.push(format!(
            "{} comes at {}. Had these taken no time, it would come earlier by:",
            found.to,
            time(found.to_ns)
        ));
        out.extend(gains(&found).lines(screen));
    }
    held_up(&found.held_up, screen, &mut out);
    notes(&loaded.boot.timeline.notes, screen, &mut out);
    Ok(out.join("\n") + "\n")
}

fn gpu(index: Option<u64>) -> String {
    index.map(|i| i.to_string()).unwrap_or_default()
}

fn path(pieces: &[&Piece]) -> Grid {
    let left = Set::Left;
    let columns = [
        ("TIME", Set::Right),
        ("TOOK", Set::Right),
        ("OWNER", left),
        ("GPU", Set::Right),
        ("STEP", left),
        ("KNOWN", left),
    ];
    let mut grid = Grid::new(&columns);
    for piece in pieces {
        let (begin, took) = (time(piece.begin_ns), seconds(piece.took_ns));
        match &piece.step {
            Some(step) => {
                let step = format!(
                    "{step}{}",
                    if piece.open { " (still going on)" } else { "" }
                );
                let known = piece.known.map_or(String::new(), |k| k.name().to_string());
                let owner = piece.owner.unwrap_or("?").to_string();
                grid.row(
                    if piece.open { Ink::Warning } else { Ink::Plain },
                    vec![begin, took, owner, gpu(piece.gpu), step, known],
                );
            }
            None => grid.row(
                Ink::Dim,
                vec![
                    begin,
                    took,
                    String::new(),
                    String::new(),
                    "(between steps)".to_string(),
                ],
            ),
        }
    }
    grid
}

fn gains(found: &CriticalPath) -> Grid {
    // The two gains differ only where an order is assumed.
    let assumed = found
        .without_kind
        .iter()
        .chain(&found.without_step)
        .any(|g| g.gain_ns != g.at_most_ns);
    let right = Set::Right;
    let columns = [
        ("GAIN", right),
        ("AT MOST", right),
        ("ON PATH", right),
        ("WITHOUT", Set::Left),
    ];
    let kept: Vec<_> = columns
        .into_iter()
        .filter(|(head, _)| assumed || *head != "AT MOST")
        .collect();
    let mut grid = Grid::new(&kept);
    let mut row = |gain: &Gain, what: String| {
        let at_most = assumed.then(|| seconds(gain.at_most_ns));
        grid.row(
            Ink::Plain,
            [
                Some(seconds(gain.gain_ns)),
                at_most,
                Some(seconds(gain.on_path_ns)),
                Some(what),
            ]
            .into_iter()
            .flatten()
            .collect(),
        );
    };
    for gain in &found.without_kind {
        row(
            gain,
            if gain.count > 1 {
                format!("all {} {}", gain.count, gain.step)
            } else {
                gain.step.clone()
            },
        );
    }
    // A kind with one step was printed already.
    let is_alone = |gain: &&Gain| {
        !found
            .without_kind
            .iter()
            .any(|k| k.count == 1 && k.step == gain.step)
    };
    for gain in found.without_step.iter().filter(is_alone) {
        row(
            gain,
            gain.gpu.map_or(gain.step.clone(), |gpu| {
                format!("{} of GPU {gpu} alone", gain.step)
            }),
        );
    }
    grid
}
