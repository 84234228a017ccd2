//! The sockets of connected guests, on two threads with runtimes of their own: one for new guests,
//! until their header came and a ping for their clock was sent; one for all others. New guests
//! never queue behind sending guests.
//!
//! Guests take turns of [`TURN`] bytes. A guest over its rate, or whose boot has too much waiting
//! for the disk, is not read for a while; its data waits in its socket. Nothing here blocks.

use super::collector_counters::{Stats, add};
use super::connection::{Connection, HostNow, Introduction, News};
use super::limits::Limits;
use super::listen::Peer;
use super::peers::{Peers, Slot};
use super::stop::stopped;
use super::store::{Log, Store};
use anyhow::{Context, Result};
use kata_gpu_host::async_fd::watch as watch_fd;
use kata_gpu_host::sleep::sleep_until;
use kata_gpu_report::data::boot_file::newer_sentence;
use kata_gpu_report::data::text::printable;
use std::io::{self, ErrorKind};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use tokio::io::unix::AsyncFd;
use tokio::runtime::Handle;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinSet;

/// Bytes read of one guest before the next guest's turn: some tens of records, some tens of
/// microseconds.
const TURN: usize = 8 * 1024;
/// Turns of guests between two looks at tasks from other threads. A probe is such a task: it has a
/// deadline, and on a busy machine few turns fit in a second. Tokio's default is 31.
const OWN_TURNS: u32 = 2;
/// Most bytes read of a connection after the stop: the most that the kernel holds for it.
const MAX_DRAIN: usize = 1 << 20;
/// Deadline for reading all connections empty after the stop.
const DRAIN_DEADLINE: Duration = Duration::from_secs(5);
/// Threads that read files back, for guests that reconnect after a restart of the collector.
const READERS_BACK: usize = 2;

/// State that all connections share.
pub struct Shared {
    pub store: Arc<Store>,
    pub peers: Arc<Peers>,
    pub news: mpsc::Sender<News>,
    pub stats: Arc<Stats>,
    pub limits: Limits,
    pub watched: bool,
    /// Logs problems that no peer causes.
    pub log_own: Log,
}

impl Shared {
    /// Sends news to the watcher; never waits.
    pub fn tell_news(&self, news: News) {
        if self.news.try_send(news).is_err() {
            add(&self.stats.unseen, 1);
        }
    }

    /// Logs a peer's problem, at a rate that does not fill the host's log.
    pub fn log(&self, peer: &Peer, text: &str) {
        if let Some(text) = self.peers.to_log(peer, text, Instant::now()) {
            self.tell_news(News::Problem { text });
        }
    }

    /// Logs a peer's normal action, within the same limit as problems.
    fn tell_of(&self, peer: &Peer, text: &str) {
        if let Some(text) = self.peers.to_log(peer, text, Instant::now()) {
            self.tell_news(News::Line { text });
        }
    }
}

/// A connection on its way through the threads.
struct Guest {
    socket: OwnedFd,
    slot: Slot,
    /// `None` until the connection is first served.
    connection: Option<Connection>,
}

/// The threads; cheap to clone.
#[derive(Clone)]
pub struct Streams {
    arrivals: mpsc::UnboundedSender<Guest>,
    stop: watch::Sender<bool>,
    ended: Arc<Mutex<Vec<oneshot::Receiver<()>>>>,
    threads: [Handle; 2],
}

impl Streams {
    pub fn start(shared: Arc<Shared>, on_thread: fn()) -> Result<Self> {
        // The slots of connections bound both queues.
        let (arrivals, arrived) = mpsc::unbounded_channel();
        let (talkers, talking) = mpsc::unbounded_channel();
        let stop = watch::Sender::new(false);
        let (arrive, first) = start(
            "arrivals",
            on_thread,
            serve_all(shared.clone(), arrived, Some(talkers), stop.subscribe()),
        )?;
        // The second thread ends when the first, and all connections from it, have ended.
        let (talk, second) = start(
            "streams",
            on_thread,
            serve_all(shared, talking, None, stop.subscribe()),
        )?;
        Ok(Self {
            arrivals,
            stop,
            ended: Arc::new(Mutex::new(vec![arrive, talk])),
            threads: [first, second],
        })
    }

    /// Serves one connection.
    pub fn take(&self, socket: OwnedFd, slot: Slot) {
        let _after_the_end = self.arrivals.send(Guest {
            socket,
            slot,
            connection: None,
        });
    }

    /// Returns when each thread has come to a new task; false if a thread has ended.
    pub async fn turn(&self) -> bool {
        for thread in &self.threads {
            if thread.spawn(async {}).await.is_err() {
                return false;
            }
        }
        true
    }

    /// Reads the data that has arrived, and ends all connections.
    pub async fn stop(&self) -> Result<()> {
        self.stop.send_replace(true);
        let ended = std::mem::take(&mut *self.ended.lock().unwrap_or_else(PoisonError::into_inner));
        for thread in ended {
            thread.await.context("a thread of the streams panicked")?;
        }
        Ok(())
    }
}

/// Starts a thread with a runtime. Returns a receiver of its end, and a handle for tasks.
fn start(
    name: &str,
    on_thread: fn(),
    work: impl Future<Output = ()> + Send + 'static,
) -> Result<(oneshot::Receiver<()>, Handle)> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(READERS_BACK)
        .global_queue_interval(OWN_TURNS)
        .on_thread_start(on_thread)
        .build()
        .context("start a runtime of the streams")?;
    let handle = runtime.handle().clone();
    let (end, ended) = oneshot::channel();
    let run = move || {
        on_thread();
        runtime.block_on(work);
        let _nobody_waits = end.send(());
    };
    std::thread::Builder::new()
        .name(name.into())
        .spawn(run)
        .with_context(|| format!("start thread {name}"))?;
    Ok((ended, handle))
}

/// Serves until the stop; guests that sent a header and were pinged go `onward`, if given.
async fn serve_all(
    shared: Arc<Shared>,
    mut queue: mpsc::UnboundedReceiver<Guest>,
    onward: Option<mpsc::UnboundedSender<Guest>>,
    mut stop: watch::Receiver<bool>,
) {
    let mut serving = JoinSet::new();
    let for_each = stop.clone();
    let is_first = onward.is_some();
    loop {
        tokio::select! {
            biased;
            guest = queue.recv() => match guest {
                Some(guest) => { serving.spawn(serve(guest, shared.clone(), onward.clone(), for_each.clone())); }
                None => break,
            },
            // The second thread goes on until the first has handed over its last guest.
            () = stopped(&mut stop), if is_first => break,
            Some(_) = serving.join_next() => {}
        }
    }
    drop(onward);
    // Serve connections that were accepted before the stop.
    queue.close();
    while let Some(guest) = queue.recv().await {
        serving.spawn(serve(guest, shared.clone(), None, for_each.clone()));
    }
    while serving.join_next().await.is_some() {}
}

async fn serve(
    guest: Guest,
    shared: Arc<Shared>,
    onward: Option<mpsc::UnboundedSender<Guest>>,
    mut stop: watch::Receiver<bool>,
) {
    let Guest {
        socket,
        mut slot,
        connection,
    } = guest;
    let socket = match watch_fd(socket) {
        Ok(socket) => socket,
        Err(e) => {
            return shared.log(
                &slot.peer,
                &format!("{}: watch the connection: {e}", slot.peer),
            );
        }
    };
    let mut connection = connection.unwrap_or_else(|| {
        Connection::new(
            slot.peer.to_string(),
            shared.limits,
            shared.watched,
            shared.stats.clone(),
            HostNow::read(),
        )
    });
    let talked = talk(
        &socket,
        &mut connection,
        &mut slot,
        &shared,
        onward.is_some(),
        &mut stop,
    )
    .await;
    if let (Ok(Talked::Introduced), Some(onward)) = (&talked, onward) {
        let _the_other_thread_is_there = onward.send(Guest {
            socket: socket.into_inner(),
            slot,
            connection: Some(connection),
        });
        return;
    }
    // Take the data that had arrived before the collector hung up.
    let result = match talked {
        Ok(_) => tokio::time::timeout(
            DRAIN_DEADLINE,
            drain(&socket, &mut connection, &slot, &shared),
        )
        .await
        .unwrap_or(Ok(())),
        Err(e) => Err(e),
    };
    let boot = connection.attached().map(|attached| attached.id().clone());
    let ended = connection.end(&mut |news| shared.tell_news(news));
    if let Some(boot) = boot {
        shared.tell_of(&slot.peer, &format!("boot {boot} disconnected"));
    }
    for error in [result.err(), ended.err()].into_iter().flatten() {
        shared.log(&slot.peer, &format!("{error:#}"));
    }
}

/// Reason for the end of `talk`.
enum Talked {
    /// The guest hung up, the collector stops, or the guest should come again.
    Over,
    /// The guest has sent its header, and was asked for its clock.
    Introduced,
}

/// Serves until the guest hangs up, the collector stops, or the guest should reconnect and send
/// everything again.
async fn talk(
    socket: &AsyncFd<OwnedFd>,
    connection: &mut Connection,
    slot: &mut Slot,
    shared: &Arc<Shared>,
    only_introduce: bool,
    stop: &mut watch::Receiver<bool>,
) -> Result<Talked> {
    let mut not_before = None;
    loop {
        if only_introduce && connection.was_pinged() {
            return Ok(Talked::Introduced);
        }
        let due = tokio::time::Instant::from_std(connection.deadline());
        let written = shared.store.written.notified();
        tokio::pin!(written);
        let mut has_room = connection
            .attached()
            .is_none_or(|attached| attached.has_room());
        if !has_room {
            // Check again after enabling the wait, so that no write in between is missed.
            written.as_mut().enable();
            has_room = connection
                .attached()
                .is_none_or(|attached| attached.has_room());
        }
        let paced = not_before.is_some_and(|at| Instant::now() < at);
        let output_waits = !connection.output().is_empty();
        let mut again = connection.attached().map(|attached| attached.again.clone());
        tokio::select! {
            () = stopped(stop) => return Ok(Talked::Over),
            ready = socket.readable(), if has_room && !paced => {
                match ready?.try_io(|fd| read_turn(fd.get_ref(), connection, shared)) {
                    Err(_would_block) => {}
                    Ok(Ok((0, _))) => return Ok(Talked::Over),
                    Ok(Ok((n, taken))) => {
                        taken?;
                        not_before = slot.spend(n, Instant::now());
                        introduce(connection, slot, shared).await?;
                        tokio::task::yield_now().await;
                    }
                    Ok(Err(e)) => match e.kind() {
                        ErrorKind::Interrupted => {}
                        // Errors of a VM that is switched off.
                        ErrorKind::ConnectionReset | ErrorKind::BrokenPipe => return Ok(Talked::Over),
                        _ => return Err(e).context(format!("read from {}", slot.peer)),
                    },
                }
            }
            () = &mut written, if !has_room => {}
            () = sleep_until(not_before), if paced => {}
            ready = socket.writable(), if output_waits => {
                let out = connection.output();
                match ready?.try_io(|fd| Ok(nix::unistd::write(fd.get_ref(), out)?)) {
                    Err(_would_block) => {}
                    Ok(Ok(n)) => { out.drain(..n); }
                    // The guest closed its reading half, or all: the next read shows it.
                    Ok(Err(e)) if e.kind() != ErrorKind::Interrupted => out.clear(),
                    Ok(Err(_)) => {}
                }
            }
            Some(true) = changed(&mut again) => return Ok(Talked::Over),
            Ok(()) = slot.sandbox.changed() => name(connection, slot),
            () = tokio::time::sleep_until(due) => connection.tick(HostNow::read())?,
        }
    }
}

/// Waits for a request that the guest reconnects; never returns before its header.
async fn changed(again: &mut Option<watch::Receiver<u64>>) -> Option<bool> {
    match again {
        Some(again) => Some(again.changed().await.is_ok()),
        None => std::future::pending().await,
    }
}

/// Reads once. The outer error is the socket's, the inner one ends the connection.
fn read_turn(
    socket: &OwnedFd,
    connection: &mut Connection,
    shared: &Shared,
) -> io::Result<(usize, Result<()>)> {
    let mut chunk = [0; TURN];
    let n = nix::unistd::read(socket, &mut chunk)?;
    let taken = connection.take(
        chunk.get(..n).unwrap_or_default(),
        HostNow::read(),
        &mut |news| shared.tell_news(news),
    );
    Ok((n, taken))
}

/// Deals with a header, if one came.
async fn introduce(connection: &mut Connection, slot: &Slot, shared: &Arc<Shared>) -> Result<()> {
    let Some(Introduction {
        schema,
        header,
        raw,
    }) = connection.introduction()
    else {
        return Ok(());
    };
    let may_begin = || slot.new_boot(Instant::now());
    let attached = shared
        .store
        .attach(&header, &raw, &slot.peer.to_string(), may_begin)
        .await?;
    let text = format!(
        "boot {} connected from {}, kata-gpu-init {}",
        attached.id(),
        slot.peer,
        printable(&header.version)
    );
    shared.tell_of(&slot.peer, &text);
    if let Some(newer) = newer_sentence(schema) {
        shared.log(&slot.peer, &format!("boot {}: {newer}", attached.id()));
    }
    connection.begin(attached, HostNow::read(), &mut |news| {
        shared.tell_news(news)
    })?;
    name(connection, slot);
    Ok(())
}

/// Stores Kata's names of the VM in the boot's file.
fn name(connection: &Connection, slot: &Slot) {
    let sandbox = slot.sandbox.borrow().clone();
    if let (Some(attached), Some(sandbox)) = (connection.attached(), sandbox) {
        attached.with(|log| log.append_sandbox(&sandbox));
        attached.flush();
    }
}

/// Takes the data that the kernel holds of this connection.
async fn drain(
    socket: &AsyncFd<OwnedFd>,
    connection: &mut Connection,
    slot: &Slot,
    shared: &Arc<Shared>,
) -> Result<()> {
    let mut left = MAX_DRAIN;
    while left > 0 {
        let written = shared.store.written.notified();
        tokio::pin!(written);
        written.as_mut().enable();
        if connection
            .attached()
            .is_some_and(|attached| !attached.has_room())
        {
            written.await;
            continue;
        }
        match read_turn(socket.get_ref(), connection, shared) {
            Ok((0, _)) => return Ok(()),
            Ok((n, taken)) => {
                taken?;
                left = left.saturating_sub(n);
                introduce(connection, slot, shared).await?;
                tokio::task::yield_now().await;
            }
            Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::ConnectionReset) => {
                return Ok(());
            }
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) => return Err(e).context(format!("read from {}", slot.peer)),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_probe_waits_for_a_few_turns_of_any_number_of_guests() {
        const ONE: Duration = Duration::from_millis(50);
        let (stop, stopped) = watch::channel(false);
        let guest = |stopped: watch::Receiver<bool>| async move {
            while !*stopped.borrow() {
                std::thread::sleep(ONE);
                tokio::task::yield_now().await;
            }
        };
        let work = async move {
            let guests: JoinSet<()> = (0..200).map(|_| guest(stopped.clone())).collect();
            guests.join_all().await;
        };
        let (_end, thread) = start("streams", || (), work).unwrap();
        let mut longest = Duration::ZERO;
        for _ in 0..3 {
            let asked = Instant::now();
            thread.spawn(async {}).await.unwrap();
            longest = longest.max(asked.elapsed());
        }
        stop.send_replace(true);
        assert!(longest < 10 * ONE, "{longest:?}");
    }
}
