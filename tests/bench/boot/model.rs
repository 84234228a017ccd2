//! The boot with `gpuinit.ready=bound` in the model of the locks. Boots of the same run give all
//! that is not the schedule's: when the scan is over and containers are asked for, how long the
//! driver's load takes, and how long the agent and a program take where no GPU is brought up.

use super::GPUS;
use anyhow::{Context, Result, ensure};
use kata_gpu_tests::schedule::drive::{self, Container, Overhead};
use kata_gpu_tests::schedule::locks::{CALL, CALLS, Host, Micros, Times};
use kata_gpu_tests::vm::harness::spans;
use kata_gpu_wire::names;
use kata_gpu_wire::record::Record;
use serde_json::{Map, Value, json};

const MS: Micros = 1000;

/// Times of the agent and of a program by themselves.
pub struct Alone {
    /// From the request for a container without GPUs to its program, and for one with GPUs.
    pause: Micros,
    container: Micros,
    /// From a program to its answer of the driver.
    program: Micros,
}

impl Alone {
    /// From a boot whose agent starts when all GPUs are usable. Of the two containers that are made
    /// at the same time the sooner one counts: it has had the CPUs more for itself.
    pub fn in_boot(ms: &Value, details: &Value) -> Result<Self> {
        let between = |end: &str, begin: &Value| -> Result<Micros> {
            let (begin, end) = (micros(begin)?, micros(&ms[end])?);
            end.checked_sub(begin)
                .with_context(|| format!("{end} us is before {begin} us"))
        };
        let [first, all] = [
            ("container with GPU 0 runs", &details["first"]["asked"]),
            ("container with all runs", &details["all"]["asked"]),
        ]
        .map(|(runs, asked)| between(runs, asked));
        let [computes_first, computes_all] = [
            ("application on GPU 0 computes", "container with GPU 0 runs"),
            ("application on all computes", "container with all runs"),
        ]
        .map(|(computes, runs)| between(computes, &ms[runs]));
        Ok(Self {
            pause: between("pause container runs", &details["pause"]["asked"])?,
            container: first?.min(all?),
            program: computes_first?.min(computes_all?),
        })
    }
}

fn micros(ms: &Value) -> Result<Micros> {
    let ms = ms.as_f64().context("a boot without a time")?;
    Ok((ms * MS as f64) as Micros)
}

/// Steps of our init that the model takes as they were, in ms: end of the scan, loads of nvidia and
/// nvidia-uvm, the look at the driver's files behind these, and from a bind to the GPU's node, of
/// the first GPU and in the median of the others. Null for another init.
pub fn steps(records: &[Record], start_ns: u64) -> Value {
    let one = |name: &str, module: Option<&str>| {
        let spans = spans(records, name).ok()?;
        let mut spans = spans.into_iter();
        spans.find(|(begin, _)| {
            module.is_none_or(|m| begin.fields.get("module").is_some_and(|v| v == m))
        })
    };
    let ms = |from: u64, to: u64| to.saturating_sub(from) as f64 / 1e6;
    let steps = || {
        let scan = one(names::PCI_SCAN, None)?;
        let nvidia = one(names::MODULE_LOAD, Some("nvidia"))?;
        let uvm = one(names::MODULE_LOAD, Some("nvidia_uvm"))?;
        let files = one(names::DRIVER_FILES, None)?;
        let mut nodes = spans(records, names::GPU_NODES).ok()?.into_iter();
        let mut node = || {
            let (_, end) = nodes.next()?;
            let mut bound = records.iter().filter(|r| r.name == names::GPU_BOUND);
            let bound = bound.find(|r| r.gpu == end.gpu)?;
            Some(ms(bound.boottime_ns, end.boottime_ns))
        };
        let first = node()?;
        let mut others: Vec<f64> = std::iter::from_fn(node).collect();
        others.sort_by(f64::total_cmp);
        let other = others.get(others.len() / 2).copied().unwrap_or(first);
        let took = |(begin, end): (&Record, &Record)| ms(begin.boottime_ns, end.boottime_ns);
        Some(
            json!({ "scanned": ms(start_ns, scan.1.boottime_ns), "nvidia": took(nvidia),
            "uvm": ms(nvidia.1.boottime_ns, uvm.1.boottime_ns),
            "files": ms(uvm.1.boottime_ns, files.1.boottime_ns), "node": [first, other] }),
        )
    };
    steps().unwrap_or_default()
}

/// The milestones that the model predicts for this boot, in ms since the init's first instruction.
pub fn predict(
    cpus: u32,
    enable_ms: u32,
    boot: &Value,
    details: &Value,
    alone: &Alone,
) -> Result<Value> {
    let steps = &details["steps"];
    ensure!(!steps.is_null(), "the boot has no scan, load or files");
    let begin = micros(&steps["scanned"])?;
    let at = |ms: &Value| Ok::<_, anyhow::Error>(micros(ms)?.saturating_sub(begin));
    let vcpus = cpus as usize;
    let times = Times {
        enable: Micros::from(enable_ms) * MS,
        firewall: 0,
        probe: 3 * MS,
        s1: 300 * MS,
        s2: 1300 * MS,
        s3: 500 * MS,
    };
    let host = Host {
        vcpus,
        load: Some([micros(&steps["nvidia"])?, micros(&steps["uvm"])?]),
        ..Host::of(GPUS, times)
    };
    let container = |asked: &Value, gpus: Vec<usize>| {
        let takes = if gpus.is_empty() {
            alone.pause
        } else {
            alone.container
        };
        anyhow::Ok(Container {
            between_calls: (alone.program / Micros::from(CALLS)).saturating_sub(CALL),
            ..Container::lasting(takes, &host, at(asked)?, gpus)
        })
    };
    let containers = [
        container(&details["pause"]["asked"], vec![])?,
        container(&details["first"]["asked"], vec![0])?,
        container(&details["all"]["asked"], (0..GPUS).collect())?,
    ];
    let overhead = Overhead {
        files: micros(&steps["files"])?,
        node: [micros(&steps["node"][0])?, micros(&steps["node"][1])?],
        ..Overhead::USUAL
    };
    let run = drive::drive(&host, drive::policy(GPUS, vcpus), &containers, overhead, 1);
    let published = || run.published.iter().flatten();
    let times = [
        ("agent answers", Some(at(&boot["agent answers"])?)),
        ("first publication", published().min().copied()),
        ("last publication", published().max().copied()),
        ("pause container runs", run.containers[0]),
        ("container with GPU 0 runs", run.containers[1]),
        ("container with all runs", run.containers[2]),
        ("application on GPU 0 computes", run.computes[1]),
        ("application on all computes", run.computes[2]),
    ];
    let ms = times
        .into_iter()
        .filter_map(|(name, at)| Some((name.into(), ((at? + begin) as f64 / 1000.0).into())));
    Ok(Value::Object(ms.collect::<Map<_, _>>()))
}
