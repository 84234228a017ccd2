//! Lines of the stream in memory, in order of `seq`: the newest, and of older ones those that
//! [last](Story).
//!
//! A guest runs for months. Its GPUs, deaths and boot are few records; traces of exec probes, lines
//! of services and of the kernel's log are many. A line that leaves the newest ones stays if it
//! lasts: a late reader gets what happened to a GPU weeks ago, however much was traced since.

use kata_gpu_wire::names;
use kata_gpu_wire::record::{Kind, Level, Record};
use std::collections::VecDeque;
use std::sync::Arc;

/// Most lasting lines older than the newest ones. Each can stand alone in the numbering, and the
/// collector takes 1024 gaps (limit `gaps`).
pub const MAX_LASTING: usize = 900;

/// A line with its number.
#[derive(Clone, Debug)]
pub struct Entry {
    pub seq: u64,
    /// Whether it stays when it is not among the newest any more.
    lasts: bool,
    pub line: Arc<str>,
}

/// Tells, record by record, which ones last: of the boot until it is settled all but traces (the
/// kernel's lines, and debug level), later those of GPUs and of our own processes. A step lasts
/// whole. Xids do not last: a container can cause them at will, and one that costs a GPU is in that
/// GPU's failure.
#[derive(Debug, Default)]
struct Story {
    settled: bool,
    /// Steps whose begin lasts, by id, until their end does.
    steps: Vec<u64>,
}

impl Story {
    fn lasts(&mut self, record: &Record) -> bool {
        let name = record.name.as_str();
        self.settled |= name == names::SETTLED;
        if record.kind == Kind::Kmsg || record.level >= Level::Debug {
            return false;
        }
        let step = self.steps.iter().position(|id| record.span == Some(*id));
        if let (Kind::End, Some(step)) = (record.kind, step) {
            self.steps.swap_remove(step);
            return true;
        }
        let lasts = self.has(name);
        if let (Kind::Begin, Some(id), true) = (record.kind, record.span, lasts) {
            self.steps.push(id);
        }
        lasts
    }

    fn has(&self, name: &str) -> bool {
        !self.settled
            || matches!(
                name,
                names::SETTLED | names::POWER_OFF | names::PROCESS_DIED
            )
            || (name.starts_with("gpu.") && name != names::GPU_XID)
    }
}

/// Lines up to a number of bytes, of which older, lasting ones have a quarter.
#[derive(Debug)]
pub struct Memory {
    lasting: Lines,
    newest: Lines,
    next_seq: u64,
    story: Story,
}

#[derive(Debug)]
struct Lines {
    lines: VecDeque<Entry>,
    bytes: usize,
    capacity_bytes: usize,
}

impl Lines {
    fn with_capacity(capacity_bytes: usize) -> Self {
        Self {
            lines: VecDeque::new(),
            bytes: 0,
            capacity_bytes,
        }
    }

    fn push(&mut self, entry: Entry) {
        self.bytes += entry.line.len();
        self.lines.push_back(entry);
    }

    /// The oldest line, if there are too many.
    fn pop(&mut self, most: usize) -> Option<Entry> {
        let full = self.bytes > self.capacity_bytes || self.lines.len() > most;
        let old = (full && self.lines.len() > 1).then(|| self.lines.pop_front())??;
        self.bytes -= old.line.len();
        Some(old)
    }

    fn from(&self, seq: u64) -> impl Iterator<Item = &Entry> {
        let start = self.lines.partition_point(|entry| entry.seq < seq);
        self.lines.range(start..)
    }
}

impl Memory {
    /// Memory of a stream whose first record gets the number `next_seq`.
    pub fn new(capacity_bytes: usize, next_seq: u64) -> Self {
        Self {
            lasting: Lines::with_capacity(capacity_bytes / 4),
            newest: Lines::with_capacity(capacity_bytes - capacity_bytes / 4),
            next_seq,
            story: Story::default(),
        }
    }

    /// Keeps a line; `record` is its content, whose `seq` is at least [`Self::next_seq`].
    pub fn push(&mut self, record: &Record, line: Arc<str>) {
        let lasts = self.story.lasts(record);
        self.next_seq = record.seq + 1;
        self.newest.push(Entry {
            seq: record.seq,
            lasts,
            line,
        });
        while let Some(old) = self.newest.pop(usize::MAX) {
            if old.lasts {
                self.lasting.push(old);
                while self.lasting.pop(MAX_LASTING).is_some() {}
            }
        }
    }

    /// The lines from this number on.
    pub fn from(&self, seq: u64) -> impl Iterator<Item = &Entry> {
        self.lasting.from(seq).chain(self.newest.from(seq))
    }

    /// Number of the next record.
    pub fn next_seq(&self) -> u64 {
        self.next_seq
    }

    /// Number of the oldest line.
    pub fn first_seq(&self) -> u64 {
        self.from(0).next().map_or(self.next_seq, |entry| entry.seq)
    }

    /// How many records from this number on have no line.
    pub fn missing_from(&self, seq: u64) -> u64 {
        (self.next_seq.saturating_sub(seq)).saturating_sub(self.from(seq).count() as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_that_began_before_the_boot_was_settled_lasts_to_its_end() {
        let mut story = Story::default();
        let mut lasts = |kind: Kind, name: &str, span: Option<u64>| {
            story.lasts(&Record {
                span,
                ..Record::new(kind, name)
            })
        };
        assert!(lasts(Kind::Begin, names::SERVICE_START, Some(1)));
        assert!(lasts(Kind::Event, names::SETTLED, None));
        assert!(!lasts(Kind::Begin, names::SERVICE_START, Some(2)));
        assert!(!lasts(Kind::End, names::SERVICE_START, Some(2)));
        assert!(lasts(Kind::End, names::SERVICE_START, Some(1)));
        assert!(!lasts(Kind::End, names::SERVICE_START, Some(1)));
        assert!(lasts(Kind::Begin, names::GPU_RESET, Some(3)));
        assert!(!lasts(Kind::Event, names::GPU_XID, None));
    }
}
