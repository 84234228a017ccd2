//! Binding GPUs to the driver through sysfs: memory enable ahead of the driver, driver_override, bind.
//!
//! The order that makes binds concurrent although a plain module load probes all GPUs one after another: hold all but one back with
//! driver_override, load the module with that one, then give each of the others free and write its address to `bind`. Two GPUs share no
//! lock of the driver core. Nothing here reads config space.

use crate::pci::PciAddress;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

/// The driver's name in sysfs.
pub const DRIVER: &str = "nvidia";
/// A driver that does not exist: a function with this override matches nothing.
const HELD_BACK: &str = "kata-gpu-init-held-back";

/// A write to sysfs that failed.
#[derive(Debug)]
pub struct SysfsError {
    path: PathBuf,
    value: String,
    error: io::Error,
}

impl fmt::Display for SysfsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "write {:?} to {}: {}", self.value, self.path.display(), self.error)
    }
}

impl std::error::Error for SysfsError {}

/// The PCI side of sysfs, below `/sys` in a guest.
#[derive(Clone)]
pub struct PciSysfs {
    bus: PathBuf,
}

impl PciSysfs {
    pub fn at(sysfs: &Path) -> Self {
        Self { bus: sysfs.join("bus/pci") }
    }

    fn function(&self, gpu: PciAddress, attribute: &str) -> PathBuf {
        self.bus.join("devices").join(gpu.to_string()).join(attribute)
    }

    /// Turns the function's memory decoding on, which is when the host maps its BARs: milliseconds to seconds. To be called for one GPU at a
    /// time: hosts do this one after another anyway, and a guest CPU that waits for its turn spins. A function that has a driver by now was
    /// enabled by that.
    pub fn enable(&self, gpu: PciAddress) -> Result<(), SysfsError> {
        match write(self.function(gpu, "enable"), "1") {
            Err(e) if e.error.raw_os_error() == Some(nix::libc::EBUSY) => Ok(()),
            result => result,
        }
    }

    /// Keeps every driver away from this GPU until [`PciSysfs::release`].
    pub fn hold_back(&self, gpu: PciAddress) -> Result<(), SysfsError> {
        write(self.function(gpu, "driver_override"), HELD_BACK)
    }

    /// Lets drivers match this GPU again; does not start a probe.
    pub fn release(&self, gpu: PciAddress) -> Result<(), SysfsError> {
        // The attribute's way to say "none": an empty line.
        write(self.function(gpu, "driver_override"), "\n")
    }

    /// Probes this GPU with the driver now, on this thread; returns when the driver's probe has.
    pub fn bind(&self, gpu: PciAddress) -> Result<(), SysfsError> {
        write(self.bus.join("drivers").join(DRIVER).join("bind"), &gpu.to_string())
    }

    /// Whether the driver has this GPU.
    pub fn is_bound(&self, gpu: PciAddress) -> bool {
        std::fs::read_link(self.function(gpu, "driver")).is_ok_and(|link| link.file_name().is_some_and(|name| name == DRIVER))
    }
}

fn write(path: PathBuf, value: &str) -> Result<(), SysfsError> {
    std::fs::write(&path, value).map_err(|error| SysfsError { path, value: value.trim().to_string(), error })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refused_write_names_path_and_value() {
        let error = PciSysfs::at(Path::new("/nonexistent")).bind("0001:00:03.0".parse().unwrap()).unwrap_err().to_string();
        assert!(error.starts_with("write \"0001:00:03.0\" to /nonexistent/bus/pci/drivers/nvidia/bind: No such file"), "{error}");
    }
}
