//! A failure means that the helper for NVML misreports a GPU, does not set what a parameter asks
//! for, or takes a container or a service with it when it fails. The library is a stand-in, which
//! tests/host/nvml.rs compares with NVIDIA's.

use super::harness::{Booted, Guest, Outcome, TestContext, VmTest, error_has, events, named};
use anyhow::{Context, Result, ensure};
use kata_gpu_wire::names;
use kata_gpu_wire::record::{Kind, Record};

pub const TESTS: &[VmTest] = &[
    VmTest {
        name: "nvml_reports_each_gpu_and_sets_what_parameters_ask_for",
        run: reports_and_sets,
    },
    VmTest {
        name: "nvml_that_differs_from_pci_is_an_error_of_that_gpu",
        run: differs,
    },
    VmTest {
        name: "nvml_that_crashes_fails_one_step_and_no_container",
        run: crashes,
    },
    VmTest {
        name: "nvml_without_its_helper_reports_settings_as_not_done",
        run: without_helper,
    },
    VmTest {
        name: "nvml_makes_uuids_of_mig_instances_names_of_the_same_nodes",
        run: instances,
    },
];

const GPUS: usize = 4;

/// A guest with NVML, its four GPUs and a container that wants them all.
fn guest(words: &str) -> Guest {
    Guest::new().nvml().append(&format!(
        "fakepci.gpus={GPUS} testagent.containers=all:all {words}"
    ))
}

fn health(booted: &Booted, count: usize) -> Result<Vec<Record>> {
    booted.events(names::GPU_HEALTH, count)
}

/// The end of NVML's step.
fn asked(booted: &Booted) -> Result<Record> {
    let begin = booted.record("nvml", |r| r.kind == Kind::Begin && r.name == names::NVML)?;
    booted.end_of(&begin)
}

fn without_helper(context: &TestContext) -> Result<Outcome> {
    let words = "gpuinit.gpu.power=500 testagent.containers=all:all";
    let booted = Guest::with(words).boot(context, "no-helper")?;
    error_has(
        &booted.event(names::NVML)?,
        &["kata-gpu-nvml is not in /usr/bin"],
    )?;
    booted.created("all")?;
    booted.has_no(names::GPU_HEALTH)?;
    Ok(Outcome::Passed)
}

fn reports_and_sets(context: &TestContext) -> Result<Outcome> {
    let words = "gpuinit.gpu.graphics-clock=1200,1980 nvrc.smi.pl=500 gpuinit.gpu.memory-clock=99 \
        nvml.fabric=3:0:170 nvml.cc=1:0";
    let booted = guest(words).boot(context, "good")?;
    let end = asked(&booted)?;
    ensure!(end.error.is_none(), "nvml: {:?}", end.error);
    ensure!(
        end.fields["devices"] == GPUS && end.fields["driver"] == "550.163.01",
        "nvml: {:?}",
        end.fields
    );
    let records = booted.records();
    let settled = events(&records, names::SETTLED);
    let began = named(&records, Kind::Begin, names::NVML);
    ensure!(
        settled[0].seq < began[0].seq,
        "NVML was asked before all GPUs were settled"
    );
    let settings = booted.events(names::GPU_SETTING, 3 * GPUS)?;
    let refused: Vec<_> = settings.iter().filter_map(|r| r.error.as_deref()).collect();
    ensure!(
        refused.len() == GPUS
            && refused
                .iter()
                .all(|e| e.starts_with("memory clock, MHz, 99 to 99:")),
        "refused: {refused:?}"
    );
    let health = health(&booted, GPUS)?;
    for (place, record) in health.iter().enumerate() {
        ensure!(record.error.is_none(), "GPU {place}: {:?}", record.error);
        let is = |name: &str, value: serde_json::Value| -> Result<()> {
            ensure!(
                record.fields.get(name) == Some(&value),
                "GPU {place}: {name}={:?}, not {value}",
                record.fields.get(name)
            );
            Ok(())
        };
        // Asked after the settings.
        is("graphics_mhz", 1200.into())?;
        is("power_limit_mw", 500_000.into())?;
        is("memory_mhz", 2619.into())?;
        is("power_mw", 71_000.into())?;
        is("fabric", "completed".into())?;
        is("clique", 7.into())?;
        is("nvlinks", 18.into())?;
        is("nvlinks_active", 17.into())?;
        is("rows_remapped", 1.into())?;
        is("remap_failed", false.into())?;
        is("persistence", false.into())?;
        is("ecc", true.into())?;
        is("throttle", "gpu_idle".into())?;
        let uuid = record
            .fields
            .get("uuid")
            .and_then(|u| u.as_str())
            .context("no uuid")?;
        ensure!(uuid.starts_with("GPU-"), "uuid {uuid}");
    }
    let confidential = booted.record("the confidential state", |r| {
        r.name == names::CONFIDENTIAL && r.error.is_none()
    })?;
    ensure!(
        confidential.fields["enabled"] == true && confidential.fields["ready"] == false,
        "{confidential:?}"
    );
    booted.created("all")?;
    let took = end.boottime_ns - began[0].boottime_ns;
    Ok(Outcome::Measured(format!(
        "{} ms for {GPUS} GPUs",
        took / 1_000_000
    )))
}

/// The tests of `health` have every sentence; here is one that rests on what NVML lists, and one of
/// a state that it reports.
fn differs(context: &TestContext) -> Result<Outcome> {
    let booted = guest("nvml.fault=fewer nvml.fabric=3:0:1024").boot(context, "fewer")?;
    let records = health(&booted, 2 * GPUS - 1)?;
    for expected in [
        "is usable, and NVML does not list it",
        "NVLink is not usable between GPUs: the GPU is in no partition",
    ] {
        let of_gpu = |r: &&Record| r.error.as_deref().is_some_and(|e| e.contains(expected));
        let found = records.iter().find(of_gpu);
        ensure!(
            found.is_some_and(|r| r.gpu.is_some()),
            "{expected:?} is not in {records:?}"
        );
    }
    // An error of NVML's takes no GPU from a container.
    booted.created("all")?;
    Ok(Outcome::Passed)
}

/// Services that wait for NVML's answer start all the same.
fn crashes(context: &TestContext) -> Result<Outcome> {
    let words = "nvml.fault=crash nvrc.uvm.persistence.mode=on nvrc.dcgm=on";
    let mut booted = super::services::with_services(guest(words)).boot(context, "crash")?;
    let end = asked(&booted)?;
    error_has(&end, &["kata-gpu-nvml has ended: signal: 6"])?;
    booted.created("all")?;
    booted.settles(GPUS as u64, 0)?;
    for service in ["persistenced", "hostengine", "dcgm-exporter"] {
        let (_, end) = booted.span_of(names::SERVICE_START, ("service", service), 1)?;
        ensure!(
            end.error.is_none()
                && (service != "persistenced" || end.fields["uvm"] == "on: no fabric"),
            "{end:?}"
        );
    }
    let died = events(&booted.records(), names::PROCESS_DIED).len();
    ensure!(died == 0, "a process of the init died");
    booted.still_runs()?;
    Ok(Outcome::Passed)
}

fn instances(context: &TestContext) -> Result<Outcome> {
    // The library lists GPU instance 2 first, /proc lists it last.
    let uuid = |gi: u32, ci: u32| format!("MIG-00000001-{gi:04x}-{ci:04x}-0000-000000000000");
    // Agents up to 3.31 wait for a name that is not there yet.
    let asked = format!(
        "testagent.version=3.31.0 testagent.containers=uuid:{};index:1:3;other:{}",
        uuid(2, 1),
        uuid(1, 0)
    );
    let booted = Guest::with(&format!(
        "fakepci.gpus=2 nvidia.mig=1:2:2 gpuinit.cdi.names=index,uuid {asked}"
    ))
    .nvml()
    .script(&format!(
        "nvml!end>spec-has:{}+kill;process.died>sleep:0;cdi.publish!end>spec",
        uuid(2, 1)
    ))
    .boot(context, "mig")?;
    let nodes = |container: &str| {
        Ok::<_, anyhow::Error>(booted.created(container)?.get("nodes").to_string())
    };
    let (by_uuid, by_index, other) = (nodes("uuid")?, nodes("index")?, nodes("other")?);
    ensure!(
        by_uuid == by_index && by_uuid.contains("/dev/nvidia-caps/"),
        "by UUID {by_uuid}, by index {by_index}"
    );
    ensure!(other != by_uuid, "two instances are one: {other}");
    let health = booted.record("gpu.health of GPU 1", |r| {
        r.name == names::GPU_HEALTH && r.fields.contains_key("mig")
    })?;
    let listed = health.fields["mig"].as_str().context("mig")?;
    ensure!(
        listed.starts_with(&format!("2/1={}, ", uuid(2, 1))) && listed.matches("MIG-").count() == 4,
        "{listed}"
    );
    // A worker that takes over publishes the names before NVML is asked again.
    let line = booted.agent("spec", |line| line.get("file") == "nvidia.yaml")?;
    ensure!(
        [uuid(1, 0), uuid(1, 1), uuid(2, 0), uuid(2, 1)]
            .iter()
            .all(|name| line.get("text").contains(name)),
        "{line:?}"
    );
    ensure!(
        !events(&booted.records(), names::PROCESS_DIED).is_empty(),
        "the worker was not killed"
    );
    Ok(Outcome::Passed)
}
