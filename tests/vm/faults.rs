//! Faults: each costs what it must and nothing else, and is reported with its reason.

use super::harness::{Booted, Guest, Outcome, TestContext, VmTest, named};
use super::hot_plug::leads;
use anyhow::{Context, Result, bail, ensure};
use kata_gpu_wire::names;
use kata_gpu_wire::record::{Kind, Record};
use std::time::Duration;

pub const TESTS: &[VmTest] = &[
    VmTest {
        name: "a_gpu_that_fails_its_probe_leaves_and_the_others_stay",
        run: |c| one_fails(c, "probe_fail", 2, "off-the-bus"),
    },
    VmTest {
        name: "a_first_gpu_that_fails_its_probe_does_not_fail_the_load",
        run: |c| one_fails(c, "probe_fail", 0, "off-the-bus"),
    },
    VmTest {
        name: "a_gpu_that_fails_to_initialise_leaves_and_the_others_stay",
        run: |c| one_fails(c, "init_fail", 3, "firmware-boot"),
    },
    VmTest {
        name: "a_gpu_that_hangs_early_keeps_nobody_waiting_for_long",
        run: one_hangs_early,
    },
    VmTest {
        name: "without_a_console_the_guest_boots",
        run: no_console,
    },
    VmTest {
        name: "a_gpu_that_hangs_is_reported_and_never_closed",
        run: one_hangs,
    },
    VmTest {
        name: "no_gpu_is_no_error_unless_gpus_were_expected",
        run: no_gpu,
    },
    VmTest {
        name: "a_missing_driver_fails_every_gpu_with_the_cure",
        run: no_driver,
    },
    VmTest {
        name: "a_refused_load_fails_every_gpu_with_the_reason",
        run: load_fails,
    },
    VmTest {
        name: "a_later_gpu_gets_the_load_after_all_early_ones_failed",
        run: all_fail_early,
    },
    VmTest {
        name: "a_load_that_fails_fails_no_gpu_that_was_bound_meanwhile",
        run: bound_meanwhile,
    },
    VmTest {
        name: "a_gpu_plugged_in_after_a_failed_load_gets_a_load_of_its_own",
        run: load_again,
    },
    VmTest {
        name: "a_full_run_delays_the_spec_and_loses_no_gpu",
        run: full_run,
    },
    VmTest {
        name: "a_missing_uvm_is_an_error_event_not_silence",
        run: no_uvm,
    },
    VmTest {
        name: "without_vsock_the_guest_boots_all_the_same",
        run: no_vsock,
    },
    VmTest {
        name: "a_missing_agent_powers_off_with_its_reason_everywhere",
        run: no_agent,
    },
    VmTest {
        name: "bad_parameters_are_reported_and_change_nothing",
        run: bad_parameters,
    },
    VmTest {
        name: "a_bare_word_on_the_command_line_makes_pid_1_no_hook",
        run: bare_word,
    },
];

/// The failure of a GPU: its sentence has the GPU, what failed, and the driver's words.
fn failure(booted: &Booted, index: usize, reason: &str) -> Result<Record> {
    let failed = booted.record("gpu.failed", |r| {
        r.name == names::GPU_FAILED && r.fields.get("index") == Some(&index.into())
    })?;
    let error = failed.error.clone().unwrap_or_default();
    ensure!(
        failed.fields["reason"] == reason,
        "reason {}, wanted {reason}: {error}",
        failed.fields["reason"]
    );
    let address = failed.gpu.context("gpu.failed names no GPU")?.to_string();
    ensure!(
        error.contains(&address),
        "the error does not name {address}: {error}"
    );
    Ok(failed)
}

fn one_fails(context: &TestContext, fault: &str, index: usize, reason: &str) -> Result<Outcome> {
    let asked = if index == 0 { 1 } else { 0 };
    // The container with the failed GPU is asked for when its GPU has left: after its first tries
    // it must fail, not wait 100 s.
    let words =
        format!("nvidia.{fault}={index} testagent.containers=good:{asked};bad:{index};all:all");
    for bind in ["concurrent", "pipelined", "insmod"] {
        let mut booted = Guest::new()
            .append(&format!("{words} gpuinit.bind={bind}"))
            .boot(context, bind)?;
        let failed = failure(&booted, index, reason)?;
        let error = failed.error.unwrap_or_default();
        ensure!(
            error.contains("the driver logged: NVRM: "),
            "{bind}: the driver's words are missing: {error}"
        );
        ensure!(
            booted.settled()? == (7, 1),
            "{bind}: {:?}",
            booted.settled()?
        );
        booted.created("good")?;
        let all = booted.created("all")?;
        // Published as bound before its initialisation failed, it may have been handed out; probed
        // in vain, never.
        let gpus = all.get("nodes").matches("/dev/nvidia").count() - 3;
        ensure!(
            gpus == 7 || fault == "init_fail" && gpus == 8,
            "{bind}: all has {gpus} GPUs: {}",
            all.get("nodes")
        );
        if fault == "probe_fail" {
            let bad = booted.refused("bad")?;
            ensure!(
                bad.get("error").contains("do not exist"),
                "{bind}: {}",
                bad.get("error")
            );
        }
        let publications = booted.receiver.records();
        let last = named(&publications, Kind::End, names::CDI_PUBLISH)
            .last()
            .copied()
            .cloned()
            .context("no publication")?;
        ensure!(
            last.fields["failed"] == 1 && last.fields["ready"] == 7,
            "{bind}: last publication {:?}",
            last.fields
        );
        booted.still_runs()?;
    }
    Ok(Outcome::Passed)
}

fn one_hangs(context: &TestContext) -> Result<Outcome> {
    // The last one, after all others: a GPU that hangs holds its lock of the resource manager, and
    // one that comes after it waits for that.
    let words = "nvidia.init_hang=7 fakepci.enable_ms=120 gpuinit.init=serial \
        testagent.containers=good:6;all:all testagent.guest=counters";
    let mut booted = Guest::new().append(words).boot(context, "hang")?;
    booted.created("good")?;
    booted.created("all")?;
    // The first deadline reports, with what the kernel is doing for it, and kills nothing.
    let late = booted.record("gpu.late", |r| r.name == names::GPU_LATE)?;
    ensure!(
        late.fields["step"] == "initialisation" && late.fields["waited_ms"] == 10_000,
        "{:?}",
        late.fields
    );
    let stack = late.fields["stack"].as_str().unwrap_or_default();
    ensure!(
        stack.contains("nv_start_adapter") && stack.contains("nv_open_q: "),
        "stack: {stack}"
    );
    let records = booted.receiver.records();
    let usable = named(&records, Kind::Event, names::GPU_USABLE).len();
    ensure!(usable == 7, "{usable} GPUs are usable");
    ensure!(
        named(&records, Kind::Event, names::GPU_FAILED).is_empty(),
        "a GPU has failed"
    );
    let open: Vec<_> = named(&records, Kind::Begin, names::GPU_INIT)
        .into_iter()
        .filter(|b| {
            !records
                .iter()
                .any(|e| e.kind == Kind::End && e.span == b.span)
        })
        .collect();
    ensure!(
        open.len() == 1 && open[0].gpu == late.gpu,
        "open initialisations: {open:?}"
    );
    let counters = booted
        .console
        .agent_lines()
        .into_iter()
        .rfind(|l| l.get("msg") == "counters")
        .context("no counters")?;
    let closed = counters
        .get("all")
        .split_whitespace()
        .collect::<Vec<_>>()
        .windows(2)
        .filter(|w| w[0] == "closes:" && w[1] != "0")
        .count();
    ensure!(
        closed == 0 && counters.get("all").contains("closes: 0"),
        "something was closed: {}",
        counters.get("all")
    );
    booted.still_runs()?;
    Ok(Outcome::Passed)
}

/// On a slow host the next GPU's enabling waits until the one before is through its probe, but not
/// for ever.
fn one_hangs_early(context: &TestContext) -> Result<Outcome> {
    let words = "nvidia.information_hang=1 fakepci.enable_ms=300 testagent.containers=good:7";
    let booted = Guest::new().append(words).boot(context, "hang-early")?;
    booted.created("good")?;
    let held = booted.record("the lane's complaint", |r| {
        r.name == names::GPU_ENABLE && r.error.is_some()
    })?;
    ensure!(
        held.error
            .as_deref()
            .is_some_and(|e| e.contains("going on without waiting")),
        "{:?}",
        held.error
    );
    let late = booted.record("gpu.late", |r| r.name == names::GPU_LATE)?;
    ensure!(
        late.gpu == held.gpu && late.fields["step"] == "probe",
        "{late:?}"
    );
    booted.events(names::GPU_USABLE, 7)?;
    let complaints = booted
        .receiver
        .records()
        .iter()
        .filter(|r| r.name == names::GPU_ENABLE && r.error.is_some())
        .count();
    ensure!(
        complaints == 1,
        "the lane waited {complaints} times for one GPU"
    );
    Ok(Outcome::Passed)
}

/// The driver counts its GPUs when the load's only probe, GPU 0's, has failed. GPUs that are bound
/// between that and the end of the load do not count: it fails as a whole, which unbinds them.
fn bound_meanwhile(context: &TestContext) -> Result<Outcome> {
    let words = [
        "fakepci.gpus=4 nvidia.version=595.45.04 nvidia.NVreg_GpuInitOnProbe=1 \
        gpuinit.bind=concurrent",
        "nvidia.unsupported=0 nvidia.probe_ms=0,3,3,3 nvidia.judge_ms=1000 \
        testagent.containers=good:3",
    ];
    // A GPU that is bound before the count keeps the load from failing; which comes first, chance
    // decides.
    for boot in 0..8 {
        let booted = Guest::new()
            .append(&words.join(" "))
            .boot(context, &format!("bound-meanwhile-{boot}"))?;
        failure(&booted, 0, "unsupported-gpu")?;
        ensure!(booted.settled()? == (3, 1), "{:?}", booted.settled()?);
        booted.created("good")?;
        let records = booted.receiver.records();
        for (name, wanted) in [
            (names::GPU_FAILED, 1),
            (names::GPU_REMOVED, 0),
            (names::GPU_BOUND, 3),
        ] {
            let came = named(&records, Kind::Event, name);
            ensure!(came.len() == wanted, "{name}: {came:?}, wanted {wanted}");
        }
        let failed = named(&records, Kind::End, names::MODULE_LOAD)
            .into_iter()
            .find(|load| load.error.is_some());
        let binds = named(&records, Kind::Begin, names::GPU_BIND);
        if failed.is_some_and(|load| binds.iter().any(|bind| bind.seq < load.seq)) {
            return Ok(Outcome::Passed);
        }
    }
    bail!("in no boot a GPU was bound during a load that failed")
}

/// The kernel starts an init without descriptors then, and Rust's runtime ends a program that has
/// none and no /dev/null.
fn no_console(context: &TestContext) -> Result<Outcome> {
    let booted = Guest::new()
        .append("hardware.descriptors=none testagent.containers=all:all")
        .boot(context, "no-console")?;
    ensure!(booted.settled()? == (8, 0), "{:?}", booted.settled()?);
    booted.created("all")?;
    let booted = Guest::new()
        .without_console()
        .append("fakepci.gpus=2")
        .boot(context, "no-port")?;
    ensure!(booted.settled()? == (2, 0), "{:?}", booted.settled()?);
    let console = booted.console.text();
    ensure!(console.is_empty(), "a console is there: {console:?}");
    Ok(Outcome::Passed)
}

fn no_gpu(context: &TestContext) -> Result<Outcome> {
    let booted = Guest::new()
        .append("fakepci.gpus=0 testagent.containers=plain:0 agent.cdi_timeout=2")
        .boot(context, "none")?;
    ensure!(booted.settled()? == (0, 0), "{:?}", booted.settled()?);
    // The kind is absent: a GPU that is plugged in later may still come, so the agent waits its
    // time.
    ensure!(
        booted
            .refused("plain")?
            .get("error")
            .contains("timeout of 2 seconds"),
        "wrong error"
    );
    let records = booted.receiver.records();
    ensure!(
        !records.iter().any(|r| r.error.is_some()),
        "an error without a fault: {:?}",
        records.iter().find(|r| r.error.is_some())
    );
    ensure!(
        named(&records, Kind::Begin, names::MODULE_LOAD).is_empty(),
        "the driver was loaded for no GPU"
    );
    ensure!(
        named(&records, Kind::Event, names::LOCKDOWN).is_empty(),
        "one that comes later needs the driver"
    );
    let booted = Guest::new()
        .append("fakepci.gpus=0 gpuinit.gpus=0")
        .boot(context, "never")?;
    booted.event(names::LOCKDOWN)?;
    let booted = Guest::new()
        .append("fakepci.gpus=2 gpuinit.gpus=8")
        .boot(context, "expected")?;
    let missing = booted.record("pci.scan error", |r| {
        r.name == names::PCI_SCAN && r.error.is_some()
    })?;
    ensure!(
        missing
            .error
            .as_deref()
            .is_some_and(|e| e.contains("gpuinit.gpus=8") && e.contains("has 2")),
        "{:?}",
        missing.error
    );
    ensure!(booted.settled()? == (2, 0), "{:?}", booted.settled()?);
    Ok(Outcome::Passed)
}

/// Path of a module in the initrd.
fn module(context: &TestContext, name: &str) -> Result<&'static str> {
    let version = std::fs::read_to_string(context.target.join("kernel/version"))?;
    Ok(Box::leak(
        format!("lib/modules/{}/{name}.ko", version.trim()).into_boxed_str(),
    ))
}

fn all_failed(booted: &mut Booted, reason: &str, words: &[&str]) -> Result<()> {
    ensure!(booted.settled()? == (0, 8), "{:?}", booted.settled()?);
    for index in 0..8 {
        let error = failure(booted, index, reason)?.error.unwrap_or_default();
        for word in words {
            ensure!(
                error.contains(word),
                "GPU {index}: {word:?} is not in: {error}"
            );
        }
    }
    // Asked for and gone for good: the agent says so at its next try instead of waiting.
    let refused = booted.refused("one")?;
    ensure!(
        refused.get("error").contains("do not exist"),
        "{}",
        refused.get("error")
    );
    booted.still_runs()
}

fn no_driver(context: &TestContext) -> Result<Outcome> {
    let mut booted = Guest::new()
        .without(module(context, "nvidia")?)
        .append("testagent.containers=one:0")
        .boot(context, "no-driver")?;
    all_failed(
        &mut booted,
        "driver-missing",
        &[
            "nvidia.ko",
            "No such file",
            "modules.dep is older than the modules",
        ],
    )?;
    Ok(Outcome::Passed)
}

fn load_fails(context: &TestContext) -> Result<Outcome> {
    // 5: EIO.
    let mut booted = Guest::new()
        .append("nvidia.load_fail=5 testagent.containers=one:0")
        .boot(context, "load-fails")?;
    all_failed(
        &mut booted,
        "driver-load-failed",
        &["load module nvidia", "EIO"],
    )?;
    Ok(Outcome::Passed)
}

fn all_fail_early(context: &TestContext) -> Result<Outcome> {
    let script = "testagent.guest=script testagent.script=settled>plug:2;gpu.usable/2>spec";
    let faults =
        "fakepci.gpus=3 fakepci.bar_unassigned=0,1 fakepci.absent=2 gpuinit.bind=pipelined";
    let mut booted = Guest::new()
        .append(&format!("{faults} {script}"))
        .boot(context, "early")?;
    ensure!(booted.settled()? == (0, 2), "{:?}", booted.settled()?);
    failure(&booted, 0, "bar-unassigned")?;
    failure(&booted, 1, "bar-unassigned")?;
    let spec = booted.agent("spec", |l| l.get("file") == "nvidia.yaml")?;
    ensure!(leads(spec.get("text"))? == [(2, 0)], "{spec:?}");
    let again = booted.record("settled again", |r| {
        r.name == names::SETTLED && r.fields["usable"] == 1
    })?;
    ensure!(again.fields["failed"] == 2, "{again:?}");
    let locked = booted.event(names::LOCKDOWN)?;
    let records = booted.receiver.records();
    let settled = booted.event(names::SETTLED)?;
    let loads = named(&records, Kind::End, names::MODULE_LOAD);
    // A load that finds no GPU to probe fails, and locked out it could not be repeated.
    ensure!(
        !loads.is_empty()
            && loads
                .iter()
                .all(|l| settled.seq < l.seq && l.seq < locked.seq && l.error.is_none()),
        "{loads:?}"
    );
    booted.still_runs()?;
    Ok(Outcome::Passed)
}

fn load_again(context: &TestContext) -> Result<Outcome> {
    // The only GPU of the boot fails the load: another one comes, and the first one's failure is
    // not its own.
    let script = "testagent.guest=script testagent.script=settled>plug:1;gpu.usable/1>spec";
    let booted = Guest::new()
        .append(&format!(
            "fakepci.gpus=2 fakepci.absent=1 nvidia.probe_fail=0 {script}"
        ))
        .boot(context, "again")?;
    ensure!(booted.settled()? == (0, 1), "{:?}", booted.settled()?);
    let spec = booted.agent("spec", |l| l.get("file") == "nvidia.yaml")?;
    ensure!(
        leads(spec.get("text"))?.iter().map(|(gpu, _)| *gpu).eq([1]),
        "{spec:?}"
    );
    let again = booted.record("settled again", |r| {
        r.name == names::SETTLED && r.fields["usable"] == 1
    })?;
    ensure!(again.fields["failed"] == 1, "{again:?}");
    let locked = booted.event(names::LOCKDOWN)?;
    ensure!(locked.seq > again.seq, "{locked:?}");
    Ok(Outcome::Passed)
}

fn full_run(context: &TestContext) -> Result<Outcome> {
    // Full before the first GPU is bound, until after all are: the sleep is how long publications
    // fail. The container's start is the event that ends the test.
    let script = "gpu.found/3>fill;gpu.usable/3>sleep:800+empty";
    let words = format!(
        "fakepci.gpus=4 fakepci.enable_ms=200 testagent.guest=script testagent.script={script} \
        testagent.containers=all:all"
    );
    let booted = Guest::new().append(&words).boot(context, "full")?;
    let all = booted.created("all")?;
    ensure!(
        all.get("nodes").matches("/dev/nvidia").count() == 4 + 3,
        "{}",
        all.get("nodes")
    );
    ensure!(booted.settled()? == (4, 0), "{:?}", booted.settled()?);
    let records = booted.receiver.records();
    booted.agent("script", |l| {
        l.get("did") == "fill" && l.get("error").is_empty()
    })?;
    let failed = named(&records, Kind::End, names::CDI_PUBLISH)
        .into_iter()
        .filter(|r| r.error.is_some())
        .count();
    ensure!(
        failed == 1,
        "{failed} failures were reported, not the first of the series alone"
    );
    ensure!(
        named(&records, Kind::Event, names::GPU_PUBLISHED).len() == 4,
        "not all were reported as published"
    );
    Ok(Outcome::Passed)
}

fn no_uvm(context: &TestContext) -> Result<Outcome> {
    let booted = Guest::new()
        .without(module(context, "nvidia-uvm")?)
        .append("testagent.containers=all:all")
        .boot(context, "no-uvm")?;
    let error = booted.record("error about nvidia-uvm", |r| {
        r.name == names::MODULE_LOAD && r.kind == Kind::Event && r.error.is_some()
    })?;
    ensure!(
        error
            .error
            .as_deref()
            .is_some_and(|e| e.contains("nvidia_uvm") && e.contains("CUDA will not start")),
        "{:?}",
        error.error
    );
    let all = booted.created("all")?;
    ensure!(
        !all.get("nodes").contains("uvm") && all.get("nodes").contains("nvidiactl"),
        "{}",
        all.get("nodes")
    );
    Ok(Outcome::Passed)
}

fn no_vsock(context: &TestContext) -> Result<Outcome> {
    // GPUs alone of the guest's hardware: no virtio, no vsock.
    let version = std::fs::read_to_string(context.target.join("kernel/version"))?;
    let list = format!("/lib/modules/{}/fakepci.ko\n", version.trim());
    let mut booted = Guest::new()
        .file("etc/hardware.modules", list.as_bytes())
        .without_vsock()
        .append("testagent.containers=all:all testagent.guest=listener")
        .boot(context, "no-vsock")?;
    booted.agent("container created", |_| true)?;
    ensure!(
        booted
            .console
            .wait_text(Duration::from_secs(60), "this kernel has no vsock"),
        "the console does not say that there is no vsock"
    );
    // The stream is there for readers in the guest.
    let seen = booted.agent("listener", |_| true)?;
    ensure!(
        seen.get("first").contains("\"stream\"") && seen.get("records").parse::<u64>()? > 50,
        "listener: {seen:?}"
    );
    booted.still_runs()?;
    Ok(Outcome::Passed)
}

fn no_agent(context: &TestContext) -> Result<Outcome> {
    // /hardware is a link to the agent's file, so the pre-init comes as a file of its own.
    let binary = std::fs::read(context.guest_program("kata-agent"))?;
    let mut booted = Guest::new()
        .without("usr/bin/kata-agent")
        .file("hardware", &binary)
        .boot(context, "no-agent")?;
    booted.exit()?;
    let wanted = "execute /usr/bin/kata-agent: ENOENT: No such file or directory (the image has \
        no agent: put it there)";
    let event = booted.event(names::POWER_OFF)?;
    ensure!(
        event.error.as_deref() == Some(wanted),
        "over vsock: {:?}",
        event.error
    );
    let exec = booted.record("agent.exec end", |r| {
        r.name == names::AGENT_EXEC && r.kind == Kind::End
    })?;
    ensure!(
        exec.error.as_deref() == Some(wanted),
        "agent.exec: {:?}",
        exec.error
    );
    let console = booted.console.text();
    ensure!(
        console.contains(&format!("kata-gpu-init: {wanted}: powering off")),
        "the console does not say it"
    );
    // The kernel's log is printed on the console with its time in front.
    ensure!(
        console
            .lines()
            .any(|l| l.starts_with('[')
                && l.contains("] kata-gpu-init: execute /usr/bin/kata-agent")),
        "the kernel's log does not say it"
    );
    ensure!(
        console.contains("Power down") || console.contains("Power off"),
        "the guest did not power off"
    );
    Ok(Outcome::Passed)
}

fn bare_word(context: &TestContext) -> Result<Outcome> {
    // The kernel gives its init the words that it does not know itself.
    let mut booted = Guest::new().append("hook prepare").boot(context, "hook")?;
    ensure!(booted.settled()? == (8, 0), "{:?}", booted.settled()?);
    booted.still_runs()?;
    Ok(Outcome::Passed)
}

fn bad_parameters(context: &TestContext) -> Result<Outcome> {
    let junk = "gpuinit.bind=fast gpuinit.gpus=-1 gpuinit.\u{1}\u{7f}=\u{2} nvrc.fm.mode=1";
    // x86 takes 2047 bytes (COMMAND_LINE_SIZE), and a longer line does not boot at all; 4 kB are a
    // unit test of `config`.
    let many = "gpuinit.nosuch=1 ".repeat(1700 / 17);
    for (name, words) in [
        ("few", junk.to_string()),
        ("many", format!("{junk} {many}")),
    ] {
        let mut booted = Guest::new().append(&words).boot(context, name)?;
        ensure!(
            booted.settled()? == (8, 0),
            "{name}: {:?}",
            booted.settled()?
        );
        let records = booted.receiver.records();
        let reported = named(&records, Kind::Event, names::CONFIG);
        let problem = |parameter: &str| {
            reported
                .iter()
                .find(|r| r.fields["parameter"] == parameter)
                .and_then(|r| r.error.clone())
                .unwrap_or_default()
        };
        ensure!(
            problem("gpuinit.bind")
                .contains("takes auto, insmod, pipelined, concurrent; ignored, default: auto"),
            "{name}: {reported:?}"
        );
        ensure!(
            problem("gpuinit.gpus").contains("takes 0 to 1024"),
            "{name}: {reported:?}"
        );
        ensure!(
            problem("nvrc.fm.mode").contains("ignored"),
            "{name}: {reported:?}"
        );
        ensure!(reported.len() <= 33, "{name}: {} events", reported.len());
        let reason = named(&records, Kind::Event, names::STRATEGY)[0].fields["reason"].clone();
        ensure!(
            reason
                .as_str()
                .is_some_and(|r| r.starts_with("bind: the host maps BARs")),
            "{name}: the default is not used: {reason}"
        );
        booted.still_runs()?;
    }
    Ok(Outcome::Passed)
}
