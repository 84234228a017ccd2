//! A failure means that, for some interleaving of plugs, binds, reports and deaths of the worker, a
//! published name leads to another GPU than the one it was given to.

use super::*;
use crate::boot::bring_up::previous::Previous;
use kata_gpu_test_support::property;
use kata_gpu_wire::names;
use kata_gpu_wire::record::{Kind, Record};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::Index;
use std::collections::VecDeque;

fn address(slot: u8) -> PciAddress {
    format!("0001:00:{slot:02x}.0").parse().unwrap()
}

fn free(device: u64) -> Sight {
    Sight {
        device: Some(device),
        bind: None,
    }
}

fn bound(device: u64, bind: u64) -> Sight {
    Sight {
        device: Some(device),
        bind: Some(bind),
    }
}

const NONE: Sight = Sight {
    device: None,
    bind: None,
};

fn id(slot: u8, generation: u32) -> GpuId {
    GpuId {
        address: address(slot),
        generation,
    }
}

/// Slots after a boot scan of GPUs 2, 3 and 4 with devices 102.., bound by 202...
fn three() -> Slots {
    let mut slots = Slots::default();
    for slot in 2..5 {
        assert_eq!(
            slots.observe(address(slot), free(100 + u64::from(slot))),
            [Change::Arrived(id(slot, 0))]
        );
    }
    slots.scanned();
    for slot in 2..5 {
        let seen = bound(100 + u64::from(slot), 200 + u64::from(slot));
        assert_eq!(
            slots.observe(address(slot), seen),
            [],
            "its task has not seen it yet"
        );
        assert!(slots.bound(id(slot, 0), seen.bound(address(slot)).unwrap()));
        assert_eq!(slots.observe(address(slot), seen), []);
    }
    slots
}

fn names(slots: &Slots) -> Vec<(u8, usize, bool)> {
    let slot = |gpu: GpuId| (0..32).find(|slot| address(*slot) == gpu.address).unwrap();
    slots
        .all()
        .iter()
        .map(|listed| (slot(listed.gpu), listed.index, listed.here))
        .collect()
}

#[test]
fn a_boot_name_belongs_to_the_next_gpu_at_its_address() {
    let mut slots = three();
    assert_eq!(slots.observe(address(2), NONE), [Change::Left(id(2, 0), 0)]);
    assert_eq!(names(&slots), [(2, 0, false), (3, 1, true), (4, 2, true)]);
    assert_eq!(slots.observe(address(2), NONE), []);
    assert_eq!(
        slots.observe(address(2), free(110)),
        [Change::Arrived(id(2, 1))]
    );
    assert_eq!(names(&slots), [(2, 0, true), (3, 1, true), (4, 2, true)]);
    assert!(slots.contains(id(2, 1)) && !slots.contains(id(2, 0)));
}

#[test]
fn names_of_hot_plugged_gpus_follow_and_only_they_move_up() {
    let mut slots = three();
    for slot in [9, 0, 5] {
        slots.observe(address(slot), free(150 + u64::from(slot)));
    }
    assert_eq!(
        names(&slots),
        [
            (2, 0, true),
            (3, 1, true),
            (4, 2, true),
            (0, 3, true),
            (5, 4, true),
            (9, 5, true)
        ]
    );
    assert_eq!(slots.observe(address(0), NONE), [Change::Left(id(0, 0), 3)]);
    assert_eq!(
        names(&slots),
        [
            (2, 0, true),
            (3, 1, true),
            (4, 2, true),
            (5, 3, true),
            (9, 4, true)
        ]
    );
    assert_eq!(
        slots.observe(address(0), free(170)),
        [Change::Arrived(id(0, 1))],
        "the count of arrivals outlives the name"
    );
}

#[test]
fn a_replaced_gpu_is_another_one_though_nothing_reported_that() {
    let mut slots = three();
    let changes = slots.observe(address(3), bound(133, 233));
    assert_eq!(
        changes,
        [Change::Left(id(3, 0), 1), Change::Arrived(id(3, 1))]
    );
    let old = Bound {
        address: address(3),
        device: 103,
        bind: 203,
    };
    assert!(
        !slots.bound(id(3, 1), old) && !slots.bound(id(3, 0), old),
        "what its predecessor's task has read is not its own"
    );
    assert!(slots.bound(
        id(3, 1),
        Bound {
            device: 133,
            bind: 233,
            ..old
        }
    ));
}

#[test]
fn an_unbind_and_a_bind_bring_a_gpu_back_under_its_name() {
    let mut slots = three();
    assert_eq!(
        slots.observe(address(3), free(103)),
        [Change::Left(id(3, 0), 1)]
    );
    assert_eq!(
        slots.observe(address(3), free(103)),
        [],
        "it is on the bus, and somebody else's for now"
    );
    assert_eq!(names(&slots)[1], (3, 1, false));
    assert_eq!(
        slots.observe(address(3), bound(103, 207)),
        [Change::Arrived(id(3, 1))]
    );
    // Both at once.
    assert!(slots.bound(
        id(3, 1),
        Bound {
            address: address(3),
            device: 103,
            bind: 207
        }
    ));
    assert_eq!(
        slots.observe(address(3), bound(103, 208)),
        [Change::Left(id(3, 1), 1), Change::Arrived(id(3, 2))]
    );
    // A plugged-in GPU keeps its name as long as it is on the bus.
    slots.observe(address(7), free(107));
    slots.bound(
        id(7, 0),
        Bound {
            address: address(7),
            device: 107,
            bind: 209,
        },
    );
    assert_eq!(
        slots.observe(address(7), free(107)),
        [Change::Left(id(7, 0), 3)]
    );
    assert_eq!(names(&slots)[3], (7, 3, false));
    assert_eq!(slots.observe(address(7), NONE), [Change::Freed]);
    assert_eq!(names(&slots).len(), 3);
}

#[test]
fn a_failed_gpu_comes_back_by_a_later_bind_alone() {
    let mut slots = three();
    slots.failed(id(3, 0));
    assert_eq!(slots.observe(address(3), bound(103, 203)), []);
    assert_eq!(
        slots.observe(address(3), bound(103, 204)),
        [Change::Left(id(3, 0), 1), Change::Arrived(id(3, 1))]
    );
    // Failed before it was bound.
    slots.observe(address(4), bound(104, 209));
    slots.failed(id(4, 1));
    assert_eq!(slots.observe(address(4), free(104)), []);
    assert_eq!(
        slots.observe(address(4), bound(104, 210)),
        [Change::Left(id(4, 1), 2), Change::Arrived(id(4, 2))]
    );
}

/// Worlds of the property test.
const WORLDS: u32 = 400;
const ACTIONS: usize = 120;
const PLACES: u8 = 6;

/// Unreported reading of a GPU's task: the bind, and the minor of that moment.
struct Result {
    gpu: GpuId,
    read: Option<(Bound, u32)>,
}

/// Hardware with a driver, and what the init makes of it.
struct World {
    there: BTreeMap<PciAddress, Sight>,
    minors: HashMap<Bound, u32>,
    inodes: u64,
    events: VecDeque<PciAddress>,
    slots: Slots,
    /// The stream.
    records: Vec<Record>,
    /// Tasks that have not read yet, and those that have.
    tasks: Vec<GpuId>,
    results: Vec<Result>,
    /// The spec's entries: minors.
    entries: HashMap<GpuId, u32>,
    boot: Vec<PciAddress>,
}

impl World {
    fn new(boot: Vec<PciAddress>) -> Self {
        let mut world = Self {
            there: BTreeMap::new(),
            minors: HashMap::new(),
            inodes: 0,
            events: VecDeque::new(),
            slots: Slots::default(),
            records: Vec::new(),
            tasks: Vec::new(),
            results: Vec::new(),
            entries: HashMap::new(),
            boot,
        };
        for gpu in world.boot.clone() {
            world.plug(gpu);
            world.look(gpu);
        }
        let mut scan = Record::new(Kind::End, names::PCI_SCAN);
        (scan.span, _) = (
            Some(1),
            scan.fields.insert("gpus".into(), world.boot.len().into()),
        );
        world.records.push(scan);
        world.slots.scanned();
        world.report_names();
        world
    }

    fn inode(&mut self) -> u64 {
        self.inodes += 1;
        self.inodes
    }

    fn plug(&mut self, gpu: PciAddress) {
        let device = Some(self.inode());
        self.there.insert(gpu, Sight { device, bind: None });
        self.events.push_back(gpu);
    }

    /// The lowest free minor, as the driver gives it.
    fn bind(&mut self, gpu: PciAddress) {
        let used: Vec<u32> = self
            .there
            .iter()
            .filter_map(|(at, seen)| self.minors.get(&seen.bound(*at)?).copied())
            .collect();
        let minor = (0..).find(|minor| !used.contains(minor)).unwrap();
        let inode = self.inode();
        if let Some(seen) = self.there.get_mut(&gpu).filter(|seen| seen.bind.is_none()) {
            seen.bind = Some(inode);
            self.minors.insert(seen.bound(gpu).unwrap(), minor);
            self.events.push_back(gpu);
        }
    }

    fn sight(&self, gpu: PciAddress) -> Sight {
        self.there.get(&gpu).copied().unwrap_or_default()
    }

    fn record(&mut self, name: &str, gpu: GpuId, fields: &[(&str, Option<u64>)]) {
        let mut record = Record {
            gpu: Some(gpu.address),
            ..Record::new(Kind::Event, name)
        };
        for (key, value) in fields.iter().chain(&[("generation", gpu.again())]) {
            record
                .fields
                .extend(value.map(|value| ((*key).to_string(), value.into())));
        }
        self.records.push(record);
    }

    fn report_names(&mut self) {
        for slot in self.slots.all().into_iter().filter(|slot| slot.here) {
            let hot = (!self.slots.is_of_boot(slot.gpu.address)).then_some(1);
            let device = self.slots.device(slot.gpu.address);
            self.record(
                names::GPU_FOUND,
                slot.gpu,
                &[
                    ("index", Some(slot.index as u64)),
                    ("inode", device),
                    ("hot_plugged", hot),
                ],
            );
        }
    }

    fn look(&mut self, gpu: PciAddress) {
        let before = names(&self.slots);
        let changes = self.slots.observe(gpu, self.sight(gpu));
        assert!(
            !changes.is_empty() || names(&self.slots) == before,
            "names have moved, and nothing reports that"
        );
        for change in changes {
            match change {
                Change::Freed => {}
                Change::Left(gpu, _) => {
                    self.record(names::GPU_REMOVED, gpu, &[]);
                    self.tasks.retain(|task| *task != gpu);
                }
                Change::Arrived(gpu) => self.tasks.push(gpu),
            }
        }
        self.entries.retain(|gpu, _| self.slots.contains(*gpu));
        self.report_names();
    }

    /// A task reads now and reports later.
    fn read(&mut self, task: usize) {
        let gpu = self.tasks.swap_remove(task);
        let bound = self.sight(gpu.address).bound(gpu.address);
        let read = bound.map(|bound| (bound, self.minors[&bound]));
        self.results.push(Result { gpu, read });
    }

    fn report(&mut self, result: usize) {
        let Result { gpu, read } = self.results.swap_remove(result);
        match read {
            Some((bound, minor)) if self.slots.bound(gpu, bound) => {
                let fields = [
                    ("minor", Some(u64::from(minor))),
                    ("bind_inode", Some(bound.bind)),
                ];
                self.record(names::GPU_BOUND, gpu, &fields);
                self.record(names::GPU_PUBLISHED, gpu, &[]);
                self.entries.insert(gpu, minor);
            }
            _ => {
                if self.slots.contains(gpu) {
                    let bind = self.slots.bind_of(gpu).map(|bound| bound.bind);
                    self.slots.failed(gpu);
                    self.record(names::GPU_FAILED, gpu, &[("bind_inode", bind)]);
                }
            }
        }
    }

    /// Another worker: all that the old one had in its memory is gone.
    fn die(&mut self) {
        let previous = Previous::from_records(&self.records);
        (self.slots, self.tasks, self.results, self.entries) =
            (Slots::default(), Vec::new(), Vec::new(), HashMap::new());
        previous
            .gpus
            .iter()
            .for_each(|(gpu, known)| self.slots.restore(*gpu, &known.slot));
        if previous.is_scanned() {
            self.slots.scanned();
        }
        self.events.clear();
        self.scan();
        self.slots.scanned();
        for gpu in self
            .slots
            .all()
            .into_iter()
            .filter(|slot| slot.here)
            .map(|slot| slot.gpu)
        {
            let known = previous.gpu(gpu);
            match known
                .minor
                .filter(|_| known.published && self.slots.bind_of(gpu).is_some())
            {
                Some(minor) => drop(self.entries.insert(gpu, minor)),
                None if known.slot.failed || self.tasks.contains(&gpu) => {}
                None => self.tasks.push(gpu),
            }
        }
    }

    fn scan(&mut self) {
        (0..PLACES).for_each(|place| self.look(address(place)));
    }

    /// One of 12 actions, on the GPU at a place or on one of the tasks or results.
    fn act(&mut self, action: u8, place: u8, one: Index) {
        let gpu = address(place);
        match action {
            0 | 1 if !self.there.contains_key(&gpu) => self.plug(gpu),
            0..=2 => self.bind(gpu),
            3 => {
                self.there.remove(&gpu);
                self.events.push_back(gpu);
            }
            4 => {
                if let Some(seen) = self.there.get_mut(&gpu) {
                    seen.bind = None;
                    self.events.push_back(gpu);
                }
            }
            5 | 6 => {
                if let Some(gpu) = self.events.pop_front() {
                    self.look(gpu);
                }
            }
            7 => {
                self.events.clear();
                self.scan();
            }
            8 => self.die(),
            9 | 10 if !self.tasks.is_empty() => self.read(one.index(self.tasks.len())),
            _ if !self.results.is_empty() => self.report(one.index(self.results.len())),
            _ => {}
        }
        // Whatever is delayed or lost: a published name never leads to what the init itself has
        // seen leave, nor two names to one GPU of which it has seen both.
        for gpu in self.entries.keys() {
            assert!(
                self.slots.contains(*gpu),
                "{gpu:?} is published and is not there"
            );
        }
        for (index, gpu) in self.boot.iter().enumerate() {
            assert_eq!(
                self.slots.index(*gpu),
                index,
                "a name of the boot scan has moved"
            );
        }
    }

    /// Completes all pending work.
    fn settle(&mut self) {
        let there: Vec<PciAddress> = self.there.keys().copied().collect();
        there.into_iter().for_each(|gpu| self.bind(gpu));
        while let Some(gpu) = self.events.pop_front() {
            self.look(gpu);
        }
        for _ in 0..8 {
            self.scan();
            (0..self.tasks.len()).for_each(|_| self.read(0));
            (0..self.results.len()).for_each(|_| self.report(0));
        }
    }

    fn judge(&self) {
        for slot in self.slots.all() {
            let bound = self.sight(slot.gpu.address).bound(slot.gpu.address);
            let leads_to = self.entries.get(&slot.gpu).filter(|_| slot.here).copied();
            let right = bound.map(|bound| self.minors[&bound]);
            assert_eq!(
                leads_to, right,
                "name {} of {:?} is wrong",
                slot.index, slot.gpu
            );
        }
        assert!(
            self.there.keys().all(|gpu| self.slots.at(*gpu).is_some()),
            "a GPU that works has no name"
        );
        let mut indices: Vec<usize> = self.slots.all().iter().map(|slot| slot.index).collect();
        indices.dedup();
        assert_eq!(indices, (0..indices.len()).collect::<Vec<_>>());
    }
}

#[test]
fn in_any_interleaving_a_name_leads_to_its_gpu_or_to_none() {
    let boot = vec(any::<bool>(), usize::from(PLACES));
    let actions = vec((0..12_u8, 0..PLACES, any::<Index>()), ACTIONS);
    proptest!(property(WORLDS), |(boot in boot, actions in actions)| {
        let boot = (0..PLACES).filter(|place| boot[usize::from(*place)]).map(address);
        let mut world = World::new(boot.collect());
        for (action, place, one) in actions {
            world.act(action, place, one);
        }
        world.settle();
        world.judge();
    });
}
