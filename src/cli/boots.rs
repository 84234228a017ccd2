//! The directory of boots, and reading many of them.

use anyhow::{Context, Result, ensure};
use kata_gpu_report::analysis::loaded::{Loaded, load};
use kata_gpu_report::analysis::metrics::{Metrics, metrics};
use kata_gpu_report::data::boot_dir::boots;
use kata_gpu_report::data::text::{Screen, ascii_json, printable};
use kata_gpu_report::terminal::progress_line::Progress;
use serde::Serialize;
use std::path::{Path, PathBuf};

/// Version of the JSON forms of all verbs.
pub const JSON_VERSION: u32 = 2;

/// Directory of the systemd unit's collector.
pub const OF_THE_UNIT: &str = "/var/lib/kata-gpu-boot";

/// The collector's directory: `--dir`, else KATA_GPU_BOOT_DIR, else that of the systemd unit.
#[derive(clap::Args, Clone, Debug)]
pub struct BootDir {
    /// Directory of boots.
    #[arg(
        long,
        value_name = "DIR",
        env = "KATA_GPU_BOOT_DIR",
        hide_env_values = true,
        default_value = OF_THE_UNIT
    )]
    pub dir: PathBuf,
}

/// Runs a verb's work on one thread.
pub fn block_on<T>(work: impl Future<Output = Result<T>>) -> Result<T> {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("start the runtime")?
        .block_on(work)
}

/// Notes below a page on files that could not be read.
pub fn not_read(unread: &[String], screen: &Screen, out: &mut Vec<String>) {
    let line = |why| screen.note(&format!("not read: {why}"));
    out.extend(unread.iter().map(line));
}

/// A JSON form, with its version.
#[derive(Serialize)]
struct Json<'a, T: Serialize> {
    json_version: u32,
    #[serde(flatten)]
    content: &'a T,
}

/// One JSON object: `content`, and the version of its form.
pub fn json(content: &impl Serialize) -> Result<String> {
    let json_version = JSON_VERSION;
    let value = serde_json::to_value(Json {
        json_version,
        content,
    });
    ascii_json(&value.context("write as JSON")?)
}

/// Passes the numbers of each boot in a directory to `take`. Returns the files that could not be
/// read.
pub fn each_boot(dir: &Path, mut take: impl FnMut(Metrics)) -> Result<Vec<String>> {
    let mut paths = boots(dir)?;
    paths.sort();
    ensure!(
        !paths.is_empty(),
        "no boot in {}: name a directory that the collector wrote to",
        dir.display()
    );
    let mut progress = Progress::start();
    let mut unread = Vec::new();
    for (at, path) in paths.iter().enumerate() {
        progress.show(|| format!("read {at} of {} boots", paths.len()));
        match load(path, None) {
            Ok(Loaded { file, boot }) => take(metrics(&boot, &file)),
            Err(error) => unread.push(printable(&format!("{error:#}"))),
        }
    }
    Ok(unread)
}
