//! A failure means that a GPU with coherent memory (Grace) is opened before the kernel may put that
//! memory online as movable, or that a refusal by the driver is reported without its cure.

use super::harness::{Guest, Outcome, TestContext, VmTest, events, named};
use anyhow::{Context, Result, ensure};
use kata_gpu_wire::arch::Arch;
use kata_gpu_wire::names;
use kata_gpu_wire::record::Kind;

pub const TESTS: &[VmTest] = &[VmTest {
    name: "coherent_memory_goes_online_movable_before_the_first_open",
    run: before_the_first_open,
}];

fn before_the_first_open(context: &TestContext) -> Result<Outcome> {
    let gpus = "fakepci.gpus=2 nvidia.coherent=0,1";
    let described =
        Guest::with(&format!("{gpus} hardware.acpi=srat")).boot(context, "described")?;
    // The driver looks for such a table on arm64 alone, and so does the init.
    if context.arch == Arch::X86_64 {
        return refused(&described);
    }
    described.settles(2, 0)?;
    let records = described.receiver.records();
    let [set] = events(&records, names::MEMORY_COHERENT)[..] else {
        anyhow::bail!("not one event")
    };
    ensure!(
        set.error.is_none()
            && !["", "online_movable"]
                .contains(&set.fields["policy"].as_str().context("no policy")?),
        "{set:?}"
    );
    // The memory of each function: 32 MiB.
    ensure!(set.fields["gpu_memory_mib"] == 64, "{set:?}");
    let opened = named(&records, Kind::Begin, names::GPU_INIT);
    ensure!(
        opened.len() == 2 && opened.iter().all(|r| r.boottime_ns > set.boottime_ns),
        "{set:?} {opened:?}"
    );

    let other = Guest::with(gpus).boot(context, "not-described")?;
    refused(&other)
}

/// A guest that ACPI says nothing about is left alone: the driver refuses its GPUs, and the reason
/// has a cure.
fn refused(booted: &super::harness::Booted) -> Result<Outcome> {
    booted.settles(0, 2)?;
    let records = booted.records();
    booted.has_no(names::MEMORY_COHERENT)?;
    let failed = events(&records, names::GPU_FAILED);
    ensure!(failed.len() == 2, "{failed:?}");
    for record in failed {
        let cure = record.fields["cure"].as_str().context("no cure")?;
        ensure!(
            record.fields["reason"] == "memory-not-movable"
                && cure.contains("memhp_default_state=online_movable"),
            "{record:?}"
        );
    }
    Ok(Outcome::Passed)
}
