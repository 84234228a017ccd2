//! The guest's clock against this machine's: places events of the guest on the host's wall clock.
//!
//! The guest stamps CLOCK_BOOTTIME. A ping that left at host time T and came back after `rtt` with
//! guest time B shows that B was read between T and T + rtt, so `offset = T + rtt/2 - B`, wrong by
//! at most `rtt/2`. That bound holds at B. Away from B the two clocks may drift apart, so a
//! sample's bound grows by [`RATE_ERROR_PPM`] of the distance. At each point in time every sample
//! gives an interval that contains the truth; the intersection is the answer, and never wider than
//! that of the best sample.
//!
//! Samples with an empty intersection contradict each other: a clock was stepped between them, or
//! ran faster than assumed. Such samples are of different runs; a time between two runs gets a
//! bound that spans both answers. A step too small to contradict any bound is not detected.
//!
//! The drift between the first and the last samples is measured, not assumed: [`Clock::drift`].

use kata_gpu_wire::record::Pong;
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Limit of the difference in rate between the guest's boot clock and the host's wall clock.
/// Crystals are good to 50 ppm; the rest is for slewing by NTP on either side. An assumption, not a
/// law: a daemon that slews faster makes the printed bound too small.
pub const RATE_ERROR_PPM: u64 = 100;

/// An answered ping.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sample {
    /// Guest CLOCK_BOOTTIME of the sample.
    pub boottime_ns: u64,
    /// Host CLOCK_REALTIME minus guest CLOCK_BOOTTIME.
    pub offset_ns: i64,
    /// Half the round trip: the bound of `offset_ns` at `boottime_ns`.
    pub error_ns: u64,
}

impl Sample {
    /// Sample of a ping; None if the guest's answer cannot be that of a clock.
    pub fn from_ping(sent_realtime_ns: i64, rtt: Duration, boottime_ns: u64) -> Option<Sample> {
        let half = u64::try_from(rtt.as_nanos().div_ceil(2)).ok()?;
        let middle = sent_realtime_ns.checked_add(i64::try_from(half).ok()?)?;
        let offset_ns = middle.checked_sub(i64::try_from(boottime_ns).ok()?)?;
        Some(Sample {
            boottime_ns,
            offset_ns,
            error_ns: half,
        })
    }

    /// The bound at another time of the guest.
    pub fn error_at(&self, boottime_ns: u64) -> u64 {
        let distance_ns = self.boottime_ns.abs_diff(boottime_ns);
        self.error_ns.saturating_add(drift_ns(distance_ns))
    }
}

/// Largest drift of the clocks in this time.
fn drift_ns(passed_ns: u64) -> u64 {
    let drift = u128::from(passed_ns) * u128::from(RATE_ERROR_PPM);
    u64::try_from(drift.div_ceil(1_000_000)).unwrap_or(u64::MAX)
}

/// A point on the host's wall clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Wall {
    pub realtime_ns: i64,
    /// Bound of the error of `realtime_ns`.
    pub error_ns: u64,
}

/// Excess of the guest's boot clock over the host's wall clock, on average between two times of the
/// guest.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Drift {
    pub from_ns: u64,
    pub to_ns: u64,
    /// Parts per million; negative if the guest's clock was slower.
    pub ppm: f64,
    /// Bound of the error of `ppm`.
    pub error_ppm: f64,
}

/// Host minus guest, from the least to the greatest possible value.
#[derive(Clone, Copy, Debug)]
struct Range {
    least: i128,
    most: i128,
}

impl Range {
    fn of(sample: &Sample, boottime_ns: u64) -> Self {
        let (offset, error) = (
            i128::from(sample.offset_ns),
            i128::from(sample.error_at(boottime_ns)),
        );
        Self {
            least: offset - error,
            most: offset + error,
        }
    }

    fn common(self, other: Self) -> Self {
        Self {
            least: self.least.max(other.least),
            most: self.most.min(other.most),
        }
    }

    fn span(self, other: Self) -> Self {
        Self {
            least: self.least.min(other.least),
            most: self.most.max(other.most),
        }
    }

    fn is_empty(self) -> bool {
        self.least > self.most
    }
}

/// Whether no offset of the clocks can be behind both samples: one clock was set between them.
fn contradict(a: &Sample, b: &Sample) -> bool {
    Range::of(a, b.boottime_ns)
        .common(Range::of(b, b.boottime_ns))
        .is_empty()
}

/// Limit of samples kept of one boot: the guest's answers determine their number.
const MAX_SAMPLES: usize = 1024;

/// All samples of one boot.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Clock {
    /// In order of the guest's time.
    samples: Vec<Sample>,
    /// Start index of each run after the first.
    breaks: Vec<usize>,
}

impl Clock {
    /// Clock from these samples, in any order; each is processed once.
    pub fn of(samples: impl Iterator<Item = Sample>) -> Self {
        let mut clock = Self::default();
        samples.for_each(|sample| clock.insert(sample));
        clock.find_breaks();
        clock
    }

    pub fn add(&mut self, sample: Sample) {
        self.insert(sample);
        self.find_breaks();
    }

    fn insert(&mut self, sample: Sample) {
        if self.samples.len() >= MAX_SAMPLES {
            let mut nth = 0usize;
            self.samples.retain(|_| {
                nth += 1;
                nth % 2 == 1
            });
        }
        let at = self
            .samples
            .partition_point(|s| s.boottime_ns <= sample.boottime_ns);
        self.samples.insert(at, sample);
    }

    /// Adds a sample from another clock unless it contradicts the known ones; false: left out.
    pub fn add_if_consistent(&mut self, sample: Sample) -> bool {
        let known = self.range_at(sample.boottime_ns);
        let fits = known.is_none_or(|known| {
            !known
                .common(Range::of(&sample, sample.boottime_ns))
                .is_empty()
        });
        if fits {
            self.add(sample);
        }
        fits
    }

    /// Splits the samples into runs, each without contradiction. A new sample only has to meet the
    /// range that earlier samples of the run leave at the last one: it widens with time by the
    /// assumed rate, and no earlier sample narrows it.
    fn find_breaks(&mut self) {
        self.breaks.clear();
        let mut open: Option<(Range, u64)> = None;
        for (i, sample) in self.samples.iter().enumerate() {
            let own = Range::of(sample, sample.boottime_ns);
            let common = open.map(|(range, at)| {
                let drift = i128::from(drift_ns(sample.boottime_ns - at));
                let wider = Range {
                    least: range.least - drift,
                    most: range.most + drift,
                };
                wider.common(own)
            });
            let range = common.filter(|c| !c.is_empty()).unwrap_or(own);
            if common.is_some_and(Range::is_empty) {
                self.breaks.push(i);
            }
            open = Some((range, sample.boottime_ns));
        }
    }

    /// Number of contradictions between samples and earlier ones.
    pub fn steps(&self) -> usize {
        self.breaks.len()
    }

    /// The runs, in order of time; none is empty.
    fn runs(&self) -> Vec<&[Sample]> {
        let mut begin = 0;
        let ends = self.breaks.iter().copied().chain([self.samples.len()]);
        let run = |end| self.samples.get(std::mem::replace(&mut begin, end)..end);
        ends.filter_map(run).filter(|run| !run.is_empty()).collect()
    }

    fn range_at(&self, boottime_ns: u64) -> Option<Range> {
        let of_run = |run: &[Sample]| {
            let range = run
                .iter()
                .map(|s| Range::of(s, boottime_ns))
                .reduce(Range::common)?;
            // Rounding can separate a run without contradiction by a nanosecond.
            Some(Range {
                least: range.least.min(range.most),
                most: range.least.max(range.most),
            })
        };
        let begun = |run: &&[Sample]| run.first().is_some_and(|s| s.boottime_ns <= boottime_ns);
        let runs = self.runs();
        let before = runs.iter().copied().rfind(begun);
        let after = runs.iter().copied().find(|run| !begun(run));
        match (before, after) {
            (Some(run), _) if run.last().is_some_and(|s| boottime_ns <= s.boottime_ns) => {
                of_run(run)
            }
            // Between two runs: the time of the step is unknown.
            (Some(before), Some(after)) => Some(of_run(before)?.span(of_run(after)?)),
            (Some(run), None) | (None, Some(run)) => of_run(run),
            (None, None) => None,
        }
    }

    /// Drift between the two most informative samples of the longest run; None with fewer than two.
    /// Both ends are times of pings, so the average is right, whatever the clocks did in between.
    pub fn drift(&self) -> Option<Drift> {
        let length = |run: &&[Sample]| {
            run.last()
                .zip(run.first())
                .map(|(last, first)| last.boottime_ns - first.boottime_ns)
        };
        let run = self.runs().into_iter().max_by_key(length)?;
        let mut best: Option<Drift> = None;
        for (i, first) in run.iter().enumerate() {
            for last in run
                .iter()
                .skip(i + 1)
                .filter(|s| s.boottime_ns > first.boottime_ns)
            {
                let passed = (last.boottime_ns - first.boottime_ns) as f64;
                let error_ppm = (first.error_ns as f64 + last.error_ns as f64) / passed * 1e6;
                let ppm = (i128::from(first.offset_ns) - i128::from(last.offset_ns)) as f64
                    / passed
                    * 1e6;
                if best.is_none_or(|b| error_ppm < b.error_ppm) {
                    best = Some(Drift {
                        from_ns: first.boottime_ns,
                        to_ns: last.boottime_ns,
                        ppm,
                        error_ppm,
                    });
                }
            }
        }
        best
    }

    pub fn samples(&self) -> usize {
        self.samples.len()
    }

    /// The sample with the smallest bound at this time.
    pub fn best_at(&self, boottime_ns: u64) -> Option<Sample> {
        self.samples
            .iter()
            .min_by_key(|s| s.error_at(boottime_ns))
            .copied()
    }

    /// Host wall clock at a time of the guest; None without a sample.
    pub fn wall_at(&self, boottime_ns: u64) -> Option<Wall> {
        let range = self.range_at(boottime_ns)?;
        let middle = range.least + (range.most - range.least) / 2;
        let realtime_ns = i64::try_from(middle + i128::from(boottime_ns)).ok()?;
        Some(Wall {
            realtime_ns,
            error_ns: u64::try_from(range.most - middle).unwrap_or(u64::MAX),
        })
    }

    /// Like [`Clock::wall_at`]; a time before the guest's boot clock began is negative, and may be
    /// wrong by `before_error_ns` itself.
    pub fn wall_around(&self, at_ns: i64, before_error_ns: u64) -> Option<Wall> {
        if let Ok(boottime_ns) = u64::try_from(at_ns) {
            return self.wall_at(boottime_ns);
        }
        let start = self.wall_at(0)?;
        Some(Wall {
            realtime_ns: start.realtime_ns.checked_add(at_ns)?,
            error_ns: start.error_ns.saturating_add(before_error_ns),
        })
    }

    /// Guest boot time at a host wall-clock time, 0 for times before the kernel; None without a
    /// sample.
    pub fn boottime_at(&self, realtime_ns: i64) -> Option<u64> {
        let at = |offset_ns: i64| u64::try_from(realtime_ns.saturating_sub(offset_ns)).unwrap_or(0);
        let best = (self.samples.iter()).min_by_key(|s| s.error_at(at(s.offset_ns)))?;
        let near = at(best.offset_ns);
        // The offset at that time is known: its result is closer still.
        let there = self
            .wall_at(near)
            .and_then(|wall| wall.realtime_ns.checked_sub(i64::try_from(near).ok()?));
        Some(there.map_or(near, at))
    }
}

/// Sends pings over one connection and turns pongs into samples; decides which are worth keeping.
#[derive(Debug, Default)]
pub struct Pinger {
    next_id: u64,
    sent: VecDeque<(u64, Instant, i64)>,
    answered: u32,
    best: Option<Sample>,
    /// Guest time of the last kept sample.
    kept_ns: Option<u64>,
    /// Number of samples kept because the best one contradicted them.
    steps: u32,
}

/// Number of pings without a pause after a connection.
const BURST: u32 = 8;
/// Pause between pings after that.
pub const PING_INTERVAL: Duration = Duration::from_secs(1);
/// Pause when the boot has been silent for [`QUIET_AFTER`]: a VM lives for weeks, and nothing new
/// needs placing.
pub const PING_INTERVAL_QUIET: Duration = Duration::from_secs(60);
pub const QUIET_AFTER: Duration = Duration::from_secs(60);
/// Guest time without a kept sample after which one is kept for the drift only, although the
/// offset gets no better. An eighth of the boot's age if that is more: a VM that lives for weeks
/// leaves a hundred lines, not thousands.
const DRIFT_INTERVAL_NS: u64 = 10_000_000_000;
const DRIFT_INTERVAL_OF_AGE: u64 = 8;
/// A ping worse than the best one by this factor is useless for the drift, too.
const DRIFT_QUALITY: u64 = 4;
/// Limit of steps of a clock seen by one connection: a guest that lies about its time would have a
/// line for each answer.
const MAX_STEPS: u32 = 64;
/// Limit of remembered pings without an answer: a guest that never answers costs no more.
const MAX_OUTSTANDING: usize = 16;

/// Result of a pong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ponged {
    /// A sample better than the known ones: keep it.
    pub keep: Option<Sample>,
    /// Whether the next ping should go out at once.
    pub again: bool,
}

impl Pinger {
    /// A pinger that continues from the best sample of earlier connections.
    pub fn new(best: Option<Sample>) -> Self {
        Self {
            best,
            kept_ns: best.map(|b| b.boottime_ns),
            ..Self::default()
        }
    }

    /// Id of the next ping, which leaves now.
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

    /// Processes an answer; None if no ping with its id is outstanding.
    pub fn receive(&mut self, pong: Pong, now: Instant) -> Option<Ponged> {
        let at = self.sent.iter().position(|(id, ..)| *id == pong.pong)?;
        let (_, sent, realtime_ns) = self.sent.remove(at)?;
        self.answered = self.answered.saturating_add(1);
        let sample = Sample::from_ping(
            realtime_ns,
            now.saturating_duration_since(sent),
            pong.boottime_ns,
        );
        // Worth a line: a shorter round trip than ever, or half the bound that the best one still
        // has by now.
        let better_than = |s: &Sample, b: &Sample| {
            s.error_ns < b.error_ns || s.error_ns <= b.error_at(s.boottime_ns) / 2
        };
        let better = |s: &Sample| self.best.is_none_or(|b| better_than(s, &b));
        let due = |s: &Sample| {
            let interval = DRIFT_INTERVAL_NS.max(s.boottime_ns / DRIFT_INTERVAL_OF_AGE);
            self.kept_ns
                .is_none_or(|kept| s.boottime_ns >= kept.saturating_add(interval))
                && self
                    .best
                    .is_none_or(|b| s.error_ns / DRIFT_QUALITY <= b.error_ns)
        };
        // However slow its ping was: the best sample is from before the step.
        let step = self.steps < MAX_STEPS
            && self
                .best
                .zip(sample)
                .is_some_and(|(best, s)| contradict(&best, &s));
        self.steps += u32::from(step);
        let keep = sample.filter(|s| step || better(s) || due(s));
        if let Some(kept) = keep {
            self.kept_ns = Some(kept.boottime_ns);
            self.best = self
                .best
                .filter(|b| !step && !better_than(&kept, b))
                .or(keep);
        }
        Some(Ponged {
            keep,
            again: self.answered < BURST,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kata_gpu_test_support::property;
    use proptest::collection::vec;
    use proptest::prelude::*;
    use std::cell::Cell;

    const MS: u64 = 1_000_000;

    fn sample(boottime_ns: u64, offset_ns: i64, error_ns: u64) -> Sample {
        Sample {
            boottime_ns,
            offset_ns,
            error_ns,
        }
    }

    /// Result of a ping that leaves at `sent_ns` of the host, and whose answer comes after `rtt`.
    fn answer(pinger: &mut Pinger, sent_ns: u64, boottime_ns: u64, rtt: Duration) -> Ponged {
        let now = Instant::now();
        let pong = pinger.send(now, sent_ns as i64);
        let pong = Pong { pong, boottime_ns };
        pinger.receive(pong, now + rtt).unwrap()
    }

    #[test]
    fn a_bound_grows_with_the_distance_from_its_sample() {
        let sample = sample(10_000 * MS, 0, MS);
        assert_eq!(sample.error_at(10_000 * MS), MS);
        assert_eq!(sample.error_at(0), 2 * MS); // 10 s at 100 ppm
        assert_eq!(sample.error_at(20_000 * MS), 2 * MS);
        assert!(sample.error_at(u64::MAX) > 1_000_000 * MS);
    }

    #[test]
    fn each_time_is_placed_by_the_sample_that_knows_most_about_it() {
        let mut clock = Clock::default();
        assert_eq!(clock.wall_at(0), None);
        clock.add(sample(0, 1000, 2 * MS));
        clock.add(sample(100_000 * MS, 2000, MS));
        assert_eq!(
            clock.wall_at(0),
            Some(Wall {
                realtime_ns: 1000,
                error_ns: 2 * MS
            })
        );
        assert_eq!(
            clock.wall_at(100_000 * MS),
            Some(Wall {
                realtime_ns: 2000 + 100_000_000_000,
                error_ns: MS
            })
        );
        assert_eq!(clock.boottime_at(1000), Some(0));
        assert_eq!(
            clock.boottime_at(2000 + 100_000_000_000),
            Some(100_000 * MS)
        );
        assert_eq!(clock.boottime_at(-5), Some(0));
    }

    #[test]
    fn the_shortest_round_trip_wins_and_only_improvements_are_kept() {
        let mut pinger = Pinger::new(None);
        let (mut kept, mut again) = (Vec::new(), Vec::new());
        for (i, rtt_us) in (0..).zip([900, 400, 500, 300, 300, 800, 299, 700, 700]) {
            let rtt = Duration::from_micros(rtt_us);
            let ponged = answer(&mut pinger, i * MS, i * MS, rtt);
            kept.extend(ponged.keep.map(|s| s.error_ns / 500));
            again.push(ponged.again);
        }
        assert_eq!(kept, [900, 400, 300, 299]);
        let pauses = again.iter().position(|again| !again);
        assert_eq!(pauses, Some(7), "eight pings follow each other");
    }

    #[test]
    fn a_fresh_sample_replaces_one_that_has_aged_to_twice_its_bound() {
        let mut pinger = Pinger::new(Some(sample(0, 0, MS / 10)));
        let rtt = Duration::from_micros(200);
        let mut take = |ms: u64| answer(&mut pinger, ms * MS, ms * MS, rtt).keep.is_some();
        assert!(!take(900));
        assert!(take(1000));
        assert!(!take(1001));
    }

    #[test]
    fn a_step_of_the_clock_is_kept_however_slow_the_ping() {
        const S: u64 = 1000 * MS;
        let mut pinger = Pinger::new(Some(sample(0, 0, MS)));
        // Useless for offset and drift.
        let rtt = Duration::from_millis(200);
        let mut take = |at_s: u64, ahead_s: u64| {
            let ponged = answer(&mut pinger, (at_s + ahead_s) * S, at_s * S, rtt);
            ponged.keep.is_some()
        };
        assert!(!take(30, 0), "the clock was not set");
        assert!(take(31, 7), "set ahead by 7 s");
        assert!(!take(32, 7), "the same step");
        assert!(take(33, 0), "set back");
        // A guest that lies about its time has no line for each answer.
        let kept = (34..334).filter(|at| take(*at, at % 2 * 7)).count();
        assert!(kept < 100, "{kept} of 300");
    }

    const TRUE_OFFSET: i64 = 1_767_323_045_000_000_000;

    /// Host wall clock when a guest that runs `ppb` parts per 10^9 fast reads `boottime_ns`.
    fn truth(boottime_ns: u64, ppb: i64) -> i64 {
        let drifted = i128::from(boottime_ns) * i128::from(ppb) / 1_000_000_000;
        TRUE_OFFSET + (i128::from(boottime_ns) - drifted) as i64
    }

    /// A ping that the guest reads at `boottime_ns`, after `there` ns on the way, and whose answer
    /// takes `back` ns.
    fn ping(boottime_ns: u64, ppb: i64, there: u64, back: u64) -> Sample {
        Sample::from_ping(
            truth(boottime_ns, ppb) - there as i64,
            Duration::from_nanos(there + back),
            boottime_ns,
        )
        .unwrap()
    }

    /// A rate within the assumed limit, and a boot's samples with maximally unequal ways.
    fn simulated() -> impl Strategy<Value = (i64, Vec<Sample>)> {
        let limit = (RATE_ERROR_PPM * 1000) as i64;
        // Either way may take all of the time: the other one is then 0.
        let way = || (0..3_u64, 0..20 * MS).prop_map(|(times, ns)| times * ns);
        let pings = vec((0..600_000_u64, way(), way()), 1..21);
        (-limit..=limit, pings).prop_map(|(ppb, pings)| {
            let sample = |(at, there, back)| ping(at * MS, ppb, there, back);
            (ppb, pings.into_iter().map(sample).collect())
        })
    }

    #[test]
    fn the_bound_holds_for_any_drift_and_a_smaller_one_does_not() {
        let seen = [(); 4].map(|()| Cell::new(0));
        let [looks, broken_by_half, tighter, drifts] = &seen;
        let count = |what: &Cell<usize>, is: bool| what.set(what.get() + usize::from(is));
        let times = vec(0..700_000_u64, 20);
        proptest!(property(2000), |((ppb, samples) in simulated(), times in times)| {
            let mut clock = Clock::default();
            samples.iter().for_each(|s| clock.add(*s));
            prop_assert_eq!(clock.steps(), 0, "nobody stepped a clock");
            for at in times.into_iter().map(|at| at * MS) {
                let wall = clock.wall_at(at).unwrap();
                let wrong = wall.realtime_ns.abs_diff(truth(at, ppb));
                // Rounding of the simulated truth itself: 1 ns.
                prop_assert!(wrong <= wall.error_ns + 1, "at {at}: wrong by {wrong}, {wall:?}");
                let best = clock.best_at(at).unwrap().error_at(at);
                prop_assert!(wall.error_ns <= best + 1, "no worse than the best sample alone");
                count(tighter, wall.error_ns < best);
                // Negative control: half the bound is too small, and this test would see it.
                count(broken_by_half, wrong > wall.error_ns / 2 + 1);
                count(looks, true);
            }
            if let Some(drift) = clock.drift() {
                // ppm of the host's time against ppm of the guest's: their difference is below
                // 10^-8.
                let wrong = (drift.ppm - ppb as f64 / 1000.0).abs();
                prop_assert!(wrong <= drift.error_ppm + 0.02, "{drift:?}");
                count(drifts, true);
            }
        });
        let [looks, broken_by_half, tighter, drifts] = seen.map(Cell::into_inner);
        assert!(
            broken_by_half > looks / 20 && tighter > looks / 20 && drifts > 1500,
            "{broken_by_half} {tighter} {drifts} of {looks}"
        );
    }

    #[test]
    fn drift_is_measured_between_the_most_informative_samples() {
        let mut clock = Clock::default();
        assert_eq!(clock.drift(), None);
        // 80 ppm fast; 0.2 ms at both ends, 60 s apart: known to 400 us / 60 s = 6.7 ppm.
        for (at_ms, way_ns) in [(2_000, 200_000), (30_000, 9_000_000), (62_000, 200_000)] {
            clock.add(ping(at_ms * MS, 80_000, way_ns, way_ns));
        }
        let drift = clock.drift().unwrap();
        assert_eq!((drift.from_ns, drift.to_ns), (2_000 * MS, 62_000 * MS));
        assert!(
            (drift.ppm - 80.0).abs() < 0.1 && (drift.error_ppm - 6.67).abs() < 0.1,
            "{drift:?}"
        );
    }

    #[test]
    fn a_clock_step_is_found_and_its_bound_spans_both_sides() {
        let mut clock = Clock::default();
        let step = 250 * MS as i64;
        let stepped = |sample: Sample| Sample {
            offset_ns: sample.offset_ns + step,
            ..sample
        };
        clock.add(ping(1_000 * MS, 0, MS, MS));
        clock.add(ping(2_000 * MS, 0, MS, MS));
        clock.add(stepped(ping(5_000 * MS, 0, MS, MS)));
        // The sample comes out of order, as from a restarted collector.
        clock.add(stepped(ping(4_000 * MS, 0, MS, MS)));
        assert_eq!(clock.steps(), 1);
        for (at, offset) in [(0, 0), (1_500, 0), (2_000, 0), (4_000, step), (9_000, step)] {
            let wall = clock.wall_at(at * MS).unwrap();
            assert!(
                wall.realtime_ns.abs_diff(truth(at * MS, 0) + offset) <= wall.error_ns
                    && wall.error_ns < 2 * MS,
                "at {at}: {wall:?}"
            );
        }
        let between = clock.wall_at(3_000 * MS).unwrap();
        for offset in [0, step] {
            assert!(
                between.realtime_ns.abs_diff(truth(3_000 * MS, 0) + offset) <= between.error_ns,
                "{between:?}"
            );
        }
        assert!(
            !clock.add_if_consistent(ping(4_500 * MS, 0, 0, 0)),
            "another clock's sample cannot be on the other side"
        );
        assert!(clock.add_if_consistent(stepped(ping(4_500 * MS, 0, 0, 0))));
    }

    #[test]
    fn a_guest_whose_answers_never_fit_costs_no_more_memory() {
        let mut clock = Clock::default();
        for i in 0..3 * MAX_SAMPLES as u64 {
            clock.add(sample(
                i.wrapping_mul(0x9e37_79b9_7f4a_7c15),
                (i as i64).wrapping_mul(i64::MAX / 7),
                i % 3,
            ));
        }
        assert!(clock.samples() <= MAX_SAMPLES && clock.steps() > 100);
        for at in [0, 1, u64::MAX / 2, u64::MAX] {
            // Any result is fine, but no panic.
            let _any = (clock.wall_at(at), clock.boottime_at(at as i64));
        }
        assert!(clock.drift().is_some());
    }

    #[test]
    fn a_long_boot_leaves_samples_for_its_drift_and_a_long_life_few() {
        let mut pinger = Pinger::new(None);
        let mut kept = Vec::new();
        // 10 ms: it takes 100 s at the assumed rate until a new sample would be worth a line by
        // itself. Every third ping is hopeless.
        for second in 1..3_000u64 {
            let at = second * 1000 * MS;
            let rtt = Duration::from_millis(if second % 3 == 0 { 200 } else { 20 });
            let ponged = answer(&mut pinger, at, at, rtt);
            kept.extend(ponged.keep.map(|s| (second, s.error_ns)));
        }
        let good = kept.iter().all(|(_, error_ns)| *error_ns == 10 * MS);
        assert!(good, "{kept:?}");
        let early = kept.iter().filter(|(second, _)| *second <= 60).count();
        assert_eq!(early, 6, "{kept:?}");
        assert!(kept.len() < 60, "{} samples in 50 minutes", kept.len());
    }

    #[test]
    fn unrequested_answers_and_impossible_clocks_are_not_used() {
        let mut pinger = Pinger::new(None);
        let now = Instant::now();
        let pong = |pong, boottime_ns| Pong { pong, boottime_ns };
        assert_eq!(pinger.receive(pong(0, 0), now), None);
        let id = pinger.send(now, 0);
        let impossible = Ponged {
            keep: None,
            again: true,
        };
        assert_eq!(pinger.receive(pong(id, u64::MAX), now), Some(impossible));
        let twice = pinger.receive(pong(id, 1), now);
        assert_eq!(twice, None, "an answer counts once");
        for _ in 0..1000 {
            pinger.send(now, 0);
        }
        assert_eq!(pinger.sent.len(), MAX_OUTSTANDING);
    }
}
