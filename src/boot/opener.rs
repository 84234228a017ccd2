//! Opens GPUs where the death of the worker closes nothing: each in a child of a process of its own, which hands the descriptor to the keeper before
//! the worker has it. The worker's way to the keeper stays open in these processes on purpose: the keeper starts no other worker before it has been
//! given everything that was opened.

use super::keeper::{Held, KeeperSocket, name_process};
use nix::cmsg_space;
use nix::errno::Errno;
use nix::fcntl::{OFlag, open};
use nix::sys::socket::{AddressFamily, ControlMessage, ControlMessageOwned, MsgFlags, SockFlag, SockType, recvmsg, sendmsg, socketpair};
use nix::sys::stat::Mode;
use nix::unistd::{Pid, close};
use std::io::{IoSlice, IoSliceMut};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// Longest request: an address, a NUL, a path.
const MAX_REQUEST: usize = 256;

/// The way to that process, which ends when this is dropped.
pub struct Opener {
    socket: OwnedFd,
    pid: Pid,
}

impl Opener {
    /// Starts it; must be called while this process has one thread. None where that cannot be: the worker then opens by itself.
    ///
    /// GPUs that are held must not be held by the child: one is removed only when nobody has it open any more.
    pub fn start(keeper: &KeeperSocket, held: &[Held]) -> Option<Self> {
        let (ours, theirs) = socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC).ok()?;
        let forked = crate::sys::fork_single_threaded((ours, theirs), |(ours, theirs)| {
            drop(ours);
            for gpu in held {
                let _unused = close(gpu.descriptor);
            }
            name_process("gpuinit-opener");
            crate::sys::forget_children();
            serve(&theirs, keeper);
            0
        });
        let (pid, (socket, _theirs)) = forked.ok()?;
        Some(Self { socket, pid })
    }

    pub fn pid(&self) -> Pid {
        self.pid
    }

    /// Opens a GPU's node without blocking, which starts its initialisation; with drivers before 550.40.07 this returns when that is done. `opening` is
    /// told which process the driver has meanwhile. None when it could not be tried.
    pub fn open(&self, gpu: &str, path: &Path, opening: impl FnOnce(Pid)) -> Option<Result<OwnedFd, Errno>> {
        let (ours, theirs) = socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC).ok()?;
        let parts = [IoSlice::new(gpu.as_bytes()), IoSlice::new(b"\0"), IoSlice::new(path.as_os_str().as_bytes())];
        let reply = [theirs.as_raw_fd()];
        sendmsg::<()>(self.socket.as_raw_fd(), &parts, &[ControlMessage::ScmRights(&reply)], MsgFlags::MSG_NOSIGNAL, None).ok()?;
        // The last one of these is closed by the child: then there is no answer.
        drop(theirs);
        let (child, _) = answer(&ours)?;
        opening(Pid::from_raw(child));
        match answer(&ours)? {
            (0, Some(descriptor)) => Some(Ok(descriptor)),
            (0, None) => None,
            (errno, _) => Some(Err(Errno::from_raw(errno))),
        }
    }
}

/// A number, and a descriptor where there is one.
fn answer(socket: &OwnedFd) -> Option<(i32, Option<OwnedFd>)> {
    let mut number = [0; size_of::<i32>()];
    let (length, descriptors) = receive(socket, &mut number)?;
    (length == number.len()).then(|| (i32::from_ne_bytes(number), descriptors.into_iter().find_map(crate::sys::inherited)))
}

/// One message and its descriptors. None at the end.
fn receive(socket: &OwnedFd, text: &mut [u8]) -> Option<(usize, Vec<RawFd>)> {
    let mut space = cmsg_space!([RawFd; 1]);
    loop {
        let mut parts = [IoSliceMut::new(text)];
        match recvmsg::<()>(socket.as_raw_fd(), &mut parts, Some(&mut space), MsgFlags::MSG_CMSG_CLOEXEC) {
            Ok(message) if message.bytes > 0 => {
                let rights = |part| if let ControlMessageOwned::ScmRights(some) = part { some } else { Vec::new() };
                return Some((message.bytes, message.cmsgs().ok()?.flat_map(rights).collect()));
            }
            Err(Errno::EINTR) => {}
            _ => return None,
        }
    }
}

/// Opens what is asked for, each in a child, until nobody can ask any more.
fn serve(socket: &OwnedFd, keeper: &KeeperSocket) {
    let mut text = [0; MAX_REQUEST];
    while let Some((length, descriptors)) = receive(socket, &mut text) {
        let Some(reply) = descriptors.into_iter().find_map(crate::sys::inherited) else { continue };
        // Without a child nobody answers, and the worker opens by itself.
        let _unused = crate::sys::fork_single_threaded(reply, |reply| {
            let request = text.get(..length).unwrap_or_default();
            if let Some(nul) = request.iter().position(|byte| *byte == 0) {
                let (gpu, path) = (String::from_utf8_lossy(&request[..nul]), std::ffi::OsStr::from_bytes(&request[nul + 1..]));
                open_and_tell(&gpu, Path::new(path), &reply, keeper);
            }
            0
        });
    }
}

/// The keeper first: from then on nothing is lost. An answer that nobody takes any more is the next worker's to ask for.
fn open_and_tell(gpu: &str, path: &Path, reply: &OwnedFd, keeper: &KeeperSocket) {
    let tell = |number: i32, descriptors: &[RawFd]| {
        let rights = [ControlMessage::ScmRights(descriptors)];
        let control = if descriptors.is_empty() { &[][..] } else { &rights };
        let _unused = sendmsg::<()>(reply.as_raw_fd(), &[IoSlice::new(&number.to_ne_bytes())], control, MsgFlags::MSG_NOSIGNAL, None);
    };
    tell(nix::unistd::getpid().as_raw(), &[]);
    match open(path, OFlag::O_RDWR | OFlag::O_NONBLOCK | OFlag::O_CLOEXEC, Mode::empty()) {
        Ok(descriptor) => {
            // Without the keeper the worker holds it alone, as it would have.
            let _unused = keeper.keep(gpu, &descriptor);
            tell(0, &[descriptor.as_raw_fd()]);
        }
        Err(errno) => tell(errno as i32, &[]),
    }
}
