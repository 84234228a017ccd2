//! Stream for readers in the guest: a unix socket and a vsock port; each connection gets the replay
//! and then the live stream.

use super::stream::{Identity, serve};
use crate::machine::sys;
use crate::stream::ring::Ring;
use kata_gpu_wire::names;
use nix::sys::socket::{
    AddressFamily, Backlog, SockFlag, SockType, UnixAddr, VsockAddr, bind, listen, socket,
};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Semaphore;

/// Readers at once, over both sockets; more wait in the backlog.
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
    start(fd, ring, identity, "unix listener", sys::accept)
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
    start(fd, ring, identity, "vsock listener", sys::accept)
}

/// `accept`: [`sys::accept`], except in tests.
fn start(
    fd: OwnedFd,
    ring: Arc<Ring>,
    identity: Identity,
    sink: &'static str,
    accept: impl Fn(&OwnedFd) -> nix::Result<OwnedFd> + Send + 'static,
) -> io::Result<()> {
    listen(&fd, Backlog::new(READERS as i32).map_err(io::Error::from)?)?;
    let listener = sys::async_fd(fd)?;
    tokio::spawn(async move {
        let places = Arc::new(Semaphore::new(READERS));
        let mut refused = None;
        loop {
            // The semaphore is never closed; the listener's readiness fails only when the runtime
            // ends.
            let Ok(place) = Arc::clone(&places).acquire_owned().await else {
                return;
            };
            let Ok(mut guard) = listener.readable().await else {
                return;
            };
            match accept(listener.get_ref()) {
                Ok(socket) => {
                    refused = None;
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

    #[test]
    fn an_accept_that_fails_again_and_again_pauses_in_between() {
        let folder = temp_dir();
        let path = &folder.path().join("socket");
        let fd = socket(
            AddressFamily::Unix,
            SockType::Stream,
            SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK,
            None,
        )
        .unwrap();
        bind(fd.as_raw_fd(), &UnixAddr::new(path).unwrap()).unwrap();
        let accepts = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&accepts);
        let refused = move |_: &OwnedFd| {
            counted.fetch_add(1, Ordering::Relaxed);
            Err(nix::errno::Errno::EMFILE)
        };
        let identity = Identity {
            boot_id: "00000000-0000-0000-0000-000000000000".into(),
            kernel: String::new(),
        };
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        runtime.block_on(async {
            start(fd, Arc::default(), identity, "unix listener", refused).unwrap();
            let _waits = std::os::unix::net::UnixStream::connect(path).unwrap();
            until(|| accepts.load(Ordering::Relaxed) > 0).await;
            tokio::time::sleep(ACCEPT_PAUSE / 5).await;
        });
        let accepts = accepts.load(Ordering::Relaxed);
        assert!(accepts < 10, "{accepts} accepts");
    }
}
