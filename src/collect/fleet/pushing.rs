//! The queue of boots for the OTLP receiver: ids only, so that a receiver that is away for a day
//! costs nothing but its boots.
//!
//! Boots are pushed one at a time, in the order of their ends. A push that may be repeated is,
//! after a pause. A boot that the receiver refused for now goes behind the others, and is given up
//! after [`MAX_TRIES`] such answers. Every boot ends as pushed or as dropped, and both are counted;
//! the file of a dropped boot stays.

use super::boot_size::check_size;
use crate::bucket::Lines;
use crate::collector_counters::{Stats, add};
use crate::lock::lock;
use crate::otlp_push::{Backoff, Outcome, Target, connect};
use crate::shared::Shared;
use crate::stop::stopped;
use anyhow::{Context, Result};
use kata_gpu_report::boot::model::Boot;
use kata_gpu_report::data::boot_dir::read_boot;
use kata_gpu_report::data::boot_file::HostEvent;
use kata_gpu_report::otlp;
use kata_gpu_report::otlp::{Request, Resource};
use kata_gpu_report::views::waterfall::Waterfall;
use std::collections::VecDeque;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};
use tokio::sync::{Notify, watch};
use tokio::task::spawn_blocking;

/// Most answers of "later" to one boot: a quarter of an hour of them.
const MAX_TRIES: u32 = 30;
/// Time limit for waiting boots at the stop.
const STOP_DEADLINE: Duration = Duration::from_secs(5);
/// Most dropped boots that a line names.
const MAX_NAMED: usize = 4;

/// Receiver of boots, and the resource that their spans have.
#[derive(Clone, Debug)]
pub struct Otlp {
    pub target: Target,
    pub resource: Resource,
}

struct Waiting {
    boot: Arc<str>,
    tries: u32,
}

pub struct Queue {
    otlp: Otlp,
    collector: Arc<Shared>,
    boots: Mutex<VecDeque<Waiting>>,
    more: Notify,
    overflow: Mutex<Lines>,
}

impl Queue {
    /// An empty queue for at most `limits.push_queue` boots.
    pub fn new(otlp: Otlp, collector: Arc<Shared>) -> Self {
        Self {
            otlp,
            collector,
            boots: Mutex::default(),
            more: Notify::new(),
            overflow: Mutex::new(Lines::each_minute()),
        }
    }

    fn boots(&self) -> MutexGuard<'_, VecDeque<Waiting>> {
        lock(&self.boots)
    }

    pub fn waiting(&self) -> u64 {
        self.boots().len() as u64
    }

    pub fn capacity(&self) -> u64 {
        self.collector.store.limits.push_queue
    }

    fn stats(&self) -> &Stats {
        &self.collector.store.stats
    }

    fn log(&self, text: &str) {
        (self.collector.log)(format!("push to {}: {text}", self.otlp.target));
    }

    fn remove(&self, boot: &str) -> Option<Waiting> {
        let mut boots = self.boots();
        let at = boots.iter().position(|waiting| &*waiting.boot == boot)?;
        boots.remove(at)
    }

    /// Adds a boot; a full queue drops the boot that waited longest.
    pub fn push(&self, boot: Arc<str>) {
        let mut boots = self.boots();
        boots.push_back(Waiting { boot, tries: 0 });
        let waiting = boots.len() as u64;
        let oldest = (waiting > self.capacity()).then(|| boots.pop_front());
        drop(boots);
        if let Some(oldest) = oldest.flatten() {
            add(&self.stats().push_dropped, 1);
            let text = format!(
                "boot {}: {} wait already (limit push-queue): it is not pushed, its file stays",
                oldest.boot,
                self.capacity()
            );
            lock(&self.overflow).pass(&text, |text| self.log(&text));
        }
        self.more.notify_one();
    }
}

/// Failures of the receiver since it last took a boot.
struct Trouble {
    since: Option<Instant>,
    lines: Lines,
}

impl Trouble {
    fn new() -> Self {
        Self {
            since: None,
            lines: Lines::each_minute(),
        }
    }

    fn failed(&mut self, why: &str, queue: &Queue) {
        self.since.get_or_insert_with(Instant::now);
        let text = format!("{why}: {} boot(s) wait, trying again", queue.waiting());
        self.lines.pass(&text, |text| queue.log(&text));
    }

    fn over(&mut self, queue: &Queue) {
        if let Some(since) = self.since {
            let seconds = since.elapsed().as_secs();
            queue.log(&format!("it takes boots again, after {seconds} s"));
            *self = Self::new();
        }
    }
}

/// Pushes until `all_queued`, and after that the waiting boots for at most [`STOP_DEADLINE`].
pub async fn run(queue: Arc<Queue>, mut all_queued: watch::Receiver<bool>) {
    let mut trouble = Trouble::new();
    tokio::select! {
        () = push_all(&queue, &mut trouble, false) => {}
        () = stopped(&mut all_queued) => {}
    }
    let rest = push_all(&queue, &mut trouble, true);
    let _late = tokio::time::timeout(STOP_DEADLINE, rest).await;
    let left: Vec<Waiting> = queue.boots().drain(..).collect();
    if left.is_empty() {
        return;
    }
    add(&queue.stats().push_dropped, left.len() as u64);
    let named: Vec<&str> = left
        .iter()
        .take(MAX_NAMED)
        .map(|boot| &*boot.boot)
        .collect();
    let more = if left.len() > MAX_NAMED { ", .." } else { "" };
    queue.log(&format!(
        "{} boot(s) not pushed before the stop: {}{more}: their files stay",
        left.len(),
        named.join(", ")
    ));
}

/// Pushes waiting boots; with `once`, until none waits or the receiver fails.
async fn push_all(queue: &Queue, trouble: &mut Trouble, once: bool) {
    let mut backoff = Backoff::default();
    loop {
        let first = queue.boots().front().map(|waiting| waiting.boot.clone());
        let Some(boot) = first else {
            if once {
                return;
            }
            queue.more.notified().await;
            continue;
        };
        let outcome = push(queue, &boot).await;
        match settle(queue, trouble, &boot, outcome) {
            Next::Boot => backoff.reset(),
            Next::Pause(_) if once => return,
            Next::Pause(asked) => tokio::time::sleep(backoff.next(asked)).await,
        }
    }
}

/// Continuation after a try.
enum Next {
    Boot,
    /// Pause: as long as the receiver asked for, if it did.
    Pause(Option<Duration>),
}

/// Counts and logs the outcome of a push, and removes the boot from the queue or puts it behind the
/// others.
fn settle(queue: &Queue, trouble: &mut Trouble, boot: &Arc<str>, outcome: Outcome) -> Next {
    let stats = queue.stats();
    match outcome {
        Outcome::Taken {
            spans,
            rejected,
            why,
        } => {
            trouble.over(queue);
            add(&stats.pushed, 1);
            add(&stats.pushed_spans, spans - rejected);
            add(&stats.rejected_spans, rejected);
            if rejected > 0 || why.is_some() {
                let why = why.unwrap_or_default();
                queue.log(&format!(
                    "boot {boot}: {rejected} of {spans} span(s) rejected: {why}"
                ));
            }
            let exported = HostEvent::Exported {
                to: queue.otlp.target.to_string(),
                spans: spans - rejected,
            };
            queue.collector.store.note(boot, exported);
            // A boot that a full queue dropped meanwhile was counted as dropped, too.
            queue.remove(boot);
            Next::Boot
        }
        Outcome::Refused { why } => {
            let removed = queue.remove(boot);
            add(&stats.push_dropped, removed.is_some().into());
            queue.log(&format!("boot {boot}: {why}: not pushed; its file stays"));
            Next::Boot
        }
        Outcome::Later {
            why,
            answered,
            after,
        } => {
            add(&stats.push_failures, 1);
            trouble.failed(&why, queue);
            if answered && let Some(mut waiting) = queue.remove(boot) {
                waiting.tries += 1;
                if waiting.tries < MAX_TRIES {
                    queue.boots().push_back(waiting);
                } else {
                    add(&stats.push_dropped, 1);
                    queue.log(&format!(
                        "boot {boot}: {why}: given up after {MAX_TRIES} tries; its file stays"
                    ));
                }
            }
            Next::Pause(after)
        }
    }
}

async fn push(queue: &Queue, boot: &str) -> Outcome {
    let Some(path) = queue.collector.store.report(boot) else {
        return Outcome::unreachable("its file is not complete: the disk takes nothing");
    };
    // Connect first: without a receiver, reading is wasted.
    let mut connection = match connect(&queue.otlp.target).await {
        Ok(connection) => connection,
        Err(outcome) => return outcome,
    };
    let resource = queue.otlp.resource.clone();
    let made = spawn_blocking(move || request(&path, &resource)).await;
    let made = made.context("making spans of it panicked");
    match made.and_then(|made| made) {
        Ok(request) => connection.push(request).await,
        Err(e) => Outcome::Refused {
            why: format!("{e:#}"),
        },
    }
}

fn request(path: &Path, resource: &Resource) -> Result<Request<'static>> {
    check_size(path)?;
    let file = read_boot(path)?;
    let boot = Boot::new(&file, &[]);
    otlp::request(Waterfall::new(&file, boot), resource)
}
