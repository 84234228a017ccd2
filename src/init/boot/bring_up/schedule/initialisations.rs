//! Waves of initialisations: which bound GPUs initialise now, how long a wave is expected to take,
//! and the measurement of each finished wave. Cost model: [`waves`](crate::boot::bring_up::waves).

use super::{Gpu, Load, Schedule, Stage, Wave};
use crate::boot::bring_up::deadlines::Limit;
use crate::boot::bring_up::schedule_messages::{GpuId, Order, Probe, Time};
use crate::boot::bring_up::strategy::Strategy;
use crate::boot::bring_up::waves::{Costs, H100, LONGEST, Parts};
use crate::config::Init;
use kata_gpu_wire::pci_address::BAR_FIREWALL_WAIT;
use std::time::Duration;

impl Schedule {
    /// Whether the lane is enabling a GPU, or will begin to within `soon`.
    fn lane_enables(&self, soon: Duration, now: Time) -> bool {
        let enables = |gpu: &Gpu| match gpu.stage {
            Stage::Enabling => true,
            Stage::Probing(Probe::BeforeEnable) => !self.sleeps(gpu, soon, now),
            _ => false,
        };
        self.any(|gpu| enables(gpu) && gpu.within(Limit::LaneFirst, now))
    }

    /// Whether an initialisation that begins now would delay the probe or publication of a GPU that
    /// waits.
    fn others_come_first(&self, now: Time) -> bool {
        // On a slow lane GPUs are enabled seconds apart, so a sleeping probe is far from its end.
        let near = if self.is_slow() {
            Limit::WakesSoon
        } else {
            Limit::ProbesFirst
        }
        .after();
        let asleep = |gpu: &Gpu| self.sleeps(gpu, near, now);
        let awake = |gpu: &Gpu| matches!(gpu.stage, Stage::Probing(_)) && !asleep(gpu);
        let slept = |gpu: &Gpu| match self.has_firewall() {
            true => self.probing_since(gpu) + BAR_FIREWALL_WAIT,
            // A wave keeps probes waiting for the global lock; not one that hangs.
            false if gpu.within(Limit::LaneHold, now) => gpu.since.max(self.wave_over),
            false => gpu.since,
        };
        let probed = |gpu: &Gpu| awake(gpu) && now < slept(gpu) + Limit::ProbesFirst.after();
        let may_probe = self.is_loaded() && self.probe_at(now) <= now;
        let next = |gpu: &Gpu| {
            may_probe && gpu.stage == Stage::Enabled && gpu.within(Limit::LaneHold, now)
        };
        let read = |gpu: &Gpu| gpu.stage == Stage::Probed && gpu.within(Limit::ProbesFirst, now);
        let probes = self.any(probed) || self.any(read) || self.any(next) && !self.any(awake);
        let until = |at: Time| at + Limit::UvmFirst.after();
        let uvm = matches!(self.load, Load::Loaded { at, uvm: false, .. } if now < until(at));
        probes || uvm
    }

    /// Whether the programs of containers have the driver for themselves: after a wave while GPUs
    /// are still to be enabled, and after the GPUs that are to be first. Behind the lane all that
    /// are left begin at once. Where each GPU is a wave, only the first one is worth the time.
    fn programs_come_first(&self, now: Time) -> bool {
        let over = |gpu: &&Gpu| is_over(gpu.stage);
        let lane = self.any(|gpu| matches!(gpu.stage, Stage::New | Stage::Enabling));
        let worth = self.is_parallel() || self.gpus.values().filter(over).count() == 1;
        let first = self.policy.first;
        let only_first = self.gpus.values().take(first).any(|gpu| over(&gpu))
            && !self.gpus.values().skip(first).any(|gpu| over(&gpu));
        let paused = self.wave.is_none() && now < self.wave_over + Limit::ProgramsFirst.after();
        paused && (lane && worth && self.agent.any || only_first)
    }

    /// Whether the GPUs that are to be first are still to initialise, for a bounded time each.
    fn first_are_to_come(&self, now: Time) -> bool {
        let mut first = self.gpus.values().take(self.policy.first);
        first.any(|gpu| !is_over(gpu.stage) && gpu.within(Limit::LaneFirst, now))
    }

    fn is_parallel(&self) -> bool {
        let is_parallel = |strategy: &Strategy| strategy.init == Init::Parallel;
        self.strategy.as_ref().is_none_or(is_parallel) && self.policy.one_at_a_time().is_none()
    }

    /// Costs of enabling and initialising in this boot, as far as known.
    pub(super) fn costs(&self) -> Costs {
        Costs::new(
            self.lane.took.unwrap_or_default(),
            self.is_parallel(),
            self.first_part,
            self.scale.unwrap_or(H100),
        )
    }

    /// Whether initialisations run that keep others waiting.
    pub(super) fn wave_runs(&self, now: Time) -> bool {
        self.any(|gpu| gpu.stage == Stage::Initialising && gpu.within(Limit::InitHangs, now))
    }

    /// Lets bound GPUs initialise, in PCI order: all that are bound in one wave, the rest after it.
    pub(super) fn initialise(&mut self, now: Time, orders: &mut Vec<Order>) {
        let (parallel, runs) = (self.is_parallel(), self.wave_runs(now));
        self.measure(now, runs);
        // Behind the first one that needs the global lock again, a first part would wait for the
        // second parts of all, and their last parts for its own second part.
        let is_early = |wave: Wave| now < wave.began + self.costs().first_is_back();
        let joins = parallel && self.attaches(now) && self.wave.is_none_or(is_early);
        if runs && !joins
            || self.any(|gpu| gpu.is_opening(now))
            || self.lane_enables(self.first_part(), now)
            || self.others_come_first(now)
            || self.programs_come_first(now)
        {
            return;
        }
        let is_left = |gpu: &&Gpu| matches!(gpu.stage, Stage::New | Stage::Enabling);
        let rest = self.gpus.values().filter(is_left).count();
        let is_worth = runs || self.costs().is_worth(rest);
        let only_first = self.first_are_to_come(now);
        let begins = |place: usize, gpu: &Gpu| match only_first {
            true => place < self.policy.first,
            false => is_worth || !gpu.within(Limit::LaneFirst, now),
        };
        let ready = |(place, (_, gpu)): &(usize, (_, &Gpu))| {
            gpu.stage == Stage::Bound && begins(*place, gpu)
        };
        let Some((_, (next, _))) = self.gpus.iter().enumerate().find(ready) else {
            return;
        };
        let next = *next;
        let new = Wave {
            began: now,
            count: 0,
            well: true,
        };
        let wave = self.wave.filter(|_| runs).unwrap_or(new);
        self.wave = Some(Wave {
            count: wave.count + 1,
            ..wave
        });
        self.enter(next, Stage::Initialising, now);
        orders.push(Order::Initialise(next));
    }

    /// Notes the begin of an initialisation, some time after its order.
    pub(super) fn opening(&mut self, id: GpuId, now: Time) {
        if let Some(gpu) = self.attaching(id) {
            gpu.since = now;
        }
        if self.policy.one_at_a_time().is_some() {
            self.assume_attached(id);
        }
    }

    /// Assumes the end of a first part that is not seen. First parts are one after another.
    pub(super) fn assume_attached(&mut self, id: GpuId) {
        let before = self.last_attached();
        if let Some(gpu) = self.attaching(id) {
            gpu.attached = Some(gpu.since.max(before.unwrap_or_default()) + Limit::Attach.after());
        }
    }

    /// Notes the end of a first part; the last one of a wave shows the duration of each.
    pub(super) fn attached(&mut self, id: GpuId, now: Time) {
        let Some(gpu) = self.attaching(id) else {
            return;
        };
        gpu.attached = Some(now);
        let attaches = self.any(|gpu| gpu.is_attaching(now));
        let is_measure =
            |wave: &Wave| wave.well && !attaches && now < wave.began + Limit::InitHangs.after();
        if let Some(wave) = self.wave.filter(is_measure) {
            let took = (now - wave.began) / wave.count;
            self.first_part = Some(self.first_part.unwrap_or(took).min(took));
        }
    }

    /// Notes the end of an initialisation.
    pub(super) fn initialised(&mut self, id: GpuId, well: bool, now: Time) {
        self.enter(id, Stage::Initialised, now);
        // A failed initialisation is short, so the wave's time is no measure.
        if let Some(wave) = &mut self.wave {
            wave.well &= well;
        }
    }

    /// Latest end of a first part, seen or assumed.
    fn last_attached(&self) -> Option<Time> {
        self.gpus.values().filter_map(|gpu| gpu.attached).max()
    }

    /// A GPU in the first part of its initialisation, whose end is not known yet.
    fn attaching(&mut self, id: GpuId) -> Option<&mut Gpu> {
        let gpu = self.gpus.get_mut(&id)?;
        (gpu.stage == Stage::Initialising && gpu.attached.is_none()).then_some(gpu)
    }

    /// Whether a first part is under way. Behind one that hangs, the others wait for its lock and
    /// not for the lane.
    pub(super) fn attaches(&self, now: Time) -> bool {
        let is_attaching = |gpu: &&Gpu| gpu.is_attaching(now);
        let mut attaching = self.gpus.values().filter(is_attaching).peekable();
        attaching.peek().is_some() && attaching.all(|gpu| gpu.within(Limit::LaneHold, now))
    }

    /// Expected end of a wave's second parts. No third part begins before.
    pub(super) fn boots_until(&self, wave: Wave) -> Time {
        let initialising = |gpu: &&Gpu| gpu.stage == Stage::Initialising;
        let attached = self.gpus.values().filter(initialising);
        let [s1, s2, _] = self.costs().parts;
        let attached = attached.filter_map(|gpu| gpu.attached).max();
        attached.unwrap_or(wave.began + s1 * wave.count) + s2
    }

    /// Expected duration of a first part.
    pub(super) fn first_part(&self) -> Duration {
        self.costs().parts[0]
    }

    /// Notes the end of a wave, and its duration where that is a measure of this driver.
    fn measure(&mut self, now: Time, runs: bool) {
        if let Some(wave) = self.wave.filter(|_| !runs) {
            (self.wave, self.wave_over) = (None, now);
            if wave.well && now < wave.began + Limit::InitHangs.after() {
                let scale = self.scale_of(wave, now).min(LONGEST);
                self.scale = Some(self.scale.unwrap_or(scale).min(scale));
            }
        }
    }

    /// Scale of the later parts of a wave that is over now. An enabling that outlasted the second
    /// parts has delayed the third parts, for its own time at most: these alone came behind it.
    fn scale_of(&self, wave: Wave, now: Time) -> u32 {
        let attached = self.last_attached().unwrap_or_default().max(wave.began);
        let scale = |parts: Parts, took: Duration| self.costs().scale_of(parts, wave.count, took);
        let all = scale(Parts::Later, now.saturating_sub(attached));
        let Some(enabled) = self.lane.enabled.filter(|at| *at > attached) else {
            return all;
        };
        let took = self.lane.took.unwrap_or_default();
        let least = scale(Parts::Later, now.saturating_sub(attached + took));
        scale(Parts::Third, now.saturating_sub(enabled)).clamp(least, all)
    }
}

/// Whether no initialisation of a GPU in this stage is to come or under way.
fn is_over(stage: Stage) -> bool {
    matches!(stage, Stage::Initialised | Stage::Usable | Stage::Failed)
}
