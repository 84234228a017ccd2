//! The kernel's log as part of the stream: PCI enumeration, BARs, module loading, the driver's own words.
//!
//! Only lines that the kernel itself wrote count (facility 0): what a process writes to /dev/kmsg can neither appear as the kernel's word nor
//! become the reason of a failed GPU. Of those, only lines that match [`WANTED`] enter the stream, so that a noisy kernel cannot push the
//! boot's own records out of the ring. Nothing here writes to the log except [`write`].
//!
//! The log's clock is not CLOCK_BOOTTIME (it started at another moment); [`write_marker`] leaves a line that carries BOOTTIME, from which
//! [`follow`] learns the difference.

use super::record::{Kind, Level, Record, SCHEMA};
use super::ring::Ring;
use crate::clock::boottime_ns;
use crate::pci::PciAddress;
use nix::errno::Errno;
use serde_json::{Map, Value};
use std::collections::{HashMap, VecDeque};
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
const WORDS_PER_GPU: usize = 8;
/// How long an explanation may wait for the reader to catch up with the kernel.
const CATCH_UP: Duration = Duration::from_millis(500);

/// Writes one line to the kernel's log. `priority` as in syslog: 3 error, 4 warning, 6 info, 7 debug.
pub fn write(priority: u8, text: &str) -> io::Result<()> {
    let line: String = text.chars().map(|c| if c.is_control() { ' ' } else { c }).take(900).collect();
    OpenOptions::new().write(true).open(PATH)?.write_all(format!("<{priority}>{line}\n").as_bytes())
}

/// Leaves the line from which the difference between the log's clock and CLOCK_BOOTTIME is known.
pub fn write_marker() -> io::Result<()> {
    write(7, &format!("{MARKER}{}", boottime_ns()))
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
    let body = body.split('\n').next().unwrap_or("");
    Some(KmsgLine { priority: (prefix & 7) as u8, facility: prefix >> 3, seq, printk_us, text: body.to_string() })
}

/// What the driver said about each GPU, most recent last. Written by [`follow`], asked when something failed.
#[derive(Clone)]
pub struct DriverWords {
    lines: Arc<Mutex<HashMap<String, VecDeque<String>>>>,
    catch_up: mpsc::UnboundedSender<oneshot::Sender<()>>,
}

impl DriverWords {
    /// The driver's last line about this GPU, or the last one about any module load when `gpu` is None. Waits until the log has been read to its end.
    pub async fn last(&self, gpu: Option<PciAddress>) -> Option<String> {
        let (done, caught_up) = oneshot::channel();
        if self.catch_up.send(done).is_ok() {
            // Late words are no words: the reason is then told without them.
            let _unused = tokio::time::timeout(CATCH_UP, caught_up).await;
        }
        let lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
        lines.get(&key_of(gpu)).and_then(|l| l.back()).cloned()
    }

    /// Appends a line without an address to the last one of a GPU, of which it is the continuation.
    fn go_on(&self, gpu: PciAddress, text: &str) {
        let mut lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(last) = lines.get_mut(&key_of(Some(gpu))).and_then(VecDeque::back_mut)
            && last.len() < MAX_RECORD
        {
            last.push(' ');
            last.push_str(text.trim_start_matches("NVRM: "));
        }
    }

    fn add(&self, gpu: Option<PciAddress>, text: &str) {
        let mut lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
        let list = lines.entry(key_of(gpu)).or_default();
        list.push_back(text.to_string());
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

/// The first PCI address in a line of the log, with function 0 where the line has none. Only an address says which GPU a line is about: the
/// driver's own "GPU0" counts in order of initialisation.
pub fn address_in(text: &str) -> Option<PciAddress> {
    text.split(|c: char| c.is_whitespace() || matches!(c, '(' | ')' | ',' | '[' | ']'))
        .map(|word| word.strip_prefix("PCI:").unwrap_or(word).trim_end_matches([':', '.']))
        .find_map(|word| word.parse().or_else(|_| format!("{word}.0").parse()).ok())
}

/// Whether a line explains a failure. The FBHUB line marks the start of an initialisation and "was not called" is what driver_override looks like.
fn explains(text: &str) -> bool {
    let harmless = [
        "FBHUB",
        "probe routine was not called",
        "enabling device",
        "loading NVIDIA",
        "loading out-of-tree",
        "taints kernel",
        "failed with error -1",
    ];
    (text.contains("NVRM") || text.contains("nvidia")) && !harmless.iter().any(|h| text.contains(h))
}

/// Starts to follow the log into the ring; must be called inside the runtime. The task ends with the process.
pub fn follow(ring: Arc<Ring>) -> io::Result<DriverWords> {
    let file = OpenOptions::new().read(true).custom_flags(nix::libc::O_NONBLOCK | nix::libc::O_CLOEXEC).open(PATH)?;
    let log = crate::sys::async_fd(file.into())?;
    let (catch_up, requests) = mpsc::unbounded_channel();
    let words = DriverWords { lines: Arc::default(), catch_up };
    let follower = Follower { ring, words: words.clone(), offset_ns: None, early: Vec::new(), next_seq: None, last_named: None };
    tokio::spawn(follower.run(log, requests));
    Ok(words)
}

struct Follower {
    ring: Arc<Ring>,
    words: DriverWords,
    /// CLOCK_BOOTTIME minus the log's clock, once the marker was read.
    offset_ns: Option<i64>,
    /// Lines from before the marker.
    early: Vec<KmsgLine>,
    next_seq: Option<u64>,
    /// The last line that named a GPU: the driver breaks sentences over lines, and only the first part has the address.
    last_named: Option<(u64, PciAddress)>,
}

impl Follower {
    async fn run(mut self, log: AsyncFd<OwnedFd>, mut requests: mpsc::UnboundedReceiver<oneshot::Sender<()>>) {
        loop {
            tokio::select! {
                ready = log.readable() => {
                    let Ok(mut guard) = ready else { return };
                    if self.drain(log.get_ref()) {
                        guard.clear_ready();
                    }
                }
                request = requests.recv() => {
                    let Some(done) = request else { return };
                    self.drain(log.get_ref());
                    // The asker may have given up.
                    let _unused = done.send(());
                }
            }
        }
    }

    /// Reads all there is; true when the log is at its end.
    fn drain(&mut self, log: &OwnedFd) -> bool {
        let mut buffer = [0_u8; MAX_RECORD];
        loop {
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
                    if self.offset_ns.is_none() {
                        self.synchronise(0);
                    }
                    return true;
                }
            }
        }
    }

    fn take(&mut self, line: KmsgLine) {
        if let Some(expected) = self.next_seq
            && line.seq > expected
        {
            tracing::warn!(name: super::names::STREAM_LOST, lost = line.seq - expected, at = "kmsg");
        }
        self.next_seq = Some(line.seq + 1);
        if self.offset_ns.is_none() {
            if let Some(stamp) = line.text.strip_prefix(MARKER).and_then(|n| n.parse::<i64>().ok()) {
                self.synchronise(stamp - i64::try_from(line.printk_us).unwrap_or(0) * 1000);
            } else {
                self.early.push(line);
            }
            return;
        }
        self.record(&line);
    }

    fn synchronise(&mut self, offset_ns: i64) {
        self.offset_ns = Some(offset_ns);
        for line in std::mem::take(&mut self.early) {
            self.record(&line);
        }
    }

    fn record(&mut self, line: &KmsgLine) {
        if line.facility != 0 || !WANTED.iter().any(|w| line.text.contains(w)) {
            return;
        }
        let gpu = address_in(&line.text);
        match (gpu, self.last_named) {
            (None, Some((seq, named))) if line.seq == seq + 1 && line.text.starts_with("NVRM: ") => {
                self.words.go_on(named, &line.text);
                self.last_named = Some((line.seq, named));
            }
            _ => {
                if explains(&line.text) {
                    self.words.add(gpu, &line.text);
                }
                self.last_named = gpu.filter(|_| line.text.starts_with("NVRM: ")).map(|g| (line.seq, g));
            }
        }
        let printk_ns = i64::try_from(line.printk_us).unwrap_or(0).saturating_mul(1000);
        let boottime_ns = printk_ns.saturating_add(self.offset_ns.unwrap_or(0));
        self.ring.push(Record {
            schema: SCHEMA,
            seq: 0,
            boottime_ns: u64::try_from(boottime_ns).unwrap_or(0),
            kind: Kind::Kmsg,
            name: "kmsg".to_string(),
            level: match line.priority {
                0..=3 => Level::Error,
                4 => Level::Warn,
                5 | 6 => Level::Info,
                _ => Level::Debug,
            },
            gpu,
            span: None,
            parent: None,
            after: vec![],
            error: None,
            fields: Map::from_iter([
                ("text".to_string(), Value::from(line.text.as_str())),
                ("kmsg_seq".to_string(), Value::from(line.seq)),
                ("printk_us".to_string(), Value::from(line.printk_us)),
            ]),
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
    fn what_is_not_a_record_of_the_log_is_nothing() {
        for bytes in [&b""[..], b";", b"4,1", b"x,1,2,-;text", b"4,1,2,-", b"\xff\xff,1,2;x", b"-4,1,2,-;x"] {
            assert_eq!(parse(bytes), None, "{bytes:?}");
        }
    }

    #[test]
    fn a_line_names_its_gpu_only_by_address() {
        let address = |text| address_in(text).map(|a| a.to_string());
        assert_eq!(address("NVRM: GPU 0001:00:03.0: RmInitAdapter failed! (0x62:0x65:1860)"), Some("0001:00:03.0".into()));
        assert_eq!(address("NVRM: Xid (PCI:0001:00:03): 79, GPU has fallen off the bus."), Some("0001:00:03.0".into()));
        assert_eq!(address("nvidia 0001:00:03.0: enabling device (0000 -> 0002)"), Some("0001:00:03.0".into()));
        assert_eq!(address("NVRM: GPU1 gpuPowerManagementEnter: failed"), None);
    }

    #[test]
    fn harmless_lines_explain_nothing() {
        assert!(!explains("NVRM: GPU 0000:01:00.0: FBHUB Interrupt detected"));
        assert!(!explains("NVRM: The NVIDIA probe routine was not called for 7 device(s)."));
        assert!(explains("NVRM: GPU 0000:01:00.0: RmInitAdapter failed! (0x62:0x65:1860)"));
    }
}
