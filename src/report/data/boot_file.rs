//! The file of one boot, `<boot id>.ndjson`: its lines, and reading them.
//!
//! Lines are appended, never rewritten: the guest's header and records byte for byte as they came,
//! and between them the collector's own lines ([`HostLine`], `"kind":"host"`). A guest cannot forge
//! these: the wire's `decode` refuses that kind, only lines that it accepts are ever written, and
//! [`BootFile::read`] calls it first. A damaged line is counted and named and costs only itself.
//! The file may be read while it is written: a last line without newline is incomplete, not
//! damaged.
//!
//! `boot.ndjson` of a guest is such a file without host lines. [`super::trace_file`] has the file
//! that `doctor --record` writes.

use super::budget::{
    MAX_ALL_FIELDS, MAX_GAPS, MAX_HOST_LINES, MAX_HOST_TEXT, MAX_LAST_WORDS, MAX_ORDERS,
    MAX_RECORDS, MAX_TEXT, TooLarge,
};
use super::clock_offset::{Clock, Sample};
use super::compact_record::{Names, Record};
use super::framing::{Lines, Piece};
use super::guest_clocks::GuestClocks;
use super::text;
use super::trace_file::{MAX_TRACED, Recording, Traced};
use kata_gpu_wire::names;
use kata_gpu_wire::record;
use kata_gpu_wire::record::{Header, Kind, Line};
use serde::{Deserialize, Serialize};
use std::io::{self, Read};
use std::num::NonZeroU128;

/// Extension of a boot's file, after its id.
pub const EXTENSION: &str = "ndjson";
/// Length of the shortest valid line.
const SHORTEST: usize = r#"{"schema":1,"pong":0,"boottime_ns":0}"#.len();
/// Limit of damaged lines that are listed; the rest is only counted.
pub const MAX_NAMED_DAMAGE: usize = 20;

/// A line of the collector.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct HostLine {
    pub schema: u32,
    pub kind: HostKind,
    /// CLOCK_REALTIME of the host at the write.
    pub realtime_ns: i64,
    #[serde(flatten)]
    pub event: HostEvent,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum HostKind {
    #[serde(rename = "host")]
    Host,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "lowercase")]
pub enum HostEvent {
    /// A peer connected and claimed this boot.
    Connected { peer: String, first_seq: u64 },
    /// Counts of the connection.
    Disconnected {
        peer: String,
        records: u64,
        duplicates: u64,
    },
    /// The guest's clock against the host's, better than the known samples.
    Clock(Sample),
    /// Records that never came: their number, and the first few gaps (first and last seq of each).
    /// Later connections may still bring them.
    Lost { count: u64, gaps: Vec<(u64, u64)> },
    /// Lines dropped because they are not of the format; the first one's reason.
    Garbage {
        lines: u64,
        bytes: u64,
        first: String,
    },
    /// The boot reached the collector's limit; later records were dropped.
    Capped { why: String },
    /// Records that came while the file could not be written, with the first and last seq. The
    /// guest was asked to send them again.
    Dropped {
        records: u64,
        first_seq: u64,
        last_seq: u64,
        why: String,
    },
    /// Kata's name of the VM, and its pod.
    Sandbox(Sandbox),
    /// The id of the boot's OTLP trace, drawn when the file was begun.
    Trace { id: TraceId },
    /// An OTLP receiver accepted all spans of the boot.
    Exported { to: String, spans: u64 },
    /// Records of this file were made from logs: those with `fields.import`.
    Imported(Box<Imported>),
    /// A step or a count of the host: only in the file of `doctor --record`.
    Traced(Box<Traced>),
    /// Facts about the recording that gave these.
    Recording(Box<Recording>),
    /// A line of a newer collector, unknown here.
    #[serde(other)]
    Unknown,
}

/// A VM by its ids in Kata and Kubernetes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sandbox {
    /// Kata's sandbox id, equal to that of the pod's sandbox container.
    pub id: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub namespace: Option<String>,
    /// UID of the pod.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uid: Option<String>,
    /// User ID of the VMM on the host, where the kernel vouches for it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vmm_user: Option<u32>,
}

impl Sandbox {
    /// Whether `wanted` names this sandbox: by Kata's id, or by NAMESPACE/POD.
    pub fn is(&self, wanted: &str) -> bool {
        let pod = self.namespace.as_deref().zip(self.pod.as_deref());
        self.id == wanted || wanted.split_once('/').is_some_and(|of| pod == Some(of))
    }

    /// NAMESPACE/POD, or the pod's name where the namespace is not known.
    pub fn pod_name(&self) -> Option<String> {
        let pod = self.pod.as_ref()?;
        let namespace = self.namespace.as_ref();
        Some(namespace.map_or(pod.clone(), |namespace| format!("{namespace}/{pod}")))
    }
}

/// An OTLP trace id, 32 hexadecimal digits in the file. Random, so that no guest and no other node
/// can push spans into the trace; kept in the boot's file, so that every export of the boot uses
/// the same. 0 is invalid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct TraceId(NonZeroU128);

impl TraceId {
    pub fn random() -> io::Result<Self> {
        let mut bytes = [0; 16];
        loop {
            // Sixteen bytes come whole or not at all: getrandom(2).
            rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())?;
            if let Some(id) = NonZeroU128::new(u128::from_be_bytes(bytes)) {
                return Ok(Self(id));
            }
        }
    }

    pub fn get(self) -> u128 {
        self.0.get()
    }
}

impl From<TraceId> for String {
    fn from(id: TraceId) -> Self {
        format!("{:032x}", id.get())
    }
}

impl TryFrom<String> for TraceId {
    type Error = &'static str;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        let digits = text.len() == 32 && text.bytes().all(|b| b.is_ascii_hexdigit());
        let id = digits
            .then(|| u128::from_str_radix(&text, 16).ok())
            .flatten();
        id.and_then(NonZeroU128::new)
            .map(Self)
            .ok_or("a trace id has 32 hexadecimal digits and is not 0")
    }
}

/// Sources of an imported boot.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Imported {
    /// Meaning of 0 on the boot's clock; `kernel start` as in every stream, if a log has it.
    pub zero: String,
    pub files: Vec<ImportedFile>,
    pub clocks: Vec<ImportedClock>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
}

/// A source file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImportedFile {
    pub file: String,
    pub format: String,
    pub lines: u64,
    pub recognised: u64,
    pub skipped: u64,
}

/// Placement of one clock of the logs on the boot's.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImportedClock {
    pub clock: String,
    pub by: String,
    pub error_ns: u64,
}

impl HostLine {
    pub fn now(event: HostEvent) -> Self {
        Self {
            schema: record::SCHEMA,
            kind: HostKind::Host,
            realtime_ns: text::realtime_ns(),
            event,
        }
    }

    pub fn to_line(&self) -> String {
        // Structs of numbers and strings: serialising cannot fail.
        let mut line =
            serde_json::to_string(self).unwrap_or_else(|e| format!(r#"{{"unwritable":"{e}"}}"#));
        line.push('\n');
        line
    }
}

/// Report about a stream that is newer than this program, with the cure.
pub fn newer_sentence(schema: u32) -> Option<String> {
    let own = record::SCHEMA;
    (schema > own).then(|| {
        format!(
            "the guest is newer (schema {schema} of the stream, this program's is {own}): what is \
             unknown is kept in the file and shown as it came; upgrade kata-gpu-boot to the \
             guest's version"
        )
    })
}

/// A line that is neither the guest's nor the collector's.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Damage {
    /// Line number from 1.
    pub line: u64,
    pub why: String,
}

/// Contents of one file.
#[derive(Clone, Debug, Default)]
pub struct BootFile {
    pub header: Option<Header>,
    /// Schema of the header, if newer than this program's.
    pub newer_schema: Option<u32>,
    /// In file order, each seq once.
    pub records: Vec<Record>,
    pub host: Vec<HostLine>,
    /// The first [`MAX_NAMED_DAMAGE`] damaged lines.
    pub damage: Vec<Damage>,
    pub damaged: u64,
    pub seqs: SeqSet,
    pub bytes: u64,
    /// Bytes after the last newline.
    pub unfinished: usize,
    /// Counts of records and lines over the limits of [`super::budget`], which were left out.
    pub too_large: TooLarge,
    kept: Kept,
    traced: usize,
}

/// Used part of the budget.
#[derive(Clone, Copy, Debug, Default)]
struct Kept {
    text: usize,
    fields: usize,
    orders: usize,
    last_words: usize,
    host_text: usize,
}

impl BootFile {
    /// Reads to the end. Errors are those of reading; the content never causes one.
    pub fn read(from: impl Read) -> io::Result<Self> {
        let mut file = Self::default();
        let (bytes, unfinished) =
            for_each_line(from, |number, length, line| file.add(number, length, line))?;
        file.bytes = bytes;
        file.unfinished = unfinished;
        file.records.shrink_to_fit();
        Ok(file)
    }

    /// Adds the file of `doctor --record`, which has nothing but the recorder's lines.
    pub fn read_trace(&mut self, from: impl Read) -> io::Result<()> {
        for_each_line(from, |number, length, line| match line {
            Ok(FileLine::Host(line))
                if matches!(line.event, HostEvent::Traced(_) | HostEvent::Recording(_)) =>
            {
                self.traced += 1;
                if self.traced > MAX_TRACED {
                    self.too_large.host_lines += 1;
                } else {
                    self.add_host(line, length);
                }
            }
            Ok(_) => self.add_damage(
                number,
                "in the file of the host's trace: not a line of the recorder".into(),
            ),
            Err(why) => self.add_damage(number, format!("in the file of the host's trace: {why}")),
        })
        .map(drop)
    }

    fn events(&self) -> impl DoubleEndedIterator<Item = &HostEvent> {
        self.host.iter().map(|line| &line.event)
    }

    /// Steps and counts that the host's trace has.
    pub fn traced(&self) -> impl Iterator<Item = &Traced> + '_ {
        self.events().filter_map(|event| match event {
            HostEvent::Traced(traced) => Some(traced.as_ref()),
            _ => None,
        })
    }

    /// Facts about the host's trace, if there is one.
    pub fn recording(&self) -> Option<&Recording> {
        self.events().find_map(|event| match event {
            HostEvent::Recording(recording) => Some(recording.as_ref()),
            _ => None,
        })
    }

    fn add(&mut self, number: u64, length: usize, line: Result<FileLine, String>) {
        match line {
            Ok(FileLine::Header(schema, header)) => match &self.header {
                None => {
                    self.newer_schema = (schema > record::SCHEMA).then_some(schema);
                    self.header = Some(header);
                }
                Some(first) if first.boot_id == header.boot_id => {}
                Some(first) => {
                    let why = format!(
                        "header of another boot, {}, in the file of {}",
                        header.boot_id, first.boot_id
                    );
                    self.add_damage(number, why);
                }
            },
            Ok(FileLine::Record(record)) => self.add_record(record),
            Ok(FileLine::Pong) => self.add_damage(number, "a pong, which is never stored".into()),
            Ok(FileLine::Host(line)) => {
                if let HostEvent::Dropped { last_seq, .. } = &line.event {
                    self.seqs.expect(*last_seq);
                }
                self.add_host(line, length);
            }
            Err(why) => self.add_damage(number, why),
        }
    }

    fn add_record(&mut self, record: Record) {
        if self.seqs.ranges() > MAX_GAPS && self.seqs.is_apart(record.seq) {
            self.too_large.records += 1;
            return;
        }
        if !self.seqs.insert(record.seq) {
            return;
        }
        let (text, orders) = (
            self.kept.text + record.text_bytes(),
            self.kept.orders + record.after().len(),
        );
        let fields = self.kept.fields + record.fields.iter().count();
        if self.records.len() >= MAX_RECORDS
            || text > MAX_TEXT
            || fields > MAX_ALL_FIELDS
            || orders > MAX_ORDERS
        {
            // The end of a boot matters more than earlier records.
            let last_words = record.kind == Kind::Event
                && matches!(record.name.as_str(), names::SETTLED | names::POWER_OFF);
            if !last_words || self.kept.last_words >= MAX_LAST_WORDS {
                self.too_large.records += 1;
                return;
            }
            self.kept.last_words += 1;
        }
        self.too_large.cut_records += u64::from(record.cut);
        (self.kept.text, self.kept.fields, self.kept.orders) = (text, fields, orders);
        self.records.push(record);
    }

    /// Keeps the last sandbox regardless of the number of lines.
    fn add_host(&mut self, line: HostLine, length: usize) {
        let is_sandbox = |line: &HostLine| matches!(line.event, HostEvent::Sandbox(_));
        if self.host.len() < MAX_HOST_LINES && self.kept.host_text + length <= MAX_HOST_TEXT {
            self.kept.host_text += length;
            self.host.push(line);
            return;
        }
        self.too_large.host_lines += 1;
        if is_sandbox(&line) {
            match self.host.iter_mut().rev().find(|known| is_sandbox(known)) {
                Some(known) => *known = line,
                None => self.host.push(line),
            }
        }
    }

    fn add_damage(&mut self, line: u64, why: String) {
        self.damaged += 1;
        if self.damage.len() < MAX_NAMED_DAMAGE {
            self.damage.push(Damage { line, why });
        }
    }

    /// The first peer that connected; later connections must be from the same peer.
    pub fn owner(&self) -> Option<&str> {
        self.events().find_map(|event| match event {
            HostEvent::Connected { peer, .. } => Some(peer.as_str()),
            _ => None,
        })
    }

    /// Peers that connected, with the guest's time.
    pub fn connections<'a>(&'a self, clock: &'a Clock) -> impl Iterator<Item = (u64, &'a str)> {
        self.host.iter().filter_map(|line| match &line.event {
            HostEvent::Connected { peer, .. } => {
                Some((clock.boottime_at(line.realtime_ns)?, &**peer))
            }
            _ => None,
        })
    }

    /// The sandbox by the newest line.
    pub fn sandbox(&self) -> Option<&Sandbox> {
        self.events().rev().find_map(|event| match event {
            HostEvent::Sandbox(sandbox) => Some(sandbox),
            _ => None,
        })
    }

    /// Kata's id of the sandbox.
    pub fn sandbox_id(&self) -> Option<&str> {
        self.sandbox().map(|sandbox| sandbox.id.as_str())
    }

    /// The first trace id; None in a file of logs, or without a collector's beginning.
    pub fn trace(&self) -> Option<TraceId> {
        self.events().find_map(|event| match event {
            HostEvent::Trace { id } => Some(*id),
            _ => None,
        })
    }

    /// Sources of the boot, if it was made from logs.
    pub fn imported(&self) -> Option<&Imported> {
        self.events().find_map(|event| match event {
            HostEvent::Imported(imported) => Some(imported.as_ref()),
            _ => None,
        })
    }

    /// The guest's clock against the host's: from the collector's pings, and from the guest's own
    /// samples that do not contradict them.
    pub fn clock(&self) -> Clock {
        let mut clock = Clock::of(self.clock_samples());
        GuestClocks::of(&self.records).add_to(&mut clock);
        clock
    }

    pub fn clock_samples(&self) -> impl Iterator<Item = Sample> + '_ {
        self.events().filter_map(|event| match event {
            HostEvent::Clock(sample) => Some(*sample),
            _ => None,
        })
    }
}

/// Passes every complete line on, with its number from 1 and its length in bytes, in bounded
/// memory. Returns the bytes read and the bytes after the last newline.
pub fn for_each_line(
    from: impl Read,
    mut each: impl FnMut(u64, usize, Result<FileLine, String>),
) -> io::Result<(u64, usize)> {
    let mut lines = Lines::new(record::MAX_LINE);
    let mut names = Names::default();
    let (mut number, mut short) = (0, 0);
    let bytes = lines.read(from, |piece| {
        number += 1;
        match piece {
            // Reasons for the first ones only: a file of nothing but newlines has millions.
            Piece::Line(line) if line.len() < SHORTEST && short >= MAX_NAMED_DAMAGE => {
                each(number, line.len(), Err(String::new()))
            }
            Piece::Line(line) => {
                short += usize::from(line.len() < SHORTEST);
                each(number, line.len(), decode(line, &mut names));
            }
            Piece::TooLong(n) => each(number, n, Err(record::DecodeError::TooLong(n).to_string())),
        }
    })?;
    Ok((bytes, lines.unfinished()))
}

/// A line of a boot's file.
#[derive(Debug)]
pub enum FileLine {
    /// With the schema of the line.
    Header(u32, Header),
    Record(Record),
    /// Never stored by the collector.
    Pong,
    Host(HostLine),
}

/// Decodes a line. The guest's format has priority: a line that a guest could have sent never
/// counts as the collector's.
pub fn decode(line: &[u8], names: &mut Names) -> Result<FileLine, String> {
    let error = match kata_gpu_wire::decode::decode_with_schema(line) {
        Ok((schema, Line::Header(header))) => return Ok(FileLine::Header(schema, header)),
        Ok((_, Line::Record(record))) => return Ok(FileLine::Record(Record::new(*record, names))),
        Ok((_, Line::Pong(_))) => return Ok(FileLine::Pong),
        Err(error) => error,
    };
    match serde_json::from_slice::<HostLine>(line) {
        Ok(host) if record::READS.contains(&host.schema) => Ok(FileLine::Host(host)),
        _ => Err(text::printable(&error.to_string())),
    }
}

/// Set of sequence numbers, as ranges: a stream without loss costs one entry.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SeqSet {
    /// First -> last of each range; ranges neither touch nor overlap.
    ranges: std::collections::BTreeMap<u64, u64>,
    /// Highest seq known to exist, seen or not.
    expected: Option<u64>,
}

impl SeqSet {
    /// Number of ranges; 1 without loss.
    pub fn ranges(&self) -> u64 {
        self.ranges.len() as u64
    }

    pub fn contains(&self, seq: u64) -> bool {
        self.ranges
            .range(..=seq)
            .next_back()
            .is_some_and(|(_, last)| *last >= seq)
    }

    /// Whether neither this seq nor a neighbour was seen: it would be a range of its own.
    pub fn is_apart(&self, seq: u64) -> bool {
        !self.contains(seq)
            && !seq
                .checked_sub(1)
                .is_some_and(|before| self.contains(before))
            && !self.ranges.contains_key(&seq.saturating_add(1))
    }

    /// Notes that this seq exists: until it is seen, it is missing.
    pub fn expect(&mut self, seq: u64) {
        self.expected = self.expected.max(Some(seq));
    }

    /// Adds a seq; false if it was there before.
    pub fn insert(&mut self, seq: u64) -> bool {
        let before = self
            .ranges
            .range(..=seq)
            .next_back()
            .map(|(first, last)| (*first, *last));
        if before.is_some_and(|(_, last)| last >= seq) {
            return false;
        }
        let last = seq
            .checked_add(1)
            .and_then(|next| self.ranges.remove(&next))
            .unwrap_or(seq);
        match before {
            Some((first, end)) if end + 1 == seq => self.ranges.insert(first, last),
            _ => self.ranges.insert(seq, last),
        };
        true
    }

    /// First and last seq of each gap, from 0 to the highest known one.
    pub fn gaps(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        let mut next = 0u64;
        let between = self.ranges.iter().filter_map(move |(first, last)| {
            let gap = (*first > next).then(|| (next, first - 1));
            next = last.saturating_add(1);
            gap
        });
        let end = self
            .ranges
            .last_key_value()
            .map_or(Some(0), |(_, last)| last.checked_add(1));
        let behind = self
            .expected
            .zip(end)
            .filter(|(expected, end)| expected >= end)
            .map(|(expected, end)| (end, expected));
        between.chain(behind)
    }

    /// Number of missing seqs between 0 and the highest known one.
    pub fn missing(&self) -> u64 {
        self.gaps()
            .map(|(first, last)| (last - first).saturating_add(1))
            .fold(0, u64::saturating_add)
    }
}

#[cfg(test)]
mod tests;
