//! Rows as lines of text: the columns of the live view and of `show`.

use super::rows::{Row, Tone};
use crate::boot::gpu_name::GpuName;
use crate::data::text::{Ink, Screen, seconds, since};

/// Widths of the columns that do not stretch.
const TIME: usize = 9;
const SINCE: usize = 8;
const OWNER: usize = 6;
const GPU: usize = 15;
const TOOK: usize = 8;
/// Columns before WHAT, with the spaces between.
const BEFORE_WHAT: usize = TIME + 1 + SINCE + 2 + OWNER + 2 + GPU + 2;
/// WHAT where nothing bounds it: a longer one pushes TOOK to the right.
const WHAT_IN_PIPE: usize = 56;
/// WHAT on a wide terminal: TOOK stays where the eye finds it.
const MAX_WHAT: usize = 88;
/// WHAT never gets less, so a terminal below [`MIN_WIDTH`] columns wraps by itself.
const MIN_WHAT: usize = 16;
/// Lines that one row may take on a terminal.
const MAX_LINES: usize = 4;
/// Durations from here on are worth a look.
const LONG_NS: u64 = 1_000_000_000;

/// Narrowest terminal that no line overruns.
pub const MIN_WIDTH: usize = BEFORE_WHAT + MIN_WHAT + 1 + TOOK;

/// Turns rows into lines for one kind of screen.
#[derive(Clone, Copy, Debug)]
pub struct Table {
    pub screen: Screen,
}

impl Table {
    fn what_width(&self) -> usize {
        self.screen.width.map_or(WHAT_IN_PIPE, |w| {
            w.saturating_sub(BEFORE_WHAT + 1 + TOOK)
                .clamp(MIN_WHAT, MAX_WHAT)
        })
    }

    /// The head line.
    pub fn head(&self) -> String {
        let what = self.what_width();
        let head = format!(
            "{:>TIME$} {:>SINCE$}  {:OWNER$}  {:GPU$}  {:what$} {:>TOOK$}",
            "TIME", "SINCE", "OWNER", "GPU", "WHAT", "TOOK"
        );
        self.screen.paint(Ink::Bold, &head)
    }

    /// The row as one line or, on a terminal that is too narrow for it, several. `last_ns`: the
    /// time of the row above.
    pub fn lines(&self, row: &Row, last_ns: Option<u64>) -> Vec<String> {
        let width = self.what_width();
        let mut pieces = match self.screen.width {
            Some(_) => wrap(&row.what, width),
            None => vec![row.what.clone()],
        };
        let rest = pieces.split_off(1);
        let time = format!(
            "{}{}",
            if row.approximate { "~" } else { "" },
            seconds(row.time_ns)
        );
        let gap = last_ns
            .map(|last| since(last, row.time_ns))
            .unwrap_or_default();
        let took = row.took_ns.map(seconds).unwrap_or_default();
        let paint = |ink, text: &str| self.screen.paint(ink, text);
        let mut first = format!(
            "{time:>TIME$} {}  {}  {}  {}",
            paint(Ink::Dim, &format!("{gap:>SINCE$}")),
            paint(Ink::Dim, &format!("{:OWNER$}", row.owner.name())),
            format_args!("{:GPU$}", row.gpu.map(|g| gpu_text(&g)).unwrap_or_default()),
            paint(ink(row.tone), &pieces[0]),
        );
        if !took.is_empty() {
            let pad = " ".repeat(width.saturating_sub(pieces[0].len()));
            let long = row.took_ns.is_some_and(|t| t >= LONG_NS);
            first.push_str(&format!(
                "{pad} {}",
                paint(
                    if long { Ink::Bold } else { Ink::Plain },
                    &format!("{took:>TOOK$}")
                )
            ));
        }
        let mut lines = vec![first.trim_end().to_string()];
        lines.extend(rest.into_iter().map(|piece| {
            format!(
                "{}{}",
                " ".repeat(BEFORE_WHAT),
                paint(ink(row.tone), &piece)
            )
        }));
        lines
    }
}

fn ink(tone: Tone) -> Ink {
    match tone {
        Tone::Plain => Ink::Plain,
        Tone::Good => Ink::Good,
        Tone::Warning => Ink::Warning,
        Tone::Error => Ink::Error,
    }
}

/// `3 0001:00:03.0`, with `?` for a number that is not known.
fn gpu_text(gpu: &GpuName) -> String {
    format!("{:>2} {}", gpu.number(), gpu.address)
}

/// Pieces of at most `width` characters, cut at spaces where there are any; at most [`MAX_LINES`],
/// the last one ending in `...` then.
fn wrap(text: &str, width: usize) -> Vec<String> {
    debug_assert!(text.is_ascii(), "rows are printable ASCII");
    let mut pieces = Vec::new();
    let mut rest = text;
    while rest.len() > width {
        if pieces.len() + 1 == MAX_LINES {
            pieces.push(format!("{}...", &rest[..width - 3]));
            return pieces;
        }
        let cut = rest[..=width]
            .rfind(' ')
            .filter(|at| *at > width / 2)
            .unwrap_or(width);
        pieces.push(rest[..cut].to_string());
        rest = rest[cut..].trim_start();
    }
    pieces.push(rest.to_string());
    pieces
}

#[cfg(test)]
mod tests {
    use kata_gpu_wire::catalogue::Owner;

    use super::*;

    fn row(what: &str) -> Row {
        Row {
            time_ns: 1_204_000_000,
            approximate: false,
            owner: Owner::Host,
            gpu: Some(GpuName {
                index: Some(0),
                address: "0001:00:00.0".parse().unwrap(),
            }),
            what: what.into(),
            took_ns: Some(3_000_000),
            tone: Tone::Plain,
            detail: false,
        }
    }

    #[test]
    fn no_line_is_wider_than_the_terminal() {
        for width in MIN_WIDTH..200 {
            let table = Table {
                screen: Screen {
                    width: Some(width),
                    colour: false,
                },
            };
            for what in ["short", &"word ".repeat(100), &"x".repeat(1000)] {
                let lines = table.lines(&row(what), Some(0));
                assert!(lines.len() <= MAX_LINES);
                assert!(
                    lines
                        .iter()
                        .chain([&table.head()])
                        .all(|l| l.len() <= width),
                    "width {width}: {lines:#?}"
                );
            }
        }
    }

    #[test]
    fn a_pipe_gets_everything() {
        let long = "word ".repeat(100);
        let lines = Table {
            screen: Screen::PLAIN,
        }
        .lines(&row(&long), None);
        assert_eq!(lines.len(), 1);
        assert!(lines[0].contains(&long));
    }
}
