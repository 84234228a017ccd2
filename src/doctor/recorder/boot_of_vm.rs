//! The boot of a VM in the collector's directory, and the file of its trace.

use super::recorded::Recorded;
use super::vmm_process::Vmm;
use anyhow::{Context, Result};
use kata_gpu_report::data::boot_dir::{dated, open};
use kata_gpu_report::data::boot_file::{FileLine, HostEvent, HostLine, for_each_line};
use kata_gpu_report::data::trace_file;
use kata_gpu_wire::names;
use kata_gpu_wire::record::Kind;
use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// Newest boots that are looked at, and bytes of each: the first connection stands at the front.
const MAX_BOOTS: usize = 32;
const HEAD: u64 = 64 * 1024;
/// Bytes of a boot that are read for its end: many times the collector's limit.
const LONGEST: u64 = 256 << 20;

/// File of the boot that this VM sends, which connected after `since_ns` on CLOCK_REALTIME.
pub fn find(dir: &Path, vmm: &Vmm, since_ns: Option<i64>) -> Option<PathBuf> {
    // A directory without a boot is one that has none yet.
    let boots = dated(dir).unwrap_or_default();
    boots.into_iter().take(MAX_BOOTS).find(|path| {
        let mut is_it = false;
        let look = |_, _, line| {
            if let Ok(FileLine::Host(HostLine {
                event: HostEvent::Connected { peer, .. },
                realtime_ns,
                ..
            })) = line
            {
                is_it |= vmm.is_peer(&peer) && since_ns.is_none_or(|since| realtime_ns >= since);
            }
        };
        open(path).is_ok_and(|file| for_each_line(file.take(HEAD), look).is_ok()) && is_it
    })
}

/// Length of a boot's file in bytes; 0 where there is none.
pub fn length(path: &Path) -> u64 {
    open(path)
        .and_then(|file| file.metadata())
        .map_or(0, |meta| meta.len())
}

/// Whether the guest has sent, in the file from `from` bytes on, that its GPUs are settled, or that
/// it powers off.
pub fn is_over(path: &Path, from: u64) -> bool {
    let mut over = false;
    let look = |_, _, line| {
        if let Ok(FileLine::Record(record)) = line {
            over |= record.kind == Kind::Event
                && matches!(record.name.as_str(), names::SETTLED | names::POWER_OFF);
        }
    };
    let behind = |mut file: File| file.seek(SeekFrom::Start(from)).map(|_| file.take(LONGEST));
    open(path)
        .and_then(behind)
        .is_ok_and(|file| for_each_line(file, look).is_ok())
        && over
}

/// Lines of the file of a trace.
pub fn lines(recorded: &Recorded) -> String {
    let recording = HostLine::now(HostEvent::Recording(Box::new(recorded.recording.clone())));
    let traced = recorded
        .traced
        .iter()
        .map(|traced| HostLine::now(HostEvent::Traced(Box::new(traced.clone()))));
    [recording]
        .into_iter()
        .chain(traced)
        .map(|line| line.to_line())
        .collect()
}

/// Writes the trace beside the boot's file, as that file's owner and readable by the same. The
/// directory is the collector's: the file gets its name when it is whole, no link is followed, and
/// an earlier trace of the boot stays.
pub fn write(boot: &Path, recorded: &Recorded) -> Result<PathBuf> {
    let path = trace_file::beside(boot);
    let meta = open(boot)
        .and_then(|file| file.metadata())
        .with_context(|| format!("look at {}", boot.display()))?;
    let made = path.with_extension(format!("{}.{}", trace_file::EXTENSION, std::process::id()));
    let file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .open(&made)
        .with_context(|| format!("make {}", made.display()))?;
    let fill = |mut file: File| -> Result<()> {
        file.write_all(lines(recorded).as_bytes())?;
        file.set_permissions(Permissions::from_mode(meta.mode() & 0o666))?;
        std::os::unix::fs::fchown(&file, Some(meta.uid()), Some(meta.gid()))?;
        file.sync_all()?;
        fs::hard_link(&made, &path).context(
            "an earlier trace of this boot is not replaced: move it away to keep another one",
        )
    };
    let filled = fill(file);
    // An error of the writing is of more use than that of the removal.
    let _unused = fs::remove_file(&made);
    filled.with_context(|| format!("write {}", path.display()))?;
    Ok(path)
}
