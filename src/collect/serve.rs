//! The sockets of connected guests, on two threads with runtimes of their own: one for new guests,
//! until their header came and a ping for their clock was sent; one for all others. New guests
//! never queue behind sending guests.
//!
//! Guests take turns of [`TURN`] bytes. A guest over its rate, or whose boot has too much waiting
//! for the disk, is not read for a while; its data waits in its socket. Nothing here blocks.

use super::connection::{Connection, HostNow, Introduction};
use super::lock::lock;
use super::peers::Slot;
use super::shared::Shared;
use super::stop::stopped;
use super::store::Attached;
use super::threads::Runtime;
use anyhow::{Context, Result};
use kata_gpu_host::async_fd::watch as watch_fd;
use kata_gpu_host::sleep::sleep_until;
use kata_gpu_report::data::boot_file::newer_sentence;
use kata_gpu_report::data::text::printable;
use std::io::{self, ErrorKind};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tokio::io::unix::AsyncFd;
use tokio::runtime::Handle;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;

/// Bytes read of one guest before the next guest's turn: some tens of records, some tens of
/// microseconds.
const TURN: usize = 8 * 1024;
/// Most bytes read of a connection after the stop: the most that the kernel holds for it.
const MAX_DRAIN: usize = 1 << 20;
/// Deadline for reading all connections empty after the stop.
const DRAIN_DEADLINE: Duration = Duration::from_secs(5);

/// A connection on its way through the threads.
struct Guest<Socket = OwnedFd> {
    socket: Socket,
    slot: Slot,
    connection: Connection,
}

type Guests = mpsc::UnboundedSender<Guest>;

/// The threads; cheap to clone.
#[derive(Clone)]
pub struct Streams {
    shared: Arc<Shared>,
    arrivals: Guests,
    stop: watch::Sender<bool>,
    threads: Arc<Mutex<Vec<Runtime>>>,
    handles: [Handle; 2],
}

impl Streams {
    pub fn start(shared: &Arc<Shared>) -> Result<Self> {
        // The slots of connections bound both queues.
        let (arrivals, arrived) = mpsc::unbounded_channel();
        let (talkers, talking) = mpsc::unbounded_channel();
        let stop = watch::Sender::new(false);
        let serve = |queue, onward| serve_all(shared.clone(), queue, onward, stop.subscribe());
        let first = Runtime::start("arrivals", || (), serve(arrived, Some(talkers)))?;
        // The second thread ends when the first, and all connections from it, have ended.
        let second = Runtime::start("streams", || (), serve(talking, None))?;
        Ok(Self {
            shared: shared.clone(),
            arrivals,
            stop,
            handles: [first.handle.clone(), second.handle.clone()],
            threads: Arc::new(Mutex::new(vec![first, second])),
        })
    }

    /// Serves one connection.
    pub fn take(&self, socket: OwnedFd, slot: Slot) {
        let shared = &self.shared;
        let stats = shared.store.stats.clone();
        let peer = slot.peer.to_string();
        let connection = Connection::new(peer, shared.store.limits, stats, HostNow::read());
        let _after_the_end = self.arrivals.send(Guest {
            socket,
            slot,
            connection,
        });
    }

    /// Returns when each thread has come to a new task; false if a thread has ended.
    pub async fn turn(&self) -> bool {
        for thread in &self.handles {
            if thread.spawn(async {}).await.is_err() {
                return false;
            }
        }
        true
    }

    /// Reads the data that has arrived, and ends all connections.
    pub async fn stop(&self) -> Result<()> {
        self.stop.send_replace(true);
        let threads = std::mem::take(&mut *lock(&self.threads));
        for thread in threads {
            thread.ended().await?;
        }
        Ok(())
    }
}

/// Serves until the stop; guests that sent a header and were pinged go `onward`, if given.
async fn serve_all(
    shared: Arc<Shared>,
    mut queue: mpsc::UnboundedReceiver<Guest>,
    onward: Option<Guests>,
    mut stop: watch::Receiver<bool>,
) {
    let mut serving = JoinSet::new();
    let for_each = stop.clone();
    let is_first = onward.is_some();
    loop {
        tokio::select! {
            biased;
            guest = queue.recv() => match guest {
                Some(guest) => {
                    let stop = for_each.clone();
                    serving.spawn(serve(guest, shared.clone(), onward.clone(), stop));
                }
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
    onward: Option<Guests>,
    mut stop: watch::Receiver<bool>,
) {
    let Guest {
        socket,
        slot,
        connection,
    } = guest;
    let peer = slot.peer.clone();
    let socket = match watch_fd(socket) {
        Ok(socket) => socket,
        Err(e) => return shared.log_of(&peer, &format!("{peer}: watch the connection: {e}")),
    };
    let mut served = Guest {
        socket,
        slot,
        connection,
    };
    let talked = served.talk(&shared, onward.is_some(), &mut stop).await;
    if let (Ok(Talked::Introduced), Some(onward)) = (&talked, onward) {
        let _the_other_thread_is_there = onward.send(Guest {
            socket: served.socket.into_inner(),
            slot: served.slot,
            connection: served.connection,
        });
        return;
    }
    let drained = match talked {
        // Take the data that had arrived before the collector hung up.
        Ok(_) => {
            let drained = tokio::time::timeout(DRAIN_DEADLINE, served.drain(&shared)).await;
            drained.unwrap_or(Ok(()))
        }
        Err(e) => Err(e),
    };
    let boot = served.connection.attached().map(|boot| boot.id().clone());
    let ended = served.connection.end();
    if let Some(boot) = boot {
        shared.log_of(&peer, &format!("boot {boot} disconnected"));
    }
    for error in [drained.err(), ended.err()].into_iter().flatten() {
        shared.log_of(&peer, &format!("{error:#}"));
    }
}

/// Reason for the end of [`Served::talk`].
enum Talked {
    /// The guest hung up, the collector stops, or the guest should come again.
    Over,
    /// The guest has sent its header, and was asked for its clock.
    Introduced,
}

/// Result of one reading of a socket.
enum Turn {
    Read(usize),
    /// Nothing is there now.
    Nothing,
    /// The guest hung up, or its VM was switched off.
    End,
}

/// A connection that is served.
type Served = Guest<AsyncFd<OwnedFd>>;

impl Served {
    /// Serves until the guest hangs up, the collector stops, or the guest should reconnect and send
    /// everything again.
    async fn talk(
        &mut self,
        shared: &Shared,
        only_introduce: bool,
        stop: &mut watch::Receiver<bool>,
    ) -> Result<Talked> {
        let mut not_before = None;
        loop {
            if only_introduce && self.connection.was_pinged() {
                return Ok(Talked::Introduced);
            }
            let due = Some(self.connection.deadline());
            let written = shared.store.written.notified();
            tokio::pin!(written);
            let mut has_room = self.has_room();
            if !has_room {
                // Check again after enabling the wait, so that no write in between is missed.
                written.as_mut().enable();
                has_room = self.has_room();
            }
            let paced = not_before.is_some_and(|at| Instant::now() < at);
            let output_waits = !self.connection.output().is_empty();
            let mut again = self.connection.attached().map(|boot| boot.again.clone());
            tokio::select! {
                () = stopped(stop) => return Ok(Talked::Over),
                ready = self.socket.readable(), if has_room && !paced => {
                    let mut ready = ready?;
                    match read(self.socket.get_ref(), &mut self.connection)? {
                        Turn::Read(n) => {
                            not_before = self.slot.spend(n, Instant::now());
                            self.introduce(shared).await?;
                            tokio::task::yield_now().await;
                        }
                        Turn::Nothing => ready.clear_ready(),
                        Turn::End => return Ok(Talked::Over),
                    }
                }
                () = &mut written, if !has_room => {}
                () = sleep_until(not_before), if paced => {}
                ready = self.socket.writable(), if output_waits => {
                    let out = self.connection.output();
                    match ready?.try_io(|fd| Ok(nix::unistd::write(fd.get_ref(), out)?)) {
                        Err(_would_block) => {}
                        Ok(Ok(n)) => { out.drain(..n); }
                        // The guest closed its reading half, or all: the next read shows it.
                        Ok(Err(e)) if e.kind() != ErrorKind::Interrupted => out.clear(),
                        Ok(Err(_)) => {}
                    }
                }
                Some(true) = changed(&mut again) => return Ok(Talked::Over),
                Ok(()) = self.slot.sandbox.changed() => self.name(),
                () = sleep_until(due) => self.connection.tick(HostNow::read())?,
            }
        }
    }

    fn has_room(&self) -> bool {
        self.connection.attached().is_none_or(Attached::has_room)
    }

    /// Deals with a header, if one came.
    async fn introduce(&mut self, shared: &Shared) -> Result<()> {
        let Some(introduction) = self.connection.introduction() else {
            return Ok(());
        };
        let Introduction {
            schema,
            header,
            raw,
        } = introduction;
        let peer = &self.slot.peer;
        let may_begin = || self.slot.new_boot(Instant::now());
        let attached = shared
            .store
            .attach(&header, &raw, &peer.to_string(), may_begin)
            .await?;
        let (boot, version) = (attached.id(), printable(&header.version));
        let text = format!("boot {boot} connected from {peer}, kata-gpu-init {version}");
        shared.log_of(peer, &text);
        if let Some(newer) = newer_sentence(schema) {
            shared.log_of(peer, &format!("boot {boot}: {newer}"));
        }
        self.connection.begin(attached, HostNow::read())?;
        self.name();
        Ok(())
    }

    /// Stores Kata's names of the VM in the boot's file.
    fn name(&self) {
        let sandbox = self.slot.sandbox.borrow().clone();
        if let (Some(attached), Some(sandbox)) = (self.connection.attached(), sandbox) {
            attached.with(|log| log.append_sandbox(&sandbox));
            attached.flush();
        }
    }

    /// Takes the data that the kernel holds of this connection.
    async fn drain(&mut self, shared: &Shared) -> Result<()> {
        let mut left = MAX_DRAIN;
        while left > 0 {
            let written = shared.store.written.notified();
            tokio::pin!(written);
            written.as_mut().enable();
            if !self.has_room() {
                written.await;
                continue;
            }
            match read(self.socket.get_ref(), &mut self.connection)? {
                Turn::Read(n) => {
                    left = left.saturating_sub(n);
                    self.introduce(shared).await?;
                    tokio::task::yield_now().await;
                }
                Turn::Nothing | Turn::End => break,
            }
        }
        Ok(())
    }
}

/// Waits for a request that the guest reconnects; never returns before its header.
async fn changed(again: &mut Option<watch::Receiver<u64>>) -> Option<bool> {
    match again {
        Some(again) => Some(again.changed().await.is_ok()),
        None => std::future::pending().await,
    }
}

/// Reads once.
fn read(socket: &OwnedFd, connection: &mut Connection) -> Result<Turn> {
    let mut chunk = [0; TURN];
    loop {
        let error = match nix::unistd::read(socket, &mut chunk) {
            Ok(0) => return Ok(Turn::End),
            Ok(n) => {
                connection.take(chunk.get(..n).unwrap_or_default(), HostNow::read())?;
                return Ok(Turn::Read(n));
            }
            Err(errno) => io::Error::from(errno),
        };
        match error.kind() {
            ErrorKind::Interrupted => {}
            ErrorKind::WouldBlock => return Ok(Turn::Nothing),
            // Errors of a VM that is switched off.
            ErrorKind::ConnectionReset | ErrorKind::BrokenPipe => return Ok(Turn::End),
            _ => return Err(error).context(format!("read from {}", connection.peer())),
        }
    }
}
