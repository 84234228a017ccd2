//! Tables of text: columns as wide as they must be; the last one takes what is left of a terminal,
//! and is cut there.

use crate::data::text::{Ink, Screen, seconds};

/// Shortest time that has a line or a name of its own: all times are printed in ms.
pub const SHORT_NS: u64 = 1_000_000;

/// How a column is set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Set {
    Left,
    Right,
}

/// Rows under a head.
pub struct Grid {
    columns: Vec<(&'static str, Set)>,
    rows: Vec<(Ink, Vec<String>)>,
}

impl Grid {
    pub fn new(columns: &[(&'static str, Set)]) -> Self {
        Self {
            columns: columns.to_vec(),
            rows: Vec::new(),
        }
    }

    /// A row; cells that are left out are empty.
    pub fn row(&mut self, ink: Ink, cells: Vec<String>) {
        self.rows.push((ink, cells));
    }

    pub fn lines(&self, screen: &Screen) -> Vec<String> {
        let head = self
            .columns
            .iter()
            .map(|(head, _)| (*head).to_string())
            .collect();
        let (inks, rows): (Vec<Ink>, Vec<Vec<String>>) = [(Ink::Bold, head)]
            .into_iter()
            .chain(self.rows.iter().cloned())
            .unzip();
        let right: Vec<usize> = (0..)
            .zip(&self.columns)
            .filter(|(_, (_, set))| *set == Set::Right)
            .map(|(column, _)| column)
            .collect();
        let cut = |line: &str| match screen.width {
            Some(width) if line.len() > width && width > 3 => {
                format!("{}...", line.get(..width - 3).unwrap_or_default())
            }
            _ => line.to_string(),
        };
        aligned(&rows, &right, "  ")
            .iter()
            .zip(inks)
            .map(|(line, ink)| screen.paint(ink, &cut(line.trim_end())))
            .collect()
    }
}

/// Rows with cells as wide as the widest of their column; spaces at the end stay. The first row has
/// every column. `right`: columns aligned to the right; `gap`: text
/// between two columns.
pub fn aligned(rows: &[Vec<String>], right: &[usize], gap: &str) -> Vec<String> {
    let columns = rows.first().map_or(0, Vec::len);
    let width = |column: usize| {
        rows.iter()
            .filter_map(|r| r.get(column))
            .map(String::len)
            .max()
            .unwrap_or(0)
    };
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let line = |row: &Vec<String>| {
        let cells = row
            .iter()
            .zip(&widths)
            .enumerate()
            .map(|(column, (cell, width))| match right.contains(&column) {
                true => format!("{cell:>width$}"),
                false => format!("{cell:<width$}"),
            });
        cells.collect::<Vec<_>>().join(gap)
    };
    rows.iter().map(line).collect()
}

/// A time on the boot clock in seconds; before the kernel's start it is negative.
pub fn time(ns: i64) -> String {
    format!(
        "{}{}",
        if ns < 0 { "-" } else { "" },
        seconds(ns.unsigned_abs())
    )
}

/// A difference: `+0.120`, `-0.003`.
pub fn signed(ns: i64) -> String {
    format!(
        "{}{}",
        if ns < 0 { "-" } else { "+" },
        seconds(ns.unsigned_abs())
    )
}

/// A part of a whole: `12.3 %`.
pub fn share(percent: f64) -> String {
    format!("{percent:.1} %")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_fit_their_cells_and_the_terminal() {
        let mut grid = Grid::new(&[("TIME", Set::Right), ("WHAT", Set::Left)]);
        grid.row(Ink::Plain, vec!["12345.678".into(), "x".repeat(40)]);
        grid.row(Ink::Plain, vec!["1.000".into()]);
        let lines = grid.lines(&Screen::PLAIN);
        assert_eq!(lines[0], "     TIME  WHAT");
        assert_eq!(lines[2], "    1.000");
        let narrow = grid.lines(&Screen {
            width: Some(20),
            colour: false,
        });
        assert!(
            narrow.iter().all(|l| l.len() <= 20) && narrow[1].ends_with("..."),
            "{narrow:?}"
        );
        assert_eq!(
            (time(-960_000_000), signed(3_000_000), signed(-3_000_000)),
            ("-0.960".into(), "+0.003".into(), "-0.003".into())
        );
        assert_eq!(time(i64::MIN), "-9223372036.855");
    }
}
