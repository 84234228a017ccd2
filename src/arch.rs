//! The architectures of guests: one table of what differs between them.
//!
//! [`Arch::OURS`] is that of this program: in a guest, the guest's. A host's program takes the
//! architecture from the files that it works on (an ELF file, a kernel), never from its machine.
//!
//! Not here: how the CPU's counter is read ([`crate::sys`]), and lists of places that hold those of
//! both architectures, because files of either may be looked at.

use crate::elf::{Class, Library};

/// An architecture of guests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arch {
    X86_64,
    Aarch64,
}

/// Facts about one architecture.
#[derive(Debug)]
pub struct Facts {
    /// As `uname -m` and Rust's targets have it.
    pub name: &'static str,
    /// `e_machine` of its ELF files.
    pub elf_machine: u16,
    /// Debian's name of its library folders: /usr/lib/TRIPLET.
    pub triplet: &'static str,
    /// Ends of the folder names `lib..` that glibc's loader has built in outside of Debian.
    pub lib_suffixes: &'static [&'static str],
    /// Whether C's `char` is signed, as glibc compares names in the loader's cache.
    pub signed_char: bool,
    pub qemu: Qemu,
}

/// How QEMU runs a guest of an architecture.
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

impl Arch {
    /// Architecture of this program.
    pub const OURS: Self = if cfg!(target_arch = "aarch64") { Self::Aarch64 } else { Self::X86_64 };
    pub const ALL: [Self; 2] = [Self::X86_64, Self::Aarch64];

    pub const fn facts(self) -> &'static Facts {
        match self {
            Self::X86_64 => &Facts {
                name: "x86_64",
                elf_machine: 62,
                triplet: "x86_64-linux-gnu",
                lib_suffixes: &["", "64", "x32"],
                signed_char: true,
                qemu: Qemu {
                    program: "qemu-system-x86_64",
                    package: "qemu-system-x86",
                    cpu: "max,phys-bits=46",
                    kvm_cpu: "max,phys-bits=46",
                    machine: "q35",
                    console: "ttyS0",
                    first_slot: None,
                },
            },
            Self::Aarch64 => &Facts {
                name: "aarch64",
                elf_machine: 183,
                triplet: "aarch64-linux-gnu",
                lib_suffixes: &["", "64"],
                signed_char: false,
                qemu: Qemu {
                    program: "qemu-system-aarch64",
                    package: "qemu-system-arm",
                    cpu: "neoverse-n1",
                    kvm_cpu: "host",
                    machine: "virt,gic-version=3",
                    console: "ttyAMA0",
                    first_slot: Some(16),
                },
            },
        }
    }

    /// Architecture of an ELF file; None for all others.
    pub fn of_elf_machine(machine: u16) -> Option<Self> {
        Self::ALL.into_iter().find(|arch| arch.facts().elf_machine == machine)
    }

    /// Length of the start of a file that [`Arch::of_head`] looks at.
    pub const HEAD: usize = 0x206;

    /// Architecture that a program or an uncompressed kernel is for, by the start of its file. None
    /// for other files and architectures.
    pub fn of_head(head: &[u8]) -> Option<Self> {
        let has = |at: usize, mark: &[u8]| head.get(at..).is_some_and(|rest| rest.starts_with(mark));
        // e_ident: magic, any class, little-endian; e_machine is at 18 in either class.
        if has(0, b"\x7fELF") && has(5, &[1]) {
            return head.get(18..20).and_then(|m| m.try_into().ok()).and_then(|m| Self::of_elf_machine(u16::from_le_bytes(m)));
        }
        // Linux's Documentation: arch/x86/boot.rst and arch/arm64/booting.rst.
        match (has(0x202, b"HdrS"), has(56, b"ARM\x64")) {
            (true, _) => Some(Self::X86_64),
            (_, true) => Some(Self::Aarch64),
            (false, false) => None,
        }
    }

    /// Flags of a library for the loader (`FLAG_*` in glibc's ldconfig.h); None for libraries that
    /// `ldconfig` skips on this architecture.
    pub fn flags(self, library: &Library) -> Option<u32> {
        use Class::{Elf32, Elf64};
        const LIBC6: u32 = 0x3;
        const EM_386: u16 = 3;
        const EM_ARM: u16 = 40;
        const ARM_EABI: u32 = 0xff00_0000;
        const ARM_EABI_5: u32 = 0x0500_0000;
        const ARM_FLOAT_HARD: u32 = 0x400;
        const ARM_FLOAT_SOFT: u32 = 0x200;
        let own = library.machine == self.facts().elf_machine;
        match (self, library.machine, library.class) {
            (Self::X86_64, _, Elf64) if own => Some(0x300 | LIBC6),
            (Self::X86_64, _, Elf32) if own => Some(0x800 | LIBC6), // x32
            (Self::X86_64, EM_386, Elf32) => Some(LIBC6),
            (Self::Aarch64, _, Elf64) if own => Some(0xa00 | LIBC6),
            (Self::Aarch64, EM_ARM, Elf32) => Some(match library.flags {
                f if f & ARM_EABI == ARM_EABI_5 && f & ARM_FLOAT_HARD != 0 => 0x900 | LIBC6,
                f if f & ARM_EABI == ARM_EABI_5 && f & ARM_FLOAT_SOFT != 0 => 0xb00 | LIBC6,
                _ => LIBC6,
            }),
            (Self::X86_64 | Self::Aarch64, _, _) => None,
        }
    }
}

impl std::fmt::Display for Arch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.facts().name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_or_kernel_is_for_the_architecture_in_its_head() {
        let with = |marks: &[(usize, &[u8])]| {
            let mut head = vec![0; Arch::HEAD];
            marks.iter().for_each(|(at, mark)| head[*at..*at + mark.len()].copy_from_slice(mark));
            Arch::of_head(&head)
        };
        let elf = |data: u8, machine: &[u8]| with(&[(0, b"\x7fELF\x02"), (5, &[data]), (18, machine)]);
        assert_eq!((elf(1, &[62, 0]), elf(1, &[183, 0])), (Some(Arch::X86_64), Some(Arch::Aarch64)));
        // s390x is big-endian, RISC-V unknown.
        assert_eq!((elf(2, &[0, 22]), elf(2, &[0, 62]), elf(1, &[243, 0])), (None, None, None));
        assert_eq!(with(&[(0x202, b"HdrS")]), Some(Arch::X86_64));
        // An Image begins like a PE program, for firmware that starts it itself.
        assert_eq!(with(&[(0, b"MZ"), (56, b"ARMd")]), Some(Arch::Aarch64));
        for head in [&b""[..], b"\x7fELF", b"\x1f\x8b\x08", &[0; Arch::HEAD]] {
            assert_eq!(Arch::of_head(head), None, "{head:?}");
        }
    }

    #[test]
    fn this_program_is_for_the_architecture_in_its_own_head() {
        use std::io::Read;
        let mut head = vec![0; Arch::HEAD];
        std::fs::File::open("/proc/self/exe").unwrap().read_exact(&mut head).unwrap();
        assert_eq!(Arch::of_head(&head), Some(Arch::OURS));
    }
}
