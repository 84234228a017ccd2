//! The boot of one sandbox, from its first line in the collector's directory to its outcome, for
//! the program that started the sandbox itself.

use super::files::{Files, Which};
use anyhow::Result;
use indicatif::ProgressDrawTarget;
use kata_gpu_host::sleep::sleep_until;
use kata_gpu_report::data::text::Screen;
use kata_gpu_report::views::follow::bars::{Bars, Look, REFRESH};
use kata_gpu_report::views::follow::progress::{Outcome, Progress};
use std::path::{Path, PathBuf};
use std::time::Instant;

/// A watched boot; its last state remains after the end of watching.
#[derive(Debug, Default)]
pub struct Boot {
    /// The boot's file, once it exists.
    pub file: Option<PathBuf>,
    progress: Progress,
}

impl Boot {
    /// Last known state, for a caller that stops waiting.
    pub fn last_seen(&self) -> String {
        self.progress.last_seen()
    }
}

/// Watches a future sandbox until its boot has ended well or not. Shows the progress on a terminal.
/// Safe to cancel.
pub async fn boot_of(
    sandbox: &str,
    dir: &Path,
    screen: Screen,
    boot: &mut Boot,
) -> Result<Outcome> {
    let mut files = Files::watch(dir, Which::Sandbox(sandbox.into()))?;
    let bars = |_width| {
        Bars::new(
            ProgressDrawTarget::stdout(),
            Look::of_environment(screen.colour),
        )
    };
    let mut bars = screen.width.map(bars);
    loop {
        let now = Instant::now();
        let outcome = boot.progress.outcome(now);
        let name = boot
            .file
            .as_deref()
            .and_then(Path::file_name)
            .map(|name| name.to_string_lossy());
        if let (Some(bars), Some(name)) = (&mut bars, &name) {
            match outcome {
                Some(_) => bars.finish(name, &boot.progress, now),
                None => bars.update(name, &boot.progress, now),
            }
        }
        if let Some(outcome) = outcome {
            return Ok(outcome);
        }
        let picture = bars.as_ref().and(name).map(|_| now + REFRESH);
        tokio::select! {
            changed = files.changed() => for name in changed? {
                let path = dir.join(&name);
                if boot.file.as_ref().is_none_or(|file| *file == path) {
                    files.read(&name, |line| {
                        boot.file.get_or_insert_with(|| path.clone());
                        drop(boot.progress.take(&line, Instant::now()));
                    })?;
                }
            },
            () = sleep_until(boot.progress.deadline().into_iter().chain(picture).min()) => {}
        }
    }
}
