//! `bench boot [RUNS] [HOST..] [--cpus N] [--busy]`: a whole boot with eight GPUs and a pod, up to
//! the first answer of the applications in it: the incumbent's order, which starts the agent last,
//! against ours with `gpuinit.ready=bound` and `=usable`.
//!
//! The pod has a pause container, a container `first` with GPU 0 whose program opens control, uvm
//! and its GPU, as CUDA does, and a container `all` whose program opens all GPUs one after another,
//! as NVML does. Both are asked for when the pause container runs, as a host asks that has several
//! containers to start. `KATA_AGENT=FILE` puts that agent in the test agent's place; `NVRC=DIR`
//! adds a row with the incumbent's own programs.

use super::real_agent::{self, Order};
use super::{keep, machine, nvrc};
use anyhow::{Context, Result, bail, ensure};
use kata_gpu_tests::agent_client::requests::Container;
use kata_gpu_tests::vm::harness::{Booted, DEADLINE, Guest, TestContext, named};
use kata_gpu_wire::names;
use kata_gpu_wire::record::Kind;
use serde_json::{Value, json};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

mod model;

const GPUS: usize = 8;
/// Initialisation as long as an H100's. Nothing is scaled down: the init waits for what a driver
/// does in its own time.
const GUEST: &str = "fakepci.gpus=8 nvidia.probe_ms=3 nvidia.s1_ms=300 nvidia.s2_ms=1300 \
    nvidia.s3_ms=500 testagent.cost=real";
/// Kinds of host, by the ms that one takes to map a GPU's BARs.
const HOSTS: [(&str, u32); 3] = [("fast", 3), ("medium", 1000), ("slow", 3300)];
/// Name and command line of each row.
const ROWS: [(&str, &str); 3] = [
    (SERIAL, "hardware.init=/serial-init"),
    (BOUND, "gpuinit.ready=bound"),
    ("usable", "gpuinit.ready=usable"),
];
const SERIAL: &str = "serial";
const BOUND: &str = "bound";
/// Name of the row in virtual time: the schedule in its model of the locks.
const MODEL: &str = "model";

/// Milestones, in ms since the init's first instruction.
const COLUMNS: [&str; 11] = [
    "agent exec",
    "agent answers",
    "pause container runs",
    "first publication",
    "last publication",
    "container with GPU 0 runs",
    "container with all runs",
    "application on GPU 0 has its answer",
    "application on all has its answer",
    "application on GPU 0 computes",
    "application on all computes",
];

/// Programs of others.
struct Programs {
    agent: Option<Vec<u8>>,
    nvrc: Option<nvrc::Nvrc>,
}

impl Programs {
    /// Name and command line of each row.
    fn rows(&self) -> Vec<(&'static str, &'static str)> {
        let nvrc = self.nvrc.iter().map(|_| (nvrc::ROW, nvrc::WORDS));
        nvrc.chain(ROWS).collect()
    }
}

struct Asked {
    runs: usize,
    hosts: Vec<(&'static str, u32)>,
    cpus: u32,
    busy: bool,
}

fn parse(arguments: &[String]) -> Result<Asked> {
    let mut asked = Asked {
        runs: 1,
        hosts: vec![],
        cpus: 2,
        busy: false,
    };
    let mut words = arguments.iter();
    while let Some(word) = words.next() {
        match word.as_str() {
            "--busy" => asked.busy = true,
            "--cpus" => {
                asked.cpus = words
                    .next()
                    .context("--cpus wants a number")?
                    .parse()
                    .context("--cpus")?
            }
            word => match (word.parse(), HOSTS.iter().find(|(name, _)| *name == word)) {
                (Ok(runs), _) => asked.runs = runs,
                (Err(_), Some(host)) => asked.hosts.push(*host),
                (Err(_), None) => bail!(
                    "bench boot: {word:?} is no host: there are {}",
                    HOSTS.map(|(name, _)| name).join(", ")
                ),
            },
        }
    }
    ensure!(asked.runs > 0, "bench boot: at least one run");
    if asked.hosts.is_empty() {
        asked.hosts = HOSTS.to_vec();
    }
    Ok(asked)
}

pub fn run(root: &Path, context: &TestContext, arguments: &[String]) -> Result<()> {
    let asked = parse(arguments)?;
    let programs = Programs {
        agent: real_agent::file()?,
        nvrc: nvrc::find()?,
    };
    let rows = programs.rows();
    let version = if programs.agent.is_some() {
        real_agent::version()?
    } else {
        "test agent".into()
    };
    let (mut raw, mut gaps) = (Vec::new(), Vec::new());
    let busy = asked.busy.then(Busy::start);
    for run in 1..=asked.runs {
        for (host, enable_ms) in &asked.hosts {
            // Times of the agent and of a program, from the row without a bring-up.
            let mut alone = None;
            for (row, words) in &rows {
                eprintln!("bench: run {run} of {}, {host}, {row} ...", asked.runs);
                let words = format!("{words} fakepci.enable_ms={enable_ms}");
                let (ms, details) = boot(context, row, &words, asked.cpus, &programs, &mut gaps)?;
                if *row == SERIAL {
                    alone = Some(model::Alone::in_boot(&ms, &details)?);
                }
                if let (BOUND, Some(alone)) = (*row, &alone) {
                    let model = model::predict(asked.cpus, *enable_ms, &ms, &details, alone)?;
                    raw.push(json!({ "host": host, "boot": MODEL, "run": run, "ms": model }));
                }
                raw.push(
                    json!({ "host": host, "boot": row, "run": run, "ms": ms, "details": details }),
                );
            }
        }
        eprintln!("bench: run {run} of {}, minimal init ...", asked.runs);
        raw.push(json!({ "boot": "minimal", "run": run, "ms": minimal(context, asked.cpus)? }));
    }
    drop(busy);
    let (bytes, rss) = (init_bytes(context)?, rss(context)?);
    gaps.sort_by(f64::total_cmp);
    let (median_gap, longest_gap) = (gaps[gaps.len() / 2], gaps[gaps.len() - 1]);
    keep(
        root,
        "boot",
        &json!({ "command": format!("tests/bench/run boot {}", arguments.join(" ")),
        "agent": version, "guest": GUEST,
        "rows": rows.iter().map(|(name, words)| json!({ "name": name, "words": words }))
            .collect::<Vec<_>>(),
        "cpus": asked.cpus, "busy": asked.busy, "machine": machine(), "init_bytes": bytes,
        "worker_rss_kb": rss, "bind_to_publication_ms": gaps, "runs": raw }),
    )?;

    let (runs, cpus) = (asked.runs, asked.cpus);
    println!(
        "ms since the init's first instruction, median of {runs}; {cpus} vCPUs{}; {version}",
        if asked.busy { ", four busy loops" } else { "" }
    );
    for (host, enable_ms) in &asked.hosts {
        println!();
        let line = |first: &str, of_rows: Vec<String>, model: &str| {
            let of_rows: String = of_rows.iter().map(|text| format!(" {text:>9}")).collect();
            println!("{first:<40}{of_rows}  {model:>9}");
        };
        let heading = format!("{host} (a GPU's BARs take {enable_ms} ms)");
        let names = rows.iter().map(|(row, _)| row.to_string());
        line(&heading, names.collect(), MODEL);
        for column in COLUMNS {
            let medians = rows
                .iter()
                .map(|(row, _)| format!("{:.0}", median(&raw, Some(host), row, column)));
            let model = median(&raw, Some(host), MODEL, column);
            let model = if model.is_nan() {
                "-".into()
            } else {
                format!("{model:.0}")
            };
            line(column, medians.collect(), &model);
        }
    }
    let (exec, minimal) = (
        median(&raw, None, BOUND, "agent exec"),
        median(&raw, None, "minimal", "agent exec"),
    );
    println!();
    let verdict = |good: bool| if good { "met" } else { "MISSED" };
    println!(
        "agent exec against an init that only mounts and execs: {exec:.1} ms / {minimal:.1} ms = \
        {:.2} (target 1.5: {})",
        exec / minimal,
        verdict(exec <= 1.5 * minimal)
    );
    println!(
        "init binary, stripped: {:.2} MB (target 3: {})",
        bytes as f64 / 1e6,
        verdict(bytes <= 3_000_000)
    );
    println!(
        "worker's resident memory with 8 GPUs: {:.1} MB (target 8: {})",
        rss as f64 / 1e3,
        verdict(rss <= 8000)
    );
    println!(
        "bind to publication, GPUs 1 to 7: median {median_gap:.1} ms, longest {longest_gap:.1} ms \
        (target 10: {})",
        verdict(longest_gap <= 10.0)
    );
    Ok(())
}

/// Boots once; the milestones in ms, and what else is worth keeping. `gaps`: ms from bind to
/// publication of GPUs that are published live, but of the first, whose publication also waits for
/// nvidia-uvm.
fn boot(
    context: &TestContext,
    row: &str,
    words: &str,
    cpus: u32,
    programs: &Programs,
    gaps: &mut Vec<f64>,
) -> Result<(Value, Value)> {
    let mut guest = real_agent::with_roots(
        Guest::new().cpus(cpus).append(GUEST).append(words),
        context,
        &["first", "all"],
    )?;
    let agent = programs.agent.as_deref();
    guest = match (&programs.nvrc, agent) {
        (Some(nvrc), _) if row == nvrc::ROW => nvrc.add_to(guest, context, agent)?,
        (_, Some(agent)) => guest.agent(agent),
        (_, None) => guest,
    };
    let booted = guest.boot(context, row)?;
    let wanted = [
        Container::new("first", "cuda", &["0"]),
        Container::new("all", "nvml", &["all"]),
    ];
    let from = match row {
        nvrc::ROW => nvrc::AGENT_BEGINS,
        SERIAL => "serial-init: exec ",
        _ => "hardware: ready",
    };
    let pod = real_agent::run(&booted, from, &wanted, Order::AtOnce)?;
    let [first, all] = pod.containers.as_slice() else {
        bail!("two containers were asked for")
    };
    let init = match row {
        nvrc::ROW => nvrc::milestones(&booted)?,
        SERIAL => serial_milestones(&booted)?,
        _ => own_milestones(&booted, (row == BOUND).then_some(gaps))?,
    };
    let steps = model::steps(&booted.receiver.records(), init.start_ns);
    let since = |ns: u64| ns.saturating_sub(init.start_ns) as f64 / 1e6;
    let answer = |c: &real_agent::ContainerTimes| {
        c.answer_ns
            .with_context(|| format!("application in {} has no answer", c.id))
    };
    let computes = |c: &real_agent::ContainerTimes| {
        c.computes_ns
            .with_context(|| format!("application in {} does not compute", c.id))
    };
    let times = [
        init.exec_ns,
        pod.answer_ns,
        pod.pause.program_ns,
        init.first_publication_ns,
        init.last_publication_ns,
        first.program_ns,
        all.program_ns,
        answer(first)?,
        answer(all)?,
        computes(first)?,
        computes(all)?,
    ];
    let ms: serde_json::Map<String, Value> = COLUMNS
        .iter()
        .zip(times)
        .map(|(c, ns)| ((*c).to_string(), since(ns).into()))
        .collect();
    let details = |c: &real_agent::ContainerTimes| {
        json!({ "asked": since(c.create_begin_ns),
        "created": since(c.created_ns), "started": since(c.started_ns) })
    };
    Ok((
        ms.into(),
        json!({ "clock_error_ms": pod.clock_error_ns as f64 / 1e6, "steps": steps,
            "pause": details(&pod.pause), "first": details(first), "all": details(all) }),
    ))
}

/// An init's milestones, in ns of CLOCK_BOOTTIME.
pub struct Milestones {
    pub start_ns: u64,
    pub exec_ns: u64,
    pub first_publication_ns: u64,
    pub last_publication_ns: u64,
}

/// Milestones of the incumbent's order, from the console.
pub fn serial_milestones(booted: &Booted) -> Result<Milestones> {
    let stamp = |what: &str| {
        booted
            .console
            .number_after(&format!("serial-init: {what} "))
            .with_context(|| format!("serial-init: no {what}"))
    };
    let published = stamp("published")?;
    Ok(Milestones {
        start_ns: stamp("start")?,
        exec_ns: stamp("exec")?,
        first_publication_ns: published,
        last_publication_ns: published,
    })
}

/// Milestones of our init, from its stream.
pub fn own_milestones(booted: &Booted, gaps: Option<&mut Vec<f64>>) -> Result<Milestones> {
    booted.settled()?;
    let records = booted.receiver.records();
    super::trace(&records);
    let published = named(&records, Kind::Event, names::GPU_PUBLISHED);
    if let Some(gaps) = gaps {
        let bound = named(&records, Kind::Event, names::GPU_BOUND);
        for p in published
            .iter()
            .filter(|p| p.fields.get("index") != Some(&0.into()))
        {
            let b = bound
                .iter()
                .find(|b| b.gpu == p.gpu)
                .context("published and never bound")?;
            gaps.push((p.boottime_ns - b.boottime_ns) as f64 / 1e6);
        }
        ensure!(!gaps.is_empty(), "nothing was published");
    }
    Ok(Milestones {
        start_ns: named(&records, Kind::Event, names::INIT_START)
            .first()
            .context("no init.start")?
            .boottime_ns,
        exec_ns: named(&records, Kind::Begin, names::AGENT_EXEC)
            .first()
            .context("no agent.exec")?
            .boottime_ns,
        first_publication_ns: published
            .first()
            .context("nothing was published")?
            .boottime_ns,
        last_publication_ns: published
            .last()
            .context("nothing was published")?
            .boottime_ns,
    })
}

/// Four busy loops on the host, until dropped.
struct Busy {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Busy {
    fn start() -> Self {
        let stop: Arc<AtomicBool> = Arc::default();
        let spin = |stop: Arc<AtomicBool>| {
            move || {
                while !stop.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            }
        };
        let threads = (0..4)
            .map(|_| std::thread::spawn(spin(Arc::clone(&stop))))
            .collect();
        Self { stop, threads }
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            let _unused = thread.join(); // a loop does not panic
        }
    }
}

/// Boots the yardstick; when it became the agent, in ms since its first instruction.
fn minimal(context: &TestContext, cpus: u32) -> Result<Value> {
    let words = "hardware.init=/minimal-init loglevel=7";
    let booted = Guest::new()
        .cpus(cpus)
        .append(GUEST)
        .append(words)
        .boot(context, "minimal")?;
    if !booted.console.wait_text(DEADLINE, "ttRPC server started") {
        bail!("the minimal init did not reach the agent");
    }
    let stamp = |what: &str| {
        booted
            .console
            .number_after(&format!("minimal-init: {what} "))
            .with_context(|| format!("minimal-init: no {what}"))
    };
    Ok(json!({ "agent exec": stamp("exec")?.saturating_sub(stamp("start")?) as f64 / 1e6 }))
}

fn init_bytes(context: &TestContext) -> Result<u64> {
    let path = context.guest_program("kata-gpu-init");
    Ok(std::fs::metadata(&path)
        .with_context(|| format!("read {}", path.display()))?
        .len())
}

/// Resident memory of the worker when all is settled, in kB.
fn rss(context: &TestContext) -> Result<u64> {
    let booted = Guest::new()
        .append("fakepci.gpus=8 testagent.guest=rss")
        .boot(context, "rss")?;
    let line = booted.agent("rss", |l| l.get("process") == "worker")?;
    line.get("VmRSS")
        .trim_end_matches(" kB")
        .parse()
        .with_context(|| format!("VmRSS {:?}", line.get("VmRSS")))
}

/// Median of one host's runs, or of all.
fn median(raw: &[Value], host: Option<&str>, boot: &str, column: &str) -> f64 {
    let of = raw
        .iter()
        .filter(|r| r["boot"] == boot && host.is_none_or(|h| r["host"] == h));
    super::median(of.filter_map(|r| r["ms"][column].as_f64()).collect())
}
