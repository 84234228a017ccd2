//! Counts and queue of the boots that are over.

use super::pushing::Queue;
use super::tally::Tally;
use crate::lock::lock;
use crate::shared::Shared;
use std::sync::{Arc, Mutex, MutexGuard};

/// State that the tasks of the thread share.
pub struct State {
    pub collector: Arc<Shared>,
    /// Build id of this program.
    pub build_id: String,
    /// Boots to push, if there is a receiver of spans, and of Events.
    pub otlp: Option<Arc<Queue>>,
    pub events: Option<Arc<Queue>>,
    pub tally: Mutex<Tally>,
}

impl State {
    pub fn tally(&self) -> MutexGuard<'_, Tally> {
        lock(&self.tally)
    }
}
