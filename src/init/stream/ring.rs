//! This boot's stream: every sink reads it and none can hold it up.
//!
//! Invariants: `seq` is given here, under the lock, without gaps; pushing never waits for a reader
//! and never fails; when the [memory](super::memory) is full older records go, and each [`Reader`]
//! reports the number of those it lost. Lines are stored in wire format.
//!
//! With a [`Journal`], a line is in the journal's file before any reader can see it; if the file
//! has no room for a line, it has its number. After a crash the next worker thus finds in that file
//! whatever a reader may have seen, and gives no `seq` twice.

use super::journal::Journal;
use super::memory::Memory;
use crate::machine::clock::boottime_ns;
use crate::machine::threads;
use kata_gpu_wire::names;
use kata_gpu_wire::record::{Kind, Level, Record, record_line};
use serde_json::Map;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Duration;
use tokio::sync::watch;

/// Bytes of lines kept. A boot of 16 GPUs writes about 200 kB; five times that survives a noisy
/// kernel log.
pub const CAPACITY_BYTES: usize = 1024 * 1024;

/// The file that a ring's lines are written to.
pub enum File {
    /// Lines are in the memory alone.
    None,
    Open(Journal),
    /// Cannot be made yet: it is tried with each record, and then gets all that is in the memory.
    Missing(Box<dyn Fn() -> io::Result<Journal> + Send>),
}

struct Lines {
    memory: Memory,
    file: File,
    /// Whether the journal has stopped, which has been reported.
    stopped: bool,
}

impl Lines {
    /// Writes the lines that the journal lacks. After an error, no number up to now is given again.
    fn write(&mut self) -> io::Result<()> {
        if let File::Missing(create) = &self.file {
            self.file = File::Open(create()?);
        }
        match &mut self.file {
            File::Open(journal) => journal.write(&self.memory),
            File::None | File::Missing(_) => Ok(()),
        }
    }

    fn keep(&mut self, record: &Record) {
        self.memory.push(record, record_line(record).into());
    }
}

/// The record of a journal that has stopped or resumed.
fn changed(seq: u64, boottime_ns: u64, error: Option<&io::Error>) -> Record {
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
        Self::resumed(Memory::new(capacity_bytes, 0), File::None)
    }

    /// A ring that continues the stream of this memory; `file` takes later lines.
    pub fn resumed(memory: Memory, file: File) -> Self {
        let mut lines = Lines {
            memory,
            file,
            stopped: false,
        };
        // An error recurs with the next record, and is reported then.
        let _unused = lines.write();
        Self {
            watch: watch::Sender::new(lines.memory.next_seq()),
            lines: Mutex::new(lines),
            grown: Condvar::new(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Lines> {
        // No panic is possible between two field updates: a poisoned lock is as good as a sound
        // one.
        threads::lock(&self.lines)
    }

    /// Gives the record its `seq`, which is returned, keeps it and wakes the readers.
    pub fn push(&self, mut record: Record) -> u64 {
        let mut ring = self.lock();
        let seq = ring.memory.next_seq();
        record.seq = seq;
        // Readers cannot see the line before it is written: the lock is held.
        ring.keep(&record);
        let result = ring.write();
        if result.is_err() != ring.stopped {
            ring.stopped = result.is_err();
            let next = ring.memory.next_seq();
            ring.keep(&changed(next, record.boottime_ns, result.as_ref().err()));
            // An error recurs with the next record, as above.
            let _unused = ring.write();
        }
        let next = ring.memory.next_seq();
        drop(ring);
        self.grown.notify_all();
        self.watch.send_replace(next);
        seq
    }

    /// `seq` that the next record will get.
    pub fn next_seq(&self) -> u64 {
        self.lock().memory.next_seq()
    }

    /// `seq` of the oldest record in the ring.
    pub fn first_seq(&self) -> u64 {
        self.lock().memory.first_seq()
    }

    /// Blocks the thread until there is a record with `seq >= next`, or until `at_most` has passed.
    fn wait_blocking(&self, next: u64, at_most: Duration) {
        let guard = self.lock();
        // The result only shows a timeout; the caller reads either way.
        let _unused = self
            .grown
            .wait_timeout_while(guard, at_most, |ring| ring.memory.next_seq() <= next);
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
    /// Records that had left the ring when this reader came, between those still there: no loss of
    /// this reader, and to be seen by the numbers.
    gone_before: u64,
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
        let inner = ring.lock();
        let first = next.max(inner.memory.first_seq());
        let gone_before = inner.memory.missing_from(first);
        drop(inner);
        Self {
            ring,
            sink,
            next,
            gone_before,
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
    /// the records that it misses of those that were there when it came, or came later: a report
    /// that is lost in turn counts again in the next one.
    pub fn read(&mut self, limit: usize) -> Vec<Arc<str>> {
        let inner = self.ring.lock();
        let (mut lost, mut again, mut lines) = (0, 0, Vec::new());
        for entry in inner.memory.from(self.next).take(limit) {
            let gap = self.next..entry.seq;
            lost += entry.seq - self.next;
            let report = self.report.take_if(|report| gap.contains(&report.seq));
            again += report.map_or(0, |report| report.lost);
            self.next = entry.seq + 1;
            lines.push(Arc::clone(&entry.line));
        }
        drop(inner);
        let gone_before = self.gone_before.min(lost);
        self.gone_before -= gone_before;
        lost = lost - gone_before + again;
        if lost > 0 {
            self.report_lost(lost);
        }
        lines
    }

    /// Blocks the thread until there is a record to read, or until `at_most` has passed.
    pub fn wait_blocking(&self, at_most: Duration) {
        self.ring.wait_blocking(self.next, at_most);
    }

    fn report_lost(&mut self, lost: u64) {
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
