//! Meanings of lines of the guest's kernel log. Pure, from one line to its meaning.
//!
//! A console does not separate the kernel's own lines from lines that a process wrote to /dev/kmsg,
//! as NVRC and its programs do: a line is read by its text, not by its writer.

use kata_gpu_wire::driver_log;
use kata_gpu_wire::driver_log::Signal;
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
    /// A function's memory is about to be enabled: on the host, its BARs are mapped while this
    /// write lasts.
    Enabling {
        function: PciAddress,
        driver: bool,
    },
    /// The first line of nvidia.ko.
    ModuleBegins,
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
    /// Any other line that enters the stream as it stands.
    Other,
}

/// Meaning of a line; None for a line that does not matter here.
pub fn meaning(text: &str) -> Option<Meaning> {
    if let Some(rest) = text.strip_prefix("Linux version ") {
        return Some(Meaning::Banner {
            release: rest.split(' ').next().unwrap_or("").to_string(),
        });
    }
    if let Some(rest) = text.strip_prefix("Run ")
        && let Some(program) = rest.strip_suffix(" as init process")
    {
        return Some(Meaning::RunInit {
            program: program.to_string(),
        });
    }
    if let Some(gpu) = driver_log::enumerated_gpu(text) {
        return Some(Meaning::GpuFound {
            gpu,
            device: between(text, "[", "]").unwrap_or("?").to_string(),
        });
    }
    if text.contains(": enabling device (")
        && let Some(function) = driver_log::address(text)
    {
        return Some(Meaning::Enabling {
            function,
            driver: text.starts_with("nvidia "),
        });
    }
    if text.starts_with("nvidia-nvlink: Nvlink Core is being initialized") {
        return Some(Meaning::ModuleBegins);
    }
    if driver_log::is_banner(text) {
        return Some(Meaning::ModuleLoaded);
    }
    if text.contains("Loaded the UVM driver") {
        return Some(Meaning::UvmLoaded);
    }
    if let Some(Signal::Xid(gpu, xid)) = driver_log::signal(text) {
        return Some(Meaning::Xid { gpu, xid });
    }
    if text.contains("FBHUB Interrupt detected") {
        return Some(Meaning::InitMark);
    }
    if let Some(gpu) = driver_log::address(text) {
        if text.contains("RmInitAdapter failed!") {
            return Some(Meaning::InitFailed { gpu });
        }
        if driver_log::is_failed_probe(text) {
            return Some(Meaning::ProbeFailed { gpu });
        }
    }
    if text.contains("Generated CDI spec with version") {
        return Some(Meaning::CtkDone);
    }
    if text.contains("nvidia-ctk") && text.contains("cdi generate") {
        return Some(Meaning::CtkBegins);
    }
    if let Some(text) = nvrc(text) {
        return Some(Meaning::Nvrc {
            text: text.to_string(),
        });
    }
    driver_log::is_wanted(text).then_some(Meaning::Other)
}

/// Text of NVRC's log lines, which name their module: `NVRC::mode[1]: mode: gpu 8 GPU`. NVRC's log
/// crate writes target and pid.
fn nvrc(text: &str) -> Option<&str> {
    let (target, message) = text.split_once(": ")?;
    let target = target.split('[').next()?;
    let name = target.split("::").next()?;
    (name.eq_ignore_ascii_case("nvrc")).then_some(message)
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
                Meaning::Other,
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
