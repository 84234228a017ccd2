//! `kata-gpu-boot uninstall`: on this machine, on a node of a cluster, or as a manifest.

pub use kata_gpu_image::install::uninstall::Args;
use kata_gpu_image::install::uninstall::{Manifest, say_here};
use kata_gpu_image::install::{Said, daemon_set, node};
use std::process::ExitCode;

/// Runs `uninstall`.
pub fn run(args: &Args) -> ExitCode {
    if args.stay {
        node::stay_uninstalled(args)
    } else {
        say(args).print()
    }
}

/// Removes the drop-in, or prints what would be removed.
pub fn say(args: &Args) -> Said {
    match args.print {
        Some(Manifest::DaemonSet) => daemon_set::of_uninstall(args),
        None if args.dry_run => say_here(args),
        None => node::uninstall(args),
    }
}
