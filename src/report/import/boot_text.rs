//! The text of a boot's file: header, sources, records. The same records give the same text and the
//! same boot id.
//!
//! Guests' boot ids are random (version 4 of RFC 9562); ids made here are of version 8, named after
//! the records. The guest's own header and records, if there are any, come first, unchanged, and
//! records from logs follow with higher numbers.

use crate::data::boot_file::{BootFile, HostEvent, HostLine, Imported};
use crate::data::clock_offset::Sample;
use kata_gpu_wire::record::{Header, Record, header_line, record_line};

/// Parts of the file that are no records.
pub struct Facts {
    /// Version of our init, if the logs have its lines.
    pub version: Option<String>,
    /// Release of the guest's kernel.
    pub release: Option<String>,
    pub imported: Imported,
    pub sample: Option<Sample>,
}

/// Text of the file with these records from logs, and the guest's own of `boot`.
pub fn text(boot: Option<&BootFile>, mut records: Vec<Record>, facts: Facts) -> String {
    let own = boot.map(|boot| boot.records.as_slice()).unwrap_or_default();
    let after = |highest: Option<u64>| highest.map_or(0, |n| n.saturating_add(1));
    let first_seq = after(own.iter().map(|record| record.seq).max());
    let first_span = after(own.iter().filter_map(|record| record.span).max());
    for (seq, record) in (first_seq..).zip(&mut records) {
        record.seq = seq;
        record.span = record.span.map(|span| first_span.saturating_add(span));
    }
    let lines: String = records.iter().map(record_line).collect();
    let header = boot.and_then(|boot| boot.header.clone());
    let header = header.unwrap_or_else(|| Header {
        boot_id: id(lines.as_bytes()),
        version: format!(
            "{} (imported from logs)",
            facts.version.as_deref().unwrap_or("none")
        ),
        kernel: facts.release.unwrap_or("?".into()),
        first_seq: 0,
    });
    let mut text = header_line(&header);
    let imported = HostEvent::Imported(Box::new(facts.imported));
    text.push_str(&HostLine::now(imported).to_line());
    if let Some(boot) = boot {
        text.extend(boot.host.iter().map(HostLine::to_line));
        text.extend(own.iter().map(|record| record_line(&record.to_wire())));
    }
    if let Some(sample) = facts.sample {
        text.push_str(&HostLine::now(HostEvent::Clock(sample)).to_line());
    }
    text + &lines
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
    let mut text = format!("{hash:032x}");
    for at in [20, 16, 12, 8] {
        text.insert(at, '-');
    }
    text
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
