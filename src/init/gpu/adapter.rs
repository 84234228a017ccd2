//! Adapter initialisation: the first open of a GPU's node starts it, and the driver's wait call
//! returns its result.
//!
//! `open(O_NONBLOCK)` returns at once and initialises on the GPU's own kernel thread; a blocking
//! open of a second GPU meanwhile would hold the driver's device list and stall every other open.
//! The first part of an initialisation (attach, firmware) holds the lock of the driver's resource
//! manager, and its end can be seen: [`wait_attached`].
//!
//! An open descriptor is never closed: it goes to the keeper, because the last close tears the
//! adapter down, and under confidential computing it would then not come up again.

use crate::gpu::device_nodes::Node;
use crate::machine::sys::{StatusCode, WaitOpenComplete, take_manager_lock, wait_open_complete};
use kata_gpu_wire::pci_address::PciAddress;
use nix::errno::Errno;
use nix::fcntl::{OFlag, open};
use nix::sys::stat::Mode;
use std::fmt;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

/// Reason why a GPU is not initialised.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum InitError {
    /// open() failed.
    Open { path: PathBuf, errno: Errno },
    /// The wait call itself failed.
    Wait { path: PathBuf, errno: Errno },
    /// The driver reports that the initialisation failed.
    Failed { path: PathBuf, rc: i32, status: u32 },
}

impl fmt::Display for InitError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Open { path, errno } => write!(f, "open {}: {errno}", path.display()),
            Self::Wait { path, errno } => write!(
                f,
                "wait for the initialisation of {}: {errno}",
                path.display()
            ),
            Self::Failed { path, rc, status } => {
                write!(
                    f,
                    "initialise {}: {}, status {status:#x} ({})",
                    path.display(),
                    Errno::from_raw(rc.wrapping_neg()),
                    status_text(*status)
                )
            }
        }
    }
}

/// Text for the resource manager's status codes with which an initialisation is known to end
/// (nvstatuscodes.h).
fn status_text(status: u32) -> &'static str {
    match status {
        0x40 => "invalid state",
        0x56 => "not supported",
        0x59 => "operating system error",
        0x65 => "timeout",
        0x81 => "fabric not ready",
        _ => "see the driver's own line",
    }
}

/// Starts the initialisation. Drivers before 550.40.07 block here until it is over.
pub fn start(node: &Node) -> Result<OwnedFd, InitError> {
    open(
        &node.path,
        OFlag::O_RDWR | OFlag::O_NONBLOCK | OFlag::O_CLOEXEC,
        Mode::empty(),
    )
    .map_err(|errno| InitError::Open {
        path: node.path.clone(),
        errno,
    })
}

/// Blocks until the initialisation is over, without a limit: run it on a separate thread. Never
/// closes the descriptor.
pub fn wait(gpu: &OwnedFd, node: &Node) -> Result<(), InitError> {
    match wait_open_complete(gpu) {
        Ok(WaitOpenComplete { rc: 0, .. }) => Ok(()),
        Ok(WaitOpenComplete { rc, adapter_status }) => Err(InitError::Failed {
            path: node.path.clone(),
            rc,
            status: adapter_status,
        }),
        // A driver without this call has initialised in open().
        Err(Errno::EINVAL | Errno::ENOTTY) => Ok(()),
        Err(errno) => Err(InitError::Wait {
            path: node.path.clone(),
            errno,
        }),
    }
}

/// Blocks until the first part of an initialisation is over, if the driver answers; returns false
/// if `is_over` first. Asked again and again until that part has begun: no event reports it, and it
/// begins as soon as a thread of the kernel runs.
///
/// That part makes the directory of the GPU's capabilities in /proc, and holds the manager's lock
/// all the time: whoever sees the directory and then gets the lock, gets it after that part.
pub fn wait_attached(
    gpu: PciAddress,
    minor: u32,
    mut is_over: impl FnMut() -> bool,
) -> nix::Result<bool> {
    let control = open(
        "/dev/nvidiactl",
        OFlag::O_RDWR | OFlag::O_CLOEXEC,
        Mode::empty(),
    )?;
    let (domain, routing_id) = gpu.routing_id();
    let [bus, device] = routing_id.to_be_bytes();
    let gpu = StatusCode {
        domain,
        bus,
        slot: device >> 3,
        status: 0,
    };
    let capabilities = Path::new("/proc/driver/nvidia/capabilities");
    if !capabilities.exists() {
        return Err(Errno::ENOENT);
    }
    let of_gpu = capabilities.join(format!("gpu{minor}"));
    loop {
        let has_begun = of_gpu.exists();
        take_manager_lock(&control, gpu)?;
        if has_begun {
            return Ok(true);
        }
        if is_over() {
            return Ok(false);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_initialisation_has_a_readable_error() {
        let error = InitError::Failed {
            path: "/dev/nvidia3".into(),
            rc: -5,
            status: 0x65,
        };
        assert_eq!(
            error.to_string(),
            "initialise /dev/nvidia3: EIO: I/O error, status 0x65 (timeout)"
        );
    }
}
