//! The bring-up of all GPUs: those that are there at boot, and those that come and go later.
//!
//! ```text
//! uevents subscribed -> scan -> [enable lane, one thread, PCI order] ----+
//!                            -> [driver: nvidia, control nodes, uvm] --+ |
//!                                                                      v v
//!                                                  a task for each GPU: see `gpu`
//! ```
//!
//! This loop spawns tasks and hears what the kernel says: a GPU that appears gets a task, one that goes leaves the spec, and one that the driver
//! wants to remove is given up. It waits for no GPU.

use super::adopt::Before;
use super::beside;
use super::busy::Activity;
use super::descriptors::Descriptors;
use super::driver::{self, Driver, Image};
use super::gpu::{self, Arrival, Shared};
use super::lane::{self, Enabling, Traffic};
use super::lane_cpu::{LaneCpu, Spare};
use super::publication::{self, Common, Published, Update};
use super::roster::Roster;
use super::strategy::{self, Facts, Strategy};
use super::user_space;
use super::{Boot, SYS};
use crate::bind::DRIVER;
use crate::bind::PciSysfs;
use crate::cdi::spec::{Beside, Entry, Options, Ready};
use crate::clock::boottime_ns;
use crate::config::{Bind, Config, parameter_value};
use crate::driver_log::Signal;
use crate::events::kmsg::DriverWords;
use crate::events::{After, StepId, names};
use crate::pci::{self, Gpu, PciAddress};
use crate::reason::Reason;
use crate::step;
use crate::uevents::{Action, Next, Uevent, Uevents};
use std::collections::{HashMap, HashSet};
use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::{Semaphore, mpsc, watch};
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::Instant;

/// The error of a GPU that has fallen off the bus: nothing more will come from it.
const XID_OFF_THE_BUS: u32 = 79;

/// How long after the driver's load modules can still be loaded, where a GPU does not settle: one that hangs must not leave the guest open.
const LATEST_LOCKDOWN: Duration = Duration::from_secs(60);

/// What the worker hears while it brings GPUs up.
pub struct Ears {
    pub uevents: io::Result<Uevents>,
    pub words: Option<DriverWords>,
    pub signals: Option<mpsc::UnboundedReceiver<Signal>>,
}

/// Brings all GPUs up and follows what becomes of them, after the worker's start. Returns only when the kernel can no longer be heard.
pub async fn run(boot: &Boot, before: Option<&Before>, started: StepId, ears: Ears, descriptors: Descriptors, spare: Option<Spare>) {
    let Ears { uevents, words, signals } = ears;
    let uevents = uevents.map_err(|error| {
        let error = format!("subscribe to uevents: {error}: GPUs that come or go later will not be seen");
        tracing::warn!(name: names::UEVENT, error);
    });
    let (gpus, scanned) = scan(&boot.config, started);
    let mut fleet = Fleet::new(boot, before, (&gpus, scanned), words, descriptors, spare).await;
    fleet.start(&boot.config, gpus, before);
    fleet.follow(&boot.config, uevents.ok(), signals).await;
}

/// Reads the GPUs, and says what is found and what is missing.
fn scan(config: &Config, started: StepId) -> (Vec<Gpu>, StepId) {
    let step = step!(names::PCI_SCAN, after = ?After(vec![started]), gpus = tracing::field::Empty);
    let id = step.id();
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
    if let Some(expected) = config.expected_gpus.filter(|e| *e > gpus.len()) {
        let error = format!("gpuinit.gpus={expected}, but the guest's PCI bus has {}: look at the VM's devices on the host", gpus.len());
        tracing::error!(name: names::PCI_SCAN, error);
    }
    (gpus, id)
}

/// What is known before the first GPU is touched.
fn facts(image: &Image, gpus: &[Gpu]) -> Facts {
    Facts {
        gpus: gpus.len(),
        firewall: gpus.iter().any(|g| pci::waits_for_bar_firewall(g.device)),
        driver: image.version.as_ref().and_then(|v| v.parse().ok()),
        init_on_probe: parameter_value(&image.modules.options(DRIVER), "NVreg_GpuInitOnProbe").is_some_and(|v| v != "0"),
        confidential: super::worker::is_confidential(),
        vcpus: std::thread::available_parallelism().map_or(1, std::num::NonZero::get),
    }
}

/// The choice and its reasons.
fn tell_strategy(strategy: &Strategy, facts: &Facts, first_enable: Option<Duration>) {
    tracing::info!(
        name: names::STRATEGY,
        bind = %strategy.bind,
        init = if strategy.parallel_init { "parallel" } else { "serial" },
        reason = %strategy.reason,
        gpus = facts.gpus as u64,
        driver = facts.driver.map(|v| v.to_string()),
        confidential = facts.confidential,
        vcpus = facts.vcpus as u64,
        first_enable_ms = first_enable.map(|took| took.as_millis() as u64),
    );
}

/// All GPUs of this guest.
struct Fleet {
    shared: Arc<Shared>,
    /// The first GPU's enabling, where the strategy depended on it.
    first: Option<Enabling>,
    /// Until the lane has it.
    lane_cpu: Option<Arc<LaneCpu>>,
    /// Gone when the driver's load has been started, with the first GPU.
    image: Option<Image>,
    /// The steps that the load had to wait for.
    chosen: After,
    driver: watch::Sender<Driver>,
    tasks: JoinSet<(PciAddress, bool)>,
    handles: HashMap<PciAddress, AbortHandle>,
    usable: HashSet<PciAddress>,
    failed: HashSet<PciAddress>,
    settled: bool,
    locked_down: bool,
}

impl Fleet {
    async fn new(
        boot: &Boot,
        before: Option<&Before>,
        (gpus, scanned): (&[Gpu], StepId),
        words: Option<DriverWords>,
        descriptors: Descriptors,
        mut spare: Option<Spare>,
    ) -> Self {
        let looking = step!(names::DRIVER_LOOK, after = ?After(vec![scanned]));
        let mut chosen = vec![looking.id()];
        let roster = Arc::new(Roster::default());
        // All there were before, in the same order, or the removed ones would have been told.
        roster.take_over(gpus, |gpu| before.is_some_and(|b| b.gpu(gpu).found));
        let (driver, state) = watch::channel(Driver::Loading);
        let image = Image::of(boot);
        let sysfs = PciSysfs::at(Path::new(SYS));
        let published = before.map_or_else(Published::default, |before| published(before, &sysfs, gpus, &image));
        let spec = publication::start(Arc::clone(&roster), published, options(&boot.config), boot.config.cdi_complete);
        let facts = facts(&image, gpus);
        drop(looking);
        let (mut first, mut lane_cpu) = (None, None);
        if before.is_none() && strategy::depends_on_enable(&boot.config, &facts) {
            lane_cpu = spare.take().map(Spare::reserve);
            first = gpus.first().map(|gpu| Enabling::start(&sysfs, gpu.address, &After(chosen.clone()), lane_cpu.clone()));
        }
        let measured = match &mut first {
            Some(enabling) => Some(enabling.measure().await),
            None => None,
        };
        let slow = measured.is_some_and(|(_, slow)| slow);
        let strategy = strategy::choose(&boot.config, &facts, slow);
        tell_strategy(&strategy, &facts, measured.map(|(took, _)| took));
        // A slow one goes on beside the load.
        chosen.extend(first.as_ref().filter(|_| !slow).map(Enabling::step));
        lane_cpu = match strategy.bind {
            Bind::Pipelined => lane_cpu.or_else(|| spare.map(Spare::reserve)),
            // Worth a vCPU only where enabling takes long.
            Bind::Concurrent => lane_cpu.filter(|_| slow),
            // The others' enables are in the module load.
            Bind::Insmod | Bind::Auto => None,
        };
        let at_once = |yes: bool| if yes { Semaphore::MAX_PERMITS } else { 1 };
        let shared = Arc::new(Shared {
            sysfs,
            config: boot.config.clone(),
            bind: strategy.bind,
            beside_the_load: strategy.bind == Bind::Concurrent && !slow,
            roster,
            words,
            descriptors,
            spec,
            driver: state,
            binding: Semaphore::new(at_once(strategy.bind == Bind::Concurrent)),
            initialising: Arc::new(Semaphore::new(at_once(strategy.parallel_init))),
            batches: Arc::default(),
            initialised: Mutex::default(),
            bound_at: Default::default(),
            bound: Default::default(),
            minors: Mutex::new(minors(before, gpus)),
            probing: Activity::default(),
            lane_held: Arc::default(),
            enabling: Arc::default(),
            lane_cpu: lane_cpu.as_ref().map(Arc::downgrade).unwrap_or_default(),
        });
        Self {
            shared,
            first,
            lane_cpu,
            driver,
            image: Some(image),
            chosen: After(chosen),
            tasks: JoinSet::new(),
            handles: HashMap::new(),
            usable: HashSet::new(),
            failed: HashSet::new(),
            settled: false,
            locked_down: false,
        }
    }

    /// Starts with what the scan found.
    fn start(&mut self, config: &Config, gpus: Vec<Gpu>, before: Option<&Before>) {
        let known = |gpu: &Gpu| before.map(|b| b.gpu(gpu.address)).unwrap_or_default();
        let mut to_do = Vec::new();
        for gpu in gpus {
            // What an earlier worker has settled stays settled.
            match known(&gpu) {
                k if k.failed => {
                    self.failed.insert(gpu.address);
                }
                k if k.usable && k.published && self.shared.descriptors.of(gpu.address).is_some() => {
                    self.usable.insert(gpu.address);
                }
                _ => to_do.push(gpu),
            }
        }
        let unbound: Vec<Gpu> = to_do.iter().filter(|g| !self.shared.sysfs.is_bound(g.address)).cloned().collect();
        // The load is given the first one, and holds its lock while its probe sleeps: an enable beside that would wait, and all after it.
        let in_lane = if self.shared.beside_the_load {
            self.first = None;
            unbound.get(1..).unwrap_or_default()
        } else {
            &unbound
        };
        let traffic = Traffic {
            held: Arc::clone(&self.shared.lane_held),
            enabling: Arc::clone(&self.shared.enabling),
            batches: Arc::clone(&self.shared.batches),
        };
        let lane = lane::start(self.shared.bind, &self.shared.sysfs, in_lane, self.first.take(), self.lane_cpu.take(), traffic);
        let mut turns: HashMap<PciAddress, _> = in_lane.iter().map(|g| g.address).zip(lane).collect();
        if self.shared.roster.len() > 0 {
            self.load_driver(&to_do);
        }
        for gpu in to_do {
            let turn = turns.remove(&gpu.address).flatten();
            self.spawn(gpu, if before.is_some() { Arrival::Again(turn) } else { Arrival::Boot(turn) });
        }
        self.settle(config);
    }

    /// Starts the driver's load, once.
    fn load_driver(&mut self, gpus: &[Gpu]) {
        if let Some(image) = self.image.take() {
            driver::start(image, std::mem::take(&mut self.chosen), self.driver.clone(), &self.shared, gpus);
        }
    }

    fn spawn(&mut self, gpu: Gpu, arrival: Arrival) {
        let (address, shared) = (gpu.address, Arc::clone(&self.shared));
        self.settled = false;
        let handle = self.tasks.spawn(async move { (address, gpu::bring_up(shared, gpu, arrival).await) });
        self.handles.insert(address, handle);
    }

    /// Hears and acts until the kernel can no longer be heard.
    async fn follow(&mut self, config: &Config, uevents: Option<Uevents>, mut signals: Option<mpsc::UnboundedReceiver<Signal>>) {
        let mut driver = self.driver.subscribe();
        let lock_down_time =
            |driver: &mut watch::Receiver<Driver>| driver.borrow_and_update().is_over().then(|| Instant::now() + LATEST_LOCKDOWN);
        let mut lock_down_at = lock_down_time(&mut driver);
        loop {
            tokio::select! {
                // It can end after the last GPU has failed. Never an error: the sender is here.
                Ok(()) = driver.changed() => {
                    lock_down_at = lock_down_at.or(lock_down_time(&mut driver));
                    self.settle(config);
                }
                next = hear(uevents.as_ref()) => match next {
                    Ok(Next::Event(event)) => self.take(event),
                    // Of one that is not usable yet, all is looked for when it is.
                    Ok(Next::Display(gpu)) if self.usable.contains(&gpu) => drop(beside::start(&self.shared, gpu)),
                    Ok(Next::Display(_)) => {}
                    Ok(Next::Overrun) => {
                        tracing::warn!(name: names::STREAM_LOST, at = "uevents", error = "the kernel sent uevents faster than they were read: scanning again");
                        self.rescan();
                    }
                    Err(error) => {
                        tracing::warn!(name: names::UEVENT, error = %format!("read uevents: {error}: GPUs that come or go from now on are not seen"));
                        return self.finish(config).await;
                    }
                },
                Some(signal) = listen(signals.as_mut()) => self.heed(signal).await,
                () = until(lock_down_at), if !self.locked_down => self.lock_down(config),
                Some(ended) = self.tasks.join_next() => {
                    // A task that was aborted is that of a GPU that is gone. One that panicked is a bug of ours; its GPU counts as not usable.
                    if let Ok((gpu, usable)) = ended {
                        self.ended(gpu, usable);
                    }
                    self.settle(config);
                }
            }
        }
    }

    /// What is left when nothing can be heard any more: the tasks that run.
    async fn finish(&mut self, config: &Config) {
        while let Some(ended) = self.tasks.join_next().await {
            if let Ok((gpu, usable)) = ended {
                self.ended(gpu, usable);
            }
        }
        if self.image.is_none() {
            // Never an error: the sender is here.
            drop(self.driver.subscribe().wait_for(Driver::is_over).await);
        }
        self.settle(config);
    }

    fn ended(&mut self, gpu: PciAddress, usable: bool) {
        self.handles.remove(&gpu);
        if !self.shared.roster.contains(gpu) {
            return;
        }
        if usable {
            self.usable.insert(gpu);
        } else {
            self.failed.insert(gpu);
        }
    }

    /// Says so when every GPU is usable or failed; the first time, nothing is loaded any more from then on.
    fn settle(&mut self, config: &Config) {
        // Modules are loaded until the driver's load is over, whatever has become of the GPUs.
        if self.settled || !self.tasks.is_empty() || self.image.is_none() && !self.driver.borrow().is_over() {
            return;
        }
        self.settled = true;
        let _unused = self.shared.spec.send(Update::Settled);
        // Every GPU of the roster is in one of the two sets, unless its task has panicked.
        let failed = self.shared.roster.len() - self.usable.len();
        tracing::info!(name: names::SETTLED, usable = self.usable.len() as u64, failed = failed as u64);
        // Once more: two looks with some time between them tell how the clocks drift.
        super::worker::ask_host_clock();
        // Without a GPU there is no driver yet: one that is plugged in later needs it.
        if self.image.is_none() {
            self.lock_down(config);
        }
    }

    fn lock_down(&mut self, config: &Config) {
        if !std::mem::replace(&mut self.locked_down, true) {
            lock_down(config);
        }
    }

    fn take(&mut self, event: Uevent) {
        if !event.vendor.zip(event.class).is_some_and(|(vendor, class)| pci::is_gpu(vendor, class)) {
            return;
        }
        let gpu = event.address;
        let driver = event.driver.unwrap_or_default();
        tracing::debug!(name: names::UEVENT, gpu = %gpu, action = ?event.action, driver);
        match event.action {
            Action::Bind => {
                self.shared.bound_at.lock().unwrap_or_else(PoisonError::into_inner).insert(gpu, boottime_ns());
                self.shared.bound.notify_waiters();
            }
            Action::Add => self.arrived(pci::read(Path::new(SYS), gpu).into_iter().collect()),
            Action::Remove => self.left(gpu),
            Action::Unbind | Action::Other => {}
        }
    }

    /// After uevents were lost: what is there now counts.
    fn rescan(&mut self) {
        let present = match pci::scan(Path::new(SYS)) {
            Ok((gpus, _)) => gpus,
            Err(error) => {
                tracing::error!(name: names::PCI_SCAN, error = %error);
                return;
            }
        };
        for gpu in self.shared.roster.all() {
            if !present.iter().any(|g| g.address == gpu) {
                self.left(gpu);
            }
        }
        self.arrived(present);
        // A display may have come or gone with the lost ones.
        self.usable.iter().for_each(|gpu| drop(beside::start(&self.shared, *gpu)));
    }

    /// GPUs that are there now; those that were there before are left alone.
    fn arrived(&mut self, gpus: Vec<Gpu>) {
        let new: Vec<Gpu> = gpus.into_iter().filter(|g| !self.shared.roster.contains(g.address)).collect();
        if new.is_empty() {
            return;
        }
        self.shared.roster.add(&new);
        let _unused = self.shared.spec.send(Update::Roster);
        self.load_driver(&new);
        // No lane for those that come later: the kernel probes them by itself, and the bind finds that done.
        new.into_iter().for_each(|gpu| self.spawn(gpu, Arrival::Later));
    }

    /// A GPU that is gone, or about to go: out of the spec, and out of our hands.
    fn left(&mut self, gpu: PciAddress) {
        self.shared.descriptors.release(gpu);
        self.shared.bound_at.lock().unwrap_or_else(PoisonError::into_inner).remove(&gpu);
        self.shared.minors.lock().unwrap_or_else(PoisonError::into_inner).remove(&gpu);
        if !self.shared.roster.contains(gpu) {
            return;
        }
        let index = self.shared.roster.index(gpu) as u64;
        tracing::info!(name: names::GPU_REMOVED, gpu = %gpu, index);
        self.shared.roster.remove(gpu);
        let _unused = self.shared.spec.send(Update::Roster);
        self.usable.remove(&gpu);
        self.failed.remove(&gpu);
        // What blocks in the kernel for this GPU returns on its own; nobody waits for it any more.
        if let Some(task) = self.handles.remove(&gpu) {
            task.abort();
        }
    }

    async fn heed(&mut self, signal: Signal) {
        match signal {
            // Only where sysfs says the same: the driver's link goes before its removal is called.
            Signal::RemovalWaits(gpu) if !self.shared.sysfs.is_bound(gpu) => self.left(gpu),
            Signal::RemovalWaits(_) => {}
            Signal::Xid(gpu, number) => {
                tracing::error!(name: names::GPU_XID, gpu = %gpu, xid = u64::from(number), error = %format!("the driver reports Xid {number} of GPU {gpu}"));
                if number == XID_OFF_THE_BUS && self.usable.remove(&gpu) {
                    self.failed.insert(gpu);
                    let failure = gpu::failed_later("Xid 79: it was usable, and has fallen off the bus".into(), Reason::OffTheBus);
                    self.shared.give_up(gpu, 0, failure).await;
                }
            }
        }
    }
}

async fn hear(uevents: Option<&Uevents>) -> io::Result<Next> {
    match uevents {
        Some(uevents) => uevents.next().await,
        None => std::future::pending().await,
    }
}

async fn listen(signals: Option<&mut mpsc::UnboundedReceiver<Signal>>) -> Option<Signal> {
    match signals {
        Some(signals) => signals.recv().await,
        None => std::future::pending().await,
    }
}

async fn until(at: Option<Instant>) {
    match at {
        Some(at) => tokio::time::sleep_until(at).await,
        None => std::future::pending().await,
    }
}

/// How the spec is to look.
fn options(config: &Config) -> Options {
    // This program, where the agent finds it: the worker is a fork of PID 1, which was started from there.
    let exe = std::fs::read_link("/proc/self/exe").map(|path| path.display().to_string());
    let hook_path = exe.unwrap_or_else(|_| Options::default().hook_path);
    Options { namings: config.cdi_names.clone(), hooks: config.cdi_hooks, hook_path }
}

/// What an earlier worker knew of the GPUs' minors.
fn minors(before: Option<&Before>, gpus: &[Gpu]) -> HashMap<PciAddress, u32> {
    gpus.iter().filter_map(|gpu| Some((gpu.address, before?.gpu(gpu.address).minor?))).collect()
}

/// What an earlier worker had published of these GPUs, as far as it is still true.
fn published(before: &Before, sysfs: &PciSysfs, gpus: &[Gpu], image: &Image) -> Published {
    let nodes = driver::nodes_now();
    let mut published = Published::default();
    if let Some(nodes) = &nodes {
        published.common = Common { nodes: nodes.common_now(), files: user_space::look(image.version.as_deref()) };
    }
    for gpu in gpus {
        let known = before.gpu(gpu.address);
        if known.failed {
            published.entries.insert(gpu.address, Entry::Failed);
        } else if known.published
            && sysfs.is_bound(gpu.address)
            && let Some((minor, node)) = nodes.as_ref().and_then(|n| Some((known.minor?, n.gpu_now(known.minor?)?)))
        {
            let beside = if known.usable { beside::look(gpu.address, minor) } else { Beside::default() };
            let ready = Ready { nodes: vec![node], uuid: known.uuid, beside };
            published.entries.insert(gpu.address, Entry::Ready(ready));
        }
    }
    published
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
