//! Orders of doing things, each run in a world.

use super::locks::{At, Fact, Host, Micros, Order, Wait, World};

/// Decides. Asked at every event, again and again until it wants nothing more.
pub trait Policy {
    fn next(&mut self, world: &World) -> Option<Order>;
}

/// Result of an order of doing things.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    /// The last usable GPU.
    pub usable: Micros,
    /// The last GPU that can be published.
    pub published: Micros,
    /// How long vCPUs have spun beside an enabling.
    pub spun: Micros,
    pub orders: Vec<(Micros, Order)>,
    pub facts: Vec<(Micros, Fact)>,
}

/// Runs a policy to the end; None where it gets stuck.
pub fn run(host: &Host, policy: &mut dyn Policy) -> Option<Outcome> {
    let (mut world, mut outcome) = (World::new(host).recording(), Outcome::default());
    loop {
        while let Some(order) = policy.next(&world) {
            outcome.orders.push((world.now(), order));
            world.order(order);
        }
        outcome.facts.extend(world.facts());
        if world.settled() {
            break;
        }
        if !world.advance(None) {
            return None;
        }
    }
    Some(
        Outcome {
            spun: world.spun(),
            ..outcome
        }
        .summed_up(),
    )
}

impl Outcome {
    /// Fills in the times from the facts.
    pub fn summed_up(mut self) -> Self {
        let facts = &self.facts;
        let times = |is: fn(&Fact) -> bool| {
            facts
                .iter()
                .filter(move |(_, fact)| is(fact))
                .map(|(at, _)| *at)
        };
        let usable = |fact: &Fact| matches!(fact, Fact::Initialised(_, true));
        let last_usable = times(usable).max().unwrap_or(0);
        let published = times(|fact| matches!(fact, Fact::Looked(_)))
            .max()
            .unwrap_or(0);
        (self.usable, self.published) = (last_usable, published);
        self
    }
}

/// Whether a GPU's probe that is through its sleep, or its look, would wait for an enabling which
/// begins now. A probe that waits for the driver does not count: it can get the driver behind that
/// enabling.
pub fn probes(world: &World, gpu: usize) -> bool {
    matches!(world.at(gpu), At::Probe | At::Uuid | At::Look | At::Bound)
        && world.waits(gpu) != Wait::Driver
}

/// Whether this holds for any GPU ([`probes`]).
pub fn probing(world: &World) -> bool {
    (0..world.count()).any(|gpu| probes(world, gpu))
}

fn any_probe(world: &World) -> bool {
    let probes = |at| matches!(at, At::Sleep | At::ProbeEnable | At::Probe | At::Uuid);
    world.counts(|at| probes(at) || matches!(at, At::Look | At::Bound)) > 0
}

fn initialising(world: &World) -> usize {
    world.counts(|at| matches!(at, At::Attach(_) | At::Boot | At::State(_)))
}

/// The order until now: each GPU is probed as it comes out of the lane, which waits for that; one
/// initialisation at a time beside the lane, all that are left together behind it.
#[derive(Default)]
pub struct OneBesideTheLane;

impl Policy for OneBesideTheLane {
    fn next(&mut self, world: &World) -> Option<Order> {
        if let Some(gpu) = world.first(At::Bound) {
            return Some(Order::Look(gpu));
        }
        if world.mapping().is_some() || any_probe(world) {
            return None;
        }
        if let Some(gpu) = world.first(At::Enabled) {
            return Some(Order::Probe(gpu));
        }
        let lane_over = world.first(At::Present).is_none();
        let may = initialising(world) == 0 || lane_over && world.attaching();
        if may && let Some(gpu) = world.first(At::Known) {
            return Some(Order::Open(gpu));
        }
        world
            .first(At::Present)
            .filter(|_| !world.attaching())
            .map(Order::Enable)
    }
}
