//! `kata-gpu-boot install`: on this machine, on a node of a cluster, as a manifest, or a trial.

pub use kata_gpu_image::install::Args;
use kata_gpu_image::install::here::{Manifest, say_here};
use kata_gpu_image::install::{Said, daemon_set, node, trial};
use std::process::ExitCode;

/// Runs `install`.
pub fn run(args: &Args) -> ExitCode {
    if let Some(what) = &args.check.what {
        return trial::run(what, &args.check, args.json);
    }
    match &args.place.dir {
        Some(dir) if args.stay => node::stay(args, dir),
        _ => say(args).print(),
    }
}

/// Installs, checks or prints, as the options ask.
pub fn say(args: &Args) -> Said {
    match &args.place.dir {
        _ if args.print == Some(Manifest::DaemonSet) => daemon_set::of_install(args),
        Some(dir) => node::say(args, dir),
        None => say_here(args),
    }
}
