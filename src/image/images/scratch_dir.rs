//! A directory below TMPDIR that goes with its process.
//!
//! The directory is locked while it is used. A killed process leaves it without a lock, and the
//! next one removes it.

use anyhow::{Context, Result, bail};
use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg, OFlag};
use nix::unistd::geteuid;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// Letters that mkdtemp(3) draws.
const DRAWN: &str = "XXXXXX";
/// Tries until a new directory is locked before another run takes it for a leftover.
const TRIES: usize = 16;

#[derive(Debug)]
pub struct ScratchDir {
    path: PathBuf,
    /// None on a file system without locks.
    _lock: Option<Flock<File>>,
}

impl ScratchDir {
    /// Makes a directory with `kind` in its name, and removes those of that kind that killed runs
    /// of this user left.
    pub fn new(kind: &str) -> Result<Self> {
        Self::below(&std::env::temp_dir(), kind)
    }

    fn below(parent: &Path, kind: &str) -> Result<Self> {
        let prefix = format!("kata-gpu-boot-{kind}-");
        remove_leftovers(parent, &prefix);
        let template = parent.join(format!("{prefix}{DRAWN}"));
        let at = || {
            format!(
                "make directory {} (TMPDIR names another place)",
                template.display()
            )
        };
        for _ in 0..TRIES {
            let path = nix::unistd::mkdtemp(&template).with_context(at)?;
            let lock = match lock(&path) {
                Ok(lock) => Some(lock),
                Err(Errno::ENOLCK | Errno::EOPNOTSUPP | Errno::ENOSYS | Errno::EINVAL) => None,
                // Another run is removing it.
                Err(Errno::EWOULDBLOCK | Errno::ENOENT | Errno::ESTALE) => {
                    let _unused = std::fs::remove_dir(&path);
                    continue;
                }
                Err(e) => return Err(e).with_context(at),
            };
            return Ok(Self { path, _lock: lock });
        }
        bail!("{}: others remove it all the time", at())
    }

    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for ScratchDir {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_dir_all(&self.path) {
            eprintln!(
                "kata-gpu-boot: remove {}: {error}: remove it by hand",
                self.path.display()
            );
        }
    }
}

/// Locks a directory. ESTALE: the name leads elsewhere by now.
fn lock(path: &Path) -> nix::Result<Flock<File>> {
    let errno = |e: io::Error| Errno::from_raw(e.raw_os_error().unwrap_or_default());
    let directory = OpenOptions::new()
        .read(true)
        .custom_flags((OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW).bits())
        .open(path)
        .map_err(errno)?;
    let lock = Flock::lock(directory, FlockArg::LockExclusiveNonblock).map_err(|(_, e)| e)?;
    let held = lock.metadata().map_err(errno)?;
    let named = std::fs::symlink_metadata(path).map_err(errno)?;
    let is_it = (named.dev(), named.ino()) == (held.dev(), held.ino());
    if is_it { Ok(lock) } else { Err(Errno::ESTALE) }
}

/// Whether a directory is this user's. Some file systems give each file another owner.
fn is_own(directory: &Flock<File>) -> bool {
    let metadata = directory.metadata();
    metadata.is_ok_and(|metadata| metadata.uid() == geteuid().as_raw())
}

/// Removes directories of killed runs. Any failure leaves one there, as it was before.
fn remove_leftovers(parent: &Path, prefix: &str) {
    for entry in std::fs::read_dir(parent).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let drawn = name.to_str().and_then(|name| name.strip_prefix(prefix));
        if drawn.is_none_or(|drawn| drawn.len() != DRAWN.len()) {
            continue;
        }
        let path = entry.path();
        if let Ok(lock) = lock(&path)
            && is_own(&lock)
            && std::fs::remove_dir_all(&path).is_ok()
        {
            eprintln!(
                "kata-gpu-boot: removed {}, which a killed run left",
                path.display()
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kata_gpu_test_support::temp_dir;

    #[test]
    fn what_a_killed_run_left_goes_and_what_another_run_uses_stays() {
        let dir = temp_dir();
        let at = |name: &str| dir.path().join(name);
        let used = ScratchDir::below(dir.path(), "initrd").unwrap();
        let others = [
            "kata-gpu-boot-initrd-longer7",
            "kata-gpu-boot-image-abcdef",
            "mine",
        ];
        let left = "kata-gpu-boot-initrd-abcdef";
        for name in others.into_iter().chain([left]) {
            std::fs::create_dir_all(at(name).join("usr")).unwrap();
        }
        std::os::unix::fs::symlink(at("mine"), at("kata-gpu-boot-initrd-linked")).unwrap();
        let new = ScratchDir::below(dir.path(), "initrd").unwrap();
        assert!(!at(left).exists(), "a killed run's");
        for path in others
            .map(at)
            .iter()
            .map(PathBuf::as_path)
            .chain([used.path(), new.path()])
        {
            assert!(path.exists(), "{}", path.display());
        }
        assert!(at("mine/usr").exists(), "no link is followed");
        let paths = [used.path().to_path_buf(), new.path().to_path_buf()];
        drop((used, new));
        assert!(paths.iter().all(|path| !path.exists()));
    }
}
