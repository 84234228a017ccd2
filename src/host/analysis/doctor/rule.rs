//! A rule of `doctor`: one thing that can make GPU guests start slowly, and what its cure would
//! shorten.

use super::finding::Checked;
use super::host_facts::HostFacts;
use serde::Serialize;

/// Part of the host that a rule is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Area {
    Kernel,
    Memory,
    Iommu,
    Kata,
    Vmm,
    Device,
    Guest,
}

/// A step that a rule's cure shortens: a step's name in [`crate::events::catalogue`], and the
/// fraction of its time that is left with the cure.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Shortens {
    pub step: &'static str,
    pub to: f64,
}

/// A rule.
pub struct Rule {
    pub id: &'static str,
    pub area: Area,
    /// Sentence on the fault that the rule finds.
    pub title: &'static str,
    /// Origin of the rule and of its figures.
    pub source: &'static str,
    /// Empty where nobody has a figure.
    pub shortens: &'static [Shortens],
    pub check: fn(&HostFacts) -> Checked,
}

impl std::fmt::Debug for Rule {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.id)
    }
}
