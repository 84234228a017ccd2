//! Removes the drop-in that `install` wrote, and nothing else.
//!
//! The removal works with any state of the configuration: a broken one may be the reason to roll
//! back.

use super::checks;
use super::drop_in_file;
use super::here::{Args, Change, Report, changes_text, effective_changes};
use crate::doing::Doing;
use crate::kata::drop_in;
use crate::kata::drop_in::Found;
use crate::kata::kata_config::unreadable;
use anyhow::Result;
use kata_gpu_report::data::text::printable;
use serde_json::json;
use std::path::{Path, PathBuf};

/// Removes the drop-in alone; copies on a node stay.
pub fn say_here(args: &Args) -> Report {
    remove(args).unwrap_or_else(|error| Report::failed(&error))
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
    std::fs::canonicalize(parent).doing("look for", given)
}

fn remove(args: &Args) -> Result<Report> {
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
        return Ok(Report::done(text));
    }
    if let Some(refusal) =
        checks::own_file(&found, &path).filter(|refusal| !(args.force && refusal.forcible))
    {
        let mut said = Report::refused(format!("refused: {refusal}\nnothing was removed\n"));
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
    let link = (found == Found::Link).then(|| std::fs::read_link(&path));
    let mut removed_directory = false;
    if !args.dry_run {
        let now = drop_in::look(&path).doing("read", &path)?;
        anyhow::ensure!(
            now == found,
            "{}: changed during the check: run it again",
            path.display()
        );
        removed_directory = drop_in_file::remove(&drop_in_dir, made_directory)?;
    }
    let (verb, action) = if args.dry_run {
        ("would remove", "would-remove")
    } else {
        ("removed", "removed")
    };
    if args.json {
        let changes: Vec<_> = changes.iter().flatten().map(Change::json).collect();
        let json = json!({
            "action": action,
            "file": shown,
            "removedDirectory": removed_directory,
            "changes": changes,
        });
        return Ok(Report::done(format!("{json}\n")));
    }
    let mut text = changes.as_deref().map(changes_text).unwrap_or_default();
    text.push_str(&format!("{verb} {}\n", printable(&shown)));
    if let Some(Ok(target)) = link {
        let target = printable(&target.to_string_lossy());
        text.push_str(&format!("the link led to {target}, which stays as it is\n"));
    }
    if removed_directory {
        text.push_str(&format!(
            "removed {}, which was made for it\n",
            printable(&drop_in_dir.to_string_lossy())
        ));
    }
    if !args.dry_run {
        text.push_str("New pods start as before; running pods stay.\n");
    }
    Ok(Report::done(text))
}
