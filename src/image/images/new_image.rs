//! Result of `image replace-init` for an image of either kind, and the reading of its programs.

use super::diff;
use super::diff::Difference;
use super::image::{Content, open_regular};
use super::output_file::Written;
use anyhow::{Context, Result, ensure};
use kata_gpu_report::data::text::{Screen, printable};
use kata_gpu_wire::nvml_messages::PROGRAM;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

/// Largest accepted init or helper, in bytes.
const MAX_PROGRAM: u64 = 256 << 20;

/// An image with another init, before its rename.
#[derive(Debug)]
pub struct NewImage {
    pub written: Written,
    pub differences: Vec<Difference>,
    /// Number of entries or names that are unchanged.
    pub kept: usize,
    /// Files in the list of the driver's files, or the reason for no list.
    pub manifest: Result<usize, String>,
    /// The helper in the new image, or the reason for no helper.
    pub helper: Result<PathBuf, String>,
    /// Loader and libraries that the helper does not find in the image.
    pub helper_lacks: Vec<String>,
}

/// Reads a program for an image, without running it. `what` names its role in errors.
pub fn read_program(path: &Path, what: &str) -> Result<Vec<u8>> {
    open_regular(path)
        .and_then(Content::of_file)
        .and_then(|file| file.bytes(MAX_PROGRAM))
        .with_context(|| format!("read {what} {}", path.display()))
}

/// Reads an init without running it.
pub fn read_init(path: &Path) -> Result<Vec<u8>> {
    let init = read_program(path, "init")?;
    ensure!(
        init.starts_with(b"\x7fELF"),
        "init {}: not an ELF file (--init takes the program kata-gpu-init)",
        path.display()
    );
    Ok(init)
}

impl NewImage {
    /// Lines of text: differences, `stays` after the number of what is unchanged, list, helper.
    pub fn text(&self, stays: &str, screen: &Screen) -> String {
        let mut text = diff::text(&self.differences, screen);
        text.push_str(&format!(
            "{} {stays}\n{}",
            self.kept,
            list_text(&self.manifest)
        ));
        text.push_str(&match &self.helper {
            Ok(path) => format!("{PROGRAM} is {}\n", printable(&path.display().to_string())),
            Err(why) => format!("no {PROGRAM} was added: {}\n", printable(why)),
        });
        if !self.helper_lacks.is_empty() {
            text.push_str(&format!(
                "{PROGRAM} does not find in the image: {}: it will not start there, and nothing \
                 asks NVML\n",
                printable(&self.helper_lacks.join(", "))
            ));
        }
        text
    }

    pub fn json(&self) -> Value {
        json!({
            "path": self.written.shown_path(),
            "bytes": self.written.bytes,
            "sha256": self.written.sha256,
            "kept": self.kept,
            "manifestFiles": self.manifest.as_ref().ok(),
            "noManifest": self.manifest.as_ref().err(),
            "diff": diff::json(&self.differences),
            "helper": self.helper.as_ref().ok().map(|path| printable(&path.display().to_string())),
            "noHelper": self.helper.as_ref().err(),
            "helperLacks": self.helper_lacks,
        })
    }
}

/// State of the list of the driver's files.
pub fn list_text(manifest: &Result<usize, String>) -> String {
    match manifest {
        Ok(files) => format!("the list of the driver's {files} files is in the image\n"),
        Err(why) => format!("no list of the driver's files: {}\n", printable(why)),
    }
}
