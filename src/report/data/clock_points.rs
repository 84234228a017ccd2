//! The guest's wall clock against its boot clock, by its `clock` events: one at the init's start,
//! and one after each step.

use super::clock_offset::Clock;
use super::compact_record::Record;
use kata_gpu_wire::names;
use kata_gpu_wire::record::Kind;

/// Limit of events kept: each line is compared with each. The init reports fewer; a hostile guest
/// can send any number.
const MAX_POINTS: usize = 128;

/// A time on the guest's boot clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placed {
    pub boottime_ns: u64,
    /// Whether there was no `clock` event, or several times had this wall clock.
    pub approximate: bool,
}

/// The guest's `clock` events.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClockPoints {
    /// CLOCK_BOOTTIME and CLOCK_REALTIME in ns, in order of the first.
    points: Vec<(i64, i64)>,
}

impl ClockPoints {
    pub fn of(records: &[Record]) -> Self {
        let mut points = Self::default();
        records.iter().for_each(|record| points.add(record));
        points
    }

    /// Takes a `clock` event; other records change nothing.
    pub fn add(&mut self, record: &Record) {
        if record.kind == Kind::Event
            && record.name == names::CLOCK
            && let Some(realtime_ns) = record.fields.signed("realtime_ns")
            && let Ok(boottime_ns) = i64::try_from(record.boottime_ns)
            && self.points.len() < MAX_POINTS
            && let Err(at) = self
                .points
                .binary_search_by_key(&boottime_ns, |(boottime, _)| *boottime)
        {
            self.points.insert(at, (boottime_ns, realtime_ns));
        }
    }

    pub fn is_empty(&self) -> bool {
        self.points.is_empty()
    }

    /// Boot time of a line with this wall clock. Without a `clock` event the guest's wall clock
    /// counts as the host's; without a sample of the host's, too, None.
    pub fn place(&self, realtime_ns: i64, host: &Clock) -> Option<Placed> {
        let Some(found) = boottime_of(&self.points, realtime_ns) else {
            let boottime_ns = host.boottime_at(realtime_ns)?;
            return Some(Placed {
                boottime_ns,
                approximate: true,
            });
        };
        let boottime_ns = u64::try_from(found.boottime_ns.max(0)).ok()?;
        Some(Placed {
            boottime_ns,
            approximate: found.several,
        })
    }
}

/// A boot time by clock events.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Found {
    pub boottime_ns: i64,
    /// The wall clock was stepped back: it showed this time more than once, and this is the first.
    pub several: bool,
}

/// Boot time at which the wall clock showed `realtime_ns`, by (boot time, wall clock) of each event
/// in order of boot time. Each event holds from its own time to the next one's; a time outside all
/// of these belongs to the nearest: a step is reported a moment after it.
pub fn boottime_of(points: &[(i64, i64)], realtime_ns: i64) -> Option<Found> {
    let late_by = |at: usize| {
        let (boottime, realtime) = points[at];
        let implied = i128::from(boottime) + i128::from(realtime_ns) - i128::from(realtime);
        let before = if at == 0 {
            0
        } else {
            (i128::from(boottime) - implied).max(0)
        };
        let after = points
            .get(at + 1)
            .map_or(0, |(next, _)| (implied - i128::from(*next)).max(0));
        (before + after, implied)
    };
    let (nearest, point) = (0..points.len())
        .map(|at| (late_by(at), at))
        .min_by_key(|((late, _), at)| (*late, *at))?;
    let several = nearest.0 == 0 && (point + 1..points.len()).any(|at| late_by(at).0 == 0);
    let limits = (i128::from(i64::MIN), i128::from(i64::MAX));
    let boottime_ns = i64::try_from(nearest.1.clamp(limits.0, limits.1)).unwrap_or(0);
    Some(Found {
        boottime_ns,
        several,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::clock_offset::Sample;
    use kata_gpu_wire::record;
    use serde_json::Map;

    const S: i64 = 1_000_000_000;

    /// Boot times in s of wall clocks in s, and whether there are several.
    fn placed(points: &[(i64, i64)], realtime: &[i64]) -> Vec<(i64, bool)> {
        let points: Vec<(i64, i64)> = points.iter().map(|(b, r)| (b * S, r * S)).collect();
        let at = |r: &i64| {
            boottime_of(&points, r * S).map(|found| (found.boottime_ns / S, found.several))
        };
        realtime.iter().filter_map(at).collect()
    }

    #[test]
    fn a_line_is_placed_by_the_clock_event_before_it() {
        // Set ahead by 7 s at 61 s: a line just before the step is nearer to the event after it.
        let ahead = [(1, 100), (61, 167)];
        assert_eq!(
            placed(&ahead, &[90, 100, 159, 167, 200]),
            [
                (-9, false),
                (1, false),
                (60, false),
                (61, false),
                (94, false)
            ]
        );
        // Between step and event, which came 2 s later; by the event before it would be at 68 s.
        assert_eq!(placed(&[(1, 100), (63, 169)], &[167]), [(61, false)]);
        // Set back by 7 s: a time that was shown twice was shown first before the step.
        let back = [(1, 100), (61, 153)];
        assert_eq!(
            placed(&back, &[150, 155, 161]),
            [(51, false), (56, true), (69, false)]
        );
        assert_eq!(placed(&[], &[1]), []);
    }

    #[test]
    fn without_a_clock_event_the_hosts_clock_is_taken() {
        let clock_event = |boottime_ns, realtime_ns: i64| {
            let fields = Map::from_iter([("realtime_ns".to_string(), realtime_ns.into())]);
            Record::from(record::Record {
                boottime_ns,
                fields,
                ..record::Record::new(Kind::Event, names::CLOCK)
            })
        };
        let (mut points, mut host) = (ClockPoints::default(), Clock::default());
        let exact = |boottime_ns| {
            Some(Placed {
                boottime_ns,
                approximate: false,
            })
        };
        assert_eq!(points.place(5, &host), None);
        host.add(Sample {
            boottime_ns: 0,
            offset_ns: 1000,
            error_ns: 0,
        });
        assert_eq!(
            points.place(1500, &host),
            Some(Placed {
                boottime_ns: 500,
                approximate: true
            })
        );
        // In any order; set ahead by an hour between the two.
        points.add(&clock_event(200, 3_600_000_010_100));
        points.add(&clock_event(100, 10_000));
        assert_eq!(points.place(10_050, &host), exact(150));
        assert_eq!(points.place(3_600_000_010_110, &host), exact(210));
        assert_eq!(
            points.place(0, &host),
            exact(0),
            "not before the kernel's start"
        );
    }
}
