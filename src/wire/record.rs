//! The wire format, schema 1: one JSON object per line, at most [`MAX_LINE`] bytes including the
//! newline.
//!
//! A stream (vsock, unix socket, `boot.ndjson`) is a sequence of lines of three shapes,
//! distinguished by one key:
//!
//! - `{"schema":1,"stream":{..}}`: a [`Header`], first on every connection and first in the file;
//! - `{"schema":1,"seq":..,"kind":..}`: a [`Record`];
//! - `{"schema":1,"pong":ID,"boottime_ns":..}`: the answer to a peer's [`ping`]; never stored in
//!   the ring, has no `seq`.
//!
//! Records with one (boot id, seq) are the same record: a reader that reconnects sees them again
//! and drops them. A missing `seq` was lost, and the stream reports it with a `stream.lost` event.
//! Begin and end of a span are separate records, so that a step that hangs is visible as a span
//! without end.
//!
//! Lines of the next schema are read as far as they are known ([`super::newer`]); other schemas are
//! refused. src/wire/README.md has the rules for a change of the format.
//!
//! Nothing trusts the other side: [`decode`](fn@crate::decode::decode) takes any bytes and returns
//! a [`Line`] or a [`DecodeError`], never panics.

use crate::catalogue::RENAMED;
use crate::pci_address::PciAddress;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::fmt;

/// The schema version this code writes.
pub const SCHEMA: u32 = 1;
/// The schema versions this code reads: a host is upgraded before or after its guests.
pub const READS: std::ops::RangeInclusive<u32> = 1..=SCHEMA + 1;
/// Longest line in bytes, newline included. The writer cuts texts to stay below; a reader drops
/// longer lines and counts them.
pub const MAX_LINE: usize = 16 * 1024;
/// Longest `name` in bytes.
pub const MAX_NAME: usize = 64;
/// Key of a span's duration on the line of its end in a console: milliseconds with six decimals, so
/// that the time of the beginning follows to the nanosecond.
pub const TOOK_MS: &str = "took_ms";
/// The vsock port the stream uses on both sides: the host's collector listens on it at CID 2, the
/// guest for local readers.
pub const DEFAULT_PORT: u32 = 10241;

/// Kind of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// A span starts; `span` is its id.
    Begin,
    /// The span `span` ends; `error` is there if it failed.
    End,
    /// A point in time; `parent` is the span around it.
    Event,
    /// A line of the kernel's log; `fields.text` is the line, `fields.kmsg_seq` and
    /// `fields.printk_us` are the kernel's own.
    Kmsg,
}

impl Kind {
    /// Whether the record belongs to a span, whose id it has.
    pub(super) fn is_of_span(self) -> bool {
        matches!(self, Self::Begin | Self::End)
    }
}

/// Importance of a record to a reader.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    Error,
    Warn,
    #[default]
    Info,
    Debug,
    Trace,
}

/// A line of the stream's body.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Record {
    pub schema: u32,
    /// Position in this boot's stream, from 0, without gaps at the writer.
    pub seq: u64,
    /// CLOCK_BOOTTIME in ns of the occurrence (not of the write): time since the kernel started.
    pub boottime_ns: u64,
    pub kind: Kind,
    /// Dotted name of [`names`](super::catalogue::names), e.g. `gpu.bind`.
    pub name: String,
    #[serde(default, skip_serializing_if = "is_default")]
    pub level: Level,
    /// GPU concerned, by guest PCI address.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu: Option<PciAddress>,
    /// Id of the span that begins or ends here; unique in the boot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub span: Option<u64>,
    /// Id of the span around this one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent: Option<u64>,
    /// Ids of the spans whose end this span had to wait for.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub after: Vec<u64>,
    /// Reason of a failure or a complaint: problem, place, value, cure.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    #[serde(default, skip_serializing_if = "Map::is_empty")]
    pub fields: Map<String, Value>,
}

impl Record {
    /// A record of this kind and name, of boot time 0 and otherwise empty; the ring sets `seq`.
    pub fn new(kind: Kind, name: &str) -> Self {
        Self {
            schema: SCHEMA,
            seq: 0,
            boottime_ns: 0,
            kind,
            name: name.to_string(),
            level: Level::default(),
            gpu: None,
            span: None,
            parent: None,
            after: vec![],
            error: None,
            fields: Map::new(),
        }
    }

    /// The record under its present name, if its values are those of a writer.
    pub(super) fn checked(mut self) -> Result<Self, DecodeError> {
        if self.name.is_empty()
            || self.name.len() > MAX_NAME
            || !self.name.bytes().all(|b| b.is_ascii_graphic())
        {
            return Err(DecodeError::Invalid(
                "name is empty, too long or not printable",
            ));
        }
        if self.kind.is_of_span() != self.span.is_some() {
            return Err(DecodeError::Invalid(
                "begin and end need a span id, event and kmsg have none",
            ));
        }
        if let Some((_, name)) = RENAMED.iter().find(|(old, _)| *old == self.name) {
            self.name = (*name).to_string();
        }
        Ok(self)
    }
}

fn is_default(level: &Level) -> bool {
    *level == Level::default()
}

/// Identity of the sender: the first line of every connection and file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Header {
    /// `/proc/sys/kernel/random/boot_id`: names the boot, also across reconnects.
    pub boot_id: String,
    /// Version of kata-gpu-init.
    pub version: String,
    /// `uname -r` of the guest.
    pub kernel: String,
    /// `seq` of the first record that follows; more than 0 when older ones no longer fit the ring.
    pub first_seq: u64,
}

impl Header {
    pub(super) fn checked(self) -> Result<Self, DecodeError> {
        if is_boot_id(&self.boot_id) {
            Ok(self)
        } else {
            Err(DecodeError::Invalid("boot_id is not a UUID"))
        }
    }
}

/// Answer to a ping.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pong {
    /// The id of the ping.
    pub pong: u64,
    /// CLOCK_BOOTTIME of the guest in ns when the ping was read.
    pub boottime_ns: u64,
}

/// A decoded line.
#[derive(Clone, Debug, PartialEq)]
pub enum Line {
    Header(Header),
    Record(Box<Record>),
    Pong(Pong),
}

/// Reason why a line is not of this format.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DecodeError {
    /// More than [`MAX_LINE`] bytes.
    TooLong(usize),
    /// Not JSON, or none of the three shapes; the text gives the position.
    Malformed(String),
    /// A schema version outside of [`READS`].
    Schema(u64),
    /// A value that no writer of this schema produces.
    Invalid(&'static str),
}

impl fmt::Display for DecodeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TooLong(n) => write!(f, "line of {n} bytes, the limit is {MAX_LINE}"),
            Self::Malformed(why) => write!(f, "not a record: {why}"),
            Self::Schema(v) => {
                let cure = if *v > u64::from(SCHEMA) {
                    "upgrade kata-gpu-boot to the guest's version"
                } else {
                    "no release wrote it"
                };
                write!(
                    f,
                    "schema {v}, this program reads schemas {} to {}: {cure}",
                    READS.start(),
                    READS.end()
                )
            }
            Self::Invalid(what) => write!(f, "invalid record: {what}"),
        }
    }
}

impl std::error::Error for DecodeError {}

pub(super) fn malformed(error: impl fmt::Display) -> DecodeError {
    DecodeError::Malformed(error.to_string())
}

/// Whether a text has the form of a boot id: a lower-case UUID. A peer chooses this text, and it
/// becomes a file name.
pub fn is_boot_id(text: &str) -> bool {
    text.len() == 36
        && text.bytes().enumerate().all(|(i, b)| match i {
            8 | 13 | 18 | 23 => b == b'-',
            _ => matches!(b, b'0'..=b'9' | b'a'..=b'f'),
        })
}

fn line_of(value: &impl Serialize) -> String {
    // Structs of strings, numbers and maps with string keys: serialising them cannot fail.
    let mut line = serde_json::to_string(value)
        .unwrap_or_else(|e| format!(r#"{{"schema":{SCHEMA},"unwritable":"{e}"}}"#));
    line.push('\n');
    line
}

/// The header as a line.
pub fn header_line(header: &Header) -> String {
    line_of(&serde_json::json!({ "schema": SCHEMA, "stream": header }))
}

/// The answer to a ping as a line.
pub fn pong_line(pong: Pong) -> String {
    line_of(&serde_json::json!({
        "schema": SCHEMA, "pong": pong.pong, "boottime_ns": pong.boottime_ns
    }))
}

/// A record as a line of at most [`MAX_LINE`] bytes. A longer record (a hostile log line) keeps its
/// frame and loses its fields; `fields.cut_bytes` is its former length.
pub fn record_line(record: &Record) -> String {
    let line = line_of(record);
    if line.len() <= MAX_LINE {
        return line;
    }
    let mut short = record.clone();
    short.fields = Map::from_iter([("cut_bytes".to_string(), Value::from(line.len()))]);
    short.after.truncate(64);
    short.error = short.error.map(|e| e.chars().take(512).collect());
    line_of(&short)
}

/// Request of a reader to a writer: `{"schema":1,"ping":ID}`, answered by a [`Pong`].
pub fn ping_line(id: u64) -> String {
    line_of(&serde_json::json!({ "schema": SCHEMA, "ping": id }))
}

/// The id in a ping line of a schema that this code reads, or None for anything else.
pub fn ping(line: &[u8]) -> Option<u64> {
    #[derive(Deserialize)]
    struct Ping {
        schema: u32,
        ping: u64,
    }
    serde_json::from_slice::<Ping>(line)
        .ok()
        .filter(|p| READS.contains(&p.schema))
        .map(|p| p.ping)
}

/// A duration as the value of [`TOOK_MS`].
pub fn in_ms(ns: u64) -> String {
    format!("{}.{:06}", ns / 1_000_000, ns % 1_000_000)
}

/// Duration in ns of a value of [`TOOK_MS`].
pub fn ns_of_ms(text: &str) -> Option<u64> {
    let (ms, rest) = text.split_once('.')?;
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    if !is_number(ms) || !is_number(rest) || rest.len() != 6 {
        return None;
    }
    let (ms, rest): (u64, u64) = (ms.parse().ok()?, rest.parse().ok()?);
    ms.checked_mul(1_000_000)?.checked_add(rest)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decode::decode;
    use crate::names;

    fn sample() -> Record {
        Record {
            schema: SCHEMA,
            seq: 7,
            boottime_ns: 1_500_000_000,
            kind: Kind::Begin,
            name: names::GPU_BIND.into(),
            level: Level::Info,
            gpu: Some("0001:00:03.0".parse().unwrap()),
            span: Some(4),
            parent: Some(1),
            after: vec![2, 3],
            error: None,
            fields: Map::from_iter([("strategy".to_string(), Value::from("concurrent"))]),
        }
    }

    #[test]
    fn a_duration_is_read_as_it_was_written() {
        for ns in [0, 1, 999_999, 1_000_000, 3_304_127_513, u64::MAX] {
            assert_eq!(ns_of_ms(&in_ms(ns)), Some(ns), "{}", in_ms(ns));
        }
        for text in [
            "",
            "1",
            "1.5",
            "-1.000000",
            "1.+00000",
            "x.000000",
            ".000000",
        ] {
            assert_eq!(ns_of_ms(text), None, "{text:?}");
        }
        assert_eq!(ns_of_ms("99999999999999999999.000000"), None);
    }

    #[test]
    fn a_record_survives_the_wire() {
        let record = sample();
        let line = record_line(&record);
        assert!(line.ends_with('\n'));
        assert_eq!(decode(line.as_bytes()), Ok(Line::Record(Box::new(record))));
    }

    #[test]
    fn an_old_name_is_read_as_the_new_one_in_each_schema() {
        assert!(!RENAMED.is_empty());
        for (old, new) in RENAMED {
            for schema in READS {
                let record = Record {
                    schema,
                    ..Record::new(Kind::Event, old)
                };
                match decode(record_line(&record).as_bytes()) {
                    Ok(Line::Record(read)) => assert_eq!(read.name, *new),
                    other => panic!("{old}: {other:?}"),
                }
            }
        }
    }

    #[test]
    fn the_wire_form_is_what_schema_1_promises() {
        assert_eq!(
            record_line(&sample()),
            concat!(
                r#"{"schema":1,"seq":7,"boottime_ns":1500000000,"kind":"begin","name":"gpu.bind","#,
                r#""gpu":"0001:00:03.0","span":4,"parent":1,"#,
                r#""after":[2,3],"fields":{"strategy":"concurrent"}}"#,
                "\n"
            )
        );
    }

    #[test]
    fn header_and_pong_survive_the_wire() {
        let header = Header {
            boot_id: "0f7a1f8e-0000-4000-8000-00000000beef".into(),
            version: "0.1.0".into(),
            kernel: "6.1".into(),
            first_seq: 0,
        };
        assert_eq!(
            decode(header_line(&header).as_bytes()),
            Ok(Line::Header(header))
        );
        let pong = Pong {
            pong: 3,
            boottime_ns: 99,
        };
        assert_eq!(decode(pong_line(pong).as_bytes()), Ok(Line::Pong(pong)));
        assert_eq!(ping(ping_line(3).as_bytes()), Some(3));
        // A newer host asks an older guest.
        let asked =
            |schema: u32| ping(format!(r#"{{"schema":{schema},"ping":3,"new":[]}}"#).as_bytes());
        assert_eq!([0, 1, 2, 3].map(asked), [None, Some(3), Some(3), None]);
    }

    #[test]
    fn what_is_not_a_record_is_refused_with_its_reason() {
        assert!(matches!(decode(b""), Err(DecodeError::Malformed(_))));
        assert!(matches!(
            decode(b"{\"schema\":1,\"seq\":1"),
            Err(DecodeError::Malformed(_))
        ));
        assert!(matches!(
            decode(b"\xff\xfe\x00"),
            Err(DecodeError::Malformed(_))
        ));
        for schema in [0, 3, u64::MAX] {
            assert_eq!(
                decode(
                    format!(r#"{{"schema":{schema},"stream":{{"other":true}},"pong":"x"}}"#)
                        .as_bytes()
                ),
                Err(DecodeError::Schema(schema))
            );
        }
        assert_eq!(
            decode(&vec![b' '; MAX_LINE + 1]),
            Err(DecodeError::TooLong(MAX_LINE + 1))
        );
        let path = br#"{"schema":1,"stream":{"boot_id":"../../../../etc/passwd-aaaaaaaaaaaaa",
            "version":"","kernel":"","first_seq":0}}"#;
        assert_eq!(
            decode(path),
            Err(DecodeError::Invalid("boot_id is not a UUID"))
        );
        let unnamed = br#"{"schema":1,"seq":1,"boottime_ns":1,"kind":"event","name":"a\u001b[2J"}"#;
        assert!(matches!(decode(unnamed), Err(DecodeError::Invalid(_))));
    }

    #[test]
    fn an_over_long_record_is_cut_and_marked() {
        let mut record = sample();
        record
            .fields
            .insert("text".into(), Value::from("x".repeat(3 * MAX_LINE)));
        let line = record_line(&record);
        assert!(line.len() <= MAX_LINE);
        let Ok(Line::Record(read)) = decode(line.as_bytes()) else {
            panic!("cut record does not decode")
        };
        assert!(read.fields.contains_key("cut_bytes"));
    }
}
