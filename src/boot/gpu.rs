//! One GPU, from enabled to usable. It goes on as soon as *it* can, and stops nobody when it fails:
//!
//! ```text
//! enabled, driver there -> bind -> information -> node -> open, wait -> usable
//!                                                 |
//!                                                 +-> published
//! ```
//!
//! A GPU that hangs in its initialisation stays as it is, for ever if need be: deadlines report.

use super::batch::{Batches, LONGEST_INIT};
use super::beside;
use super::busy::{Activity, Busy};
use super::descriptors::Descriptors;
use super::driver::{Driver, Loaded};
use super::lane::{LONGEST_HOLD, Turn};
use super::lane_cpu::LaneCpu;
use super::lateness::{self, Progress};
use super::publication::{Update, Updates};
use super::roster::Roster;
use crate::adapter::{self, InitError};
use crate::bind::{PciSysfs, SysfsError};
use crate::cdi::spec::Naming;
use crate::clock::boottime_ns;
use crate::config::{Bind, Config};
use crate::device_nodes::Node;
use crate::driver_proc;
use crate::events::kmsg::DriverWords;
use crate::events::{After, StepId, names};
use crate::pci::{self, Gpu, PciAddress};
use crate::reason::{self, Reason, Step};
use crate::step;
use nix::errno::Errno;
use std::collections::HashMap;
use std::fmt::Display;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;
use tokio::runtime::Handle;
use tokio::sync::{Notify, Semaphore, oneshot, watch};
use tokio::task::JoinHandle;

const PROC: &str = "/proc";
/// How often a GPU that could be probed looks whether the driver has entered itself at the bus. The kernel tells nobody at that moment, and the
/// first GPU's probe, which follows at once, can sleep for 4 s in which the others could, too. Only for such GPUs, only until the driver is there.
const REGISTRATION_LOOK: Duration = Duration::from_millis(5);
/// A GPU that appears later is announced before the kernel lets any driver have it, and the moment after is announced by nothing but the bind itself.
/// So a bind that was too early waits for that, at most so long, and tries again, at most so often.
const TOO_EARLY: (Duration, u32) = (Duration::from_secs(1), 10);

/// How long a bound GPU lets others be probed before it initialises. A probe takes the driver's global lock for a moment; an initialisation holds it for
/// a good part of a second, so one that starts first keeps all others from being bound and published. Not longer: a probe can hang.
const PROBES_FIRST: Duration = Duration::from_secs(1);

/// How long a bound GPU lets nvidia-uvm be loaded before it initialises, which holds the driver's global lock for long. The load takes some 10 ms.
const UVM_FIRST: Duration = Duration::from_secs(1);

/// How long an initialisation goes by itself before the next GPU is enabled. Up to the boot of the GPU's own processor the driver looks at config space
/// again and again (550.163.01: in six groups, the last one 295 ms after the open, in an emulated guest), with its global lock held: each group would wait
/// until an enabling is over, and every other GPU with it. Nothing tells when that part is over.
const ATTACH: Duration = Duration::from_millis(320);

/// How long a GPU waits for the one that is being bound before it, where they are bound one at a time. A probe takes milliseconds, and sleeps for 4 s on some;
/// one that hangs would keep all others unbound.
const LONGEST_BIND: Duration = Duration::from_secs(30);

/// What every GPU's task works with.
pub struct Shared {
    pub sysfs: PciSysfs,
    pub config: Config,
    pub bind: Bind,
    /// Other GPUs are probed while the load is still probing its first one: worth it where all are enabled by then. The load does not end before these
    /// probes do.
    pub beside_the_load: bool,
    pub roster: Arc<Roster>,
    pub words: Option<DriverWords>,
    pub descriptors: Descriptors,
    pub spec: Updates,
    pub driver: watch::Receiver<Driver>,
    /// One bind at a time when pipelined; no limit when concurrent.
    pub binding: Semaphore,
    /// One initialisation at a time, or no limit.
    pub initialising: Arc<Semaphore>,
    /// Those that run beside each other.
    pub batches: Arc<Batches>,
    /// The last one that has ended, which the next may have had to wait for.
    pub initialised: Mutex<Option<StepId>>,
    /// When the kernel said "bind" for a GPU that the module load bound.
    pub bound_at: Mutex<HashMap<PciAddress, u64>>,
    /// Wakes whenever that grows.
    pub bound: Notify,
    /// Of bound GPUs.
    pub minors: Mutex<HashMap<PciAddress, u32>>,
    /// GPUs that are on their way through their probe.
    pub probing: Activity,
    /// Who keeps the lane from enabling another GPU.
    pub lane_held: Arc<Activity>,
    /// The lane, while it enables one.
    pub enabling: Arc<Activity>,
    /// There as long as the lane runs.
    pub lane_cpu: Weak<LaneCpu>,
}

/// Why a GPU's task ended early: the step, and what was tried with which result.
pub struct Failed {
    step: Step,
    /// When that step began, where it was later than the GPU's own beginning: words of the driver from before are about something else.
    since_ns: Option<u64>,
    /// What is known without the driver's words.
    reason: Option<Reason>,
    error: String,
}

fn failed(step: Step) -> impl FnOnce(&dyn Display) -> Failed {
    move |error| Failed { step, since_ns: None, reason: None, error: error.to_string() }
}

fn failed_by(step: Step, reason: Reason) -> impl FnOnce(&dyn Display) -> Failed {
    move |error| Failed { step, since_ns: None, reason: Some(reason), error: error.to_string() }
}

impl Shared {
    pub fn minor(&self, gpu: PciAddress) -> Option<u32> {
        self.minors.lock().unwrap_or_else(PoisonError::into_inner).get(&gpu).copied()
    }

    /// Returns when the driver, whose load is under way, has entered itself at the bus; false when the load is over.
    pub async fn registers(&self) -> bool {
        let loading = || matches!(&*self.driver.borrow(), Driver::Loading);
        while loading() && !self.sysfs.is_registered() {
            tokio::time::sleep(REGISTRATION_LOOK).await; // see the constant
        }
        loading()
    }

    /// Returns when the kernel has said "bind" for this GPU.
    async fn is_told_bound(&self, gpu: PciAddress) {
        loop {
            let bound = self.bound.notified();
            if self.bound_at.lock().unwrap_or_else(PoisonError::into_inner).contains_key(&gpu) {
                return;
            }
            bound.await;
        }
    }

    /// Keeps the lane from enabling from when a probe that begins now has slept its time, or has ended: it goes on, and what follows it, when the
    /// enabling that is under way then is over.
    async fn hold_lane_when_due<T>(&self, probe: impl Future<Output = T>) -> (T, Busy) {
        tokio::pin!(probe);
        match tokio::time::timeout(pci::BAR_FIREWALL_WAIT, &mut probe).await {
            Ok(result) => (result, self.lane_held.begin()),
            Err(_) => {
                let held = self.lane_held.begin();
                (probe.await, held)
            }
        }
    }

    /// Keeps the lane from enabling while a load works whose first GPU this is. Where probes sleep, not while that one does.
    pub async fn hold_lane(&self, mut held: Busy, gpu: Option<PciAddress>, mut loading: JoinHandle<()>) {
        if let (Bind::Concurrent, Some(gpu)) = (self.bind, gpu)
            && self.registers().await
        {
            drop(held);
            tokio::select! {
                (_, due) = self.hold_lane_when_due(self.is_told_bound(gpu)) => held = due,
                _ = &mut loading => return,
            }
        }
        // A panic there would be a bug of ours, and is told as one by the runtime.
        let _unused = loading.await;
        drop(held);
    }
    /// Takes a GPU out of the spec for good and tells why, in the driver's words where it has some.
    pub async fn give_up(&self, gpu: PciAddress, since_ns: u64, failure: Failed) {
        let _unused = self.spec.send(Update::Failed { gpu });
        let lines = match &self.words {
            Some(words) => words.since(gpu, failure.since_ns.unwrap_or(since_ns), failure.step.is_told_without_address()).await,
            None => Vec::new(),
        };
        let (recognised, line) = reason::classify(failure.step, &lines);
        let reason = failure.reason.unwrap_or(recognised);
        let index = self.roster.index(gpu);
        let mut error = format!("GPU {index} ({gpu}): {}", failure.error);
        if let Some(line) = line {
            error = format!("{error}; the driver says: {line}");
        }
        let (step, cure) = (failure.step.as_str(), reason.cure().unwrap_or("see the driver's words"));
        tracing::error!(name: names::GPU_FAILED, gpu = %gpu, index = index as u64, step, reason = %reason, cure, error);
    }
}

/// How a GPU comes in.
pub enum Arrival {
    /// It was there at boot; with its turn in the lane, if there is one.
    Boot(Option<Turn>),
    /// So it was, but an earlier worker has died over it. One that was killed while it loaded the module has taken probes with it: a probe that
    /// starts a kernel thread fails where a kill is pending. So none of these counts as tried.
    Again(Option<Turn>),
    /// It was plugged in later: the kernel probes it by itself.
    Later,
}

/// Brings one GPU up. True when it is usable.
pub async fn bring_up(shared: Arc<Shared>, gpu: Gpu, arrival: Arrival) -> bool {
    // What was there at boot may have been probed before this task began.
    let since_ns = if matches!(arrival, Arrival::Later) { boottime_ns() } else { 0 };
    match wait_and_bring_up(&shared, &gpu, arrival).await {
        Ok(()) => {
            let uuid = uuid(&shared, gpu.address).await;
            tracing::info!(name: names::GPU_USABLE, gpu = %gpu.address, index = shared.roster.index(gpu.address) as u64, uuid);
            // A panic there is told as a bug of ours by the runtime; the GPU is usable without all that.
            let _unused = beside::start(&shared, gpu.address).await;
            true
        }
        // A GPU that is gone has not failed.
        Err(_) if !shared.roster.contains(gpu.address) => false,
        Err(failure) => {
            shared.give_up(gpu.address, since_ns, failure).await;
            false
        }
    }
}

/// Waits for the GPU's turn to be enabled, then brings it up; from there on it can be late.
async fn wait_and_bring_up(shared: &Arc<Shared>, gpu: &Gpu, arrival: Arrival) -> Result<(), Failed> {
    let (mut enabled, mut lane) = (None, None);
    let first_try = matches!(arrival, Arrival::Boot(_));
    if let Arrival::Boot(Some(turn)) | Arrival::Again(Some(turn)) = arrival {
        // The lane answers for every GPU before it ends.
        let result = turn.await.unwrap_or_else(|_| Err("the enable lane has ended".into()));
        let (step, held) = match result {
            Ok(enabled) => enabled,
            Err(error) => {
                // The load was kept from this GPU; whoever tries by hand is not. On a thread: the device is locked while another one probes it.
                let (sysfs, gpu) = (shared.sysfs.clone(), gpu.address);
                let _unused = tokio::task::spawn_blocking(move || sysfs.release(gpu)).await;
                return Err(failed(Step::Enable)(&error));
            }
        };
        enabled = Some(step);
        // Not for a probe that sleeps; for what comes after it.
        lane = Some(held).filter(|_| shared.bind != Bind::Concurrent);
    }
    let progress = Progress::new("driver load");
    let _watchdog = lateness::watch(gpu.address, Arc::clone(&progress));
    let probing = shared.probing.begin();
    // The one GPU without a turn is the one that the load is given.
    let beside = if enabled.is_some() && shared.beside_the_load {
        probe_beside_the_load(shared, gpu.address, enabled, &progress).await
    } else {
        None
    };
    let driver = shared.driver.clone().wait_for(|d| !matches!(d, Driver::Loading)).await.map_or(Driver::Loading, |d| d.clone());
    let loaded = match driver {
        Driver::Loaded(loaded) => loaded,
        Driver::Failed { reason, error } => return Err(Failed { step: Step::Module, since_ns: None, reason, error }),
        Driver::Loading => return Err(failed_by(Step::Module, Reason::Internal)(&"the load's task has ended")),
    };
    let by_load = first_try && loaded.tried.contains(&gpu.address);
    progress.step("probe");
    let binding = async {
        match beside {
            Some(step) => Ok(step),
            None if by_load => bound_by_load(shared, gpu.address, &loaded),
            None => bind(shared, gpu.address, After::from(&[enabled, Some(loaded.step)][..]), &progress).await,
        }
    };
    let (bound, lane) = match lane {
        Some(held) => (binding.await, held),
        None => shared.hold_lane_when_due(binding).await,
    };
    let bound = bound?;
    let (minor, told) = tell_bound(shared, gpu.address, bound, by_load, &progress).await?;
    drop(probing);
    let (node, made) = make_node(gpu.address, minor, &loaded, told)?;
    progress.step("initialisation");
    if shared.config.ready_when_usable {
        let usable = initialise(shared, gpu.address, &node, made, &progress, lane).await?;
        publish(shared, gpu.address, node, usable, None).await;
        Ok(())
    } else {
        // Published at once; whether it also initialises decides whether it stays.
        let published = publish(shared, gpu.address, node.clone(), made, Some(shared.lane_held.begin()));
        tokio::join!(initialise(shared, gpu.address, &node, made, &progress, lane), published).0.map(drop)
    }
}

/// Probes this GPU while the module load is still probing another one, whose probe sleeps; the step, if that bound it. Whatever comes of it, the
/// load's end is waited for after it, and a GPU that is not bound by then gets its regular bind.
async fn probe_beside_the_load(shared: &Arc<Shared>, gpu: PciAddress, enabled: Option<StepId>, progress: &Arc<Progress>) -> Option<StepId> {
    if !shared.registers().await {
        return None;
    }
    progress.step("probe");
    let step = step!(names::GPU_BIND, gpu = %gpu, after = ?After::from(&[enabled][..]));
    let (id, sysfs, progress) = (step.id(), shared.sysfs.clone(), Arc::clone(progress));
    let probing = tokio::task::spawn_blocking(move || {
        progress.on_this_thread();
        step.run(|| {
            // One that could not be held back is the load's, and this would wait for its probe; so not on the runtime's thread.
            if !sysfs.is_held_back(gpu) {
                return Ok(false);
            }
            sysfs.release(gpu)?;
            sysfs.probe(gpu)?;
            let bound = sysfs.is_bound_at_last(gpu);
            if !bound {
                // The load must not probe it a third time.
                sysfs.hold_back(gpu)?;
            }
            Ok::<bool, SysfsError>(bound)
        })
    });
    // Errors are those of the regular bind that follows.
    matches!(probing.await, Ok(Ok(true))).then_some(id)
}

/// The step that bound a GPU which the load has probed.
fn bound_by_load(shared: &Shared, gpu: PciAddress, loaded: &Loaded) -> Result<StepId, Failed> {
    if shared.sysfs.is_bound(gpu) {
        Ok(loaded.step)
    } else {
        Err(failed(Step::Probe)(&"the driver's probe failed when the module was loaded"))
    }
}

/// The GPU is bound: says so, with the minor that the driver gave it, and the time at which the kernel said so. The one place that reads the
/// information file before the GPU is usable: each look at it makes the driver read config space (nine times, 550.163.01), waits for the driver's
/// global lock (before 590.44.01), and never returns for some GPUs that are lost. So on a thread of its own.
async fn tell_bound(
    shared: &Shared,
    gpu: PciAddress,
    bound: StepId,
    by_load: bool,
    progress: &Arc<Progress>,
) -> Result<(u32, StepId), Failed> {
    let bound_at = shared.bound_at.lock().unwrap_or_else(PoisonError::into_inner).get(&gpu).copied().filter(|_| by_load);
    let at_ns = bound_at.unwrap_or_else(boottime_ns);
    let (step, progress) = (step!(names::GPU_INFORMATION, gpu = %gpu, after = ?After(vec![bound])), Arc::clone(progress));
    let id = step.id();
    let looking = tokio::task::spawn_blocking(move || {
        progress.on_this_thread();
        step.run(|| driver_proc::information(Path::new(PROC), gpu))
    });
    let information = looking.await.map_err(|panicked| failed_by(Step::Probe, Reason::Internal)(&panicked))?;
    let information = information.map_err(|e| failed_by(Step::Probe, Reason::NoMinor)(&e))?;
    shared.minors.lock().unwrap_or_else(PoisonError::into_inner).insert(gpu, information.minor);
    tracing::info!(name: names::GPU_BOUND, gpu = %gpu, index = shared.roster.index(gpu) as u64, minor = information.minor, at_ns);
    Ok((information.minor, id))
}

/// Binds.
async fn bind(shared: &Arc<Shared>, gpu: PciAddress, after: After, progress: &Arc<Progress>) -> Result<StepId, Failed> {
    // The semaphore is never closed, and it is fair: waiting GPUs go in the order in which they were enabled, which is PCI order.
    progress.step("wait to be probed");
    let _turn = loop {
        match tokio::time::timeout(LONGEST_BIND, shared.binding.acquire()).await {
            Ok(turn) => break turn,
            Err(_) => shared.binding.add_permits(1),
        }
    };
    progress.step("probe");
    let step = step!(names::GPU_BIND, gpu = %gpu, after = ?after);
    let id = step.id();
    let binding = async {
        let (pause, tries) = TOO_EARLY;
        for _ in 1..tries {
            let bound = shared.bound.notified();
            match try_bind(shared, gpu, progress).await {
                Err(error) if error.errno() == Some(Errno::ENODEV) && shared.sysfs.is_present(gpu) => {
                    // The bind, or the deadline: either way the next try tells.
                    let _unused = tokio::time::timeout(pause, bound).await;
                }
                result => return result,
            }
        }
        try_bind(shared, gpu, progress).await
    };
    let since_ns = Some(boottime_ns());
    step.run_async(binding).await.map(|()| id).map_err(|e| Failed { since_ns, ..failed(Step::Probe)(&e) })
}

/// One try, on a thread of its own.
async fn try_bind(shared: &Arc<Shared>, gpu: PciAddress, progress: &Arc<Progress>) -> Result<(), SysfsError> {
    let (sysfs, progress) = (shared.sysfs.clone(), Arc::clone(progress));
    let trying = tokio::task::spawn_blocking(move || {
        progress.on_this_thread();
        sysfs.release(gpu)?;
        match sysfs.bind(gpu) {
            // Somebody else was faster.
            Err(_) if sysfs.is_bound_at_last(gpu) => Ok(()),
            result => result,
        }
    });
    // A panic of the thread would be a bug of ours, and is told as one by the runtime; the GPU is then as unbound as after a refusal.
    trying.await.unwrap_or_else(|panicked| Err(SysfsError::other(&panicked)))
}

/// Makes the GPU's device node, of the minor that the driver gave it.
fn make_node(gpu: PciAddress, minor: u32, loaded: &Loaded, told: StepId) -> Result<(Node, StepId), Failed> {
    let step = step!(names::GPU_NODES, gpu = %gpu, after = ?After(vec![told]));
    let id = step.id();
    let node = step.run(|| loaded.nodes.gpu(loaded.major, minor)).map_err(|e| failed(Step::Nodes)(&e))?;
    Ok((node, id))
}

/// Makes the GPU resolvable as soon as the nodes that every container needs are there.
async fn publish(shared: &Arc<Shared>, gpu: PciAddress, node: Node, after: StepId, lane: Option<Busy>) {
    // Fails only when the driver's task has ended, which it does not before it has said this.
    let mut driver = shared.driver.clone();
    drop(driver.wait_for(|d| matches!(d, Driver::Loaded(l) if l.control_ready)).await);
    let _unused = shared.spec.send(Update::Ready { gpu, nodes: vec![node], after: Some(after), lane });
}

/// Initialises the adapter; waits for as long as the driver takes. The next GPU is enabled when this one is out of the way of that.
async fn initialise(
    shared: &Arc<Shared>,
    gpu: PciAddress,
    node: &Node,
    after: StepId,
    progress: &Arc<Progress>,
    lane: Busy,
) -> Result<StepId, Failed> {
    // Where it waits for another GPU's initialisation, nobody waits for it.
    let at_once = Arc::clone(&shared.initialising).try_acquire_owned().ok().and_then(|turn| Some((turn, shared.batches.try_begin()?)));
    let (turn, (attaching, running), lane, before) = match at_once {
        Some((turn, begun)) => (Ok(turn), begun, lane, None),
        // Between two enablings, as if it had just been enabled; and when the GPU that comes out of the lane has been probed and published.
        None => {
            drop(lane);
            let turn = Arc::clone(&shared.initialising).acquire_owned().await;
            let begun = shared.batches.begin().await;
            let (lane, before) = (shared.lane_held.begin(), *shared.initialised.lock().unwrap_or_else(PoisonError::into_inner));
            if shared.batches.lane_runs() {
                let _unused = tokio::time::timeout(LONGEST_HOLD, shared.enabling.none()).await;
                let _unused = tokio::time::timeout(PROBES_FIRST, shared.lane_held.at_most(1)).await;
            }
            (turn, begun, lane, before)
        }
    };
    // What follows is waited for with the turn: who waits together is woken in any order.
    // The others, or the deadline. Where GPUs come out of the lane seconds apart, the next probe is not near.
    if shared.lane_cpu.strong_count() == 0 {
        let _unused = tokio::time::timeout(PROBES_FIRST, shared.probing.none()).await;
    }
    // The start of nvidia-uvm takes the driver's global lock, too, and nothing is published before it.
    let uvm = async { drop(shared.driver.clone().wait_for(|d| matches!(d, Driver::Loaded(l) if l.uvm_over)).await) };
    let _unused = tokio::time::timeout(UVM_FIRST, uvm).await;
    let step = step!(names::GPU_INIT, gpu = %gpu, after = ?After::from(&[Some(after), before][..]), rc = tracing::field::Empty, status = tracing::field::Empty);
    let (id, node, shared, progress) = (step.id(), node.clone(), Arc::clone(shared), Arc::clone(progress));
    let (runtime, (over, is_over)) = (Handle::current(), oneshot::channel::<()>());
    let (ended, has_ended) = oneshot::channel::<()>();
    tokio::spawn(async move {
        let _ended = tokio::time::timeout(LONGEST_INIT, has_ended).await;
        drop(running);
    });
    let initialising = tokio::task::spawn_blocking(move || {
        progress.on_this_thread();
        let descriptor = match shared.descriptors.of(gpu) {
            // An earlier worker opened it; what came of that is still to be asked.
            Some(descriptor) => Ok(descriptor),
            None => {
                if let Some(cpu) = shared.lane_cpu.upgrade() {
                    cpu.keep_driver_off();
                }
                let mut begun = Some((lane, attaching, is_over));
                // From here, not from when it returns: with drivers before 550.40.07 the open is the whole initialisation.
                let opening = |thread| {
                    progress.on_thread(thread);
                    if let Some((lane, attaching, is_over)) = begun.take() {
                        runtime.spawn(async move {
                            let _attached = tokio::time::timeout(ATTACH, is_over).await;
                            drop((lane, attaching));
                        });
                    }
                };
                let started = shared.descriptors.open(gpu, &node, opening);
                progress.on_this_thread();
                if !shared.roster.contains(gpu) {
                    // Removed meanwhile: the driver waits for everybody to close it, and has said so already.
                    shared.descriptors.release(gpu);
                }
                started
            }
        };
        let result = descriptor.and_then(|descriptor| adapter::wait(&descriptor, &node));
        if let Err(InitError::Failed { rc, status, .. }) = &result {
            step.note("rc", i64::from(*rc));
            step.note("status", u64::from(*status));
        }
        let result = step.run(|| result);
        *shared.initialised.lock().unwrap_or_else(PoisonError::into_inner) = Some(id);
        // The next one begins when this one's end has been told.
        drop((turn, over, ended));
        result
    });
    match initialising.await {
        Ok(Ok(())) => Ok(id),
        Ok(Err(error @ InitError::Open { .. })) => Err(failed(Step::Open)(&error)),
        Ok(Err(error)) => Err(failed(Step::Init)(&error)),
        Err(panicked) => Err(failed_by(Step::Init, Reason::Internal)(&panicked)),
    }
}

/// Gives a usable GPU its other name, where that is wanted: the driver knows it from the first initialisation on.
async fn uuid(shared: &Shared, gpu: PciAddress) -> Option<String> {
    if !shared.config.cdi_names.contains(&Naming::Uuid) {
        return None;
    }
    let looking = tokio::task::spawn_blocking(move || driver_proc::information(Path::new(PROC), gpu));
    let uuid = looking.await.ok()?.ok()?.uuid?;
    let _unused = shared.spec.send(Update::Known { gpu, uuid: uuid.clone() });
    Some(uuid)
}

/// The failure of a GPU that was usable.
pub fn failed_later(error: String, reason: Reason) -> Failed {
    Failed { step: Step::Running, since_ns: None, reason: Some(reason), error }
}
