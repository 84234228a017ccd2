//! A failure means that a way in which a GPU fails is reported with the reason of another way,
//! without a cure, or not at all. Not here: `internal`, which nothing is known to cause.

use super::harness::{DEADLINE, Guest, Outcome, TestContext, VmTest, events, is_of_slot};
use anyhow::{Context, Result, ensure};
use kata_gpu_wire::names;
use kata_gpu_wire::record::{Kind, Record};

pub const TESTS: &[VmTest] = &[
    VmTest {
        name: "sixteen_gpus_with_as_many_faults_have_as_many_reasons",
        run: many,
    },
    VmTest {
        name: "faults_of_the_whole_driver_have_their_reasons",
        run: of_the_driver,
    },
    VmTest {
        name: "a_usable_gpu_that_falls_off_the_bus_leaves_the_spec",
        run: later,
    },
];

/// Step and reason of a GPU's failure; None when it has not failed.
fn failure(records: &[Record], index: u64) -> Option<(String, String)> {
    let failed = events(records, names::GPU_FAILED)
        .into_iter()
        .find(|r| r.fields["index"].as_u64() == Some(index))?;
    let text = |key: &str| failed.fields[key].as_str().unwrap_or_default().to_string();
    Some((text("step"), text("reason")))
}

fn many(context: &TestContext) -> Result<Outcome> {
    // 0x2901 is a Blackwell's id: only those have a BAR firewall.
    let mut ids = vec!["0x2330"; 16];
    ids[2] = "0x2901";
    let minors: Vec<String> = (0..16).map(|m: u32| m.to_string()).collect();
    let words = [
        format!(
            "fakepci.gpus=16 gpuinit.bind=pipelined fakepci.device={} \
            nvidia.minors={}",
            ids.join(","),
            minors.join(",")
        ),
        "nvidia.probe_fail=1 nvidia.barfw_ms=10 nvidia.firewall_fail=2 nvidia.unsupported=3 \
        fakepci.no_msix=4 fakepci.bar_missing=5"
            .into(),
        "fakepci.bar_unclaimed=6 nvidia.probe_silent=7 nvidia.init_fail=8 nvidia.wpr2=9 \
        nvidia.fabric=10"
            .into(),
        "nvidia.init_code=11:0x22:0x65,12:0x24:0x40,13:0x99:0x1 nvidia.open_fail=14 \
        hardware.directory=nvidia15"
            .into(),
    ];
    let wanted = [
        None,
        Some(("probe", "off-the-bus")),
        Some(("probe", "bar-firewall")),
        Some(("probe", "registers-garbled")),
        Some(("probe", "no-interrupt")),
        Some(("probe", "bar-unassigned")),
        Some(("enable", "enable-failed")),
        Some(("probe", "probe-failed")),
        Some(("init", "firmware-boot")),
        Some(("init", "needs-reset")),
        Some(("init", "fabric-not-ready")),
        Some(("init", "attach-failed")),
        Some(("init", "state-load-failed")),
        Some(("init", "init-failed")),
        Some(("open", "open-failed")),
        Some(("nodes", "no-device-node")),
    ];
    let booted = Guest::with(&words.join(" ")).boot(context, "many")?;
    booted.settles(1, 15)?;
    let records = booted.records();
    for (index, wanted) in wanted.into_iter().enumerate() {
        let is = failure(&records, index as u64);
        let is = is
            .as_ref()
            .map(|(step, reason)| (step.as_str(), reason.as_str()));
        ensure!(is == wanted, "GPU {index}: {is:?}, wanted {wanted:?}");
    }
    // Each says what to do, and names its GPU.
    for failed in events(&records, names::GPU_FAILED) {
        let (gpu, error) = (
            failed.gpu.context("no GPU")?.to_string(),
            failed.error.clone().unwrap_or_default(),
        );
        ensure!(
            error.contains(&gpu)
                && failed.fields["cure"]
                    .as_str()
                    .is_some_and(|c| !c.is_empty()),
            "{failed:?}"
        );
    }
    causes(context)
}

/// Causes stand in lines without an address, before the one with the code. A container's program
/// that prints others changes nothing.
fn causes(context: &TestContext) -> Result<Outcome> {
    let faults = "nvidia.cause=1:cc,2:fsp,3:stubs,4:other nvidia.wpr2=5";
    let times = "nvidia.s1_ms=20 nvidia.s2_ms=20 nvidia.s3_ms=20";
    let forged = "print:NVRM:_GPU0_x:_Encryption_FAILED+print:NVRM:_GPU0_x:_FSP_command_timed_out";
    let script =
        format!("gpu.init!begin/1>{forged};gpu.init!begin/2>{forged};gpu.init!begin/4>{forged}");
    let guest = Guest::with(&format!(
        "fakepci.gpus=7 gpuinit.init=serial {times} {faults}"
    ));
    let booted = guest.script(&script).boot(context, "causes")?;
    booted.settles(2, 5)?;
    let records = booted.records();
    for (index, reason, whose, sure, words) in [
        (
            1,
            "cc-mode-on",
            "host",
            "certain",
            "CPU does not support confidential compute",
        ),
        (2, "fsp-timeout", "GPU", "certain", "FSP command timed out"),
        (
            3,
            "cc-no-crypto",
            "image",
            "certain",
            "expects LKCA but found stubs",
        ),
        (4, "init-failed", "driver", "unsure", "(0x99:0x1:"),
        (5, "needs-reset", "host", "certain", "unexpected WPR2"),
    ] {
        let failed = events(&records, names::GPU_FAILED)
            .into_iter()
            .find(|r| r.fields["index"] == index)
            .with_context(|| format!("GPU {index} has not failed"))?;
        let text = |key: &str| failed.fields.get(key).and_then(|value| value.as_str());
        let is = [text("reason"), text("whose"), text("sure")];
        ensure!(
            is == [reason, whose, sure].map(Some),
            "GPU {index}: {failed:?}"
        );
        ensure!(
            text("words").is_some_and(|is| is.contains(words)),
            "GPU {index}: {failed:?}"
        );
        // Only where nothing decides.
        let nearby = "NVRM: GPU1 someEngineInit_IMPL: something that nobody knows";
        ensure!(
            text("nearby") == (index == 4).then_some(nearby),
            "GPU {index}: {failed:?}"
        );
    }
    booted.did("print:NVRM:_GPU0_x:_FSP_command_timed_out")?;
    Ok(Outcome::Passed)
}

/// Reasons that the driver does not give itself; its words are told apart by the tests of
/// [`kata_gpu_wire::failure`].
fn of_the_driver(context: &TestContext) -> Result<Outcome> {
    for (name, words, step, reason) in [
        (
            "no-minor",
            "fakepci.gpus=1 nvidia.no_minor=1",
            "probe",
            "no-minor",
        ),
        (
            "blind",
            "fakepci.gpus=2 nvidia.blind=1",
            "module",
            "driver-finds-no-gpu",
        ),
        (
            "taken",
            "fakepci.gpus=2 hardware.override=vfio-pci gpuinit.bind=insmod",
            "module",
            "driver-probed-nothing",
        ),
    ] {
        let booted = Guest::with(words).boot(context, name)?;
        let (usable, _) = booted.settled()?;
        let is = failure(&booted.records(), 0);
        ensure!(
            usable == 0 && is == Some((step.to_string(), reason.to_string())),
            "{words}: {is:?}"
        );
    }
    // The driver's line names no GPU: it is of the probe that failed next, in the load's order.
    let words = "fakepci.gpus=4 nvidia.probe_silent=0,2 fakepci.no_msix=1 gpuinit.bind=insmod";
    let booted = Guest::with(words).boot(context, "in-order")?;
    booted.settles(1, 3)?;
    let records = booted.records();
    for (index, wanted) in (0..).zip(["probe-failed", "no-interrupt", "probe-failed"]) {
        let is = failure(&records, index);
        ensure!(
            is.as_ref()
                .is_some_and(|(step, reason)| step == "probe" && reason == wanted),
            "GPU {index}: {is:?}, wanted {wanted}"
        );
    }
    Ok(Outcome::Passed)
}

fn later(context: &TestContext) -> Result<Outcome> {
    // The last GPU's Xid comes before anybody takes that GPU for usable.
    let booted = Guest::with(
        "fakepci.gpus=4 nvidia.xid=1:79:400,2:119:400,3:79:0 gpuinit.cdi.names=index,uuid",
    )
    .append(" loglevel=7")
    .script("gpu.failed/1>counters+forge:0+xid:0:79+xid:0:31")
    .boot(context, "xid")?;
    let failed = booted.events(names::GPU_FAILED, 2)?;
    for (failed, steps) in
        [(1, &["running"][..]), (3, &["running", "init"])].map(|(index, steps)| {
            let of = failed.iter().find(move |r| r.fields["index"] == index);
            (of, steps)
        })
    {
        ensure!(
            failed.is_some_and(|r| r.fields["reason"] == "off-the-bus"
                && steps.iter().any(|step| r.fields["step"] == *step)),
            "{failed:?}"
        );
    }
    booted.record("Xid 119", |r| {
        r.name == names::GPU_XID && r.fields["xid"] == 119
    })?;
    let gone = booted.record("a spec without them", |r| {
        r.kind == Kind::End && r.name == names::CDI_PUBLISH && r.fields["failed"] == 2
    })?;
    ensure!(gone.fields["ready"] == 2, "{gone:?}");
    // A line that a process makes the kernel log is nobody's word. An error that is only logged is
    // an event: the GPU answers.
    let of_first = |xid: u64| {
        move |r: &Record| is_of_slot(r, 0) && r.name == names::GPU_XID && r.fields["xid"] == xid
    };
    booted.record("Xid 79 of the GPU that answers", of_first(79))?;
    booted.record("the driver's last line", of_first(31))?;
    ensure!(
        booted.console.wait_text(DEADLINE, "]: segfault at")
            && booted.console.text().contains("in 0001:00:00): 79, ["),
        "the kernel has logged nothing"
    );
    let records = booted.records();
    let answers: Vec<_> = events(&records, names::GPU_XID)
        .into_iter()
        .filter(|r| r.fields["xid"] == 79)
        .map(|r| {
            (
                r.gpu.map(|gpu| gpu.to_string()),
                r.fields["answers"].as_bool(),
            )
        })
        .collect();
    let one = |slot: u32| {
        answers
            .iter()
            .filter(|(gpu, _)| *gpu == Some(format!("0001:00:0{slot}.0")))
            .collect::<Vec<_>>()
    };
    for (slot, wanted) in [(0, true), (1, false), (3, false)] {
        ensure!(
            matches!(one(slot)[..], [(_, Some(is))] if *is == wanted),
            "{answers:?}"
        );
    }
    ensure!(
        events(&records, names::GPU_FAILED).len() == 2,
        "{records:?}"
    );
    ensure!(
        !records.iter().any(|r| r
            .fields
            .get("text")
            .is_some_and(|text| text.to_string().contains("segfault"))),
        "in the stream"
    );
    // Failed is not closed.
    booted.did("counters")?;
    let counters = super::worker::counters(&booted)?;
    ensure!(counters.matches("closes: 0 ").count() == 4, "{counters}");
    Ok(Outcome::Passed)
}
