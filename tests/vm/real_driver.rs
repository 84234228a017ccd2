//! NVIDIA's own open kernel module, on functions without a GPU behind them: the second judge, which
//! no author of the simulator has understood wrongly.
//!
//! The module binds, its initialisation goes as far as booting the GPU's own processor, and fails
//! with the driver's own words; how far it gets is in the hands of a few registers
//! (tests/simulator/fakepci-bars.c). What cannot be seen here is a GPU that works.

use super::bring_up::{Accesses, NEEDED, needed, reports};
use super::harness::{AgentLine, Booted, Guest, Outcome, RealDriver, TestContext, VmTest, named};
use anyhow::{Context, Result, ensure};
use kata_gpu_wire::arch::Arch;
use kata_gpu_wire::names;
use kata_gpu_wire::record::{Kind, Record};
use std::collections::BTreeSet;
use std::time::Duration;

pub const TESTS: &[VmTest] = &[
    VmTest {
        name: "real_driver_binds_all_with_its_minors_in_every_strategy",
        run: |c| with_driver(c, strategies),
    },
    VmTest {
        name: "real_driver_failures_have_their_reasons_and_its_words",
        run: |c| with_driver(c, failures),
    },
    VmTest {
        name: "real_driver_loses_a_gpu_before_it_initialises",
        run: |c| with_driver(c, lost),
    },
    VmTest {
        name: "real_driver_lets_a_gpu_go_and_takes_it_back",
        run: |c| with_driver(c, unplugged),
    },
    VmTest {
        name: "real_driver_alone_makes_every_config_access",
        run: |c| with_driver(c, config_accesses),
    },
    VmTest {
        name: "real_driver_initialisations_overlap",
        run: |c| with_driver(c, overlap),
    },
    VmTest {
        name: "real_driver_survives_a_killed_worker_with_every_gpu_open",
        run: |c| with_driver(c, killed),
    },
    VmTest {
        name: "real_driver_nvml_finds_no_usable_gpu_and_no_fault_of_ours",
        run: |c| with_driver(c, nvml),
    },
    VmTest {
        name: "real_driver_persistenced_reports_that_no_gpu_is_usable",
        run: |c| with_driver(c, persistenced),
    },
    VmTest {
        name: "real_driver_and_simulator_say_the_same",
        run: |c| with_driver(c, same_words),
    },
];

/// The tests of this file need a module that is built from packages which cannot be had everywhere.
fn with_driver(
    context: &TestContext,
    test: fn(&TestContext, &RealDriver) -> Result<Outcome>,
) -> Result<Outcome> {
    match RealDriver::find(context)? {
        Some(driver) => test(context, &driver),
        None => {
            ensure!(
                std::env::var_os("REQUIRE_REAL_DRIVER").is_none(),
                "target/real-driver/nvidia.ko is missing, and REQUIRE_REAL_DRIVER is set"
            );
            let reason = "target/real-driver/nvidia.ko is not there: tests/real-driver/build \
                makes it where Debian's packages can be had";
            Ok(Outcome::Skipped(reason.into()))
        }
    }
}

/// With the GSP's firmware: initialisations then take seconds, until the driver gives up waiting
/// for a processor that is not there.
fn with_firmware(driver: &RealDriver) -> Result<Guest> {
    let (path, bytes) = driver.firmware()?;
    Ok(Guest::new().real_driver(driver).file(&path, &bytes))
}

fn strategies(context: &TestContext, driver: &RealDriver) -> Result<Outcome> {
    let containers: Vec<String> = (0..8).map(|k| format!("c{k}:{k}")).collect();
    let mut minors_seen = Vec::new();
    for bind in ["insmod", "pipelined", "concurrent"] {
        let script = "testagent.guest=script testagent.script=gpu.published/7>sleep:1000+overrides";
        let words = format!(
            "gpuinit.bind={bind} testagent.containers={} {script}",
            containers.join(";")
        );
        let booted = with_firmware(driver)?.append(&words).boot(context, bind)?;
        let nodes = (0..8)
            .map(|k| Ok(booted.created(&format!("c{k}"))?.get("nodes").to_string()))
            .collect::<Result<Vec<_>>>()?;
        let records = booted.receiver.records();
        let bound = named(&records, Kind::Event, names::GPU_BOUND);
        ensure!(bound.len() == 8, "{bind}: {} GPUs are bound", bound.len());
        let mut minors = vec![u64::MAX; 8];
        for r in &bound {
            let (index, minor) = (
                r.fields["index"].as_u64().context("no index")?,
                r.fields["minor"].as_u64().context("no minor")?,
            );
            // Names in PCI order, whatever the minors.
            ensure!(
                r.gpu
                    .is_some_and(|g| g.to_string() == format!("0001:00:{index:02x}.0")),
                "{bind}: {r:?}"
            );
            minors[index as usize] = minor;
        }
        for (index, (nodes, minor)) in nodes.iter().zip(&minors).enumerate() {
            ensure!(
                nodes.contains(&format!("/dev/nvidia{minor} 195:{minor} ")),
                "{bind}: GPU {index} has minor {minor}, its container has {nodes}"
            );
        }
        let overrides = booted.agent("overrides", |_| true)?;
        ensure!(
            overrides.get("all").matches("=(null)").count() >= 8
                && !overrides.get("all").contains("held-back"),
            "{bind}: {overrides:?}"
        );
        let mut sorted = minors.clone();
        sorted.sort_unstable();
        ensure!(
            sorted == [0, 1, 2, 3, 4, 5, 6, 7],
            "{bind}: minors {minors:?}"
        );
        minors_seen.push(format!("{bind} {minors:?}"));
    }
    Ok(Outcome::Measured(format!(
        "minors in PCI order: {}",
        minors_seen.join(", ")
    )))
}

fn nvml(context: &TestContext, driver: &RealDriver) -> Result<Outcome> {
    let script = "testagent.guest=script testagent.script=settled>nvml:facts";
    let guest = Guest::new()
        .real_driver(driver)
        .real_nvml()
        .append(&format!("fakepci.gpus=2 gpuinit.gpu.power=500 {script}"));
    let booted = guest.boot(context, "nvml")?;
    judge(&booted, &[NO_FIRMWARE, NO_FIRMWARE])?;
    let answer = booted.agent("nvml", |_| true)?;
    // NVML starts on this driver, has our functions, and counts no GPU: each other answer is a
    // fault of the helper.
    let counted = r#"{"facts":{"driver":"550.163.01","nvml":"12.550.163.01","count":0,"confidential":null,"confidential_error":null,"devices":[]}}"#;
    ensure!(answer.get("answer") == counted, "{}", answer.get("answer"));
    let event = booted.event(names::NVML)?;
    let reason = "none of 2 GPU(s) is usable, by their own events: NVML is not asked, which would \
        initialise them again";
    ensure!(
        event.error.is_none() && event.fields["reason"] == reason,
        "{event:?}"
    );
    Ok(Outcome::Passed)
}

/// The failure of one GPU.
fn failure(records: &[Record], index: u64) -> Result<Record> {
    named(records, Kind::Event, names::GPU_FAILED)
        .into_iter()
        .find(|r| r.fields["index"].as_u64() == Some(index))
        .cloned()
        .with_context(|| format!("GPU {index} has not failed"))
}

/// Expected report of a failure.
struct Wanted {
    step: &'static str,
    reason: &'static str,
    words: &'static str,
}

fn wanted(step: &'static str, reason: &'static str, words: &'static str) -> Wanted {
    Wanted {
        step,
        reason,
        words,
    }
}

fn judge_one(records: &[Record], index: u64, wanted: &Wanted) -> Result<()> {
    let failed = failure(records, index)?;
    let error = failed.error.clone().unwrap_or_default();
    let (step, reason) = (&failed.fields["step"], &failed.fields["reason"]);
    ensure!(
        step == wanted.step && reason == wanted.reason,
        "GPU {index}: {step} {reason}, wanted {} {}: {error}",
        wanted.step,
        wanted.reason
    );
    ensure!(
        error.contains("the driver logged: ") && error.contains(wanted.words),
        "GPU {index}: {:?} is not in: {error}",
        wanted.words
    );
    ensure!(
        !error.contains("\\x0a") && failed.fields.contains_key("cure"),
        "GPU {index}: {error}"
    );
    Ok(())
}

fn judge(booted: &Booted, wanted: &[Wanted]) -> Result<()> {
    ensure!(
        booted.settled()? == (0, wanted.len() as u64),
        "{:?}",
        booted.settled()?
    );
    let records = booted.receiver.records();
    wanted
        .iter()
        .enumerate()
        .try_for_each(|(index, wanted)| judge_one(&records, index as u64, wanted))
}

const NO_FIRMWARE: Wanted = Wanted {
    step: "init",
    reason: "firmware-missing",
    words: "Direct firmware load for nvidia/",
};

fn failures(context: &TestContext, driver: &RealDriver) -> Result<Outcome> {
    // By slot: a GPU as it should be, off the bus, without BAR 0, of no chip, without interrupts,
    // newer than the driver.
    let chips = "fakepci.chip=0x180a1000,0x180a1000,0x180a1000,0,0x180a1000,0x1a0a1000,0x180a1000";
    let faults = format!("fakepci.off_bus=1 fakepci.bar_missing=2 {chips} fakepci.no_msix=4");
    let every = || {
        vec![
            NO_FIRMWARE,
            wanted(
                "probe",
                "off-the-bus",
                "has fallen off the bus and is not responding to commands",
            ),
            wanted("probe", "bar-unassigned", "BAR0 is 0M @ 0x0"),
            wanted(
                "probe",
                "unsupported-gpu",
                "does not include the required GPU System Processor (GSP)",
            ),
            wanted("probe", "no-interrupt", "Can't find an IRQ"),
            wanted(
                "probe",
                "unsupported-gpu",
                "is not supported by the NVIDIA 550.",
            ),
            NO_FIRMWARE,
        ]
    };
    // All probed by the load, and each by its own bind. The last one's BAR of 128 GiB has no
    // address, which is the kernel's word and not the driver's; the kernel logs it where the GPU is
    // enabled: in the driver's probe, or ahead of it.
    for (bind, step) in [("insmod", "probe"), ("pipelined", "enable")] {
        let words = format!("fakepci.gpus=8 {faults} fakepci.bar_unassigned=7 gpuinit.bind={bind}");
        let script = "testagent.guest=script testagent.script=settled>held";
        let mut booted = Guest::new()
            .real_driver(driver)
            .append(&format!("{words} {script}"))
            .boot(context, bind)?;
        let mut every = every();
        every.push(wanted(
            step,
            "bar-unassigned",
            "BAR 2 [mem size 0x2000000000 64bit pref]: not assigned",
        ));
        judge(&booted, &every)?;
        // The stream has the answer to the wait for a non-blocking open.
        let records = booted.receiver.records();
        let init = named(&records, Kind::End, names::GPU_INIT);
        ensure!(
            init.len() == 2
                && init
                    .iter()
                    .all(|r| r.fields["rc"] == -5 && r.fields["status"] == 0x59),
            "{bind}: {init:?}"
        );
        // A GPU whose initialisation failed stays open all the same: nothing of ours closes one.
        let held = booted.agent("held", |l| l.get("process") == "gpuinit-keeper")?;
        ensure!(
            held.get("nodes").split(' ').count() == 2,
            "{bind}: {held:?}"
        );
        booted.still_runs()?;
    }
    let dead = with_firmware(driver)?
        .append("fakepci.gpus=1 fakepci.fsp_dead=0")
        .boot(context, "fsp")?;
    judge(&dead, &[wanted("init", "firmware-boot", "(0x62:0x65:")])?;
    let xid = dead.event(names::GPU_XID)?;
    ensure!(xid.fields["xid"] == 143, "{xid:?}");
    Ok(Outcome::Passed)
}

fn lost(context: &TestContext, driver: &RealDriver) -> Result<Outcome> {
    // GPU 1 is plugged in and bound while GPU 0 initialises, which takes seconds, and is gone when
    // its own turn comes.
    let script = "testagent.guest=script \
        testagent.script=gpu.init!begin/0>plug:1;gpu.bound/1>lose:1;settled>held";
    let words = format!("fakepci.gpus=2 fakepci.absent=1 gpuinit.init=serial {script}");
    let booted = with_firmware(driver)?
        .append(&words)
        .boot(context, "lost")?;
    // GPU 1's turn begins with the end of GPU 0's, so either can be reported first.
    let failed_of = |index: u64| {
        booted.record("failure", move |r| {
            r.name == names::GPU_FAILED && r.fields["index"] == index
        })
    };
    let (failed, _) = (failed_of(1)?, failed_of(0)?);
    let records = booted.receiver.records();
    // The driver finds out when it turns interrupts on, and does not speak of the bus.
    judge_one(
        &records,
        1,
        &wanted(
            "init",
            "no-interrupt",
            "No interrupts of any type are available",
        ),
    )?;
    let end = named(&records, Kind::End, names::GPU_INIT)
        .into_iter()
        .find(|r| r.gpu == failed.gpu)
        .context("no end")?;
    ensure!(
        end.fields["rc"] == -5 && end.fields["status"] == 0x40,
        "{end:?}"
    );
    judge_one(&records, 0, &wanted("init", "firmware-boot", "(0x62:0x65:"))?;
    Ok(Outcome::Passed)
}

fn unplugged(context: &TestContext, driver: &RealDriver) -> Result<Outcome> {
    // The one that goes answers with ones before the driver hears of it.
    let script =
        "settled>config+unplug:1;gpu.removed>held+plug:1;gpu.failed/1>held+config+overrides";
    let words = format!("fakepci.gpus=3 testagent.guest=script testagent.script={script}");
    let mut booted = Guest::new()
        .real_driver(driver)
        .append(&words)
        .boot(context, "unplugged")?;
    booted.agent("script", |l| l.get("did") == "overrides")?;
    let held: Vec<String> = booted
        .console
        .agent_lines()
        .iter()
        .filter(|l| l.get("msg") == "held" && l.get("process") == "gpuinit-keeper")
        .map(|l| l.get("nodes").to_string())
        .collect();
    // The minor that has become free is the one it gets again.
    ensure!(
        held == [
            "/dev/nvidia0 /dev/nvidia2",
            "/dev/nvidia0 /dev/nvidia1 /dev/nvidia2"
        ],
        "the keeper has {held:?}"
    );
    let records = booted.receiver.records();
    let removed = named(&records, Kind::Event, names::GPU_REMOVED);
    ensure!(
        removed.len() == 1
            && removed[0]
                .gpu
                .is_some_and(|g| g.to_string() == "0001:00:01.0"),
        "{removed:?}"
    );
    let bound = named(&records, Kind::Event, names::GPU_BOUND);
    let again = bound
        .iter()
        .find(|r| r.seq > removed[0].seq)
        .context("not bound again")?;
    ensure!(
        bound.len() == 4 && again.fields["index"] == 1 && again.fields["minor"] == 1,
        "{bound:?}"
    );
    let reports = reports(&booted, 2)?;
    let (before, after) = (&reports[0], &reports[1]);
    // The host maps the BARs of a GPU that comes once, and of the others not again.
    ensure!(
        after[0] == before[0] && after[2] == before[2],
        "others were accessed: {before:?} {after:?}"
    );
    ensure!(
        before[1].enables == 1 && after[1].enables == 2,
        "enabled more than once: {before:?} {after:?}"
    );
    let complaint = |r: &&Record| {
        r.kind == Kind::Kmsg
            && r.fields["text"]
                .as_str()
                .is_some_and(|t| t.contains("WARNING") || t.contains("non-zero usage"))
    };
    ensure!(
        !records.iter().any(|r| complaint(&r)),
        "{:?}",
        records.iter().find(complaint)
    );
    booted.still_runs().map(|()| Outcome::Passed)
}

/// The functions' config accesses when all is over, without our init (`None`) or with it.
fn all_accesses(
    context: &TestContext,
    driver: &RealDriver,
    bind: Option<&str>,
) -> Result<Vec<Vec<Accesses>>> {
    let words = match bind {
        None => format!(
            "hardware.init=/usr/bin/kata-agent testagent.guest=script \
            testagent.script=now>load+{NEEDED}"
        ),
        Some(bind) => {
            format!("gpuinit.bind={bind} testagent.guest=script testagent.script=settled>config")
        }
    };
    let booted = Guest::new()
        .real_driver(driver)
        .append(&format!("fakepci.gpus=3 {words}"))
        .boot(context, bind.unwrap_or("alone"))?;
    reports(&booted, if bind.is_some() { 1 } else { 3 })
}

fn config_accesses(context: &TestContext, driver: &RealDriver) -> Result<Outcome> {
    let alone = all_accesses(context, driver, None)?;
    // The driver walks the capabilities whenever somebody reads a GPU's information file.
    let (look, all) = needed(&alone)?;
    for bind in ["insmod", "pipelined", "concurrent"] {
        let ours = all_accesses(context, driver, Some(bind))?
            .pop()
            .context("no report")?;
        ensure!(
            ours == all,
            "{bind}: {ours:?}, the driver alone {all:?}, of which a look at a minor is {look} reads"
        );
    }
    Ok(Outcome::Measured(format!(
        "config accesses of a GPU: {} reads, {} writes; a look at its minor is {look} of them",
        all[0].reads, all[0].writes
    )))
}

/// Whether a GPU that is late stands in the driver, before the driver's own lock.
fn waits_for_the_drivers_lock(late: &&Record) -> bool {
    late.fields
        .get("stack")
        .and_then(|stack| stack.as_str())
        .is_some_and(|stack| stack.contains("os_acquire_rwlock_write"))
}

/// From the first initialisation's begin to the last one's end, in ms. All must have begun before
/// one ends, unless the init holds them back.
fn span(context: &TestContext, driver: &RealDriver, gpus: u64, words: &str) -> Result<u64> {
    let words = format!("fakepci.gpus={gpus} {words}");
    let boot = || {
        with_firmware(driver)?
            .append(&words)
            .boot(context, &format!("{gpus}"))
    };
    let mut booted = boot()?;
    // Initialisations that fail together have hung in the driver (550.163.01, seen twice): each
    // waits for the driver's locks, for ever. That is no measure; once, another boot is.
    let hangs = |booted: &Booted| {
        named(&booted.receiver.records(), Kind::Event, names::GPU_LATE)
            .iter()
            .any(waits_for_the_drivers_lock)
    };
    if booted.settled().is_err() && hangs(&booted) {
        drop(booted);
        booted = boot()?;
    }
    ensure!(booted.settled()? == (0, gpus), "{:?}", booted.settled()?);
    let records = booted.receiver.records();
    let begin = named(&records, Kind::Begin, names::GPU_INIT)
        .iter()
        .map(|r| r.boottime_ns)
        .min()
        .context("no initialisation")?;
    let end = named(&records, Kind::End, names::GPU_INIT)
        .iter()
        .map(|r| r.boottime_ns)
        .max()
        .context("no initialisation")?;
    let last_begin = named(&records, Kind::Begin, names::GPU_INIT)
        .iter()
        .map(|r| r.boottime_ns)
        .max()
        .unwrap_or_default();
    let first_end = named(&records, Kind::End, names::GPU_INIT)
        .iter()
        .map(|r| r.boottime_ns)
        .min()
        .unwrap_or_default();
    ensure!(
        last_begin < first_end || words.contains("relaxed=off"),
        "an initialisation waited for another one to end"
    );
    Ok((end - begin) / 1_000_000)
}

fn overlap(context: &TestContext, driver: &RealDriver) -> Result<Outcome> {
    let one = span(context, driver, 1, "")?;
    let three = span(context, driver, 3, "")?;
    ensure!(
        three * 10 < one * 3 * 8,
        "three initialisations take {three} ms, one takes {one} ms: they do not overlap"
    );
    // The driver's own switch, through ours: the same three in a row.
    let serial = span(context, driver, 3, "gpuinit.relaxed=off")?;
    ensure!(
        three * 10 < serial * 8,
        "with the lock kept three take {serial} ms, with the lock released {three} ms"
    );
    Ok(Outcome::Measured(format!(
        "GSP boots that time out: one {one} ms, three at once {three} ms, three with \
        gpuinit.relaxed=off {serial} ms"
    )))
}

fn killed(context: &TestContext, driver: &RealDriver) -> Result<Outcome> {
    // Killed while the driver initialises: the wait is left, the initialisations go on, and their
    // outcome reaches the next worker.
    let script = "testagent.guest=script testagent.script=gpu.init!begin/1>kill;settled>held";
    let booted = with_firmware(driver)?
        .append(&format!("fakepci.gpus=2 {script}"))
        .boot(context, "killed")?;
    judge(
        &booted,
        &[
            wanted("init", "firmware-boot", "(0x62:"),
            wanted("init", "firmware-boot", "(0x62:"),
        ],
    )?;
    for process in ["gpuinit-keeper", "gpuinit-worker"] {
        let held = booted.agent("held", |l| l.get("process") == process)?;
        ensure!(held.get("nodes") == "/dev/nvidia0 /dev/nvidia1", "{held:?}");
    }
    let records = booted.receiver.records();
    super::harness::complete(&records)?;
    let died = named(&records, Kind::Event, names::PROCESS_DIED);
    ensure!(died.len() == 1, "{died:?}");
    // Each was opened once: the driver says once per GPU that it failed.
    for gpu in ["0001:00:00.0", "0001:00:01.0"] {
        let said = records.iter().filter(|r| {
            r.kind == Kind::Kmsg
                && r.fields["text"]
                    .as_str()
                    .is_some_and(|t| t.contains(&format!("GPU {gpu}: RmInitAdapter failed!")))
        });
        ensure!(
            said.count() == 1,
            "GPU {gpu} was initialised more than once"
        );
    }
    Ok(Outcome::Passed)
}

/// GPUs that fail are the driver's affair: the daemon starts all the same, and its lines name them.
/// An image that lacks what the daemon itself needs is another thing: its start fails, with the
/// daemon's own words and the file.
fn persistenced(context: &TestContext, driver: &RealDriver) -> Result<Outcome> {
    let files = driver.persistenced()?;
    let guest = files
        .iter()
        .fold(Guest::new().real_driver(driver), |guest, (path, bytes)| {
            guest.file(path, bytes)
        });
    let guest = guest
        .file(
            "etc/passwd",
            b"nvidia-persistenced:x:143:143::/:/bin/false\n",
        )
        .file("etc/group", b"nvidia-persistenced:x:143:\n");
    let booted = guest
        .append("fakepci.gpus=2 gpuinit.persistenced=on")
        .boot(context, "whole")?;
    let end = booted.record("start", |r| {
        r.kind == Kind::End && r.name == names::SERVICE_START
    })?;
    ensure!(
        end.error.is_none() && end.fields.contains_key("main_pid"),
        "{end:?}"
    );
    ensure!(booted.settled()? == (0, 2), "{:?}", booted.settled()?);
    // persistenced has no more than the capabilities of its row.
    let drops = "Now running with user ID 143 and group ID 143";
    for text in [
        drops,
        "device 0001:00:00.0 - failed to open.",
        "device 0001:00:01.0 - failed to open.",
        "Local RPC services initialized",
    ] {
        booted.record(text, |r| {
            r.name == names::SERVICE_LOG
                && r.fields
                    .get("text")
                    .and_then(|t| t.as_str())
                    .is_some_and(|t| t.ends_with(text))
        })?;
    }
    let records = booted.receiver.records();
    ensure!(
        named(&records, Kind::Event, names::SERVICE_ENDED).is_empty(),
        "it has ended"
    );
    // The driver's own reason is with the GPUs.
    judge_one(&records, 0, &NO_FIRMWARE)?;

    let guest = files
        .iter()
        .fold(Guest::new().real_driver(driver), |guest, (path, bytes)| {
            guest.file(path, bytes)
        });
    let guest = guest
        .without_added("etc/netconfig")
        .append("fakepci.gpus=2 gpuinit.persistenced=on");
    let booted = guest.boot(context, "image")?;
    let end = booted.record("start", |r| {
        r.kind == Kind::End && r.name == names::SERVICE_START
    })?;
    let error = end
        .error
        .clone()
        .context("it started without /etc/netconfig")?;
    for words in [
        "it has failed (exit status 1)",
        "the image has no /etc/netconfig, without which it fails",
        "Failed to create RPC service",
    ] {
        ensure!(error.contains(words), "{words:?} is not in: {error}");
    }
    Ok(Outcome::Passed)
}

/// Files in /proc, log lines and behaviour of a guest's driver, without what differs from boot to
/// boot.
struct DriverOutput {
    /// Path, and the lines' keys (what stands before a colon, or the whole line).
    files: Vec<(String, Vec<String>)>,
    /// Names of its character devices.
    devices: BTreeSet<String>,
    lines: Vec<String>,
    /// Config accesses that reading the information file of each GPU makes.
    looks: Vec<Accesses>,
    /// From the removal of a GPU whose open has failed, and which is held open, to its end.
    removal_ms: u64,
}

/// Text of a kernel message; empty for other records.
fn text(record: &Record) -> &str {
    record
        .fields
        .get("text")
        .filter(|_| record.kind == Kind::Kmsg)
        .and_then(|text| text.as_str())
        .unwrap_or_default()
}

/// Lines of the driver in the kernel's log.
fn driver_lines(booted: &Booted) -> Vec<String> {
    let lines = booted
        .receiver
        .records()
        .into_iter()
        .map(|r| text(&r).to_string());
    lines
        .filter(|t| t.starts_with("NVRM: ") || t.starts_with("nvidia-nvlink: "))
        .collect()
}

/// From the end of one action of the script to the end of another, or to the agent's line of that
/// name.
fn between(booted: &Booted, from: &str, to: &str) -> Result<u64> {
    let done = |what: &str| {
        booted.agent("script", |l| {
            format!("{}>{}", l.get("when"), l.get("did")) == what
        })
    };
    let (start, end) = (
        done(from)?,
        if to.contains('>') {
            done(to)?
        } else {
            booted.agent(to, |_| true)?
        },
    );
    ensure!(
        start.get("error").is_empty() && end.get("error").is_empty(),
        "{start:?} {end:?}"
    );
    Ok(end.realtime_ns()?.saturating_sub(start.realtime_ns()?) / 1_000_000)
}

/// A removal has nobody to wait for: no file has the GPU open.
fn removed_silently(lines: &[String]) -> Result<()> {
    let complaint = lines
        .iter()
        .find(|l| l.contains("non-zero usage count") || l.contains("Continuing with GPU removal"));
    ensure!(complaint.is_none(), "{complaint:?}");
    Ok(())
}

fn output_of(guest: Guest, context: &TestContext, name: &str) -> Result<DriverOutput> {
    let script = "testagent.guest=script \
        testagent.script=settled>driver+counters+config+information+config+remove:0";
    let words = format!(
        "fakepci.gpus=4 fakepci.no_msix=2 fakepci.bar_missing=3 gpuinit.bind=pipelined {script}"
    );
    let booted = guest.append(&words).boot(context, name)?;
    let removal_ms = between(&booted, "settled>config", "removed")?;
    let mut files = Vec::new();
    let mut devices = BTreeSet::new();
    for line in booted
        .console
        .agent_lines()
        .iter()
        .filter(|l| l.get("msg") == "file")
    {
        let (path, text) = (line.get("path").to_string(), line.get("text"));
        if path == "/proc/devices" {
            let names = text
                .lines()
                .filter_map(|l| l.split_whitespace().nth(1))
                .filter(|name| name.starts_with("nvidia"));
            devices = names.map(str::to_string).collect();
        } else if path.starts_with("/proc/driver/nvidia/") && !path.ends_with("/sim") {
            let keys = text
                .lines()
                .map(|l| l.split_once(':').map_or(l, |(key, _)| key).to_string())
                .collect();
            files.push((path, keys));
        }
    }
    let reports = reports(&booted, 2)?;
    let look = |(before, after): (&Accesses, &Accesses)| Accesses {
        reads: after.reads - before.reads,
        writes: after.writes - before.writes,
        enables: after.enables - before.enables,
    };
    let looks = reports[0].iter().zip(&reports[1]).map(look).collect();
    let lines = driver_lines(&booted);
    removed_silently(&lines).with_context(|| name.to_string())?;
    Ok(DriverOutput {
        files,
        devices,
        lines,
        looks,
        removal_ms,
    })
}

/// A line without what differs from boot to boot, from one driver to the other, and from one line
/// of its source to another: its digits.
fn shape(line: &str) -> String {
    let line = Arch::ALL
        .iter()
        .find_map(|arch| line.split_once(&format!("for {arch}")))
        .map_or(line, |(before, _)| before);
    line.chars().filter(|c| !c.is_ascii_digit()).collect()
}

/// One script, both drivers.
fn same_words(context: &TestContext, driver: &RealDriver) -> Result<Outcome> {
    let real = output_of(Guest::new().real_driver(driver), context, "real")?;
    // Without firmware, as the real one here.
    let simulated = output_of(
        Guest::new().append("nvidia.firmware=1"),
        context,
        "simulated",
    )?;
    for (path, keys) in &real.files {
        let Some((_, ours)) = simulated.files.iter().find(|(p, _)| p == path) else {
            // Texts for people, and files of features that the simulator does not have.
            ensure!(
                ["README", "suspend", "suspend_depth"]
                    .iter()
                    .any(|name| path.ends_with(name)),
                "the simulator has no {path}"
            );
            continue;
        };
        ensure!(
            keys == ours || path.ends_with("/version"),
            "{path}: NVIDIA's has {keys:?}, the simulator's {ours:?}"
        );
    }
    for (path, _) in &simulated.files {
        ensure!(
            real.files.iter().any(|(p, _)| p == path),
            "NVIDIA's driver has no {path}"
        );
    }
    // The unified memory module is not built with the real one.
    let devices: BTreeSet<_> = simulated
        .devices
        .iter()
        .filter(|name| *name != "nvidia-uvm")
        .cloned()
        .collect();
    ensure!(
        real.devices == devices && devices.contains("nvidia-nvlink"),
        "NVIDIA's has {:?}, the simulator's {devices:?}",
        real.devices
    );
    let shapes = |words: &DriverOutput| {
        words
            .lines
            .iter()
            .map(|l| shape(l))
            .collect::<BTreeSet<_>>()
    };
    let (said, ours) = (shapes(&real), shapes(&simulated));
    ensure!(
        said == ours,
        "only NVIDIA's driver or only the simulator says: {:#?}",
        said.symmetric_difference(&ours).collect::<Vec<_>>()
    );
    for words in [
        "nvidia-nvlink: Nvlink Core is being initialized, major device number ",
        "NVRM: The NVIDIA probe routine was not called for 3 device(s).",
        &format!(
            "NVRM: loading NVIDIA UNIX Open Kernel Module for {}",
            context.arch
        ),
        "NVRM: Can't find an IRQ for your NVIDIA card!",
        "NVRM: This PCI I/O region assigned to your NVIDIA device is invalid: BAR0 is 0M @ 0x0 \
        (PCI:0001:00:03.0)",
        "NVRM: GPU 0001:00:00.0: RmInitAdapter failed! (0x61:0x56:",
        "NVRM: GPU 0001:00:00.0: rm_init_adapter failed, device minor number 0",
    ] {
        for (whose, lines) in [
            ("NVIDIA's driver", &real.lines),
            ("the simulator", &simulated.lines),
        ] {
            ensure!(
                lines.iter().any(|l| l.starts_with(words)),
                "{whose} does not say {words:?}: {lines:#?}"
            );
        }
    }
    ensure!(
        real.looks == simulated.looks && real.looks[0].reads > 0,
        "a look: NVIDIA's {:?}, the simulator's {:?}",
        real.looks,
        simulated.looks
    );
    let real_waits = waits_of(with_firmware(driver)?, context, "real-waits")?;
    let boots = "nvidia.init_fail=0,1,2 nvidia.s1_ms=300 nvidia.s2_ms=2000";
    let simulated_waits = waits_of(Guest::new().append(boots), context, "simulated-waits")?;
    never_answers(Guest::new().real_driver(driver), context, "real-lost")?;
    never_answers(
        Guest::new().append("nvidia.firmware=1"),
        context,
        "simulated-lost",
    )?;
    Ok(Outcome::Measured(format!(
        "NVIDIA's driver and the simulator: removal after a failed open {} and {} ms; beside an \
        initialisation of 4 s and of 2 s a look at \
         another GPU takes {} and {} ms, a removal of the one that is initialised {} and {} ms",
        real.removal_ms,
        simulated.removal_ms,
        real_waits.look_ms,
        simulated_waits.look_ms,
        real_waits.removal_ms,
        simulated_waits.removal_ms
    )))
}

/// How long things take while a GPU is initialised under the resource manager's lock, in vain and
/// for more than a second.
struct Waits {
    look_ms: u64,
    removal_ms: u64,
}

fn waits_of(guest: Guest, context: &TestContext, name: &str) -> Result<Waits> {
    // Either of two begins; the third comes later, and is last.
    let script = "gpu.init!begin>sleep:300+information;gpu.failed>plug:2;gpu.init!begin/2>\
        sleep:300+remove:2";
    let words = format!(
        "fakepci.gpus=3 fakepci.absent=2 gpuinit.relaxed=off testagent.guest=script \
        testagent.script={script}"
    );
    let booted = guest.append(&words).boot(context, name)?;
    // Whoever asks for any GPU's information waits for that lock.
    let look_ms = between(
        &booted,
        "gpu.init!begin>sleep:300",
        "gpu.init!begin>information",
    )?;
    // A removal waits for the open that is under way, and when that fails for nobody else.
    let removal_ms = between(&booted, "gpu.init!begin/2>sleep:300", "removed")?;
    ensure!(
        look_ms > 1000 && removal_ms > 1000,
        "{name}: a look took {look_ms} ms, a removal {removal_ms} ms"
    );
    booted.record("removed", |r| r.name == names::GPU_REMOVED)?;
    // The kernel's messages have a reader of their own, which may be later than that.
    booted.record("the failed initialisation", |r| {
        text(r).starts_with("NVRM: GPU 0001:00:02.0: RmInitAdapter failed! (0x62:0x65:")
    })?;
    removed_silently(&driver_lines(&booted)).with_context(|| name.to_string())?;
    Ok(Waits {
        look_ms,
        removal_ms,
    })
}

/// A look at a GPU that never came up and has fallen off the bus: the driver walks its list of
/// capabilities for ever.
fn never_answers(guest: Guest, context: &TestContext, name: &str) -> Result<()> {
    // The loss happens some time after it was asked for.
    let words = "fakepci.gpus=2 testagent.guest=script \
        testagent.script=settled>information+lose:0+sleep:500+information";
    let booted = guest.append(words).boot(context, name)?;
    let answered = |l: &AgentLine| l.get("did") == "information";
    // The first look, at a GPU that is there, takes nothing like this.
    booted.agent("script", answered)?;
    booted.agent("script", |l| l.get("did") == "sleep:500")?;
    // A sleep as proof, kept: no event follows a look that never returns. The first look takes
    // milliseconds.
    std::thread::sleep(Duration::from_secs(3));
    let answers = booted
        .console
        .agent_lines()
        .into_iter()
        .filter(answered)
        .count();
    ensure!(answers == 1, "{name}: the information of a lost GPU came");
    Ok(())
}
