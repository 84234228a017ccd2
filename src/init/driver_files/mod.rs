//! Files of the driver's user space that a container needs: libraries, the links to them, programs,
//! configurations, firmware, sockets.
//!
//! [`scan`] reads a driver root, each directory once, and runs nothing. [`manifest`] keeps the
//! result of a scan made when an image is built: a boot only verifies it. Module `cdi` decides
//! which of the files a container gets.
//!
//! A driver without libcuda is refused if a library that only CUDA uses is there: such a half
//! installation makes every program fail later with less to go by. Management or graphics libraries
//! alone count as intended, with [`DriverFiles::libcuda_directory`] None.

mod files; // what a scan finds
mod libraries;
pub mod manifest;
mod named;
mod root; // where this guest's driver is
mod tree;

pub use files::{DriverFiles, Kind, Link, Mount, Roots};
pub use libraries::is_version;
pub use named::{FIRMWARE_DIRECTORY, FIRMWARE_PARAMETER};
pub use root::{ask_for, driver_root, is_foreign, known_root};
pub use tree::plain_path;

use files::Problems;
use std::path::Path;
use tree::Places;

/// File with the version of the loaded module.
const MODULE_VERSION: &str = "/sys/module/nvidia/version";
/// Scans the roots. `expected_version` is that of the module which is or will be loaded; without it
/// the version comes from `<root>/sys`, else from the libraries. An error is a text with the cure.
pub fn scan(roots: &Roots, expected_version: Option<&str>) -> Result<DriverFiles, String> {
    let places = Places::open(roots)?;
    let mut problems = Problems::default();
    let module = module_version(&places, expected_version)?;
    let directories = libraries::directories(&places, &mut problems)?;
    let version = libraries::version(&directories, module, &places.driver_root, &problems)?;
    let libraries = libraries::collect(&places, &directories, &version, &mut problems)?;
    let named = named::Named::collect(&places, &version, &mut problems);
    let (mut mounts, mut links) = (libraries.mounts, libraries.links);
    mounts.extend(named.mounts);
    links.extend(
        named
            .links
            .into_iter()
            .map(|link| (link.link.clone(), link)),
    );
    mounts.extend(named::sockets(&places, roots, &mut problems));
    let mut files = DriverFiles {
        version,
        libcuda_directory: libraries.libcuda_directory,
        library_directories: libraries.directories,
        mounts,
        links: links.into_values().collect(),
        problems: problems.0,
    };
    files.order();
    Ok(files)
}

/// An error of this module.
fn refused(why: String) -> String {
    format!("driver files: {why}")
}

/// Version that the libraries must have, and its source; None if no module is loaded.
fn module_version(
    places: &Places,
    expected: Option<&str>,
) -> Result<Option<(String, String)>, String> {
    let (version, source, from) = match expected {
        Some(version) => (
            version.to_string(),
            "as was asked for".to_string(),
            "the expected version",
        ),
        None => match places.text(Path::new(MODULE_VERSION)) {
            Ok(Some(version)) => (version, format!("from {MODULE_VERSION}"), MODULE_VERSION),
            Ok(None) => return Ok(None),
            Err(error) => return Err(refused(format!("read {MODULE_VERSION}: {error}"))),
        },
    };
    if is_version(&version) {
        return Ok(Some((version, source)));
    }
    let value: String = version.chars().take(64).collect();
    Err(refused(format!(
        "{from}: {value:?} is not a version of the driver (one looks like 550.163.01); is another \
         module loaded under its name?"
    )))
}
