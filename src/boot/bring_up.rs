//! The bring-up of all GPUs. Each GPU is a task that goes on as soon as *it* can:
//!
//! ```text
//! scan -> [enable lane, one thread, PCI order] ----+
//!      -> [driver: nvidia, control nodes, uvm] --+ |
//!                                                v v
//!                                       GPU k: bind -> information -> node -> open, wait -> usable
//!                                                                      |
//!                                                                      +-> published
//! ```
//!
//! One GPU's failure is an event and a spec without it; it stops nobody else. A GPU that hangs in its initialisation stays as it is, for ever
//! if need be: deadlines report.

use super::Boot;
use super::driver::{self, Driver};
use super::keeper::KeeperSocket;
use super::publication::{self, Update};
use crate::adapter::{self, InitError};
use crate::bind::PciSysfs;
use crate::clock::boottime_ns;
use crate::config::{Bind, Config};
use crate::device_nodes::Node;
use crate::driver_proc;
use crate::events::kmsg::DriverWords;
use crate::events::{After, StepId, names};
use crate::pci::{self, Gpu, PciAddress};
use crate::step;
use crate::uevents::{Action, Next, Uevents};
use std::collections::HashMap;
use std::fmt::Display;
use std::io;
use std::os::fd::IntoRawFd;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::{Semaphore, mpsc, oneshot, watch};
use tokio::task::JoinSet;

const SYS: &str = "/sys";
const PROC: &str = "/proc";
/// When a GPU that is not settled is reported: after these, then every [`REPORT_EVERY`].
const REPORTS: [Duration; 3] = [Duration::from_secs(10), Duration::from_secs(30), Duration::from_secs(60)];
const REPORT_EVERY: Duration = Duration::from_secs(60);

/// How this boot binds, and why.
fn strategy(config: &Config, gpus: &[Gpu]) -> (Bind, &'static str) {
    match (config.bind, gpus.len()) {
        (Bind::Auto, 0 | 1) => (Bind::Insmod, "auto: with one GPU the module load does it all"),
        (Bind::Auto, _) if gpus.iter().any(|g| pci::waits_for_bar_firewall(g.device)) => {
            (Bind::Concurrent, "auto: probes of these GPUs sleep up to 4 s, at once")
        }
        (Bind::Auto, _) => (Bind::Pipelined, "auto: each GPU as soon as its own BARs are mapped"),
        (asked, _) => (asked, "asked for by gpuinit.bind"),
    }
}

/// What every GPU's task works with.
struct Shared {
    sysfs: PciSysfs,
    config: Config,
    words: Option<DriverWords>,
    keeper: Option<KeeperSocket>,
    spec: mpsc::UnboundedSender<Update>,
    driver: watch::Receiver<Driver>,
    /// One bind at a time when pipelined; no limit when concurrent.
    binding: Semaphore,
    /// One initialisation at a time when `gpuinit.init=serial`.
    initialising: Arc<Semaphore>,
    /// When the kernel said "bind" for a GPU that the module load bound.
    bound_at: Arc<Mutex<HashMap<PciAddress, u64>>>,
}

/// Where a GPU is, for reports of lateness.
type Stage = Arc<Mutex<&'static str>>;

/// Why a GPU's task ended early: the step, a token for programs, and the sentence for people.
struct Failed {
    step: &'static str,
    reason: &'static str,
    error: String,
}

fn failed(step: &'static str, reason: &'static str) -> impl FnOnce(&dyn Display) -> Failed {
    move |error| Failed { step, reason, error: error.to_string() }
}

/// Brings all GPUs up; returns when each is usable or failed.
pub async fn run(boot: &Boot, uevents: io::Result<Uevents>, words: Option<DriverWords>, keeper: Option<KeeperSocket>) {
    let bound_at = Arc::default();
    match uevents {
        Ok(uevents) => drop(tokio::spawn(record_uevents(uevents, Arc::clone(&bound_at)))),
        Err(error) => {
            tracing::warn!(name: names::UEVENT, error = %format!("subscribe to uevents: {error}: hot-plugged GPUs will not be seen"))
        }
    }
    let gpus = scan(&boot.config);
    let (bind, reason) = strategy(&boot.config, &gpus);
    tracing::info!(name: names::STRATEGY, bind = %bind, init = if boot.config.parallel_init { "parallel" } else { "serial" }, reason);
    let spec = publication::start(&gpus, boot.config.cdi_complete);
    let sysfs = PciSysfs::at(Path::new(SYS));

    let mut tasks = JoinSet::new();
    if !gpus.is_empty() {
        let driver = driver::start(boot, bind, &sysfs, &gpus, spec.clone());
        let turns = start_enable_lane(bind, &sysfs, &gpus);
        let shared = Arc::new(Shared {
            sysfs,
            config: boot.config.clone(),
            words,
            keeper,
            spec: spec.clone(),
            driver,
            binding: Semaphore::new(if bind == Bind::Concurrent { gpus.len() } else { 1 }),
            initialising: Arc::new(Semaphore::new(if boot.config.parallel_init { gpus.len() } else { 1 })),
            bound_at,
        });
        for (gpu, turn) in gpus.into_iter().zip(turns) {
            tasks.spawn(bring_up(Arc::clone(&shared), gpu, turn));
        }
    }
    let (mut usable, mut broken) = (0_u64, 0_u64);
    while let Some(result) = tasks.join_next().await {
        // A task that panicked is a bug of ours; it counts as a GPU that is not usable, and the others are not touched.
        if result.unwrap_or(false) { usable += 1 } else { broken += 1 }
    }
    // Fails only when the writer is gone, with the runtime.
    let _unused = spec.send(Update::Settled);
    tracing::info!(name: names::SETTLED, usable, failed = broken);
    lock_down(&boot.config);
}

/// Reads the GPUs, and says what is found and what is missing.
fn scan(config: &Config) -> Vec<Gpu> {
    let step = step!(names::PCI_SCAN, gpus = tracing::field::Empty);
    let gpus = match pci::scan(Path::new(SYS)) {
        Ok((gpus, unreadable)) => {
            for error in unreadable {
                tracing::warn!(name: names::PCI_SCAN, error);
            }
            gpus
        }
        Err(error) => {
            step.fail(&error);
            Vec::new()
        }
    };
    step.note("gpus", gpus.len() as u64);
    drop(step);
    for gpu in &gpus {
        tracing::info!(name: names::GPU_FOUND, gpu = %gpu.address, index = gpu.index as u64, device = %format!("{:04x}:{:04x}", pci::NVIDIA, gpu.device));
    }
    if let Some(expected) = config.expected_gpus.filter(|e| *e > gpus.len()) {
        let error = format!("gpuinit.gpus={expected}, but the guest's PCI bus has {}: look at the VM's devices on the host", gpus.len());
        tracing::error!(name: names::PCI_SCAN, error);
    }
    gpus
}

/// A GPU's place in the enable lane.
struct Turn {
    /// The step in which the host mapped its BARs.
    enabled: oneshot::Receiver<Result<StepId, String>>,
    /// Dropped when the GPU is published, or has failed.
    over: oneshot::Sender<()>,
}

/// The enable lane: one GPU at a time, in PCI order. With a plain module load there is none: the driver's probe enables.
///
/// While the host maps a BAR, the CPU that asked is gone with its interrupts off. Other accesses to config space wait, and so does whatever needs all
/// CPUs: loading a module, at times a write. A GPU that is bound in that time is published seconds later. So the lane lets the first GPU, and
/// when pipelined every GPU, get as far as the spec before it goes on: that takes milliseconds of the seconds.
fn start_enable_lane(bind: Bind, sysfs: &PciSysfs, gpus: &[Gpu]) -> Vec<Option<Turn>> {
    if bind == Bind::Insmod {
        return gpus.iter().map(|_| None).collect();
    }
    let (mut lane, mut turns) = (Vec::new(), Vec::new());
    for gpu in gpus {
        let ((sender, enabled), (over, is_over)) = (oneshot::channel(), oneshot::channel());
        lane.push((gpu.address, sender, is_over));
        turns.push(Some(Turn { enabled, over }));
    }
    let sysfs = sysfs.clone();
    tokio::spawn(async move {
        let mut before = After::default();
        for (position, (address, sender, is_over)) in lane.into_iter().enumerate() {
            let (step, sysfs) = (step!(names::GPU_ENABLE, gpu = %address, after = ?before), sysfs.clone());
            let id = step.id();
            before = After(vec![id]);
            let watchdog = tokio::spawn(report_lateness(address, Arc::new(Mutex::new("enable"))));
            let enabled = tokio::task::spawn_blocking(move || step.run(|| sysfs.enable(address)).map(|()| id).map_err(|e| e.to_string()));
            // The GPU's task may be gone only with the whole runtime.
            let _unused = sender.send(enabled.await.unwrap_or_else(|panicked| Err(panicked.to_string())));
            watchdog.abort();
            if position == 0 || bind == Bind::Pipelined {
                // The sender is never used, only dropped: that is the sign.
                let _over = is_over.await;
            }
        }
    });
    turns
}

/// One GPU, from enabled to usable. True when it is usable.
async fn bring_up(shared: Arc<Shared>, gpu: Gpu, turn: Option<Turn>) -> bool {
    match wait_and_bring_up(&shared, &gpu, turn).await {
        Ok(()) => {
            tracing::info!(name: names::GPU_USABLE, gpu = %gpu.address, index = gpu.index as u64);
            true
        }
        Err(failed) => {
            let mut error = format!("GPU {} ({}): {}", gpu.index, gpu.address, failed.error);
            if let Some(words) = &shared.words
                && let Some(line) = words.last(Some(gpu.address)).await
            {
                error = format!("{error}; the driver says: {line}");
            }
            let _unused = shared.spec.send(Update::Failed { index: gpu.index });
            tracing::error!(name: names::GPU_FAILED, gpu = %gpu.address, index = gpu.index as u64, step = failed.step, reason = failed.reason, error);
            false
        }
    }
}

/// Waits for the GPU's turn to be enabled, then brings it up; from there on it can be late.
async fn wait_and_bring_up(shared: &Arc<Shared>, gpu: &Gpu, turn: Option<Turn>) -> Result<(), Failed> {
    let (mut enabled, mut over) = (None, None);
    if let Some(turn) = turn {
        over = Some(turn.over);
        // The lane answers for every GPU before it ends.
        let result = turn.enabled.await.unwrap_or_else(|_| Err("the enable lane has ended".into()));
        enabled = Some(result.map_err(|e| failed("enable", "enable-failed")(&e))?);
    }
    let stage: Stage = Arc::new(Mutex::new("driver load"));
    let watchdog = tokio::spawn(report_lateness(gpu.address, Arc::clone(&stage)));
    let result = bring_up_or_fail(shared, gpu, enabled, over, &stage).await;
    watchdog.abort();
    result
}

async fn bring_up_or_fail(
    shared: &Arc<Shared>,
    gpu: &Gpu,
    enabled: Option<StepId>,
    over: Option<oneshot::Sender<()>>,
    stage: &Stage,
) -> Result<(), Failed> {
    let driver = shared.driver.clone().wait_for(|d| !matches!(d, Driver::Loading)).await.map_or(Driver::Loading, |d| d.clone());
    let loaded = match driver {
        Driver::Loaded(loaded) => loaded,
        Driver::Failed(error) => return Err(failed("module", "driver-not-loaded")(&error)),
        Driver::Loading => return Err(failed("module", "driver-not-loaded")(&"the load's task has ended")),
    };

    set(stage, "probe");
    let mut last = loaded.step;
    if shared.sysfs.is_bound(gpu.address) {
        let bound_at = shared.bound_at.lock().unwrap_or_else(PoisonError::into_inner).get(&gpu.address).copied();
        bound(gpu, bound_at.unwrap_or_else(boottime_ns))?;
    } else if loaded.tried.contains(&gpu.address) {
        return Err(failed("probe", "probe-failed")(&"the driver's probe failed when the module was loaded"));
    } else {
        last = bind(shared, gpu, After::from(&[enabled, Some(loaded.step)][..])).await?;
        bound(gpu, boottime_ns())?;
    }

    set(stage, "device node");
    let information = driver_proc::information(Path::new(PROC), gpu.address).map_err(|e| failed("probe", "no-minor")(&e))?;
    let step = step!(names::GPU_NODES, gpu = %gpu.address, after = ?After(vec![last]));
    let nodes = step.id();
    let node = step.run(|| loaded.nodes.gpu(loaded.major, information.minor)).map_err(|e| failed("nodes", "no-node")(&e))?;

    set(stage, "initialisation");
    if shared.config.ready_when_usable {
        drop(over); // an initialisation takes seconds: nobody waits for it
        let usable = initialise(shared, gpu, &node, nodes).await?;
        publish(shared, gpu, node, usable, None).await;
        Ok(())
    } else {
        // Published at once; whether it also initialises decides whether it stays.
        let (initialised, ()) = tokio::join!(initialise(shared, gpu, &node, nodes), publish(shared, gpu, node.clone(), nodes, over));
        initialised.map(drop)
    }
}

fn set(stage: &Stage, to: &'static str) {
    *stage.lock().unwrap_or_else(PoisonError::into_inner) = to;
}

/// Gives the GPU to the driver, on a thread of its own.
async fn bind(shared: &Arc<Shared>, gpu: &Gpu, after: After) -> Result<StepId, Failed> {
    // The semaphore is never closed, and it is fair: waiting GPUs go in the order in which they were enabled, which is PCI order.
    let _turn = shared.binding.acquire().await;
    let step = step!(names::GPU_BIND, gpu = %gpu.address, after = ?after);
    let (id, address, sysfs) = (step.id(), gpu.address, shared.sysfs.clone());
    let binding = tokio::task::spawn_blocking(move || {
        step.run(|| {
            sysfs.release(address)?;
            match sysfs.bind(address) {
                // Somebody else was faster.
                Err(_) if sysfs.is_bound(address) => Ok(()),
                result => result,
            }
        })
    });
    match binding.await {
        Ok(result) => result.map(|()| id).map_err(|e| failed("probe", "probe-failed")(&e)),
        Err(panicked) => Err(failed("probe", "probe-failed")(&panicked)),
    }
}

/// Tells that the driver has the GPU, with its minor.
fn bound(gpu: &Gpu, at_ns: u64) -> Result<(), Failed> {
    let information = driver_proc::information(Path::new(PROC), gpu.address).map_err(|e| failed("probe", "no-minor")(&e))?;
    tracing::info!(name: names::GPU_BOUND, gpu = %gpu.address, index = gpu.index as u64, minor = information.minor, at_ns);
    Ok(())
}

/// Makes the GPU resolvable as soon as the nodes that every container needs are there.
async fn publish(shared: &Arc<Shared>, gpu: &Gpu, node: Node, after: StepId, turn: Option<oneshot::Sender<()>>) {
    // Fails only when the driver's task has ended, which it does not before it has said this.
    let mut driver = shared.driver.clone();
    drop(driver.wait_for(|d| matches!(d, Driver::Loaded(l) if l.control_ready)).await);
    let _unused = shared.spec.send(Update::Ready { index: gpu.index, nodes: vec![node], after, turn });
}

/// Initialises the adapter; waits for as long as the driver takes.
async fn initialise(shared: &Arc<Shared>, gpu: &Gpu, node: &Node, after: StepId) -> Result<StepId, Failed> {
    let turn = Arc::clone(&shared.initialising).acquire_owned().await;
    let step = step!(names::GPU_INIT, gpu = %gpu.address, after = ?After(vec![after]));
    let (id, node, keeper) = (step.id(), node.clone(), Arc::clone(shared));
    let initialising = tokio::task::spawn_blocking(move || {
        let result = step.run(|| {
            let descriptor = adapter::start(&node)?;
            if let Some(Err(errno)) = keeper.keeper.as_ref().map(|k| k.keep(&descriptor)) {
                tracing::warn!(name: names::GPU_INIT, error = %format!("hand {} to the keeper: {errno}: the worker holds it alone", node.path.display()));
            }
            let result = adapter::wait(&descriptor, &node);
            // Never closed, whatever the result: see `adapter`.
            let _held = descriptor.into_raw_fd();
            result
        });
        drop(turn);
        result
    });
    match initialising.await {
        Ok(Ok(())) => Ok(id),
        Ok(Err(error @ InitError::Open { .. })) => Err(failed("open", "open-failed")(&error)),
        Ok(Err(error)) => Err(failed("init", "init-failed")(&error)),
        Err(panicked) => Err(failed("init", "init-failed")(&panicked)),
    }
}

/// Says where a GPU is when it takes long. Reports only: nothing is ended by it.
async fn report_lateness(gpu: PciAddress, stage: Stage) {
    let started = tokio::time::Instant::now();
    let mut deadline = REPORTS.into_iter();
    let mut last = Duration::ZERO;
    loop {
        last = deadline.next().unwrap_or(last + REPORT_EVERY);
        tokio::time::sleep_until(started + last).await; // a deadline, on nobody's path
        let step = *stage.lock().unwrap_or_else(PoisonError::into_inner);
        tracing::warn!(name: names::GPU_LATE, gpu = %gpu, step, waited_ms = last.as_millis() as u64);
    }
}

/// Records what the kernel says about GPUs.
async fn record_uevents(uevents: Uevents, bound_at: Arc<Mutex<HashMap<PciAddress, u64>>>) {
    loop {
        match uevents.next().await {
            Ok(Next::Event(event)) => {
                if !event.vendor.zip(event.class).is_some_and(|(vendor, class)| pci::is_gpu(vendor, class)) {
                    continue;
                }
                if event.action == Action::Bind {
                    bound_at.lock().unwrap_or_else(PoisonError::into_inner).insert(event.address, boottime_ns());
                }
                let driver = event.driver.unwrap_or_default();
                tracing::debug!(name: names::UEVENT, gpu = %event.address, action = ?event.action, driver);
            }
            Ok(Next::Overrun) => {
                tracing::warn!(name: names::STREAM_LOST, at = "uevents", error = "the kernel sent uevents faster than they were read")
            }
            Err(error) => {
                tracing::warn!(name: names::UEVENT, error = %format!("read uevents: {error}"));
                return;
            }
        }
    }
}

/// Nothing is loaded any more from here on, unless the configuration says otherwise.
fn lock_down(config: &Config) {
    if !config.lockdown {
        return;
    }
    match std::fs::write("/proc/sys/kernel/modules_disabled", "1") {
        Ok(()) => tracing::info!(name: names::LOCKDOWN, modules_disabled = true),
        Err(error) => {
            tracing::warn!(name: names::LOCKDOWN, error = %format!("write 1 to /proc/sys/kernel/modules_disabled: {error}: modules can still be loaded"))
        }
    }
}
