//! `kata-gpu-boot cdi` of a program without the agents' parsers: names the build that has them.

use std::process::ExitCode;

/// Exit status of `cdi check` for what cannot be checked at all.
const USAGE: u8 = 2;

/// Look at CDI specs (this program was built without it: --features host).
#[derive(clap::Args)]
pub struct Args {
    #[arg(hide = true, trailing_var_arg = true, allow_hyphen_values = true)]
    words: Vec<String>,
}

/// Fails as `cdi check` does where it cannot answer.
pub fn run(args: &Args) -> ExitCode {
    eprintln!(
        "kata-gpu-boot: cdi {}: this program cannot check specs: build it with \
         cargo build --locked --release --features host --bin kata-gpu-boot",
        args.words.join(" ").escape_debug()
    );
    ExitCode::from(USAGE)
}
