//! The records of one boot, and the agent's lines if they are known, as a [`Story`].
//!
//! Spans are copied unchanged. Steps that follow from other records by the order in which kernel,
//! init and agent work are added and marked as derived ([`super::kernel_steps`],
//! [`super::agent_steps`], [`super::runtime_steps`], and the init's own two here).

use super::draft::{Draft, GpuFacts, LAST_RECORD, Try, VM_START};
use super::intervals::ns;
use super::model::{Boot, Gpu, SETTLED};
use super::story::{Milestone, RawStep, Story};
use super::{agent_steps, host_steps, kernel_steps, runtime_steps};
use crate::data::agent_log::AgentEvent;
use crate::data::boot_file::BootFile;
use crate::data::clock_points::Placed;
use crate::data::compact_record::Field;
use crate::data::compact_record::Record;
use kata_gpu_wire::catalogue::{derived, row_of};
use kata_gpu_wire::names;
use kata_gpu_wire::pci_address::PciAddress;
use kata_gpu_wire::record::Kind;
use std::collections::{BTreeMap, HashMap};

/// Detail of an initialisation that a log shows without its GPU.
const UNKNOWN_GPU: &str = "GPU unknown";

/// All known steps and milestones of a boot.
pub fn story(boot: &Boot, file: &BootFile) -> Story {
    let mut draft = Draft {
        boot,
        file,
        tries: tries(boot),
        story: Story::default(),
        gpus: gpus(boot, file),
    };
    draft.story.last_ns = file
        .records
        .iter()
        .map(|r| ns(r.boottime_ns))
        .max()
        .unwrap_or(0);
    spans(&mut draft);
    before_kernel(&mut draft);
    kernel_steps::add(&mut draft);
    init_steps(&mut draft);
    let settle = settling(&mut draft);
    chain_serial_initialisation(&mut draft);
    let created = agent_steps::add(&mut draft);
    runtime_steps::add(&mut draft);
    host_steps::add(&mut draft);
    milestones(&mut draft, &created, settle);
    missing(&mut draft);
    draft.story
}

fn tries(boot: &Boot) -> Vec<Try> {
    let of_event = |(event, placed): (&AgentEvent, Placed)| match event {
        AgentEvent::CdiTryFailed { container, .. } => Some(Try {
            container: container.clone(),
            at_ns: ns(placed.boottime_ns),
            approximate: placed.approximate,
        }),
        _ => None,
    };
    let mut tries: Vec<Try> = boot.agent_moments().filter_map(of_event).collect();
    tries.sort_by_key(|t| t.at_ns);
    tries
}

fn gpus(boot: &Boot, file: &BootFile) -> HashMap<PciAddress, GpuFacts> {
    let facts = |gpu: &Gpu| GpuFacts {
        index: gpu.index,
        bound_ns: gpu.bound.map(|b| ns(b.at_ns)),
        device: None,
    };
    let mut gpus: HashMap<PciAddress, GpuFacts> =
        boot.gpus.iter().map(|g| (g.address, facts(g))).collect();
    for record in file.records.iter().filter(|r| r.name == names::GPU_FOUND) {
        // `10de:2330`, in earlier versions `0x2330`.
        let id = record
            .fields
            .text("device")
            .and_then(|d| d.rsplit([':', 'x']).next());
        if let Some(gpu) = record.gpu.and_then(|address| gpus.get_mut(&address)) {
            gpu.device = id.and_then(|id| u16::from_str_radix(id, 16).ok());
        }
    }
    gpus
}

/// Adds the recorded spans. Spans without a beginning have no place on the clock: omit them.
fn spans(draft: &mut Draft) {
    let boot = draft.boot;
    let kept = || boot.spans.iter().filter(|s| s.begin_ns.is_some());
    let index: HashMap<u64, usize> = kept().enumerate().map(|(i, span)| (span.id, i)).collect();
    for span in kept() {
        let detail = match span.name.as_str() {
            names::MODULE_LOAD => span
                .fields
                .get("module")
                .and_then(Field::as_str)
                .unwrap_or(""),
            names::GPU_INIT if span.gpu.is_none() => UNKNOWN_GPU,
            _ => "",
        };
        let step = RawStep {
            span: Some(span.id),
            name: span.name.to_string(),
            detail: detail.to_string(),
            gpu: span.gpu.map(|address| draft.gpu_name(address)),
            begin_ns: ns(span.begin_ns.unwrap_or(0)),
            end_ns: span.end_ns.map(ns),
            parent: span.parent.and_then(|id| index.get(&id).copied()),
            // An unknown id becomes an index of nothing, and is counted as such.
            after: span
                .after
                .iter()
                .map(|id| index.get(id).copied().unwrap_or(usize::MAX))
                .collect(),
            failed: span.error.is_some(),
            ..RawStep::default()
        };
        draft.story.steps.push(step);
    }
    let lost = boot.spans.len() - draft.story.steps.len();
    if lost > 0 {
        draft
            .story
            .missing
            .push(format!("the beginning of {lost} step(s) was lost"));
    }
}

/// Adds VMM and firmware, if the guest's TSC shows their time.
fn before_kernel(draft: &mut Draft) {
    let boot = draft.boot;
    if let Some(before) = boot.clock.before_kernel {
        draft.derive(derived::VMM_FIRMWARE, -ns(before.took_ns), 0);
        let start = Milestone {
            name: VM_START.into(),
            at_ns: -ns(before.took_ns),
            error_ns: before.error_ns,
            ..Milestone::default()
        };
        draft.story.milestones.push(start);
    }
    draft.story.missing.extend(boot.clock.notes.iter().cloned());
}

/// Adds the work of PID 1, the keeper and the worker between two recorded steps: each does one
/// thing after another there.
fn init_steps(draft: &mut Draft) {
    let times = |draft: &Draft, name: &str| {
        let step = draft.first(name).and_then(|i| draft.story.steps.get(i));
        step.map(|s| (s.begin_ns, s.end_ns))
    };
    let exec = times(draft, names::AGENT_EXEC);
    if let (Some((_, Some(stage0_end))), Some((exec_begin, _))) =
        (times(draft, names::STAGE0), exec)
    {
        draft.derive(derived::HANDOVER, stage0_end, exec_begin);
    }
    let scan = times(draft, names::PCI_SCAN);
    let worker = times(draft, names::WORKER_START).or(scan);
    if let (Some((_, Some(exec_end))), Some((worker_begin, _))) = (exec, worker) {
        draft.derive(derived::WORKER, exec_end, worker_begin);
    }
    let looked = times(draft, names::DRIVER_LOOK).or(scan);
    if let (Some((_, Some(looked_end))), Some((load_begin, _))) =
        (looked, times(draft, names::MODULE_LOAD))
    {
        draft.derive(derived::PREPARE, looked_end, load_begin);
    }
}

/// Adds the worker's work between the last thing it waited for and its report that the boot is
/// settled.
fn settling(draft: &mut Draft) -> Option<usize> {
    let settled_ns = ns(draft.boot.settled_ns?);
    // In a log, the time may be another program's: the init has no step that ends with it.
    let settled = draft.file.records.iter().find(|r| r.name == names::SETTLED);
    if settled.is_some_and(|record| record.fields.get("by").is_some()) {
        return None;
    }
    let ended: Vec<(usize, i64)> = {
        let of_gpus = draft
            .story
            .steps
            .iter()
            .enumerate()
            .filter(|(_, s)| s.gpu.is_some() && !s.derived);
        of_gpus
            .filter_map(|(i, s)| Some((i, s.end_ns.filter(|end| *end <= settled_ns)?)))
            .collect()
    };
    let last_ns = ended.iter().map(|(_, end)| *end).max()?;
    let settle = draft.derive(derived::SETTLE, last_ns, settled_ns)?;
    if let Some(step) = draft.step_mut(settle) {
        step.follows = ended.into_iter().map(|(i, _)| i).collect();
    }
    Some(settle)
}

/// Orders initialisations one after another, by the boot's strategy, or because only their marks in
/// the driver's log are known: each had to wait for the one before.
fn chain_serial_initialisation(draft: &mut Draft) {
    let strategy = draft
        .file
        .records
        .iter()
        .find(|r| r.kind == Kind::Event && r.name == names::STRATEGY);
    let is_serial = strategy
        .and_then(|r| r.fields.get("init"))
        .and_then(Field::as_str)
        == Some("serial");
    let mut inits: Vec<(i64, usize)> = Vec::new();
    let is_chained =
        |step: &RawStep| step.name == names::GPU_INIT && (is_serial || step.detail == UNKNOWN_GPU);
    for (i, step) in draft
        .story
        .steps
        .iter()
        .enumerate()
        .filter(|(_, step)| is_chained(step))
    {
        inits.push((step.begin_ns, i));
    }
    inits.sort_unstable();
    for pair in inits.windows(2) {
        let [(_, before), (begin_ns, after)] = pair else {
            continue;
        };
        let ended = draft
            .story
            .steps
            .get(*before)
            .and_then(|s| s.end_ns)
            .is_some_and(|end| end <= *begin_ns);
        if ended && let Some(step) = draft.step_mut(*after) {
            step.follows.push(*before);
        }
    }
}

fn milestones(draft: &mut Draft, created: &BTreeMap<i64, usize>, settle: Option<usize>) {
    for milestone in draft.boot.milestones.iter().filter(|m| m.name != SETTLED) {
        let Some(at_ns) = milestone.boottime_ns.map(ns) else {
            continue;
        };
        let first = |name: &str| draft.first(name);
        let after: Option<usize> = match milestone.name {
            "init start" => first(derived::KERNEL_EXEC).or(first(derived::KERNEL)),
            "agent exec" => first(derived::HANDOVER).or(first(names::STAGE0)),
            "agent ready" => first(derived::AGENT_START),
            "first container" | "last container" => created.get(&at_ns).copied(),
            _ => None,
        };
        draft.story.milestones.push(Milestone {
            name: milestone.name.to_string(),
            at_ns,
            approximate: milestone.approximate,
            after: after.into_iter().collect(),
            ..Milestone::default()
        });
    }
    let of_name = |draft: &Draft, wanted: fn(&RawStep) -> bool| -> Vec<usize> {
        draft
            .story
            .steps
            .iter()
            .enumerate()
            .filter(|(_, s)| wanted(s))
            .map(|(i, _)| i)
            .collect()
    };
    if let Some(settled_ns) = draft.boot.settled_ns {
        let initialised = || of_name(draft, |s| s.name == names::GPU_INIT && s.end_ns.is_some());
        let after = settle.map_or_else(initialised, |settle| vec![settle]);
        draft.story.milestones.push(Milestone {
            name: SETTLED.into(),
            at_ns: ns(settled_ns),
            after,
            ..Milestone::default()
        });
    } else if draft.story.steps.iter().any(|s| s.end_ns.is_none()) || !draft.boot.gpus.is_empty() {
        // The boot never ended: take the steps that were open at the end of the record. Mere
        // waiters did not keep the boot from ending.
        let after = of_name(draft, |s| s.end_ns.is_none() && !row_of(&s.name).waiting);
        let at_ns = draft.story.last_ns;
        draft.story.milestones.push(Milestone {
            name: LAST_RECORD.into(),
            at_ns,
            after,
            ..Milestone::default()
        });
    }
}

fn missing(draft: &mut Draft) {
    let none = |name: &str| draft.first(name).is_none();
    let mut missing = Vec::new();
    if draft.boot.agent.is_empty() && draft.milestone("agent ready").is_none() {
        missing.push(
            "no lines of the agent (--console): when it was ready, waited and created \
                      containers is not known"
                .to_string(),
        );
    }
    // In an imported boot that line is the start of the init.
    let runs = |r: &Record| r.kmsg_text().starts_with("Run ");
    if none(derived::KERNEL_EXEC) && !draft.file.records.iter().any(runs) {
        missing.push(
            "no `Run ... as init process` line of the kernel: its time and that of the \
                      first exec are one"
                .to_string(),
        );
    }
    if draft.boot.lost.records > 0 {
        missing.push(format!(
            "{} record(s) are missing, with their steps",
            draft.boot.lost.records
        ));
    }
    draft.story.missing.extend(missing);
}
