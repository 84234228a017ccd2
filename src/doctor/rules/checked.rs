//! Answers of a rule: evidence with a problem or without one, or why it cannot answer.

use serde::Serialize;

/// Why a rule could not look.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Gap {
    /// Evidence is missing: a sentence.
    Unknown(String),
    /// Path that only root may read.
    NeedsRoot(String),
}

impl Gap {
    /// A file whose content is not what it should be.
    pub fn unreadable(path: &str, text: &str) -> Self {
        Self::Unknown(format!("{path}: cannot be understood: {text}"))
    }
}

/// No answer, and why.
pub fn unknown<T>(why: impl Into<String>) -> Result<T, Gap> {
    Err(Gap::Unknown(why.into()))
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
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Sure {
    Sure,
    /// By a version that distributions patch, or by a figure whose author doubts it.
    Unsure,
}

/// Something that makes boots slower than they must be.
#[derive(Clone, Debug, PartialEq)]
pub struct Problem {
    pub evidence: Vec<Evidence>,
    /// Cost, where no boots of this host show it.
    pub cost: Option<Cost>,
    pub cure: String,
    pub sure: Sure,
}

/// Answer of a rule whose evidence is there.
#[derive(Clone, Debug, PartialEq)]
pub enum Answer {
    Fine(Vec<Evidence>),
    Found(Problem),
}

pub type Checked = Result<Answer, Gap>;
