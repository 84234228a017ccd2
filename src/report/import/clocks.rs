//! Relates all clocks of the logs to one: the guest's boot clock where a log has it (lines of our
//! init, an event stream), else printk's, else any other clock. Each relation is found in the data,
//! by the best way that the data allows, and comes with a bound on its error:
//!
//! - printk and boot clock: a stream's kernel records have both; else by cause and effect (a step's
//!   end is not before the kernel line that it caused, a step is not before what it waited for),
//!   which leaves an interval;
//! - the guest's wall clock: our init's `clock` events, or the two times of its lines; else the
//!   times at which the host read lines of both kinds, or the order of the lines in the file;
//! - the host's wall clock: a stream's clock samples; else the times at which the host read kernel
//!   lines, of which the least delayed counts; else the guest's wall clock is taken for the host's,
//!   to a second.
//!
//! A delay is never negative, but the least delay is not known: [`least_delay`]'s error is an
//! estimate, from how close the fastest lines are.

use super::item::{Fact, Item, Stamp};
use super::kernel_lines;
use super::kernel_lines::Meaning;
use crate::data::boot_file::BootFile;
use crate::data::clock_offset::{Clock, Sample};
use crate::data::clock_points::boottime_of;
use crate::data::compact_record::{Field, Record};
use kata_gpu_wire::names;
use kata_gpu_wire::pci_address::PciAddress;
use kata_gpu_wire::record::Kind;
use serde_json::Value;
use std::collections::HashMap;

/// Points of the guest's wall clock that are kept: each line is compared with each.
const MAX_POINTS: usize = 128;

/// Agreement of the wall clocks: a runtime or an RTC sets the guest's to the second.
const WALL_CLOCKS_AGREE_NS: u64 = 1_000_000_000;
/// printk prints microseconds.
const PRINTK_NS: u64 = 1_000;
/// Largest delay of a line that was seen once (a guess, stated as the error).
const ONE_LINE_NS: u64 = 1_000_000_000;
/// Least error of a delay.
const LEAST_DELAY_NS: u64 = 100_000;
/// Largest difference of two offsets of a pair of clocks without a step of a clock in between.
const STEP_NS: u64 = 500_000_000;

/// A clock minus another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Offset {
    pub ns: i64,
    pub error_ns: u64,
}

/// Evidence for a clock's relation to the base, for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Note {
    pub clock: &'static str,
    pub by: String,
    pub error_ns: u64,
}

/// A time on the base clock; negative before its zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placed {
    pub at_ns: i64,
    pub error_ns: u64,
}

/// Offsets between the clocks.
#[derive(Clone, Debug, Default)]
pub struct Clocks {
    /// Meaning of 0 on the base clock, for people.
    pub zero: String,
    pub notes: Vec<Note>,
    /// Base minus printk.
    kernel: Option<Offset>,
    /// Points at which the guest's wall clock is known, in order: the base's time and its own.
    guest: Vec<(i64, i64)>,
    guest_errors_ns: Vec<u64>,
    /// Base minus the host's wall clock.
    host: Option<Offset>,
    samples: Clock,
}

impl Clocks {
    /// Relates the clocks by the items of one boot, in file order, and its stream.
    pub fn new(items: &[&Item], stream: Option<&BootFile>) -> Self {
        let mut clocks = Self {
            zero: "kernel start".into(),
            ..Self::default()
        };
        let has = |is: fn(&Stamp) -> bool| items.iter().any(|item| is(&item.stamp));
        let boot = stream.is_some() || has(|s| matches!(s, Stamp::Boot(_)));
        let kernel = has(|s| matches!(s, Stamp::Kernel(_)));
        if boot {
            clocks.kernel_beside_boot(items, stream);
            clocks.guest_beside_boot(items, stream);
        } else if kernel {
            clocks.kernel = Some(Offset { ns: 0, error_ns: 0 });
        } else {
            clocks.without_kernel(items);
            return clocks;
        }
        clocks.host_beside_base(items, stream);
        if clocks.guest.is_empty() {
            clocks.guest_beside_base(items);
        }
        if clocks.host.is_none() && clocks.samples.samples() == 0 && !clocks.guest.is_empty() {
            let (base, guest) = clocks.guest.first().copied().unwrap_or_default();
            let error = clocks.guest_errors_ns.first().copied().unwrap_or_default();
            clocks.host_is(
                Offset {
                    ns: base.saturating_sub(guest),
                    error_ns: error.saturating_add(WALL_CLOCKS_AGREE_NS),
                },
                "the guest's wall clock is taken for the host's".into(),
            );
        }
        clocks
    }

    /// Places a stamp on the base clock; None for a clock that nothing relates to the base.
    pub fn place(&self, stamp: Stamp) -> Option<Placed> {
        let by = |offset: Option<Offset>, ns: i64| {
            let offset = offset?;
            Some(Placed {
                at_ns: ns.checked_add(offset.ns)?,
                error_ns: offset.error_ns,
            })
        };
        match stamp {
            Stamp::Boot(ns) => Some(Placed {
                at_ns: ns,
                error_ns: 0,
            }),
            Stamp::Kernel(ns) => by(self.kernel, ns),
            Stamp::Guest(ns) => {
                let found = boottime_of(&self.guest, ns)?;
                Some(Placed {
                    at_ns: found.boottime_ns,
                    error_ns: *self.guest_errors_ns.get(found.point)?,
                })
            }
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

    /// A sample of the host's clock for the boot's file; None where the stream has samples, or
    /// nothing is known.
    pub fn sample(&self) -> Option<Sample> {
        let host = self.host.filter(|_| self.samples.samples() == 0)?;
        Some(Sample {
            boottime_ns: 0,
            offset_ns: host.ns.checked_neg()?,
            error_ns: host.error_ns,
        })
    }

    fn note(&mut self, clock: &'static str, by: String, error_ns: u64) {
        self.notes.push(Note {
            clock,
            by,
            error_ns,
        });
    }

    fn host_is(&mut self, offset: Offset, by: String) {
        self.note("host", by, offset.error_ns);
        self.host = Some(offset);
    }

    fn kernel_beside_boot(&mut self, items: &[&Item], stream: Option<&BootFile>) {
        let both = |record: &Record| {
            let printk_us = record
                .fields
                .get("printk_us")
                .and_then(Field::as_i64)
                .filter(|_| record.kind == Kind::Kmsg)?;
            i64::try_from(record.boottime_ns)
                .ok()?
                .checked_sub(printk_us.checked_mul(1000)?)
        };
        if let Some(ns) = stream.and_then(|s| s.records.iter().find_map(both)) {
            self.kernel = Some(Offset {
                ns,
                error_ns: PRINTK_NS,
            });
            return self.note(
                "kernel",
                "the stream's kernel records have both times".into(),
                PRINTK_NS,
            );
        }
        let causes = Causes::of(items);
        if let Some((offset, how)) = causes.offset() {
            self.note("kernel", how, offset.error_ns);
            self.kernel = Some(offset);
        } else if items.iter().any(|i| matches!(i.stamp, Stamp::Kernel(_))) {
            self.note(
                "kernel",
                "taken for the boot clock: no line here relates the two".into(),
                STEP_NS,
            );
            self.kernel = Some(Offset {
                ns: 0,
                error_ns: STEP_NS,
            });
        }
    }

    fn guest_beside_boot(&mut self, items: &[&Item], stream: Option<&BootFile>) {
        let mut events: Vec<(i64, i64)> = Vec::new();
        let mut pairs: Vec<(i64, i64)> = Vec::new();
        for record in stream
            .iter()
            .flat_map(|s| &s.records)
            .filter(|r| r.kind == Kind::Event && r.name == names::CLOCK)
        {
            events.extend(
                i64::try_from(record.boottime_ns)
                    .ok()
                    .zip(record.fields.get("realtime_ns").and_then(Field::as_i64)),
            );
        }
        for item in items {
            let (Stamp::Boot(at), Fact::Init(line)) = (item.stamp, &item.fact) else {
                continue;
            };
            if line.name == names::CLOCK {
                events.extend(
                    line.fields
                        .get("realtime_ns")
                        .and_then(Value::as_i64)
                        .map(|realtime| (at, realtime)),
                );
            }
            pairs.extend(line.realtime_ns.map(|realtime| (at, realtime)));
        }
        let by = if events.is_empty() {
            "the two times of our init's lines"
        } else {
            "our init's clock events"
        };
        let mut points = if events.is_empty() {
            pairs.clone()
        } else {
            events
        };
        points.truncate(MAX_POINTS);
        points.sort_unstable();
        let mut errors = vec![PRINTK_NS; points.len()];
        for (at, realtime) in pairs {
            let Some(found) = boottime_of(&points, realtime) else {
                continue;
            };
            let wrong_ns = found.boottime_ns.abs_diff(at);
            if let Some(error) = errors.get_mut(found.point).filter(|_| wrong_ns < STEP_NS) {
                *error = wrong_ns.max(*error);
            }
        }
        (self.guest, self.guest_errors_ns) = (points, errors);
        if let Some(error) = self.guest_errors_ns.iter().copied().max() {
            self.note("guest", by.into(), error);
        }
    }

    /// Sets the one point at which the guest's wall clock is known.
    fn guest_is(&mut self, guest_ns: i64, base_ns: i64, error_ns: u64) {
        (self.guest, self.guest_errors_ns) = (vec![(base_ns, guest_ns)], vec![error_ns]);
    }

    fn host_beside_base(&mut self, items: &[&Item], stream: Option<&BootFile>) {
        stream
            .into_iter()
            .flat_map(BootFile::clock_samples)
            .for_each(|sample| self.samples.add(sample));
        if let Some(best) = stream.and_then(|s| s.clock_samples().min_by_key(|s| s.error_ns)) {
            return self.note(
                "host",
                format!("the stream's {} clock sample(s)", self.samples.samples()),
                best.error_ns,
            );
        }
        let delays = |item: &&Item| {
            let placed = self
                .place(item.stamp)
                .filter(|_| matches!(item.stamp, Stamp::Kernel(_) | Stamp::Boot(_)))?;
            Some((item.read_ns?.checked_sub(placed.at_ns)?, placed.error_ns))
        };
        let found: Vec<(i64, u64)> = items.iter().filter_map(delays).collect();
        if let Some((delay, error_ns)) = least_delay(found.iter().map(|(d, _)| *d)) {
            let own = found.iter().map(|(_, e)| *e).max().unwrap_or(0);
            let offset = Offset {
                ns: delay.saturating_neg(),
                error_ns: error_ns.saturating_add(own),
            };
            self.host_is(
                offset,
                format!("when the host read {} of the guest's lines, the least delayed counts (an estimate)", found.len()),
            );
        }
    }

    fn guest_beside_base(&mut self, items: &[&Item]) {
        let guests = items.iter().filter_map(|i| {
            if let Stamp::Guest(ns) = i.stamp {
                Some((ns, i.read_ns))
            } else {
                None
            }
        });
        let guests: Vec<(i64, Option<i64>)> = guests.collect();
        let Some((first, _)) = guests.first().copied() else {
            return;
        };
        let read = guests
            .iter()
            .filter_map(|(ns, read)| read.and_then(|r| r.checked_sub(*ns)));
        if let (Some(host), Some((delay, error_ns))) = (self.host, least_delay(read)) {
            let error_ns = error_ns.saturating_add(host.error_ns);
            let base = first.saturating_add(delay).saturating_add(host.ns);
            self.guest_is(first, base, error_ns);
            return self.note(
                "guest",
                "when the host read the agent's lines, the least delayed counts (an estimate)"
                    .into(),
                error_ns,
            );
        }
        if let Some(Offset { ns, error_ns }) = by_order(items) {
            self.guest_is(first, first.saturating_add(ns), error_ns);
            self.note(
                "guest",
                "the order of the agent's and the kernel's lines in the file (an estimate)".into(),
                error_ns,
            );
        }
    }

    /// Sets 0 to the first known time, where no log has the guest's kernel.
    fn without_kernel(&mut self, items: &[&Item]) {
        let time = |item: &&&Item| match item.stamp {
            Stamp::Guest(ns) | Stamp::Host(ns) => Some(ns),
            Stamp::Kernel(_) | Stamp::Boot(_) => None,
        };
        let Some((first, zero)) = items
            .iter()
            .filter_map(|item| Some((time(&item)?, item)))
            .min_by_key(|(ns, _)| *ns)
        else {
            return;
        };
        self.zero = format!(
            "the first thing in these logs ({}): none of them has the guest's kernel",
            zero.format
        );
        let offset = Offset {
            ns: first.saturating_neg(),
            error_ns: 0,
        };
        self.host = Some(offset);
        let agrees = if items.iter().any(|i| matches!(i.stamp, Stamp::Host(_))) {
            WALL_CLOCKS_AGREE_NS
        } else {
            0
        };
        self.guest_is(first, 0, agrees);
    }
}

/// The least of some delays, and its error as an estimate of no delay.
pub fn least_delay(delays: impl Iterator<Item = i64>) -> Option<(i64, u64)> {
    let mut delays: Vec<i64> = delays.collect();
    delays.sort_unstable();
    let least = *delays.first()?;
    if delays.len() == 1 {
        return Some((least, ONE_LINE_NS));
    }
    // The distance of the fastest tenth of the lines from the fastest line estimates the delay of
    // the fastest.
    let tenth = delays
        .get((delays.len() / 10).max(1))
        .copied()
        .unwrap_or(least);
    Some((least, tenth.abs_diff(least).max(LEAST_DELAY_NS)))
}

/// Kernel clock minus the guest's wall clock, from the order of lines: a line stands behind lines
/// that were written before it. Lines can overtake each other on a console, so that the bounds may
/// cross: their overlap is part of the error.
fn by_order(items: &[&Item]) -> Option<Offset> {
    let (mut lower, mut upper): (Option<i64>, Option<i64>) = (None, None);
    for item in items {
        let Stamp::Guest(guest) = item.stamp else {
            continue;
        };
        let (before, after) = item.between;
        lower = lower.max(before.map(|kernel| kernel.saturating_sub(guest)));
        if let Some(bound) = after.map(|kernel| kernel.saturating_sub(guest)) {
            upper = Some(upper.map_or(bound, |u| u.min(bound)));
        }
    }
    Some(match (lower, upper) {
        (Some(lower), Some(upper)) => {
            let half = upper.abs_diff(lower) / 2;
            Offset {
                ns: lower.min(upper).saturating_add_unsigned(half),
                error_ns: half.max(LEAST_DELAY_NS),
            }
        }
        (Some(one), None) | (None, Some(one)) => Offset {
            ns: one,
            error_ns: ONE_LINE_NS,
        },
        (None, None) => return None,
    })
}

/// Bounds on boot clock minus printk's clock: pairs of a kernel line and a line of our init of
/// which one cannot be before the other.
#[derive(Debug, Default)]
struct Causes {
    /// Boot minus printk is at least each of `lower`, at most each of `upper`.
    lower: Vec<i64>,
    upper: Vec<i64>,
}

impl Causes {
    fn of(items: &[&Item]) -> Self {
        let mut causes = Self::default();
        let mut found = HashMap::<PciAddress, i64>::new();
        let (mut start, mut enabled, mut bound, mut failed) =
            (None, HashMap::new(), HashMap::new(), HashMap::new());
        let mut loads = Vec::new();
        for item in items {
            let (Stamp::Boot(at), Fact::Init(line)) = (item.stamp, &item.fact) else {
                continue;
            };
            match (line.name.as_str(), line.gpu, line.kind) {
                (names::INIT_START, ..) => start = start.or(Some(at)),
                (names::GPU_FOUND, Some(gpu), _) => drop(found.entry(gpu).or_insert(at)),
                (names::GPU_ENABLE, Some(gpu), Kind::End) => drop(enabled.entry(gpu).or_insert(at)),
                (names::GPU_BOUND, Some(gpu), _) => drop(bound.entry(gpu).or_insert(at)),
                (names::GPU_FAILED, Some(gpu), _) => drop(failed.entry(gpu).or_insert(at)),
                (names::MODULE_LOAD, _, Kind::End) => loads.push(at),
                _ => {}
            }
        }
        for item in items {
            let (Stamp::Kernel(at), Fact::Kernel(text)) = (item.stamp, &item.fact) else {
                continue;
            };
            // `then`: a boot time that is not before this line. `before`: a boot time that is not
            // after it.
            let (then, before) = match kernel_lines::meaning(text) {
                Some(Meaning::RunInit { .. }) => (start, None),
                Some(Meaning::GpuFound { gpu, .. }) => (found.get(&gpu).copied(), None),
                Some(Meaning::Enabling {
                    function,
                    driver: false,
                }) => (
                    enabled.get(&function).copied(),
                    found.get(&function).copied(),
                ),
                Some(Meaning::Enabling {
                    function,
                    driver: true,
                }) => (bound.get(&function).copied(), found.get(&function).copied()),
                Some(Meaning::InitFailed { gpu }) => {
                    (failed.get(&gpu).copied(), bound.get(&gpu).copied())
                }
                // Two modules are loaded one after the other, nvidia-uvm last.
                Some(Meaning::UvmLoaded) => (
                    loads.iter().max().copied(),
                    loads.first().copied().filter(|_| loads.len() == 2),
                ),
                _ => (None, None),
            };
            causes.upper.extend(then.and_then(|b| b.checked_sub(at)));
            causes.lower.extend(before.and_then(|b| b.checked_sub(at)));
        }
        causes
    }

    fn offset(&self) -> Option<(Offset, String)> {
        let (lower, upper) = (self.lower.iter().max(), self.upper.iter().min());
        let pairs = self.lower.len() + self.upper.len();
        let how = format!("cause and effect in {pairs} pair(s) of kernel and init lines");
        match (lower, upper) {
            (Some(lower), Some(upper)) => {
                let half = upper.abs_diff(*lower) / 2;
                let how = if lower > upper {
                    format!("{how} that contradict each other")
                } else {
                    how
                };
                Some((
                    Offset {
                        ns: (*lower).min(*upper).saturating_add_unsigned(half),
                        error_ns: half.max(PRINTK_NS),
                    },
                    how,
                ))
            }
            (Some(one), None) | (None, Some(one)) => Some((
                Offset {
                    ns: 0,
                    error_ns: one.unsigned_abs().max(STEP_NS),
                },
                how,
            )),
            (None, None) => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::agent_log::AgentEvent;
    use crate::data::imported_record::Format;

    const MS: i64 = 1_000_000;

    fn kernel(ms: i64, read_ms: Option<i64>) -> Item {
        let item = Item::new(
            Stamp::Kernel(ms * MS),
            Format::Journal,
            1,
            Fact::Kernel("NVRM: x".into()),
        );
        Item {
            read_ns: read_ms.map(|ms| ms * MS),
            ..item
        }
    }

    fn agent(ms: i64, read_ms: Option<i64>) -> Item {
        let item = Item::new(
            Stamp::Guest(ms * MS),
            Format::Journal,
            1,
            Fact::Agent(AgentEvent::Ready),
        );
        Item {
            read_ns: read_ms.map(|ms| ms * MS),
            ..item
        }
    }

    fn clocks(items: &[Item]) -> Clocks {
        Clocks::new(&items.iter().collect::<Vec<_>>(), None)
    }

    #[test]
    fn the_least_delayed_line_places_the_host() {
        // The kernel started at 1000 s of the host; lines came 3, 1, 8 and 1 ms late. The guest's
        // wall clock is 60 s behind.
        let items = [
            kernel(0, Some(1_000_003)),
            kernel(500, Some(1_000_501)),
            agent(940_700, Some(1_000_702)),
            kernel(900, Some(1_000_908)),
            kernel(950, Some(1_000_951)),
        ];
        let clocks = clocks(&items);
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
        let between = |before: i64, item: Item, after: i64| Item {
            between: (Some(before * MS), Some(after * MS)),
            ..item
        };
        let items = [
            kernel(100, None),
            between(100, agent(5_150, None), 200),
            between(300, agent(5_310, None), 320),
        ];
        let clocks = clocks(&items);
        // Offset between -5010 and -4990 ms.
        let placed = clocks.place(Stamp::Guest(5_310 * MS)).unwrap();
        assert_eq!((placed.at_ns, placed.error_ns), (310 * MS, 10_000_000));
        let host = clocks.place(Stamp::Host(5_310 * MS)).unwrap();
        assert_eq!((host.at_ns, host.error_ns), (310 * MS, 1_010 * MS as u64));
    }

    #[test]
    fn one_line_is_worth_a_second_of_error_and_none_nothing() {
        assert_eq!(least_delay([7].into_iter()), Some((7, ONE_LINE_NS)));
        assert_eq!(least_delay([].into_iter()), None);
        assert_eq!(clocks(&[]).place(Stamp::Kernel(1)), None);
        assert_eq!(clocks(&[kernel(1, None)]).place(Stamp::Guest(1)), None);
    }

    #[test]
    fn extremes_do_no_harm() {
        let items = [
            kernel(0, Some(i64::MAX / MS)),
            agent(i64::MIN / MS, Some(i64::MAX / MS)),
            kernel(1, Some(i64::MIN / MS)),
        ];
        let clocks = clocks(&items);
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
