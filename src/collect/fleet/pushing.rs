//! The queue of boots for the OTLP receiver: ids only, so that a receiver that is away for a day
//! costs nothing but its boots.
//!
//! Boots are pushed one at a time, in the order of their ends. A push that may be repeated is,
//! after a pause. A boot that the receiver refused for now goes behind the others, and is given up
//! after [`MAX_TRIES`] such answers. Every boot ends as pushed or as dropped, and both are counted;
//! the file of a dropped boot stays, for `export --otlp --push`.

use super::sources::{Sources, check_size};
use crate::collector_counters::{Stats, add};
use crate::otlp_push::{Backoff, MAX_REQUEST, Outcome, Target, connect};
use crate::stop::stopped;
use crate::store::Log;
use anyhow::Result;
use kata_gpu_report::data::boot_dir::read_boot;
use kata_gpu_report::data::boot_file::HostEvent;
use kata_gpu_report::otlp;
use kata_gpu_report::otlp::{Request as OtlpRequest, Resource};
use kata_gpu_report::views::waterfall::Waterfall;
use std::collections::VecDeque;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::{Notify, watch};
use tokio::task::spawn_blocking;

/// Most answers of "later" to one boot: a quarter of an hour of them.
const MAX_TRIES: u32 = 30;
/// Interval of the lines that the receiver takes nothing.
const LOG_AGAIN: Duration = Duration::from_secs(60);
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
    from: Arc<Sources>,
    boots: Mutex<VecDeque<Waiting>>,
    more: Notify,
    /// Boots that did not fit, since the last line about them.
    overflow: AtomicU64,
    logged_overflow: Mutex<Option<Instant>>,
}

impl Queue {
    /// An empty queue for at most `from.limits.push_queue` boots.
    pub fn new(otlp: Otlp, from: Arc<Sources>) -> Self {
        Self {
            otlp,
            from,
            boots: Mutex::default(),
            more: Notify::new(),
            overflow: AtomicU64::new(0),
            logged_overflow: Mutex::default(),
        }
    }

    fn boots(&self) -> MutexGuard<'_, VecDeque<Waiting>> {
        self.boots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn waiting(&self) -> u64 {
        self.boots().len() as u64
    }

    pub fn capacity(&self) -> u64 {
        self.from.limits.push_queue
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
        let oldest = if boots.len() as u64 > self.capacity() {
            boots.pop_front()
        } else {
            None
        };
        drop(boots);
        if let Some(oldest) = oldest {
            drop_boots(&self.from.stats, 1);
            let n = self.overflow.fetch_add(1, Ordering::Relaxed) + 1;
            let mut logged = self
                .logged_overflow
                .lock()
                .unwrap_or_else(PoisonError::into_inner);
            if logged.is_none_or(|logged| logged.elapsed() >= LOG_AGAIN) {
                *logged = Some(Instant::now());
                self.overflow.store(0, Ordering::Relaxed);
                (self.from.log)(format!(
                    "{n} boot(s) not pushed, the last of them {}: {} wait for {} already (limit push-queue); their files stay (export --otlp --push)",
                    oldest.boot,
                    self.capacity(),
                    self.otlp.target
                ));
            }
        }
        self.more.notify_one();
    }
}

/// Lines that were logged about the receiver.
#[derive(Default)]
struct Trouble {
    since: Option<Instant>,
    logged: Option<Instant>,
    failures: u64,
}

impl Trouble {
    fn failed(&mut self, why: &str, waiting: u64, target: &Target, log: &Log) {
        self.since.get_or_insert_with(Instant::now);
        self.failures += 1;
        if self
            .logged
            .is_none_or(|logged| logged.elapsed() >= LOG_AGAIN)
        {
            self.logged = Some(Instant::now());
            log(format!(
                "push to {target}: {why}: tried {} time(s), {waiting} boot(s) wait, trying again",
                self.failures
            ));
        }
    }

    fn over(&mut self, target: &Target, log: &Log) {
        if let Some(since) = self.since {
            log(format!(
                "push to {target}: it takes boots again, after {} s",
                since.elapsed().as_secs()
            ));
        }
        *self = Self::default();
    }
}

/// Pushes until `all_queued`, and after that the waiting boots for at most [`STOP_DEADLINE`].
pub async fn run(queue: Arc<Queue>, mut all_queued: watch::Receiver<bool>) {
    let (mut backoff, mut trouble) = (Backoff::default(), Trouble::default());
    tokio::select! {
        () = push_all(&queue, &mut backoff, &mut trouble, false) => {}
        () = stopped(&mut all_queued) => {}
    }
    let mut backoff = Backoff::default();
    let rest = push_all(&queue, &mut backoff, &mut trouble, true);
    let _late = tokio::time::timeout(STOP_DEADLINE, rest).await;
    let left: Vec<Waiting> = queue.boots().drain(..).collect();
    if !left.is_empty() {
        drop_boots(&queue.from.stats, left.len() as u64);
        let named: Vec<&str> = left
            .iter()
            .take(MAX_NAMED)
            .map(|waiting| &*waiting.boot)
            .collect();
        let more = if left.len() > MAX_NAMED { ", .." } else { "" };
        (queue.from.log)(format!(
            "{} boot(s) not pushed to {} before the stop: {}{more}: their files stay (export --otlp --push)",
            left.len(),
            queue.otlp.target,
            named.join(", ")
        ));
    }
}

/// Pushes waiting boots; with `once`, until none waits or the receiver fails.
async fn push_all(queue: &Queue, backoff: &mut Backoff, trouble: &mut Trouble, once: bool) {
    loop {
        let first = queue.boots().front().map(|waiting| waiting.boot.clone());
        let Some(boot) = first else {
            if once {
                return;
            }
            queue.more.notified().await;
            continue;
        };
        let pushed = push(queue, &boot).await;
        match settle(queue, trouble, &boot, pushed) {
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
fn settle(queue: &Queue, trouble: &mut Trouble, boot: &Arc<str>, pushed: Pushed) -> Next {
    let (stats, log, target) = (&queue.from.stats, &queue.from.log, &queue.otlp.target);
    match pushed {
        Pushed::Yes {
            spans,
            rejected,
            why,
        } => {
            trouble.over(target, log);
            add(&stats.pushed, 1);
            add(&stats.pushed_spans, spans - rejected);
            add(&stats.rejected_spans, rejected);
            if rejected > 0 || why.is_some() {
                log(format!(
                    "push to {target}: boot {boot}: {rejected} of {spans} span(s) rejected: {}",
                    why.unwrap_or_default()
                ));
            }
            queue.from.store.note(
                boot,
                HostEvent::Exported {
                    to: target.to_string(),
                    spans: spans - rejected,
                },
            );
            // A boot that a full queue dropped meanwhile was counted as dropped, too.
            queue.remove(boot);
            Next::Boot
        }
        Pushed::Never { why } => {
            if queue.remove(boot).is_some() {
                drop_boots(stats, 1);
            }
            log(format!(
                "push to {target}: boot {boot}: {why}: not pushed; its file stays (export --otlp --push)"
            ));
            Next::Boot
        }
        Pushed::Later {
            why,
            answered,
            after,
        } => {
            add(&stats.push_failures, 1);
            trouble.failed(&why, queue.waiting(), target, log);
            if answered && let Some(mut waiting) = queue.remove(boot) {
                waiting.tries += 1;
                if waiting.tries < MAX_TRIES {
                    queue.boots().push_back(waiting);
                } else {
                    drop_boots(stats, 1);
                    log(format!(
                        "push to {target}: boot {boot}: {why}: given up after {MAX_TRIES} tries; its file stays (export --otlp --push)"
                    ));
                }
            }
            Next::Pause(after)
        }
    }
}

/// Outcome of a push.
enum Pushed {
    Yes {
        spans: u64,
        rejected: u64,
        why: Option<String>,
    },
    Later {
        why: String,
        answered: bool,
        after: Option<Duration>,
    },
    Never {
        why: String,
    },
}

async fn push(queue: &Queue, boot: &str) -> Pushed {
    let Some(path) = queue.from.store.report(boot) else {
        return Pushed::Later {
            why: "its file is not complete: the disk takes nothing".into(),
            answered: false,
            after: None,
        };
    };
    // Connect first: without a receiver, reading is wasted.
    let mut connection = match connect(&queue.otlp.target).await {
        Ok(connection) => connection,
        Err(why) => {
            return Pushed::Later {
                why,
                answered: false,
                after: None,
            };
        }
    };
    let resource = queue.otlp.resource.clone();
    let request = match spawn_blocking(move || request(&path, &resource)).await {
        Ok(Ok(request)) => request,
        Ok(Err(e)) => {
            return Pushed::Never {
                why: format!("{e:#}"),
            };
        }
        Err(_) => {
            return Pushed::Never {
                why: "making spans of it panicked".into(),
            };
        }
    };
    let (mut spans, mut rejected, mut why) = (0, 0, None);
    // A later try sends accepted parts again: their spans have the same ids.
    for part in request.protobufs(MAX_REQUEST) {
        match connection.send(part.bytes).await {
            Outcome::Taken {
                rejected: n,
                why: said,
            } => {
                spans += part.spans;
                // The receiver's count is not trusted.
                rejected += n.min(part.spans);
                why = why.or(said);
            }
            Outcome::Later {
                why,
                answered,
                after,
            } => {
                return Pushed::Later {
                    why,
                    answered,
                    after,
                };
            }
            Outcome::Refused { why } => return Pushed::Never { why },
        }
    }
    Pushed::Yes {
        spans,
        rejected,
        why,
    }
}

fn request(path: &Path, resource: &Resource) -> Result<OtlpRequest<'static>> {
    check_size(path)?;
    otlp::request(Waterfall::new(&read_boot(path)?, &[]), resource)
}

/// Counts boots that are not pushed.
fn drop_boots(stats: &Stats, n: u64) {
    add(&stats.push_dropped, n);
}
