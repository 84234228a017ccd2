//! Format `ftrace`: the function_graph tracer's output of `vfio_pin_pages_remote`
//! (`set_graph_function` or a filter on it).
//!
//! Columns depend on the options: absolute time (`funcgraph-abstime`), CPU, task and pid
//! (`funcgraph-proc`), duration, then the call. A leaf is one line `f();`, a call with others
//! inside is `f() {` and a `}` of the same depth, which carries the duration. Arguments
//! (`funcgraph-args`, since 6.15) give address and size, the return value (`funcgraph-retval`,
//! since 6.5) the pinned pages; without them only durations are known. Times are the trace clock's,
//! which starts with the host: calls are placed by their effects in the guest.

use super::bpftrace::{Trace, number};
use super::item::{Count, Skip};
use super::log_files::{Input, Text};
use super::pins::{Call, MAX_CALLS};
use anyhow::Result;
use std::collections::HashMap;

const FUNCTION: &str = "vfio_pin_pages_remote";
/// Calls inside each other that are followed for one CPU: the kernel's own limit is 50.
const MAX_DEPTH: usize = 64;

/// Reads a trace.
pub fn read(input: Input) -> Result<(Trace, Count)> {
    let mut reader = Reader::default();
    let cut = input.lines(|number, text| {
        reader.count.lines += 1;
        match text {
            Text::Line(line) => match reader.line(number, line) {
                Ok(()) => reader.count.recognised += 1,
                Err(why) => reader.count.skip(why),
            },
            Text::TooLong => reader.count.skip(Skip::TooLong),
        }
    })?;
    reader.count.cut = cut;
    let open: usize = reader.open.values().map(Vec::len).sum();
    if open > 0 {
        reader.trace.notes.push(format!("{open} call(s) have no end in it"));
    }
    if !reader.trace.calls.is_empty() && reader.trace.calls.iter().all(|c| c.asked.is_none() && c.pinned.is_none()) {
        let advice = "options funcgraph-args (kernel 6.15) and funcgraph-retval (6.5), or bpftrace";
        reader.trace.notes.push(format!("it has no sizes, only durations: for sizes use the {advice}"));
    }
    Ok((reader.trace, reader.count))
}

#[derive(Default)]
struct Reader {
    trace: Trace,
    count: Count,
    /// Calls that have not ended, by CPU and task: (indentation, index of the call).
    open: HashMap<String, Vec<(usize, usize)>>,
    last: Option<i64>,
}

/// A line's columns.
#[derive(Debug, Default, PartialEq)]
struct Columns<'a> {
    at_ns: Option<i64>,
    cpu_task: String,
    /// Thread id, called pid in the kernel's trace.
    thread: Option<u32>,
    took_ns: Option<u64>,
    /// Spaces before the call: its depth.
    indent: usize,
    call: &'a str,
}

impl Reader {
    fn line(&mut self, number: u64, line: &str) -> Result<(), Skip> {
        if line.trim().is_empty() || line.starts_with('#') || line.trim_start().starts_with("----") {
            return Err(Skip::Empty);
        }
        let columns = columns(line).ok_or(Skip::NotOfTheFormat)?;
        if let Some(at) = columns.at_ns {
            if self.last.is_some_and(|last| at < last) {
                self.count.backwards += 1;
            }
            self.last = Some(at);
        }
        if columns.call.starts_with('}') {
            return self.end(&columns);
        }
        let rest = columns.call.strip_prefix(FUNCTION).filter(|rest| rest.starts_with(['(', ' '])).ok_or(Skip::OtherProgram)?;
        if self.trace.calls.len() >= MAX_CALLS {
            return Err(Skip::LimitReached);
        }
        let (arguments, tail) = rest.split_once('(').and_then(|(_, a)| a.split_once(')')).ok_or(Skip::NotOfTheFormat)?;
        let nested = tail.trim_start().starts_with('{');
        self.trace.calls.push(Call {
            at_ns: columns.at_ns,
            pid: None,
            thread: columns.thread,
            vaddr: argument(arguments, "vaddr"),
            asked: argument(arguments, "npage"),
            pinned: if nested { None } else { returned(tail) },
            took_ns: columns.took_ns,
            line: number,
        });
        if nested {
            let open = self.open.entry(columns.cpu_task).or_default();
            if open.len() < MAX_DEPTH {
                open.push((columns.indent, self.trace.calls.len() - 1));
            }
        }
        Ok(())
    }

    fn end(&mut self, columns: &Columns) -> Result<(), Skip> {
        let open = self.open.get_mut(&columns.cpu_task).ok_or(Skip::OtherProgram)?;
        // Drop deeper calls, whose ends were lost.
        while open.last().is_some_and(|(indent, _)| *indent > columns.indent) {
            open.pop();
        }
        let at = open.pop_if(|(indent, _)| *indent == columns.indent).map(|(_, at)| at).ok_or(Skip::OtherProgram)?;
        let call = self.trace.calls.get_mut(at).ok_or(Skip::OtherProgram)?;
        call.took_ns = columns.took_ns;
        call.pinned = returned(columns.call);
        Ok(())
    }
}

fn columns(line: &str) -> Option<Columns<'_>> {
    // The call is behind the last bar, unless its comment has one; the first column with a call in
    // it counts.
    let mut out = Columns::default();
    let mut rest = line;
    while let Some((column, after)) = rest.split_once('|') {
        let text = column.trim();
        if let Some(at) = seconds(text) {
            out.at_ns = Some(at);
        } else {
            let (cpu, text) = match text.split_once(')') {
                Some((cpu, text)) if !cpu.is_empty() && cpu.bytes().all(|b| b.is_ascii_digit()) => (Some(cpu), text.trim()),
                _ => (None, text),
            };
            if let Some(cpu) = cpu {
                out.cpu_task = cpu.to_string();
            }
            match took(text) {
                Some(took) => out.took_ns = Some(took),
                None if text.is_empty() => {}
                // comm-pid; a comm may have dashes itself.
                None => {
                    let thread = text.rsplit('-').next().and_then(|pid| pid.trim().parse().ok())?;
                    out.thread = Some(thread);
                    out.cpu_task.push_str(text);
                }
            }
        }
        let call = after.trim_start();
        rest = after;
        if !call.contains('|') || call.starts_with(FUNCTION) || call.starts_with('}') {
            out.indent = after.len() - call.len();
            out.call = call.trim_end();
            return Some(out);
        }
    }
    None
}

/// `1234.567890`, the clock since the host's start.
fn seconds(text: &str) -> Option<i64> {
    let (seconds, micros) = text.split_once('.')?;
    if micros.len() != 6 || !micros.bytes().all(|b| b.is_ascii_digit()) || !seconds.bytes().all(|b| b.is_ascii_digit()) {
        return None;
    }
    seconds.parse::<i64>().ok()?.checked_mul(1_000_000_000)?.checked_add(micros.parse::<i64>().ok()? * 1000)
}

/// `@ 3266123 us`, `0.123 us`: a mark for long ones (`+ ! # * @ $`), then microseconds.
fn took(text: &str) -> Option<u64> {
    let number = text.strip_suffix("us")?.trim().trim_start_matches(['+', '!', '#', '*', '@', '$']).trim();
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    let digits = |text: &str| text.bytes().all(|b| b.is_ascii_digit());
    if whole.is_empty() || !digits(whole) || !digits(fraction) || fraction.len() > 3 {
        return None;
    }
    let nanos: u64 = format!("{fraction:0<3}").parse().ok()?;
    whole.parse::<u64>().ok()?.checked_mul(1000)?.checked_add(nanos)
}

fn argument(arguments: &str, name: &str) -> Option<u64> {
    arguments.split(',').find_map(|a| a.trim().strip_prefix(name)?.trim_start().strip_prefix('=').and_then(|v| number(v.trim())))
}

/// The return value in the comment: `/* ret=0x200 */`, `/* = 0x200 */`, decimal where the kernel
/// takes it for a small number.
fn returned(text: &str) -> Option<u64> {
    let comment = text.split_once("/*")?.1.split_once("*/")?.0;
    let value = comment.rsplit('=').next().filter(|_| comment.contains('='))?;
    number(value.trim())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read_text(text: &str) -> (Trace, Count) {
        read(Input::new("x", Box::new(std::io::Cursor::new(text.as_bytes().to_vec()))).unwrap()).unwrap()
    }

    #[test]
    fn leaves_and_calls_with_others_inside_are_read() {
        let text = concat!(
            "# tracer: function_graph\n",
            "#\n",
            "# CPU  DURATION                  FUNCTION CALLS\n",
            " 3) @ 3266123 us |  vfio_pin_pages_remote [vfio_iommu_type1]();\n",
            " 0)               |  vfio_pin_pages_remote [vfio_iommu_type1]() {\n",
            " 0)   0.250 us    |    follow_fault_pfn();\n",
            " 0) ! 101.500 us  |  }\n",
            " 3)   1.1 us      |  other();\n",
        );
        let (trace, count) = read_text(text);
        let took: Vec<_> = trace.calls.iter().map(|c| c.took_ns).collect();
        assert_eq!(took, [Some(3_266_123_000), Some(101_500)]);
        assert_eq!(count.recognised, 3);
        assert_eq!(count.skipped, [(Skip::Empty, 3), (Skip::OtherProgram, 2)].into());
        assert!(trace.notes[0].contains("no sizes"));
    }

    #[test]
    fn all_options_at_once_give_all_there_is() {
        let text = concat!(
            "  815.250000 |   3)  qemu-system-x86-3454  | @ 3266123 us  |  vfio_pin_pages_remote(dma=0xffff8881, vaddr=0x7400, npage=512, limit=2048); /* ret=0x200 */\n",
            "  819.000001 |   3)  qemu-system-x86-3454  |               |  vfio_pin_pages_remote [vfio_iommu_type1](dma=0x1, vaddr=0x9400, npage=0x3) {\n",
            "  819.000009 |   3)  qemu-system-x86-3454  |   8.000 us    |  } /* vfio_pin_pages_remote [vfio_iommu_type1] ret=2 */\n",
        );
        let (trace, _) = read_text(text);
        let first = Call {
            at_ns: Some(815_250_000_000),
            thread: Some(3454),
            vaddr: Some(0x7400),
            asked: Some(512),
            pinned: Some(512),
            took_ns: Some(3_266_123_000),
            line: 1,
            pid: None,
        };
        let second = Call {
            at_ns: Some(819_000_001_000),
            vaddr: Some(0x9400),
            asked: Some(3),
            pinned: Some(2),
            took_ns: Some(8000),
            line: 2,
            ..first
        };
        assert_eq!(trace.calls, [first, second]);
    }

    #[test]
    fn odd_lines_are_counted_and_do_no_harm() {
        for line in [
            "|",
            "||||",
            "0)|}",
            " 0) 99999999999999999999 us | }",
            " 0) | vfio_pin_pages_remote",
            " 0) | vfio_pin_pages_remote(",
            "9999999999999999.000000 | 0) | x",
        ] {
            let (trace, count) = read_text(line);
            assert_eq!((trace.calls.len(), count.recognised), (0, 0), "{line}");
        }
    }
}
