//! Who runs where while the host maps BARs. The vCPU that enables a GPU is gone for as long as that takes: what is queued behind it does not run, and
//! timers that were set on it do not fire. An initialisation that happens to sleep there takes seconds longer. So the lane's process
//! ([`LaneProcess`]) has a vCPU to itself, and what initialises GPUs stays off it until the lane ends; the agent and its containers are left alone.
//!
//! All of this only makes a boot faster: what cannot be set stays as it is.

use super::late::OPEN_THREAD;
use crate::boot::wire::keeper::Held;
use crate::boot::wire::lane_process::LaneProcess;
use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

/// The calling thread, for the kernel.
const SELF: Pid = Pid::from_raw(0);

/// A vCPU for the lane, and its process there; nothing is moved yet.
pub struct Spare {
    process: LaneProcess,
    /// The process that opens GPUs.
    opener: Option<Pid>,
    all: CpuSet,
    others: CpuSet,
}

impl Spare {
    /// Starts the lane's process; must be called while this process has one thread. None where there is only one vCPU, or no such process.
    pub fn start(sysfs: &Path, held: &[Held], opener: Option<Pid>) -> Option<Self> {
        let all = sched_getaffinity(SELF).ok()?;
        let (lane, others) = split(&all)?;
        let process = LaneProcess::start(sysfs, &lane, held)?;
        Some(Self { process, opener, all, others })
    }

    /// This process and the one that opens GPUs.
    fn move_to(&self, cpus: &CpuSet) {
        move_process(cpus);
        if let Some(opener) = self.opener {
            let _unused = sched_setaffinity(opener, cpus);
        }
    }

    /// Moves this process off the lane's vCPU.
    pub fn reserve(self) -> Arc<LaneCpu> {
        self.move_to(&self.others);
        Arc::new(LaneCpu { spare: self, moved: Mutex::new((Vec::new(), 0)) })
    }
}

/// A vCPU that only the lane uses; given back when this is dropped.
pub struct LaneCpu {
    spare: Spare,
    /// The driver's threads that were moved, and the highest process id that was looked at.
    moved: Mutex<(Vec<Pid>, i32)>,
}

impl LaneCpu {
    /// The lane's process.
    pub fn process(&self) -> &LaneProcess {
        &self.spare.process
    }

    /// Moves the driver's threads that initialise GPUs off the lane's vCPU: those that have come since the last call. There is one for each GPU,
    /// made in its probe.
    pub fn keep_driver_off(&self) {
        let mut moved = self.moved.lock().unwrap_or_else(PoisonError::into_inner);
        let (threads, seen) = &mut *moved;
        let new = numbers(Path::new("/proc")).filter(|pid| *pid > *seen).collect::<Vec<_>>();
        *seen = new.iter().copied().max().unwrap_or(*seen);
        for pid in new {
            if std::fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|comm| comm.starts_with(OPEN_THREAD)) {
                let _unused = sched_setaffinity(Pid::from_raw(pid), &self.spare.others);
                threads.push(Pid::from_raw(pid));
            }
        }
    }
}

impl Drop for LaneCpu {
    fn drop(&mut self) {
        self.spare.move_to(&self.spare.all);
        for thread in &self.moved.get_mut().unwrap_or_else(PoisonError::into_inner).0 {
            let _unused = sched_setaffinity(*thread, &self.spare.all);
        }
    }
}

/// Every thread of this process; those that are made later inherit it from one of these.
fn move_process(to: &CpuSet) {
    for thread in numbers(Path::new("/proc/self/task")) {
        let _unused = sched_setaffinity(Pid::from_raw(thread), to);
    }
}

/// The numbers among the names in a directory: process or thread ids.
fn numbers(directory: &Path) -> impl Iterator<Item = i32> {
    std::fs::read_dir(directory).into_iter().flatten().flatten().filter_map(|e| e.file_name().to_str()?.parse().ok())
}

/// The last one of these, which has the least to do beside, and the others.
fn split(all: &CpuSet) -> Option<(CpuSet, CpuSet)> {
    let has = |cpu: &usize| all.is_set(*cpu).unwrap_or(false);
    let last = (0..CpuSet::count()).rev().find(has)?;
    let (mut lane, mut others) = (CpuSet::new(), *all);
    lane.set(last).ok()?;
    others.unset(last).ok()?;
    (0..last).any(|cpu| has(&cpu)).then_some((lane, others))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cpus(set: &CpuSet) -> Vec<usize> {
        (0..CpuSet::count()).filter(|cpu| set.is_set(*cpu).unwrap()).collect()
    }

    fn of(list: &[usize]) -> Option<(Vec<usize>, Vec<usize>)> {
        let mut all = CpuSet::new();
        list.iter().for_each(|cpu| all.set(*cpu).unwrap());
        split(&all).map(|(lane, others)| (cpus(&lane), cpus(&others)))
    }

    #[test]
    fn the_lane_gets_the_last_of_several_and_none_of_one() {
        assert_eq!(of(&[0, 1, 2, 3]), Some((vec![3], vec![0, 1, 2])));
        assert_eq!(of(&[5, 7]), Some((vec![7], vec![5])));
        assert_eq!(of(&[0]), None);
        assert_eq!(of(&[]), None);
    }
}
