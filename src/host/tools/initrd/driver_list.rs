//! The list of the driver's files ([`manifest`]) for an image under way: looked for once, when the
//! image is made, instead of at every boot.
//!
//! Not here: where in the image it goes, and whether one that is there still holds.

use super::view::View;
use crate::driver_files::{is_version, manifest, scan};
use anyhow::{Context, Result};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;

/// Where it goes, unless a link of the image leads elsewhere.
pub fn path() -> String {
    format!("{}/{}", manifest::DIRECTORY, manifest::FILE)
}

/// Which files a view must hold with their content: SONAMEs are read of the driver's libraries
/// alone, and the list that is there.
pub fn wanted(name: &[u8]) -> bool {
    name == manifest::FILE.as_bytes() || std::str::from_utf8(name).is_ok_and(|name| name.split_once(".so").is_some())
}

/// Its text, and how many files it has. The inner error says why an image does without. `version`:
/// the module's, where there is one.
///
/// `at`: where a guest finds the list, with every link on the way followed.
pub fn of(view: &View, version: Option<&str>, at: &[u8]) -> Result<Result<(Vec<u8>, usize), String>> {
    let roots = view.roots();
    let files = match scan(&roots, version.filter(|v| is_version(v))) {
        Ok(files) => files,
        Err(error) => return Ok(Err(error.to_string())),
    };
    if let Err(error) = manifest::write(&roots, &files) {
        return Ok(Err(error.to_string()));
    }
    let written = view.path().join(OsStr::from_bytes(at.strip_prefix(b"/").unwrap_or(at)));
    let text = std::fs::read(&written).with_context(|| format!("read {}", written.display()))?;
    Ok(Ok((text, files.mounts.len())))
}
