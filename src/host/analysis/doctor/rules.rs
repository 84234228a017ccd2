//! The table of all rules.

use super::kernel_rules;
use super::rule::{Area, Rule, Shortens};
use crate::events::catalogue::derived;
use crate::events::names;

/// The host maps GPUs' BARs.
const fn mapping(to: f64) -> [Shortens; 2] {
    [Shortens { step: names::GPU_ENABLE, to }, Shortens { step: derived::GPU_MAP, to }]
}

pub const RULES: &[Rule] = &[Rule {
    id: "huge-pfnmaps",
    area: Area::Kernel,
    title: "VFIO maps the GPUs' BARs in pages of 4 KiB",
    source: "Linux 6.12 (vfio/pci: huge faults) and 6.15 (vfio/type1: page mask for pfnmaps): 8 M page operations become 32 for a BAR of 32 GB, 1 s becomes 1 ms",
    shortens: &mapping(0.001),
    check: kernel_rules::huge_pfnmaps,
}];
