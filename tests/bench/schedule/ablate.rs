//! `bench schedule --ablate`: the same bring-ups with one part of the schedule taken away, by a
//! fact that it does not hear or a setting. A part that delays nobody by its absence has not earned
//! its code.

use super::{KINDS, Kind, Micros, PARTS};
use crate::{keep, machine};
use anyhow::Result;
use kata_gpu_init::boot::bring_up::strategy::Policy;
use kata_gpu_init::config::Init;
use kata_gpu_tests::schedule::drive::{self, Broken, Container, Overhead, Run};
use kata_gpu_tests::schedule::locks::Host;
use serde_json::{Value, json};
use std::path::Path;

const VCPUS: [usize; 2] = [1, 2];
/// Bring-ups of each class, whose reports come after other random times.
const SEEDS: u64 = 3;
/// Delay that counts, in percent.
const COUNTS: f64 = 2.0;

/// A part of the schedule that is taken away.
struct Ablation {
    name: &'static str,
    broken: Broken,
    change: fn(&mut Host, &mut Policy),
}

fn nothing(_: &mut Host, _: &mut Policy) {}

const fn without(name: &'static str, broken: Broken) -> Ablation {
    Ablation {
        name,
        broken,
        change: nothing,
    }
}

const fn changed(name: &'static str, change: fn(&mut Host, &mut Policy)) -> Ablation {
    Ablation {
        name,
        broken: Broken::No,
        change,
    }
}

const ABLATIONS: [Ablation; 10] = [
    without("the agent's looks", Broken::HearsNoLook),
    without("containers: holds and pauses", Broken::HearsNoContainer),
    without("publications in progress", Broken::HearsNoPublication),
    without("waits for S1", Broken::SeesTooSoon),
    changed("sight of S1's end", |host, _| host.sees_attach = false),
    changed("waves: all in parallel", |_, policy| {
        policy.init = Init::Serial
    }),
    changed("the driver's relaxed lock", |host, policy| {
        (host.relaxed, policy.relaxed) = (false, false)
    }),
    changed("what a BAR firewall does", |_, policy| {
        policy.facts.firewall = false
    }),
    changed("what a single vCPU does", |_, policy| {
        policy.facts.vcpus = 2
    }),
    without("the slow lane: every hold", Broken::ThinksFast),
];

/// Times in a bring-up that somebody waits for.
const MILESTONES: [&str; 7] = [
    "published, mean",
    "usable, last",
    "container, first",
    "container, mean",
    "computes, first",
    "computes, mean",
    "computes, last",
];

/// Times of these milestones, in µs.
type Times = [f64; MILESTONES.len()];

fn mean(times: &[f64]) -> f64 {
    times.iter().sum::<f64>() / times.len().max(1) as f64
}

fn times(run: &Run, containers: &[Container]) -> Times {
    // A GPU or container that never got there is infinitely late.
    let time = |time: &Option<Micros>| time.map_or(f64::INFINITY, |time| time as f64);
    let all = |times: &[Option<Micros>]| times.iter().map(time).collect::<Vec<f64>>();
    // The pause container of a pod waits for no GPU.
    let with_gpus = |times: &[Option<Micros>]| -> Vec<f64> {
        let both = times.iter().zip(containers);
        let of = both.filter(|(_, container)| !container.gpus.is_empty());
        of.map(|(at, _)| time(at)).collect()
    };
    let first = |times: &[f64]| times.iter().copied().fold(f64::INFINITY, f64::min);
    let last = |times: &[f64]| times.iter().copied().fold(0.0, f64::max);
    let (runs, computes) = (with_gpus(&run.containers), with_gpus(&run.computes));
    [
        mean(&all(&run.published)),
        last(&all(&run.usable)),
        first(&runs),
        mean(&runs),
        first(&computes),
        mean(&computes),
        last(&computes),
    ]
}

struct Class {
    name: String,
    host: Host,
    policy: Policy,
    containers: Vec<Container>,
}

impl Class {
    fn times(&self, ablation: &Ablation) -> Times {
        let (mut host, mut policy) = (self.host.clone(), self.policy.clone());
        (ablation.change)(&mut host, &mut policy);
        let mut sum = Times::default();
        for seed in 0..SEEDS {
            let (policy, broken) = (policy.clone(), ablation.broken);
            let run = drive::drive_broken(
                &host,
                policy,
                &self.containers,
                Overhead::USUAL,
                seed,
                broken,
            );
            for (sum, time) in sum.iter_mut().zip(times(&run, &self.containers)) {
                *sum += time / SEEDS as f64;
            }
        }
        sum
    }
}

/// All hosts of the benchmark with an H100's times, each with one and two vCPUs, and pods of a
/// container for each GPU and of one for all.
fn classes() -> Vec<Class> {
    let mut classes = Vec::new();
    for kind in &KINDS {
        let (enables, counts) = kind.classes();
        for (enable, gpus) in enables.iter().flat_map(|e| counts.iter().map(|n| (*e, *n))) {
            for vcpus in VCPUS {
                classes.extend(with_containers(kind, enable, gpus, vcpus));
            }
        }
    }
    classes
}

fn with_containers(kind: &Kind, enable: Micros, gpus: usize, vcpus: usize) -> [Class; 2] {
    let host = Host {
        vcpus,
        load: Some(drive::USUAL_LOAD),
        ..kind.host(PARTS[0], enable, gpus)
    };
    // A pod begins with its pause container, which has no GPU.
    let pod = |of: Vec<Vec<usize>>| -> Vec<Container> {
        let all = std::iter::once(vec![]).chain(of);
        all.map(|gpus| Container::new(0, gpus)).collect()
    };
    let each = pod((0..gpus).map(|gpu| vec![gpu]).collect());
    let all = pod(vec![(0..gpus).collect()]);
    [("each", each), ("all", all)].map(|(name, containers)| Class {
        name: format!(
            "{} {enable} ms, {gpus} GPUs, {vcpus} vCPUs, {name}",
            kind.name
        ),
        host: host.clone(),
        policy: kind.policy(gpus, vcpus),
        containers,
    })
}

/// Delays of one milestone by an ablation, in percent.
struct Delays {
    mean: f64,
    worst: f64,
    class: String,
    later: usize,
    sooner: usize,
}

impl Delays {
    fn of(milestone: usize, classes: &[Class], with: &[Times], without: &[Times]) -> Self {
        let delays: Vec<f64> = with
            .iter()
            .zip(without)
            .map(|(with, without)| (without[milestone] / with[milestone] - 1.0) * 100.0)
            .collect();
        let (at, worst) = delays
            .iter()
            .copied()
            .enumerate()
            .fold((0, f64::MIN), |most, next| match next.1 > most.1 {
                true => next,
                false => most,
            });
        Self {
            mean: mean(&delays),
            worst,
            class: classes[at].name.clone(),
            later: delays.iter().filter(|delay| **delay > COUNTS).count(),
            sooner: delays.iter().filter(|delay| **delay < -COUNTS).count(),
        }
    }

    fn json(&self, milestone: &str) -> Value {
        json!({ "milestone": milestone, "mean_percent": self.mean, "worst_percent": self.worst,
            "worst_class": self.class, "later": self.later, "sooner": self.sooner })
    }
}

pub fn run(root: &Path) -> Result<()> {
    let classes = classes();
    let all = |ablation: &Ablation| -> Vec<Times> {
        classes.iter().map(|class| class.times(ablation)).collect()
    };
    let with = all(&without("nothing", Broken::No));
    println!(
        "{} classes; later without a part, in percent: mean and worst; classes that are over \
         {COUNTS} % later and sooner",
        classes.len()
    );
    let mut raw = Vec::new();
    for ablation in &ABLATIONS {
        eprintln!("bench: without {} ...", ablation.name);
        let without = all(ablation);
        let delays: Vec<Delays> = (0..MILESTONES.len())
            .map(|milestone| Delays::of(milestone, &classes, &with, &without))
            .collect();
        println!("without {}", ablation.name);
        for (name, of) in MILESTONES.iter().zip(&delays) {
            println!(
                "  {name:<16} {:>+7.1} {:>+8.1}  {:>4} later {:>4} sooner  worst: {}",
                of.mean, of.worst, of.later, of.sooner, of.class
            );
        }
        if delays.iter().all(|of| of.worst <= COUNTS) {
            println!("  delays nobody: not worth its code");
        }
        let rows: Vec<Value> = MILESTONES
            .iter()
            .zip(&delays)
            .map(|(name, of)| of.json(name))
            .collect();
        raw.push(json!({ "without": ablation.name, "delays": rows }));
    }
    keep(
        root,
        "schedule-ablation",
        &json!({ "command": "tests/bench/run schedule --ablate", "machine": machine(),
            "classes": classes.len(), "rows": raw }),
    )
}
