//! Time limits of the bring-up, in one table, each with its reason. No limit ends an operation: a
//! GPU that is still initialising is reported and left alone, and others stop waiting for it.

use std::time::Duration;

/// A time limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Limit {
    Attach,
    AttachLeast,
    ProbesFirst,
    UvmFirst,
    LaneHold,
    ConsoleQuiet,
    ProbeHangs,
    InitHangs,
    LaneFirst,
    AgentFirst,
    AgentLook,
    LookFirst,
    LookAgain,
    ContainerMade,
    WakesSoon,
    LoadSleeps,
    Lockdown,
    NvmlFirst,
    FabricLate,
}

/// A row of the table.
pub struct Deadline {
    pub limit: Limit,
    pub after: Duration,
    pub reason: &'static str,
}

const fn row(limit: Limit, after_ms: u64, reason: &'static str) -> Deadline {
    Deadline {
        limit,
        after: Duration::from_millis(after_ms),
        reason,
    }
}

/// All limits, in the order of the enum.
pub const TABLE: [Deadline; 19] = [
    row(
        Limit::Attach,
        420,
        "first part of the first initialisation (S1), from open: the driver reads config space \
         with its global lock held, and an enabling that begins before the last read keeps that \
         lock for its whole time; no event reports that read. Later initialisations: in \
         proportion to the measured ones",
    ),
    row(
        Limit::AttachLeast,
        300,
        "shortest assumed first part: the last read was seen 295 ms after the open (550.163.01, \
         emulated)",
    ),
    row(
        Limit::ProbesFirst,
        1000,
        "a bound GPU lets the others be probed before it initialises: a probe needs the global \
         lock for a moment, an initialisation keeps it for a good part of a second",
    ),
    row(
        Limit::UvmFirst,
        1000,
        "a bound GPU lets nvidia-uvm be loaded before it initialises: the load needs the global \
         lock, and no GPU is published without nvidia-uvm",
    ),
    row(
        Limit::LaneHold,
        10_000,
        "a load, a probe or a publication keeps the next GPU from being enabled: each takes a \
         good part of a second, one that hangs would stop the lane for ever",
    ),
    row(
        Limit::ConsoleQuiet,
        10_000,
        "the console is quiet while a GPU is enabled: an enabling takes up to 4 s, and one that \
         hangs must show on the console",
    ),
    row(
        Limit::ProbeHangs,
        30_000,
        "a probe keeps the next one waiting where probes run one at a time: a probe takes \
         milliseconds, or 4 s behind a BAR firewall",
    ),
    row(
        Limit::InitHangs,
        10_000,
        "an initialisation keeps the next wave waiting: it takes 2 to 5 s",
    ),
    row(
        Limit::LaneFirst,
        10_000,
        "an initialisation waits for the enabling under way, or for the end of the lane: an \
         enabling takes up to 4 s",
    ),
    row(
        Limit::AgentFirst,
        1500,
        "on one vCPU the first enabling waits for the agent's first container: no process runs \
         during an enabling",
    ),
    row(
        Limit::AgentLook,
        1100,
        "the lane waits for the look of a container that waits for a GPU just published: the \
         agent looks once a second",
    ),
    row(
        Limit::LookFirst,
        600,
        "wait after the agent's first look ever, for which the agent builds a validator: the \
         bundle of a container that has all its GPUs is made 268 to 540 ms after that look \
         (kata-agent 4.1.0, emulated)",
    ),
    row(
        Limit::LookAgain,
        400,
        "wait after a later look: the bundle follows in 42 ms in a quiet guest, and later in a busy one",
    ),
    row(
        Limit::ContainerMade,
        3000,
        "the lane waits for a container in the making until its program runs: 0.3 to 0.5 s where \
         grace periods end (kata-agent 4.1.0, emulated)",
    ),
    row(
        Limit::WakesSoon,
        200,
        "a probe behind a BAR firewall that wakes within this time counts as awake: work that \
         begins now would be under way at the wake-up",
    ),
    row(
        Limit::LoadSleeps,
        1500,
        "after the first probe of a load began to sleep behind a BAR firewall, other probes join \
         it for one enabling and this time: the load does not end before they do",
    ),
    row(
        Limit::Lockdown,
        60_000,
        "limit after the load where a GPU does not settle: modules stay loadable",
    ),
    row(
        Limit::NvmlFirst,
        60_000,
        "NVML is asked for the fabric of those usable although a GPU does not settle: what it asks \
         disturbs one that initialises, but a GPU that hangs must not keep the others from \
         containers; eight confidential GPUs take 35 s one after another",
    ),
    row(
        Limit::FabricLate,
        60_000,
        "a fabric that is not complete is an error after that: fabric manager takes seconds once \
         all GPUs are initialised, and an agent gives up its container after 100 s by default",
    ),
];

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_limit_finds_its_own_row() {
        for (at, row) in TABLE.iter().enumerate() {
            assert_eq!(row.limit as usize, at, "{:?}", row.limit);
            assert!(row.after > Duration::ZERO && !row.reason.is_empty());
        }
    }
}
