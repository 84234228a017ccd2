//! Order of the bring-up: facts go in, permissions and orders come out. Pure: no I/O, no runtime,
//! no clock of its own.
//!
//! Invariants, each with a property test in virtual time (tests/schedule):
//! - GPUs are enabled one at a time and probed in PCI order. At most one probe runs at a time,
//!   except under the strategy `concurrent`; probes that hang do not count.
//! - Where enabling is slow, no enabling begins during a load, a probe that does not sleep, a
//!   publication or the first part of an initialisation, nor after the second parts of a wave until
//!   the wave is over. Each of these would wait for the enabling, some with the driver's locks
//!   held.
//! - After a wave, and until all GPUs are enabled, no initialisation begins for half a second, so
//!   that programs of containers compute: none does while a GPU initialises.
//! - Every wait has its limit in [`deadlines`](super::deadlines). A GPU that hangs costs the others
//!   that limit, once.
//!
//! Not here: execution of orders ([`dispatch`](super::dispatch), [`gpu`](super::gpu)), and
//! publication, which waits for no other GPU.

mod firewalls; // probes that sleep
mod holds; // reasons for the lane to wait
mod initialisations; // waves of initialisations
#[cfg(test)]
mod tests;

use super::agent::Agent;
use super::deadlines::{Limit, REPORT_EVERY, REPORTS};
use super::schedule_messages::{Arrival, Fact, GpuId, Hold, Order, Probe, Time};
use super::strategy::{self, Policy, SLOW_ENABLE, Strategy};
use crate::config::Bind;
use kata_gpu_wire::pci_address::BAR_FIREWALL_WAIT;
use std::collections::BTreeMap;
use std::time::Duration;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// Not enabled.
    New,
    Enabling,
    /// Waiting for the driver, or for the turn to be probed.
    Enabled,
    Probing(Probe),
    /// Probed by a load that is over; the minor is being read.
    Probed,
    /// Waiting for the turn to be initialised.
    Bound,
    Initialising,
    Initialised,
    Usable,
    Failed,
}

#[derive(Clone, Debug)]
struct Gpu {
    arrival: Arrival,
    stage: Stage,
    /// Begin of that stage.
    since: Time,
    /// Begin of the GPU's own steps, from which lateness counts. None while waiting in the lane.
    started: Option<Time>,
    reports: u32,
    publishing: Option<Time>,
    /// Whether its initialisation is under way in the driver.
    opened: bool,
    /// End of its initialisation's first part: seen, or assumed. None: not known yet.
    attached: Option<Time>,
    /// Whether a load of the driver has had the GPU among those that it may probe.
    offered: bool,
}

impl Gpu {
    fn enter(&mut self, stage: Stage, now: Time) {
        (self.stage, self.since) = (stage, now);
    }

    /// Whether the GPU's stage began less than a limit ago.
    fn within(&self, limit: Limit, now: Time) -> bool {
        now < self.since + limit.after()
    }

    /// Whether the first part of the GPU's initialisation is under way.
    fn is_attaching(&self, now: Time) -> bool {
        self.stage == Stage::Initialising && self.attached.is_none_or(|at| now < at)
    }

    /// Whether it is being opened.
    fn is_opening(&self, now: Time) -> bool {
        self.stage == Stage::Initialising && !self.opened && self.within(Limit::InTurn, now)
    }

    fn is_settled(&self) -> bool {
        matches!(self.stage, Stage::Usable | Stage::Failed)
    }

    fn next_report(&self) -> Option<Time> {
        let started = self.started.filter(|_| !self.is_settled())?;
        Some(started + report_after(self.reports))
    }
}

fn report_after(count: u32) -> Duration {
    match REPORTS.get(count as usize) {
        Some(after) => *after,
        None => REPORTS[REPORTS.len() - 1] + REPORT_EVERY * (count + 1 - REPORTS.len() as u32),
    }
}

/// The driver's load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Load {
    /// Not begun.
    No,
    /// `registered`: registration of the driver, from which the load probes.
    Runs {
        since: Time,
        registered: Option<Time>,
    },
    /// nvidia is loaded. `since`: begin of the load's need for all CPUs. `uvm`: nvidia-uvm is
    /// loaded, too. `over`: no work of the loads is left.
    Loaded {
        at: Time,
        since: Time,
        uvm: bool,
        over: bool,
    },
    /// `again`: a later GPU needs another load, which begins when this one is over.
    Failed { again: bool },
}

/// State of the enable lane.
#[derive(Clone, Debug, Default)]
struct Lane {
    /// Duration of the last enabling, and its end.
    took: Option<Duration>,
    enabled: Option<Time>,
    /// Whether a slow enabling has failed.
    failed_slowly: bool,
    /// Current hold of the lane, and its begin.
    held: Option<(Hold, Time)>,
    /// Holds since the last enabling.
    holds: BTreeMap<Hold, Duration>,
    over: bool,
}

/// Initialisations that run together.
#[derive(Clone, Copy, Debug)]
struct Wave {
    began: Time,
    count: u32,
    /// Whether none has failed: only then is the wave's time measured.
    well: bool,
}

/// The state of a bring-up.
#[derive(Clone, Debug)]
pub struct Schedule {
    policy: Policy,
    strategy: Option<Strategy>,
    gpus: BTreeMap<GpuId, Gpu>,
    load: Load,
    lane: Lane,
    wave: Option<Wave>,
    /// End of the last wave.
    wave_over: Time,
    /// Quickest first part that was seen, and scale of the other parts in the quickest wave; what
    /// was stalled is no measure of the driver.
    first_part: Option<Duration>,
    scale: Option<u32>,
    agent: Agent,
    started: Time,
    /// Deadline of the lockdown.
    lockdown: Option<Time>,
    scanned: bool,
    settled: bool,
    locked_down: bool,
    /// The last load has no further effect.
    load_over: bool,
}

impl Schedule {
    /// A bring-up that begins now. Nothing is ordered before [`Fact::Scanned`].
    pub fn new(policy: Policy, now: Time) -> Self {
        let agent = Agent::new(policy.facts.vcpus);
        Self {
            policy,
            strategy: None,
            gpus: BTreeMap::new(),
            load: Load::No,
            lane: Lane::default(),
            wave: None,
            wave_over: now,
            first_part: None,
            scale: None,
            agent,
            started: now,
            lockdown: None,
            scanned: false,
            settled: false,
            locked_down: false,
            load_over: false,
        }
    }

    /// Takes a fact in; returns the orders that follow from it.
    pub fn take(&mut self, now: Time, fact: Fact) -> Vec<Order> {
        self.note(now, fact);
        self.wake(now)
    }

    /// Returns the orders that are due now, after deadlines have passed.
    pub fn wake(&mut self, now: Time) -> Vec<Order> {
        let mut orders = Vec::new();
        if !self.scanned {
            return orders;
        }
        self.choose(&mut orders);
        self.begin_load(now, &mut orders);
        self.initialise(now, &mut orders);
        self.probe(now, &mut orders);
        self.enable(now, &mut orders);
        self.probe_before_enabling(now, &mut orders);
        self.report(now, &mut orders);
        self.settle(now, &mut orders);
        orders
    }

    /// Time at which [`Schedule::wake`] must be called next, unless a fact comes before.
    pub fn deadline(&self, now: Time) -> Option<Time> {
        let at = |since: Time, limit: Limit| since + limit.after();
        let mut times = vec![
            at(self.started, Limit::AgentFirst),
            at(self.wave_over, Limit::ProbesFirst),
            at(self.wave_over, Limit::ProgramsFirst),
        ];
        let first = self.gpus.values().take(self.policy.first);
        times.extend(first.map(|gpu| at(gpu.since, Limit::LaneFirst)));
        for gpu in self.gpus.values() {
            times.extend(gpu.next_report());
            times.extend(gpu.attached);
            times.extend(gpu.publishing.map(|since| at(since, Limit::LaneHold)));
            match gpu.stage {
                Stage::Probing(_) => {
                    let wakes = self.probing_since(gpu) + BAR_FIREWALL_WAIT;
                    times.extend([
                        wakes,
                        wakes.saturating_sub(Limit::ProbesFirst.after()),
                        wakes.saturating_sub(self.first_part()),
                        wakes.saturating_sub(Limit::WakesSoon.after()),
                        at(wakes, Limit::ProbesFirst),
                    ]);
                    times.push(at(gpu.since, Limit::ProbesFirst));
                    let limits = [Limit::LaneFirst, Limit::LaneHold, Limit::ProbeHangs];
                    times.extend(limits.map(|limit| at(gpu.since, limit)));
                }
                Stage::Probed => {
                    let limits = [Limit::ProbesFirst, Limit::LaneHold];
                    times.extend(limits.map(|limit| at(gpu.since, limit)));
                }
                Stage::Bound => times.push(at(gpu.since, Limit::LaneFirst)),
                Stage::Enabling => times.push(at(gpu.since, Limit::LaneFirst)),
                Stage::Enabled => times.push(at(gpu.since, Limit::LaneHold)),
                Stage::Initialising => {
                    let limits = [Limit::InTurn, Limit::LaneHold, Limit::InitHangs];
                    times.extend(limits.map(|limit| at(gpu.since, limit)));
                }
                Stage::New | Stage::Initialised | Stage::Usable | Stage::Failed => {}
            }
        }
        match self.load {
            Load::Runs { since, registered } => {
                times.push(at(since, Limit::LaneHold));
                let wakes = registered.map(|registered| registered + BAR_FIREWALL_WAIT);
                times.extend(
                    wakes
                        .into_iter()
                        .flat_map(|wakes| [wakes, at(wakes, Limit::LaneHold)]),
                );
            }
            Load::Loaded {
                at: loaded, since, ..
            } => {
                times.extend([at(loaded, Limit::UvmFirst), at(since, Limit::LaneHold)]);
            }
            Load::No | Load::Failed { .. } => {}
        }
        times.extend(self.agent.deadlines().into_iter().flatten());
        times.extend(
            self.wave
                .map(|wave| wave.began + self.costs().first_is_back()),
        );
        times.push(self.probe_at(now));
        times.extend(self.sleeps_at(now).map(|(_, at)| at));
        times.extend(self.lockdown.filter(|_| !self.locked_down));
        times.into_iter().filter(|time| *time > now).min()
    }

    /// Whether a GPU is usable.
    pub fn is_usable(&self, gpu: GpuId) -> bool {
        self.gpus
            .get(&gpu)
            .is_some_and(|gpu| gpu.stage == Stage::Usable)
    }

    /// Whether all GPUs are usable or failed, and the loads are over.
    pub fn is_settled(&self) -> bool {
        self.settled
    }

    fn add(&mut self, id: GpuId, arrival: Arrival, now: Time) {
        let stage = match arrival {
            Arrival::Boot | Arrival::Again if self.policy.bind != Bind::Insmod => Stage::New,
            Arrival::Boot | Arrival::Again | Arrival::Enabled => Stage::Enabled,
            Arrival::Usable => Stage::Usable,
            Arrival::Failed => Stage::Failed,
        };
        // A cause of one load's failure need not affect the next load.
        if let (Load::Failed { again }, Stage::New | Stage::Enabled) = (&mut self.load, stage) {
            *again = true;
            self.reload();
        }
        let started = (stage == Stage::Enabled).then_some(now);
        self.gpus.insert(
            id,
            Gpu {
                arrival,
                stage,
                since: now,
                started,
                reports: 0,
                publishing: None,
                opened: false,
                attached: None,
                offered: false,
            },
        );
        self.settled = false;
    }

    /// Forgets a finished failed load, if another load is needed.
    fn reload(&mut self) {
        if self.load_over && self.load == (Load::Failed { again: true }) {
            (self.load, self.load_over) = (Load::No, false);
        }
    }

    fn note(&mut self, now: Time, fact: Fact) {
        match fact {
            Fact::Found(id, arrival) => self.add(id, arrival, now),
            Fact::Scanned => {
                self.scanned = true;
                if self.policy.load_begun {
                    self.lock_down_after(now, Limit::Lockdown);
                }
            }
            Fact::Enabled(id, took) => {
                // An earlier worker may have enabled this GPU: again takes no time.
                let again = self
                    .gpus
                    .get(&id)
                    .is_some_and(|gpu| gpu.arrival == Arrival::Again);
                self.lane.took = Some(took).max(self.policy.enable.filter(|_| again));
                self.lane.enabled = Some(now);
                self.agent.enabled(now);
                self.enter(id, Stage::Enabled, now);
                if let Some(gpu) = self.gpus.get_mut(&id) {
                    (gpu.started, gpu.reports) = (Some(now), 0);
                }
            }
            Fact::Registered => {
                if let Load::Runs { registered, .. } = &mut self.load {
                    *registered = registered.or(Some(now));
                }
            }
            Fact::Loaded(true) => {
                // End of the sleep in the load's probe.
                let since = match self.load {
                    Load::Runs { since, registered } => {
                        let since = self.load_needs_cpus_since(since, registered);
                        since.min(now)
                    }
                    Load::No | Load::Loaded { .. } | Load::Failed { .. } => now,
                };
                self.load = Load::Loaded {
                    at: now,
                    since,
                    uvm: false,
                    over: false,
                };
                for gpu in self
                    .gpus
                    .values_mut()
                    .filter(|gpu| gpu.stage == Stage::Probing(Probe::Load))
                {
                    gpu.enter(Stage::Probed, now);
                }
            }
            // A GPU that was plugged in during the load needs a load of its own.
            Fact::Loaded(false) => {
                self.load = Load::Failed {
                    again: self.any(|gpu| !gpu.offered && !gpu.is_settled()),
                }
            }
            Fact::UvmLoaded => {
                if let Load::Loaded { uvm, .. } = &mut self.load {
                    *uvm = true;
                }
            }
            Fact::LoadOver => {
                if let Load::Loaded { over, .. } = &mut self.load {
                    *over = true;
                }
                self.lock_down_after(now, Limit::Lockdown);
                self.load_over = true;
                self.reload();
            }
            Fact::Bound(id) => self.enter(id, Stage::Bound, now),
            Fact::Publishing(id) => {
                if let Some(gpu) = self.gpus.get_mut(&id) {
                    gpu.publishing = Some(now);
                }
            }
            Fact::Published(id) | Fact::Declared(id) => {
                if let Some(gpu) = self.gpus.get_mut(&id) {
                    gpu.publishing = None;
                }
                if matches!(fact, Fact::Published(_)) {
                    self.agent.published(now);
                }
            }
            Fact::Opening(id) => self.opening(id, now),
            Fact::Opened(id) => {
                if let Some(gpu) = self.gpus.get_mut(&id) {
                    gpu.opened = true;
                }
            }
            Fact::Attached(id) => self.attached(id, now),
            Fact::AttachUnseen(id) => self.assume_attached(id),
            Fact::Initialised(id, well) => self.initialised(id, well, now),
            Fact::Usable(id) => self.enter(id, Stage::Usable, now),
            Fact::Failed(id) => {
                // A failed enabling shows that the host is slow, and never that it is fast.
                let enabling = self
                    .gpus
                    .get(&id)
                    .filter(|gpu| gpu.stage == Stage::Enabling);
                self.lane.failed_slowly |=
                    enabling.is_some_and(|gpu| now.saturating_sub(gpu.since) >= SLOW_ENABLE);
                self.enter(id, Stage::Failed, now);
            }
            Fact::Gone(id) => {
                let gone = self.gpus.remove(&id);
                // A wave that ends by the loss of a GPU is no measure, either.
                if gone.is_some_and(|gpu| gpu.stage == Stage::Initialising) {
                    self.wave = self.wave.map(|wave| Wave {
                        well: false,
                        ..wave
                    });
                }
            }
            Fact::AgentLooked => self.agent.looked(now),
            Fact::ContainerBegins => self.agent.begins(now),
            Fact::ContainerRuns => self.agent.runs(now),
        }
    }

    fn enter(&mut self, id: GpuId, stage: Stage, now: Time) {
        if let Some(gpu) = self.gpus.get_mut(&id) {
            gpu.enter(stage, now);
            gpu.started = gpu.started.or(Some(now));
            if stage == Stage::Failed {
                gpu.publishing = None;
            }
        }
    }

    fn any(&self, wanted: impl Fn(&Gpu) -> bool) -> bool {
        self.gpus.values().any(wanted)
    }

    fn ids(&self, wanted: impl Fn(&Gpu) -> bool) -> Vec<GpuId> {
        self.gpus
            .iter()
            .filter(|(_, gpu)| wanted(gpu))
            .map(|(id, _)| *id)
            .collect()
    }

    fn is_slow(&self) -> bool {
        self.lane
            .took
            .map_or(self.lane.failed_slowly, |took| took >= SLOW_ENABLE)
    }

    fn has_firewall(&self) -> bool {
        self.policy.facts.firewall
    }

    /// GPUs that are still to be enabled.
    fn waiting(&self) -> impl Iterator<Item = GpuId> {
        self.gpus
            .iter()
            .filter(|(_, gpu)| gpu.stage == Stage::New)
            .map(|(id, _)| *id)
    }

    /// Chooses the strategy. The choice depends on the duration of the first enabling, so it waits
    /// for one enabling, except where probes sleep.
    fn choose(&mut self, orders: &mut Vec<Order>) {
        let measured = self.lane.took;
        let depends = match self.policy.bind {
            Bind::Auto | Bind::Concurrent => !self.has_firewall(),
            Bind::Pipelined => true,
            Bind::Insmod => false,
        };
        let to_measure =
            depends && self.any(|gpu| matches!(gpu.stage, Stage::New | Stage::Enabling));
        if self.strategy.is_some() || self.gpus.is_empty() || measured.is_none() && to_measure {
            return;
        }
        let strategy = strategy::choose(
            &self.policy,
            measured.is_some_and(|took| took >= SLOW_ENABLE),
        );
        orders.push(Order::Chosen(strategy.clone(), measured));
        self.strategy = Some(strategy);
    }

    /// Loads the driver when no enabling is under way: each would wait for the other's CPUs.
    fn begin_load(&mut self, now: Time, orders: &mut Vec<Order>) {
        let Some(strategy) = &self.strategy else {
            return;
        };
        let enabling = self.any(|gpu| gpu.stage == Stage::Enabling);
        if self.load != Load::No || enabling || self.agent_first(now).is_some() {
            return;
        }
        let one_by_one = strategy.bind != Bind::Insmod;
        let free = self.ids(|gpu| !gpu.is_settled());
        // A load without a GPU to probe fails; it is left to a GPU that is plugged in later.
        if free.is_empty() && !self.any(|gpu| gpu.arrival == Arrival::Usable) {
            return;
        }
        self.load = Load::Runs {
            since: now,
            registered: None,
        };
        // Lock down only after this load: modules that belong to it have to be loadable.
        self.lockdown = None;
        self.lock_down_after(now, Limit::LoadHangs);
        let count = if one_by_one { 1 } else { free.len() };
        orders.push(Order::Load {
            gpus: free.clone(),
            one_by_one,
            enables: self.lane.took.is_none(),
        });
        for (at, id) in free.into_iter().enumerate() {
            let Some(gpu) = self.gpus.get_mut(&id) else {
                continue;
            };
            gpu.offered = true;
            if at < count && gpu.arrival == Arrival::Boot {
                gpu.started = gpu.started.or(Some(now));
                gpu.enter(Stage::Probing(Probe::Load), now);
                orders.push(Order::Probe(id, Probe::Load));
            }
        }
        if !one_by_one {
            // The load enables the GPUs that it probes. The others are bound already, or are bound
            // later without the lane.
            for gpu in self.gpus.values_mut().filter(|gpu| gpu.stage == Stage::New) {
                gpu.started = Some(now);
                gpu.enter(Stage::Enabled, now);
            }
        }
    }

    fn is_loaded(&self) -> bool {
        matches!(
            self.load,
            Load::Loaded { .. } | Load::Failed { again: false }
        )
    }

    /// Lets GPUs be probed, in PCI order.
    fn probe(&mut self, now: Time, orders: &mut Vec<Order>) {
        let Some(bind) = self.strategy.as_ref().map(|s| s.bind) else {
            return;
        };
        let during = bind == Bind::Concurrent && self.load_waits_for_probe(now);
        let how = if during {
            Probe::DuringLoad
        } else {
            Probe::Bind
        };
        if !during && !self.is_loaded() {
            return;
        }
        for id in self.ids(|gpu| gpu.stage == Stage::Enabled) {
            let probes = |gpu: &Gpu| matches!(gpu.stage, Stage::Probing(_));
            let probing = self.any(|gpu| probes(gpu) && gpu.within(Limit::ProbeHangs, now));
            if bind != Bind::Concurrent && (probing || self.wave_is_in_the_way(id, now)) {
                return;
            }
            if self.probe_at(now) > now {
                break;
            }
            self.enter(id, Stage::Probing(how), now);
            orders.push(Order::Probe(id, how));
        }
    }

    /// Whether a probe would wait for initialisations that hold the global lock, and the lane would
    /// wait for that probe. The enabling under way counts as well: a probe that begins during an
    /// enabling waits for it.
    fn wave_is_in_the_way(&self, id: GpuId, now: Time) -> bool {
        let in_lane =
            self.is_slow() && self.any(|gpu| matches!(gpu.stage, Stage::New | Stage::Enabling));
        let patient = self
            .gpus
            .get(&id)
            .is_some_and(|gpu| gpu.within(Limit::LaneHold, now));
        let is_back = |wave: Wave| now >= wave.began + self.costs().first_is_back();
        let back = self
            .wave
            .is_some_and(|wave| self.attaches(now) || is_back(wave));
        in_lane && patient && back && self.wave_runs(now)
    }

    /// Lets the next GPU be enabled. During a slow enabling, its vCPU responds to nothing.
    fn enable(&mut self, now: Time, orders: &mut Vec<Order>) {
        let enables = |gpu: &Gpu| match gpu.stage {
            Stage::Enabling => true,
            // The driver enables this GPU when its sleep ends; the next in PCI order comes after.
            Stage::Probing(Probe::BeforeEnable) => gpu.within(Limit::LaneHold, now),
            _ => false,
        };
        let enabling = self.any(enables);
        let Some(next) = self.waiting().next().filter(|_| !enabling) else {
            if !enabling
                && !self.lane.over
                && self.waiting().next().is_none()
                && self.strategy.is_some()
                && !self.load_enables()
            {
                self.lane.over = true;
                orders.push(Order::LaneOver);
            }
            return;
        };
        let first = self.strategy.is_none();
        if !first && self.load == Load::No {
            return;
        }
        self.count_hold(now);
        if let Some(hold) = self.hold(now) {
            if self.lane.held.is_none() && self.lane.holds.is_empty() {
                orders.push(Order::Wait(next));
            }
            self.lane.held = Some((hold, now));
            return;
        }
        self.lane.over = false;
        let holds = std::mem::take(&mut self.lane.holds).into_iter().collect();
        self.begin(next, Stage::Enabling, now);
        orders.push(Order::Enable(next, holds));
    }

    /// Whether a load that enables GPUs by its probes, on the lane's vCPU, is under way or to come.
    fn load_enables(&self) -> bool {
        let loads = match self.load {
            Load::No => self.any(|gpu| !gpu.is_settled()),
            Load::Runs { .. } | Load::Failed { again: true } => true,
            Load::Loaded { .. } | Load::Failed { again: false } => false,
        };
        loads && self.lane.took.is_none()
    }

    /// Begins the steps of a GPU that waited in the lane.
    fn begin(&mut self, id: GpuId, stage: Stage, now: Time) {
        if let Some(gpu) = self.gpus.get_mut(&id) {
            gpu.started = Some(now);
            gpu.enter(stage, now);
        }
    }

    fn report(&mut self, now: Time, orders: &mut Vec<Order>) {
        let loaded = self.is_loaded();
        for (id, gpu) in &mut self.gpus {
            // Several report times may have passed at once, after a stall of the whole guest: the
            // last one counts.
            let mut waited = None;
            while gpu.next_report().is_some_and(|at| at <= now) {
                waited = Some(report_after(gpu.reports));
                gpu.reports += 1;
            }
            if let Some(waited) = waited {
                orders.push(Order::Late(*id, step_name(gpu.stage, loaded), waited));
            }
        }
    }

    /// Sets the deadline of the lockdown, if none is earlier.
    fn lock_down_after(&mut self, now: Time, limit: Limit) {
        let at = now + limit.after();
        self.lockdown = Some(self.lockdown.map_or(at, |earlier| earlier.min(at)));
    }

    fn settle(&mut self, now: Time, orders: &mut Vec<Order>) {
        let load_over = matches!(
            self.load,
            Load::No | Load::Failed { .. } | Load::Loaded { over: true, .. }
        );
        if !self.settled && load_over && self.gpus.values().all(Gpu::is_settled) {
            self.settled = true;
            let usable = self
                .gpus
                .values()
                .filter(|gpu| gpu.stage == Stage::Usable)
                .count();
            orders.push(Order::Settled {
                usable,
                failed: self.gpus.len() - usable,
            });
            // Modules stay loadable for a GPU plugged in later, which needs the driver: until the
            // deadline after a failed load; for ever without a load, unless no GPU is expected.
            match self.load {
                Load::Runs { .. } | Load::Loaded { .. } => self.lockdown = Some(now),
                Load::No if self.policy.no_gpus && self.gpus.is_empty() => {
                    self.lockdown = Some(now)
                }
                Load::No | Load::Failed { .. } => {}
            }
        }
        if !self.locked_down && self.lockdown.is_some_and(|at| at <= now) {
            self.locked_down = true;
            orders.push(Order::LockDown);
        }
    }
}

/// Name of a GPU's step in reports.
fn step_name(stage: Stage, loaded: bool) -> &'static str {
    match stage {
        Stage::New | Stage::Enabling => "enable",
        Stage::Enabled if loaded => "wait to be probed",
        Stage::Enabled | Stage::Probing(Probe::Load) => "driver load",
        Stage::Probing(_) | Stage::Probed => "probe",
        Stage::Bound => "wait to be initialised",
        Stage::Initialising => "initialisation",
        Stage::Initialised => "extras",
        Stage::Usable | Stage::Failed => "settled",
    }
}
