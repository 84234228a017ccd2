//! Begin of probes that sleep for up to 4 s until the GPU's BAR firewall is down (Blackwell). Such
//! a probe must not wake during an enabling: it would spin until the enabling is over, with the
//! driver's global lock held.

use super::{Gpu, Load, Schedule, Stage};
use crate::boot::bring_up::deadlines::Limit;
use crate::boot::bring_up::schedule_messages::{GpuId, Order, Probe, Time};
use crate::config::Bind;
use kata_gpu_wire::pci_address::BAR_FIREWALL_WAIT;
use std::time::Duration;

impl Schedule {
    /// Whether a probe sleeps behind the BAR firewall, for at least `more`.
    pub(super) fn sleeps(&self, gpu: &Gpu, more: Duration, now: Time) -> bool {
        self.has_firewall()
            && matches!(gpu.stage, Stage::Probing(_))
            && now + more < self.probing_since(gpu) + BAR_FIREWALL_WAIT
    }

    /// Begin of a GPU's probe; for the load's probe, the registration of the driver.
    pub(super) fn probing_since(&self, gpu: &Gpu) -> Time {
        match (gpu.stage, self.load) {
            (
                Stage::Probing(Probe::Load),
                Load::Runs {
                    registered: Some(at),
                    ..
                },
            ) => at,
            _ => gpu.since,
        }
    }

    /// Whether probes sleep while a slow lane enables.
    pub(super) fn sleeps_while_enabling(&self) -> bool {
        let concurrent = self
            .strategy
            .as_ref()
            .is_some_and(|strategy| strategy.bind == Bind::Concurrent);
        concurrent && self.has_firewall() && self.is_slow() && self.is_loaded()
    }

    /// Expected end of the enablings under way and of those that sleeping probes will do; `now` if
    /// there is none.
    pub(super) fn lane_ends(&self, now: Time) -> Time {
        let took = self.lane.took.unwrap_or_default();
        let ends = |gpu: &Gpu| match gpu.stage {
            Stage::Enabling => Some(gpu.since + took),
            Stage::Probing(Probe::BeforeEnable) => Some(gpu.since + BAR_FIREWALL_WAIT + took),
            _ => None,
        };
        self.gpus.values().filter_map(ends).fold(now, Time::max)
    }

    /// Time at which the next GPU may be probed. On a slow lane, a probe begins so that it wakes at
    /// the end of an enabling: a probe that wakes during one spins until the enabling is over, with
    /// the driver's global lock held.
    pub(super) fn probe_at(&self, now: Time) -> Time {
        if !self.sleeps_while_enabling() {
            return now;
        }
        let (ends, step) = (
            self.lane_ends(now),
            self.first_part() + self.lane.took.unwrap_or_default(),
        );
        let first = u32::from(ends == now);
        let left = self.waiting().count() as u32;
        let wakes = (first..=left)
            .map(|n| ends + step * n)
            .find(|end| *end + Limit::WakesSoon.after() >= now + BAR_FIREWALL_WAIT);
        wakes.map_or(now, |wakes| wakes.saturating_sub(BAR_FIREWALL_WAIT))
    }

    /// Probes the last GPU behind a firewall before it is enabled. The probe sleeps while the GPU
    /// before it is enabled; the driver enables the last GPU when the probe wakes. Limited to the
    /// last GPU: a sleeping probe cannot be kept from enabling.
    pub(super) fn probe_before_enabling(&mut self, now: Time, orders: &mut Vec<Order>) {
        if let Some((last, _)) = self.sleeps_at(now).filter(|(_, at)| *at <= now) {
            self.begin(last, Stage::Probing(Probe::BeforeEnable), now);
            orders.push(Order::Probe(last, Probe::BeforeEnable));
        }
    }

    /// The last GPU, and the time at which its probe must begin to wake when the lane is free.
    pub(super) fn sleeps_at(&self, now: Time) -> Option<(GpuId, Time)> {
        let mut waiting = self.waiting();
        let (Some(last), None) = (waiting.next(), waiting.next()) else {
            return None;
        };
        let asleep = self.any(|gpu| gpu.stage == Stage::Probing(Probe::BeforeEnable));
        let wakes = self.lane_ends(now) + self.first_part();
        (self.sleeps_while_enabling() && !asleep && self.gpus.len() > 1)
            .then(|| (last, wakes.saturating_sub(BAR_FIREWALL_WAIT)))
    }

    /// Whether a probe that begins now is expected to end with the load's own probe. The load does
    /// not end before the probes that run with it; a probe that hangs keeps the load from ending.
    pub(super) fn load_waits_for_probe(&self, now: Time) -> bool {
        let enables = self.lane.took.unwrap_or_default() + Limit::LoadSleeps.after();
        matches!(
            self.load,
            Load::Runs { registered: Some(registered), .. } if now <= registered + enables
        )
    }
}
