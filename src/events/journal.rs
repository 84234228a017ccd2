//! `/run/kata-gpu-init/boot.ndjson`: header and records of this boot as they go over vsock, for containers, for people in the guest, and for the
//! worker that takes over when one has died.
//!
//! It lies on tmpfs, where writing does not wait. The ring appends each line before it shows it to anybody; see [`super::ring`].

use super::record::{Kind, Level, Line, MAX_LINE, Record, decode, names, record_line};
use crate::clock::boottime_ns;
use serde_json::{Map, Value};
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

/// Bytes after which the file is left as it is (it lies in memory): about forty boots' worth.
const MAX_BYTES: u64 = 8 * 1024 * 1024;
/// Beyond this nothing is appended: room for one more line.
const LIMIT: u64 = MAX_BYTES - MAX_LINE as u64;
/// How far `seq` jumps when the file was full, so that nobody knows how many records came after its last one. Readers count the gap as loss.
pub const UNKNOWN: u64 = 1 << 32;

/// The file, open for appending.
pub struct Journal {
    path: PathBuf,
    file: File,
    bytes: u64,
}

/// What an earlier worker of this boot left.
pub struct Found {
    /// Record lines, each with its newline, in order of `seq`.
    pub lines: Vec<String>,
    pub records: Vec<Record>,
    /// `seq` of the first of them.
    pub first_seq: u64,
}

impl Journal {
    /// Starts the file with its header line; one that is there is replaced.
    pub fn create(path: &Path, header: &str) -> io::Result<Self> {
        let at = |e: io::Error| io::Error::new(e.kind(), format!("write {}: {e}", path.display()));
        let mut file = OpenOptions::new().create(true).write(true).truncate(true).open(path).map_err(at)?;
        file.write_all(header.as_bytes()).map_err(at)?;
        Ok(Self { path: path.to_path_buf(), file, bytes: header.len() as u64 })
    }

    /// Reads what is there and goes on behind its last whole line: a writer that was killed may have left half a one.
    pub fn resume(path: &Path) -> io::Result<(Self, Found)> {
        let at = |e: io::Error| io::Error::new(e.kind(), format!("read {}: {e}", path.display()));
        let mut file = OpenOptions::new().read(true).write(true).open(path).map_err(at)?;
        let mut bytes = Vec::new();
        Read::by_ref(&mut file).take(MAX_BYTES + MAX_LINE as u64).read_to_end(&mut bytes).map_err(at)?;
        let whole = bytes.iter().rposition(|b| *b == b'\n').map_or(0, |newline| newline + 1);
        file.set_len(whole as u64).map_err(at)?;
        file.seek(SeekFrom::Start(whole as u64)).map_err(at)?;
        let mut found = Found { lines: Vec::new(), records: Vec::new(), first_seq: 0 };
        for line in bytes.get(..whole).unwrap_or_default().split_inclusive(|b| *b == b'\n') {
            let Ok(Line::Record(record)) = decode(line) else { continue };
            // Without a gap: the ring counts by position.
            if found.records.last().is_some_and(|last: &Record| record.seq != last.seq + 1) {
                found.lines.clear();
                found.records.clear();
            }
            found.lines.push(String::from_utf8_lossy(line).into_owned());
            found.records.push(*record);
        }
        found.first_seq = found.records.first().map_or(0, |r| r.seq);
        let mut bytes = whole as u64;
        if bytes > LIMIT {
            // The one record past the limit: the next worker after this one continues behind it.
            let gap = gap_after(found.records.last());
            let line = record_line(&gap);
            file.write_all(line.as_bytes()).map_err(at)?;
            bytes += line.len() as u64;
            (found.first_seq, found.lines) = (gap.seq, vec![line]);
        }
        Ok((Self { path: path.to_path_buf(), file, bytes }, found))
    }

    /// Appends one line. After an error the file is not to be used any more.
    pub fn append(&mut self, line: &[u8]) -> io::Result<()> {
        if self.bytes > LIMIT {
            return Err(io::Error::other(format!(
                "{} has reached its limit of {MAX_BYTES} bytes; later records are on the other sinks",
                self.path.display()
            )));
        }
        self.file.write_all(line).map_err(|e| io::Error::new(e.kind(), format!("write {}: {e}", self.path.display())))?;
        self.bytes += line.len() as u64;
        Ok(())
    }
}

/// The record that stands for an unknown number of lost ones.
fn gap_after(last: Option<&Record>) -> Record {
    Record {
        seq: last.map_or(0, |r| r.seq) + UNKNOWN,
        boottime_ns: boottime_ns(),
        level: Level::Warn,
        error: Some("boot.ndjson was full when a worker died: nobody knows which records came after its last one".into()),
        fields: Map::from_iter([("at".to_string(), Value::from("boot.ndjson"))]),
        ..Record::new(Kind::Event, names::STREAM_LOST)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(seq: u64) -> String {
        record_line(&Record { seq, boottime_ns: seq, ..Record::new(Kind::Event, "settled") })
    }

    fn file(name: &str) -> PathBuf {
        std::env::temp_dir().join(format!("kata-gpu-init-journal-{name}-{}", std::process::id()))
    }

    #[test]
    fn what_was_written_is_found_and_continued_behind_half_a_line() {
        let path = file("half");
        let mut journal = Journal::create(&path, "{\"schema\":1,\"stream\":{}}\n").unwrap();
        (0..3).for_each(|seq| journal.append(line(seq).as_bytes()).unwrap());
        journal.append(&line(3).as_bytes()[..20]).unwrap();
        drop(journal);
        let (mut journal, found) = Journal::resume(&path).unwrap();
        assert_eq!((found.first_seq, found.records.len(), &found.lines[2]), (0, 3, &line(2)));
        journal.append(line(3).as_bytes()).unwrap();
        drop(journal);
        let (_, found) = Journal::resume(&path).unwrap();
        assert_eq!(found.records.iter().map(|r| r.seq).collect::<Vec<_>>(), [0, 1, 2, 3]);
        std::fs::remove_file(path).unwrap();
    }

    #[test]
    fn a_full_file_stops_growing_and_costs_a_gap() {
        let path = file("full");
        let mut journal = Journal::create(&path, "").unwrap();
        let long = line(7);
        let refused = (0..MAX_BYTES).find_map(|_| journal.append(long.as_bytes()).err());
        assert!(refused.is_some_and(|e| e.to_string().contains("has reached its limit")));
        assert!(std::fs::metadata(&path).unwrap().len() <= MAX_BYTES);
        for times in 1..3 {
            let (_, found) = Journal::resume(&path).unwrap();
            assert_eq!((found.first_seq, found.lines.len()), (7 + times * UNKNOWN, 1));
        }
        std::fs::remove_file(path).unwrap();
    }
}
