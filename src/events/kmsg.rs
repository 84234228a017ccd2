//! The kernel's log as part of the stream: PCI enumeration, BARs, module loading, the driver's own words.
//!
//! Only lines that the kernel itself wrote count (facility 0): what a process writes to /dev/kmsg can neither appear as the kernel's word nor
//! become the reason of a failed GPU. Of those, only lines that match [`WANTED`] enter the stream, so that a noisy kernel cannot push the
//! boot's own records out of the ring. Nothing here writes to the log except [`write`].
//!
//! The log's clock is not CLOCK_BOOTTIME (it started at another moment); [`write_marker`] leaves a line that carries BOOTTIME, from which
//! [`follow`] learns the difference.

use super::record::{Kind, Level, Record};
use super::ring::Ring;
use crate::clock::boottime_ns;
use crate::driver_log::{self, Signal};
use crate::pci::{PciAddress, is_gpu};
use nix::errno::Errno;
use serde_json::Value;
use std::collections::{HashMap, HashSet, VecDeque};
use std::fs::OpenOptions;
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::io::unix::AsyncFd;
use tokio::sync::{mpsc, oneshot};

const PATH: &str = "/dev/kmsg";
/// The kernel's limit for one record of the log as a reader sees it (CONSOLE_EXT_LOG_MAX).
const MAX_RECORD: usize = 8192;
/// What a line must contain to enter the stream.
const WANTED: &[&str] = &[
    "NVRM",
    "nvidia",
    "Xid",
    "10de:",
    "BAR ",
    "enabling device",
    "Linux version",
    "initramfs...",
    "Freeing initrd memory",
    "Run ",
    "as init process",
    "Freeing unused kernel",
    "vfio",
    "Kernel panic",
    "Out of memory",
    "firmware",
];
/// Prefix of the marker line; the number after it is CLOCK_BOOTTIME in ns.
const MARKER: &str = "kata-gpu-init: boottime_ns=";
/// The driver's lines kept per GPU, to explain a failure.
const WORDS_PER_GPU: usize = 24;
/// By how much the times of a line and of a step may disagree.
const SLACK_NS: u64 = 5_000_000;
/// How long an explanation may wait for the reader to catch up with the kernel.
const CATCH_UP: Duration = Duration::from_secs(2);
/// The log's stamps are whole microseconds, cut off.
const PRINTK_RESOLUTION_NS: u64 = 1000;
/// Markers in a row. Whoever is not running between looking at the clock and the kernel's own look at it makes the difference too small: the largest counts.
const MARKERS: usize = 3;

/// Writes one line to the kernel's log. `priority` as in syslog: 3 error, 4 warning, 6 info, 7 debug.
pub fn write(priority: u8, text: &str) -> io::Result<()> {
    let line: String = text.chars().map(|c| if c.is_control() { ' ' } else { c }).take(900).collect();
    OpenOptions::new().write(true).open(PATH)?.write_all(format!("<{priority}>{line}\n").as_bytes())
}

/// Leaves the lines from which the difference between the log's clock and CLOCK_BOOTTIME is known.
pub fn write_markers() -> io::Result<()> {
    let mut log = OpenOptions::new().write(true).open(PATH)?;
    // One write is one line.
    (0..MARKERS).try_for_each(|_| log.write_all(format!("<7>{MARKER}{}\n", boottime_ns()).as_bytes()))
}

/// One record of /dev/kmsg.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KmsgLine {
    pub priority: u8,
    /// 0: written by the kernel itself.
    pub facility: u32,
    pub seq: u64,
    pub printk_us: u64,
    pub text: String,
}

/// Parses what one read of /dev/kmsg gives: `prio,seq,usec,flags[,..];text\n[ KEY=value\n..]`. None for anything else.
pub fn parse(bytes: &[u8]) -> Option<KmsgLine> {
    let text = String::from_utf8_lossy(bytes);
    let (head, body) = text.split_once(';')?;
    let mut head = head.split(',');
    let prefix: u32 = head.next()?.parse().ok()?;
    let seq = head.next()?.parse().ok()?;
    let printk_us = head.next()?.parse().ok()?;
    let text = joined(body.split('\n').next().unwrap_or(""));
    Some(KmsgLine { priority: (prefix & 7) as u8, facility: prefix >> 3, seq, printk_us, text })
}

/// Lines with their CLOCK_BOOTTIME in ns.
type Lines = VecDeque<(u64, String)>;

/// A message over several lines as one: the log shows a newline in it as `\x0a`, and the driver starts each line with its prefix.
fn joined(body: &str) -> String {
    if body.contains("\\x0a") {
        body.replace("\\x0aNVRM: ", "\\x0a").split("\\x0a").map(str::trim).collect::<Vec<_>>().join(" ")
    } else {
        body.to_string()
    }
}

/// What the driver said, by GPU, with the time of each line, most recent last. Written by [`follow`], asked when something failed.
#[derive(Clone)]
pub struct DriverWords {
    lines: Arc<Mutex<HashMap<String, Lines>>>,
    catch_up: mpsc::UnboundedSender<oneshot::Sender<()>>,
}

impl DriverWords {
    /// What was said about this GPU since `from_ns` (CLOCK_BOOTTIME); if nothing was, and `or_unnamed`, what was said without naming any GPU. Waits
    /// until the log has been read to its end.
    pub async fn since(&self, gpu: PciAddress, from_ns: u64, or_unnamed: bool) -> Vec<String> {
        let (done, caught_up) = oneshot::channel();
        if self.catch_up.send(done).is_ok() {
            // Late words are no words: the reason is then told without them.
            let _unused = tokio::time::timeout(CATCH_UP, caught_up).await;
        }
        // printk's clock is known to a microsecond, and its difference from ours to a little more.
        let from_ns = from_ns.saturating_sub(SLACK_NS);
        let lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
        let since = |key: String| -> Vec<String> {
            lines.get(&key).into_iter().flatten().filter(|(at_ns, _)| *at_ns >= from_ns).map(|(_, text)| text.clone()).collect()
        };
        let named = since(key_of(Some(gpu)));
        if named.is_empty() && or_unnamed { since(key_of(None)) } else { named }
    }

    fn add(&self, gpu: Option<PciAddress>, at_ns: u64, text: &str) {
        let mut lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
        let list = lines.entry(key_of(gpu)).or_default();
        list.push_back((at_ns, text.to_string()));
        if list.len() > WORDS_PER_GPU {
            list.pop_front();
        }
    }
}

/// Lines name a GPU with or without its function (`GPU 0000:01:00.0`, `PCI:0000:01:00`): compare without.
fn key_of(gpu: Option<PciAddress>) -> String {
    gpu.map_or(String::new(), |g| without_function(&g.to_string()))
}

fn without_function(address: &str) -> String {
    address.split('.').next().unwrap_or(address).to_string()
}

/// The difference of the clocks in a marker.
fn offset_of(line: &KmsgLine) -> Option<i64> {
    let stamp: i64 = line.text.strip_prefix(MARKER)?.parse().ok()?;
    Some(stamp - i64::try_from(line.printk_us).ok()? * 1000)
}

/// Whether a line of the log says something about the boot of a GPU guest.
pub fn is_wanted(text: &str) -> bool {
    WANTED.iter().any(|w| text.contains(w))
}

/// The GPU that a line of the PCI enumeration announces: `pci 0001:00:03.0: [10de:2330] type 00 class 0x030200`.
pub fn enumerated_gpu(text: &str) -> Option<PciAddress> {
    let vendor = u16::from_str_radix(text.split_once('[')?.1.get(..4)?, 16).ok()?;
    let class = u32::from_str_radix(text.split_once("class 0x")?.1.get(..6)?, 16).ok()?;
    if is_gpu(vendor, class) { driver_log::address(text) } else { None }
}

/// Starts to follow the log into the ring; must be called inside the runtime. The task ends with the process. Lines up to `recorded` (the kernel's
/// number) are in the stream already, from an earlier worker: they are read for their words only.
pub fn follow(ring: Arc<Ring>, recorded: Option<u64>) -> io::Result<(DriverWords, mpsc::UnboundedReceiver<Signal>)> {
    let file = OpenOptions::new().read(true).custom_flags(nix::libc::O_NONBLOCK | nix::libc::O_CLOEXEC).open(PATH)?;
    let log = crate::sys::async_fd(file.into())?;
    let (catch_up, requests) = mpsc::unbounded_channel();
    let words = DriverWords { lines: Arc::default(), catch_up };
    let (signals, received) = mpsc::unbounded_channel();
    let follower = Follower {
        ring,
        words: words.clone(),
        signals,
        recorded,
        offset_ns: None,
        marker: None,
        ceiling_ns: None,
        marked_us: None,
        early: Vec::new(),
        next_seq: None,
        gpus: HashSet::new(),
    };
    tokio::spawn(follower.run(log, requests));
    Ok((words, received))
}

/// Records that are read before others have their turn.
const AT_ONCE: usize = 256;

struct Follower {
    ring: Arc<Ring>,
    words: DriverWords,
    signals: mpsc::UnboundedSender<Signal>,
    recorded: Option<u64>,
    /// CLOCK_BOOTTIME minus the log's clock, once a marker was read.
    offset_ns: Option<i64>,
    /// The number of the last marker: only one that follows it directly is ours, too.
    marker: Option<u64>,
    /// The smallest difference that the markers rule out to be exceeded: each was written before the next one's look at the clock.
    ceiling_ns: Option<i64>,
    /// When the last marker was in the log, by the log's clock.
    marked_us: Option<u64>,
    /// Lines from before the marker.
    early: Vec<KmsgLine>,
    next_seq: Option<u64>,
    /// GPUs by the kernel's own enumeration, which comes before any other line about them.
    gpus: HashSet<PciAddress>,
}

impl Follower {
    async fn run(mut self, log: AsyncFd<OwnedFd>, mut requests: mpsc::UnboundedReceiver<oneshot::Sender<()>>) {
        loop {
            tokio::select! {
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
                    while !self.drain(log.get_ref()) {
                        tokio::task::yield_now().await;
                    }
                    // The asker may have given up.
                    let _unused = done.send(());
                }
            }
        }
    }

    /// Reads what there is, but not so much that a kernel that never stops talking keeps this thread; true when the log is at its end.
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
                // The record under the reader was overwritten; the gap in seq tells how many.
                Err(Errno::EPIPE | Errno::EINTR) => {}
                Err(_) => {
                    // End of the log. No marker by now means that it could not be written: the clocks are then taken as equal.
                    self.tell_difference();
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
            tracing::warn!(name: super::names::STREAM_LOST, lost = line.seq - expected, at = "kmsg");
        }
        self.next_seq = Some(line.seq + 1);
        if let Some(offset) = offset_of(&line).filter(|_| self.marker.is_none_or(|marker| line.seq == marker + 1)) {
            self.marker = Some(line.seq);
            self.offset_ns = self.offset_ns.max(Some(offset));
            self.bound(offset, line.printk_us);
        } else if self.marker.is_none() {
            self.early.push(line);
        } else {
            // The markers are over: what came before them has its time now.
            self.tell_difference();
            self.synchronise(0);
            self.record(&line);
        }
    }

    /// What this marker says about the one before it: that line was in the log when the clock was looked at for this one.
    fn bound(&mut self, offset: i64, printk_us: u64) {
        if let Some(before_us) = self.marked_us {
            let passed = i64::try_from(printk_us.saturating_sub(before_us)).unwrap_or(i64::MAX).saturating_mul(1000);
            let ceiling = offset.saturating_add(passed);
            self.ceiling_ns = Some(self.ceiling_ns.map_or(ceiling, |c| c.min(ceiling)));
        }
        self.marked_us = Some(printk_us);
    }

    /// Puts the difference into the stream, once; an earlier worker has told its own.
    fn tell_difference(&mut self) {
        let (Some(offset_ns), Some(printk_us)) = (self.offset_ns, self.marked_us.take()) else { return };
        if self.recorded.is_some() {
            return;
        }
        let at_ns = u64::try_from(offset_ns.saturating_add_unsigned(printk_us.saturating_mul(1000))).unwrap_or(0);
        match self.ceiling_ns {
            // The log's clock is cut to microseconds: the true difference may be smaller by one.
            Some(ceiling) => {
                let error_ns = ceiling.saturating_sub(offset_ns).max(0).unsigned_abs() + PRINTK_RESOLUTION_NS;
                tracing::info!(name: super::names::CLOCK_PRINTK, at_ns, offset_ns, error_ns);
            }
            None => tracing::info!(name: super::names::CLOCK_PRINTK, at_ns, offset_ns),
        }
    }

    /// The difference is as good as it gets, or this one.
    fn synchronise(&mut self, otherwise: i64) {
        self.marker.get_or_insert(0);
        self.offset_ns.get_or_insert(otherwise);
        for line in std::mem::take(&mut self.early) {
            self.record(&line);
        }
    }

    fn record(&mut self, line: &KmsgLine) {
        if line.facility != 0 || !is_wanted(&line.text) {
            return;
        }
        if let Some(gpu) = enumerated_gpu(&line.text) {
            self.gpus.insert(gpu);
        }
        let gpu = driver_log::address(&line.text).filter(|address| self.gpus.contains(address));
        let printk_ns = i64::try_from(line.printk_us).unwrap_or(0).saturating_mul(1000);
        let boottime_ns = u64::try_from(printk_ns.saturating_add(self.offset_ns.unwrap_or(0))).unwrap_or(0);
        if driver_log::explains(&line.text) {
            self.words.add(gpu, boottime_ns, &line.text);
        }
        if self.recorded.is_some_and(|last| line.seq <= last) {
            return;
        }
        if let Some(signal) = driver_log::signal(&line.text) {
            // Nobody listens only when the bring-up has ended, with the runtime.
            let _unused = self.signals.send(signal);
        }
        let fields = [("text", Value::from(line.text.as_str())), ("kmsg_seq", line.seq.into()), ("printk_us", line.printk_us.into())];
        self.ring.push(Record {
            boottime_ns,
            level: match line.priority {
                0..=3 => Level::Error,
                4 => Level::Warn,
                5 | 6 => Level::Info,
                _ => Level::Debug,
            },
            gpu,
            fields: fields.map(|(key, value)| (key.to_string(), value)).into_iter().collect(),
            ..Record::new(Kind::Kmsg, "kmsg")
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_of_the_kernel_is_read_with_its_clock() {
        let line = parse(b"4,1034,5023417,-;nvidia 0001:00:03.0: probe with driver nvidia failed with error -1\n SUBSYSTEM=pci\n").unwrap();
        assert_eq!((line.priority, line.facility, line.seq, line.printk_us), (4, 0, 1034, 5_023_417));
        assert_eq!(line.text, "nvidia 0001:00:03.0: probe with driver nvidia failed with error -1");
    }

    #[test]
    fn a_message_over_several_lines_is_read_as_one() {
        // As NVIDIA's 550.163.01 says it.
        let text = parse(b"3,1,2,-;NVRM: The NVIDIA GPU 0001:00:01.0\\x0aNVRM: (PCI ID: 10de:2330) installed in this system has\\x0aNVRM: fallen off the bus\n").unwrap().text;
        assert_eq!(text, "NVRM: The NVIDIA GPU 0001:00:01.0 (PCI ID: 10de:2330) installed in this system has fallen off the bus");
        assert!(driver_log::address(&text).is_some());
    }

    #[test]
    fn what_is_not_a_record_of_the_log_is_nothing() {
        for bytes in [&b""[..], b";", b"4,1", b"x,1,2,-;text", b"4,1,2,-", b"\xff\xff,1,2;x", b"-4,1,2,-;x"] {
            assert_eq!(parse(bytes), None, "{bytes:?}");
        }
    }

    #[test]
    fn the_enumeration_tells_which_functions_are_gpus() {
        let gpu = |text| enumerated_gpu(text).map(|a| a.to_string());
        assert_eq!(gpu("pci 0001:00:03.0: [10de:2330] type 00 class 0x030200"), Some("0001:00:03.0".into()));
        assert_eq!(gpu("pci 0001:00:03.0: [10de:2330] type 00 class 0x030200 PCIe Endpoint"), Some("0001:00:03.0".into()));
        assert_eq!(gpu("pci 0000:00:01.0: [1af4:1053] type 00 class 0x020000"), None);
        assert_eq!(gpu("pci 0000:00:01.0: [10de:22a3] type 00 class 0x068000"), None);
        assert_eq!(gpu("pci [10d\u{e9}"), None);
    }
}
