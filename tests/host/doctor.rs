//! A failure means that a rule of `doctor` misses its fault, finds one on a good host, calls fine
//! what it cannot know, or reads a file that wakes a GPU or holds guests up. Hosts are trees of
//! files.

use crate::collect::program;
use crate::{TempDir, golden, project};
use kata_gpu_doctor::facts::{Depth, boots, facts_at};
use kata_gpu_doctor::rules::diagnose;
use kata_gpu_doctor::rules::finding::{Basis, Finding, Verdict};
use kata_gpu_doctor::rules::host_facts::{HostFacts, Seen};
use kata_gpu_doctor::rules::own_boots::{CLOCKSOURCE, CONFIDENTIAL, KERNEL, OwnBoots, UNPACKED};
use kata_gpu_report::analysis::rules::RULES;
use kata_gpu_report::data::host_check::HostCheck;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::collections::BTreeSet;
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Output, Stdio};

/// Path and content; `-> TARGET`: a link.
type Tree = &'static [(&'static str, &'static str)];

const KATA: &str = "/opt/kata/share/defaults/kata-containers/configuration-qemu-nvidia-gpu.toml";
const QEMU: &str = "/opt/kata/bin/qemu-system-x86_64";

/// A VM's command line with what differs between hosts: memory backend and device.
macro_rules! command_line {
    ($object:literal, $device:literal) => {
        command_line!($object, $device, "quiet console=hvc0")
    };
    ($object:literal, $device:literal, $append:literal) => {
        concat!(
            "/opt/kata/bin/qemu-system-x86_64\0-name\0sandbox-a\0-machine\0q35\0-m\0",
            "16384M\0-smp\04\0-object\0memory-backend-",
            $object,
            "\0-device\0vfio-pci,host=0000:41:00.0",
            $device,
            "\0-append\0",
            $append,
            "\0"
        )
    };
}

/// Kata's configuration with the keys that differ between hosts.
macro_rules! kata {
    ($keys:literal, $more:literal) => {
        concat!(
            "[hypervisor.qemu]\npath = \"/opt/kata/bin/qemu-system-x86_64\"\n\
                 image = \"/opt/kata/gpu.image\"\ndefault_memory = 16384\n",
            $keys,
            "[agent.kata]\ndial_timeout = 60\n",
            $more
        )
    };
}

/// A host with two GPUs, a configuration and a running VM, where all is well.
const WELL: Tree = &[
    ("/proc/sys/kernel/osrelease", "6.15.4\n"),
    ("/proc/cmdline", "root=/dev/sda1 iommu=pt\n"),
    ("/proc/mounts", "tmpfs /dev/shm tmpfs rw,huge=advise 0 0\n"),
    (
        "/proc/buddyinfo",
        "Node 0, zone   Normal    9    8    7    6    5    4    3    2    1    0  9000\n",
    ),
    (
        "/proc/pagetypeinfo",
        "Page block order: 9\n\nNumber of blocks type     Unmovable      Movable  \
             Reclaimable\nNode 0, zone   Normal    10   990    5\n",
    ),
    (
        "/proc/interrupts",
        "           CPU0\n 24:   7  IR-PCI-MSI-0000:00:1f.2    0-edge  ahci\n",
    ),
    (
        "/proc/kallsyms",
        "0000000000000000 t vfio_pci_mmap_huge_fault\t[vfio_pci_core]\n",
    ),
    (
        "/boot/config-6.15.4",
        "CONFIG_IOMMUFD=m\n# CONFIG_INIT_ON_ALLOC_DEFAULT_ON is not set\n",
    ),
    ("/dev/iommu", ""),
    (
        "/sys/kernel/mm/transparent_hugepage/enabled",
        "always [madvise] never\n",
    ),
    (
        "/sys/kernel/mm/transparent_hugepage/defrag",
        "always defer defer+madvise [madvise] never\n",
    ),
    (
        "/sys/kernel/mm/transparent_hugepage/shmem_enabled",
        "always within_size [advise] never deny force\n",
    ),
    (
        "/sys/module/vfio_iommu_type1/parameters/dma_entry_limit",
        "65535\n",
    ),
    (
        "/sys/module/vfio_iommu_type1/parameters/disable_hugepages",
        "N\n",
    ),
    ("/sys/devices/system/node/node0/cpulist", "0-7\n"),
    ("/sys/devices/system/node/node1/cpulist", "8-15\n"),
    (
        "/sys/devices/system/node/node0/hugepages/hugepages-1048576kB/free_hugepages",
        "64\n",
    ),
    (
        "/sys/devices/system/cpu/cpufreq/policy0/scaling_governor",
        "performance\n",
    ),
    ("/sys/class/iommu/dmar0/devices", ""),
    ("/sys/kernel/iommu_groups/7/type", "identity\n"),
    ("/sys/kernel/iommu_groups/7/devices/0000:41:00.0", ""),
    ("/sys/kernel/iommu_groups/8/type", "identity\n"),
    ("/sys/kernel/iommu_groups/8/devices/0000:42:00.0", ""),
    (
        "/sys/bus/pci/devices/0000:41:00.0/iommu_group",
        "-> ../../../../kernel/iommu_groups/7",
    ),
    (
        "/sys/bus/pci/devices/0000:42:00.0/iommu_group",
        "-> ../../../../kernel/iommu_groups/8",
    ),
    ("/sys/bus/pci/devices/0000:43:00.0/vendor", "0x15b3\n"),
    ("/sys/bus/pci/devices/0000:43:00.0/class", "0x020700\n"),
    (QEMU, "\u{7f}ELF pc-q35-9.1 pc-q35-10.0-machine pc-q35-2.12"),
    ("/opt/kata/gpu.image", "not an archive"),
    (
        KATA,
        kata!(
            "enable_hugepages = true\ncold_plug_vfio = \"root-port\"\ndefault_vcpus = 4\n",
            ""
        ),
    ),
    (
        "/proc/41/status",
        "Uid:\t0\t0\t0\t0\nNSpid:\t41\nVmPTE:\t  400 kB\n",
    ),
    (
        "/proc/41/cmdline",
        command_line!("file,id=m,size=16384M,mem-path=/dev/hugepages", ""),
    ),
    (
        "/proc/41/smaps_rollup",
        "Rss:  400000 kB\nAnonHugePages: 390000 kB\nPrivate_Hugetlb: 16777216 kB\n",
    ),
    (
        "/proc/41/numa_maps",
        "7f00 bind:0 file=/dev/hugepages/m huge N0=16 kernelpagesize_kB=1048576\n",
    ),
    ("/proc/41/fd/0", "-> /dev/null"),
    ("/proc/41/fd/9", "-> /dev/iommu"),
    ("/proc/41/task/42/comm", "CPU 0/KVM\n"),
    ("/proc/41/task/42/status", "Cpus_allowed_list:\t0-3\n"),
];

/// Files of each GPU.
const GPU: Tree = &[
    ("vendor", "0x10de\n"),
    ("class", "0x030200\n"),
    ("numa_node", "0\n"),
    (
        "resource",
        "0x00000000c0000000 0x00000000c0ffffff 0x0000000000140204\n\
         0x0000000000000000 0x0000000000000000 0x0000000000000000\n\
         0x0000380000000000 0x0000381fffffffff 0x000000000014220c\n\
         0x0000000000000000 0x0000000000000000 0x0000000000000000\n\
         0x0000382000000000 0x0000382001ffffff 0x000000000014220c\n\
         0x0000000000000000 0x0000000000000000 0x0000000000000000\n\
         0x0000000000000000 0x0000000000000000 0x0000000000000000\n",
    ),
    ("resource2_resize", "000000000003ffc0\n"),
    ("power_state", "D0\n"),
    ("reset_method", "flr bus\n"),
    ("current_link_speed", "32.0 GT/s PCIe\n"),
    ("max_link_speed", "32.0 GT/s PCIe\n"),
    ("current_link_width", "16\n"),
    ("max_link_width", "16\n"),
];
const GPUS: [&str; 2] = ["0000:41:00.0", "0000:42:00.0"];

/// Files that change where guests have no pages of hugetlbfs.
const SMALL: Tree = &[
    (
        KATA,
        kata!("cold_plug_vfio = \"root-port\"\ndefault_vcpus = 4\n", ""),
    ),
    (
        "/proc/41/cmdline",
        command_line!("ram,id=m,size=16384M", ""),
    ),
    (
        "/proc/41/smaps_rollup",
        "Rss: 16777216 kB\nAnonHugePages: 16700000 kB\n",
    ),
];

fn write(root: &Path, tree: &[(&str, &str)]) {
    for (path, content) in tree {
        let path = root.join(path.trim_start_matches('/'));
        crate::make_dir(path.parent().unwrap());
        match content.strip_prefix("-> ") {
            Some(target) => crate::link(target, &path),
            None => crate::write(&path, content),
        }
    }
}

/// The host where all is well, with changes.
fn host(name: &str, changes: &[Tree], gone: &[&str]) -> TempDir {
    let dir = TempDir::new(&format!("doctor-{name}"));
    write(&dir.0, WELL);
    for gpu in GPUS {
        write(&dir.0.join("sys/bus/pci/devices").join(gpu), GPU);
    }
    changes.iter().for_each(|tree| write(&dir.0, tree));
    for path in gone {
        let path = dir.0.join(path.trim_start_matches('/'));
        let removed = if path.is_dir() {
            fs::remove_dir_all(&path)
        } else {
            fs::remove_file(&path)
        };
        removed.unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    }
    dir
}

/// Six boots without anything wrong.
fn good_boots() -> OwnBoots {
    let mut boots = OwnBoots {
        count: 6,
        ..OwnBoots::default()
    };
    let s = |seconds: f64| vec![(seconds * 1e9) as i64; 6];
    boots.sums.insert("kernel.pci".into(), s(0.05));
    boots.sums.insert("module.load".into(), s(0.5));
    (boots.up, boots.agent_ready, boots.unexplained) = (s(20.0), s(3.0), s(0.1));
    for gpu in ["a", "b", "c"] {
        boots.enablings.insert(gpu.into(), s(0.004));
    }
    for (fact, value) in [
        (KERNEL, "6.18.3"),
        (CLOCKSOURCE, "kvm-clock"),
        (CONFIDENTIAL, "false"),
    ] {
        boots.facts.insert((fact, value.into()), 6);
    }
    boots
}

fn facts(dir: &TempDir) -> HostFacts {
    HostFacts {
        boots: good_boots(),
        ..facts_at(&dir.0, None, Depth::Full).unwrap()
    }
}

/// Faults of a host, and files that it must lack for the rule to know nothing.
struct Case {
    rule: &'static str,
    /// Hosts on which the rule finds something.
    bad: &'static [Tree],
    /// Boots with which it does.
    boots: fn(&mut OwnBoots),
    /// Files without which nothing is known; `boots` are the boots.
    gone: &'static [&'static str],
    /// Seconds by the rule's model.
    seconds: Option<f64>,
}

fn as_they_are(_: &mut OwnBoots) {}

fn set(boots: &mut OwnBoots, fact: &'static str, value: &str) {
    boots.facts.retain(|(name, _), _| *name != fact);
    boots.facts.insert((fact, value.into()), 6);
}

const fn files(rule: &'static str, bad: &'static [Tree], gone: &'static [&'static str]) -> Case {
    Case {
        rule,
        bad,
        boots: as_they_are,
        gone,
        seconds: None,
    }
}

const fn model(
    rule: &'static str,
    bad: &'static [Tree],
    gone: &'static [&'static str],
    seconds: f64,
) -> Case {
    Case {
        rule,
        bad,
        boots: as_they_are,
        gone,
        seconds: Some(seconds),
    }
}

const fn of_boots(rule: &'static str, boots: fn(&mut OwnBoots), seconds: Option<f64>) -> Case {
    Case {
        rule,
        bad: &[&[]],
        boots,
        gone: &["boots"],
        seconds,
    }
}

const OLD: Tree = &[
    ("/proc/sys/kernel/osrelease", "6.1.0-40-amd64\n"),
    (
        "/proc/kallsyms",
        "0 t vfio_pci_mmap_fault\t[vfio_pci_core]\n",
    ),
];
const NO_GPU: &[&str] = &["/sys/bus/pci/devices"];
const NO_VM: &[&str] = &["/proc/41"];
const NO_KATA: &[&str] = &[KATA];

/// 128 GiB and 48 MiB of each of two GPUs; 16 GiB of memory.
const BARS: f64 = 2.0 * 3.27 * (128.0 + 48.0 / 1024.0) / 128.0;
const GIB_16: f64 = (16u64 << 30) as f64 / 1.2e12;

const CASES: &[Case] = &[
    model(
        "huge-pfnmaps",
        &[OLD, &[("/proc/sys/kernel/osrelease", "6.12.38-deb13\n")]],
        &["/proc/sys/kernel/osrelease"],
        BARS,
    ),
    files("iommufd", &[&[]], &["/boot/config-6.15.4"]),
    files(
        "dma-entries",
        &[&[(
            "/sys/module/vfio_iommu_type1/parameters/dma_entry_limit",
            "64\n",
        )]],
        &["/sys/module/vfio_iommu_type1"],
    ),
    files(
        "type1-huge-pages",
        &[&[(
            "/sys/module/vfio_iommu_type1/parameters/disable_hugepages",
            "Y\n",
        )]],
        &["/sys/module/vfio_iommu_type1"],
    ),
    model(
        "thp",
        &[&[(
            "/sys/kernel/mm/transparent_hugepage/enabled",
            "always madvise [never]\n",
        )]],
        &["/sys/kernel/mm/transparent_hugepage"],
        GIB_16 * 223.0,
    ),
    model(
        "thp-shared",
        &[&[
            (
                "/sys/kernel/mm/transparent_hugepage/shmem_enabled",
                "always within_size advise [never] deny force\n",
            ),
            (
                "/proc/41/cmdline",
                command_line!("memfd,id=m,size=16384M,share=on", ""),
            ),
        ]],
        &[KATA, "/proc/41"],
        GIB_16 * 223.0,
    ),
    files(
        "thp-defrag",
        &[&[(
            "/sys/kernel/mm/transparent_hugepage/defrag",
            "always [defer] defer+madvise madvise never\n",
        )]],
        &["/sys/kernel/mm/transparent_hugepage"],
    ),
    model("huge-pages", &[&[]], &[KATA, "/proc/41"], GIB_16 * 194.0),
    files(
        "huge-pages-free",
        &[&[(
            "/sys/devices/system/node/node0/hugepages/hugepages-1048576kB/free_hugepages",
            "15\n",
        )]],
        &["/sys/devices/system/node/node0/hugepages"],
    ),
    model(
        "fragmentation",
        &[
            &[(
                "/proc/buddyinfo",
                "Node 0, zone   Normal    9    8    7    6    5    4    3    2  90000\n",
            )],
            // Pages of 64 KiB: blocks of 32 MiB are no huge pages.
            &[
                (
                    "/proc/buddyinfo",
                    "Node 0, zone   Normal    9    8    7    6    5    4    3    2    1  900\n",
                ),
                (
                    "/sys/kernel/mm/transparent_hugepage/hpage_pmd_size",
                    "536870912\n",
                ),
            ],
        ],
        &["/proc/buddyinfo"],
        GIB_16 * 223.0,
    ),
    files(
        "unmovable",
        &[&[(
            "/proc/pagetypeinfo",
            "Number of blocks type  Unmovable Movable Reclaimable\n\
                 Node 0, zone   Normal    300   600    5\n",
        )]],
        &["/proc/pagetypeinfo"],
    ),
    model(
        "zeroing",
        &[
            &[("/proc/cmdline", "init_on_alloc=1\n")],
            &[("/boot/config-6.15.4", "CONFIG_INIT_ON_ALLOC_DEFAULT_ON=y\n")],
        ],
        &["/boot/config-6.15.4"],
        GIB_16 * 59.0,
    ),
    files(
        "governor",
        &[&[(
            "/sys/devices/system/cpu/cpufreq/policy0/scaling_governor",
            "powersave\n",
        )]],
        &["/sys/devices/system/cpu/cpufreq"],
    ),
    files("iommu", &[&[]], &["/sys/class/iommu"]),
    files(
        "iommu-mode",
        &[&[("/sys/kernel/iommu_groups/8/type", "DMA\n")]],
        &["/sys/kernel/iommu_groups"],
    ),
    files(
        "interrupt-remapping",
        &[&[(
            "/proc/interrupts",
            " 24:   7  PCI-MSI-0000:00:1f.2    0-edge  ahci\n",
        )]],
        &["/proc/interrupts"],
    ),
    files(
        "groups",
        &[&[("/sys/kernel/iommu_groups/8/devices/0000:43:00.0", "")]],
        NO_GPU,
    ),
    files(
        "agent-log",
        &[&[(
            KATA,
            kata!(
                "kernel_params = \"agent.log=debug\"\n",
                "enable_debug = true\n"
            ),
        )]],
        &[KATA, "/proc/41"],
    ),
    model(
        "console",
        &[&[(
            "/proc/41/cmdline",
            command_line!("ram,id=m", "", "console=ttyS0"),
        )]],
        &[KATA, "/proc/41"],
        0.5,
    ),
    files(
        "guest-initrd",
        &[&[
            (
                KATA,
                "[hypervisor.qemu]\ninitrd = \"/opt/kata/gpu.initrd\"\n",
            ),
            ("/opt/kata/gpu.initrd", "\u{1f}x"),
        ]],
        &["/opt/kata/gpu.image"],
    ),
    files(
        "firmware",
        &[&[(KATA, kata!("firmware = \"/opt/kata/OVMF.fd\"\n", ""))]],
        NO_KATA,
    ),
    files(
        "hot-plug",
        &[
            &[(KATA, kata!("hot_plug_vfio = \"root-port\"\n", ""))],
            &[(KATA, kata!("cold_plug_vfio = \"no-port\"\n", ""))],
        ],
        NO_KATA,
    ),
    files(
        "root-ports",
        &[
            &[(
                KATA,
                kata!("hot_plug_vfio = \"root-port\"\npcie_root_port = 1\n", ""),
            )],
            // runtime-rs, by its key, adds no port.
            &[(
                KATA,
                kata!(
                    "cold_plug_vfio = \"root-port\"\npcie_root_port = 1\n",
                    "[runtime]\nhypervisor_name = \"qemu\"\n"
                ),
            )],
        ],
        NO_KATA,
    ),
    files(
        "vcpus",
        &[&[(KATA, kata!("default_vcpus = 1\n", ""))]],
        NO_KATA,
    ),
    Case {
        rule: "deadlines",
        bad: &[&[]],
        boots: |boots| boots.agent_ready.push(59_000_000_000),
        gone: NO_KATA,
        seconds: None,
    },
    model(
        "qemu-version",
        &[&[(QEMU, "\u{7f}ELF pc-q35-9.1 pc-q35-2.12")]],
        &[QEMU],
        BARS,
    ),
    files(
        "iommufd-used",
        &[&[("/proc/41/fd/8", "-> /dev/vfio/vfio")]],
        NO_VM,
    ),
    model(
        "huge-page-use",
        &[&[(
            "/proc/41/smaps_rollup",
            "Rss: 16777216 kB\nAnonHugePages: 0 kB\n",
        )]],
        NO_VM,
        GIB_16 * 223.0,
    ),
    files(
        "memory-node",
        &[&[(
            "/proc/41/numa_maps",
            "7f00 default huge N0=8 N1=8 kernelpagesize_kB=1048576\n",
        )]],
        NO_VM,
    ),
    files(
        "no-mmap",
        &[&[(
            "/proc/41/cmdline",
            command_line!("ram,id=m", ",x-no-mmap=on"),
        )]],
        NO_VM,
    ),
    files(
        "prealloc",
        &[&[(
            "/proc/41/cmdline",
            command_line!("ram,id=m,prealloc=on\0-smp\01", ""),
        )]],
        NO_VM,
    ),
    files(
        "pinning",
        &[&[("/proc/41/task/42/status", "Cpus_allowed_list:\t0-15\n")]],
        NO_VM,
    ),
    files(
        "bar-alignment",
        &[&[(
            "/sys/bus/pci/devices/0000:41:00.0/resource",
            concat!(
                "0x00000000c0000000 0x00000000c0ffffff 0x0000000000140204\n0x0 0x0 0x0\n",
                "0x0000000000000000 0x0000001fffffffff 0x000000002014220c\n"
            ),
        )]],
        NO_GPU,
    ),
    files("bar-size", &[OLD], NO_GPU),
    model(
        "power-state",
        &[&[("/sys/bus/pci/devices/0000:42:00.0/power_state", "D3cold\n")]],
        NO_GPU,
        0.1,
    ),
    files(
        "link",
        &[
            &[(
                "/sys/bus/pci/devices/0000:42:00.0/current_link_width",
                "8\n",
            )],
            &[(
                "/sys/bus/pci/devices/0000:42:00.0/current_link_speed",
                "2.5 GT/s PCIe\n",
            )],
            // No driver has it.
            &[
                ("/sys/bus/pci/devices/0000:42:00.0/power_state", "unknown\n"),
                (
                    "/sys/bus/pci/devices/0000:42:00.0/current_link_width",
                    "8\n",
                ),
            ],
            // A GPU that sleeps hides no other's fault.
            &[
                ("/sys/bus/pci/devices/0000:41:00.0/power_state", "D3hot\n"),
                (
                    "/sys/bus/pci/devices/0000:42:00.0/current_link_width",
                    "8\n",
                ),
            ],
        ],
        NO_GPU,
    ),
    files(
        "reset-method",
        &[&[("/sys/bus/pci/devices/0000:41:00.0/reset_method", "bus\n")]],
        NO_GPU,
    ),
    of_boots(
        "gpu-outlier",
        |boots| drop(boots.enablings.insert("c".into(), vec![1_504_000_000; 6])),
        Some(1.5),
    ),
    of_boots("guest-kernel", |boots| set(boots, KERNEL, "6.1.62"), None),
    of_boots(
        "guest-pci",
        |boots| {
            drop(
                boots
                    .sums
                    .insert("kernel.pci".into(), vec![2_000_000_000; 6]),
            )
        },
        Some(1.3),
    ),
    of_boots("guest-modules", |boots| set(boots, UNPACKED, "zstd"), None),
    of_boots(
        "memory-acceptance",
        |boots| set(boots, CONFIDENTIAL, "true"),
        Some(4.8),
    ),
    of_boots("clocksource", |boots| set(boots, CLOCKSOURCE, "hpet"), None),
    of_boots(
        "gaps",
        |boots| boots.unexplained = vec![3_000_000_000; 6],
        Some(3.0),
    ),
];

const RESOURCE_41: &str = "/sys/bus/pci/devices/0000:41:00.0/resource";
const RESOURCE_42: &str = "/sys/bus/pci/devices/0000:42:00.0/resource";
const ZEROS: &str =
    "0x0000000000000000 0x0000000000000000 0x0000000000000000\n0x0 0x0 0x0\n0x0 0x0 0x0\n";
const BAR_0: &str =
    "0x00000000c0000000 0x00000000c0ffffff 0x0000000000140204\n0x0 0x0 0x0\n0x0 0x0 0x0\n";
/// A link and a BAR with which two rules find something, of GPUs that sleep.
const ASLEEP: Tree = &[
    ("/sys/bus/pci/devices/0000:41:00.0/power_state", "D3hot\n"),
    ("/sys/bus/pci/devices/0000:42:00.0/power_state", "D3cold\n"),
    (
        "/sys/bus/pci/devices/0000:42:00.0/current_link_width",
        "63\n",
    ),
];
const NO_SIZES: &[&str] = &[
    "/sys/bus/pci/devices/0000:41:00.0/resource2_resize",
    "/sys/bus/pci/devices/0000:42:00.0/resource2_resize",
];

/// GPUs of a host with small pages that hide something: changes, files gone, rules that then are
/// unknown, and a part of the reason.
const HIDDEN: &[(Tree, &[&str], &[&str], &str)] = &[
    (ASLEEP, &[], &["link", "bar-size"], "the GPU sleeps"),
    (
        &[(RESOURCE_41, ZEROS), (RESOURCE_42, ZEROS)],
        &[],
        &["bar-alignment", "huge-pfnmaps"],
        "its BARs have no addresses",
    ),
    (
        &[(RESOURCE_41, BAR_0), (RESOURCE_42, BAR_0)],
        &[],
        &["bar-alignment", "huge-pfnmaps"],
        "its BARs have no addresses",
    ),
    (
        &[(RESOURCE_42, ZEROS)],
        &[],
        &["bar-alignment"],
        "its BARs have no addresses",
    ),
    (&[], NO_SIZES, &["bar-size"], "no resourceN_resize"),
];

/// Files whose reading holds up guests, with what a rule finds in them.
const COSTLY: Tree = &[
    (
        "/proc/pagetypeinfo",
        "Number of blocks type  Unmovable Movable Reclaimable\n\
             Node 0, zone   Normal    300   600    5\n",
    ),
    (
        "/proc/41/smaps_rollup",
        "Rss: 16777216 kB\nAnonHugePages: 0 kB\n",
    ),
    (
        "/proc/41/numa_maps",
        "7f00 default huge N0=8 N1=8 kernelpagesize_kB=1048576\n",
    ),
];

/// Changes besides a case's own, without which the rule has nothing to look at.
fn changes(case: &Case) -> (&'static [Tree], &'static [&'static str]) {
    match case.rule {
        "thp" | "huge-pages" | "fragmentation" | "zeroing" | "thp-shared" | "thp-defrag" => {
            (&[SMALL], &[])
        }
        "iommufd" => (&[], &["/dev/iommu"]),
        "iommu" => (&[], &["/sys/class/iommu/dmar0"]),
        _ => (&[], &[]),
    }
}

fn found<'a>(findings: &'a [Finding], rule: &str) -> &'a Finding {
    findings
        .iter()
        .find(|f| f.rule.id == rule)
        .unwrap_or_else(|| panic!("no rule {rule}"))
}

fn ids(findings: &[Finding], verdict: Verdict) -> Vec<&'static str> {
    findings
        .iter()
        .filter(|f| f.verdict == verdict)
        .map(|f| f.rule.id)
        .collect()
}

#[test]
fn on_a_host_where_all_is_well_nothing_is_found() {
    let well = diagnose(&facts(&host("well", &[], &[])));
    assert_eq!(
        ids(&well, Verdict::Found),
        <[&str; 0]>::default(),
        "{well:#?}"
    );
    // No record of a guest shows it: unknown on any host.
    assert_eq!(
        ids(&well, Verdict::Unknown),
        ["guest-firmware"],
        "{well:#?}"
    );
    let seen = |f: &&Finding| f.verdict == Verdict::Fine && f.evidence.is_empty();
    assert_eq!(
        well.iter().filter(seen).count(),
        0,
        "fine, and by what? {well:#?}"
    );
    let small = diagnose(&facts(&host("small", &[SMALL], &[])));
    assert_eq!(ids(&small, Verdict::Found), ["huge-pages"], "{small:#?}");
}

#[test]
fn each_rule_finds_what_is_wrong_and_its_cost() {
    let of_cases: BTreeSet<&str> = CASES
        .iter()
        .map(|case| case.rule)
        .chain(["guest-firmware"])
        .collect();
    assert_eq!(
        of_cases,
        RULES.iter().map(|rule| rule.id).collect(),
        "each rule has a case"
    );
    for case in CASES {
        let (also, without) = changes(case);
        for (nth, bad) in case.bad.iter().enumerate() {
            let mut facts = facts(&host(
                &format!("{}-{nth}", case.rule),
                &[also, &[*bad]].concat(),
                without,
            ));
            (case.boots)(&mut facts.boots);
            facts.boots.console_bytes = vec![50_000; 6];
            let findings = diagnose(&facts);
            let finding = found(&findings, case.rule);
            assert_eq!(finding.verdict, Verdict::Found, "{finding:#?}");
            assert!(
                !finding.evidence.is_empty() && !finding.text.is_empty(),
                "{finding:#?}"
            );
            match (case.seconds, &finding.cost) {
                (Some(seconds), Some(cost)) => assert!(
                    (cost.seconds / seconds - 1.0).abs() < 0.01,
                    "{} {finding:#?}",
                    case.rule
                ),
                (None, None) => {}
                (want, _) => panic!("{want:?}: {finding:#?}"),
            }
        }
    }
}

#[test]
fn a_deadline_under_a_minute_or_below_the_boots_here_is_found() {
    let deadlines = |name: &str, config: &'static str, after_agent: i64| {
        let changes: Tree = vec![(KATA, config)].leak();
        let mut facts = facts(&host(name, &[changes], &[]));
        // The running VM's words would count before the configuration's.
        facts.vms.clear();
        facts.boots.after_agent.push(after_agent * 1_000_000_000);
        let findings = diagnose(&facts);
        let finding = found(&findings, "deadlines");
        (finding.verdict, format!("{:?}", finding.evidence))
    };
    let short = kata!("", "[runtime]\ncreate_container_timeout = 45\n");
    let (verdict, evidence) = deadlines("deadline-short", short, 1);
    assert!(
        verdict == Verdict::Found && evidence.contains("create_container_timeout = 45 s"),
        "{evidence}"
    );
    let (verdict, evidence) = deadlines("deadline-boots", kata!("", ""), 81);
    assert!(
        verdict == Verdict::Found && evidence.contains("agent.cdi_timeout = 100 s; longest"),
        "{evidence}"
    );
    let raised = kata!("kernel_params = \"agent.cdi_timeout=300\"\n", "");
    assert_eq!(deadlines("deadline-well", raised, 81).0, Verdict::Fine);
}

#[test]
fn a_rule_without_its_evidence_is_unknown_and_never_fine() {
    for case in CASES {
        let (also, without) = changes(case);
        let gone: Vec<&str> = case
            .gone
            .iter()
            .copied()
            .filter(|path| *path != "boots")
            .collect();
        let without: Vec<&str> = without
            .iter()
            .copied()
            .filter(|path| !gone.iter().any(|gone| path.starts_with(gone)))
            .collect();
        let mut facts = facts(&host(
            &format!("gone-{}", case.rule),
            also,
            &[without, gone].concat(),
        ));
        if case.gone.contains(&"boots") {
            facts.boots = OwnBoots::default();
        }
        let findings = diagnose(&facts);
        let finding = found(&findings, case.rule);
        assert_eq!(finding.verdict, Verdict::Unknown, "{finding:#?}");
        assert!(!finding.text.is_empty(), "{finding:#?}");
    }
    let empty = diagnose(&HostFacts::default());
    assert_eq!(
        ids(&empty, Verdict::Unknown).len(),
        RULES.len(),
        "{empty:#?}"
    );
}

#[test]
fn a_gpu_that_hides_its_state_is_unknown_and_not_at_fault() {
    for (nth, (tree, gone, rules, why)) in HIDDEN.iter().enumerate() {
        let findings = diagnose(&facts(&host(&format!("hidden-{nth}"), &[OLD, *tree], gone)));
        for rule in *rules {
            let finding = found(&findings, rule);
            assert_eq!(finding.verdict, Verdict::Unknown, "{nth} {finding:#?}");
            assert!(finding.text.contains(why), "{nth} {finding:#?}");
        }
    }
    // Reading these would wake the GPU.
    let files = facts(&host("asleep", &[ASLEEP], &[])).files;
    for name in ["current_link_width", "max_link_speed", "resource2_resize"] {
        assert_eq!(
            files.optional(&format!("/sys/bus/pci/devices/0000:42:00.0/{name}")),
            Ok(None)
        );
    }
}

#[test]
fn a_check_beside_guests_leaves_costly_files_unread() {
    let dir = host("light", &[COSTLY], &[]);
    let by_hand = diagnose(&facts(&dir));
    let light = diagnose(&facts_at(&dir.0, None, Depth::Light).unwrap());
    for rule in ["unmovable", "huge-page-use", "memory-node"] {
        assert_eq!(found(&by_hand, rule).verdict, Verdict::Found, "{rule}");
        let finding = found(&light, rule);
        assert_eq!(finding.verdict, Verdict::Unknown, "{finding:#?}");
        assert!(finding.text.contains("left out"), "{finding:#?}");
    }
}

#[test]
fn a_directory_with_too_many_names_is_unknown() {
    let dir = host("names", &[], &[]);
    let class = dir.0.join("sys/class/iommu");
    // dmar0 is there.
    (1..65_536).for_each(|nth| drop(fs::File::create(class.join(format!("dmar{nth}"))).unwrap()));
    assert_eq!(
        found(&diagnose(&facts(&dir)), "iommu").verdict,
        Verdict::Fine
    );
    crate::write(class.join("one more"), "");
    let findings = diagnose(&facts(&dir));
    let finding = found(&findings, "iommu");
    assert_eq!(
        (finding.verdict, finding.text.as_str()),
        (
            Verdict::Unknown,
            "/sys/class/iommu: more than 65536 entries"
        )
    );
}

#[test]
fn what_only_root_may_read_is_named() {
    let mut facts = facts(&host("root", &[], &[]));
    let paths = [
        "/proc/pagetypeinfo",
        "/proc/41/fd",
        "/proc/41/smaps_rollup",
        "/proc/41/numa_maps",
    ];
    paths
        .iter()
        .for_each(|path| facts.files.insert(*path, Seen::Denied));
    let findings = diagnose(&facts);
    for (rule, path) in ["unmovable", "iommufd-used", "huge-page-use", "memory-node"]
        .iter()
        .zip(paths)
    {
        let finding = found(&findings, rule);
        assert_eq!(
            (finding.verdict, finding.text.as_str()),
            (Verdict::NeedsRoot, path)
        );
    }
}

#[test]
fn own_boots_count_more_than_a_model_unless_they_hide_it() {
    let mut facts = facts(&host("measured", &[OLD], &[]));
    facts
        .boots
        .sums
        .insert("gpu.enable".into(), vec![26_000_000_000; 6]);
    let cost = |facts: &HostFacts| {
        found(&diagnose(facts), "huge-pfnmaps")
            .cost
            .clone()
            .unwrap()
    };
    let measured = cost(&facts);
    assert!(
        matches!(measured.basis, Basis::Measured(_)) && (measured.seconds - 25.974).abs() < 1e-6,
        "{measured:?}"
    );
    // A firmware has mapped the BARs before: the step is short, and the time is lost all the same.
    facts
        .boots
        .sums
        .insert("gpu.enable".into(), vec![20_000_000; 6]);
    assert!(
        matches!(cost(&facts).basis, Basis::Model(_)),
        "{:?}",
        cost(&facts)
    );
}

#[test]
fn a_finding_that_explains_failed_boots_stands_first() {
    let case = |rule: &str| CASES.iter().find(|case| case.rule == rule).unwrap();
    let mut facts = facts(&host(
        "failed",
        &[OLD, case("reset-method").bad[0], case("groups").bad[0]],
        &[],
    ));
    facts.boots.failed = vec![
        vec!["needs-reset"],
        vec!["needs-reset", "other"],
        vec!["other"],
    ];
    let findings = diagnose(&facts);
    let found: Vec<_> = findings
        .iter()
        .filter(|f| f.verdict == Verdict::Found)
        .map(|f| (f.rule.id, f.failed_boots))
        .collect();
    assert_eq!(
        found[..2],
        [("reset-method", 2), ("huge-pfnmaps", 0)],
        "the second costs more seconds: {found:?}"
    );
}

#[test]
fn a_boot_with_impossible_numbers_is_counted_and_in_no_sum() {
    let dir = TempDir::new("doctor-implausible");
    let copy = |n: u32, name: &str| {
        let from = project().join(format!("tests/fixtures/boots/{name}.ndjson"));
        let id = format!("0f7a1f8e-0000-4000-8000-00000000000{n}");
        fs::copy(from, dir.0.join(id).with_extension("ndjson")).unwrap();
    };
    copy(1, "recorded-8-gpus-fast-host");
    let (alone, _) = boots(&dir.0).unwrap();
    copy(2, "hostile");
    let (both, unread) = boots(&dir.0).unwrap();
    assert_eq!((alone.implausible, both.implausible), (0, 1), "{unread:?}");
    let without_count = OwnBoots {
        implausible: 0,
        ..both
    };
    assert_eq!(format!("{alone:?}"), format!("{without_count:?}"));
}

#[test]
fn hostile_files_are_bounded_and_drive_no_terminal() {
    let dir = host(
        "hostile",
        &[SMALL],
        &[
            "/proc/buddyinfo",
            "/proc/interrupts",
            "/sys/kernel/mm/transparent_hugepage/enabled",
        ],
    );
    let put = |path: &str, bytes: &[u8]| crate::write(dir.0.join(path), bytes);
    // A pipe blocks, a device has no end, and a number has digits without end.
    nix::unistd::mkfifo(&dir.0.join("proc/buddyinfo"), nix::sys::stat::Mode::S_IRWXU).unwrap();
    crate::link("/dev/zero", dir.0.join("proc/interrupts"));
    crate::link(
        "enabled",
        dir.0.join("sys/kernel/mm/transparent_hugepage/enabled"),
    );
    put(
        "sys/module/vfio_iommu_type1/parameters/dma_entry_limit",
        &[b'9'; 100_000],
    );
    put(
        "sys/kernel/mm/transparent_hugepage/defrag",
        b"\xff\xfe[never]",
    );
    put(
        "sys/kernel/mm/transparent_hugepage/shmem_enabled",
        b"[\x1b[2Jnever]",
    );
    put("proc/cmdline", &vec![b' '; 20 << 20]);
    put("proc/sys/kernel/osrelease", b"../../etc/shadow");
    put(
        "proc/41/task/42/status",
        b"Cpus_allowed_list:\t0-4294967295,7-3\n",
    );
    put(
        "proc/41/numa_maps",
        b"7f00 N0=18446744073709551615 N1=18446744073709551615 N-1=x \
         kernelpagesize_kB=18446744073709551615\n",
    );
    put(
        "sys/bus/pci/devices/0000:41:00.0/resource",
        b"0x0 0xffffffffffffffff 0x0\n0xffffffffffffffff 0x0 0x0\nx\n",
    );
    put("sys/bus/pci/devices/0000:41:00.0/resource2_resize", b"0");
    put("proc/41/smaps_rollup", b"Rss: 18446744073709551615 kB\n");
    put(
        QEMU.trim_start_matches('/'),
        &[
            &b"pc-q35-4294967296.1 pc-q35-\xff virt-99999999999.1"[..],
            &[0; 3 << 20],
        ]
        .concat(),
    );
    put(
        KATA.trim_start_matches('/'),
        b"[hypervisor.qemu]\nfirmware = \"\\u001b[2J\\u202e\"\n\
         default_memory = 9223372036854775807\n",
    );
    let findings = diagnose(&facts(&dir));
    let unknown = ids(&findings, Verdict::Unknown);
    for rule in [
        "fragmentation",
        "interrupt-remapping",
        "thp",
        "dma-entries",
        "thp-defrag",
        "zeroing",
        "huge-pfnmaps",
        "pinning",
        "qemu-version",
    ] {
        assert!(
            unknown.contains(&rule),
            "{rule}: {:#?}",
            found(&findings, rule)
        );
    }
    for words in [&["-v"][..], &["--json"]] {
        let output = doctor(&dir, words);
        let text = crate::stdout(&output);
        crate::assert_printable(&text);
        assert!(text.len() < 100_000, "{} bytes", text.len());
    }
}

fn doctor(root: &TempDir, words: &[&str]) -> Output {
    Command::new(program())
        .arg("doctor")
        .arg("--root")
        .arg(&root.0)
        .args(words)
        .output()
        .unwrap()
}

#[test]
fn the_pages_of_a_slow_host_and_of_a_good_one_are_golden() {
    let slow: &[Tree] = &[
        OLD,
        SMALL,
        &[
            (
                "/sys/kernel/mm/transparent_hugepage/enabled",
                "always madvise [never]\n",
            ),
            ("/proc/41/fd/8", "-> /dev/vfio/vfio"),
        ],
    ];
    let slow = host("golden-slow", slow, &["/boot/config-6.15.4"]);
    let boots = TempDir::new("doctor-golden-boots");
    for (nth, name) in ["recorded-8-gpus-slow-host", "recorded-8-gpus-fast-host"]
        .iter()
        .enumerate()
    {
        let to = boots
            .0
            .join(format!("0f7a1f8e-0000-4000-8000-00000000000{nth}"));
        for extension in ["ndjson", "console"] {
            let from = project().join(format!("tests/fixtures/boots/{name}.{extension}"));
            fs::copy(from, to.with_extension(extension)).unwrap();
        }
    }
    let dir = boots.0.to_str().unwrap();
    for (name, words, status) in [
        ("slow.txt", &["--dir", dir][..], 1),
        ("slow-verbose.txt", &["--dir", dir, "-v"], 1),
        ("slow.json", &["--dir", dir, "--json"], 1),
        ("slow-without-boots.txt", &["--at-most", "5"], 1),
        ("slow-without-boots.txt", &["--at-most", "500"], 0),
    ] {
        let output = doctor(&slow, words);
        assert_eq!(output.status.code(), Some(status), "{output:?}");
        golden(
            &format!("doctor/{name}"),
            &crate::stdout(&output).replace(dir, "boots"),
        );
    }
    let well = doctor(&host("golden-well", &[], &[]), &[]);
    assert_eq!(well.status.code(), Some(0), "{well:?}");
    golden("doctor/well.txt", &crate::stdout(&well));
    // A directory without a boot is no host without trouble.
    let none = doctor(&slow, &["--dir", "/nonexistent"]);
    assert_eq!(none.status.code(), Some(2), "{none:?}");
}

#[test]
fn doctor_writes_nothing_and_needs_no_root() {
    let dir = host("unchanged", &[OLD], &[]);
    let state = || {
        let mut all = Vec::new();
        let mut folders = vec![dir.0.clone()];
        while let Some(folder) = folders.pop() {
            for entry in fs::read_dir(folder).unwrap().map(Result::unwrap) {
                let meta = entry.path().symlink_metadata().unwrap();
                folders.extend(meta.is_dir().then(|| entry.path()));
                all.push((entry.path(), meta.modified().unwrap(), meta.len()));
            }
        }
        all.sort();
        all
    };
    let before = state();
    assert!(before.len() > 60, "{}", before.len());
    assert_eq!(doctor(&dir, &[]).status.code(), Some(1), "found something");
    assert_eq!(state(), before);
}

#[test]
fn the_check_beside_the_collector_leaves_its_findings_there() {
    let (host, dir) = (
        host("daemonset", &[OLD, COSTLY], &[]),
        TempDir::new("doctor-daemonset-boots"),
    );
    let words = [
        "doctor",
        "--daemonset-check",
        "--root",
        host.0.to_str().unwrap(),
        "--dir",
        dir.0.to_str().unwrap(),
    ];
    let mut command = Command::new(program());
    let mut child = command.args(words).stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    let mut lines = BufReader::new(child.stdout.as_mut().unwrap());
    lines.read_line(&mut line).unwrap();
    let check = HostCheck::read(&dir.0).expect("a line comes after its check");
    kill(Pid::from_raw(child.id() as i32), Signal::SIGTERM).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(0));
    assert!(
        (check.findings["huge-pfnmaps"] / BARS - 1.0).abs() < 0.01,
        "{check:?}"
    );
    assert_eq!(
        check.findings.keys().collect::<Vec<_>>(),
        ["bar-size", "huge-pfnmaps"],
        "{line}"
    );
}
