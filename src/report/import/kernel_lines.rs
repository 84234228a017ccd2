//! Meanings of lines of the guest's kernel log. Pure, from one line to its meaning.
//!
//! A console does not separate the kernel's own lines from lines that a process wrote to /dev/kmsg,
//! as NVRC and its programs do: a line is read by its text, not by its writer.

use kata_gpu_wire::driver_log;
use kata_gpu_wire::driver_log::Signal;
use kata_gpu_wire::failure::facts::shows_confidential_guest;
use kata_gpu_wire::failure::of_guest;
use kata_gpu_wire::pci_address::PciAddress;

/// Meaning of a line for the boot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Meaning {
    /// First line of every kernel: a boot begins here.
    Banner {
        release: String,
    },
    /// The kernel starts the first program.
    RunInit {
        program: String,
    },
    GpuFound {
        gpu: PciAddress,
        device: String,
    },
    /// The enumeration of a function that is no GPU.
    Function,
    /// A BAR of a function found no room.
    NoRoom {
        function: PciAddress,
        bar: u8,
        bytes: u64,
    },
    BarAssigned {
        function: PciAddress,
        bar: u8,
    },
    /// The guest's memory is encrypted.
    Confidential,
    /// A function's memory is about to be enabled: on the host, its BARs are mapped while this
    /// write lasts.
    Enabling {
        function: PciAddress,
        driver: bool,
    },
    /// The first line of nvidia.ko.
    ModuleBegins,
    /// nvidia.ko probes an NVSwitch.
    SwitchProbe {
        function: PciAddress,
    },
    /// nvidia.ko has found no GPU that it takes, or is gone again.
    NoGpuTaken,
    /// nvidia.ko has probed all functions.
    ModuleLoaded,
    UvmLoaded,
    Xid {
        gpu: PciAddress,
        xid: u32,
    },
    /// An initialisation starts, of a GPU that the line does not name.
    InitMark,
    InitFailed {
        gpu: PciAddress,
    },
    ProbeFailed {
        gpu: PciAddress,
    },
    /// nvidia-ctk starts to write the CDI spec, or has written it.
    CtkBegins,
    CtkDone,
    Nvrc {
        text: String,
    },
    /// A sign of the guest's end.
    Ended,
    /// Any other line that enters the stream as it stands.
    Other,
}

/// Meaning of a line; None for a line that does not matter here.
pub fn meaning(text: &str) -> Option<Meaning> {
    if is_end(text) {
        return Some(Meaning::Ended);
    }
    if let Some(text) = nvrc(text) {
        return Some(nvrcs(text));
    }
    if text.contains("Generated CDI spec with version") {
        return Some(Meaning::CtkDone);
    }
    if driver_log::is_user_spaces(text) {
        return None;
    }
    kernels(text)
        .or_else(|| of_pci(text))
        .or_else(|| of_driver(text))
        .or_else(|| driver_log::is_wanted(text).then_some(Meaning::Other))
}

fn kernels(text: &str) -> Option<Meaning> {
    if let Some(rest) = text.strip_prefix("Linux version ") {
        return Some(Meaning::Banner {
            release: rest.split(' ').next().unwrap_or("").to_string(),
        });
    }
    if shows_confidential_guest(text) {
        return Some(Meaning::Confidential);
    }
    let program = text
        .strip_prefix("Run ")?
        .strip_suffix(" as init process")?;
    Some(Meaning::RunInit {
        program: program.to_string(),
    })
}

/// Lines about PCI functions, by the kernel: `pci 0000:02:00.0: ..`, `nvidia 0000:02:00.0: ..`.
fn of_pci(text: &str) -> Option<Meaning> {
    let (by, rest) = text.split_once(' ')?;
    let function = rest.split_once(": ")?.0.parse().ok()?;
    if by == "pci" && rest.contains("] type ") && rest.contains(" class 0x") {
        return Some(match driver_log::enumerated_gpu(text) {
            Some(gpu) => Meaning::GpuFound {
                gpu,
                device: between(text, "[", "]").unwrap_or("?").to_string(),
            },
            None => Meaning::Function,
        });
    }
    if let Some((function, bar, bytes)) = driver_log::bar_without_room(text) {
        return Some(Meaning::NoRoom {
            function,
            bar,
            bytes,
        });
    }
    if let Some((function, bar)) = driver_log::assigned_bar(text) {
        return Some(Meaning::BarAssigned { function, bar });
    }
    let enabling = text.contains(": enabling device (");
    enabling.then(|| Meaning::Enabling {
        function,
        driver: by == "nvidia",
    })
}

fn of_driver(text: &str) -> Option<Meaning> {
    let begins = |words: &[&str]| words.iter().any(|words| text.starts_with(words));
    if begins(&["nvidia-nvlink: Nvlink Core is being initialized"]) {
        return Some(Meaning::ModuleBegins);
    }
    if begins(&[
        "NVRM: No NVIDIA GPU found",
        "nvidia-nvlink: Unregistered Nvlink Core",
    ]) {
        return Some(Meaning::NoGpuTaken);
    }
    if driver_log::is_banner(text) {
        return Some(Meaning::ModuleLoaded);
    }
    if begins(&["nvidia-uvm: Loaded the UVM driver"]) {
        return Some(Meaning::UvmLoaded);
    }
    if let Some(rest) = text.strip_prefix("nvidia-nvswitch")
        && let Some((_, function)) = rest.split_once(": Probing device ")
    {
        let function = function.split(',').next()?.parse().ok()?;
        return Some(Meaning::SwitchProbe { function });
    }
    if let Some(Signal::Xid(gpu, xid)) = driver_log::signal(text) {
        return Some(Meaning::Xid { gpu, xid });
    }
    let is_nvrm = text.starts_with("NVRM: ");
    if is_nvrm && text.contains("FBHUB Interrupt detected") {
        return Some(Meaning::InitMark);
    }
    let gpu = driver_log::address(text)?;
    if is_nvrm && text.contains("RmInitAdapter failed!") {
        return Some(Meaning::InitFailed { gpu });
    }
    let is_probe = text.starts_with("nvidia") && driver_log::is_failed_probe(text);
    is_probe.then_some(Meaning::ProbeFailed { gpu })
}

/// Begins the panic of NVRC as its older releases print it, without a stamp.
pub const OLD_PANIC: &str = "panic: panicked at src/";

/// Whether the next line has the message of this panic of NVRC: it prints the place first.
pub fn is_panics_place(text: &str) -> bool {
    let is_nvrcs = text.starts_with(OLD_PANIC) || nvrc(text).is_some();
    is_nvrcs && text.contains("panicked at ") && text.ends_with(':')
}

/// Whether a line shows the guest's end, or that the driver could not be loaded: the kernel's from
/// its first byte on, NVRC's, or an error of nvidia-ctk.
fn is_end(text: &str) -> bool {
    let begins = [
        "Kernel panic - not syncing",
        "Out of memory: Killed process",
        "reboot: ",
        "modprobe: FATAL: Module nvidia not found",
        "nvidia: disagrees about version of symbol",
        "nvidia: Unknown symbol",
        "nvidia: version magic ",
        "Loading of unsigned module is rejected",
        "Loading of module with unavailable key is rejected",
        OLD_PANIC,
        "time=\"",
        "level=error",
    ];
    let is_writers = begins.iter().any(|words| text.starts_with(words)) || nvrc(text).is_some();
    is_writers && of_guest(text).is_some()
}

/// Text of NVRC's log lines, which name their module: `NVRC::mode[1]: mode: gpu 8 GPU`. NVRC's log
/// crate writes target and pid: NVRC's is 1, so that no other process is taken for it.
fn nvrc(text: &str) -> Option<&str> {
    if let Some(panic) = text.strip_prefix("NVRC panic: ") {
        return Some(panic);
    }
    let (target, message) = text.split_once(": ")?;
    let (target, pid) = target.split_once('[').unwrap_or((target, "1]"));
    let name = target.split("::").next()?;
    (name.eq_ignore_ascii_case("nvrc") && pid == "1]").then_some(message)
}

fn nvrcs(text: &str) -> Meaning {
    if text.contains("nvidia-ctk") && text.contains("cdi generate") {
        return Meaning::CtkBegins;
    }
    Meaning::Nvrc {
        text: text.to_string(),
    }
}

fn between<'a>(text: &'a str, open: &str, close: &str) -> Option<&'a str> {
    text.split_once(open)?
        .1
        .split_once(close)
        .map(|(inside, _)| inside)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gpu(text: &str) -> PciAddress {
        text.parse().unwrap()
    }

    #[test]
    fn every_milestone_of_a_boot_is_recognised() {
        let function = gpu("0000:02:00.0");
        let want = [
            (
                "Linux version 6.12.8-nvidia (b@h) (gcc 13) #1 SMP",
                Meaning::Banner {
                    release: "6.12.8-nvidia".into(),
                },
            ),
            (
                "Run /init as init process",
                Meaning::RunInit {
                    program: "/init".into(),
                },
            ),
            (
                "pci 0000:02:00.0: [10de:2330] type 00 class 0x030200 PCIe Endpoint",
                Meaning::GpuFound {
                    gpu: function,
                    device: "10de:2330".into(),
                },
            ),
            (
                "nvidia 0000:02:00.0: enabling device (0140 -> 0142)",
                Meaning::Enabling {
                    function,
                    driver: true,
                },
            ),
            (
                "pci 0000:02:00.0: enabling device (0000 -> 0002)",
                Meaning::Enabling {
                    function,
                    driver: false,
                },
            ),
            (
                "nvidia-nvlink: Nvlink Core is being initialized, major device number 243",
                Meaning::ModuleBegins,
            ),
            (
                "NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build",
                Meaning::ModuleLoaded,
            ),
            (
                "nvidia-uvm: Loaded the UVM driver, major device number 241.",
                Meaning::UvmLoaded,
            ),
            (
                "NVRM: Xid (PCI:0000:02:00): 79, GPU has fallen off the bus.",
                Meaning::Xid {
                    gpu: function,
                    xid: 79,
                },
            ),
            (
                "NVRM: gpuClearX_GA100: FBHUB Interrupt detected. Clearing it.",
                Meaning::InitMark,
            ),
            (
                "NVRM: GPU 0000:02:00.0: RmInitAdapter failed! (0x62:0x65:1860)",
                Meaning::InitFailed { gpu: function },
            ),
            (
                "nvidia 0000:02:00.0: probe with driver nvidia failed with error -1",
                Meaning::ProbeFailed { gpu: function },
            ),
            (
                "NVRC::execute[1]: /bin/nvidia-ctk -d cdi generate \
                 --output=/var/run/cdi/nvidia.yaml",
                Meaning::CtkBegins,
            ),
            (
                "time=\"2026-01-02T03:04:05Z\" level=info msg=\"Generated CDI spec with version \
                 0.5.0\"",
                Meaning::CtkDone,
            ),
            (
                "NVRC::mode[1]: mode: gpu 8 GPU",
                Meaning::Nvrc {
                    text: "mode: gpu 8 GPU".into(),
                },
            ),
            (
                "Kernel panic - not syncing: Attempted to kill init!",
                Meaning::Ended,
            ),
            ("NVRM: something new", Meaning::Other),
        ];
        for (text, meaning_wanted) in want {
            assert_eq!(meaning(text), Some(meaning_wanted), "{text}");
        }
        for text in [
            "",
            "random: crng init done",
            "virtio_scsi virtio1: 1/0/0 default/read/poll queues",
            "audit: type=2000",
        ] {
            assert_eq!(meaning(text), None, "{text}");
        }
    }
}
