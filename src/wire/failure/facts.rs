//! Facts about a failed GPU and its guest besides the words of its driver. A fact that is
//! not known decides nothing.

use crate::driver_log;

/// Kind of the driver's kernel module.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Module {
    Open,
    Proprietary,
}

/// Facts about a GPU and its guest.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Facts {
    /// PCI device id, of NVIDIA's.
    pub device: Option<u16>,
    /// Whether the guest itself is confidential (TDX, SEV-SNP).
    pub is_confidential: Option<bool>,
    pub module: Option<Module>,
    /// Branch of the driver: 580 of 580.95.05.
    pub branch: Option<u32>,
    /// Whether the guest has NVSwitches, or reported an error of one.
    pub has_fabric: bool,
    /// Number of GPUs in the guest.
    pub gpus: usize,
}

impl Facts {
    /// Takes what a line of the kernel's log states: kind and version of the module, by the line
    /// that it logs when it is loaded; NVSwitches, by their enumeration and errors; encrypted
    /// memory.
    pub fn take_line(&mut self, text: &str) {
        self.has_fabric |= driver_log::is_of_switch(text) || is_switch(text);
        if shows_confidential_guest(text) {
            self.is_confidential = Some(true);
        }
        if !driver_log::is_banner(text) {
            self.branch = self.branch.or_else(|| named_branch(text));
            return;
        }
        let open = text.contains("Open Kernel Module");
        self.module = Some(if open {
            Module::Open
        } else {
            Module::Proprietary
        });
        let version = text.split_ascii_whitespace().find_map(|word| {
            let (branch, minor) = word.split_once('.')?;
            minor
                .starts_with(|c: char| c.is_ascii_digit())
                .then(|| branch.parse().ok())?
        });
        self.branch = version.or(self.branch);
    }

    pub fn chip(&self) -> Option<Chip> {
        Chip::of(self.device?)
    }
}

/// Branch that the driver names where it refuses a GPU, before it logs its banner or without one:
/// `.. by the NVIDIA 550.163.01 driver release.`, `The 595.58.03 NVIDIA driver will ignore this
/// GPU.`
fn named_branch(text: &str) -> Option<u32> {
    let text = text.strip_prefix("NVRM: ")?;
    let before = text
        .split_once(" driver release")
        .or_else(|| text.split_once(" NVIDIA driver will ignore"))?
        .0;
    before.rsplit(' ').next()?.split_once('.')?.0.parse().ok()
}

/// Whether a line of the enumeration announces an NVSwitch: a bridge of NVIDIA's (class 0x0680).
fn is_switch(text: &str) -> bool {
    text.starts_with("pci ") && text.contains(": [10de:") && text.contains(" class 0x0680")
}

/// Whether this is the kernel's line in a guest whose memory the host cannot read. SME alone is a
/// host's feature.
pub fn shows_confidential_guest(text: &str) -> bool {
    let features = [
        "Memory Encryption Features active:",
        "AMD Memory Encryption Features active:",
    ];
    let features = features.iter().find_map(|words| text.strip_prefix(words));
    features.is_some_and(|features| features.contains("SEV") || features.contains("TDX"))
        || text.starts_with("SEV: Status: SEV")
        || text.starts_with("tdx: Guest detected")
        || text.starts_with("RSI: Using RSI version")
}

/// Generation of a chip.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Chip {
    Maxwell,
    Pascal,
    Volta,
    Turing,
    Ampere,
    Hopper,
    Ada,
    Blackwell,
}

/// Device ids of each generation, by the ranges in which NVIDIA's driver lists its products
/// ("Supported NVIDIA GPU Products" of its README).
const IDS: &[(std::ops::RangeInclusive<u16>, Chip)] = &[
    (0x1340..=0x13ff, Chip::Maxwell),
    (0x15f0..=0x15ff, Chip::Pascal),
    (0x1617..=0x17ff, Chip::Maxwell),
    (0x1b00..=0x1d7f, Chip::Pascal),
    (0x1d80..=0x1dff, Chip::Volta),
    (0x1e00..=0x1fff, Chip::Turing),
    (0x2080..=0x20ff, Chip::Ampere),
    (0x2180..=0x21ff, Chip::Turing),
    (0x2200..=0x22ff, Chip::Ampere),
    (0x2300..=0x23ff, Chip::Hopper),
    (0x2400..=0x25ff, Chip::Ampere),
    (0x2600..=0x28ff, Chip::Ada),
    (0x2900..=0x2fff, Chip::Blackwell),
    (0x3180..=0x327f, Chip::Blackwell),
];

impl Chip {
    /// Generation of a device id; `None` for one that is not known here.
    pub fn of(device: u16) -> Option<Self> {
        IDS.iter()
            .find(|(ids, _)| ids.contains(&device))
            .map(|(_, chip)| *chip)
    }

    /// Whether the chip has a processor of its own (GSP), without which the open modules refuse it.
    pub fn has_gsp(self) -> bool {
        self >= Self::Turing
    }

    /// First driver branch that knows every chip of the generation.
    pub fn known_since(self) -> u32 {
        match self {
            Self::Maxwell | Self::Pascal => 390,
            Self::Volta => 396,
            Self::Turing => 418,
            Self::Ampere => 470,
            Self::Hopper | Self::Ada => 535,
            Self::Blackwell => 580,
        }
    }

    /// Last driver branch that knows the generation.
    pub fn known_until(self) -> u32 {
        if self.has_gsp() { u32::MAX } else { 580 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chip_is_known_by_its_id() {
        for (device, chip) in [
            (0x1b38, Some(Chip::Pascal)),    // P40
            (0x15f8, Some(Chip::Pascal)),    // P100
            (0x1db4, Some(Chip::Volta)),     // V100
            (0x1eb8, Some(Chip::Turing)),    // T4
            (0x20b0, Some(Chip::Ampere)),    // A100
            (0x2236, Some(Chip::Ampere)),    // A10
            (0x2321, Some(Chip::Hopper)),    // H100
            (0x26b5, Some(Chip::Ada)),       // L40
            (0x2901, Some(Chip::Blackwell)), // B200
            (0x1af4, None),
        ] {
            assert_eq!(Chip::of(device), chip, "{device:#x}");
        }
        let gsp: Vec<bool> = [0x1db4, 0x1eb8]
            .map(|id| Chip::of(id).unwrap().has_gsp())
            .into();
        assert_eq!(gsp, [false, true]);
    }

    #[test]
    fn a_banner_names_kind_and_branch() {
        let of = |text: &str| {
            let mut facts = Facts::default();
            facts.take_line(text);
            (facts.module, facts.branch)
        };
        let open =
            "NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  590.48.01  Release Build";
        assert_eq!(of(open), (Some(Module::Open), Some(590)));
        let closed =
            "NVRM: loading NVIDIA UNIX x86_64 Kernel Module  510.47.03  Mon Jan 24 22:58:54";
        assert_eq!(of(closed), (Some(Module::Proprietary), Some(510)));
        assert_eq!(
            of("NVRM: GPU 0000:01:00.0: RmInitAdapter failed!"),
            (None, None)
        );
        for (text, branch) in [
            (
                "NVRM: x is not supported by the NVIDIA 550.163.01 driver release.",
                550,
            ),
            (
                "NVRM: x  The 595.58.03 NVIDIA driver will ignore this GPU.",
                595,
            ),
        ] {
            assert_eq!(of(text), (None, Some(branch)), "{text}");
        }
    }

    #[test]
    fn the_kernels_lines_show_confidential_guests_and_switches() {
        let of = |text: &str| {
            let mut facts = Facts::default();
            facts.take_line(text);
            (facts.is_confidential, facts.has_fabric)
        };
        for text in [
            "Memory Encryption Features active: AMD SEV SEV-ES SEV-SNP",
            "Memory Encryption Features active: Intel TDX",
            "AMD Memory Encryption Features active: SEV",
            "tdx: Guest detected",
        ] {
            assert_eq!(of(text), (Some(true), false), "{text}");
        }
        let switch = "pci 0000:05:00.0: [10de:22a3] type 00 class 0x068000 PCIe Endpoint";
        assert_eq!(of(switch), (None, true));
        for text in [
            "Memory Encryption Features active: AMD SME",
            "x: Memory Encryption Features active: AMD SEV",
            "pci 0000:05:00.0: [10de:2330] type 00 class 0x030200",
        ] {
            assert_eq!(of(text), (None, false), "{text}");
        }
    }
}
