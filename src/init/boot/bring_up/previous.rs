//! Facts that a worker reads from the records of its dead predecessor. Pure.

use super::schedule_messages::GpuId;
use super::slots;
use crate::gpu::driver_caps::MigInstance;
use crate::gpu::topology::{Decision, Functions, NVLINK_DISABLED, Source, Topology};
use crate::machine::clock::boottime_ns;
use crate::nvml;
use kata_gpu_wire::driver_log;
use kata_gpu_wire::driver_log::Signal;
use kata_gpu_wire::failure::Reason;
use kata_gpu_wire::names;
use kata_gpu_wire::nvml_messages::MigDevice;
use kata_gpu_wire::pci_address::PciAddress;
use kata_gpu_wire::record::{Kind, Level, Record};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::Duration;

/// State of one GPU so far.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Known {
    /// Identity and name; see [`slots`].
    pub slot: slots::Known,
    /// Device minor; set once bound.
    pub minor: Option<u32>,
    /// Set once usable, where names by UUID are configured.
    pub uuid: Option<String>,
    /// State by NVML's newest report.
    pub instance_uuids: BTreeMap<MigInstance, String>,
    pub published: bool,
    pub usable: bool,
    /// Reason of its failure.
    pub reason: Option<Reason>,
}

/// State read from the stream of earlier workers.
#[derive(Debug, Default)]
pub struct Previous {
    pub gpus: HashMap<PciAddress, Known>,
    /// The start of PID 1 is in the stream, and its hand-over to the agent.
    pub started: bool,
    pub handed_over: bool,
    /// Workers whose death is in the stream.
    pub deaths: u64,
    /// GPUs of the boot scan, once it was over.
    pub scanned: Option<usize>,
    /// Steps that began and did not end: their worker died in them.
    pub open: Vec<Record>,
    /// Services that were started.
    pub services: BTreeSet<String>,
    /// Greatest id of a step.
    pub last_step: u64,
    /// Sequence number of the last line of the kernel's log in the stream.
    pub last_kmsg: Option<u64>,
    /// A worker began to load the driver.
    pub load_begun: bool,
    /// Inode of the last device at an address whose reset was begun.
    pub resets: BTreeMap<PciAddress, Option<u64>>,
    /// A GPU was given to containers although it does not work as it should.
    pub degraded: bool,
    /// The last decision about the topology.
    pub topology: Option<Decision>,
    /// Errors in the driver's lines that no worker has reported, by their number (Xid).
    pub xids: Vec<(GpuId, u32)>,
    /// Longest time that the enabling of a GPU took. A GPU is enabled once: later ones are no
    /// measure of the host.
    pub enable: Option<Duration>,
}

impl Previous {
    /// Whether every GPU of the boot was usable or had failed.
    pub fn is_settled(&self) -> bool {
        self.is_scanned()
            && self
                .gpus
                .values()
                .all(|known| known.usable || known.slot.failed)
    }

    pub fn from_records(records: &[Record]) -> Self {
        let mut previous = Self::default();
        let mut open = BTreeMap::new();
        for record in records {
            previous.last_step = previous.last_step.max(record.span.unwrap_or(0));
            match (record.kind, record.span) {
                (Kind::Begin, Some(span)) => {
                    if record.name == names::SERVICE_START {
                        let service = text(record, "service");
                        previous.services.extend(service.map(str::to_string));
                    }
                    previous.load_begun |= is_driver_load(record);
                    open.insert(span, record.clone());
                    if record.name == names::GPU_RESET {
                        let device = |gpu| (gpu, number(record, "inode"));
                        previous.resets.extend(record.gpu.map(device));
                    }
                }
                (Kind::End, Some(span)) => {
                    previous.handed_over |= record.name == names::AGENT_EXEC;
                    let begin = open.remove(&span);
                    if let Some(begin) =
                        begin.filter(|_| record.name == names::GPU_ENABLE && record.error.is_none())
                    {
                        let took = Duration::from_nanos(
                            record.boottime_ns.saturating_sub(begin.boottime_ns),
                        );
                        previous.enable = previous.enable.max(Some(took));
                    }
                    if record.name == names::PCI_SCAN {
                        let gpus = number(record, "gpus").and_then(|n| usize::try_from(n).ok());
                        previous.scanned = previous.scanned.or(gpus);
                    }
                }
                (Kind::Kmsg, _) => {
                    previous.last_kmsg = number(record, "kmsg_seq").max(previous.last_kmsg);
                    let line = text(record, "text").unwrap_or_default();
                    if let Some(Signal::Xid(address, xid)) = driver_log::signal(line) {
                        let generation = previous
                            .gpus
                            .get(&address)
                            .map_or(0, |known| known.slot.generation);
                        previous.xids.push((
                            GpuId {
                                address,
                                generation,
                            },
                            xid,
                        ));
                    }
                }
                _ => previous.take_event(record),
            }
        }
        let now = boottime_ns();
        let enabling = open
            .values()
            .filter(|begin| begin.name == names::GPU_ENABLE);
        let took = enabling
            .map(|begin| Duration::from_nanos(now.saturating_sub(begin.boottime_ns)))
            .max();
        previous.enable = previous.enable.max(took);
        previous.open = open.into_values().collect();
        previous
    }

    fn take_event(&mut self, record: &Record) {
        match record.name.as_str() {
            names::TOPOLOGY => self.topology = decision(record).or(self.topology.take()),
            names::INIT_START => self.started = true,
            names::GPU_DEGRADED => self.degraded = true,
            names::PROCESS_DIED => {
                self.deaths = self.deaths.max(number(record, "number").unwrap_or(0));
            }
            _ => {}
        }
        let Some(gpu) = record.gpu else { return };
        if record.name == names::GPU_XID {
            let reported = self.xids.iter().position(|(of, xid)| {
                of.address == gpu && number(record, "xid") == Some(u64::from(*xid))
            });
            reported.map(|at| self.xids.remove(at));
        }
        let generation = number(record, "generation")
            .and_then(|n| u32::try_from(n).ok())
            .unwrap_or(0);
        let known = self.gpus.entry(gpu).or_default();
        if record.name == names::GPU_FOUND {
            if !known.slot.found || known.slot.generation != generation {
                let slot = slots::Known {
                    found: true,
                    generation,
                    device: number(record, "inode"),
                    ..slots::Known::default()
                };
                *known = Known {
                    slot,
                    ..Known::default()
                };
                self.xids.retain(|(of, _)| of.address != gpu);
            }
            known.slot.index = number(record, "index")
                .and_then(|n| usize::try_from(n).ok())
                .unwrap_or(0);
            known.slot.hot_plugged = record.fields.contains_key("hot_plugged");
        }
        // The task of an earlier arrival may have written the newest record.
        if known.slot.generation != generation {
            return;
        }
        match record.name.as_str() {
            // After a removal, no earlier fact holds.
            names::GPU_REMOVED => {
                self.xids.retain(|(of, _)| of.address != gpu);
                let slot = slots::Known {
                    left: true,
                    bind: None,
                    failed: false,
                    ..known.slot.clone()
                };
                *known = Known {
                    slot,
                    ..Known::default()
                };
            }
            // After a removal, only another arrival counts.
            _ if known.slot.left => {}
            names::GPU_BOUND => {
                known.minor = number(record, "minor").and_then(|n| u32::try_from(n).ok());
                known.slot.bind = number(record, "bind_inode");
            }
            names::GPU_PUBLISHED => known.published = true,
            names::GPU_WITHHELD => known.published = false,
            names::GPU_HEALTH => {
                // A report of an error alone has no list.
                let Some(listed) = text(record, "mig") else {
                    return;
                };
                let instances: Vec<MigDevice> = listed
                    .split(kata_gpu_wire::nvml_messages::LIST)
                    .filter_map(|text| text.parse().ok())
                    .collect();
                let minor = known.minor.into_iter();
                known.instance_uuids = minor
                    .flat_map(|minor| nvml::instance_uuids(minor, &instances).0)
                    .collect();
            }
            names::GPU_USABLE => {
                known.usable = true;
                known.uuid = text(record, "uuid").map(str::to_string);
            }
            names::GPU_FAILED => {
                known.slot.failed = true;
                known.reason = text(record, "reason").and_then(Reason::named);
                known.slot.bind = number(record, "bind_inode").or(known.slot.bind);
            }
            _ => {}
        }
    }

    /// State of this GPU in this generation.
    pub fn gpu(&self, gpu: GpuId) -> Known {
        let known = self
            .gpus
            .get(&gpu.address)
            .filter(|known| known.slot.found && known.slot.generation == gpu.generation);
        known.cloned().unwrap_or_default()
    }

    /// Whether all GPUs of the boot scan are known: any other one was plugged in later.
    pub fn is_scanned(&self) -> bool {
        let of_boot = self
            .gpus
            .values()
            .filter(|known| known.slot.found && !known.slot.hot_plugged)
            .count();
        self.scanned.is_some_and(|scanned| of_boot >= scanned)
    }
}

/// Whether a record is of the load of the driver.
pub fn is_driver_load(record: &Record) -> bool {
    record.name == names::MODULE_LOAD && text(record, "module") == Some("nvidia")
}

/// The decision that a record reports.
pub fn decision(record: &Record) -> Option<Decision> {
    let text = |field: &str| text(record, field).map(str::to_string);
    let count = |field: &str| number(record, field).and_then(|n| usize::try_from(n).ok());
    let management = text("functions")
        .unwrap_or_default()
        .split_whitespace()
        .filter_map(|address| address.parse().ok())
        .collect();
    Some(Decision {
        topology: Topology::named(&text("topology")?)?,
        source: Source::named(&text("decided_by")?)?,
        reason: text("reason")?,
        functions: Functions {
            gpus: count("gpus")?,
            switches: count("switches")?,
            management,
        },
        nvlink_disable: text("nvlink")? == NVLINK_DISABLED,
        nvlink_reason: text("nvlink_reason")?,
    })
}

/// Text in a field of a record.
pub fn text<'a>(record: &'a Record, field: &str) -> Option<&'a str> {
    record.fields.get(field)?.as_str()
}

pub fn number(record: &Record, field: &str) -> Option<u64> {
    record.fields.get(field)?.as_u64()
}

/// End record of a step whose worker has died in it.
pub fn end_of(begin: &Record) -> Record {
    Record {
        boottime_ns: boottime_ns(),
        level: Level::Error,
        gpu: begin.gpu,
        span: begin.span,
        parent: begin.parent,
        error: Some("the worker died in this step; its successor goes on".into()),
        ..Record::new(Kind::End, &begin.name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(kind: Kind, name: &str, gpu: &str, span: Option<u64>) -> Record {
        Record {
            gpu: gpu.parse().ok(),
            span,
            ..Record::new(kind, name)
        }
    }

    #[test]
    fn open_steps_states_and_the_logs_end_are_found() {
        const GPU: &str = "0001:00:03.0";
        let mut line = record(Kind::Kmsg, "kmsg", "", None);
        line.fields.insert("kmsg_seq".into(), 812.into());
        let xid = |gpu: &str, number: u32| {
            let mut line = record(Kind::Kmsg, "kmsg", gpu, None);
            let device = gpu.strip_suffix(".0").unwrap();
            line.fields.insert(
                "text".into(),
                format!("NVRM: Xid (PCI:{device}): {number}, GPU has fallen off the bus.").into(),
            );
            line
        };
        let mut reported = record(Kind::Event, names::GPU_XID, GPU, None);
        reported.fields.insert("xid".into(), 79.into());
        let mut enabled = record(Kind::End, names::GPU_ENABLE, GPU, Some(3));
        enabled.boottime_ns = 3_300_000_000;
        let mut bound = record(Kind::Event, names::GPU_BOUND, GPU, None);
        bound.fields.insert("minor".into(), 5.into());
        let mut health = record(Kind::Event, names::GPU_HEALTH, GPU, None);
        const MIG: &str = "MIG-01234567-89ab-cdef-0123-456789abcdef";
        health
            .fields
            .insert("mig".into(), format!("1/0={MIG}, 2/0=no-name, 3").into());
        let mut service = record(Kind::Begin, names::SERVICE_START, "", Some(2));
        service
            .fields
            .insert("service".into(), "fabricmanager".into());
        let mut load = record(Kind::Begin, names::MODULE_LOAD, "", Some(1));
        load.fields.insert("module".into(), "nvidia".into());
        let mut reset = record(Kind::Begin, names::GPU_RESET, "0001:00:06.0", Some(7));
        reset.fields.insert("inode".into(), 70.into());
        let mut failed = record(Kind::Event, names::GPU_FAILED, "0001:00:04.0", None);
        failed.fields.insert("reason".into(), "needs-reset".into());
        assert!(!Previous::from_records(&[service.clone()]).load_begun);
        let records = [
            load,
            record(Kind::End, names::MODULE_LOAD, "", Some(1)),
            service,
            record(Kind::End, names::SERVICE_START, "", Some(2)),
            record(Kind::Begin, names::GPU_ENABLE, GPU, Some(3)),
            enabled,
            record(Kind::Begin, names::GPU_BIND, GPU, Some(4)),
            record(Kind::End, names::GPU_BIND, GPU, Some(4)),
            bound,
            health,
            reset,
            record(Kind::End, names::GPU_RESET, "0001:00:06.0", Some(7)),
            record(Kind::Begin, names::GPU_INIT, GPU, Some(9)),
            line,
            xid(GPU, 79),
            reported,
            xid(GPU, 31),
            xid("0001:00:05.0", 79),
            failed,
            record(Kind::Event, names::GPU_USABLE, "0001:00:05.0", None),
            record(Kind::Event, names::GPU_REMOVED, "0001:00:05.0", None),
        ];
        let previous = Previous::from_records(&records);
        assert_eq!(
            previous.services,
            BTreeSet::from(["fabricmanager".to_string()])
        );
        assert_eq!(
            previous.open.iter().map(|r| r.span).collect::<Vec<_>>(),
            [Some(9)]
        );
        assert_eq!((previous.last_step, previous.last_kmsg), (9, Some(812)));
        assert_eq!(
            previous.resets.into_iter().collect::<Vec<_>>(),
            [("0001:00:06.0".parse().unwrap(), Some(70))]
        );
        // Neither reported by a worker, nor about a GPU that has left.
        assert_eq!(
            previous.xids,
            [(
                GpuId {
                    address: GPU.parse().unwrap(),
                    generation: 0
                },
                31
            )]
        );
        assert_eq!(previous.enable, Some(Duration::from_millis(3300)));
        let known = |gpu: &str| previous.gpus[&gpu.parse().unwrap()].clone();
        assert_eq!(known(GPU).minor, Some(5));
        assert_eq!(
            known(GPU).instance_uuids,
            BTreeMap::from([(
                MigInstance {
                    gpu: 5,
                    gi: 1,
                    ci: 0
                },
                MIG.to_string()
            )])
        );
        assert!(previous.load_begun);
        // The first worker died before it reported any.
        assert!(!previous.started && !previous.handed_over);
        assert!(known("0001:00:04.0").slot.failed);
        assert_eq!(known("0001:00:04.0").reason, Some(Reason::NeedsReset));
        assert!(known("0001:00:05.0").slot.left && !known("0001:00:05.0").usable);
        let end = end_of(&previous.open[0]);
        assert_eq!(
            (end.kind, end.span, end.gpu),
            (Kind::End, Some(9), GPU.parse().ok())
        );
    }

    #[test]
    fn the_last_decision_about_the_topology_is_found() {
        let event = |topology: &str, gpus: u64, nvlink: &str| {
            let mut record = record(Kind::Event, names::TOPOLOGY, "", None);
            let texts = [
                ("topology", topology),
                ("functions", "0000:40:00.0 0000:40:00.1"),
                ("reason", "r"),
                ("decided_by", "scan"),
                ("nvlink", nvlink),
                ("nvlink_reason", "n"),
            ];
            record
                .fields
                .extend(texts.map(|(key, value)| (key.to_string(), value.into())));
            record.fields.extend(
                [("gpus", gpus), ("switches", 0), ("management", 2)]
                    .map(|(key, value)| (key.to_string(), value.into())),
            );
            record
        };
        let management = ["0000:40:00.0", "0000:40:00.1"]
            .map(|address| address.parse().unwrap())
            .to_vec();
        let wanted = Decision {
            topology: Topology::BlackwellFabric,
            source: Source::Scan,
            reason: "r".into(),
            functions: Functions {
                gpus: 8,
                switches: 0,
                management,
            },
            nvlink_disable: true,
            nvlink_reason: "n".into(),
        };
        let records = [
            event("gpus", 1, "unchanged"),
            event("blackwell-fabric", 8, NVLINK_DISABLED),
            event("of-the-future", 8, "unchanged"),
        ];
        assert_eq!(Previous::from_records(&records).topology, Some(wanted));
        assert_eq!(Previous::from_records(&[]).topology, None);
    }

    #[test]
    fn the_last_fact_of_an_ended_arrival_is_not_the_next_ones() {
        const GPU: &str = "0001:00:03.0";
        let with = |name: &str, fields: &[(&str, u64)]| {
            let mut record = record(Kind::Event, name, GPU, None);
            record.fields.extend(
                fields
                    .iter()
                    .map(|(key, value)| ((*key).to_string(), (*value).into())),
            );
            record
        };
        let again = [("index", 1), ("inode", 71), ("generation", 1)];
        let records = [
            with(names::GPU_FOUND, &[("index", 1), ("inode", 70)]),
            with(names::GPU_BOUND, &[("minor", 4), ("bind_inode", 90)]),
            with(names::GPU_REMOVED, &[]),
            with(names::GPU_FOUND, &again),
            with(names::GPU_FAILED, &[]),
            with(names::GPU_USABLE, &[]),
            with(
                names::GPU_BOUND,
                &[("minor", 2), ("bind_inode", 95), ("generation", 1)],
            ),
        ];
        let previous = Previous::from_records(&records);
        let gpu = |generation| {
            previous.gpu(GpuId {
                address: GPU.parse().unwrap(),
                generation,
            })
        };
        assert_eq!(gpu(0), Known::default());
        let slot = slots::Known {
            found: true,
            generation: 1,
            index: 1,
            device: Some(71),
            bind: Some(95),
            ..slots::Known::default()
        };
        assert_eq!(
            gpu(1),
            Known {
                slot,
                minor: Some(2),
                ..Known::default()
            }
        );
        assert!(!previous.is_scanned());
    }
}
