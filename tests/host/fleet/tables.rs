//! The page of metrics: its tables are what the code has.

use crate::project;
use kata_gpu_collect::fleet::{alerts, metrics_table};
use std::fs;

/// The page with this table in the place of the one that begins with the same line.
fn with_table(page: &str, table: &str) -> String {
    let head = table.lines().next().unwrap();
    let start = page
        .find(head)
        .unwrap_or_else(|| panic!("the page has no table {head}"));
    let end = page[start..]
        .find("\n\n")
        .map_or(page.len(), |length| start + length + 1);
    format!("{}{table}{}", &page[..start], &page[end..])
}

#[test]
fn the_page_of_metrics_has_the_tables_of_the_code() {
    let path = project().join("src/collect/fleet/METRICS.md");
    let page = fs::read_to_string(&path).unwrap();
    let tables = [metrics_table::markdown(), alerts::markdown()];
    let fresh = tables
        .iter()
        .fold(page.clone(), |page, table| with_table(&page, table));
    if std::env::var_os("UPDATE_GOLDEN").is_some_and(|v| v == "1") {
        fs::write(&path, fresh).unwrap();
        return;
    }
    assert!(
        page == fresh,
        "{} differs: UPDATE_GOLDEN=1 refreshes it",
        path.display()
    );
    // Negative control.
    assert_ne!(page.replacen("| counter |", "| gauge |", 1), fresh);
}
