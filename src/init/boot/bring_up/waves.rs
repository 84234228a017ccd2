//! Choice of the initialisations that run together: the cheapest order from the current state to
//! the last usable GPU, by the costs of the driver's locks.
//!
//! A wave of n initialisations takes n S1 + S2 + n S3. S1 and S3 are under the driver's global
//! lock, S3 also under every GPU's own, so an initialisation that joins late keeps all others
//! waiting. No GPU is enabled during an S1; during S2 and S3 the lane goes on. The choice at each
//! boundary is whether to begin a wave with the ready GPUs or to enable one more GPU first. The
//! recursion is within 1 % of the best order that a search finds (`tests/bench/run schedule`).

use std::collections::HashMap;
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

/// Accepted delay of the last usable GPU for an earlier first one: one part in this many.
const FIRST_SOONER: u64 = 32;

/// GPUs that are still to be enabled and count in a choice: 247 would take 50 ms a call, and hardly
/// ever change the choice.
const AHEAD: usize = 32;

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

/// Choice at a boundary.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Choice {
    /// Initialise the ready GPUs.
    Begin,
    /// Enable the next GPU.
    Enable,
    /// Wait until the wave that runs is over.
    Hold,
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

    /// Scale of the later parts where a wave of `count` initialisations took `took`.
    pub fn scale_of(&self, count: u32, took: Duration) -> u32 {
        let later = took.saturating_sub(self.parts[0] * count);
        let of_h100 = Self::new(self.enable, self.parallel, Some(Duration::ZERO), H100);
        let whole = of_h100.wave(count).as_micros().max(1);
        u32::try_from(later.as_micros() * u128::from(H100) / whole).unwrap_or(u32::MAX)
    }

    /// Duration of a wave of `count` initialisations.
    pub fn wave(&self, count: u32) -> Duration {
        let [s1, s2, s3] = self.parts;
        if self.parallel {
            s1 * count + s2 + s3 * count
        } else {
            (s1 + s2 + s3) * count
        }
    }

    /// Time from a wave's begin until its first initialisation ends its second part and takes the
    /// global lock.
    pub fn first_is_back(&self) -> Duration {
        self.parts[0] + self.parts[1]
    }

    /// Choice while no wave runs. `first`: no GPU is usable yet.
    pub fn idle(&self, ready: usize, rest: usize, first: bool) -> Choice {
        let (mut ways, rest) = (Ways::new(self), rest.min(AHEAD));
        match (ways.begin(ready, rest), ways.enable(ready, rest)) {
            (None, None) => Choice::Hold,
            (None, Some(_)) => Choice::Enable,
            (Some(_), None) => Choice::Begin,
            (Some(begin), Some(enable)) if first && begin <= enable + enable / FIRST_SOONER => {
                Choice::Begin
            }
            (Some(begin), Some(enable)) => {
                if begin <= enable {
                    Choice::Begin
                } else {
                    Choice::Enable
                }
            }
        }
    }

    /// Choice during a wave that goes on for `over`.
    pub fn during_wave(&self, over: Duration, ready: usize, rest: usize) -> Choice {
        match Ways::new(self).during_wave(us(over), ready, rest.min(AHEAD)) {
            (_, 0) => Choice::Hold,
            _ => Choice::Enable,
        }
    }
}

fn us(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

/// Costs of the cheapest orders from a state, in µs.
struct Ways {
    enable: u64,
    parts: [u64; 3],
    parallel: bool,
    /// Results by number of ready GPUs and number of GPUs that are not enabled.
    known: HashMap<(usize, usize), u64>,
}

impl Ways {
    fn new(costs: &Costs) -> Self {
        Self {
            enable: us(costs.enable).max(1),
            parts: costs.parts.map(us),
            parallel: costs.parallel,
            known: HashMap::new(),
        }
    }

    fn idle(&mut self, ready: usize, rest: usize) -> u64 {
        if let Some(known) = self.known.get(&(ready, rest)) {
            return *known;
        }
        let ways = [self.begin(ready, rest), self.enable(ready, rest)];
        let best = ways.into_iter().flatten().min().unwrap_or(0);
        self.known.insert((ready, rest), best);
        best
    }

    fn begin(&mut self, ready: usize, rest: usize) -> Option<u64> {
        let wave = if self.parallel { ready } else { ready.min(1) };
        let ([s1, s2, s3], count) = (self.parts, wave as u64);
        (ready > 0).then(|| count * s1 + self.during_wave(s2 + count * s3, ready - wave, rest).0)
    }

    fn enable(&mut self, ready: usize, rest: usize) -> Option<u64> {
        (rest > 0).then(|| self.enable + self.idle(ready + 1, rest - 1))
    }

    /// Cost, and the number of GPUs enabled during the wave for it.
    fn during_wave(&mut self, over: u64, ready: usize, rest: usize) -> (u64, usize) {
        let fit = usize::try_from(over / self.enable)
            .unwrap_or(usize::MAX)
            .min(rest);
        let costs = [fit, (fit + 1).min(rest)].map(|m| {
            (
                over.max(m as u64 * self.enable) + self.idle(ready + m, rest - m),
                m,
            )
        });
        costs.into_iter().min().unwrap_or((over, 0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn costs(enable_ms: u64) -> Costs {
        Costs::new(Duration::from_millis(enable_ms), true, None, H100)
    }

    #[test]
    fn one_gpu_initialises_per_long_enabling_all_after_short_ones() {
        assert_eq!(costs(3300).idle(1, 7, false), Choice::Begin);
        assert_eq!(
            costs(3300).during_wave(Duration::from_millis(1800), 0, 7),
            Choice::Enable
        );
        assert_eq!(costs(3).idle(1, 7, true), Choice::Enable);
        assert_eq!(costs(3).idle(8, 0, false), Choice::Begin);
        assert_eq!(
            costs(1000).idle(1, 7, false),
            Choice::Enable,
            "two together cost less"
        );
        assert_eq!(
            costs(1000).idle(1, 7, true),
            Choice::Begin,
            "but hardly less, and the first one is wanted"
        );
        assert_eq!(costs(1000).idle(0, 0, false), Choice::Hold);
    }

    #[test]
    fn a_ready_wave_waits_for_one_that_is_about_to_end() {
        assert_eq!(
            costs(3300).during_wave(Duration::from_millis(10), 3, 1),
            Choice::Hold
        );
        assert_eq!(
            costs(3300).during_wave(Duration::from_millis(1800), 1, 0),
            Choice::Hold
        );
    }

    #[test]
    fn parts_are_what_was_measured() {
        let enable = Duration::from_millis(1);
        let first = Some(Duration::from_millis(100));
        let assumed = Costs::new(enable, true, first, H100);
        let took = Duration::from_millis(2 * 100 + 2600 + 2 * 1000);
        let costs = Costs::new(enable, true, first, assumed.scale_of(2, took));
        assert_eq!(costs.parts, [100, 2600, 1000].map(Duration::from_millis));
        assert_eq!(costs.wave(2), took);
        let serial = Costs::new(enable, false, None, H100);
        assert_eq!(serial.wave(2), Duration::from_millis(4200));
    }

    #[test]
    fn any_number_of_gpus_is_no_work() {
        let (many, over) = (1_000_000, Duration::from_secs(1));
        assert_eq!(costs(500).idle(1, 15, false), Choice::Enable);
        assert_eq!(costs(3300).idle(1, many, false), Choice::Begin);
        assert_eq!(costs(3300).during_wave(over, 0, many), Choice::Enable);
    }
}
