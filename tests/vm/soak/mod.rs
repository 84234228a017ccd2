//! A failure means that some mixture of host, driver, topology, faults, load and kills breaks a
//! promise of [`judge`], or that GPUs which come and go lead a name to another GPU. Each boot is
//! named by its seed; [`runs`] keeps a line of each, by which a soak goes on where it was stopped.

mod description;
mod judge;
mod points;
mod random_boot;
pub mod runs;

use super::extensions::guest_with_extensions;
use super::harness::{AgentLine, Booted, Guest, Listener, Outcome, Silent, TestContext, VmTest};
use super::services::with_service;
use anyhow::{Context, Result, ensure};
pub use description::Description;
use description::{Image, LAST};
use judge::{Finding, Kill, Observed};
use kata_gpu_wire::names;
use kata_gpu_wire::record::Kind;
pub use points::{all as all_points, out_of_reach};
use std::time::{Duration, Instant};

pub const TESTS: &[VmTest] = &[
    VmTest {
        name: "ten_boots_of_the_soak_keep_every_promise",
        run: ten,
    },
    VmTest {
        name: "processes_that_stop_for_a_while_lose_nothing",
        run: stopped,
    },
    VmTest {
        name: "a_gpu_closed_in_its_initialisation_is_found_by_the_soak",
        run: closed,
    },
    VmTest {
        name: "hot_plugs_at_random_lose_no_gpu_and_lead_no_name_to_another",
        run: hot_plug,
    },
    VmTest {
        name: "a_name_that_leads_to_another_gpu_is_found_by_the_soak",
        run: exchanged,
    },
];

/// Longest wait for the end of a script, and for a container's answer: a soak runs beside other
/// work, with the least of the CPU.
const LONGEST: Duration = Duration::from_secs(900);
/// Between two looks whether the guest lives.
const LOOK: Duration = Duration::from_secs(5);
/// Time for records that the guest has written when its script has ended: ends a hang, but for a
/// boot that is broken on purpose, whose records may never come.
const UNDERWAY: (Duration, Duration) = (Duration::from_secs(180), Duration::from_secs(5));

/// Actions of the hot-plug soak that belong to a run of all tests; `tests/bench/run hot-plug` does
/// 500.
const HOT_PLUGS: u64 = 150;

fn hot_plug(context: &TestContext) -> Result<Outcome> {
    let figures = hot_plugs(context, HOT_PLUGS, 1, "")?;
    ensure!(figures.fault.is_empty(), "{figures:?}");
    ensure!(
        figures.containers > 5 && figures.checks > 20,
        "nothing was looked at: {figures:?}"
    );
    Ok(Outcome::Passed)
}

fn exchanged(context: &TestContext) -> Result<Outcome> {
    let figures = hot_plugs(context, 1, 1, ":exchanged")?;
    ensure!(
        figures.fault.contains("names lead to the minors"),
        "{figures:?}"
    );
    Ok(Outcome::Passed)
}

/// Figures that a hot-plug soak reports at its end.
#[derive(Debug)]
pub struct HotPlugs {
    /// With the actions before it; empty: none.
    pub fault: String,
    /// Hardware actions and troubles of the init, by kind.
    pub kinds: String,
    pub containers: u64,
    /// How often every name was compared with the simulator.
    pub checks: u64,
}

/// Lets the guest half `hot-plug-soak` do its actions in one guest.
pub fn hot_plugs(context: &TestContext, actions: u64, seed: u64, how: &str) -> Result<HotPlugs> {
    let times = "fakepci.enable_ms=5 nvidia.s1_ms=20 nvidia.s2_ms=100,30,200 nvidia.s3_ms=20";
    // Before 590.44.01 a reader of `information` never comes back from a GPU that is pulled out
    // before it came up, and keeps the driver's lock. No init can help that; the soak reads often.
    let driver = "nvidia.version=590.48.01";
    let soak = format!("testagent.guest=hot-plug-soak testagent.soak={actions}:{seed}{how}");
    let mut booted = Guest::new()
        .append(&format!(
            "fakepci.gpus=8 fakepci.absent=6,7 {times} {driver} {soak}"
        ))
        .boot(context, &format!("hot-plug-{seed}"))?;
    booted.settled()?;
    let deadline = super::harness::DEADLINE + std::time::Duration::from_secs(2 * actions);
    let ended = booted
        .console
        .wait_agent_any(deadline, |l| l.get("msg") == "soak ended")
        .context("the soak does not end")?;
    booted.still_runs()?;
    let fault = ended.get("fault");
    Ok(HotPlugs {
        fault: if fault.is_empty() {
            String::new()
        } else {
            format!("{fault}, after {}", ended.get("history"))
        },
        kinds: ended.get("kinds").into(),
        containers: ended.get("containers").parse()?,
        checks: ended.get("checks").parse()?,
    })
}

/// A boot that was judged.
pub struct Run {
    pub description: Description,
    pub findings: Vec<Finding>,
    pub kill: Option<Kill>,
    pub seen: Observed,
    pub seconds: f64,
    /// The machine under the guest stopped, and the boot was repeated.
    pub repeated: bool,
}

/// Boots what this seed stands for, and judges it.
pub fn one(context: &TestContext, seed: u64) -> Run {
    boot_and_judge(context, Description::of(seed))
}

fn boot_and_judge(context: &TestContext, description: Description) -> Run {
    let start = Instant::now();
    let first = observe(context, &description);
    let repeated = matches!(&first, Err(error) if error.chain().any(|cause| cause.is::<Silent>()));
    let observed = if repeated {
        observe(context, &description)
    } else {
        first
    };
    let seconds = start.elapsed().as_secs_f64();
    let (findings, seen) = match observed {
        Ok(seen) => (judge::judge(&description, &seen), seen),
        Err(error) => (
            vec![Finding {
                kind: "machine",
                text: format!("{error:#}"),
            }],
            Observed::default(),
        ),
    };
    let kill = judge::kill_of(&description, &seen);
    Run {
        description,
        findings,
        kill,
        seen,
        seconds,
        repeated,
    }
}

/// The guest with the image that a boot needs.
fn guest(context: &TestContext, image: Image) -> Result<Guest> {
    Ok(match image {
        Image::Plain => Guest::new(),
        Image::Nvml(None) => Guest::new().nvml(),
        Image::Nvml(Some(service)) => with_service(Guest::new().nvml(), service),
        Image::Service(service) => with_service(Guest::new(), service),
        Image::Modprobe(text) => Guest::new().file("etc/modprobe.d/soak.conf", text.as_bytes()),
        Image::Extension { coco } => guest_with_extensions(context, coco)?,
    })
}

/// Boots a guest, waits for the end of its script, and takes all that came out. Fails only where
/// the machine under the guest does: what did not come is for the judge.
fn observe(context: &TestContext, boot: &Description) -> Result<Observed> {
    let guest = guest(context, boot.image)?
        .cpus(boot.cpus)
        .listener(boot.listener);
    let mut booted = guest.append(&boot.command_line()).boot(context, "boot")?;
    if boot.ends() {
        // One that runs on is found by the judge.
        let _unused = booted.vm.wait(LONGEST)?;
    } else {
        let is_over = |line: &AgentLine| {
            line.get("msg") == LAST || line.get("msg") == "script" && !line.get("error").is_empty()
        };
        wait_for_line(&mut booted, is_over)?;
        let ends = ["container created", "container failed"];
        for container in &boot.containers {
            wait_for_line(&mut booted, |line| {
                line.get("container") == container.name && ends.contains(&line.get("msg"))
            })?;
        }
        match boot.listener {
            Listener::Reads => {}
            Listener::Deaf => booted.receiver.wake(),
            Listener::HangsUp => booted.receiver.relent(),
            Listener::Absent => booted.receiver.arrive()?,
        }
        let last = if boot.hangs() {
            names::GPU_LATE
        } else {
            names::SETTLED
        };
        // A boot with an ending of its own is broken on purpose, and may never get there.
        if boot.ending.is_none()
            && let Err(error) = booted.record(last, |r| r.kind == Kind::Event && r.name == last)
            && error.chain().any(|cause| cause.is::<Silent>())
        {
            return Err(error);
        }
        let underway = match boot.ending {
            None => UNDERWAY.0,
            Some(_) => UNDERWAY.1,
        };
        let _unused = booted.receiver.wait_until(underway, |records| {
            judge::is_complete(boot, records).then_some(())
        });
    }
    Ok(Observed {
        records: booted.receiver.records(),
        garbage: booted.receiver.garbage(),
        console: booted.console.text(),
        lines: booted.console.agent_lines(),
        ended: booted.vm.exited()?.map(|status| status.to_string()),
    })
}

/// Waits for a line of the agent, as long as the guest lives; one that never comes is for the
/// judge.
fn wait_for_line(booted: &mut Booted, wanted: impl Fn(&AgentLine) -> bool) -> Result<()> {
    let start = Instant::now();
    while start.elapsed() < LONGEST && booted.vm.exited()?.is_none() {
        if booted.console.wait_agent_any(LOOK, &wanted).is_some() {
            break;
        }
    }
    Ok(())
}

/// Fails with everything that is wrong with a boot.
fn holds(run: &Run) -> Result<()> {
    let seed = run.description.seed;
    ensure!(
        run.findings.is_empty(),
        "seed {seed} (tests/bench/run soak --only {seed} runs it alone): {:#?}\n{}",
        run.findings,
        run.description.command_line()
    );
    Ok(())
}

fn ten(context: &TestContext) -> Result<Outcome> {
    // Random ones, and each process killed at the begin of an initialisation.
    let all = points::all();
    let in_init = |seed: &u64| {
        Description::of(*seed)
            .point
            .is_some_and(|point| point.when() == format!("{}!begin", names::GPU_INIT))
    };
    let killed: Vec<u64> = (1..2 * all.len() as u64)
        .filter(in_init)
        .take(points::Process::ALL.len())
        .collect();
    for seed in (1..=5).map(|n| 3 * n).chain(killed) {
        holds(&one(context, seed))?;
    }
    Ok(Outcome::Passed)
}

/// Records at which processes are stopped, in the order in which they come.
const STOPS: [&str; 4] = [
    "gpu.enable!begin/1",
    "gpu.bind!begin/1",
    "gpu.init!begin/1",
    "gpu.usable/1",
];

/// A stopped process neither answers nor dies, so nobody takes its place: all that others ask of it
/// must wait for it.
fn stopped(context: &TestContext) -> Result<Outcome> {
    use points::Process::{Keeper, Lane, Opener, Worker};
    let processes = [Worker, Keeper, Lane, Opener].map(points::Process::name);
    let stop =
        |process: &str, action: &str| format!("stop:{process}{action}+sleep:500+cont:{process}");
    // Four guests: each process at each record, and with every other one stopped before and after.
    // GPUs that are enabled faster initialise only when the lane's process has ended.
    let at_turn = |turn: usize| {
        let mut boot = Description::plain(0, 5, "gpuinit.bind=pipelined fakepci.enable_ms=1000");
        let steps = STOPS.iter().zip(processes.iter().cycle().skip(turn));
        let steps = steps.map(|(when, process)| format!("{when}>{}", stop(process, "")));
        boot.before = steps.collect();
        boot
    };
    let mut boots: Vec<Description> = (0..processes.len()).map(at_turn).collect();
    // GPUs that come and go meanwhile.
    let mut boot = Description::plain(0, 3, "");
    boot.gpus[1] = description::Fate::Again;
    boot.before = vec![
        format!("settled>{}+gone:1", stop("keeper", "+remove:1")),
        format!("gpu.removed/1>{}", stop("opener", "+rescan")),
        "gpu.usable/1>sleep:0".into(),
    ];
    boots.push(boot);
    let mut counts = std::collections::BTreeMap::new();
    for mut boot in boots {
        // GPU 0 stays in every guest.
        boot.containers = vec![description::Container {
            name: "one",
            gpu: Some(0),
            answer: description::Answer::Created,
        }];
        let run = boot_and_judge(context, boot);
        let script = run.description.script();
        ensure!(run.findings.is_empty(), "{script}: {:#?}", run.findings);
        let stops = run.seen.lines.iter().filter(|l| l.get("msg") == "SIGSTOP");
        for line in stops.filter(|line| line.get("count") != "0") {
            *counts.entry(line.get("process").to_string()).or_insert(0) += 1;
        }
    }
    // The lane's process ends when all GPUs are enabled.
    let missing = |process: &&&str| counts.get(**process).is_none_or(|count| *count < 3);
    let missing: Vec<&&str> = processes.iter().filter(missing).collect();
    ensure!(missing.is_empty(), "{missing:?} hardly stopped: {counts:?}");
    Ok(Outcome::Measured(format!("stopped: {counts:?}")))
}

/// The negative control: with the keeper gone, the worker's death closes every GPU.
fn closed(context: &TestContext) -> Result<Outcome> {
    let mut boot = Description::plain(0, 2, "gpuinit.bind=pipelined nvidia.s2_ms=1500");
    boot.before = vec!["gpu.init!begin/0>end:keeper+kill".into()];
    boot.ending = Some(format!(
        "now>sleep:3000+census+file:/var/run/cdi/nvidia.yaml+{LAST}"
    ));
    let run = boot_and_judge(context, boot);
    // The keeper's death may be reported to nobody: the worker dies a moment later.
    for kind in ["closed", "leak", "fate"] {
        ensure!(
            run.findings.iter().any(|finding| finding.kind == kind),
            "nothing of {kind} was found: {:#?}",
            run.findings
        );
    }
    Ok(Outcome::Passed)
}
