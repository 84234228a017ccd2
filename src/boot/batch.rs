//! Which initialisations run beside each other, where the driver can run several.
//!
//! The last part of one takes the driver's global lock and then every GPU's own: so it waits for each GPU whose processor is booting, and with it
//! waits everybody who wants the global lock, GPUs that are to be bound among them. Initialisations that begin in the middle of each other make a
//! convoy of that. So as long as the enable lane brings GPUs out one after another, they go one at a time, beside the next enabling; when it is over,
//! all that are left go together. Who comes while the others are in their first part joins them, and who comes later waits until they are over.

use std::time::Duration;
use tokio::sync::{Mutex, watch};

/// How long an initialisation keeps others waiting. It takes 2 to 5 s; one that hangs must not stop those that come after it.
pub const LONGEST_INIT: Duration = Duration::from_secs(10);

#[derive(Clone, Copy, Debug, Default)]
struct Counts {
    /// The lane has GPUs to enable.
    lane: bool,
    attaching: usize,
    running: usize,
}

impl Counts {
    fn is_open(self) -> bool {
        self.running == 0 || (self.attaching > 0 && !self.lane)
    }
}

/// The batch that is running, if any.
#[derive(Default)]
pub struct Batches {
    counts: watch::Sender<Counts>,
    /// The first one of those that wait: they go in the order in which they came.
    first: Mutex<()>,
}

/// An initialisation in its first part, until it is dropped.
pub struct Attaching(watch::Sender<Counts>);
/// An initialisation that is not over, until it is dropped.
pub struct Running(watch::Sender<Counts>);

impl Batches {
    /// The lane begins, or is over.
    pub fn lane(&self, runs: bool) {
        self.counts.send_modify(|counts| counts.lane = runs);
    }

    /// Whether the lane has GPUs to enable.
    pub fn lane_runs(&self) -> bool {
        self.counts.borrow().lane
    }

    /// Begins one, where that may be now and nobody waits for it.
    pub fn try_begin(&self) -> Option<(Attaching, Running)> {
        let _first = self.first.try_lock().ok()?;
        self.count_in()
    }

    /// Begins one, as soon as that may be.
    pub async fn begin(&self) -> (Attaching, Running) {
        let _first = self.first.lock().await;
        let mut changes = self.counts.subscribe();
        loop {
            if let Some(begun) = self.count_in() {
                return begun;
            }
            // Never an error: the sender is here.
            let _unused = changes.changed().await;
        }
    }

    fn count_in(&self) -> Option<(Attaching, Running)> {
        let begun = self.counts.send_if_modified(|counts| {
            let open = counts.is_open();
            counts.attaching += usize::from(open);
            counts.running += usize::from(open);
            open
        });
        begun.then(|| (Attaching(self.counts.clone()), Running(self.counts.clone())))
    }
}

impl Drop for Attaching {
    fn drop(&mut self) {
        self.0.send_modify(|counts| counts.attaching -= 1);
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.0.send_modify(|counts| counts.running -= 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::pin::pin;
    use std::task::{Context, Poll, Waker};

    fn now<T>(future: impl Future<Output = T>) -> Option<T> {
        match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(value) => Some(value),
            Poll::Pending => None,
        }
    }

    #[test]
    fn whoever_comes_while_one_attaches_joins_and_whoever_comes_later_waits_for_all() {
        let batches = Batches::default();
        let (attaching, running) = now(batches.begin()).unwrap();
        let (second_attaching, second_running) = now(batches.begin()).expect("the first one attaches");
        drop(attaching);
        let (third_attaching, third_running) = now(batches.begin()).expect("the second one attaches");
        drop((second_attaching, third_attaching, third_running));
        assert!(now(batches.begin()).is_none() && batches.try_begin().is_none(), "all are past that");
        drop(running);
        assert!(now(batches.begin()).is_none(), "one is not over");
        let mut waiting = pin!(batches.begin());
        let mut context = Context::from_waker(Waker::noop());
        assert!(waiting.as_mut().poll(&mut context).is_pending());
        drop(second_running);
        assert!(batches.try_begin().is_none(), "it is the turn of the one that waits");
        assert!(waiting.as_mut().poll(&mut context).is_ready());
        assert!(batches.try_begin().is_some(), "nobody waits, and all are over");
    }

    #[test]
    fn one_at_a_time_beside_the_lane_and_all_that_are_left_when_both_are_over() {
        let batches = Batches::default();
        batches.lane(true);
        let first = now(batches.begin()).unwrap();
        assert!(now(batches.begin()).is_none(), "the first one attaches, and the lane runs");
        batches.lane(false);
        drop(first.0);
        assert!(now(batches.begin()).is_none(), "the first one is not over");
        drop(first.1);
        let both = (now(batches.begin()), now(batches.begin()));
        assert!(both.0.is_some() && both.1.is_some());
    }
}
