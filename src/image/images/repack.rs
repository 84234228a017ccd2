//! `image replace-init` of an initrd: replaces the init in a trusted image. Every other entry stays
//! in its place, byte for byte.
//!
//! Parts without changes are copied as stored. Before the new image gets its name, it is read
//! again, compared with the old one, and verified: an unintended difference is an error, not a
//! surprise at boot.

use super::diff;
use super::driver_list;
use super::entry_text::escaped;
use super::helper;
use super::helper::Helper;
use super::image::{Content, Form, Image, Part, copy};
use super::new_image::{NewImage, read_init};
use super::newc;
use super::newc::{Header, Kind};
use super::output_file::{Output, Written};
use super::unpacked_root::{Id, Tree, What};
use super::verify;
use super::verify::{INIT, Question, Report};
use anyhow::{Context, Result, bail, ensure};
use kata_gpu_init::boot::AGENT;
use kata_gpu_init::driver_files::manifest;
use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

/// Second path of the init in an image, which Kata's image builders expect.
const OTHER_INIT: &str = "/sbin/init";
/// Suffixes of the files beside a program that was signed with cosign, like NVRC.
const SIGNATURES: [&str; 2] = [".cert", ".sig"];
const PROGRAM: u32 = 0o755;

/// Options of repacking.
#[derive(Debug)]
pub struct Options {
    pub init: PathBuf,
    pub helper: Helper,
    pub manifest: bool,
    /// None: the present form.
    pub form: Option<Form>,
    pub drop_old: bool,
}

/// Result of repacking.
#[derive(Debug)]
pub struct Repacked {
    pub new: NewImage,
    /// Path of the former init, if it is still there.
    pub old_init: Option<String>,
    pub report: Report,
}

/// An entry to be written.
struct New {
    name: Vec<u8>,
    mode: u32,
    data: Vec<u8>,
}

#[derive(Default)]
struct Plan {
    /// Replacements by index of the old entry; None: the entry is omitted.
    instead: BTreeMap<usize, Option<New>>,
    /// New entries at the end of the last archive, in this order.
    more: Vec<New>,
    /// Paths in the guest that may differ.
    paths: BTreeSet<Vec<u8>>,
}

impl Plan {
    /// Replaces the entry of a path, or adds one.
    fn put(&mut self, tree: &Tree, path: &[u8], mode: u32, data: Vec<u8>) -> Result<()> {
        let name = path.strip_prefix(b"/").unwrap_or(path).to_vec();
        let new = New { name, mode, data };
        match tree.find_no_follow(path) {
            Some(id) => {
                let index = entry_of(tree, id)?;
                self.instead.insert(index, Some(new));
            }
            None => self.more.push(new),
        }
        self.paths.insert(path.to_vec());
        Ok(())
    }

    fn leave_out(&mut self, tree: &Tree, id: Id) -> Result<()> {
        self.instead.insert(entry_of(tree, id)?, None);
        self.paths.insert(tree.path(id));
        Ok(())
    }
}

/// Index of a node's entry. Errors: a directory, or a file with several names.
fn entry_of(tree: &Tree, id: Id) -> Result<usize> {
    let path = escaped(&tree.path(id));
    ensure!(
        tree.kind(id) != Kind::Directory,
        "replace {path}: it is a directory"
    );
    ensure!(
        tree.names(id) == 1,
        "replace {path}: the same file has {} names (hard links): unpack the image, and pack it \
         anew",
        tree.names(id)
    );
    tree.node(id)
        .entry
        .with_context(|| format!("replace {path}: no entry of the image made it"))
}

/// Writes an image with another init beside `out`. The caller decides whether to keep it.
pub fn repack(
    image: &Image,
    tree: &Tree,
    wish: &Options,
    question: &Question,
    out: &Path,
) -> Result<Repacked> {
    let init = read_init(&wish.init)?;
    let mut plan = Plan::default();
    let old = [INIT, OTHER_INIT].iter().find_map(|path| tree.find(path));
    plan_init(tree, old, init, &mut plan)?;
    let old_init = plan_old(tree, old, wish.drop_old, &mut plan)?;
    let helper = match helper::read(&wish.helper, tree)? {
        Ok((path, program)) => {
            let mode = Kind::File.bits() | PROGRAM;
            plan.put(tree, helper::path().as_bytes(), mode, program)?;
            Ok(path)
        }
        Err(why) => Err(why),
    };
    let manifest = if wish.manifest {
        plan_manifest(tree, &mut plan)?
    } else {
        Err("not asked for".into())
    };
    let written = write(image, &plan, wish.form, out)?;
    let after = Image::open(written.temporary()).context("read the written image again")?;
    let tree_after = Tree::new(&after).context("read the written image again")?;
    let differences = diff::differences(tree, &tree_after, true)?;
    if let Some(surprise) = differences.iter().find(|d| !plan.paths.contains(&d.path)) {
        bail!(
            "{} would change: the image has entries that depend on each other; unpack it, and pack \
             it anew",
            escaped(&surprise.path)
        );
    }
    let report = verify::check(
        &after,
        &tree_after,
        &Question {
            init: INIT.into(),
            ..question.clone()
        },
    );
    let helper_lacks = if helper.is_ok() {
        helper::lacks(&tree_after)
    } else {
        Vec::new()
    };
    Ok(Repacked {
        new: NewImage {
            written,
            differences,
            kept: image.entries.len() - plan.instead.len(),
            manifest,
            helper,
            helper_lacks,
        },
        old_init,
        report,
    })
}

/// Puts the program at /init. If /sbin/init led to the old init, it becomes a link to /init.
fn plan_init(tree: &Tree, old: Option<Id>, init: Vec<u8>, plan: &mut Plan) -> Result<()> {
    plan.put(tree, INIT.as_bytes(), Kind::File.bits() | PROGRAM, init)?;
    let Some(other) = tree.find_no_follow(OTHER_INIT) else {
        return Ok(());
    };
    let leads_to_old = tree.find(OTHER_INIT).is_some() && tree.find(OTHER_INIT) == old;
    let target = if let What::Link(target) = &tree.node(other).what {
        Some(target.as_slice())
    } else {
        None
    };
    let leads_to_init = matches!(target, Some(b"/init" | b"../init"));
    if leads_to_old && !leads_to_init {
        // sbin may be a link: put the entry where sbin leads.
        plan.put(
            tree,
            &tree.path(other),
            Kind::Link.bits() | 0o777,
            INIT.as_bytes().to_vec(),
        )?;
    }
    Ok(())
}

/// Path of the former init; None if it is gone.
fn plan_old(
    tree: &Tree,
    old: Option<Id>,
    drop_old: bool,
    plan: &mut Plan,
) -> Result<Option<String>> {
    let Some(old) = old.filter(|id| tree.kind(*id) == Kind::File) else {
        return Ok(None);
    };
    let path = tree.path(old);
    if plan.paths.contains(&path) {
        return Ok(None);
    }
    // Keep a former init that is also the agent.
    let is_agent = tree.find(AGENT.to_string_lossy().as_bytes()) == Some(old);
    if drop_old && !is_agent {
        plan.leave_out(tree, old)?;
        for signature in SIGNATURES {
            if let Some(id) = tree.find_no_follow([&path, signature.as_bytes()].concat()) {
                plan.leave_out(tree, id)?;
            }
        }
        return Ok(None);
    }
    Ok(Some(escaped(&path)))
}

/// Adds the list of the driver's files, so that no boot has to scan for them. An inner error is the
/// reason for no list.
fn plan_manifest(tree: &Tree, plan: &mut Plan) -> Result<Result<usize, String>> {
    let (mut at, mut missing) = (b"/".to_vec(), Vec::new());
    // Follow links of the image to the list's directory.
    for name in manifest::DIRECTORY
        .as_bytes()
        .split(|b| *b == b'/')
        .filter(|name| !name.is_empty())
    {
        if at != b"/" {
            at.push(b'/');
        }
        at.extend(name);
        match tree.find(&at) {
            Some(id) if tree.kind(id) == Kind::Directory => at = tree.path(id),
            None if tree.find_no_follow(&at).is_none() => missing.push(at.clone()),
            _ => return Ok(Err(format!("{} is no directory", escaped(&at)))),
        }
    }
    at.push(b'/');
    at.extend(manifest::FILE.as_bytes());
    let (text, files) = match driver_list::of(tree, &at)? {
        Ok(found) => found,
        Err(why) => return Ok(Err(why)),
    };
    for directory in missing {
        plan.put(
            tree,
            &directory,
            Kind::Directory.bits() | PROGRAM,
            Vec::new(),
        )?;
    }
    plan.put(tree, &at, Kind::File.bits() | 0o644, text)?;
    Ok(Ok(files))
}

fn write(image: &Image, plan: &Plan, form: Option<Form>, out: &Path) -> Result<Written> {
    let last = image.parts.len().saturating_sub(1);
    let mut output = Output::create(out, Form::Plain)?;
    for (index, part) in image.parts.iter().enumerate() {
        let more: &[New] = if index == last { &plan.more } else { &[] };
        let edits: Vec<(usize, &Option<New>)> = {
            let own = |(entry, _): &(&usize, &Option<New>)| {
                image.entries.get(**entry).is_some_and(|e| e.part == index)
            };
            plan.instead
                .iter()
                .filter(own)
                .map(|(entry, new)| (*entry, new))
                .collect()
        };
        let wanted = form.unwrap_or(part.form);
        output.set_form(Form::Plain)?;
        // The kernel accepts an archive only at a multiple of four.
        let gap = output.position().next_multiple_of(4) - output.position();
        io::copy(&mut io::repeat(0).take(gap), &mut output).context("write zeros")?;
        if edits.is_empty() && more.is_empty() && wanted == part.form {
            copy(&part.raw, &mut output).context("copy a part of the image")?;
            continue;
        }
        output.set_form(wanted)?;
        write_part(image, part, &edits, more, &mut output).context("write a part of the image")?;
    }
    output.end()
}

fn write_part(
    image: &Image,
    part: &Part,
    edits: &[(usize, &Option<New>)],
    more: &[New],
    out: &mut Output,
) -> Result<()> {
    let between = |from: u64, to: u64| -> Content { part.content.part(from..to) };
    let mut at = 0;
    for (index, new) in edits {
        let Some(entry) = image.entries.get(*index) else {
            continue;
        };
        copy(&between(at, entry.range.start), out)?;
        at = entry.range.end;
        if let Some(new) = new {
            write_new(new, &entry.header, &entry.name, out)?;
        }
    }
    let length = part.content.length;
    let end = if part.ended {
        part.trailers.last().copied().unwrap_or(length)
    } else {
        length
    };
    copy(&between(at, end), out)?;
    if end == length {
        // Without an end mark, an archive may end without padding.
        io::copy(
            &mut io::repeat(0).take(length.next_multiple_of(4) - length),
            out,
        )?;
    }
    for new in more {
        write_new(new, &Header::default(), &new.name, out)?;
    }
    if !part.ended {
        newc::write_trailer(out)?;
    }
    copy(&between(end, length), out)?;
    Ok(())
}

/// Writes an entry with the inode number and time of `old`.
fn write_new(new: &New, old: &Header, name: &[u8], out: &mut dyn Write) -> Result<()> {
    let size = u32::try_from(new.data.len()).context("more than 4 GiB")?;
    let header = Header {
        ino: old.ino,
        mode: new.mode,
        nlink: 1,
        mtime: old.mtime,
        size,
        ..Header::default()
    };
    newc::write_entry(out, &header, name, &mut new.data.as_slice())
        .with_context(|| format!("write {}", escaped(name)))
}
