//! Answers of a rule: evidence with a problem or without one, or why it cannot answer.

use kata_gpu_report::data::host_check::is_time_of_a_boot;
use serde::Serialize;

/// Outcome of a rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    Found,
    Unknown,
    NeedsRoot,
    Fine,
}

/// Why a rule could not look: that evidence is missing, in a sentence, or the path that only root
/// may read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gap {
    pub verdict: Verdict,
    pub why: String,
}

impl Gap {
    pub fn unknown(why: impl Into<String>) -> Self {
        Self {
            verdict: Verdict::Unknown,
            why: why.into(),
        }
    }

    /// A file whose content is not what it should be.
    pub fn unreadable(path: &str, text: &str) -> Self {
        Self::unknown(format!("{path}: cannot be understood: {text}"))
    }
}

/// No answer, and why.
pub fn unknown<T>(why: impl Into<String>) -> Result<T, Gap> {
    Err(Gap::unknown(why))
}

/// A path, or another name of a source, and the value that was found there.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Evidence {
    pub from: String,
    pub value: String,
}

pub fn evidence(from: impl Into<String>, value: impl Into<String>) -> Evidence {
    Evidence {
        from: from.into(),
        value: value.into(),
    }
}

/// How far the seconds of a cost can be trusted.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "basis", content = "of", rename_all = "lowercase")]
pub enum Basis {
    /// Boots of this host: how many, and which steps.
    Measured(String),
    /// Arithmetic with a published figure, and whose.
    Model(String),
}

/// Seconds of a boot that the cure would save.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Cost {
    pub seconds: f64,
    #[serde(flatten)]
    pub basis: Basis,
}

impl Cost {
    /// None for seconds that no boot takes: they come of sizes and times that no machine has, whose
    /// sum may have ended at the largest number.
    pub fn new(seconds: f64, basis: Basis) -> Option<Self> {
        is_time_of_a_boot(seconds).then_some(Self { seconds, basis })
    }
}

/// Whether the evidence proves it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Sure {
    #[default]
    Sure,
    /// By a version that distributions patch, or by a figure whose author doubts it.
    Unsure,
}

/// Answer of a rule: what it saw, and whether that makes boots slower than they must be.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Look {
    pub evidence: Vec<Evidence>,
    pub is_bad: bool,
    /// Cost, where no boots of this host show it.
    pub cost: Option<Cost>,
    pub cure: String,
    pub sure: Sure,
}

pub type Checked = Result<Look, Gap>;

impl Look {
    /// Look at one place.
    pub fn of(from: impl Into<String>, value: impl Into<String>) -> Self {
        vec![evidence(from, value)].into()
    }

    pub fn add(&mut self, from: impl Into<String>, value: impl Into<String>) {
        self.evidence.push(evidence(from, value));
    }

    pub fn cure(self, cure: impl Into<String>) -> Self {
        Self {
            cure: cure.into(),
            ..self
        }
    }

    pub fn unsure(self) -> Self {
        Self {
            sure: Sure::Unsure,
            ..self
        }
    }

    pub fn cost(self, seconds: f64, basis: Basis) -> Self {
        Self {
            cost: Cost::new(seconds, basis),
            ..self
        }
    }

    pub fn model(self, seconds: f64, of: impl Into<String>) -> Self {
        self.cost(seconds, Basis::Model(of.into()))
    }

    /// The answer, bad or not.
    pub fn when(self, is_bad: bool) -> Checked {
        Ok(Self { is_bad, ..self })
    }
}

impl From<Vec<Evidence>> for Look {
    fn from(evidence: Vec<Evidence>) -> Self {
        Self {
            evidence,
            ..Self::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{kernel_rules, memory_rules};
    use super::*;

    #[test]
    fn sizes_that_no_machine_has_give_no_seconds() {
        let look = || Look::of("a file", "a size");
        for bytes in [u64::MAX, u64::MAX / 2] {
            let memory = memory_rules::of_bytes(look(), bytes, memory_rules::WITHOUT_THP, "");
            assert_eq!(memory.cost, None);
        }
        assert_eq!(kernel_rules::of_bars(look(), u64::MAX).cost, None);
        assert!(kernel_rules::of_bars(look(), 1 << 40).cost.is_some());
        assert_eq!(Cost::new(f64::NAN, Basis::Model(String::new())), None);
    }
}
