//! Selectors of PromQL, made from rows of the table of metrics alone.

use super::metrics_table::{BOOTS, Metric};
use super::tally::Outcome;
use std::fmt;

/// Series of a metric; `Display` is the selector.
#[derive(Clone)]
pub struct Series {
    name: String,
    label: &'static str,
    matchers: Vec<String>,
}

impl Metric {
    /// Series of a counter or gauge.
    pub fn series(&self) -> Series {
        self.part("")
    }

    /// Series of a histogram, by `le`.
    pub fn buckets(&self) -> Series {
        self.part("_bucket")
    }

    pub fn sums(&self) -> Series {
        self.part("_sum")
    }

    pub fn counts(&self) -> Series {
        self.part("_count")
    }

    fn part(&self, part: &str) -> Series {
        let label = self.label.unwrap_or_default();
        Series {
            name: format!("{self}{part}"),
            label,
            matchers: Vec::new(),
        }
    }
}

/// Boots that failed: powered off, or gone before they were settled.
pub fn failed_boots() -> Series {
    BOOTS
        .series()
        .of_any(&[Outcome::PoweredOff.name(), Outcome::Unfinished.name()])
}

impl Series {
    /// Only series with this value of the metric's label.
    pub fn of(self, value: &str) -> Self {
        let matcher = format!("{}=\"{value}\"", self.label);
        self.matching(&matcher)
    }

    /// Only series with one of these values.
    pub fn of_any(self, values: &[&str]) -> Self {
        let matcher = format!("{}=~\"{}\"", self.label, values.join("|"));
        self.matching(&matcher)
    }

    pub fn matching(mut self, matcher: &str) -> Self {
        self.matchers.push(matcher.to_string());
        self
    }
}

impl fmt::Display for Series {
    fn fmt(&self, out: &mut fmt::Formatter) -> fmt::Result {
        out.write_str(&self.name)?;
        if self.matchers.is_empty() {
            Ok(())
        } else {
            write!(out, "{{{}}}", self.matchers.join(","))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::metrics_table::{BOOTS, PHASE_SECONDS, RECORDS};

    #[test]
    fn a_selector_is_the_rows_name_with_its_label() {
        assert_eq!(RECORDS.series().to_string(), "kata_gpu_boot_records_total");
        let some = BOOTS.series().of_any(&["a", "b"]).matching("job=\"x\"");
        assert_eq!(
            some.to_string(),
            "kata_gpu_boot_boots_total{outcome=~\"a|b\",job=\"x\"}"
        );
        let buckets = PHASE_SECONDS.buckets().of("probe").to_string();
        assert_eq!(
            buckets,
            "kata_gpu_boot_phase_seconds_bucket{phase=\"probe\"}"
        );
    }
}
