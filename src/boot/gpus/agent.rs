//! The agent's looks at the CDI spec and its containers, and when the enable lane waits for them:
//! container creation needs grace periods of RCU, and none ends while a vCPU is gone for an
//! enabling. Pure.
//!
//! The lane waits while a container is being made; after a publication, for the looks of the
//! containers that wait; after the look of a container that was not known, because it may find all
//! that it wants. Containers that found nothing are not waited for again.

use super::deadlines::Limit;
use super::messages::{Hold, Time};
use std::time::Duration;

/// Looks of the agent that are counted.
const MOST_LOOKS: usize = 64;
/// A container that waits looks again between these times after its last look: it sleeps one
/// second, and its timer may be late by most of an enabling.
const LOOK_PERIOD: (Duration, Duration) = (Duration::from_millis(900), Duration::from_millis(2000));
/// Waits for looks in vain, one after another, after which nobody is waited for any more until a
/// container is made.
const MOST_IN_VAIN: u32 = 2;

/// The agent's state, as far as the lane depends on it.
#[derive(Clone, Debug, Default)]
pub struct Agent {
    /// Looks within the last period: one for each container that waits.
    looks: Vec<Time>,
    first_look: Option<Time>,
    any_published: bool,
    /// Containers in the making.
    making: u32,
    /// When the first of those in the making began, or when the last program of one did.
    since: Time,
    /// Whether any container was made.
    pub any: bool,
    /// The last publication for which the lane waits, and how many containers that waited then have
    /// not looked since.
    published: Option<(Time, usize)>,
    /// Until when the last look may bring a container.
    decides: Option<Time>,
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
        let first = *self.first_look.get_or_insert(now);
        // A container that is not known yet may find all that it wants.
        if last || !known && self.any_published && self.in_vain < MOST_IN_VAIN {
            self.close_look(now);
            let slow = first + Limit::LookFirst.after();
            self.decides = Some(slow.max(now + Limit::LookAgain.after()));
        }
    }

    /// A look that has brought no container in its time was in vain: not one before the first
    /// publication, when there was nothing to be found.
    fn close_look(&mut self, now: Time) {
        let over = self.decides.take().is_some_and(|until| now >= until);
        self.in_vain += u32::from(over && self.any_published);
    }

    /// A container is being made.
    pub fn begins(&mut self, now: Time) {
        if self.making == 0 {
            self.since = now;
        }
        self.making += 1;
        // The container that looked last waits no more.
        self.looks.pop();
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
        [making, published, self.decides]
    }

    /// The reason why the lane waits for the agent now.
    pub fn holds(&self, now: Time) -> Option<Hold> {
        let within = |since: Time, limit: Limit| now < since + limit.after();
        if self.making > 0 && within(self.since, Limit::ContainerMade) {
            return Some(Hold::Container);
        }
        let look = self.published.is_some_and(|(published, _)| within(published, Limit::AgentLook));
        let decides = self.decides.is_some_and(|until| now < until);
        (look || decides).then_some(Hold::AgentLook)
    }
}
