//! `--html`: one page that needs nothing else. The words above the picture are written here,
//! picture and table are drawn by page.js.
//!
//! Safe by three means, each enough by itself: texts are printable ASCII before they come here;
//! what goes into HTML is escaped, what goes into the page's JSON has no `<`, `>` or `&`; and the
//! page's content security policy runs the one script and uses the styles whose hashes it names,
//! and loads nothing.

use super::health_table::HealthTable;
use super::lanes::LaneOf;
use super::markup::{headline, html, milestones, shape_of};
use super::rows::{Side, Tone};
use super::summary::complaints;
use super::svg;
use super::waterfall::{Mark, Step, Waterfall};
use crate::host::boot::intervals::{length, ns};
use crate::host::boot::model;
use crate::host::boot::model::{Boot, Gpu, SETTLED};
use crate::host::data::clock::RATE_ERROR_PPM;
use crate::host::data::text::{error_bound, printable, seconds, wall_clock};
use crate::pci::PciAddress;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use std::collections::HashMap;
use std::io::{self, Write};

const PAGE: &str = include_str!("page.html");
const STYLE: &str = include_str!("page.css");
const SCRIPT: &str = include_str!("page.js");

/// Steps, and marks, that a page takes: a browser draws that many without effort. What was left out
/// is said; details go first.
const MAX_SHOWN: usize = 20_000;
/// Characters of the health table beside each other: a page of the usual width shows them without
/// scrolling.
const HEALTH_WIDTH: usize = 130;
/// Rows of one lane that are drawn; steps beyond share the last one.
const MAX_ROWS: usize = 40;

/// The whole page.
pub fn write(timeline: &Waterfall, out: &mut dyn Write) -> io::Result<()> {
    let boot = &timeline.boot;
    let shown = Shown::of(timeline);
    let left_out = shown.left_out(timeline);
    let policy = format!(
        "default-src 'none'; script-src {}; style-src {} {}; base-uri 'none'; form-action 'none'",
        hash(SCRIPT),
        hash(STYLE),
        hash(svg::STYLE)
    );
    let values = [
        ("policy", policy),
        ("title", html(&format!("GPU boot {}", short_id(timeline)))),
        ("style", STYLE.to_string()),
        ("headline", html(&headline(timeline))),
        ("about", about(timeline)),
        ("tiles", tiles(timeline)),
        ("notes", notes(timeline, left_out)),
        ("picture", svg::write(timeline)),
        ("gpus", gpu_table(&boot.gpus)),
        ("health", health(boot)),
        ("footer", footer(timeline)),
        ("script", SCRIPT.to_string()),
    ];
    fill(out, &values, |out| data(timeline, &shown, out))
}

/// Puts values into the page's `{name}` places, and what `data` writes into that of this name.
/// Values are not looked at again: no text of a guest is ever taken for a place.
fn fill(out: &mut dyn Write, values: &[(&str, String)], data: impl Fn(&mut dyn Write) -> io::Result<()>) -> io::Result<()> {
    let mut rest = PAGE;
    while let Some((before, after)) = rest.split_once('{') {
        out.write_all(before.as_bytes())?;
        let (name, after) = after.split_once('}').unwrap_or((after, ""));
        match values.iter().find(|(key, _)| *key == name) {
            _ if name == "data" => data(out)?,
            Some((_, value)) => out.write_all(value.as_bytes())?,
            None => {}
        }
        rest = after;
    }
    out.write_all(rest.as_bytes())
}

/// JSON that can stand in a script element: nothing in it ends the element, starts a comment or
/// ends a line of an older JavaScript.
fn for_script(json: &Value) -> String {
    let mut out = String::new();
    // These characters stand in JSON only within strings, where an escape means the same.
    for c in json.to_string().chars() {
        match c {
            '<' | '>' | '&' | '\u{2028}' | '\u{2029}' => out.push_str(&format!("\\u{:04x}", c as u32)),
            c => out.push(c),
        }
    }
    out
}

fn hash(text: &str) -> String {
    format!("'sha256-{}'", STANDARD.encode(Sha256::digest(text.as_bytes())))
}

fn short_id(timeline: &Waterfall) -> &str {
    timeline.boot_id().get(..8).unwrap_or_default()
}

fn about(timeline: &Waterfall) -> String {
    let boot = &timeline.boot;
    let mut parts = vec![format!("boot <code>{}</code>", html(timeline.boot_id()))];
    parts.extend(boot.version.as_deref().map(|v| format!("kata-gpu-init {}", html(&printable(v)))));
    parts.extend(boot.kernel.as_deref().map(|k| format!("kernel {}", html(&printable(k)))));
    let start =
        timeline.wall_at(0).map(|w| format!("started {} {}", wall_clock(w.realtime_ns), error_bound(w.error_ns).replace("+-", "±")));
    parts.push(html(&start.unwrap_or("wall clock not known".to_string())));
    parts.join(" &middot; ")
}

fn tiles(timeline: &Waterfall) -> String {
    let tile = |name: &str, value: String, more: &str| {
        format!("<div><dt>{}</dt><dd>{} <small>{}</small></dd></div>", html(name), html(&value), html(more))
    };
    let mut out = String::new();
    let before = timeline.boot.clock.before_kernel;
    out.extend(before.map(|before| tile("VMM and firmware", seconds(before.took_ns), "s before kernel start")));
    let mut last = None;
    for milestone in timeline.boot.milestones.iter().filter(|m| m.name != SETTLED) {
        // One container is the first and the last.
        let value = milestone.boottime_ns.filter(|ns| milestone.name != "kernel start" && last != Some(*ns));
        last = milestone.boottime_ns.or(last);
        let sure = if milestone.approximate { "~" } else { "" };
        out.extend(value.map(|ns| tile(milestone.name, format!("{sure}{}", seconds(ns)), "s")));
    }
    let published = timeline.boot.gpus.iter().filter_map(|g| g.published.map(|p| p.at_ns)).max();
    out.extend(published.map(|ns| tile("last GPU published", seconds(ns), "s")));
    out.extend(timeline.boot.settled_ns.map(|ns| tile(SETTLED, seconds(ns), "s")));
    out.extend(timeline.sample().map(|sample| {
        let bound = error_bound(sample.error_ns).replace("+-", "±");
        tile("clock error", bound.trim_end_matches(" ms").to_string(), "ms at best")
    }));
    out
}

fn notes(timeline: &Waterfall, left_out: usize) -> String {
    let mut notes: Vec<String> = Vec::new();
    for gpu in &timeline.boot.gpus {
        let name = format!("<b>GPU {}</b> <code>{}</code>", gpu.index.map_or("?".to_string(), |i| i.to_string()), gpu.address);
        let words = timeline.words.get(&gpu.address).map(|lines| {
            let lines: Vec<String> = lines.iter().map(|line| html(line)).collect();
            format!("<pre aria-label=\"the driver's words\">{}</pre>", lines.join("\n"))
        });
        let words = words.unwrap_or_default();
        if let Some(failure) = &gpu.failed {
            let why = timeline.failures.get(&gpu.address);
            let reason = why.map(|w| format!(" <code>{}</code>", html(&w.reason))).unwrap_or_default();
            let cure = why.and_then(|w| w.cure.as_deref()).map(|cure| format!("<br>{}", html(cure))).unwrap_or_default();
            notes.push(format!(
                "<li class=\"failed\">{name} failed at {} s in {}:{reason} {}{cure}{words}</li>",
                seconds(failure.at_ns),
                html(&printable(&failure.step)),
                html(&printable(&failure.reason))
            ));
        } else if let Some(still) = &gpu.still {
            let long = seconds(length(ns(still.since_ns), timeline.end_ns));
            let step = html(&printable(&still.step));
            notes.push(format!(
                "<li>{name} is in {step} since {} s: open for {long} s when the stream ended{words}</li>",
                seconds(still.since_ns)
            ));
        }
    }
    notes.extend(complaints(&timeline.boot).iter().map(|complaint| format!("<li>{}</li>", html(complaint))));
    if left_out > 0 {
        notes.push(format!("<li>{left_out} steps and events are not on this page: --csv and --perfetto have all of them</li>"));
    }
    if notes.is_empty() { String::new() } else { format!("<ul class=\"notes\">{}</ul>", notes.join("")) }
}

fn gpu_table(gpus: &[Gpu]) -> String {
    let step = |step: Option<model::Step>| match step {
        None => String::new(),
        Some(model::Step { at_ns, took_ns: None }) => seconds(at_ns),
        Some(model::Step { at_ns, took_ns: Some(took) }) => format!("{} <span class=\"dim\">({})</span>", seconds(at_ns), seconds(took)),
    };
    let head = ["GPU", "Address", "Found", "Enabled", "Bound", "Published", "Usable"];
    let head: String = head
        .iter()
        .enumerate()
        .map(|(i, name)| format!("<th scope=\"col\"{}>{name}</th>", if i > 1 { " class=\"number\"" } else { "" }))
        .collect();
    let rows: String = gpus
        .iter()
        .take(MAX_SHOWN)
        .map(|gpu| {
            let usable = match (&gpu.failed, &gpu.still) {
                (Some(_), _) => "failed".to_string(),
                (None, Some(_)) if gpu.usable.is_none() => "not yet".to_string(),
                (None, _) => step(gpu.usable),
            };
            let cells = [gpu.found_ns.map_or(String::new(), seconds), step(gpu.enabled), step(gpu.bound), step(gpu.published), usable];
            format!(
                "<tr{}><td>{}</td><td><code>{}</code></td>{}</tr>",
                if gpu.failed.is_some() { " class=\"failed\"" } else { "" },
                gpu.index.map_or("?".to_string(), |i| i.to_string()),
                gpu.address,
                cells.iter().map(|cell| format!("<td class=\"number\">{cell}</td>")).collect::<String>()
            )
        })
        .collect();
    format!(
        "<div class=\"scroll\"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>\
         <p class=\"dim\">Seconds since kernel start, and how long the step took (published: since it was bound).</p>"
    )
}

/// Section about the GPUs' health; nothing where NVML was not asked.
fn health(boot: &Boot) -> String {
    let Some(table) = HealthTable::of(boot) else { return String::new() };
    let mut out = String::from("<section aria-labelledby=\"health\"><h2 id=\"health\">Health of the GPUs</h2>");
    let is_number = |column: usize| column > 1 && table.heads.get(column).is_some_and(|(_, right)| *right);
    let class = |column: usize| if is_number(column) { " class=\"number\"" } else { "" };
    for group in table.groups(Some(HEALTH_WIDTH), 2) {
        let heads = group.iter().filter_map(|(column, _)| Some((column, table.heads.get(*column)?)));
        let head: String = heads.map(|(column, (head, _))| format!("<th scope=\"col\"{}>{head}</th>", class(*column))).collect();
        let row = |(wrong, cells): &(bool, Vec<String>)| {
            let cells = group.iter().filter_map(|(column, _)| Some((column, cells.get(*column)?)));
            let cells: String = cells.map(|(column, cell)| format!("<td{}>{}</td>", class(*column), html(cell))).collect();
            format!("<tr{}>{cells}</tr>", if *wrong { " class=\"failed\"" } else { "" })
        };
        let rows: String = table.rows.iter().map(row).collect();
        out.push_str(&format!("<div class=\"scroll\"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"));
    }
    out.extend(table.source.map(|source| format!("<p class=\"dim\">{}</p>", html(&source))));
    let sentences: String = table.sentences.iter().map(|sentence| format!("<li class=\"failed\">{}</li>", html(sentence))).collect();
    if !sentences.is_empty() {
        out.push_str(&format!("<ul class=\"notes\">{sentences}</ul>"));
    }
    out + "</section>"
}

fn footer(timeline: &Waterfall) -> String {
    let clock = match timeline.sample() {
        None => "The stream has no clock sample: wall-clock times are not known.".to_string(),
        Some(sample) => format!(
            "Times are seconds on the guest's boot clock. Wall-clock times are the host's, known to {} at {} s by the best of {} pings; the bound \
             grows by {RATE_ERROR_PPM} ppm of the distance from there.",
            error_bound(sample.error_ns).replace("+-", "±"),
            seconds(sample.boottime_ns),
            timeline.boot.clock.samples
        ),
    };
    let made = concat!("Made by kata-gpu-boot ", env!("CARGO_PKG_VERSION"), " export --html.");
    format!("{} {}", html(&clock), html(made))
}

/// What of a boot is on the page.
struct Shown<'a> {
    steps: &'a [Step],
    marks: Vec<&'a Mark>,
}

impl<'a> Shown<'a> {
    fn of(timeline: &'a Waterfall) -> Self {
        let some_only = timeline.marks.len() > MAX_SHOWN;
        let marks = timeline.marks.iter().filter(|mark| !(some_only && mark.detail)).take(MAX_SHOWN).collect();
        Self { steps: timeline.steps.get(..MAX_SHOWN).unwrap_or(&timeline.steps), marks }
    }

    /// How many steps and marks are not.
    fn left_out(&self, timeline: &Waterfall) -> usize {
        timeline.steps.len() - self.steps.len() + timeline.marks.len() - self.marks.len()
    }
}

/// What page.js draws; steps and marks one by one.
fn data(timeline: &Waterfall, shown: &Shown, out: &mut dyn Write) -> io::Result<()> {
    let gpu_numbers: HashMap<PciAddress, usize> = timeline.boot.gpus.iter().enumerate().map(|(i, gpu)| (gpu.address, i)).collect();
    let lanes: Vec<Value> = timeline
        .lanes
        .iter()
        .map(|lane| {
            let gpu = match lane.of {
                LaneOf::Side(_) => None,
                LaneOf::Gpu(gpu) => gpu_numbers.get(&gpu.address).copied(),
                // A number that no GPU has: a lane of GPUs, of none in particular.
                LaneOf::OtherGpus => Some(timeline.boot.gpus.len()),
            };
            json!({ "name": lane.name, "gpu": gpu, "rows": lane.rows.min(MAX_ROWS) })
        })
        .collect();
    let gpus: Vec<Value> = timeline
        .boot
        .gpus
        .iter()
        .map(|gpu| {
            let state = match (&gpu.failed, gpu.usable) {
                (Some(_), _) => Some("failed"),
                (None, None) => Some("open"),
                (None, Some(_)) => None,
            };
            json!({ "index": gpu.index, "address": gpu.address.to_string(), "state": state })
        })
        .collect();
    let milestones: Vec<Value> = milestones(timeline).into_iter().map(|(name, at)| json!({ "name": name, "at": at })).collect();
    let sides = [Side::Kernel, Side::Host, Side::Driver, Side::Init, Side::Agent];
    let used: Vec<&str> = sides.into_iter().filter(|side| timeline.steps.iter().any(|s| s.side == *side)).map(Side::name).collect();
    let clock = timeline.sample().map(|sample| {
        json!({ "offset_ms": sample.offset_ns as f64 / 1e6, "error_ns": timeline.clock_error_ns(), "at_ns": sample.boottime_ns, "ppm": RATE_ERROR_PPM })
    });
    // A step that is not on the page is time between two that are.
    let on_page = |step: usize| (step < shown.steps.len()).then_some(step);
    let path = timeline.path.iter().map(|p| json!({ "step": p.step.and_then(on_page), "begin": p.begin_ns, "took": p.took_ns }));
    let data = json!({
        "begin": timeline.begin_ns, "end": timeline.end_ns, "boot_end": timeline.boot_end_ns, "clock": clock, "lanes": lanes, "gpus": gpus, "sides": used,
        "milestones": milestones,
    });
    // Open until the lists are in it.
    out.write_all(for_script(&data).strip_suffix('}').unwrap_or_default().as_bytes())?;
    list(out, "steps", shown.steps.iter().map(|s| step(s, &gpu_numbers)))?;
    list(out, "marks", shown.marks.iter().map(|m| mark(m, &gpu_numbers)))?;
    list(out, "path", path)?;
    out.write_all(b"}")
}

/// One more member of an object: a list.
fn list(out: &mut dyn Write, name: &str, of: impl Iterator<Item = Value>) -> io::Result<()> {
    write!(out, ",\"{name}\":[")?;
    for (nth, value) in of.enumerate() {
        write!(out, "{}{}", if nth > 0 { "," } else { "" }, for_script(&value))?;
    }
    out.write_all(b"]")
}

fn step(step: &Step, gpus: &HashMap<PciAddress, usize>) -> Value {
    json!({
        "id": step.id, "name": step.name, "label": step.label(), "side": step.side.name(), "lane": step.lane, "row": step.row.min(MAX_ROWS - 1),
        "gpu": step.gpu.map(|gpu| gpus.get(&gpu.address).copied().unwrap_or(gpus.len())), "begin": step.begin_ns, "end": step.end_ns,
        "lost": step.begin_lost, "approx": step.approximate, "after": step.after, "critical": step.critical, "error": step.error,
        "fields": step.fields,
    })
}

fn mark(mark: &Mark, gpus: &HashMap<PciAddress, usize>) -> Value {
    let tone = match mark.tone {
        Tone::Plain => "plain",
        Tone::Good => "good",
        Tone::Warning => "warning",
        Tone::Error => "error",
    };
    json!({
        "at": mark.at_ns, "approx": mark.approximate, "name": mark.name, "text": mark.text, "side": mark.side.name(), "lane": mark.lane,
        "gpu": mark.gpu.map(|gpu| gpus.get(&gpu.address).copied().unwrap_or(gpus.len())), "tone": tone, "detail": mark.detail,
        "kind": shape_of(mark),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_text_ends_its_script_element() {
        let evil = json!("</script><script>alert(1)</script><!-- \u{2028}&");
        let out = for_script(&evil);
        assert!(!out.contains(['<', '>', '&', '\u{2028}']), "{out}");
        assert_eq!(serde_json::from_str::<Value>(&out).unwrap(), evil);
    }

    #[test]
    fn a_value_that_looks_like_a_place_is_left_alone() {
        let mut page = Vec::new();
        fill(&mut page, &[("title", "{data}".to_string())], |out| out.write_all(b"secret")).unwrap();
        let page = String::from_utf8(page).unwrap();
        assert!(page.contains("<title>{data}</title>"), "{page}");
        assert_eq!(page.matches("secret").count(), 1);
    }

    #[test]
    fn every_place_of_the_page_is_filled() {
        let places: Vec<&str> = PAGE.split('{').skip(1).filter_map(|rest| rest.split('}').next()).collect();
        let known =
            ["policy", "title", "style", "headline", "about", "tiles", "notes", "picture", "gpus", "health", "data", "script", "footer"];
        assert!(places.iter().all(|place| known.contains(place)), "{places:?}");
        assert_eq!(places.len(), known.len());
    }

    #[test]
    fn html_is_escaped() {
        assert_eq!(html("<a href=\"x\" b='&'>"), "&lt;a href=&quot;x&quot; b=&#39;&amp;&#39;&gt;");
    }
}
