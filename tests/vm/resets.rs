//! A failure means that a GPU which an earlier guest left half initialised stays lost, is reset
//! more than once or against the configuration, or takes another GPU with it.

use super::harness::{
    Booted, CONFIDENTIAL, Guest, Outcome, TestContext, VmTest, error_has, events, gpus_of, named,
};
use anyhow::{Context, Result, ensure};
use kata_gpu_wire::names;
use kata_gpu_wire::record::{Kind, Record};

pub const TESTS: &[VmTest] = &[
    VmTest {
        name: "a_half_initialised_gpu_is_reset_once_and_keeps_its_name",
        run: cured,
    },
    VmTest {
        name: "a_gpu_that_a_reset_does_not_cure_fails_alone",
        run: stuck,
    },
    VmTest {
        name: "no_gpu_is_reset_without_a_way_or_in_a_confidential_guest",
        run: refused,
    },
    VmTest {
        name: "a_gpu_that_answers_no_more_after_its_reset_stops_nobody",
        run: silent,
    },
];

/// Three GPUs, all of which could be reset.
const GPUS: &str = "fakepci.gpus=3 fakepci.flr=0,1,2";

/// Resets of each GPU, as the hardware counts them.
fn resets(booted: &Booted) -> Result<Vec<String>> {
    let line = booted.agent("config", |_| true)?;
    let counts = line
        .get("all")
        .split("; ")
        .filter_map(|line| line.split_once("resets="))
        .map(|(_, count)| count.to_string());
    Ok(counts.collect())
}

/// Resets in the stream, at their ends.
fn reported(records: &[Record]) -> Vec<&Record> {
    named(records, Kind::End, names::GPU_RESET)
}

fn cured(context: &TestContext) -> Result<Outcome> {
    for (name, words, script) in [
        (
            "usable",
            "gpuinit.bind=pipelined fakepci.enable_ms=200 gpuinit.ready=usable \
            testagent.containers=all:all",
            "gpu.usable/1>config",
        ),
        // The reset goes on in a thread of the dead worker, or another worker binds the GPU.
        ("killed", "", "gpu.reset!begin>kill;gpu.usable/1>config"),
    ] {
        let booted = Guest::with(&format!("{GPUS} nvidia.wpr2=1 {words}"))
            .script(script)
            .boot(context, name)?;
        let counts = resets(&booted)?;
        // The second worker repeats a reset that may have been broken off.
        let repeated = name == "killed" && counts == ["0", "2", "0"];
        ensure!(repeated || counts == ["0", "1", "0"], "{name}: {counts:?}");
        booted.events(names::GPU_USABLE, 3)?;
        let records = booted.records();
        let usable = records
            .iter()
            .find(|r| r.name == names::GPU_USABLE && r.fields["index"] == 1)
            .context("GPU 1 is not usable")?;
        ensure!(
            usable.gpu == "0001:00:01.0".parse().ok() && usable.fields["generation"] == 1,
            "{name}: {usable:?}"
        );
        booted.has_no(names::GPU_FAILED)?;
        let reported = reported(&records);
        ensure!(
            reported.len() == 1
                && reported[0].gpu == usable.gpu
                && (reported[0].error.is_none() || name == "killed"),
            "{name}: {reported:?}"
        );
        let begin = named(&records, Kind::Begin, names::GPU_RESET);
        ensure!(
            begin[0].fields["method"] == "flr" && begin[0].fields["reason"] == "needs-reset",
            "{name}: {begin:?}"
        );
        if name == "usable" {
            let all = booted.created("all")?;
            ensure!(gpus_of(&all) == 3, "{all:?}");
            // `gpuinit.ready=usable` holds each back until then.
            for published in events(&records, names::GPU_PUBLISHED) {
                let usable = events(&records, names::GPU_USABLE);
                let before = |r: &&Record| r.gpu == published.gpu && r.seq < published.seq;
                ensure!(usable.iter().any(before), "{published:?}");
            }
        }
    }
    Ok(Outcome::Passed)
}

fn stuck(context: &TestContext) -> Result<Outcome> {
    // The state load of GPU 2 fails: that is no reason for a reset.
    let faults = "nvidia.wpr2_stuck=1 nvidia.init_code=2:0x24:0x40";
    let booted = Guest::with(&format!("{GPUS} {faults}"))
        .script("gpu.failed/1>config")
        .boot(context, "stuck")?;
    ensure!(
        resets(&booted)? == ["0", "1", "0"],
        "{:?}",
        resets(&booted)?
    );
    booted.events(names::GPU_FAILED, 2)?;
    let records = booted.records();
    let failed = records
        .iter()
        .find(|r| r.name == names::GPU_FAILED && r.fields["index"] == 1)
        .context("GPU 1 has not failed")?;
    let error = failed.error.clone().unwrap_or_default();
    ensure!(
        failed.fields["reason"] == "needs-reset"
            && error.contains("one reset of this GPU was tried in this boot already"),
        "{error}"
    );
    ensure!(reported(&records).len() == 1, "{:?}", reported(&records));
    Ok(Outcome::Passed)
}

/// The decision is a unit test of `reset`; here are its facts: the guest's kind and the kernel's
/// ways.
fn refused(context: &TestContext) -> Result<Outcome> {
    for (name, words, why) in [
        (
            "confidential",
            CONFIDENTIAL,
            "this guest is confidential; gpuinit.reset=on allows it",
        ),
        ("none", "fakepci.flr=0", "want flr or bus"),
    ] {
        let booted = Guest::with(&format!("{GPUS} nvidia.wpr2=1 {words}"))
            .script("gpu.failed/1>config")
            .boot(context, name)?;
        let counts = resets(&booted)?;
        ensure!(counts == ["0", "0", "0"], "{name}: {counts:?}");
        let failed = booted.event(names::GPU_FAILED)?;
        let error = failed.error.unwrap_or_default();
        ensure!(
            failed.fields["reason"] == "needs-reset" && error.contains(why),
            "{name}: {error}"
        );
        booted.settles(2, 1)?;
    }
    Ok(Outcome::Passed)
}

fn silent(context: &TestContext) -> Result<Outcome> {
    let mut booted = Guest::with(&format!(
        "{GPUS} nvidia.wpr2=1 fakepci.flr_hang=1 testagent.containers=last:2"
    ))
    .boot(context, "silent")?;
    booted.created("last")?;
    // The kernel waits a minute for the function.
    let end = booted.record("the end of the reset", |r| {
        r.kind == Kind::End && r.name == names::GPU_RESET
    })?;
    error_has(&end, &["0001:00:01.0/reset"])?;
    let failed = booted.event(names::GPU_FAILED)?;
    let error = failed.error.unwrap_or_default();
    ensure!(
        failed.fields["index"] == 1 && failed.fields["reason"] == "needs-reset",
        "{error}"
    );
    ensure!(
        error.contains("its reset has failed: write \"1\" to "),
        "{error}"
    );
    let usable = booted.events(names::GPU_USABLE, 2)?;
    ensure!(usable.iter().all(|r| r.fields["index"] != 1), "{usable:?}");
    booted.still_runs()?;
    Ok(Outcome::Passed)
}
