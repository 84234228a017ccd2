//! Helper of kata-gpu-init for NVML: a request on each line of standard input, an answer on each
//! line of standard output. Started once all GPUs are initialised; ends with its input.

mod library; // questions to NVML

use kata_gpu_wire::build_id;
use kata_gpu_wire::nvml_messages::{Answer, LIBRARY, PROGRAM};
use library::{answer, load};
use std::ffi::OsString;
use std::fs::File;
use std::io::{BufRead, Write};
use std::process::ExitCode;

const USAGE: &str = "\
Answers what only NVML knows of this machine's GPUs: a request a line on standard
input, an answer a line of JSON on standard output.

usage: kata-gpu-nvml [--library FILE]

requests:
  facts [GPU..]                     everything of these GPUs, or of all
  state [GPU..]                     of that, what decides whether CUDA works
  clocks GPU graphics|memory MIN MAX  lock clocks, in MHz
  power GPU LIMIT                   set the power limit, in mW
  ready on|off                      set the ready state of confidential GPUs

GPU is a PCI address (0000:01:00.0). FILE is NVML's library (default: libnvidia-ml.so.1).

  $ echo facts | kata-gpu-nvml";

fn main() -> ExitCode {
    let arguments: Vec<OsString> = std::env::args_os().skip(1).collect();
    let library = match &arguments[..] {
        [] => OsString::from(LIBRARY),
        [option, file] if option == "--library" => file.clone(),
        [option] if option == "--help" || option == "-h" => {
            println!("{USAGE}");
            return ExitCode::SUCCESS;
        }
        [option] if option == "--version" || option == "-V" => {
            let id = build_id::of(File::open("/proc/self/exe")).unwrap_or_else(|| "unknown".into());
            println!("{PROGRAM} {}\nbuild {id}", env!("CARGO_PKG_VERSION"));
            return ExitCode::SUCCESS;
        }
        _ => {
            eprintln!("{USAGE}");
            return ExitCode::from(2);
        }
    };
    match serve(&library) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{PROGRAM}: {error}");
            ExitCode::FAILURE
        }
    }
}

fn serve(library: &OsString) -> Result<(), String> {
    let nvml = load(library)?;
    let mut output = std::io::stdout().lock();
    for line in std::io::stdin().lock().lines() {
        let line = line.map_err(|e| format!("read a request: {e}"))?;
        let answer = line
            .parse()
            .map_or_else(Answer::Error, |request| answer(&nvml, &request));
        let json = serde_json::to_string(&answer).map_err(|e| format!("write an answer: {e}"))?;
        writeln!(output, "{json}")
            .and_then(|()| output.flush())
            .map_err(|e| format!("write an answer: {e}"))?;
    }
    Ok(())
}
