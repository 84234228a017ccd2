//! Which records a successor's [`Previous`](super::previous::Previous) comes from. Pure.
//!
//! The stream's file is made anew when it is full; these records stay in it, whatever was traced
//! in the months since. They are few: of each GPU those of its newest arrival, one of each name.

use super::previous::{decision, is_driver_load, number, text};
use kata_gpu_wire::driver_log;
use kata_gpu_wire::driver_log::Signal;
use kata_gpu_wire::names;
use kata_gpu_wire::pci_address::PciAddress;
use kata_gpu_wire::record::{Kind, Record};
use std::collections::{BTreeMap, BTreeSet};

/// Errors of one GPU that nobody has reported yet, which are kept. A worker reports each at once.
const MAX_XIDS: usize = 32;

/// Numbers of these records; the order of `records` is that of the stream.
pub fn needed(records: &mut dyn Iterator<Item = Record>) -> BTreeSet<u64> {
    let mut found = Found::default();
    records.for_each(|record| found.take(&record));
    found.numbers()
}

#[derive(Default)]
struct Found {
    /// Steps that have not ended: number of the begin, and its time in ns.
    open: BTreeMap<u64, (u64, u64)>,
    /// Ends of kept steps, by id: a begin alone would be an open step.
    ends: BTreeMap<u64, u64>,
    /// First record of what counts once: by name and service.
    first: BTreeMap<(String, String), u64>,
    /// Newest record of what is replaced, by name.
    last: BTreeMap<String, u64>,
    /// Greatest id of a step, and the newest record with it.
    last_step: Option<(u64, u64)>,
    /// Longest enabling: time in ns, numbers of begin and end.
    enable: Option<(u64, [u64; 2])>,
    gpus: BTreeMap<PciAddress, Gpu>,
}

/// Records of a GPU's newest arrival.
#[derive(Default)]
struct Gpu {
    generation: u64,
    /// By name, and by whether it has the field that other records of that name lack.
    events: BTreeMap<(String, bool), u64>,
    /// Newest reset, of any arrival: the reset itself makes another one.
    reset: Option<u64>,
    /// Errors that were not reported, each with its number (Xid).
    xids: Vec<(u32, u64)>,
}

impl Found {
    fn take(&mut self, record: &Record) {
        let (seq, name) = (record.seq, record.name.as_str());
        let mut first = |what: &str| {
            let key = (name.to_string(), what.to_string());
            *self.first.entry(key).or_insert(seq) == seq
        };
        self.last_step = self.last_step.max(record.span.map(|span| (span, seq)));
        match (record.kind, record.span) {
            (Kind::Begin, Some(span)) => {
                self.open.insert(span, (seq, record.boottime_ns));
                let is_kept = match (name, record.gpu) {
                    (names::SERVICE_START, _) => first(text(record, "service").unwrap_or_default()),
                    (names::GPU_RESET, Some(gpu)) => {
                        self.gpus.entry(gpu).or_default().reset = Some(seq);
                        true
                    }
                    _ => is_driver_load(record) && first(""),
                };
                if is_kept {
                    self.ends.insert(span, seq);
                }
            }
            (Kind::End, Some(span)) => {
                let is_scan = name == names::PCI_SCAN && number(record, "gpus").is_some();
                if is_scan || name == names::AGENT_EXEC {
                    first("");
                }
                self.ends.entry(span).and_modify(|end| *end = seq);
                let begin = self.open.remove(&span);
                if let Some((begin, since_ns)) =
                    begin.filter(|_| name == names::GPU_ENABLE && record.error.is_none())
                {
                    let took = record.boottime_ns.saturating_sub(since_ns);
                    self.enable = self.enable.max(Some((took, [begin, seq])));
                }
            }
            (Kind::Kmsg, _) => {
                if number(record, "kmsg_seq").is_some() {
                    self.last.insert(name.to_string(), seq);
                    self.last.remove(names::GPU_XID);
                }
                let line = text(record, "text").unwrap_or_default();
                if let Some(Signal::Xid(address, xid)) = driver_log::signal(line) {
                    let xids = &mut self.gpus.entry(address).or_default().xids;
                    xids.push((xid, seq));
                    xids.truncate(MAX_XIDS);
                }
            }
            _ => self.take_event(record),
        }
    }

    fn take_event(&mut self, record: &Record) {
        let (seq, name) = (record.seq, record.name.as_str());
        if name == names::PROCESS_DIED || (name == names::TOPOLOGY && decision(record).is_some()) {
            let process = text(record, "process").unwrap_or_default();
            self.last.insert(format!("{name} {process}"), seq);
        }
        if matches!(name, names::INIT_START | names::GPU_DEGRADED) {
            let key = (name.to_string(), String::new());
            self.first.entry(key).or_insert(seq);
        }
        let Some(gpu) = record.gpu.map(|gpu| self.gpus.entry(gpu).or_default()) else {
            return;
        };
        let generation = number(record, "generation").unwrap_or(0);
        let found = (names::GPU_FOUND.to_string(), false);
        let is_here = gpu.generation == generation && gpu.events.contains_key(&found);
        if name == names::GPU_FOUND && !is_here {
            *gpu = Gpu {
                generation,
                reset: gpu.reset,
                ..Gpu::default()
            };
        }
        if name == names::GPU_XID {
            let xid = number(record, "xid");
            let reported = gpu
                .xids
                .iter()
                .position(|(of, _)| xid == Some((*of).into()));
            let line = reported.map(|at| gpu.xids.remove(at).1);
            if line.is_some() && line.as_ref() == self.last.get("kmsg") {
                // The newest line stays; without its report it would be reported again.
                self.last.insert(name.to_string(), seq);
            }
        }
        if gpu.generation != generation {
            return;
        }
        let has = |field: &str| record.fields.contains_key(field);
        let is_other = match name {
            // The first has the identity, or the minor for reports after it; the newest the rest.
            names::GPU_FOUND | names::GPU_BOUND => {
                gpu.events.contains_key(&(name.to_string(), false))
            }
            names::GPU_HEALTH => has("mig"),
            names::GPU_FAILED => has("bind_inode"),
            names::GPU_REMOVED => {
                gpu.events.retain(|(name, _), _| name == names::GPU_FOUND);
                gpu.xids.clear();
                false
            }
            names::GPU_PUBLISHED | names::GPU_WITHHELD | names::GPU_USABLE => false,
            _ => return,
        };
        gpu.events.insert((name.to_string(), is_other), seq);
    }

    fn numbers(self) -> BTreeSet<u64> {
        let of_gpu = |gpu: Gpu| {
            let xids = gpu.xids.into_iter().map(|(_, seq)| seq);
            gpu.events.into_values().chain(gpu.reset).chain(xids)
        };
        let open = self.open.into_values().map(|(seq, _)| seq);
        open.chain(self.first.into_values())
            .chain(self.last.into_values())
            .chain(self.ends.into_values())
            .chain(self.last_step.map(|(_, seq)| seq))
            .chain(self.enable.into_iter().flat_map(|(_, seqs)| seqs))
            .chain(self.gpus.into_values().flat_map(of_gpu))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    //! A failure means that a worker's successor, after some weeks of traces, takes a GPU that has
    //! failed for a usable one, gives a withheld GPU to containers, repeats a generation, or that
    //! what happened to a GPU is out of a late reader's reach.

    use super::super::previous::Previous;
    use super::*;
    use crate::stream::journal::Journal;
    use crate::stream::memory::{MAX_LASTING, Memory};
    use crate::stream::ring::{CAPACITY_BYTES, Reader, Ring};
    use kata_gpu_test_support::temp_dir;
    use kata_gpu_wire::decode::decode;
    use kata_gpu_wire::record::{Level, Line};
    use proptest::prelude::*;
    use proptest::test_runner::TestRunner;
    use serde_json::Value;
    use std::sync::Arc;

    const HEADER: &str = "{\"schema\":1,\"stream\":{}}\n";

    fn record(kind: Kind, name: &str, gpu: Option<u8>, fields: &[(&str, Value)]) -> Record {
        let fields = fields
            .iter()
            .map(|(key, value)| ((*key).into(), value.clone()));
        Record {
            gpu: gpu.map(address),
            fields: fields.collect(),
            ..Record::new(kind, name)
        }
    }

    fn address(gpu: u8) -> PciAddress {
        format!("0000:{gpu:02x}:00.0").parse().unwrap()
    }

    fn xid(gpu: u8, number: u64) -> Record {
        let text = format!("NVRM: Xid (PCI:0000:{gpu:02x}:00): {number}, pid=1");
        record(Kind::Kmsg, "kmsg", None, &[("text", text.into())])
    }

    /// The state as text, without the time of the test in it.
    fn state(records: &[Record]) -> String {
        let previous = Previous::from_records(records);
        // An enabling that has not ended takes until now.
        let enabling = previous.open.iter().any(|r| r.name == names::GPU_ENABLE);
        let enable = previous.enable.filter(|_| !enabling);
        let gpus: BTreeMap<_, _> = previous.gpus.iter().filter(|(_, k)| k.slot.found).collect();
        let spans: Vec<_> = previous.open.iter().map(|r| r.span).collect();
        format!(
            "{gpus:?} {spans:?} {:?}",
            (
                (previous.started, previous.handed_over, previous.deaths),
                (previous.scanned, &previous.services, previous.last_step),
                (previous.last_kmsg, previous.load_begun, previous.degraded),
                (&previous.topology, &previous.xids, enable),
                &previous.resets,
            )
        )
    }

    /// Records of any order, of few GPUs and steps.
    fn any_records() -> impl Strategy<Value = Vec<Record>> {
        let of_gpu = [
            names::GPU_FOUND,
            names::GPU_FOUND,
            names::GPU_BOUND,
            names::GPU_PUBLISHED,
            names::GPU_WITHHELD,
            names::GPU_DEGRADED,
            names::GPU_HEALTH,
            names::GPU_USABLE,
            names::GPU_FAILED,
            names::GPU_REMOVED,
            names::GPU_XID,
            names::GPU_LATE,
        ];
        let steps = [
            (names::GPU_ENABLE, "", ""),
            (names::GPU_RESET, "", ""),
            (names::SERVICE_START, "service", "fabricmanager"),
            (names::SERVICE_START, "service", "persistenced"),
            (names::MODULE_LOAD, "module", "nvidia"),
            (names::MODULE_LOAD, "module", "nvidia-uvm"),
            (names::PCI_SCAN, "", ""),
            (names::AGENT_EXEC, "", ""),
        ];
        let event = (
            prop::sample::select(of_gpu.to_vec()),
            0..3_u8,
            0..3_u64,
            0..4_u64,
        )
            .prop_map(|(name, gpu, generation, value)| {
                let mut fields = vec![
                    ("index", Value::from(value)),
                    ("minor", gpu.into()),
                    ("inode", value.into()),
                    ("xid", value.into()),
                ];
                if generation > 0 {
                    fields.push(("generation", generation.into()));
                }
                if value > 1 {
                    let mig = format!("{value}/0=MIG-01234567-89ab-cdef-0123-456789abcdef");
                    fields.push(("bind_inode", (70 + value).into()));
                    fields.push(("mig", mig.into()));
                    fields.push(("reason", "needs-reset".into()));
                }
                record(Kind::Event, name, Some(gpu), &fields)
            });
        let step = (
            prop::bool::ANY,
            prop::sample::select(steps.to_vec()),
            0..3_u8,
        );
        let step = step.prop_map(|(begins, (name, key, value), gpu)| {
            let kind = if begins { Kind::Begin } else { Kind::End };
            record(
                kind,
                name,
                Some(gpu),
                &[(key, value.into()), ("gpus", 2.into())],
            )
        });
        let line = (0..3_u8, 0..4_u64).prop_map(|(gpu, number)| xid(gpu, number));
        let other = (0..3_u64).prop_map(|number| match number {
            0 => record(Kind::Event, names::INIT_START, None, &[]),
            _ => record(
                Kind::Event,
                names::PROCESS_DIED,
                None,
                &[("number", number.into())],
            ),
        });
        let any = prop_oneof![8 => event, 4 => step, 2 => line, 1 => other];
        prop::collection::vec(any, 0..120).prop_map(|mut records| {
            let (mut steps, mut open) = (0, BTreeMap::new());
            for (seq, record) in (0..).zip(&mut records) {
                (record.seq, record.boottime_ns) = (seq, seq * seq);
                let step = (record.name.clone(), record.gpu);
                match record.kind {
                    Kind::End if open.contains_key(&step) => record.span = open.remove(&step),
                    Kind::Begin | Kind::End => {
                        steps += 1;
                        (record.kind, record.span) = (Kind::Begin, Some(steps));
                        open.insert(step, steps);
                    }
                    _ => {}
                }
                if record.kind == Kind::Kmsg {
                    record.fields.insert("kmsg_seq".into(), seq.into());
                }
            }
            // Numbers of deaths grow.
            let deaths = records.iter_mut().filter(|r| r.name == names::PROCESS_DIED);
            for (number, death) in (1_u64..).zip(deaths) {
                death.fields.insert("number".into(), number.into());
            }
            records
        })
    }

    #[test]
    fn the_needed_records_alone_give_the_same_state() {
        let same = |records: Vec<Record>| {
            let needed = needed(&mut records.iter().cloned());
            let all = records.iter().cloned();
            let kept: Vec<Record> = all.filter(|r| needed.contains(&r.seq)).collect();
            prop_assert_eq!(state(&kept), state(&records));
            // Three GPUs have at most all names, and some names twice.
            prop_assert!(needed.len() < 100, "{} records", needed.len());
            Ok(())
        };
        let mut cases = TestRunner::new(kata_gpu_test_support::property(500));
        cases.run(&any_records(), same).unwrap();
    }

    #[test]
    fn after_a_month_of_traces_a_successor_and_a_late_reader_know_each_gpu() {
        let folder = temp_dir();
        let path = folder.path().join("boot.ndjson");
        let journal = Journal::create(&path, HEADER, needed).unwrap();
        let mut ring = Arc::new(Ring::resumed(Memory::new(CAPACITY_BYTES, 0), Some(journal)));
        let gpu = |name: &str, gpu: u8, fields: &[(&str, u64)]| {
            let fields: Vec<(&str, Value)> = fields
                .iter()
                .map(|(key, value)| (*key, (*value).into()))
                .collect();
            record(Kind::Event, name, Some(gpu), &fields)
        };
        ring.push(record(Kind::Event, names::INIT_START, None, &[]));
        ring.push(Record {
            span: Some(1),
            ..record(Kind::End, names::PCI_SCAN, None, &[("gpus", 8.into())])
        });
        for k in 0..8 {
            let index = [("index", k.into())];
            ring.push(gpu(names::GPU_FOUND, k, &index));
            ring.push(gpu(names::GPU_PUBLISHED, k, &[]));
            ring.push(gpu(names::GPU_USABLE, k, &[]));
        }
        ring.push(record(Kind::Event, names::SETTLED, None, &[]));
        let noise = |text: &str| Record {
            level: Level::Debug,
            ..record(
                Kind::Event,
                names::AGENT_CONTAINER,
                None,
                &[("what", text.into())],
            )
        };
        let long = "x".repeat(2000);
        let (mut given, mut sizes) = (0, 0);
        for day in 0..30 {
            match day {
                1 => drop(ring.push(gpu(names::GPU_FAILED, 3, &[]))),
                2 => drop(ring.push(gpu(names::GPU_WITHHELD, 4, &[]))),
                3 => {
                    ring.push(gpu(names::GPU_REMOVED, 5, &[]));
                    ring.push(gpu(names::GPU_FOUND, 5, &[("index", 5), ("generation", 1)]));
                }
                _ => {}
            }
            // A probe a minute, a container whose programs fail, and a service's and the kernel's
            // lines; fewer and longer ones, as the bytes are what counts.
            for _ in 0..360 {
                ring.push(noise("init began"));
                ring.push(noise(&long));
                ring.push(xid(7, 13));
                ring.push(gpu(names::GPU_XID, 7, &[("xid", 13)]));
            }
            // A worker dies.
            assert!(ring.next_seq() > given, "number {given} is given twice");
            given = ring.next_seq();
            drop(ring);
            sizes = std::fs::metadata(&path).unwrap().len().max(sizes);
            let (journal, found) = Journal::resume(&path, needed).unwrap();
            assert_eq!(found.memory.next_seq(), given, "day {day}");
            let previous = Previous::from_records(&found.records);
            let known = |k: u8| &previous.gpus[&address(k)];
            assert_eq!(known(3).slot.failed, day >= 1, "day {day}");
            assert_eq!(known(4).published, day < 2, "day {day}");
            assert_eq!(known(5).slot.generation, u32::from(day >= 3), "day {day}");
            assert!(previous.started && previous.is_scanned() && previous.xids.is_empty());
            ring = Arc::new(Ring::resumed(found.memory, Some(journal)));
        }
        assert!(sizes > 7 << 20, "the file was never full: {sizes} bytes");
        // A reader that comes now, and the collector's limit of gaps.
        let mut reader = Reader::new(Arc::clone(&ring), "test", 0);
        let mut read = Vec::new();
        while reader.next() < ring.next_seq() {
            read.extend(reader.read(64));
        }
        let read: Vec<Record> = read
            .iter()
            .filter_map(|line| match decode(line.as_bytes()) {
                Ok(Line::Record(record)) => Some(*record),
                _ => None,
            })
            .collect();
        let has = |name: &str, k: Option<u8>| {
            read.iter()
                .any(|r| r.name == name && r.gpu == k.map(address))
        };
        assert!(has(names::INIT_START, None) && has(names::SETTLED, None));
        assert!(has(names::GPU_FAILED, Some(3)) && has(names::GPU_WITHHELD, Some(4)));
        assert!(
            !has(names::STREAM_LOST, None),
            "nothing was lost on the way to this reader"
        );
        let gaps = read
            .windows(2)
            .filter(|pair| pair[1].seq > pair[0].seq + 1)
            .count();
        assert!((1..=MAX_LASTING).contains(&gaps), "{gaps} gaps");
    }
}
