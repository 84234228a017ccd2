//! The kernel's log as part of the stream: PCI enumeration, BARs, module loading, the driver's own
//! messages.
//!
//! Only lines written by the kernel itself count (facility 0), by their grammar: a process that
//! writes to /dev/kmsg, or that makes the kernel log a name of its choice, can neither imitate a
//! kernel message nor supply the reason of a failed GPU. Only those of the
//! kernel's lines that concern a boot ([`driver_log::is_wanted`]) enter the stream, so that a noisy
//! kernel cannot push the boot's own records out of the ring.
//!
//! The log's clock is not CLOCK_BOOTTIME (it started at another moment). [`write_markers`] logs
//! lines with BOOTTIME, from which [`follow`] computes the difference.

use super::driver_lines::{DriverLines, Unnamed, Words, boottime_of};
use super::ring::Ring;
use crate::machine::clock::boottime_ns;
use crate::machine::kernel_log::{KmsgLine, PATH, parse};
use crate::machine::threads;
use kata_gpu_wire::driver_log;
use kata_gpu_wire::driver_log::Signal;
use kata_gpu_wire::failure::Facts;
use kata_gpu_wire::names;
use kata_gpu_wire::pci_address::PciAddress;
use kata_gpu_wire::record::{Kind, Level, Record};
use nix::errno::Errno;
use serde_json::Value;
use std::collections::HashSet;
use std::fs::OpenOptions;
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;
use tokio::io::unix::AsyncFd;
use tokio::sync::{mpsc, oneshot};

/// The kernel's limit for one record of the log as a reader sees it (CONSOLE_EXT_LOG_MAX).
const MAX_RECORD: usize = 8192;
/// Prefix of the marker line; the number after it is CLOCK_BOOTTIME in ns.
const MARKER: &str = "kata-gpu-init: boottime_ns=";
/// Time limit for the reader to catch up with the kernel before an explanation is given.
const CATCH_UP: Duration = Duration::from_secs(2);
/// The log's stamps are whole microseconds, cut off.
const PRINTK_RESOLUTION_NS: u64 = 1000;
/// Interval of measurements of the clocks' difference: they drift apart by a third of a
/// microsecond a second (measured), which is a quarter of the slack in this time.
const MEASURE_EVERY: Duration = Duration::from_secs(3600);
/// Age of a difference after which it is measured again before lines are looked up: the guest may
/// have been suspended.
const FRESH_NS: u64 = 60_000_000_000;
/// Markers in a row. Preemption between reading the clock and the kernel's own timestamp makes the
/// difference too small: the largest counts.
const MARKERS: usize = 3;

/// Logs the markers, which give the difference between the log's clock and CLOCK_BOOTTIME; returns
/// their stamps.
pub fn write_markers() -> io::Result<Vec<u64>> {
    let mut log = OpenOptions::new().write(true).open(PATH)?;
    let mut marker = |_| {
        let stamp = boottime_ns();
        // The kernel takes each write as one line.
        log.write_all(format!("<7>{MARKER}{stamp}\n").as_bytes())
            .map(|()| stamp)
    };
    (0..MARKERS).map(&mut marker).collect()
}

/// Lines logged by the driver, by GPU, most recent last. Written by [`follow`], read after a
/// failure.
#[derive(Clone)]
pub struct DriverLog {
    lines: Arc<Mutex<DriverLines>>,
    catch_up: mpsc::UnboundedSender<oneshot::Sender<()>>,
}

impl DriverLog {
    /// Lines that explain the failure of this GPU in a step from `from_ns` (CLOCK_BOOTTIME) on.
    /// Waits until the log has been read to its end.
    pub async fn words(&self, gpu: PciAddress, from_ns: u64, unnamed: Unnamed) -> Words {
        let (done, caught_up) = oneshot::channel();
        if self.catch_up.send(done).is_ok() {
            // After a timeout the reason is reported without late lines.
            let _unused = tokio::time::timeout(CATCH_UP, caught_up).await;
        }
        self.lock().words(gpu, from_ns, unnamed)
    }

    /// Facts that the log states of the driver and its fabric.
    pub fn facts(&self) -> Facts {
        self.lock().facts.clone()
    }

    fn lock(&self) -> MutexGuard<'_, DriverLines> {
        threads::lock(&self.lines)
    }
}

/// Stamp of a marker, and the difference of the clocks computed from it.
fn offset_of(line: &KmsgLine) -> Option<(u64, i64)> {
    let stamp: u64 = line.text.strip_prefix(MARKER)?.parse().ok()?;
    Some((
        stamp,
        i64::try_from(stamp)
            .ok()?
            .checked_sub(i64::try_from(line.printk_us).ok()?.checked_mul(1000)?)?,
    ))
}

/// The driver's messages, with the time of their lines in ns (CLOCK_BOOTTIME).
pub type Signals = mpsc::UnboundedReceiver<(u64, Signal)>;

/// Follows the log into the ring; must be called inside the runtime. The task ends with the
/// process. An earlier worker has put lines up to `recorded` (the kernel's number) into the stream:
/// they are read only for the driver's messages.
pub fn follow(ring: Arc<Ring>, recorded: Option<u64>) -> io::Result<(DriverLog, Signals)> {
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(nix::libc::O_NONBLOCK | nix::libc::O_CLOEXEC)
        .open(PATH)?;
    let log = crate::machine::sys::async_fd(file.into())?;
    let (catch_up, requests) = mpsc::unbounded_channel();
    let driver_log = DriverLog {
        lines: Arc::default(),
        catch_up,
    };
    let (signals, received) = mpsc::unbounded_channel();
    let follower = Follower::new(ring, driver_log.clone(), signals, recorded);
    tokio::spawn(follower.run(log, requests));
    Ok((driver_log, received))
}

/// Limit of records read before other tasks run.
const AT_ONCE: usize = 256;

struct Follower {
    ring: Arc<Ring>,
    driver_log: DriverLog,
    signals: mpsc::UnboundedSender<(u64, Signal)>,
    recorded: Option<u64>,
    /// Whether the difference is in the stream.
    is_reported: bool,
    /// CLOCK_BOOTTIME minus the log's clock, once a marker was read.
    offset_ns: Option<i64>,
    /// Number of the last of the boot's markers: only a marker that follows it directly is one of
    /// them, too.
    marker: Option<u64>,
    /// Stamps of the markers that this process has written, and their time: forged markers change
    /// nothing.
    stamps: Vec<u64>,
    measured_ns: u64,
    /// Upper bound of the difference by the markers: each was logged before the clock was read for
    /// the next one.
    ceiling_ns: Option<i64>,
    /// Log time of the last marker.
    marked_us: Option<u64>,
    /// Lines from before the marker.
    early: Vec<KmsgLine>,
    next_seq: Option<u64>,
    /// GPUs by the kernel's own enumeration, which comes before any other line about them.
    gpus: HashSet<PciAddress>,
}

impl Follower {
    fn new(
        ring: Arc<Ring>,
        driver_log: DriverLog,
        signals: mpsc::UnboundedSender<(u64, Signal)>,
        recorded: Option<u64>,
    ) -> Self {
        Self {
            ring,
            driver_log,
            signals,
            recorded,
            is_reported: recorded.is_some(),
            offset_ns: None,
            marker: None,
            stamps: Vec::new(),
            measured_ns: 0,
            ceiling_ns: None,
            marked_us: None,
            early: Vec::new(),
            next_seq: None,
            gpus: HashSet::new(),
        }
    }

    /// Measures the difference of the clocks again, from new markers in the log.
    fn measure(&mut self) {
        // If the write fails, the difference stays.
        if let Ok(stamps) = write_markers() {
            self.stamps = stamps;
            self.measured_ns = boottime_ns();
        }
    }

    async fn run(
        mut self,
        log: AsyncFd<OwnedFd>,
        mut requests: mpsc::UnboundedReceiver<oneshot::Sender<()>>,
    ) {
        // The markers of a guest whose worker has died may be old.
        let first = if self.recorded.is_some() {
            Duration::ZERO
        } else {
            MEASURE_EVERY
        };
        let mut hourly =
            tokio::time::interval_at(tokio::time::Instant::now() + first, MEASURE_EVERY);
        loop {
            tokio::select! {
                _ = hourly.tick(), if self.marker.is_some() => self.measure(),
                ready = log.readable() => {
                    let Ok(mut guard) = ready else { return };
                    if self.drain(log.get_ref()) {
                        guard.clear_ready();
                    } else {
                        drop(guard);
                        tokio::task::yield_now().await;
                    }
                }
                request = requests.recv() => {
                    let Some(done) = request else { return };
                    if boottime_ns().saturating_sub(self.measured_ns) > FRESH_NS {
                        self.measure();
                    }
                    while !self.drain(log.get_ref()) {
                        tokio::task::yield_now().await;
                    }
                    // The receiver may have given up.
                    let _unused = done.send(());
                }
            }
        }
    }

    /// Reads available records, with a limit, so that a busy kernel cannot keep this thread; true
    /// at the end of the log.
    fn drain(&mut self, log: &OwnedFd) -> bool {
        let mut buffer = [0_u8; MAX_RECORD];
        for _ in 0..AT_ONCE {
            match nix::unistd::read(log, &mut buffer) {
                Ok(0) => return true,
                Ok(n) => {
                    if let Some(line) = parse(buffer.get(..n).unwrap_or_default()) {
                        self.take(line);
                    }
                }
                // The next record was overwritten; the gap in seq gives the number.
                Err(Errno::EPIPE | Errno::EINTR) => {}
                Err(_) => {
                    // End of the log. A missing marker means that it could not be written: the
                    // clocks are then taken as equal.
                    self.report_difference();
                    self.synchronise(0);
                    return true;
                }
            }
        }
        false
    }

    fn take(&mut self, line: KmsgLine) {
        if let Some(expected) = self.next_seq
            && line.seq > expected
        {
            tracing::warn!(name: names::STREAM_LOST, lost = line.seq - expected, at = "kmsg");
        }
        self.next_seq = Some(line.seq + 1);
        let is_boots = self.marker.is_none_or(|marker| line.seq == marker + 1);
        if let Some((stamp, offset)) =
            offset_of(&line).filter(|(stamp, _)| is_boots || self.stamps.contains(stamp))
        {
            if self.stamps.first() == Some(&stamp) {
                // New markers: discard the earlier measurement.
                (self.offset_ns, self.ceiling_ns, self.marked_us) = (None, None, None);
            }
            if is_boots {
                self.marker = Some(line.seq);
            }
            self.offset_ns = self.offset_ns.max(Some(offset));
            self.driver_log.lock().offset_ns = self.offset_ns.unwrap_or(offset);
            self.bound(offset, line.printk_us);
        } else if self.marker.is_none() {
            self.early.push(line);
        } else {
            // The markers are over: earlier lines can be dated now.
            self.report_difference();
            self.synchronise(0);
            self.record(&line);
        }
    }

    /// Upper bound for the previous marker: its line was in the log when the clock was read for
    /// this one.
    fn bound(&mut self, offset: i64, printk_us: u64) {
        if let Some(before_us) = self.marked_us {
            let passed = i64::try_from(printk_us.saturating_sub(before_us))
                .unwrap_or(i64::MAX)
                .saturating_mul(1000);
            let ceiling = offset.saturating_add(passed);
            self.ceiling_ns = Some(self.ceiling_ns.map_or(ceiling, |c| c.min(ceiling)));
        }
        self.marked_us = Some(printk_us);
    }

    /// Puts the difference into the stream, once; an earlier worker has recorded its own.
    fn report_difference(&mut self) {
        let (Some(offset_ns), Some(printk_us)) = (self.offset_ns, self.marked_us.take()) else {
            return;
        };
        if std::mem::replace(&mut self.is_reported, true) {
            return;
        }
        let at_ns =
            u64::try_from(offset_ns.saturating_add_unsigned(printk_us.saturating_mul(1000)))
                .unwrap_or(0);
        match self.ceiling_ns {
            // The log's clock is in whole microseconds: the true difference may be smaller by one.
            Some(ceiling) => {
                let error_ns =
                    ceiling.saturating_sub(offset_ns).max(0).unsigned_abs() + PRINTK_RESOLUTION_NS;
                tracing::info!(name: names::CLOCK_PRINTK, at_ns, offset_ns, error_ns);
            }
            None => tracing::info!(name: names::CLOCK_PRINTK, at_ns, offset_ns),
        }
    }

    /// Takes the measured difference as final, or else `otherwise`.
    fn synchronise(&mut self, otherwise: i64) {
        self.marker.get_or_insert(0);
        self.offset_ns.get_or_insert(otherwise);
        for line in std::mem::take(&mut self.early) {
            self.record(&line);
        }
    }

    fn record(&mut self, line: &KmsgLine) {
        if line.facility != 0 || !driver_log::is_wanted(&line.text) {
            return;
        }
        if let Some(gpu) = driver_log::enumerated_gpu(&line.text) {
            self.gpus.insert(gpu);
        }
        let gpu = driver_log::address(&line.text).filter(|address| self.gpus.contains(address));
        let boottime_ns = boottime_of(line.printk_us, self.offset_ns.unwrap_or(0));
        self.driver_log
            .lock()
            .add(gpu, line.seq, line.printk_us, &line.text);
        if self.recorded.is_some_and(|last| line.seq <= last) {
            return;
        }
        if let Some(signal) = driver_log::signal(&line.text) {
            // The receiver is gone only when the bring-up and the runtime have ended.
            let _unused = self.signals.send((boottime_ns, signal));
        }
        let fields = [
            ("text", Value::from(line.text.as_str())),
            ("kmsg_seq", line.seq.into()),
            ("printk_us", line.printk_us.into()),
        ];
        self.ring.push(Record {
            boottime_ns,
            level: match line.priority {
                0..=3 => Level::Error,
                4 => Level::Warn,
                5 | 6 => Level::Info,
                _ => Level::Debug,
            },
            gpu,
            fields: fields
                .map(|(key, value)| (key.to_string(), value))
                .into_iter()
                .collect(),
            ..Record::new(Kind::Kmsg, "kmsg")
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A guest whose log clock runs slow against CLOCK_BOOTTIME.
    struct Drifting {
        follower: Follower,
        seq: u64,
        ppm: f64,
    }

    impl Drifting {
        /// Logs these texts, a microsecond apart.
        fn log(&mut self, boottime_ns: u64, facility: u32, texts: &[String]) {
            for text in texts {
                self.seq += 1;
                let printk_us = (boottime_ns as f64 * (1.0 - self.ppm / 1e6) / 1000.0) as u64;
                self.follower.take(KmsgLine {
                    priority: 3,
                    facility,
                    seq: self.seq,
                    printk_us,
                    text: text.clone(),
                });
            }
        }

        fn markers(&mut self, at_ns: u64) -> Vec<u64> {
            let stamps = vec![at_ns; MARKERS];
            self.log(
                at_ns,
                1,
                &stamps
                    .iter()
                    .map(|stamp| format!("{MARKER}{stamp}"))
                    .collect::<Vec<_>>(),
            );
            stamps
        }
    }

    #[test]
    fn lines_are_found_by_a_clock_that_has_drifted_for_days() {
        const S: u64 = 1_000_000_000;
        let gpu: PciAddress = "0001:00:03.0".parse().unwrap();
        let line = "NVRM: GPU 0001:00:03.0: RmInitAdapter failed! (0x62:0x65:1860)".to_string();
        for ppm in [0.33, -0.33, 5.0] {
            let (catch_up, _requests) = mpsc::unbounded_channel();
            let driver_log = DriverLog {
                lines: Arc::default(),
                catch_up,
            };
            let (signals, _received) = mpsc::unbounded_channel();
            let follower =
                Follower::new(Arc::new(Ring::default()), driver_log.clone(), signals, None);
            let mut guest = Drifting {
                follower,
                seq: 0,
                ppm,
            };
            guest.markers(2 * S);
            guest.log(
                2 * S,
                0,
                &["pci 0001:00:03.0: [10de:2330] type 00 class 0x030200".into()],
            );
            // A hot-plugged GPU fails after three days; its step began a moment before. Lines from
            // hours ago are unrelated.
            let failed = 72 * 3600 * S;
            guest.log(failed - 3600 * S, 0, std::slice::from_ref(&line));
            guest.log(failed, 0, std::slice::from_ref(&line));
            let found = |driver_log: &DriverLog| {
                let lines = driver_log.lock();
                lines
                    .words(gpu, failed - S / 1000, Unnamed::Never)
                    .named
                    .len()
            };
            assert_eq!(
                found(&driver_log),
                if ppm > 0.0 { 0 } else { 1 },
                "{ppm}: negative control: by the boot's measurement"
            );
            // Forged markers change nothing.
            guest.markers(failed + 3600 * S);
            let before = driver_log.lock().offset_ns;
            assert!(before.unsigned_abs() < S / 10_000, "{before}");
            // Genuine markers do, before the lines are looked up.
            guest.follower.stamps = vec![failed + S; MARKERS];
            guest.markers(failed + S);
            assert_eq!(found(&driver_log), 1, "{ppm}");
            let drift = (failed as f64 * ppm / 1e6) as i64;
            assert!(
                (driver_log.lock().offset_ns - drift).unsigned_abs() < 50_000,
                "{ppm}: {} for {drift}",
                driver_log.lock().offset_ns
            );
        }
    }
}
