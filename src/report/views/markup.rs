//! Parts of the page: the signs of milestones and marks.

use super::rows::Tone;
use super::waterfall::{Mark, Waterfall};
use crate::boot::intervals::ns;
use kata_gpu_wire::names;

/// Lines across the picture.
pub fn milestones(timeline: &Waterfall) -> Vec<(&'static str, i64)> {
    // The picture begins with the kernel where VMM and firmware are not known.
    let hidden = |name| name == "agent exec" || (name == "kernel start" && timeline.begin_ns == 0);
    let named = timeline.boot.milestones.iter().filter(|m| !hidden(m.name));
    let mut lines: Vec<(&str, i64)> = named
        .filter_map(|m| Some((m.name, ns(m.boottime_ns?))))
        .collect();
    // A single container is both the first and the last.
    lines.dedup_by_key(|(_, at)| *at);
    lines.sort_by_key(|(_, at)| *at);
    lines
}

/// The sign of a mark in a picture.
pub fn shape_of(mark: &Mark) -> &'static str {
    match (mark.name.as_str(), mark.tone) {
        (names::GPU_PUBLISHED, _) => "published",
        (names::GPU_USABLE, _) => "usable",
        (names::GPU_FAILED | names::POWER_OFF | "container.failed", _) => "failed",
        ("container.created", _) => "container",
        (names::GPU_LATE | names::GPU_XID | names::GPU_REMOVED, _) => "warning",
        (_, Tone::Plain | Tone::Good | Tone::Warning | Tone::Error) => "tick",
    }
}
