//! Costs of initialisations that run together: a wave.
//!
//! A wave of n initialisations takes n S1 + S2 + n S3. S1 and S3 are under the driver's global
//! lock, S3 also under every GPU's own, so an initialisation that joins late keeps all others
//! waiting. S1 and S3 access config space, so no GPU is enabled during them; the S2 are the lane's
//! time. Any order therefore spends each GPU's enabling, S1 and S3 one after another, and differs
//! from others by S2 beside which the lane has nothing to do. The best order that a search finds is
//! at most 5 % sooner (`tests/bench/run schedule`).

use std::time::Duration;

/// Scale of an H100, in thousandths: assumed until an initialisation has been measured.
pub const H100: u32 = 1000;
/// Longest later parts that are assumed, as a scale: 5.4 s. An initialisation that was stalled by
/// an enabling takes longer.
pub const LONGEST: u32 = 3 * H100;
/// Parts of an initialisation of an H100.
const PARTS: [Duration; 3] = [
    Duration::from_millis(300),
    Duration::from_millis(1300),
    Duration::from_millis(500),
];

/// Durations of the steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Costs {
    /// Enabling one GPU.
    pub enable: Duration,
    /// The three parts of one initialisation.
    pub parts: [Duration; 3],
    /// Whether initialisations run in parallel; else all parts are under the driver's global lock.
    pub parallel: bool,
}

/// Parts of a wave that a time was taken of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Parts {
    /// The second and the third ones.
    Later,
    Third,
}

impl Costs {
    /// Costs where the first part of an initialisation takes `first`, or an H100's time, and the
    /// later parts `scale` thousandths of an H100's.
    pub fn new(enable: Duration, parallel: bool, first: Option<Duration>, scale: u32) -> Self {
        let [s1, s2, s3] = PARTS;
        Self {
            enable,
            parts: [first.unwrap_or(s1), s2 * scale / H100, s3 * scale / H100],
            parallel,
        }
    }

    /// Scale of the later parts where these parts of a wave of `count` initialisations took `took`.
    pub fn scale_of(&self, of: Parts, count: u32, took: Duration) -> u32 {
        let [_, s2, s3] = PARTS;
        let third = s3 * count;
        let h100 = match of {
            Parts::Third => third,
            Parts::Later if self.parallel => s2 + third,
            Parts::Later => s2 * count + third,
        };
        u32::try_from(took.as_micros() * u128::from(H100) / h100.as_micros().max(1))
            .unwrap_or(u32::MAX)
    }

    /// Time from a wave's begin until its first initialisation ends its second part and takes the
    /// global lock.
    pub fn first_is_back(&self) -> Duration {
        self.parts[0] + self.parts[1]
    }

    /// Whether a wave that begins now keeps no later one waiting: enabling the `rest` fills its
    /// second part.
    pub fn is_worth(&self, rest: usize) -> bool {
        let rest = u32::try_from(rest).unwrap_or(u32::MAX);
        let [_, s2, _] = self.parts;
        !self.parallel || rest == 0 || s2 <= self.enable.saturating_mul(rest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn costs(enable_ms: u64) -> Costs {
        Costs::new(Duration::from_millis(enable_ms), true, None, H100)
    }

    #[test]
    fn a_wave_begins_where_enablings_fill_its_second_part() {
        assert!(costs(3300).is_worth(7) && costs(3300).is_worth(1));
        assert!(costs(186).is_worth(7) && !costs(185).is_worth(7));
        assert!(!costs(3).is_worth(7) && costs(3).is_worth(0));
        assert!(costs(3300).is_worth(usize::MAX));
        let one_by_one = Costs::new(Duration::from_millis(3), false, None, H100);
        assert!(one_by_one.is_worth(7));
    }

    #[test]
    fn parts_are_what_was_measured() {
        let enable = Duration::from_millis(1);
        let first = Some(Duration::from_millis(100));
        let assumed = Costs::new(enable, true, first, H100);
        let ms = Duration::from_millis;
        let scale = assumed.scale_of(Parts::Later, 2, ms(2600 + 2 * 1000));
        assert_eq!(assumed.scale_of(Parts::Third, 2, ms(2 * 1000)), scale);
        let costs = Costs::new(enable, true, first, scale);
        assert_eq!(costs.parts, [100, 2600, 1000].map(ms));
        let serial = Costs::new(enable, false, None, H100);
        assert_eq!(serial.scale_of(Parts::Later, 2, ms(3600)), H100);
    }
}
