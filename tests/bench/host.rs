//! `bench host [RUNS]`: the same boot as `bench boot`, under KVM on the emulated host: the
//! incumbent's order, which starts the agent last, against ours, with 1, 2 and 8 GPUs.
//!
//! The guest's own code costs what it costs on the emulated processor, and each exit to the
//! hypervisor that and more. So the figures are for comparison within one run, as everywhere here.

use super::{keep, machine};
use anyhow::{Context, Result, bail, ensure};
use kata_gpu_tests::vm::harness::{
    AgentLine, EmulatedHost, Guest, KvmGuest, KvmImage, Outcome, Size, TestContext,
};
use kata_gpu_wire::names;
use serde_json::{Value, json};
use std::collections::HashMap;
use std::path::Path;

/// Initialisation as long as an H100's, on a host that maps BARs at once.
const GUEST: &str = "fakepci.enable_ms=3 nvidia.probe_ms=3 nvidia.s1_ms=300 nvidia.s2_ms=1300 \
    nvidia.s3_ms=500 \
    testagent.cost=real testagent.guest=clocks testagent.containers=first:0;all:all";
const GPUS: [u32; 3] = [1, 2, 8];
/// Name and command line of each row.
const ROWS: [(&str, &str); 2] = [
    (SERIAL, "hardware.init=/serial-init"),
    ("ours", "gpuinit.ready=bound"),
];
const SERIAL: &str = "serial";
/// First CID that is a guest's.
const CID: u32 = 3;

/// Milestones, in ms since the init's first instruction.
const COLUMNS: [&str; 6] = [
    "agent exec",
    "agent ready",
    "first publication",
    "last publication",
    "container with GPU 0 created",
    "container with all created",
];
/// And before it, in ms since the kernel's.
const KERNEL: &str = "kernel";

pub fn run(root: &Path, context: &TestContext, runs: usize) -> Result<()> {
    ensure!(runs > 0, "bench host: at least one run");
    if let Some(Outcome::Skipped(reason)) = EmulatedHost::skipped(context)? {
        bail!("{reason}");
    }
    let mut context = context.clone();
    context.work_dir = context.work_dir.join("kvm");
    let image = KvmImage::make(
        &context,
        Guest::new().cpus(1).append(GUEST).archive("driver"),
    )?;
    let mut host = EmulatedHost::start(&context, "host", Size::WITH_GUESTS, &image.files())?;
    KvmGuest::prepare(&mut host)?;
    let mut raw = Vec::new();
    let mut cid = CID;
    for run in 1..=runs {
        for gpus in GPUS {
            for (row, words) in ROWS {
                eprintln!("bench: run {run} of {runs}, {gpus} GPU(s), {row} ...");
                let words = format!("fakepci.gpus={gpus} {words}");
                let guest = KvmGuest::start(
                    &mut host,
                    &image,
                    &format!("{row}-{gpus}-{run}"),
                    "bench",
                    cid,
                    &words,
                )?;
                cid += 1;
                guest.wait_lines(&mut host, 2, "\"msg\":\"container \\(created\\|failed\\)\"")?;
                let console = guest.console(&mut host)?;
                guest.kill(&mut host)?;
                let ms = milestones(&console, row)
                    .with_context(|| format!("{gpus} GPU(s), {row}: {console}"))?;
                raw.push(json!({ "gpus": gpus, "boot": row, "run": run, "ms": ms }));
            }
        }
    }
    keep(
        root,
        "host",
        &json!({ "command": format!("tests/bench/run host \
            {runs}"), "guest": GUEST, "cpus": 1, "machine": machine(),
                "load": std::fs::read_to_string("/proc/loadavg")?.trim(),
        "rows": ROWS.map(|(name, words)| json!({ "name": name, "words": words })),
        "host": "KVM in an emulated Debian, tests/emulated-host/build", "runs": raw }),
    )?;
    println!(
        "ms since the init's first instruction, median of {runs}; under KVM on an emulated host, \
        1 vCPU"
    );
    print!("{:<30}", "");
    let each = || {
        GPUS.iter()
            .flat_map(|gpus| ROWS.iter().map(move |(row, _)| (*gpus, *row)))
    };
    each().for_each(|(gpus, row)| print!(" {:>12}", format!("{gpus} {row}")));
    println!();
    for column in [KERNEL].iter().chain(&COLUMNS) {
        print!("{column:<30}");
        each().for_each(|(gpus, row)| print!(" {:>12.0}", median(&raw, gpus, row, column)));
        println!();
    }
    Ok(())
}

/// A boot's times, from its console alone: both inits and the agent write there.
fn milestones(console: &str, row: &str) -> Result<Value> {
    let agent: Vec<AgentLine> = console.lines().filter_map(AgentLine::parse).collect();
    let line = |message: &str, container: &str| {
        let found = agent
            .iter()
            .find(|l| l.get("msg") == message && l.get("container") == container);
        found.with_context(|| format!("no line {message:?} of the agent {container}"))
    };
    // The agent's lines have the wall clock's time, the inits' the boot clock's.
    let both = line("clocks", "")?;
    let boottime: u64 = both
        .get("boottime_ns")
        .parse()
        .context("the boot clock's time")?;
    let offset = both
        .realtime_ns()?
        .checked_sub(boottime)
        .context("a wall clock before 1970")?;
    let at = |line: &AgentLine| Ok::<_, anyhow::Error>(line.realtime_ns()?.saturating_sub(offset));
    let (start, exec, first, last) = if row == SERIAL {
        serial(console)?
    } else {
        ours(console)?
    };
    let times = [
        exec,
        at(line("agent ready", "")?)?,
        first,
        last,
        at(line("container created", "first")?)?,
        at(line("container created", "all")?)?,
    ];
    let since = |ns: u64| (ns as f64 - start as f64) / 1e6;
    let columns = COLUMNS
        .iter()
        .zip(times)
        .map(|(column, ns)| ((*column).to_string(), since(ns).into()));
    let all: serde_json::Map<String, Value> = columns
        .chain([(KERNEL.to_string(), (start as f64 / 1e6).into())])
        .collect();
    Ok(all.into())
}

/// Start, agent exec, first and last publication, in ns of the boot clock.
type Times = (u64, u64, u64, u64);

fn serial(console: &str) -> Result<Times> {
    let stamp = |what: &str| {
        let words = console
            .split_once(&format!("serial-init: {what} "))
            .map(|(_, rest)| rest);
        let number = words.and_then(|rest| {
            rest.split(|c: char| !c.is_ascii_digit())
                .next()?
                .parse::<u64>()
                .ok()
        });
        number.with_context(|| format!("serial-init: no {what}"))
    };
    Ok((
        stamp("start")?,
        stamp("exec")?,
        stamp("published")?,
        stamp("published")?,
    ))
}

fn ours(console: &str) -> Result<Times> {
    let lines: Vec<HashMap<String, String>> = console
        .lines()
        .filter_map(|line| serde_json::from_str(line.get(line.find("{\"")?..)?).ok())
        .collect();
    let stamps = |name: &str| -> Result<Vec<u64>> {
        let named = lines
            .iter()
            .filter(|l| l.get("msg").is_some_and(|msg| msg == name));
        let mut stamps: Vec<u64> = named
            .filter_map(|l| l.get("boottime_ns")?.parse().ok())
            .collect();
        stamps.sort_unstable();
        ensure!(!stamps.is_empty(), "no line {name:?} of the init");
        Ok(stamps)
    };
    let published = stamps(names::GPU_PUBLISHED)?;
    // The hand-over begins where stage 0 ends.
    Ok((
        stamps(names::INIT_START)?[0],
        stamps("stage0 end")?[0],
        published[0],
        published[published.len() - 1],
    ))
}

fn median(raw: &[Value], gpus: u32, row: &str, column: &str) -> f64 {
    let of = raw.iter().filter(|r| r["gpus"] == gpus && r["boot"] == row);
    super::median(of.filter_map(|r| r["ms"][column].as_f64()).collect())
}
