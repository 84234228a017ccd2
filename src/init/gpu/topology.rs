//! Topology of a GPU guest: its kinds of functions, and thus the services it needs. Decided once,
//! from the PCI scan, the command line and NVML's later reports. Pure.
//!
//! No number of functions is refused: whether six switches for eight GPUs, or two for four, are a
//! fabric is for the fabric manager to judge.

use kata_gpu_wire::named;
use kata_gpu_wire::pci_address::PciAddress;

named! {
    /// Kind of a guest, by its NVIDIA functions. The order of checks is that of the variants.
    #[derive(Hash)]
    pub enum Topology {
        /// Neither GPUs nor switches.
        None = "none",
        /// GPUs without a fabric of their own guest.
        Gpus = "gpus",
        /// GPUs and NVSwitches: fabric manager drives the switches.
        HopperFabric = "hopper-fabric",
        /// Hopper fabric in a confidential guest: GPUs and switches trust each other (PPCIE).
        ProtectedPcie = "protected-pcie",
        /// GPUs and CX7 management functions: fabric manager and nvlsm drive the switches behind
        /// them.
        BlackwellFabric = "blackwell-fabric",
        /// Switches or management functions without GPUs: a service VM of a shared fabric.
        ServiceVm = "service-vm",
        /// GPUs whose switches are in another VM or on the host: NVML reports a fabric that is not
        /// complete.
        SharedFabric = "shared-fabric",
    }
}

impl Topology {
    /// Whether this guest's GPUs are connected by NVSwitches: CUDA fails on them until the fabric
    /// is complete.
    pub fn has_fabric(self) -> bool {
        match self {
            Self::HopperFabric
            | Self::ProtectedPcie
            | Self::BlackwellFabric
            | Self::SharedFabric => true,
            Self::None | Self::Gpus | Self::ServiceVm => false,
        }
    }
}

named! {
    /// Whether the driver may use NVLink.
    pub enum NvLink {
        /// Disabled for a single GPU.
        Auto = "auto",
        /// The driver's own options count.
        On = "on",
        Off = "off",
    }
}

/// Value of the field `nvlink` in the report of a decision that loads the driver with NVLink
/// disabled.
pub const NVLINK_DISABLED: &str = "disabled";

named! {
    /// Source of a topology.
    pub enum Source {
        Scan = "scan",
        Parameter = "parameter",
        Nvml = "nvml",
    }
}

/// Functions of the guest.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Functions {
    pub gpus: usize,
    /// NVSwitches.
    pub switches: usize,
    /// Network functions through which NVSwitches are managed.
    pub management: Vec<PciAddress>,
}

/// Facts that a decision takes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Facts {
    pub functions: Functions,
    /// GPUs that must exist, if a number is configured.
    pub expected_gpus: Option<usize>,
    /// The guest is confidential.
    pub confidential: bool,
    /// Configured topology.
    pub asked: Option<Topology>,
    pub nvlink: NvLink,
    /// NVreg_NvLinkDisable among the driver's options, from modprobe.d or the command line.
    pub option: Option<String>,
    /// The driver is loaded: its options cannot change.
    pub loaded: bool,
}

/// A topology, and its consequences for the driver's load.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Decision {
    pub topology: Topology,
    pub source: Source,
    pub reason: String,
    pub functions: Functions,
    /// The driver is loaded with NVreg_NvLinkDisable=1.
    pub nvlink_disable: bool,
    pub nvlink_reason: String,
}

/// Whether the VPD of Mellanox functions must be read: if the GPUs are of a generation whose
/// switches are behind such functions, or if there is no GPU. Switches decide without VPD.
pub fn needs_vpd(
    gpus: usize,
    switches: usize,
    behind_network: bool,
    asked: Option<Topology>,
) -> bool {
    match asked {
        // Services need the function, whatever the GPUs are.
        Some(Topology::BlackwellFabric) => true,
        Some(Topology::ServiceVm) => switches == 0,
        Some(
            Topology::None
            | Topology::Gpus
            | Topology::HopperFabric
            | Topology::ProtectedPcie
            | Topology::SharedFabric,
        ) => false,
        None => switches == 0 && (gpus == 0 || behind_network),
    }
}

/// Decides the topology, and whether NVLink is disabled.
pub fn decide(facts: Facts) -> Decision {
    let (topology, source, reason) = match facts.asked {
        Some(asked) => (
            asked,
            Source::Parameter,
            format!(
                "asked for by gpuinit.topology; {} found",
                count(&facts.functions)
            ),
        ),
        None => {
            let (topology, reason) = of_functions(&facts.functions, facts.confidential);
            (
                topology,
                Source::Scan,
                format!("{} found: {reason}", count(&facts.functions)),
            )
        }
    };
    let (nvlink_disable, nvlink_reason) = nvlink(topology, &facts);
    Decision {
        topology,
        source,
        reason,
        functions: facts.functions,
        nvlink_disable,
        nvlink_reason,
    }
}

fn of_functions(functions: &Functions, confidential: bool) -> (Topology, &'static str) {
    match (
        functions.gpus,
        functions.switches,
        functions.management.len(),
    ) {
        (0, 0, 0) => (Topology::None, "there is nothing to drive"),
        (0, 1.., _) => (
            Topology::ServiceVm,
            "switches without GPUs serve the GPUs of other VMs",
        ),
        (0, 0, 1..) => (
            Topology::ServiceVm,
            "management functions without GPUs serve the GPUs of other VMs",
        ),
        (_, 1.., _) if confidential => (
            Topology::ProtectedPcie,
            "the switches are PCI functions of this guest, which is confidential",
        ),
        (_, 1.., 0) => (
            Topology::HopperFabric,
            "the switches are PCI functions of this guest",
        ),
        (_, 1.., 1..) => (
            Topology::HopperFabric,
            "the switches are PCI functions of this guest; management functions are left alone",
        ),
        (_, 0, 1..) => (
            Topology::BlackwellFabric,
            "the switches are behind the management functions",
        ),
        (_, 0, 0) => (Topology::Gpus, "no switch is in this guest"),
    }
}

fn count(functions: &Functions) -> String {
    let kinds = [
        (functions.gpus, "GPU", "GPUs"),
        (functions.switches, "NVSwitch", "NVSwitches"),
        (
            functions.management.len(),
            "management function",
            "management functions",
        ),
    ];
    let counted = kinds
        .iter()
        .filter(|(number, one, _)| *number > 0 || *one == "GPU");
    let texts: Vec<String> = counted
        .map(|(number, one, many)| format!("{number} {}", if *number == 1 { one } else { many }))
        .collect();
    texts.join(", ")
}

/// Whether NVLink is disabled, with the reason. Without a fabric, CUDA fails on a single SXM GPU
/// whose NVLink is on (error 802).
fn nvlink(topology: Topology, facts: &Facts) -> (bool, String) {
    let gpus = facts.functions.gpus;
    match (facts.nvlink, &facts.option, topology) {
        _ if facts.loaded => (
            false,
            "the driver is loaded already: its options stay".into(),
        ),
        (NvLink::Off, ..) => (true, "asked for by gpuinit.nvlink=off".into()),
        (NvLink::On, Some(value), _) => (
            false,
            format!(
                "gpuinit.nvlink=on adds no option; the driver's options have \
                    NVreg_NvLinkDisable={value}"
            ),
        ),
        (NvLink::On, None, _) => (false, "gpuinit.nvlink=on adds no option".into()),
        (NvLink::Auto, Some(value), _) => (
            false,
            format!("the driver's options have NVreg_NvLinkDisable={value}"),
        ),
        // A load cannot be undone: missing GPUs could never use NVLink.
        (NvLink::Auto, None, Topology::Gpus)
            if gpus == 1 && facts.expected_gpus.is_some_and(|expected| expected > 1) =>
        {
            (
                false,
                "one GPU found, but gpuinit.gpus announces more; gpuinit.nvlink=off if none does"
                    .into(),
            )
        }
        (NvLink::Auto, None, Topology::Gpus) if gpus == 1 => (
            true,
            "one GPU alone has no fabric, and CUDA would fail on it while NVLink is on".into(),
        ),
        (NvLink::Auto, None, Topology::Gpus) => {
            (false, format!("{gpus} GPUs may have NVLink between them"))
        }
        (NvLink::Auto, None, topology) => (
            false,
            format!("topology {topology} is not that of one GPU alone"),
        ),
    }
}

impl Decision {
    /// Whether CUDA needs the fabric: false if the driver uses no NVLink.
    pub fn has_fabric(&self) -> bool {
        self.topology.has_fabric() && !self.nvlink_disable
    }

    /// The decision with a fabric that is elsewhere, once NVML reports an incomplete one (`state`,
    /// in NVML's term). None: the topology is not that of GPUs without switches, or is configured,
    /// or the driver uses no NVLink.
    pub fn with_fabric_elsewhere(&self, state: &str) -> Option<Self> {
        (self.topology == Topology::Gpus && self.source == Source::Scan && !self.nvlink_disable)
            .then(|| Self {
                topology: Topology::SharedFabric,
                source: Source::Nvml,
                reason: format!(
                    "{}; NVML reports fabric state {state}: the switches are elsewhere",
                    self.reason
                ),
                ..self.clone()
            })
    }

    /// Whether a new GPU makes this decision wrong, in a sentence for people. The decision stays:
    /// the driver is loaded with it.
    pub fn outgrown_by(&self, gpus: usize) -> Option<String> {
        (self.nvlink_disable && self.functions.gpus < 2 && gpus > 1).then(|| {
            format!(
                "{gpus} GPUs are here, and the driver was loaded with NVreg_NvLinkDisable=1 for \
                    one: \
                 there is no NVLink between them; start the guest with gpuinit.nvlink=on or \
                 gpuinit.gpus={gpus}"
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts(gpus: usize, switches: usize, management: usize) -> Facts {
        let management = (0..management)
            .map(|k| format!("0000:40:00.{k}").parse().unwrap())
            .collect();
        let functions = Functions {
            gpus,
            switches,
            management,
        };
        Facts {
            functions,
            expected_gpus: None,
            confidential: false,
            asked: None,
            nvlink: NvLink::Auto,
            option: None,
            loaded: false,
        }
    }

    #[test]
    fn functions_decide_and_no_number_of_them_is_refused() {
        for (gpus, switches, management, topology, reason) in [
            (
                0,
                0,
                0,
                Topology::None,
                "0 GPUs found: there is nothing to drive",
            ),
            (
                1,
                0,
                0,
                Topology::Gpus,
                "1 GPU found: no switch is in this guest",
            ),
            (
                8,
                0,
                0,
                Topology::Gpus,
                "8 GPUs found: no switch is in this guest",
            ),
            (
                8,
                4,
                0,
                Topology::HopperFabric,
                "8 GPUs, 4 NVSwitches found: the switches are PCI functions of this guest",
            ),
            (
                8,
                6,
                0,
                Topology::HopperFabric,
                "8 GPUs, 6 NVSwitches found: the switches are PCI functions of this guest",
            ),
            (
                8,
                2,
                0,
                Topology::HopperFabric,
                "8 GPUs, 2 NVSwitches found: the switches are PCI functions of this guest",
            ),
            (
                4,
                4,
                0,
                Topology::HopperFabric,
                "4 GPUs, 4 NVSwitches found: the switches are PCI functions of this guest",
            ),
            (
                1,
                1,
                0,
                Topology::HopperFabric,
                "1 GPU, 1 NVSwitch found: the switches are PCI functions of this guest",
            ),
            (
                8,
                4,
                1,
                Topology::HopperFabric,
                "8 GPUs, 4 NVSwitches, 1 management function found: the switches are PCI \
                    functions of this guest; management functions are left alone",
            ),
            (
                0,
                4,
                0,
                Topology::ServiceVm,
                "0 GPUs, 4 NVSwitches found: switches without GPUs serve the GPUs of other VMs",
            ),
            (
                8,
                0,
                4,
                Topology::BlackwellFabric,
                "8 GPUs, 4 management functions found: the switches are behind the management \
                    functions",
            ),
            (
                0,
                0,
                4,
                Topology::ServiceVm,
                "0 GPUs, 4 management functions found: management functions without GPUs serve \
                    the GPUs of other VMs",
            ),
            (
                0,
                4,
                4,
                Topology::ServiceVm,
                "0 GPUs, 4 NVSwitches, 4 management functions found: switches without GPUs serve \
                    the GPUs of other VMs",
            ),
        ] {
            let decision = decide(facts(gpus, switches, management));
            assert_eq!(
                (decision.topology, decision.source),
                (topology, Source::Scan),
                "{gpus}, {switches}, {management}"
            );
            assert_eq!(decision.reason, reason);
        }
    }

    #[test]
    fn switches_in_a_confidential_guest_are_protected_pcie() {
        let of = |gpus, switches, management| {
            decide(Facts {
                confidential: true,
                ..facts(gpus, switches, management)
            })
            .topology
        };
        assert_eq!(of(8, 4, 0), Topology::ProtectedPcie);
        assert_eq!(of(8, 4, 1), Topology::ProtectedPcie);
        assert_eq!(of(8, 0, 0), Topology::Gpus);
        assert_eq!(of(8, 0, 4), Topology::BlackwellFabric);
        assert_eq!(of(0, 4, 0), Topology::ServiceVm);
    }

    #[test]
    fn a_configured_topology_is_taken_whatever_is_there() {
        for asked in Topology::ALL {
            assert_eq!(Topology::named(&asked.to_string()), Some(asked));
            let decision = decide(Facts {
                asked: Some(asked),
                ..facts(2, 4, 0)
            });
            assert_eq!(
                (decision.topology, decision.source),
                (asked, Source::Parameter)
            );
            assert_eq!(
                decision.reason,
                "asked for by gpuinit.topology; 2 GPUs, 4 NVSwitches found"
            );
            assert!(!decision.nvlink_disable, "{asked}");
        }
        assert_eq!(Topology::named("auto"), None);
        // A lone GPU whose switches are elsewhere is part of their fabric.
        assert!(
            !decide(Facts {
                asked: Some(Topology::SharedFabric),
                ..facts(1, 0, 0)
            })
            .nvlink_disable
        );
        assert!(
            decide(Facts {
                asked: Some(Topology::Gpus),
                ..facts(1, 0, 0)
            })
            .nvlink_disable
        );
    }

    #[test]
    fn nvlink_is_disabled_for_a_single_gpu_by_default() {
        let one = || facts(1, 0, 0);
        let disables = |facts: Facts| decide(facts).nvlink_disable;
        assert!(disables(one()));
        for other in [
            facts(0, 0, 0),
            facts(2, 0, 0),
            facts(1, 1, 0),
            facts(1, 0, 1),
            facts(0, 1, 0),
        ] {
            assert!(!disables(other.clone()), "{other:?}");
            assert!(disables(Facts {
                nvlink: NvLink::Off,
                ..other
            }));
        }
        assert!(!disables(Facts {
            nvlink: NvLink::On,
            ..one()
        }));
        // The option counts with any value; off has priority over it.
        for value in ["0", "1"] {
            let set = Facts {
                option: Some(value.into()),
                ..one()
            };
            assert_eq!(
                decide(set.clone()).nvlink_reason,
                format!("the driver's options have NVreg_NvLinkDisable={value}")
            );
            assert!(
                !disables(set.clone())
                    && disables(Facts {
                        nvlink: NvLink::Off,
                        ..set
                    })
            );
        }
        // More GPUs are to come; an expected one must come.
        let awaited = decide(Facts {
            expected_gpus: Some(2),
            ..one()
        });
        assert!(
            !awaited.nvlink_disable
                && awaited
                    .nvlink_reason
                    .contains("gpuinit.gpus announces more")
        );
        assert!(disables(Facts {
            expected_gpus: Some(1),
            ..one()
        }));
        // Options of a loaded driver cannot change.
        assert!(!disables(Facts {
            loaded: true,
            nvlink: NvLink::Off,
            ..one()
        }));
    }

    #[test]
    fn vpd_is_read_only_where_the_topology_depends_on_it() {
        for (gpus, switches, behind_network, asked, needed) in [
            (8, 0, false, None, false), // Hopper GPUs beside ordinary network functions
            (8, 4, false, None, false),
            (8, 4, true, None, false),
            (8, 0, true, None, true),
            (0, 0, false, None, true),
            (0, 4, false, None, false),
            (8, 0, true, Some(Topology::Gpus), false),
            (8, 0, true, Some(Topology::SharedFabric), false),
            (8, 0, false, Some(Topology::BlackwellFabric), true),
            (0, 0, false, Some(Topology::ServiceVm), true),
            (0, 4, false, Some(Topology::ServiceVm), false),
        ] {
            assert_eq!(
                needs_vpd(gpus, switches, behind_network, asked),
                needed,
                "{gpus} {switches} {behind_network} {asked:?}"
            );
        }
    }

    #[test]
    fn a_fabric_elsewhere_is_that_of_gpus_without_switches() {
        let shared = decide(facts(2, 0, 0))
            .with_fabric_elsewhere("in progress")
            .unwrap();
        assert_eq!(
            (shared.topology, shared.source),
            (Topology::SharedFabric, Source::Nvml)
        );
        assert!(
            shared
                .reason
                .ends_with("NVML reports fabric state in progress: the switches are elsewhere"),
            "{}",
            shared.reason
        );
        assert_eq!(shared.with_fabric_elsewhere("in progress"), None);
        assert_eq!(
            decide(facts(8, 4, 0)).with_fabric_elsewhere("in progress"),
            None
        );
        let asked = Facts {
            asked: Some(Topology::Gpus),
            ..facts(2, 0, 0)
        };
        assert_eq!(decide(asked).with_fabric_elsewhere("in progress"), None);
    }

    #[test]
    fn a_second_gpu_outgrows_a_load_for_one() {
        let alone = decide(facts(1, 0, 0));
        assert_eq!(alone.outgrown_by(1), None);
        assert!(
            alone
                .outgrown_by(2)
                .is_some_and(|error| error.contains("gpuinit.gpus=2"))
        );
        assert_eq!(
            decide(Facts {
                nvlink: NvLink::On,
                ..facts(1, 0, 0)
            })
            .outgrown_by(2),
            None
        );
        // Requested for two GPUs, or decided with two: nothing has changed.
        assert_eq!(
            decide(Facts {
                nvlink: NvLink::Off,
                ..facts(2, 0, 0)
            })
            .outgrown_by(3),
            None
        );
    }
}
