//! What a boot came to: one line per GPU, the containers, the milestones, and everything that is wrong with the record of it.

use super::model::{Boot, Gpu, Step};
use super::text::{Ink, Screen, error_bound, printable, seconds, wall_clock};

/// The summary as lines.
pub fn summary(boot: &Boot, screen: &Screen) -> Vec<String> {
    let mut out = Vec::new();
    let bold = |text: &str| screen.paint(Ink::Bold, text);
    if !boot.gpus.is_empty() {
        out.push(bold("GPU  ADDRESS              FOUND           ENABLED             BOUND         PUBLISHED            USABLE"));
        for gpu in &boot.gpus {
            out.extend(gpu_lines(gpu, screen));
        }
        out.push(screen.paint(Ink::Dim, "seconds since kernel start (and how long the step took; published: since bound)"));
    } else {
        out.push("no GPU in this boot".to_string());
    }
    if !boot.containers.is_empty() {
        out.push(String::new());
        out.push(bold("CONTAINER             TIME  TRIES  DEVICES"));
        for container in &boot.containers {
            let time = container.at_ns.map_or("?".to_string(), |t| approximately(t, container.approximate));
            let tries = container.tries.map_or("?".to_string(), |t| t.to_string());
            out.push(format!("{:<16} {time:>9}  {tries:>5}  {}", container.name, container.devices));
            if let Some(error) = &container.error {
                out.push(screen.paint(Ink::Error, &format!("    failed: {error}")));
            }
        }
    }
    out.push(String::new());
    out.push(bold("MILESTONE             TIME  WALL CLOCK (UTC)"));
    for milestone in &boot.milestones {
        let time = milestone.boottime_ns.map_or("-".to_string(), |t| approximately(t, milestone.approximate));
        let wall = milestone.wall.map(|w| format!("{} {}", wall_clock(w.realtime_ns), error_bound(w.error_ns))).unwrap_or_default();
        out.push(format!("{:<16} {time:>9}  {wall}", milestone.name).trim_end().to_string());
    }
    if boot.milestones.iter().any(|m| m.approximate) {
        out.push(screen.paint(Ink::Dim, "~ approximate: the stream has no clock event to place the agent's lines by"));
    }
    let complaints = complaints(boot);
    if !complaints.is_empty() {
        out.push(String::new());
        out.extend(complaints.iter().map(|c| screen.paint(Ink::Warning, c)));
    }
    out
}

fn approximately(time_ns: u64, approximate: bool) -> String {
    format!("{}{}", if approximate { "~" } else { "" }, seconds(time_ns))
}

fn gpu_lines(gpu: &Gpu, screen: &Screen) -> Vec<String> {
    let step = |step: Option<Step>| match step {
        None => "-".to_string(),
        Some(Step { at_ns, took_ns: None }) => seconds(at_ns),
        Some(Step { at_ns, took_ns: Some(took) }) => format!("{} ({})", seconds(at_ns), seconds(took)),
    };
    let usable = match (&gpu.failed, &gpu.still) {
        (Some(_), _) => screen.paint(Ink::Error, &format!("{:>17}", "failed")),
        (None, Some(_)) if gpu.usable.is_none() => screen.paint(Ink::Warning, &format!("{:>17}", "not yet")),
        (None, _) => format!("{:>17}", step(gpu.usable)),
    };
    let mut lines = vec![format!(
        "{:>3}  {:<16} {:>9} {:>17} {:>17} {:>17} {usable}",
        gpu.index.map_or("?".to_string(), |i| i.to_string()),
        gpu.address.to_string(),
        gpu.found_ns.map_or("-".to_string(), seconds),
        step(gpu.enabled),
        step(gpu.bound),
        step(gpu.published),
    )];
    if let Some(failure) = &gpu.failed {
        let text = format!("     failed at {} in {}: {}", seconds(failure.at_ns), printable(&failure.step), printable(&failure.reason));
        lines.push(screen.paint(Ink::Error, &text));
    } else if let (Some(still), None) = (&gpu.still, gpu.usable) {
        let text = format!("     still in {} since {}", printable(&still.step), seconds(still.since_ns));
        lines.push(screen.paint(Ink::Warning, &text));
    }
    lines
}

/// What makes this picture of the boot incomplete or bad.
pub fn complaints(boot: &Boot) -> Vec<String> {
    let mut out = Vec::new();
    if let Some(reason) = &boot.power_off {
        out.push(format!("the guest powered off: {}", printable(reason)));
    }
    if boot.settled_ns.is_none() && !boot.gpus.is_empty() {
        out.push("not settled: some GPU was neither usable nor failed when the stream ended".to_string());
    }
    if boot.lost.records > 0 {
        let gaps: Vec<String> = boot.lost.gaps.iter().map(|(a, b)| if a == b { a.to_string() } else { format!("{a}-{b}") }).collect();
        out.push(format!("{} record(s) missing: seq {}", boot.lost.records, gaps.join(", ")));
    }
    if boot.lost.reported_by_guest > 0 {
        out.push(format!("the guest says that it dropped {} record(s)", boot.lost.reported_by_guest));
    }
    if boot.garbage_lines > 0 {
        out.push(format!("{} line(s) from the guest were not of the format and were dropped", boot.garbage_lines));
    }
    if let Some(why) = &boot.capped {
        out.push(format!("the collector stopped storing this boot at {}", printable(why)));
    }
    if boot.damaged_lines > 0 {
        out.push(format!("{} damaged line(s) in the file:", boot.damaged_lines));
        out.extend(boot.damage.iter().map(|d| format!("    line {}: {}", d.line, d.why)));
        let unnamed = boot.damaged_lines - boot.damage.len() as u64;
        if unnamed > 0 {
            out.push(format!("    and {unnamed} more"));
        }
    }
    if boot.clock.samples == 0 {
        out.push("no clock sample: wall-clock times are not known (the collector takes them while the guest runs)".to_string());
    }
    out
}
