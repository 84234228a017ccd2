//! Progress line on a terminal's standard error, for steps that take more than a second. A pipe
//! gets nothing, and the line is removed at the end.

use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

/// No line before this time.
const FIRST: Duration = Duration::from_secs(1);
const EACH: Duration = Duration::from_millis(200);

pub struct Progress {
    what: &'static str,
    /// Bytes; 0 if unknown.
    total: u64,
    done: u64,
    next: Instant,
    shown: bool,
    to_terminal: bool,
}

impl Progress {
    pub fn new(what: &'static str, total: u64) -> Self {
        Self { what, total, done: 0, next: Instant::now() + FIRST, shown: false, to_terminal: std::io::stderr().is_terminal() }
    }

    /// Adds finished bytes.
    pub fn add(&mut self, bytes: u64) {
        self.done += bytes;
        let now = Instant::now();
        if !self.to_terminal || now < self.next {
            return;
        }
        self.next = now + EACH;
        self.shown = true;
        let of = if self.total > 0 { format!(" of {}", self.total / 1_000_000) } else { String::new() };
        // Ignore a terminal that cannot be written to.
        let _unused = write!(std::io::stderr(), "\r{} ... {}{of} MB\x1b[K", self.what, self.done / 1_000_000);
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if self.shown {
            let _unused = write!(std::io::stderr(), "\r\x1b[K");
        }
    }
}
