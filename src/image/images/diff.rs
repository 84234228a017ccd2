//! `image diff`: compares the guest roots of two images by path, as the kernel unpacks them. The
//! order of entries, the form of an image, and inode numbers make no difference.

use super::entry_text::{escaped, permissions, table};
use super::image::Content;
use super::newc::Kind;
use super::unpacked_root::{Id, ROOT, Tree, What};
use anyhow::{Context, Result};
use kata_gpu_report::data::text::{Ink, Screen, hex};
use kata_gpu_report::terminal::progress_line::ByteProgress;
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// Hexadecimal digits of a hash in the text output.
const SHORT: usize = 12;

/// A path that differs, with its change.
#[derive(Debug)]
pub struct Difference {
    pub path: Vec<u8>,
    pub what: Change,
}

#[derive(Debug)]
pub enum Change {
    Added(Facts),
    Removed(Facts),
    /// Changed properties: name, before, after.
    Changed(Vec<(&'static str, String, String)>),
}

/// Facts about a path except its content.
#[derive(Clone, Debug)]
pub struct Facts {
    kind: Kind,
    mode: u32,
    bytes: u64,
}

/// All differences, by path. Times are compared if `with_times`.
pub fn differences(a: &Tree, b: &Tree, with_times: bool) -> Result<Vec<Difference>> {
    let mut all: BTreeMap<Vec<u8>, (Option<Id>, Option<Id>)> = BTreeMap::new();
    let both = |tree: &Tree| {
        [ROOT]
            .into_iter()
            .chain(tree.below(ROOT))
            .map(|id| (tree.path(id), id))
            .collect::<Vec<_>>()
    };
    both(a)
        .into_iter()
        .for_each(|(path, id)| all.entry(path).or_default().0 = Some(id));
    both(b)
        .into_iter()
        .for_each(|(path, id)| all.entry(path).or_default().1 = Some(id));
    let bytes = all
        .values()
        .filter_map(|(a_id, _)| a.content((*a_id)?))
        .map(|c| c.length)
        .sum();
    let mut progress = ByteProgress::new("comparing", bytes);
    let mut differences = Vec::new();
    for (path, ids) in all {
        let what = match ids {
            (Some(a_id), Some(b_id)) => {
                let changes = changes((a, a_id), (b, b_id), with_times, &mut progress)
                    .with_context(|| format!("compare {}", escaped(&path)))?;
                if changes.is_empty() {
                    continue;
                }
                Change::Changed(changes)
            }
            (Some(id), None) => Change::Removed(facts(a, id)),
            (None, Some(id)) => Change::Added(facts(b, id)),
            (None, None) => continue,
        };
        differences.push(Difference { path, what });
    }
    Ok(differences)
}

fn facts(tree: &Tree, id: Id) -> Facts {
    Facts {
        kind: tree.kind(id),
        mode: tree.meta(id).mode,
        bytes: tree.content(id).map_or(0, |c| c.length),
    }
}

fn changes(
    a: (&Tree, Id),
    b: (&Tree, Id),
    with_times: bool,
    progress: &mut ByteProgress,
) -> Result<Vec<(&'static str, String, String)>> {
    let mut changes = Vec::new();
    let mut compare = |what, before: String, after: String| {
        if before != after {
            changes.push((what, before, after));
        }
    };
    let kinds = (a.0.kind(a.1), b.0.kind(b.1));
    let (before, after) = (a.0.meta(a.1), b.0.meta(b.1));
    compare("kind", kinds.0.name().into(), kinds.1.name().into());
    // A link's permissions have no effect.
    if kinds != (Kind::Link, Kind::Link) {
        compare("mode", permissions(before.mode), permissions(after.mode));
    }
    compare(
        "owner",
        format!("{}/{}", before.uid, before.gid),
        format!("{}/{}", after.uid, after.gid),
    );
    if with_times {
        compare("mtime", before.mtime.to_string(), after.mtime.to_string());
    }
    if kinds.0 == kinds.1 && kinds.0.is_device() {
        compare(
            "device",
            format!("{}:{}", before.rdev.0, before.rdev.1),
            format!("{}:{}", after.rdev.0, after.rdev.1),
        );
    }
    if let (What::Link(before), What::Link(after)) = (&a.0.node(a.1).what, &b.0.node(b.1).what) {
        compare("target", escaped(before), escaped(after));
    }
    if let (Some(before), Some(after)) = (a.0.content(a.1), b.0.content(b.1)) {
        compare("size", before.length.to_string(), after.length.to_string());
        if !is_same(before, after, progress)? {
            compare("sha256", hex(&before.sha256()?), hex(&after.sha256()?));
        }
        // Compare hard links by the number of names.
        compare(
            "names",
            a.0.names(a.1).to_string(),
            b.0.names(b.1).to_string(),
        );
    }
    Ok(changes)
}

/// Compare byte by byte: most files are equal, and this is faster than two hashes.
fn is_same(a: &Content, b: &Content, progress: &mut ByteProgress) -> std::io::Result<bool> {
    if a.is_same_range(b) {
        return Ok(true);
    }
    if a.length != b.length {
        return Ok(false);
    }
    let (mut same, mut at) = (true, 0);
    a.chunks(|chunk| {
        progress.add(chunk.len() as u64);
        if same {
            same = b
                .part(at..at + chunk.len() as u64)
                .bytes(chunk.len() as u64)?
                == chunk;
            at += chunk.len() as u64;
        }
        Ok(())
    })?;
    Ok(same)
}

/// A line for each path, and the number of changes of each kind.
pub fn text(differences: &[Difference], screen: &Screen) -> String {
    let mut rows = Vec::new();
    let (mut added, mut removed, mut changed) = (0, 0, 0);
    for Difference { path, what } in differences {
        let facts = |f: &Facts| {
            let size = if f.kind == Kind::File {
                format!(" {} bytes", f.bytes)
            } else {
                String::new()
            };
            format!("{}{}{size}", f.kind.letter(), permissions(f.mode))
        };
        let (word, ink, details) = match what {
            Change::Added(f) => {
                added += 1;
                ("added", Ink::Good, facts(f))
            }
            Change::Removed(f) => {
                removed += 1;
                ("removed", Ink::Error, facts(f))
            }
            Change::Changed(all) => {
                changed += 1;
                let short = |what: &str, value: &str| {
                    if what == "sha256" {
                        value.get(..SHORT).unwrap_or(value).to_string()
                    } else {
                        value.to_string()
                    }
                };
                let one = |(what, before, after): &(&str, String, String)| {
                    format!("{what} {} -> {}", short(what, before), short(what, after))
                };
                (
                    "changed",
                    Ink::Warning,
                    all.iter().map(one).collect::<Vec<_>>().join(", "),
                )
            }
        };
        rows.push((ink, vec![word.to_string(), escaped(path), details]));
    }
    // Colour every line by its change: the table would colour the first row as its head.
    let plain = table(
        &rows.iter().map(|(_, row)| row.clone()).collect::<Vec<_>>(),
        &[],
        &Screen::PLAIN,
    );
    let mut out: String = plain
        .lines()
        .zip(&rows)
        .map(|(line, (ink, _))| screen.paint(*ink, line) + "\n")
        .collect();
    let sum = if differences.is_empty() {
        "no difference".to_string()
    } else {
        format!("{added} added, {removed} removed, {changed} changed")
    };
    out.push_str(&screen.paint(Ink::Bold, &sum));
    out.push('\n');
    out
}

/// The differences as JSON.
pub fn json(differences: &[Difference]) -> Value {
    let one = |Difference { path, what }: &Difference| {
        let facts = |f: &Facts| json!({"kind": f.kind.name(), "mode": format!("{:04o}", f.mode & 0o7777), "size": f.bytes});
        let (word, details) = match what {
            Change::Added(f) => ("added", facts(f)),
            Change::Removed(f) => ("removed", facts(f)),
            Change::Changed(all) => {
                let fields = all.iter().map(|(what, before, after)| {
                    (what.to_string(), json!({"before": before, "after": after}))
                });
                ("changed", fields.collect::<serde_json::Map<_, _>>().into())
            }
        };
        json!({"path": escaped(path), "change": word, "what": details})
    };
    json!({"same": differences.is_empty(), "differences": differences.iter().map(one).collect::<Vec<_>>()})
}
