//! A failure means that the schedule gives an order too early, too late or never: an enabling
//! beside a step that this stalls, a wait without its limit, a wave that is too large, a GPU
//! without its load, or modules that stay loadable.

use super::*;
use crate::boot::bring_up::strategy::Facts;

fn gpu(k: u8) -> GpuId {
    GpuId {
        address: format!("0001:00:{k:02x}.0").parse().unwrap(),
        generation: u32::from(k),
    }
}

fn ms(ms: u64) -> Time {
    Time::from_millis(ms)
}

/// A bring-up of `n` GPUs of the boot scan, and its first orders.
fn boot(n: u8, policy: Policy) -> (Schedule, Vec<Order>) {
    let mut schedule = Schedule::new(policy, ms(0));
    (0..n).for_each(|k| assert_eq!(schedule.take(ms(0), Fact::Found(gpu(k), Arrival::Boot)), []));
    let orders = schedule.take(ms(0), Fact::Scanned);
    (schedule, orders)
}

fn policy() -> Policy {
    let facts = Facts {
        gpus: 3,
        firewall: false,
        driver: None,
        init_on_probe: false,
        confidential: false,
        vcpus: 2,
    };
    Policy::unconfigured(facts)
}

/// A slow host up to its first initialisation.
fn slow(n: u8) -> Schedule {
    slow_with(n, policy())
}

fn slow_with(n: u8, policy: Policy) -> Schedule {
    let (mut schedule, orders) = boot(n, policy);
    assert_eq!(
        orders,
        [Order::Enable(gpu(0), vec![])],
        "the first one is enabled by itself: nothing is known of the host yet"
    );
    let orders = schedule.take(ms(3000), Fact::Enabled(gpu(0), ms(3000)));
    let lane = if n > 1 {
        Order::Wait(gpu(1))
    } else {
        Order::LaneOver
    };
    assert!(
        matches!(
            &orders[..],
            [
                Order::Chosen(chosen, Some(took)),
                Order::Load { one_by_one: true, enables: false, .. },
                Order::Probe(first, Probe::Load),
                last,
            ]
                if chosen.bind == Bind::Pipelined
                    && *took == ms(3000)
                    && *first == gpu(0)
                    && *last == lane
        ),
        "{orders:?}"
    );
    assert_eq!(schedule.take(ms(3010), Fact::Loaded(true)), []);
    assert_eq!(schedule.take(ms(3020), Fact::UvmLoaded), []);
    assert_eq!(
        schedule.take(ms(3025), Fact::Bound(gpu(0))),
        [Order::Initialise(gpu(0))]
    );
    schedule
}

#[test]
fn on_a_slow_host_the_lane_waits_for_load_publication_and_first_part() {
    let mut schedule = slow(3);
    assert_eq!(schedule.take(ms(3026), Fact::Publishing(gpu(0))), []);
    assert_eq!(schedule.take(ms(3030), Fact::Opening(gpu(0))), []);
    assert_eq!(schedule.take(ms(3040), Fact::LoadOver), []);
    assert_eq!(schedule.take(ms(3050), Fact::Published(gpu(0))), []);
    assert_eq!(schedule.wake(ms(4000)), []);
    let held = vec![
        (Hold::Load, ms(40)),
        (Hold::Publication, ms(10)),
        (Hold::Attach, ms(975)),
    ];
    assert_eq!(
        schedule.take(ms(4025), Fact::Attached(gpu(0))),
        [Order::Enable(gpu(1), held)]
    );
    assert_eq!(schedule.first_part(), ms(1000));
}

#[test]
fn a_first_part_that_hangs_holds_the_lane_once() {
    let mut schedule = slow(3);
    schedule.take(ms(3025), Fact::Opening(gpu(0)));
    schedule.take(ms(3030), Fact::LoadOver);
    let late = schedule.wake(ms(13_024));
    assert!(matches!(late[..], [Order::Late(..)]), "{late:?}");
    assert_eq!(schedule.deadline(ms(13_024)), Some(ms(13_025)));
    let enables = |orders: Vec<Order>, wanted| {
        let enabled = |order: &Order| matches!(order, Order::Enable(id, _) if *id == wanted);
        orders.iter().any(enabled)
    };
    assert!(enables(schedule.wake(ms(13_025)), gpu(1)));
    schedule.take(ms(16_000), Fact::Enabled(gpu(1), ms(3000)));
    let orders = schedule.take(ms(16_010), Fact::Bound(gpu(1)));
    assert!(orders.contains(&Order::Initialise(gpu(1))), "{orders:?}");
    assert!(enables(orders, gpu(2)), "beside what waits for the first");
}

#[test]
fn a_first_part_whose_end_is_not_seen_is_assumed_to_take_700_ms() {
    let (begins, unseen) = (Fact::Opening(gpu(0)), Fact::AttachUnseen(gpu(0)));
    let old = Facts {
        driver: "535.230.02".parse().ok(),
        ..policy().facts
    };
    let policies = [
        (policy(), vec![begins, unseen]),
        (
            Policy {
                facts: old,
                ..policy()
            },
            vec![begins],
        ),
    ];
    for (policy, facts) in policies {
        let mut schedule = slow_with(3, policy);
        schedule.take(ms(3030), Fact::LoadOver);
        for fact in facts {
            assert_eq!(schedule.take(ms(3040), fact), []);
        }
        assert_eq!(schedule.deadline(ms(3100)), Some(ms(3740)));
        assert_eq!(schedule.wake(ms(3739)), []);
        let orders = schedule.wake(ms(3740));
        assert!(matches!(orders[..], [Order::Enable(..)]), "{orders:?}");
    }
}

#[test]
fn first_parts_that_are_not_seen_are_one_after_another() {
    let mut schedule = slow(3);
    schedule.enter(gpu(1), Stage::Initialising, ms(3025));
    for k in 0..2 {
        schedule.take(ms(3030), Fact::Opening(gpu(k)));
        schedule.take(ms(3040), Fact::AttachUnseen(gpu(k)));
    }
    assert!(schedule.attaches(ms(4429)) && !schedule.attaches(ms(4430)));
}

#[test]
fn an_awaited_publication_holds_the_lane_until_the_program_runs() {
    let mut schedule = slow(3);
    assert_eq!(schedule.take(ms(3030), Fact::LoadOver), []);
    assert_eq!(schedule.take(ms(3031), Fact::AgentLooked), []);
    assert_eq!(schedule.take(ms(3050), Fact::Published(gpu(0))), []);
    assert_eq!(
        schedule.take(ms(3445), Fact::Attached(gpu(0))),
        [],
        "one container has looked, and will look again"
    );
    assert_eq!(schedule.take(ms(4031), Fact::AgentLooked), []);
    assert_eq!(schedule.take(ms(4073), Fact::ContainerBegins), []);
    assert_eq!(schedule.wake(ms(4400)), []);
    let orders = schedule.take(ms(4500), Fact::ContainerRuns);
    assert!(
        matches!(
            &orders[..],
            [Order::Enable(second, held)]
                if *second == gpu(1) && held.contains(&(Hold::Container, ms(427)))
        ),
        "{orders:?}"
    );
}

#[test]
fn near_its_end_the_lane_waits_for_no_container() {
    let confidential = Facts {
        confidential: true,
        ..policy().facts
    };
    for (took, facts, waits) in [
        (ms(750), policy().facts, Some(Hold::Container)),
        (ms(749), policy().facts, None),
        (ms(749), confidential, Some(Hold::Container)),
    ] {
        let mut schedule = slow(3);
        (schedule.lane.took, schedule.policy.facts) = (Some(took), facts);
        for fact in [
            Fact::LoadOver,
            Fact::Attached(gpu(0)),
            Fact::ContainerBegins,
        ] {
            schedule.note(ms(3345), fact);
        }
        assert_eq!(schedule.hold(ms(3346)), waits, "{took:?}");
    }
}

#[test]
fn a_wait_for_a_look_that_brought_no_container_is_not_repeated() {
    let mut schedule = slow(3);
    schedule.take(ms(3030), Fact::LoadOver);
    schedule.take(ms(3300), Fact::AgentLooked);
    schedule.take(ms(3310), Fact::Published(gpu(0)));
    schedule.take(ms(3445), Fact::Attached(gpu(0)));
    schedule.take(ms(4300), Fact::AgentLooked);
    assert_eq!(schedule.wake(ms(4699)), []);
    assert!(
        matches!(&schedule.wake(ms(4700))[..], [Order::Enable(..)]),
        "it waits for more than this GPU"
    );
    schedule.take(ms(5125), Fact::Initialised(gpu(0), true));
    for now in [5300, 6300, 7300] {
        schedule.take(ms(now), Fact::AgentLooked);
    }
    schedule.take(ms(7600), Fact::Enabled(gpu(1), ms(3000)));
    schedule.take(ms(7610), Fact::Bound(gpu(1)));
    schedule.take(ms(7620), Fact::Published(gpu(1)));
    let orders = schedule.take(ms(7900), Fact::Attached(gpu(1)));
    assert!(matches!(&orders[..], [Order::Enable(..)]), "{orders:?}");
}

#[test]
fn on_a_medium_host_gpus_enabled_in_a_wave_form_the_next_one() {
    let (mut schedule, _) = boot(8, policy());
    schedule.take(ms(1000), Fact::Enabled(gpu(0), ms(1000)));
    schedule.take(ms(1010), Fact::Loaded(true));
    schedule.take(ms(1010), Fact::UvmLoaded);
    schedule.take(ms(1010), Fact::LoadOver);
    assert_eq!(
        schedule.take(ms(1020), Fact::Bound(gpu(0))),
        [Order::Initialise(gpu(0))]
    );
    let orders = schedule.take(ms(1440), Fact::Attached(gpu(0)));
    assert!(matches!(&orders[..], [Order::Enable(second, _)] if *second == gpu(1)));
    let orders = schedule.take(ms(2440), Fact::Enabled(gpu(1), ms(1000)));
    assert!(
        orders.contains(&Order::Probe(gpu(1), Probe::Bind)),
        "the global lock is free while the first one boots: {orders:?}"
    );
    let orders = schedule.take(ms(2450), Fact::Bound(gpu(1)));
    assert!(
        matches!(&orders[..], [Order::Enable(third, _)] if *third == gpu(2)),
        "{orders:?}"
    );
    assert_eq!(
        schedule.take(ms(3120), Fact::Initialised(gpu(0), true)),
        [],
        "one is being enabled"
    );
    let orders = schedule.take(ms(3350), Fact::Enabled(gpu(2), ms(1000)));
    assert!(
        orders.contains(&Order::Probe(gpu(2), Probe::Bind)),
        "{orders:?}"
    );
    let orders = schedule.take(ms(3355), Fact::Bound(gpu(2)));
    assert_eq!(orders, [Order::Initialise(gpu(1))]);
    let orders = schedule.take(ms(3365), Fact::Opened(gpu(1)));
    assert_eq!(orders, [Order::Initialise(gpu(2))]);
}

/// A slow host with three GPUs: the first is usable, and the second could initialise.
fn one_of_three_usable() -> Schedule {
    let mut schedule = slow(3);
    schedule.note(ms(3030), Fact::LoadOver);
    schedule.enter(gpu(1), Stage::Bound, ms(5000));
    schedule.note(ms(5100), Fact::Initialised(gpu(0), true));
    schedule
}

#[test]
fn programs_of_containers_come_before_the_next_wave_while_the_lane_is_not_over() {
    let second = Order::Initialise(gpu(1));
    let mut nobody = one_of_three_usable();
    assert!(nobody.wake(ms(5100)).contains(&second));

    let with_container = || {
        let mut schedule = one_of_three_usable();
        schedule.note(ms(4500), Fact::ContainerBegins);
        schedule.note(ms(4700), Fact::ContainerRuns);
        schedule
    };
    let begun = |schedule: &mut Schedule, at| {
        let mut orders = Vec::new();
        schedule.initialise(at, &mut orders);
        orders
    };
    let mut waits = with_container();
    assert_eq!(begun(&mut waits, ms(5100)), []);
    assert_eq!(waits.deadline(ms(5100)), Some(ms(5600)));
    assert_eq!(begun(&mut waits, ms(5599)), []);
    assert_eq!(begun(&mut waits, ms(5600)), std::slice::from_ref(&second));

    let mut schedule = with_container();
    let orders = schedule.wake(ms(5100));
    assert!(
        matches!(&orders[..], [Order::Enable(third, _)] if *third == gpu(2)),
        "the lane goes on: {orders:?}"
    );
    let orders = schedule.take(ms(5200), Fact::Failed(gpu(2)));
    assert_eq!(orders, [second, Order::LaneOver], "behind the lane");
}

#[test]
fn gpus_that_are_to_be_first_have_a_wave_of_their_own_and_half_a_second() {
    let first = Policy {
        first: 1,
        bind: Bind::Insmod,
        ..policy()
    };
    let (mut schedule, _) = boot(3, first.clone());
    schedule.note(ms(20), Fact::Loaded(true));
    schedule.note(ms(22), Fact::UvmLoaded);
    (0..2).for_each(|k| schedule.note(ms(23), Fact::Bound(gpu(k))));
    assert_eq!(
        schedule.take(ms(24), Fact::Bound(gpu(2)))[0],
        Order::Initialise(gpu(0))
    );
    assert_eq!(schedule.take(ms(30), Fact::Opened(gpu(0))), []);
    let orders = schedule.take(ms(2000), Fact::Initialised(gpu(0), true));
    assert_eq!(orders, []);
    assert_eq!(schedule.deadline(ms(2000)), Some(ms(2500)));
    assert_eq!(schedule.wake(ms(2500)), [Order::Initialise(gpu(1))]);
    assert_eq!(
        schedule.take(ms(2510), Fact::Opened(gpu(1))),
        [Order::Initialise(gpu(2))],
        "the others are one wave"
    );

    // One that hangs, or that is probed for ever, costs the others its limit.
    for stage in [Stage::Initialising, Stage::Probing(Probe::Load)] {
        let (mut hangs, _) = boot(3, first.clone());
        hangs.note(ms(20), Fact::Loaded(true));
        hangs.note(ms(22), Fact::UvmLoaded);
        hangs.enter(gpu(0), stage, ms(100));
        (1..3).for_each(|k| hangs.note(ms(100), Fact::Bound(gpu(k))));
        hangs.wake(ms(10_099));
        assert!(
            hangs
                .gpus
                .values()
                .skip(1)
                .all(|gpu| gpu.stage == Stage::Bound)
        );
        let orders = hangs.wake(ms(10_100));
        assert!(
            orders.contains(&Order::Initialise(gpu(1))),
            "{stage:?}: {orders:?}"
        );
    }
}

#[test]
fn on_a_fast_host_all_gpus_probe_together_and_initialise_in_order() {
    let (mut schedule, _) = boot(3, policy());
    let orders = schedule.take(ms(3), Fact::Enabled(gpu(0), ms(3)));
    assert!(
        matches!(
            &orders[..],
            [Order::Chosen(chosen, _), Order::Load { gpus, one_by_one: false, .. }, ..]
                if chosen.bind == Bind::Insmod && gpus.len() == 3
        ),
        "{orders:?}"
    );
    assert!(
        (0..3).all(|k| orders.contains(&Order::Probe(gpu(k), Probe::Load)))
            && orders.contains(&Order::LaneOver)
    );
    schedule.take(ms(20), Fact::Loaded(true));
    schedule.take(ms(22), Fact::UvmLoaded);
    assert_eq!(schedule.take(ms(23), Fact::Bound(gpu(0))), []);
    assert_eq!(schedule.take(ms(24), Fact::Bound(gpu(1))), []);
    assert_eq!(
        schedule.take(ms(25), Fact::Bound(gpu(2))),
        [Order::Initialise(gpu(0))]
    );
    assert_eq!(
        schedule.take(ms(30), Fact::Opened(gpu(0))),
        [Order::Initialise(gpu(1))]
    );
    // One whose open does not return costs the others its limit.
    assert_eq!(schedule.wake(ms(1029)), []);
    assert_eq!(schedule.deadline(ms(1029)), Some(ms(1030)));
    assert_eq!(schedule.wake(ms(1030)), [Order::Initialise(gpu(2))]);
}

#[test]
fn behind_a_hung_probe_one_more_starts_after_30_s_never_two() {
    let (mut schedule, _) = boot(
        4,
        Policy {
            bind: Bind::Pipelined,
            ..policy()
        },
    );
    let orders = schedule.take(ms(3), Fact::Enabled(gpu(0), ms(3)));
    assert!(orders.contains(&Order::Probe(gpu(0), Probe::Load)));
    schedule.take(ms(10), Fact::Loaded(true));
    schedule.take(ms(11), Fact::Bound(gpu(0)));
    let orders = schedule.take(ms(20), Fact::Enabled(gpu(1), ms(3)));
    assert!(orders.contains(&Order::Probe(gpu(1), Probe::Bind)));
    schedule.take(ms(30), Fact::Enabled(gpu(2), ms(3)));
    schedule.take(ms(40), Fact::Enabled(gpu(3), ms(3)));
    let probes = |orders: Vec<Order>| {
        orders
            .into_iter()
            .filter(|order| matches!(order, Order::Probe(..)))
            .collect::<Vec<_>>()
    };
    assert_eq!(probes(schedule.wake(ms(30_019))), []);
    assert_eq!(
        probes(schedule.wake(ms(30_020))),
        [Order::Probe(gpu(2), Probe::Bind)]
    );
    assert_eq!(probes(schedule.wake(ms(30_021))), []);
    assert_eq!(
        probes(schedule.take(ms(30_030), Fact::Bound(gpu(2)))),
        [Order::Probe(gpu(3), Probe::Bind)]
    );
}

#[test]
fn an_unsettled_gpu_is_reported_at_10_30_60_s_then_each_minute() {
    let mut schedule = slow(1);
    let late = |orders: Vec<Order>| orders.iter().any(|order| matches!(order, Order::Late(..)));
    let mut reported = Vec::new();
    let mut now = ms(3030);
    while now < ms(250_000) {
        if late(schedule.wake(now)) {
            reported.push(now.as_secs());
        }
        now += ms(1000);
    }
    assert_eq!(reported, [13, 33, 63, 123, 183, 243]);
}

#[test]
fn modules_are_loadable_until_all_is_settled_or_for_60_s() {
    let mut schedule = slow(1);
    schedule.take(ms(3030), Fact::LoadOver);
    assert!(!schedule.wake(ms(63_029)).contains(&Order::LockDown));
    assert!(schedule.wake(ms(63_030)).contains(&Order::LockDown));
    schedule.take(ms(64_000), Fact::Initialised(gpu(0), true));
    assert_eq!(
        schedule.take(ms(64_001), Fact::Usable(gpu(0))),
        [Order::Settled {
            usable: 1,
            failed: 0
        }]
    );
    let mut quick = slow(1);
    quick.take(ms(3030), Fact::LoadOver);
    quick.take(ms(5000), Fact::Initialised(gpu(0), true));
    assert_eq!(
        quick.take(ms(5001), Fact::Usable(gpu(0))),
        [
            Order::Settled {
                usable: 1,
                failed: 0
            },
            Order::LockDown
        ]
    );
}

#[test]
fn on_one_vcpu_the_first_enabling_waits_for_the_agent() {
    let policy = policy();
    let facts = Facts {
        vcpus: 1,
        ..policy.facts.clone()
    };
    let (mut schedule, orders) = boot(2, Policy { facts, ..policy });
    assert_eq!(orders, [Order::Wait(gpu(0))]);
    schedule.take(ms(500), Fact::ContainerBegins);
    assert_eq!(schedule.wake(ms(1600)), []);
    assert!(matches!(
        &schedule.take(ms(1700), Fact::ContainerRuns)[..],
        [Order::Enable(..)]
    ));
}

#[test]
fn with_firewalls_the_load_is_first_and_its_probe_holds_no_lane() {
    let policy = policy();
    let facts = Facts {
        firewall: true,
        ..policy.facts.clone()
    };
    let (mut schedule, orders) = boot(4, Policy { facts, ..policy });
    assert!(
        matches!(
            &orders[..],
            [
                Order::Chosen(chosen, None),
                Order::Load { enables: true, .. },
                Order::Probe(first, Probe::Load),
                Order::Wait(_),
            ]
            if chosen.bind == Bind::Concurrent && *first == gpu(0)),
        "{orders:?}"
    );
    let orders = schedule.take(ms(10), Fact::Registered);
    assert!(
        matches!(&orders[..], [Order::Enable(second, _)] if *second == gpu(1)),
        "{orders:?}"
    );
    // The load's probe wakes at 4010 and enables its GPU: one more enabling would not be over by
    // then. This GPU's probe would be.
    let orders = schedule.take(ms(3010), Fact::Enabled(gpu(1), ms(3000)));
    assert_eq!(
        orders,
        [Order::Probe(gpu(1), Probe::DuringLoad), Order::Wait(gpu(2))]
    );
    schedule.take(ms(7012), Fact::Loaded(true));
    schedule.take(ms(7013), Fact::UvmLoaded);
    assert_eq!(schedule.take(ms(7015), Fact::Bound(gpu(1))), []);
    let [first, second] = [0, 1].map(|k| [Order::Initialise(gpu(k))]);
    assert_eq!(schedule.take(ms(7016), Fact::Bound(gpu(0))), first);
    assert_eq!(schedule.take(ms(7017), Fact::Opened(gpu(0))), second);
    schedule.take(ms(7020), Fact::LoadOver);
    // The last one begins its sleep so that it wakes when the one before it is enabled, and the
    // driver enables it then.
    assert_eq!(schedule.take(ms(7436), Fact::Attached(gpu(0))), []);
    let orders = schedule.take(ms(7856), Fact::Attached(gpu(1)));
    assert!(
        matches!(
            &orders[..],
            [Order::Enable(third, _), Order::Probe(last, Probe::BeforeEnable)]
                if *third == gpu(2) && *last == gpu(3)
        ),
        "{orders:?}"
    );
}

#[test]
fn a_gpu_that_comes_back_at_an_address_is_another_one() {
    let mut schedule = slow(1);
    let back = GpuId {
        generation: 9,
        ..gpu(0)
    };
    schedule.take(ms(4000), Fact::Gone(gpu(0)));
    assert_eq!(
        schedule.take(ms(4001), Fact::Found(back, Arrival::Enabled)),
        [Order::Probe(back, Probe::Bind)]
    );
    schedule.take(ms(4002), Fact::Usable(gpu(0)));
    assert!(!schedule.is_usable(back) && !schedule.is_usable(gpu(0)));
}

/// A bring-up whose load has failed, with its two GPUs.
fn failed_load() -> Schedule {
    let (mut schedule, _) = boot(2, policy());
    let orders = schedule.take(ms(3), Fact::Enabled(gpu(0), ms(3)));
    assert!(
        orders
            .iter()
            .any(|order| matches!(order, Order::Load { .. })),
        "{orders:?}"
    );
    schedule.take(ms(10), Fact::Loaded(false));
    (0..2).for_each(|k| drop(schedule.take(ms(11), Fact::Failed(gpu(k)))));
    schedule
}

#[test]
fn a_gpu_that_comes_after_a_failed_load_gets_a_load_of_its_own() {
    let mut schedule = failed_load();
    assert_eq!(
        schedule.take(ms(12), Fact::LoadOver),
        [],
        "settled before, and not locked down"
    );
    let orders = schedule.take(ms(50_000), Fact::Found(gpu(7), Arrival::Enabled));
    assert_eq!(
        orders,
        [Order::Load {
            gpus: vec![gpu(7)],
            one_by_one: false,
            enables: false
        }]
    );
    assert!(
        !schedule.wake(ms(60_500)).contains(&Order::LockDown),
        "a load is under way"
    );
    assert_eq!(
        schedule.take(ms(61_000), Fact::Loaded(true)),
        [Order::Probe(gpu(7), Probe::Bind)]
    );
    schedule.take(ms(61_010), Fact::UvmLoaded);
    schedule.take(ms(61_020), Fact::LoadOver);
    assert_eq!(
        schedule.take(ms(61_030), Fact::Bound(gpu(7))),
        [Order::Initialise(gpu(7))]
    );
    let orders = schedule.take(ms(63_000), Fact::Usable(gpu(7)));
    assert_eq!(
        orders,
        [
            Order::Settled {
                usable: 1,
                failed: 2
            },
            Order::LockDown
        ]
    );
}

#[test]
fn a_gpu_that_comes_while_a_load_fails_waits_for_the_next_one() {
    let mut schedule = failed_load();
    assert_eq!(
        schedule.take(ms(12), Fact::Found(gpu(7), Arrival::Enabled)),
        [],
        "the failed one is not over"
    );
    let orders = schedule.take(ms(13), Fact::LoadOver);
    assert_eq!(
        orders,
        [Order::Load {
            gpus: vec![gpu(7)],
            one_by_one: false,
            enables: false
        }]
    );
}

#[test]
fn a_gpu_found_during_a_load_that_fails_gets_the_next_one() {
    let (mut schedule, _) = boot(
        1,
        Policy {
            bind: Bind::Insmod,
            ..policy()
        },
    );
    schedule.take(ms(5), Fact::Found(gpu(7), Arrival::Enabled));
    assert_eq!(schedule.take(ms(10), Fact::Loaded(false)), []);
    assert_eq!(schedule.take(ms(11), Fact::Failed(gpu(0))), []);
    let orders = schedule.take(ms(12), Fact::LoadOver);
    assert_eq!(
        orders,
        [Order::Load {
            gpus: vec![gpu(7)],
            one_by_one: false,
            enables: true
        }]
    );
    let orders = schedule.take(ms(20), Fact::Loaded(false));
    assert_eq!(
        orders,
        [Order::Probe(gpu(7), Probe::Bind), Order::LaneOver],
        "which fails, with the load's reason"
    );
}

#[test]
fn an_enabling_that_fails_slowly_shows_a_slow_host() {
    for (took, slow) in [(3000, true), (3, false)] {
        let (mut schedule, _) = boot(3, policy());
        assert_eq!(
            schedule.take(ms(took), Fact::Failed(gpu(0))),
            [Order::Enable(gpu(1), vec![])],
            "one must come out of the lane"
        );
        assert_eq!(schedule.is_slow(), slow);
    }
}

#[test]
fn no_initialisation_joins_a_wave_whose_first_one_is_back() {
    let (joins, first_is_back) = (ms(3100), ms(3025 + 1600));
    for (now, orders) in [
        (joins, vec![Order::Initialise(gpu(1))]),
        (first_is_back, vec![]),
    ] {
        let mut schedule = slow(2);
        schedule
            .gpus
            .get_mut(&gpu(1))
            .unwrap()
            .enter(Stage::Bound, now);
        schedule.note(ms(3030), Fact::Opened(gpu(0)));
        let mut begun = Vec::new();
        schedule.initialise(now, &mut begun);
        assert_eq!(begun, orders, "at {now:?}");
    }
}

#[test]
fn no_gpu_is_enabled_beside_third_parts_and_the_next_one_at_their_end() {
    let mut schedule = slow(3);
    schedule.take(ms(3030), Fact::LoadOver);
    let orders = schedule.take(ms(3345), Fact::Attached(gpu(0)));
    assert!(matches!(&orders[..], [Order::Enable(second, _)] if *second == gpu(1)));
    // The second part was over at 4645, and the enabling has kept the third one waiting.
    let orders = schedule.take(ms(6345), Fact::Enabled(gpu(1), ms(3000)));
    assert_eq!(orders, [Order::Wait(gpu(2))]);
    assert_eq!(schedule.wave_holds(ms(6345)), Some(Hold::Wave));
    let orders = schedule.take(ms(6845), Fact::Initialised(gpu(0), true));
    assert!(
        orders.contains(&Order::Probe(gpu(1), Probe::Bind)),
        "{orders:?}"
    );
    assert_eq!(schedule.wave_holds(ms(6845)), None);
    // The third part alone took 500 ms, as an H100's does: an enabling is no measure of a driver.
    assert_eq!(schedule.scale, Some(1000));

    // One that hangs costs its limit.
    let mut hangs = slow(3);
    hangs.take(ms(3345), Fact::Attached(gpu(0)));
    hangs.take(ms(6345), Fact::Enabled(gpu(1), ms(3000)));
    assert_eq!(hangs.wave_holds(ms(13_024)), Some(Hold::Wave));
    assert_eq!(hangs.wave_holds(ms(13_025)), None);
}

#[test]
fn a_probe_that_a_wave_kept_waiting_comes_before_the_next_wave() {
    let mut schedule = slow(3);
    schedule.enter(gpu(1), Stage::Probing(Probe::Bind), ms(3500));
    schedule.enter(gpu(2), Stage::Bound, ms(3500));
    let orders = schedule.take(ms(5000), Fact::Initialised(gpu(0), true));
    assert!(!orders.contains(&Order::Initialise(gpu(2))), "{orders:?}");
    assert_eq!(schedule.deadline(ms(5500)), Some(ms(6000)));
    assert_eq!(schedule.wake(ms(6000)), [Order::Initialise(gpu(2))]);
}

#[test]
fn a_wave_that_loses_a_gpu_is_no_measure() {
    let mut schedule = slow(2);
    let assumed = schedule.costs();
    schedule.take(ms(3100), Fact::Gone(gpu(0)));
    assert_eq!(schedule.costs(), assumed);
}

#[test]
fn after_a_failed_load_modules_stay_loadable_until_the_deadline() {
    let mut schedule = failed_load();
    schedule.take(ms(12), Fact::LoadOver);
    assert_eq!(schedule.wake(ms(60_011)), []);
    assert_eq!(schedule.deadline(ms(60_011)), Some(ms(60_012)));
    assert_eq!(schedule.wake(ms(60_012)), [Order::LockDown]);
}

#[test]
fn modules_are_locked_although_the_worker_that_loaded_them_has_died() {
    let earlier = Policy {
        load_begun: true,
        ..policy()
    };
    let mut schedule = Schedule::new(earlier, ms(0));
    (0..2).for_each(|k| {
        schedule.take(ms(0), Fact::Found(gpu(k), Arrival::Failed));
    });
    let orders = schedule.take(ms(5), Fact::Scanned);
    assert!(!orders.contains(&Order::LockDown), "{orders:?}");
    assert_eq!(schedule.wake(ms(60_005)), [Order::LockDown]);
}

#[test]
fn modules_are_locked_although_the_load_hangs() {
    let mut schedule = Schedule::new(policy(), ms(0));
    schedule.take(ms(0), Fact::Found(gpu(0), Arrival::Enabled));
    let orders = schedule.take(ms(5), Fact::Scanned);
    assert!(matches!(orders[..], [.., Order::Load { .. }]), "{orders:?}");
    assert!(!schedule.wake(ms(600_004)).contains(&Order::LockDown));
    assert!(schedule.wake(ms(600_005)).contains(&Order::LockDown));
}

#[test]
fn a_guest_that_never_gets_a_gpu_locks_down_at_once() {
    let settled = Order::Settled {
        usable: 0,
        failed: 0,
    };
    assert_eq!(
        boot(
            0,
            Policy {
                no_gpus: true,
                ..policy()
            }
        )
        .1,
        [settled.clone(), Order::LockDown]
    );
    assert_eq!(boot(0, policy()).1, [settled], "one may be plugged in");
}

#[test]
fn a_gpu_that_is_enabled_already_is_no_measure_of_the_host() {
    for (enable, bind) in [(Some(ms(3000)), Bind::Pipelined), (None, Bind::Insmod)] {
        let mut schedule = Schedule::new(Policy { enable, ..policy() }, ms(0));
        (0..2).for_each(|k| {
            assert_eq!(
                schedule.take(ms(0), Fact::Found(gpu(k), Arrival::Again)),
                []
            )
        });
        assert_eq!(
            schedule.take(ms(0), Fact::Scanned),
            [Order::Enable(gpu(0), vec![])]
        );
        let orders = schedule.take(ms(1), Fact::Enabled(gpu(0), ms(0)));
        assert!(
            matches!(&orders[0], Order::Chosen(chosen, _) if chosen.bind == bind),
            "{enable:?}: {orders:?}"
        );
    }
}

#[test]
fn a_load_that_enables_keeps_the_lane_until_its_end() {
    let facts = Facts {
        gpus: 1,
        firewall: true,
        ..policy().facts
    };
    let (mut schedule, orders) = boot(1, Policy { facts, ..policy() });
    assert!(
        orders
            .iter()
            .any(|order| matches!(order, Order::Load { enables: true, .. })),
        "{orders:?}"
    );
    assert!(!orders.contains(&Order::LaneOver), "{orders:?}");
    assert!(
        schedule
            .take(ms(7300), Fact::Loaded(true))
            .contains(&Order::LaneOver)
    );
}
