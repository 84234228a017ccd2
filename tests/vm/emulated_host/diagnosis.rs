//! A failure means that `kata-gpu-boot doctor` misses a wrong setting of a real kernel, of VFIO, of
//! Kata's configuration or of a running VM, or still finds one that is right again.

use super::passthrough::{PORTS, function};
use super::service::PROGRAM;
use crate::vm::harness::{
    BOOTS, EmulatedHost, KVM_KERNEL, KvmGuest, Outcome, Size, TestContext, VmTest,
};
use anyhow::{Context, Result, ensure};
use serde_json::Value;
use std::collections::BTreeMap;

/// Rules that an emulated host cannot show: `governor` (no frequencies), `power-state` (no D3cold),
/// `bar-size` (no resizable BAR), `bar-alignment` (the kernel aligns BARs), `link` (one speed),
/// `unmovable` (no blocks that stay), `gpu-outlier` (three GPUs in five boots), `iommu` (no VFIO
/// without one), `guest-firmware` (no record), `memory-acceptance` (no confidential guest),
/// `guest-pci`, `guest-modules`, `clocksource` and `deadlines` (guests of this tree are right).
/// tests/host/doctor.rs has trees of files for them. Rules about parameters of the kernel are right
/// on the host of [`super::trace`], which has boots as well: [`with_boots`].
pub const TESTS: &[VmTest] = &[VmTest {
    name: "emulated_host_has_what_doctor_finds",
    run: found,
}];

const KATA: &str = "/etc/kata-containers/configuration.toml";

/// Parameters of the kernel, each wrong, and the rules that find them.
const PARAMETERS: &str = "init_on_alloc=1 iommu=nopt iommu.strict=1 intremap=off";
const OF_PARAMETERS: [&str; 2] = ["iommu-mode", "interrupt-remapping"];

/// Rules, and the commands that set them wrong and right.
const SETTINGS: &[(&[&str], &str, &str)] = &[
    (
        &["thp"],
        "echo never > {thp}/enabled",
        "echo madvise > {thp}/enabled",
    ),
    (
        &["thp-defrag"],
        "echo never > {thp}/defrag",
        "echo madvise > {thp}/defrag",
    ),
    (
        &["thp-shared"],
        "echo never > {thp}/shmem_enabled && mount -o remount,huge=never /dev/shm",
        "echo advise > {thp}/shmem_enabled && mount -o remount,huge=advise /dev/shm",
    ),
    (
        &["dma-entries"],
        "echo 100 > {type1}/dma_entry_limit",
        "echo 65535 > {type1}/dma_entry_limit",
    ),
    (
        &["type1-huge-pages"],
        "echo Y > {type1}/disable_hugepages",
        "echo N > {type1}/disable_hugepages",
    ),
    (
        &["reset-method"],
        "echo bus > {gpu}/reset_method",
        "echo flr > {gpu}/reset_method",
    ),
    // The second node has no processor, and the VMs have the first one's memory.
    (&[], "echo 1 > {gpu}/numa_node", "echo 0 > {gpu}/numa_node"),
];

/// A configuration of Kata's that is wrong in each of these, and what is right.
const OF_KATA: [&str; 9] = [
    "agent-log",
    "console",
    "guest-initrd",
    "firmware",
    "hot-plug",
    "root-ports",
    "vcpus",
    "fragmentation",
    "qemu-version",
];
const WRONG_KATA: &str = r#"[hypervisor.qemu]
path = "/opt/old/qemu-system-x86_64"
image = ""
initrd = "/var/guests/vmlinux"
firmware = "/usr/share/seabios/bios.bin"
kernel_params = "agent.log=debug console=ttyS0"
shared_fs = "virtio-fs"
hot_plug_vfio = "root-port"
pcie_root_port = 1
default_memory = 65536
default_vcpus = 1
"#;
const RIGHT_KATA: &str = r#"[hypervisor.qemu]
path = "/usr/bin/qemu-system-x86_64"
image = "/var/guests/vmlinux"
firmware = ""
kernel_params = "agent.log=info console=hvc0"
shared_fs = "virtio-fs"
cold_plug_vfio = "root-port"
pcie_root_port = 2
default_memory = 256
default_vcpus = 2
"#;

/// Rules about a running VM that has what they find, and that one of it is right: IOMMUFD is not in
/// this kernel.
const OF_VM: [&str; 6] = [
    "iommufd-used",
    "huge-page-use",
    "no-mmap",
    "prealloc",
    "memory-node",
    "pinning",
];

/// Covers vendor and class of functions, so that they are GPUs to who reads sysfs.
fn cover(functions: &[String]) -> String {
    let cover = |address: &String| {
        let dir = format!("/sys/bus/pci/devices/{address}");
        format!("mount --bind /run/vendor {dir}/vendor; mount --bind /run/class {dir}/class;")
    };
    format!(
        "set -e; echo 0x10de > /run/vendor; echo 0x030200 > /run/class; {}",
        functions.iter().map(cover).collect::<String>()
    )
}

/// Findings by rule.
fn diagnose(host: &mut EmulatedHost, words: &str) -> Result<BTreeMap<String, Value>> {
    let text = host.run(&format!("{PROGRAM} doctor --json {words} || [ $? = 1 ]"))?;
    let report: Value = serde_json::from_str(&text).with_context(|| text.clone())?;
    let findings = report["findings"].as_array().context("no findings")?;
    findings
        .iter()
        .map(|f| {
            Ok((
                f["rule"].as_str().context("no rule")?.to_string(),
                f.clone(),
            ))
        })
        .collect()
}

/// Checks that each of these rules has this verdict.
fn all_are(findings: &BTreeMap<String, Value>, rules: &[&str], verdict: &str) -> Result<()> {
    for rule in rules {
        let finding = findings
            .get(*rule)
            .with_context(|| format!("no finding of {rule}"))?;
        ensure!(finding["verdict"] == verdict, "want {verdict}: {finding}");
    }
    Ok(())
}

/// Starts a VM whose guest's kernel finds no root, and stays; `words` are QEMU's.
fn vm(host: &mut EmulatedHost, memory_mib: u32, words: &str) -> Result<()> {
    host.run(&format!(
        "(setsid qemu-system-x86_64 -nodefaults -no-user-config -display none -machine q35 -accel \
        kvm -cpu host \
            -m {memory_mib}M -smp 1 -kernel {KVM_KERNEL} -append panic=0 {words} >/run/vm.log \
                2>&1 & echo $! > /run/vm.pid)"
    ))?;
    // QEMU has it once all memory is pinned.
    let has_device =
        "ls -l /proc/$(cat /run/vm.pid)/fd | grep -q vfio-device || (cat /run/vm.log; false)";
    host.until("a VM with its function", has_device).map(drop)
}

fn end_vm(host: &mut EmulatedHost) -> Result<()> {
    host.run("kill -KILL $(cat /run/vm.pid)")?;
    host.until("the VM's end", "! test -e /proc/$(cat /run/vm.pid)")
        .map(drop)
}

fn found(context: &TestContext) -> Result<Outcome> {
    if let Some(skipped) = EmulatedHost::skipped(context)? {
        return Ok(skipped);
    }
    let program = EmulatedHost::program(context)?;
    let kernel = context.kernel();
    let size = Size::WITH_GUESTS
        .with_gpus(2)
        .without_acs()
        .with_far_memory(256)
        .with_parameters(PARAMETERS);
    let mut host = EmulatedHost::start(
        context,
        "host",
        size,
        &[(PROGRAM, program.as_path()), (KVM_KERNEL, kernel.as_path())],
    )?;
    KvmGuest::prepare(&mut host)?;
    let functions = host.vfio()?;
    let gpu = functions.first().context("no function")?;
    host.run(&cover(&functions))?;
    // A program with the machine types of an older QEMU.
    host.run(&format!(
        "mkdir -p $(dirname {KATA}) /opt/old && echo pc-q35-7.2 pc-q35-9.1 > \
        /opt/old/qemu-system-x86_64
        echo Y > /sys/module/vfio_iommu_type1/parameters/allow_unsafe_interrupts"
    ))?;
    let places = [
        ("{thp}", "/sys/kernel/mm/transparent_hugepage".to_string()),
        (
            "{type1}",
            "/sys/module/vfio_iommu_type1/parameters".to_string(),
        ),
        ("{gpu}", format!("/sys/bus/pci/devices/{gpu}")),
    ];
    let set = |host: &mut EmulatedHost, script: &str| {
        let script = places
            .iter()
            .fold(script.to_string(), |script, (name, place)| {
                script.replace(name, place)
            });
        host.run(&script).map(drop)
    };
    let of_settings: Vec<&str> = SETTINGS
        .iter()
        .flat_map(|(rules, _, _)| rules.iter().copied())
        .collect();

    SETTINGS
        .iter()
        .try_for_each(|(_, wrong, _)| set(&mut host, wrong))?;
    host.run(&format!("cat > {KATA} <<'END'\n{WRONG_KATA}END"))?;
    let bare = diagnose(&mut host, "")?;
    // Without a VM there is nothing to look at, and without boots neither.
    all_are(&bare, &OF_VM, "unknown")?;
    all_are(&bare, &["guest-kernel", "gaps", "deadlines"], "unknown")?;
    let wrong_vm = "-object \
        memory-backend-ram,id=ram,size=256M,host-nodes=0,policy=bind,prealloc=on -machine \
        memory-backend=ram";
    vm(
        &mut host,
        256,
        &format!(
            "{wrong_vm} {PORTS} -device {},x-no-mmap=on",
            function(gpu, 0)
        ),
    )?;
    let wrong = diagnose(&mut host, "")?;
    end_vm(&mut host)?;
    all_are(&bare, &OF_KATA, "found")?;
    for findings in [&bare, &wrong] {
        all_are(findings, &of_settings, "found")?;
        all_are(findings, &OF_PARAMETERS, "found")?;
        all_are(
            findings,
            &["groups", "huge-pfnmaps", "iommufd", "huge-pages", "zeroing"],
            "found",
        )?;
    }
    all_are(&wrong, &OF_VM, "found")?;

    SETTINGS
        .iter()
        .try_for_each(|(_, _, right)| set(&mut host, right))?;
    host.run(&format!("cat > {KATA} <<'END'\n{RIGHT_KATA}END"))?;
    host.run("echo 3 > /proc/sys/vm/drop_caches && echo 1 > /proc/sys/vm/compact_memory")?;
    let small = diagnose(&mut host, "")?;
    all_are(&small, &of_settings, "fine")?;
    all_are(&small, &OF_KATA, "fine")?;
    // Huge pages that are asked for, and none that are free; then as many as a guest has.
    host.run(&format!("echo 'enable_hugepages = true' >> {KATA}"))?;
    all_are(&diagnose(&mut host, "")?, &["huge-pages-free"], "found")?;
    let pages = "/sys/devices/system/node/node0/hugepages/hugepages-2048kB/nr_hugepages";
    host.run(&format!("echo 512 > {pages} && test $(cat {pages}) = 512"))?;
    all_are(
        &diagnose(&mut host, "")?,
        &["huge-pages-free", "huge-pages", "zeroing"],
        "fine",
    )?;
    // QEMU's own memory is 80 MiB of small pages: less than a tenth of this.
    let right_vm = "-object \
        memory-backend-memfd,id=ram,size=1G,host-nodes=0,policy=bind,hugetlb=on,share=on -machine \
        memory-backend=ram";
    vm(
        &mut host,
        1024,
        &format!("{right_vm} {PORTS} -device {}", function(gpu, 0)),
    )?;
    let right = diagnose(&mut host, "")?;
    all_are(
        &right,
        &[
            "no-mmap",
            "prealloc",
            "huge-page-use",
            "memory-node",
            "pinning",
        ],
        "fine",
    )?;
    // VFIO is loaded: the kernel's own symbols show whether it has huge pfnmaps.
    let pfnmaps = &right["huge-pfnmaps"];
    ensure!(
        pfnmaps["evidence"].to_string().contains("vfio_pci_mmap_"),
        "{pfnmaps}"
    );
    Ok(Outcome::Measured(shown(&wrong)))
}

/// The same on a host whose kernel has no parameter wrong, and with its boots.
pub fn with_boots(host: &mut EmulatedHost) -> Result<()> {
    let findings = diagnose(host, &format!("--dir {BOOTS}"))?;
    all_are(&findings, &OF_PARAMETERS, "fine")?;
    all_are(
        &findings,
        &["iommu", "dma-entries", "type1-huge-pages"],
        "fine",
    )?;
    // Guests of this tree have Linux 6.1; none is confidential.
    all_are(&findings, &["guest-kernel"], "found")?;
    all_are(&findings, &["memory-acceptance"], "unknown")?;
    all_are(&findings, &["clocksource", "guest-modules"], "fine")
}

fn shown(findings: &BTreeMap<String, Value>) -> String {
    let found: Vec<&str> = findings
        .iter()
        .filter(|(_, f)| f["verdict"] == "found")
        .map(|(rule, _)| rule.as_str())
        .collect();
    format!(
        "{} rules found something: {}",
        found.len(),
        found.join(", ")
    )
}
