//! A boot as steps and milestones, from any source. The input of all accounting.
//!
//! Times are ns on the guest's boot clock: 0 is the kernel's start, times before it (VMM, firmware)
//! are negative. A story need not be true or sound: ends before beginnings, cycles and indices of
//! nothing are handled by [`super::timeline::Timeline::new`]. Names in
//! [`kata_gpu_wire::catalogue`] get an owner; all others are kept without one.

use super::gpu_name::GpuName;

/// A boot.
#[derive(Clone, Debug, Default)]
pub struct Story {
    pub steps: Vec<RawStep>,
    pub milestones: Vec<Milestone>,
    /// The last known moment: steps without end are cut here.
    pub last_ns: i64,
    /// Missing parts of the source, as sentences for people: `no console log: ...`.
    pub missing: Vec<String>,
}

/// An action that took time.
#[derive(Clone, Debug, Default)]
pub struct RawStep {
    /// Id of the step's span, if there is one.
    pub span: Option<u64>,
    /// Name of the table, or any other.
    pub name: String,
    /// Object of the step, if the name alone is ambiguous: a module, a container.
    pub detail: String,
    pub gpu: Option<GpuName>,
    pub begin_ns: i64,
    /// None: the step had not ended when the source ended.
    pub end_ns: Option<i64>,
    /// Index in the story of the step around this one.
    pub parent: Option<usize>,
    /// Steps whose end this one had to wait for, according to the source.
    pub after: Vec<usize>,
    /// Steps whose end this one had to wait for, by the known order of the program.
    pub follows: Vec<usize>,
    /// Whether the step is in no record by itself, but follows from others.
    pub derived: bool,
    /// Whether the place on the boot clock is inexact.
    pub approximate: bool,
    pub failed: bool,
    /// Index in the host's trace ([`super::host_trace::HostTrace::steps`]) of a step that it has.
    pub traced: Option<usize>,
}

/// A moment for comparing boots.
#[derive(Clone, Debug, Default)]
pub struct Milestone {
    pub name: String,
    pub at_ns: i64,
    pub approximate: bool,
    /// Bound of the error of the place on the boot clock.
    pub error_ns: u64,
    /// Steps whose end made the milestone; empty: unknown, and the last one that ended before it is
    /// assumed.
    pub after: Vec<usize>,
}
