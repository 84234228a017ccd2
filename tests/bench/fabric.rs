//! `bench fabric [RUNS] [GUEST..] [--tenth]`: guests with a fabric, confidential ones, and both,
//! with eight GPUs and a pod: the incumbent's order with its services against ours with the same
//! ones.
//!
//! The pod and its containers are those of `bench boot`. A container's program is asked for more
//! than its start: whether CUDA's first call would work or fail with error 802 (the fabric is not
//! complete, or the ready state is off), and from when on it works.
//!
//! Rows of the incumbent: `serial` with its defaults, UVM persistence mode and a limit of 120 s for
//! each daemon; `serial-600` with a limit of 600 s; `serial-no-uvm` without UVM
//! persistence mode, as users help themselves.

use super::boot::{own_milestones, serial_milestones};
use super::real_agent::{self, Order};
use super::{keep, machine};
use anyhow::{Context, Result, bail, ensure};
use kata_gpu_tests::agent_client::requests::Container;
use kata_gpu_tests::vm::harness::{Booted, CONFIDENTIAL, Guest, TestContext};
use kata_gpu_tests::vm::services::with_services;
use serde_json::{Value, json};
use std::path::Path;
use std::time::{Duration, Instant};

/// A guest of a table.
struct Scenario {
    name: &'static str,
    what: &'static str,
    words: &'static str,
    /// Three parts of an initialisation, in ms.
    parts: [u64; 3],
    has_fabric: bool,
}

/// An H100's initialisation, and one under confidential computing: 3.1 to 4.3 s were seen.
const PARTS: [u64; 3] = [300, 1300, 500];
const CONFIDENTIAL_PARTS: [u64; 3] = [500, 2600, 600];
const SWITCHES: &str = "fakepci.switches=4 nvidia.switches=4 nvidia.fabric_state=1";
/// The ready state, as Kata's configurations have it for the incumbent; to our init the first word
/// means the same.
const READY: &str = "nvrc.smi.srs=1 serial_init.srs=1";

const SCENARIOS: [Scenario; 3] = [
    Scenario {
        name: "hopper-fabric",
        what: "8 GPUs, 4 NVSwitches",
        words: "",
        parts: PARTS,
        has_fabric: true,
    },
    Scenario {
        name: "confidential",
        what: "8 GPUs",
        words: READY,
        parts: CONFIDENTIAL_PARTS,
        has_fabric: false,
    },
    Scenario {
        name: "protected-pcie",
        what: "8 GPUs, 4 NVSwitches",
        words: READY,
        parts: CONFIDENTIAL_PARTS,
        has_fabric: true,
    },
];

/// Name and command line of each row; the second and the third are for guests with a fabric.
const ROWS: [(&str, &str); 4] = [
    ("serial", "hardware.init=/serial-init"),
    ("serial-600", "hardware.init=/serial-init"),
    (
        "serial-no-uvm",
        "hardware.init=/serial-init serial_init.uvm=off",
    ),
    (OURS, ""),
];
const OURS: &str = "ours";
/// Limits of the incumbent's waits, in ms, and of the pauses in them.
const LIMITS: [(&str, u64); 2] = [("serial-600", 600_000), ("", 120_000)];
const POLL_MS: u64 = 500;
/// persistenced's wait for each GPU's fabric; from the last GPU to a complete fabric (assumed).
const FABRIC_WAIT_MS: u64 = 30_000;
const FABRIC_MS: u64 = 5000;
/// Longest time to a serial init's end: 8 GPUs with 34 s each, and the rest.
const SERIAL_LIMIT: Duration = Duration::from_secs(600);

/// Milestones, in ms since the init's first instruction.
const COLUMNS: [&str; 9] = [
    "agent exec",
    "agent answers",
    "pause container runs",
    "first publication",
    "last publication",
    "container with GPU 0 runs",
    "CUDA works in it",
    "container with all runs",
    "CUDA works on all",
];
/// Results of CUDA's first call, in two more lines.
const VERDICTS: [(&str, &str); 2] = [
    ("first", "first call on GPU 0"),
    ("all", "first call on all"),
];

pub fn run(root: &Path, context: &TestContext, arguments: &[String]) -> Result<()> {
    let (mut runs, mut scale, mut wanted) = (1, 1, Vec::new());
    for word in arguments {
        match (word.parse::<usize>(), word.as_str()) {
            (Ok(number), _) => runs = number,
            (_, "--tenth") => scale = 10,
            (_, name) => {
                ensure!(
                    SCENARIOS.iter().any(|s| s.name == name),
                    "bench fabric: {name:?} is no guest: there are {}",
                    SCENARIOS.map(|s| s.name).join(", ")
                );
                wanted.push(name);
            }
        }
    }
    ensure!(runs > 0, "bench fabric: at least one run");
    let agent = real_agent::file()?;
    let version = if agent.is_some() {
        real_agent::version()?
    } else {
        "test agent".into()
    };
    let scenarios: Vec<&Scenario> = SCENARIOS
        .iter()
        .filter(|s| wanted.is_empty() || wanted.contains(&s.name))
        .collect();
    let mut raw = Vec::new();
    for run in 1..=runs {
        for scenario in &scenarios {
            for (row, words) in scenario.rows() {
                eprintln!("bench: run {run} of {runs}, {}, {row} ...", scenario.name);
                let words = format!(
                    "{} {} {words}",
                    scenario.guest(scale),
                    incumbents(row, scale)
                );
                let result = boot(context, row, &words, agent.as_deref())
                    .with_context(|| format!("{}, {row}", scenario.name))?;
                raw.push(
                    json!({ "guest": scenario.name, "boot": row, "run": run, "words": words,
                    "result": result }),
                );
            }
        }
    }
    let command = format!("tests/bench/run fabric {}", arguments.join(" "));
    keep(
        root,
        "fabric",
        &json!({ "command": command, "agent": version, "scale": scale, "machine": machine(),
            "runs": raw }),
    )?;
    let scaled = if scale == 1 {
        String::new()
    } else {
        format!("; every simulated time divided by {scale}")
    };
    println!("ms since the init's first instruction, median of {runs}; 2 vCPUs; {version}{scaled}");
    for scenario in scenarios {
        print(scenario, &raw);
    }
    println!();
    Ok(())
}

impl Scenario {
    /// Command line of the guest.
    fn guest(&self, scale: u64) -> String {
        let [s1, s2, s3] = self.parts.map(|ms| ms / scale);
        let times =
            format!("nvidia.probe_ms=3 nvidia.s1_ms={s1} nvidia.s2_ms={s2} nvidia.s3_ms={s3}");
        let services = format!(
            "standin.nv-fabricmanager=fabric:{} standin.nvidia-persistenced=fabric-wait:{}",
            FABRIC_MS / scale,
            FABRIC_WAIT_MS / scale
        );
        let fabric = if self.has_fabric { SWITCHES } else { "" };
        let confidential = if self.is_confidential() {
            format!("nvidia.cc=1 {CONFIDENTIAL}")
        } else {
            String::new()
        };
        format!(
            "fakepci.gpus=8 {times} {services} {fabric} {confidential} {} testagent.cost=real",
            self.words
        )
    }

    fn is_confidential(&self) -> bool {
        self.parts == CONFIDENTIAL_PARTS
    }

    /// Rows that differ in this guest.
    fn rows(&self) -> Vec<(&'static str, &'static str)> {
        ROWS.into_iter()
            .filter(|(row, _)| self.has_fabric || !row.starts_with("serial-"))
            .collect()
    }
}

/// Words for a serial init.
fn incumbents(row: &str, scale: u64) -> String {
    let limit = LIMITS
        .iter()
        .find(|(name, _)| name.is_empty() || *name == row)
        .map_or(0, |(_, ms)| ms / scale);
    format!(
        "serial_init.limit_ms={limit} serial_init.poll_ms={}",
        POLL_MS / scale
    )
}

/// Boots once: milestones, verdicts, or the power-off.
fn boot(context: &TestContext, row: &str, words: &str, agent: Option<&[u8]>) -> Result<Value> {
    let guest =
        with_services(real_agent::with_roots(Guest::new(), context, &["first", "all"])?.nvml());
    let mut guest = guest.append(words);
    if let Some(agent) = agent {
        guest = guest.agent(agent);
    }
    let mut booted = guest.boot(context, row)?;
    let is_serial = row != OURS;
    if is_serial && let Some((after_ms, why)) = powered_off(&mut booted)? {
        return Ok(json!({ "powered_off_ms": after_ms, "why": why }));
    }
    let wanted = [
        Container::new("first", "cuda", &["0"]),
        Container::new("all", "nvml", &["all"]),
    ];
    let from = if is_serial {
        "serial-init: exec "
    } else {
        "hardware: ready"
    };
    let pod = real_agent::run(&booted, from, &wanted, Order::AtOnce)?;
    let [first, all] = pod.containers.as_slice() else {
        bail!("two containers were asked for")
    };
    let init = if is_serial {
        serial_milestones(&booted)?
    } else {
        own_milestones(&booted, None)?
    };
    let since = |ns: u64| ns.saturating_sub(init.start_ns) as f64 / 1e6;
    let works = |c: &real_agent::ContainerTimes| c.works_ns.map(since);
    let times = [
        Some(since(init.exec_ns)),
        Some(since(pod.answer_ns)),
        Some(since(pod.pause.program_ns)),
        Some(since(init.first_publication_ns)),
        Some(since(init.last_publication_ns)),
        Some(since(first.program_ns)),
        works(first),
        Some(since(all.program_ns)),
        works(all),
    ];
    let ms: serde_json::Map<String, Value> = COLUMNS
        .iter()
        .zip(times)
        .map(|(c, ms)| ((*c).to_string(), ms.into()))
        .collect();
    let verdict = |c: &real_agent::ContainerTimes| {
        json!({ "answer_ms": c.answer_ns.map(since),
        "error_802": c.error_802 })
    };
    Ok(
        json!({ "ms": ms, "first": verdict(first), "all": verdict(all),
            "clock_error_ms": pod.clock_error_ns as f64 / 1e6 }),
    )
}

/// Waits until a serial init executes the agent (None) or powers off: ms since its first
/// instruction, and its words.
fn powered_off(booted: &mut Booted) -> Result<Option<(f64, String)>> {
    const POWERS_OFF: &str = "serial-init: powers off ";
    let end = Instant::now() + SERIAL_LIMIT;
    while !booted
        .console
        .wait_text(Duration::from_secs(1), "serial-init: exec ")
    {
        let text = booted.console.text();
        if let Some((_, why)) = text
            .split_once(POWERS_OFF)
            .and_then(|(_, rest)| rest.lines().next()?.split_once(": "))
        {
            let (at, start) = (
                booted.console.number_after(POWERS_OFF),
                booted.console.number_after("serial-init: start "),
            );
            booted.exit()?;
            let ns = at
                .zip(start)
                .map(|(at, start)| at - start)
                .context("serial-init: no times")?;
            return Ok(Some((ns as f64 / 1e6, why.trim().to_string())));
        }
        booted.still_runs()?;
        ensure!(
            Instant::now() < end,
            "serial-init: neither agent nor power-off within {SERIAL_LIMIT:?}"
        );
    }
    Ok(None)
}

/// Prints the table of a guest.
fn print(scenario: &Scenario, raw: &[Value]) {
    let rows = scenario.rows();
    let of = |row: &str| {
        raw.iter()
            .filter(|r| r["guest"] == scenario.name && r["boot"] == row)
            .map(|r| &r["result"])
            .collect::<Vec<_>>()
    };
    let line = |title: &str, cell: &dyn Fn(&str) -> String| {
        print!("{title:<40}");
        rows.iter()
            .for_each(|(row, _)| print!(" {:>14}", cell(row)));
        println!();
    };
    println!();
    line(&format!("{} ({})", scenario.name, scenario.what), &|row| {
        row.into()
    });
    for column in COLUMNS {
        line(column, &|row| {
            median(of(row).into_iter().map(|r| &r["ms"][column]))
                .map_or("never".into(), |ms| format!("{ms:.0}"))
        });
    }
    for (container, title) in VERDICTS {
        line(title, &|row| {
            let runs = of(row);
            let failed = runs
                .iter()
                .filter(|r| !r[container]["error_802"].is_null())
                .count();
            match (runs.iter().filter(|r| r["ms"].is_object()).count(), failed) {
                (0, _) => "-".into(),
                (_, 0) => "works".into(),
                (_, _) => "error 802".into(),
            }
        });
    }
    line("powered off", &|row| {
        let off = of(row).into_iter().map(|r| &r["powered_off_ms"]);
        median(off).map_or("no".into(), |ms| format!("{ms:.0}"))
    });
}

/// Median; `None` where a run never got there.
fn median<'a>(values: impl Iterator<Item = &'a Value>) -> Option<f64> {
    let mut all = values.map(Value::as_f64).collect::<Option<Vec<f64>>>()?;
    all.sort_by(f64::total_cmp);
    all.get(all.len() / 2).copied()
}
