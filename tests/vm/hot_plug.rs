//! GPUs that come and go while the guest runs.

use super::harness::{Guest, Outcome, TestContext, VmTest, complete, named};
use super::worker::counters;
use anyhow::{Context, Result, ensure};
use kata_gpu_init::events::names;
use kata_gpu_init::events::record::Kind;

pub const TESTS: &[VmTest] = &[
    VmTest { name: "a_gpu_that_is_removed_leaves_the_spec_and_comes_back", run: removed_and_back },
    VmTest { name: "gpus_that_are_plugged_in_later_come_up_and_one_that_is_torn_out_costs_nobody_else", run: plugged },
    VmTest { name: "uevents_that_were_lost_are_made_good_by_a_scan", run: overrun },
];

fn removed_and_back(context: &TestContext) -> Result<Outcome> {
    // The driver looks every half second whether the GPU is closed.
    let script = "settled>remove:2;gpu.removed>sleep:1500+counters+rescan;gpu.usable/2>counters";
    let words = format!("fakepci.gpus=4 testagent.guest=script testagent.script={script} testagent.containers=all:all");
    let booted = Guest::new().append(&words).boot(context, "back")?;
    let removed = booted.event(names::GPU_REMOVED)?;
    ensure!(removed.gpu.is_some_and(|g| g.to_string() == "0001:00:02.0"), "{removed:?}");
    // The driver lets a GPU go when nobody has it open: the removal has come to its end.
    let line = booted.agent("removed", |_| true)?;
    ensure!(line.get("error").is_empty(), "{line:?}");
    let usable = booted.record("usable again", |r| r.name == names::GPU_USABLE && r.gpu == removed.gpu && r.seq > removed.seq)?;
    booted.agent("script", |l| l.get("when") == "gpu.usable/2" && l.get("did") == "counters")?;
    let reports: Vec<String> =
        booted.console.agent_lines().iter().filter(|l| l.get("msg") == "counters").map(|l| l.get("all").to_string()).collect();
    ensure!(reports.len() == 2 && !reports[0].contains("0001:00:02.0"), "{reports:?}");
    // Nothing of the others was closed, then or later.
    let others = |text: &str| -> Vec<String> { text.split("; ").filter(|g| !g.starts_with("0001:00:02.0")).map(str::to_string).collect() };
    for report in &reports {
        ensure!(
            others(report).len() == 3 && others(report).iter().all(|g| g.contains("closes: 0 ") && g.contains("opens: 1 ")),
            "{report}"
        );
    }
    let records = booted.receiver.records();
    complete(&records)?;
    for words in
        ["Attempting to remove device 0001:00:02.0 with non-zero usage count!", "Continuing with GPU removal for device 0001:00:02.0"]
    {
        let said = records.iter().any(|r| r.kind == Kind::Kmsg && r.fields["text"].as_str().is_some_and(|t| t.contains(words)));
        ensure!(said, "the driver does not say {words:?}");
    }
    let specs: Vec<_> = named(&records, Kind::End, names::CDI_PUBLISH);
    let gone = specs.iter().find(|r| r.seq > removed.seq).context("no publication after the removal")?;
    ensure!(gone.fields["ready"] == 3 && gone.fields["pending"] == 0 && gone.fields["failed"] == 0, "{:?}", gone.fields);
    ensure!(specs.last().is_some_and(|r| r.fields["ready"] == 4), "{:?}", specs.last().map(|r| &r.fields));
    // Those behind it had moved up, and have moved back.
    let found: Vec<_> = named(&records, Kind::Event, names::GPU_FOUND)
        .into_iter()
        .filter(|r| r.gpu.is_some_and(|g| g.to_string() == "0001:00:03.0"))
        .map(|r| r.fields["index"].clone())
        .collect();
    ensure!(found == [3, 2, 3], "GPU 3 was called {found:?}");
    ensure!(usable.fields["index"] == 2, "{usable:?}");
    Ok(Outcome::Passed)
}

fn plugged(context: &TestContext) -> Result<Outcome> {
    // Nothing is there at boot; then three come, in an order that is not PCI order, and one is torn out while it initialises.
    let script = "settled>plug:2;gpu.usable>plug:0+plug:1;gpu.init!begin/1>unplug:1;gpu.removed>sleep:800+counters+plug:1;gpu.usable/1>sleep:200+counters";
    let words = format!(
        "fakepci.gpus=3 fakepci.absent=0,1,2 testagent.guest=script testagent.script={script} testagent.containers=first:0;all:all"
    );
    let booted = Guest::new().append(&words).boot(context, "plugged")?;
    ensure!(booted.settled()? == (0, 0), "{:?}", booted.settled()?);
    let all = booted.created("all")?;
    booted.created("first")?;
    ensure!(all.get("nodes").matches("/dev/nvidia").count() > 3, "{}", all.get("nodes"));
    let settled = booted.record("settled again", |r| r.name == names::SETTLED && r.fields["usable"] == 3)?;
    let removed = booted.event(names::GPU_REMOVED)?;
    ensure!(removed.seq < settled.seq && removed.gpu.is_some_and(|g| g.to_string() == "0001:00:01.0"), "{removed:?}");
    booted.agent("script", |l| l.get("when") == "gpu.usable/1" && l.get("did") == "counters")?;
    let counters = counters(&booted)?;
    for gpu in ["0001:00:00.0", "0001:00:02.0"] {
        let own = counters.split("; ").find(|g| g.starts_with(gpu)).with_context(|| format!("no {gpu} in {counters}"))?;
        ensure!(own.contains("opens: 1 ") && own.contains("closes: 0 ") && own.contains("inits: 1 "), "{own}");
    }
    let records = booted.receiver.records();
    complete(&records)?;
    // The one that was torn out may have failed in what it was doing, before its removal was heard of; no other one.
    let failed = named(&records, Kind::Event, names::GPU_FAILED);
    ensure!(failed.iter().all(|r| r.gpu == removed.gpu && r.seq < removed.seq), "{failed:?}");
    Ok(Outcome::Passed)
}

fn overrun(context: &TestContext) -> Result<Outcome> {
    // The worker sleeps while more uevents come than its socket holds, and among the lost ones is the removal of a GPU nobody has open.
    let script = "settled>stop+storm:6000+remove:1+sleep:500+cont;gpu.removed>counters";
    let words = format!("fakepci.gpus=3 nvidia.init_fail=1 testagent.guest=script testagent.script={script}");
    let booted = Guest::new().append(&words).boot(context, "overrun")?;
    let lost = booted.record("overrun", |r| r.name == names::STREAM_LOST && r.fields.get("at").is_some_and(|at| at == "uevents"))?;
    let removed = booted.event(names::GPU_REMOVED)?;
    ensure!(removed.seq > lost.seq && removed.gpu.is_some_and(|g| g.to_string() == "0001:00:01.0"), "{removed:?}");
    booted.agent("script", |l| l.get("did") == "counters")?;
    let counters = counters(&booted)?;
    ensure!(counters.matches("closes: 0 ").count() == 2, "{counters}");
    Ok(Outcome::Passed)
}
