//! Merges all files of one boot: each is read by its format, put on one clock, and written as
//! records.

use super::bpftrace;
use super::bpftrace::Trace;
use super::choose;
use super::choose::Source;
use super::clocks::{Clocks, Placed};
use super::derive;
use super::derive::{Derived, Draft, Said};
use super::detect;
use super::draft_writer;
use super::draft_writer::Whole;
use super::gpu_enablings::{Steps, in_time};
use super::import_report;
use super::import_report::Report;
use super::item::{Fact, Item, MAX_STAMP_NS, Skip, Stamp};
use super::log_files::Input;
use super::pins;
use super::pins::{Region, Sum};
use super::{console_lines, ftrace, journal_lines, pod};
use crate::events::catalogue::logged as names;
use crate::events::record::Kind;
use crate::host::data::boot_file::BootFile;
use crate::host::data::imported_record::Format;
use crate::host::data::text::printable;
use crate::host::data::units::{histogram, size};
use anyhow::{Context, Result, bail};
use serde_json::{Map, Value, json};

/// The earliest time before the guest's kernel that is believed: a pod may wait for a node for
/// long, but not for a month.
const MAX_BEFORE_NS: i64 = 30 * 24 * 3600 * 1_000_000_000;
/// A trace with a larger error in its times is placed by its effects, if those are more exact.
const BADLY_NS: u64 = 10_000_000;

/// Reads one file.
pub fn read(name: &str, mut input: Input, format: Option<Format>) -> Result<Source> {
    let format = match format {
        Some(format) => format,
        None => {
            let head = input.head()?;
            detect::detect(&head).context("no line of it is of a known format: name the format with --format (see --help)")?
        }
    };
    let mut source = Source { name: name.to_string(), format, count: Default::default(), logs: vec![], trace: None, stream: None };
    match format {
        Format::Journal => (source.logs, source.count) = journal_lines::read(input)?,
        Format::Console => (source.logs, source.count) = console_lines::read(input)?,
        Format::Pod => (source.logs, source.count) = pod::read(input)?,
        Format::Bpftrace => source.take_trace(bpftrace::read(input)?),
        Format::Ftrace => source.take_trace(ftrace::read(input)?),
        Format::Stream => {
            let stream = BootFile::read(input.into_reader())?;
            let known = stream.records.len() + stream.host.len() + usize::from(stream.header.is_some());
            source.count.recognised = known as u64;
            source.count.lines = known as u64 + stream.damaged;
            source.count.skip_many(Skip::NotOfTheFormat, stream.damaged);
            source.stream = Some(stream);
        }
    }
    if source.count.recognised == 0 {
        let skipped: Vec<String> = source.count.skipped.iter().map(|(why, n)| format!("{n} {}", why.text())).collect();
        bail!("nothing in it was recognised as {format}: {}", skipped.join(", "));
    }
    Ok(source)
}

impl Source {
    fn take_trace(&mut self, (trace, count): (Trace, crate::host::tools::import::item::Count)) {
        (self.trace, self.count) = (Some(trace), count);
    }
}

/// A trace with its regions.
struct Traced {
    source: usize,
    trace: Trace,
    regions: Vec<Region>,
    sum: Sum,
    left_out: u64,
}

/// Merges all sources into one boot: the report, and the file's text.
pub fn import(mut sources: Vec<Source>, boot: Option<usize>) -> Result<(Report, String)> {
    if sources.iter().filter(|s| s.stream.is_some()).count() > 1 {
        bail!("more than one event stream: an import is about one boot");
    }
    choose::choose(&mut sources, boot)?;
    choose::without_repetition(&mut sources);
    let stream = sources.iter_mut().find_map(|s| s.stream.take());
    let traced: Vec<Traced> = sources.iter_mut().enumerate().filter_map(|(n, s)| Some(regions(n, s.trace.take()?))).collect();

    // Keep the console's items in the order of their file: the order relates clocks.
    let all: Vec<(usize, Item)> = sources
        .iter_mut()
        .enumerate()
        .flat_map(|(n, s)| s.logs.drain(..).flat_map(|log| log.items).map(move |i| (n, i)).collect::<Vec<_>>())
        .collect();
    let items: Vec<&Item> = all.iter().map(|(_, item)| item).collect();
    let mut clocks = Clocks::new(&items, stream.as_ref());
    let first_call = traced.iter().flat_map(|t| &t.trace.calls).filter_map(|c| c.at_ns).min();
    if let (true, None, Some(first)) = (items.is_empty(), &stream, first_call) {
        clocks.trace_alone(first);
    }
    let mut placed = Vec::new();
    for (source, item) in &all {
        match clocks.place(item.stamp) {
            Some(at) if (-MAX_BEFORE_NS..=MAX_STAMP_NS).contains(&at.at_ns) => placed.push((at, item)),
            at => {
                if let Some(source) = sources.get_mut(*source) {
                    source.count.skip(if at.is_some() { Skip::AbsurdStamp } else { Skip::Unplaceable });
                    source.count.recognised = source.count.recognised.saturating_sub(1);
                }
            }
        }
    }
    let placed = in_time(placed);
    let version = choose::init_version(items.iter().copied());
    let said = if stream.is_some() || version.is_some() { Said::OfInit } else { Said::OfKernel };
    let named = items.iter().filter_map(|i| if let Fact::Init(line) = &i.fact { line.gpu } else { None });
    let steps = Steps::new(&placed, named);
    let mut derived = derive::derive(&placed, &steps, said);

    let too_large = |stream: &BootFile| stream.too_large.some().map(|too_large| too_large.sentence());
    let mut notes: Vec<String> = stream.iter().filter_map(too_large).collect();
    let mut traced = traced;
    for traced in &mut traced {
        notes.extend(traced.trace.notes.iter().cloned());
        if first_call.is_some() && !items.is_empty() {
            relate(&mut clocks, &steps, traced, &mut notes);
        }
        if traced.sum.threads > 1 {
            let threads = traced.sum.threads;
            notes.push(format!("the trace names {threads} threads and no process: calls of other VMs, if there were any, are in the sums"));
        }
        if traced.sum.processes > 1 {
            notes.push(format!("the trace has calls of {} processes: those of other VMs are in the sums", traced.sum.processes));
        }
        trace_drafts(&mut derived, traced, &clocks, &steps, sources.get(traced.source).map_or(Format::Bpftrace, |s| s.format));
    }
    derived.drafts.sort_by_key(|draft| draft.at_ns);
    if derived.drafts.is_empty() && stream.is_none() {
        bail!("nothing in these files can be placed on a clock: {}", unplaceable(&sources));
    }
    let whole = Whole {
        stream: stream.as_ref(),
        drafts: &derived.drafts,
        version: version.as_deref(),
        release: derived.release.as_deref(),
        imported: import_report::imported(&sources, &clocks, &notes),
        sample: clocks.sample(),
    };
    let (boot_id, text) = draft_writer::text(&whole);
    let records = derived.drafts.len() + stream.as_ref().map_or(0, |s| s.records.len());
    let mut sums: Vec<(usize, Sum)> = traced.into_iter().map(|t| (t.source, t.sum)).collect();
    let files = sources.into_iter().enumerate().map(|(n, source)| {
        let trace = sums.iter().position(|(of, _)| *of == n).map(|at| sums.swap_remove(at).1);
        import_report::File { file: source.name, format: source.format, count: source.count, trace }
    });
    let files = files.collect();
    Ok((Report { boot_id, records, zero: clocks.zero.clone(), output: None, files, clocks: import_report::clocks(&clocks), notes }, text))
}

fn unplaceable(sources: &[Source]) -> String {
    let names: Vec<String> = sources.iter().map(|s| format!("{} ({})", printable(&s.name), s.format)).collect();
    format!("{}; give the guest's console log or containerd's journal too", names.join(", "))
}

fn regions(source: usize, trace: Trace) -> Traced {
    let (regions, sum) = pins::regions(&trace.calls);
    let (regions, left_out) = pins::worth_a_row(regions);
    Traced { source, trace, regions, sum, left_out }
}

/// Relates a trace, whose clock is its own or known badly, by its calls' effects in the guest.
fn relate(clocks: &mut Clocks, steps: &Steps, traced: &mut Traced, notes: &mut Vec<String>) {
    if traced.trace.wall && traced.trace.error_ns < BADLY_NS {
        return;
    }
    let timed: Vec<(i64, Region)> = traced.regions.iter().filter_map(|r| Some((r.at_ns?, r.clone()))).collect();
    let Some((offset, pairs)) = steps.offset_of(&timed) else {
        if !traced.trace.wall {
            notes.push(
                "the trace's clock is not the wall clock, and its calls do not match the enabling of the GPUs: only its sums are used"
                    .into(),
            );
        }
        return;
    };
    if traced.trace.wall {
        // Accept the offset only if the wall clock agrees, as well as it is known.
        let agrees = timed.first().and_then(|(at, _)| {
            let wall = clocks.place(Stamp::Host(*at))?;
            let bound = wall.error_ns.saturating_add(traced.trace.error_ns).saturating_add(offset.error_ns);
            Some(at.saturating_add(offset.ns).abs_diff(wall.at_ns) <= bound)
        });
        if agrees != Some(true) {
            return;
        }
        (traced.trace.wall, traced.trace.error_ns) = (false, 0);
    }
    clocks.trace_is(offset, format!("{pairs} call(s) of a BAR's length beside the enabling of the GPUs"));
}

fn trace_drafts(derived: &mut Derived, traced: &Traced, clocks: &Clocks, steps: &Steps, format: Format) {
    let place = |at: i64| {
        let placed = clocks.place(if traced.trace.wall { Stamp::Host(at) } else { Stamp::Trace(at) })?;
        let placed = Placed { error_ns: placed.error_ns.saturating_add(traced.trace.error_ns), ..placed };
        (-MAX_BEFORE_NS..=MAX_STAMP_NS).contains(&placed.at_ns).then_some(placed)
    };
    let draft = |placed, kind, name, line| Draft::new(placed, kind, name, format, line);
    let mut per_gpu: std::collections::BTreeMap<String, u64> = Default::default();
    let mut last = None;
    for region in &traced.regions {
        let Some(placed) = region.at_ns.and_then(place) else { continue };
        let end = region.end_ns.and_then(place).filter(|end| end.at_ns >= placed.at_ns);
        let owner = steps.owner(region, placed);
        // A boot's file begins at 0: a call that began before has its duration as a field, not as
        // two records.
        let whole = end.filter(|_| placed.at_ns >= 0);
        let span = derived.spans;
        let mut begin = draft(placed, if whole.is_some() { Kind::Begin } else { Kind::Event }, names::VFIO_PIN, region.line);
        begin.gpu = owner.map(|(gpu, _)| gpu);
        if region.bytes > 0 {
            begin.fields.insert("size".into(), size(region.bytes).into());
        }
        begin.fields.insert("calls".into(), region.calls.into());
        begin.fields.insert("in_calls_ms".into(), (region.took_ns / 1_000_000).into());
        if let Some((gpu, bar)) = owner {
            begin.fields.insert("bar".into(), bar.into());
            let sum = per_gpu.entry(gpu.to_string()).or_default();
            *sum = sum.saturating_add(region.took_ns);
        }
        if let Some(end) = whole {
            derived.spans += 1;
            begin.span = Some(span);
            let mut over = draft(end, Kind::End, names::VFIO_PIN, region.line);
            (over.span, over.gpu) = (Some(span), begin.gpu);
            derived.drafts.push(over);
        }
        derived.drafts.push(begin);
        last = last.max(end.map(|end| (end.at_ns, end.error_ns, region.line)));
    }
    // Place the sums at the trace's last row; without any time, at 0.
    let (at_ns, error_ns, line) =
        last.filter(|(at, ..)| *at >= 0).unwrap_or((0, traced.trace.error_ns, traced.trace.calls.first().map_or(1, |c| c.line)));
    let at = Placed { at_ns, error_ns };
    if !traced.trace.calls.is_empty() {
        let mut sum = draft(at, Kind::Event, names::VFIO_PINS, line);
        sum.fields = sum_fields(&traced.sum, traced.left_out, &per_gpu);
        derived.drafts.push(sum);
    }
    for (map, buckets) in &traced.trace.histograms {
        let mut histogram = draft(at, Kind::Event, names::VFIO_HISTOGRAM, line);
        histogram.fields.insert("map".into(), map.clone().into());
        let shown: Vec<&str> = buckets.iter().map(String::as_str).filter(|b| !b.ends_with(" 0")).collect();
        histogram.fields.insert("buckets".into(), shown.join(", ").into());
        derived.drafts.push(histogram);
    }
}

fn sum_fields(sum: &Sum, left_out: u64, per_gpu: &std::collections::BTreeMap<String, u64>) -> Map<String, Value> {
    let mut fields = Map::new();
    let mut put = |key: &str, value: Value| drop(fields.insert(key.to_string(), value));
    put("calls", sum.calls.into());
    put("regions", sum.regions.into());
    put("took_ms", (sum.took_ns / 1_000_000).into());
    if let Some(bytes) = sum.bytes {
        put("bytes", bytes.into());
    }
    if !sum.sizes.is_empty() {
        put("pages_a_call", histogram(&sum.sizes).into());
    } else if !sum.durations_us.is_empty() {
        put("us_a_call", histogram(&sum.durations_us).into());
    }
    if left_out > 0 {
        put("small_regions", left_out.into());
    }
    if !per_gpu.is_empty() {
        let text = per_gpu.iter().map(|(gpu, ns)| format!("{gpu}: {}", ns / 1_000_000)).collect::<Vec<_>>().join(", ");
        put("ms_a_gpu", json!(text));
    }
    fields
}
