//! A guest half in which GPUs come and go for a long time: `testagent.soak=ACTIONS:SEED` takes
//! random plugs, removals, swaps, unbinds, deaths of the worker and shortages, and asks the
//! simulator which GPU each name leads to.
//!
//! - A container that waits for a name, as agents do that wait, must get the GPU that the boot scan
//!   gave that name to.
//! - Whenever the soak lets things settle, every GPU that the driver has must be listed under its
//!   name, and no other.
//!
//! The first fault ends the soak. `testagent.soak=ACTIONS:SEED:exchanged` compares with minors of
//! which two are exchanged: then a fault must be found.

use super::random::Random;
use super::script::{SPEC, act, gpu_in_slot, process_named};
use crate::agent::{cdi, container_root, log};
use oci_spec::runtime::Spec;
use std::collections::BTreeMap;
use std::path::Path;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// GPUs of the boot scan: slot and name are the same.
const OF_BOOT: u32 = 6;
/// All slots; the last ones are empty at boot.
const SLOTS: u32 = 8;
/// By then, what settles has settled.
const DEADLINE: Duration = Duration::from_secs(90);
/// Between two looks.
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// Between two deaths of the worker: one that dies young lets the next one wait longer and longer.
const BETWEEN_KILLS: Duration = Duration::from_secs(11);
/// A worker that begins takes a GPU that nobody has seen bound for one that was never bound, and
/// binds it: as long after a death, an unbind may be undone.
const AFTER_A_KILL: Duration = Duration::from_secs(60);
/// How long the fault that must be there must last.
const FAULT_LASTS: Duration = Duration::from_secs(3);
/// Begin of the fault that exchanged minors make.
const LEAD_ELSEWHERE: &str = "names lead to the minors";
/// Actions between two reports.
const REPORT_EVERY: u32 = 50;

pub fn run() {
    let words = super::parameter("testagent.soak=").unwrap_or_default();
    let mut words = words.split(':');
    let mut number = || words.next().and_then(|n| n.parse::<u32>().ok());
    let (Some(actions), Some(seed)) = (number(), number()) else {
        return log::error(
            "soak ended",
            &[(
                "fault",
                "no testagent.soak=ACTIONS:SEED on the command line",
            )],
        );
    };
    let mut soak = Soak::new(seed, words.next() == Some("exchanged"));
    let ended = soak.run(actions);
    let (actions, containers, checks) = (
        soak.actions.to_string(),
        soak.containers.to_string(),
        soak.checks.to_string(),
    );
    let kinds: Vec<String> = soak
        .kinds
        .iter()
        .map(|(kind, count)| format!("{kind} {count}"))
        .collect();
    let fault = ended.err().unwrap_or_default();
    log::info(
        "soak ended",
        &[
            ("actions", &actions),
            ("containers", &containers),
            ("checks", &checks),
            ("kinds", &kinds.join(", ")),
            ("history", &soak.history.join(" ")),
            ("fault", &fault),
        ],
    );
}

/// Sentence about a violated expectation.
type Fault = String;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Slot {
    Empty,
    Unbound,
    Bound,
}

/// Trouble of the init while GPUs come and go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Trouble {
    None,
    Stopped,
    Flood,
    Killed,
    NoThreads,
    RunFull,
}

/// A container that waits for a name of the boot scan.
struct Waiting {
    slot: u32,
    answer: JoinHandle<Result<(), Fault>>,
}

/// A removal under way.
struct Removal {
    slot: u32,
    unbind: Option<JoinHandle<Result<(), Fault>>>,
}

struct Soak {
    random: Random,
    /// Whether the minors that are compared with are wrong.
    exchanged: bool,
    slots: Vec<Slot>,
    waiting: Vec<Waiting>,
    /// Whether every name was right when the round began.
    settled: bool,
    killed: Instant,
    actions: u32,
    containers: u32,
    checks: u32,
    kinds: BTreeMap<String, u32>,
    /// The last actions.
    history: Vec<String>,
}

impl Soak {
    fn new(seed: u32, exchanged: bool) -> Self {
        let slots = (0..SLOTS)
            .map(|slot| {
                if slot < OF_BOOT {
                    Slot::Bound
                } else {
                    Slot::Empty
                }
            })
            .collect();
        Self {
            random: Random::new(u64::from(seed)),
            exchanged,
            slots,
            waiting: Vec::new(),
            settled: false,
            killed: Instant::now(),
            actions: 0,
            containers: 0,
            checks: 0,
            kinds: BTreeMap::new(),
            history: Vec::new(),
        }
    }

    fn run(&mut self, actions: u32) -> Result<(), Fault> {
        self.settle()?;
        let mut reported = 0;
        while self.actions < actions {
            let trouble = self.trouble();
            self.round(trouble)?;
            if self.random.below(2) == 0 {
                self.settle()?;
            }
            if self.actions / REPORT_EVERY > reported {
                reported = self.actions / REPORT_EVERY;
                log::info(
                    "soak",
                    &[
                        ("actions", &self.actions.to_string()),
                        ("containers", &self.containers.to_string()),
                    ],
                );
            }
        }
        for waiting in std::mem::take(&mut self.waiting) {
            answer(waiting)?;
        }
        self.settle()
    }

    fn trouble(&mut self) -> Trouble {
        use Trouble::{Flood, Killed, NoThreads, None, RunFull, Stopped};
        let trouble = self.random.one_of(&[
            None, None, None, Stopped, Stopped, Flood, Killed, NoThreads, RunFull,
        ]);
        if matches!(trouble, Killed | NoThreads) && self.killed.elapsed() < BETWEEN_KILLS {
            None
        } else {
            trouble
        }
    }

    /// Up to three hardware actions on different slots, while the init is in some trouble.
    fn round(&mut self, trouble: Trouble) -> Result<(), Fault> {
        let mut slots: Vec<u32> = Vec::new();
        for _ in 0..=self.random.below(3) {
            let slot = self.random.below(u64::from(SLOTS)) as u32;
            if !slots.contains(&slot) {
                slots.push(slot);
            }
        }
        for slot in &slots {
            self.answered(*slot)?;
            self.reached(*slot)?;
            self.ask(*slot);
        }
        self.begin(trouble)?;
        // Removals last until the worker gives the GPU back, which it may not be able to, now.
        let mut removals = Vec::new();
        let swap = slots.len() > 1
            && slots
                .iter()
                .all(|slot| self.slots[*slot as usize] == Slot::Bound)
            && self.random.below(2) == 0;
        for slot in &slots {
            removals.extend(self.change(*slot, trouble)?);
        }
        self.end(trouble)?;
        for removal in removals {
            if let Some(unbind) = removal.unbind {
                unbind
                    .join()
                    .map_err(|_| "an unbind panicked".to_string())??;
            }
            self.reached(removal.slot)?;
        }
        if swap {
            for slot in slots.into_iter().rev() {
                if self.slots[slot as usize] != Slot::Bound {
                    self.change(slot, Trouble::None)?;
                }
            }
        }
        self.settled = false;
        Ok(())
    }

    /// One hardware action; returns what is to be waited for.
    fn change(&mut self, slot: u32, trouble: Trouble) -> Result<Option<Removal>, Fault> {
        let (action, wanted) = match (self.slots[slot as usize], self.random.below(4)) {
            (Slot::Empty, _) => ("plug", Slot::Bound),
            // The others have threads of the soak's own.
            (Slot::Unbound | Slot::Bound, _) if trouble == Trouble::NoThreads => {
                ("unplug", Slot::Empty)
            }
            (Slot::Unbound, 0) => ("unplug", Slot::Empty),
            (Slot::Unbound, _) => ("bind", Slot::Bound),
            (Slot::Bound, 0) if self.settled => ("unbind", Slot::Unbound),
            (Slot::Bound, 1) => ("remove", Slot::Empty),
            (Slot::Bound, _) => ("unplug", Slot::Empty),
        };
        self.note(action, Some(slot));
        // A GPU removed through sysfs is still in its slot: `plug` finds it there.
        self.slots[slot as usize] = wanted;
        let mut unbind = None;
        if action == "unbind" {
            unbind = Some(std::thread::spawn(move || {
                std::fs::write("/sys/bus/pci/drivers/nvidia/unbind", gpu_in_slot(slot))
                    .map_err(|e| format!("unbind {slot}: {e}"))
            }));
        } else {
            act(&format!("{action}:{slot}"))?;
        }
        Ok((wanted != Slot::Bound).then_some(Removal { slot, unbind }))
    }

    fn begin(&mut self, trouble: Trouble) -> Result<(), Fault> {
        let deadline = Instant::now() + DEADLINE;
        while process_named("gpuinit-worker").is_err() {
            if Instant::now() > deadline {
                return Err(format!("no worker after {DEADLINE:?}"));
            }
            std::thread::sleep(LOOK_EVERY);
        }
        let actions: &[&str] = match trouble {
            Trouble::None => return Ok(()),
            Trouble::Stopped => &["stop"],
            Trouble::Flood => &["stop", "storm:6000"],
            Trouble::Killed => &["kill"],
            Trouble::NoThreads => &["threads:20", "kill"],
            Trouble::RunFull => &["fill"],
        };
        if actions.contains(&"kill") {
            self.killed = Instant::now();
        }
        self.note(&format!("{trouble:?}"), None);
        actions.iter().try_for_each(|action| act(action))
    }

    fn end(&mut self, trouble: Trouble) -> Result<(), Fault> {
        if trouble != Trouble::None {
            std::thread::sleep(Duration::from_millis(self.random.below(400)));
        }
        match trouble {
            Trouble::None | Trouble::Killed => Ok(()),
            Trouble::Stopped | Trouble::Flood => act("cont"),
            Trouble::NoThreads => act("threads:5000"),
            Trouble::RunFull => act("empty"),
        }
    }

    fn note(&mut self, action: &str, slot: Option<u32>) {
        const KEPT: usize = 60;
        self.actions += 1;
        *self.kinds.entry(action.to_string()).or_default() += 1;
        self.history
            .push(slot.map_or_else(|| action.to_string(), |slot| format!("{action}:{slot}")));
        if self.history.len() > KEPT {
            self.history.remove(0);
        }
    }

    /// Some containers begin to wait for a GPU that is not there.
    fn ask(&mut self, slot: u32) {
        let listed = || leads().is_ok_and(|names| names.contains_key(&slot));
        if slot < OF_BOOT && self.slots[slot as usize] == Slot::Empty && !listed() {
            self.containers += 1;
            self.waiting.push(Waiting {
                slot,
                answer: std::thread::spawn(move || container(slot)),
            });
        }
    }

    /// Whoever waits for this slot's GPU has it before that one goes again.
    fn answered(&mut self, slot: u32) -> Result<(), Fault> {
        match self.waiting.iter().position(|waiting| waiting.slot == slot) {
            Some(at) if self.slots[slot as usize] == Slot::Bound => answer(self.waiting.remove(at)),
            _ => Ok(()),
        }
    }

    /// Waits until every name leads where it must.
    fn settle(&mut self) -> Result<(), Fault> {
        self.checks += 1;
        let start = Instant::now();
        while let Err(fault) = self.compare() {
            let is_made = self.exchanged && fault.starts_with(LEAD_ELSEWHERE);
            let limit = if is_made { FAULT_LASTS } else { DEADLINE };
            if start.elapsed() > limit {
                return Err(format!("{fault} after {limit:?}"));
            }
            std::thread::sleep(LOOK_EVERY);
        }
        self.settled = true;
        Ok(())
    }

    /// Waits until the GPU in a slot has come to where it must be.
    fn reached(&mut self, slot: u32) -> Result<(), Fault> {
        let device = Path::new("/sys/bus/pci/devices").join(gpu_in_slot(slot));
        let deadline = Instant::now() + DEADLINE;
        loop {
            let is = match (device.exists(), device.join("driver").exists()) {
                (false, _) => Slot::Empty,
                (true, false) => Slot::Unbound,
                (true, true) => Slot::Bound,
            };
            if is == Slot::Bound {
                self.rebound(slot);
            }
            let wanted = self.slots[slot as usize];
            if is == wanted {
                return Ok(());
            }
            if Instant::now() > deadline {
                return Err(format!(
                    "GPU {slot} is {is:?} after {DEADLINE:?}, and should be {wanted:?}"
                ));
            }
            std::thread::sleep(LOOK_EVERY);
        }
    }

    /// A GPU that was unbound is bound.
    fn rebound(&mut self, slot: u32) {
        let state = &mut self.slots[slot as usize];
        if *state == Slot::Unbound && self.killed.elapsed() < AFTER_A_KILL {
            *state = Slot::Bound;
        }
    }

    /// Compares the spec with the simulator, and both with what was done.
    fn compare(&mut self) -> Result<(), Fault> {
        let mut minors = minors()?;
        minors.keys().for_each(|slot| self.rebound(*slot));
        let bound: Vec<u32> = (0..SLOTS)
            .filter(|slot| self.slots[*slot as usize] == Slot::Bound)
            .collect();
        let has: Vec<u32> = minors.keys().copied().collect();
        if has != bound {
            return Err(format!(
                "the driver has the GPUs {has:?}, and should have {bound:?}"
            ));
        }
        if self.exchanged {
            let two: Vec<u32> = minors.keys().copied().take(2).collect();
            if let [a, b] = two[..] {
                let (of_a, of_b) = (minors[&a], minors[&b]);
                minors.extend([(a, of_b), (b, of_a)]);
            }
        }
        let wanted: BTreeMap<u32, u32> = minors
            .into_iter()
            .map(|(slot, minor)| (self.name(slot), minor))
            .collect();
        let names = leads()?;
        if names != wanted {
            return Err(format!(
                "names lead to the minors {names:?}, and should to {wanted:?}"
            ));
        }
        Ok(())
    }

    /// The name of the GPU in a slot: those that came by hot-plug are counted after those of the
    /// boot scan.
    fn name(&self, slot: u32) -> u32 {
        let present = |slot: &u32| self.slots[*slot as usize] != Slot::Empty;
        if slot < OF_BOOT {
            slot
        } else {
            OF_BOOT + (OF_BOOT..slot).filter(present).count() as u32
        }
    }
}

/// Waits for a container's answer.
fn answer(waiting: Waiting) -> Result<(), Fault> {
    waiting.answer.join().unwrap_or_else(|_| {
        Err(format!(
            "the container that waits for {} panicked",
            waiting.slot
        ))
    })
}

/// A container that waits for a name of the boot scan: what it gets must be the GPU of that slot.
///
/// A GPU that is pulled out in its initialisation has failed until it has left, and whoever asks
/// meanwhile is refused with that GPU's verdict. Kubernetes makes such a container again; so does
/// this one.
fn container(slot: u32) -> Result<(), Fault> {
    let deadline = Instant::now() + DEADLINE * 3;
    loop {
        let spec = injected(slot, deadline)?;
        let refused = spec
            .mounts()
            .iter()
            .flatten()
            .find_map(|mount| container_root::destination(mount).err());
        match refused.map(|error| error.to_string()) {
            None => return leads_to(&spec, slot, deadline),
            Some(error) if error.contains(&gpu_in_slot(slot)) && Instant::now() < deadline => {
                std::thread::sleep(LOOK_EVERY);
            }
            Some(error) => return Err(format!("a container asked for {slot}: {error}")),
        }
    }
}

/// A container's specification with the device that it asked for.
fn injected(slot: u32, deadline: Instant) -> Result<Spec, Fault> {
    const TRIES: u64 = 100_000;
    let mut spec = Spec::default();
    let asked = [format!("nvidia.com/gpu={slot}")];
    let pause = |_: Duration| {
        assert!(Instant::now() < deadline, "no answer");
        std::thread::sleep(LOOK_EVERY);
    };
    cdi::inject(
        cdi::chosen(),
        &mut spec,
        cdi::DIRECTORY,
        &asked,
        TRIES,
        false,
        &pause,
        &mut |_, _| {},
    )
    .map_err(|(_, error)| format!("{slot}: {error}"))?;
    Ok(spec)
}

/// Compares the node in a container's specification with the driver's minor of that slot.
fn leads_to(spec: &Spec, slot: u32, deadline: Instant) -> Result<(), Fault> {
    let devices = spec
        .linux()
        .as_ref()
        .and_then(|l| l.devices().clone())
        .unwrap_or_default();
    let got = devices
        .iter()
        .find_map(|d| minor_of(&d.path().display().to_string()));
    // Another GPU that goes or comes makes the files of all unreadable for a moment.
    let is = loop {
        match minors() {
            Ok(minors) => break minors.get(&slot).copied(),
            Err(fault) if Instant::now() > deadline => return Err(fault),
            Err(_) => std::thread::sleep(LOOK_EVERY),
        }
    };
    if got == is && got.is_some() {
        Ok(())
    } else {
        Err(format!(
            "a container asked for {slot}, minor {is:?}, and got minor {got:?}"
        ))
    }
}

fn minor_of(path: &str) -> Option<u32> {
    path.strip_prefix("/dev/nvidia")?.parse().ok()
}

/// The minor of the GPU in each slot, by what the driver says.
fn minors() -> Result<BTreeMap<u32, u32>, Fault> {
    let mut all = BTreeMap::new();
    for entry in super::script::minors()? {
        let (address, minor) = entry.split_once('=').ok_or_else(|| entry.clone())?;
        let slot = (0..SLOTS)
            .find(|slot| gpu_in_slot(*slot) == address)
            .ok_or_else(|| entry.clone())?;
        all.insert(slot, minor.parse().map_err(|_| entry.clone())?);
    }
    Ok(all)
}

/// The numbers among the spec's names, and the minor to which each leads. One that is pending is
/// left out.
fn leads() -> Result<BTreeMap<u32, u32>, Fault> {
    let text = std::fs::read_to_string(SPEC).map_err(|e| format!("{SPEC}: {e}"))?;
    let spec: serde_json::Value =
        serde_json::from_str(&text).map_err(|e| format!("{SPEC}: {e}"))?;
    let one = |device: &serde_json::Value| {
        let name = device["name"].as_str()?.parse().ok()?;
        let nodes = device["containerEdits"]["deviceNodes"].as_array()?;
        Some((
            name,
            nodes
                .iter()
                .find_map(|node| minor_of(node["path"].as_str()?))?,
        ))
    };
    Ok(spec["devices"]
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(one)
        .collect())
}
