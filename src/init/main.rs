//! `/init` of a GPU guest. As PID 1 it boots the guest; started by a person it explains itself.

use kata_gpu_init::cdi;
use kata_gpu_init::cdi::hooks;
use kata_gpu_init::machine::{clock, tsc};
use kata_gpu_init::services::{launch, service_table};
use kata_gpu_init::{boot, config};
use kata_gpu_wire::build_id;
use sha2::{Digest, Sha256};
use std::fs::File;
use std::process::ExitCode;

const HELP: &str = "\
kata-gpu-init: PID 1 of a Kata Containers guest with NVIDIA GPUs

As PID 1 it mounts the guest's file systems, becomes /usr/bin/kata-agent, and brings all GPUs up \
meanwhile: each GPU is in the CDI spec
(/var/run/cdi/nvidia.yaml) as soon as the driver has it, and every step is reported over vsock, \
with its time.

usage:
  /init                       as PID 1: boot (put this file into an initrd as /init)
  kata-gpu-init cdi generate  a CDI spec of this machine or of a directory tree (`kata-gpu-init \
  cdi --help`)
  kata-gpu-init parameters    the kernel parameters, as a Markdown table
  kata-gpu-init services      NVIDIA's services, as a Markdown table
  kata-gpu-init hook ..       a container hook, as nvidia-cdi-hook: `kata-gpu-init hook --help` \
  lists them
  kata-gpu-init --version     version, id of the build, and sum of this program, to compare with \
  a release
  kata-gpu-init --help
";

/// Called by the C library before Rust's runtime starts.
// SAFETY: libc calls what .init_array points to as a C function, which this is; the function uses
// nothing of Rust's runtime.
#[allow(
    unsafe_code,
    reason = "only the section attribute has the C library call a function"
)]
#[used]
#[unsafe(link_section = ".init_array")]
static BEFORE_MAIN: extern "C" fn() = kata_gpu_init::machine::sys::before_main;

/// Version, the build's id (that of the stream's `init.start`), and the program's sum, which stands
/// in SHA256SUMS of its release.
fn version() -> String {
    let id = build_id::of(File::open("/proc/self/exe")).unwrap_or_else(|| "unknown".into());
    let sum = std::fs::read("/proc/self/exe").map(|bytes| {
        Sha256::digest(bytes)
            .iter()
            .map(|b| format!("{b:02x}"))
            .collect()
    });
    let sum: String = sum.unwrap_or_else(|e| format!("unknown: read /proc/self/exe: {e}"));
    format!(
        "kata-gpu-init {}\nbuild {id}\nsha256 {sum}\n",
        env!("CARGO_PKG_VERSION")
    )
}

fn main() -> ExitCode {
    let started_ns = clock::boottime_ns(); // before anything else: the timeline starts here
    let is_init = std::process::id() == 1;
    if let Some(words) = hooks::invocation(std::env::args_os(), is_init) {
        return hooks::main(words);
    }
    if is_init {
        boot::processes::pid1::run(started_ns, tsc::read())
    }
    if std::env::args_os()
        .nth(1)
        .is_some_and(|word| word == launch::WORD)
    {
        return ExitCode::from(launch::main(std::env::args_os().skip(2)));
    }
    let words: Vec<String> = std::env::args_os()
        .skip(1)
        .map(|word| word.to_string_lossy().into_owned())
        .collect();
    match words.first().map(String::as_str) {
        Some("cdi") => return cdi::command::main(words.get(1..).unwrap_or_default()),
        Some("parameters") => print!("{}", config::parameter_table::parameters_markdown()),
        Some("services") => print!("{}", service_table::services_markdown()),
        Some("--version" | "-V") => print!("{}", version()),
        Some("--help" | "-h") => print!("{HELP}"),
        None => {
            eprintln!(
                "kata-gpu-init: not PID 1, so there is nothing to boot; `kata-gpu-init --help` \
                    describes it"
            );
            return ExitCode::from(2);
        }
        Some(other) => {
            eprintln!(
                "kata-gpu-init: unknown command {other:?}; `kata-gpu-init --help` lists them"
            );
            return ExitCode::from(2);
        }
    }
    ExitCode::SUCCESS
}
