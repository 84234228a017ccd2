//! Findings of a rule on a host: verdict, evidence, cost and cure.

pub use super::checked::{Basis, Cost, Evidence, Sure, Verdict};
use kata_gpu_report::analysis::rules::Rule;

/// A rule and what it found.
#[derive(Clone, Debug)]
pub struct Finding {
    pub rule: &'static Rule,
    pub verdict: Verdict,
    pub evidence: Vec<Evidence>,
    pub cost: Option<Cost>,
    /// Boots of this host that failed for a reason that the rule explains.
    pub failed_boots: usize,
    /// Cure of something found; else the sentence why it is unknown, or the path that needs root.
    pub text: String,
    pub sure: Sure,
}

impl Finding {
    pub fn seconds(&self) -> f64 {
        self.cost.as_ref().map_or(0.0, |cost| cost.seconds)
    }
}
