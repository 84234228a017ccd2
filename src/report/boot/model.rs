//! Facts about one boot. [`super::fold`] computes them.
//!
//! [`Boot`] is the output of `show --json`; its field names are part of the interface (version
//! [`MODEL`]). All times are ns on the guest's boot clock (0 = kernel start) and end in `_ns`;
//! durations end in `took_ns`. A key without a value is left out.

use super::cause::{Cause, End};
use super::coverage::CoverageSummary;
use super::gpu_health::{GuestHealth, Health};
use super::host_trace::HostTrace;
use super::timeline::Timeline;
use crate::data::agent_log::AgentEvent;
use crate::data::boot_file::{Damage, Imported, Sandbox};
use crate::data::budget::TooLarge;
use crate::data::clock_offset::{Clock, Drift, Sample, Wall};
use crate::data::clock_points::Placed;
use crate::data::compact_record::{SpanFields, Text};
use crate::data::guest_clocks::{BeforeKernel, Printk};
use crate::data::units::is_zero;
use kata_gpu_wire::pci_address::PciAddress;
use serde::Serialize;
use std::time::Duration;

/// Version of the JSON form of [`Boot`].
pub const MODEL: u32 = 1;
/// Meaning of 0 in every stream of a guest.
pub const KERNEL_START: &str = "kernel start";
/// The milestone at which all GPUs were usable or failed.
pub const SETTLED: &str = "settled";
/// Time for a guest to reconnect before its boot counts as over.
pub const RECONNECT_GRACE: Duration = Duration::from_secs(5);

/// A boot.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Boot {
    pub model: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub boot_id: Option<String>,
    /// Version of kata-gpu-init.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
    /// Id of the init's build, as reported by the guest: that of its release (initrd/release).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub build: Option<String>,
    /// `uname -r` of the guest.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kernel: Option<String>,
    /// The VM by Kata's ids, and its pod.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sandbox: Option<Sandbox>,
    /// Time at which all GPUs were usable or failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub settled_ns: Option<u64>,
    /// Reason why the guest powered itself off.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub power_off: Option<String>,
    /// Ends of the guest, and failures of its sandbox, in order.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub ends: Vec<End>,
    /// Xids in order of their first.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub xids: Vec<Xids>,
    pub milestones: Vec<Milestone>,
    /// GPUs in PCI order.
    pub gpus: Vec<Gpu>,
    /// NVML's own state, and that of the confidential guest.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub health: Option<Box<GuestHealth>>,
    /// Containers in the order in which the agent finished them.
    pub containers: Vec<Container>,
    /// Guest clock beside host clock.
    pub clock: ClockSummary,
    pub lost: Lost,
    /// Number of unreadable lines of the file; the first few are in `damage`.
    pub damaged_lines: u64,
    pub damage: Vec<Damage>,
    /// Lines that the collector dropped because they were not of the format.
    pub garbage_lines: u64,
    /// Reason why the collector stopped storing, if it did.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub capped: Option<String>,
    /// Part of the boot that the steps explain; None with fewer than two known milestones.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub coverage: Option<CoverageSummary>,
    /// Counts of parts left out, over the limits of [`crate::data::budget`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub too_large: Option<TooLarge>,
    /// Schema of the guest's stream, if newer than this program's: what is unknown of it is shown
    /// as events and fields.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub newer_schema: Option<u32>,
    /// Number of lines of a newer collector that are unknown here.
    #[serde(skip_serializing_if = "is_zero")]
    pub unknown_host_lines: usize,
    /// Sources of the boot, if not a guest's stream alone.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub imported: Option<Imported>,
    /// The host's own steps, if `kata-gpu-boot doctor --record` recorded the boot.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub host: Option<Box<HostTrace>>,
    /// Spans in order of their beginning.
    pub spans: Vec<Span>,
    /// Steps and milestones with their owners, for analysis and views.
    #[serde(skip)]
    pub timeline: Timeline,
    /// Events of the agent's lines, each with its place on the boot clock, if that is known.
    #[serde(skip)]
    pub agent: Vec<(AgentEvent, Option<Placed>)>,
    /// The guest's clock against the host's.
    #[serde(skip)]
    pub host_clock: Clock,
}

/// A point of time for comparing boots.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Milestone {
    pub name: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub boottime_ns: Option<u64>,
    /// Whether the boot-clock time is approximate (see [`crate::data::clock_points`]).
    pub approximate: bool,
    /// The host's wall clock at that time.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub wall: Option<Wall>,
}

/// A state that a GPU reached, with the time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct GpuStep {
    pub at_ns: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub took_ns: Option<u64>,
}

/// A step that has begun and not ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct OpenStep {
    pub step: String,
    pub since_ns: u64,
}

/// Reason why a GPU is not usable.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Failure {
    pub at_ns: u64,
    pub step: String,
    /// The guest's sentence.
    pub reason: String,
    #[serde(flatten)]
    pub cause: Cause,
}

/// Errors of one kind that the driver reported of a GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Xids {
    pub xid: u64,
    pub gpu: PciAddress,
    /// The first one.
    pub at_ns: u64,
    pub count: u64,
    /// The driver's line about the last one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub words: Option<String>,
}

/// A GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Gpu {
    pub address: PciAddress,
    /// Index in CDI names.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub index: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub minor: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub found_ns: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub enabled: Option<GpuStep>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bound: Option<GpuStep>,
    /// `took_ns`: time since the bind.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub published: Option<GpuStep>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub usable: Option<GpuStep>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub failed: Option<Failure>,
    /// Current step of the GPU, if no end is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub still: Option<OpenStep>,
    /// NVML's report on the GPU.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub health: Option<Box<Health>>,
    /// State by the newest record.
    #[serde(skip)]
    pub now: Now,
}

/// State of a GPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum State {
    /// Found; nothing has been done with the GPU yet.
    #[default]
    Waiting,
    /// The host maps its BARs.
    Enabling,
    /// Waits for the driver.
    Enabled,
    /// The driver's probe.
    Probing,
    /// Waits to be opened.
    Bound,
    /// Adapter initialisation.
    Initialising,
    Ready,
    Failed,
    Removed,
}

impl State {
    pub fn name(self) -> &'static str {
        match self {
            Self::Waiting => "waiting",
            Self::Enabling => "enabling",
            Self::Enabled => "enabled",
            Self::Probing => "probing",
            Self::Bound => "bound",
            Self::Initialising => "initialising",
            Self::Ready => "ready",
            Self::Failed => "failed",
            Self::Removed => "removed",
        }
    }

    /// Whether only the init itself can bring the GPU back.
    pub fn is_over(self) -> bool {
        self >= Self::Ready
    }
}

/// State of a GPU at the newest record.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Now {
    pub state: State,
    /// Beginning of the state.
    pub since_ns: u64,
    /// Furthest state up to [`State::Ready`], also of a GPU that failed then.
    pub furthest: State,
    /// Whether containers can have the GPU.
    pub is_published: bool,
}

/// A requested container.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Container {
    pub name: String,
    pub devices: String,
    /// Time of the runtime's request.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub asked_ns: Option<u64>,
    /// Time of creation or failure.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub at_ns: Option<u64>,
    pub approximate: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tries: Option<u64>,
    /// Reason why the container was not created.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// Whether the container is the pod's pause container, which is in no milestone.
    #[serde(skip_serializing_if = "is_zero")]
    pub pause: bool,
    /// Whether no line shows the end.
    #[serde(skip_serializing_if = "is_zero")]
    pub pending: bool,
    /// Whether no line of the agent names the container: `at_ns` is then the time at which the init
    /// saw its directory made, after the injection of its devices.
    #[serde(skip_serializing_if = "is_zero")]
    pub seen_by_init: bool,
}

/// Accuracy of the guest's times on the host's clock.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct ClockSummary {
    /// Number of the collector's pings.
    pub samples: usize,
    /// The sample with the smallest bound.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub best: Option<Sample>,
    /// Excess in rate of the guest's clock over the host's, between two samples.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub drift: Option<Drift>,
    /// Number of samples that contradict earlier ones: a clock was stepped, or ran faster than
    /// assumed.
    #[serde(skip_serializing_if = "is_zero")]
    pub steps: usize,
    /// Number of the guest's samples of its hypervisor's clock; below, of those that fit the pings.
    #[serde(skip_serializing_if = "is_zero")]
    pub hypervisor_samples: usize,
    #[serde(skip_serializing_if = "is_zero")]
    pub hypervisor_samples_used: usize,
    /// The clock of the kernel's log.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub printk: Option<Printk>,
    /// Time from the VM's first CPU until the kernel's clock began.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub before_kernel: Option<BeforeKernel>,
    /// Reasons for values left out.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
}

/// Records that are missing.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Lost {
    /// Number of records in gaps between the existing ones.
    pub records: u64,
    /// First and last seq of the first few gaps.
    pub gaps: Vec<(u64, u64)>,
    /// Number of records that the guest itself reports as dropped (`stream.lost`).
    pub reported_by_guest: u64,
}

/// A step with its beginning and end.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Span {
    pub id: u64,
    pub name: Text,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gpu: Option<PciAddress>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub parent: Option<u64>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub after: Vec<u64>,
    /// Begin; `None` if its record was lost.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub begin_ns: Option<u64>,
    /// End; `None` for an open span, or if the record was lost.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub end_ns: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<Text>,
    #[serde(skip_serializing_if = "SpanFields::is_empty")]
    pub fields: SpanFields,
}

impl Span {
    pub fn took_ns(&self) -> Option<u64> {
        self.end_ns?.checked_sub(self.begin_ns?)
    }
}

impl Boot {
    pub fn failed_gpus(&self) -> impl Iterator<Item = &Gpu> {
        self.gpus.iter().filter(|g| g.failed.is_some())
    }

    /// Time of a milestone, if the boot has it and it is known.
    pub fn milestone(&self, name: &str) -> Option<u64> {
        let mut milestones = self.milestones.iter();
        milestones.find(|m| m.name == name)?.boottime_ns
    }

    pub fn usable_gpus(&self) -> usize {
        let is_usable = |gpu: &&Gpu| gpu.usable.is_some() && gpu.failed.is_none();
        self.gpus.iter().filter(is_usable).count()
    }

    /// The agent's events that have a place on the boot clock.
    pub fn agent_moments(&self) -> impl Iterator<Item = (&AgentEvent, Placed)> {
        (self.agent.iter()).filter_map(|(event, placed)| Some((event, (*placed)?)))
    }
}
