//! `bench schedule`: the order in which the schedule brings GPUs up, in virtual time, against the
//! best order that a search finds in the same locks. `--ablate`: what each part of the schedule
//! is worth. No VM, no clock.

mod ablate;

use super::{keep, machine};
use anyhow::{Result, ensure};
use kata_gpu_init::boot::bring_up::strategy::{Facts, Policy};
use kata_gpu_tests::schedule::drive::{self, Container, Overhead, Run};
use kata_gpu_tests::schedule::locks::{Host, Micros, Times};
use kata_gpu_tests::schedule::optimum::{Rule, search};
use kata_gpu_tests::schedule::policies::{OneBesideTheLane, run as run_policy};
use serde_json::json;
use std::path::Path;

const MS: Micros = 1000;
/// Mapping a GPU's BARs, ms.
const ENABLE: [Micros; 11] = [3, 100, 200, 300, 500, 700, 1000, 1500, 2000, 3300, 4000];
/// Parts of an initialisation, ms: an H100's, a fifth shorter and longer; and of the same length,
/// with a first part of 10 to 40 %.
const PARTS: [[Micros; 3]; 7] = [
    [300, 1300, 500],
    [240, 1040, 400],
    [360, 1560, 600],
    [210, 1365, 525],
    [420, 1213, 467],
    [630, 1062, 408],
    [840, 910, 350],
];
/// Other parts, printed and not judged: the first wave is chosen for an H100's.
const FAR_PARTS: [[Micros; 3]; 2] = [[150, 900, 300], [400, 2000, 700]];
const GPUS: [usize; 3] = [2, 4, 8];
/// Behind a firewall, where the search is large.
const FIREWALL: Micros = 4000;
const FIREWALL_ENABLE: [Micros; 4] = [3, 300, 1000, 3300];
const FIREWALL_GPUS: [usize; 3] = [2, 4, 6];
/// Worlds that a search visits at most.
const MOST: usize = 6_000_000;
/// How far from the best order is near enough, in percent.
const NEAR: Micros = 5;
/// Up to so many GPUs the search is repeated without any rule.
const FREE: usize = 2;

struct Kind {
    name: &'static str,
    relaxed: bool,
    /// Whether the end of a first part is seen; where it is not, rows are not judged.
    seen: bool,
    confidential: bool,
    firewall: Micros,
    driver: &'static str,
}

impl Kind {
    /// A host of this kind with two vCPUs and GPUs of these times, in ms.
    fn host(&self, parts: [Micros; 3], enable: Micros, gpus: usize) -> Host {
        let [s1, s2, s3] = parts.map(|part| part * MS);
        let times = Times {
            enable: enable * MS,
            firewall: self.firewall * MS,
            probe: 3 * MS,
            s1,
            s2,
            s3,
        };
        Host {
            relaxed: self.relaxed,
            sees_attach: self.seen,
            vcpus: 2,
            ..Host::of(gpus, times)
        }
    }

    fn policy(&self, gpus: usize, vcpus: usize) -> Policy {
        let mut policy = drive::policy(gpus, vcpus);
        policy.facts = Facts {
            firewall: self.firewall > 0,
            driver: self.driver.parse().ok(),
            confidential: self.confidential,
            ..policy.facts
        };
        policy
    }

    /// Durations of an enabling, in ms, and numbers of GPUs.
    fn classes(&self) -> (&'static [Micros], &'static [usize]) {
        match self.firewall > 0 {
            true => (&FIREWALL_ENABLE, &FIREWALL_GPUS),
            false => (&ENABLE, &GPUS),
        }
    }
}

const KINDS: [Kind; 5] = [
    Kind {
        name: "relaxed",
        relaxed: true,
        seen: true,
        confidential: false,
        firewall: 0,
        driver: "550.163.01",
    },
    Kind {
        name: "unseen",
        relaxed: true,
        seen: false,
        confidential: false,
        firewall: 0,
        driver: "550.163.01",
    },
    Kind {
        name: "old-driver",
        relaxed: false,
        seen: false,
        confidential: false,
        firewall: 0,
        driver: "535.230.02",
    },
    Kind {
        name: "cc",
        relaxed: false,
        seen: false,
        confidential: true,
        firewall: 0,
        driver: "550.163.01",
    },
    Kind {
        name: "firewall",
        relaxed: true,
        seen: true,
        confidential: false,
        firewall: FIREWALL,
        driver: "570.124.06",
    },
];

pub fn run(root: &Path, arguments: &[String]) -> Result<()> {
    if !arguments.is_empty() {
        ensure!(
            arguments == ["--ablate"],
            "bench schedule: want no word, or --ablate"
        );
        return ablate::run(root);
    }
    let mut raw = Vec::new();
    let mut missed = 0;
    println!(
        "ms to the last usable GPU; best: of all orders in which nothing spins beside an enabling; \
         free: of all orders; computes: the first of programs, one for each GPU, their mean, the \
         last"
    );
    println!(
        "{:<11} {:>14} {:>6} {:>4} {:>7} {:>7} {:>7} {:>7} {:>5}  {:>9}  {:>20}",
        "host",
        "S1/S2/S3",
        "enable",
        "GPUs",
        "before",
        "ours",
        "best",
        "free",
        "ratio",
        "published",
        "computes"
    );
    for kind in &KINDS {
        let (enables, counts) = kind.classes();
        let judged = PARTS.iter().map(|parts| (parts, kind.seen));
        let sets = judged.chain(FAR_PARTS.iter().map(|parts| (parts, false)));
        for (parts, judged) in sets.take(if kind.firewall > 0 || kind.confidential {
            1
        } else {
            PARTS.len() + FAR_PARTS.len()
        }) {
            for enable in enables {
                for gpus in counts {
                    let row = Row::of(kind, *parts, *enable, *gpus);
                    let near = row.ours * 100 <= row.bound * (100 + NEAR);
                    missed += u32::from(judged && !near);
                    let verdict = match (near, judged) {
                        (true, _) => "",
                        (false, true) => "  far from the best",
                        (false, false) => "  (not judged)",
                    };
                    println!("{}{verdict}", row.text());
                    raw.push(row.json());
                }
            }
        }
    }
    let all = json!({ "command": "tests/bench/run schedule", "machine": machine(), "rows": raw });
    keep(root, "schedule", &all)?;
    let near = if missed == 0 {
        "all".into()
    } else {
        format!("all but {missed}")
    };
    println!("within {NEAR} % of the best order: {near}");
    Ok(())
}

/// Times in µs.
struct Row {
    kind: &'static str,
    parts: [Micros; 3],
    enable: Micros,
    gpus: usize,
    before: Option<Micros>,
    ours: Micros,
    published: Micros,
    /// The best order found, and what no order beats: the same where the search was complete.
    best: Micros,
    bound: Micros,
    free: Option<Micros>,
    computes: Computes,
}

/// Times at which programs of containers compute, one for each GPU.
struct Computes {
    first: Micros,
    mean: Micros,
    last: Micros,
}

impl Computes {
    fn of(run: &Run) -> Self {
        let times: Vec<Micros> = run.computes.iter().map(|at| at.unwrap_or(0)).collect();
        Self {
            first: times.iter().copied().min().unwrap_or(0),
            mean: times.iter().sum::<Micros>() / times.len().max(1) as Micros,
            last: times.iter().copied().max().unwrap_or(0),
        }
    }

    fn text(&self) -> String {
        format!("{}/{}/{}", self.first / MS, self.mean / MS, self.last / MS)
    }

    fn json(&self) -> serde_json::Value {
        json!({ "first_us": self.first, "mean_us": self.mean, "last_us": self.last })
    }
}

impl Row {
    fn of(kind: &Kind, parts: [Micros; 3], enable: Micros, gpus: usize) -> Self {
        let host = kind.host(parts, enable, gpus);
        let loading = host.to_be_loaded();
        let policy = kind.policy(gpus, host.vcpus);
        let containers = Container::one_each(gpus);
        let none = Overhead::default();
        let computing = drive::drive(&loading, policy.clone(), &containers, none, 0);
        let ours = drive::drive(&loading, policy, &[], none, 0).outcome;
        let before = (kind.firewall == 0)
            .then(|| run_policy(&host, &mut OneBesideTheLane))
            .flatten();
        let before = before.map(|outcome| outcome.usable);
        // The load counts as a probe: where probes sleep, the search includes it.
        let searched = if kind.firewall > 0 { &loading } else { &host };
        let known = ours.usable.max(before.unwrap_or(0));
        let found = search(searched, Rule::NothingSpins, known, MOST);
        let free = (gpus <= FREE).then(|| search(searched, Rule::None, known, MOST));
        let free = free.filter(|free| free.bound == free.usable);
        Self {
            kind: kind.name,
            parts,
            enable,
            gpus,
            before,
            ours: ours.usable,
            published: ours.published,
            best: found.usable.min(known),
            bound: found.bound.min(known),
            free: free.map(|free| free.usable),
            computes: Computes::of(&computing),
        }
    }

    fn text(&self) -> String {
        let ms = |time: Option<Micros>| time.map_or("-".into(), |time| (time / MS).to_string());
        let [s1, s2, s3] = self.parts;
        let bound = match self.bound < self.best {
            true => format!(" (no order beats {})", self.bound / MS),
            false => String::new(),
        };
        format!(
            "{:<11} {:>14} {:>6} {:>4} {:>7} {:>7} {:>7} {:>7} {:>5}  {:>9}  {:>20}{bound}",
            self.kind,
            format!("{s1}/{s2}/{s3}"),
            self.enable,
            self.gpus,
            ms(self.before),
            ms(Some(self.ours)),
            ms(Some(self.best)),
            ms(self.free),
            format!(
                "{}.{:02}",
                self.ours / self.best,
                self.ours * 100 / self.best % 100
            ),
            self.published / MS,
            self.computes.text(),
        )
    }

    fn json(&self) -> serde_json::Value {
        json!({
            "host": self.kind, "parts_ms": self.parts, "enable_ms": self.enable, "gpus": self.gpus,
            "before_us": self.before, "ours_us": self.ours, "published_us": self.published,
            "best_us": self.best, "bound_us": self.bound, "free_us": self.free,
            "computes": self.computes.json(),
        })
    }
}
