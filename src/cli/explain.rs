//! `kata-gpu-boot explain`: a boot in the order in which it happened, phase by phase.

use super::boot_args::{BootArgs, boot_json, head, held_up, notes};
use super::coverage::sentence;
use anyhow::{Context, Result, ensure};
use kata_gpu_report::analysis::chapters::{Cause, Chapter, Line, chapters};
use kata_gpu_report::analysis::cures::{Cure, cures};
use kata_gpu_report::analysis::held_up::{HeldUp, held_up as find_held_up};
use kata_gpu_report::analysis::loaded::Loaded;
use kata_gpu_report::boot::coverage::{CoverageSummary, coverage};
use kata_gpu_report::boot::model::Boot;
use kata_gpu_report::boot::runtime_steps::{FIRST_STARTED, LAST_STARTED};
use kata_gpu_report::boot::timeline::{Timeline, Window};
use kata_gpu_report::data::text::{Ink, Screen, printable, seconds, wrap};
use kata_gpu_report::data::units::{histogram, size};
use kata_gpu_report::views::grid::{Grid, Set, signed, time};
use kata_gpu_report::views::summary::failed;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::io::Read;
use std::path::{Path, PathBuf};

/// Milestones at which the user has containers, the latest first.
const ENDS: [&str; 4] = [
    LAST_STARTED,
    FIRST_STARTED,
    "last container",
    "first container",
];
/// Columns of a text outside a terminal.
const WIDTH: usize = 100;
/// Columns in front of a phase's details.
const INDENT: usize = 28;
/// Shortest step with a name of its own: all times are printed in ms.
const SHORT_NS: u64 = 1_000_000;
/// Most steps that are named for a phase; the JSON form has all.
const MAX_STEPS: usize = 20;
/// Limit of a doctor's findings, in bytes: many times what they have.
const MAX_FINDINGS: u64 = 4 << 20;

const HELP: &str = "\
TOOK is the time in which at least one step of the phase was running; phases overlap. SOONER is how much earlier the end would come if the phase took no \
time: little for a phase beside a longer one. From the first milestone until the containers run, or --from and --to. `trace` adds what the host's kernel \
did for the guest, an import of containerd's log the time before the guest.

Below: the cures that `doctor` knows, and how much sooner this boot would have ended with each alone. Their gains do not add up: several shorten the same \
steps. HERE is what the doctor found on that host (--doctor); without that a cure may be in place already.

Examples:
  # the newest boot in this directory
  kata-gpu-boot explain
  # two boots side by side: before a cure, and after it
  kata-gpu-boot explain 5fc5 --before 0f7a --dir /var/log/boots
  # with what the doctor found on this host
  kata-gpu-boot doctor --json > doctor.json
  kata-gpu-boot explain --doctor doctor.json
  # what would be gained by phase
  kata-gpu-boot explain --json | jq '.chapters[] | {phase, sooner_ns}'";

/// Explain a boot: its phases in order, what happened in each, what each one costs.
#[derive(clap::Args, Debug)]
#[command(after_help = HELP)]
pub struct Args {
    #[command(flatten)]
    boot: BootArgs,
    /// Earlier boot to compare with: a file, or the start of a boot id.
    #[arg(long, value_name = "BOOT")]
    before: Option<String>,
    /// Findings of the boot's host: the output of `doctor --json` there.
    #[arg(long, value_name = "FILE")]
    doctor: Option<PathBuf>,
}

/// Output of `doctor --json`, as far as it is used.
#[derive(Deserialize)]
struct Findings {
    findings: Vec<Found>,
}

#[derive(Deserialize)]
struct Found {
    rule: String,
    verdict: String,
    #[serde(default)]
    cure: String,
}

/// A cure, and what the doctor says of it.
#[derive(Serialize)]
struct Advice {
    #[serde(flatten)]
    cure: Cure,
    /// Verdict of the doctor on the boot's host, where it was asked.
    #[serde(skip_serializing_if = "Option::is_none")]
    here: Option<String>,
    /// The cure in words, where the doctor found it.
    #[serde(skip_serializing_if = "String::is_empty")]
    text: String,
}

/// The account of one window.
#[derive(Serialize)]
struct Explained {
    /// Failed GPUs and containers of the whole boot, a sentence each.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    failures: Vec<String>,
    coverage: CoverageSummary,
    chapters: Vec<Chapter>,
    held_up: Vec<HeldUp>,
    cures: Vec<Advice>,
    #[serde(skip_serializing_if = "Option::is_none")]
    before: Option<Before>,
}

/// The boot that is compared with.
#[derive(Serialize)]
struct Before {
    #[serde(skip_serializing_if = "Option::is_none")]
    boot_id: Option<String>,
    coverage: CoverageSummary,
    chapters: Vec<Chapter>,
}

/// The page, or its JSON form.
pub fn text(args: &Args, screen: &Screen) -> Result<String> {
    let loaded = args.boot.load()?;
    let window = window(&args.boot, &loaded)?;
    let timeline = &loaded.boot.timeline;
    let before = args
        .before
        .clone()
        .map(|boot| earlier(args, boot))
        .transpose()?;
    let found = coverage(timeline, &window);
    let explained = Explained {
        failures: failures(&loaded.boot),
        coverage: found.summary(),
        chapters: chapters(&loaded.boot, &window),
        held_up: find_held_up(timeline, &window),
        cures: advice(
            cures(timeline, &window),
            args.doctor.as_deref().map(findings).transpose()?,
        ),
        before,
    };
    if args.boot.json {
        return boot_json(&loaded, &explained);
    }
    let mut out = vec![head(&loaded, &window), sentence(&found)];
    let lines = |failure: &String| wrap("", "    ", failure, screen.width.unwrap_or(usize::MAX));
    out.extend(
        explained
            .failures
            .iter()
            .flat_map(lines)
            .map(|line| screen.paint(Ink::Error, &line)),
    );
    out.push(String::new());
    match &explained.before {
        Some(before) => beside(&explained, before, screen, &mut out),
        None => story(&explained, screen, &mut out),
    }
    held_up(&explained.held_up, screen, &mut out);
    advise(&explained.cures, screen, &mut out);
    notes(&timeline.notes, screen, &mut out);
    Ok(out.join("\n") + "\n")
}

/// Failed GPUs and containers, each with when, where and why; for a GPU the cure as well.
fn failures(boot: &Boot) -> Vec<String> {
    let gpus = boot.gpus.iter().filter_map(|gpu| {
        let index = gpu
            .index
            .map(|index| format!(" {index}"))
            .unwrap_or_default();
        Some(format!(
            "GPU{index} {} {}",
            gpu.address,
            failed(gpu.failed.as_ref()?)
        ))
    });
    let containers = boot.containers.iter().filter_map(|container| {
        let (error, at) = (
            container.error.as_ref()?,
            container
                .at_ns
                .map(|at| format!(" at {}", seconds(at)))
                .unwrap_or_default(),
        );
        Some(format!("container {} failed{at}: {error}", container.name))
    });
    gpus.chain(containers).collect()
}

/// The window, by default until the containers run.
fn window<'a>(args: &BootArgs, loaded: &'a Loaded) -> Result<Window<'a>> {
    let timeline: &Timeline = &loaded.boot.timeline;
    let end = || {
        ENDS.into_iter()
            .find(|end| timeline.milestones.iter().any(|m| m.name == *end))
    };
    timeline.window(args.from.as_deref(), args.to.as_deref().or_else(end))
}

fn earlier(args: &Args, boot: String) -> Result<Before> {
    let boot = BootArgs {
        boot: Some(boot),
        console: None,
        ..args.boot.clone()
    };
    let loaded = boot.load()?;
    let window = window(&boot, &loaded)?;
    let timeline = &loaded.boot.timeline;
    let coverage = coverage(timeline, &window).summary();
    Ok(Before {
        coverage,
        chapters: chapters(&loaded.boot, &window),
        boot_id: loaded.boot.boot_id.clone(),
    })
}

/// The phases of one boot, each with its steps below.
fn story(explained: &Explained, screen: &Screen, out: &mut Vec<String>) {
    let right = Set::Right;
    let mut grid = Grid::new(&[
        ("AT", right),
        ("TOOK", right),
        ("SOONER", right),
        ("WHAT", Set::Left),
    ]);
    for chapter in &explained.chapters {
        let cells = vec![
            time(chapter.at_ns),
            seconds(chapter.time.wall_ns),
            seconds(chapter.sooner_ns),
            chapter.phase.to_string(),
        ];
        grid.row(Ink::Bold, cells);
    }
    let mut lines = grid.lines(screen).into_iter();
    out.extend(lines.next());
    for (line, chapter) in lines.zip(&explained.chapters) {
        out.push(line);
        out.extend(details(chapter, screen.width.unwrap_or(WIDTH)));
    }
}

/// The steps of a phase with their times, wrapped; GPUs with the same steps stand together.
fn details(chapter: &Chapter, width: usize) -> Vec<String> {
    let is_long =
        |line: &&Line| line.took_ns >= SHORT_NS || line.failed || line.open || line.waiting;
    let named: Vec<&Line> = chapter
        .lines
        .iter()
        .filter(is_long)
        .take(MAX_STEPS)
        .collect();
    let rest = chapter.lines.len() - named.len();
    let mut pieces: Vec<String> = Vec::new();
    for (at, line) in named.iter().enumerate() {
        let before = at.checked_sub(1).and_then(|before| named.get(before));
        let same = line.gpu.is_some()
            && before.is_some_and(|before| before.gpu.is_some() && before.steps == line.steps);
        let steps = if same {
            String::new()
        } else {
            format!("{} ", line.steps.join("+"))
        };
        let gpu = line
            .gpu
            .map(|gpu| format!("GPU {gpu}: "))
            .unwrap_or_default();
        pieces.push(format!(
            "{steps}{gpu}{}{}",
            seconds(line.took_ns),
            state(line)
        ));
    }
    pieces.extend((rest > 0 && !named.is_empty()).then(|| format!("and {rest} more")));
    let mut out = wrapped(pieces, width);
    for line in named {
        let gpu = line
            .gpu
            .map(|gpu| format!(" (GPU {gpu})"))
            .unwrap_or_default();
        let causes = line.causes.iter().filter(|cause| cause.took_ns >= SHORT_NS);
        out.extend(causes.flat_map(|cause| wrapped(seen(cause, &gpu), width)));
    }
    out
}

/// `host: vmm.map-bar of 0000:41:00.0 (GPU 0) 2.010, 128 GiB, 64 calls, ..`: what the trace saw.
fn seen(cause: &Cause, gpu: &str) -> Vec<String> {
    let function = cause
        .function
        .map(|function| format!(" of {function}"))
        .unwrap_or_default();
    let mut pieces = vec![format!(
        "host: {}{function}{gpu} {}",
        cause.step,
        seconds(cause.took_ns)
    )];
    pieces.extend((cause.count > 1).then(|| format!("{} times", cause.count)));
    pieces.extend((cause.bytes > 0).then(|| size(cause.bytes)));
    pieces.extend((cause.calls > 0).then(|| format!("{} calls", cause.calls)));
    pieces.extend(
        (!cause.pages_a_call.is_empty())
            .then(|| format!("pages a call {}", histogram(&cause.pages_a_call))),
    );
    pieces.extend((!cause.thread.is_empty()).then(|| format!("by {}", cause.thread)));
    pieces
}

fn wrapped(pieces: Vec<String>, width: usize) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    let mut pieces = pieces.into_iter().peekable();
    while let Some(mut piece) = pieces.next() {
        piece.push_str(if pieces.peek().is_some() { "," } else { "" });
        match lines
            .last_mut()
            .filter(|line| line.len() + 1 + piece.len() <= width)
        {
            Some(line) => *line = format!("{line} {piece}"),
            None => lines.push(format!("{:INDENT$}{piece}", "")),
        }
    }
    lines
}

fn state(line: &Line) -> &'static str {
    match (line.failed, line.open, line.waiting) {
        (true, ..) => " (failed)",
        (_, true, _) => " (still going on)",
        (.., true) => " (only waited)",
        _ => "",
    }
}

/// Reads what `doctor --json` printed.
fn findings(path: &Path) -> Result<BTreeMap<String, Found>> {
    let mut text = String::new();
    let file = std::fs::File::open(path).with_context(|| format!("open {}", path.display()))?;
    file.take(MAX_FINDINGS + 1)
        .read_to_string(&mut text)
        .with_context(|| format!("read {}", path.display()))?;
    ensure!(
        text.len() as u64 <= MAX_FINDINGS,
        "{}: longer than {MAX_FINDINGS} bytes: give the output of `doctor --json`",
        path.display()
    );
    let found: Findings = serde_json::from_str(&text).with_context(|| {
        format!(
            "{}: not the output of `kata-gpu-boot doctor --json`",
            path.display()
        )
    })?;
    Ok(found
        .findings
        .into_iter()
        .map(|found| (found.rule.clone(), found))
        .collect())
}

/// Cures with the doctor's verdict; none that is in place already.
fn advice(cures: Vec<Cure>, found: Option<BTreeMap<String, Found>>) -> Vec<Advice> {
    let advice = |cure: Cure| {
        let said = found.as_ref().and_then(|found| found.get(cure.rule));
        Advice {
            here: said.map(|f| printable(&f.verdict)),
            text: said.map(|f| printable(&f.cure)).unwrap_or_default(),
            cure,
        }
    };
    cures
        .into_iter()
        .map(advice)
        .filter(|advice| advice.here.as_deref() != Some("fine"))
        .collect()
}

fn advise(cures: &[Advice], screen: &Screen, out: &mut Vec<String>) {
    if cures.is_empty() {
        return;
    }
    out.extend([String::new(), "Cures, each alone:".to_string()]);
    let asked = cures.iter().any(|advice| advice.here.is_some());
    let columns = [
        ("SOONER", Set::Right),
        ("HERE", Set::Left),
        ("RULE", Set::Left),
        ("AGAINST", Set::Left),
    ];
    let kept: Vec<_> = columns
        .into_iter()
        .filter(|(head, _)| asked || *head != "HERE")
        .collect();
    let mut grid = Grid::new(&kept);
    for advice in cures {
        let here = asked.then(|| advice.here.clone().unwrap_or_else(|| "-".into()));
        let (cure, ink) = (
            &advice.cure,
            if here.as_deref() == Some("found") {
                Ink::Warning
            } else {
                Ink::Plain
            },
        );
        let cells = [
            Some(seconds(cure.sooner_ns)),
            here,
            Some(cure.rule.to_string()),
            Some(cure.title.to_string()),
        ];
        grid.row(ink, cells.into_iter().flatten().collect());
    }
    out.extend(grid.lines(screen));
    out.extend(
        cures
            .iter()
            .filter(|a| !a.text.is_empty())
            .map(|a| format!("{}: {}", a.cure.rule, a.text)),
    );
    if !asked {
        out.push(screen.paint(
            Ink::Dim,
            "whether the host has them already: `kata-gpu-boot doctor`, then --doctor FILE",
        ));
    }
}

/// The phases of two boots side by side.
fn beside(now: &Explained, before: &Before, screen: &Screen, out: &mut Vec<String>) {
    let right = Set::Right;
    let mut grid = Grid::new(&[
        ("BEFORE", right),
        ("NOW", right),
        ("CHANGE", right),
        ("WHAT", Set::Left),
    ]);
    let mut row = |ink: Ink, before: Option<u64>, now: Option<u64>, what: &str| {
        let cell = |took: Option<u64>| took.map_or("-".to_string(), seconds);
        let (then_ns, now_ns) = (before.unwrap_or(0), now.unwrap_or(0));
        let change = i64::try_from(i128::from(now_ns) - i128::from(then_ns)).unwrap_or(i64::MAX);
        grid.row(
            ink,
            vec![cell(before), cell(now), signed(change), what.to_string()],
        );
    };
    let took = |chapters: &[Chapter], phase: &str| {
        chapters
            .iter()
            .find(|c| c.phase == phase)
            .map(|c| c.time.wall_ns)
    };
    let mut phases: Vec<&str> = now.chapters.iter().map(|c| c.phase).collect();
    // A phase that only the earlier boot has comes after the one that it came after there.
    let mut place = 0;
    for chapter in &before.chapters {
        match phases.iter().position(|phase| *phase == chapter.phase) {
            Some(at) => place = at + 1,
            None => {
                phases.insert(place, chapter.phase);
                place += 1;
            }
        }
    }
    for phase in phases {
        row(
            Ink::Plain,
            took(&before.chapters, phase),
            took(&now.chapters, phase),
            phase,
        );
    }
    let (then, window) = (&before.coverage, &now.coverage);
    row(
        Ink::Plain,
        Some(then.unexplained_ns),
        Some(window.unexplained_ns),
        "unexplained",
    );
    row(
        Ink::Bold,
        Some(then.wall_ns),
        Some(window.wall_ns),
        &format!("{} .. {}", window.from, window.to),
    );
    out.extend(grid.lines(screen));
    if (&then.from, &then.to) != (&window.from, &window.to) {
        out.push(screen.paint(
            Ink::Warning,
            &format!("the earlier boot is accounted for from {} to {}: give --from and --to that both have", then.from, then.to),
        ));
    }
}
