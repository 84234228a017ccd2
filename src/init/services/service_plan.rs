//! Choice of the services that start, with the reason for each. Pure.

use super::service_table::{Name, SERVICES, Service, Start};
use super::state::Fabric;
use crate::config::{RailPolicy, Services, Switch};
use crate::gpu::topology::Topology;
use std::collections::BTreeMap;
use std::path::PathBuf;

/// Facts that the choice depends on.
pub struct Facts<'a> {
    pub topology: Topology,
    pub confidential: bool,
    /// Functions that manage NVLink switches are there.
    pub managed: bool,
    pub asked: &'a Services,
    /// Programs that the image has.
    pub programs: &'a BTreeMap<Name, PathBuf>,
}

/// Decision about one service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Decision {
    /// Starts after these services.
    Starts { after: Vec<Name> },
    /// Stays off although the image has its program.
    Off,
    /// Wanted, but the image has no such program. `asked`: by a person or the topology.
    Missing { needed: bool },
}

/// A service's part of the plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    pub name: Name,
    pub decision: Decision,
    pub reason: String,
}

/// Decides about every service; a service that is neither wanted nor in the image is left out.
pub fn plan(facts: &Facts) -> Vec<Entry> {
    let wanted: Vec<(&Service, bool, bool, String)> = SERVICES
        .iter()
        .map(|service| {
            let (is_wanted, needed, reason) = wanted(service, facts);
            (service, is_wanted, needed, reason)
        })
        .collect();
    let starts: Vec<Name> = wanted
        .iter()
        .filter(|(service, is_wanted, ..)| *is_wanted && facts.programs.contains_key(&service.name))
        .map(|(service, ..)| service.name)
        .collect();
    let mut entries = Vec::new();
    for (service, is_wanted, needed, reason) in wanted {
        let name = service.name;
        let decision = match (is_wanted, facts.programs.contains_key(&name)) {
            (true, true) => Decision::Starts {
                after: service
                    .after
                    .iter()
                    .copied()
                    .filter(|before| starts.contains(before))
                    .collect(),
            },
            (false, true) => Decision::Off,
            (true, false) => Decision::Missing { needed },
            (false, false) => continue,
        };
        entries.push(Entry {
            name,
            decision,
            reason,
        });
    }
    entries
}

/// Whether a service is wanted; whether the guest lacks something without it; the reason.
fn wanted(service: &Service, facts: &Facts) -> (bool, bool, String) {
    let asked = facts.asked;
    let wish = match service.name {
        Name::Nvlsm => asked.nvlsm,
        Name::FabricManager => asked.fabric_manager,
        Name::Persistenced => asked.persistenced,
        Name::HostEngine => asked.host_engine,
        Name::DcgmExporter => asked.dcgm_exporter,
        Name::ImexDaemon => asked.imex_daemon,
    };
    let topology = facts.topology;
    match (wish, service.start_in(topology)) {
        (Switch::On, _) => (true, true, "on, by the kernel command line".into()),
        (Switch::Off, _) => (false, false, "off, by the kernel command line".into()),
        (Switch::Auto, Start::Always) => (true, true, format!("topology {topology} needs it")),
        (Switch::Auto, Start::IfManaged) if facts.managed => {
            (true, true, "a function manages NVLink switches".into())
        }
        (Switch::Auto, Start::IfConfidential) if facts.confidential => {
            (true, false, "confidential guest".into())
        }
        (Switch::Auto, Start::IfConfidential) if asked.uvm_persistence == Switch::On => (
            true,
            true,
            "UVM persistence mode is on, by the kernel command line".into(),
        ),
        (Switch::Auto, Start::IfConfidential) => {
            (false, false, "the init holds every GPU open".into())
        }
        (Switch::Auto, Start::IfManaged) => {
            (false, false, "no function manages NVLink switches".into())
        }
        (Switch::Auto, Start::WhenAsked) => (
            false,
            false,
            format!("in topology {topology} it starts only when it is on"),
        ),
    }
}

/// Decision about persistenced's `--uvm-persistence-mode`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Uvm {
    /// With the option, or without it, for this reason.
    Decided(bool, &'static str),
    /// The fabric may still complete: with the option, persistenced would wait 30 s for each GPU.
    WaitForFabric,
}

/// Decides about UVM persistence mode, which NVIDIA requires in confidential guests: there it is
/// worth any wait, as persistenced is never started again.
pub fn uvm_persistence(
    asked: Switch,
    topology: Topology,
    confidential: bool,
    fabric: Fabric,
) -> Uvm {
    match (asked, fabric) {
        (Switch::Off, _) => Uvm::Decided(false, "off, by the kernel command line"),
        (Switch::Auto | Switch::On, Fabric::Unasked | Fabric::Incomplete) => Uvm::WaitForFabric,
        (Switch::Auto | Switch::On, Fabric::Late) if confidential => Uvm::WaitForFabric,
        (Switch::Auto | Switch::On, Fabric::Complete) => {
            Uvm::Decided(true, "the fabric is complete")
        }
        (Switch::Auto | Switch::On, Fabric::Absent) => Uvm::Decided(true, "no fabric"),
        (Switch::Auto | Switch::On, Fabric::Unknown) if !topology.has_fabric() => {
            Uvm::Decided(true, "no fabric")
        }
        (Switch::Auto | Switch::On, Fabric::Unknown) => Uvm::Decided(
            false,
            "the fabric's state is unknown, and persistenced waits 30 s for each GPU of an \
                incomplete one",
        ),
        (Switch::Auto | Switch::On, Fabric::Late | Fabric::Failed) => Uvm::Decided(
            false,
            "the fabric is not usable, and persistenced waits 30 s for each GPU of such a one",
        ),
    }
}

/// Fabric manager's mode: 1 (shared) in a service VM, whose GPUs are in other guests, else 0.
pub fn fabric_mode(topology: Topology) -> &'static str {
    if topology == Topology::ServiceVm {
        "1"
    } else {
        "0"
    }
}

/// Fabric manager's rail policy; None: as the package has it. NVIDIA requires `symmetric` for
/// Blackwell fabrics under confidential computing.
pub fn rail_policy(
    asked: Option<RailPolicy>,
    topology: Topology,
    confidential: bool,
) -> Option<RailPolicy> {
    asked
        .or((confidential && topology == Topology::BlackwellFabric)
            .then_some(RailPolicy::Symmetric))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all_programs() -> BTreeMap<Name, PathBuf> {
        SERVICES
            .iter()
            .map(|service| (service.name, PathBuf::from("/x")))
            .collect()
    }

    fn planned(
        topology: Topology,
        confidential: bool,
        asked: &Services,
        programs: &BTreeMap<Name, PathBuf>,
    ) -> Vec<Entry> {
        plan(&Facts {
            topology,
            confidential,
            managed: false,
            asked,
            programs,
        })
    }

    fn started(entries: &[Entry]) -> Vec<(Name, Vec<Name>)> {
        let of = |entry: &Entry| match &entry.decision {
            Decision::Starts { after } => Some((entry.name, after.clone())),
            Decision::Off | Decision::Missing { .. } => None,
        };
        entries.iter().filter_map(of).collect()
    }

    #[test]
    fn each_topology_starts_its_services_in_their_order() {
        use Name::{FabricManager, Nvlsm, Persistenced};
        let of = |topology, confidential| {
            started(&planned(
                topology,
                confidential,
                &Services::default(),
                &all_programs(),
            ))
        };
        let alone = |name| vec![(name, vec![])];
        for topology in [Topology::None, Topology::Gpus, Topology::SharedFabric] {
            assert_eq!(of(topology, false), [], "{topology}");
        }
        assert_eq!(of(Topology::None, true), []);
        assert_eq!(of(Topology::Gpus, true), alone(Persistenced));
        assert_eq!(of(Topology::SharedFabric, true), alone(Persistenced));
        assert_eq!(of(Topology::HopperFabric, false), alone(FabricManager));
        let both = vec![(FabricManager, vec![]), (Persistenced, vec![FabricManager])];
        assert_eq!(of(Topology::HopperFabric, true), both);
        assert_eq!(of(Topology::ProtectedPcie, true), both);
        let all = vec![
            (Nvlsm, vec![]),
            (FabricManager, vec![Nvlsm]),
            (Persistenced, vec![FabricManager]),
        ];
        assert_eq!(of(Topology::BlackwellFabric, true), all);
        assert_eq!(of(Topology::BlackwellFabric, false), all[..2]);
        assert_eq!(of(Topology::ServiceVm, true), alone(FabricManager));
        let (asked, programs) = (Services::default(), all_programs());
        let managed = plan(&Facts {
            topology: Topology::ServiceVm,
            confidential: false,
            managed: true,
            asked: &asked,
            programs: &programs,
        });
        assert_eq!(started(&managed), all[..2]);
    }

    #[test]
    fn the_command_line_counts_before_the_topology() {
        let on = Services {
            host_engine: Switch::On,
            dcgm_exporter: Switch::On,
            ..Services::default()
        };
        for topology in Topology::ALL {
            let entries = planned(topology, false, &on, &all_programs());
            let started = started(&entries);
            assert!(started.contains(&(Name::HostEngine, vec![])), "{topology}");
            assert!(
                started.contains(&(Name::DcgmExporter, vec![Name::HostEngine])),
                "{topology}"
            );
        }
        let off = Services {
            fabric_manager: Switch::Off,
            ..Services::default()
        };
        let entries = planned(Topology::HopperFabric, true, &off, &all_programs());
        assert_eq!(started(&entries), [(Name::Persistenced, vec![])]);
        let entry = entries
            .iter()
            .find(|entry| entry.name == Name::FabricManager)
            .unwrap();
        assert_eq!(
            (&entry.decision, entry.reason.as_str()),
            (&Decision::Off, "off, by the kernel command line")
        );
        let uvm = Services {
            uvm_persistence: Switch::On,
            ..Services::default()
        };
        assert_eq!(
            started(&planned(Topology::Gpus, false, &uvm, &all_programs())),
            [(Name::Persistenced, vec![])]
        );
    }

    #[test]
    fn a_service_without_program_is_missing_only_where_it_is_wanted() {
        let none = BTreeMap::new();
        assert_eq!(
            planned(Topology::Gpus, false, &Services::default(), &none),
            []
        );
        let entries = planned(Topology::HopperFabric, true, &Services::default(), &none);
        let decisions: Vec<_> = entries
            .iter()
            .map(|entry| (entry.name, entry.decision.clone()))
            .collect();
        let missing = |needed| Decision::Missing { needed };
        assert_eq!(
            decisions,
            [
                (Name::FabricManager, missing(true)),
                (Name::Persistenced, missing(false))
            ]
        );
    }

    #[test]
    fn uvm_persistence_never_meets_a_fabric_that_is_not_complete() {
        for topology in Topology::ALL {
            for asked in [Switch::Auto, Switch::On, Switch::Off] {
                let on = |fabric| {
                    matches!(
                        uvm_persistence(asked, topology, false, fabric),
                        Uvm::Decided(true, _)
                    )
                };
                for fabric in [
                    Fabric::Unasked,
                    Fabric::Incomplete,
                    Fabric::Late,
                    Fabric::Failed,
                ] {
                    assert!(!on(fabric), "{asked:?} {topology} {fabric:?}");
                }
                for fabric in [Fabric::Absent, Fabric::Complete] {
                    assert_eq!(
                        on(fabric),
                        asked != Switch::Off,
                        "{asked:?} {topology} {fabric:?}"
                    );
                }
                assert_eq!(
                    on(Fabric::Unknown),
                    asked != Switch::Off && !topology.has_fabric(),
                    "{asked:?} {topology}"
                );
            }
        }
        for fabric in [Fabric::Unasked, Fabric::Incomplete] {
            assert_eq!(
                uvm_persistence(Switch::Auto, Topology::Gpus, false, fabric),
                Uvm::WaitForFabric
            );
        }
        // If NVIDIA requires the mode, wait for a late fabric.
        let late = |confidential| {
            uvm_persistence(
                Switch::Auto,
                Topology::ProtectedPcie,
                confidential,
                Fabric::Late,
            )
        };
        assert_eq!(late(true), Uvm::WaitForFabric);
        assert!(matches!(late(false), Uvm::Decided(false, _)));
    }

    #[test]
    fn a_confidential_blackwell_fabric_defaults_to_symmetric_rails() {
        let of = |asked, topology, confidential| rail_policy(asked, topology, confidential);
        assert_eq!(
            of(None, Topology::BlackwellFabric, true),
            Some(RailPolicy::Symmetric)
        );
        assert_eq!(
            of(Some(RailPolicy::Greedy), Topology::BlackwellFabric, true),
            Some(RailPolicy::Greedy)
        );
        assert_eq!(of(None, Topology::HopperFabric, true), None);
        assert_eq!(of(None, Topology::BlackwellFabric, false), None);
    }
}
