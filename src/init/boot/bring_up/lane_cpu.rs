//! A vCPU for the lane. While the host maps BARs, the vCPU that enables is gone: tasks queued there
//! do not run, timers set there do not fire, interrupts routed there wait. An initialisation that
//! happens to sleep there takes seconds longer. The lane's process ([`LaneProcess`]) therefore has
//! a vCPU to itself. Until the lane ends, every thread that initialises GPUs stays off that vCPU,
//! and so does every interrupt that can be moved. The agent and its containers may still run there:
//! on a guest of two vCPUs they would otherwise have one less.
//!
//! A boot works without all of this, only slower: a mask that cannot be set stays as it is.

use super::late::is_open_thread;
use crate::boot::ipc::HelperPid;
use crate::boot::ipc::keeper_socket::Held;
use crate::boot::ipc::lane_process::LaneProcess;
use crate::machine::files::numbers;
use crate::machine::interrupts;
use crate::machine::interrupts::MovedInterrupts;
use crate::machine::threads;
use kata_gpu_wire::names;
use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Mount point of procfs.
const PROC: &str = "/proc";
/// CPUs that are online, in sysfs.
const ONLINE: &str = "devices/system/cpu/online";
/// Time for virtio-vsock's interrupts to arrive once, which moves them: a completion takes well
/// below this.
const STIR: Duration = Duration::from_millis(20);

/// Calling thread, as a system call argument.
const SELF: Pid = Pid::from_raw(0);

/// A vCPU for the lane, with the lane's process on it; threads and interrupts are not moved yet.
pub struct Spare {
    process: LaneProcess,
    /// Process that opens GPUs.
    opener: Option<HelperPid>,
    cpu: usize,
    /// The lane's vCPU as a set.
    lane: CpuSet,
    all: CpuSet,
    others: CpuSet,
    /// CPUs for threads after the lane's end.
    afterwards: CpuSet,
}

impl Spare {
    /// Starts the lane's process; must be called while this process has one thread. None where
    /// there is only one vCPU, or no such process.
    pub fn start(sysfs: &Path, held: &[Held], opener: Option<HelperPid>) -> Option<Self> {
        let all = sched_getaffinity(SELF).ok()?;
        let (cpu, others) = split(&all)?;
        let mut lane = CpuSet::new();
        lane.set(cpu).ok()?;
        let process = LaneProcess::start(sysfs, &lane, held)?;
        let online = std::fs::read_to_string(sysfs.join(ONLINE)).unwrap_or_default();
        Some(Self {
            process,
            opener,
            cpu,
            lane,
            all,
            others,
            afterwards: afterwards(&all, online.trim()),
        })
    }

    /// The lane's process.
    pub fn process(&self) -> &LaneProcess {
        &self.process
    }

    /// Moves this process and the process that opens GPUs.
    fn move_to(&self, cpus: &CpuSet) {
        move_process(cpus);
        if let Some(opener) = self.opener.as_ref().and_then(HelperPid::get) {
            let _unused = sched_setaffinity(opener, cpus);
        }
    }

    /// Moves this process and the interrupts off the lane's vCPU. Blocks for some milliseconds.
    pub fn reserve(self, sysfs: &Path) -> Arc<LaneCpu> {
        self.move_to(&self.others);
        let online: Vec<usize> = cpus(&self.all).collect();
        let interrupts = interrupts::keep_off(Path::new(PROC), self.cpu, &online);
        // A written mask moves an interrupt at its next arrival.
        if interrupts.vsock_waits(sysfs) {
            let _unused = interrupts::stir_vsock(STIR);
        }
        tracing::info!(
            name: names::LANE_CPU, cpu = self.cpu as u64,
            moved = interrupts::list(interrupts.moved()),
            late = interrupts::list(&interrupts.waiting()),
            stay = interrupts::list(interrupts.stays()),
        );
        Arc::new(LaneCpu {
            spare: self,
            moved: Mutex::new(Moved {
                interrupts,
                threads: Vec::new(),
                seen: 0,
            }),
        })
    }
}

/// A vCPU reserved for the lane until this is dropped.
pub struct LaneCpu {
    spare: Spare,
    moved: Mutex<Moved>,
}

/// Interrupts and threads that were moved off the vCPU.
struct Moved {
    /// Restored when dropped.
    interrupts: MovedInterrupts,
    /// The driver's threads.
    threads: Vec<Pid>,
    /// Highest process id that was examined.
    seen: i32,
}

impl LaneCpu {
    /// The lane's process.
    pub fn process(&self) -> &LaneProcess {
        self.spare.process()
    }

    /// Moves a process to the lane's vCPU.
    pub fn move_here(&self, process: Pid) {
        let _unused = sched_setaffinity(process, &self.spare.lane);
    }

    /// Runs work on the lane's vCPU, on the calling thread.
    pub fn run_there<T>(&self, work: impl FnOnce() -> T) -> T {
        let there = sched_setaffinity(SELF, &self.spare.lane);
        let result = work();
        if there.is_ok() {
            let _unused = sched_setaffinity(SELF, &self.spare.others);
        }
        result
    }

    /// Moves the interrupts that were requested since the last call.
    pub fn keep_interrupts_off(&self) {
        self.lock().interrupts.again();
    }

    /// Moves the driver's threads that initialise GPUs off the lane's vCPU, if started since the
    /// last call. The driver starts one for each GPU, in its probe.
    pub fn keep_driver_off(&self) {
        let mut moved = self.lock();
        let new = numbers(Path::new(PROC))
            .filter(|pid| *pid > moved.seen)
            .collect::<Vec<_>>();
        moved.seen = new.iter().copied().max().unwrap_or(moved.seen);
        for pid in new {
            if is_open_thread(&PathBuf::from(format!("{PROC}/{pid}"))) {
                let _unused = sched_setaffinity(Pid::from_raw(pid), &self.spare.others);
                moved.threads.push(Pid::from_raw(pid));
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, Moved> {
        threads::lock(&self.moved)
    }
}

impl Drop for LaneCpu {
    fn drop(&mut self) {
        self.spare.move_to(&self.spare.afterwards);
        for thread in &self
            .moved
            .get_mut()
            .unwrap_or_else(PoisonError::into_inner)
            .threads
        {
            let _unused = sched_setaffinity(*thread, &self.spare.afterwards);
        }
    }
}

/// Moves every thread of this process; later threads inherit the mask from one of these.
fn move_process(to: &CpuSet) {
    for thread in numbers(Path::new("/proc/self/task")) {
        let _unused = sched_setaffinity(Pid::from_raw(thread), to);
    }
}

fn cpus(set: &CpuSet) -> impl DoubleEndedIterator<Item = usize> {
    (0..CpuSet::count()).filter(|cpu| set.is_set(*cpu).unwrap_or(false))
}

/// Mask to restore: all possible CPUs, unless the guest's mask was smaller than the CPUs `online`
/// (as `0-3,5`): then the former mask.
fn afterwards(all: &CpuSet, online: &str) -> CpuSet {
    if listed(online).is_some_and(|online| cpus(all).eq(online)) {
        let mut every = CpuSet::new();
        for cpu in 0..CpuSet::count() {
            let _unused = every.set(cpu); // fails only beyond the count
        }
        every
    } else {
        *all
    }
}

/// The numbers in a list as `0-3,5`. None for anything else.
fn listed(text: &str) -> Option<Vec<usize>> {
    let range = |part: &str| {
        let (from, to) = part.split_once('-').unwrap_or((part, part));
        Some(from.parse().ok()?..=to.parse().ok().filter(|to: &usize| *to < CpuSet::count())?)
    };
    let ranges: Option<Vec<_>> = text.split(',').map(range).collect();
    Some(ranges?.into_iter().flatten().collect())
}

/// Splits CPUs into the last one, which has the least other work, and the others. None where there
/// are no others.
fn split(all: &CpuSet) -> Option<(usize, CpuSet)> {
    let last = cpus(all).next_back()?;
    let mut others = *all;
    others.unset(last).ok()?;
    cpus(&others).next().map(|_| (last, others))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(list: &[usize]) -> Option<(usize, Vec<usize>)> {
        let mut all = CpuSet::new();
        list.iter().for_each(|cpu| all.set(*cpu).unwrap());
        split(&all).map(|(lane, others)| (lane, cpus(&others).collect()))
    }

    #[test]
    fn later_cpus_are_given_back_and_withheld_ones_are_not() {
        let of = |list: &[usize], online: &str| {
            let mut all = CpuSet::new();
            list.iter().for_each(|cpu| all.set(*cpu).unwrap());
            cpus(&afterwards(&all, online)).collect::<Vec<_>>()
        };
        assert_eq!(of(&[0, 1, 2, 5], "0-2,5").len(), CpuSet::count());
        assert_eq!(of(&[0, 1], "0-3"), [0, 1]);
        for odd in ["", "0-", "x", "0-999999999999"] {
            assert_eq!(of(&[0, 1], odd), [0, 1], "{odd:?}");
        }
    }

    #[test]
    fn the_lane_gets_the_last_of_several_and_none_of_one() {
        assert_eq!(of(&[0, 1, 2, 3]), Some((3, vec![0, 1, 2])));
        assert_eq!(of(&[5, 7]), Some((7, vec![5])));
        assert_eq!(of(&[0]), None);
        assert_eq!(of(&[]), None);
    }
}
