//! The directory that only this collector writes to.
//!
//! The lock is on the directory itself, not on its name: a directory that was removed and made
//! again is another one, which another collector may have taken. [`Place::hold`] therefore comes
//! before every file that is made or removed by its name.

use super::lock::lock;
use super::privileges::drop_in_thread;
use super::vmm::FileId;
use anyhow::{Context, Result, bail};
use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use nix::sys::stat::{fstat, stat};
use nix::unistd::{AccessFlags, access, geteuid};
use std::fs::{DirBuilder, File};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::thread;
use tokio::sync::watch;

/// Readers of the boots: the collector's user and its group.
const DIR_MODE: u32 = 0o750;

#[derive(Debug)]
pub struct Place {
    path: PathBuf,
    lock: Mutex<Flock<File>>,
    /// True once another collector has the directory of this name.
    lost: watch::Sender<bool>,
}

impl Place {
    /// Makes the directory if it is not there, and takes it.
    pub fn take(path: &Path) -> Result<Self> {
        let at = |what: &str| format!("{what} {}", path.display());
        let mut builder = DirBuilder::new();
        builder.recursive(true).mode(DIR_MODE);
        let made = builder.create(path);
        made.with_context(|| at("create --dir"))?;
        match lock_dir(path).with_context(|| at("lock"))? {
            Some(lock) => Ok(Self {
                path: path.to_path_buf(),
                lock: Mutex::new(lock),
                lost: watch::Sender::new(false),
            }),
            None => bail!("{}", taken(path)),
        }
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Does something to the directory itself.
    pub fn with_dir<T>(&self, what: impl FnOnce(&File) -> T) -> T {
        what(&lock(&self.lock))
    }

    /// Locks the directory that has the name now, if it is another one; with `make`, a missing one
    /// is made. Fails while another collector has it, which [`Place::lost`] then shows.
    pub fn hold(&self, make: bool) -> io::Result<()> {
        let mut held = lock(&self.lock);
        let there = match stat(&self.path) {
            Err(Errno::ENOENT) if make => None,
            there => Some(FileId::from(&there?)),
        };
        if there == Some(FileId::from(&fstat(&**held)?)) {
            return Ok(());
        }
        if there.is_none() {
            DirBuilder::new().mode(DIR_MODE).create(&self.path)?;
        }
        let Some(again) = lock_dir(&self.path)? else {
            self.lost.send_replace(true);
            return Err(io::Error::other(taken(&self.path)));
        };
        *held = again;
        Ok(())
    }

    /// Fails where the threads that write boots cannot reach the directory by its name. They have
    /// the user alone, and this one may also have the right to pass any directory.
    pub fn reach(&self) -> Result<()> {
        let reached = thread::scope(|scope| {
            let as_they_do = || {
                drop_in_thread();
                access(&self.path, AccessFlags::W_OK | AccessFlags::X_OK)
            };
            scope.spawn(as_they_do).join()
        });
        match reached {
            Ok(Err(e @ Errno::EACCES)) => Err(e).with_context(|| {
                format!(
                    "write to --dir {} as user {}: let that user write to it and pass each \
                     directory above it (chmod o+x), or name another --dir",
                    self.path.display(),
                    geteuid()
                )
            }),
            // A disk that takes nothing now may take boots later.
            Ok(_) => Ok(()),
            Err(_) => bail!("the thread that tries --dir panicked"),
        }
    }

    /// Becomes true when another collector has the directory of this name.
    pub fn lost(&self) -> watch::Receiver<bool> {
        self.lost.subscribe()
    }
}

/// Reason why a collector cannot write to a directory.
pub fn taken(path: &Path) -> String {
    format!(
        "another collector writes to {}: stop one of the two, or name another --dir",
        path.display()
    )
}

/// None if another collector has it.
fn lock_dir(path: &Path) -> io::Result<Option<Flock<File>>> {
    match Flock::lock(File::open(path)?, FlockArg::LockExclusiveNonblock) {
        Ok(lock) => Ok(Some(lock)),
        Err((_, Errno::EWOULDBLOCK)) => Ok(None),
        Err((_, e)) => Err(e.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kata_gpu_test_support::temp_dir;

    #[test]
    fn a_directory_made_again_is_locked_again_unless_another_collector_was_first() {
        let dir = temp_dir();
        let path = dir.path().join("boots");
        let place = Place::take(&path).unwrap();
        place.hold(true).unwrap();
        assert!(Place::take(&path).is_err());
        std::fs::remove_dir(&path).unwrap();
        assert_eq!(
            place.hold(false).unwrap_err().kind(),
            io::ErrorKind::NotFound
        );
        place.hold(true).unwrap();
        assert!(Place::take(&path).is_err());
        std::fs::remove_dir(&path).unwrap();
        let other = Place::take(&path).unwrap();
        let error = place.hold(true).unwrap_err().to_string();
        assert!(error.contains("another collector writes to"), "{error}");
        assert!(*place.lost().borrow() && !*other.lost().borrow());
    }
}
