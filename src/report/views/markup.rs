//! Parts of the page: the headline, and the signs of milestones and marks.

use super::rows::Tone;
use super::waterfall::{Mark, Waterfall};
use crate::boot::intervals::{length, ns};
use crate::boot::model::Gpu;
use crate::data::text::{printable, seconds};
use kata_gpu_wire::names;

fn gpu_list(gpus: &[&Gpu]) -> String {
    let named: Vec<String> = gpus
        .iter()
        .take(8)
        .map(|g| g.index.map_or(g.address.to_string(), |i| i.to_string()))
        .collect();
    let more = gpus.len().saturating_sub(named.len());
    format!(
        "GPU {}{}",
        named.join(", "),
        if more > 0 {
            format!(" and {more} more")
        } else {
            String::new()
        }
    )
}

/// Result of a boot in a sentence.
pub fn headline(timeline: &Waterfall) -> String {
    let boot = &timeline.boot;
    let failed: Vec<&Gpu> = boot.failed_gpus().collect();
    let open: Vec<&Gpu> = boot
        .gpus
        .iter()
        .filter(|g| g.failed.is_none() && g.usable.is_none())
        .collect();
    let usable = boot.gpus.len() - failed.len() - open.len();
    let all = boot.gpus.len();
    if all == 0 {
        return "No GPU in this boot".to_string();
    }
    let when = boot
        .settled_ns
        .map(|ns| format!(" {} s after kernel start", seconds(ns)))
        .unwrap_or_default();
    let mut text = match (usable, all) {
        (1, 1) => format!("1 GPU usable{when}"),
        (usable, all) if usable == all => format!("All {all} GPUs usable{when}"),
        (usable, all) => format!("{usable} of {all} GPUs usable{when}"),
    };
    if !failed.is_empty() {
        text.push_str(&format!("; {} failed", gpu_list(&failed)));
    }
    if let [first, ..] = open.as_slice() {
        let step = first.still.as_ref().map_or(String::new(), |still| {
            format!(
                ": in {} for {} s",
                printable(&still.step),
                seconds(length(ns(still.since_ns), timeline.end_ns))
            )
        });
        text.push_str(&format!("; {} not yet{step}", gpu_list(&open)));
    }
    text
}

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
