//! All GPUs, of the boot scan and hot-plugged. Carries out the [`schedule`](super::schedule)'s
//! orders for all of them, and reports the kernel's events to it. Waits for no GPU.

use super::dispatch::{self, Dispatch, Orders};
use super::driver::{self, Image, Way};
use super::extras;
use super::find_driver_files;
use super::gpu;
use super::lane::Lane;
use super::lane_cpu::Spare;
use super::lockdown;
use super::off_the_bus;
use super::previous::Previous;
use super::publication::{self, Update};
use super::readahead;
use super::readiness;
use super::reset;
use super::roster::Roster;
use super::scan::{self, Found};
use super::schedule::Schedule;
use super::schedule_messages::{Arrival, Fact, GpuId, Order};
use super::shared::{Driver, Occasions, Seen, Shared};
use super::slots;
use super::stock::{look, observe, published, release_stale, report_left, take_stock};
use super::strategy::{Facts, Policy, Strategy};
use crate::boot::agent_watch;
use crate::boot::agent_watch::Change;
use crate::boot::ipc::descriptors::Descriptors;
use crate::cdi::publish::is_found;
use crate::cdi::spec::{Entry, Options};
use crate::config::{Cdi, Config, parameter_value};
use crate::gpu::bind::{Bound, DRIVER, PciSysfs};
use crate::gpu::pci;
use crate::gpu::pci::{Gpu, SYS};
use crate::gpu::topology::Functions;
use crate::machine::uevents::{Action, Next, Uevent, Uevents, hear};
use crate::machine::{confidential, ptp_kvm, threads};
use crate::nvml::Helpers;
use crate::services::{Fabric, Milestones};
use crate::step;
use crate::stream::kmsg::{DriverLog, Signals};
use crate::stream::sinks::console::Gate;
use crate::stream::{After, StepId};
use kata_gpu_wire::driver_log::Signal;
use kata_gpu_wire::names;
use kata_gpu_wire::pci_address::PciAddress;
use std::collections::{BTreeSet, HashMap};
use std::fmt::Display;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tokio::runtime::Handle;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{Instant, MissedTickBehavior};

/// Events that arrive during the bring-up.
pub struct Sources {
    pub uevents: io::Result<Uevents>,
    pub signals: Option<Signals>,
    /// Traces of the agent.
    pub agent: mpsc::UnboundedReceiver<agent_watch::Seen>,
}

/// Machine resources reserved for the bring-up.
pub struct Machine {
    /// vCPU and process for the lane, where there are two vCPUs or more.
    pub spare: Option<Spare>,
    /// Gate of the console sink.
    pub gate: Gate,
    pub driver_log: Option<DriverLog>,
    pub descriptors: Descriptors,
    /// Received when the driver's files are mounted, with the step that they come after. None: they
    /// are ready. The sender is dropped in a guest that is about to end.
    pub image: Option<oneshot::Receiver<Option<StepId>>>,
    /// Set when all GPUs are settled.
    pub settled: watch::Sender<bool>,
    /// Progress of the bring-up, for the services.
    pub milestones: watch::Sender<Milestones>,
    /// State of the fabric, for the services.
    pub fabric: watch::Sender<Fabric>,
    /// Whether the services' modules are loaded: the lockdown waits for that.
    pub modules_loaded: watch::Receiver<bool>,
}

/// Brings all GPUs up and follows their changes, after the worker's start. Never returns.
pub async fn run(
    config: &Config,
    command_line: &[u8],
    previous: Option<&Previous>,
    started: StepId,
    sources: Sources,
    mut machine: Machine,
) {
    let lane = machine.spare.as_ref().map(|spare| spare.process().pid());
    for helper in lane
        .cloned()
        .into_iter()
        .chain(machine.descriptors.opener())
    {
        tokio::spawn(helper.reap());
    }
    // Scan after the subscription to uevents: a GPU that appears meanwhile is seen twice, not
    // never.
    let found = scan::run(config, previous, started).await;
    let image = match machine.image.take() {
        None => None,
        Some(image) => match image.await {
            Ok(step) => step,
            Err(_) => std::future::pending().await,
        },
    };
    find_driver_files::prepare(config.driver_root.as_deref());
    let after = After::from(&[Some(found.step), image][..]);
    let mut fleet = Fleet::start(config, command_line, previous, (found, after), machine).await;
    for (gpu, xid) in previous.into_iter().flat_map(|previous| &previous.xids) {
        fleet.heed_xid(gpu.address, *xid, Some(*gpu));
    }
    fleet.follow(sources).await;
}

/// From the loss of uevents to the scan that makes up for them: a flood that overruns the socket
/// again and again costs one scan in this time.
const RESCAN_AFTER: Duration = Duration::from_millis(100);
/// Pause between two tries to subscribe to uevents, or to read sysfs.
const RETRY_AFTER: Duration = Duration::from_secs(1);
/// Interval of checks of the binds of held descriptors. The driver's link in sysfs goes when a
/// removal begins, which then waits for the descriptor; no event reports that moment (a uevent
/// comes when the removal is over, inotify reports nothing in sysfs), and the driver's log lines
/// about it may be unreadable (`printk.devkmsg=off`) or unknown. Not on the boot path: once all is
/// settled, or a GPU is late.
const REMOVAL_LOOK: Duration = Duration::from_secs(1);

struct Fleet {
    shared: Arc<Shared>,
    orders: Orders,
    /// Files for the first load; a later load looks them up again.
    image: Option<Image>,
    command_line: Vec<u8>,
    /// Step that precedes the load.
    looked: StepId,
    driver: watch::Sender<Driver>,
    tasks: JoinSet<PciAddress>,
    handles: HashMap<GpuId, AbortHandle>,
    facts: Facts,
    /// Whether the services' modules are loaded.
    modules_loaded: watch::Receiver<bool>,
    /// Time of the next scan of sysfs.
    rescan_at: Option<Instant>,
    /// Whether sysfs is polled for removals.
    looks: bool,
    /// The driver's options are fixed.
    load_ordered: bool,
    settled: watch::Sender<bool>,
}

impl Fleet {
    /// Starts with the GPUs of the scan, after the steps of the scan and the driver's files.
    async fn start(
        config: &Config,
        command_line: &[u8],
        previous: Option<&Previous>,
        (found, after): (Found, After),
        machine: Machine,
    ) -> Self {
        let looking = step!(names::DRIVER_LOOK, after = ?after);
        let looked = looking.id();
        let sysfs = PciSysfs::at(Path::new(SYS));
        let roster = Arc::new(previous.map_or_else(Roster::default, Roster::restored));
        release_stale(&machine.descriptors, &sysfs);
        let (arrived, unreadable) = take_stock(&roster, &sysfs, &found.gpus).await;
        let ids: Vec<GpuId> = roster
            .all()
            .into_iter()
            .filter(|slot| slot.here)
            .map(|slot| slot.gpu)
            .collect();
        let (driver, state) = watch::channel(Driver::Loading);
        let image = Image::of(config, command_line);
        // An earlier worker has had these files read.
        if previous.is_none() {
            readahead::start(&image, &found.gpus, found.step);
        }
        let facts = facts(&image, &found.gpus);
        let decision = match previous.and_then(|previous| previous.topology.clone()) {
            Some(decision) => decision,
            None => scan::decide(config, &image, found.functions()),
        };
        let Config {
            bind,
            init,
            first,
            relaxed,
            ..
        } = *config;
        let no_gpus = config.expected_gpus == Some(0);
        let enable = previous.and_then(|previous| previous.enable);
        let load_begun = previous.is_some_and(|previous| previous.load_begun);
        let policy = Policy {
            bind,
            init,
            first,
            relaxed,
            no_gpus,
            load_begun,
            enable,
            facts: facts.clone(),
        };
        let (dispatch, orders) = Dispatch::start(Schedule::new(policy, dispatch::now()));
        let published = previous
            .map(|p| published(p, &roster, &ids, &image))
            .unwrap_or_default();
        let earlier = readiness::Earlier {
            given: published
                .entries
                .iter()
                .filter(|(_, entry)| matches!(entry, Entry::Ready(_)))
                .map(|(gpu, _)| *gpu)
                .collect(),
            degraded: previous.is_some_and(|previous| previous.degraded),
        };
        let done = {
            let dispatch = Arc::clone(&dispatch);
            move |gpu, held| {
                dispatch.report(if held {
                    Fact::Declared(gpu)
                } else {
                    Fact::Published(gpu)
                })
            }
        };
        let withheld = config.cdi == Cdi::Complete;
        let needs = readiness::choose(config, &decision);
        let spec = publication::start(
            Arc::clone(&roster),
            published,
            options(config),
            withheld,
            needs.holds_back(),
            done,
        );
        drop(looking);
        let known = |gpu: &GpuId| previous.map(|p| p.gpu(*gpu)).unwrap_or_default();
        let seen = Seen::default();
        if previous.is_some() {
            seen.continues();
        }
        for gpu in &ids {
            if let Some(minor) = known(gpu).minor {
                seen.set_minor(*gpu, minor);
            }
        }
        let shared = Arc::new(Shared {
            config: config.clone(),
            lane: Arc::new(Lane::new(
                sysfs.clone(),
                Path::new("/"),
                machine.spare,
                machine.gate,
                After(vec![looked]),
            )),
            sysfs,
            dispatch,
            roster,
            driver: state,
            offered: Arc::default(),
            topology: watch::channel(decision).0,
            descriptors: machine.descriptors,
            runtime: Handle::current(),
            spec,
            driver_log: machine.driver_log,
            seen,
            milestones: machine.milestones,
            fabric: machine.fabric,
            occasions: watch::channel(Occasions::default()).0,
            nvml: Helpers::default(),
            resets: previous
                .map(|p| p.resets.clone())
                .unwrap_or_default()
                .into(),
        });
        let mut fleet = Self {
            shared,
            orders,
            image: Some(image),
            command_line: command_line.to_vec(),
            looked,
            driver,
            tasks: JoinSet::new(),
            handles: HashMap::new(),
            facts,
            modules_loaded: machine.modules_loaded,
            rescan_at: None,
            looks: false,
            load_ordered: driver::is_in_kernel(),
            settled: machine.settled,
        };
        tokio::spawn(readiness::follow(Arc::clone(&fleet.shared), earlier));
        let mut arrivals = Vec::new();
        for gpu in ids {
            // GPUs that an earlier worker has settled stay settled.
            let known = known(&gpu);
            let opened = fleet
                .shared
                .roster
                .bind_of(gpu)
                .is_some_and(|bound| fleet.shared.descriptors.of(&bound).is_some());
            // The kernel has probed by itself what came while there was no worker.
            let replaced = || previous.is_some_and(Previous::is_scanned) && arrived.contains(&gpu);
            let arrival = if known.slot.failed {
                Arrival::Failed
            } else if known.usable && known.published && opened {
                Arrival::Usable
            } else if fleet.shared.sysfs.is_bound(gpu.address) || replaced() {
                Arrival::Enabled
            } else if previous.is_some() {
                Arrival::Again
            } else {
                Arrival::Boot
            };
            match arrival {
                Arrival::Failed | Arrival::Usable => {
                    fleet.shared.dispatch.report(Fact::Found(gpu, arrival))
                }
                Arrival::Enabled | Arrival::Again | Arrival::Boot => arrivals.push((gpu, arrival)),
            }
        }
        if let Some(previous) = previous {
            reset::resume(previous, &fleet.shared);
        }
        fleet.bring_up(arrivals);
        if let Some(error) = unreadable {
            fleet.lost("look at a GPU", &error, RETRY_AFTER);
        }
        fleet.shared.dispatch.report(Fact::Scanned);
        fleet.report_topology();
        fleet
    }

    /// Reports the decision to the services.
    fn report_topology(&self) {
        let decision = self.shared.topology.borrow();
        self.shared.milestones.send_modify(|reached| {
            reached.topology = Some(decision.topology);
            reached.functions = decision.functions.clone();
        });
    }

    /// Starts the tasks of GPUs, and reports them as found.
    fn bring_up(&mut self, arrivals: Vec<(GpuId, Arrival)>) {
        for (gpu, arrival) in arrivals {
            self.shared.seen.arrived(gpu);
            let shared = Arc::clone(&self.shared);
            let orders = shared.dispatch.orders_of(gpu);
            let task = self.tasks.spawn(async move {
                gpu::bring_up(shared, gpu, arrival, orders).await;
                gpu.address
            });
            self.handles.insert(gpu, task);
            self.shared.dispatch.report(Fact::Found(gpu, arrival));
        }
    }

    /// Carries out orders and takes events of the kernel and the agent, for as long as the guest
    /// lives.
    async fn follow(&mut self, sources: Sources) {
        let Sources {
            uevents,
            mut signals,
            mut agent,
        } = sources;
        let mut uevents = match uevents {
            Ok(uevents) => Some(uevents),
            Err(error) => {
                self.lost("subscribe to uevents", &error, RETRY_AFTER);
                None
            }
        };
        let mut removals = tokio::time::interval(REMOVAL_LOOK); // reads sysfs, not on the boot path
        removals.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                Some(order) = self.orders.recv() => self.carry_out(order),
                next = hear(&mut uevents, Uevents::next) => match next {
                    Ok(Next::Event(event)) => self.take(&event),
                    Ok(Next::Display(gpu)) => self.read_extras(gpu),
                    Err(error) => self.lost("read uevents", &error, RESCAN_AFTER),
                },
                () = until(self.rescan_at) => {
                    self.rescan_at = None;
                    if uevents.is_none() {
                        // Subscribed before the scan: what comes in between is seen twice, not
                        // never.
                        match Uevents::subscribe() {
                            Ok(again) => uevents = Some(again),
                            Err(error) => self.lost("subscribe to uevents", &error, RETRY_AFTER),
                        }
                    }
                    self.rescan();
                }
                _ = removals.tick(), if self.looks => self.look_for_removals(),
                Some(seen) = agent.recv() => self.see(&seen),
                Some((at_ns, signal)) = listen(signals.as_mut()) => self.heed(at_ns, signal),
                Some(ended) = self.tasks.join_next() => self.ended(ended.ok()),
            }
        }
    }

    /// Looks once more where a GPU's task has ended: a bind that was announced before the GPU
    /// failed was not yet another arrival. An aborted task belonged to a GPU that has left. A task
    /// reports its own panic.
    fn ended(&mut self, task: Option<PciAddress>) {
        if let Some(address) = task {
            self.look(address);
        }
    }

    /// Uevents are lost: scan for the current devices, once and soon. One report and one scan stand
    /// for all losses until then.
    fn lost(&mut self, what: &str, error: &dyn Display, after: Duration) {
        if self.rescan_at.is_none() {
            let error = format!("{what}: {error}: scanning again in {after:?}");
            tracing::warn!(name: names::STREAM_LOST, at = "uevents", error);
            self.rescan_at = Some(Instant::now() + after);
        }
    }

    fn carry_out(&mut self, order: Order) {
        match order {
            Order::Chosen(strategy, enabled) => report_strategy(&strategy, &self.facts, enabled),
            Order::Load {
                gpus,
                one_by_one,
                enables,
            } => {
                let mut image = self
                    .image
                    .take()
                    .unwrap_or_else(|| Image::of(&self.shared.config, &self.command_line));
                self.follow_topology(&mut image);
                let after = After::from(&[Some(self.looked), self.shared.lane.last_enabling()][..]);
                let way = Way {
                    one_by_one,
                    enables,
                };
                driver::start(image, after, self.driver.clone(), &self.shared, &gpus, way);
            }
            Order::Wait(gpu) => self.shared.lane.wait(gpu.address),
            Order::LaneOver => self.shared.lane.over(),
            Order::Late(gpu, step, waited) => {
                self.looks = true;
                self.report_late(gpu, step, waited);
            }
            Order::Settled { usable, failed } => {
                self.looks = true;
                self.settled.send_replace(true);
                if !readiness::needs(&self.shared).holds_back() {
                    let _unused = self.shared.spec.send(Update::Settled);
                }
                let (usable, failed) = (usable as u64, failed as u64);
                match is_found() {
                    Ok(()) => tracing::info!(name: names::SETTLED, usable, failed),
                    Err(error) => tracing::error!(name: names::SETTLED, usable, failed, error),
                }
                self.shared
                    .milestones
                    .send_modify(|reached| reached.settled = true);
                self.shared.occasions.send_modify(|seen| seen.settled += 1);
                // Second reading of the host's clock: two readings show the drift.
                ptp_kvm::report();
            }
            Order::LockDown if self.shared.config.lockdown => {
                tokio::spawn(lockdown::run(self.modules_loaded.clone()));
            }
            Order::LockDown | Order::Enable(..) | Order::Probe(..) | Order::Initialise(_) => {}
        }
    }

    /// Adds the driver's option that follows from the topology, which is decided again where GPUs
    /// came or left since: the first load fixes it.
    fn follow_topology(&mut self, image: &mut Image) {
        let decided = self.shared.topology.borrow().clone();
        let gpus = self.shared.roster.present().len();
        if decided.functions.gpus != gpus && !driver::is_in_kernel() {
            let functions = Functions {
                gpus,
                ..decided.functions
            };
            let decision = scan::decide(&self.shared.config, image, functions);
            let needs = readiness::choose(&self.shared.config, &decision);
            self.shared.topology.send_replace(decision);
            let _unused = self
                .shared
                .spec
                .send(Update::HeldByDefault(needs.holds_back()));
        }
        if self.shared.topology.borrow().nvlink_disable {
            image.disable_nvlink();
        }
        self.load_ordered = true;
    }

    /// Reports GPUs that came too late for the driver's options.
    fn report_outgrown(&self) {
        let gpus = self.shared.roster.present().len();
        if self.load_ordered
            && let Some(error) = self.shared.topology.borrow().outgrown_by(gpus)
        {
            tracing::warn!(name: names::TOPOLOGY_OUTGROWN, gpus = gpus as u64, error);
        }
    }

    /// Reports a trace of the agent that can make the lane wait or go on.
    fn see(&self, seen: &agent_watch::Seen) {
        let fact = match seen {
            agent_watch::Seen::Look(_) => Fact::AgentLooked,
            agent_watch::Seen::Container {
                change: Change::Made,
                ..
            } => Fact::ContainerBegins,
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
        let progress = self.shared.seen.progress(gpu);
        threads::detach(move || {
            let stack = progress.stack();
            let waited_ms = waited.as_millis() as u64;
            tracing::warn!(name: names::GPU_LATE, gpu = %gpu.address, step, waited_ms, stack);
        });
    }

    /// Reads a GPU's extras again after a display came or went. For a GPU that is not usable yet,
    /// they are read once it is.
    fn read_extras(&self, gpu: PciAddress) {
        if let Some(gpu) = self
            .shared
            .roster
            .at(gpu)
            .filter(|gpu| self.shared.dispatch.is_usable(*gpu))
        {
            drop(extras::start(&self.shared, gpu));
        }
    }

    /// An event only shows where to look: by now, something else may be there.
    fn take(&mut self, event: &Uevent) {
        if !event
            .vendor
            .zip(event.class)
            .is_some_and(|(vendor, class)| kata_gpu_wire::pci_address::is_gpu(vendor, class))
        {
            return;
        }
        let gpu = event.address;
        let driver = event.driver.as_deref().unwrap_or_default();
        tracing::debug!(name: names::UEVENT, gpu = %gpu, action = ?event.action, driver);
        match event.action {
            Action::Bind => {
                self.look(gpu);
                if let Some(gpu) = self.shared.roster.at(gpu) {
                    self.shared.seen.bound(gpu);
                }
            }
            Action::Add | Action::Remove | Action::Unbind => self.look(gpu),
            Action::Other => {}
        }
    }

    /// Scans again after uevents were lost.
    fn rescan(&mut self) {
        let present = match pci::scan(Path::new(SYS)) {
            Ok(scan) => {
                if let Some(error) = scan.unreadable.first() {
                    self.lost("scan the PCI bus", error, RETRY_AFTER);
                }
                scan.gpus
            }
            Err(error) => return self.lost("scan the PCI bus", &error, RETRY_AFTER),
        };
        let known = self
            .shared
            .roster
            .all()
            .into_iter()
            .map(|slot| slot.gpu.address);
        let addresses: BTreeSet<PciAddress> =
            known.chain(present.iter().map(|gpu| gpu.address)).collect();
        for address in addresses {
            self.look(address);
        }
        // A lost uevent may have been that of a display.
        for slot in self.shared.roster.all() {
            self.read_extras(slot.gpu.address);
        }
    }

    /// Looks at every bind whose descriptor is held: a removal waits for the descriptor.
    fn look_for_removals(&mut self) {
        let is_stale = |bound: &Bound| self.shared.sysfs.is_over(*bound);
        let stale: Vec<Bound> = self
            .shared
            .descriptors
            .held()
            .into_iter()
            .filter(is_stale)
            .collect();
        for bound in stale {
            self.look(bound.address);
        }
    }

    /// Compares the device at an address with the former one, and follows each change.
    fn look(&mut self, address: PciAddress) {
        let (shared, sysfs) = (&self.shared, &self.shared.sysfs);
        let changes =
            match look(sysfs, address) {
                Ok((seen, device)) => {
                    for bound in shared.descriptors.held().iter().filter(|held| {
                        held.address == address && seen.bound(address) != Some(**held)
                    }) {
                        shared.descriptors.release(bound);
                    }
                    observe(&shared.roster, address, (seen, device))
                }
                // Unreadable is not absent.
                Err(error) => return self.lost("look at a GPU", &error, RETRY_AFTER),
            };
        if changes.is_empty() {
            return;
        }
        let mut arrivals = Vec::new();
        for change in changes {
            match change {
                slots::Change::Left(gpu, index) => self.left(gpu, index),
                // No lane for those that come later: the kernel enables and probes them by itself,
                // and the bind finds that done.
                slots::Change::Arrived(gpu) => arrivals.push((gpu, Arrival::Enabled)),
                slots::Change::Freed => {}
            }
        }
        self.shared.roster.report_names();
        let _unused = self.shared.spec.send(Update::Roster);
        if !arrivals.is_empty() {
            self.report_outgrown();
        }
        self.bring_up(arrivals);
    }

    /// Follows the departure of a GPU that is gone or about to go. Its descriptors are released
    /// already.
    fn left(&mut self, gpu: GpuId, index: usize) {
        report_left(gpu, index);
        self.shared.seen.gone(gpu);
        // Threads that block in the kernel for this GPU return on their own; no task waits for
        // them.
        if let Some(task) = self.handles.remove(&gpu) {
            task.abort();
        }
        self.shared.dispatch.report(Fact::Gone(gpu));
    }

    fn heed(&mut self, at_ns: u64, signal: Signal) {
        match signal {
            // The line counts only where sysfs agrees: the kernel removes the driver's link before
            // it calls the driver's removal.
            Signal::RemovalWaits(gpu) => self.look(gpu),
            Signal::Xid(gpu, number) => {
                self.heed_xid(gpu, number, self.arrival(gpu, at_ns));
            }
        }
    }

    /// GPU at an address that a line of this time is about: an older one is about the GPU that was
    /// there before.
    fn arrival(&self, gpu: PciAddress, at_ns: u64) -> Option<GpuId> {
        let is_its = |id: &GpuId| at_ns >= self.shared.seen.arrived_at(*id);
        self.shared.roster.at(gpu).filter(is_its)
    }

    /// Reports an error of the arrival of a GPU, which fails if it has fallen off the bus.
    fn heed_xid(&self, gpu: PciAddress, number: u32, arrival: Option<GpuId>) {
        match arrival {
            Some(id) if number == off_the_bus::XID => {
                tokio::spawn(off_the_bus::heed(Arc::clone(&self.shared), id));
            }
            _ => off_the_bus::report_xid(gpu, number, None),
        }
    }
}

/// Returns at that time; without one, never.
async fn until(at: Option<Instant>) {
    match at {
        Some(at) => tokio::time::sleep_until(at).await, // see RESCAN_AFTER
        None => std::future::pending().await,
    }
}

async fn listen(signals: Option<&mut Signals>) -> Option<(u64, Signal)> {
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
        firewall: gpus
            .iter()
            .any(|g| kata_gpu_wire::pci_address::waits_for_bar_firewall(g.device)),
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
    Options {
        namings: config.cdi_names.clone(),
        hooks: config.cdi_hooks,
        hook_path,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::boot::bring_up::shared::tests::{arrive, facts, shared};
    use kata_gpu_test_support::temp_dir;

    /// A fleet of one GPU, whose removal is over: sysfs has no device.
    fn fleet(sysfs: &Path) -> (Fleet, GpuId) {
        let (shared, orders, _updates) = shared(Config::default(), sysfs);
        let gpu = arrive(&shared);
        shared.seen.arrived(gpu);
        let fleet = Fleet {
            shared,
            orders,
            image: None,
            command_line: Vec::new(),
            looked: StepId::next(),
            driver: watch::channel(Driver::Loading).0,
            tasks: JoinSet::new(),
            handles: HashMap::new(),
            facts: facts(),
            modules_loaded: watch::channel(false).1,
            rescan_at: None,
            looks: false,
            load_ordered: false,
            settled: watch::channel(false).0,
        };
        (fleet, gpu)
    }

    #[tokio::test]
    async fn an_xid_from_before_its_arrival_is_not_a_gpus() {
        let folder = temp_dir();
        let (fleet, gpu) = fleet(folder.path());
        let arrived_at = fleet.shared.seen.arrived_at(gpu);
        let of = |at_ns| fleet.arrival(gpu.address, at_ns);
        assert_eq!((of(arrived_at - 1), of(arrived_at)), (None, Some(gpu)));
    }

    #[tokio::test]
    async fn the_drivers_line_about_a_removal_is_followed_at_once() {
        let folder = temp_dir();
        let (mut fleet, gpu) = fleet(folder.path());
        fleet.heed(0, Signal::RemovalWaits(gpu.address));
        assert!(!fleet.shared.roster.contains(gpu));
    }

    #[tokio::test]
    async fn a_gpu_that_failed_as_its_bind_was_lost_comes_again_with_the_next_bind() {
        let folder = temp_dir();
        let (mut fleet, _) = fleet(folder.path());
        let address = "0001:00:04.0".parse().unwrap();
        let (function, driver) = (
            folder.path().join("bus/pci/devices/0001:00:04.0"),
            folder.path().join("bus/pci/drivers/nvidia"),
        );
        std::fs::create_dir_all(&function).unwrap();
        std::fs::create_dir_all(&driver).unwrap();
        let there = fleet.shared.sysfs.sight(address).unwrap();
        fleet.shared.roster.observe(address, there, Some(0x2330));
        let failed = fleet.shared.roster.at(address).unwrap();
        std::os::unix::fs::symlink(&driver, function.join("driver")).unwrap();
        // The uevent of the bind: its task is still on its way.
        fleet.look(address);
        assert_eq!(fleet.shared.roster.at(address), Some(failed));
        assert!(fleet.shared.roster.failed(failed));
        fleet.ended(Some(address));
        let again = GpuId {
            generation: failed.generation + 1,
            ..failed
        };
        assert_eq!(fleet.shared.roster.at(address), Some(again));
        // Negative control: a GPU that fails in a bind that its task has seen stays failed.
        let bind = fleet.shared.sysfs.sight(address).unwrap().bound(address);
        assert!(fleet.shared.roster.bound(again, bind.unwrap()));
        assert!(fleet.shared.roster.failed(again));
        fleet.ended(Some(address));
        assert_eq!(fleet.shared.roster.at(address), Some(again));
    }

    #[test]
    fn the_specs_hook_is_this_program_wherever_it_is() {
        let path = options(&Config::default()).hook_path;
        assert_eq!(Path::new(&path), std::env::current_exe().unwrap());
    }
}
