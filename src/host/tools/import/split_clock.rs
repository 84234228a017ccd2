//! Stamps of bpftrace programs that print `strftime("..%S", nsecs)` and, as the fraction, `nsecs %
//! 1000000000`: the seconds are of the wall clock, the fraction is of the clock since the machine's
//! start. Both tick together, but their seconds do not begin together, so such stamps jump back and
//! forth by a second.
//!
//! Let `t` be the fraction at which the wall clock's second changes. A printed stamp `P` of
//! fraction `f` is then late by `t` where `f >= t` and early by `1 s - t` where `f < t`. Two stamps
//! at an impossible distance (backwards, or a second off a duration that the trace measured) lie on
//! different sides of `t`, which bounds it. Two stamps at the measured distance lie on the same
//! side, which narrows the bounds. The middle of the bounds is used, and half their distance is the
//! error; a stamp whose fraction is between the bounds is known to half a second.

const SECOND: i64 = 1_000_000_000;
/// Largest error of a distance that is not off by a second.
const HALF: i64 = SECOND / 2;

/// Bounds of `t`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Split {
    /// `t` is above this,
    above: i64,
    /// and at or below this.
    upto: i64,
    contradicted: bool,
    bounded: bool,
    /// Fractions on the same side of `t`, the lower one first.
    together: Vec<(i64, i64)>,
}

/// Pairs on the same side that are kept.
const MAX_TOGETHER: usize = 10_000;

impl Default for Split {
    fn default() -> Self {
        Self { above: 0, upto: SECOND, contradicted: false, bounded: false, together: vec![] }
    }
}

impl Split {
    /// Two stamps in the order in which they were taken, and the time between them where it was
    /// measured.
    pub fn learn(&mut self, first_ns: i64, second_ns: i64, took_ns: Option<i64>) {
        let distance = second_ns.saturating_sub(first_ns);
        let off = match took_ns {
            Some(took) => distance.saturating_sub(took),
            None if distance < 0 => distance,
            None => return,
        };
        let (first, second) = (first_ns.rem_euclid(SECOND), second_ns.rem_euclid(SECOND));
        // A distance that is a second too long: the first fraction is below `t`, the second is not.
        // A second too short: the other way round.
        let (below, at_or_above) = match off {
            HALF..=1_500_000_000 => (first, second),
            -1_500_000_000..=-1 if took_ns.is_none() || off < -HALF => (second, first),
            _ => {
                if took_ns.is_some() && off.abs() < HALF / 10 && self.together.len() < MAX_TOGETHER {
                    self.together.push((first.min(second), first.max(second)));
                }
                return;
            }
        };
        if below >= at_or_above {
            self.contradicted = true;
            return;
        }
        self.bounded = true;
        self.above = self.above.max(below);
        self.upto = self.upto.min(at_or_above);
        self.contradicted |= self.above >= self.upto;
    }

    /// Narrows the bounds by pairs on the same side; call it when all is learnt.
    pub fn narrow(&mut self) {
        while let Some((above, upto)) = self.together.iter().find_map(|(low, high)| {
            let above = if *low <= self.above && self.above < *high { *high } else { self.above };
            let upto = if *low < self.upto && self.upto <= *high { *low } else { self.upto };
            (self.bounded && (above, upto) != (self.above, self.upto)).then_some((above, upto))
        }) {
            (self.above, self.upto) = (above, upto);
            if above >= upto {
                self.contradicted = true;
                return;
            }
        }
    }

    /// The true time of a stamp, and the bound on its error.
    pub fn time(&self, printed_ns: i64) -> (i64, u64) {
        if !self.is_split() {
            return (printed_ns, SECOND.unsigned_abs());
        }
        let fraction = printed_ns.rem_euclid(SECOND);
        if fraction > self.above && fraction < self.upto {
            return (printed_ns.saturating_add(HALF - fraction), HALF.unsigned_abs());
        }
        let t = self.above + (self.upto - self.above) / 2;
        let shift = SECOND - t - if fraction >= self.upto { SECOND } else { 0 };
        (printed_ns.saturating_add(shift), ((self.upto - self.above) / 2).unsigned_abs().max(1))
    }

    /// Whether the stamps have shown that their halves are of two clocks.
    pub fn is_split(&self) -> bool {
        self.bounded && !self.contradicted
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Stamp that bpftrace prints at wall-clock time `wall`, on a machine whose clocks differ by
    /// `difference`.
    fn print(wall: i64, difference: i64) -> i64 {
        wall.div_euclid(SECOND) * SECOND + (wall - difference).rem_euclid(SECOND)
    }

    #[test]
    fn the_true_time_is_within_the_stated_error_for_any_offset() {
        for difference in [1, 123_456_789, 500_000_000, 733_000_000, 999_999_999, 17 * SECOND + 250_000_000] {
            let mut split = Split::default();
            let calls: Vec<(i64, i64)> = (0..40i64).map(|i| (1_000 * SECOND + i * 377_000_000, 203_000_000)).collect();
            let mut last = None;
            for (wall, took) in &calls {
                let (begin, end) = (print(*wall, difference), print(wall + took, difference));
                if let Some(last) = last {
                    split.learn(last, begin, None);
                }
                split.learn(begin, end, Some(*took));
                last = Some(end);
            }
            split.narrow();
            // Nothing jumps, and nothing can be learnt, if the seconds begin together.
            let apart = (100_000_000..900_000_000).contains(&(difference % SECOND));
            assert!(split.is_split() || !apart, "{difference}");
            for (wall, _) in &calls {
                let (time, error) = split.time(print(*wall, difference));
                assert!(time.abs_diff(*wall) <= error, "{difference}: {time} is not {wall} +-{error}");
                assert!(error <= 500_000_000 || !split.is_split(), "{error}");
            }
        }
    }

    #[test]
    fn stamps_of_one_clock_stay_and_are_trusted_to_a_second() {
        let mut split = Split::default();
        for i in 0..10 {
            split.learn(i * HALF, (i + 1) * HALF, Some(HALF));
        }
        assert!(!split.is_split());
        assert_eq!(split.time(42), (42, 1_000_000_000));
    }

    #[test]
    fn nonsense_contradicts_itself_and_is_left_alone() {
        let mut split = Split::default();
        split.learn(900_000_000, 100_000_000, None);
        split.learn(1_100_000_000, 1_000_000_100, None);
        split.learn(200, 100, None);
        split.learn(i64::MAX, i64::MIN, Some(i64::MIN));
        split.learn(950_000_000, 920_000_000, None);
        assert_eq!(split.time(i64::MIN).1, 1_000_000_000);
    }
}
