//! What goes into the [`schedule`](super::schedule) and what comes out of it.

use super::strategy::Strategy;
use crate::pci::PciAddress;
use std::fmt;
use std::time::Duration;

/// Time since the guest's boot.
pub type Time = Duration;

/// One arrival of a GPU: its address, and how many arrivals there were at that address before it. A
/// bind after an unbind is an arrival, too. Orders by address.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GpuId {
    pub address: PciAddress,
    pub generation: u32,
}

impl GpuId {
    /// The generation as records have it: none in the first one.
    pub fn again(self) -> Option<u64> {
        (self.generation > 0).then_some(u64::from(self.generation))
    }
}

impl fmt::Debug for GpuId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}#{}", self.address, self.generation)
    }
}

/// How a GPU comes in: what is left to be done for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arrival {
    /// There at boot, touched by nobody.
    Boot,
    /// The same, but an earlier worker has died over it: no load counts as a try.
    Again,
    /// Bound by an earlier worker, or plugged in later, when the kernel enables and probes it by
    /// itself.
    Enabled,
    /// Settled by an earlier worker.
    Usable,
    Failed,
}

/// How a GPU is probed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Probe {
    /// By the load of the driver.
    Load,
    /// Beside a load that is still probing another GPU.
    DuringLoad,
    /// By a write to the driver's `bind`.
    Bind,
    /// The same on the lane's vCPU, before it is enabled: the driver enables it when its firewall
    /// is down.
    BeforeEnable,
}

/// What has happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fact {
    Found(GpuId, Arrival),
    /// All GPUs of the boot scan are found.
    Scanned,
    /// The enabling of a GPU is over; `took`: by the clock of who did it.
    Enabled(GpuId, Duration),
    /// The driver has entered itself at the bus: its load is probing.
    Registered,
    /// The load of nvidia is over; nothing more comes of one that failed.
    Loaded(bool),
    /// The load of nvidia-uvm is over.
    UvmLoaded,
    /// Nothing of the loads is left that needs all CPUs.
    LoadOver,
    /// A GPU is bound, its minor is known and its node is made.
    Bound(GpuId),
    /// The writer of the spec has been asked to publish a GPU, and has done so.
    Publishing(GpuId),
    Published(GpuId),
    /// A GPU is about to be opened: its initialisation begins.
    Opening(GpuId),
    /// The initialisation of a GPU is over: whether it went well.
    Initialised(GpuId, bool),
    /// A GPU is usable, and all is known of it.
    Usable(GpuId),
    /// A GPU will not come.
    Failed(GpuId),
    /// A GPU has left the bus.
    Gone(GpuId),
    /// The agent has looked into the spec.
    AgentLooked,
    /// The agent makes a container.
    ContainerBegins,
    /// The program of a container runs.
    ContainerRuns,
}

/// What keeps the next GPU from being enabled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Hold {
    Load,
    Probe,
    Publication,
    Attach,
    Wave,
    AgentStart,
    AgentLook,
    Container,
}

impl Hold {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Load => "driver load",
            Self::Probe => "probe",
            Self::Publication => "publication",
            Self::Attach => "attach",
            Self::Wave => "initialisations",
            Self::AgentStart => "agent start",
            Self::AgentLook => "agent's look",
            Self::Container => "container start",
        }
    }
}

/// A reason, and for how long it held the lane.
pub type Held = (Hold, Duration);

/// What is to be done now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Order {
    /// The strategy is chosen.
    Chosen(Strategy, Option<Duration>),
    /// Load the driver; it may probe these GPUs: all of them, or one by one until one probe
    /// succeeds. `enables`: its probes enable them as well.
    Load {
        gpus: Vec<GpuId>,
        one_by_one: bool,
        enables: bool,
    },
    /// Begin. What kept it waiting, and for how long, comes with an enabling.
    Enable(GpuId, Vec<Held>),
    Probe(GpuId, Probe),
    Initialise(GpuId),
    /// The lane waits before it enables this GPU.
    Wait(GpuId),
    /// No more GPUs are to be enabled: the lane's vCPU is free.
    LaneOver,
    /// Report a GPU that takes long: the step it is in, and how long it has been on its way.
    Late(GpuId, &'static str, Duration),
    /// All GPUs are usable or failed.
    Settled {
        usable: usize,
        failed: usize,
    },
    /// Nothing needs to be loaded any more.
    LockDown,
}
