//! A failure means that a GPU which comes or goes in a running guest disturbs another one, that a
//! name leads to another GPU than before, or that a lost uevent hides a change for ever.

use super::harness::{
    AgentLine, Booted, DEADLINE, Guest, Outcome, TestContext, VmTest, complete, events, is_of_slot,
    named,
};
use super::worker::counters;
use anyhow::{Context, Result, ensure};
use kata_gpu_wire::names;
use kata_gpu_wire::record::Kind;
use std::collections::BTreeMap;
use std::ops::Range;

pub const TESTS: &[VmTest] = &[
    VmTest {
        name: "a_gpu_that_is_removed_leaves_the_spec_and_comes_back",
        run: removed_and_back,
    },
    VmTest {
        name: "gpus_plugged_in_later_come_up_and_a_torn_out_one_fails_alone",
        run: plugged,
    },
    VmTest {
        name: "the_name_of_a_removed_gpu_goes_to_no_waiting_container",
        run: names_stay,
    },
    VmTest {
        name: "gpus_swapped_while_the_worker_is_stopped_get_their_own_names",
        run: swapped,
    },
    VmTest {
        name: "an_unbound_gpu_comes_back_with_its_bind",
        run: unbound,
    },
    VmTest {
        name: "a_removal_needs_no_driver_and_outlives_the_worker",
        run: unheard,
    },
    VmTest {
        name: "a_removal_that_begins_before_a_new_workers_load_stops_nobody",
        run: before_the_load,
    },
    VmTest {
        name: "uevents_that_were_lost_are_made_good_by_a_scan",
        run: overrun,
    },
    VmTest {
        name: "hot_plugs_without_end_use_no_more_of_anything",
        run: endless,
    },
];

fn removed_and_back(context: &TestContext) -> Result<Outcome> {
    // The driver looks every half second whether the GPU is closed.
    let booted = Guest::with("fakepci.gpus=4 testagent.containers=all:all")
        .script("settled>remove:2;gpu.removed>gone:2+counters+rescan;gpu.usable/2>counters")
        .boot(context, "back")?;
    let removed = booted.event(names::GPU_REMOVED)?;
    ensure!(is_of_slot(&removed, 2), "{removed:?}");
    // The driver lets a GPU go when nobody has it open: the removal has come to its end.
    let line = booted.agent("removed", |_| true)?;
    ensure!(line.get("error").is_empty(), "{line:?}");
    let usable = booted.record("usable again", |r| {
        r.name == names::GPU_USABLE && r.gpu == removed.gpu && r.seq > removed.seq
    })?;
    booted.agent("script", |l| {
        l.get("when") == "gpu.usable/2" && l.get("did") == "counters"
    })?;
    let reports: Vec<String> = booted
        .lines()
        .iter()
        .filter(|l| l.get("msg") == "counters")
        .map(|l| l.get("all").to_string())
        .collect();
    ensure!(
        reports.len() == 2 && !reports[0].contains("0001:00:02.0"),
        "{reports:?}"
    );
    // Nothing of the others was closed, then or later.
    let others = |text: &str| -> Vec<String> {
        text.split("; ")
            .filter(|g| !g.starts_with("0001:00:02.0"))
            .map(str::to_string)
            .collect()
    };
    for report in &reports {
        ensure!(
            others(report).len() == 3
                && others(report)
                    .iter()
                    .all(|g| g.contains("closes: 0 ") && g.contains("opens: 1 ")),
            "{report}"
        );
    }
    let records = booted.records();
    complete(&records)?;
    for words in [
        "Attempting to remove device 0001:00:02.0 with non-zero usage count!",
        "Continuing with GPU removal for device 0001:00:02.0",
    ] {
        let said = records.iter().any(|r| {
            r.kind == Kind::Kmsg && r.fields["text"].as_str().is_some_and(|t| t.contains(words))
        });
        ensure!(said, "the driver does not say {words:?}");
    }
    let specs: Vec<_> = named(&records, Kind::End, names::CDI_PUBLISH);
    let gone = specs
        .iter()
        .find(|r| r.seq > removed.seq)
        .context("no publication after the removal")?;
    // The name of GPU 2 leads nowhere until GPU 2 is back.
    ensure!(
        gone.fields["ready"] == 3 && gone.fields["pending"] == 0 && gone.fields["failed"] == 1,
        "{gone:?}"
    );
    ensure!(
        specs.last().is_some_and(|r| r.fields["ready"] == 4),
        "{:?}",
        specs.last().map(|r| &r.fields)
    );
    // Names of the GPUs after it have not moved.
    let found: Vec<_> = events(&records, names::GPU_FOUND)
        .into_iter()
        .filter(|r| is_of_slot(r, 3))
        .map(|r| r.fields["index"].clone())
        .collect();
    ensure!(found == [3], "GPU 3 was called {found:?}");
    ensure!(usable.fields["index"] == 2, "{usable:?}");
    Ok(Outcome::Passed)
}

fn plugged(context: &TestContext) -> Result<Outcome> {
    // Nothing is there at boot; then three come, in an order that is not PCI order, and one is torn
    // out while it initialises.
    let booted =
        Guest::with("fakepci.gpus=3 fakepci.absent=0,1,2 testagent.containers=first:0;all:all")
            .script(
                "settled>plug:2;gpu.usable>plug:0+plug:1;gpu.init!begin/1>unplug:1;\
                  gpu.removed>gone:1+counters+plug:1;gpu.usable/1>counters",
            )
            .boot(context, "plugged")?;
    booted.settles(0, 0)?;
    let all = booted.created("all")?;
    booted.created("first")?;
    ensure!(
        all.get("nodes").matches("/dev/nvidia").count() > 3,
        "{all:?}"
    );
    let settled = booted.record("settled again", |r| {
        r.name == names::SETTLED && r.fields["usable"] == 3
    })?;
    let removed = booted.event(names::GPU_REMOVED)?;
    ensure!(
        removed.seq < settled.seq && is_of_slot(&removed, 1),
        "{removed:?}"
    );
    booted.agent("script", |l| {
        l.get("when") == "gpu.usable/1" && l.get("did") == "counters"
    })?;
    let counters = counters(&booted)?;
    for gpu in ["0001:00:00.0", "0001:00:02.0"] {
        let own = counters
            .split("; ")
            .find(|g| g.starts_with(gpu))
            .with_context(|| format!("no {gpu} in {counters}"))?;
        ensure!(
            own.contains("opens: 1 ") && own.contains("closes: 0 ") && own.contains("inits: 1 "),
            "{own}"
        );
    }
    let records = booted.records();
    complete(&records)?;
    // The one that was torn out may have failed in what it was doing, before its removal was heard
    // of; no other one.
    let failed = events(&records, names::GPU_FAILED);
    ensure!(
        failed
            .iter()
            .all(|r| r.gpu == removed.gpu && r.seq < removed.seq),
        "{failed:?}"
    );
    Ok(Outcome::Passed)
}

fn overrun(context: &TestContext) -> Result<Outcome> {
    // The worker sleeps while more uevents come than its socket holds, and among the lost ones are
    // the removal of a GPU that no process has open, and the replacement of another one.
    let booted = Guest::with("fakepci.gpus=4 nvidia.probe_fail=1,2")
        .script(
            "settled>stop+storm:6000+remove:1+gone:1+unplug:2+gone:2+plug:2+there:2+cont;\
            gpu.removed>sleep:0;gpu.removed>counters",
        )
        .boot(context, "overrun")?;
    let lost = booted.record("overrun", |r| {
        r.name == names::STREAM_LOST && r.fields.get("at").is_some_and(|at| at == "uevents")
    })?;
    let removed = booted.events(names::GPU_REMOVED, 2)?;
    let mut indices: Vec<_> = removed.iter().map(|r| r.fields["index"].as_u64()).collect();
    indices.sort_unstable();
    ensure!(
        indices == [Some(1), Some(2)] && removed.iter().all(|r| r.seq > lost.seq),
        "{removed:?}"
    );
    // The one that came in its place is brought up, which fails.
    let failed = booted.events(names::GPU_FAILED, 3)?;
    ensure!(
        failed[2].fields["generation"] == 1 && failed[2].fields["index"] == 2,
        "{failed:?}"
    );
    // One loss is one report, however long the flood was.
    let reports = events(&booted.records(), names::STREAM_LOST).len();
    ensure!(reports <= 3, "{reports} reports of one flood");
    booted.did("counters")?;
    let counters = counters(&booted)?;
    ensure!(counters.matches("closes: 0 ").count() == 2, "{counters}");
    Ok(Outcome::Passed)
}

/// The spec's names and the minors that they lead to, `all` left out.
pub fn leads(spec: &str) -> Result<Vec<(usize, u32)>> {
    let spec: serde_json::Value = serde_json::from_str(spec)?;
    let mut all = Vec::new();
    for device in spec["devices"].as_array().context("no devices")? {
        let Some(index) = device["name"].as_str().and_then(|name| name.parse().ok()) else {
            continue;
        };
        // A failed GPU has a verdict in place of nodes.
        let edits = &device["containerEdits"];
        if edits["mounts"].is_array() && edits["deviceNodes"].is_null() {
            continue;
        }
        let nodes = edits["deviceNodes"].as_array().context("no nodes")?;
        let minor = nodes.iter().find_map(|node| {
            node["path"]
                .as_str()?
                .strip_prefix("/dev/nvidia")?
                .parse()
                .ok()
        });
        all.push((
            index,
            minor.with_context(|| format!("name {index} is pending"))?,
        ));
    }
    all.sort_unstable();
    Ok(all)
}

/// Every name leads to the GPU that the boot scan gave it to, as the driver counts minors now.
fn names_are_right(booted: &Booted, names: &[usize]) -> Result<()> {
    let lines = booted.lines();
    let minors = lines
        .iter()
        .rfind(|l| l.get("msg") == "minors")
        .context("no minors")?
        .get("all")
        .to_string();
    let spec = lines
        .iter()
        .rfind(|l| l.get("msg") == "spec" && l.get("file") == "nvidia.yaml")
        .context("no spec")?
        .get("text")
        .to_string();
    let mut wanted = Vec::new();
    for name in names {
        let address = format!("0001:00:{name:02x}.0=");
        let minor = minors
            .split(' ')
            .find_map(|m| m.strip_prefix(&address))
            .with_context(|| format!("{address} is not bound: {minors}"))?;
        wanted.push((*name, minor.parse()?));
    }
    ensure!(
        leads(&spec)? == wanted,
        "names lead to {:?}, wanted {wanted:?} of {minors}",
        leads(&spec)?
    );
    Ok(())
}

fn names_stay(context: &TestContext) -> Result<Outcome> {
    let booted =
        Guest::with("fakepci.gpus=4 fakepci.enable_ms=1500 testagent.containers=second:2;third:3")
            .script("gpu.usable/0>unplug:0")
            .boot(context, "names")?;
    for (name, gpu) in [("second", 2), ("third", 3)] {
        let got = booted.created(name)?;
        let bound = booted.record("bound", |r| {
            r.name == names::GPU_BOUND
                && r.gpu
                    .is_some_and(|g| g.to_string() == format!("0001:00:0{gpu}.0"))
        })?;
        let node = format!("/dev/nvidia{}", bound.fields["minor"]);
        ensure!(
            got.get("nodes").split([' ', ',']).any(|n| n == node),
            "{name} wants {node}, and has {}",
            got.get("nodes")
        );
        ensure!(bound.fields["index"] == gpu, "{bound:?}");
    }
    let records = booted.records();
    let removed = booted.event(names::GPU_REMOVED)?;
    ensure!(removed.fields["index"] == 0, "{removed:?}");
    let found = events(&records, names::GPU_FOUND).len();
    ensure!(found == 4, "{found} names were reported");
    Ok(Outcome::Passed)
}

fn swapped(context: &TestContext) -> Result<Outcome> {
    // The first one initialises while 2 and 3 are bound, published and not opened yet: their
    // removals wait for nobody.
    let script = "gpu.published/3>stop+unplug:2+unplug:3+gone:2+gone:3+plug:3+plug:2+bound:3+\
        bound:2+cont;\
                  settled>spec-gives:0,1,2,3+minors+spec+counters";
    let times = "nvidia.s1_ms=100 nvidia.s2_ms=4000,300 nvidia.s3_ms=100";
    for (name, kill) in [("stopped", false), ("killed", true)] {
        let script = if kill {
            script.replace("+cont", "+kill")
        } else {
            script.to_string()
        };
        let words = format!(
            "fakepci.gpus=4 gpuinit.init=serial {times} testagent.guest=script \
            testagent.script={script} testagent.containers=second:2;all:all"
        );
        let booted = Guest::with(&words).boot(context, name)?;
        booted.did("counters")?;
        names_are_right(&booted, &[0, 1, 2, 3]).with_context(|| name.to_string())?;
        let records = booted.records();
        complete(&records)?;
        for gpu in ["0001:00:02.0", "0001:00:03.0"] {
            let of = |event: &str| {
                let events = events(&records, event)
                    .into_iter()
                    .filter(|r| r.gpu.is_some_and(|g| g.to_string() == gpu));
                events
                    .map(|r| r.fields.get("generation").and_then(|g| g.as_u64()))
                    .collect::<Vec<_>>()
            };
            ensure!(
                of(names::GPU_REMOVED) == [None] && of(names::GPU_FOUND) == [None, Some(1)],
                "{name}: {gpu}: {records:?}"
            );
            ensure!(
                of(names::GPU_USABLE) == [Some(1)] && of(names::GPU_FAILED).is_empty(),
                "{name}: {gpu} is usable {:?}",
                of(names::GPU_USABLE)
            );
        }
        booted.settles(4, 0)?;
    }
    Ok(Outcome::Passed)
}

fn unbound(context: &TestContext) -> Result<Outcome> {
    // The removal of GPU 2 comes after both uevents of GPU 1 on the same socket: a worker that
    // believed them would have reported GPU 1 first.
    let booted = Guest::with("fakepci.gpus=4")
        .script(
            "settled>ask:1:remove+ask:1:unbind+unbind:2;gpu.removed>unbound:2+bind:2;\
        gpu.usable/2>spec-gives:0,1,2,3+minors+spec+counters",
        )
        .boot(context, "unbound")?;
    booted.did("counters")?;
    names_are_right(&booted, &[0, 1, 2, 3])?;
    let removed = booted.events(names::GPU_REMOVED, 1)?;
    ensure!(removed[0].fields["index"] == 2, "{removed:?}");
    let counters = counters(&booted)?;
    ensure!(
        counters.matches("opens: 1 ").count() == 4 && counters.matches("closes: 0 ").count() == 4,
        "{counters}"
    );
    let found = events(&booted.records(), names::GPU_FOUND).len();
    ensure!(found == 5, "{found} names were reported");
    Ok(Outcome::Passed)
}

fn unheard(context: &TestContext) -> Result<Outcome> {
    // No log can be read here. The removal of GPU 2 waits in the driver when the worker is killed,
    // which nothing shows from outside: it has a second to get there.
    let booted = Guest::with("fakepci.gpus=4 printk.devkmsg=off")
        .script(
            "settled>remove:1;gpu.removed/1>stop+remove:2+sleep:1000+kill;gpu.removed/2>\
        gone:1+gone:2+reaped:keeper+counters",
        )
        .boot(context, "unheard")?;
    booted.did("counters")?;
    for gpu in ["0001:00:01.0", "0001:00:02.0"] {
        let line = booted.agent("removed", |l| l.get("path").contains(gpu))?;
        ensure!(line.get("error").is_empty(), "{line:?}");
    }
    let counters = counters(&booted)?;
    ensure!(
        counters.matches("closes: 0 ").count() == 2 && counters.matches("opens: 1 ").count() == 2,
        "{counters}"
    );
    Ok(Outcome::Passed)
}

fn before_the_load(context: &TestContext) -> Result<Outcome> {
    // The kernel keeps a GPU locked until its removal is over, and the removal waits for the
    // worker. GPU 0 is usable when the worker dies, and not published: the next worker's load has
    // it. On one vCPU that load waits for the agent, which wants nothing here, and GPU 0 goes
    // meanwhile. No log can be read: the removal is not noticed before the load.
    let booted = Guest::with(
        "fakepci.gpus=2 gpuinit.cdi=complete gpuinit.init=serial nvidia.s2_ms=100,8000 \
        printk.devkmsg=off",
    )
    .cpus(1)
    .script(
        "gpu.usable/0>kill;process.died>sleep:0;driver.look!end>remove:0;gpu.removed/0>gone:0;\
        gpu.usable/1>counters",
    )
    .boot(context, "load")?;
    booted.did("counters")?;
    booted.did("gone:0")?;
    let line = booted.agent("removed", |_| true)?;
    ensure!(line.get("error").is_empty(), "{line:?}");
    booted.settles(1, 0)?;
    complete(&booted.records())?;
    Ok(Outcome::Passed)
}

/// Rounds of the endless hot-plug; `HOT_PLUG_ROUNDS` names another number.
/// After half of them the worker's memory of the stream is full (1 MiB).
const ROUNDS: usize = 44;
/// GPUs that come and go in each of them.
const PLUGGED: usize = 15;
/// Growth of a process's memory in a quarter of the rounds, in KiB, from which on it counts as a
/// leak: the allocator's own noise is below, between the smallest figures of many rounds. Between
/// two single rounds it is 90 KiB, of threads and buffers that live for a moment.
const NOISE_KIB: u64 = 64;

/// Possessions of each process of the init after this round, by name: files, threads, KiB.
fn has(booted: &Booted, round: usize) -> Result<BTreeMap<String, [u64; 3]>> {
    let round = round.to_string();
    let mut all = BTreeMap::new();
    for line in booted.lines() {
        if line.get("msg") != "has" || line.get("round") != round {
            continue;
        }
        let mut numbers = [0; 3];
        for (number, key) in numbers.iter_mut().zip(["files", "threads", "kib"]) {
            *number = line.get(key).parse()?;
        }
        let is_first = all.insert(line.get("process").into(), numbers).is_none();
        ensure!(
            is_first && line.get("state") != "Z",
            "one process too many: {line:?}"
        );
    }
    Ok(all)
}

/// Least memory in KiB that a process had after one of these rounds.
fn least_kib(booted: &Booted, process: &str, rounds: Range<usize>) -> Result<u64> {
    let of_rounds = |line: &&AgentLine| {
        let round = line.get("round").parse();
        line.get("process") == process && round.is_ok_and(|round| rounds.contains(&round))
    };
    let lines = booted.lines();
    let all = lines.iter().filter(of_rounds);
    let kib = all.filter_map(|line| line.get("kib").parse().ok()).min();
    kib.with_context(|| format!("no memory of {process} after rounds {rounds:?}"))
}

fn endless(context: &TestContext) -> Result<Outcome> {
    let gpus = PLUGGED;
    let rounds = match std::env::var("HOT_PLUG_ROUNDS") {
        Ok(number) => number.parse().context("HOT_PLUG_ROUNDS")?,
        Err(_) => ROUNDS,
    };
    let times =
        "fakepci.enable_ms=0 nvidia.probe_ms=0 nvidia.s1_ms=0 nvidia.s2_ms=0 nvidia.s3_ms=0";
    let mut booted = Guest::with(&format!(
        "fakepci.gpus={} {times} gpuinit.log=error loglevel=2 testagent.guest=hot-plug-loop \
        testagent.loop={rounds}:{gpus}",
        gpus + 1
    ))
    .boot(context, "endless")?;
    let ended = booted
        .console
        .wait_agent(
            10 * DEADLINE * (1 + rounds / ROUNDS) as u32,
            "loop ended",
            |_| true,
        )
        .context("the loop does not end")?;
    ensure!(ended.get("fault").is_empty(), "{ended:?}");
    booted.still_runs()?;
    let (middle, end) = (has(&booted, rounds / 2)?, has(&booted, rounds)?);
    ensure!(
        middle.contains_key("worker") && middle.contains_key("keeper"),
        "{middle:?}"
    );
    ensure!(middle.keys().eq(end.keys()), "{middle:?}, then {end:?}");
    let mut least = BTreeMap::new();
    let last_quarter = rounds - rounds / 4;
    for (process, [files, threads, _]) in &middle {
        let [files_then, threads_then, _] = end[process];
        let kib = least_kib(&booted, process, rounds / 2..last_quarter)?;
        let kib_then = least_kib(&booted, process, last_quarter..rounds + 1)?;
        ensure!(
            files_then <= *files && threads_then <= *threads && kib_then < kib + NOISE_KIB,
            "{process}: files, threads were {files}, {threads} after half of {rounds} rounds, and \
             are {files_then}, {threads_then}; KiB at least {kib} in the third quarter, and \
             {kib_then} in the last"
        );
        least.insert(process, (kib, kib_then));
    }
    let records = booted.records();
    complete(&records)?;
    let came = events(&records, names::GPU_USABLE).len();
    ensure!(came > rounds * gpus, "{came} arrivals");
    Ok(Outcome::Measured(format!(
        "{came} arrivals; files, threads, KiB: {end:?}, after half of them {middle:?}; KiB at \
         least in the third quarter and in the last: {least:?}"
    )))
}
