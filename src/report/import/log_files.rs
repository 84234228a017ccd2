//! Files into lines: bounded in length and number, `.gz` unpacked while reading, the format found
//! by looking at the beginning.
//!
//! A file that ends in the middle (a truncated gzip, a copy that broke off) yields its beginning
//! and a note. The meaning of the lines is not known here.

use crate::data::framing::{Lines, Piece};
use crate::data::text::printable;
use crate::terminal::progress_line::Progress;
use anyhow::{Context, Result};
use flate2::read::MultiGzDecoder;
use std::fs::File;
use std::io::{self, BufReader, Cursor, Read};
use std::path::Path;

/// Longest line that is looked at: the shim's longest piece of console text is 64 kB (Go's
/// bufio.Scanner), and quoting can double it.
pub const MAX_LINE: usize = 256 * 1024;
/// Most bytes that are read of one file, unpacked: a day of a busy containerd's debug log is below
/// that.
pub const MAX_BYTES: u64 = 8 << 30;
/// Most bytes of a document that has to be read as a whole (a pod, or a list of pods).
pub const MAX_DOCUMENT: u64 = 64 << 20;
/// Bytes that are looked at to find the format.
const HEAD: usize = 256 * 1024;

/// A file that is being read.
pub struct Input {
    name: String,
    reader: Box<dyn Read>,
    /// Reason for an early end.
    cut: Option<String>,
}

/// A line, or the sign of a line that was too long.
pub enum Text<'a> {
    Line(&'a str),
    TooLong,
}

impl Input {
    /// Opens a file; `-` is standard input.
    pub fn open(path: &Path) -> Result<Self> {
        let name = path.display().to_string();
        let reader: Box<dyn Read> = if path == Path::new("-") {
            Box::new(io::stdin().lock())
        } else {
            Box::new(File::open(path).with_context(|| format!("open {name}"))?)
        };
        Self::new(&name, reader).with_context(|| format!("read {name}"))
    }

    pub fn new(name: &str, mut reader: Box<dyn Read>) -> io::Result<Self> {
        let mut magic = Vec::new();
        reader.by_ref().take(2).read_to_end(&mut magic)?;
        let gzip = magic == [0x1f, 0x8b];
        let whole = Cursor::new(magic).chain(reader);
        let reader: Box<dyn Read> = if gzip {
            Box::new(MultiGzDecoder::new(BufReader::new(whole)))
        } else {
            Box::new(whole)
        };
        Ok(Self {
            name: name.to_string(),
            reader,
            cut: None,
        })
    }

    /// Looks at the beginning without taking it.
    pub fn head(&mut self) -> Result<Vec<u8>> {
        let mut head = Vec::new();
        let mut part = (&mut self.reader).take(HEAD as u64);
        if let Err(e) = part.read_to_end(&mut head) {
            self.ended(&e)
                .with_context(|| format!("read {}", self.name))?;
        }
        let rest = std::mem::replace(&mut self.reader, Box::new(io::empty()));
        let rest: Box<dyn Read> = if self.cut.is_some() {
            Box::new(io::empty())
        } else {
            rest
        };
        self.reader = Box::new(Cursor::new(head.clone()).chain(rest));
        Ok(head)
    }

    /// A stream that breaks off is no error: the part before is used.
    fn ended(&mut self, error: &io::Error) -> io::Result<()> {
        match error.kind() {
            io::ErrorKind::UnexpectedEof
            | io::ErrorKind::InvalidData
            | io::ErrorKind::InvalidInput => {
                self.cut = Some(format!(
                    "the compressed data is damaged or ends too early ({error}): what came before is used"
                ));
                Ok(())
            }
            kind => Err(io::Error::new(kind, error.to_string())),
        }
    }

    /// Hands over every line. Returns the reason for an early end, if there was one.
    pub fn lines(mut self, mut each: impl FnMut(u64, Text)) -> Result<Option<String>> {
        let mut lines = Lines::new(MAX_LINE);
        let mut chunk = vec![0; 64 * 1024];
        let (mut number, mut bytes) = (0u64, 0u64);
        let mut progress = Progress::start();
        let mut take = |number: &mut u64, piece: Piece| {
            *number += 1;
            match piece {
                Piece::Line(line) => each(*number, Text::Line(&String::from_utf8_lossy(line))),
                Piece::TooLong(_) => each(*number, Text::TooLong),
            }
        };
        loop {
            match self.reader.read(&mut chunk) {
                Ok(0) => break,
                Ok(n) => {
                    bytes += n as u64;
                    lines.push(chunk.get(..n).unwrap_or_default(), |piece| {
                        take(&mut number, piece)
                    });
                    progress.show(|| {
                        format!(
                            "reading {}: {} MB",
                            printable(&self.name),
                            bytes / 1_000_000
                        )
                    });
                }
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => {
                    self.ended(&e)
                        .with_context(|| format!("read {}", self.name))?;
                    break;
                }
            }
            if bytes >= MAX_BYTES {
                self.cut = Some(format!("reading stopped after {} GiB", MAX_BYTES >> 30));
                break;
            }
        }
        // A log may end without a newline.
        lines.push(b"\n", |piece| {
            if piece != Piece::Line(b"") {
                take(&mut number, piece);
            }
        });
        Ok(self.cut)
    }

    /// The whole file, and the reason for an early end.
    pub fn document(mut self) -> Result<(Vec<u8>, Option<String>)> {
        let mut bytes = Vec::new();
        if let Err(e) = (&mut self.reader)
            .take(MAX_DOCUMENT + 1)
            .read_to_end(&mut bytes)
        {
            self.ended(&e)
                .with_context(|| format!("read {}", self.name))?;
        }
        if bytes.len() as u64 > MAX_DOCUMENT {
            anyhow::bail!(
                "{}: more than {} MiB in one JSON document: give one pod (kubectl get pod NAME -o json)",
                self.name,
                MAX_DOCUMENT >> 20
            );
        }
        Ok((bytes, self.cut))
    }

    /// The bytes as they are, for a reader that counts damage itself.
    pub fn into_reader(self) -> impl Read {
        self.reader.take(MAX_BYTES)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    fn lines(bytes: Vec<u8>) -> (Vec<String>, u64, Option<String>) {
        let (mut out, mut long) = (Vec::new(), 0);
        let mut input = Input::new("x", Box::new(Cursor::new(bytes))).unwrap();
        input.head().unwrap();
        let cut = input.lines(|_, text| match text {
            Text::Line(line) => out.push(line.to_string()),
            Text::TooLong => long += 1,
        });
        (out, long, cut.unwrap())
    }

    fn gzip(text: &[u8]) -> Vec<u8> {
        let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        encoder.write_all(text).unwrap();
        encoder.finish().unwrap()
    }

    #[test]
    fn lines_come_with_and_without_a_last_newline_and_out_of_gzip() {
        assert_eq!(
            lines(b"a\nb\n".to_vec()),
            (vec!["a".into(), "b".into()], 0, None)
        );
        assert_eq!(
            lines(b"a\nb".to_vec()),
            (vec!["a".into(), "b".into()], 0, None)
        );
        assert_eq!(
            lines(gzip(b"a\nb")),
            (vec!["a".into(), "b".into()], 0, None)
        );
        assert_eq!(lines(vec![]), (vec![], 0, None));
    }

    #[test]
    fn a_truncated_gzip_gives_its_beginning_and_a_note() {
        let text: String = (0..20_000u32)
            .map(|i| format!("line {i} {:x}\n", i.wrapping_mul(2_654_435_761)))
            .collect();
        let packed = gzip(text.as_bytes());
        let (got, _, cut) = lines(packed[..packed.len() / 2].to_vec());
        assert!(got.len() > 1000 && got.len() < 20_000, "{}", got.len());
        assert!(cut.unwrap().contains("damaged or ends too early"));
        let (got, _, cut) = lines(packed[..12].to_vec());
        assert!(got.is_empty() && cut.is_some());
    }

    #[test]
    fn a_line_of_2_mb_is_counted_and_the_next_one_read() {
        let text = [b"a\n".to_vec(), vec![b'x'; 2_000_000], b"\nb\n".to_vec()].concat();
        assert_eq!(lines(text), (vec!["a".into(), "b".into()], 1, None));
    }
}
