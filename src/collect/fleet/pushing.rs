//! A queue of boots for a receiver, of spans or of Events: ids only, so that a receiver that is
//! away for a day costs nothing but its boots.
//!
//! Boots are pushed one at a time, in the order of their ends. A push that may be repeated is,
//! after a pause. A boot that the receiver refused for now goes behind the others, and is given up
//! after [`MAX_TRIES`] such answers. Every boot ends as pushed or as dropped, and both are counted;
//! the file of a dropped boot stays.

use super::backoff::Backoff;
use super::boot_size::check_size;
use crate::bucket::Lines;
use crate::collector_counters::{Stats, add};
use crate::http_client::Failure;
use crate::kubernetes_events::{self, Api, Event};
use crate::lock::lock;
use crate::otlp_push::{self, Spans, Target};
use crate::shared::Shared;
use crate::stop::stopped;
use anyhow::{Context, Result};
use kata_gpu_report::analysis::loaded::{Loaded, load};
use kata_gpu_report::boot::model::Boot;
use kata_gpu_report::data::boot_dir::read_boot;
use kata_gpu_report::data::boot_file::HostEvent;
use kata_gpu_report::otlp;
use kata_gpu_report::otlp::{Request, Resource};
use kata_gpu_report::views::waterfall::Waterfall;
use std::collections::VecDeque;
use std::fmt;
use std::path::Path;
use std::sync::atomic::AtomicU64;
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

/// The API that takes Events of failed boots, and the node's name in them.
#[derive(Clone, Debug)]
pub struct Kubernetes {
    pub api: Api,
    pub node: String,
}

#[derive(Clone, Debug)]
pub enum Receiver {
    Otlp(Otlp),
    Kubernetes(Kubernetes),
}

impl fmt::Display for Receiver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Otlp(otlp) => otlp.target.fmt(f),
            Self::Kubernetes(events) => events.api.fmt(f),
        }
    }
}

struct Waiting {
    boot: Arc<str>,
    tries: u32,
}

pub struct Queue {
    to: Receiver,
    collector: Arc<Shared>,
    boots: Mutex<VecDeque<Waiting>>,
    more: Notify,
    overflow: Mutex<Lines>,
}

impl Queue {
    /// An empty queue for at most `limits.push_queue` boots.
    pub fn new(to: Receiver, collector: Arc<Shared>) -> Self {
        Self {
            to,
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

    /// Counters of this receiver: failed tries, and boots that it will not get.
    fn failures(&self) -> &AtomicU64 {
        match self.to {
            Receiver::Otlp(_) => &self.stats().push_failures,
            Receiver::Kubernetes(_) => &self.stats().events_failures,
        }
    }

    fn dropped(&self) -> &AtomicU64 {
        match self.to {
            Receiver::Otlp(_) => &self.stats().push_dropped,
            Receiver::Kubernetes(_) => &self.stats().events_dropped,
        }
    }

    fn log(&self, text: &str) {
        (self.collector.log)(format!("push to {}: {text}", self.to));
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
            add(self.dropped(), 1);
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
    add(queue.dropped(), left.len() as u64);
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

/// Push that a receiver took.
enum Taken {
    Spans(Spans),
    Event,
}

/// Counts and logs the outcome of a push, and removes the boot from the queue or puts it behind the
/// others.
fn settle(
    queue: &Queue,
    trouble: &mut Trouble,
    boot: &Arc<str>,
    outcome: Result<Taken, Failure>,
) -> Next {
    match outcome {
        Ok(taken) => {
            trouble.over(queue);
            match taken {
                Taken::Spans(spans) => settle_spans(queue, boot, spans),
                Taken::Event => add(&queue.stats().events, 1),
            }
            // A boot that a full queue dropped meanwhile was counted as dropped, too.
            queue.remove(boot);
            Next::Boot
        }
        Err(Failure::Refused { why }) => {
            let removed = queue.remove(boot);
            add(queue.dropped(), removed.is_some().into());
            queue.log(&format!("boot {boot}: {why}: not pushed; its file stays"));
            Next::Boot
        }
        Err(Failure::Later {
            why,
            answered,
            after,
        }) => {
            add(queue.failures(), 1);
            trouble.failed(&why, queue);
            if answered && let Some(mut waiting) = queue.remove(boot) {
                waiting.tries += 1;
                if waiting.tries < MAX_TRIES {
                    queue.boots().push_back(waiting);
                } else {
                    add(queue.dropped(), 1);
                    queue.log(&format!(
                        "boot {boot}: {why}: given up after {MAX_TRIES} tries; its file stays"
                    ));
                }
            }
            Next::Pause(after)
        }
    }
}

fn settle_spans(queue: &Queue, boot: &str, spans: Spans) {
    let Spans {
        sent,
        rejected,
        why,
    } = spans;
    let stats = queue.stats();
    add(&stats.pushed, 1);
    add(&stats.pushed_spans, sent - rejected);
    add(&stats.rejected_spans, rejected);
    if rejected > 0 || why.is_some() {
        let why = why.unwrap_or_default();
        queue.log(&format!(
            "boot {boot}: {rejected} of {sent} span(s) rejected: {why}"
        ));
    }
    let exported = HostEvent::Exported {
        to: queue.to.to_string(),
        spans: sent - rejected,
    };
    queue.collector.store.note(boot, exported);
}

async fn push(queue: &Queue, boot: &Arc<str>) -> Result<Taken, Failure> {
    let Some(path) = queue.collector.store.report(boot) else {
        let why = "its file is not complete: the disk takes nothing";
        return Err(Failure::unreachable(why));
    };
    // Connect first: without a receiver, reading is wasted.
    match &queue.to {
        Receiver::Otlp(otlp) => {
            let mut receiver = otlp_push::Receiver::connect(&otlp.target).await?;
            let resource = otlp.resource.clone();
            let request = read(move || request(&path, &resource)).await?;
            receiver.push(request).await.map(Taken::Spans)
        }
        Receiver::Kubernetes(Kubernetes { api, node }) => {
            let (boot, node) = (boot.clone(), node.clone());
            let connection = api.connect().await?;
            let event = read(move || event(&path, &boot, &node)).await?;
            api.create(connection, &event).await.map(|()| Taken::Event)
        }
    }
}

/// Content of a push, made of a boot's file elsewhere; an error is final.
async fn read<T: Send + 'static>(
    make: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T, Failure> {
    let made = spawn_blocking(make).await;
    let made = made.context("reading its file panicked");
    made.and_then(|made| made).map_err(|e| Failure::Refused {
        why: format!("{e:#}"),
    })
}

fn request(path: &Path, resource: &Resource) -> Result<Request<'static>> {
    check_size(path)?;
    let file = read_boot(path)?;
    let boot = Boot::new(&file, &[]);
    otlp::request(Waterfall::new(&file, boot), resource)
}

fn event(path: &Path, boot_id: &str, node: &str) -> Result<Event> {
    check_size(path)?;
    let Loaded { boot, .. } = load(path, None)?;
    kubernetes_events::event(&boot, boot_id, node)
}
