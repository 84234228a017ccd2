//! Stream for readers in the guest: a unix socket and a vsock port; each connection gets the replay
//! and then the live stream.

use super::stream::{Identity, serve};
use super::vsock::HOST_CID;
use crate::machine::sys;
use crate::stream::ring::Ring;
use kata_gpu_wire::names;
use nix::sys::socket::{
    AddressFamily, Backlog, SockFlag, SockType, UnixAddr, VsockAddr, bind, getpeername, listen,
    socket,
};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Semaphore;

/// Readers at once of each listener and each [`Side`]; more are refused.
const READERS: usize = 8;
/// Pause after a failed accept: no event reports that descriptors or memory are available again.
const ACCEPT_PAUSE: Duration = Duration::from_secs(1);

/// Listens on a unix socket. Errors name the path.
pub fn unix(path: &Path, ring: Arc<Ring>, identity: Identity) -> io::Result<()> {
    let at = |e: nix::Error| io::Error::other(format!("listen on {}: {e}", path.display()));
    // A socket left by an earlier worker of this boot has no listener any more.
    match std::fs::remove_file(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => {
            return Err(io::Error::other(format!(
                "remove stale {}: {e}",
                path.display()
            )));
        }
        Ok(()) | Err(_) => {}
    }
    let fd = socket(
        AddressFamily::Unix,
        SockType::Stream,
        SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK,
        None,
    )
    .map_err(at)?;
    bind(fd.as_raw_fd(), &UnixAddr::new(path).map_err(at)?).map_err(at)?;
    let side = |_: &OwnedFd| Side::Guest;
    start(fd, ring, identity, "unix listener", sys::accept, side)
}

/// Listens on a vsock port of this guest, any CID. Errors name the port.
pub fn vsock(port: u32, ring: Arc<Ring>, identity: Identity) -> io::Result<()> {
    let at = |e: nix::Error| io::Error::other(format!("listen on vsock port {port}: {e}"));
    let fd = socket(
        AddressFamily::Vsock,
        SockType::Stream,
        SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK,
        None,
    )
    .map_err(at)?;
    bind(
        fd.as_raw_fd(),
        &VsockAddr::new(nix::libc::VMADDR_CID_ANY, port),
    )
    .map_err(at)?;
    let side = |socket: &OwnedFd| {
        let address = getpeername::<VsockAddr>(socket.as_raw_fd());
        Side::of(address.ok().map(|address| address.cid()))
    };
    start(fd, ring, identity, "vsock listener", sys::accept, side)
}

/// Side of the VM that a reader is on. Each has places of its own: containers can connect to this
/// port, too, over the guest's own CID or VMADDR_CID_LOCAL, and must not use up the host's places.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Side {
    Guest,
    Host,
}

impl Side {
    /// Side of a vsock peer. The host's CID is the same in every guest; a reader with another, or
    /// an unknown one, is not the host.
    fn of(cid: Option<u32>) -> Self {
        match cid {
            Some(HOST_CID) => Self::Host,
            Some(_) | None => Self::Guest,
        }
    }
}

/// `accept`: [`sys::accept`], except in tests.
fn start(
    fd: OwnedFd,
    ring: Arc<Ring>,
    identity: Identity,
    sink: &'static str,
    accept: impl Fn(&OwnedFd) -> nix::Result<OwnedFd> + Send + 'static,
    side: impl Fn(&OwnedFd) -> Side + Send + 'static,
) -> io::Result<()> {
    listen(&fd, Backlog::new(READERS as i32).map_err(io::Error::from)?)?;
    let listener = sys::async_fd(fd)?;
    tokio::spawn(async move {
        let places = [(); 2].map(|()| Arc::new(Semaphore::new(READERS)));
        let (mut refused, mut is_full) = (None, [false; 2]);
        loop {
            // Fails only when the runtime ends.
            let Ok(mut guard) = listener.readable().await else {
                return;
            };
            match accept(listener.get_ref()) {
                Ok(socket) => {
                    refused = None;
                    let [of_guest, of_host] = &places;
                    let [guest_is_full, host_is_full] = &mut is_full;
                    let (places, is_full) = match side(&socket) {
                        Side::Guest => (of_guest, guest_is_full),
                        Side::Host => (of_host, host_is_full),
                    };
                    // A reader that waited in the backlog would stand in the way of the other side.
                    let Ok(place) = Arc::clone(places).try_acquire_owned() else {
                        if !std::mem::replace(is_full, true) {
                            tracing::debug!(
                                name: names::SINK, sink, state = "reader refused",
                                reason = %format!("{READERS} readers at once are the most"),
                            );
                        }
                        // The next one may wait already: whoever connects without end must not
                        // keep the worker's only thread.
                        tokio::task::yield_now().await;
                        continue;
                    };
                    *is_full = false;
                    let (ring, identity) = (Arc::clone(&ring), identity.clone());
                    tokio::spawn(async move {
                        let gone = serve(socket, ring, &identity, sink, None).await;
                        if let Err(error) = gone {
                            tracing::debug!(
                                name: names::SINK, sink, state = "reader gone", reason = %error,
                            );
                        }
                        drop(place);
                    });
                }
                Err(nix::errno::Errno::EAGAIN) => guard.clear_ready(),
                Err(error) => {
                    // Log each error once: a lasting shortage must not fill the stream.
                    if refused.replace(error) != Some(error) {
                        tracing::warn!(
                            name: names::SINK, sink, state = "accept failed",
                            error = %format!("accept on the {sink}: {error}: trying again every \
                                {ACCEPT_PAUSE:?}"),
                        );
                    }
                    // The connection is still in the backlog, so the listener stays readable.
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            }
        }
    });
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use kata_gpu_test_support::{temp_dir, until};
    use std::sync::atomic::{AtomicUsize, Ordering};
    use tokio::io::{AsyncBufReadExt, BufReader};
    use tokio::net::UnixStream;

    fn bound(path: &Path) -> OwnedFd {
        let fd = socket(
            AddressFamily::Unix,
            SockType::Stream,
            SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK,
            None,
        )
        .unwrap();
        bind(fd.as_raw_fd(), &UnixAddr::new(path).unwrap()).unwrap();
        fd
    }

    fn identity() -> Identity {
        Identity {
            boot_id: "00000000-0000-0000-0000-000000000000".into(),
            kernel: String::new(),
        }
    }

    #[tokio::test]
    async fn readers_in_the_guest_take_no_place_of_the_hosts() {
        let folder = temp_dir();
        let path = &folder.path().join("socket");
        let accepted = AtomicUsize::new(0);
        // The first ones, one more than there are places, are in the guest.
        let side = move |_: &OwnedFd| match accepted.fetch_add(1, Ordering::Relaxed) {
            0..=READERS => Side::Guest,
            _ => Side::Host,
        };
        let (ring, kind) = (Arc::default(), "vsock listener");
        start(bound(path), ring, identity(), kind, sys::accept, side).unwrap();
        let (mut served, mut readers) = (Vec::new(), Vec::new());
        for _ in 0..2 * READERS + 2 {
            let mut reader = BufReader::new(UnixStream::connect(path).await.unwrap());
            // The stream's header, or the end.
            let mut line = String::new();
            reader.read_line(&mut line).await.unwrap();
            served.push(!line.is_empty());
            readers.push(reader);
        }
        let of_each = [vec![true; READERS], vec![false]].concat();
        assert_eq!(served, of_each.repeat(2));
    }

    #[test]
    fn readers_that_connect_without_end_keep_no_other_task_waiting() {
        let (done, is_done) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            let folder = temp_dir();
            let path = &folder.path().join("socket");
            let fd = bound(path);
            let accepts = Arc::new(AtomicUsize::new(0));
            let (counted, peers) = (Arc::clone(&accepts), std::sync::Mutex::new(Vec::new()));
            // Each accept has another connection; the one in the backlog stays there.
            let endless = move |_: &OwnedFd| {
                counted.fetch_add(1, Ordering::Relaxed);
                let (ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
                ours.set_nonblocking(true).unwrap();
                peers.lock().unwrap().truncate(READERS);
                peers.lock().unwrap().push(theirs);
                Ok(OwnedFd::from(ours))
            };
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .unwrap();
            let ring: Arc<Ring> = Arc::default();
            runtime.block_on(async {
                let (kind, side) = ("unix listener", |_: &OwnedFd| Side::Guest);
                start(fd, Arc::clone(&ring), identity(), kind, endless, side).unwrap();
                let _waits = UnixStream::connect(path).await.unwrap();
                until(|| accepts.load(Ordering::Relaxed) > 10 * READERS).await;
            });
            done.send(()).unwrap();
        });
        let ended = is_done.recv_timeout(std::time::Duration::from_secs(60));
        assert!(ended.is_ok(), "the runtime ran nothing else");
    }

    #[test]
    fn only_the_hosts_cid_is_the_host() {
        let local = nix::libc::VMADDR_CID_LOCAL;
        for cid in [None, Some(local), Some(0), Some(3), Some(u32::MAX)] {
            assert_eq!(Side::of(cid), Side::Guest, "{cid:?}");
        }
        assert_eq!(Side::of(Some(2)), Side::Host);
    }

    #[test]
    fn an_accept_that_fails_again_and_again_pauses_in_between() {
        let folder = temp_dir();
        let path = &folder.path().join("socket");
        let fd = bound(path);
        let accepts = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&accepts);
        let refused = move |_: &OwnedFd| {
            counted.fetch_add(1, Ordering::Relaxed);
            Err(nix::errno::Errno::EMFILE)
        };
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        runtime.block_on(async {
            let side = |_: &OwnedFd| Side::Guest;
            start(
                fd,
                Arc::default(),
                identity(),
                "unix listener",
                refused,
                side,
            )
            .unwrap();
            let _waits = UnixStream::connect(path).await.unwrap();
            until(|| accepts.load(Ordering::Relaxed) > 0).await;
            tokio::time::sleep(ACCEPT_PAUSE / 5).await;
        });
        let accepts = accepts.load(Ordering::Relaxed);
        assert!(accepts < 10, "{accepts} accepts");
    }
}
