//! Interrupts of one CPU, moved to the other CPUs for a time, with the former masks restored after.
//!
//! While the host maps a GPU's BARs, the enabling vCPU takes no interrupt for seconds. An interrupt
//! that is routed there waits as long, and so does its device. Without this module, virtio-vsock's
//! interrupts wait, and the agent answers the host 3.3 s late.
//!
//! Invariants:
//! - No failure is fatal. An interrupt that cannot be moved (managed by its driver, or per CPU:
//!   EIO) stays, and the report names it.
//! - An interrupt keeps at least one online CPU: a mask without another online CPU is not changed.
//! - The mask of an interrupt without a handler is not changed: the interrupt follows
//!   `default_smp_affinity`, which is changed for the time.
//! - A mask is restored only if it is still the one written here: a change by another process wins.
//!
//! A written mask is not a moved interrupt. On x86 without interrupt remapping (no vIOMMU, Kata's
//! default) the kernel only notes the new CPU of an MSI or IO-APIC interrupt, and moves the
//! interrupt at its next arrival on the old CPU (`irq_set_affinity_locked` in kernel/irq/manage.c:
//! IRQCHIP_MOVE_DEFERRED, in older kernels the absence of IRQD_MOVE_PCNTXT). `smp_affinity` shows
//! the new mask at once, `effective_affinity` the current CPU. So [`MovedInterrupts::waiting`]
//! names the interrupts that are not moved yet; each needs one more arrival before the CPU is gone.
//!
//! Measured with kernel 6.1, vsock's interrupt on the CPU that is gone for 2 s: a ping to the host
//! that is sent 0.3 s later takes 1.70 s with nothing moved, 1.70 s with the mask written, 5 ms
//! with the mask written and one arrival in between. One connection attempt to the host is such an
//! arrival ([`stir_vsock`]), and so is any data that a stream to the host sends or gets. Interrupts
//! of other devices move with their own next arrival.
//!
//! Work of virtio-vsock follows its interrupts and its senders, not a mask. Its workqueue is per
//! CPU (`alloc_workqueue("virtio_vsock", 0, 0)`, now WQ_PERCPU; net/vmw_vsock/virtio_transport.c),
//! and `queue_work` on such a queue takes the CPU of its caller. Callers are the interrupt handlers
//! (rx_work, tx_work, event_work) and senders (send_pkt_work). With the interrupts elsewhere, no
//! received packet is queued on the lane's CPU. A packet that a process sends from the lane's CPU
//! is queued there, and stays there if the enabling begins before the queue's worker has run. In
//! newer kernels most packets bypass the queue (`virtio_transport_send_skb_fast_path`).
//!
//! This module does not write `/sys/devices/virtual/workqueue/cpumask`: that mask covers only
//! unbound workqueues, which virtio-vsock does not use, and a write rebuilds every unbound queue of
//! the kernel. Workers of unbound queues are ordinary tasks, and idle CPUs pull waiting tasks off
//! the queue of a CPU that is gone.
//!
//! A process that dies in between leaves the masks as they are: the guest goes on with one CPU that
//! serves fewer interrupts.

use crate::machine::files::{entries, errno};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{AddressFamily, SockFlag, SockType, VsockAddr, connect, socket};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::fs::OpenOptions;
use std::io::Write;
use std::os::fd::{AsFd, AsRawFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Most interrupts that are examined. 16 GPUs with 9 vectors each and 64 CPUs' virtio queues are
/// some 400.
const MAX_INTERRUPTS: usize = 4096;
/// Longest mask file: 8192 CPUs (the kernel's limit) in groups of 32.
const MAX_MASK_BYTES: usize = 4096;
/// The host's vsock address.
const HOST_CID: u32 = 2;
/// Vsock port without a listener: the number of the discard service elsewhere.
const DISCARD_PORT: u32 = 9;
/// Driver of virtio-vsock devices, below sysfs.
const VSOCK_DRIVER: &str = "bus/virtio/drivers/vmw_vsock_virtio_transport";

/// A set of CPUs, in the format of /proc/irq: hexadecimal words of 32 bits, highest first, with
/// commas between them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CpuMask {
    /// Lowest first; the last one is not 0.
    words: Vec<u32>,
}

impl CpuMask {
    /// Parses a mask; None for any other text.
    pub fn parse(text: &str) -> Option<Self> {
        let text = text.trim();
        if text.len() > MAX_MASK_BYTES {
            return None;
        }
        let word = |word: &str| {
            (1..=8)
                .contains(&word.len())
                .then(|| u32::from_str_radix(word, 16).ok())
                .flatten()
        };
        // from_str_radix accepts a sign.
        let words = text
            .rsplit(',')
            .map(|w| word(w).filter(|_| w.bytes().all(|b| b.is_ascii_hexdigit())));
        Some(
            Self {
                words: words.collect::<Option<Vec<u32>>>()?,
            }
            .trimmed(),
        )
    }

    pub fn of(cpus: &[usize]) -> Self {
        let mut mask = Self::default();
        for cpu in cpus {
            if mask.words.len() <= cpu / 32 {
                mask.words.resize(cpu / 32 + 1, 0);
            }
            if let Some(word) = mask.words.get_mut(cpu / 32) {
                *word |= 1 << (cpu % 32);
            }
        }
        mask
    }

    pub fn has(&self, cpu: usize) -> bool {
        self.words
            .get(cpu / 32)
            .is_some_and(|word| word >> (cpu % 32) & 1 == 1)
    }

    /// Returns the mask without one CPU.
    fn without(&self, cpu: usize) -> Self {
        let mut mask = self.clone();
        if let Some(word) = mask.words.get_mut(cpu / 32) {
            *word &= !(1 << (cpu % 32));
        }
        mask.trimmed()
    }

    fn meets(&self, other: &Self) -> bool {
        self.words.iter().zip(&other.words).any(|(a, b)| a & b != 0)
    }

    fn trimmed(mut self) -> Self {
        while self.words.last() == Some(&0) {
            self.words.pop();
        }
        self
    }
}

impl fmt::Display for CpuMask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut words = self.words.iter().rev();
        write!(f, "{:x}", words.next().unwrap_or(&0))?;
        words.try_for_each(|word| write!(f, ",{word:08x}"))
    }
}

/// An interrupt that has a handler.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Interrupt {
    /// Number in the kernel.
    pub irq: u32,
    /// Names of the handlers, joined by `+`, e.g. `virtio1-virtqueues`.
    pub name: String,
}

impl fmt::Display for Interrupt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.irq, self.name)
    }
}

/// Joins interrupts for one field of an event.
pub fn list<'a>(interrupts: impl IntoIterator<Item = &'a Interrupt>) -> String {
    interrupts
        .into_iter()
        .map(Interrupt::to_string)
        .collect::<Vec<_>>()
        .join(", ")
}

/// A mask that was changed.
struct Moved {
    interrupt: Interrupt,
    former: CpuMask,
    ours: CpuMask,
}

/// Interrupts kept off one CPU until the drop.
pub struct MovedInterrupts {
    folder: PathBuf,
    cpu: usize,
    online: CpuMask,
    moved: BTreeMap<u32, Moved>,
    stays: Vec<Interrupt>,
    /// Interrupts that were examined with a handler; later ones were requested under the changed
    /// default.
    known: BTreeSet<u32>,
    /// The default mask, former and changed.
    default: Option<(CpuMask, CpuMask)>,
}

/// Moves every interrupt off `cpu` that can be moved, and the default for new ones. `proc`: mount
/// point of procfs. `online`: all online CPUs. Takes some ten microseconds for each interrupt.
pub fn keep_off(proc: &Path, cpu: usize, online: &[usize]) -> MovedInterrupts {
    let folder = proc.join("irq");
    let default = move_mask(
        &folder.join("default_smp_affinity"),
        cpu,
        &CpuMask::of(online),
    )
    .ok()
    .flatten();
    let mut moved = MovedInterrupts {
        folder,
        cpu,
        online: CpuMask::of(online),
        moved: BTreeMap::new(),
        stays: Vec::new(),
        known: BTreeSet::new(),
        default,
    };
    moved.again();
    moved
}

impl MovedInterrupts {
    /// Interrupts with a changed mask.
    pub fn moved(&self) -> impl Iterator<Item = &Interrupt> {
        self.moved.values().map(|m| &m.interrupt)
    }

    /// Interrupts that may still arrive at the CPU.
    pub fn stays(&self) -> &[Interrupt] {
        &self.stays
    }

    /// Moves the interrupts that were requested since the last call. Interrupts that were examined
    /// before are left as they are.
    pub fn again(&mut self) {
        for interrupt in interrupts(&self.folder) {
            let irq = interrupt.irq;
            if !self.known.insert(irq) {
                continue;
            }
            match move_mask(&mask_file(&self.folder, irq), self.cpu, &self.online) {
                Ok(Some((former, ours))) => {
                    let moved = Moved {
                        interrupt,
                        former,
                        ours,
                    };
                    self.moved.insert(irq, moved);
                }
                Ok(None) => {}
                Err(_) => self.stays.push(interrupt),
            }
        }
    }

    /// Interrupts with a changed mask whose next arrival is still at the CPU; the kernel moves them
    /// then.
    pub fn waiting(&self) -> Vec<Interrupt> {
        let there = |m: &&Moved| arrives_at(&self.folder, m.interrupt.irq, self.cpu);
        self.moved
            .values()
            .filter(there)
            .map(|m| m.interrupt.clone())
            .collect()
    }

    /// Whether an interrupt of virtio-vsock is among the waiting. `sysfs`: mount point of sysfs.
    pub fn vsock_waits(&self, sysfs: &Path) -> bool {
        let entries = entries(&sysfs.join(VSOCK_DRIVER));
        // Handlers are `virtio3-virtqueues`, or one per queue. `config` interrupts do not count:
        // they report changes of the configuration.
        let devices = entries.filter_map(|e| {
            e.file_name()
                .to_str()
                .filter(|n| n.starts_with("virtio"))
                .map(|n| format!("{n}-"))
        });
        let devices: Vec<String> = devices.collect();
        let of_vsock = |name: &str| {
            devices.iter().any(|d| {
                name.strip_prefix(d.as_str())
                    .is_some_and(|queue| queue != "config")
            })
        };
        self.waiting()
            .iter()
            .any(|interrupt| interrupt.name.split('+').any(of_vsock))
    }
}

impl Drop for MovedInterrupts {
    /// Restores every mask that is still the one written here. One that cannot be restored keeps
    /// its interrupt on the other CPUs.
    fn drop(&mut self) {
        if let Some((former, ours)) = self.default.take() {
            let _unused = restore(&self.folder.join("default_smp_affinity"), &ours, &former);
            // Interrupts requested under the changed default get the former one.
            for interrupt in interrupts(&self.folder).filter(|i| !self.known.contains(&i.irq)) {
                let _unused = restore(&mask_file(&self.folder, interrupt.irq), &ours, &former);
            }
        }
        for (irq, Moved { former, ours, .. }) in &self.moved {
            let _unused = restore(&mask_file(&self.folder, *irq), ours, former);
        }
    }
}

/// Makes virtio-vsock's interrupts arrive once each, so that they move, by one connection attempt
/// to a port of the host without a listener. The request's completion and the host's refusal are
/// the arrivals. Blocks until the host has refused, or `patience` is over; returns whether the host
/// has refused. A vhost-user device may not refuse, but its completion arrives all the same.
pub fn stir_vsock(patience: Duration) -> nix::Result<bool> {
    let attempt = socket(
        AddressFamily::Vsock,
        SockType::Stream,
        SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK,
        None,
    )?;
    match connect(attempt.as_raw_fd(), &VsockAddr::new(HOST_CID, DISCARD_PORT)) {
        Ok(()) | Err(Errno::ECONNRESET | Errno::ECONNREFUSED) => return Ok(true),
        Err(Errno::EINPROGRESS) => {}
        Err(errno) => return Err(errno),
    }
    let patience = PollTimeout::try_from(patience).unwrap_or(PollTimeout::MAX);
    Ok(poll(
        &mut [PollFd::new(attempt.as_fd(), PollFlags::POLLOUT)],
        patience,
    )? > 0)
}

/// Interrupts that have a handler, by ascending number.
fn interrupts(folder: &Path) -> impl Iterator<Item = Interrupt> + use<> {
    let mut numbers: Vec<u32> = entries(folder)
        .take(MAX_INTERRUPTS)
        .filter_map(|e| e.file_name().to_str()?.parse().ok())
        .collect();
    numbers.sort_unstable();
    let folder = folder.to_path_buf();
    numbers.into_iter().filter_map(move |irq| {
        Some(Interrupt {
            irq,
            name: handlers(&folder.join(irq.to_string()))?,
        })
    })
}

/// Names of an interrupt's handlers, for each of which the kernel makes a directory.
fn handlers(folder: &Path) -> Option<String> {
    let mut names: Vec<String> = entries(folder)
        .filter(|e| e.file_type().is_ok_and(|t| t.is_dir()))
        .map(|e| e.file_name().to_string_lossy().into_owned())
        .collect();
    names.sort_unstable();
    (!names.is_empty()).then(|| names.join("+"))
}

fn mask_file(folder: &Path, irq: u32) -> PathBuf {
    folder.join(irq.to_string()).join("smp_affinity")
}

/// Whether an interrupt arrives at `cpu`, by its mask where the kernel has no effective mask.
fn arrives_at(folder: &Path, irq: u32, cpu: usize) -> bool {
    let files =
        ["effective_affinity", "smp_affinity"].map(|file| folder.join(irq.to_string()).join(file));
    files
        .iter()
        .find_map(|file| read(file).ok())
        .is_some_and(|mask| mask.has(cpu))
}

/// Removes the CPU from a mask; returns the mask before and after. None if the mask does not have
/// the CPU, or is gone. Errors: the kernel refuses a new mask (EIO for managed and for per-CPU
/// interrupts, ENOSPC where no vector is free), as it would one without an online CPU (EINVAL).
fn move_mask(file: &Path, cpu: usize, online: &CpuMask) -> nix::Result<Option<(CpuMask, CpuMask)>> {
    let moving = || {
        let former = read(file)?;
        if !former.has(cpu) {
            return Ok(None);
        }
        let ours = former.without(cpu);
        if !ours.meets(online) {
            return Err(Errno::EINVAL);
        }
        write(file, &ours).map(|()| Some((former, ours)))
    };
    match moving() {
        Err(Errno::ENOENT) => Ok(None),
        result => result,
    }
}

/// Restores a mask, unless it is no longer the one written here.
fn restore(file: &Path, ours: &CpuMask, former: &CpuMask) -> nix::Result<()> {
    if read(file)? == *ours {
        write(file, former)?;
    }
    Ok(())
}

fn read(file: &Path) -> nix::Result<CpuMask> {
    let text = std::fs::read_to_string(file).map_err(|e| errno(&e))?;
    CpuMask::parse(&text).ok_or(Errno::EBADMSG)
}

fn write(file: &Path, mask: &CpuMask) -> nix::Result<()> {
    // The kernel takes each write as a whole mask.
    let text = format!("{mask}\n");
    OpenOptions::new()
        .write(true)
        .truncate(true)
        .open(file)
        .and_then(|mut f| f.write_all(text.as_bytes()))
        .map_err(|e| errno(&e))
}

#[cfg(test)]
mod tests {
    use super::*;
    use kata_gpu_test_support::{TempDir, property, temp_dir};
    use proptest::prelude::*;
    use proptest::test_runner::TestRunner;
    use std::fs;

    /// A made-up /proc with interrupts: number, handler (empty: none), mask.
    struct Proc(TempDir);

    impl Proc {
        fn new(default: &str, interrupts: &[(u32, &str, &str)]) -> Self {
            let root = temp_dir();
            fs::create_dir_all(root.path().join("irq")).unwrap();
            fs::write(
                root.path().join("irq/default_smp_affinity"),
                format!("{default}\n"),
            )
            .unwrap();
            let proc = Self(root);
            interrupts
                .iter()
                .for_each(|(irq, handler, mask)| proc.request(*irq, handler, mask));
            proc
        }

        fn request(&self, irq: u32, handler: &str, mask: &str) {
            let folder = self.0.path().join("irq").join(irq.to_string());
            fs::create_dir_all(&folder).unwrap();
            if !handler.is_empty() {
                fs::create_dir(folder.join(handler)).unwrap();
            }
            fs::write(folder.join("smp_affinity"), format!("{mask}\n")).unwrap();
        }

        /// Replaces a mask by a file that the kernel refuses to write, root or not. The file's
        /// text, "65536", has CPUs 1, 2, 4, 5 and more.
        fn refuse(&self, irq: u32) {
            let file = mask_file(&self.0.path().join("irq"), irq);
            fs::remove_file(&file).unwrap();
            std::os::unix::fs::symlink("/proc/sys/kernel/ngroups_max", file).unwrap();
        }

        fn effective(&self, irq: u32, mask: &str) {
            fs::write(
                self.0
                    .path()
                    .join("irq")
                    .join(irq.to_string())
                    .join("effective_affinity"),
                format!("{mask}\n"),
            )
            .unwrap();
        }

        fn set(&self, irq: u32, mask: &str) {
            fs::write(
                mask_file(&self.0.path().join("irq"), irq),
                format!("{mask}\n"),
            )
            .unwrap();
        }

        fn mask(&self, irq: u32) -> String {
            fs::read_to_string(mask_file(&self.0.path().join("irq"), irq))
                .unwrap()
                .trim()
                .to_string()
        }

        fn default(&self) -> String {
            fs::read_to_string(self.0.path().join("irq/default_smp_affinity"))
                .unwrap()
                .trim()
                .to_string()
        }
    }

    fn numbers<'a>(interrupts: impl IntoIterator<Item = &'a Interrupt>) -> Vec<u32> {
        interrupts.into_iter().map(|i| i.irq).collect()
    }

    #[test]
    fn masks_of_any_size_are_read_and_written_as_the_kernel_does() {
        for (text, cpus, written) in [
            ("3\n", vec![0, 1], "3"),
            ("00000000,00000002", vec![1], "2"),
            ("ffffffff,ffffffff", (0..64).collect(), "ffffffff,ffffffff"),
            ("1,00000000,80000000\n", vec![31, 64], "1,00000000,80000000"),
            ("0", vec![], "0"),
        ] {
            let mask = CpuMask::parse(text).unwrap();
            assert_eq!(
                (0..200).filter(|cpu| mask.has(*cpu)).collect::<Vec<_>>(),
                cpus,
                "{text}"
            );
            assert_eq!(mask, CpuMask::of(&cpus), "{text}");
            assert_eq!(mask.to_string(), written);
        }
        for text in ["", ",", "x", "+3", "3,", "1ffffffff", "f f", "-1", "0x3"] {
            assert_eq!(CpuMask::parse(text), None, "{text:?}");
        }
        assert_eq!(
            CpuMask::parse("ffffffff,ffffffff")
                .unwrap()
                .without(63)
                .to_string(),
            "7fffffff,ffffffff"
        );
        assert_eq!(
            CpuMask::parse("1,00000001")
                .unwrap()
                .without(32)
                .to_string(),
            "1"
        );
    }

    #[test]
    fn interrupts_leave_the_cpu_and_come_back() {
        let proc = Proc::new(
            "3",
            &[
                (4, "ttyS0", "1"),
                (9, "", "3"),
                (24, "virtio0-config", "3"),
                (25, "virtio0-virtqueues", "2"),
            ],
        );
        let moved = keep_off(proc.0.path(), 1, &[0, 1]);
        assert_eq!(
            (numbers(moved.moved()), list(moved.moved())),
            (vec![24], "24 virtio0-config".into())
        );
        assert_eq!(numbers(moved.stays()), [25]);
        // Interrupts without a handler, or without the CPU in their mask, keep their mask.
        assert_eq!(
            [4, 9, 24, 25].map(|irq| proc.mask(irq)),
            ["1", "3", "1", "2"]
        );
        assert_eq!(proc.default(), "1");
        drop(moved);
        assert_eq!(
            [4, 9, 24, 25].map(|irq| proc.mask(irq)),
            ["1", "3", "3", "2"]
        );
        assert_eq!(proc.default(), "3");
    }

    #[test]
    fn whatever_the_masks_are_each_interrupt_keeps_a_cpu_and_gets_its_mask_back() {
        let word = prop_oneof![
            Just("0".to_string()),
            Just("ffffffff".to_string()),
            "[0-9a-f]{1,8}",
            "[0-9a-fA-F,+x \n-]{0,12}",
        ];
        let mask = proptest::collection::vec(word, 0..4).prop_map(|words| words.join(","));
        let interrupt = (prop_oneof![Just(""), Just("virtio0-rx")], mask.clone());
        let machine = (
            proptest::collection::vec(interrupt, 0..6),
            mask,
            0..70_usize,
            proptest::collection::vec(0..70_usize, 0..4),
        );
        let mut runner = TestRunner::new(property(200));
        let result = runner.run(&machine, |(all, default, cpu, online)| {
            let of = |irq: usize| {
                let (handler, mask) = &all[irq];
                (irq as u32, *handler, mask.as_str())
            };
            let all: Vec<_> = (0..all.len()).map(of).collect();
            let proc = Proc::new(&default, &all);
            let moved = keep_off(proc.0.path(), cpu, &online);
            for (irq, handler, former) in &all {
                let (former, now) = (CpuMask::parse(former), CpuMask::parse(&proc.mask(*irq)));
                prop_assert_eq!(former.is_some(), now.is_some());
                let (Some(former), Some(now)) = (former, now) else {
                    continue;
                };
                if now != former {
                    prop_assert!(!handler.is_empty() && now == former.without(cpu));
                    prop_assert!(now.meets(&CpuMask::of(&online)));
                } else if former.has(cpu) && !handler.is_empty() {
                    prop_assert!(moved.stays().iter().any(|stays| stays.irq == *irq));
                }
            }
            drop(moved);
            for (irq, _, former) in &all {
                let restored = CpuMask::parse(&proc.mask(*irq));
                prop_assert_eq!(restored, CpuMask::parse(former));
            }
            prop_assert_eq!(CpuMask::parse(&proc.default()), CpuMask::parse(&default));
            Ok(())
        });
        result.unwrap();
    }

    #[test]
    fn an_interrupt_that_the_kernel_cannot_move_is_named_and_stays() {
        let proc = Proc::new("7", &[(24, "virtio0-req.0", "7"), (25, "virtio1-rx", "7")]);
        proc.refuse(24);
        let moved = keep_off(proc.0.path(), 1, &[0, 1, 2]);
        assert_eq!(numbers(moved.moved()), [25]);
        assert_eq!(list(moved.stays()), "24 virtio0-req.0");
        assert_eq!(proc.mask(25), "5");
    }

    #[test]
    fn later_interrupts_are_moved_and_get_the_default_back() {
        let proc = Proc::new("f", &[(24, "virtio0-rx", "f")]);
        let mut moved = keep_off(proc.0.path(), 3, &[0, 1, 2, 3]);
        // Interrupt 30 has a mask of its own, 31 the changed default.
        proc.request(30, "nvidia", "c");
        moved.again();
        proc.request(31, "nvidia", "7");
        assert_eq!([24, 30, 31].map(|irq| proc.mask(irq)), ["7", "4", "7"]);
        drop(moved);
        assert_eq!([24, 30, 31].map(|irq| proc.mask(irq)), ["f", "c", "f"]);
    }

    #[test]
    fn a_mask_that_another_program_changed_stays() {
        let proc = Proc::new(
            "3",
            &[
                (24, "virtio0-rx", "3"),
                (25, "virtio1-rx", "3"),
                (26, "virtio2-rx", "3"),
            ],
        );
        let moved = keep_off(proc.0.path(), 1, &[0, 1]);
        proc.set(24, "2");
        fs::remove_dir_all(proc.0.path().join("irq/26")).unwrap();
        fs::write(proc.0.path().join("irq/default_smp_affinity"), "2\n").unwrap();
        drop(moved);
        assert_eq!(
            (proc.mask(24), proc.mask(25), proc.default()),
            ("2".into(), "3".into(), "2".into())
        );
    }

    #[test]
    fn a_written_mask_is_not_a_moved_interrupt() {
        let proc = Proc::new("3", &[(24, "virtio0-rx", "3"), (25, "virtio1-rx", "3")]);
        proc.effective(24, "2");
        proc.effective(25, "1");
        let moved = keep_off(proc.0.path(), 1, &[0, 1]);
        assert_eq!(numbers(&moved.waiting()), [24]);
        proc.effective(24, "1");
        assert_eq!(moved.waiting(), []);
    }

    #[test]
    fn vsock_interrupts_are_recognised_by_their_devices_driver() {
        let proc = Proc::new(
            "3",
            &[
                (24, "virtio0-input", "3"),
                (25, "virtio1-config", "3"),
                (26, "virtio1-virtqueues", "3"),
            ],
        );
        for irq in [24, 25, 26] {
            proc.effective(irq, "2");
        }
        let moved = keep_off(proc.0.path(), 1, &[0, 1]);
        assert!(!moved.vsock_waits(proc.0.path()));
        for entry in ["bind", "module", "virtio1"] {
            fs::create_dir_all(proc.0.path().join(VSOCK_DRIVER).join(entry)).unwrap();
        }
        assert!(moved.vsock_waits(proc.0.path()));
        proc.effective(26, "1");
        assert_eq!(
            (moved.vsock_waits(proc.0.path()), numbers(&moved.waiting())),
            (false, vec![24, 25])
        );
    }

    #[test]
    fn dropping_gives_back_and_the_only_cpu_keeps_everything() {
        let proc = Proc::new("1", &[(24, "virtio0-rx", "1")]);
        let moved = keep_off(proc.0.path(), 0, &[0]);
        assert_eq!(
            (moved.moved().count(), moved.stays().len(), proc.default()),
            (0, 1, "1".into())
        );
        drop(moved);
        proc.set(24, "3");
        drop(keep_off(proc.0.path(), 0, &[0, 1]));
        assert_eq!(proc.mask(24), "3");
        // No /proc at all.
        let none = keep_off(&proc.0.path().join("missing"), 1, &[0, 1]);
        assert_eq!((none.moved().count(), none.stays().len()), (0, 0));
    }
}
