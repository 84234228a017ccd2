//! Containers and the CDI spec: each starts as soon as the GPUs it asks for are there, and none
//! ever sees an error that is final.

use super::harness::{Booted, Guest, Outcome, TestContext, VmTest};
use anyhow::{Result, ensure};
use kata_gpu_wire::names;
use kata_gpu_wire::record::Kind;

pub const TESTS: &[VmTest] = &[
    VmTest {
        name: "gpu_0s_container_starts_before_gpu_7_is_bound_concurrent",
        run: |c| early(c, "concurrent", SLEEPING),
    },
    VmTest {
        name: "gpu_0s_container_starts_before_gpu_7_is_bound_pipelined",
        run: |c| early(c, "pipelined", "fakepci.enable_ms=600"),
    },
    VmTest {
        name: "a_growing_list_makes_the_agent_fail",
        run: growing_list,
    },
    VmTest {
        name: "names_follow_pci_order_and_paths_the_minors",
        run: other_minors,
    },
    VmTest {
        name: "a_gpu_has_its_uuid_as_a_name_once_the_driver_knows_it",
        run: by_uuid,
    },
    VmTest {
        name: "ready_usable_and_cdi_complete_hold_containers_back",
        run: held_back,
    },
];

/// Probes that sleep for 4 s, on a host that is slow, too: the first one has slept when five GPUs
/// are enabled.
const SLEEPING: &str = "fakepci.device=0x2901 fakepci.enable_ms=1000";
/// One agent try is a second; the rest is room for a guest that computes slowly.
const ONE_TRY_NS: u64 = 2_000_000_000;

fn last(booted: &Booted, name: &str) -> u64 {
    booted
        .receiver
        .records()
        .iter()
        .filter(|r| r.kind == Kind::Event && r.name == name)
        .map(|r| r.boottime_ns)
        .max()
        .unwrap_or(0)
}

fn early(context: &TestContext, bind: &str, host: &str) -> Result<Outcome> {
    // GPU 7 comes eight enables after the start, GPU 0 after the first.
    let words = format!("{host} nvidia.probe_ms=100 testagent.containers=first:0;all:all");
    let mut booted = Guest::new().append(&words).boot(context, bind)?;
    let strategy = booted.record("strategy", |r| r.name == names::STRATEGY)?;
    ensure!(
        strategy.fields["bind"] == bind,
        "strategy: {:?}",
        strategy.fields
    );
    let first = booted.created("first")?;
    let all = booted.created("all")?;
    ensure!(
        booted.settled()? == (8, 0),
        "settled: {:?}",
        booted.settled()?
    );
    let seventh = booted.record("gpu.bound of GPU 7", |r| {
        r.name == names::GPU_BOUND && r.fields.get("index") == Some(&7.into())
    })?;
    let (first_ns, all_ns) = (booted.boottime_ns(&first)?, booted.boottime_ns(&all)?);
    ensure!(
        first_ns < seventh.boottime_ns,
        "first container at {first_ns} ns, GPU 7 bound at {}",
        seventh.boottime_ns
    );
    let (last_bound, last_published) = (
        last(&booted, names::GPU_BOUND),
        last(&booted, names::GPU_PUBLISHED),
    );
    ensure!(
        all_ns > last_bound,
        "container with all GPUs at {all_ns} ns, before the last bind at {last_bound}"
    );
    ensure!(
        all_ns < last_published + ONE_TRY_NS,
        "container with all GPUs {} ms after the last publication",
        (all_ns - last_published) / 1_000_000
    );
    ensure!(
        first.get("nodes").contains("/dev/nvidia0 195:0 666"),
        "nodes of the first: {}",
        first.get("nodes")
    );
    let gpus = (0..8)
        .filter(|k| {
            all.get("nodes")
                .contains(&format!("/dev/nvidia{k} 195:{k} 666"))
        })
        .count();
    ensure!(
        gpus == 8
            && all.get("nodes").contains("/dev/nvidiactl 195:255")
            && all.get("nodes").contains("/dev/nvidia-uvm "),
        "nodes of all: {}",
        all.get("nodes")
    );
    ensure!(
        !booted
            .console
            .agent_lines()
            .iter()
            .any(|l| l.get("msg") == "container failed"),
        "a container has failed"
    );
    // The waiting is in the stream, too.
    ensure!(
        booted
            .receiver
            .records()
            .iter()
            .any(|r| r.name == names::AGENT_LOOK),
        "no look of the agent was seen"
    );
    booted.still_runs()?;
    Ok(Outcome::Measured(format!(
        "first {:.2} s before the last bind, all {} ms after the last publication",
        (last_bound - first_ns) as f64 / 1e9,
        (all_ns - last_published) / 1_000_000
    )))
}

/// Negative control of the above: the same agent, the same question, and a generator that lists
/// only what is ready.
fn growing_list(context: &TestContext) -> Result<Outcome> {
    let words = "fakepci.gpus=0 testagent.containers=second:1 testagent.guest=growing-list";
    let booted = Guest::new().append(words).boot(context, "new-agent")?;
    let line = booted.refused("second")?;
    ensure!(
        line.get("error").contains("do not exist"),
        "error: {}",
        line.get("error")
    );
    // Before 3.32.0 the agent waited for it: then it ends with its timeout instead.
    let words = "fakepci.gpus=0 testagent.containers=second:1 testagent.guest=growing-list \
        testagent.version=3.31.0 agent.cdi_timeout=2";
    let booted = Guest::new().append(words).boot(context, "old-agent")?;
    let line = booted.refused("second")?;
    ensure!(
        line.get("error").contains("after CDI timeout of 2 seconds"),
        "error: {}",
        line.get("error")
    );
    Ok(Outcome::Passed)
}

fn other_minors(context: &TestContext) -> Result<Outcome> {
    let words = "nvidia.minors=5,3,0,1,2,7,4,6 testagent.containers=zero:0;one:1;seven:7";
    let booted = Guest::new().append(words).boot(context, "minors")?;
    for (container, minor) in [("zero", 5), ("one", 3), ("seven", 6)] {
        let line = booted.created(container)?;
        let gpus: Vec<&str> = line
            .get("nodes")
            .split(',')
            .filter(|n| n.starts_with("/dev/nvidia") && !n.contains("ctl") && !n.contains("uvm"))
            .collect();
        ensure!(
            gpus == [format!("/dev/nvidia{minor} 195:{minor} 666")],
            "container {container}: {gpus:?}"
        );
    }
    Ok(Outcome::Passed)
}

fn held_back(context: &TestContext) -> Result<Outcome> {
    let booted = Guest::new()
        .append("gpuinit.ready=usable testagent.containers=all:all")
        .boot(context, "usable")?;
    booted.created("all")?;
    booted.settled()?;
    for index in 0..8 {
        let at = |name: &str| {
            booted
                .record(name, |r| {
                    r.name == name
                        && r.kind == Kind::Event
                        && r.fields.get("index") == Some(&index.into())
                })
                .map(|r| r.boottime_ns)
        };
        let init_end = {
            let gpu = booted
                .record("gpu.found", |r| {
                    r.name == names::GPU_FOUND && r.fields.get("index") == Some(&index.into())
                })?
                .gpu;
            booted
                .record("gpu.init end", |r| {
                    r.name == names::GPU_INIT && r.kind == Kind::End && r.gpu == gpu
                })?
                .boottime_ns
        };
        ensure!(
            at(names::GPU_PUBLISHED)? >= init_end,
            "GPU {index} is published before its initialisation is over"
        );
    }
    let booted = Guest::new()
        .append("gpuinit.cdi=complete testagent.containers=all:all")
        .boot(context, "complete")?;
    booted.created("all")?;
    let publications = booted
        .receiver
        .records()
        .iter()
        .filter(|r| r.name == names::CDI_PUBLISH && r.kind == Kind::Begin)
        .count();
    ensure!(
        publications == 1,
        "{publications} publications with gpuinit.cdi=complete"
    );
    Ok(Outcome::Passed)
}

fn by_uuid(context: &TestContext) -> Result<Outcome> {
    // The simulator makes it from the address: domain 1, slot 1. Agents up to 3.31 wait for a name
    // that is not there yet.
    let asked = "testagent.version=3.31.0 \
        testagent.containers=named:GPU-00000001-51d0-5afe-9000-000000000008";
    let booted = Guest::new()
        .append(&format!(
            "fakepci.gpus=3 gpuinit.cdi.names=index,uuid {asked}"
        ))
        .boot(context, "uuid")?;
    let named = booted.created("named")?;
    ensure!(
        named.get("nodes").contains("/dev/nvidia1 ")
            && named.get("nodes").matches("/dev/nvidia").count() == 1 + 3,
        "{}",
        named.get("nodes")
    );
    let usable = booted.record("gpu.usable of GPU 1", |r| {
        r.name == names::GPU_USABLE && r.fields.get("index") == Some(&1.into())
    })?;
    let at = booted.boottime_ns(&named)?;
    ensure!(
        at > usable.boottime_ns,
        "known at {at} ns, before the initialisation's end at {} ns",
        usable.boottime_ns
    );
    Ok(Outcome::Passed)
}
