//! The scan of sysfs for GPUs, NVSwitches and Mellanox functions.
//!
//! Reads only attributes that the kernel caches (vendor, device, class): never `config`, VPD or
//! ROM, because each of those accesses exits to the hypervisor and waits for a BAR mapping that is
//! under way. [`crate::gpu::vpd`] reads VPD, where the topology depends on it.

use crate::machine::files::{entries, errno, failed};
use kata_gpu_wire::pci_address::{NVIDIA, PciAddress, is_gpu, waits_for_bar_firewall};
use nix::errno::Errno;
use std::io;
use std::path::{Path, PathBuf};

/// Mount point of sysfs in a guest.
pub const SYS: &str = "/sys";
/// Mellanox's PCI vendor id.
const MELLANOX: u16 = 0x15b3;
/// PCI class (base and subclass) of NVSwitches: other bridge.
const SWITCH_CLASS: u32 = 0x0680;
/// PCI class (base and subclass) of network controllers: Ethernet, and InfiniBand.
const NETWORK_CLASSES: [u32; 2] = [0x0200, 0x0207];

/// Whether this GPU's NVSwitches, if any, are managed through a Mellanox function instead of PCI
/// functions of their own: B200 and B300 on HGX boards. The ids are those of the BAR firewall.
pub fn has_switches_behind_network(device: u16) -> bool {
    waits_for_bar_firewall(device)
}

/// A GPU as the PCI scan sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gpu {
    pub address: PciAddress,
    /// PCI device id.
    pub device: u16,
}

/// Directory of a function in sysfs.
pub fn function(sysfs: &Path, address: PciAddress) -> PathBuf {
    sysfs.join("bus/pci/devices").join(address.to_string())
}

/// PCI device id of a GPU, by its directory. None if the function is no GPU, or gone again.
///
/// Errors: an attribute cannot be read, which does not mean that there is no GPU.
pub fn device(function: &Path) -> io::Result<Option<u16>> {
    let ids = ids(function)?.filter(|ids| matches!(ids.kind(), Some(Kind::Gpu)));
    Ok(ids.map(|ids| ids.device))
}

/// Functions of the PCI bus that decide what this guest needs, each kind in ascending order of
/// address.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Scan {
    pub gpus: Vec<Gpu>,
    pub switches: Vec<PciAddress>,
    /// Network functions of Mellanox: ordinary ones, and those through which NVSwitches are
    /// managed. Only VPD distinguishes them.
    pub mellanox: Vec<PciAddress>,
    /// Functions whose attributes cannot be read, with the reason; they are in no other list.
    pub unreadable: Vec<String>,
}

/// Kind of a relevant function.
enum Kind {
    Gpu,
    Switch,
    Mellanox,
}

/// Attributes of a function of a vendor whose functions can be relevant.
struct Ids {
    vendor: u16,
    device: u16,
    class: u32,
}

impl Ids {
    fn kind(&self) -> Option<Kind> {
        match self.vendor {
            vendor if is_gpu(vendor, self.class) => Some(Kind::Gpu),
            NVIDIA if self.class >> 8 == SWITCH_CLASS => Some(Kind::Switch),
            MELLANOX if NETWORK_CLASSES.contains(&(self.class >> 8)) => Some(Kind::Mellanox),
            _ => None,
        }
    }
}

/// None for another vendor's function, and one that is gone.
fn ids(function: &Path) -> io::Result<Option<Ids>> {
    let vendor = attribute(function, "vendor")?.and_then(|id| u16::try_from(id).ok());
    let Some(vendor) = vendor.filter(|vendor| [NVIDIA, MELLANOX].contains(vendor)) else {
        return Ok(None);
    };
    let (device, class) = (
        attribute(function, "device")?,
        attribute(function, "class")?,
    );
    Ok(device.zip(class).map(|(device, class)| Ids {
        vendor,
        device: device as u16,
        class,
    }))
}

/// Reads the functions below `sysfs` (`/sys` in a guest).
///
/// Errors: the list of devices cannot be read (path, errno).
pub fn scan(sysfs: &Path) -> io::Result<Scan> {
    let devices = sysfs.join("bus/pci/devices");
    let mut scan = Scan::default();
    let entries = match std::fs::read_dir(&devices) {
        Ok(entries) => entries,
        // A kernel without any PCI bus has no such directory.
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(scan),
        Err(e) => return Err(failed("read", &devices)(e)),
    };
    for entry in entries {
        let path = entry.map_err(failed("read", &devices))?.path();
        let Some(address) = path
            .file_name()
            .and_then(|n| n.to_str())
            .and_then(|n| n.parse::<PciAddress>().ok())
        else {
            continue;
        };
        let ids = match ids(&path) {
            Ok(ids) => ids,
            Err(e) => {
                scan.unreadable.push(e.to_string());
                continue;
            }
        };
        match ids.as_ref().and_then(Ids::kind) {
            Some(Kind::Gpu) => scan.gpus.extend(ids.map(|ids| Gpu {
                address,
                device: ids.device,
            })),
            Some(Kind::Switch) => scan.switches.push(address),
            Some(Kind::Mellanox) => scan.mellanox.push(address),
            None => {}
        }
    }
    scan.gpus.sort_unstable_by_key(|gpu| gpu.address);
    scan.switches.sort_unstable();
    scan.mellanox.sort_unstable();
    Ok(scan)
}

/// Bit of a port's capability mask: no subnet manager may use the port.
const SM_DISABLED: u32 = 1 << 10;

/// GUID of the first InfiniBand port of a network function, in nvlsm's format. Errors: its drivers
/// have made no port (yet), or the port is closed to subnet managers.
///
/// Source: the GID at place 0 of a port ends with the port's GUID (InfiniBand specification, 4.1.1;
/// the capability mask is that of PortInfo, 14.2.5.6).
pub fn port_guid(sysfs: &Path, function: PciAddress) -> Result<String, String> {
    let devices = self::function(sysfs, function).join("infiniband");
    let first = entries(&devices).map(|entry| entry.path()).min();
    let port = first.ok_or("no InfiniBand device")?.join("ports/1");
    let read = |name: &str| {
        std::fs::read_to_string(port.join(name))
            .map_err(|e| format!("read {}: {e}", port.join(name).display()))
    };
    let mask = read("cap_mask")?;
    let mask = u32::from_str_radix(mask.trim().trim_start_matches("0x"), 16)
        .map_err(|e| format!("capability mask {mask:?}: {e}"))?;
    if mask & SM_DISABLED != 0 {
        return Err(format!(
            "its port is closed to subnet managers (capability mask {mask:#010x})"
        ));
    }
    let gid = read("gids/0")?;
    let digits: String = gid.trim().split(':').collect();
    let guid = digits
        .get(16..32)
        .and_then(|guid| u64::from_str_radix(guid, 16).ok())
        .filter(|guid| *guid != 0);
    guid.map(|guid| format!("{guid:#018x}"))
        .ok_or_else(|| format!("its port has the GID {:?}, which has no GUID", gid.trim()))
}

/// A hexadecimal attribute of a function, e.g. `0x10de`. None if the function is gone.
fn attribute(function: &Path, name: &str) -> io::Result<Option<u32>> {
    let path = function.join(name);
    let text = match std::fs::read_to_string(&path) {
        Ok(text) => text,
        // A read in the middle of the removal gets ENODEV.
        Err(e) if [Errno::ENOENT, Errno::ENODEV].contains(&errno(&e)) => return Ok(None),
        Err(e) => return Err(failed("read", &path)(e)),
    };
    let digits = text.trim();
    let number = u32::from_str_radix(digits.strip_prefix("0x").unwrap_or(digits), 16);
    number.map(Some).map_err(|_| {
        io::Error::other(format!(
            "read {}: {:?} is not a hexadecimal number",
            path.display(),
            digits
        ))
    })
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use kata_gpu_test_support::temp_dir;

    /// Makes a function of a stand-in for sysfs; returns its directory.
    pub fn make(sysfs: &Path, address: &str, [vendor, class, device]: [&str; 3]) -> PathBuf {
        let function = sysfs.join("bus/pci/devices").join(address);
        std::fs::create_dir_all(&function).unwrap();
        for (name, value) in [("vendor", vendor), ("class", class), ("device", device)] {
            std::fs::write(function.join(name), format!("{value}\n")).unwrap();
        }
        function
    }

    /// As [`make`], an H100.
    pub fn make_gpu(sysfs: &Path, address: &str) -> PathBuf {
        make(sysfs, address, ["0x10de", "0x030200", "0x2330"])
    }

    #[test]
    fn the_scan_finds_gpus_switches_and_mellanox_in_pci_order() {
        let folder = temp_dir();
        let sysfs = folder.path();
        let functions = [
            ("0000:0b:00.0", "0x10de", "0x030200", "0x2330"),
            ("0000:02:00.0", "0x10de", "0x030000", "0x2331"),
            ("0000:04:00.0", "0x10de", "0x068000", "0x22a3"), // NVSwitches
            ("0000:03:00.0", "0x10de", "0x068000", "0x22a3"),
            ("0000:06:00.0", "0x15b3", "0x020700", "0x1021"), // InfiniBand and Ethernet
            ("0000:05:00.1", "0x15b3", "0x020000", "0x1021"),
            ("0000:07:00.0", "0x15b3", "0x088000", "0xc2d5"), // a BlueField's other functions
            ("0000:00:1f.0", "0x8086", "0x068000", "0x7000"), // another vendor's bridge
            ("0000:00:02.0", "0x1af4", "0x030000", "0x1050"), // another vendor's display
            ("0000:0c:00.0", "0x10de", "garbage", "0x2330"),
        ];
        for (address, vendor, class, device) in functions {
            make(sysfs, address, [vendor, class, device]);
        }
        let found = scan(sysfs).unwrap();
        let list: Vec<(String, u16)> = found
            .gpus
            .iter()
            .map(|g| (g.address.to_string(), g.device))
            .collect();
        assert_eq!(
            list,
            [
                ("0000:02:00.0".to_string(), 0x2331),
                ("0000:0b:00.0".to_string(), 0x2330)
            ]
        );
        let texts = |list: &[PciAddress]| list.iter().map(ToString::to_string).collect::<Vec<_>>();
        assert_eq!(texts(&found.switches), ["0000:03:00.0", "0000:04:00.0"]);
        assert_eq!(texts(&found.mellanox), ["0000:05:00.1", "0000:06:00.0"]);
        let unreadable = &found.unreadable;
        assert_eq!(unreadable.len(), 1);
        assert!(
            unreadable[0].contains("0000:0c:00.0/class") && unreadable[0].contains("garbage"),
            "{unreadable:?}"
        );
        std::fs::remove_dir_all(sysfs).unwrap();
        assert_eq!(scan(sysfs).unwrap(), Scan::default());
    }

    #[test]
    fn the_guid_of_a_port_is_the_end_of_its_first_gid() {
        let folder = temp_dir();
        let sysfs = folder.path();
        let function: PciAddress = "0000:05:00.0".parse().unwrap();
        assert_eq!(
            port_guid(sysfs, function).unwrap_err(),
            "no InfiniBand device"
        );
        let port = sysfs.join("bus/pci/devices/0000:05:00.0/infiniband/mlx5_0/ports/1");
        std::fs::create_dir_all(port.join("gids")).unwrap();
        let with = |mask: &str, gid: &str| {
            std::fs::write(port.join("cap_mask"), mask).unwrap();
            std::fs::write(port.join("gids/0"), gid).unwrap();
            port_guid(sysfs, function)
        };
        let gid = "fe80:0000:0000:0000:b83f:d203:00d4:1a2c\n";
        assert_eq!(with("0xa751e848\n", gid).unwrap(), "0xb83fd20300d41a2c");
        assert!(
            with("0xa751ec48\n", gid)
                .unwrap_err()
                .contains("closed to subnet managers")
        );
        for (mask, gid) in [
            ("", gid),
            ("0x0", "fe80::1\n"),
            ("0x0", &"\u{e4}".repeat(40)),
            ("0x0", "fe80:0000:0000:0000:0000:0000:0000:0000\n"),
        ] {
            with(mask, gid).unwrap_err();
        }
    }
}
