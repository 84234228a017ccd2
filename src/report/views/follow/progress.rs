//! Progress of one boot: lines of its file in, the state of each GPU and of the whole out. No I/O
//! and no clock of its own.
//!
//! Times are those of the guest's boot clock; between two records they continue by this machine's
//! clock, from the arrival of the last one. The remaining time is not estimated: a step's duration
//! depends on locks of host and driver. Durations on other GPUs of this boot are shown instead.
//!
//! A guest chooses how much it sends: GPUs and texts are bounded, texts printable ASCII.

use crate::boot::cause::step_phrase;
use crate::boot::model::{Gpu, RECONNECT_GRACE, State};
use crate::data::boot_file::{FileLine, HostEvent};
use crate::data::budget::MAX_GPUS;
use crate::data::compact_record::Record;
use crate::data::text::{printable_start, seconds};
use crate::views::rows::{Row, Tracker};
use kata_gpu_wire::names;
use kata_gpu_wire::record::Kind;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Limit of a reason, in bytes.
const MAX_REASON: usize = 300;
/// Number of other GPUs that must have done a step before their durations are shown.
const MIN_OTHERS: usize = 2;

/// End of a boot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// All GPUs are usable: their number, and the time.
    Ready {
        gpus: usize,
        at_ns: u64,
    },
    Failed(String),
}

/// Latest known time of a guest, and its arrival here.
#[derive(Clone, Copy, Debug, Default)]
pub struct Newest(pub Option<(u64, Instant)>);

impl Newest {
    pub fn take(&mut self, boottime_ns: u64, at: Instant) {
        if self.0.is_none_or(|(newest, _)| newest <= boottime_ns) {
            self.0 = Some((boottime_ns, at));
        }
    }

    /// Best known guest time at `at`.
    pub fn at(&self, at: Instant) -> u64 {
        self.0.map_or(0, |(ns, when)| {
            let passed = at.saturating_duration_since(when).as_nanos();
            ns.saturating_add(u64::try_from(passed).unwrap_or(u64::MAX))
        })
    }
}

/// The state of one boot.
#[derive(Debug, Default)]
pub struct Progress {
    pub sandbox: Option<String>,
    tracker: Tracker,
    newest: Newest,
    /// Durations of states that GPUs have left.
    took: BTreeMap<State, Vec<u64>>,
    /// Time at which all GPUs were usable or failed, and the guest's own count of failed ones.
    settled: Option<(u64, u64)>,
    power_off: Option<String>,
    /// Time at which the connection ended.
    gone: Option<Instant>,
}

impl Progress {
    /// Takes a line that came at `at`; returns its row, if it is a record.
    pub fn take(&mut self, line: &FileLine, at: Instant) -> Option<Row> {
        match line {
            FileLine::Record(record) => {
                self.gone = None;
                self.newest.take(record.boottime_ns, at);
                self.record(record);
                let (row, passed) = self.tracker.take(record);
                if let Some(passed) = passed {
                    let all = self.took.entry(passed.state).or_default();
                    if all.len() < MAX_GPUS {
                        all.push(passed.took_ns);
                    }
                }
                return Some(row);
            }
            FileLine::Header(..) | FileLine::Pong => {}
            FileLine::Host(line) => match &line.event {
                HostEvent::Connected { .. } => self.gone = None,
                HostEvent::Disconnected { .. } => self.gone = Some(at),
                HostEvent::Clock(sample) => self.newest.take(sample.boottime_ns, at),
                HostEvent::Sandbox(sandbox) => {
                    let name = sandbox.pod.as_ref().map_or_else(
                        || format!("sandbox {}", sandbox.id),
                        |pod| format!("pod {pod}"),
                    );
                    self.sandbox = Some(printable_start(&name, 60));
                }
                HostEvent::Lost { .. }
                | HostEvent::Garbage { .. }
                | HostEvent::Capped { .. }
                | HostEvent::Dropped { .. }
                | HostEvent::Trace { .. }
                | HostEvent::Exported { .. }
                | HostEvent::Imported(_)
                | HostEvent::Traced(_)
                | HostEvent::Recording(_)
                | HostEvent::Unknown => {}
            },
        }
        None
    }

    /// Best known guest time at `at`; for a finished boot, its end.
    pub fn guest_ns(&self, at: Instant) -> u64 {
        self.settled
            .map_or_else(|| self.newest.at(at), |(settled_ns, _)| settled_ns)
    }

    fn record(&mut self, record: &Record) {
        match (record.kind, record.name.as_str()) {
            (Kind::Event, names::SETTLED) => {
                let failed = record.fields.number("failed").unwrap_or(0);
                self.settled.get_or_insert((record.boottime_ns, failed));
            }
            (Kind::Event, names::POWER_OFF) => {
                let why = record.error.as_deref().unwrap_or("it does not say why");
                self.power_off
                    .get_or_insert(printable_start(&why, MAX_REASON));
            }
            _ => {}
        }
    }

    /// GPUs in PCI order.
    pub fn gpus(&self) -> impl Iterator<Item = &Gpu> {
        self.tracker.gpus.all.values()
    }

    /// Longest time that other GPUs were in this state, if enough of them have left it.
    pub fn others_ns(&self, state: State) -> Option<u64> {
        self.took
            .get(&state)
            .filter(|all| all.len() >= MIN_OTHERS)?
            .iter()
            .max()
            .copied()
    }

    pub fn ready(&self) -> usize {
        self.in_state(State::Ready)
    }

    pub fn failed(&self) -> usize {
        self.in_state(State::Failed)
    }

    fn in_state(&self, state: State) -> usize {
        self.gpus().filter(|gpu| gpu.now.state == state).count()
    }

    /// Newest open step outside of GPUs, and its beginning.
    pub fn beside(&self) -> Option<(String, u64)> {
        let open = self
            .tracker
            .open()
            .into_iter()
            .filter(|o| o.gpu.is_none())
            .max_by_key(|o| o.begin_ns)?;
        Some((
            printable_start(&format!("{}{}", open.name, open.fields), 60),
            open.begin_ns,
        ))
    }

    /// Outcome of the boot, if it has ended.
    pub fn outcome(&self, now: Instant) -> Option<Outcome> {
        if let Some(why) = &self.power_off {
            return Some(Outcome::Failed(format!("the guest powered off: {why}")));
        }
        if let Some((at_ns, failed)) = self.settled {
            let names: Vec<String> = self
                .gpus()
                .filter(|gpu| gpu.now.state == State::Failed)
                .filter_map(failure)
                .collect();
            return Some(match (names.is_empty(), failed) {
                (true, 0) => Outcome::Ready {
                    gpus: self.ready(),
                    at_ns,
                },
                (true, failed) => Outcome::Failed(format!(
                    "the guest counts {failed} failed GPU(s); the records that say which are \
                     missing"
                )),
                (false, _) => Outcome::Failed(names.join("; ")),
            });
        }
        let gone = self.gone.filter(|since| now >= *since + RECONNECT_GRACE)?;
        let left = now.saturating_duration_since(gone);
        Some(Outcome::Failed(format!(
            "the guest's connection ended {} s ago before the boot did; {}",
            left.as_secs(),
            self.last_seen()
        )))
    }

    /// Time from which a lost connection counts as the end of the boot.
    pub fn deadline(&self) -> Option<Instant> {
        self.gone
            .filter(|_| self.settled.is_none())
            .map(|at| at + RECONNECT_GRACE)
    }

    /// Last known state, for a caller that stops waiting.
    pub fn last_seen(&self) -> String {
        let Some((newest, _)) = self.newest.0 else {
            return "no record of it has come".to_string();
        };
        let mut waiting: Vec<String> = Vec::new();
        for gpu in self.gpus().filter(|gpu| !gpu.now.state.is_over()) {
            waiting.push(format!(
                "{} {} since {} s",
                gpu.name(),
                gpu.now.state.name(),
                seconds(gpu.now.since_ns)
            ));
        }
        let more = if waiting.len() > 4 {
            format!(" and {} more", waiting.len() - 4)
        } else {
            String::new()
        };
        waiting.truncate(4);
        let what = if waiting.is_empty() {
            "no GPU was in a step".to_string()
        } else {
            waiting.join(", ") + &more
        };
        format!("its last record is of {} s: {what}", seconds(newest))
    }
}

/// Step in which a GPU failed, empty if unknown, and the reason, for a line that names the GPU.
pub fn why(gpu: &Gpu) -> Option<(String, String)> {
    let text = |text: &str| printable_start(&text, MAX_REASON);
    let failure = gpu.failed.as_ref()?;
    let words = failure
        .reason
        .strip_prefix(&format!("GPU {}: ", gpu.address))
        .unwrap_or(&failure.reason);
    // The catalogue's words, as the verdict has them.
    let reason = match (&failure.cause.what, &failure.cause.code) {
        (Some(what), Some(code)) => format!("{} ({})", text(what), text(code)),
        _ => text(words),
    };
    let step = match failure.step.as_str() {
        "?" => String::new(),
        step => step_phrase(&text(step)),
    };
    Some((step, reason))
}

fn failure(gpu: &Gpu) -> Option<String> {
    let (step, reason) = why(gpu)?;
    let step = if step.is_empty() {
        step
    } else {
        format!(" {step}")
    };
    Some(format!("{} failed{step}: {reason}", gpu.name()))
}

/// The instant `age` before `now`.
pub fn ago(now: Instant, age: Duration) -> Instant {
    now.checked_sub(age).unwrap_or(now)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::boot_file::decode;
    use crate::data::compact_record::Names;

    struct Boot {
        progress: Progress,
        start: Instant,
        seq: u64,
    }

    impl Boot {
        fn new() -> Self {
            Self {
                progress: Progress::default(),
                start: Instant::now(),
                seq: 0,
            }
        }

        fn line(&mut self, line: &str, ms: u64) {
            let line = decode(line.as_bytes(), &mut Names::default())
                .unwrap_or_else(|e| panic!("{line}: {e}"));
            self.progress
                .take(&line, self.start + Duration::from_millis(ms));
        }

        /// A record of GPU `gpu` that arrives at its own time.
        fn gpu(&mut self, ms: u64, gpu: u64, rest: &str) {
            self.record(ms, &format!(r#""gpu":"0001:00:0{gpu}.0",{rest}"#));
        }

        fn record(&mut self, ms: u64, rest: &str) {
            self.seq += 1;
            let line = format!(
                r#"{{"schema":1,"seq":{},"boottime_ns":{ms}000000,{rest}}}"#,
                self.seq
            );
            self.line(&line, ms);
        }

        fn step(&self, gpu: u64) -> &'static str {
            self.progress.tracker.gpus.all[&format!("0001:00:0{gpu}.0").parse().unwrap()]
                .now
                .state
                .name()
        }

        fn outcome(&self, ms: u64) -> Option<Outcome> {
            self.progress
                .outcome(self.start + Duration::from_millis(ms))
        }
    }

    #[test]
    fn a_gpu_goes_through_its_steps_and_the_boot_ends_when_all_have() {
        let mut boot = Boot::new();
        let steps = [
            (
                r#""kind":"event","name":"gpu.found","fields":{"index":0}"#,
                "waiting",
            ),
            (r#""kind":"begin","name":"gpu.enable","span":1"#, "enabling"),
            (r#""kind":"end","name":"gpu.enable","span":1"#, "enabled"),
            (r#""kind":"begin","name":"gpu.bind","span":2"#, "probing"),
            (
                r#""kind":"event","name":"gpu.bound"}"#.trim_end_matches('}'),
                "bound",
            ),
            (r#""kind":"event","name":"gpu.published""#, "bound"),
            (
                r#""kind":"begin","name":"gpu.init","span":3"#,
                "initialising",
            ),
            (r#""kind":"event","name":"gpu.usable""#, "ready"),
            (r#""kind":"begin","name":"gpu.init","span":9"#, "ready"),
        ];
        let mut furthest = State::Waiting;
        for (i, (record, step)) in steps.iter().enumerate() {
            boot.gpu(100 * i as u64 + 1, 0, record);
            assert_eq!(boot.step(0), *step, "{record}");
            let now = boot.progress.gpus().next().unwrap().now.furthest;
            assert!(now >= furthest, "a bar never goes back");
            furthest = now;
        }
        assert_eq!(furthest, State::Ready);
        assert_eq!(boot.outcome(10_000), None);
        boot.record(
            900,
            r#""kind":"event","name":"settled","fields":{"usable":1,"failed":0}"#,
        );
        assert_eq!(
            boot.outcome(10_000),
            Some(Outcome::Ready {
                gpus: 1,
                at_ns: 900_000_000
            })
        );
        assert_eq!(
            boot.progress.guest_ns(boot.start + Duration::from_secs(99)),
            900_000_000,
            "its clock stands still"
        );
    }

    #[test]
    fn a_boot_whose_failed_gpus_are_only_counted_has_failed() {
        let mut boot = Boot::new();
        boot.record(
            4,
            r#""kind":"event","name":"settled","fields":{"failed":2}"#,
        );
        assert!(
            matches!(boot.outcome(5), Some(Outcome::Failed(why)) if why.contains("2 failed GPU(s)"))
        );
    }

    #[test]
    fn a_guest_that_powers_off_or_goes_without_a_word_has_failed() {
        let mut boot = Boot::new();
        boot.record(4, r#""kind":"event","name":"power-off","error":"no agent""#);
        assert_eq!(
            boot.outcome(5),
            Some(Outcome::Failed("the guest powered off: no agent".into()))
        );

        let mut boot = Boot::new();
        boot.gpu(
            1,
            0,
            r#""kind":"begin","name":"gpu.init","span":3,"fields":{"index":0}"#,
        );
        let host = r#"{"schema":1,"kind":"host","realtime_ns":1,"event":"disconnected","peer":"p","records":1,"duplicates":0}"#;
        boot.line(host, 1000);
        assert_eq!(boot.outcome(5_999), None, "it may come back");
        assert_eq!(
            boot.progress.deadline(),
            Some(boot.start + Duration::from_secs(6))
        );
        let Some(Outcome::Failed(why)) = boot.outcome(6_000) else {
            panic!("still running")
        };
        assert!(
            why.contains("GPU 0 (0001:00:00.0) initialising since 0.001 s"),
            "{why}"
        );
        boot.line(r#"{"schema":1,"kind":"host","realtime_ns":1,"event":"connected","peer":"p","first_seq":0}"#, 6_500);
        assert_eq!(
            (boot.outcome(99_000), boot.progress.deadline()),
            (None, None),
            "it came back"
        );
    }

    #[test]
    fn durations_of_others_are_shown_when_there_are_others() {
        let mut boot = Boot::new();
        for (gpu, took) in [(0, 300), (1, 500)] {
            assert_eq!(boot.progress.others_ns(State::Initialising), None);
            boot.gpu(1000, gpu, r#""kind":"begin","name":"gpu.init","span":3"#);
            boot.gpu(1000 + took, gpu, r#""kind":"event","name":"gpu.usable""#);
        }
        assert_eq!(
            boot.progress.others_ns(State::Initialising),
            Some(500_000_000)
        );
        assert_eq!(boot.progress.others_ns(State::Enabling), None);
    }

    #[test]
    fn a_hostile_guest_costs_no_more_and_shows_nothing_but_text() {
        let mut boot = Boot::new();
        for i in 0..3 * MAX_GPUS as u64 {
            let record = format!(
                r#""kind":"event","name":"gpu.failed","gpu":"{i:04x}:00:00.0","error":"{}\u202e","fields":{{"step":"\u001b[2J","index":18446744073709551615}}"#,
                "x".repeat(9000)
            );
            boot.record(1, &record);
        }
        boot.record(2, r#""kind":"event","name":"settled""#);
        assert_eq!(boot.progress.gpus().count(), MAX_GPUS);
        let Some(Outcome::Failed(why)) = boot.outcome(3) else {
            panic!("not failed")
        };
        assert!(
            why.len() < MAX_GPUS * 2 * (MAX_REASON + 100)
                && why.bytes().all(|b| (b' '..=b'~').contains(&b))
        );
    }
}
