//! A boot at random: each part of its description by the dice of its seed.

use super::description::{Answer, Container, Description, Fate, Image};
use super::points::Process;
use crate::vm::harness::{CONFIDENTIAL, Listener};
use kata_gpu_test_guest::halves::random::Random;

/// A kind of host and driver.
struct Host {
    name: &'static str,
    words: &'static str,
    /// A GPU's BARs take at most so many ms.
    enable_ms: u64,
    /// Whether faults of an initialisation have their own reasons: a blocking open, or one within
    /// the probe, fails otherwise.
    init_faults: bool,
}

const HOSTS: [Host; 8] = [
    Host {
        name: "fast",
        words: "",
        enable_ms: 5,
        init_faults: true,
    },
    Host {
        name: "medium",
        words: "",
        enable_ms: 60,
        init_faults: true,
    },
    Host {
        name: "slow",
        words: "",
        enable_ms: 250,
        init_faults: true,
    },
    Host {
        name: "blackwell",
        words: "fakepci.device=0x2901 nvidia.barfw_ms=60",
        enable_ms: 20,
        init_faults: true,
    },
    Host {
        name: "confidential",
        words: CONFIDENTIAL,
        enable_ms: 20,
        init_faults: true,
    },
    Host {
        name: "old-driver",
        words: "nvidia.version=535.230.02",
        enable_ms: 60,
        init_faults: false,
    },
    Host {
        name: "driver 570",
        words: "nvidia.version=570.124.06",
        enable_ms: 60,
        init_faults: true,
    },
    Host {
        name: "in-probe",
        words: "nvidia.version=595.45.04 nvidia.NVreg_GpuInitOnProbe=1 gpuinit.bind=concurrent",
        enable_ms: 20,
        init_faults: false,
    },
];

/// Faults with their reasons; those before the first open come first.
const FAULTS: [(&str, &str, bool); 10] = [
    ("nvidia.probe_fail", "off-the-bus", false),
    ("nvidia.probe_silent", "probe-failed", false),
    ("nvidia.unsupported", "registers-garbled", false),
    ("fakepci.no_msix", "no-interrupt", false),
    ("fakepci.bar_missing", "bar-unassigned", false),
    ("nvidia.open_fail", "open-failed", true),
    ("nvidia.init_fail", "firmware-boot", true),
    ("nvidia.wpr2_stuck", "needs-reset", true),
    ("nvidia.fabric", "fabric-not-ready", true),
    ("nvidia.init_code", "attach-failed", true),
];

/// Records of every boot.
const ALWAYS: [&str; 5] = [
    "worker.start!end",
    "driver.look!end",
    "topology",
    "gpu.found",
    "settled",
];
/// Records of a boot with a usable GPU; of that GPU.
const USABLE: [&str; 2] = ["gpu.bound", "gpu.usable"];

pub fn describe(seed: u64, random: &mut Random) -> Description {
    let host = &HOSTS[random.below(HOSTS.len() as u64) as usize];
    let gpus = match random.below(24) {
        0 => 16,
        1 => 0,
        2..=4 => random.below(5) + 4,
        _ => random.below(4) + 1,
    };
    let mut boot = Description::plain(seed, gpus, host.words);
    boot.traits.push(host.name.into());
    boot.cpus = random.one_of(&[1, 2, 2, 2, 4]);
    settings(&mut boot, host, random);
    if gpus > 0 {
        faults(&mut boot, host, random);
    }
    topology(&mut boot, host, random);
    load(&mut boot, random);
    containers(&mut boot, random);
    if random.below(2) == 0 && gpus > 0 {
        kill(&mut boot, random);
    } else if random.below(5) == 0 {
        come_again(&mut boot, random);
    }
    if random.below(8) == 0 && !boot.ends() {
        word(&mut boot, "gpuinit.agent=child");
    }
    boot.listener = match random.below(12) {
        0 => Listener::Deaf,
        1 => Listener::HangsUp,
        2 => Listener::Absent,
        _ => Listener::Reads,
    };
    boot
}

/// Adds a word that is a trait, too.
fn word(boot: &mut Description, word: &str) {
    boot.traits.push(word.into());
    boot.words.push(word.into());
}

/// How the init goes about it, and how long everything takes.
fn settings(boot: &mut Description, host: &Host, random: &mut Random) {
    let gpus = boot.gpus.len() as u64;
    if host.name != "in-probe" {
        word(
            boot,
            &format!(
                "gpuinit.bind={}",
                random.one_of(&["auto", "insmod", "pipelined", "concurrent"])
            ),
        );
    }
    word(
        boot,
        &format!(
            "gpuinit.init={}",
            random.one_of(&["parallel", "parallel", "serial"])
        ),
    );
    word(
        boot,
        &format!(
            "gpuinit.ready={}",
            random.one_of(&["bound", "bound", "usable"])
        ),
    );
    if random.below(10) == 0 {
        word(boot, "gpuinit.cdi=complete");
    }
    // The first part of an initialisation is 10 to 40 % of the whole.
    let share = random.one_of(&[10, 20, 30, 40]);
    let whole = random.below(200);
    let (s1, s3) = (whole * share / 100, whole / 4);
    let lists = [
        ("fakepci.enable_ms", 0, host.enable_ms),
        ("nvidia.probe_ms", 0, 20),
        ("nvidia.s1_ms", s1, 10),
        ("nvidia.s2_ms", whole - s1 - s3, 10),
        ("nvidia.s3_ms", s3, 10),
    ];
    for (name, least, below) in lists {
        let values: Vec<String> = (0..gpus.max(1))
            .map(|_| (least + random.below(below)).to_string())
            .collect();
        boot.words.push(format!("{name}={}", values.join(",")));
    }
    if gpus > 1 && random.below(4) == 0 {
        let minors: Vec<String> = (0..gpus).rev().map(|minor| minor.to_string()).collect();
        boot.traits.push("minors reversed".into());
        boot.words
            .push(format!("nvidia.minors={}", minors.join(",")));
    }
}

/// Up to two GPUs with a fault each.
fn faults(boot: &mut Description, host: &Host, random: &mut Random) {
    let gpus = boot.gpus.len() as u64;
    for _ in 0..[0, 0, 1, 2][random.below(4) as usize] {
        let (gpu, (fault, reason, of_init)) = (random.below(gpus), random.one_of(&FAULTS));
        let taken = boot.gpus[gpu as usize] != Fate::Usable
            || boot.traits.iter().any(|t| t.starts_with(fault));
        if taken || of_init && !host.init_faults {
            continue;
        }
        let value = if fault == "nvidia.init_code" {
            format!("{gpu}:0x22:0x65")
        } else {
            gpu.to_string()
        };
        word(boot, &format!("{fault}={value}"));
        boot.gpus[gpu as usize] = Fate::Fails(reason);
    }
    // A load without any GPU to probe fails itself, and its reason is each GPU's.
    if boot.given().is_empty() {
        boot.gpus
            .iter_mut()
            .for_each(|fate| *fate = Fate::Fails(""));
    }
}

/// Functions beside the GPUs.
fn topology(boot: &mut Description, host: &Host, random: &mut Random) {
    match random.below(8) {
        0 => word(boot, "fakepci.switches=2 nvidia.switches=2"),
        1 if host.name == "blackwell" => word(boot, "fakepci.cx7=2"),
        2 => word(boot, "gpuinit.topology=shared-fabric"),
        _ => {}
    }
}

/// Load beside the bring-up.
fn load(boot: &mut Description, random: &mut Random) {
    let (name, step) = match random.below(9) {
        0 => ("busy loop", "now>busy:1"),
        1 => ("storm of uevents", "now>storm:300"),
        2 => ("clock set ahead", "now>skew:3600"),
        3 => {
            boot.traits.push("debug log".into());
            boot.words.push("gpuinit.log=debug agent.log=debug".into());
            return;
        }
        _ => return,
    };
    boot.traits.push(name.into());
    boot.before.push(step.into());
}

fn containers(boot: &mut Description, random: &mut Random) {
    let gpus = boot.gpus.len() as u64;
    if gpus == 0 {
        return;
    }
    let usable = |fate: &Fate| fate.is_usable();
    let all = if boot.gpus.iter().all(usable) {
        Answer::Created
    } else {
        Answer::Either
    };
    let one = random.below(gpus);
    let of_one = if usable(&boot.gpus[one as usize]) {
        Answer::Created
    } else {
        Answer::Either
    };
    boot.containers = vec![
        Container {
            name: "all",
            gpu: None,
            answer: all,
        },
        Container {
            name: "one",
            gpu: Some(one),
            answer: of_one,
        },
        Container {
            name: "beyond",
            gpu: Some(gpus),
            answer: Answer::Refused,
        },
    ];
}

fn kill(boot: &mut Description, random: &mut Random) {
    let usable: Vec<u64> = boot.given().into_iter().collect();
    let record = if usable.is_empty() || random.below(3) == 0 {
        random.one_of(&ALWAYS).to_string()
    } else {
        format!("{}/{}", random.one_of(&USABLE), random.one_of(&usable))
    };
    let process = random.one_of(&[
        Process::Worker,
        Process::Worker,
        Process::Keeper,
        Process::Lane,
        Process::Opener,
        Process::Agent,
    ]);
    boot.kill = Some((process, record));
}

/// A GPU that leaves when all is settled, and comes back. A container that asks for all might get
/// the others alone.
fn come_again(boot: &mut Description, random: &mut Random) {
    let usable: Vec<u64> = boot.given().into_iter().collect();
    if usable.len() < 2 || usable.len() != boot.gpus.len() {
        return;
    }
    let gpu = random.one_of(&usable);
    boot.gpus[gpu as usize] = Fate::Again;
    boot.traits.push(format!("GPU {gpu} leaves and comes back"));
    boot.before.push(format!(
        "settled>remove:{gpu};gpu.removed>gone:{gpu}+rescan"
    ));
    boot.containers
        .retain(|container| container.name == "beyond");
    let other = usable.into_iter().find(|other| *other != gpu);
    boot.containers.push(Container {
        name: "one",
        gpu: other,
        answer: Answer::Created,
    });
    boot.image = Image::Plain;
}
