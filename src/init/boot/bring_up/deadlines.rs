//! Time limits of the bring-up, in one table, each with its reason. No limit ends an operation: a
//! GPU that is still initialising is reported and left alone, and others stop waiting for it.

use std::time::Duration;

/// A row of the table.
pub struct Deadline {
    pub limit: Limit,
    pub after: Duration,
    pub reason: &'static str,
}

/// Declares the limits, in ms, and their table, each with its reason as a comment.
macro_rules! limits {
    ($($(#[doc = $reason:literal])+ $limit:ident = $after_ms:literal;)+) => {
        /// A time limit.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Limit { $($(#[doc = $reason])+ $limit),+ }

        /// All limits, in the order of the enum.
        pub const TABLE: &[Deadline] = &[$(Deadline {
            limit: Limit::$limit,
            after: Duration::from_millis($after_ms),
            reason: concat!($($reason),+),
        }),+];
    };
}

limits! {
    /// assumed first part of an initialisation (S1) whose end is not seen: the driver reads config
    /// space with its global lock held, and an enabling that begins before the last read keeps that
    /// lock for its whole time. A bring-up of an H100's length takes up to 24 % longer where this
    /// is too long, and up to 18 % where this is too short
    Attach = 700;
    /// a bound GPU lets the others be probed before it initialises: a probe needs the global lock
    /// for a moment, an initialisation keeps it for a good part of a second
    ProbesFirst = 1000;
    /// a bound GPU lets nvidia-uvm be loaded before it initialises: the load needs the global lock,
    /// and no GPU is published without nvidia-uvm
    UvmFirst = 1000;
    /// an open returns before the next GPU of a wave is opened: they get the driver's global lock,
    /// and end, in the order of their opens
    InTurn = 1000;
    /// after a wave, while GPUs are still to be enabled, no initialisation begins, so that programs
    /// of containers compute: each of their first calls to the driver waits for all
    /// initialisations, and keeps the global lock meanwhile
    ProgramsFirst = 500;
    /// a load, a probe, a publication, or the first or the third part of an initialisation keeps
    /// the next GPU from being enabled: each takes a good part of a second, one that hangs would
    /// stop the lane for ever
    LaneHold = 10_000;
    /// the console is quiet while a GPU is enabled: an enabling takes up to 4 s, and one that hangs
    /// must show on the console
    ConsoleQuiet = 10_000;
    /// a probe keeps the next one waiting where probes run one at a time: a probe takes
    /// milliseconds, or 4 s behind a BAR firewall
    ProbeHangs = 30_000;
    /// an initialisation keeps the next wave waiting: it takes 2 to 5 s
    InitHangs = 10_000;
    /// an initialisation waits for the enabling under way, or for the end of the lane: an enabling
    /// takes up to 4 s
    LaneFirst = 10_000;
    /// the lane waits no longer for looks and containers once the GPUs that are left are enabled in
    /// less: they initialise in one wave, beside which no container computes
    LaneEnds = 1500;
    /// on one vCPU the first enabling waits for the agent's first container: no process runs during
    /// an enabling
    AgentFirst = 1500;
    /// the lane waits for the look of a container that waits for a GPU just published: the agent
    /// looks once a second
    AgentLook = 1100;
    /// wait after the agent's first look ever, for which the agent builds a validator: the bundle
    /// of a container that has all its GPUs is made 268 to 540 ms after that look (kata-agent
    /// 4.1.0, emulated); before, after the program of a pod's pause container, behind which the
    /// runtime asks for the next one
    LookFirst = 600;
    /// wait after a later look: the bundle follows in 42 ms in a quiet guest, and later in a busy
    /// one
    LookAgain = 400;
    /// the lane waits for a container in the making until its program runs: 0.3 to 0.5 s where
    /// grace periods end (kata-agent 4.1.0, emulated)
    ContainerMade = 3000;
    /// a probe behind a BAR firewall that wakes within this time counts as awake: work that begins
    /// now would be under way at the wake-up
    WakesSoon = 200;
    /// after the first probe of a load began to sleep behind a BAR firewall, other probes join it
    /// for one enabling and this time: the load does not end before they do
    LoadSleeps = 1500;
    /// limit after the load where a GPU does not settle: modules stay loadable
    Lockdown = 60_000;
    /// a load that has not ended by then hangs, and keeps modules loadable no longer: 16 GPUs whose
    /// BARs take 3.5 s each are probed in a minute
    LoadHangs = 600_000;
    /// NVML is asked for the fabric of those usable although a GPU does not settle: what it asks
    /// disturbs one that initialises, but a GPU that hangs must not keep the others from
    /// containers; eight confidential GPUs take 35 s one after another
    NvmlFirst = 60_000;
    /// a fabric that is not complete is an error after that: fabric manager takes seconds once all
    /// GPUs are initialised, and an agent gives up its container after 100 s by default
    FabricLate = 60_000;
}

impl Limit {
    pub const fn after(self) -> Duration {
        TABLE[self as usize].after
    }
}

/// Times after which a GPU that is not settled is reported; later, every [`REPORT_EVERY`].
pub const REPORTS: [Duration; 3] = [seconds(10), seconds(30), seconds(60)];
pub const REPORT_EVERY: Duration = seconds(60);

const fn seconds(count: u64) -> Duration {
    Duration::from_secs(count)
}
