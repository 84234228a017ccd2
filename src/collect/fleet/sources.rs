//! Inputs that the thread `fleet` takes from the collector.

use crate::collector_counters::Stats;
use crate::limits::Limits;
use crate::peers::Peers;
use crate::store::{Log, Store};
use anyhow::{Context, Result, ensure};
use kata_gpu_report::data::text::printable;
use std::path::Path;
use std::sync::Arc;

/// Longest file of a boot that is read here: several times the file of a boot with 16 GPUs and a
/// chatty kernel. A longer file takes time that other boots need.
const MAX_FILE: u64 = 8 << 20;

/// The collector's files, peers and counters.
pub struct Sources {
    pub store: Arc<Store>,
    pub peers: Arc<Peers>,
    pub stats: Arc<Stats>,
    pub limits: Limits,
    pub log: Log,
}

/// Fails if the file of a boot is longer than [`MAX_FILE`].
pub fn check_size(path: &Path) -> Result<()> {
    let length = path
        .metadata()
        .with_context(|| format!("look at {}", path.display()))?
        .len();
    ensure!(
        length <= MAX_FILE,
        "{} has {length} bytes, more than the {MAX_FILE} that are read here",
        printable(&path.to_string_lossy())
    );
    Ok(())
}
