//! Reads what the rules of [`crate::rules`] ask of a host. Nothing is written, no
//! program is started, every read is bounded, and only regular files are opened.
//!
//! All paths are below a root, so that a test and a container with the node's directories under
//! another path read like a host.

mod bounded; // files and directories below the root
mod host_paths; // the files that rules read
mod host_programs; // QEMU's version, a guest's compression
mod kata_values;
mod kernel_texts; // symbols and configuration of the kernel
mod vms; // running VMs // Kata's configuration

use crate::rules::host_facts::{HostFacts, Qemu};
use crate::rules::own_boots::{MAX_BOOTS, OwnBoots};
use anyhow::Context;
pub use bounded::Depth;
use bounded::HostRoot;
use kata_gpu_report::analysis::loaded::load;
use kata_gpu_report::data::boot_dir::dated;
use kata_gpu_report::data::text::printable;
use std::path::Path;

/// Everything but the boots, of the host below `root`.
pub fn facts_at(
    root: &Path,
    kata_config: Option<&Path>,
    depth: Depth,
) -> anyhow::Result<HostFacts> {
    let root = &HostRoot::open(root).with_context(|| format!("--root {}", root.display()))?;
    let mut facts = HostFacts::default();
    host_paths::read(root, depth, &mut facts.files);
    kernel_texts::read(root, &mut facts.files);
    facts.vms = vms::read(root, depth, &mut facts.files);
    facts.kata = kata_values::read(root, kata_config);
    facts.qemu = qemu(root, &facts);
    Ok(facts)
}

/// Number of NVIDIA's GPUs of the host below `root`.
pub fn gpus_at(root: &Path) -> anyhow::Result<usize> {
    let root = &HostRoot::open(root).with_context(|| format!("--root {}", root.display()))?;
    let mut facts = HostFacts::default();
    host_paths::read(root, Depth::Light, &mut facts.files);
    Ok(facts.gpus().len())
}

/// The program of a running VM, else that of the configuration.
fn qemu(root: &HostRoot, facts: &HostFacts) -> Option<Qemu> {
    let running = facts
        .vms
        .iter()
        .find_map(|vm| vm.words.first().filter(|word| word.starts_with('/')));
    let configured = || Some(&facts.kata().ok()?.hypervisor("path")?.0);
    let path = running.or_else(configured)?;
    let version = host_programs::qemu_version(root, Path::new(path));
    Some(Qemu {
        path: printable(path),
        version,
    })
}

/// Numbers of the newest boots in a directory, and which files could not be read.
pub fn boots(dir: &Path) -> anyhow::Result<(OwnBoots, Vec<String>)> {
    let mut boots = OwnBoots::default();
    let mut unread = Vec::new();
    for path in dated(dir)?.into_iter().take(MAX_BOOTS) {
        match load(&path, None) {
            Ok(loaded) => {
                let console = std::fs::metadata(path.with_extension("console")).ok();
                boots
                    .console_bytes
                    .extend(console.and_then(|meta| i64::try_from(meta.len()).ok()));
                let id = path.file_stem().unwrap_or_default().to_string_lossy();
                boots.add(&loaded, &printable(&id));
            }
            Err(error) => unread.push(printable(&format!("{error:#}"))),
        }
    }
    Ok((boots, unread))
}
