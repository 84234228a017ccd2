//! Makes the list of the driver's files ([`manifest`]) for a new image: one scan at build time
//! instead of a scan at every boot.
//!
//! Not here: the list's place in the image.

use super::unpacked_root::{Id, Tree};
use super::verify::modules::information;
use super::view::View;
use crate::doing::Doing;
use anyhow::Result;
use kata_gpu_init::driver_files::manifest::Unusable;
use kata_gpu_init::driver_files::{DriverFiles, Roots, is_version, manifest, scan};
use kata_gpu_init::formats::modinfo;
use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// Files of the driver's module.
const MODULES: [&[u8]; 4] = [
    b"nvidia.ko",
    b"nvidia.ko.gz",
    b"nvidia.ko.xz",
    b"nvidia.ko.zst",
];

/// Path of the list, unless a link of the image leads elsewhere.
pub fn path() -> String {
    format!("{}/{}", manifest::DIRECTORY, manifest::FILE)
}

/// Whether a view must hold the content of a file: only SONAMEs of the driver's libraries and an
/// existing list are read.
fn wanted(name: &[u8]) -> bool {
    name == manifest::FILE.as_bytes()
        || std::str::from_utf8(name).is_ok_and(|name| name.split_once(".so").is_some())
}

/// The driver's modules, of all kernels.
pub fn modules(tree: &Tree) -> Vec<Id> {
    let mut folders: Vec<Id> = ["/lib/modules", "/usr/lib/modules"]
        .iter()
        .filter_map(|path| tree.find(path))
        .collect();
    // One folder where /lib leads to /usr/lib.
    folders.dedup();
    folders
        .into_iter()
        .flat_map(|directory| tree.below(directory))
        .filter(|id| MODULES.contains(&tree.name(*id)))
        .collect()
}

/// The driver's version, from its modules. Error: they are of several ones.
pub fn module_version(tree: &Tree) -> Result<Option<String>, String> {
    let mut unpacked = 0;
    let mut versions = BTreeSet::new();
    for id in modules(tree) {
        // Ignore an unreadable module: `verify` reports the reason.
        let section = tree
            .content(id)
            .and_then(|content| information(content, &mut unpacked).ok());
        versions.extend(section.and_then(|section| modinfo::values(&section, "version").next()));
    }
    if versions.len() > 1 {
        let two: Vec<_> = versions.iter().take(2).collect();
        return Err(format!(
            "the driver's modules are of several versions: {two:?}"
        ));
    }
    Ok(versions.pop_first())
}

/// The list's text and its number of files. The inner error is the reason for no list.
///
/// `at`: the list's path in a guest, with every link resolved.
pub fn of(tree: &Tree, at: &[u8]) -> Result<Result<(Vec<u8>, usize), String>> {
    let version = match module_version(tree) {
        Ok(version) => version,
        Err(why) => return Ok(Err(why)),
    };
    let view = match View::new(tree, wanted) {
        Ok(view) => view,
        Err(error) => {
            let compressed = error
                .chain()
                .filter_map(|e| e.downcast_ref::<io::Error>())
                .any(|e| e.kind() == io::ErrorKind::Unsupported);
            let why =
                "the file system is compressed: guests look for the driver's files at each boot";
            return if compressed {
                Ok(Err(why.into()))
            } else {
                Err(error)
            };
        }
    };
    let roots = view.roots();
    let files = match scan(&roots, version.as_deref().filter(|v| is_version(v))) {
        Ok(files) => files,
        Err(error) => return Ok(Err(error)),
    };
    if let Err(error) = manifest::write(&roots, &files) {
        return Ok(Err(error.to_string()));
    }
    let written = roots
        .root
        .join(OsStr::from_bytes(at.strip_prefix(b"/").unwrap_or(at)));
    let text = std::fs::read(&written).doing("read", &written)?;
    Ok(Ok((text, files.mounts.len())))
}

/// An image's list, as a boot would use it.
pub fn load(
    tree: &Tree,
    driver_root: &Path,
    version: Option<&str>,
) -> Result<Result<DriverFiles, Unusable>> {
    // Besides the list itself, only sizes and names are read.
    let view = View::new(tree, |name| name == manifest::FILE.as_bytes())?;
    let roots = Roots {
        driver_root: driver_root.into(),
        ..view.roots()
    };
    Ok(manifest::load(&roots, version))
}
