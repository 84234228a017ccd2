//! The id of a program's content that its linker has put into a note, for whoever compares a guest
//! with a release (initrd/release).
//!
//! A hash of what was linked, SHA-1 with `-Wl,--build-id=sha1`: an equal id is the same build. The
//! id proves nothing: a program may carry any id, and whoever must not trust the guest measures the
//! image.

use std::io::{self, Read};

const PT_NOTE: u32 = 4;
const NT_GNU_BUILD_ID: u32 = 3;
/// Limit of what is read: the first page, where linkers place header, table of segments and notes.
const BEGINNING: u64 = 4096;
/// Longest id: linkers write 8 to 20 bytes.
const MAX_ID: usize = 64;

/// Build id in hexadecimal digits of a program, for example of `File::open("/proc/self/exe")`; its
/// first page is read. None if the linker made none, or the file cannot be read.
pub fn of(program: io::Result<impl Read>) -> Option<String> {
    let mut bytes = Vec::new();
    program.ok()?.take(BEGINNING).read_to_end(&mut bytes).ok()?;
    // 64 bits, little-endian: as all programs of a release are.
    if !bytes.starts_with(b"\x7fELF\x02\x01") {
        return None;
    }
    let table = bytes.get(usize::try_from(u64_at(&bytes, 32)?).ok()?..)?;
    let header_bytes = usize::from(u16_at(&bytes, 54)?).max(1);
    table
        .chunks_exact(header_bytes)
        .take(usize::from(u16_at(&bytes, 56)?))
        .filter(|header| u32_at(header, 0) == Some(PT_NOTE))
        .find_map(|header| {
            let at = usize::try_from(u64_at(header, 8)?).ok()?;
            let notes = bytes.get(at..)?;
            let length = usize::try_from(u64_at(header, 32)?).ok()?;
            id_among(&notes[..length.min(notes.len())])
        })
}

fn id_among(mut notes: &[u8]) -> Option<String> {
    loop {
        let (name, size) = (u32_at(notes, 0)? as usize, u32_at(notes, 4)? as usize);
        let kind = u32_at(notes, 8)?;
        let at = name.checked_next_multiple_of(4)?.checked_add(12)?;
        let value = notes.get(at..)?.get(..size)?;
        let is_gnus = notes.get(12..16) == Some(b"GNU\0");
        if kind == NT_GNU_BUILD_ID && is_gnus && (1..=MAX_ID).contains(&size) {
            return Some(value.iter().map(|byte| format!("{byte:02x}")).collect());
        }
        notes = notes.get(at.checked_add(size.checked_next_multiple_of(4)?)?..)?;
    }
}

fn at<const N: usize>(bytes: &[u8], offset: usize) -> Option<[u8; N]> {
    bytes.get(offset..)?.first_chunk().copied()
}

fn u16_at(bytes: &[u8], offset: usize) -> Option<u16> {
    at(bytes, offset).map(u16::from_le_bytes)
}

fn u32_at(bytes: &[u8], offset: usize) -> Option<u32> {
    at(bytes, offset).map(u32::from_le_bytes)
}

fn u64_at(bytes: &[u8], offset: usize) -> Option<u64> {
    at(bytes, offset).map(u64::from_le_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A program with a segment that is loaded, and one of these notes.
    fn with_notes(notes: &[u8]) -> Vec<u8> {
        let (table, header) = (64_u64, 56_u16);
        let mut bytes = b"\x7fELF\x02\x01\x01".to_vec();
        bytes.resize(64, 0);
        bytes[32..40].copy_from_slice(&table.to_le_bytes());
        bytes[54..56].copy_from_slice(&header.to_le_bytes());
        bytes[56..58].copy_from_slice(&2_u16.to_le_bytes());
        for kind in [1, PT_NOTE] {
            let mut segment = [0; 56];
            segment[..4].copy_from_slice(&kind.to_le_bytes());
            segment[8..16].copy_from_slice(&(table + 2 * 56).to_le_bytes());
            segment[32..40].copy_from_slice(&(notes.len() as u64).to_le_bytes());
            bytes.extend(segment);
        }
        bytes.extend(notes);
        bytes
    }

    fn note(kind: u32, name: &[u8], value: &[u8]) -> Vec<u8> {
        let mut bytes = [name.len() as u32, value.len() as u32, kind]
            .map(u32::to_le_bytes)
            .concat();
        for part in [name, value] {
            bytes.extend(part);
            bytes.resize(bytes.len().next_multiple_of(4), 0);
        }
        bytes
    }

    fn id(program: &[u8]) -> Option<String> {
        of(Ok(program))
    }

    #[test]
    fn the_id_is_found_among_other_notes() {
        let other = note(1, b"Xen\0", &[9; 7]);
        let own = note(NT_GNU_BUILD_ID, b"GNU\0", &[0xab, 0, 1, 0xff]);
        for (notes, found) in [
            (own.clone(), Some("ab0001ff")),
            ([other.clone(), own.clone()].concat(), Some("ab0001ff")),
            (other, None),
            (note(NT_GNU_BUILD_ID, b"Go\0\0", &[1; 8]), None),
            (note(NT_GNU_BUILD_ID, b"GNU\0", &[]), None),
            (note(NT_GNU_BUILD_ID, b"GNU\0", &[1; MAX_ID + 1]), None),
            (own[..14].to_vec(), None),
            (
                [u32::MAX, u32::MAX, NT_GNU_BUILD_ID]
                    .map(u32::to_le_bytes)
                    .concat(),
                None,
            ),
            (vec![], None),
        ] {
            assert_eq!(id(&with_notes(&notes)).as_deref(), found, "{notes:?}");
        }
        let unreadable = Err::<&[u8], _>(io::Error::other("no such file"));
        assert_eq!(of(unreadable), None);
    }

    #[test]
    fn every_cut_and_every_changed_byte_is_read_or_refused() {
        let good = with_notes(&note(NT_GNU_BUILD_ID, b"GNU\0", &[1, 2, 3]));
        let mut others = 0;
        for at in 0..good.len() {
            for changed in [
                good[..at].to_vec(),
                [&good[..at], &[!good[at]], &good[at + 1..]].concat(),
            ] {
                others += usize::from(id(&changed).as_deref() != Some("010203"));
            }
        }
        assert!(others > good.len(), "{others} of {}", 2 * good.len());
    }
}
