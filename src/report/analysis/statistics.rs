//! Medians, percentiles and bootstrap intervals of durations and times in ns. The same numbers give
//! the same answer on every machine.

use serde::Serialize;

/// Resamples of a bootstrap: the ends of a 95 % interval then rest on some 50 each.
const RESAMPLES: usize = 2000;
/// Fewer values than this give no interval of their median.
pub const MIN_FOR_INTERVAL: usize = 5;

/// Statistics of a set of values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Summary {
    pub n: usize,
    pub median_ns: i64,
    pub p95_ns: i64,
    pub max_ns: i64,
}

impl Summary {
    /// Statistics of the values; None if there are none.
    pub fn of(values: &[i64]) -> Option<Self> {
        let mut sorted = values.to_vec();
        let median_ns = median(&mut sorted)?;
        sorted.sort_unstable();
        Some(Self {
            n: sorted.len(),
            median_ns,
            p95_ns: percentile_of_sorted(&sorted, 95)?,
            max_ns: *sorted.last()?,
        })
    }
}

fn mean(a: i64, b: i64) -> i64 {
    ((i128::from(a) + i128::from(b)) / 2) as i64
}

/// The smallest value that at least `percent` of all do not exceed (nearest rank).
fn percentile_of_sorted(sorted: &[i64], percent: usize) -> Option<i64> {
    let rank = (sorted.len() * percent).div_ceil(100).max(1);
    sorted.get(rank - 1).copied()
}

/// The middle value, or the mean of the two in the middle; the order of `values` changes.
fn median(values: &mut [i64]) -> Option<i64> {
    let middle = values.len() / 2;
    if values.is_empty() {
        return None;
    }
    let even = values.len() % 2 == 0;
    let (below, upper, _) = values.select_nth_unstable(middle);
    let upper = *upper;
    if even {
        below.iter().max().map(|lower| mean(*lower, upper))
    } else {
        Some(upper)
    }
}

/// SplitMix64: a few lines, a period of 2^64, and no secret to keep.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Evenly from 0 to `below` - 1; the bias is below one in 2^64 / `below`.
    fn below(&mut self, below: usize) -> usize {
        ((u128::from(self.next()) * below as u128) >> 64) as usize
    }
}

/// The 95 % bootstrap interval (percentile method) of median(b) - median(a). None with fewer than
/// [`MIN_FOR_INTERVAL`] values on either side.
pub fn difference_interval(a: &[i64], b: &[i64], seed: u64) -> Option<(i64, i64)> {
    if a.len().min(b.len()) < MIN_FOR_INTERVAL {
        return None;
    }
    let mut random = Random(seed);
    let mut drawn: Vec<i64> = Vec::new();
    let mut draw = |from: &[i64]| {
        drawn.clear();
        drawn.extend((0..from.len()).filter_map(|_| from.get(random.below(from.len())).copied()));
        median(&mut drawn)
    };
    let mut differences = Vec::with_capacity(RESAMPLES);
    for _ in 0..RESAMPLES {
        let (before, after) = (draw(a)?, draw(b)?);
        differences.push(after.saturating_sub(before));
    }
    differences.sort_unstable();
    let at = |per_mille: usize| {
        differences
            .get(differences.len() * per_mille / 1000)
            .copied()
    };
    Some((at(25)?, at(975)?))
}

/// A separate seed for each name, so that a new name does not change the intervals of the others.
pub fn seed_for(name: &str, seed: u64) -> u64 {
    // FNV-1a.
    name.bytes()
        .fold(0xcbf2_9ce4_8422_2325 ^ seed, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn summaries_are_those_of_the_textbook() {
        let of =
            |values: &[i64]| Summary::of(values).map(|s| (s.n, s.median_ns, s.p95_ns, s.max_ns));
        let hundred: Vec<i64> = (1..=100).rev().collect();
        assert_eq!(of(&[]), None);
        assert_eq!(of(&[7]), Some((1, 7, 7, 7)));
        assert_eq!(of(&[4, 1, 3, 2]), Some((4, 2, 4, 4)));
        assert_eq!(of(&hundred), Some((100, 50, 95, 100)));
        assert_eq!(of(&[i64::MIN, i64::MAX]), Some((2, 0, i64::MAX, i64::MAX)));
    }

    #[test]
    fn an_interval_holds_the_true_difference_and_repeats() {
        let values = |base: i64| -> Vec<i64> { (0..40).map(|i| base + (i * 37) % 100).collect() };
        let (a, b) = (values(1000), values(1200));
        let (low, high) = difference_interval(&a, &b, 1).unwrap();
        assert!(low > 0 && low <= 200 && high >= 200, "{low}..{high}");
        let (low, high) = difference_interval(&a, &values(1001), 1).unwrap();
        assert!(low < 0 && high > 0, "noise is no difference: {low}..{high}");
        assert_eq!(
            difference_interval(&a, &b, 7),
            difference_interval(&a, &b, 7)
        );
        assert_ne!(Random(7).next(), Random(8).next());
        assert_eq!(difference_interval(&a[..4], &b, 1), None);
    }

    #[test]
    fn the_interval_covers_the_truth_at_about_its_stated_rate() {
        let mut random = Random(42);
        let mut sample = || -> Vec<i64> {
            (0..30)
                .map(|_| (0..4).map(|_| random.below(1000) as i64).sum())
                .collect()
        };
        let covered = (0..100).filter(|i| {
            let (low, high) = difference_interval(&sample(), &sample(), *i).unwrap();
            low <= 0 && high >= 0
        });
        let covered = covered.count();
        assert!(
            (85..=100).contains(&covered),
            "{covered} of 100 intervals held the truth"
        );
    }
}
