//! A failure means that one fault (a GPU that fails or hangs; a missing driver, module, agent,
//! console or vsock; a full /run; a bad parameter) costs more than it must, or is reported without
//! its reason.

use super::harness::{
    Booted, DEADLINE, Guest, Outcome, TestContext, VmTest, error_has, events, gpus_of, named,
};
use super::hot_plug::leads;
use anyhow::{Context, Result, ensure};
use kata_gpu_wire::names;
use kata_gpu_wire::record::{Kind, Record};

pub const TESTS: &[VmTest] = &[
    VmTest {
        name: "a_first_gpu_that_fails_its_probe_does_not_fail_the_load",
        run: |c| one_fails(c, "probe_fail", 0, "off-the-bus", "concurrent"),
    },
    VmTest {
        name: "a_gpu_that_fails_to_initialise_leaves_and_the_others_stay",
        run: |c| one_fails(c, "init_fail", 3, "firmware-boot", "insmod"),
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

fn one_fails(
    context: &TestContext,
    fault: &str,
    index: usize,
    reason: &str,
    bind: &str,
) -> Result<Outcome> {
    let asked = if index == 0 { 1 } else { 0 };
    // The container with the failed GPU is asked for when its GPU has left: after its first tries
    // it must fail, not wait 100 s.
    let mut booted = Guest::with(&format!(
        "nvidia.{fault}={index} testagent.containers=good:{asked};bad:{index};all:all \
        gpuinit.bind={bind}"
    ))
    .boot(context, bind)?;
    let failed = failure(&booted, index, reason)?;
    let error = failed.error.unwrap_or_default();
    ensure!(
        error.contains("the driver logged: NVRM: "),
        "the driver's words are missing: {error}"
    );
    booted.settles(7, 1)?;
    booted.created("good")?;
    // Published as bound before its initialisation failed, it may have been handed out; probed in
    // vain, never.
    let all = booted.created("all")?;
    let gpus = gpus_of(&all);
    ensure!(
        gpus == 7 || fault == "init_fail" && gpus == 8,
        "{gpus} GPUs: {all:?}"
    );
    if fault == "probe_fail" {
        booted.refused_gpu("bad", reason)?;
    }
    let records = booted.records();
    let published = named(&records, Kind::End, names::CDI_PUBLISH);
    let last = published.last().context("no publication")?;
    ensure!(
        last.fields["failed"] == 1 && last.fields["ready"] == 7,
        "{last:?}"
    );
    booted.still_runs()?;
    Ok(Outcome::Passed)
}

fn one_hangs(context: &TestContext) -> Result<Outcome> {
    // The last one, after all others: a GPU that hangs holds its lock of the resource manager, and
    // one that comes after it waits for that.
    let mut booted = Guest::with(
        "nvidia.init_hang=7 fakepci.enable_ms=120 gpuinit.init=serial \
        testagent.containers=good:6;all:all",
    )
    .script("gpu.late>counters")
    .boot(context, "hang")?;
    booted.created("good")?;
    booted.created("all")?;
    // The first deadline reports, with what the kernel is doing for it, and kills nothing.
    let late = booted.event(names::GPU_LATE)?;
    ensure!(
        late.fields["step"] == "initialisation" && late.fields["waited_ms"] == 10_000,
        "{late:?}"
    );
    let stack = late.fields["stack"].as_str().unwrap_or_default();
    ensure!(
        stack.contains("nv_start_adapter") && stack.contains("nv_open_q: "),
        "stack: {stack}"
    );
    let records = booted.records();
    let usable = events(&records, names::GPU_USABLE).len();
    let failed = events(&records, names::GPU_FAILED);
    ensure!(
        usable == 7 && failed.is_empty(),
        "{usable} GPUs are usable; {failed:?}"
    );
    let ends = named(&records, Kind::End, names::GPU_INIT);
    let mut open = named(&records, Kind::Begin, names::GPU_INIT);
    open.retain(|begin| !ends.iter().any(|end| end.span == begin.span));
    ensure!(
        open.len() == 1 && open[0].gpu == late.gpu,
        "open initialisations: {open:?}"
    );
    booted.did("counters")?;
    let counters = super::worker::counters(&booted)?;
    ensure!(
        counters.matches("closes: 0 ").count() == 8,
        "something was closed: {counters}"
    );
    booted.still_runs()?;
    Ok(Outcome::Passed)
}

/// On a slow host the next GPU's enabling waits until the one before is through its probe, but not
/// for ever.
fn one_hangs_early(context: &TestContext) -> Result<Outcome> {
    let words = "nvidia.information_hang=1 fakepci.enable_ms=300 testagent.containers=good:7";
    let booted = Guest::with(words).boot(context, "hang-early")?;
    booted.created("good")?;
    let held = booted.record("the lane's complaint", |r| {
        r.name == names::GPU_ENABLE && r.error.is_some()
    })?;
    error_has(&held, &["going on without waiting"])?;
    let late = booted.record("gpu.late", |r| r.name == names::GPU_LATE)?;
    ensure!(
        late.gpu == held.gpu && late.fields["step"] == "probe",
        "{late:?}"
    );
    booted.events(names::GPU_USABLE, 7)?;
    let complaints = booted
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
    let booted = Guest::with(
        "fakepci.gpus=4 nvidia.version=595.45.04 nvidia.NVreg_GpuInitOnProbe=1 \
        gpuinit.bind=concurrent nvidia.unsupported=0 nvidia.judge_ms=3000 \
        testagent.containers=good:3",
    )
    .boot(context, "meanwhile")?;
    failure(&booted, 0, "registers-garbled")?;
    booted.settles(3, 1)?;
    booted.created("good")?;
    let records = booted.records();
    for (name, wanted) in [
        (names::GPU_FAILED, 1),
        (names::GPU_REMOVED, 0),
        (names::GPU_BOUND, 3),
    ] {
        let came = events(&records, name);
        ensure!(came.len() == wanted, "{name}: {came:?}, wanted {wanted}");
    }
    let (loads, binds) = (
        named(&records, Kind::End, names::MODULE_LOAD),
        named(&records, Kind::Begin, names::GPU_BIND),
    );
    let failed = loads
        .iter()
        .find(|load| load.error.is_some())
        .with_context(|| format!("no load has failed: {loads:?}"))?;
    ensure!(
        binds.iter().any(|bind| bind.seq < failed.seq),
        "no GPU was bound during the load that failed: {binds:?}"
    );
    Ok(Outcome::Passed)
}

/// The kernel starts an init without descriptors then, and Rust's runtime ends a program that has
/// none and no /dev/null.
fn no_console(context: &TestContext) -> Result<Outcome> {
    let booted = Guest::with("fakepci.gpus=2 hardware.descriptors=none")
        .without_console()
        .boot(context, "no-port")?;
    booted.settles(2, 0)?;
    let console = booted.console.text();
    ensure!(console.is_empty(), "a console is there: {console:?}");
    Ok(Outcome::Passed)
}

fn no_gpu(context: &TestContext) -> Result<Outcome> {
    let booted = Guest::with("fakepci.gpus=0 testagent.containers=plain:0 agent.cdi_timeout=2")
        .boot(context, "none")?;
    booted.settles(0, 0)?;
    // The kind is absent: a GPU that is plugged in later may still come, so the agent waits its
    // time.
    ensure!(
        booted
            .refused("plain")?
            .get("error")
            .contains("timeout of 2 seconds"),
        "wrong error"
    );
    let records = booted.records();
    ensure!(
        !records.iter().any(|r| r.error.is_some()),
        "an error without a fault: {:?}",
        records.iter().find(|r| r.error.is_some())
    );
    booted.has_no(names::MODULE_LOAD)?;
    booted.has_no(names::LOCKDOWN)?;
    let booted = Guest::with("fakepci.gpus=2 gpuinit.gpus=8").boot(context, "expected")?;
    let missing = booted.record("pci.scan error", |r| {
        r.name == names::PCI_SCAN && r.error.is_some()
    })?;
    error_has(&missing, &["gpuinit.gpus=8", "has 2"])?;
    booted.settles(2, 0)?;
    Ok(Outcome::Passed)
}

/// Path of a module in the initrd.
fn module(context: &TestContext, name: &str) -> Result<&'static str> {
    Ok(Box::leak(
        format!("{}/{name}.ko", context.modules()?).into_boxed_str(),
    ))
}

fn no_driver(context: &TestContext) -> Result<Outcome> {
    let mut booted = Guest::with("testagent.containers=one:0;all:all")
        .without(module(context, "nvidia")?)
        .boot(context, "no-driver")?;
    booted.settles(0, 8)?;
    for index in 0..8 {
        error_has(
            &failure(&booted, index, "driver-missing")?,
            &[
                "nvidia.ko",
                "No such file",
                "modules.dep is older than the modules",
            ],
        )?;
    }
    // Asked for and gone for good: the agent says so at its next try instead of waiting, and why as
    // soon as no GPU is pending.
    booted.refused_gpu("one", "driver-missing")?;
    let all = booted.refused("all")?;
    ensure!(
        all.get("error")
            .contains("GPU 0001:00:00.0 has failed (driver-missing): put nvidia.ko"),
        "{all:?}"
    );
    booted.still_runs()?;
    Ok(Outcome::Passed)
}

fn all_fail_early(context: &TestContext) -> Result<Outcome> {
    let mut booted = Guest::with(
        "fakepci.gpus=3 fakepci.bar_unassigned=0,1 fakepci.absent=2 gpuinit.bind=pipelined",
    )
    .script("settled>plug:2;gpu.usable/2>spec")
    .boot(context, "early")?;
    booted.settles(0, 2)?;
    failure(&booted, 0, "bar-unassigned")?;
    failure(&booted, 1, "bar-unassigned")?;
    let spec = booted.agent("spec", |l| l.get("file") == "nvidia.yaml")?;
    ensure!(leads(spec.get("text"))? == [(2, 0)], "{spec:?}");
    let again = booted.record("settled again", |r| {
        r.name == names::SETTLED && r.fields["usable"] == 1
    })?;
    ensure!(again.fields["failed"] == 2, "{again:?}");
    let locked = booted.event(names::LOCKDOWN)?;
    let records = booted.records();
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
    let booted = Guest::with("fakepci.gpus=2 fakepci.absent=1 nvidia.probe_fail=0")
        .script("settled>plug:1;gpu.usable/1>spec")
        .boot(context, "again")?;
    booted.settles(0, 1)?;
    let spec = booted.agent("spec", |l| l.get("file") == "nvidia.yaml")?;
    let gpus: Vec<usize> = leads(spec.get("text"))?
        .iter()
        .map(|(gpu, _)| *gpu)
        .collect();
    ensure!(gpus == [1], "{spec:?}");
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
    let booted = Guest::with("fakepci.gpus=4 fakepci.enable_ms=200 testagent.containers=all:all")
        .script("gpu.found/3>fill;gpu.usable/3>sleep:800+empty")
        .boot(context, "full")?;
    let all = booted.created("all")?;
    ensure!(gpus_of(&all) == 4, "{all:?}");
    booted.settles(4, 0)?;
    let records = booted.records();
    booted.did("fill")?;
    let failed = named(&records, Kind::End, names::CDI_PUBLISH)
        .into_iter()
        .filter(|r| r.error.is_some())
        .count();
    ensure!(
        failed == 1,
        "{failed} failures were reported, not only the first of the series"
    );
    ensure!(
        events(&records, names::GPU_PUBLISHED).len() == 4,
        "not all were reported as published"
    );
    Ok(Outcome::Passed)
}

fn no_uvm(context: &TestContext) -> Result<Outcome> {
    let booted = Guest::new()
        .without(module(context, "nvidia-uvm")?)
        // An image's leftover, which no link can replace: /run is mounted there.
        .without("var/run")
        .file("var/run/leftover", b"x")
        .append("testagent.containers=all:all")
        .script("settled>file:/proc/self/mounts")
        .boot(context, "no-uvm")?;
    let error = booted.record("error about nvidia-uvm", |r| {
        r.name == names::MODULE_LOAD && r.kind == Kind::Event && r.error.is_some()
    })?;
    error_has(&error, &["nvidia_uvm", "CUDA will not start"])?;
    let all = booted.created("all")?;
    ensure!(
        !all.get("nodes").contains("uvm") && all.get("nodes").contains("nvidiactl"),
        "{all:?}"
    );
    let mounts = booted.agent("file", |l| l.get("path") == "/proc/self/mounts")?;
    ensure!(
        mounts.get("text").contains(" /var/run tmpfs "),
        "{mounts:?}"
    );
    Ok(Outcome::Passed)
}

fn no_vsock(context: &TestContext) -> Result<Outcome> {
    // GPUs alone of the guest's hardware: no virtio, no vsock.
    let list = format!("/{}/fakepci.ko\n", context.modules()?);
    let mut booted = Guest::new()
        .file("etc/hardware.modules", list.as_bytes())
        .without_vsock()
        .append("testagent.containers=all:all testagent.guest=listener")
        .boot(context, "no-vsock")?;
    booted.agent("container created", |_| true)?;
    ensure!(
        booted
            .console
            .wait_text(DEADLINE, "this kernel has no vsock"),
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
    let mut booted = Guest::with("fakepci.gpus=1 hook prepare").boot(context, "hook")?;
    booted.settles(1, 0)?;
    booted.still_runs()?;
    Ok(Outcome::Passed)
}

fn bad_parameters(context: &TestContext) -> Result<Outcome> {
    // x86 takes 2047 bytes (COMMAND_LINE_SIZE), and a longer line does not boot at all; 4 kB are a
    // unit test of `config`.
    let mut booted = Guest::with(&format!(
        "gpuinit.bind=fast gpuinit.gpus=-1 gpuinit.\u{1}\u{7f}=\u{2} nvrc.fm.mode=1 {}",
        "gpuinit.nosuch=1 ".repeat(1700 / 17)
    ))
    .boot(context, "many")?;
    booted.settles(8, 0)?;
    let records = booted.records();
    let reported = events(&records, names::CONFIG);
    for (parameter, problem) in [
        (
            "gpuinit.bind",
            "takes auto, insmod, pipelined, concurrent; ignored, default: auto",
        ),
        ("gpuinit.gpus", "takes 0 to 1024"),
        ("nvrc.fm.mode", "ignored"),
    ] {
        let said = reported
            .iter()
            .filter(|r| r.fields["parameter"] == parameter)
            .find_map(|r| r.error.as_ref());
        ensure!(
            said.is_some_and(|said| said.contains(problem)),
            "{parameter}: {reported:?}"
        );
    }
    ensure!(reported.len() <= 33, "{} events", reported.len());
    // The default: by what the first enabling took, also on a busy machine.
    let strategy = booted.event(names::STRATEGY)?.fields;
    let fast = strategy["first_enable_ms"]
        .as_u64()
        .is_some_and(|ms| ms < 100);
    ensure!(
        (strategy["bind"] == "insmod") == fast
            && strategy["reason"]
                .as_str()
                .is_some_and(|r| r.starts_with("bind: the host maps BARs")),
        "{strategy:?}"
    );
    booted.still_runs()?;
    Ok(Outcome::Passed)
}
