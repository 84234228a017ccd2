//! A failure means that a container waits for a GPU that it did not ask for, gets another GPU than
//! the one of its name, or sees an error that is final while its GPU still comes up.

use super::harness::{Booted, Guest, Outcome, TestContext, VmTest, events, gpus_of, spans};
use anyhow::{Context, Result, ensure};
use kata_gpu_wire::names;
use kata_gpu_wire::record::{Kind, Record};

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
];

/// Probes that sleep for 4 s, on a host that is slow, too: the first one has slept when five GPUs
/// are enabled.
const SLEEPING: &str = "fakepci.device=0x2901 fakepci.enable_ms=1000";

/// The event of this name of one GPU.
fn of_gpu(booted: &Booted, name: &str, index: u64) -> Result<Record> {
    booted.record(name, |r| {
        r.kind == Kind::Event && r.name == name && r.fields.get("index") == Some(&index.into())
    })
}

fn early(context: &TestContext, bind: &str, host: &str) -> Result<Outcome> {
    // GPU 0 comes after the first enabling, GPU 7 after eight and a probe that leaves the agent
    // time on a busy machine.
    let mut booted = Guest::with(&format!(
        "{host} nvidia.probe_ms=100,100,100,100,100,100,100,8000 \
        testagent.containers=first:0;all:all"
    ))
    .boot(context, bind)?;
    let strategy = booted.event(names::STRATEGY)?;
    ensure!(strategy.fields["bind"] == bind, "{strategy:?}");
    let (first, all) = (booted.created("first")?, booted.created("all")?);
    booted.settles(8, 0)?;
    let seventh = of_gpu(&booted, names::GPU_BOUND, 7)?;
    let (first_ns, all_ns) = (booted.boottime_ns(&first)?, booted.boottime_ns(&all)?);
    ensure!(
        first_ns < seventh.boottime_ns,
        "first container at {first_ns} ns, GPU 7 bound at {}",
        seventh.boottime_ns
    );
    let published = booted.events(names::GPU_PUBLISHED, 8)?;
    let last = published.last().context("no publication")?;
    ensure!(
        all_ns > seventh.boottime_ns,
        "container with all GPUs at {all_ns} ns: {published:?}"
    );
    // The agent looks once a second, and the first look after the last publication finds all. One
    // that began before may be reported after it.
    let records = booted.records();
    let looks = events(&records, names::AGENT_LOOK);
    let late: Vec<_> = looks
        .iter()
        .filter(|r| r.seq > last.seq && r.boottime_ns < all_ns)
        .collect();
    ensure!(!looks.is_empty() && late.len() <= 2, "{late:?}");
    // Probes that sleep overlap.
    if bind == "concurrent" {
        let binds = spans(&records, names::GPU_BIND)?;
        let first_end = binds.iter().map(|(_, end)| end.seq).min();
        ensure!(
            binds
                .iter()
                .filter(|(begin, _)| Some(begin.seq) < first_end)
                .count()
                > 1,
            "{binds:?}"
        );
    }
    ensure!(
        first.get("nodes").contains("/dev/nvidia0 195:0 666"),
        "{first:?}"
    );
    ensure!(
        gpus_of(&all) == 8
            && all.get("nodes").contains("/dev/nvidia7 195:7 666")
            && all.get("nodes").contains("/dev/nvidiactl 195:255")
            && all.get("nodes").contains("/dev/nvidia-uvm "),
        "{all:?}"
    );
    let lines = booted.lines();
    ensure!(
        !lines.iter().any(|l| l.get("msg") == "container failed"),
        "a container has failed"
    );
    booted.still_runs()?;
    Ok(Outcome::Measured(format!(
        "first {:.2} s before the last bind, all {} ms after the last publication",
        seventh.boottime_ns.saturating_sub(first_ns) as f64 / 1e9,
        all_ns.saturating_sub(last.boottime_ns) / 1_000_000
    )))
}

/// Negative control of the above: the same agent, the same question, and a generator that lists
/// only what is ready.
fn growing_list(context: &TestContext) -> Result<Outcome> {
    let booted =
        Guest::with("fakepci.gpus=0 testagent.containers=second:1 testagent.guest=growing-list")
            .boot(context, "new-agent")?;
    let line = booted.refused("second")?;
    ensure!(line.get("error").contains("do not exist"), "{line:?}");
    Ok(Outcome::Passed)
}

fn other_minors(context: &TestContext) -> Result<Outcome> {
    // The simulator makes UUIDs from addresses: this one is slot 1's. Agents up to 3.31 wait for a
    // name that is not there yet.
    let booted = Guest::with(
        "nvidia.minors=5,3,0,1,2,7,4,6 gpuinit.cdi.names=index,uuid testagent.version=3.31.0 \
        testagent.containers=zero:0;one:1;seven:7;uuid:GPU-00000001-51d0-5afe-9000-000000000008",
    )
    .boot(context, "minors")?;
    for (container, minor) in [("zero", 5), ("one", 3), ("seven", 6), ("uuid", 3)] {
        let line = booted.created(container)?;
        ensure!(
            gpus_of(&line) == 1
                && line
                    .get("nodes")
                    .contains(&format!("/dev/nvidia{minor} 195:{minor} 666")),
            "{line:?}"
        );
    }
    // The driver knows the UUID from then on.
    let usable = of_gpu(&booted, names::GPU_USABLE, 1)?;
    let at = booted.boottime_ns(&booted.created("uuid")?)?;
    ensure!(
        at > usable.boottime_ns,
        "known at {at} ns, before {usable:?}"
    );
    Ok(Outcome::Passed)
}
