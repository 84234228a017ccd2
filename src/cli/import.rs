//! `kata-gpu-boot import`: reads logs, merges them, writes the boot or shows it.

use anyhow::{Context, Result};
use kata_gpu_report::boot::model::Boot;
use kata_gpu_report::data::boot_file::{BootFile, EXTENSION};
use kata_gpu_report::data::imported_record::Format;
use kata_gpu_report::data::text::{Screen, printable};
use kata_gpu_report::import::assemble::{import, read};
use kata_gpu_report::import::choose::Source;
use kata_gpu_report::import::draft_writer;
use kata_gpu_report::import::import_report;
use kata_gpu_report::import::log_files::Input;
use kata_gpu_report::terminal::stdout::print;
use kata_gpu_report::views::boot_page::page;
use std::path::{Path, PathBuf};

const HELP: &str = "\
Formats, each found by its lines (or named with --format):
  journal   containerd's journal or log with the Kata shim's vmconsole= lines
            (needs debug logs of containerd and Kata): journalctl -u containerd,
            the same with -o json --all, or the log file; of Kata's Rust shim
            journalctl -t kata -o json --all
  console   a guest's console log: kernel stamps, lines of kata-agent, of NVRC,
            of kata-gpu-init
  pod       kubectl get pod NAME -o json
  stream    a file of `collect`, or a guest's boot.ndjson
All may be gzip files; - is standard input. Files of one boot are put on one clock; the report names the way and its error. A record \
from a log has fields.import (format, line, error_ns); ~ marks times with an error of a millisecond or more.

Examples:
  # see one boot from the logs of a node
  journalctl -u containerd -o json --all --since -10m | kata-gpu-boot import -
  # the incumbent's boot, with records of Kubernetes, for all commands
  kata-gpu-boot import containerd.log pod.json -o incumbent.ndjson
  kata-gpu-boot show incumbent.ndjson
  # a console log with several boots in it: the second
  kata-gpu-boot import console.log.gz --boot 2 --boot-dir boots";

/// Make a boot of logs that other programs wrote, with or without our init in the guest.
#[derive(clap::Args, Debug)]
#[command(after_help = HELP)]
pub struct Args {
    /// Logs of one boot, of any of the formats below.
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    /// Directory to write the boot into, as BOOT_ID.ndjson.
    #[arg(long, value_name = "DIR")]
    boot_dir: Option<PathBuf>,
    /// File to write the boot to; - is standard output. Without this and --boot-dir the boot is
    /// shown.
    #[arg(short, long, value_name = "FILE", conflicts_with = "boot_dir")]
    output: Option<PathBuf>,
    /// Format of all files [default: found by their lines].
    #[arg(long, value_enum)]
    format: Option<Format>,
    /// Number of the boot in a file with several [default: list them].
    #[arg(long, value_name = "N")]
    boot: Option<usize>,
    /// Print a report as one JSON object: files, counts, clocks, boot_id.
    #[arg(long)]
    json: bool,
    /// Show details too.
    #[arg(short, long)]
    verbose: bool,
}

/// Runs `import`.
pub fn run(args: &Args) -> Result<()> {
    let sources = args
        .files
        .iter()
        .map(|path| open(path, args.format))
        .collect::<Result<Vec<_>>>()?;
    let (mut report, text) = import(sources, args.boot)?;
    let path = match (&args.boot_dir, &args.output) {
        (Some(dir), _) => Some(dir.join(format!("{}.{EXTENSION}", report.boot_id))),
        (None, output) => output.clone(),
    };
    let to_stdout = path.as_deref() == Some(Path::new("-"));
    if let Some(path) = path.as_ref().filter(|_| !to_stdout) {
        draft_writer::save(path, &text)?;
        report.output = Some(path.display().to_string());
    }
    let screen = Screen::of_stdout();
    let report = match args.json {
        true => serde_json::to_string_pretty(&report).context("write the report as JSON")? + "\n",
        false => import_report::lines(&report, &screen).join("\n") + "\n",
    };
    if to_stdout {
        eprint!("{report}");
        return print(&text);
    }
    if path.is_some() || args.json {
        return print(&report);
    }
    let file = BootFile::read(text.as_bytes()).context("read what was made")?;
    let boot = Boot::new(&file, &[]);
    print(&format!(
        "{report}\n{}",
        page(&file, &[], &boot, args.verbose, screen)?
    ))
}

fn open(path: &Path, format: Option<Format>) -> Result<Source> {
    let name = path.file_name().map_or_else(
        || path.display().to_string(),
        |n| n.to_string_lossy().into_owned(),
    );
    read(&name, Input::open(path)?, format)
        .with_context(|| format!("import {}", printable(&path.display().to_string())))
}

#[cfg(test)]
mod tests {
    use super::Args;
    use clap::Parser;
    use kata_gpu_report::data::boot_dir::read_boot;
    use kata_gpu_test_support::{temp_dir, tests_dir};

    #[derive(clap::Parser)]
    struct Cli {
        #[command(flatten)]
        args: Args,
    }

    fn run(args: &[&str]) -> anyhow::Result<()> {
        super::run(&Cli::try_parse_from([&["import"], args].concat())?.args)
    }

    #[test]
    fn an_imported_boot_is_like_any_other_and_never_overwritten() {
        let dir = temp_dir();
        let log = tests_dir("fixtures/import/containerd.log")
            .display()
            .to_string();
        let to = dir.path().display().to_string();
        run(&[&log, "--boot-dir", &to, "--json"]).unwrap();
        let written: Vec<_> = std::fs::read_dir(dir.path())
            .unwrap()
            .map(|entry| entry.unwrap().path())
            .collect();
        assert_eq!(written.len(), 1);
        let boot = read_boot(&written[0]).unwrap();
        assert_eq!(
            written[0].file_stem().unwrap().to_str(),
            boot.header.as_ref().map(|h| h.boot_id.as_str())
        );
        assert!(
            run(&[&log, "--boot-dir", &to, "--json"])
                .unwrap_err()
                .to_string()
                .contains("is there already")
        );
        let file = dir.path().join("x.ndjson").display().to_string();
        run(&[&log, "--output", &file, "--json"]).unwrap();
        assert_eq!(read_boot(file.as_ref()).unwrap().records, boot.records);
        // The file of an import can be imported again, with other logs.
        let pod = tests_dir("fixtures/import/pod.json").display().to_string();
        let both = dir.path().join("y.ndjson").display().to_string();
        run(&[&file, &pod, "--output", &both, "--json"]).unwrap();
        assert_eq!(
            read_boot(both.as_ref()).unwrap().records.len(),
            boot.records.len() + 8
        );
    }

    #[test]
    fn a_failed_import_names_reason_and_cure() {
        let log = tests_dir("fixtures/import/console.log")
            .display()
            .to_string();
        for (args, want) in [
            (vec!["/nowhere/x.log"], "open /nowhere/x.log"),
            (vec![], "required"),
            (
                vec![&log, "--output", "a", "--boot-dir", "b"],
                "cannot be used with",
            ),
            (vec![&log, "--format", "pod"], "kubectl get pod"),
            (
                vec![&log, "--format", "stream"],
                "nothing in it was recognised as stream",
            ),
            (vec![&log, "--boot", "7"], "there is no boot 7"),
        ] {
            let error = format!("{:#}", run(&args).unwrap_err());
            assert!(error.contains(want), "{args:?}: {error}");
        }
    }
}
