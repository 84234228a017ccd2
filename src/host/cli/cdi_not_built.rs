//! `kata-gpu-boot cdi` of a program without the agents' parsers: names the build that has them.

use std::process::ExitCode;

/// Exit status of `cdi check` for specs that cannot be checked at all.
const USAGE: u8 = 2;

/// Check CDI specs (not in this program: build it with --features host).
#[derive(clap::Args)]
pub struct Args {
    #[arg(hide = true, trailing_var_arg = true, allow_hyphen_values = true)]
    words: Vec<String>,
}

/// Fails as `cdi check` does for specs that it cannot check.
pub fn run(args: &Args) -> ExitCode {
    eprintln!(
        "kata-gpu-boot: cdi {}: this program cannot check specs: build it with \
         cargo build --locked --release --features host --bin kata-gpu-boot",
        args.words.join(" ").escape_debug()
    );
    ExitCode::from(USAGE)
}
