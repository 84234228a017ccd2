//! The story of a boot while steps are added to it, and lookups for the code that adds them.

use super::gpu_name::GpuName;
use super::intervals::ns;
use super::model::Boot;
use super::story::{RawStep, Story};
use crate::data::boot_file::BootFile;
use kata_gpu_wire::pci_address::PciAddress;
use std::collections::HashMap;

/// The first milestone, if known: the guest's TSC was 0, as the VM's first CPU was made or QEMU's
/// reset of the VM ended (src/tsc.rs).
pub const VM_START: &str = "VM start";
/// Milestone that ends the account of an unfinished boot.
pub const LAST_RECORD: &str = "last record";

/// A failed try of the agent to resolve a container's devices.
pub struct Try {
    pub container: String,
    pub at_ns: i64,
    pub approximate: bool,
}

/// A boot, its file, and the story so far.
pub struct Draft<'a> {
    pub boot: &'a Boot,
    pub file: &'a BootFile,
    pub tries: Vec<Try>,
    pub story: Story,
    /// GPUs by address, so that none is searched for twice: a hostile guest can name as many as it
    /// writes records.
    pub gpus: HashMap<PciAddress, GpuFacts>,
}

/// Facts about a GPU from other records.
#[derive(Clone, Copy, Debug, Default)]
pub struct GpuFacts {
    pub index: Option<u64>,
    pub bound_ns: Option<i64>,
    /// PCI device id.
    pub device: Option<u16>,
}

impl Draft<'_> {
    pub fn gpu_name(&self, address: PciAddress) -> GpuName {
        GpuName {
            index: self.gpus.get(&address).and_then(|g| g.index),
            address,
        }
    }

    /// Adds a derived step, if it took any time, and returns its index.
    pub fn derive(&mut self, name: &str, begin_ns: i64, end_ns: i64) -> Option<usize> {
        (begin_ns < end_ns).then(|| {
            self.story.steps.push(RawStep {
                name: name.to_string(),
                begin_ns,
                end_ns: Some(end_ns),
                derived: true,
                ..RawStep::default()
            });
            self.story.steps.len() - 1
        })
    }

    pub fn step_mut(&mut self, index: usize) -> Option<&mut RawStep> {
        self.story.steps.get_mut(index)
    }

    /// The first step of that name that did not fail.
    pub fn first(&self, name: &str) -> Option<usize> {
        let steps = self.story.steps.iter().enumerate();
        steps
            .filter(|(_, s)| s.name == name && !s.failed)
            .min_by_key(|(_, s)| s.begin_ns)
            .map(|(i, _)| i)
    }

    pub fn milestone(&self, name: &str) -> Option<i64> {
        self.boot.milestone(name).map(ns)
    }
}
