//! `/run/kata-gpu-init/boot.ndjson`: header and records of this boot in vsock's format, for
//! containers, for people in the guest, and for the worker that succeeds a dead one.
//!
//! The file is on tmpfs, where writes do not block. The ring appends each line before any reader
//! sees it; see [`super::ring`].
//!
//! Lines that find no room (a container can fill /run) are retried with every later line. Until
//! they are written, `next_seq` in the header is one more than the highest number given: a field of
//! fixed size in space that the file has had from its beginning. The next worker thus gives no
//! number twice, however many records the file lacks.
//!
//! At its limit the file is made anew, and takes the old one's place at once: of old lines those
//! that a successor's state comes from ([`Needed`]), and what a [`Memory`] of some size keeps of
//! all. A container that mapped the file into itself keeps the old one.

use super::memory::Memory;
use super::ring::CAPACITY_BYTES;
use crate::machine::clock::boottime_ns;
use crate::machine::files::failed;
use kata_gpu_wire::decode::decode;
use kata_gpu_wire::names;
use kata_gpu_wire::record::{Kind, Level, Line, MAX_LINE, Record, SCHEMA, record_line};
use serde_json::{Map, Value};
use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// Size after which the file does not grow (it uses memory): about forty boots' worth.
const MAX_BYTES: u64 = 8 * 1024 * 1024;
/// Size from which on nothing is appended: leaves room for one more line.
const LIMIT: u64 = MAX_BYTES - MAX_LINE as u64;
/// Lines of a file made anew, besides those that a successor needs; shared out as in [`Memory`].
const KEPT_BYTES: usize = 4 * 1024 * 1024;
/// Records until the next try, after the file could not be made anew: /run has no room, and a try
/// reads the whole file.
const PAUSE: u64 = 1000;
/// Jump of `seq` for each worker that died, if the file cannot be read: the numbers already given
/// are then unknown. Readers count the gap as loss.
pub const UNKNOWN: u64 = 1 << 32;
/// Beginning of the file: the name of the field that is written in place, and its width.
const MARK: &str = "{\"schema\":1,\"next_seq\":";
const WIDTH: usize = 20;

const _: () = assert!(SCHEMA == 1, "the beginning above is that of schema 1");

/// Numbers of the records, out of all of the file, that a successor's state comes from, in order.
/// Few of them, however long the file is.
pub type Needed = fn(&mut dyn Iterator<Item = Record>) -> Vec<u64>;

/// The file, open for writing.
pub struct Journal {
    path: PathBuf,
    file: File,
    needed: Needed,
    /// Length of its whole lines.
    bytes: u64,
    /// `seq` of the first record that the file lacks.
    next_seq: u64,
    limit: u64,
    /// `seq` from which on the file is made anew at its limit.
    again: u64,
}

/// Contents of an earlier worker's file.
pub struct Found {
    /// The stream so far.
    pub memory: Memory,
    /// All records of the file.
    pub records: Vec<Record>,
    /// Number of records after the last one of the file, lost to all readers.
    pub missing: u64,
}

impl Journal {
    /// Starts the file with its header line; replaces an existing file. `next_seq` is the number of
    /// the first record.
    pub fn create(path: &Path, header: &str, next_seq: u64, needed: Needed) -> io::Result<Self> {
        let at = failed("write", path);
        let file = OpenOptions::new()
            .create(true)
            .read(true)
            .write(true)
            .truncate(true)
            .open(path)
            .map_err(&at)?;
        let header = format!(
            "{MARK}{next_seq:WIDTH$},{}",
            header.strip_prefix("{\"schema\":1,").unwrap_or(header)
        );
        file.write_all_at(header.as_bytes(), 0).map_err(at)?;
        Ok(Self {
            path: path.to_path_buf(),
            file,
            needed,
            bytes: header.len() as u64,
            next_seq,
            limit: LIMIT,
            again: 0,
        })
    }

    /// Reads the file and continues behind its last whole line: a killed writer may have left a
    /// partial one.
    pub fn resume(path: &Path, needed: Needed) -> io::Result<(Self, Found)> {
        let at = failed("read", path);
        let mut file = OpenOptions::new()
            .read(true)
            .write(true)
            .open(path)
            .map_err(&at)?;
        let mut bytes = Vec::new();
        Read::by_ref(&mut file)
            .take(MAX_BYTES + MAX_LINE as u64)
            .read_to_end(&mut bytes)
            .map_err(&at)?;
        let marked = marked(&bytes).ok_or_else(|| {
            // An empty file is that of a worker that died before it wrote a record.
            let kind = match bytes.is_empty() {
                true => io::ErrorKind::NotFound,
                false => io::ErrorKind::InvalidData,
            };
            at(io::Error::new(
                kind,
                "its first line is not the header of a journal",
            ))
        })?;
        let whole = bytes
            .iter()
            .rposition(|b| *b == b'\n')
            .map_or(0, |newline| newline + 1);
        file.set_len(whole as u64).map_err(at)?;
        let mut found = Found {
            memory: Memory::new(CAPACITY_BYTES, 0),
            records: Vec::new(),
            missing: 0,
        };
        for (line, record) in records(bytes.get(..whole).unwrap_or_default()) {
            found
                .memory
                .push(&record, String::from_utf8_lossy(line).into());
            found.records.push(record);
        }
        let next_seq = found.memory.next_seq();
        if marked > next_seq {
            found.missing = marked - next_seq;
            let gap = gap(next_seq, marked);
            found.memory.push(&gap, record_line(&gap).into());
        }
        Ok((
            Self {
                path: path.to_path_buf(),
                file,
                needed,
                bytes: whole as u64,
                next_seq: next_seq.max(marked),
                limit: LIMIT,
                again: 0,
            },
            found,
        ))
    }

    /// Writes the lines that the file lacks. After an error, the header holds the number of the
    /// next record.
    pub fn write(&mut self, memory: &Memory) -> io::Result<()> {
        // Records that left the memory unwritten are a gap.
        let written = memory
            .from(self.next_seq)
            .try_for_each(|entry| self.append(entry.seq, entry.line.as_bytes()));
        written.map_err(|error| {
            let text = format!("{:WIDTH$}", memory.next_seq());
            let path = self.path.display();
            match self.file.write_all_at(text.as_bytes(), MARK.len() as u64) {
                Ok(()) => error,
                Err(e) => io::Error::new(
                    error.kind(),
                    format!("{error}; write the next number into {path}: {e}"),
                ),
            }
        })
    }

    /// Appends one line. The next try overwrites a partial one.
    fn append(&mut self, seq: u64, line: &[u8]) -> io::Result<()> {
        if self.bytes > self.limit {
            self.make_anew(seq)?;
        }
        let refused = |e: io::Error| {
            io::Error::new(
                e.kind(),
                format!(
                    "write {}: {e}; records are written when there is room",
                    self.path.display()
                ),
            )
        };
        self.file.write_all_at(line, self.bytes).map_err(refused)?;
        self.bytes += line.len() as u64;
        self.next_seq = seq + 1;
        Ok(())
    }

    /// Replaces the full file by one with what is worth keeping, now that record `seq` has come.
    fn make_anew(&mut self, seq: u64) -> io::Result<()> {
        let full = |error: &dyn std::fmt::Display| {
            io::Error::other(format!(
                "{} has reached its limit of {MAX_BYTES} bytes, and cannot be made anew: {error}; \
                    later records are on the other sinks, and each {PAUSE} records it is tried \
                    again: free some room in /run",
                self.path.display()
            ))
        };
        if seq < self.again {
            return Err(full(&"not tried again yet"));
        }
        self.again = seq.saturating_add(PAUSE);
        let (file, bytes) = self.replacement().map_err(|e| full(&e))?;
        (self.file, self.bytes, self.again) = (file, bytes, 0);
        Ok(())
    }

    /// Writes such a file and renames it; returns it and its length.
    fn replacement(&self) -> io::Result<(File, u64)> {
        let mut bytes = vec![0; usize::try_from(self.bytes).map_err(io::Error::other)?];
        self.file.read_exact_at(&mut bytes, 0)?;
        let kept = worth_keeping(&bytes, self.needed);
        drop(bytes);
        let path = self.path.with_extension("tmp");
        let made = || {
            let file = OpenOptions::new()
                .create(true)
                .read(true)
                .write(true)
                .truncate(true)
                .open(&path)?;
            file.write_all_at(&kept, 0)?;
            std::fs::rename(&path, &self.path)?;
            Ok((file, kept.len() as u64))
        };
        made().inspect_err(|_| {
            // A part of a file takes room that the next try needs.
            let _unused = std::fs::remove_file(&path);
        })
    }
}

/// Records of a file's lines, with these lines.
fn records(bytes: &[u8]) -> impl Iterator<Item = (&[u8], Record)> {
    let lines = bytes.split_inclusive(|b| *b == b'\n');
    lines.filter_map(|line| match decode(line) {
        Ok(Line::Record(record)) => Some((line, *record)),
        _ => None,
    })
}

/// Header and lines of a file that are worth their room.
fn worth_keeping(bytes: &[u8], needed: Needed) -> Vec<u8> {
    let (mut memory, mut lines) = (Memory::new(KEPT_BYTES, 0), Vec::new());
    let mut all = records(bytes).map(|(line, record)| {
        lines.push((line, record.seq));
        memory.push(&record, String::from_utf8_lossy(line).into());
        record
    });
    let needed = needed(&mut all);
    all.for_each(drop);
    let mut remembered = memory.from(0).map(|entry| entry.seq).peekable();
    let mut kept: Vec<&[u8]> = Vec::new();
    kept.extend(bytes.split_inclusive(|b| *b == b'\n').next());
    for (line, seq) in lines {
        let is_remembered = remembered.next_if_eq(&seq).is_some();
        if is_remembered || needed.binary_search(&seq).is_ok() {
            kept.push(line);
        }
    }
    kept.concat()
}

/// The number in the header. None if the file is no journal.
fn marked(bytes: &[u8]) -> Option<u64> {
    let number = bytes.strip_prefix(MARK.as_bytes())?.get(..WIDTH)?;
    std::str::from_utf8(number).ok()?.trim_start().parse().ok()
}

/// The record that reports lost ones.
fn gap(from: u64, to: u64) -> Record {
    Record {
        seq: to,
        boottime_ns: boottime_ns(),
        level: Level::Warn,
        error: Some(format!(
            "a worker died while boot.ndjson took no more: its records {from} to {} are lost to \
                late readers",
            to - 1
        )),
        fields: Map::from_iter([
            ("at".to_string(), Value::from("boot.ndjson")),
            ("lost".to_string(), Value::from(to - from)),
        ]),
        ..Record::new(Kind::Event, names::STREAM_LOST)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stream::ring::{self, Ring};
    use kata_gpu_test_support::temp_dir;

    const HEADER: &str = "{\"schema\":1,\"stream\":{}}\n";

    fn line(seq: u64) -> String {
        record_line(&Record {
            seq,
            boottime_ns: seq,
            ..Record::new(Kind::Event, "settled")
        })
    }

    fn memory(seqs: std::ops::Range<u64>) -> Memory {
        let mut memory = Memory::new(CAPACITY_BYTES, 0);
        for seq in seqs {
            let text = line(seq);
            let Ok(Line::Record(record)) = decode(text.as_bytes()) else {
                panic!("{text:?} is no record")
            };
            memory.push(&record, text.into());
        }
        memory
    }

    fn seqs(records: &[Record]) -> Vec<u64> {
        records.iter().map(|r| r.seq).collect()
    }

    /// The state of these tests comes from one record.
    fn fifth(records: &mut dyn Iterator<Item = Record>) -> Vec<u64> {
        records.map(|r| r.seq).filter(|seq| *seq == 5).collect()
    }

    /// Keeps a full file from being made anew, as a /run without room does.
    fn obstruct(path: &Path) -> PathBuf {
        let obstacle = path.with_extension("tmp");
        std::fs::create_dir(&obstacle).unwrap();
        obstacle
    }

    #[test]
    fn what_was_written_is_found_and_continued_behind_half_a_line() {
        let folder = temp_dir();
        let path = folder.path().join("journal");
        let mut journal = Journal::create(&path, HEADER, 0, fifth).unwrap();
        journal.write(&memory(0..3)).unwrap();
        journal
            .file
            .write_all_at(&line(3).as_bytes()[..20], journal.bytes)
            .unwrap();
        drop(journal);
        let (mut journal, found) = Journal::resume(&path, fifth).unwrap();
        let lines: Vec<&str> = found.memory.from(0).map(|entry| &*entry.line).collect();
        assert_eq!(lines, [line(0), line(1), line(2)]);
        assert_eq!((seqs(&found.records), found.missing), (vec![0, 1, 2], 0));
        journal.write(&memory(0..4)).unwrap();
        drop(journal);
        assert_eq!(
            seqs(&Journal::resume(&path, fifth).unwrap().1.records),
            [0, 1, 2, 3]
        );
    }

    #[test]
    fn a_file_that_cannot_be_made_at_first_gets_all_when_it_can() {
        let folder = temp_dir();
        let path = folder.path().join("journal");
        // A folder in its place, as a lack of descriptors or room in /run.
        std::fs::create_dir(&path).unwrap();
        let of_ring = path.clone();
        let create = move || Journal::create(&of_ring, HEADER, 7, fifth);
        let ring = Ring::resumed(
            Memory::new(CAPACITY_BYTES, 7),
            ring::File::Missing(Box::new(create)),
        );
        // One report, however often it is tried.
        for _ in 0..3 {
            ring.push(Record::new(Kind::Event, "settled"));
        }
        std::fs::remove_dir(&path).unwrap();
        ring.push(Record::new(Kind::Event, "settled"));
        let (_, found) = Journal::resume(&path, fifth).unwrap();
        assert_eq!(seqs(&found.records), [7, 8, 9, 10, 11, 12]);
        let reports = found.records.iter().filter(|r| r.name == names::SINK);
        let states: Vec<_> = reports
            .map(|r| (r.seq, r.fields["state"].clone()))
            .collect();
        assert_eq!(states, [(8, "stopped".into()), (12, "goes on".into())]);
        assert_eq!((found.missing, ring.next_seq()), (0, 13));
    }

    #[test]
    fn a_file_without_room_loses_records_and_repeats_no_number() {
        let folder = temp_dir();
        let path = folder.path().join("journal");
        let mut journal = Journal::create(&path, HEADER, 0, fifth).unwrap();
        journal.write(&memory(0..115)).unwrap();
        let obstacle = obstruct(&path);
        journal.limit = 0;
        for end in 116..188 {
            let error = journal.write(&memory(0..end)).unwrap_err().to_string();
            assert!(error.contains("has reached its limit"), "{error}");
            // The first try, and none for each record after it.
            assert_eq!(error.contains("not tried again yet"), end > 116, "{error}");
        }
        drop(journal);
        let (mut journal, found) = Journal::resume(&path, fifth).unwrap();
        assert_eq!((found.records.len(), found.missing), (115, 72));
        let last = found.memory.from(115).next().unwrap();
        assert_eq!((last.seq, found.memory.next_seq()), (187, 188));
        assert!(
            last.line.contains("its records 115 to 186 are lost"),
            "{}",
            last.line
        );
        // Write again, still without room; then with room.
        journal.limit = 0;
        let ring = Ring::resumed(found.memory, ring::File::Open(journal));
        ring.push(Record::new(Kind::Event, "settled"));
        let given = ring.next_seq();
        drop(ring);
        std::fs::remove_dir(obstacle).unwrap();
        let (journal, found) = Journal::resume(&path, fifth).unwrap();
        assert_eq!(
            (found.memory.next_seq(), found.records.len()),
            (given + 1, 115)
        );
        drop(Ring::resumed(found.memory, ring::File::Open(journal)));
        let (_, found) = Journal::resume(&path, fifth).unwrap();
        assert_eq!(
            (found.records.len(), found.memory.next_seq()),
            (116, given + 1)
        );
    }

    #[test]
    fn what_found_no_room_for_a_while_is_in_the_file_afterwards() {
        let folder = temp_dir();
        let path = folder.path().join("journal");
        let mut journal = Journal::create(&path, HEADER, 0, fifth).unwrap();
        journal.write(&memory(0..2)).unwrap();
        let obstacle = obstruct(&path);
        journal.limit = 0;
        journal.write(&memory(0..5)).unwrap_err();
        std::fs::remove_dir(obstacle).unwrap();
        journal.limit = LIMIT;
        journal.write(&memory(0..6)).unwrap();
        drop(journal);
        let (_, found) = Journal::resume(&path, fifth).unwrap();
        assert_eq!((seqs(&found.records), found.missing), ((0..6).collect(), 0));
    }

    #[test]
    fn a_full_file_keeps_what_is_needed_what_lasts_and_the_newest() {
        let mut text = HEADER.as_bytes().to_vec();
        let noise = "x".repeat(8000);
        let mut push = |seq: u64, kind: Kind, name: &str, noise: &str| {
            let mut record = Record {
                seq,
                ..Record::new(kind, name)
            };
            record.fields.insert("text".into(), noise.into());
            text.extend_from_slice(record_line(&record).as_bytes());
        };
        push(0, Kind::Event, names::INIT_START, "");
        push(1, Kind::Kmsg, "kmsg", &noise);
        push(2, Kind::Event, names::SETTLED, "");
        push(3, Kind::Event, names::SINK, "");
        push(4, Kind::Event, names::GPU_FAILED, "");
        push(5, Kind::Kmsg, "kmsg", &noise);
        for seq in 6..1000 {
            push(seq, Kind::Kmsg, "kmsg", &noise);
        }
        let kept = worth_keeping(&text, fifth);
        assert!(kept.starts_with(HEADER.as_bytes()));
        let seqs: Vec<u64> = records(&kept).map(|(_, record)| record.seq).collect();
        let newest = seqs[4];
        assert_eq!(seqs[..4], [0, 2, 4, 5]);
        assert_eq!(seqs[4..], (newest..1000).collect::<Vec<u64>>());
        let (bytes, newest_bytes) = (kept.len(), 3 * 1024 * 1024);
        assert!(
            (newest_bytes - 9000..newest_bytes + 9000).contains(&bytes),
            "{bytes} bytes"
        );
    }

    #[test]
    fn a_file_without_its_header_is_no_journal() {
        let folder = temp_dir();
        let path = folder.path().join("journal");
        for text in [
            "",
            MARK,
            "{\"schema\":1,\"next_seq\":                   x,",
            HEADER,
        ] {
            std::fs::write(&path, text).unwrap();
            assert!(
                Journal::resume(&path, fifth)
                    .err()
                    .is_some_and(|e| e.to_string().contains("not the header of a journal")),
                "{text}"
            );
        }
    }
}
