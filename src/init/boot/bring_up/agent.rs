//! The agent's looks at the CDI spec, its containers, and the waits of the enable lane for both.
//! Container creation needs RCU grace periods, and none ends while a vCPU is gone for an enabling.
//! Pure.
//!
//! The lane waits:
//! - while a container is being made;
//! - after the program of a pod's pause container, for the look of the next container;
//! - after a publication, for the looks of the containers that wait;
//! - after the look of an unknown container, which may find all its GPUs.
//!
//! Containers that found nothing are not waited for again, and nobody near the lane's end
//! ([`Limit::LaneEnds`]).

use super::deadlines::Limit;
use super::schedule_messages::{Hold, Time};
use std::time::Duration;

/// Limit of counted looks.
const MOST_LOOKS: usize = 64;
/// Interval between two looks of a waiting container, shortest and longest: the agent sleeps one
/// second, and its timer may be late by an enabling.
const LOOK_PERIOD: (Duration, Duration) = (Duration::from_millis(900), Duration::from_millis(5500));
/// New containers since the last one made for whose first look the lane waits.
const MOST_NEW: u32 = 2;

/// The agent's state, as far as the lane depends on it.
#[derive(Clone, Debug, Default)]
pub struct Agent {
    /// Whether the guest has a single vCPU.
    alone: bool,
    /// Last look of each waiting container.
    looks: Vec<Time>,
    first_look: Option<Time>,
    any_published: bool,
    /// Number of containers in the making.
    making: u32,
    /// Begin of the first container in the making, or end of the enabling that it began beside; or
    /// begin of the last container's program.
    since: Time,
    /// Whether an enabling has ended since the first container in the making began.
    outlasted: bool,
    /// Whether any container was made, and whether any program began.
    pub any: bool,
    any_ran: bool,
    /// Last publication that the lane waits for, and the number of containers that waited at that
    /// time and have not looked since.
    published: Option<(Time, usize)>,
    /// Time until which the last look may bring a container.
    decides: Option<Time>,
    /// Containers that have looked for the first time since the last one was made.
    new: u32,
    /// Whether the lane has waited after a publication since the last container was made. A second
    /// wait would be in vain, too: the containers wait for more GPUs.
    waited: bool,
}

impl Agent {
    /// An agent that has not done anything yet, in a guest of so many vCPUs.
    pub fn new(vcpus: usize) -> Self {
        Self {
            alone: vcpus <= 1,
            ..Self::default()
        }
    }

    /// Time from a look that finds all GPUs to the begin of the container.
    fn after_look(&self) -> Duration {
        // A single vCPU has the init's and the driver's work to do as well.
        if self.alone {
            Limit::LookFirst
        } else {
            Limit::LookAgain
        }
        .after()
    }

    /// Notes a look at the spec. The agent opens the spec twice in its first try for a container,
    /// and once a second from then on.
    pub fn looked(&mut self, now: Time) {
        self.looks.retain(|at| now < *at + LOOK_PERIOD.1);
        let first = *self.first_look.get_or_insert(now);
        // Looks beyond the limit are not counted: no agent looks that often.
        let new = self.looks.len() < MOST_LOOKS
            && self
                .looks
                .iter()
                .all(|at| now >= *at + Limit::LookFirst.after());
        let repeated = self
            .looks
            .iter_mut()
            .filter(|at| now >= **at + LOOK_PERIOD.0)
            .min();
        let unknown = repeated.is_none() && new;
        if let Some(look) = repeated {
            *look = now;
        } else if unknown {
            self.looks.push(now);
            self.new += 1;
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
        // A new container may find all its GPUs. The second opening of the agent's first try ever
        // comes late: behind the making of the validator.
        let slow = first + Limit::LookFirst.after();
        let may_find = self.any_published && (unknown && self.new <= MOST_NEW || now < slow);
        if last || may_find {
            self.decides = Some(slow.max(now + self.after_look()));
        }
    }

    /// Notes the begin of a container's creation.
    pub fn begins(&mut self, now: Time) {
        if self.making == 0 {
            (self.since, self.outlasted) = (now, false);
        }
        self.making += 1;
        // The container that looked last no longer waits.
        if let Some(last) = self
            .looks
            .iter()
            .enumerate()
            .max_by_key(|(_, at)| **at)
            .map(|(place, _)| place)
        {
            self.looks.swap_remove(last);
        }
        (self.any, self.decides, self.new, self.waited) = (true, None, 0, false);
    }

    /// Notes the end of an enabling: beside it no grace period ended, so a container in the making
    /// has all its time from here on; once, as one that hangs must not hold up each GPU.
    pub fn enabled(&mut self, now: Time) {
        if self.making > 0 && !self.outlasted {
            (self.since, self.outlasted) = (now, true);
        }
    }

    /// Notes the start of a container's program. Behind that of the pod's pause container the
    /// runtime asks for the next one, which looks at once.
    pub fn runs(&mut self, now: Time) {
        self.making = self.making.saturating_sub(1);
        self.since = now;
        if self.any_published && !self.any_ran && self.first_look.is_none() {
            self.decides = Some(now + Limit::LookFirst.after());
        }
        self.any_ran = true;
    }

    /// Notes a publication. The lane waits for the next looks of the containers that wait.
    pub fn published(&mut self, now: Time) {
        self.looks.retain(|at| now < *at + LOOK_PERIOD.1);
        self.any_published = true;
        if !self.waited && !self.looks.is_empty() {
            (self.published, self.waited) = (Some((now, self.looks.len())), true);
        }
    }

    /// Times at which [`Agent::holds`] may change without a new fact.
    pub fn deadlines(&self) -> [Option<Time>; 3] {
        let making = (self.making > 0).then(|| self.since + Limit::ContainerMade.after());
        let published = self
            .published
            .map(|(published, _)| published + Limit::AgentLook.after());
        [making, published, self.decides]
    }

    /// Reason for the lane to wait for the agent now.
    pub fn holds(&self, now: Time) -> Option<Hold> {
        let within = |since: Time, limit: Limit| now < since + limit.after();
        if self.making > 0 && within(self.since, Limit::ContainerMade) {
            return Some(Hold::Container);
        }
        let look = self
            .published
            .is_some_and(|(published, _)| within(published, Limit::AgentLook));
        let decides = self.decides.is_some_and(|until| now < until);
        (look || decides).then_some(Hold::AgentLook)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(ms: u64) -> Time {
        Time::from_millis(ms)
    }

    /// An agent after the looks of one container at these times, with a GPU published at 100 ms.
    fn looked(at: &[u64]) -> Agent {
        let mut agent = Agent::default();
        agent.published(ms(100));
        at.iter().for_each(|at| agent.looked(ms(*at)));
        agent
    }

    #[test]
    fn a_look_before_the_first_publication_holds_nothing() {
        let mut agent = Agent::default();
        agent.looked(ms(50));
        assert_eq!(agent.holds(ms(51)), None);
        agent.published(ms(100));
        assert_eq!(
            agent.holds(ms(101)),
            Some(Hold::AgentLook),
            "the container will look again"
        );
    }

    #[test]
    fn a_pods_first_program_is_followed_by_the_look_of_the_next_container() {
        let mut agent = Agent::default();
        agent.published(ms(100));
        agent.begins(ms(200));
        agent.runs(ms(500));
        assert_eq!(agent.holds(ms(1099)), Some(Hold::AgentLook));
        assert_eq!(agent.holds(ms(1100)), None);
        // Later programs are those of containers that have looked.
        agent.begins(ms(1200));
        agent.runs(ms(1500));
        assert_eq!(agent.holds(ms(1501)), None);
        // A container that has looked is no pause container.
        let mut agent = looked(&[150]);
        agent.begins(ms(200));
        agent.runs(ms(500));
        assert_eq!(agent.holds(ms(501)), None);
        // Before a publication a look finds nothing.
        let mut agent = Agent::default();
        agent.begins(ms(200));
        agent.runs(ms(500));
        assert_eq!(agent.holds(ms(501)), None);
    }

    #[test]
    fn a_container_begun_beside_an_enabling_has_its_time_behind_it() {
        let mut agent = Agent::default();
        agent.begins(ms(200));
        agent.enabled(ms(3300));
        assert_eq!(agent.holds(ms(6299)), Some(Hold::Container));
        assert_eq!(agent.holds(ms(6300)), None);
        // One that hangs holds up one GPU.
        agent.enabled(ms(9600));
        assert_eq!(agent.holds(ms(9601)), None);
        agent.runs(ms(9700));
        agent.begins(ms(9800));
        agent.enabled(ms(12_900));
        assert_eq!(agent.holds(ms(12_901)), Some(Hold::Container));
    }

    #[test]
    fn both_openings_of_a_first_try_are_one_container() {
        let mut agent = looked(&[1000, 1400]);
        agent.published(ms(2000));
        agent.looked(ms(2400));
        assert_eq!(
            agent.holds(ms(2799)),
            Some(Hold::AgentLook),
            "the only one that waits has looked, and may have found its GPU"
        );
        assert_eq!(agent.holds(ms(2800)), None);
    }

    #[test]
    fn on_one_vcpu_a_look_has_more_time_to_bring_a_container() {
        let after = |vcpus| {
            let mut agent = Agent::new(vcpus);
            agent.published(ms(100));
            // Use a later look: the first one ever has more time.
            agent.looked(ms(200));
            agent.begins(ms(300));
            agent.looked(ms(2000));
            agent.decides
        };
        assert!(after(1) > after(2), "{:?} {:?}", after(1), after(2));
    }

    #[test]
    fn a_wait_in_vain_is_not_repeated_until_a_container_was_made() {
        let mut agent = looked(&[1000]);
        agent.published(ms(1500));
        agent.looked(ms(2000));
        assert_eq!(agent.holds(ms(2400)), None);
        // Late by an enabling, and still the same container.
        agent.published(ms(5500));
        assert_eq!(agent.holds(ms(5501)), None);
        agent.looked(ms(6200));
        assert_eq!(agent.holds(ms(6201)), None);
        agent.begins(ms(6300));
        agent.runs(ms(6500));
        agent.looked(ms(6600));
        assert_eq!(
            agent.holds(ms(6601)),
            Some(Hold::AgentLook),
            "a new container"
        );
        agent.published(ms(7000));
        assert_eq!(agent.holds(ms(7599)), Some(Hold::AgentLook));
    }

    #[test]
    fn looks_of_several_containers_hold_the_lane_for_a_bounded_time() {
        let mut agent = Agent::new(1);
        agent.published(ms(100));
        for second in 1..10 {
            [235, 645, 680]
                .iter()
                .for_each(|at| agent.looked(ms(second * 1000 + at)));
        }
        assert_eq!(agent.holds(ms(9681)), None);
    }

    #[test]
    fn containers_that_find_nothing_do_not_prolong_the_hold() {
        let mut agent = looked(&[1000]);
        for second in 2..20 {
            // A stranger each time: the former ones have given up.
            agent.looked(ms(second * 6000));
        }
        assert_eq!(agent.holds(ms(19 * 6000 + 1)), None);
    }
}
