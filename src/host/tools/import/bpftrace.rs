//! Format `bpftrace`: output of a bpftrace program on `vfio_pin_pages_remote`.
//!
//! Programs differ, so lines are read by their content: `vfio_pin_pages_remote` with `key=value`
//! words (`vaddr`, `npage` or `size`, `pid`, `tid`, `ret`, `us`) is a call, with `took N ms|us|ns`
//! the end of a call; a time stands before it, RFC 3339 or not at all. Histograms (`@name:` and
//! buckets) are kept as they stand. [`PROGRAM`] prints the best input.

use super::item::{Count, Skip};
use super::log_files::{Input, Text};
use super::pins::{Call, MAX_CALLS};
use super::split_clock::Split;
use crate::host::data::agent_log::line::realtime_ns;
use anyhow::Result;
use std::collections::HashMap;

/// A program for bpftrace whose output is read without loss. `%f` needs bpftrace 0.15.
pub const PROGRAM: &str = r#"kprobe:vfio_pin_pages_remote { @at[tid] = nsecs; @vaddr[tid] = arg1; @npage[tid] = arg2; }
kretprobe:vfio_pin_pages_remote /@at[tid]/ {
  printf("%sZ vfio_pin_pages_remote vaddr=0x%lx npage=%lu ret=%ld us=%lu pid=%d\n",
    strftime("%Y-%m-%dT%H:%M:%S.%f", @at[tid]), @vaddr[tid], @npage[tid], retval, (nsecs - @at[tid]) / 1000, pid);
  delete(@at[tid]); delete(@vaddr[tid]); delete(@npage[tid]);
}"#;
const FUNCTION: &str = "vfio_pin_pages_remote";
/// Histograms that are kept, and buckets of each.
const MAX_HISTOGRAMS: usize = 16;
const MAX_BUCKETS: usize = 64;

/// Contents of a trace of any format.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Trace {
    pub calls: Vec<Call>,
    /// The calls' times are of the host's wall clock; otherwise of a clock of the trace's own.
    pub wall: bool,
    /// Bound on the error of the times.
    pub error_ns: u64,
    /// Name, and buckets as they were printed.
    pub histograms: Vec<(String, Vec<String>)>,
    /// Oddities of the trace, for people.
    pub notes: Vec<String>,
}

/// Reads a trace.
pub fn read(input: Input) -> Result<(Trace, Count)> {
    let mut reader = Reader::default();
    let cut = input.lines(|number, text| {
        reader.count.lines += 1;
        match text {
            Text::Line(line) => match reader.line(number, line.trim()) {
                Ok(()) => reader.count.recognised += 1,
                Err(why) => reader.count.skip(why),
            },
            Text::TooLong => reader.count.skip(Skip::TooLong),
        }
    })?;
    reader.count.cut = cut;
    Ok(reader.finish())
}

#[derive(Default)]
struct Reader {
    trace: Trace,
    count: Count,
    /// Open calls, by thread, or else by process; None where neither is known.
    open: HashMap<Option<u32>, Vec<usize>>,
    split: Split,
    /// Stamps of ends, by the call's index.
    ends: HashMap<usize, i64>,
    /// A stamp had a fraction of nine digits: bpftrace's own has six.
    nanoseconds: bool,
    stamped: usize,
    last_stamp: Option<i64>,
}

impl Reader {
    fn line(&mut self, number: u64, line: &str) -> Result<(), Skip> {
        if line.is_empty() {
            return Err(Skip::Empty);
        }
        let Some((before, after)) = line.split_once(FUNCTION) else { return self.histogram_line(line) };
        let stamp = self.stamp(before);
        if let Some(took) = after.split_once("took ").and_then(|(_, rest)| duration(rest)) {
            return self.end(word(after, "tid").or(word(after, "pid")), stamp, took);
        }
        let pages_of_size = word::<u64>(after, "size").map(|bytes| bytes / super::pins::PAGE);
        let call = Call {
            at_ns: stamp,
            pid: word(after, "pid"),
            thread: None,
            vaddr: word(after, "vaddr"),
            asked: word(after, "npage").or(word(after, "npages")).or(pages_of_size),
            pinned: word(after, "ret").or(word(after, "retval")),
            took_ns: took_words(after),
            line: number,
        };
        if call.vaddr.is_none() && call.asked.is_none() && call.took_ns.is_none() {
            return Err(Skip::NotOfTheFormat);
        }
        if self.trace.calls.len() >= MAX_CALLS {
            return Err(Skip::LimitReached);
        }
        if call.took_ns.is_none() {
            let open = self.open.entry(word(after, "tid").or(call.pid)).or_default();
            open.push(self.trace.calls.len());
        }
        self.trace.calls.push(call);
        Ok(())
    }

    /// Ends the last open call of the thread, or of all threads where no id is given.
    fn end(&mut self, of: Option<u32>, stamp: Option<i64>, took_ns: u64) -> Result<(), Skip> {
        let open = match of {
            Some(_) => self.open.get_mut(&of).and_then(Vec::pop),
            None => {
                let latest = self.open.values_mut().filter(|o| !o.is_empty()).max_by_key(|o| o.last().copied());
                latest.and_then(Vec::pop)
            }
        };
        let at = open.ok_or(Skip::NotOfTheFormat)?;
        let call = self.trace.calls.get_mut(at).ok_or(Skip::NotOfTheFormat)?;
        call.took_ns = Some(took_ns);
        if let (Some(begin), Some(end)) = (call.at_ns, stamp) {
            self.ends.insert(at, end);
            self.split.learn(begin, end, i64::try_from(took_ns).ok());
        }
        Ok(())
    }

    fn stamp(&mut self, before: &str) -> Option<i64> {
        let text = before.trim().trim_end_matches(':').rsplit(' ').next()?;
        let ns = realtime_ns(text)?;
        self.nanoseconds |= text.rsplit('.').next().is_some_and(|f| f.len() == 10);
        self.stamped += 1;
        if let Some(last) = self.last_stamp {
            if ns < last {
                self.count.backwards += 1;
            }
            self.split.learn(last, ns, None);
        }
        self.last_stamp = Some(ns);
        Some(ns)
    }

    fn histogram_line(&mut self, line: &str) -> Result<(), Skip> {
        let histograms = &mut self.trace.histograms;
        if let Some(name) = map_name(line) {
            if histograms.len() >= MAX_HISTOGRAMS {
                return Err(Skip::LimitReached);
            }
            histograms.push((name.chars().take(64).collect(), vec![]));
            return Ok(());
        }
        let bucket = line.split_once('|').map_or("", |(bucket, _)| bucket.trim());
        let is_bucket =
            bucket.starts_with(['[', '(']) && bucket.split([' ', ']', ')']).next_back().is_some_and(|n| n.parse::<u64>().is_ok());
        if !is_bucket {
            return Err(if line.starts_with("Attaching ") { Skip::Empty } else { Skip::NotOfTheFormat });
        }
        let (_, buckets) = histograms.last_mut().ok_or(Skip::NotOfTheFormat)?;
        if buckets.len() >= MAX_BUCKETS {
            return Err(Skip::LimitReached);
        }
        buckets.push(bucket.split_whitespace().collect::<Vec<_>>().join(" "));
        Ok(())
    }

    fn finish(mut self) -> (Trace, Count) {
        let trace = &mut self.trace;
        trace.wall = self.stamped > 0;
        // bpftrace takes its wall clock from a difference that it measures when it starts.
        trace.error_ns = 1_000_000;
        if self.nanoseconds {
            self.split.narrow();
            for (nth, call) in trace.calls.iter_mut().enumerate() {
                let Some(at) = call.at_ns else { continue };
                // Take the begin or the end, whichever is known better.
                let by_begin = self.split.time(at);
                let took = call.took_ns.and_then(|took| i64::try_from(took).ok()).unwrap_or(0);
                let by_end = self.ends.get(&nth).map(|end| self.split.time(*end)).map(|(end, error)| (end.saturating_sub(took), error));
                let (time, error) = by_end.filter(|(_, error)| *error < by_begin.1).unwrap_or(by_begin);
                call.at_ns = Some(time);
                trace.error_ns = trace.error_ns.max(error);
            }
            trace.notes.push(match self.split.is_split() {
                true => format!(
                    "the seconds of its stamps are of the wall clock and their fractions of another (strftime beside nsecs % 1000000000): put \
                     right by the calls' durations and order, to +-{} ms; strftime's %f needs no repair",
                    trace.error_ns.div_ceil(1_000_000)
                ),
                false => "its stamps may be wrong by a second: fractions of nine digits are not of the clock that the seconds are of (use strftime's %f)"
                    .to_string(),
            });
        }
        let open: usize = self.open.values().map(Vec::len).sum();
        if open > 0 {
            trace.notes.push(format!("{open} call(s) have no end in it"));
        }
        (self.trace, self.count)
    }
}

/// The number behind `key=`, decimal or hexadecimal; a unit behind it is ignored.
fn word<T: TryFrom<u64>>(text: &str, key: &str) -> Option<T> {
    let (_, rest) = text.match_indices(key).map(|(at, _)| text.split_at(at)).find(|(before, rest)| {
        let free = before.chars().next_back().is_none_or(|c| !c.is_ascii_alphanumeric() && c != '_');
        free && rest.get(key.len()..).is_some_and(|r| r.starts_with('='))
    })?;
    number(rest.get(key.len() + 1..)?).and_then(|n| T::try_from(n).ok())
}

/// A number at the beginning of a text.
pub fn number(text: &str) -> Option<u64> {
    match text.strip_prefix("0x") {
        Some(hex) => u64::from_str_radix(digits(hex, |b| b.is_ascii_hexdigit()), 16).ok(),
        None => digits(text, |b| b.is_ascii_digit()).parse().ok(),
    }
}

fn digits(text: &str, is: impl Fn(u8) -> bool) -> &str {
    let end = text.bytes().position(|b| !is(b)).unwrap_or(text.len());
    text.get(..end).unwrap_or("")
}

/// `3266 ms`.
fn duration(text: &str) -> Option<u64> {
    let mut words = text.split_whitespace();
    let (number, unit) = (words.next()?.parse::<u64>().ok()?, words.next()?);
    let scale = match unit.trim_end_matches(['.', ',', ';']) {
        "ns" => 1,
        "us" => 1_000,
        "ms" => 1_000_000,
        "s" => 1_000_000_000,
        _ => return None,
    };
    number.checked_mul(scale)
}

fn took_words(text: &str) -> Option<u64> {
    [("ns", 1), ("us", 1_000), ("ms", 1_000_000)].into_iter().find_map(|(key, scale)| word::<u64>(text, key)?.checked_mul(scale))
}

/// The name in a line `@name:` or `@name[key]:`, above the buckets of a map.
pub fn map_name(line: &str) -> Option<&str> {
    let name = line.strip_prefix('@')?.strip_suffix(':')?;
    let identifier = name.split('[').next().unwrap_or_default();
    let is_name = identifier.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_') && name.bytes().all(|b| (b' '..=b'~').contains(&b));
    is_name.then_some(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read_text(text: &str) -> (Trace, Count) {
        read(Input::new("x", Box::new(std::io::Cursor::new(text.as_bytes().to_vec()))).unwrap()).unwrap()
    }

    #[test]
    fn a_call_is_one_line_or_two() {
        let one = "2026-01-02T03:04:05.250000Z vfio_pin_pages_remote vaddr=0x1000 npage=512 ret=512 us=17 pid=7\n";
        let (trace, count) = read_text(one);
        let want = Call {
            at_ns: Some(1_767_323_045_250_000_000),
            pid: Some(7),
            vaddr: Some(0x1000),
            asked: Some(512),
            pinned: Some(512),
            took_ns: Some(17_000),
            line: 1,
            thread: None,
        };
        assert_eq!((trace.calls, trace.wall, count.recognised), (vec![want], true, 1));
        let two = "Attaching 2 probes...\nvfio_pin_pages_remote(): vaddr=0x1000 npage=512 size=2097152B limit=2048 pid=7\nvfio_pin_pages_remote took 3274 ms   \n";
        let (trace, count) = read_text(two);
        assert_eq!(trace.calls, [Call { at_ns: None, pinned: None, took_ns: Some(3_274_000_000), line: 2, ..want }]);
        assert_eq!((trace.wall, count.lines, count.recognised), (false, 3, 2));
    }

    #[test]
    fn ends_find_their_threads() {
        let text = "vfio_pin_pages_remote npage=1 tid=1\nvfio_pin_pages_remote npage=2 tid=2\nvfio_pin_pages_remote took 5 us tid=1\nvfio_pin_pages_remote took 6 us\n";
        let (trace, _) = read_text(text);
        assert_eq!(trace.calls.iter().map(|c| c.took_ns).collect::<Vec<_>>(), [Some(5000), Some(6000)]);
    }

    #[test]
    fn histograms_are_kept_and_the_rest_is_counted() {
        let text = "@hist:\n[0]       89 |@@@@|\n[2, 4)     8 |@@  |\n[16K, 32K) 1 |    |\nhello\n@at[77]: 5\nvfio_pin_pages_remote\nvfio_pin_pages_remote took 5 us\n";
        let (trace, count) = read_text(text);
        assert_eq!(trace.histograms, [("hist".to_string(), vec!["[0] 89".to_string(), "[2, 4) 8".into(), "[16K, 32K) 1".into()])]);
        assert_eq!((count.recognised, count.skipped), (4, [(Skip::NotOfTheFormat, 4)].into()));
    }

    #[test]
    fn stamps_of_two_clocks_are_put_right() {
        let text = "2026-01-02T03:04:21.688000000Z: vfio_pin_pages_remote(): vaddr=0x1 npage=3 pid=1\n2026-01-02T03:04:25.954000000Z: vfio_pin_pages_remote took 3266 ms\n";
        let (trace, _) = read_text(text);
        assert!(trace.notes[0].contains("put right"), "{:?}", trace.notes);
        assert!(trace.error_ns < 140_000_000, "{}", trace.error_ns);
    }

    #[test]
    fn numbers_are_read_up_to_their_unit() {
        assert_eq!(
            (word::<u64>("size=4096B", "size"), word::<u32>("xpid=1 pid=2", "pid"), word::<u64>("vaddr=0xZ", "vaddr")),
            (Some(4096), Some(2), None)
        );
        assert_eq!(word::<u32>("pid=99999999999", "pid"), None);
        assert_eq!(duration("99999999999999999 s"), None);
    }
}
