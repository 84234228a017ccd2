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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::events::record::{self, DEFAULT_PORT, Header, Pong};
    use crate::host::boot_file::{BootFile, HostEvent};
    use crate::host::testing::TempDir;
    use std::path::Path;
    use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
    use tokio::net::UnixStream;

    const BOOT: &str = "0f7a1f8e-0000-4000-8000-00000000beef";
    /// Everything here takes milliseconds.
    const DEADLINE: Duration = Duration::from_secs(20);

    struct Run {
        dir: TempDir,
        news: mpsc::Receiver<News>,
        stop: watch::Sender<bool>,
        running: tokio::task::JoinHandle<u64>,
    }

    impl Run {
        fn start(dir: TempDir) -> Self {
            let (sender, news) = mpsc::channel(NEWS_QUEUE);
            let config = Config { dir: dir.path().join("boots"), port: DEFAULT_PORT, vsock: false, uds: vec![dir.path().join("v")] };
            let collector = Collector::bind(&config, sender).unwrap();
            let (stop, stopped) = watch::channel(false);
            Self { dir, news, stop, running: tokio::spawn(collector.run(stopped)) }
        }

        async fn connect(&self) -> UnixStream {
            UnixStream::connect(self.dir.path().join(format!("v_{DEFAULT_PORT}"))).await.unwrap()
        }

        async fn until(&mut self, what: &str, mut is: impl FnMut(&News) -> bool) {
            let found = async {
                while let Some(news) = self.news.recv().await {
                    if is(&news) {
                        return;
                    }
                }
                panic!("the collector ended before {what}");
            };
            tokio::time::timeout(DEADLINE, found).await.unwrap_or_else(|_| panic!("no {what} within {DEADLINE:?}"));
        }

        async fn stop(self) -> TempDir {
            self.stop.send_replace(true);
            tokio::time::timeout(DEADLINE, self.running).await.expect("the collector stops").unwrap();
            self.dir
        }
    }

    fn read(dir: &Path) -> BootFile {
        BootFile::read(std::fs::File::open(dir.join(format!("boots/{BOOT}.ndjson"))).unwrap()).unwrap()
    }

    fn header() -> String {
        record::header_line(&Header { boot_id: BOOT.into(), version: "0.1.0".into(), kernel: "6.1".into(), first_seq: 0 })
    }

    fn event(seq: u64) -> String {
        format!("{{\"schema\":1,\"seq\":{seq},\"boottime_ns\":1,\"kind\":\"event\",\"name\":\"x\"}}\n")
    }

    #[tokio::test]
    async fn a_boot_survives_reconnects_and_a_restart_of_the_collector_without_a_double_record() {
        let mut run = Run::start(TempDir::new());
        for count in [10, 20] {
            let mut guest = run.connect().await;
            let text: String = (0..count).map(event).collect();
            guest.write_all((header() + &text).as_bytes()).await.unwrap();
            drop(guest);
            run.until("end of the connection", |n| matches!(n, News::Ended { .. })).await;
        }
        let dir = run.stop().await;
        let mut run = Run::start(dir);
        let mut guest = run.connect().await;
        let text: String = (0..30).map(event).collect();
        guest.write_all((header() + &text).as_bytes()).await.unwrap();
        run.until("record 29", |n| matches!(n, News::Record { record, .. } if record.seq == 29)).await;
        let dir = run.stop().await;
        let file = read(dir.path());
        assert_eq!(file.records.iter().map(|r| r.seq).collect::<Vec<_>>(), (0..30).collect::<Vec<_>>());
        let text = std::fs::read_to_string(dir.path().join(format!("boots/{BOOT}.ndjson"))).unwrap();
        assert_eq!(text.lines().filter(|l| l.contains("\"seq\":")).count(), 30);
        assert_eq!(file.damaged, 0);
        assert!(!dir.path().join(format!("v_{DEFAULT_PORT}")).exists(), "the socket goes with the collector");
    }

    #[tokio::test]
    async fn the_guests_clock_is_measured_through_the_stream() {
        let mut run = Run::start(TempDir::new());
        let guest = run.connect().await;
        let (reader, mut writer) = guest.into_split();
        writer.write_all(header().as_bytes()).await.unwrap();
        let mut pings = BufReader::new(reader).lines();
        for _ in 0..8 {
            let line = tokio::time::timeout(DEADLINE, pings.next_line()).await.expect("a ping comes").unwrap().unwrap();
            let pong = record::ping(line.as_bytes()).expect("it is a ping");
            let boottime_ns = nix::time::clock_gettime(nix::time::ClockId::CLOCK_BOOTTIME).unwrap();
            let boottime_ns = Duration::from(boottime_ns).as_nanos() as u64;
            writer.write_all(record::pong_line(Pong { pong, boottime_ns }).as_bytes()).await.unwrap();
        }
        run.until("clock sample", |n| matches!(n, News::Clock { .. })).await;
        // The guest of this test is this machine, so the true offset is known, up to the time between two readings.
        let before = crate::host::text::realtime_ns();
        let boottime = Duration::from(nix::time::clock_gettime(nix::time::ClockId::CLOCK_BOOTTIME).unwrap()).as_nanos() as i64;
        let slack = crate::host::text::realtime_ns().abs_diff(before) + 1000;
        let dir = run.stop().await;
        let file = read(dir.path());
        let best = file.clock_samples().min_by_key(|s| s.error_ns).unwrap();
        let wrong_by = best.offset_ns.abs_diff(before - boottime);
        assert!(wrong_by <= best.error_ns + slack, "{best:?} is wrong by {wrong_by} ns");
    }

    #[tokio::test]
    async fn what_was_sent_before_the_stop_is_stored() {
        let mut run = Run::start(TempDir::new());
        let mut guest = run.connect().await;
        guest.write_all(header().as_bytes()).await.unwrap();
        run.until("connection", |n| matches!(n, News::Connected { .. })).await;
        let text: String = (0..200).map(event).collect();
        guest.write_all(text.as_bytes()).await.unwrap();
        let dir = run.stop().await;
        let file = read(dir.path());
        assert_eq!(file.records.len(), 200);
        assert!(matches!(file.host.last().unwrap().event, HostEvent::Disconnected { records: 200, .. }));
    }

    #[tokio::test]
    async fn one_peer_has_only_so_many_connections_and_gets_them_back() {
        let mut run = Run::start(TempDir::new());
        let mut guests = Vec::new();
        for _ in 0..=MAX_CONNECTIONS_PER_PEER {
            guests.push(run.connect().await);
        }
        run.until("refusal", |n| matches!(n, News::Problem { text } if text.contains("too many"))).await;
        guests.clear();
        // All slots come back when the collector has seen the hang-ups.
        let connected = async {
            loop {
                let mut guest = run.connect().await;
                if guest.write_all((header() + &event(0)).as_bytes()).await.is_ok() {
                    let news = tokio::time::timeout(Duration::from_millis(100), run.news.recv()).await;
                    if matches!(news, Ok(Some(News::Connected { .. }))) {
                        return;
                    }
                }
            }
        };
        tokio::time::timeout(DEADLINE, connected).await.expect("a slot comes free");
        run.stop().await;
    }

    #[tokio::test]
    async fn nothing_to_listen_on_is_an_error_with_the_cure() {
        let dir = TempDir::new();
        let (sender, _news) = mpsc::channel(1);
        let config = Config { dir: dir.path().to_path_buf(), port: DEFAULT_PORT, vsock: false, uds: vec![] };
        let error = Collector::bind(&config, sender).err().expect("nothing to listen on").to_string();
        assert!(error.contains("--uds"), "{error}");
    }
}
