//! `kata-gpu-boot trace`: records the host's share of one boot.

use anyhow::{Context, Result};
use kata_gpu_doctor::recorder::recorded::Recorded;
use kata_gpu_doctor::recorder::recording::{Target, Wanted, record};
use kata_gpu_doctor::recorder::{boot_of_vm, report};
use kata_gpu_report::data::text::{Screen, ascii_json};
use kata_gpu_report::data::trace_file::{Recording, Traced};
use kata_gpu_report::terminal::stdout::print;
use serde::Serialize;
use std::path::PathBuf;
use std::time::Duration;

const HELP: &str = "\
Records what the host does for one VM: who pins and maps which memory and which BAR of which function, with calls, pages a call and time; \
resets; exits that the VMM answers; faults; memory. The trace goes beside the boot's file in --dir, as BOOT_ID.trace, and show, blame, \
critical-path, coverage and export have it. Needs root, and probes of the kernel (CONFIG_KPROBE_EVENTS). It uses a tracing instance of its \
own and removes it at the end; one that was killed is cleaned up by the next.

A recording ends when the guest's GPUs are settled, the VM ends, --for is over, or with Ctrl-C.

Examples:
  # the next pod that starts on this node
  kata-gpu-boot trace --next --dir /var/lib/kata-gpu-boot
  kata-gpu-boot show --dir /var/lib/kata-gpu-boot
  # a GPU that is plugged into a running VM
  kata-gpu-boot trace --vm 0a1b2c3d --for 60
  # without a collector: as a table, and as data
  kata-gpu-boot trace --next --for 120 --json | jq '.traced[] | .name'";

/// Record what the host does for one VM: pinning, mapping, resets, exits.
#[derive(clap::Args, Debug)]
#[command(after_help = HELP)]
pub struct Args {
    #[command(flatten)]
    whose: Whose,
    /// Directory that the collector writes to.
    #[arg(long, default_value = ".")]
    dir: PathBuf,
    /// End after so many seconds.
    #[arg(long = "for", value_name = "SECONDS", default_value_t = 900, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    seconds: u64,
    /// Print all data as one JSON object.
    #[arg(long)]
    json: bool,
}

/// The VM.
#[derive(clap::Args, Debug)]
#[group(required = true, multiple = false)]
struct Whose {
    /// Record the next VM of Kata, or with functions of VFIO, that starts on this machine.
    #[arg(long)]
    next: bool,
    /// Record the running VM of this sandbox: Kata's id, its beginning is enough.
    #[arg(long, value_name = "SANDBOX")]
    vm: Option<String>,
    /// Record the VM of this process.
    #[arg(long, value_name = "PID")]
    pid: Option<u32>,
}

/// JSON form, with its version.
#[derive(Serialize)]
struct Json<'a> {
    trace: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    file: Option<PathBuf>,
    recording: &'a Recording,
    traced: &'a [Traced],
}

/// Runs `trace`.
pub fn run(args: &Args) -> Result<()> {
    let target = match (&args.whose.vm, args.whose.pid) {
        (Some(sandbox), _) => Target::Vm(sandbox.clone()),
        (None, Some(pid)) => Target::Pid(pid),
        (None, None) => Target::Next,
    };
    let wanted = Wanted {
        target,
        dir: args.dir.clone(),
        limit: Duration::from_secs(args.seconds),
    };
    let recorded = record(&wanted, &mut |line| eprintln!("kata-gpu-boot: {line}"))?;
    let Recorded {
        recording,
        traced,
        boot,
    } = &recorded;
    let written = boot
        .as_ref()
        .map(|boot| boot_of_vm::write(boot, &recorded))
        .transpose();
    let file = written.as_ref().ok().cloned().flatten();
    let text = match args.json {
        true => ascii_json(&Json {
            trace: 1,
            file: file.clone(),
            recording,
            traced,
        })?,
        false => report::lines(&recorded, &Screen::of_stdout()).join("\n") + "\n",
    };
    print(&text)?;
    match written.context("the recording is printed, but not kept")? {
        Some(file) => eprintln!("kata-gpu-boot: wrote {}", file.display()),
        None => {
            eprintln!(
                "kata-gpu-boot: no boot of this VM in {}: give the collector's directory with --dir to keep it",
                args.dir.display()
            )
        }
    }
    Ok(())
}
