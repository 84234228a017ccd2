//! Reasons that keep the next GPU from being enabled. Work that needs all CPUs, the host or a grace
//! period waits until a slow enabling is over. The lane therefore lets such work go first, for a
//! bounded time each.

use super::{Gpu, Load, Schedule, Stage};
use crate::boot::bring_up::deadlines::Limit;
use crate::boot::bring_up::schedule_messages::{Hold, Probe, Time};
use kata_gpu_wire::pci_address::BAR_FIREWALL_WAIT;

impl Schedule {
    /// Adds the time since the last call to the current hold of the lane.
    pub(super) fn count_hold(&mut self, now: Time) {
        if let Some((hold, since)) = self.lane.held.take() {
            *self.lane.holds.entry(hold).or_default() += now.saturating_sub(since);
        }
    }

    /// Reason that keeps the next GPU from being enabled now.
    pub(super) fn hold(&self, now: Time) -> Option<Hold> {
        let held = |since: Time| now < since + Limit::LaneHold.after();
        match self.load {
            _ if self.strategy.is_none() => return self.agent_first(now),
            // The host's speed is not known yet.
            Load::Runs {
                since,
                registered: None,
            } if self.has_firewall() && held(since) => return Some(Hold::Load),
            _ if !self.is_slow() => return None,
            _ => {}
        }
        let load = match self.load {
            // An enabling that is not over when a sleeping load wakes would delay the load's end,
            // and with it the first publication.
            Load::Runs { since, registered } => {
                let since = self.load_needs_cpus_since(since, registered);
                now + self.lane.took.unwrap_or_default() >= since && held(since)
            }
            Load::Loaded { since, over, .. } => !over && held(since),
            Load::No | Load::Failed { .. } => false,
        };
        // Behind a probe that hangs, the next probe waits longer than the lane.
        let hangs = self.any(|gpu| {
            matches!(gpu.stage, Stage::Probing(_))
                && !held(gpu.since)
                && !self.sleeps(gpu, Limit::WakesSoon.after(), now)
        });
        let probe = |gpu: &Gpu| match gpu.stage {
            Stage::Enabled => {
                self.is_loaded()
                    && held(gpu.since)
                    && !hangs
                    && !self.wave_runs(now)
                    && self.probe_at(now) <= now
            }
            Stage::Probed => held(gpu.since),
            Stage::Probing(Probe::Load) => false,
            Stage::Probing(_) => {
                !self.sleeps(gpu, Limit::WakesSoon.after(), now) && held(gpu.since)
            }
            _ => false,
        };
        if load {
            Some(Hold::Load)
        } else if self.any(probe) {
            Some(Hold::Probe)
        } else if self.any(|gpu| gpu.publishing.is_some_and(held)) {
            Some(Hold::Publication)
        } else if self.attaches(now) {
            Some(Hold::Attach)
        } else {
            self.wave_holds(now).or_else(|| self.agent_waits(now))
        }
    }

    /// Agent state that the lane waits for. Near the lane's end a container that starts sooner
    /// computes no sooner: the GPUs that are left initialise in one wave with its own.
    fn agent_waits(&self, now: Time) -> Option<Hold> {
        let rest = u32::try_from(self.waiting().count()).unwrap_or(u32::MAX);
        let left = self.lane.took.unwrap_or_default().saturating_mul(rest);
        let near = left < Limit::LaneEnds.after() && self.policy.one_at_a_time().is_none();
        self.agent.holds(now).filter(|_| !near)
    }

    /// Whether third parts run: an enabling that begins now would stall one with all locks held.
    pub(super) fn wave_holds(&self, now: Time) -> Option<Hold> {
        let wave = self.wave.filter(|_| self.wave_runs(now))?;
        let patient =
            |gpu: &Gpu| gpu.stage == Stage::Initialising && gpu.within(Limit::LaneHold, now);
        let holds = now >= self.boots_until(wave) && self.any(patient);
        (holds && !self.has_firewall()).then_some(Hold::Wave)
    }

    /// Agent state that the first enabling waits for. On one vCPU nothing runs during an enabling.
    pub(super) fn agent_first(&self, now: Time) -> Option<Hold> {
        if self.policy.facts.vcpus > 1 || self.lane.took.is_some() {
            return None;
        }
        let waits = !self.agent.any && now < self.started + Limit::AgentFirst.after();
        waits
            .then_some(Hold::AgentStart)
            .or_else(|| self.agent.holds(now))
    }

    /// Time from which a load needs all CPUs: its begin, or the end of its first probe's sleep.
    pub(super) fn load_needs_cpus_since(&self, since: Time, registered: Option<Time>) -> Time {
        registered
            .filter(|_| self.has_firewall())
            .map_or(since, |registered| registered + BAR_FIREWALL_WAIT)
    }
}
