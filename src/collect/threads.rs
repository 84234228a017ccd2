//! Threads without privileges, some with a runtime of their own.

use super::privileges::drop_in_thread;
use anyhow::{Context, Result};
use std::thread::{Builder, JoinHandle};
use tokio::runtime::Handle;
use tokio::sync::oneshot;

/// Blocking threads of a runtime: they read files of boots, and look up names.
const BLOCKING: usize = 2;
/// Turns of guests between two looks at tasks from other threads. A probe is such a task: it has a
/// deadline, and on a busy machine few turns fit in a second. Tokio's default is 31.
const OWN_TURNS: u32 = 2;

/// Starts a thread.
pub fn start(name: &str, work: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>> {
    let run = move || {
        drop_in_thread();
        work();
    };
    Builder::new()
        .name(name.into())
        .spawn(run)
        .with_context(|| format!("start thread {name}"))
}

/// A thread with a runtime.
pub struct Runtime {
    /// For tasks from other threads.
    pub handle: Handle,
    ended: oneshot::Receiver<()>,
}

impl Runtime {
    /// Starts the thread; `first` is run on it, and on each of its blocking threads.
    pub fn start(
        name: &str,
        first: fn(),
        work: impl Future<Output = ()> + Send + 'static,
    ) -> Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .max_blocking_threads(BLOCKING)
            .global_queue_interval(OWN_TURNS)
            .on_thread_start(move || {
                drop_in_thread();
                first();
            })
            .build()
            .with_context(|| format!("start the runtime of thread {name}"))?;
        let handle = runtime.handle().clone();
        let (end, ended) = oneshot::channel();
        start(name, move || {
            first();
            runtime.block_on(work);
            let _nobody_waits = end.send(());
        })?;
        Ok(Self { handle, ended })
    }

    /// Waits for the end of the work.
    pub async fn ended(self) -> Result<()> {
        self.ended.await.context("a thread panicked")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::{Arc, Mutex};
    use std::time::Duration;
    use tokio::sync::watch;
    use tokio::task::JoinSet;

    #[tokio::test]
    async fn a_probe_waits_for_a_few_turns_of_any_number_of_guests() {
        let (stop, stopped) = watch::channel(false);
        // Turns so far: while a probe is handed over, no guest has one.
        let turns = Arc::new(Mutex::new(0_u32));
        let guest = |stopped: watch::Receiver<bool>, turns: Arc<Mutex<u32>>| async move {
            while !*stopped.borrow() {
                *turns.lock().unwrap() += 1;
                std::thread::sleep(Duration::from_millis(1));
                tokio::task::yield_now().await;
            }
        };
        let counted = Arc::clone(&turns);
        let work = async move {
            let guests: JoinSet<()> = (0..200)
                .map(|_| guest(stopped.clone(), Arc::clone(&counted)))
                .collect();
            guests.join_all().await;
        };
        let thread = Runtime::start("streams", || (), work).unwrap();
        let mut most = 0;
        for _ in 0..3 {
            let seen = Arc::clone(&turns);
            let (before, probe) = {
                let turns = turns.lock().unwrap();
                let probe = thread.handle.spawn(async move { *seen.lock().unwrap() });
                (*turns, probe)
            };
            most = most.max(probe.await.unwrap() - before);
        }
        stop.send_replace(true);
        assert!(most < 10, "{most} turns");
    }
}
