//! Lines of a guest's console or kernel log, as a serial port, a hypervisor's log file, the shim,
//! `dmesg` or `journalctl -k` gives them.
//!
//! Kernel lines carry a stamp ([`line_prefix`]); lines of the agent and of kata-gpu-init are JSON
//! with stamps of their own. Lines without any stamp count only in a log that has no other (`dmesg
//! -t`): on a console, any program can have written them. A message of several lines is one fact.
//!
//! [`line_prefix`]: crate::data::line_prefix

use super::agent_lines;
use super::facts::{Fact, Item, Log, MAX_FACTS, Stamp};
use super::kernel_lines;
use super::kernel_lines::Meaning;
use crate::data::agent_log::torn::Torn;
use crate::data::agent_log::{AgentLog, MAX_CONSOLE_LINE};
use crate::data::line_prefix::{Clock, DAY_NS, Line, Program, strip};
use crate::data::text::start;
use kata_gpu_wire::driver_log::{goes_on, is_drivers, joined};

/// A kernel line this much earlier than one before it begins another boot, if it is no later than
/// this: `quiet` keeps the banner off the console. A log of two sources falls back to later times,
/// and is one boot.
const FELL_BACK_NS: i64 = 5_000_000_000;
/// Longest line of the kernel's log that is kept, in bytes: one of its records has less.
const MAX_LINE: usize = 8192;
/// Most lines of one message.
const MAX_MESSAGE: usize = 32;
/// Most lines without a stamp that are kept.
const MAX_PLAIN: usize = 10_000;

/// Takes the lines of one console.
#[derive(Debug, Default)]
pub struct Console {
    boots: Vec<Vec<Item>>,
    kept: usize,
    /// Lines that went on with a message.
    joined: usize,
    /// The latest stamp of a kernel line of this boot.
    latest_ns: i64,
    /// Stamp of the last kernel line.
    last: Option<Stamp>,
    /// Days that have passed on a wall clock without dates.
    days: i64,
    torn: Torn,
    /// The agent's lines of this boot.
    agent: AgentLog,
    /// The message that the next line may go on with: the last fact of this boot's kernel.
    message: Option<Message>,
    /// Lines that would mean something, if they had a stamp.
    plain: Vec<(u64, String)>,
}

/// A message of the kernel's log, as logged.
#[derive(Debug)]
struct Message {
    lines: Vec<String>,
    stamp: Stamp,
    /// Place of its fact in the boot.
    at: usize,
}

impl Message {
    fn is_panics_place(&self) -> bool {
        matches!(self.lines.as_slice(), [one] if kernel_lines::is_panics_place(one))
    }
}

impl Console {
    /// Takes a line; true if it states something. `read_ns`: time at which the host read it.
    pub fn line(&mut self, number: u64, line: &Line, read_ns: Option<i64>) -> bool {
        let read_ns = read_ns.or(line.read_ns);
        let before = (self.boots.len(), self.taken());
        if line.is_indented {
            self.goes_on(line.text, true);
            return self.taken() > before.1;
        }
        let mut torn = std::mem::take(&mut self.torn);
        torn.line(line.stamped.as_bytes(), MAX_CONSOLE_LINE, |whole| {
            // The line is cut between characters, and so still text.
            let text = String::from_utf8_lossy(whole);
            let whole = match text == line.stamped {
                true => *line,
                false => strip(&text),
            };
            self.whole_line(number, &whole, read_ns);
        });
        // A line that was cut off by the end of a boot has no rest in the next boot.
        if self.boots.len() == before.0 {
            self.torn = torn;
        }
        self.taken() > before.1
    }

    fn taken(&self) -> usize {
        self.kept + self.joined + self.plain.len()
    }

    fn whole_line(&mut self, number: u64, line: &Line, read_ns: Option<i64>) {
        let mut facts = Vec::new();
        // A process may have written JSON to the kernel's log, or to the console between stamp and
        // newline.
        agent_lines::parse(line.text, &mut self.agent, |stamp, fact| {
            facts.push((stamp, fact))
        });
        if !facts.is_empty() {
            for (stamp, fact) in facts {
                self.keep(number, stamp, read_ns, fact);
            }
            return;
        }
        match line.clock {
            Some(clock) => {
                let stamp = self.stamp(clock);
                self.kernel(number, stamp, line.text, read_ns);
            }
            None => self.unstamped(number, line, read_ns),
        }
    }

    /// Takes a line without a stamp: of a tool, whose time is the last stamp's, or kept for a log
    /// without any stamp.
    fn unstamped(&mut self, number: u64, line: &Line, read_ns: Option<i64>) {
        let is_message = || self.message.as_ref().is_some_and(Message::is_panics_place);
        if line.clock.is_none() && is_message() && self.goes_on(line.text, true) {
            return;
        }
        if is_tools(line.text) {
            if let Some(stamp) = self.last {
                self.kernel(number, stamp, line.text, read_ns);
            }
            return;
        }
        let is_kernels = line.program.is_none_or(|by| by == Program::Kernel);
        if is_kernels && is_plain(line.text) && self.plain.len() < MAX_PLAIN {
            self.plain.push((number, line.text.to_string()));
        }
    }

    /// The stamp of a clock, with the days that a wall clock without dates does not show.
    fn stamp(&mut self, clock: Clock) -> Stamp {
        let last = match self.last {
            Some(Stamp::Wall(ns)) => Some(ns),
            _ => None,
        };
        let stamp = match clock {
            Clock::Kernel(ns) => Stamp::Kernel(ns),
            Clock::Since(ns) => Stamp::Wall(last.unwrap_or(0).saturating_add(ns)),
            Clock::Wall(ns) if ns < DAY_NS => {
                let at = |days: i64| ns.saturating_add(days.saturating_mul(DAY_NS));
                let is_next = last.is_some_and(|last| at(self.days) < last - DAY_NS / 2);
                self.days += i64::from(is_next);
                Stamp::Wall(at(self.days))
            }
            Clock::Wall(ns) => Stamp::Wall(ns),
        };
        self.last = Some(stamp);
        stamp
    }

    /// Takes a line of the kernel's log.
    pub fn kernel(&mut self, number: u64, stamp: Stamp, text: &str, read_ns: Option<i64>) {
        self.last = Some(stamp);
        let text = start(text, MAX_LINE);
        if self.message.as_ref().is_some_and(|m| m.stamp == stamp) && self.goes_on(text, false) {
            return;
        }
        self.message = None;
        let whole = joined(text);
        let Some(meaning) = kernel_lines::meaning(&whole) else {
            return;
        };
        let ns = match stamp {
            Stamp::Kernel(ns) => ns,
            _ => self.latest_ns,
        };
        let fell_back = ns < FELL_BACK_NS && ns + FELL_BACK_NS < self.latest_ns;
        if fell_back || matches!(meaning, Meaning::Banner { .. }) {
            self.begin_boot();
            self.last = Some(stamp);
        }
        self.latest_ns = self.latest_ns.max(ns);
        let fact = Fact::Kernel {
            text: whole,
            meaning,
        };
        if self.keep(number, stamp, read_ns, fact) {
            let boot = self.boots.last().map_or(0, Vec::len);
            self.message = Some(Message {
                lines: vec![text.to_string()],
                stamp,
                at: boot.saturating_sub(1),
            });
        }
    }

    /// Adds a line to the last message, if it goes on with it. `is_marked`: it is indented, which
    /// shows that it does.
    fn goes_on(&mut self, text: &str, is_marked: bool) -> bool {
        let (Some(message), Some(boot)) = (&mut self.message, self.boots.last_mut()) else {
            return false;
        };
        let lines: Vec<&str> = message.lines.iter().map(String::as_str).collect();
        let exact = match message.stamp {
            Stamp::Wall(ns) => ns % 1_000_000_000 != 0,
            _ => true,
        };
        let is_next = is_marked || goes_on(&lines, text, exact) || message.is_panics_place();
        if lines.len() >= MAX_MESSAGE || !is_next {
            return false;
        }
        message.lines.push(start(text, MAX_LINE).to_string());
        let whole = joined(&message.lines.join("\n"));
        if let Some(item) = boot.get_mut(message.at)
            && let Fact::Kernel { text, meaning } = &mut item.fact
        {
            *meaning = kernel_lines::meaning(&whole).unwrap_or(Meaning::Other);
            *text = whole;
            self.joined += 1;
        }
        true
    }

    fn keep(&mut self, number: u64, stamp: Stamp, read_ns: Option<i64>, fact: Fact) -> bool {
        if self.kept >= MAX_FACTS {
            return false;
        }
        self.kept += 1;
        if self.boots.is_empty() {
            self.boots.push(vec![]);
        }
        if let Some(boot) = self.boots.last_mut() {
            boot.push(Item {
                stamp,
                read_ns,
                file: 0,
                line: number,
                fact,
            });
        }
        true
    }

    fn begin_boot(&mut self) {
        (self.latest_ns, self.agent, self.message) = (0, AgentLog::default(), None);
        // Lines before the first banner are the firmware's or another boot's end: a boot of their
        // own only if kernel lines are among them.
        let is_kernel = |item: &Item| item.stamp.is_kernels();
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
    pub fn finish(mut self, sandbox: Option<&str>) -> Vec<Log> {
        if self.boots.iter().all(Vec::is_empty) {
            for (number, text) in std::mem::take(&mut self.plain) {
                self.kernel(number, Stamp::Wall(0), &text, None);
            }
        }
        let boots = self.boots.into_iter().filter(|items| !items.is_empty());
        let log = |items| Log {
            sandbox: sandbox.map(str::to_string),
            items,
        };
        boots.map(log).collect()
    }
}

/// Whether a line without a stamp begins as the kernel's or driver's do.
fn is_plain(text: &str) -> bool {
    match kernel_lines::meaning(text) {
        None => false,
        Some(Meaning::Other) => is_drivers(text),
        Some(_) => true,
    }
}

/// Whether a line without a stamp is NVRC's panic, or of a tool that NVRC runs: nvidia-ctk logs to
/// the console. The tool's own time is a wall clock of seconds; its place in the log is closer.
fn is_tools(text: &str) -> bool {
    let has_meaning = || {
        matches!(
            kernel_lines::meaning(text),
            Some(Meaning::Ended | Meaning::CtkDone)
        )
    };
    let begins = ["time=\"", kernel_lines::OLD_PANIC];
    begins.iter().any(|words| text.starts_with(words)) && has_meaning()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn boots(lines: &[&str]) -> Vec<Vec<i64>> {
        let mut console = Console::default();
        for (number, line) in (1..).zip(lines) {
            console.line(number, &strip(line), None);
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
