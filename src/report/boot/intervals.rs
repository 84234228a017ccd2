//! Sets of time: sorted half-open intervals that neither touch nor overlap.

/// A set of points in time, in ns.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Intervals(Vec<(i64, i64)>);

/// Converts times of the guest to times of a story, where what came before the kernel is negative;
/// that scale ends after 292 years.
pub fn ns(boottime_ns: u64) -> i64 {
    i64::try_from(boottime_ns).unwrap_or(i64::MAX)
}

/// Distance between two times; 0 if the end is not after the beginning.
pub fn length(begin_ns: i64, end_ns: i64) -> u64 {
    if end_ns > begin_ns {
        end_ns.abs_diff(begin_ns)
    } else {
        0
    }
}

/// Sum of the lengths of intervals, those that overlap counted each.
pub fn sum(of: &[(i64, i64)]) -> u64 {
    of.iter()
        .map(|(begin, end)| length(*begin, *end))
        .fold(0, u64::saturating_add)
}

impl Intervals {
    /// Union of any intervals; those that end before they begin are empty.
    pub fn union(mut of: Vec<(i64, i64)>) -> Self {
        of.retain(|(begin, end)| begin < end);
        of.sort_unstable();
        let mut set: Vec<(i64, i64)> = Vec::new();
        for (begin, end) in of {
            match set.last_mut() {
                Some(last) if begin <= last.1 => last.1 = last.1.max(end),
                _ => set.push((begin, end)),
            }
        }
        Self(set)
    }

    /// Parts of an interval that are not in this set.
    pub fn missing_in(&self, begin_ns: i64, end_ns: i64) -> Vec<(i64, i64)> {
        let mut from = begin_ns;
        let mut out = Vec::new();
        let first = self.0.partition_point(|(_, end)| *end <= begin_ns);
        for (begin, end) in self
            .0
            .iter()
            .skip(first)
            .take_while(|(begin, _)| *begin < end_ns)
        {
            if *begin > from {
                out.push((from, *begin));
            }
            from = from.max(*end);
        }
        if from < end_ns {
            out.push((from, end_ns));
        }
        out
    }

    /// Total time in the set.
    pub fn total_ns(&self) -> u64 {
        sum(&self.0)
    }
}

/// A part of a whole in percent, with two digits: the same text on every machine.
pub fn percent(part: u64, whole: u64) -> f64 {
    if whole == 0 {
        return 0.0;
    }
    let hundredths = (u128::from(part) * 10_000 + u128::from(whole) / 2) / u128::from(whole);
    hundredths as f64 / 100.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overlapping_and_touching_intervals_are_one() {
        let set = Intervals::union(vec![(5, 9), (0, 2), (2, 3), (8, 12), (4, 4), (20, 1)]);
        assert_eq!(set.0, [(0, 3), (5, 12)]);
        assert_eq!(set.total_ns(), 10);
    }

    #[test]
    fn what_is_missing_and_what_is_there_make_the_whole() {
        let set = Intervals::union(vec![(0, 3), (5, 12), (15, 16)]);
        for (begin, end) in [
            (-5, 20),
            (1, 2),
            (3, 5),
            (2, 13),
            (12, 15),
            (16, 16),
            (i64::MIN, i64::MAX),
        ] {
            let missing = set.missing_in(begin, end);
            let there = Intervals::union(
                set.0
                    .iter()
                    .map(|(b, e)| (*b.max(&begin), *e.min(&end)))
                    .collect(),
            );
            let gaps = Intervals::union(missing.clone());
            assert_eq!(gaps.0, missing, "in order, apart");
            assert_eq!(
                there.total_ns() + gaps.total_ns(),
                length(begin, end),
                "{begin}..{end}"
            );
        }
        assert_eq!(length(i64::MIN, i64::MAX), u64::MAX);
    }
}
