//! Writer of a file: plain or gzip, hashed on the way, and renamed into place only when the file is
//! whole and on the disk.
//!
//! Until then the file has a temporary name in the same directory, and is locked. The leftover of a
//! killed run has no lock, and is replaced. The result replaces a regular file alone, never a
//! device or a link.

use super::image::Form;
use crate::doing::Doing;
use anyhow::{Context, Result, bail, ensure};
use flate2::write::GzEncoder;
use flate2::{Compression, GzBuilder};
use kata_gpu_report::data::text::{hex, printable};
use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg, OFlag};
use sha2::{Digest, Sha256};
use std::fs::{File, Metadata, OpenOptions, Permissions};
use std::io::{self, BufWriter, IntoInnerError, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// gzip -6: -9 takes three times as long to save one percent.
const LEVEL: Compression = Compression::new(6);
/// Operating system in gzip's header. 255: unknown, the same everywhere.
const ANY_SYSTEM: u8 = 255;
const BUFFER: usize = 256 * 1024;
/// Mode of the file, whatever the umask: hypervisors need not run as root.
const MODE: u32 = 0o644;
/// Suffix of a temporary file's name.
pub const PARTIAL: &str = ".kata-gpu-boot-partial";
/// Attempts to make a temporary file while other runs make and remove one of that name.
const TRIES: usize = 16;

/// A file under its temporary name, and locked; removed unless it was renamed.
#[derive(Debug)]
struct Unfinished {
    path: PathBuf,
    temporary: PathBuf,
    renamed: bool,
    _lock: Option<Lock>,
}

/// A file that is being written.
pub struct Output {
    file: Unfinished,
    sink: Sink,
}

enum Sink {
    Plain(Hashed),
    Gzip(Box<GzEncoder<Hashed>>),
    Closed,
}

/// Held while a file has its temporary name.
type Lock = Flock<File>;

struct Hashed {
    file: BufWriter<File>,
    hash: Sha256,
    bytes: u64,
}

impl Write for Hashed {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.file.write(bytes)?;
        self.hash.update(bytes.get(..written).unwrap_or_default());
        self.bytes += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

/// A complete file, before or after its rename.
#[derive(Debug)]
pub struct Written {
    file: Unfinished,
    pub bytes: u64,
    pub sha256: String,
}

impl Output {
    /// Begins a file in the directory of `path`.
    pub fn create(path: &Path, form: Form) -> Result<Self> {
        let shown = path.display();
        let Some(name) = path
            .file_name()
            .filter(|_| !path.as_os_str().as_encoded_bytes().ends_with(b"/"))
        else {
            bail!("write {shown}: that is no name of a file")
        };
        // A rename would replace the device or the link itself.
        if let Ok(meta) = std::fs::symlink_metadata(path) {
            ensure!(!meta.is_dir(), "write {shown}: a directory is there");
            ensure!(
                !meta.is_symlink(),
                "write {shown}: a symbolic link is there: name the file that is meant, or remove \
                 the link"
            );
            ensure!(
                meta.is_file(),
                "write {shown}: it exists and is no regular file: name another file"
            );
        }
        let mut temporary = name.to_os_string();
        temporary.push(PARTIAL);
        let temporary = path.with_file_name(temporary);
        let (file, _lock) = create_locked(&temporary)?;
        let hashed = Hashed {
            file: BufWriter::with_capacity(BUFFER, file),
            hash: Sha256::new(),
            bytes: 0,
        };
        let mut output = Self {
            file: Unfinished {
                path: path.into(),
                temporary,
                renamed: false,
                _lock,
            },
            sink: Sink::Plain(hashed),
        };
        output.set_form(form)?;
        Ok(output)
    }

    /// Switches the form for the bytes that follow; ends an open gzip member.
    pub fn set_form(&mut self, form: Form) -> Result<()> {
        let hashed = match std::mem::replace(&mut self.sink, Sink::Closed) {
            Sink::Plain(hashed) => hashed,
            Sink::Gzip(gzip) => gzip.finish().context("end the compressed part")?,
            Sink::Closed => bail!("{} has been closed", self.file.temporary.display()),
        };
        self.sink = match form {
            Form::Plain => Sink::Plain(hashed),
            Form::Gzip => Sink::Gzip(Box::new(
                GzBuilder::new()
                    .mtime(0)
                    .operating_system(ANY_SYSTEM)
                    .write(hashed, LEVEL),
            )),
        };
        Ok(())
    }

    /// Bytes of the file so far, without bytes still in the compressor.
    pub fn position(&self) -> u64 {
        match &self.sink {
            Sink::Plain(hashed) => hashed.bytes,
            Sink::Gzip(gzip) => gzip.get_ref().bytes,
            Sink::Closed => 0,
        }
    }

    /// Whether this is the temporary file, or the file to be replaced.
    pub fn is_of(&self, meta: &Metadata) -> bool {
        [&self.file.temporary, &self.file.path]
            .into_iter()
            .filter_map(|own| std::fs::symlink_metadata(own).ok())
            .any(|own| (own.dev(), own.ino()) == (meta.dev(), meta.ino()))
    }

    /// Ends the file, still under its temporary name.
    pub fn end(mut self) -> Result<Written> {
        self.set_form(Form::Plain)?;
        let Self {
            file: name,
            sink: Sink::Plain(hashed),
        } = self
        else {
            bail!("the file has been closed")
        };
        // Sync the content before the rename: after a loss of power, an image is the old one or the
        // new one.
        let file = hashed.file.into_inner().map_err(IntoInnerError::into_error);
        file.and_then(|file| {
            file.set_permissions(Permissions::from_mode(MODE))?;
            file.sync_all()
        })
        .doing("write", &name.temporary)?;
        Ok(Written {
            file: name,
            bytes: hashed.bytes,
            sha256: hex(&hashed.hash.finalize()),
        })
    }
}

impl Written {
    /// Temporary path of the file.
    pub fn temporary(&self) -> &Path {
        &self.file.temporary
    }

    /// Final path, printable.
    pub fn shown_path(&self) -> String {
        printable(&self.file.path.display().to_string())
    }

    /// Path, bytes and hash, as text.
    pub fn text(&self) -> String {
        format!(
            "{}: {} bytes, sha256 {}",
            self.shown_path(),
            self.bytes,
            self.sha256
        )
    }

    /// Renames the file into its place.
    pub fn keep(&mut self) -> Result<()> {
        let Unfinished {
            path, temporary, ..
        } = &self.file;
        std::fs::rename(temporary, path)
            .with_context(|| format!("rename {} to {}", temporary.display(), path.display()))?;
        self.file.renamed = true;
        let directory = self.file.path.parent();
        let directory = directory
            .filter(|directory| !directory.as_os_str().is_empty())
            .unwrap_or(Path::new("."));
        File::open(directory)
            .and_then(|directory| directory.sync_all())
            .doing("sync", directory)
    }
}

/// Makes a file that no other run writes, in place of a killed run's leftover.
fn create_locked(path: &Path) -> Result<(File, Option<Lock>)> {
    let shown = path.display();
    for _ in 0..TRIES {
        // Never follow a link that another user may have put there.
        let created = match OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(MODE)
            .open(path)
        {
            Ok(file) => Some(file),
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => None,
            Err(e) => return Err(e).with_context(|| format!("make {shown}")),
        };
        let to_lock = match &created {
            Some(file) => file.try_clone(),
            None => OpenOptions::new()
                .write(true)
                .custom_flags((OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK).bits())
                .open(path),
        };
        let to_lock = match to_lock {
            Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
            file => {
                file.with_context(|| format!("open {shown}, a leftover of another run: remove it"))?
            }
        };
        let lock = match Flock::lock(to_lock, FlockArg::LockExclusiveNonblock) {
            Ok(lock) => lock,
            Err((_, Errno::EWOULDBLOCK)) => {
                bail!("{shown}: another run is writing it: wait for its end, or name another file")
            }
            // On a file system without locks, a leftover looks like a file that is being written.
            Err((_, Errno::ENOLCK | Errno::EOPNOTSUPP | Errno::ENOSYS | Errno::EINVAL)) => {
                match created {
                    Some(file) => return Ok((file, None)),
                    None => bail!(
                        "{shown} is there, and this file system has no locks: remove it if no \
                         other run is writing it"
                    ),
                }
            }
            Err((_, e)) => return Err(e).with_context(|| format!("lock {shown}")),
        };
        // Before the lock, another run could have removed the file as a leftover, or renamed it.
        let (held, named) = (
            lock.metadata()
                .with_context(|| format!("look at {shown}"))?,
            std::fs::symlink_metadata(path),
        );
        if !named.is_ok_and(|named| (named.dev(), named.ino()) == (held.dev(), held.ino())) {
            continue;
        }
        match created {
            Some(file) => return Ok((file, Some(lock))),
            None => {
                ensure!(
                    held.is_file(),
                    "{shown}: it exists and is no regular file: remove it"
                );
                std::fs::remove_file(path)
                    .with_context(|| format!("remove {shown}, a leftover of another run"))?;
            }
        }
    }
    bail!("make {shown}: others make and remove it all the time")
}

impl Write for Output {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match &mut self.sink {
            Sink::Plain(hashed) => hashed.write(bytes),
            Sink::Gzip(gzip) => gzip.write(bytes),
            Sink::Closed => Err(io::Error::other("the file has been closed")),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match &mut self.sink {
            Sink::Plain(hashed) => hashed.flush(),
            // A flush would change the compressor's output.
            Sink::Gzip(_) | Sink::Closed => Ok(()),
        }
    }
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        if !self.renamed {
            // The name marks the file as unfinished, so a failed removal does no harm.
            let _unused = std::fs::remove_file(&self.temporary);
        }
    }
}
