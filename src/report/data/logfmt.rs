//! Lines of `key=value key="quoted value"` as Go's logrus writes them. Pure; any text is accepted,
//! and text of another form gives no pairs.
//!
//! A quoted value is a Go string literal (`strconv.Quote`): [`unquote`] undoes the escapes, and
//! keeps everything else.

/// Limit of pairs in one line.
const MAX_PAIRS: usize = 64;

/// The pairs of a line, in order. Words without `=` are ignored.
pub fn pairs(line: &str) -> Vec<(&str, String)> {
    let mut out = Vec::new();
    let mut rest = line.trim_start();
    while !rest.is_empty() && out.len() < MAX_PAIRS {
        let Some(end) = rest.find(['=', ' ']) else {
            break;
        };
        let (key, after) = rest.split_at(end);
        let Some(value) = after.strip_prefix('=') else {
            rest = after.trim_start();
            continue;
        };
        let (text, after) = match value.strip_prefix('"') {
            Some(text) => quoted(text).unwrap_or_else(|| (unquote(text), "")),
            None => {
                let (bare, after) = value.split_at(value.find(' ').unwrap_or(value.len()));
                (bare.to_string(), after)
            }
        };
        out.push((key, text));
        rest = after.trim_start();
    }
    out
}

/// The value behind an opening quote, and the text after the closing one; None if that is missing.
pub fn quoted(text: &str) -> Option<(String, &str)> {
    let mut escaped = false;
    let is_end = |c: char| {
        let plain = !escaped;
        escaped = plain && c == '\\';
        plain && c == '"'
    };
    let (value, rest) = text.split_at(text.find(is_end)?);
    Some((unquote(value), rest.get(1..)?))
}

/// Undoes the escapes of a Go string literal without its quotes.
fn unquote(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find('\\') {
        let (before, after) = rest.split_at(at);
        out.push_str(before);
        let body = after.get(1..).unwrap_or("");
        let Some(c) = body.chars().next() else {
            out.push('\\');
            rest = "";
            break;
        };
        let tail = body.get(c.len_utf8()..).unwrap_or("");
        let plain = match c {
            'n' => Some('\n'),
            't' => Some('\t'),
            'r' => Some('\r'),
            'a' => Some('\u{7}'),
            'b' => Some('\u{8}'),
            'f' => Some('\u{c}'),
            'v' => Some('\u{b}'),
            '\\' | '"' | '\'' => Some(c),
            _ => None,
        };
        let digits = match c {
            'x' => 2,
            'u' => 4,
            'U' => 8,
            _ => 0,
        };
        let coded = tail
            .get(..digits)
            .filter(|_| digits > 0)
            .and_then(|d| u32::from_str_radix(d, 16).ok())
            .and_then(char::from_u32);
        rest = match (plain, coded) {
            (Some(plain), _) => {
                out.push(plain);
                tail
            }
            (None, Some(coded)) => {
                out.push(coded);
                tail.get(digits..).unwrap_or("")
            }
            (None, None) => {
                out.push('\\');
                body
            }
        };
    }
    out.push_str(rest);
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_come_out_in_order_and_unquoted() {
        let line = "time=\"2026-01-02T03:04:05Z\" level=debug msg=\"reading guest console\" empty= \
            vmconsole=\"{\\\"msg\\\":\\\"a \\\\\\\"b\\\\\\\"\\\"}\\x1b\\u00e9\"";
        let want = [
            ("time", "2026-01-02T03:04:05Z"),
            ("level", "debug"),
            ("msg", "reading guest console"),
            ("empty", ""),
            ("vmconsole", "{\"msg\":\"a \\\"b\\\"\"}\u{1b}\u{e9}"),
        ];
        let pairs = pairs(line);
        assert_eq!(
            pairs
                .iter()
                .map(|(k, v)| (*k, v.as_str()))
                .collect::<Vec<_>>(),
            want
        );
    }

    #[test]
    fn words_around_pairs_and_missing_quotes_are_harmless() {
        assert_eq!(
            pairs("Jan 02 host containerd[7]: a=1 word b=\"open"),
            [("a", "1".to_string()), ("b", "open".to_string())]
        );
        for junk in [
            "",
            "=",
            "==",
            "\"",
            "a",
            " = ",
            "\\",
            "a=\"\\",
            "\u{e9}=\u{e9}\"",
            "=\"\\x",
        ] {
            assert!(pairs(junk).len() <= 2, "{junk:?}");
        }
        assert_eq!(pairs(&"a=b ".repeat(1000)).len(), MAX_PAIRS);
    }

    #[test]
    fn what_is_no_escape_stays_as_it_is() {
        for (quoted, want) in [
            (r"\q", r"\q"),
            (r"\x1", r"\x1"),
            (r"\ud800", r"\ud800"),
            ("\\", "\\"),
            (r"\xe9\u", "\u{e9}\\u"),
            (r"\x\u{e9}", r"\x\u{e9}"),
        ] {
            assert_eq!(unquote(quoted), want);
        }
    }
}
