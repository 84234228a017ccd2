//! Words and facts of each failure, the most specific first: the first that fits decides.
//!
//! The driver's words are those of its open sources (kernel-open/nvidia/nv.c and nv-pci.c,
//! src/nvidia: osinit.c, conf_compute.c, kern_fsp.c, kernel_gsp.c), the runtimes' those of Kata and
//! containerd.

use super::facts::{Chip, Facts, Module};
use super::reason::{Reason, Sure};
use crate::driver_log::{InitCode, without_name};

/// One way in which a failure shows.
pub struct Signature {
    pub reason: Reason,
    pub sure: Sure,
    /// Texts that a message has, all of them.
    words: &'static [&'static str],
    /// Condition besides the words.
    pub when: fn(&Facts) -> bool,
}

impl Signature {
    pub fn is_in(&self, text: &str) -> bool {
        let parts = without_name(text);
        self.words
            .iter()
            .all(|words| parts.iter().any(|part| part.contains(words)))
    }
}

fn always(_: &Facts) -> bool {
    true
}

fn in_plain_guest(facts: &Facts) -> bool {
    facts.is_confidential == Some(false)
}

fn in_confidential_guest(facts: &Facts) -> bool {
    facts.is_confidential == Some(true)
}

fn without_gsp(facts: &Facts) -> bool {
    facts.chip().is_some_and(|chip| !chip.has_gsp())
}

fn with_gsp(facts: &Facts) -> bool {
    facts.chip().is_some_and(Chip::has_gsp)
}

/// Whether the driver's branch knows the chip, by its id.
fn is_known_to_driver(facts: &Facts) -> bool {
    facts
        .chip()
        .zip(facts.branch)
        .is_some_and(|(chip, branch)| (chip.known_since()..=chip.known_until()).contains(&branch))
}

fn is_too_old_for_driver(facts: &Facts) -> bool {
    facts
        .chip()
        .zip(facts.branch)
        .is_some_and(|(chip, branch)| branch > chip.known_until())
}

fn open_module_without_gsp(facts: &Facts) -> bool {
    facts.module == Some(Module::Open) && without_gsp(facts)
}

macro_rules! signatures {
    ($($(#[$text:meta])* $name:ident { $($reason:ident $sure:ident [$($words:literal),+] $when:ident;)+ })+) => {
        $($(#[$text])* pub const $name: &[Signature] = &[$(Signature {
            reason: Reason::$reason,
            sure: Sure::$sure,
            words: &[$($words),+],
            when: $when,
        }),+];)+
    };
}

signatures! {
    /// Failures of a GPU, by the driver's messages.
    OF_GPUS {
        OffTheBus Certain ["fallen off the bus"] always;
        NeedsReset Certain ["unexpected WPR2 already up"] always;
        MemoryNotMovable Certain ["the onlining zone is not movable"] always;
        // The kernel's.
        FirmwareMissing Certain ["Direct firmware load for ", "failed with error -2"] always;
        NoBounceBuffer Certain ["swiotlb buffer is full"] always;
        BarFirewall Certain ["failed to wait for bar firewall"] always;
        NoInterrupt Certain ["Can't find an IRQ"] always;
        BarUnassigned Certain ["assigned to your NVIDIA device is invalid"] always;
        BarUnassigned Certain ["is 0M @ 0x0"] always;

        LegacyBranch Certain ["supported through the NVIDIA ", "Legacy drivers"] always;
        LegacyBranch Certain ["is not supported by the NVIDIA", "driver release"] is_too_old_for_driver;
        OpenRefused Certain ["OpenRmEnableUnsupportedGpus"] always;
        NeedsProprietary Certain ["does not include the required GPU", "System Processor"] without_gsp;
        RegistersGarbled Likely ["does not include the required GPU", "System Processor"] with_gsp;
        NeedsProprietary Likely ["does not include the required GPU", "System Processor"] always;
        VgpuDriver Likely ["is not supported by the NVIDIA", "driver release"] is_known_to_driver;
        NeedsProprietary Likely ["is not supported by"] open_module_without_gsp;
        UnsupportedGpu Certain ["is not supported by"] always;
        UnsupportedGpu Certain ["not supported by this driver"] always;

        CcModeOn Certain ["CPU does not support confidential compute"] in_plain_guest;
        CcModeOn Likely ["CPU does not support confidential compute"] always;
        CcModeOff Certain ["GPU confidential compute capability is not enabled"] always;
        CcNoCrypto Certain ["libspdm expects LKCA but found stubs"] always;
        CcNoCrypto Certain ["Encryption FAILED"] in_confidential_guest;
        CcNoCrypto Likely ["Encryption FAILED"] always;
        CcNoCrypto Likely ["GSP-DMA decrypt"] always;
        FspTimeout Certain ["FSP command timed out"] always;
        FspTimeout Certain ["FSP secure boot partition timed out"] always;
        FspTimeout Certain ["FSP secure boot GSP prechecks failed"] always;
        FspTimeout Certain ["Timed out waiting for FSP command queue to be empty"] always;
        FspTimeout Likely ["FSP boot cmds failed"] always;

        NoInterrupt Certain ["No interrupts of any type are available"] always;
        // The kernel's, of a BAR that it cannot enable.
        BarUnassigned Certain ["not assigned"] always;
        BarUnassigned Likely [": no space for [mem"] always;
        BarUnassigned Likely ["can't assign; no space"] always;
        BarUnassigned Likely [": failed to assign [mem"] always;
        EnableFailed Certain ["pci_enable_device failed"] always;
        EnableFailed Certain ["can't enable device"] always;
        DriverFindsNoGpu Certain ["No NVIDIA GPU found"] always;
        DriverProbedNothing Certain ["No NVIDIA devices probed"] always;
        NoProbeSucceeded Certain ["None of the NVIDIA devices were initialized"] always;

    }

    /// Ends of a guest, by a line of its console.
    OF_GUESTS {
        OutOfMemory Certain ["Kernel panic - not syncing: Out of memory"] always;
        OutOfMemory Certain ["Kernel panic - not syncing: System is deadlocked on memory"] always;
        NoRoot Certain ["Kernel panic - not syncing: VFS: Unable to mount root fs"] always;
        NoInitProgram Certain ["Kernel panic - not syncing: No working init found"] always;
        NoInitProgram Certain ["Kernel panic - not syncing: Requested init", "failed"] always;
        InitDied Certain ["Kernel panic - not syncing: Attempted to kill init"] always;
        KernelPanic Certain ["Kernel panic - not syncing"] always;
        DriverMismatch Certain ["ERROR_LIB_RM_VERSION_MISMATCH"] always;
        CtkFailed Certain ["nvidia-ctk failed with status"] always;
        CtkFailed Certain ["level=error", "failed to write spec"] always;
        CtkFailed Certain ["level=error", "failed to generate CDI spec"] always;
        // The kernel's and modprobe's, of the driver's module.
        DriverMissing Certain ["modprobe: FATAL: Module nvidia not found"] always;
        DriverLoadFailed Certain ["nvidia: disagrees about version of symbol"] always;
        DriverLoadFailed Certain ["nvidia: Unknown symbol"] always;
        DriverLoadFailed Certain ["nvidia: version magic "] always;
        DriverLoadFailed Certain ["Loading of unsigned module is rejected"] always;
        DriverLoadFailed Certain ["Loading of module with unavailable key is rejected"] always;
        NvrcPanic Certain ["NVRC", "panicked at"] always;
        // Releases before its lines had a name.
        NvrcPanic Certain ["panic: panicked at src/"] always;
        OutOfMemory Certain ["Out of memory: Killed process"] always;
        PoweredOff Certain ["reboot: Power down"] always;
        PoweredOff Certain ["reboot: System halted"] always;
        PoweredOff Certain ["reboot: Restarting system"] always;

    }

    /// Failures of a sandbox or a container, by the runtime's error.
    OF_SANDBOXES {
        // Nothing of these comes from a guest.
        NoNetwork Certain ["failed to setup network for sandbox"] always;
        NoNetwork Certain ["failed to create pod network sandbox"] always;
        NoRuntime Certain ["failed to get sandbox runtime"] always;
        NoRuntime Certain ["no runtime for "] always;
        NoRuntime Certain ["failed to start shim: ", "no such file or directory"] always;
        HostCdiUnknown Certain ["CDI device injection failed"] always;
        HostCdiUnknown Certain ["OCI runtime create failed", "CDI devices"] always;
        NoPort Certain ["cold_plug_vfio= or hot_plug_vfio= port is not set"] always;
        NoPort Certain ["Bus 'rp", "not found"] always;
        NoPort Certain ["Bus 'swdp", "not found"] always;

        CdiTimeout Certain ["failed to inject devices after CDI timeout"] always;
        CdiUnknown Certain ["unresolvable CDI devices"] always;
        AgentNoAnswer Certain ["timed out connecting to vsock"] always;
        AgentNoAnswer Certain ["timed out connecting to hybrid vsocket"] always;
        AgentNoAnswer Certain ["Failed to Check if grpc server is working"] always;
        AgentNoAnswer Certain ["Failed to check if grpc server is working"] always;
        AgentNoAnswer Likely ["failed to connect to agent"] always;
        DmaLimit Certain ["possibly running out of DMA mappings"] always;
        DmaLimit Certain ["dma_map", "= -28"] always;
        VmmOutOfMemory Certain ["cannot set up guest memory"] always;
        VmmOutOfMemory Certain ["unable to map backing store for guest RAM"] always;
        VmmOutOfMemory Certain ["VFIO_MAP_DMA failed: Cannot allocate memory"] always;
        VmmOutOfMemory Certain ["dma_map", "Cannot allocate memory"] always;
        VmmOutOfMemory Likely ["dma_map", "Bad address"] always;
        NoKvm Certain ["/dev/kvm"] always;
        NoKvm Certain ["Could not access KVM kernel module"] always;
        VfioGroup Certain ["not viable"] always;
        VfioGroup Certain ["vfio", "Device or resource busy"] always;
        VfioGroup Likely ["failed to open /dev/vfio"] always;
        // QEMU's other errors about a device, whose address follows.
        VfioGroup Likely ["vfio 0"] always;
        VmmFailed Certain ["failed to launch qemu"] always;
        VmmFailed Certain ["QEMU exited"] always;
        VmmFailed Certain ["exiting QMP loop"] always;
        VmmFailed Certain ["timed out waiting for QMP ready"] always;
        AgentGone Certain ["ttrpc: closed"] always;
        AgentGone Certain ["Dead agent"] always;
        AgentGone Likely ["connection reset by peer"] always;
        CreateTimeout Certain ["CreateContainerRequest timed out"] always;
        CreateTimeout Likely ["context deadline exceeded"] always;
        CreateTimeout Likely ["DeadlineExceeded"] always;
    }
}

/// Reason of a code of RmInitAdapter. The status comes first: it is the more specific part if it is
/// one of these.
pub fn of_code(code: InitCode, facts: &Facts) -> (Reason, Sure) {
    match (code.stage, code.status) {
        (_, 0x81) => (Reason::FabricNotReady, Sure::Certain),
        // The adapter of a confidential GPU comes up once per reset.
        (0x22, 0x56) if in_confidential_guest(facts) => (Reason::CcRefused, Sure::Likely),
        // An invalid request: of a guest whose mode differs, or before the fabric is set up.
        (0x22, 0x3f) => (Reason::FabricOrMode, Sure::Unsure),
        (0x22, _) if facts.has_fabric => (Reason::FabricOrMode, Sure::Unsure),
        (0x61, _) => (Reason::FirmwareMissing, Sure::Certain),
        // Invalid state: the firmware's protected memory is set up already. The line about it names
        // no GPU.
        (0x62, 0x40) => (Reason::NeedsReset, Sure::Certain),
        (0x62, _) => (Reason::FirmwareBoot, Sure::Likely),
        // In public reports of drivers around 510: the firmware refused the GPU.
        (0x26, 0x56) => (Reason::FirmwareBoot, Sure::Likely),
        (0x22, _) => (Reason::AttachFailed, Sure::Unsure),
        (0x24 | 0x25, _) => (Reason::StateLoadFailed, Sure::Unsure),
        _ => (Reason::InitFailed, Sure::Unsure),
    }
}
