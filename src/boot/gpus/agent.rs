//! The agent's looks at the CDI spec, its containers, and the waits of the enable lane for both.
//! Container creation needs RCU grace periods, and none ends while a vCPU is gone for an enabling.
//! Pure.
//!
//! The lane waits:
//! - while a container is being made;
//! - after a publication, for the looks of the containers that wait;
//! - after the look of an unknown container, which may find all its GPUs.
//!
//! Containers that found nothing are not waited for again.

use super::deadlines::Limit;
use super::messages::{Hold, Time};
use std::time::Duration;

/// Limit of counted looks.
const MOST_LOOKS: usize = 64;
/// Interval between two looks of a waiting container, shortest and longest: the agent sleeps one
/// second, and its timer may be late by most of an enabling.
const LOOK_PERIOD: (Duration, Duration) = (Duration::from_millis(900), Duration::from_millis(2000));
/// Consecutive waits in vain after which the lane waits for no look until a container is made.
const MOST_IN_VAIN: u32 = 2;

/// The agent's state, as far as the lane depends on it.
#[derive(Clone, Debug, Default)]
pub struct Agent {
    /// Looks within the last period, one for each waiting container.
    looks: Vec<Time>,
    first_look: Option<Time>,
    any_published: bool,
    /// Number of containers in the making.
    making: u32,
    /// Begin of the first container in the making, or of the last container's program.
    since: Time,
    /// Whether any container was made.
    pub any: bool,
    /// Last publication that the lane waits for, and the number of containers that waited at that
    /// time and have not looked since.
    published: Option<(Time, usize)>,
    /// Time until which the last look may bring a container.
    decides: Option<Time>,
    /// Consecutive waits for looks that brought no container: the containers wait for more GPUs.
    in_vain: u32,
}

impl Agent {
    /// Notes a look at the spec.
    pub fn looked(&mut self, now: Time) {
        let repeats = |at: &Time| now >= *at + LOOK_PERIOD.0 && now < *at + LOOK_PERIOD.1;
        let known = self.looks.iter().any(repeats);
        self.looks.retain(|at| now < *at + LOOK_PERIOD.1);
        // Looks beyond the limit are not counted: no agent looks that often.
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
        // An unknown container may find all its GPUs.
        if last || !known && self.any_published && self.in_vain < MOST_IN_VAIN {
            self.close_look(now);
            let slow = first + Limit::LookFirst.after();
            self.decides = Some(slow.max(now + Limit::LookAgain.after()));
        }
    }

    /// Counts a look that has brought no container in its time as in vain. A look before the first
    /// publication does not count: it could find nothing.
    fn close_look(&mut self, now: Time) {
        let over = self.decides.take().is_some_and(|until| now >= until);
        self.in_vain += u32::from(over && self.any_published);
    }

    /// Notes the begin of a container's creation.
    pub fn begins(&mut self, now: Time) {
        if self.making == 0 {
            self.since = now;
        }
        self.making += 1;
        // The container that looked last no longer waits.
        self.looks.pop();
        (self.any, self.decides, self.in_vain) = (true, None, 0);
    }

    /// Notes the start of a container's program.
    pub fn runs(&mut self, now: Time) {
        self.making = self.making.saturating_sub(1);
        self.since = now;
    }

    /// Notes a publication. The lane waits for looks where containers wait and the last waits were
    /// not in vain.
    pub fn published(&mut self, now: Time) {
        self.looks.retain(|at| now < *at + LOOK_PERIOD.1);
        self.close_look(now);
        self.any_published = true;
        self.in_vain += u32::from(self.published.take().is_some());
        if self.in_vain == 0 && !self.looks.is_empty() {
            self.published = Some((now, self.looks.len()));
        }
    }

    /// Times at which [`Agent::holds`] may change without a new fact.
    pub fn deadlines(&self) -> [Option<Time>; 3] {
        let making = (self.making > 0).then(|| self.since + Limit::ContainerMade.after());
        let published = self.published.map(|(published, _)| published + Limit::AgentLook.after());
        [making, published, self.decides]
    }

    /// Reason for the lane to wait for the agent now.
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
