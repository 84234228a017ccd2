//! The worker dies, and nothing else does: the keeper holds the GPUs, starts another worker, and
//! that one goes on where the first was.

use super::harness::{Booted, Guest, Outcome, TestContext, VmTest, complete, named};
use anyhow::{Context, Result, ensure};
use kata_gpu_wire::names;
use kata_gpu_wire::record::{Kind, Level};

pub const TESTS: &[VmTest] = &[
    VmTest {
        name: "a_killed_worker_loses_no_gpu_no_record_and_no_container",
        run: killed,
    },
    VmTest {
        name: "a_new_worker_knows_a_slow_host_and_frees_held_gpus",
        run: slow_host,
    },
    VmTest {
        name: "a_worker_killed_after_the_boot_leaves_the_spec_as_it_was",
        run: killed_later,
    },
    VmTest {
        name: "a_worker_killed_during_a_shortage_of_processes_is_replaced",
        run: no_process,
    },
    VmTest {
        name: "gpus_come_up_after_a_moment_without_threads",
        run: no_thread,
    },
    VmTest {
        name: "the_end_of_the_keeper_is_an_error_event_at_once",
        run: keeper_killed,
    },
    VmTest {
        name: "a_worker_killed_while_run_is_full_frees_no_numbers",
        run: run_full,
    },
];

/// The simulator's counters in the last report.
pub fn counters(booted: &Booted) -> Result<String> {
    let line = booted
        .console
        .agent_lines()
        .into_iter()
        .rfind(|l| l.get("msg") == "counters")
        .context("no counters")?;
    Ok(line.get("all").to_string())
}

/// Every adapter was initialised once, and is up.
pub fn all_up_once(counters: &str, gpus: usize) -> Result<()> {
    for (what, times) in [
        ("adapter: up", gpus),
        ("opens: 1 ", gpus),
        ("closes: 0 ", gpus),
        ("inits: 1 ", gpus),
        ("teardowns: 0", gpus),
    ] {
        ensure!(
            counters.matches(what).count() == times,
            "{what:?} not {times} times in: {counters}"
        );
    }
    Ok(())
}

fn killed(context: &TestContext) -> Result<Outcome> {
    let times = "fakepci.enable_ms=30 nvidia.s1_ms=50 nvidia.s2_ms=300 nvidia.s3_ms=50";
    // Each is one boot; the pause before a third worker is a second, before a fourth two.
    let boots = [
        ("", "module.load!begin>kill;settled>counters"),
        // The second worker dies as it starts, before it has reported the first one's death: the
        // third reports both.
        ("", "gpu.bound/1>kill+kill;settled>counters"),
        (
            "",
            "gpu.init!begin/4>kill;settled>kill;process.died>sleep:0;cdi.publish!end>counters",
        ),
        // A GPU that is being enabled is so until it is: the next worker comes after that.
        (
            "gpuinit.bind=pipelined fakepci.enable_ms=400",
            "gpu.enable!begin/2>kill;settled>counters",
        ),
        // Here open() itself takes the whole initialisation, so that the worker dies in it.
        (
            "nvidia.version=535.230.02 fakepci.gpus=8",
            "gpu.init!begin/0>sleep:100+kill;settled>counters",
        ),
    ];
    for (number, (more, script)) in boots.into_iter().enumerate() {
        let kills = script.matches("kill").count();
        let words = format!(
            "{times} {more} testagent.containers=first:0;all:all testagent.guest=script \
            testagent.script={script}"
        );
        let booted = Guest::new()
            .append(&words)
            .boot(context, &format!("{number}"))?;
        booted.created("first")?;
        let all = booted.created("all")?;
        ensure!(
            all.get("nodes").matches("/dev/nvidia").count() == 8 + 3,
            "{script}: {}",
            all.get("nodes")
        );
        let reported = booted.agent("script", |l| l.get("did") == "counters")?;
        ensure!(reported.get("error").is_empty(), "{script}: {reported:?}");
        all_up_once(&counters(&booted)?, 8).with_context(|| script.to_string())?;
        ensure!(
            booted.settled()? == (8, 0),
            "{script}: {:?}",
            booted.settled()?
        );
        // The last kill may come after everything else.
        let died = booted
            .events(names::PROCESS_DIED, kills)
            .with_context(|| script.to_string())?;
        let records = booted.receiver.records();
        complete(&records).with_context(|| script.to_string())?;
        // Once each, or twice where the reporter died between the report and the keeper's notice.
        let exact = died.len() == kills || script.contains("kill+kill") && died.len() == kills + 1;
        ensure!(
            exact
                && died
                    .iter()
                    .all(|r| r.fields["status"] == "killed by SIGKILL"),
            "{script}: {died:?}"
        );
        // A step that a death broke off has an end that says so; no span has two begins or two
        // ends.
        for begin in records
            .iter()
            .filter(|r| r.kind == Kind::Begin && r.seq < died[0].seq)
        {
            let ends = records
                .iter()
                .filter(|r| r.kind == Kind::End && r.span == begin.span)
                .count();
            ensure!(
                ends == 1,
                "{script}: {} of {:?} has {ends} ends",
                begin.name,
                begin.gpu
            );
        }
        let spans: Vec<_> = records
            .iter()
            .filter(|r| r.kind == Kind::Begin)
            .map(|r| r.span)
            .collect();
        ensure!(
            spans.iter().collect::<std::collections::HashSet<_>>().len() == spans.len(),
            "{script}: a span's id was given twice"
        );
        for name in [names::GPU_BOUND, names::GPU_USABLE] {
            let mut gpus: Vec<_> = named(&records, Kind::Event, name)
                .iter()
                .filter_map(|r| r.gpu)
                .collect();
            gpus.sort_unstable();
            gpus.dedup();
            ensure!(gpus.len() == 8, "{script}: {name} of {} GPUs", gpus.len());
        }
    }
    Ok(Outcome::Passed)
}

/// The dead worker has enabled GPU 0, which shows nothing any more, and has held the others back
/// for a load that fails.
fn slow_host(context: &TestContext) -> Result<Outcome> {
    let script =
        "testagent.script=module.load!begin>kill;settled>counters testagent.containers=good:3";
    let words = format!(
        "fakepci.gpus=4 fakepci.enable_ms=400 nvidia.probe_fail=0 testagent.guest=script {script}"
    );
    let booted = Guest::new().append(&words).boot(context, "slow")?;
    booted.agent("script", |l| l.get("did") == "counters")?;
    booted.created("good")?;
    ensure!(booted.settled()? == (3, 1), "{:?}", booted.settled()?);
    let records = booted.receiver.records();
    let failed = named(&records, Kind::Event, names::GPU_FAILED);
    ensure!(
        failed.len() == 1
            && failed[0].fields["index"] == 0
            && failed[0].fields["reason"] == "off-the-bus",
        "{failed:?}"
    );
    let chosen = named(&records, Kind::Event, names::STRATEGY);
    ensure!(
        chosen.len() == 2
            && chosen
                .iter()
                .all(|strategy| strategy.fields["bind"] == "pipelined"),
        "{chosen:?}"
    );
    Ok(Outcome::Passed)
}

fn killed_later(context: &TestContext) -> Result<Outcome> {
    // A sleep as proof, kept: no event follows the next worker's publication where nothing is
    // touched again.
    let script = "settled>sleep:300+kill;settled>sleep:1500+counters";
    let words = &format!("nvidia.init_fail=3 testagent.guest=script testagent.script={script}");
    let booted = Guest::new().append(words).boot(context, "later")?;
    booted.agent("script", |l| l.get("did") == "counters")?;
    let died = booted.event(names::PROCESS_DIED)?;
    booted.record("a publication by the next worker", |r| {
        r.kind == Kind::End && r.name == names::CDI_PUBLISH && r.seq > died.seq
    })?;
    let records = booted.receiver.records();
    complete(&records)?;
    // Nothing is touched again: no module, no bind, no open; and the failed GPU is not tried again.
    let after: Vec<_> = records
        .iter()
        .filter(|r| r.seq > died.seq && r.gpu.is_some() && r.kind != Kind::Kmsg)
        .collect();
    ensure!(after.is_empty(), "after the death: {after:?}");
    let (before, after): (Vec<_>, Vec<_>) = named(&records, Kind::End, names::CDI_PUBLISH)
        .into_iter()
        .partition(|r| r.seq < died.seq);
    let fields = |r: Option<&&kata_gpu_wire::record::Record>| r.map(|r| r.fields.clone());
    ensure!(
        fields(before.last()) == fields(after.last()) && !after.is_empty(),
        "published before {:?}, after {:?}",
        before.last(),
        after.last()
    );
    let counters = counters(&booted)?;
    ensure!(
        counters.matches("opens: 1 ").count() == 8 && counters.matches("closes: 0 ").count() == 8,
        "{counters}"
    );
    Ok(Outcome::Passed)
}

/// Less than there are.
const NO_THREADS: &str = "threads:20";
const THREADS: &str = "threads:5000";

/// Every GPU was initialised once and is up, and the keeper has all of them open.
fn all_held(booted: &Booted, gpus: usize) -> Result<()> {
    booted.agent("script", |l| l.get("did") == "counters")?;
    for line in booted
        .console
        .agent_lines()
        .iter()
        .filter(|l| l.get("msg") == "script")
    {
        ensure!(line.get("error").is_empty(), "{line:?}");
    }
    all_up_once(&counters(booted)?, gpus)?;
    let held = booted.agent("held", |l| l.get("process") == "gpuinit-keeper")?;
    ensure!(
        held.get("nodes").matches("/dev/nvidia").count() == gpus,
        "the keeper has {:?}",
        held.get("nodes")
    );
    Ok(())
}

fn no_process(context: &TestContext) -> Result<Outcome> {
    let script = format!(
        "settled>sleep:300+{NO_THREADS}+sleep:100+kill+sleep:3000+{THREADS};process.died>sleep:0;\
        cdi.publish!end>held+counters"
    );
    let words = format!("testagent.guest=script testagent.script={script}");
    let booted = Guest::new().append(&words).boot(context, "fork")?;
    all_held(&booted, 8)?;
    let died = booted.event(names::PROCESS_DIED)?;
    ensure!(died.fields["status"] == "killed by SIGKILL", "{died:?}");
    complete(&booted.receiver.records())?;
    ensure!(
        booted
            .console
            .text()
            .contains("keeper: fork the worker: EAGAIN"),
        "the keeper does not report the fork that failed"
    );
    ensure!(
        booted.events(names::GPU_FAILED, 0)?.is_empty(),
        "a GPU has failed"
    );
    Ok(Outcome::Passed)
}

fn no_thread(context: &TestContext) -> Result<Outcome> {
    // One initialisation after another: those of the last GPUs begin while there are no threads.
    let times =
        "gpuinit.bind=insmod gpuinit.init=serial nvidia.s1_ms=50 nvidia.s2_ms=300 nvidia.s3_ms=50";
    let script = format!("gpu.usable/0>{NO_THREADS}+sleep:3000+{THREADS};settled>held+counters");
    let words = format!("{times} testagent.guest=script testagent.script={script}");
    let booted = Guest::new().append(&words).boot(context, "thread")?;
    all_held(&booted, 8)?;
    ensure!(booted.settled()? == (8, 0), "{:?}", booted.settled()?);
    let records = booted.receiver.records();
    complete(&records)?;
    ensure!(
        records.iter().any(|r| r.name == names::THREAD_LATE),
        "no thread was late: nothing was tried here"
    );
    ensure!(
        records.iter().all(|r| r.name != names::PROCESS_DIED),
        "the worker has died"
    );
    Ok(Outcome::Passed)
}

fn keeper_killed(context: &TestContext) -> Result<Outcome> {
    let words = "testagent.guest=script \
        testagent.script=settled>sleep:300+kill-keeper;process.died>counters";
    let booted = Guest::new().append(words).boot(context, "keeper")?;
    booted.agent("script", |l| l.get("did") == "counters")?;
    let died = booted.event(names::PROCESS_DIED)?;
    ensure!(
        died.fields["process"] == "keeper" && died.level == Level::Error && died.error.is_some(),
        "{died:?}"
    );
    // The worker has them open still.
    all_up_once(&counters(&booted)?, 8)?;
    Ok(Outcome::Passed)
}

fn run_full(context: &TestContext) -> Result<Outcome> {
    // Looks at the spec make records; the first of them still find room in the file's last page.
    let script =
        "settled>sleep:300+fill+looks:200+sleep:500+kill;process.died>sleep:300+empty+counters";
    let words = format!("testagent.guest=script testagent.script={script}");
    let booted = Guest::new().append(&words).boot(context, "full")?;
    booted.agent("script", |l| l.get("did") == "counters")?;
    for line in booted
        .console
        .agent_lines()
        .iter()
        .filter(|l| l.get("msg") == "script")
    {
        ensure!(line.get("error").is_empty(), "{line:?}");
    }
    // A collector drops what has a number that it knows.
    let died = booted.event(names::PROCESS_DIED)?;
    let records = booted.receiver.records();
    let stopped = records
        .iter()
        .find(|r| r.name == names::SINK && r.fields.get("state").is_some_and(|s| s == "stopped"));
    let stopped = stopped.context("the journal did not stop: nothing was tried here")?;
    ensure!(died.seq > stopped.seq, "{died:?}");
    ensure!(
        booted.receiver.garbage().is_empty(),
        "a number was given twice: {:?}",
        booted.receiver.garbage()
    );
    Ok(Outcome::Passed)
}
