//! One boot in the formats of other programs, and as a page for a browser.
//!
//! All formats write a [`Waterfall`]; a file per format knows nothing but its format. An output
//! file is written as a whole or not at all.

use anyhow::{Context, Result, bail};
use kata_gpu_report::boot::model::Boot;
use kata_gpu_report::data::boot_file::BootFile;
use kata_gpu_report::otlp;
use kata_gpu_report::otlp::{Resource, of_this_machine};
use kata_gpu_report::terminal::stdout::print_with;
use kata_gpu_report::views::waterfall::Waterfall;
use kata_gpu_report::views::{page, perfetto};
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

/// Formats of other programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    Html,
    Perfetto,
    Otlp,
}

/// Writes a boot to a file, or to standard output.
pub fn export(format: Format, file: &BootFile, boot: Boot, output: Option<&Path>) -> Result<()> {
    let resource = match format {
        Format::Otlp => of_this_machine()?,
        Format::Html | Format::Perfetto => Resource::new(),
    };
    let timeline = Waterfall::new(file, boot);
    match output {
        Some(path) => save(path, |out| write(format, &timeline, &resource, out)),
        None => print_with(|out| write(format, &timeline, &resource, out)),
    }
}

/// Writes a boot in a format part by part: the output can be many times as long as the file.
/// `resource`: attributes for [`Format::Otlp`].
pub fn write(
    format: Format,
    timeline: &Waterfall,
    resource: &Resource,
    out: &mut dyn Write,
) -> Result<()> {
    match format {
        Format::Html => page::write(timeline, out)?,
        Format::Perfetto => perfetto::write(timeline, out)?,
        Format::Otlp => otlp::write(timeline, resource, out)?,
    }
    Ok(())
}

/// Writes a temporary file and renames it, so that nobody reads half of it.
pub fn save(path: &Path, write: impl FnOnce(&mut dyn Write) -> Result<()>) -> Result<()> {
    let to = |path: &Path| {
        let mut out = BufWriter::new(File::create(path)?);
        write(&mut out)?;
        Ok::<_, anyhow::Error>(out.flush()?)
    };
    let Some(name) = path.file_name() else {
        bail!("write {}: not the name of a file", path.display())
    };
    // A pipe, a device or a link is written to, not replaced: /dev/stdout is a link.
    if path.symlink_metadata().is_ok_and(|meta| !meta.is_file()) {
        return to(path).with_context(|| format!("write {}", path.display()));
    }
    let mut temporary = name.to_os_string();
    temporary.push(format!(".{}.tmp", std::process::id()));
    let temporary = path.with_file_name(temporary);
    let done = to(&temporary).and_then(|()| Ok(std::fs::rename(&temporary, path)?));
    if done.is_err() {
        // The partial file is of no use. The error of its removal would hide the first one.
        let _unused = std::fs::remove_file(&temporary);
    }
    done.with_context(|| format!("write {}", path.display()))
}
