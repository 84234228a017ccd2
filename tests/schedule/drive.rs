//! Carries the orders of the product's schedule out in a world of locks, and reports what happens
//! to it: what `boot::gpus::{fleet, gpu, driver, lane}` do in a guest, with a virtual clock.
//!
//! A report or a beginning needs a vCPU: while all are gone, it waits.

use super::locks::{At, BETWEEN_CALLS, CALLS, Fact, Host, Micros, Order, World};
use super::policies::{Outcome, probes};
use kata_gpu_init::boot::bring_up::deadlines::Limit;
use kata_gpu_init::boot::bring_up::schedule::Schedule;
use kata_gpu_init::boot::bring_up::schedule_messages as schedule;
use kata_gpu_init::boot::bring_up::schedule_messages::{Arrival, GpuId, Probe};
use kata_gpu_init::boot::bring_up::strategy::{Facts, Policy};
use kata_gpu_wire::pci_address::PciAddress;
use std::time::Duration;

/// Grace periods that the end of a load waits for.
const AFTER_LOAD: u8 = 2;
/// Waiter for these grace periods.
const LOAD: u8 = u8::MAX;
/// Generations of GPUs that were plugged in, and from where an enabling is slow.
const PLUGGED: u32 = 100;
const SLOW: Micros = 100_000;
/// Time at which a run is given up.
const HORIZON: Micros = 400_000_000;

/// Durations of the guest's own steps.
#[derive(Clone, Copy, Debug, Default)]
pub struct Overhead {
    /// At most, from something that happens to its report; at random.
    pub report: Micros,
    /// Publishing a GPU.
    pub publish: Micros,
    /// The driver's files, behind the load.
    pub files: Micros,
    /// From a bind to the GPU's node: of the first GPU, beside the loads, and of each other one.
    pub node: [Micros; 2],
}

impl Overhead {
    /// As in a guest that has nothing else to do.
    pub const USUAL: Self = Self {
        report: 2_000,
        publish: 3_000,
        files: 100_000,
        node: [0; 2],
    };
}

/// The load of nvidia up to its first probe, and of nvidia-uvm, in such a guest.
pub const USUAL_LOAD: [Micros; 2] = [50_000, 20_000];

/// Policy of a guest that configures nothing, with a driver that initialises GPUs in parallel.
pub fn policy(gpus: usize, vcpus: usize) -> Policy {
    let facts = Facts {
        gpus,
        firewall: false,
        driver: "550.163.01".parse().ok(),
        init_on_probe: false,
        confidential: false,
        vcpus,
    };
    Policy::unconfigured(facts)
}

/// A container that the agent makes when all of these GPUs are published. Its program calls the
/// driver once, opens the GPUs, which waits until they are usable, and calls on until it computes.
#[derive(Clone, Debug)]
pub struct Container {
    /// Asked for at this time; the agent looks from then on, once a second.
    pub at: Micros,
    pub gpus: Vec<usize>,
    /// Grace periods of its creation.
    pub graces: u8,
    /// From the last of these to its program.
    pub starts: Micros,
    /// Program's own work between two of its calls.
    pub between_calls: Micros,
}

impl Container {
    /// A container whose creation waits for as many grace periods as the agent's, on a machine
    /// where the agent's own work takes no time.
    pub fn new(at: Micros, gpus: Vec<usize>) -> Self {
        Self {
            at,
            gpus,
            graces: 3,
            starts: RUNS,
            between_calls: BETWEEN_CALLS,
        }
    }

    /// A container that takes so long from its last look to its program, in a guest on this host
    /// that has nothing else to do.
    pub fn lasting(takes: Micros, host: &Host, at: Micros, gpus: Vec<usize>) -> Self {
        let new = Self::new(at, gpus);
        let waits = BEGINS + Micros::from(new.graces) * host.grace;
        Self {
            starts: takes.saturating_sub(waits),
            ..new
        }
    }

    /// A container for each GPU, all asked for at the begin.
    pub fn one_each(gpus: usize) -> Vec<Self> {
        (0..gpus).map(|gpu| Self::new(0, vec![gpu])).collect()
    }
}

/// How often the agent looks.
const LOOK: Micros = 1_000_000;
/// From its last look to what can be seen of its container; and from the last grace period to its
/// program.
const BEGINS: Micros = 40_000;
const RUNS: Micros = 60_000;
/// From an open to the first question whether its S1 is over.
const WATCHES: Micros = 1_000;

/// Result of a run.
#[derive(Clone, Debug, Default)]
pub struct Run {
    /// Times of GPUs; orders and facts of the world.
    pub outcome: Outcome,
    /// Reports to the schedule, and its orders.
    pub reports: Vec<(Micros, schedule::Fact)>,
    pub orders: Vec<(Micros, schedule::Order)>,
    /// When all was settled, if ever: usable and failed GPUs.
    pub settled: Option<(Micros, usize, usize)>,
    /// Per GPU: bound, published, usable.
    pub bound: Vec<Option<Micros>>,
    pub published: Vec<Option<Micros>>,
    pub usable: Vec<Option<Micros>>,
    /// Per GPU: reports of being late.
    pub late: Vec<usize>,
    /// Per container: its program runs, and computes.
    pub containers: Vec<Option<Micros>>,
    pub computes: Vec<Option<Micros>>,
    /// State of each GPU at the end.
    pub at: Vec<At>,
    /// An enabling of the lane that began beside an S1, an unsleeping probe, or a load that needs
    /// all CPUs.
    pub trespasses: Vec<(Micros, String)>,
}

/// Fault of a broken schedule, for controls; or what an ablation takes from it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Broken {
    #[default]
    No,
    /// Takes every host for a fast one: no enabling waits for anything.
    ThinksFast,
    /// Forgets that initialisations end.
    Forgets,
    /// Probes the next GPU although one is being probed.
    ProbesTwo,
    /// Enables the last GPU first.
    LastFirst,
    /// Takes the begin of an S1 for its end.
    SeesTooSoon,
    HearsNoContainer,
    HearsNoLook,
    /// Hears of publications that are over, and of none that begins.
    HearsNoPublication,
}

#[derive(Clone, Debug)]
enum Action {
    Report(schedule::Fact),
    Begin(Order),
    Open(GpuId),
    /// A probe is over, and its GPU's task looks at `information`, once the driver is loaded.
    Look(GpuId),
    Bound(GpuId),
    Publish(GpuId),
    Published(GpuId),
    FilesKnown,
    AgentLooks(usize),
    ContainerMade(usize),
    ContainerRuns(usize),
    Calls(usize),
}

struct Gpu {
    id: GpuId,
    gone: bool,
    /// Time at which its probe was ordered.
    ordered: Option<Micros>,
    /// Time at which it was opened.
    opened: Option<Micros>,
    enabling: Micros,
}

/// The guest around a schedule.
pub struct Guest<'h> {
    world: World<'h>,
    schedule: Schedule,
    gpus: Vec<Gpu>,
    pending: Vec<(Micros, u64, Action)>,
    count: u64,
    random: fastrand::Rng,
    overhead: Overhead,
    /// GPUs that a load may still try, one after another.
    candidates: Vec<usize>,
    control_ready: bool,
    /// Waiting for the load, or for the files.
    looks: Vec<GpuId>,
    binds: Vec<GpuId>,
    publications: Vec<GpuId>,
    load_failed: bool,
    load_ordered: Option<Micros>,
    registered: bool,
    /// The lane has enabled a GPU: from then on the schedule knows whether the host is slow.
    measured: bool,
    /// End of the last enabling or initialisation that took longer than its limit.
    overdue: Option<Micros>,
    containers: Vec<Container>,
    /// Calls that each container's program has made, and those that wait for GPUs to be usable.
    calls: Vec<u32>,
    opening: Vec<usize>,
    broken: Broken,
    run: Run,
}

fn time(at: Micros) -> Duration {
    Duration::from_micros(at)
}

/// Rounded up: a deadline has passed then.
fn micros(at: Duration) -> Micros {
    u64::try_from(at.as_nanos().div_ceil(1000)).unwrap_or(u64::MAX)
}

/// The address of a GPU in the world.
pub fn address(gpu: usize) -> PciAddress {
    format!("0001:00:{gpu:02x}.0")
        .parse()
        .unwrap_or_else(|error| panic!("address of GPU {gpu}: {error}"))
}

impl Gpu {
    fn new(id: GpuId) -> Self {
        Self {
            id,
            gone: false,
            ordered: None,
            opened: None,
            enabling: 0,
        }
    }
}

/// Runs a schedule of this policy on this host, until all is settled and made, or for long.
pub fn drive(
    host: &Host,
    policy: Policy,
    containers: &[Container],
    overhead: Overhead,
    seed: u64,
) -> Run {
    Guest::new(host, policy, containers, overhead, seed).run()
}

/// The same with a schedule that is broken.
pub fn drive_broken(
    host: &Host,
    policy: Policy,
    containers: &[Container],
    overhead: Overhead,
    seed: u64,
    broken: Broken,
) -> Run {
    Guest {
        broken,
        ..Guest::new(host, policy, containers, overhead, seed)
    }
    .run()
}

impl<'h> Guest<'h> {
    fn new(
        host: &'h Host,
        policy: Policy,
        containers: &[Container],
        overhead: Overhead,
        seed: u64,
    ) -> Self {
        let count = host.gpus.len();
        let gpus = (0..count).map(|k| {
            Gpu::new(GpuId {
                address: address(k),
                generation: k as u32,
            })
        });
        let run = Run {
            bound: vec![None; count],
            published: vec![None; count],
            usable: vec![None; count],
            late: vec![0; count],
            containers: vec![None; containers.len()],
            computes: vec![None; containers.len()],
            ..Run::default()
        };
        Self {
            world: World::new(host).recording(),
            schedule: Schedule::new(policy, Duration::ZERO),
            gpus: gpus.collect(),
            pending: Vec::new(),
            count: 0,
            random: fastrand::Rng::with_seed(seed),
            overhead,
            candidates: Vec::new(),
            control_ready: false,
            looks: Vec::new(),
            binds: Vec::new(),
            publications: Vec::new(),
            load_failed: false,
            load_ordered: None,
            registered: false,
            measured: false,
            overdue: None,
            containers: containers.to_vec(),
            calls: vec![0; containers.len()],
            opening: Vec::new(),
            broken: Broken::No,
            run,
        }
    }

    fn run(mut self) -> Run {
        for k in 0..self.gpus.len() {
            if self.world.at(k) == At::Present {
                self.report(schedule::Fact::Found(self.gpus[k].id, Arrival::Boot));
            }
        }
        self.report(schedule::Fact::Scanned);
        for at in 0..self.containers.len() {
            self.at(self.containers[at].at, Action::AgentLooks(at));
        }
        self.listen();
        while self.world.now() < HORIZON && !self.is_over() {
            let frozen = self.world.is_frozen();
            let due = self.pending.iter().map(|(at, ..)| *at).min();
            let deadline = self.schedule.deadline(time(self.world.now())).map(micros);
            let limit = due
                .into_iter()
                .chain(deadline)
                .min()
                .map(|at| at.max(self.world.now()));
            if limit.is_none_or(|at| frozen || at > self.world.now()) {
                let limit = limit.filter(|_| !frozen);
                if !self.world.advance(limit) {
                    break;
                }
            }
            self.listen();
            if !self.world.is_frozen() {
                self.act();
            }
        }
        self.run.outcome.spun = self.world.spun();
        self.run.at = (0..self.gpus.len()).map(|k| self.world.at(k)).collect();
        self.run.outcome = self.run.outcome.summed_up();
        self.run
    }

    fn is_over(&self) -> bool {
        let mut containers = self.containers.iter().enumerate();
        let made = containers.all(|(c, wanted)| match self.run.containers[c] {
            Some(_) => {
                self.run.computes[c].is_some() || wanted.gpus.is_empty() || !self.are_usable(wanted)
            }
            None => !self.can_be_made(wanted),
        });
        self.run.settled.is_some()
            && self
                .pending
                .iter()
                .all(|(_, _, action)| matches!(action, Action::AgentLooks(_)))
            && made
            && !self.more_to_come()
    }

    fn can_be_made(&self, container: &Container) -> bool {
        container
            .gpus
            .iter()
            .all(|k| self.run.published[*k].is_some())
    }

    fn are_usable(&self, container: &Container) -> bool {
        let mut gpus = container.gpus.iter();
        gpus.all(|gpu| self.world.at(*gpu) == At::Usable)
    }

    /// GPUs that will be plugged in or torn out.
    fn more_to_come(&self) -> bool {
        let functions = self.world.host().gpus.iter();
        functions
            .flat_map(|f| [f.plugged_at, f.removed_at])
            .flatten()
            .any(|at| at > self.world.now())
    }

    fn at(&mut self, at: Micros, action: Action) {
        self.count += 1;
        self.pending.push((at, self.count, action));
    }

    fn soon(&mut self, action: Action) {
        self.soon_after(0, action);
    }

    /// Like `soon`, once work has taken this time.
    fn soon_after(&mut self, work: Micros, action: Action) {
        let later = self.random.u64(0..=self.overhead.report);
        self.at(self.world.now() + work + later, action);
    }

    /// Hears all that has happened.
    fn listen(&mut self) {
        for (at, fact) in self.world.facts() {
            self.run.outcome.facts.push((at, fact));
            self.hear(fact);
        }
        if self.world.registered() && !self.registered {
            self.registered = true;
            self.soon(Action::Report(schedule::Fact::Registered));
        }
    }

    /// Takes all due actions, one after another: each may order something, and may be over in the
    /// same moment.
    fn act(&mut self) {
        let mut woken = false;
        loop {
            self.listen();
            let now = self.world.now();
            let due = self
                .pending
                .iter()
                .enumerate()
                .filter(|(_, (at, ..))| *at <= now);
            let next = due.min_by_key(|(_, (at, count, _))| (*at, *count));
            match next {
                Some((next, _)) => {
                    let (_, _, action) = self.pending.swap_remove(next);
                    self.take(action);
                }
                None if woken => return,
                None => {
                    let orders = self.schedule.wake(time(now));
                    self.carry_out(orders);
                    woken = true;
                }
            }
            if self.world.is_frozen() {
                return;
            }
        }
    }

    fn report(&mut self, fact: schedule::Fact) {
        use schedule::Fact as F;
        let is_heard = match self.broken {
            Broken::Forgets => !matches!(fact, F::Initialised(..) | F::Usable(_)),
            Broken::HearsNoContainer => !matches!(fact, F::ContainerBegins | F::ContainerRuns),
            Broken::HearsNoLook => fact != F::AgentLooked,
            Broken::HearsNoPublication => !matches!(fact, F::Publishing(_)),
            _ => true,
        };
        if !is_heard {
            return;
        }
        self.run.reports.push((self.world.now(), fact));
        if matches!(fact, schedule::Fact::Found(..)) {
            self.run.settled = None;
        }
        let orders = self.schedule.take(time(self.world.now()), fact);
        self.carry_out(orders);
    }

    fn index(&self, id: GpuId) -> Option<usize> {
        self.gpus.iter().position(|gpu| gpu.id == id && !gpu.gone)
    }

    /// Something happened in the world.
    fn hear(&mut self, fact: Fact) {
        let id = |guest: &Self, k: usize| guest.gpus[k].id;
        self.measured |= matches!(fact, Fact::Enabled(..));
        let limited = match fact {
            Fact::Enabled(k, _) => Some((self.gpus[k].enabling, Limit::LaneFirst)),
            Fact::Initialised(k, _) => self.gpus[k].opened.map(|opened| (opened, Limit::InitHangs)),
            _ => None,
        };
        if limited.is_some_and(|(since, limit)| since + micros(limit.after()) <= self.world.now()) {
            self.overdue = Some(self.world.now());
        }
        match fact {
            Fact::Plugged(k) => {
                let mut plugged = id(self, k);
                plugged.generation += PLUGGED;
                self.gpus[k] = Gpu::new(plugged);
                self.soon(Action::Report(schedule::Fact::Found(
                    id(self, k),
                    Arrival::Enabled,
                )));
                // The kernel lets a driver that is there have it.
                if self.world.registered() {
                    self.soon(Action::Begin(Order::Probe(k)));
                }
            }
            Fact::Removed(k) => {
                let gone = id(self, k);
                self.gpus[k].gone = true;
                self.soon(Action::Report(schedule::Fact::Gone(gone)));
            }
            Fact::Enabled(k, true) => {
                let took = self.world.now() - self.gpus[k].enabling;
                let took = if self.broken == Broken::ThinksFast {
                    0
                } else {
                    took
                };
                self.soon(Action::Report(schedule::Fact::Enabled(
                    id(self, k),
                    time(took),
                )));
            }
            Fact::Enabled(k, false) | Fact::Probed(k, false) => {
                self.soon(Action::Report(schedule::Fact::Failed(id(self, k))));
            }
            Fact::Probed(k, true) => self.soon(Action::Look(id(self, k))),
            Fact::Looked(k) => {
                let is_first = self.run.bound.iter().all(Option::is_none);
                let node = self.overhead.node[usize::from(!is_first)];
                self.soon_after(node, Action::Bound(id(self, k)));
            }
            Fact::Attached(_) => {}
            Fact::Seen(k) => self.soon(Action::Report(schedule::Fact::Attached(id(self, k)))),
            Fact::Initialised(k, well) => {
                let gpu = id(self, k);
                if well {
                    self.run.usable[k] = Some(self.world.now());
                    for program in std::mem::take(&mut self.opening) {
                        self.opens(program);
                    }
                }
                self.soon(Action::Report(schedule::Fact::Initialised(gpu, well)));
                let end = if well {
                    schedule::Fact::Usable(gpu)
                } else {
                    schedule::Fact::Failed(gpu)
                };
                self.at(self.world.now() + self.overhead.report, Action::Report(end));
            }
            Fact::Loaded(true) => {
                self.soon(Action::Report(schedule::Fact::Loaded(true)));
                for gpu in std::mem::take(&mut self.looks) {
                    self.soon(Action::Look(gpu));
                }
                for gpu in std::mem::take(&mut self.binds) {
                    if let Some(k) = self.index(gpu) {
                        self.soon(Action::Begin(Order::Probe(k)));
                    }
                }
            }
            Fact::Loaded(false) => match self.candidates.pop() {
                Some(next) => self.soon(Action::Begin(Order::Load(next))),
                None => {
                    self.load_failed = true;
                    for gpu in std::mem::take(&mut self.binds) {
                        self.soon(Action::Report(schedule::Fact::Failed(gpu)));
                    }
                    self.soon(Action::Report(schedule::Fact::Loaded(false)));
                    self.soon(Action::Report(schedule::Fact::LoadOver));
                }
            },
            Fact::UvmLoaded => {
                self.soon(Action::Report(schedule::Fact::UvmLoaded));
                self.at(self.world.now() + self.overhead.files, Action::FilesKnown);
                self.soon(Action::Begin(Order::Wait(LOAD, AFTER_LOAD)));
            }
            Fact::Waited(LOAD) => self.soon(Action::Report(schedule::Fact::LoadOver)),
            Fact::Waited(container) => {
                let container = usize::from(container);
                let starts = self.containers[container].starts;
                let runs = Action::ContainerRuns(container);
                self.at(self.world.now() + starts, runs);
            }
            Fact::Called(program) => {
                self.calls[program] += 1;
                match self.calls[program] {
                    1 => self.opens(program),
                    CALLS => self.run.computes[program] = Some(self.world.now()),
                    _ => self.calls_next(program),
                }
            }
        }
    }

    /// A program opens its GPUs, or waits for one of them.
    fn opens(&mut self, program: usize) {
        match self.are_usable(&self.containers[program]) {
            true => self.calls_next(program),
            false => self.opening.push(program),
        }
    }

    fn calls_next(&mut self, program: usize) {
        let between = self.containers[program].between_calls;
        self.at(self.world.now() + between, Action::Calls(program));
    }

    /// Somebody in the guest does something.
    fn take(&mut self, action: Action) {
        match action {
            Action::Report(fact) => self.report(fact),
            Action::Begin(order) => self.begin(order),
            Action::Open(gpu) => {
                if let Some(k) = self.index(gpu) {
                    self.gpus[k].opened = Some(self.world.now());
                    self.report(schedule::Fact::Opening(gpu));
                    self.begin(Order::Open(k));
                    self.soon(Action::Report(schedule::Fact::Opened(gpu)));
                    if self.broken == Broken::SeesTooSoon {
                        self.report(schedule::Fact::Attached(gpu));
                    } else if self.world.host().sees_attach {
                        let watch = Action::Begin(Order::Watch(k));
                        self.at(self.world.now() + WATCHES, watch);
                    } else {
                        self.soon(Action::Report(schedule::Fact::AttachUnseen(gpu)));
                    }
                }
            }
            Action::Look(gpu) if !self.world.loaded() => self.looks.push(gpu),
            Action::Look(gpu) => {
                if let Some(k) = self.index(gpu).filter(|k| self.world.at(*k) == At::Bound) {
                    self.begin(Order::Look(k));
                }
            }
            Action::Bound(gpu) => {
                if let Some(k) = self.index(gpu) {
                    self.run.bound[k] = Some(self.world.now());
                    self.report(schedule::Fact::Bound(gpu));
                    self.report(schedule::Fact::Publishing(gpu));
                    self.take(Action::Publish(gpu));
                }
            }
            Action::Publish(gpu) if !self.control_ready => self.publications.push(gpu),
            Action::Publish(gpu) => self.at(
                self.world.now() + self.overhead.publish,
                Action::Published(gpu),
            ),
            Action::Published(gpu) => {
                if let Some(k) = self.index(gpu) {
                    self.run.published[k] = self.run.published[k].or(Some(self.world.now()));
                }
                self.report(schedule::Fact::Published(gpu));
            }
            Action::FilesKnown => {
                self.control_ready = true;
                for gpu in std::mem::take(&mut self.publications) {
                    self.take(Action::Publish(gpu));
                }
            }
            Action::AgentLooks(container) => {
                let ready = self.can_be_made(&self.containers[container]);
                // Nobody looks for a container without devices.
                if !self.containers[container].gpus.is_empty() {
                    self.report(schedule::Fact::AgentLooked);
                }
                let (after, next) = match ready {
                    true => (BEGINS, Action::ContainerMade(container)),
                    false => (LOOK, Action::AgentLooks(container)),
                };
                self.at(self.world.now() + after, next);
            }
            Action::ContainerMade(container) => {
                self.report(schedule::Fact::ContainerBegins);
                let graces = self.containers[container].graces;
                self.begin(Order::Wait(container as u8, graces));
            }
            Action::ContainerRuns(container) => {
                self.run.containers[container] = Some(self.world.now());
                self.report(schedule::Fact::ContainerRuns);
                if !self.containers[container].gpus.is_empty() {
                    self.take(Action::Calls(container));
                }
            }
            Action::Calls(container) => self.begin(Order::Call(container)),
        }
    }

    fn begin(&mut self, order: Order) {
        self.run.outcome.orders.push((self.world.now(), order));
        match order {
            // Gone, or in the kernel's hands already.
            Order::Probe(k) | Order::Enable(k)
                if !matches!(self.world.at(k), At::Present | At::Enabled) => {}
            Order::Probe(k) if !self.world.registered() => {
                // Beside a load that has failed: its turn comes when another load is over.
                if self.gpus[k].ordered.is_some() {
                    self.binds.push(self.gpus[k].id);
                }
            }
            Order::Open(k) if self.world.at(k) != At::Known => {}
            order => self.world.order(order),
        }
    }

    fn carry_out(&mut self, orders: Vec<schedule::Order>) {
        for order in orders {
            let order = self.broken_order(order);
            self.run.orders.push((self.world.now(), order.clone()));
            match order {
                schedule::Order::Enable(gpu, _) => {
                    if let Some(k) = self.index(gpu) {
                        self.gpus[k].enabling = self.world.now();
                        self.watch(k);
                        self.begin(Order::Enable(k));
                    }
                }
                schedule::Order::Load {
                    gpus, one_by_one, ..
                } => {
                    // A load after a failed one starts afresh.
                    (self.load_ordered, self.load_failed) = (Some(self.world.now()), false);
                    let gpus: Vec<usize> =
                        gpus.into_iter().filter_map(|gpu| self.index(gpu)).collect();
                    let later = gpus.iter().skip(1).filter(|_| one_by_one);
                    self.candidates = later.rev().copied().collect();
                    match gpus.first() {
                        Some(first) if one_by_one => self.begin(Order::Load(*first)),
                        _ => self.begin(Order::LoadAll),
                    }
                }
                schedule::Order::Probe(gpu, how) => {
                    if let Some(k) = self.index(gpu) {
                        self.gpus[k].ordered = Some(self.world.now());
                        self.begin_probe(k, how);
                    }
                }
                schedule::Order::Initialise(gpu) => self.soon(Action::Open(gpu)),
                schedule::Order::Late(gpu, ..) => {
                    if let Some(k) = self.index(gpu) {
                        self.run.late[k] += 1;
                    }
                }
                schedule::Order::Settled { usable, failed } => {
                    self.run.settled = Some((self.world.now(), usable, failed));
                }
                schedule::Order::Chosen(..) | schedule::Order::Wait(_) => {}
                schedule::Order::LaneOver | schedule::Order::LockDown => {}
            }
        }
    }

    fn broken_order(&mut self, order: schedule::Order) -> schedule::Order {
        match (self.broken, order) {
            (Broken::LastFirst, schedule::Order::Enable(gpu, holds)) => {
                let last = (0..self.gpus.len())
                    .rev()
                    .find(|k| self.world.at(*k) == At::Present);
                schedule::Order::Enable(last.map_or(gpu, |k| self.gpus[k].id), holds)
            }
            (Broken::ProbesTwo, schedule::Order::Probe(gpu, Probe::Bind)) => {
                let enabled = |k: &usize| self.world.at(*k) == At::Enabled;
                let other = (0..self.gpus.len()).find(|k| enabled(k) && self.gpus[*k].id != gpu);
                if let Some(other) = other {
                    let probe = schedule::Order::Probe(self.gpus[other].id, Probe::Bind);
                    self.run.orders.push((self.world.now(), probe));
                    self.begin(Order::Probe(other));
                }
                schedule::Order::Probe(gpu, Probe::Bind)
            }
            (_, order) => order,
        }
    }

    fn begin_probe(&mut self, k: usize, how: Probe) {
        match how {
            Probe::Load => {}
            // A probe by the kernel has failed before the GPU was found, and so does the next one.
            Probe::Bind | Probe::DuringLoad | Probe::BeforeEnable
                if self.load_failed || self.world.at(k) == At::Failed =>
            {
                let gpu = self.gpus[k].id;
                self.soon(Action::Report(schedule::Fact::Failed(gpu)));
            }
            Probe::Bind | Probe::DuringLoad | Probe::BeforeEnable => self.begin(Order::Probe(k)),
        }
    }

    /// Notes the steps that an enabling of the lane stalls as it begins. Not counted: steps that
    /// the schedule has waited for as long as the table says, steps that the kernel takes by itself
    /// with a GPU that was plugged in, and what these, or a step longer than its limit, have
    /// stalled. Nothing counts before the first enabling, which shows how slow the host is.
    fn watch(&mut self, k: usize) {
        let now = self.world.now();
        let limit = micros(Limit::LaneHold.after());
        let initialises = |k| matches!(self.world.at(k), At::Attach(_) | At::Boot | At::State(_));
        let hangs = |(k, gpu): (usize, &Gpu)| {
            initialises(k)
                && gpu
                    .opened
                    .is_some_and(|at| at + micros(Limit::InitHangs.after()) <= now)
        };
        let overdue = if self.gpus.iter().enumerate().any(hangs) {
            Some(now)
        } else {
            self.overdue
        };
        let stalls = [self.world.kernel_mapped(), overdue];
        let stalled = |since: Micros| stalls.into_iter().flatten().any(|at| since <= at);
        let within = |since: Option<Micros>| {
            since.is_some_and(|since| now < since + limit && !stalled(since))
        };
        let of = |wanted: &dyn Fn(&Gpu, usize) -> bool| -> Vec<usize> {
            (0..self.gpus.len())
                .filter(|k| wanted(&self.gpus[*k], *k))
                .collect()
        };
        let probing = of(&|gpu, k| {
            gpu.id.generation < PLUGGED && within(gpu.ordered) && probes(&self.world, k)
        });
        let attaching = of(&|gpu, k| within(gpu.opened) && self.world.attaches(k));
        let loading = self.world.load_begun() && !self.world.uvm_loaded();
        let loading = loading && !self.load_sleeps() && within(self.load_ordered);
        let slow = self.measured && self.world.host().gpus[k].times.enable >= SLOW;
        if slow && (!attaching.is_empty() || !probing.is_empty() || loading) {
            let what =
                format!("GPU {k}: attaching {attaching:?}, probing {probing:?}, loading {loading}");
            self.run.trespasses.push((now, what));
        }
    }

    /// The load's own probe sleeps behind a firewall.
    fn load_sleeps(&self) -> bool {
        self.world.registered()
            && !self.world.loaded()
            && self.world.counts(|at| at == At::Sleep) > 0
    }
}
