//! `kata-gpu-boot completions` and `kata-gpu-boot man`, made by clap from the verbs themselves.

use anyhow::{Context, Result};
use clap::Command;
use clap_complete::Shell;
use std::path::PathBuf;

/// Print the completions of a shell.
#[derive(clap::Args, Debug)]
pub struct Completions {
    shell: Shell,
}

/// Write the manual's pages, one a verb.
#[derive(clap::Args, Debug)]
pub struct Man {
    /// Directory to write them into.
    dir: PathBuf,
}

/// Runs `completions`.
pub fn completions(args: &Completions, mut command: Command) {
    clap_complete::generate(
        args.shell,
        &mut command,
        "kata-gpu-boot",
        &mut std::io::stdout(),
    );
}

/// Runs `man`.
pub fn man(args: &Man, command: Command) -> Result<()> {
    clap_mangen::generate_to(command, &args.dir)
        .with_context(|| format!("write the manual into {}", args.dir.display()))
}
