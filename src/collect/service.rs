//! Readiness message to systemd.

use anyhow::{Context, Result};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};

/// Notifies systemd that guests can connect from now on, if asked for (`Type=notify`).
pub fn notify_ready() -> Result<()> {
    match std::env::var_os("NOTIFY_SOCKET") {
        Some(socket) => {
            notify(socket.as_bytes(), b"READY=1").context("notify systemd (NOTIFY_SOCKET)")
        }
        None => Ok(()),
    }
}

fn notify(socket: &[u8], text: &[u8]) -> Result<()> {
    let address = match socket.strip_prefix(b"@") {
        Some(name) => SocketAddr::from_abstract_name(name)?,
        None => SocketAddr::from_pathname(std::ffi::OsStr::from_bytes(socket))?,
    };
    UnixDatagram::unbound()?.send_to_addr(text, &address)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn readiness_reaches_a_socket_by_its_abstract_name() {
        let name = format!("kata-gpu-boot-test-{}", std::process::id());
        let address = SocketAddr::from_abstract_name(&name).unwrap();
        let socket = UnixDatagram::bind_addr(&address).unwrap();
        notify(format!("@{name}").as_bytes(), b"READY=1").unwrap();
        let mut got = [0; 16];
        let n = socket.recv(&mut got).unwrap();
        assert_eq!(&got[..n], b"READY=1");
        assert!(notify(b"/no/such/socket", b"READY=1").is_err());
    }
}
