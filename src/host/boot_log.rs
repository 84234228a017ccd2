//! Writing the files of boots: one [`BootLog`] per boot, all of them in a [`Store`].
//!
//! Invariants: a file is only ever appended to, under a lock that a second collector does not get; a record (boot id, seq) is written
//! once, also after the collector was started again (the file is read back); a boot belongs to the peer that connected first for it, so
//! that one VM cannot write into the story of another; what a peer can make this machine store is limited.

use super::boot_file::{BootFile, EXTENSION, HostEvent, HostLine, SeqSet};
use super::clock::Sample;
use crate::events::record::{Header, Record, is_boot_id};
use anyhow::{Context, Result, bail, ensure};
use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg, OFlag};
use std::collections::{HashMap, HashSet};
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Records of one boot that are stored. A boot with 8 GPUs has some hundred, and a chatty kernel some thousand.
pub const MAX_RECORDS: u64 = 200_000;
/// Bytes of one boot's file.
pub const MAX_BYTES: u64 = 64 << 20;
/// What the collector's own lines may take beyond that: a guest makes it write some by reconnecting.
const MAX_HOST_BYTES: u64 = 4 << 20;
/// Boots that one peer (CID or socket) may bring to one run of the collector.
pub const MAX_BOOTS_PER_PEER: usize = 64;
/// Gaps that a `lost` line names.
const MAX_NAMED_GAPS: usize = 32;

/// What became of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stored {
    New,
    /// Seen before: a replay.
    Duplicate,
    /// Over the limit of this boot: dropped.
    Capped,
}

/// The file of one boot, open for appending.
#[derive(Debug)]
pub struct BootLog {
    path: PathBuf,
    file: Flock<File>,
    owner: Option<String>,
    seqs: SeqSet,
    records: u64,
    bytes: u64,
    best: Option<Sample>,
    capped: bool,
    reported_missing: u64,
    pending: Vec<u8>,
}

impl BootLog {
    fn open(dir: &Path, header: &Header, raw_header: &[u8]) -> Result<Self> {
        // The name is checked where it becomes one, whatever was checked before.
        ensure!(is_boot_id(&header.boot_id), "boot id is not a UUID");
        let path = dir.join(format!("{}.{EXTENSION}", header.boot_id));
        let file = OpenOptions::new()
            .create(true)
            .append(true)
            .read(true)
            .custom_flags(OFlag::O_NOFOLLOW.bits())
            .open(&path)
            .with_context(|| format!("open {}", path.display()))?;
        let file = match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            Ok(file) => file,
            Err((_, Errno::EWOULDBLOCK)) => bail!("{}: another collector is writing it: stop one of the two", path.display()),
            Err((_, e)) => return Err(e).with_context(|| format!("lock {}", path.display())),
        };
        let before = BootFile::read(&*file).with_context(|| format!("read back {}", path.display()))?;
        let mut log = Self {
            path,
            file,
            owner: before.owner().map(String::from),
            records: before.records.len() as u64,
            bytes: before.bytes,
            best: before.clock_samples().max_by_key(|s| s.boottime_ns),
            capped: before.host.iter().any(|line| matches!(line.event, HostEvent::Capped { .. })),
            reported_missing: 0,
            pending: Vec::new(),
            seqs: before.seqs,
        };
        if before.unfinished > 0 {
            // A writer died inside a line. The rest of it comes again by replay; what is there becomes a damaged line of its own.
            log.pending.push(b'\n');
        }
        if before.header.is_none() {
            log.push_raw(raw_header);
        }
        Ok(log)
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The newest of the samples that stand in the file.
    pub fn best_sample(&self) -> Option<Sample> {
        self.best
    }

    /// Takes a record, as it was decoded and as it came (without newline). Written by the next [`BootLog::flush`].
    pub fn append(&mut self, record: &Record, raw: &[u8]) -> Stored {
        if self.capped {
            return Stored::Capped;
        }
        let why = if self.records >= MAX_RECORDS {
            Some(format!("{MAX_RECORDS} records"))
        } else if self.bytes + raw.len() as u64 > MAX_BYTES {
            Some(format!("{MAX_BYTES} bytes"))
        } else {
            None
        };
        if let Some(why) = why {
            self.capped = true;
            self.append_host(HostEvent::Capped { why });
            return Stored::Capped;
        }
        if !self.seqs.insert(record.seq) {
            return Stored::Duplicate;
        }
        self.records += 1;
        self.push_raw(raw);
        Stored::New
    }

    /// Adds a line of the collector's own.
    pub fn append_host(&mut self, event: HostEvent) {
        if let HostEvent::Clock(sample) = event {
            self.best = Some(sample);
        }
        if self.bytes > MAX_BYTES + MAX_HOST_BYTES {
            return;
        }
        let line = HostLine::now(event).to_line();
        self.push_raw(line.trim_end().as_bytes());
    }

    /// Notes the records that are missing by now, if that is news.
    pub fn append_loss(&mut self) {
        let count = self.seqs.missing();
        if count != self.reported_missing {
            self.reported_missing = count;
            let gaps = self.seqs.gaps().take(MAX_NAMED_GAPS).collect();
            self.append_host(HostEvent::Lost { count, gaps });
        }
    }

    fn push_raw(&mut self, line: &[u8]) {
        self.pending.extend_from_slice(line);
        self.pending.push(b'\n');
        self.bytes += line.len() as u64 + 1;
    }

    /// Hands everything to the kernel. After an error the connection has to end: what was not written is forgotten, the file is read back
    /// when the guest comes again, and the guest replays it.
    pub fn flush(&mut self) -> Result<()> {
        if self.pending.is_empty() {
            return Ok(());
        }
        let written = self.file.write_all(&self.pending);
        self.pending.clear();
        if written.is_err() {
            // Part of a line may stand there now.
            self.pending.push(b'\n');
        }
        written.with_context(|| format!("append to {}: make room there, the guest sends it again when it reconnects", self.path.display()))
    }
}

/// The open files of all boots, and who may write which.
#[derive(Debug)]
pub struct Store {
    dir: PathBuf,
    open: HashMap<String, (Arc<Mutex<BootLog>>, usize)>,
    boots_of: HashMap<String, HashSet<String>>,
}

impl Store {
    /// Makes the directory if it is not there.
    pub fn new(dir: &Path) -> Result<Self> {
        std::fs::create_dir_all(dir).with_context(|| format!("create {}: name another directory with --dir", dir.display()))?;
        Ok(Self { dir: dir.to_path_buf(), open: HashMap::new(), boots_of: HashMap::new() })
    }

    /// Opens the boot's file for a peer. Each success needs one [`Store::detach`].
    pub fn attach(&mut self, header: &Header, raw_header: &[u8], peer: &str) -> Result<Arc<Mutex<BootLog>>> {
        let boots = self.boots_of.entry(peer.to_string()).or_default();
        if !boots.contains(&header.boot_id) && boots.len() >= MAX_BOOTS_PER_PEER {
            bail!("{peer} brought {MAX_BOOTS_PER_PEER} boots already: start the collector again if that is right");
        }
        let log = match self.open.get(&header.boot_id) {
            Some((log, _)) => log.clone(),
            None => Arc::new(Mutex::new(BootLog::open(&self.dir, header, raw_header)?)),
        };
        {
            let mut log = lock(&log);
            match &log.owner {
                Some(owner) if owner != peer => bail!("{peer} speaks for boot {}, which belongs to {owner}", header.boot_id),
                _ => log.owner = Some(peer.to_string()),
            }
            log.append_host(HostEvent::Connected { peer: peer.to_string(), first_seq: header.first_seq });
            log.flush()?;
        }
        boots.insert(header.boot_id.clone());
        self.open.entry(header.boot_id.clone()).or_insert_with(|| (log.clone(), 0)).1 += 1;
        Ok(log)
    }

    /// Closes the file when nobody else writes to it.
    pub fn detach(&mut self, boot_id: &str) {
        if let Some((_, users)) = self.open.get_mut(boot_id) {
            *users -= 1;
            if *users == 0 {
                self.open.remove(boot_id);
            }
        }
    }
}

/// A connection that panicked must not take the others' files with it: what it was writing is checked line by line on reading anyway.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::events::record::{self, Line};
    use crate::host::testing::TempDir;

    fn header() -> Header {
        Header { boot_id: "0f7a1f8e-0000-4000-8000-00000000beef".into(), version: "0.1.0".into(), kernel: "6.1".into(), first_seq: 0 }
    }

    /// A line with white space of its own, to see that it is kept.
    fn raw(seq: u64) -> Vec<u8> {
        format!(r#"{{ "schema":1,"seq":{seq},  "boottime_ns":1,"kind":"event","name":"x"}}"#).into_bytes()
    }

    fn append(log: &Mutex<BootLog>, seq: u64) -> Stored {
        let raw = raw(seq);
        let Ok(Line::Record(record)) = record::decode(&raw) else { panic!("test record does not decode") };
        lock(log).append(&record, &raw)
    }

    fn attach(store: &mut Store, peer: &str) -> Result<Arc<Mutex<BootLog>>> {
        let header = header();
        store.attach(&header, record::header_line(&header).trim_end().as_bytes(), peer)
    }

    #[test]
    fn records_are_stored_as_they_came_and_once_also_after_a_restart() {
        let dir = TempDir::new();
        let mut store = Store::new(dir.path()).unwrap();
        let log = attach(&mut store, "cid 5").unwrap();
        assert_eq!([append(&log, 0), append(&log, 1), append(&log, 1)], [Stored::New, Stored::New, Stored::Duplicate]);
        lock(&log).flush().unwrap();
        let path = lock(&log).path().to_path_buf();
        drop(log);
        store.detach(&header().boot_id);
        let first = std::fs::read(&path).unwrap();

        let mut store = Store::new(dir.path()).unwrap();
        let log = attach(&mut store, "cid 5").unwrap();
        assert_eq!([append(&log, 0), append(&log, 1), append(&log, 2)], [Stored::Duplicate, Stored::Duplicate, Stored::New]);
        lock(&log).flush().unwrap();
        let second = std::fs::read(&path).unwrap();
        assert!(second.starts_with(&first), "what was written is never changed");
        let texts: Vec<&[u8]> = second.split(|b| *b == b'\n').collect();
        for seq in 0..3 {
            assert_eq!(texts.iter().filter(|line| **line == raw(seq)).count(), 1, "seq {seq}");
        }
        assert_eq!(texts.iter().filter(|line| line.starts_with(br#"{"schema":1,"stream""#)).count(), 1, "one header");
    }

    #[test]
    fn a_line_torn_by_a_crash_is_left_alone_and_comes_again() {
        let dir = TempDir::new();
        let path = dir.path().join(format!("{}.ndjson", header().boot_id));
        let torn = &raw(0)[..25];
        std::fs::write(&path, [record::header_line(&header()).as_bytes(), torn].concat()).unwrap();
        let mut store = Store::new(dir.path()).unwrap();
        let log = attach(&mut store, "cid 5").unwrap();
        assert_eq!(append(&log, 0), Stored::New);
        lock(&log).flush().unwrap();
        let file = BootFile::read(File::open(&path).unwrap()).unwrap();
        assert_eq!((file.records.len(), file.damaged, file.damage[0].line), (1, 1, 2));
    }

    #[test]
    fn a_boot_belongs_to_its_first_peer_also_after_a_restart() {
        let dir = TempDir::new();
        for _ in 0..2 {
            let mut store = Store::new(dir.path()).unwrap();
            attach(&mut store, "cid 5").unwrap();
            let refused = attach(&mut store, "cid 6").unwrap_err().to_string();
            assert!(refused.contains("belongs to cid 5"), "{refused}");
        }
    }

    #[test]
    fn two_collectors_do_not_write_one_file() {
        let dir = TempDir::new();
        let mut one = Store::new(dir.path()).unwrap();
        let _held = attach(&mut one, "cid 5").unwrap();
        let refused = attach(&mut Store::new(dir.path()).unwrap(), "cid 5").unwrap_err().to_string();
        assert!(refused.contains("another collector"), "{refused}");
    }

    #[test]
    fn a_peer_brings_only_so_many_boots_and_no_file_name_of_its_own() {
        let dir = TempDir::new();
        let mut store = Store::new(dir.path()).unwrap();
        for i in 0..MAX_BOOTS_PER_PEER {
            let header = Header { boot_id: format!("0f7a1f8e-0000-4000-8000-{i:012x}"), ..header() };
            store.attach(&header, b"{}", "cid 5").unwrap();
            store.detach(&header.boot_id);
        }
        assert!(attach(&mut store, "cid 5").unwrap_err().to_string().contains("64 boots already"));
        attach(&mut store, "cid 6").unwrap();
        let evil = Header { boot_id: "../../../../tmp/evil-evil-evil-evil-".into(), ..header() };
        assert!(store.attach(&evil, b"{}", "cid 7").is_err());
    }

    #[test]
    fn a_boot_that_never_stops_talking_is_cut_off_and_the_file_says_so() {
        let dir = TempDir::new();
        let mut store = Store::new(dir.path()).unwrap();
        let log = attach(&mut store, "cid 5").unwrap();
        lock(&log).records = MAX_RECORDS;
        assert_eq!([append(&log, 0), append(&log, 1)], [Stored::Capped, Stored::Capped]);
        lock(&log).flush().unwrap();
        let file = BootFile::read(File::open(lock(&log).path()).unwrap()).unwrap();
        let capped = file.host.iter().filter(|l| matches!(l.event, HostEvent::Capped { .. })).count();
        assert_eq!((capped, file.records.len()), (1, 0));
    }

    #[test]
    fn gaps_are_noted_when_they_change() {
        let dir = TempDir::new();
        let mut store = Store::new(dir.path()).unwrap();
        let log = attach(&mut store, "cid 5").unwrap();
        for seq in [0, 3, 4] {
            append(&log, seq);
        }
        lock(&log).append_loss();
        lock(&log).append_loss();
        append(&log, 1);
        append(&log, 2);
        lock(&log).append_loss();
        lock(&log).flush().unwrap();
        let file = BootFile::read(File::open(lock(&log).path()).unwrap()).unwrap();
        let lost: Vec<_> = file.host.iter().filter(|l| matches!(l.event, HostEvent::Lost { .. })).map(|l| l.event.clone()).collect();
        assert_eq!(lost, [HostEvent::Lost { count: 2, gaps: vec![(1, 2)] }, HostEvent::Lost { count: 0, gaps: vec![] }]);
    }
}
