//! The id of a program's content that its linker has put into a note: of this program, for whoever
//! compares a guest with a release (initrd/release).
//!
//! A hash of what was linked, SHA-1 with `-Wl,--build-id=sha1`: an equal id is the same build. The
//! id costs one read of a page. It proves nothing: a program may carry any id, and whoever must not
//! trust the guest measures the image.

use super::{Elf, ReadAt, Room, u32_at};
use std::fs::File;
use std::io;

const PT_NOTE: u32 = 4;
const NT_GNU_BUILD_ID: u32 = 3;
/// Limit of a list of notes (the init's own has 36 bytes).
const MAX_NOTES: u64 = 4096;
/// Longest id: linkers write 8 to 20 bytes.
const MAX_ID: usize = 64;

/// Id of the program that runs. None if the linker made none, or the file cannot be read.
pub fn of_this_program() -> Option<String> {
    File::open("/proc/self/exe")
        .and_then(|file| build_id(&file))
        .ok()
        .flatten()
}

/// Build id of a file, in hexadecimal digits. None if no note has one.
pub fn build_id(file: &dyn ReadAt) -> io::Result<Option<String>> {
    let elf = Elf::open(file)?;
    let mut room = Room::new();
    let table = elf.program_headers(&mut room)?;
    let segments = table
        .chunks_exact(elf.program_header())
        .map(|header| elf.segment(header));
    for segment in segments.filter(|s| s.kind == PT_NOTE && s.length <= MAX_NOTES) {
        let mut room = Room::new();
        let mut notes = elf.part(segment.offset, segment.length, &mut room)?;
        while notes.len() >= 12 {
            let (name, size, kind) = (
                u32_at(notes, 0) as usize,
                u32_at(notes, 4) as usize,
                u32_at(notes, 8),
            );
            let at = name.saturating_add(3) / 4 * 4 + 12;
            let Some(value) = notes.get(at..).and_then(|rest| rest.get(..size)) else {
                break;
            };
            if kind == NT_GNU_BUILD_ID
                && notes.get(12..16) == Some(b"GNU\0")
                && (1..=MAX_ID).contains(&size)
            {
                return Ok(Some(
                    value.iter().map(|byte| format!("{byte:02x}")).collect(),
                ));
            }
            notes = notes
                .get(at.saturating_add(size.saturating_add(3) / 4 * 4)..)
                .unwrap_or_default();
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;
    use kata_gpu_test_support::elf_stand_in as stand_in;

    /// A library whose dynamic segment is replaced by these notes.
    fn with_notes(notes: &[u8]) -> Vec<u8> {
        let mut bytes = stand_in::library(Some("liba.so"), &[]);
        let (at, size) = (bytes.len() as u64, notes.len() as u64);
        bytes[120..124].copy_from_slice(&PT_NOTE.to_le_bytes());
        bytes[128..136].copy_from_slice(&at.to_le_bytes());
        bytes[152..160].copy_from_slice(&size.to_le_bytes());
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

    #[test]
    fn the_id_is_found_among_other_notes() {
        let other = note(1, b"Xen\0", &[9; 7]);
        let id = note(NT_GNU_BUILD_ID, b"GNU\0", &[0xab, 0, 1, 0xff]);
        for (notes, found) in [
            (id.clone(), Some("ab0001ff")),
            ([other.clone(), id.clone()].concat(), Some("ab0001ff")),
            (other, None),
            (note(NT_GNU_BUILD_ID, b"Go\0\0", &[1; 8]), None),
            (note(NT_GNU_BUILD_ID, b"GNU\0", &[]), None),
            (note(NT_GNU_BUILD_ID, b"GNU\0", &[1; MAX_ID + 1]), None),
            (id[..14].to_vec(), None),
            (
                [u32::MAX, u32::MAX, NT_GNU_BUILD_ID]
                    .map(u32::to_le_bytes)
                    .concat(),
                None,
            ),
            (vec![], None),
        ] {
            assert_eq!(
                build_id(&with_notes(&notes)).unwrap().as_deref(),
                found,
                "{notes:?}"
            );
        }
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
                others +=
                    usize::from(build_id(&changed).ok().flatten().as_deref() != Some("010203"));
            }
        }
        assert!(others > good.len(), "{others} of {}", 2 * good.len());
    }
}
