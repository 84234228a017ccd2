//! A failure means that a death of the worker or of the keeper, also in a shortage of processes,
//! threads or room in /run, closes a GPU, repeats an initialisation, loses or renumbers a record,
//! or goes unreported.

use super::harness::{
    Booted, Guest, Outcome, TestContext, VmTest, complete, events, gpus_of, named,
};
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
        name: "a_killed_opener_is_reaped_and_the_worker_opens_by_itself",
        run: opener_killed,
    },
    VmTest {
        name: "a_worker_killed_while_run_is_full_frees_no_numbers",
        run: run_full,
    },
];

/// The simulator's counters in the last report.
pub fn counters(booted: &Booted) -> Result<String> {
    let line = booted
        .lines()
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
    // Each is one boot; the pause before a third worker is a second, before a fourth two. A second
    // worker that dies as it starts is in `vcpus`.
    let boots = [
        (
            "",
            "module.load!begin>kill;gpu.init!begin/4>kill;settled>kill;process.died>sleep:0;\
            cdi.publish!end>counters",
        ),
        // A GPU that is being enabled is so until it is: the next worker comes after that.
        (
            "gpuinit.bind=pipelined fakepci.enable_ms=400",
            "gpu.enable!begin/2>kill;settled>counters",
        ),
        // Here open() itself takes the whole initialisation, so that the worker dies in it.
        (
            "nvidia.version=535.230.02",
            "gpu.init!begin/0>sleep:100+kill;settled>counters",
        ),
    ];
    for (number, (more, script)) in boots.into_iter().enumerate() {
        let kills = script.matches("kill").count();
        let booted = Guest::with(&format!(
            "{times} {more} testagent.containers=first:0;all:all"
        ))
        .script(script)
        .boot(context, &format!("{number}"))?;
        booted.created("first")?;
        let all = booted.created("all")?;
        ensure!(gpus_of(&all) == 8, "{script}: {all:?}");
        booted.did("counters")?;
        all_up_once(&counters(&booted)?, 8).with_context(|| script.to_string())?;
        booted.settles(8, 0)?;
        // The last kill may come after everything else.
        let died = booted
            .events(names::PROCESS_DIED, kills)
            .with_context(|| script.to_string())?;
        let records = booted.records();
        complete(&records).with_context(|| script.to_string())?;
        let numbers: Vec<_> = died.iter().map(|r| r.fields["number"].as_u64()).collect();
        ensure!(
            numbers == (1..=kills as u64).map(Some).collect::<Vec<_>>()
                && died
                    .iter()
                    .all(|r| r.fields["status"] == "killed by SIGKILL"),
            "{script}: {died:?}"
        );
        // Whichever worker reports them.
        for (kind, name) in [
            (Kind::Event, names::INIT_START),
            (Kind::End, names::AGENT_EXEC),
        ] {
            let times = named(&records, kind, name).len();
            ensure!(times == 1, "{script}: {name} {times} times");
        }
        // A line of the kernel's log is in the stream once, whichever worker has read it.
        let lines = records.iter().filter(|r| r.kind == Kind::Kmsg);
        let mut numbers: Vec<_> = lines.map(|r| r.fields["kmsg_seq"].as_u64()).collect();
        let count = numbers.len();
        numbers.sort_unstable();
        numbers.dedup();
        ensure!(
            numbers.len() == count,
            "{script}: {count} lines of the kernel's log with {} numbers",
            numbers.len()
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
            let mut gpus: Vec<_> = events(&records, name)
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
    let booted = Guest::with(
        "fakepci.gpus=4 fakepci.enable_ms=400 nvidia.probe_fail=0 testagent.containers=good:3",
    )
    .script("module.load!begin>kill;settled>counters")
    .boot(context, "slow")?;
    booted.did("counters")?;
    booted.created("good")?;
    booted.settles(3, 1)?;
    let records = booted.records();
    let failed = events(&records, names::GPU_FAILED);
    ensure!(
        failed.len() == 1
            && failed[0].fields["index"] == 0
            && failed[0].fields["reason"] == "off-the-bus",
        "{failed:?}"
    );
    let chosen = events(&records, names::STRATEGY);
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
    let booted = Guest::with("nvidia.init_fail=3")
        .script("settled>sleep:300+kill;settled>sleep:1500+counters")
        .boot(context, "later")?;
    booted.did("counters")?;
    let died = booted.event(names::PROCESS_DIED)?;
    booted.record("a publication by the next worker", |r| {
        r.kind == Kind::End && r.name == names::CDI_PUBLISH && r.seq > died.seq
    })?;
    let records = booted.records();
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

/// Every step of the script was done.
fn no_step_failed(booted: &Booted) -> Result<()> {
    for line in booted.lines() {
        ensure!(
            line.get("msg") != "script" || line.get("error").is_empty(),
            "{line:?}"
        );
    }
    Ok(())
}

/// Less than there are.
const NO_THREADS: &str = "threads:20";
const THREADS: &str = "threads:5000";

/// Every GPU was initialised once and is up, and the keeper has all of them open.
fn all_held(booted: &Booted, gpus: usize) -> Result<()> {
    booted.did("counters")?;
    no_step_failed(booted)?;
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
    let booted = Guest::new().script(&format!(
        "settled>sleep:300+{NO_THREADS}+sleep:100+kill+sleep:3000+{THREADS};process.died>sleep:0;\
        cdi.publish!end>held+counters"
    )).boot(context, "fork")?;
    all_held(&booted, 8)?;
    let died = booted.event(names::PROCESS_DIED)?;
    ensure!(died.fields["status"] == "killed by SIGKILL", "{died:?}");
    complete(&booted.records())?;
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
    let booted = Guest::with(times)
        .script(&format!(
            "gpu.usable/0>{NO_THREADS}+sleep:3000+{THREADS};settled>held+counters"
        ))
        .boot(context, "thread")?;
    all_held(&booted, 8)?;
    booted.settles(8, 0)?;
    let records = booted.records();
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
    let booted = Guest::new()
        .script("settled>sleep:300+end:keeper;process.died>counters")
        .boot(context, "keeper")?;
    booted.did("counters")?;
    let died = booted.event(names::PROCESS_DIED)?;
    ensure!(
        died.fields["process"] == "keeper" && died.level == Level::Error && died.error.is_some(),
        "{died:?}"
    );
    // The worker has them open still.
    all_up_once(&counters(&booted)?, 8)?;
    Ok(Outcome::Passed)
}

fn opener_killed(context: &TestContext) -> Result<Outcome> {
    let booted = Guest::new()
        .script("module.load!begin>end:opener+reaped:opener;settled>counters")
        .boot(context, "opener")?;
    booted.did("counters")?;
    let died = booted.event(names::PROCESS_DIED)?;
    ensure!(
        died.fields["process"] == "opener" && died.fields["status"] == "killed by SIGKILL",
        "{died:?}"
    );
    all_up_once(&counters(&booted)?, 8)?;
    booted.settles(8, 0)?;
    Ok(Outcome::Passed)
}

fn run_full(context: &TestContext) -> Result<Outcome> {
    // Looks at the spec make records; the first of them still find room in the file's last page.
    // The next record of a sink is the journal's, which stops.
    let booted = Guest::new()
        .script("settled>sleep:300+fill+looks:200;sink>kill;process.died>sleep:300+empty+counters")
        .boot(context, "full")?;
    booted.did("counters")?;
    no_step_failed(&booted)?;
    // A collector drops what has a number that it knows.
    let died = booted.event(names::PROCESS_DIED)?;
    let records = booted.records();
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
