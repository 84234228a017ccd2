//! `list --stats`: statistics of all boots of a directory.

use crate::boots::{each_boot, json, not_read};
use anyhow::{Result, ensure};
use kata_gpu_report::analysis::many_boots::{Collected, Row, Stats};
use kata_gpu_report::data::text::{Ink, Screen};
use kata_gpu_report::views::grid::{Grid, Set, share, time};
use serde::Serialize;
use std::path::Path;

/// The page, or its JSON form.
pub fn text(dir: &Path, is_json: bool, screen: &Screen) -> Result<String> {
    let mut collected = Collected::default();
    let unread = each_boot(dir, |boot| collected.add(&boot))?;
    let stats = collected.stats();
    ensure!(
        stats.boots > 0,
        "none of {} file(s) could be read: {}",
        unread.len(),
        unread.first().map_or("", String::as_str)
    );
    if is_json {
        json(&WithUnread {
            stats: &stats,
            unread: &unread,
        })
    } else {
        Ok(page(&stats, &unread, screen))
    }
}

#[derive(Serialize)]
struct WithUnread<'a> {
    #[serde(flatten)]
    stats: &'a Stats,
    unread: &'a [String],
}

/// The statistics as text.
fn page(stats: &Stats, unread: &[String], screen: &Screen) -> String {
    let mut out = vec![format!(
        "{} boot(s): {} settled, {} with failures; {} GPU(s), {} failed",
        stats.boots, stats.settled, stats.failed, stats.gpus, stats.failed_gpus
    )];
    if stats.implausible > 0 {
        out.push(format!(
            "{} of them with impossible numbers: in no other sum",
            stats.implausible
        ));
    }
    for (title, rows) in [
        ("MILESTONE", &stats.milestones),
        ("PHASE", &stats.phases),
        ("STEP", &stats.steps),
    ] {
        out.push(String::new());
        out.extend(table(title, rows).lines(screen));
    }
    if !stats.failures.is_empty() {
        out.push(String::new());
        let mut grid = Grid::new(&[
            ("BOOTS", Set::Right),
            ("COUNT", Set::Right),
            ("FAILURE", Set::Left),
        ]);
        for failure in &stats.failures {
            grid.row(
                Ink::Error,
                vec![
                    failure.boots.to_string(),
                    failure.count.to_string(),
                    failure.reason.clone(),
                ],
            );
        }
        out.extend(grid.lines(screen));
    }
    out.push(String::new());
    out.push(format!(
        "unexplained in the boot that is explained worst: {}",
        share(stats.most_unexplained_percent)
    ));
    not_read(unread, screen, &mut out);
    out.join("\n") + "\n"
}

fn table(title: &'static str, rows: &[Row]) -> Grid {
    let right = Set::Right;
    let mut grid = Grid::new(&[
        (title, Set::Left),
        ("N", right),
        ("MEDIAN", right),
        ("P95", right),
        ("MAX", right),
    ]);
    for Row { name, summary } in rows {
        let cells = [summary.median_ns, summary.p95_ns, summary.max_ns].map(time);
        grid.row(
            Ink::Plain,
            [vec![name.clone(), summary.n.to_string()], cells.to_vec()].concat(),
        );
    }
    grid
}
