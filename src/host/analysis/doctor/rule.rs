//! A rule of `doctor`: one thing that can make GPU guests start slowly, and what its cure would
//! shorten.

use super::checked::Checked;
use super::host_facts::HostFacts;
use serde::Serialize;

pub use super::own_boots::Shortens;

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

/// A rule.
pub struct Rule {
    pub id: &'static str,
    pub area: Area,
    /// Fault of a host where the rule finds something.
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
