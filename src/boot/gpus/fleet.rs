//! All GPUs, of the boot scan and hot-plugged. Carries out the [`schedule`](super::schedule)'s
//! orders for all of them, and reports the kernel's events to it. Waits for no GPU.

use super::dispatch::{self, Dispatch, Orders};
use super::driver::{self, Image, Way};
use super::extras;
use super::failed::failed_later;
use super::gpu;
use super::lane::Lane;
use super::lane_cpu::Spare;
use super::libraries;
use super::messages::{Arrival, Fact, GpuId, Order};
use super::previous::Previous;
use super::publication::{self, Common, Published, Update};
use super::roster::Roster;
use super::schedule::Schedule;
use super::shared::{Driver, Seen, Shared};
use super::strategy::{Facts, Policy, Strategy};
use crate::agent_watch::{self, Change};
use crate::bind::{DRIVER, PciSysfs};
use crate::boot::wire::descriptors::Descriptors;
use crate::cdi::spec::{Entry, Extras, Options, Ready};
use crate::config::{Cdi, Config, parameter_value};
use crate::driver_log::Signal;
use crate::events::kmsg::DriverWords;
use crate::events::sinks::console::Gate;
use crate::events::{After, StepId, names};
use crate::pci::{self, Gpu, PciAddress, SYS};
use crate::reason::Reason;
use crate::uevents::{Action, Next, Uevent, Uevents};
use crate::{confidential, ptp_kvm, step, threads};
use std::collections::HashMap;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tokio::runtime::Handle;
use tokio::sync::{mpsc, watch};
use tokio::task::{AbortHandle, JoinSet};

/// Events that arrive during the bring-up.
pub struct Sources {
    pub uevents: io::Result<Uevents>,
    pub words: Option<DriverWords>,
    pub signals: Option<mpsc::UnboundedReceiver<Signal>>,
    /// Traces of the agent.
    pub agent: mpsc::UnboundedReceiver<agent_watch::Seen>,
}

/// Machine resources reserved for the bring-up.
pub struct Machine {
    /// vCPU and process for the lane, where there are two vCPUs or more.
    pub spare: Option<Spare>,
    /// Gate of the console sink.
    pub gate: Gate,
}

/// Brings all GPUs up and follows their changes, after the worker's start. Never returns.
pub async fn run(
    config: &Config,
    command_line: &[u8],
    previous: Option<&Previous>,
    started: StepId,
    sources: Sources,
    descriptors: Descriptors,
    machine: Machine,
) {
    let Sources { uevents, words, signals, agent } = sources;
    let uevents = uevents.map_err(|error| {
        let error = format!("subscribe to uevents: {error}: GPUs that come or go later will not be seen");
        tracing::warn!(name: names::UEVENT, error);
    });
    // Scan after the subscription to uevents: a GPU that appears meanwhile is seen twice, not
    // never.
    let (gpus, scanned) = scan(config, started);
    let found = (&gpus[..], scanned);
    let mut fleet = Fleet::start(config, command_line, previous, found, words, descriptors, machine);
    fleet.follow(uevents.ok(), signals, agent).await;
}

/// Scans for GPUs, and reports their number and missing ones.
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
        let found = gpus.len();
        let error = format!(
            "gpuinit.gpus={expected}, but the guest's PCI bus has {found}: \
             look at the VM's devices on the host"
        );
        tracing::error!(name: names::PCI_SCAN, error);
    }
    (gpus, id)
}

/// Xid of a GPU that has fallen off the bus and is lost until a reset.
const XID_OFF_THE_BUS: u32 = 79;

pub struct Fleet {
    shared: Arc<Shared>,
    orders: Orders,
    /// None once the driver's load has been started.
    image: Option<Image>,
    /// Step that precedes the load.
    looked: StepId,
    driver: watch::Sender<Driver>,
    tasks: JoinSet<()>,
    handles: HashMap<GpuId, AbortHandle>,
    facts: Facts,
}

impl Fleet {
    /// Starts with the GPUs of the scan, after the scan's step.
    pub fn start(
        config: &Config,
        command_line: &[u8],
        previous: Option<&Previous>,
        (gpus, scanned): (&[Gpu], StepId),
        words: Option<DriverWords>,
        descriptors: Descriptors,
        machine: Machine,
    ) -> Self {
        let looking = step!(names::DRIVER_LOOK, after = ?After(vec![scanned]));
        let looked = looking.id();
        let roster = Arc::new(Roster::default());
        // Names equal those of the earlier worker: a removal would have been reported.
        let ids = roster.add_known(gpus, |gpu| previous.is_some_and(|p| p.gpu(gpu).found));
        let (driver, state) = watch::channel(Driver::Loading);
        let (image, sysfs) = (Image::of(config, command_line), PciSysfs::at(Path::new(SYS)));
        let facts = facts(&image, gpus);
        let (bind, init, relaxed) = (config.bind, config.init, config.relaxed);
        let policy = Policy { bind, init, relaxed, facts: facts.clone() };
        let (dispatch, orders) = Dispatch::start(Schedule::new(policy, dispatch::now()));
        let published = previous.map(|p| published(p, &sysfs, &ids, &image)).unwrap_or_default();
        let resolvable = {
            let dispatch = Arc::clone(&dispatch);
            move |gpu| dispatch.report(Fact::Published(gpu))
        };
        let withheld = config.cdi == Cdi::Complete;
        let spec = publication::start(Arc::clone(&roster), published, options(config), withheld, resolvable);
        drop(looking);
        let known = |gpu: &GpuId| previous.map(|p| p.gpu(gpu.address)).unwrap_or_default();
        let minors = ids.iter().filter_map(|gpu| Some((gpu.address, known(gpu).minor?))).collect();
        let shared = Arc::new(Shared {
            config: config.clone(),
            lane: Arc::new(Lane::new(sysfs.clone(), machine.spare, machine.gate, After(vec![looked]))),
            sysfs,
            dispatch,
            roster,
            driver: state,
            descriptors,
            runtime: Handle::current(),
            spec,
            words,
            seen: Seen::with_minors(minors),
        });
        let (image, tasks, handles) = (Some(image), JoinSet::new(), HashMap::new());
        let mut fleet = Self { shared, orders, image, looked, driver, tasks, handles, facts };
        let mut arrivals = Vec::new();
        for gpu in ids {
            // GPUs that an earlier worker has settled stay settled.
            let known = known(&gpu);
            if known.failed {
                fleet.shared.dispatch.report(Fact::Found(gpu, Arrival::Failed));
            } else if known.usable && known.published && fleet.shared.descriptors.of(gpu.address).is_some() {
                fleet.shared.dispatch.report(Fact::Found(gpu, Arrival::Usable));
            } else if fleet.shared.sysfs.is_bound(gpu.address) {
                arrivals.push((gpu, Arrival::Enabled));
            } else {
                arrivals.push((gpu, if previous.is_some() { Arrival::Again } else { Arrival::Boot }));
            }
        }
        fleet.bring_up(arrivals);
        fleet.shared.dispatch.report(Fact::Scanned);
        fleet
    }

    /// Starts the tasks of GPUs, and reports them as found.
    fn bring_up(&mut self, arrivals: Vec<(GpuId, Arrival)>) {
        for (gpu, arrival) in arrivals {
            let (shared, orders) = (Arc::clone(&self.shared), self.shared.dispatch.orders_of(gpu));
            self.handles.insert(gpu, self.tasks.spawn(gpu::bring_up(shared, gpu, arrival, orders)));
            self.shared.dispatch.report(Fact::Found(gpu, arrival));
        }
    }

    /// Carries out orders and takes events of the kernel and the agent, for as long as the guest
    /// lives.
    pub async fn follow(
        &mut self,
        mut uevents: Option<Uevents>,
        mut signals: Option<mpsc::UnboundedReceiver<Signal>>,
        mut agent: mpsc::UnboundedReceiver<agent_watch::Seen>,
    ) {
        loop {
            tokio::select! {
                Some(order) = self.orders.recv() => self.carry_out(order),
                next = hear(uevents.as_ref()) => match next {
                    Ok(Next::Event(event)) => self.take(event),
                    Ok(Next::Display(gpu)) => self.read_extras(gpu),
                    Ok(Next::Overrun) => {
                        let error = "the kernel sent uevents faster than they were read: scanning again";
                        tracing::warn!(name: names::STREAM_LOST, at = "uevents", error);
                        self.rescan();
                    }
                    Err(error) => {
                        let error =
                            format!("read uevents: {error}: GPUs that come or go from now on are not seen");
                        tracing::warn!(name: names::UEVENT, error);
                        uevents = None;
                    }
                },
                Some(seen) = agent.recv() => self.see(&seen),
                Some(signal) = listen(signals.as_mut()) => self.heed(signal).await,
                // An aborted task belonged to a GPU that is gone; the runtime has reported a
                // panicked one as a bug.
                Some(_ended) = self.tasks.join_next() => {}
            }
        }
    }

    fn carry_out(&mut self, order: Order) {
        match order {
            Order::Chosen(strategy, enabled) => report_strategy(&strategy, &self.facts, enabled),
            Order::Load { gpus, one_by_one, enables } => {
                if let Some(image) = self.image.take() {
                    let after = After::from(&[Some(self.looked), self.shared.lane.last_enabling()][..]);
                    let way = Way { one_by_one, enables };
                    driver::start(image, after, self.driver.clone(), &self.shared, &gpus, way);
                }
            }
            Order::Wait(gpu) => self.shared.lane.wait(gpu.address),
            Order::LaneOver => self.shared.lane.over(),
            Order::Late(gpu, step, waited) => self.report_late(gpu, step, waited),
            Order::Settled { usable, failed } => {
                let _unused = self.shared.spec.send(Update::Settled);
                tracing::info!(name: names::SETTLED, usable = usable as u64, failed = failed as u64);
                // Second reading of the host's clock: two readings show the drift.
                ptp_kvm::report();
            }
            Order::LockDown => lock_down(&self.shared.config),
            Order::Enable(..) | Order::Probe(..) | Order::Initialise(_) => {}
        }
    }

    /// Reports a trace of the agent that can make the lane wait or go on.
    fn see(&self, seen: &agent_watch::Seen) {
        let fact = match seen {
            agent_watch::Seen::Look(_) => Fact::AgentLooked,
            agent_watch::Seen::Container { change: Change::Made, .. } => Fact::ContainerBegins,
            agent_watch::Seen::ProgramBegan => Fact::ContainerRuns,
            agent_watch::Seen::Container { .. }
            | agent_watch::Seen::InitBegan
            | agent_watch::Seen::HookBegan
            | agent_watch::Seen::HookEnded => return,
        };
        self.shared.dispatch.report(fact);
    }

    /// Reports a GPU that takes long, on a thread of its own: stacks are files of other processes.
    fn report_late(&self, gpu: GpuId, step: &'static str, waited: Duration) {
        let progress = self.shared.seen.progress(gpu.address);
        threads::detach(move || {
            let stack = progress.stack();
            let waited_ms = waited.as_millis() as u64;
            tracing::warn!(name: names::GPU_LATE, gpu = %gpu.address, step, waited_ms, stack);
        });
    }

    /// Reads a GPU's extras again after a display came or went. For a GPU that is not usable yet,
    /// they are read once it is.
    fn read_extras(&self, gpu: PciAddress) {
        if let Some(gpu) = self.shared.roster.at(gpu).filter(|gpu| self.shared.dispatch.is_usable(*gpu)) {
            drop(extras::start(&self.shared, gpu));
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
            Action::Bind => self.shared.seen.bound(gpu),
            Action::Add => self.arrived(pci::read(Path::new(SYS), gpu).into_iter().collect()),
            Action::Remove => self.left(gpu),
            Action::Unbind | Action::Other => {}
        }
    }

    /// Scans again after uevents were lost.
    fn rescan(&mut self) {
        let present = match pci::scan(Path::new(SYS)) {
            Ok((gpus, _)) => gpus,
            Err(error) => {
                tracing::error!(name: names::PCI_SCAN, error = %error);
                return;
            }
        };
        for gpu in self.shared.roster.all() {
            if !present.iter().any(|g| g.address == gpu.address) {
                self.left(gpu.address);
            }
        }
        self.arrived(present);
        // A lost uevent may have been that of a display.
        for gpu in self.shared.roster.all() {
            self.read_extras(gpu.address);
        }
    }

    /// Brings up the GPUs that are not in the roster yet.
    fn arrived(&mut self, gpus: Vec<Gpu>) {
        let new = self.shared.roster.add(&gpus);
        if new.is_empty() {
            return;
        }
        let _unused = self.shared.spec.send(Update::Roster);
        // Hot-plugged GPUs skip the lane: the kernel enables and probes them by itself, before the
        // bind here.
        self.bring_up(new.into_iter().map(|gpu| (gpu, Arrival::Enabled)).collect());
    }

    /// Releases a GPU that is gone or about to go, and removes it from the spec.
    fn left(&mut self, gpu: PciAddress) {
        self.shared.descriptors.release(gpu);
        self.shared.seen.gone(gpu);
        let Some(id) = self.shared.roster.at(gpu) else { return };
        let index = self.shared.roster.index(gpu) as u64;
        tracing::info!(name: names::GPU_REMOVED, gpu = %gpu, index);
        self.shared.roster.remove(gpu);
        let _unused = self.shared.spec.send(Update::Roster);
        // Threads that block in the kernel for this GPU return on their own; no task waits for
        // them.
        if let Some(task) = self.handles.remove(&id) {
            task.abort();
        }
        self.shared.dispatch.report(Fact::Gone(id));
    }

    async fn heed(&mut self, signal: Signal) {
        match signal {
            // The line counts only where sysfs agrees: the kernel removes the driver's link before
            // it calls the driver's removal.
            Signal::RemovalWaits(gpu) if !self.shared.sysfs.is_bound(gpu) => self.left(gpu),
            Signal::RemovalWaits(_) => {}
            Signal::Xid(gpu, number) => {
                let error = format!("the driver reports Xid {number} of GPU {gpu}");
                tracing::error!(name: names::GPU_XID, gpu = %gpu, xid = u64::from(number), error);
                let usable = self.shared.roster.at(gpu).filter(|id| self.shared.dispatch.is_usable(*id));
                if let (XID_OFF_THE_BUS, Some(id)) = (number, usable) {
                    let error = "Xid 79: it was usable, and has fallen off the bus".into();
                    let failure = failed_later(error, Reason::OffTheBus);
                    self.shared.give_up(id, 0, failure).await;
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

/// Collects the facts known before the first GPU is enabled.
fn facts(image: &Image, gpus: &[Gpu]) -> Facts {
    let init_on_probe = parameter_value(&image.modules.options(DRIVER), "NVreg_GpuInitOnProbe");
    Facts {
        gpus: gpus.len(),
        firewall: gpus.iter().any(|g| pci::waits_for_bar_firewall(g.device)),
        driver: image.version.as_ref().and_then(|v| v.parse().ok()),
        init_on_probe: init_on_probe.is_some_and(|v| v != "0"),
        confidential: confidential::is_confidential(),
        vcpus: std::thread::available_parallelism().map_or(1, std::num::NonZero::get),
    }
}

/// Reports the chosen strategy and its reasons.
fn report_strategy(strategy: &Strategy, facts: &Facts, first_enable: Option<Duration>) {
    tracing::info!(
        name: names::STRATEGY,
        bind = %strategy.bind,
        init = %strategy.init,
        reason = %strategy.reason,
        gpus = facts.gpus as u64,
        driver = facts.driver.map(|v| v.to_string()),
        confidential = facts.confidential,
        vcpus = facts.vcpus as u64,
        first_enable_ms = first_enable.map(|took| took.as_millis() as u64),
    );
}

/// Options of the spec.
fn options(config: &Config) -> Options {
    // Hook path: this program as PID 1 was started, where the agent finds it. The worker is a fork
    // of PID 1.
    let exe = std::fs::read_link("/proc/self/exe").map(|path| path.display().to_string());
    let hook_path = exe.unwrap_or_else(|_| Options::default().hook_path);
    Options { namings: config.cdi_names.clone(), hooks: config.cdi_hooks, hook_path }
}

/// Entries of these GPUs published by an earlier worker, as far as still valid.
fn published(previous: &Previous, sysfs: &PciSysfs, gpus: &[GpuId], image: &Image) -> Published {
    let nodes = driver::nodes_now();
    let mut published = Published::default();
    if let Some(nodes) = &nodes {
        let files = libraries::find(image.version.as_deref());
        published.common = Common { nodes: nodes.common_now(), files };
    }
    for gpu in gpus {
        let known = previous.gpu(gpu.address);
        let ready = || known.minor.and_then(|minor| Some((minor, nodes.as_ref()?.gpu_now(minor)?)));
        if known.failed {
            published.entries.insert(*gpu, Entry::Failed);
        } else if known.published
            && sysfs.is_bound(gpu.address)
            && let Some((minor, node)) = ready()
        {
            let extras = if known.usable { extras::read(gpu.address, minor) } else { Extras::default() };
            let ready = Ready { nodes: vec![node], uuid: known.uuid, extras };
            published.entries.insert(*gpu, Entry::Ready(ready));
        }
    }
    published
}

/// Disables module loading, where configured.
fn lock_down(config: &Config) {
    if !config.lockdown {
        return;
    }
    match std::fs::write("/proc/sys/kernel/modules_disabled", "1") {
        Ok(()) => tracing::info!(name: names::LOCKDOWN, modules_disabled = true),
        Err(error) => {
            let error = format!(
                "write 1 to /proc/sys/kernel/modules_disabled: {error}: \
                 modules can still be loaded"
            );
            tracing::warn!(name: names::LOCKDOWN, error);
        }
    }
}
