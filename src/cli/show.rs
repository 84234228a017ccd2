//! `kata-gpu-boot show`: one boot, from a collector's file or from logs that people have.

pub mod export;
#[cfg(test)]
mod export_tests;
mod follow;

use super::boots::{BootDir, JSON_VERSION};
use anyhow::{Context, Result, bail, ensure};
use clap::ValueEnum;
use export::Format;
use kata_gpu_report::analysis::loaded::{Loaded, load};
use kata_gpu_report::analysis::verdict::Verdict;
use kata_gpu_report::boot::model::Boot;
use kata_gpu_report::data::boot_dir::{find_named, is_stream};
use kata_gpu_report::data::boot_file::BootFile;
use kata_gpu_report::data::text::{Screen, write_ascii_json};
use kata_gpu_report::import::boot_of_logs;
use kata_gpu_report::terminal::stdout::print_with;
use kata_gpu_report::views::account::{Account, Grouping};
use kata_gpu_report::views::boot_page;
use kata_gpu_report::views::boot_page::{Page, Steps};
use serde::Serialize;
use std::io::{self, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

/// Show one boot: what took how long, what failed, and what would make it shorter.
#[derive(clap::Args, Debug)]
#[command(after_help = include_str!("show/help.txt"))]
pub struct Args {
    /// A boot's file or the start of its id, a pod, or logs of one boot [default: newest boot].
    #[arg(value_name = "BOOT|NAMESPACE/POD|LOG")]
    what: Vec<String>,
    #[command(flatten)]
    dir: BootDir,
    /// Group the time by phase, owner, path or gap.
    #[arg(long, value_enum, default_value_t = By::Phase, hide_possible_values = true)]
    by: By,
    /// Begin at this milestone, not the first one.
    #[arg(long, value_name = "MILESTONE")]
    from: Option<String>,
    /// End at this milestone: "last container", settled, ...
    #[arg(long, value_name = "MILESTONE")]
    to: Option<String>,
    /// Show every step in order of time below; -vv: details too.
    #[arg(short, long, action = clap::ArgAction::Count)]
    verbose: u8,
    /// Log with the agent's lines [default: BOOT.console].
    #[arg(long, value_name = "LOG")]
    console: Option<PathBuf>,
    /// Number of the boot in a log that has several [default: the last].
    #[arg(long, value_name = "N")]
    boot: Option<usize>,
    #[command(flatten)]
    form: Form,
    /// File to write; without a format, the boot, which every verb reads.
    #[arg(short, long, value_name = "FILE", conflicts_with = "follow")]
    output: Option<PathBuf>,
    /// Watch the boot while it happens, or the next one.
    #[arg(long, conflicts_with_all = ["by", "from", "to", "console", "boot"])]
    follow: bool,
    /// With --follow: give up after this time without news; 0: never.
    #[arg(long, value_name = "SECONDS", default_value_t = 300)]
    timeout: u64,
}

/// Forms of the output.
#[derive(clap::Args, Debug)]
#[group(multiple = false, conflicts_with = "follow")]
struct Form {
    /// Print one JSON object; times in ns since kernel start.
    #[arg(long)]
    json: bool,
    /// Write one page for a browser, which needs no network.
    #[arg(long)]
    html: bool,
    /// Write a trace for ui.perfetto.dev.
    #[arg(long)]
    perfetto: bool,
    /// Write one OTLP/JSON request, for an OpenTelemetry Collector.
    #[arg(long)]
    otlp: bool,
}

impl Form {
    fn format(&self) -> Option<Format> {
        match self {
            Self { html: true, .. } => Some(Format::Html),
            Self { perfetto: true, .. } => Some(Format::Perfetto),
            Self { otlp: true, .. } => Some(Format::Otlp),
            _ => None,
        }
    }
}

/// Groupings of a boot's time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum By {
    Phase,
    Owner,
    Path,
    Gap,
}

impl From<By> for Grouping {
    fn from(by: By) -> Self {
        match by {
            By::Phase => Self::Phase,
            By::Owner => Self::Owner,
            By::Path => Self::Path,
            By::Gap => Self::Gap,
        }
    }
}

/// A boot as `show` got it.
struct Shown {
    file: BootFile,
    boot: Boot,
    /// Report on the logs that the boot was made of.
    report: Vec<String>,
}

/// Runs `show`. Exit status: 1 if something failed in the boot.
pub fn run(args: &Args, screen: Screen) -> Result<ExitCode> {
    if args.follow {
        ensure!(args.what.len() < 2, "--follow is for one boot");
        return Ok(follow::run(&follow::Follow {
            dir: &args.dir.dir,
            what: args.what.first().map(String::as_str),
            timeout: (args.timeout > 0).then(|| Duration::from_secs(args.timeout)),
            verbose: args.verbose > 0,
            screen,
        }));
    }
    let format = args.form.format();
    let output = args
        .output
        .as_deref()
        .filter(|path| *path != Path::new("-"));
    if format == Some(Format::Perfetto) && output.is_none() && io::stdout().is_terminal() {
        bail!("a Perfetto trace is binary: name a file with --output, or pipe it somewhere");
    }
    let (shown, source) = read(args)?;
    if let Some(format) = format {
        export::export(format, &shown.file, shown.boot, output)?;
        return Ok(ExitCode::SUCCESS);
    }
    match output {
        Some(path) if !args.form.json => {
            // A kept boot may be the only one; a device (/dev/null) holds none.
            if path.is_file() {
                bail!(
                    "{} is there already: remove it, or write to another file",
                    path.display()
                );
            }
            export::save(path, |out| Ok(out.write_all(&source.bytes()?)?))?;
            eprintln!("kata-gpu-boot: kept as {}", path.display());
        }
        Some(path) => export::save(path, |out| write(args, &shown, screen, out))?,
        None => print_with(|out| write(args, &shown, screen, out))?,
    }
    let failed = Verdict::of(&shown.boot).is_failure();
    Ok(ExitCode::from(u8::from(failed)))
}

/// Origin of a boot.
enum Source {
    /// A collector's file.
    File(PathBuf),
    /// Text of a boot's file, made of logs.
    Made(String),
}

impl Source {
    fn bytes(self) -> Result<Vec<u8>> {
        match self {
            Self::File(path) => {
                std::fs::read(&path).with_context(|| format!("read {}", path.display()))
            }
            Self::Made(text) => Ok(text.into_bytes()),
        }
    }
}

/// Reads what the words name: nothing is the newest boot.
fn read(args: &Args) -> Result<(Shown, Source)> {
    let dir = &args.dir.dir;
    let path = match args.what.as_slice() {
        [] => find_named(None, dir)?,
        [one] if Path::new(one).is_file() => {
            let path = PathBuf::from(one);
            if !is_stream(&path)? {
                return of_logs(&[path], args.boot);
            }
            path
        }
        [one] => find_named(Some(one), dir)?,
        logs => {
            let logs: Vec<PathBuf> = logs.iter().map(PathBuf::from).collect();
            return of_logs(&logs, args.boot);
        }
    };
    ensure!(
        args.boot.is_none(),
        "--boot is for logs: {} has one boot",
        path.display()
    );
    let Loaded { file, boot } = load(&path, args.console.as_deref())?;
    let report = Vec::new();
    Ok((Shown { file, boot, report }, Source::File(path)))
}

/// A boot made of logs that other programs wrote.
fn of_logs(paths: &[PathBuf], boot: Option<usize>) -> Result<(Shown, Source)> {
    let made = boot_of_logs(paths, boot)?;
    let shown = Shown {
        boot: Boot::new(&made.boot, &[]),
        file: made.boot,
        report: made.warnings,
    };
    Ok((shown, Source::Made(made.text)))
}

/// The JSON form: the boot, and its account.
#[derive(Serialize)]
struct Json<'a> {
    json_version: u32,
    #[serde(flatten)]
    boot: &'a Boot,
    verdict: Verdict,
    /// The sentences of its failures.
    failures: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    account: Option<Account>,
    notes: &'a [String],
}

/// Writes the page, or its JSON form.
fn write(args: &Args, shown: &Shown, screen: Screen, out: &mut dyn Write) -> Result<()> {
    let Shown { file, boot, report } = shown;
    let (from, to) = (args.from.as_deref(), args.to.as_deref());
    let account = boot_page::account(boot, args.by.into(), from, to)?;
    if args.form.json {
        let verdict = Verdict::with_time(boot);
        let json = Json {
            json_version: JSON_VERSION,
            boot,
            failures: verdict
                .failures()
                .map(|failure| failure.text.clone())
                .collect(),
            verdict,
            account: account.map(|(_, account)| account),
            notes: &boot.timeline.notes,
        };
        return Ok(write_ascii_json(out, &json)?);
    }
    let page = Page {
        account,
        steps: match args.verbose {
            0 => Steps::None,
            1 => Steps::Main,
            _ => Steps::All,
        },
        report,
        ..Page::new(file, boot)
    };
    Ok(boot_page::write(&page, screen, out)?)
}

/// The page, or its JSON form.
#[cfg(test)]
pub(crate) fn text(args: &Args, screen: Screen) -> Result<String> {
    let mut out = Vec::new();
    write(args, &read(args)?.0, screen, &mut out)?;
    String::from_utf8(out).context("a page is ASCII")
}
