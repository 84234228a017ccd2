//! `kata-gpu-boot doctor` on a real kernel with functions at VFIO: what is set wrong on purpose is
//! found, and gone when it is set right.

use crate::vm::harness::{EmulatedHost, Outcome, Size, TestContext, VmTest};
use anyhow::{Context, Result, ensure};
use serde_json::Value;
use std::collections::BTreeMap;

pub const TESTS: &[VmTest] = &[VmTest { name: "doctor_finds_on_a_real_kernel_what_is_set_wrong", run: found }];

const PROGRAM: &str = "/usr/local/bin/kata-gpu-boot";
const KATA: &str = "/etc/kata-containers/configuration.toml";

/// Rule, and the commands that set it wrong and right.
const SETTINGS: &[(&str, &str, &str)] = &[
    ("thp", "echo never > /sys/kernel/mm/transparent_hugepage/enabled", "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"),
    ("thp-defrag", "echo never > /sys/kernel/mm/transparent_hugepage/defrag", "echo madvise > /sys/kernel/mm/transparent_hugepage/defrag"),
    (
        "dma-entries",
        "echo 100 > /sys/module/vfio_iommu_type1/parameters/dma_entry_limit",
        "echo 65535 > /sys/module/vfio_iommu_type1/parameters/dma_entry_limit",
    ),
    (
        "type1-huge-pages",
        "echo Y > /sys/module/vfio_iommu_type1/parameters/disable_hugepages",
        "echo N > /sys/module/vfio_iommu_type1/parameters/disable_hugepages",
    ),
];

/// Covers vendor and class of functions, so that they are GPUs to who reads sysfs.
fn cover(functions: &[String]) -> String {
    let cover = |address: &String| {
        let dir = format!("/sys/bus/pci/devices/{address}");
        format!("mount --bind /run/vendor {dir}/vendor; mount --bind /run/class {dir}/class;")
    };
    format!("set -e; echo 0x10de > /run/vendor; echo 0x030200 > /run/class; {}", functions.iter().map(cover).collect::<String>())
}

/// Findings by rule.
fn diagnose(host: &mut EmulatedHost) -> Result<BTreeMap<String, Value>> {
    let text = host.run(&format!("{PROGRAM} doctor --json"))?;
    let report: Value = serde_json::from_str(&text).with_context(|| text.clone())?;
    let findings = report["findings"].as_array().context("no findings")?;
    findings.iter().map(|f| Ok((f["rule"].as_str().context("no rule")?.to_string(), f.clone()))).collect()
}

fn found(context: &TestContext) -> Result<Outcome> {
    if let Some(skipped) = EmulatedHost::skipped(context)? {
        return Ok(skipped);
    }
    let program = EmulatedHost::program(context)?;
    let mut host = EmulatedHost::start(context, "host", Size::PLAIN.with_gpus(2), &[(PROGRAM, program.as_path())])?;
    let functions = host.vfio()?;
    host.run(&cover(&functions))?;
    host.run(&format!(
        "mkdir -p $(dirname {KATA}) && printf '[hypervisor.qemu]\\nimage = \"\"\\ndefault_memory = 2048\\ndefault_vcpus = 2\\n' > {KATA}"
    ))?;
    let set = |host: &mut EmulatedHost, script: fn(&(&'static str, &'static str, &'static str)) -> &'static str| {
        SETTINGS.iter().try_for_each(|setting| host.run(script(setting)).map(drop))
    };
    set(&mut host, |(_, wrong, _)| wrong)?;
    let wrong = diagnose(&mut host)?;
    set(&mut host, |(_, _, right)| right)?;
    let right = diagnose(&mut host)?;
    for (rule, _, _) in SETTINGS {
        ensure!(wrong[*rule]["verdict"] == "found", "set wrong: {}", wrong[*rule]);
        ensure!(right[*rule]["verdict"] == "fine", "set right: {}", right[*rule]);
    }
    // VFIO is loaded: the kernel's own symbols show whether it has huge pfnmaps.
    let pfnmaps = &right["huge-pfnmaps"];
    ensure!(pfnmaps["evidence"].to_string().contains("vfio_pci_mmap_"), "{pfnmaps}");
    // The virtual IOMMU of this host remaps no interrupts, and that was not set here.
    ensure!(right["interrupt-remapping"]["verdict"] == "found", "{}", right["interrupt-remapping"]);
    for rule in ["fragmentation", "unmovable", "iommu", "groups", "bar-alignment", "vcpus"] {
        let verdict = &right[rule]["verdict"];
        ensure!(verdict == "fine" || verdict == "found", "{rule} has its evidence on a real host: {}", right[rule]);
    }
    // This host has no configuration of its kernel, and no boots.
    ensure!(right["zeroing"]["verdict"] == "unknown", "{}", right["zeroing"]);
    ensure!(right["guest-kernel"]["verdict"] == "unknown", "{}", right["guest-kernel"]);
    Ok(Outcome::Passed)
}
