//! Choice of one boot: files may hold more than one, and an import is about one. Items of other
//! boots are counted.

use super::agent_lines;
use super::item::{Count, Fact, Item, Log, Skip, Stamp};
use super::kernel_lines;
use super::kernel_lines::Meaning;
use crate::data::boot_file::BootFile;
use crate::data::compact_record::Field;
use crate::data::imported_record::Format;
use crate::data::text::{printable, wall_clock};
use anyhow::{Result, bail};
use kata_gpu_wire::catalogue::logged as names;
use serde_json::Value;

/// Boots that are listed one by one.
const MAX_LISTED: usize = 40;

/// A file, read.
#[derive(Debug)]
pub struct Source {
    pub name: String,
    pub format: Format,
    pub count: Count,
    pub logs: Vec<Log>,
    pub stream: Option<BootFile>,
}

/// Removes everything but the chosen boot from the sources. `wanted`: `--boot N`, from 1.
pub fn choose(sources: &mut [Source], wanted: Option<usize>) -> Result<()> {
    for source in sources.iter_mut().filter(|s| s.format == Format::Journal) {
        // Sandboxes that never showed a console are other runtimes', or not Kata's GPU guests.
        if source.logs.iter().any(|log| log.items.iter().any(of_guest)) {
            source.count.skip_many(
                Skip::OtherBoot,
                others(&source.logs, |log| log.items.iter().any(of_guest)),
            );
            source.logs.retain(|log| log.items.iter().any(of_guest));
        }
    }
    let several: Vec<usize> = sources
        .iter()
        .enumerate()
        .filter(|(_, s)| s.logs.len() > 1 && s.format != Format::Pod)
        .map(|(i, _)| i)
        .collect();
    match (several.as_slice(), wanted) {
        ([], None | Some(1)) => {}
        ([], Some(n)) => bail!("there is no boot {n}: these files hold one"),
        ([at], wanted) => {
            let Some(source) = sources.get_mut(*at) else {
                bail!("no such file")
            };
            let Some(n) = wanted else {
                bail!(
                    "{} holds {} boots: choose one with --boot N\n{}",
                    printable(&source.name),
                    source.logs.len(),
                    list(&source.logs)
                );
            };
            let chosen = n.checked_sub(1).filter(|i| *i < source.logs.len());
            let Some(chosen) = chosen else {
                bail!(
                    "{} has no boot {n}, it holds {}:\n{}",
                    printable(&source.name),
                    source.logs.len(),
                    list(&source.logs)
                );
            };
            keep_one(source, chosen);
        }
        (_, _) => bail!(
            "{} of these files hold several boots each: import them one at a time with --boot N",
            several.len()
        ),
    }
    choose_pod(sources)
}

/// Removes every other boot, and counts its items.
fn keep_one(source: &mut Source, chosen: usize) {
    let kept = source.logs.swap_remove(chosen);
    let dropped = source.logs.iter().map(|log| log.items.len() as u64).sum();
    source.count.skip_many(Skip::OtherBoot, dropped);
    source.count.recognised = source.count.recognised.saturating_sub(dropped);
    source.logs = vec![kept];
}

/// Chooses the pod of the chosen sandbox among several.
fn choose_pod(sources: &mut [Source]) -> Result<()> {
    let ready = |item: &Item| match &item.fact {
        Fact::Plain {
            name: names::SANDBOX_READY,
            fields,
            ..
        } => fields
            .get("pod")
            .and_then(Value::as_str)
            .map(str::to_string),
        _ => None,
    };
    let wanted = sources
        .iter()
        .filter(|s| s.format == Format::Journal)
        .flat_map(|s| &s.logs)
        .flat_map(|log| &log.items)
        .find_map(ready);
    for source in sources
        .iter_mut()
        .filter(|s| s.format == Format::Pod && s.logs.len() > 1)
    {
        let chosen = source
            .logs
            .iter()
            .position(|log| wanted.is_some() && pod_of(log) == wanted.as_deref());
        let Some(chosen) = chosen else {
            bail!(
                "{} holds {} pods, and no log here shows which one this is: give one (kubectl get pod NAME -o json)",
                printable(&source.name),
                source.logs.len()
            );
        };
        keep_one(source, chosen);
    }
    Ok(())
}

fn pod_of(log: &Log) -> Option<&str> {
    log.items.iter().find_map(|item| match &item.fact {
        Fact::Plain {
            name: names::POD_CREATED,
            fields,
            ..
        } => fields.get("pod").and_then(Value::as_str),
        _ => None,
    })
}

fn of_guest(item: &Item) -> bool {
    matches!(
        item.stamp,
        Stamp::Kernel(_) | Stamp::Boot(_) | Stamp::Guest(_)
    )
}

fn others(logs: &[Log], keep: impl Fn(&Log) -> bool) -> u64 {
    logs.iter()
        .filter(|log| !keep(log))
        .map(|log| log.items.len() as u64)
        .sum()
}

/// A line per boot.
fn list(logs: &[Log]) -> String {
    let mut lines: Vec<String> = logs
        .iter()
        .take(MAX_LISTED)
        .enumerate()
        .map(|(i, log)| format!("  {:>3}  {}", i + 1, describe(log)))
        .collect();
    if logs.len() > MAX_LISTED {
        lines.push(format!("  and {} more", logs.len() - MAX_LISTED));
    }
    lines.join("\n")
}

fn describe(log: &Log) -> String {
    let mut words = Vec::new();
    if let Some(sandbox) = &log.sandbox {
        words.push(format!(
            "sandbox {}",
            printable(sandbox.get(..12).unwrap_or(sandbox))
        ));
    }
    let release = log.items.iter().find_map(|item| {
        let Fact::Kernel(text) = &item.fact else {
            return None;
        };
        if let Some(Meaning::Banner { release }) = kernel_lines::meaning(text) {
            Some(release)
        } else {
            None
        }
    });
    words.extend(release.map(|r| format!("kernel {}", printable(&r))));
    let wall = log.items.iter().find_map(|item| {
        item.read_ns.or(if let Stamp::Guest(ns) = item.stamp {
            Some(ns)
        } else {
            None
        })
    });
    words.extend(wall.map(wall_clock));
    let lines = log.items.iter().map(|item| item.line);
    if let (Some(first), Some(last)) = (lines.clone().min(), lines.max()) {
        words.push(format!("lines {first}-{last}"));
    }
    words.join(", ")
}

/// Version of our init in these items.
pub fn init_version<'a>(items: impl Iterator<Item = &'a Item>) -> Option<String> {
    items.into_iter().find_map(|item| {
        if let Fact::Init(line) = &item.fact {
            Some(line.version.clone())
        } else {
            None
        }
    })
}

/// Removes facts that several files have (the journal carries the console) or that the stream has,
/// and counts them.
pub fn without_repetition(sources: &mut [Source]) {
    let stream = sources.iter().any(|s| s.stream.is_some());
    let in_stream: std::collections::HashSet<(i64, String)> = sources
        .iter()
        .filter_map(|s| s.stream.as_ref())
        .flat_map(|s| &s.records)
        .filter_map(|r| {
            let us = r.fields.get("printk_us").and_then(Field::as_i64)?;
            Some((
                us.checked_mul(1000)?,
                r.fields.get("text").and_then(Field::as_str)?.to_string(),
            ))
        })
        .collect();
    let mut seen = std::collections::HashSet::new();
    // The journal first: its lines also state when the host read them.
    let mut order: Vec<&mut Source> = sources.iter_mut().collect();
    order.sort_by_key(|s| s.format != Format::Journal);
    for source in order {
        let mut of_this = std::collections::HashSet::new();
        for log in &mut source.logs {
            let count = &mut source.count;
            log.items.retain(|item| {
                let repeated = match (&item.fact, item.stamp) {
                    (Fact::Init(_), _) if stream => true,
                    (Fact::Kernel(text), Stamp::Kernel(ns))
                        if in_stream.contains(&(ns, text.clone())) =>
                    {
                        true
                    }
                    (Fact::Plain { .. }, _) => false,
                    (fact, stamp) => {
                        let key = (stamp, agent_lines::fingerprint(fact));
                        let repeated = seen.contains(&key);
                        of_this.insert(key);
                        repeated
                    }
                };
                if repeated {
                    count.skip(Skip::AlreadyThere);
                    count.recognised = count.recognised.saturating_sub(1);
                }
                !repeated
            });
        }
        seen.extend(of_this);
    }
}
