//! The verdict as lines: what happened, why, what to do.

use crate::analysis::verdict::{Finding, Verdict};
use crate::data::text::{Ink, Screen, wrap};
use crate::severity::Severity;
use kata_gpu_wire::failure::Sure;

/// The lines, wrapped at the screen's width.
pub fn lines(verdict: &Verdict, screen: &Screen) -> Vec<String> {
    let mut out = wrapped(Ink::Bold, "", "    ", &verdict.headline, screen);
    for finding in &verdict.findings {
        out.extend(finding_lines(finding, screen));
    }
    out
}

/// A finding: its sentence, its cure, and the words that it was found by.
pub fn finding_lines(finding: &Finding, screen: &Screen) -> Vec<String> {
    let ink = match finding.severity {
        Severity::Error => Ink::Error,
        Severity::Warning => Ink::Warning,
        Severity::Note => Ink::Plain,
    };
    let mut out = wrapped(ink, "", "    ", &finding.text, screen);
    out.extend(
        cure_text(finding)
            .iter()
            .flat_map(|cure| wrapped(Ink::Plain, "  ", "    ", cure, screen)),
    );
    let words = finding
        .words
        .as_ref()
        .map(|words| format!("logged: \"{words}\""));
    let nearby = finding
        .nearby
        .as_ref()
        .map(|nearby| format!("at that time: {nearby}"));
    for text in [words, nearby].into_iter().flatten() {
        out.extend(wrapped(Ink::Dim, "  ", "    ", &text, screen));
    }
    out
}

/// `cure: put .. into the image (image)`; what is not sure says so.
pub fn cure_text(finding: &Finding) -> Option<String> {
    let cure = finding.cure.as_ref()?;
    let unsure = finding.sure.as_deref() == Some(Sure::Unsure.name());
    let sure = finding
        .sure
        .as_deref()
        .filter(|sure| *sure != Sure::Certain.name());
    let aside: Vec<&str> = finding.whose.as_deref().into_iter().chain(sure).collect();
    let head = if unsure { "next" } else { "cure" };
    Some(match aside.is_empty() {
        true => format!("{head}: {cure}"),
        false => format!("{head}: {cure} ({})", aside.join(", ")),
    })
}

fn wrapped(ink: Ink, first: &str, further: &str, text: &str, screen: &Screen) -> Vec<String> {
    let width = screen.width.unwrap_or(usize::MAX);
    let lines = wrap(first, further, text, width).into_iter();
    lines.map(|line| screen.paint(ink, &line)).collect()
}
