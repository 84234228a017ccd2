//! A failure means that a GPU is withheld, degraded or given to containers against the table of
//! fabrics, ready states and parameters: CUDA would fail in a container, or a good GPU would be
//! missing.

use super::*;
use crate::boot::bring_up::previous::Previous;
use crate::boot::bring_up::shared;
use crate::gpu::topology::{Functions, Topology};
use crate::stream::layer::tests::records;
use kata_gpu_wire::fabric::Fabric;
use std::path::Path;

fn decision(topology: Topology) -> Decision {
    let (functions, reason) = (Functions::default(), String::new());
    Decision {
        topology,
        source: Source::Scan,
        reason,
        functions,
        nvlink_disable: false,
        nvlink_reason: String::new(),
    }
}

fn needs_of(
    ready: Ready,
    ready_state: ReadyState,
    topology: Topology,
    confidential: bool,
) -> String {
    let config = Config {
        ready,
        ready_state,
        ..Config::default()
    };
    Needs::of(&config, &decision(topology), confidential)
        .0
        .names()
}

#[test]
fn only_a_requested_fabric_or_ready_state_is_waited_for() {
    use ReadyState::{Boot, Leave, Wait};
    for topology in Topology::ALL {
        let wanted = if topology.has_fabric() {
            "fabric"
        } else {
            "bind"
        };
        assert_eq!(
            needs_of(Ready::Auto, Leave, topology, false),
            wanted,
            "{topology}"
        );
        assert_eq!(
            needs_of(Ready::Auto, Leave, topology, true),
            wanted,
            "{topology}"
        );
        assert_eq!(
            needs_of(Ready::Bound, Leave, topology, true),
            "bind",
            "{topology}"
        );
        assert_eq!(
            needs_of(Ready::Usable, Leave, topology, true),
            "initialisation",
            "{topology}"
        );
        let without = Decision {
            nvlink_disable: true,
            ..decision(topology)
        };
        assert_eq!(
            Needs::of(&Config::default(), &without, false).0.names(),
            "bind",
            "{topology}"
        );
    }
    for state in [Wait, Boot] {
        assert_eq!(
            needs_of(Ready::Auto, state, Topology::Gpus, true),
            "ready state"
        );
        assert_eq!(
            needs_of(Ready::Auto, state, Topology::ProtectedPcie, true),
            "fabric, ready state"
        );
        assert_eq!(
            needs_of(Ready::Bound, state, Topology::ProtectedPcie, true),
            "ready state"
        );
        // Kata's configuration sets the incumbent's parameter in guests of all kinds.
        assert_eq!(needs_of(Ready::Auto, state, Topology::Gpus, false), "bind");
    }
}

fn rules(required: Switch) -> Rules {
    let needs = Needs {
        fabric: true,
        ..Needs::default()
    };
    Rules {
        needs,
        required,
        ready_state: ReadyState::Leave,
        inferred: false,
        overdue: false,
    }
}

fn facts(state: FabricState, status: u32) -> Facts {
    let fabric = Some(Fabric {
        state,
        status,
        ..Fabric::default()
    });
    Facts {
        devices: vec![Device {
            fabric,
            ..Device::default()
        }],
        ..Facts::default()
    }
}

fn verdict(rules: Rules, facts: &Facts) -> Verdict {
    rules.judge(Some(facts), facts.devices.first())
}

#[test]
fn a_gpu_without_a_complete_fabric_is_held_back() {
    let incomplete = facts(FabricState::InProgress, 0);
    let held = Verdict::Held(Wait::Fabric(FabricState::InProgress));
    for required in [Switch::Auto, Switch::On, Switch::Off] {
        let rules = rules(required);
        assert_eq!(verdict(rules, &incomplete), held, "{required:?}");
        assert_eq!(
            verdict(rules, &facts(FabricState::Completed, 0)),
            Verdict::Given
        );
        assert!(matches!(
            verdict(rules, &facts(FabricState::NotSupported, 0)),
            Verdict::Degraded(..)
        ));
        assert_eq!(
            verdict(rules, &facts(FabricState::Unknown, 0)),
            Verdict::Held(Wait::Fabric(FabricState::Unknown))
        );
        let late = Rules {
            overdue: true,
            ..rules
        };
        assert_eq!(
            matches!(verdict(late, &incomplete), Verdict::Degraded(..)),
            required == Switch::Off,
            "{required:?}"
        );
        // NVML alone may be wrong: its report keeps no GPU for ever.
        let inferred = Rules {
            inferred: true,
            ..late
        };
        assert_eq!(
            verdict(inferred, &incomplete) == held,
            required == Switch::On,
            "{required:?}"
        );
    }
    assert_eq!(
        verdict(
            Rules {
                needs: Needs::default(),
                ..rules(Switch::On)
            },
            &incomplete
        ),
        Verdict::Given
    );
}

#[test]
fn a_fabric_error_costs_the_gpu_only_where_it_is_required() {
    let broken = facts(FabricState::Completed, 999);
    for required in [Switch::Auto, Switch::Off] {
        let Verdict::Degraded(_, reason) = verdict(rules(required), &broken) else {
            panic!("{required:?}")
        };
        let text = "NVLink is not usable between GPUs: the fabric is complete with NVML's error \
            999; collectives go over PCIe";
        assert_eq!(reason, text);
    }
    let late = Rules {
        overdue: true,
        ..rules(Switch::On)
    };
    assert!(matches!(verdict(late, &broken), Verdict::Held(_)));
}

#[test]
fn a_missing_answer_degrades_a_fabric_and_holds_a_ready_state() {
    let late = Rules {
        overdue: true,
        ..rules(Switch::Auto)
    };
    assert!(matches!(
        rules(Switch::Auto).judge(None, None),
        Verdict::Held(_)
    ));
    assert!(matches!(late.judge(None, None), Verdict::Degraded(..)));
    assert!(matches!(
        Rules {
            required: Switch::On,
            ..late
        }
        .judge(None, None),
        Verdict::Held(_)
    ));
    let needs = Needs {
        ready_state: true,
        ..Needs::default()
    };
    let (wait, boot) = (ReadyState::Wait, ReadyState::Boot);
    assert!(matches!(
        Rules {
            needs,
            ready_state: wait,
            ..late
        }
        .judge(None, None),
        Verdict::Held(_)
    ));
    let error = Facts {
        confidential_error: Some("no".into()),
        ..Facts::default()
    };
    assert!(matches!(
        Rules {
            needs,
            ready_state: wait,
            ..late
        }
        .judge(Some(&error), None),
        Verdict::Held(_)
    ));
    // Kata's configurations set the incumbent's parameter, and the helper may be missing.
    assert!(matches!(
        Rules {
            needs,
            ready_state: boot,
            ..late
        }
        .judge(None, None),
        Verdict::Degraded(..)
    ));
    assert!(matches!(
        Rules {
            needs,
            ready_state: boot,
            overdue: false,
            ..late
        }
        .judge(None, None),
        Verdict::Held(_)
    ));
}

#[test]
fn a_ready_state_that_is_off_holds_gpus_back_where_it_is_needed() {
    let facts = |enabled, ready| Facts {
        confidential: Some(Confidential {
            enabled,
            ready,
            ..Confidential::default()
        }),
        ..Facts::default()
    };
    let needs = Needs {
        ready_state: true,
        ..Needs::default()
    };
    let rules = Rules {
        needs,
        overdue: true,
        ..rules(Switch::Off)
    };
    assert_eq!(
        verdict(rules, &facts(true, false)),
        Verdict::Held(Wait::ReadyState)
    );
    assert_eq!(verdict(rules, &facts(true, true)), Verdict::Given);
    // Nothing to wait for: the GPUs are not confidential.
    assert_eq!(verdict(rules, &facts(false, false)), Verdict::Given);
    assert_eq!(
        verdict(
            Rules {
                needs: Needs::default(),
                ..rules
            },
            &facts(true, false)
        ),
        Verdict::Given
    );
}

#[test]
fn services_learn_of_the_worst_fabric() {
    let of = |states: &[(FabricState, u32)]| {
        let devices = states
            .iter()
            .flat_map(|(state, status)| facts(*state, *status).devices)
            .collect();
        fabric(
            Some(&Facts {
                devices,
                ..Facts::default()
            }),
            false,
        )
    };
    use FabricState::{Completed, InProgress, NotSupported};
    assert_eq!(of(&[]), services::Fabric::Absent);
    assert_eq!(of(&[(NotSupported, 0)]), services::Fabric::Absent);
    assert_eq!(
        of(&[(Completed, 0), (Completed, 0)]),
        services::Fabric::Complete
    );
    assert_eq!(
        of(&[(Completed, 0), (InProgress, 0)]),
        services::Fabric::Incomplete
    );
    assert_eq!(
        of(&[(Completed, 0), (Completed, 5)]),
        services::Fabric::Failed
    );
    assert_eq!(
        fabric(Some(&facts(InProgress, 0)), true),
        services::Fabric::Late
    );
    assert_eq!(
        of(&[(FabricState::Unknown, 0)]),
        services::Fabric::Incomplete
    );
    // A first failure decides nothing: persistenced is not started again.
    assert_eq!(fabric(None, false), services::Fabric::Unasked);
    assert_eq!(fabric(None, true), services::Fabric::Unknown);
    let mut slow = facts(Completed, 0);
    slow.devices[0].fabric.as_mut().unwrap().health = Some(1);
    assert_eq!(fabric(Some(&slow), false), services::Fabric::Complete);
}

#[tokio::test]
async fn gpus_that_come_after_nvml_has_found_a_fabric_are_held_back() {
    let (shared, _orders, mut updates) =
        shared::tests::shared(Config::default(), Path::new("/nonexistent"));
    shared.topology.send_replace(decision(Topology::Gpus));
    let earlier = Earlier {
        given: Vec::new(),
        degraded: false,
    };
    let answer = facts(FabricState::InProgress, 0);
    Watch::new(shared, earlier).take(Ok(Box::new(answer)));
    let held = std::iter::from_fn(|| updates.try_recv().ok())
        .any(|update| matches!(update, Update::HeldByDefault(true)));
    assert!(held, "they are given to containers");
}

#[test]
fn a_report_on_a_gpu_that_came_again_is_about_that_arrival() {
    let gpu = GpuId {
        address: "0001:00:03.0".parse().unwrap(),
        generation: 1,
    };
    let runtime = tokio::runtime::Builder::new_current_thread().build();
    let work = async {
        let (shared, _orders, _updates) =
            shared::tests::shared(Config::default(), Path::new("/nonexistent"));
        let earlier = Earlier {
            given: Vec::new(),
            degraded: false,
        };
        let mut watch = Watch::new(shared, earlier);
        tracing::info!(name: names::GPU_FOUND, gpu = %gpu.address, generation = gpu.again());
        watch.give(
            gpu,
            Verdict::degraded(Wait::FabricAnswer, "nothing is known"),
        );
        watch.hold(gpu, Wait::ReadyState);
        watch.report_overdue(Duration::ZERO);
    };
    let all = records(|| runtime.unwrap().block_on(work));
    for name in [names::GPU_DEGRADED, names::GPU_WITHHELD] {
        let report = all.iter().find(|record| record.name == name).unwrap();
        assert_eq!(report.fields["generation"], 1, "{name}");
    }
    assert!(Previous::from_records(&all).degraded);
}
