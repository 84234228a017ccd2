//! The host's end of the stream, as simple as can be: it decodes what comes and keeps it. The
//! product's collector has tests of its own.

use anyhow::{Context, Result};
use kata_gpu_wire::catalogue::undocumented;
use kata_gpu_wire::decode::decode;
use kata_gpu_wire::record::{DEFAULT_PORT, Header, Kind, Line, Pong, Record};
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, ErrorKind, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Behaviour of the receiver at the stream's end.
#[derive(Clone, Copy, Debug)]
pub enum Listener {
    /// A listener that reads everything.
    Reads,
    /// One that accepts and does not read, until [`Receiver::wake`].
    Deaf,
    /// One that closes what it has accepted, until [`Receiver::relent`].
    HangsUp,
    /// Nobody, until [`Receiver::arrive`].
    Absent,
}

#[derive(Default)]
struct Received {
    headers: Vec<Header>,
    /// By seq: a replay after a reconnect brings nothing twice.
    records: BTreeMap<u64, Record>,
    pongs: Vec<Pong>,
    garbage: Vec<String>,
    /// Connections that are read.
    live: Vec<UnixStream>,
    /// Kept open, unread.
    deaf: Vec<UnixStream>,
    /// Connections that were closed at once.
    hung_up: usize,
    relented: bool,
}

impl Received {
    fn take(&mut self, line: &[u8]) {
        match decode(line) {
            Ok(Line::Header(header)) => self.headers.push(header),
            Ok(Line::Record(record)) => {
                let fields = record.fields.keys().map(String::as_str);
                let unknown: Vec<&str> = undocumented(&record.name, fields).collect();
                if record.kind != Kind::Kmsg && !unknown.is_empty() {
                    self.garbage.push(format!(
                        "{}: fields {unknown:?} are not in the catalogue",
                        record.name
                    ));
                }
                let again = self
                    .records
                    .entry(record.seq)
                    .or_insert_with(|| (*record).clone());
                if *again != *record {
                    self.garbage.push(format!(
                        "seq {} came twice, and not the same: {again:?}, {record:?}",
                        record.seq
                    ));
                }
            }
            Ok(Line::Pong(pong)) => self.pongs.push(pong),
            Err(error) => self
                .garbage
                .push(format!("{error}: {}", String::from_utf8_lossy(line))),
        }
    }
}

/// Receives one guest's stream.
pub struct Receiver {
    path: PathBuf,
    shared: Arc<(Mutex<Received>, Condvar)>,
}

impl Receiver {
    pub fn start(uds: &Path, listener: Listener) -> Result<Self> {
        let mut path = uds.as_os_str().to_owned();
        path.push(format!("_{DEFAULT_PORT}"));
        let receiver = Self {
            path: path.into(),
            shared: Arc::default(),
        };
        match listener {
            Listener::Absent => {}
            other => receiver.listen(other)?,
        }
        Ok(receiver)
    }

    /// Starts to listen and read now.
    pub fn arrive(&self) -> Result<()> {
        self.listen(Listener::Reads)
    }

    fn listen(&self, manner: Listener) -> Result<()> {
        let listener = UnixListener::bind(&self.path)
            .with_context(|| format!("listen on {}", self.path.display()))?;
        let shared = Arc::clone(&self.shared);
        std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let mut received = shared.0.lock().unwrap_or_else(PoisonError::into_inner);
                match manner {
                    Listener::Deaf => received.deaf.push(stream),
                    Listener::HangsUp if !received.relented => {
                        received.hung_up += 1;
                        drop(received);
                        hang_up(stream);
                    }
                    _ => {
                        drop(received);
                        read(stream, &shared);
                    }
                }
                shared.1.notify_all();
            }
        });
        Ok(())
    }

    /// Waits for a record that has come or will come.
    pub fn wait(&self, deadline: Duration, wanted: impl Fn(&Record) -> bool) -> Option<Record> {
        self.until(deadline, |r| {
            r.records.values().find(|x| wanted(x)).cloned()
        })
    }

    /// Waits for this many records; gives all there are then.
    pub fn wait_several(
        &self,
        deadline: Duration,
        count: usize,
        wanted: impl Fn(&Record) -> bool,
    ) -> Option<Vec<Record>> {
        self.until(deadline, |r| {
            let all: Vec<Record> = r.records.values().filter(|x| wanted(x)).cloned().collect();
            (all.len() >= count).then_some(all)
        })
    }

    /// Waits until `find` has found something in all records so far, in order of seq.
    pub fn wait_until<T>(
        &self,
        deadline: Duration,
        find: impl Fn(&[&Record]) -> Option<T>,
    ) -> Option<T> {
        self.until(deadline, |r| find(&r.records.values().collect::<Vec<_>>()))
    }

    /// Waits until somebody has connected to a deaf listener.
    pub fn wait_deaf(&self, deadline: Duration) -> bool {
        self.until(deadline, |r| (!r.deaf.is_empty()).then_some(()))
            .is_some()
    }

    /// Waits until so many connections have been closed at once.
    pub fn wait_hung_up(&self, deadline: Duration, count: usize) -> Option<()> {
        self.until(deadline, |r| (r.hung_up >= count).then_some(()))
    }

    /// Reads from now on, instead of closing what comes.
    pub fn relent(&self) {
        self.lock().relented = true;
    }

    /// Reads from now on what a deaf listener has accepted.
    pub fn wake(&self) {
        let deaf = std::mem::take(&mut self.lock().deaf);
        deaf.into_iter()
            .for_each(|stream| read(stream, &self.shared));
    }

    /// Closes every connection; the listener stays.
    pub fn hang_up(&self) {
        for stream in self.lock().live.drain(..) {
            let _unused = stream.shutdown(Shutdown::Both); // the guest may have been faster
        }
    }

    /// Says something to the guest on the newest connection, whether it is read or not; gives how
    /// many bytes went out before `stall` passed without the guest taking any more.
    pub fn say(&self, bytes: &[u8], stall: Duration) -> Result<usize> {
        let mut stream = {
            let received = self.lock();
            received
                .live
                .last()
                .or(received.deaf.last())
                .context("the guest is not connected")?
                .try_clone()?
        };
        stream.set_write_timeout(Some(stall))?;
        let mut sent = 0;
        while sent < bytes.len() {
            match stream.write(&bytes[sent..]) {
                Ok(n) => sent += n,
                // The other end may be gone, too: it takes nothing any more.
                Err(e)
                    if [
                        ErrorKind::WouldBlock,
                        ErrorKind::BrokenPipe,
                        ErrorKind::ConnectionReset,
                    ]
                    .contains(&e.kind()) =>
                {
                    break;
                }
                Err(e) => return Err(e).context("write to the guest"),
            }
        }
        Ok(sent)
    }

    /// Waits until this many connections have begun; gives their headers.
    pub fn wait_headers(&self, deadline: Duration, connections: usize) -> Option<Vec<Header>> {
        self.until(deadline, |r| {
            (r.headers.len() >= connections).then(|| r.headers.clone())
        })
    }

    /// Waits for the answers to this many pings.
    pub fn wait_pongs(&self, deadline: Duration, answers: usize) -> Option<Vec<Pong>> {
        self.until(deadline, |r| {
            (r.pongs.len() >= answers).then(|| r.pongs.clone())
        })
    }

    fn lock(&self) -> MutexGuard<'_, Received> {
        self.shared.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn until<T>(&self, deadline: Duration, find: impl Fn(&Received) -> Option<T>) -> Option<T> {
        let end = Instant::now() + deadline;
        let mut received = self.lock();
        loop {
            if let Some(found) = find(&received) {
                return Some(found);
            }
            let left = end.checked_duration_since(Instant::now())?;
            received = self
                .shared
                .1
                .wait_timeout(received, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }

    /// All records so far, in order of seq.
    pub fn records(&self) -> Vec<Record> {
        self.lock().records.values().cloned().collect()
    }

    pub fn headers(&self) -> Vec<Header> {
        self.lock().headers.clone()
    }

    /// Lines that were no lines of the format.
    pub fn garbage(&self) -> Vec<String> {
        self.lock().garbage.clone()
    }
}

/// Ends a connection, and waits on a thread of its own until the guest has. vhost-device-vsock
/// 0.3.0 ignores that a write to a closed end fails, and the guest would not hear of that end.
fn hang_up(mut stream: UnixStream) {
    std::thread::spawn(move || {
        let _unused = stream.shutdown(Shutdown::Write);
        std::io::copy(&mut stream, &mut std::io::sink())
    });
}

/// Reads a connection to its end, on a thread of its own.
fn read(stream: UnixStream, shared: &Arc<(Mutex<Received>, Condvar)>) {
    let shared = Arc::clone(shared);
    if let Ok(copy) = stream.try_clone() {
        shared
            .0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .live
            .push(copy);
    }
    std::thread::spawn(move || {
        for line in BufReader::new(stream).split(b'\n').map_while(Result::ok) {
            shared
                .0
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .take(&line);
            shared.1.notify_all();
        }
    });
}
