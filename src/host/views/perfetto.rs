//! `--perfetto`: a trace of Perfetto's own format, for ui.perfetto.dev and trace_processor.
//!
//! A track per side and per GPU below one track for the boot; a lane with several rows has a child
//! track of its name per row, since slices of one track must nest. Timestamps are the guest's
//! BOOTTIME, which is the trace's primary clock; clock snapshots put REALTIME of the host beside
//! it. Steps are slices, `after` edges flows, the critical path a track of its own, usable and
//! published GPUs counters. A step that never ended has no end event, which the viewer draws as
//! unfinished.
//!
//! Field numbers are those of perfetto's protos/perfetto/trace; a test parses the file with the
//! official ones.

use super::protobuf::Message;
use super::waterfall::{Mark, Step, Waterfall, level};
use crate::events::names;
use std::collections::HashMap;
use std::io::{self, Write};

mod field {
    //! Numbers of the fields that are written, by message.
    pub const TRACE_PACKET: u64 = 1;
    pub mod packet {
        pub const CLOCK_SNAPSHOT: u64 = 6;
        pub const TIMESTAMP: u64 = 8;
        pub const SEQUENCE_ID: u64 = 10;
        pub const TRACK_EVENT: u64 = 11;
        pub const SEQUENCE_FLAGS: u64 = 13;
        pub const TIMESTAMP_CLOCK_ID: u64 = 58;
        pub const TRACK_DESCRIPTOR: u64 = 60;
    }
    pub mod snapshot {
        pub const CLOCKS: u64 = 1;
        pub const PRIMARY_TRACE_CLOCK: u64 = 2;
        pub const CLOCK_ID: u64 = 1;
        pub const TIMESTAMP: u64 = 2;
    }
    pub mod track {
        pub const UUID: u64 = 1;
        pub const NAME: u64 = 2;
        pub const PARENT_UUID: u64 = 5;
        pub const COUNTER: u64 = 8;
        pub const CHILD_ORDERING: u64 = 11;
        pub const SIBLING_ORDER_RANK: u64 = 12;
        pub const COUNTER_UNIT: u64 = 3;
    }
    pub mod event {
        pub const DEBUG_ANNOTATIONS: u64 = 4;
        pub const TYPE: u64 = 9;
        pub const TRACK_UUID: u64 = 11;
        pub const CATEGORIES: u64 = 22;
        pub const NAME: u64 = 23;
        pub const COUNTER_VALUE: u64 = 30;
        pub const FLOW_IDS: u64 = 47;
        pub const TERMINATING_FLOW_IDS: u64 = 48;
        pub const ANNOTATION_NAME: u64 = 10;
        pub const ANNOTATION_UINT: u64 = 3;
        pub const ANNOTATION_STRING: u64 = 6;
    }
}
use field::{event, packet, snapshot, track};

/// BuiltinClock.
const REALTIME: u64 = 1;
const BOOTTIME: u64 = 6;
/// TrackEvent.Type.
const SLICE_BEGIN: u64 = 1;
const SLICE_END: u64 = 2;
const INSTANT: u64 = 3;
const COUNTER: u64 = 4;
/// TrackDescriptor.ChildTracksOrdering.EXPLICIT: by rank.
const EXPLICIT: u64 = 3;
/// CounterDescriptor.Unit.UNIT_COUNT.
const UNIT_COUNT: u64 = 2;
/// TracePacket.SequenceFlags.SEQ_INCREMENTAL_STATE_CLEARED: nothing stands before this packet.
const STATE_CLEARED: u64 = 1;
/// All packets are one writer's.
const SEQUENCE: u64 = 1;
/// Readers hold times as signed numbers.
const MAX_TIME: u64 = i64::MAX as u64;

/// Tracks beside the lanes'; a lane's is its number plus [`LANES`] times its row plus one.
const BOOT: u64 = 1;
const CRITICAL: u64 = 2;
const PUBLISHED: u64 = 3;
const USABLE: u64 = 4;
const FIRST_LANE: u64 = 0x100;
const LANES: u64 = 0x1_0000;
/// Rows of a lane that get a track; what else is open at the same time shares the last one. No boot
/// has that many.
const MAX_ROWS: usize = 0x1000;

/// The whole file.
pub fn write(timeline: &Waterfall, out: &mut dyn Write) -> io::Result<()> {
    let mut trace = Trace { out, done: Ok(()), id: track_base(timeline) };
    trace.clocks(timeline);
    trace.tracks(timeline);
    // (time, what ends before what begins, order): readers want a track's events nested, whatever
    // has the same time.
    let mut events: Vec<(u64, u8, Event)> = Vec::new();
    let flows = flows(timeline);
    for (i, step) in timeline.steps.iter().enumerate() {
        let (begin_ns, end_ns) = (step.begin_ns, step.end_ns.filter(|_| !step.begin_lost));
        match end_ns {
            // Of no length or of a lost beginning: an instant, since its end would come before its
            // beginning.
            Some(end_ns) if end_ns > begin_ns => events.extend([(begin_ns, 1, Event::Begin(i)), (end_ns, 0, Event::End(i))]),
            None if !step.begin_lost => events.push((begin_ns, 1, Event::Begin(i))),
            _ => events.push((begin_ns, 1, Event::Instant(i))),
        }
    }
    events.extend(timeline.marks.iter().map(|mark| (mark.at_ns, 2, Event::Mark(mark))));
    let made = |(at_ns, order, message)| (at_ns, order, Event::Made(message));
    events.extend(critical(timeline, trace.id | CRITICAL).into_iter().map(made));
    for (counter, name) in [(PUBLISHED, names::GPU_PUBLISHED), (USABLE, names::GPU_USABLE)] {
        events.extend(count(timeline, name, trace.id | counter).into_iter().map(made));
    }
    events.sort_by_key(|(at_ns, order, _)| (*at_ns, *order));
    for (at_ns, _, event) in events {
        let of_step = |i: usize, make: &dyn Fn(&Step, u64) -> Message| {
            timeline.steps.get(i).map(|step| make(step, trace.lane(step.lane, step.row))).unwrap_or_default()
        };
        let message = match event {
            Event::Begin(i) => of_step(i, &|step, lane| slice(step, lane, flows.get(&i))),
            Event::End(i) => of_step(i, &|_, lane| track_event(SLICE_END, lane)),
            Event::Instant(i) => of_step(i, &slice_as_instant),
            Event::Mark(mark) => instant(mark, trace.lane(mark.lane, 0)),
            Event::Made(message) => message,
        };
        trace.event(at_ns, message);
    }
    trace.done
}

/// What an event is made of when its turn comes: texts of all of them at once are many times the
/// boot's file.
enum Event<'a> {
    /// Of the step with this number.
    Begin(usize),
    End(usize),
    Instant(usize),
    Mark(&'a Mark),
    Made(Message),
}

/// Tracks of several boots can be put into one trace: their ids are the boot's.
fn track_base(timeline: &Waterfall) -> u64 {
    let digits: String = timeline.boot_id().chars().filter(char::is_ascii_hexdigit).take(8).collect();
    u64::from_str_radix(&digits, 16).unwrap_or(0) << 32
}

struct Trace<'a> {
    out: &'a mut dyn Write,
    /// The first error; nothing is written after it.
    done: io::Result<()>,
    id: u64,
}

impl Trace<'_> {
    fn packet(&mut self, packet: Message) {
        let packet = packet.uint(packet::SEQUENCE_ID, SEQUENCE);
        if self.done.is_ok() {
            self.done = self.out.write_all(&Message::default().message(field::TRACE_PACKET, packet).into_bytes());
        }
    }

    fn event(&mut self, at_ns: u64, event: Message) {
        let packet = Message::default().uint(packet::TIMESTAMP, at_ns.min(MAX_TIME)).uint(packet::TIMESTAMP_CLOCK_ID, BOOTTIME);
        self.packet(packet.message(packet::TRACK_EVENT, event));
    }

    fn lane(&self, lane: usize, row: usize) -> u64 {
        // The lane's track itself for its first row, so that a lane with one row is one track.
        self.id | (FIRST_LANE + lane as u64 + row.min(MAX_ROWS - 1) as u64 * LANES)
    }

    fn clocks(&mut self, timeline: &Waterfall) {
        let clock = |id, ns| Message::default().uint(snapshot::CLOCK_ID, id).uint(snapshot::TIMESTAMP, ns);
        let mut first = true;
        let mut last = None;
        for sample in &timeline.samples {
            let realtime = sample.offset_ns.checked_add_unsigned(sample.boottime_ns).and_then(|ns| u64::try_from(ns).ok());
            let Some(realtime) = realtime.filter(|_| sample.boottime_ns <= MAX_TIME) else { continue };
            // Readers refuse clocks that go backwards; the samples' bounds overlap where that looks
            // so.
            if last.is_some_and(|(b, r)| sample.boottime_ns <= b || realtime <= r) {
                continue;
            }
            last = Some((sample.boottime_ns, realtime));
            self.snapshot(first, [Some(clock(BOOTTIME, sample.boottime_ns)), Some(clock(REALTIME, realtime))]);
            first = false;
        }
        if first {
            self.snapshot(true, [Some(clock(BOOTTIME, 0)), None]);
        }
    }

    fn snapshot(&mut self, first: bool, clocks: [Option<Message>; 2]) {
        let mut body = Message::default();
        for clock in clocks.into_iter().flatten() {
            body = body.message(snapshot::CLOCKS, clock);
        }
        let body = body.uint(snapshot::PRIMARY_TRACE_CLOCK, BOOTTIME);
        let flags = if first { STATE_CLEARED } else { 0 };
        self.packet(Message::default().uint(packet::SEQUENCE_FLAGS, flags).message(packet::CLOCK_SNAPSHOT, body));
    }

    fn tracks(&mut self, timeline: &Waterfall) {
        let id = self.id;
        let named = |uuid: u64, name: &str, rank: usize| {
            Message::default().uint(track::UUID, uuid).text(track::NAME, name).uint(track::SIBLING_ORDER_RANK, rank as u64)
        };
        let child = |uuid: u64, name: &str, rank: usize| named(uuid, name, rank).uint(track::PARENT_UUID, id | BOOT);
        let counted = || Message::default().uint(track::COUNTER_UNIT, UNIT_COUNT);
        let title = format!("boot {}", timeline.boot_id());
        let mut tracks = vec![
            named(id | BOOT, &title, 0).uint(track::CHILD_ORDERING, EXPLICIT),
            child(id | CRITICAL, "critical path", 0),
            child(id | PUBLISHED, "GPUs published", 1).message(track::COUNTER, counted()),
            child(id | USABLE, "GPUs usable", 2).message(track::COUNTER, counted()),
        ];
        for (i, lane) in timeline.lanes.iter().enumerate() {
            for row in 0..lane.rows.min(MAX_ROWS) {
                tracks.push(child(self.lane(i, row), &lane.name, 3 + i));
            }
        }
        for descriptor in tracks {
            self.packet(Message::default().message(packet::TRACK_DESCRIPTOR, descriptor));
        }
    }
}

fn annotation(key: &str, value: &str) -> Message {
    Message::default().text(event::ANNOTATION_NAME, key).text(event::ANNOTATION_STRING, value)
}

fn number(key: &str, value: u64) -> Message {
    Message::default().text(event::ANNOTATION_NAME, key).uint(event::ANNOTATION_UINT, value)
}

fn track_event(kind: u64, track_uuid: u64) -> Message {
    Message::default().uint(event::TYPE, kind).uint(event::TRACK_UUID, track_uuid)
}

/// What is told of a step beside its times.
fn annotated(step: &Step, mut message: Message) -> Message {
    let mut annotations: Vec<Message> = step.fields.iter().map(|(key, value)| annotation(key, value)).collect();
    if let Some(gpu) = step.gpu {
        annotations.push(annotation("gpu", &gpu.address.to_string()));
        annotations.extend(gpu.index.map(|index| number("gpu_index", index)));
    }
    annotations.extend(step.id.map(|id| number("span", id)));
    annotations.extend(step.error.as_deref().map(|error| annotation("error", error)));
    if step.begin_lost {
        annotations.push(annotation("lost", "the record of its beginning"));
    }
    for annotation in annotations {
        message = message.message(event::DEBUG_ANNOTATIONS, annotation);
    }
    message
}

/// The two flow lists of a step: those that start here, those that end here.
type Flows = (Vec<u64>, Vec<u64>);

fn flows(timeline: &Waterfall) -> HashMap<usize, Flows> {
    let by_id: HashMap<u64, usize> = timeline.steps.iter().enumerate().filter_map(|(i, s)| Some((s.id?, i))).collect();
    let mut flows: HashMap<usize, Flows> = HashMap::new();
    let mut next = track_base(timeline);
    for (to, step) in timeline.steps.iter().enumerate() {
        for from in step.after.iter().filter_map(|id| by_id.get(id).copied()) {
            next += 1;
            flows.entry(from).or_default().0.push(next);
            flows.entry(to).or_default().1.push(next);
        }
    }
    flows
}

fn slice(step: &Step, track_uuid: u64, flows: Option<&Flows>) -> Message {
    let begin = track_event(SLICE_BEGIN, track_uuid).text(event::CATEGORIES, step.side.name());
    let begin = if step.error.is_some() { begin.text(event::CATEGORIES, "failed") } else { begin };
    let mut begin = annotated(step, begin.text(event::NAME, &step.label()));
    if let Some((starting, ending)) = flows {
        for id in starting {
            begin = begin.fixed64(event::FLOW_IDS, *id);
        }
        for id in ending {
            begin = begin.fixed64(event::TERMINATING_FLOW_IDS, *id);
        }
    }
    begin
}

fn slice_as_instant(step: &Step, track_uuid: u64) -> Message {
    let message = track_event(INSTANT, track_uuid).text(event::CATEGORIES, step.side.name()).text(event::NAME, &step.label());
    annotated(step, message)
}

fn instant(mark: &Mark, track_uuid: u64) -> Message {
    let level = match level(mark) {
        crate::events::record::Level::Error => "error",
        crate::events::record::Level::Warn => "warn",
        crate::events::record::Level::Info => "info",
        crate::events::record::Level::Debug | crate::events::record::Level::Trace => "debug",
    };
    let message = track_event(INSTANT, track_uuid)
        .text(event::CATEGORIES, mark.side.name())
        .text(event::CATEGORIES, level)
        .text(event::NAME, &mark.name)
        .message(event::DEBUG_ANNOTATIONS, annotation("text", &mark.text));
    mark.facts().fold(message, |message, (key, value)| message.message(event::DEBUG_ANNOTATIONS, annotation(&key, &value)))
}

/// The pieces of the critical path, one after another.
fn critical(timeline: &Waterfall, track_uuid: u64) -> Vec<(u64, u8, Message)> {
    let mut events = Vec::new();
    for piece in &timeline.path {
        let Some(step) = piece.step.and_then(|step| timeline.steps.get(step)) else { continue };
        let (begin_ns, end_ns) = (piece.begin_ns, piece.begin_ns.saturating_add(piece.took_ns));
        let gpu = step.gpu.and_then(|gpu| gpu.index).map(|index| format!(" of GPU {index}")).unwrap_or_default();
        let name = format!("{}{gpu}", step.label());
        let begin = track_event(SLICE_BEGIN, track_uuid).text(event::CATEGORIES, "critical").text(event::NAME, &name);
        events.push((begin_ns, 1, begin));
        // What is open goes on.
        if step.end_ns.is_some() {
            events.push((end_ns, 0, track_event(SLICE_END, track_uuid)));
        }
    }
    events
}

/// How many GPUs there are of which this event has been seen.
fn count(timeline: &Waterfall, name: &str, track_uuid: u64) -> Vec<(u64, u8, Message)> {
    let mut seen = std::collections::HashSet::new();
    let value = |count: usize| track_event(COUNTER, track_uuid).uint(event::COUNTER_VALUE, count as u64);
    let mut events = vec![(0, 2, value(0))];
    for mark in timeline.marks.iter().filter(|mark| mark.name == name) {
        if mark.gpu.is_some_and(|gpu| seen.insert(gpu.address)) {
            events.push((mark.at_ns, 2, value(seen.len())));
        }
    }
    events
}
