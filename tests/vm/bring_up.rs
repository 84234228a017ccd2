//! A failure means that a strategy leaves a GPU out or touches config space more often than the
//! driver alone, that initialisations which may overlap do not, or that a measured or read fact
//! decides nothing.

use super::harness::{
    Booted, CONFIDENTIAL, Guest, Outcome, TestContext, VmTest, events, named, spans,
};
use anyhow::{Context, Result, ensure};
use kata_gpu_wire::names;
use kata_gpu_wire::record::{Kind, Record};

pub const TESTS: &[VmTest] = &[
    VmTest {
        name: "every_strategy_binds_all_gpus",
        run: strategies,
    },
    VmTest {
        name: "an_initialisation_is_not_held_up_by_the_vcpu_that_enables",
        run: own_vcpu,
    },
    VmTest {
        name: "no_gpu_is_enabled_before_a_first_part_is_seen_to_end",
        run: attach,
    },
    VmTest {
        name: "initialisations_go_in_waves_when_the_lane_is_faster",
        run: waves,
    },
    VmTest {
        name: "programs_have_half_a_second_before_the_next_wave",
        run: programs_first,
    },
    VmTest {
        name: "sixteen_gpus_come_up",
        run: sixteen,
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
        name: "the_agent_runs_as_a_child_of_the_init_too",
        run: child,
    },
];

/// Each strategy binds all GPUs, and makes no config access besides the driver's own: a guest
/// without any init of ours is the yardstick.
fn strategies(context: &TestContext) -> Result<Outcome> {
    let folder = context.modules()?;
    let list = std::fs::read_to_string(context.target.join("kernel/modules/load-order"))?;
    let modules = |names: &str| {
        names
            .lines()
            .map(|m| format!("/{folder}/{m}\n"))
            .collect::<String>()
    };
    let plain = format!("{}{}", modules(&list), modules("fakepci.ko\nnvidia.ko"));
    let yardstick = Guest::with("fakepci.gpus=3 hardware.init=/minimal-init")
        .file("etc/hardware.modules", plain.as_bytes())
        .script(&format!("now>sleep:500+{NEEDED}"))
        .boot(context, "plain")?;
    let without = reports(&yardstick, 3)?;
    let (look, wanted) = needed(&without)?;
    for bind in ["insmod", "pipelined", "concurrent"] {
        let booted = Guest::with(&format!(
            "fakepci.gpus=3 gpuinit.bind={bind} testagent.containers=all:all"
        ))
        .script("settled>config")
        .boot(context, bind)?;
        booted.settles(3, 0)?;
        booted.created("all")?;
        let records = booted.records();
        let strategy = booted.event(names::STRATEGY)?;
        ensure!(strategy.fields["bind"] == bind, "{strategy:?}");
        let (enabled, bound) = match bind {
            "insmod" => (0, 0),
            _ => (3, 2),
        };
        let count = |name| {
            let gpus = named(&records, Kind::End, name).into_iter().map(|r| r.gpu);
            gpus.collect::<std::collections::HashSet<_>>().len()
        };
        ensure!(
            count(names::GPU_ENABLE) == enabled && count(names::GPU_BIND) == bound,
            "{bind}: {} enablings, {} binds",
            count(names::GPU_ENABLE),
            count(names::GPU_BIND)
        );
        // The kernel reports it, too.
        ensure!(
            records.iter().any(|r| r.kind == Kind::Kmsg
                && r.fields["text"]
                    .as_str()
                    .is_some_and(|t| t.contains("10de:2330"))),
            "{bind}: no kernel lines"
        );
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

fn own_vcpu(context: &TestContext) -> Result<Outcome> {
    // A second part's 400 ms are in steps of 100 ms: one that shares the vCPU of an enabling sleeps
    // through all of its 2 s. If the processor of a GPU does not boot, that part is the last one;
    // a third part would wait for the enabling.
    let booted = Guest::with(
        "fakepci.gpus=4 fakepci.enable_ms=2000 nvidia.s1_ms=100 nvidia.s2_ms=400 nvidia.s3_ms=100 \
        nvidia.init_fail=1,2 gpuinit.bind=pipelined",
    )
    .script("gpu.init!begin/1>cpus;settled>cpus")
    .boot(context, "own")?;
    booted.settles(2, 2)?;
    booted.agent("script", |l| {
        l.get("did") == "cpus" && l.get("when") == "settled"
    })?;
    let records = booted.records();
    let (initialisations, enablings) = (
        spans(&records, names::GPU_INIT)?,
        spans(&records, names::GPU_ENABLE)?,
    );
    let ends_in_an_enabling = |(begin, end): &(&Record, &Record)| {
        enablings
            .iter()
            .any(|(from, to)| begin.seq < from.seq && from.seq < end.seq && end.seq < to.seq)
    };
    let beside = initialisations
        .iter()
        .filter(|span| ends_in_an_enabling(span))
        .count();
    ensure!(
        beside > 0,
        "no initialisation ends during an enabling that began in it: {initialisations:?}, \
        {enablings:?}"
    );
    // While the lane runs: our threads and the driver's are elsewhere; after it, nothing is left of
    // that.
    let lines = booted.lines();
    let of = |name: &str, cpus: &str| {
        lines
            .iter()
            .filter(|l| l.get("msg") == "cpus")
            .filter(|l| l.get("thread") == name && l.get("allowed") == cpus)
            .count()
    };
    ensure!(
        of("nv_open_q", "0") >= 1
            && of("nv_open_q", "0-1") == 4
            && ["gpuinit-worker", "gpuinit-opener"]
                .iter()
                .all(|ours| of(ours, "0") > 0 && of(ours, "0-1") > 0),
        "{lines:?}"
    );
    Ok(Outcome::Measured(format!(
        "{beside} of 2 initialisations end during an enabling that began in them"
    )))
}

/// The lane waits for the end of an initialisation's first part as the driver shows it, however
/// long that takes; a driver that does not show it is no error.
fn attach(context: &TestContext) -> Result<Outcome> {
    const S1_MS: u64 = 2000;
    let words = format!(
        "fakepci.gpus=3 fakepci.enable_ms=1500 nvidia.s1_ms={S1_MS} nvidia.s2_ms=3000 \
        gpuinit.bind=pipelined"
    );
    let booted = Guest::with(&words).boot(context, "seen")?;
    booted.settles(3, 0)?;
    let records = booted.records();
    let ends = named(&records, Kind::End, names::GPU_INIT);
    for end in &ends {
        let took = end.fields.get("attach_ms").and_then(|ms| ms.as_u64());
        ensure!(took >= Some(S1_MS), "{end:?}");
    }
    let enablings = spans(&records, names::GPU_ENABLE)?;
    for (begin, _) in spans(&records, names::GPU_INIT)? {
        let first_part = begin.boottime_ns..begin.boottime_ns + S1_MS * 1_000_000;
        let early = enablings
            .iter()
            .find(|(enabling, _)| first_part.contains(&enabling.boottime_ns));
        ensure!(early.is_none(), "{early:?} in {begin:?}");
    }
    let unseen = Guest::with(&format!("{words} nvidia.no_status=1")).boot(context, "unseen")?;
    unseen.settles(3, 0)?;
    let records = unseen.records();
    let ends = named(&records, Kind::End, names::GPU_INIT);
    ensure!(
        ends.len() == 3 && ends.iter().all(|end| !end.fields.contains_key("attach_ms")),
        "{ends:?}"
    );
    Ok(Outcome::Passed)
}

fn waves(context: &TestContext) -> Result<Outcome> {
    let booted = Guest::with(
        "fakepci.gpus=6 fakepci.enable_ms=300 nvidia.s1_ms=100 nvidia.s2_ms=2400 nvidia.s3_ms=200 \
        testagent.containers=all:all",
    )
    .boot(context, "medium")?;
    booted.settles(6, 0)?;
    booted.created("all")?;
    let records = booted.records();
    // Initialisations of a wave begin before any of them is over; the next wave begins when all are
    // over, never in the middle of one.
    let mut waves: Vec<Vec<(u64, u64)>> = Vec::new();
    for (begin, end) in spans(&records, names::GPU_INIT)? {
        match waves.last_mut() {
            Some(wave) if wave.iter().all(|(_, end)| begin.seq < *end) => {
                wave.push((begin.seq, end.seq))
            }
            _ => waves.push(vec![(begin.seq, end.seq)]),
        }
    }
    for pair in waves.windows(2) {
        ensure!(
            pair[0].iter().all(|(_, end)| *end < pair[1][0].0),
            "one began before the wave before it was over: {waves:?}"
        );
    }
    // By the guest's own clock: on a busy machine this is another host, with other waves.
    for (name, ms) in [(names::GPU_ENABLE, 300), (names::GPU_INIT, 2700)] {
        let took = |(begin, end): &(&Record, &Record)| end.boottime_ns - begin.boottime_ns;
        let longest = spans(&records, name)?.iter().map(took).max();
        let longest_ms = longest.unwrap_or_default() / 1_000_000;
        if longest_ms > 3 * ms {
            return Ok(Outcome::Skipped(format!(
                "too busy: a {name} took {longest_ms} ms, where the simulator's own takes {ms}"
            )));
        }
    }
    ensure!((2..6).contains(&waves.len()), "{waves:?}");
    Ok(Outcome::Measured(format!(
        "waves of {:?}",
        waves.iter().map(Vec::len).collect::<Vec<_>>()
    )))
}

/// Time that programs have, at least.
const PROGRAMS_NS: u64 = 500_000_000;

fn programs_first(context: &TestContext) -> Result<Outcome> {
    let words =
        "fakepci.gpus=6 fakepci.enable_ms=700 testagent.cost=real testagent.containers=zero:0";
    let booted = Guest::with(words).boot(context, "slow")?;
    booted.settles(6, 0)?;
    let records = booted.records();
    let container = named(&records, Kind::Event, names::AGENT_CONTAINER);
    let container = container.first().context("no container was made")?;
    let lane = spans(&records, names::GPU_ENABLE)?;
    let lane_over = lane.iter().map(|(_, end)| end.boottime_ns).max();
    let initialisations = spans(&records, names::GPU_INIT)?;
    let mut pauses = Vec::new();
    for (_, end) in &initialisations {
        let until = end.boottime_ns + PROGRAMS_NS;
        let under_way =
            |(begin, other): &(&Record, &Record)| begin.seq < end.seq && end.seq < other.seq;
        let last_of_wave = !initialisations.iter().any(under_way);
        let next = initialisations
            .iter()
            .find(|(begin, _)| begin.seq > end.seq);
        if let Some((next, _)) = next
            && last_of_wave
            && container.seq < end.seq
            && Some(until) < lane_over
        {
            ensure!(next.boottime_ns >= until, "{next:?} behind {end:?}");
            pauses.push((next.boottime_ns - end.boottime_ns) / 1_000_000);
        }
    }

    // All GPUs are there at once, and one of them is first.
    let first = Guest::with("fakepci.gpus=3 gpuinit.first=1").boot(context, "first")?;
    first.settles(3, 0)?;
    let records = first.records();
    let initialisations = spans(&records, names::GPU_INIT)?;
    let [(_, end), (second, over), (third, _)] = initialisations[..] else {
        anyhow::bail!("{initialisations:?}")
    };
    ensure!(
        second.boottime_ns >= end.boottime_ns + PROGRAMS_NS && third.seq < over.seq,
        "{initialisations:?}"
    );
    // On a busy machine the container is seen after all waves that leave GPUs to be enabled.
    Ok(if pauses.is_empty() {
        Outcome::Skipped("no wave was over between the container and the lane's end".into())
    } else {
        Outcome::Measured(format!("ms between waves: {pauses:?}"))
    })
}

fn sixteen(context: &TestContext) -> Result<Outcome> {
    let booted =
        Guest::with("fakepci.gpus=16 testagent.containers=all:all;last:15").boot(context, "16")?;
    booted.settles(16, 0)?;
    booted.created("all")?;
    booted.created("last")?;
    // The first bound GPU in PCI order begins, so that the driver's locks serve GPUs in that order.
    // A GPU whose bind is reported just then may come too late for that.
    let records = booted.records();
    let initialisations = spans(&records, names::GPU_INIT)?;
    let bound = events(&records, names::GPU_BOUND);
    for (at, (begin, _)) in initialisations.iter().enumerate().skip(1) {
        let known = |gpu| {
            let before = initialisations[at - 1].0.seq;
            bound.iter().any(|r| r.gpu == gpu && r.seq < before)
        };
        let late = initialisations[at..]
            .iter()
            .find(|(later, _)| later.gpu < begin.gpu);
        if let Some((late, _)) = late {
            ensure!(!known(late.gpu), "{begin:?}, and then {late:?}");
        }
    }
    let mut ends: Vec<_> = initialisations
        .iter()
        .map(|(begin, end)| (end.seq, begin.gpu))
        .collect();
    ends.sort_unstable();
    let in_order = ends.windows(2).filter(|pair| pair[0].1 < pair[1].1).count();
    Ok(Outcome::Measured(format!(
        "{in_order} of {} ends of initialisations follow that of a GPU with a lower address",
        ends.len() - 1
    )))
}

/// The tests of [`kata_gpu_init::boot::bring_up::strategy`] have every decision; this guest shows
/// that the facts reach it: what is measured, what is read, and what is confidential.
fn auto(context: &TestContext) -> Result<Outcome> {
    let booted = Guest::with(&format!(
        "fakepci.gpus=3 fakepci.enable_ms=250 {CONFIDENTIAL}"
    ))
    .boot(context, "confidential")?;
    booted.settles(3, 0)?;
    let reported = booted.events(names::STRATEGY, 1)?;
    ensure!(reported.len() == 1, "{reported:?}");
    let fields = &reported[0].fields;
    let says = |why: &str| fields["reason"].as_str().is_some_and(|r| r.contains(why));
    ensure!(
        fields["bind"] == "pipelined" && fields["init"] == "serial",
        "{fields:?}"
    );
    ensure!(
        says("the host maps BARs slowly") && says("under confidential computing"),
        "{fields:?}"
    );
    ensure!(
        fields["driver"] == "550.163.01" && fields["vcpus"] == 2,
        "{fields:?}"
    );
    Ok(Outcome::Passed)
}

/// The driver's switch, with another key of the command line; without it, initialisations overlap,
/// by the driver's own count and by the order of records.
fn relaxed_off(context: &TestContext) -> Result<Outcome> {
    for (name, at_once, init, keys) in [
        ("off", 1, "serial", "Other=1;RmRelaxedGspInitLocking=0"),
        ("on", 3, "parallel", "Other=1"),
    ] {
        let booted = Guest::with(&format!(
            "nvidia.NVreg_RegistryDwords=Other=1 fakepci.gpus=3 nvidia.s2_ms=2000 \
            gpuinit.relaxed={name}"
        ))
        .script("settled>file:/proc/driver/nvidia/params+counters")
        .boot(context, name)?;
        booted.did("counters")?;
        let params = booted.agent("file", |_| true)?;
        ensure!(
            params
                .get("text")
                .contains(&format!("RegistryDwords: \"{keys}\"")),
            "{name}: {params:?}"
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
        let records = booted.records();
        let all = spans(&records, names::GPU_INIT)?;
        let first_end = all.iter().map(|(_, end)| end.seq).min();
        let before = all.iter().filter(|(begin, _)| Some(begin.seq) < first_end);
        ensure!(before.count() == at_once, "{name}: {all:?}");
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
            .lines()
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
pub fn needed(without: &[Vec<Accesses>]) -> Result<(u64, &[Accesses])> {
    let [loaded, looked, all] = without else {
        anyhow::bail!("{} reports of config accesses", without.len())
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

/// With the controllers of version 1, where the kernel command line does not ask for the others.
fn child(context: &TestContext) -> Result<Outcome> {
    let mut booted =
        Guest::with("gpuinit.agent=child testagent.containers=all:all testagent.poweroff=on")
            .cgroup_v1()
            .script("settled>file:/proc/self/mounts")
            .boot(context, "child")?;
    let ready = booted.agent("ttRPC server started", |_| true)?;
    ensure!(ready.get("pid") != "1", "the agent is PID 1");
    booted.created("all")?;
    let mounts = booted.agent("file", |_| true)?;
    for mount in [
        "tmpfs /sys/fs/cgroup tmpfs ro,",
        "cgroup /sys/fs/cgroup/devices cgroup ",
        "cgroup /sys/fs/cgroup/cpu cgroup ",
    ] {
        ensure!(
            mounts.get("text").contains(mount),
            "{mount:?} is not in {mounts:?}"
        );
    }
    ensure!(!mounts.get("text").contains("cgroup2"), "{mounts:?}");
    booted.exit()?;
    ensure!(
        booted.console.text().contains("kata-agent has ended"),
        "the console does not say why the guest powered off"
    );
    Ok(Outcome::Passed)
}
