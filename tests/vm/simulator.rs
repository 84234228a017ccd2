//! A failure means that the simulated driver is faster than its own locks allow, overlaps what they
//! exclude, or fails otherwise than it says: then no time and no order that other tests see would
//! mean anything. Nothing of the init runs here.

use super::harness::{DEADLINE, Guest, Outcome, TestContext, VmTest};
use anyhow::{Context, Result, ensure};
use serde_json::Value;
use std::collections::HashMap;

pub const TESTS: &[VmTest] = &[
    VmTest {
        name: "simulator_loads_and_opens_take_the_time_that_its_locks_say",
        run: times,
    },
    VmTest {
        name: "simulator_without_relaxation_everything_is_serial",
        run: serial_only,
    },
    VmTest {
        name: "simulator_opens_behave_as_the_drivers",
        run: opens,
    },
];

/// Runs a script; each step's line, by its name.
struct Ran {
    steps: HashMap<String, Value>,
    console: String,
}

impl Ran {
    fn ms(&self, step: &str) -> Result<f64> {
        self.steps
            .get(step)
            .and_then(|s| s["ms"].as_f64())
            .with_context(|| format!("step {step} has no time: {:?}", self.steps.get(step)))
    }

    /// How many GPUs were in the middle part of their initialisations at once, at most, by the end
    /// of this step.
    fn at_once(&self, step: &str) -> Result<u64> {
        let sim = self.gpu(step, 0)?["sim"].as_str().unwrap_or_default();
        let (_, count) = sim.split_once("at_once: ").context("no at_once")?;
        Ok(count.parse()?)
    }

    fn gpu(&self, step: &str, k: usize) -> Result<&Value> {
        self.steps
            .get(step)
            .map(|s| &s["gpus"][k])
            .with_context(|| format!("no step {step}"))
    }
}

fn script(context: &TestContext, name: &str, words: &str, script: &str) -> Result<Ran> {
    // All of the kernel's lines, for the driver's words.
    let words = format!("loglevel=7 hardware.init=/driver-script {words} driverscript={script}");
    let mut booted = Guest::new()
        .without_vsock()
        .append(&words)
        .boot(context, name)?;
    ensure!(
        booted.console.wait_text(DEADLINE, "driver-script: end"),
        "the script did not end"
    );
    booted.exit()?;
    let console = booted.console.text();
    let mut steps = HashMap::new();
    for line in console
        .lines()
        .filter_map(|l| l.split_once("driver-script: ").map(|(_, json)| json))
    {
        if let Ok(value) = serde_json::from_str::<Value>(line) {
            steps.insert(
                value["step"].as_str().unwrap_or_default().to_string(),
                value,
            );
        }
    }
    Ok(Ran { steps, console })
}

/// Never sooner than the locks allow. How much later is this machine's affair: what overlaps is
/// judged by the simulator's count.
fn at_least(what: &str, is: f64, should: f64) -> Result<()> {
    ensure!(
        is >= should * 0.98 - 5.0,
        "{what}: {is:.0} ms, sooner than the locks allow ({should:.0} ms)"
    );
    Ok(())
}

/// Long beside all S1 together: on a busy machine, too, the last GPU comes to it before the first
/// one is through.
const TIMES: &str = "fakepci.gpus=4 fakepci.enable_ms=150 nvidia.probe_ms=100 nvidia.s1_ms=100 \
    nvidia.s2_ms=2000 nvidia.s3_ms=150";
const S1: f64 = 100.0;
const S2: f64 = 2000.0;
const S3: f64 = 150.0;
/// One initialisation.
const WHOLE: f64 = S1 + S2 + S3;
const N: f64 = 4.0;

fn times(context: &TestContext) -> Result<Outcome> {
    let ran = script(
        context,
        "times",
        TIMES,
        "load,serial,close,parallel,sleep:10,close,nonblock",
    )?;
    at_least("load", ran.ms("load")?, N * (150.0 + 100.0))?;
    // An opener that takes one after another, as persistenced does, sees each take its whole time.
    for k in 0..4 {
        let took = ran.gpu("serial", k)?["ms"].as_f64().context("no time")?;
        at_least("each of the serial opens", took, WHOLE)?;
    }
    ensure!(ran.at_once("serial")? == 1, "{:?}", ran.steps);
    let together = N * S1 + S2 + N * S3;
    for step in ["parallel", "nonblock"] {
        at_least(step, ran.ms(step)?, together)?;
        ensure!(ran.at_once(step)? == 4, "{step}: {:?}", ran.steps);
    }
    // A non-blocking open does not wait for its initialisation.
    let (open, whole) = (
        ran.gpu("nonblock", 0)?["open_ms"].as_f64(),
        ran.gpu("nonblock", 0)?["ms"].as_f64(),
    );
    ensure!(
        open.zip(whole).is_some_and(|(open, whole)| open < whole),
        "{open:?}, {whole:?}"
    );
    Ok(Outcome::Measured(format!(
        "4 GPUs, ms (model): load {:.0} (1000), serial {:.0} ({}), parallel {:.0} ({together}), \
        non-blocking {:.0} ({together})",
        ran.ms("load")?,
        ran.ms("serial")?,
        N * WHOLE,
        ran.ms("parallel")?,
        ran.ms("nonblock")?
    )))
}

fn serial_only(context: &TestContext) -> Result<Outcome> {
    let ran = script(
        context,
        "cc",
        &format!("{TIMES} nvidia.cc=1"),
        "load,parallel,close,sleep:10,serial",
    )?;
    at_least("parallel opens", ran.ms("parallel")?, N * WHOLE)?;
    ensure!(ran.at_once("parallel")? == 1, "{:?}", ran.steps);
    // Under confidential computing a GPU that was taken down does not come up again.
    let again = ran.gpu("serial", 0)?;
    ensure!(
        again["errno"] == "EIO" && ran.console.contains("RmInitAdapter failed! (0x22:0x56:"),
        "{again:?}"
    );
    Ok(Outcome::Passed)
}

fn opens(context: &TestContext) -> Result<Outcome> {
    let words = "fakepci.gpus=2 nvidia.s1_ms=100 nvidia.s2_ms=300 nvidia.s3_ms=100";
    let ran = script(context, "opens", words, "load,twice,close,sleep:50,power")?;
    // All wait for GPU 0: the one that opened it again, the one that only wanted GPU 1, and the one
    // that reads a file.
    for (step, k) in [("twice", 0), ("twice", 1), ("power", 0)] {
        let first = ran.gpu(step, k)?["first"].to_string();
        ensure!(first.contains("adapter: up"), "{step} {k}: {first}");
    }
    ensure!(ran.gpu("power", 0)?["read"] == true, "{:?}", ran.steps);
    // With the driver that initialises in its probe an open has nothing left to do, and nothing is
    // taken down.
    let ran = script(
        context,
        "probe",
        &format!("{words} nvidia.version=595.45.04 nvidia.NVreg_GpuInitOnProbe=1"),
        "load,serial,close,sleep:10,parallel",
    )?;
    ensure!(ran.ms("load")? > 900.0, "{:?}", ran.steps);
    for k in 0..2 {
        let sim = ran.gpu("parallel", k)?["sim"].to_string();
        ensure!(
            sim.contains("inits: 1 ") && sim.contains("teardowns: 0 "),
            "{sim}"
        );
    }
    Ok(Outcome::Passed)
}
