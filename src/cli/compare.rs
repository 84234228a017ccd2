//! `kata-gpu-boot compare`: compares two boots, or two sets of boots, with an exit status that can
//! stop a release.

use super::boots::{BootDir, each_boot, json};
use anyhow::{Context, Result};
use kata_gpu_report::analysis::compare::{
    Change, Comparison, Settings, Threshold, Verdict, compare,
};
use kata_gpu_report::analysis::loaded::{Loaded, load};
use kata_gpu_report::analysis::metrics::{Metrics, metrics};
use kata_gpu_report::analysis::statistics::Summary;
use kata_gpu_report::data::boot_dir::find_named;
use kata_gpu_report::data::text::{Ink, Screen};
use kata_gpu_report::terminal::progress_line::Progress;
use kata_gpu_report::terminal::stdout::print;
use kata_gpu_report::views::grid::{Grid, Set, signed, time};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Number of boots from which their intervals take a second or more.
const MANY: usize = 1000;
/// Most steps that are printed, those that grew most; the JSON form has all.
const MAX_STEPS: usize = 15;

/// Compare the milestones, phases and steps of two boots or two sets of boots.
#[derive(clap::Args, Debug)]
#[command(after_help = include_str!("compare/help.txt"))]
pub struct Args {
    /// The earlier boot: a file, or the start of a boot id; with --runs a directory.
    a: PathBuf,
    /// The later boot.
    b: PathBuf,
    /// Compare A and B as directories with many boots each.
    #[arg(long)]
    runs: bool,
    #[command(flatten)]
    dir: BootDir,
    /// Growth that is too much: a part (5%) or a duration (200ms).
    #[arg(long, default_value = "5%")]
    threshold: Threshold,
    /// Milestone that counts for the exit status (can be given several times) [default: all].
    #[arg(long, value_name = "MILESTONE")]
    gate: Vec<String>,
    /// Seed of the bootstrap.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Print one JSON object; times in ns.
    #[arg(long)]
    json: bool,
}

/// Runs `compare`. Exit status: 1 if a milestone is slower.
pub fn run(args: &Args, screen: &Screen) -> Result<ExitCode> {
    let (text, worse) = compared(args, screen).context("cannot compare")?;
    print(&text)?;
    Ok(ExitCode::from(u8::from(worse)))
}

/// The page or its JSON form, and whether the gate is closed.
pub fn compared(args: &Args, screen: &Screen) -> Result<(String, bool)> {
    let mut unread = Vec::new();
    let mut side = |path: &Path| -> Result<Vec<Metrics>> {
        if !args.runs {
            let path = find_named(Some(&path.display().to_string()), &args.dir.dir)?;
            let Loaded { file, boot } = load(&path, None)?;
            return Ok(vec![metrics(&boot, &file)]);
        }
        let mut boots = Vec::new();
        unread.extend(each_boot(path, |boot| boots.push(boot))?);
        Ok(boots)
    };
    let (a, b) = (side(&args.a)?, side(&args.b)?);
    let settings = Settings {
        threshold: args.threshold,
        seed: args.seed,
        gate: args.gate.clone(),
    };
    let mut progress = Progress::start();
    if a.len() + b.len() > MANY {
        progress.show_now(&format!(
            "computing intervals of {} and {} boots",
            a.len(),
            b.len()
        ));
    }
    let mut comparison = compare(&a, &b, &settings)?;
    comparison
        .notes
        .extend(unread.into_iter().map(|why| format!("not read: {why}")));
    let worse = !comparison.worse.is_empty();
    let text = if args.json {
        json(&comparison)?
    } else {
        page(&comparison, screen)
    };
    Ok((text, worse))
}

/// The comparison as text.
fn page(comparison: &Comparison, screen: &Screen) -> String {
    let mut out = Vec::new();
    let boots = |n: usize, failed: usize| {
        format!(
            "{n} boot(s){}",
            if failed > 0 {
                format!(", {failed} with failures")
            } else {
                String::new()
            }
        )
    };
    let (a, b) = (
        boots(comparison.boots_a, comparison.failed_a),
        boots(comparison.boots_b, comparison.failed_b),
    );
    out.push(format!("before: {a}; now: {b}"));
    let sets = comparison.boots_a + comparison.boots_b > 2;
    for (title, changes) in [
        ("MILESTONE", &comparison.milestones),
        ("PHASE", &comparison.phases),
        ("STEP", &comparison.steps),
    ] {
        out.push(String::new());
        let most = if title == "STEP" {
            MAX_STEPS
        } else {
            changes.len()
        };
        out.extend(
            table(title, &changes.iter().take(most).collect::<Vec<_>>(), sets).lines(screen),
        );
        if changes.len() > most {
            out.push(format!(
                "and {} that grew less: --json has all",
                changes.len() - most
            ));
        }
    }
    out.push(String::new());
    if comparison.worse.is_empty() {
        out.push(screen.paint(Ink::Good, "no milestone is slower"));
    } else {
        out.extend(
            comparison
                .worse
                .iter()
                .map(|worse| screen.paint(Ink::Error, worse)),
        );
    }
    out.extend(comparison.notes.iter().map(|note| screen.note(note)));
    out.join("\n") + "\n"
}

/// `sets`: a side has more than one boot, so the table has intervals beside medians.
fn table(title: &'static str, changes: &[&Change], sets: bool) -> Grid {
    let right = Set::Right;
    let columns = [
        (title, Set::Left),
        (if sets { "MEDIAN" } else { "BEFORE" }, right),
        ("NOW", right),
        ("CHANGE", right),
        ("", right),
        ("VERDICT", Set::Left),
        ("95 % INTERVAL", right),
        ("P95", right),
        ("P95 NOW", right),
    ];
    let kept = if sets {
        columns.len()
    } else {
        columns.len() - 3
    };
    let mut grid = Grid::new(columns.get(..kept).unwrap_or(&columns));
    for change in changes {
        let of = |side: &Option<Summary>, value: fn(&Summary) -> i64| {
            side.as_ref().map_or("-".to_string(), |s| time(value(s)))
        };
        let part = change
            .difference_ns
            .zip(change.a)
            .filter(|(_, a)| a.median_ns != 0);
        let part = part.map(|(d, a)| format!("{:+.1} %", d as f64 * 100.0 / a.median_ns as f64));
        let (ink, verdict) = match change.verdict {
            Verdict::Same => (Ink::Plain, ""),
            Verdict::Slower => (Ink::Error, "slower"),
            Verdict::Faster => (Ink::Good, "faster"),
            Verdict::Missing => (Ink::Error, "reached by fewer boots"),
            Verdict::Unknown => (Ink::Dim, "only one has it"),
        };
        grid.row(
            ink,
            vec![
                change.name.clone(),
                of(&change.a, |s| s.median_ns),
                of(&change.b, |s| s.median_ns),
                change.difference_ns.map_or("-".to_string(), signed),
                part.unwrap_or_default(),
                verdict.to_string(),
                change.interval_ns.map_or("-".to_string(), |(low, high)| {
                    format!("{} .. {}", signed(low), signed(high))
                }),
                of(&change.a, |s| s.p95_ns),
                of(&change.b, |s| s.p95_ns),
            ],
        );
    }
    grid
}
