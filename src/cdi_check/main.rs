//! kata-gpu-cdi-check: CDI specs as agents read them, for tests and for authors of specs.

use anyhow::Result;
use clap::Parser;
use kata_gpu_cdi_check::{check, page, spec_files};
use kata_gpu_report::data::text::{ascii_json, printable};
use kata_gpu_report::terminal::stdout::print;
use std::path::PathBuf;
use std::process::ExitCode;

const HELP: &str = "\
Two agents read the specs, with the very parsers that Kata releases contain:
Kata <= 3.32 (container-device-interface 0.1.2) and Kata 4 (1.1.1). Device
nodes are taken to exist; ? marks facts that only the guest's node has.
A GPU that is not ready makes a container wait, and is not an error.

Exit status: 0 nothing is wrong, 1 something is, 2 the specs cannot be read.

Examples:
  # what a container with GPUs 0 and 1 gets
  kata-gpu-cdi-check nvidia.yaml 0 1
  # all specs of a guest, for programs
  kata-gpu-cdi-check /var/run/cdi --json | jq .agents";

/// Check CDI specs as kata-agent reads them, and show what a container would get.
#[derive(Parser, Debug)]
#[command(name = "kata-gpu-cdi-check", version, after_help = HELP)]
struct Args {
    /// A spec, or a directory of specs like /var/run/cdi.
    #[arg(value_name = "FILE|DIR")]
    path: PathBuf,
    /// Devices that one container requests: nvidia.com/gpu=0, or 0 [default: each device by
    /// itself].
    #[arg(value_name = "DEVICE")]
    devices: Vec<String>,
    /// Print everything as one JSON object: files, agents, containers, problems.
    #[arg(long)]
    json: bool,
}

fn main() -> ExitCode {
    match run(&Args::parse()) {
        Ok(false) => ExitCode::SUCCESS,
        Ok(true) => ExitCode::from(1),
        Err(error) => {
            eprintln!("kata-gpu-cdi-check: {}", printable(&format!("{error:#}")));
            ExitCode::from(2)
        }
    }
}

/// Prints the report; returns whether something is wrong.
fn run(args: &Args) -> Result<bool> {
    let report = check::check(&spec_files::read(&args.path)?, &args.devices)?;
    print(&match args.json {
        true => ascii_json(&report.json())?,
        false => page::page(&report, !args.devices.is_empty()),
    })?;
    Ok(report.has_errors())
}
