//! System calls for which neither std nor nix has a safe form. In the guest no other module is
//! unsafe. Each block states why it is sound.
#![allow(unsafe_code, reason = "system calls without a safe form in std or nix")]

use crate::machine::files::errno;
use nix::errno::Errno;
use nix::sys::socket::SockFlag;
use nix::unistd::{ForkResult, Pid};
use std::ffi::CStr;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use tokio::io::unix::AsyncFd;

/// Exit status of a process of ours that panicked, as Rust's own.
const PANICKED: i32 = 101;
/// Tries of a call that lacks something for a moment.
const TRIES: usize = 100;

/// Makes /dev/null for Rust's runtime, which ends a process that lacks descriptor 0, 1 or 2 and has
/// no /dev/null either. PID 1 has none of these in a guest without a console, with /dev as in the
/// image. Call it before `main`.
pub extern "C" fn before_main() {
    // SAFETY: system calls with constant arguments; nothing of the runtime, which does not exist
    // yet, is used. A failure here fails the runtime.
    unsafe {
        if nix::libc::getpid() == 1
            && (0..=2).any(|descriptor| nix::libc::fcntl(descriptor, nix::libc::F_GETFD) < 0)
        {
            nix::libc::mkdir(c"/dev".as_ptr(), 0o755);
            nix::libc::mknod(
                c"/dev/null".as_ptr(),
                nix::libc::S_IFCHR | 0o666,
                nix::libc::makedev(1, 3),
            );
        }
    }
}

/// Repeats a call that lacks memory, processes or descriptors, a bounded number of times without a
/// pause: PID 1 has no second chance to make the keeper or to become the agent.
pub fn retried<T>(mut call: impl FnMut() -> nix::Result<T>) -> nix::Result<T> {
    let mut result = call();
    for _ in 1..TRIES {
        match result {
            Err(Errno::EAGAIN | Errno::ENOMEM | Errno::EMFILE | Errno::ENFILE | Errno::EINTR) => {
                result = call();
            }
            _ => break,
        }
    }
    result
}

/// Sets this process's place among those that the kernel ends when memory is short: the lower
/// (-1000 at least), the later. Without /proc the place stays.
pub fn set_oom_score(score: &str) {
    let write = || std::fs::write("/proc/self/oom_score_adj", score).map_err(|e| errno(&e));
    let _unused = retried(write);
}

/// Watches a descriptor in the runtime of the calling task.
pub fn async_fd(fd: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: the AsyncFd owns the only handle to this descriptor, and an OwnedFd keeps one number,
    // open, until it is dropped.
    unsafe { AsyncFd::register(fd) }.map_err(io::Error::from)
}

/// Accepts one connection, non-blocking and close-on-exec.
pub fn accept(listener: &OwnedFd) -> nix::Result<OwnedFd> {
    let raw = nix::sys::socket::accept4(
        listener.as_raw_fd(),
        SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK,
    )?;
    // SAFETY: accept4 has just made this descriptor, and no other code knows its number.
    Ok(unsafe { OwnedFd::from_raw_fd(raw) })
}

/// Takes over a descriptor inherited from the parent. None for a number that is not open.
pub fn inherited(raw: std::os::fd::RawFd) -> Option<OwnedFd> {
    // SAFETY: fcntl with F_GETFD only looks whether the number is open.
    if unsafe { nix::libc::fcntl(raw, nix::libc::F_GETFD) } < 0 {
        return None;
    }
    // SAFETY: it is open, and only the list of inherited descriptors, which is consumed entry by
    // entry, names it.
    Some(unsafe { OwnedFd::from_raw_fd(raw) })
}

/// Forks a process that has one thread, so that the child may do whatever the parent could.
///
/// The child runs `child` and exits with its result: it never runs the code after this call, not
/// even after a panic, because in PID 1 that code starts the agent. Both have `both`. Refused with
/// EDEADLK if there are more threads: a lock that one of them holds would never open in the child.
pub fn fork_single_threaded<T>(
    both: T,
    child: impl FnOnce(T) -> i32,
) -> Result<(Pid, T), (Errno, T)> {
    // A directory's link count is two plus its folders, which are the threads here: one call
    // instead of a walk.
    if std::fs::metadata("/proc/self/task")
        .is_ok_and(|task| std::os::unix::fs::MetadataExt::nlink(&task) != 3)
    {
        return Err((Errno::EDEADLK, both));
    }
    // SAFETY: there is one thread, so no lock and no allocator state can be held by another one at
    // this moment.
    match retried(|| unsafe { nix::unistd::fork() }) {
        Ok(ForkResult::Parent { child }) => Ok((child, both)),
        Ok(ForkResult::Child) => leave(
            std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| child(both)))
                .unwrap_or(PANICKED),
        ),
        Err(errno) => Err((errno, both)),
    }
}

/// Ends this process at once, regardless of other threads, and without running exit handlers.
pub fn leave(status: i32) -> ! {
    // SAFETY: takes a number and does not come back.
    unsafe { nix::libc::_exit(status) }
}

/// Lets the kernel reap the children of this process; their exit status is lost.
pub fn forget_children() {
    // SAFETY: SIG_IGN is no handler of ours; nothing else is installed for this signal. Fails only
    // for a signal that cannot be ignored.
    let _unused = unsafe {
        nix::sys::signal::signal(
            nix::sys::signal::Signal::SIGCHLD,
            nix::sys::signal::SigHandler::SigIgn,
        )
    };
}

/// Replaces this program; returns only on failure. Undoes changes of Rust's runtime that the new
/// program would inherit: SIGPIPE is ignored in every Rust program, and the signal mask stays
/// across exec.
pub fn exec(path: &CStr, arguments: &[&CStr], environment: &[std::ffi::CString]) -> Errno {
    // SAFETY: SIG_DFL is no handler of ours; nothing else is installed for this signal.
    let _unused = unsafe {
        nix::sys::signal::signal(
            nix::sys::signal::Signal::SIGPIPE,
            nix::sys::signal::SigHandler::SigDfl,
        )
    };
    // Fails only for a bad `how`.
    let _unused = nix::sys::signal::SigSet::empty().thread_set_mask();
    match retried(|| nix::unistd::execve(path, arguments, environment)) {
        Err(errno) => errno,
    }
}

/// The counter from which the kernel makes its clock: x86-64's time stamp counter, arm64's virtual
/// counter. None on other architectures.
pub fn counter() -> Option<u64> {
    #[cfg(target_arch = "x86_64")]
    {
        // SAFETY: every x86_64 CPU has the instruction, it touches no memory, and the kernel
        // forbids it only to who asked for that (PR_SET_TSC).
        Some(unsafe { std::arch::x86_64::_rdtsc() })
    }
    #[cfg(target_arch = "aarch64")]
    {
        let ticks: u64;
        // SAFETY: every arm64 CPU has the register, the kernel lets every program read it (its vDSO
        // does), and no memory is touched. The barrier keeps the read in its place.
        unsafe {
            std::arch::asm!("isb", "mrs {}, cntvct_el0", out(reg) ticks, options(nomem, nostack))
        };
        Some(ticks)
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    None
}

/// Ticks per second of [`counter`], where the CPU has that number.
pub fn counter_hz() -> Option<u64> {
    #[cfg(target_arch = "aarch64")]
    {
        let hz: u64;
        // SAFETY: as for the counter.
        unsafe { std::arch::asm!("mrs {}, cntfrq_el0", out(reg) hz, options(nomem, nostack)) };
        Some(hz).filter(|hz| *hz > 0)
    }
    #[cfg(not(target_arch = "aarch64"))]
    None
}

/// Answer of `NV_ESC_WAIT_OPEN_COMPLETE`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct WaitOpenComplete {
    /// 0 or a negative errno of the kernel.
    pub rc: i32,
    /// Status of the resource manager (NV_STATUS).
    pub adapter_status: u32,
}

/// Argument of `NV_ESC_STATUS_CODE`: a GPU, and the status of its adapter.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct StatusCode {
    pub domain: u32,
    pub bus: u8,
    pub slot: u8,
    pub status: u32,
}

mod ioctl {
    // 'F' and 209: NV_ESC_STATUS_CODE, the same in 535 to 595.
    nix::ioctl_readwrite!(nv_status_code, b'F', 209, super::StatusCode);
    // 'F' and 218: the driver's magic and NV_ESC_WAIT_OPEN_COMPLETE, from its public kernel
    // interface (nv-ioctl-numbers.h, 550.40.07 and later).
    nix::ioctl_readwrite!(nv_wait_open_complete, b'F', 218, super::WaitOpenComplete);
}

/// Blocks until the initialisation that open() started on this GPU is over. Not interruptible: run
/// it on a separate thread.
pub fn wait_open_complete(gpu: &OwnedFd) -> nix::Result<WaitOpenComplete> {
    let mut answer = WaitOpenComplete::default();
    // SAFETY: the driver reads and writes exactly this struct (its size is part of the request
    // number), which outlives the call.
    unsafe { ioctl::nv_wait_open_complete(gpu.as_raw_fd(), &raw mut answer) }?;
    Ok(answer)
}

/// Takes and gives back the lock of NVIDIA's resource manager, in the order of those who ask: while
/// the first part of an initialisation holds the lock, this returns at its end. Not interruptible:
/// call it in a process that nothing waits for. `control` is `/dev/nvidiactl`.
pub fn take_manager_lock(control: &OwnedFd, mut gpu: StatusCode) -> nix::Result<()> {
    // SAFETY: the driver reads and writes exactly this struct (its size is part of the request
    // number), which outlives the call.
    unsafe { ioctl::nv_status_code(control.as_raw_fd(), &raw mut gpu) }.map(drop)
}

/// Opens the terminal behind the reader's end of a new pseudo-terminal (TIOCGPTPEER, Linux 4.13);
/// close-on-exec.
pub fn terminal_of(reader: &impl AsRawFd) -> nix::Result<OwnedFd> {
    use nix::libc;
    let (reader, unlocked): (_, libc::c_int) = (reader.as_raw_fd(), 0);
    // SAFETY: the kernel reads one number, which outlives the call.
    Errno::result(unsafe { libc::ioctl(reader, libc::TIOCSPTLCK as _, &raw const unlocked) })?;
    let flags = libc::O_RDWR | libc::O_NOCTTY | libc::O_CLOEXEC;
    // SAFETY: takes a number.
    let raw = Errno::result(unsafe { libc::ioctl(reader, libc::TIOCGPTPEER as _, flags) })?;
    // SAFETY: the call has just made this descriptor, and no other code knows its number.
    Ok(unsafe { OwnedFd::from_raw_fd(raw) })
}

/// Redirects what programs write to /dev/console to this terminal; for /dev/console itself, ends
/// that (TIOCCONS).
pub fn redirect_console(to: &impl AsRawFd) -> nix::Result<()> {
    // SAFETY: takes no argument.
    Errno::result(unsafe { nix::libc::ioctl(to.as_raw_fd(), nix::libc::TIOCCONS as _) }).map(drop)
}

/// Commands of the device mapper (DM_DEV_CREATE and so on in dm-ioctl.h).
#[derive(Clone, Copy, Debug)]
pub enum DeviceMapper {
    Create = 3,
    Remove = 4,
    /// Without the suspend flag: resume, which puts the loaded table into use.
    Suspend = 6,
    LoadTable = 9,
    Status = 12,
}

/// Sends a request to the device mapper; `request` is a `struct dm_ioctl` with its payload, and
/// gets the reply.
pub fn device_mapper(
    control: &OwnedFd,
    command: DeviceMapper,
    request: &mut [u8],
) -> nix::Result<()> {
    const MAGIC: u8 = 0xfd;
    // Size of struct dm_ioctl, which is part of the number of each request.
    const HEADER: usize = 312;
    const DATA_SIZE: std::ops::Range<usize> = 12..16;
    let size = u32::try_from(request.len())
        .ok()
        .filter(|_| request.len() >= HEADER)
        .ok_or(Errno::EINVAL)?;
    request
        .get_mut(DATA_SIZE)
        .ok_or(Errno::EINVAL)?
        .copy_from_slice(&size.to_ne_bytes());
    // SAFETY: the kernel reads and writes at most `data_size` bytes, which was set to the length of
    // this buffer; the buffer outlives the call and needs no alignment (copy_from_user).
    let result = unsafe {
        nix::libc::ioctl(
            control.as_raw_fd(),
            nix::request_code_readwrite!(MAGIC, command as u8, HEADER) as _,
            request.as_mut_ptr(),
        )
    };
    Errno::result(result).map(drop)
}

/// Lets the calling thread run only where a CPU has nothing else to do (SCHED_IDLE).
pub fn run_when_idle() -> nix::Result<()> {
    // The kernel's struct sched_param: a priority, which this policy has not.
    let none: nix::libc::c_int = 0;
    // SAFETY: the kernel reads one number, which outlives the call; thread 0 is the calling one.
    // Not the C library's function, which fails in musl.
    Errno::result(unsafe {
        nix::libc::syscall(
            nix::libc::SYS_sched_setscheduler,
            0,
            nix::libc::SCHED_IDLE,
            &raw const none,
        )
    })
    .map(drop)
}

/// Returns when every CPU has been through the scheduler since the call (an RCU grace period): work
/// that the kernel deferred until then is due.
pub fn grace_period() -> nix::Result<()> {
    const MEMBARRIER_CMD_GLOBAL: nix::libc::c_int = 1;
    // SAFETY: this command takes no pointer, and changes nothing but time.
    Errno::result(unsafe {
        nix::libc::syscall(nix::libc::SYS_membarrier, MEMBARRIER_CMD_GLOBAL, 0, 0)
    })
    .map(drop)
}

/// A descriptor of a process that becomes readable when the process has ended; close-on-exec.
pub fn pidfd_open(pid: Pid) -> nix::Result<OwnedFd> {
    // SAFETY: takes two numbers.
    let raw =
        Errno::result(unsafe { nix::libc::syscall(nix::libc::SYS_pidfd_open, pid.as_raw(), 0) })?;
    let raw = std::os::fd::RawFd::try_from(raw).map_err(|_| Errno::EBADF)?;
    // SAFETY: pidfd_open has just made this descriptor, and no other code knows its number.
    Ok(unsafe { OwnedFd::from_raw_fd(raw) })
}

/// Drops every capability but these from the bounding set of the calling thread: a program that it
/// executes as root has no others.
pub fn keep_capabilities(kept: &[u32]) -> nix::Result<()> {
    for capability in (0..64).filter(|number| !kept.contains(number)) {
        // SAFETY: takes two numbers, and changes this thread alone.
        match Errno::result(unsafe {
            nix::libc::prctl(
                nix::libc::PR_CAPBSET_DROP,
                nix::libc::c_ulong::from(capability),
                0,
                0,
                0,
            )
        }) {
            // Beyond the last capability of this kernel.
            Err(Errno::EINVAL) => break,
            other => other.map(drop)?,
        }
    }
    Ok(())
}

/// Brings the loopback interface up (SIOCSIFFLAGS, IFF_UP).
pub fn loopback_up() -> nix::Result<()> {
    use nix::libc;
    use nix::sys::socket::{AddressFamily, SockType, socket};
    let fd = socket(
        AddressFamily::Inet,
        SockType::Datagram,
        SockFlag::SOCK_CLOEXEC,
        None,
    )?;
    // SAFETY: an all-zero ifreq is valid: a name of NULs and a union of plain numbers.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    request.ifr_name[0] = b'l' as libc::c_char;
    request.ifr_name[1] = b'o' as libc::c_char;
    request.ifr_ifru.ifru_flags = (libc::IFF_UP | libc::IFF_RUNNING) as libc::c_short;
    // SAFETY: the request outlives the call, names an interface with a NUL at its end, and the
    // kernel only reads it.
    Errno::result(unsafe {
        libc::ioctl(fd.as_raw_fd(), libc::SIOCSIFFLAGS as _, &raw const request)
    })
    .map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_short_for_a_moment_is_tried_again_and_all_else_is_not() {
        let tries = |errnos: &[Errno]| {
            let mut calls = 0;
            let result = retried(|| {
                calls += 1;
                errnos.get(calls - 1).map_or(Ok(()), |errno| Err(*errno))
            });
            (calls, result)
        };
        assert_eq!(tries(&[]), (1, Ok(())));
        assert_eq!(
            tries(&[Errno::EAGAIN, Errno::ENOMEM, Errno::EMFILE]),
            (4, Ok(()))
        );
        assert_eq!(tries(&[Errno::ENOENT]), (1, Err(Errno::ENOENT)));
        assert_eq!(tries(&[Errno::EAGAIN; 200]), (TRIES, Err(Errno::EAGAIN)));
    }

    #[test]
    fn a_process_with_threads_does_not_fork() {
        // The test runner has threads of its own; this one makes sure.
        let (hold, wait) = std::sync::mpsc::channel::<()>();
        let thread = std::thread::spawn(move || wait.recv());
        assert_eq!(
            fork_single_threaded((), |()| 0)
                .err()
                .map(|(errno, ())| errno),
            Some(Errno::EDEADLK)
        );
        drop(hold);
        assert!(thread.join().unwrap().is_err());
    }
}
