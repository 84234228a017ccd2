//! Lines of NVIDIA's driver and of PCI in the kernel's log, as far as they mean something here:
//! pure, from one line to its meaning.
//!
//! A line counts by its grammar from its first byte, with the address directly behind the prefix:
//! user space chooses parts of many of the kernel's own lines, and the beginning of some (see
//! [`is_user_spaces`]).
//!
//! Only a PCI address identifies the GPU of a line; the driver's own "GPU0" counts in the order of
//! initialisation. The third number of `RmInitAdapter failed! (0xINIT:0xSTATUS:LINE)` is a line of
//! the driver's source and means nothing across versions.

use crate::pci_address::{PciAddress, is_gpu};

/// Beginnings of lines of the kernel, besides those of devices and of the driver, that enter the
/// stream.
const MILESTONES: &[&str] = &[
    "Linux version ",
    "Trying to unpack rootfs image as initramfs...",
    "Freeing initrd memory",
    "Freeing unused kernel",
    "Run ",
    "vfio",
    "VFIO",
    "Kernel panic",
    "Out of memory: ",
    "firmware",
    "libspdm",
];

/// Parts of a device's lines that enter the stream, whatever driver the device has.
const OF_DEVICES: &[&str] = &[
    "[10de:",
    "BAR ",
    "enabling device",
    "enable device",
    "firmware",
];

/// Prefix of the driver's messages.
const DRIVER: &str = "NVRM: ";

/// Driver's texts between its prefix and an address.
const BEFORE_ADDRESS: &[&str] = &[
    "GPU ",
    "GPU at PCI:",
    "The NVIDIA GPU ",
    "Xid (PCI:",
    "SXid (PCI:",
    "Attempting to remove device ",
    "Continuing with GPU removal for device ",
];

/// Longest name of a thread, in bytes (TASK_COMM_LEN without its end), and of a network interface
/// (IFNAMSIZ).
const NAME: usize = 15;

/// Words behind the name of a thread where the kernel begins a line with one; besides
/// `[PID]`, `(PID)` and `/PID`.
const AFTER_COMM: &[&str] = &[
    " invoked oom-killer",
    " cpuset=",
    " uses obsolete ",
    ": page allocation ",
    ": vmalloc ",
    ": sending ioctl ",
];

/// Words behind the name of a network interface where the kernel begins a line with one.
const AFTER_INTERFACE: &[&str] = &[
    "renamed from ",
    "entered ",
    "left ",
    "port ",
    "Caught ",
    "link ",
    "mtu ",
    "Setting MTU ",
    "hw csum failure",
    "set_features",
    "Dropping ",
    "received packet",
];

/// Words of the kernel's loader behind a module's name about a module that it refuses.
const OF_LOADER: &[&str] = &[
    "Unknown symbol ",
    "disagrees about version of symbol ",
    "no symbol version for ",
    "version magic ",
    "exports duplicate symbol ",
    "unknown parameter ",
    "Unknown relocation",
    "Unknown rela relocation",
];

/// Words of NVSwitches' part of the driver behind its name (linux_nvswitch.c), and no interface.
const OF_SWITCHES: &[&str] = &[
    "SXid (PCI:",
    "Probing device ",
    "probing device ",
    "using ",
    "open (major=",
];

/// Speaker of a line, with the rest of the line.
enum Spoken<'a> {
    /// The driver, by its prefix.
    Driver(&'a str),
    /// The kernel or a driver about a device: name of the driver (`pci` without one), address.
    Device(&'a str, PciAddress, &'a str),
    /// A part of NVIDIA's driver by its own name, or the kernel about that module.
    Module(&'a str, &'a str),
}

/// Whether user space may have chosen a line's beginning, and so may imitate any other line.
///
/// The kernel's lines that begin so, for x86-64 and arm64, by its sources (6.1 to 6.18):
/// - `COMM[PID]: segfault at .. in FILE[..]` (arch/x86/mm/fault.c show_signal_msg; any process),
///   `COMM[PID] bad frame in ..` (arch/x86/kernel/signal.c), `COMM[PID] vsyscall ..`
///   (arch/x86/entry/vsyscall), `COMM[PID]: unhandled exception: ..` and `.. bad frame ..`
///   (arch/arm64/kernel/traps.c, signal.c);
/// - `COMM invoked oom-killer: ..` (mm/oom_kill.c; any process at its cgroup's limit), and
///   `COMM cpuset=..` (kernel/cgroup/cpuset.c);
/// - `COMM: page allocation failure: ..`, `COMM: vmalloc error: ..` (mm/page_alloc.c warn_alloc);
/// - `FILE: COMM: potentially unexpected fatal signal N.`, without FILE before 6.8, `COMM/PID: ..`
///   before 5.1 (kernel/signal.c print_fatal_signal; only with kernel.print-fatal-signals=1);
/// - `COMM (PID): ..` (fs/proc/base.c oom_adj, fs/drop_caches.c), `COMM(PID) ..`;
///   `COMM uses obsolete (PF_INET,SOCK_PACKET)` (net/socket.c); `COMM: sending ioctl ..`
///   (block/scsi_ioctl.c until 5.14);
/// - `INTERFACE: renamed from ..`, `INTERFACE: entered promiscuous mode` and others of bridges and
///   netdev_printk (net/core/dev.c, net/bridge): a user namespace suffices to name an interface;
/// - `PREFIXIN=eth0 OUT= ..`, with the prefix of a LOG rule, up to 127 bytes
///   (net/netfilter/nf_log_syslog.c): CAP_NET_ADMIN in the network namespace of the guest, or
///   net.netfilter.nf_log_all_netns=1.
///
/// Lines in which user space chooses a later part begin with words of the kernel's own, which no
/// grammar here takes: `traps: COMM[PID] ..` (arch/x86/kernel/traps.c), `Out of memory: Killed
/// process PID (COMM)`, `Memory cgroup out of memory: ..`, `oom-kill:..,task=COMM` and
/// `[  PID] .. COMM` (mm/oom_kill.c), `audit: type=.. comm=..` (kernel/audit.c), `process 'FILE'
/// started with executable stack` (fs/exec.c), `warning: 'COMM' uses ..` (kernel/capability.c and
/// others), `coredump: PID(COMM): ..` (fs/coredump.c), `umip: COMM[PID] ..`, `x86/split lock
/// detection: ..`, `INFO: task COMM:PID blocked ..` (kernel/hung_task.c), `CPU: N PID: N Comm: ..`
/// (lib/dump_stack.c), `BUG: .. COMM/PID/..`, `note: COMM[PID] exited ..` (kernel/exit.c),
/// `cgroup: ..`, `netlink: ..`, `overlayfs: ..` and other file systems, `usb N: process PID (COMM)
/// ..`, `input: NAME as ..`. A line whose continuation the kernel could not append begins with a
/// blank: ` in FILE[..]`. Lines written to /dev/kmsg have another facility.
///
/// The driver itself repeats what programs choose in two places: the name in an Xid
/// ([`without_name`]), and the version of a client (`API mismatch`).
pub fn is_user_spaces(text: &str) -> bool {
    begins_with_comm(text)
        || begins_with_interface(text)
        || text.contains("potentially unexpected fatal signal")
        || text.contains("IN=") && text.contains(" OUT=")
}

/// Whether a line begins with the name of a thread: up to 15 bytes, of which the log shows those
/// that cannot be printed as `\xHH`.
fn begins_with_comm(text: &str) -> bool {
    let mut rest = text;
    for _ in 0..=NAME {
        if is_pid(rest, "[", ']') || is_pid(rest, "(", ')') || is_pid(rest, " (", ')') {
            return true;
        }
        if is_pid(rest, "/", ':') || AFTER_COMM.iter().any(|after| rest.starts_with(after)) {
            return true;
        }
        let escaped = rest.strip_prefix("\\x").and_then(|hex| hex.get(2..));
        let mut chars = rest.chars();
        if chars.next().is_none() {
            return false;
        }
        rest = escaped.unwrap_or(chars.as_str());
    }
    false
}

/// Whether a text begins with `OPEN DIGITS CLOSE`.
fn is_pid(text: &str, open: &str, close: char) -> bool {
    let Some((pid, _)) = text
        .strip_prefix(open)
        .and_then(|rest| rest.split_once(close))
    else {
        return false;
    };
    (1..=10).contains(&pid.len()) && pid.bytes().all(|b| b.is_ascii_digit())
}

fn begins_with_interface(text: &str) -> bool {
    text.split_once(": ").is_some_and(|(name, rest)| {
        let name = name.strip_suffix(" (unregistering)").unwrap_or(name);
        name.len() <= NAME && AFTER_INTERFACE.iter().any(|after| rest.starts_with(after))
    })
}

fn spoken(text: &str) -> Option<Spoken<'_>> {
    if is_user_spaces(text) {
        return None;
    }
    if let Some(rest) = text.strip_prefix(DRIVER) {
        return Some(Spoken::Driver(rest));
    }
    let is_name = |name: &str| {
        !name.is_empty()
            && name
                .bytes()
                .all(|b| b.is_ascii_alphanumeric() || b"-_".contains(&b))
    };
    let (head, rest) = text.split_once(": ")?;
    if is_name(head) && head.starts_with("nvidia") {
        return Some(Spoken::Module(head, rest));
    }
    let (name, address) = head.split_once(' ')?;
    let address = address.parse().ok()?;
    is_name(name).then_some(Spoken::Device(name, address, rest))
}

/// Whether this is a line of the driver's part for SPDM, which has no prefix: `libspdm_name: ..`.
fn is_of_spdm(text: &str) -> bool {
    let function = text
        .strip_prefix("libspdm_")
        .and_then(|rest| rest.split_once(": "));
    function.is_some_and(|(name, _)| {
        !name.is_empty() && name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_')
    }) && !is_user_spaces(text)
}

/// Whether a line is of NVIDIA's driver, or of the kernel about a device or about that driver's
/// modules.
pub fn is_drivers(text: &str) -> bool {
    spoken(text).is_some() || is_of_spdm(text)
}

/// Message that requires an action.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Signal {
    /// The GPU is being removed, and the driver waits until its last descriptor is closed: close
    /// ours.
    RemovalWaits(PciAddress),
    /// The driver has reported an error of the GPU with this number.
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

/// One message out of its lines: the driver repeats its prefix on each. /dev/kmsg shows a newline
/// in a message as `\x0a`, journald and our readers as itself.
pub fn joined(text: &str) -> String {
    let lines = text.split('\n').flat_map(|line| line.split("\\x0a"));
    let mut out = String::new();
    for (nth, line) in lines.enumerate() {
        let line = line.trim();
        let line = match line.strip_prefix(DRIVER.trim_end()) {
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
    let texts = (first.strip_prefix(DRIVER), line.strip_prefix(DRIVER));
    let (Some(first), Some(next)) = texts else {
        return false;
    };
    let known = lines.iter().find_map(|line| address(line));
    let is_others = address(line).is_some_and(|of| known.is_some_and(|known| known != of));
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

/// PCI address that a line is about, with function 0 if the line has none.
pub fn address(text: &str) -> Option<PciAddress> {
    match spoken(text)? {
        Spoken::Device(_, address, _) => Some(address),
        Spoken::Module(_, rest) => leading_address(rest.strip_prefix("probe of ")?).map(first),
        Spoken::Driver(rest) if rest.starts_with("API mismatch") => None,
        Spoken::Driver(rest) => BEFORE_ADDRESS
            .iter()
            .find_map(|before| leading_address(rest.strip_prefix(before)?))
            .or_else(|| later_address(rest))
            .map(first),
    }
}

/// Address and what follows it.
type Addressed<'a> = (PciAddress, &'a str);

fn first((address, _): Addressed<'_>) -> PciAddress {
    address
}

fn leading_address(text: &str) -> Option<Addressed<'_>> {
    let is_of_address = |c: char| c.is_ascii_hexdigit() || c == ':' || c == '.';
    let end = text.find(|c| !is_of_address(c)).unwrap_or(text.len());
    let word = text.get(..end)?.trim_end_matches([':', '.']);
    let address = word.parse().or_else(|_| format!("{word}.0").parse()).ok()?;
    Some((address, text.get(word.len()..)?))
}

/// Address in a message of several lines, or behind what is wrong: `BAR1 is 0M @ 0x0 (PCI:..)`.
fn later_address(text: &str) -> Option<Addressed<'_>> {
    ["(PCI:", " The NVIDIA GPU "]
        .iter()
        .find_map(|before| leading_address(text.split_once(before)?.1))
}

/// Signal of a line, if any.
pub fn signal(text: &str) -> Option<Signal> {
    let Spoken::Driver(rest) = spoken(text)? else {
        return None;
    };
    if let Some(rest) = rest.strip_prefix("Attempting to remove device ") {
        let (address, rest) = leading_address(rest)?;
        let waits = rest.starts_with(" with non-zero usage count");
        return waits.then_some(Signal::RemovalWaits(address));
    }
    let (address, rest) = leading_address(rest.strip_prefix("Xid (PCI:")?)?;
    let (instance, number) = rest.split_once("): ")?;
    // A MIG instance: `Xid (PCI:0001:00:03 GPU-I:05): 31, ..`.
    let is_instance = |id: &str| !id.is_empty() && id.bytes().all(|b| b.is_ascii_digit());
    if !instance.is_empty() && !instance.strip_prefix(" GPU-I:").is_some_and(is_instance) {
        return None;
    }
    let (number, _) = number.split_once(',')?;
    let is_number = number.bytes().all(|b| b.is_ascii_digit());
    let number = number.parse().ok().filter(|_| is_number)?;
    Some(Signal::Xid(address, number))
}

/// A message around the name of a program in it: an Xid repeats the name of the thread that it is
/// about, up to 15 bytes of its own choice.
pub fn without_name(text: &str) -> [&str; 2] {
    let whole = [text, ""];
    if !text.starts_with("NVRM: Xid (") {
        return whole;
    }
    let Some((head, name)) = text.split_once(", name=") else {
        return whole;
    };
    let ends = name.char_indices().take(NAME + 2).map(|(at, _)| at);
    let end = ends.filter(|at| name[*at..].starts_with(", ")).last();
    [head, end.map_or("", |at| &name[at..])]
}

/// Whether this is the driver's about an NVSwitch, or an error of one (SXid).
pub fn is_of_switch(text: &str) -> bool {
    match spoken(text) {
        Some(Spoken::Driver(rest)) => rest.starts_with("SXid"),
        Some(Spoken::Module(name, rest)) => {
            name.starts_with("nvidia-nvswitch")
                && OF_SWITCHES.iter().any(|words| rest.starts_with(words))
        }
        _ => false,
    }
}

/// Whether this is the banner that the driver logs, at the level of errors, when it is loaded.
pub fn is_banner(text: &str) -> bool {
    text.starts_with("NVRM: loading NVIDIA") && is_drivers(text)
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
    match spoken(text) {
        Some(Spoken::Module(name, rest)) => name == "nvidia" && rest.starts_with("probe of "),
        Some(Spoken::Device(_, _, rest)) => rest.starts_with("probe with driver nvidia failed"),
        _ => false,
    }
}

/// Code of a failed initialisation in a line.
pub fn init_code(text: &str) -> Option<InitCode> {
    let Spoken::Driver(rest) = spoken(text)? else {
        return None;
    };
    let (_, rest) = rest.split_once("RmInitAdapter failed! (")?;
    let (code, _) = rest.split_once(')')?;
    let mut numbers = code
        .split(':')
        .map(|n| u32::from_str_radix(n.trim().strip_prefix("0x")?, 16).ok());
    Some(InitCode {
        stage: numbers.next()??,
        status: numbers.next()??,
    })
}

/// Line that separates initialisations: lines without an address on its two sides are of different
/// ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Boundary {
    /// In the first part of the initialisation of a GPU, which the line does not name.
    Begun,
    /// An initialisation has failed.
    Failed,
}

/// The boundary that a line is, if any.
pub fn boundary(text: &str) -> Option<Boundary> {
    let Spoken::Driver(rest) = spoken(text)? else {
        return None;
    };
    let has = |words: &str| rest.contains(words);
    if has("RmInitAdapter failed!") || has("rm_init_adapter failed") {
        Some(Boundary::Failed)
    } else {
        has("FBHUB Interrupt detected").then_some(Boundary::Begun)
    }
}

/// Number by which the driver's resource manager names a GPU: the lowest that is free when the
/// GPU's initialisation begins (gpumgrAllocGpuInstance), `GPU0` in `NVRM: GPU0 kgspBootstrap: ..`.
pub fn rm_number(text: &str) -> Option<u32> {
    let Spoken::Driver(rest) = spoken(text)? else {
        return None;
    };
    let (number, _) = rest.strip_prefix("GPU")?.split_once(' ')?;
    let is_number = !number.is_empty() && number.bytes().all(|b| b.is_ascii_digit());
    number.parse().ok().filter(|_| is_number)
}

/// Whether a line only passes an earlier one on: an assertion, or a function that gives up because
/// of another.
pub fn is_consequence(text: &str) -> bool {
    const PASSED_ON: &[&str] = &[
        "nvAssert",
        "nvCheck",
        "failed, bailing out",
        "*** Cannot attach",
    ];
    PASSED_ON.iter().any(|words| text.contains(words))
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
        "rm_init_adapter failed, device minor number",
        // About a client, which chooses the version that is repeated.
        "API mismatch",
    ];
    let can_explain = match spoken(text) {
        Some(Spoken::Driver(_)) => true,
        Some(Spoken::Device(name, _, rest)) => {
            // The kernel's message about a function that cannot be enabled, in its newer releases
            // and in older ones.
            name == "nvidia"
                || rest.starts_with("can't enable device")
                || rest.ends_with("not assigned; can't enable device")
        }
        Some(Spoken::Module(_, rest)) => OF_LOADER.iter().any(|words| rest.starts_with(words)),
        None => is_of_spdm(text),
    };
    // The driver's own refusal, whose reason it has logged before.
    let is_general = text.ends_with("failed with error -1");
    can_explain && !is_general && !HARMLESS.iter().any(|h| text.contains(h))
}

/// Whether a line of the log concerns the boot of a GPU guest.
pub fn is_wanted(text: &str) -> bool {
    match spoken(text) {
        Some(Spoken::Driver(_) | Spoken::Module(..)) => true,
        Some(Spoken::Device(name, _, rest)) => {
            name.starts_with("nvidia")
                || name.starts_with("vfio")
                || OF_DEVICES.iter().any(|words| rest.contains(words))
        }
        None => !is_user_spaces(text) && MILESTONES.iter().any(|words| text.starts_with(words)),
    }
}

/// The GPU that a line of the PCI enumeration announces: `pci 0001:00:03.0: [10de:2330] type 00
/// class 0x030200`.
pub fn enumerated_gpu(text: &str) -> Option<PciAddress> {
    let Spoken::Device("pci", address, rest) = spoken(text)? else {
        return None;
    };
    let vendor = u16::from_str_radix(rest.strip_prefix('[')?.get(..4)?, 16).ok()?;
    let class = u32::from_str_radix(rest.split_once("class 0x")?.1.get(..6)?, 16).ok()?;
    is_gpu(vendor, class).then_some(address)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gpu(text: &str) -> PciAddress {
        text.parse().unwrap()
    }

    /// Lines whose beginning user space has chosen.
    fn forged() -> Vec<String> {
        let xid = "0001:00:01): 79, pid=1, GPU has fallen off the bus.";
        let words = "unexpected WPR2 already up, cannot proceed with booting GSP";
        let code = "RmInitAdapter failed! (0x62:0x40:1)";
        [
            format!("NVRM: Xid (PCI:[314]: segfault at 0 ip 0 sp 0 error 4 in {xid}[400000+1000]"),
            format!("NVRM: GPU 0001:[314]: segfault at 0 ip 0 sp 0 error 4 in {code}[400000+1000]"),
            format!("NVRM: GPU0 a: b[7]: segfault at 0 ip 0 sp 0 error 4 in {words}[400000+1000]"),
            format!("NVRM: GPU0 ]: [[1]: unhandled exception: DABT in {words}[400000+1000]"),
            format!("NVRM: \\xff\\xfeG a[4194304] bad frame in x frame:0 in {words}[400000+1000]"),
            format!("nvidia-smi[9]: segfault at 0 ip 0 sp 0 error 4 in {words}[400000+1000]"),
            "nvidia-smi[9]: segfault at 0 ip 0 sp 0 error 4 in libnvidia-ml.so.1[7f0+1000]".into(),
            "NVRM: loading N[9] vsyscall attempted with vsyscall=none ip:0 cs:33 sp:0".into(),
            "NVRM: SXid (PCI[9]: segfault at 0 ip 0 sp 0 error 4 in 0000:01:00.0): 1".into(),
            "NVRM: fallen of invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0".into(),
            "NVRM: page allocation failure: order:4, mode:0x40dc0(GFP_KERNEL)".into(),
            "NVRM: not assi (77): /proc/77/oom_adj is deprecated".into(),
            "NVRM: GPU0 a: x uses obsolete (PF_INET,SOCK_PACKET)".into(),
            format!("NVRM: Xid (PCI:{xid}: NVRM: potentially unexpected fatal signal 11."),
            format!("NVRM: Xid (PCI:{xid} IN=lo OUT= MAC=00 SRC=127.0.0.1 DST=127.0.0.1 LEN=84"),
            "nvidia-nvswitch: renamed from nvidia".into(),
            "nvidia: entered promiscuous mode".into(),
            "Linux version [9]: segfault at 0 ip 0 sp 0 error 4 in a[400000+1000]".into(),
            // A continuation that the kernel could not append to its line.
            format!(" in NVRM: Xid (PCI:{xid}[400000+1000]"),
        ]
        .into()
    }

    /// Lines in which user space has chosen a later part.
    fn quoting() -> Vec<String> {
        let comm = "NVRM: Xid (PCI:";
        let file = "NVRM: Xid (PCI:0001:00:01): 79, fallen off the bus";
        [
            format!("traps: {comm}[9] general protection fault ip:0 sp:0 error:0 in {file}[1+1]"),
            format!("Memory cgroup out of memory: Killed process 9 ({comm}) total-vm:1kB"),
            format!("oom-kill:constraint=CONSTRAINT_MEMCG,task_memcg=/a,task={comm},pid=9,uid=0"),
            format!("[      9]     0     9      320        0    45056        0  0 {comm}"),
            format!("audit: type=1701 audit(1:1): auid=1 pid=9 comm=\"{comm}\" exe=\"/{file}\""),
            format!("process '{file}' started with executable stack"),
            format!("warning: `{comm}' uses 32-bit capabilities (legacy support in use)"),
            format!("coredump: 9({comm}): |/bin/false pipe failed"),
            format!("umip: {comm}[9] ip:0 sp:0: SIDT instruction cannot be used by applications."),
            format!("x86/split lock detection: #AC: {comm}/9 took a split_lock trap at address: 0"),
            format!("INFO: task {comm}:9 blocked for more than 120 seconds."),
            format!("CPU: 0 PID: 9 Comm: {comm} Tainted: G"),
            format!("netlink: 4 bytes leftover after parsing attributes in process `{comm}'."),
            format!("overlayfs: upperdir is in-use, {file}"),
            format!("x{file}"),
        ]
        .into()
    }

    #[test]
    fn what_user_space_writes_into_the_kernels_log_is_nobodys_word() {
        for text in forged().iter().chain(&quoting()) {
            let meaning = (
                signal(text),
                address(text),
                init_code(text),
                explains(text),
                is_banner(text) || is_of_switch(text) || is_failed_probe(text),
            );
            assert_eq!(meaning, (None, None, None, false, false), "{text:?}");
            assert!(!is_wanted(text), "{text:?}");
        }
    }

    #[test]
    fn what_the_driver_and_the_kernel_log_about_devices_is_taken() {
        for text in [
            "NVRM: GPU0 confComputeConstructEngine_IMPL: CPU does not support confidential compute.",
            "NVRM: GPU 0001:00:03.0: RmInitAdapter failed! (0x62:0x65:1860)",
            "NVRM: Xid (PCI:0001:00:03): 79, pid=1, name=x, GPU has fallen off the bus.",
            "NVRM: BAR0 is 0M @ 0x0 (PCI:0001:00:03.0)",
            "NVRM: Can't find an IRQ for your NVIDIA card!",
            "NVRM: No NVIDIA GPU found.",
            "nvidia 0001:00:03.0: Direct firmware load for nvidia/1/gsp_ga10x.bin failed with \
             error -2",
            "pci 0001:00:06.0: can't enable device: BAR 0 [mem 0x0-0xffffff] not claimed",
            "pci 0001:00:07.0: BAR 2 [mem size 0x2000000000 64bit pref]: not assigned; can't enable device",
            "nvidia: Unknown symbol __ubsan_handle_load_invalid_value (err -2)",
            "nvidia: version magic '6.1.0 SMP' should be '6.18.0 SMP'",
        ] {
            assert!(
                is_drivers(text) && explains(text) && is_wanted(text),
                "{text:?}"
            );
        }
        for text in [
            "nvidia-nvlink: Nvlink Core is being initialized, major device number 240",
            "nvidia-uvm: Loaded the UVM driver, major device number 238.",
            "pci 0001:00:03.0: [10de:2330] type 00 class 0x030200",
            "pcieport 0000:00:02.0: BAR 13: no space for [io size 0x1000]",
            "Linux version 6.18.0 (x@y)",
            "Run /init as init process",
            "Out of memory: Killed process 9 (init) total-vm:1kB",
        ] {
            assert!(is_wanted(text) && !explains(text), "{text:?}");
        }
        assert!(is_of_switch(
            "nvidia-nvswitch0: SXid (PCI:0000:c1:00.0): 12028, Non-fatal"
        ));
        assert!(is_of_switch(
            "NVRM: SXid (PCI:0000:c1:00.0): 12028, Non-fatal"
        ));
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
        let of = |text: &str| address(text).map(|gpu| gpu.to_string());
        for text in [
            "NVRM: GPU 0001:00:03.0: RmInitAdapter failed! (0x62:0x65:1860)",
            "NVRM: Xid (PCI:0001:00:03): 79, GPU has fallen off the bus.",
            "NVRM: Xid (PCI:0001:00:03 GPU-I:05): 31, pid=1",
            "NVRM: BAR0 is 0M @ 0x0 (PCI:0001:00:03.0)",
            "NVRM: This PCI I/O region assigned to your NVIDIA device is invalid: BAR1 is 0M @ 0x0 \
             (PCI:0001:00:03.0)",
            "NVRM: The NVIDIA GPU 0001:00:03.0 (PCI ID: 10de:2330) installed in this system",
            "NVRM: Failing GPU memory onlining The NVIDIA GPU 0001:00:03.0 installed in the system",
            "NVRM: Attempting to remove device 0001:00:03.0 with non-zero usage count!",
            "nvidia 0001:00:03.0: enabling device (0000 -> 0002)",
            "nvidia: probe of 0001:00:03.0 failed with error -1",
        ] {
            assert_eq!(of(text).as_deref(), Some("0001:00:03.0"), "{text:?}");
        }
        for text in [
            "NVRM: GPU1 gpuPowerManagementEnter: failed",
            "NVRM: Xid (PCI:x): 79",
            "NVRM: API mismatch: the client has the version (PCI:0001:00:03), but",
            "0001:00:03.0",
            "the GPU 0001:00:03.0: gone",
        ] {
            assert_eq!(of(text), None, "{text:?}");
        }
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
        assert_eq!(
            signal("NVRM: Xid (PCI:0001:00:03 GPU-I:05): 31, pid=1"),
            Some(Signal::Xid(gpu("0001:00:03.0"), 31))
        );
        for text in [
            "Xid (PCI:0001:00:03): 79, x",
            "NVRM: Xid (PCI:x): 79, x",
            "NVRM: Xid (PCI:0001:00:03): many, x",
            "NVRM: Xid (PCI:0001:00:03): +79, x",
            "NVRM: Xid (PCI:0001:00:03): 79",
            "NVRM: Xid (PCI:0001:00:03 x): 79, x",
            "NVRM: GPU0 x: Xid (PCI:0001:00:03): 79, x",
            "",
            &removal[6..],
        ] {
            assert_eq!(signal(text), None, "{text:?}");
        }
    }

    #[test]
    fn the_name_of_a_program_in_an_xid_is_not_the_drivers() {
        let xid = |name: &str| format!("NVRM: Xid (PCI:0001:00:03): 31, pid=9, name={name}, Ch 8");
        for name in [
            "is 0M @ 0x0",
            "not assigned",
            "GSP-DMA decrypt",
            "a, is 0M @ 0x0",
            "é",
        ] {
            let text = xid(name);
            let [head, rest] = without_name(&text);
            assert_eq!(
                (head, rest),
                ("NVRM: Xid (PCI:0001:00:03): 31, pid=9", ", Ch 8")
            );
        }
        let text = "NVRM: BAR0, name=x, y";
        assert_eq!(without_name(text), [text, ""]);
        assert_eq!(without_name("NVRM: Xid (PCI:a): 1, name=b")[1], "");
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
            "RmInitAdapter failed! (0x62:0x65:1860)",
            "NVRM: RmInitAdapter failed! (0x62)",
            "NVRM: RmInitAdapter failed! (62:65:1)",
            "NVRM: RmInitAdapter failed! (0xz:0x1:1)",
        ] {
            assert_eq!(init_code(text), None, "{text:?}");
        }
    }

    #[test]
    fn initialisations_are_told_apart() {
        assert_eq!(rm_number("NVRM: GPU12 kgspBootstrap: no"), Some(12));
        for text in [
            "NVRM: GPU 0001:00:03.0: x",
            "NVRM: GPUx y",
            "NVRM: GPU+1 y",
            "GPU1 y",
        ] {
            assert_eq!(rm_number(text), None, "{text:?}");
        }
        for (text, wanted) in [
            (
                "NVRM: GPU 0001:00:03.0: RmInitAdapter failed! (0x62:0x65:1860)",
                Some(Boundary::Failed),
            ),
            (
                "NVRM: GPU 0001:00:03.0: rm_init_adapter failed, device minor number 0",
                Some(Boundary::Failed),
            ),
            (
                "NVRM: GPU0 kgmmuClear: FBHUB Interrupt detected. Clearing it.",
                Some(Boundary::Begun),
            ),
            (
                "NVRM: RmInitAdapter: osInitNvMapping failed, bailing out",
                None,
            ),
            ("FBHUB Interrupt detected", None),
        ] {
            assert_eq!(boundary(text), wanted, "{text:?}");
        }
        assert!(is_consequence(
            "NVRM: GPU0 nvAssertFailedNoLog: Assertion failed: 0 @ a.c:1"
        ));
        assert!(!is_consequence("NVRM: GPU0 spdmStart: Encryption FAILED"));
    }

    #[test]
    fn harmless_lines_explain_nothing() {
        for text in [
            "NVRM: GPU 0000:01:00.0: FBHUB Interrupt detected",
            "NVRM: The NVIDIA probe routine was not called for 7 device(s).",
            "Command line: console=ttyS0 nvidia.NVreg_RegistryDwords=x",
            "Kernel command line: console=ttyS0 nvidia.NVreg_RegistryDwords=x",
            "NVRM: API mismatch: the client has the version not assigned, but",
            "nvidia: loading out-of-tree module taints kernel.",
            "nvidia-nvlink: Unregistered Nvlink Core, major device number 240",
        ] {
            assert!(!explains(text), "{text:?}");
        }
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
        assert_eq!(gpu("pci 0001:00:03.0: [10d\u{e9}"), None);
    }
}
