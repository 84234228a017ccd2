//! Bytes of a stream into lines, with a limit on what one line may hold.
//!
//! An over-long line costs its own length in time and [`Lines`]' limit in memory, never more: it is
//! dropped up to its newline and counted, and the next line is read normally.

use std::io::{self, Read};

/// Splits a stream at newlines. Lines are given without their newline.
#[derive(Debug)]
pub struct Lines {
    limit: usize,
    partial: Vec<u8>,
    /// Number of bytes of an over-long line dropped so far.
    dropped: Option<usize>,
}

/// A line, or the length of one that was too long.
#[derive(Debug, PartialEq, Eq)]
pub enum Piece<'a> {
    Line(&'a [u8]),
    /// Length in bytes, newline included.
    TooLong(usize),
}

impl Lines {
    /// `limit`: longest line in bytes, newline included.
    pub fn new(limit: usize) -> Self {
        Self {
            limit,
            partial: Vec::new(),
            dropped: None,
        }
    }

    /// Takes the next bytes and passes on every line that they complete, in order.
    pub fn push(&mut self, mut bytes: &[u8], mut each: impl FnMut(Piece)) {
        while let Some(end) = memchr::memchr(b'\n', bytes) {
            let (head, rest) = bytes.split_at(end + 1);
            bytes = rest;
            let length = self.dropped.unwrap_or(self.partial.len()) + head.len();
            if self.dropped.is_some() || length > self.limit {
                each(Piece::TooLong(length));
            } else if self.partial.is_empty() {
                each(Piece::Line(&head[..end]));
            } else {
                self.partial.extend_from_slice(&head[..end]);
                each(Piece::Line(&self.partial));
            }
            self.partial.clear();
            self.dropped = None;
        }
        match &mut self.dropped {
            Some(dropped) => *dropped += bytes.len(),
            // A line of exactly `limit` bytes has its newline inside the limit.
            None if self.partial.len() + bytes.len() >= self.limit => {
                self.dropped = Some(self.partial.len() + bytes.len());
                self.partial.clear();
            }
            None => self.partial.extend_from_slice(bytes),
        }
    }

    /// Reads to the end and passes on every line that is complete. Returns the number of bytes.
    pub fn read(&mut self, mut from: impl Read, mut each: impl FnMut(Piece)) -> io::Result<u64> {
        let mut chunk = vec![0; 64 * 1024];
        let mut bytes = 0;
        loop {
            match from.read(&mut chunk) {
                Ok(0) => return Ok(bytes),
                Ok(n) => {
                    bytes += n as u64;
                    self.push(chunk.get(..n).unwrap_or_default(), &mut each);
                }
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
    }

    /// Number of bytes of a line whose newline has not come yet.
    pub fn unfinished(&self) -> usize {
        self.dropped.unwrap_or(self.partial.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn split(chunks: &[&[u8]], limit: usize) -> Vec<Result<String, usize>> {
        let mut lines = Lines::new(limit);
        let mut out = Vec::new();
        for chunk in chunks {
            lines.push(chunk, |piece| {
                out.push(match piece {
                    Piece::Line(line) => Ok(String::from_utf8(line.to_vec()).unwrap()),
                    Piece::TooLong(n) => Err(n),
                });
            });
        }
        out
    }

    #[test]
    fn lines_come_out_whole_whatever_the_chunks() {
        let text = b"one\n\nthree\nrest";
        for cut in 0..text.len() {
            let (a, b) = text.split_at(cut);
            assert_eq!(
                split(&[a, b], 100),
                [Ok("one".into()), Ok("".into()), Ok("three".into())],
                "cut at {cut}"
            );
        }
    }

    #[test]
    fn an_over_long_line_is_counted_and_the_next_one_is_read() {
        assert_eq!(split(&[b"0123456789\nok\n"], 8), [Err(11), Ok("ok".into())]);
        for cut in 0..13 {
            let (a, b) = b"0123456789\nok\n".split_at(cut);
            assert_eq!(
                split(&[a, b], 8),
                [Err(11), Ok("ok".into())],
                "cut at {cut}"
            );
        }
    }

    #[test]
    fn the_limit_counts_the_newline() {
        for cut in 0..8 {
            let (a, b) = b"1234567\n".split_at(cut);
            assert_eq!(split(&[a, b], 8), [Ok("1234567".into())], "cut at {cut}");
            assert_eq!(split(&[a, b], 7), [Err(8)], "cut at {cut}");
        }
    }

    #[test]
    fn a_line_that_never_ends_takes_no_memory() {
        let mut lines = Lines::new(1024);
        for _ in 0..1000 {
            lines.push(&[b'x'; 4096], |_| panic!("there was no newline"));
            assert!(lines.partial.capacity() <= 8192);
        }
        assert_eq!(lines.unfinished(), 4096 * 1000);
    }
}
