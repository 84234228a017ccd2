//! The two threads behind a [`Store`]: one writes, one makes durable and removes old files. Only
//! they touch files of boots.

use super::boot_log;
use super::collector_counters::add;
use super::retention::{Now, Retention};
use super::store::{DIR_MODE, Entry, Job, Log, REMEMBERED, Store, lock};
use std::fs::{DirBuilder, File, Metadata, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::sync::atomic::Ordering;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

/// Longest time from a write to its fdatasync.
pub const SYNC_INTERVAL: Duration = Duration::from_secs(5);
/// Pause before a file that could not be written is tried again: no event shows that a disk has
/// room.
const RETRY: Duration = Duration::from_secs(1);
/// Interval of the line that a file still cannot be written.
const LOG_AGAIN: Duration = Duration::from_secs(60);
/// Pause between two looks for files that are too old or too many.
const RETENTION_INTERVAL: Duration = Duration::from_secs(60);
/// Readers of the boots: the collector's user and its group.
const FILE_MODE: u32 = 0o640;

/// The thread that writes.
pub(super) struct Writer {
    store: Arc<Store>,
    log: Log,
    failed: Vec<Arc<Entry>>,
    /// Time of the last line about a write that failed.
    logged: Option<Instant>,
    /// Records that were dropped since the trouble began.
    dropped: u64,
    /// Time of the last line about a removed file.
    logged_lost: Option<Instant>,
}

impl Writer {
    pub(super) fn new(store: Arc<Store>, log: Log) -> Self {
        Self {
            store,
            log,
            failed: Vec::new(),
            logged: None,
            dropped: 0,
            logged_lost: None,
        }
    }

    /// Runs until the stop, and until all waiting bytes are written.
    pub(super) fn run(mut self, queue: &mpsc::Receiver<Job>) {
        let mut retry_at = Instant::now();
        loop {
            let job = if self.failed.is_empty() {
                queue
                    .recv()
                    .map_err(|_| mpsc::RecvTimeoutError::Disconnected)
            } else {
                queue.recv_timeout(retry_at.saturating_duration_since(Instant::now()))
            };
            match job {
                Ok(Job::Write(entry)) => {
                    if self.failed.is_empty() {
                        retry_at = Instant::now() + RETRY;
                    }
                    self.write(entry);
                }
                Ok(Job::Stop) | Err(mpsc::RecvTimeoutError::Disconnected) => break,
                Err(mpsc::RecvTimeoutError::Timeout) => {}
            }
            if !self.failed.is_empty() && Instant::now() >= retry_at {
                self.retry();
                retry_at = Instant::now() + RETRY;
            }
        }
        while let Ok(Job::Write(entry)) = queue.try_recv() {
            self.write(entry);
        }
        self.retry();
        let left: usize = self
            .failed
            .iter()
            .filter_map(|entry| entry.log().map(|mut log| log.abandon()))
            .sum();
        if left > 0 {
            (self.log)(format!(
                "{left} bytes of {} boot(s) could not be written and are lost here; guests that live send them again",
                self.failed.len()
            ));
        }
    }

    fn retry(&mut self) {
        for entry in std::mem::take(&mut self.failed) {
            self.write(entry);
        }
        // Give up a boot without a connection, which cannot be written either, when too many wait.
        if self.failed.len() > REMEMBERED
            && let Some(at) = self
                .failed
                .iter()
                .position(|entry| entry.users.load(Ordering::Relaxed) == 0)
            && let Some(bytes) = self.failed.remove(at).log().map(|mut log| log.abandon())
        {
            (self.log)(format!(
                "{bytes} bytes of a boot could not be written for too long and are lost"
            ));
        }
    }

    fn write(&mut self, entry: Arc<Entry>) {
        entry.queued.store(false, Ordering::Release);
        let Some(mut pending) = entry.log().map(|mut log| log.take_pending()) else {
            return;
        };
        let (done, result) = if pending.bytes.is_empty() {
            (0, Ok(()))
        } else {
            match open(&entry, pending.after) {
                Ok(Some((file, meta))) => {
                    self.note_unsynced(&entry, &file);
                    let (done, result) = write_all(&file, &pending.bytes);
                    // Keep the file's time at its last record: reconnecting again and again must
                    // not prolong a boot's retention.
                    if pending.after > 0
                        && !pending.has_records
                        && let Ok(modified) = meta.modified()
                    {
                        let _then_it_is_kept_longer = file.set_modified(modified);
                    }
                    (done, result)
                }
                Ok(None) => return self.begin_anew(&entry, pending.bytes.len()),
                Err(e) => (0, Err(e)),
            }
        };
        let Some(mut log) = entry.log() else { return };
        log.written(done);
        match result {
            Ok(()) => {
                let dropped = log.all_written();
                drop(log);
                if let Some(dropped) = dropped {
                    self.dropped += dropped.records;
                    entry.again.send_modify(|times| *times += 1);
                    self.store.queue(&entry);
                }
                let mut file = lock(&entry.file);
                if entry.users.load(Ordering::Relaxed) == 0 {
                    *file = None;
                }
                drop(file);
                if self.logged.is_some() && self.store.waiting.failing.load(Ordering::Relaxed) == 0
                {
                    self.logged = None;
                    (self.log)(format!(
                        "boots are written again; {} record(s) were dropped, their guests are asked to send them again",
                        self.dropped
                    ));
                    self.dropped = 0;
                }
            }
            Err(e) => {
                pending.bytes.drain(..done);
                log.not_written(pending, e.to_string());
                drop(log);
                add(&self.store.stats.write_errors, 1);
                if !self.failed.iter().any(|failed| Arc::ptr_eq(failed, &entry)) {
                    self.failed.push(entry.clone());
                }
                if self
                    .logged
                    .is_none_or(|logged| logged.elapsed() >= LOG_AGAIN)
                {
                    self.logged = Some(Instant::now());
                    let dropped = self.store.stats.counts().dropped;
                    (self.log)(format!(
                        "write {}: {e}: make room or see to the directory; receiving goes on, {dropped} record(s) were dropped so far",
                        entry.path.display()
                    ));
                }
            }
        }
        self.store.written.notify_waiters();
    }

    /// Handles the removal of a file by somebody: requests its records again.
    fn begin_anew(&mut self, entry: &Arc<Entry>, pending: usize) {
        *lock(&entry.file) = None;
        if let Some(mut log) = entry.log() {
            log.written(pending);
            log.begin_anew();
        }
        entry.again.send_modify(|times| *times += 1);
        add(&self.store.stats.files_lost, 1);
        if self
            .logged_lost
            .is_none_or(|logged| logged.elapsed() >= LOG_AGAIN)
        {
            self.logged_lost = Some(Instant::now());
            (self.log)(format!(
                "{} was removed while its boot was received: its guest is asked to send everything again ({} such file(s) so far)",
                entry.path.display(),
                self.store.stats.counts().files_lost
            ));
        }
        self.store.written.notify_waiters();
    }

    fn note_unsynced(&self, entry: &Arc<Entry>, file: &Arc<File>) {
        if !entry.unsynced.swap(true, Ordering::AcqRel) {
            lock(&self.store.unsynced).push((entry.clone(), file.clone()));
        }
    }
}

/// File to append to, and its metadata before; None if bytes written to it are gone.
fn open(entry: &Entry, written: u64) -> io::Result<Option<(Arc<File>, Metadata)>> {
    let mut slot = lock(&entry.file);
    let file = match &*slot {
        Some(file) => file.clone(),
        None => match open_by_name(&entry.path, written == 0) {
            Ok(file) => Arc::new(file),
            Err(e) if written > 0 && e.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(e),
        },
    };
    let meta = file.metadata()?;
    if written > 0 && (meta.nlink() == 0 || meta.len() == 0) {
        return Ok(None);
    }
    *slot = Some(file.clone());
    Ok(Some((file, meta)))
}

fn open_by_name(path: &Path, create: bool) -> io::Result<File> {
    let open = || {
        boot_log::open(
            path,
            OpenOptions::new()
                .create(create)
                .append(true)
                .mode(FILE_MODE),
        )
    };
    match (open(), path.parent()) {
        // The whole directory was removed.
        (Err(e), Some(dir)) if create && e.kind() == io::ErrorKind::NotFound => {
            DirBuilder::new().mode(DIR_MODE).create(dir)?;
            open()
        }
        (result, _) => result,
    }
}

/// Writes as many bytes as possible. The next try continues a line that is cut off.
fn write_all(mut file: &File, bytes: &[u8]) -> (usize, io::Result<()>) {
    let mut done = 0;
    while done < bytes.len() {
        match file.write(&bytes[done..]) {
            Ok(0) => return (done, Err(io::ErrorKind::WriteZero.into())),
            Ok(n) => done += n,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return (done, Err(e)),
        }
    }
    (done, Ok(()))
}

/// Makes files durable and removes old ones, until the stop.
pub(super) fn keep_up(store: &Store, log: &Log, stopped: &mpsc::Receiver<()>) {
    let mut retention = Retention::new(store.keep);
    let mut look_at = Instant::now();
    loop {
        if Instant::now() >= look_at {
            match Now::read() {
                Ok(now) => retention.apply(store, log, now),
                Err(e) => log(format!("look for old boots: {e:#}")),
            }
            look_at = Instant::now() + RETENTION_INTERVAL;
        }
        let stop = !matches!(
            stopped.recv_timeout(SYNC_INTERVAL),
            Err(mpsc::RecvTimeoutError::Timeout)
        );
        let unsynced = std::mem::take(&mut *lock(&store.unsynced));
        for (entry, file) in unsynced {
            // Clear the mark before the call: writes during it are not covered.
            entry.unsynced.store(false, Ordering::Release);
            match file.sync_data() {
                Ok(()) => add(&store.stats.synced, 1),
                Err(e) => log(format!(
                    "fdatasync of {}: {e}: what was written last may not survive a crash of this machine",
                    entry.path.display()
                )),
            }
        }
        if stop {
            return;
        }
    }
}
