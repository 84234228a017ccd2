//! The process that enables GPUs, one at a time, on a vCPU of its own. A process and not a thread:
//! while the host maps BARs, the vCPU responds to nothing, and a change of a process's memory map
//! (a new thread's stack, memory given back) waits for all vCPUs that run that process. With a
//! thread of the worker, every other GPU would wait.

use super::keeper_socket::Held;
use super::{HelperPid, reply, start_helper};
use crate::gpu::bind::{PciSysfs, SysfsError};
use crate::machine::clock::boottime_ns;
use kata_gpu_wire::pci_address::PciAddress;
use nix::errno::Errno;
use nix::sched::{CpuSet, sched_setaffinity};
use nix::unistd::Pid;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::Duration;

/// Longest request: an address.
const MAX_REQUEST: usize = 64;

/// The worker's end; the process ends on drop, which does not wait for that.
pub struct LaneProcess {
    socket: OwnedFd,
    pid: HelperPid,
}

impl LaneProcess {
    /// Starts the process on these CPUs; must be called while this process has one thread. Returns
    /// `None` where that fails: the worker then enables by itself.
    ///
    /// Leaves the worker's connection to the keeper open in the child on purpose: the keeper must
    /// start no other worker while a GPU is still being enabled, because the kernel already counts
    /// that GPU as enabled.
    pub fn start(sysfs: &Path, cpus: &CpuSet, held: &[Held]) -> Option<Self> {
        let (pid, socket) = start_helper("lane", held, |socket| {
            let _unused = sched_setaffinity(Pid::from_raw(0), cpus);
            serve(socket, &PciSysfs::at(sysfs));
        })?;
        Some(Self::of(socket, pid))
    }

    /// The worker's end of a process.
    pub(super) fn of(socket: OwnedFd, pid: HelperPid) -> Self {
        Self { socket, pid }
    }

    /// Process whose stack shows what an enabling waits for.
    pub fn pid(&self) -> &HelperPid {
        &self.pid
    }

    /// Enables this GPU in the process; returns the result and the duration measured there. Blocks.
    /// Returns `None` when that process is gone.
    pub fn enable(&self, gpu: PciAddress) -> Option<(Result<(), Errno>, Duration)> {
        let answers = reply::ask(&self.socket, &[gpu.to_string().as_bytes()])?;
        let (errno, _) = reply::answered(&answers)?;
        let (took_ns, _) = reply::answered(&answers)?;
        let errno = i32::try_from(errno).ok()?;
        let result = if errno == 0 {
            Ok(())
        } else {
            Err(Errno::from_raw(errno))
        };
        Some((result, Duration::from_nanos(u64::try_from(took_ns).ok()?)))
    }
}

/// Enables each requested GPU until the last requester is gone. Answers with the error's number, or
/// 0, and the duration in ns.
fn serve(socket: &OwnedFd, sysfs: &PciSysfs) {
    let mut request = [0; MAX_REQUEST];
    while let Some((length, answers)) = reply::asked(socket, &mut request) {
        let gpu: Option<PciAddress> = request
            .get(..length)
            .and_then(|text| std::str::from_utf8(text).ok()?.parse().ok());
        let (Some(gpu), Some(answers)) = (gpu, answers) else {
            return;
        };
        let began_ns = boottime_ns();
        let errno = sysfs.enable(gpu).map_or_else(
            |e: SysfsError| e.errno().unwrap_or(Errno::EIO) as i64,
            |()| 0,
        );
        let took_ns = boottime_ns().saturating_sub(began_ns);
        reply::answer(&answers, errno, None);
        reply::answer(&answers, i64::try_from(took_ns).unwrap_or(i64::MAX), None);
    }
}
