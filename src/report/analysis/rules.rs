//! Rules of `doctor` as data: what can make GPU guests start slowly, and which steps a cure
//! shortens. What finds each of them on a host is the doctor's own.

use kata_gpu_wire::catalogue::{derived, traced};
use kata_gpu_wire::failure::Reason;
use kata_gpu_wire::names;
use serde::Serialize;

/// A step that a rule's cure shortens: a step's name in [`kata_gpu_wire::catalogue`], and the
/// fraction of its time that is left with the cure.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Shortens {
    pub step: &'static str,
    pub to: f64,
}

/// Part of the host that a rule is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Area {
    Kernel,
    Memory,
    Iommu,
    Kata,
    Vmm,
    Device,
    Guest,
}

/// A rule.
#[derive(Debug)]
pub struct Rule {
    pub id: &'static str,
    pub area: Area,
    /// Fault of a host where the rule finds something.
    pub title: &'static str,
    /// Origin of the rule and of its figures.
    pub source: &'static str,
    /// Empty where nobody has a figure.
    pub shortens: &'static [Shortens],
    /// Cure for somebody who has only a boot; the doctor, who sees the host, says more.
    pub cure: &'static str,
    /// Failures of the catalogue that such a host can cause.
    pub explains: &'static [Reason],
}

/// The steps in which the host maps GPUs' BARs.
const fn mapping(to: f64) -> [Shortens; 2] {
    [
        Shortens {
            step: names::GPU_ENABLE,
            to,
        },
        Shortens {
            step: derived::GPU_MAP,
            to,
        },
    ]
}

/// The steps in which the host pins a guest's memory: the shim's, and the host's own where it was
/// traced.
const fn pinning(to: f64) -> [Shortens; 2] {
    [
        Shortens {
            step: derived::SHIM_CREATE,
            to,
        },
        Shortens {
            step: traced::VMM_PIN,
            to,
        },
    ]
}

/// The figures that rules about memory have in common.
macro_rules! prepared {
    ($($before:literal)?) => {
        concat!($($before, "; ",)? "1.2 TB guest with VFIO: 253 s with transparent huge pages, 476 \
                                    s without, 59 s with pages of 1 GiB")
    };
}

macro_rules! rules {
    (@shortens) => { &[] };
    (@shortens $shortens:expr) => { $shortens };
    (@cure) => { "" };
    (@cure $cure:literal) => { $cure };
    ($(
        $id:literal $area:ident $([$($explains:ident)*])?,
        $title:literal, $source:expr $(, $shortens:expr, $cure:literal)?;
    )*) => {
        pub const RULES: &[Rule] = &[$(Rule {
            id: $id,
            area: Area::$area,
            title: $title,
            source: $source,
            shortens: rules!(@shortens $($shortens)?),
            cure: rules!(@cure $($cure)?),
            explains: &[$($(Reason::$explains),*)?],
        }),*];
    };
}

// Behind the area stand the failures that the rule explains. Rules without a fourth and fifth line
// have no figure of what their cure would shorten.
rules! {
    "huge-pfnmaps" Kernel [CreateTimeout CdiTimeout],
        "VFIO maps the GPUs' BARs in pages of 4 KiB",
        "Linux 6.12 (vfio/pci: huge faults) and 6.15 (vfio/type1: page mask for pfnmaps): 8 M page \
         operations become 32 for a BAR of 32 GB, 1 s becomes 1 ms",
        &mapping(0.001),
        "kernel 6.15 or later on the host, and QEMU 9.2 or later";
    "iommufd" Kernel,
        "IOMMUFD is not there",
        "Linux 6.2; one comparison of a boot, 2:25 with VFIO's own container and 1:54 with \
         IOMMUFD, which its author later called unsure";
    "dma-entries" Kernel,
        "VFIO maps fewer regions than by default",
        "vfio_iommu_type1: dma_entry_limit, 65535";
    "type1-huge-pages" Kernel,
        "VFIO maps page by page into the IOMMU",
        "vfio_iommu_type1: disable_hugepages";
    "thp" Memory [AgentLate CreateTimeout],
        "Transparent huge pages are off",
        prepared!(),
        &pinning(253.0 / 476.0),
        "transparent_hugepage=always on the host";
    "thp-shared" Memory [AgentLate CreateTimeout],
        "Shared guest memory has no huge pages",
        prepared!("Documentation/admin-guide/mm/transhuge.rst: shmem_enabled and huge= of a mount"),
        &pinning(253.0 / 476.0),
        "shmem_enabled=always for transparent huge pages on the host";
    "thp-defrag" Memory,
        "The kernel makes no room for huge pages",
        "Documentation/admin-guide/mm/transhuge.rst: defrag";
    "huge-pages" Memory [AgentLate CreateTimeout],
        "Guests have no pages of 1 GiB",
        prepared!(),
        &pinning(59.0 / 253.0),
        "pages of 1 GiB on the host (hugepagesz=1G), and enable_hugepages in Kata's configuration";
    "huge-pages-free" Memory [VmmOutOfMemory],
        "Too few huge pages are free on a GPU's node",
        "Documentation/admin-guide/mm/hugetlbpage.rst: free_hugepages of a node";
    "fragmentation" Memory,
        "Free memory on a GPU's node is in small pieces",
        prepared!("fragmentation made mapping up to 15 times as long in one measurement");
    "unmovable" Memory,
        "Memory that cannot be moved is everywhere",
        "/proc/pagetypeinfo: compaction moves no such block";
    "zeroing" Memory,
        "Guest memory is zeroed twice",
        "Documentation/admin-guide/kernel-parameters.txt: init_on_alloc";
    "governor" Memory,
        "The host's CPUs run slowly",
        "Documentation/admin-guide/pm/cpufreq.rst: governors";
    "iommu" Iommu [VfioGroup],
        "No IOMMU is on",
        "Documentation/driver-api/vfio.rst";
    "iommu-mode" Iommu,
        "The host's own devices flush the IOMMU at each unmap",
        "Documentation/admin-guide/kernel-parameters.txt: iommu.strict, iommu=pt; slows disks and \
         networks that guests are loaded from";
    "interrupt-remapping" Iommu [VfioGroup],
        "Interrupts are not remapped",
        "Documentation/driver-api/vfio.rst: allow_unsafe_interrupts";
    "groups" Iommu [VfioGroup],
        "A GPU shares its IOMMU group",
        "Documentation/driver-api/vfio.rst: groups; ACS of the PCI Express specification";
    "agent-log" Kata,
        "The agent logs everything",
        "Kata: agent.log";
    "console" Kata,
        "The guest's console is an emulated serial port",
        "about 10 us for an exit, one each byte";
    "guest-initrd" Kata [OutOfMemory],
        "The guest unpacks an initrd",
        "src/initrd: kernel.initrd ends before the init runs",
        &[Shortens { step: derived::KERNEL_INITRD, to: 0.0 }],
        "a guest image instead of an initrd, or a smaller initrd";
    "firmware" Kata [AgentLate],
        "The guest starts by a UEFI firmware",
        "on an emulated host the BARs' time lay in the firmware: 15 s with 512 MiB of BARs, 45 s \
         with 4 GiB";
    "hot-plug" Kata [NoGpu BarUnassigned],
        "GPUs are plugged into a running guest, or into none",
        "Kata: hot_plug_vfio and cold_plug_vfio";
    "root-ports" Kata [NoGpu CreateTimeout CdiTimeout],
        "There are fewer root ports than GPUs",
        "Kata: pcie_root_port";
    "vcpus" Kata,
        "Guests have one vCPU",
        "src/init/boot/README.md: an enabling occupies a vCPU";
    "deadlines" Kata [AgentLate CreateTimeout CdiTimeout],
        "Boots come close to a deadline",
        "Kata: dial_timeout, create_container_timeout, agent.cdi_timeout";
    "qemu-version" Vmm [CreateTimeout CdiTimeout],
        "QEMU places BARs where huge pages do not fit",
        "QEMU 9.2: vfio/helpers aligns mmaps of BARs",
        &mapping(0.001),
        "QEMU 9.2 or later";
    "iommufd-used" Vmm,
        "A VM maps by VFIO's own container",
        "one comparison of a boot, 2:25 with VFIO's own container and 1:54 with IOMMUFD, which its \
         author later called unsure",
        &pinning(114.0 / 145.0),
        "IOMMUFD for VFIO, from Linux 6.2 and QEMU 8.2 on";
    "huge-page-use" Vmm,
        "A VM's memory is in small pages",
        prepared!("page tables of 2 GiB for a guest of 110 GiB in pages of 4 KiB");
    "memory-node" Vmm,
        "A VM's memory is far from its GPUs",
        "proc_pid_numa_maps(5)";
    "no-mmap" Vmm [CreateTimeout CdiTimeout],
        "A VM reaches BARs by exits",
        "QEMU: x-no-mmap of vfio-pci";
    "prealloc" Vmm,
        "One thread touches a VM's memory",
        "QEMU: prealloc and prealloc-threads of memory-backend";
    "pinning" Vmm,
        "vCPUs run far from their GPUs",
        "Documentation/admin-guide/mm/numaperf.rst";
    "bar-alignment" Device,
        "A large BAR has no aligned address",
        "Linux 6.12: a huge page needs an address that is a multiple of its size";
    "bar-size" Device [BarUnassigned],
        "A BAR is larger than it must be",
        "Documentation/ABI/testing/sysfs-bus-pci: resourceN_resize; cost of huge-pfnmaps";
    "power-state" Device [OffTheBus],
        "A GPU sleeps without power",
        "Documentation/power/pci.rst: D3cold; 100 ms in include/linux/pci.h";
    "link" Device,
        "A GPU's link is slower than it could be",
        "Documentation/ABI/testing/sysfs-bus-pci: current_link_speed, current_link_width";
    "reset-method" Device [NeedsReset],
        "A GPU has no reset of its own",
        "Documentation/ABI/testing/sysfs-bus-pci: reset_method";
    "gpu-outlier" Device,
        "A GPU takes longer than its neighbours",
        "boots of this host";
    "guest-kernel" Guest,
        "The guest's kernel has no huge pfnmaps",
        "Linux 6.12";
    "guest-pci" Guest,
        "PCI enumeration takes long",
        "about 10 us an access; BARs that the guest reaches directly cut a scan by 65 %",
        &[Shortens { step: derived::KERNEL_PCI, to: 0.35 }],
        "BARs and config space that the guest reaches without exits (a newer QEMU, fewer buses)";
    "guest-modules" Guest,
        "The init unpacks modules",
        "src/init/kernel_modules: finit_module with decompression in the kernel";
    "guest-firmware" Guest,
        "The GPU's firmware loads slowly",
        "not measured by any record";
    "memory-acceptance" Guest [AgentLate CreateTimeout],
        "A confidential guest accepts its memory",
        "about 4 minutes for a guest of 800 GiB, by users";
    "clocksource" Guest,
        "The guest's clock leaves the guest",
        "Documentation/virt/kvm/x86/timekeeping.rst";
    "gaps" Guest,
        "A part of the boots is not explained",
        "kata-gpu-boot show --by gap";
}
