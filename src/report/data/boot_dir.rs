//! Boots in a collector's directory: choosing and reading one.

use super::boot_file::{BootFile, EXTENSION, FileLine, HostEvent, Sandbox, decode};
use super::compact_record::Names;
use super::framing::{Lines, Piece};
use super::text::printable;
use super::trace_file;
use anyhow::{Context, Result, bail};
use kata_gpu_wire::record;
use kata_gpu_wire::record::is_boot_id;
use nix::fcntl::OFlag;
use nix::sys::statfs::fstatfs;
use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// File systems of the kernel, whose regular files can block for ever or have no end (kmsg, kcore,
/// trace_pipe): procfs, sysfs, tracefs, debugfs (<linux/magic.h>).
const OF_THE_KERNEL: [u64; 4] = [0x9fa0, 0x6265_6572, 0x7472_6163, 0x6462_6720];

/// Most boots that an error names.
const MAX_NAMED: usize = 8;

/// Bytes at the start of a file that hold the collector's line with the sandbox, if any: it asks
/// the host when the guest connects, and records come meanwhile.
pub const HEAD: u64 = 1 << 20;

/// Opens a file in a directory that may be another user's. Anything but a file with contents of its
/// own is an error: its name can be a link to what a reader never comes back from.
pub fn open(path: &Path) -> io::Result<File> {
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(OFlag::O_NONBLOCK.bits())
        .open(path)?;
    let kind = fstatfs(&file)?.filesystem_type().0 as u64;
    if !file.metadata()?.is_file() || OF_THE_KERNEL.contains(&kind) {
        return Err(io::Error::new(
            ErrorKind::InvalidInput,
            "neither a regular file nor a link to one",
        ));
    }
    Ok(file)
}

/// Reads a boot's file, and the host's trace of the boot if its directory has one. A file without
/// any valid line is an error; damaged lines in a valid file are not.
pub fn read_boot(path: &Path) -> Result<BootFile> {
    let file = open(path).with_context(|| format!("open {}", path.display()))?;
    let mut boot = BootFile::read(file).with_context(|| format!("read {}", path.display()))?;
    if boot.header.is_none() && boot.records.is_empty() {
        let first = boot
            .damage
            .first()
            .map(|d| format!(" (line {}: {})", d.line, d.why))
            .unwrap_or_default();
        bail!(
            "{}: no event stream in it{first}: give a file that `collect` wrote, or the guest's \
             boot.ndjson",
            path.display()
        );
    }
    let trace = trace_file::beside(path);
    if trace.is_file() && trace != path {
        let file = open(&trace).with_context(|| format!("open {}", trace.display()))?;
        boot.read_trace(file.take(trace_file::MAX_BYTES))
            .with_context(|| format!("read {}", trace.display()))?;
    }
    Ok(boot)
}

/// Whether a file begins like a guest's stream or a collector's file, and not like a log.
pub fn is_stream(path: &Path) -> Result<bool> {
    let head = head(path)?.with_context(|| format!("open {}", path.display()))?;
    let (mut found, mut names) = (false, Names::default());
    Lines::new(record::MAX_LINE).push(&head, |piece| {
        if let Piece::Line(line) = piece {
            found |= decode(line, &mut names).is_ok();
        }
    });
    Ok(found)
}

/// File of a boot, as people name it: a path, the start of a boot's id, NAMESPACE/POD, or a
/// sandbox's id; of the newest boot without a name.
pub fn find_named(wanted: Option<&str>, dir: &Path) -> Result<PathBuf> {
    match wanted {
        Some(wanted) if wanted.contains('/') && !Path::new(wanted).is_file() => {
            find_sandbox(wanted, dir)
        }
        Some(wanted) => {
            find(Some(wanted), dir).or_else(|e| find_sandbox(wanted, dir).map_err(|_| e))
        }
        None => find(None, dir),
    }
}

/// File of the newest boot of a sandbox, by its id or as NAMESPACE/POD.
pub fn find_sandbox(wanted: &str, dir: &Path) -> Result<PathBuf> {
    for path in dated(dir)? {
        if head(&path)?.is_some_and(|head| sandbox_in(&head).is_some_and(|of| of.is(wanted))) {
            return Ok(path);
        }
    }
    bail!(
        "no boot of {} in {}: kata-gpu-boot list has all",
        printable(wanted),
        dir.display()
    )
}

/// First bytes of a boot's file, which name its sandbox if a collector knew it; None if the file is
/// gone.
pub fn head(path: &Path) -> Result<Option<Vec<u8>>> {
    let at = || format!("read {}", path.display());
    let mut head = Vec::new();
    match open(path) {
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(None),
        file => file.with_context(at)?.take(HEAD),
    }
    .read_to_end(&mut head)
    .with_context(at)?;
    Ok(Some(head))
}

/// Sandbox that a collector named in the first lines of a boot.
pub fn sandbox_in(head: &[u8]) -> Option<Sandbox> {
    let (mut found, mut names) = (None, Names::default());
    Lines::new(record::MAX_LINE).push(head, |piece| {
        if let Piece::Line(line) = piece
            && let Ok(FileLine::Host(line)) = decode(line, &mut names)
            && let HostEvent::Sandbox(sandbox) = line.event
        {
            found = Some(sandbox);
        }
    });
    found
}

/// File of the boot with this path or id prefix, or of the newest boot.
pub fn find(boot: Option<&str>, dir: &Path) -> Result<PathBuf> {
    let Some(boot) = boot else {
        return Ok(dated(dir)?.swap_remove(0));
    };
    let path = Path::new(boot);
    if path.is_file() {
        return Ok(path.to_path_buf());
    }
    // If there is no such file, the text may be the start of an id; else it is a missing path.
    if !boot
        .bytes()
        .all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f' | b'-'))
    {
        bail!(
            "{}: neither a file nor the start of a boot id: kata-gpu-boot list shows the ids",
            printable(boot)
        );
    }
    let mut found: Vec<PathBuf> = boots(dir)?
        .into_iter()
        .filter(|p| {
            p.file_name()
                .is_some_and(|n| n.to_string_lossy().starts_with(boot))
        })
        .collect();
    match (found.pop(), found.len()) {
        (Some(path), 0) => Ok(path),
        (None, _) => bail!(
            "no file and no boot {boot} in {}: name the collector's directory with --dir",
            dir.display()
        ),
        (Some(last), more) => {
            let all = found
                .iter()
                .chain([&last])
                .filter_map(|path| path.file_stem());
            let names = all
                .take(MAX_NAMED)
                .map(|id| printable(&id.to_string_lossy()));
            bail!(
                "{} boots in {} start with {boot}: give more of the id: {}",
                more + 1,
                dir.display(),
                names.collect::<Vec<_>>().join(", ")
            )
        }
    }
}

/// Boots in a directory: regular files named by a boot id. Other kinds of files are skipped: a pipe
/// would block, and /dev/zero has no end.
pub fn boots(dir: &Path) -> Result<Vec<PathBuf>> {
    let at = || {
        format!(
            "read directory {}: start the collector (kata-gpu-boot collect), or name its directory \
             with --dir",
            dir.display()
        )
    };
    let mut found = Vec::new();
    for entry in std::fs::read_dir(dir).with_context(at)? {
        let path = entry.with_context(at)?.path();
        let named_by_id = path
            .file_stem()
            .and_then(|s| s.to_str())
            .is_some_and(is_boot_id);
        // Skip a dangling link, and a file that the retention has removed in between.
        if named_by_id && path.extension().is_some_and(|e| e == EXTENSION) && path.is_file() {
            found.push(path);
        }
    }
    Ok(found)
}

/// Boots in a directory, at least one, the last written first.
pub fn dated(dir: &Path) -> Result<Vec<PathBuf>> {
    let mut dated = Vec::new();
    for path in boots(dir)? {
        match path.metadata().and_then(|m| m.modified()) {
            Ok(modified) => dated.push((modified, path)),
            // The retention has removed it.
            Err(e) if e.kind() == ErrorKind::NotFound => {}
            Err(e) => return Err(e).with_context(|| format!("look at {}", path.display())),
        }
    }
    if dated.is_empty() {
        bail!(
            "no boot in {}: name the collector's directory (of files BOOT_ID.ndjson) with --dir, \
             or give a file",
            dir.display()
        );
    }
    dated.sort_unstable_by(|a, b| b.cmp(a));
    Ok(dated.into_iter().map(|(_, path)| path).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use kata_gpu_test_support::temp_dir;

    #[test]
    fn a_link_into_the_kernels_file_systems_and_a_pipe_are_refused() {
        let dir = temp_dir();
        let boot = dir
            .path()
            .join("0f7a1f8e-0000-4000-8000-00000000beef.ndjson");
        for target in [
            "/proc/kmsg",
            "/proc/self/maps",
            "/sys/kernel/uevent_seqnum",
            "/dev/null",
        ] {
            std::os::unix::fs::symlink(target, &boot).unwrap();
            let error = open(&boot).unwrap_err();
            assert!(
                error.kind() == ErrorKind::InvalidInput
                    || error.kind() == ErrorKind::PermissionDenied,
                "{target}: {error}"
            );
            std::fs::remove_file(&boot).unwrap();
        }
        nix::unistd::mkfifo(&boot, nix::sys::stat::Mode::S_IRWXU).unwrap();
        assert_eq!(open(&boot).unwrap_err().kind(), ErrorKind::InvalidInput);
        std::fs::remove_file(&boot).unwrap();
        // A link to a file is one: people keep boots elsewhere.
        let other = dir.path().join("other");
        std::fs::write(&other, "").unwrap();
        std::os::unix::fs::symlink(&other, &boot).unwrap();
        assert!(open(&boot).is_ok());
    }

    #[test]
    fn a_boot_is_found_by_file_by_start_of_its_id_or_as_newest() {
        let dir = temp_dir();
        let old = dir
            .path()
            .join("0f7a1f8e-0000-4000-8000-00000000beef.ndjson");
        let new = dir
            .path()
            .join("0f7b1f8e-0000-4000-8000-00000000beef.ndjson");
        std::fs::write(&old, "").unwrap();
        let file = File::create(&new).unwrap();
        file.set_modified(std::time::SystemTime::now() + std::time::Duration::from_secs(5))
            .unwrap();
        std::fs::write(dir.path().join("zzz.ndjson"), "").unwrap();
        assert_eq!(find(None, dir.path()).unwrap(), new);
        assert_eq!(find(Some("0f7a"), dir.path()).unwrap(), old);
        assert_eq!(
            find(Some(old.to_str().unwrap()), Path::new("/")).unwrap(),
            old
        );
        assert!(
            find(Some("0f7"), dir.path())
                .unwrap_err()
                .to_string()
                .contains("2 boots")
        );
        assert!(
            find(Some("beef"), dir.path())
                .unwrap_err()
                .to_string()
                .contains("--dir")
        );
        assert!(
            find(Some("../no/such"), dir.path())
                .unwrap_err()
                .to_string()
                .starts_with("../no/such: neither a file nor the start of a boot id: ")
        );
    }

    #[test]
    fn what_is_called_like_a_boot_and_is_no_file_is_not_looked_into() {
        let dir = temp_dir();
        let named = |n: u8| {
            dir.path()
                .join(format!("0f7a1f8e-0000-4000-8000-00000000000{n}.ndjson"))
        };
        std::fs::write(named(0), "").unwrap();
        std::os::unix::fs::symlink("/nonexistent", named(1)).unwrap();
        std::os::unix::fs::symlink("/dev/zero", named(2)).unwrap();
        std::fs::create_dir(named(3)).unwrap();
        nix::unistd::mkfifo(&named(4), nix::sys::stat::Mode::S_IRWXU).unwrap();
        assert_eq!(boots(dir.path()).unwrap(), [named(0)]);
        assert_eq!(
            find(None, dir.path()).unwrap(),
            named(0),
            "a link to nothing does not keep the others from being found"
        );
    }
}
