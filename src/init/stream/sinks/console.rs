//! The console sink: the stream's events as lines in kata-agent's own log shape (slog JSON, all
//! values strings): existing collectors of the agent's lines (containerd's `vmconsole=`,
//! kata-log-parser) carry ours with nothing installed.
//!
//! A console can be slow (a serial port is, and QEMU can stop reading it), so a separate thread
//! writes, and no task waits for it. Kernel lines are not repeated: the kernel has printed them
//! already. The beginning of a span is printed only where details are asked for; the line of its
//! end has what the beginning had, and `took_ms`, from which a reader of the log has both times.
//!
//! While a GPU is enabled on a real host, a line on the console spins a vCPU until the VMM is free
//! again. The thread therefore stops at a [`Gate`] before each line. Invariants of the gate:
//! nothing is lost by it (lines wait in the ring, which counts dropped ones), the order stays, and
//! no line waits longer than [`LONGEST_HOLD`] if a holder forgets the release. The init's own last
//! words and the kernel do not use it, and of other programs only the lines that
//! [`redirect`](super::redirect) redirects. A line that is being written when the gate closes is
//! written to its end.

use crate::machine::clock::{boottime_ns, realtime_ns};
use crate::machine::threads;
use crate::stream::ring::{Reader, Ring};
use kata_gpu_wire::decode::decode;
use kata_gpu_wire::record::{Kind, Level, Line, Record, TOOK_MS, in_ms};
use serde_json::{Map, Value};
use std::fs::OpenOptions;
use std::io::{self, Write};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, UNIX_EPOCH};

const CONSOLE: &str = "/dev/console";
/// Longest sleep of the thread; every record wakes it anyway.
const WAKE: Duration = Duration::from_secs(3600);

/// Longest wait of lines at the gate: three enablings of the slowest kind known (3.3 s).
pub const LONGEST_HOLD: Duration = Duration::from_secs(10);

/// Keeps the thread from writing for a while. Clones are handles of one gate.
#[derive(Clone, Debug)]
pub struct Gate {
    closed: Arc<(Mutex<bool>, Condvar)>,
    longest: Duration,
}

impl Default for Gate {
    fn default() -> Self {
        Self {
            closed: Arc::default(),
            longest: LONGEST_HOLD,
        }
    }
}

impl Gate {
    /// Closes the gate. Returns at once; a line that is being written goes on.
    pub fn hold(&self) {
        *self.lock() = true;
    }

    /// Opens the gate.
    pub fn release(&self) {
        *self.lock() = false;
        self.closed.1.notify_all();
    }

    /// Whether the gate is closed.
    #[cfg(test)]
    pub fn is_held(&self) -> bool {
        *self.lock()
    }

    /// Blocks the thread until the gate is open. `since` is the time of the first stop with
    /// unwritten lines, over several holds; after the longest hold from then on, the gate is opened
    /// here.
    pub(super) fn pass(&self, since: &mut Option<Instant>) {
        let mut closed = self.lock();
        while *closed {
            let left = self
                .longest
                .saturating_sub(since.get_or_insert_with(Instant::now).elapsed());
            if left.is_zero() {
                *closed = false;
            } else {
                closed = self
                    .closed
                    .1
                    .wait_timeout(closed, left)
                    .unwrap_or_else(PoisonError::into_inner)
                    .0;
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, bool> {
        // A plain flag: a poisoned lock is as good as a sound one.
        threads::lock(&self.closed.0)
    }
}

/// Starts the thread; must be called inside the runtime. Records above `level` (less urgent) are
/// omitted, and, with `only_new`, existing ones. No line is written while the gate is held.
pub fn start(ring: Arc<Ring>, level: Level, only_new: bool, gate: Gate) -> io::Result<()> {
    let console = OpenOptions::new().write(true).open(CONSOLE)?;
    threads::detach(move || {
        let first = ring.first_seq();
        let from = if only_new { ring.next_seq() } else { first };
        follow(
            Reader::new(ring, "console", first),
            from,
            level,
            &gate,
            console,
        );
    });
    Ok(())
}

/// Writes every record from `from` on that `reader` finds, for ever. Returns when the console
/// refuses writes: it will not recover, and the other sinks still work.
fn follow(mut reader: Reader, from: u64, level: Level, gate: &Gate, mut console: impl Write) {
    let mut stopped = None;
    let mut begun = Begun::default();
    loop {
        // Wait before reading: lines wait in the ring, where they are counted, not here.
        gate.pass(&mut stopped);
        let lines = reader.read(16);
        if lines.is_empty() {
            stopped = None;
            reader.wait_blocking(WAKE);
            continue;
        }
        for line in &lines {
            let Ok(Line::Record(record)) = decode(line.as_bytes()) else {
                continue;
            };
            let record = begun.complete(*record);
            if record.seq < from {
                continue;
            }
            let Some(text) = log_line(&record, level, realtime_ns().saturating_sub(boottime_ns()))
            else {
                continue;
            };
            gate.pass(&mut stopped);
            if console.write_all(text.as_bytes()).is_err() {
                return;
            }
        }
    }
}

/// Limit of spans that have begun and not ended.
const SPANS: usize = 1024;

/// Begins of spans that have not ended, the oldest first.
#[derive(Default)]
struct Begun(Vec<Record>);

impl Begun {
    /// A record with what a line of its own needs: an end gets the fields of its beginning that it
    /// has not itself, and `took_ms`.
    fn complete(&mut self, mut record: Record) -> Record {
        if record.kind == Kind::Begin {
            if self.0.len() >= SPANS {
                self.0.remove(0);
            }
            self.0.push(record.clone());
        } else if record.kind == Kind::End
            && let Some(at) = self.0.iter().position(|begin| begin.span == record.span)
        {
            let begin = self.0.remove(at);
            let took_ns = record.boottime_ns.saturating_sub(begin.boottime_ns);
            for (key, value) in begin.fields {
                record.fields.entry(key).or_insert(value);
            }
            record.fields.insert(TOOK_MS.into(), in_ms(took_ns).into());
        }
        record
    }
}

/// Formats a record as a line in the agent's format. Returns `None` for records that do not go to
/// the console. `offset_ns` is REALTIME minus BOOTTIME.
pub fn log_line(record: &Record, level: Level, offset_ns: u64) -> Option<String> {
    // Begins help to find a step that hangs, but not on a console that is read afterwards.
    let own_level = if record.kind == Kind::Begin {
        record.level.max(Level::Debug)
    } else {
        record.level
    };
    if record.kind == Kind::Kmsg || own_level > level {
        return None;
    }
    let mut line = Map::new();
    let mut put = |key: &str, value: String| line.insert(key.to_string(), Value::from(value));
    put(
        "msg",
        match record.kind {
            Kind::Begin => format!("{} begin", record.name),
            Kind::End => format!("{} end", record.name),
            Kind::Event | Kind::Kmsg => record.name.clone(),
        },
    );
    put(
        "level",
        match own_level {
            Level::Error => "ERRO",
            Level::Warn => "WARN",
            Level::Info => "INFO",
            Level::Debug => "DEBG",
            Level::Trace => "TRCE",
        }
        .into(),
    );
    put(
        "ts",
        humantime::format_rfc3339_nanos(
            UNIX_EPOCH + Duration::from_nanos(record.boottime_ns.saturating_add(offset_ns)),
        )
        .to_string(),
    );
    put("name", "kata-gpu-init".into());
    put("version", env!("CARGO_PKG_VERSION").into());
    put("source", "kata-gpu-init".into());
    put(
        "subsystem",
        record.name.split('.').next().unwrap_or_default().into(),
    );
    put("pid", std::process::id().to_string());
    put("boottime_ns", record.boottime_ns.to_string());
    if let Some(gpu) = record.gpu {
        put("gpu", gpu.to_string());
    }
    if let Some(error) = &record.error {
        put("error", error.clone());
    }
    for (key, value) in &record.fields {
        // The line's own keys have priority over fields of the same name.
        let text = || {
            value
                .as_str()
                .map_or_else(|| value.to_string(), str::to_string)
        };
        line.entry(key).or_insert_with(|| Value::from(text()));
    }
    Some(Value::Object(line).to_string() + "\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use kata_gpu_wire::names;
    use std::sync::mpsc::{Receiver, Sender, channel};

    /// A console whose every line comes out of a channel.
    struct Lines(Sender<String>);

    impl Write for Lines {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0
                .send(String::from_utf8_lossy(bytes).into_owned())
                .map_err(|_| io::Error::from(io::ErrorKind::BrokenPipe))?;
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    struct Sink {
        ring: Arc<Ring>,
        gate: Gate,
        lines: Receiver<String>,
    }

    /// Longer than any step of these tests on any machine.
    const LONG: Duration = Duration::from_secs(300);
    /// Short: a held-back line cannot appear in this time by chance.
    const SHORT: Duration = Duration::from_millis(150);

    impl Sink {
        fn start(ring: Ring, gate: Gate) -> Self {
            let (ring, (console, lines)) = (Arc::new(ring), channel());
            let (reader, its_gate) = (Reader::new(Arc::clone(&ring), "console", 0), gate.clone());
            // The thread ends with the channel; the sink then writes in vain.
            std::thread::spawn(move || follow(reader, 0, Level::Info, &its_gate, Lines(console)));
            Self { ring, gate, lines }
        }

        fn push(&self, from: u32, to: u32) {
            for number in from..to {
                let fields = Map::from_iter([("number".to_string(), Value::from(number))]);
                self.ring.push(Record {
                    fields,
                    ..Record::new(Kind::Event, names::SETTLED)
                });
            }
        }

        /// The number in the next line, or the line's name if there is none.
        fn next(&self) -> String {
            let line: Value =
                serde_json::from_str(&self.lines.recv_timeout(LONG).expect("no line")).unwrap();
            line["number"]
                .as_str()
                .or(line["msg"].as_str())
                .unwrap()
                .to_string()
        }

        fn is_silent(&self) -> bool {
            self.lines.recv_timeout(SHORT).is_err()
        }
    }

    #[test]
    fn a_held_gate_lets_no_line_through_and_then_all_in_order() {
        let sink = Sink::start(Ring::default(), Gate::default());
        sink.push(0, 1);
        assert_eq!(sink.next(), "0");
        sink.gate.clone().hold();
        sink.push(1, 100);
        assert!(sink.is_silent());
        sink.gate.release();
        assert_eq!(
            (1..100).map(|_| sink.next()).collect::<Vec<_>>(),
            (1..100).map(|n| n.to_string()).collect::<Vec<_>>()
        );
        // Released twice, held again.
        sink.gate.release();
        sink.gate.hold();
        sink.push(100, 101);
        assert!(sink.is_silent());
        sink.gate.release();
        assert_eq!(sink.next(), "100");
    }

    #[test]
    fn a_gate_that_nobody_releases_opens_by_itself() {
        let gate = Gate {
            longest: Duration::from_millis(400),
            ..Gate::default()
        };
        let longest = gate.longest;
        let held = Instant::now();
        gate.hold();
        let sink = Sink::start(Ring::default(), gate);
        sink.push(0, 3);
        assert_eq!([sink.next(), sink.next(), sink.next()], ["0", "1", "2"]);
        assert!(held.elapsed() >= longest);
        // The next hold is a new one, once the thread waits for another line: nothing shows when.
        let all_held = Instant::now();
        for number in 3.. {
            let held = Instant::now();
            sink.gate.hold();
            sink.push(number, number + 1);
            assert_eq!(sink.next(), number.to_string());
            if held.elapsed() >= longest {
                break;
            }
            assert!(
                all_held.elapsed() < LONG,
                "no hold after the first one lasts"
            );
        }
    }

    #[test]
    fn holds_without_a_gap_are_one_hold() {
        let (start, longest) = (Instant::now(), Duration::from_millis(300));
        let gate = Gate {
            longest,
            ..Gate::default()
        };
        gate.hold();
        let sink = Sink::start(Ring::default(), gate);
        sink.push(0, 1);
        // Each hold is short; the line waits for at most one longest hold plus the time of the loop
        // below.
        while let Err(_nothing) = sink.lines.recv_timeout(Duration::from_millis(20)) {
            sink.gate.release();
            sink.gate.hold();
            assert!(start.elapsed() < LONG, "the line never comes");
        }
        sink.gate.release();
    }

    #[test]
    fn what_the_ring_drops_meanwhile_is_counted_in_a_line() {
        let gate = Gate::default();
        gate.hold();
        // Room for a few lines only.
        let sink = Sink::start(Ring::with_capacity(600), gate);
        sink.push(0, 50);
        assert!(sink.is_silent());
        sink.gate.release();
        let mut lines = Vec::new();
        while lines.last().is_none_or(|line| line != names::STREAM_LOST) {
            lines.push(sink.next());
        }
        // The last ones, in order, then the report of the lost ones.
        let kept = lines.len() - 1;
        assert!((1..20).contains(&kept), "{lines:?}");
        assert_eq!(
            lines[..kept],
            (50 - kept..50).map(|n| n.to_string()).collect::<Vec<_>>()
        );
    }

    #[test]
    fn the_end_of_a_span_says_how_long_it_took_and_what_it_was() {
        let record = |kind: Kind, span: u64, at_ns: u64, fields: &[(&str, Value)]| Record {
            span: Some(span),
            boottime_ns: at_ns,
            fields: fields
                .iter()
                .map(|(key, value)| ((*key).to_string(), value.clone()))
                .collect(),
            ..Record::new(kind, names::MODULE_LOAD)
        };
        let mut begun = Begun::default();
        let begin = record(
            Kind::Begin,
            7,
            1_000_000_000,
            &[("module", "nvidia".into()), ("rc", 0.into())],
        );
        assert_eq!(begun.complete(begin.clone()), begin);
        let end = record(Kind::End, 7, 3_304_127_513, &[("rc", (-5).into())]);
        let line = log_line(&begun.complete(end.clone()), Level::Info, 0).unwrap();
        let read: Map<String, Value> = serde_json::from_str(&line).unwrap();
        assert!(read.values().all(Value::is_string));
        assert_eq!(
            ["msg", "took_ms", "module", "rc"].map(|key| read[key].as_str().unwrap()),
            ["module.load end", "2304.127513", "nvidia", "-5"]
        );
        // One whose beginning was lost says nothing.
        assert_eq!(begun.complete(end.clone()), end);
        // Spans that never end do not fill the memory.
        for span in 0..3 * SPANS as u64 {
            begun.complete(record(Kind::Begin, span, 1, &[]));
        }
        assert_eq!(begun.0.len(), SPANS);
    }

    #[test]
    fn a_new_workers_console_knows_what_began_before_it() {
        let ring = Arc::new(Ring::default());
        let (console, lines) = channel();
        let span = |kind, at_ns| Record {
            span: Some(3),
            boottime_ns: at_ns,
            ..Record::new(kind, names::GPU_INIT)
        };
        ring.push(Record::new(Kind::Event, names::SETTLED));
        ring.push(span(Kind::Begin, 5_000_000));
        let (reader, from) = (
            Reader::new(Arc::clone(&ring), "console", 0),
            ring.next_seq(),
        );
        std::thread::spawn(move || {
            follow(reader, from, Level::Info, &Gate::default(), Lines(console));
        });
        ring.push(span(Kind::End, 6_000_000));
        let line: Value = serde_json::from_str(&lines.recv_timeout(LONG).unwrap()).unwrap();
        assert_eq!(
            (line["msg"].as_str(), line["took_ms"].as_str()),
            (Some("gpu.init end"), Some("1.000000"))
        );
    }

    #[test]
    fn a_line_has_the_agents_shape_and_only_strings() {
        let record = Record {
            schema: 1,
            seq: 3,
            boottime_ns: 1_000_000_000,
            kind: Kind::Event,
            name: names::GPU_BOUND.into(),
            level: Level::Info,
            gpu: Some("0001:00:03.0".parse().unwrap()),
            span: None,
            parent: None,
            after: vec![],
            error: None,
            fields: Map::from_iter([
                ("minor".to_string(), Value::from(3)),
                ("source".to_string(), Value::from("scan")),
            ]),
        };
        let line = log_line(&record, Level::Info, 0).unwrap();
        let read: Map<String, Value> = serde_json::from_str(&line).unwrap();
        for key in [
            "msg",
            "level",
            "ts",
            "name",
            "version",
            "source",
            "subsystem",
            "pid",
        ] {
            assert!(read.contains_key(key), "{key} is missing");
        }
        assert!(read.values().all(Value::is_string));
        assert_eq!(
            (read["minor"].as_str(), read["subsystem"].as_str()),
            (Some("3"), Some("gpu"))
        );
        assert_eq!(
            read["source"], "kata-gpu-init",
            "a field took the place of the line's own"
        );
        assert_eq!(
            log_line(
                &Record {
                    kind: Kind::Begin,
                    ..record.clone()
                },
                Level::Info,
                0
            ),
            None
        );
        assert_eq!(
            log_line(
                &Record {
                    kind: Kind::Kmsg,
                    ..record
                },
                Level::Trace,
                0
            ),
            None
        );
    }
}
