//! Places all stamps of the logs on one clock, the base: the guest's boot clock where a log has it
//! (lines of our init, a boot's file), else printk's, else the wall clock beside the kernel's
//! lines, else any other clock.
//!
//! One model: each clock has an offset to the base, with a bound on its error, from the best that
//! the data has:
//!
//! - times of both clocks at one moment (a kernel record of a boot's file, `clock.printk`, the
//!   `clock` events and the two times of our init's lines, the collector's samples);
//! - else times at which the host read lines: a delay is never negative, but the least delay is
//!   not known. [`least_delay`]'s error is an estimate, from how close the fastest lines are;
//! - else the order of lines in the file, which bounds an offset from both sides;
//! - else an assumption, with its error: the wall clocks agree to a second.

use super::facts::{Fact, InitLine, Item, Log, Stamp};
use crate::data::boot_file::{BootFile, ImportedClock};
use crate::data::clock_offset::{Clock, Sample};
use crate::data::clock_points::boottime_of;
use crate::data::compact_record::Record;
use kata_gpu_wire::names;
use kata_gpu_wire::record::Kind;
use serde_json::Value;

/// Points of the guest's wall clock that are kept: each line is compared with each.
const MAX_POINTS: usize = 128;
/// Resolution of a wall clock beside the kernel's lines, if none of its times has a fraction.
const SECOND_NS: u64 = 1_000_000_000;
/// Agreement of the wall clocks: a runtime or an RTC sets the guest's to the second.
const WALL_CLOCKS_AGREE_NS: u64 = 1_000_000_000;
/// printk prints microseconds.
const PRINTK_NS: u64 = 1_000;
/// Largest delay of a line that was seen once (a guess, stated as the error).
const ONE_LINE_NS: u64 = 1_000_000_000;
/// Least error of a delay.
const LEAST_DELAY_NS: u64 = 100_000;
/// Largest difference of two offsets of a pair of clocks without a step of a clock in between, and
/// of printk's clock from the boot clock.
const STEP_NS: u64 = 500_000_000;

/// The base minus another clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Offset {
    ns: i64,
    error_ns: u64,
}

/// A time on the base clock; negative before its zero.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Placed {
    pub at_ns: i64,
    pub error_ns: u64,
}

/// Offsets between the clocks.
#[derive(Clone, Debug, Default)]
pub struct Clocks {
    /// Meaning of 0 on the base clock, for people.
    pub zero: &'static str,
    /// Evidence for each offset, for people.
    pub evidence: Vec<ImportedClock>,
    kernel: Option<Offset>,
    /// Offset of the wall clock beside the kernel's lines.
    wall: Option<Offset>,
    /// Points at which the guest's wall clock is known, in order: the base's time and its own.
    guest: Vec<(i64, i64)>,
    guest_error_ns: u64,
    host: Option<Offset>,
    samples: Clock,
}

impl Clocks {
    /// Relates the clocks by the logs of one boot, each in file order, and the boot's file.
    pub fn new(logs: &[Log], boot: Option<&BootFile>) -> Self {
        let mut clocks = Self {
            zero: "kernel start",
            ..Self::default()
        };
        let items: Vec<&Item> = logs.iter().flat_map(|log| &log.items).collect();
        let has = |is: fn(&Stamp) -> bool| items.iter().any(|item| is(&item.stamp));
        if boot.is_some() || has(|stamp| matches!(stamp, Stamp::Boot(_))) {
            clocks.kernel_by_init(&items, boot);
            clocks.guest_by_init(&items, boot);
        } else if has(|stamp| matches!(stamp, Stamp::Kernel(_))) {
            clocks.kernel = Some(Offset { ns: 0, error_ns: 0 });
        } else if has(|stamp| matches!(stamp, Stamp::Wall(_))) {
            clocks.wall_by_first(&items);
        } else {
            clocks.without_kernel(&items);
            return clocks;
        }
        clocks.host_by_reading(&items, boot);
        if clocks.guest.is_empty() {
            clocks.guest_by_lines(logs, &items);
        }
        if clocks.host.is_none()
            && clocks.samples.samples() == 0
            && let Some((base, guest)) = clocks.guest.first()
        {
            let offset = Offset {
                ns: base.saturating_sub(*guest),
                error_ns: clocks.guest_error_ns.saturating_add(WALL_CLOCKS_AGREE_NS),
            };
            clocks.host_is(
                offset,
                "the guest's wall clock is taken for the host's".into(),
            );
        }
        clocks
    }

    /// Places a stamp on the base clock; None for a clock that nothing relates to the base.
    pub fn place(&self, stamp: Stamp) -> Option<Placed> {
        let by = |offset: Option<Offset>, ns: i64| {
            let Offset {
                ns: offset,
                error_ns,
            } = offset?;
            let at_ns = ns.checked_add(offset)?;
            Some(Placed { at_ns, error_ns })
        };
        match stamp {
            Stamp::Boot(at_ns) => Some(Placed { at_ns, error_ns: 0 }),
            Stamp::Kernel(ns) => by(self.kernel, ns),
            Stamp::Wall(ns) => by(self.wall, ns),
            Stamp::Guest(ns) => Some(Placed {
                at_ns: boottime_of(&self.guest, ns)?.boottime_ns,
                error_ns: self.guest_error_ns,
            }),
            Stamp::Host(ns) => match self.samples.boottime_at(ns) {
                // `boottime_at` stops at 0, the sample's offset does not.
                Some(at) => {
                    let sample = self.samples.best_at(at)?;
                    Some(Placed {
                        at_ns: ns.checked_sub(sample.offset_ns)?,
                        error_ns: sample.error_at(at),
                    })
                }
                None => by(self.host, ns),
            },
        }
    }

    /// A sample of the host's clock for the boot's file; None where that has samples, or nothing
    /// is known.
    pub fn sample(&self) -> Option<Sample> {
        let host = self.host.filter(|_| self.samples.samples() == 0)?;
        Some(Sample {
            boottime_ns: 0,
            offset_ns: host.ns.checked_neg()?,
            error_ns: host.error_ns,
        })
    }

    fn note(&mut self, clock: &str, by: String, error_ns: u64) {
        self.evidence.push(ImportedClock {
            clock: clock.to_string(),
            by,
            error_ns,
        });
    }

    fn host_is(&mut self, offset: Offset, by: String) {
        self.note("host", by, offset.error_ns);
        self.host = Some(offset);
    }

    fn guest_is(&mut self, guest_ns: i64, base_ns: i64, error_ns: u64) {
        (self.guest, self.guest_error_ns) = (vec![(base_ns, guest_ns)], error_ns);
    }

    fn kernel_by_init(&mut self, items: &[&Item], boot: Option<&BootFile>) {
        let both = |record: &Record| {
            let printk_us = record.fields.signed("printk_us")?;
            let boottime_ns = i64::try_from(record.boottime_ns).ok()?;
            boottime_ns.checked_sub(printk_us.checked_mul(1000)?)
        };
        let mut records = boot.into_iter().flat_map(|boot| &boot.records);
        let event = init_lines(items).find(|(_, line)| line.name == names::CLOCK_PRINTK);
        let event = event.and_then(|(_, line)| line.fields.get("offset_ns")?.as_i64());
        let (ns, by, error_ns) = if let Some(ns) = records.find_map(both) {
            (ns, "kernel records of the boot's file", PRINTK_NS)
        } else if let Some(ns) = event {
            (ns, "our init's clock.printk event", LEAST_DELAY_NS)
        } else {
            (0, "taken for the boot clock", STEP_NS)
        };
        self.kernel = Some(Offset { ns, error_ns });
        if items
            .iter()
            .any(|item| matches!(item.stamp, Stamp::Kernel(_)))
        {
            self.note("kernel", by.into(), error_ns);
        }
    }

    fn guest_by_init(&mut self, items: &[&Item], boot: Option<&BootFile>) {
        let records = boot.into_iter().flat_map(|boot| &boot.records);
        let of_records = records
            .filter(|record| record.kind == Kind::Event && record.name == names::CLOCK)
            .filter_map(|record| {
                let realtime_ns = record.fields.signed("realtime_ns");
                Some((i64::try_from(record.boottime_ns).ok()?, realtime_ns?))
            });
        let of_lines = init_lines(items)
            .filter(|(_, line)| line.name == names::CLOCK)
            .filter_map(|(at, line)| {
                Some((at, line.fields.get("realtime_ns").and_then(Value::as_i64)?))
            });
        let pairs: Vec<(i64, i64)> = init_lines(items)
            .filter_map(|(at, line)| Some((at, line.realtime_ns?)))
            .collect();
        let mut points: Vec<(i64, i64)> = of_records.chain(of_lines).collect();
        let mut by = "our init's clock events";
        if points.is_empty() {
            (points, by) = (pairs.clone(), "the two times of our init's lines");
        }
        points.truncate(MAX_POINTS);
        points.sort_unstable();
        let wrong = pairs.iter().filter_map(|(at, realtime_ns)| {
            let found = boottime_of(&points, *realtime_ns)?;
            Some(found.boottime_ns.abs_diff(*at)).filter(|wrong_ns| *wrong_ns < STEP_NS)
        });
        let error_ns = wrong.max().unwrap_or(0).max(PRINTK_NS);
        (self.guest, self.guest_error_ns) = (points, error_ns);
        if !self.guest.is_empty() {
            self.note("guest", by.into(), error_ns);
        }
    }

    fn host_by_reading(&mut self, items: &[&Item], boot: Option<&BootFile>) {
        let samples = || boot.into_iter().flat_map(BootFile::clock_samples);
        self.samples = Clock::of(samples());
        if let Some(error_ns) = samples().map(|sample| sample.error_ns).min() {
            let by = format!(
                "{} clock sample(s) of the boot's file",
                self.samples.samples()
            );
            return self.note("host", by, error_ns);
        }
        let delays = items.iter().filter_map(|item| {
            let placed = match item.stamp {
                Stamp::Kernel(_) | Stamp::Wall(_) | Stamp::Boot(_) => self.place(item.stamp)?,
                Stamp::Guest(_) | Stamp::Host(_) => return None,
            };
            Some((item.read_ns?.checked_sub(placed.at_ns)?, placed.error_ns))
        });
        let delays: Vec<(i64, u64)> = delays.collect();
        if let Some((delay, error_ns)) = least_delay(delays.iter().map(|(delay, _)| *delay)) {
            let own = delays.iter().map(|(_, error_ns)| *error_ns).max();
            let offset = Offset {
                ns: delay.saturating_neg(),
                error_ns: error_ns.saturating_add(own.unwrap_or(0)),
            };
            let n = delays.len();
            self.host_is(
                offset,
                format!("the time at which the host read {n} lines (an estimate)"),
            );
        }
    }

    fn guest_by_lines(&mut self, logs: &[Log], items: &[&Item]) {
        let guests = items.iter().filter_map(|item| match item.stamp {
            Stamp::Guest(ns) => Some((ns, item.read_ns)),
            _ => None,
        });
        let Some((first, _)) = guests.clone().next() else {
            return;
        };
        let delays = guests.filter_map(|(ns, read_ns)| read_ns?.checked_sub(ns));
        if let (Some(host), Some((delay, error_ns))) = (self.host, least_delay(delays)) {
            let error_ns = error_ns.saturating_add(host.error_ns);
            let base = first.saturating_add(delay).saturating_add(host.ns);
            self.guest_is(first, base, error_ns);
            let by = "the time at which the host read the agent's lines (an estimate)";
            self.note("guest", by.into(), error_ns);
        } else if let Some(Offset { ns, error_ns }) = self.guest_by_order(logs) {
            self.guest_is(first, first.saturating_add(ns), error_ns);
            let by = "the order of the agent's and the kernel's lines (an estimate)";
            self.note("guest", by.into(), error_ns);
        }
    }

    /// The guest's wall clock by the order of lines: a line stands behind lines that were written
    /// before it. Lines can overtake each other on a console, so that the bounds may cross: their
    /// overlap is part of the error.
    fn guest_by_order(&self, logs: &[Log]) -> Option<Offset> {
        /// The base minus the guest's clock at each of its lines, had it been written at the time
        /// of the kernel line before it.
        fn bounds(times: impl Iterator<Item = (Option<i64>, Option<i64>)>) -> Vec<i64> {
            let mut kernel = None;
            let bound = |(at, guest): (Option<i64>, Option<i64>)| {
                kernel = at.or(kernel);
                Some(kernel?.saturating_sub(guest?))
            };
            times.filter_map(bound).collect()
        }
        let (mut lower, mut upper) = (Vec::new(), Vec::new());
        for log in logs {
            let times = log.items.iter().map(|item| match item.stamp {
                Stamp::Kernel(_) | Stamp::Wall(_) => {
                    (self.place(item.stamp).map(|placed| placed.at_ns), None)
                }
                Stamp::Guest(ns) => (None, Some(ns)),
                Stamp::Boot(_) | Stamp::Host(_) => (None, None),
            });
            lower.extend(bounds(times.clone()));
            upper.extend(bounds(times.rev()));
        }
        let (lower, upper) = (lower.into_iter().max(), upper.into_iter().min());
        let one = lower.or(upper)?;
        let (Some(lower), Some(upper)) = (lower, upper) else {
            return Some(Offset {
                ns: one,
                error_ns: ONE_LINE_NS,
            });
        };
        let half = upper.abs_diff(lower) / 2;
        Some(Offset {
            ns: lower.min(upper).saturating_add_unsigned(half),
            error_ns: half.max(LEAST_DELAY_NS),
        })
    }

    /// Sets 0 to the first line of the kernel, where only a wall clock stands beside its lines.
    fn wall_by_first(&mut self, items: &[&Item]) {
        let times = || {
            items.iter().filter_map(|item| match item.stamp {
                Stamp::Wall(ns) => Some(ns),
                _ => None,
            })
        };
        let Some(first) = times().min() else { return };
        let is_whole = |ns: i64| ns.unsigned_abs() % SECOND_NS == 0;
        let error_ns = if times().all(is_whole) {
            SECOND_NS
        } else {
            LEAST_DELAY_NS
        };
        self.zero = "the first line of the kernel in these logs, which have no other clock of it";
        self.wall = Some(Offset {
            ns: first.saturating_neg(),
            error_ns,
        });
        self.note("kernel", "the wall clock beside its lines".into(), error_ns);
    }

    /// Sets 0 to the first known time, where no log has the guest's kernel.
    fn without_kernel(&mut self, items: &[&Item]) {
        let time = |item: &&Item| match item.stamp {
            Stamp::Guest(ns) | Stamp::Host(ns) => Some(ns),
            Stamp::Kernel(_) | Stamp::Wall(_) | Stamp::Boot(_) => None,
        };
        let Some(first) = items.iter().filter_map(time).min() else {
            return;
        };
        self.zero = "the first line of these logs: none of them has the guest's kernel";
        self.host = Some(Offset {
            ns: first.saturating_neg(),
            error_ns: 0,
        });
        let has_host = items
            .iter()
            .any(|item| matches!(item.stamp, Stamp::Host(_)));
        self.guest_is(first, 0, if has_host { WALL_CLOCKS_AGREE_NS } else { 0 });
    }
}

/// Lines of our init, with their boot time.
fn init_lines<'a>(items: &[&'a Item]) -> impl Iterator<Item = (i64, &'a InitLine)> {
    items
        .iter()
        .filter_map(|item| match (item.stamp, &item.fact) {
            (Stamp::Boot(at), Fact::Init(line)) => Some((at, line)),
            _ => None,
        })
}

/// The least of some delays, and its error as an estimate of no delay.
fn least_delay(delays: impl Iterator<Item = i64>) -> Option<(i64, u64)> {
    let mut delays: Vec<i64> = delays.collect();
    delays.sort_unstable();
    let least = *delays.first()?;
    // The distance of the fastest tenth of the lines from the fastest line estimates the delay of
    // the fastest.
    let tenth = delays.get((delays.len() / 10).max(1));
    let error_ns = tenth.map_or(ONE_LINE_NS, |tenth| {
        tenth.abs_diff(least).max(LEAST_DELAY_NS)
    });
    Some((least, error_ns))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::agent_log::AgentEvent;
    use crate::import::kernel_lines::Meaning;
    use kata_gpu_wire::record::Level;

    const MS: i64 = 1_000_000;

    fn item(stamp: Stamp, read_ms: Option<i64>, fact: Fact) -> Item {
        Item {
            stamp,
            read_ns: read_ms.map(|ms| ms * MS),
            file: 0,
            line: 1,
            fact,
        }
    }

    fn kernel(ms: i64, read_ms: Option<i64>) -> Item {
        let (text, meaning) = ("NVRM: x".into(), Meaning::Other);
        item(
            Stamp::Kernel(ms * MS),
            read_ms,
            Fact::Kernel { text, meaning },
        )
    }

    fn agent(ms: i64, read_ms: Option<i64>) -> Item {
        let fact = Fact::Agent(AgentEvent::Ready);
        item(Stamp::Guest(ms * MS), read_ms, fact)
    }

    fn clocks(items: Vec<Item>) -> Clocks {
        let sandbox = None;
        Clocks::new(&[Log { sandbox, items }], None)
    }

    #[test]
    fn the_least_delayed_line_places_the_host() {
        // The kernel started at 1000 s of the host; lines came 3, 1, 8 and 1 ms late. The guest's
        // wall clock is 60 s behind.
        let clocks = clocks(vec![
            kernel(0, Some(1_000_003)),
            kernel(500, Some(1_000_501)),
            agent(940_700, Some(1_000_702)),
            kernel(900, Some(1_000_908)),
            kernel(950, Some(1_000_951)),
        ]);
        let host = clocks.place(Stamp::Host(1_000_500 * MS)).unwrap();
        assert_eq!((host.at_ns, host.error_ns), (499 * MS, LEAST_DELAY_NS));
        let guest = clocks.place(Stamp::Guest(940_800 * MS)).unwrap();
        assert!(
            guest.at_ns.abs_diff(800 * MS) <= guest.error_ns,
            "{guest:?}"
        );
        assert_eq!(clocks.sample().unwrap().offset_ns, 1_000_001 * MS);
    }

    #[test]
    fn without_the_host_the_order_of_lines_places_the_agent() {
        let clocks = clocks(vec![
            kernel(100, None),
            agent(5_150, None),
            kernel(200, None),
            kernel(300, None),
            agent(5_310, None),
            kernel(320, None),
        ]);
        // Offset between -5010 and -4990 ms.
        let placed = clocks.place(Stamp::Guest(5_310 * MS)).unwrap();
        assert_eq!((placed.at_ns, placed.error_ns), (310 * MS, 10_000_000));
        let host = clocks.place(Stamp::Host(5_310 * MS)).unwrap();
        assert_eq!((host.at_ns, host.error_ns), (310 * MS, 1_010 * MS as u64));
    }

    #[test]
    fn our_inits_lines_place_the_guests_clocks() {
        let init = |ms: i64, name: &str, fields: Value| {
            let line = InitLine {
                took_ns: None,
                name: name.into(),
                kind: Kind::Event,
                level: Level::Info,
                gpu: None,
                error: None,
                fields: fields.as_object().unwrap().clone(),
                version: "1".into(),
                realtime_ns: Some((5_000 + ms) * MS),
            };
            item(Stamp::Boot(ms * MS), None, Fact::Init(line))
        };
        let printk = serde_json::json!({"offset_ns": 30 * MS});
        let of_kernel = |items| clocks(items).place(Stamp::Kernel(MS)).unwrap();
        let exact = vec![init(100, "clock.printk", printk), kernel(1, None)];
        let guest = clocks(exact.clone())
            .place(Stamp::Guest(5_200 * MS))
            .unwrap();
        assert_eq!((guest.at_ns, guest.error_ns), (200 * MS, PRINTK_NS));
        assert_eq!(of_kernel(exact).at_ns, 31 * MS);
        let assumed = vec![init(100, "stage0", serde_json::json!({})), kernel(1, None)];
        let wanted = (MS, STEP_NS);
        let placed = of_kernel(assumed);
        assert_eq!((placed.at_ns, placed.error_ns), wanted);
    }

    #[test]
    fn one_line_is_worth_a_second_of_error_and_none_nothing() {
        assert_eq!(least_delay([7].into_iter()), Some((7, ONE_LINE_NS)));
        assert_eq!(least_delay([].into_iter()), None);
        assert_eq!(clocks(vec![]).place(Stamp::Kernel(1)), None);
        let clocks = clocks(vec![kernel(1, None)]);
        assert_eq!(clocks.place(Stamp::Guest(1)), None);
    }

    #[test]
    fn extremes_do_no_harm() {
        let clocks = clocks(vec![
            kernel(0, Some(i64::MAX / MS)),
            agent(i64::MIN / MS, Some(i64::MAX / MS)),
            kernel(1, Some(i64::MIN / MS)),
        ]);
        for stamp in [
            Stamp::Host(i64::MIN),
            Stamp::Guest(i64::MAX),
            Stamp::Kernel(i64::MAX),
            Stamp::Boot(i64::MIN),
        ] {
            let _any = clocks.place(stamp);
        }
    }
}
