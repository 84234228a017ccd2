//! When containers get a GPU on which CUDA would fail: one whose fabric is not complete, and a
//! confidential one whose ready state is off. Both states are the simulated driver's, which the
//! stand-ins of fabric manager and NVML change.

use super::harness::{Booted, CONFIDENTIAL, Guest, Outcome, TestContext, VmTest, named};
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
        name: "gpus_with_an_unknown_or_broken_fabric_are_degraded",
        run: degraded,
    },
    VmTest {
        name: "a_new_worker_holds_a_gpu_until_its_fabric_is_complete",
        run: worker_dies,
    },
    VmTest {
        name: "a_ready_state_is_watched_or_waited_for_or_set_as_configured",
        run: ready_state,
    },
    VmTest {
        name: "a_hanging_gpu_holds_the_others_for_a_bounded_time",
        run: hangs,
    },
    VmTest {
        name: "services_wait_for_a_bounded_time_for_an_nvml_that_fails",
        run: silent_nvml,
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
    let end = |begin: Record| {
        let end = booted.record("the end of a wait", |r| {
            r.kind == Kind::End && r.span == begin.span
        })?;
        Ok((begin, end))
    };
    begins.into_iter().map(end).collect()
}

fn fabric(context: &TestContext) -> Result<Outcome> {
    let booted = fabric_guest("standin.nv-fabricmanager=fabric:3000").boot(context, "hopper")?;
    ensure!(readiness(&booted)? == "fabric", "{}", readiness(&booted)?);
    let created = booted.boottime_ns(&booted.created("all")?)?;
    let held = held(&booted, 2)?;
    let published = booted.events(names::GPU_PUBLISHED, 2)?;
    let records = booted.receiver.records();
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
        named(&records, Kind::Event, names::GPU_USABLE)
            .iter()
            .all(|r| r.seq < asked),
        "NVML was asked during initialisations"
    );
    // The facts are reported again, now of a complete fabric.
    let health = booted.record("a complete fabric", |r| {
        r.name == names::GPU_HEALTH && r.fields.get("fabric").is_some_and(|f| f == "completed")
    })?;
    ensure!(health.seq > published[0].seq, "before its publication");
    ensure!(
        named(&records, Kind::Event, names::GPU_WITHHELD).is_empty()
            && named(&records, Kind::Event, names::GPU_DEGRADED).is_empty(),
        "degraded"
    );
    // A person's word goes before the topology.
    let booted = fabric_guest("standin.nv-fabricmanager=never-completes gpuinit.ready=bound")
        .boot(context, "bound")?;
    booted.created("all")?;
    ensure!(readiness(&booted)? == "bind", "{}", readiness(&booted)?);
    // The file comes when all is ready.
    let booted = fabric_guest("standin.nv-fabricmanager=fabric:2000 gpuinit.cdi=complete")
        .boot(context, "complete")?;
    booted.created("all")?;
    let publications = booted.receiver.records();
    let first = named(&publications, Kind::End, names::CDI_PUBLISH);
    ensure!(
        first[0].fields["ready"] == 2,
        "the first file has GPUs that are not ready: {:?}",
        first[0].fields
    );
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
    let script = "testagent.guest=script testagent.script=gpu.held!begin/1>fabric:3";
    let booted = Guest::new()
        .nvml()
        .append(&format!("fakepci.gpus=2 nvidia.fabric_state=2 {script}"))
        .boot(context, "inferred")?;
    ensure!(readiness(&booted)? == "bind", "{}", readiness(&booted)?);
    let withheld = booted.events(names::GPU_WITHHELD, 2)?;
    let topologies = booted.events(names::TOPOLOGY, 2)?;
    ensure!(
        topologies[1].fields["topology"] == "shared-fabric"
            && topologies[1].fields["decided_by"] == "nvml",
        "{:?}",
        topologies[1]
    );
    // Published at its bind, and again when the fabric is complete.
    let published = booted.events(names::GPU_PUBLISHED, 4)?;
    let of = |seq: u64| published.iter().filter(|r| r.seq < seq).count();
    ensure!(
        of(withheld[0].seq) == 2,
        "{} publications before",
        of(withheld[0].seq)
    );
    ensure!(
        held(&booted, 2)?
            .iter()
            .all(|(begin, _)| begin.seq > topologies[1].seq),
        "held before the topology was known"
    );
    // One GPU alone does not use NVLink: what NVML says of its fabric does not count. A sleep as
    // proof, kept: no event follows NVML's answer in a guest that takes nothing back.
    let script = "testagent.guest=script testagent.script=gpu.health>sleep:1500+counters";
    let alone = format!("fakepci.gpus=1 nvidia.fabric_state=2 {script}");
    let booted = Guest::new().nvml().append(&alone).boot(context, "alone")?;
    booted.agent("script", |l| l.get("did") == "counters")?;
    booted.events(names::GPU_PUBLISHED, 1)?;
    let records = booted.receiver.records();
    ensure!(
        named(&records, Kind::Event, names::GPU_WITHHELD).is_empty(),
        "it was taken back"
    );
    Ok(Outcome::Passed)
}

fn degraded(context: &TestContext) -> Result<Outcome> {
    let words = "fakepci.gpus=2 fakepci.switches=2 testagent.containers=all:all";
    let booted = Guest::new().append(words).boot(context, "no-helper")?;
    booted.created("all")?;
    let reported = booted.events(names::GPU_DEGRADED, 2)?;
    ensure!(
        reported
            .iter()
            .all(|r| r.fields["state"] == "fabric unknown"),
        "{reported:?}"
    );
    let nvml = booted.event(names::NVML)?;
    ensure!(
        nvml.error
            .as_deref()
            .is_some_and(|e| e.contains("it is unknown whether CUDA works")),
        "{nvml:?}"
    );
    // Complete with an error: NVLink does not work, CUDA does.
    let booted = fabric_guest("standin.nv-fabricmanager=fabric:200 nvidia.fabric_status=15")
        .boot(context, "broken")?;
    booted.created("all")?;
    let reported = booted.events(names::GPU_DEGRADED, 2)?;
    ensure!(
        reported.iter().all(|r| r.fields["reason"]
            .as_str()
            .is_some_and(|r| r.ends_with("collectives go over PCIe"))),
        "{reported:?}"
    );
    // NVML's crash is no reason to keep GPUs for ever, nor to believe in a fabric at once.
    let booted = fabric_guest("standin.nv-fabricmanager=fabric:200 nvml.fault=crash")
        .boot(context, "crash")?;
    booted.created("all")?;
    let held = held(&booted, 2)?;
    ensure!(
        held.iter()
            .all(|(begin, _)| begin.fields["waits_for"] == "fabric unknown"),
        "{held:?}"
    );
    Ok(Outcome::Passed)
}

fn worker_dies(context: &TestContext) -> Result<Outcome> {
    let script = "testagent.guest=script testagent.script=gpu.held!begin/1>kill";
    let words = format!("standin.nv-fabricmanager=fabric:8000 {script}");
    let booted = fabric_guest(&words).boot(context, "held")?;
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

fn ready_state(context: &TestContext) -> Result<Outcome> {
    let is = |r: &Record, ready: bool| {
        r.name == names::CONFIDENTIAL && r.fields.get("ready").is_some_and(|r| *r == ready)
    };
    // As whoever attests does.
    let script =
        |after: &str| format!("testagent.guest=script testagent.script={after}>nvml:ready_on");
    // Left to whoever attests: given at once, and reported when it turns on.
    let booted = confidential(&script("confidential")).boot(context, "leave")?;
    booted.created("all")?;
    ensure!(readiness(&booted)? == "bind", "{}", readiness(&booted)?);
    let off = booted.record("ready state off", |r| is(r, false))?;
    let on = booted.record("ready state on", |r| is(r, true))?;
    ensure!(off.seq < on.seq, "on before off");
    let records = booted.receiver.records();
    ensure!(
        named(&records, Kind::Begin, names::GPU_HELD).is_empty(),
        "held back"
    );
    // Waited for.
    let booted = confidential(&format!(
        "gpuinit.cc.ready=wait {}",
        script("gpu.held!begin/1")
    ))
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
    // Set by the init, by the incumbent's word.
    let booted = confidential("nvrc.smi.srs=1").boot(context, "boot")?;
    booted.created("all")?;
    let on = booted.record("ready state on", |r| is(r, true))?;
    let published = booted.events(names::GPU_PUBLISHED, 2)?;
    ensure!(
        published.iter().all(|r| r.seq > on.seq),
        "published before it was set"
    );
    // Kata's configuration has the word in guests of all kinds: it costs nothing there.
    let booted = guest("nvrc.smi.srs=1").boot(context, "plain")?;
    booted.created("all")?;
    ensure!(readiness(&booted)? == "bind", "{}", readiness(&booted)?);
    // One GPU of a confidential guest that is not.
    let booted = confidential("nvml.unprotected=1").boot(context, "one")?;
    let reported = booted.record("a mixed mode", |r| {
        r.name == names::CONFIDENTIAL && r.error.is_some()
    })?;
    ensure!(
        reported
            .error
            .as_deref()
            .is_some_and(|e| e.contains("is not confidential, unlike the guest")),
        "{reported:?}"
    );
    // A confidential guest whose GPUs are not.
    let booted = guest(&format!("{CONFIDENTIAL} gpuinit.cc.ready=wait")).boot(context, "mixed")?;
    booted.created("all")?;
    let reported = booted.events(names::CONFIDENTIAL, 2)?;
    ensure!(
        reported.iter().all(|r| r.gpu.is_some()
            && r.error
                .as_deref()
                .is_some_and(|e| e.contains("the guest is confidential, and GPU"))),
        "{reported:?}"
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
    let records = booted.receiver.records();
    ensure!(
        named(&records, Kind::Event, names::SETTLED).is_empty(),
        "it does not hang"
    );
    ensure!(
        named(&records, Kind::End, names::NVML)
            .iter()
            .all(|r| r.error.is_none()),
        "NVML was asked for the GPU that hangs"
    );
    Ok(Outcome::Passed)
}

fn persistenced(context: &TestContext) -> Result<Outcome> {
    // The second one: whatever containers wait for.
    for (case, words) in [("pcie", "nvrc.smi.srs=1"), ("bound", "gpuinit.ready=bound")] {
        let words =
            format!("{CONFIDENTIAL} nvidia.cc=1 standin.nv-fabricmanager=fabric:3000 {words}");
        let booted = with_service(fabric_guest(&words), Name::Persistenced).boot(context, case)?;
        let topology = booted.event(names::TOPOLOGY)?;
        ensure!(
            topology.fields["topology"] == "protected-pcie",
            "{case}: {topology:?}"
        );
        let begin = booted.record("persistenced", |r| {
            r.kind == Kind::Begin
                && r.name == names::SERVICE_START
                && r.fields.get("service").is_some_and(|s| s == "persistenced")
        })?;
        let end = booted.record("persistenced is ready", |r| {
            r.kind == Kind::End && r.span == begin.span
        })?;
        ensure!(
            end.fields["uvm"] == "on: the fabric is complete",
            "{case}: {:?}",
            end.fields
        );
        booted.created("all")?;
        let records = booted.receiver.records();
        let confidential = named(&records, Kind::Event, names::CONFIDENTIAL);
        ensure!(
            confidential
                .iter()
                .all(|r| r.error.is_none() && r.fields["protected_pcie"] == true),
            "{case}: {confidential:?}"
        );
        let done = named(&records, Kind::Event, names::SERVICE_LOG)
            .into_iter()
            .find(|r| r.fields["text"].to_string().contains("configured all"));
        ensure!(
            done.is_some_and(|done| done.seq < begin.seq),
            "{case}: it started before the fabric was complete"
        );
        if case == "pcie" {
            let on = confidential
                .iter()
                .find(|r| r.fields["ready"] == true)
                .context("the ready state was not set")?;
            let published = named(&records, Kind::Event, names::GPU_PUBLISHED);
            ensure!(
                published.len() == 2 && published.iter().all(|r| r.seq > on.seq),
                "{case}: {published:?}"
            );
        }
    }
    Ok(Outcome::Passed)
}

fn silent_nvml(context: &TestContext) -> Result<Outcome> {
    let words = "nvml.fault=crash nvrc.uvm.persistence.mode=on nvrc.dcgm=on";
    let booted = super::services::with_services(guest(words)).boot(context, "crash")?;
    booted.created("all")?;
    for service in ["persistenced", "hostengine", "dcgm-exporter"] {
        let of_service = |r: &Record| {
            r.name == names::SERVICE_START && r.fields.get("service").is_some_and(|s| s == service)
        };
        let begin = booted.record(service, |r| r.kind == Kind::Begin && of_service(r))?;
        let end = booted.record(service, |r| r.kind == Kind::End && r.span == begin.span)?;
        ensure!(end.error.is_none(), "{end:?}");
        if service == "persistenced" {
            ensure!(end.fields["uvm"] == "on: no fabric", "{end:?}");
        }
    }
    Ok(Outcome::Passed)
}
