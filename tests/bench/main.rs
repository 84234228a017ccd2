//! `bench agent|boot|bringup|cdi|fabric|host|hot-plug|readahead|schedule|soak|trace ..`:
//! what is compared is measured in one run.
//!
//! Figures are for comparison within one run only: the guest is emulated, and the machine may be
//! busy. Every raw run goes to `tests/bench/runs/`.

mod agent;
mod boot;
mod bring_up;
mod cdi;
mod fabric;
mod host;
mod nvrc;
mod readahead;
mod real_agent;
mod schedule;
mod soak;
mod trace;

use anyhow::{Context, Result, bail};
use kata_gpu_tests::vm::harness::TestContext;
use kata_gpu_wire::arch::Arch;
use kata_gpu_wire::record::Record;
use serde_json::{Value, json};
use std::io::Write;
use std::path::{Path, PathBuf};

const USAGE: &str = "want: bench agent [RUNS] [--cgroup-v1] | bench boot [RUNS] [HOST..] [--cpus \
    N] [--busy] | bench bringup [--tenth] [HOST..] | bench cdi [RUNS] | bench fabric [RUNS] \
    [GUEST..] [--tenth] | \
    bench host [RUNS] | bench hot-plug [ACTIONS] [SEED] | bench readahead BEFORE [RUNS] [DISK..] | \
    bench schedule [--ablate] | bench soak [BOOTS] [SEED] [--at-once N] [--file FILE] | bench soak \
    --only SEED | --describe SEED | --summary | bench trace [RUNS] [HOST..] [--overhead]";

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let number = |at: usize, default: u64| {
        arguments
            .get(at)
            .map_or(Ok(default), |n| n.parse())
            .context(USAGE)
    };
    let root = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("..")
        .canonicalize()?;
    let context = TestContext::new(root.join("target"), arch()?, "bench");
    match arguments.first().map(String::as_str) {
        Some("agent") => agent::run(&root, &context, &arguments[1..]),
        Some("boot") => boot::run(&root, &context, &arguments[1..]),
        Some("bringup") => bring_up::run(&root, &context, &arguments[1..]),
        Some("cdi") => cdi::run(&root, number(1, 50)? as usize),
        Some("fabric") => fabric::run(&root, &context, &arguments[1..]),
        Some("host") => host::run(&root, &context, number(1, 1)? as usize),
        Some("hot-plug") => soak::hot_plug(&context, number(1, 500)?, number(2, 1)?),
        Some("readahead") => readahead::run(&root, &context, &arguments[1..]),
        Some("schedule") => schedule::run(&root, &arguments[1..]),
        Some("soak") => soak::run(&root, &context, &arguments[1..]),
        Some("trace") => trace::run(&root, &context, &arguments[1..]),
        _ => bail!(USAGE),
    }
}

/// Architecture of the guests: ARCH, in Debian's words.
fn arch() -> Result<Arch> {
    match std::env::var("ARCH").as_deref() {
        Ok("arm64") => Ok(Arch::Aarch64),
        Ok("amd64") | Err(_) => Ok(Arch::X86_64),
        Ok(other) => bail!("ARCH={other}: want amd64 or arm64"),
    }
}

/// The project's folder.
pub fn project() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Prints a boot's records where `BENCH_TRACE` is set.
pub fn trace(records: &[Record]) {
    if std::env::var_os("BENCH_TRACE").is_some() {
        for r in records {
            let gpu = r.gpu.map(|g| g.to_string()).unwrap_or_default();
            eprintln!(
                "{:9.1} {:?} {} {gpu} {:?}",
                r.boottime_ns as f64 / 1e6,
                r.kind,
                r.name,
                r.fields
            );
        }
    }
}

/// Machine that the figures were taken on.
pub fn machine() -> Value {
    let cpuinfo = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = cpuinfo
        .lines()
        .find_map(|l| l.strip_prefix("model name"))
        .map(|m| m.trim_start_matches([' ', '\t', ':']).to_string());
    let cpus = std::thread::available_parallelism().map_or(0, usize::from);
    json!({ "cpu": model, "cpus": cpus, "kvm": kata_gpu_host::vm::kvm_works(Arch::OURS) })
}

/// Median, NaN of nothing.
pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

/// Writes the raw runs to a file of their own, and prints its name; earlier ones stay.
pub fn keep(root: &Path, what: &str, runs: &Value) -> Result<()> {
    let folder = root.join("tests/bench/runs");
    std::fs::create_dir_all(&folder)?;
    let now = humantime::format_rfc3339_seconds(std::time::SystemTime::now())
        .to_string()
        .replace(':', "");
    let name = format!("{what}-{now}.json");
    let mut file = std::fs::File::create(folder.join(&name))?;
    writeln!(file, "{}", serde_json::to_string_pretty(runs)?)?;
    println!("raw runs: tests/bench/runs/{name}");
    Ok(())
}
