//! Stream to the collector on the host: connect, replay, follow, reconnect. Everything is
//! non-blocking and runs in this task.
//!
//! Errors of a connect: EAFNOSUPPORT if the kernel has no vsock (net/socket.c), ENODEV while the
//! transport is not bound (net/vmw_vsock/af_vsock.c), ECONNRESET at once without a listener
//! (net/vmw_vsock/virtio_transport_common.c; ETIMEDOUT after 2 s on vhost-device-vsock, cut to
//! 200 ms here).

use super::stream::{Delivered, Identity, serve};
use crate::stream::ring::Ring;
use kata_gpu_wire::names;
use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, SockFlag, SockType, VsockAddr, connect, getsockopt, socket, sockopt,
};
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

/// CID of the host, as seen from any guest (VMADDR_CID_HOST).
pub const HOST_CID: u32 = nix::libc::VMADDR_CID_HOST;
/// Deadline of one connect.
const CONNECT: Duration = Duration::from_millis(200);
/// First and longest pause between two connects.
const PAUSE: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(1));
/// Lifetime below which a connection is brief. After so many in a row they are no longer logged,
/// and the pause grows further: another program has this port, or the collector refuses us, and
/// each try sends the whole stream.
const LASTING: Duration = Duration::from_secs(10);
const BRIEF: u32 = 3;
const LONGEST_PAUSE: Duration = Duration::from_secs(64);

/// Follows the ring to `HOST_CID:port` for ever; returns only when this kernel has no vsock.
pub async fn run(ring: Arc<Ring>, identity: Identity, port: u32, delivered: Delivered) {
    let mut pause = PAUSE.0;
    // Log each state once, not once a try: the stream must not fill with its own troubles.
    let (mut reported, mut brief) = (None, 0);
    loop {
        match open(port).await {
            Ok(socket) => {
                let serving = serve(
                    socket,
                    Arc::clone(&ring),
                    &identity,
                    "vsock",
                    Some(&delivered),
                );
                tokio::pin!(serving);
                let connected =
                    || tracing::info!(name: names::SINK, sink = "vsock", state = "connected");
                let mut is_reported = brief < BRIEF;
                if is_reported {
                    connected();
                }
                let ended = match tokio::time::timeout(LASTING, &mut serving).await {
                    Ok(ended) => {
                        brief += 1;
                        ended
                    }
                    Err(_lasts) => {
                        if !std::mem::replace(&mut is_reported, true) {
                            connected();
                        }
                        (pause, brief) = (PAUSE.0, 0);
                        serving.await
                    }
                };
                if let (true, Err(error)) = (is_reported, ended) {
                    let more = if brief == BRIEF {
                        "; again and again: later losses are not reported"
                    } else {
                        ""
                    };
                    tracing::warn!(
                        name: names::SINK, sink = "vsock", state = "lost",
                        error = %format!("{error}{more}"),
                    );
                }
                reported = None;
            }
            Err(Errno::EAFNOSUPPORT) => {
                let error = "this kernel has no vsock: no events reach the host; use a kernel \
                    with CONFIG_VIRTIO_VSOCKETS, or set gpuinit.events.vsock=off";
                tracing::warn!(name: names::SINK, sink = "vsock", state = "unsupported", error);
                return;
            }
            Err(errno) => {
                if reported != Some(errno) {
                    tracing::debug!(
                        name: names::SINK, sink = "vsock", state = "no listener", errno = %errno,
                    );
                    reported = Some(errno);
                }
            }
        }
        // A new try has no event to wait for: a listener's arrival on the host is invisible here.
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(if brief > BRIEF {
            LONGEST_PAUSE
        } else {
            PAUSE.1
        });
    }
}

async fn open(port: u32) -> Result<OwnedFd, Errno> {
    let fd = socket(
        AddressFamily::Vsock,
        SockType::Stream,
        SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK,
        None,
    )?;
    match connect(fd.as_raw_fd(), &VsockAddr::new(HOST_CID, port)) {
        Ok(()) => return Ok(fd),
        Err(Errno::EINPROGRESS) => {}
        Err(errno) => return Err(errno),
    }
    let socket = crate::machine::sys::async_fd(fd).map_err(|e| crate::machine::files::errno(&e))?;
    match tokio::time::timeout(CONNECT, socket.writable()).await {
        Ok(ready) => drop(ready),
        Err(_over) => return Err(Errno::ETIMEDOUT),
    }
    match getsockopt(socket.get_ref(), sockopt::SocketError)? {
        0 => Ok(socket.into_inner()),
        error => Err(Errno::from_raw(error)),
    }
}
