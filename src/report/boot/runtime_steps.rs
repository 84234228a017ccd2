//! The host's share: work of containerd, CNI and Kata's shim from the request for the sandbox until
//! its containers ran, and the time without any request.
//!
//! Records of an import have the times of each call's beginning and return. A call's own time
//! excludes the calls inside it and the guest's simultaneous work, which the guest's steps explain:
//! from the VM's start until the agent is ready, and while the agent has a request.

use super::agent_steps;
use super::draft::{Draft, VM_START};
use super::intervals::Intervals;
use super::intervals::ns;
use super::story::{Milestone, RawStep};
use crate::data::compact_record::Record;
use crate::data::imported_record::mark;
use kata_gpu_wire::catalogue::logged as imported;
use kata_gpu_wire::catalogue::{Owner, derived, row_of};
use kata_gpu_wire::record::Kind;

/// Milestone at which containerd was asked for the sandbox.
pub const RUN_POD_SANDBOX: &str = "RunPodSandbox";
/// Milestones at which containerd answered that a container runs.
pub const FIRST_STARTED: &str = "first container started";
pub const LAST_STARTED: &str = "last container started";
/// Suffix of the name of a call that has returned.
const RETURNED: &str = " returned";
/// Limit of calls examined in one boot.
const MAX_CALLS: usize = 1000;

/// A call, from its line to the line of its answer.
struct Call<'a> {
    name: &'static str,
    /// Name of the container; empty for the sandbox.
    container: &'a str,
    begin_ns: i64,
    end_ns: i64,
}

/// Steps for the own time of calls: record name, call, step.
const CALLS: &[(&str, &str, &str)] = &[
    (
        imported::SANDBOX_RUN,
        "RunPodSandbox",
        derived::RUN_POD_SANDBOX,
    ),
    (
        imported::SANDBOX_RUN,
        "CreateContainer",
        derived::CREATE_CONTAINER,
    ),
    (
        imported::SANDBOX_RUN,
        "StartContainer",
        derived::START_CONTAINER,
    ),
    (imported::SANDBOX_CNI, "setup", derived::CNI),
    (imported::SANDBOX_SHIM, "Create", derived::SHIM_CREATE),
    (imported::SANDBOX_SHIM, "Start", derived::SHIM_START),
];

/// Calls by containerd's client.
const REQUESTS: [&str; 3] = [
    derived::RUN_POD_SANDBOX,
    derived::CREATE_CONTAINER,
    derived::START_CONTAINER,
];

/// Time on the guest's clock: a field gives it for records before the kernel's start.
fn at(record: &Record) -> i64 {
    match record.fields.signed("before_ms") {
        Some(ms) => ms.saturating_mul(-1_000_000),
        None => ns(record.boottime_ns),
    }
}

fn text<'a>(record: &'a Record, key: &str) -> &'a str {
    record.fields.text(key).unwrap_or("")
}

/// Whether a log shows the requests to containerd.
pub fn known(draft: &Draft) -> bool {
    imported_events(draft).any(|record| record.name == imported::SANDBOX_RUN)
}

fn imported_events<'a>(draft: &Draft<'a>) -> impl Iterator<Item = &'a Record> + use<'a> {
    draft
        .file
        .records
        .iter()
        .filter(|record| record.kind == Kind::Event && mark(record).is_some())
}

/// Adds the host's steps and milestones. Call it after the agent's steps.
pub fn add(draft: &mut Draft) {
    let calls = calls(draft);
    let asked: Vec<&Call> = calls
        .iter()
        .filter(|call| REQUESTS.contains(&call.name))
        .collect();
    let (Some(first), Some(end_ns)) = (asked.first(), asked.iter().map(|call| call.end_ns).max())
    else {
        return;
    };
    let (first, first_ns) = (first.name, first.begin_ns);
    agents(draft);
    let guests = guests(draft, &calls);
    let within = |inner: &[&str]| -> Vec<(i64, i64)> {
        calls
            .iter()
            .filter(|c| inner.contains(&c.name))
            .map(|call| (call.begin_ns, call.end_ns))
            .collect()
    };
    let (shims, cni) = (
        within(&[derived::SHIM_CREATE, derived::SHIM_START]),
        within(&[derived::CNI]),
    );
    // Without lines of the shim, its time counts as containerd's; only the guest's is known.
    let below_containerd = Intervals::union(
        [
            cni,
            if shims.is_empty() {
                guests.clone()
            } else {
                shims
            },
        ]
        .concat(),
    );
    let below_shim = Intervals::union(guests);
    for call in &calls {
        let own = match call.name {
            derived::CNI => vec![(call.begin_ns, call.end_ns)],
            derived::SHIM_CREATE | derived::SHIM_START => {
                below_shim.missing_in(call.begin_ns, call.end_ns)
            }
            _ => below_containerd.missing_in(call.begin_ns, call.end_ns),
        };
        for (begin_ns, end_ns) in own {
            piece(draft, call.name, call.container, begin_ns, end_ns);
        }
    }
    let busy = Intervals::union(
        calls
            .iter()
            .map(|call| (call.begin_ns, call.end_ns))
            .collect(),
    );
    for (begin_ns, end_ns) in busy.missing_in(first_ns, end_ns) {
        piece(draft, derived::NOBODY_ASKED, "", begin_ns, end_ns);
    }
    chain(draft);
    let mut milestone = |name: &str, at_ns: i64| {
        let ended = draft
            .story
            .steps
            .iter()
            .enumerate()
            .filter(|(_, s)| s.end_ns == Some(at_ns))
            .map(|(i, _)| i);
        let after = ended.collect();
        draft.story.milestones.push(Milestone {
            name: name.into(),
            at_ns,
            after,
            approximate: true,
            ..Milestone::default()
        });
    };
    if first == derived::RUN_POD_SANDBOX {
        milestone(RUN_POD_SANDBOX, first_ns);
    }
    let started = || {
        calls
            .iter()
            .filter(|call| call.name == derived::START_CONTAINER)
            .map(|call| call.end_ns)
    };
    if let (Some(first), Some(last)) = (started().min(), started().max()) {
        milestone(FIRST_STARTED, first);
        if last > first {
            milestone(LAST_STARTED, last);
        }
    }
}

fn piece(draft: &mut Draft, name: &str, container: &str, begin_ns: i64, end_ns: i64) {
    if let Some(step) = draft
        .derive(name, begin_ns, end_ns)
        .and_then(|i| draft.step_mut(i))
    {
        step.detail = container.to_string();
        step.approximate = true;
    }
}

/// All calls with an answer, by their beginnings. Failed calls are no steps to a container.
fn calls<'a>(draft: &Draft<'a>) -> Vec<Call<'a>> {
    let mut open: Vec<Call> = Vec::new();
    let mut calls: Vec<Call> = Vec::new();
    for record in imported_events(draft) {
        let (container, at_ns) = (text(record, "container"), at(record));
        let ready = record.name == imported::SANDBOX_READY;
        let said = if ready {
            "RunPodSandbox returned"
        } else {
            text(record, "call")
        };
        let of = if ready {
            imported::SANDBOX_RUN
        } else {
            record.name.as_str()
        };
        let (call, returned) = said
            .strip_suffix(RETURNED)
            .map_or((said, false), |call| (call, true));
        let Some((_, _, name)) = CALLS
            .iter()
            .find(|(record, known, _)| *record == of && *known == call)
        else {
            continue;
        };
        if !returned && open.len() < MAX_CALLS {
            open.push(Call {
                name,
                container,
                begin_ns: at_ns,
                end_ns: at_ns,
            });
        } else if let Some(begun) = open
            .iter()
            .rposition(|c| c.name == *name && c.container == container)
            .filter(|_| returned)
        {
            let begun = open.remove(begun);
            if calls.len() < MAX_CALLS && record.error.is_none() {
                calls.push(Call {
                    end_ns: at_ns,
                    ..begun
                });
            }
        }
    }
    calls.sort_by_key(|call| (call.begin_ns, call.end_ns));
    calls
}

/// The agent's work for the shim that no other record shows: making the sandbox, and starting a
/// container's program.
fn agents(draft: &mut Draft) {
    let mut asked: Vec<(&str, i64)> = Vec::new();
    let mut found: Vec<(&'static str, String, i64, i64)> = Vec::new();
    for record in imported_events(draft) {
        let (call, name) = match record.name.as_str() {
            imported::AGENT_RPC => {
                if asked.len() < MAX_CALLS {
                    asked.push((text(record, "call"), at(record)));
                }
                continue;
            }
            imported::SANDBOX_AGENT_STARTED => ("create_sandbox", derived::SANDBOX_CREATE),
            imported::CONTAINER_STARTED => ("start_container", derived::CONTAINER_START),
            _ => continue,
        };
        if let Some(begun) = asked
            .iter()
            .rposition(|(asked, at_ns)| *asked == call && *at_ns <= at(record))
        {
            found.push((
                name,
                text(record, "container").to_string(),
                asked.remove(begun).1,
                at(record),
            ));
        }
    }
    for (name, container, begin_ns, end_ns) in found {
        piece(draft, name, &container, begin_ns, end_ns);
    }
}

/// Intervals in which a call waits for the guest.
fn guests(draft: &Draft, calls: &[Call]) -> Vec<(i64, i64)> {
    let first = |name: &str| {
        imported_events(draft)
            .find(|record| record.name == name)
            .map(at)
    };
    let vm_start = draft
        .story
        .milestones
        .iter()
        .find(|m| m.name == VM_START)
        .map(|m| m.at_ns);
    let begin = vm_start
        .or_else(|| first(imported::SANDBOX_VM_STARTED))
        .unwrap_or(0);
    let ready = draft
        .milestone("agent ready")
        .or_else(|| first(imported::SANDBOX_AGENT_STARTED))
        .unwrap_or(begin);
    // A container without an end keeps its call waiting until the call returns.
    let call_around = |at: i64| {
        calls
            .iter()
            .find(|c| c.name == derived::SHIM_CREATE && c.begin_ns <= at && at <= c.end_ns)
            .map(|c| c.end_ns)
    };
    let containers = draft.boot.containers.iter().filter_map(|c| {
        // Without a line about the request, the wait for devices is known.
        let waits = || agent_steps::wait(draft, c, c.at_ns.map_or(i64::MAX, ns));
        let asked = c.asked_ns.map(ns).or_else(|| Some(waits()?.0))?;
        Some((asked, c.at_ns.map(ns).or_else(|| call_around(asked))?))
    });
    let agents =
        draft.story.steps.iter().filter(|s| {
            [derived::SANDBOX_CREATE, derived::CONTAINER_START].contains(&s.name.as_str())
        });
    let agents = agents.filter_map(|step| Some((step.begin_ns, step.end_ns?)));
    [(begin, ready)]
        .into_iter()
        .chain(containers)
        .chain(agents)
        .collect()
}

/// Chains the requests: a step of the host or of the agent comes after the one that ended last, and
/// so does the VM's start.
fn chain(draft: &mut Draft) {
    let hosts = |step: &RawStep| matches!(row_of(&step.name).owner, Owner::Runtime | Owner::Client);
    let linked = |step: &RawStep| hosts(step) || row_of(&step.name).owner == Owner::Agent;
    let mut ends: Vec<(i64, usize)> = Vec::new();
    for (i, step) in draft
        .story
        .steps
        .iter()
        .enumerate()
        .filter(|(_, step)| linked(step) && !row_of(&step.name).waiting)
    {
        ends.extend(step.end_ns.map(|end| (end, i)));
    }
    ends.sort_unstable();
    for (i, step) in draft.story.steps.iter_mut().enumerate() {
        if !linked(step) && step.name != derived::VMM_FIRMWARE || step.name == derived::AGENT_START
        {
            continue;
        }
        let upto = ends.partition_point(|(end, _)| *end <= step.begin_ns);
        let last = ends
            .get(..upto)
            .unwrap_or_default()
            .iter()
            .rev()
            .find(|(_, other)| *other != i);
        step.follows.extend(last.map(|(_, other)| *other));
    }
}
