//! The search for the best order, against orders that it must not miss.

use kata_gpu_tests::schedule::locks::{At, Host, Micros, Order, Times, World};
use kata_gpu_tests::schedule::optimum::{Rule, search};
use kata_gpu_tests::schedule::policies::{OneBesideTheLane, Policy, Waves, run};
use kata_gpu_tests::schedule::random::Random;

const MS: Micros = 1000;
/// Parts of an H100's initialisation.
const S1: Micros = 300 * MS;
const S2: Micros = 1300 * MS;
const S3: Micros = 500 * MS;
/// An H100 on a host that maps its BARs in a second.
const MEDIUM: Times = Times {
    enable: 1000 * MS,
    firewall: 0,
    probe: 3 * MS,
    s1: S1,
    s2: S2,
    s3: S3,
};

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
            }
            world.order(*order);
        }
        while !world.settled() {
            assert!(world.advance(None));
        }
        assert_eq!(
            (world.now(), world.spun()),
            (found.usable, 0),
            "{gpus} GPUs"
        );
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
struct AtRandom(Random);

impl Policy for AtRandom {
    fn next(&mut self, world: &World) -> Option<Order> {
        if let Some(gpu) = world.first(At::Bound) {
            return Some(Order::Look(gpu));
        }
        let probing = world.counts(|at| matches!(at, At::Probe | At::Uuid | At::Look)) > 0;
        let idle = world.mapping().is_none() && !probing && !world.attaching();
        let nothing_else = world.next_event().is_none();
        let mut one_of =
            |order: Option<Order>| order.filter(|_| nothing_else || self.0.below(3) == 0);
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
    let mut random = Random::new(1);
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
                let seed = random.draw();
                let outcome = run(&host, &mut AtRandom(Random::new(seed)))?;
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

#[test]
fn waves_are_near_the_best_order_and_the_former_one_is_not() {
    let host = Host::of(
        8,
        Times {
            enable: 700 * MS,
            ..MEDIUM
        },
    );
    let best = search(&host, Rule::NothingSpins, 60_000 * MS, 1_000_000).usable;
    let usable = |policy: &mut dyn Policy| run(&host, policy).expect("it ends").usable;
    assert!(usable(&mut Waves::default()) * 100 < best * 105);
    assert!(usable(&mut OneBesideTheLane) * 100 > best * 115);
}
