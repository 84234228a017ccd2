//! Tables of text: columns as wide as they must be; the last one takes what is left of a terminal,
//! and is cut there.

use crate::host::data::text::{Ink, Screen, seconds};

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
        Self { columns: columns.to_vec(), rows: Vec::new() }
    }

    /// A row; cells that are left out are empty.
    pub fn row(&mut self, ink: Ink, cells: Vec<String>) {
        self.rows.push((ink, cells));
    }

    pub fn lines(&self, screen: &Screen) -> Vec<String> {
        let width = |column: usize, head: &str| {
            self.rows.iter().filter_map(|(_, cells)| cells.get(column)).map(String::len).chain([head.len()]).max().unwrap_or(0)
        };
        let widths: Vec<usize> = self.columns.iter().enumerate().map(|(i, (head, _))| width(i, head)).collect();
        let line = |cells: &dyn Fn(usize) -> String| {
            let cells = self.columns.iter().zip(&widths).enumerate().map(|(i, ((_, set), width))| match set {
                Set::Left => format!("{:width$}", cells(i)),
                Set::Right => format!("{:>width$}", cells(i)),
            });
            cells.collect::<Vec<_>>().join("  ").trim_end().to_string()
        };
        let cut = |text: String| match screen.width {
            Some(width) if text.len() > width && width > 3 => format!("{}...", text.get(..width - 3).unwrap_or_default()),
            _ => text,
        };
        let head = line(&|i| self.columns.get(i).map_or(String::new(), |(head, _)| head.to_string()));
        let mut out = vec![screen.paint(Ink::Bold, &cut(head))];
        for (ink, cells) in &self.rows {
            out.push(screen.paint(*ink, &cut(line(&|i| cells.get(i).cloned().unwrap_or_default()))));
        }
        out
    }
}

/// A time on the boot clock in seconds; before the kernel's start it is negative.
pub fn time(ns: i64) -> String {
    format!("{}{}", if ns < 0 { "-" } else { "" }, seconds(ns.unsigned_abs()))
}

/// A difference: `+0.120`, `-0.003`.
pub fn signed(ns: i64) -> String {
    format!("{}{}", if ns < 0 { "-" } else { "+" }, seconds(ns.unsigned_abs()))
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
        let narrow = grid.lines(&Screen { width: Some(20), colour: false });
        assert!(narrow.iter().all(|l| l.len() <= 20) && narrow[1].ends_with("..."), "{narrow:?}");
        assert_eq!((time(-960_000_000), signed(3_000_000), signed(-3_000_000)), ("-0.960".into(), "+0.003".into(), "-0.003".into()));
        assert_eq!(time(i64::MIN), "-9223372036.855");
    }
}
