//! Probes: kernel functions, events, and counts that the kernel keeps itself, a row each.
//!
//! Arguments come from the kernel's interface to user space (the structs of VFIO_IOMMU_MAP_DMA and
//! IOMMU_IOAS_MAP), read from the caller's memory, or are numbers and pointers as they are: no
//! offset into a struct of the kernel but the first members of `vm_area_struct`, vm_start and
//! vm_end. A function that this kernel lacks costs what its row says, and nothing else.

/// ioctl numbers of <linux/vfio.h> and <linux/iommufd.h>: type `;`, base 100 and 0x80.
pub const MAP_DMA: u64 = 0x3b71;
pub const UNMAP_DMA: u64 = 0x3b72;
pub const IOAS_MAP: u64 = 0x3b85;
pub const IOAS_UNMAP: u64 = 0x3b86;
/// Like IOAS_MAP, with an offset in a file in the place of an address.
pub const IOAS_MAP_FILE: u64 = 0x3b8f;

/// Beginning or return of a function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum At {
    Entry,
    Return,
}

/// A probe of a kernel function.
pub struct Probe {
    /// Name of its folder, beside the files `enable` and `filter` of the group: in Linux 6.1 an
    /// event of such a name has no folder.
    pub event: &'static str,
    pub at: At,
    pub function: &'static str,
    pub args: &'static str,
    pub filter: &'static str,
    /// Not known where the function cannot be probed; empty where another row says it.
    pub without: &'static str,
}

const fn entry(
    event: &'static str,
    function: &'static str,
    args: &'static str,
    filter: &'static str,
    without: &'static str,
) -> Probe {
    Probe {
        event,
        at: At::Entry,
        function,
        args,
        filter,
        without,
    }
}

const fn returns(event: &'static str, function: &'static str, args: &'static str) -> Probe {
    Probe {
        event,
        at: At::Return,
        function,
        args,
        filter: "",
        without: "",
    }
}

/// Probes whose events are read one by one.
pub const PROBES: &[Probe] = &[
    entry(
        "map_in",
        "vfio_iommu_type1_ioctl",
        "cmd=$arg2:x32 vaddr=+u8($arg3):x64 iova=+u16($arg3):x64 size=+u24($arg3):x64",
        "cmd == 0x3b71 || cmd == 0x3b72",
        "memory that is mapped by legacy VFIO (load vfio_iommu_type1 before)",
    ),
    returns("map_out", "vfio_iommu_type1_ioctl", "ret=$retval:s32"),
    returns("pin", "vfio_pin_pages_remote", "pages=$retval:s64"),
    entry(
        "ioas_in",
        "iommufd_fops_ioctl",
        "cmd=$arg2:x32 vaddr=+u16($arg3):x64 iova=+u32($arg3):x64 size=+u24($arg3):x64",
        "cmd == 0x3b85 || cmd == 0x3b86 || cmd == 0x3b8f",
        "memory that is mapped by IOMMUFD (this kernel is built without, or iommufd is not loaded)",
    ),
    returns("ioas_out", "iommufd_fops_ioctl", "ret=$retval:s32"),
    returns("pin_fast", "pin_user_pages_fast", "pages=$retval:s32"),
    entry(
        "mmap",
        "vfio_pci_core_mmap",
        "dev=$arg1:x64 start=+0($arg2):x64 end=+8($arg2):x64",
        "",
        "which memory of the VMM is whose BAR (load vfio-pci before)",
    ),
    entry(
        "open_in",
        "vfio_group_fops_unl_ioctl",
        "cmd=$arg2:x32 name=+u0($arg3):ustring",
        "cmd == 0x3b6a",
        "when the VMM opens functions (load vfio before)",
    ),
    returns("open_out", "vfio_group_fops_unl_ioctl", "ret=$retval:s32"),
    // VFIO_DEVICE_BIND_IOMMUFD; the file's own name is a type of probes since 6.10.
    entry(
        "bind_in",
        "vfio_device_fops_unl_ioctl",
        "cmd=$arg2:x32 name=$arg1:%pD",
        "cmd == 0x3b76",
        "when the VMM opens functions by /dev/vfio/devices (load vfio before; Linux 6.10 or later)",
    ),
    returns("bind_out", "vfio_device_fops_unl_ioctl", "ret=$retval:s32"),
    entry("opened", "vfio_pci_core_enable", "dev=$arg1:x64", "", ""),
    entry(
        "reset_in",
        "pci_try_reset_function",
        "pdev=$arg1:x64",
        "",
        "resets of functions",
    ),
    returns("reset_out", "pci_try_reset_function", "ret=$retval:s32"),
    // VFIO_DEVICE_PCI_HOT_RESET: of functions that have no reset of their own.
    entry(
        "bus_reset_in",
        "pci_reset_bus",
        "pdev=$arg1:x64",
        "",
        "resets of buses",
    ),
    returns("bus_reset_out", "pci_reset_bus", "ret=$retval:s32"),
];

/// A probe for the first run of a vCPU: KVM_RUN of <linux/kvm.h>. Off as soon as it was seen.
pub const RUN: Probe = entry(
    "run",
    "kvm_vcpu_ioctl",
    "cmd=$arg2:x32",
    "cmd == 0xae80",
    "when a vCPU runs first (load KVM before)",
);

/// Faults of a BAR's mapping, counted by the kernel: the first of these that there is. Old kernels
/// map a BAR page by page, in one fault.
pub const FAULTS: &[Probe] = &[
    entry("fault", "vfio_pci_mmap_huge_fault", "", "", ""),
    entry(
        "fault",
        "vfio_pci_mmap_fault",
        "",
        "",
        "first accesses to BARs",
    ),
];

/// Program starts that matter.
pub const EXEC: &str = "sched/sched_process_exec";
pub const EXEC_FILTER: &str = concat!(
    r#"filename ~ "*qemu*" || filename ~ "*cloud-hypervisor*" || "#,
    r#"filename ~ "*firecracker*" || filename ~ "*shim-kata*""#
);

/// A count that the kernel keeps by itself, a number for each thread and kind.
pub struct Count {
    pub name: &'static str,
    /// Event and its trigger.
    pub event: &'static str,
    pub trigger: &'static str,
    pub without: &'static str,
}

pub const EXITS: Count = Count {
    name: "exits",
    event: "kvm/kvm_userspace_exit",
    trigger: "hist:keys=common_pid,reason:size=4096",
    without: "exits of the guest to the VMM",
};
pub const PORTS: Count = Count {
    name: "ports",
    event: "kvm/kvm_pio",
    trigger: "hist:keys=common_pid,port:size=8192",
    without: "which exits are PCI configuration and serial console",
};
/// QEMU's place of PCI configuration by memory on the machine type q35.
pub const ECAM: Count = Count {
    name: "ecam",
    event: "kvm/kvm_mmio",
    trigger: "hist:keys=common_pid:size=4096 if gpa >= 0xb0000000 && gpa < 0xc0000000 && type != 0",
    without: "which exits are PCI configuration by memory",
};
pub const PAGE_FAULTS: Count = Count {
    name: "page-faults",
    event: "exceptions/page_fault_user",
    trigger: "hist:keys=common_pid:size=8192",
    without: "page faults of the VMM",
};
