//! Boots that are over, for reporting each boot once when nothing more is to come
//! ([`super::fleet`]).
//!
//! A boot is over [`AFTER_GOODBYE`] after it sent that all its GPUs are settled or that it powers
//! off; without such a record, when its connection has been gone for the limit `goodbye`. A boot
//! whose GPU hangs is in flight as long as its VM lives. Every boot that begins is followed once,
//! or counted as not followed. Nothing here blocks or does I/O.

use super::lock::lock;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};
use tokio::sync::Notify;

/// Time for records just behind the goodbye: module lockdown, the driver's last lines.
pub const AFTER_GOODBYE: Duration = Duration::from_secs(2);
/// Most boots followed at once: four times as many as may be connected.
const MAX_FOLLOWED: usize = 16_384;

/// A boot that is not over yet.
#[derive(Clone, Copy, Debug)]
struct Following {
    connected: bool,
    /// The boot sent that its GPUs are settled, or that it powers off.
    finished: bool,
    /// The boot had finished before this collector was started.
    seen_before: bool,
    /// Time at which the boot will be over, if nothing happens.
    due: Option<Instant>,
}

/// A boot that is over.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Over {
    pub boot: Arc<str>,
    /// An earlier collector saw the boot finish.
    pub seen_before: bool,
}

#[derive(Debug)]
pub struct Ends {
    goodbye: Duration,
    boots: Mutex<HashMap<Arc<str>, Following>>,
    /// Notified when a boot may be due earlier than before.
    changed: Notify,
}

impl Ends {
    pub fn new(goodbye: Duration) -> Self {
        Self {
            goodbye,
            boots: Mutex::default(),
            changed: Notify::new(),
        }
    }

    fn boots(&self) -> MutexGuard<'_, HashMap<Arc<str>, Following>> {
        lock(&self.boots)
    }

    /// Follows a boot that has a connection. False if too many boots are followed already.
    pub fn connected(&self, boot: &Arc<str>, finished: bool, now: Instant) -> bool {
        let mut boots = self.boots();
        if boots.len() >= MAX_FOLLOWED && !boots.contains_key(boot) {
            return false;
        }
        let following = boots.entry(boot.clone()).or_insert(Following {
            connected: true,
            finished,
            seen_before: finished,
            due: finished.then_some(now + AFTER_GOODBYE),
        });
        following.connected = true;
        if !following.finished {
            following.due = None;
        }
        drop(boots);
        self.changed.notify_one();
        true
    }

    /// Marks a boot as finished.
    pub fn finished(&self, boot: &str, now: Instant) {
        if let Some(following) = self.boots().get_mut(boot)
            && !following.finished
        {
            following.finished = true;
            following.due = Some(now + AFTER_GOODBYE);
            self.changed.notify_one();
        }
    }

    /// Notes that a boot's last connection is gone.
    pub fn disconnected(&self, boot: &str, now: Instant) {
        if let Some(following) = self.boots().get_mut(boot) {
            following.connected = false;
            following.due = following.due.or(Some(now + self.goodbye));
            self.changed.notify_one();
        }
    }

    /// Takes the boots that are over by now, each once, and the time at which the next will be.
    pub fn take(&self, now: Instant) -> (Vec<Over>, Option<Instant>) {
        self.take_where(|following| following.due.is_some_and(|due| due <= now))
    }

    /// Takes, at the stop, all boots that have finished. Guests of the other boots reconnect to the
    /// next collector.
    pub fn take_finished(&self) -> Vec<Over> {
        self.take_where(|following| following.finished).0
    }

    fn take_where(&self, is: impl Fn(&Following) -> bool) -> (Vec<Over>, Option<Instant>) {
        let mut boots = self.boots();
        let mut over = Vec::new();
        boots.retain(|boot, following| {
            let taken = is(following);
            if taken {
                over.push(Over {
                    boot: boot.clone(),
                    seen_before: following.seen_before,
                });
            }
            !taken
        });
        (over, boots.values().filter_map(|boot| boot.due).min())
    }

    /// Numbers of boots that have not finished: boots with a connection, and boots that lost it
    /// lately.
    pub fn in_flight(&self) -> (u64, u64) {
        let boots = self.boots();
        let count = |connected| {
            let is = |boot: &&Following| !boot.finished && boot.connected == connected;
            boots.values().filter(is).count() as u64
        };
        (count(true), count(false))
    }

    /// Waits until a boot may be due earlier than [`Ends::take`] returned.
    pub async fn changed(&self) {
        self.changed.notified().await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOODBYE: Duration = Duration::from_secs(60);

    fn over(ends: &Ends, now: Instant) -> Vec<String> {
        ends.take(now)
            .0
            .into_iter()
            .map(|over| {
                format!(
                    "{}{}",
                    over.boot,
                    if over.seen_before { " old" } else { "" }
                )
            })
            .collect()
    }

    #[test]
    fn a_boot_is_over_once_and_shortly_after_its_goodbye() {
        let (ends, start) = (Ends::new(GOODBYE), Instant::now());
        assert!(ends.connected(&"a".into(), false, start));
        assert_eq!(
            (over(&ends, start + 10 * GOODBYE), ends.in_flight()),
            (vec![], (1, 0)),
            "it hangs, and its VM lives"
        );
        ends.finished("a", start);
        ends.finished("a", start + AFTER_GOODBYE);
        assert_eq!(
            (ends.in_flight(), ends.take(start).1),
            ((0, 0), Some(start + AFTER_GOODBYE))
        );
        assert_eq!(over(&ends, start + AFTER_GOODBYE), ["a"]);
        ends.disconnected("a", start);
        assert_eq!(over(&ends, start + 10 * GOODBYE), Vec::<String>::new());
    }

    #[test]
    fn a_boot_without_goodbye_is_over_when_it_stays_away() {
        let (ends, start) = (Ends::new(GOODBYE), Instant::now());
        ends.connected(&"a".into(), false, start);
        ends.disconnected("a", start);
        assert_eq!(
            (over(&ends, start + GOODBYE / 2), ends.in_flight()),
            (vec![], (0, 1))
        );
        ends.connected(&"a".into(), false, start + GOODBYE / 2);
        assert_eq!(
            over(&ends, start + 2 * GOODBYE),
            Vec::<String>::new(),
            "it came back"
        );
        ends.disconnected("a", start + 2 * GOODBYE);
        assert_eq!(over(&ends, start + 3 * GOODBYE), ["a"]);
    }

    #[test]
    fn earlier_boots_are_marked_and_at_the_end_only_goodbyes_count() {
        let (ends, start) = (Ends::new(GOODBYE), Instant::now());
        ends.connected(&"old".into(), true, start);
        assert_eq!(over(&ends, start + AFTER_GOODBYE), ["old old"]);
        for boot in ["hangs", "gone", "finished"] {
            ends.connected(&boot.into(), false, start);
        }
        ends.disconnected("gone", start);
        ends.finished("finished", start);
        assert_eq!(
            ends.take_finished(),
            [Over {
                boot: "finished".into(),
                seen_before: false
            }]
        );
    }

    #[test]
    fn no_more_are_followed_than_fit() {
        let (ends, now) = (Ends::new(GOODBYE), Instant::now());
        let followed = (0..MAX_FOLLOWED + 5)
            .filter(|n| ends.connected(&n.to_string().into(), false, now))
            .count();
        assert_eq!(followed, MAX_FOLLOWED);
        assert!(
            ends.connected(&"0".into(), false, now),
            "one that is followed goes on being so"
        );
    }
}
