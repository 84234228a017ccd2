//! What a boot is told as: steps and milestones, from whatever source. The input of all accounting.
//!
//! Times are ns on the guest's boot clock: 0 is the kernel's start, what was before it (VMM,
//! firmware) is negative. Nothing in a story has to be true or sound: ends before beginnings,
//! cycles and indices of nothing are dealt with by [`super::timeline::Timeline::new`]. Names that
//! [`crate::events::catalogue::TABLE`] knows get an owner; all others are kept and are nobody's.

use super::gpu_name::GpuName;

/// A boot.
#[derive(Clone, Debug, Default)]
pub struct Story {
    pub steps: Vec<Step>,
    pub milestones: Vec<Milestone>,
    /// The last moment that is known of: where a step without end is cut.
    pub last_ns: i64,
    /// What is missing in the source, as sentences for people: `no console log: ...`.
    pub missing: Vec<String>,
}

/// Something that took time.
#[derive(Clone, Debug, Default)]
pub struct Step {
    /// The span that it is, where it is one.
    pub span: Option<u64>,
    /// A name of the table, or any other.
    pub name: String,
    /// Which one, where a name alone does not say: a module, a container.
    pub detail: String,
    pub gpu: Option<GpuName>,
    pub begin_ns: i64,
    /// None: it had not ended when the source ended.
    pub end_ns: Option<i64>,
    /// The step around this one, as its index in the story.
    pub parent: Option<usize>,
    /// Steps whose end this one had to wait for, because the source says so.
    pub after: Vec<usize>,
    /// The same, because the program is known to go in this order.
    pub follows: Vec<usize>,
    /// It stands in no record by itself, but follows from others.
    pub derived: bool,
    /// Its place on the boot clock is not exact.
    pub approximate: bool,
    pub failed: bool,
}

/// A moment that people compare boots by.
#[derive(Clone, Debug, Default)]
pub struct Milestone {
    pub name: String,
    pub at_ns: i64,
    pub approximate: bool,
    /// How wrong its place on the boot clock may be.
    pub error_ns: u64,
    /// The steps whose end made it; empty: not known, and the last one that ended before it is
    /// assumed.
    pub after: Vec<usize>,
}
