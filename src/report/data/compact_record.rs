//! A record as readers keep it: bounded, compact, without a tree of foreign values.
//!
//! Invariants: a kept record costs [`std::mem::size_of`] and less than two bytes for each byte of
//! its line, whatever the line is; names are shared; a clone of a field, an error or an order
//! copies no text. [`kata_gpu_wire::decode::decode`] judges the line before.

use kata_gpu_wire::pci_address::PciAddress;
use kata_gpu_wire::record;
use kata_gpu_wire::record::{Kind, Level};
use serde::ser::{Serialize, SerializeMap, Serializer};
use serde_json::{Map, Value};
use std::collections::{BTreeMap, HashSet};
use std::ops::Deref;
use std::sync::Arc;

/// Limit of a record's fields. The init sends at most a dozen.
pub const MAX_FIELDS: usize = 64;
/// Limit of a record's orders (`after`): more than the GPUs of any machine.
pub const MAX_AFTER: usize = 256;
/// Limit of names that are shared; the format has some fifty.
const MAX_NAMES: usize = 4096;

/// A record of a boot.
#[derive(Clone, Debug, PartialEq)]
pub struct Record {
    pub seq: u64,
    pub boottime_ns: u64,
    pub span: Option<u64>,
    pub parent: Option<u64>,
    pub name: Text,
    pub error: Option<Text>,
    after: Option<Box<[u64]>>,
    pub fields: Fields,
    pub gpu: Option<PciAddress>,
    pub kind: Kind,
    pub level: Level,
    /// Whether fields or orders beyond the limits were left out.
    pub cut: bool,
}

impl Record {
    /// The record in its compact form.
    pub fn new(from: record::Record, names: &mut Names) -> Self {
        let after = from.after.get(..MAX_AFTER).unwrap_or(&from.after);
        Self {
            seq: from.seq,
            boottime_ns: from.boottime_ns,
            span: from.span,
            parent: from.parent,
            name: names.share(&from.name),
            error: from.error.map(|error| Text(error.into())),
            after: (!after.is_empty()).then(|| Box::from(after)),
            fields: Fields::new(&from.fields),
            gpu: from.gpu,
            kind: from.kind,
            level: from.level,
            cut: from.fields.len() > MAX_FIELDS || from.after.len() > MAX_AFTER,
        }
    }

    /// Ids of the spans whose end this one had to wait for.
    pub fn after(&self) -> &[u64] {
        self.after.as_deref().unwrap_or_default()
    }

    /// Text of a kernel line; empty in other records.
    pub fn kmsg_text(&self) -> &str {
        self.fields.text("text").unwrap_or("")
    }

    /// Bytes of memory outside the structure itself.
    pub fn text_bytes(&self) -> usize {
        self.error.as_ref().map_or(0, |e| e.len()) + self.fields.bytes() + size_of_val(self.after())
    }

    /// The record in wire format, for writing it again.
    pub fn to_wire(&self) -> record::Record {
        record::Record {
            seq: self.seq,
            boottime_ns: self.boottime_ns,
            level: self.level,
            gpu: self.gpu,
            span: self.span,
            parent: self.parent,
            after: self.after().to_vec(),
            error: self.error.as_deref().map(str::to_string),
            fields: self
                .fields
                .iter()
                .map(|(key, field)| (key.to_string(), field.to_value()))
                .collect(),
            ..record::Record::new(self.kind, &self.name)
        }
    }
}

impl From<record::Record> for Record {
    fn from(from: record::Record) -> Self {
        Self::new(from, &mut Names::default())
    }
}

/// A text whose clones are the same memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Text(Arc<str>);

impl Text {
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl Deref for Text {
    type Target = str;

    fn deref(&self) -> &str {
        &self.0
    }
}

impl PartialEq<&str> for Text {
    fn eq(&self, other: &&str) -> bool {
        self.as_str() == *other
    }
}

impl PartialEq<str> for Text {
    fn eq(&self, other: &str) -> bool {
        self.as_str() == other
    }
}

impl Serialize for Text {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self)
    }
}

/// Known names, each in memory once.
#[derive(Debug, Default)]
pub struct Names(HashSet<Arc<str>>);

impl Names {
    fn share(&mut self, name: &str) -> Text {
        if let Some(known) = self.0.get(name) {
            return Text(known.clone());
        }
        let name: Arc<str> = Arc::from(name);
        if self.0.len() < MAX_NAMES {
            self.0.insert(name.clone());
        }
        Text(name)
    }
}

/// Value of a field.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Field<'a> {
    Text(&'a str),
    /// Everything else, as JSON without white space.
    Json(&'a str),
}

impl<'a> Field<'a> {
    pub fn as_str(self) -> Option<&'a str> {
        match self {
            Self::Text(text) => Some(text),
            Self::Json(_) => None,
        }
    }

    pub fn as_u64(self) -> Option<u64> {
        self.json()?.parse().ok()
    }

    pub fn as_i64(self) -> Option<i64> {
        self.json()?.parse().ok()
    }

    pub fn json(self) -> Option<&'a str> {
        match self {
            Self::Text(_) => None,
            Self::Json(json) => Some(json),
        }
    }

    /// The value for people: a text without quotes, everything else as JSON.
    pub fn shown(self) -> &'a str {
        match self {
            Self::Text(text) | Self::Json(text) => text,
        }
    }

    pub fn to_value(self) -> Value {
        match self {
            Self::Text(text) => Value::from(text),
            // Written by serde_json: it is JSON.
            Self::Json(json) => serde_json::from_str(json).unwrap_or_default(),
        }
    }
}

/// Keys with their values, in order of the keys.
///
/// A block: for each field the length of the key and of the value, two bytes each, the key, and
/// the value, whose first byte is its kind. A line has at most [`record::MAX_LINE`] bytes, so that
/// two bytes hold every length.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Fields(Option<Arc<[u8]>>);

const TEXT: u8 = b't';
const JSON: u8 = b'j';

impl Fields {
    /// Keeps the first [`MAX_FIELDS`] fields. Fields longer than a line permits are left out.
    pub fn new(map: &Map<String, Value>) -> Self {
        if map.is_empty() {
            return Self::default();
        }
        let mut block = Vec::new();
        let mut sorted: Vec<(&String, &Value)> = map.iter().collect();
        sorted.sort_unstable_by_key(|(key, _)| *key);
        for (key, value) in sorted.into_iter().take(MAX_FIELDS) {
            let json;
            let (kind, text) = match value {
                Value::String(text) => (TEXT, text.as_str()),
                Value::Null
                | Value::Bool(_)
                | Value::Number(_)
                | Value::Array(_)
                | Value::Object(_) => {
                    json = value.to_string();
                    (JSON, json.as_str())
                }
            };
            let (Ok(key_length), Ok(length)) =
                (u16::try_from(key.len()), u16::try_from(text.len() + 1))
            else {
                continue;
            };
            block.extend_from_slice(&key_length.to_le_bytes());
            block.extend_from_slice(&length.to_le_bytes());
            block.extend_from_slice(key.as_bytes());
            block.push(kind);
            block.extend_from_slice(text.as_bytes());
        }
        Self(Some(Arc::from(block)))
    }

    pub fn get(&self, key: &str) -> Option<Field<'_>> {
        self.iter().find(|(k, _)| *k == key).map(|(_, field)| field)
    }

    /// The value of this key, if it is a text.
    pub fn text(&self, key: &str) -> Option<&str> {
        self.get(key)?.as_str()
    }

    /// The value of this key, if it is a number from 0 on.
    pub fn number(&self, key: &str) -> Option<u64> {
        self.get(key)?.as_u64()
    }

    /// The value of this key, if it is an integer.
    pub fn signed(&self, key: &str) -> Option<i64> {
        self.get(key)?.as_i64()
    }

    pub fn iter(&self) -> Iter<'_> {
        Iter(self.0.as_deref().unwrap_or_default())
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_none()
    }

    fn bytes(&self) -> usize {
        self.0.as_ref().map_or(0, |block| block.len())
    }
}

impl std::fmt::Debug for Fields {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_map().entries(self).finish()
    }
}

impl<'a> IntoIterator for &'a Fields {
    type Item = (&'a str, Field<'a>);
    type IntoIter = Iter<'a>;

    fn into_iter(self) -> Iter<'a> {
        self.iter()
    }
}

/// Fields of one block.
#[derive(Clone, Debug)]
pub struct Iter<'a>(&'a [u8]);

impl<'a> Iterator for Iter<'a> {
    type Item = (&'a str, Field<'a>);

    fn next(&mut self) -> Option<Self::Item> {
        let (key_length, rest) = self.0.split_first_chunk::<2>()?;
        let (length, rest) = rest.split_first_chunk::<2>()?;
        let (key, rest) = rest.split_at_checked(u16::from_le_bytes(*key_length).into())?;
        let (value, rest) = rest.split_at_checked(u16::from_le_bytes(*length).into())?;
        self.0 = rest;
        let (kind, value) = value.split_first()?;
        // `Fields::new` made both from texts: they are UTF-8.
        let (key, value) = (
            std::str::from_utf8(key).ok()?,
            std::str::from_utf8(value).ok()?,
        );
        Some((
            key,
            if *kind == TEXT {
                Field::Text(value)
            } else {
                Field::Json(value)
            },
        ))
    }
}

/// Fields of a span: those of its beginning and those of its end, which win.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SpanFields {
    pub begin: Fields,
    pub end: Fields,
}

impl SpanFields {
    pub fn get(&self, key: &str) -> Option<Field<'_>> {
        self.end.get(key).or_else(|| self.begin.get(key))
    }

    pub fn is_empty(&self) -> bool {
        self.begin.is_empty() && self.end.is_empty()
    }

    /// Each key once, in order of the keys.
    pub fn iter(&self) -> impl Iterator<Item = (&str, Field<'_>)> {
        let all: BTreeMap<&str, Field> = self.begin.iter().chain(self.end.iter()).collect();
        all.into_iter()
    }
}

impl Serialize for SpanFields {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        for (key, field) in self.iter() {
            map.serialize_entry(key, &field.to_value())?;
        }
        map.end()
    }
}

/// Records in order of time; those of one instant in the order of the stream.
pub fn in_time(records: &[Record]) -> Vec<&Record> {
    let mut sorted: Vec<&Record> = records.iter().collect();
    sorted.sort_by_key(|r| (r.boottime_ns, r.seq));
    sorted
}

#[cfg(test)]
mod tests {
    use super::*;
    use kata_gpu_wire::decode::decode;
    use kata_gpu_wire::record::{Line, MAX_LINE};
    use serde_json::json;

    fn fields(value: Value) -> Fields {
        Fields::new(value.as_object().unwrap())
    }

    #[test]
    fn a_record_comes_back_as_it_was() {
        let line = r#"{"schema":1,"seq":7,"boottime_ns":9,"kind":"begin","name":"gpu.bind",
            "level":"warn","gpu":"0001:00:03.0","span":4,"parent":1,"after":[2,3],"error":"e",
            "fields":{"":null,"b":[1,{"c":[]}],"n":-5,"t":"\u0000\u00e9","f":1.5,"y":true}}"#;
        let Ok(Line::Record(wire)) = decode(line.as_bytes()) else {
            panic!("test record does not decode")
        };
        assert_eq!(Record::from(*wire.clone()).to_wire(), *wire);
    }

    #[test]
    fn values_are_read_as_what_they_are() {
        let fields =
            fields(json!({"a": 5, "b": -5, "c": "5", "d": [1, 2], "e": u64::MAX, "f": 5.0}));
        let of = |key: &str| fields.get(key).unwrap();
        assert_eq!(
            ["a", "b", "c", "d", "e", "f"].map(|key| of(key).as_u64()),
            [Some(5), None, None, None, Some(u64::MAX), None]
        );
        assert_eq!(
            ["a", "b", "c", "e"].map(|key| of(key).as_i64()),
            [Some(5), Some(-5), None, None]
        );
        assert_eq!(
            (of("c").as_str(), of("d").as_str(), of("d").shown()),
            (Some("5"), None, "[1,2]")
        );
        assert_eq!(fields.get("g"), None);
    }

    #[test]
    fn the_end_of_a_span_wins_over_its_beginning() {
        let both = SpanFields {
            begin: fields(json!({"a": 1, "b": 1, "d": 1})),
            end: fields(json!({"b": 2, "c": 2})),
        };
        assert_eq!(
            serde_json::to_string(&both).unwrap(),
            r#"{"a":1,"b":2,"c":2,"d":1}"#
        );
        assert_eq!(
            (
                both.get("a").unwrap().as_u64(),
                both.get("b").unwrap().as_u64()
            ),
            (Some(1), Some(2))
        );
        assert!(SpanFields::default().is_empty() && !both.is_empty());
    }

    #[test]
    fn no_line_costs_more_than_its_length_and_the_record() {
        let line = |fields: &str| {
            format!(r#"{{"schema":1,"seq":1,"boottime_ns":1,"kind":"event","name":"x",{fields}}}"#)
        };
        let many = |text: &str, n: usize| vec![text; n].join(",");
        let keys = (0..1900)
            .map(|k| format!("\"{k:x}\":0"))
            .collect::<Vec<_>>()
            .join(",");
        for fields in [
            format!(r#""fields":{{"a":[{}]}}"#, many("0", 8000)),
            format!(r#""fields":{{"a":[{}]}}"#, many("[]", 5000)),
            format!(r#""fields":{{"a":[{}]}}"#, many("{\"\":0}", 2300)),
            format!(r#""fields":{{{keys}}}"#),
            format!(r#""after":[{}]"#, many("0", 8000)),
            r#""fields":{"":0}"#.to_string(),
            format!(r#""error":"{}""#, "\u{7f}".repeat(16_000)),
        ] {
            let line = line(&fields);
            assert!(line.len() <= MAX_LINE);
            let Ok(Line::Record(record)) = decode(line.as_bytes()) else {
                panic!("{line} does not decode")
            };
            let kept = Record::from(*record);
            assert!(
                kept.text_bytes() <= line.len() && kept.after().len() <= MAX_AFTER,
                "{} of {}",
                kept.text_bytes(),
                line.len()
            );
        }
        assert!(size_of::<Record>() <= 160, "{}", size_of::<Record>());
    }

    #[test]
    fn a_name_is_in_memory_once() {
        let mut names = Names::default();
        let (a, b) = (names.share("x"), names.share("x"));
        assert!(Arc::ptr_eq(&a.0, &b.0));
        (0..2 * MAX_NAMES).for_each(|n| assert_eq!(*names.share(&n.to_string()), *n.to_string()));
        assert_eq!(names.0.len(), MAX_NAMES);
    }
}
