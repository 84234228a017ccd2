//! The host's end of the stream, as simple as can be: it decodes what comes and keeps it. The product's collector has tests of its own.

use anyhow::{Context, Result};
use kata_gpu_init::events::record::{DEFAULT_PORT, Header, Line, Record, decode};
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// What is at the other end.
#[derive(Clone, Copy, Debug)]
pub enum Listener {
    /// A listener that reads everything.
    Reads,
    /// One that accepts and never reads.
    Deaf,
    /// Nobody, until [`Receiver::arrive`].
    Absent,
}

#[derive(Default)]
struct Received {
    headers: Vec<Header>,
    /// By seq: a replay after a reconnect brings nothing twice.
    records: BTreeMap<u64, Record>,
    garbage: Vec<String>,
    /// Kept open, unread.
    deaf: Vec<UnixStream>,
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
        let receiver = Self { path: path.into(), shared: Arc::default() };
        match listener {
            Listener::Reads => receiver.listen(true)?,
            Listener::Deaf => receiver.listen(false)?,
            Listener::Absent => {}
        }
        Ok(receiver)
    }

    /// Starts to listen and read now.
    pub fn arrive(&self) -> Result<()> {
        self.listen(true)
    }

    fn listen(&self, reads: bool) -> Result<()> {
        let listener = UnixListener::bind(&self.path).with_context(|| format!("listen on {}", self.path.display()))?;
        let shared = Arc::clone(&self.shared);
        std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let shared = Arc::clone(&shared);
                if reads {
                    std::thread::spawn(move || read(stream, &shared));
                } else {
                    shared.0.lock().unwrap_or_else(PoisonError::into_inner).deaf.push(stream);
                    shared.1.notify_all();
                }
            }
        });
        Ok(())
    }

    /// Waits for a record that has come or will come.
    pub fn wait(&self, deadline: Duration, wanted: impl Fn(&Record) -> bool) -> Option<Record> {
        self.until(deadline, |r| r.records.values().find(|x| wanted(x)).cloned())
    }

    /// Waits until somebody has connected to a deaf listener.
    pub fn wait_deaf(&self, deadline: Duration) -> bool {
        self.until(deadline, |r| (!r.deaf.is_empty()).then_some(())).is_some()
    }

    fn until<T>(&self, deadline: Duration, find: impl Fn(&Received) -> Option<T>) -> Option<T> {
        let end = Instant::now() + deadline;
        let mut received = self.shared.0.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if let Some(found) = find(&received) {
                return Some(found);
            }
            let left = end.checked_duration_since(Instant::now())?;
            received = self.shared.1.wait_timeout(received, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// All records so far, in order of seq.
    pub fn records(&self) -> Vec<Record> {
        self.shared.0.lock().unwrap_or_else(PoisonError::into_inner).records.values().cloned().collect()
    }

    pub fn headers(&self) -> Vec<Header> {
        self.shared.0.lock().unwrap_or_else(PoisonError::into_inner).headers.clone()
    }

    /// Lines that were no lines of the format.
    pub fn garbage(&self) -> Vec<String> {
        self.shared.0.lock().unwrap_or_else(PoisonError::into_inner).garbage.clone()
    }
}

fn read(stream: UnixStream, shared: &(Mutex<Received>, Condvar)) {
    for line in BufReader::new(stream).split(b'\n').map_while(Result::ok) {
        let mut received = shared.0.lock().unwrap_or_else(PoisonError::into_inner);
        match decode(&line) {
            Ok(Line::Header(header)) => received.headers.push(header),
            Ok(Line::Record(record)) => drop(received.records.insert(record.seq, *record)),
            Ok(Line::Pong(_)) => {}
            Err(error) => received.garbage.push(format!("{error}: {}", String::from_utf8_lossy(&line))),
        }
        shared.1.notify_all();
    }
}
