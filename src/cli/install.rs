//! `kata-gpu-boot install`: on this machine or a node of a cluster, and back, or a trial.

use super::boots::BootDir;
use kata_gpu_doctor::facts;
use kata_gpu_image::install::gpu_pods::Node;
use kata_gpu_image::install::here::say_here;
use kata_gpu_image::install::{Report, node, remove, trial};
use kata_gpu_report::data::text::printable;
use std::path::Path;
use std::process::ExitCode;

/// Make GPU guests of a Kata configuration start from our initrd or image.
#[derive(clap::Args, Clone, Debug)]
#[command(after_help = include_str!("install/help.txt"))]
#[group(skip)]
pub struct Args {
    #[command(flatten)]
    install: kata_gpu_image::install::Args,
    #[command(flatten)]
    boots: BootDir,
}

/// Runs `install`.
pub fn run(args: &Args) -> ExitCode {
    let install = &args.install;
    if let Some(what) = &install.check.what {
        return trial::run(what, &install.check, &args.boots.dir, install.json);
    }
    if !install.repeat {
        return say(args).print();
    }
    node::repeat(install, || seen(args), one).unwrap_or_else(|error| {
        eprintln!("kata-gpu-boot: {}", printable(&format!("{error:#}")));
        ExitCode::from(2)
    })
}

/// Installs or removes once.
pub fn say(args: &Args) -> Report {
    let mut install = args.install.clone();
    install.seen = seen(args);
    one(&install)
}

/// Facts about this node, of which a removal needs none.
fn seen(args: &Args) -> Node {
    if args.install.remove {
        return Node::default();
    }
    node_at(Path::new("/"), &args.boots.dir)
}

/// GPUs and longest boots of a node. What cannot be read is not known, and nothing follows from it.
fn node_at(root: &Path, boots: &Path) -> Node {
    let boots = facts::boots(boots)
        .map(|(boots, _)| boots)
        .unwrap_or_default();
    let longest = |took: &[i64]| took.iter().max().map(|ns| *ns as f64 / 1e9);
    Node {
        gpus: facts::gpus_at(root).unwrap_or(0),
        agent: longest(&boots.agent_ready),
        boot: longest(&boots.up),
        after_agent: longest(&boots.after_agent),
    }
}

fn one(args: &kata_gpu_image::install::Args) -> Report {
    match &args.place.node {
        _ if args.remove && args.dry_run => remove::say_here(args),
        _ if args.remove => node::remove_all(args),
        Some(dir) => node::say(args, dir),
        None => say_here(args),
    }
}
