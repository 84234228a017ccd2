//! Files into lines: bounded in length and number, gzip unpacked while reading.
//!
//! A file that ends in the middle (a truncated gzip, a copy that broke off) yields its beginning
//! and a note. The meaning of the lines is not known here.

use crate::data::framing::{Lines, Piece};
use crate::terminal::progress_line::Progress;
use flate2::bufread::MultiGzDecoder;
use std::io::{self, BufRead, BufReader, ErrorKind, Read};

/// Longest line that is looked at: the shim's longest piece of console text is 64 kB (Go's
/// bufio.Scanner), and quoting can double it.
const MAX_LINE: usize = 256 * 1024;
/// Most bytes that are read of one file, unpacked: a day of a busy containerd's debug log is below
/// that.
pub const MAX_BYTES: u64 = 8 << 30;

/// The bytes, unpacked if they are gzip's.
pub fn unpacked(from: Box<dyn Read>) -> io::Result<Box<dyn BufRead>> {
    let mut from = BufReader::new(from);
    Ok(if from.fill_buf()?.starts_with(&[0x1f, 0x8b]) {
        Box::new(BufReader::new(MultiGzDecoder::new(from)))
    } else {
        Box::new(from)
    })
}

/// Passes on every line with its number from 1; None is one that is too long. Returns the reason
/// of an early end, if there was one.
pub fn for_each_line(
    name: &str,
    from: impl Read,
    mut each: impl FnMut(u64, Option<&str>),
) -> io::Result<Option<String>> {
    let mut lines = Lines::new(MAX_LINE);
    let mut number = 0;
    let mut progress = Progress::start();
    let mut take = |piece: Piece| {
        number += 1;
        match piece {
            Piece::Line(line) => each(number, Some(&String::from_utf8_lossy(line))),
            Piece::TooLong(_) => each(number, None),
        }
        progress.show(|| format!("reading {name}: {number} lines"));
    };
    let end = match lines.read(from.take(MAX_BYTES), &mut take) {
        Ok(bytes) => {
            (bytes >= MAX_BYTES).then(|| format!("it has {} GiB or more", MAX_BYTES >> 30))
        }
        Err(e) => match e.kind() {
            ErrorKind::UnexpectedEof | ErrorKind::InvalidData | ErrorKind::InvalidInput => Some(
                format!("the compressed data ends too early or is damaged: {e}"),
            ),
            _ => return Err(e),
        },
    };
    // A log may end without a newline.
    if lines.unfinished() > 0 {
        lines.push(b"\n", &mut take);
    }
    Ok(end)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Cursor, Write};

    fn lines(bytes: Vec<u8>) -> (Vec<String>, Option<String>) {
        let mut out = Vec::new();
        let from = unpacked(Box::new(Cursor::new(bytes))).unwrap();
        let end = for_each_line("x", from, |_, line| out.push(line.unwrap().to_string()));
        (out, end.unwrap())
    }

    fn gzip(text: &[u8]) -> Vec<u8> {
        let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        encoder.write_all(text).unwrap();
        encoder.finish().unwrap()
    }

    #[test]
    fn lines_come_with_and_without_a_last_newline_and_out_of_gzip() {
        let want = (vec!["a".to_string(), "b".into()], None);
        for text in [b"a\nb\n".to_vec(), b"a\nb".to_vec(), gzip(b"a\nb")] {
            assert_eq!(lines(text), want);
        }
        assert_eq!(lines(vec![]), (vec![], None));
    }

    #[test]
    fn a_truncated_gzip_gives_its_beginning_and_a_note() {
        let text: String = (0..20_000u32)
            .map(|i| format!("line {i} {:x}\n", i.wrapping_mul(2_654_435_761)))
            .collect();
        let packed = gzip(text.as_bytes());
        let (got, end) = lines(packed[..packed.len() / 2].to_vec());
        assert!(got.len() > 1000 && got.len() < 20_000, "{}", got.len());
        assert!(end.unwrap().contains("ends too early"));
    }
}
