//! Listens, accepts, and runs one [`Connection`] per guest until told to stop.
//!
//! Watching never holds collecting up: news go into a bounded queue, and what does not fit is left out of the view, counted, and still
//! in the file.

use super::boot_log::{Store, lock};
use super::connection::{Connection, HostNow, News};
use super::listen::{Listener, NoVsock, Peer};
use anyhow::{Result, bail};
use std::collections::HashMap;
use std::io::{self, ErrorKind};
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::io::unix::AsyncFd;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;

/// Connections of one peer at a time: the stream, and one that is being replaced. A guest cannot take all of this machine's sockets.
const MAX_CONNECTIONS_PER_PEER: usize = 4;
/// Connections altogether, well below the usual limit of 1024 open files (each has a socket and a file).
const MAX_CONNECTIONS: usize = 400;
/// Pause after accept() failed for want of memory or descriptors: those come back by themselves, not by an event.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// News that may wait for whoever watches.
pub const NEWS_QUEUE: usize = 16 * 1024;

/// Where to listen and where to write.
#[derive(Clone, Debug)]
pub struct Config {
    pub dir: PathBuf,
    pub port: u32,
    pub vsock: bool,
    /// Base paths of hybrid vsock devices.
    pub uds: Vec<PathBuf>,
}

/// Listening, not yet accepting.
pub struct Collector {
    listeners: Vec<Listener>,
    shared: Arc<Shared>,
    /// Lines for people about how it started.
    pub notes: Vec<String>,
}

struct Shared {
    store: Arc<Mutex<Store>>,
    connections: Mutex<HashMap<Peer, usize>>,
    news: mpsc::Sender<News>,
    left_out: AtomicU64,
}

impl Shared {
    fn tell(&self, news: News) {
        if self.news.try_send(news).is_err() {
            self.left_out.fetch_add(1, Ordering::Relaxed);
        }
    }
}

impl Collector {
    /// On return the sockets are there: a VM may be started.
    pub fn bind(config: &Config, news: mpsc::Sender<News>) -> Result<Self> {
        let store = Arc::new(Mutex::new(Store::new(&config.dir)?));
        let mut listeners = Vec::new();
        let mut notes = Vec::new();
        for base in &config.uds {
            listeners.push(Listener::hybrid(base, config.port)?);
        }
        if config.vsock {
            match Listener::vsock(config.port) {
                Ok(listener) => listeners.push(listener),
                Err(NoVsock::NotSupported) if !listeners.is_empty() => {
                    notes.push("this kernel has no AF_VSOCK: only the sockets of --uds are served (--no-vsock silences this)".to_string());
                }
                Err(NoVsock::NotSupported) => bail!(
                    "this kernel has no AF_VSOCK: load it (modprobe vhost_vsock), or name the socket of a hybrid vsock device with --uds"
                ),
                Err(NoVsock::Other(e)) => return Err(e),
            }
        }
        if listeners.is_empty() {
            bail!("nothing to listen on: leave --no-vsock away, or name the socket of a hybrid vsock device with --uds");
        }
        notes.extend(listeners.iter().map(|l| format!("listening on {}", l.place())));
        let shared = Shared { store, connections: Mutex::default(), news, left_out: AtomicU64::new(0) };
        Ok(Self { listeners, shared: Arc::new(shared), notes })
    }

    /// Serves guests until `stop` becomes true (or its sender is gone); then all connections are closed and all files complete.
    /// Gives the number of news that nobody took.
    pub async fn run(self, stop: watch::Receiver<bool>) -> u64 {
        let mut accepting = JoinSet::new();
        for listener in self.listeners {
            accepting.spawn(accept_all(listener, self.shared.clone(), stop.clone()));
        }
        while accepting.join_next().await.is_some() {}
        self.shared.left_out.load(Ordering::Relaxed)
    }
}

async fn stopped(stop: &mut watch::Receiver<bool>) {
    // An error means that the sender is gone: also a stop.
    let _gone = stop.wait_for(|stop| *stop).await;
}

async fn accept_all(listener: Listener, shared: Arc<Shared>, mut stop: watch::Receiver<bool>) {
    let mut serving = JoinSet::new();
    loop {
        tokio::select! {
            () = stopped(&mut stop) => break,
            Some(_) = serving.join_next() => {}
            accepted = listener.accept() => match accepted {
                Ok((socket, peer)) => {
                    if let Some(slot) = Slot::take(&shared, &peer) {
                        serving.spawn(serve(socket, slot, stop.clone()));
                    } else {
                        shared.tell(News::Problem { text: format!("{peer}: too many connections at once, one was refused") });
                    }
                }
                Err(e) => {
                    shared.tell(News::Problem { text: format!("accept on {}: {e}", listener.place()) });
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            }
        }
    }
    while serving.join_next().await.is_some() {}
}

/// The right to one connection; given back when dropped.
struct Slot {
    shared: Arc<Shared>,
    peer: Peer,
}

impl Slot {
    fn take(shared: &Arc<Shared>, peer: &Peer) -> Option<Slot> {
        let mut connections = lock(&shared.connections);
        let mine = connections.get(peer).copied().unwrap_or(0);
        if mine >= MAX_CONNECTIONS_PER_PEER || connections.values().sum::<usize>() >= MAX_CONNECTIONS {
            return None;
        }
        connections.insert(peer.clone(), mine + 1);
        Some(Slot { shared: shared.clone(), peer: peer.clone() })
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        let mut connections = lock(&self.shared.connections);
        if let Some(mine) = connections.get_mut(&self.peer) {
            *mine -= 1;
            if *mine == 0 {
                connections.remove(&self.peer);
            }
        }
    }
}

async fn serve(socket: AsyncFd<OwnedFd>, slot: Slot, mut stop: watch::Receiver<bool>) {
    let shared = &slot.shared;
    let mut connection = Connection::new(slot.peer.to_string(), shared.store.clone(), HostNow::read());
    let mut result = talk(&socket, &mut connection, shared, &mut stop).await;
    if result.is_ok() && *stop.borrow() {
        // What had arrived before the stop is still taken.
        result = drain(&socket, &mut connection, shared);
    }
    let ended = connection.end(&mut |news| shared.tell(news));
    for error in [result.err(), ended.err()].into_iter().flatten() {
        shared.tell(News::Problem { text: format!("{error:#}") });
    }
}

/// Until the guest hangs up or the collector stops.
async fn talk(socket: &AsyncFd<OwnedFd>, connection: &mut Connection, shared: &Shared, stop: &mut watch::Receiver<bool>) -> Result<()> {
    let mut chunk = vec![0; 64 * 1024];
    loop {
        let due = tokio::time::Instant::from_std(connection.deadline());
        tokio::select! {
            () = stopped(stop) => return Ok(()),
            ready = socket.readable() => {
                let read = ready?.try_io(|fd| Ok(nix::unistd::read(fd.get_ref(), &mut chunk)?));
                match read {
                    Err(_would_block) => {}
                    Ok(Ok(0)) => return Ok(()),
                    Ok(Ok(n)) => connection.take(&chunk[..n], HostNow::read(), &mut |news| shared.tell(news))?,
                    Ok(Err(e)) => match e.kind() {
                        ErrorKind::Interrupted => {}
                        // How a VM that is switched off hangs up.
                        ErrorKind::ConnectionReset | ErrorKind::BrokenPipe => return Ok(()),
                        _ => return Err(e.into()),
                    },
                }
            }
            ready = socket.writable(), if !connection.output().is_empty() => {
                let out = connection.output();
                match ready?.try_io(|fd| Ok(nix::unistd::write(fd.get_ref(), out)?)) {
                    Err(_would_block) => {}
                    Ok(Ok(n)) => { out.drain(..n); }
                    // The guest closed its reading half, or altogether: reading will tell.
                    Ok(Err(e)) if e.kind() != ErrorKind::Interrupted => out.clear(),
                    Ok(Err(_)) => {}
                }
            }
            () = tokio::time::sleep_until(due) => connection.tick(HostNow::read())?,
        }
    }
}

/// Takes what the kernel holds of this connection, but not more than a boot may have.
fn drain(socket: &AsyncFd<OwnedFd>, connection: &mut Connection, shared: &Shared) -> Result<()> {
    let mut chunk = vec![0; 64 * 1024];
    for _ in 0..super::boot_log::MAX_BYTES / chunk.len() as u64 {
        match nix::unistd::read(socket.get_ref(), &mut chunk).map_err(io::Error::from) {
            Ok(0) => return Ok(()),
            Ok(n) => connection.take(&chunk[..n], HostNow::read(), &mut |news| shared.tell(news))?,
            Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::ConnectionReset) => return Ok(()),
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e.into()),
        }
    }
    Ok(())
}
