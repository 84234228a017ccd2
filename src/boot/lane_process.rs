//! The process that enables GPUs, one at a time, on a vCPU of its own. A process and not a thread: while the host maps BARs, its vCPU answers nobody, and
//! whoever changes the memory map of a process (a new thread's stack, memory given back) waits for all vCPUs that run this process. In the
//! worker that would be every other GPU's way.

use super::keeper::{Held, name_process};
use crate::bind::{PciSysfs, SysfsError};
use crate::pci::PciAddress;
use nix::errno::Errno;
use nix::sched::{CpuSet, sched_setaffinity};
use nix::sys::socket::{AddressFamily, MsgFlags, SockFlag, SockType, recv, send, socketpair};
use nix::sys::wait::waitpid;
use nix::unistd::{Pid, close};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;

/// Longest request: an address.
const MAX_REQUEST: usize = 64;

/// The way to that process.
pub struct LaneProcess {
    /// None only while this is being dropped.
    socket: Option<OwnedFd>,
    pid: Pid,
}

impl LaneProcess {
    /// Starts it, on these CPUs; must be called while this process has one thread. None where that cannot be: the worker then enables by itself.
    ///
    /// GPUs that are held must not be held by the child: one is removed only when nobody has it open any more. The worker's way to the keeper stays open in the
    /// child on purpose: the keeper starts no other worker while a GPU is still being enabled, because to the kernel that one is enabled already.
    pub fn start(sysfs: &Path, cpus: &CpuSet, held: &[Held]) -> Option<Self> {
        let (ours, theirs) = socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC).ok()?;
        let forked = crate::sys::fork_single_threaded((ours, theirs), |(ours, theirs)| {
            drop(ours);
            for gpu in held {
                let _unused = close(gpu.descriptor);
            }
            let _unused = sched_setaffinity(Pid::from_raw(0), cpus);
            name_process("gpuinit-lane");
            serve(&theirs, &PciSysfs::at(sysfs));
            0
        });
        let (pid, (ours, _theirs)) = forked.ok()?;
        Some(Self { socket: Some(ours), pid })
    }

    /// Whose stack tells what an enabling waits for.
    pub fn pid(&self) -> Pid {
        self.pid
    }

    /// Enables this GPU there; blocks until that is done. None when that process is gone.
    pub fn enable(&self, gpu: PciAddress) -> Option<Result<(), Errno>> {
        let socket = self.socket.as_ref()?.as_raw_fd();
        send(socket, gpu.to_string().as_bytes(), MsgFlags::MSG_NOSIGNAL).ok()?;
        let mut answer = [0; size_of::<i32>()];
        loop {
            match recv(socket, &mut answer, MsgFlags::empty()) {
                Err(Errno::EINTR) => {}
                Ok(length) if length == answer.len() => break,
                _ => return None,
            }
        }
        let errno = i32::from_ne_bytes(answer);
        Some(if errno == 0 { Ok(()) } else { Err(Errno::from_raw(errno)) })
    }
}

impl Drop for LaneProcess {
    fn drop(&mut self) {
        // It ends with its socket. An enabling is never under way here: whoever waits for one holds this.
        drop(self.socket.take());
        let _unused = waitpid(self.pid, None);
    }
}

/// Enables what is asked for until nobody can ask any more.
fn serve(socket: &OwnedFd, sysfs: &PciSysfs) {
    let mut request = [0; MAX_REQUEST];
    loop {
        let length = match recv(socket.as_raw_fd(), &mut request, MsgFlags::empty()) {
            Err(Errno::EINTR) => continue,
            Ok(length) if length > 0 => length,
            _ => return,
        };
        let gpu = request.get(..length).and_then(|text| std::str::from_utf8(text).ok()).and_then(|text| text.parse().ok());
        let Some(gpu) = gpu else { return };
        let errno = sysfs.enable(gpu).map_or_else(|e: SysfsError| e.errno().unwrap_or(Errno::EIO) as i32, |()| 0);
        if send(socket.as_raw_fd(), &errno.to_ne_bytes(), MsgFlags::MSG_NOSIGNAL).is_err() {
            return;
        }
    }
}
