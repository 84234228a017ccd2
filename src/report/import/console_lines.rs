//! Lines of a guest's console, as a serial port, a hypervisor's log file or the shim gives it.
//!
//! Kernel lines carry a stamp (`[   12.345678] text`, with `printk.time=1`, which is every
//! distribution's and Kata's setting); lines of the agent and of kata-gpu-init are JSON with stamps
//! of their own. Escape sequences that terminals understand are taken out.

use super::agent_lines;
use super::facts::{Fact, Item, Log, MAX_FACTS, MAX_STAMP_NS, Stamp};
use super::kernel_lines;
use super::kernel_lines::Meaning;
use crate::data::agent_log::torn::Torn;
use crate::data::agent_log::{AgentLog, MAX_CONSOLE_LINE};

/// A kernel line this much earlier than one before it begins another boot, if it is no later than
/// this: `quiet` keeps the banner off the console. A log of two sources falls back to later times,
/// and is one boot.
const FELL_BACK_NS: i64 = 5_000_000_000;

/// Takes the lines of one console.
#[derive(Debug, Default)]
pub struct Console {
    boots: Vec<Vec<Item>>,
    kept: usize,
    /// The latest stamp of a kernel line of this boot.
    latest_ns: i64,
    torn: Torn,
    /// The agent's lines of this boot.
    agent: AgentLog,
}

impl Console {
    /// Takes a line; true if it states something. `read_ns`: time at which the host read it.
    pub fn line(&mut self, number: u64, line: &str, read_ns: Option<i64>) -> bool {
        let mut torn = std::mem::take(&mut self.torn);
        let (boots, kept) = (self.boots.len(), self.kept);
        let line = without_escapes(line);
        torn.line(line.as_bytes(), MAX_CONSOLE_LINE, |whole| {
            // The line is cut between characters, and so still text.
            self.whole_line(number, &String::from_utf8_lossy(whole), read_ns);
        });
        // A line that was cut off by the end of a boot has no rest in the next boot.
        if self.boots.len() == boots {
            self.torn = torn;
        }
        self.kept > kept
    }

    fn whole_line(&mut self, number: u64, line: &str, read_ns: Option<i64>) {
        let kernel = kernel_line(line);
        let text = kernel.map_or(line, |(_, text)| text);
        let mut facts = Vec::new();
        // A process may have written JSON to the kernel's log, or to the console between stamp and
        // newline.
        agent_lines::parse(text, &mut self.agent, |stamp, fact| {
            facts.push((stamp, fact))
        });
        if facts.is_empty()
            && let Some((ns, text)) = kernel
            && let Some(meaning) = kernel_lines::meaning(text)
        {
            let fell_back = ns < FELL_BACK_NS && ns + FELL_BACK_NS < self.latest_ns;
            if fell_back || matches!(meaning, Meaning::Banner { .. }) {
                self.begin_boot();
            }
            self.latest_ns = self.latest_ns.max(ns);
            let text = text.to_string();
            facts.push((Stamp::Kernel(ns), Fact::Kernel { text, meaning }));
        }
        for (stamp, fact) in facts {
            if self.kept < MAX_FACTS {
                self.kept += 1;
                if self.boots.is_empty() {
                    self.boots.push(vec![]);
                }
                let item = Item {
                    stamp,
                    read_ns,
                    file: 0,
                    line: number,
                    fact,
                };
                if let Some(boot) = self.boots.last_mut() {
                    boot.push(item);
                }
            }
        }
    }

    fn begin_boot(&mut self) {
        (self.latest_ns, self.agent) = (0, AgentLog::default());
        // Lines before the first banner are the firmware's or another boot's end: a boot of their
        // own only if kernel lines are among them.
        let is_kernel = |item: &Item| matches!(item.stamp, Stamp::Kernel(_));
        if let Some(last) = self
            .boots
            .last_mut()
            .filter(|boot| boot.iter().any(is_kernel))
        {
            // A guest can print any number of banners: a boot of one line takes no room for more.
            last.shrink_to_fit();
            self.boots.push(vec![]);
        }
    }

    /// All boots of the console, none of them empty.
    pub fn finish(self, sandbox: Option<&str>) -> Vec<Log> {
        let boots = self.boots.into_iter().filter(|items| !items.is_empty());
        let log = |items| Log {
            sandbox: sandbox.map(str::to_string),
            items,
        };
        boots.map(log).collect()
    }
}

/// Stamp in ns and text of a kernel line with a plausible stamp. Takes `<6>` before and `[    T1]`
/// (the caller) behind the stamp, which some consoles have.
pub fn kernel_line(line: &str) -> Option<(i64, &str)> {
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    let line = line.trim_start();
    let line = match line.strip_prefix('<').and_then(|rest| rest.split_once('>')) {
        Some((level, rest)) if is_number(level) => rest,
        _ => line,
    };
    let (stamp, text) = line.strip_prefix('[')?.split_once(']')?;
    let (seconds, micros) = stamp.trim_start().split_once('.')?;
    if !is_number(seconds) || !is_number(micros) || micros.len() != 6 {
        return None;
    }
    let seconds: i64 = seconds.parse().ok()?;
    let ns = seconds
        .checked_mul(1_000_000_000)?
        .checked_add(micros.parse::<i64>().ok()? * 1000)?;
    let text = text.trim_start();
    let text = match text.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        Some((caller, rest))
            if caller
                .trim_start()
                .strip_prefix(['T', 'C'])
                .is_some_and(is_number) =>
        {
            rest.trim_start()
        }
        _ => text,
    };
    (ns <= MAX_STAMP_NS).then_some((ns, text.trim_end()))
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

    fn boots(lines: &[&str]) -> Vec<Vec<i64>> {
        let mut console = Console::default();
        for (number, line) in (1..).zip(lines) {
            console.line(number, line, None);
        }
        let at = |item: &Item| match item.stamp {
            Stamp::Kernel(ns) => ns / 1_000_000,
            _ => -1,
        };
        let logs = console.finish(None);
        logs.iter()
            .map(|log| log.items.iter().map(at).collect())
            .collect()
    }

    #[test]
    fn kernel_lines_are_read_whatever_stands_around_the_stamp() {
        let want = Some((12_345_678_000, "NVRM: x"));
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
            "[99999999999.000000] NVRM: later than any boot",
            "[99999999999999999999.000000] NVRM: x",
        ] {
            assert_eq!(kernel_line(line), None, "{line}");
        }
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
    fn a_boot_begins_at_a_banner_or_where_stamps_fall_back() {
        let boots = boots(&[
            "[    0.000000] Linux version 6.1",
            "[    9.000000] NVRM: x",
            "[    0.000000] Linux version 6.1",
            "[   50.000000] NVRM: a",
            "[    1.000000] NVRM: b",
            "[    1.100000] NVRM: c",
            "[   60.000000] NVRM: d",
        ]);
        assert_eq!(
            boots,
            [vec![0, 9000], vec![0, 50_000], vec![1000, 1100, 60_000]]
        );
    }

    #[test]
    fn a_line_cut_off_by_a_boots_end_does_not_go_on_in_the_next() {
        let head = "{\"msg\":\"ttRPC server started\",\"level\":\"INFO\",\
            \"ts\":\"2026-11-23T06:00:00.000000000Z\",\"name\":\"kata-agent\",";
        let rest = r#""pid":"1","subsystem":"rpc","source":"agent"}"#;
        let first = "[    0.000000] Linux version 6.1";
        assert_eq!(
            boots(&[first, head, "[    1.000000] NVRM: x", rest]),
            [[0, 1000, -1]],
            "the control: within a boot the line is whole again"
        );
        assert_eq!(boots(&[first, head, first, rest]), [[0], [0]]);
    }

    #[test]
    fn lines_of_two_sources_are_one_boot() {
        // The kernel's and the driver's, each in order.
        let one = boots(&[
            "[    0.000000] Linux version 6.1",
            "[   20.000000] NVRM: a",
            "[   60.000000] NVRM: b",
            "[   30.000000] NVRM: c",
            "[   31.000000] NVRM: d",
            "[   70.000000] NVRM: f",
        ]);
        assert_eq!(one, [[0, 20_000, 60_000, 30_000, 31_000, 70_000]]);
    }
}
