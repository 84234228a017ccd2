//! `--svg`: the waterfall as a static picture. Dark and light by the reader's own wish; text is
//! text.

use super::grid::time;
use super::lanes::LaneOf;
use super::markup::{headline, html, milestones, shape_of};
use super::waterfall::{Mark, Piece, Step, Waterfall};
use crate::boot::intervals::{length, ns};
use crate::data::text::{error_bound, printable_start, seconds};
use std::fmt::Write;

const WIDTH: f64 = 1200.0;
const LEFT: f64 = 158.0;
const RIGHT: f64 = 16.0;
const HEAD: f64 = 46.0;
const LABEL_ROW: f64 = 14.0;
const TICKS: f64 = 20.0;
const ROW: f64 = 19.0;
const BAR: f64 = 15.0;
const PAD: f64 = 5.0;
const STRIP: f64 = 9.0;
const FOOT: f64 = 40.0;
/// Width of a character of the small font, as far as one can know without the font.
const CHARACTER: f64 = 6.15;
/// Rows of one lane, and steps, that are drawn: a picture with more says nothing.
const MAX_ROWS: usize = 12;
const MAX_STEPS: usize = 4000;
/// Longest text of a mark, in bytes.
const MAX_TITLE: usize = 400;

/// The style of the picture.
pub const STYLE: &str = "\
text{font:11px system-ui,-apple-system,'Segoe UI','DejaVu Sans',sans-serif;fill:#1b1f24}.h{font-size:15px;font-weight:600}.n{font-weight:600;font-size:12px}\
.d{fill:#626b77}.page{fill:#fff}.odd{fill:#f5f6f7}.g{stroke:#e1e4e8}.m{stroke:#626b77;stroke-dasharray:2 3}.ml{fill:#626b77;font-weight:600}\
.kernel{fill:#dfe3e8;stroke:#64707f}.host{fill:#fbe3c0;stroke:#a45c00}.driver{fill:#d6edcc;stroke:#2f7a1e}.init{fill:#d5e4fb;stroke:#1f5fbf}\
.agent{fill:#e8dcf8;stroke:#7440b8}.c.kernel{fill:#64707f}.c.host{fill:#a45c00}.c.driver{fill:#2f7a1e}.c.init{fill:#1f5fbf}.c.agent{fill:#7440b8}\
.on{font-weight:600;fill:#fff}.bad{stroke:#c0261f;stroke-width:2}.t.bad,.n.bad{fill:#c0261f;stroke:none}.open{stroke-dasharray:4 3}.j{fill:none;stroke:#1b1f24;stroke-width:1.4;opacity:.75}\
.published{fill:#1f5fbf}.usable{fill:#1c7a3a}.container{fill:#7440b8}.warning{fill:#9a6700}.failed{fill:none;stroke:#c0261f;stroke-width:2.4}\
@media(prefers-color-scheme:dark){text{fill:#e4e7eb}.d,.ml{fill:#929ba7}.page{fill:#171b20}.odd{fill:#1b2026}.g{stroke:#2b3138}.m{stroke:#929ba7}\
.kernel{fill:#323a44;stroke:#9aa7b8}.host{fill:#4a3617;stroke:#f0ab4a}.driver{fill:#25401d;stroke:#83c96d}.init{fill:#1f3556;stroke:#7fb0ff}\
.agent{fill:#3b2a57;stroke:#bf9bf2}.c.kernel{fill:#9aa7b8}.c.host{fill:#f0ab4a}.c.driver{fill:#83c96d}.c.init{fill:#7fb0ff}.c.agent{fill:#bf9bf2}\
.on{fill:#0e1115}.bad{stroke:#ff7b72}.t.bad,.n.bad{fill:#ff7b72}.j{stroke:#e4e7eb}.published{fill:#7fb0ff}.usable{fill:#6bcf86}.container{fill:#bf9bf2}\
.warning{fill:#e3b341}.failed{stroke:#ff7b72}}";

/// Picture in the making, with the places of its lanes.
struct Picture<'a> {
    timeline: &'a Waterfall,
    from_ns: i64,
    to_ns: i64,
    /// Top of each lane, and the bottom of the last.
    tops: Vec<f64>,
    out: String,
}

/// The whole picture.
pub fn write(timeline: &Waterfall) -> String {
    let from_ns = timeline.begin_ns;
    let to_ns = timeline
        .boot_end_ns
        .saturating_add(timeline.boot_end_ns / 60)
        .max(1_000_000);
    let mut picture = Picture {
        timeline,
        from_ns,
        to_ns,
        tops: Vec::new(),
        out: String::new(),
    };
    let labels = picture.milestone_labels();
    let label_rows = labels.iter().map(|label| label.row + 1).max().unwrap_or(0);
    let mut y = HEAD + label_rows as f64 * LABEL_ROW + TICKS;
    for lane in &timeline.lanes {
        picture.tops.push(y);
        y += PAD + lane.rows.min(MAX_ROWS) as f64 * ROW + STRIP;
    }
    picture.tops.push(y);
    let height = y + FOOT;
    picture.lanes();
    picture.axis(&labels, y);
    picture.joints();
    let shown = picture.steps();
    picture.marks();
    picture.foot(y, shown);
    let title = html(&headline(timeline));
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" width=\"{WIDTH}\" height=\"{height}\" role=\"img\">\n\
         <title>{title}</title>\n<style>{STYLE}</style>\n<rect class=\"page\" width=\"{WIDTH}\" height=\"{height}\"/>\n\
         <text class=\"h\" x=\"14\" y=\"26\">{title}</text>\n{}</svg>\n",
        picture.out
    )
}

struct Label {
    name: &'static str,
    at: f64,
    begin: f64,
    row: usize,
}

impl Picture<'_> {
    fn x(&self, ns: i64) -> f64 {
        let share = length(self.from_ns, ns.min(self.to_ns)) as f64
            / length(self.from_ns, self.to_ns) as f64;
        LEFT + share * (WIDTH - LEFT - RIGHT)
    }

    /// Appends a line to the picture.
    fn line(&mut self, text: std::fmt::Arguments<'_>) {
        // Writing to a String cannot fail.
        let _infallible = self.out.write_fmt(text);
        self.out.push('\n');
    }

    fn text(&mut self, class: &str, x: f64, y: f64, anchor: &str, text: &str) {
        let text = html(text);
        self.line(format_args!(
            "<text class=\"{class}\" x=\"{x:.1}\" y=\"{y:.1}\"{anchor}>{text}</text>"
        ));
    }

    fn top(&self, lane: usize) -> f64 {
        self.tops.get(lane).copied().unwrap_or(0.0)
    }

    fn step_y(&self, step: &Step) -> f64 {
        self.top(step.lane) + PAD + step.row.min(MAX_ROWS - 1) as f64 * ROW
    }

    /// In the first row where there is room.
    fn milestone_labels(&self) -> Vec<Label> {
        let mut rows: Vec<f64> = Vec::new();
        let place = |(name, ns): (&'static str, i64)| {
            let long = name.len() as f64 * CHARACTER + 8.0;
            let at = self.x(ns);
            let begin = at.min(WIDTH - long);
            let row = rows
                .iter()
                .position(|end| *end < begin)
                .unwrap_or(rows.len());
            match rows.get_mut(row) {
                Some(end) => *end = begin + long,
                None => rows.push(begin + long),
            }
            Label {
                name,
                at,
                begin,
                row,
            }
        };
        milestones(self.timeline)
            .into_iter()
            .filter(|(_, ns)| *ns <= self.to_ns)
            .map(place)
            .collect()
    }

    fn lanes(&mut self) {
        let timeline = self.timeline;
        for (i, lane) in timeline.lanes.iter().enumerate() {
            let (y, height) = (self.top(i), self.top(i + 1) - self.top(i));
            if i % 2 == 1 {
                self.line(format_args!(
                    "<rect class=\"odd\" x=\"0\" y=\"{y}\" width=\"{WIDTH}\" height=\"{height}\"/>"
                ));
            }
            let middle = y + PAD + BAR / 2.0 + 4.0;
            let (bad, address) = match lane.of {
                LaneOf::Gpu(name) => {
                    let failed = timeline
                        .boot
                        .failed_gpus()
                        .any(|gpu| gpu.address == name.address);
                    (failed, Some(name.address.to_string()))
                }
                LaneOf::Side(_) | LaneOf::OtherGpus => (false, None),
            };
            self.text(
                if bad { "n bad" } else { "n" },
                14.0,
                middle,
                "",
                &lane.name,
            );
            if let Some(address) = address {
                self.text("d", LEFT - 10.0, middle, " text-anchor=\"end\"", &address);
            }
        }
    }

    fn axis(&mut self, labels: &[Label], bottom: f64) {
        let top = self.top(0);
        let pace_ns = ns(pace(length(self.from_ns, self.to_ns)));
        let decimals = if pace_ns >= 1_000_000_000 { 0 } else { 3 };
        let mut ns = self.from_ns / pace_ns * pace_ns;
        while ns <= self.to_ns {
            let x = self.x(ns);
            self.line(format_args!(
                "<path class=\"g\" d=\"M{x:.1},{:.1}V{bottom:.1}\"/>",
                top - 4.0
            ));
            self.text(
                "d",
                x,
                top - 8.0,
                " text-anchor=\"middle\"",
                &format!("{:.decimals$} s", ns as f64 / 1e9),
            );
            let Some(next) = ns.checked_add(pace_ns) else {
                break;
            };
            ns = next;
        }
        for label in labels {
            let y = HEAD + label.row as f64 * LABEL_ROW;
            self.line(format_args!(
                "<path class=\"m\" d=\"M{:.1},{:.1}V{bottom:.1}\"/>",
                label.at,
                y - 8.0
            ));
            self.text("ml", label.begin + 4.0, y, "", label.name);
        }
    }

    fn steps(&mut self) -> usize {
        let timeline = self.timeline;
        let visible = timeline
            .steps
            .iter()
            .filter(|step| step.begin_ns <= self.to_ns)
            .take(MAX_STEPS);
        let steps: Vec<&Step> = visible.collect();
        for step in &steps {
            let (from, to) = (
                self.x(step.begin_ns),
                self.x(step.end_ns.unwrap_or(timeline.end_ns)),
            );
            let (long, y) = ((to - from).max(2.0), self.step_y(step));
            let class = |set: bool, name: &str| {
                if set {
                    format!(" {name}")
                } else {
                    String::new()
                }
            };
            let bad = class(step.error.is_some(), "bad");
            let kind = format!(
                "{}{}{}{bad}",
                step.side.name(),
                class(step.critical, "c"),
                class(step.end_ns.is_none(), "open")
            );
            let name = match timeline.lanes.get(step.lane).map(|lane| lane.of) {
                Some(LaneOf::Gpu(_) | LaneOf::OtherGpus) => {
                    step.label().trim_start_matches("gpu.").to_string()
                }
                Some(LaneOf::Side(_)) | None => step.label(),
            };
            let more = match (step.end_ns, step.took_ns()) {
                (None, _) => format!("{name}, open since {}", time(step.begin_ns)),
                // Most bars have room for this much text.
                (Some(_), Some(took)) => format!("{name} {:.2} s", took as f64 / 1e9),
                (Some(_), None) => name.clone(),
            };
            let exact = step
                .took_ns()
                .map(|took| format!("{} {} s", step.label(), seconds(took)));
            let title = html(exact.as_deref().unwrap_or(&more));
            self.line(format_args!(
                "<rect class=\"{kind}\" x=\"{from:.1}\" y=\"{y}\" width=\"{long:.1}\" height=\"{BAR}\" rx=\"2\"><title>{title}</title></rect>"
            ));
            // Bold is wider.
            let room = (long - 10.0)
                / if step.critical {
                    CHARACTER * 1.1
                } else {
                    CHARACTER
                };
            if let Some(text) = [&more, &name]
                .into_iter()
                .find(|text| text.len() as f64 <= room)
            {
                self.text(
                    if step.critical { "on" } else { "t" },
                    from + 5.0,
                    y + BAR - 4.0,
                    "",
                    text,
                );
            }
        }
        timeline.steps.len() - steps.len()
    }

    fn joints(&mut self) {
        let timeline = self.timeline;
        let piece = |piece: &Piece| {
            Some((
                timeline.steps.get(piece.step?)?,
                piece.begin_ns,
                piece.begin_ns.saturating_add_unsigned(piece.took_ns),
            ))
        };
        let path: Vec<(&Step, i64, i64)> = timeline
            .path
            .iter()
            .filter_map(piece)
            .take(MAX_STEPS)
            .collect();
        for pair in path.windows(2) {
            let [(from, _, end_ns), (to, begin_ns, _)] = *pair else {
                continue;
            };
            let (a, b) = (self.x(end_ns), self.x(begin_ns));
            let bend = (a + a.max(b)) / 2.0;
            let (y0, y1) = (self.step_y(from) + BAR / 2.0, self.step_y(to) + BAR / 2.0);
            self.line(format_args!(
                "<path class=\"j\" d=\"M{a:.1},{y0}H{bend:.1}V{y1}H{b:.1}\"/>"
            ));
        }
    }

    fn marks(&mut self) {
        let timeline = self.timeline;
        let shown = |mark: &&Mark| mark.at_ns <= self.to_ns && shape_of(mark) != "tick";
        for mark in timeline
            .marks
            .iter()
            .filter(shown)
            .take(MAX_STEPS)
            .collect::<Vec<_>>()
        {
            let kind = shape_of(mark);
            let path = match kind {
                "published" => "M0,-4L4,0L0,4L-4,0Z",
                "usable" => "M-4,0a4,4 0 1,0 8,0a4,4 0 1,0 -8,0Z",
                "failed" => "M-4,-4L4,4M-4,4L4,-4",
                "container" => "M-3.5,-3.5h7v7h-7Z",
                _ => "M0,-4.5L4.5,3.5L-4.5,3.5Z",
            };
            let (x, y) = (self.x(mark.at_ns), self.top(mark.lane + 1) - 6.0);
            let title = html(&format!(
                "{} s: {}",
                time(mark.at_ns),
                printable_start(mark.text.as_bytes(), MAX_TITLE)
            ));
            self.line(format_args!(
                "<path class=\"{kind}\" transform=\"translate({x:.1},{y:.1})\" d=\"{path}\"><title>{title}</title></path>"
            ));
        }
    }

    fn foot(&mut self, bottom: f64, left_out: usize) {
        let mut x = LEFT;
        let y = bottom + 25.0;
        let mut swatch = |picture: &mut Self, class: &str, text: &str| {
            picture.line(format_args!("<rect class=\"{class}\" x=\"{x:.1}\" y=\"{:.1}\" width=\"14\" height=\"9\" rx=\"2\"/>", y - 8.5));
            picture.text("d", x + 19.0, y, "", text);
            x += 19.0 + text.len() as f64 * CHARACTER + 16.0;
        };
        for side in ["kernel", "host", "driver", "init", "agent"] {
            if self
                .timeline
                .steps
                .iter()
                .any(|step| step.side.name() == side)
            {
                swatch(self, side, side);
            }
        }
        swatch(self, "c driver", "solid: critical path");
        let clock = match self.timeline.sample() {
            Some(sample) => format!(
                "clock {}",
                error_bound(sample.error_ns).replace("+-", "\u{b1}")
            ),
            None => "wall clock not known".to_string(),
        };
        let more = if left_out > 0 {
            format!("{left_out} steps not shown, ")
        } else {
            String::new()
        };
        let id = self.timeline.boot_id().get(..8).unwrap_or_default();
        self.text(
            "d",
            WIDTH - RIGHT,
            y,
            " text-anchor=\"end\"",
            &format!("{more}boot {id}, {clock}"),
        );
    }
}

/// 1, 2 or 5 times a power of ten, so that there are about ten.
fn pace(to_ns: u64) -> u64 {
    let wanted = to_ns.div_ceil(10).max(1);
    let mut power = 1u64;
    loop {
        for n in [1, 2, 5] {
            match power.checked_mul(n) {
                Some(pace) if pace >= wanted => return pace,
                Some(_) => {}
                None => return wanted,
            }
        }
        match power.checked_mul(10) {
            Some(next) => power = next,
            None => return wanted,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_axis_has_round_paces_at_any_length() {
        assert_eq!(
            [pace(22_700_000_000), pace(1_000_000), pace(0), pace(11)],
            [5_000_000_000, 100_000, 1, 2]
        );
        assert!(u64::MAX / pace(u64::MAX) <= 10);
    }
}
