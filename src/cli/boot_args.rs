//! Arguments and output that `blame`, `critical-path`, `coverage`, `compare`, `stats` and `list`
//! share: the boot, the window, the form of the output.

use anyhow::{Context, Result, ensure};
use kata_gpu_report::analysis::held_up::HeldUp;
use kata_gpu_report::analysis::loaded::{Loaded, load};
use kata_gpu_report::analysis::metrics::{Metrics, metrics};
use kata_gpu_report::boot::story::Milestone;
use kata_gpu_report::boot::timeline::Window;
use kata_gpu_report::data::boot_dir::{boots, find};
use kata_gpu_report::data::text::ascii_json;
use kata_gpu_report::data::text::{Ink, Screen, error_bound, printable, seconds, wall_clock};
use kata_gpu_report::terminal::progress_line::Progress;
use kata_gpu_report::views::grid::{Grid, Set, time};
use serde::Serialize;
use std::path::{Path, PathBuf};

/// Version of the JSON forms of all six.
pub const ACCOUNT: u32 = 1;

/// A boot, and a part of it.
#[derive(clap::Args, Clone, Debug)]
pub struct BootArgs {
    /// File of a boot, or a boot id (its first characters are enough) [default: the newest boot].
    pub boot: Option<String>,
    /// Directory that the collector writes to.
    #[arg(long, default_value = ".")]
    pub dir: PathBuf,
    /// The guest's console log, or containerd's log with its lines (vmconsole=), for the agent's
    /// own lines [default: the boot's file with the extension .console].
    #[arg(long, value_name = "FILE")]
    pub console: Option<PathBuf>,
    /// Begin at this milestone instead of the first one.
    #[arg(long, value_name = "MILESTONE")]
    pub from: Option<String>,
    /// End at this milestone instead of the last one: "last container", settled, ...
    #[arg(long, value_name = "MILESTONE")]
    pub to: Option<String>,
    /// Print one JSON object; times in ns since kernel start.
    #[arg(long)]
    pub json: bool,
}

impl BootArgs {
    pub fn load(&self) -> Result<Loaded> {
        load(
            &find(self.boot.as_deref(), &self.dir)?,
            self.console.as_deref(),
        )
    }

    pub fn window<'a>(&self, loaded: &'a Loaded) -> Result<Window<'a>> {
        loaded
            .boot
            .timeline
            .window(self.from.as_deref(), self.to.as_deref())
    }
}

/// `boot 0f7a..: kernel start 0.000 (2026-.. +-0.9 ms) .. settled 22.340 (..)`, the first line of
/// every page.
pub fn head(loaded: &Loaded, window: &Window) -> String {
    let clock = loaded.file.clock();
    let milestone = |m: &Milestone| {
        let wall = u64::try_from(m.at_ns)
            .map_or_else(
                |_| clock.wall_before_start(m.at_ns.unsigned_abs(), m.error_ns),
                |at| clock.wall_at(at),
            )
            .map(|w| {
                format!(
                    " ({} {})",
                    wall_clock(w.realtime_ns),
                    error_bound(w.error_ns)
                )
            });
        format!(
            "{} {}{}{}",
            m.name,
            if m.approximate { "~" } else { "" },
            time(m.at_ns),
            wall.unwrap_or_default()
        )
    };
    let id = loaded
        .boot
        .boot_id
        .as_deref()
        .map(|id| format!("boot {}: ", printable(id)))
        .unwrap_or_default();
    format!("{id}{} .. {}", milestone(window.from), milestone(window.to))
}

/// Notes below a page: data that the account lacks.
pub fn notes(notes: &[String], screen: &Screen, out: &mut Vec<String>) {
    out.extend(
        notes
            .iter()
            .map(|note| screen.paint(Ink::Dim, &format!("note: {note}"))),
    );
}

/// Steps below a page that enablings held up.
pub fn held_up(steps: &[HeldUp], screen: &Screen, out: &mut Vec<String>) {
    if steps.is_empty() {
        return;
    }
    let head = "Enabling a GPU occupies a vCPU, and these steps wait for every vCPU:";
    out.extend([String::new(), head.to_string()]);
    let right = Set::Right;
    let mut grid = Grid::new(&[
        ("TOOK", right),
        ("BESIDE", right),
        ("STEP", Set::Left),
        ("ENABLING OF", Set::Left),
    ]);
    for step in steps {
        let gpus = step
            .gpus
            .iter()
            .map(u64::to_string)
            .collect::<Vec<_>>()
            .join(", ");
        grid.row(
            Ink::Plain,
            vec![
                seconds(step.took_ns),
                seconds(step.beside_ns),
                step.step.clone(),
                format!("GPU {gpus}"),
            ],
        );
    }
    out.extend(grid.lines(screen));
}

/// A JSON form with its version, and notes on data that it lacks.
#[derive(Serialize)]
struct Json<'a, T: Serialize> {
    account: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    boot_id: Option<&'a str>,
    #[serde(flatten)]
    content: &'a T,
    #[serde(skip_serializing_if = "Option::is_none")]
    notes: Option<&'a [String]>,
}

pub fn boot_json<T: Serialize>(loaded: &Loaded, content: &T) -> Result<String> {
    let boot_id = loaded.boot.boot_id.as_deref();
    json(&Json {
        account: ACCOUNT,
        boot_id,
        content,
        notes: Some(&loaded.boot.timeline.notes),
    })
}

/// A JSON form of many boots.
pub fn plain_json<T: Serialize>(content: &T) -> Result<String> {
    json(&Json {
        account: ACCOUNT,
        boot_id: None,
        content,
        notes: None,
    })
}

fn json(content: &impl Serialize) -> Result<String> {
    ascii_json(&serde_json::to_value(content).context("write as JSON")?)
}

/// Passes the numbers of each boot in a directory to `take`. Returns the files that could not be
/// read.
pub fn each_boot(dir: &Path, mut take: impl FnMut(Metrics)) -> Result<Vec<String>> {
    let mut paths = boots(dir)?;
    paths.sort();
    ensure!(
        !paths.is_empty(),
        "no boot in {}: name a directory that the collector wrote to",
        dir.display()
    );
    let mut progress = Progress::start();
    let mut unread = Vec::new();
    for (at, path) in paths.iter().enumerate() {
        progress.show(|| format!("read {at} of {} boots", paths.len()));
        match load(path, None) {
            Ok(loaded) => take(metrics(
                &loaded.boot.timeline,
                &loaded.boot,
                &loaded.file,
                loaded.agent_known,
            )),
            Err(error) => unread.push(printable(&format!("{error:#}"))),
        }
    }
    Ok(unread)
}
