//! Repair of torn console lines.
//!
//! kata-agent copies its log to the console in pieces of at most 8 KiB, and the kernel writes at
//! any time: a longer line of the agent, as most OCI specs are, has lines of the kernel and of
//! kata-gpu-init in its middle. After the newline of such a foreign line comes the rest of the
//! agent's.

use serde::de::IgnoredAny;

/// Beginning of every line of the agent.
const START: &[u8] = b"{\"msg\":\"";
/// Limit of foreign lines between two pieces of one line, and of pieces.
const MAX_BETWEEN: usize = 32;
/// Limit of places in a line that are tried as the beginning of another one.
const MAX_PLACES: usize = 16;

/// Takes lines as they stand and returns whole ones.
#[derive(Clone, Debug, Default)]
pub struct Torn {
    /// Pieces of an unfinished line of the agent.
    begun: Vec<u8>,
    between: usize,
}

impl Torn {
    /// Takes the next line; passes whole ones on. `most`: longest line that is put together, in
    /// bytes.
    pub fn line(&mut self, line: &[u8], most: usize, mut each: impl FnMut(&[u8])) {
        let line = line.strip_suffix(b"\r").unwrap_or(line);
        if !self.begun.is_empty() {
            if self.goes_on(line, most, &mut each) {
                return;
            }
            self.between += 1;
            if self.between > MAX_BETWEEN {
                self.begun.clear();
            }
        }
        let start = memchr::memmem::find(line, START)
            .filter(|at| line.get(*at..).is_some_and(|text| !is_object(text)));
        let Some((before, text)) = start.and_then(|at| line.split_at_checked(at)) else {
            return each(line);
        };
        let (head, other) = text.split_at(tear(text).unwrap_or(text.len()));
        if !before.trim_ascii().is_empty() {
            each(before);
        }
        self.begun = head.to_vec();
        self.between = 0;
        if !other.is_empty() {
            each(other);
        }
    }

    /// Whether this line is the rest, or the next piece, of the unfinished one.
    fn goes_on(&mut self, line: &[u8], most: usize, each: &mut impl FnMut(&[u8])) -> bool {
        if line.starts_with(START)
            || stamp(line) == Some(0)
            || self.begun.len().saturating_add(line.len()) > most
        {
            return false;
        }
        if self.between >= MAX_BETWEEN {
            return false;
        }
        let piece = self.begun.len();
        self.begun.extend_from_slice(line);
        if is_object(&self.begun) {
            each(&self.begun);
            self.begun.clear();
            return true;
        }
        self.begun.truncate(piece);
        let Some((head, other)) = tear(line)
            .filter(|at| *at > 0)
            .and_then(|at| line.split_at_checked(at))
        else {
            return false;
        };
        self.begun.extend_from_slice(head);
        self.between += 1;
        each(other);
        true
    }
}

fn is_object(text: &[u8]) -> bool {
    let text = text.trim_ascii_end();
    text.ends_with(b"}") && serde_json::from_slice::<IgnoredAny>(text).is_ok()
}

/// Position of a foreign line in the middle of this one: a whole object, or the kernel's stamp.
fn tear(line: &[u8]) -> Option<usize> {
    let objects = memchr::memmem::rfind_iter(line, b"{\"").take(MAX_PLACES);
    let object = objects
        .filter(|at| *at > 0)
        .find(|at| line.get(*at..).is_some_and(is_object));
    object.or_else(|| stamp(line))
}

/// Position of a kernel stamp: `[    9.020341] `.
fn stamp(line: &[u8]) -> Option<usize> {
    memchr::memchr_iter(b'[', line)
        .take(MAX_PLACES * MAX_PLACES)
        .find(|at| {
            let text = line.get(at + 1..).unwrap_or_default().trim_ascii_start();
            let digits = |text: &[u8]| text.iter().take_while(|b| b.is_ascii_digit()).count();
            let seconds = digits(text);
            let Some(fraction) = text.get(seconds..).and_then(|rest| rest.strip_prefix(b"."))
            else {
                return false;
            };
            seconds > 0
                && digits(fraction) == 6
                && fraction
                    .get(6..)
                    .is_some_and(|rest| rest.starts_with(b"] "))
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn whole(text: &str) -> Vec<String> {
        let mut torn = Torn::default();
        let mut out = Vec::new();
        for line in text.split('\n') {
            torn.line(line.as_bytes(), 1 << 16, |line| {
                out.push(String::from_utf8_lossy(line).into_owned())
            });
        }
        out
    }

    #[test]
    fn a_torn_line_is_joined_and_the_lines_inside_it_are_kept() {
        let agent = r#"{"msg":"spec: [\"a\", {\"b\"}]","level":"INFO"}"#;
        let init = r#"{"boottime_ns":"1","msg":"agent.look"}"#;
        let kernel = "[    9.020341] NVRM: again.";
        for at in START.len()..agent.len() {
            let (head, rest) = agent.split_at(at);
            for other in [init, kernel] {
                assert_eq!(
                    whole(&format!("{head}{other}\r\n{rest}\r\nlast")),
                    [other, agent, "last"],
                    "torn at {at}"
                );
            }
            let between = format!("{head}{kernel}\n{init}\n{rest}\nlast");
            assert_eq!(
                whole(&between),
                [kernel, init, agent, "last"],
                "torn at {at}"
            );
        }
        let (head, rest) = agent.split_at(20);
        let (middle, end) = rest.split_at(10);
        assert_eq!(
            whole(&format!("{head}{init}\n{middle}{kernel}\n{end}")),
            [init, kernel, agent],
            "torn twice"
        );
    }

    #[test]
    fn whole_lines_and_foreign_ones_stay_unchanged() {
        let lines = [
            "",
            "{",
            "}{",
            "hardware: ready",
            r#"[ 1.000000] x {"msg":"a"}"#,
            r#"{"msg":"a [    9.020341] b"}"#,
        ];
        assert_eq!(whole(&lines.join("\n")), lines);
    }

    #[test]
    fn a_line_without_an_end_delays_nothing_and_has_a_limit() {
        let mut torn = Torn::default();
        let mut seen = 0;
        torn.line(b"{\"msg\":\"begun", 64, |_| seen += 1);
        for _ in 0..MAX_BETWEEN + 2 {
            torn.line(b"{\"x\":1}", 64, |_| seen += 1);
        }
        assert_eq!((seen, torn.begun.len()), (MAX_BETWEEN + 2, 0));
        // Pieces of a byte are bounded, too.
        torn.line(b"{\"msg\":\"begun", 1 << 16, |_| seen += 1);
        for _ in 0..MAX_BETWEEN + 2 {
            torn.line(b"x{\"x\":1}", 1 << 16, |_| seen += 1);
        }
        assert_eq!(torn.begun.len(), 0);
    }
}
