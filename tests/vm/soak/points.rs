//! Kill points of a boot: each process at each record of the catalogue, in the catalogue's order.
//!
//! A record comes in some boots alone, so each has a [`Scene`] in which it comes, or the reason why
//! a script in the guest cannot act on it. A process is killed when a reader in the guest has the
//! record: those from before the worker listens are all read at once, at its first moment.

use kata_gpu_wire::catalogue::{Form, RECORDS};
use kata_gpu_wire::names;
use std::fmt;

/// Process that can be killed. PID 1 cannot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Process {
    Worker,
    Keeper,
    Lane,
    Opener,
    /// The agent where it is a child of the init, and its end the guest's.
    Agent,
}

impl Process {
    pub const ALL: [Self; 5] = [
        Self::Worker,
        Self::Keeper,
        Self::Lane,
        Self::Opener,
        Self::Agent,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Self::Worker => "worker",
            Self::Keeper => "keeper",
            Self::Lane => "lane",
            Self::Opener => "opener",
            Self::Agent => "agent",
        }
    }

    /// Action of a script.
    pub fn kill(self) -> String {
        match self {
            // Waits for a worker that is about to start, and until it is gone.
            Self::Worker => "kill".into(),
            other => format!("end:{}", other.name()),
        }
    }
}

/// Guest in which a record comes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scene {
    Plain,
    /// A host that maps BARs slowly: the lane waits.
    SlowHost,
    /// A line of modprobe.d that is not followed.
    ModuleConfig,
    /// GPUs that come after the boot.
    PluggedLater,
    /// Blackwells beside functions that manage switches.
    Management,
    /// A GPU that an earlier guest left half initialised.
    Reset,
    Displays,
    InitFails,
    Removed,
    Xid,
    /// An initialisation that never ends.
    Hangs,
    /// Fabric manager, which ends once.
    Services,
    /// The persistence daemon, which never becomes ready.
    ServiceHangs,
    Nvml,
    /// A fabric that is complete after a while.
    Fabric,
    /// A fabric that only NVML knows of.
    FabricElsewhere,
    /// Switches, and nobody who could ask NVML.
    FabricUnknown,
    Confidential,
    /// The driver on an extension disk.
    Extension,
    /// An extension that the agent needs.
    ExtensionFirst,
    /// The kernel has no thread for a moment.
    NoThreads,
    /// The worker was killed before.
    WorkerDied,
    Hook,
    /// Containers as the real agent makes them.
    Pod,
    /// More uevents than the worker's socket holds.
    Flood,
}

/// Scene of a record, or the reason why no script of the guest can act on it.
pub fn scene(record: &str) -> Result<Scene, &'static str> {
    Ok(match record {
        names::CLOCK_HOST => return Err("takes ptp_kvm, so a guest under KVM"),
        names::MEMORY_COHERENT => return Err("the init looks for such memory on arm64 alone"),
        names::POWER_OFF => return Err("comes when no agent runs a script any more"),
        names::STAGE0_EXTENSIONS => Scene::ExtensionFirst,
        names::EXTENSION_DISKS
        | names::EXTENSION
        | names::EXTENSION_VERITY
        | names::EXTENSION_MOUNT
        | names::EXTENSION_FIRMWARE
        | names::EXTENSION_LIBRARIES => Scene::Extension,
        names::AGENT_CONTAINER => Scene::Pod,
        names::AGENT_HOOK => Scene::Hook,
        names::PCI_VPD => Scene::Management,
        names::TOPOLOGY_OUTGROWN => Scene::PluggedLater,
        names::LANE_WAIT => Scene::SlowHost,
        names::MODULE_CONFIG => Scene::ModuleConfig,
        names::GPU_RESET => Scene::Reset,
        names::CDI_EXTRA_DEVICES => Scene::Displays,
        names::GPU_FAILED => Scene::InitFails,
        names::GPU_REMOVED => Scene::Removed,
        names::GPU_XID => Scene::Xid,
        names::GPU_LATE => Scene::Hangs,
        names::NVML | names::GPU_HEALTH | names::GPU_SETTING => Scene::Nvml,
        names::GPU_HELD => Scene::Fabric,
        names::GPU_WITHHELD => Scene::FabricElsewhere,
        names::GPU_DEGRADED => Scene::FabricUnknown,
        names::CONFIDENTIAL => Scene::Confidential,
        names::STREAM_LOST => Scene::Flood,
        names::THREAD_LATE => Scene::NoThreads,
        names::SERVICE_PLAN | names::SERVICE_START | names::SERVICE_ENDED | names::SERVICE_LOG => {
            Scene::Services
        }
        names::SERVICE_LATE => Scene::ServiceHangs,
        names::PROCESS_DIED => Scene::WorkerDied,
        _ => Scene::Plain,
    })
}

/// A process at a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Point {
    pub process: Process,
    pub record: &'static str,
    /// `begin` or `end` of a span.
    pub edge: Option<&'static str>,
}

impl Point {
    /// The record in a script's words.
    pub fn when(&self) -> String {
        self.edge.map_or_else(
            || self.record.to_string(),
            |edge| format!("{}!{edge}", self.record),
        )
    }
}

impl fmt::Display for Point {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} at {}", self.process.name(), self.when())
    }
}

/// All kill points.
pub fn all() -> Vec<Point> {
    let edges = |form: Form| match form {
        Form::Span => vec![Some("begin"), Some("end")],
        Form::Event => vec![None],
    };
    let reached = RECORDS.iter().filter(|row| scene(row.name).is_ok());
    let at = reached.flat_map(|row| {
        edges(row.form)
            .into_iter()
            .map(move |edge| (row.name, edge))
    });
    at.flat_map(|(record, edge)| {
        Process::ALL.map(|process| Point {
            process,
            record,
            edge,
        })
    })
    .collect()
}

/// Records that no script can act on, each with its reason.
pub fn out_of_reach() -> Vec<(&'static str, &'static str)> {
    RECORDS
        .iter()
        .filter_map(|row| Some((row.name, scene(row.name).err()?)))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn every_record_is_a_kill_point_or_has_a_reason() {
        let (points, without) = (all(), out_of_reach());
        let reached: BTreeSet<&str> = points.iter().map(|point| point.record).collect();
        assert_eq!(reached.len() + without.len(), RECORDS.len());
        assert_eq!(without.len(), 3, "{without:?}");
        for row in RECORDS.iter().filter(|row| scene(row.name).is_ok()) {
            let edges = if row.form == Form::Span { 2 } else { 1 };
            let count = points
                .iter()
                .filter(|point| point.record == row.name)
                .count();
            assert_eq!(count, edges * Process::ALL.len(), "{}", row.name);
        }
        assert_eq!(points.iter().collect::<BTreeSet<_>>().len(), points.len());
    }
}
