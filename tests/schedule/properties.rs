//! Properties that hold for every bring-up: hosts, durations, failures, hangs, removals and plugs
//! at random, each from a seed that the complaint names.

use super::drive::{Broken, Container, Overhead, Run, drive, drive_broken};
use super::locks::{At, Fact, Fault, Function, Host, Micros, Times};
use fastrand::Rng;
use kata_gpu_init::boot::bring_up::deadlines::Limit;
use kata_gpu_init::boot::bring_up::schedule_messages::{Fact as Report, GpuId, Order, Probe};
use kata_gpu_init::boot::bring_up::strategy::{Facts, Policy};
use kata_gpu_init::config::{Bind, Init};

const MS: Micros = 1000;

/// Trouble that a case can have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trouble {
    None,
    /// GPUs that fail somewhere.
    Failures,
    /// A GPU that hangs in its probe, and is not the first one.
    Hang,
    /// Removals and plugs.
    Traffic,
    /// All of these, and GPUs that hang anywhere.
    Any,
}

/// A bring-up.
#[derive(Clone, Debug)]
pub struct Case {
    pub seed: u64,
    pub host: Host,
    pub policy: Policy,
    pub containers: Vec<Container>,
    pub overhead: Overhead,
    pub trouble: Trouble,
}

/// A property that a bring-up does not have.
#[derive(Clone, Debug)]
pub struct Complaint {
    pub seed: u64,
    pub trouble: Trouble,
    pub property: &'static str,
    pub text: String,
}

impl std::fmt::Display for Complaint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{:?}, seed {}: {}: {}",
            self.trouble, self.seed, self.property, self.text
        )
    }
}

fn one_of<T: Copy>(random: &mut Rng, values: &[T]) -> T {
    values[random.usize(0..values.len())]
}

/// True in so many of a hundred.
fn percent(random: &mut Rng, percent: u64) -> bool {
    random.u64(0..100) < percent
}

/// Check of a case's run; an error says how the run breaks the property.
type Property = fn(&Case, &Run) -> Result<(), String>;

impl Case {
    /// The case of a seed.
    pub fn random(seed: u64, trouble: Trouble) -> Self {
        let mut random = Rng::with_seed(seed);
        let count = random.u64(1..=16) as usize;
        let vcpus = one_of(&mut random, &[1, 2, 4, 8]);
        let relaxed = percent(&mut random, 70);
        let enable = one_of(&mut random, &[1, 3, 30, 200, 300, 1000, 3300]) * MS;
        let firewall = if percent(&mut random, 20) {
            4000 * MS
        } else {
            0
        };
        // Any S1 is seen, where the driver lets go of its lock then; else one of up to 0.66 s is
        // taken into account.
        let sees_attach = percent(&mut random, 80);
        let most = if sees_attach && relaxed { 3000 } else { 1650 };
        let (whole, share) = (random.u64(1260..=most) * MS, random.u64(10..=40));
        let later = whole * (100 - share) / 100;
        let parts = [whole - later, later * 13 / 18, later * 5 / 18];
        let mut gpu = || {
            let mut vary = |time: Micros, most: u64| time * random.u64(most - 20..=most) / 100;
            let [s1, s2, s3] = parts;
            let times = Times {
                enable: vary(enable, 110),
                firewall,
                probe: vary(4 * MS, 120),
                s1: vary(s1, 100),
                s2: vary(s2, 110),
                s3: vary(s3, 110),
            };
            Function {
                times,
                fault: Fault::None,
                plugged_at: None,
                removed_at: None,
            }
        };
        let mut gpus: Vec<Function> = (0..count).map(|_| gpu()).collect();
        trouble.befall(&mut gpus, &mut random);
        let host = Host {
            vcpus,
            relaxed,
            sees_attach,
            load: Some([random.u64(5..=60) * MS, random.u64(2..=30) * MS]),
            grace: random.u64(1..=15) * MS,
            gpus,
        };
        let bind = match percent(&mut random, 80) {
            true => Bind::Auto,
            false => one_of(
                &mut random,
                &[Bind::Insmod, Bind::Pipelined, Bind::Concurrent],
            ),
        };
        let init = if percent(&mut random, 90) {
            Init::Parallel
        } else {
            Init::Serial
        };
        let driver = match relaxed {
            true => "550.163.01",
            // Keeps A with some kinds of GPUs: all is its first part.
            false if sees_attach && percent(&mut random, 30) => "550.54.15",
            false => "535.230.02",
        };
        let there = host
            .gpus
            .iter()
            .filter(|gpu| gpu.plugged_at.is_none())
            .count();
        let facts = Facts {
            gpus: there,
            firewall: firewall > 0,
            driver: driver.parse().ok(),
            init_on_probe: false,
            confidential: !relaxed && percent(&mut random, 50),
            vcpus,
        };
        let containers = (0..random.u64(0..4)).map(|_| {
            let at = random.u64(0..6000) * MS;
            let gpus = (0..count).filter(|_| percent(&mut random, 30)).collect();
            let graces = random.u64(1..=4) as u8;
            Container {
                graces,
                ..Container::new(at, gpus)
            }
        });
        let containers = containers.collect();
        let (report, publish, files) = (
            random.u64(0..3) * MS,
            random.u64(0..20) * MS,
            random.u64(0..60) * MS,
        );
        let overhead = Overhead {
            report,
            publish,
            files,
            node: [files, publish],
        };
        let policy = Policy {
            bind,
            init,
            first: if percent(&mut random, 20) {
                random.usize(1..4)
            } else {
                0
            },
            relaxed: true,
            no_gpus: false,
            load_begun: false,
            enable: None,
            facts,
        };
        Self {
            seed,
            host,
            policy,
            containers,
            overhead,
            trouble,
        }
    }

    pub fn run(&self) -> Run {
        drive(
            &self.host,
            self.policy.clone(),
            &self.containers,
            self.overhead,
            self.seed,
        )
    }

    pub fn run_broken(&self, broken: Broken) -> Run {
        drive_broken(
            &self.host,
            self.policy.clone(),
            &[],
            self.overhead,
            self.seed,
            broken,
        )
    }

    /// All that is wrong with a run of this case.
    pub fn complaints(&self, run: &Run) -> Vec<Complaint> {
        const PROPERTIES: [(&str, Property); 6] = [
            ("all end", Case::ends),
            (
                "a hang costs one limit",
                Case::hangs_cost_what_the_table_says,
            ),
            ("one probe at a time", Case::probes_go_one_at_a_time),
            ("PCI order", Case::order_is_pci),
            ("nobody is trespassed on", Case::nobody_is_trespassed),
            (
                "publication waits for no lane",
                Case::publication_waits_for_no_lane,
            ),
        ];
        let complaint = |&(property, check): &(&'static str, Property)| {
            let text = check(self, run).err()?;
            Some(Complaint {
                seed: self.seed,
                trouble: self.trouble,
                property,
                text,
            })
        };
        PROPERTIES.iter().filter_map(complaint).collect()
    }

    fn hangs(&self) -> usize {
        self.host
            .gpus
            .iter()
            .filter(|gpu| matches!(gpu.fault, Fault::ProbeHangs | Fault::InitHangs))
            .count()
    }

    /// All settle, well where nothing is wrong with them; or hang, and are reported.
    fn ends(&self, run: &Run) -> Result<(), String> {
        if self.hangs() == 0 && run.settled.is_none() {
            return Err(format!("does not end: GPUs are {:?}", run.at));
        }
        for (k, gpu) in self.host.gpus.iter().enumerate() {
            let well = gpu.fault == Fault::None && gpu.removed_at.is_none();
            if well && self.hangs() == 0 && run.usable[k].is_none() {
                return Err(format!("GPU {k} is not usable: {:?}", run.at[k]));
            }
            let stuck = !matches!(run.at[k], At::Absent | At::Usable | At::Failed);
            // A GPU that still waits in the lane is not on its way.
            let on_its_way = !matches!(run.at[k], At::Present) && gpu.removed_at.is_none();
            if stuck && on_its_way && run.late[k] == 0 {
                return Err(format!(
                    "GPU {k} hangs and is not reported: {:?}",
                    run.at[k]
                ));
            }
        }
        Ok(())
    }

    /// A GPU that hangs in its probe costs the others one limit of the table, once.
    fn hangs_cost_what_the_table_says(&self, run: &Run) -> Result<(), String> {
        // A load waits for the probes that run meanwhile, the driver core for the device's lock.
        let is_during_load = |order: &Order| matches!(order, Order::Probe(_, Probe::DuringLoad));
        let during_load = run.orders.iter().any(|(_, order)| is_during_load(order));
        if self.trouble != Trouble::Hang || !self.is_probed_one_by_one(run) || during_load {
            return Ok(());
        }
        let mut well = self.clone();
        well.host
            .gpus
            .iter_mut()
            .for_each(|gpu| gpu.fault = Fault::None);
        let well = well.run();
        let limits = (Limit::ProbeHangs.after() + Limit::LaneHold.after()).as_micros() as Micros;
        for (k, gpu) in self
            .host
            .gpus
            .iter()
            .enumerate()
            .filter(|(_, gpu)| gpu.fault == Fault::None)
        {
            let slack = 2 * gpu.times.enable + 2000 * MS;
            match (run.usable[k], well.usable[k]) {
                (Some(with), Some(without)) if with <= without + limits + slack => {}
                (with, without) => {
                    let error =
                        format!("GPU {k} is usable at {with:?}, and without a hang at {without:?}");
                    return Err(error);
                }
            }
        }
        Ok(())
    }

    /// The load probes only the first one.
    fn is_probed_one_by_one(&self, run: &Run) -> bool {
        run.orders.iter().any(|(_, order)| {
            matches!(
                order,
                Order::Load {
                    one_by_one: true,
                    ..
                }
            )
        })
    }

    fn is_concurrent(&self, run: &Run) -> bool {
        run.orders.iter().any(|(_, order)| match order {
            Order::Chosen(strategy, _) => strategy.bind == Bind::Concurrent,
            _ => false,
        })
    }

    /// No probe is ordered while another one runs, unless that hangs or the strategy has them go at
    /// once.
    fn probes_go_one_at_a_time(&self, run: &Run) -> Result<(), String> {
        let limit = Limit::ProbeHangs.after().as_micros() as Micros;
        let mut running: Vec<(Micros, GpuId)> = Vec::new();
        for (at, order) in &run.orders {
            if let Order::Probe(id, how) = order
                && *how != Probe::Load
            {
                let over = |since: Micros, id| self.probe_is_over(run, id, since, *at);
                running.retain(|(since, id)| !over(*since, *id) && *at < since + limit);
                if let Some((since, other)) = running.first().filter(|_| !self.is_concurrent(run)) {
                    return Err(format!(
                        "probe of {id:?} at {at} beside that of {other:?} since {since}"
                    ));
                }
                running.push((*at, *id));
            }
        }
        Ok(())
    }

    /// A probe that was ordered at `since` is known to be over.
    fn probe_is_over(&self, run: &Run, id: GpuId, since: Micros, now: Micros) -> bool {
        run.reports.iter().any(|(at, fact)| {
            let ended = match fact {
                Report::Bound(gpu) | Report::Failed(gpu) | Report::Gone(gpu) => Some(*gpu),
                _ => None,
            };
            ended == Some(id) && (since..=now).contains(at)
        })
    }

    fn order_is_pci(&self, run: &Run) -> Result<(), String> {
        // GPUs of the boot scan: the others have their own time.
        let boot = |id: &GpuId| (id.generation as usize) < self.host.gpus.len();
        let enabled = run.orders.iter().filter_map(|(_, order)| match order {
            Order::Enable(id, _) => Some(*id),
            _ => None,
        });
        let probed = run.orders.iter().filter_map(|(_, order)| match order {
            Order::Probe(id, Probe::Bind) if !self.is_concurrent(run) => Some(*id),
            _ => None,
        });
        let enabled: Vec<GpuId> = enabled.filter(boot).collect();
        for (what, ids) in [
            ("enabled", enabled),
            ("probed", probed.filter(boot).collect()),
        ] {
            if !ids.is_sorted() {
                return Err(format!("{what} in the order {ids:?}"));
            }
        }
        Ok(())
    }

    /// No slow enabling begins beside an S1, a load or a probe, hanging ones apart.
    fn nobody_is_trespassed(&self, run: &Run) -> Result<(), String> {
        match run.trespasses.first().filter(|_| self.hangs() == 0) {
            Some((at, what)) => Err(format!("an enabling begins at {at}, {what}")),
            None => Ok(()),
        }
    }

    /// A bound GPU is published as soon as the common nodes are there, whatever is enabled; on few
    /// vCPUs when that is over.
    fn publication_waits_for_no_lane(&self, run: &Run) -> Result<(), String> {
        let uvm = run
            .outcome
            .facts
            .iter()
            .find(|(_, fact)| *fact == Fact::UvmLoaded);
        let common = uvm.map(|(at, _)| at + self.overhead.files);
        let slowest = self
            .host
            .gpus
            .iter()
            .map(|gpu| gpu.times.enable)
            .max()
            .unwrap_or(0);
        // An enabling and whoever spins beside it can take every vCPU: each step then waits for
        // that.
        let spare =
            self.host.vcpus > 2 && !self.policy.facts.firewall && self.trouble == Trouble::None;
        let plugged = self
            .host
            .gpus
            .iter()
            .filter(|gpu| gpu.plugged_at.is_some())
            .count() as Micros;
        let frozen = if spare { 0 } else { (4 + plugged) * slowest };
        for k in 0..self.host.gpus.len() {
            if let (Some(bound), Some(published), Some(common)) =
                (run.bound[k], run.published[k], common)
                && published > bound.max(common) + self.overhead.publish + frozen
            {
                return Err(format!(
                    "GPU {k} is bound at {bound} and published at {published}, common nodes \
                     at {common}"
                ));
            }
        }
        Ok(())
    }
}

impl Trouble {
    pub const ALL: [Self; 5] = [
        Self::None,
        Self::Failures,
        Self::Hang,
        Self::Traffic,
        Self::Any,
    ];

    fn befall(self, gpus: &mut [Function], random: &mut Rng) {
        let count = gpus.len();
        let failures = [Fault::EnableFails, Fault::ProbeFails, Fault::InitFails];
        match self {
            Self::None => {}
            Self::Failures => {
                for gpu in gpus {
                    if percent(random, 25) {
                        gpu.fault = one_of(random, &failures);
                    }
                }
            }
            Self::Hang if count > 1 => {
                let hanging = random.u64(1..=count as u64 - 1) as usize;
                gpus[hanging].fault = Fault::ProbeHangs;
            }
            Self::Hang => {}
            Self::Traffic => {
                for gpu in gpus {
                    let (first, second) = (random.u64(0..20_000) * MS, random.u64(1..=20_000) * MS);
                    match random.u64(0..8) {
                        0 => gpu.removed_at = Some(first + 1),
                        1 => gpu.plugged_at = Some(first + 1),
                        2 => {
                            (gpu.removed_at, gpu.plugged_at) =
                                (Some(first + 1), Some(first + 1 + second))
                        }
                        _ => {}
                    }
                }
            }
            Self::Any => {
                Self::Traffic.befall(gpus, random);
                for gpu in gpus {
                    if percent(random, 20) {
                        const FAILS: [Fault; 3] =
                            [Fault::EnableFails, Fault::ProbeFails, Fault::InitFails];
                        const HANGS: [Fault; 2] = [Fault::ProbeHangs, Fault::InitHangs];
                        gpu.fault = one_of(random, &[&FAILS[..], &HANGS[..]].concat());
                    }
                }
            }
        }
    }
}
