//! The rows: a stable name, what it concerns, whose it is, how sure that is if nothing more is
//! known, what happened, and the cure.
//!
//! Cures of the driver's messages are NVIDIA's (README of the driver, its deployment guide for
//! confidential computing, its list of Xids) or follow from the source that prints the message.

named! {
    /// Subject of a failure.
    pub enum Subject {
        Gpu = "gpu",
        Guest = "guest",
        Sandbox = "sandbox",
    }
}

named! {
    /// Whose a failure is: where the cure is applied.
    pub enum Whose {
        /// The guest's image: its kernel, modules, firmware, programs.
        Image = "image",
        /// The guest's own doing, or its kernel's command line.
        Guest = "guest",
        Driver = "driver",
        Gpu = "GPU",
        /// The host: its kernel, VFIO, the state of its devices.
        Host = "host",
        /// Kata's configuration.
        Kata = "Kata's configuration",
        /// The pod, or the program in its container.
        Pod = "pod",
        /// The service that manages NVSwitches.
        Fabric = "fabric",
        /// This init.
        Init = "kata-gpu-init",
    }
}

named! {
    /// How sure a diagnosis is.
    pub enum Sure {
        /// The words have one meaning.
        Certain = "certain",
        /// The words usually mean this.
        Likely = "likely",
        /// A step failed, and nothing shows why: the cure is where to look.
        Unsure = "unsure",
    }
}

named! {
    /// The step in which a GPU failed.
    pub enum FailedStep {
        Module = "module",
        Enable = "enable",
        Probe = "probe",
        Nodes = "nodes",
        Open = "open",
        Init = "init",
        /// Failure after the GPU was usable.
        Running = "running",
        /// Failure of the init itself, in any step.
        Task = "task",
    }
}

impl FailedStep {
    /// The step for people, behind "failed".
    pub fn phrase(self) -> &'static str {
        match self {
            Self::Module => "in the driver's load",
            Self::Enable => "while the host mapped its memory",
            Self::Probe => "in the driver's probe",
            Self::Nodes => "when its device nodes were made",
            Self::Open => "when it was opened",
            Self::Init => "in initialisation",
            Self::Running => "after it was usable",
            Self::Task => "in kata-gpu-init itself",
        }
    }

    /// The reason if nothing more is known.
    pub fn general(self) -> Reason {
        match self {
            Self::Module => Reason::DriverLoadFailed,
            Self::Enable => Reason::EnableFailed,
            Self::Probe => Reason::ProbeFailed,
            Self::Nodes => Reason::NoDeviceNode,
            Self::Open => Reason::OpenFailed,
            Self::Init => Reason::InitFailed,
            Self::Running => Reason::OffTheBus,
            Self::Task => Reason::Internal,
        }
    }
}

macro_rules! rows {
    (@of_gpu Gpu $cure:literal) => { $cure };
    (@of_gpu $other:ident $cure:literal) => { "" };
    ($($reason:ident $name:literal $subject:ident $whose:ident $sure:ident, $what:literal, $cure:literal;)+) => {
        named! {
            /// A row of the catalogue. Names are for programs: stable, lower case, with hyphens.
            pub enum Reason { $($reason = $name),+ }
        }

        impl Reason {
            pub const fn subject(self) -> Subject {
                match self { $(Self::$reason => Subject::$subject),+ }
            }

            pub const fn whose(self) -> Whose {
                match self { $(Self::$reason => Whose::$whose),+ }
            }

            /// How sure the row is if nothing but the reason is known.
            pub const fn sure(self) -> Sure {
                match self { $(Self::$reason => Sure::$sure),+ }
            }

            /// The failure in words that end a sentence.
            pub const fn what(self) -> &'static str {
                match self { $(Self::$reason => $what),+ }
            }

            /// The cure, or the best next step.
            pub const fn cure(self) -> &'static str {
                match self { $(Self::$reason => $cure),+ }
            }

            /// The same of a GPU's row: the others' texts are no part of PID 1, which uses this.
            pub const fn cure_of_gpu(self) -> &'static str {
                match self { $(Self::$reason => rows!(@of_gpu $subject $cure)),+ }
            }
        }
    };
}

rows! {
    // GPUs, before the driver has them.
    DriverMissing "driver-missing" Gpu Image Certain,
        "the image has no driver for its kernel",
        "put nvidia.ko and nvidia-uvm.ko for the guest's kernel into /lib/modules of the image, \
         and run depmod -b on its root";
    DriverLoadFailed "driver-load-failed" Gpu Image Unsure,
        "the driver's module could not be loaded",
        "read the kernel's line: an unknown symbol or bad version is a module for another kernel \
         (kata-gpu-boot image verify), an unknown parameter is in modprobe.d or kernel_params";
    DriverFindsNoGpu "driver-finds-no-gpu" Gpu Driver Certain,
        "this driver knows none of the guest's GPUs",
        "use a driver for this generation: compare the GPUs' ids with the list in its README";
    DriverProbedNothing "driver-probed-nothing" Gpu Guest Certain,
        "the driver was kept from the guest's GPUs",
        "find what keeps it away: another driver (nouveau, vfio-pci), driver_override, or \
         driver_async_probe";
    NoProbeSucceeded "no-probe-succeeded" Gpu Driver Unsure,
        "the driver refused every GPU",
        "see the log lines of each GPU";
    EnableFailed "enable-failed" Gpu Host Likely,
        "the function could not be enabled",
        "the guest's firmware or the VMM gave this function no memory: check its BARs";
    ProbeFailed "probe-failed" Gpu Driver Unsure,
        "the driver refused the GPU and logged no known reason",
        "read the driver's lines around it; try the newest release of the branch, and the GPU in \
         a guest of its own";
    BarUnassigned "bar-unassigned" Gpu Kata Certain,
        "the guest has no room for the GPU's BARs",
        "give the VM a larger 64-bit MMIO window";
    BarFirewall "bar-firewall" Gpu Host Certain,
        "the GPU did not open its BARs within 4 s",
        "reset it on the host";
    OffTheBus "off-the-bus" Gpu Gpu Certain,
        "the GPU does not answer on the PCI bus",
        "reset it or power-cycle it on the host; if it comes again, look at power, riser and slot";
    NoInterrupt "no-interrupt" Gpu Host Certain,
        "the GPU has no interrupt",
        "the VMM must give this function MSI-X, MSI or an interrupt line; a GPU that has left the \
         bus has none of them";
    UnsupportedGpu "unsupported-gpu" Gpu Driver Certain,
        "this driver does not know this chip",
        "use a driver branch that does: compare the GPU's id with the list in its README";
    LegacyBranch "legacy-branch" Gpu Driver Certain,
        "this driver has retired this chip",
        "use the NVIDIA {branch} branch, the last one for this chip, with its proprietary modules";
    NeedsProprietary "needs-proprietary" Gpu Image Certain,
        "the open modules need a GPU with a GSP, and this chip (before Turing) has none",
        "put NVIDIA's proprietary modules into the image; 580 is the last branch for this chip";
    OpenRefused "open-refused" Gpu Image Certain,
        "the open modules of this release refuse this class of GPU",
        "set nvidia.NVreg_OpenRmEnableUnsupportedGpus=1 in kernel_params, or use the proprietary \
         modules, or a release from 560 on";
    RegistersGarbled "registers-garbled" Gpu Host Likely,
        "the driver reads the GPU's registers as garbage: the chip has a GSP and seems to have none",
        "check VFIO and the BARs' mapping on the host, reset the GPU, and see that GPU and guest \
         are both confidential or neither";
    VgpuDriver "vgpu-driver" Gpu Image Likely,
        "the driver knows this chip and refuses it, as it refuses a vGPU",
        "put NVIDIA's vGPU guest driver of the host's vGPU release into the image, or pass the \
         whole GPU through";

    // GPUs, from their binding on.
    NoMinor "no-minor" Gpu Driver Likely,
        "the driver's /proc files are missing or of another form",
        "is this driver version supported?";
    NoDeviceNode "no-device-node" Gpu Image Likely,
        "its device node could not be made",
        "is /dev a devtmpfs, and is there room in it?";
    OpenFailed "open-failed" Gpu Driver Unsure,
        "the driver refused to open the GPU and logged no known reason",
        "read the driver's lines before this one; reset the GPU on the host and start the guest \
         again";
    FirmwareMissing "firmware-missing" Gpu Image Certain,
        "the driver's firmware is not in the image",
        "put gsp_*.bin of the driver's own version, uncompressed, into \
         /lib/firmware/nvidia/<version> of the image";
    FirmwareBoot "firmware-boot" Gpu Gpu Likely,
        "the GPU's own processor (GSP) did not start",
        "reset the GPU on the host; if it stays, try another release of the driver";
    FspTimeout "fsp-timeout" Gpu Gpu Certain,
        "the GPU's security processor (FSP) does not answer",
        "reset the GPU on the host, with its power if a reset does not help";
    NeedsReset "needs-reset" Gpu Host Certain,
        "an earlier use left the GPU half initialised",
        "reset it on the host before the next guest";
    FabricNotReady "fabric-not-ready" Gpu Fabric Certain,
        "the NVLink fabric is not up",
        "start the fabric manager, in the guest or in the service VM, and read its log";
    FabricOrMode "fabric-or-mode" Gpu Fabric Unsure,
        "the GPU refuses to be attached: its NVLink fabric is not set up, or its mode (plain, \
         confidential, protected PCIe) is not the guest's",
        "look for SXid lines and at the fabric manager's log; then give all GPUs and NVSwitches one \
         mode on the host, and reset them";
    CcModeOn "cc-mode-on" Gpu Host Certain,
        "the GPU is in confidential-computing mode, and this guest is not confidential",
        "set the GPU's CC mode off on the host and reset it (the mode survives reboots), or start \
         the pod in a confidential guest";
    CcModeOff "cc-mode-off" Gpu Host Certain,
        "the guest is confidential, and the GPU is not in confidential-computing mode",
        "set the GPU's CC mode on on the host and reset it";
    CcNoCrypto "cc-no-crypto" Gpu Image Likely,
        "the guest's kernel lacks the cryptography for a session with a confidential GPU",
        "build ECDH and ECDSA into the guest's kernel, or load ecdh_generic and ecdsa_generic \
         before nvidia; rebuild a module that found stubs";
    CcRefused "cc-refused" Gpu Host Likely,
        "a confidential GPU comes up once per reset, and this one was up before, or has another \
         mode than the others",
        "reset all GPUs on the host and give them one mode, then restart the guest";
    AttachFailed "attach-failed" Gpu Driver Unsure,
        "the driver could not attach the GPU and logged no known reason",
        "read the driver's lines before this one; reset the GPU on the host and start the guest \
         again";
    StateLoadFailed "state-load-failed" Gpu Driver Unsure,
        "the driver could not load the GPU's state and logged no known reason",
        "read the driver's lines before this one; reset the GPU on the host and start the guest \
         again";
    NoBounceBuffer "no-bounce-buffer" Gpu Kata Certain,
        "the confidential guest's bounce buffer (swiotlb) is full",
        "raise swiotlb= in kernel_params: 524288 slots are 1 GiB";
    MemoryNotMovable "memory-not-movable" Gpu Guest Certain,
        "the guest's kernel added the GPU's coherent memory as not movable",
        "boot it with memhp_default_state=online_movable";
    InitFailed "init-failed" Gpu Driver Unsure,
        "the driver could not initialise the GPU and logged no known reason",
        "read the driver's lines before this one; reset the GPU on the host and start the guest \
         again";
    StepHangs "step-hangs" Gpu Driver Unsure,
        "its step has begun and not ended",
        "see the driver's lines (show -vv); if it stays, reset the GPU on the host and start the \
         guest again";
    Internal "internal" Gpu Init Certain,
        "kata-gpu-init failed itself",
        "a bug of this init: report it with the event stream";

    // Ends of guests.
    NoGpu "no-gpu" Guest Kata Likely,
        "no GPU reached the guest",
        "bind the GPU to vfio-pci on the host, and give the VM a port for it: hot_plug_vfio or \
         cold_plug_vfio, and pcie_root_port or pcie_switch_port as many as GPUs";
    SpecNotFound "spec-not-found" Guest Image Certain,
        "kata-agent does not find the CDI spec, so no container gets a GPU",
        "let /var/run of the image lead to /run (kata-gpu-boot image verify)";
    NoDriverFiles "no-driver-files" Guest Image Certain,
        "containers get their GPUs without the driver's libraries",
        "put the driver's user space (libcuda, libnvidia-ml) of the module's version into the image";
    OutOfMemory "out-of-memory" Guest Kata Certain,
        "the guest ran out of memory",
        "give the VM more memory (default_memory): the initrd, its modules and the driver live in it";
    NoRoot "no-root" Guest Kata Certain,
        "the guest's kernel found no root file system",
        "check image or initrd, and kernel_params (root=, dm-mod), in Kata's configuration";
    NoInitProgram "no-init-program" Guest Image Certain,
        "the guest's kernel found no program to start",
        "put kata-gpu-init there (kata-gpu-boot image replace-init), or name the program with rdinit=";
    InitDied "init-died" Guest Image Likely,
        "PID 1 of the guest ended, so its kernel panicked",
        "read the lines before the panic: they are the end of the init or of the agent";
    KernelPanic "kernel-panic" Guest Guest Unsure,
        "the guest's kernel panicked",
        "read the panic's line and those before it";
    DriverMismatch "driver-mismatch" Guest Image Certain,
        "the driver's libraries and its module are of different versions",
        "put libraries, firmware and modules of one release into the image";
    CtkFailed "ctk-failed" Guest Driver Likely,
        "nvidia-ctk found no usable GPU and wrote no CDI spec",
        "cure the GPU first; kata-gpu-init would have published the others";
    NvrcPanic "nvrc-panic" Guest Guest Likely,
        "NVRC gave up on an error",
        "read its message; NVRC powers off on any error, where kata-gpu-init goes on with the GPUs \
         that are left";
    PoweredOff "powered-off" Guest Guest Unsure,
        "the guest powered itself off",
        "read the lines before it";

    // Sandboxes and containers, by the runtime's words.
    CdiTimeout "cdi-timeout" Sandbox Guest Certain,
        "the agent gave up waiting for the container's GPUs in the CDI spec",
        "see which GPU was not ready, and why; if the boot is only slow, raise agent.cdi_timeout in \
         kernel_params";
    CdiUnknown "cdi-unknown" Sandbox Pod Certain,
        "the container asks for a device that the CDI spec does not have",
        "ask for nvidia.com/gpu=N with N below the number of the guest's GPUs, or all";
    AgentNoAnswer "agent-no-answer" Sandbox Guest Likely,
        "the agent never answered over vsock",
        "read the guest's console to its end (enable_debug): a panic, no agent in the image, or no \
         vsock in its kernel; a longer dial_timeout does not help";
    AgentLate "agent-late" Sandbox Kata Likely,
        "the agent had not answered when the runtime gave up, and the guest was still booting",
        "raise dial_timeout in Kata's configuration above what this guest's boot takes";
    CreateTimeout "create-timeout" Sandbox Kata Likely,
        "the container was not created in the time that the runtime waits",
        "see what the guest waited for; if the boot is only slow, raise create_container_timeout \
         in Kata's configuration, and runtimeRequestTimeout of the kubelet";
    AgentGone "agent-gone" Sandbox Guest Likely,
        "the agent went away during a call",
        "read the guest's console to its end: a panic, memory that ran out, or a power-off";
    NoKvm "no-kvm" Sandbox Host Certain,
        "the host's KVM cannot be used",
        "enable virtualisation in the host's firmware, and load kvm_intel or kvm_amd";
    VfioGroup "vfio-group" Sandbox Host Certain,
        "the host cannot give this GPU's IOMMU group to a VM",
        "bind every function of the group to vfio-pci, and end the VM or program that holds it";
    VmmOutOfMemory "vmm-out-of-memory" Sandbox Host Certain,
        "the host cannot give the VM its memory",
        "free memory or huge pages on the GPU's NUMA node, or lower default_memory; check the \
         shim's limit of locked memory";
    DmaLimit "dma-limit" Sandbox Host Certain,
        "the host's limit of DMA mappings for one VM is reached",
        "raise dma_entry_limit of vfio_iommu_type1 (65535 by default) on the host, or use huge pages";
    NoNetwork "no-network" Sandbox Host Certain,
        "the node's network plugin failed, before there was a VM",
        "read the plugin's own log on the node: Kata and the GPU have no part in it";
    NoRuntime "no-runtime" Sandbox Host Certain,
        "the node's container runtime does not have this pod's runtime",
        "install Kata on that node, with its handler in the configuration of containerd or CRI-O, or \
         keep the pod from it by the RuntimeClass' node selector";
    HostCdiUnknown "host-cdi-unknown" Sandbox Host Certain,
        "the node's own CDI specs do not have the device that the pod was given",
        "look at the device plugin's log and at /etc/cdi and /var/run/cdi on the node: no guest was \
         asked";
    NoPort "no-port" Sandbox Kata Certain,
        "Kata's configuration gives the VM no free port for this GPU",
        "set hot_plug_vfio or cold_plug_vfio to root-port, and pcie_root_port to the node's GPUs or \
         more";
    VmmFailed "vmm-failed" Sandbox Host Unsure,
        "the VMM ended before the guest ran",
        "read its own message in the runtime's error";
    SandboxFailed "sandbox-failed" Sandbox Kata Unsure,
        "the runtime gave the sandbox up",
        "read its error, and the guest's console with enable_debug";
}
