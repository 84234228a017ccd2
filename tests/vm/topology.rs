//! A failure means that the functions of a guest choose the wrong topology or NVLink option for the
//! driver's load, or that vital product data is read more than once, or beside an enabling.

use super::harness::{Booted, Guest, Outcome, TestContext, VmTest, error_has, events, named};
use anyhow::{Context, Result, ensure};
use kata_gpu_wire::names;
use kata_gpu_wire::record::{Kind, Record};

pub const TESTS: &[VmTest] = &[
    VmTest {
        name: "vpd_is_read_once_before_any_gpu_is_enabled",
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
];

const PARAMS: &str = "/proc/driver/nvidia/params";

/// Reports config accesses and the driver's parameters, once all is settled.
const LOOK: &str = "settled>config+file:/proc/driver/nvidia/params";

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

/// Also when the worker dies: the next one keeps the topology.
fn vpd(context: &TestContext) -> Result<Outcome> {
    let booted = Guest::with(
        "fakepci.gpus=2 fakepci.device=0x2901 nvidia.barfw_ms=50 fakepci.cx7=2 \
        fakepci.cx7_silent=1",
    )
    .script(&format!("gpu.bound/0>kill;{LOOK}"))
    .boot(context, "silent")?;
    booted.settles(2, 0)?;
    ensure!(nvlink_disable(&booted)? == "0", "the option was set");
    booted.event(names::PROCESS_DIED)?;
    let records = booted.records();
    let read = named(&records, Kind::End, names::PCI_VPD);
    ensure!(
        read.len() == 1 && read[0].fields["management"] == 1,
        "{read:?}"
    );
    let steps = [names::GPU_ENABLE, names::GPU_BIND, names::MODULE_LOAD];
    let first = records
        .iter()
        .find(|r| r.kind == Kind::Begin && steps.contains(&r.name.as_str()))
        .context("no GPU came up")?;
    ensure!(read[0].seq < first.seq, "{first:?} before {read:?}");
    let silent = booted.event(names::PCI_VPD)?;
    error_has(
        &silent,
        &["0001:00:19.0/vpd", "gpuinit.topology=blackwell-fabric"],
    )?;
    let reported = booted.events(names::TOPOLOGY, 1)?;
    ensure!(
        reported.len() == 1 && reported[0].fields["topology"] == "blackwell-fabric",
        "{reported:?}"
    );
    Ok(Outcome::Passed)
}

/// One guest for each place of the option: the tests of [`kata_gpu_init::gpu::topology`] have every
/// decision. Hopper GPUs decide the topology themselves: no VPD is read for them.
fn nvlink(context: &TestContext) -> Result<Outcome> {
    for (words, value, reason) in [
        (
            "fakepci.gpus=2 fakepci.cx7=2 gpuinit.nvlink=off",
            "1",
            "asked for by gpuinit.nvlink=off",
        ),
        (
            "fakepci.gpus=1",
            "0",
            "the driver's options have NVreg_NvLinkDisable=0",
        ),
    ] {
        let booted = Guest::with(words)
            .file(
                "etc/modprobe.d/nvidia.conf",
                b"options nvidia NVreg_NvLinkDisable=0\n",
            )
            .script(LOOK)
            .boot(context, &format!("nvlink-{value}"))?;
        let reported = booted.event(names::TOPOLOGY)?.fields;
        let is = nvlink_disable(&booted)?;
        ensure!(is == value, "NvLinkDisable is {is}: {reported:?}");
        ensure!(
            reported["nvlink_reason"]
                .as_str()
                .is_some_and(|reported| reported.contains(reason))
                && (reported["nvlink"] == "disabled") == (value == "1"),
            "{reported:?}"
        );
        let reads = vpd_reads(&booted)?;
        ensure!(reads.iter().all(|reads| *reads == 0), "{reads:?}");
    }
    Ok(Outcome::Passed)
}

fn later(context: &TestContext) -> Result<Outcome> {
    // No GPU at boot; the first one that comes is alone, the second one too late.
    let booted = Guest::with("fakepci.gpus=2 fakepci.absent=0,1")
        .script(
            "settled>plug:0;gpu.usable/0>file:/proc/driver/nvidia/params+plug:1;\
            gpu.usable/1>counters",
        )
        .boot(context, "later")?;
    ensure!(nvlink_disable(&booted)? == "1", "the GPU was alone");
    booted.did("counters")?;
    let records = booted.records();
    let reported: Vec<[String; 6]> = events(&records, names::TOPOLOGY)
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
