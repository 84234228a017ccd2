//! The file that is written: plain or gzip, hashed on the way, and in its place only when it is whole.

use super::image::Form;
use super::text::hex;
use anyhow::{Context, Result, bail};
use flate2::write::GzEncoder;
use flate2::{Compression, GzBuilder};
use sha2::{Digest, Sha256};
use std::fs::{File, OpenOptions};
use std::io::{self, BufWriter, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// gzip -6: -9 takes three times as long for one part in a hundred.
const LEVEL: Compression = Compression::new(6);
/// Of gzip's header: who made it. 255: unknown, the same everywhere.
const ANY_SYSTEM: u8 = 255;
const BUFFER: usize = 256 * 1024;

/// A file beside the one that is meant, until [`Output::finish`].
pub struct Output {
    path: PathBuf,
    temporary: PathBuf,
    sink: Sink,
    /// No file of that name is left behind.
    kept: bool,
}

enum Sink {
    Plain(Hashed),
    Gzip(Box<GzEncoder<Hashed>>),
    Closed,
}

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
}

impl Output {
    /// Begins a file beside `path`.
    pub fn create(path: &Path, form: Form) -> Result<Self> {
        let Some(name) = path.file_name() else { bail!("write {}: that is no name of a file", path.display()) };
        if path.is_dir() {
            bail!("write {}: a directory is there", path.display());
        }
        let mut temporary = name.to_os_string();
        temporary.push(format!(".{}.new", std::process::id()));
        let temporary = path.with_file_name(temporary);
        // Never through a link that somebody else may have put there.
        let file = OpenOptions::new().write(true).create_new(true).mode(0o644).open(&temporary);
        let file = file.with_context(|| format!("make {}", temporary.display()))?;
        let hashed = Hashed { file: BufWriter::with_capacity(BUFFER, file), hash: Sha256::new(), bytes: 0 };
        let mut output = Self { path: path.into(), temporary, sink: Sink::Plain(hashed), kept: false };
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

    /// Ends the file, still under its temporary name.
    pub fn end(mut self) -> Result<Written> {
        self.set_form(Form::Plain)?;
        let Sink::Plain(mut hashed) = std::mem::replace(&mut self.sink, Sink::Closed) else {
            bail!("{} has been closed", self.temporary.display())
        };
        hashed.flush().with_context(|| format!("write {}", self.temporary.display()))?;
        self.kept = true;
        let (path, temporary) = (self.path.clone(), self.temporary.clone());
        Ok(Written { path, temporary, bytes: hashed.bytes, sha256: hex(&hashed.hash.finalize()), kept: false })
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
        Ok(())
    }
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
            // It was not finished, and says so itself; a file more in a full directory changes nothing.
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
