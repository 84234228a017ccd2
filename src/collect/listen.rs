//! Sockets that guests connect to: the AF_VSOCK port of this machine, and the unix sockets of
//! hybrid vsock.
//!
//! A hybrid vsock device (Cloud Hypervisor, Firecracker, vhost-device-vsock) with the base path `P`
//! turns a guest's connection to host port N into a connection to the unix socket `P_N`, which has
//! to listen at that moment. Any process that may enter the VMM's directory can connect there: only
//! a process of the VMM's user, or root's, counts as a guest ([`Stranger`]).

use super::vmm::{FileId, Vmm, socket_at};
use anyhow::{Context, Result, anyhow, bail};
use kata_gpu_host::async_fd::watch;
use kata_gpu_report::data::text::printable;
use nix::errno::Errno;
use nix::fcntl::{AtFlags, OFlag, open};
use nix::libc::{VMADDR_CID_ANY, VMADDR_CID_HOST};
use nix::sys::socket::{getsockopt, sockopt};
use nix::sys::stat::{FileStat, Mode, fchmod, fstatat};
use nix::unistd::{UnlinkatFlags, unlinkat};
use socket2::{Domain, SockAddr, SockRef, Socket, Type};
use std::ffi::OsStr;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use tokio::io::unix::AsyncFd;

/// Connections that wait for accept(): the kernel's usual limit (net.core.somaxconn). All VMs of a
/// host share the vsock listener, and a VM that connects without end must not fill it.
pub const BACKLOG: i32 = 4096;

/// Mode of a --uds socket: the collector's user and group may connect.
const UDS_MODE: Mode = Mode::from_bits_truncate(0o660);
/// Mode of a socket next to a VMM's: everybody, because a VMM may run as another user (Kata's
/// rootless mode). The user is checked at the connection.
const VM_MODE: Mode = Mode::from_bits_truncate(0o666);

/// User that may connect everywhere: root may as well be the VMM.
const ROOT: u32 = 0;

/// The source of a connection. The kernel vouches for a CID and a user; a unix socket's path stands
/// for the VM whose device uses it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Peer {
    Cid(u32),
    Socket(PathBuf),
    /// A user of this machine that is not the VMM's.
    User(u32),
}

impl Peer {
    /// Peer of connections to `port` through the hybrid vsock device with base path `base`.
    pub fn of_vm(base: &Path, port: u32) -> Self {
        Peer::Socket(with_port(base, port))
    }
}

impl std::fmt::Display for Peer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Peer::Cid(cid) => write!(f, "cid {cid}"),
            Peer::Socket(path) => write!(f, "socket {}", shown(path)),
            Peer::User(uid) => write!(f, "user {uid}"),
        }
    }
}

fn shown(path: &Path) -> String {
    printable(&path.to_string_lossy())
}

/// A process that connected and is no guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stranger {
    /// Peer that the log lines count against.
    pub peer: Peer,
    pub why: String,
}

/// A connection of a guest, or the stranger that made it.
pub type Arrival = Result<(OwnedFd, Peer), Stranger>;

/// File of a unix socket of ours. The held directory finds the file after a rename.
#[derive(Debug)]
pub struct SocketFile {
    dir: OwnedFd,
    path: PathBuf,
    id: FileId,
    /// Set at the removal: the inode's number may be another file's afterwards.
    removed: AtomicBool,
}

impl SocketFile {
    fn name(path: &Path) -> &OsStr {
        path.file_name().unwrap_or_default()
    }

    /// Binds `path`, which is in `dir`.
    fn bind(dir: OwnedFd, path: PathBuf, mode: Mode) -> Result<(Socket, Self)> {
        let name = Self::name(&path);
        // Bind through the held directory: its name may lead elsewhere by now.
        let held = Path::new("/proc/self/fd")
            .join(dir.as_raw_fd().to_string())
            .join(name);
        let address = SockAddr::unix(&held).with_context(|| {
            format!(
                "name of the socket {} ({} bytes, the kernel takes some 80): choose a shorter one",
                path.display(),
                name.len()
            )
        })?;
        remove_stale(&dir, &path, &address)?;
        let socket = Socket::new(Domain::UNIX, Type::STREAM, None).context("open a unix socket")?;
        // bind() gives the file the mode of the socket's own inode. A chmod by name afterwards
        // could be led elsewhere by a link, because a jailed VMM may write into the directory.
        fchmod(&socket, mode).context("set the mode of a unix socket")?;
        socket.bind(&address).with_context(|| {
            format!(
                "bind {}: its directory has to be writable, and /proc mounted",
                path.display()
            )
        })?;
        let stat = socket_at(&dir, name).with_context(|| format!("look at {}", path.display()))?;
        let stat = stat.with_context(|| format!("{} was removed at once", path.display()))?;
        Ok((
            socket,
            Self {
                dir,
                id: FileId::from(&stat),
                path,
                removed: AtomicBool::new(false),
            },
        ))
    }

    /// Removes the file, once, but never a file that somebody put in its place.
    pub fn remove(&self) {
        let name = Self::name(&self.path);
        let is_ours = |stat: &FileStat| FileId::from(stat) == self.id;
        let there = socket_at(&self.dir, name).ok().flatten();
        if self.removed.swap(true, Ordering::Relaxed) || !there.as_ref().is_some_and(is_ours) {
            return;
        }
        if let Err(e) = unlinkat(&self.dir, name, UnlinkatFlags::NoRemoveDir)
            && e != Errno::ENOENT
        {
            eprintln!("kata-gpu-boot: remove {}: {e}", shown(&self.path));
        }
    }
}

/// A socket that guests can connect to. A unix socket's file goes when the listener goes.
#[derive(Debug)]
pub struct Listener {
    socket: AsyncFd<OwnedFd>,
    file: Option<Arc<SocketFile>>,
    /// VMM that may connect; None where the file's mode decides.
    vmm: Option<Arc<Vmm>>,
}

impl Listener {
    /// Listens on a vsock port for all guests of this machine. None where the kernel does not know
    /// the address family.
    pub fn vsock(port: u32) -> Result<Option<Self>> {
        let socket = match Socket::new(Domain::VSOCK, Type::STREAM, None) {
            Ok(socket) => socket,
            Err(e) => match e.raw_os_error().map(Errno::from_raw) {
                Some(Errno::EAFNOSUPPORT | Errno::EPROTONOSUPPORT) => return Ok(None),
                _ => return Err(e).context("open an AF_VSOCK socket"),
            },
        };
        let address = SockAddr::vsock(VMADDR_CID_ANY, port);
        socket.bind(&address).map_err(|e| match e.kind() {
            io::ErrorKind::AddrInUse => anyhow!(
                "vsock port {port} is taken: stop the other collector, or take another --port"
            ),
            _ => anyhow!(e).context(format!("bind vsock port {port}")),
        })?;
        let socket = listen(socket).with_context(|| format!("listen on vsock port {port}"))?;
        Ok(Some(Self {
            socket,
            file: None,
            vmm: None,
        }))
    }

    /// Listens for connections to `port` of the hybrid vsock device with base path `base`; the
    /// file's mode decides who may connect.
    pub fn hybrid(base: &Path, port: u32) -> Result<Self> {
        // Make the path absolute: it identifies the peer of a boot.
        let path = std::path::absolute(with_port(base, port))
            .with_context(|| format!("make {} absolute", shown(base)))?;
        let dir = open(
            path.parent().unwrap_or(&path),
            OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC,
            Mode::empty(),
        )
        .with_context(|| {
            format!(
                "bind {}: the folder has to be there and writable",
                path.display()
            )
        })?;
        Self::unix(dir, path, UDS_MODE, None)
    }

    /// Listens next to a VMM's socket, for that VMM alone.
    pub fn of_vmm(vmm: &Arc<Vmm>, port: u32) -> Result<Self> {
        let dir = vmm.dir().try_clone().context("dup a directory")?;
        Self::unix(dir, with_port(vmm.path(), port), VM_MODE, Some(vmm.clone()))
    }

    fn unix(dir: OwnedFd, path: PathBuf, mode: Mode, vmm: Option<Arc<Vmm>>) -> Result<Self> {
        let (socket, file) = SocketFile::bind(dir, path, mode)?;
        // From here on `file.remove()` or the drop of the listener removes the file.
        match listen(socket) {
            Ok(socket) => Ok(Self {
                socket,
                file: Some(Arc::new(file)),
                vmm,
            }),
            Err(e) => {
                file.remove();
                Err(e).with_context(|| format!("listen on {}", file.path.display()))
            }
        }
    }

    /// File of the socket, to remove it before the listener goes.
    pub fn file(&self) -> Option<&Arc<SocketFile>> {
        self.file.as_ref()
    }

    /// Address that guests connect to, for people.
    pub fn place(&self) -> String {
        if let Some(file) = &self.file {
            return shown(&file.path);
        }
        let address = SockRef::from(self.socket.get_ref()).local_addr();
        let address = address.ok().and_then(|address| address.as_vsock_address());
        address.map_or("vsock".into(), |(_, port)| format!("vsock port {port}"))
    }

    /// The next connection.
    pub async fn accept(&self) -> io::Result<Arrival> {
        loop {
            let mut ready = self.socket.readable().await?;
            let Ok(accepted) = ready.try_io(|fd| SockRef::from(fd.get_ref()).accept()) else {
                continue;
            };
            return self.taken(accepted?);
        }
    }

    /// A waiting connection, if there is one.
    pub fn accept_now(&self) -> io::Result<Option<Arrival>> {
        match SockRef::from(self.socket.get_ref()).accept() {
            Ok(accepted) => self.taken(accepted).map(Some),
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => Ok(None),
            Err(e) => Err(e),
        }
    }

    fn taken(&self, (socket, address): (Socket, SockAddr)) -> io::Result<Arrival> {
        socket.set_nonblocking(true)?;
        let Some(file) = &self.file else {
            let Some((cid, _)) = address.as_vsock_address() else {
                return Err(io::Error::other("a vsock connection without a CID"));
            };
            return Ok(guest(cid).map(|peer| (socket.into(), peer)));
        };
        let peer = Peer::Socket(file.path.clone());
        if let Some(vmm) = &self.vmm {
            let Some(owner) = vmm.owner() else {
                let why = format!("{peer}: refused: the VMM's socket next to it was replaced");
                return Ok(Err(Stranger { peer, why }));
            };
            // Credentials of the process at its connect(2).
            let uid = getsockopt(&socket, sockopt::PeerCredentials)?.uid();
            if uid != owner && uid != ROOT {
                return Ok(Err(Stranger {
                    peer: Peer::User(uid),
                    why: format!(
                        "{peer}: refused a process of user {uid}: its VMM is user {owner}'s"
                    ),
                }));
            }
        }
        Ok(Ok((socket.into(), peer)))
    }
}

/// Makes a bound socket one that tokio accepts on.
fn listen(socket: Socket) -> io::Result<AsyncFd<OwnedFd>> {
    socket.listen(BACKLOG)?;
    socket.set_nonblocking(true)?;
    watch(socket)
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let Some(file) = &self.file {
            file.remove();
        }
    }
}

/// Peer of a CID, unless the kernel uses the CID for something else: vsock(7).
fn guest(cid: u32) -> Result<Peer, Stranger> {
    let peer = Peer::Cid(cid);
    if cid > VMADDR_CID_HOST {
        return Ok(peer);
    }
    let why = format!(
        "{peer}: refused: no guest has it (0 is the hypervisor, 1 this machine, 2 its host)"
    );
    Err(Stranger { peer, why })
}

/// `<base>_<port>`.
fn with_port(base: &Path, port: u32) -> PathBuf {
    let mut name = base.as_os_str().to_owned();
    name.push(format!("_{port}"));
    PathBuf::from(name)
}

/// Makes room for a socket: removes the file of a dead listener, and nothing else.
fn remove_stale(dir: &OwnedFd, path: &Path, address: &SockAddr) -> Result<()> {
    let name = SocketFile::name(path);
    let look = || socket_at(dir, name).with_context(|| format!("look at {}", path.display()));
    let Some(stale) = look()? else {
        if fstatat(dir, name, AtFlags::AT_SYMLINK_NOFOLLOW).is_ok() {
            bail!(
                "{} exists and is not a socket: remove it, or choose another --uds",
                path.display()
            );
        }
        return Ok(());
    };
    let probe = Socket::new(Domain::UNIX, Type::STREAM, None).context("open a unix socket")?;
    // Do not block on a full backlog: it means that somebody listens.
    probe
        .set_nonblocking(true)
        .context("make a socket non-blocking")?;
    match probe.connect(address) {
        Err(e) if e.kind() == io::ErrorKind::ConnectionRefused => {
            let same = look()?.is_some_and(|now| FileId::from(&now) == FileId::from(&stale));
            if same {
                unlinkat(dir, name, UnlinkatFlags::NoRemoveDir)
                    .with_context(|| format!("remove the stale socket {}", path.display()))?;
            }
            Ok(())
        }
        Ok(()) => bail!(
            "{} is in use: stop the other collector, or choose another --uds",
            path.display()
        ),
        Err(e) => Err(e).with_context(|| format!("test for a listener on {}", path.display())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kata_gpu_test_support::temp_dir;
    use std::os::unix::net::UnixListener;

    #[tokio::test]
    async fn a_stale_socket_is_replaced_and_a_live_one_is_not() {
        let dir = temp_dir();
        let base = dir.path().join("v");
        let path = dir.path().join("v_10241");
        drop(UnixListener::bind(&path).unwrap()); // leaves its file behind
        let live = Listener::hybrid(&base, 10241).unwrap();
        let refused = Listener::hybrid(&base, 10241).unwrap_err().to_string();
        assert!(refused.contains("in use"), "{refused}");
        assert!(
            path.exists(),
            "the refused one did not take the live one's file away"
        );
        drop(live);
        assert!(!path.exists());
    }

    #[tokio::test]
    async fn a_file_that_is_no_socket_is_left_alone() {
        let dir = temp_dir();
        let path = dir.path().join("v_1");
        std::fs::write(&path, "precious").unwrap();
        let refused = Listener::hybrid(&dir.path().join("v"), 1)
            .unwrap_err()
            .to_string();
        assert!(refused.contains("not a socket"), "{refused}");
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "precious");
    }

    #[tokio::test]
    async fn only_our_own_socket_is_removed_wherever_it_is() {
        let dir = temp_dir();
        let at = |path: &str| dir.path().join(path);
        std::fs::create_dir(at("one")).unwrap();
        let ours = Listener::hybrid(&at("one/v"), 1).unwrap();
        // Move the socket with its directory, and reuse the directory's name.
        std::fs::rename(at("one"), at("two")).unwrap();
        std::fs::create_dir(at("one")).unwrap();
        let _theirs = UnixListener::bind(at("one/v_1")).unwrap();
        drop(ours);
        assert!(at("one/v_1").exists() && !at("two/v_1").exists());
        // Replace the socket in its directory.
        let ours = Listener::hybrid(&at("two/v"), 1).unwrap();
        let _theirs = UnixListener::bind(at("new")).unwrap();
        std::fs::rename(at("new"), at("two/v_1")).unwrap();
        drop(ours);
        assert!(at("two/v_1").exists());
    }

    #[tokio::test]
    async fn a_removed_file_is_not_removed_again_under_its_inode_number() {
        let dir = temp_dir();
        let first = Listener::hybrid(&dir.path().join("v"), 1).unwrap();
        first.file().unwrap().remove();
        // Many file systems reuse the inode's number for the next file.
        let _second = Listener::hybrid(&dir.path().join("v"), 1).unwrap();
        drop(first);
        assert!(dir.path().join("v_1").exists());
    }

    #[test]
    fn the_cids_of_hypervisor_machine_and_host_are_no_guests() {
        for cid in [0, 1, 2] {
            let stranger = guest(cid).unwrap_err();
            assert!(stranger.why.contains("refused: no guest has it"));
        }
        for cid in [3, u32::MAX] {
            assert_eq!(guest(cid), Ok(Peer::Cid(cid)));
        }
    }

    #[tokio::test]
    async fn a_path_that_is_too_long_has_an_error_of_its_own() {
        let refused = Listener::hybrid(Path::new(&format!("/tmp/{}", "x".repeat(120))), 1)
            .unwrap_err()
            .to_string();
        assert!(refused.contains("choose a shorter one"), "{refused}");
    }
}
