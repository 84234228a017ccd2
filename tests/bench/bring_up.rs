//! `bench bringup [--tenth] [HOST..] [GPUS..]`: 1 to 16 GPUs on every kind of host, in the
//! incumbent's serial order and in ours, against what the locks of host and driver allow at best.

use super::{keep, machine};
use anyhow::{Context, Result, bail, ensure};
use kata_gpu_tests::schedule::locks;
use kata_gpu_tests::schedule::optimum::{Rule, search};
use kata_gpu_tests::vm::harness::{Guest, TestContext, named};
use kata_gpu_wire::names;
use kata_gpu_wire::record::{Kind, Record};
use serde_json::{Value, json};
use std::path::Path;

const GPUS: [u64; 5] = [1, 2, 4, 8, 16];
/// The incumbent's order: plain module load, one initialisation after another, the spec when
/// everything is done.
const SERIAL: &str = "gpuinit.bind=insmod gpuinit.init=serial gpuinit.cdi=complete";
/// Up to so many GPUs the best order is searched for, among so many states of the locks.
const MOST_SEARCHED: u64 = 8;
const WORLDS: usize = 6_000_000;
/// How far from the bound and the guest's own steps is near enough: a share of them.
const NEAR: f64 = 0.05;
/// By how much two boots that do the same differ: a share, and ms.
const NOISE: (f64, f64) = (0.01, 20.0);

/// A kind of host and driver; times in ms per GPU, at full scale.
struct Host {
    name: &'static str,
    /// The host maps the BARs.
    enable: u64,
    /// The probe sleeps until the BAR firewall is down.
    firewall: u64,
    /// Whether the driver's lock is released while a GPU's own processor boots.
    relaxed: bool,
    words: &'static str,
    /// Only where it is named: a question of its own.
    apart: bool,
}

/// Three parts of an initialisation, and a probe: an H100's.
const PARTS: [u64; 3] = [300, 1300, 500];
const PROBE: u64 = 3;

/// A driver whose open is the whole initialisation: nobody sees the end of its first part.
const OLD: &str = "nvidia.version=535.230.02";
/// Parameters of a driver that initialises in the probe.
const IN_PROBE: &str = "nvidia.version=595.45.04 nvidia.NVreg_GpuInitOnProbe=1";

const HOSTS: &[Host] = &[
    Host {
        name: "slow",
        enable: 3300,
        firewall: 0,
        relaxed: true,
        words: "",
        apart: false,
    },
    // An initialisation takes longer than an enabling: what is bound waits for its turn.
    Host {
        name: "medium",
        enable: 1000,
        firewall: 0,
        relaxed: true,
        words: "",
        apart: false,
    },
    Host {
        name: "fast",
        enable: 3,
        firewall: 0,
        relaxed: true,
        words: "",
        apart: false,
    },
    Host {
        name: "blackwell",
        enable: 3,
        firewall: 4000,
        relaxed: true,
        words: "fakepci.device=0x2901",
        apart: false,
    },
    Host {
        name: "slow-blackwell",
        enable: 3300,
        firewall: 4000,
        relaxed: true,
        words: "fakepci.device=0x2901",
        apart: true,
    },
    Host {
        name: "cc",
        enable: 3,
        firewall: 0,
        relaxed: false,
        words: "nvidia.cc=1",
        apart: false,
    },
    Host {
        name: "old-driver",
        enable: 3,
        firewall: 0,
        relaxed: false,
        words: OLD,
        apart: false,
    },
    // Blocking opens in a pipeline: S1 of one beside nothing, the rest of it beside the next one's
    // enabling.
    Host {
        name: "slow-old-driver",
        enable: 3300,
        firewall: 0,
        relaxed: false,
        words: OLD,
        apart: true,
    },
    // Does it gain anything to let probes initialise? Each of these with and without.
    Host {
        name: "fast-595",
        enable: 3,
        firewall: 0,
        relaxed: true,
        words: "nvidia.version=595.45.04",
        apart: true,
    },
    Host {
        name: "fast-in-probe",
        enable: 3,
        firewall: 0,
        relaxed: true,
        words: IN_PROBE,
        apart: true,
    },
    Host {
        name: "slow-595",
        enable: 3300,
        firewall: 0,
        relaxed: true,
        words: "nvidia.version=595.45.04",
        apart: true,
    },
    Host {
        name: "slow-in-probe",
        enable: 3300,
        firewall: 0,
        relaxed: true,
        words: IN_PROBE,
        apart: true,
    },
];

impl Host {
    /// Its times at this scale, and what they mean for the guest.
    fn scaled(&self, scale: u64) -> (Times, String) {
        let at = |ms: u64| if ms > 10 { ms / scale } else { ms };
        let times = Times {
            enable: at(self.enable),
            firewall: at(self.firewall),
            probe: PROBE,
            parts: PARTS.map(at),
            relaxed: self.relaxed,
            sees_attach: self.words != OLD,
        };
        let [s1, s2, s3] = times.parts;
        let Times {
            enable,
            firewall,
            probe,
            ..
        } = times;
        let words = format!(
            "fakepci.enable_ms={enable} nvidia.barfw_ms={firewall} nvidia.probe_ms={probe} \
            nvidia.s1_ms={s1} nvidia.s2_ms={s2} nvidia.s3_ms={s3} {}",
            self.words
        );
        (times, words)
    }
}

struct Times {
    enable: u64,
    firewall: u64,
    probe: u64,
    parts: [u64; 3],
    relaxed: bool,
    sees_attach: bool,
}

impl Times {
    /// Time of the best order for `n` GPUs among those of [`Rule::AsSeen`]: from an exact search in
    /// the model of the locks (tests/schedule); where there are too many orders to search, less
    /// than that, from the locks one by one.
    fn bound(&self, n: u64) -> Bound {
        let simple = self.simple_bound(n);
        if n > MOST_SEARCHED {
            return Bound {
                ms: simple,
                reachable: false,
            };
        }
        let [s1, s2, s3] = self.parts.map(|part| part * 1000);
        let times = locks::Times {
            enable: self.enable * 1000,
            firewall: self.firewall * 1000,
            probe: self.probe * 1000,
            s1,
            s2,
            s3,
        };
        let host = locks::Host {
            relaxed: self.relaxed,
            sees_attach: self.sees_attach,
            vcpus: 2,
            ..locks::Host::of(n as usize, times)
        };
        // The load counts as a probe: where probes sleep, the search includes it.
        let host = if self.firewall > 0 {
            host.to_be_loaded()
        } else {
            host
        };
        let serial =
            n * (self.enable + self.firewall + self.probe + self.parts.iter().sum::<u64>()) * 1000;
        let found = search(&host, Rule::AsSeen, serial, WORLDS);
        Bound {
            ms: (found.bound / 1000).max(simple),
            reachable: found.visited < WORLDS,
        }
    }

    /// The host maps one GPU's BARs after another, and beside no S1 (it has config accesses from
    /// its beginning to its end); the last GPU still has to be probed and initialised. And the
    /// initialisations, which can start when the first GPU is through its probe: S1 and S3 are
    /// under the driver's one lock; S3 also under the locks of all GPUs, so beside no S2; the last
    /// S2 is after all S1. Without a relaxed lock all is under the one lock.
    fn simple_bound(&self, n: u64) -> u64 {
        let [s1, s2, s3] = self.parts;
        let one = s1 + s2 + s3;
        let first_probed = self.enable + self.firewall + self.probe;
        let lane = n * (self.enable + s1) + self.probe + s2 + s3;
        let initialised = if self.relaxed {
            n * s1 + s2 + n * s3
        } else {
            n * one
        };
        lane.max(first_probed + initialised)
    }
}

/// Time that no order of [`Rule::AsSeen`] beats. One that enables a GPU inside a third part, and by
/// chance behind its last access, may.
struct Bound {
    ms: u64,
    /// Whether an order takes so long: the search was complete.
    reachable: bool,
}

pub fn run(root: &Path, context: &TestContext, arguments: &[String]) -> Result<()> {
    let scale = if arguments.iter().any(|a| a == "--tenth") {
        10
    } else {
        1
    };
    let (counts, wanted): (Vec<&String>, Vec<&String>) = arguments
        .iter()
        .filter(|a| *a != "--tenth")
        .partition(|a| a.bytes().all(|b| b.is_ascii_digit()));
    let counts: Vec<u64> = counts.iter().map(|c| c.parse()).collect::<Result<_, _>>()?;
    for name in &wanted {
        ensure!(
            HOSTS.iter().any(|h| h.name == **name),
            "no host {name:?}: there are {}",
            HOSTS.iter().map(|h| h.name).collect::<Vec<_>>().join(", ")
        );
    }
    let mut raw = Vec::new();
    let mut missed = 0;
    println!("ms from the scan to the last usable GPU");
    println!(
        "{:<16} {:>5} {:>8} {:>8} {:>8} {:>5} {:>17} {:>11}",
        "host", "GPUs", "serial", "ours", "bound", "own", "ours/(bound+own)", "serial/ours"
    );
    for host in HOSTS
        .iter()
        .filter(|h| wanted.is_empty() && !h.apart || wanted.iter().any(|w| *w == h.name))
    {
        let (times, words) = host.scaled(scale);
        let name = if scale == 1 {
            host.name.to_string()
        } else {
            format!("{} (1:{scale})", host.name)
        };
        // With one GPU there is no order: what is over the bound then are the guest's own steps.
        eprintln!("bench: {} with 1 GPU ...", host.name);
        let alone = boot(context, &format!("{words} fakepci.gpus=1"), 1)?;
        let own = alone.ms - times.bound(1).ms as f64;
        for gpus in if counts.is_empty() {
            GPUS.to_vec()
        } else {
            counts.clone()
        } {
            let bound = times.bound(gpus);
            let guest = format!("{words} fakepci.gpus={gpus}");
            eprintln!("bench: {} with {gpus} GPUs ...", host.name);
            let serial = boot(context, &format!("{} {SERIAL}", guest), gpus)?;
            let ours = boot(context, &guest, gpus)?;
            let reachable = bound.ms as f64 + own;
            let near = ours.ms <= reachable * (1.0 + NEAR);
            let never_slower = ours.ms <= serial.ms * (1.0 + NOISE.0) + NOISE.1;
            let (verdict, misses) = match (near, never_slower, bound.reachable) {
                (true, true, _) => ("", false),
                (false, true, true) => ("  far from the bound", true),
                (false, true, false) => ("  (no order is known to reach the bound)", false),
                (true, false, _) | (false, false, false) => ("  slower than serial", true),
                (false, false, true) => ("  far from the bound, slower than serial", true),
            };
            missed += u32::from(misses);
            println!(
                "{name:<16} {gpus:>5} {:>8.0} {:>8.0} {:>8} {own:>5.0} {:>17.2} {:>11.2}{verdict}",
                serial.ms,
                ours.ms,
                bound.ms,
                ours.ms / reachable,
                serial.ms / ours.ms
            );
            for (order, run) in [("serial", serial), ("ours", ours)] {
                raw.push(
                    json!({ "host": host.name, "scale": scale, "gpus": gpus, "order": order,
                    "ms": run.ms, "bound_ms": bound.ms, "bound_is_reachable": bound.reachable,
                    "own_ms": own, "gpus_ms": run.each,
                    "strategy": run.strategy }),
                );
            }
        }
    }
    keep(
        root,
        "bringup",
        &json!({ "command": "tests/bench/run bringup", "machine": machine(), "serial": SERIAL,
        "runs": raw }),
    )?;
    println!(
        "within {:.0} % of bound and own steps, and never slower than serial: {}",
        NEAR * 100.0,
        if missed == 0 {
            "all".into()
        } else {
            format!("all but {missed}")
        }
    );
    Ok(())
}

/// A boot, in ms since the scan's end.
struct Run {
    ms: f64,
    /// When each GPU was usable.
    each: Vec<f64>,
    strategy: Value,
}

fn boot(context: &TestContext, words: &str, gpus: u64) -> Result<Run> {
    let mut guest = Guest::new().append(words);
    if let Some((path, module)) = of_version(context, words)? {
        guest = guest.file(&path, &module);
    }
    let booted = guest.boot(context, "bringup")?;
    let settled = booted.settled()?;
    if settled != (gpus, 0) {
        bail!("{words}: usable and failed GPUs: {settled:?}");
    }
    let records = booted.receiver.records();
    super::trace(&records);
    let scan = named(&records, Kind::End, names::PCI_SCAN)
        .first()
        .context("no scan")?
        .boottime_ns;
    let since = |r: &Record| r.boottime_ns.saturating_sub(scan) as f64 / 1e6;
    let each: Vec<f64> = named(&records, Kind::Event, names::GPU_USABLE)
        .into_iter()
        .map(since)
        .collect();
    let strategy = named(&records, Kind::Event, names::STRATEGY)
        .first()
        .map(|r| json!(r.fields))
        .unwrap_or_default();
    Ok(Run {
        ms: each.iter().copied().fold(0.0, f64::max),
        each,
        strategy,
    })
}

/// The simulated driver's module of the version that these words give it, with its path in a guest:
/// the init chooses its strategy by the version in the file. None: the words give it none.
fn of_version(context: &TestContext, words: &str) -> Result<Option<(String, Vec<u8>)>> {
    const OWN: &[u8] = b"\0version=550.163.01\0";
    let mut words = words.split(' ');
    let Some(version) = words.find_map(|word| word.strip_prefix("nvidia.version=")) else {
        return Ok(None);
    };
    let mut named = format!("\0version={version}\0").into_bytes();
    ensure!(
        named.len() <= OWN.len(),
        "version {version:?} is longer than the simulated driver's"
    );
    named.resize(OWN.len(), 0);
    let mut module = std::fs::read(context.target.join("simulator/nvidia.ko"))?;
    let at = module
        .windows(OWN.len())
        .position(|window| window == OWN)
        .context("the simulated driver's module has another version")?;
    module[at..at + OWN.len()].copy_from_slice(&named);
    let path = format!("{}/nvidia.ko", context.modules()?);
    Ok(Some((path, module)))
}
