//! Findings of a rule on a host: verdict, evidence, cost and cure.

use kata_gpu_report::analysis::rules::Rule;
use serde::Serialize;

pub use super::checked::{Basis, Cost, Evidence, Sure};

/// Outcome of a rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    Found,
    Unknown,
    NeedsRoot,
    Fine,
}

/// A rule and what it found.
#[derive(Clone, Debug)]
pub struct Finding {
    pub rule: &'static Rule,
    pub verdict: Verdict,
    pub evidence: Vec<Evidence>,
    pub cost: Option<Cost>,
    /// Cure of something found; else the sentence why it is unknown, or the path that needs root.
    pub text: String,
    pub sure: Sure,
}

impl Finding {
    pub fn seconds(&self) -> f64 {
        self.cost.as_ref().map_or(0.0, |cost| cost.seconds)
    }
}
