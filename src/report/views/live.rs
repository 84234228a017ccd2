//! The live view: rows as they happen, in the order in which they happened, and a word about what
//! everybody waits for.
//!
//! No I/O and no clock of its own: news and the time go in, lines come out. A row is held for
//! [`HOLD`] after it came, because the stream and the console bring the same moments with different
//! delays; then it and everything older is printed. After [`SILENCE`] without a row it says what is
//! still going on, then again each time the silence has doubled.

use super::follow::progress::Newest;
use super::rows::{Row, Tracker};
use super::table::Table;
use crate::boot::gpu_name::GpuName;
use crate::data::agent_log::AgentLine;
use crate::data::clock_offset::{Clock, Sample};
use crate::data::clock_points::{ClockPoints, Placed};
use crate::data::compact_record::Record;
use crate::data::text::{Ink, seconds};
use kata_gpu_wire::names;
use kata_gpu_wire::record::Kind;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// How long a row waits for an older one to arrive.
const HOLD: Duration = Duration::from_millis(200);
/// Rows that are held at once.
const MAX_HELD: usize = 1024;
/// Silence after which people wonder.
const SILENCE: Duration = Duration::from_secs(1);
/// How long an agent line waits for the `clock` event that places it.
const PLACE_DEADLINE: Duration = Duration::from_secs(2);
/// Longest silence between two words: doubling ends here.
const MAX_SILENCE: Duration = Duration::from_secs(64);

/// The view of one boot.
pub struct Live {
    table: Table,
    verbose: bool,
    tracker: Tracker,
    points: ClockPoints,
    host_clock: Clock,
    held: Vec<(Instant, Row)>,
    unplaced: Vec<(Instant, AgentLine)>,
    last_ns: Option<u64>,
    newest: Newest,
    /// When the first record came.
    began: Option<Instant>,
    spoke: Instant,
    silence: Duration,
    settled: bool,
}

impl Live {
    pub fn new(table: Table, verbose: bool, now: Instant) -> Self {
        Self {
            table,
            verbose,
            tracker: Tracker::default(),
            points: ClockPoints::default(),
            host_clock: Clock::default(),
            held: Vec::new(),
            unplaced: Vec::new(),
            last_ns: None,
            newest: Newest::default(),
            began: None,
            spoke: now,
            silence: SILENCE,
            settled: false,
        }
    }

    pub fn record(&mut self, record: &Record, now: Instant) {
        self.points.add(record);
        self.settled |= record.kind == Kind::Event && record.name == names::SETTLED;
        if self.began.is_none() {
            self.began = Some(now);
            self.hold(Row::kernel_start(), now);
        }
        self.newest.take(record.boottime_ns, now);
        let row = self.tracker.row(record);
        self.hold(row, now);
    }

    /// A sample of the guest's clock; placed agent lines get their time from it when the guest sent
    /// no `clock` event.
    pub fn clock(&mut self, sample: Sample) {
        self.host_clock.add(sample);
    }

    pub fn agent(&mut self, line: AgentLine, now: Instant) {
        self.unplaced.push((now, line));
    }

    fn hold(&mut self, row: Row, now: Instant) {
        if !row.detail || self.verbose {
            self.held.push((now, row));
        }
    }

    /// When an agent line that came then is shown without a `clock` event. Not before the stream
    /// has begun: until then there is no time that it could be shown at.
    fn place_deadline(&self, came: Instant) -> Option<Instant> {
        self.began.map(|began| began.max(came) + PLACE_DEADLINE)
    }

    fn place_agent_lines(&mut self, now: Instant) {
        for (came, line) in std::mem::take(&mut self.unplaced) {
            if self.points.is_empty() && self.place_deadline(came).is_none_or(|at| now < at) {
                self.unplaced.push((came, line));
                continue;
            }
            let placed = self.points.place(line.realtime_ns, &self.host_clock);
            // The last way out: it happened about when it came.
            let placed = placed.unwrap_or_else(|| Placed {
                boottime_ns: self.newest.at(came),
                approximate: true,
            });
            let row = self.tracker.agent_row(&line.event, placed);
            self.hold(row, came);
        }
    }

    /// When [`Live::due`] has something to do.
    pub fn deadline(&self) -> Option<Instant> {
        let held = self.held.iter().map(|(came, _)| *came + HOLD);
        let placing = |came: Instant| {
            if self.points.is_empty() {
                self.place_deadline(came)
            } else {
                Some(came)
            }
        };
        let unplaced = self.unplaced.iter().filter_map(|(came, _)| placing(*came));
        let still = (!self.settled && self.newest.0.is_some()).then_some(self.spoke + self.silence);
        held.chain(unplaced).chain(still).min()
    }

    /// The lines that are due.
    pub fn due(&mut self, now: Instant) -> Vec<String> {
        self.place_agent_lines(now);
        self.held.sort_by_key(|(_, row)| row.time_ns);
        let ready = self
            .held
            .iter()
            .rposition(|(came, _)| *came + HOLD <= now)
            .map_or(0, |last| last + 1);
        let mut lines = Vec::new();
        for (_, row) in self.held.drain(..ready).collect::<Vec<_>>() {
            self.print(&row, &mut lines);
        }
        if !lines.is_empty() {
            self.spoke = now;
            self.silence = SILENCE;
        } else if !self.settled && self.newest.0.is_some() && now >= self.spoke + self.silence {
            lines.extend(self.still(now));
            self.silence = (self.silence * 2).min(MAX_SILENCE.max(SILENCE));
            self.spoke = now;
        }
        lines
    }

    /// The older half of the rows where more are held than a boot ever has at once: a file that is
    /// read from its beginning.
    pub fn spill(&mut self) -> Vec<String> {
        let mut lines = Vec::new();
        if self.held.len() >= MAX_HELD {
            self.held.sort_by_key(|(_, row)| row.time_ns);
            for (_, row) in self.held.drain(..MAX_HELD / 2).collect::<Vec<_>>() {
                self.print(&row, &mut lines);
            }
        }
        lines
    }

    /// Everything that is left, at the end.
    pub fn finish(&mut self, now: Instant) -> Vec<String> {
        // Nothing is waited for any more.
        self.began.get_or_insert(now);
        self.settled = true;
        let long_after = now + PLACE_DEADLINE;
        self.due(long_after)
    }

    fn print(&mut self, row: &Row, lines: &mut Vec<String>) {
        lines.extend(self.table.lines(row, self.last_ns));
        self.last_ns = Some(row.time_ns);
    }

    /// Line of the open steps, the newest first, those of several GPUs together.
    fn still(&self, now: Instant) -> Option<String> {
        let guest_now = self.newest.at(now);
        let mut steps: BTreeMap<String, (u64, Vec<GpuName>)> = BTreeMap::new();
        for open in self.tracker.open() {
            let name = if open.gpu.is_some() {
                open.name.clone()
            } else {
                format!("{}{}", open.name, open.fields)
            };
            let (since, gpus) = steps.entry(name).or_insert((open.begin_ns, Vec::new()));
            *since = open.begin_ns.min(*since);
            gpus.extend(open.gpu);
        }
        let mut steps: Vec<_> = steps.into_iter().collect();
        steps.sort_by_key(|(_, (since, _))| std::cmp::Reverse(*since));
        let steps: Vec<String> = steps
            .into_iter()
            .map(|(name, (since, gpus))| {
                let gpus = if gpus.is_empty() {
                    String::new()
                } else {
                    format!(" of GPU {}", numbers(&gpus))
                };
                format!(
                    "{name}{gpus} for {} s",
                    seconds(guest_now.saturating_sub(since))
                )
            })
            .collect();
        if steps.is_empty() {
            return None;
        }
        let mut line = format!("{:>9} still: {}", "...", steps.join(", "));
        line.truncate(self.table.screen.width.unwrap_or(usize::MAX));
        Some(self.table.screen.paint(Ink::Dim, &line))
    }
}

/// `0-3,5`; addresses for GPUs whose number is not known.
fn numbers(gpus: &[GpuName]) -> String {
    let mut known: Vec<u64> = gpus.iter().filter_map(|g| g.index).collect();
    known.sort_unstable();
    known.dedup();
    let mut ranges: Vec<(u64, u64)> = Vec::new();
    for n in known {
        match ranges.last_mut() {
            Some((_, last)) if last.checked_add(1) == Some(n) => *last = n,
            _ => ranges.push((n, n)),
        }
    }
    let ranges = ranges.into_iter().map(|(a, b)| {
        if a == b {
            a.to_string()
        } else {
            format!("{a}-{b}")
        }
    });
    ranges
        .chain(
            gpus.iter()
                .filter(|g| g.index.is_none())
                .map(|g| g.address.to_string()),
        )
        .collect::<Vec<_>>()
        .join(",")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::agent_log::AgentEvent;
    use crate::data::text::Screen;
    use crate::for_tests::record;

    struct View {
        live: Live,
        start: Instant,
        seq: u64,
    }

    impl View {
        fn new() -> Self {
            let start = Instant::now();
            Self {
                live: Live::new(
                    Table {
                        screen: Screen::PLAIN,
                    },
                    false,
                    start,
                ),
                start,
                seq: 0,
            }
        }

        fn at(&self, ms: u64) -> Instant {
            self.start + Duration::from_millis(ms)
        }

        /// A record with boot time `guest_ms` that comes at `ms`.
        fn record(&mut self, ms: u64, guest_ms: u64, rest: &str) {
            self.seq += 1;
            let rest = format!(r#""boottime_ns":{guest_ms}000000,{rest}"#);
            self.live.record(&record(self.seq, &rest), self.at(ms));
        }

        /// A line of the agent's readiness at this time of the guest's wall clock.
        fn ready(&mut self, ms: u64, realtime_ns: i64) {
            let event = AgentEvent::Ready;
            let line = AgentLine { realtime_ns, event };
            self.live.agent(line, self.at(ms));
        }

        /// Lines that are printed at `ms`, without their columns' padding.
        fn due(&mut self, ms: u64) -> Vec<String> {
            let lines = self.live.due(self.at(ms));
            lines
                .iter()
                .map(|l| l.split_whitespace().collect::<Vec<_>>().join(" "))
                .collect()
        }
    }

    const EVENT: &str = r#""kind":"event","name":"x""#;

    #[test]
    fn rows_come_in_order_of_time_after_a_moment() {
        let mut view = View::new();
        view.record(0, 20, EVENT);
        view.record(10, 10, EVENT);
        assert_eq!(view.due(199), [""; 0]);
        assert_eq!(view.live.deadline(), Some(view.at(200)));
        assert_eq!(
            view.due(200),
            [
                "0.000 kernel kernel start",
                "0.010 +0.010 init x",
                "0.020 +0.010 init x"
            ]
        );
        assert_eq!(view.due(210), [""; 0]);
    }

    #[test]
    fn silence_names_what_is_going_on_and_doubles() {
        let mut view = View::new();
        for (span, gpu) in [(1, 0), (2, 1), (3, 2), (4, 5)] {
            view.record(
                0,
                100,
                &format!(r#""kind":"begin","name":"gpu.enable","span":{span},"gpu":"0000:0{gpu}:00.0","fields":{{"index":{gpu}}}"#),
            );
        }
        view.record(0, 100, EVENT);
        assert_eq!(
            view.due(200),
            ["0.000 kernel kernel start", "0.100 +0.100 init x"]
        );
        assert_eq!(view.live.deadline(), Some(view.at(1200)));
        assert_eq!(view.due(1199), [""; 0]);
        assert_eq!(
            view.due(1200),
            ["... still: gpu.enable of GPU 0-2,5 for 1.200 s"]
        );
        assert_eq!(view.due(3199), [""; 0]);
        assert_eq!(
            view.due(3200),
            ["... still: gpu.enable of GPU 0-2,5 for 3.200 s"]
        );
        assert_eq!(view.live.deadline(), Some(view.at(7200)));
        view.record(4000, 4100, r#""kind":"event","name":"settled""#);
        assert_eq!(view.due(4200), ["4.100 +4.000 init settled"]);
        assert_eq!(view.live.deadline(), None, "no container waits any more");
    }

    #[test]
    fn agent_lines_wait_for_the_clock_event_that_places_them() {
        let mut view = View::new();
        view.ready(0, 5_000_050_000_000);
        assert_eq!(view.due(1000), [""; 0]);
        view.record(
            1000,
            100,
            r#""kind":"event","name":"clock","fields":{"realtime_ns":5000100000000}"#,
        );
        assert_eq!(
            view.due(1000),
            [
                "0.000 kernel kernel start",
                "0.050 +0.050 agent agent ready"
            ]
        );
    }

    #[test]
    fn agent_lines_that_cannot_be_placed_are_shown_as_approximate() {
        let mut view = View::new();
        view.record(0, 100, EVENT);
        assert_eq!(view.due(200).len(), 2);
        view.ready(500, 5);
        assert_eq!(view.due(2500), ["~0.600 +0.500 agent agent ready"]);
        let mut view = View::new();
        view.ready(0, 3_000_000_000);
        view.live.clock(Sample {
            boottime_ns: 0,
            offset_ns: 2_000_000_000,
            error_ns: 1,
        });
        assert_eq!(view.due(60_000), [""; 0], "nothing has begun");
        view.record(60_000, 5000, EVENT);
        assert_eq!(view.due(60_200).len(), 2);
        assert_eq!(
            view.live.deadline(),
            Some(view.at(61_200)),
            "the word about silence"
        );
        assert_eq!(view.due(62_000), ["~1.000 -4.000 agent agent ready"]);
    }

    #[test]
    fn the_end_shows_all_that_is_left() {
        let mut view = View::new();
        view.record(0, 20, EVENT);
        view.ready(0, 5);
        assert_eq!(view.live.finish(view.at(1)).len(), 3);
    }
}
