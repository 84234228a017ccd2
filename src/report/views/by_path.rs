//! `show --by path`: the chain of steps that set the end, and the gain of shortening each.

use super::grid::{Grid, SHORT_NS, Set, time};
use crate::analysis::critical_path::{CriticalPath, Gain, Piece};
use crate::boot::draft::LAST_RECORD;
use crate::data::text::{Ink, Screen, seconds};

/// Most pieces of the path that are printed; the JSON form has all.
const MAX_PIECES: usize = 200;

/// The path, and below it the largest gains.
pub fn lines(found: &CriticalPath, screen: &Screen) -> Vec<String> {
    let (shown, short): (Vec<&Piece>, Vec<&Piece>) = found
        .path
        .iter()
        .partition(|piece| piece.took_ns >= SHORT_NS);
    let mut out = path(shown.get(..MAX_PIECES).unwrap_or(&shown)).lines(screen);
    if shown.len() > MAX_PIECES {
        let more = shown.len() - MAX_PIECES;
        out.push(format!("and {more} more: --json has all"));
    }
    if !short.is_empty() {
        let together = short
            .iter()
            .map(|piece| piece.took_ns)
            .fold(0, u64::saturating_add);
        let line = format!(
            "{} piece(s) below 1 ms are not shown, together {}",
            short.len(),
            seconds(together)
        );
        out.push(screen.paint(Ink::Dim, &line));
    }
    out.push(String::new());
    let (to, at) = (&found.to, time(found.to_ns));
    if found.without_kind.is_empty() {
        out.push(match to.as_str() {
            LAST_RECORD => "the record ends there, and the boot had not: \
                            what would have made it shorter is not known"
                .to_string(),
            _ => format!("{to} comes at {at}: no step would have made it come earlier"),
        });
    } else {
        out.push(format!(
            "{to} comes at {at}; if these took no time, it would be earlier by:"
        ));
        out.extend(gains(found).lines(screen));
    }
    out
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
    let is_new = |gain: &&Gain| {
        !found
            .without_kind
            .iter()
            .any(|k| k.count == 1 && k.step == gain.step)
    };
    for gain in found.without_step.iter().filter(is_new) {
        row(
            gain,
            gain.gpu.map_or(gain.step.clone(), |gpu| {
                format!("{} of GPU {gpu} only", gain.step)
            }),
        );
    }
    grid
}
