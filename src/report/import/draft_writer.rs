//! Writes drafts into the file of a boot: header, sources, records. The same drafts give the same
//! records and the same boot id.
//!
//! Guests' boot ids are random (version 4 of RFC 9562); ids made here are of version 8, named after
//! the records. With an event stream the guest's own header and records come first, unchanged, and
//! records from logs follow with higher numbers.

use super::derive::{Draft, marked};
use crate::data::boot_file::{BootFile, HostEvent, HostLine, Imported};
use crate::data::clock_offset::Sample;
use anyhow::{Context, Result, bail};
use kata_gpu_wire::record::{Header, Kind, Record, header_line, record_line};
use std::fs::OpenOptions;
use std::io::{ErrorKind, Write};
use std::path::Path;

/// A boot's file in the making.
pub struct Whole<'a> {
    pub stream: Option<&'a BootFile>,
    pub drafts: &'a [Draft],
    /// Version of our init, if the logs have its lines.
    pub version: Option<&'a str>,
    /// Release of the guest's kernel.
    pub release: Option<&'a str>,
    pub imported: Imported,
    pub sample: Option<Sample>,
}

/// The boot's id, and its file's text.
pub fn text(whole: &Whole) -> (String, String) {
    let records = records(whole);
    let lines: String = records.iter().map(record_line).collect();
    let header = whole
        .stream
        .and_then(|s| s.header.clone())
        .unwrap_or_else(|| Header {
            boot_id: id(lines.as_bytes()),
            version: format!("{} (imported from logs)", whole.version.unwrap_or("none")),
            kernel: whole.release.unwrap_or("?").to_string(),
            first_seq: 0,
        });
    let mut text = header_line(&header);
    text.push_str(&HostLine::now(HostEvent::Imported(Box::new(whole.imported.clone()))).to_line());
    if let Some(stream) = whole.stream {
        stream
            .host
            .iter()
            .for_each(|line| text.push_str(&line.to_line()));
        stream
            .records
            .iter()
            .for_each(|record| text.push_str(&record_line(&record.to_wire())));
    }
    if let Some(sample) = whole.sample {
        text.push_str(&HostLine::now(HostEvent::Clock(sample)).to_line());
    }
    text.push_str(&lines);
    (header.boot_id, text)
}

/// The records that come from logs.
fn records(whole: &Whole) -> Vec<Record> {
    let stream = whole
        .stream
        .map(|s| s.records.as_slice())
        .unwrap_or_default();
    let after = |highest: Option<u64>| highest.map_or(0, |n| n.saturating_add(1));
    let first_seq = after(stream.iter().map(|r| r.seq).max());
    let first_span = after(stream.iter().filter_map(|r| r.span).max()).max(1);
    let record = |(nth, draft): (usize, &Draft)| Record {
        seq: first_seq.saturating_add(nth as u64),
        boottime_ns: u64::try_from(draft.at_ns).unwrap_or(0),
        level: draft.level,
        gpu: draft.gpu,
        span: draft
            .span
            .map(|span| first_span.saturating_add(span))
            .filter(|_| matches!(draft.kind, Kind::Begin | Kind::End)),
        error: draft.error.clone(),
        fields: marked(draft),
        ..Record::new(draft.kind, &draft.name)
    };
    whole.drafts.iter().enumerate().map(record).collect()
}

/// Names some bytes, in the form of a UUID: FNV-1a of 128 bits, which does not protect them.
fn id(bytes: &[u8]) -> String {
    const OFFSET: u128 = 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d;
    const PRIME: u128 = 0x0000_0000_0100_0000_0000_0000_0000_013b;
    let hash = bytes.iter().fold(OFFSET, |hash, byte| {
        (hash ^ u128::from(*byte)).wrapping_mul(PRIME)
    });
    let hash = hash & !(0xf << 76) | 0x8 << 76;
    let hash = hash & !(0x3 << 62) | 0x2 << 62;
    let hex = format!("{hash:032x}");
    let part = |from: usize, to: usize| hex.get(from..to).unwrap_or_default();
    format!(
        "{}-{}-{}-{}-{}",
        part(0, 8),
        part(8, 12),
        part(12, 16),
        part(16, 20),
        part(20, 32)
    )
}

/// Writes a new file; never over one that is there.
pub fn save(path: &Path, text: &str) -> Result<()> {
    let file = OpenOptions::new().write(true).create_new(true).open(path);
    let mut file = match file {
        Err(e) if e.kind() == ErrorKind::AlreadyExists => bail!(
            "{} is there already: remove it, or write to another file",
            path.display()
        ),
        file => file.with_context(|| format!("create {}", path.display()))?,
    };
    file.write_all(text.as_bytes())
        .and_then(|()| file.sync_all())
        .with_context(|| format!("write {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use kata_gpu_wire::record::is_boot_id;

    #[test]
    fn an_id_depends_on_the_bytes_and_is_no_guests_boot_id() {
        let (a, b) = (id(b"a"), id(b"b"));
        assert!(is_boot_id(&a) && is_boot_id(&b) && a != b);
        assert_eq!((a.as_bytes()[14], id(b"a")), (b'8', a.clone()));
        assert!(matches!(a.as_bytes()[19], b'8'..=b'b'));
    }
}
