//! The agent's share: its start, waits of containers, the pause until the next try, and making the
//! container.
//!
//! The agent tries once a second to resolve a container's devices. Until they are published a
//! container waits for the GPUs' steps, which account for that time; the time from then until the
//! next try is the agent's own. Looks at the spec do not name their container: with several
//! containers at once the line between a pause and the creation after it can be another container's
//! look; the sum is never wrong.

use super::draft::Draft;
use super::intervals::ns;
use super::model::{Container, Span};
use super::runtime_steps;
use super::story::RawStep;
use crate::data::compact_record::Field;
use kata_gpu_wire::catalogue::{derived, logged};
use kata_gpu_wire::names;
use kata_gpu_wire::record::Kind;
use std::collections::{BTreeMap, BTreeSet};

/// Shortest time between two tries: the agent sleeps for a second, so an earlier look after a
/// failed try is another container's.
const SOONEST_NEXT_TRY_NS: i64 = 900_000_000;
/// Limit of containers examined in one boot, from the first.
const MAX_CONTAINERS: usize = 64;

/// Adds the agent's steps. Returns, by the time at which a container was created, the step that
/// ended with it.
pub fn add(draft: &mut Draft) -> BTreeMap<i64, usize> {
    let file = draft.file;
    let looks = file
        .records
        .iter()
        .filter(|r| r.kind == Kind::Event && r.name == names::AGENT_LOOK)
        .map(|r| ns(r.boottime_ns));
    let mut looks: Vec<i64> = looks.collect();
    looks.sort_unstable();
    start(draft, &looks);
    let mut created = BTreeMap::new();
    let boot = draft.boot;
    for container in boot.containers.iter().take(MAX_CONTAINERS) {
        if let Some(at_ns) = container.at_ns.map(ns)
            && let Some(step) = add_container(draft, container, at_ns, &looks)
        {
            created.insert(at_ns, step);
        }
    }
    still_waiting(draft);
    created
}

/// Containers that were tried, and neither created nor given up by the end of the record.
fn still_waiting(draft: &mut Draft) {
    let over: BTreeSet<&str> = draft
        .boot
        .containers
        .iter()
        .filter(|c| !c.pending)
        .map(|c| c.name.as_str())
        .collect();
    let mut first: BTreeMap<&str, (i64, bool)> = BTreeMap::new();
    for try_ in draft
        .tries
        .iter()
        .filter(|t| !over.contains(t.container.as_str()))
    {
        if first.len() < MAX_CONTAINERS {
            first
                .entry(&try_.container)
                .or_insert((try_.at_ns, try_.approximate));
        }
    }
    let open = |(name, (begin_ns, approximate)): (&str, (i64, bool))| RawStep {
        name: derived::AGENT_WAIT.to_string(),
        detail: name.to_string(),
        begin_ns,
        derived: true,
        approximate,
        ..RawStep::default()
    };
    let open: Vec<RawStep> = first.into_iter().map(open).collect();
    draft.story.steps.extend(open);
}

/// Steps from the exec to readiness, and from there to the first request.
fn start(draft: &mut Draft, looks: &[i64]) {
    let Some(ready_ns) = draft.milestone("agent ready") else {
        return;
    };
    let exec = draft
        .first(names::AGENT_EXEC)
        .and_then(|i| draft.story.steps.get(i));
    if let Some(exec) = exec {
        // The end of the exec is the time of its detection, which on a busy guest can be after the
        // agent is ready.
        let begin = exec
            .end_ns
            .filter(|end| *end <= ready_ns)
            .unwrap_or(exec.begin_ns);
        draft.derive(derived::AGENT_START, begin, ready_ns);
    }
    if runtime_steps::known(draft) {
        return;
    }
    let containers = &draft.boot.containers;
    let asked = |pause: bool| {
        containers
            .iter()
            .filter(move |c| c.pause == pause)
            .filter_map(|c| c.asked_ns)
            .map(ns)
    };
    let pause = containers
        .iter()
        .filter(|c| c.pause && c.error.is_none())
        .find_map(|c| c.at_ns)
        .map(ns);
    let first = asked(true)
        .chain(asked(false))
        .filter(|at| *at >= ready_ns)
        .min();
    let workload =
        pause.and_then(|pause| Some((pause, asked(false).filter(|at| *at >= pause).min()?)));
    let tried = draft
        .tries
        .iter()
        .map(|t| t.at_ns)
        .find(|at| *at >= ready_ns);
    let looked = looks.iter().copied().find(|at| *at >= ready_ns);
    // Without a line about the request, the first look counts as the request.
    if let Some(asked) = first.or_else(|| tried.into_iter().chain(looked).min()) {
        draft.derive(derived::CONTAINER_REQUEST, ready_ns, asked);
    }
    if let Some((pause, asked)) = workload {
        draft.derive(derived::CONTAINER_REQUEST, pause, asked);
    }
}

fn add_container(
    draft: &mut Draft,
    container: &Container,
    at_ns: i64,
    looks: &[i64],
) -> Option<usize> {
    // A try shortly before the creation was another container's: lines of tries do not name theirs,
    // and a successful one comes a second later.
    let until = if container.error.is_none() {
        at_ns.saturating_sub(SOONEST_NEXT_TRY_NS)
    } else {
        at_ns
    };
    let mine = || {
        draft
            .tries
            .iter()
            .filter(|t| t.container == container.name && t.at_ns <= until)
            .map(|t| t.at_ns)
    };
    let (first_try, last_try) = (mine().min(), mine().max());
    let (published, published_by) = published(draft, container, at_ns);
    let look = match last_try {
        Some(last) => looks
            .iter()
            .copied()
            .find(|l| *l >= last.saturating_add(SOONEST_NEXT_TRY_NS) && *l <= at_ns),
        None => looks.iter().copied().rev().find(|l| *l <= at_ns),
    };
    // A log shows the end of the wait itself.
    let waited_until = wait(draft, container, at_ns).and_then(|(_, end)| end);
    let look = waited_until.or(look);
    let created = container.error.is_none();
    let tried_ns = if created {
        look.unwrap_or(at_ns)
    } else {
        at_ns
    };

    // Until the devices were published, or, if that is unknown, until the last failed try.
    let there = published.or(last_try).map_or(tried_ns, |p| p.min(tried_ns));
    let waited = first_try.and_then(|first| {
        draft.derive(
            derived::AGENT_WAIT,
            first,
            if created { there } else { at_ns },
        )
    });
    let pause = match last_try {
        Some(_) if created => draft.derive(
            derived::AGENT_PAUSE,
            there.max(first_try.unwrap_or(there)),
            tried_ns,
        ),
        _ => None,
    };
    let asked = container.asked_ns.map(ns).filter(|asked| *asked <= at_ns);
    let resolve = asked
        .zip(first_try)
        .and_then(|(asked, first)| draft.derive(derived::CONTAINER_RESOLVE, asked, first));
    let begin = if last_try.is_none() && waited_until.is_none() {
        asked.or(look)
    } else {
        look
    };
    let create = if created {
        begin.and_then(|begin| draft.derive(derived::CONTAINER_CREATE, begin, at_ns))
    } else {
        None
    };
    if let Some(step) = create.and_then(|i| draft.step_mut(i)) {
        step.follows.extend(pause);
    }
    if let Some(step) = pause.or(create).and_then(|i| draft.step_mut(i)) {
        step.follows.extend(published_by);
    }
    let request = draft.first(derived::CONTAINER_REQUEST);
    if let Some(step) = pause.and_then(|i| draft.step_mut(i)) {
        step.follows.extend(request);
    }
    for i in [resolve, waited, pause, create].into_iter().flatten() {
        if let Some(step) = draft.step_mut(i) {
            step.detail.clone_from(&container.name);
            step.approximate = container.approximate;
        }
    }
    create.or(pause)
}

/// A container's last wait for its devices until this time, by the agent's lines: its beginning,
/// and its end where a line shows it.
pub fn wait(draft: &Draft, container: &Container, at_ns: i64) -> Option<(i64, Option<i64>)> {
    let is_its = |span: &&Span| {
        let of = span.fields.get("container").and_then(Field::as_str);
        span.name == logged::AGENT_CDI_WAIT && of == Some(&container.name)
    };
    let spans = draft.boot.spans.iter().filter(is_its);
    let waits = spans.filter_map(|span| Some((ns(span.begin_ns?), span.end_ns.map(ns))));
    let before = waits.filter(|(begin, end)| end.unwrap_or(*begin) <= at_ns);
    before.max_by_key(|(begin, _)| *begin)
}

/// Time at which the last of a container's requested devices was published, and that publication.
/// Both are `None` if a requested device is unknown or was not published by `at_ns`.
fn published(draft: &Draft, container: &Container, at_ns: i64) -> (Option<i64>, Option<usize>) {
    let mut last: Option<i64> = None;
    let asked: BTreeSet<&str> = container
        .devices
        .split([',', ' '])
        .filter_map(|d| d.rsplit('=').next())
        .filter(|d| !d.is_empty())
        .collect();
    for name in asked {
        let gpus: Vec<_> = match (name, name.parse::<u64>()) {
            ("all", _) => draft
                .boot
                .gpus
                .iter()
                .filter(|g| g.failed.is_none() || g.published.is_some())
                .collect(),
            (_, Ok(index)) => draft
                .boot
                .gpus
                .iter()
                .filter(|g| g.index == Some(index))
                .collect(),
            (_, Err(_)) => return (None, None),
        };
        if gpus.is_empty() {
            return (None, None);
        }
        for gpu in gpus {
            match gpu.published.map(|p| ns(p.at_ns)).filter(|p| *p <= at_ns) {
                Some(at) => last = last.max(Some(at)),
                None => return (None, None),
            }
        }
    }
    let by = last.and_then(|last| {
        let steps = draft.story.steps.iter().enumerate();
        let publications = steps.filter(|(_, s)| {
            s.name == names::CDI_PUBLISH && s.end_ns.is_some_and(|end| end <= last)
        });
        publications.max_by_key(|(_, s)| s.end_ns).map(|(i, _)| i)
    });
    (last, by)
}
