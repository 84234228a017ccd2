//! Counters of the collector's work, which every part adds to.

use std::sync::atomic::{AtomicU64, Ordering};

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {
        /// Counters since the start.
        #[derive(Debug, Default)]
        pub struct Stats { $($(#[$doc])* pub $name: AtomicU64),* }

        /// Values of the counters at one time.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct Counts { $($(#[$doc])* pub $name: u64),* }

        impl Stats {
            pub fn counts(&self) -> Counts {
                Counts { $($name: self.$name.load(Ordering::Relaxed)),* }
            }
        }
    };
}

counters! {
    /// Connections that were taken.
    connections,
    /// Connections that were closed at once, over a limit.
    refused,
    /// Connections of strangers, which were closed at once.
    strangers,
    /// Bytes that guests sent.
    bytes,
    /// Boots for which a file was begun.
    boots,
    /// Records that were new and are kept.
    records,
    /// Records that were stored already.
    duplicates,
    /// Lines that are not of the format.
    garbage,
    /// Records over the limits of their boot.
    capped,
    /// Records that came while the disk took nothing more; a guest that still has them sends them
    /// again.
    dropped,
    /// Times that a file could not be written.
    write_errors,
    /// Files that were removed while their boot was received; their guests are asked for
    /// everything again.
    files_lost,
    /// Calls of fdatasync.
    synced,
    /// Files that retention removed.
    removed,
    /// Boots that are not followed, because so many are: they are neither pushed nor in the
    /// histograms.
    not_followed,
    /// Boots that the receiver of --otlp took.
    pushed,
    /// Spans that the receiver took, and spans that it rejected.
    pushed_spans,
    rejected_spans,
    /// Requests for metrics; connections that gave way to a newer one; connections that broke or
    /// took too long.
    scrapes,
    scrapes_refused,
    scrapes_failed,
    /// Pushes that the receiver did not answer, or answered with "later".
    push_failures,
    /// Boots that were not pushed: refused, or more than may wait.
    push_dropped,
    /// Events of failed boots that Kubernetes has, tries that it did not answer or answered with
    /// "later", and failed boots without an Event.
    events,
    events_failures,
    events_dropped,
}

/// Adds `n` to a counter.
pub fn add(counter: &AtomicU64, n: u64) {
    counter.fetch_add(n, Ordering::Relaxed);
}

impl Counts {
    /// A line for people.
    pub fn line(&self) -> String {
        let mut text = format!(
            "{} boots, {} records ({} came again), {} dropped for lack of disk space, \
             {} over a limit; {} garbage lines; {} connections, {} refused",
            self.boots,
            self.records,
            self.duplicates,
            self.dropped,
            self.capped,
            self.garbage,
            self.connections,
            self.refused
        );
        if self.strangers > 0 {
            text += &format!(" and {} no guest's", self.strangers);
        }
        if self.pushed + self.push_dropped + self.push_failures > 0 {
            text += &format!("; {} boots pushed, {} not", self.pushed, self.push_dropped);
        }
        if self.events + self.events_dropped + self.events_failures > 0 {
            text += &format!(
                "; {} Events created, {} not",
                self.events, self.events_dropped
            );
        }
        text
    }
}
