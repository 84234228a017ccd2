//! What is seen of the agent, and when the enable lane waits for it: container creation needs grace
//! periods of RCU, and none ends while a vCPU is gone for an enabling. Pure.
//!
//! The lane waits while a container is being made; after a publication, for the looks of the
//! containers that wait; after the look of a container that was not known, because it may find all
//! that it wants. It does not wait again for those who found nothing.

use super::deadlines::Limit;
use super::messages::{Hold, Time};
use std::time::Duration;

/// Looks of the agent that are counted.
const MOST_LOOKS: usize = 64;
/// A container that waits looks once a second: between these times after its last look.
const LOOK_PERIOD: (Duration, Duration) = (Duration::from_millis(900), Limit::AgentLook.after());
/// Waits for looks in vain, one after another, after which nobody is waited for any more until a
/// container is made.
const MOST_IN_VAIN: u32 = 2;

/// What is seen of the agent.
#[derive(Clone, Debug, Default)]
pub struct Agent {
    /// Looks within the last period: one for each container that waits.
    looks: Vec<Time>,
    any_published: bool,
    /// Containers in the making, and since when the first of them.
    making: u32,
    since: Time,
    /// Whether any container was seen.
    pub any: bool,
    /// The last publication for which the lane waits, and how many containers that waited then have
    /// not looked since.
    published: Option<(Time, usize)>,
    /// The last look that may bring a container.
    decides: Option<(Time, Limit)>,
    /// Waits for looks, one after another, that brought none: who waits, waits for more GPUs.
    in_vain: u32,
}

impl Agent {
    /// A look at the spec.
    pub fn looked(&mut self, now: Time) {
        let repeats = |at: &Time| now >= *at + LOOK_PERIOD.0 && now < *at + LOOK_PERIOD.1;
        let known = self.looks.iter().any(repeats);
        self.looks.retain(|at| now < *at + LOOK_PERIOD.1);
        // A guest that looks more often than any agent counts as one that waits.
        if self.looks.len() < MOST_LOOKS {
            self.looks.push(now);
        }
        let last = match &mut self.published {
            Some((_, left)) => {
                *left = left.saturating_sub(1);
                *left == 0
            }
            None => false,
        };
        if last {
            self.published = None;
        }
        // One that is not known yet may find all that it wants.
        if last || !known && self.in_vain < MOST_IN_VAIN {
            self.close_look(now);
            self.decides = Some((now, if known { Limit::LookAgain } else { Limit::LookFirst }));
        }
    }

    /// A look that has brought no container in its time was in vain: not one before the first
    /// publication, when there was nothing to be found.
    fn close_look(&mut self, now: Time) {
        let over = self.decides.take().is_some_and(|(looked, limit)| now >= looked + limit.after());
        self.in_vain += u32::from(over && self.any_published);
    }

    /// A container is being made.
    pub fn begins(&mut self, now: Time) {
        if self.making == 0 {
            self.since = now;
        }
        self.making += 1;
        (self.any, self.decides, self.in_vain) = (true, None, 0);
    }

    /// The program of a container runs.
    pub fn runs(&mut self, now: Time) {
        self.making = self.making.saturating_sub(1);
        self.since = now;
    }

    /// A wait for looks is worth its time where containers wait, and the last such waits were not
    /// in vain.
    pub fn published(&mut self, now: Time) {
        self.looks.retain(|at| now < *at + LOOK_PERIOD.1);
        self.close_look(now);
        self.any_published = true;
        self.in_vain += u32::from(self.published.take().is_some());
        if self.in_vain == 0 && !self.looks.is_empty() {
            self.published = Some((now, self.looks.len()));
        }
    }

    /// When [`Agent::holds`] may change by itself.
    pub fn deadlines(&self) -> [Option<Time>; 3] {
        let making = (self.making > 0).then(|| self.since + Limit::ContainerMade.after());
        let published = self.published.map(|(published, _)| published + Limit::AgentLook.after());
        [making, published, self.decides.map(|(looked, limit)| looked + limit.after())]
    }

    /// What of it keeps the lane waiting.
    pub fn holds(&self, now: Time) -> Option<Hold> {
        let within = |since: Time, limit: Limit| now < since + limit.after();
        if self.making > 0 && within(self.since, Limit::ContainerMade) {
            return Some(Hold::Container);
        }
        let look = self.published.is_some_and(|(published, _)| within(published, Limit::AgentLook));
        let decides = self.decides.is_some_and(|(looked, limit)| within(looked, limit));
        (look || decides).then_some(Hold::AgentLook)
    }
}
