//! The files of all boots: one thread writes them, one makes them durable and removes old ones. Nobody who receives ever waits for a disk.
//!
//! What is promised: a record is handed to the kernel as soon as the writing thread comes to it, milliseconds after it came; from then on
//! no end of the collector loses it. fdatasync follows within [`SYNC_INTERVAL`](super::writer::SYNC_INTERVAL), and at a stop; so a crash of the machine loses what came in
//! that time. A file is only ever appended to. While it cannot be written, so much waits in memory ([`super::limits`]), the rest is
//! counted, and when it can be again the guest is asked for it (its connection is closed; it comes back and sends all that it has).

use super::boot_log::{BootLog, Waiting};
use super::ends::Ends;
use super::limits::Limits;
use super::retention::Keep;
use super::stats::{Stats, add};
use super::writer::{Writer, keep_up};
use crate::events::record::{Header, is_boot_id};
use crate::host::data::boot_file::{EXTENSION, HostEvent};
use anyhow::{Context, Result, anyhow, bail, ensure};
use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg, OFlag};
use std::collections::{HashMap, VecDeque};
use std::fs::{DirBuilder, File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread::JoinHandle;
use std::time::Instant;
use tokio::sync::{Notify, OnceCell, watch};

/// Boots without a connection that are remembered, so that a guest that comes back costs no reading back.
pub(super) const REMEMBERED: usize = if cfg!(test) { 16 } else { 1024 };
/// Who may read the boots: the collector's user and its group.
pub(super) const DIR_MODE: u32 = 0o750;

/// One boot's file and what waits for it.
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
        self.users.load(Ordering::Relaxed) == 0 && !self.queued.load(Ordering::Relaxed) && self.log().is_none_or(|log| !log.has_pending())
    }
}

/// The files of all boots, and who writes which.
#[derive(Debug)]
pub struct Store {
    dir: PathBuf,
    /// Held as long as the store: no second collector writes here.
    _lock: Flock<File>,
    limits: Limits,
    pub(super) keep: Keep,
    pub(super) waiting: Arc<Waiting>,
    boots: Mutex<Boots>,
    jobs: mpsc::Sender<Job>,
    /// Something was written.
    pub written: Notify,
    pub(super) unsynced: Mutex<Vec<(Arc<Entry>, Arc<File>)>>,
    pub stats: Arc<Stats>,
    /// Where somebody wants to know which boots are over.
    pub ends: Option<Ends>,
}

#[derive(Debug, Default)]
struct Boots {
    entries: HashMap<Arc<str>, Arc<Entry>>,
    /// Without a connection, in the order in which they lost it.
    left: VecDeque<Arc<str>>,
}

#[derive(Debug)]
pub(super) enum Job {
    Write(Arc<Entry>),
    Stop,
}

/// The threads of a [`Store`].
pub struct Disk {
    pub store: Arc<Store>,
    writer: JoinHandle<()>,
    keeper: JoinHandle<()>,
    stop_keeper: mpsc::Sender<()>,
}

/// A directory that is this collector's alone.
pub struct Place {
    path: PathBuf,
    lock: Flock<File>,
}

impl Place {
    /// Makes the directory if it is not there, and takes it.
    pub fn take(path: &Path) -> Result<Self> {
        DirBuilder::new()
            .recursive(true)
            .mode(DIR_MODE)
            .create(path)
            .with_context(|| format!("create {}: name another directory with --dir", path.display()))?;
        let dir = File::open(path).with_context(|| format!("open {}", path.display()))?;
        match Flock::lock(dir, FlockArg::LockExclusiveNonblock) {
            Ok(lock) => Ok(Self { path: path.to_path_buf(), lock }),
            Err((_, Errno::EWOULDBLOCK)) => {
                bail!("{}: another collector writes there: stop one of the two, or name another --dir", path.display())
            }
            Err((_, e)) => Err(e).with_context(|| format!("lock {}", path.display())),
        }
    }

    pub fn dir(&self) -> &File {
        &self.lock
    }
}

/// Tells people.
pub type Tell = Arc<dyn Fn(String) + Send + Sync>;

impl Disk {
    /// Starts the threads. `on_thread` is run first on each of them.
    pub fn start(place: Place, limits: Limits, keep: Keep, stats: Arc<Stats>, tell: Tell, on_thread: fn()) -> Result<Self> {
        Self::start_with(place, limits, keep, stats, tell, on_thread, None)
    }

    /// The same, telling somebody which boots are over.
    pub fn start_with(
        place: Place,
        limits: Limits,
        keep: Keep,
        stats: Arc<Stats>,
        tell: Tell,
        on_thread: fn(),
        ends: Option<Ends>,
    ) -> Result<Self> {
        let (jobs, queue) = mpsc::channel();
        let store = Arc::new(Store {
            dir: place.path,
            _lock: place.lock,
            limits,
            keep,
            waiting: Arc::default(),
            boots: Mutex::default(),
            jobs,
            written: Notify::new(),
            unsynced: Mutex::default(),
            stats,
            ends,
        });
        let (stop_keeper, stopped) = mpsc::channel();
        let (for_writer, for_keeper) = ((store.clone(), tell.clone()), (store.clone(), tell));
        let writer = thread("boots-write", move || {
            on_thread();
            Writer::new(for_writer.0, for_writer.1).run(&queue);
        })?;
        let keeper = thread("boots-keep", move || {
            on_thread();
            keep_up(&for_keeper.0, &for_keeper.1, &stopped);
        })?;
        Ok(Self { store, writer, keeper, stop_keeper })
    }

    /// Writes what waits, makes it durable, and ends the threads. Blocks.
    pub fn close(self) -> Result<()> {
        let _gone = self.store.jobs.send(Job::Stop);
        self.writer.join().map_err(|_| anyhow!("the thread that writes boots panicked"))?;
        let _gone = self.stop_keeper.send(());
        self.keeper.join().map_err(|_| anyhow!("the thread that keeps boots panicked"))
    }
}

fn thread(name: &str, run: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>> {
    std::thread::Builder::new().name(name.into()).spawn(run).with_context(|| format!("start thread {name}"))
}

/// Opens the file of a boot: no link is followed, and a pipe that somebody put there holds nobody up.
pub(super) fn open(path: &Path, options: &mut OpenOptions) -> io::Result<File> {
    options.custom_flags((OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK).bits()).open(path)
}

/// While there is one the boot is in flight.
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

    /// Changes what is known. What is to be written waits for [`Attached::flush`].
    pub fn with<T>(&self, what: impl FnOnce(&mut BootLog) -> T) -> T {
        what(&mut lock(&self.log))
    }

    /// Gets written what waits.
    pub fn flush(&self) {
        let (waits, end) = self.with(|log| (log.has_pending() || log.has_dropped(), log.end()));
        if waits {
            self.hold.store.queue(&self.hold.entry);
        }
        if let Some(ends) = &self.hold.store.ends
            && end.said
            && !end.reported
        {
            ends.said(self.id(), Instant::now());
        }
    }

    pub fn has_room(&self) -> bool {
        lock(&self.log).has_room()
    }

    pub fn stats(&self) -> &Stats {
        &self.hold.store.stats
    }
}

impl Store {
    /// Takes hold of the boot of a header for a peer. `may_begin` is asked before a file is begun.
    pub async fn attach(
        self: &Arc<Self>,
        header: &Header,
        raw_header: &[u8],
        peer: &str,
        may_begin: impl FnOnce() -> bool,
    ) -> Result<Attached> {
        // The name is checked where it becomes one, whatever was checked before.
        ensure!(is_boot_id(&header.boot_id), "boot id is not a UUID");
        let hold = self.hold(&header.boot_id);
        let (path, limits, waiting) = (hold.entry.path.clone(), self.limits, self.waiting.clone());
        let read_back = || async {
            let read = tokio::task::spawn_blocking(move || BootLog::read_back(&path, limits, waiting));
            read.await.context("the thread that reads back panicked")?.map(|log| Arc::new(Mutex::new(log)))
        };
        let log = hold.entry.log.get_or_try_init(read_back).await?.clone();
        let again = hold.entry.again.subscribe();
        let attached = Attached { hold, log, again };
        attached.with(|log| {
            if log.is_new() {
                ensure!(may_begin(), "{peer} began {} boots within an hour (limit boots): refused", limits.boots);
                add(&self.stats.boots, 1);
            }
            log.begin(raw_header, peer, header.first_seq)
        })?;
        let end = attached.with(|log| log.end());
        if let Some(ends) = &self.ends
            && !end.reported
            && !ends.connected(attached.id(), end.said, Instant::now())
        {
            add(&self.stats.not_followed, 1);
        }
        attached.flush();
        Ok(attached)
    }

    /// The file of a boot that is over, marked as reported. None while not all of it is there: the disk takes nothing.
    pub fn report(&self, boot_id: &str) -> Option<PathBuf> {
        let entry = lock(&self.boots).entries.get(boot_id).cloned();
        let pending = entry.as_ref().and_then(|entry| entry.log()).is_some_and(|mut log| {
            log.set_reported();
            log.has_pending() || log.has_dropped()
        });
        (!pending).then(|| self.path(boot_id))
    }

    fn path(&self, boot_id: &str) -> PathBuf {
        self.dir.join(format!("{boot_id}.{EXTENSION}"))
    }

    /// Adds a line of the collector's own, if the boot is still remembered.
    pub fn note(&self, boot_id: &str, event: HostEvent) {
        let entry = lock(&self.boots).entries.get(boot_id).cloned();
        if let Some(entry) = entry
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
        // Somebody may have removed the file of a boot that is only remembered: then it begins anew.
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
        Hold { store: self.clone(), entry: entry.clone() }
    }

    fn detach(&self, entry: &Arc<Entry>) {
        let mut boots = lock(&self.boots);
        if entry.users.fetch_sub(1, Ordering::Relaxed) > 1 {
            return;
        }
        if let Some(ends) = &self.ends {
            ends.left(&entry.id, Instant::now());
        }
        if entry.log.get().is_none() {
            boots.entries.remove(&entry.id);
            return;
        }
        boots.left.push_back(entry.id.clone());
        // Two for each that leaves: those that were not done with when their turn came are caught up with.
        for _ in 0..2 {
            if boots.left.len() <= REMEMBERED {
                break;
            }
            let Some(oldest) = boots.left.pop_front() else { break };
            match boots.entries.get(&oldest) {
                Some(old) if old.is_done_with() => drop(boots.entries.remove(&oldest)),
                Some(old) if old.users.load(Ordering::Relaxed) == 0 => boots.left.push_back(oldest),
                // It is connected again, or was removed.
                _ => {}
            }
        }
        drop(boots);
        // Its file is closed once everything is in it.
        self.queue(entry);
    }

    pub(super) fn queue(&self, entry: &Arc<Entry>) {
        if !entry.queued.swap(true, Ordering::AcqRel) {
            let _after_the_stop = self.jobs.send(Job::Write(entry.clone()));
        }
    }

    /// Removes a boot's file unless the boot is in flight. True if it is gone.
    pub fn remove(&self, boot_id: &str, path: &Path) -> io::Result<bool> {
        let mut boots = lock(&self.boots);
        if let Some(entry) = boots.entries.get(boot_id) {
            if !entry.is_done_with() {
                return Ok(false);
            }
            boots.entries.remove(boot_id);
        }
        // Under the lock: nobody takes hold of it meanwhile.
        match std::fs::remove_file(path) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
            _ => {
                add(&self.stats.removed, 1);
                Ok(true)
            }
        }
    }

    pub fn dir(&self) -> &Path {
        &self.dir
    }
}

/// A thread that panicked must not take the others with it: what it was writing is checked line by line on reading anyway.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::events::record::{self, Line};
    use crate::host::data::boot_file::BootFile;
    use crate::host::testing::TempDir;
    use std::time::{Duration, Instant};

    const BOOT: &str = "0f7a1f8e-0000-4000-8000-00000000beef";

    fn header(boot_id: &str) -> Header {
        Header { boot_id: boot_id.into(), version: "0.1.0".into(), kernel: "6.1".into(), first_seq: 0 }
    }

    fn start(dir: &Path) -> Disk {
        let place = Place::take(dir).unwrap();
        Disk::start(place, Limits::default(), Keep::default(), Arc::default(), Arc::new(|text| panic!("{text}")), || ()).unwrap()
    }

    async fn attach(disk: &Disk, boot: &str, peer: &str) -> Result<Attached> {
        let header = header(boot);
        disk.store.attach(&header, record::header_line(&header).trim_end().as_bytes(), peer, || true).await
    }

    fn event(seq: u64) -> String {
        format!(r#"{{"schema":1,"seq":{seq},"boottime_ns":1,"kind":"event","name":"x"}}"#)
    }

    fn append(attached: &Attached, seq: u64) {
        let raw = event(seq);
        let Ok(Line::Record(record)) = record::decode(raw.as_bytes()) else { panic!("test record does not decode") };
        attached.with(|log| log.append(&record, raw.as_bytes()));
        attached.flush();
    }

    #[tokio::test]
    async fn two_collectors_do_not_write_one_directory() {
        let dir = TempDir::new();
        let disk = start(dir.path());
        let refused = Place::take(dir.path()).err().expect("it is taken").to_string();
        assert!(refused.contains("another collector"), "{refused}");
        disk.close().unwrap();
        Place::take(dir.path()).unwrap();
    }

    #[tokio::test]
    async fn what_was_appended_is_written_and_synced_and_a_removed_file_begins_anew() {
        let dir = TempDir::new();
        let disk = start(dir.path());
        let path = dir.path().join(format!("{BOOT}.ndjson"));
        let attached = attach(&disk, BOOT, "cid 5").await.unwrap();
        append(&attached, 0);
        assert!(!disk.store.remove(BOOT, &path).unwrap(), "a boot in flight is never removed");
        drop(attached);
        let stats = disk.store.stats.clone();
        disk.close().unwrap();
        assert_eq!(BootFile::read(File::open(&path).unwrap()).unwrap().records.len(), 1);
        assert!(stats.counts().synced >= 1, "{:?}", stats.counts());

        let disk = start(dir.path());
        for _ in 0..2 {
            append(&attach(&disk, BOOT, "cid 5").await.unwrap(), 0);
            // Written and closed when it can be removed.
            let deadline = Instant::now() + Duration::from_secs(10);
            while !disk.store.remove(BOOT, &path).unwrap() {
                assert!(Instant::now() < deadline, "not written within 10 s");
                tokio::task::yield_now().await;
            }
            assert!(!path.exists());
        }
        append(&attach(&disk, BOOT, "cid 5").await.unwrap(), 0);
        disk.close().unwrap();
        let file = BootFile::read(File::open(&path).unwrap()).unwrap();
        assert_eq!((file.records.len(), file.header.is_some()), (1, true));
    }

    #[tokio::test]
    async fn a_file_or_directory_that_is_removed_under_the_collector_is_asked_for_again() {
        for with_directory in [false, true] {
            let dir = TempDir::new();
            let place = dir.path().join("boots");
            let told: Arc<Mutex<Vec<String>>> = Arc::default();
            let sink = told.clone();
            let tell: Tell = Arc::new(move |text| sink.lock().unwrap().push(text));
            let disk = Disk::start(Place::take(&place).unwrap(), Limits::default(), Keep::default(), Arc::default(), tell, || ()).unwrap();
            let path = place.join(format!("{BOOT}.ndjson"));
            let mut attached = attach(&disk, BOOT, "cid 5").await.unwrap();
            append(&attached, 0);
            until(|| std::fs::read_to_string(&path).is_ok_and(|text| text.contains(&event(0)))).await;
            if with_directory {
                std::fs::remove_dir_all(&place).unwrap();
            } else {
                std::fs::remove_file(&path).unwrap();
            }
            append(&attached, 1);
            tokio::time::timeout(Duration::from_secs(10), attached.again.changed()).await.expect("it is not asked again").unwrap();
            // Records that still come on this connection begin no file without a header.
            append(&attached, 2);
            assert!(attach(&disk, BOOT, "cid 6").await.is_err(), "it still belongs to its guest");
            drop(std::mem::replace(&mut attached, attach(&disk, BOOT, "cid 5").await.unwrap()));
            (0..4).for_each(|seq| append(&attached, seq));
            drop(attached);
            let stats = disk.store.stats.clone();
            disk.close().unwrap();
            let file = BootFile::read(File::open(&path).unwrap()).unwrap();
            assert_eq!((file.records.len(), file.header.is_some(), file.damaged), (4, true, 0));
            assert_eq!(stats.counts().files_lost, 1);
            assert!(told.lock().unwrap().iter().any(|t| t.contains("was removed while its boot was received")), "{told:?}");
        }
    }

    #[tokio::test]
    async fn the_time_of_a_file_is_that_of_its_last_record() {
        let dir = TempDir::new();
        let disk = start(dir.path());
        let path = dir.path().join(format!("{BOOT}.ndjson"));
        let written = || std::fs::metadata(&path).and_then(|m| m.modified()).unwrap();
        let read = || std::fs::read_to_string(&path).unwrap_or_default();
        append(&attach(&disk, BOOT, "cid 5").await.unwrap(), 0);
        until(|| read().contains(&event(0))).await;
        let old = std::time::SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000_000);
        File::options().write(true).open(&path).unwrap().set_modified(old).unwrap();
        for times in 2..5 {
            drop(attach(&disk, BOOT, "cid 5").await.unwrap());
            until(|| read().matches("\"connected\"").count() == times).await;
        }
        let attached = attach(&disk, BOOT, "cid 5").await.unwrap();
        until(|| read().matches("\"connected\"").count() == 5 && written() == old).await;
        append(&attached, 1);
        until(|| written() > old).await;
        drop(attached);
        disk.close().unwrap();
    }

    async fn until(mut done: impl FnMut() -> bool) {
        let deadline = Instant::now() + Duration::from_secs(20);
        while !done() {
            assert!(Instant::now() < deadline, "not so within 20 s");
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }

    #[tokio::test]
    async fn no_file_name_is_of_a_guests_making() {
        let dir = TempDir::new();
        let disk = start(&dir.path().join("boots"));
        for evil in
            ["../../../../tmp/evil-evil-evil-evil-", "", "0F7A1F8E-0000-4000-8000-00000000BEEF", "0f7a1f8e-0000-4000-8000-00000000be\n"]
        {
            assert!(attach(&disk, evil, "cid 7").await.is_err(), "{evil:?}");
        }
        // Nor does it follow a link that somebody put there.
        std::os::unix::fs::symlink(dir.path().join("elsewhere"), dir.path().join(format!("boots/{BOOT}.ndjson"))).unwrap();
        assert!(attach(&disk, BOOT, "cid 7").await.is_err());
        disk.close().unwrap();
        assert!(!dir.path().join("elsewhere").exists());
    }

    #[tokio::test]
    async fn boots_that_may_not_begin_leave_no_file() {
        let dir = TempDir::new();
        let disk = start(dir.path());
        let header = header(BOOT);
        let refused = disk.store.attach(&header, b"{}", "cid 5", || false).await.unwrap_err().to_string();
        assert!(refused.contains("limit boots"), "{refused}");
        disk.close().unwrap();
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    #[tokio::test]
    async fn only_so_many_boots_are_remembered() {
        let dir = TempDir::new();
        let disk = start(dir.path());
        for n in 0..REMEMBERED + 100 {
            attach(&disk, &format!("0f7a1f8e-0000-4000-8000-{n:012x}"), "cid 5").await.unwrap();
        }
        // Those that are not written yet are not forgotten; once they are, coming and going forgets them.
        let deadline = Instant::now() + Duration::from_secs(10);
        while lock(&disk.store.boots).entries.len() > REMEMBERED + 1 {
            assert!(Instant::now() < deadline, "not forgotten within 10 s");
            attach(&disk, BOOT, "cid 5").await.unwrap();
        }
        disk.close().unwrap();
    }
}
