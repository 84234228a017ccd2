//! Merges all files of one boot: each is read by its format, put on one clock, and written as
//! records.

use super::choose;
use super::choose::Source;
use super::clocks::Clocks;
use super::derive;
use super::derive::Said;
use super::detect;
use super::draft_writer;
use super::draft_writer::Whole;
use super::gpu_enablings::{Steps, in_time};
use super::import_report;
use super::import_report::Report;
use super::item::{Fact, Item, MAX_STAMP_NS, Skip};
use super::log_files::Input;
use super::{console_lines, journal_lines, pod};
use crate::data::boot_file::BootFile;
use crate::data::imported_record::Format;
use crate::data::text::printable;
use anyhow::{Context, Result, bail};

/// The earliest time before the guest's kernel that is believed: a pod may wait for a node for
/// long, but not for a month.
const MAX_BEFORE_NS: i64 = 30 * 24 * 3600 * 1_000_000_000;

/// Reads one file.
pub fn read(name: &str, mut input: Input, format: Option<Format>) -> Result<Source> {
    let format = match format {
        Some(format) => format,
        None => {
            let head = input.head()?;
            detect::detect(&head).context(
                "no line of it is of a known format: name the format with --format (see --help)",
            )?
        }
    };
    let mut source = Source {
        name: name.to_string(),
        format,
        count: Default::default(),
        logs: vec![],
        stream: None,
    };
    match format {
        Format::Journal => (source.logs, source.count) = journal_lines::read(input)?,
        Format::Console => (source.logs, source.count) = console_lines::read(input)?,
        Format::Pod => (source.logs, source.count) = pod::read(input)?,
        Format::Stream => {
            let stream = BootFile::read(input.into_reader())?;
            let known =
                stream.records.len() + stream.host.len() + usize::from(stream.header.is_some());
            source.count.recognised = known as u64;
            source.count.lines = known as u64 + stream.damaged;
            source.count.skip_many(Skip::NotOfTheFormat, stream.damaged);
            source.stream = Some(stream);
        }
    }
    if source.count.recognised == 0 {
        let skipped: Vec<String> = source
            .count
            .skipped
            .iter()
            .map(|(why, n)| format!("{n} {}", why.text()))
            .collect();
        bail!(
            "nothing in it was recognised as {format}: {}",
            skipped.join(", ")
        );
    }
    Ok(source)
}

/// Merges all sources into one boot: the report, and the file's text.
pub fn import(mut sources: Vec<Source>, boot: Option<usize>) -> Result<(Report, String)> {
    if sources.iter().filter(|s| s.stream.is_some()).count() > 1 {
        bail!("more than one event stream: an import is about one boot");
    }
    choose::choose(&mut sources, boot)?;
    choose::without_repetition(&mut sources);
    let stream = sources.iter_mut().find_map(|s| s.stream.take());

    // Keep the console's items in the order of their file: the order relates clocks.
    let all: Vec<(usize, Item)> = sources
        .iter_mut()
        .enumerate()
        .flat_map(|(n, s)| {
            s.logs
                .drain(..)
                .flat_map(|log| log.items)
                .map(move |i| (n, i))
                .collect::<Vec<_>>()
        })
        .collect();
    let items: Vec<&Item> = all.iter().map(|(_, item)| item).collect();
    let clocks = Clocks::new(&items, stream.as_ref());
    let mut placed = Vec::new();
    for (source, item) in &all {
        match clocks.place(item.stamp) {
            Some(at) if (-MAX_BEFORE_NS..=MAX_STAMP_NS).contains(&at.at_ns) => {
                placed.push((at, item))
            }
            at => {
                if let Some(source) = sources.get_mut(*source) {
                    source.count.skip(if at.is_some() {
                        Skip::AbsurdStamp
                    } else {
                        Skip::Unplaceable
                    });
                    source.count.recognised = source.count.recognised.saturating_sub(1);
                }
            }
        }
    }
    let placed = in_time(placed);
    let version = choose::init_version(items.iter().copied());
    let said = if stream.is_some() || version.is_some() {
        Said::OfInit
    } else {
        Said::OfKernel
    };
    let named = items.iter().filter_map(|i| {
        if let Fact::Init(line) = &i.fact {
            line.gpu
        } else {
            None
        }
    });
    let steps = Steps::new(&placed, named);
    let derived = derive::derive(&placed, &steps, said);

    let too_large = |stream: &BootFile| {
        stream
            .too_large
            .some()
            .map(|too_large| too_large.sentence())
    };
    let notes: Vec<String> = stream.iter().filter_map(too_large).collect();
    if derived.drafts.is_empty() && stream.is_none() {
        bail!(
            "nothing in these files can be placed on a clock: {}",
            unplaceable(&sources)
        );
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
    let file = |source: Source| import_report::File {
        file: source.name,
        format: source.format,
        count: source.count,
    };
    let files = sources.into_iter().map(file).collect();
    Ok((
        Report {
            boot_id,
            records,
            zero: clocks.zero.clone(),
            output: None,
            files,
            clocks: import_report::clocks(&clocks),
            notes,
        },
        text,
    ))
}

fn unplaceable(sources: &[Source]) -> String {
    let names: Vec<String> = sources
        .iter()
        .map(|s| format!("{} ({})", printable(&s.name), s.format))
        .collect();
    format!(
        "{}; give the guest's console log or containerd's journal too",
        names.join(", ")
    )
}
