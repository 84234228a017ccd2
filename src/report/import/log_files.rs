//! Files into lines: bounded in length and number, gzip unpacked while reading, as far as a log
//! grows.
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

/// Bytes that come out of any gzip file, and most for each of its bytes after that. Facts of a log
/// take memory with its length, and a few kB can unpack to any length; logs shrink to a twentieth.
const FREE_UNPACKED: u64 = 64 << 20;
const MAX_RATIO: u64 = 100;

/// The bytes, unpacked if they are gzip's.
pub fn unpacked(from: Box<dyn Read>) -> io::Result<Box<dyn BufRead>> {
    let mut from = BufReader::new(from);
    Ok(if from.fill_buf()?.starts_with(&[0x1f, 0x8b]) {
        let packed = Counted { from, taken: 0 };
        Box::new(BufReader::new(Unpacked {
            gzip: MultiGzDecoder::new(packed),
            length: 0,
        }))
    } else {
        Box::new(from)
    })
}

/// Packed bytes, counted as they are used up.
struct Counted<T> {
    from: T,
    taken: u64,
}

impl<T: BufRead> Read for Counted<T> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.from.read(buffer)?;
        self.taken += read as u64;
        Ok(read)
    }
}

impl<T: BufRead> BufRead for Counted<T> {
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        self.from.fill_buf()
    }

    fn consume(&mut self, bytes: usize) {
        self.taken += bytes as u64;
        self.from.consume(bytes);
    }
}

struct Unpacked<T: BufRead> {
    gzip: MultiGzDecoder<Counted<T>>,
    length: u64,
}

impl<T: BufRead> Read for Unpacked<T> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.gzip.read(buffer)?;
        self.length += read as u64;
        let packed = self.gzip.get_ref().taken;
        if self.length > FREE_UNPACKED.max(packed.saturating_mul(MAX_RATIO)) {
            return Err(io::Error::new(
                ErrorKind::FileTooLarge,
                format!(
                    "{packed} compressed bytes grow to more than {MAX_RATIO} times as many: if it \
                     is to be trusted, unpack it with gzip -d"
                ),
            ));
        }
        Ok(read)
    }
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
            ErrorKind::FileTooLarge => Some(e.to_string()),
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
    fn a_gzip_that_grows_as_no_log_does_is_read_up_to_a_bound() {
        let line = [&b"a"[..], &[b' '; 1022], b"\n"].concat();
        let text = line.repeat(2 * FREE_UNPACKED as usize / line.len());
        let packed = gzip(&text);
        let mut number = 0;
        let from = unpacked(Box::new(Cursor::new(packed))).unwrap();
        let end = for_each_line("x", from, |n, _| number = n).unwrap();
        assert!(end.unwrap().contains("grow to more than 100 times"));
        let most = FREE_UNPACKED / line.len() as u64;
        assert!(number > most / 2 && number <= most, "{number}");
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
