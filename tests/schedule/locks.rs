//! The locks of host and driver in virtual time: what an order costs, without a kernel. A
//! discrete-event simulator; times are microseconds.
//!
//! - H, the host's: held by an enabling, for all of it, with its vCPU gone. Every config access of
//!   any function waits for it, spinning with interrupts off.
//! - A, the driver's, FIFO: held by S1, by S2 unless relaxed, by S3; for a moment by the end of a
//!   probe, by a look at `information` and by the start of nvidia-uvm.
//! - G, one a GPU: held by its S1 and S2. An S3 takes A and then waits for every G with A held. It
//!   makes config accesses as it begins, and later on.
//!
//! A program of a container calls the driver many times before it computes ([`CALLS`]): each call
//! takes A and then waits for every G with A held, as an S3 does. Somebody who wants to see the end
//! of an S1 takes A once.
//!
//! A grace period that meets an enabling ends with it. A load needs all CPUs at its start and at
//! its end: it spins beside an enabling. A step that is due while every vCPU is gone happens when
//! the enabling ends.
//!
//! Invariants: the same orders at the same times give the same run; a world is a value, so that a
//! search can branch; nothing here decides anything. What it is not: the driver (`tests/simulator`
//! is nearer to that, and `tests/vm` runs it), or a model of how long the guest's own work takes.

mod calls;
mod run;

pub use calls::{BETWEEN_CALLS, CALL, CALLS};

/// Virtual time.
pub type Micros = u64;

/// GPUs in one world, at most.
pub const MOST: usize = 16;

/// Config accesses of an S1, in thousandths of it (`nv_attach_groups` of the simulator's
/// nvidia-adapter.c).
const GROUPS: [u64; 6] = [0, 695, 735, 850, 868, 1000];

/// Config accesses of an S3, in thousandths of it (`nv_state_groups`, in the same file).
const STATE_GROUPS: [u64; 3] = [0, 700, 1000];

/// Time of a part before a group of its accesses, of `whole` for all of it. None: there is no such
/// group.
fn before_group(groups: &[u64], group: u8, whole: Micros) -> Option<Micros> {
    let at = groups.get(usize::from(group))?;
    Some(whole * at / 1000)
}

/// Durations of a GPU's steps on this host with this driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Times {
    pub enable: Micros,
    /// The sleep at the start of a probe.
    pub firewall: Micros,
    pub probe: Micros,
    pub s1: Micros,
    pub s2: Micros,
    pub s3: Micros,
}

/// Fault of a GPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Fault {
    #[default]
    None,
    EnableFails,
    ProbeFails,
    /// Never returns; holds no lock.
    ProbeHangs,
    /// At the end of S2.
    InitFails,
    /// In S2, with its G (and with A unless relaxed) held for ever.
    InitHangs,
}

/// A GPU as the host presents it.
#[derive(Clone, Copy, Debug)]
pub struct Function {
    pub times: Times,
    pub fault: Fault,
    /// Not there before this time.
    pub plugged_at: Option<Micros>,
    /// Torn out at this time.
    pub removed_at: Option<Micros>,
}

/// A host and a driver.
#[derive(Clone, Debug)]
pub struct Host {
    pub vcpus: usize,
    /// S2 without A.
    pub relaxed: bool,
    /// Somebody who waits for A sees the end of S1.
    pub sees_attach: bool,
    /// The load of nvidia up to its first probe, and that of nvidia-uvm. None: both are loaded when
    /// time begins.
    pub load: Option<[Micros; 2]>,
    /// A grace period that meets no enabling.
    pub grace: Micros,
    pub gpus: Vec<Function>,
}

impl Host {
    /// `count` equal GPUs without faults, a relaxed driver that is loaded, vCPUs to spare.
    pub fn of(count: usize, times: Times) -> Self {
        let gpu = Function {
            times,
            fault: Fault::None,
            plugged_at: None,
            removed_at: None,
        };
        Self {
            vcpus: 4,
            relaxed: true,
            sees_attach: true,
            load: None,
            grace: 5_000,
            gpus: vec![gpu; count],
        }
    }

    /// The same with a driver that is still to be loaded; the load takes no time of its own.
    pub fn to_be_loaded(&self) -> Self {
        Self {
            load: Some([0, 0]),
            grace: 0,
            ..self.clone()
        }
    }
}

/// An order that a schedule can give.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// nvidia, which probes this GPU, then nvidia-uvm.
    Load(usize),
    /// The same, but it probes all GPUs.
    LoadAll,
    /// sysfs `enable`.
    Enable(usize),
    /// The driver's probe; it enables, after its sleep, what is not enabled.
    Probe(usize),
    /// Reads `information`, after which the GPU can be published.
    Look(usize),
    /// Opens, which initialises.
    Open(usize),
    /// Waits for so many grace periods, as who creates a container does.
    Wait(u8, u8),
    /// Asks for A, to see the end of an S1.
    Watch(usize),
    /// One call of a program.
    Call(usize),
}

/// A fact that is reported to a schedule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fact {
    Plugged(usize),
    Removed(usize),
    Enabled(usize, bool),
    /// The probe has ended, and whether it bound the GPU.
    Probed(usize, bool),
    Looked(usize),
    /// S1 is over.
    Attached(usize),
    /// End of S1, as whoever watches for it sees it.
    Seen(usize),
    /// The call of a program is over.
    Called(usize),
    Initialised(usize, bool),
    /// nvidia is loaded, and character devices can be opened; or no probe succeeded.
    Loaded(bool),
    UvmLoaded,
    /// The last of the grace periods that were waited for is over.
    Waited(u8),
}

/// State of a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum At {
    Absent,
    Present,
    /// In the lane's hands.
    Enable,
    Enabled,
    /// In its probe, until the firewall is down.
    Sleep,
    /// In its probe, which enables.
    ProbeEnable,
    Probe,
    /// The end of a probe, under A, with config accesses.
    Uuid,
    Bound,
    /// A look at `information`, as the end of a probe.
    Look,
    Known,
    /// S1, before the config accesses of this group.
    Attach(u8),
    /// S2.
    Boot,
    /// S3, before the config accesses of this group.
    State(u8),
    Usable,
    Failed,
    Hung,
}

/// Condition that a thread waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Wait {
    Nothing,
    Until(Micros),
    Host,
    Driver,
    EveryGpu,
}

#[derive(Clone, Copy, Debug)]
struct Gpu {
    at: At,
    wait: Wait,
    enabled: bool,
    removed: bool,
}

/// The load's thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Load {
    NotBegun,
    /// Copies, then needs all CPUs.
    Begins(usize, Micros),
    /// In the registration: probes this GPU, then waits for each GPU, in order, that is being
    /// probed. Step 0, then the GPUs.
    Registers(usize, usize),
    /// Needs all CPUs.
    Ends,
    /// nvidia-uvm: needs A for a moment.
    Uvm(Micros),
    UvmWaits,
    UvmEnds,
    Over,
}

/// Waiters, first come first served.
#[derive(Clone, Copy, Debug)]
struct Queue {
    who: [u8; WAITERS],
    len: usize,
}

impl Queue {
    const EMPTY: Self = Self {
        who: [0; WAITERS],
        len: 0,
    };

    fn push(&mut self, who: usize) {
        self.who[self.len] = who as u8;
        self.len += 1;
    }

    fn pop(&mut self) -> Option<usize> {
        let first = self.who[..self.len].first().map(|w| usize::from(*w))?;
        self.who.copy_within(1..self.len, 0);
        self.len -= 1;
        Some(first)
    }

    fn position(&self, who: usize) -> usize {
        self.who[..self.len]
            .iter()
            .position(|w| usize::from(*w) == who)
            .map_or(0, |p| p + 1)
    }
}

/// Places in A's queue behind the GPUs': the load's, and the first one's of those who watch, and of
/// the programs.
const LOADER: usize = MOST;
const WATCHERS: usize = LOADER + 1;
const PROGRAMS: usize = WATCHERS + MOST;
/// Most waiters of one lock: somebody may still watch a GPU that was plugged in again.
const WAITERS: usize = PROGRAMS + 2 * MOST;

/// Somebody who waits for grace periods.
#[derive(Clone, Copy, Debug)]
struct Waiter {
    who: u8,
    left: u8,
    grace_ends: Micros,
}

/// Host, driver and guest at one moment.
#[derive(Clone, Debug)]
pub struct World<'h> {
    host: &'h Host,
    now: Micros,
    gpus: [Gpu; MOST],
    /// The GPU whose enabling holds H.
    mapping: Option<usize>,
    for_host: Queue,
    driver_holder: Option<usize>,
    for_driver: Queue,
    load: Load,
    /// GPUs that the load probes, one bit each.
    load_probes: u32,
    waiters: Vec<Waiter>,
    /// Programs that call the driver, each with what it waits for.
    calls: Vec<(usize, Wait)>,
    facts: Vec<(Micros, Fact)>,
    recording: bool,
    spun: Micros,
    /// See [`World::kernel_mapped`].
    kernel_mapped: Option<Micros>,
}

impl<'h> World<'h> {
    pub fn new(host: &'h Host) -> Self {
        assert!(host.gpus.len() <= MOST, "{MOST} GPUs at most");
        let absent = Gpu {
            at: At::Absent,
            wait: Wait::Nothing,
            enabled: false,
            removed: false,
        };
        let mut gpus = [absent; MOST];
        for (gpu, function) in gpus.iter_mut().zip(&host.gpus) {
            // A GPU that is removed before it is plugged in was present.
            let removed_before =
                |plugged| function.removed_at.is_some_and(|removed| removed < plugged);
            if function.plugged_at.is_none_or(removed_before) {
                gpu.at = At::Present;
            }
        }
        Self {
            host,
            now: 0,
            gpus,
            mapping: None,
            for_host: Queue::EMPTY,
            driver_holder: None,
            for_driver: Queue::EMPTY,
            load: if host.load.is_some() {
                Load::NotBegun
            } else {
                Load::Over
            },
            load_probes: 0,
            waiters: Vec::new(),
            calls: Vec::new(),
            facts: Vec::new(),
            recording: false,
            spun: 0,
            kernel_mapped: None,
        }
    }

    /// Keeps facts for [`World::facts`].
    pub fn recording(mut self) -> Self {
        self.recording = true;
        self
    }

    pub fn host(&self) -> &'h Host {
        self.host
    }

    pub fn now(&self) -> Micros {
        self.now
    }

    pub fn count(&self) -> usize {
        self.host.gpus.len()
    }

    pub fn at(&self, gpu: usize) -> At {
        self.gpus[gpu].at
    }

    pub fn waits(&self, gpu: usize) -> Wait {
        self.gpus[gpu].wait
    }

    /// Its BARs are mapped.
    pub fn is_enabled(&self, gpu: usize) -> bool {
        self.gpus[gpu].enabled
    }

    /// GPUs for which that holds.
    pub fn counts(&self, is: impl Fn(At) -> bool) -> usize {
        self.gpus[..self.count()]
            .iter()
            .filter(|g| is(g.at))
            .count()
    }

    /// The first GPU, in PCI order, that is there.
    pub fn first(&self, at: At) -> Option<usize> {
        self.gpus[..self.count()].iter().position(|g| g.at == at)
    }

    /// The GPU that the host maps.
    pub fn mapping(&self) -> Option<usize> {
        self.mapping
    }

    /// Threads that spin while the host maps: for H, or for the vCPU that maps.
    pub fn spinning(&self) -> usize {
        if self.mapping.is_some() {
            self.for_host.len + usize::from(self.load_spins())
        } else {
            0
        }
    }

    /// Those of them that are about to begin an S3: one at most.
    pub fn states_to_begin(&self) -> usize {
        let waits = |gpu: &usize| self.at(*gpu) == At::State(0) && self.waits(*gpu) == Wait::Host;
        (0..self.count()).filter(waits).count()
    }

    /// How long threads have spun, all together.
    pub fn spun(&self) -> Micros {
        self.spun
    }

    /// No vCPU is left that could do anything.
    pub fn is_frozen(&self) -> bool {
        self.mapping.is_some() && 1 + self.spinning() >= self.host.vcpus
    }

    /// Somebody is in an S1 that has begun: an enabling that begins now would stall it with A held.
    pub fn attaching(&self) -> bool {
        (0..self.count()).any(|gpu| self.attaches(gpu))
    }

    /// Whether a GPU's S1 has begun.
    pub fn attaches(&self, gpu: usize) -> bool {
        matches!(self.at(gpu), At::Attach(_)) && self.waits(gpu) != Wait::Driver
    }

    /// Somebody is in an S3 that has begun, and has config accesses to come.
    pub fn loads_state(&self) -> bool {
        self.is_in_group_of_s3(STATE_GROUPS.len() - 1)
    }

    /// Somebody is in an S3 that has begun.
    pub fn is_in_s3(&self) -> bool {
        self.is_in_group_of_s3(STATE_GROUPS.len())
    }

    /// Somebody is in an S3 that has begun, in a group of its steps before this one.
    fn is_in_group_of_s3(&self, before: usize) -> bool {
        (0..self.count()).any(|gpu| {
            matches!(self.at(gpu), At::State(group) if usize::from(group) < before)
                && !matches!(self.waits(gpu), Wait::Driver | Wait::EveryGpu)
        })
    }

    /// Time left of the S3 of a GPU that is in it, or waits for it.
    pub fn s3_left(&self, gpu: usize) -> Micros {
        let s3 = self.host.gpus[gpu].times.s3;
        match self.at(gpu) {
            At::State(group) => {
                self.timer_left(gpu) + s3 - before_group(&STATE_GROUPS, group, s3).unwrap_or(s3)
            }
            _ => 0,
        }
    }

    /// Character devices are there.
    pub fn loaded(&self) -> bool {
        matches!(
            self.load,
            Load::Uvm(_) | Load::UvmWaits | Load::UvmEnds | Load::Over
        )
    }

    pub fn load_begun(&self) -> bool {
        self.load != Load::NotBegun
    }

    /// The driver has entered itself at the bus: probes are possible.
    pub fn registered(&self) -> bool {
        !matches!(self.load, Load::NotBegun | Load::Begins(..))
    }

    pub fn uvm_loaded(&self) -> bool {
        self.load == Load::Over
    }

    /// Time left of the timer that a GPU waits for.
    pub fn timer_left(&self, gpu: usize) -> Micros {
        match self.gpus[gpu].wait {
            Wait::Until(at) => at.saturating_sub(self.now),
            Wait::Nothing | Wait::Host | Wait::Driver | Wait::EveryGpu => 0,
        }
    }

    /// Time left of the S1 of a GPU that is in it, or waits for it.
    pub fn s1_left(&self, gpu: usize) -> Micros {
        let s1 = self.host.gpus[gpu].times.s1;
        match self.at(gpu) {
            At::Attach(group) => {
                self.timer_left(gpu) + s1 - before_group(&GROUPS, group, s1).unwrap_or(s1)
            }
            _ => 0,
        }
    }

    /// Everybody is usable, failed, hung or gone.
    pub fn settled(&self) -> bool {
        self.counts(|at| !matches!(at, At::Absent | At::Usable | At::Failed | At::Hung)) == 0
    }

    /// Takes the facts since the last call.
    pub fn facts(&mut self) -> Vec<(Micros, Fact)> {
        std::mem::take(&mut self.facts)
    }

    fn report(&mut self, fact: Fact) {
        if self.recording {
            self.facts.push((self.now, fact));
        }
    }

    fn begin_load(&mut self, first: usize, probes: u32) {
        assert_eq!(self.load, Load::NotBegun, "a second load");
        let [nvidia, _] = self.host.load.unwrap_or_default();
        self.load = Load::Begins(first, self.now + nvidia);
        self.load_probes = probes;
    }

    /// Begins what is ordered; panics where the order is not possible, as a real kernel would
    /// refuse it.
    pub fn order(&mut self, order: Order) {
        match order {
            Order::Load(gpu) => self.begin_load(gpu, 1 << gpu),
            Order::LoadAll => self.begin_load(0, u32::MAX),
            Order::Enable(gpu) => {
                assert_eq!(
                    self.at(gpu),
                    At::Present,
                    "enable GPU {gpu} at {}",
                    self.now
                );
                self.gpus[gpu].at = At::Enable;
                self.wait_for_host(gpu);
            }
            Order::Probe(gpu) => {
                let at = self.at(gpu);
                assert!(
                    matches!(at, At::Present | At::Enabled),
                    "probe GPU {gpu}: {at:?} at {}",
                    self.now
                );
                assert!(self.registered(), "probe GPU {gpu}: no driver");
                self.begin_probe(gpu);
            }
            Order::Look(gpu) => {
                assert_eq!(self.at(gpu), At::Bound, "look at GPU {gpu} at {}", self.now);
                self.gpus[gpu].at = At::Look;
                self.wait_for_driver(gpu);
            }
            Order::Open(gpu) => {
                let at = self.at(gpu);
                assert!(
                    matches!(at, At::Bound | At::Known),
                    "open GPU {gpu}: {at:?} at {}",
                    self.now
                );
                assert!(self.loaded(), "open GPU {gpu}: no character device");
                self.gpus[gpu].at = At::Attach(0);
                self.wait_for_driver(gpu);
            }
            Order::Wait(who, left) => {
                let grace_ends = self.now + self.host.grace;
                self.waiters.push(Waiter {
                    who,
                    left,
                    grace_ends,
                });
            }
            Order::Watch(gpu) => self.wait_for_driver(WATCHERS + gpu),
            Order::Call(program) => self.begin_call(program),
        }
        self.settle();
    }

    /// The same for two worlds of equal GPUs that go on alike, whatever the time and whichever GPU
    /// is which. Nobody may watch or call in them.
    pub fn shape(&self) -> u128 {
        let mut keys = [0u128; MOST];
        let relative = |at: Micros| u128::from(at.saturating_sub(self.now));
        for (k, key) in keys.iter_mut().enumerate().take(self.count()) {
            let gpu = &self.gpus[k];
            let at = match gpu.at {
                At::Attach(group) => 32 + u128::from(group),
                At::State(group) => 64 + u128::from(group),
                At::Absent => 0,
                At::Present => 1,
                At::Enable => 2,
                At::Enabled => 3,
                At::Sleep => 4,
                At::ProbeEnable => 5,
                At::Probe => 6,
                At::Uuid => 7,
                At::Bound => 8,
                At::Look => 9,
                At::Known => 10,
                At::Boot => 11,
                At::Usable | At::Failed | At::Hung => 12,
            };
            let wait = match gpu.wait {
                Wait::Nothing => 0,
                Wait::Until(at) => 8 + (relative(at) << 4),
                Wait::Host => 1,
                Wait::Driver => 2,
                Wait::EveryGpu => 3,
            };
            let places = (self.for_host.position(k) << 5 | self.for_driver.position(k)) as u128;
            let holds = u128::from(self.driver_holder == Some(k)) << 1
                | u128::from(self.mapping == Some(k));
            *key = at << 100 | wait << 32 | places << 8 | holds << 1 | u128::from(gpu.enabled);
        }
        keys[..self.count()].sort_unstable();
        let load = match self.load {
            Load::NotBegun => 0,
            Load::Begins(_, at) => 1 + (relative(at) << 4),
            Load::Registers(..) => 2,
            Load::Ends => 3,
            Load::Uvm(at) => 4 + (relative(at) << 4),
            Load::UvmWaits => 5 + ((self.for_driver.position(LOADER) as u128) << 4),
            Load::UvmEnds => 6,
            Load::Over => 7,
        };
        keys[..self.count()].iter().fold(load, |hash, key| {
            let mixed = (hash ^ key).wrapping_mul(0x2360_ED05_1FC6_5DA4_4385_DF64_9FCC_F645);
            mixed ^ (mixed >> 67)
        })
    }
}
