//! `bench agent [RUNS] [--cgroup-v1]`: an agent's cost in an idle guest: until it answers, a pause
//! container, a container without a GPU and one with. Compares the test agent
//! (`testagent.cost=real`) with the real one where `KATA_AGENT=FILE` names it; with 1 and 2 vCPUs.

use super::real_agent::{self, Order};
use super::{keep, machine};
use anyhow::{Context, Result};
use kata_gpu_tests::agent_client::requests::Container;
use kata_gpu_tests::vm::harness::{Guest, TestContext};
use serde_json::{Value, json};
use std::path::Path;

/// Everything is up and published before the agent is executed.
const GUEST: &str =
    "fakepci.gpus=1 hardware.init=/serial-init agent.cdi_timeout=10 testagent.cost=real";
const REAL: &str = "real";
const TEST: &str = "test agent";
/// ms; each from the request that it belongs to.
const COLUMNS: [&str; 8] = [
    "answers after exec",
    "sandbox",
    "pause created",
    "pause program runs",
    "container created",
    "container program runs",
    "GPU container created",
    "GPU container program runs",
];

pub fn run(root: &Path, context: &TestContext, arguments: &[String]) -> Result<()> {
    let (mut runs, mut v1) = (3, false);
    for word in arguments {
        match word.as_str() {
            "--cgroup-v1" => v1 = true,
            number => {
                let parsed = number.parse();
                runs = parsed
                    .with_context(|| format!("bench agent: {number:?} is no number of runs"))?;
            }
        }
    }
    let real = real_agent::file()?;
    let mut raw = Vec::new();
    let mut version = String::new();
    for cpus in [1, 2] {
        for run in 1..=runs {
            for (agent, program) in [(REAL, real.as_deref()), (TEST, None)] {
                if agent == REAL && program.is_none() {
                    continue;
                }
                eprintln!("bench: {cpus} vCPUs, run {run} of {runs}, {agent} ...");
                let ms = measure(context, program, cpus, v1)?;
                raw.push(json!({ "agent": agent, "cpus": cpus, "run": run, "ms": ms }));
            }
        }
    }
    if real.is_some() {
        version = real_agent::version()?;
    }
    let command = format!("tests/bench/run agent {}", arguments.join(" "));
    let machine = machine();
    let all = json!({ "command": command, "guest": GUEST, "real": version, "machine": machine,
        "runs": raw });
    keep(root, "agent", &all)?;
    println!("ms, median of {runs} runs {version}");
    println!(
        "{:<28} {:>12} {:>12}   {:>12} {:>12}",
        "", "1 vCPU real", "test", "2 vCPUs real", "test"
    );
    for column in COLUMNS {
        let guests = [(1, REAL), (1, TEST), (2, REAL), (2, TEST)];
        let [a, b, c, d] = guests.map(|(cpus, agent)| median(&raw, agent, cpus, column));
        println!("{column:<28} {a:>12.0} {b:>12.0}   {c:>12.0} {d:>12.0}");
    }
    Ok(())
}

fn measure(context: &TestContext, program: Option<&[u8]>, cpus: u32, v1: bool) -> Result<Value> {
    let guest = if v1 {
        Guest::new().cgroup_v1()
    } else {
        Guest::new()
    };
    let mut guest =
        real_agent::with_roots(guest.cpus(cpus).append(GUEST), context, &["app", "gpu"])?;
    if let Some(program) = program {
        guest = guest.agent(program);
    }
    let booted = guest.boot(context, "agent")?;
    let wanted = [
        Container::new("app", "pause", &[]),
        Container::new("gpu", "cuda", &["0"]),
    ];
    let times = real_agent::run(&booted, "serial-init: exec ", &wanted, Order::InTurn)?;
    let exec = booted
        .console
        .number_after("serial-init: exec ")
        .context("no exec of the agent")?;
    let ms = |from: u64, to: u64| (to as f64 - from as f64) / 1e6;
    let mut values = json!({
        "answers after exec": ms(exec, times.answer_ns),
        "sandbox": ms(times.sandbox_begin_ns, times.sandbox_ns),
        "clock error": ms(0, times.clock_error_ns),
    });
    let containers = [&times.pause].into_iter().chain(&times.containers);
    for (name, c) in ["pause", "container", "GPU container"]
        .iter()
        .zip(containers)
    {
        values[format!("{name} created")] = ms(c.create_begin_ns, c.created_ns).into();
        values[format!("{name} program runs")] = ms(c.create_begin_ns, c.program_ns).into();
    }
    Ok(values)
}

fn median(raw: &[Value], agent: &str, cpus: u32, column: &str) -> f64 {
    let of = raw
        .iter()
        .filter(|r| r["agent"] == agent && r["cpus"] == cpus);
    super::median(of.filter_map(|r| r["ms"][column].as_f64()).collect())
}
