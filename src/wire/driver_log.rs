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
    "libspdm",
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

/// Prefix of the driver's own messages, on each of their lines.
const NVRM: &str = "NVRM: ";
/// Longest name of a process (TASK_COMM_LEN).
const MAX_COMM: usize = 15;

/// One message out of its lines: the driver repeats its prefix on each. /dev/kmsg shows a newline
/// in a message as `\x0a`, journald and our readers as itself.
pub fn joined(text: &str) -> String {
    let lines = text.split('\n').flat_map(|line| line.split("\\x0a"));
    let mut out = String::new();
    for (nth, line) in lines.enumerate() {
        let line = line.trim();
        let line = match line.strip_prefix(NVRM.trim_end()) {
            Some(rest) if nth > 0 => rest.trim_start(),
            _ => line,
        };
        if nth > 0 && !line.is_empty() {
            out.push(' ');
        }
        out.push_str(line);
    }
    out
}

/// Whether a line with the stamp of a message of the driver is the message's next line. `lines`:
/// the message so far, as logged. `exact`: the stamp has microseconds, which the lines of one
/// message share and messages hardly do; a second has many messages.
///
/// Only sentences have several lines, and each line but the last breaks one off: RM's messages
/// (`GPU0 function: ..`) and Xids are of one line. A message of several lines may begin another
/// sentence; without an exact stamp that is another message. A line about another function never
/// goes on.
pub fn goes_on(lines: &[&str], line: &str, exact: bool) -> bool {
    let (Some(first), Some(last)) = (lines.first(), lines.last()) else {
        return false;
    };
    let texts = (first.strip_prefix(NVRM), line.strip_prefix(NVRM));
    let (Some(first), Some(next)) = texts else {
        return false;
    };
    let known = lines.iter().find_map(|line| address(line));
    let is_others = address(next).is_some_and(|of| known.is_some_and(|known| known != of));
    if is_one_line(first) || is_one_line(next) || is_opening(next) || is_others {
        return false;
    }
    let breaks_off = !last.trim_end().ends_with(['.', '!']);
    let is_middle = next.starts_with(|c: char| c == ' ' || c.is_ascii_lowercase());
    breaks_off || is_middle || exact && lines.len() > 1
}

/// Whether a message of the driver is one of those that never have a second line.
fn is_one_line(text: &str) -> bool {
    let word = text.split(' ').next().unwrap_or("");
    let is_name = |name: &str| name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_');
    let is_function = word.strip_suffix(':').is_some_and(is_name);
    let of_rm = word.strip_prefix("GPU").is_some_and(is_name);
    is_function || of_rm || ["Xid", "SXid", "loading"].contains(&word)
}

/// Whether a text of the driver begins one of its sentences about GPUs.
fn is_opening(text: &str) -> bool {
    const OPENINGS: &[&str] = &[
        "The NVIDIA ",
        "This PCI ",
        "This can occur ",
        "Try unloading ",
        "No NVIDIA ",
        "None of the ",
        "Attempting to ",
        "Can't find ",
    ];
    OPENINGS.iter().any(|opening| text.starts_with(opening))
}

/// Whether the kernel prints a line about a process: `COMM[PID]: segfault ..`. The process chose
/// its name, and the names of its files, which follow.
pub fn is_of_process(text: &str) -> bool {
    let Some(at) = text.find("[").filter(|at| *at <= MAX_COMM) else {
        return false;
    };
    let pid = text.get(at + 1..).and_then(|rest| rest.split_once("]: "));
    pid.is_some_and(|(pid, _)| !pid.is_empty() && pid.bytes().all(|b| b.is_ascii_digit()))
}

/// PCI device id of NVIDIA's in a line: `[10de:1b38]` of the enumeration, `(PCI ID: 10de:1b38)` of
/// the driver.
pub fn device_id(text: &str) -> Option<u16> {
    let (_, id) = text
        .split_once("[10de:")
        .or_else(|| text.split_once("(PCI ID: 10de:"))?;
    u16::from_str_radix(id.get(..4)?, 16).ok()
}

/// BAR of a function that found no room, and its size if the line has it: `pci 0000:00:06.0: BAR 1:
/// no space for [mem size 0x400000000 64bit pref]`; from Linux 6.11 on `BAR 2 [mem size
/// 0x4000000000 64bit pref]: can't assign; no space`.
pub fn bar_without_room(text: &str) -> Option<(PciAddress, u8, u64)> {
    const NO_ROOM: &[&str] = &[
        ": no space for [",
        "failed to assign",
        "can't assign; no space",
    ];
    let (function, rest) = text.strip_prefix("pci ")?.split_once(": BAR ")?;
    NO_ROOM.iter().find(|words| text.contains(**words))?;
    let digits = rest.split([' ', ':']).next()?;
    let size = rest.split_once("size 0x")?.1;
    let size = size.split([' ', ']']).next()?;
    let size = u64::from_str_radix(size, 16).ok()?;
    Some((function.parse().ok()?, digits.parse().ok()?, size))
}

/// BAR of a function that was given its place.
pub fn assigned_bar(text: &str) -> Option<(PciAddress, u8)> {
    let (function, rest) = text.strip_prefix("pci ")?.split_once(": BAR ")?;
    let is_assigned = rest.ends_with("]: assigned") || rest.contains(": assigned [");
    let digits = rest.split([' ', ':']).next().filter(|_| is_assigned)?;
    Some((function.parse().ok()?, digits.parse().ok()?))
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
    // The driver's part for SPDM prints without a prefix.
    let of_spdm = text.starts_with("libspdm_");
    (of_the_kernel || of_spdm || text.contains("NVRM") || text.contains("nvidia"))
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

    /// Messages of lines with one stamp, as a reader joins them.
    fn messages(lines: &[&str], exact: bool) -> Vec<String> {
        let mut all: Vec<Vec<&str>> = Vec::new();
        for line in lines {
            match all.last_mut() {
                Some(message) if goes_on(message, line, exact) => message.push(line),
                _ => all.push(vec![line]),
            }
        }
        all.iter().map(|lines| joined(&lines.join("\n"))).collect()
    }

    const NO_GSP: [&str; 8] = [
        "NVRM: The NVIDIA GPU 0000:02:00.0 (PCI ID: 10de:1b38)",
        "NVRM: installed in this system is not supported by open",
        "NVRM: nvidia.ko because it does not include the required GPU",
        "NVRM: System Processor (GSP).",
        "NVRM: Please see the 'Open Linux Kernel Modules' and 'GSP",
        "NVRM: Firmware' sections in the driver README, available on",
        "NVRM: the Linux graphics driver download page at",
        "NVRM: www.nvidia.com.",
    ];
    const LEGACY: [&str; 5] = [
        "NVRM: The NVIDIA Tesla P100-PCIE-16GB GPU installed in this system is",
        "NVRM:  supported through the NVIDIA 580.xx Legacy drivers. Please",
        "NVRM:  visit http://www.nvidia.com/object/unix.html for more",
        "NVRM:  information.  The 595.58.03 NVIDIA driver will ignore",
        "NVRM:  this GPU.  Continuing probe...",
    ];
    const BAR: [&str; 2] = [
        "NVRM: This PCI I/O region assigned to your NVIDIA device is invalid:",
        "NVRM: BAR1 is 0M @ 0x0 (PCI:0000:02:00.0)",
    ];

    #[test]
    fn lines_of_one_message_are_one() {
        for exact in [true, false] {
            let legacy = messages(&LEGACY, exact);
            assert_eq!(legacy.len(), 1, "{legacy:?}");
            assert!(legacy[0].contains("system is supported through the NVIDIA 580.xx"));
            assert_eq!(messages(&BAR, exact).len(), 1);
        }
        let whole = messages(&NO_GSP, true);
        assert_eq!(whole.len(), 1, "{whole:?}");
        assert!(whole[0].ends_with("page at www.nvidia.com."), "{whole:?}");
        // A second has many messages: only what a sentence needs is joined.
        let sentences = messages(&NO_GSP, false);
        assert_eq!(sentences.len(), 2, "{sentences:?}");
        assert!(sentences[0].ends_with("required GPU System Processor (GSP)."));
        assert_eq!(joined(&NO_GSP.join("\\x0a")), whole[0], "/dev/kmsg");
    }

    #[test]
    fn messages_that_share_a_stamp_stay_apart() {
        let other = NO_GSP[0].replace("02:00.0", "03:00.0");
        let twice = [NO_GSP.as_slice(), &[other.as_str()], &NO_GSP[1..]].concat();
        for exact in [true, false] {
            let both = messages(&twice, exact);
            let begun = both.iter().filter(|m| m.starts_with("NVRM: The NVIDIA"));
            assert_eq!(begun.count(), 2, "{both:?}");
        }
        let separate = [
            "NVRM: GPU0 confComputeConstructEngine_IMPL: CPU does not support confidential",
            "NVRM: GPU0 nvAssertFailedNoLog: Assertion failed: 0 @ conf_compute.c:161",
            "NVRM: osInitNvMapping: *** Cannot attach gpu",
            "NVRM: RmInitAdapter: osInitNvMapping failed, bailing out of RmInitAdapter",
            "NVRM: GPU 0000:01:00.0: RmInitAdapter failed! (0x22:0x38:878)",
            "NVRM: GPU 0000:01:00.0: rm_init_adapter failed, device minor number 0",
            "NVRM: Xid (PCI:0000:01:00): 79, GPU has fallen off the bus.",
            "NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  590.48.01  Release Build",
            "NVRM: The NVIDIA probe routine failed for 1 device(s).",
            "NVRM: None of the NVIDIA devices were initialized.",
            "nvidia-nvlink: Unregistered Nvlink Core, major device number 237",
            BAR[0],
        ];
        for exact in [true, false] {
            assert_eq!(messages(&separate, exact), separate);
        }
        // Two functions without room in one microsecond.
        let other = BAR[1].replace("02:00", "03:00");
        let two = [BAR[0], BAR[1], &other, BAR[0], &other];
        let of_two = messages(&two, true);
        assert_eq!(of_two.len(), 3, "{of_two:?}");
    }

    #[test]
    fn a_process_cannot_speak_as_the_driver() {
        for text in [
            "python3[77]: segfault at 0 ip 1 sp 2 error 4 in NVRM: Xid (PCI:0000:02:00): 79, x",
            "NVRM: Xid (PCI:[123]: segfault at 0 ip 1 sp 2 error 4 in 0000:02:00): 79, x",
            "NVRM: GPU 0000:[7]: segfault at 0",
        ] {
            assert!(is_of_process(text), "{text}");
        }
        for text in [
            "NVRM: Xid (PCI:0000:02:00): 79, pid=7, name=a[1]: x",
            "pci 0000:02:00.0: [10de:2330] type 00 class 0x030200",
            "NVRM: GPU at 0000:02:00.0 [7]: x",
            "[]: x",
            "",
        ] {
            assert!(!is_of_process(text), "{text}");
        }
    }

    #[test]
    fn bars_without_room_are_read_in_old_and_new_words() {
        let of = |text: &str| {
            bar_without_room(text).map(|(at, bar, size)| format!("{at} {bar} {:x}", size >> 30))
        };
        for (text, wanted) in [
            (
                "pci 0000:00:06.0: BAR 1: no space for [mem size 0x400000000 64bit pref]",
                Some("0000:00:06.0 1 10"),
            ),
            (
                "pci 0000:00:06.0: BAR 1: failed to assign [mem size 0x400000000 64bit pref]",
                Some("0000:00:06.0 1 10"),
            ),
            (
                "pci 0000:02:00.0: BAR 2 [mem size 0x4000000000]: can't assign; no space",
                Some("0000:02:00.0 2 100"),
            ),
            (
                "pci 0000:02:00.0: BAR 4 [mem 0x40000000-0x41ffffff 64bit pref]: assigned",
                None,
            ),
            ("pci 0000:00:06.0: BAR 1: no space for [", None),
            ("x: BAR 1: no space for [mem size 0x4]", None),
        ] {
            assert_eq!(of(text).as_deref(), wanted, "{text}");
        }
        for text in [
            "pci 0000:02:00.0: BAR 4 [mem 0x40000000-0x41ffffff 64bit pref]: assigned",
            "pci 0000:02:00.0: BAR 4: assigned [mem 0x40000000-0x41ffffff 64bit pref]",
        ] {
            assert_eq!(assigned_bar(text), Some((gpu("0000:02:00.0"), 4)), "{text}");
            assert_eq!(assigned_bar(&text.replace("assigned", "x")), None);
        }
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
