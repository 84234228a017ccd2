//! A line of the kernel's trace_pipe, and of its histograms.
//!
//! `            comm-pid     [cpu] flags seconds: event: arguments`: the name of a task is any
//! bytes, right-aligned in 16 columns; a name with blanks, dashes or brackets is still one.

use std::str::from_utf8;

/// Columns of a task's name.
const COMM: usize = 16;
/// Limit of a line that is looked at.
pub const MAX_LINE: usize = 1024;

/// An event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event<'a> {
    pub comm: &'a [u8],
    pub tid: u32,
    /// On the trace's clock, to the microsecond.
    pub at_ns: i64,
    pub name: &'a str,
    pub args: &'a str,
}

/// Kind of a line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Line<'a> {
    Event(Event<'a>),
    /// `CPU:0 [LOST 12 EVENTS]`.
    Lost(u64),
    Comment,
    Unreadable,
}

/// Parses a line without its newline.
pub fn parse(line: &[u8]) -> Line<'_> {
    if line.is_empty() || line.starts_with(b"#") {
        return Line::Comment;
    }
    if let Some(lost) = lost(line) {
        return Line::Lost(lost);
    }
    event(line).map_or(Line::Unreadable, Line::Event)
}

fn lost(line: &[u8]) -> Option<u64> {
    let text = from_utf8(line.strip_prefix(b"CPU:")?).ok()?;
    text.split_once("[LOST ")?
        .1
        .strip_suffix(" EVENTS]")?
        .parse()
        .ok()
}

fn event(line: &[u8]) -> Option<Event<'_>> {
    let (comm, rest) = line.split_at_checked(COMM)?;
    let rest = from_utf8(rest.strip_prefix(b"-")?).ok()?;
    let (tid, rest) = rest.split_once(' ')?;
    let rest = rest.trim_start();
    // With the option record-tgid a column with the process stands before the CPU.
    let rest = if rest.starts_with('(') {
        rest.split_once(')')?.1.trim_start()
    } else {
        rest
    };
    let (_cpu, rest) = rest.strip_prefix('[')?.split_once("] ")?;
    let (_flags, rest) = rest.trim_start().split_once(' ')?;
    let (at, rest) = rest.trim_start().split_once(": ")?;
    let (name, args) = rest
        .split_once(": ")
        .or_else(|| Some((rest.strip_suffix(':')?, "")))?;
    let (s, us) = at.split_once('.')?;
    if us.len() != 6 || !us.bytes().chain(s.bytes()).all(|b| b.is_ascii_digit()) {
        return None;
    }
    let at_ns = s
        .parse::<i64>()
        .ok()?
        .checked_mul(1_000_000_000)?
        .checked_add(us.parse::<i64>().ok()? * 1000)?;
    Some(Event {
        comm: comm.trim_ascii_start(),
        tid: tid.parse().ok()?,
        at_ns,
        name,
        args,
    })
}

impl Event<'_> {
    /// Value of ` key=0x1f` or ` key=-12` among the arguments.
    pub fn number(&self, key: &str) -> Option<i128> {
        let value = self
            .args
            .split(' ')
            .find_map(|word| word.strip_prefix(key)?.strip_prefix('='))?;
        match value.strip_prefix("0x") {
            Some(hex) => u64::from_str_radix(hex, 16).ok().map(i128::from),
            None => value.parse::<i64>().ok().map(i128::from),
        }
    }

    pub fn unsigned(&self, key: &str) -> Option<u64> {
        u64::try_from(self.number(key)?).ok()
    }

    /// The last argument, a text in quotes.
    pub fn text(&self, key: &str) -> Option<&str> {
        self.args
            .split_once(key)?
            .1
            .strip_prefix("=\"")?
            .strip_suffix('"')
    }
}

/// A row of a histogram: `{ common_pid: 218, reason: 2 } hitcount: 4011 us: 2032120`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HistRow {
    pub tid: u32,
    /// The second key.
    pub kind: Option<u64>,
    pub hits: u64,
    pub sum: Option<u64>,
}

/// Rows of a histogram's file, and the number of hits that it had no room for.
pub fn histogram(text: &str) -> (Vec<HistRow>, u64) {
    let number = |text: &str| text.trim().parse::<u64>().ok();
    let mut dropped = 0;
    let mut rows = Vec::new();
    for line in text.lines() {
        if let Some(rest) = line.trim().strip_prefix("Dropped:") {
            dropped += number(rest).unwrap_or(0);
        }
        let parsed = || {
            let (keys, values) = line.strip_prefix('{')?.split_once('}')?;
            let mut keys = keys
                .split(',')
                .filter_map(|key| number(key.split_once(':')?.1));
            let mut values = values
                .split_whitespace()
                .filter_map(|word| word.parse::<u64>().ok());
            let tid = u32::try_from(keys.next()?).ok()?;
            Some(HistRow {
                tid,
                kind: keys.next(),
                hits: values.next()?,
                sum: values.next(),
            })
        };
        rows.extend(parsed());
    }
    (rows, dropped)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tasks_name_can_have_anything_in_it() {
        for comm in [
            "qemu-system-x86",
            "CPU 0/KVM",
            "] [000] ",
            "a: b: 1.000000: ",
            "-1",
            "",
            "\u{e9}-9 [001] d..",
        ] {
            let line = format!(
                "{:>16}-{:<7} [000] .....    27.071437: pin: (f+0x1/0x2 <- g) pages=-14",
                comm, 218
            );
            if comm.len() == comm.chars().count() {
                let Line::Event(event) = parse(line.as_bytes()) else {
                    panic!("{line}")
                };
                assert_eq!(
                    (event.comm, event.tid, event.at_ns, event.name),
                    (comm.trim_start().as_bytes(), 218, 27_071_437_000, "pin")
                );
                assert_eq!(
                    (
                        event.number("pages"),
                        event.unsigned("pages"),
                        event.number("page")
                    ),
                    (Some(-14), None, None)
                );
            }
        }
        let tgid = b" qemu-system-x86-216     (    216) [000] .....    29.765004: open_out: (a <- \
             b) ret=0";
        assert!(matches!(
            parse(tgid),
            Line::Event(Event {
                tid: 216,
                name: "open_out",
                ..
            })
        ));
        let name = b" qemu-system-x86-216     [000] .....    30.823726: open_in: \
              (v+0x4/0x6d0 [vfio]) cmd=0x3b6a name=\"0000:81:00.0\"";
        let Line::Event(event) = parse(name) else {
            panic!()
        };
        assert_eq!(
            (event.text("name"), event.unsigned("cmd")),
            (Some("0000:81:00.0"), Some(0x3b6a))
        );
    }

    #[test]
    fn what_is_no_event_is_none() {
        assert_eq!(parse(b"# tracer: nop"), Line::Comment);
        assert_eq!(parse(b"CPU:0 [LOST 12 EVENTS]"), Line::Lost(12));
        for line in [
            &b"x"[..],
            b"CPU:0 [LOST many EVENTS]",
            b" qemu-system-x86-216     [000] .....    30.8: pin: x",
            b" qemu-system-x86-216     [000] .....    99999999999999999999.000000: pin: x",
            b" qemu-system-x86-99999999999 [000] ..... 1.000000: pin: x",
            b" qemu-system-x86-216     \xff\xfe",
            b" qemu-system-x86",
        ] {
            assert_eq!(
                parse(line),
                Line::Unreadable,
                "{:?}",
                String::from_utf8_lossy(line)
            );
        }
    }

    #[test]
    fn a_histogram_has_a_row_for_each_thread_and_kind() {
        let text = "# event histogram\n#\n\n\
            { tid:        218, reason:          6 } hitcount:        529  us:    1398728\n\
            { common_pid:        172 } hitcount:        385\n{ broken } x\n\n\
            Totals:\n    Hits: 914\n    Dropped: 3\n";
        let (rows, dropped) = histogram(text);
        assert_eq!(
            rows,
            [
                HistRow {
                    tid: 218,
                    kind: Some(6),
                    hits: 529,
                    sum: Some(1_398_728)
                },
                HistRow {
                    tid: 172,
                    kind: None,
                    hits: 385,
                    sum: None
                },
            ]
        );
        assert_eq!(dropped, 3);
    }
}
