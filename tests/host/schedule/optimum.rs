//! A failure means that the search misses the best order, or states a time that its order does not
//! take: the schedule would then be compared with a wrong optimum.

use super::{MEDIUM, MS};
use fastrand::Rng;
use kata_gpu_tests::schedule::drive::{Overhead, drive, policy};
use kata_gpu_tests::schedule::locks::{At, Host, Micros, Order, Times, World};
use kata_gpu_tests::schedule::optimum::{Rule, search};
use kata_gpu_tests::schedule::policies::{OneBesideTheLane, Policy, run};

/// Nothing spins beside an enabling but what waits to begin an S3.
fn keeps_the_rule(world: &World) {
    assert_eq!(world.spinning(), world.states_to_begin(), "{}", world.now());
}

/// The search returns an order that takes the time that it states.
#[test]
fn the_best_order_runs_as_the_search_says() {
    for (gpus, firewall) in [(2, 0), (5, 0), (3, 4000 * MS)] {
        let load = (firewall > 0).then_some([0, 0]);
        let host = Host {
            load,
            ..Host::of(gpus, Times { firewall, ..MEDIUM })
        };
        let found = search(&host, Rule::NothingSpins, 60_000 * MS, 1_000_000);
        assert_eq!(found.bound, found.usable, "the search is complete");
        let mut world = World::new(&host);
        for (at, order) in &found.orders {
            while world.now() < *at {
                assert!(world.advance(Some(*at)));
                keeps_the_rule(&world);
            }
            world.order(*order);
            keeps_the_rule(&world);
        }
        while !world.settled() {
            assert!(world.advance(None));
            keeps_the_rule(&world);
        }
        assert_eq!(world.now(), found.usable, "{gpus} GPUs");
    }
}

#[test]
fn two_gpus_on_a_medium_host_are_best_initialised_together() {
    let found = search(
        &Host::of(2, MEDIUM),
        Rule::NothingSpins,
        60_000 * MS,
        1_000_000,
    );
    // The second one is probed beside the S1 of the first: probe, 2 enablings, 2 S1, S2, 2 S3.
    assert_eq!(found.usable, (3 + 2 * 1000 + 2 * 300 + 1300 + 2 * 500) * MS);
}

/// Any order.
struct AtRandom(Rng);

impl Policy for AtRandom {
    fn next(&mut self, world: &World) -> Option<Order> {
        if let Some(gpu) = world.first(At::Bound) {
            return Some(Order::Look(gpu));
        }
        let probing = world.counts(|at| matches!(at, At::Probe | At::Uuid | At::Look)) > 0;
        let idle = world.mapping().is_none() && !probing && !world.attaching();
        let nothing_else = world.next_event().is_none();
        let mut one_of =
            |order: Option<Order>| order.filter(|_| nothing_else || self.0.u64(0..3) == 0);
        one_of(world.first(At::Known).map(Order::Open))
            .or_else(|| {
                one_of(
                    world
                        .first(At::Enabled)
                        .filter(|_| !probing)
                        .map(Order::Probe),
                )
            })
            .or_else(|| one_of(world.first(At::Present).filter(|_| idle).map(Order::Enable)))
    }
}

#[test]
fn no_order_at_random_beats_the_best_one() {
    let mut random = Rng::with_seed(1);
    for enable in [3, 200, 700, 1000, 2000] {
        for relaxed in [true, false] {
            let host = Host {
                relaxed,
                ..Host::of(
                    4,
                    Times {
                        enable: enable * MS,
                        ..MEDIUM
                    },
                )
            };
            let best = search(&host, Rule::NoneInsideS1, 60_000 * MS, 1_000_000);
            assert_eq!(best.bound, best.usable);
            let near = (0..500).filter_map(|_| {
                let seed = random.u64(..);
                let outcome = run(&host, &mut AtRandom(Rng::with_seed(seed)))?;
                let usable = outcome.usable;
                assert!(
                    usable >= best.usable,
                    "E {enable} ms, seed {seed}: {outcome:?} against {best:?}"
                );
                Some(outcome.usable)
            });
            let near = near.min().unwrap_or(Micros::MAX);
            let best = best.usable;
            let is_near = near < best * 11 / 10;
            assert!(
                is_near,
                "E {enable} ms: {near} against {best}: random orders are too far off"
            );
        }
    }
}

/// Negative control: an order that waits beside the lane is found to be slow.
#[test]
fn the_former_order_is_far_from_the_best() {
    let times = Times {
        enable: 3 * MS,
        ..MEDIUM
    };
    let host = Host::of(8, times);
    let best = search(&host, Rule::NothingSpins, 60_000 * MS, 1_000_000).usable;
    let former = run(&host, &mut OneBesideTheLane).expect("it ends").usable;
    assert!(former * 100 > best * 115);
}

/// No order that enables no GPU inside a third part is over 0.2 % faster than the schedule. Orders
/// that know where in it the accesses are, which no guest sees, are.
#[test]
fn the_schedule_is_near_the_best_order_by_what_is_seen() {
    for gpus in [2, 4, 8] {
        let host = Host::of(gpus, MEDIUM);
        let none = Overhead::default();
        let ours = drive(&host.to_be_loaded(), policy(gpus, 2), &[], none, 0).outcome;
        let best = |rule| search(&host, rule, 60_000 * MS, 1_000_000).usable;
        let (seen, knowing) = (best(Rule::AsSeen), best(Rule::NothingSpins));
        assert!(ours.usable * 1000 <= seen * 1002, "{gpus}: {ours:?} {seen}");
        // Negative control.
        assert!(
            gpus == 2 || knowing * 1000 < seen * 990,
            "{gpus}: {knowing} {seen}"
        );
    }
}

/// The same with a driver whose first parts nobody sees the end of: no order that enables nothing
/// as long as one is assumed to run is over 1 % faster.
#[test]
fn the_schedule_is_near_the_best_order_by_what_is_assumed() {
    for gpus in [2, 4, 8] {
        let slow = Times {
            enable: 3300 * MS,
            ..MEDIUM
        };
        let host = Host {
            relaxed: false,
            sees_attach: false,
            ..Host::of(gpus, slow)
        };
        let mut policy = policy(gpus, 2);
        policy.facts.driver = "535.230.02".parse().ok();
        let none = Overhead::default();
        let ours = drive(&host.to_be_loaded(), policy, &[], none, 0).outcome;
        let best = |host| search(host, Rule::AsSeen, 60_000 * MS, 1_000_000).usable;
        let assuming = best(&host);
        assert!(
            ours.usable * 100 <= assuming * 101,
            "{gpus}: {ours:?} {assuming}"
        );
        // Negative control: orders that see it.
        let seeing = best(&Host {
            sees_attach: true,
            ..host.clone()
        });
        assert!(seeing * 100 < assuming * 99, "{gpus}: {seeing} {assuming}");
    }
}
