//! Texts for people: sanitised text of a guest, times and clocks as digits, colour or no colour.
//!
//! Every text that comes from a guest passes [`printable`] before it reaches a terminal: the result
//! is printable ASCII only, so it can neither move the cursor, reorder the line (bidirectional
//! marks) nor be wider than its number of bytes.

use anyhow::{Context, Result};
use serde::Serialize;
use std::io::{self, IsTerminal, Write};
use std::sync::OnceLock;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Limit of a finding's value, in bytes.
const MAX_VALUE: usize = 160;

/// The text with everything but printable ASCII written as an escape (`\n`, `\x1b`, `\u{202e}`).
pub fn printable(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            ' '..='~' => out.push(c),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            c if (c as u32) < 0x80 => out.push_str(&format!("\\x{:02x}", c as u32)),
            c => out.push_str(&format!("\\u{{{:x}}}", c as u32)),
        }
    }
    out
}

/// Printable, and not longer than `MAX_VALUE`.
pub fn clipped(text: &str) -> String {
    printable_start(text, MAX_VALUE)
}

/// Lines that end at a space before `width`, the first behind `first`, others behind `further`. A
/// word that is too long stays whole.
pub fn wrap(first: &str, further: &str, text: &str, width: usize) -> Vec<String> {
    let mut words = text.split(' ');
    let mut lines = vec![format!("{first}{}", words.next().unwrap_or_default())];
    for word in words {
        match lines
            .last_mut()
            .filter(|line| line.len() + 1 + word.len() <= width)
        {
            Some(line) => line.extend([" ", word]),
            None => lines.push(format!("{further}{word}")),
        }
    }
    lines
}

/// The start of a text, at most `max` bytes.
pub fn start(text: &str, max: usize) -> &str {
    let mut end = text.len().min(max);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text.get(..end).unwrap_or_default()
}

/// JSON in ASCII: unprintable characters of a text are escaped.
pub fn ascii_json(value: &impl Serialize) -> Result<String> {
    let mut out = Vec::new();
    write_ascii_json(&mut out, value).context("write the report as JSON")?;
    String::from_utf8(out).context("write the report as JSON")
}

/// Writes [`ascii_json`] to a file or pipe, without a copy in memory.
pub fn write_ascii_json(out: &mut dyn Write, value: &impl Serialize) -> io::Result<()> {
    serde_json::to_writer_pretty(AsciiJson(&mut *out), value)?;
    out.write_all(b"\n")
}

/// Passes JSON on, with escapes for non-ASCII characters.
struct AsciiJson<'a>(&'a mut dyn Write);

impl Write for AsciiJson<'_> {
    /// serde_json hands over whole characters.
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let text = std::str::from_utf8(bytes)
            .map_err(|e| io::Error::new(io::ErrorKind::InvalidData, e))?;
        for part in text.split_inclusive(|c| !matches!(c, '\n' | ' '..='~')) {
            let foreign = part
                .chars()
                .next_back()
                .filter(|c| !matches!(c, '\n' | ' '..='~'));
            self.0.write_all(
                part.get(..part.len() - foreign.map_or(0, char::len_utf8))
                    .unwrap_or_default()
                    .as_bytes(),
            )?;
            // Non-ASCII is in strings only; JSON needs UTF-16.
            for unit in foreign
                .into_iter()
                .flat_map(|c| c.encode_utf16(&mut [0; 2]).to_vec())
            {
                write!(self.0, "\\u{unit:04x}")?;
            }
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

/// The start of some bytes, at most `max` of them, as [`printable`]; bytes that are not UTF-8
/// become `\u{fffd}`.
pub fn printable_start(bytes: &(impl AsRef<[u8]> + ?Sized), max: usize) -> String {
    let bytes = bytes.as_ref();
    let start = &bytes[..bytes.len().min(max)];
    let more = if bytes.len() > max { "..." } else { "" };
    format!("{}{more}", printable(&String::from_utf8_lossy(start)))
}

/// Nanoseconds as seconds with three digits, rounded: `1.204`.
pub fn seconds(ns: u64) -> String {
    let ms = ns / 1_000_000 + u64::from(ns % 1_000_000 >= 500_000);
    format!("{}.{:03}", ms / 1000, ms % 1000)
}

/// The signed distance from `from` to `to` as seconds: `+0.003`, `-0.120`.
pub fn since(from: u64, to: u64) -> String {
    // Subtract rounded times, so that the column adds up to the times in the next one.
    let ms = |ns: u64| i128::from(ns / 1_000_000 + u64::from(ns % 1_000_000 >= 500_000));
    let distance = ms(to) - ms(from);
    let sign = if distance < 0 { '-' } else { '+' };
    format!(
        "{sign}{}.{:03}",
        distance.abs() / 1000,
        distance.abs() % 1000
    )
}

/// An error bound: `+-0.2 ms`.
pub fn error_bound(ns: u64) -> String {
    // Round up: a bound printed too small would be wrong.
    let tenths = ns.div_ceil(100_000);
    format!("+-{}.{} ms", tenths / 10, tenths % 10)
}

/// Wall-clock time in UTC with milliseconds: `2026-01-02T03:04:05.678Z`; the bare number if no
/// calendar has it.
pub fn wall_clock(realtime_ns: i64) -> String {
    /// 9999-12-31T23:59:59Z, the last second that RFC 3339 can write.
    const LAST_SECOND: u64 = 253_402_300_799;
    match u64::try_from(realtime_ns) {
        Ok(ns) if ns / 1_000_000_000 <= LAST_SECOND => {
            humantime::format_rfc3339_millis(UNIX_EPOCH + Duration::from_nanos(ns)).to_string()
        }
        _ => format!("{realtime_ns} ns"),
    }
}

/// CLOCK_REALTIME of this machine in ns.
pub fn realtime_ns() -> i64 {
    let since_epoch = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    i64::try_from(since_epoch.as_nanos()).unwrap_or(i64::MAX)
}

/// Format of text on standard output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Screen {
    /// Columns of the terminal; None in a pipe or a file, whose lines are not cut.
    pub width: Option<usize>,
    pub colour: bool,
}

impl Screen {
    pub const PLAIN: Screen = Screen {
        width: None,
        colour: false,
    };

    /// Reads it from standard output, [`choose_colour`] and the environment (`NO_COLOR`,
    /// `TERM=dumb`).
    pub fn of_stdout() -> Screen {
        let is_terminal = std::io::stdout().is_terminal();
        let is_set = |name| std::env::var_os(name).is_some_and(|value| !value.is_empty());
        let dumb = std::env::var_os("TERM").is_none_or(|term| term == "dumb");
        Screen {
            width: is_terminal.then(|| {
                terminal_size::terminal_size().map_or(80, |(width, _)| usize::from(width.0))
            }),
            colour: match COLOUR.get().copied().unwrap_or_default() {
                Colour::Auto => is_terminal && !is_set("NO_COLOR") && !dumb,
                Colour::Always => true,
                Colour::Never => false,
            },
        }
    }

    /// A note below a page: data that it lacks.
    pub fn note(&self, text: &str) -> String {
        self.paint(Ink::Dim, &format!("note: {text}"))
    }

    /// The text in a colour, or as it is.
    pub fn paint(&self, ink: Ink, text: &str) -> String {
        let code = match ink {
            Ink::Plain => return text.to_string(),
            Ink::Dim => "2",
            Ink::Bold => "1",
            Ink::Good => "32",
            Ink::Warning => "33",
            Ink::Error => "31",
        };
        if self.colour {
            format!("\x1b[{code}m{text}\x1b[0m")
        } else {
            text.to_string()
        }
    }
}

static COLOUR: OnceLock<Colour> = OnceLock::new();

/// Sets the colour of everything that this program prints; the first call counts.
pub fn choose_colour(colour: Colour) {
    COLOUR.get_or_init(|| colour);
}

/// When the output has colours.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Colour {
    /// On a terminal, unless the environment says otherwise.
    #[default]
    Auto,
    Always,
    Never,
}

/// Meaning of a piece of text; the terminal decides its look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ink {
    Plain,
    Dim,
    Bold,
    Good,
    Warning,
    Error,
}

/// Bytes in hexadecimal.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_is_ascii_with_the_same_content() {
        let value =
            serde_json::json!({"a\u{9b}": ["\u{1b}[2J", "\u{1f600}", "\u{7f}", "\u{202e}"]});
        let text = ascii_json(&value).unwrap();
        assert!(
            text.bytes()
                .all(|b| b == b'\n' || (b' '..=b'~').contains(&b)),
            "{text}"
        );
        assert_eq!(
            serde_json::from_str::<serde_json::Value>(&text).unwrap(),
            value
        );
    }

    #[test]
    fn nothing_that_drives_a_terminal_gets_through() {
        assert_eq!(
            printable("a\x1b[2Jb\r\n\t\u{7f}\u{9b}31m\u{202e}c\u{0}"),
            "a\\x1b[2Jb\\r\\n\\t\\x7f\\u{9b}31m\\u{202e}c\\x00"
        );
        let all: String = (0..0x3000u32).filter_map(char::from_u32).collect();
        assert!(printable(&all).bytes().all(|b| (b' '..=b'~').contains(&b)));
        assert_eq!(printable_start(b"\xff\x1bab", 3), "\\u{fffd}\\x1ba...");
    }

    #[test]
    fn text_is_wrapped_at_spaces_and_words_stay_whole() {
        assert_eq!(
            wrap("a: ", "   ", "b cc 123456789 d", 6),
            ["a: b", "   cc", "   123456789", "   d"]
        );
        assert_eq!(wrap("a: ", "   ", "b cc", 7), ["a: b cc"]);
        assert_eq!(wrap("a: ", "   ", "", 1), ["a: "]);
    }

    #[test]
    fn times_are_rounded_to_milliseconds_and_add_up() {
        assert_eq!(seconds(1_204_499_999), "1.204");
        assert_eq!(seconds(999_500_000), "1.000");
        assert_eq!(seconds(u64::MAX), "18446744073.710");
        assert_eq!(since(1_204_000_000, 1_207_000_000), "+0.003");
        assert_eq!(since(2_000_000_000, 1_880_000_000), "-0.120");
        assert_eq!(since(0, u64::MAX), "+18446744073.710");
    }

    #[test]
    fn an_error_bound_is_never_printed_smaller_than_it_is() {
        assert_eq!(error_bound(0), "+-0.0 ms");
        assert_eq!(error_bound(1), "+-0.1 ms");
        assert_eq!(error_bound(157_000), "+-0.2 ms");
        assert_eq!(error_bound(12_340_000), "+-12.4 ms");
    }

    #[test]
    fn wall_clock_survives_any_number() {
        assert_eq!(
            wall_clock(1_767_323_045_678_901_234),
            "2026-01-02T03:04:05.678Z"
        );
        assert_eq!(wall_clock(-1), "-1 ns");
        assert!(wall_clock(i64::MAX).starts_with("2262-"));
    }
}
