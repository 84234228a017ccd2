//! The story of a boot while steps are added to it, and what those who add them look up.

use super::gpu_name::GpuName;
use super::model::Boot;
use super::story::{Step, Story};
use crate::host::data::boot_file::BootFile;
use crate::pci::PciAddress;
use std::collections::HashMap;

/// The milestone before all others, where it is known: the guest's TSC was 0, as the VM's first CPU
/// was made or QEMU's reset of the VM ended (src/tsc.rs).
pub const VM_START: &str = "VM start";
/// Where the account of a boot ends that never came to an end.
pub const LAST_RECORD: &str = "last record";

/// Times of the guest as times of a story: no clock reaches the end of that scale (292 years).
pub fn ns(boottime_ns: u64) -> i64 {
    i64::try_from(boottime_ns).unwrap_or(i64::MAX)
}

/// One try of the agent to resolve a container's devices that failed.
pub struct Try {
    pub container: String,
    pub at_ns: i64,
    pub approximate: bool,
}

/// A boot, its file, and the story as far as it is written.
pub struct Draft<'a> {
    pub boot: &'a Boot,
    pub file: &'a BootFile,
    pub tries: Vec<Try>,
    pub story: Story,
    /// A hostile guest can name as many GPUs as it writes records: none of them is looked for
    /// twice.
    pub gpus: HashMap<PciAddress, GpuFacts>,
}

/// What other records say of a GPU.
#[derive(Clone, Copy, Debug, Default)]
pub struct GpuFacts {
    pub index: Option<u64>,
    pub bound_ns: Option<i64>,
    /// PCI device id.
    pub device: Option<u16>,
}

impl Draft<'_> {
    pub fn gpu_name(&self, address: PciAddress) -> GpuName {
        GpuName { index: self.gpus.get(&address).and_then(|g| g.index), address }
    }

    /// Adds a derived step, if it took any time, and gives its index.
    pub fn derive(&mut self, name: &str, begin_ns: i64, end_ns: i64) -> Option<usize> {
        (begin_ns < end_ns).then(|| {
            self.story.steps.push(Step { name: name.to_string(), begin_ns, end_ns: Some(end_ns), derived: true, ..Step::default() });
            self.story.steps.len() - 1
        })
    }

    pub fn step_mut(&mut self, index: usize) -> Option<&mut Step> {
        self.story.steps.get_mut(index)
    }

    /// The first step of that name that did not fail.
    pub fn first(&self, name: &str) -> Option<usize> {
        let steps = self.story.steps.iter().enumerate();
        steps.filter(|(_, s)| s.name == name && !s.failed).min_by_key(|(_, s)| s.begin_ns).map(|(i, _)| i)
    }

    pub fn milestone(&self, name: &str) -> Option<i64> {
        self.boot.milestones.iter().find(|m| m.name == name).and_then(|m| m.boottime_ns).map(ns)
    }
}
