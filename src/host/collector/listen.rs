//! Where guests reach the collector: the AF_VSOCK port of this machine, and the unix sockets of hybrid vsock.
//!
//! A hybrid vsock device (Cloud Hypervisor, Firecracker, vhost-device-vsock) with the base path `P` turns a guest's connection to host port
//! N into one to the unix socket `P_N`, which has to be there and listening at that moment.

use crate::host::text::printable;
use crate::host::watch::watch;
use anyhow::{Context, Result, anyhow, bail};
use nix::errno::Errno;
use nix::libc::VMADDR_CID_ANY;
use nix::sys::stat::{Mode, fchmod};
use socket2::{Domain, SockAddr, SockRef, Socket, Type};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use tokio::io::unix::AsyncFd;

/// Connections that wait for accept(): as many as the kernel's own limit (net.core.somaxconn) usually lets wait. All VMs of a host share the
/// vsock listener, and one that connects without end must not fill it.
pub const BACKLOG: i32 = 4096;

/// Who may connect to a unix socket, by its file's mode. Less would lock out a VMM that runs as another user (Kata's rootless mode).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// The collector's user and group.
    Group,
    /// Everybody who may enter the directory: Kata lets only the VM's own user into it.
    Directory,
}

impl Access {
    fn mode(self) -> Mode {
        Mode::from_bits_truncate(match self {
            Access::Group => 0o660,
            Access::Directory => 0o666,
        })
    }
}

/// Why there is no AF_VSOCK listener.
#[derive(Debug)]
pub enum NoVsock {
    /// The kernel does not know the address family.
    NotSupported,
    Other(anyhow::Error),
}

/// Who a connection is from. The kernel vouches for a CID; a unix socket's path stands for the VM whose device uses it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Peer {
    Cid(u32),
    Socket(PathBuf),
}

impl Peer {
    /// Who connects at a port through a hybrid vsock device with this base path.
    pub fn of_vm(base: &Path, port: u32) -> Self {
        let mut name = base.as_os_str().to_owned();
        name.push(format!("_{port}"));
        let path = PathBuf::from(name);
        // A name that stays the same however it was written: the boots of a peer are found by it.
        Peer::Socket(std::path::absolute(&path).unwrap_or(path))
    }
}

impl std::fmt::Display for Peer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Peer::Cid(cid) => write!(f, "cid {cid}"),
            Peer::Socket(path) => write!(f, "socket {}", printable(&path.to_string_lossy())),
        }
    }
}

/// A socket that guests can connect to. A unix socket's file goes when the listener goes.
#[derive(Debug)]
pub struct Listener {
    socket: AsyncFd<OwnedFd>,
    path: Option<PathBuf>,
    /// Device and inode of the file at `path`: one that somebody put there since is not ours to remove.
    file: Option<(u64, u64)>,
}

impl Listener {
    /// Listens on a vsock port for all guests of this machine.
    pub fn vsock(port: u32) -> Result<Self, NoVsock> {
        let other = |step: &'static str| move |e: io::Error| NoVsock::Other(anyhow!(e).context(step));
        let socket = Socket::new(Domain::VSOCK, Type::STREAM, None).map_err(|e| match e.raw_os_error().map(Errno::from_raw) {
            Some(Errno::EAFNOSUPPORT | Errno::EPROTONOSUPPORT) => NoVsock::NotSupported,
            _ => NoVsock::Other(anyhow!(e).context("open an AF_VSOCK socket")),
        })?;
        socket.bind(&SockAddr::vsock(VMADDR_CID_ANY, port)).map_err(|e| match e.kind() {
            io::ErrorKind::AddrInUse => {
                NoVsock::Other(anyhow!("vsock port {port} is taken: stop the other collector, or take another --port"))
            }
            _ => NoVsock::Other(anyhow!(e).context(format!("bind vsock port {port}"))),
        })?;
        socket.listen(BACKLOG).map_err(other("listen on vsock"))?;
        socket.set_nonblocking(true).map_err(other("make the vsock listener non-blocking"))?;
        let socket = watch(socket).map_err(other("watch the vsock listener"))?;
        Ok(Self { socket, path: None, file: None })
    }

    /// Listens where a hybrid vsock device with base path `base` brings connections to `port`.
    pub fn hybrid(base: &Path, port: u32, access: Access) -> Result<Self> {
        let mut name = base.as_os_str().to_owned();
        name.push(format!("_{port}"));
        // A name that stays the same however it was written: the boots of a peer are found by it.
        let path =
            std::path::absolute(PathBuf::from(name)).with_context(|| format!("make {} absolute", printable(&base.to_string_lossy())))?;
        let address = SockAddr::unix(&path).with_context(|| {
            format!("socket path {} ({} bytes, the kernel takes 107): choose a shorter one", path.display(), path.as_os_str().len())
        })?;
        remove_stale(&path, &address)?;
        let socket = Socket::new(Domain::UNIX, Type::STREAM, None).context("open a unix socket")?;
        // bind() gives the file the mode of the socket's own inode. A chmod by name afterwards could be led elsewhere by a link, because a
        // jailed VMM may write into the directory.
        fchmod(&socket, access.mode()).context("set the mode of a unix socket")?;
        socket.bind(&address).with_context(|| format!("bind {}: the folder has to be there and writable", path.display()))?;
        // From here on the file is ours, and goes when `listener` goes.
        socket.listen(BACKLOG).with_context(|| format!("listen on {}", path.display()))?;
        socket.set_nonblocking(true).context("make the listener non-blocking")?;
        let socket = watch(socket).context("watch the listener")?;
        let file = inode(&path);
        Ok(Self { socket, path: Some(path), file })
    }

    /// The VM that every connection is from; None where one socket serves all VMs.
    pub fn peer(&self) -> Option<Peer> {
        self.path.clone().map(Peer::Socket)
    }

    /// Where guests connect to, for people.
    pub fn place(&self) -> String {
        match &self.path {
            Some(path) => printable(&path.to_string_lossy()),
            None => match SockRef::from(self.socket.get_ref()).local_addr().ok().and_then(|a| a.as_vsock_address()) {
                Some((_, port)) => format!("vsock port {port}"),
                None => "vsock".to_string(),
            },
        }
    }

    /// The next connection.
    pub async fn accept(&self) -> io::Result<(OwnedFd, Peer)> {
        loop {
            let mut ready = self.socket.readable().await?;
            let Ok(accepted) = ready.try_io(|fd| SockRef::from(fd.get_ref()).accept()) else { continue };
            return self.taken(accepted?);
        }
    }

    /// A connection that waits already, if one does.
    pub fn accept_now(&self) -> io::Result<Option<(OwnedFd, Peer)>> {
        match SockRef::from(self.socket.get_ref()).accept() {
            Ok(accepted) => self.taken(accepted).map(Some),
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => Ok(None),
            Err(e) => Err(e),
        }
    }

    fn taken(&self, (socket, address): (Socket, SockAddr)) -> io::Result<(OwnedFd, Peer)> {
        socket.set_nonblocking(true)?;
        let peer = match &self.path {
            Some(path) => Peer::Socket(path.clone()),
            None => match address.as_vsock_address() {
                Some((cid, _)) => Peer::Cid(cid),
                None => return Err(io::Error::other("a vsock connection without a CID")),
            },
        };
        Ok((socket.into(), peer))
    }
}

/// Device and inode of what has that name, if anything has.
fn inode(path: &Path) -> Option<(u64, u64)> {
    path.symlink_metadata().ok().map(|meta| (meta.dev(), meta.ino()))
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let Some(path) = &self.path
            && self.file.is_some()
            && inode(path) == self.file
            && let Err(e) = std::fs::remove_file(path)
            && e.kind() != io::ErrorKind::NotFound
        {
            eprintln!("kata-gpu-boot: remove {}: {e}", printable(&path.to_string_lossy()));
        }
    }
}

/// Makes room for a socket: removes the file of a dead listener, and nothing else.
fn remove_stale(path: &Path, address: &SockAddr) -> Result<()> {
    let kind = match std::fs::symlink_metadata(path) {
        Ok(meta) => meta.file_type(),
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(e) => return Err(e).with_context(|| format!("look at {}", path.display())),
    };
    if !kind.is_socket() {
        bail!("{} is there and is not a socket: move it away, or choose another --uds", path.display());
    }
    let probe = Socket::new(Domain::UNIX, Type::STREAM, None).context("open a unix socket")?;
    // A full backlog must not hold us up; it also means that somebody listens.
    probe.set_nonblocking(true).context("make a socket non-blocking")?;
    match probe.connect(address) {
        Err(e) if e.kind() == io::ErrorKind::ConnectionRefused => {
            std::fs::remove_file(path).with_context(|| format!("remove the stale socket {}", path.display()))
        }
        Ok(()) => bail!("{} is in use: stop the other collector, or choose another --uds", path.display()),
        Err(e) => Err(e).with_context(|| format!("see whether somebody listens on {}", path.display())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::testing::TempDir;
    use std::os::unix::net::UnixListener;

    #[tokio::test]
    async fn a_stale_socket_is_replaced_and_a_live_one_is_not() {
        let dir = TempDir::new();
        let base = dir.path().join("v");
        let path = dir.path().join("v_10241");
        drop(UnixListener::bind(&path).unwrap()); // leaves its file behind
        let live = Listener::hybrid(&base, 10241, Access::Group).unwrap();
        let refused = Listener::hybrid(&base, 10241, Access::Group).unwrap_err().to_string();
        assert!(refused.contains("in use"), "{refused}");
        assert!(path.exists(), "the refused one did not take the live one's file away");
        drop(live);
        assert!(!path.exists());
    }

    #[tokio::test]
    async fn a_file_that_is_no_socket_is_left_alone() {
        let dir = TempDir::new();
        let path = dir.path().join("v_1");
        std::fs::write(&path, "precious").unwrap();
        let refused = Listener::hybrid(&dir.path().join("v"), 1, Access::Group).unwrap_err().to_string();
        assert!(refused.contains("not a socket"), "{refused}");
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "precious");
    }

    #[tokio::test]
    async fn a_path_that_is_too_long_says_so() {
        let refused = Listener::hybrid(Path::new(&format!("/tmp/{}", "x".repeat(120))), 1, Access::Group).unwrap_err().to_string();
        assert!(refused.contains("choose a shorter one"), "{refused}");
    }
}
