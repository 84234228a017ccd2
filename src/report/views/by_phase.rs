//! `show --by phase`: a boot in the order in which it happened, phase by phase, and the cures that
//! would have made it shorter.

use super::grid::{Grid, SHORT_NS, Set, time};
use crate::analysis::chapters::{Cause, Chapter, Line, chapters};
use crate::analysis::cures::{Cure, cures};
use crate::analysis::held_up::{HeldUp, held_up};
use crate::boot::model::Boot;
use crate::boot::timeline::Window;
use crate::data::text::{Ink, Screen, seconds};
use crate::data::units::{histogram, size};
use serde::Serialize;

/// Columns of a text outside a terminal.
const WIDTH: usize = 100;
/// Columns in front of a phase's details.
const INDENT: usize = 28;
const PART_OF_MEANS: &str =
    "a of b: the rest of a step's b s is in steps inside it, or after the end";
/// Rest from which on both are shown.
const REST_NS: u64 = 20_000_000;
/// Most steps that are named for a phase; the JSON form has all.
const MAX_STEPS: usize = 20;

/// The account of one window by phase.
#[derive(Serialize)]
pub struct ByPhase {
    pub chapters: Vec<Chapter>,
    pub held_up: Vec<HeldUp>,
    pub cures: Vec<Cure>,
}

impl ByPhase {
    pub fn new(boot: &Boot, window: &Window) -> Self {
        Self {
            chapters: chapters(boot, window),
            held_up: held_up(&boot.timeline, window),
            cures: cures(&boot.timeline, window),
        }
    }
}

/// The phases, each with its steps below.
pub fn lines(account: &ByPhase, screen: &Screen) -> Vec<String> {
    let right = Set::Right;
    let mut grid = Grid::new(&[
        ("AT", right),
        ("TOOK", right),
        ("SOONER", right),
        ("WHAT", Set::Left),
    ]);
    for chapter in &account.chapters {
        let cells = vec![
            time(chapter.at_ns),
            seconds(chapter.time.wall_ns),
            sooner(chapter),
            chapter.phase.to_string(),
        ];
        grid.row(Ink::Bold, cells);
    }
    let mut table = grid.lines(screen).into_iter();
    let mut out: Vec<String> = table.next().into_iter().collect();
    for (line, chapter) in table.zip(&account.chapters) {
        out.push(line);
        out.extend(details(chapter, screen.width.unwrap_or(WIDTH)));
    }
    let mut lines = account.chapters.iter().flat_map(|chapter| &chapter.lines);
    if lines.any(|line| is_long(line) && has_rest(line)) {
        out.push(screen.paint(Ink::Dim, PART_OF_MEANS));
    }
    out
}

/// How much sooner the end would have come: a range where orders of steps are only assumed.
fn sooner(chapter: &Chapter) -> String {
    let (least, most) = (chapter.sooner_ns, chapter.sooner_at_most_ns);
    match seconds(least) == seconds(most) {
        true => seconds(least),
        false => format!("{} to {}", seconds(least), seconds(most)),
    }
}

/// The cures, below the page.
pub fn cure_lines(cures: &[Cure], screen: &Screen) -> Vec<String> {
    if cures.is_empty() {
        return Vec::new();
    }
    let mut grid = Grid::new(&[
        ("SOONER", Set::Right),
        ("RULE", Set::Left),
        ("AGAINST", Set::Left),
    ]);
    for cure in cures {
        let cells = vec![seconds(cure.sooner_ns), cure.rule.into(), cure.title.into()];
        grid.row(Ink::Plain, cells);
    }
    let mut out = vec![String::new(), "Cures, each by itself:".to_string()];
    out.extend(grid.lines(screen));
    let host = "which of them this host lacks: kata-gpu-boot doctor";
    out.push(screen.paint(Ink::Dim, host));
    out
}

fn is_long(line: &Line) -> bool {
    line.took_ns >= SHORT_NS || line.failed || line.open || line.waiting
}

/// Whether a part of the step's time worth showing does not count here.
fn has_rest(line: &Line) -> bool {
    !line.waiting && line.whole_ns.saturating_sub(line.took_ns) >= REST_NS
}

/// `1.121`, or `1.121 of 7.240` with such a part.
fn part(line: &Line) -> String {
    let took = seconds(line.took_ns);
    match has_rest(line) {
        true => format!("{took} of {}", seconds(line.whole_ns)),
        false => took,
    }
}

/// The steps of a phase with their times, wrapped; GPUs with the same steps stand together.
fn details(chapter: &Chapter, width: usize) -> Vec<String> {
    let named: Vec<&Line> = chapter
        .lines
        .iter()
        .filter(|line| is_long(line))
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
        pieces.push(format!("{steps}{gpu}{}{}", part(line), state(line)));
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
