//! Entries that are blocks of lines, a field a line: `journalctl -o export` and `-o verbose`. Each
//! becomes the object that `-o json` prints. Pure; any text is accepted.
//!
//! `export` writes `KEY=value`, ends an entry with an empty line, and gives a value with control
//! characters as `KEY`, then eight bytes with its length and the value. `verbose` writes a header
//! with the times, then each field indented; a value's further lines are indented more.

use serde_json::{Map, Value};

/// Longest entry in bytes, and the most fields of one.
const MAX_ENTRY: usize = 256 * 1024;
const MAX_FIELDS: usize = 256;
/// Bytes of a length in `export`.
const LENGTH: usize = 8;
const INDENT: &str = "    ";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    Export,
    Verbose,
}

/// Lines of a block so far.
#[derive(Debug, Default)]
pub struct Blocks {
    form: Option<Form>,
    fields: Map<String, Value>,
    /// Key of the last field, to which further lines belong.
    last: Option<String>,
    /// Whether the value of the last field is still to come, behind its length.
    is_behind_length: bool,
    bytes: usize,
}

impl Blocks {
    /// Takes a line, and returns whether it is part of a block; `each` gets the entry before it, if
    /// the line ends it.
    pub fn take(&mut self, line: &str, each: impl FnOnce(String)) -> bool {
        let begins = begins(line);
        if begins.is_some() || (self.form == Some(Form::Export) && self.is_end(line)) {
            self.finish(each);
        }
        if let Some((form, fields)) = begins {
            self.form = Some(form);
            self.fields.extend(fields);
            return true;
        }
        match self.form {
            None => false,
            Some(form) => self.part(form, line),
        }
    }

    /// Passes the last entry on.
    pub fn finish(&mut self, each: impl FnOnce(String)) {
        let entry = std::mem::take(self);
        if !entry.fields.is_empty() {
            each(Value::Object(entry.fields).to_string());
        }
    }

    fn is_end(&self, line: &str) -> bool {
        line.is_empty() && !self.is_behind_length
    }

    fn part(&mut self, form: Form, line: &str) -> bool {
        self.bytes = self.bytes.saturating_add(line.len());
        if self.bytes > MAX_ENTRY || self.fields.len() > MAX_FIELDS {
            return true;
        }
        let field = match form {
            Form::Export => Some(line),
            Form::Verbose => line.strip_prefix(INDENT),
        };
        let pair = field.and_then(|field| field.split_once('='));
        if let Some((key, value)) = pair.filter(|(key, _)| is_key(key)) {
            self.is_behind_length = false;
            self.last = Some(key.to_string());
            self.fields.insert(key.into(), value.into());
        } else if form == Form::Export && is_key(line) {
            self.is_behind_length = true;
            self.last = Some(line.to_string());
            self.fields.insert(line.into(), "".into());
        } else if form == Form::Verbose && field.is_none() {
            // Something else begins.
            return false;
        } else {
            self.goes_on(line);
        }
        true
    }

    fn goes_on(&mut self, line: &str) {
        let last = self.last.as_ref();
        let Some(Value::String(value)) = last.and_then(|key| self.fields.get_mut(key)) else {
            return;
        };
        if std::mem::take(&mut self.is_behind_length) {
            // The length is below 2^56, so that its last byte is 0.
            let head = line.chars().take(LENGTH);
            let zero = head.enumerate().filter(|(_, c)| *c == '\0').last();
            let skipped = zero.map_or(0, |(at, _)| at + 1);
            value.extend(line.chars().skip(skipped));
            self.is_behind_length = zero.is_none();
        } else {
            value.push('\n');
            value.push_str(line.trim_start_matches(' '));
        }
    }
}

/// Form of a block that begins with this line, and the fields that the line has.
fn begins(line: &str) -> Option<(Form, Map<String, Value>)> {
    if let Some(cursor) = line.strip_prefix("__CURSOR=") {
        let mut fields = Map::new();
        fields.insert("__CURSOR".into(), cursor.into());
        return Some((Form::Export, fields));
    }
    // `Thu 2026-02-19 15:00:20.123456 CET [s=..;i=..;b=..;m=..;t=64b2..;x=..]`
    let (date, cursor) = line.strip_suffix(']')?.split_once(" [s=")?;
    let starts = !date.is_empty() && !date.starts_with([' ', '[']) && !date.contains('=');
    let hex = |key: &str| {
        let mut parts = cursor.split(';');
        let digits = parts.find_map(|part| part.strip_prefix(key))?;
        u64::from_str_radix(digits, 16).ok()
    };
    let realtime = hex("t=").filter(|_| starts)?;
    let mut fields = Map::new();
    fields.insert("__REALTIME_TIMESTAMP".into(), realtime.to_string().into());
    Some((Form::Verbose, fields))
}

fn is_key(text: &str) -> bool {
    let is_part = |b: u8| b.is_ascii_uppercase() || b.is_ascii_digit() || b == b'_';
    (1..=64).contains(&text.len()) && text.bytes().all(is_part)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn entries(text: &str) -> Vec<Value> {
        let mut blocks = Blocks::default();
        let mut all = Vec::new();
        let mut keep = |entry: String| all.push(serde_json::from_str(&entry).unwrap());
        for line in text.split('\n') {
            blocks.take(line, &mut keep);
        }
        blocks.finish(&mut keep);
        all
    }

    #[test]
    fn both_forms_give_the_fields_of_json() {
        let export = "__CURSOR=s=1;i=2\n__REALTIME_TIMESTAMP=1771509620123456\nMESSAGE=a=b c\n\
            _UID=0\n\n__CURSOR=s=1;i=3\nMESSAGE\n\u{5}\0\0\0\0\0\0\0x\n\ny\n_UID=0\n\n";
        let wanted = [
            json!({"__CURSOR": "s=1;i=2", "__REALTIME_TIMESTAMP": "1771509620123456",
                "MESSAGE": "a=b c", "_UID": "0"}),
            json!({"__CURSOR": "s=1;i=3", "MESSAGE": "x"}),
        ];
        // An empty line inside a value ends the entry: what follows it is in no entry.
        assert_eq!(entries(export), wanted);
        let verbose = "Thu 2026-02-19 15:00:20.123456 CET [s=a;i=1;b=2;m=3;t=64b2d9a4d3240;x=4]\n    \
            _TRANSPORT=kernel\n    MESSAGE=first\n            second=2\n\
            Do 2026-02-19 15:00:21.0 CET [s=a;i=1;b=2;m=3;t=64b2d9a4d3241;x=4]\n    MESSAGE=b";
        let wanted = [
            json!({"__REALTIME_TIMESTAMP": "1771509094625856", "_TRANSPORT": "kernel",
                "MESSAGE": "first\nsecond=2"}),
            json!({"__REALTIME_TIMESTAMP": "1771509094625857", "MESSAGE": "b"}),
        ];
        assert_eq!(entries(verbose), wanted);
    }

    #[test]
    fn other_lines_are_no_blocks() {
        for line in [
            "",
            "MESSAGE=x",
            "[    1.000000] NVRM: x [s=1;t=2]",
            "time=\"x\" [s=1;t=2]",
            "    Thu [s=a;t=2]",
            "Thu [s=a;t=x]",
        ] {
            assert!(!Blocks::default().take(line, |_| ()), "{line:?}");
        }
        let mut blocks = Blocks::default();
        blocks.take("Thu 2026 [s=a;t=2]", |_| ());
        assert!(!blocks.take("-- Boot 1 --", |_| ()));
        for at in 0..20 {
            blocks.take(&"    A=x"[..at.min(7)], |_| ());
        }
    }
}
