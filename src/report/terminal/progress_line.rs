//! Progress line on a terminal's standard error, for work that takes more than a second. A pipe
//! gets nothing, and the line is removed at the end.

use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

/// No line before this time.
const FIRST: Duration = Duration::from_secs(1);
const EACH: Duration = Duration::from_millis(200);

/// The line; removed when dropped.
pub struct Progress {
    next: Instant,
    shown: bool,
    to_terminal: bool,
}

impl Progress {
    pub fn start() -> Self {
        Self {
            next: Instant::now() + FIRST,
            shown: false,
            to_terminal: std::io::stderr().is_terminal(),
        }
    }

    /// Shows a text, unless the last one is too new.
    pub fn show(&mut self, text: impl FnOnce() -> String) {
        if self.to_terminal && Instant::now() >= self.next {
            self.show_now(&text());
        }
    }

    /// Shows a text at once, before work that takes long.
    pub fn show_now(&mut self, text: &str) {
        if self.to_terminal {
            // Ignore a terminal that cannot be written to.
            let _unused = write!(std::io::stderr(), "\r{text}\x1b[K");
            self.shown = true;
            self.next = Instant::now() + EACH;
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if self.shown {
            let _unused = write!(std::io::stderr(), "\r\x1b[K");
        }
    }
}

/// Progress in bytes: `packing ... 12 of 345 MB`.
pub struct ByteProgress {
    what: &'static str,
    /// Bytes; 0 if unknown.
    total: u64,
    done: u64,
    line: Progress,
}

impl ByteProgress {
    pub fn new(what: &'static str, total: u64) -> Self {
        Self {
            what,
            total,
            done: 0,
            line: Progress::start(),
        }
    }

    /// Adds finished bytes.
    pub fn add(&mut self, bytes: u64) {
        self.done += bytes;
        let (done, total) = (self.done / 1_000_000, self.total / 1_000_000);
        let of = || {
            if self.total > 0 {
                format!(" of {total}")
            } else {
                String::new()
            }
        };
        self.line
            .show(|| format!("{} ... {done}{} MB", self.what, of()));
    }
}
