//! Counters and queue of the boots that are over.

use super::pushing::Queue;
use super::sources::Sources;
use super::tally::Tally;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Requests for metrics, and connections without an answer.
#[derive(Debug, Default)]
pub struct ScrapeCounts {
    pub scrapes: AtomicU64,
    /// Connections that had to give way to a newer one.
    pub refused: AtomicU64,
    /// Connections that ended in an error or a deadline.
    pub failed: AtomicU64,
}

/// State that the tasks of the thread `fleet` share.
pub struct Shared {
    pub from: Arc<Sources>,
    pub queue: Option<Arc<Queue>>,
    tally: Mutex<Tally>,
    pub http: ScrapeCounts,
}

impl Shared {
    /// Zero counts; without `queue` nothing is pushed.
    pub fn new(from: Arc<Sources>, queue: Option<Arc<Queue>>) -> Self {
        Self {
            from,
            queue,
            tally: Mutex::default(),
            http: ScrapeCounts::default(),
        }
    }

    pub fn tally(&self) -> MutexGuard<'_, Tally> {
        self.tally.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
