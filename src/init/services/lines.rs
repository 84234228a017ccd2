//! Bounds of log lines that services write: their length, their characters, their number. No line
//! is trusted.

use std::collections::VecDeque;
use std::time::Duration;

/// Longest line kept, in characters.
pub const MAX_LINE: usize = 512;
/// Longest unfinished line in bytes; what comes after is a line of its own.
const MAX_PART: usize = 4096;
/// Lines kept for the report of an end.
const LAST: usize = 20;
/// Their longest text in bytes: a record has 16 KiB, in which each byte may take two.
const MAX_LAST: usize = 6000;
/// Lines that a service may write at once, and in each second after that.
const BURST: u32 = 100;
const PER_SECOND: u32 = 20;

/// Text that is safe to print: cut, invalid UTF-8 replaced, control characters escaped.
pub fn printable(line: &[u8]) -> String {
    let text =
        String::from_utf8_lossy(line.get(..line.len().min(4 * MAX_LINE)).unwrap_or_default());
    let mut safe = String::with_capacity(line.len().min(MAX_LINE));
    for (at, c) in text.trim_end().chars().enumerate() {
        match c {
            _ if at >= MAX_LINE => {
                safe.push('…');
                break;
            }
            '\t' => safe.push(' '),
            // Direction marks of Unicode can hide the content of a line.
            c if c.is_control()
                || matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}') =>
            {
                safe.extend(c.escape_unicode());
            }
            c => safe.push(c),
        }
    }
    safe
}

/// Splits a stream into lines.
#[derive(Default)]
pub struct Splitter {
    part: Vec<u8>,
}

impl Splitter {
    /// Takes bytes; gives each line that they complete.
    pub fn take(&mut self, bytes: &[u8], mut line: impl FnMut(&[u8])) {
        for piece in bytes.split_inclusive(|byte| *byte == b'\n') {
            self.part.extend_from_slice(piece);
            if piece.ends_with(b"\n") || self.part.len() >= MAX_PART {
                line(self.part.trim_ascii_end());
                self.part.clear();
            }
        }
    }

    /// Gives the unfinished line of a stream that has ended.
    pub fn finish(&mut self, mut line: impl FnMut(&[u8])) {
        if !self.part.is_empty() {
            line(self.part.trim_ascii_end());
            self.part.clear();
        }
    }
}

/// The last lines of one service, and how many of them may become records.
pub struct Lines {
    last: VecDeque<String>,
    tokens: f64,
    at: Duration,
    dropped: u64,
}

/// A line that becomes a record, with the number of lines before it that did not.
#[derive(Debug, PartialEq, Eq)]
pub struct Taken {
    pub text: String,
    pub dropped: u64,
}

impl Lines {
    /// `now`: time of a clock that only goes forward.
    pub fn new(now: Duration) -> Self {
        Self {
            last: VecDeque::with_capacity(LAST),
            tokens: f64::from(BURST),
            at: now,
            dropped: 0,
        }
    }

    /// Takes a line; None where there were too many.
    pub fn take(&mut self, line: &[u8], now: Duration) -> Option<Taken> {
        let text = printable(line);
        if text.is_empty() {
            return None;
        }
        if self.last.len() == LAST {
            self.last.pop_front();
        }
        self.last.push_back(text.clone());
        let passed = now.saturating_sub(self.at).as_secs_f64();
        self.at = self.at.max(now);
        self.tokens = (self.tokens + passed * f64::from(PER_SECOND)).min(f64::from(BURST));
        if self.tokens < 1.0 {
            self.dropped += 1;
            return None;
        }
        self.tokens -= 1.0;
        Some(Taken {
            text,
            dropped: std::mem::take(&mut self.dropped),
        })
    }

    /// The last lines, oldest first, as far as they fit into a record.
    pub fn last(&self) -> Vec<String> {
        let mut bytes = 0;
        let fits = |line: &&String| {
            bytes += line.len();
            bytes <= MAX_LAST
        };
        let mut last: Vec<String> = self.last.iter().rev().take_while(fits).cloned().collect();
        last.reverse();
        last
    }

    /// Forgets the last lines: those of an earlier life.
    pub fn begin(&mut self) {
        self.last.clear();
    }

    /// Number of lines without a record that no record has counted yet.
    pub fn dropped(&mut self) -> u64 {
        std::mem::take(&mut self.dropped)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hostile_line_is_short_and_printable() {
        assert_eq!(printable(b"a\x1b[2J\tb\r\n"), "a\\u{1b}[2J b");
        assert_eq!(printable(b"\xff\xfe"), "\u{fffd}\u{fffd}");
        assert_eq!(printable("x\u{202e}y".as_bytes()), "x\\u{202e}y");
        let long = printable(&vec![b'x'; 1 << 20]);
        assert_eq!(long.chars().count(), MAX_LINE + 1);
        assert!(printable(&[0; 1 << 20]).len() <= 8 * MAX_LINE);
    }

    #[test]
    fn a_stream_without_newlines_does_not_grow() {
        let (mut splitter, mut lines) = (Splitter::default(), 0);
        for _ in 0..100 {
            splitter.take(&[b'x'; 1000], |_| lines += 1);
            assert!(splitter.part.len() < MAX_PART + 1000);
        }
        assert_eq!(lines, 20);
        let mut seen = Vec::new();
        let mut splitter = Splitter::default();
        splitter.take(b"one\ntw", |line| seen.push(line.to_vec()));
        splitter.take(b"o\n\nthree", |line| seen.push(line.to_vec()));
        splitter.finish(|line| seen.push(line.to_vec()));
        assert_eq!(seen, [&b"one"[..], b"two", b"", b"three"]);
    }

    #[test]
    fn a_flood_costs_bounded_records_and_is_counted() {
        let mut lines = Lines::new(Duration::ZERO);
        let mut take = |at_ms: u64, count: usize| {
            let now = Duration::from_millis(at_ms);
            let taken: Vec<Taken> = (0..count)
                .filter_map(|n| lines.take(format!("line {n}").as_bytes(), now))
                .collect();
            (
                taken.len(),
                taken.first().map(|taken| taken.dropped),
                lines.last().len(),
            )
        };
        assert_eq!(take(0, 10_000), (100, Some(0), 20));
        assert_eq!(take(1_000, 10_000), (20, Some(9_900), 20));
        // A clock that goes back gives nothing.
        assert_eq!(take(0, 10), (0, None, 20));
        assert_eq!(take(1_000_000, 1), (1, Some(9_990), 20));
        assert_eq!(lines.last().last().map(String::as_str), Some("line 0"));
        for _ in 0..20 {
            lines.take(&[b'x'; 1000], Duration::ZERO);
        }
        assert_eq!(lines.last().len(), 11);
    }
}
