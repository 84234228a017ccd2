//! Report of an import, for people and for programs: recognised and skipped lines per file, and
//! relations of the clocks.

use super::choose::Source;
use super::clocks::{Clocks, Note};
use super::item::{Count, Skip, cut};
use crate::data::boot_file::{Imported, ImportedClock, ImportedFile};
use crate::data::imported_record::Format;
use crate::data::text::{Ink, Screen, error_bound, printable};
use serde::Serialize;

/// Most files and notes that the boot's file lists: its line has a limit.
const MAX_TOLD: usize = 12;
/// Longest name or note in the boot's file.
const MAX_NOTE: usize = 300;

/// Report of one import.
#[derive(Debug, Default, Serialize)]
pub struct Report {
    pub boot_id: String,
    pub records: usize,
    /// Meaning of 0 on the boot's clock.
    pub zero: String,
    /// Path of the written file.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub output: Option<String>,
    pub files: Vec<File>,
    pub clocks: Vec<ImportedClock>,
    pub notes: Vec<String>,
}

#[derive(Debug, Serialize)]
pub struct File {
    pub file: String,
    pub format: Format,
    #[serde(flatten)]
    pub count: Count,
}

/// The clocks' relations, in the form that is written down.
pub fn clocks(clocks: &Clocks) -> Vec<ImportedClock> {
    let one = |note: &Note| ImportedClock {
        clock: note.clock.to_string(),
        by: note.by.clone(),
        error_ns: note.error_ns,
    };
    clocks.notes.iter().map(one).collect()
}

/// The part that goes into the boot's file.
pub fn imported(sources: &[Source], clocks: &Clocks, notes: &[String]) -> Imported {
    let skipped = |count: &Count| {
        count
            .skipped
            .iter()
            .filter(|(why, _)| **why != Skip::Empty)
            .map(|(_, n)| *n)
            .fold(0, u64::saturating_add)
    };
    let file = |source: &Source| ImportedFile {
        file: cut(&source.name, MAX_NOTE),
        format: source.format.to_string(),
        lines: source.count.lines,
        recognised: source.count.recognised,
        skipped: skipped(&source.count),
    };
    Imported {
        zero: cut(&clocks.zero, MAX_NOTE),
        files: sources.iter().take(MAX_TOLD).map(file).collect(),
        clocks: self::clocks(clocks),
        notes: notes
            .iter()
            .take(MAX_TOLD)
            .map(|n| cut(n, MAX_NOTE))
            .collect(),
    }
}

/// The report as lines.
pub fn lines(report: &Report, screen: &Screen) -> Vec<String> {
    let mut out = Vec::new();
    for file in &report.files {
        let head = format!(
            "{}: {}, {} of {} lines recognised",
            printable(&file.file),
            file.format,
            file.count.recognised,
            file.count.lines
        );
        out.push(screen.paint(Ink::Bold, &head));
        for (why, n) in &file.count.skipped {
            out.push(screen.paint(Ink::Dim, &format!("    {n:>8} skipped: {}", why.text())));
        }
        if file.count.backwards > 0 {
            out.push(screen.paint(
                Ink::Dim,
                &format!(
                    "    {:>8} stamp(s) earlier than the one before",
                    file.count.backwards
                ),
            ));
        }
        if let Some(cut) = &file.count.cut {
            out.push(screen.paint(
                Ink::Warning,
                &format!("    not read to its end: {}", printable(cut)),
            ));
        }
    }
    out.push(format!("0 is {}", printable(&report.zero)));
    for clock in &report.clocks {
        out.push(format!(
            "{:<7} clock {}: {}",
            clock.clock,
            error_bound(clock.error_ns),
            printable(&clock.by)
        ));
    }
    out.extend(
        report
            .notes
            .iter()
            .map(|note| screen.paint(Ink::Warning, &printable(note))),
    );
    let written = report.output.as_ref().map_or(String::new(), |path| {
        format!(", written to {}", printable(path))
    });
    out.push(format!(
        "{} record(s) of boot {}{written}",
        report.records, report.boot_id
    ));
    out
}
