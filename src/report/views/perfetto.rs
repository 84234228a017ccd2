//! `--perfetto`: a trace of Perfetto's own format, for ui.perfetto.dev and trace_processor.
//!
//! A track per owner and per GPU below one track for the boot; a lane with several rows has a child
//! track of its name per row, since slices of one track must nest. Timestamps are the host's
//! REALTIME, which is the trace's primary clock: the guest's BOOTTIME has no times for what VMM and
//! firmware did. Clock snapshots put it beside. Where no clock sample places the boot, timestamps
//! are BOOTTIME, and VMM and firmware are instants at 0. Steps are slices, `after` edges flows, the
//! critical path a track of its own, usable and published GPUs counters. A step that never ended
//! has no end event, which the viewer draws as unfinished.

mod protos;

use super::waterfall::{Bar, Mark, Waterfall, level};
use kata_gpu_wire::names;
use prost::Message;
use protos::{
    Clock, ClockSnapshot, CounterDescriptor, DebugAnnotation, TracePacket, TrackDescriptor,
    TrackEvent, Type,
};
use std::collections::{HashMap, HashSet};
use std::io::{self, Write};

/// BuiltinClock.
const REALTIME: u32 = 1;
const BOOTTIME: u32 = 6;
/// TrackDescriptor.ChildTracksOrdering.EXPLICIT: by rank.
const EXPLICIT: u32 = 3;
/// CounterDescriptor.Unit.UNIT_COUNT.
const UNIT_COUNT: u32 = 2;
/// TracePacket.SequenceFlags.SEQ_INCREMENTAL_STATE_CLEARED: nothing stands before this packet.
const STATE_CLEARED: u32 = 1;
/// All packets are one writer's.
const SEQUENCE: u32 = 1;
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
    let mut trace = Trace {
        out,
        id: track_base(timeline),
        clock: TraceClock::of(timeline),
    };
    trace.clocks(timeline)?;
    trace.tracks(timeline)?;
    // (time, what ends before what begins, order): readers want a track's events nested, whatever
    // has the same time.
    let mut events: Vec<(u64, u8, Event)> = Vec::new();
    let at = |at_ns| trace.clock.at(at_ns);
    for (i, step) in timeline.steps.iter().enumerate() {
        let (begin, end) = (
            at(step.begin_ns),
            step.end_ns.filter(|_| !step.begin_lost).map(at),
        );
        match end {
            // A step without length, or whose beginning was lost, is an instant: its end would come
            // before its beginning.
            Some(end) if end > begin => events.extend([
                (begin, 1, Event::Begin(i, step)),
                (end, 0, Event::End(step)),
            ]),
            None if !step.begin_lost => events.push((begin, 1, Event::Begin(i, step))),
            _ => events.push((begin, 1, Event::Instant(step))),
        }
    }
    events.extend(
        timeline
            .marks
            .iter()
            .map(|mark| (at(mark.at_ns), 2, Event::Mark(mark))),
    );
    critical(timeline, &trace.clock, &mut events);
    for (counter, name) in [
        (PUBLISHED, names::GPU_PUBLISHED),
        (USABLE, names::GPU_USABLE),
    ] {
        count(timeline, &trace.clock, name, counter, &mut events);
    }
    events.sort_by_key(|(at, order, _)| (*at, *order));
    let flows = flows(timeline);
    for (at, _, event) in events {
        let event = match event {
            Event::Begin(i, step) => slice(step, trace.lane(step.lane, step.row), flows.get(&i)),
            Event::End(step) => track_event(Type::SliceEnd, trace.lane(step.lane, step.row)),
            Event::Instant(step) => slice_as_instant(step, trace.lane(step.lane, step.row)),
            Event::Mark(mark) => instant(mark, trace.lane(mark.lane, 0)),
            Event::PieceBegin(step) => piece(step, trace.id | CRITICAL),
            Event::PieceEnd => track_event(Type::SliceEnd, trace.id | CRITICAL),
            Event::Count(counter, gpus) => TrackEvent {
                counter_value: Some(gpus as i64),
                ..track_event(Type::Counter, trace.id | counter)
            },
        };
        trace.packet(TracePacket {
            timestamp: Some(at),
            timestamp_clock_id: trace.clock.id,
            track_event: Some(event),
            ..TracePacket::default()
        })?;
    }
    Ok(())
}

/// Source of an event, which is made when its turn comes: the texts of all events at once are many
/// times the boot's file.
enum Event<'a> {
    /// The step, and its number.
    Begin(usize, &'a Bar),
    End(&'a Bar),
    Instant(&'a Bar),
    Mark(&'a Mark),
    /// A piece of the critical path, of this step.
    PieceBegin(&'a Bar),
    PieceEnd,
    /// Track of a counter, and the number of GPUs.
    Count(u64, usize),
}

/// Tracks of several boots can be put into one trace: their ids are the boot's.
fn track_base(timeline: &Waterfall) -> u64 {
    let digits: String = timeline
        .boot_id()
        .chars()
        .filter(char::is_ascii_hexdigit)
        .take(8)
        .collect();
    u64::from_str_radix(&digits, 16).unwrap_or(0) << 32
}

/// Clock of the timestamps, and what it shows when the guest's boot clock begins.
struct TraceClock {
    id: u32,
    offset_ns: i64,
}

impl TraceClock {
    fn of(timeline: &Waterfall) -> Self {
        match timeline.sample() {
            Some(sample) => Self {
                id: REALTIME,
                offset_ns: sample.offset_ns,
            },
            None => Self {
                id: BOOTTIME,
                offset_ns: 0,
            },
        }
    }

    /// Timestamp of a time on the guest's boot clock; the nearest one that readers take.
    fn at(&self, at_ns: i64) -> u64 {
        u64::try_from(self.offset_ns.saturating_add(at_ns)).unwrap_or(0)
    }
}

struct Trace<'a> {
    out: &'a mut dyn Write,
    id: u64,
    clock: TraceClock,
}

impl Trace<'_> {
    /// A trace of one packet: traces one after another are one trace.
    fn packet(&mut self, packet: TracePacket) -> io::Result<()> {
        let packet = TracePacket {
            trusted_packet_sequence_id: SEQUENCE,
            ..packet
        };
        self.out.write_all(
            &protos::Trace {
                packet: vec![packet],
            }
            .encode_to_vec(),
        )
    }

    fn lane(&self, lane: usize, row: usize) -> u64 {
        // The lane's track itself for its first row, so that a lane with one row is one track.
        self.id | (FIRST_LANE + lane as u64 + row.min(MAX_ROWS - 1) as u64 * LANES)
    }

    fn clocks(&mut self, timeline: &Waterfall) -> io::Result<()> {
        let clock = |clock_id, ns| Clock {
            clock_id,
            timestamp: Some(ns),
        };
        let mut last = None;
        for sample in &timeline.samples {
            let realtime = sample
                .offset_ns
                .checked_add_unsigned(sample.boottime_ns)
                .and_then(|ns| u64::try_from(ns).ok());
            let Some(realtime) = realtime.filter(|_| sample.boottime_ns <= MAX_TIME) else {
                continue;
            };
            // Readers refuse clocks that go backwards; the samples' bounds overlap where that looks
            // so.
            if last.is_some_and(|(b, r)| sample.boottime_ns <= b || realtime <= r) {
                continue;
            }
            self.snapshot(
                last.is_none(),
                vec![
                    clock(BOOTTIME, sample.boottime_ns),
                    clock(REALTIME, realtime),
                ],
            )?;
            last = Some((sample.boottime_ns, realtime));
        }
        if last.is_none() {
            let mut clocks = vec![clock(BOOTTIME, 0)];
            clocks.extend((self.clock.id == REALTIME).then(|| clock(REALTIME, self.clock.at(0))));
            self.snapshot(true, clocks)?;
        }
        Ok(())
    }

    fn snapshot(&mut self, first: bool, clocks: Vec<Clock>) -> io::Result<()> {
        let snapshot = ClockSnapshot {
            clocks,
            primary_trace_clock: self.clock.id,
        };
        let sequence_flags = if first { STATE_CLEARED } else { 0 };
        self.packet(TracePacket {
            sequence_flags,
            clock_snapshot: Some(snapshot),
            ..TracePacket::default()
        })
    }

    fn tracks(&mut self, timeline: &Waterfall) -> io::Result<()> {
        let id = self.id;
        let child = |uuid: u64, name: &str, rank: usize| TrackDescriptor {
            uuid,
            name: name.to_string(),
            sibling_order_rank: i32::try_from(rank).unwrap_or(i32::MAX),
            parent_uuid: id | BOOT,
            ..TrackDescriptor::default()
        };
        let counter = |uuid: u64, name: &str, rank: usize| TrackDescriptor {
            counter: Some(CounterDescriptor { unit: UNIT_COUNT }),
            ..child(uuid, name, rank)
        };
        let name = format!("boot {}", timeline.boot_id());
        let mut tracks = vec![
            TrackDescriptor {
                uuid: id | BOOT,
                name,
                child_ordering: EXPLICIT,
                ..TrackDescriptor::default()
            },
            child(id | CRITICAL, "critical path", 0),
            counter(id | PUBLISHED, "GPUs published", 1),
            counter(id | USABLE, "GPUs usable", 2),
        ];
        for (i, lane) in timeline.lanes.iter().enumerate() {
            for row in 0..lane.rows.min(MAX_ROWS) {
                tracks.push(child(self.lane(i, row), &lane.name, 3 + i));
            }
        }
        tracks.into_iter().try_for_each(|track| {
            self.packet(TracePacket {
                track_descriptor: Some(track),
                ..TracePacket::default()
            })
        })
    }
}

fn annotation(name: &str, value: &str) -> DebugAnnotation {
    DebugAnnotation {
        name: name.to_string(),
        string_value: Some(value.to_string()),
        ..DebugAnnotation::default()
    }
}

fn number(name: &str, value: u64) -> DebugAnnotation {
    DebugAnnotation {
        name: name.to_string(),
        uint_value: Some(value),
        ..DebugAnnotation::default()
    }
}

fn track_event(kind: Type, track_uuid: u64) -> TrackEvent {
    TrackEvent {
        r#type: Some(kind.into()),
        track_uuid,
        ..TrackEvent::default()
    }
}

/// Fields of a step, without its times.
fn annotations(step: &Bar) -> Vec<DebugAnnotation> {
    let mut annotations: Vec<_> = step
        .fields
        .iter()
        .map(|(key, value)| annotation(key, value))
        .collect();
    if let Some(gpu) = step.gpu {
        annotations.push(annotation("gpu", &gpu.address.to_string()));
        annotations.extend(gpu.index.map(|index| number("gpu_index", index)));
    }
    annotations.extend(step.id.map(|id| number("span", id)));
    annotations.extend(
        step.error
            .as_deref()
            .map(|error| annotation("error", error)),
    );
    annotations.extend(
        step.begin_lost
            .then(|| annotation("lost", "the record of its beginning")),
    );
    annotations
}

/// The two flow lists of a step: those that start here, those that end here.
type Flows = (Vec<u64>, Vec<u64>);

fn flows(timeline: &Waterfall) -> HashMap<usize, Flows> {
    let by_id: HashMap<u64, usize> = timeline
        .steps
        .iter()
        .enumerate()
        .filter_map(|(i, s)| Some((s.id?, i)))
        .collect();
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

fn of_step(step: &Bar, kind: Type, track_uuid: u64) -> TrackEvent {
    TrackEvent {
        categories: vec![step.owner.name().to_string()],
        name: step.label(),
        debug_annotations: annotations(step),
        ..track_event(kind, track_uuid)
    }
}

fn slice(step: &Bar, track_uuid: u64, flows: Option<&Flows>) -> TrackEvent {
    let (flow_ids, terminating_flow_ids) = flows.cloned().unwrap_or_default();
    let mut event = of_step(step, Type::SliceBegin, track_uuid);
    let failed = step.error.as_ref().map(|_| "failed".to_string());
    event.categories.extend(failed);
    TrackEvent {
        flow_ids,
        terminating_flow_ids,
        ..event
    }
}

fn slice_as_instant(step: &Bar, track_uuid: u64) -> TrackEvent {
    let took = step
        .took_ns()
        .filter(|took| *took > 0)
        .map(|took| number("took_ns", took));
    let mut event = of_step(step, Type::Instant, track_uuid);
    event.debug_annotations.extend(took);
    event
}

fn instant(mark: &Mark, track_uuid: u64) -> TrackEvent {
    let facts = mark.facts().map(|(key, value)| annotation(&key, &value));
    TrackEvent {
        categories: vec![mark.owner.name().to_string(), level(mark).to_string()],
        name: mark.name.clone(),
        debug_annotations: [annotation("text", &mark.text)]
            .into_iter()
            .chain(facts)
            .collect(),
        ..track_event(Type::Instant, track_uuid)
    }
}

fn piece(step: &Bar, track_uuid: u64) -> TrackEvent {
    let gpu = step
        .gpu
        .and_then(|gpu| gpu.index)
        .map(|index| format!(" of GPU {index}"))
        .unwrap_or_default();
    TrackEvent {
        categories: vec!["critical".to_string()],
        name: format!("{}{gpu}", step.label()),
        ..track_event(Type::SliceBegin, track_uuid)
    }
}

/// The pieces of the critical path, one after another.
fn critical<'a>(
    timeline: &'a Waterfall,
    clock: &TraceClock,
    events: &mut Vec<(u64, u8, Event<'a>)>,
) {
    for piece in &timeline.path {
        let Some(step) = piece.step.and_then(|step| timeline.steps.get(step)) else {
            continue;
        };
        let (begin, end) = (
            clock.at(piece.begin_ns),
            clock.at(piece.begin_ns.saturating_add_unsigned(piece.took_ns)),
        );
        // An open piece has no end.
        let is_open = step.end_ns.is_none();
        if is_open || end > begin {
            events.push((begin, 1, Event::PieceBegin(step)));
            events.extend((!is_open).then_some((end, 0, Event::PieceEnd)));
        }
    }
}

/// How many GPUs there are of which this event has been seen.
fn count(
    timeline: &Waterfall,
    clock: &TraceClock,
    name: &str,
    counter: u64,
    events: &mut Vec<(u64, u8, Event)>,
) {
    let mut seen = HashSet::new();
    events.push((clock.at(timeline.begin_ns), 2, Event::Count(counter, 0)));
    for mark in timeline.marks.iter().filter(|mark| mark.name == name) {
        if mark.gpu.is_some_and(|gpu| seen.insert(gpu.address)) {
            events.push((clock.at(mark.at_ns), 2, Event::Count(counter, seen.len())));
        }
    }
}
