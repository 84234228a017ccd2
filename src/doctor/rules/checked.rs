//! Answers of a rule: evidence with a problem or without one, or why it cannot answer.

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
            cost: Some(Cost { seconds, basis }),
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
