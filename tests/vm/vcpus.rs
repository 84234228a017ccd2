//! A failure means that a failed GPU or a killed worker costs more on one vCPU, Kata's default, or
//! on eight than on the two of all other tests.

use super::harness::{Booted, Guest, Outcome, TestContext, VmTest, complete, gpus_of};
use super::worker::{all_up_once, counters};
use anyhow::{Context, Result, ensure};
use kata_gpu_wire::names;

pub const TESTS: &[VmTest] = &[
    VmTest {
        name: "a_failed_gpu_costs_nobody_else_on_one_and_on_eight_vcpus",
        run: |c| each(c, one_fails),
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

/// Boots such a guest, which must have that many vCPUs.
fn boot(context: &TestContext, cpus: u32, guest: Guest, name: &str) -> Result<Booted> {
    let booted = guest
        .append(TIMES)
        .cpus(cpus)
        .boot(context, &format!("{name}-{cpus}"))?;
    let strategy = booted.event(names::STRATEGY)?;
    ensure!(strategy.fields["vcpus"] == cpus, "{strategy:?}");
    Ok(booted)
}

fn one_fails(context: &TestContext, cpus: u32) -> Result<()> {
    let guest = Guest::with("nvidia.probe_fail=1 testagent.containers=good:0;bad:1;all:all");
    let booted = boot(context, cpus, guest, "fails")?;
    let failed = booted.event(names::GPU_FAILED)?;
    ensure!(
        failed.fields["reason"] == "off-the-bus" && failed.fields["index"] == 1,
        "{failed:?}"
    );
    booted.settles(3, 1)?;
    booted.created("good")?;
    let all = booted.created("all")?;
    ensure!(gpus_of(&all) == 3, "{all:?}");
    booted.refused_gpu("bad", "off-the-bus")
}

fn killed(context: &TestContext, cpus: u32) -> Result<()> {
    // The second worker dies as it starts, before it has reported the first one's death: the third
    // reports both.
    let guest = Guest::with("testagent.containers=first:0;all:all")
        .script("gpu.bound/1>kill+kill;settled>counters");
    let booted = boot(context, cpus, guest, "killed")?;
    booted.created("first")?;
    booted.created("all")?;
    booted.did("counters")?;
    all_up_once(&counters(&booted)?, 4)?;
    booted.settles(4, 0)?;
    let died = booted.events(names::PROCESS_DIED, 2)?;
    ensure!(
        died.iter()
            .all(|r| r.fields["status"] == "killed by SIGKILL"),
        "{died:?}"
    );
    complete(&booted.records())
}
