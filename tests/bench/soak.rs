//! `bench soak [BOOTS] [SEED]`: boots with random delays, orders and faults, one after another;
//! ends with an error at the first that ends badly. `bench hot-plug [ACTIONS] [SEED]`: GPUs that
//! come and go in one guest.

use super::{keep, machine};
use anyhow::{Context, Result, ensure};
use kata_gpu_tests::vm::harness::TestContext;
use kata_gpu_tests::vm::soak;
use serde_json::json;
use std::path::Path;
use std::time::Instant;

pub fn run(root: &Path, context: &TestContext, boots: u64, first_seed: u64) -> Result<()> {
    let start = Instant::now();
    let mut seconds = Vec::new();
    for seed in first_seed..first_seed + boots {
        let boot = Instant::now();
        soak::one(context, seed).with_context(|| format!("seed {seed}; logs: {}", context.work_dir.display()))?;
        seconds.push(boot.elapsed().as_secs_f64());
        eprintln!("bench: seed {seed} ok, {} of {boots}, {:.0} s in all", seed - first_seed + 1, start.elapsed().as_secs_f64());
    }
    println!(
        "{boots} boots, seeds {first_seed} to {}: every GPU usable or explained, every container answered, no hang",
        first_seed + boots - 1
    );
    let runs = json!({ "command": format!("tests/bench/run soak {boots} {first_seed}"), "machine": machine(), "seconds": seconds });
    let file = keep(root, "soak", &runs)?;
    println!("raw runs: {}", file.strip_prefix(root).unwrap_or(&file).display());
    Ok(())
}

pub fn hot_plug(context: &TestContext, actions: u64, seed: u64) -> Result<()> {
    let start = Instant::now();
    let said = soak::hot_plugs(context, actions, seed, "")?;
    ensure!(said.fault.is_empty(), "seed {seed}: {said:?}; logs: {}", context.work_dir.display());
    let seconds = start.elapsed().as_secs();
    println!("{actions} actions, seed {seed}, {seconds} s: no GPU lost, no name led to another one");
    println!("{} containers waited for a GPU and got it, {} comparisons of all names; {}", said.containers, said.checks, said.kinds);
    Ok(())
}
