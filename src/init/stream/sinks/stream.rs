//! A connection of the stream over any socket: header, replay from the oldest record, then live;
//! pings are answered in between.
//!
//! Only this task waits for the peer. The peer is never trusted: its input is read in a bounded
//! buffer, and only ping lines mean something.

use crate::machine::clock::boottime_ns;
use crate::stream::ring::{Reader, Ring};
use kata_gpu_wire::record::{Header, Pong, SCHEMA, header_line, ping, pong_line};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use tokio::io::unix::AsyncFd;
use tokio::io::{Interest, Ready};

/// Records taken from the ring at once; bounds what one connection copies.
const BATCH: usize = 64;
/// Limit of bytes that wait for a peer; above it nothing is read from the peer.
const MAX_PENDING: usize = 64 * 1024;
/// Longest input line of a peer; a ping has about 30 bytes.
const MAX_INPUT: usize = 256;

/// Identity of this boot; the header of every connection.
#[derive(Clone, Debug)]
pub struct Identity {
    pub boot_id: String,
    pub kernel: String,
}

impl Identity {
    /// Reads boot id and kernel version of the running guest; an unreadable one becomes a valid
    /// placeholder, because a stream without it is still useful.
    pub fn read() -> Self {
        let read = |path: &str| std::fs::read_to_string(path).map(|t| t.trim().to_string());
        Self {
            boot_id: read("/proc/sys/kernel/random/boot_id")
                .unwrap_or_else(|_| "00000000-0000-0000-0000-000000000000".into()),
            kernel: read("/proc/sys/kernel/osrelease").unwrap_or_else(|_| "unknown".into()),
        }
    }

    /// The header line for a stream that starts at `first_seq`.
    pub fn header(&self, first_seq: u64) -> String {
        header_line(&Header {
            boot_id: self.boot_id.clone(),
            version: env!("CARGO_PKG_VERSION").into(),
            kernel: self.kernel.clone(),
            first_seq,
        })
    }
}

/// Progress of a sink: the `seq` behind the last record written to its socket.
pub type Delivered = tokio::sync::watch::Sender<u64>;

/// Serves the stream over a connected non-blocking socket until the peer is gone or the socket
/// fails. Never returns Ok.
pub async fn serve(
    socket: OwnedFd,
    ring: Arc<Ring>,
    identity: &Identity,
    sink: &'static str,
    delivered: Option<&Delivered>,
) -> io::Result<()> {
    let socket = crate::machine::sys::async_fd(socket)?;
    let mut grown = ring.subscribe();
    let first = ring.first_seq();
    let mut reader = Reader::new(ring, sink, first);
    let mut output = identity.header(first).into_bytes();
    let mut sent = 0;
    let mut input = Input::default();
    loop {
        if sent == output.len() {
            output.clear();
            sent = 0;
            if let Some(delivered) = delivered {
                delivered.send_replace(reader.next());
            }
            for line in reader.read(BATCH) {
                output.extend_from_slice(line.as_bytes());
            }
        }
        // A peer that sends pings but does not read is not read from: its answers would pile up
        // here.
        let interest = match output.len() {
            0 => Interest::READABLE,
            n if n < MAX_PENDING => Interest::READABLE | Interest::WRITABLE,
            _ => Interest::WRITABLE,
        };
        tokio::select! {
            // The sender lives as long as the ring: no error is possible.
            _changed = grown.changed(), if output.is_empty() => {}
            ready = socket.ready(interest) => {
                let mut guard = ready?;
                if interest.is_readable() && guard.ready().is_readable() {
                    match input.read(&socket) {
                        Ok(pings) => {
                            for id in pings {
                                let pong = Pong { pong: id, boottime_ns: boottime_ns() };
                                output.extend_from_slice(pong_line(pong).as_bytes());
                            }
                        }
                        Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                            guard.clear_ready_matching(Ready::READABLE);
                        }
                        Err(e) => return Err(e),
                    }
                }
                if guard.ready().is_writable() && sent < output.len() {
                    match send(&socket, &output[sent..]) {
                        Ok(n) => sent += n,
                        Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                            guard.clear_ready_matching(Ready::WRITABLE);
                        }
                        Err(e) => return Err(e),
                    }
                }
            }
        }
    }
}

fn send(socket: &AsyncFd<OwnedFd>, bytes: &[u8]) -> io::Result<usize> {
    use nix::sys::socket::{MsgFlags, send};
    Ok(send(
        socket.as_raw_fd(),
        bytes,
        MsgFlags::MSG_NOSIGNAL | MsgFlags::MSG_DONTWAIT,
    )?)
}

/// The peer's input, cut into lines.
#[derive(Default)]
struct Input {
    line: Vec<u8>,
    /// Whether the line is over-long: skip to its newline.
    skipping: bool,
}

impl Input {
    /// Reads once and returns the ids of complete pings.
    fn read(&mut self, socket: &AsyncFd<OwnedFd>) -> io::Result<Vec<u64>> {
        let mut buffer = [0_u8; 512];
        let n = nix::sys::socket::recv(
            socket.as_raw_fd(),
            &mut buffer,
            nix::sys::socket::MsgFlags::MSG_DONTWAIT,
        )?;
        if n == 0 {
            return Err(io::Error::new(
                io::ErrorKind::UnexpectedEof,
                "the reader closed the connection",
            ));
        }
        Ok(self.take(buffer.get(..n).unwrap_or_default()))
    }

    fn take(&mut self, bytes: &[u8]) -> Vec<u64> {
        let mut pings = Vec::new();
        for &byte in bytes {
            match byte {
                b'\n' => {
                    if !std::mem::take(&mut self.skipping) {
                        pings.extend(ping(&self.line));
                    }
                    self.line.clear();
                }
                _ if self.line.len() >= MAX_INPUT => self.skipping = true,
                _ => self.line.push(byte),
            }
        }
        pings
    }
}

const _: () = assert!(
    SCHEMA == 1,
    "the peer's side of the protocol above is that of schema 1"
);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pings_are_found_among_garbage_and_across_reads() {
        let mut input = Input::default();
        assert_eq!(input.take(b"hello\n{\"schema\":1,\"pi"), Vec::<u64>::new());
        assert_eq!(input.take(b"ng\":5}\n\xff\xff\n"), [5]);
        let mut long = vec![b'x'; 10_000];
        long.extend_from_slice(b"{\"schema\":1,\"ping\":6}\n{\"schema\":1,\"ping\":7}\n");
        assert_eq!(input.take(&long), [7]);
        // A newer host's, with what only that host knows.
        assert_eq!(
            input.take(b"{\"schema\":2,\"ping\":8,\"realtime_ns\":1}\n{\"schema\":3,\"ping\":9}\n"),
            [8]
        );
        assert!(input.line.len() <= MAX_INPUT);
    }
}
