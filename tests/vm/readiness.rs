//! A failure means that a container gets a GPU on which CUDA fails, because its fabric is not
//! complete or its ready state is off, or that a GPU on which CUDA works is withheld.

use super::harness::{
    Booted, CONFIDENTIAL, Guest, Outcome, TestContext, VmTest, error_has, events, named,
};
use super::services::with_service;
use anyhow::{Context, Result, ensure};
use kata_gpu_init::services::service_table::Name;
use kata_gpu_wire::names;
use kata_gpu_wire::record::{Kind, Record};

pub const TESTS: &[VmTest] = &[
    VmTest {
        name: "a_gpu_is_given_to_containers_when_its_fabric_is_complete",
        run: fabric,
    },
    VmTest {
        name: "an_incomplete_fabric_holds_only_its_gpu_and_is_reported",
        run: incomplete,
    },
    VmTest {
        name: "a_fabric_that_only_nvml_knows_of_takes_gpus_back",
        run: elsewhere,
    },
    VmTest {
        name: "gpus_with_an_unknown_fabric_are_degraded",
        run: degraded,
    },
    VmTest {
        name: "a_new_worker_holds_a_gpu_until_its_fabric_is_complete",
        run: worker_dies,
    },
    VmTest {
        name: "a_ready_state_is_watched_or_waited_for_as_configured",
        run: ready_state,
    },
    VmTest {
        name: "a_hanging_gpu_holds_the_others_for_a_bounded_time",
        run: hangs,
    },
    VmTest {
        name: "persistenced_gets_uvm_persistence_after_the_fabric",
        run: persistenced,
    },
];

/// A guest with NVML, two GPUs and a container that wants both.
fn guest(words: &str) -> Guest {
    Guest::new().nvml().append(&format!(
        "fakepci.gpus=2 testagent.containers=all:all {words}"
    ))
}

/// The same, confidential, with confidential GPUs.
fn confidential(words: &str) -> Guest {
    guest(&format!("{CONFIDENTIAL} nvidia.cc=1 {words}"))
}

/// The first with switches and fabric manager.
fn fabric_guest(words: &str) -> Guest {
    let words = format!("fakepci.switches=2 nvidia.switches=2 nvidia.fabric_state=1 {words}");
    with_service(guest(&words), Name::FabricManager)
}

fn readiness(booted: &Booted) -> Result<String> {
    let event = booted.event(names::READINESS)?;
    Ok(event.fields["waits_for"]
        .as_str()
        .context("no waits_for")?
        .to_string())
}

/// Begins and ends of the waits that are over, by GPU.
fn held(booted: &Booted, count: usize) -> Result<Vec<(Record, Record)>> {
    let begins = booted
        .receiver
        .wait_several(super::harness::DEADLINE, count, |r| {
            r.kind == Kind::Begin && r.name == names::GPU_HELD
        })
        .with_context(|| format!("no {count} waits of GPUs"))?;
    let end = |begin: Record| booted.end_of(&begin).map(|end| (begin, end));
    begins.into_iter().map(end).collect()
}

fn fabric(context: &TestContext) -> Result<Outcome> {
    let booted = fabric_guest("standin.nv-fabricmanager=fabric:3000").boot(context, "hopper")?;
    ensure!(readiness(&booted)? == "fabric", "{}", readiness(&booted)?);
    let created = booted.boottime_ns(&booted.created("all")?)?;
    let held = held(&booted, 2)?;
    let published = booted.events(names::GPU_PUBLISHED, 2)?;
    let records = booted.records();
    for (begin, end) in &held {
        ensure!(
            begin.fields["waits_for"]
                .as_str()
                .is_some_and(|state| state.starts_with("fabric ")),
            "{begin:?}"
        );
        let given = published
            .iter()
            .find(|r| r.gpu == begin.gpu)
            .context("a GPU was not published")?;
        ensure!(
            given.boottime_ns >= end.boottime_ns,
            "published before the end of its wait"
        );
        ensure!(
            created > end.boottime_ns,
            "a container got a GPU before its fabric was complete"
        );
    }
    let asked = named(&records, Kind::Begin, names::NVML)[0].seq;
    ensure!(
        events(&records, names::GPU_USABLE)
            .iter()
            .all(|r| r.seq < asked),
        "NVML was asked during initialisations"
    );
    // The facts are reported again, now of a complete fabric.
    let health = booted.record("a complete fabric", |r| {
        r.name == names::GPU_HEALTH && r.fields.get("fabric").is_some_and(|f| f == "completed")
    })?;
    ensure!(health.seq > published[0].seq, "before its publication");
    booted.has_no(names::GPU_WITHHELD)?;
    booted.has_no(names::GPU_DEGRADED)?;
    Ok(Outcome::Passed)
}

fn incomplete(context: &TestContext) -> Result<Outcome> {
    let words = "standin.nv-fabricmanager=fabric:500+never-completes:1 testagent.containers=one:0";
    let booted = fabric_guest(words).boot(context, "one-of-two")?;
    booted.created("one")?;
    let withheld = booted.event(names::GPU_WITHHELD)?;
    let error = withheld.error.as_deref().unwrap_or_default();
    ensure!(
        error.contains("fabric in progress, and CUDA would fail on it; see fabric manager's log"),
        "{error}"
    );
    let published = booted.events(names::GPU_PUBLISHED, 1)?;
    ensure!(
        published.len() == 1 && published[0].gpu != withheld.gpu,
        "{published:?}"
    );
    Ok(Outcome::Passed)
}

fn elsewhere(context: &TestContext) -> Result<Outcome> {
    let booted = Guest::with("fakepci.gpus=2 nvidia.fabric_state=2")
        .nvml()
        .script("gpu.held!begin/1>fabric:3")
        .boot(context, "inferred")?;
    ensure!(readiness(&booted)? == "bind", "{}", readiness(&booted)?);
    let withheld = booted.events(names::GPU_WITHHELD, 2)?;
    let topologies = booted.events(names::TOPOLOGY, 2)?;
    let inferred = &topologies[1].fields;
    ensure!(
        inferred["topology"] == "shared-fabric" && inferred["decided_by"] == "nvml",
        "{inferred:?}"
    );
    // Each GPU is published at its bind, and again when the fabric is complete.
    let published = booted.events(names::GPU_PUBLISHED, 4)?;
    let before = |r: &&Record| r.seq < withheld[0].seq;
    ensure!(
        published.iter().filter(before).count() == 2,
        "{published:?}"
    );
    let held = held(&booted, 2)?;
    ensure!(
        held.iter().all(|(begin, _)| begin.seq > topologies[1].seq),
        "held before the topology was known"
    );
    Ok(Outcome::Passed)
}

fn degraded(context: &TestContext) -> Result<Outcome> {
    let words = "fakepci.gpus=2 fakepci.switches=2 testagent.containers=all:all";
    let booted = Guest::with(words).boot(context, "no-helper")?;
    booted.created("all")?;
    let reported = booted.events(names::GPU_DEGRADED, 2)?;
    ensure!(
        reported
            .iter()
            .all(|r| r.fields["state"] == "fabric unknown"),
        "{reported:?}"
    );
    let nvml = booted.event(names::NVML)?;
    error_has(&nvml, &["it is unknown whether CUDA works"])?;
    Ok(Outcome::Passed)
}

fn worker_dies(context: &TestContext) -> Result<Outcome> {
    let booted = fabric_guest("standin.nv-fabricmanager=fabric:8000")
        .script("gpu.held!begin/1>kill")
        .boot(context, "held")?;
    let died = booted.event(names::PROCESS_DIED)?;
    let published = booted.events(names::GPU_PUBLISHED, 2)?;
    let last = booted.record("a wait after the death", |r| {
        r.name == names::GPU_HELD && r.kind == Kind::Begin && r.seq > died.seq
    })?;
    ensure!(
        published.iter().all(|r| r.seq > last.seq),
        "published while its fabric was in progress"
    );
    booted.created("all")?;
    Ok(Outcome::Passed)
}

/// The tests of `readiness` have every choice, and those of `health` every sentence about a GPU
/// that is not as confidential as its guest.
fn ready_state(context: &TestContext) -> Result<Outcome> {
    let is = |r: &Record, ready: bool| {
        r.name == names::CONFIDENTIAL && r.fields.get("ready").is_some_and(|r| *r == ready)
    };
    // Left to whoever attests: given at once, and reported when it turns on.
    let booted = confidential("")
        .script("confidential>nvml:ready_on")
        .boot(context, "leave")?;
    booted.created("all")?;
    ensure!(readiness(&booted)? == "bind", "{}", readiness(&booted)?);
    let off = booted.record("ready state off", |r| is(r, false))?;
    let on = booted.record("ready state on", |r| is(r, true))?;
    ensure!(off.seq < on.seq, "on before off");
    booted.has_no(names::GPU_HELD)?;
    // Waited for.
    let booted = confidential("gpuinit.cc.ready=wait")
        .script("gpu.held!begin/1>nvml:ready_on")
        .boot(context, "wait")?;
    booted.created("all")?;
    let waited = held(&booted, 2)?;
    ensure!(
        waited
            .iter()
            .all(|(begin, _)| begin.fields["waits_for"] == "ready state off"),
        "{waited:?}"
    );
    let published = booted.events(names::GPU_PUBLISHED, 2)?;
    ensure!(
        published.iter().all(|r| r.seq > waited[0].1.seq),
        "published before"
    );
    Ok(Outcome::Passed)
}

fn hangs(context: &TestContext) -> Result<Outcome> {
    // A fabric that is complete: nothing but the question to NVML is waited for.
    let words = "fakepci.gpus=2 fakepci.switches=2 nvidia.fabric_state=3 nvidia.init_hang=1 \
        gpuinit.init=serial testagent.containers=one:0";
    let booted = Guest::new().nvml().append(words).boot(context, "hangs")?;
    booted.created("one")?;
    let published = booted.events(names::GPU_PUBLISHED, 1)?;
    ensure!(published.len() == 1, "{published:?}");
    let records = booted.records();
    booted.has_no(names::SETTLED)?;
    ensure!(
        named(&records, Kind::End, names::NVML)
            .iter()
            .all(|r| r.error.is_none()),
        "NVML was asked for the GPU that hangs"
    );
    Ok(Outcome::Passed)
}

fn persistenced(context: &TestContext) -> Result<Outcome> {
    let words =
        format!("{CONFIDENTIAL} nvidia.cc=1 standin.nv-fabricmanager=fabric:3000 nvrc.smi.srs=1");
    let booted = with_service(fabric_guest(&words), Name::Persistenced).boot(context, "pcie")?;
    let topology = booted.event(names::TOPOLOGY)?;
    ensure!(
        topology.fields["topology"] == "protected-pcie",
        "{topology:?}"
    );
    let (begin, end) = booted.span_of(names::SERVICE_START, ("service", "persistenced"), 1)?;
    ensure!(end.fields["uvm"] == "on: the fabric is complete", "{end:?}");
    booted.created("all")?;
    let records = booted.records();
    let confidential = events(&records, names::CONFIDENTIAL);
    ensure!(
        confidential
            .iter()
            .all(|r| r.error.is_none() && r.fields["protected_pcie"] == true),
        "{confidential:?}"
    );
    let done = events(&records, names::SERVICE_LOG)
        .into_iter()
        .find(|r| r.fields["text"].to_string().contains("configured all"));
    ensure!(
        done.is_some_and(|done| done.seq < begin.seq),
        "it started before the fabric was complete"
    );
    let on = confidential
        .iter()
        .find(|r| r.fields["ready"] == true)
        .context("the ready state was not set")?;
    let published = events(&records, names::GPU_PUBLISHED);
    ensure!(
        published.len() == 2 && published.iter().all(|r| r.seq > on.seq),
        "{published:?}"
    );
    Ok(Outcome::Passed)
}
