//! Makes the list of the driver's files ([`manifest`]) for a new image: one scan at build time
//! instead of a scan at every boot.
//!
//! Not here: the list's place in the image, and whether an existing list is still valid.

use super::view::View;
use anyhow::{Context, Result};
use kata_gpu_init::driver_files::{is_version, manifest, scan};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;

/// Path of the list, unless a link of the image leads elsewhere.
pub fn path() -> String {
    format!("{}/{}", manifest::DIRECTORY, manifest::FILE)
}

/// Whether a view must hold the content of a file: only SONAMEs of the driver's libraries and an
/// existing list are read.
pub fn wanted(name: &[u8]) -> bool {
    name == manifest::FILE.as_bytes()
        || std::str::from_utf8(name).is_ok_and(|name| name.split_once(".so").is_some())
}

/// The list's text and its number of files. The inner error is the reason for no list. `version`:
/// the module's version, if the image has a module.
///
/// `at`: the list's path in a guest, with every link resolved.
pub fn of(
    view: &View,
    version: Option<&str>,
    at: &[u8],
) -> Result<Result<(Vec<u8>, usize), String>> {
    let roots = view.roots();
    let files = match scan(&roots, version.filter(|v| is_version(v))) {
        Ok(files) => files,
        Err(error) => return Ok(Err(error.to_string())),
    };
    if let Err(error) = manifest::write(&roots, &files) {
        return Ok(Err(error.to_string()));
    }
    let written = view
        .path()
        .join(OsStr::from_bytes(at.strip_prefix(b"/").unwrap_or(at)));
    let text = std::fs::read(&written).with_context(|| format!("read {}", written.display()))?;
    Ok(Ok((text, files.mounts.len())))
}
