//! Values of one scrape, all read at one time.

use super::fleet_state::Shared;
use super::tally::Tally;
use crate::collector_counters::Counts;
use crate::store::lock;
use kata_gpu_report::analysis::rules::RULES;
use kata_gpu_report::data::host_check::HostCheck;
use std::sync::atomic::Ordering::Relaxed;

pub struct Snapshot {
    pub counts: Counts,
    pub tally: Tally,
    /// Boots with a connection, and without one.
    pub in_flight: (u64, u64),
    /// Open connections.
    pub connections: u64,
    /// Bytes of all boots' files; None before retention's first look.
    pub kept_bytes: Option<u64>,
    pub keep_limit_bytes: Option<u64>,
    pub scrapes: u64,
    pub scrapes_refused: u64,
    pub scrapes_failed: u64,
    /// Seconds by rule, of the last `doctor --daemonset-check`.
    pub host_check: Option<Vec<(&'static str, u64)>>,
    /// Queue of --otlp.
    pub queue: Option<Queue>,
}

/// Boots that wait for the receiver.
pub struct Queue {
    pub waiting: u64,
    pub capacity: u64,
}

impl Snapshot {
    pub fn of(shared: &Shared) -> Self {
        let queue = shared.queue.as_ref();
        Self {
            counts: shared.from.stats.counts(),
            tally: shared.tally().clone(),
            in_flight: shared
                .from
                .store
                .ends
                .as_ref()
                .map_or((0, 0), |ends| ends.in_flight()),
            connections: shared.from.peers.open(),
            kept_bytes: *lock(&shared.from.store.kept_bytes),
            keep_limit_bytes: shared.from.store.keep.bytes,
            scrapes: shared.http.scrapes.load(Relaxed),
            scrapes_refused: shared.http.refused.load(Relaxed),
            scrapes_failed: shared.http.failed.load(Relaxed),
            host_check: HostCheck::read(shared.from.store.dir()).map(|check| by_rule(&check)),
            queue: queue.map(|q| Queue {
                waiting: q.waiting(),
                capacity: q.capacity(),
            }),
        }
    }
}

/// Whole seconds of the rules that this program has.
fn by_rule(check: &HostCheck) -> Vec<(&'static str, u64)> {
    let seconds = |id: &str| check.findings.get(id).map(|seconds| seconds.round() as u64);
    RULES
        .iter()
        .filter_map(|rule| Some((rule.id, seconds(rule.id)?)))
        .collect()
}
