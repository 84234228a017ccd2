//! Standard output, which its reader may close.

use anyhow::{Context, Result};
use std::io::{self, BufWriter, ErrorKind, Write};

/// Writes a text to standard output.
pub fn print(text: &str) -> Result<()> {
    print_with(|out| Ok(out.write_all(text.as_bytes())?))
}

/// Writes to standard output, part by part. A reader that closes it (head, a pager) causes no
/// error.
pub fn print_with(write: impl FnOnce(&mut dyn Write) -> Result<()>) -> Result<()> {
    let mut out = BufWriter::new(io::stdout().lock());
    let closed = |error: &anyhow::Error| {
        error
            .downcast_ref::<io::Error>()
            .is_some_and(|e| e.kind() == ErrorKind::BrokenPipe)
    };
    match write(&mut out).and_then(|()| Ok(out.flush()?)) {
        Err(error) if closed(&error) => Ok(()),
        done => done.context("write to standard output"),
    }
}

/// Prints lines and flushes them.
pub fn write_lines(lines: &[String]) -> io::Result<()> {
    if lines.is_empty() {
        return Ok(());
    }
    let mut out = io::stdout().lock();
    out.write_all((lines.join("\n") + "\n").as_bytes())?;
    out.flush()
}
