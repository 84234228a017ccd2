//! `kata-gpu-boot show`: the table and the summary of one boot, from its file.

use anyhow::Result;
use kata_gpu_report::boot::model::Boot;
use kata_gpu_report::data::agent_log;
use kata_gpu_report::data::boot_dir::{find, read_boot};
use kata_gpu_report::data::text::{Screen, write_ascii_json};
use kata_gpu_report::terminal::stdout::print_with;
use kata_gpu_report::views::boot_page::write_page;
use std::path::PathBuf;

const HELP: &str = "\
Columns: TIME is seconds since the guest's kernel started, SINCE the distance to the line above, SIDE the owner of the time (kernel, init, driver, \
agent, host), GPU its CDI name and guest PCI address, TOOK the duration of a step. Wall-clock times are the host's, with the bound on their error.

Examples:
  # the newest boot in this directory
  kata-gpu-boot show
  # the boot whose id starts with 0f7a
  kata-gpu-boot show 0f7a --dir /var/log/boots
  # with the agent's lines: its readiness, and the starts of containers
  kata-gpu-boot show boot.ndjson --console console.log
  # with details: begins, kernel messages, every read of the spec by the agent
  kata-gpu-boot show -v
  kata-gpu-boot show --json | jq '.gpus[] | {index, bound: .bound.at_ns}'";

/// Show one boot as a table: steps with owner, time and duration.
#[derive(clap::Args, Debug)]
#[command(after_help = HELP)]
pub struct Args {
    /// File of a boot, or a boot id (its first characters are enough) [default: the newest boot].
    boot: Option<String>,
    /// Directory that the collector writes to.
    #[arg(long, default_value = ".")]
    dir: PathBuf,
    /// The guest's console log, or containerd's log with its lines (vmconsole=), for the agent's
    /// own lines [default: the boot's file with the extension .console].
    #[arg(long, value_name = "FILE")]
    console: Option<PathBuf>,
    /// Print all data as one JSON object: gpus, containers, milestones, spans; times in ns since
    /// kernel start.
    #[arg(long)]
    json: bool,
    /// Show details too.
    #[arg(short, long)]
    verbose: bool,
}

/// Runs `show`.
pub fn run(args: &Args) -> Result<()> {
    let path = find(args.boot.as_deref(), &args.dir)?;
    let file = read_boot(&path)?;
    let agent = agent_log::of_boot(&path, file.sandbox_id(), args.console.as_deref())?;
    let boot = Boot::new(&file, &agent);
    print_with(|out| match args.json {
        true => write_ascii_json(out, &boot),
        false => write_page(out, &file, &agent, &boot, args.verbose, Screen::of_stdout()),
    })
}
