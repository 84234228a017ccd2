//! Which boots' files go: those that nobody has written to for so many days, then the oldest until all together are small enough.
//!
//! A boot in flight never goes: one that has a connection, or that was written to within [`GRACE`] (its guest may be coming back, or the
//! collector was started again). Nothing but files named by a boot id is ever looked at.

use super::disk::{Store, Tell};
use crate::events::record::is_boot_id;
use crate::host::boot_file::EXTENSION;
use anyhow::{Result, bail};
use std::path::PathBuf;
use std::time::{Duration, SystemTime};

/// How long after its last line a boot counts as in flight.
pub const GRACE: Duration = Duration::from_secs(600);
const DAY: Duration = Duration::from_secs(86_400);

/// How much is kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Keep {
    pub age: Option<Duration>,
    pub bytes: Option<u64>,
}

impl Keep {
    /// 0 days is for ever.
    pub fn days(days: u64) -> Option<Duration> {
        (days > 0).then(|| DAY.saturating_mul(u32::try_from(days).unwrap_or(u32::MAX)))
    }
}

/// `10G`, `500M`, `64k` or bytes; 0 is without limit.
pub fn parse_size(text: &str) -> Result<u64> {
    let (digits, unit) = match text.find(|c: char| !c.is_ascii_digit()) {
        Some(at) => text.split_at(at),
        None => (text, ""),
    };
    let shift = match unit.trim_end_matches(['B', 'i']) {
        "" => 0,
        "k" | "K" => 10,
        "M" => 20,
        "G" => 30,
        "T" => 40,
        _ => bail!("{text}: want bytes, or a number with k, M, G or T, for example 10G"),
    };
    match digits.parse::<u64>().ok().and_then(|n| n.checked_mul(1 << shift)) {
        Some(bytes) => Ok(bytes),
        None => bail!("{text}: want bytes, or a number with k, M, G or T, for example 10G"),
    }
}

/// One boot's file.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Candidate {
    written: SystemTime,
    boot_id: String,
    bytes: u64,
    path: PathBuf,
}

/// Applies a [`Keep`], again and again.
pub struct Retention {
    keep: Keep,
    /// It was said that more is there than may be, and that nothing can go.
    told: bool,
}

impl Retention {
    pub fn new(keep: Keep) -> Self {
        Self { keep, told: false }
    }

    /// Removes what is too old or too much.
    pub fn apply(&mut self, store: &Store, tell: &Tell) {
        if self.keep == Keep::default() {
            return;
        }
        let all = match candidates(store) {
            Ok(all) => all,
            Err(e) => return tell(format!("look for old boots: {e:#}")),
        };
        let total: u64 = all.iter().map(|c| c.bytes).sum();
        let mut left = total;
        for candidate in to_remove(&all, self.keep, SystemTime::now()) {
            // One that is in flight stays, and the next oldest goes in its place.
            if self.keep.bytes.is_none_or(|most| left <= most) && !is_old(candidate, self.keep, SystemTime::now()) {
                break;
            }
            match store.remove(&candidate.boot_id, &candidate.path) {
                Ok(true) => left -= candidate.bytes,
                Ok(false) => {}
                Err(e) => tell(format!("remove {}: {e}", candidate.path.display())),
            }
        }
        let over = self.keep.bytes.is_some_and(|most| left > most);
        if over && !self.told {
            tell(format!(
                "boots take {left} bytes in {}, more than --keep-size, and all that are left are in flight",
                store.dir().display()
            ));
        }
        self.told = over;
    }
}

fn candidates(store: &Store) -> Result<Vec<Candidate>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(store.dir())? {
        let entry = entry?;
        let path = entry.path();
        let Some(boot_id) = path.file_stem().and_then(|s| s.to_str()).filter(|id| is_boot_id(id)).map(String::from) else { continue };
        if path.extension().is_none_or(|e| e != EXTENSION) {
            continue;
        }
        // Of the entry itself: a link is none of ours. One that is gone meanwhile needs no removing.
        let Ok(meta) = entry.metadata() else { continue };
        if meta.is_file() {
            found.push(Candidate { written: meta.modified()?, boot_id, bytes: meta.len(), path });
        }
    }
    found.sort();
    Ok(found)
}

fn age(candidate: &Candidate, now: SystemTime) -> Duration {
    now.duration_since(candidate.written).unwrap_or_default()
}

fn is_old(candidate: &Candidate, keep: Keep, now: SystemTime) -> bool {
    keep.age.is_some_and(|most| age(candidate, now) > most)
}

/// Those that may have to go, oldest first: the old, and as far as all together are too large any that is not in flight.
fn to_remove(all: &[Candidate], keep: Keep, now: SystemTime) -> impl Iterator<Item = &Candidate> {
    let too_large = keep.bytes.is_some_and(|most| all.iter().map(|c| c.bytes).sum::<u64>() > most);
    all.iter().filter(move |c| age(c, now) > GRACE && (too_large || is_old(c, keep, now)))
}

#[cfg(test)]
mod tests {
    use super::super::disk::{Disk, Place};
    use super::super::limits::Limits;
    use super::*;
    use crate::events::record::{Header, header_line};
    use crate::host::testing::TempDir;
    use std::fs::File;
    use std::sync::{Arc, Mutex};

    fn id(n: usize) -> String {
        format!("0f7a1f8e-0000-4000-8000-{n:012x}")
    }

    /// Files 0, 1, .. of 1000 bytes, each with the age in hours.
    fn files(dir: &TempDir, hours: &[u64]) {
        for (n, hours) in hours.iter().enumerate() {
            let file = File::create(dir.path().join(format!("{}.ndjson", id(n)))).unwrap();
            file.set_len(1000).unwrap();
            file.set_modified(SystemTime::now() - Duration::from_secs(hours * 3600)).unwrap();
        }
    }

    fn left(dir: &TempDir) -> Vec<usize> {
        (0..10).filter(|n| dir.path().join(format!("{}.ndjson", id(*n))).exists()).collect()
    }

    fn apply(dir: &TempDir, keep: Keep) -> Vec<String> {
        let told: Arc<Mutex<Vec<String>>> = Arc::default();
        let sink = told.clone();
        let tell: Tell = Arc::new(move |text| sink.lock().unwrap().push(text));
        let disk =
            Disk::start(Place::take(dir.path()).unwrap(), Limits::default(), Keep::default(), Arc::default(), tell.clone(), || ()).unwrap();
        Retention::new(keep).apply(&disk.store, &tell);
        disk.close().unwrap();
        told.lock().unwrap().clone()
    }

    #[test]
    fn the_old_go_then_the_oldest_until_the_rest_is_small_enough_and_never_one_in_flight() {
        let dir = TempDir::new();
        let hours = [100, 50, 30, 20, 0];
        for (keep, want) in [
            (Keep { age: None, bytes: None }, vec![0, 1, 2, 3, 4]),
            (Keep { age: Keep::days(2), bytes: None }, vec![2, 3, 4]),
            (Keep { age: None, bytes: Some(3000) }, vec![2, 3, 4]),
            (Keep { age: Keep::days(3), bytes: Some(2999) }, vec![3, 4]),
            (Keep { age: Keep::days(1), bytes: Some(1) }, vec![4]),
        ] {
            files(&dir, &hours);
            let told = apply(&dir, keep);
            assert_eq!(left(&dir), want, "{keep:?}");
            assert_eq!(told.iter().any(|t| t.contains("in flight")), keep.bytes == Some(1), "{told:?}");
        }
    }

    #[test]
    fn nothing_else_in_the_directory_is_touched() {
        let dir = TempDir::new();
        files(&dir, &[100]);
        let old = SystemTime::now() - Duration::from_secs(1_000_000);
        for name in ["notes.txt", "x.ndjson", &format!("{}.console", id(1))] {
            File::create(dir.path().join(name)).unwrap().set_modified(old).unwrap();
        }
        std::os::unix::fs::symlink("notes.txt", dir.path().join(format!("{}.ndjson", id(5)))).unwrap();
        apply(&dir, Keep { age: Keep::days(1), bytes: Some(1) });
        assert_eq!(left(&dir), [5]);
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 4);
    }

    #[tokio::test]
    async fn a_connected_boot_stays_however_long_it_is_silent() {
        let dir = TempDir::new();
        let tell: Tell = Arc::new(|_| ());
        let disk =
            Disk::start(Place::take(dir.path()).unwrap(), Limits::default(), Keep::default(), Arc::default(), tell.clone(), || ()).unwrap();
        let header = Header { boot_id: id(0), version: String::new(), kernel: String::new(), first_seq: 0 };
        let attached = disk.store.attach(&header, header_line(&header).trim_end().as_bytes(), "cid 3", || true).await.unwrap();
        let path = dir.path().join(format!("{}.ndjson", id(0)));
        let deadline = std::time::Instant::now() + Duration::from_secs(10);
        while std::fs::metadata(&path).map_or(0, |m| m.len()) == 0 {
            assert!(std::time::Instant::now() < deadline, "nothing is written within 10 s");
            tokio::task::yield_now().await;
        }
        File::options().write(true).open(&path).unwrap().set_modified(SystemTime::UNIX_EPOCH).unwrap();
        let keep = Keep { age: Keep::days(1), bytes: Some(1) };
        Retention::new(keep).apply(&disk.store, &tell);
        assert_eq!(left(&dir), [0]);
        drop(attached);
        disk.close().unwrap();
        apply(&dir, keep);
        assert_eq!(left(&dir), [0; 0], "without a connection it goes");
    }

    #[test]
    fn sizes_are_read_as_people_write_them() {
        for (text, want) in
            [("0", 0), ("1000", 1000), ("64k", 65536), ("10G", 10 << 30), ("10GiB", 10 << 30), ("1T", 1 << 40), ("5MB", 5 << 20)]
        {
            assert_eq!(parse_size(text).unwrap(), want, "{text}");
        }
        for text in ["", "G", "-1", "1.5G", "10X", "99999999999T"] {
            assert!(parse_size(text).unwrap_err().to_string().contains("for example 10G"), "{text}");
        }
    }
}
