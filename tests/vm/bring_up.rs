//! The bring-up: every strategy brings every GPU up, and initialisations overlap where they may.

use super::harness::{Booted, CONFIDENTIAL, Guest, Outcome, TestContext, VmTest, named};
use anyhow::{Context, Result, ensure};
use kata_gpu_wire::names;
use kata_gpu_wire::record::{Kind, Record};

pub const TESTS: &[VmTest] = &[
    VmTest {
        name: "every_strategy_binds_all_gpus",
        run: strategies,
    },
    VmTest {
        name: "initialisations_overlap_in_parallel_and_not_in_series",
        run: overlap,
    },
    VmTest {
        name: "an_initialisation_is_not_held_up_by_the_vcpu_that_enables",
        run: own_vcpu,
    },
    VmTest {
        name: "initialisations_go_in_waves_when_the_lane_is_faster",
        run: waves,
    },
    VmTest {
        name: "one_gpu_and_sixteen_gpus_come_up",
        run: counts,
    },
    VmTest {
        name: "auto_chooses_by_what_it_measures_and_reads_and_says_why",
        run: auto,
    },
    VmTest {
        name: "gpuinit_relaxed_off_reaches_the_driver_with_other_keys",
        run: relaxed_off,
    },
    VmTest {
        name: "the_init_adds_no_config_access_to_what_the_driver_makes",
        run: config_accesses,
    },
    VmTest {
        name: "the_agent_runs_as_a_child_of_the_init_too",
        run: child,
    },
];

fn strategies(context: &TestContext) -> Result<Outcome> {
    for bind in ["insmod", "pipelined", "concurrent"] {
        let booted = Guest::new()
            .append(&format!("gpuinit.bind={bind} testagent.containers=all:all"))
            .boot(context, bind)?;
        ensure!(
            booted.settled()? == (8, 0),
            "{bind}: {:?}",
            booted.settled()?
        );
        booted.created("all")?;
        let records = booted.receiver.records();
        let strategy = named(&records, Kind::Event, names::STRATEGY);
        ensure!(
            strategy[0].fields["bind"] == bind,
            "strategy: {:?}",
            strategy[0]
        );
        let enables = named(&records, Kind::End, names::GPU_ENABLE).len();
        let in_lane = if bind == "insmod" { 0 } else { 8 };
        ensure!(enables == in_lane, "{bind}: {enables} enables");
        let binds = named(&records, Kind::End, names::GPU_BIND);
        let bound: std::collections::HashSet<_> = binds.iter().filter_map(|r| r.gpu).collect();
        ensure!(
            bound.len() == if bind == "insmod" { 0 } else { 7 },
            "{bind}: {} binds",
            bound.len()
        );
        // The kernel's own word for what was done.
        ensure!(
            records.iter().any(|r| r.kind == Kind::Kmsg
                && r.fields["text"]
                    .as_str()
                    .is_some_and(|t| t.contains("10de:2330"))),
            "{bind}: no kernel lines"
        );
    }
    Ok(Outcome::Passed)
}

fn own_vcpu(context: &TestContext) -> Result<Outcome> {
    // With an initialisation's 600 ms in steps of 100 ms, one that shares the vCPU of an enable
    // sleeps through all of its 2 s.
    let times =
        "fakepci.gpus=4 fakepci.enable_ms=2000 nvidia.s1_ms=100 nvidia.s2_ms=400 nvidia.s3_ms=100";
    let words = "gpuinit.bind=pipelined testagent.guest=script \
        testagent.script=gpu.init!begin/1>cpus;settled>cpus";
    let booted = Guest::new()
        .append(&format!("{times} {words}"))
        .boot(context, "own")?;
    ensure!(booted.settled()? == (4, 0), "{:?}", booted.settled()?);
    booted.agent("script", |l| {
        l.get("did") == "cpus" && l.get("when") == "settled"
    })?;
    let records = booted.receiver.records();
    for begin in named(&records, Kind::Begin, names::GPU_INIT) {
        let end = named(&records, Kind::End, names::GPU_INIT)
            .into_iter()
            .find(|e| e.span == begin.span)
            .context("no end")?;
        let took = (end.boottime_ns - begin.boottime_ns) / 1_000_000;
        ensure!(
            took < 1600,
            "GPU {:?}: its initialisation took {took} ms",
            begin.gpu
        );
    }
    // While the lane runs: our threads and the driver's are elsewhere; after it, nothing is left of
    // that.
    let lines = booted.console.agent_lines();
    let allowed: Vec<(String, String)> = lines
        .iter()
        .filter(|l| l.get("msg") == "cpus")
        .map(|l| (l.get("thread").to_string(), l.get("allowed").to_string()))
        .collect();
    let of = |name: &str, cpus: &str| {
        allowed
            .iter()
            .filter(|(thread, allowed)| thread == name && allowed == cpus)
            .count()
    };
    ensure!(
        of("nv_open_q", "0") >= 1 && of("nv_open_q", "0-1") == 4,
        "{allowed:?}"
    );
    ensure!(
        of("gpuinit-worker", "0") > 0 && of("gpuinit-worker", "0-1") > 0,
        "{allowed:?}"
    );
    Ok(Outcome::Passed)
}

/// Sum and span of all initialisations, in ms.
fn initialisations(booted: &Booted) -> Result<(u64, u64)> {
    ensure!(booted.settled()? == (8, 0), "{:?}", booted.settled()?);
    let records = booted.receiver.records();
    let (begins, ends) = (
        named(&records, Kind::Begin, names::GPU_INIT),
        named(&records, Kind::End, names::GPU_INIT),
    );
    let mut sum = 0;
    for begin in &begins {
        let end: &&Record = ends
            .iter()
            .find(|e| e.span == begin.span)
            .context("an initialisation without end")?;
        sum += end.boottime_ns - begin.boottime_ns;
    }
    let first = begins
        .iter()
        .map(|r| r.boottime_ns)
        .min()
        .context("no initialisation")?;
    let last = ends
        .iter()
        .map(|r| r.boottime_ns)
        .max()
        .context("no initialisation")?;
    Ok((sum / 1_000_000, (last - first) / 1_000_000))
}

fn overlap(context: &TestContext) -> Result<Outcome> {
    let times = "nvidia.s1_ms=50 nvidia.s2_ms=500 nvidia.s3_ms=50";
    let booted = Guest::new()
        .append(&format!("{times} gpuinit.init=parallel"))
        .boot(context, "parallel")?;
    let (_, parallel) = initialisations(&booted)?;
    drop(booted);
    let booted = Guest::new()
        .append(&format!("{times} gpuinit.init=serial"))
        .boot(context, "serial")?;
    let (sum, serial) = initialisations(&booted)?;
    // 8 x 600 ms in a row; at once, 8 x 50 + 500 + 8 x 50.
    ensure!(
        serial >= sum && serial >= 4800,
        "in series they take {serial} ms, each for itself {sum} ms: they overlap"
    );
    ensure!(
        parallel * 2 < serial,
        "at once {parallel} ms, in series {serial} ms"
    );
    Ok(Outcome::Measured(format!(
        "8 initialisations: {parallel} ms at once, {serial} ms in series"
    )))
}

fn waves(context: &TestContext) -> Result<Outcome> {
    let times =
        "fakepci.gpus=6 fakepci.enable_ms=700 nvidia.s1_ms=100 nvidia.s2_ms=1200 nvidia.s3_ms=200";
    let booted = Guest::new()
        .append(&format!("{times} testagent.containers=all:all"))
        .boot(context, "medium")?;
    ensure!(booted.settled()? == (6, 0), "{:?}", booted.settled()?);
    booted.created("all")?;
    let records = booted.receiver.records();
    let ends = named(&records, Kind::End, names::GPU_INIT);
    let mut spans = Vec::new();
    for begin in named(&records, Kind::Begin, names::GPU_INIT) {
        let end = ends
            .iter()
            .find(|e| e.span == begin.span)
            .context("an initialisation without end")?;
        spans.push((begin.boottime_ns, end.boottime_ns));
    }
    spans.sort_unstable();
    // Initialisations of a wave begin before any of them is over by a second part; the next wave
    // begins when all are over, never in the middle of one.
    let mut waves: Vec<Vec<(u64, u64)>> = Vec::new();
    for span in spans {
        match waves.last_mut() {
            Some(wave) if wave.iter().all(|(_, end)| span.0 < *end) => wave.push(span),
            _ => waves.push(vec![span]),
        }
    }
    let begun = |wave: &[(u64, u64)]| {
        wave.iter()
            .map(|(begin, _)| *begin)
            .max()
            .unwrap_or_default()
    };
    let over = |wave: &[(u64, u64)]| wave.iter().map(|(_, end)| *end).max().unwrap_or_default();
    for (wave, next) in waves.iter().zip(waves.iter().skip(1)) {
        ensure!(
            over(wave) <= next[0].0,
            "one began before the wave before it was over: {waves:?}"
        );
    }
    // By the guest's own order of records: a member that begins after the first one's second part
    // would hold all others up.
    ensure!(
        waves
            .iter()
            .all(|wave| begun(wave) - wave[0].0 < 1_200_000_000),
        "{waves:?}"
    );
    ensure!((2..6).contains(&waves.len()), "{waves:?}");
    Ok(Outcome::Measured(format!(
        "waves of {}",
        waves
            .iter()
            .map(|wave| wave.len().to_string())
            .collect::<Vec<_>>()
            .join(", ")
    )))
}

fn counts(context: &TestContext) -> Result<Outcome> {
    for gpus in [1, 16] {
        let words = format!(
            "fakepci.gpus={gpus} testagent.containers=all:all;last:{}",
            gpus - 1
        );
        let booted = Guest::new()
            .append(&words)
            .boot(context, &format!("{gpus}"))?;
        ensure!(
            booted.settled()? == (gpus, 0),
            "{gpus} GPUs: {:?}",
            booted.settled()?
        );
        booted.created("all")?;
        booted.created("last")?;
    }
    Ok(Outcome::Passed)
}

fn auto(context: &TestContext) -> Result<Outcome> {
    for (name, words, bind, init, why) in [
        (
            "slow",
            "fakepci.enable_ms=250",
            "pipelined",
            "parallel",
            "the host maps BARs slowly",
        ),
        (
            "one",
            "fakepci.gpus=1",
            "insmod",
            "parallel",
            "with one GPU",
        ),
        (
            "blackwell",
            "fakepci.device=0x2901 nvidia.barfw_ms=200",
            "concurrent",
            "parallel",
            "probes of these GPUs sleep",
        ),
        (
            "old",
            "fakepci.enable_ms=250 fakepci.gpus=2",
            "pipelined",
            "parallel",
            "the driver boots several GPUs at once",
        ),
        (
            "confidential",
            &format!("fakepci.enable_ms=250 {CONFIDENTIAL}"),
            "pipelined",
            "serial",
            "under confidential computing",
        ),
        (
            "probe-init",
            "nvidia.NVreg_GpuInitOnProbe=1 fakepci.enable_ms=250",
            "pipelined",
            "parallel",
            "slowly",
        ),
    ] {
        let booted = Guest::new()
            .append("fakepci.gpus=3")
            .append(words)
            .boot(context, name)?;
        ensure!(booted.settled()?.1 == 0, "{name}: {:?}", booted.settled()?);
        let records = booted.receiver.records();
        let reported = named(&records, Kind::Event, names::STRATEGY);
        ensure!(reported.len() == 1, "{name}: {} choices", reported.len());
        let fields = &reported[0].fields;
        ensure!(
            fields["bind"] == bind && fields["init"] == init,
            "{name}: {fields:?}"
        );
        ensure!(
            fields["reason"].as_str().is_some_and(|r| r.contains(why)),
            "{name}: {fields:?}"
        );
        ensure!(
            fields["driver"] == "550.163.01" && fields["vcpus"] == 2,
            "{name}: {fields:?}"
        );
    }
    // A fast host: the load probes all. On a busy machine even 3 ms can take more than 100; then it
    // says so.
    let booted = Guest::new()
        .append("fakepci.gpus=3")
        .boot(context, "fast")?;
    booted.settled()?;
    let fields = booted.event(names::STRATEGY)?.fields;
    let fast = fields["first_enable_ms"]
        .as_u64()
        .is_some_and(|ms| ms < 100);
    ensure!((fields["bind"] == "insmod") == fast, "{fields:?}");
    // Firewall waits overlap: four times 200 ms take little more than once.
    let booted = Guest::new()
        .append("fakepci.gpus=4 fakepci.device=0x2901 nvidia.barfw_ms=1000")
        .boot(context, "firewall")?;
    ensure!(booted.settled()? == (4, 0), "{:?}", booted.settled()?);
    let records = booted.receiver.records();
    let load = named(&records, Kind::Begin, names::MODULE_LOAD)
        .first()
        .context("no load")?
        .boottime_ns;
    let last = named(&records, Kind::Event, names::GPU_BOUND)
        .iter()
        .map(|r| r.boottime_ns)
        .max()
        .context("none bound")?;
    ensure!(
        last - load < 2_000_000_000,
        "four firewall waits of 1 s took {} ms",
        (last - load) / 1_000_000
    );
    Ok(Outcome::Passed)
}

fn relaxed_off(context: &TestContext) -> Result<Outcome> {
    let words = "nvidia.NVreg_RegistryDwords=Other=1 fakepci.gpus=3 nvidia.s2_ms=200 \
        testagent.guest=script testagent.script=settled>driver+counters";
    for (name, switch, at_once, init) in [
        ("off", "gpuinit.relaxed=off", 1, "serial"),
        ("on", "gpuinit.relaxed=on", 3, "parallel"),
    ] {
        let booted = Guest::new()
            .append(&format!("{words} {switch}"))
            .boot(context, name)?;
        booted.agent("script", |l| l.get("did") == "counters")?;
        let lines = booted.console.agent_lines();
        let params = lines
            .iter()
            .find(|l| l.get("path") == "/proc/driver/nvidia/params")
            .context("no params")?;
        let keys = if name == "off" {
            "RegistryDwords: \"Other=1;RmRelaxedGspInitLocking=0\""
        } else {
            "RegistryDwords: \"Other=1\""
        };
        ensure!(
            params.get("text").contains(keys),
            "{name}: {}",
            params.get("text")
        );
        let counters = super::worker::counters(&booted)?;
        ensure!(
            counters.contains(&format!("at_once: {at_once}")),
            "{name}: {counters}"
        );
        ensure!(
            booted.event(names::STRATEGY)?.fields["init"] == init,
            "{name}"
        );
    }
    Ok(Outcome::Passed)
}

/// Config accesses of a function so far, as the hardware counts them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Accesses {
    pub reads: u64,
    pub writes: u64,
    pub enables: u64,
}

/// A line of /proc/fakepci.
fn accesses(line: &str) -> Result<Accesses> {
    let number = |key: &str| -> Result<u64> {
        let value = line
            .split(' ')
            .find_map(|word| word.strip_prefix(key))
            .with_context(|| format!("no {key} in {line:?}"))?;
        Ok(value.parse()?)
    };
    Ok(Accesses {
        reads: number("reads=")?,
        writes: number("writes=")?,
        enables: number("enables=")?,
    })
}

/// The first `count` reports of config accesses, in order; each has every function's.
pub fn reports(booted: &Booted, count: usize) -> Result<Vec<Vec<Accesses>>> {
    let all = || {
        booted
            .console
            .agent_lines()
            .into_iter()
            .filter(|l| l.get("msg") == "config")
    };
    booted.agent("config", |_| all().count() >= count)?;
    all()
        .take(count)
        .map(|l| l.get("all").split("; ").map(accesses).collect())
        .collect()
}

/// Script of a guest without the init: config accesses of the driver when all that is needed is
/// done once, which is the load, a look at each minor, and the opens.
pub const NEEDED: &str = "config+information+config+open:0+open:1+open:2+config";

/// Reads the reports of such a guest. Returns the config reads of one look at a GPU's minor, and
/// all accesses of each of three GPUs.
pub fn needed(alone: &[Vec<Accesses>]) -> Result<(u64, &[Accesses])> {
    let [loaded, looked, all] = alone else {
        anyhow::bail!("{} reports of config accesses", alone.len())
    };
    let look = looked[0].reads - loaded[0].reads;
    for (before, after) in loaded.iter().zip(looked) {
        // Else a second look could not be seen.
        ensure!(
            look > 0
                && *after
                    == Accesses {
                        reads: before.reads + look,
                        ..*before
                    },
            "a look: {before:?}, then {after:?}"
        );
    }
    ensure!(
        all.len() == 3 && all.iter().all(|a| a.enables == 1),
        "{all:?}"
    );
    Ok((look, all))
}

fn config_accesses(context: &TestContext) -> Result<Outcome> {
    // The yardstick: modules loaded by name, in a guest without any init of ours.
    let version = std::fs::read_to_string(context.target.join("kernel/version"))?;
    let list = std::fs::read_to_string(context.target.join("kernel/modules/load-order"))?;
    let modules = |names: &str| {
        names
            .lines()
            .map(|m| format!("/lib/modules/{}/{m}\n", version.trim()))
            .collect::<String>()
    };
    let plain = format!("{}{}", modules(&list), modules("fakepci.ko\nnvidia.ko"));
    let script = format!("testagent.guest=script testagent.script=now>sleep:500+{NEEDED}");
    let yardstick = Guest::new()
        .file("etc/hardware.modules", plain.as_bytes())
        .append(&format!(
            "fakepci.gpus=3 hardware.init=/minimal-init {script}"
        ))
        .boot(context, "plain")?;
    let alone = reports(&yardstick, 3)?;
    let (look, wanted) = needed(&alone)?;
    for bind in ["insmod", "pipelined", "concurrent", "auto"] {
        let script = "testagent.guest=script testagent.script=settled>config";
        let booted = Guest::new()
            .append(&format!("fakepci.gpus=3 gpuinit.bind={bind} {script}"))
            .boot(context, bind)?;
        let is = reports(&booted, 1)?.remove(0);
        ensure!(
            is == wanted,
            "{bind}: {is:?}, without the init {wanted:?}, of which a look at a minor is {look} \
            reads"
        );
    }
    Ok(Outcome::Measured(format!(
        "config reads of a GPU: {}, of which a look at its minor is {look}",
        wanted[0].reads
    )))
}

fn child(context: &TestContext) -> Result<Outcome> {
    let mut booted = Guest::new()
        .append("gpuinit.agent=child testagent.containers=all:all testagent.poweroff=on")
        .boot(context, "child")?;
    let ready = booted.agent("ttRPC server started", |_| true)?;
    ensure!(ready.get("pid") != "1", "the agent is PID 1");
    booted.created("all")?;
    booted.exit()?;
    // Cgroups of version 1, where the kernel command line does not ask for the other.
    let words = "gpuinit.agent=child testagent.guest=script \
        testagent.script=settled>file:/proc/self/mounts";
    let v1 = Guest::new().cgroup_v1().append(words).boot(context, "v1")?;
    let mounts = v1.agent("file", |l| l.get("path") == "/proc/self/mounts")?;
    for mount in [
        "tmpfs /sys/fs/cgroup tmpfs ro,",
        "cgroup /sys/fs/cgroup/devices cgroup ",
        "cgroup /sys/fs/cgroup/cpu cgroup ",
    ] {
        ensure!(
            mounts.get("text").contains(mount),
            "{mount:?} is not in {}",
            mounts.get("text")
        );
    }
    ensure!(
        !mounts.get("text").contains("cgroup2"),
        "{}",
        mounts.get("text")
    );
    ensure!(
        booted
            .console
            .wait_text(std::time::Duration::from_secs(5), "kata-agent has ended"),
        "the console does not say why the guest powered off"
    );
    Ok(Outcome::Passed)
}
