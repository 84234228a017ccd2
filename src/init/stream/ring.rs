//! The bounded memory of this boot's stream: every sink reads it and none can hold it up.
//!
//! Invariants: `seq` is given here, under the lock, without gaps; pushing never waits for a reader
//! and never fails; when the ring is full the oldest records go, and each [`Reader`] reports the
//! number of those it lost. Lines are stored in wire format.
//!
//! With a [`Journal`], a line is in the journal's file before any reader can see it; if the file
//! has no room for a line, it has its number. After a crash the next worker thus finds in that file
//! whatever a reader may have seen, and gives no `seq` twice.

use super::journal::Journal;
use crate::machine::clock::boottime_ns;
use crate::machine::threads;
use kata_gpu_wire::names;
use kata_gpu_wire::record::{Kind, Level, Record, record_line};
use serde_json::Map;
use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Duration;
use tokio::sync::watch;

/// Bytes of lines kept. A boot of 16 GPUs writes about 200 kB; five times that survives a noisy
/// kernel log.
const CAPACITY_BYTES: usize = 1024 * 1024;

struct Lines {
    lines: VecDeque<Arc<str>>,
    /// `seq` of the first line in the ring.
    first_seq: u64,
    bytes: usize,
    journal: Option<Journal>,
    /// Whether the journal has stopped, which has been reported.
    stopped: bool,
}

impl Lines {
    fn next_seq(&self) -> u64 {
        self.first_seq + self.lines.len() as u64
    }

    /// Writes the lines that the journal lacks. After an error, no number up to now is given again.
    fn write(&mut self) -> std::io::Result<()> {
        self.journal
            .as_mut()
            .map_or(Ok(()), |journal| journal.write(self.first_seq, &self.lines))
    }

    fn keep(&mut self, line: Arc<str>, capacity_bytes: usize) {
        self.bytes += line.len();
        self.lines.push_back(line);
        while self.bytes > capacity_bytes && self.lines.len() > 1 {
            if let Some(old) = self.lines.pop_front() {
                self.bytes -= old.len();
                self.first_seq += 1;
            }
        }
    }
}

/// The record of a journal that has stopped or resumed.
fn changed(seq: u64, boottime_ns: u64, error: Option<&std::io::Error>) -> Record {
    let (level, state) = if error.is_some() {
        (Level::Warn, "stopped")
    } else {
        (Level::Info, "goes on")
    };
    Record {
        seq,
        boottime_ns,
        level,
        error: error.map(ToString::to_string),
        fields: [("sink", "file"), ("state", state)]
            .map(|(key, value)| (key.to_string(), value.into()))
            .into_iter()
            .collect(),
        ..Record::new(Kind::Event, names::SINK)
    }
}

/// The ring. Shared by reference counting; lives as long as the process.
pub struct Ring {
    lines: Mutex<Lines>,
    capacity_bytes: usize,
    grown: Condvar,
    watch: watch::Sender<u64>,
}

impl Default for Ring {
    fn default() -> Self {
        Self::with_capacity(CAPACITY_BYTES)
    }
}

impl Ring {
    pub fn with_capacity(capacity_bytes: usize) -> Self {
        Self {
            lines: Mutex::new(Lines {
                lines: VecDeque::new(),
                first_seq: 0,
                bytes: 0,
                journal: None,
                stopped: false,
            }),
            capacity_bytes,
            grown: Condvar::new(),
            watch: watch::Sender::new(0),
        }
    }

    /// A ring that continues a stream: `lines` are its last ones, from `first_seq` on; `journal`
    /// takes later ones.
    pub fn resumed(
        lines: impl IntoIterator<Item = String>,
        first_seq: u64,
        journal: Option<Journal>,
    ) -> Self {
        let ring = Self::default();
        let mut inner = ring.lock();
        inner.first_seq = first_seq;
        inner.journal = journal;
        for line in lines {
            inner.keep(line.into(), ring.capacity_bytes);
        }
        // An error recurs with the next record, and is reported then.
        let _unused = inner.write();
        ring.watch.send_replace(inner.next_seq());
        drop(inner);
        ring
    }

    fn lock(&self) -> MutexGuard<'_, Lines> {
        // No panic is possible between two field updates: a poisoned lock is as good as a sound
        // one.
        threads::lock(&self.lines)
    }

    /// Gives the record its `seq`, which is returned, keeps it and wakes the readers.
    pub fn push(&self, mut record: Record) -> u64 {
        let mut ring = self.lock();
        let seq = ring.next_seq();
        record.seq = seq;
        let line: Arc<str> = record_line(&record).into();
        // Readers cannot see the line before it is written: the lock is held.
        ring.keep(line, self.capacity_bytes);
        let result = ring.write();
        if result.is_err() != ring.stopped {
            ring.stopped = result.is_err();
            let report = changed(ring.next_seq(), record.boottime_ns, result.as_ref().err());
            ring.keep(record_line(&report).into(), self.capacity_bytes);
            // An error recurs with the next record, as above.
            let _unused = ring.write();
        }
        let next = ring.next_seq();
        drop(ring);
        self.grown.notify_all();
        self.watch.send_replace(next);
        seq
    }

    /// `seq` that the next record will get.
    pub fn next_seq(&self) -> u64 {
        self.lock().next_seq()
    }

    /// `seq` of the oldest record in the ring.
    pub fn first_seq(&self) -> u64 {
        self.lock().first_seq
    }

    /// Blocks the thread until there is a record with `seq >= next`, or until `at_most` has passed.
    fn wait_blocking(&self, next: u64, at_most: Duration) {
        let guard = self.lock();
        // The result only shows a timeout; the caller reads either way.
        let _unused = self
            .grown
            .wait_timeout_while(guard, at_most, |ring| ring.next_seq() <= next);
    }

    /// For tasks: receives the next `seq` whenever it grows.
    pub fn subscribe(&self) -> watch::Receiver<u64> {
        self.watch.subscribe()
    }
}

/// Place of one sink in the ring.
pub struct Reader {
    ring: Arc<Ring>,
    /// Name of the sink in its reports.
    sink: &'static str,
    next: u64,
    /// Last report of lost records.
    report: Option<Report>,
}

struct Report {
    seq: u64,
    lost: u64,
}

impl Reader {
    /// A reader that begins at the record `next`.
    pub fn new(ring: Arc<Ring>, sink: &'static str, next: u64) -> Self {
        Self {
            ring,
            sink,
            next,
            report: None,
        }
    }

    /// `seq` of the record that is read next.
    pub fn next(&self) -> u64 {
        self.next
    }

    /// Up to `limit` lines, in order of `seq`.
    ///
    /// Lines that had left the ring before are skipped, and their number is pushed in a
    /// `stream.lost`. Once the sink has read all, the numbers in the reports that it read add up to
    /// the records that it misses: a report that is lost in turn counts again in the next one.
    pub fn read(&mut self, limit: usize) -> Vec<Arc<str>> {
        let inner = self.ring.lock();
        let read_to = self.next;
        self.next = self.next.max(inner.first_seq);
        let skip = usize::try_from(self.next - inner.first_seq).unwrap_or(usize::MAX);
        let lines: Vec<Arc<str>> = inner.lines.iter().skip(skip).take(limit).cloned().collect();
        drop(inner);
        if self.next > read_to {
            self.report_lost(read_to..self.next);
        }
        self.next += lines.len() as u64;
        lines
    }

    /// Blocks the thread until there is a record to read, or until `at_most` has passed.
    pub fn wait_blocking(&self, at_most: Duration) {
        self.ring.wait_blocking(self.next, at_most);
    }

    fn report_lost(&mut self, range: std::ops::Range<u64>) {
        let again = self
            .report
            .take_if(|report| range.contains(&report.seq))
            .map_or(0, |report| report.lost);
        let lost = range.end - range.start + again;
        let seq = self.ring.push(Record {
            boottime_ns: boottime_ns(),
            level: Level::Warn,
            fields: Map::from_iter([
                ("lost".to_string(), lost.into()),
                ("at".to_string(), self.sink.into()),
            ]),
            ..Record::new(Kind::Event, names::STREAM_LOST)
        });
        self.report = Some(Report { seq, lost });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kata_gpu_wire::decode::decode;
    use kata_gpu_wire::record::Line;

    fn record(name: &str) -> Record {
        Record::new(Kind::Event, name)
    }

    fn records(lines: &[Arc<str>]) -> Vec<Record> {
        let decoded = |line: &Arc<str>| {
            if let Ok(Line::Record(r)) = decode(line.as_bytes()) {
                *r
            } else {
                panic!("ring holds {line:?}")
            }
        };
        lines.iter().map(decoded).collect()
    }

    fn seqs(lines: &[Arc<str>]) -> Vec<u64> {
        records(lines).iter().map(|r| r.seq).collect()
    }

    fn reader(ring: &Arc<Ring>) -> Reader {
        Reader::new(Arc::clone(ring), "test", 0)
    }

    #[test]
    fn a_late_reader_gets_everything_in_order() {
        let ring = Arc::new(Ring::default());
        for _ in 0..5 {
            ring.push(record("settled"));
        }
        let mut reader = reader(&ring);
        assert_eq!(seqs(&reader.read(3)), [0, 1, 2]);
        assert_eq!((seqs(&reader.read(100)), reader.next()), (vec![3, 4], 5));
    }

    #[test]
    fn reports_count_each_lost_record_even_where_a_report_is_lost() {
        let ring = Arc::new(Ring::with_capacity(300));
        let mut reader = reader(&ring);
        let mut read = Vec::new();
        // The second round drops the report of the first.
        for _ in 0..2 {
            for _ in 0..50 {
                ring.push(record("settled"));
            }
            // The report itself is behind the lines that are read here.
            read.extend(records(&reader.read(1)));
        }
        while reader.next() < ring.next_seq() {
            read.extend(records(&reader.read(100)));
        }
        let (reports, kept): (Vec<Record>, Vec<Record>) =
            read.into_iter().partition(|r| r.name == names::STREAM_LOST);
        let lost: u64 = reports
            .iter()
            .map(|r| r.fields["lost"].as_u64().unwrap())
            .sum();
        let last = reports.last().unwrap();
        assert_eq!(
            (last.fields["at"].as_str(), last.level),
            (Some("test"), Level::Warn)
        );
        // The sum covers the 100 records and all reports; the first report was not read.
        assert_eq!(
            lost + kept.len() as u64 + reports.len() as u64,
            last.seq + 1
        );
        assert!(
            reports.iter().all(|r| r.seq > 100) && kept.iter().all(|r| r.seq < last.seq),
            "{reports:?} {kept:?}"
        );
    }

    #[test]
    fn a_blocked_reader_wakes_on_a_push_from_another_thread() {
        let ring = Arc::new(Ring::default());
        let writer = Arc::clone(&ring);
        let thread = std::thread::spawn(move || writer.push(record("settled")));
        ring.wait_blocking(0, Duration::from_secs(60));
        assert_eq!(ring.next_seq(), 1);
        thread.join().unwrap();
    }
}
