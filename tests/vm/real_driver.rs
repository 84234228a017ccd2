//! NVIDIA's own open kernel module, on functions without a GPU behind them: the second judge, which no author of the simulator has understood wrongly.
//!
//! It binds, its initialisation goes as far as booting the GPU's own processor, and fails with the driver's own words; how far it comes is in the hands
//! of a few registers (tests/simulator/fakepci-bars.c). What cannot be seen here is a GPU that works.

use super::harness::{Booted, Guest, Outcome, RealDriver, TestContext, VmTest, named};
use anyhow::{Context, Result, ensure};
use kata_gpu_init::events::names;
use kata_gpu_init::events::record::{Kind, Record};

pub const TESTS: &[VmTest] = &[
    VmTest { name: "real_driver_every_strategy_binds_all_and_the_spec_has_its_minors", run: |c| with_driver(c, strategies) },
    VmTest { name: "real_driver_failures_have_their_reasons_and_its_words", run: |c| with_driver(c, failures) },
    VmTest { name: "real_driver_loses_a_gpu_before_it_initialises", run: |c| with_driver(c, lost) },
    VmTest { name: "real_driver_lets_a_gpu_go_and_takes_it_back", run: |c| with_driver(c, unplugged) },
    VmTest { name: "real_driver_alone_makes_every_config_access", run: |c| with_driver(c, config_accesses) },
    VmTest { name: "real_driver_initialisations_overlap", run: |c| with_driver(c, overlap) },
    VmTest { name: "real_driver_survives_a_killed_worker_with_every_gpu_open", run: |c| with_driver(c, killed) },
    VmTest { name: "real_driver_and_simulator_say_the_same", run: |c| with_driver(c, same_words) },
];

/// The tests of this file need a module that is built from packages which cannot be had everywhere.
fn with_driver(context: &TestContext, test: fn(&TestContext, &RealDriver) -> Result<Outcome>) -> Result<Outcome> {
    match RealDriver::find(context)? {
        Some(driver) => test(context, &driver),
        None => {
            ensure!(
                std::env::var_os("REQUIRE_REAL_DRIVER").is_none(),
                "target/real-driver/nvidia.ko is missing, and REQUIRE_REAL_DRIVER is set"
            );
            let reason = "target/real-driver/nvidia.ko is not there: tests/real-driver/build makes it where Debian's packages can be had";
            Ok(Outcome::Skipped(reason.into()))
        }
    }
}

/// With the GSP's firmware: initialisations then take seconds, until the driver gives up waiting for a processor that is not there.
fn with_firmware(driver: &RealDriver) -> Result<Guest> {
    let (path, bytes) = driver.firmware()?;
    Ok(Guest::new().real_driver(driver).file(&path, &bytes))
}

fn strategies(context: &TestContext, driver: &RealDriver) -> Result<Outcome> {
    let containers: Vec<String> = (0..8).map(|k| format!("c{k}:{k}")).collect();
    let mut minors_seen = Vec::new();
    for bind in ["insmod", "pipelined", "concurrent"] {
        let script = "testagent.guest=script testagent.script=gpu.published/7>sleep:1000+overrides";
        let words = format!("gpuinit.bind={bind} testagent.containers={} {script}", containers.join(";"));
        let booted = with_firmware(driver)?.append(&words).boot(context, bind)?;
        let nodes = (0..8).map(|k| Ok(booted.created(&format!("c{k}"))?.get("nodes").to_string())).collect::<Result<Vec<_>>>()?;
        let records = booted.receiver.records();
        let bound = named(&records, Kind::Event, names::GPU_BOUND);
        ensure!(bound.len() == 8, "{bind}: {} GPUs are bound", bound.len());
        let mut minors = vec![u64::MAX; 8];
        for r in &bound {
            let (index, minor) = (r.fields["index"].as_u64().context("no index")?, r.fields["minor"].as_u64().context("no minor")?);
            // Names in PCI order, whatever the minors.
            ensure!(r.gpu.is_some_and(|g| g.to_string() == format!("0001:00:{index:02x}.0")), "{bind}: {r:?}");
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
            overrides.get("all").matches("=(null)").count() >= 8 && !overrides.get("all").contains("held-back"),
            "{bind}: {overrides:?}"
        );
        let mut sorted = minors.clone();
        sorted.sort_unstable();
        ensure!(sorted == [0, 1, 2, 3, 4, 5, 6, 7], "{bind}: minors {minors:?}");
        minors_seen.push(format!("{bind} {minors:?}"));
    }
    Ok(Outcome::Measured(format!("minors in PCI order: {}", minors_seen.join(", "))))
}

/// The failure of one GPU.
fn failure(records: &[Record], index: u64) -> Result<Record> {
    named(records, Kind::Event, names::GPU_FAILED)
        .into_iter()
        .find(|r| r.fields["index"].as_u64() == Some(index))
        .cloned()
        .with_context(|| format!("GPU {index} has not failed"))
}

/// What must be told of a failure.
struct Wanted {
    step: &'static str,
    reason: &'static str,
    words: &'static str,
}

fn wanted(step: &'static str, reason: &'static str, words: &'static str) -> Wanted {
    Wanted { step, reason, words }
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
    ensure!(error.contains("the driver says: ") && error.contains(wanted.words), "GPU {index}: {:?} is not in: {error}", wanted.words);
    ensure!(!error.contains("\\x0a") && failed.fields.contains_key("cure"), "GPU {index}: {error}");
    Ok(())
}

fn judge(booted: &Booted, wanted: &[Wanted]) -> Result<()> {
    ensure!(booted.settled()? == (0, wanted.len() as u64), "{:?}", booted.settled()?);
    let records = booted.receiver.records();
    wanted.iter().enumerate().try_for_each(|(index, wanted)| judge_one(&records, index as u64, wanted))
}

const NO_FIRMWARE: Wanted = Wanted { step: "init", reason: "firmware-missing", words: "Direct firmware load for nvidia/" };

fn failures(context: &TestContext, driver: &RealDriver) -> Result<Outcome> {
    // By slot: a GPU as it should be, off the bus, without BAR 0, of no chip, without interrupts, newer than the driver.
    let chips = "fakepci.chip=0x180a1000,0x180a1000,0x180a1000,0,0x180a1000,0x1a0a1000,0x180a1000";
    let faults = format!("fakepci.off_bus=1 fakepci.bar_missing=2 {chips} fakepci.no_msix=4");
    let every = || {
        vec![
            NO_FIRMWARE,
            wanted("probe", "off-the-bus", "has fallen off the bus and is not responding to commands"),
            wanted("probe", "bar-unassigned", "BAR0 is 0M @ 0x0"),
            wanted("probe", "unsupported-gpu", "does not include the required GPU System Processor (GSP)"),
            wanted("probe", "no-interrupt", "Can't find an IRQ"),
            wanted("probe", "unsupported-gpu", "is not supported by the NVIDIA 550."),
            NO_FIRMWARE,
        ]
    };
    // All probed by the load, and each by its own bind. The last one's BAR of 128 GiB has no address, which is the kernel's word and not the driver's; it
    // is told where the GPU is enabled: in the driver's probe, or ahead of it.
    for (bind, step) in [("insmod", "probe"), ("pipelined", "enable")] {
        let words = format!("fakepci.gpus=8 {faults} fakepci.bar_unassigned=7 gpuinit.bind={bind}");
        let script = "testagent.guest=script testagent.script=settled>held";
        let mut booted = Guest::new().real_driver(driver).append(&format!("{words} {script}")).boot(context, bind)?;
        let mut every = every();
        every.push(wanted(step, "bar-unassigned", "BAR 2 [mem size 0x2000000000 64bit pref]: not assigned"));
        judge(&booted, &every)?;
        // What the wait for a non-blocking open answers is in the stream.
        let records = booted.receiver.records();
        let init = named(&records, Kind::End, names::GPU_INIT);
        ensure!(init.len() == 2 && init.iter().all(|r| r.fields["rc"] == -5 && r.fields["status"] == 0x59), "{bind}: {init:?}");
        // A GPU whose initialisation failed stays open all the same: nothing of ours closes one.
        let held = booted.agent("held", |l| l.get("process") == "gpuinit-keeper")?;
        ensure!(held.get("nodes").split(' ').count() == 2, "{bind}: {held:?}");
        booted.still_runs()?;
    }
    let dead = with_firmware(driver)?.append("fakepci.gpus=1 fakepci.fsp_dead=0").boot(context, "fsp")?;
    judge(&dead, &[wanted("init", "firmware-boot", "(0x62:0x65:")])?;
    let xid = dead.event(names::GPU_XID)?;
    ensure!(xid.fields["xid"] == 143, "{xid:?}");
    Ok(Outcome::Passed)
}

fn lost(context: &TestContext, driver: &RealDriver) -> Result<Outcome> {
    // GPU 1 is plugged in and bound while GPU 0 initialises, which takes seconds, and is gone when its own turn comes.
    let script = "testagent.guest=script testagent.script=gpu.init!begin/0>plug:1;gpu.bound/1>lose:1;settled>held";
    let words = format!("fakepci.gpus=2 fakepci.absent=1 gpuinit.init=serial {script}");
    let booted = with_firmware(driver)?.append(&words).boot(context, "lost")?;
    // GPU 1's turn begins with the end of GPU 0's, so either can be told first.
    let failed_of = |index: u64| booted.record("failure", move |r| r.name == names::GPU_FAILED && r.fields["index"] == index);
    let (failed, _) = (failed_of(1)?, failed_of(0)?);
    let records = booted.receiver.records();
    // The driver finds out when it turns interrupts on, and does not speak of the bus.
    judge_one(&records, 1, &wanted("init", "no-interrupt", "No interrupts of any type are available"))?;
    let end = named(&records, Kind::End, names::GPU_INIT).into_iter().find(|r| r.gpu == failed.gpu).context("no end")?;
    ensure!(end.fields["rc"] == -5 && end.fields["status"] == 0x40, "{end:?}");
    judge_one(&records, 0, &wanted("init", "firmware-boot", "(0x62:0x65:"))?;
    Ok(Outcome::Passed)
}

/// A report of /proc/fakepci: `(reads, writes, enables)` of each function.
fn accesses(report: &str) -> Result<Vec<[u64; 3]>> {
    let number = |line: &str, key: &str| -> Result<u64> {
        let value = line.split(' ').find_map(|word| word.strip_prefix(key)).with_context(|| format!("no {key} in {line:?}"))?;
        Ok(value.parse()?)
    };
    report.split("; ").map(|line| Ok([number(line, "reads=")?, number(line, "writes=")?, number(line, "enables=")?])).collect()
}

/// The reports of config accesses so far, in order.
fn reports(booted: &Booted) -> Result<Vec<Vec<[u64; 3]>>> {
    booted.console.agent_lines().iter().filter(|l| l.get("msg") == "config").map(|l| accesses(l.get("all"))).collect()
}

fn unplugged(context: &TestContext, driver: &RealDriver) -> Result<Outcome> {
    // The one that goes answers with ones before the driver hears of it.
    let script = "settled>config+unplug:1;gpu.removed>held+plug:1;gpu.failed/1>held+config+overrides";
    let words = format!("fakepci.gpus=3 testagent.guest=script testagent.script={script}");
    let mut booted = Guest::new().real_driver(driver).append(&words).boot(context, "unplugged")?;
    booted.agent("script", |l| l.get("did") == "overrides")?;
    let held: Vec<String> = booted
        .console
        .agent_lines()
        .iter()
        .filter(|l| l.get("msg") == "held" && l.get("process") == "gpuinit-keeper")
        .map(|l| l.get("nodes").to_string())
        .collect();
    // The minor that has become free is the one it gets again.
    ensure!(held == ["/dev/nvidia0 /dev/nvidia2", "/dev/nvidia0 /dev/nvidia1 /dev/nvidia2"], "the keeper has {held:?}");
    let records = booted.receiver.records();
    let removed = named(&records, Kind::Event, names::GPU_REMOVED);
    ensure!(removed.len() == 1 && removed[0].gpu.is_some_and(|g| g.to_string() == "0001:00:01.0"), "{removed:?}");
    let bound = named(&records, Kind::Event, names::GPU_BOUND);
    let again = bound.iter().find(|r| r.seq > removed[0].seq).context("not bound again")?;
    ensure!(bound.len() == 4 && again.fields["index"] == 1 && again.fields["minor"] == 1, "{bound:?}");
    let reports = reports(&booted)?;
    let (before, after) = (&reports[0], &reports[1]);
    // The host maps the BARs of a GPU that comes once, and of the others not again.
    ensure!(after[0] == before[0] && after[2] == before[2], "others were accessed: {before:?} {after:?}");
    ensure!(before[1][2] == 1 && after[1][2] == 2, "enabled more than once: {before:?} {after:?}");
    let complaint = |r: &&Record| {
        r.kind == Kind::Kmsg && r.fields["text"].as_str().is_some_and(|t| t.contains("WARNING") || t.contains("non-zero usage"))
    };
    ensure!(!records.iter().any(|r| complaint(&r)), "{:?}", records.iter().find(complaint));
    booted.still_runs().map(|()| Outcome::Passed)
}

/// The functions' config accesses when all is over, without our init (`None`) or with it.
fn all_accesses(context: &TestContext, driver: &RealDriver, bind: Option<&str>) -> Result<Vec<Vec<[u64; 3]>>> {
    let words = match bind {
        // What has to be done at the least: insmod, the look at each minor, the opens.
        None => "hardware.init=/usr/bin/kata-agent testagent.guest=script testagent.script=now>load+config+information+config+open:0+open:1+open:2+config".to_string(),
        Some(bind) => format!("gpuinit.bind={bind} testagent.guest=script testagent.script=settled>config"),
    };
    let booted = Guest::new().real_driver(driver).append(&format!("fakepci.gpus=3 {words}")).boot(context, bind.unwrap_or("alone"))?;
    let wanted = if bind.is_some() { 1 } else { 3 };
    booted.agent("config", |_| reports(&booted).is_ok_and(|r| r.len() == wanted))?;
    reports(&booted)
}

fn config_accesses(context: &TestContext, driver: &RealDriver) -> Result<Outcome> {
    let alone = all_accesses(context, driver, None)?;
    let (loaded, looked, all) = (&alone[0], &alone[1], &alone[2]);
    // The driver walks the capabilities whenever somebody reads a GPU's information file: that much a look at the minor costs.
    let look = looked[0][0] - loaded[0][0];
    ensure!(look > 0 && looked[0][1..] == loaded[0][1..], "{loaded:?} {looked:?}");
    for bind in ["insmod", "pipelined", "concurrent"] {
        let ours = all_accesses(context, driver, Some(bind))?.pop().context("no report")?;
        for (ours, [reads, writes, enables]) in ours.iter().zip(all) {
            ensure!(ours == &[*reads, *writes, *enables], "{bind}: {ours:?}, the driver alone {all:?}, a look {look}");
        }
    }
    Ok(Outcome::Measured(format!(
        "config accesses of a GPU: {} reads, {} writes; a look at its minor is {look} of them",
        all[0][0], all[0][1]
    )))
}

/// From the first initialisation's begin to the last one's end, in ms. All must have begun before one ends, unless the init holds them back.
fn span(context: &TestContext, driver: &RealDriver, gpus: u64, words: &str) -> Result<u64> {
    let words = format!("fakepci.gpus={gpus} {words}");
    let booted = with_firmware(driver)?.append(&words).boot(context, &format!("{gpus}"))?;
    ensure!(booted.settled()? == (0, gpus), "{:?}", booted.settled()?);
    let records = booted.receiver.records();
    let begin = named(&records, Kind::Begin, names::GPU_INIT).iter().map(|r| r.boottime_ns).min().context("no initialisation")?;
    let end = named(&records, Kind::End, names::GPU_INIT).iter().map(|r| r.boottime_ns).max().context("no initialisation")?;
    let last_begin = named(&records, Kind::Begin, names::GPU_INIT).iter().map(|r| r.boottime_ns).max().unwrap_or_default();
    let first_end = named(&records, Kind::End, names::GPU_INIT).iter().map(|r| r.boottime_ns).min().unwrap_or_default();
    ensure!(last_begin < first_end || words.contains("relaxed=off"), "an initialisation waited for another one to end");
    Ok((end - begin) / 1_000_000)
}

fn overlap(context: &TestContext, driver: &RealDriver) -> Result<Outcome> {
    let one = span(context, driver, 1, "")?;
    let three = span(context, driver, 3, "")?;
    ensure!(three * 10 < one * 3 * 8, "three initialisations take {three} ms, one takes {one} ms: they do not overlap");
    // The driver's own switch, through ours: the same three in a row.
    let serial = span(context, driver, 3, "gpuinit.relaxed=off")?;
    ensure!(three * 10 < serial * 8, "with the lock kept three take {serial} ms, with the lock released {three} ms");
    Ok(Outcome::Measured(format!(
        "GSP boots that time out: one {one} ms, three at once {three} ms, three with gpuinit.relaxed=off {serial} ms"
    )))
}

fn killed(context: &TestContext, driver: &RealDriver) -> Result<Outcome> {
    // Killed while the driver initialises: the wait is left, the initialisations go on, and their outcome reaches the next worker.
    let script = "testagent.guest=script testagent.script=gpu.init!begin/1>kill;settled>held";
    let booted = with_firmware(driver)?.append(&format!("fakepci.gpus=2 {script}")).boot(context, "killed")?;
    judge(&booted, &[wanted("init", "firmware-boot", "(0x62:"), wanted("init", "firmware-boot", "(0x62:")])?;
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
            r.kind == Kind::Kmsg && r.fields["text"].as_str().is_some_and(|t| t.contains(&format!("GPU {gpu}: RmInitAdapter failed!")))
        });
        ensure!(said.count() == 1, "GPU {gpu} was initialised more than once");
    }
    Ok(Outcome::Passed)
}

/// What one guest's driver has in /proc and says, without what differs from boot to boot.
struct Words {
    /// Path, and the lines' keys (what stands before a colon, or the whole line).
    files: Vec<(String, Vec<String>)>,
    devices: Vec<String>,
    lines: Vec<String>,
}

fn words_of(guest: Guest, context: &TestContext, name: &str) -> Result<Words> {
    let script = "testagent.guest=script testagent.script=settled>driver+counters";
    let words = format!("fakepci.gpus=4 fakepci.no_msix=2 fakepci.bar_missing=3 gpuinit.bind=pipelined {script}");
    let booted = guest.append(&words).boot(context, name)?;
    booted.agent("script", |l| l.get("did") == "counters")?;
    let mut files = Vec::new();
    let mut devices = Vec::new();
    for line in booted.console.agent_lines().iter().filter(|l| l.get("msg") == "file") {
        let (path, text) = (line.get("path").to_string(), line.get("text"));
        if path == "/proc/devices" {
            devices =
                text.lines().filter(|l| l.contains("nvidia")).filter_map(|l| l.split_whitespace().nth(1)).map(str::to_string).collect();
        } else if path.starts_with("/proc/driver/nvidia/") && !path.ends_with("/sim") {
            let keys = text.lines().map(|l| l.split_once(':').map_or(l, |(key, _)| key).to_string()).collect();
            files.push((path, keys));
        }
    }
    let records = booted.receiver.records();
    // Digits stand for digits: positions, codes' lines and versions differ.
    let lines = records
        .iter()
        .filter(|r| r.kind == Kind::Kmsg && r.fields["text"].as_str().is_some_and(|t| t.starts_with("NVRM: ")))
        .map(|r| r.fields["text"].as_str().unwrap_or_default().to_string())
        .collect();
    Ok(Words { files, devices, lines })
}

/// One script, both drivers.
fn same_words(context: &TestContext, driver: &RealDriver) -> Result<Outcome> {
    let real = words_of(Guest::new().real_driver(driver), context, "real")?;
    // Without firmware, as the real one here.
    let simulated = words_of(Guest::new().append("nvidia.firmware=1"), context, "simulated")?;
    for (path, keys) in &real.files {
        let Some((_, ours)) = simulated.files.iter().find(|(p, _)| p == path) else {
            // Texts for people, and files of features that the simulator does not have.
            ensure!(["README", "suspend", "suspend_depth"].iter().any(|name| path.ends_with(name)), "the simulator has no {path}");
            continue;
        };
        ensure!(keys == ours || path.ends_with("/version"), "{path}: NVIDIA's has {keys:?}, the simulator's {ours:?}");
    }
    for (path, _) in &simulated.files {
        ensure!(real.files.iter().any(|(p, _)| p == path), "NVIDIA's driver has no {path}");
    }
    for device in ["nvidia", "nvidiactl", "nvidia-caps"] {
        ensure!(
            real.devices.iter().any(|d| d == device) && simulated.devices.iter().any(|d| d == device),
            "{device}: {:?} {:?}",
            real.devices,
            simulated.devices
        );
    }
    for words in [
        "NVRM: The NVIDIA probe routine was not called for 3 device(s).",
        "NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64",
        "NVRM: Can't find an IRQ for your NVIDIA card!",
        "NVRM: This PCI I/O region assigned to your NVIDIA device is invalid: BAR0 is 0M @ 0x0 (PCI:0001:00:03.0)",
        "NVRM: GPU 0001:00:00.0: RmInitAdapter failed! (0x61:0x56:",
        "NVRM: GPU 0001:00:00.0: rm_init_adapter failed, device minor number 0",
    ] {
        for (whose, lines) in [("NVIDIA's driver", &real.lines), ("the simulator", &simulated.lines)] {
            ensure!(lines.iter().any(|l| l.starts_with(words)), "{whose} does not say {words:?}: {lines:#?}");
        }
    }
    Ok(Outcome::Passed)
}
