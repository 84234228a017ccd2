//! Removes the drop-in that `install` wrote, and nothing else.
//!
//! Uninstall works with any state of the configuration: a broken one may be the reason to roll
//! back.

use super::checks;
use super::drop_in_file;
use super::here::{Change, Said, changes_text, effective_changes};
use super::manifests::Name;
use super::place::Place;
use crate::kata::drop_in;
use crate::kata::drop_in::Found;
use crate::kata::kata_config::unreadable;
use anyhow::{Context, Result};
use kata_gpu_report::data::text::printable;
use serde_json::json;
use std::path::{Path, PathBuf};

const HELP: &str = "\
Removes config.d/60-kata-gpu-init.toml next to the configuration, if install wrote it and nobody edited it since; and config.d itself, if install made it \
and it is empty. The configuration and all other drop-ins are never changed. New pods start as before the installation; running pods stay.

Exit status: 0 removed, or there was nothing to remove; 1 refused, with the reason.

Examples:
  cd /opt/kata/share/defaults/kata-containers
  CONFIG=configuration-qemu-nvidia-gpu.toml
  kata-gpu-boot uninstall --kata-config $CONFIG --dry-run
  kata-gpu-boot uninstall --kata-config $CONFIG
  # for a cluster: the DaemonSet that replaces the installing one
  kata-gpu-boot uninstall --print daemonset \\
    --kata-config /opt/kata/share/defaults/kata-containers/$CONFIG \\
    --container-image registry.example/gpu-init:1";

/// Take the initrd or image out of a Kata configuration again.
#[derive(clap::Args, Clone, Debug)]
#[command(after_help = HELP)]
pub struct Args {
    /// The Kata configuration file that was given to install.
    #[arg(long, value_name = "FILE")]
    pub kata_config: PathBuf,
    /// Print the changes as a diff, and exit.
    #[arg(long)]
    pub dry_run: bool,
    /// Remove the drop-in even if it was edited or is a symbolic link.
    #[arg(long)]
    pub force: bool,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    pub place: Place,
    /// With --node: stay until SIGTERM. For a DaemonSet's pod.
    #[arg(long, requires = "dir", conflicts_with_all = ["dry_run", "json"])]
    pub stay: bool,
    /// Print the DaemonSet that undoes the one of `install --print daemonset` and replaces it, and
    /// exit.
    #[arg(long, value_enum, value_name = "WHAT", conflicts_with_all = ["dry_run", "json"])]
    pub print: Option<Manifest>,
    /// Name of the DaemonSet, as it was printed.
    #[arg(long, value_name = "NAME", requires = "print")]
    pub name: Option<Name>,
    /// The image of the printed DaemonSet's pods, with kata-gpu-boot at /kata-gpu-boot.
    #[arg(long, value_name = "IMAGE", requires = "print")]
    pub container_image: Option<String>,
}

/// Manifest that `--print` writes.
#[derive(clap::ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
pub enum Manifest {
    /// A DaemonSet whose pods uninstall on their nodes.
    #[value(name = "daemonset")]
    DaemonSet,
}

/// Removes the drop-in alone; copies on a node stay.
pub fn say_here(args: &Args) -> Said {
    uninstall(args).unwrap_or_else(|error| {
        Said::refused(format!(
            "kata-gpu-boot: {}\n",
            printable(&format!("{error:#}"))
        ))
    })
}

/// The directory in which the runtime looks for `config.d`, even if the configuration itself is
/// gone.
fn directory(given: &Path) -> Result<PathBuf> {
    // Refuse a directory: no drop-in is beside it, and "nothing to remove" would be misleading.
    anyhow::ensure!(
        !given.is_dir(),
        "{}: is a directory: name the configuration file",
        given.display()
    );
    if let Some(dir) = std::fs::canonicalize(given)
        .ok()
        .as_deref()
        .and_then(Path::parent)
    {
        return Ok(dir.into());
    }
    let parent = given
        .parent()
        .filter(|parent| !parent.as_os_str().is_empty())
        .unwrap_or(Path::new("."));
    std::fs::canonicalize(parent).with_context(|| format!("look for {}", given.display()))
}

fn uninstall(args: &Args) -> Result<Said> {
    let dir = directory(&args.kata_config)?;
    let _lock = if args.dry_run {
        None
    } else {
        Some(drop_in_file::lock(&dir)?)
    };
    let drop_in_dir = dir.join(drop_in::DIRECTORY);
    let path = drop_in_dir.join(drop_in::NAME);
    let found = match drop_in::look(&path) {
        Err(e) if e.kind() == std::io::ErrorKind::NotADirectory => Found::Absent,
        found => found.map_err(|e| anyhow::anyhow!("{}", unreadable(&path, &e)))?,
    };
    let shown = path.to_string_lossy();
    if found == Found::Absent {
        let text = if args.json {
            json!({"action": "nothing", "file": shown}).to_string() + "\n"
        } else {
            format!("nothing to remove: there is no {}\n", printable(&shown))
        };
        return Ok(Said::done(text));
    }
    if let Some(refusal) =
        checks::own_file(&found, &path).filter(|refusal| !(args.force && refusal.forcible))
    {
        let mut said = Said::refused(format!("refused: {refusal}\nnothing was removed\n"));
        if args.json {
            said.out = json!({"action": "refused", "file": shown, "refusals": [refusal.json()]})
                .to_string()
                + "\n";
        }
        return Ok(said);
    }
    // The changes are `None` if the configuration cannot be read; the removal does not need it.
    let changes = effective_changes(&args.kata_config, None);
    let made_directory = matches!(&found, Found::Ours { record, .. } if record.made_directory);
    let mut removed_directory = false;
    if !args.dry_run {
        let now = drop_in::look(&path).with_context(|| format!("read {}", path.display()))?;
        anyhow::ensure!(
            now == found,
            "{}: changed during the check: run it again",
            path.display()
        );
        removed_directory = drop_in_file::remove(&drop_in_dir, made_directory)?;
    }
    let verb = if args.dry_run {
        "would remove"
    } else {
        "removed"
    };
    if args.json {
        let changes: Vec<_> = changes.iter().flatten().map(Change::json).collect();
        let action = if args.dry_run {
            "would-remove"
        } else {
            "removed"
        };
        return Ok(Said::done(
            json!({"action": action, "file": shown, "removedDirectory": removed_directory, "changes": changes}).to_string() + "\n",
        ));
    }
    let mut text = changes.as_deref().map(changes_text).unwrap_or_default();
    text.push_str(&format!("{verb} {}\n", printable(&shown)));
    if removed_directory {
        text.push_str(&format!(
            "removed {}, which was made for it\n",
            printable(&drop_in_dir.to_string_lossy())
        ));
    }
    if !args.dry_run {
        text.push_str("New pods start as before; running pods stay.\n");
    }
    Ok(Said::done(text))
}
