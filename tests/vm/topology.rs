//! Kinds of guests, by their functions: what the `topology` event says, what the driver is loaded
//! with, and where vital product data is read.

use super::harness::{Booted, Guest, Outcome, TestContext, VmTest, named};
use anyhow::{Context, Result, ensure};
use kata_gpu_wire::names;
use kata_gpu_wire::record::{Kind, Record};

pub const TESTS: &[VmTest] = &[
    VmTest {
        name: "each_topology_is_reported_with_its_reason",
        run: each,
    },
    VmTest {
        name: "vpd_is_read_before_any_gpu_is_enabled",
        run: vpd,
    },
    VmTest {
        name: "nvlink_is_disabled_for_a_single_gpu_unless_configured",
        run: nvlink,
    },
    VmTest {
        name: "only_gpus_that_come_before_the_load_change_the_topology",
        run: later,
    },
    VmTest {
        name: "a_new_worker_keeps_the_topology_and_reads_no_vpd_again",
        run: again,
    },
];

const PARAMS: &str = "/proc/driver/nvidia/params";
/// Reports config accesses and the driver's parameters, once all is settled.
const LOOK: &str =
    "testagent.guest=script testagent.script=settled>config+file:/proc/driver/nvidia/params";

/// Reads of VPD of each Mellanox function, once all is settled.
fn vpd_reads(booted: &Booted) -> Result<Vec<u64>> {
    let line = booted.agent("config", |_| true)?;
    // Their slots are those from 0x18 on; switches have the counter, too.
    let functions = line
        .get("all")
        .split("; ")
        .filter(|line| line.get(8..10).is_some_and(|slot| slot >= "18"));
    functions
        .filter_map(|line| line.split_once("vpd="))
        .map(|(_, count)| Ok(count.parse()?))
        .collect()
}

/// NvLinkDisable as the driver has it.
fn nvlink_disable(booted: &Booted) -> Result<String> {
    let line = booted.agent("file", |l| l.get("path") == PARAMS)?;
    let (_, value) = line
        .get("text")
        .split_once("NvLinkDisable: ")
        .with_context(|| format!("no NvLinkDisable: {line:?}"))?;
    Ok(value.chars().take_while(char::is_ascii_digit).collect())
}

/// Fields of the topology event.
fn fields(record: &Record) -> [String; 6] {
    [
        "topology",
        "gpus",
        "switches",
        "management",
        "decided_by",
        "nvlink",
    ]
    .map(|key| {
        record.fields.get(key).map_or_else(String::new, |value| {
            value.to_string().trim_matches('"').to_string()
        })
    })
}

/// One guest for each source of facts: the tests of [`kata_gpu_init::gpu::topology`] have every
/// decision.
fn each(context: &TestContext) -> Result<Outcome> {
    let blackwell = "fakepci.device=0x2901 nvidia.barfw_ms=50";
    for (name, words, wanted, reason, reads_vpd) in [
        // Hopper GPUs beside ordinary network functions.
        (
            "gpus",
            "fakepci.gpus=2 fakepci.cx7=2",
            ["gpus", "2", "0", "0", "scan", "unchanged"],
            "no switch is in this guest",
            false,
        ),
        (
            "hopper",
            "fakepci.gpus=4 fakepci.switches=2 fakepci.cx7=1",
            ["hopper-fabric", "4", "2", "0", "scan", "unchanged"],
            "4 GPUs, 2 NVSwitches found: the switches are PCI functions of this guest",
            false,
        ),
        (
            "blackwell",
            "fakepci.gpus=2 fakepci.cx7=4 fakepci.cx7_plain=1",
            ["blackwell-fabric", "2", "0", "3", "scan", "unchanged"],
            "2 GPUs, 3 management functions found: the switches are behind the management \
            functions",
            true,
        ),
        (
            "service-management",
            "fakepci.gpus=0 fakepci.cx7=4",
            ["service-vm", "0", "0", "4", "scan", "unchanged"],
            "management functions without GPUs",
            true,
        ),
    ] {
        let generation = if name.starts_with("blackwell") {
            blackwell
        } else {
            ""
        };
        let booted = Guest::new()
            .append(&format!("{words} {generation} {LOOK}"))
            .boot(context, name)?;
        ensure!(booted.settled()?.1 == 0, "{name}: {:?}", booted.settled()?);
        let reads = vpd_reads(&booted)?;
        ensure!(
            reads.iter().all(|reads| (*reads > 0) == reads_vpd),
            "{name}: reads of VPD: {reads:?}"
        );
        let records = booted.receiver.records();
        let reported = named(&records, Kind::Event, names::TOPOLOGY);
        ensure!(reported.len() == 1, "{name}: {reported:?}");
        ensure!(
            fields(reported[0]) == wanted,
            "{name}: {:?}",
            reported[0].fields
        );
        ensure!(
            reported[0].fields["reason"]
                .as_str()
                .is_some_and(|reported| reported.contains(reason)),
            "{name}: {:?}",
            reported[0].fields
        );
        ensure!(
            named(&records, Kind::Begin, names::PCI_VPD).len() == usize::from(reads_vpd),
            "{name}: a step for VPD"
        );
        if name == "blackwell" {
            ensure!(
                reported[0].fields["functions"] == "0001:00:18.0 0001:00:1a.0 0001:00:1b.0",
                "{:?}",
                reported[0].fields
            );
            ensure!(reads.len() == 4, "{reads:?}");
        }
    }
    Ok(Outcome::Passed)
}

fn vpd(context: &TestContext) -> Result<Outcome> {
    let words = format!(
        "fakepci.gpus=2 fakepci.device=0x2901 nvidia.barfw_ms=50 fakepci.cx7=2 \
        fakepci.cx7_silent=1 {LOOK}"
    );
    let booted = Guest::new().append(&words).boot(context, "silent")?;
    ensure!(booted.settled()? == (2, 0), "{:?}", booted.settled()?);
    let records = booted.receiver.records();
    let read = named(&records, Kind::End, names::PCI_VPD);
    let read = read.first().context("VPD was not read")?;
    ensure!(read.fields["management"] == 1, "{read:?}");
    let steps = [names::GPU_ENABLE, names::GPU_BIND, names::MODULE_LOAD];
    let first = records
        .iter()
        .find(|r| r.kind == Kind::Begin && steps.contains(&r.name.as_str()))
        .context("no GPU came up")?;
    ensure!(read.seq < first.seq, "{first:?} before the end of {read:?}");
    let silent = booted.record("the silent function", |r| {
        r.name == names::PCI_VPD && r.kind == Kind::Event
    })?;
    let error = silent.error.unwrap_or_default();
    ensure!(
        error.contains("0001:00:19.0/vpd") && error.contains("gpuinit.topology=blackwell-fabric"),
        "{error}"
    );
    ensure!(booted.event(names::TOPOLOGY)?.fields["topology"] == "blackwell-fabric");
    Ok(Outcome::Passed)
}

/// One guest for each place of the option: the tests of [`kata_gpu_init::gpu::topology`] have every
/// decision.
fn nvlink(context: &TestContext) -> Result<Outcome> {
    let option = "options nvidia NVreg_NvLinkDisable=0\n";
    for (name, words, file, value, reason) in [
        ("one", "fakepci.gpus=1", None, "1", "one GPU alone"),
        (
            "off",
            "fakepci.gpus=2 gpuinit.nvlink=off",
            Some(option),
            "1",
            "asked for by gpuinit.nvlink=off",
        ),
        (
            "command-line",
            "fakepci.gpus=1 nvidia.NVreg_NvLinkDisable=0",
            None,
            "0",
            "the driver's options have NVreg_NvLinkDisable=0",
        ),
        (
            "modprobe.d",
            "fakepci.gpus=1",
            Some(option),
            "0",
            "the driver's options have NVreg_NvLinkDisable=0",
        ),
    ] {
        let mut guest = Guest::new().append(&format!("{words} {LOOK}"));
        if let Some(text) = file {
            guest = guest.file("etc/modprobe.d/nvidia.conf", text.as_bytes());
        }
        let booted = guest.boot(context, name)?;
        let is = nvlink_disable(&booted)?;
        let reported = booted.event(names::TOPOLOGY)?.fields;
        ensure!(is == value, "{name}: NvLinkDisable is {is}: {reported:?}");
        ensure!(
            reported["nvlink_reason"]
                .as_str()
                .is_some_and(|reported| reported.contains(reason)),
            "{name}: {reported:?}"
        );
        ensure!(
            reported["nvlink"]
                == if value == "1" {
                    "disabled"
                } else {
                    "unchanged"
                },
            "{name}: {reported:?}"
        );
    }
    Ok(Outcome::Passed)
}

fn later(context: &TestContext) -> Result<Outcome> {
    // No GPU at boot; the first one that comes is alone, the second one too late.
    let script =
        "settled>plug:0;gpu.usable/0>file:/proc/driver/nvidia/params+plug:1;gpu.usable/1>counters";
    let words = format!(
        "fakepci.gpus=2 fakepci.absent=0,1 testagent.guest=script testagent.script={script}"
    );
    let booted = Guest::new().append(&words).boot(context, "later")?;
    ensure!(nvlink_disable(&booted)? == "1", "the GPU was alone");
    booted.agent("script", |l| l.get("did") == "counters")?;
    let records = booted.receiver.records();
    let reported: Vec<[String; 6]> = named(&records, Kind::Event, names::TOPOLOGY)
        .into_iter()
        .map(fields)
        .collect();
    let wanted = [
        ["none", "0", "0", "0", "scan", "unchanged"],
        ["gpus", "1", "0", "0", "scan", "disabled"],
    ];
    ensure!(reported == wanted, "{reported:?}");
    let outgrown = booted.event(names::TOPOLOGY_OUTGROWN)?;
    let error = outgrown.error.unwrap_or_default();
    ensure!(
        outgrown.fields["gpus"] == 2 && error.contains("loaded with NVreg_NvLinkDisable=1"),
        "{error}"
    );
    Ok(Outcome::Passed)
}

fn again(context: &TestContext) -> Result<Outcome> {
    let look = "settled>config+file:/proc/driver/nvidia/params";
    for (name, words, kill, value) in [
        ("one", "fakepci.gpus=1", "topology>kill", "1"),
        (
            "blackwell",
            "fakepci.gpus=2 fakepci.device=0x2901 nvidia.barfw_ms=50 fakepci.cx7=2",
            "gpu.bound/0>kill",
            "0",
        ),
    ] {
        let script = format!("{words} testagent.guest=script testagent.script={kill};{look}");
        let booted = Guest::new().append(&script).boot(context, name)?;
        let is = nvlink_disable(&booted)?;
        let records = booted.receiver.records();
        booted.event(names::PROCESS_DIED)?;
        ensure!(is == value, "{name}: NvLinkDisable is {is}");
        let reported = named(&records, Kind::Event, names::TOPOLOGY);
        ensure!(reported.len() == 1, "{name}: {reported:?}");
        ensure!(
            named(&records, Kind::Begin, names::PCI_VPD).len() <= 1,
            "{name}: VPD was read again"
        );
        ensure!(booted.settled()?.1 == 0, "{name}: {:?}", booted.settled()?);
    }
    Ok(Outcome::Passed)
}
