//! The driver's user space in this guest: files that containers get, and what the guest's own
//! programs and kernel need of them.

use crate::driver_files::manifest::{self, Unusable};
use crate::driver_files::{DriverFiles, Roots, ask_for, driver_root};
use crate::extensions::{loader, mount};
use crate::machine::{mounts, threads};
use crate::step;
use kata_gpu_wire::names;
use std::path::Path;

/// Takes the driver's root from the command line, before the first use of the driver's files.
pub fn prepare(asked: Option<&Path>) {
    if let Some(error) = asked.and_then(|root| ask_for(root).err()) {
        tracing::warn!(name: names::DRIVER_FILES, error);
    }
    if let Some(root) = own_root()
        && let Err(error) = mount::bind_firmware(root, &mounts::text())
    {
        tracing::warn!(name: names::DRIVER_FILES, error);
    }
}

/// The driver's root where that is neither the guest's nor an extension, which mounts its own.
fn own_root() -> Option<&'static Path> {
    Some(driver_root()).filter(|root| *root != Path::new("/") && *root != Path::new(mount::GPU))
}

/// Searches the driver's files; reports counts and problems. None: containers get their GPUs' nodes
/// and nothing else.
pub fn find(version: Option<&str>) -> Option<DriverFiles> {
    let empty = tracing::field::Empty;
    let step = step!(
        names::DRIVER_FILES,
        version = empty,
        mounts = empty,
        links = empty,
        manifest = empty,
        absent = empty
    );
    let roots = Roots {
        driver_root: driver_root().into(),
        ..Roots::default()
    };
    let (files, unused) = match manifest::load_or_scan(&roots, version) {
        Ok(found) => found,
        Err(error) => {
            step.fail(&format!(
                "{error}: containers get their GPUs without the driver's libraries"
            ));
            return None;
        }
    };
    step.note("version", files.version.as_str());
    step.note("mounts", files.mounts.len() as u64);
    step.note("links", files.links.len() as u64);
    step.note("manifest", unused.is_none());
    let absent = files.absent();
    if !absent.is_empty() {
        step.note("absent", absent.join(", ").as_str());
    }
    drop(step);
    // An image without a manifest is no fault.
    for problem in unused
        .iter()
        .filter(|why| !matches!(why, Unusable::Absent { .. }))
        .map(ToString::to_string)
        .chain(files.problems.clone())
    {
        tracing::warn!(name: names::DRIVER_FILES, error = problem);
    }
    if own_root().is_some() && !loader::is_added(&mounts::text()) {
        let libraries = files.libraries();
        // No GPU waits for the guest's own programs.
        threads::detach(move || {
            if let Err(error) = loader::add(Path::new("/"), libraries) {
                tracing::warn!(name: names::DRIVER_FILES, error);
            }
        });
    }
    Some(files)
}
