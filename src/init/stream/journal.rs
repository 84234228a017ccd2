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

use crate::machine::clock::boottime_ns;
use crate::machine::files::failed;
use kata_gpu_wire::decode::decode;
use kata_gpu_wire::names;
use kata_gpu_wire::record::{Kind, Level, Line, MAX_LINE, Record, SCHEMA, record_line};
use serde_json::{Map, Value};
use std::collections::VecDeque;
use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Size after which the file does not grow (it uses memory): about forty boots' worth.
const MAX_BYTES: u64 = 8 * 1024 * 1024;
/// Size from which on nothing is appended: leaves room for one more line.
const LIMIT: u64 = MAX_BYTES - MAX_LINE as u64;
/// Jump of `seq` if the file cannot be read, because the numbers already given are then unknown.
/// Readers count the gap as loss.
pub const UNKNOWN: u64 = 1 << 32;
/// Beginning of the file: the name of the field that is written in place, and its width.
const MARK: &str = "{\"schema\":1,\"next_seq\":";
const WIDTH: usize = 20;

const _: () = assert!(SCHEMA == 1, "the beginning above is that of schema 1");

/// The file, open for writing.
pub struct Journal {
    path: PathBuf,
    file: File,
    /// Length of its whole lines.
    bytes: u64,
    /// `seq` of the first record that the file lacks.
    next_seq: u64,
    limit: u64,
}

/// Contents of an earlier worker's file.
pub struct Found {
    /// The last lines of the stream, each with its newline, without a gap in `seq`.
    pub lines: Vec<String>,
    /// `seq` of the first of these lines.
    pub first_seq: u64,
    /// All records of the file.
    pub records: Vec<Record>,
    /// Number of records after the last one of the file, lost to all readers.
    pub missing: u64,
}

impl Journal {
    /// Starts the file with its header line; replaces an existing file.
    pub fn create(path: &Path, header: &str) -> io::Result<Self> {
        let at = failed("write", path);
        let file = OpenOptions::new()
            .create(true)
            .write(true)
            .truncate(true)
            .open(path)
            .map_err(&at)?;
        let header = format!(
            "{MARK}{:WIDTH$},{}",
            0,
            header.strip_prefix("{\"schema\":1,").unwrap_or(header)
        );
        file.write_all_at(header.as_bytes(), 0).map_err(at)?;
        Ok(Self {
            path: path.to_path_buf(),
            file,
            bytes: header.len() as u64,
            next_seq: 0,
            limit: LIMIT,
        })
    }

    /// Reads the file and continues behind its last whole line: a killed writer may have left a
    /// partial one.
    pub fn resume(path: &Path) -> io::Result<(Self, Found)> {
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
            at(io::Error::other(
                "its first line is not the header of a journal",
            ))
        })?;
        let whole = bytes
            .iter()
            .rposition(|b| *b == b'\n')
            .map_or(0, |newline| newline + 1);
        file.set_len(whole as u64).map_err(at)?;
        let mut found = Found {
            lines: Vec::new(),
            first_seq: 0,
            records: Vec::new(),
            missing: 0,
        };
        for line in bytes
            .get(..whole)
            .unwrap_or_default()
            .split_inclusive(|b| *b == b'\n')
        {
            let Ok(Line::Record(record)) = decode(line) else {
                continue;
            };
            // Keep no gap: the ring counts by position.
            if found
                .records
                .last()
                .is_some_and(|last: &Record| record.seq != last.seq + 1)
            {
                found.lines.clear();
            }
            if found.lines.is_empty() {
                found.first_seq = record.seq;
            }
            found.lines.push(String::from_utf8_lossy(line).into_owned());
            found.records.push(*record);
        }
        let mut next_seq = found.records.last().map_or(0, |last| last.seq + 1);
        if marked > next_seq {
            found.missing = marked - next_seq;
            (found.first_seq, found.lines) = (marked, vec![record_line(&gap(next_seq, marked))]);
            next_seq = marked;
        }
        Ok((
            Self {
                path: path.to_path_buf(),
                file,
                bytes: whole as u64,
                next_seq,
                limit: LIMIT,
            },
            found,
        ))
    }

    /// Writes the ring's lines that the file lacks; `first_seq` is the number of the first line in
    /// the ring. After an error, the header holds the number of the next record.
    pub fn write(&mut self, first_seq: u64, lines: &VecDeque<Arc<str>>) -> io::Result<()> {
        let end = first_seq + lines.len() as u64;
        // Records that left the ring unwritten are a gap.
        self.next_seq = self.next_seq.max(first_seq);
        let skip = usize::try_from(self.next_seq - first_seq).unwrap_or(usize::MAX);
        let written = lines
            .iter()
            .skip(skip)
            .try_for_each(|line| self.append(line.as_bytes()));
        written.map_err(|error| {
            let text = format!("{end:WIDTH$}");
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
    fn append(&mut self, line: &[u8]) -> io::Result<()> {
        if self.bytes > self.limit {
            return Err(io::Error::other(format!(
                "{} has reached its limit of {MAX_BYTES} bytes; later records are on the other \
                    sinks",
                self.path.display()
            )));
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
        self.next_seq += 1;
        Ok(())
    }
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
    use crate::stream::ring::Ring;
    use kata_gpu_test_support::temp_dir;

    const HEADER: &str = "{\"schema\":1,\"stream\":{}}\n";

    fn line(seq: u64) -> String {
        record_line(&Record {
            seq,
            boottime_ns: seq,
            ..Record::new(Kind::Event, "settled")
        })
    }

    fn lines(from: u64, to: u64) -> VecDeque<Arc<str>> {
        (from..to).map(|seq| line(seq).into()).collect()
    }

    fn seqs(records: &[Record]) -> Vec<u64> {
        records.iter().map(|r| r.seq).collect()
    }

    #[test]
    fn what_was_written_is_found_and_continued_behind_half_a_line() {
        let folder = temp_dir();
        let path = folder.path().join("journal");
        let mut journal = Journal::create(&path, HEADER).unwrap();
        journal.write(0, &lines(0, 3)).unwrap();
        journal
            .file
            .write_all_at(&line(3).as_bytes()[..20], journal.bytes)
            .unwrap();
        drop(journal);
        let (mut journal, found) = Journal::resume(&path).unwrap();
        assert_eq!(
            (
                found.first_seq,
                found.records.len(),
                &found.lines[2],
                found.missing
            ),
            (0, 3, &line(2), 0)
        );
        journal.write(0, &lines(0, 4)).unwrap();
        drop(journal);
        assert_eq!(
            seqs(&Journal::resume(&path).unwrap().1.records),
            [0, 1, 2, 3]
        );
    }

    #[test]
    fn a_full_file_loses_records_and_repeats_no_number() {
        let folder = temp_dir();
        let path = folder.path().join("journal");
        let mut journal = Journal::create(&path, HEADER).unwrap();
        journal.write(0, &lines(0, 115)).unwrap();
        journal.limit = 0;
        for end in 116..188 {
            assert!(
                journal
                    .write(0, &lines(0, end))
                    .unwrap_err()
                    .to_string()
                    .contains("has reached its limit")
            );
        }
        drop(journal);
        let (mut journal, found) = Journal::resume(&path).unwrap();
        assert_eq!(
            (
                found.first_seq,
                found.lines.len(),
                found.records.len(),
                found.missing
            ),
            (187, 1, 115, 72)
        );
        assert!(
            found.lines[0].contains("its records 115 to 186 are lost"),
            "{}",
            found.lines[0]
        );
        // Write again, still without room; then with room.
        journal.limit = 0;
        let ring = Ring::resumed(found.lines, found.first_seq, Some(journal));
        ring.push(Record::new(Kind::Event, "settled"));
        let given = ring.next_seq();
        drop(ring);
        let (journal, found) = Journal::resume(&path).unwrap();
        assert_eq!((found.first_seq, found.records.len()), (given, 115));
        drop(Ring::resumed(found.lines, found.first_seq, Some(journal)));
        let (_, found) = Journal::resume(&path).unwrap();
        assert_eq!(
            (found.records.len(), found.first_seq, found.lines.len()),
            (116, given, 1)
        );
    }

    #[test]
    fn what_found_no_room_for_a_while_is_in_the_file_afterwards() {
        let folder = temp_dir();
        let path = folder.path().join("journal");
        let mut journal = Journal::create(&path, HEADER).unwrap();
        journal.write(0, &lines(0, 2)).unwrap();
        journal.limit = 0;
        journal.write(0, &lines(0, 5)).unwrap_err();
        journal.limit = LIMIT;
        journal.write(0, &lines(0, 6)).unwrap();
        drop(journal);
        let (_, found) = Journal::resume(&path).unwrap();
        assert_eq!(
            (seqs(&found.records), found.first_seq, found.missing),
            ((0..6).collect(), 0, 0)
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
                Journal::resume(&path)
                    .err()
                    .is_some_and(|e| e.to_string().contains("not the header of a journal")),
                "{text}"
            );
        }
    }
}
