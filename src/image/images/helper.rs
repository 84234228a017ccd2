//! NVML's helper for an image: the program `kata-gpu-nvml`, found or given, and never run here.

use super::new_image::read_program;
use super::newc::Kind;
use super::unpacked_root::Tree;
use super::verify;
use anyhow::{Result, ensure};
use kata_gpu_init::cdi::spec::PENDING;
use kata_gpu_wire::nvml_messages::PROGRAM;
use memchr::memmem;
use std::path::{Path, PathBuf};

/// Directory of the helper, after its parent.
pub const DIRECTORIES: [&str; 2] = ["/usr", "/usr/bin"];

/// Options of a command that puts the helper into an image.
#[derive(clap::Args, Debug)]
pub struct HelperArgs {
    /// NVML's helper, the program kata-gpu-nvml, for /usr/bin; default: that of this name next
    /// to the init or next to this program.
    #[arg(long = "nvml", value_name = "FILE")]
    pub given: Option<PathBuf>,
    /// Do not add NVML's helper.
    #[arg(long = "no-nvml", conflicts_with = "given")]
    pub none: bool,
}

impl HelperArgs {
    pub fn helper(&self, init: &Path) -> Helper {
        match (&self.given, self.none) {
            (Some(path), _) => Helper::Given(path.clone()),
            (None, true) => Helper::None,
            (None, false) => {
                let program = std::env::current_exe().ok();
                let beside = [Some(init), program.as_deref()]
                    .into_iter()
                    .flatten()
                    .map(|path| path.with_file_name(PROGRAM));
                beside
                    .into_iter()
                    .find(|path| path.is_file())
                    .map_or(Helper::None, Helper::Found)
            }
        }
    }
}

/// Helper for an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Helper {
    None,
    /// Required: without the helper, the image is not written.
    Given(PathBuf),
    /// Optional: the image is also written without the helper.
    Found(PathBuf),
}

/// Path of the helper in a guest.
pub fn path() -> String {
    format!("{}/{PROGRAM}", DIRECTORIES[1])
}

/// Reads the helper for an image. The inner error is the reason why the image does without.
pub fn read(helper: &Helper, tree: &Tree) -> Result<Result<(PathBuf, Vec<u8>), String>> {
    let (path, is_given) = match helper {
        Helper::None => return Ok(Err("none was given or found".into())),
        Helper::Given(path) => (path, true),
        Helper::Found(path) => (path, false),
    };
    match (
        read_helper(path).and_then(|bytes| check_place(tree).map(|()| bytes)),
        is_given,
    ) {
        (Ok(bytes), _) => Ok(Ok((path.clone(), bytes))),
        (Err(error), true) => Err(error),
        (Err(error), false) => Ok(Err(format!("{error:#}"))),
    }
}

fn read_helper(path: &Path) -> Result<Vec<u8>> {
    let shown = path.display();
    let bytes = read_program(path, "helper")?;
    let has = |text: &[u8]| memmem::find(&bytes, text).is_some();
    let is_helper = bytes.starts_with(b"\x7fELF")
        && has(b"/ld-")
        && has(PROGRAM.as_bytes())
        && !has(PENDING.as_bytes());
    ensure!(
        is_helper,
        "helper {shown}: another program: build it with cargo build --release -p {PROGRAM}"
    );
    Ok(bytes)
}

/// Errors: the helper's path contains a link, or something else has its name.
fn check_place(tree: &Tree) -> Result<()> {
    for directory in DIRECTORIES {
        let is_directory = tree
            .find_no_follow(directory)
            .is_some_and(|id| tree.kind(id) == Kind::Directory);
        ensure!(
            is_directory,
            "{PROGRAM} is not written through links: {directory} is missing, or no directory"
        );
    }
    let path = path();
    if let Some(id) = tree.find_no_follow(&path) {
        let is_own = tree.kind(id) == Kind::File && tree.names(id) == 1;
        ensure!(
            is_own,
            "{path} is no file of its own: remove it from the image"
        );
    }
    Ok(())
}

/// Loader and libraries that the helper does not find in an image.
pub fn lacks(tree: &Tree) -> Vec<String> {
    verify::faults(tree, &path())
}
