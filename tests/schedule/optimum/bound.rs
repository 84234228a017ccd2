//! Lower bound of the time of every order, from a world on.
//!
//! Three reasons: the way of one GPU; the lane, beside which no S1 gets on; the driver's lock,
//! under which are all S1 and S3, and no S3 beside an S2.

use super::Rule;
use crate::locks::{At, Micros, World};

/// Time that is still to be spent.
#[derive(Default)]
struct Left {
    /// In the lane.
    enable: Micros,
    /// In all S1 and in all S3.
    s1: Micros,
    s3: Micros,
    /// In the longest S2 that is under way; in all S2.
    longest_s2: Micros,
    s2: Micros,
    /// The longest way of one GPU.
    way: Micros,
    /// Until the first GPU can be bound, if none is initialising.
    soonest: Option<Micros>,
    begun: bool,
}

/// The least time to the last usable GPU.
pub fn least(world: &World, rule: Rule) -> Micros {
    let left = Left::of(world);
    let S { s1, s2, s3 } = S::of(world);
    let first = left.soonest.filter(|_| !left.begun).unwrap_or(0);
    // After the last S1 its GPU boots, and no S3 runs beside that.
    let relaxed = left.s1 + if left.s1 > 0 { s2 } else { left.longest_s2 } + left.s3;
    let driver = first
        + if world.host().relaxed {
            relaxed
        } else {
            left.s1 + left.s2 + left.s3
        };
    // The last of all enablings and S1 is an S1.
    let lane = match rule {
        _ if left.enable == 0 => 0,
        Rule::NothingSpins | Rule::AsSeen | Rule::NoneInsideS1 => left.enable + left.s1 + s2 + s3,
        Rule::None => left.enable + s1 + s2 + s3,
    };
    left.way.max(driver).max(lane)
}

struct S {
    s1: Micros,
    s2: Micros,
    s3: Micros,
}

impl S {
    fn of(world: &World) -> Self {
        let times = world.host().gpus[0].times;
        Self {
            s1: times.s1,
            s2: times.s2,
            s3: times.s3,
        }
    }
}

impl Left {
    fn of(world: &World) -> Self {
        let mut left = Self::default();
        for gpu in 0..world.count() {
            left.add(world, gpu);
        }
        left
    }

    fn add(&mut self, world: &World, gpu: usize) {
        let S { s1, s2, s3 } = S::of(world);
        let times = world.host().gpus[gpu].times;
        let timer = world.timer_left(gpu);
        let enable = match (world.is_enabled(gpu), world.mapping() == Some(gpu)) {
            (true, _) => 0,
            (false, true) => timer,
            (false, false) => times.enable,
        };
        // A GPU is enabled before its sleep or after it, not beside it.
        let probe = match world.at(gpu) {
            At::Present | At::Enable | At::Enabled => times.firewall + times.probe,
            At::Sleep => timer + times.probe,
            At::ProbeEnable => times.probe,
            At::Probe => timer,
            At::Uuid | At::Bound | At::Look | At::Known => 0,
            At::Attach(_) => {
                let attach = world.s1_left(gpu);
                (self.s1, self.s2, self.s3) = (self.s1 + attach, self.s2 + s2, self.s3 + s3);
                (self.way, self.begun) = (self.way.max(attach + s2 + s3), true);
                return;
            }
            At::Boot => {
                (self.s2, self.s3) = (self.s2 + timer, self.s3 + s3);
                self.longest_s2 = self.longest_s2.max(timer);
                (self.way, self.begun) = (self.way.max(timer + s3), true);
                return;
            }
            At::State(_) => {
                let state = world.s3_left(gpu);
                (self.s3, self.way, self.begun) = (self.s3 + state, self.way.max(state), true);
                return;
            }
            At::Absent | At::Usable | At::Failed | At::Hung => return,
        };
        self.enable += enable;
        (self.s1, self.s2, self.s3) = (self.s1 + s1, self.s2 + s2, self.s3 + s3);
        self.way = self.way.max(enable + probe + s1 + s2 + s3);
        self.soonest = Some(self.soonest.unwrap_or(Micros::MAX).min(enable + probe));
    }
}
