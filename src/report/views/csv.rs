//! `--csv`: one row per step, then one per report of a GPU's health, for spreadsheets and data
//! frames. RFC 4180: CRLF, quotes where needed.
//!
//! Times in ns since kernel start, negative for VMM and firmware; an empty cell is what is not
//! known. A text that a spreadsheet would take for a formula gets an apostrophe.

use super::rows::Tone;
use super::waterfall::{Mark, Step, Waterfall};
use crate::data::text::wall_clock;
use std::io::{self, Write};

const HEAD: [&str; 18] = [
    "boot_id",
    "span",
    "step",
    "side",
    "gpu_index",
    "gpu_address",
    "begin_ns",
    "end_ns",
    "took_ns",
    "open",
    "approximate",
    "begin_wall",
    "wall_error_ns",
    "parent",
    "after",
    "critical",
    "error",
    "fields",
];

/// The whole file.
pub fn write(timeline: &Waterfall, out: &mut dyn Write) -> io::Result<()> {
    write!(out, "{}\r\n", HEAD.join(","))?;
    for step in &timeline.steps {
        write!(
            out,
            "{}\r\n",
            cells(timeline, step).map(|cell| quoted(&cell)).join(",")
        )?;
    }
    for mark in timeline.marks.iter().filter(|mark| mark.is_report()) {
        write!(
            out,
            "{}\r\n",
            of_report(timeline, mark)
                .map(|cell| quoted(&cell))
                .join(",")
        )?;
    }
    Ok(())
}

/// A report as a step that takes no time.
fn of_report(timeline: &Waterfall, mark: &Mark) -> [String; HEAD.len()] {
    let (wall, at) = (timeline.wall_at(mark.at_ns), mark.at_ns.to_string());
    let fields: Vec<String> = mark
        .facts()
        .map(|(key, value)| format!("{key}={value}"))
        .collect();
    [
        timeline.boot.boot_id.clone().unwrap_or_default(),
        String::new(),
        text(&mark.name),
        mark.side.name().to_string(),
        number(mark.gpu.and_then(|gpu| gpu.index)),
        mark.gpu
            .map(|gpu| gpu.address.to_string())
            .unwrap_or_default(),
        at.clone(),
        at,
        0.to_string(),
        false.to_string(),
        mark.approximate.to_string(),
        wall.map(|w| wall_clock(w.realtime_ns)).unwrap_or_default(),
        number(wall.map(|w| w.error_ns)),
        number(mark.parent),
        String::new(),
        false.to_string(),
        text(if mark.tone == Tone::Error {
            &mark.text
        } else {
            ""
        }),
        text(&fields.join("; ")),
    ]
}

fn number<N: ToString>(number: Option<N>) -> String {
    number.map(|n| n.to_string()).unwrap_or_default()
}

fn cells(timeline: &Waterfall, step: &Step) -> [String; HEAD.len()] {
    let wall = timeline.wall_at(step.begin_ns).filter(|_| !step.begin_lost);
    let fields: Vec<String> = step
        .fields
        .iter()
        .map(|(key, value)| format!("{key}={value}"))
        .collect();
    [
        timeline.boot.boot_id.clone().unwrap_or_default(),
        number(step.id),
        text(&step.name),
        step.side.name().to_string(),
        number(step.gpu.and_then(|gpu| gpu.index)),
        step.gpu
            .map(|gpu| gpu.address.to_string())
            .unwrap_or_default(),
        number((!step.begin_lost).then_some(step.begin_ns)),
        number(step.end_ns),
        number(step.took_ns()),
        step.end_ns.is_none().to_string(),
        step.approximate.to_string(),
        wall.map(|w| wall_clock(w.realtime_ns)).unwrap_or_default(),
        number(wall.map(|w| w.error_ns)),
        number(step.parent),
        step.after
            .iter()
            .map(u64::to_string)
            .collect::<Vec<_>>()
            .join(" "),
        step.critical.to_string(),
        text(step.error.as_deref().unwrap_or_default()),
        text(&fields.join("; ")),
    ]
}

/// A guest's text: no spreadsheet calculates it.
fn text(text: &str) -> String {
    let formula = text.starts_with(['=', '+', '-', '@']);
    format!("{}{text}", if formula { "'" } else { "" })
}

fn quoted(cell: &str) -> String {
    if cell.contains([',', '"', '\r', '\n']) {
        format!("\"{}\"", cell.replace('"', "\"\""))
    } else {
        cell.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cells_are_quoted_and_no_formula_gets_through() {
        assert_eq!(quoted("a"), "a");
        assert_eq!(quoted("a,\"b\""), "\"a,\"\"b\"\"\"");
        assert_eq!(
            (text("=1+1"), text("@x"), text("a=b")),
            ("'=1+1".to_string(), "'@x".to_string(), "a=b".to_string())
        );
    }
}
