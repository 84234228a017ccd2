//! The main cases on other numbers of vCPUs than the 2 of all other tests: 1, Kata's default, and
//! 8.

use super::harness::{Booted, Guest, Outcome, TestContext, VmTest, complete, named};
use super::worker::{all_up_once, counters};
use anyhow::{Context, Result, ensure};
use kata_gpu_wire::names;
use kata_gpu_wire::record::Kind;

pub const TESTS: &[VmTest] = &[
    VmTest {
        name: "every_strategy_binds_all_gpus_on_one_and_on_eight_vcpus",
        run: |c| each(c, strategies),
    },
    VmTest {
        name: "a_failed_gpu_costs_nobody_else_on_one_and_on_eight_vcpus",
        run: |c| each(c, one_fails),
    },
    VmTest {
        name: "a_gpu_leaves_and_comes_back_on_one_and_on_eight_vcpus",
        run: |c| each(c, back),
    },
    VmTest {
        name: "a_killed_worker_loses_nothing_on_one_and_on_eight_vcpus",
        run: |c| each(c, killed),
    },
];

/// Times of a host that takes its time for an enabling, so that there is something to overlap.
const TIMES: &str =
    "fakepci.gpus=4 fakepci.enable_ms=60 nvidia.s1_ms=50 nvidia.s2_ms=200 nvidia.s3_ms=50";

fn each(context: &TestContext, case: fn(&TestContext, u32) -> Result<()>) -> Result<Outcome> {
    for cpus in [1, 8] {
        case(context, cpus).with_context(|| format!("{cpus} vCPUs"))?;
    }
    Ok(Outcome::Passed)
}

/// Boots with these words; the guest must have that many vCPUs.
fn boot(context: &TestContext, cpus: u32, words: &str, name: &str) -> Result<Booted> {
    let booted = Guest::new()
        .cpus(cpus)
        .append(&format!("{TIMES} {words}"))
        .boot(context, &format!("{name}-{cpus}"))?;
    let strategy = booted.event(names::STRATEGY)?;
    ensure!(strategy.fields["vcpus"] == cpus, "{:?}", strategy.fields);
    Ok(booted)
}

fn strategies(context: &TestContext, cpus: u32) -> Result<()> {
    for bind in ["insmod", "pipelined", "concurrent"] {
        let words = format!("gpuinit.bind={bind} testagent.containers=first:0;all:all");
        let booted = boot(context, cpus, &words, bind)?;
        ensure!(
            booted.settled()? == (4, 0),
            "{bind}: {:?}",
            booted.settled()?
        );
        let (first, all) = (booted.created("first")?, booted.created("all")?);
        // Probes at the same time get their minors in any order.
        let bound = booted.record("gpu.bound of GPU 0", |r| {
            r.name == names::GPU_BOUND && r.fields["index"] == 0
        })?;
        let node = format!("/dev/nvidia{0} 195:{0} 666", bound.fields["minor"]);
        ensure!(
            first.get("nodes").contains(&node),
            "{bind}: {}, wanted {node}",
            first.get("nodes")
        );
        ensure!(
            all.get("nodes").matches("/dev/nvidia").count() == 4 + 3,
            "{bind}: {}",
            all.get("nodes")
        );
        let records = booted.receiver.records();
        complete(&records).with_context(|| bind.to_string())?;
        // The guest has no libraries of the driver, and says so.
        let error = records
            .iter()
            .find(|r| r.error.is_some() && r.name != names::DRIVER_FILES);
        ensure!(error.is_none(), "{bind}: {error:?}");
        // A lane has a vCPU for itself only where another one is left.
        let lane = named(&records, Kind::Event, names::LANE_CPU).len();
        ensure!(
            lane == usize::from(cpus > 1 && bind != "insmod"),
            "{bind}: {lane} lanes have a vCPU"
        );
    }
    Ok(())
}

fn one_fails(context: &TestContext, cpus: u32) -> Result<()> {
    let booted = boot(
        context,
        cpus,
        "nvidia.probe_fail=1 testagent.containers=good:0;bad:1;all:all",
        "fails",
    )?;
    let failed = booted.event(names::GPU_FAILED)?;
    ensure!(
        failed.fields["reason"] == "off-the-bus" && failed.fields["index"] == 1,
        "{failed:?}"
    );
    ensure!(booted.settled()? == (3, 1), "{:?}", booted.settled()?);
    booted.created("good")?;
    let all = booted.created("all")?;
    ensure!(
        all.get("nodes").matches("/dev/nvidia").count() == 3 + 3,
        "{}",
        all.get("nodes")
    );
    let bad = booted.refused("bad")?;
    ensure!(
        bad.get("error").contains("do not exist"),
        "{}",
        bad.get("error")
    );
    Ok(())
}

fn back(context: &TestContext, cpus: u32) -> Result<()> {
    let script = "settled>remove:2;gpu.removed>gone:2+rescan;gpu.usable/2>counters";
    let words =
        format!("testagent.guest=script testagent.script={script} testagent.containers=all:all");
    let booted = boot(context, cpus, &words, "back")?;
    let removed = booted.event(names::GPU_REMOVED)?;
    booted.record("usable again", |r| {
        r.name == names::GPU_USABLE && r.gpu == removed.gpu && r.seq > removed.seq
    })?;
    booted.agent("script", |l| {
        l.get("when") == "gpu.usable/2" && l.get("did") == "counters"
    })?;
    let counters = counters(&booted)?;
    let others = counters
        .split("; ")
        .filter(|gpu| !gpu.starts_with("0001:00:02.0"));
    ensure!(
        others.clone().count() == 3 && others.clone().all(|gpu| gpu.contains("closes: 0 ")),
        "{counters}"
    );
    complete(&booted.receiver.records())
}

fn killed(context: &TestContext, cpus: u32) -> Result<()> {
    let script = "gpu.bound/1>kill+kill;settled>counters";
    let words = format!(
        "testagent.containers=first:0;all:all testagent.guest=script testagent.script={script}"
    );
    let booted = boot(context, cpus, &words, "killed")?;
    booted.created("first")?;
    booted.created("all")?;
    let reported = booted.agent("script", |l| l.get("did") == "counters")?;
    ensure!(reported.get("error").is_empty(), "{reported:?}");
    all_up_once(&counters(&booted)?, 4)?;
    ensure!(booted.settled()? == (4, 0), "{:?}", booted.settled()?);
    let died = booted.events(names::PROCESS_DIED, 2)?;
    ensure!(
        died.iter()
            .all(|r| r.fields["status"] == "killed by SIGKILL"),
        "{died:?}"
    );
    complete(&booted.receiver.records())
}
