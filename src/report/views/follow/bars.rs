//! Boots on a terminal: a head line each, and a bar per GPU. Problems are printed above the bars
//! and stay.
//!
//! A bar shows finished steps, not time: its length promises nothing. Every text is printable
//! ASCII, so that a line is as wide as it is long.

use super::progress::{Outcome, Progress, why};
use crate::boot::model::{Gpu, State};
use crate::data::text::printable;
use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};
use kata_gpu_wire::pci_address::PciAddress;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Interval between two pictures without events: seconds are shown with one digit.
pub const REFRESH: Duration = Duration::from_millis(100);
/// Cells of a bar: two per state up to [`State::Ready`]. The text beside it has to fit 80 columns.
const CELLS: u64 = State::Ready as u64 * 2;
/// Longest tag of a boot.
const TAG: usize = 8;

/// Colours and characters of a bar.
#[derive(Clone, Copy, Debug)]
pub struct Look {
    pub colour: bool,
    /// Whether the terminal shows more than ASCII.
    pub unicode: bool,
}

impl Look {
    /// Look from the environment: NO_COLOR, TERM, and the locale's character set.
    pub fn of_environment(colour: bool) -> Self {
        let set = |name: &str| std::env::var(name).ok().filter(|v| !v.is_empty());
        let locale = set("LC_ALL")
            .or_else(|| set("LC_CTYPE"))
            .or_else(|| set("LANG"))
            .unwrap_or_default()
            .to_lowercase();
        Self {
            colour,
            unicode: locale.contains("utf-8") || locale.contains("utf8"),
        }
    }

    fn bar(self, colour: &str) -> ProgressStyle {
        let (cells, paint) = (
            CELLS,
            if self.colour {
                format!(".{colour}")
            } else {
                String::new()
            },
        );
        let style = ProgressStyle::with_template(&format!(
            "{{prefix}} {{bar:{cells}{paint}}} {{wide_msg}}"
        ));
        // The templates are constants of this file, all used in its tests.
        style
            .unwrap_or_else(|_| ProgressStyle::default_bar())
            .progress_chars(if self.unicode { "━╸ " } else { "#> " })
    }

    fn line(self) -> ProgressStyle {
        ProgressStyle::with_template("{wide_msg}").unwrap_or_else(|_| ProgressStyle::default_bar())
    }
}

/// All boots.
pub struct Bars {
    multi: MultiProgress,
    look: Look,
    boots: BTreeMap<String, BootBars>,
}

struct BootBars {
    head: ProgressBar,
    gpus: BTreeMap<PciAddress, (ProgressBar, &'static str)>,
}

impl Bars {
    pub fn new(target: ProgressDrawTarget, look: Look) -> Self {
        Self {
            multi: MultiProgress::with_draw_target(target),
            look,
            boots: BTreeMap::new(),
        }
    }

    /// Prints a line that stays, above all bars.
    pub fn say(&self, line: &str) {
        // A lost terminal is noticed by the code that reads it.
        let _unused = self.multi.println(line);
    }

    /// Shows the state of a boot at `now`.
    pub fn update(&mut self, boot: &str, progress: &Progress, now: Instant) {
        let (multi, look) = (&self.multi, self.look);
        let bars = self.boots.entry(boot.to_string()).or_insert_with(|| {
            let head = multi.add(ProgressBar::new(1));
            head.set_style(look.line());
            BootBars {
                head,
                gpus: BTreeMap::new(),
            }
        });
        bars.head.set_message(head(boot, progress, now));
        let width = progress
            .gpus()
            .map(|gpu| gpu.name().to_string().len())
            .max()
            .unwrap_or(0);
        for gpu in progress.gpus() {
            let address = &gpu.address;
            if !bars.gpus.contains_key(address) {
                // In PCI order, regardless of the order of arrival.
                let before = bars
                    .gpus
                    .range(..*address)
                    .next_back()
                    .map_or(&bars.head, |(_, (bar, _))| bar);
                let bar = multi.insert_after(before, ProgressBar::new(CELLS));
                bars.gpus.insert(*address, (bar, ""));
            }
            let Some((bar, shown)) = bars.gpus.get_mut(address) else {
                continue;
            };
            let colour = match gpu.now.state {
                State::Ready => "green",
                State::Failed | State::Removed => "red",
                State::Waiting => "white",
                State::Enabling
                | State::Enabled
                | State::Probing
                | State::Bound
                | State::Initialising => "cyan",
            };
            if *shown != colour {
                *shown = colour;
                bar.set_style(look.bar(colour));
            }
            bar.set_prefix(format!("{:width$}", gpu.name().to_string()));
            bar.set_position(gpu.now.furthest as u64 * 2);
            bar.set_message(message(gpu, progress, now));
        }
    }

    /// Shows the last picture of a boot; its bars stay.
    pub fn finish(&mut self, boot: &str, progress: &Progress, now: Instant) {
        self.update(boot, progress, now);
        let Some(bars) = self.boots.remove(boot) else {
            return;
        };
        bars.head.abandon();
        bars.gpus.values().for_each(|(bar, _)| bar.abandon());
    }

    /// Removes a boot's bars, to make room for others.
    pub fn remove(&mut self, boot: &str) {
        let Some(bars) = self.boots.remove(boot) else {
            return;
        };
        bars.gpus
            .values()
            .for_each(|(bar, _)| bar.finish_and_clear());
        bars.head.finish_and_clear();
    }
}

/// Start of a boot id, which suffices for all other commands.
pub fn tag(boot: &str) -> String {
    let start: String = boot
        .split('.')
        .next()
        .unwrap_or(boot)
        .chars()
        .take(TAG)
        .collect();
    printable(&start)
}

/// Nanoseconds as seconds with one digit, for values that are redrawn ten times a second.
fn tenths(ns: u64) -> String {
    format!("{}.{} s", ns / 1_000_000_000, ns / 100_000_000 % 10)
}

fn head(boot: &str, progress: &Progress, now: Instant) -> String {
    let mut words = vec![format!("boot {}", tag(boot))];
    words.extend(progress.sandbox.clone());
    words.push(tenths(progress.guest_ns(now)));
    words.push(format!(
        "{} of {} GPUs ready",
        progress.ready(),
        progress.gpus().count()
    ));
    if progress.failed() > 0 {
        words.push(format!("{} failed", progress.failed()));
    }
    let over = progress.outcome(now);
    if let (None, Some((what, since_ns))) = (&over, progress.beside()) {
        words.push(format!(
            "{what} for {}",
            tenths(progress.guest_ns(now).saturating_sub(since_ns))
        ));
    }
    if let Some(Outcome::Failed(_)) = over {
        words.push("FAILED".to_string());
    }
    words.join("  ")
}

fn message(gpu: &Gpu, progress: &Progress, now: Instant) -> String {
    let (state, since_ns) = (gpu.now.state, gpu.now.since_ns);
    let in_spec = if gpu.now.is_published {
        "  published"
    } else {
        ""
    };
    match state {
        State::Failed => match why(gpu).unwrap_or_default() {
            (step, reason) if step.is_empty() => format!("failed: {reason}"),
            (step, reason) => format!("failed {step}: {reason}"),
        },
        State::Ready => format!("ready at {}{in_spec}", tenths(since_ns)),
        State::Removed => format!("removed at {}", tenths(since_ns)),
        State::Waiting
        | State::Enabling
        | State::Enabled
        | State::Probing
        | State::Bound
        | State::Initialising => {
            let passed = progress.guest_ns(now).saturating_sub(since_ns);
            let others = progress
                .others_ns(state)
                .map(|ns| format!("  others {}", tenths(ns)))
                .unwrap_or_default();
            format!("{:12} {:>7}{in_spec}{others}", state.name(), tenths(passed))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_templates_are_templates() {
        for (look, paint) in [
            (
                Look {
                    colour: true,
                    unicode: true,
                },
                ".cyan",
            ),
            (
                Look {
                    colour: false,
                    unicode: false,
                },
                "",
            ),
        ] {
            assert!(
                ProgressStyle::with_template(&format!(
                    "{{prefix}} {{bar:{CELLS}{paint}}} {{wide_msg}}"
                ))
                .is_ok()
            );
            // Draws nothing, and must not panic because of its own characters.
            let bar = ProgressBar::with_draw_target(Some(CELLS), ProgressDrawTarget::hidden());
            bar.set_style(look.bar("cyan"));
            bar.set_position(5);
            bar.tick();
        }
        assert!(ProgressStyle::with_template("{wide_msg}").is_ok());
    }

    #[test]
    fn a_boot_is_called_by_the_start_of_its_id() {
        assert_eq!(
            tag("70dbd104-1672-403e-a607-0f86be4a0ade.ndjson"),
            "70dbd104"
        );
        assert_eq!(tag("x\u{1b}.ndjson"), "x\\x1b");
        assert_eq!(tag(""), "");
    }

    #[test]
    fn seconds_have_one_digit_and_do_not_run_ahead() {
        assert_eq!(tenths(1_999_999_999), "1.9 s");
        assert_eq!(tenths(0), "0.0 s");
    }
}
