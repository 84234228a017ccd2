//! State of one boot while it is received: its records, its losses, and bytes that wait to be
//! written. Reads a file back; does no other I/O.
//!
//! Invariants: a record (boot id, seq) is taken once, also after a restart of the collector (the
//! file is read back). A boot belongs to the peer that connected first for it, so that no VM writes
//! into the records of another. Storage that a peer can fill is limited ([`Limits`]). Records that
//! are not taken are counted.

use super::limits::Limits;
use anyhow::{Context, Result, bail, ensure};
use kata_gpu_report::data::boot_file::{
    FileLine, HostEvent, HostLine, Sandbox, SeqSet, TraceId, decode, for_each_line,
};
use kata_gpu_report::data::clock_offset::Sample;
use kata_gpu_report::data::compact_record::Names;
use kata_gpu_wire::names;
use kata_gpu_wire::record::{Kind, MAX_LINE, Record};
use nix::fcntl::OFlag;
use std::fs::File;
use std::fs::OpenOptions;
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Most bytes of the collector's own lines beyond a boot's bytes: a guest causes some by
/// reconnecting.
const MAX_HOST_BYTES: u64 = 4 << 20;
/// Gaps that a `lost` line names.
const MAX_NAMED_GAPS: usize = 32;

/// Outcome of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stored {
    New,
    /// Seen before: a replay.
    Duplicate,
    /// Over the limit of this boot.
    Capped,
    /// Not kept: the disk takes nothing, and enough waits for it.
    Dropped,
    /// Refused: the record would exceed the limit of gaps.
    Gap,
}

/// Bytes of all boots that wait for the disk, and the number of boots that cannot be written.
#[derive(Debug, Default)]
pub struct Waiting {
    pub bytes: AtomicU64,
    pub failing: AtomicU64,
}

/// Records that were dropped since the last line about dropped records.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Dropped {
    records: u64,
    first: u64,
    last: u64,
}

/// Bytes to write in one go.
#[derive(Debug, Default)]
pub struct Pending {
    pub bytes: Vec<u8>,
    /// True if the bytes hold more than the collector's own lines.
    pub has_records: bool,
    /// Bytes that are in the file already.
    pub after: u64,
}

/// A boot.
#[derive(Debug, Default)]
pub struct BootLog {
    limits: Limits,
    waiting: Arc<Waiting>,
    owner: Option<String>,
    has_header: bool,
    /// The file was removed: take nothing until the guest reconnects and resends header and
    /// records.
    asked_again: bool,
    /// True if records wait to be written, not only the collector's own lines.
    pending_records: bool,
    seqs: SeqSet,
    records: u64,
    bytes: u64,
    best: Option<Sample>,
    sandbox: Option<Sandbox>,
    capped: bool,
    reported_missing: u64,
    pending: Vec<u8>,
    /// The writing thread has taken the pending bytes and not reported the outcome.
    being_written: bool,
    /// Last write error; None while writing works.
    failing: Option<String>,
    dropped: Option<Dropped>,
    end: End,
}

/// Progress of a boot, for the report of boots that are over.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct End {
    /// The guest sent that its GPUs are settled, or that it powers off.
    pub finished: bool,
    /// The boot was reported.
    pub reported: bool,
}

impl End {
    fn learn(&mut self, kind: Kind, name: &str) {
        self.finished |= kind == Kind::Event && matches!(name, names::SETTLED | names::POWER_OFF);
    }
}

impl BootLog {
    fn new(limits: Limits, waiting: Arc<Waiting>) -> Self {
        Self {
            limits,
            waiting,
            ..Self::default()
        }
    }

    /// Log of a boot from its file; empty if there is no file.
    pub fn read_back(path: &Path, limits: Limits, waiting: Arc<Waiting>) -> Result<Self> {
        let mut log = Self::new(limits, waiting);
        let file = match open(path, OpenOptions::new().read(true)) {
            Ok(file) => file,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(log),
            Err(e) => return Err(e).with_context(|| format!("open {}", path.display())),
        };
        let meta = file
            .metadata()
            .with_context(|| format!("look at {}", path.display()))?;
        ensure!(meta.is_file(), "{} is no file: remove it", path.display());
        let at = || format!("read back {}", path.display());
        let (bytes, unfinished) =
            for_each_line(&file, |_, _, line| log.learn(line)).with_context(at)?;
        log.bytes = bytes;
        if unfinished > 0 {
            // A writer died inside a line. End the line: a torn record comes again by replay, one
            // that lacks only its newline is there.
            let mut line = vec![0; unfinished.min(MAX_LINE)];
            file.read_exact_at(&mut line, bytes - unfinished as u64)
                .with_context(at)?;
            log.learn(decode(&line, &mut Names::default()));
            log.push_raw(b"");
        }
        Ok(log)
    }

    fn learn(&mut self, line: Result<FileLine, String>) {
        match line {
            Ok(FileLine::Header(..)) => self.has_header = true,
            Ok(FileLine::Record(record)) => {
                self.records += u64::from(self.seqs.insert(record.seq));
                self.end.learn(record.kind, &record.name);
            }
            Ok(FileLine::Pong) | Err(_) => {}
            Ok(FileLine::Host(line)) => match line.event {
                HostEvent::Connected { peer, .. } => self.owner = self.owner.take().or(Some(peer)),
                HostEvent::Clock(sample) => self.best = Some(sample),
                HostEvent::Capped { .. } => self.capped = true,
                HostEvent::Dropped { last_seq, .. } => self.seqs.expect(last_seq),
                HostEvent::Sandbox(sandbox) => self.sandbox = Some(sandbox),
                HostEvent::Lost { count, .. } => self.reported_missing = count,
                HostEvent::Exported { .. } => self.end.reported = true,
                // An imported file is not a guest's; the other events change no state.
                HostEvent::Disconnected { .. }
                | HostEvent::Garbage { .. }
                | HostEvent::Trace { .. }
                | HostEvent::Imported(_) => {}
                HostEvent::Traced(_) | HostEvent::Recording(_) | HostEvent::Unknown => {}
            },
        }
    }

    pub fn end(&self) -> End {
        self.end
    }

    /// Marks the boot as reported, so that it is not reported twice.
    pub fn set_reported(&mut self) {
        self.end.reported = true;
    }

    /// Newest clock sample that was kept.
    pub fn best_sample(&self) -> Option<Sample> {
        self.best
    }

    /// True if nothing was ever stored of this boot.
    pub fn is_new(&self) -> bool {
        !self.has_header
    }

    /// Attaches a connection of `peer`; fails if the boot belongs to another peer.
    pub fn begin(&mut self, raw_header: &[u8], peer: &str, first_seq: u64) -> Result<()> {
        match &self.owner {
            Some(owner) if owner != peer => {
                bail!("{peer} claims a boot that belongs to {owner}: refused")
            }
            _ => self.owner = Some(peer.to_string()),
        }
        self.asked_again = false;
        if !self.has_header {
            self.has_header = true;
            self.push_raw(raw_header);
            let trace = HostLine::now(HostEvent::Trace {
                id: TraceId::random().context("draw a trace id")?,
            })
            .to_line();
            self.push_raw(trace.trim_end().as_bytes());
        }
        self.append_host(HostEvent::Connected {
            peer: peer.to_string(),
            first_seq,
        });
        Ok(())
    }

    /// Takes a record, decoded and raw (without newline).
    pub fn append(&mut self, record: &Record, raw: &[u8]) -> Stored {
        if self.seqs.contains(record.seq) {
            return Stored::Duplicate;
        }
        if self.capped {
            return Stored::Capped;
        }
        if self.asked_again {
            return Stored::Dropped;
        }
        if self.seqs.is_apart(record.seq) && self.seqs.ranges() > self.limits.gaps {
            return Stored::Gap;
        }
        let why = if self.records >= self.limits.records {
            Some(format!("{} records", self.limits.records))
        } else if self.bytes + raw.len() as u64 > self.limits.bytes {
            Some(format!("{} bytes", self.limits.bytes))
        } else {
            None
        };
        if let Some(why) = why {
            self.capped = true;
            self.append_host(HostEvent::Capped { why });
            return Stored::Capped;
        }
        if self.disk_fails() && !self.below_waiting_limits() {
            self.seqs.expect(record.seq);
            let seq = record.seq;
            let dropped = self.dropped.get_or_insert(Dropped {
                records: 0,
                first: seq,
                last: seq,
            });
            dropped.records += 1;
            dropped.first = dropped.first.min(seq);
            dropped.last = dropped.last.max(seq);
            return Stored::Dropped;
        }
        self.seqs.insert(record.seq);
        self.records += 1;
        self.end.learn(record.kind, &record.name);
        self.push_raw(raw);
        self.pending_records = true;
        Stored::New
    }

    /// Adds a line of the collector's own.
    pub fn append_host(&mut self, event: HostEvent) {
        if let HostEvent::Clock(sample) = event {
            self.best = Some(sample);
        }
        // Keep only waiting bytes while nothing can be written: the next connection and its clock
        // sample repeat this line.
        if self.asked_again
            || self.bytes > self.limits.bytes + MAX_HOST_BYTES
            || (self.disk_fails() && !self.below_waiting_limits())
        {
            return;
        }
        let line = HostLine::now(event).to_line();
        self.push_raw(line.trim_end().as_bytes());
    }

    /// Stores Kata's names of the VM if they changed.
    pub fn append_sandbox(&mut self, sandbox: &Sandbox) {
        if self.sandbox.as_ref() != Some(sandbox) {
            self.sandbox = Some(sandbox.clone());
            self.append_host(HostEvent::Sandbox(sandbox.clone()));
        }
    }

    /// Stores the count and gaps of missing records if the count changed.
    pub fn append_loss(&mut self) {
        let count = self.seqs.missing();
        if count != self.reported_missing {
            self.reported_missing = count;
            let gaps = self.seqs.gaps().take(MAX_NAMED_GAPS).collect();
            self.append_host(HostEvent::Lost { count, gaps });
        }
    }

    fn push_raw(&mut self, line: &[u8]) {
        self.pending.extend_from_slice(line);
        self.pending.push(b'\n');
        let length = line.len() as u64 + 1;
        self.bytes += length;
        self.waiting.bytes.fetch_add(length, Ordering::Relaxed);
    }

    fn below_waiting_limits(&self) -> bool {
        (self.pending.len() as u64) < self.limits.waiting_per_boot
            && self.waiting.bytes.load(Ordering::Relaxed) < self.limits.waiting
    }

    fn disk_fails(&self) -> bool {
        self.failing.is_some() || self.waiting.failing.load(Ordering::Relaxed) > 0
    }

    /// Whether to read from the guest. Also true while the disk fails: records that cannot be kept
    /// are counted, and requested again.
    pub fn has_room(&self) -> bool {
        self.disk_fails() || self.below_waiting_limits()
    }

    // Calls of the writing thread.

    /// Takes the bytes that wait to be written.
    pub fn take_pending(&mut self) -> Pending {
        self.being_written = true;
        Pending {
            after: self.bytes - self.pending.len() as u64,
            has_records: std::mem::take(&mut self.pending_records),
            bytes: std::mem::take(&mut self.pending),
        }
    }

    /// True if some bytes are not in the file yet.
    pub fn has_pending(&self) -> bool {
        self.being_written || !self.pending.is_empty()
    }

    /// True if the file lacks bytes, or a line about dropped records.
    pub fn has_unwritten(&self) -> bool {
        self.has_pending() || self.dropped.is_some()
    }

    /// Counts `bytes` of the taken bytes as written.
    pub fn written(&mut self, bytes: usize) {
        self.waiting
            .bytes
            .fetch_sub(bytes as u64, Ordering::Relaxed);
    }

    /// Puts `rest` back after a failed write.
    pub fn not_written(&mut self, mut rest: Pending, why: String) {
        self.being_written = false;
        rest.bytes.append(&mut self.pending);
        self.pending = rest.bytes;
        self.pending_records |= rest.has_records;
        if self.failing.replace(why).is_none() {
            self.waiting.failing.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Ends a successful write. Returns the number of records dropped until now, and adds a line
    /// about them.
    pub fn all_written(&mut self) -> u64 {
        self.being_written = false;
        let why = self.works_again();
        let Some(dropped) = self.dropped.take() else {
            return 0;
        };
        self.append_host(HostEvent::Dropped {
            records: dropped.records,
            first_seq: dropped.first,
            last_seq: dropped.last,
            why: why.unwrap_or("the disk took nothing".into()),
        });
        dropped.records
    }

    /// Ends a row of failed writes. Returns the last error.
    fn works_again(&mut self) -> Option<String> {
        let why = self.failing.take();
        if why.is_some() {
            self.waiting.failing.fetch_sub(1, Ordering::Relaxed);
        }
        why
    }

    /// Forgets all stored records after the file was removed: the next connection begins a new
    /// file. The owner stays the same.
    pub fn begin_anew(&mut self) {
        self.abandon();
        *self = Self {
            owner: self.owner.take(),
            end: End {
                finished: false,
                reported: self.end.reported,
            },
            asked_again: true,
            ..Self::new(self.limits, self.waiting.clone())
        };
    }

    /// Drops the pending bytes and returns their number.
    pub fn abandon(&mut self) -> usize {
        let bytes = self.take_pending().bytes.len();
        self.being_written = false;
        self.written(bytes);
        self.works_again();
        bytes
    }
}

/// Opens the file of a boot: follows no link, and does not block on a pipe.
pub(super) fn open(path: &Path, options: &mut OpenOptions) -> io::Result<File> {
    options
        .custom_flags((OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK).bits())
        .open(path)
}

#[cfg(test)]
mod tests {
    use super::Stored::{Capped, Duplicate, Gap, New};
    use super::*;
    use kata_gpu_report::data::boot_file::BootFile;
    use kata_gpu_test_support::{BOOT, TempDir, temp_dir};
    use kata_gpu_wire::record;
    use kata_gpu_wire::record::Line;
    use std::path::PathBuf;

    const PEER: &str = "cid 5";

    fn raw(seq: u64) -> Vec<u8> {
        // White space that has to be kept.
        format!(r#"{{ "schema":1,"seq":{seq},  "boottime_ns":1,"kind":"event","name":"x"}}"#)
            .into_bytes()
    }

    fn header() -> String {
        record::header_line(&kata_gpu_test_support::header(BOOT))
            .trim_end()
            .into()
    }

    fn begin(log: &mut BootLog) {
        log.begin(header().as_bytes(), PEER, 0).unwrap();
    }

    fn append(log: &mut BootLog, seq: u64) -> Stored {
        let raw = raw(seq);
        let Ok(Line::Record(record)) = kata_gpu_wire::decode::decode(&raw) else {
            panic!("test record does not decode")
        };
        log.append(&record, &raw)
    }

    /// A boot and its file, which the test writes.
    struct Boot {
        dir: TempDir,
        limits: Limits,
        waiting: Arc<Waiting>,
    }

    impl Boot {
        fn new(limits: Limits) -> Self {
            Self {
                dir: temp_dir(),
                limits,
                waiting: Arc::default(),
            }
        }

        fn path(&self) -> PathBuf {
            self.dir.path().join("x")
        }

        fn log(&self) -> BootLog {
            BootLog::read_back(&self.path(), self.limits, self.waiting.clone()).unwrap()
        }

        fn write(&self, log: &mut BootLog) -> BootFile {
            use std::io::Write;
            let pending = log.take_pending();
            let mut file = OpenOptions::new()
                .append(true)
                .create(true)
                .open(self.path())
                .unwrap();
            file.write_all(&pending.bytes).unwrap();
            log.written(pending.bytes.len());
            log.all_written();
            BootFile::read(std::fs::File::open(self.path()).unwrap()).unwrap()
        }
    }

    #[test]
    fn records_are_stored_unchanged_and_once_even_after_a_restart() {
        let boot = Boot::new(Limits::default());
        let mut log = boot.log();
        begin(&mut log);
        assert_eq!(
            [0, 1, 1].map(|seq| append(&mut log, seq)),
            [New, New, Duplicate]
        );
        boot.write(&mut log);
        let first = std::fs::read(boot.path()).unwrap();
        let mut log = boot.log();
        assert!(!log.is_new());
        begin(&mut log);
        assert_eq!(
            [0, 1, 2].map(|seq| append(&mut log, seq)),
            [Duplicate, Duplicate, New]
        );
        boot.write(&mut log);
        let second = std::fs::read(boot.path()).unwrap();
        assert!(
            second.starts_with(&first),
            "what was written is never changed"
        );
        let texts: Vec<&[u8]> = second.split(|b| *b == b'\n').collect();
        for seq in 0..3 {
            assert_eq!(
                texts.iter().filter(|line| **line == raw(seq)).count(),
                1,
                "seq {seq}"
            );
        }
        assert_eq!(
            texts
                .iter()
                .filter(|line| line.starts_with(br#"{"schema":1,"stream""#))
                .count(),
            1,
            "one header"
        );
        assert_eq!(boot.waiting.bytes.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn a_line_torn_by_a_crash_is_left_alone_and_comes_again() {
        let boot = Boot::new(Limits::default());
        std::fs::write(
            boot.path(),
            [header().as_bytes(), b"\n", &raw(0)[..25]].concat(),
        )
        .unwrap();
        let mut log = boot.log();
        assert_eq!(append(&mut log, 0), New);
        let file = boot.write(&mut log);
        assert_eq!(
            (file.records.len(), file.damaged, file.damage[0].line),
            (1, 1, 2)
        );
    }

    #[test]
    fn a_line_that_lacks_only_its_newline_is_there_once() {
        let boot = Boot::new(Limits::default());
        let path = boot.path();
        std::fs::write(&path, [header().as_bytes(), b"\n", &raw(0)].concat()).unwrap();
        let mut log = boot.log();
        let stored = [0, 1].map(|seq| append(&mut log, seq));
        assert_eq!(stored, [Duplicate, New]);
        let file = boot.write(&mut log);
        let text = std::fs::read_to_string(&path).unwrap();
        let records = text.matches("\"kind\"").count();
        assert_eq!((file.records.len(), file.damaged, records), (2, 0, 2));
    }

    #[test]
    fn a_boot_belongs_to_its_first_peer_also_after_a_restart() {
        let boot = Boot::new(Limits::default());
        for _ in 0..2 {
            let mut log = boot.log();
            begin(&mut log);
            let refused = log
                .begin(header().as_bytes(), "cid 6", 0)
                .unwrap_err()
                .to_string();
            assert!(refused.contains("belongs to cid 5"), "{refused}");
            boot.write(&mut log);
        }
    }

    #[test]
    fn a_trace_id_is_stable_and_not_derivable_from_the_boot_id() {
        let [one, other] = [(); 2].map(|()| Boot::new(Limits::default()));
        let traces = [&one, &one, &other].map(|boot| {
            let mut log = boot.log();
            begin(&mut log);
            let file = boot.write(&mut log);
            assert_eq!(
                file.host
                    .iter()
                    .filter(|l| matches!(l.event, HostEvent::Trace { .. }))
                    .count(),
                1
            );
            file.trace().unwrap()
        });
        assert_eq!(traces[0], traces[1], "after a restart");
        assert_ne!(
            traces[0], traces[2],
            "the same boot id at another collector"
        );
        assert_ne!(traces[0].get(), 0x0f7a_1f8e_0000_4000_8000_0000_0000_beef);
    }

    #[test]
    fn a_boot_that_never_stops_is_cut_off_and_its_file_notes_it() {
        for limits in [
            Limits {
                records: 2,
                ..Limits::default()
            },
            Limits {
                bytes: 140,
                ..Limits::default()
            },
        ] {
            let boot = Boot::new(limits);
            let mut log = boot.log();
            let stored: Vec<Stored> = (0..5).map(|seq| append(&mut log, seq)).collect();
            assert_eq!(stored, [New, New, Capped, Capped, Capped]);
            let file = boot.write(&mut log);
            let capped = file
                .host
                .iter()
                .filter(|l| matches!(l.event, HostEvent::Capped { .. }))
                .count();
            assert_eq!((capped, file.records.len()), (1, 2));
            // Still capped after a restart, without a second line.
            let mut log = boot.log();
            assert_eq!(
                [append(&mut log, 1), append(&mut log, 7)],
                [Duplicate, Capped]
            );
        }
    }

    #[test]
    fn numbers_with_too_many_gaps_are_not_remembered() {
        let boot = Boot::new(Limits {
            gaps: 3,
            ..Limits::default()
        });
        let mut log = boot.log();
        let stored: Vec<Stored> = (0..6).map(|n| append(&mut log, n * 10)).collect();
        assert_eq!(stored, [New, New, New, New, Gap, Gap]);
        assert_eq!(append(&mut log, 11), New, "what joins is taken");
        assert_eq!(log.seqs.ranges(), 4);
    }

    #[test]
    fn gaps_are_noted_when_they_change() {
        let boot = Boot::new(Limits::default());
        let mut log = boot.log();
        for seq in [0, 3, 4] {
            append(&mut log, seq);
        }
        log.append_loss();
        log.append_loss();
        append(&mut log, 1);
        append(&mut log, 2);
        log.append_loss();
        let file = boot.write(&mut log);
        let lost: Vec<_> = file
            .host
            .iter()
            .filter(|l| matches!(l.event, HostEvent::Lost { .. }))
            .map(|l| l.event.clone())
            .collect();
        assert_eq!(
            lost,
            [
                HostEvent::Lost {
                    count: 2,
                    gaps: vec![(1, 2)]
                },
                HostEvent::Lost {
                    count: 0,
                    gaps: vec![]
                }
            ]
        );
    }

    #[test]
    fn without_writes_some_records_wait_and_the_rest_are_counted() {
        let boot = Boot::new(Limits {
            waiting_per_boot: 150,
            ..Limits::default()
        });
        let mut log = boot.log();
        append(&mut log, 0);
        let taken = log.take_pending();
        assert!(
            log.has_pending(),
            "what is being written is not in the file yet"
        );
        log.written(10);
        let (written, rest) = taken.bytes.split_at(10);
        let rest = Pending {
            bytes: rest.to_vec(),
            ..Pending::default()
        };
        log.not_written(rest, "full".into());
        let stored: Vec<Stored> = (1..6).map(|seq| append(&mut log, seq)).collect();
        assert_eq!(
            stored,
            [New, New, Stored::Dropped, Stored::Dropped, Stored::Dropped]
        );
        assert!(log.has_room(), "it is received all the same");
        log.append_loss();
        // The disk has room again. The ten bytes are in the file already.
        std::fs::write(boot.path(), written).unwrap();
        boot.write(&mut log);
        let file = boot.write(&mut log);
        assert!(!log.has_pending());
        assert_eq!(
            (file.records.len(), file.damaged, file.seqs.missing()),
            (3, 0, 3)
        );
        let dropped = HostEvent::Dropped {
            records: 3,
            first_seq: 3,
            last_seq: 5,
            why: "full".into(),
        };
        assert_eq!(file.host.iter().filter(|l| l.event == dropped).count(), 1);
        assert_eq!(
            (3..6).map(|seq| append(&mut log, seq)).collect::<Vec<_>>(),
            [New; 3]
        );
        assert_eq!(boot.write(&mut log).seqs.missing(), 0);
        assert_eq!(
            (
                boot.waiting.bytes.load(Ordering::Relaxed),
                boot.waiting.failing.load(Ordering::Relaxed)
            ),
            (0, 0)
        );
    }

    #[test]
    fn a_slow_disk_makes_a_guest_wait_and_drops_nothing() {
        let boot = Boot::new(Limits {
            waiting_per_boot: 100,
            ..Limits::default()
        });
        let mut log = boot.log();
        assert!(log.has_room());
        assert_eq!([0, 1, 2, 3].map(|seq| append(&mut log, seq)), [New; 4]);
        assert!(!log.has_room());
        boot.write(&mut log);
        assert!(log.has_room());
    }
}
