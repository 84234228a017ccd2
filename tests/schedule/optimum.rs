//! The best possible order, by search: branch and bound over the worlds that can be reached, each
//! of them visited once.
//!
//! Decisions: enable the next GPU, probe one (before it is enabled, too, where probes sleep), open
//! a bound one, load, or wait for the next event; at events, and where probes sleep also at moments
//! from which a sleep ends with an enabling. A GPU that is bound is looked at in the same moment,
//! because that publishes it. All GPUs are equal. No enabling begins beside a probe or a look that
//! neither sleeps nor waits for the driver; what else an order keeps to is the [`Rule`].
//!
//! Complete searches are exact among such orders (a hash of 128 bits identifies a world).

mod bound;

use super::locks::{At, Host, Micros, Order, Wait, World};
use super::policies::probing;
use bound::least;
use kata_gpu_init::boot::bring_up::deadlines::Limit;
use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// Constraint on an order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rule {
    /// Nothing spins beside an enabling: no config access but the first one of an S3, no load, no
    /// second enabling. No enabling begins inside an S3 with accesses to come.
    NothingSpins,
    /// The same, and no enabling begins inside an S3 at all: nothing shows a guest where in it the
    /// accesses are. Where it does not see the end of an S1, none begins for as long as the init
    /// assumes ([`Limit::Attach`]).
    AsSeen,
    /// No enabling begins inside an S1.
    NoneInsideS1,
    None,
}

/// Result of a search.
#[derive(Clone, Debug)]
pub struct Found {
    /// The last usable GPU of the best order found, and that order; none where nothing beats what
    /// was known.
    pub usable: Micros,
    pub orders: Vec<(Micros, Order)>,
    /// No order is faster than this: `usable` where the search was complete.
    pub bound: Micros,
    pub visited: usize,
}

/// Spreads a time over the bits of a key.
const MIXER: u128 = 0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835;

/// Keys are hashes already.
#[derive(Default)]
pub struct AsIs(u64);

impl Hasher for AsIs {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, _: &[u8]) {
        unreachable!("keys are u128")
    }

    fn write_u128(&mut self, key: u128) {
        self.0 = (key >> 64) as u64 ^ key as u64;
    }
}

/// Decision that is still open at this moment: orders of one moment are tried in this order only.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Turn {
    Opens,
    Probes,
    Lane,
}

struct Search {
    best: Micros,
    orders: Vec<(Micros, Order)>,
    path: Vec<(Micros, Order)>,
    seen: HashMap<u128, Micros, BuildHasherDefault<AsIs>>,
    rule: Rule,
    visited: usize,
    most: usize,
}

/// Searches for an order that is no slower than `known`; gives up after `most` worlds.
pub fn search(host: &Host, rule: Rule, known: Micros, most: usize) -> Found {
    let world = World::new(host);
    let bound = least(&world, rule);
    let (orders, path, seen) = (Vec::new(), Vec::new(), HashMap::default());
    let mut search = Search {
        best: known + 1,
        orders,
        path,
        seen,
        rule,
        visited: 0,
        most,
    };
    search.visit(world, Turn::Opens);
    let bound = if search.visited < most {
        search.best
    } else {
        bound
    };
    Found {
        usable: search.best,
        orders: search.orders,
        bound,
        visited: search.visited,
    }
}

impl Search {
    fn visit(&mut self, mut world: World, turn: Turn) {
        let before = self.path.len();
        self.visited += 1;
        while let Some(gpu) = world.first(At::Bound) {
            self.path.push((world.now(), Order::Look(gpu)));
            world.order(Order::Look(gpu));
        }
        self.decide(&world, turn);
        self.path.truncate(before);
    }

    fn decide(&mut self, world: &World, turn: Turn) {
        if world.settled() {
            if world.now() < self.best {
                self.best = world.now();
                self.orders.clone_from(&self.path);
            }
            return;
        }
        if self.visited >= self.most || world.now() + least(world, self.rule) >= self.best {
            return;
        }
        let assumed = self.assumed(world);
        let key = world.shape() ^ turn as u128 ^ MIXER.wrapping_mul(assumed.into());
        let seen = self.seen.entry(key).or_insert(Micros::MAX);
        if *seen <= world.now() {
            return;
        }
        *seen = world.now();
        if turn == Turn::Opens
            && world.loaded()
            && let Some(gpu) = world.first(At::Known)
        {
            self.take(world, Order::Open(gpu), Turn::Opens);
        }
        let firewall = world.host().gpus[0].times.firewall > 0;
        if turn <= Turn::Probes && world.registered() {
            let one = world
                .counts(|at| matches!(at, At::Sleep | At::ProbeEnable | At::Probe | At::Uuid))
                > 0;
            if let Some(gpu) = world.first(At::Enabled).filter(|_| firewall || !one) {
                self.take(world, Order::Probe(gpu), Turn::Probes);
            }
            if let Some(gpu) = world.first(At::Present).filter(|_| firewall) {
                self.take(world, Order::Probe(gpu), Turn::Probes);
            }
        }
        if !world.load_begun()
            && let Some(gpu) = world.first(At::Enabled).or(world.first(At::Present))
        {
            self.take(world, Order::Load(gpu), Turn::Probes);
        }
        let locked = match self.rule {
            Rule::NothingSpins => world.attaching() || world.loads_state(),
            Rule::AsSeen => world.attaching() || world.is_in_s3() || assumed > 0,
            Rule::NoneInsideS1 => world.attaching(),
            Rule::None => false,
        };
        let stalls = locked || probing(world);
        if let Some(gpu) = world.first(At::Present)
            && world.mapping().is_none()
            && world.spinning() == 0
            && !stalls
        {
            self.take(world, Order::Enable(gpu), Turn::Lane);
        }
        let mut later = world.clone();
        loop {
            let probes_at = looks(&later).filter(|_| firewall && world.registered());
            let assumed = self.assumed(&later);
            let free_at = (assumed > 0).then(|| later.now() + assumed);
            let looks_at = probes_at.into_iter().chain(free_at).min();
            if !later.advance(looks_at) || self.breaks_rule(&later) {
                return;
            }
            if later.settled() || looks_at == Some(later.now()) || self.significant(world, &later) {
                return self.visit(later, Turn::Opens);
            }
        }
    }

    /// Time for which an S1 is still assumed to run that nobody sees the end of.
    fn assumed(&self, world: &World) -> Micros {
        if self.rule != Rule::AsSeen || world.host().sees_attach {
            return 0;
        }
        let opened = |(at, order): &(Micros, Order)| matches!(order, Order::Open(_)).then_some(*at);
        let last = self.path.iter().rev().find_map(opened);
        let attach = Limit::Attach.after().as_micros() as Micros;
        last.map_or(0, |at| (at + attach).saturating_sub(world.now()))
    }

    fn breaks_rule(&self, world: &World) -> bool {
        let mapped_by_probe = || {
            world
                .mapping()
                .is_some_and(|gpu| world.at(gpu) == At::ProbeEnable)
        };
        match self.rule {
            Rule::NothingSpins | Rule::AsSeen => world.spinning() > world.states_to_begin(),
            Rule::NoneInsideS1 => mapped_by_probe() && world.attaching(),
            Rule::None => false,
        }
    }

    /// Whether anything has happened after which a decision can be worth it.
    fn significant(&self, before: &World, after: &World) -> bool {
        self.rule == Rule::None
            || (0..before.count()).any(|k| {
                let (was, is) = (before.at(k), after.at(k));
                was != is && !matches!(is, At::Attach(1..) | At::State(1))
            })
            || before.loaded() != after.loaded()
    }

    fn take(&mut self, world: &World, order: Order, turn: Turn) {
        let mut next = world.clone();
        next.order(order);
        if self.breaks_rule(&next) {
            return;
        }
        self.path.push((world.now(), order));
        self.visit(next, turn);
        self.path.pop();
    }
}

/// A moment at which a probe can begin whose sleep ends with an enabling, or with as many S1 as fit
/// behind one.
fn looks(world: &World) -> Option<Micros> {
    let gpu = world.mapping()?;
    let Wait::Until(end) = world.waits(gpu) else {
        return None;
    };
    let times = world.host().gpus[gpu].times;
    let due = |(enablings, s1): (Micros, Micros)| {
        let wakes = end + enablings * times.enable + s1 * times.s1;
        wakes.checked_sub(times.firewall)
    };
    let ways = [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2)];
    ways.into_iter()
        .filter_map(due)
        .filter(|at| *at > world.now())
        .min()
}
