//! The guest's clock beside this machine's: when, on the host's wall clock, something happened in the guest.
//!
//! The guest stamps CLOCK_BOOTTIME. A ping that left at host time T and came back after `rtt` with guest time B says: B was read between
//! T and T + rtt, so `offset = T + rtt/2 - B`, wrong by at most `rtt/2`. That bound holds at B. Away from B the two clocks may drift
//! apart, so a sample's bound grows by [`RATE_ERROR_PPM`] of the distance; for each point in time the sample with the smallest bound
//! there is used. A step of the host's wall clock in the middle of a boot is not seen and not corrected.

use crate::events::record::Pong;
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// How much faster or slower the guest's boot clock may run than the host's wall clock. Crystals are good to 50 ppm; the rest is for
/// what NTP slews on either side. An assumption, not a law: a daemon that slews faster makes the printed bound too small.
pub const RATE_ERROR_PPM: u64 = 100;

/// One ping that came back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sample {
    /// Guest CLOCK_BOOTTIME at which the sample was taken.
    pub boottime_ns: u64,
    /// Host CLOCK_REALTIME minus guest CLOCK_BOOTTIME.
    pub offset_ns: i64,
    /// Half the round trip: `offset_ns` is wrong by no more than this, at `boottime_ns`.
    pub error_ns: u64,
}

impl Sample {
    /// None when the numbers are not those of a clock (a guest can answer anything).
    pub fn from_ping(sent_realtime_ns: i64, rtt: Duration, boottime_ns: u64) -> Option<Sample> {
        let half = u64::try_from(rtt.as_nanos() / 2).ok()?;
        let middle = sent_realtime_ns.checked_add(i64::try_from(half).ok()?)?;
        let offset_ns = middle.checked_sub(i64::try_from(boottime_ns).ok()?)?;
        Some(Sample { boottime_ns, offset_ns, error_ns: half })
    }

    /// The bound at another time of the guest.
    pub fn error_at(&self, boottime_ns: u64) -> u64 {
        let drift = u128::from(self.boottime_ns.abs_diff(boottime_ns)) * u128::from(RATE_ERROR_PPM) / 1_000_000;
        self.error_ns.saturating_add(u64::try_from(drift).unwrap_or(u64::MAX))
    }
}

/// A point on the host's wall clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Wall {
    pub realtime_ns: i64,
    /// `realtime_ns` is wrong by no more than this.
    pub error_ns: u64,
}

/// All samples of one boot.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Clock {
    samples: Vec<Sample>,
}

impl Clock {
    pub fn add(&mut self, sample: Sample) {
        self.samples.push(sample);
    }

    pub fn samples(&self) -> usize {
        self.samples.len()
    }

    /// The sample that knows most about this time.
    pub fn best_at(&self, boottime_ns: u64) -> Option<Sample> {
        self.samples.iter().min_by_key(|s| s.error_at(boottime_ns)).copied()
    }

    /// Host wall clock at a time of the guest; None without a sample.
    pub fn wall_at(&self, boottime_ns: u64) -> Option<Wall> {
        let best = self.best_at(boottime_ns)?;
        let realtime_ns = best.offset_ns.checked_add(i64::try_from(boottime_ns).ok()?)?;
        Some(Wall { realtime_ns, error_ns: best.error_at(boottime_ns) })
    }

    /// Guest boot time at a host wall-clock time, 0 for what was before the kernel; None without a sample.
    pub fn boottime_at(&self, realtime_ns: i64) -> Option<u64> {
        let guess = |s: &Sample| u64::try_from(realtime_ns.saturating_sub(s.offset_ns)).unwrap_or(0);
        let best = self.samples.iter().min_by_key(|s| s.error_at(guess(s)))?;
        Some(guess(best))
    }
}

/// Sends pings over one connection and turns pongs into samples; remembers which are worth keeping.
#[derive(Debug, Default)]
pub struct Pinger {
    next_id: u64,
    sent: VecDeque<(u64, Instant, i64)>,
    answered: u32,
    best: Option<Sample>,
}

/// Pings that follow each other without pause after a connection came up.
const BURST: u32 = 8;
/// Pause between pings after that.
pub const PING_INTERVAL: Duration = Duration::from_secs(1);
/// Pause when the boot has been silent for [`QUIET_AFTER`]: a VM lives for weeks, and nothing new needs placing.
pub const PING_INTERVAL_QUIET: Duration = Duration::from_secs(60);
pub const QUIET_AFTER: Duration = Duration::from_secs(60);
/// Pings without an answer that are remembered: a guest that never answers costs no more.
const MAX_OUTSTANDING: usize = 16;

/// What a pong was good for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ponged {
    /// A sample that is better than what was known: to be kept.
    pub keep: Option<Sample>,
    /// The next ping should go out at once.
    pub again: bool,
}

impl Pinger {
    /// A pinger that knows of earlier connections' samples.
    pub fn new(best: Option<Sample>) -> Self {
        Self { best, ..Self::default() }
    }

    /// The id of the next ping, which leaves now.
    pub fn send(&mut self, now: Instant, realtime_ns: i64) -> u64 {
        let id = self.next_id;
        self.next_id += 1;
        if self.sent.len() == MAX_OUTSTANDING {
            self.sent.pop_front();
        }
        self.sent.push_back((id, now, realtime_ns));
        id
    }

    /// Whether a ping was ever sent.
    pub fn sent_any(&self) -> bool {
        self.next_id > 0
    }

    /// None for the answer to a ping that nobody sent.
    pub fn receive(&mut self, pong: Pong, now: Instant) -> Option<Ponged> {
        let at = self.sent.iter().position(|(id, ..)| *id == pong.pong)?;
        let (_, sent, realtime_ns) = self.sent.remove(at)?;
        self.answered = self.answered.saturating_add(1);
        let sample = Sample::from_ping(realtime_ns, now.saturating_duration_since(sent), pong.boottime_ns);
        // Worth a line: a shorter round trip than ever, or half the bound that the best one still has by now.
        let better = |s: &Sample| self.best.is_none_or(|b| s.error_ns < b.error_ns || s.error_ns <= b.error_at(s.boottime_ns) / 2);
        let keep = sample.filter(better);
        self.best = keep.or(self.best);
        Some(Ponged { keep, again: self.answered < BURST })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    #[test]
    fn the_true_offset_is_within_the_bound_wherever_in_the_round_trip_the_guest_read_its_clock() {
        let true_offset = 1_767_323_045_000_000_000i64;
        let (sent, rtt) = (true_offset + 5_000_000_000, 400_000u64);
        for delay in [0, 1, 100_000, 200_000, 399_999, 400_000] {
            let boottime = 5_000_000_000 + delay;
            let sample = Sample::from_ping(sent, Duration::from_nanos(rtt), boottime).unwrap();
            assert!(sample.offset_ns.abs_diff(true_offset) <= sample.error_ns, "delay {delay}: {sample:?}");
            assert_eq!(sample.error_ns, rtt / 2);
        }
    }

    #[test]
    fn a_bound_grows_with_the_distance_from_its_sample() {
        let sample = Sample { boottime_ns: 10_000 * MS, offset_ns: 0, error_ns: MS };
        assert_eq!(sample.error_at(10_000 * MS), MS);
        assert_eq!(sample.error_at(0), 2 * MS); // 10 s at 100 ppm
        assert_eq!(sample.error_at(20_000 * MS), 2 * MS);
        assert!(sample.error_at(u64::MAX) > 1_000_000 * MS);
    }

    #[test]
    fn each_time_is_placed_by_the_sample_that_knows_most_about_it() {
        let mut clock = Clock::default();
        assert_eq!(clock.wall_at(0), None);
        clock.add(Sample { boottime_ns: 0, offset_ns: 1000, error_ns: 2 * MS });
        clock.add(Sample { boottime_ns: 100_000 * MS, offset_ns: 2000, error_ns: MS });
        assert_eq!(clock.wall_at(0), Some(Wall { realtime_ns: 1000, error_ns: 2 * MS }));
        assert_eq!(clock.wall_at(100_000 * MS), Some(Wall { realtime_ns: 2000 + 100_000_000_000, error_ns: MS }));
        assert_eq!(clock.boottime_at(1000), Some(0));
        assert_eq!(clock.boottime_at(2000 + 100_000_000_000), Some(100_000 * MS));
        assert_eq!(clock.boottime_at(-5), Some(0));
    }

    #[test]
    fn the_shortest_round_trip_wins_and_only_improvements_are_kept() {
        let mut pinger = Pinger::new(None);
        let start = Instant::now();
        let mut kept = Vec::new();
        let mut again = Vec::new();
        for (i, rtt_us) in [900u64, 400, 500, 300, 300, 800, 299, 700, 700].into_iter().enumerate() {
            let sent = start + Duration::from_millis(i as u64);
            let id = pinger.send(sent, 0);
            let pong = Pong { pong: id, boottime_ns: i as u64 * MS };
            let ponged = pinger.receive(pong, sent + Duration::from_micros(rtt_us)).unwrap();
            kept.extend(ponged.keep.map(|s| s.error_ns / 500));
            again.push(ponged.again);
        }
        assert_eq!(kept, [900, 400, 300, 299]);
        assert_eq!(again, [true, true, true, true, true, true, true, false, false], "eight pings follow each other");
    }

    #[test]
    fn a_fresh_sample_replaces_one_that_has_aged_to_twice_its_bound() {
        let mut pinger = Pinger::new(Some(Sample { boottime_ns: 0, offset_ns: 0, error_ns: MS / 10 }));
        let now = Instant::now();
        let mut take = |boottime_ns| {
            let id = pinger.send(now, 0);
            pinger.receive(Pong { pong: id, boottime_ns }, now + Duration::from_micros(200)).unwrap().keep.is_some()
        };
        assert!(!take(900 * MS));
        assert!(take(1000 * MS));
        assert!(!take(1001 * MS));
    }

    #[test]
    fn answers_nobody_asked_for_and_impossible_clocks_are_not_used() {
        let mut pinger = Pinger::new(None);
        let now = Instant::now();
        assert_eq!(pinger.receive(Pong { pong: 0, boottime_ns: 0 }, now), None);
        let id = pinger.send(now, 0);
        assert_eq!(pinger.receive(Pong { pong: id, boottime_ns: u64::MAX }, now), Some(Ponged { keep: None, again: true }));
        assert_eq!(pinger.receive(Pong { pong: id, boottime_ns: 1 }, now), None, "an answer counts once");
        for _ in 0..1000 {
            pinger.send(now, 0);
        }
        assert_eq!(pinger.sent.len(), MAX_OUTSTANDING);
    }
}
