//! Facts that go into the [`schedule`](super::schedule), and orders that come out.

use super::strategy::Strategy;
use kata_gpu_wire::named;
use kata_gpu_wire::pci_address::PciAddress;
use std::fmt;
use std::time::Duration;

/// Time since the guest's boot.
pub type Time = Duration;

/// An arrival of a GPU: its address, and the number of arrivals before it at that address. A bind
/// after an unbind is an arrival, too. Sorts by address.
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

/// State of a GPU at its arrival, which decides the steps that are left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arrival {
    /// Present at boot, no step done.
    Boot,
    /// Present at boot, left unbound by an earlier worker that died: the load does not count as its
    /// probe.
    Again,
    /// Bound by an earlier worker, or plugged in later: the kernel then enables and probes the GPU
    /// by itself.
    Enabled,
    /// Settled by an earlier worker.
    Usable,
    Failed,
}

/// Kind of a probe.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Probe {
    /// Probe by the driver's load.
    Load,
    /// During a load that is still probing another GPU.
    DuringLoad,
    /// Probe by a write to the driver's `bind`.
    Bind,
    /// Probe by a write to `bind` on the lane's vCPU, before the GPU is enabled: the driver enables
    /// it when its firewall is down.
    BeforeEnable,
}

/// An event of the bring-up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fact {
    Found(GpuId, Arrival),
    /// All GPUs of the boot scan are found.
    Scanned,
    /// The enabling of a GPU is over; its duration is measured by the process that enabled.
    Enabled(GpuId, Duration),
    /// The driver is registered at the bus: its load is probing.
    Registered,
    /// The load of nvidia is over; whether it succeeded. No fact of a failed load follows but
    /// `LoadOver`.
    Loaded(bool),
    /// The load of nvidia-uvm is over.
    UvmLoaded,
    /// No work of the loads is left that needs all CPUs.
    LoadOver,
    /// A GPU is bound, its minor is known and its node is made.
    Bound(GpuId),
    /// The publication of a GPU is requested from the writer of the spec.
    Publishing(GpuId),
    /// The publication of a GPU is done.
    Published(GpuId),
    /// The publication of a held-back GPU is done: no container finds it yet.
    Declared(GpuId),
    /// A GPU is about to be opened: its initialisation begins.
    Opening(GpuId),
    /// The open has returned: the initialisation waits for the driver's global lock, or has it.
    Opened(GpuId),
    /// The first part of a GPU's initialisation is over. Like the next one, this comes after
    /// `Opening`, and has no effect once the initialisation is over.
    Attached(GpuId),
    /// With this driver, the end of that first part is not seen.
    AttachUnseen(GpuId),
    /// The initialisation of a GPU is over; whether it succeeded.
    Initialised(GpuId, bool),
    /// A GPU is usable, and its extras are read.
    Usable(GpuId),
    /// A GPU is given up.
    Failed(GpuId),
    /// A GPU has left the bus.
    Gone(GpuId),
    /// The agent has opened the spec.
    AgentLooked,
    /// The agent makes a container.
    ContainerBegins,
    /// The program of a container runs.
    ContainerRuns,
}

named! {
    /// Reason that keeps the next GPU from being enabled.
    #[derive(PartialOrd, Ord)]
    pub enum Hold {
        Load = "driver load",
        Probe = "probe",
        Publication = "publication",
        Attach = "attach",
        Wave = "initialisations",
        AgentStart = "agent start",
        AgentLook = "agent's look",
        Container = "container start",
    }
}

/// A reason, and the time for which it held the lane.
pub type Held = (Hold, Duration);

/// An action that is due now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Order {
    /// The strategy is chosen.
    Chosen(Strategy, Option<Duration>),
    /// Load the driver, which may probe these GPUs: all of them, or one by one until one probe
    /// succeeds. `enables`: the load's probes also enable the GPUs.
    Load {
        gpus: Vec<GpuId>,
        one_by_one: bool,
        enables: bool,
    },
    /// Enable a GPU; with the reasons of the lane's wait before.
    Enable(GpuId, Vec<Held>),
    Probe(GpuId, Probe),
    Initialise(GpuId),
    /// Report that the lane waits before it enables this GPU.
    Wait(GpuId),
    /// Free the lane's vCPU: no GPU is left to enable.
    LaneOver,
    /// Report a GPU that takes long: its current step, and the time since its first.
    Late(GpuId, &'static str, Duration),
    /// Report that all GPUs are usable or failed.
    Settled {
        usable: usize,
        failed: usize,
    },
    /// Disable module loading: no module is left to load.
    LockDown,
}
