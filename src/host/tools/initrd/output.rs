//! The file that is written: plain or gzip, hashed on the way, and in its place only when it is
//! whole and on the disk.
//!
//! Until then it has a name of its own beside that place, and is locked: what a run that was killed
//! left there is known by nobody holding it, and is replaced. Nothing but a regular file, or
//! nothing, is ever replaced by the result: no device, no link.

use super::image::Form;
use super::text::hex;
use anyhow::{Context, Result, bail, ensure};
use flate2::write::GzEncoder;
use flate2::{Compression, GzBuilder};
use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg, OFlag};
use sha2::{Digest, Sha256};
use std::fs::{File, Metadata, OpenOptions, Permissions};
use std::io::{self, BufWriter, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// gzip -6: -9 takes three times as long for one part in a hundred.
const LEVEL: Compression = Compression::new(6);
/// Of gzip's header: who made it. 255: unknown, the same everywhere.
const ANY_SYSTEM: u8 = 255;
const BUFFER: usize = 256 * 1024;
/// Mode of the file, whatever the umask: hypervisors need not run as root.
const MODE: u32 = 0o644;
/// What the name of a file under way ends in.
pub const PARTIAL: &str = ".kata-gpu-boot-partial";
/// How often a file under way is made, where others of that name come and go.
const TRIES: usize = 16;

/// A file beside the one that is meant, until [`Output::finish`].
pub struct Output {
    path: PathBuf,
    temporary: PathBuf,
    sink: Sink,
    lock: Option<Lock>,
    /// No file of that name is left behind.
    kept: bool,
}

enum Sink {
    Plain(Hashed),
    Gzip(Box<GzEncoder<Hashed>>),
    Closed,
}

/// Held while a file under way has its name.
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

/// What was written.
#[derive(Debug)]
pub struct Written {
    pub path: PathBuf,
    temporary: PathBuf,
    pub bytes: u64,
    pub sha256: String,
    kept: bool,
    _lock: Option<Lock>,
}

impl Output {
    /// Begins a file beside `path`.
    pub fn create(path: &Path, form: Form) -> Result<Self> {
        let shown = path.display();
        let Some(name) = path.file_name().filter(|_| !path.as_os_str().as_encoded_bytes().ends_with(b"/")) else {
            bail!("write {shown}: that is no name of a file")
        };
        // By rename it would be the device or the link itself that is replaced.
        if let Ok(meta) = std::fs::symlink_metadata(path) {
            ensure!(!meta.is_dir(), "write {shown}: a directory is there");
            ensure!(!meta.is_symlink(), "write {shown}: a symbolic link is there: name the file that is meant, or remove the link");
            ensure!(meta.is_file(), "write {shown}: what is there is no regular file: name another file");
        }
        let mut temporary = name.to_os_string();
        temporary.push(PARTIAL);
        let temporary = path.with_file_name(temporary);
        let (file, lock) = create_locked(&temporary)?;
        let hashed = Hashed { file: BufWriter::with_capacity(BUFFER, file), hash: Sha256::new(), bytes: 0 };
        let mut output = Self { path: path.into(), temporary, sink: Sink::Plain(hashed), lock, kept: false };
        output.set_form(form)?;
        Ok(output)
    }

    /// From here on in this form: a gzip member that was begun ends.
    pub fn set_form(&mut self, form: Form) -> Result<()> {
        let hashed = match std::mem::replace(&mut self.sink, Sink::Closed) {
            Sink::Plain(hashed) => hashed,
            Sink::Gzip(gzip) => gzip.finish().context("end the compressed part")?,
            Sink::Closed => bail!("{} has been closed", self.temporary.display()),
        };
        self.sink = match form {
            Form::Plain => Sink::Plain(hashed),
            Form::Gzip => Sink::Gzip(Box::new(GzBuilder::new().mtime(0).operating_system(ANY_SYSTEM).write(hashed, LEVEL))),
        };
        Ok(())
    }

    /// Bytes of the file so far; of what is being compressed only those that are out.
    pub fn position(&self) -> u64 {
        match &self.sink {
            Sink::Plain(hashed) => hashed.bytes,
            Sink::Gzip(gzip) => gzip.get_ref().bytes,
            Sink::Closed => 0,
        }
    }

    /// Whether this is the file under way, or what it is to replace.
    pub fn is_of(&self, meta: &Metadata) -> bool {
        [&self.temporary, &self.path]
            .into_iter()
            .filter_map(|own| std::fs::symlink_metadata(own).ok())
            .any(|own| (own.dev(), own.ino()) == (meta.dev(), meta.ino()))
    }

    /// Ends the file, still under its temporary name.
    pub fn end(mut self) -> Result<Written> {
        self.set_form(Form::Plain)?;
        let Sink::Plain(mut hashed) = std::mem::replace(&mut self.sink, Sink::Closed) else {
            bail!("{} has been closed", self.temporary.display())
        };
        // Its name must not be on the disk before its content is: after a loss of power, an image
        // is the old one or the new one.
        let file = hashed.file.get_ref().try_clone().with_context(|| format!("write {}", self.temporary.display()))?;
        let mode = || file.set_permissions(Permissions::from_mode(MODE));
        hashed
            .flush()
            .and_then(|()| mode())
            .and_then(|()| file.sync_all())
            .with_context(|| format!("write {}", self.temporary.display()))?;
        self.kept = true;
        let (path, temporary, lock) = (self.path.clone(), self.temporary.clone(), self.lock.take());
        Ok(Written { path, temporary, bytes: hashed.bytes, sha256: hex(&hashed.hash.finalize()), kept: false, _lock: lock })
    }
}

impl Written {
    /// Where it lies until it is kept.
    pub fn temporary(&self) -> &Path {
        &self.temporary
    }

    /// Puts it into its place.
    pub fn keep(&mut self) -> Result<()> {
        std::fs::rename(&self.temporary, &self.path)
            .with_context(|| format!("rename {} to {}", self.temporary.display(), self.path.display()))?;
        self.kept = true;
        let directory = self.path.parent().filter(|directory| !directory.as_os_str().is_empty()).unwrap_or(Path::new("."));
        File::open(directory).and_then(|directory| directory.sync_all()).with_context(|| format!("sync {}", directory.display()))
    }
}

/// Makes a file that nobody else writes, in place of what a killed run left.
fn create_locked(path: &Path) -> Result<(File, Option<Lock>)> {
    let shown = path.display();
    for _ in 0..TRIES {
        // Never through a link that somebody else may have put there.
        let created = match OpenOptions::new().write(true).create_new(true).mode(MODE).open(path) {
            Ok(file) => Some(file),
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => None,
            Err(e) => return Err(e).with_context(|| format!("make {shown}")),
        };
        let to_lock = match &created {
            Some(file) => file.try_clone(),
            None => OpenOptions::new().write(true).custom_flags((OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK).bits()).open(path),
        };
        let to_lock = match to_lock {
            Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
            file => file.with_context(|| format!("open {shown}, which is left of another run: remove it"))?,
        };
        let lock = match Flock::lock(to_lock, FlockArg::LockExclusiveNonblock) {
            Ok(lock) => lock,
            Err((_, Errno::EWOULDBLOCK)) => bail!("{shown}: another run is writing it: wait for its end, or name another file"),
            // A file system without locks: what others left there cannot be told from what they
            // write.
            Err((_, Errno::ENOLCK | Errno::EOPNOTSUPP | Errno::ENOSYS | Errno::EINVAL)) => match created {
                Some(file) => return Ok((file, None)),
                None => bail!("{shown} is there, and this file system has no locks: remove it if no other run is writing it"),
            },
            Err((_, e)) => return Err(e).with_context(|| format!("lock {shown}")),
        };
        // Until it was locked, another run could take it for a killed one's, or give it its final
        // name.
        let (held, named) = (lock.metadata().with_context(|| format!("look at {shown}"))?, std::fs::symlink_metadata(path));
        if !named.is_ok_and(|named| (named.dev(), named.ino()) == (held.dev(), held.ino())) {
            continue;
        }
        match created {
            Some(file) => return Ok((file, Some(lock))),
            None => {
                ensure!(held.is_file(), "{shown}: what is there is no regular file: remove it");
                std::fs::remove_file(path).with_context(|| format!("remove {shown}, which is left of another run"))?;
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
            // To flush a compressor would change what comes out.
            Sink::Gzip(_) | Sink::Closed => Ok(()),
        }
    }
}

impl Drop for Output {
    fn drop(&mut self) {
        if !self.kept {
            // It was not finished, and says so itself; a file more in a full directory changes
            // nothing.
            let _unused = std::fs::remove_file(&self.temporary);
        }
    }
}

impl Drop for Written {
    fn drop(&mut self) {
        if !self.kept {
            let _unused = std::fs::remove_file(&self.temporary);
        }
    }
}
