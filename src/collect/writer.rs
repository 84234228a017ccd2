//! The two threads behind a [`Store`]: one writes, one makes durable and removes old files. Only
//! they touch files of boots.

use super::boot_log;
use super::boot_log::Pending;
use super::bucket::Lines;
use super::collector_counters::add;
use super::host_clock::Now;
use super::lock::lock;
use super::retention::Retention;
use super::store::{Entry, Job, Log, REMEMBERED, Store};
use std::fs::{File, Metadata, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::sync::atomic::Ordering;
use std::sync::mpsc::RecvTimeoutError;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

/// Longest time from a write to its fdatasync.
pub const SYNC_INTERVAL: Duration = Duration::from_secs(5);
/// Pause before a file that could not be written is tried again: no event shows that a disk has
/// room.
const RETRY: Duration = Duration::from_secs(1);
/// Pause between two looks for files that are too old or too many.
const RETENTION_INTERVAL: Duration = Duration::from_secs(60);
/// Readers of the boots: the collector's user and its group.
const FILE_MODE: u32 = 0o640;

/// The thread that writes.
pub(super) struct Writer {
    store: Arc<Store>,
    log: Log,
    failed: Vec<Arc<Entry>>,
    /// A line about a write that failed was logged.
    fails: bool,
    failures: Lines,
    lost_files: Lines,
    /// Records that were dropped since the trouble began.
    dropped: u64,
}

impl Writer {
    pub(super) fn new(store: Arc<Store>, log: Log) -> Self {
        Self {
            store,
            log,
            failed: Vec::new(),
            fails: false,
            failures: Lines::each_minute(),
            lost_files: Lines::each_minute(),
            dropped: 0,
        }
    }

    /// Runs until the stop, and until all waiting bytes are written.
    pub(super) fn run(mut self, queue: &mpsc::Receiver<Job>) {
        let mut retry_at = Instant::now();
        loop {
            let wait = match self.failed.is_empty() {
                true => Duration::MAX,
                false => retry_at.saturating_duration_since(Instant::now()),
            };
            match queue.recv_timeout(wait) {
                Ok(Job::Write(entry)) => {
                    if self.failed.is_empty() {
                        retry_at = Instant::now() + RETRY;
                    }
                    self.write(entry);
                }
                Ok(Job::Stop) | Err(RecvTimeoutError::Disconnected) => break,
                Err(RecvTimeoutError::Timeout) => {}
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
                "{left} bytes of {} boot(s) could not be written and are lost here; guests that \
                 live send them again",
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
        let (done, result) = match self.append(&entry, &pending) {
            Ok(Some(written)) => written,
            Ok(None) => return self.begin_anew(&entry, pending.bytes.len()),
            Err(e) => (0, Err(e)),
        };
        let Some(mut log) = entry.log() else { return };
        log.written(done);
        match result {
            Ok(()) => {
                let dropped = log.all_written();
                drop(log);
                self.written(&entry, dropped);
            }
            Err(e) => {
                pending.bytes.drain(..done);
                log.not_written(pending, e.to_string());
                drop(log);
                self.not_written(entry, &e);
            }
        }
        self.store.written.notify_waiters();
    }

    /// Appends to a boot's file. Returns the bytes that are in it, and the outcome; None if bytes
    /// written before are gone.
    fn append(
        &self,
        entry: &Arc<Entry>,
        pending: &Pending,
    ) -> io::Result<Option<(usize, io::Result<()>)>> {
        if pending.bytes.is_empty() {
            return Ok(Some((0, Ok(()))));
        }
        let Some((file, meta)) = open(&self.store, entry, pending.after)? else {
            return Ok(None);
        };
        if !entry.unsynced.swap(true, Ordering::AcqRel) {
            lock(&self.store.unsynced).push((entry.clone(), file.clone()));
        }
        let written = write_all(&file, &pending.bytes);
        // Keep the file's time at its last record: reconnecting again and again must not prolong a
        // boot's retention.
        if pending.after > 0
            && !pending.has_records
            && let Ok(modified) = meta.modified()
        {
            let _then_it_is_kept_longer = file.set_modified(modified);
        }
        Ok(Some(written))
    }

    /// Handles a write of all that waited. `dropped` records have to be sent again.
    fn written(&mut self, entry: &Arc<Entry>, dropped: u64) {
        if dropped > 0 {
            self.dropped += dropped;
            entry.again.send_modify(|times| *times += 1);
            self.store.queue(entry);
        }
        if entry.users.load(Ordering::Relaxed) == 0 {
            *lock(&entry.file) = None;
        }
        if self.fails && self.store.waiting.failing.load(Ordering::Relaxed) == 0 {
            self.fails = false;
            self.failures = Lines::each_minute();
            let dropped = std::mem::take(&mut self.dropped);
            (self.log)(format!(
                "boots are written again; {dropped} record(s) were dropped, their guests are asked \
                 to send them again"
            ));
        }
    }

    fn not_written(&mut self, entry: Arc<Entry>, error: &io::Error) {
        add(&self.store.stats.write_errors, 1);
        self.fails = true;
        let text = format!(
            "write {}: {error}: make room or see to the directory; receiving goes on, {} record(s) \
             were dropped so far",
            entry.path.display(),
            self.store.stats.counts().dropped
        );
        self.failures.pass(&text, &*self.log);
        if !self.failed.iter().any(|failed| Arc::ptr_eq(failed, &entry)) {
            self.failed.push(entry);
        }
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
        let text = format!(
            "{} was removed while its boot was received: its guest is asked to send everything \
             again",
            entry.path.display()
        );
        self.lost_files.pass(&text, &*self.log);
        self.store.written.notify_waiters();
    }
}

/// File to append to, and its metadata before; None if bytes written to it are gone.
fn open(store: &Store, entry: &Entry, written: u64) -> io::Result<Option<(Arc<File>, Metadata)>> {
    let mut slot = lock(&entry.file);
    let file = match &*slot {
        Some(file) => file.clone(),
        None => match open_by_name(store, &entry.path, written == 0) {
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

fn open_by_name(store: &Store, path: &Path, create: bool) -> io::Result<File> {
    // The whole directory may have been removed, and made again.
    store.place.hold(create)?;
    boot_log::open(
        path,
        OpenOptions::new()
            .create(create)
            .append(true)
            .mode(FILE_MODE),
    )
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
            let held = store.place.hold(false).map_err(anyhow::Error::from);
            match held.and_then(|_| Now::read()) {
                Ok(now) => retention.apply(store, log, now),
                Err(e) => log(format!("look for old boots: {e:#}")),
            }
            look_at = Instant::now() + RETENTION_INTERVAL;
        }
        let stop = stopped.recv_timeout(SYNC_INTERVAL) != Err(RecvTimeoutError::Timeout);
        let unsynced = std::mem::take(&mut *lock(&store.unsynced));
        for (entry, file) in unsynced {
            // Clear the mark before the call: writes during it are not covered.
            entry.unsynced.store(false, Ordering::Release);
            match file.sync_data() {
                Ok(()) => add(&store.stats.synced, 1),
                Err(e) => log(format!(
                    "fdatasync of {}: {e}: the last bytes may not survive a crash of this machine",
                    entry.path.display()
                )),
            }
        }
        if stop {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::place::Place;
    use super::*;
    use kata_gpu_report::data::boot_file::BootFile;
    use kata_gpu_test_support::{BOOT, header, kept_log, temp_dir};
    use kata_gpu_wire::record::header_line;

    #[tokio::test]
    async fn what_could_not_be_written_is_tried_again_at_the_stop() {
        let dir = temp_dir();
        let place = Place::take(dir.path()).unwrap();
        let (store, jobs) = Store::new(place, Default::default(), Default::default());
        let store = Arc::new(store);
        let header = header(BOOT);
        let line = header_line(&header);
        let attached = store
            .attach(&header, line.trim_end().as_bytes(), "cid 5", || true)
            .await
            .unwrap();
        let (log, logged) = kept_log();
        let mut writer = Writer::new(store.clone(), log);
        // A directory is in the file's place.
        let path = dir.path().join(format!("{BOOT}.ndjson"));
        std::fs::create_dir(&path).unwrap();
        let Ok(Job::Write(entry)) = jobs.recv() else {
            panic!("the header waits for no write")
        };
        writer.write(entry);
        assert_eq!(writer.failed.len(), 1);
        std::fs::remove_dir(&path).unwrap();
        store.stop();
        writer.run(&jobs);
        let file = BootFile::read(File::open(&path).unwrap()).unwrap();
        assert!(file.header.is_some(), "{:?}", logged.lock().unwrap());
        drop(attached);
    }
}
