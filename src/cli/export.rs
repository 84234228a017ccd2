//! `kata-gpu-boot export`: one boot in the formats of other programs, and as a page or a picture
//! for people.
//!
//! All formats write a [`Waterfall`]; a file per format knows nothing but its format. An output
//! file is written as a whole or not at all.

#[cfg(test)]
mod tests;

use anyhow::{Context, Result, bail};
use kata_gpu_collect::otlp_push::Target;
use kata_gpu_collect::push_once;
use kata_gpu_report::data::agent_log;
use kata_gpu_report::data::agent_log::AgentLine;
use kata_gpu_report::data::boot_dir::{find, read_boot};
use kata_gpu_report::data::boot_file::BootFile;
use kata_gpu_report::otlp;
use kata_gpu_report::otlp::{Resource, of_this_machine};
use kata_gpu_report::views::waterfall::Waterfall;
use kata_gpu_report::views::{csv, page, perfetto, svg};
use std::fs::File;
use std::io::{self, BufWriter, ErrorKind, IsTerminal, Write};
use std::path::{Path, PathBuf};

const HELP: &str = "\
Formats:
  --html      one page for a browser: waterfall with zoom and details, critical path, failures with the driver's log lines, table; needs no network
  --svg       the waterfall as a picture, for a README or a ticket
  --perfetto  a trace for ui.perfetto.dev and trace_processor: a track per GPU and per side, clocks, flows, counters
  --otlp      one OTLP/JSON request, for an OpenTelemetry Collector (otlpjsonfile receiver, or POST to /v1/traces)
  --csv       one row per step and per report of a GPU's health, for spreadsheets and data frames

Times are the guest's boot clock; wall-clock times are the host's, with their error bound, where the collector compared the two. The resource \
attributes of --otlp are host.* (this machine), k8s.* (where the collector knew the pod), what OTEL_RESOURCE_ATTRIBUTES says, and what \
--attribute says.

Examples:
  # the newest boot of the collector's directory as a page
  kata-gpu-boot export --dir /var/lib/kata-gpu-boot --html --output boot.html
  # with the agent's lines: when was it ready, how long did containers wait
  kata-gpu-boot export 0f7a --html --console console.log -o boot.html
  # into Perfetto
  kata-gpu-boot export 0f7a --perfetto -o boot.pftrace
  # to an OpenTelemetry Collector
  kata-gpu-boot export --otlp --push http://localhost:4318
  kata-gpu-boot export --otlp --attribute k8s.pod.name=trainer-0 |
    curl -sS --json @- http://localhost:4318/v1/traces
  # the five longest steps
  kata-gpu-boot export --csv | sort -t, -k9 -n -r | head -n 5";

/// Write one boot in the format of another program, or as a page or picture.
#[derive(clap::Args, Debug)]
#[command(after_help = HELP)]
pub struct Args {
    /// File of a boot, or a boot id (its first characters are enough) [default: the newest boot].
    boot: Option<String>,
    /// Directory that the collector writes to.
    #[arg(long, default_value = ".")]
    dir: PathBuf,
    #[command(flatten)]
    format: Flags,
    /// Output file; - is standard output.
    #[arg(short, long, value_name = "F")]
    output: Option<PathBuf>,
    /// The guest's console log, or containerd's log with its lines (vmconsole=), for the agent's
    /// own lines [default: the boot's file with the extension .console].
    #[arg(long, value_name = "FILE")]
    console: Option<PathBuf>,
    /// A resource attribute for --otlp, for example k8s.node.name=n1; may be repeated.
    #[arg(long, value_name = "KEY=VALUE")]
    attribute: Vec<String>,
    /// Receiver to send --otlp to: http://HOST:4318 (OTLP over HTTP, protobuf).
    #[arg(long, value_name = "URL", conflicts_with = "output")]
    push: Option<String>,
    /// A header for --push, for example x-tenant=gpu; may be repeated. Secrets belong into
    /// OTEL_EXPORTER_OTLP_HEADERS.
    #[arg(long, value_name = "KEY=VALUE", requires = "push")]
    otlp_header: Vec<String>,
}

#[derive(clap::Args, Debug)]
#[group(required = true, multiple = false)]
struct Flags {
    /// Write one self-contained HTML page.
    #[arg(long)]
    html: bool,
    /// Write the waterfall as a picture.
    #[arg(long)]
    svg: bool,
    /// Write a Perfetto trace (protobuf).
    #[arg(long)]
    perfetto: bool,
    /// Write OTLP/JSON.
    #[arg(long)]
    otlp: bool,
    /// Write a row per step and per report of a GPU's health.
    #[arg(long)]
    csv: bool,
}

impl Flags {
    fn format(&self) -> Format {
        match () {
            () if self.html => Format::Html,
            () if self.svg => Format::Svg,
            () if self.perfetto => Format::Perfetto,
            () if self.otlp => Format::Otlp,
            // clap requires one option of the group.
            () => Format::Csv,
        }
    }
}

/// Formats of the output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    Html,
    Svg,
    Perfetto,
    Otlp,
    Csv,
}

/// Runs `export`.
pub fn run(args: &Args) -> Result<()> {
    let format = args.format.format();
    let output = args
        .output
        .as_deref()
        .filter(|path| *path != Path::new("-"));
    if format == Format::Perfetto && output.is_none() && io::stdout().is_terminal() {
        bail!("a Perfetto trace is binary: name a file with --output, or pipe it somewhere");
    }
    if format != Format::Otlp && !args.attribute.is_empty() {
        bail!("--attribute is for --otlp: other formats have no resource");
    }
    if format != Format::Otlp && args.push.is_some() {
        bail!("--push is for --otlp: other formats are files");
    }
    let path = find(args.boot.as_deref(), &args.dir)?;
    let file = read_boot(&path)?;
    let agent = agent_log::of_boot(&path, file.sandbox_id(), args.console.as_deref())?;
    let resource = if format == Format::Otlp {
        of_this_machine(&args.attribute)?
    } else {
        Resource::new()
    };
    if let Some(url) = &args.push {
        return push_once::run(
            &Target::new(url, &args.otlp_header)?,
            &file,
            &agent,
            &resource,
        );
    }
    let timeline = Waterfall::new(&file, &agent);
    // The waterfall holds all data that the formats need.
    drop((file, agent));
    match output {
        Some(path) => save(path, |out| write(format, &timeline, &resource, out)),
        None => print(|out| write(format, &timeline, &resource, out)),
    }
}

/// The boot in a format. `resource`: attributes for [`Format::Otlp`].
pub fn bytes(
    format: Format,
    file: &BootFile,
    agent: &[AgentLine],
    resource: &Resource,
) -> Result<Vec<u8>> {
    let mut out = Vec::new();
    write(format, &Waterfall::new(file, agent), resource, &mut out)?;
    Ok(out)
}

/// Writes a boot in a format part by part: the output can be many times as long as the file.
pub fn write(
    format: Format,
    timeline: &Waterfall,
    resource: &Resource,
    out: &mut dyn Write,
) -> Result<()> {
    match format {
        Format::Html => page::write(timeline, out)?,
        Format::Svg => out.write_all(svg::write(timeline).as_bytes())?,
        Format::Perfetto => perfetto::write(timeline, out)?,
        Format::Otlp => otlp::write(timeline, resource, out)?,
        Format::Csv => csv::write(timeline, out)?,
    }
    Ok(())
}

/// Writes a temporary file and renames it, so that nobody reads half of it.
fn save(path: &Path, write: impl FnOnce(&mut dyn Write) -> Result<()>) -> Result<()> {
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

/// Prints to standard output; its closing by the reader is no error.
fn print(write: impl FnOnce(&mut dyn Write) -> Result<()>) -> Result<()> {
    let mut out = BufWriter::new(io::stdout().lock());
    let closed = |e: &anyhow::Error| {
        e.downcast_ref::<io::Error>()
            .is_some_and(|e| e.kind() == ErrorKind::BrokenPipe)
    };
    match write(&mut out).and_then(|()| Ok(out.flush()?)) {
        Err(e) if closed(&e) => Ok(()),
        done => done.context("write to standard output"),
    }
}
