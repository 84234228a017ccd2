//! How QEMU runs a guest of an architecture.

use kata_gpu_wire::arch::Arch;

/// Words of QEMU's command line that differ between architectures.
#[derive(Debug)]
pub struct Qemu {
    pub program: &'static str,
    /// Debian's package of the program.
    pub package: &'static str,
    /// Emulated CPU. x86-64: 2^46 bytes of guest physical addresses, because 16 BARs of 128 GiB do
    /// not fit into QEMU's default of 40 bits. arm64: `max` spends seconds of a boot on emulated
    /// pointer authentication.
    pub cpu: &'static str,
    /// CPU with KVM.
    pub kvm_cpu: &'static str,
    /// arm64: a GICv2 runs out of interrupts with three GPUs of NVIDIA's module.
    pub machine: &'static str,
    /// First serial port, as the kernel's `console=` names it.
    pub console: &'static str,
    /// First slot for devices. arm64: interrupts of simulated GPUs are told apart from those of
    /// devices by their slots, and the GPUs have the lower 16.
    pub first_slot: Option<u8>,
}

/// QEMU's words for guests of this architecture.
pub const fn of(arch: Arch) -> &'static Qemu {
    match arch {
        Arch::X86_64 => &Qemu {
            program: "qemu-system-x86_64",
            package: "qemu-system-x86",
            cpu: "max,phys-bits=46",
            kvm_cpu: "max,phys-bits=46",
            machine: "q35",
            console: "ttyS0",
            first_slot: None,
        },
        Arch::Aarch64 => &Qemu {
            program: "qemu-system-aarch64",
            package: "qemu-system-arm",
            cpu: "neoverse-n1",
            kvm_cpu: "host",
            machine: "virt,gic-version=3",
            console: "ttyAMA0",
            first_slot: Some(16),
        },
    }
}
