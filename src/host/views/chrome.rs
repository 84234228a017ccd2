//! `--chrome`: the Trace Event Format in its JSON object form, for chrome://tracing, Perfetto, Speedscope and other readers of it.
//!
//! One thread per row of a lane, because readers nest what overlaps in one thread. A step that never ended is a `B` without `E`, which readers
//! draw as unfinished. Times are µs on the guest's boot clock.

use super::rows::Tone;
use super::waterfall::{Mark, Step, Waterfall, level};
use serde_json::{Map, Value, json};
use std::io::{self, Write};

/// The one process: the guest.
const PID: u64 = 1;
/// Thread ids of one lane start at a multiple of this, so that they do not depend on how many rows other lanes have.
const LANE_THREADS: usize = 1000;

/// The whole file.
pub fn write(timeline: &Waterfall, out: &mut dyn Write) -> io::Result<()> {
    let mut other = Map::new();
    let mut say = |key: &str, value: Option<Value>| value.map(|value| other.insert(key.to_string(), value));
    say("boot_id", timeline.boot.boot_id.clone().map(Value::from));
    say("kata_gpu_init", timeline.boot.version.as_deref().map(|v| Value::from(crate::host::data::text::printable(v))));
    say("kernel", timeline.boot.kernel.as_deref().map(|k| Value::from(crate::host::data::text::printable(k))));
    if let Some(sample) = timeline.sample() {
        say("clock", Some(json!({ "offset_ns": sample.offset_ns, "error_ns": sample.error_ns, "boottime_ns": sample.boottime_ns })));
    }
    writeln!(out, "{{\"displayTimeUnit\":\"ms\",\"otherData\":{},\"traceEvents\":[", Value::Object(other))?;
    // One event per line: this file is looked at with grep, too. Each is written before the next is made.
    let mut separator = "";
    let mut event = |event: Value| {
        let written = write!(out, "{separator}{event}");
        separator = ",\n";
        written
    };
    names(timeline).into_iter().try_for_each(&mut event)?;
    timeline.steps.iter().map(step).try_for_each(&mut event)?;
    timeline.marks.iter().map(mark).try_for_each(&mut event)?;
    flows(timeline, &mut event)?;
    out.write_all(b"\n]}\n")
}

fn thread(lane: usize, row: usize) -> usize {
    (lane + 1) * LANE_THREADS + row.min(LANE_THREADS - 1)
}

fn names(timeline: &Waterfall) -> Vec<Value> {
    let title = format!("boot {}", timeline.boot_id());
    let mut events = vec![json!({ "ph": "M", "name": "process_name", "pid": PID, "args": { "name": title } })];
    for (i, lane) in timeline.lanes.iter().enumerate() {
        for row in 0..lane.rows.min(LANE_THREADS) {
            let tid = thread(i, row);
            events.push(json!({ "ph": "M", "name": "thread_name", "pid": PID, "tid": tid, "args": { "name": lane.name } }));
            events.push(json!({ "ph": "M", "name": "thread_sort_index", "pid": PID, "tid": tid, "args": { "sort_index": tid } }));
        }
    }
    events
}

fn microseconds(ns: u64) -> f64 {
    ns as f64 / 1000.0
}

fn step(step: &Step) -> Value {
    let mut args: Map<String, Value> = step.fields.iter().map(|(key, value)| (key.clone(), Value::from(value.as_str()))).collect();
    if let Some(gpu) = step.gpu {
        args.insert("gpu".to_string(), gpu.address.to_string().into());
        gpu.index.map(|index| args.insert("gpu_index".to_string(), index.into()));
    }
    let error = step.error.clone().map(Value::from);
    error.map(|error| args.insert("error".to_string(), error));
    if step.begin_lost {
        args.insert("begin_lost".to_string(), true.into());
    }
    if step.critical {
        args.insert("critical".to_string(), true.into());
    }
    let mut event = json!({
        "name": step.label(), "cat": step.side.name(), "pid": PID, "tid": thread(step.lane, step.row),
        "ts": microseconds(step.begin_ns), "ph": "B", "args": args,
    });
    if let Some(end_ns) = step.end_ns {
        event["ph"] = "X".into();
        event["dur"] = microseconds(end_ns.saturating_sub(step.begin_ns)).into();
    }
    // A colour of the readers' fixed palette.
    if step.error.is_some() {
        event["cname"] = "terrible".into();
    }
    event
}

fn mark(mark: &Mark) -> Value {
    let mut args: Map<String, Value> = mark.facts().map(|(key, value)| (key, Value::from(value))).collect();
    args.insert("text".to_string(), mark.text.as_str().into());
    args.insert("level".to_string(), json!(level(mark)));
    let mut event = json!({
        "name": mark.name, "cat": mark.side.name(), "ph": "i", "s": "t", "pid": PID, "tid": thread(mark.lane, 0),
        "ts": microseconds(mark.at_ns), "args": args,
    });
    if mark.tone == Tone::Error {
        event["cname"] = "terrible".into();
    }
    event
}

/// An arrow per `after` edge, from the end of the one to the beginning of the other.
fn flows(timeline: &Waterfall, event: &mut impl FnMut(Value) -> io::Result<()>) -> io::Result<()> {
    let by_id: std::collections::HashMap<u64, &Step> = timeline.steps.iter().filter_map(|s| Some((s.id?, s))).collect();
    for to in &timeline.steps {
        for from in to.after.iter().filter_map(|id| by_id.get(id)) {
            let Some(end_ns) = from.end_ns else { continue };
            let id = format!("{}-{}", from.id.unwrap_or(0), to.id.unwrap_or(0));
            let point = |ph: &str, step: &Step, ts: u64| {
                json!({ "name": "after", "cat": "after", "ph": ph, "bp": "e", "id": id, "pid": PID,
                        "tid": thread(step.lane, step.row), "ts": microseconds(ts) })
            };
            event(point("s", from, end_ns))?;
            event(point("f", to, to.begin_ns))?;
        }
    }
    Ok(())
}
