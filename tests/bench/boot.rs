//! `bench boot [RUNS]`: boots the same guest serially, as the incumbent works, and concurrently, and prints medians side by side.

use super::{keep, machine};
use anyhow::{Context, Result, bail, ensure};
use kata_gpu_init::events::names;
use kata_gpu_init::events::record::Kind;
use kata_gpu_tests::vm::harness::{DEADLINE, Guest, TestContext, named};
use serde_json::{Value, json};
use std::path::Path;

/// Eight GPUs on a host that takes 1 s to map a GPU's BARs; initialisation as long as an H100's. Nothing is scaled down: the init
/// waits for what a driver does in its own time.
const GUEST: &str = "fakepci.gpus=8 fakepci.enable_ms=1000 nvidia.probe_ms=3 nvidia.s1_ms=300 nvidia.s2_ms=1300 nvidia.s3_ms=500 testagent.containers=first:0;all:all";
/// The incumbent's order: plain module load, one initialisation after another, the spec when everything is done.
const SERIAL: &str = "gpuinit.bind=insmod gpuinit.init=serial gpuinit.cdi=complete";
const CONCURRENT: &str = "gpuinit.bind=pipelined gpuinit.init=parallel";

/// What is measured, in ms since the init's first instruction.
const COLUMNS: [&str; 6] = ["agent exec", "agent ready", "first publication", "last publication", "first container", "last container"];

pub fn run(root: &Path, context: &TestContext, runs: usize) -> Result<()> {
    let (mut raw, mut gaps) = (Vec::new(), Vec::new());
    for run in 1..=runs {
        for (name, words) in [("serial", SERIAL), ("concurrent", CONCURRENT)] {
            eprintln!("bench: run {run} of {runs}, {name} ...");
            raw.push(json!({ "boot": name, "run": run, "ms": boot(context, name, words, &mut gaps)? }));
        }
        eprintln!("bench: run {run} of {runs}, minimal init ...");
        raw.push(json!({ "boot": "minimal", "run": run, "ms": minimal(context)? }));
    }
    let (bytes, rss) = (init_bytes(&context.target)?, rss(context)?);
    gaps.sort_by(f64::total_cmp);
    let (median_gap, longest_gap) = (gaps[gaps.len() / 2], gaps[gaps.len() - 1]);
    let file = keep(
        root,
        "boot",
        &json!({ "command": "tests/bench/run boot", "guest": GUEST, "serial": SERIAL, "concurrent": CONCURRENT,
        "machine": machine(), "init_bytes": bytes, "worker_rss_kb": rss, "bind_to_publication_ms": gaps, "runs": raw }),
    )?;

    println!("ms since the init's first instruction, median of {runs} runs      serial  concurrent   ratio");
    for column in COLUMNS {
        let (serial, concurrent) = (median(&raw, "serial", column), median(&raw, "concurrent", column));
        println!("{column:<58} {serial:>11.0} {concurrent:>11.0} {:>7.2}", serial / concurrent);
    }
    let (exec, minimal) = (median(&raw, "concurrent", "agent exec"), median(&raw, "minimal", "agent exec"));
    println!();
    let verdict = |good: bool| if good { "met" } else { "MISSED" };
    println!(
        "agent exec against an init that only mounts and execs: {exec:.1} ms / {minimal:.1} ms = {:.2} (target 1.5: {})",
        exec / minimal,
        verdict(exec <= 1.5 * minimal)
    );
    println!("init binary, stripped: {:.2} MB (target 3: {})", bytes as f64 / 1e6, verdict(bytes <= 3_000_000));
    println!("worker's resident memory with 8 GPUs: {:.1} MB (target 8: {})", rss as f64 / 1e3, verdict(rss <= 8000));
    println!(
        "bind to publication, GPUs 1 to 7: median {median_gap:.1} ms, longest {longest_gap:.1} ms (target 10: {})",
        verdict(longest_gap <= 10.0)
    );
    println!("raw runs: {}", file.strip_prefix(root).unwrap_or(&file).display());
    Ok(())
}

/// Boots once; the milestones in ms. `gaps`: ms from bind to publication of GPUs that are published live, but of the first, whose publication also waits for
/// nvidia-uvm.
fn boot(context: &TestContext, name: &str, words: &str, gaps: &mut Vec<f64>) -> Result<Value> {
    let booted = Guest::new().append(GUEST).append(words).boot(context, name)?;
    let (first, all) = (booted.created("first")?, booted.created("all")?);
    booted.settled()?;
    let ready = booted.agent("agent ready", |_| true)?;
    let records = booted.receiver.records();
    let start = named(&records, Kind::Event, names::INIT_START).first().context("no init.start")?.boottime_ns;
    let since = |ns: u64| (ns.saturating_sub(start)) as f64 / 1e6;
    let published = named(&records, Kind::Event, names::GPU_PUBLISHED);
    if words == CONCURRENT {
        let bound = named(&records, Kind::Event, names::GPU_BOUND);
        for p in published.iter().filter(|p| p.fields.get("index") != Some(&0.into())) {
            let b = bound.iter().find(|b| b.gpu == p.gpu).context("published and never bound")?;
            gaps.push((p.boottime_ns - b.boottime_ns) as f64 / 1e6);
        }
        ensure!(!gaps.is_empty(), "nothing was published");
    }
    let exec = named(&records, Kind::Begin, names::AGENT_EXEC).first().context("no agent.exec")?.boottime_ns;
    let (first_ns, all_ns) = (booted.boottime_ns(&first)?, booted.boottime_ns(&all)?);
    Ok(json!({
        "agent exec": since(exec),
        "agent ready": since(booted.boottime_ns(&ready)?),
        "first publication": since(published.first().context("nothing was published")?.boottime_ns),
        "last publication": since(published.last().context("nothing was published")?.boottime_ns),
        "first container": since(first_ns.min(all_ns)),
        "last container": since(first_ns.max(all_ns)),
    }))
}

/// Boots the yardstick; when it became the agent, in ms since its first instruction.
fn minimal(context: &TestContext) -> Result<Value> {
    let booted = Guest::new().append(GUEST).append("hardware.init=/minimal-init loglevel=7").boot(context, "minimal")?;
    if !booted.console.wait_text(DEADLINE, "agent ready") {
        bail!("the minimal init did not reach the agent");
    }
    let text = booted.console.text();
    let stamp = |what: &str| -> Result<f64> {
        let at = text.split(what).nth(1).with_context(|| format!("no line {what:?}"))?;
        Ok(at.split_whitespace().next().unwrap_or("").parse::<f64>()? / 1e6)
    };
    Ok(json!({ "agent exec": stamp("minimal-init: exec ")? - stamp("minimal-init: start ")? }))
}

fn init_bytes(target: &Path) -> Result<u64> {
    let path = target.join("x86_64-unknown-linux-musl/release/kata-gpu-init");
    Ok(std::fs::metadata(&path).with_context(|| format!("read {}", path.display()))?.len())
}

/// Resident memory of the worker when all is settled, in kB.
fn rss(context: &TestContext) -> Result<u64> {
    let booted = Guest::new().append("fakepci.gpus=8 testagent.guest=rss").boot(context, "rss")?;
    let line = booted.agent("rss", |l| l.get("process") == "worker")?;
    line.get("VmRSS").trim_end_matches(" kB").parse().with_context(|| format!("VmRSS {:?}", line.get("VmRSS")))
}

fn median(raw: &[Value], boot: &str, column: &str) -> f64 {
    let mut values: Vec<f64> = raw.iter().filter(|r| r["boot"] == boot).filter_map(|r| r["ms"][column].as_f64()).collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}
