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
    use kata_gpu_test_support::temp_dir;

    #[test]
    fn readiness_reaches_a_socket_by_path_and_by_abstract_name() {
        let dir = temp_dir();
        let path = dir.path().join("notify");
        let name = format!("kata-gpu-boot-test-{}", std::process::id());
        let by_path = (
            UnixDatagram::bind(&path).unwrap(),
            path.to_str().unwrap().to_string(),
        );
        let by_name = (
            UnixDatagram::bind_addr(&SocketAddr::from_abstract_name(&name).unwrap()).unwrap(),
            format!("@{name}"),
        );
        for (socket, address) in [by_path, by_name] {
            notify(address.as_bytes(), b"READY=1").unwrap();
            let mut got = [0; 16];
            let n = socket.recv(&mut got).unwrap();
            assert_eq!(&got[..n], b"READY=1", "{address}");
        }
        assert!(notify(b"/no/such/socket", b"READY=1").is_err());
    }
}
