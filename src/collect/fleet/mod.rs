//! Boots that are over, for engines that watch a fleet: spans pushed to an OTLP receiver, Events of
//! failed ones pushed to Kubernetes, numbers for Prometheus.
//!
//! A thread of its own takes the boots that are over from [`Ends`](super::ends::Ends), reads their
//! files like any reader command, and keeps only ids in its queue. Receiving, writing and keeping
//! never wait for this thread and have the processor first ([`give_way`]). Omitted work is counted
//! and logged.

mod backoff; // how long until the next try
mod boot_size; // limit of the files that are read
mod builds; // boots by the guest's init
mod exposition; // the text that Prometheus reads
pub mod http_server; // GET /metrics
pub mod metrics_table; // the table of metrics
pub mod pushing; // a queue of boots and its receiver
mod state; // state that the tasks share
pub mod tally; // counts of boots that are over

use super::config::Config;
use super::ends::Over;
use super::shared::Shared;
use super::stop::stopped;
use super::threads::Runtime;
use anyhow::{Context, Result};
use boot_size::check_size;
use kata_gpu_host::sleep::sleep_until;
use kata_gpu_report::analysis::loaded::{Loaded, load};
use kata_gpu_report::analysis::metrics::{Metrics, metrics};
use kata_gpu_report::analysis::verdict::Verdict;
use pushing::{Queue, Receiver};
use state::State;
use std::net::TcpListener;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tokio::sync::watch;
use tokio::task::{JoinSet, spawn_blocking};

/// Time limit after the stop for reading boots that were over before it.
const REPORT_DEADLINE: Duration = Duration::from_secs(5);
/// Pause before a boot with an incomplete file is read again: no event shows when a disk has room.
const NOT_WRITTEN_PAUSE: Duration = Duration::from_secs(1);
/// Nice value of these threads; the receiving threads have 0.
const NICE: i32 = 10;

/// The thread.
pub struct Fleet {
    stop: watch::Sender<bool>,
    thread: Runtime,
}

impl Fleet {
    /// Starts the thread, with the configured receivers to push to, and a socket to answer
    /// Prometheus on.
    pub fn start(
        collector: Arc<Shared>,
        config: &Config,
        metrics: Option<TcpListener>,
    ) -> Result<Self> {
        let queue = |to| Arc::new(Queue::new(to, collector.clone()));
        let state = Arc::new(State {
            otlp: config.otlp.clone().map(Receiver::Otlp).map(queue),
            events: config.events.clone().map(Receiver::Kubernetes).map(queue),
            collector: collector.clone(),
            build_id: config.build_id.clone(),
            tally: Mutex::default(),
        });
        let stop = watch::Sender::new(false);
        let work = work(state, metrics, stop.subscribe());
        let thread = Runtime::start("fleet", give_way, work)?;
        Ok(Self { stop, thread })
    }

    /// Reports the boots that are over, pushes for a bounded time, and ends.
    pub async fn stop(self) -> Result<()> {
        self.stop.send_replace(true);
        self.thread.ended().await
    }
}

/// Lowers the calling thread's priority: reading a boot of the largest size takes seconds of a
/// processor that receiving threads need, too. A refusal by the kernel is harmless.
fn give_way() {
    // Linux sets the thread's value, not the process's: setpriority(2), "C library/kernel
    // differences".
    let _refused = rustix::process::setpriority_process(None, NICE);
}

async fn work(state: Arc<State>, metrics: Option<TcpListener>, stop: watch::Receiver<bool>) {
    let mut serving = JoinSet::new();
    if let Some(listener) = metrics {
        serving.spawn(http_server::serve(listener, state.clone()));
    }
    let (all_queued, last) = watch::channel(false);
    let queues = [&state.otlp, &state.events].into_iter().flatten();
    let mut pushing: JoinSet<()> = queues
        .map(|queue| pushing::run(queue.clone(), last.clone()))
        .collect();
    follow(&state, stop).await;
    all_queued.send_replace(true);
    while let Some(pushed) = pushing.join_next().await {
        if pushed.is_err() {
            (state.collector.log)("a task that pushes boots panicked".into());
        }
    }
    // Requests for metrics get no answer from here on.
    serving.shutdown().await;
}

/// Reports boots until the stop, and then those that are over.
async fn follow(state: &State, mut stop: watch::Receiver<bool>) {
    let Some(ends) = &state.collector.store.ends else {
        return;
    };
    // Boots that are over and whose files are not complete.
    let mut waiting: Vec<Over> = Vec::new();
    loop {
        let (over, next) = ends.take(Instant::now());
        let tried = std::mem::take(&mut waiting);
        for over in tried.into_iter().chain(over) {
            // Reporting all boots may take longer than a stop may. Release the lock of `stop` here:
            // the stopping thread waits for it.
            let stopping = *stop.borrow();
            if stopping || !report(state, &over).await {
                waiting.push(over);
            }
        }
        let again = (!waiting.is_empty()).then(|| Instant::now() + NOT_WRITTEN_PAUSE);
        tokio::select! {
            () = stopped(&mut stop) => break,
            () = ends.changed() => {}
            () = sleep_until(next.into_iter().chain(again).min()) => {}
        }
    }
    let deadline = Instant::now() + REPORT_DEADLINE;
    let mut left = 0;
    for over in waiting.into_iter().chain(ends.take_finished()) {
        if Instant::now() >= deadline {
            left += 1;
        } else if !report(state, &over).await {
            (state.collector.log)(format!(
                "boot {}: not all of it could be written: it is not reported",
                over.boot
            ));
        }
    }
    if left > 0 {
        (state.collector.log)(format!(
            "{left} boot(s) were over at the stop and are not reported; their files stay"
        ));
    }
}

/// Reports a boot. False while its file is not complete.
async fn report(state: &State, over: &Over) -> bool {
    let Some(path) = state.collector.store.report(&over.boot) else {
        return false;
    };
    // An earlier collector has counted a boot that it saw finish, and queued its failure: an Event
    // that waited when that one ended is not made up for.
    let mut failed = false;
    if !over.seen_before {
        let looked = spawn_blocking(move || look_at(&path)).await;
        match looked
            .context("the account of it panicked")
            .and_then(|looked| looked)
        {
            Ok((numbers, is_failure)) => {
                state.tally().add(&numbers);
                failed = is_failure;
            }
            Err(e) => {
                state.tally().add_unread();
                (state.collector.log)(format!(
                    "boot {}: {e:#}: it is not in the metrics",
                    over.boot
                ));
            }
        }
    }
    let events = state.events.as_ref().filter(|_| failed);
    for queue in state.otlp.iter().chain(events) {
        queue.push(over.boot.clone());
    }
    true
}

/// The numbers of a boot, as in `stats`, and whether its verdict is that something failed.
fn look_at(path: &Path) -> Result<(Metrics, bool)> {
    check_size(path)?;
    let Loaded { file, boot } = load(path, None)?;
    Ok((metrics(&boot, &file), Verdict::of(&boot).is_failure()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_that_gives_way_is_alone_in_that() {
        let nice = || rustix::process::getpriority_process(None).unwrap();
        let before = nice();
        let other = std::thread::spawn(move || {
            give_way();
            nice()
        });
        assert_eq!((other.join().unwrap(), nice()), (NICE.max(before), before));
    }
}
