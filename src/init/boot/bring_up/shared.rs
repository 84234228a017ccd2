//! State shared by the tasks of all GPUs, and observations of each GPU.

use super::dispatch::Dispatch;
use super::lane::Lane;
use super::late::Progress;
use super::overlaps::{Overlaps, Window};
use super::publication::Updates;
use super::roster::Roster;
use super::schedule_messages::GpuId;
use crate::boot::ipc::descriptors::Descriptors;
use crate::config::Config;
use crate::gpu::bind::PciSysfs;
use crate::gpu::device_nodes::DeviceNodes;
use crate::gpu::topology::Decision;
use crate::machine::clock::boottime_ns;
use crate::machine::threads;
use crate::nvml::Helpers;
use crate::services::{Fabric, Milestones};
use crate::stream::StepId;
use crate::stream::kmsg::DriverLog;
use kata_gpu_wire::failure::Reason;
use kata_gpu_wire::pci_address::PciAddress;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Arc, Mutex, MutexGuard};
use tokio::runtime::Handle;
use tokio::sync::futures::Notified;
use tokio::sync::{Notify, watch};

/// Handles that every GPU's task uses.
pub struct Shared {
    pub config: Config,
    pub sysfs: PciSysfs,
    pub dispatch: Arc<Dispatch>,
    pub lane: Arc<Lane>,
    pub roster: Arc<Roster>,
    pub driver: watch::Receiver<Driver>,
    /// Locked while GPUs are held back.
    pub offered: Arc<Mutex<Offered>>,
    /// Kind of this guest; may change until the driver's load, and when NVML reports the fabric.
    pub topology: watch::Sender<Decision>,
    pub descriptors: Descriptors,
    /// Runtime for threads that start tasks.
    pub runtime: Handle,
    pub spec: Updates,
    /// The driver's lines in the kernel's log.
    pub driver_log: Option<DriverLog>,
    pub seen: Seen,
    /// Progress of the bring-up, for the services.
    pub milestones: watch::Sender<Milestones>,
    /// State of the fabric, for the services.
    pub fabric: watch::Sender<Fabric>,
    /// Occasions to ask NVML.
    pub occasions: watch::Sender<Occasions>,
    /// Helpers that ask NVML.
    pub nvml: Helpers,
    /// Inode of the last device at an address that was reset in this boot; see [`super::reset`].
    pub resets: Mutex<BTreeMap<PciAddress, Option<u64>>>,
}

impl Shared {
    /// GPUs that are usable now, in the order of their names.
    pub fn usable(&self) -> Vec<GpuId> {
        self.roster
            .present()
            .into_iter()
            .filter(|gpu| self.dispatch.is_usable(*gpu))
            .collect()
    }
}

/// Observations of GPUs, noted by any task.
#[derive(Default)]
pub struct Seen {
    state: Mutex<State>,
    /// Wakes whenever the kernel reports a bind.
    bound: Notify,
}

#[derive(Default)]
struct State {
    gpus: HashMap<GpuId, Observed>,
    /// Last initialisation that has ended; the next one may have waited for it.
    initialised: Option<StepId>,
    overlaps: Overlaps,
}

#[derive(Default)]
struct Observed {
    /// Time in ns at which this worker found the GPU; 0 for one that an earlier worker has settled.
    arrived_at: u64,
    /// Time in ns at which the kernel reported the GPU as bound.
    bound_at: Option<u64>,
    /// Device minor; set once bound.
    minor: Option<u32>,
    /// Thread that is in the kernel for the GPU, for reports.
    progress: Arc<Progress>,
    /// The GPU has fallen off the bus: its driver and its config space agree.
    off_the_bus: bool,
    /// Its config space is being read.
    checked: bool,
}

impl Seen {
    pub fn arrived(&self, gpu: GpuId) {
        self.note(gpu, |seen| seen.arrived_at = boottime_ns());
    }

    /// Time in ns at which this worker found a GPU; 0 for one that an earlier worker has settled.
    pub fn arrived_at(&self, gpu: GpuId) -> u64 {
        self.lock().gpus.get(&gpu).map_or(0, |seen| seen.arrived_at)
    }

    pub fn bound(&self, gpu: GpuId) {
        self.note(gpu, |seen| seen.bound_at = Some(boottime_ns()));
        self.bound.notify_waiters();
    }

    /// Removes all observations of a GPU that has left.
    pub fn gone(&self, gpu: GpuId) {
        let mut state = self.lock();
        state.gpus.remove(&gpu);
        state.overlaps.gone(gpu);
    }

    /// Goes on where an earlier worker has ended.
    pub fn continues(&self) {
        self.lock().overlaps.continues();
    }

    /// The initialisation of a GPU begins, or was begun by an earlier worker.
    pub fn begins_initialisation(&self, gpu: GpuId, by_earlier_worker: bool) {
        let now_ns = boottime_ns();
        self.lock().overlaps.begin(gpu, now_ns, by_earlier_worker);
    }

    pub fn ends_initialisation(&self, gpu: GpuId, failed: bool) {
        self.lock().overlaps.end(gpu, boottime_ns(), failed);
    }

    /// Time of a GPU's initialisation; see [`Overlaps::of`].
    pub fn initialisation(&self, gpu: GpuId, one_by_one: bool) -> Option<Window> {
        self.lock().overlaps.of(gpu, one_by_one)
    }

    /// Notes that a GPU has fallen off the bus.
    pub fn set_off_the_bus(&self, gpu: GpuId) {
        self.note(gpu, |seen| seen.off_the_bus = true);
    }

    /// Begins or ends the one check whether a GPU answers; returns whether that was a change.
    pub fn set_checked(&self, gpu: GpuId, checked: bool) -> bool {
        self.note(gpu, |seen| {
            std::mem::replace(&mut seen.checked, checked) != checked
        })
    }

    pub fn is_off_the_bus(&self, gpu: GpuId) -> bool {
        self.lock()
            .gpus
            .get(&gpu)
            .is_some_and(|seen| seen.off_the_bus)
    }

    pub fn minor(&self, gpu: GpuId) -> Option<u32> {
        self.lock().gpus.get(&gpu)?.minor
    }

    pub fn progress(&self, gpu: GpuId) -> Arc<Progress> {
        self.note(gpu, |seen| Arc::clone(&seen.progress))
    }

    /// Time in ns at which the kernel reported this GPU as bound.
    pub fn bound_at(&self, gpu: GpuId) -> Option<u64> {
        self.lock().gpus.get(&gpu)?.bound_at
    }

    /// Wakes at the next bind that the kernel reports.
    pub fn next_bound(&self) -> Notified<'_> {
        self.bound.notified()
    }

    pub fn set_minor(&self, gpu: GpuId, minor: u32) {
        self.note(gpu, |seen| seen.minor = Some(minor));
    }

    /// Last initialisation that has ended; the next one may have waited for it.
    pub fn initialised(&self) -> Option<StepId> {
        self.lock().initialised
    }

    pub fn set_initialised(&self, step: StepId) {
        self.lock().initialised = Some(step);
    }

    fn note<T>(&self, gpu: GpuId, note: impl FnOnce(&mut Observed) -> T) -> T {
        note(self.lock().gpus.entry(gpu).or_default())
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        threads::lock(&self.state)
    }
}

/// Occasions to ask NVML: how often they came.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Occasions {
    /// All GPUs were settled.
    pub settled: u64,
    /// A GPU became usable.
    pub usable: u64,
}

/// GPUs that a load may probe, where it is offered one at a time.
#[derive(Default)]
pub struct Offered {
    /// GPU that the load is offered: nobody else holds this one back.
    pub gpu: Option<GpuId>,
    /// GPUs that are released for a probe during the load.
    pub released: BTreeSet<GpuId>,
}

/// State of the driver's load.
#[derive(Clone)]
pub enum Driver {
    Loading,
    Loaded(Loaded),
    /// The module is not loaded, with the reason.
    Failed {
        reason: Option<Reason>,
        error: String,
    },
}

/// A loaded driver.
#[derive(Clone)]
pub struct Loaded {
    pub step: StepId,
    pub major: u32,
    pub nodes: DeviceNodes,
    /// GPUs whose probe the load tried; a GPU of these that is not bound has failed.
    pub tried: Vec<GpuId>,
    /// Whether the nodes that every container needs are made, as far as possible.
    pub control_ready: bool,
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use crate::boot::bring_up::dispatch;
    use crate::boot::bring_up::dispatch::Orders;
    use crate::boot::bring_up::publication::Update;
    use crate::boot::bring_up::schedule::Schedule;
    use crate::boot::bring_up::strategy::{Facts, Policy};
    use crate::gpu::bind::Sight;
    use crate::gpu::topology;
    use crate::stream::After;
    use crate::stream::sinks::console::Gate;
    use std::path::Path;
    use tokio::sync::mpsc;

    /// The shared state of a bring-up without its tasks, with the ends of its channels: the fleet's
    /// orders, and the updates of the spec. `sysfs` stands for /sys. Must be called inside a
    /// runtime.
    pub fn shared(
        config: Config,
        sysfs: &Path,
    ) -> (Arc<Shared>, Orders, mpsc::UnboundedReceiver<Update>) {
        let policy = Policy {
            bind: config.bind,
            init: config.init,
            first: config.first,
            relaxed: config.relaxed,
            no_gpus: false,
            load_begun: false,
            enable: None,
            facts: facts(),
        };
        let (dispatch, orders) = Dispatch::start(Schedule::new(policy, dispatch::now()));
        let (spec, updates) = mpsc::unbounded_channel();
        let sysfs = PciSysfs::at(sysfs);
        let functions = topology::Functions {
            gpus: 1,
            ..topology::Functions::default()
        };
        let lone = topology::Facts {
            functions,
            expected_gpus: None,
            confidential: false,
            asked: None,
            nvlink: config.nvlink,
            option: None,
            loaded: false,
        };
        let lane = Lane::new(
            sysfs.clone(),
            Path::new("/nonexistent"),
            None,
            Gate::default(),
            After::default(),
        );
        let shared = Shared {
            config,
            lane: Arc::new(lane),
            sysfs,
            dispatch,
            roster: Arc::new(Roster::default()),
            driver: watch::channel(Driver::Loading).1,
            offered: Arc::default(),
            topology: watch::channel(topology::decide(lone)).0,
            descriptors: Descriptors::new(None, None, Vec::new()),
            runtime: Handle::current(),
            spec,
            driver_log: None,
            seen: Seen::default(),
            milestones: watch::channel(Milestones::default()).0,
            fabric: watch::channel(Fabric::default()).0,
            occasions: watch::channel(Occasions::default()).0,
            nvml: Helpers::default(),
            resets: Mutex::default(),
        };
        (Arc::new(shared), orders, updates)
    }

    /// Facts of a guest with one GPU.
    pub fn facts() -> Facts {
        Facts {
            gpus: 1,
            firewall: false,
            driver: None,
            init_on_probe: false,
            confidential: false,
            vcpus: 2,
        }
    }

    /// Puts a GPU into the roster, which the boot scan has found.
    pub fn arrive(shared: &Shared) -> GpuId {
        let gpu = GpuId {
            address: "0001:00:03.0".parse().unwrap(),
            generation: 0,
        };
        let sight = Sight {
            device: Some(7),
            bind: None,
        };
        shared.roster.observe(gpu.address, sight, Some(0x2330));
        gpu
    }
}
