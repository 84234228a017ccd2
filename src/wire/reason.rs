//! Reasons why a GPU is not usable: from the failed step and the driver's messages to one reason,
//! with the cure if one is known.
//!
//! Every failure listed in FACTS of the driver has its reason here; an unknown one keeps the
//! general reason of its step, and the messages.

use crate::driver_log::{InitCode, init_code};
use std::fmt;

/// Reason why a GPU is not usable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    DriverMissing,
    DriverLoadFailed,
    DriverFindsNoGpu,
    DriverProbedNothing,
    NoProbeSucceeded,
    EnableFailed,
    ProbeFailed,
    BarUnassigned,
    BarFirewall,
    OffTheBus,
    NoInterrupt,
    UnsupportedGpu,
    NoMinor,
    NoDeviceNode,
    OpenFailed,
    FirmwareMissing,
    FirmwareBoot,
    NeedsReset,
    FabricNotReady,
    CcRefused,
    AttachFailed,
    StateLoadFailed,
    MemoryNotMovable,
    InitFailed,
    Internal,
}

/// The step in which a GPU failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    Module,
    Enable,
    Probe,
    Nodes,
    Open,
    Init,
    /// Failure after the GPU was usable.
    Running,
    /// Failure of the init itself, in any step.
    Task,
}

impl Step {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Module => "module",
            Self::Enable => "enable",
            Self::Probe => "probe",
            Self::Nodes => "nodes",
            Self::Open => "open",
            Self::Init => "init",
            Self::Running => "running",
            Self::Task => "task",
        }
    }

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

/// Token for programs, and cure for people.
type Entry = (Reason, &'static str, &'static str);

/// All reasons. Empty cure: none is known.
const TABLE: &[Entry] = &[
    (
        Reason::DriverMissing,
        "driver-missing",
        "put the driver's modules for this kernel into the image and run depmod",
    ),
    (Reason::DriverLoadFailed, "driver-load-failed", ""),
    (
        Reason::DriverFindsNoGpu,
        "driver-finds-no-gpu",
        "this driver knows none of the guest's GPUs: use a driver for this generation",
    ),
    (
        Reason::DriverProbedNothing,
        "driver-probed-nothing",
        "another driver has the GPU, or driver_override or driver_async_probe keeps this one away",
    ),
    (
        Reason::NoProbeSucceeded,
        "no-probe-succeeded",
        "see the log lines of each GPU",
    ),
    (
        Reason::EnableFailed,
        "enable-failed",
        "the guest's firmware or the VMM gave this function no memory: check its BARs",
    ),
    (Reason::ProbeFailed, "probe-failed", ""),
    (
        Reason::BarUnassigned,
        "bar-unassigned",
        "the guest has no room for this GPU's BARs: give the VM a larger 64-bit MMIO window",
    ),
    (
        Reason::BarFirewall,
        "bar-firewall",
        "the GPU did not open its BARs within 4 s: reset it on the host",
    ),
    (
        Reason::OffTheBus,
        "off-the-bus",
        "the GPU does not answer: reset it or power-cycle it on the host",
    ),
    (
        Reason::NoInterrupt,
        "no-interrupt",
        "the VMM must give this function MSI-X, MSI or an interrupt line; a GPU that has left the bus has none of them",
    ),
    (
        Reason::UnsupportedGpu,
        "unsupported-gpu",
        "this driver does not know this chip: use a driver branch that does",
    ),
    (
        Reason::NoMinor,
        "no-minor",
        "the driver's /proc files are missing or of another form: is this driver version supported?",
    ),
    (
        Reason::NoDeviceNode,
        "no-device-node",
        "is /dev a devtmpfs, and is there room in it?",
    ),
    (Reason::OpenFailed, "open-failed", ""),
    (
        Reason::FirmwareMissing,
        "firmware-missing",
        "put the driver's nvidia/<version>/gsp_*.bin below /lib/firmware in the image",
    ),
    (
        Reason::FirmwareBoot,
        "firmware-boot",
        "the GPU's own processor did not start: reset the GPU on the host",
    ),
    (
        Reason::NeedsReset,
        "needs-reset",
        "an earlier use left the GPU half initialised: reset it on the host before the next guest",
    ),
    (
        Reason::FabricNotReady,
        "fabric-not-ready",
        "the NVLink fabric is not up: start the fabric manager, in the guest or in the service VM",
    ),
    (
        Reason::CcRefused,
        "cc-refused",
        "under confidential computing a GPU comes up once per reset, and all GPUs need one mode: reset them on the host, then restart the guest",
    ),
    (Reason::AttachFailed, "attach-failed", ""),
    (Reason::StateLoadFailed, "state-load-failed", ""),
    (
        Reason::MemoryNotMovable,
        "memory-not-movable",
        "the guest's kernel must add the GPU's coherent memory as movable: boot it with memhp_default_state=online_movable",
    ),
    (Reason::InitFailed, "init-failed", ""),
    (
        Reason::Internal,
        "internal",
        "a bug of this init: report it with the event stream",
    ),
];

impl Reason {
    fn entry(self) -> &'static Entry {
        // A test checks that every reason is in the table; the last entry stands for a missing one.
        TABLE
            .iter()
            .find(|(reason, ..)| *reason == self)
            .unwrap_or(&TABLE[TABLE.len() - 1])
    }

    /// All names, as returned by [`Reason::as_str`].
    pub fn names() -> impl Iterator<Item = &'static str> {
        TABLE.iter().map(|(_, name, _)| *name)
    }

    /// Name for programs: stable, lower case, with hyphens.
    pub fn as_str(self) -> &'static str {
        self.entry().1
    }

    /// Cure, if one is known.
    pub fn cure(self) -> Option<&'static str> {
        Some(self.entry().2).filter(|cure| !cure.is_empty())
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
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
pub fn classify(step: Step, lines: &[String]) -> (Reason, Option<&str>) {
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

    fn of(step: Step, lines: &[&str]) -> &'static str {
        let lines: Vec<String> = lines.iter().map(ToString::to_string).collect();
        classify(step, &lines).0.as_str()
    }

    #[test]
    fn every_reason_has_its_own_token_and_stands_in_the_table_once() {
        for (reason, token, _) in TABLE {
            assert_eq!(reason.as_str(), *token);
            assert_eq!(
                TABLE
                    .iter()
                    .filter(|(r, t, _)| r == reason || t == token)
                    .count(),
                1,
                "{token}"
            );
        }
        for step in [
            Step::Module,
            Step::Enable,
            Step::Probe,
            Step::Nodes,
            Step::Open,
            Step::Init,
            Step::Running,
        ] {
            assert!(TABLE.iter().any(|(r, ..)| *r == step.general()), "{step:?}");
        }
        assert!(
            WORDS
                .iter()
                .all(|(_, reason)| TABLE.iter().any(|(r, ..)| r == reason))
        );
    }

    #[test]
    fn driver_texts_decide_before_codes_and_codes_before_the_step() {
        assert_eq!(
            of(
                Step::Init,
                &["NVRM: GPU 0001:00:03.0: RmInitAdapter failed! (0x62:0x65:1860)"]
            ),
            "firmware-boot"
        );
        let wpr2 = "NVRM: GPU0 kgspBootstrap_GH100: unexpected WPR2 already up, cannot proceed with booting GSP";
        assert_eq!(
            of(
                Step::Init,
                &[
                    wpr2,
                    "NVRM: GPU 0001:00:03.0: RmInitAdapter failed! (0x62:0x40:1860)"
                ]
            ),
            "needs-reset"
        );
        assert_eq!(
            of(
                Step::Init,
                &["NVRM: GPU 0001:00:03.0: RmInitAdapter failed! (0x62:0x40:1860)"]
            ),
            "needs-reset"
        );
        assert_eq!(
            of(
                Step::Init,
                &["NVRM: GPU 0001:00:03.0: RmInitAdapter failed! (0x25:0x81:1860)"]
            ),
            "fabric-not-ready"
        );
        assert_eq!(
            of(
                Step::Init,
                &["NVRM: GPU 0001:00:03.0: RmInitAdapter failed! (0x22:0x56:774)"]
            ),
            "cc-refused"
        );
        assert_eq!(
            of(
                Step::Init,
                &["NVRM: GPU 0001:00:03.0: RmInitAdapter failed! (0x99:0x99:1)"]
            ),
            "init-failed"
        );
        assert_eq!(
            of(Step::Probe, &["NVRM: BAR0 is 0M @ 0x0 (PCI:0001:00:03.0)"]),
            "bar-unassigned"
        );
        assert_eq!(of(Step::Probe, &["NVRM: something new"]), "probe-failed");
        assert_eq!(
            of(
                Step::Enable,
                &[
                    "nvidia 0001:00:03.0: can't enable device: BAR 0 [mem size 0x1000000] not assigned"
                ]
            ),
            "bar-unassigned"
        );
        assert_eq!(
            of(
                Step::Enable,
                &["nvidia 0001:00:03.0: can't enable device: BAR 0 [mem 0x0-0xffffff] not claimed"]
            ),
            "enable-failed"
        );
        assert_eq!(
            of(
                Step::Init,
                &["NVRM: No interrupts of any type are available. Cannot use this GPU."]
            ),
            "no-interrupt"
        );
        let joined = "NVRM: The NVIDIA GPU 0001:00:01.0 (PCI ID: 10de:ffff) installed in this system is not supported by the NVIDIA 550.163.01 driver release.";
        assert_eq!(of(Step::Probe, &[joined]), "unsupported-gpu");
        assert_eq!(of(Step::Open, &[]), "open-failed");
    }

    #[test]
    fn the_reported_line_is_the_deciding_one() {
        let lines = [
            "NVRM: first".to_string(),
            "NVRM: the GPU has fallen off the bus".into(),
            "NVRM: last".into(),
        ];
        assert_eq!(
            classify(Step::Probe, &lines),
            (Reason::OffTheBus, Some(lines[1].as_str()))
        );
        assert_eq!(
            classify(Step::Probe, &lines[..1]),
            (Reason::ProbeFailed, Some(lines[0].as_str()))
        );
    }
}
