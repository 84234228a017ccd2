//! The kernel's uevents: GPUs that appear, disappear, get or lose their driver; displays that they
//! get or lose.
//!
//! Subscribe before the scan of sysfs: a GPU that appears in between is then seen twice instead of
//! never. Only messages of the kernel count (netlink port 0); the agent listens on a socket of its
//! own, and neither disturbs the other.

use kata_gpu_wire::pci_address::PciAddress;
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{
    AddressFamily, NetlinkAddr, SockFlag, SockProtocol, SockType, bind, recvfrom, setsockopt,
    socket, sockopt,
};
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::time::Duration;
use tokio::io::unix::AsyncFd;

/// Multicast group of the kernel's own uevents; group 2 is udev's.
const KERNEL_GROUP: u32 = 1;
/// The kernel's limit for one uevent (UEVENT_BUFFER_SIZE 2048 plus the path in front).
const MAX_UEVENT: usize = 8192;
/// Room for a burst: 16 GPUs and everything else that appears at boot.
const RECEIVE_BUFFER: usize = 1024 * 1024;

/// Key that the kernel adds to an event requested by user space (since 4.13).
const SYNTHETIC: &str = "SYNTH_UUID";
/// Limit of messages read before other tasks run.
const BURST: usize = 64;

/// Action of a uevent on a PCI function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    Add,
    Remove,
    /// A driver is bound: sent at the end of a successful probe.
    Bind,
    Unbind,
    /// Anything else: change, move, online, offline.
    Other,
}

/// A uevent of the PCI subsystem.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Uevent {
    pub action: Action,
    pub address: PciAddress,
    pub driver: Option<String>,
    /// PCI vendor, from PCI_ID.
    pub vendor: Option<u16>,
    /// PCI class, 24 bits.
    pub class: Option<u32>,
}

/// Parses a uevent of the kernel: `action@devpath\0KEY=value\0..`. None for other subsystems, for
/// anything but a uevent, and for events written to a device's `uevent` file, which report no
/// change.
pub fn parse(message: &[u8]) -> Option<Uevent> {
    let mut parts = message.split(|b| *b == 0).map(String::from_utf8_lossy);
    parts.next().filter(|head| head.contains('@'))?;
    let (mut action, mut address, mut driver, mut vendor, mut class, mut pci) =
        (None, None, None, None, None, false);
    for part in parts {
        let Some((key, value)) = part.split_once('=') else {
            continue;
        };
        match key {
            "ACTION" => {
                action = Some(match value {
                    "add" => Action::Add,
                    "remove" => Action::Remove,
                    "bind" => Action::Bind,
                    "unbind" => Action::Unbind,
                    _ => Action::Other,
                });
            }
            "SUBSYSTEM" => pci = value == "pci",
            SYNTHETIC => return None,
            "PCI_SLOT_NAME" => address = value.parse().ok(),
            "PCI_CLASS" => class = u32::from_str_radix(value, 16).ok(),
            "PCI_ID" => {
                vendor = value
                    .split(':')
                    .next()
                    .and_then(|v| u16::from_str_radix(v, 16).ok())
            }
            "DRIVER" => driver = Some(value.to_string()),
            _ => {}
        }
    }
    if !pci {
        return None;
    }
    Some(Uevent {
        action: action?,
        address: address?,
        driver,
        vendor,
        class,
    })
}

/// PCI function whose display came or went, in a kernel's uevent:
/// `..@/devices/../<address>/drm/card0\0..SUBSYSTEM=drm\0DEVNAME=dri/card0\0`.
pub fn parse_display(message: &[u8]) -> Option<PciAddress> {
    let mut parts = message.split(|b| *b == 0).map(String::from_utf8_lossy);
    parts.next().filter(|head| head.contains('@'))?;
    let (mut address, mut drm, mut node) = (None, false, false);
    for part in parts {
        match part.split_once('=') {
            Some((SYNTHETIC, _)) => return None,
            Some(("SUBSYSTEM", value)) => drm = value == "drm",
            Some(("DEVNAME", value)) => node = value.starts_with("dri/"),
            Some(("DEVPATH", path)) => {
                address = path
                    .split_once("/drm/")
                    .and_then(|(function, _)| function.rsplit('/').next()?.parse().ok())
            }
            _ => {}
        }
    }
    address.filter(|_| drm && node)
}

/// A subscription; from its creation on, every missed uevent is reported.
pub struct Uevents {
    socket: AsyncFd<OwnedFd>,
}

/// Result of [`Uevents::next`].
#[derive(Debug, PartialEq, Eq)]
pub enum Next {
    Event(Uevent),
    /// A display of this function came or went.
    Display(PciAddress),
}

impl Uevents {
    /// Subscribes; must be called inside the runtime.
    pub fn subscribe() -> io::Result<Self> {
        Ok(Self {
            socket: crate::machine::sys::async_fd(open()?)?,
        })
    }

    /// Waits for the next uevent of a PCI function, or of a display.
    ///
    /// Errors: uevents are lost; subscribe again, then scan. [`hear`] takes care of the first.
    pub async fn next(&self) -> io::Result<Next> {
        let wanted = |message: &[u8]| {
            let display = || parse_display(message).map(Next::Display);
            parse(message).map(Next::Event).or_else(display)
        };
        next(&self.socket, wanted).await
    }
}

/// Waits for the next uevent of a subscription; without one, for ever. An error ends the
/// subscription: until a socket that was overrun has been read to its end, the kernel drops new
/// events, and reports that only once.
pub async fn hear<S, T>(
    subscription: &mut Option<S>,
    next: impl AsyncFnOnce(&S) -> io::Result<T>,
) -> io::Result<T> {
    let Some(open) = subscription.as_ref() else {
        return std::future::pending().await;
    };
    let heard = next(open).await;
    if heard.is_err() {
        *subscription = None;
    }
    heard
}

/// Waits for the next message of the kernel that is wanted.
async fn next<T>(socket: &AsyncFd<OwnedFd>, wanted: impl Fn(&[u8]) -> Option<T>) -> io::Result<T> {
    let mut buffer = [0_u8; MAX_UEVENT];
    loop {
        let mut guard = socket.readable().await?;
        for _ in 0..BURST {
            match recvfrom::<NetlinkAddr>(socket.as_raw_fd(), &mut buffer) {
                // Any process with the right capability may send to the group; only port 0 is the
                // kernel.
                Ok((n, Some(from))) if from.pid() == 0 => {
                    if let Some(found) = wanted(buffer.get(..n).unwrap_or_default()) {
                        return Ok(found);
                    }
                }
                Ok(_) | Err(Errno::EINTR) => {}
                Err(Errno::EAGAIN) => {
                    guard.clear_ready();
                    break;
                }
                Err(Errno::ENOBUFS) => {
                    return Err(io::Error::other(
                        "the kernel sent them faster than they were read",
                    ));
                }
                Err(errno) => return Err(errno.into()),
            }
        }
        drop(guard);
        // A flood of other subsystems' events must not keep the runtime.
        tokio::task::yield_now().await;
    }
}

/// Opens a socket that gets the kernel's uevents.
fn open() -> io::Result<OwnedFd> {
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let socket = socket(
        AddressFamily::Netlink,
        SockType::Datagram,
        flags,
        SockProtocol::NetlinkKObjectUEvent,
    )?;
    // FORCE needs CAP_NET_ADMIN, which PID 1's children have; without it the default size holds a
    // few hundred uevents.
    let _unused = setsockopt(&socket, sockopt::RcvBufForce, &RECEIVE_BUFFER);
    bind(socket.as_raw_fd(), &NetlinkAddr::new(0, KERNEL_GROUP))?;
    Ok(socket)
}

/// A subscription for readers that only need a reason to check again: uevents of any subsystem, and
/// their loss.
pub struct Any(OwnedFd);

impl Any {
    /// Subscribes.
    pub fn subscribe() -> io::Result<Self> {
        Ok(Self(open()?))
    }

    /// Blocks until a uevent has come, or the time is over. Reads all pending ones.
    pub fn wait(&self, timeout: Duration) -> io::Result<()> {
        // Rounded up: a timeout below a millisecond must not become zero.
        let milliseconds =
            i32::try_from(timeout.as_nanos().div_ceil(1_000_000)).unwrap_or(i32::MAX);
        let timeout = PollTimeout::try_from(milliseconds).unwrap_or(PollTimeout::MAX);
        match poll(
            &mut [PollFd::new(self.0.as_fd(), PollFlags::POLLIN)],
            timeout,
        ) {
            Ok(_) | Err(Errno::EINTR) => {}
            Err(errno) => return Err(errno.into()),
        }
        let mut buffer = [0_u8; MAX_UEVENT];
        // ENOBUFS is a reason to check as well.
        while !matches!(
            recvfrom::<NetlinkAddr>(self.0.as_raw_fd(), &mut buffer),
            Err(Errno::EAGAIN)
        ) {}
        Ok(())
    }

    /// Converts the subscription for the runtime of the calling task.
    pub fn into_async(self) -> io::Result<DeviceMapperUevents> {
        Ok(DeviceMapperUevents(crate::machine::sys::async_fd(self.0)?))
    }
}

/// Uevents of the device mapper's block devices.
pub struct DeviceMapperUevents(AsyncFd<OwnedFd>);

impl DeviceMapperUevents {
    /// Waits for the next uevent. Error: uevents are lost; subscribe again ([`hear`]), then check.
    pub async fn next(&self) -> io::Result<()> {
        next(&self.0, |message| {
            is_of_device_mapper(message).then_some(())
        })
        .await
    }
}

/// `change@/devices/virtual/block/dm-0\0..`: sent by dm-verity for a block that fails its check.
fn is_of_device_mapper(message: &[u8]) -> bool {
    let head = message
        .split(|b| *b == 0)
        .next()
        .map(String::from_utf8_lossy)
        .unwrap_or_default();
    head.rsplit_once('/')
        .is_some_and(|(path, name)| path.ends_with("/block") && name.starts_with("dm-"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Without this, a GPU that comes, or a mark that is set, while the old socket is read to its
    /// end stays unseen.
    #[tokio::test]
    async fn a_socket_that_was_overrun_is_not_read_again() {
        // Stands for a netlink socket: every read of it is an error.
        let fails = || {
            let (no_socket, _closed) = nix::unistd::pipe().unwrap();
            crate::machine::sys::async_fd(no_socket).unwrap()
        };
        let mut functions = Some(Uevents { socket: fails() });
        assert!(hear(&mut functions, Uevents::next).await.is_err());
        let mut disks = Some(DeviceMapperUevents(fails()));
        assert!(hear(&mut disks, DeviceMapperUevents::next).await.is_err());
        assert!(functions.is_none() && disks.is_none());
    }

    #[test]
    fn uevents_of_the_device_mapper_are_recognised() {
        assert!(is_of_device_mapper(
            b"change@/devices/virtual/block/dm-0\0ACTION=change\0DM_VERITY_ERR_BLOCK_NR=0,5\0"
        ));
        assert!(!is_of_device_mapper(
            b"add@/devices/pci0000:00/0000:00:04.0/virtio1/block/vda\0ACTION=add\0"
        ));
        assert!(
            !is_of_device_mapper(BIND)
                && !is_of_device_mapper(b"")
                && !is_of_device_mapper(b"dm-0")
        );
    }

    const BIND: &[u8] = b"bind@/devices/pci0001:00/0001:00:03.0\0ACTION=bind\0\
        DEVPATH=/devices/pci0001:00/0001:00:03.0\0SUBSYSTEM=pci\0DRIVER=nvidia\0\
        PCI_CLASS=30200\0PCI_ID=10DE:2330\0PCI_SUBSYS_ID=10DE:16C1\0\
        PCI_SLOT_NAME=0001:00:03.0\0SEQNUM=1201\0";

    #[test]
    fn a_bind_of_a_gpu_is_read_whole() {
        assert_eq!(
            parse(BIND),
            Some(Uevent {
                action: Action::Bind,
                address: "0001:00:03.0".parse().unwrap(),
                driver: Some("nvidia".into()),
                vendor: Some(0x10de),
                class: Some(0x30200),
            })
        );
    }

    #[test]
    fn a_display_is_recognised_by_its_function() {
        let card = b"add@/devices/pci0000:00/0000:00:03.0/drm/card1\0ACTION=add\0\
            DEVPATH=/devices/pci0000:00/0000:00:03.0/drm/card1\0SUBSYSTEM=drm\0DEVNAME=dri/card1\0";
        assert_eq!(
            (parse(card), parse_display(card)),
            (None, "0000:00:03.0".parse().ok())
        );
        assert_eq!(parse_display(BIND), None);
        // A connector has no node, and a display may hang on something else.
        assert_eq!(
            parse_display(
                b"add@/x\0\
                DEVPATH=/devices/pci0000:00/0000:00:03.0/drm/card1/card1-HDMI-A-1\0\
                SUBSYSTEM=drm\0"
            ),
            None
        );
        assert_eq!(
            parse_display(
                b"add@/x\0DEVPATH=/devices/platform/vgem/drm/card0\0\
                SUBSYSTEM=drm\0DEVNAME=dri/card0\0"
            ),
            None
        );
    }

    #[test]
    fn a_requested_uevent_is_ignored() {
        let asked = |event: &[u8]| [event, b"SYNTH_UUID=0\0"].concat();
        assert!(parse(BIND).is_some() && parse(&asked(BIND)).is_none());
        let card = b"remove@/x\0DEVPATH=/devices/pci0000:00/0000:00:03.0/drm/card1\0\
            SUBSYSTEM=drm\0DEVNAME=dri/card1\0";
        assert!(parse_display(card).is_some() && parse_display(&asked(card)).is_none());
    }

    #[test]
    fn other_subsystems_and_garbage_are_nothing() {
        assert_eq!(
            parse(b"add@/devices/virtual/mem/null\0ACTION=add\0SUBSYSTEM=mem\0"),
            None
        );
        assert_eq!(parse(b"libudev\0\xfe\xed\xca\xfe"), None);
        assert_eq!(parse(b""), None);
        assert_eq!(
            parse(b"bind@/x\0SUBSYSTEM=pci\0ACTION=bind\0PCI_SLOT_NAME=../../etc\0"),
            None
        );
    }
}
