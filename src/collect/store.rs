//! The files of all boots and the connections that hold them.

use super::boot_log::{BootLog, Waiting};
use super::collector_counters::{Stats, add};
use super::ends::Ends;
use super::keep::Keep;
use super::limits::Limits;
use super::lock::lock;
use super::place::Place;
use anyhow::{Context, Result, ensure};
use kata_gpu_report::data::boot_file::{EXTENSION, HostEvent};
use kata_gpu_report::data::trace_file;
use kata_gpu_wire::record::{Header, is_boot_id};
use std::collections::{HashMap, VecDeque};
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, mpsc};
use std::time::Instant;
use tokio::sync::{Notify, OnceCell, watch};

/// Most boots without a connection that are remembered: a guest that reconnects to one costs no
/// reading back.
pub(super) const REMEMBERED: usize = if cfg!(test) { 16 } else { 1024 };

/// A boot's file and log.
#[derive(Debug)]
pub struct Entry {
    pub(super) id: Arc<str>,
    pub(super) path: PathBuf,
    log: OnceCell<Arc<Mutex<BootLog>>>,
    pub(super) file: Mutex<Option<Arc<File>>>,
    /// Connections; changed under the store's lock.
    pub(super) users: AtomicUsize,
    pub(super) queued: AtomicBool,
    pub(super) unsynced: AtomicBool,
    /// Counts up when the guest should send everything again.
    pub(super) again: watch::Sender<u64>,
}

impl Entry {
    pub(super) fn log(&self) -> Option<MutexGuard<'_, BootLog>> {
        self.log.get().map(|log| lock(log))
    }

    fn is_done_with(&self) -> bool {
        self.users.load(Ordering::Relaxed) == 0
            && !self.queued.load(Ordering::Relaxed)
            && self.log().is_none_or(|log| !log.has_pending())
    }
}

/// The files of all boots and the connections that hold them.
#[derive(Debug)]
pub struct Store {
    /// Held as long as the store: no second collector writes here.
    pub(super) place: Place,
    pub limits: Limits,
    pub(super) keep: Keep,
    /// Bytes of all boots' files at retention's last look; None before the first.
    pub(super) kept_bytes: Mutex<Option<u64>>,
    pub(super) waiting: Arc<Waiting>,
    boots: Mutex<Boots>,
    jobs: mpsc::Sender<Job>,
    /// Notified after a write.
    pub written: Notify,
    pub(super) unsynced: Mutex<Vec<(Arc<Entry>, Arc<File>)>>,
    pub stats: Arc<Stats>,
    /// Followed boots; None where nobody asks which boots are over.
    pub ends: Option<Ends>,
}

#[derive(Debug, Default)]
struct Boots {
    entries: HashMap<Arc<str>, Arc<Entry>>,
    /// Boots without a connection, in the order in which they lost it.
    idle: VecDeque<Arc<str>>,
}

#[derive(Debug)]
pub enum Job {
    Write(Arc<Entry>),
    Stop,
}

/// Logs a line for people.
pub type Log = Arc<dyn Fn(String) + Send + Sync>;

/// Keeps its boot in flight while it exists.
#[derive(Debug)]
struct Hold {
    store: Arc<Store>,
    entry: Arc<Entry>,
}

impl Drop for Hold {
    fn drop(&mut self) {
        self.store.detach(&self.entry);
    }
}

/// A connection's hold on a boot.
#[derive(Debug)]
pub struct Attached {
    hold: Hold,
    log: Arc<Mutex<BootLog>>,
    /// Changes when the guest should send everything again.
    pub again: watch::Receiver<u64>,
}

impl Attached {
    pub fn id(&self) -> &Arc<str> {
        &self.hold.entry.id
    }

    /// Changes the log. New bytes wait for [`Attached::flush`].
    pub fn with<T>(&self, what: impl FnOnce(&mut BootLog) -> T) -> T {
        what(&mut lock(&self.log))
    }

    /// Has the waiting bytes written.
    pub fn flush(&self) {
        let (waits, end) = self.with(|log| (log.has_unwritten(), log.end()));
        if waits {
            self.hold.store.queue(&self.hold.entry);
        }
        if let Some(ends) = &self.hold.store.ends
            && end.finished
            && !end.reported
        {
            ends.finished(self.id(), Instant::now());
        }
    }

    pub fn has_room(&self) -> bool {
        lock(&self.log).has_room()
    }
}

impl Store {
    /// The boots of a directory, and the jobs of the writing thread.
    pub fn new(place: Place, limits: Limits, keep: Keep) -> (Self, mpsc::Receiver<Job>) {
        let (jobs, queue) = mpsc::channel();
        let store = Self {
            place,
            limits,
            keep,
            kept_bytes: Mutex::default(),
            waiting: Arc::default(),
            boots: Mutex::default(),
            jobs,
            written: Notify::new(),
            unsynced: Mutex::default(),
            stats: Arc::default(),
            ends: None,
        };
        (store, queue)
    }

    /// Ends the writing thread once it has written all waiting bytes.
    pub(super) fn stop(&self) {
        let _gone = self.jobs.send(Job::Stop);
    }

    /// Takes hold of the boot of a header for a peer. `may_begin` is asked before a file is begun.
    pub async fn attach(
        self: &Arc<Self>,
        header: &Header,
        raw_header: &[u8],
        peer: &str,
        may_begin: impl FnOnce() -> bool,
    ) -> Result<Attached> {
        // Check the id where it becomes a file name, whatever was checked before.
        ensure!(is_boot_id(&header.boot_id), "boot id is not a UUID");
        let hold = self.hold(&header.boot_id);
        let (path, limits, waiting) = (hold.entry.path.clone(), self.limits, self.waiting.clone());
        let read_back = || async {
            let read =
                tokio::task::spawn_blocking(move || BootLog::read_back(&path, limits, waiting));
            read.await
                .context("the thread that reads back panicked")?
                .map(|log| Arc::new(Mutex::new(log)))
        };
        let log = hold.entry.log.get_or_try_init(read_back).await?.clone();
        let again = hold.entry.again.subscribe();
        let attached = Attached { hold, log, again };
        attached.with(|log| {
            if log.is_new() {
                ensure!(
                    may_begin(),
                    "{peer} began {} boots within an hour (limit boots): refused",
                    limits.boots
                );
                add(&self.stats.boots, 1);
            }
            log.begin(raw_header, peer, header.first_seq)
        })?;
        let end = attached.with(|log| log.end());
        if let Some(ends) = &self.ends
            && !end.reported
            && !ends.connected(attached.id(), end.finished, Instant::now())
        {
            add(&self.stats.not_followed, 1);
        }
        attached.flush();
        Ok(attached)
    }

    /// Marks a boot that is over as reported and returns its file. None while the file is
    /// incomplete because the disk takes nothing.
    pub fn report(&self, boot_id: &str) -> Option<PathBuf> {
        let entry = self.remembered(boot_id);
        let log = entry.as_ref().and_then(|entry| entry.log());
        let pending = log.is_some_and(|mut log| {
            log.set_reported();
            log.has_unwritten()
        });
        (!pending).then(|| self.path(boot_id))
    }

    fn remembered(&self, boot_id: &str) -> Option<Arc<Entry>> {
        lock(&self.boots).entries.get(boot_id).cloned()
    }

    fn path(&self, boot_id: &str) -> PathBuf {
        self.dir().join(format!("{boot_id}.{EXTENSION}"))
    }

    /// Adds a line of the collector's own, if the boot is still remembered.
    pub fn note(&self, boot_id: &str, event: HostEvent) {
        if let Some(entry) = self.remembered(boot_id)
            && let Some(mut log) = entry.log()
        {
            log.append_host(event);
            drop(log);
            self.queue(&entry);
        }
    }

    fn hold(self: &Arc<Self>, boot_id: &str) -> Hold {
        let mut boots = lock(&self.boots);
        let id: Arc<str> = boot_id.into();
        // Begin anew a boot that is only remembered and whose file somebody removed.
        if let Some(entry) = boots.entries.get(&id)
            && entry.is_done_with()
            && !entry.path.exists()
        {
            boots.entries.remove(&id);
        }
        let entry = boots.entries.entry(id.clone()).or_insert_with(|| {
            Arc::new(Entry {
                path: self.path(&id),
                id,
                log: OnceCell::new(),
                file: Mutex::default(),
                users: AtomicUsize::new(0),
                queued: AtomicBool::new(false),
                unsynced: AtomicBool::new(false),
                again: watch::Sender::new(0),
            })
        });
        entry.users.fetch_add(1, Ordering::Relaxed);
        Hold {
            store: self.clone(),
            entry: entry.clone(),
        }
    }

    fn detach(&self, entry: &Arc<Entry>) {
        let mut boots = lock(&self.boots);
        if entry.users.fetch_sub(1, Ordering::Relaxed) > 1 {
            return;
        }
        if let Some(ends) = &self.ends {
            ends.disconnected(&entry.id, Instant::now());
        }
        if entry.log.get().is_none() {
            boots.entries.remove(&entry.id);
            return;
        }
        boots.idle.push_back(entry.id.clone());
        // Look at two boots for each that leaves, to catch up with boots that could not be
        // forgotten in their turn.
        for _ in 0..2 {
            if boots.idle.len() <= REMEMBERED {
                break;
            }
            let Some(oldest) = boots.idle.pop_front() else {
                break;
            };
            match boots.entries.get(&oldest) {
                Some(old) if old.is_done_with() => drop(boots.entries.remove(&oldest)),
                Some(old) if old.users.load(Ordering::Relaxed) == 0 => boots.idle.push_back(oldest),
                // The boot is connected again, or was removed.
                _ => {}
            }
        }
        drop(boots);
        // The writer closes the file once everything is in it.
        self.queue(entry);
    }

    pub(super) fn queue(&self, entry: &Arc<Entry>) {
        if !entry.queued.swap(true, Ordering::AcqRel) {
            let _after_the_stop = self.jobs.send(Job::Write(entry.clone()));
        }
    }

    /// Removes a boot's file unless the boot is in flight. True if the file is gone.
    pub fn remove(&self, boot_id: &str, path: &Path) -> io::Result<bool> {
        let mut boots = lock(&self.boots);
        if let Some(entry) = boots.entries.get(boot_id) {
            if !entry.is_done_with() {
                return Ok(false);
            }
            boots.entries.remove(boot_id);
        }
        // Remove under the lock, so that no connection takes hold of the boot meanwhile.
        match std::fs::remove_file(path) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
            _ => {
                // The host's trace goes with its boot; without one there is nothing to remove.
                let _unused = std::fs::remove_file(trace_file::beside(path));
                add(&self.stats.removed, 1);
                Ok(true)
            }
        }
    }

    /// Number of boots that cost no reading back.
    #[cfg(test)]
    pub(super) fn count(&self) -> usize {
        lock(&self.boots).entries.len()
    }

    pub fn dir(&self) -> &Path {
        self.place.path()
    }
}
