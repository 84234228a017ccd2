//! The files of all boots: one thread writes them, one makes them durable and removes old ones.
//! Receiving never waits for a disk.
//!
//! Promises: the writing thread hands a record to the kernel milliseconds after it came; from then
//! on no end of the collector loses it. fdatasync follows within
//! [`SYNC_INTERVAL`](super::writer::SYNC_INTERVAL), and at a stop: a crash of the machine loses the
//! records of that time. A file is only ever appended to. While it cannot be written, a limited
//! number of bytes waits in memory ([`super::limits`]) and more records are counted. When writing
//! works again, the guest is disconnected; it reconnects and sends all again.

use super::store::{Job, Log, Store};
use super::threads;
use super::writer::{Writer, keep_up};
use anyhow::{Result, anyhow};
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;

/// The threads of a [`Store`].
pub struct Disk {
    pub store: Arc<Store>,
    writer: JoinHandle<()>,
    keeper: JoinHandle<()>,
    stop_keeper: mpsc::Sender<()>,
}

impl Disk {
    pub fn start(store: Store, jobs: mpsc::Receiver<Job>, log: Log) -> Result<Self> {
        let store = Arc::new(store);
        let (stop_keeper, stopped) = mpsc::channel();
        let writer = Writer::new(store.clone(), log.clone());
        let kept = store.clone();
        Ok(Self {
            writer: threads::start("boots-write", move || writer.run(&jobs))?,
            keeper: threads::start("boots-keep", move || keep_up(&kept, &log, &stopped))?,
            store,
            stop_keeper,
        })
    }

    /// Writes all waiting bytes, makes them durable, and ends the threads. Blocks.
    pub fn close(self) -> Result<()> {
        self.store.stop();
        self.writer
            .join()
            .map_err(|_| anyhow!("the thread that writes boots panicked"))?;
        let _gone = self.stop_keeper.send(());
        self.keeper
            .join()
            .map_err(|_| anyhow!("the thread that keeps boots panicked"))
    }
}

/// A disk with every default.
#[cfg(test)]
pub(super) fn start_with(dir: &std::path::Path, log: Log) -> Disk {
    let place = super::place::Place::take(dir).unwrap();
    let (store, jobs) = Store::new(place, Default::default(), Default::default());
    Disk::start(store, jobs, log).unwrap()
}

#[cfg(test)]
mod tests {
    use super::super::store::{Attached, REMEMBERED};
    use super::*;
    use kata_gpu_report::data::boot_file::BootFile;
    use kata_gpu_test_support::{BOOT, HANG, event, header, kept_log, temp_dir, until};
    use kata_gpu_wire::record;
    use kata_gpu_wire::record::Line;
    use std::fs::File;
    use std::path::Path;
    use std::time::{Duration, Instant};

    fn start(dir: &Path) -> Disk {
        start_with(dir, Arc::new(|text| panic!("{text}")))
    }

    fn read(path: &Path) -> BootFile {
        BootFile::read(File::open(path).unwrap()).unwrap()
    }

    async fn attach(disk: &Disk, boot: &str, peer: &str) -> Result<Attached> {
        let header = header(boot);
        disk.store
            .attach(
                &header,
                record::header_line(&header).trim_end().as_bytes(),
                peer,
                || true,
            )
            .await
    }

    fn append(attached: &Attached, seq: u64) {
        let raw = event(seq);
        let Ok(Line::Record(record)) = kata_gpu_wire::decode::decode(raw.as_bytes()) else {
            panic!("test record does not decode")
        };
        attached.with(|log| log.append(&record, raw.as_bytes()));
        attached.flush();
    }

    #[tokio::test]
    async fn appends_are_written_and_synced_and_a_removed_file_restarts() {
        let dir = temp_dir();
        let disk = start(dir.path());
        let path = dir.path().join(format!("{BOOT}.ndjson"));
        let attached = attach(&disk, BOOT, "cid 5").await.unwrap();
        append(&attached, 0);
        assert!(
            !disk.store.remove(BOOT, &path).unwrap(),
            "a boot in flight is never removed"
        );
        drop(attached);
        let stats = disk.store.stats.clone();
        disk.close().unwrap();
        assert_eq!(read(&path).records.len(), 1);
        assert!(stats.counts().synced >= 1, "{:?}", stats.counts());

        let disk = start(dir.path());
        for _ in 0..2 {
            append(&attach(&disk, BOOT, "cid 5").await.unwrap(), 0);
            // Written and closed when it can be removed.
            until(|| disk.store.remove(BOOT, &path).unwrap()).await;
            assert!(!path.exists());
        }
        append(&attach(&disk, BOOT, "cid 5").await.unwrap(), 0);
        disk.close().unwrap();
        let file = read(&path);
        assert_eq!((file.records.len(), file.header.is_some()), (1, true));
    }

    #[tokio::test]
    async fn a_removed_file_or_directory_is_requested_again() {
        for with_directory in [false, true] {
            let dir = temp_dir();
            let place = dir.path().join("boots");
            let (log, logged) = kept_log();
            let disk = start_with(&place, log);
            let path = place.join(format!("{BOOT}.ndjson"));
            let mut attached = attach(&disk, BOOT, "cid 5").await.unwrap();
            append(&attached, 0);
            until(|| std::fs::read_to_string(&path).is_ok_and(|text| text.contains(&event(0))))
                .await;
            if with_directory {
                std::fs::remove_dir_all(&place).unwrap();
            } else {
                std::fs::remove_file(&path).unwrap();
            }
            append(&attached, 1);
            tokio::time::timeout(HANG, attached.again.changed())
                .await
                .expect("it is not asked again")
                .unwrap();
            // Records that still come on this connection begin no file without a header.
            append(&attached, 2);
            assert!(
                attach(&disk, BOOT, "cid 6").await.is_err(),
                "it still belongs to its guest"
            );
            drop(std::mem::replace(
                &mut attached,
                attach(&disk, BOOT, "cid 5").await.unwrap(),
            ));
            (0..4).for_each(|seq| append(&attached, seq));
            drop(attached);
            let stats = disk.store.stats.clone();
            disk.close().unwrap();
            let file = read(&path);
            assert_eq!(
                (file.records.len(), file.header.is_some(), file.damaged),
                (4, true, 0)
            );
            assert_eq!(stats.counts().files_lost, 1);
            assert!(
                logged
                    .lock()
                    .unwrap()
                    .iter()
                    .any(|t| t.contains("was removed while its boot was received")),
                "{logged:?}"
            );
        }
    }

    #[tokio::test]
    async fn the_time_of_a_file_is_that_of_its_last_record() {
        let dir = temp_dir();
        let disk = start(dir.path());
        let path = dir.path().join(format!("{BOOT}.ndjson"));
        let written = || std::fs::metadata(&path).and_then(|m| m.modified()).unwrap();
        let text = || std::fs::read_to_string(&path).unwrap_or_default();
        append(&attach(&disk, BOOT, "cid 5").await.unwrap(), 0);
        until(|| text().contains(&event(0))).await;
        let old = std::time::SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000_000);
        File::options()
            .write(true)
            .open(&path)
            .unwrap()
            .set_modified(old)
            .unwrap();
        for times in 2..5 {
            drop(attach(&disk, BOOT, "cid 5").await.unwrap());
            until(|| text().matches("\"connected\"").count() == times).await;
        }
        let attached = attach(&disk, BOOT, "cid 5").await.unwrap();
        until(|| text().matches("\"connected\"").count() == 5 && written() == old).await;
        append(&attached, 1);
        until(|| written() > old).await;
        drop(attached);
        disk.close().unwrap();
    }

    /// Whether this process has a file open.
    fn is_open(path: &Path) -> bool {
        std::fs::read_dir("/proc/self/fd")
            .unwrap()
            .flatten()
            .any(|fd| std::fs::read_link(fd.path()).is_ok_and(|to| to == path))
    }

    #[tokio::test]
    async fn a_boots_file_is_closed_after_its_last_connection() {
        let dir = temp_dir();
        let disk = start(dir.path());
        let path = dir.path().join(format!("{BOOT}.ndjson"));
        let attached = attach(&disk, BOOT, "cid 5").await.unwrap();
        until(|| is_open(&path)).await;
        drop(attached);
        until(|| !is_open(&path)).await;
        disk.close().unwrap();
    }

    #[tokio::test]
    async fn no_file_name_is_of_a_guests_making() {
        let dir = temp_dir();
        let disk = start(&dir.path().join("boots"));
        for evil in [
            "../../../../tmp/evil-evil-evil-evil-",
            "",
            "0F7A1F8E-0000-4000-8000-00000000BEEF",
            "0f7a1f8e-0000-4000-8000-00000000be\n",
        ] {
            assert!(attach(&disk, evil, "cid 7").await.is_err(), "{evil:?}");
        }
        // A link that somebody put there is not followed.
        std::os::unix::fs::symlink(
            dir.path().join("elsewhere"),
            dir.path().join(format!("boots/{BOOT}.ndjson")),
        )
        .unwrap();
        assert!(attach(&disk, BOOT, "cid 7").await.is_err());
        disk.close().unwrap();
        assert!(!dir.path().join("elsewhere").exists());
    }

    #[tokio::test]
    async fn only_so_many_boots_are_remembered() {
        let dir = temp_dir();
        let disk = start(dir.path());
        for n in 0..REMEMBERED + 100 {
            attach(&disk, &format!("0f7a1f8e-0000-4000-8000-{n:012x}"), "cid 5")
                .await
                .unwrap();
        }
        // Boots that are not written yet are not forgotten; once they are, further connections push
        // them out.
        let deadline = Instant::now() + HANG;
        while disk.store.count() > REMEMBERED + 1 {
            assert!(Instant::now() < deadline, "not forgotten within {HANG:?}");
            attach(&disk, BOOT, "cid 5").await.unwrap();
        }
        disk.close().unwrap();
    }
}
