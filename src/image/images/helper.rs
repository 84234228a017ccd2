//! NVML's helper for an image: the program `kata-gpu-nvml`, found or given, and never run here.

use super::image::Content;
use super::newc::Kind;
use super::unpacked_root::Tree;
use super::verify;
use anyhow::{Context, Result, ensure};
use kata_gpu_init::cdi::spec::PENDING;
use kata_gpu_report::data::text::printable;
use kata_gpu_wire::nvml_messages::PROGRAM;
use memchr::memmem;
use nix::fcntl::OFlag;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// Largest accepted helper, in bytes.
const MAX_HELPER: u64 = 256 << 20;
/// Directory of the helper, after its parent.
pub const DIRECTORIES: [&str; 2] = ["/usr", "/usr/bin"];

/// Options of a command that puts the helper into an image.
#[derive(clap::Args, Debug)]
pub struct HelperArgs {
    /// NVML's helper, the program kata-gpu-nvml, for /usr/bin; default: that of this name beside
    /// the init or beside this program.
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
        read_program(path).and_then(|bytes| check_place(tree).map(|()| bytes)),
        is_given,
    ) {
        (Ok(bytes), _) => Ok(Ok((path.clone(), bytes))),
        (Err(error), true) => Err(error),
        (Err(error), false) => Ok(Err(format!("{error:#}"))),
    }
}

fn read_program(path: &Path) -> Result<Vec<u8>> {
    let shown = path.display();
    let bytes = Content::of_file(open_regular(path, "helper")?)?
        .bytes(MAX_HELPER)
        .with_context(|| format!("read helper {shown}"))?;
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

/// Opens a regular file, never a FIFO or device. `what` names the file's role in errors.
pub fn open_regular(path: &Path, what: &str) -> Result<File> {
    let context = || format!("open {what} {}", path.display());
    let meta = std::fs::metadata(path).with_context(context)?;
    ensure!(meta.is_file(), "{}: not a regular file", context());
    OpenOptions::new()
        .read(true)
        .custom_flags(OFlag::O_NONBLOCK.bits())
        .open(path)
        .with_context(context)
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

/// Lines of text about the helper in a new image.
pub fn text(helper: &Result<PathBuf, String>, lacks: &[String]) -> String {
    let mut text = match helper {
        Ok(path) => format!("{PROGRAM} is {}\n", printable(&path.display().to_string())),
        Err(why) => format!("no {PROGRAM} was added: {}\n", printable(why)),
    };
    if !lacks.is_empty() {
        let lacks = printable(&lacks.join(", "));
        text.push_str(&format!(
            "{PROGRAM} does not find in the image: {lacks}: it will not start \
                                there, and nothing asks NVML\n"
        ));
    }
    text
}
