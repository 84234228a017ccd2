//! GPUs whose probe sleeps for up to 4 s until their BAR firewall is down (Blackwell): when such a
//! probe begins, so that it does not wake beside an enabling. It would spin there until that is
//! over, with the driver's global lock held.

use super::{Gpu, Load, Schedule, Stage};
use crate::boot::gpus::deadlines::Limit;
use crate::boot::gpus::messages::{GpuId, Order, Probe, Time};
use crate::config::Bind;
use crate::pci::BAR_FIREWALL_WAIT;
use std::time::Duration;

impl Schedule {
    /// Whether a probe sleeps behind the BAR firewall, for at least `more`.
    pub(super) fn sleeps(&self, gpu: &Gpu, more: Duration, now: Time) -> bool {
        self.has_firewall() && matches!(gpu.stage, Stage::Probing(_)) && now + more < self.probing_since(gpu) + BAR_FIREWALL_WAIT
    }

    /// When the probe of a GPU began: that of the load with its registration.
    pub(super) fn probing_since(&self, gpu: &Gpu) -> Time {
        match (gpu.stage, self.load) {
            (Stage::Probing(Probe::Load), Load::Runs { registered: Some(at), .. }) => at,
            _ => gpu.since,
        }
    }

    /// Whether probes sleep beside a lane that is slow.
    pub(super) fn sleeps_while_enabling(&self) -> bool {
        let concurrent = self.strategy.as_ref().is_some_and(|strategy| strategy.bind == Bind::Concurrent);
        concurrent && self.has_firewall() && self.is_slow() && self.is_loaded()
    }

    /// When the enablings under way, and those that sleeping probes will do, are expected to be
    /// over: now, if there is none.
    pub(super) fn lane_ends(&self, now: Time) -> Time {
        let took = self.lane.took.unwrap_or_default();
        let ends = |gpu: &Gpu| match gpu.stage {
            Stage::Enabling => Some(gpu.since + took),
            Stage::Probing(Probe::BeforeEnable) => Some(gpu.since + BAR_FIREWALL_WAIT + took),
            _ => None,
        };
        self.gpus.values().filter_map(ends).fold(now, Time::max)
    }

    /// When the next GPU may be probed. A probe that wakes beside an enabling spins until that is
    /// over, with the driver's global lock held: so where the lane is slow, it begins when it will
    /// wake at the end of one.
    pub(super) fn probe_at(&self, now: Time) -> Time {
        if !self.sleeps_while_enabling() {
            return now;
        }
        let (ends, step) = (self.lane_ends(now), self.attach() + self.lane.took.unwrap_or_default());
        let first = u32::from(ends == now);
        let left = self.waiting().count() as u32;
        let wakes = (first..=left).map(|n| ends + step * n).find(|end| *end + Limit::WakesSoon.after() >= now + BAR_FIREWALL_WAIT);
        wakes.map_or(now, |wakes| wakes.saturating_sub(BAR_FIREWALL_WAIT))
    }

    /// The last GPU behind a firewall sleeps while the one before it is enabled, and the driver
    /// enables it when it wakes. Only the last one: what sleeps cannot be kept from being enabled.
    pub(super) fn probe_before_enabling(&mut self, now: Time, orders: &mut Vec<Order>) {
        if let Some((last, _)) = self.sleeps_at(now).filter(|(_, at)| *at <= now) {
            self.begin(last, Stage::Probing(Probe::BeforeEnable), now);
            orders.push(Order::Probe(last, Probe::BeforeEnable));
        }
    }

    /// That GPU, and when its sleep has to begin so that it wakes when the lane is free.
    pub(super) fn sleeps_at(&self, now: Time) -> Option<(GpuId, Time)> {
        let mut waiting = self.waiting();
        let (Some(last), None) = (waiting.next(), waiting.next()) else { return None };
        let asleep = self.any(|gpu| gpu.stage == Stage::Probing(Probe::BeforeEnable));
        let wakes = self.lane_ends(now) + self.attach();
        (self.sleeps_while_enabling() && !asleep && self.gpus.len() > 1).then(|| (last, wakes.saturating_sub(BAR_FIREWALL_WAIT)))
    }

    /// Whether a probe that begins now is over when the load's own probe is: the load does not end
    /// before those beside it do. One that hangs there keeps the load from ending.
    pub(super) fn load_waits_for_probe(&self, now: Time) -> bool {
        let enables = self.lane.took.unwrap_or_default() + Limit::LoadSleeps.after();
        matches!(self.load, Load::Runs { registered: Some(registered), .. } if now <= registered + enables)
    }
}
