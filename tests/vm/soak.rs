//! Many boots with random delays, orders and faults, each named by its seed: every GPU ends usable
//! or with its reason, every container gets what it asked for or a clear error, and nothing hangs.

use super::harness::{Booted, Guest, Outcome, TestContext, VmTest, complete, named};
use super::random::Random;
use anyhow::{Context, Result, ensure};
use kata_gpu_init::events::names;
use kata_gpu_init::events::record::Kind;
use std::collections::BTreeSet;

pub const TESTS: &[VmTest] = &[
    VmTest { name: "ten_random_boots_end_with_every_gpu_usable_or_explained", run: ten },
    VmTest { name: "hot_plugs_at_random_lose_no_gpu_and_lead_no_name_to_another", run: hot_plug },
    VmTest { name: "a_name_that_leads_to_another_gpu_is_found_by_the_soak", run: exchanged },
];

/// Actions of the hot-plug soak that belong to a run of all tests; `tests/bench/run hot-plug` does
/// 500.
const HOT_PLUGS: u64 = 150;

fn hot_plug(context: &TestContext) -> Result<Outcome> {
    let said = hot_plugs(context, HOT_PLUGS, 1, "")?;
    ensure!(said.fault.is_empty(), "{said:?}");
    ensure!(said.containers > 5 && said.checks > 20, "nothing was looked at: {said:?}");
    Ok(Outcome::Passed)
}

fn exchanged(context: &TestContext) -> Result<Outcome> {
    let said = hot_plugs(context, 1, 1, ":exchanged")?;
    ensure!(said.fault.contains("names lead to the minors"), "{said:?}");
    Ok(Outcome::Passed)
}

/// Figures that a hot-plug soak reports at its end.
#[derive(Debug)]
pub struct Said {
    /// With the actions before it; empty: none.
    pub fault: String,
    /// Hardware actions and troubles of the init, by kind.
    pub kinds: String,
    pub containers: u64,
    /// How often every name was compared with the simulator.
    pub checks: u64,
}

/// Lets the guest half `hot-plug-soak` do its actions in one guest.
pub fn hot_plugs(context: &TestContext, actions: u64, seed: u64, how: &str) -> Result<Said> {
    let times = "fakepci.enable_ms=5 nvidia.s1_ms=20 nvidia.s2_ms=100,30,200 nvidia.s3_ms=20";
    let soak = format!("testagent.guest=hot-plug-soak testagent.soak={actions}:{seed}{how}");
    let mut booted =
        Guest::new().append(&format!("fakepci.gpus=8 fakepci.absent=6,7 {times} {soak}")).boot(context, &format!("hot-plug-{seed}"))?;
    booted.settled()?;
    let deadline = super::harness::DEADLINE + std::time::Duration::from_secs(2 * actions);
    let ended = booted.console.wait_agent_any(deadline, |l| l.get("msg") == "soak ended").context("the soak does not end")?;
    booted.still_runs()?;
    let fault = ended.get("fault");
    Ok(Said {
        fault: if fault.is_empty() { String::new() } else { format!("{fault}, after {}", ended.get("history")) },
        kinds: ended.get("kinds").into(),
        containers: ended.get("containers").parse()?,
        checks: ended.get("checks").parse()?,
    })
}

fn ten(context: &TestContext) -> Result<Outcome> {
    for seed in 1..=10 {
        one(context, seed).with_context(|| format!("seed {seed} (tests/bench/run soak 1 {seed} runs it alone)"))?;
    }
    Ok(Outcome::Passed)
}

/// A list parameter: a value for each GPU.
fn times(random: &mut Random, name: &str, gpus: u64, below: u64) -> String {
    let values: Vec<String> = (0..gpus).map(|_| random.below(below).to_string()).collect();
    format!("{name}={}", values.join(","))
}

/// Some of the GPUs that have no fault yet.
fn some(random: &mut Random, gpus: u64, taken: &mut BTreeSet<u64>) -> Vec<u64> {
    let count = if random.below(3) == 0 { random.below(gpus.min(3)) + 1 } else { 0 };
    (0..count).map(|_| random.below(gpus)).filter(|gpu| taken.insert(*gpu)).collect()
}

/// Command line of one boot, and its expected outcome.
struct Plan {
    words: String,
    gpus: u64,
    probe_fails: Vec<u64>,
    init_fails: Vec<u64>,
    kills: usize,
}

fn plan(seed: u64) -> Plan {
    let mut random = Random::new(seed);
    let gpus = random.below(16) + 1;
    let mut taken = BTreeSet::new();
    let (probe_fails, init_fails) = (some(&mut random, gpus, &mut taken), some(&mut random, gpus, &mut taken));
    let list = |name: &str, gpus: &[u64]| {
        if gpus.is_empty() {
            String::new()
        } else {
            format!("nvidia.{name}={}", gpus.iter().map(u64::to_string).collect::<Vec<_>>().join(","))
        }
    };
    let bind = random.one_of(&["auto", "insmod", "pipelined", "concurrent"]);
    let init = random.one_of(&["parallel", "parallel", "serial"]);
    let ready = random.one_of(&["bound", "bound", "usable"]);
    let (script, kills) = match random.below(3) {
        0 => {
            let point = random.one_of(&[
                "gpu.found",
                "gpu.enable!begin",
                "module.load!end",
                "gpu.bound",
                "gpu.init!begin",
                "gpu.usable",
                "settled",
            ]);
            // A plain load enables in its probes.
            let point = if point.starts_with("gpu.enable") && (bind == "insmod" || gpus == 1) { "gpu.found" } else { point };
            // If every GPU fails, none gets as far as the later points.
            let none = (probe_fails.len() + init_fails.len()) as u64 == gpus;
            let point = if none && ["gpu.bound", "gpu.init!begin", "gpu.usable"].contains(&point) { "gpu.found" } else { point };
            (format!("testagent.guest=script testagent.script={point}>kill"), 1)
        }
        _ => (String::new(), 0),
    };
    let words = [
        format!("fakepci.gpus={gpus} gpuinit.bind={bind} gpuinit.init={init} gpuinit.ready={ready} agent.cdi_timeout=60"),
        times(&mut random, "fakepci.enable_ms", gpus, 40),
        times(&mut random, "nvidia.probe_ms", gpus, 20),
        times(&mut random, "nvidia.s1_ms", gpus, 30),
        times(&mut random, "nvidia.s2_ms", gpus, 150),
        times(&mut random, "nvidia.s3_ms", gpus, 30),
        list("probe_fail", &probe_fails),
        list("init_fail", &init_fails),
        format!("testagent.containers=all:all;one:{};beyond:{gpus}", random.below(gpus)),
        script,
    ];
    Plan { words: words.join(" "), gpus, probe_fails, init_fails, kills }
}

/// Boots what this seed stands for. Errors say what was not as it must be, with the command line.
pub fn one(context: &TestContext, seed: u64) -> Result<()> {
    let plan = plan(seed);
    let mut booted = Guest::new().append(&plan.words).boot(context, "soak")?;
    judge(&mut booted, &plan).with_context(|| plan.words.clone())
}

fn judge(booted: &mut Booted, plan: &Plan) -> Result<()> {
    let failed = (plan.probe_fails.len() + plan.init_fails.len()) as u64;
    let wanted = (plan.gpus - failed, failed);
    // A worker that was killed may have settled before: the last word counts.
    booted.record("settled as planned", |r| {
        r.name == names::SETTLED && (r.fields["usable"].as_u64(), r.fields["failed"].as_u64()) == (Some(wanted.0), Some(wanted.1))
    })?;
    if plan.kills > 0 {
        booted.event(names::PROCESS_DIED)?;
    }
    // Everybody who asked has an answer.
    let all = answer(booted, "all")?;
    let one = answer(booted, "one")?;
    let beyond = answer(booted, "beyond")?;
    ensure!(beyond.is_err(), "a GPU beyond the last one was given out: {beyond:?}");
    if wanted.0 == plan.gpus {
        ensure!(all.is_ok() && one.is_ok(), "all: {all:?}; one: {one:?}");
    }
    for refusal in [&all, &one, &beyond].into_iter().filter_map(|a| a.as_ref().err()) {
        ensure!(refusal.contains("do not exist") || refusal.contains("unresolvable"), "an unclear error: {refusal}");
    }
    let records = booted.receiver.records();
    complete(&records)?;
    let reasons: Vec<(u64, String)> = named(&records, Kind::Event, names::GPU_FAILED)
        .iter()
        .map(|r| (r.fields["index"].as_u64().unwrap_or(u64::MAX), r.fields["reason"].as_str().unwrap_or("").to_string()))
        .collect();
    for (gpus, reason) in [(&plan.probe_fails, "off-the-bus"), (&plan.init_fails, "firmware-boot")] {
        for gpu in gpus {
            // When every probe fails, the load itself does, and each GPU's reason is that.
            let load = plan.probe_fails.len() as u64 == plan.gpus;
            ensure!(reasons.iter().any(|(index, r)| index == gpu && (r == reason || load)), "GPU {gpu}: wanted {reason}, got {reasons:?}");
        }
    }
    booted.still_runs()
}

/// The nodes a container got, or why it got none.
fn answer(booted: &Booted, container: &str) -> Result<Result<String, String>> {
    let line = booted
        .console
        .wait_agent_any(super::harness::DEADLINE, |l| l.get("container") == container)
        .with_context(|| format!("container {container} has no answer"))?;
    Ok(if line.get("msg") == "container created" { Ok(line.get("nodes").to_string()) } else { Err(line.get("error").to_string()) })
}
