//! Reasons why a GPU is not usable: from the failed step and the driver's messages to one reason,
//! with the cure if one is known.
//!
//! Failures that the driver logs in kernel-open/nvidia/nv.c and nv-pci.c and in RmInitAdapter
//! (src/nvidia/arch/nvalloc/unix/src/osinit.c) have their reason here; an unknown one keeps the
//! general reason of its step, and the messages.

use crate::driver_log::{InitCode, init_code};

named! {
    /// Reason why a GPU is not usable. Names are for programs: stable, lower case, with hyphens.
    pub enum Reason {
        DriverMissing = "driver-missing",
        DriverLoadFailed = "driver-load-failed",
        DriverFindsNoGpu = "driver-finds-no-gpu",
        DriverProbedNothing = "driver-probed-nothing",
        NoProbeSucceeded = "no-probe-succeeded",
        EnableFailed = "enable-failed",
        ProbeFailed = "probe-failed",
        BarUnassigned = "bar-unassigned",
        BarFirewall = "bar-firewall",
        OffTheBus = "off-the-bus",
        NoInterrupt = "no-interrupt",
        UnsupportedGpu = "unsupported-gpu",
        NoMinor = "no-minor",
        NoDeviceNode = "no-device-node",
        OpenFailed = "open-failed",
        FirmwareMissing = "firmware-missing",
        FirmwareBoot = "firmware-boot",
        NeedsReset = "needs-reset",
        FabricNotReady = "fabric-not-ready",
        CcRefused = "cc-refused",
        AttachFailed = "attach-failed",
        StateLoadFailed = "state-load-failed",
        MemoryNotMovable = "memory-not-movable",
        InitFailed = "init-failed",
        Internal = "internal",
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
    /// The reason if nothing more is known.
    fn general(self) -> Reason {
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

impl Reason {
    /// Cure, if one is known.
    pub fn cure(self) -> Option<&'static str> {
        Some(match self {
            Self::DriverMissing => {
                "put the driver's modules for this kernel into the image and run depmod"
            }
            Self::DriverFindsNoGpu => {
                "this driver knows none of the guest's GPUs: use a driver for this generation"
            }
            Self::DriverProbedNothing => {
                "another driver has the GPU, or driver_override or driver_async_probe keeps this \
                    one away"
            }
            Self::NoProbeSucceeded => "see the log lines of each GPU",
            Self::EnableFailed => {
                "the guest's firmware or the VMM gave this function no memory: check its BARs"
            }
            Self::BarUnassigned => {
                "the guest has no room for this GPU's BARs: give the VM a larger 64-bit MMIO window"
            }
            Self::BarFirewall => "the GPU did not open its BARs within 4 s: reset it on the host",
            Self::OffTheBus => "the GPU does not answer: reset it or power-cycle it on the host",
            Self::NoInterrupt => {
                "the VMM must give this function MSI-X, MSI or an interrupt line; a GPU that has \
                    left the bus has none of them"
            }
            Self::UnsupportedGpu => {
                "this driver does not know this chip: use a driver branch that does"
            }
            Self::NoMinor => {
                "the driver's /proc files are missing or of another form: is this driver version \
                    supported?"
            }
            Self::NoDeviceNode => "is /dev a devtmpfs, and is there room in it?",
            Self::FirmwareMissing => {
                "put the driver's nvidia/<version>/gsp_*.bin below /lib/firmware in the image"
            }
            Self::FirmwareBoot => {
                "the GPU's own processor did not start: reset the GPU on the host"
            }
            Self::NeedsReset => {
                "an earlier use left the GPU half initialised: reset it on the host before the \
                    next guest"
            }
            Self::FabricNotReady => {
                "the NVLink fabric is not up: start the fabric manager, in the guest or in the \
                    service VM"
            }
            Self::CcRefused => {
                "under confidential computing a GPU comes up once per reset, and all GPUs need \
                    one mode: reset them on the host, then restart the guest"
            }
            Self::MemoryNotMovable => {
                "the guest's kernel must add the GPU's coherent memory as movable: boot it with \
                    memhp_default_state=online_movable"
            }
            Self::Internal => "a bug of this init: report it with the event stream",
            Self::DriverLoadFailed
            | Self::ProbeFailed
            | Self::OpenFailed
            | Self::AttachFailed
            | Self::StateLoadFailed
            | Self::InitFailed => return None,
        })
    }
}

/// Texts of the driver that identify a reason, the most specific first.
const WORDS: &[(&str, Reason)] = &[
    ("fallen off the bus", Reason::OffTheBus),
    ("unexpected WPR2 already up", Reason::NeedsReset),
    ("the onlining zone is not movable", Reason::MemoryNotMovable),
    ("failed with error -2", Reason::FirmwareMissing), // of "Direct firmware load for .."
    ("failed to wait for bar firewall", Reason::BarFirewall),
    ("Can't find an IRQ", Reason::NoInterrupt),
    (
        "assigned to your NVIDIA device is invalid",
        Reason::BarUnassigned,
    ),
    ("is 0M @ 0x0", Reason::BarUnassigned),
    ("is not supported by", Reason::UnsupportedGpu),
    ("not supported by this driver", Reason::UnsupportedGpu),
    (
        "No interrupts of any type are available",
        Reason::NoInterrupt,
    ),
    ("not assigned", Reason::BarUnassigned), // the kernel's, of a BAR that it cannot enable
    ("pci_enable_device failed", Reason::EnableFailed),
    ("can't enable device", Reason::EnableFailed),
    ("No NVIDIA GPU found", Reason::DriverFindsNoGpu),
    ("No NVIDIA devices probed", Reason::DriverProbedNothing),
    (
        "None of the NVIDIA devices were initialized",
        Reason::NoProbeSucceeded,
    ),
];

/// Reason of a code of RmInitAdapter. The status comes first: it is the more specific part if it is
/// one of these.
fn of_code(code: InitCode) -> Reason {
    match (code.stage, code.status) {
        (_, 0x81) => Reason::FabricNotReady,
        (0x22, 0x56) => Reason::CcRefused,
        (0x61, _) => Reason::FirmwareMissing,
        // Invalid state: the firmware's protected memory is set up already. The line about it names
        // no GPU.
        (0x62, 0x40) => Reason::NeedsReset,
        (0x62, _) => Reason::FirmwareBoot,
        (0x22, _) => Reason::AttachFailed,
        (0x24 | 0x25, _) => Reason::StateLoadFailed,
        _ => Reason::InitFailed,
    }
}

/// The reason, and the line it is from, for a GPU that failed in `step`. `lines` are the driver's
/// lines about the GPU since that step began, in order.
pub fn classify(step: FailedStep, lines: &[String]) -> (Reason, Option<&str>) {
    let (reason, line) = classify_words(lines).unwrap_or((step.general(), None));
    (reason, line.or(lines.last().map(String::as_str)))
}

fn classify_words(lines: &[String]) -> Option<(Reason, Option<&str>)> {
    for (text, reason) in WORDS {
        if let Some(line) = lines.iter().find(|line| line.contains(text)) {
            return Some((*reason, Some(line)));
        }
    }
    lines
        .iter()
        .rev()
        .find_map(|line| init_code(line).map(|code| (of_code(code), Some(line.as_str()))))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(step: FailedStep, lines: &[&str]) -> &'static str {
        let lines: Vec<String> = lines.iter().map(ToString::to_string).collect();
        classify(step, &lines).0.name()
    }

    #[test]
    fn every_reason_has_its_own_name() {
        for reason in Reason::ALL {
            assert_eq!(Reason::named(reason.name()), Some(reason));
        }
    }

    #[test]
    fn driver_texts_decide_before_codes_and_codes_before_the_step() {
        assert_eq!(
            of(
                FailedStep::Init,
                &["NVRM: GPU 0001:00:03.0: RmInitAdapter failed! (0x62:0x65:1860)"]
            ),
            "firmware-boot"
        );
        let wpr2 = "NVRM: GPU0 kgspBootstrap_GH100: unexpected WPR2 already up, cannot proceed \
            with booting GSP";
        assert_eq!(
            of(
                FailedStep::Init,
                &[
                    wpr2,
                    "NVRM: GPU 0001:00:03.0: RmInitAdapter failed! (0x62:0x40:1860)"
                ]
            ),
            "needs-reset"
        );
        assert_eq!(
            of(
                FailedStep::Init,
                &["NVRM: GPU 0001:00:03.0: RmInitAdapter failed! (0x62:0x40:1860)"]
            ),
            "needs-reset"
        );
        assert_eq!(
            of(
                FailedStep::Init,
                &["NVRM: GPU 0001:00:03.0: RmInitAdapter failed! (0x25:0x81:1860)"]
            ),
            "fabric-not-ready"
        );
        assert_eq!(
            of(
                FailedStep::Init,
                &["NVRM: GPU 0001:00:03.0: RmInitAdapter failed! (0x22:0x56:774)"]
            ),
            "cc-refused"
        );
        assert_eq!(
            of(
                FailedStep::Init,
                &["NVRM: GPU 0001:00:03.0: RmInitAdapter failed! (0x99:0x99:1)"]
            ),
            "init-failed"
        );
        assert_eq!(
            of(
                FailedStep::Probe,
                &["NVRM: BAR0 is 0M @ 0x0 (PCI:0001:00:03.0)"]
            ),
            "bar-unassigned"
        );
        assert_eq!(
            of(FailedStep::Probe, &["NVRM: something new"]),
            "probe-failed"
        );
        assert_eq!(
            of(
                FailedStep::Enable,
                &[
                    "nvidia 0001:00:03.0: can't enable device: BAR 0 [mem size 0x1000000] not \
                        assigned"
                ]
            ),
            "bar-unassigned"
        );
        assert_eq!(
            of(
                FailedStep::Enable,
                &["nvidia 0001:00:03.0: can't enable device: BAR 0 [mem 0x0-0xffffff] not claimed"]
            ),
            "enable-failed"
        );
        assert_eq!(
            of(
                FailedStep::Init,
                &["NVRM: No interrupts of any type are available. Cannot use this GPU."]
            ),
            "no-interrupt"
        );
        let joined = "NVRM: The NVIDIA GPU 0001:00:01.0 (PCI ID: 10de:ffff) installed in this \
            system is not supported by the NVIDIA 550.163.01 driver release.";
        assert_eq!(of(FailedStep::Probe, &[joined]), "unsupported-gpu");
        assert_eq!(of(FailedStep::Open, &[]), "open-failed");
    }

    #[test]
    fn the_reported_line_is_the_deciding_one() {
        let lines = [
            "NVRM: first".to_string(),
            "NVRM: the GPU has fallen off the bus".into(),
            "NVRM: last".into(),
        ];
        assert_eq!(
            classify(FailedStep::Probe, &lines),
            (Reason::OffTheBus, Some(lines[1].as_str()))
        );
        assert_eq!(
            classify(FailedStep::Probe, &lines[..1]),
            (Reason::ProbeFailed, Some(lines[0].as_str()))
        );
    }
}
