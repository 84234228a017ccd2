//! One boot, as its seed stands for it: host, GPUs, faults, load and kill point. Pure.
//!
//! Two of three seeds walk through the [kill points](super::points) in order, the third ones are
//! random.

use super::points::{self, Point, Process, Scene};
use super::random_boot;
use crate::vm::harness::{CONFIDENTIAL, Listener};
use kata_gpu_init::services::service_table::Name;
use kata_gpu_test_guest::halves::random::Random;
use serde_json::{Value, json};
use std::collections::BTreeSet;

/// End of a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    Usable,
    /// Usable again after a reset or a removal: its opens and closes are its own.
    Again,
    /// With this reason; any where that is empty.
    Fails(&'static str),
    /// Bound, and in its initialisation for ever.
    Hangs,
    Removed,
}

impl Fate {
    /// Containers get it in the end.
    pub fn is_given(self) -> bool {
        matches!(self, Self::Usable | Self::Again | Self::Hangs)
    }

    pub fn is_usable(self) -> bool {
        matches!(self, Self::Usable | Self::Again)
    }
}

/// Answer that a container must have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    Created,
    Refused,
    /// By the moment of its question.
    Either,
}

/// A container to create.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Container {
    pub name: &'static str,
    /// Indices of its GPUs; none: all.
    pub gpu: Option<u64>,
    pub answer: Answer,
}

/// Files in the guest's image besides those of every guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Image {
    Plain,
    /// NVML's helper, and a service.
    Nvml(Option<Name>),
    Service(Name),
    /// A file of modprobe.d.
    Modprobe(&'static str),
    /// The driver on an extension disk; with one for the agent.
    Extension {
        coco: bool,
    },
}

/// One boot.
#[derive(Clone, Debug)]
pub struct Description {
    pub seed: u64,
    /// Kill point of the walk through all of them.
    pub point: Option<Point>,
    /// Process and record, of the walk or at random.
    pub kill: Option<(Process, String)>,
    /// Host, driver, topology, faults and load, by name.
    pub traits: Vec<String>,
    pub cpus: u32,
    /// By index.
    pub gpus: Vec<Fate>,
    pub containers: Vec<Container>,
    pub listener: Listener,
    pub image: Image,
    /// Words of the kernel's command line.
    pub words: Vec<String>,
    /// Steps of the script before the kill.
    pub before: Vec<String>,
    /// Actions with the kill.
    pub with_kill: Vec<&'static str>,
    /// Workers that the steps before have killed.
    pub killed_before: usize,
    /// Last step in the place of the usual one.
    pub ending: Option<String>,
}

/// The line of modprobe.d that is not followed.
const INSTALL: &str = "install nvidia /bin/true\n";

impl Description {
    pub fn of(seed: u64) -> Self {
        let mut random = Random::new(seed);
        let all = points::all();
        match walk(seed).and_then(|n| all.get(n as usize % all.len())) {
            Some(point) => Self::at(seed, *point, &mut random),
            None => random_boot::describe(seed, &mut random),
        }
    }

    /// A plain boot of `gpus` GPUs with these words.
    pub fn plain(seed: u64, gpus: u64, words: &str) -> Self {
        Self {
            seed,
            point: None,
            kill: None,
            traits: Vec::new(),
            cpus: 2,
            gpus: vec![Fate::Usable; gpus as usize],
            containers: Vec::new(),
            listener: Listener::Reads,
            image: Image::Plain,
            words: vec![format!("fakepci.gpus={gpus} agent.cdi_timeout=600 {words}")],
            before: Vec::new(),
            with_kill: Vec::new(),
            killed_before: 0,
            ending: None,
        }
    }

    /// The boot of a kill point.
    fn at(seed: u64, point: Point, random: &mut Random) -> Self {
        let scene = points::scene(point.record).unwrap_or(Scene::Plain);
        let (gpus, words) = scene_words(scene);
        let times = format!(
            "fakepci.enable_ms={}",
            if scene == Scene::SlowHost { 300 } else { 40 }
        );
        let mut boot = Self::plain(
            seed,
            gpus,
            &format!("gpuinit.bind=pipelined {times} {words}"),
        );
        boot.point = Some(point);
        boot.kill = Some((point.process, point.when()));
        boot.cpus = random.one_of(&[2, 2, 2, 4]);
        boot.traits = vec![format!("{scene:?}")];
        boot.containers = vec![Container {
            name: "all",
            gpu: None,
            answer: Answer::Created,
        }];
        boot.fit(scene);
        if boot.gpus.iter().any(|fate| *fate != Fate::Usable) {
            boot.containers = vec![Container {
                name: "one",
                gpu: Some(0),
                answer: Answer::Created,
            }];
        }
        boot
    }

    /// Image, fates and steps of a scene.
    fn fit(&mut self, scene: Scene) {
        let mut before = |steps: &str| self.before.push(steps.to_string());
        match scene {
            Scene::Plain
            | Scene::SlowHost
            | Scene::Displays
            | Scene::Xid
            | Scene::Pod
            | Scene::FabricUnknown
            | Scene::Management => {}
            Scene::ModuleConfig => self.image = Image::Modprobe(INSTALL),
            Scene::PluggedLater => {
                before("settled>plug:0;gpu.usable/0>plug:1");
                self.containers = vec![Container {
                    name: "one",
                    gpu: Some(0),
                    answer: Answer::Created,
                }];
            }
            Scene::Reset => self.gpus[1] = Fate::Again,
            Scene::InitFails => self.gpus[1] = Fate::Fails("firmware-boot"),
            Scene::Removed => {
                before("settled>remove:1");
                self.gpus[1] = Fate::Removed;
            }
            Scene::Hangs => self.gpus[1] = Fate::Hangs,
            Scene::Services => self.image = Image::Service(Name::FabricManager),
            Scene::ServiceHangs => self.image = Image::Service(Name::Persistenced),
            Scene::Nvml | Scene::Confidential => self.image = Image::Nvml(None),
            Scene::Fabric => self.image = Image::Nvml(Some(Name::FabricManager)),
            Scene::FabricElsewhere => {
                self.image = Image::Nvml(None);
                self.with_kill.push("fabric:3");
            }
            Scene::Extension => self.image = Image::Extension { coco: false },
            Scene::ExtensionFirst => self.image = Image::Extension { coco: true },
            Scene::NoThreads => {
                before("gpu.usable/0>threads:20");
                self.with_kill.push("threads:5000");
            }
            Scene::WorkerDied => {
                before("settled>kill");
                self.killed_before = 1;
            }
            Scene::Hook => before("settled>hook"),
            Scene::Flood => before("settled>stop+storm:6000+cont"),
        }
    }

    /// Whether its agent is killed, which ends the guest.
    pub fn ends(&self) -> bool {
        matches!(self.kill, Some((Process::Agent, _)))
    }

    pub fn hangs(&self) -> bool {
        self.gpus.contains(&Fate::Hangs)
    }

    /// GPUs that containers get in the end.
    pub fn given(&self) -> BTreeSet<u64> {
        self.gpus_that(Fate::is_given)
    }

    fn gpus_that(&self, are: fn(Fate) -> bool) -> BTreeSet<u64> {
        (0..)
            .zip(&self.gpus)
            .filter(|(_, fate)| are(**fate))
            .map(|(index, _)| index)
            .collect()
    }

    /// Deaths of a process that must be reported.
    pub fn deaths(&self, process: Process) -> usize {
        let killed = matches!(&self.kill, Some((killed, _)) if *killed == process);
        usize::from(killed)
            + if process == Process::Worker {
                self.killed_before
            } else {
                0
            }
    }

    /// Steps of the guest's script.
    pub fn script(&self) -> String {
        let mut steps = self.before.clone();
        if let Some((process, when)) = &self.kill {
            let mut actions = vec![process.kill()];
            actions.extend(self.with_kill.iter().map(ToString::to_string));
            steps.push(format!("{when}>{}", actions.join("+")));
            if [Process::Worker, Process::Keeper].contains(process) {
                steps.push("process.died>sleep:0".into());
            }
        }
        if let Some(ending) = &self.ending {
            steps.push(ending.clone());
        } else if !self.ends() {
            let listed = |gpus: BTreeSet<u64>| {
                gpus.iter()
                    .map(u64::to_string)
                    .collect::<Vec<_>>()
                    .join(",")
            };
            let when = if self.hangs() { "now" } else { "rest" };
            let (given, usable) = (
                listed(self.given()),
                listed(self.gpus_that(Fate::is_usable)),
            );
            steps.push(format!(
                "{when}>spec-gives:{given}+up:{usable}+reaped:keeper+reaped:opener+\
                reaped:lane+census+\
                file:/var/run/cdi/nvidia.yaml+{LAST}"
            ));
        }
        steps.join(";")
    }

    /// The command line, but for the words of every guest of the tests.
    pub fn command_line(&self) -> String {
        let mut words = vec![String::from("gpuinit.log=warn agent.log=warning")];
        words.extend(self.words.iter().cloned());
        if self.ends() {
            words.push("gpuinit.agent=child".into());
        }
        if !self.containers.is_empty() {
            let asked = |container: &Container| {
                format!(
                    "{}:{}",
                    container.name,
                    container
                        .gpu
                        .map_or_else(|| "all".into(), |gpu| gpu.to_string())
                )
            };
            let all: Vec<String> = self.containers.iter().map(asked).collect();
            words.push(format!("testagent.containers={}", all.join(";")));
        }
        words.push(format!(
            "testagent.guest=script testagent.script={}",
            self.script()
        ));
        words.join(" ")
    }

    /// In short, for a line of the file of runs.
    pub fn short(&self) -> Value {
        let kill = self
            .kill
            .as_ref()
            .map(|(process, when)| format!("{} at {when}", process.name()));
        json!({ "gpus": self.gpus.len(), "cpus": self.cpus, "traits": self.traits, "kill": kill,
            "collector": format!("{:?}", self.listener) })
    }
}

/// Last action of a script, whose line ends the boot.
pub const LAST: &str = "counters";

/// Place of a seed in the walk through the kill points; none: its boot is random.
pub fn walk(seed: u64) -> Option<u64> {
    (!seed.is_multiple_of(3)).then(|| seed - seed / 3 - 1)
}

/// GPUs and words of a scene.
fn scene_words(scene: Scene) -> (u64, String) {
    let fabric = "fakepci.switches=2 nvidia.switches=2";
    let (gpus, words) = match scene {
        Scene::Plain
        | Scene::ModuleConfig
        | Scene::Removed
        | Scene::WorkerDied
        | Scene::Hook
        | Scene::Flood
        | Scene::Extension
        | Scene::ExtensionFirst => (2, String::new()),
        Scene::SlowHost => (3, String::new()),
        Scene::PluggedLater => (2, "fakepci.absent=0,1".into()),
        Scene::Management => (
            2,
            "fakepci.device=0x2901 nvidia.barfw_ms=50 fakepci.cx7=2".into(),
        ),
        Scene::Reset => (2, "fakepci.flr=0,1 nvidia.wpr2=1".into()),
        Scene::Displays => (2, "nvidia.displays=1".into()),
        Scene::InitFails => (2, "nvidia.init_fail=1".into()),
        Scene::Xid => (2, "nvidia.xid=1:119:200".into()),
        Scene::Hangs => (
            2,
            "nvidia.init_hang=1 gpuinit.init=serial gpuinit.ready=bound".into(),
        ),
        Scene::Services => (
            2,
            format!("{fabric} gpuinit.ready=bound standin.nv-fabricmanager=dies-once:300"),
        ),
        Scene::ServiceHangs => (
            2,
            "gpuinit.ready=bound gpuinit.persistenced=on standin.nvidia-persistenced=hang".into(),
        ),
        Scene::Nvml => (2, "gpuinit.gpu.power=500".into()),
        Scene::Fabric => (
            2,
            format!("{fabric} nvidia.fabric_state=1 standin.nv-fabricmanager=fabric:1500"),
        ),
        Scene::FabricElsewhere => (2, "nvidia.fabric_state=2".into()),
        Scene::FabricUnknown => (2, fabric.into()),
        Scene::Confidential => (2, format!("{CONFIDENTIAL} nvidia.cc=1")),
        Scene::NoThreads => (
            4,
            "gpuinit.bind=insmod gpuinit.init=serial nvidia.s2_ms=300".into(),
        ),
        Scene::Pod => (2, "testagent.cost=real".into()),
    };
    (gpus, words)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_is_always_the_same_boot_and_another_one_another() {
        let line = |seed| Description::of(seed).command_line();
        let mut different = BTreeSet::new();
        for seed in 0..1500 {
            let line = line(seed);
            assert_eq!(line, Description::of(seed).command_line(), "seed {seed}");
            // x86 takes 2047 bytes, and the harness puts its own words in front.
            assert!(
                line.len() < 1800,
                "seed {seed} has {} bytes: {line}",
                line.len()
            );
            different.insert(line);
        }
        assert!(
            different.len() > 900,
            "{} boots of 1500 seeds",
            different.len()
        );
    }

    #[test]
    fn the_walk_reaches_every_kill_point_once_before_any_twice() {
        let all = points::all();
        let seeds = all.len() as u64 * 3 / 2 + 2;
        let reached: Vec<Point> = (1..seeds)
            .filter_map(|seed| Description::of(seed).point)
            .take(all.len())
            .collect();
        assert_eq!(reached, all);
        // A third of all boots is random.
        let random = (1..=900)
            .filter(|seed| Description::of(*seed).point.is_none())
            .count();
        assert_eq!(random, 300);
    }

    #[test]
    fn random_boots_are_of_every_kind() {
        let boots: Vec<Description> = (1..=900).map(|n| Description::of(3 * n)).collect();
        let has = |word: &str| {
            boots
                .iter()
                .filter(|boot| boot.traits.iter().any(|t| t.contains(word)))
                .count()
        };
        for word in [
            "slow",
            "old-driver",
            "confidential",
            "blackwell",
            "in-probe",
            "switches",
            "busy",
            "storm",
            "probe_fail",
            "init_fail",
        ] {
            assert!(has(word) > 5, "{word}: {}", has(word));
        }
        for process in Process::ALL {
            let killed = boots
                .iter()
                .filter(|boot| matches!(&boot.kill, Some((killed, _)) if *killed == process))
                .count();
            assert!(killed > 5, "{process:?}: {killed}");
        }
        assert!(
            boots.iter().any(|boot| boot.gpus.len() == 16)
                && boots.iter().any(|boot| boot.gpus.is_empty())
        );
    }
}
