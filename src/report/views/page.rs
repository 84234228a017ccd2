//! `--html`: one page that needs nothing else. page.html is its template, checked as the program is
//! built; page.js draws picture and table.
//!
//! Safe by three means, each enough by itself: texts are printable ASCII before they come here; the
//! template escapes what goes into HTML, and what goes into the page's JSON has no `<`, `>` or `&`;
//! and the page's content security policy runs the one script and uses the styles whose hashes it
//! names, and loads nothing.

use super::health_table::HealthTable;
use super::lanes;
use super::lanes::LaneOf;
use super::markup::{milestones, shape_of};
use super::rows::Tone;
use super::summary::{complaints, gpu_times};
use super::verdict_lines::cure_text;
use super::waterfall::{Bar, Mark, Waterfall};
use crate::analysis::verdict::{Finding, Verdict};
use crate::boot::model::{Boot, Gpu, SETTLED};
use crate::data::clock_offset::RATE_ERROR_PPM;
use crate::data::text::{error_bound, printable, seconds, wall_clock};
use crate::severity::Severity;
use askama::Template;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use kata_gpu_wire::catalogue::Owner;
use kata_gpu_wire::pci_address::PciAddress;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use std::collections::HashMap;
use std::fmt::{self, Write as _};
use std::io::{self, Write};

const STYLE: &str = include_str!("page.css");
const VERSION: &str = env!("CARGO_PKG_VERSION");
const SCRIPT: &str = include_str!("page.js");

/// Steps, and marks, that a page takes: a browser draws that many without effort. The page names
/// the number of those left out; details go first.
const MAX_SHOWN: usize = 20_000;
/// Characters of the health table beside each other: a page of the usual width shows them without
/// scrolling.
const HEALTH_WIDTH: usize = 130;
/// The driver's lines in one note.
const MAX_WORDS: usize = 24;
/// Rows of one lane that are drawn; steps beyond share the last one.
const MAX_ROWS: usize = 40;

/// Values of the template. `|safe` there is for `style`, `script` and `data` only.
#[derive(Template)]
#[template(path = "page.html", config = "views/askama.toml")]
struct Page<'a> {
    policy: String,
    short_id: &'a str,
    style: &'static str,
    headline: String,
    boot_id: &'a str,
    /// Versions, and the start by the wall clock.
    about: Vec<String>,
    tiles: Vec<Tile>,
    notes: Vec<Note>,
    complaints: Vec<String>,
    /// Number of steps and marks that are not on the page.
    left_out: usize,
    gpus: Vec<GpuRow>,
    health: Option<Health>,
    footer: String,
    data: Data<'a>,
    script: &'static str,
}

/// Name, value and unit of a number above the picture.
type Tile = (&'static str, String, &'static str);

/// A finding of the verdict.
struct Note {
    is_failure: bool,
    text: String,
    cure: Option<String>,
    /// The words that it was found by, and the driver's lines about its GPUs.
    words: String,
}

/// The GPUs' health.
struct Health {
    tables: Vec<HealthPart>,
    source: Option<String>,
    sentences: Vec<String>,
}

/// Columns of the health table that fit beside each other. Cells are texts, and whether they are
/// numbers; rows begin with whether something is wrong.
struct HealthPart {
    heads: Vec<(&'static str, bool)>,
    rows: Vec<(bool, Vec<(String, bool)>)>,
}

/// Row of the table of GPUs.
struct GpuRow {
    failed: bool,
    index: String,
    address: PciAddress,
    cells: [(String, Option<String>); 5],
}

/// The whole page.
pub fn write(timeline: &Waterfall, out: &mut dyn Write) -> io::Result<()> {
    let boot = &timeline.boot;
    let shown = Shown::of(timeline);
    let verdict = Verdict::with_time(boot);
    let policy = format!(
        "default-src 'none'; script-src {}; style-src {}; base-uri 'none'; form-action 'none'",
        hash(SCRIPT),
        hash(STYLE)
    );
    let page = Page {
        policy,
        short_id: timeline.boot_id().get(..8).unwrap_or_default(),
        style: STYLE,
        headline: verdict.headline,
        boot_id: timeline.boot_id(),
        about: about(timeline),
        tiles: tiles(timeline),
        notes: verdict
            .findings
            .into_iter()
            .map(|finding| note(timeline, finding))
            .collect(),
        complaints: complaints(boot),
        left_out: shown.left_out(timeline),
        gpus: boot.gpus.iter().take(MAX_SHOWN).map(gpu_row).collect(),
        health: Health::of(boot),
        footer: footer(timeline),
        data: Data { timeline, shown },
        script: SCRIPT,
    };
    page.write_into(&mut *out)
}

/// JSON that can stand in a script element: nothing in it ends the element, starts a comment or
/// ends a line of an older JavaScript.
fn for_script(json: &Value) -> String {
    let mut out = String::new();
    // These characters stand in JSON only within strings, where an escape means the same.
    for c in json.to_string().chars() {
        match c {
            '<' | '>' | '&' | '\u{2028}' | '\u{2029}' => {
                out.push_str(&format!("\\u{:04x}", c as u32))
            }
            c => out.push(c),
        }
    }
    out
}

fn hash(text: &str) -> String {
    format!(
        "'sha256-{}'",
        STANDARD.encode(Sha256::digest(text.as_bytes()))
    )
}

fn about(timeline: &Waterfall) -> Vec<String> {
    let boot = &timeline.boot;
    let version = boot
        .version
        .as_deref()
        .map(|version| format!("kata-gpu-init {}", printable(version)));
    let kernel = boot
        .kernel
        .as_deref()
        .map(|kernel| format!("kernel {}", printable(kernel)));
    let start = timeline.wall_at(0).map(|wall| {
        format!(
            "started {} {}",
            wall_clock(wall.realtime_ns),
            plus_minus(wall.error_ns)
        )
    });
    [
        version,
        kernel,
        Some(start.unwrap_or("wall clock not known".to_string())),
    ]
    .into_iter()
    .flatten()
    .collect()
}

fn plus_minus(error_ns: u64) -> String {
    error_bound(error_ns).replace("+-", "\u{b1}")
}

fn tiles(timeline: &Waterfall) -> Vec<Tile> {
    let mut out = Vec::new();
    let before = timeline.boot.clock.before_kernel;
    out.extend(before.map(|before| ("VMM and firmware", seconds(before.took_ns), "s")));
    let mut last = None;
    for milestone in timeline
        .boot
        .milestones
        .iter()
        .filter(|m| m.name != SETTLED)
    {
        // A single container is both the first and the last.
        let value = milestone
            .boottime_ns
            .filter(|ns| milestone.name != "kernel start" && last != Some(*ns));
        last = milestone.boottime_ns.or(last);
        let sure = if milestone.approximate { "~" } else { "" };
        out.extend(value.map(|ns| (milestone.name, format!("{sure}{}", seconds(ns)), "s")));
    }
    let published = timeline
        .boot
        .gpus
        .iter()
        .filter_map(|g| g.published.map(|p| p.at_ns))
        .max();
    out.extend(published.map(|ns| ("last GPU published", seconds(ns), "s")));
    out.extend(
        timeline
            .boot
            .settled_ns
            .map(|ns| (SETTLED, seconds(ns), "s")),
    );
    let error = timeline.sample().map(|sample| {
        plus_minus(sample.error_ns)
            .trim_end_matches(" ms")
            .to_string()
    });
    out.extend(error.map(|error| ("clock error", error, "ms at best")));
    out
}

fn note(timeline: &Waterfall, finding: Finding) -> Note {
    let lines = finding
        .gpus
        .iter()
        .filter_map(|gpu| timeline.words.get(gpu));
    let mut words: Vec<&str> = finding.words.as_deref().into_iter().collect();
    words.extend(finding.nearby.as_deref());
    for line in lines.flatten().take(MAX_WORDS) {
        if !words.contains(&line.as_str()) {
            words.push(line);
        }
    }
    Note {
        is_failure: finding.severity == Severity::Error,
        cure: cure_text(&finding),
        words: words.join("\n"),
        text: finding.text,
    }
}

fn gpu_row(gpu: &Gpu) -> GpuRow {
    GpuRow {
        failed: gpu.failed.is_some(),
        index: gpu.name().number(),
        address: gpu.address,
        cells: gpu_times(gpu),
    }
}

impl Health {
    fn of(boot: &Boot) -> Option<Self> {
        let table = HealthTable::of(boot)?;
        let groups = table.groups(Some(HEALTH_WIDTH), 2);
        // The first two columns are the GPU's.
        let is_number =
            |column: usize| column > 1 && table.heads.get(column).is_some_and(|(_, right)| *right);
        let part = |group: &Vec<usize>| {
            let columns = || group.iter().copied();
            let row = |(wrong, cells): &(bool, Vec<String>)| {
                (
                    *wrong,
                    columns()
                        .filter_map(|column| Some((cells.get(column)?.clone(), is_number(column))))
                        .collect(),
                )
            };
            let heads = columns()
                .filter_map(|column| Some((table.heads.get(column)?.0, is_number(column))))
                .collect();
            HealthPart {
                heads,
                rows: table.rows.iter().map(row).collect(),
            }
        };
        Some(Self {
            tables: groups.iter().map(part).collect(),
            source: table.source,
            sentences: table.sentences,
        })
    }
}

fn footer(timeline: &Waterfall) -> String {
    match timeline.sample() {
        None => "The stream has no clock sample: wall-clock times are not known.".to_string(),
        Some(sample) => format!(
            "Times are seconds on the guest's boot clock. Wall-clock times are the host's, known \
             to {} at {} s by the best of {} pings; the bound \
             grows by {RATE_ERROR_PPM} ppm of the distance from there.",
            plus_minus(sample.error_ns),
            seconds(sample.boottime_ns),
            timeline.boot.clock.samples
        ),
    }
}

/// Steps and marks of a boot that are on the page.
struct Shown<'a> {
    steps: &'a [Bar],
    marks: Vec<&'a Mark>,
}

impl<'a> Shown<'a> {
    fn of(timeline: &'a Waterfall) -> Self {
        let some_only = timeline.marks.len() > MAX_SHOWN;
        let marks = timeline
            .marks
            .iter()
            .filter(|mark| !(some_only && mark.detail))
            .take(MAX_SHOWN)
            .collect();
        Self {
            steps: timeline.steps.get(..MAX_SHOWN).unwrap_or(&timeline.steps),
            marks,
        }
    }

    /// Number of steps and marks that are left out.
    fn left_out(&self, timeline: &Waterfall) -> usize {
        timeline.steps.len() - self.steps.len() + timeline.marks.len() - self.marks.len()
    }
}

/// Data that page.js draws, as JSON. Steps and marks are made one by one.
struct Data<'a> {
    timeline: &'a Waterfall,
    shown: Shown<'a>,
}

impl fmt::Display for Data<'_> {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { timeline, shown } = self;
        let gpu_numbers: HashMap<PciAddress, usize> = timeline
            .boot
            .gpus
            .iter()
            .enumerate()
            .map(|(i, gpu)| (gpu.address, i))
            .collect();
        let lanes: Vec<Value> = timeline
            .lanes
            .iter()
            .map(|lane| {
                let gpu = match lane.of {
                    LaneOf::Owner(_) => None,
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
        let milestones: Vec<Value> = milestones(timeline)
            .into_iter()
            .map(|(name, at)| json!({ "name": name, "at": at }))
            .collect();
        let owners: Vec<&str> = lanes::OWNERS
            .into_iter()
            .filter(|owner| timeline.steps.iter().any(|step| step.owner == *owner))
            .map(Owner::name)
            .collect();
        let clock = timeline.sample().map(|sample| {
            json!({
                "offset_ms": sample.offset_ns as f64 / 1e6,
                "error_ns": timeline.clock_error_ns(),
                "at_ns": sample.boottime_ns,
                "ppm": RATE_ERROR_PPM,
            })
        });
        // A step that is not on the page is time between two that are.
        let on_page = |step: usize| (step < shown.steps.len()).then_some(step);
        let path = timeline.path.iter().map(
            |p| json!({ "step": p.step.and_then(on_page), "begin": p.begin_ns, "took": p.took_ns }),
        );
        let data = json!({
            "begin": timeline.begin_ns,
            "end": timeline.end_ns,
            "boot_end": timeline.boot_end_ns,
            "clock": clock,
            "lanes": lanes,
            "gpus": gpus,
            "owners": owners,
            "milestones": milestones,
        });
        // Open until the lists are in it.
        out.write_str(for_script(&data).strip_suffix('}').unwrap_or_default())?;
        list(
            out,
            "steps",
            shown.steps.iter().map(|s| step(s, &gpu_numbers)),
        )?;
        list(
            out,
            "marks",
            shown.marks.iter().map(|m| mark(m, &gpu_numbers)),
        )?;
        list(out, "path", path)?;
        out.write_char('}')
    }
}

/// Writes a list as a further member of an object.
fn list(out: &mut fmt::Formatter<'_>, name: &str, of: impl Iterator<Item = Value>) -> fmt::Result {
    write!(out, ",\"{name}\":[")?;
    for (nth, value) in of.enumerate() {
        write!(
            out,
            "{}{}",
            if nth > 0 { "," } else { "" },
            for_script(&value)
        )?;
    }
    out.write_char(']')
}

fn step(step: &Bar, gpus: &HashMap<PciAddress, usize>) -> Value {
    json!({
        "id": step.id,
        "name": step.name,
        "label": step.label(),
        "owner": step.owner.name(),
        "lane": step.lane,
        "row": step.row.min(MAX_ROWS - 1),
        "gpu": step.gpu.map(|gpu| gpus.get(&gpu.address).copied().unwrap_or(gpus.len())),
        "begin": step.begin_ns,
        "end": step.end_ns,
        "lost": step.begin_lost,
        "approx": step.approximate,
        "after": step.after,
        "critical": step.critical,
        "error": step.error,
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
        "at": mark.at_ns,
        "approx": mark.approximate,
        "name": mark.name,
        "text": mark.text,
        "owner": mark.owner.name(),
        "lane": mark.lane,
        "gpu": mark.gpu.map(|gpu| gpus.get(&gpu.address).copied().unwrap_or(gpus.len())),
        "tone": tone,
        "detail": mark.detail,
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

    /// Selectors of the style, media queries included; None where its braces do not match.
    fn selectors(style: &str) -> Option<Vec<&str>> {
        let (mut selectors, mut depth, mut from) = (Vec::new(), 0_usize, 0);
        for (at, brace) in style.match_indices(['{', '}']) {
            if brace == "{" {
                depth += 1;
                selectors.extend(style.get(from..at)?.rsplit([';', '/']).next());
            } else {
                depth = depth.checked_sub(1)?;
            }
            from = at + 1;
        }
        (depth == 0).then_some(selectors)
    }

    /// Names in `text` behind each `mark`, a run of name characters each.
    fn names<'a>(text: &'a str, mark: &'a str) -> impl Iterator<Item = &'a str> {
        let name = |after: &'a str| {
            after
                .split(|c: char| !c.is_ascii_alphanumeric() && c != '-')
                .next()
                .unwrap_or_default()
        };
        text.split(mark)
            .skip(1)
            .map(name)
            .filter(|name| name.starts_with(|c: char| c.is_ascii_lowercase()))
    }

    /// Words of each attribute in `text` that begins with `mark` and ends with one of `ends`.
    fn words<'a>(text: &'a str, mark: &'a str, ends: &'a [char]) -> impl Iterator<Item = &'a str> {
        let value = move |after: &'a str| after.split(ends).next().unwrap_or_default();
        text.split(mark)
            .skip(1)
            .map(value)
            .flat_map(str::split_ascii_whitespace)
            .filter(|word| !word.contains(['$', '{', '}']))
    }

    /// Classes of the page and its script that the style has no rule for, and ids of the style that
    /// the page does not have.
    fn unmatched(style: &str) -> Vec<String> {
        let template = include_str!("page.html");
        let Some(selectors) = selectors(style) else {
            return vec!["{".into()];
        };
        let selectors = selectors.join(" ");
        let ruled: Vec<_> = names(&selectors, ".").collect();
        let used = words(template, "class=\"", &['"'])
            .chain(words(SCRIPT, "class: \"", &['"']))
            .chain(words(SCRIPT, "class: `", &['`']));
        let classes = used
            .filter(|class| !ruled.contains(class))
            .map(|class| format!(".{class}"));
        let ids = names(&selectors, "#")
            .filter(|id| !template.contains(&format!("id=\"{id}\"")))
            .map(|id| format!("#{id}"));
        classes.chain(ids).collect()
    }

    #[test]
    fn style_has_a_rule_for_every_class_and_no_other_id() {
        assert_eq!(unmatched(STYLE), [""; 0]);
        // Without the rules of the chart's lanes.
        let without = STYLE.replace("#chart .lane", "#chart .line");
        assert_eq!(unmatched(&without), [".lane"]);
        assert_eq!(unmatched(&STYLE.replacen('}', "", 1)), ["{"]);
        assert_eq!(unmatched(&STYLE.replacen("#tip", "#tap", 1)), ["#tap"]);
    }
}
