//! Format `console`: a guest's console, as a serial port, a hypervisor's log file or the shim gives
//! it.
//!
//! Kernel lines carry a stamp (`[   12.345678] text`, with `printk.time=1`, which is every
//! distribution's and Kata's setting); lines of the agent and of kata-gpu-init are JSON with stamps
//! of their own. All else is counted. Escape sequences that terminals understand are taken out.

use super::agent_lines;
use super::item::{Count, Fact, Item, Log, MAX_ITEMS, MAX_STAMP_NS, Skip, Stamp};
use super::kernel_lines;
use super::kernel_lines::Meaning;
use super::log_files::{Input, Text};
use crate::data::agent_log::torn::Torn;
use crate::data::agent_log::{AgentLog, MAX_CONSOLE_LINE};
use crate::data::imported_record::Format;
use anyhow::Result;

/// Reads a console log: one entry per boot that is in it.
pub fn read(input: Input) -> Result<(Vec<Log>, Count)> {
    let mut reader = Console::new(Format::Console);
    let mut count = Count::default();
    let cut = input.lines(|number, text| match text {
        Text::Line(line) => reader.line(number, line, None, &mut count),
        Text::TooLong => {
            count.lines += 1;
            count.skip(Skip::TooLong);
        }
    })?;
    count.cut = cut;
    Ok((reader.finish(None), count))
}

/// Takes the lines of one console.
#[derive(Debug)]
pub struct Console {
    format: Format,
    boots: Vec<Vec<Item>>,
    kept: usize,
    last_kernel: Option<i64>,
    /// The latest stamp of any kernel line of this boot.
    latest: Option<i64>,
    torn: Torn,
    /// The agent's lines of this boot.
    agent: AgentLog,
    /// Kernel lines in a row that are too early to belong to this boot: kept apart until it is
    /// clear whether a boot begins with them.
    early: Vec<Item>,
}

/// Kernel lines in a row that are this much earlier than the lines before begin another boot
/// without a banner, if the first of them is no later than this. A log of two sources falls back to
/// later times: it is one boot, and is sorted by its stamps.
const FELL_BACK_NS: i64 = 5_000_000_000;
const FELL_BACK_LINES: usize = 3;

impl Console {
    pub fn new(format: Format) -> Self {
        let (torn, agent) = Default::default();
        Self {
            format,
            boots: vec![vec![]],
            kept: 0,
            last_kernel: None,
            latest: None,
            torn,
            agent,
            early: vec![],
        }
    }

    /// Takes a line. `read_ns`: time at which the host read it.
    pub fn line(&mut self, number: u64, line: &str, read_ns: Option<i64>, count: &mut Count) {
        count.lines += 1;
        let mut torn = std::mem::take(&mut self.torn);
        let boots = self.boots.len();
        torn.line(
            without_escapes(line).as_bytes(),
            MAX_CONSOLE_LINE,
            |whole| {
                // The line is cut between characters, and so still text.
                self.whole_line(number, &String::from_utf8_lossy(whole), read_ns, count);
            },
        );
        // A line that was cut off by the end of a boot has no rest in the next boot.
        if self.boots.len() == boots {
            self.torn = torn;
        }
    }

    fn whole_line(&mut self, number: u64, line: &str, read_ns: Option<i64>, count: &mut Count) {
        if let Some((Some(stamp), _)) =
            kernel_line(line).filter(|(stamp, _)| stamp.is_some_and(|ns| ns <= MAX_STAMP_NS))
        {
            self.tick(stamp);
        }
        let mut items = Vec::new();
        if let Err(why) = self.parse(number, line, &mut items) {
            return count.skip(why);
        }
        for item in items {
            let item = Item {
                read_ns,
                between: (self.latest, None),
                ..item
            };
            if self.kept >= MAX_ITEMS {
                return count.skip(Skip::LimitReached);
            }
            self.kept += 1;
            count.recognised += 1;
            self.place(item, count);
        }
    }

    /// Bounds the time of earlier items that have no kernel line behind them by this one.
    fn tick(&mut self, stamp: i64) {
        self.latest = self.latest.max(Some(stamp));
        let waiting = self
            .boots
            .last_mut()
            .into_iter()
            .flat_map(|boot| boot.iter_mut().rev());
        for item in waiting
            .take_while(|item| !matches!(item.stamp, Stamp::Kernel(_)) && item.between.1.is_none())
        {
            item.between.1 = Some(stamp);
        }
    }

    fn parse(&mut self, number: u64, line: &str, items: &mut Vec<Item>) -> Result<(), Skip> {
        if line.trim().is_empty() {
            return Err(Skip::Empty);
        }
        let format = self.format;
        let mut keep = |stamp, fact| items.push(Item::new(stamp, format, number, fact));
        let Some((stamp_ns, text)) = kernel_line(line) else {
            agent_lines::parse(line, &mut self.agent, &mut keep)?;
            let absurd = |item: &Item| matches!(item.stamp, Stamp::Boot(ns) if !(0..=MAX_STAMP_NS).contains(&ns));
            return if items.iter().any(absurd) {
                Err(Skip::AbsurdStamp)
            } else {
                Ok(())
            };
        };
        let stamp_ns = stamp_ns
            .filter(|ns| *ns <= MAX_STAMP_NS)
            .ok_or(Skip::AbsurdStamp)?;
        // A process may have written JSON to the kernel's log, or to the console between stamp and
        // newline.
        if agent_lines::parse(text, &mut self.agent, &mut keep).is_err() {
            kernel_lines::meaning(text).ok_or(Skip::KernelDetail)?;
            keep(Stamp::Kernel(stamp_ns), Fact::Kernel(text.to_string()));
        }
        Ok(())
    }

    fn place(&mut self, item: Item, count: &mut Count) {
        let Stamp::Kernel(at) = item.stamp else {
            return self.keep(item);
        };
        let banner = matches!(&item.fact, Fact::Kernel(text) if matches!(kernel_lines::meaning(text), Some(Meaning::Banner { .. })));
        if banner {
            // Lines that fell back before the banner belong to the boot before.
            let early = std::mem::take(&mut self.early);
            early.into_iter().for_each(|item| self.keep(item));
            self.begin_boot();
        } else if let Some(last) = self.last_kernel
            && at < last
        {
            count.backwards += 1;
            let begins = at < FELL_BACK_NS || !self.early.is_empty();
            if begins && at + FELL_BACK_NS < last {
                self.early.push(item);
                if self.early.len() == FELL_BACK_LINES {
                    let early = std::mem::take(&mut self.early);
                    self.begin_boot();
                    early.into_iter().for_each(|item| self.keep_kernel(item));
                }
                return;
            }
        } else {
            let early = std::mem::take(&mut self.early);
            early.into_iter().for_each(|item| self.keep(item));
        }
        self.keep_kernel(item);
    }

    fn begin_boot(&mut self) {
        (self.last_kernel, self.latest, self.agent) = (None, None, AgentLog::default());
        // Lines before the first banner are the firmware's or another boot's end: a boot of their
        // own only if kernel lines are among them.
        let kernel_spoke = |boot: &Vec<Item>| {
            boot.iter()
                .any(|item| matches!(item.stamp, Stamp::Kernel(_)))
        };
        if let Some(last) = self.boots.last_mut().filter(|last| kernel_spoke(last)) {
            // A guest can print any number of banners: a boot of one line takes no room for more.
            last.shrink_to_fit();
            self.boots.push(vec![]);
        }
    }

    fn keep_kernel(&mut self, item: Item) {
        if let Stamp::Kernel(at) = item.stamp {
            self.last_kernel = Some(at);
        }
        self.keep(item);
    }

    fn keep(&mut self, item: Item) {
        if let Some(boot) = self.boots.last_mut() {
            boot.push(item);
        }
    }

    /// All boots of the console, none of them empty.
    pub fn finish(mut self, sandbox: Option<&str>) -> Vec<Log> {
        let early = std::mem::take(&mut self.early);
        early.into_iter().for_each(|item| self.keep(item));
        let logs = self.boots.into_iter().filter(|items| !items.is_empty());
        logs.map(|items| Log {
            sandbox: sandbox.map(str::to_string),
            items,
        })
        .collect()
    }
}

/// A kernel line: its stamp in ns (None where the number is impossible) and its text. Takes `<6>`
/// before and `[    T1]` (the caller) behind the stamp, which some consoles have.
pub fn kernel_line(line: &str) -> Option<(Option<i64>, &str)> {
    let line = line.trim_start();
    let line = match line.strip_prefix('<').and_then(|rest| rest.split_once('>')) {
        Some((digits, rest))
            if !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit()) =>
        {
            rest
        }
        _ => line,
    };
    let (stamp, text) = line.strip_prefix('[')?.split_once(']')?;
    let (seconds, micros) = stamp.trim_start().split_once('.')?;
    let digits = |text: &str, len: std::ops::RangeInclusive<usize>| {
        len.contains(&text.len()) && text.bytes().all(|b| b.is_ascii_digit())
    };
    if !digits(seconds, 1..=20) || !digits(micros, 6..=6) {
        return None;
    }
    let ns = || {
        seconds
            .parse::<i64>()
            .ok()?
            .checked_mul(1_000_000_000)?
            .checked_add(micros.parse::<i64>().ok()? * 1000)
    };
    let text = text.trim_start();
    let text = match text.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        Some((caller, rest)) if is_caller(caller) => rest.trim_start(),
        _ => text,
    };
    Some((ns(), text.trim_end()))
}

fn is_caller(text: &str) -> bool {
    let id = text.trim_start();
    id.strip_prefix(['T', 'C'])
        .is_some_and(|n| !n.is_empty() && n.bytes().all(|b| b.is_ascii_digit()))
}

/// The line without escape sequences (ECMA-48: ESC, then `[`, parameters and a final byte; or ESC
/// and one byte) and without carriage returns at its end. Other control characters stay: they are
/// shown as escapes.
pub fn without_escapes(line: &str) -> String {
    let mut out = String::with_capacity(line.len());
    let mut chars = line.chars().peekable();
    while let Some(c) = chars.next() {
        if c != '\u{1b}' {
            out.push(c);
            continue;
        }
        match chars.next() {
            Some('[') => while chars.next().is_some_and(|c| !('@'..='~').contains(&c)) {},
            // An operating system command: up to BEL or ESC \.
            Some(']') => while chars.next().is_some_and(|c| c != '\u{7}' && c != '\\') {},
            _ => {}
        }
    }
    let end = out.trim_end_matches(['\r', '\n']).len();
    out.truncate(end);
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn boots(lines: &[&str]) -> (Vec<Vec<i64>>, Count) {
        let mut console = Console::new(Format::Console);
        let mut count = Count::default();
        for (n, line) in lines.iter().enumerate() {
            console.line(n as u64 + 1, line, None, &mut count);
        }
        let stamps = |log: Log| {
            log.items
                .iter()
                .map(|i| {
                    if let Stamp::Kernel(ns) = i.stamp {
                        ns / 1_000_000
                    } else {
                        -1
                    }
                })
                .collect()
        };
        (
            console.finish(None).into_iter().map(stamps).collect(),
            count,
        )
    }

    #[test]
    fn kernel_lines_are_read_whatever_stands_around_the_stamp() {
        let want = Some((Some(12_345_678_000), "NVRM: x"));
        for line in [
            "[   12.345678] NVRM: x",
            "<6>[   12.345678] NVRM: x",
            "  [   12.345678][    T1] NVRM: x",
            "[   12.345678] [  C12] NVRM: x \r",
        ] {
            assert_eq!(kernel_line(line), want, "{line}");
        }
        for line in [
            "",
            "[",
            "[]",
            "[1]",
            "[a.b]",
            "[  1.2] x",
            "[ 1.2345678] x",
            "x [   12.345678] y",
            "[   -2.345678] y",
        ] {
            assert_eq!(kernel_line(line), None, "{line}");
        }
        assert_eq!(
            kernel_line("[99999999999999999999.000000] NVRM: x"),
            Some((None, "NVRM: x"))
        );
    }

    #[test]
    fn escape_sequences_are_taken_out() {
        assert_eq!(
            without_escapes("\x1b[32;1m[    1.000000]\x1b[0m NVRM\x1b]0;title\x07: x\x1bM\r\n"),
            "[    1.000000] NVRM: x"
        );
        assert_eq!(without_escapes("\x1b"), "");
        assert_eq!(without_escapes("\x1b[31"), "");
    }

    #[test]
    fn each_banner_begins_a_boot() {
        let (boots, count) = boots(&[
            "[    0.000000] Linux version 6.1",
            "[    9.000000] NVRM: x",
            "[    0.000000] Linux version 6.1",
            "[    1.000000] NVRM: y",
        ]);
        assert_eq!(boots, [[0, 9000], [0, 1000]]);
        assert_eq!(count.backwards, 0);
    }

    #[test]
    fn a_line_cut_off_by_a_boots_end_does_not_go_on_in_the_next() {
        let head = r#"{"msg":"ttRPC server started","level":"INFO","ts":"2026-11-23T06:00:00.000000000Z","name":"kata-agent","#;
        let rest = r#""pid":"1","subsystem":"rpc","source":"agent"}"#;
        let first = "[    0.000000] Linux version 6.1";
        let (one, _) = boots(&[first, head, "[    1.000000] NVRM: x", rest]);
        assert_eq!(
            one,
            [[0, 1000, -1]],
            "the control: within a boot the line is whole again"
        );
        let (two, _) = boots(&[first, head, first, rest]);
        assert_eq!(two, [[0], [0]]);
    }

    #[test]
    fn without_a_banner_several_early_lines_begin_a_boot() {
        let (two, _) = boots(&[
            "[   50.000000] NVRM: a",
            "[    1.000000] NVRM: b",
            "[    1.100000] NVRM: c",
            "[    1.200000] NVRM: d",
            "[   60.000000] NVRM: e",
        ]);
        assert_eq!(two, [vec![50_000], vec![1000, 1100, 1200, 60_000]]);
        let (one, count) = boots(&[
            "[   50.000000] NVRM: a",
            "[    1.000000] NVRM: b",
            "[   51.000000] NVRM: c",
            "[   50.900000] NVRM: d",
        ]);
        assert_eq!(one, [[50_000, 1000, 51_000, 50_900]]);
        assert_eq!(count.backwards, 2);
    }

    #[test]
    fn lines_of_two_sources_are_one_boot() {
        // The kernel's and the driver's, each in order.
        let first = [
            "[    0.000000] Linux version 6.1",
            "[   20.000000] NVRM: a",
            "[   60.000000] NVRM: b",
        ];
        let second = [
            "[   30.000000] NVRM: c",
            "[   31.000000] NVRM: d",
            "[   32.000000] NVRM: e",
            "[   70.000000] NVRM: f",
        ];
        let (one, count) = boots(&[first.as_slice(), second.as_slice()].concat());
        assert_eq!(one, [[0, 20_000, 60_000, 30_000, 31_000, 32_000, 70_000]]);
        assert_eq!(count.backwards, 1);
    }

    #[test]
    fn every_line_is_counted_as_one_thing() {
        let (_, count) = boots(&[
            "[    0.000000] Linux version 6.1",
            "",
            "\u{0}\u{1}\u{fffd}",
            "[    0.100000] random: crng init done",
            "[99999999999.000000] NVRM: x",
            "hello",
        ]);
        assert_eq!((count.lines, count.recognised), (6, 1));
        let want = [
            (Skip::Empty, 1),
            (Skip::KernelDetail, 1),
            (Skip::OtherProgram, 2),
            (Skip::AbsurdStamp, 1),
        ];
        assert_eq!(count.skipped, want.into());
    }
}
