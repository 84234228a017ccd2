//! The architectures of guests: one table of what differs between them.
//!
//! [`Arch::OURS`] is that of this program: in a guest, the guest's. A host's program takes the
//! architecture from the files that it works on (an ELF file, a kernel), never from its machine.
//!
//! Not here: how the CPU's counter is read, how QEMU runs a guest, and lists of places that hold
//! those of both architectures, because files of either may be looked at.

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
}

impl Arch {
    /// Architecture of this program.
    pub const OURS: Self = if cfg!(target_arch = "aarch64") {
        Self::Aarch64
    } else {
        Self::X86_64
    };
    pub const ALL: [Self; 2] = [Self::X86_64, Self::Aarch64];

    pub const fn facts(self) -> &'static Facts {
        match self {
            Self::X86_64 => &Facts {
                name: "x86_64",
                elf_machine: 62,
                triplet: "x86_64-linux-gnu",
                lib_suffixes: &["", "64", "x32"],
                signed_char: true,
            },
            Self::Aarch64 => &Facts {
                name: "aarch64",
                elf_machine: 183,
                triplet: "aarch64-linux-gnu",
                lib_suffixes: &["", "64"],
                signed_char: false,
            },
        }
    }

    /// Architecture of an ELF file; None for all others.
    pub fn of_elf_machine(machine: u16) -> Option<Self> {
        Self::ALL
            .into_iter()
            .find(|arch| arch.facts().elf_machine == machine)
    }

    /// Length of the start of a file that [`Arch::of_head`] looks at.
    pub const HEAD: usize = 0x206;

    /// Architecture that a program or an uncompressed kernel is for, by the start of its file. None
    /// for other files and architectures.
    pub fn of_head(head: &[u8]) -> Option<Self> {
        let has =
            |at: usize, mark: &[u8]| head.get(at..).is_some_and(|rest| rest.starts_with(mark));
        // e_ident: magic, any class, little-endian; e_machine is at 18 in either class.
        if has(0, b"\x7fELF") && has(5, &[1]) {
            return head
                .get(18..20)
                .and_then(|m| m.try_into().ok())
                .and_then(|m| Self::of_elf_machine(u16::from_le_bytes(m)));
        }
        // Linux's Documentation: arch/x86/boot.rst and arch/arm64/booting.rst.
        match (has(0x202, b"HdrS"), has(56, b"ARM\x64")) {
            (true, _) => Some(Self::X86_64),
            (_, true) => Some(Self::Aarch64),
            (false, false) => None,
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
            marks
                .iter()
                .for_each(|(at, mark)| head[*at..*at + mark.len()].copy_from_slice(mark));
            Arch::of_head(&head)
        };
        let elf =
            |data: u8, machine: &[u8]| with(&[(0, b"\x7fELF\x02"), (5, &[data]), (18, machine)]);
        assert_eq!(
            (elf(1, &[62, 0]), elf(1, &[183, 0])),
            (Some(Arch::X86_64), Some(Arch::Aarch64))
        );
        // s390x is big-endian, RISC-V unknown.
        assert_eq!(
            (elf(2, &[0, 22]), elf(2, &[0, 62]), elf(1, &[243, 0])),
            (None, None, None)
        );
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
        std::fs::File::open("/proc/self/exe")
            .unwrap()
            .read_exact(&mut head)
            .unwrap();
        assert_eq!(Arch::of_head(&head), Some(Arch::OURS));
    }
}
