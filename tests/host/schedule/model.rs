//! A failure means that the lock model which judges the schedule contradicts what is known of host
//! and driver: a verdict about the schedule would then be about no real machine.

use super::{MEDIUM, MS};
use kata_gpu_tests::schedule::locks::{At, CALL, Fact, Fault, Host, Micros, Order, Times, World};

fn host(gpus: usize, times: Times) -> Host {
    Host::of(gpus, times)
}

/// Lets the world go on until that time.
fn until(world: &mut World, at: Micros) {
    while world.now() < at {
        assert!(world.advance(Some(at)));
    }
}

/// Lets it go on until nothing happens any more; returns the facts.
fn to_the_end(mut world: World) -> Vec<(Micros, Fact)> {
    while world.advance(None) {}
    world.facts()
}

/// A world in which all GPUs are bound.
fn bound(host: &Host) -> World<'_> {
    let mut world = World::new(host).recording();
    for gpu in 0..host.gpus.len() {
        world.order(Order::Enable(gpu));
        while world.at(gpu) != At::Enabled {
            world.advance(None);
        }
        world.order(Order::Probe(gpu));
        while world.at(gpu) != At::Bound {
            world.advance(None);
        }
    }
    world
}

fn time_of(facts: &[(Micros, Fact)], wanted: Fact) -> Micros {
    facts
        .iter()
        .find(|(_, fact)| *fact == wanted)
        .unwrap_or_else(|| panic!("no {wanted:?} in {facts:?}"))
        .0
}

#[test]
fn initialisations_share_their_second_part_with_newer_drivers() {
    for (relaxed, at_once) in [(true, 4 * 300 + 1300 + 4 * 500), (false, 4 * 2100)] {
        let host = Host {
            relaxed,
            ..host(4, MEDIUM)
        };
        let mut world = bound(&host);
        let begun = world.now();
        (0..4).for_each(|gpu| world.order(Order::Open(gpu)));
        let facts = to_the_end(world);
        assert_eq!(
            time_of(&facts, Fact::Initialised(3, true)) - begun,
            at_once * MS,
            "relaxed: {relaxed}"
        );
    }
}

#[test]
fn initialisations_that_overlap_in_part_make_a_convoy() {
    let host = host(2, MEDIUM);
    let mut world = bound(&host);
    let begun = world.now();
    world.order(Order::Open(0));
    until(&mut world, begun + 1500 * MS);
    world.order(Order::Open(1));
    let facts = to_the_end(world);
    // GPU 0 is through its S2 at 1600 and then waits, with A held, for the S2 of GPU 1, which ends
    // at 3100.
    assert_eq!(
        time_of(&facts, Fact::Initialised(0, true)) - begun,
        3600 * MS
    );
    assert_eq!(
        time_of(&facts, Fact::Initialised(1, true)) - begun,
        4100 * MS
    );
}

/// A world in which GPU 0 is opened, at 1003: its S1 ends at 1303, and its S2 at 2603.
fn opened(host: &Host) -> World<'_> {
    let mut world = World::new(host).recording();
    world.order(Order::Enable(0));
    until(&mut world, 1000 * MS);
    world.order(Order::Probe(0));
    until(&mut world, 1003 * MS);
    world.order(Order::Open(0));
    world
}

#[test]
fn a_call_of_a_program_waits_for_each_s2_and_keeps_the_driver_meanwhile() {
    let host = host(2, MEDIUM);
    let mut world = bound(&host);
    let begun = world.now();
    world.order(Order::Open(0));
    world.order(Order::Call(7));
    world.order(Order::Open(1));
    let facts = to_the_end(world);
    // GPU 0 is in its S2 until 1600; nobody has the driver before the call is over.
    let after = |fact| time_of(&facts, fact) - begun;
    assert_eq!(after(Fact::Called(7)), 1600 * MS + CALL);
    assert_eq!(after(Fact::Attached(1)), 1900 * MS + CALL);
    assert_eq!(after(Fact::Initialised(0, true)), 3700 * MS + CALL);

    let mut quiet = bound(&host);
    let begun = quiet.now();
    quiet.order(Order::Call(7));
    assert_eq!(time_of(&to_the_end(quiet), Fact::Called(7)), begun + CALL);
}

#[test]
fn who_watches_an_s1_sees_its_end_behind_whoever_asked_before() {
    let host = host(2, MEDIUM);
    let mut world = bound(&host);
    let begun = world.now();
    world.order(Order::Open(0));
    world.order(Order::Watch(0));
    world.order(Order::Open(1));
    // Asked before that S1 has begun, and so again when it has.
    world.order(Order::Watch(1));
    let facts = to_the_end(world.clone());
    assert_eq!(time_of(&facts, Fact::Seen(0)) - begun, 300 * MS);
    assert_eq!(time_of(&facts, Fact::Seen(1)) - begun, 600 * MS);

    let mut behind = bound(&host);
    behind.order(Order::Open(0));
    behind.order(Order::Call(7));
    behind.order(Order::Watch(0));
    let seen = time_of(&to_the_end(behind), Fact::Seen(0)) - begun;
    assert_eq!(seen, 1600 * MS + CALL);
}

#[test]
fn an_enabling_inside_an_s1_stalls_all_users_of_the_driver() {
    let host = host(2, MEDIUM);
    let mut world = opened(&host);
    until(&mut world, 1100 * MS);
    world.order(Order::Enable(1));
    assert!(world.attaching());
    let facts = to_the_end(world.clone());
    // The accesses at 69.5 % of S1 wait until 2100; the rest of it takes 91.5 ms more.
    assert_eq!(time_of(&facts, Fact::Attached(0)), 2191 * MS + 500);
    until(&mut world, 2000 * MS);
    assert!(world.spinning() == 1 && world.spun() > 0);
}

#[test]
fn an_enabling_delays_the_s3_that_begins_in_it_and_stalls_one_that_it_begins_in() {
    let host = host(3, MEDIUM);
    let mut world = opened(&host);
    until(&mut world, 2000 * MS);
    world.order(Order::Enable(1));
    until(&mut world, 2900 * MS);
    assert_eq!((world.at(0), world.states_to_begin()), (At::State(0), 1));
    assert_eq!(world.spinning(), 1);
    until(&mut world, 3100 * MS);
    assert!(world.loads_state());
    // Accesses are due at 70 % of S3, at 3350.
    world.order(Order::Enable(2));
    let facts = to_the_end(world);
    assert_eq!(time_of(&facts, Fact::Initialised(0, true)), 4250 * MS);
}

#[test]
fn a_probe_waits_for_an_s3_that_waits_for_an_s2() {
    let host = host(3, MEDIUM);
    let mut world = World::new(&host).recording();
    for gpu in 0..3 {
        world.order(Order::Enable(gpu));
        until(&mut world, (gpu as Micros + 1) * 1000 * MS);
    }
    for gpu in 0..2 {
        world.order(Order::Probe(gpu));
        until(&mut world, 3003 * MS + gpu as Micros * 3 * MS);
    }
    world.order(Order::Open(0));
    world.order(Order::Open(1));
    let begun = world.now();
    until(&mut world, begun + 1650 * MS);
    world.order(Order::Probe(2));
    let facts = to_the_end(world);
    assert_eq!(
        time_of(&facts, Fact::Initialised(0, true)) - begun,
        (600 + 1300 + 500) * MS
    );
    // In the queue before the S3 of GPU 1, which came at 1900.
    assert_eq!(time_of(&facts, Fact::Probed(2, true)) - begun, 2400 * MS);
    assert_eq!(
        time_of(&facts, Fact::Initialised(1, true)) - begun,
        2900 * MS
    );
}

#[test]
fn a_probe_behind_a_firewall_sleeps_and_then_enables() {
    let host = host(
        2,
        Times {
            firewall: 4000 * MS,
            ..MEDIUM
        },
    );
    let mut world = World::new(&host).recording();
    world.order(Order::Probe(0));
    world.order(Order::Probe(1));
    let facts = to_the_end(world);
    let probed = time_of(&facts, Fact::Probed(0, true));
    assert_eq!(
        probed,
        6000 * MS,
        "config accesses of GPU 0 wait for the other's enabling"
    );
    assert_eq!(time_of(&facts, Fact::Probed(1, true)), 6003 * MS);
}

#[test]
fn a_load_waits_for_the_probes_that_run_when_its_own_ends() {
    let host = Host {
        load: Some([20 * MS, 10 * MS]),
        ..host(
            3,
            Times {
                firewall: 4000 * MS,
                ..MEDIUM
            },
        )
    };
    let mut world = World::new(&host).recording();
    world.order(Order::Load(0));
    until(&mut world, 20 * MS);
    assert!(world.registered() && !world.loaded());
    world.order(Order::Enable(1));
    until(&mut world, 1020 * MS);
    world.order(Order::Probe(1));
    until(&mut world, 5024 * MS);
    assert_eq!((world.at(0), world.at(1)), (At::Bound, At::Bound));
    let facts = to_the_end(world);
    assert_eq!(time_of(&facts, Fact::Loaded(true)), 5023 * MS);
    assert_eq!(time_of(&facts, Fact::UvmLoaded), 5033 * MS);

    let mut spins = World::new(&host);
    spins.order(Order::Enable(2));
    spins.order(Order::Load(0));
    until(&mut spins, 1000 * MS);
    assert_eq!(spins.spun(), 980 * MS);
}

#[test]
fn a_load_whose_first_gpu_fails_can_be_tried_with_another() {
    let mut host = Host {
        load: Some([20 * MS, 10 * MS]),
        ..host(2, MEDIUM)
    };
    host.gpus[0].fault = Fault::ProbeFails;
    let mut world = World::new(&host).recording();
    world.order(Order::Load(0));
    while !world
        .facts()
        .iter()
        .any(|(_, fact)| *fact == Fact::Loaded(false))
    {
        assert!(world.advance(None));
    }
    world.order(Order::Load(1));
    assert!(
        to_the_end(world)
            .iter()
            .any(|(_, fact)| *fact == Fact::Loaded(true))
    );
}

#[test]
fn no_grace_period_ends_beside_an_enabling_and_one_ends_with_it() {
    let host = host(2, MEDIUM);
    let mut world = World::new(&host).recording();
    world.order(Order::Enable(0));
    until(&mut world, 100 * MS);
    world.order(Order::Wait(0, 2));
    until(&mut world, 1000 * MS);
    world.order(Order::Enable(1));
    let facts = to_the_end(world);
    assert_eq!(
        time_of(&facts, Fact::Waited(0)),
        2000 * MS,
        "one at the end of each enabling"
    );

    let mut quiet = World::new(&host).recording();
    quiet.order(Order::Wait(0, 2));
    assert_eq!(time_of(&to_the_end(quiet), Fact::Waited(0)), 2 * host.grace);
}

#[test]
fn on_one_vcpu_nothing_runs_beside_an_enabling() {
    let one = Host {
        vcpus: 1,
        ..host(2, MEDIUM)
    };
    let mut world = World::new(&one).recording();
    world.order(Order::Enable(0));
    until(&mut world, 1000 * MS);
    world.order(Order::Probe(0));
    world.order(Order::Enable(1));
    until(&mut world, 1900 * MS);
    assert_eq!(world.at(0), At::Probe, "due at 1003");
    until(&mut world, 2000 * MS);
    assert_eq!(world.at(0), At::Bound);
}

#[test]
fn a_hanging_initialisation_keeps_all_others_from_ending() {
    let mut host = host(2, MEDIUM);
    host.gpus[0].fault = Fault::InitHangs;
    let mut world = bound(&host);
    world.order(Order::Open(0));
    world.order(Order::Open(1));
    while world.advance(None) {}
    assert_eq!((world.at(0), world.at(1)), (At::Hung, At::State(0)));
    assert!(!world.settled());
}

#[test]
fn a_gpu_that_is_torn_out_in_its_initialisation_fails_and_goes() {
    let mut host = host(1, MEDIUM);
    host.gpus[0].removed_at = Some(1500 * MS);
    let mut world = bound(&host);
    world.order(Order::Open(0));
    let facts = to_the_end(world);
    assert_eq!(time_of(&facts, Fact::Initialised(0, false)), 2603 * MS);
    assert_eq!(
        time_of(&facts, Fact::Removed(0)),
        2603 * MS,
        "the removal waits for the open"
    );
}
