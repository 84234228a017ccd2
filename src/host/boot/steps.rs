//! The records of one boot, and the agent's lines if they are known, as a [`Story`].
//!
//! Spans are taken as they are. Steps that follow from other records by the order in which kernel, init and agent work are added and marked as
//! derived ([`super::kernel_steps`], [`super::agent_steps`], [`super::runtime_steps`], and the init's own two here).

use super::gpu_name::GpuName;
use super::model::{Boot, Gpu, SETTLED};
use super::phase::{classify, derived};
use super::story::{Milestone, Step, Story};
use super::{agent_steps, kernel_steps, runtime_steps};
use crate::events::record::{Kind, names};
use crate::host::data::agent_log::{AgentEvent, AgentLine, ClockPoints};
use crate::host::data::boot_file::BootFile;
use crate::host::data::record::Field;
use crate::pci::PciAddress;
use std::collections::{BTreeMap, HashMap};

/// The milestone before all others, where it is known: the VM's first CPU was made.
pub const VM_START: &str = "VM start";
/// Where the account of a boot ends that never came to an end.
pub const LAST_RECORD: &str = "last record";

/// Times of the guest as times of a story: no clock reaches the end of that scale (292 years).
pub(super) fn ns(boottime_ns: u64) -> i64 {
    i64::try_from(boottime_ns).unwrap_or(i64::MAX)
}

/// One try of the agent to resolve a container's devices that failed.
pub(super) struct Try {
    pub container: String,
    pub at_ns: i64,
    pub approximate: bool,
}

/// What the helpers below need to know, and the story as far as it is told.
pub(super) struct Telling<'a> {
    pub boot: &'a Boot,
    pub file: &'a BootFile,
    pub tries: Vec<Try>,
    pub story: Story,
    /// A hostile guest can name as many GPUs as it writes records: none of them is looked for twice.
    pub gpus: HashMap<PciAddress, GpuFacts>,
}

/// What other records say of a GPU.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct GpuFacts {
    pub index: Option<u64>,
    pub bound_ns: Option<i64>,
    /// PCI device id.
    pub device: Option<u16>,
}

impl Telling<'_> {
    pub fn gpu_name(&self, address: PciAddress) -> GpuName {
        GpuName { index: self.gpus.get(&address).and_then(|g| g.index), address }
    }

    /// Adds a derived step, if it took any time, and gives its index.
    pub fn derive(&mut self, name: &str, begin_ns: i64, end_ns: i64) -> Option<usize> {
        (begin_ns < end_ns).then(|| {
            self.story.steps.push(Step { name: name.to_string(), begin_ns, end_ns: Some(end_ns), derived: true, ..Step::default() });
            self.story.steps.len() - 1
        })
    }

    pub fn step_mut(&mut self, index: usize) -> Option<&mut Step> {
        self.story.steps.get_mut(index)
    }

    /// The first step of that name that did not fail.
    pub fn first(&self, name: &str) -> Option<usize> {
        let steps = self.story.steps.iter().enumerate();
        steps.filter(|(_, s)| s.name == name && !s.failed).min_by_key(|(_, s)| s.begin_ns).map(|(i, _)| i)
    }

    pub fn milestone(&self, name: &str) -> Option<i64> {
        self.boot.milestones.iter().find(|m| m.name == name).and_then(|m| m.boottime_ns).map(ns)
    }
}

/// Everything that is known of a boot.
pub fn story(boot: &Boot, file: &BootFile, agent: &[AgentLine]) -> Story {
    let mut telling = Telling { boot, file, tries: tries(file, agent), story: Story::default(), gpus: gpus(boot, file) };
    telling.story.last_ns = file.records.iter().map(|r| ns(r.boottime_ns)).max().unwrap_or(0);
    spans(&mut telling);
    before_kernel(&mut telling);
    kernel_steps::tell(&mut telling);
    init_steps(&mut telling);
    let settle = settling(&mut telling);
    chain_serial_initialisation(&mut telling);
    let created = agent_steps::tell(&mut telling);
    runtime_steps::tell(&mut telling);
    milestones(&mut telling, &created, settle);
    missing(&mut telling, agent);
    telling.story
}

fn tries(file: &BootFile, agent: &[AgentLine]) -> Vec<Try> {
    let clock = file.clock();
    let mut points = ClockPoints::default();
    file.records.iter().for_each(|record| points.add(record));
    let mut tries = Vec::new();
    for line in agent {
        if let AgentEvent::CdiTryFailed { container, .. } = &line.event
            && let Some(placed) = points.place(line.realtime_ns, &clock)
        {
            tries.push(Try { container: container.clone(), at_ns: ns(placed.boottime_ns), approximate: placed.approximate });
        }
    }
    tries.sort_by_key(|t| t.at_ns);
    tries
}

fn gpus(boot: &Boot, file: &BootFile) -> HashMap<PciAddress, GpuFacts> {
    let facts = |gpu: &Gpu| GpuFacts { index: gpu.index, bound_ns: gpu.bound.map(|b| ns(b.at_ns)), device: None };
    let mut gpus: HashMap<PciAddress, GpuFacts> = boot.gpus.iter().map(|g| (g.address, facts(g))).collect();
    for record in file.records.iter().filter(|r| r.name == names::GPU_FOUND) {
        // `10de:2330`, in earlier versions `0x2330`.
        let id = record.fields.get("device").and_then(Field::as_str).and_then(|d| d.rsplit([':', 'x']).next());
        if let Some(gpu) = record.gpu.and_then(|address| gpus.get_mut(&address)) {
            gpu.device = id.and_then(|id| u16::from_str_radix(id, 16).ok());
        }
    }
    gpus
}

/// The recorded spans. One whose beginning was lost has no place on the clock and is left out.
fn spans(telling: &mut Telling) {
    let boot = telling.boot;
    let kept = || boot.spans.iter().filter(|s| s.begin_ns.is_some());
    let index: HashMap<u64, usize> = kept().enumerate().map(|(i, span)| (span.id, i)).collect();
    for span in kept() {
        let detail = match span.name.as_str() {
            names::MODULE_LOAD => span.fields.get("module").and_then(Field::as_str).unwrap_or(""),
            _ => "",
        };
        let step = Step {
            span: Some(span.id),
            name: span.name.to_string(),
            detail: detail.to_string(),
            gpu: span.gpu.map(|address| telling.gpu_name(address)),
            begin_ns: ns(span.begin_ns.unwrap_or(0)),
            end_ns: span.end_ns.map(ns),
            parent: span.parent.and_then(|id| index.get(&id).copied()),
            // An id that no span has becomes an index of nothing, and is counted as such.
            after: span.after.iter().map(|id| index.get(id).copied().unwrap_or(usize::MAX)).collect(),
            failed: span.error.is_some(),
            ..Step::default()
        };
        telling.story.steps.push(step);
    }
    let lost = boot.spans.len() - telling.story.steps.len();
    if lost > 0 {
        telling.story.missing.push(format!("the beginning of {lost} step(s) was lost"));
    }
}

/// VMM and firmware, where the TSC of the guest tells.
fn before_kernel(telling: &mut Telling) {
    let boot = telling.boot;
    if let Some(before) = boot.clock.before_kernel {
        telling.derive(derived::VMM_FIRMWARE, -ns(before.took_ns), 0);
        let start = Milestone { name: VM_START.into(), at_ns: -ns(before.took_ns), error_ns: before.error_ns, ..Milestone::default() };
        telling.story.milestones.push(start);
    }
    telling.story.missing.extend(boot.clock.notes.iter().cloned());
}

/// What PID 1, the keeper and the worker do between two recorded steps: each does one thing after another there.
fn init_steps(telling: &mut Telling) {
    let times = |telling: &Telling, name: &str| {
        let step = telling.first(name).and_then(|i| telling.story.steps.get(i));
        step.map(|s| (s.begin_ns, s.end_ns))
    };
    let exec = times(telling, names::AGENT_EXEC);
    if let (Some((_, Some(stage0_end))), Some((exec_begin, _))) = (times(telling, names::STAGE0), exec) {
        telling.derive(derived::HANDOVER, stage0_end, exec_begin);
    }
    let scan = times(telling, names::PCI_SCAN);
    let worker = times(telling, names::WORKER_START).or(scan);
    if let (Some((_, Some(exec_end))), Some((worker_begin, _))) = (exec, worker) {
        telling.derive(derived::WORKER, exec_end, worker_begin);
    }
    let looked = times(telling, names::DRIVER_LOOK).or(scan);
    if let (Some((_, Some(looked_end))), Some((load_begin, _))) = (looked, times(telling, names::MODULE_LOAD)) {
        telling.derive(derived::PREPARE, looked_end, load_begin);
    }
}

/// What the worker does between the last thing that it waited for and the moment at which it says that the boot is settled: it hears of it, and tells.
fn settling(telling: &mut Telling) -> Option<usize> {
    let settled_ns = ns(telling.boot.settled_ns?);
    let ended: Vec<(usize, i64)> = {
        let of_gpus = telling.story.steps.iter().enumerate().filter(|(_, s)| s.gpu.is_some() && !s.derived);
        of_gpus.filter_map(|(i, s)| Some((i, s.end_ns.filter(|end| *end <= settled_ns)?))).collect()
    };
    let last_ns = ended.iter().map(|(_, end)| *end).max()?;
    let settle = telling.derive(derived::SETTLE, last_ns, settled_ns)?;
    if let Some(step) = telling.step_mut(settle) {
        step.follows = ended.into_iter().map(|(i, _)| i).collect();
    }
    Some(settle)
}

/// Where the boot's strategy was to initialise one GPU after another, each had to wait for the one before.
fn chain_serial_initialisation(telling: &mut Telling) {
    let strategy = telling.file.records.iter().find(|r| r.kind == Kind::Event && r.name == names::STRATEGY);
    if strategy.and_then(|r| r.fields.get("init")).and_then(Field::as_str) != Some("serial") {
        return;
    }
    let mut inits: Vec<(i64, usize)> = Vec::new();
    for (i, step) in telling.story.steps.iter().enumerate().filter(|(_, s)| s.name == names::GPU_INIT) {
        inits.push((step.begin_ns, i));
    }
    inits.sort_unstable();
    for pair in inits.windows(2) {
        let [(_, before), (begin_ns, after)] = pair else { continue };
        let ended = telling.story.steps.get(*before).and_then(|s| s.end_ns).is_some_and(|end| end <= *begin_ns);
        if ended && let Some(step) = telling.step_mut(*after) {
            step.follows.push(*before);
        }
    }
}

fn milestones(telling: &mut Telling, created: &BTreeMap<i64, usize>, settle: Option<usize>) {
    for milestone in telling.boot.milestones.iter().filter(|m| m.name != SETTLED) {
        let Some(at_ns) = milestone.boottime_ns.map(ns) else { continue };
        let first = |name: &str| telling.first(name);
        let after: Option<usize> = match milestone.name {
            "init start" => first(derived::KERNEL_EXEC).or(first(derived::KERNEL)),
            "agent exec" => first(derived::HANDOVER).or(first(names::STAGE0)),
            "agent ready" => first(derived::AGENT_START),
            "first container" | "last container" => created.get(&at_ns).copied(),
            _ => None,
        };
        telling.story.milestones.push(Milestone {
            name: milestone.name.to_string(),
            at_ns,
            approximate: milestone.approximate,
            after: after.into_iter().collect(),
            ..Milestone::default()
        });
    }
    let of_name = |telling: &Telling, wanted: fn(&Step) -> bool| -> Vec<usize> {
        telling.story.steps.iter().enumerate().filter(|(_, s)| wanted(s)).map(|(i, _)| i).collect()
    };
    if let Some(settled_ns) = telling.boot.settled_ns {
        let initialised = || of_name(telling, |s| s.name == names::GPU_INIT && s.end_ns.is_some());
        let after = settle.map_or_else(initialised, |settle| vec![settle]);
        telling.story.milestones.push(Milestone { name: SETTLED.into(), at_ns: ns(settled_ns), after, ..Milestone::default() });
    } else if telling.story.steps.iter().any(|s| s.end_ns.is_none()) || !telling.boot.gpus.is_empty() {
        // It never came to an end: what it was in when the record ended is what there is to see. Who only waits for that did not keep it.
        let after = of_name(telling, |s| s.end_ns.is_none() && !classify(&s.name).waiting);
        let at_ns = telling.story.last_ns;
        telling.story.milestones.push(Milestone { name: LAST_RECORD.into(), at_ns, after, ..Milestone::default() });
    }
}

fn missing(telling: &mut Telling, agent: &[AgentLine]) {
    let none = |name: &str| telling.first(name).is_none();
    let mut missing = Vec::new();
    if agent.is_empty() && telling.milestone("agent ready").is_none() {
        missing.push("no lines of the agent (--console): when it was ready, waited and created containers is not known".to_string());
    }
    if none(derived::KERNEL_EXEC) {
        missing.push("no `Run ... as init process` line of the kernel: its time and that of the first exec are one".to_string());
    }
    if telling.boot.lost.records > 0 {
        missing.push(format!("{} record(s) are missing, and the steps they told of", telling.boot.lost.records));
    }
    telling.story.missing.extend(missing);
}
