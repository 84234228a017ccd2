//! Lines of NVIDIA's driver and of PCI in the kernel's log, as far as they mean something here:
//! pure, from one line to its meaning.
//!
//! Only a PCI address identifies the GPU of a line; the driver's own "GPU0" counts in the order of
//! initialisation. The third number of `RmInitAdapter failed! (0xINIT:0xSTATUS:LINE)` is a line of
//! the driver's source and means nothing across versions.

use crate::pci_address::{PciAddress, is_gpu};

/// Texts of lines that enter the stream.
const WANTED: &[&str] = &[
    "NVRM",
    "nvidia",
    "Xid",
    "10de:",
    "BAR ",
    "enabling device",
    "Linux version",
    "initramfs...",
    "Freeing initrd memory",
    "Run ",
    "as init process",
    "Freeing unused kernel",
    "vfio",
    "Kernel panic",
    "Out of memory",
    "firmware",
];

/// Message that requires an action.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Signal {
    /// The GPU is being removed, and the driver waits until its last descriptor is closed: close
    /// ours.
    RemovalWaits(PciAddress),
    /// The GPU has reported an error with this number.
    Xid(PciAddress, u32),
}

/// Stage and status of a failed initialisation: `RmInitAdapter failed! (0xINIT:0xSTATUS:..)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InitCode {
    /// The stage (RM_INIT_*): 0x22 attach, 0x24 and 0x25 state, 0x61 firmware fetch, 0x62 firmware
    /// boot.
    pub stage: u32,
    /// NV_STATUS.
    pub status: u32,
}

/// First PCI address in a line of the log, with function 0 if the line has none.
pub fn address(text: &str) -> Option<PciAddress> {
    text.split(|c: char| c.is_whitespace() || matches!(c, '(' | ')' | ',' | '[' | ']'))
        .map(|word| {
            word.strip_prefix("PCI:")
                .unwrap_or(word)
                .trim_end_matches([':', '.'])
        })
        .find_map(|word| word.parse().or_else(|_| format!("{word}.0").parse()).ok())
}

/// Signal of a line, if any.
pub fn signal(text: &str) -> Option<Signal> {
    if !text.starts_with("NVRM: ") {
        return None;
    }
    if text.contains("Attempting to remove device") && text.contains("non-zero usage count") {
        return address(text).map(Signal::RemovalWaits);
    }
    let rest = text.strip_prefix("NVRM: Xid (PCI:")?;
    let (_, number) = rest.split_once("): ")?;
    let digits: String = number.chars().take_while(char::is_ascii_digit).collect();
    Some(Signal::Xid(address(text)?, digits.parse().ok()?))
}

/// Whether this is the driver's about an NVSwitch, or an error of one (SXid).
pub fn is_of_switch(text: &str) -> bool {
    text.starts_with("nvidia-nvswitch") || text.starts_with("NVRM: SXid")
}

/// Whether this is the banner that the driver logs, at the level of errors, when it is loaded.
pub fn is_banner(text: &str) -> bool {
    text.starts_with("NVRM: loading NVIDIA")
}

/// Whether this is a line that the driver logs at the level of errors in boots that go well: its
/// banner, and that GPUs bound one by one were not all probed by its load.
pub fn is_expected(text: &str) -> bool {
    const EXPECTED: &[&str] = &[
        "probe routine was not called",
        "This can occur when another driver was loaded",
        "Try unloading the conflicting kernel module",
    ];
    is_banner(text) || EXPECTED.iter().any(|expected| text.contains(expected))
}

/// Whether this is the kernel's own line about a failed probe: the first form until Linux 6.4.
pub fn is_failed_probe(text: &str) -> bool {
    text.starts_with("nvidia: probe of ") || text.contains("probe with driver nvidia failed")
}

/// Code of a failed initialisation in a line.
pub fn init_code(text: &str) -> Option<InitCode> {
    let (_, rest) = text.split_once("RmInitAdapter failed! (")?;
    let (code, _) = rest.split_once(')')?;
    let mut numbers = code
        .split(':')
        .map(|n| u32::from_str_radix(n.trim().strip_prefix("0x")?, 16).ok());
    Some(InitCode {
        stage: numbers.next()??,
        status: numbers.next()??,
    })
}

/// Whether a line can explain a failure. Not: FBHUB (marks the start of an initialisation), "was
/// not called" (results from driver_override), and the kernel's own "failed with error -1" (no more
/// than the fact of a failure).
pub fn explains(text: &str) -> bool {
    const HARMLESS: &[&str] = &[
        "FBHUB",
        "probe routine was not called",
        "This can occur when another driver was loaded",
        "Try unloading the conflicting kernel module",
        "enabling device",
        "loading NVIDIA",
        "Loaded the UVM driver",
        "loading out-of-tree",
        "taints kernel",
        "failed with error -1",
        "rm_init_adapter failed, device minor number",
        "Nvlink Core is being initialized",
        // Parameters may name the driver's modules.
        "ommand line:",
    ];
    // The kernel's message about a function that cannot be enabled.
    let of_the_kernel = text.contains("can't enable device");
    (of_the_kernel || text.contains("NVRM") || text.contains("nvidia"))
        && !HARMLESS.iter().any(|h| text.contains(h))
}

/// Whether a line of the log concerns the boot of a GPU guest.
pub fn is_wanted(text: &str) -> bool {
    WANTED.iter().any(|w| text.contains(w))
}

/// The GPU that a line of the PCI enumeration announces: `pci 0001:00:03.0: [10de:2330] type 00
/// class 0x030200`.
pub fn enumerated_gpu(text: &str) -> Option<PciAddress> {
    let vendor = u16::from_str_radix(text.split_once('[')?.1.get(..4)?, 16).ok()?;
    let class = u32::from_str_radix(text.split_once("class 0x")?.1.get(..6)?, 16).ok()?;
    if is_gpu(vendor, class) {
        address(text)
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gpu(text: &str) -> PciAddress {
        text.parse().unwrap()
    }

    #[test]
    fn a_line_names_its_gpu_only_by_address() {
        assert_eq!(
            address("NVRM: GPU 0001:00:03.0: RmInitAdapter failed! (0x62:0x65:1860)"),
            Some(gpu("0001:00:03.0"))
        );
        assert_eq!(
            address("NVRM: Xid (PCI:0001:00:03): 79, GPU has fallen off the bus."),
            Some(gpu("0001:00:03.0"))
        );
        assert_eq!(
            address("NVRM: BAR0 is 0M @ 0x0 (PCI:0001:00:03.0)"),
            Some(gpu("0001:00:03.0"))
        );
        assert_eq!(
            address("nvidia 0001:00:03.0: enabling device (0000 -> 0002)"),
            Some(gpu("0001:00:03.0"))
        );
        assert_eq!(address("NVRM: GPU1 gpuPowerManagementEnter: failed"), None);
    }

    #[test]
    fn signals_are_read_from_the_drivers_lines_only() {
        let removal = "NVRM: Attempting to remove device 0001:00:03.0 with non-zero usage count!";
        assert_eq!(
            signal(removal),
            Some(Signal::RemovalWaits(gpu("0001:00:03.0")))
        );
        assert_eq!(
            signal("NVRM: Xid (PCI:0001:00:03): 119, pid=1, name=x, Timeout"),
            Some(Signal::Xid(gpu("0001:00:03.0"), 119))
        );
        for text in [
            "Xid (PCI:0001:00:03): 79",
            "NVRM: Xid (PCI:x): 79",
            "NVRM: Xid (PCI:0001:00:03): many",
            "",
            &removal[6..],
        ] {
            assert_eq!(signal(text), None, "{text:?}");
        }
    }

    #[test]
    fn an_initialisations_code_is_read_without_its_line_number() {
        let code = init_code("NVRM: GPU 0001:00:03.0: RmInitAdapter failed! (0x62:0x65:1860)");
        assert_eq!(
            code,
            Some(InitCode {
                stage: 0x62,
                status: 0x65
            })
        );
        for text in [
            "RmInitAdapter failed!",
            "RmInitAdapter failed! (0x62)",
            "RmInitAdapter failed! (62:65:1)",
            "RmInitAdapter failed! (0xz:0x1:1)",
        ] {
            assert_eq!(init_code(text), None, "{text:?}");
        }
    }

    #[test]
    fn harmless_lines_explain_nothing() {
        assert!(!explains(
            "NVRM: GPU 0000:01:00.0: FBHUB Interrupt detected"
        ));
        assert!(!explains(
            "NVRM: The NVIDIA probe routine was not called for 7 device(s)."
        ));
        assert!(!explains(
            "Command line: console=ttyS0 nvidia.NVreg_RegistryDwords=x"
        ));
        assert!(!explains(
            "Kernel command line: console=ttyS0 nvidia.NVreg_RegistryDwords=x"
        ));
        assert!(explains(
            "NVRM: GPU 0000:01:00.0: RmInitAdapter failed! (0x62:0x65:1860)"
        ));
        assert!(explains(
            "pci 0001:00:06.0: can't enable device: BAR 0 [mem 0x0-0xffffff 64bit pref] not claimed"
        ));
        assert!(explains(
            "nvidia 0000:01:00.0: Direct firmware load for nvidia/550.163.01/gsp_ga10x.bin failed \
                with error -2"
        ));
    }

    #[test]
    fn the_enumeration_shows_which_functions_are_gpus() {
        let gpu = |text| enumerated_gpu(text).map(|a| a.to_string());
        assert_eq!(
            gpu("pci 0001:00:03.0: [10de:2330] type 00 class 0x030200"),
            Some("0001:00:03.0".into())
        );
        assert_eq!(
            gpu("pci 0001:00:03.0: [10de:2330] type 00 class 0x030200 PCIe Endpoint"),
            Some("0001:00:03.0".into())
        );
        assert_eq!(
            gpu("pci 0000:00:01.0: [1af4:1053] type 00 class 0x020000"),
            None
        );
        assert_eq!(
            gpu("pci 0000:00:01.0: [10de:22a3] type 00 class 0x068000"),
            None
        );
        assert_eq!(gpu("pci [10d\u{e9}"), None);
    }
}
