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

/// Errors of one GPU that nobody has reported yet, which are kept. A worker reports each at once.
const MAX_XIDS: usize = 32;

/// Numbers of these records, in order; the order of `records` is that of the stream.
pub fn needed(records: &mut dyn Iterator<Item = Record>) -> Vec<u64> {
    let mut found = Found::default();
    records.for_each(|record| found.take(&record));
    found.numbers()
}

/// GPU and name of a record, and whether the record differs from most of that name. One record of
/// each key is needed.
type Key = (Option<PciAddress>, &'static str, bool);

/// Records that are needed so far, each with its number. Short lists: a map's code is larger than
/// what it would save.
#[derive(Default)]
struct Found {
    kept: Vec<(Key, u64)>,
    /// First start of each service.
    services: Vec<(String, u64)>,
    /// Begins of steps that have not ended: id, number, and time in ns.
    open: Vec<(u64, u64, u64)>,
    /// Ends of kept steps, by id: a begin alone would be an open step. With the GPU of a reset.
    ends: Vec<(u64, u64, Option<PciAddress>)>,
    /// Greatest id of a step, and the newest record with it.
    last_step: Option<(u64, u64)>,
    /// Longest enabling: time in ns, numbers of begin and end.
    enable: Option<(u64, [u64; 2])>,
    /// Generation of each GPU's newest arrival.
    generations: Vec<(PciAddress, u64)>,
    /// Errors that were not reported, each with its number (Xid).
    xids: Vec<(PciAddress, u32, u64)>,
}

impl Found {
    fn get(&self, key: Key) -> Option<u64> {
        let kept = self.kept.iter().find(|(of, _)| *of == key);
        kept.map(|(_, seq)| *seq)
    }

    /// Keeps the first record of a key; returns whether this is the first.
    fn first(&mut self, key: Key, seq: u64) -> bool {
        let is_first = self.get(key).is_none();
        if is_first {
            self.kept.push((key, seq));
        }
        is_first
    }

    /// Keeps the newest record of a key.
    fn newest(&mut self, key: Key, seq: u64) {
        self.kept.retain(|(of, _)| *of != key);
        self.kept.push((key, seq));
    }

    fn take(&mut self, record: &Record) {
        let seq = record.seq;
        self.last_step = self.last_step.max(record.span.map(|span| (span, seq)));
        match (record.kind, record.span) {
            (Kind::Begin, Some(span)) => {
                self.open.push((span, seq, record.boottime_ns));
                if self.begins(record) {
                    let reset = record.gpu.filter(|_| record.name == names::GPU_RESET);
                    // An earlier reset's begin goes, and so does its end.
                    self.ends.retain(|(.., of)| reset.is_none() || *of != reset);
                    self.ends.push((span, seq, reset));
                }
            }
            (Kind::End, Some(span)) => {
                if record.name == names::PCI_SCAN && number(record, "gpus").is_some() {
                    self.first((None, names::PCI_SCAN, false), seq);
                }
                if record.name == names::AGENT_EXEC {
                    self.first((None, names::AGENT_EXEC, false), seq);
                }
                for (_, end, _) in self.ends.iter_mut().filter(|(of, ..)| *of == span) {
                    *end = seq;
                }
                let begin = self.open.iter().position(|(of, ..)| *of == span);
                let begin = begin.map(|at| self.open.remove(at));
                if let Some((_, begin, since_ns)) =
                    begin.filter(|_| record.name == names::GPU_ENABLE && record.error.is_none())
                {
                    let took = record.boottime_ns.saturating_sub(since_ns);
                    self.enable = self.enable.max(Some((took, [begin, seq])));
                }
            }
            (Kind::Kmsg, _) => {
                if number(record, "kmsg_seq").is_some() {
                    self.newest((None, "kmsg", false), seq);
                    self.kept.retain(|(of, _)| of.1 != names::GPU_XID);
                }
                let line = text(record, "text").unwrap_or_default();
                if let Some(Signal::Xid(gpu, xid)) = driver_log::signal(line)
                    && self.xids.iter().filter(|(of, ..)| *of == gpu).count() < MAX_XIDS
                {
                    self.xids.push((gpu, xid, seq));
                }
            }
            _ => self.take_event(record),
        }
    }

    /// Whether this begin is kept.
    fn begins(&mut self, record: &Record) -> bool {
        let seq = record.seq;
        match (record.name.as_str(), record.gpu) {
            (names::SERVICE_START, _) => {
                let service = text(record, "service").unwrap_or_default();
                let is_first = self.services.iter().all(|(of, _)| of != service);
                if is_first {
                    self.services.push((service.to_string(), seq));
                }
                is_first
            }
            // The newest, of any arrival: the reset itself makes another one.
            (names::GPU_RESET, gpu) => {
                self.newest((gpu, names::GPU_RESET, false), seq);
                true
            }
            _ => is_driver_load(record) && self.first((None, names::MODULE_LOAD, false), seq),
        }
    }

    fn take_event(&mut self, record: &Record) {
        let (seq, name) = (record.seq, record.name.as_str());
        match name {
            names::PROCESS_DIED => {
                let is_worker = number(record, "number").is_some();
                self.newest((None, names::PROCESS_DIED, is_worker), seq);
            }
            names::TOPOLOGY if decision(record).is_some() => {
                self.newest((None, names::TOPOLOGY, false), seq);
            }
            names::INIT_START => {
                self.first((None, names::INIT_START, false), seq);
            }
            // The story of the boot ends there.
            names::SETTLED => {
                self.first((None, names::SETTLED, false), seq);
            }
            names::GPU_DEGRADED => {
                self.first((None, names::GPU_DEGRADED, false), seq);
            }
            _ => {}
        }
        let Some(gpu) = record.gpu else { return };
        let generation = number(record, "generation").unwrap_or(0);
        let at = self.generations.iter().position(|(of, _)| *of == gpu);
        let known = at
            .and_then(|at| self.generations.get(at))
            .map_or(0, |(_, known)| *known);
        let found = (Some(gpu), names::GPU_FOUND, false);
        if name == names::GPU_FOUND && (known != generation || self.get(found).is_none()) {
            self.forget(gpu, &[names::GPU_RESET]);
            at.map(|at| self.generations.swap_remove(at));
            self.generations.push((gpu, generation));
            self.kept.push((found, seq));
            return;
        }
        if name == names::GPU_XID {
            let xid = number(record, "xid");
            let is_it = |of: &(PciAddress, u32, u64)| of.0 == gpu && xid == Some(of.1.into());
            let line = self.xids.iter().position(is_it);
            let line = line.map(|at| self.xids.remove(at).2);
            if line.is_some() && line == self.get((None, "kmsg", false)) {
                // The newest line stays; without its report it would be reported again.
                self.newest((Some(gpu), names::GPU_XID, false), seq);
            }
        }
        if known != generation {
            return;
        }
        let has = |field: &str| record.fields.contains_key(field);
        let (name, is_other) = match name {
            // The first has the identity, or the minor for reports after it; the newest the rest.
            names::GPU_FOUND => (names::GPU_FOUND, true),
            names::GPU_BOUND => {
                let first = (Some(gpu), names::GPU_BOUND, false);
                (names::GPU_BOUND, self.get(first).is_some())
            }
            names::GPU_HEALTH => (names::GPU_HEALTH, has("mig")),
            names::GPU_FAILED => (names::GPU_FAILED, has("bind_inode")),
            names::GPU_REMOVED => {
                self.forget(gpu, &[names::GPU_RESET, names::GPU_FOUND]);
                (names::GPU_REMOVED, false)
            }
            names::GPU_PUBLISHED => (names::GPU_PUBLISHED, false),
            names::GPU_WITHHELD => (names::GPU_WITHHELD, false),
            names::GPU_USABLE => (names::GPU_USABLE, false),
            _ => return,
        };
        self.newest((Some(gpu), name, is_other), seq);
    }

    /// Forgets what does not hold for a GPU any more, but the records of these names.
    fn forget(&mut self, gpu: PciAddress, but: &[&str]) {
        self.kept
            .retain(|(of, _)| of.0 != Some(gpu) || but.contains(&of.1));
        self.xids.retain(|(of, ..)| *of != gpu);
    }

    fn numbers(self) -> Vec<u64> {
        let mut all: Vec<u64> = self.kept.iter().map(|(_, seq)| *seq).collect();
        all.extend(self.services.iter().map(|(_, seq)| *seq));
        all.extend(self.open.iter().map(|(_, seq, _)| *seq));
        all.extend(self.ends.iter().map(|(_, seq, _)| *seq));
        all.extend(self.last_step.iter().map(|(_, seq)| *seq));
        all.extend(self.enable.iter().flat_map(|(_, seqs)| *seqs));
        all.extend(self.xids.iter().map(|(.., seq)| *seq));
        all.sort_unstable();
        all
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
    use crate::stream::ring::{CAPACITY_BYTES, File, Reader, Ring};
    use kata_gpu_test_support::temp_dir;
    use kata_gpu_wire::decode::decode;
    use kata_gpu_wire::record::{Level, Line};
    use proptest::prelude::*;
    use proptest::test_runner::TestRunner;
    use serde_json::Value;
    use std::collections::BTreeMap;
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
    fn of_many_resets_of_a_gpu_the_newest_is_needed() {
        let step = |kind, span| Record {
            seq: 2 * span + u64::from(kind == Kind::End),
            span: Some(span),
            ..record(kind, names::GPU_RESET, Some(0), &[])
        };
        let resets = (0..100).flat_map(|span| [step(Kind::Begin, span), step(Kind::End, span)]);
        assert_eq!(needed(&mut resets.into_iter()), [198, 199, 199]);
    }

    #[test]
    fn after_a_month_of_traces_a_successor_and_a_late_reader_know_each_gpu() {
        let folder = temp_dir();
        let path = folder.path().join("boot.ndjson");
        let journal = Journal::create(&path, HEADER, 0, needed).unwrap();
        let mut ring = Arc::new(Ring::resumed(
            Memory::new(CAPACITY_BYTES, 0),
            File::Open(journal),
        ));
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
            // The file was full by then.
            match day {
                12 => drop(ring.push(gpu(names::GPU_FAILED, 3, &[]))),
                14 => drop(ring.push(gpu(names::GPU_WITHHELD, 4, &[]))),
                16 => {
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
            assert_eq!(known(3).slot.failed, day >= 12, "day {day}");
            assert_eq!(known(4).published, day < 14, "day {day}");
            assert_eq!(known(5).slot.generation, u32::from(day >= 16), "day {day}");
            assert!(previous.started && previous.is_scanned() && previous.xids.is_empty());
            ring = Arc::new(Ring::resumed(found.memory, File::Open(journal)));
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
