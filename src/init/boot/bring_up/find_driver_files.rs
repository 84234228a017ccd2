//! The driver's user space in this guest: files that containers get.

use crate::driver_files::manifest::{self, Unusable};
use crate::driver_files::{DriverFiles, Roots};
use crate::extensions;
use crate::step;
use kata_gpu_wire::names;

/// Searches the driver's files; reports counts and problems. None: containers get their GPUs' nodes
/// and nothing else.
pub fn find(version: Option<&str>) -> Option<DriverFiles> {
    let empty = tracing::field::Empty;
    let step = step!(
        names::DRIVER_FILES,
        version = empty,
        mounts = empty,
        links = empty,
        manifest = empty
    );
    let roots = Roots {
        driver_root: extensions::driver_root().into(),
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
    Some(files)
}
