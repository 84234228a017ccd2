//! Opens GPUs, and binds GPUs whose bind also enables them; the death of the worker closes no
//! descriptor. Each runs in a child of a separate process, which hands the descriptor to the keeper
//! before the worker gets it. The worker's connection to the keeper stays open in these processes
//! on purpose: the keeper must start no other worker before it has every opened descriptor. After
//! that the child of an open watches for the end of the initialisation's first part.

use super::keeper_socket::{Held, KeeperSocket};
use super::{HelperPid, reply, start_helper};
use crate::gpu::adapter::wait_attached;
use crate::gpu::bind::{Bound, PciSysfs};
use crate::gpu::pci::SYS;
use kata_gpu_wire::pci_address::PciAddress;
use nix::errno::Errno;
use nix::fcntl::{OFlag, open};
use nix::poll::{PollFd, PollFlags, poll};
use nix::sys::socket::{Shutdown, shutdown};
use nix::sys::stat::Mode;
use nix::unistd::{Pid, close};
use std::ffi::OsStr;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// Longest request: an address, a NUL, a path; no path: bind.
const MAX_REQUEST: usize = 256;

/// Path of a GPU's node, without its minor.
const NODE: &str = "/dev/nvidia";
/// Pause between two questions whether an initialisation has begun, in ms.
const ASK_EVERY: u8 = 5;

/// The worker's end; the process ends on drop.
pub struct Opener {
    socket: OwnedFd,
    pid: HelperPid,
}

/// The wait for the end of an initialisation's first part.
pub struct Attach(OwnedFd);

impl Attach {
    /// Blocks until that part is over, and returns true; false when this is not seen.
    pub fn wait(&self) -> bool {
        matches!(reply::answered(&self.0), Some((1, _)))
    }

    /// Ends the wait, also the opener's process.
    pub fn end(&self) {
        // Fails only where that process has ended.
        let _unused = shutdown(self.0.as_raw_fd(), Shutdown::Both);
    }
}

impl Opener {
    /// Starts the process; must be called while this process has one thread. None where that fails:
    /// the worker then opens by itself.
    pub fn start(keeper: &KeeperSocket, held: &[Held]) -> Option<Self> {
        let (pid, socket) = start_helper("opener", held, |socket| {
            crate::machine::sys::forget_children();
            serve(socket, keeper);
        })?;
        Some(Self { socket, pid })
    }

    pub fn pid(&self) -> HelperPid {
        self.pid.clone()
    }

    /// Opens a GPU's node with O_NONBLOCK, which starts its initialisation; with drivers before
    /// 550.40.07 this returns when the initialisation is over. `opening` gets the process that is
    /// in the driver meanwhile. None when the open could not be tried.
    pub fn open(
        &self,
        gpu: &str,
        path: &Path,
        opening: impl FnOnce(Pid),
    ) -> Option<Result<(OwnedFd, Attach), Errno>> {
        let answers = reply::ask(
            &self.socket,
            &[gpu.as_bytes(), b"\0", path.as_os_str().as_bytes()],
        )?;
        let (child, _) = reply::answered(&answers)?;
        opening(Pid::from_raw(i32::try_from(child).ok()?));
        match reply::answered(&answers)? {
            (0, Some(descriptor)) => Some(Ok((descriptor, Attach(answers)))),
            (0, None) => None,
            (errno, _) => Some(Err(Errno::from_raw(i32::try_from(errno).ok()?))),
        }
    }

    /// Binds a GPU to the driver; blocks until its probe is over. `binding` gets the process that
    /// is in the driver meanwhile. None when the bind could not be tried.
    pub fn bind(&self, gpu: PciAddress, binding: impl FnOnce(Pid)) -> Option<Result<(), Errno>> {
        let answers = reply::ask(&self.socket, &[gpu.to_string().as_bytes(), b"\0"])?;
        let (child, _) = reply::answered(&answers)?;
        binding(Pid::from_raw(i32::try_from(child).ok()?));
        match reply::answered(&answers)?.0 {
            0 => Some(Ok(())),
            errno => Some(Err(Errno::from_raw(i32::try_from(errno).ok()?))),
        }
    }
}

/// Opens or binds each requested GPU in a child of its own, until the last requester is gone.
fn serve(socket: &OwnedFd, keeper: &KeeperSocket) {
    let mut text = [0; MAX_REQUEST];
    while let Some((length, answers)) = reply::asked(socket, &mut text) {
        let Some(answers) = answers else { continue };
        // Without a child no answer comes, and the worker does the work by itself.
        let _unused = crate::machine::sys::fork_single_threaded(answers, |answers| {
            let request = text.get(..length).unwrap_or_default();
            let mut parts = request.splitn(2, |byte| *byte == 0);
            if let (Some(gpu), Some(path)) = (parts.next(), parts.next()) {
                let gpu = String::from_utf8_lossy(gpu);
                reply::answer(&answers, nix::unistd::getpid().as_raw().into(), None);
                match gpu.parse() {
                    Ok(gpu) if path.is_empty() => reply::answer(&answers, bind(gpu), None),
                    _ => {
                        let path = Path::new(OsStr::from_bytes(path));
                        if open_and_hand_over(&gpu, path, &answers, keeper) {
                            // The driver may keep this process for ever: nothing may wait for its
                            // descriptors.
                            let _unused = close(keeper.0.as_raw_fd());
                            let _unused = close(socket.as_raw_fd());
                            watch_attach(&gpu, path, &answers);
                        }
                    }
                }
            }
            0
        });
    }
}

/// Binds a GPU; returns the error's number, or 0.
fn bind(gpu: PciAddress) -> i64 {
    PciSysfs::at(Path::new(SYS))
        .bind(gpu)
        .map_or_else(|e| e.errno().unwrap_or(Errno::EIO) as i64, |()| 0)
}

/// Opens a GPU and hands the descriptor to the keeper first, so that no death loses it. If the
/// worker is gone before the answer, the next worker gets the descriptor from the keeper. True
/// where the initialisation has begun.
fn open_and_hand_over(gpu: &str, path: &Path, answers: &OwnedFd, keeper: &KeeperSocket) -> bool {
    match open(
        path,
        OFlag::O_RDWR | OFlag::O_NONBLOCK | OFlag::O_CLOEXEC,
        Mode::empty(),
    ) {
        Ok(descriptor) => {
            // Without the keeper, the worker holds the descriptor alone.
            let _unused = keeper.keep(gpu, &descriptor);
            reply::answer(answers, 0, Some(&descriptor));
            true
        }
        Err(errno) => {
            reply::answer(answers, errno as i64, None);
            false
        }
    }
}

/// Answers when the first part of the initialisation is over. No answer: that is not seen.
fn watch_attach(gpu: &str, path: &Path, answers: &OwnedFd) {
    let minor = path.to_str().and_then(|path| path.strip_prefix(NODE));
    let (Ok(bound), Some(Ok(minor))) = (gpu.parse::<Bound>(), minor.map(str::parse)) else {
        return;
    };
    // The worker closes its end when the initialisation is over.
    let is_over = || {
        let mut ours = [PollFd::new(answers.as_fd(), PollFlags::empty())];
        poll(&mut ours, ASK_EVERY) != Ok(0)
    };
    if wait_attached(bound.address, minor, is_over) == Ok(true) {
        reply::answer(answers, 1, None);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_attach_is_seen_or_its_wait_ends_on_both_sides() {
        let (ours, theirs) = reply::pair().unwrap();
        let attach = Attach(ours);
        reply::answer(&theirs, 1, None);
        assert!(attach.wait());
        let gone = || {
            let mut end = [PollFd::new(theirs.as_fd(), PollFlags::empty())];
            poll(&mut end, 0_u8) != Ok(0)
        };
        assert!(!gone());
        attach.end();
        assert!(!attach.wait());
        assert!(gone());
        let (ours, theirs) = reply::pair().unwrap();
        drop(theirs);
        assert!(!Attach(ours).wait(), "a child without an answer");
    }
}
