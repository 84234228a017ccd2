//! Removal of boots' files: first files whose last record is too old; then, until the rest is small
//! enough, the oldest boot of the tenant that takes most ([`super::tenant`]), again and again.
//!
//! Many VMs of one tenant therefore remove that tenant's boots: another tenant loses one only if it
//! takes as much itself. A boot in flight is never removed: it has a connection, or its last record
//! came within [`GRACE`] (its guest may be coming back, or the collector was restarted). The latter
//! holds only for tenants within their [`FLOORS`]. Only files named by a boot id are looked at. A
//! host whose clock was set makes no boot old ([`HostClock`]).

use super::host_clock::{HostClock, Now};
use super::keep::Keep;
use super::lock::lock;
use super::store::{Log, Store};
use super::tenant::{Tenant, Tenants};
use anyhow::{Context, Result};
use kata_gpu_report::data::boot_file::EXTENSION;
use kata_gpu_report::data::trace_file;
use kata_gpu_wire::record::is_boot_id;
use std::collections::{BinaryHeap, HashMap, VecDeque};
use std::ffi::OsStr;
use std::path::PathBuf;
use std::time::{Duration, SystemTime};

/// Time after its last record in which a boot counts as in flight.
pub const GRACE: Duration = Duration::from_secs(600);
/// A tenant's floor is [`Keep::bytes`] divided by this: boots of a tenant within it are spared for
/// [`GRACE`]. A node has no more than some ten VMs with GPUs at once.
const FLOORS: u64 = 8;
/// `10G`, `500M`, `64k` or bytes; 0 is without limit.
pub fn parse_size(text: &str) -> Result<u64> {
    let digits = text.trim_end_matches(|c: char| !c.is_ascii_digit());
    let shift = match text[digits.len()..].trim_end_matches(['B', 'i']) {
        "" => Some(0),
        "k" | "K" => Some(10),
        "M" => Some(20),
        "G" => Some(30),
        "T" => Some(40),
        _ => None,
    };
    let bytes = shift.and_then(|shift| digits.parse::<u64>().ok()?.checked_mul(1 << shift));
    bytes.with_context(|| {
        format!("{text}: want bytes, or a number with k, M, G or T, for example 10G")
    })
}

/// A boot's file.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Candidate {
    /// Time of the last record.
    written: SystemTime,
    boot_id: String,
    bytes: u64,
    path: PathBuf,
}

/// Applies a [`Keep`], again and again.
pub struct Retention {
    keep: Keep,
    clock: HostClock,
    tenants: Tenants,
    /// The line about boots over the limit, all in flight, was printed.
    logged: bool,
}

impl Retention {
    pub fn new(keep: Keep) -> Self {
        Self {
            keep,
            clock: HostClock::default(),
            tenants: Tenants::default(),
            logged: false,
        }
    }

    /// Removes boots that are too old or too many.
    pub fn apply(&mut self, store: &Store, log: &Log, now: Now) {
        if self.keep == Keep::default() {
            return;
        }
        let all = match candidates(store) {
            Ok(all) => all,
            Err(e) => return log(format!("look for old boots: {e:#}")),
        };
        if self.keep.age.is_some() {
            self.clock
                .look(now, store.dir(), all.last().map(|newest| newest.written))
                .into_iter()
                .for_each(|line| log(line));
        }
        let mut left: u64 = all.iter().map(|c| c.bytes).sum();
        // False for a boot in flight.
        let go = |candidate: &Candidate, left: &mut u64| {
            let removed = store.remove(&candidate.boot_id, &candidate.path);
            let gone = removed.unwrap_or_else(|e| {
                log(format!("remove {}: {e}", candidate.path.display()));
                false
            });
            *left -= if gone { candidate.bytes } else { 0 };
            gone
        };
        let (old, mut rest): (Vec<_>, Vec<_>) = all.into_iter().partition(|c| self.is_old(c, now));
        for candidate in old {
            if !go(&candidate, &mut left) {
                rest.push(candidate);
            }
        }
        let most = self.keep.bytes.unwrap_or(u64::MAX);
        if left > most {
            rest.sort();
            self.tenants
                .forget_all_but(rest.iter().map(|c| &*c.boot_id));
            let mut queues = self.queues(rest);
            while left > most
                && let Some((mut queue, oldest)) = next_to_go(&mut queues, most / FLOORS, now)
            {
                // Bytes of a boot in flight go on counting: its tenant's next boot follows.
                queue.bytes -= if go(&oldest, &mut left) {
                    oldest.bytes
                } else {
                    0
                };
                queues.push(queue);
            }
        }
        if left > most && !self.logged {
            log(format!(
                "boots take {left} bytes in {}, more than --keep-size: all that are left are in \
                 flight",
                store.dir().display()
            ));
        }
        self.logged = left > most;
        *lock(&store.kept_bytes) = Some(left);
    }

    fn is_old(&self, candidate: &Candidate, now: Now) -> bool {
        self.clock.is_trusted(now)
            && self
                .keep
                .age
                .is_some_and(|most| age(candidate, now) > most.max(GRACE))
    }

    /// Boots of each tenant; `all` is in order of age.
    fn queues(&mut self, all: Vec<Candidate>) -> BinaryHeap<Queue> {
        let mut queues: HashMap<Option<Tenant>, Queue> = HashMap::new();
        for candidate in all {
            let tenant = self
                .tenants
                .of(&candidate.boot_id, &candidate.path, candidate.bytes);
            // Only the collector's own directory has a boot that no connection made.
            let has_floor = tenant.is_some();
            let queue = queues.entry(tenant).or_default();
            queue.bytes += candidate.bytes;
            queue.has_floor = has_floor;
            queue.oldest_first.push_back(candidate);
        }
        queues.into_values().collect()
    }
}

/// A tenant's boots, ordered by the bytes that they take.
#[derive(Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
struct Queue {
    bytes: u64,
    /// False for boots that no guest sent: they are spared however much they take.
    has_floor: bool,
    oldest_first: VecDeque<Candidate>,
}

/// Takes the tenant that takes most, and its oldest boot, out of the queues; None if all that are
/// left are spared.
fn next_to_go(queues: &mut BinaryHeap<Queue>, floor: u64, now: Now) -> Option<(Queue, Candidate)> {
    loop {
        let mut queue = queues.pop()?;
        let Some(oldest) = queue.oldest_first.pop_front() else {
            continue;
        };
        // The others of this tenant are younger still: spare them all.
        let is_spared = queue.bytes <= floor || !queue.has_floor;
        if age(&oldest, now) > GRACE || !is_spared {
            return Some((queue, oldest));
        }
    }
}

fn candidates(store: &Store) -> Result<Vec<Candidate>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(store.dir())? {
        let entry = entry?;
        let path = entry.path();
        let stem = path.file_stem().and_then(OsStr::to_str);
        let Some(boot_id) = stem.filter(|id| is_boot_id(id)).map(String::from) else {
            continue;
        };
        if path.extension().is_none_or(|e| e != EXTENSION) {
            continue;
        }
        // Metadata of the entry itself: links are not ours. Skip an entry that is gone meanwhile.
        let Ok(meta) = entry.metadata() else { continue };
        if meta.is_file() {
            let trace =
                std::fs::symlink_metadata(trace_file::beside(&path)).map_or(0, |meta| meta.len());
            found.push(Candidate {
                written: meta.modified()?,
                boot_id,
                bytes: meta.len() + trace,
                path,
            });
        }
    }
    found.sort();
    Ok(found)
}

fn age(candidate: &Candidate, now: Now) -> Duration {
    now.real
        .duration_since(candidate.written)
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::super::disk::start_with;
    use super::super::host_clock::AFTER_START;
    use super::super::keep::DAY;
    use super::*;
    use kata_gpu_report::data::boot_file::{HostEvent, HostLine, Sandbox};
    use kata_gpu_test_support::{TempDir, header, kept_log, temp_dir, until};
    use kata_gpu_wire::record::header_line;
    use std::fs::File;
    use std::sync::Arc;

    /// Limits of so many days, 0 being none, and bytes.
    fn keeping(days: u64, bytes: Option<u64>) -> Keep {
        Keep {
            age: Keep::days(days),
            bytes,
        }
    }

    fn id(n: usize) -> String {
        format!("0f7a1f8e-0000-4000-8000-{n:012x}")
    }

    /// Files 0, 1, .. of 1000 bytes, each with the age in hours.
    fn files(dir: &TempDir, hours: &[u64]) {
        for (n, hours) in hours.iter().enumerate() {
            let file = File::create(dir.path().join(format!("{}.ndjson", id(n)))).unwrap();
            file.set_len(1000).unwrap();
            file.set_modified(SystemTime::now() - Duration::from_secs(hours * 3600))
                .unwrap();
        }
    }

    fn left(dir: &TempDir) -> Vec<usize> {
        (0..20)
            .filter(|n| dir.path().join(format!("{}.ndjson", id(*n))).exists())
            .collect()
    }

    fn apply(dir: &TempDir, keep: Keep) -> Vec<String> {
        let (log, logged) = kept_log();
        let disk = start_with(dir.path(), log.clone());
        Retention::new(keep).apply(&disk.store, &log, now());
        disk.close().unwrap();
        logged.lock().unwrap().clone()
    }

    /// Both clocks, long after the machine's start.
    fn now() -> Now {
        Now {
            real: SystemTime::now(),
            boot: 100 * DAY,
            machine: 1,
        }
    }

    #[test]
    fn old_boots_go_then_the_oldest_and_never_one_in_flight() {
        let dir = temp_dir();
        let hours = [100, 50, 30, 20, 0];
        for (keep, want) in [
            (keeping(0, None), vec![0, 1, 2, 3, 4]),
            (keeping(2, None), vec![2, 3, 4]),
            (keeping(0, Some(3000)), vec![2, 3, 4]),
            (keeping(3, Some(2999)), vec![3, 4]),
            (keeping(1, Some(1)), vec![4]),
        ] {
            files(&dir, &hours);
            let logged = apply(&dir, keep);
            assert_eq!(left(&dir), want, "{keep:?}");
            assert_eq!(
                logged.iter().any(|t| t.contains("in flight")),
                keep.bytes == Some(1),
                "{logged:?}"
            );
        }
    }

    /// File n of a VM in this namespace, with the bytes and the age in hours.
    fn file_of(dir: &TempDir, n: usize, namespace: &str, bytes: u64, hours: u64) {
        let sandbox = Sandbox {
            id: format!("sandbox-{n}"),
            namespace: Some(namespace.into()),
            ..Sandbox::default()
        };
        file_with(dir, n, sandbox, bytes, hours);
    }

    fn file_with(dir: &TempDir, n: usize, sandbox: Sandbox, bytes: u64, hours: u64) {
        let connected = HostEvent::Connected {
            peer: format!("cid {n}"),
            first_seq: 0,
        };
        let path = dir.path().join(format!("{}.ndjson", id(n)));
        let lines = [connected, HostEvent::Sandbox(sandbox)].map(|e| HostLine::now(e).to_line());
        std::fs::write(&path, header_line(&header(&id(n))) + &lines.concat()).unwrap();
        let file = File::options().write(true).open(path).unwrap();
        file.set_len(bytes).unwrap();
        file.set_modified(SystemTime::now() - Duration::from_secs(hours * 3600))
            .unwrap();
    }

    #[test]
    fn many_short_lived_vms_of_one_tenant_remove_no_boot_of_another() {
        let dir = temp_dir();
        // Four old boots of honest tenants, and sixteen new VMs of another tenant, none of which
        // takes more than an eighth.
        (0..4).for_each(|n| file_of(&dir, n, &format!("honest-{n}"), 1000, 200));
        (4..20).for_each(|n| file_of(&dir, n, "evil", 1000, 0));
        assert_eq!(apply(&dir, keeping(0, Some(16_000))), [] as [String; 0]);
        let honest_and = |evil| (0..4).chain(evil).collect::<Vec<_>>();
        assert_eq!(left(&dir), honest_and(8..20), "its own oldest go");
        apply(&dir, keeping(0, Some(4000)));
        assert_eq!(left(&dir), honest_and(0..0));
    }

    #[test]
    fn without_a_namespace_the_vmms_user_is_the_tenant() {
        let dir = temp_dir();
        let of_user = |user| Sandbox {
            vmm_user: user,
            ..Sandbox::default()
        };
        // One user's VMs against an old boot of another's and one of nobody known.
        file_with(&dir, 0, of_user(Some(7)), 3000, 200);
        file_with(&dir, 1, of_user(None), 3000, 200);
        (2..8).for_each(|n| file_with(&dir, n, of_user(Some(8)), 3000, 1));
        apply(&dir, keeping(0, Some(12_000)));
        assert_eq!(left(&dir), [0, 1, 6, 7]);
    }

    #[test]
    fn tenants_of_equal_use_lose_their_oldest_boots_and_keep_the_same_amount() {
        let dir = temp_dir();
        for n in 0..9 {
            file_of(&dir, n, &format!("tenant-{}", n / 3), 1000, 100 - n as u64);
        }
        apply(&dir, keeping(0, Some(6000)));
        assert_eq!(left(&dir), [1, 2, 4, 5, 7, 8]);
    }

    #[test]
    fn bytes_of_boots_are_known_after_the_first_look() {
        let (dir, log): (_, Log) = (temp_dir(), Arc::new(|_| ()));
        files(&dir, &[100, 50, 0]);
        let disk = start_with(dir.path(), log.clone());
        assert_eq!(*lock(&disk.store.kept_bytes), None);
        for (keep, left) in [
            (keeping(3, None), 2000),
            (keeping(0, Some(1999)), 1000),
            (keeping(0, Some(1)), 1000),
        ] {
            Retention::new(keep).apply(&disk.store, &log, now());
            assert_eq!(*lock(&disk.store.kept_bytes), Some(left), "{keep:?}");
        }
        disk.close().unwrap();
    }

    #[test]
    fn a_clock_that_is_set_makes_no_boot_old() {
        let dir = temp_dir();
        files(&dir, &[1]);
        let (log, logged) = kept_log();
        let disk = start_with(dir.path(), log.clone());
        let mut retention = Retention::new(keeping(30, None));
        let start = now();
        let mut at = |real: Duration, boot: Duration| {
            retention.apply(
                &disk.store,
                &log,
                Now {
                    real: start.real + real,
                    boot: start.boot + boot,
                    ..start
                },
            );
            left(&dir)
        };
        assert_eq!(at(Duration::ZERO, Duration::ZERO), [0]);
        let minute = Duration::from_secs(60);
        // A year into the future, and back.
        assert_eq!(at(365 * DAY, minute), [0]);
        assert_eq!(at(365 * DAY + 23 * 60 * minute, 23 * 60 * minute), [0]);
        assert_eq!(at(24 * 60 * minute, 24 * 60 * minute), [0]);
        assert_eq!(
            logged
                .lock()
                .unwrap()
                .iter()
                .filter(|t| t.contains("clock was set by 315"))
                .count(),
            2,
            "{logged:?}"
        );
        // Time that passes makes it old.
        assert_eq!(at(29 * DAY, 29 * DAY), [0]);
        assert_eq!(at(31 * DAY, 31 * DAY), [0; 0]);
        disk.close().unwrap();
    }

    /// Looks once as a collector that was started after the last one was killed.
    fn at_a_start(dir: &TempDir, now: Now) -> Vec<usize> {
        let (log, _) = kept_log();
        let disk = start_with(dir.path(), log.clone());
        Retention::new(keeping(30, None)).apply(&disk.store, &log, now);
        disk.close().unwrap();
        left(dir)
    }

    /// Both clocks, so much later, of this start of the machine.
    fn later(start: Now, real: Duration, boot: Duration, machine: u128) -> Now {
        Now {
            real: start.real + real,
            boot: start.boot + boot,
            machine,
        }
    }

    #[test]
    fn a_clock_that_is_set_while_no_collector_runs_makes_no_boot_old() {
        let dir = temp_dir();
        files(&dir, &[100, 1]);
        let start = now();
        let at = |real, boot, machine| at_a_start(&dir, later(start, real, boot, machine));
        let (year, hour) = (365 * DAY, DAY / 24);
        assert_eq!(at(Duration::ZERO, Duration::ZERO, 1), [0, 1]);
        assert_eq!(at(year, hour, 1), [0, 1], "set between two collectors");
        assert_eq!(
            at(year + 20 * hour, 20 * hour, 1),
            [0, 1],
            "and one more start"
        );
        assert_eq!(at(hour * 21, hour * 21, 1), [0, 1], "set right again");
        // Time that passed without a collector makes boots old.
        assert_eq!(at(27 * DAY, 27 * DAY, 1), [1]);
        // A year later at the next start of the machine: it was off, or its clock is wrong.
        assert_eq!(at(27 * DAY + year, Duration::ZERO, 2), [1]);
        assert_eq!(at(28 * DAY + year, DAY, 2), [0; 0]);
    }

    #[test]
    fn a_start_of_the_machine_sets_no_distrusted_clock_right() {
        let dir = temp_dir();
        files(&dir, &[100, 1]);
        let start = Now {
            boot: Duration::ZERO,
            ..now()
        };
        let at = |real, boot, machine| at_a_start(&dir, later(start, real, boot, machine));
        let (year, hour) = (365 * DAY, DAY / 24);
        assert_eq!(at(Duration::ZERO, 2 * hour, 1), [0, 1]);
        assert_eq!(at(year, 3 * hour, 1), [0, 1], "set by a year");
        assert_eq!(at(year + hour, hour, 2), [0, 1], "after a start");
        assert_eq!(at(year + 3 * hour, 3 * hour, 2), [0, 1]);
        // The distrust ends all the same.
        assert_eq!(at(year + 26 * hour, 26 * hour, 2), [0; 0]);
    }

    #[test]
    fn a_clock_long_after_the_newest_boot_makes_no_boot_old() {
        let dir = temp_dir();
        files(&dir, &[9000, 8000]);
        assert_eq!(at_a_start(&dir, now()), [0, 1], "nothing else is known");
        assert_eq!(at_a_start(&dir, later(now(), DAY, DAY, 1)), [0; 0]);
    }

    #[test]
    fn shortly_after_the_machines_start_no_boot_is_old() {
        let dir = temp_dir();
        files(&dir, &[1000, 0]);
        let log: Log = Arc::new(|_| ());
        let disk = start_with(dir.path(), log.clone());
        let mut retention = Retention::new(keeping(30, None));
        let mut at = |boot: Duration| {
            retention.apply(
                &disk.store,
                &log,
                Now {
                    real: SystemTime::now() + boot,
                    boot,
                    ..now()
                },
            );
            left(&dir)
        };
        assert_eq!(at(Duration::from_secs(60)), [0, 1]);
        assert_eq!(at(AFTER_START), [1]);
        disk.close().unwrap();
    }

    #[test]
    fn nothing_else_in_the_directory_is_touched() {
        let dir = temp_dir();
        files(&dir, &[100, 0]);
        let old = SystemTime::now() - Duration::from_secs(1_000_000);
        for name in ["notes.txt", "x.ndjson", &format!("{}.console", id(1))] {
            File::create(dir.path().join(name))
                .unwrap()
                .set_modified(old)
                .unwrap();
        }
        std::os::unix::fs::symlink("notes.txt", dir.path().join(format!("{}.ndjson", id(5))))
            .unwrap();
        apply(&dir, keeping(1, None));
        assert_eq!(left(&dir), [1, 5]);
        // The other files, and the one about the clock.
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 6);
    }

    #[tokio::test]
    async fn a_connected_boot_stays_however_long_it_is_silent() {
        let dir = temp_dir();
        let log: Log = Arc::new(|_| ());
        let disk = start_with(dir.path(), log.clone());
        let header = header(&id(0));
        let attached = disk
            .store
            .attach(
                &header,
                header_line(&header).trim_end().as_bytes(),
                "cid 3",
                || true,
            )
            .await
            .unwrap();
        let path = dir.path().join(format!("{}.ndjson", id(0)));
        until(|| std::fs::metadata(&path).is_ok_and(|m| m.len() > 0)).await;
        File::options()
            .write(true)
            .open(&path)
            .unwrap()
            .set_modified(SystemTime::UNIX_EPOCH)
            .unwrap();
        let keep = keeping(1, Some(1));
        Retention::new(keep).apply(&disk.store, &log, now());
        assert_eq!(left(&dir), [0]);
        drop(attached);
        disk.close().unwrap();
        apply(&dir, keep);
        assert_eq!(left(&dir), [0; 0], "without a connection it goes");
    }

    #[test]
    fn a_boots_trace_counts_and_goes_with_it() {
        let dir = temp_dir();
        files(&dir, &[50, 20]);
        let trace = |n: usize| trace_file::beside(&dir.path().join(format!("{}.ndjson", id(n))));
        (0..2).for_each(|n| std::fs::write(trace(n), [b'x'; 500]).unwrap());
        apply(&dir, keeping(0, Some(3000)));
        assert_eq!(left(&dir), [0, 1], "3000 bytes");
        apply(&dir, keeping(0, Some(2999)));
        assert_eq!(
            (left(&dir), trace(0).exists(), trace(1).exists()),
            (vec![1], false, true)
        );
    }

    #[test]
    fn sizes_are_read_as_people_write_them() {
        for (text, want) in [
            ("0", 0),
            ("1000", 1000),
            ("64k", 65536),
            ("10G", 10 << 30),
            ("10GiB", 10 << 30),
            ("1T", 1 << 40),
            ("5MB", 5 << 20),
        ] {
            assert_eq!(parse_size(text).unwrap(), want, "{text}");
        }
        for text in ["", "G", "-1", "1.5G", "10X", "99999999999T"] {
            assert!(
                parse_size(text)
                    .unwrap_err()
                    .to_string()
                    .contains("for example 10G"),
                "{text}"
            );
        }
    }
}
