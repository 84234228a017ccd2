//! Which GPUs are there: PCI addresses and the scan of sysfs.
//!
//! Reads only attributes that the kernel caches (vendor, device, class): never `config`, VPD or ROM, because each of those accesses
//! exits to the hypervisor and waits for whoever is mapping a BAR.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::io;
use std::path::Path;
use std::str::FromStr;
use std::time::Duration;

/// Address of a PCI function. Its order is the order of CDI index names.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct PciAddress {
    domain: u32,
    bus: u8,
    device: u8,
    function: u8,
}

impl fmt::Display for PciAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:04x}:{:02x}:{:02x}.{:x}", self.domain, self.bus, self.device, self.function)
    }
}

impl fmt::Debug for PciAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// A text that is not the address of a PCI function as sysfs writes it: `dddd:bb:dd.f`, lower-case hexadecimal.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NotAnAddress(pub String);

impl fmt::Display for NotAnAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} is not a PCI address (want dddd:bb:dd.f, e.g. 0000:01:00.0)", self.0)
    }
}

impl std::error::Error for NotAnAddress {}

impl FromStr for PciAddress {
    type Err = NotAnAddress;

    fn from_str(text: &str) -> Result<Self, NotAnAddress> {
        let parse = || -> Option<Self> {
            let (domain, rest) = text.split_once(':')?;
            let (bus, rest) = rest.split_once(':')?;
            let (device, function) = rest.split_once('.')?;
            let hex = |digits: &str, len: std::ops::RangeInclusive<usize>, max: u32| -> Option<u32> {
                // from_str_radix also takes a sign: only digits may come this far.
                let ok = len.contains(&digits.len()) && digits.bytes().all(|b| b.is_ascii_hexdigit());
                if ok { u32::from_str_radix(digits, 16).ok().filter(|v| *v <= max) } else { None }
            };
            Some(Self {
                domain: hex(domain, 4..=8, u32::MAX)?,
                bus: hex(bus, 2..=2, 0xff)? as u8,
                device: hex(device, 2..=2, 0x1f)? as u8,
                function: hex(function, 1..=1, 7)? as u8,
            })
        };
        parse().ok_or_else(|| NotAnAddress(text.chars().take(64).collect()))
    }
}

impl TryFrom<String> for PciAddress {
    type Error = NotAnAddress;
    fn try_from(text: String) -> Result<Self, NotAnAddress> {
        text.parse()
    }
}

impl From<PciAddress> for String {
    fn from(address: PciAddress) -> String {
        address.to_string()
    }
}

/// Where sysfs is mounted in a guest.
pub const SYS: &str = "/sys";
/// NVIDIA's PCI vendor id.
pub const NVIDIA: u16 = 0x10de;
/// PCI class (base and subclass) of GPUs: 3D controller without display, and VGA controller.
const GPU_CLASSES: [u32; 2] = [0x0302, 0x0300];

/// Whether a PCI function with this vendor and 24-bit class is one of ours.
pub fn is_gpu(vendor: u16, class: u32) -> bool {
    vendor == NVIDIA && GPU_CLASSES.contains(&(class >> 8))
}

/// The longest time for which the driver's probe of such a GPU sleeps, and what it takes where it cannot see the firewall.
pub const BAR_FIREWALL_WAIT: Duration = Duration::from_secs(4);
/// Device ids of GPUs whose probe waits for the BAR firewall (Blackwell; the driver's own ranges).
const BAR_FIREWALL: [std::ops::RangeInclusive<u16>; 2] = [0x2900..=0x29ff, 0x3180..=0x327f];

/// Whether this GPU's probe sleeps until its BAR firewall is down.
pub fn waits_for_bar_firewall(device: u16) -> bool {
    BAR_FIREWALL.iter().any(|ids| ids.contains(&device))
}

/// A GPU as the PCI scan sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gpu {
    pub address: PciAddress,
    /// PCI device id.
    pub device: u16,
}

/// Reads one function, for a GPU that a uevent announced. None when it is none of ours, or gone again.
pub fn read(sysfs: &Path, address: PciAddress) -> Option<Gpu> {
    let function = sysfs.join("bus/pci/devices").join(address.to_string());
    let vendor = u16::try_from(attribute(&function, "vendor").ok()?).ok()?;
    let device = u16::try_from(attribute(&function, "device").ok()?).ok()?;
    is_gpu(vendor, attribute(&function, "class").ok()?).then_some(Gpu { address, device })
}

/// Reads all GPUs below `sysfs` (`/sys` in a guest), in ascending order of address.
///
/// Errors: the list of devices cannot be read (path, errno). A function whose attributes cannot be read is left out and named in the
/// second value.
pub fn scan(sysfs: &Path) -> io::Result<(Vec<Gpu>, Vec<String>)> {
    let devices = sysfs.join("bus/pci/devices");
    let entries = match std::fs::read_dir(&devices) {
        Ok(entries) => entries,
        // A kernel without any PCI bus has no such directory.
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok((Vec::new(), Vec::new())),
        Err(e) => return Err(io::Error::new(e.kind(), format!("read {}: {e}", devices.display()))),
    };
    let mut found = Vec::new();
    let mut unreadable = Vec::new();
    for entry in entries {
        let path = entry.map_err(|e| io::Error::new(e.kind(), format!("read {}: {e}", devices.display())))?.path();
        let Some(address) = path.file_name().and_then(|n| n.to_str()).and_then(|n| n.parse::<PciAddress>().ok()) else { continue };
        match (attribute(&path, "vendor"), attribute(&path, "class")) {
            (Ok(vendor), Ok(class)) if u16::try_from(vendor).is_ok_and(|v| is_gpu(v, class)) => match attribute(&path, "device") {
                Ok(device) => found.push((address, device as u16)),
                Err(e) => unreadable.push(e.to_string()),
            },
            (Ok(_), Ok(_)) => {}
            (Err(e), _) | (_, Err(e)) => unreadable.push(e.to_string()),
        }
    }
    found.sort_unstable();
    let gpus = found.into_iter().map(|(address, device)| Gpu { address, device }).collect();
    Ok((gpus, unreadable))
}

/// A hexadecimal attribute of a function, e.g. `0x10de`.
fn attribute(function: &Path, name: &str) -> io::Result<u32> {
    let path = function.join(name);
    let text = std::fs::read_to_string(&path).map_err(|e| io::Error::new(e.kind(), format!("read {}: {e}", path.display())))?;
    let digits = text.trim();
    u32::from_str_radix(digits.strip_prefix("0x").unwrap_or(digits), 16)
        .map_err(|_| io::Error::other(format!("read {}: {:?} is not a hexadecimal number", path.display(), digits)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_order_by_number_not_by_text() {
        let mut list: Vec<PciAddress> =
            ["0000:10:00.0", "10000:01:00.0", "0000:0a:00.0", "0000:02:1f.7"].iter().map(|t| t.parse().unwrap()).collect();
        list.sort();
        let texts: Vec<String> = list.iter().map(|a| a.to_string()).collect();
        assert_eq!(texts, ["0000:02:1f.7", "0000:0a:00.0", "0000:10:00.0", "10000:01:00.0"]);
    }

    #[test]
    fn what_is_not_an_address_is_refused() {
        for text in [
            "",
            "0000:01:00",
            "0000:01:00.8",
            "0000:01:20.0",
            "000:01:00.0",
            "0000:+1:00.0",
            "0000:01:00.0 ",
            "0000:01:00.0\n",
            "123456789:01:00.0",
        ] {
            assert!(text.parse::<PciAddress>().is_err(), "{text:?} was taken for an address");
        }
    }

    #[test]
    fn the_scan_finds_gpus_in_pci_order_and_nothing_else() {
        let sysfs = std::env::temp_dir().join(format!("kata-gpu-init-scan-{}", std::process::id()));
        let functions = [
            ("0000:0b:00.0", "0x10de", "0x030200", "0x2330"),
            ("0000:02:00.0", "0x10de", "0x030000", "0x2331"),
            ("0000:03:00.0", "0x10de", "0x068000", "0x22a3"), // an NVSwitch
            ("0000:00:02.0", "0x1af4", "0x030000", "0x1050"), // somebody else's display
            ("0000:0c:00.0", "0x10de", "garbage", "0x2330"),
        ];
        for (address, vendor, class, device) in functions {
            let function = sysfs.join("bus/pci/devices").join(address);
            std::fs::create_dir_all(&function).unwrap();
            for (name, value) in [("vendor", vendor), ("class", class), ("device", device)] {
                std::fs::write(function.join(name), format!("{value}\n")).unwrap();
            }
        }
        let (gpus, unreadable) = scan(&sysfs).unwrap();
        let list: Vec<(String, u16)> = gpus.iter().map(|g| (g.address.to_string(), g.device)).collect();
        assert_eq!(list, [("0000:02:00.0".to_string(), 0x2331), ("0000:0b:00.0".to_string(), 0x2330)]);
        assert_eq!(unreadable.len(), 1);
        assert!(unreadable[0].contains("0000:0c:00.0/class") && unreadable[0].contains("garbage"), "{unreadable:?}");
        std::fs::remove_dir_all(&sysfs).unwrap();
        assert_eq!(scan(&sysfs).unwrap(), (vec![], vec![]));
    }
}
