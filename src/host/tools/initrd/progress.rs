//! One line on a terminal's standard error about what takes longer than a second. Nothing in a
//! pipe, and nothing left behind.

use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

/// Nobody wants to know before.
const FIRST: Duration = Duration::from_secs(1);
const EACH: Duration = Duration::from_millis(200);

pub struct Progress {
    what: &'static str,
    /// In bytes; 0 where nobody knows.
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

    /// So many bytes more are done.
    pub fn add(&mut self, bytes: u64) {
        self.done += bytes;
        let now = Instant::now();
        if !self.to_terminal || now < self.next {
            return;
        }
        self.next = now + EACH;
        self.shown = true;
        let of = if self.total > 0 { format!(" of {}", self.total / 1_000_000) } else { String::new() };
        // A terminal that cannot be written to shows nothing: no reason to stop.
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
