//! Stamps and names that programs put before a line of a log: one function for every reader.
//!
//! Outermost first: `kubectl logs --timestamps` and the CRI's log files; `journalctl` in any of its
//! text formats, and syslog's files; the kernel's own stamp, or `dmesg`'s. A journal names the
//! program of each line behind its host, whatever the date before it looks like: dates are
//! localised. Pure; any text is accepted.

use super::agent_log::line::realtime_ns;
use std::borrow::Cow;

/// Latest plausible time on the guest's clock: about 115 days after kernel start. A boot is long
/// over by then.
pub const MAX_STAMP_NS: i64 = 10_000_000 * 1_000_000_000;
const SECOND_NS: i64 = 1_000_000_000;
/// A time of day is below this: its date is not known.
pub const DAY_NS: i64 = 86_400 * SECOND_NS;
/// Words that a date may have before its host: `Thu 2026-02-19 15:00:20 CET`.
const MAX_DATE_WORDS: usize = 6;

/// Time that stands before a line, in ns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Clock {
    /// printk's clock, or the journal's monotonic one, which has the same zero.
    Kernel(i64),
    /// A wall clock: since the epoch, or, where the date is not read, of the day.
    Wall(i64),
    /// Since the line before.
    Since(i64),
}

/// Program that wrote a line, by the journal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Program<'a> {
    Kernel,
    Named(&'a str),
}

/// A line without its prefixes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Line<'a> {
    pub clock: Option<Clock>,
    /// Time at which somebody else read the line: what stands before another prefix.
    pub read_ns: Option<i64>,
    pub program: Option<Program<'a>>,
    /// Whether the line has no stamp and is indented: it goes on with the line before.
    pub is_indented: bool,
    /// Text with the kernel's own stamp, if it has one: other writers tear lines there.
    pub stamped: &'a str,
    pub text: &'a str,
}

/// The line without its prefixes; without escape sequences already ([`without_escapes`]).
pub fn strip(line: &str) -> Line<'_> {
    let mut read_ns = None;
    let mut rest = line.trim_end();
    if let Some((ns, text)) = container_log(rest) {
        (read_ns, rest) = (Some(ns), text);
    }
    let journal = journal(rest);
    let program = journal.map(|(_, program, _)| program);
    let mut clock = journal.and_then(|(clock, ..)| clock);
    rest = journal.map_or(rest, |(.., text)| text);
    let stamped = rest;
    let own = if matches!(program, Some(Program::Named(_))) {
        None
    } else {
        let date = || dmesg_date(without_level(rest).unwrap_or(rest));
        kernel_stamp(rest).or_else(date)
    };
    if let Some((own, text)) = own {
        if let Some(Clock::Wall(ns)) = clock {
            read_ns = read_ns.or(Some(ns).filter(|ns| *ns >= DAY_NS));
        }
        (clock, rest) = (Some(own), text);
    }
    Line {
        clock,
        read_ns,
        program,
        is_indented: clock.is_none() && program.is_none() && is_indented(line),
        stamped,
        text: rest.trim(),
    }
}

/// A line of a guest's console, which somebody else has taken out of its log: it has no prefix but
/// the kernel's.
pub fn strip_console(line: &str) -> Line<'_> {
    let stamped = line.trim_end();
    let own = kernel_stamp(stamped);
    Line {
        clock: own.map(|(clock, _)| clock),
        read_ns: None,
        program: None,
        is_indented: own.is_none() && is_indented(line),
        stamped,
        text: own.map_or(stamped, |(_, text)| text).trim(),
    }
}

fn is_indented(line: &str) -> bool {
    line.starts_with("   ") || line.starts_with('\t')
}

fn is_number(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit())
}

/// `2026-02-19T15:00:22.1Z stdout F text`; `kubectl logs --timestamps` leaves stream and tag out.
fn container_log(line: &str) -> Option<(i64, &str)> {
    let (stamp, rest) = line.split_once(' ')?;
    if !stamp.starts_with(|c: char| c.is_ascii_digit()) || !stamp.contains('T') {
        return None;
    }
    let ns = realtime_ns(stamp)?;
    let streams = ["stdout F ", "stdout P ", "stderr F ", "stderr P "];
    let text = streams.iter().find_map(|tag| rest.strip_prefix(tag));
    // The journal has the host behind the same stamp.
    match text {
        Some(text) => Some((ns, text)),
        None if named(rest).is_none() => Some((ns, rest)),
        None => None,
    }
}

/// Time, program and text of a line of a journal, or of syslog's file.
fn journal(line: &str) -> Option<(Option<Clock>, Program<'_>, &str)> {
    let line = line.trim_start();
    if let Some((stamp, rest)) = line
        .strip_prefix('[')
        .and_then(|rest| rest.split_once("] "))
    {
        // short-monotonic and short-delta.
        let stamp = stamp.split('<').next()?;
        let (program, text) = named(rest)?;
        return Some((Some(Clock::Kernel(seconds(stamp.trim())?)), program, text));
    }
    // The host is the last word before the program, the clock a word before it.
    let mut rest = line;
    let mut clock = None;
    for _ in 0..MAX_DATE_WORDS {
        let (word, after) = rest.split_once(' ')?;
        clock = time_of(word).or(clock);
        rest = after.trim_start();
        if clock.is_some()
            && let Some((program, text)) = named(rest).or_else(|| program_of(rest))
        {
            return Some((clock.map(Clock::Wall), program, text));
        }
    }
    None
}

/// Time of a word of a date: RFC 3339 (also with an offset as `+0100`, and `date,` fractions),
/// `15:00:20.123`, or seconds since the epoch.
fn time_of(word: &str) -> Option<i64> {
    if let Some(ns) = realtime_ns(word) {
        return Some(ns);
    }
    if let Some((clock, offset)) = word
        .len()
        .checked_sub(5)
        .and_then(|at| word.split_at_checked(at))
        && clock.contains('T')
        && offset.starts_with(['+', '-'])
    {
        let (hours, minutes) = offset.split_at_checked(3)?;
        return realtime_ns(&format!("{clock}{hours}:{minutes}"));
    }
    if let Some((whole, _)) = word.split_once('.')
        && whole.len() == 10
    {
        return seconds(word);
    }
    time_of_day(word)
}

/// `15:00:20`, with or without a fraction.
fn time_of_day(word: &str) -> Option<i64> {
    let mut parts = word.split(':');
    let (hours, minutes, rest) = (parts.next()?, parts.next()?, parts.next()?);
    let of = |text: &str, most: i64| -> Option<i64> {
        let short = is_number(text) && text.len() <= 2;
        text.parse().ok().filter(|n| short && *n <= most)
    };
    let (whole, fraction) = rest.split_once(['.', ',']).unwrap_or((rest, "0"));
    if parts.next().is_some() || whole.len() != 2 {
        return None;
    }
    let s = of(hours, 23)? * 3600 + of(minutes, 59)? * 60 + of(whole, 60)?;
    Some(
        (s * SECOND_NS)
            .saturating_add(fraction_ns(fraction)?)
            .min(DAY_NS - 1),
    )
}

fn fraction_ns(digits: &str) -> Option<i64> {
    let short = is_number(digits) && digits.len() <= 9;
    let ns: i64 = digits.parse().ok().filter(|_| short)?;
    Some(ns * 10_i64.pow(9 - u32::try_from(digits.len()).ok()?))
}

/// `12.345678` in ns.
fn seconds(text: &str) -> Option<i64> {
    let (whole, fraction) = text.split_once('.')?;
    let whole: i64 = whole.parse().ok().filter(|_| is_number(whole))?;
    let ns = whole.checked_mul(SECOND_NS)?;
    ns.checked_add(fraction_ns(fraction)?)
}

/// `HOST PROGRAM[PID]: text` or `HOST kernel: text`.
fn named(text: &str) -> Option<(Program<'_>, &str)> {
    let (host, rest) = text.split_once(' ')?;
    if host.is_empty() || host.ends_with(':') || host.contains(['[', '{', '"', '=']) {
        return None;
    }
    program_of(rest.trim_start())
}

/// `PROGRAM[PID]: text` or `kernel: text`, behind a host or (`--no-hostname`) without.
fn program_of(text: &str) -> Option<(Program<'_>, &str)> {
    let (program, text) = text
        .split_once(": ")
        .or_else(|| Some((text.strip_suffix(':')?, "")))?;
    if program == "kernel" {
        return Some((Program::Kernel, text));
    }
    let (_, pid) = program.strip_suffix(']')?.rsplit_once('[')?;
    let is_name = |c: char| !c.is_whitespace() && !matches!(c, '"' | '{' | '=' | ':');
    let is_program = program.chars().all(is_name) && !program.starts_with('[');
    (is_number(pid) && is_program).then_some((Program::Named(program), text))
}

/// Stamp and text of a line of the kernel: `[   12.345678] text`, with `<6>` before it, and with
/// the caller (`[    T1]`) behind it, which some consoles have; `kern  :err   : [..]` of `dmesg
/// -x`; and `dmesg`'s distances from the line before.
fn kernel_stamp(line: &str) -> Option<(Clock, &str)> {
    let line = line.trim_start();
    let line = match line.strip_prefix('<').and_then(|rest| rest.split_once('>')) {
        Some((level, rest)) if is_number(level) => rest,
        _ => line,
    };
    let line = without_level(line).unwrap_or(line);
    let (stamp, text) = line.strip_prefix('[')?.split_once(']')?;
    let (stamp, text) = (stamp.trim(), without_caller(text.trim_start()));
    let clock = if let Some(since) = stamp.strip_prefix('+') {
        Clock::Since(micros(since)?)
    } else if let Some(since) = stamp.strip_prefix('<') {
        Clock::Since(micros(since.strip_suffix('>')?.trim())?)
    } else {
        Clock::Kernel(micros(stamp.split('<').next()?.trim())?)
    };
    Some((clock, text.trim_end()))
}

/// The line behind `kern  :err   : ` of `dmesg -x`.
fn without_level(line: &str) -> Option<&str> {
    let (decoded, _) = line.split_once(": [")?;
    is_decoded_level(decoded).then(|| line.get(decoded.len() + 2..))?
}

fn is_decoded_level(text: &str) -> bool {
    let (facility, level) = text.split_once(':').unwrap_or((text, ""));
    let is_word = |text: &str| text.trim().bytes().all(|b| b.is_ascii_lowercase());
    text.len() < 24 && is_word(facility) && is_word(level) && !level.is_empty()
}

/// Seconds with six digits behind the point, as printk writes them, within a boot.
fn micros(text: &str) -> Option<i64> {
    let six = text
        .split_once('.')
        .is_some_and(|(_, micros)| micros.len() == 6);
    seconds(text).filter(|ns| six && *ns <= MAX_STAMP_NS)
}

fn without_caller(text: &str) -> &str {
    let caller = text.strip_prefix('[').and_then(|rest| rest.split_once(']'));
    match caller {
        Some((caller, rest))
            if caller
                .trim_start()
                .strip_prefix(['T', 'C'])
                .is_some_and(is_number) =>
        {
            rest.trim_start()
        }
        _ => text,
    }
}

/// `[Mon Feb  9 15:47:05 2026] text` of `dmesg -T`; `[Feb 9 15:47] text` of `dmesg -e`, whose next
/// lines have distances; `2026-02-09T15:47:05,123456+01:00 text` of its format iso.
fn dmesg_date(line: &str) -> Option<(Clock, &str)> {
    let line = line.trim_start();
    if let Some((date, text)) = line.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        let mut words = date.split_ascii_whitespace().take(MAX_DATE_WORDS);
        let ns = words.find_map(|word| time_of_day(word).or_else(|| minute_of_day(word)))?;
        return Some((Clock::Wall(ns), without_caller(text.trim_start())));
    }
    let (stamp, text) = line.split_once(' ')?;
    let ns = realtime_ns(&stamp.replacen(',', ".", 1)).filter(|_| stamp.contains('T'))?;
    Some((Clock::Wall(ns), text))
}

fn minute_of_day(word: &str) -> Option<i64> {
    (word.len() == 5).then(|| time_of_day(&format!("{word}:00")))?
}

/// The line without escape sequences (ECMA-48: ESC, then `[`, parameters and a final byte; or ESC
/// and one byte) and without carriage returns at its ends. Other control characters stay: they are
/// shown as escapes.
pub fn without_escapes(line: &str) -> Cow<'_, str> {
    let line = line.trim_matches(['\r', '\n', '\0', '\u{feff}']);
    if !line.contains('\u{1b}') {
        return line.into();
    }
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
    out.trim_matches(['\r', '\n']).to_string().into()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(line: &str) -> (Option<Clock>, Option<Program<'_>>, &str) {
        let line = strip(line);
        (line.clock, line.program, line.text)
    }

    fn at(hours: i64, minutes: i64, seconds: i64) -> Option<Clock> {
        let s = hours * 3600 + minutes * 60 + seconds;
        Some(Clock::Wall(s * SECOND_NS))
    }

    const KERNEL: Option<Program> = Some(Program::Kernel);

    #[test]
    fn the_kernels_stamp_is_read_whatever_stands_around_it() {
        let want = (Some(Clock::Kernel(12_345_678_000)), None, "NVRM: x");
        for line in [
            "[   12.345678] NVRM: x",
            "<6>[   12.345678] NVRM: x",
            "  [   12.345678][    T1] NVRM: x",
            "[   12.345678] [  C12] NVRM: x \r",
            "[   12.345678 <    0.000123>] NVRM: x",
            "kern  :err   : [   12.345678] NVRM: x",
            "2026-02-19T15:00:22.1Z stdout F [   12.345678] NVRM: x",
            "2026-02-19T15:00:22.1Z [   12.345678] NVRM: x",
        ] {
            assert_eq!(read(line), want, "{line}");
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
            "kern: [x",
        ] {
            assert_eq!(read(line), (None, None, line), "{line}");
        }
    }

    #[test]
    fn a_journals_date_may_be_of_any_language() {
        for line in [
            "Feb 09 15:47:05 node kernel: NVRM: x",
            "8月 12 15:47:05 node kernel: NVRM: x",
            "févr. 19 15:47:05 node kernel: NVRM: x",
            "19. Feb 15:47:05 node kernel: NVRM: x",
            "Feb 09 15:47:05 kernel: NVRM: x",
            "Thu 2026-02-19 15:47:05 CET node kernel: NVRM: x",
            "[Mon Feb  9 15:47:05 2026] NVRM: x",
            "kern  :err   : [Mon Feb  9 15:47:05 2026] NVRM: x",
        ] {
            let (clock, _, text) = read(line);
            assert_eq!((clock, text), (at(15, 47, 5), "NVRM: x"), "{line}");
        }
        let utc = realtime_ns("2026-02-19T14:00:20Z").map(Clock::Wall);
        for line in [
            "2026-02-19T15:00:20+0100 node kernel: NVRM: x",
            "2026-02-19T15:00:20+01:00 node kernel: NVRM: x",
            "1771509620.000000 node kernel: NVRM: x",
            "2026-02-19T15:00:20,000000+01:00 NVRM: x",
        ] {
            let (clock, _, text) = read(line);
            assert_eq!((clock, text), (utc, "NVRM: x"), "{line}");
        }
        let precise = read("Feb 09 15:47:05.123456 node kernel: x").0;
        assert!(matches!(precise, Some(Clock::Wall(ns)) if ns % SECOND_NS == 123_456_000));
    }

    #[test]
    fn the_program_of_a_line_is_behind_its_host() {
        let named = |line| read(line).1;
        for line in [
            "Feb 19 15:00:20 node containerd[29935]: time=\"x\" level=info",
            "[   12.345678] node containerd[29935]: time=\"x\" level=info",
            "févr. 19 15:00:20 node containerd[29935]: time=\"x\" level=info",
        ] {
            assert_eq!(
                named(line),
                Some(Program::Named("containerd[29935]")),
                "{line}"
            );
            assert!(read(line).2.starts_with("time="), "{line}");
        }
        let monotonic = read("[   12.345678] node kernel: NVRM: x");
        assert_eq!(
            monotonic,
            (Some(Clock::Kernel(12_345_678_000)), KERNEL, "NVRM: x")
        );
        // syslog's file has the kernel's stamp, too.
        let both = strip("2026-02-19T15:00:20+01:00 node kernel: [   12.345678] NVRM: x");
        assert_eq!(both.clock, Some(Clock::Kernel(12_345_678_000)));
        assert!(both.read_ns.is_some() && both.text == "NVRM: x");
        // The kernel's own line names a process, and is no journal's.
        for line in [
            "[   12.345678] python3[77]: segfault at 0 in NVRM: Xid",
            "[   12.345678] NVRM: Xid (PCI:0000:02:00): 79, a[1]: x",
            "[   12.345678] a kernel:[7]: segfault at 0",
            "[   12.345678] time=\"2026-01-02T03:04:05Z\" level=info msg=\"a b[1]: c\"",
        ] {
            assert_eq!(named(line), None, "{line}");
        }
    }

    #[test]
    fn distances_and_indented_lines_belong_to_the_line_before() {
        let since = Some(Clock::Since(123_000));
        assert_eq!(read("[<    0.000123>] NVRM: x"), (since, None, "NVRM: x"));
        assert_eq!(read("[  +0.000123] NVRM: x"), (since, None, "NVRM: x"));
        assert_eq!(
            read("[Feb 9 15:47] NVRM: x"),
            (at(15, 47, 0), None, "NVRM: x")
        );
        assert!(strip("               NVRM: x").is_indented);
        assert!(!strip("[    1.000000]    NVRM: x").is_indented && !strip("x").is_indented);
    }

    #[test]
    fn escape_sequences_are_taken_out() {
        assert_eq!(
            without_escapes("\x1b[32;1m[    1.000000]\x1b[0m NVRM\x1b]0;title\x07: x\x1bM\r\n"),
            "[    1.000000] NVRM: x"
        );
        assert_eq!(without_escapes("\r[    1.000000] x\r"), "[    1.000000] x");
        assert_eq!(without_escapes("\x1b"), "");
        assert_eq!(without_escapes("\x1b[31"), "");
    }

    #[test]
    fn every_cut_of_a_line_is_read() {
        for line in [
            "févr. 19 15:00:20,5 nœud containerd[29935]: time=\"x\" [  1.000000] y",
            "<6>[   12.345678 <   0.1>][ T1] [é",
            "2026-02-19T15:00:22.1+0100 stdout F [Mon Feb  9 15:47:05 2026] x",
        ] {
            for (at, _) in line.char_indices() {
                let _any = (strip(&line[..at]), strip(&line[at..]));
            }
        }
    }
}
