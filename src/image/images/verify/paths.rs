//! Paths that an init and the agent rely on, unwanted permissions, and misleading entries.

use super::image_rules::*;
use crate::images::image::{Form, Image};
use crate::images::newc::Kind;
use crate::images::unpacked_root::{ROOT, Tree, What};
use kata_gpu_init::machine::mounts::EARLY;

/// Device number of /dev/ptmx (Documentation/admin-guide/devices.txt).
const PTMX_NUMBER: (u32, u32) = (5, 2);
const SET_ID: u32 = 0o6000;
const STICKY: u32 = 0o1000;
const WRITABLE_BY_ALL: u32 = 0o002;

/// Checks the guest's own paths.
pub fn places(tree: &Tree, findings: &mut Vec<Finding>) {
    for target in EARLY.iter().map(|mount| mount.target) {
        let there = tree.find_no_follow(target);
        let directory = tree
            .find(target)
            .filter(|id| tree.kind(*id) == Kind::Directory);
        if let (Some(id), None) = (there, directory) {
            findings.push(
                Finding::new(&MOUNT_POINT, target).value(format!("a {}", tree.kind(id).name())),
            );
        }
    }
    var_run(tree, findings);
    if let Some(id) = tree.find_no_follow("/dev/ptmx") {
        let meta = tree.meta(id);
        let device = tree.kind(id) == Kind::Char && meta.rdev == PTMX_NUMBER;
        let link =
            matches!(&tree.node(id).what, What::Link(target) if target.ends_with(b"pts/ptmx"));
        if !device && !link {
            findings.push(Finding::new(&PTMX, "/dev/ptmx").value(format!(
                "a {} {}:{}",
                tree.kind(id).name(),
                meta.rdev.0,
                meta.rdev.1
            )));
        }
    }
}

/// Checks that /var/run leads to /run, which may be missing: the init makes /run.
fn var_run(tree: &Tree, findings: &mut Vec<Finding>) {
    let run = tree.find("/run");
    match tree.find_no_follow("/var/run") {
        Some(id) => match &tree.node(id).what {
            What::Link(target)
                if run.is_none() && matches!(target.as_slice(), b"/run" | b"../run") => {}
            What::Link(_) if run.is_some() && tree.find("/var/run") == run => {}
            What::Link(target) => findings
                .push(Finding::new(&VAR_RUN, "/var/run").value(String::from_utf8_lossy(target))),
            _ if Some(id) == run => {}
            What::Directory(names) if names.is_empty() => {
                findings.push(Finding::new(&VAR_RUN, "/var/run").value("an empty directory"))
            }
            What::Directory(names) => {
                let value = format!("a directory with {} entries", names.len());
                findings.push(Finding::new(&VAR_RUN_DIRECTORY, "/var/run").value(value));
            }
            _ => findings.push(
                Finding::new(&VAR_RUN, "/var/run").value(format!("a {}", tree.kind(id).name())),
            ),
        },
        None => findings.push(Finding::new(&VAR_RUN, "/var/run").value("missing")),
    }
}

/// Checks permissions.
pub fn permissions(tree: &Tree, findings: &mut Vec<Finding>) {
    for id in [ROOT].into_iter().chain(tree.below(ROOT)) {
        let (kind, mode) = (tree.kind(id), tree.meta(id).mode);
        let shown = || format!("{:04o}", mode & 0o7777);
        if kind == Kind::File && mode & SET_ID != 0 {
            findings.push(Finding::new(&SETUID, tree.path(id)).value(shown()));
        }
        let open = mode & WRITABLE_BY_ALL != 0
            && (kind == Kind::File || (kind == Kind::Directory && mode & STICKY == 0));
        if open {
            findings.push(Finding::new(&WRITABLE, tree.path(id)).value(shown()));
        }
    }
}

/// Entries that the kernel treats differently than a reader expects.
pub fn entries(image: &Image, tree: &Tree, findings: &mut Vec<Finding>) {
    let name = |index: usize| {
        image
            .entries
            .get(index)
            .map_or(&[][..], |entry| entry.name.as_slice())
    };
    findings.extend(
        tree.left_out
            .iter()
            .map(|(index, why)| Finding::new(&LEFT_OUT, name(*index)).value(why.name())),
    );
    findings.extend(
        tree.again
            .iter()
            .map(|index| Finding::new(&AGAIN, name(*index))),
    );
    for entry in &image.entries {
        if entry.name.starts_with(b"/")
            || entry.name.split(|b| *b == b'/').any(|part| part == b"..")
        {
            findings.push(Finding::new(&OUTSIDE, &entry.name));
        }
    }
    for part in image.parts.iter().filter(|part| !part.ended) {
        findings.push(Finding::new(&NO_TRAILER, "").value(format!(
            "{} bytes, {}",
            part.content.length,
            part.form.name()
        )));
    }
    if image.form() == Form::Gzip {
        let parts = image.parts.iter().filter(|p| p.form == Form::Gzip);
        let (raw, unpacked) = parts.fold((0, 0), |sum, p| {
            (sum.0 + p.raw.length, sum.1 + p.content.length)
        });
        findings
            .push(Finding::new(&COMPRESSED, "").value(format!("gzip, {raw} bytes for {unpacked}")));
    }
}
