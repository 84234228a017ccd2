//! Binding GPUs to the driver through sysfs: memory enable ahead of the driver, driver_override,
//! bind.
//!
//! Concurrent binds, although a plain module load probes all GPUs one after another: hold all but
//! one back with driver_override, load the module with that one, then release each of the others
//! and write its address to `bind`. Two GPUs share no lock of the driver core. Nothing here but
//! [`PciSysfs::answers`] reads config space.
//!
//! Whatever writes, and [`PciSysfs::is_held_back`], waits for the GPU's lock. The kernel holds it
//! for a whole probe and a whole removal, and a removal waits until the init has closed the GPU:
//! never call these on the runtime's thread, which sees to that. What only looks waits for nothing.

use kata_gpu_wire::pci_address::PciAddress;
use nix::errno::Errno;
use std::fmt;
use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

/// The driver's name in sysfs.
pub const DRIVER: &str = "nvidia";
/// Offset of four bytes in config space (PCI_CLASS_REVISION).
const CLASS_AND_REVISION: u64 = 8;
/// A driver that does not exist: a function with this override matches nothing.
const HELD_BACK: &str = "kata-gpu-init-held-back";
/// Tries to identify a device that is replaced again and again, after which the last one counts:
/// each replacement has its own event.
const MOST_LOOKS: usize = 3;

/// Identity of the device at a PCI address. Sysfs gives no inode number twice: a changed number is
/// another device, or another bind of the same one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sight {
    /// Inode of the device's directory; None: no device.
    pub device: Option<u64>,
    /// Inode of the device's link to the driver; None: neither bound nor being probed.
    pub bind: Option<u64>,
}

/// A bind of a device; a minor and a descriptor belong to it. As text, `ADDRESS/DEVICE/BIND`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Bound {
    pub address: PciAddress,
    /// Inode as in [`Sight`].
    pub device: u64,
    pub bind: u64,
}

impl Sight {
    /// The current bind, if there is one.
    pub fn bound(self, address: PciAddress) -> Option<Bound> {
        Some(Bound {
            address,
            device: self.device?,
            bind: self.bind?,
        })
    }
}

impl fmt::Display for Bound {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}/{}", self.address, self.device, self.bind)
    }
}

impl std::str::FromStr for Bound {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut parts = text.split('/');
        let mut parse = || {
            Some(Self {
                address: parts.next()?.parse().ok()?,
                device: parts.next()?.parse().ok()?,
                bind: parts.next()?.parse().ok()?,
            })
        };
        parse().ok_or_else(|| format!("{text:?} is not ADDRESS/DEVICE/BIND"))
    }
}

/// A failed write to sysfs.
#[derive(Debug)]
pub struct SysfsError {
    path: PathBuf,
    value: String,
    error: io::Error,
}

impl SysfsError {
    /// The kernel's errno.
    pub fn errno(&self) -> Option<Errno> {
        self.error.raw_os_error().map(Errno::from_raw)
    }
}

impl fmt::Display for SysfsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "write {:?} to {}: {}",
            self.value,
            self.path.display(),
            self.error
        )
    }
}

/// The PCI side of sysfs, below `/sys` in a guest.
#[derive(Clone)]
pub struct PciSysfs {
    bus: PathBuf,
}

impl PciSysfs {
    pub fn at(sysfs: &Path) -> Self {
        Self {
            bus: sysfs.join("bus/pci"),
        }
    }

    /// Directory of a function.
    pub fn device(&self, gpu: PciAddress) -> PathBuf {
        self.bus.join("devices").join(gpu.to_string())
    }

    fn function(&self, gpu: PciAddress, attribute: &str) -> PathBuf {
        self.device(gpu).join(attribute)
    }

    fn driver(&self, attribute: &str) -> PathBuf {
        self.bus.join("drivers").join(DRIVER).join(attribute)
    }

    /// Enables the function's memory decoding: the host then maps its BARs, for milliseconds to
    /// seconds. Call it for one GPU at a time: hosts map one after another anyway, and a waiting
    /// guest CPU spins. A function that has a driver by now is enabled already.
    pub fn enable(&self, gpu: PciAddress) -> Result<(), SysfsError> {
        match write(self.function(gpu, "enable"), "1") {
            Err(e) if e.error.raw_os_error() == Some(nix::libc::EBUSY) => Ok(()),
            result => result,
        }
    }

    /// The error of an [`PciSysfs::enable`] in another process.
    pub fn not_enabled(&self, gpu: PciAddress, errno: Errno) -> SysfsError {
        SysfsError {
            path: self.function(gpu, "enable"),
            value: "1".into(),
            error: errno.into(),
        }
    }

    /// The error of a [`PciSysfs::bind`] in another process.
    pub fn not_bound(&self, gpu: PciAddress, errno: Errno) -> SysfsError {
        SysfsError {
            path: self.driver("bind"),
            value: gpu.to_string(),
            error: errno.into(),
        }
    }

    /// Keeps every driver from binding this GPU until [`PciSysfs::release`].
    pub fn hold_back(&self, gpu: PciAddress) -> Result<(), SysfsError> {
        write(self.function(gpu, "driver_override"), HELD_BACK)
    }

    /// Whether [`PciSysfs::hold_back`] is in force.
    pub fn is_held_back(&self, gpu: PciAddress) -> bool {
        std::fs::read_to_string(self.function(gpu, "driver_override"))
            .is_ok_and(|name| name.trim() == HELD_BACK)
    }

    /// Lets drivers match this GPU again; does not start a probe.
    pub fn release(&self, gpu: PciAddress) -> Result<(), SysfsError> {
        // An empty line removes the override.
        write(self.function(gpu, "driver_override"), "\n")
    }

    /// Probes this GPU with the driver now, on this thread; returns when the driver's probe has.
    pub fn bind(&self, gpu: PciAddress) -> Result<(), SysfsError> {
        write(self.driver("bind"), &gpu.to_string())
    }

    /// Unbinds this GPU from the driver; blocks until it has no open descriptors.
    pub fn unbind(&self, gpu: PciAddress) -> Result<(), SysfsError> {
        write(self.driver("unbind"), &gpu.to_string())
    }

    /// Reset methods of this function, by the kernel's names; None: not reported.
    pub fn reset_methods(&self, gpu: PciAddress) -> Option<String> {
        std::fs::read_to_string(self.function(gpu, "reset_method")).ok()
    }

    /// Resets this function by one of the kernel's methods. Blocks until the function answers
    /// again, for up to a minute. The kernel's own choice of methods is restored afterwards.
    pub fn reset(&self, gpu: PciAddress, method: &str) -> Result<(), SysfsError> {
        write(self.function(gpu, "reset_method"), method)?;
        let reset = write(self.function(gpu, "reset"), "1");
        reset.and(write(self.function(gpu, "reset_method"), "default"))
    }

    /// Probes this GPU with whichever loaded driver matches it, on this thread. Works while the
    /// driver's own load is still probing another GPU and there is no `bind` file yet. The outcome
    /// is not returned: see [`PciSysfs::is_bound`].
    pub fn probe(&self, gpu: PciAddress) -> Result<(), SysfsError> {
        write(self.bus.join("drivers_probe"), &gpu.to_string())
    }

    /// Whether the driver is registered at the bus: from then on [`PciSysfs::probe`] finds it.
    pub fn is_registered(&self) -> bool {
        self.bus.join("drivers").join(DRIVER).exists()
    }

    /// Whether the GPU is on the bus.
    pub fn is_present(&self, gpu: PciAddress) -> bool {
        self.device(gpu).exists()
    }

    /// Whether this function answers: one that is gone reads all ones. Reads class and revision,
    /// which no host answers from a copy of its own as it does vendor and device id. Waits for an
    /// enabling that is under way.
    pub fn answers(&self, gpu: PciAddress) -> io::Result<bool> {
        let mut bytes = [0; 4];
        File::open(self.function(gpu, "config"))?.read_exact_at(&mut bytes, CLASS_AND_REVISION)?;
        Ok(bytes != [0xff; 4])
    }

    /// Whether the driver has this GPU at the end of a probe that is under way; waits for that end.
    /// The link to the driver exists before its probe is called, and a write to this attribute
    /// takes the lock that the probe holds.
    pub fn is_bound_at_last(&self, gpu: PciAddress) -> bool {
        self.is_bound(gpu) && self.release(gpu).is_ok() && self.is_bound(gpu)
    }

    /// Identifies the device at this address.
    ///
    /// Errors: sysfs cannot be read, which does not mean that there is no device.
    pub fn sight(&self, gpu: PciAddress) -> io::Result<Sight> {
        let look = || {
            Ok::<Sight, io::Error>(Sight {
                device: self.inode(gpu)?,
                bind: self.bind_inode(gpu)?,
            })
        };
        let mut seen = look()?;
        // A device that came between the two reads has other inodes.
        for _ in 0..MOST_LOOKS {
            if self.inode(gpu)? == seen.device {
                break;
            }
            seen = look()?;
        }
        Ok(seen)
    }

    /// Whether a bind is over; false where sysfs cannot be read.
    pub fn is_over(&self, bind: Bound) -> bool {
        self.sight(bind.address)
            .is_ok_and(|seen| seen.bound(bind.address) != Some(bind))
    }

    /// Inode through the bus's link, which is removed before the removal is announced and made
    /// before the device is: the directory itself outlives the announcement.
    fn inode(&self, gpu: PciAddress) -> io::Result<Option<u64>> {
        let path = self.device(gpu);
        there(std::fs::metadata(&path), &path).map(|there| there.map(|directory| directory.ino()))
    }

    fn bind_inode(&self, gpu: PciAddress) -> io::Result<Option<u64>> {
        let path = self.function(gpu, "driver");
        let inode = || {
            there(std::fs::symlink_metadata(&path), &path).map(|there| there.map(|link| link.ino()))
        };
        let before = inode()?;
        let driver = there(std::fs::read_link(&path), &path)?;
        let ours = driver.is_some_and(|link| link.file_name().is_some_and(|name| name == DRIVER));
        Ok(before.filter(|_| ours && inode().is_ok_and(|after| after == before)))
    }

    /// Whether the driver has this GPU, or is probing it.
    pub fn is_bound(&self, gpu: PciAddress) -> bool {
        std::fs::read_link(self.function(gpu, "driver"))
            .is_ok_and(|link| link.file_name().is_some_and(|name| name == DRIVER))
    }
}

/// Turns the error of an absent file into None.
fn there<T>(result: io::Result<T>, path: &Path) -> io::Result<Option<T>> {
    match result {
        Ok(there) => Ok(Some(there)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(io::Error::new(
            error.kind(),
            format!("look at {}: {error}", path.display()),
        )),
    }
}

fn write(path: PathBuf, value: &str) -> Result<(), SysfsError> {
    std::fs::write(&path, value).map_err(|error| SysfsError {
        path,
        value: value.trim().to_string(),
        error,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use kata_gpu_test_support::temp_dir;

    #[test]
    fn a_function_that_reads_all_ones_does_not_answer() {
        let folder = temp_dir();
        let sysfs = PciSysfs::at(folder.path());
        let gpu: PciAddress = "0001:00:03.0".parse().unwrap();
        let device = folder.path().join("bus/pci/devices/0001:00:03.0");
        std::fs::create_dir_all(&device).unwrap();
        assert!(sysfs.answers(gpu).is_err(), "nothing is known");
        let mut config = vec![0xff; 64];
        let write = |config: &[u8]| std::fs::write(device.join("config"), config).unwrap();
        write(&config);
        assert!(!sysfs.answers(gpu).unwrap());
        // Vendor and device id are the host's copy.
        config[..4].copy_from_slice(&[0xde, 0x10, 0x30, 0x23]);
        write(&config);
        assert!(!sysfs.answers(gpu).unwrap());
        config[8..12].copy_from_slice(&[0xa1, 0, 2, 3]);
        write(&config);
        assert!(sysfs.answers(gpu).unwrap());
        write(&config[..8]);
        assert!(sysfs.answers(gpu).is_err());
    }

    #[test]
    fn a_device_made_again_or_bound_again_is_another_one() {
        let folder = temp_dir();
        let sysfs = folder.path();
        let (function, driver) = (
            sysfs.join("bus/pci/devices/0001:00:03.0"),
            sysfs.join("bus/pci/drivers/nvidia"),
        );
        let (pci, gpu) = (PciSysfs::at(sysfs), "0001:00:03.0".parse().unwrap());
        let look = || pci.sight(gpu).unwrap();
        assert_eq!(look(), Sight::default());
        std::fs::create_dir_all(&function).unwrap();
        std::fs::create_dir_all(&driver).unwrap();
        let free = look();
        assert!(free.device.is_some() && free.bind.is_none() && free.bound(gpu).is_none());
        std::os::unix::fs::symlink(&driver, function.join("driver")).unwrap();
        let bound = look().bound(gpu).unwrap();
        assert_eq!(
            (Some(bound.device), bound.to_string().parse()),
            (free.device, Ok(bound))
        );
        // An unbind and another bind; another file takes the old link's inode meanwhile.
        std::fs::rename(function.join("driver"), sysfs.join("old")).unwrap();
        assert_eq!(look(), free);
        std::os::unix::fs::symlink(&driver, function.join("driver")).unwrap();
        assert_ne!(look().bound(gpu), Some(bound));
        assert!(
            "0001:00:03.0".parse::<Bound>().is_err()
                && "0001:00:03.0/1/x".parse::<Bound>().is_err()
        );
    }

    #[test]
    fn a_refused_write_names_path_and_value() {
        let error = PciSysfs::at(Path::new("/nonexistent"))
            .bind("0001:00:03.0".parse().unwrap())
            .unwrap_err()
            .to_string();
        assert!(
            error.starts_with(
                "write \"0001:00:03.0\" to /nonexistent/bus/pci/drivers/nvidia/bind: No such file"
            ),
            "{error}"
        );
    }
}
