//! Writes and removes our drop-in: whole or not at all, one process at a time.
//!
//! A runtime reads every entry of `config.d` at the start of every pod. An unfinished file
//! therefore stands beside the configuration, not in `config.d`, and is renamed into place. Not
//! here: the decision to write.

use crate::doing::Doing;
use crate::kata::drop_in::NAME;
use anyhow::{Context, Result, anyhow, bail};
use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// Readable by runtimes that do not run as root, whatever the umask.
const MODE: u32 = 0o644;
const DIRECTORY_MODE: u32 = 0o755;

/// Lock on a configuration's directory, held while we read and change it.
pub struct Lock {
    _held: Flock<File>,
}

/// Excludes other processes that install or remove in this directory, and removes the temporary
/// file of one that was killed.
pub fn lock(dir: &Path) -> Result<Lock> {
    let file = File::open(dir).doing("open", dir)?;
    match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
        Ok(held) => {
            let left = temporary(dir);
            match fs::remove_file(&left) {
                // Nothing is left, or nothing can be written here, which the next write reports.
                Err(e)
                    if [ErrorKind::NotFound, ErrorKind::ReadOnlyFilesystem].contains(&e.kind()) =>
                {
                    Ok(Lock { _held: held })
                }
                Err(e) => Err(e).doing("remove", &left),
                Ok(()) => Ok(Lock { _held: held }),
            }
        }
        Err((_, Errno::EWOULDBLOCK)) => bail!(
            "{}: another install is at work here: try again when it is done",
            dir.display()
        ),
        Err((_, e)) => Err(e).doing("lock", dir),
    }
}

/// An error of a step that takes root's rights.
fn failed(step: String) -> impl FnOnce(io::Error) -> anyhow::Error {
    move |error| {
        let hint = match error.kind() {
            ErrorKind::PermissionDenied => ": run it as root",
            _ => "",
        };
        anyhow!("{step}: {error}{hint}")
    }
}

/// Unfinished drop-in in the configuration's directory.
fn temporary(dir: &Path) -> PathBuf {
    dir.join(format!(".{NAME}.new"))
}

/// Writes the drop-in; makes `config.d` where it is missing. Needs the [`Lock`] of its parent.
pub fn put(drop_in_dir: &Path, make_directory: bool, text: &str) -> Result<()> {
    let dir = drop_in_dir.parent();
    let dir = dir.with_context(|| format!("{} has no parent", drop_in_dir.display()))?;
    let temporary = temporary(dir);
    let done = (|| {
        let mut file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(MODE)
            .open(&temporary)
            .map_err(failed(format!("make {}", temporary.display())))?;
        let written = file
            .write_all(text.as_bytes())
            .and_then(|()| file.set_permissions(Permissions::from_mode(MODE)))
            .and_then(|()| file.sync_all());
        written.doing("write", &temporary)?;
        if make_directory {
            let made = fs::create_dir(drop_in_dir).and_then(|()| {
                fs::set_permissions(drop_in_dir, Permissions::from_mode(DIRECTORY_MODE))
            });
            made.map_err(failed(format!("make {}", drop_in_dir.display())))?;
        }
        let target = drop_in_dir.join(NAME);
        let step = format!("rename {} to {}", temporary.display(), target.display());
        let renamed = fs::rename(&temporary, &target).map_err(failed(step));
        if renamed.is_err() && make_directory {
            // The directory is empty; report the rename's error.
            let _unused = fs::remove_dir(drop_in_dir);
        }
        renamed
    })();
    if done.is_err() {
        // The file may not exist; report the earlier error.
        let _unused = fs::remove_file(&temporary);
        return done;
    }
    sync(drop_in_dir)?;
    if make_directory {
        sync(drop_in_dir.parent().unwrap_or(drop_in_dir))
    } else {
        Ok(())
    }
}

/// Removes the drop-in, and an empty `config.d` if install made it. True if the directory was
/// removed.
pub fn remove(drop_in_dir: &Path, made_directory: bool) -> Result<bool> {
    let path = drop_in_dir.join(NAME);
    fs::remove_file(&path).map_err(failed(format!("remove {}", path.display())))?;
    sync(drop_in_dir)?;
    if !made_directory {
        return Ok(false);
    }
    match fs::remove_dir(drop_in_dir) {
        Ok(()) => sync(drop_in_dir.parent().unwrap_or(drop_in_dir)).map(|()| true),
        // Keep a directory that contains other files or was replaced by a link.
        Err(e)
            if matches!(
                e.kind(),
                ErrorKind::DirectoryNotEmpty | ErrorKind::NotADirectory
            ) =>
        {
            Ok(false)
        }
        Err(e) => Err(e).doing("remove", drop_in_dir),
    }
}

fn sync(dir: &Path) -> Result<()> {
    File::open(dir)
        .and_then(|dir| dir.sync_all())
        .doing("sync", dir)
}
