//! The bring-up: every strategy brings every GPU up, and initialisations overlap where they may.

use super::harness::{Booted, Guest, Outcome, TestContext, VmTest, named};
use anyhow::{Context, Result, ensure};
use kata_gpu_init::events::names;
use kata_gpu_init::events::record::{Kind, Record};

pub const TESTS: &[VmTest] = &[
    VmTest { name: "every_strategy_binds_all_gpus", run: strategies },
    VmTest { name: "initialisations_overlap_in_parallel_and_not_in_series", run: overlap },
    VmTest { name: "one_gpu_and_sixteen_gpus_come_up", run: counts },
    VmTest { name: "the_agent_runs_as_a_child_of_the_init_too", run: child },
];

fn strategies(context: &TestContext) -> Result<Outcome> {
    for bind in ["insmod", "pipelined", "concurrent"] {
        let booted = Guest::new().append(&format!("gpuinit.bind={bind} testagent.containers=all:all")).boot(context, bind)?;
        ensure!(booted.settled()? == (8, 0), "{bind}: {:?}", booted.settled()?);
        booted.created("all")?;
        let records = booted.receiver.records();
        let strategy = named(&records, Kind::Event, names::STRATEGY);
        ensure!(strategy[0].fields["bind"] == bind, "strategy: {:?}", strategy[0]);
        let enables = named(&records, Kind::End, names::GPU_ENABLE).len();
        ensure!(enables == if bind == "insmod" { 0 } else { 8 }, "{bind}: {enables} enables");
        let binds = named(&records, Kind::End, names::GPU_BIND);
        ensure!(binds.len() == if bind == "insmod" { 0 } else { 7 }, "{bind}: {} binds", binds.len());
        // The kernel's own word for what was done.
        ensure!(
            records.iter().any(|r| r.kind == Kind::Kmsg && r.fields["text"].as_str().is_some_and(|t| t.contains("10de:2330"))),
            "{bind}: no kernel lines"
        );
    }
    Ok(Outcome::Passed)
}

/// Sum and span of all initialisations, in ms.
fn initialisations(booted: &Booted) -> Result<(u64, u64)> {
    ensure!(booted.settled()? == (8, 0), "{:?}", booted.settled()?);
    let records = booted.receiver.records();
    let (begins, ends) = (named(&records, Kind::Begin, names::GPU_INIT), named(&records, Kind::End, names::GPU_INIT));
    let mut sum = 0;
    for begin in &begins {
        let end: &&Record = ends.iter().find(|e| e.span == begin.span).context("an initialisation without end")?;
        sum += end.boottime_ns - begin.boottime_ns;
    }
    let first = begins.iter().map(|r| r.boottime_ns).min().context("no initialisation")?;
    let last = ends.iter().map(|r| r.boottime_ns).max().context("no initialisation")?;
    Ok((sum / 1_000_000, (last - first) / 1_000_000))
}

fn overlap(context: &TestContext) -> Result<Outcome> {
    let times = "nvidia.s1_ms=50 nvidia.s2_ms=500 nvidia.s3_ms=50";
    let booted = Guest::new().append(&format!("{times} gpuinit.init=parallel")).boot(context, "parallel")?;
    let (_, parallel) = initialisations(&booted)?;
    drop(booted);
    let booted = Guest::new().append(&format!("{times} gpuinit.init=serial")).boot(context, "serial")?;
    let (sum, serial) = initialisations(&booted)?;
    // 8 x 600 ms in a row; at once, 8 x 50 + 500 + 8 x 50.
    ensure!(serial >= sum && serial >= 4800, "in series they take {serial} ms, each for itself {sum} ms: they overlap");
    ensure!(parallel * 2 < serial, "at once {parallel} ms, in series {serial} ms");
    Ok(Outcome::Measured(format!("8 initialisations: {parallel} ms at once, {serial} ms in series")))
}

fn counts(context: &TestContext) -> Result<Outcome> {
    for gpus in [1, 16] {
        let words = format!("fakepci.gpus={gpus} testagent.containers=all:all;last:{}", gpus - 1);
        let booted = Guest::new().append(&words).boot(context, &format!("{gpus}"))?;
        ensure!(booted.settled()? == (gpus, 0), "{gpus} GPUs: {:?}", booted.settled()?);
        booted.created("all")?;
        booted.created("last")?;
    }
    Ok(Outcome::Passed)
}

fn child(context: &TestContext) -> Result<Outcome> {
    let mut booted =
        Guest::new().append("gpuinit.agent=child testagent.containers=all:all testagent.poweroff=on").boot(context, "child")?;
    let ready = booted.agent("agent ready", |_| true)?;
    ensure!(ready.get("pid") != "1", "the agent is PID 1");
    booted.created("all")?;
    booted.exit()?;
    ensure!(
        booted.console.wait_text(std::time::Duration::from_secs(5), "kata-agent has ended"),
        "the console does not say why the guest powered off"
    );
    Ok(Outcome::Passed)
}
