//! Names and numbers of an image as text. A name may hold any byte; the output is printable ASCII.

use kata_gpu_report::data::text::{Ink, Screen, printable};
use kata_gpu_report::views::grid::aligned;

/// A name: text as [`printable`], other bytes as `\xff`.
pub fn escaped(name: &[u8]) -> String {
    let text = |chunk: &std::str::Utf8Chunk| {
        let invalid: String = chunk
            .invalid()
            .iter()
            .map(|b| format!("\\x{b:02x}"))
            .collect();
        printable(chunk.valid()) + &invalid
    };
    name.utf8_chunks().map(|chunk| text(&chunk)).collect()
}

/// A file's permissions as `ls` prints them, without the type.
pub fn permissions(mode: u32) -> String {
    let bit = |mask: u32, letter: char| if mode & mask != 0 { letter } else { '-' };
    let triple = |shift: u32, special: u32, set: char| {
        let execute = match (mode & special != 0, mode >> shift & 1 != 0) {
            (true, true) => set,
            (true, false) => set.to_ascii_uppercase(),
            (false, true) => 'x',
            (false, false) => '-',
        };
        [bit(4 << shift, 'r'), bit(2 << shift, 'w'), execute]
    };
    [
        triple(6, 0o4000, 's'),
        triple(3, 0o2000, 's'),
        triple(0, 0o1000, 't'),
    ]
    .iter()
    .flatten()
    .collect()
}

/// Rounded to one digit: `12.3 MB`.
pub fn megabytes(bytes: u64) -> String {
    let tenths = (bytes + 50_000) / 100_000;
    format!("{}.{} MB", tenths / 10, tenths % 10)
}

/// Lines with aligned columns; `right`: right-aligned columns. The last column is not padded. The
/// first row is the head.
pub fn table(rows: &[Vec<String>], right: &[usize], screen: &Screen) -> String {
    let ink = |index: usize| if index == 0 { Ink::Bold } else { Ink::Plain };
    aligned(rows, right, "  ")
        .iter()
        .enumerate()
        .map(|(index, line)| screen.paint(ink(index), line.trim_end()) + "\n")
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_of_a_name_is_shown_and_none_drives_a_terminal() {
        assert_eq!(
            escaped(b"a\x1b[2J\xff\xc3\xa9\n"),
            "a\\x1b[2J\\xff\\u{e9}\\n"
        );
        let all: Vec<u8> = (0..=255).collect();
        assert!(escaped(&all).bytes().all(|b| (b' '..=b'~').contains(&b)));
    }

    #[test]
    fn permissions_are_those_of_ls() {
        for (mode, text) in [
            (0o755, "rwxr-xr-x"),
            (0o4755, "rwsr-xr-x"),
            (0o2640, "rw-r-S---"),
            (0o1777, "rwxrwxrwt"),
            (0, "---------"),
        ] {
            assert_eq!(permissions(mode), text);
        }
    }

    #[test]
    fn megabytes_are_rounded_to_one_digit() {
        assert_eq!(megabytes(12_349_999), "12.3 MB");
    }
}
