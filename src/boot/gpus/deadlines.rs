//! Every time limit of the bring-up, in one table, each with its reason. No limit ends anything: a
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
}

/// One row of the table.
pub struct Deadline {
    pub limit: Limit,
    pub after: Duration,
    pub reason: &'static str,
}

const fn row(limit: Limit, after_ms: u64, reason: &'static str) -> Deadline {
    Deadline { limit, after: Duration::from_millis(after_ms), reason }
}

/// All limits, in the order of the enum.
pub const TABLE: [Deadline; 17] = [
    row(
        Limit::Attach,
        420,
        "first part of the first initialisation (S1), from open: the driver looks at config space with its global lock held, and an \
         enabling that begins before the last look keeps that lock for as long as it takes; nothing reports that look. Later \
         ones: in proportion to what initialisations take here",
    ),
    row(Limit::AttachLeast, 300, "but never less than where the last look was seen: 295 ms after the open (550.163.01, emulated)"),
    row(
        Limit::ProbesFirst,
        1000,
        "a bound GPU lets the others be probed before it initialises: a probe needs the global lock for a moment, an \
         initialisation keeps it for a good part of a second",
    ),
    row(
        Limit::UvmFirst,
        1000,
        "a bound GPU lets nvidia-uvm be loaded before it initialises: the load needs the global lock, and no GPU is published \
         without it",
    ),
    row(
        Limit::LaneHold,
        10_000,
        "a load, a probe or a publication keeps the next GPU from being enabled: each takes a good part of a second, one that \
         hangs would stop the lane for ever",
    ),
    row(
        Limit::ConsoleQuiet,
        10_000,
        "the console is quiet while a GPU is enabled: an enabling takes up to 4 s, and whoever reads a console wants to see one that \
         hangs",
    ),
    row(
        Limit::ProbeHangs,
        30_000,
        "a probe keeps the next one waiting where they go one at a time: it takes milliseconds, or 4 s behind a BAR firewall",
    ),
    row(Limit::InitHangs, 10_000, "an initialisation keeps those that do not go beside it waiting: it takes 2 to 5 s"),
    row(
        Limit::LaneFirst,
        10_000,
        "an initialisation waits for the enabling under way, or for the lane to be over: an enabling takes up to 4 s",
    ),
    row(Limit::AgentFirst, 1500, "on one vCPU the first enabling waits for the agent's first container: nothing runs beside an enabling"),
    row(
        Limit::AgentLook,
        1100,
        "the lane waits for the look of a container that waits for a GPU just published: the agent looks once a second",
    ),
    row(
        Limit::LookFirst,
        600,
        "after the agent's first look ever, for which it builds a validator: it makes the bundle of a container that has all its \
         GPUs within this time, 268 to 540 ms after that look (kata-agent 4.1.0, emulated)",
    ),
    row(Limit::LookAgain, 250, "after a later look: 42 ms after it where the guest is quiet"),
    row(
        Limit::ContainerMade,
        1500,
        "the lane waits for a container in the making until its program runs, and no longer than this: 0.3 to 0.5 s where grace \
         periods end (kata-agent 4.1.0, emulated)",
    ),
    row(
        Limit::WakesSoon,
        200,
        "a probe behind a BAR firewall that wakes within this time counts as awake: what begins now would be under way when it wakes",
    ),
    row(
        Limit::LoadSleeps,
        1500,
        "after the first probe of a load began to sleep behind a BAR firewall, other probes join it for one enabling and this time: \
         the load does not end before they do",
    ),
    row(Limit::Lockdown, 60_000, "modules stay loadable for this long after the driver's load where a GPU does not settle"),
];

impl Limit {
    pub const fn after(self) -> Duration {
        TABLE[self as usize].after
    }
}

/// Reports of a GPU that is not settled: after these times, then every [`REPORT_EVERY`].
pub const REPORTS: [Duration; 3] = [Duration::from_secs(10), Duration::from_secs(30), Duration::from_secs(60)];
pub const REPORT_EVERY: Duration = Duration::from_secs(60);

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
